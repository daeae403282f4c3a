package memheap

import (
	"errors"
	"fmt"
	"math/bits"
)

// Grain is the unit of allocation in bytes. Blocks begin and end at multiples of it, so that two
// blocks never share a cache line.
const Grain = 64

// MaxAlign is the largest alignment in bytes: the largest page of the supported processors.
const MaxAlign = 64 << 10

// ErrNotAllocated says that no allocated block begins at an offset. It comes wrapped.
var ErrNotAllocated = errors.New("no allocated block begins there")

// ExhaustedError says that a block fits nowhere. All numbers are bytes.
type ExhaustedError struct {
	Size    uint64 // that was asked for
	Align   uint64
	Total   uint64 // of the heap
	Free    uint64 // in all free blocks
	Largest uint64 // free block
	Aligned uint64 // largest block that fits at a multiple of Align
}

func (e *ExhaustedError) Error() string {
	s := fmt.Sprintf("memheap: no room for %d bytes at a multiple of %d: ", e.Size, e.Align)
	switch {
	case e.Size > e.Total:
		return s + fmt.Sprintf("the heap has %d bytes in all; make a larger one", e.Total)
	case e.Largest < e.Size:
		s += fmt.Sprintf("the largest free block has %d bytes", e.Largest)
	default:
		s += fmt.Sprintf("the largest free block has %d bytes, but there is room for at most %d at such an offset",
			e.Largest, e.Aligned)
	}
	return s + fmt.Sprintf("; %d of %d bytes are free; free blocks or make a larger heap", e.Free, e.Total)
}

// Heap divides the offsets from 0 to its size into blocks. Its methods must not be called at the
// same time.
type Heap struct {
	root   *node // nil if the heap has no room for a single block
	total  uint64
	free   uint64
	random uint64 // state of the generator of priorities
}

// New returns a heap of size bytes, rounded down to a multiple of Grain, which is all free.
// Alignment is that of offsets: the memory must begin at an address with the largest alignment that
// will be asked for.
func New(size uint64) *Heap {
	size -= size % Grain
	h := &Heap{total: size, free: size}
	if size > 0 {
		h.root = h.node(0, size, false)
	}
	return h
}

// Size returns the size of the heap in bytes.
func (h *Heap) Size() uint64 { return h.total }

// Unused returns how many bytes are in no allocated block. They need not be adjacent.
func (h *Heap) Unused() uint64 { return h.free }

// Alloc allocates size bytes, rounded up to a multiple of Grain, at the lowest offset that fits and
// is a multiple of align. The size is at least 1 and align a power of two up to MaxAlign. If the
// block fits nowhere, the error is an *ExhaustedError.
func (h *Heap) Alloc(size, align uint64) (offset uint64, err error) {
	switch {
	case size == 0:
		return 0, errors.New("memheap: a block needs at least 1 byte, 0 were asked for")
	case align > MaxAlign || bits.OnesCount64(align) != 1:
		return 0, fmt.Errorf("memheap: %d is not an alignment: it must be a power of two up to %d", align, MaxAlign)
	}
	c := class(align)
	if size > h.total || h.root.largest(c) < size {
		return 0, &ExhaustedError{size, align, h.total, h.free, h.root.largest(0), h.root.largest(c)}
	}
	size += (Grain - size%Grain) % Grain // at most the size of the free block, which is a multiple of Grain
	b := h.root.first(c, size)
	begin, end := b.offset, b.offset+b.size
	offset = up(begin, align)
	// The node becomes the part in front of the new block, if there is one, or else the new block.
	if offset > begin {
		h.root.change(begin, func(b *node) { b.size = offset - begin })
		h.root = h.root.with(h.node(offset, size, true))
	} else {
		h.root.change(begin, func(b *node) { b.size, b.used = size, true })
	}
	if offset+size < end {
		h.root = h.root.with(h.node(offset+size, end-offset-size, false))
	}
	h.free -= size
	return offset, nil
}

// Free frees the block that begins at an offset, which is a result of Alloc. If there is no such
// block, the error wraps ErrNotAllocated and nothing has changed.
func (h *Heap) Free(offset uint64) error {
	b := h.root.at(offset)
	switch {
	case b == nil:
		return fmt.Errorf("memheap: offset %d is not in the heap, which has %d bytes: %w", offset, h.total,
			ErrNotAllocated)
	case !b.used:
		return fmt.Errorf("memheap: offset %d is free, as %d bytes from %d on are: %w", offset, b.size, b.offset,
			ErrNotAllocated)
	case b.offset != offset:
		return fmt.Errorf("memheap: offset %d is within the block of %d bytes at %d: %w", offset, b.size, b.offset,
			ErrNotAllocated)
	}
	h.free += b.size
	begin, end := offset, offset+b.size
	if next := h.root.at(end); next != nil && !next.used {
		end += next.size
		h.root = h.root.without(next.offset)
	}
	if previous := h.root.at(offset - 1); offset > 0 && !previous.used {
		begin = previous.offset
		h.root = h.root.without(offset)
	}
	h.root.change(begin, func(b *node) { b.size, b.used = end-begin, false })
	return nil
}
