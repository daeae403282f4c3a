package kernels

import (
	"fmt"
	"math"
	"math/big"
	"math/rand/v2"
	"sort"
	"strings"
	"testing"
)

// smallFloat describes a small float to the oracle below.
type smallFloat struct {
	dt       DType
	bits     int
	widen    func(uint32) float32
	from     func(float32) uint32
	overflow uint32 // what a magnitude that rounds past the largest finite value becomes
	max      uint32 // the largest finite pattern
	nan      func(f uint32) uint32
}

// smallFloats has a row for each small float.
func smallFloats() []smallFloat {
	return []smallFloat{
		{Float16, 16, func(b uint32) float32 { return F16(b).Float32() },
			func(f float32) uint32 { return uint32(F16From(f)) }, 0x7c00, 0x7bff,
			func(f uint32) uint32 { return 0x7e00 | f>>13&0x3ff }},
		{BFloat16, 16, func(b uint32) float32 { return BF16(b).Float32() },
			func(f float32) uint32 { return uint32(BF16From(f)) }, 0x7f80, 0x7f7f,
			func(f uint32) uint32 { return 0x7fc0 | f>>16&0x7f }},
		{Float8E4M3, 8, func(b uint32) float32 { return F8E4M3(b).Float32() },
			func(f float32) uint32 { return uint32(F8E4M3From(f)) }, 0x7f, 0x7e,
			func(uint32) uint32 { return 0x7f }},
		{Float8E5M2, 8, func(b uint32) float32 { return F8E5M2(b).Float32() },
			func(f float32) uint32 { return uint32(F8E5M2From(f)) }, 0x7c, 0x7b,
			func(uint32) uint32 { return 0x7e }},
	}
}

// smalls are smallFloats by type.
var smalls = func() (rows [numDTypes]*smallFloat) {
	for _, f := range smallFloats() {
		rows[f.dt] = &f
	}
	return rows
}()

func smallOf(dt DType) *smallFloat { return smalls[dt] }

// A row of the table describes its type alone, and says of a float what its bits say.
func TestTypesAreDescribed(t *testing.T) {
	names := map[string]bool{}
	for _, dt := range DTypes() {
		name, constant, ok := dt.String(), "", false
		if constant, ok = strings.CutPrefix(fmt.Sprintf("%#v", dt), "kernels."); !ok {
			t.Errorf("%v is %#v in Go", dt, dt)
		}
		if names[name] || names[constant] || strings.ReplaceAll(name, "_", "") != strings.ToLower(constant) {
			t.Errorf("names %q and %q", name, constant)
		}
		names[name], names[constant] = true, true
		f := dt.Format()
		switch dt.Class() {
		case Float:
			if 1+f.Exponent+f.Fraction != 8*dt.Size() {
				t.Errorf("%v of %d bytes: %+v", dt, dt.Size(), f)
			}
		case Signed, Unsigned, Boolean:
			if f != (Format{}) {
				t.Errorf("%v: %+v", dt, f)
			}
		default:
			t.Errorf("%v is of class %d", dt, dt.Class())
		}
		if dt.SmallFloat() != (smallOf(dt) != nil) {
			t.Errorf("smallFloats has a row for %v: %t", dt, smallOf(dt) != nil)
		}
		if (dtypes[dt].scale != nil) != Supported(Avg, dt) {
			t.Errorf("%v: Avg is defined: %t, Scale is: %t", dt, Supported(Avg, dt), dtypes[dt].scale != nil)
		}
	}
	for _, dt := range []DType{0, numDTypes, 255} {
		if dt.Valid() || dt.Size() != 0 || dt.Class() != 0 || dt.SmallFloat() || dt.Format() != (Format{}) {
			t.Errorf("%v is a type", dt)
		}
	}
}

// value is the number that pattern b of a format with e exponent bits denotes, from the definition
// of the format.
func value(b uint32, width, e int) *big.Float {
	m := width - 1 - e
	exp, frac := int(b>>m&(1<<e-1)), int64(b&(1<<m-1))
	bias := 1<<(e-1) - 1
	if exp == 0 {
		exp = 1
	} else {
		frac |= 1 << m
	}
	v := new(big.Float).SetMantExp(new(big.Float).SetInt64(frac), exp-bias-m)
	if b>>(width-1) != 0 {
		v.Neg(v)
	}
	return v
}

// oracle rounds f by search among all finite patterns in exact arithmetic.
func (f *smallFloat) oracle(table []*big.Float, x float32) uint32 {
	b := math.Float32bits(x)
	sign := b >> 31 << (f.bits - 1)
	abs := math.Abs(float64(x))
	if abs != abs {
		return sign | f.nan(b)
	}
	if math.IsInf(abs, 0) {
		return sign | f.overflow
	}
	v := new(big.Float).SetFloat64(abs)
	// the last entry is where overflow would be
	i := sort.Search(len(table), func(i int) bool { return table[i].Cmp(v) >= 0 })
	switch {
	case i == len(table):
		return sign | f.overflow
	case i > 0 && table[i].Cmp(v) != 0:
		twice := new(big.Float).Add(v, v)
		sum := new(big.Float).Add(table[i-1], table[i])
		if c := twice.Cmp(sum); c < 0 || c == 0 && i%2 == 1 {
			i--
		}
	}
	if uint32(i) > f.max {
		return sign | f.overflow
	}
	return sign | uint32(i)
}

func TestSmallFloats(t *testing.T) {
	for _, f := range smallFloats() {
		t.Run(f.dt.String(), func(t *testing.T) {
			var table []*big.Float
			for b := uint32(0); b <= f.max+1; b++ {
				table = append(table, value(b, f.bits, f.dt.Format().Exponent))
			}
			for b := uint32(0); b < 1<<f.bits; b++ { // every pattern there and back
				x := f.widen(b)
				mag := b &^ (1 << (f.bits - 1))
				if mag <= f.max {
					if want, _ := value(b, f.bits, f.dt.Format().Exponent).Float32(); x != want {
						t.Fatalf("%#x is %v, want %v", b, x, want)
					}
					if math.Signbit(float64(x)) != (mag != b) {
						t.Fatalf("%#x lost its sign", b)
					}
				} else if inf := math.IsInf(float64(x), 0); inf != (mag == f.overflow && !f.dt.Format().Finite) ||
					!inf && x == x {
					t.Fatalf("%#x is %v", b, x)
				}
				if got, want := f.from(x), f.oracle(table, x); got != want || x == x && got != b {
					t.Fatalf("%#x came back as %#x, want %#x", b, got, want)
				}
			}
			check := func(x float32) {
				if got, want := f.from(x), f.oracle(table, x); got != want {
					t.Fatalf("%v (%#x) rounds to %#x, want %#x", x, math.Float32bits(x), got, want)
				}
			}
			step := 1
			if f.bits == 16 {
				step = 7 // a prime, so that all low bits occur
			}
			for i := 0; i+1 < len(table); i += step { // every value, every tie and their neighbours
				lo, _ := table[i].Float32()
				mid, _ := new(big.Float).Quo(new(big.Float).Add(table[i], table[i+1]), big.NewFloat(2)).Float32()
				for _, x := range []float32{lo, mid} {
					for _, y := range []float32{x, math.Nextafter32(x, -1), math.Nextafter32(x, float32(math.Inf(1)))} {
						check(y)
						check(-y)
					}
				}
			}
			r := rand.New(rand.NewPCG(1, uint64(f.dt)))
			for range 50_000 {
				check(math.Float32frombits(r.Uint32()))
			}
		})
	}
}
