package handoff

import (
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"tutti/internal/files"
	"tutti/internal/ident"
	"tutti/internal/leaktest"
)

func TestMain(m *testing.M) { leaktest.Main(m) }

// memory returns the descriptor of a file with contents.
func memory(text string) (int, error) {
	fd, err := unix.MemfdCreate("handoff", unix.MFD_CLOEXEC)
	if err == nil {
		_, err = unix.Write(fd, []byte(text))
	}
	return fd, err
}

func contents(t *testing.T, fd int) string {
	t.Helper()
	b := make([]byte, 100)
	n, err := unix.Pread(fd, b, 0)
	if err != nil {
		t.Fatal(err)
	}
	return string(b[:n])
}

// leaks fails the test if descriptors are open in its end that were not in its begin.
func leaks(t *testing.T) {
	t.Helper()
	conn, err := net.ListenUnix("unix", &net.UnixAddr{Name: address(ident.New()), Net: "unix"})
	if err == nil { // the poller's own descriptors are there from now on
		err = conn.Close()
	}
	if err != nil {
		t.Fatal(err)
	}
	before, _ := files.Open()
	t.Cleanup(func() {
		if after, _ := files.Open(); after != before {
			t.Errorf("%d descriptors, %d before", after, before)
		}
	})
}

func TestTakesWhatTheTokenNames(t *testing.T) {
	leaks(t)
	known := NewToken()
	s, err := Serve(func(token Token) (int, error) {
		if token != known {
			return -1, errors.New("no such memory")
		}
		return memory("hello")
	})
	if err != nil {
		t.Fatal(err)
	}
	for range 20 {
		fd, err := Take(s.Name(), known)
		if err != nil {
			t.Fatal(err)
		}
		if got := contents(t, fd); got != "hello" {
			t.Errorf("the file has %q", got)
		}
		if flags, err := unix.FcntlInt(uintptr(fd), unix.F_GETFD, 0); err != nil || flags&unix.FD_CLOEXEC == 0 {
			t.Errorf("flags %d, %v: children of the process have it", flags, err)
		}
		unix.Close(fd)
	}
	var refused *RefusedError
	if fd, err := Take(s.Name(), NewToken()); !errors.As(err, &refused) || refused.Why != "no such memory" || fd != -1 {
		t.Errorf("an unknown token: %d, %v", fd, err)
	}
	if _, err := Take(s.Name()+1, known); !errors.Is(err, syscall.ECONNREFUSED) {
		t.Errorf("a server that is not there: %v", err)
	}
	if err := s.Close(); err != nil {
		t.Error(err)
	}
	if _, err := Take(s.Name(), known); !errors.Is(err, syscall.ECONNREFUSED) {
		t.Errorf("a server that was closed: %v", err)
	}
}

// A server is closed although a process has connected and asks for nothing.
func TestCloseEndsIdleConnections(t *testing.T) {
	leaks(t)
	s, err := Serve(func(Token) (int, error) { return -1, io.EOF })
	if err != nil {
		t.Fatal(err)
	}
	c, err := net.Dial("unix", address(s.Name()))
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if _, err := c.Write(make([]byte, 3)); err != nil {
		t.Fatal(err)
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	if n, err := c.Read(make([]byte, 1)); n != 0 || err == nil {
		t.Errorf("%d bytes, %v", n, err)
	}
}

// A process that does not answer, as one that is stopped, is waited for in bounded time.
func TestWaitIsBounded(t *testing.T) {
	leaks(t)
	limit = 50 * time.Millisecond
	defer func() { limit = Limit }()
	id := ident.New()
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: address(id), Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	if fd, err := Take(id, NewToken()); !errors.Is(err, os.ErrDeadlineExceeded) || fd != -1 {
		t.Errorf("%d, %v", fd, err)
	}
}

// Answers that are none give an error, and leave no descriptor.
func TestHostileServers(t *testing.T) {
	for name, answer := range map[string]func(c *net.UnixConn, fd int) error{
		"nothing":          func(*net.UnixConn, int) error { return nil },
		"no descriptor":    func(c *net.UnixConn, _ int) error { return write(c, []byte{granted}) },
		"two descriptors":  func(c *net.UnixConn, fd int) error { return write(c, []byte{granted}, fd, fd) },
		"many descriptors": func(c *net.UnixConn, fd int) error { return write(c, []byte{granted}, many(fd)...) },
		"refused with one": func(c *net.UnixConn, fd int) error { return write(c, []byte{refused}, fd) },
		"of another kind":  func(c *net.UnixConn, fd int) error { return write(c, []byte{9}, fd) },
		"an endless reason": func(c *net.UnixConn, _ int) error {
			return write(c, []byte("\x02"+strings.Repeat("x", 1<<16)))
		},
	} {
		t.Run(name, func(t *testing.T) {
			leaks(t)
			id := ident.New()
			l, err := net.ListenUnix("unix", &net.UnixAddr{Name: address(id), Net: "unix"})
			if err != nil {
				t.Fatal(err)
			}
			defer l.Close()
			done := make(chan error, 1)
			go func() { done <- serveOne(l, answer) }()
			fd, err := Take(id, NewToken())
			if err == nil || fd != -1 || len(err.Error()) > 2*maxReason {
				t.Errorf("%d, %v", fd, err)
			}
			if err := <-done; err != nil {
				t.Fatal(err)
			}
		})
	}
}

func many(fd int) (all []int) {
	for range 20 {
		all = append(all, fd)
	}
	return all
}

func write(c *net.UnixConn, b []byte, fds ...int) error {
	var rights []byte
	if len(fds) > 0 {
		rights = unix.UnixRights(fds...)
	}
	_, _, err := c.WriteMsgUnix(b, rights, nil)
	if errors.Is(err, syscall.EPIPE) || errors.Is(err, syscall.ECONNRESET) { // it has read enough
		err = nil
	}
	return err
}

func serveOne(l *net.UnixListener, answer func(c *net.UnixConn, fd int) error) error {
	c, err := l.AcceptUnix()
	if err != nil {
		return err
	}
	defer c.Close()
	if _, err := io.ReadFull(c, make([]byte, len(Token{}))); err != nil {
		return err
	}
	fd, err := memory("x")
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	return answer(c, fd)
}

// Many processes ask at once.
func TestManyAskAtOnce(t *testing.T) {
	leaks(t)
	s, err := Serve(func(token Token) (int, error) { return memory(fmt.Sprint(token[0])) })
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	all := make(chan error)
	for i := range 100 {
		go func() {
			fd, err := Take(s.Name(), Token{byte(i)})
			if err == nil {
				f := os.NewFile(uintptr(fd), "")
				b := make([]byte, 8)
				n, rerr := f.ReadAt(b, 0)
				if string(b[:n]) != fmt.Sprint(i) {
					err = fmt.Errorf("%d has %q, %v", i, b[:n], rerr)
				}
				f.Close()
			}
			all <- err
		}()
	}
	for range 100 {
		if err := <-all; err != nil {
			t.Error(err)
		}
	}
}
