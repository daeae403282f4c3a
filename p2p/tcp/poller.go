package tcp

import (
	"fmt"
	"maps"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"tutti/internal/epoll"
	"tutti/p2p"
)

// poller wakes a sleeping proxy when one of its sockets becomes ready. The sockets are deliberately
// not in the Go runtime's own epoll set, which would wake an idle thread for every packet that
// arrives, even while the proxy polls the socket itself. Here a socket is watched only once after
// each arm (EPOLLONESHOT), and the poller's goroutine waits for all of them. A few times per peer
// timeout it also checks for hosts that vanished.
//
// It exists as long as the transport or one of its links does.
type poller struct {
	epoll   *epoll.Instance
	timeout time.Duration
	wake    func()
	done    chan struct{}

	mu      sync.Mutex
	refs    int
	last    uint64
	watched map[uint64]*stream
}

func newPoller(timeout time.Duration, wake func()) (*poller, error) {
	e, err := epoll.New()
	if err != nil {
		return nil, err
	}
	p := &poller{epoll: e, timeout: timeout, wake: wake, done: make(chan struct{}), refs: 1,
		watched: map[uint64]*stream{}}
	go p.run()
	return p, nil
}

func (p *poller) run() {
	defer close(p.done)
	sweep := p.timeout / 8
	p.epoll.WakeAt(time.Now().Add(sweep))
	var ids []uint64
	for {
		var err error
		if ids, err = p.epoll.Wait(ids[:0]); err != nil {
			return // closed
		}
		if len(ids) == 0 {
			p.mu.Lock()
			streams := slices.Collect(maps.Values(p.watched))
			p.mu.Unlock()
			for _, s := range streams {
				s.checkHost(p.timeout)
			}
			p.epoll.WakeAt(time.Now().Add(sweep))
			continue
		}
		wake := false
		p.mu.Lock()
		for _, id := range ids {
			if s := p.watched[id]; s != nil { // nil: closed meanwhile
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

func (e *epollKey) event(mask uint32) *unix.EpollEvent {
	e.ev = epoll.Event(mask|unix.EPOLLONESHOT, e.id)
	return &e.ev
}

// epollKey is a stream's registration with the poller.
type epollKey struct {
	id    uint64
	mask  uint32      // what the kernel was last asked for
	fired atomic.Bool // an event came since, so that the kernel stopped watching
	ev    unix.EpollEvent
}

// add registers a link's stream, disarmed, and retains the poller until remove.
func (p *poller) add(l *link) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.refs == 0 {
		return os.ErrClosed
	}
	s := &l.stream
	p.last++
	s.id = p.last
	s.fired.Store(true)
	if err := p.epoll.Control(unix.EPOLL_CTL_ADD, s.fd, s.event(0)); err != nil {
		return fmt.Errorf("%w: watch a socket: %w", p2p.ErrShortage, err)
	}
	p.watched[s.id] = s
	p.refs++
	return nil
}

// watch asks for one event of mask. The kernel checks the socket's state at once, so that earlier
// events are not lost.
func (p *poller) watch(s *stream, mask uint32) error {
	if s.mask&mask == mask && !s.fired.Load() {
		return nil // still watched since an earlier arm
	}
	s.mask = mask
	s.fired.Store(false)
	return p.epoll.Control(unix.EPOLL_CTL_MOD, s.fd, s.event(mask))
}

func (p *poller) remove(l *link) {
	p.mu.Lock()
	delete(p.watched, l.stream.id)
	p.epoll.Control(unix.EPOLL_CTL_DEL, l.stream.fd, nil)
	p.mu.Unlock()
}

// release undoes add or newPoller. The last one ends the goroutine and waits for it.
func (p *poller) release() {
	p.mu.Lock()
	p.refs--
	last := p.refs == 0
	p.mu.Unlock()
	if last {
		p.epoll.Close()
		<-p.done
	}
}
