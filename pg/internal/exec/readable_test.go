package exec

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"unsafe"

	"tutti/collectives"
	"tutti/kernels"
	"tutti/p2p"
	"tutti/p2p/inproc"
)

// A house has the plain memory of ranks in one process, which read each other's.
type house struct {
	mu    sync.Mutex
	rooms []*room
	reads atomic.Int64
}

// room is a buffer of a rank.
type room struct {
	mem  []byte
	shut bool // the system gives it to no other process
}

// rent returns a buffer that the ranks can read, unless it is shut.
func (h *house) rent(count int, shut bool) []int32 {
	x := make([]int32, count)
	h.mu.Lock()
	defer h.mu.Unlock()
	h.rooms = append(h.rooms, &room{unsafe.Slice((*byte)(unsafe.Pointer(&x[0])), 4*count), shut})
	return x
}

// find returns the n bytes at address from, nil if no other process gets them.
func (h *house) find(from uint64, n int) []byte {
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, r := range h.rooms {
		at := from - uint64(uintptr(unsafe.Pointer(&r.mem[0])))
		if at < uint64(len(r.mem)) && !r.shut {
			return r.mem[at : at+uint64(n)]
		}
	}
	return nil
}

// housed is a transport whose links read processes.
type housed struct {
	*inproc.Transport
	h *house
}

func (t *housed) Listen(ctx context.Context, host p2p.Host) ([]byte, error) {
	return t.Transport.Listen(ctx, &housedHost{host, t.h})
}

func (t *housed) Dial(ctx context.Context, to p2p.Identity, ep []byte) (p2p.Link, error) {
	l, err := t.Transport.Dial(ctx, to, ep)
	if err != nil {
		return nil, err
	}
	return &window{l, l.(p2p.Mapper), t.h}, nil
}

type housedHost struct {
	p2p.Host
	h *house
}

func (t *housedHost) Accepted(from p2p.Identity, l p2p.Link) {
	t.Host.Accepted(from, &window{l, l.(p2p.Mapper), t.h})
}

// window is a link of a housed transport.
type window struct {
	p2p.Link
	p2p.Mapper
	h *house
}

func (w *window) ReadsProcess() bool { return true }

func (w *window) Readable(b []byte) bool {
	return w.h.find(uint64(uintptr(unsafe.Pointer(unsafe.SliceData(b)))), len(b)) != nil
}

func (w *window) ReadProcess(dst []byte, from uint64) error {
	src := w.h.find(from, len(dst))
	if src == nil {
		return fmt.Errorf("%w: there is no memory at %#x", p2p.ErrProtocol, from)
	}
	copy(dst, src)
	w.h.reads.Add(1)
	return nil
}

// TestUnreadableMemoryTakesRings: a call in which one rank has plain memory that the system gives
// to no other process succeeds through rings. Calls without such memory make single copies.
func TestUnreadableMemoryTakesRings(t *testing.T) {
	if !p2p.CanExpose {
		t.Skip("no rank loads memory of others on this processor")
	}
	const n, count = 3, 48 << 10
	h := &house{}
	caps := collectives.Caps{Mapped: true}
	all := ranksOver(t, n, 1, Config{Single: SingleOn, Region: func(unsafe.Pointer, int) (*p2p.Region, int) {
		return nil, 0
	}}, caps, func(tr *inproc.Transport) p2p.Transport { return &housed{tr, h} })
	for _, it := range all {
		it.proxy.Lock()
		if err := it.runners[0].Expose(); err != nil {
			t.Fatal(err)
		}
		it.proxy.Unlock()
	}
	gather := func(kind collectives.Kind, x [n][]int32) {
		t.Helper()
		errs := make([]error, n)
		var wg sync.WaitGroup
		for r, it := range all {
			wg.Go(func() {
				for i := range x[r] {
					x[r][i] = int32(r + 1)
				}
				src, dst, want := x[r], x[r], slices.Repeat([]int32{n * (n + 1) / 2}, count)
				if kind == collectives.AllGather {
					dst = make([]int32, n*count)
					want = slices.Concat(slices.Repeat([]int32{1}, count), slices.Repeat([]int32{2}, count),
						slices.Repeat([]int32{3}, count))
				}
				q := &Request{Kind: kind, Op: kernels.Sum, Src: buffer(src, kernels.Int32),
					Dst: buffer(dst, kernels.Int32)}
				if err := it.runners[0].run(t.Context(), q, collectives.Auto); err != nil {
					errs[r] = fmt.Errorf("rank %d: %w", r, err)
				} else if !slices.Equal(dst, want) {
					errs[r] = fmt.Errorf("rank %d: the result is wrong", r)
				}
			})
		}
		wg.Wait()
		if err := errors.Join(errs...); err != nil {
			t.Fatal(err)
		}
	}
	for _, kind := range []collectives.Kind{collectives.AllGather, collectives.AllReduce} {
		open := [n][]int32{h.rent(count, false), h.rent(count, false), h.rent(count, false)}
		for i := 0; h.reads.Load() == 0; i++ { // until all links are up, and no calls follow without an exchange
			if i == 2*mostSent {
				t.Fatalf("%v: no single copies are made", kind)
			}
			gather(kind, open)
		}
		for rank := range n {
			before := h.reads.Load()
			mixed := open
			mixed[rank] = h.rent(count, true)
			gather(kind, mixed)
			if h.reads.Load() != before {
				t.Errorf("%v: single copies although rank %d has memory that no other reads", kind, rank)
			}
			for i := 0; h.reads.Load() == before; i++ {
				if i == 2*mostSent {
					t.Fatalf("%v: no single copies are made any more", kind)
				}
				gather(kind, open)
			}
		}
		h.reads.Store(0)
	}
}
