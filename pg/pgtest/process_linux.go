package pgtest

import (
	"syscall"

	"golang.org/x/sys/unix"
)

// detached starts a process as the leader of its own group, so that signals of the terminal do not
// reach it.
func detached() *syscall.SysProcAttr { return &syscall.SysProcAttr{Setpgid: true} }

func signalName(s syscall.Signal) string { return unix.SignalName(s) }

func closeOnExec(fd int) { syscall.CloseOnExec(fd) }
