package tcp

import (
	"context"
	"fmt"
	"os"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"tutti/internal/leaktest"
	"tutti/p2p"
	"tutti/p2p/linktest"
)

func TestMain(m *testing.M) {
	if f := children[os.Getenv(childVariable)]; f != nil {
		f()
		return
	}
	linktest.PeerMain(func(string) (p2p.Transport, error) { return New(local(Config{})), nil }, nil)
	leaktest.Main(m)
}

var secret = []byte("the secret of a test's job")

// host is a p2p.Host whose behaviour a test sets.
type host struct {
	self   p2p.Identity
	secret []byte
	admit  atomic.Pointer[func(p2p.Identity) error] // set beside an acceptor that asks
	links  chan accepted
	lost   chan p2p.Identity
	wakes  atomic.Int64
	woken  chan struct{}
}

type accepted struct {
	from p2p.Identity
	link p2p.Link
}

func newHost(rank int) *host {
	return &host{self: p2p.Identity{Rank: rank, Incarnation: 0xace0 + uint64(rank)}, secret: secret,
		links: make(chan accepted, 64), lost: make(chan p2p.Identity, 64), woken: make(chan struct{}, 1)}
}

func (h *host) Self() p2p.Identity { return h.self }
func (h *host) Secret() []byte     { return h.secret }
func (h *host) Admit(from p2p.Identity) error {
	if f := h.admit.Load(); f != nil {
		return (*f)(from)
	}
	return nil
}

// allow has Admit answer what f does.
func (h *host) allow(f func(p2p.Identity) error) { h.admit.Store(&f) }

func (h *host) Accepted(from p2p.Identity, l p2p.Link) { h.links <- accepted{from, l} }
func (h *host) Lost(from p2p.Identity)                 { h.lost <- from }

// drop closes the links that no test asked for.
func (h *host) drop() {
	for len(h.links) > 0 {
		(<-h.links).link.Close()
	}
}

func (h *host) Wake() {
	h.wakes.Add(1)
	select {
	case h.woken <- struct{}{}:
	default:
	}
}
func (h *host) Region(uint64) (*p2p.Region, error) { return nil, p2p.ErrNoRegion }

const patience = 20 * time.Second // how long a test waits for what must come

func within(t testing.TB) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	t.Cleanup(cancel)
	return ctx
}

// node is a transport that listens.
type node struct {
	*Transport
	*host
	endpoint []byte
}

func listen(t testing.TB, rank int, cfg Config) *node {
	t.Helper()
	return started(t, rank, New(cfg))
}

// started lets tr, which is idle, listen for a rank.
func started(t testing.TB, rank int, tr *Transport) *node {
	t.Helper()
	n := &node{tr, newHost(rank), nil}
	t.Cleanup(func() { n.Transport.Close(); n.drop() })
	var err error
	if n.endpoint, err = n.Listen(within(t), n.host); err != nil {
		t.Fatal(err)
	}
	return n
}

func local(cfg Config) Config {
	cfg.Interfaces = "127.0.0.1"
	return cfg
}

// tight returns a transport whose connections have buffers of size bytes in the kernel.
func tight(size int, cfg Config) *Transport {
	tr := New(local(cfg))
	tr.socket = func(fd int) {
		unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_SNDBUF, size)
		unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUF, size)
	}
	return tr
}

func (n *node) accept(t testing.TB) p2p.Link {
	t.Helper()
	select {
	case a := <-n.links:
		t.Cleanup(func() { a.link.Close() })
		return a.link
	case <-time.After(patience):
		t.Fatalf("%v accepted no link", n.self)
		return nil
	}
}

// pair returns both ends of a link, the dialler's first.
func pair(t testing.TB, cfg Config) (a, b p2p.Link, na, nb *node) {
	t.Helper()
	return linked(t, New(local(cfg)), New(local(cfg)))
}

// tightPair is pair with buffers of size bytes in the kernel.
func tightPair(t testing.TB, size int) (a, b p2p.Link, na, nb *node) {
	t.Helper()
	return linked(t, tight(size, Config{}), tight(size, Config{}))
}

func linked(t testing.TB, ta, tb *Transport) (a, b p2p.Link, na, nb *node) {
	t.Helper()
	na, nb = started(t, 0, ta), started(t, 1, tb)
	a, err := na.Dial(within(t), nb.self, nb.endpoint)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { a.Close() })
	return a, nb.accept(t), na, nb
}

// until polls f until it says true.
func until(t testing.TB, what string, f func() bool) {
	t.Helper()
	for end := time.Now().Add(patience); !f(); {
		if time.Now().After(end) {
			t.Fatalf("did not come: %s", what)
		}
	}
}

func must[T any](v T, err error) T {
	if err != nil {
		panic(err)
	}
	return v
}

func header(seq uint64, n int) *p2p.Header {
	return &p2p.Header{Kind: 3, Flags: 5, Len: uint32(n), Chan: 11, Ack: 13, Seq: seq, Call: 17, Count: 19,
		Off: 1 << 63}
}

func pattern(n int, seed byte) []byte {
	b := make([]byte, n)
	for i := range b {
		b[i] = byte(i*7) + byte(i>>8) + seed
	}
	return b
}

// take receives one frame whole, with Fill in pieces of at most piece bytes if it is not offered.
func take(l p2p.Link, piece int) (h p2p.Header, payload []byte, err error) {
	end := time.Now().Add(patience)
	for {
		hp, p, err := l.Recv()
		if err != nil {
			return h, nil, err
		}
		if hp != nil {
			h = *hp
			if p != nil || h.Len == 0 {
				payload = append(payload, p...)
				break
			}
			payload = make([]byte, h.Len)
			for got := 0; got < len(payload); {
				n, err := l.Fill(payload[got:min(len(payload), got+piece)])
				if err != nil {
					return h, nil, err
				}
				if got += n; time.Now().After(end) {
					return h, nil, fmt.Errorf("%d of %d bytes came in time", got, len(payload))
				}
			}
			break
		}
		if time.Now().After(end) {
			return h, nil, fmt.Errorf("no frame came in time")
		}
	}
	l.Release()
	return h, payload, nil
}
