//go:build cgo && linux

package cuda_test

import (
	"bytes"
	"math/rand/v2"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"
	"unsafe"

	"tutti/kernels"
	"tutti/kernels/cuda"
	"tutti/kernels/cuda/cudatest"
)

// A party is ranks that exchange packets, in one process.
type party struct {
	inboxes []buffer
	words   []buffer // of each rank
	ranks   []cuda.Packets
}

func newParty(ranks int, limit time.Duration) *party {
	p := &party{}
	addresses := make([]uint64, ranks)
	for i := range ranks {
		inbox, words := newBuffer(cuda.InboxBytes(ranks), 0), newBuffer(8*cuda.PacketWords, 0)
		clear(inbox.b)
		clear(words.b)
		p.inboxes, p.words = append(p.inboxes, inbox), append(p.words, words)
		addresses[i] = address(inbox.b)
	}
	for i := range ranks {
		p.ranks = append(p.ranks, cuda.Packets{Rank: i, Inboxes: addresses, Words: address(p.words[i].b),
			Limit: limit})
	}
	return p
}

// TestAllReducePackets has ranks make calls of all kinds, and compares all bits. Sums of every type
// are of 2, 4, 6 and 8 ranks, and so is every other operation, with another type for each number.
func TestAllReducePackets(t *testing.T) {
	h := cudatest.Load(t, 1)
	pairs(t, func(t *testing.T, op kernels.Op, dt kernels.DType) {
		reference, err := kernels.Reference(op, dt)
		if err != nil {
			t.Fatal(err)
		}
		size := dt.Size()
		for ranks := 2; ranks <= cuda.MaxPacketRanks; ranks += 2 {
			if op != kernels.Sum && (int(op)+int(dt)-ranks/2)%4 != 0 {
				continue
			}
			p := newParty(ranks, time.Minute)
			lengths := []int{1, 2, 8 / size, 100, 3000 / size, 5, cuda.MaxPacketBytes / size, 7}
			srcs, dsts := make([][]buffer, len(lengths)), make([][]buffer, len(lengths))
			wants := make([][]byte, len(lengths))
			r := rand.New(rand.NewPCG(uint64(ranks), uint64(dt)))
			for i, n := range lengths {
				pointers := make([]unsafe.Pointer, ranks)
				for k := range ranks {
					src := newBuffer(n*size, i*(k+1))
					fill(r, dt, src.b, 3)
					dst := newBuffer(n*size, i*k)
					if k == 0 {
						dst = src // in place
					}
					srcs[i], dsts[i] = append(srcs[i], src), append(dsts[i], dst)
					pointers[k] = unsafe.Pointer(unsafe.SliceData(bytes.Clone(src.b)))
				}
				wants[i] = make([]byte, n*size)
				reference(unsafe.Pointer(unsafe.SliceData(wants[i])), pointers, n)
			}
			var wg sync.WaitGroup
			for k := range ranks {
				wg.Go(func() {
					for i := range lengths {
						l, err := p.ranks[k].AllReduce(op, dt, address(dsts[i][k].b), address(srcs[i][k].b),
							uint64(len(srcs[i][k].b)))
						if err != nil {
							t.Error(err)
							return
						}
						h.Run(t, l)
					}
				})
			}
			wg.Wait()
			for i := range lengths {
				for k, dst := range dsts[i] {
					if !bytes.Equal(dst.b, wants[i]) || !dst.intact() {
						t.Fatalf("call %d of %d ranks: rank %d has %x, want %x", i+1, ranks, k, dst.b, wants[i])
					}
				}
			}
			for k, inbox := range p.inboxes {
				if !inbox.intact() || element(p.words[k].b, 8, 1) != 0 {
					t.Fatalf("rank %d of %d: written around the inbox, or given up", k, ranks)
				}
			}
			runtime.KeepAlive(srcs)
		}
	})
}

// failure returns why a rank gave up.
func (p *party) failure(rank int) cuda.PacketFailure {
	return cuda.PacketFailureOf(element(p.words[rank].b, 8, 1))
}

// run has some of the ranks make one call each, on memory, and returns when all have
// ended.
func (p *party) run(t *testing.T, h *cudatest.Host, memory []buffer, calls map[int]cuda.Launch) {
	var wg sync.WaitGroup
	for _, l := range calls {
		wg.Go(func() { h.Run(t, l) })
	}
	wg.Wait()
	runtime.KeepAlive(memory)
}

// call returns the launch of a rank's allreduce.
func (p *party) call(t *testing.T, rank int, op kernels.Op, dt kernels.DType, b buffer) cuda.Launch {
	l, err := p.ranks[rank].AllReduce(op, dt, address(b.b), address(b.b), uint64(len(b.b)))
	if err != nil {
		t.Fatal(err)
	}
	return l
}

// TestPacketsStop has ranks wait for one that never calls, until they are told to stop. Later calls
// do not begin.
func TestPacketsStop(t *testing.T) {
	h := cudatest.Load(t, 1)
	p := newParty(3, 0)
	all := []buffer{newBuffer(64, 0), newBuffer(64, 0)}
	calls := map[int]cuda.Launch{}
	for k := range 2 { // rank 2 is gone
		calls[k] = p.call(t, k, kernels.Sum, kernels.Float32, all[k])
	}
	stopped := make(chan struct{})
	go func() {
		defer close(stopped)
		for k := range 2 {
			h.Run(t, cuda.Write(address(p.words[k].b), 1))
		}
	}()
	p.run(t, h, all, calls)
	<-stopped
	for k := range 2 {
		if f := p.failure(k); f != (cuda.PacketFailure{Reason: cuda.Stopped}) || element(p.words[k].b, 8, 2) != 0 {
			t.Errorf("rank %d: %+v, want that it was stopped", k, f)
		}
	}
	before := bytes.Clone(all[0].b)
	h.Run(t, calls[0])
	if element(p.words[0].b, 8, 2) != 1 || !bytes.Equal(all[0].b, before) {
		t.Error("a call after that does not say that it has not begun")
	}
}

// TestPacketsStoppedBefore has ranks that were told to stop before they begin: they have no result,
// although all packets come.
func TestPacketsStoppedBefore(t *testing.T) {
	h := cudatest.Load(t, 1)
	p := newParty(2, time.Minute)
	all := []buffer{newBuffer(64, 0), newBuffer(64, 0)}
	calls := map[int]cuda.Launch{}
	for k := range 2 {
		h.Run(t, cuda.Write(address(p.words[k].b), 1))
		calls[k] = p.call(t, k, kernels.Sum, kernels.Float32, all[k])
		for i := range all[k].b {
			all[k].b[i] = 7
		}
	}
	p.run(t, h, all, calls)
	for k := range 2 {
		if f := p.failure(k); f.Reason != cuda.Stopped || !bytes.Equal(all[k].b, bytes.Repeat([]byte{7}, 64)) {
			t.Errorf("rank %d: %+v, %x", k, f, all[k].b)
		}
	}
}

// TestPacketsLate has a rank wait for one that does not come in time.
func TestPacketsLate(t *testing.T) {
	h := cudatest.Load(t, 1)
	p := newParty(2, time.Millisecond)
	b := newBuffer(64, 0)
	p.run(t, h, []buffer{b}, map[int]cuda.Launch{0: p.call(t, 0, kernels.Sum, kernels.Float32, b)})
	if f := p.failure(0); f != (cuda.PacketFailure{Reason: cuda.Late, Rank: 1}) {
		t.Errorf("%+v, want that rank 1 is late", f)
	}
}

// TestPacketsDiffer has ranks make different calls, of which each is told the other's, as their
// first, second and 600th call.
func TestPacketsDiffer(t *testing.T) {
	h := cudatest.Load(t, 1)
	type call struct {
		op    kernels.Op
		dt    kernels.DType
		count int
	}
	for name, calls := range map[string][2]call{
		"operation": {{kernels.Sum, kernels.Float32, 10}, {kernels.Max, kernels.Float32, 10}},
		"type":      {{kernels.Sum, kernels.Float32, 10}, {kernels.Sum, kernels.Int32, 10}},
		"longer":    {{kernels.BitXor, kernels.Uint8, 16384}, {kernels.BitXor, kernels.Uint8, 9}},
		"shorter":   {{kernels.Min, kernels.Bool, 1}, {kernels.Avg, kernels.Float64, 2048}},
	} {
		for _, before := range []int{0, 1, 599} {
			p := newParty(2, time.Minute)
			all := []buffer{newBuffer(16384, 0), newBuffer(16384, 0)}
			for range before {
				same := map[int]cuda.Launch{}
				for k := range 2 {
					same[k] = p.call(t, k, kernels.BitOr, kernels.Uint8, buffer{b: all[k].b[:100]})
				}
				p.run(t, h, all, same)
			}
			launches := map[int]cuda.Launch{}
			for k, c := range calls {
				launches[k] = p.call(t, k, c.op, c.dt, buffer{b: all[k].b[:c.count*c.dt.Size()]})
			}
			p.run(t, h, all, launches)
			for k := range 2 {
				o := calls[1-k]
				want := cuda.PacketFailure{Reason: cuda.Differs, Rank: 1 - k, Op: o.op, DType: o.dt, Count: o.count}
				if f := p.failure(k); f != want {
					t.Errorf("another %s after %d calls: rank %d: %+v, want %+v", name, before, k, f, want)
				}
			}
		}
	}
}

// TestPacketsRefuse checks the errors.
func TestPacketsRefuse(t *testing.T) {
	two := []uint64{0, 1 << 20}
	for name, c := range map[string]struct {
		x     cuda.Packets
		op    kernels.Op
		bytes uint64
		want  string
	}{
		"one rank":        {cuda.Packets{Inboxes: two[:1]}, kernels.Sum, 8, "rank 0 of 1"},
		"too many ranks":  {cuda.Packets{Inboxes: make([]uint64, 9)}, kernels.Sum, 8, "rank 0 of 9"},
		"no such rank":    {cuda.Packets{Rank: 2, Inboxes: two}, kernels.Sum, 8, "rank 2 of 2"},
		"a long message":  {cuda.Packets{Inboxes: two}, kernels.Sum, cuda.MaxPacketBytes + 4, "16388 bytes"},
		"half an element": {cuda.Packets{Inboxes: two}, kernels.Sum, 6, "6 bytes"},
		"bits of floats":  {cuda.Packets{Inboxes: two}, kernels.BitAnd, 8, "not defined"},
	} {
		_, err := c.x.AllReduce(c.op, kernels.Float32, 0, 0, c.bytes)
		if err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v, want %q", name, err, c.want)
		}
	}
}
