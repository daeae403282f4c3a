package shm

import (
	"os"

	"golang.org/x/sys/unix"
)

// peerPidfd is SO_PEERPIDFD (Linux 6.5): a descriptor of the process at the other end of a socket.
const peerPidfd = 77

// process returns the process at the other end, as a file that can be waited for; nil where the
// system does not say. The caller closes it.
func (s *socket) process() *os.File {
	fd, pid := -1, s.pid()
	s.raw.Control(func(sock uintptr) {
		if n, err := unix.GetsockoptInt(int(sock), unix.SOL_SOCKET, peerPidfd); err == nil {
			fd = n
		}
	})
	if fd < 0 && pid > 0 { // it has just proved itself, so that its number is not another's yet
		if n, err := unix.PidfdOpen(pid, 0); err == nil {
			fd = n
		}
	}
	if fd < 0 || pid == os.Getpid() {
		if fd >= 0 {
			unix.Close(fd)
		}
		return nil
	}
	unix.CloseOnExec(fd)
	unix.SetNonblock(fd, true)
	return os.NewFile(uintptr(fd), "pidfd")
}

// follow ends the connection when the process at the other end has: a child of that process may
// have inherited its socket, which then stays open. What has arrived by then can still be read. It
// returns when f is closed.
func (s *socket) follow(f *os.File) {
	raw, err := f.SyscallConn()
	if err != nil {
		return
	}
	ended := false
	raw.Read(func(fd uintptr) bool {
		n, err := unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, 0)
		ended = err == nil && n > 0
		return ended
	})
	if ended {
		s.raw.Control(func(fd uintptr) { unix.Shutdown(int(fd), unix.SHUT_RD) })
	}
}
