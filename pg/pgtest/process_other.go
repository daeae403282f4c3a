//go:build !linux

package pgtest

import (
	"os"
	"syscall"
)

// Elsewhere a rank's own process can be ended, but not what it started, and it does not die with a test binary that is killed.

func ownGroup() *syscall.SysProcAttr { return nil }
func detached() *syscall.SysProcAttr { return nil }
func awaitExit(int) bool             { return false }

func kill(pid int) {
	if p, err := os.FindProcess(pid); err == nil {
		p.Kill()
	}
}

func signalName(s syscall.Signal) string { return s.String() }
func closeOnExec(int)                    {}
