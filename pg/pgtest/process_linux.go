package pgtest

import (
	"syscall"

	"golang.org/x/sys/unix"
)

// detached starts a process as the head of its own group: signals from the terminal do not reach
// it.
func detached() *syscall.SysProcAttr { return &syscall.SysProcAttr{Setpgid: true} }

func signalName(s syscall.Signal) string { return unix.SignalName(s) }

func closeOnExec(fd int) { syscall.CloseOnExec(fd) }
