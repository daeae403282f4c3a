// Package epoll tells which of many sockets have something to read, or room for more.
package epoll

import (
	"errors"
	"fmt"
	"os"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"tutti/internal/files"
)

// An Instance watches sockets. A goroutine that waits for it sleeps in the Go runtime's poller, on
// the descriptor of the instance, so that it holds no thread.
type Instance struct {
	file   *os.File
	raw    syscall.RawConn
	fd     int
	events []unix.EpollEvent
	n      int // of events that have come; negative: the call was interrupted

	// look gets events, and reports whether there is something to return. Functions that are made
	// for each call would be garbage.
	look    func(epfd uintptr) bool
	control func(epfd uintptr) // look without a result
}

// New returns an instance that watches nothing.
func New() (*Instance, error) {
	fd, err := unix.EpollCreate1(unix.EPOLL_CLOEXEC)
	if err != nil {
		return nil, fmt.Errorf("create an epoll instance: %w", files.Explain(err))
	}
	if err = unix.SetNonblock(fd, true); err != nil {
		unix.Close(fd)
		return nil, fmt.Errorf("create an epoll instance: %w", err)
	}
	p := &Instance{file: os.NewFile(uintptr(fd), "epoll"), fd: fd, events: make([]unix.EpollEvent, 64)}
	p.look = func(epfd uintptr) bool {
		p.n, _ = unix.EpollWait(int(epfd), p.events, 0) // EINTR: what is ready stays ready
		return p.n != 0
	}
	p.control = func(epfd uintptr) { p.look(epfd) }
	if p.raw, err = p.file.SyscallConn(); err == nil {
		err = p.file.SetReadDeadline(time.Time{}) // fails unless the runtime's poller took the descriptor
	}
	if err != nil {
		p.file.Close()
		return nil, fmt.Errorf("poll an epoll instance: %w", err)
	}
	return p, nil
}

// Event returns what asks for the events of mask, to be reported with id.
func Event(mask uint32, id uint64) unix.EpollEvent {
	return unix.EpollEvent{Events: mask, Fd: int32(uint32(id)), Pad: int32(uint32(id >> 32))}
}

// Control adds, changes or removes the watch of a descriptor, as op says. The caller sees to it
// that neither the descriptor nor p is closed meanwhile. One that is closed is not watched any
// more.
func (p *Instance) Control(op, fd int, e *unix.EpollEvent) error {
	return unix.EpollCtl(p.fd, op, fd, e)
}

// ControlConn is Control for a connection, and safe beside Close of either.
func (p *Instance) ControlConn(op int, conn syscall.RawConn, e *unix.EpollEvent) error {
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

// WakeAt has Wait return at t. It counts once.
func (p *Instance) WakeAt(t time.Time) { p.file.SetReadDeadline(t) }

// Wait appends to ids those of the events that have come. It returns without any at the time of
// WakeAt. After Close it returns an error. One goroutine at a time may wait.
func (p *Instance) Wait(ids []uint64) ([]uint64, error) {
	err := p.raw.Read(p.look)
	if errors.Is(err, os.ErrDeadlineExceeded) {
		p.file.SetReadDeadline(time.Time{})
		return ids, nil
	}
	if err != nil {
		return ids, err
	}
	return p.append(ids), nil
}

// Look is Wait without waiting. The goroutine that waits may call it.
func (p *Instance) Look(ids []uint64) ([]uint64, error) {
	if err := p.raw.Control(p.control); err != nil {
		return ids, err
	}
	return p.append(ids), nil
}

// append appends the ids of the events that have come.
func (p *Instance) append(ids []uint64) []uint64 {
	for _, e := range p.events[:max(p.n, 0)] {
		ids = append(ids, uint64(uint32(e.Fd))|uint64(uint32(e.Pad))<<32)
	}
	return ids
}

// Close ends Wait and releases the instance.
func (p *Instance) Close() error { return p.file.Close() }
