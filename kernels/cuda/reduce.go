package cuda

import (
	"fmt"
	"math"
	"slices"
	"unsafe"

	"tutti/kernels"
)

// MaxSources is the most sources of one reduction: their addresses travel in the parameter of a
// launch, which has at most 4 KiB.
const MaxSources = 504

const (
	few     = 8 // the most sources of the kernels with a small parameter
	copies  = "tutti_copy"
	many    = "_many"
	threads = 256 // of a block
	waves   = 8   // the most blocks of a multiprocessor; a thread does the work of several then
	vector  = 16  // bytes
)

// The flags of reduceParams, as in src/params.h.
const (
	divide = 1 << iota
	round
	signed
	natural
	silent
	idle
)

// The structs have the layout of those in src/params.h.
type (
	reduceParams struct {
		sharedParams
		src [MaxSources]uint64 // the kernels for few sources take the first of them
	}
	sharedParams struct {
		dst, n, vectors      uint64
		flip, divisor, magic uint64
		head, sources, flags uint32
		_                    uint32
	}
	copyParams struct {
		dst, src, n uint64
		head, unit  uint32
	}
	wordParams struct{ word, value uint64 }
)

const fewSize = unsafe.Sizeof(reduceParams{}) - (MaxSources-few)*8

// raw returns the first size bytes of a struct.
func raw[T any](p *T, size uintptr) []byte {
	return slices.Clone(unsafe.Slice((*byte)(unsafe.Pointer(p)), size))
}

// A reduction is a kernel, and what it needs to know to do an operation on a type.
type reduction struct {
	kernel string
	unit   int    // bytes of an element of the kernel
	flip   uint64 // the bits of an element to invert before and after
}

// reductionOf returns the kernel for op, which is defined on dt.
func reductionOf(op kernels.Op, dt kernels.DType) reduction {
	size := dt.Size()
	all := ^uint64(0) >> (64 - 8*size)
	top := all &^ (all >> 1)
	name := dt.String()
	switch {
	case dt.Class() == kernels.Boolean:
		switch op {
		case kernels.Sum, kernels.Max, kernels.BitOr:
			return reduction{"tutti_and_bool", 1, 1}
		case kernels.BitXor:
			return reduction{"tutti_xor_bool", 1, 0}
		}
		return reduction{"tutti_and_bool", 1, 0}
	case op == kernels.BitAnd:
		return reduction{"tutti_and_bits", 1, 0}
	case op == kernels.BitOr:
		return reduction{"tutti_and_bits", 1, math.MaxUint64}
	case op == kernels.BitXor:
		return reduction{"tutti_xor_bits", 1, 0}
	case dt.Class() != kernels.Float:
		name = fmt.Sprintf("int%d", 8*size)
	}
	r := reduction{unit: size}
	switch op {
	case kernels.Product:
		r.kernel = "tutti_product_" + name
	case kernels.Min, kernels.Max:
		r.kernel = "tutti_min_" + name
		switch {
		case dt.Class() == kernels.Float && op == kernels.Max: // the sign, of float32 if it is a small float
			r.flip = 1 << 31
			if size == 8 {
				r.flip = 1 << 63
			}
		case dt.Class() == kernels.Float:
		case op == kernels.Max:
			r.flip = all
		}
		if dt.Class() == kernels.Signed {
			r.flip ^= top
		}
	default:
		r.kernel = "tutti_sum_" + name
	}
	return r
}

// reductions returns the names of the kernels that reduce up to 8 sources.
func reductions() (names []string) {
	for _, dt := range kernels.DTypes() {
		for _, op := range kernels.Ops() {
			if kernels.Supported(op, dt) {
				names = append(names, reductionOf(op, dt).kernel)
			}
		}
	}
	slices.Sort(names)
	return slices.Compact(names)
}

// Reduce returns the launches, at most two, that combine srcs in their order into dst and divide by
// divisor if that is not 0, as device.Stream.Reduce does. Each buffer has the given number of
// bytes, at any address; dst is one of srcs or disjoint from all. sms is the number of
// multiprocessors that the launches may fill. There are no launches if there is nothing to do. An
// error says that the reduction is not defined or that there are more than [MaxSources] sources.
func Reduce(op kernels.Op, dt kernels.DType, dst uint64, srcs []uint64, bytes uint64, divisor, sms int) ([]Launch,
	error) {
	all, err := reduceWork(op, dt, dst, srcs, bytes, divisor)
	if err != nil || len(all) == 0 {
		return nil, err
	}
	launches := make([]Launch, len(all))
	for i := range all {
		launches[i] = all[i].launch(sms)
	}
	return launches, nil
}

// reduceWork is Reduce, without the size of a grid.
func reduceWork(op kernels.Op, dt kernels.DType, dst uint64, srcs []uint64, bytes uint64, divisor int) ([]work, error) {
	switch {
	case !kernels.Supported(op, dt) || divisor != 0 && !kernels.Supported(kernels.Avg, dt):
		return nil, fmt.Errorf("kernels/cuda: %v of %v divided by %d is not defined", op, dt, divisor)
	case divisor < 0:
		return nil, fmt.Errorf("kernels/cuda: a reduction divided by %d, want 0 (not at all) or more", divisor)
	case len(srcs) == 0 || len(srcs) > MaxSources:
		return nil, fmt.Errorf("kernels/cuda: %v of %d sources, want 1 to %d", op, len(srcs), MaxSources)
	case bytes%uint64(dt.Size()) != 0:
		return nil, fmt.Errorf("kernels/cuda: %v of %v: %d bytes are no whole number of elements", op, dt, bytes)
	case bytes == 0:
		return nil, nil
	}
	if len(srcs) == 1 && dt.Class() != kernels.Boolean {
		switch {
		case divisor != 0:
			return []work{reduce(kernels.Sum, dt, dst, srcs, bytes, divisor, false)}, nil
		case dst == srcs[0]:
			return nil, nil
		}
		return []work{{p: sharedParams{dst: dst}, srcs: srcs, bytes: bytes}}, nil
	}
	switch {
	case op == kernels.Avg:
		all := []work{reduce(kernels.Sum, dt, dst, srcs, bytes, len(srcs), false)}
		if divisor != 0 {
			all = append(all, reduce(kernels.Sum, dt, dst, []uint64{dst}, bytes, divisor, false))
		}
		return all, nil
	case op == kernels.Sum || divisor == 0:
		return []work{reduce(op, dt, dst, srcs, bytes, divisor, true)}, nil
	}
	return []work{
		reduce(op, dt, dst, srcs, bytes, 0, false),
		reduce(kernels.Sum, dt, dst, []uint64{dst}, bytes, divisor, false),
	}, nil
}

// work is what one kernel does.
type work struct {
	kernel string // "": it copies
	p      sharedParams
	srcs   []uint64
	bytes  uint64
}

// launch returns the launch of the work.
func (w *work) launch(sms int) Launch {
	if w.kernel == "" {
		return Copy(w.p.dst, w.srcs[0], w.bytes, sms)
	}
	p := reduceParams{sharedParams: w.p}
	copy(p.src[:], w.srcs)
	name, size := w.kernel, fewSize
	if len(w.srcs) > few {
		name, size = w.kernel+many, unsafe.Sizeof(p)
	}
	return launch(name, raw(&p, size), w.pieces(), sms)
}

// pieces returns how many threads the work of a reduction occupies.
func (w *work) pieces() uint64 {
	single := w.p.n - w.p.vectors*(vector*w.p.n/w.bytes)
	return max(w.p.vectors, single)
}

// reduce returns the work of one kernel. With rounded the sums are rounded to dt before they are
// divided.
func reduce(op kernels.Op, dt kernels.DType, dst uint64, srcs []uint64, bytes uint64, divisor int, rounded bool) work {
	r := reductionOf(op, dt)
	unit := uint64(r.unit)
	p := sharedParams{dst: dst, n: bytes / unit, flip: r.flip, sources: uint32(len(srcs))}
	apart, all := uint64(0), dst
	for _, s := range srcs {
		apart |= s ^ dst
		all |= s
	}
	if head := -dst % vector; apart%vector == 0 && head%unit == 0 && bytes >= head+vector {
		p.head, p.vectors = uint32(head/unit), (bytes-head)/vector
	}
	if all%unit == 0 {
		p.flags |= natural
	}
	if rounded && dt.SmallFloat() {
		p.flags |= round
	}
	var flags uint32
	p.divisor, p.magic, flags = division(dt, divisor)
	p.flags |= flags
	return work{kernel: r.kernel, p: p, srcs: srcs, bytes: bytes}
}

// division returns what a kernel needs to divide by divisor, or not to if that is 0.
func division(dt kernels.DType, divisor int) (by, magic uint64, flags uint32) {
	if dt.Class() == kernels.Signed {
		flags = signed
	}
	switch {
	case divisor == 0:
	case dt == kernels.Float64:
		return math.Float64bits(float64(divisor)), 0, flags | divide
	case dt.Class() == kernels.Float:
		return uint64(math.Float32bits(float32(divisor))), 0, flags | divide
	case divisor > 1:
		// The upper half of x*ceil(2^64/d) is x/d for all x and d up to 2^32 (Granlund and
		// Montgomery, "Division by Invariant Integers using Multiplication", 1994). A larger d
		// leaves 0, as 2^32 does.
		by = uint64(divisor)
		return by, math.MaxUint64/min(by, 1<<32) + 1, flags | divide
	}
	return 0, 0, flags
}

// launch returns the launch of a kernel that has as many pieces of work as threads, if so many fit.
func launch(function string, params []byte, pieces uint64, sms int) Launch {
	blocks := min((pieces+threads-1)/threads, uint64(max(sms, 1))*waves)
	return Launch{Function: function, Grid: uint32(blocks), Block: threads, Params: params}
}

// Copy returns the launch that copies bytes, which may lie at any addresses and are disjoint. Its
// Grid is 0 if there is nothing to copy.
func Copy(dst, src, bytes uint64, sms int) Launch {
	p := copyOf(dst, src, bytes)
	return launch(copies, raw(&p, unsafe.Sizeof(p)), (bytes+uint64(p.unit)-1)/uint64(p.unit), sms)
}

func copyOf(dst, src, bytes uint64) copyParams {
	p := copyParams{dst: dst, src: src, n: bytes, unit: vector}
	for (dst^src)%uint64(p.unit) != 0 {
		p.unit /= 2
	}
	p.head = uint32(min(-dst%uint64(p.unit), bytes))
	return p
}

// Wait returns the launch that ends when the word, 8 bytes at a multiple of 8, has the value v or a
// larger one. Later work sees what was written before that value was stored. Nothing but a store
// ends it.
func Wait(word, v uint64) Launch { return wordLaunch("tutti_wait", word, v) }

// Write returns the launch that stores v to the word, 8 bytes at a multiple of 8. A reader of v
// sees the results of all earlier work of the stream.
func Write(word, v uint64) Launch { return wordLaunch("tutti_write", word, v) }

func wordLaunch(function string, word, v uint64) Launch {
	p := wordParams{word, v}
	return Launch{Function: function, Grid: 1, Block: 1, Params: raw(&p, unsafe.Sizeof(p))}
}
