package kernels

import (
	"math"
	"math/bits"
	"unsafe"
)

// A kernel reduces elements lo..hi-1 of k >= 1 sources, whose addresses are at srcs, into the same
// elements of dst. div is the divisor of Avg; other operations ignore it.
type kernel func(dst unsafe.Pointer, srcs *unsafe.Pointer, k, lo, hi, div, mode int)

// Flags of mode select one of the operations that share a kernel of this level. internal/gen has
// the same flags; the portable kernels ignore them.
const (
	plain  = 0
	divide = 1 // Avg: the sum is divided by div
	truth  = 2 // Bool: any byte but 0 is true
	row    = 8 // times the number of the row of constants, for kernels that have several
)

type integer interface {
	int8 | int16 | int32 | int64 | uint8 | uint16 | uint32 | uint64
}

type float interface{ float32 | float64 }

// block is the elements that the portable kernels accumulate on the stack at a time, where dst
// cannot hold the partial result.
const block = 128

// view returns the elements lo..lo+n-1 of the array at p, which may be unaligned.
func view[T any](p unsafe.Pointer, lo, n int) []T {
	if n <= 0 {
		return nil // a pointer just past the end is invalid
	}
	var t T
	return unsafe.Slice((*T)(unsafe.Add(p, uintptr(lo)*unsafe.Sizeof(t))), n)
}

// portableKernel returns the Go kernel that defines op on dt, or nil where op is not defined on dt.
func portableKernel(op Op, dt DType) kernel {
	if !op.Valid() || !dt.Valid() {
		return nil
	}
	return dtypes[dt].reduce(op)
}

// late reports whether dst is one of the sources from the third on: the first two may be combined
// into it at once, those may not, since it holds the partial result before they are read.
func late(dst unsafe.Pointer, srcs []unsafe.Pointer) bool {
	for _, s := range srcs[min(2, len(srcs)):] {
		if s == dst {
			return true
		}
	}
	return false
}

func integerKernel[T integer](op Op) kernel {
	return func(dst unsafe.Pointer, srcs *unsafe.Pointer, k, lo, hi, div, _ int) {
		s := unsafe.Slice(srcs, k)
		if k == 2 && op != Avg {
			combineIntegers(op, view[T](dst, lo, hi-lo), view[T](s[0], lo, hi-lo), view[T](s[1], lo, hi-lo))
			return
		}
		if late(dst, s) {
			integerBlocks[T](op, dst, s, lo, hi, div)
			return
		}
		for ; lo < hi; lo += 4 * block {
			integerBlock(op, view[T](dst, lo, min(4*block, hi-lo)), s, lo, div)
		}
	}
}

func integerBlocks[T integer](op Op, dst unsafe.Pointer, s []unsafe.Pointer, lo, hi, div int) {
	var scratch [block]T
	for ; lo < hi; lo += block {
		acc := scratch[:min(block, hi-lo)]
		integerBlock(op, acc, s, lo, div)
		copy(view[T](dst, lo, len(acc)), acc)
	}
}

// integerBlock reduces as many elements as acc has, from element lo on.
func integerBlock[T integer](op Op, acc []T, s []unsafe.Pointer, lo, div int) {
	if len(s) == 1 {
		copy(acc, view[T](s[0], lo, len(acc)))
	} else {
		combineIntegers(op, acc, view[T](s[0], lo, len(acc)), view[T](s[1], lo, len(acc)))
		for _, p := range s[2:] {
			combineIntegers(op, acc, acc, view[T](p, lo, len(acc)))
		}
	}
	if op == Avg {
		divideIntegers(acc, div)
	}
}

// combineIntegers sets d[i] = a[i] op b[i]; Avg is Sum here. The three have one length; d may be a
// or b.
func combineIntegers[T integer](op Op, d, a, b []T) {
	a, b = a[:len(d)], b[:len(d)]
	switch op {
	case Sum, Avg:
		if size := unsafe.Sizeof(T(0)); size <= 2 && len(d) >= 16 {
			n := addWords(unsafe.Pointer(&d[0]), unsafe.Pointer(&a[0]), unsafe.Pointer(&b[0]), len(d)*int(size)/8,
				size) / int(size)
			d, a, b = d[n:], a[n:], b[n:]
		}
		for len(d) >= 4 && len(a) >= 4 && len(b) >= 4 {
			d[0], d[1], d[2], d[3] = a[0]+b[0], a[1]+b[1], a[2]+b[2], a[3]+b[3]
			d, a, b = d[4:], a[4:], b[4:]
		}
		for i := range d {
			d[i] = a[i] + b[i]
		}
	case Product:
		for i := range d {
			d[i] = a[i] * b[i]
		}
	case Min:
		for i := range d {
			d[i] = min(a[i], b[i])
		}
	case Max:
		for i := range d {
			d[i] = max(a[i], b[i])
		}
	default:
		size := int(unsafe.Sizeof(T(0)))
		combineBits(op, unsafe.Pointer(unsafe.SliceData(d)), unsafe.Pointer(unsafe.SliceData(a)),
			unsafe.Pointer(unsafe.SliceData(b)), size*len(d))
	}
}

// addWords adds 8-bit or 16-bit elements, n words of them, a word at a time: everything but the top
// bits, which then cannot carry into the next element, and the top bits by exclusive or. It returns
// the bytes added.
func addWords(dst, x, y unsafe.Pointer, n int, size uintptr) int {
	low := uint64(0x7f7f7f7f7f7f7f7f)
	if size == 2 {
		low = 0x7fff7fff7fff7fff
	}
	d, a, b := view[uint64](dst, 0, n), view[uint64](x, 0, n), view[uint64](y, 0, n)
	a, b = a[:len(d)], b[:len(d)]
	for i := range d {
		d[i] = (a[i]&low + b[i]&low) ^ (a[i]^b[i])&^low
	}
	return 8 * n
}

// combineBits applies BitAnd, BitOr or BitXor to n bytes, eight at a time.
func combineBits(op Op, dst, x, y unsafe.Pointer, n int) {
	w := n &^ 7
	bitwise(op, view[uint64](dst, 0, w/8), view[uint64](x, 0, w/8), view[uint64](y, 0, w/8))
	bitwise(op, view[uint8](dst, w, n-w), view[uint8](x, w, n-w), view[uint8](y, w, n-w))
}

func bitwise[T integer](op Op, d, a, b []T) {
	a, b = a[:len(d)], b[:len(d)]
	switch op {
	case BitAnd:
		for i := range d {
			d[i] = a[i] & b[i]
		}
	case BitOr:
		for i := range d {
			d[i] = a[i] | b[i]
		}
	case BitXor:
		for i := range d {
			d[i] = a[i] ^ b[i]
		}
	}
}

// divideIntegers divides by div >= 1, towards zero, in 64 bits, so that a divisor too large for T
// is still exact.
func divideIntegers[T integer](d []T, div int) {
	if div == 1 {
		return
	}
	if unsafe.Sizeof(T(0)) == 8 {
		var zero T
		if zero--; zero < 0 {
			for i := range d {
				d[i] = T(int64(d[i]) / int64(div))
			}
		} else {
			for i := range d {
				d[i] = T(uint64(d[i]) / uint64(div))
			}
		}
		return
	}
	// x/div is the upper half of x*ceil(2^64/div) for all x and div up to 2^32 (Granlund and
	// Montgomery, "Division by Invariant Integers using Multiplication", 1994). A larger divisor
	// leaves 0, as 2^32 does.
	m := math.MaxUint64/uint64(min(int64(div), 1<<32)) + 1
	for i, x := range d {
		v := int64(x)
		sign := v >> 63
		q, _ := bits.Mul64(uint64((v^sign)-sign), m)
		d[i] = T((int64(q) ^ sign) - sign)
	}
}

func floatKernel[T float](op Op) kernel {
	if op > Avg {
		return nil
	}
	return func(dst unsafe.Pointer, srcs *unsafe.Pointer, k, lo, hi, div, _ int) {
		s := unsafe.Slice(srcs, k)
		if k == 2 && op != Avg {
			combineFloats(op, view[T](dst, lo, hi-lo), view[T](s[0], lo, hi-lo), view[T](s[1], lo, hi-lo))
			return
		}
		if late(dst, s) {
			floatBlocks[T](op, dst, s, lo, hi, div)
			return
		}
		for ; lo < hi; lo += 4 * block {
			floatBlock(op, view[T](dst, lo, min(4*block, hi-lo)), s, lo, div)
		}
	}
}

func floatBlocks[T float](op Op, dst unsafe.Pointer, s []unsafe.Pointer, lo, hi, div int) {
	var scratch [block]T
	for ; lo < hi; lo += block {
		acc := scratch[:min(block, hi-lo)]
		floatBlock(op, acc, s, lo, div)
		copy(view[T](dst, lo, len(acc)), acc)
	}
}

func floatBlock[T float](op Op, acc []T, s []unsafe.Pointer, lo, div int) {
	if len(s) == 1 {
		copy(acc, view[T](s[0], lo, len(acc)))
	} else {
		combineFloats(op, acc, view[T](s[0], lo, len(acc)), view[T](s[1], lo, len(acc)))
		for _, p := range s[2:] {
			combineFloats(op, acc, acc, view[T](p, lo, len(acc)))
		}
	}
	if op == Avg {
		divideFloats(acc, div)
	}
}

// combineFloats sets d[i] = a[i] op b[i]; Avg is Sum here. The three have one length; d may be a or
// b.
func combineFloats[T float](op Op, d, a, b []T) {
	a, b = a[:len(d)], b[:len(d)]
	switch op {
	case Sum, Avg:
		for i := range d {
			s := a[i] + b[i]
			if s != s {
				s = nanOf(a[i], b[i])
			}
			d[i] = s
		}
	case Product:
		for i := range d {
			s := a[i] * b[i]
			if s != s {
				s = nanOf(a[i], b[i])
			}
			d[i] = s
		}
	case Min:
		for i := range d {
			s := min(a[i], b[i]) // Go's min is IEEE's minimum but for the bits of a NaN
			if s != s {
				s = canonical[T]()
			}
			d[i] = s
		}
	case Max:
		for i := range d {
			s := max(a[i], b[i])
			if s != s {
				s = canonical[T]()
			}
			d[i] = s
		}
	}
}

func divideFloats[T float](d []T, div int) {
	by := T(div)
	for i, x := range d {
		q := x / by
		if q != q {
			q = nanOf(x, by)
		}
		d[i] = q
	}
}

func scaleIntegers[T integer](p unsafe.Pointer, n, divisor int) {
	divideIntegers(view[T](p, 0, n), divisor)
}

func scaleFloats[T float](p unsafe.Pointer, n, divisor int) { divideFloats(view[T](p, 0, n), divisor) }

// scaleSmall returns what divides small floats of this size.
func scaleSmall(dt DType, size int) func(p unsafe.Pointer, n, divisor int) {
	return func(p unsafe.Pointer, n, divisor int) {
		var scratch [block]float32
		for lo := 0; lo < n; lo += block {
			x, q := scratch[:min(n-lo, block)], unsafe.Add(p, size*lo)
			widenSmall(dt, x, q)
			divideFloats(x, divisor)
			narrowSmall(dt, q, x)
		}
	}
}

// nanOf is the NaN that an operation on a and b yields: the first of them that is a NaN, made
// quiet; else, where neither is, that of an invalid operation. x86 does so in hardware; the other
// architectures differ, and so does Go's compiler, which may exchange operands.
func nanOf[T float](a, b T) T {
	if unsafe.Sizeof(a) == 4 {
		x, y := *(*uint32)(unsafe.Pointer(&a)), *(*uint32)(unsafe.Pointer(&b))
		switch {
		case isNaN32(x):
			x |= quiet32
		case isNaN32(y):
			x = y | quiet32
		default:
			x = invalid32
		}
		return *(*T)(unsafe.Pointer(&x))
	}
	x, y := *(*uint64)(unsafe.Pointer(&a)), *(*uint64)(unsafe.Pointer(&b))
	switch {
	case isNaN64(x):
		x |= quiet64
	case isNaN64(y):
		x = y | quiet64
	default:
		x = invalid64
	}
	return *(*T)(unsafe.Pointer(&x))
}

func canonical[T float]() T {
	if unsafe.Sizeof(T(0)) == 4 {
		return T(math.Float32frombits(canon32))
	}
	return T(math.Float64frombits(canon64))
}

// smallKernels returns what makes the kernels of small floats of this size, for the operations up
// to last.
func smallKernels(dt DType, size int, last Op) func(op Op) kernel {
	return func(op Op) kernel {
		if op > last {
			return nil
		}
		return smallKernel(op, dt, size)
	}
}

// smallKernel accumulates in float32 over all sources and rounds once.
func smallKernel(op Op, dt DType, size int) kernel {
	return func(dst unsafe.Pointer, srcs *unsafe.Pointer, k, lo, hi, div, _ int) {
		s := unsafe.Slice(srcs, k)
		var scratch, next [block]float32
		for ; lo < hi; lo += block {
			n := min(block, hi-lo)
			acc, x := scratch[:n], next[:n]
			widenSmall(dt, acc, unsafe.Add(s[0], lo*size))
			for _, p := range s[1:] {
				widenSmall(dt, x, unsafe.Add(p, lo*size))
				combineFloats(op, acc, acc, x)
			}
			if op == Avg {
				divideFloats(acc, div)
			}
			narrowSmall(dt, unsafe.Add(dst, lo*size), acc)
		}
	}
}

// boolKernels returns the kernel that does op on bools.
func boolKernels(op Op) kernel {
	switch op {
	case Sum, Max, BitOr:
		return boolKernel(BitOr)
	case Product, Min, BitAnd:
		return boolKernel(BitAnd)
	case BitXor:
		return boolKernel(BitXor)
	}
	return nil
}

// boolKernel takes any byte but 0 for true and returns 0 or 1.
func boolKernel(op Op) kernel {
	return func(dst unsafe.Pointer, srcs *unsafe.Pointer, k, lo, hi, _, _ int) {
		s := unsafe.Slice(srcs, k)
		for ; hi-lo >= 8; lo += 8 {
			v := truths(*(*uint64)(unsafe.Add(s[0], lo)))
			for _, p := range s[1:] {
				v = logic(op, v, truths(*(*uint64)(unsafe.Add(p, lo))))
			}
			*(*uint64)(unsafe.Add(dst, lo)) = v
		}
		for ; lo < hi; lo++ {
			v := truths(uint64(*(*uint8)(unsafe.Add(s[0], lo))))
			for _, p := range s[1:] {
				v = logic(op, v, truths(uint64(*(*uint8)(unsafe.Add(p, lo)))))
			}
			*(*uint8)(unsafe.Add(dst, lo)) = uint8(v)
		}
	}
}

func logic(op Op, a, b uint64) uint64 {
	switch op {
	case BitAnd:
		return a & b
	case BitOr:
		return a | b
	}
	return a ^ b
}

// truths makes each byte of w that is not 0 a 1.
func truths(w uint64) uint64 {
	const low = 0x7f7f7f7f7f7f7f7f
	return (w&low + low | w) >> 7 & 0x0101010101010101
}
