package shm

import (
	"errors"
	"fmt"
	"io"
	"net"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"

	"tutti/internal/handoff"
	"tutti/internal/ident"
	"tutti/p2p"
)

// socket passes messages over a connected Unix stream socket. next is for one goroutine; the other
// methods for any. Sending never blocks.
type socket struct {
	conn *net.UnixConn
	raw  syscall.RawConn
	ring [messageSize]byte // the bell's message
	bell func(fd uintptr) bool

	pull func(fd uintptr) bool // one recvmsg into in and oob; parks until there is data
	hdr  unix.Msghdr
	iov  unix.Iovec
	in   [16 * messageSize]byte
	have int
	oob  [32]byte // room for a descriptor, and for one or two too many
	n    int
	err  error
	file int   // received, and not yet assigned to a message; -1: none
	lost error // in the place of file: why it could not be taken
}

func newSocket(conn *net.UnixConn) (*socket, error) {
	raw, err := conn.SyscallConn()
	if err != nil {
		return nil, err
	}
	s := &socket{conn: conn, raw: raw, ring: message{kind: msgBell}.encode(), file: -1}
	// Both are made once, so that sleeping and waking allocate nothing.
	s.bell = func(fd uintptr) bool {
		unix.RawSyscall6(unix.SYS_SENDTO, fd, uintptr(unsafe.Pointer(&s.ring)), messageSize,
			unix.MSG_DONTWAIT|unix.MSG_NOSIGNAL, 0, 0)
		return true
	}
	s.pull = func(fd uintptr) bool {
		for {
			s.iov.Base = &s.in[s.have]
			s.iov.SetLen(len(s.in) - s.have)
			s.hdr = unix.Msghdr{Iov: &s.iov, Control: &s.oob[0]}
			s.hdr.SetIovlen(1)
			s.hdr.SetControllen(len(s.oob))
			n, _, errno := unix.RawSyscall(unix.SYS_RECVMSG, fd, uintptr(unsafe.Pointer(&s.hdr)),
				unix.MSG_DONTWAIT|unix.MSG_CMSG_CLOEXEC)
			switch errno {
			case 0:
				s.n, s.err = int(n), nil
				return true
			case unix.EINTR:
			case unix.EAGAIN:
				return false
			default:
				s.err = errno
				return true
			}
		}
	}
	return s, nil
}

// wake sends a bell. It is not lost for lack of room: a bell is sent only after the one before was
// answered (see ring.End), and requests are limited, so that a socket of the usual size fills up
// only if the peer floods this rank with requests and does not read.
func (s *socket) wake() { s.raw.Write(s.bell) }

// errFull says that a socket has no room: the peer does not read.
var errFull = errors.New("the peer does not read its messages")

// send sends a message, with a descriptor unless fd is negative. It does not block.
func (s *socket) send(m message, fd int) error {
	b := m.encode()
	var rights []byte
	if fd >= 0 {
		rights = unix.UnixRights(fd)
	}
	var n int
	var err error
	if e := s.raw.Write(func(sock uintptr) bool {
		for {
			n, err = unix.SendmsgN(int(sock), b[:], rights, nil, unix.MSG_DONTWAIT|unix.MSG_NOSIGNAL)
			if !errors.Is(err, unix.EINTR) {
				return true
			}
		}
	}); e != nil {
		return e
	}
	if err == nil && n != len(b) {
		err = io.ErrShortWrite
	}
	if errors.Is(err, unix.EAGAIN) || errors.Is(err, io.ErrShortWrite) {
		return errFull
	}
	return err
}

// next waits for a message. fd is the descriptor that comes with it, which the caller owns, or -1.
// untaken says why this end could not take that, and wraps p2p.ErrShortage. io.EOF: the peer closed
// or ended.
func (s *socket) next() (m message, fd int, untaken, err error) {
	for s.have < messageSize {
		if s.came() && s.have == 0 {
			return m, -1, nil, fmt.Errorf("%w: a descriptor without a message", p2p.ErrProtocol)
		}
		if err := s.raw.Read(s.pull); err != nil {
			return m, -1, nil, err
		}
		if s.err != nil {
			return m, -1, nil, s.err
		}
		if err := s.collect(); err != nil {
			return m, -1, nil, err
		}
		if s.n == 0 {
			return m, -1, nil, io.EOF
		}
		s.have += s.n
	}
	m, err = decodeMessage((*[messageSize]byte)(s.in[:]))
	if err != nil {
		return m, -1, nil, err
	}
	s.have = copy(s.in[:], s.in[messageSize:s.have])
	fd = -1
	if m.hasFile() {
		if !s.came() {
			return m, -1, nil, fmt.Errorf("%w: message of kind %d without a descriptor", p2p.ErrProtocol, m.kind)
		}
		fd, untaken = s.file, s.lost
		s.file, s.lost = -1, nil
	}
	return m, fd, untaken, nil
}

// came reports whether a descriptor has come that is not yet assigned to a message.
func (s *socket) came() bool { return s.file >= 0 || s.lost != nil }

// collect stores the descriptors of the last recvmsg, or why they could not be taken.
func (s *socket) collect() error {
	if s.hdr.Controllen == 0 && s.hdr.Flags&unix.MSG_CTRUNC == 0 {
		return nil
	}
	fd, err := handoff.Received(s.oob[:s.hdr.Controllen], int(s.hdr.Flags))
	if s.came() && !errors.Is(err, handoff.ErrNotOne) {
		if err == nil {
			unix.Close(fd)
		}
		err = fmt.Errorf("%w: the one before came without", handoff.ErrNotOne)
	}
	switch {
	case err == nil:
		s.file = fd
	case errors.Is(err, handoff.ErrNotOne):
		return fmt.Errorf("%w: %w", p2p.ErrProtocol, err)
	default:
		s.lost = fmt.Errorf("%w: %w", p2p.ErrShortage, err)
	}
	return nil
}

// pid returns the peer's process, 0 if it is unknown.
func (s *socket) pid() int {
	cred, err := ident.Peer(s.raw)
	if err != nil {
		return 0
	}
	return int(cred.Pid)
}

// drop closes a descriptor without a message. After the last next.
func (s *socket) drop() {
	if s.file >= 0 {
		unix.Close(s.file)
		s.file = -1
	}
}

// checkPeer refuses a connection from another user.
func checkPeer(conn *net.UnixConn, uid uint32) error {
	err := ident.CheckUser(conn, uid)
	if errors.Is(err, ident.ErrUser) {
		return fmt.Errorf("%w: %w", p2p.ErrAuth, err)
	}
	return err
}
