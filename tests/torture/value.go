package torture

import (
	"bytes"
	"fmt"
	"math/bits"
	"unsafe"

	"tutti/kernels"
	"tutti/pg"
)

// Data are small integers, so that every order of a reduction gives the same bits in every type.
// The input of rank r at i follows from (seed, r, i): every rank can compute the inputs of all
// others.

func hash(seed uint64, rank, i int) uint64 {
	h := seed + uint64(rank)*0xbf58476d1ce4e5b9 + uint64(i)*0x94d049bb133111eb
	h ^= h >> 30
	h *= 0xbf58476d1ce4e5b9
	h ^= h >> 27
	h *= 0x94d049bb133111eb
	return h ^ h>>31
}

// datum describes the numbers of a type under a reduction.
type datum struct {
	dtype  pg.DType
	red    pg.Reduction
	size   int
	signed bool
	floats bool
	bound  int64 // magnitude of a number; 0: all bits
	unit   int64 // numbers are multiples of it
	seed   uint64
}

// most bounds the contributing ranks, so that sums are exact.
const most = 8

func newDatum(dt pg.DType, red pg.Reduction, seed uint64) datum {
	d := datum{dtype: dt, red: red, size: dt.Size(), unit: 1, seed: seed * 0x9e3779b97f4a7c15}
	switch dt.Class() {
	case kernels.Signed:
		d.signed = true
	case kernels.Float: // all integers of one bit more than the fraction are exact
		d.signed, d.floats = true, true
		d.bound = min(1000, int64(2)<<dt.Format().Fraction/most)
	case kernels.Boolean:
		d.bound = 1
	}
	switch {
	case red == pg.Avg && d.floats: // whole for 1 to 6 contributions
		d.unit, d.bound = 60, max(d.bound/60, 1)
	case red == pg.Avg:
		d.bound = 15
	case red == pg.Product && d.floats:
		d.bound = 2
	}
	return d
}

// value returns the input of rank at i.
func (d *datum) value(rank, i int) int64 {
	h := hash(d.seed, rank, i)
	if d.bound == 0 { // all bits, within the range in which an int64 has the order of the type
		switch {
		case d.signed:
			shift := 64 - 8*d.size
			return int64(h) << shift >> shift
		case d.size == 8:
			return int64(h >> 1)
		}
		return int64(h & (1<<(8*d.size) - 1))
	}
	if d.red == pg.Product && d.floats {
		return [4]int64{1, 2, -1, 1}[h&3]
	}
	if !d.signed {
		return int64(h % uint64(d.bound+1))
	}
	n, _ := bits.Mul64(h, uint64(2*d.bound+1))
	return (int64(n) - d.bound) * d.unit
}

// fold combines the inputs of all of ranks at i.
func (d *datum) fold(ranks []int, i int) int64 {
	v := d.value(ranks[0], i)
	for _, r := range ranks[1:] {
		w := d.value(r, i)
		switch d.red {
		case pg.Sum, pg.Avg:
			v += w
		case pg.Product:
			v *= w
		case pg.Min:
			v = min(v, w)
		case pg.Max:
			v = max(v, w)
		case pg.BitAnd:
			v &= w
		case pg.BitOr:
			v |= w
		case pg.BitXor:
			v ^= w
		}
	}
	if d.dtype == pg.Bool {
		v = min(v, 1)
	}
	if d.red == pg.Avg {
		v /= int64(len(ranks))
	}
	return v
}

// encode encodes a number.
func (d *datum) encode(v int64) uint64 {
	if f := d.dtype.Format(); d.floats {
		return float(v, f.Exponent, f.Fraction)
	}
	return uint64(v)
}

// float encodes a whole number that a float with these widths of exponent and mantissa holds
// exactly.
func float(v int64, exponent, mantissa int) uint64 {
	if v == 0 {
		return 0
	}
	sign := uint64(0)
	if v < 0 {
		sign, v = 1<<(exponent+mantissa), -v
	}
	e := bits.Len64(uint64(v)) - 1
	m := uint64(v)
	if e > mantissa {
		m >>= e - mantissa
	} else {
		m <<= mantissa - e
	}
	return sign | uint64(e+1<<(exponent-1)-1)<<mantissa | m&(1<<mantissa-1)
}

// put writes n elements, of(i) being element i.
func (d *datum) put(b []byte, n int, of func(i int) int64) {
	if n == 0 {
		return
	}
	p := unsafe.Pointer(unsafe.SliceData(b))
	b = b[:n*d.size]
	switch d.size {
	case 1:
		for i := range b {
			b[i] = byte(d.encode(of(i)))
		}
	default:
		for i := range n {
			v := d.encode(of(i))
			q := unsafe.Slice((*byte)(unsafe.Add(p, i*d.size)), d.size)
			for j := range q {
				q[j] = byte(v >> (8 * j))
			}
		}
	}
}

// compare describes where got differs from want, "" if it does not.
func (d *datum) compare(got, want []byte) string {
	if bytes.Equal(got, want) {
		return ""
	}
	count, first := 0, -1
	for i := 0; i+d.size <= len(want); i += d.size {
		if !bytes.Equal(got[i:i+d.size], want[i:i+d.size]) {
			if first < 0 {
				first = i
			}
			count++
		}
	}
	return fmt.Sprintf("%d of %d elements are wrong, the first at %d: %x, want %x", count, len(want)/d.size,
		first/d.size, got[first:first+d.size], want[first:first+d.size])
}
