//go:build cgo && linux

package cuda_test

import (
	"bytes"
	"encoding/binary"
	"math/rand/v2"
	"reflect"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"
	"unsafe"

	"tutti/collectives"
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
			lengths := []int{1, 2, 8 / size, 100, 3000 / size, 5, 16384 / size, 7}
			if op == kernels.Sum && ranks == 4 && slices.Contains([]kernels.DType{kernels.Int8, kernels.BFloat16,
				kernels.Float32, kernels.Int64}, dt) { // several rounds, of elements of each size
				lengths = append(lengths, 2*cuda.PacketRound/size+3, 9)
			}
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
						h.Run(t, p.call(t, k, cuda.PacketCall{Kind: collectives.AllReduce, Op: op, DType: dt,
							Count: lengths[i], Dst: address(dsts[i][k].b), Src: address(srcs[i][k].b)}))
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
	var words [cuda.PacketWords]uint64
	for i := range words {
		words[i] = element(p.words[rank].b, 8, i)
	}
	return cuda.PacketFailureOf(words)
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

// call returns the launch of a rank's part of a call.
func (p *party) call(t *testing.T, rank int, c cuda.PacketCall) cuda.Launch {
	l, err := p.ranks[rank].Do(c)
	if err != nil {
		t.Error(err)
	}
	return l
}

// allReduce returns the call of an allreduce in place.
func allReduce(op kernels.Op, dt kernels.DType, b buffer) cuda.PacketCall {
	return cuda.PacketCall{Kind: collectives.AllReduce, Op: op, DType: dt, Count: len(b.b) / dt.Size(),
		Dst: address(b.b), Src: address(b.b)}
}

// TestPacketCalls makes calls of every kind, of several lengths, types and alignments, in a row.
// The parts of the ranks lie in another order than their numbers, and there is a part of no rank
// between them. What the interpreter of plans says is the result.
func TestPacketCalls(t *testing.T) {
	h := cudatest.Load(t, 1)
	const ranks = 3
	parts := []int{3, 0, 2} // part 1 is of no rank
	const size = 4          // parts
	p := newParty(ranks, time.Minute)
	random := rand.New(rand.NewPCG(3, 5))
	kinds := []collectives.Kind{collectives.AllReduce, collectives.ReduceScatter, collectives.AllGather,
		collectives.AllToAll, collectives.Broadcast, collectives.Reduce, collectives.Gather, collectives.Scatter}
	for _, n := range []int{8, 24, 4, 1001, 2*cuda.PacketRound + 40, 2, 1024} {
		for _, kind := range kinds {
			for root := range ranks {
				layout := kind.Layout()
				if root > 0 && (!layout.InAtRoot && !layout.OutAtRoot || n > cuda.PacketRound) {
					continue
				}
				shift := random.IntN(3) * 4 // of the buffers
				srcs, dsts, wants := make([]buffer, ranks), make([]buffer, ranks), make([][]byte, ranks)
				length := func(e collectives.Extent) int {
					if e.Parted() {
						return size * n
					}
					return n
				}
				for r := range ranks {
					srcs[r] = newBuffer(length(layout.In), shift)
					dsts[r] = newBuffer(length(layout.Out), shift*(r%2))
					fill(random, kernels.Uint8, srcs[r].b, 3)
					fill(random, kernels.Uint8, dsts[r].b, 3)
					wants[r] = append([]byte{}, dsts[r].b...)
				}
				part := func(b []byte, e collectives.Extent, rank int) []byte {
					if e.Parted() {
						return b[parts[rank]*n:][:n]
					}
					return b
				}
				for r := range ranks {
					if layout.OutAtRoot && r != root || kind == collectives.Broadcast && r == root {
						continue
					}
					if kind.Reduces() {
						clear(wants[r])
					}
					for from := range ranks {
						if layout.InAtRoot && from != root {
							continue
						}
						to, b := part(wants[r], layout.Out, from), part(srcs[from].b, layout.In, r)
						for i := range to {
							if kind.Reduces() {
								to[i] ^= b[i]
							} else {
								to[i] = b[i]
							}
						}
					}
				}
				var wg sync.WaitGroup
				for r := range ranks {
					c := cuda.PacketCall{Kind: kind, Op: kernels.BitXor, DType: kernels.Uint8, Root: root, Count: n,
						Parts: parts, Dst: address(dsts[r].b), Src: address(srcs[r].b)}
					if layout.InAtRoot && r != root {
						c.Src = 0
					}
					if layout.OutAtRoot && r != root {
						c.Dst = 0
					}
					wg.Go(func() { h.Run(t, p.call(t, r, c)) })
				}
				wg.Wait()
				for r := range ranks {
					if !bytes.Equal(dsts[r].b, wants[r]) || !dsts[r].intact() || p.failure(r).Reason != 0 {
						t.Fatalf("%v of %d bytes, root %d: rank %d has another result (%+v)", kind, n, root, r,
							p.failure(r))
					}
				}
				runtime.KeepAlive(srcs)
			}
		}
	}
}

// TestPacketsStop has ranks wait for one that never calls, until they are told to stop. Later calls
// do not begin.
func TestPacketsStop(t *testing.T) {
	h := cudatest.Load(t, 1)
	p := newParty(3, 0)
	all := []buffer{newBuffer(64, 0), newBuffer(64, 0)}
	calls := map[int]cuda.Launch{}
	for k := range 2 { // rank 2 is gone
		calls[k] = p.call(t, k, allReduce(kernels.Sum, kernels.Float32, all[k]))
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
		if f := p.failure(k); f.Reason != cuda.Stopped || element(p.words[k].b, 8, 2) != 0 {
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
		calls[k] = p.call(t, k, allReduce(kernels.Sum, kernels.Float32, all[k]))
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
	p.run(t, h, []buffer{b}, map[int]cuda.Launch{0: p.call(t, 0, allReduce(kernels.Sum, kernels.Float32, b))})
	if f := p.failure(0); f.Reason != cuda.Late || f.Rank != 1 {
		t.Errorf("%+v, want that rank 1 is late", f)
	}
}

// TestPacketsDiffer has ranks make different calls, of which each is told the other's, as their
// first, second and 600th call.
func TestPacketsDiffer(t *testing.T) {
	h := cudatest.Load(t, 1)
	of := func(op kernels.Op, dt kernels.DType, count int) cuda.PacketCall {
		return cuda.PacketCall{Kind: collectives.AllReduce, Op: op, DType: dt, Count: count}
	}
	broadcast := cuda.PacketCall{Kind: collectives.Broadcast, DType: kernels.Float32, Root: 1, Count: 10}
	other := broadcast
	other.Root = 0
	long := broadcast
	long.Count = cuda.PacketRound
	for name, calls := range map[string][2]cuda.PacketCall{
		"operation": {of(kernels.Sum, kernels.Float32, 10), of(kernels.Max, kernels.Float32, 10)},
		"type":      {of(kernels.Sum, kernels.Float32, 10), of(kernels.Sum, kernels.Int32, 10)},
		"longer":    {of(kernels.BitXor, kernels.Uint8, 16384), of(kernels.BitXor, kernels.Uint8, 9)},
		"shorter":   {of(kernels.Min, kernels.Bool, 1), of(kernels.Avg, kernels.Float64, 2048)},
		"kind":      {of(kernels.Sum, kernels.Float32, 10), broadcast},
		"root":      {broadcast, other},
		"rounds":    {long, broadcast},
	} {
		for _, before := range []int{0, 1, 599} {
			p := newParty(2, time.Minute)
			all := []buffer{newBuffer(4*cuda.PacketRound, 0), newBuffer(4*cuda.PacketRound, 0)}
			for range before {
				same := map[int]cuda.Launch{}
				for k := range 2 {
					same[k] = p.call(t, k, allReduce(kernels.BitOr, kernels.Uint8, buffer{b: all[k].b[:100]}))
				}
				p.run(t, h, all, same)
			}
			launches := map[int]cuda.Launch{}
			for k, c := range calls {
				c.Dst, c.Src = address(all[k].b), address(all[k].b)
				if before == 0 { // it is recorded after three others
					binary.LittleEndian.PutUint64(p.words[k].b[8*cuda.PacketsEnded:], 3)
				} else {
					c.Number = uint64(before) + 7
				}
				launches[k] = p.call(t, k, c)
			}
			p.run(t, h, all, launches)
			for k := range 2 {
				want := cuda.PacketFailure{Reason: cuda.Differs, Number: uint64(before) + 7, Rank: 1 - k,
					Ours: calls[k], Theirs: calls[1-k]}
				if before == 0 {
					want.Number, want.Recorded = 4, true
				}
				if f := p.failure(k); !reflect.DeepEqual(f, want) {
					t.Errorf("another %s after %d calls: rank %d: %+v, want %+v", name, before, k, f, want)
				}
			}
		}
	}
}

// TestPacketsRefuse checks the errors.
func TestPacketsRefuse(t *testing.T) {
	two := cuda.Packets{Inboxes: []uint64{0, 1 << 20}}
	sum := cuda.PacketCall{Kind: collectives.AllReduce, Op: kernels.Sum, DType: kernels.Float32, Count: 2}
	with := func(change func(c *cuda.PacketCall)) cuda.PacketCall {
		c := sum
		change(&c)
		return c
	}
	for name, c := range map[string]struct {
		x    cuda.Packets
		call cuda.PacketCall
		want string
	}{
		"one rank":       {cuda.Packets{Inboxes: two.Inboxes[:1]}, sum, "rank 0 of 1"},
		"too many ranks": {cuda.Packets{Inboxes: make([]uint64, 9)}, sum, "rank 0 of 9"},
		"no such rank":   {cuda.Packets{Rank: 2, Inboxes: two.Inboxes}, sum, "rank 2 of 2"},
		"no elements":    {two, with(func(c *cuda.PacketCall) { c.Count = -1 }), "-1 elements"},
		"no such type": {two, with(func(c *cuda.PacketCall) { c.DType, c.Kind = 0, collectives.AllToAll }),
			"elements of"},
		"bits of floats": {two, with(func(c *cuda.PacketCall) { c.Op = kernels.BitAnd }), "not defined"},
		"a barrier":      {two, with(func(c *cuda.PacketCall) { c.Kind = collectives.Barrier }), "barrier"},
		"own lengths":    {two, with(func(c *cuda.PacketCall) { c.Kind = collectives.AllGatherV }), "allgatherv"},
		"no such root": {two, with(func(c *cuda.PacketCall) { c.Kind, c.Root = collectives.Reduce, 2 }),
			"rank 2 as the root"},
		"no parts": {two, with(func(c *cuda.PacketCall) { c.Kind = collectives.AllGather }), "0 parts of 2"},
	} {
		_, err := c.x.Do(c.call)
		if err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v, want %q", name, err, c.want)
		}
	}
}
