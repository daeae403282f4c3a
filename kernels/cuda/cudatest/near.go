package cudatest

import (
	"fmt"
	"math"
	"math/rand/v2"

	"tutti/kernels"
)

// element returns the bits of element i.
func element(b []byte, size, i int) (v uint64) {
	for k := range size {
		v |= uint64(b[i*size+k]) << (8 * k)
	}
	return v
}

// FillNear writes random elements for Near: floats that are near in magnitude, so that sums round,
// and integers that are small enough for products.
func FillNear(r *rand.Rand, dt kernels.DType, b []byte) {
	size, f := dt.Size(), dt.Format()
	for i := range len(b) / size {
		v := uint64(r.IntN(4))
		switch dt.Class() {
		case kernels.Float:
			v = r.Uint64()
			e := uint64(1)<<(f.Exponent-1) - 3 + v>>8&3
			v = v&(1<<f.Fraction-1) | e<<f.Fraction | v>>63<<(f.Exponent+f.Fraction)
		case kernels.Boolean:
			v &= 1
		}
		for k := range size {
			b[i*size+k] = byte(v >> (8 * k))
		}
	}
}

// Near compares dst, what a reduction has made of srcs, with arithmetic in float64. It knows
// nothing of the functions of package kernels. Integers are exact, floats off by their own
// rounding, and that of a float32 for each source.
func Near(op kernels.Op, dt kernels.DType, dst []byte, srcs [][]byte) error {
	size := dt.Size()
	for k := range len(dst) / size {
		want := value(dt, element(srcs[0], size, k))
		magnitude := math.Abs(want)
		for _, s := range srcs[1:] {
			x := value(dt, element(s, size, k))
			want = combined(op, dt, want, x)
			magnitude = max(magnitude+math.Abs(x), math.Abs(want))
		}
		if op == kernels.Avg {
			want /= float64(len(srcs))
			if dt.Class() != kernels.Float {
				want = math.Trunc(want)
			}
		}
		tolerance := 0.0
		if f := dt.Format(); dt.Class() == kernels.Float && op != kernels.Min && op != kernels.Max {
			step := math.Ldexp(1, -min(f.Fraction, 52))
			tolerance = step*math.Abs(want)/2 + float64(len(srcs))*math.Ldexp(1, -max(f.Fraction, 23))*magnitude +
				math.Ldexp(1, 2-1<<(f.Exponent-1)-f.Fraction) // half of the least subnormal, and more
		}
		if got := value(dt, element(dst, size, k)); !(math.Abs(got-want) <= tolerance) {
			return fmt.Errorf("element %d of %v of %d sources of %v is %v, want %v +- %v", k, op, len(srcs), dt, got,
				want, tolerance)
		}
	}
	return nil
}

// value returns the number of an element of a type.
func value(dt kernels.DType, bits uint64) float64 {
	w := 8 * dt.Size()
	switch dt.Class() {
	case kernels.Signed:
		return float64(int64(bits<<(64-w)) >> (64 - w))
	case kernels.Float:
		f := dt.Format()
		e, m := int(bits>>f.Fraction)&(1<<f.Exponent-1), float64(bits&(1<<f.Fraction-1))
		bias := 1<<(f.Exponent-1) - 1
		v := math.Ldexp(m, 1-bias-f.Fraction)
		if e > 0 {
			v = math.Ldexp(m+math.Ldexp(1, f.Fraction), e-bias-f.Fraction)
		}
		if bits>>(w-1) != 0 {
			return -v
		}
		return v
	}
	return float64(bits)
}

// combined returns a op b in float64; Avg is Sum here.
func combined(op kernels.Op, dt kernels.DType, a, b float64) float64 {
	switch {
	case dt.Class() == kernels.Boolean && op == kernels.Sum:
		op = kernels.Max
	case dt.Class() == kernels.Boolean && op == kernels.Product:
		op = kernels.Min
	}
	switch op {
	case kernels.Product:
		return a * b
	case kernels.Min:
		return min(a, b)
	case kernels.Max:
		return max(a, b)
	case kernels.BitAnd:
		return float64(int64(a) & int64(b))
	case kernels.BitOr:
		return float64(int64(a) | int64(b))
	case kernels.BitXor:
		return float64(int64(a) ^ int64(b))
	}
	return a + b
}
