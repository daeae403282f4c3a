//go:build cgo && linux

package cuda_test

import (
	"bytes"
	"math/rand/v2"
	"runtime"
	"strings"
	"sync"
	"testing"
	"unsafe"

	"tutti/kernels"
	"tutti/kernels/cuda"
	"tutti/kernels/cuda/cudatest"
)

// A party is ranks that exchange packets, in one process.
type party struct {
	inboxes []buffer
	words   []buffer // stop and failed of each rank
	ranks   []cuda.Packets
}

func newParty(ranks int, most uint64) *party {
	p := &party{}
	addresses := make([]uint64, ranks)
	for i := range ranks {
		inbox, words := newBuffer(int(cuda.InboxBytes(ranks, most)), 0), newBuffer(16, 0)
		clear(inbox.b)
		clear(words.b)
		p.inboxes, p.words = append(p.inboxes, inbox), append(p.words, words)
		addresses[i] = address(inbox.b)
	}
	for i := range ranks {
		p.ranks = append(p.ranks, cuda.Packets{Rank: i, Inboxes: addresses, Most: most, Stop: address(p.words[i].b),
			Failed: address(p.words[i].b) + 8})
	}
	return p
}

// TestAllReducePackets has 2 to 8 ranks make calls of all kinds, and compares all bits.
func TestAllReducePackets(t *testing.T) {
	h := cudatest.Load(t, 1)
	pairs(t, func(t *testing.T, op kernels.Op, dt kernels.DType) {
		reference, err := kernels.Reference(op, dt)
		if err != nil {
			t.Fatal(err)
		}
		size := dt.Size()
		for ranks := 2; ranks <= cuda.MaxPacketRanks; ranks += 2 {
			p := newParty(ranks, 3000)
			lengths := []int{1, 2, 8 / size, 100, 3000 / size, 5}
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
							uint64(len(srcs[i][k].b)), uint32(i+1))
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

// TestPacketsStop has ranks wait for one that never calls, until they are told to stop.
func TestPacketsStop(t *testing.T) {
	h := cudatest.Load(t, 1)
	p := newParty(3, 64)
	src, dst := newBuffer(64, 0), newBuffer(64, 0)
	var wg sync.WaitGroup
	for k, own := range []buffer{src, dst} { // rank 2 is gone
		l, err := p.ranks[k].AllReduce(kernels.Sum, kernels.Float32, address(own.b), address(own.b), 64, 1)
		if err != nil {
			t.Fatal(err)
		}
		wg.Go(func() { h.Run(t, l) })
	}
	for k := range 2 {
		h.Run(t, cuda.Write(address(p.words[k].b), 1))
	}
	wg.Wait()
	for k := range 2 {
		if element(p.words[k].b, 8, 1) != 1 {
			t.Errorf("rank %d does not say that it gave up", k)
		}
	}
	runtime.KeepAlive(dst)
}

// TestPacketsRefuse checks the errors.
func TestPacketsRefuse(t *testing.T) {
	two := []uint64{0, 1 << 20}
	for name, c := range map[string]struct {
		x     cuda.Packets
		op    kernels.Op
		bytes uint64
		call  uint32
		want  string
	}{
		"one rank":         {cuda.Packets{Inboxes: two[:1], Most: 64}, kernels.Sum, 8, 1, "rank 0 of 1"},
		"too many ranks":   {cuda.Packets{Inboxes: make([]uint64, 9), Most: 64}, kernels.Sum, 8, 1, "rank 0 of 9"},
		"no such rank":     {cuda.Packets{Rank: 2, Inboxes: two, Most: 64}, kernels.Sum, 8, 1, "rank 2 of 2"},
		"a long message":   {cuda.Packets{Inboxes: two, Most: 64}, kernels.Sum, 72, 1, "72 bytes"},
		"half an element":  {cuda.Packets{Inboxes: two, Most: 64}, kernels.Sum, 6, 1, "6 bytes"},
		"the call after 0": {cuda.Packets{Inboxes: two, Most: 64}, kernels.Sum, 8, 0, "replace the inboxes"},
		"bits of floats":   {cuda.Packets{Inboxes: two, Most: 64}, kernels.BitAnd, 8, 1, "not defined"},
	} {
		_, err := c.x.AllReduce(c.op, kernels.Float32, 0, 0, c.bytes, c.call)
		if err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v, want %q", name, err, c.want)
		}
	}
}
