package cuda

import (
	"errors"
	"fmt"
	"unsafe"

	"tutti/kernels"
)

const placed = "_placed"

// MaxPlaceSources is the most sources of a reduction in a [Place].
const MaxPlaceSources = 48

// MaxPlaceCopies is the most copies in a [Place].
const MaxPlaceCopies = MaxPlaceSources / 3

// PlaceSize is the size of a [Place] in bytes. It begins at a multiple of 8.
const PlaceSize = unsafe.Sizeof(Place{})

var _ = [1]struct{}{}[PlaceSize-472] // as in src/params.h

// What is in a place, as in src/params.h.
const (
	placeCopies = 1 + iota
	placeReduction
)

// A Place is memory for work that is chosen after a stream was given the kernels that do it:
// copies, a reduction, or nothing, which is the zero Place. Its memory is that of the device when
// the kernels begin, so the host writes one of its own, which the stream copies there before.
type Place struct {
	kind, copies uint32
	word, value  uint64
	sharedParams
	src [MaxPlaceSources]uint64 // of copies: where to, where from and the bytes of each
}

// ErrPlace says that a kernel of a Place does not do the work, wrapped.
var ErrPlace = errors.New("not work for this place")

// PlaceAt returns the Place in PlaceSize bytes of host memory.
func PlaceAt(b []byte) *Place { return (*Place)(unsafe.Pointer(&b[:PlaceSize][0])) }

// Copy adds a copy of disjoint memory to the place, and reports whether it has room for that: it
// has no other work than copies, at most [MaxPlaceCopies], of which none writes what another one
// reads or writes.
func (p *Place) Copy(dst, src, bytes uint64) bool {
	if p.kind == placeReduction || p.word != 0 || p.copies == MaxPlaceCopies {
		return false
	}
	apart := func(a, n, b, m uint64) bool { return a+n <= b || b+m <= a }
	for i := range p.copies {
		to, from, n := p.src[3*i], p.src[3*i+1], p.src[3*i+2]
		if !apart(to, n, dst, bytes) || !apart(to, n, src, bytes) || !apart(from, n, dst, bytes) {
			return false
		}
	}
	copy(p.src[3*p.copies:], []uint64{dst, src, bytes})
	p.kind = placeCopies
	p.copies++
	return true
}

// Reduce puts a reduction into an empty place, whose kernels are those for op on dt. The arguments
// are those of the function [Reduce]. The error wraps ErrPlace if that takes another kernel, more
// than one, or more than [MaxPlaceSources] sources.
func (p *Place) Reduce(op kernels.Op, dt kernels.DType, dst uint64, srcs []uint64, bytes uint64, divisor int) error {
	all, err := reduceWork(op, dt, dst, srcs, bytes, divisor)
	switch {
	case err != nil:
		return err
	case len(all) == 0:
		return nil
	case len(all) > 1 || len(srcs) > MaxPlaceSources ||
		all[0].kernel != "" && all[0].kernel != reductionOf(op, dt).kernel:
		return fmt.Errorf("kernels/cuda: %v of %d sources of %v divided by %d: %w", op, len(srcs), dt, divisor,
			ErrPlace)
	}
	w := &all[0]
	if w.kernel == "" {
		p.Copy(w.p.dst, w.srcs[0], w.bytes)
		return nil
	}
	p.kind, p.sharedParams = placeReduction, w.p
	copy(p.src[:], w.srcs)
	return nil
}

// SamePlace reports whether the kernels of places for one reduction do the other.
func SamePlace(op kernels.Op, dt kernels.DType, other kernels.Op, otherType kernels.DType) bool {
	return reductionOf(op, dt).kernel == reductionOf(other, otherType).kernel
}

// Write has the word, 8 bytes at a multiple of 8, become v when the work of the place is done. A
// reader of v sees the results of all earlier work of the stream.
func (p *Place) Write(word, v uint64) { p.word, p.value = word, v }

// Placed returns the launches that do what is in the place at an address of the device: the first
// one copies up to bytes, or reduces to so many as op on dt does, unless op is 0. The second one
// does what Write says, and then stores v to word as [Write] does. sms is as for the function
// [Reduce]; with other numbers of bytes in the place the work takes longer.
func Placed(op kernels.Op, dt kernels.DType, place, bytes uint64, sms int, word, v uint64) [2]Launch {
	name := copies
	if op != 0 {
		name = reductionOf(op, dt).kernel
	}
	work := struct{ place uint64 }{place}
	told := struct{ place, word, value uint64 }{place, word, v}
	tell := Launch{Function: "tutti_tell", Grid: 1, Block: 1, Params: raw(&told, unsafe.Sizeof(told))}
	return [2]Launch{launch(name+placed, raw(&work, unsafe.Sizeof(work)), max(bytes/vector, 1), sms), tell}
}
