package memheap

import (
	"errors"
	"fmt"
	"math"
	"math/bits"
	"math/rand/v2"
	"testing"
)

// A model is a heap as an array of grains, each with the number of its block; 0 is free.
type model struct {
	grains []int
	blocks int // so far
}

// fits returns the first grain at a multiple of align from which n grains are free.
func (m *model) fits(n int, align uint64) (int, bool) {
	step := max(1, int(align/Grain))
	for at := 0; at+n <= len(m.grains); at += step {
		free := 0
		for free < n && m.grains[at+free] == 0 {
			free++
		}
		if free == n {
			return at, true
		}
	}
	return 0, false
}

// largest returns the number of grains of the largest block that fits at a multiple of align.
func (m *model) largest(align uint64) int {
	most, step := 0, max(1, int(align/Grain))
	for at := 0; at < len(m.grains); {
		n := 0
		for at+n < len(m.grains) && m.grains[at+n] == 0 {
			n++
		}
		most = max(most, n)
		at += max(step, (n+step-1)/step*step)
	}
	return most
}

func (m *model) unused() uint64 {
	n := uint64(0)
	for _, b := range m.grains {
		if b == 0 {
			n += Grain
		}
	}
	return n
}

// alloc allocates like Heap.Alloc, and returns that method's error if the block fits nowhere.
func (m *model) alloc(size, align uint64) (uint64, *ExhaustedError) {
	if size <= uint64(len(m.grains))*Grain {
		n := int((size + Grain - 1) / Grain)
		if at, ok := m.fits(n, align); ok {
			m.blocks++
			for i := range n {
				m.grains[at+i] = m.blocks
			}
			return uint64(at) * Grain, nil
		}
	}
	return 0, &ExhaustedError{size, align, uint64(len(m.grains)) * Grain, m.unused(), uint64(m.largest(1)) * Grain,
		uint64(m.largest(align)) * Grain}
}

// free frees like Heap.Free, and reports whether a block begins at the offset.
func (m *model) free(offset uint64) bool {
	at := int(offset / Grain)
	if offset%Grain != 0 || at >= len(m.grains) || m.grains[at] == 0 || at > 0 && m.grains[at-1] == m.grains[at] {
		return false
	}
	for b := m.grains[at]; at < len(m.grains) && m.grains[at] == b; at++ {
		m.grains[at] = 0
	}
	return true
}

// check checks the structure of a heap, and that its blocks are those of the model if that is not
// nil. It returns the depth of the tree.
func check(t *testing.T, h *Heap, m *model) int {
	t.Helper()
	end, free, wasFree, deepest := uint64(0), uint64(0), false, 0
	var walk func(n *node, depth int)
	walk = func(n *node, depth int) {
		if n == nil {
			return
		}
		deepest = max(deepest, depth)
		walk(n.left, depth+1)
		if n.offset != end || n.size == 0 || n.offset%Grain != 0 || n.size%Grain != 0 {
			t.Fatalf("a block of %d bytes begins at %d, the one before it ends at %d", n.size, n.offset, end)
		}
		if wasFree && !n.used {
			t.Fatalf("two free blocks meet at %d", end)
		}
		if n.left != nil && n.left.priority > n.priority || n.right != nil && n.right.priority > n.priority {
			t.Fatalf("the block at %d has a lower priority than its children", n.offset)
		}
		end, wasFree = end+n.size, !n.used
		if !n.used {
			free += n.size
		}
		if m != nil {
			for at := n.offset / Grain; at < end/Grain; at++ {
				begins := at == n.offset/Grain
				if (m.grains[at] != 0) != n.used || n.used && !begins && m.grains[at-1] != m.grains[at] {
					t.Fatalf("the model disagrees with the block of %d bytes at %d", n.size, n.offset)
				}
			}
		}
		room := n.room
		if n.update(); room != n.room {
			t.Fatalf("the block at %d has room %v, should be %v", n.offset, room, n.room)
		}
		walk(n.right, depth+1)
	}
	walk(h.root, 1)
	if end != h.Size() || free != h.Unused() {
		t.Fatalf("the blocks end at %d of %d bytes, %d are free of %d", end, h.Size(), free, h.Unused())
	}
	return deepest
}

// run has a heap and its model do what a program says: two bytes for each call.
func run(t *testing.T, size uint64, program []byte) {
	h, m := New(size), &model{grains: make([]int, size/Grain)}
	var live []uint64
	for ; len(program) >= 2; program = program[2:] {
		op, arg := program[0], uint64(program[1])
		switch {
		case op < 0x60 && len(live) > 0: // free a block
			i := int(op) * 256 % len(live)
			i = (i + int(arg)) % len(live)
			if err := h.Free(live[i]); err != nil || !m.free(live[i]) {
				t.Fatalf("Free of the block at %d: %v", live[i], err)
			}
			live[i] = live[len(live)-1]
			live = live[:len(live)-1]
		case op < 0x70: // free any offset
			offset := arg * (size/256 + 1)
			if op&1 == 0 {
				offset -= offset % Grain
			}
			err, ok := h.Free(offset), m.free(offset)
			if ok != (err == nil) || !ok && !errors.Is(err, ErrNotAllocated) {
				t.Fatalf("Free(%d): %v; a block begins there: %v", offset, err, ok)
			}
			if ok {
				for i, o := range live {
					if o == offset {
						live = append(live[:i], live[i+1:]...)
						break
					}
				}
			}
		default:
			align := uint64(1) << (op & 0xf)
			n := 1 + arg
			if op >= 0xe0 {
				n *= 61 // several grains
			}
			offset, err := h.Alloc(n, align)
			want, exhausted := m.alloc(n, align)
			var got *ExhaustedError
			switch {
			case exhausted == nil && (err != nil || offset != want):
				t.Fatalf("Alloc(%d, %d) = %d, %v; want %d", n, align, offset, err, want)
			case exhausted != nil && (!errors.As(err, &got) || *got != *exhausted):
				t.Fatalf("Alloc(%d, %d) = %d, %v; want %v", n, align, offset, err, exhausted)
			case exhausted == nil:
				live = append(live, offset)
			}
		}
		if len(program)%16 < 2 {
			check(t, h, m)
		}
	}
	for _, o := range live {
		if err := h.Free(o); err != nil {
			t.Fatal(err)
		}
	}
	if h.Unused() != h.Size() || h.Size() > 0 && (h.root.left != nil || h.root.right != nil) {
		t.Fatalf("all blocks are freed, but %d of %d bytes are unused, or not in one block", h.Unused(), h.Size())
	}
}

func TestHeapIsLikeItsModel(t *testing.T) {
	random := rand.New(rand.NewPCG(1, 2))
	for range 200 {
		program := make([]byte, 2*random.IntN(300))
		for i := range program {
			program[i] = byte(random.Uint32())
		}
		run(t, uint64(random.IntN(200_000)), program)
	}
}

func FuzzHeap(f *testing.F) {
	f.Add(uint32(0), []byte{0x80, 1})
	f.Add(uint32(4096), []byte{0x86, 63, 0x86, 64, 0x70, 1, 0, 1, 0xec, 200, 0x60, 0, 0x86, 0})
	f.Fuzz(func(t *testing.T, size uint32, program []byte) {
		run(t, uint64(size%(1<<18)), program[:min(len(program), 1000)])
	})
}

// An allocator that takes the end of its last block for the sum of its live bytes hands out the
// middle block of this test twice.
func TestFreeOutOfOrder(t *testing.T) {
	h := New(4 * 64)
	for want := range uint64(3) {
		if o, err := h.Alloc(64, 64); o != want*64 || err != nil {
			t.Fatal(o, err)
		}
	}
	if err := h.Free(0); err != nil {
		t.Fatal(err)
	}
	if o, err := h.Alloc(128, 64); err == nil {
		t.Fatalf("128 bytes at %d, but only the first and the last 64 are free", o)
	}
	if o, err := h.Alloc(64, 128); o != 0 || err != nil {
		t.Fatal(o, err)
	}
	if err := h.Free(64); err != nil {
		t.Fatal(err)
	}
	if err := h.Free(128); err != nil {
		t.Fatal(err)
	}
	if o, err := h.Alloc(192, 1); o != 64 || err != nil {
		t.Fatal(o, err)
	}
}

func TestBadCallsChangeNothing(t *testing.T) {
	h := New(1 << 20)
	if _, err := h.Alloc(100, 1); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct{ size, align uint64 }{
		{0, 64}, {64, 0}, {64, 24}, {64, 2 * MaxAlign}, {64, 1 << 63}, {64, math.MaxUint64},
	} {
		_, err := h.Alloc(c.size, c.align)
		var e *ExhaustedError
		if err == nil || errors.As(err, &e) {
			t.Errorf("Alloc(%d, %d): %v", c.size, c.align, err)
		}
	}
	for _, size := range []uint64{1<<20 + 1, math.MaxUint64 - MaxAlign + 2, math.MaxUint64} {
		for _, align := range []uint64{1, 64, MaxAlign} {
			_, err := h.Alloc(size, align)
			var e *ExhaustedError
			if !errors.As(err, &e) || e.Free != 1<<20-128 || e.Largest != 1<<20-128 {
				t.Errorf("Alloc(%d, %d): %v", size, align, err)
			}
		}
	}
	for _, offset := range []uint64{1, 64, 127, 128, 1<<20 - 1, 1 << 20, math.MaxUint64} {
		if err := h.Free(offset); !errors.Is(err, ErrNotAllocated) {
			t.Errorf("Free(%d): %v", offset, err)
		}
	}
	check(t, h, nil)
	if err := h.Free(0); err != nil {
		t.Fatal(err)
	}
	if err := h.Free(0); !errors.Is(err, ErrNotAllocated) {
		t.Errorf("Free of a freed block: %v", err)
	}
	check(t, h, nil)
}

func TestHeapOfAllAddresses(t *testing.T) {
	h := New(math.MaxUint64)
	first, err := h.Alloc(math.MaxUint64-MaxAlign+2, 1)
	if err != nil || first != 0 {
		t.Fatal(first, err)
	}
	// The next multiple of MaxAlign would be 2^64.
	var e *ExhaustedError
	if o, err := h.Alloc(64, MaxAlign); !errors.As(err, &e) || e.Aligned != 0 || e.Largest == 0 {
		t.Fatal(o, err)
	}
	if o, err := h.Alloc(e.Largest, 1); o != h.Size()-e.Largest || err != nil {
		t.Fatal(o, err)
	}
	if h.Unused() != 0 {
		t.Fatalf("%d bytes unused", h.Unused())
	}
	check(t, h, nil)
}

func TestErrorsNameWhatIsFree(t *testing.T) {
	h := New(8192)
	for range 3 {
		if _, err := h.Alloc(1024, 64); err != nil {
			t.Fatal(err)
		}
	}
	if err := h.Free(1024); err != nil {
		t.Fatal(err)
	}
	exhausted := func(size, align uint64) error {
		_, err := h.Alloc(size, align)
		return err
	}
	for _, c := range []struct {
		err  error
		want string
	}{
		{exhausted(5121, 1),
			"memheap: no room for 5121 bytes at a multiple of 1: the largest free block has 5120 bytes; " +
				"6144 of 8192 bytes are free; free blocks or make a larger heap"},
		{exhausted(5120, 4096),
			"memheap: no room for 5120 bytes at a multiple of 4096: the largest free block has 5120 " +
				"bytes, but there is room for at most 4096 at such an offset; 6144 of 8192 bytes are " +
				"free; free blocks or make a larger heap"},
		{exhausted(8193, 64),
			"memheap: no room for 8193 bytes at a multiple of 64: the heap has 8192 bytes in all; make a " +
				"larger one"},
		{h.Free(8192),
			"memheap: offset 8192 is not in the heap, which has 8192 bytes: no allocated block begins there"},
		{h.Free(1024), "memheap: offset 1024 is free, as 1024 bytes from 1024 on are: no allocated block begins there"},
		{h.Free(2112),
			"memheap: offset 2112 is within the block of 1024 bytes at 2048: no allocated block begins there"},
	} {
		if c.err == nil || c.err.Error() != c.want {
			t.Errorf("%v\nwant %s", c.err, c.want)
		}
	}
}

// churn allocates live blocks of sizes and alignments as queues and doorbells have them, and
// returns a function that frees one of them and allocates another.
func churn(tb testing.TB, live int) (*Heap, func()) {
	random := rand.New(rand.NewPCG(3, 4))
	h := New(uint64(live) * 16 << 10)
	offsets := make([]uint64, live)
	alloc := func(i int) {
		size, align := uint64(8), uint64(64) // a doorbell
		if random.IntN(4) == 0 {
			size, align = 1+random.Uint64N(32<<10), 4096 // a queue
		}
		o, err := h.Alloc(size, align)
		if err != nil {
			tb.Fatal(err)
		}
		offsets[i] = o
	}
	for i := range offsets {
		alloc(i)
	}
	return h, func() {
		i := random.IntN(live)
		if err := h.Free(offsets[i]); err != nil {
			tb.Fatal(err)
		}
		alloc(i)
	}
}

func TestManyBlocksAreNotDeep(t *testing.T) {
	const live = 100_000
	h, step := churn(t, live)
	for range live {
		step()
	}
	// Random trees of n nodes are about 2.5 log2 n deep. The priorities are the same in every run.
	if depth := check(t, h, nil); depth > 4*bits.Len(live) {
		t.Errorf("%d blocks are %d deep", live, depth)
	}
}

func BenchmarkFreeAlloc(b *testing.B) {
	for _, live := range []int{100, 10_000, 100_000} {
		b.Run(fmt.Sprintf("live=%d", live), func(b *testing.B) {
			_, step := churn(b, live)
			b.ReportAllocs()
			for b.Loop() {
				step()
			}
		})
	}
}
