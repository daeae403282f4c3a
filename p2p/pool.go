package p2p

import "math/bits"

// pool keeps frames that arrive early, in control memory. Block sizes are powers of two. The
// credits bound the blocks in use, and so the blocks kept for reuse.
type pool struct {
	control func(n int) *Region
	regions []*Region
	free_   [32][][]byte
}

const (
	minBlock = 256
	slabSize = 256 << 10
)

func (a *pool) get(n int) []byte {
	if n == 0 {
		return nil
	}
	class := bits.Len(uint(max(n, minBlock) - 1))
	if len(a.free_[class]) == 0 {
		block := 1 << class
		r := a.control(max(block, slabSize))
		a.regions = append(a.regions, r)
		b := r.Bytes()
		for off := 0; off+block <= len(b); off += block {
			a.free_[class] = append(a.free_[class], b[off:off+block:off+block])
		}
	}
	last := len(a.free_[class]) - 1
	b := a.free_[class][last]
	a.free_[class] = a.free_[class][:last]
	return b[:n]
}

func (a *pool) put(b []byte) {
	if cap(b) >= minBlock {
		class := bits.Len(uint(cap(b) - 1))
		a.free_[class] = append(a.free_[class], b[:cap(b)])
	}
}

func (a *pool) free() {
	for _, r := range a.regions {
		r.Free()
	}
	*a = pool{control: a.control}
}
