package trust

import (
	"errors"
	"fmt"
	"os"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"tutti/internal/files"
)

// poll tells which of many sockets have something to read. A goroutine that waits for it sleeps in
// the Go runtime's poller, on the descriptor of an epoll instance of its own.
type poll struct {
	file   *os.File
	raw    syscall.RawConn
	events []unix.EpollEvent
}

func newPoll() (*poll, error) {
	fd, err := unix.EpollCreate1(unix.EPOLL_CLOEXEC)
	if err != nil {
		return nil, fmt.Errorf("create an epoll instance: %w", files.Explain(err))
	}
	if err = unix.SetNonblock(fd, true); err != nil {
		unix.Close(fd)
		return nil, fmt.Errorf("create an epoll instance: %w", err)
	}
	p := &poll{file: os.NewFile(uintptr(fd), "epoll"), events: make([]unix.EpollEvent, 64)}
	if p.raw, err = p.file.SyscallConn(); err == nil {
		err = p.file.SetReadDeadline(time.Time{}) // fails unless the runtime's poller took the descriptor
	}
	if err != nil {
		p.file.Close()
		return nil, fmt.Errorf("poll an epoll instance: %w", err)
	}
	return p, nil
}

// add begins to watch a socket, under an id that is never used again.
func (p *poll) add(conn syscall.RawConn, id uint64) error {
	return p.control(conn, unix.EPOLL_CTL_ADD, &unix.EpollEvent{Events: unix.EPOLLIN | unix.EPOLLRDHUP,
		Fd: int32(uint32(id)), Pad: int32(uint32(id >> 32))})
}

// remove ends the watch of a socket that lives on. One that is closed is not watched any more.
func (p *poll) remove(conn syscall.RawConn) { p.control(conn, unix.EPOLL_CTL_DEL, nil) }

func (p *poll) control(conn syscall.RawConn, op int, e *unix.EpollEvent) error {
	var err error
	if e2 := p.raw.Control(func(epfd uintptr) {
		if e3 := conn.Control(func(fd uintptr) { err = unix.EpollCtl(int(epfd), op, int(fd), e) }); e3 != nil {
			err = e3
		}
	}); e2 != nil {
		return e2
	}
	return err
}

// wakeAt has wait return at t.
func (p *poll) wakeAt(t time.Time) { p.file.SetReadDeadline(t) }

// wait appends the ids of sockets that have something to read, or have ended, to ids. It returns
// without any at the time of wakeAt, which counts once. An error: closed.
func (p *poll) wait(ids []uint64) ([]uint64, error) {
	n := 0
	err := p.raw.Read(func(epfd uintptr) bool {
		n, _ = unix.EpollWait(int(epfd), p.events, 0) // EINTR: n is -1, and what is ready stays ready
		return n != 0
	})
	if errors.Is(err, os.ErrDeadlineExceeded) {
		p.file.SetReadDeadline(time.Time{})
		return ids, nil
	}
	if err != nil {
		return ids, err
	}
	for _, e := range p.events[:max(n, 0)] {
		ids = append(ids, uint64(uint32(e.Fd))|uint64(uint32(e.Pad))<<32)
	}
	return ids, nil
}

func (p *poll) close() { p.file.Close() }
