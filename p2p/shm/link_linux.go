package shm

import (
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"runtime"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"tutti/internal/lifeline"
	"tutti/p2p"
	"tutti/p2p/ring"
	"tutti/p2p/rma"
)

// link is one end of a link. The ring implements the methods for frames, the Copier those for
// remote memory. It implements p2p.Mapper, p2p.ProcessReader and p2p.OneSided.
type link struct {
	ring.End
	rma.Copier
	host    p2p.Host
	peer    p2p.Identity
	exports *exports
	sock    *socket
	process *os.File      // of the peer; nil: it is this process, or unknown
	down    chan struct{} // closed when the reader has ended
	reading reading       // of the peer's plain memory

	mu      sync.Mutex
	changed sync.Cond
	closed  bool // Close was called
	ended   bool // the reader has ended
	away    bool // the reader is in a call of the host that may wait for the caller of Close
	imports map[importKey]*imports
	asking  int       // number of imports without an answer
	life    *os.File  // the peer's lifeline; nil: it has sent none
	unsent  []message // the socket had no room for these; a goroutine sends them
	helpers sync.WaitGroup
	once    sync.Once
	err     error // of Close

	// Remote memory: see onesided_linux.go.
	whole  []byte // the rings and the words
	words  words
	side   int
	pid    int         // of the peer, 0: not known
	ceased atomic.Bool // the peer has ended: it does not access this rank's memory
	heard  uint64      // the peer's news when Arm last read it
	told   uint64      // news of this end
	spare  []*target
	stale  atomic.Bool // the peer has freed a region

	stopped atomic.Bool // this end accesses the peer's memory no more
	raised  uint64      // the busy word's value; cease reads it
	knowing sync.Mutex  // held while recent changes
	recent  [4]*target  // of PutNow
	next    int
}

// importKey names a region of the peer, and whether it is mapped for writing.
type importKey struct {
	id    uint64
	store bool
}

// imports is the state of a region of the peer: requested, mapped, or failed with err.
type imports struct {
	mapping *p2p.Mapping
	err     error
}

// maxAsking bounds the requests without an answer, so that they never fill the peer's socket.
const maxAsking = 32

// newLink makes an end of the channel in memory mem (shared, whole pages) and starts its reader. It
// owns conn and mem.
func newLink(host p2p.Host, peer p2p.Identity, x *exports, sock *socket, mem []byte, data, side int) (*link, error) {
	l := &link{host: host, peer: peer, exports: x, sock: sock, down: make(chan struct{}),
		imports: map[importKey]*imports{}, whole: mem, words: mem[pages(ring.Bytes(data)):], side: side,
		pid: sock.pid()}
	l.changed.L = &l.mu
	l.Reset(l, l.over)
	if err := l.Init(mem[:ring.Bytes(data)], data, side, sock.wake); err != nil {
		unmap(mem)
		sock.conn.Close()
		return nil, err
	}
	x.join(l)
	if l.process = sock.process(); l.process != nil {
		l.helpers.Go(func() { sock.follow(l.process) })
		l.reading.init(sock, l.process)
		sock.send(x.witness.message(), -1) // without it, the peer does not read this process
	}
	if f := lifeline.File(); f != nil {
		if raw, err := f.SyscallConn(); err == nil { // without it, the socket's end tells, later
			raw.Control(func(fd uintptr) { sock.send(message{kind: msgLifeline}, int(fd)) })
		}
	}
	go l.read()
	return l, nil
}

// SleepSeldom implements p2p.SeldomSleeper. If both ends call it, small frames become faster, and
// going to sleep slower by some microseconds a link.
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
		l.ceased.Store(true)
		l.Fail(fmt.Errorf("%v closed its link or ended: %w", l.peer, p2p.ErrPeerGone), true)
	default: // net.ErrClosed after our own Close, which has called Fail
		l.Fail(fmt.Errorf("%v: %w: %w", l.peer, p2p.ErrPeerGone, err), true)
	}
	l.cease()
	l.sock.conn.Close() // tells a peer that violated the protocol
	close(l.down)
	l.mu.Lock()
	l.ended = true
	l.changed.Broadcast()
	l.mu.Unlock()
	l.host.Wake()
}

func (l *link) serve() error {
	for {
		m, fd, untaken, err := l.sock.next()
		if err != nil {
			return err
		}
		switch m.kind {
		case msgBell:
			l.Answer()
			l.host.Wake()
		case msgAsk, msgAskStore:
			err = l.answer(m)
		case msgGrant, msgDeny, msgGrantStore, msgDenyStore:
			err = l.take(m, fd, untaken)
		case msgDrop:
			l.drop(m.id)
		case msgLifeline:
			if untaken == nil { // without it, the socket's end tells, later
				err = l.hold(fd)
			}
		case msgWitness:
			err = l.attest(m)
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

// answer handles a peer's request. It keeps no state, so that a flood of requests needs no memory.
func (l *link) answer(m message) error {
	if m.kind == msgAskStore { // exports checks the permission when it passes the descriptor
		return l.queue(message{kind: msgGrantStore, id: m.id})
	}
	if l.exports.readable(m.id) {
		return l.queue(message{kind: msgGrant, id: m.id})
	}
	l.mu.Lock()
	if l.closed {
		l.mu.Unlock()
		return net.ErrClosed
	}
	l.away = true
	l.changed.Broadcast()
	l.mu.Unlock()
	_, err := l.host.Region(m.id) // checks that it is shared; exports knows the memory
	l.mu.Lock()
	l.away = false
	l.mu.Unlock()
	if err != nil {
		return l.queue(message{kind: msgDeny, id: m.id})
	}
	return l.queue(message{kind: msgGrant, id: m.id})
}

// queue sends a message, or keeps it until the socket of a stopped peer has room.
func (l *link) queue(m message) error {
	l.mu.Lock()
	waiting := len(l.unsent)
	l.mu.Unlock()
	if waiting == 0 {
		if err := l.send(m); !errors.Is(err, errFull) {
			return err
		}
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	answers := 0
	for _, o := range l.unsent {
		if o.kind != msgDrop {
			answers++
		}
	}
	switch {
	case l.closed || l.ended:
		return net.ErrClosed
	case answers > maxAsking:
		return fmt.Errorf("%w: the peer sends requests and does not read the answers", p2p.ErrProtocol)
	}
	if l.unsent = append(l.unsent, m); len(l.unsent) == 1 {
		l.helpers.Go(l.drain)
	}
	return nil
}

// send sends a message. A grant whose region is freed meanwhile becomes a denial.
func (l *link) send(m message) error {
	if m.kind == msgGrant || m.kind == msgGrantStore {
		err := l.exports.pass(l, m.id, m.kind == msgGrantStore, func(fd, size int) error {
			m.size = uint64(size)
			return l.sock.send(m, fd)
		})
		if !errors.Is(err, p2p.ErrNoRegion) {
			return err
		}
		if m.kind++; m.kind != msgDenyStore {
			m.kind = msgDeny
		}
		m.size = 0
	}
	return l.sock.send(m, -1)
}

// drain sends what queue has kept, in order.
func (l *link) drain() {
	l.mu.Lock()
	defer l.mu.Unlock()
	for pause := time.Millisecond; len(l.unsent) > 0; {
		m := l.unsent[0]
		l.mu.Unlock()
		err := l.send(m)
		if errors.Is(err, errFull) {
			select {
			case <-l.down:
			case <-time.After(pause):
			}
			pause = min(2*pause, time.Second)
		}
		l.mu.Lock()
		switch {
		case err == nil:
			l.unsent, pause = l.unsent[1:], time.Millisecond
		case !errors.Is(err, errFull): // the link has failed, and the peer drops all mappings
			l.unsent = nil
		}
	}
}

// take handles the answer to a request. untaken says why a grant came without its descriptor.
func (l *link) take(m message, fd int, untaken error) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if fd >= 0 {
		defer unix.Close(fd)
	}
	store := m.kind == msgGrantStore || m.kind == msgDenyStore
	r := l.imports[importKey{m.id, store}]
	if r == nil || r.mapping != nil || r.err != nil {
		return fmt.Errorf("%w: an answer for region %#x, which was not asked for", p2p.ErrProtocol, m.id)
	}
	l.asking--
	switch {
	case untaken != nil:
		r.err = untaken
	case fd < 0:
		r.err = p2p.ErrNoRegion
	default:
		r.mapping, r.err = imported(fd, m.size, store)
	}
	if r.err != nil {
		r.err = fmt.Errorf("region %#x of %v: %w", m.id, l.peer, r.err)
	}
	l.host.Wake()
	return nil
}

// drop forgets the mapping of a region that the peer has freed.
func (l *link) drop(id uint64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.stale.Store(true)
	for _, key := range [...]importKey{{id, false}, {id, true}} {
		if r := l.imports[key]; r != nil && (r.mapping != nil || r.err != nil) {
			if r.mapping != nil {
				r.mapping.Retire()
			}
			delete(l.imports, key)
		}
	}
}

// retract tells the peer that a region which it was granted is freed. It does not block.
func (l *link) retract(id uint64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed || l.ended {
		return
	}
	if l.unsent = append(l.unsent, message{kind: msgDrop, id: id}); len(l.unsent) == 1 {
		l.helpers.Go(l.drain)
	}
}

// Map implements p2p.Mapper.
func (l *link) Map(id uint64) (*p2p.Mapping, error) { return l.mapping(importKey{id, false}) }

// mapping is Map, with write access if key says so.
func (l *link) mapping(key importKey) (*p2p.Mapping, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed || l.ended {
		if err := l.Err(); err != nil {
			return nil, err
		}
		return nil, fmt.Errorf("%v: %w", l.peer, p2p.ErrPeerGone)
	}
	switch r := l.imports[key]; {
	case r == nil && l.asking == maxAsking:
		return nil, nil // later
	case r == nil:
		ask := message{kind: msgAsk, id: key.id}
		if key.store {
			ask.kind = msgAskStore
		}
		switch err := l.sock.send(ask, -1); {
		case errors.Is(err, errFull):
			return nil, nil // later
		case err != nil:
			l.Fail(fmt.Errorf("asking %v for region %#x: %w: %w", l.peer, key.id, p2p.ErrPeerGone, err), true)
			l.cease()
			l.sock.conn.Close() // and so ends the reader
			return nil, l.Err()
		}
		l.imports[key] = &imports{}
		l.asking++
		return nil, nil
	case r.err != nil:
		delete(l.imports, key)
		return nil, r.err
	case r.mapping != nil:
		return r.mapping.Acquire(), nil
	}
	return nil, nil
}

// Close implements p2p.Link. It may be called while other methods run: the rings' memory is
// released, but its addresses stay readable until the link is garbage. Mapped regions stay until
// their last user has released them.
func (l *link) Close() error {
	l.once.Do(func() {
		l.Fail(fmt.Errorf("link to %v: %w", l.peer, p2p.ErrClosed), false)
		l.mu.Lock()
		l.closed = true
		l.mu.Unlock()
		l.reading.works.Store(false)
		l.cease()
		l.forget()
		l.words.at(gateAt, l.side).Store(1)
		l.sock.conn.Close()
		if l.process != nil {
			l.process.Close()
		}
		l.mu.Lock()
		if l.life != nil {
			l.life.Close()
		}
		// The reader may be in Host.Region, waiting for a lock that the caller holds. It does not
		// use the link's memory when it returns.
		for !l.ended && !l.away {
			l.changed.Wait()
		}
		all := l.imports
		l.imports = nil
		l.mu.Unlock()
		l.helpers.Wait() // sending fails, because the socket is closed
		l.exports.forget(l)
		for _, r := range all {
			if r.mapping != nil {
				r.mapping.Retire()
			}
		}
		l.err = blank(l.Memory())
		if l.exports.leave(l) {
			l.err = errors.Join(l.err, blank(l.words))
		}
		runtime.AddCleanup(l, func(mem []byte) { unmap(mem) }, l.whole)
	})
	return l.err
}
