package endpoint

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"tutti/mem"
	"tutti/rdma/soft"
)

const testSecret = "00112233445566778899aabbccddeeff00112233445566778899aabbccddeeff"

// guards are what Config can ask for.
var guards = []struct {
	name string
	cfg  Config
}{{"plain", Config{}}, {"checksum", Config{Checksum: true}}, {"sealed", Config{Seal: true}}}

func newContext(t testing.TB) *Context {
	c, err := NewContext(ContextConfig{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := c.Close(); err != nil {
			t.Error(err)
		}
	})
	return c
}

func newEndpoint(t testing.TB, c *Context, cfg Config) *Endpoint {
	t.Helper()
	if cfg.Secret == "" {
		cfg.Secret = testSecret
	}
	if cfg.Interfaces == "" {
		cfg.Interfaces = "127.0.0.1"
	}
	e, err := New(c, overRDMA(cfg))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := e.Close(); err != nil {
			t.Error(err)
		}
	})
	return e
}

// connect returns e's peer at info.
func connect(t testing.TB, e *Endpoint, info Info) *Peer {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	p, err := e.Connect(ctx, info)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

// accept returns the next peer that connects with e.
func accept(t testing.TB, e *Endpoint) *Peer {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	p, err := e.Accept(ctx)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

// pair returns two endpoints that are connected, each with the other as a peer.
func pair(t testing.TB, cfg Config) (a, b *Endpoint, pb, pa *Peer) {
	t.Helper()
	cfg.Name = "a"
	a = newEndpoint(t, newContext(t), cfg)
	cfg.Name = "b"
	b = newEndpoint(t, newContext(t), cfg)
	pb = connect(t, a, b.Info())
	return a, b, pb, accept(t, b)
}

// shared returns memory for a region that both sockets and devices of this process access: it is
// outside of Go's heap, because the race detector does not know that what comes through a socket
// happens after it was sent.
func shared(t testing.TB, n int) []byte {
	t.Helper()
	b, err := unix.Mmap(-1, 0, n, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_ANON|unix.MAP_PRIVATE)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { unix.Munmap(b) })
	return b
}

func wait(t testing.TB, f *Future) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	if err := f.Wait(ctx); err != nil {
		t.Fatal(err)
	}
}

func pattern(n int, seed uint64) []byte {
	b := make([]byte, n)
	r := rand.New(rand.NewPCG(seed, 1))
	for i := 0; i < n; i += 8 {
		v := r.Uint64()
		for j := i; j < min(i+8, n); j++ {
			b[j] = byte(v)
			v >>= 8
		}
	}
	return b
}

var sizes = []int{0, 1, 64, 4096, 16 << 10, 16<<10 + 1, 64 << 10, 64<<10 + 1, 256 << 10, 256<<10 + 7, 3<<20 + 5}

// eachGuard runs a test with each number of connections and whatever guards them, and with RDMA,
// which goes beside them.
func eachGuard(t *testing.T, conns []int, f func(t *testing.T, cfg Config)) {
	for _, n := range conns {
		t.Run(fmt.Sprint("rdma ", n), func(t *testing.T) {
			_, r := newFabric(t, soft.Config{})
			f(t, Config{Conns: n, RDMA: r})
		})
	}
	for _, g := range guards {
		for _, n := range conns {
			t.Run(fmt.Sprint(g.name, " ", n), func(t *testing.T) {
				cfg := g.cfg
				cfg.Conns = n
				f(t, cfg)
			})
		}
	}
}

func TestReadsAndWrites(t *testing.T) {
	eachGuard(t, []int{1, 3}, func(t *testing.T, cfg Config) {
		data := shared(t, 4<<20)
		_, b, p, _ := pair(t, cfg)
		r, err := b.Register("data", mem.Host(data, mem.Anywhere), RegionConfig{Rights: Read | Write})
		if err != nil {
			t.Fatal(err)
		}
		for i, n := range sizes {
			src, off := pattern(n, uint64(i)), int64(i*13)
			wait(t, p.Write(src, "data", off))
			dst := make([]byte, n)
			wait(t, p.Read(dst, "data", off))
			if !bytes.Equal(src, dst) {
				t.Fatalf("%d bytes differ", n)
			}
		}
		r.Unregister()
		if last := len(sizes) - 1; !bytes.Equal(data[last*13:][:sizes[last]], pattern(sizes[last], uint64(last))) {
			t.Error("the region has other bytes")
		}
		if err := p.Read(make([]byte, 1), "data", 0).Wait(t.Context()); !errors.Is(err, ErrStale) {
			t.Errorf("after Unregister: %v", err)
		}
		if err := p.Read(make([]byte, 1), "data", 0).Wait(t.Context()); !errors.Is(err, ErrNoRegion) {
			t.Errorf("and again: %v", err)
		}
	})
}

func TestMessagesKeepTheirOrder(t *testing.T) {
	eachGuard(t, []int{1, 3}, func(t *testing.T, cfg Config) {
		_, _, p, q := pair(t, cfg)
		const rounds = 10
		var wg sync.WaitGroup
		wg.Go(func() {
			var fs []*Future
			for r := range rounds {
				for i, n := range sizes {
					fs = append(fs, p.Send(pattern(n, uint64(r*100+i))))
				}
			}
			for _, f := range fs {
				if err := f.Wait(t.Context()); err != nil {
					t.Error(err)
					return
				}
			}
		})
		for r := range rounds {
			for i, n := range sizes {
				buf := make([]byte, n+i%2)
				f := q.Recv(buf)
				if err := f.Wait(t.Context()); err != nil {
					t.Fatal(err)
				}
				if x := f.Result(0); x.N != int64(n) || x.Total != int64(n) || !bytes.Equal(buf[:n], pattern(n,
					uint64(r*100+i))) {
					t.Fatalf("message %d of round %d: %+v, expected %d bytes", i, r, x, n)
				}
			}
		}
		wg.Wait()
	})
}

// What is held to go with later operations goes although there are none, and although no goroutine
// polls.
func TestSmallOperationsThatFollowEachOtherEndWithoutAWaiter(t *testing.T) {
	_, e, p, _ := pair(t, Config{Conns: 1})
	data := make([]byte, 64)
	if _, err := e.Register("data", mem.Host(data, mem.Anywhere), RegionConfig{Rights: Read | Write}); err != nil {
		t.Fatal(err)
	}
	late := time.After(20 * time.Second)
	for round := range 200 {
		fs := make([]*Future, 16)
		src := pattern(len(data), uint64(round))
		for i := range fs {
			if i == 8 { // a waiter has just left
				wait(t, fs[0])
			}
			fs[i] = p.Write(src[i*4:][:4], "data", int64(i*4))
		}
		for i, f := range fs {
			select {
			case <-f.Done():
				if f.Err() != nil {
					t.Fatal(f.Err())
				}
			case <-late:
				t.Fatalf("round %d: write %d has not ended", round, i)
			}
		}
		got := make([]byte, len(data))
		if wait(t, p.Read(got, "data", 0)); !bytes.Equal(got, src) {
			t.Fatalf("round %d: the region has other bytes", round)
		}
	}
}

func BenchmarkPingPong(b *testing.B) {
	_, _, p, q := pair(b, Config{})
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	wg.Go(func() {
		buf := make([]byte, 64)
		for q.Recv(buf).Wait(ctx) == nil && q.Send(buf).Wait(ctx) == nil {
		}
	})
	buf, in := make([]byte, 64), make([]byte, 64)
	for b.Loop() {
		f := p.Send(buf)
		if err := p.Recv(in).Wait(ctx); err != nil {
			b.Fatal(err)
		}
		if err := f.Wait(ctx); err != nil {
			b.Fatal(err)
		}
	}
	cancel()
	wg.Wait()
}

func BenchmarkRead(b *testing.B) {
	for _, n := range []int{64, 4 << 10, 64 << 10, 1 << 20, 16 << 20} {
		b.Run(fmt.Sprint(n), func(b *testing.B) {
			_, e, p, _ := pair(b, Config{})
			if _, err := e.Register("r", mem.Host(make([]byte, n), mem.Anywhere), RegionConfig{}); err != nil {
				b.Fatal(err)
			}
			dst := make([]byte, n)
			b.SetBytes(int64(n))
			for b.Loop() {
				if err := p.Read(dst, "r", 0).Wait(context.Background()); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

// TestForemostAddresses: of too many addresses the first are used, and one of loopback of each
// family.
func TestForemostAddresses(t *testing.T) {
	last := []netip.Addr{netip.MustParseAddr("127.0.0.1"), netip.MustParseAddr("127.0.0.2"), netip.MustParseAddr("::1")}
	for _, n := range []int{0, maxAddrs - 3, maxAddrs - 2, maxAddrs - 1, 3 * maxAddrs} {
		var all []netip.Addr
		for i := range n {
			all = append(all, netip.AddrFrom4([4]byte{10, 0, 0, byte(i)}))
		}
		first := slices.Clone(all[:min(n, maxAddrs-2)])
		all = append(all, last...)
		want := append(first, last[0], last[2])
		if len(all) <= maxAddrs {
			want = all
		}
		listen, left := foremost(slices.Clone(all))
		if !slices.Equal(listen, want) || len(left) != len(all)-len(listen) {
			t.Errorf("of %v: %v, not %v", all, listen, left)
		}
	}
}
