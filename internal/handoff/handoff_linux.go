package handoff

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"tutti/internal/files"
	"tutti/internal/ident"
)

// Limit bounds how long a process waits for the other one.
const Limit = 5 * time.Second

// limit is Limit, or what a test wants.
var limit = Limit

// A request is a Token. The answer is granted with a descriptor, or refused and the reason. Then
// the server closes the connection.
const (
	granted = 1
	refused = 2
)

// maxReason is the most bytes of a reason that a process takes.
const maxReason = 512

// ErrNotOne says that a message had another number of descriptors than one. It is wrapped.
var ErrNotOne = errors.New("not one descriptor with a message")

func address(name uint64) string { return fmt.Sprintf("@tutti-handoff-%016x", name) }

// A Server gives descriptors to other processes.
type Server struct {
	name   uint64
	listen *net.UnixListener
	give   func(Token) (fd int, err error)
	served sync.WaitGroup

	mu     sync.Mutex
	closed bool
	conns  map[*net.UnixConn]struct{}
}

// Serve returns a server. give returns the descriptor for a token, which the server closes when it
// has sent it. It is called by several goroutines.
func Serve(give func(Token) (fd int, err error)) (*Server, error) {
	s := &Server{name: ident.New(), give: give, conns: map[*net.UnixConn]struct{}{}}
	var err error
	if s.listen, err = net.ListenUnix("unix", &net.UnixAddr{Name: address(s.name), Net: "unix"}); err != nil {
		return nil, fmt.Errorf("handoff: %w", files.Explain(err))
	}
	s.served.Go(s.accept)
	return s, nil
}

// Name is what other processes find the server by.
func (s *Server) Name() uint64 { return s.name }

// Close ends the server. Descriptors that were given stay open in the processes that have them.
func (s *Server) Close() error {
	s.mu.Lock()
	s.closed = true
	for c := range s.conns {
		c.Close()
	}
	s.mu.Unlock()
	err := s.listen.Close()
	s.served.Wait()
	return err
}

func (s *Server) accept() {
	for {
		c, err := s.listen.AcceptUnix()
		switch {
		case errors.Is(err, net.ErrClosed):
			return
		case err != nil: // no descriptor is free
			time.Sleep(time.Millisecond)
			continue
		}
		s.mu.Lock()
		if s.closed {
			c.Close()
		} else {
			s.conns[c] = struct{}{}
			s.served.Go(func() { s.answer(c) })
		}
		s.mu.Unlock()
	}
}

// answer serves one connection.
func (s *Server) answer(c *net.UnixConn) {
	defer func() {
		s.mu.Lock()
		delete(s.conns, c)
		s.mu.Unlock()
		c.Close()
	}()
	c.SetDeadline(time.Now().Add(limit))
	var t Token
	if ident.CheckUser(c, uint32(os.Geteuid())) != nil {
		return
	}
	if _, err := io.ReadFull(c, t[:]); err != nil {
		return
	}
	fd, err := s.give(t)
	if err != nil {
		c.Write(append([]byte{refused}, err.Error()...))
		return
	}
	c.WriteMsgUnix([]byte{granted}, unix.UnixRights(fd), nil)
	unix.Close(fd)
}

// A RefusedError is a server's reason.
type RefusedError struct{ Why string }

func (e *RefusedError) Error() string { return "the owner refuses: " + e.Why }

// Take returns the descriptor for a token of the server with a name, which the caller closes. It
// waits at most for Limit. An error that wraps syscall.ECONNREFUSED says that there is no server of
// this name, nor the process that has had it.
func Take(name uint64, t Token) (fd int, err error) {
	fd, err = take(name, t)
	if err != nil {
		return -1, fmt.Errorf("handoff: %w", files.Explain(err))
	}
	return fd, nil
}

func take(name uint64, t Token) (fd int, err error) {
	deadline := time.Now().Add(limit)
	dialer := net.Dialer{Deadline: deadline} // connecting waits if many do
	conn, err := dialer.DialContext(context.Background(), "unix", address(name))
	if err != nil {
		return -1, err
	}
	c := conn.(*net.UnixConn)
	defer c.Close()
	if err := ident.CheckUser(c, uint32(os.Geteuid())); err != nil {
		return -1, err
	}
	c.SetDeadline(deadline)
	if _, err := c.Write(t[:]); err != nil {
		return -1, err
	}
	var kind [1]byte
	oob := make([]byte, 64) // room for more descriptors than one, which are closed
	n, oobn, flags, _, err := c.ReadMsgUnix(kind[:], oob)
	if err != nil {
		return -1, err
	}
	fd, err = Received(oob[:oobn], flags)
	switch {
	case err != nil:
		return -1, err
	case n == 1 && kind[0] == granted && fd >= 0:
		return fd, nil
	case fd >= 0:
		unix.Close(fd)
	case n == 1 && kind[0] == refused:
		why, err := io.ReadAll(io.LimitReader(c, maxReason))
		if err != nil {
			return -1, err
		}
		return -1, &RefusedError{string(why)}
	case n == 0:
		return -1, io.ErrUnexpectedEOF
	}
	return -1, errors.New("an answer of another kind")
}

// Received returns the descriptor in the control data of a message, -1 if there is none. flags are
// those of recvmsg. It closes all of several, and returns an error that wraps ErrNotOne.
func Received(oob []byte, flags int) (fd int, err error) {
	if len(oob) == 0 && flags&unix.MSG_CTRUNC == 0 {
		return -1, nil
	}
	var fds []int
	cmsgs, err := unix.ParseSocketControlMessage(oob)
	for i := range cmsgs {
		if got, e := unix.ParseUnixRights(&cmsgs[i]); e == nil {
			fds = append(fds, got...)
		}
	}
	if err == nil && len(fds) == 1 && flags&unix.MSG_CTRUNC == 0 {
		return fds[0], nil
	}
	for _, fd := range fds {
		unix.Close(fd)
	}
	// The kernel also sets this when this process may not take a descriptor.
	if flags&unix.MSG_CTRUNC != 0 && len(fds) == 0 {
		if files.Full() {
			return -1, files.Explain(fmt.Errorf("a descriptor from the peer could not be taken: %w", unix.EMFILE))
		}
		return -1, errors.New("a descriptor from the peer could not be taken, although this process may have more: " +
			"a security module may forbid it")
	}
	return -1, fmt.Errorf("%w, but %d", ErrNotOne, len(fds))
}
