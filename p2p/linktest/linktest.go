// Package linktest is the conformance suite of transports: it tests the contracts of p2p.Transport
// and p2p.Link.
package linktest

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"runtime"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"

	"tutti/p2p"
)

// Patience bounds every wait of the suite. It is long enough for a loaded machine; only a failure
// uses it up.
const Patience = 30 * time.Second

// Secret is the job secret of hosts made by NewHost.
var Secret = []byte("linktest's secret, 32 bytes long")

// Incoming is a link that a Host has accepted.
type Incoming struct {
	From p2p.Identity
	Link p2p.Link
}

// Host is a p2p.Host for tests. Its fields may be set before the transport listens, and Allow also
// under Change.
type Host struct {
	ID    p2p.Identity
	Key   []byte
	In    chan Incoming     // accepted links
	Out   chan p2p.Identity // of connections that were lost
	woken chan struct{}
	timer *time.Timer // of Sleep; reused, so that benchmarks count only the link's allocations
	mu    sync.Mutex
	allow func(p2p.Identity) error
	regs  map[uint64]*p2p.Region
}

// NewHost returns a host with a new incarnation that admits every peer.
func NewHost(rank int) *Host {
	return &Host{ID: p2p.Identity{Rank: rank, Incarnation: rand.Uint64() | 1}, Key: Secret, In: make(chan Incoming, 64),
		Out:   make(chan p2p.Identity, 64),
		woken: make(chan struct{}, 1), regs: map[uint64]*p2p.Region{}}
}

// Allow replaces the function behind Admit.
func (h *Host) Allow(f func(p2p.Identity) error) { h.mu.Lock(); h.allow = f; h.mu.Unlock() }

// Share makes r available to Region, or removes it if it is nil.
func (h *Host) Share(id uint64, r *p2p.Region) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if r == nil {
		delete(h.regs, id)
	} else {
		h.regs[id] = r
	}
}

// Self implements p2p.Host.
func (h *Host) Self() p2p.Identity { return h.ID }

// Secret implements p2p.Host.
func (h *Host) Secret() []byte { return h.Key }

// Admit implements p2p.Host.
func (h *Host) Admit(from p2p.Identity) error {
	h.mu.Lock()
	f := h.allow
	h.mu.Unlock()
	if f == nil {
		return nil
	}
	return f(from)
}

// Accepted implements p2p.Host.
func (h *Host) Accepted(from p2p.Identity, l p2p.Link) { h.In <- Incoming{from, l} }

// Lost implements p2p.Host.
func (h *Host) Lost(from p2p.Identity) { h.Out <- from }

// Wake implements p2p.Host.
func (h *Host) Wake() {
	select {
	case h.woken <- struct{}{}:
	default:
	}
}

// Region implements p2p.Host.
func (h *Host) Region(id uint64) (*p2p.Region, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if r := h.regs[id]; r != nil {
		return r, nil
	}
	return nil, p2p.ErrNoRegion
}

// Sleep waits for a Wake. One goroutine at a time.
func (h *Host) Sleep() error {
	if h.timer == nil {
		h.timer = time.NewTimer(Patience)
	} else {
		h.timer.Reset(Patience)
	}
	select {
	case <-h.woken:
		h.timer.Stop()
		return nil
	case <-h.timer.C:
		return fmt.Errorf("%v slept for %v", h.ID, Patience)
	}
}

// Node is a host with its transport, listening.
type Node struct {
	*Host
	T        p2p.Transport
	Endpoint []byte
}

// Listen starts transport t for h; tb closes it.
func Listen(tb testing.TB, t p2p.Transport, h *Host) *Node {
	tb.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), Patience)
	defer cancel()
	ep, err := t.Listen(ctx, h)
	if err != nil {
		tb.Fatalf("%s: Listen: %v", t.Name(), err)
	}
	if len(ep) > p2p.MaxEndpoint {
		tb.Fatalf("endpoint of %d bytes, at most %d", len(ep), p2p.MaxEndpoint)
	}
	tb.Cleanup(func() {
		if err := t.Close(); err != nil {
			tb.Errorf("%s: Close: %v", t.Name(), err)
		}
	})
	return &Node{h, t, ep}
}

// Dial dials from n to m with Patience.
func (n *Node) Dial(m *Node) (p2p.Link, error) {
	ctx, cancel := context.WithTimeout(context.Background(), Patience)
	defer cancel()
	return n.T.Dial(ctx, m.ID, m.Endpoint)
}

// Next waits for an accepted link.
func (n *Node) Next(tb testing.TB) Incoming {
	tb.Helper()
	select {
	case in := <-n.In:
		return in
	case <-time.After(Patience):
		tb.Fatalf("%v was handed no link", n.ID)
		return Incoming{}
	}
}

// End is a link, its host, and the receiver's state.
type End struct {
	p2p.Link
	Host *Host
	buf  []byte
	got  int
	fill bool
	Fill bool // take payloads by Fill even when Recv returns them
}

// Connect returns both ends of a link from a to b; tb closes them.
func Connect(tb testing.TB, a, b *Node) (*End, *End) {
	tb.Helper()
	l, err := a.Dial(b)
	if err != nil {
		tb.Fatalf("%v dials %v: %v", a.ID, b.ID, err)
	}
	tb.Cleanup(func() { l.Close() })
	in := b.Next(tb)
	tb.Cleanup(func() { in.Link.Close() })
	if in.From != a.ID {
		tb.Fatalf("link from %v, want %v", in.From, a.ID)
	}
	return &End{Link: l, Host: a.Host}, &End{Link: in.Link, Host: b.Host}
}

// Pair makes two nodes with open and connects them.
func Pair(tb testing.TB, open func(testing.TB) p2p.Transport) (a, b *End) {
	tb.Helper()
	return Connect(tb, Listen(tb, open(tb), NewHost(0)), Listen(tb, open(tb), NewHost(1)))
}

// Take receives a frame if one is there whole. The payload is valid until the next Take.
func (e *End) Take() (h p2p.Header, payload []byte, ok bool, err error) {
	hdr, p, err := e.Recv()
	if hdr == nil || err != nil {
		return h, nil, false, err
	}
	n := int(hdr.Len)
	if n > e.MaxFrame() {
		return h, nil, false, fmt.Errorf("frame of %d bytes, MaxFrame is %d", n, e.MaxFrame())
	}
	if cap(e.buf) < n {
		e.buf = make([]byte, n)
	}
	e.buf = e.buf[:n]
	switch {
	case (p == nil || e.Fill || e.fill) && n > 0:
		if e.fill && p != nil {
			return h, nil, false, errors.New("payload offered after Fill")
		}
		e.fill = true
		k, err := e.Link.Fill(e.buf[e.got:])
		if err != nil {
			return h, nil, false, err
		}
		if e.got += k; e.got < n {
			return h, nil, false, nil
		}
	case len(p) != n:
		return h, nil, false, fmt.Errorf("%d bytes of payload offered, the header says %d", len(p), n)
	default:
		copy(e.buf, p)
	}
	h = *hdr
	e.fill, e.got = false, 0
	e.Release()
	return h, e.buf, true, nil
}

// Wait receives a frame, asleep between arrivals.
func (e *End) Wait() (p2p.Header, []byte, error) {
	for {
		if h, p, ok, err := e.Take(); ok || err != nil {
			return h, p, err
		}
		if err := e.Nap(); err != nil {
			return p2p.Header{}, nil, err
		}
	}
}

// Expect receives a frame with Wait, which has to be number i of the sequence, of n bytes.
func (e *End) Expect(i, n int) error {
	h, p, err := e.Wait()
	if err != nil {
		return err
	}
	return Check(i, n, h, p)
}

// Nap flushes, arms and sleeps until woken, unless there is something to do.
func (e *End) Nap() error {
	if _, err := e.Flush(); err != nil {
		return nil // the caller's next call returns the error
	}
	if e.Arm() {
		return nil
	}
	err := e.Host.Sleep()
	e.Disarm()
	return err
}

// Put sends a frame, asleep while there is no room.
func (e *End) Put(h *p2p.Header, payload []byte) error {
	for {
		if ok, err := e.Send(h, payload); ok || err != nil {
			return err
		}
		if err := e.Nap(); err != nil {
			return err
		}
	}
}

// FlushAll flushes, asleep while there is no room. A frame that arrives meanwhile is left for Take.
func (e *End) FlushAll() error {
	for late := time.Now().Add(Patience); ; {
		if ok, err := e.Flush(); ok || err != nil {
			return err
		}
		if _, _, err := e.Recv(); err != nil {
			return err
		}
		if e.Arm() {
			if time.Now().After(late) {
				return fmt.Errorf("not flushed within %v, while Arm says that Flush may succeed", Patience)
			}
		} else if err := e.Host.Sleep(); err != nil {
			return err
		}
		e.Disarm()
	}
}

// Frame makes frame number i of a reproducible sequence with n bytes of payload, in buf's memory if
// it is large enough.
func Frame(i, n int, buf []byte) (p2p.Header, []byte) {
	r := rand.NewPCG(uint64(i), uint64(n))
	h := p2p.Header{Kind: uint8(r.Uint64()), Flags: uint8(r.Uint64()), Len: uint32(n), Chan: uint32(r.Uint64()),
		Ack: uint32(r.Uint64()),
		Seq: uint64(i), Call: r.Uint64(), Count: r.Uint64(), Off: r.Uint64()}
	if cap(buf) < n {
		buf = make([]byte, n)
	}
	fill(buf[:n], int(r.Uint64()%uint64(len(noise))))
	return h, buf[:n]
}

// Check compares a received frame with number i of the sequence.
func Check(i, n int, h p2p.Header, payload []byte) error {
	want, p := Frame(i, n, nil)
	if h != want {
		return fmt.Errorf("frame %d of %d bytes: header %+v, want %+v", i, n, h, want)
	}
	if !bytes.Equal(payload, p) {
		return fmt.Errorf("frame %d of %d bytes: payload differs", i, n)
	}
	return nil
}

// NoLeaks runs f as a subtest and fails if it leaves a goroutine or a descriptor.
func NoLeaks(t *testing.T, name string, f func(t *testing.T)) {
	t.Helper()
	old := goleak.IgnoreCurrent()
	before := descriptors()
	if !t.Run(name, f) {
		return
	}
	for late := time.Now().Add(Patience); ; {
		err := goleak.Find(old) // it waits for a while
		after := descriptors()
		for fd, what := range after {
			if _, ok := before[fd]; !ok && len(after) > len(before) {
				err = errors.Join(err, fmt.Errorf("descriptor left open: %s -> %s", fd, what))
			}
		}
		if err == nil {
			return
		}
		if time.Now().After(late) {
			t.Errorf("%s: %v", name, err)
			return
		}
	}
}

// descriptors lists the open descriptors if the system can, else none.
func descriptors() map[string]string {
	m := map[string]string{}
	dir, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		return m
	}
	for _, e := range dir {
		if to, err := os.Readlink("/proc/self/fd/" + e.Name()); err == nil { // the directory's own is gone
			m[e.Name()] = to
		}
	}
	return m
}

// both runs two functions at once and reports their errors.
func both(tb testing.TB, f, g func() error) {
	tb.Helper()
	c := make(chan error, 1)
	go func() { c <- g() }()
	if err := f(); err != nil {
		tb.Error(err)
	}
	if err := <-c; err != nil {
		tb.Error(err)
	}
}

func spin(i int) {
	if i%64 == 63 {
		runtime.Gosched()
	}
}

// SleepSeldom returns t with links on which both ends call SleepSeldom. The links of t must be
// p2p.SeldomSleepers, and t must have every capability for memory.
func SleepSeldom(t p2p.Transport) p2p.Transport {
	return seldom{t, t.(p2p.Allocator), t.(p2p.WritableAllocator), t.(p2p.Exposer)}
}

type seldom struct {
	p2p.Transport
	p2p.Allocator
	p2p.WritableAllocator
	p2p.Exposer
}

type seldomHost struct{ p2p.Host }

func (s seldom) Listen(ctx context.Context, h p2p.Host) ([]byte, error) {
	return s.Transport.Listen(ctx, seldomHost{h})
}

func (s seldom) Dial(ctx context.Context, to p2p.Identity, endpoint []byte) (p2p.Link, error) {
	l, err := s.Transport.Dial(ctx, to, endpoint)
	if err == nil {
		l.(p2p.SeldomSleeper).SleepSeldom()
	}
	return l, err
}

func (h seldomHost) Accepted(from p2p.Identity, l p2p.Link) {
	l.(p2p.SeldomSleeper).SleepSeldom()
	h.Host.Accepted(from, l)
}
