//go:build cgo && linux

package cuda

import (
	"cmp"
	"fmt"
	"maps"
	"math/bits"
	"slices"
	"unsafe"

	"tutti/device"
	"tutti/mem"
)

// Pinned memory comes from the driver in chunks, which stay until the device is closed, as far as
// that is bounded. The driver frees one when all work on the GPU has ended, and does not say
// whether its other calls wait meanwhile, as the work may for what this process does by such a
// call. Blocks of up to largestBlock are parts of a chunk of chunkSize, larger ones are chunks of
// their own, and all go to free lists: there is as much of each size as was in use at once. Large
// blocks that would make more than maxSpare bytes of free ones are given back by a goroutine.
const (
	smallestBlock = 64
	largestBlock  = 256 << 10
	chunkSize     = 1 << 20
	maxSpare      = 1 << 30
)

// A chunk is pinned memory.
type chunk struct {
	at     unsafe.Pointer
	n      int
	device uint64 // its address on the device
}

// A heap has the pinned memory of a device.
type heap struct {
	chunks []chunk // sorted by address
	used   map[unsafe.Pointer]int
	free   map[int][]unsafe.Pointer // by size
	rest   []byte                   // of the newest chunk
	left   []block                  // freed, but a stream may remember words in them

	spare, most int              // bytes of large blocks in free, at most
	large       []unsafe.Pointer // chunks that the driver is to free
	freer       bool             // a goroutine has it do so
}

// A block is memory that AllocHost has given.
type block struct {
	at unsafe.Pointer
	n  int
}

// holds reports whether p points into the block.
func (b block) holds(p unsafe.Pointer) bool { return uintptr(p)-uintptr(b.at) < uintptr(b.n) }

func newHeap() heap {
	return heap{used: map[unsafe.Pointer]int{}, free: map[int][]unsafe.Pointer{}, most: maxSpare}
}

// class returns the size of the block for n bytes: a power of two, or for large ones one of the
// seven between two of them, so that they have an eighth more than they need at most.
func class(n int) int {
	size := max(smallestBlock, 1<<bits.Len(uint(n-1)))
	if n > largestBlock {
		step := size / 16
		size = (n + step - 1) / step * step
	}
	return size
}

// take returns a block for n bytes, or nil if the heap needs another chunk.
func (h *heap) take(n int) unsafe.Pointer {
	size := class(n)
	if l := h.free[size]; len(l) > 0 {
		h.free[size] = l[:len(l)-1]
		if n > largestBlock {
			h.spare -= size
		}
		return l[len(l)-1]
	}
	if n > largestBlock || len(h.rest) < size {
		return nil
	}
	p := unsafe.Pointer(unsafe.SliceData(h.rest))
	h.rest = h.rest[size:]
	return p
}

// add adds a chunk, which is to be divided or not.
func (h *heap) add(c chunk, divide bool) {
	i, _ := slices.BinarySearchFunc(h.chunks, c.at, compareChunk)
	h.chunks = slices.Insert(h.chunks, i, c)
	if divide { // what is left of the former one is lost until the device is closed
		h.rest = unsafe.Slice((*byte)(c.at), c.n)
	}
}

func compareChunk(c chunk, at unsafe.Pointer) int { return cmp.Compare(uintptr(c.at), uintptr(at)) }

// find returns the chunk that holds n bytes from at, or nil.
func (h *heap) find(at unsafe.Pointer, n int) *chunk {
	i, ok := slices.BinarySearchFunc(h.chunks, at, compareChunk)
	if !ok {
		i--
	}
	if i < 0 || uintptr(at)+uintptr(n) > uintptr(h.chunks[i].at)+uintptr(h.chunks[i].n) {
		return nil
	}
	return &h.chunks[i]
}

// AllocHost implements device.HostAllocator. The memory is pinned and aligned to 64 bytes.
func (v *Device) AllocHost(n int) (mem.Memory, error) {
	if n < 1 {
		return mem.Memory{}, fmt.Errorf("cuda: allocating %d bytes of host memory: %w", n, device.ErrMemory)
	}
	if err := v.open(); err != nil {
		return mem.Memory{}, err
	}
	if m, ok := v.block(n); ok {
		return m, nil
	}
	v.settle()
	if m, ok := v.block(n); ok {
		return m, nil
	}
	small, c := n <= largestBlock, chunk{n: chunkSize}
	if !small {
		c.n = class(n)
	}
	var err error
	if c.at, c.device, err = v.gpu.allocHost(c.n); err != nil {
		return mem.Memory{}, err
	}
	v.mu.Lock()
	v.host.add(c, small)
	if !small {
		v.host.used[c.at] = n
	}
	v.mu.Unlock()
	if small {
		return v.AllocHost(n)
	}
	return mem.Host(unsafe.Slice((*byte)(c.at), n), mem.Anywhere), nil
}

// block returns a block, if there is one.
func (v *Device) block(n int) (mem.Memory, bool) {
	v.mu.Lock()
	defer v.mu.Unlock()
	p := v.host.take(n)
	if p == nil {
		return mem.Memory{}, false
	}
	v.host.used[p] = n
	return mem.Host(unsafe.Slice((*byte)(p), n), mem.Anywhere), true
}

// FreeHost implements device.HostAllocator. It does not wait. The memory is used again for blocks
// of the same size, and goes back to the driver when the device is closed, or, beyond 1 GiB of free
// memory, when the work on the GPU has ended; Close returns what the driver says. Memory with words
// that a stream has waited for is free when that stream has been given more work, or was closed.
func (v *Device) FreeHost(m mem.Memory) error {
	var at unsafe.Pointer
	if m.Loc().Host() {
		at = unsafe.Pointer(unsafe.SliceData(m.Bytes()))
	}
	v.mu.Lock()
	if n, ok := v.host.used[at]; !ok || n != m.Len() {
		v.mu.Unlock()
		return fmt.Errorf("cuda: freeing %d bytes of host memory that %s has not allocated so: %w", m.Len(), v.loc,
			device.ErrMemory)
	}
	delete(v.host.used, at)
	v.host.left = append(v.host.left, block{at, m.Len()})
	v.mu.Unlock()
	v.settle()
	return nil
}

// settle makes the blocks that were freed available, but for those with words that a stream
// remembers: it would look at words of others there, and store to them when it is closed.
func (v *Device) settle() {
	v.mu.Lock()
	left, streams := v.host.left, slices.Collect(maps.Keys(v.streams))
	v.host.left = nil
	v.mu.Unlock()
	kept := slices.DeleteFunc(slices.Clone(left), func(b block) bool {
		return !slices.ContainsFunc(streams, func(s *stream) bool { return s.remembers(b) })
	})
	v.mu.Lock()
	defer v.mu.Unlock()
	v.host.left = append(v.host.left, kept...)
	h := &v.host
	for _, b := range left {
		size := class(b.n)
		switch {
		case slices.Contains(kept, b):
		case b.n <= largestBlock || h.spare+size <= h.most:
			h.free[size] = append(h.free[size], b.at)
			if b.n > largestBlock {
				h.spare += size
			}
		case !v.closed: // Close frees all chunks
			h.chunks = slices.DeleteFunc(h.chunks, func(c chunk) bool { return c.at == b.at })
			h.large = append(h.large, b.at)
			if !h.freer {
				h.freer = true
				v.running.Go(v.freeLarge)
			}
		}
	}
}

// freeLarge has the driver free chunks, which waits for the work on the GPU.
func (v *Device) freeLarge() {
	v.mu.Lock()
	defer v.mu.Unlock()
	for h := &v.host; ; {
		if len(h.large) == 0 {
			h.freer = false
			return
		}
		at := h.large[0]
		h.large = slices.Delete(h.large, 0, 1)
		v.mu.Unlock()
		v.fail(v.gpu.freeHost(at))
		v.mu.Lock()
	}
}

// reach returns the address on the device of its own memory or of pinned memory. ok is false for
// other host memory.
func (v *Device) reach(m mem.Memory) (at uint64, ok bool, err error) {
	if m.Loc() == v.loc {
		return m.Address(), true, nil
	}
	if !m.Loc().Host() {
		return 0, false, fmt.Errorf("cuda: %s: memory at %q: %w", v.loc, m.Loc(), device.ErrMemory)
	}
	p := unsafe.Pointer(unsafe.SliceData(m.Bytes()))
	v.mu.Lock()
	defer v.mu.Unlock()
	if c := v.host.find(p, m.Len()); c != nil {
		return c.device + uint64(uintptr(p)-uintptr(c.at)), true, nil
	}
	return 0, false, nil
}
