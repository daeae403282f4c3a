package shm

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"net"
	"runtime"
	"sync"

	"golang.org/x/sys/unix"

	"tutti/p2p"
	"tutti/p2p/ring"
)

// link is one end; the methods of frames are the ring's. It implements p2p.Mapper.
type link struct {
	ring.End
	host    p2p.Host
	peer    p2p.Identity
	exports *exports
	sock    *socket
	down    chan struct{} // closed when the link failed or was closed
	asking  chan struct{} // held (full) while a request is under way

	mu      sync.Mutex
	changed sync.Cond
	closed  bool // Close was called
	ended   bool // the reader has
	away    bool // the reader is in a call of the host that may wait for whoever calls Close
	request *request
	lastReq uint32
	maps    map[mapKey][]byte
	once    sync.Once
	err     error // of Close
}

type mapKey struct {
	id  uint64
	gen uint32
}

// request is the one that is under way.
type request struct {
	no     uint32
	given  bool        // its asker has gone
	answer chan answer // room for one
}

type answer struct {
	fd int // negative: refused
}

// newLink makes an end of the channel in memory mem (shared, whole pages) and starts its reader. It owns conn and mem from then on.
func newLink(host p2p.Host, peer p2p.Identity, x *exports, sock *socket, mem []byte, data, side int) (*link, error) {
	l := &link{host: host, peer: peer, exports: x, sock: sock, down: make(chan struct{}), asking: make(chan struct{}, 1), maps: map[mapKey][]byte{}}
	l.changed.L = &l.mu
	if err := l.Init(mem[:ring.Bytes(data)], data, side, sock.wake); err != nil {
		unmap(mem)
		sock.conn.Close()
		return nil, err
	}
	go l.read()
	return l, nil
}

// SleepSeldom implements p2p.SeldomSleeper: small frames become faster, and going to sleep slower by some microseconds a link, where both ends ask for it.
func (l *link) SleepSeldom() { l.Asymmetric() }

// read handles the peer's messages until the connection ends.
func (l *link) read() {
	err := l.serve()
	l.sock.drop()
	switch {
	case errors.Is(err, p2p.ErrProtocol):
		err = fmt.Errorf("%v: %w", l.peer, err)
		l.Fail(err, false)
	case errors.Is(err, io.EOF), errors.Is(err, unix.ECONNRESET):
		l.Fail(fmt.Errorf("%v closed its link or ended: %w", l.peer, p2p.ErrPeerGone), true)
	default: // net.ErrClosed if it is our own Close, which has called Fail first
		l.Fail(fmt.Errorf("%v: %w: %w", l.peer, p2p.ErrPeerGone, err), true)
	}
	l.sock.conn.Close() // a peer that broke the rules learns it so
	close(l.down)
	l.mu.Lock()
	l.ended = true
	l.changed.Broadcast()
	l.mu.Unlock()
	l.host.Wake()
}

func (l *link) serve() error {
	for {
		m, fd, err := l.sock.next()
		if err != nil {
			return err
		}
		switch m.kind {
		case msgBell:
			l.Answer()
			l.host.Wake()
		case msgAsk:
			err = l.answer(m)
		case msgGrant, msgDeny:
			err = l.take(m.req, fd)
		default:
			if fd >= 0 {
				unix.Close(fd)
			}
			err = fmt.Errorf("%w: message of kind %d on a link", p2p.ErrProtocol, m.kind)
		}
		if err != nil {
			return err
		}
	}
}

// answer serves a peer's request. It needs no memory that outlives it: a flood of requests is answered one by one.
func (l *link) answer(m message) error {
	l.mu.Lock()
	if l.closed {
		l.mu.Unlock()
		return net.ErrClosed
	}
	l.away = true
	l.changed.Broadcast()
	l.mu.Unlock()
	_, err := l.host.Region(m.id) // is it shared? What it is, the exports say
	l.mu.Lock()
	l.away = false
	l.mu.Unlock()
	if err == nil {
		err = l.exports.pass(m.id, m.size, m.gen, func(fd int) error { return l.sock.send(message{kind: msgGrant, req: m.req}, fd) })
		if !errors.Is(err, p2p.ErrNoRegion) {
			return err
		}
	}
	return l.sock.send(message{kind: msgDeny, req: m.req}, -1)
}

// take hands the answer to request no to who asked.
func (l *link) take(no uint32, fd int) error {
	l.mu.Lock()
	q := l.request
	if q == nil || q.no != no {
		l.mu.Unlock()
		if fd >= 0 {
			unix.Close(fd)
		}
		return fmt.Errorf("%w: answer to request %d, which was not asked", p2p.ErrProtocol, no)
	}
	l.request = nil
	if q.given && fd >= 0 {
		unix.Close(fd)
	} else if !q.given {
		q.answer <- answer{fd}
	}
	l.mu.Unlock()
	<-l.asking
	return nil
}

// Map implements p2p.Mapper. One request at a time is under way on a link; others wait for it, each at most until its ctx ends.
func (l *link) Map(ctx context.Context, d p2p.RegionDesc) ([]byte, error) {
	if mem, err := l.mapped(d); mem != nil || err != nil {
		return mem, err
	}
	if d.Size == 0 || d.Size > math.MaxInt-uint64(pages(1)) {
		return nil, l.noRegion(d, "a size that no region has")
	}
	select {
	case l.asking <- struct{}{}:
	case <-ctx.Done():
		return nil, fmt.Errorf("mapping region %#x of %v: %w", d.ID, l.peer, ctx.Err())
	case <-l.down:
		return nil, l.failure()
	}
	if mem, err := l.mapped(d); mem != nil || err != nil { // who asked before us may have wanted the same
		<-l.asking
		return mem, err
	}
	l.mu.Lock()
	l.lastReq++
	q := &request{no: l.lastReq, answer: make(chan answer, 1)}
	l.request = q
	l.mu.Unlock()
	if err := l.sock.send(message{kind: msgAsk, req: q.no, id: d.ID, size: d.Size, gen: d.Generation}, -1); err != nil {
		l.Fail(fmt.Errorf("asking %v for region %#x: %w: %w", l.peer, d.ID, p2p.ErrPeerGone, err), true)
		l.sock.conn.Close() // and so ends the reader
		return nil, l.failure()
	}
	select {
	case a := <-q.answer:
		return l.enter(d, a.fd)
	case <-ctx.Done():
		l.abandon(q)
		return nil, fmt.Errorf("waiting for region %#x of %v: %w", d.ID, l.peer, ctx.Err())
	case <-l.down:
		l.abandon(q)
		return nil, l.failure()
	}
}

func (l *link) failure() error {
	if err := l.Err(); err != nil {
		return err
	}
	return fmt.Errorf("%v: %w", l.peer, p2p.ErrPeerGone)
}

func (l *link) noRegion(d p2p.RegionDesc, why string) error {
	return fmt.Errorf("region %#x of %v, generation %d, %d bytes: %w: %s", d.ID, l.peer, d.Generation, d.Size, p2p.ErrNoRegion, why)
}

// mapped looks in the cache.
func (l *link) mapped(d p2p.RegionDesc) ([]byte, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed {
		return nil, l.Err()
	}
	mem := l.maps[mapKey{d.ID, d.Generation}]
	if mem != nil && uint64(len(mem)) != d.Size {
		return nil, l.noRegion(d, fmt.Sprintf("it has %d bytes", len(mem)))
	}
	return mem, nil
}

// enter maps what the peer granted and remembers it.
func (l *link) enter(d p2p.RegionDesc, fd int) ([]byte, error) {
	if fd < 0 {
		return nil, l.noRegion(d, "refused by the peer")
	}
	defer unix.Close(fd)
	n := pages(int(d.Size))
	if err := checkMemory(fd, n); err != nil {
		return nil, fmt.Errorf("region %#x of %v: %w", d.ID, l.peer, err)
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed {
		return nil, l.Err()
	}
	mem, err := mapMemory(fd, n)
	if err != nil {
		return nil, fmt.Errorf("region %#x of %v: %w", d.ID, l.peer, err)
	}
	unix.Madvise(mem, unix.MADV_HUGEPAGE)
	mem = mem[:d.Size:d.Size]
	l.maps[mapKey{d.ID, d.Generation}] = mem
	return mem, nil
}

// abandon gives up waiting for q's answer, which may have come meanwhile.
func (l *link) abandon(q *request) {
	l.mu.Lock()
	q.given = true
	l.mu.Unlock()
	select {
	case a := <-q.answer:
		if a.fd >= 0 {
			unix.Close(a.fd)
		}
	default:
	}
}

// Close implements p2p.Link. It may be called while other methods run: the rings' memory is given up, but its addresses stay readable until the link is forgotten.
// Mapped regions go at once, and must not be in use.
func (l *link) Close() error {
	l.once.Do(func() {
		l.Fail(fmt.Errorf("link to %v: %w", l.peer, p2p.ErrClosed), false)
		l.mu.Lock()
		l.closed = true
		l.mu.Unlock()
		l.sock.conn.Close()
		l.mu.Lock()
		// The reader may be in Host.Region and wait there for a lock of our caller; it touches nothing of ours when it comes back.
		for !l.ended && !l.away {
			l.changed.Wait()
		}
		maps := l.maps
		l.maps = nil
		l.mu.Unlock()
		var errs []error
		for _, mem := range maps {
			errs = append(errs, unmap(mem))
		}
		mem := l.Memory()
		errs = append(errs, blank(mem))
		runtime.AddCleanup(l, func(mem []byte) { unmap(mem) }, mem)
		l.err = errors.Join(errs...)
	})
	return l.err
}
