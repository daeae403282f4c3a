package kernels

import (
	"fmt"
	"math"
	"unsafe"
)

// DType names the type of the elements of a buffer. Its number travels between ranks, so a new type
// goes to the end of the list.
type DType uint8

// The data types. The 16-bit and 8-bit floats are stored as their bit patterns.
const (
	Int8 DType = iota + 1
	Int16
	Int32
	Int64
	Uint8
	Uint16
	Uint32
	Uint64
	Float32
	Float64
	Float16 // IEEE 754 binary16
	BFloat16
	Float8E4M3 // OCP 8-bit float, 4 exponent bits, no infinity: movement and Sum only
	Float8E5M2 // OCP 8-bit float, 5 exponent bits: movement and Sum only
	Bool       // one byte, 0 or 1
	numDTypes
)

// Class says what the elements of a data type are.
type Class uint8

// The classes.
const (
	Signed Class = iota + 1 // integers, two's complement
	Unsigned
	Float
	Boolean
)

// Format is the layout of a float: a sign bit, the exponent and the fraction. The exponent's bias
// is half of its range.
type Format struct {
	Exponent, Fraction int  // bits
	Finite             bool // there is no infinity, and the largest exponent holds numbers too
}

func ieee(exponent, fraction int) Format { return Format{exponent, fraction, false} }

// dtypes has all that tells the types apart, but for the conversions of the small floats
// (widenSmall and narrowSmall) and the kernels of a processor. Everything that needs a list of the
// types takes it from here.
var dtypes = [numDTypes]struct {
	constant string // as programs write it
	name     string // as the command line writes it
	size     int    // bytes
	class    Class
	format   Format                                 // of a Float
	reduce   func(op Op) kernel                     // the portable kernel that defines op; nil where op is not defined
	scale    func(p unsafe.Pointer, n, divisor int) // divides n elements; nil where Avg is not defined
}{
	Int8:       {"Int8", "int8", 1, Signed, Format{}, integerKernel[int8], scaleIntegers[int8]},
	Int16:      {"Int16", "int16", 2, Signed, Format{}, integerKernel[int16], scaleIntegers[int16]},
	Int32:      {"Int32", "int32", 4, Signed, Format{}, integerKernel[int32], scaleIntegers[int32]},
	Int64:      {"Int64", "int64", 8, Signed, Format{}, integerKernel[int64], scaleIntegers[int64]},
	Uint8:      {"Uint8", "uint8", 1, Unsigned, Format{}, integerKernel[uint8], scaleIntegers[uint8]},
	Uint16:     {"Uint16", "uint16", 2, Unsigned, Format{}, integerKernel[uint16], scaleIntegers[uint16]},
	Uint32:     {"Uint32", "uint32", 4, Unsigned, Format{}, integerKernel[uint32], scaleIntegers[uint32]},
	Uint64:     {"Uint64", "uint64", 8, Unsigned, Format{}, integerKernel[uint64], scaleIntegers[uint64]},
	Float32:    {"Float32", "float32", 4, Float, ieee(8, 23), floatKernel[float32], scaleFloats[float32]},
	Float64:    {"Float64", "float64", 8, Float, ieee(11, 52), floatKernel[float64], scaleFloats[float64]},
	Float16:    {"Float16", "float16", 2, Float, ieee(5, 10), smallKernels(Float16, 2, Avg), scaleSmall(Float16, 2)},
	BFloat16:   {"BFloat16", "bfloat16", 2, Float, ieee(8, 7), smallKernels(BFloat16, 2, Avg), scaleSmall(BFloat16, 2)},
	Float8E4M3: {"Float8E4M3", "float8_e4m3", 1, Float, Format{4, 3, true}, smallKernels(Float8E4M3, 1, Sum), nil},
	Float8E5M2: {"Float8E5M2", "float8_e5m2", 1, Float, ieee(5, 2), smallKernels(Float8E5M2, 1, Sum), nil},
	Bool:       {"Bool", "bool", 1, Boolean, Format{}, boolKernels, nil},
}

// Valid reports whether d is one of the data types above; a value read from a wire may not be.
func (d DType) Valid() bool { return d > 0 && d < numDTypes }

// Size returns the bytes of one element, 0 for an invalid DType.
func (d DType) Size() int {
	if !d.Valid() {
		return 0
	}
	return dtypes[d].size
}

// Class says what the elements are; 0 for an invalid DType.
func (d DType) Class() Class {
	if !d.Valid() {
		return 0
	}
	return dtypes[d].class
}

// Format returns the layout of a float; the zero Format for other types.
func (d DType) Format() Format {
	if !d.Valid() {
		return Format{}
	}
	return dtypes[d].format
}

// SmallFloat reports whether d is a float of fewer than 32 bits: the types that Widen converts.
func (d DType) SmallFloat() bool { return d.Class() == Float && d.Size() < 4 }

// String returns the name that the command line uses: "float32", "bfloat16", ….
func (d DType) String() string {
	if !d.Valid() {
		return fmt.Sprintf("dtype(%d)", uint8(d))
	}
	return dtypes[d].name
}

// GoString returns the constant: "kernels.Float32", "kernels.BFloat16", ….
func (d DType) GoString() string {
	if !d.Valid() {
		return fmt.Sprintf("kernels.DType(%d)", uint8(d))
	}
	return "kernels." + dtypes[d].constant
}

// DTypes returns every data type, in the order of their numbers.
func DTypes() []DType {
	var all []DType
	for d := DType(1); d < numDTypes; d++ {
		all = append(all, d)
	}
	return all
}

// widenSmall converts len(d) small floats at src.
func widenSmall(dt DType, d []float32, src unsafe.Pointer) {
	switch dt {
	case Float16:
		for i, x := range view[F16](src, 0, len(d)) {
			d[i] = x.Float32()
		}
	case BFloat16:
		for i, x := range view[BF16](src, 0, len(d)) {
			d[i] = x.Float32()
		}
	case Float8E4M3:
		for i, x := range view[F8E4M3](src, 0, len(d)) {
			d[i] = x.Float32()
		}
	case Float8E5M2:
		for i, x := range view[F8E5M2](src, 0, len(d)) {
			d[i] = x.Float32()
		}
	}
}

// narrowSmall rounds all of a to small floats at dst.
func narrowSmall(dt DType, dst unsafe.Pointer, a []float32) {
	switch dt {
	case Float16:
		d := view[F16](dst, 0, len(a))
		for i, x := range a {
			d[i] = F16From(x)
		}
	case BFloat16:
		d := view[BF16](dst, 0, len(a))
		for i, x := range a {
			d[i] = BF16From(x)
		}
	case Float8E4M3:
		d := view[F8E4M3](dst, 0, len(a))
		for i, x := range a {
			d[i] = F8E4M3From(x)
		}
	case Float8E5M2:
		d := view[F8E5M2](dst, 0, len(a))
		for i, x := range a {
			d[i] = F8E5M2From(x)
		}
	}
}

// The element types of the small floats: bit patterns with a name. Arithmetic on them goes through
// float32; every value of each of them is a float32, and the constructors round to nearest, ties to
// even, exactly once.
type (
	// F16 is one element of DType Float16: IEEE 754 binary16 (1 sign, 5 exponent, 10 fraction
	// bits).
	F16 uint16
	// BF16 is one element of DType BFloat16: the upper half of a float32 (1 sign, 8 exponent, 7
	// fraction bits).
	BF16 uint16
	// F8E4M3 is one element of DType Float8E4M3 (OCP 8-bit floating point, "E4M3"; elsewhere
	// float8_e4m3fn): bias 7, largest finite value 448, no infinity, one NaN per sign (0x7f, 0xff).
	F8E4M3 uint8
	// F8E5M2 is one element of DType Float8E5M2 (OCP "E5M2"): bias 15, largest finite value 57344,
	// infinities and NaNs as in IEEE 754. It is the upper half of an F16.
	F8E5M2 uint8
)

const (
	quiet32 = 1 << 22 // the bit that makes a float32 NaN quiet
	quiet64 = 1 << 51

	canon32   = 0x7fc00000 // Min and Max answer this NaN
	canon64   = 0x7ff8000000000000
	invalid32 = 0xffc00000 // Sum, Product and Avg answer this NaN for inf-inf and 0*inf, as x86 does
	invalid64 = 0xfff8000000000000
)

// Float32 returns the value of h. A NaN keeps its sign and payload and becomes quiet.
func (h F16) Float32() float32 {
	sign, mag := uint32(h&0x8000)<<16, uint32(h&0x7fff)<<13
	switch {
	case mag > 0x7c00<<13:
		return math.Float32frombits(sign | 0x70000000 | mag | quiet32 | 0x7f800000)
	case mag == 0x7c00<<13:
		return math.Float32frombits(sign | 0x7f800000)
	}
	// With the exponent field read as float32's, the value is 2^-112 times too small; the product
	// is exact, also for subnormals.
	v := math.Float32frombits(mag) * 0x1p112
	return math.Float32frombits(sign | math.Float32bits(v))
}

// F16From rounds f to the nearest F16, ties to even. Magnitudes of 65520 and above become infinite;
// a NaN keeps its sign and the upper 10 bits of its payload and becomes quiet.
func F16From(f float32) F16 {
	b := math.Float32bits(f)
	sign, mag := F16(b>>16&0x8000), b&0x7fffffff
	switch {
	case mag > 0x7f800000:
		return sign | 0x7e00 | F16(mag>>13&0x3ff)
	case mag >= 0x477ff000: // 65520: half way from the largest finite value to the next power of two
		return sign | 0x7c00
	case mag < 0x38800000: // below the smallest normal, 2^-14: the addition leaves units of 2^-24, rounded to even
		return sign | F16(math.Float32bits(math.Float32frombits(mag)+0.5)&0x7ff)
	}
	mag += 0xfff + mag>>13&1
	return sign | F16(mag>>13-(127-15)<<10)
}

// Float32 returns the value of h. NaNs keep all their bits; signalling ones stay signalling.
func (h BF16) Float32() float32 { return math.Float32frombits(uint32(h) << 16) }

// BF16From rounds f to the nearest BF16, ties to even, subnormals included. A NaN keeps its sign
// and the upper 7 bits of its payload and becomes quiet.
func BF16From(f float32) BF16 {
	b := math.Float32bits(f)
	if b&0x7fffffff > 0x7f800000 {
		return BF16((b | quiet32) >> 16)
	}
	return BF16((b + 0x7fff + b>>16&1) >> 16)
}

// Float32 returns the value of e. NaN becomes the quiet NaN of the same sign and fraction,
// 0x7ff00000.
func (e F8E4M3) Float32() float32 {
	sign, mag := uint32(e&0x80)<<24, uint32(e&0x7f)<<20
	if mag == 0x7f<<20 {
		return math.Float32frombits(sign | 0x7ff00000)
	}
	return math.Float32frombits(sign | math.Float32bits(math.Float32frombits(mag)*0x1p120))
}

// F8E4M3From rounds f to the nearest F8E4M3, ties to even. It does not saturate: what rounds to
// more than 448 in magnitude (above 464), infinities included, becomes NaN with the sign of f,
// since the format has no infinity and a clipped sum would pass for a correct one. NaN becomes NaN
// with the same sign.
func F8E4M3From(f float32) F8E4M3 {
	b := math.Float32bits(f)
	sign, mag := F8E4M3(b>>24&0x80), b&0x7fffffff
	switch {
	case mag > 0x43e80000: // 464
		return sign | 0x7f
	case mag < 0x3c800000: // below 2^-6: units of 2^-9
		return sign | F8E4M3(math.Float32bits(math.Float32frombits(mag)+0x1p14)&0xf)
	}
	mag += 0x7ffff + mag>>20&1
	return sign | F8E4M3(mag>>20-(127-7)<<3)
}

// Float32 returns the value of e. A NaN keeps its sign and payload and becomes quiet.
func (e F8E5M2) Float32() float32 { return (F16(e) << 8).Float32() }

// F8E5M2From rounds f to the nearest F8E5M2, ties to even. Magnitudes of 61440 and above become
// infinite; every NaN becomes the quiet NaN 0x7e with the sign of f.
func F8E5M2From(f float32) F8E5M2 {
	b := math.Float32bits(f)
	sign, mag := F8E5M2(b>>24&0x80), b&0x7fffffff
	switch {
	case mag > 0x7f800000:
		return sign | 0x7e
	case mag >= 0x47700000: // 61440
		return sign | 0x7c
	case mag < 0x38800000: // below 2^-14: units of 2^-16
		return sign | F8E5M2(math.Float32bits(math.Float32frombits(mag)+0x1p7)&0x7)
	}
	mag += 0xfffff + mag>>21&1
	return sign | F8E5M2(mag>>21-(127-15)<<2)
}

func isNaN32(b uint32) bool { return b&0x7fffffff > 0x7f800000 }
func isNaN64(b uint64) bool { return b&0x7fffffffffffffff > 0x7ff0000000000000 }
