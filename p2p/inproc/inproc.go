// Package inproc is the transport between ranks that are goroutines of one process: rings on the Go
// heap, direct calls of the peer's Wake, and direct use of the peer's regions.
package inproc

import (
	"context"
	"crypto/rand"
	"crypto/subtle"
	"errors"
	"fmt"
	"os"
	"sync"
	"sync/atomic"
	"unsafe"

	"tutti/internal/ident"
	"tutti/internal/trust"
	"tutti/mem"
	"tutti/p2p"
	"tutti/p2p/ring"
	"tutti/p2p/rma"
)

// Config of a transport.
type Config struct {
	// RingBytes is the size of the ring in each direction of a link, rounded up to a power of two
	// from 8 KiB to 1 GiB; the accepting side's counts. The largest frame is a quarter of it. A
	// link takes two, so that n ranks that are all linked take n*(n-1)*RingBytes: 768 KiB for 4
	// ranks with the default, 510 MiB for 256 ranks with 8 KiB. The memory is taken when a link is
	// made and touched as frames pass. Default 64 KiB.
	RingBytes int
}

// DefaultRingBytes is Config.RingBytes' default.
const DefaultRingBytes = 64 << 10

const (
	tokenSize    = 16
	endpointSize = 2 * tokenSize // process, transport
)

type token [tokenSize]byte

func newToken() (t token) { rand.Read(t[:]); return t }

// process identifies this process. Forked children have the same value, but share no memory and
// find no transport registered.
var process = newToken()

var (
	registryMu sync.Mutex
	registry   = map[token]*Transport{}
)

// Transport implements p2p.Transport, p2p.Allocator, p2p.WritableAllocator and p2p.Exposer. Its
// links implement p2p.Mapper and p2p.OneSided.
type Transport struct {
	ring  int
	table rma.Table // this rank's exposed memory

	mu       sync.RWMutex // held for reading while a connection is handed over
	host     p2p.Host
	token    token
	listened bool
	closed   bool
}

// New returns a transport that does not listen yet.
func New(cfg Config) *Transport {
	if cfg.RingBytes <= 0 {
		cfg.RingBytes = DefaultRingBytes
	}
	return &Transport{ring: ring.Round(cfg.RingBytes)}
}

// Name implements p2p.Transport.
func (t *Transport) Name() string { return "inproc" }

// Listen implements p2p.Transport. It does not block.
func (t *Transport) Listen(ctx context.Context, h p2p.Host) ([]byte, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	if n := len(h.Secret()); n < trust.MinSecret {
		return nil, fmt.Errorf("inproc: a job secret of %d bytes, want at least %d", n, trust.MinSecret)
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.closed {
		return nil, fmt.Errorf("inproc: transport: %w", p2p.ErrClosed)
	}
	if t.listened {
		return nil, errors.New("inproc: the transport listens already; make one for each rank")
	}
	t.host, t.listened, t.token = h, true, newToken()
	registryMu.Lock()
	registry[t.token] = t
	registryMu.Unlock()
	return append(append([]byte(nil), process[:]...), t.token[:]...), nil
}

func find(endpoint []byte) (*Transport, error) {
	if len(endpoint) != endpointSize {
		return nil, fmt.Errorf("inproc: endpoint of %d bytes, want %d", len(endpoint), endpointSize)
	}
	if token(endpoint[:tokenSize]) != process {
		return nil, errors.New("inproc: the peer is another process")
	}
	registryMu.Lock()
	defer registryMu.Unlock()
	t := registry[token(endpoint[tokenSize:])]
	if t == nil {
		return nil, fmt.Errorf("inproc: the peer has closed its transport: %w", p2p.ErrPeerGone)
	}
	return t, nil
}

// Reaches implements p2p.Transport.
func (t *Transport) Reaches(endpoint []byte) error {
	_, err := find(endpoint)
	return err
}

// Dial implements p2p.Transport. It calls the peer's Host.Admit and Host.Accepted, and blocks while
// they do.
func (t *Transport) Dial(ctx context.Context, to p2p.Identity, endpoint []byte) (p2p.Link, error) {
	if err := ctx.Err(); err != nil {
		return nil, fmt.Errorf("inproc: dialling %v: %w", to, err)
	}
	t.mu.RLock()
	host, usable := t.host, t.listened && !t.closed
	t.mu.RUnlock()
	if !usable {
		return nil, fmt.Errorf("inproc: dialling %v from a transport that does not listen: %w", to, p2p.ErrClosed)
	}
	peer, err := find(endpoint)
	if err != nil {
		return nil, fmt.Errorf("dialling %v: %w", to, err)
	}
	l, err := peer.accept(host, &t.table, to)
	if err != nil {
		return nil, fmt.Errorf("inproc: dialling %v: %w", to, err)
	}
	return l, nil
}

// accept makes a link from the rank of from, whose exposed memory is in table, to t's own rank, and
// returns the dialler's end.
func (t *Transport) accept(from p2p.Host, table *rma.Table, to p2p.Identity) (*link, error) {
	t.mu.RLock()
	defer t.mu.RUnlock()
	if t.closed {
		return nil, fmt.Errorf("the peer has closed its transport: %w", p2p.ErrPeerGone)
	}
	if subtle.ConstantTimeCompare(from.Secret(), t.host.Secret()) != 1 {
		return nil, p2p.ErrAuth
	}
	if self := t.host.Self(); self != to {
		return nil, fmt.Errorf("%w: the endpoint is %v's", p2p.ErrStale, self)
	}
	if err := t.host.Admit(from.Self()); err != nil {
		return nil, p2p.FromRefusal(p2p.RefusalOf(err))
	}
	mem := aligned(ring.Bytes(t.ring), 64)
	a, b := &link{host: from, table: table}, &link{host: t.host, table: &t.table}
	a.peer, b.peer = b, a
	for _, l := range []*link{a, b} {
		l.Reset(l, l.over)
	}
	for side, l := range []*link{a, b} {
		if err := l.Init(mem, t.ring, side, l.peer.wake); err != nil {
			t.host.Lost(from.Self())
			return nil, err
		}
	}
	t.host.Accepted(from.Self(), b)
	return a, nil
}

// Close implements p2p.Transport. It waits for calls of Host.Admit and Host.Accepted; the caller
// must not hold a lock that they need.
func (t *Transport) Close() error {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.closed = true
	registryMu.Lock()
	defer registryMu.Unlock()
	delete(registry, t.token)
	return nil
}

// Alloc implements p2p.Allocator with memory of the Go heap. Free forgets the region; the collector
// frees it when no peer's mapping is left.
func (t *Transport) Alloc(n int) (*p2p.Region, error) {
	if n < 1 {
		return nil, fmt.Errorf("inproc: region of %d bytes, want at least 1", n)
	}
	m := mem.Host(aligned(n, os.Getpagesize()), mem.Anywhere)
	return mem.NewRegion(ident.New(), m, true, true, func() error { return nil }), nil
}

// AllocWritable implements p2p.WritableAllocator. Nothing keeps peers of one process from writing
// to other memory.
func (t *Transport) AllocWritable(n int) (*mem.Region, error) { return t.Alloc(n) }

// Expose implements p2p.Exposer, for any host memory of this process, with an empty key.
func (t *Transport) Expose(r *mem.Region, x *mem.Remote) ([]byte, error) {
	if err := t.table.Expose(r, x); err != nil {
		return nil, fmt.Errorf("inproc: %w", err)
	}
	return []byte{}, nil
}

// Withdraw implements p2p.Exposer. It waits for accesses under way, each of which takes
// microseconds.
func (t *Transport) Withdraw(_ context.Context, x *mem.Remote) error {
	t.table.Withdraw(x)
	return nil
}

// aligned returns n zeroed bytes at a multiple of align.
func aligned(n, align int) []byte {
	b := make([]byte, n+align-1)
	skip := -int(uintptr(unsafe.Pointer(unsafe.SliceData(b)))) & (align - 1)
	return b[skip : skip+n : skip+n]
}

// link is one end of a link. The ring implements the methods for frames, the Copier those for
// remote memory.
type link struct {
	ring.End
	rma.Copier
	host  p2p.Host
	table *rma.Table // the exposed memory of this end's rank
	peer  *link
	news  uint64 // counts the peer's stores of signals; written by the peer
	heard uint64 // news when Arm last read it
	told  uint64 // the peer's news
}

func (l *link) wake() {
	l.Answer()
	l.host.Wake()
}

// Map implements p2p.Mapper: the peer's own memory, at once.
func (l *link) Map(id uint64) (*p2p.Mapping, error) {
	if err := l.Err(); err != nil {
		return nil, err
	}
	if b := l.peer.table.Readable(id); b != nil {
		return p2p.NewMapping(b, nil), nil
	}
	r, err := l.peer.host.Region(id)
	if err != nil {
		return nil, fmt.Errorf("region %#x of %v: %w", id, l.peer.host.Self(), err)
	}
	return p2p.NewMapping(r.Bytes(), nil), nil
}

// Reach implements rma.Reach.
func (l *link) Reach(x *mem.Remote, _ mem.Rights) (rma.Target, error) {
	if e := l.peer.table.Find(x.ID, x.Generation); e != nil {
		return e, nil
	}
	return nil, p2p.ErrRevoked
}

// Drop implements rma.Reach.
func (l *link) Drop(rma.Target) {}

// Signalled implements rma.Reach. A sleeping peer reads news after it has armed the link.
func (l *link) Signalled() {
	l.told++
	l.Nudge(&l.peer.news, l.told)
}

// over returns why puts and gets are not possible any more, or nil.
func (l *link) over() error { return l.Err() }

// Arm implements p2p.Link.
func (l *link) Arm() bool {
	if l.Ready() || l.End.Arm() {
		return true
	}
	if n := atomic.LoadUint64(&l.news); n != l.heard {
		l.heard = n
		l.Disarm()
		return true
	}
	return false
}

// Close implements p2p.Link. The rings are on the heap, and are collected with both ends.
func (l *link) Close() error {
	l.Fail(fmt.Errorf("link to %v: %w", l.peer.host.Self(), p2p.ErrClosed), false)
	l.peer.Fail(fmt.Errorf("%v closed its link: %w", l.host.Self(), p2p.ErrPeerGone), true)
	l.host.Wake()
	l.peer.host.Wake()
	return nil
}
