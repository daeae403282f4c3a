package tcp

import (
	"errors"
	"fmt"
	"os"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"tutti/internal/files"
)

// poller tells a sleeping proxy that one of its sockets moved. The sockets are deliberately not in
// the Go runtime's own epoll set: that wakes an idle thread for every packet that arrives, also
// while the proxy polls the socket itself. Here a socket is watched only once after each arm
// (EPOLLONESHOT); the poller's one goroutine sleeps in the runtime's poller on this epoll
// descriptor. It also looks, a few times per peer timeout, for hosts that vanished.
//
// It lives as long as the transport or one of its links does.
type poller struct {
	epfd    int
	file    *os.File // epfd's owner
	timeout time.Duration
	wake    func()
	done    chan struct{}

	mu      sync.Mutex
	refs    int
	last    uint64
	watched map[uint64]*stream
}

func newPoller(timeout time.Duration, wake func()) (*poller, error) {
	fd, err := unix.EpollCreate1(unix.EPOLL_CLOEXEC)
	if err != nil {
		return nil, fmt.Errorf("create an epoll instance: %w", files.Explain(err))
	}
	if err = unix.SetNonblock(fd, true); err != nil {
		unix.Close(fd)
		return nil, fmt.Errorf("create an epoll instance: %w", err)
	}
	p := &poller{epfd: fd, file: os.NewFile(uintptr(fd), "epoll"), timeout: timeout, wake: wake,
		done: make(chan struct{}), refs: 1, watched: map[uint64]*stream{}}
	raw, err := p.file.SyscallConn()
	if err == nil {
		err = p.file.SetReadDeadline(time.Time{}) // fails unless the runtime's poller took the descriptor
	}
	if err != nil {
		p.file.Close()
		return nil, fmt.Errorf("poll an epoll instance: %w", err)
	}
	go p.run(raw)
	return p, nil
}

func (p *poller) run(raw syscall.RawConn) {
	defer close(p.done)
	events := make([]unix.EpollEvent, 64)
	var n int
	wait := func(fd uintptr) bool {
		n, _ = unix.EpollWait(int(fd), events, 0) // EINTR: n is -1, and readiness is found again at the next round
		return n != 0
	}
	sweep := p.timeout / 8
	p.file.SetReadDeadline(time.Now().Add(sweep))
	for {
		err := raw.Read(wait)
		switch {
		case errors.Is(err, os.ErrDeadlineExceeded):
			p.mu.Lock()
			streams := make([]*stream, 0, len(p.watched))
			for _, s := range p.watched {
				streams = append(streams, s)
			}
			p.mu.Unlock()
			for _, s := range streams {
				s.checkHost(p.timeout)
			}
			p.file.SetReadDeadline(time.Now().Add(sweep))
			continue
		case err != nil:
			return // closed
		}
		wake := false
		p.mu.Lock()
		for _, e := range events[:max(n, 0)] {
			if s := p.watched[eventID(&e)]; s != nil { // nil: closed in the meantime
				s.fired.Store(true)
				wake = s.link.armed.Swap(false) || wake
			}
		}
		p.mu.Unlock()
		if wake {
			p.wake()
		}
	}
}

func eventID(e *unix.EpollEvent) uint64 { return uint64(uint32(e.Fd)) | uint64(uint32(e.Pad))<<32 }

func (e *epollKey) event(mask uint32) *unix.EpollEvent {
	e.ev = unix.EpollEvent{Events: mask | unix.EPOLLONESHOT, Fd: int32(uint32(e.id)), Pad: int32(uint32(e.id >> 32))}
	return &e.ev
}

// epollKey is a stream's registration with the poller.
type epollKey struct {
	id    uint64
	want  uint32      // what Arm is about to ask for
	mask  uint32      // what the kernel was last asked for
	fired atomic.Bool // an event came since, so that the kernel watches no more
	ev    unix.EpollEvent
}

// add registers a link's streams, disarmed, and holds the poller until remove.
func (p *poller) add(l *link) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.refs == 0 {
		return os.ErrClosed
	}
	for i := range l.streams {
		s := &l.streams[i]
		p.last++
		s.id = p.last
		s.fired.Store(true)
		if err := unix.EpollCtl(p.epfd, unix.EPOLL_CTL_ADD, s.fd, s.event(0)); err != nil {
			for j := range l.streams[:i] {
				delete(p.watched, l.streams[j].id)
				unix.EpollCtl(p.epfd, unix.EPOLL_CTL_DEL, l.streams[j].fd, nil)
			}
			return fmt.Errorf("watch a socket: %w", err)
		}
		p.watched[s.id] = s
	}
	p.refs++
	return nil
}

// watch asks for one event of mask. The kernel looks at the socket's state when it is asked, so
// that nothing which came before is lost.
func (p *poller) watch(s *stream, mask uint32) error {
	if s.mask&mask == mask && !s.fired.Load() {
		return nil // still watched since an earlier arm
	}
	s.mask = mask
	s.fired.Store(false)
	return unix.EpollCtl(p.epfd, unix.EPOLL_CTL_MOD, s.fd, s.event(mask))
}

func (p *poller) remove(l *link) {
	p.mu.Lock()
	for i := range l.streams {
		delete(p.watched, l.streams[i].id)
		unix.EpollCtl(p.epfd, unix.EPOLL_CTL_DEL, l.streams[i].fd, nil)
	}
	p.mu.Unlock()
}

// release gives back the hold of add or of newPoller; the last one ends the goroutine and waits for
// it.
func (p *poller) release() {
	p.mu.Lock()
	p.refs--
	last := p.refs == 0
	p.mu.Unlock()
	if last {
		p.file.Close()
		<-p.done
	}
}
