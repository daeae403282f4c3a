package tcp

import (
	"fmt"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"tutti/internal/socket"
)

// stream is the connection of a link. All methods need link.mu, which keeps the descriptor open.
type stream struct {
	link   *link
	fd     int
	full   bool   // a write found no room: the next frame waits until the kernel has plenty
	kept   []byte // kept[sent:] belongs to the stream and was not yet written
	sent   int
	tx, rx socket.Vector
	pfd    [1]unix.PollFd
	epollKey
}

// send and recv move one piece of memory; 0 and no error from recv is the end of the stream.
func (s *stream) send(b []byte) (int, syscall.Errno) { return socket.Send(s.fd, b) }
func (s *stream) recv(b []byte) (int, syscall.Errno) { return socket.Recv(s.fd, b) }

// send2 and recv2 move two pieces in one call.
func (s *stream) send2(a, b []byte) (int, syscall.Errno) { return s.tx.Send(s.fd, a, b) }
func (s *stream) recv2(a, b []byte) (int, syscall.Errno) { return s.rx.Recv(s.fd, a, b) }

// copyLimit is the largest payload that is copied behind its header for one plain send, which is
// cheaper than a vector.
const copyLimit = 2 << 10

// put writes head and payload as far as there is room and keeps the rest. Without any room it takes
// nothing and returns false.
func (s *stream) put(head, payload []byte) (bool, syscall.Errno) {
	var n int
	var e syscall.Errno
	switch {
	case len(payload) == 0:
		n, e = s.send(head)
	case len(payload) <= copyLimit && cap(head)-len(head) >= len(payload):
		n, e = s.send(append(head, payload...)) // uses the link's scratch memory
	default:
		n, e = s.send2(head, payload)
	}
	if e == unix.EAGAIN {
		s.full = true
		return false, 0
	} else if e != 0 {
		return false, e
	}
	if n < len(head)+len(payload) {
		s.full = true
		s.sent = 0
		s.reserve(len(head) + len(payload))
		if n < len(head) {
			s.kept = append(s.kept, head[n:]...)
			n = len(head)
		}
		s.kept = append(s.kept, payload[n-len(head):]...)
	}
	return true, 0
}

// keptFrame is the longest frame whose rest is kept in less memory than that of the link's longest.
const keptFrame = 512 << 10

// reserve makes room to keep n bytes of a frame, at most twice in the stream's life.
func (s *stream) reserve(n int) {
	if n <= cap(s.kept) {
		return
	}
	room := headerSpace + s.link.maxFrame
	if short := headerSpace + keptFrame; n <= short {
		room = min(room, short)
	}
	s.kept = make([]byte, 0, room)
}

// flush writes what put kept; true: nothing is left.
func (s *stream) flush() (bool, syscall.Errno) {
	for s.sent < len(s.kept) {
		n, e := s.send(s.kept[s.sent:])
		if e == unix.EAGAIN {
			return false, 0
		} else if e != 0 {
			return false, e
		}
		s.sent += n
	}
	s.kept, s.sent = s.kept[:0], 0
	return true, 0
}

// room reports whether a new frame may be tried. After a write that found no room it waits for the
// kernel to report a good part of the socket's buffer free: otherwise frames would be sent in small
// pieces, and every unsent rest has to be copied.
func (s *stream) room() bool {
	if !s.full {
		return true
	}
	s.pfd[0] = unix.PollFd{Fd: int32(s.fd), Events: unix.POLLOUT}
	n, err := unix.Poll(s.pfd[:], 0)
	s.full = err != nil || n == 0
	return !s.full
}

// checkHost fails the link if the peer's host has answered nothing for timeout: see socket.Silence.
func (s *stream) checkHost(timeout time.Duration) {
	l := s.link
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed.Load() || l.failure.Load() != nil {
		return
	}
	if silent := socket.Silence(s.fd); silent >= timeout {
		l.fail(gone(fmt.Sprintf("its host has answered nothing for %v", silent)))
		unix.Shutdown(s.fd, unix.SHUT_RDWR) // wakes goroutines that sleep on it
	}
}

// owes reports whether something that put took was not written, or the peer's kernel has not
// acknowledged it.
func (s *stream) owes() bool {
	n, err := unix.IoctlGetInt(s.fd, unix.SIOCOUTQ)
	return err == nil && n > 0 || s.sent < len(s.kept)
}

// finish ends the sending direction, and waits until the peer's kernel has acknowledged everything,
// or deadline. Closing a socket at once would send a reset if there is unread data or more arrives,
// and discard what is in flight.
func (s *stream) finish(deadline time.Time) {
	shut := false
	for pause := 20 * time.Microsecond; ; pause = min(2*pause, 5*time.Millisecond) {
		if !shut {
			done, e := s.flush()
			if e != 0 {
				return
			}
			if done {
				unix.Shutdown(s.fd, unix.SHUT_WR)
				shut = true
			}
		}
		s.discard()
		if n, err := unix.IoctlGetInt(s.fd, unix.SIOCOUTQ); err != nil || shut && n == 0 ||
			!time.Now().Before(deadline) {
			return
		}
		time.Sleep(pause)
	}
}

// discard drops what has arrived, without copying it, up to a few megabytes.
func (s *stream) discard() {
	for range 64 {
		n, e := socket.Discard(s.fd, 1<<20)
		if e != 0 || n == 0 {
			return
		}
	}
}
