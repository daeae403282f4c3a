package shm

import (
	"fmt"
	"os"

	"golang.org/x/sys/unix"

	"tutti/p2p"
)

// peerPidfd is SO_PEERPIDFD (Linux 6.5): a descriptor of the process at the other end of a socket.
const peerPidfd = 77

// process returns the process at the other end, as a file that can be waited for; nil if the system
// cannot provide it. The caller closes it.
func (s *socket) process() *os.File {
	fd, pid := -1, s.pid()
	s.raw.Control(func(sock uintptr) {
		if n, err := unix.GetsockoptInt(int(sock), unix.SOL_SOCKET, peerPidfd); err == nil {
			fd = n
		}
	})
	if fd < 0 && pid > 0 { // it has just authenticated, so that its number is not reused yet
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

// exited reports whether the process of a pidfd has ended.
func exited(pidfd int) bool {
	n, err := unix.Poll([]unix.PollFd{{Fd: int32(pidfd), Events: unix.POLLIN}}, 0)
	return err == nil && n > 0
}

// follow ends the connection when the process at the other end has ended. A child of that process
// may have inherited its socket, which then stays open. Data that has arrived by then can still be
// read. It returns when f is closed.
func (s *socket) follow(f *os.File) {
	raw, err := f.SyscallConn()
	if err != nil {
		return
	}
	ended := false
	raw.Read(func(fd uintptr) bool {
		ended = exited(int(fd))
		return ended
	})
	if ended {
		s.raw.Control(func(fd uintptr) { unix.Shutdown(int(fd), unix.SHUT_RD) })
	}
}

// hold takes the peer's lifeline, a descriptor that this end owns from now on. When it breaks, the
// link fails: the peer sends nothing more. Until its socket ends, its threads may still access this
// rank's memory.
func (l *link) hold(fd int) error {
	var st unix.Stat_t
	flags, err := unix.FcntlInt(uintptr(fd), unix.F_GETFL, 0)
	if err != nil || unix.Fstat(fd, &st) != nil || st.Mode&unix.S_IFMT != unix.S_IFIFO ||
		flags&(unix.O_ACCMODE|unix.O_NONBLOCK) != unix.O_RDONLY|unix.O_NONBLOCK {
		unix.Close(fd)
		return fmt.Errorf("%w: a lifeline that is not the reading end of a pipe", p2p.ErrProtocol)
	}
	f := os.NewFile(uintptr(fd), "lifeline")
	raw, err := f.SyscallConn()
	if err != nil {
		f.Close()
		return err
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	switch {
	case l.life != nil:
		f.Close()
		return fmt.Errorf("%w: a second lifeline", p2p.ErrProtocol)
	case l.closed:
		f.Close()
		return nil
	}
	l.life = f
	l.helpers.Go(func() {
		broken := false
		raw.Read(func(fd uintptr) bool {
			n, err := unix.Read(int(fd), make([]byte, 1))
			broken = n == 0 && err == nil
			return broken || err != unix.EAGAIN && err != unix.EINTR
		})
		if broken {
			l.Fail(fmt.Errorf("%v is ending: %w", l.peer, p2p.ErrPeerEnds), true)
			l.host.Wake()
		}
	})
	return nil
}
