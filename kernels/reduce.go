package kernels

import (
	"fmt"
	"slices"
	"strings"
	"unsafe"
)

// Reducer combines n elements: dst[i] = srcs[0][i] op srcs[1][i] op …, from left to right, in one
// pass over memory.
//
// len(srcs) >= 1; one source is copied. n counts elements, not bytes; n <= 0 does nothing. dst may
// be exactly one of the sources (then the reduction is in place); else it must not overlap any.
// Pointers need no alignment, not even that of the element, on architectures that load and store
// unaligned words. The memory stays the caller's. A Reducer allocates nothing, keeps nothing,
// blocks on nothing and may be called by any number of goroutines; a caller that wants no
// allocation either keeps the slice srcs, which escapes.
type Reducer func(dst unsafe.Pointer, srcs []unsafe.Pointer, n int)

// reducers is one implementation of everything; a nil Reducer marks what is not defined.
type reducers struct {
	reduce [numOps][numDTypes]Reducer
	// scale divides n elements in place; nil where Avg is not defined.
	scale [numDTypes]func(dst unsafe.Pointer, n, divisor int)
	// widen and narrow convert n small floats; nil for the other types.
	widen, narrow [numDTypes]func(dst, src unsafe.Pointer, n int)
}

var (
	portable = newPortable()
	active   = newActive() // the best that this machine can run
)

// Lookup returns the fastest Reducer that this machine has for op on elements of type dt, or an
// error that says what is supported. It reads an array and allocates nothing unless it fails.
func Lookup(op Op, dt DType) (Reducer, error) { return lookup(&active.reduce, op, dt) }

// Reference returns the portable Go version, which defines what op means on dt: Lookup's Reducer
// yields the same bits.
func Reference(op Op, dt DType) (Reducer, error) { return lookup(&portable.reduce, op, dt) }

func lookup(table *[numOps][numDTypes]Reducer, op Op, dt DType) (Reducer, error) {
	if op < numOps && dt < numDTypes {
		if r := table[op][dt]; r != nil {
			return r, nil
		}
	}
	return nil, unsupported(op, dt)
}

// Level names the instructions that this machine's kernels use: "AVX-512", "AVX2", or "portable".
func Level() string { return activeLevel() }

// Supported reports whether op is defined on dt.
func Supported(op Op, dt DType) bool {
	return op < numOps && dt < numDTypes && portable.reduce[op][dt] != nil
}

func unsupported(op Op, dt DType) error {
	var names []string
	switch {
	case !dt.Valid():
		for _, d := range DTypes() {
			names = append(names, d.String())
		}
		return fmt.Errorf("kernels: %v of %v: no such data type; use one of %s", op, dt, strings.Join(names, ", "))
	default:
		for _, o := range Ops() {
			if Supported(o, dt) {
				names = append(names, o.String())
			}
		}
		return fmt.Errorf("kernels: %v is not defined on %v; supported on %v: %s", op, dt, dt,
			strings.Join(names, ", "))
	}
}

// Reduce is the checked form of Lookup and its Reducer, for callers with byte slices: dst and
// every source must have one length, a multiple of the element's size, and dst must be one of the
// sources or overlap none. Nothing is written on error.
func Reduce(op Op, dt DType, dst []byte, srcs ...[]byte) error {
	r, err := Lookup(op, dt)
	if err != nil {
		return err
	}
	if len(srcs) == 0 {
		return fmt.Errorf("kernels: %v of %v: no sources; pass at least one", op, dt)
	}
	if len(dst)%dt.Size() != 0 {
		return fmt.Errorf("kernels: %v of %v: %d bytes are no whole number of elements; pass a multiple of %d", op, dt,
			len(dst), dt.Size())
	}
	p := make([]unsafe.Pointer, len(srcs))
	for i, s := range srcs {
		if len(s) != len(dst) {
			return fmt.Errorf("kernels: %v of %v: source %d has %d bytes, the destination %d; pass equal lengths", op,
				dt, i, len(s), len(dst))
		}
		p[i] = unsafe.Pointer(unsafe.SliceData(s))
		if d := int64(uintptr(p[i])) - int64(uintptr(unsafe.Pointer(unsafe.SliceData(dst)))); d != 0 &&
			max(d, -d) < int64(len(dst)) {
			return fmt.Errorf("kernels: %v of %v: source %d overlaps the destination, %d bytes apart; pass the "+
				"destination itself or separate memory", op, dt, i, d)
		}
	}
	r(unsafe.Pointer(unsafe.SliceData(dst)), p, len(dst)/dt.Size())
	return nil
}

// Scale divides n elements at dst by divisor >= 1 in place: the last stage of an Avg whose sums
// were made in several. Integers are divided towards zero, floats with one rounding (16-bit floats
// from their stored, already rounded sums; carry those as float32 to round but once). It panics if
// Avg is not defined on dt or divisor < 1, both errors of the program.
func Scale(dt DType, dst unsafe.Pointer, n int, divisor int) {
	if !Supported(Avg, dt) {
		panic(fmt.Sprintf("kernels: Scale of %v: %v", dt, unsupported(Avg, dt)))
	}
	if divisor < 1 {
		panic(fmt.Sprintf("kernels: Scale of %v by %d: the divisor counts contributions and is at least 1", dt,
			divisor))
	}
	if n > 0 {
		active.scale[dt](dst, n, divisor)
	}
}

// Widen converts n elements of type dt (a SmallFloat, or Float32, which is copied) at src to
// float32 at dst, exactly, as the methods Float32 do. dst and src must not overlap. It panics on
// other types.
func Widen(dt DType, dst, src unsafe.Pointer, n int) {
	convert("Widen", &active.widen, dt, dst, src, n)
}

// Narrow rounds n float32 at src to elements of type dt at dst, to nearest even, as F16From and the
// constructors of the other small floats do. dst and src must not overlap, unless they are equal.
// It panics on the types that Widen panics on.
func Narrow(dt DType, dst, src unsafe.Pointer, n int) {
	convert("Narrow", &active.narrow, dt, dst, src, n)
}

func convert(name string, table *[numDTypes]func(dst, src unsafe.Pointer, n int), dt DType, dst, src unsafe.Pointer,
	n int) {
	switch {
	case dt == Float32:
		Copy(dst, src, max(0, n)*4)
	case dt >= numDTypes || table[dt] == nil:
		small := slices.DeleteFunc(DTypes(), func(d DType) bool { return !d.SmallFloat() })
		panic(fmt.Sprintf("kernels: %s of %v: expected float32 or one of %v", name, dt, small))
	case n > 0:
		table[dt](dst, src, n)
	}
}

// Copy copies n bytes, which may overlap.
func Copy(dst, src unsafe.Pointer, n int) {
	if n > 0 {
		copy(unsafe.Slice((*byte)(dst), n), unsafe.Slice((*byte)(src), n))
	}
}

// sharedFrom is the length in bytes from which on the ways of copyShared are faster than Copy.
const sharedFrom = 4 << 10

// outFrom is the length in bytes from which on CopyOut may bypass the caches. The reader of fewer
// bytes loses more time than the writer gains: it waits for the memory, from which it cannot read
// ahead yet.
const outFrom = 64 << 10

// CopyShared copies n bytes, which must not overlap, from or to memory that other processors use.
// Long copies are made in the way that has taken the least time in this process: by a string move
// (REP MOVSB), which takes the cache lines of dst from other caches without reading them, or by
// vectors, with the lines of dst asked for ahead. The stores are ordered before later ones.
func CopyShared(dst, src unsafe.Pointer, n int) {
	if n < sharedFrom {
		Copy(dst, src, n)
	} else {
		copyShared(dst, src, n)
	}
}

// CopyOut copies n bytes, which must not overlap, to memory that another processor has used and
// reads next. They are a part of a transfer of of bytes. Like CopyShared it chooses the way by the
// times of earlier copies; from outFrom bytes on it may be CopyNonTemporal.
func CopyOut(dst, src unsafe.Pointer, n, of int) {
	if n < outFrom {
		CopyShared(dst, src, n)
	} else {
		copyOut(dst, src, n, max(n, of))
	}
}

// CopyNonTemporal copies n bytes, which must not overlap, so that long copies bypass the caches of
// this processor where it can do that: dst's lines leave the caches in which they are, without
// being read. The stores are ordered before later ones.
func CopyNonTemporal(dst, src unsafe.Pointer, n int) {
	if n < sharedFrom {
		Copy(dst, src, n)
	} else {
		copyNonTemporal(dst, src, n)
	}
}

func newPortable() *reducers {
	t := new(reducers)
	for _, dt := range DTypes() {
		size := dt.Size()
		for _, op := range Ops() {
			k := portableKernel(op, dt)
			if k == nil {
				continue
			}
			r := func(dst unsafe.Pointer, srcs []unsafe.Pointer, n int) {
				if len(srcs) == 1 && dt != Bool {
					Copy(dst, srcs[0], n*size)
				} else if n > 0 {
					k(dst, &srcs[0], len(srcs), 0, n, len(srcs), plain)
				}
			}
			t.reduce[op][dt] = r
		}
		t.scale[dt] = dtypes[dt].scale
		if dt.SmallFloat() {
			t.widen[dt] = func(dst, src unsafe.Pointer, n int) { widenSmall(dt, view[float32](dst, 0, n), src) }
			t.narrow[dt] = func(dst, src unsafe.Pointer, n int) { narrowSmall(dt, dst, view[float32](src, 0, n)) }
		}
	}
	return t
}
