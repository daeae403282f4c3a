package bench

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"math"

	"tutti/kernels"
)

// period is the period of inputs in elements: a prime, so that data which is displaced by a power
// of two is detected.
const period = 4093

// hash mixes its arguments (the finaliser of SplitMix64, Steele, Lea and Flood 2014).
func hash(a, b, c int) uint64 {
	x := uint64(a)*0x9e3779b97f4a7c15 + uint64(b)*0xd1b54a32d192ed03 + uint64(c)*0x8cb92ba72f3d8dd7 + 1
	x ^= x >> 30
	x *= 0xbf58476d1ce4e5b9
	x ^= x >> 27
	x *= 0x94d049bb133111eb
	return x ^ x>>31
}

// table is one period of elements, as bytes.
type table []byte

// bitsTable is the data of rank from for part: arbitrary bits, because movement must preserve any.
func bitsTable(dt kernels.DType, from, part int) table {
	size := dt.Size()
	t := make(table, period*size)
	for i := range period {
		h := hash(from, part+1, i)
		if dt == kernels.Bool {
			h &= 1
		}
		put(t[i*size:], size, h)
	}
	return t
}

func put(b []byte, size int, v uint64) {
	var w [8]byte
	binary.LittleEndian.PutUint64(w[:], v)
	copy(b[:size], w[:])
}

// fill writes the elements first, first+1, … of t's infinite repetition to mem.
func (t table) fill(mem []byte, first, size int) {
	for off := first % period * size; len(mem) > 0; off = 0 {
		mem = mem[copy(mem, t[off:]):]
	}
}

// wrong counts the elements of mem that differ from those of fill.
func (t table) wrong(mem []byte, first, size int) (n int64) {
	for off := first % period * size; len(mem) > 0; off = 0 {
		want := t[off:min(len(t), off+len(mem))]
		if !bytes.Equal(mem[:len(want)], want) {
			for i := 0; i < len(want); i += size {
				if !bytes.Equal(mem[i:i+size], want[i:i+size]) {
					n++
				}
			}
		}
		mem = mem[len(want):]
	}
	return n
}

// reduction is one period of every rank's input and of the result.
type reduction struct {
	inputs []table
	result table
}

// encode encodes v, which must be 0 or a normal number that the format represents exactly.
func encode(f kernels.Format, v float64) uint64 {
	if v == 0 {
		return 0
	}
	sign := uint64(0)
	if v < 0 {
		sign, v = 1, -v
	}
	frac, exp := math.Frexp(v) // v = frac * 2^exp, 0.5 <= frac < 1
	bias := 1<<(f.Exponent-1) - 1
	e, m := exp-1+bias, math.Ldexp(frac, f.Fraction+1)
	if e < 1 || e >= 1<<f.Exponent-1+map[bool]int{true: 1}[f.Finite] || m != math.Trunc(m) {
		panic(fmt.Sprintf("bench: %v is not exact in a float of %d+%d bits", v, f.Exponent, f.Fraction))
	}
	return sign<<(f.Exponent+f.Fraction) | uint64(e)<<f.Fraction | uint64(m)&(1<<f.Fraction-1)
}

// newReduction makes the inputs of n ranks and the result of op on them.
func newReduction(op kernels.Op, dt kernels.DType, n int) reduction {
	size := dt.Size()
	r := reduction{inputs: make([]table, n), result: make(table, period*size)}
	for i := range r.inputs {
		r.inputs[i] = make(table, period*size)
	}
	f := dt.Format()
	in := make([]uint64, n)
	for i := range period {
		var out uint64
		switch {
		case dt.Class() == kernels.Float:
			v := make([]float64, n)
			for rank := range v {
				v[rank] = floatInput(op, f, n, rank, i)
				in[rank] = encode(f, v[rank])
			}
			out = encode(f, reduceFloats(op, v))
		case dt.Class() == kernels.Boolean:
			for rank := range in {
				in[rank] = hash(rank, int(op), i) & 1
				if op == kernels.Product || op == kernels.Min || op == kernels.BitAnd { // else nearly always false
					in[rank] = min(1, hash(rank, int(op), i)%uint64(2*n))
				}
			}
			out = reduceBools(op, in)
		default:
			signed := dt.Class() == kernels.Signed
			for rank := range in {
				in[rank] = integerInput(op, size, signed, n, rank, i)
			}
			out = reduceIntegers(op, size, signed, in)
		}
		for rank, v := range in {
			put(r.inputs[rank][i*size:], size, v)
		}
		put(r.result[i*size:], size, out)
	}
	return r
}

// floatInput returns rank's element i: small integers, or powers of two for products, such that
// every partial result is exact.
func floatInput(op kernels.Op, f kernels.Format, n, rank, i int) float64 {
	h := hash(rank, int(op), i)
	exact := 1 << min(f.Fraction+1, 1<<(f.Exponent-1)-1) // all integers up to here are exact
	switch op {
	case kernels.Sum:
		// If there are too many ranks for all to contribute, some contribute a small number and the
		// others 0.
		limit := min(8, max(1, exact/2/n))
		if n > exact/2 && (rank+i)%n >= exact/2 {
			return 0
		}
		v := float64(1 + h>>8%uint64(limit))
		if h&1 == 0 {
			return v
		}
		return -v
	case kernels.Avg:
		// The mean c plus deviations that cancel between ranks 2k and 2k+1; of an odd number, among
		// the last three.
		c := float64(1 + hash(-1, 0, i)%8)
		if last := rank - (n - 3); n%2 == 1 && n > 1 && last >= 0 {
			d, e := float64(1+hash(-1, 1, i)%4), float64(1+hash(-1, 2, i)%4)
			return c + []float64{d + e, -d, -e}[last]
		}
		d := float64(1 + hash(rank/2, 1, i)%4)
		if n == 1 {
			d = 0
		}
		return c + []float64{d, -d}[rank%2]
	case kernels.Product:
		// 1 or 2 at even ranks, 1 or 1/2 at odd ones, and signs; beyond the range of exponents only
		// signs.
		v := 1.0
		if h&2 != 0 && rank < 1<<(f.Exponent-1)-4 {
			v = []float64{2, 0.5}[rank%2]
		}
		if h&1 != 0 {
			v = -v
		}
		return v
	}
	v := float64(1 + h>>8%uint64(min(exact-1, 1<<20))) // Min, Max
	if h&1 != 0 {
		v = -v
	}
	return v
}

func reduceFloats(op kernels.Op, v []float64) float64 {
	x := v[0]
	for _, y := range v[1:] {
		switch op {
		case kernels.Sum, kernels.Avg:
			x += y
		case kernels.Product:
			x *= y
		case kernels.Min:
			x = min(x, y)
		case kernels.Max:
			x = max(x, y)
		}
	}
	if op == kernels.Avg {
		x /= float64(len(v))
	}
	return x
}

// integerInput returns rank's element i, sign-extended: arbitrary bits, since integers wrap; small
// numbers for averages, whose sum must not.
func integerInput(op kernels.Op, size int, signed bool, n, rank, i int) uint64 {
	h := hash(rank, int(op), i)
	if op != kernels.Avg {
		if op == kernels.BitAnd { // else nearly always 0
			h |= hash(rank, 101, i) | hash(rank, 102, i)
		}
		return h
	}
	limit := uint64(min(1<<(8*size-2)/n, 1<<20))
	v := h >> 8 % (limit + 1)
	if signed && h&1 != 0 {
		return -v
	}
	return v
}

func reduceIntegers(op kernels.Op, size int, signed bool, in []uint64) uint64 {
	// Between operations values are extended to 64 bits, as the type requires.
	extend := func(v uint64) uint64 {
		shift := 64 - 8*size
		if signed {
			return uint64(int64(v<<shift) >> shift)
		}
		return v << shift >> shift
	}
	less := func(a, b uint64) bool {
		if signed {
			return int64(a) < int64(b)
		}
		return a < b
	}
	x := extend(in[0])
	for _, y := range in[1:] {
		y = extend(y)
		switch op {
		case kernels.Sum, kernels.Avg:
			x += y
		case kernels.Product:
			x *= y
		case kernels.Min:
			if less(y, x) {
				x = y
			}
		case kernels.Max:
			if less(x, y) {
				x = y
			}
		case kernels.BitAnd:
			x &= y
		case kernels.BitOr:
			x |= y
		case kernels.BitXor:
			x ^= y
		}
		x = extend(x)
	}
	if op == kernels.Avg {
		if signed {
			return uint64(int64(x) / int64(len(in)))
		}
		return x / uint64(len(in))
	}
	return x
}

// reduceBools: a sum is "or", a product "and".
func reduceBools(op kernels.Op, in []uint64) uint64 {
	x := in[0]
	for _, y := range in[1:] {
		switch op {
		case kernels.Sum, kernels.Max, kernels.BitOr:
			x |= y
		case kernels.Product, kernels.Min, kernels.BitAnd:
			x &= y
		case kernels.BitXor:
			x ^= y
		}
	}
	return x
}
