//go:build !purego

package kernels

import (
	"strings"
	"unsafe"

	"golang.org/x/sys/cpu"
)

// The AVX-512 level requires what every processor since Skylake-SP has. AVX512_BF16, of Cooper
// Lake, Sapphire Rapids and Zen 4 on, replaces three kernels of bfloat16.
var (
	hasAVX2   = cpu.X86.HasAVX2 && cpu.X86.HasBMI2 && cpuidF16C()
	hasAVX512 = hasAVX2 && cpu.X86.HasAVX512F && cpu.X86.HasAVX512BW && cpu.X86.HasAVX512DQ && cpu.X86.HasAVX512VL
	hasBF16   = hasAVX512 && cpu.X86.HasAVX512BF16
)

// A level is an instruction set that this machine can run.
type level struct {
	name   string // as in Level, without the suffix "+BF16"
	masked bool
	fill   func(t *[numOps][numDTypes]kernel, widen, narrow *[numDTypes]func(dst, src unsafe.Pointer, n int))
}

// levels returns the levels of this machine, the best last.
func levels() (l []level) {
	if hasAVX2 {
		l = append(l, level{"AVX2", false, fillAVX2})
	}
	if hasAVX512 {
		l = append(l, level{"AVX-512", true, fillAVX512})
	}
	if hasBF16 {
		l = append(l, level{"AVX-512+BF16", true, fillBoth})
	}
	return l
}

func fillBoth(t *[numOps][numDTypes]kernel, widen, narrow *[numDTypes]func(dst, src unsafe.Pointer, n int)) {
	fillAVX512(t, widen, narrow)
	fillAVX512BF16(t, widen, narrow)
}

func newActive() *reducers {
	l := levels()
	if len(l) == 0 {
		return portable
	}
	return l[len(l)-1].reducers()
}

func activeLevel() string {
	if l := levels(); len(l) > 0 {
		name, _, _ := strings.Cut(l[len(l)-1].name, "+")
		return name
	}
	return "portable"
}

// reducers returns the table of l. Pairs without a kernel in l stay portable.
func (l level) reducers() *reducers {
	t := new(reducers)
	*t = *portable
	var k [numOps][numDTypes]kernel
	var widen, narrow [numDTypes]func(dst, src unsafe.Pointer, n int)
	l.fill(&k, &widen, &narrow)
	for _, dt := range DTypes() {
		for _, op := range Ops() {
			if !Supported(op, dt) {
				continue
			}
			r := reduction{op: op, dt: dt, size: dt.Size(), unit: dt.Size(), kernel: k[op][dt],
				rest: portableKernel(op, dt), mode: variant(op, dt)}
			switch {
			case op >= BitAnd && dt != Bool: // bytes are bytes
				r.unit, r.kernel, r.rest = 1, k[op][Uint8], portableKernel(op, Uint8)
			case op == Avg && r.kernel == nil:
				r.kernel, r.rest, r.divide, r.mode = k[Sum][dt], portableKernel(Sum, dt), true, plain
			}
			if r.kernel == nil {
				continue // portable
			}
			if !l.masked {
				r.lanes = r.step()
			}
			t.reduce[op][dt] = r.reducer()
		}
		if w, n := widen[dt], narrow[dt]; w != nil {
			t.widen[dt], t.narrow[dt] = w, n
			if !l.masked {
				t.widen[dt] = func(dst, src unsafe.Pointer, n int) {
					w(dst, src, n)
					if lo := n &^ 7; lo < n {
						widenSmall(dt, view[float32](dst, lo, n-lo), unsafe.Add(src, lo*dt.Size()))
					}
				}
				t.narrow[dt] = func(dst, src unsafe.Pointer, count int) {
					n(dst, src, count)
					if lo := count &^ 7; lo < count {
						narrowSmall(dt, unsafe.Add(dst, lo*dt.Size()), view[float32](src, lo, count-lo))
					}
				}
			}
		}
	}
	for _, dt := range []DType{Float32, Float64, Float16, BFloat16} {
		t.scale[dt] = l.scaler(dt)
	}
	return t
}

// A reduction is the data of one Reducer.
type reduction struct {
	op     Op
	dt     DType
	size   int    // bytes of an element
	unit   int    // bytes of an element of the kernel
	lanes  int    // the kernel does multiples of this, rest the others; 0: the kernel does all
	kernel kernel // vectors
	rest   kernel // Go
	mode   int    // flags that the kernel needs for op on dt
	divide bool   // an Avg of integers: sums, then divides
}

// variant returns the flags that select op on dt in the kernel that it shares with others.
func variant(op Op, dt DType) int {
	switch {
	case op == Avg:
		return divide
	case dt == Bool && op != BitXor:
		return truth
	case op != Min && op != Max:
		return plain
	case dt == BFloat16:
		return row
	case dt.Class() != Signed && dt.Class() != Unsigned:
		return plain
	}
	// The kernel is Min of unsigned integers, or of signed ones if they have 64 bits.
	n := 0
	if op == Max {
		n = 1
	}
	if (dt.Class() == Signed) != (dt.Size() == 8) {
		n += 2
	}
	return n * row
}

// step returns the elements of one step of the AVX2 kernels.
func (r *reduction) step() int {
	switch r.dt {
	case Float16:
		if r.op != Min && r.op != Max {
			return 8
		}
	case Float8E4M3, Float8E5M2:
		return 8
	}
	return 32 / r.unit
}

const (
	// piece is the bytes of dst after which a kernel comes back, so that the garbage collector need
	// not wait for it long: assembly cannot be interrupted.
	piece = 256 << 10
	// straighten is the bytes from which on it pays to begin with the few elements that align dst
	// to a cache line.
	straighten = 4 << 10
)

func (r reduction) reducer() Reducer {
	kernel, mode, per := r.kernel, r.mode, r.size/r.unit
	direct := straighten / r.size // elements up to which one call of the kernel does all, or all but the rest
	if r.divide {
		direct = 0
	}
	odd := max(0, r.lanes-1)
	copies := r.dt != Bool // a single source of bools is made 0 or 1
	return func(dst unsafe.Pointer, srcs []unsafe.Pointer, n int) {
		switch {
		case n <= 0:
		case len(srcs) == 1 && copies:
			Copy(dst, srcs[0], n*r.size)
		case n <= direct:
			n *= per
			mid := n &^ odd
			if mid > 0 {
				kernel(dst, &srcs[0], len(srcs), 0, mid, len(srcs), mode)
			}
			if mid < n {
				r.rest(dst, &srcs[0], len(srcs), mid, n, len(srcs), plain)
			}
		default:
			r.long(dst, srcs, n*per)
		}
	}
}

// long reduces n units of any number.
func (r *reduction) long(dst unsafe.Pointer, srcs []unsafe.Pointer, n int) {
	lo, most := 0, piece/r.unit
	if r.divide {
		most = straighten / r.unit // the sums are still in the nearest cache when they are divided
	}
	if n*r.unit >= straighten {
		skew := int(-uintptr(dst) & 63)
		if skew%r.unit == 0 {
			lo = skew / r.unit
			r.piece(dst, srcs, 0, lo)
		}
	}
	for ; lo < n; lo += most {
		r.piece(dst, srcs, lo, min(n, lo+most))
	}
}

// piece reduces units lo..hi-1. It is a call of its own so that a goroutine can be preempted at its
// entry.
//
//go:noinline
func (r *reduction) piece(dst unsafe.Pointer, srcs []unsafe.Pointer, lo, hi int) {
	if lo >= hi {
		return
	}
	mid := hi
	if r.lanes > 0 {
		mid -= (hi - lo) % r.lanes
	}
	if lo < mid {
		r.kernel(dst, &srcs[0], len(srcs), lo, mid, len(srcs), r.mode)
	}
	if mid < hi {
		r.rest(dst, &srcs[0], len(srcs), mid, hi, len(srcs), plain)
	}
	if r.divide {
		dtypes[r.dt].scale(unsafe.Add(dst, lo*r.unit), hi-lo, len(srcs))
	}
}

// scaler returns a scale for the floats. It names the kernels, so that the address of dst stays on
// the stack.
func (l level) scaler(dt DType) func(dst unsafe.Pointer, n, divisor int) {
	most, size := piece/dt.Size(), dt.Size()
	return func(dst unsafe.Pointer, n, divisor int) {
		for lo := 0; lo < n; lo += most {
			hi := min(n, lo+most)
			if !l.masked {
				hi -= (hi - lo) % 16
			}
			p := dst
			switch {
			case lo == hi:
			case l.masked && dt == Float32:
				sumF32AVX512(dst, &p, 1, lo, hi, divisor, divide)
			case l.masked && dt == Float64:
				sumF64AVX512(dst, &p, 1, lo, hi, divisor, divide)
			case l.masked && dt == Float16:
				sumF16AVX512(dst, &p, 1, lo, hi, divisor, divide)
			case l.masked:
				sumBF16AVX512(dst, &p, 1, lo, hi, divisor, divide)
			case dt == Float32:
				sumF32AVX2(dst, &p, 1, lo, hi, divisor, divide)
			case dt == Float64:
				sumF64AVX2(dst, &p, 1, lo, hi, divisor, divide)
			case dt == Float16:
				sumF16AVX2(dst, &p, 1, lo, hi, divisor, divide)
			default:
				sumBF16AVX2(dst, &p, 1, lo, hi, divisor, divide)
			}
			if rest := min(n, lo+most) - hi; rest > 0 {
				dtypes[dt].scale(unsafe.Add(dst, hi*size), rest, divisor)
			}
		}
	}
}
