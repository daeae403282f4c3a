package kernels

import (
	"bytes"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"unsafe"

	"pgregory.net/rapid"
)

type implementation struct {
	name string
	t    *reducers
}

// implementations is all that this machine can run, the portable one first.
var implementations = []implementation{{"portable", portable}}

func ptr(b []byte) unsafe.Pointer { return unsafe.Pointer(unsafe.SliceData(b)) }

func ptrs(bs ...[]byte) (p []unsafe.Pointer) {
	for _, b := range bs {
		p = append(p, ptr(b))
	}
	return p
}

// get and put are the bits of element i of an array of elements of size bytes.
func get(b []byte, size, i int) uint64 {
	switch p := unsafe.Pointer(&b[i*size : (i+1)*size][0]); size {
	case 1:
		return uint64(*(*uint8)(p))
	case 2:
		return uint64(*(*uint16)(p))
	case 4:
		return uint64(*(*uint32)(p))
	default:
		return *(*uint64)(p)
	}
}

func put(b []byte, size, i int, v uint64) {
	switch p := unsafe.Pointer(&b[i*size : (i+1)*size][0]); size {
	case 1:
		*(*uint8)(p) = uint8(v)
	case 2:
		*(*uint16)(p) = uint16(v)
	case 4:
		*(*uint32)(p) = uint32(v)
	default:
		*(*uint64)(p) = v
	}
}

// specials are the patterns at which something changes, by type.
func specials(dt DType) []uint64 {
	floats := func(exp, frac uint) (s []uint64) {
		inf := uint64(1)<<exp - 1
		for _, e := range []uint64{0, 1, inf >> 1, inf>>1 + 1, inf - 1, inf} {
			for _, f := range []uint64{0, 1, 1<<frac - 1, 1 << (frac - 1)} {
				s = append(s, e<<frac|f, 1<<(exp+frac)|e<<frac|f)
			}
		}
		return s
	}
	switch f := dt.Format(); dt.Class() {
	case Float:
		return floats(uint(f.Exponent), uint(f.Fraction))
	case Boolean:
		return []uint64{0, 1, 1, 0, 1, 2, 0x80, 0xff}
	}
	w := uint(dt.Size() * 8)
	top := uint64(1) << (w - 1)
	return []uint64{0, 1, 2, 3, top - 1, top, top + 1, top | (top - 1), top | (top - 2), 0x55, 0xaa}
}

// fill writes n elements, half of them special.
func fill(r *rand.Rand, dt DType, b []byte) {
	s, size := specials(dt), dt.Size()
	for i := range len(b) / size {
		v := r.Uint64()
		if v&1 == 0 {
			v = s[r.IntN(len(s))]
		} else if v >>= 1; dt == Float32 || dt == Float64 { // near in magnitude, so that sums round
			v = v&^(0x7f<<(dt.Size()*8-8)) | 0x3f<<(dt.Size()*8-8)
		}
		put(b, size, i, v)
	}
}

// pools hold fill's elements for tests that need many, because making them takes longer than
// reducing them.
var pools [numDTypes][]byte

// draw copies elements from the pool, from a random place on.
func draw(r *rand.Rand, dt DType, b []byte) {
	const n = 40_009
	size := dt.Size()
	if pools[dt] == nil {
		pools[dt] = make([]byte, n*size)
		fill(rand.New(rand.NewPCG(11, uint64(dt))), dt, pools[dt])
	}
	for at := r.IntN(n); len(b) > 0; at = 0 {
		b = b[copy(b, pools[dt][at*size:]):]
	}
}

// want computes one element from the definition of the operation, in other ways than the kernels.
func want(op Op, dt DType, v []uint64) uint64 {
	w := uint(dt.Size() * 8)
	maskW := ^uint64(0) >> (64 - w)
	if len(v) == 1 && dt != Bool {
		return v[0] & maskW
	}
	switch dt.Class() {
	case Float:
		return wantFloat(op, dt, v)
	case Boolean:
		trues := 0
		for _, x := range v {
			if byte(x) != 0 {
				trues++
			}
		}
		ok := map[Op]bool{Sum: trues > 0, Max: trues > 0, BitOr: trues > 0, Product: trues == len(v),
			Min: trues == len(v), BitAnd: trues == len(v), BitXor: trues%2 == 1}[op]
		if ok {
			return 1
		}
		return 0
	}
	signed := dt.Class() == Signed
	extend := func(x uint64) uint64 {
		if signed {
			return uint64(int64(x<<(64-w)) >> (64 - w))
		}
		return x & maskW
	}
	less := func(a, b uint64) bool {
		if signed {
			return int64(a) < int64(b)
		}
		return a < b
	}
	acc := extend(v[0])
	for _, x := range v[1:] {
		x = extend(x)
		switch op {
		case Sum, Avg:
			acc += x
		case Product:
			acc *= x
		case Min:
			if less(x, acc) {
				acc = x
			}
		case Max:
			if less(acc, x) {
				acc = x
			}
		case BitAnd:
			acc &= x
		case BitOr:
			acc |= x
		case BitXor:
			acc ^= x
		}
	}
	acc = extend(acc)
	if op == Avg {
		if signed {
			acc = uint64(int64(acc) / int64(len(v)))
		} else {
			acc /= uint64(len(v))
		}
	}
	return acc & maskW
}

// wantFloat does one operation at a time and takes care of NaNs by their bits. float32 goes through
// float64, which holds the exact product and a sum whose second rounding is harmless.
func wantFloat(op Op, dt DType, v []uint64) uint64 {
	double := dt == Float64
	type num struct {
		f   float64
		nan uint64 // the bits if it is a NaN, in float32 or float64
	}
	quiet := uint64(1) << 22
	invalid, canon := uint64(0xffc00000), uint64(0x7fc00000)
	if double {
		quiet, invalid, canon = 1<<51, 0xfff8<<48, 0x7ff8<<48
	}
	round := func(f float64) float64 {
		if double {
			return f
		}
		return float64(float32(f))
	}
	read := func(x uint64) num {
		var b uint64
		var f float64
		switch dt {
		case Float64:
			b, f = x, math.Float64frombits(x)
		case Float32:
			b, f = x&0xffffffff, float64(math.Float32frombits(uint32(x)))
		default:
			wide := smallOf(dt).widen(uint32(x))
			b, f = uint64(math.Float32bits(wide)), float64(wide)
		}
		if f != f {
			return num{f, b}
		}
		return num{f, 0}
	}
	acc := read(v[0])
	for _, y := range v[1:] {
		x := read(y)
		isMin := op == Min || op == Max
		switch {
		case isMin && (acc.nan|x.nan) != 0:
			acc = num{math.NaN(), canon}
		case acc.nan != 0:
			acc.nan |= quiet
		case x.nan != 0:
			acc = num{math.NaN(), x.nan | quiet}
		case isMin:
			// Order by value, then by sign.
			first := acc.f < x.f || acc.f == x.f && math.Signbit(acc.f)
			if first != (op == Min) {
				acc = x
			}
		default:
			f := acc.f + x.f
			if op == Product {
				f = acc.f * x.f
			}
			acc = num{round(f), 0}
			if f != f {
				acc.nan = invalid
			}
		}
	}
	if op == Avg && acc.nan == 0 {
		acc.f = round(acc.f / float64(len(v)))
	}
	if double {
		if acc.nan != 0 {
			return acc.nan
		}
		return math.Float64bits(acc.f)
	}
	f := float32(acc.f)
	if acc.nan != 0 {
		f = math.Float32frombits(uint32(acc.nan))
	}
	if dt == Float32 {
		return uint64(math.Float32bits(f))
	}
	return uint64(smallOf(dt).from(f))
}

func supported(f func(op Op, dt DType)) {
	for _, dt := range DTypes() {
		for _, op := range Ops() {
			if Supported(op, dt) {
				f(op, dt)
			}
		}
	}
}

func TestReferenceAgainstDefinition(t *testing.T) {
	supported(func(op Op, dt DType) {
		t.Run(fmt.Sprintf("%v/%v", op, dt), func(t *testing.T) {
			ref, err := Reference(op, dt)
			if err != nil {
				t.Fatal(err)
			}
			r := rand.New(rand.NewPCG(uint64(op), uint64(dt)))
			size := dt.Size()
			for k := 1; k <= 9; k++ {
				const n = 700
				var src [][]byte
				for range k {
					b := make([]byte, n*size)
					fill(r, dt, b)
					src = append(src, b)
				}
				dst := make([]byte, n*size)
				ref(ptr(dst), ptrs(src...), n)
				for i := range n {
					var v []uint64
					for _, s := range src {
						v = append(v, get(s, size, i))
					}
					if got, want := get(dst, size, i), want(op, dt, v); got != want {
						t.Fatalf("%d sources %#x: %#x, want %#x", k, v, got, want)
					}
				}
			}
		})
	})
}

// compare runs one reduction by im and by the reference, on sources at the given byte offsets;
// alias is the source that dst is, or -1. It reports the first difference, also one outside dst.
func compare(im implementation, op Op, dt DType, n, alias int, offsets []int, data func([]byte)) error {
	const guard = 80
	size := dt.Size()
	var src [][]byte
	for _, o := range offsets[1:] {
		b := make([]byte, o+n*size)[o:]
		data(b)
		src = append(src, b)
	}
	frame := bytes.Repeat([]byte{0xa5}, offsets[0]+guard+n*size+guard)
	dst := frame[offsets[0]+guard:][: n*size : n*size]
	want := make([]byte, n*size)
	portable.reduce[op][dt](ptr(want), ptrs(src...), n)
	p := ptrs(src...)
	if alias >= 0 {
		copy(dst, src[alias])
		p[alias] = ptr(dst)
	}
	before := make([][]byte, len(src))
	for i := range src {
		before[i] = bytes.Clone(src[i])
	}
	im.t.reduce[op][dt](ptr(dst), p, n)
	for i := 0; i < n && !bytes.Equal(dst, want); i++ {
		if g, w := get(dst, size, i), get(want, size, i); g != w {
			var v []uint64
			for _, s := range src {
				v = append(v, get(s, size, i))
			}
			return fmt.Errorf("%s: %v of %v, %d elements, %d sources, alias %d, offsets %v: element %d of %#x is %#x, "+
				"want %#x", im.name, op, dt, n, len(src), alias, offsets, i, v, g, w)
		}
	}
	if got := bytes.Count(frame[:offsets[0]+guard], []byte{0xa5}) + bytes.Count(frame[len(frame)-guard:],
		[]byte{0xa5}); got != offsets[0]+2*guard {
		return fmt.Errorf("%s: %v of %v, %d elements: wrote outside of the destination", im.name, op, dt, n)
	}
	for i := range src {
		if !bytes.Equal(src[i], before[i]) {
			return fmt.Errorf("%s: %v of %v changed source %d", im.name, op, dt, i)
		}
	}
	return nil
}

func TestReducersMatchReference(t *testing.T) {
	for _, im := range implementations {
		supported(func(op Op, dt DType) {
			t.Run(fmt.Sprintf("%s/%v/%v", im.name, op, dt), func(t *testing.T) {
				r := rand.New(rand.NewPCG(uint64(op), uint64(dt)))
				run := func(n, k, alias int) {
					offsets := make([]int, k+1)
					for i := range offsets {
						offsets[i] = r.IntN(67)
						if r.IntN(2) == 0 {
							offsets[i] &^= 15
						}
					}
					if err := compare(im, op, dt, n, alias, offsets,
						func(b []byte) { draw(r, dt, b) }); err != nil {
						t.Fatal(err)
					}
				}
				stride := 1
				if testing.Short() {
					stride = 7
				}
				for n := 0; n <= 300; n += stride {
					run(n, 1+r.IntN(12), -1)
					run(n, 2, r.IntN(3)-1)
				}
				for k := 1; k <= 12; k++ {
					for alias := -1; alias < k; alias += 1 + stride/2 {
						run(r.IntN(300), k, alias)
						run(600+r.IntN(4000), k, alias) // longer than what one call of the kernel does
					}
				}
				if !testing.Short() {
					run(long(dt)+37, 3, -1)
					run(long(dt)+37, 3, 2)
				}
			})
		})
	}
}

// long is more elements than are reduced between two points of preemption.
func long(dt DType) int { return (600 << 10) / dt.Size() }

func TestReduceProperty(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		dt := rapid.SampledFrom(DTypes()).Draw(t, "dtype")
		op := rapid.SampledFrom(Ops()).Filter(func(o Op) bool { return Supported(o, dt) }).Draw(t, "op")
		im := rapid.SampledFrom(implementations).Draw(t, "implementation")
		n := rapid.IntRange(0, 400).Draw(t, "n")
		offsets := rapid.SliceOfN(rapid.IntRange(0, 70), 2, 13).Draw(t, "offsets")
		alias := rapid.IntRange(-1, len(offsets)-2).Draw(t, "alias")
		r := rand.New(rand.NewPCG(rapid.Uint64().Draw(t, "seed"), 0))
		if err := compare(im, op, dt, n, alias, offsets,
			func(b []byte) { fill(r, dt, b) }); err != nil {
			t.Fatal(err)
		}
	})
}

// FuzzReduce takes the elements themselves from the fuzzer.
func FuzzReduce(f *testing.F) {
	f.Add(uint8(Sum), uint8(BFloat16), uint8(2), []byte("\x80\x7f\x80\xff0123456789"))
	f.Add(uint8(Min), uint8(Float32), uint8(3), bytes.Repeat([]byte{0, 0, 0, 0x80, 0, 0, 0, 0, 1, 0, 0x80, 0x7f}, 9))
	f.Add(uint8(Sum), uint8(Float8E4M3), uint8(2), []byte("\x7e\x01\xff\x7f\x80\x00\x08\x88"))
	f.Add(uint8(Product), uint8(Int64), uint8(2), bytes.Repeat([]byte{0xff, 0x80, 3}, 40))
	f.Fuzz(func(t *testing.T, op, dt, k uint8, data []byte) {
		if !Supported(Op(op), DType(dt)) || k == 0 || k > 12 {
			t.Skip()
		}
		n := len(data) / int(k) / DType(dt).Size()
		for _, im := range implementations {
			rest := data
			err := compare(im, Op(op), DType(dt), n, int(k)-1, make([]int, k+1),
				func(b []byte) { rest = rest[copy(b, rest):] })
			if err != nil {
				t.Error(err)
			}
		}
	})
}

// TestSixteenBitPairs combines every value of the 16-bit floats with the special ones, and all
// pairs of 8-bit floats.
func TestSixteenBitPairs(t *testing.T) {
	supported(func(op Op, dt DType) {
		if !dt.SmallFloat() {
			return
		}
		size := dt.Size()
		n := 1 << (8 * size)
		all, other := make([]byte, n*size), make([]byte, n*size)
		for i := range n {
			put(all, size, i, uint64(i))
		}
		others := specials(dt)
		if size == 1 {
			others = others[:0]
			for i := range n {
				others = append(others, uint64(i))
			}
		}
		r := rand.New(rand.NewPCG(9, 9))
		for len(others) < 60 {
			others = append(others, r.Uint64()&0xffff)
		}
		if testing.Short() {
			r.Shuffle(len(others), func(i, j int) { others[i], others[j] = others[j], others[i] })
			others = others[:12]
		}
		got, want := make([]byte, n*size), make([]byte, n*size)
		for _, o := range others {
			for i := range n {
				put(other, size, i, o)
			}
			for _, src := range [][]unsafe.Pointer{ptrs(all, other), ptrs(other, all)} {
				portable.reduce[op][dt](ptr(want), src, n)
				for _, im := range implementations[1:] {
					im.t.reduce[op][dt](ptr(got), src, n)
					if !bytes.Equal(got, want) {
						for i := range n {
							if g, w := get(got, size, i), get(want, size, i); g != w {
								t.Fatalf("%s: %v of %v: %#x and %#x give %#x, want %#x", im.name, op, dt, i, o, g, w)
							}
						}
					}
				}
			}
		}
	})
}

// TestRareSubnormals puts one special result among many ordinary ones, everywhere in turn: a kernel
// may round blocks with subnormal or zero results in another way than the others, and other tests
// have such results in nearly all blocks.
func TestRareSubnormals(t *testing.T) {
	const n = 3*256 + 37
	r := rand.New(rand.NewPCG(12, 13))
	rare := [][2]uint16{
		{0x0001, 0x0001}, {0x0080, 0x8001}, {0x8080, 0x0001}, {0x00ff, 0x80f0}, // sums below the normal range
		// products there, with and without rounding, and at its edge
		{0x1f91, 0x1fff}, {0x9f83, 0x1fa1}, {0x1f80, 0x2000}, {0x1e01, 0x1e01},
		{0x0000, 0x0000}, {0x8000, 0x8000}, {0x3f80, 0xbf80}, // zeros
		{0x7f80, 0xff80}, {0x7f81, 0x3f80}, {0x3f80, 0xffff}, {0x7f7f, 0x7f7f}, {0xff80, 0xc000}, // NaNs and infinities
		{0x3f80, 0x3b80}, {0x3f81, 0x3b80}, {0x3fff, 0x3b80}, // ties
	}
	for _, im := range implementations[1:] {
		for _, op := range []Op{Sum, Product, Avg, Min, Max} {
			for _, dt := range []DType{BFloat16, Float16} {
				for _, k := range []int{2, 3, 4, 9, 17} {
					var src []unsafe.Pointer
					var raw [][]byte
					one := uint64(0x3f80)
					if dt == Float16 {
						one = 0x3c00
					}
					for range k {
						b := make([]byte, 2*n)
						for i := range n {
							put(b, 2, i, one+r.Uint64()&0x3f) // nothing cancels, products stay ordinary
						}
						raw, src = append(raw, b), append(src, ptr(b))
					}
					got, want := make([]byte, 2*n), make([]byte, 2*n)
					for at := 0; at < n; at += 1 + r.IntN(4) {
						pair := rare[r.IntN(len(rare))]
						var old []uint64
						for j, b := range raw {
							old = append(old, get(b, 2, at))
							switch {
							case j < 2:
								put(b, 2, at, uint64(pair[j]))
							case op == Product:
								put(b, 2, at, one)
							default:
								put(b, 2, at, uint64(pair[0]&0x8000)) // a zero of the first one's sign
							}
						}
						portable.reduce[op][dt](ptr(want), src, n)
						im.t.reduce[op][dt](ptr(got), src, n)
						if !bytes.Equal(got, want) {
							for i := range n {
								if g, w := get(got, 2, i), get(want, 2, i); g != w {
									t.Fatalf("%s: %v of %v, %d sources, %#x at %d: element %d is %#x, want %#x",
										im.name, op, dt, k, pair, at, i, g, w)
								}
							}
						}
						for j, b := range raw {
							put(b, 2, at, old[j])
						}
					}
				}
			}
		}
	}
}

func TestLevelNamesBestImplementation(t *testing.T) {
	best := implementations[len(implementations)-1].name
	if l := Level(); !strings.HasPrefix(best, l) || !slices.Contains([]string{"AVX-512", "AVX2", "portable"}, l) {
		t.Errorf("Level() = %q, the best implementation here is %s", l, best)
	}
}

func TestWidenNarrow(t *testing.T) {
	r := rand.New(rand.NewPCG(3, 4))
	for _, im := range implementations {
		for _, f := range smallFloats() {
			size, n := f.dt.Size(), 1<<f.bits
			all, wide := make([]byte, n*size), make([]byte, n*4+1)[1:]
			for i := range n {
				put(all, size, i, uint64(i))
			}
			im.t.widen[f.dt](ptr(wide), ptr(all), n)
			for i := range n {
				if g, w := uint32(get(wide, 4, i)), math.Float32bits(f.widen(uint32(i))); g != w {
					t.Fatalf("%s: %v %#x widens to %#x, want %#x", im.name, f.dt, i, g, w)
				}
			}
			// Every value, every tie between neighbours, what lies beside them, and random bits.
			var xs []uint32
			for i := range n / 2 {
				b := math.Float32bits(f.widen(uint32(i)))
				next := math.Float32bits(f.widen(uint32(min(i+1, int(f.max)))))
				mid := b/2 + next/2 + b&next&1
				for _, x := range []uint32{b, mid, mid - 1, mid + 1} {
					xs = append(xs, x, x^1<<31)
				}
			}
			for range 1 << 16 {
				x := r.Uint32()
				xs = append(xs, x, x&^0x7f800000|(100+x>>23&0xff%60)<<23) // also near 1
			}
			xs = append(xs, 0x7fffffff, 0xffffffff, 0x7f800001, 0x7fbfffff, 0xffc00000)
			src, dst := make([]byte, 4*len(xs)), make([]byte, size*len(xs)+3)[3:]
			for i, x := range xs {
				put(src, 4, i, uint64(x))
			}
			im.t.narrow[f.dt](ptr(dst), ptr(src), len(xs))
			for i, x := range xs {
				if g, w := uint32(get(dst, size, i)), f.from(math.Float32frombits(x)); g != w {
					t.Fatalf("%s: %#x narrows to %v %#x, want %#x", im.name, x, f.dt, g, w)
				}
			}
			for n := range 70 { // tails write what they should and no more
				frame := bytes.Repeat([]byte{0xa5}, 1024)
				im.t.widen[f.dt](ptr(frame), ptr(all), n)
				if !bytes.Equal(frame[:4*n], wide[:4*n]) || bytes.Count(frame[4*n:], []byte{0xa5}) != len(frame)-4*n {
					t.Fatalf("%s: widening %d of %v", im.name, n, f.dt)
				}
				frame = bytes.Repeat([]byte{0xa5}, 1024)
				im.t.narrow[f.dt](ptr(frame), ptr(src), n)
				if !bytes.Equal(frame[:size*n], dst[:size*n]) || bytes.Count(frame[size*n:],
					[]byte{0xa5}) != len(frame)-size*n {
					t.Fatalf("%s: narrowing %d of %v", im.name, n, f.dt)
				}
			}
		}
	}
}

func TestScaleDividesInPlace(t *testing.T) {
	r := rand.New(rand.NewPCG(5, 6))
	for _, im := range implementations {
		for _, dt := range DTypes() {
			if !Supported(Avg, dt) {
				continue
			}
			size := dt.Size()
			for _, div64 := range []int64{1, 2, 3, 7, 10, 127, 128, 200, 65535, 1<<31 - 1, 1 << 32, 1<<32 + 1, 1 << 40,
				math.MaxInt} {
				div := int(div64)
				if int64(div) != div64 {
					continue // int has 32 bits here
				}
				for _, n := range []int{0, 1, 7, 33, 1000} {
					b := make([]byte, n*size+16)
					fill(r, dt, b)
					old := bytes.Clone(b)
					im.t.scale[dt](ptr(b), n, div)
					for i := range n {
						x := get(old, size, i)
						var w uint64
						switch {
						case dt.Class() == Signed:
							s := 64 - 8*uint(size)
							w = uint64(int64(x<<s)>>s/int64(div)) << s >> s
						case dt.Class() == Unsigned:
							w = x / uint64(div)
						case dt == Float64:
							if f := math.Float64frombits(x); f == f {
								w = math.Float64bits(f / float64(div))
							} else {
								w = x | quiet64
							}
						default:
							f := math.Float32frombits(uint32(x))
							if dt.SmallFloat() {
								f = smallOf(dt).widen(uint32(x))
							}
							if f == f {
								f /= float32(div)
							} else {
								f = math.Float32frombits(math.Float32bits(f) | quiet32)
							}
							w = uint64(math.Float32bits(f))
							if dt.SmallFloat() {
								w = uint64(smallOf(dt).from(f))
							}
						}
						if g := get(b, size, i); g != w {
							t.Fatalf("%s: %v %#x by %d is %#x, want %#x", im.name, dt, x, div, g, w)
						}
					}
					if !bytes.Equal(b[n*size:], old[n*size:]) {
						t.Fatalf("%s: scaling %d of %v wrote past the end", im.name, n, dt)
					}
				}
			}
		}
	}
}

func TestStagedAvg(t *testing.T) {
	a, b, c := []byte{10}, []byte{20}, []byte{33}
	partial, dst := make([]byte, 1), make([]byte, 1)
	for _, err := range []error{Reduce(Sum, Uint8, partial, a, b),
		Reduce(Sum, Uint8, partial, partial, c)} {
		if err != nil {
			t.Fatal(err)
		}
	}
	Scale(Uint8, ptr(partial), 1, 3)
	if err := Reduce(Avg, Uint8, dst, a, b, c); err != nil || dst[0] != 21 || partial[0] != dst[0] {
		t.Fatal(dst, partial, err)
	}
}

// copies has all functions that copy bytes.
var copies = map[string]func(dst, src unsafe.Pointer, n int){"Copy": Copy, "CopyShared": CopyShared,
	"CopyNonTemporal": CopyNonTemporal,
	"CopyOut":         func(dst, src unsafe.Pointer, n int) { CopyOut(dst, src, n, 3*n) }}

func TestCopiesAtAnyOffset(t *testing.T) {
	r := rand.New(rand.NewPCG(7, 8))
	for _, n := range []int{0, 1, 63, 4095, 4096, 5000, 300<<10 + 11} {
		for _, off := range []int{0, 1, 13, 64} {
			src := make([]byte, n+off)[off:]
			for i := range src {
				src[i] = byte(r.Uint32())
			}
			for name, f := range copies {
				frame := bytes.Repeat([]byte{0xa5}, n+200)
				dst := frame[64+off:][:n]
				f(ptr(dst), ptr(src), n)
				if !bytes.Equal(dst, src) || bytes.Count(frame[:64+off], []byte{0xa5}) != 64+off ||
					bytes.Count(frame[64+off+n:], []byte{0xa5}) != 136-off {
					t.Fatalf("%s of %d bytes at offset %d", name, n, off)
				}
			}
		}
	}
}

func TestErrors(t *testing.T) {
	buf := make([]byte, 64)
	for _, c := range []struct {
		err  error
		want string
	}{
		{Reduce(Sum, Float32, buf[:8]), "no sources"},
		{Reduce(Sum, Float32, buf[:7], buf[16:23]), "multiple of 4"},
		{Reduce(Sum, Float32, buf[:8], buf[:8], buf[16:20]), "source 1 has 4 bytes, the destination 8"},
		{Reduce(Sum, Float32, buf[:8], buf[:8], buf[4:12]), "source 1 overlaps the destination, 4 bytes apart"},
		{Reduce(Sum, Float32, buf[8:16], buf[4:12]), "source 0 overlaps"},
		{Reduce(Sum, Float32, buf[:8], buf[:8], buf[8:16]), ""},
		{Reduce(Sum, Float32, nil, nil), ""},
		{Reduce(BitAnd, Float32, buf, buf), "bitand is not defined on float32; supported on float32: sum, " +
			"product, min, max, avg"},
		{Reduce(Max, Float8E4M3, buf, buf), "supported on float8_e4m3: sum"},
		{Reduce(Avg, Bool, buf, buf), "supported on bool: sum, product, min, max, bitand, bitor, bitxor"},
		{Reduce(0, Int8, buf, buf), "op(0) is not defined on int8"},
		{Reduce(255, Int8, buf, buf), "op(255)"},
		{Reduce(Sum, 0, buf, buf), "dtype(0): no such data type; use one of int8, "},
		{Reduce(Sum, 255, buf, buf), "dtype(255)"},
	} {
		if got := fmt.Sprint(c.err); c.want == "" && c.err != nil || c.want != "" && !strings.Contains(got, c.want) {
			t.Errorf("got %q, want %q", got, c.want)
		}
	}
	for op := range 256 {
		for dt := range 256 {
			for name, f := range map[string]func(Op, DType) (Reducer, error){"Lookup": Lookup,
				"Reference": Reference} {
				if r, err := f(Op(op), DType(dt)); (r == nil) == (err == nil) ||
					(err == nil) != Supported(Op(op), DType(dt)) {
					t.Fatalf("%s(%d, %d) = %t, %v", name, op, dt, r != nil, err)
				}
			}
		}
	}
	for name, f := range map[string]func(){
		"Scale of bool": func() { Scale(Bool, ptr(buf), 1, 2) },
		"by 0":          func() { Scale(Int8, ptr(buf), 1, 0) },
		"Widen of int8": func() { Widen(Int8, ptr(buf), ptr(buf[32:]), 1) },
		"Narrow of dty": func() { Narrow(99, ptr(buf), ptr(buf[32:]), 1) },
	} {
		func() {
			defer func() {
				if r := recover(); r == nil || !strings.Contains(fmt.Sprint(r), name) {
					t.Errorf("%s: %v", name, r)
				}
			}()
			f()
		}()
	}
}

// A Reducer of no elements, or of fewer, writes nothing.
func TestNoElements(t *testing.T) {
	for _, im := range implementations {
		supported(func(op Op, dt DType) {
			for n := -40; n <= 0; n++ {
				for _, sources := range []int{1, 2, 3} {
					frame := bytes.Repeat([]byte{0xa5}, 1024)
					var src []unsafe.Pointer
					for range sources {
						src = append(src, ptr(make([]byte, 1024)[512:]))
					}
					im.t.reduce[op][dt](ptr(frame[512:]), src, n)
					if bytes.Count(frame, []byte{0xa5}) != len(frame) {
						t.Fatalf("%s: %v of %v: %d elements, %d sources: wrote", im.name, op, dt, n, sources)
					}
				}
			}
		})
	}
}

func TestNoAllocation(t *testing.T) {
	const n = 5000
	src := ptrs(make([]byte, 8*n), make([]byte, 8*n), make([]byte, 8*n))
	supported(func(op Op, dt DType) {
		for _, n := range []int{3, n} {
			if a := testing.AllocsPerRun(10, func() {
				for _, l := range []func(Op, DType) (Reducer, error){Lookup, Reference} {
					r, err := l(op, dt)
					if err != nil {
						t.Fatal(err)
					}
					r(src[0], src, n)
					r(src[2], src, n)
				}
				if op == Avg {
					Scale(dt, src[0], n, 3)
				}
				if dt.SmallFloat() {
					Widen(dt, src[0], src[1], n)
					Narrow(dt, src[0], src[1], n)
				}
			}); a != 0 {
				t.Errorf("%v of %v allocates %v times", op, dt, a)
			}
		}
	})
}
