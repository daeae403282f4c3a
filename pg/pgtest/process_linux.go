package pgtest

import (
	"syscall"

	"golang.org/x/sys/unix"
)

// ownGroup starts a process as the head of its own group, to be killed with all that it started,
// and to die with the thread that started it.
func ownGroup() *syscall.SysProcAttr {
	return &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
}

// detached starts a process as the head of its own group: signals from the terminal do not reach
// it.
func detached() *syscall.SysProcAttr { return &syscall.SysProcAttr{Setpgid: true} }

// awaitExit returns true when a child has ended, and does not reap it: until then its number, and
// its group's, are not another's.
func awaitExit(pid int) bool {
	for {
		err := unix.Waitid(unix.P_PID, pid, nil, unix.WEXITED|unix.WNOWAIT, nil)
		if err != unix.EINTR {
			return err == nil
		}
	}
}

// awaitStop returns when a child stands still, or has ended; it does not reap it.
func awaitStop(pid int) {
	for unix.Waitid(unix.P_PID, pid, nil, unix.WSTOPPED|unix.WEXITED|unix.WNOWAIT, nil) == unix.EINTR {
	}
}

// kill kills a process that is not reaped, and its group.
func kill(pid int) { syscall.Kill(-pid, syscall.SIGKILL) }

func signalName(s syscall.Signal) string { return unix.SignalName(s) }

func closeOnExec(fd int) { syscall.CloseOnExec(fd) }
