package memheap

import "math/bits"

// Alignments are classes: that of class c is Grain<<c.
const classes = 11

// An alignment that is less than a grain is that of a grain.
func class(align uint64) int { return max(0, bits.Len64(align/Grain)-1) }

// up rounds an offset up to a multiple of align. Offsets are at most the heap's size, so that only
// the last multiples of a heap of nearly 2^64 bytes overflow: the result is then less than offset.
func up(offset, align uint64) uint64 { return (offset + align - 1) &^ (align - 1) }

// A node is a block. The nodes of a heap lie side by side, without gaps, and no two free ones are
// neighbours. A node's priority is at least those of its children.
type node struct {
	offset, size uint64
	priority     uint32
	used         bool
	left, right  *node           // blocks with lower and with higher offsets
	room         [classes]uint64 // of the subtree, as largest
}

// node returns a block without children.
func (h *Heap) node(offset, size uint64, used bool) *node {
	// Splitmix64: a Weyl sequence, mixed.
	h.random += 0x9e3779b97f4a7c15
	z := h.random
	z = (z ^ z>>30) * 0xbf58476d1ce4e5b9
	z = (z ^ z>>27) * 0x94d049bb133111eb
	n := &node{offset: offset, size: size, used: used, priority: uint32(z >> 32)}
	n.update()
	return n
}

// largest returns the size of the largest block of an alignment's class that fits into a free block
// of the subtree.
func (n *node) largest(class int) uint64 {
	if n == nil {
		return 0
	}
	return n.room[class]
}

// own is largest for the node's own block.
func (n *node) own(class int) uint64 {
	begin := up(n.offset, Grain<<class)
	if skipped := begin - n.offset; !n.used && begin >= n.offset && skipped < n.size {
		return n.size - skipped
	}
	return 0
}

// update computes room from the node's block and children.
func (n *node) update() {
	for c := range n.room {
		n.room[c] = max(n.own(c), n.left.largest(c), n.right.largest(c))
	}
}

// first returns the free block with the lowest offset that has room for size bytes. There is one.
func (n *node) first(class int, size uint64) *node {
	for {
		switch {
		case n.left.largest(class) >= size:
			n = n.left
		case n.own(class) >= size:
			return n
		default:
			n = n.right
		}
	}
}

// at returns the block that contains an offset; nil if that is beyond the last block.
func (n *node) at(offset uint64) *node {
	for n != nil {
		switch {
		case offset < n.offset:
			n = n.left
		case offset-n.offset >= n.size:
			n = n.right
		default:
			return n
		}
	}
	return nil
}

// change calls f, which may change the size and the state, for the block that begins at an offset.
func (n *node) change(offset uint64, f func(*node)) {
	switch {
	case offset < n.offset:
		n.left.change(offset, f)
	case offset > n.offset:
		n.right.change(offset, f)
	default:
		f(n)
	}
	n.update()
}

// with returns the subtree with another block, which has no children.
func (n *node) with(b *node) *node {
	switch {
	case n == nil:
		return b
	case b.priority > n.priority:
		b.left, b.right = n.split(b.offset)
		b.update()
		return b
	case b.offset < n.offset:
		n.left = n.left.with(b)
	default:
		n.right = n.right.with(b)
	}
	n.update()
	return n
}

// split returns the blocks of the subtree that begin before an offset, and the others.
func (n *node) split(offset uint64) (before, after *node) {
	if n == nil {
		return nil, nil
	}
	if n.offset < offset {
		n.right, after = n.right.split(offset)
		before = n
	} else {
		before, n.left = n.left.split(offset)
		after = n
	}
	n.update()
	return before, after
}

// without returns the subtree without the block that begins at an offset.
func (n *node) without(offset uint64) *node {
	switch {
	case offset < n.offset:
		n.left = n.left.without(offset)
	case offset > n.offset:
		n.right = n.right.without(offset)
	default:
		return join(n.left, n.right)
	}
	n.update()
	return n
}

// join returns the blocks of two subtrees, all of the first before all of the second.
func join(before, after *node) *node {
	switch {
	case before == nil:
		return after
	case after == nil:
		return before
	case before.priority >= after.priority:
		before.right = join(before.right, after)
		before.update()
		return before
	default:
		after.left = join(before, after.left)
		after.update()
		return after
	}
}
