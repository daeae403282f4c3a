package endpoint

import (
	"math/bits"
	"slices"
)

// Bounds of the memory that a session keeps for messages which come before their recvs: it is used
// again, because the collector would run often for it.
const (
	mostSpare  = 128 << 10 // bytes in all
	mostSpares = 32        // buffers
	leastSpare = 64        // bytes of one

	// Sizes up to here are rounded to powers of two, so that messages of many sizes share buffers.
	// Longer messages take at most a quarter more than they count, as the allocator rounds.
	mostRounded = 1 << 10
)

// spares is memory of messages that were handed over, the oldest first.
type spares struct {
	bufs [][]byte
	size int // bytes
}

// take returns n bytes, whose content is undefined.
func (s *spares) take(n int) []byte {
	for i := len(s.bufs) - 1; i >= 0; i-- {
		if b := s.bufs[i]; cap(b) >= n {
			s.remove(i)
			return b[:n]
		}
	}
	room := max(leastSpare, n)
	if n <= mostRounded {
		room = max(leastSpare, 1<<bits.Len(uint(max(n-1, 0))))
	}
	return make([]byte, n, room)
}

// put keeps b, which take has returned and nobody uses any more, and drops the oldest ones if there
// are too many.
func (s *spares) put(b []byte) {
	if cap(b) > mostSpare/4 {
		return
	}
	for len(s.bufs) == mostSpares || s.size+cap(b) > mostSpare {
		s.remove(0)
	}
	s.bufs = append(s.bufs, b)
	s.size += cap(b)
}

func (s *spares) remove(i int) {
	s.size -= cap(s.bufs[i])
	s.bufs = slices.Delete(s.bufs, i, i+1)
}

// Bounds of what is kept of other memory to be used again.
const (
	mostKept = 64   // objects of a pool
	mostRoom = 1024 // elements of an empty list
)

// pool has objects that are used again, because the collector would run often for them.
type pool[T any] struct{ kept []*T }

// take returns an object, which is zero.
func (p *pool[T]) take() *T {
	n := len(p.kept)
	if n == 0 {
		return new(T)
	}
	x := p.kept[n-1]
	p.kept = p.kept[:n-1]
	return x
}

// put takes an object back that nobody uses any more.
func (p *pool[T]) put(x *T) {
	*x = *new(T)
	if len(p.kept) < mostKept {
		p.kept = append(p.kept, x)
	}
}

// emptied returns a list without its elements that has its memory, unless that is large.
func emptied[T any](list []T) []T {
	if cap(list) > mostRoom {
		return nil
	}
	clear(list)
	return list[:0]
}
