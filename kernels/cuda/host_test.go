//go:build cgo && linux

package cuda_test

import (
	"bytes"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"testing"
	"unsafe"

	"pgregory.net/rapid"

	"tutti/kernels"
	"tutti/kernels/cuda"
	"tutti/kernels/cuda/cudatest"
)

// The host plays a device with this many multiprocessors.
const sms = 2

func address(b []byte) uint64 { return uint64(uintptr(unsafe.Pointer(unsafe.SliceData(b)))) }

// margin is the poisoned bytes on either side of a buffer.
const margin = 32

const poison = 0xa5

// A buffer is n bytes whose address is off modulo 16, with poison around them.
type buffer struct{ all, b []byte }

func newBuffer(n, off int) buffer {
	all := bytes.Repeat([]byte{poison}, n+2*margin+16)
	at := margin + int((uint64(off)-address(all))%16)
	return buffer{all, all[at : at+n : at+n]}
}

// intact reports whether what is around the buffer is poison still.
func (b buffer) intact() bool {
	at := int(address(b.b) - address(b.all))
	isPoison := func(x byte) bool { return x == poison }
	outside := slices.Concat(b.all[:at], b.all[at+len(b.b):])
	return !slices.ContainsFunc(outside, func(x byte) bool { return !isPoison(x) })
}

// specials returns the bits of elements at which something changes.
func specials(dt kernels.DType) (s []uint64) {
	w := uint(8 * dt.Size())
	top := uint64(1) << (w - 1)
	if f := dt.Format(); dt.Class() == kernels.Float {
		inf := uint64(1)<<f.Exponent - 1
		for _, e := range []uint64{0, 1, inf >> 1, inf>>1 + 1, inf - 1, inf} {
			for _, m := range []uint64{0, 1, 1<<f.Fraction - 1, 1 << (f.Fraction - 1)} {
				s = append(s, e<<f.Fraction|m, top|e<<f.Fraction|m)
			}
		}
		return s
	}
	return []uint64{0, 1, 2, 3, top - 1, top, top + 1, 2*top - 1, 2*top - 2, 0x55, 0xaa}
}

// element returns the bits of element i.
func element(b []byte, size, i int) (v uint64) {
	for k := range size {
		v |= uint64(b[i*size+k]) << (8 * k)
	}
	return v
}

// fill writes random elements: one of rare is special, the other floats are near in magnitude, so
// that sums round.
func fill(r *rand.Rand, dt kernels.DType, b []byte, rare int) {
	s, size, f := specials(dt), dt.Size(), dt.Format()
	for i := range len(b) / size {
		v := r.Uint64()
		switch {
		case r.IntN(rare) == 0:
			v = s[r.IntN(len(s))]
		case dt.Class() == kernels.Float:
			e := uint64(1)<<(f.Exponent-1) - 3 + v>>8&3
			v = v&(1<<f.Fraction-1) | e<<f.Fraction | v>>63<<(f.Exponent+f.Fraction)
		}
		for k := range size {
			b[i*size+k] = byte(v >> (8 * k))
		}
	}
}

// A reduction is the arguments of one, but for the addresses.
type reduction struct {
	op      kernels.Op
	dt      kernels.DType
	n       int // elements
	sources int
	place   int   // the source that is dst, or -1
	offs    []int // of dst and the sources, modulo 16
	divisor int
	rare    int
	seed    uint64
}

// run runs the kernels and compares all bits with package kernels.
func (x reduction) run(t cudatest.TB, h *cudatest.Host) {
	r := rand.New(rand.NewPCG(x.seed, 1))
	size := x.n * x.dt.Size()
	dst := newBuffer(size, x.offs[0])
	srcs, addresses := make([]buffer, x.sources), make([]uint64, x.sources)
	before := make([][]byte, x.sources)
	pointers := make([]unsafe.Pointer, x.sources)
	for i := range srcs {
		srcs[i] = newBuffer(size, x.offs[i+1])
		if i == x.place {
			srcs[i] = dst
		}
		fill(r, x.dt, srcs[i].b, x.rare)
		before[i] = slices.Clone(srcs[i].b)
		addresses[i], pointers[i] = address(srcs[i].b), unsafe.Pointer(unsafe.SliceData(before[i]))
	}
	reference, err := kernels.Reference(x.op, x.dt)
	if err != nil {
		t.Fatal(err)
	}
	want := make([]byte, size)
	reference(unsafe.Pointer(unsafe.SliceData(want)), pointers, x.n)
	if x.divisor != 0 {
		kernels.Scale(x.dt, unsafe.Pointer(unsafe.SliceData(want)), x.n, x.divisor)
	}
	launches, err := cuda.Reduce(x.op, x.dt, address(dst.b), addresses, uint64(size), x.divisor, sms)
	if err != nil {
		t.Fatal(err)
	}
	h.Run(t, launches...)
	result := slices.Clone(dst.b)
	if x.place >= 0 {
		copy(dst.b, before[x.place])
	}
	switch err := placedReduction(t, h, x, address(dst.b), addresses, uint64(size)); {
	case errors.Is(err, cuda.ErrPlace) && (len(launches) > 1 || x.sources > cuda.MaxPlaceSources || x.sources == 1):
		copy(dst.b, result)
	case err != nil:
		t.Fatalf("%+v: %v", x, err)
	case !bytes.Equal(dst.b, result):
		t.Fatalf("%+v: work in a place has another result", x)
	}
	if !dst.intact() {
		t.Fatalf("%+v: written around the destination", x)
	}
	for i, s := range srcs {
		if i != x.place && (!s.intact() || !bytes.Equal(s.b, before[i])) {
			t.Fatalf("%+v: source %d was written to", x, i)
		}
	}
	for i := range x.n {
		got, want := element(dst.b, x.dt.Size(), i), element(want, x.dt.Size(), i)
		if got == want {
			continue
		}
		in := ""
		for _, b := range before {
			in += fmt.Sprintf(" %#x", element(b, x.dt.Size(), i))
		}
		t.Fatalf("%+v: element %d of%s is %#x, want %#x", x, i, in, got, want)
	}
	runtime.KeepAlive(dst)
	runtime.KeepAlive(srcs)
}

// placedReduction does the reduction by a place, after which it stores two words.
func placedReduction(t cudatest.TB, h *cudatest.Host, x reduction, dst uint64, srcs []uint64, bytes uint64) error {
	memory := newBuffer(int(cuda.PlaceSize)+16, 0)
	clear(memory.b)
	at := address(memory.b)
	word := at + uint64(cuda.PlaceSize)
	p := cuda.PlaceAt(memory.b)
	if err := p.Reduce(x.op, x.dt, dst, srcs, bytes, x.divisor); err != nil {
		return err
	}
	p.Write(word, 5)
	launches := cuda.Placed(x.op, x.dt, at, bytes/2, sms, word+8, 7)
	h.Run(t, launches[:]...)
	told := memory.b[cuda.PlaceSize:]
	if element(told, 8, 0) != 5 || element(told, 8, 1) != 7 || !memory.intact() {
		t.Fatalf("%+v: the words after the place are %v", x, told)
	}
	runtime.KeepAlive(memory)
	return nil
}

func (x reduction) String() string { return fmt.Sprintf("%v of %v", x.op, x.dt) }

// pairs calls f for every operation that is defined on a type.
func pairs(t *testing.T, f func(t *testing.T, op kernels.Op, dt kernels.DType)) {
	for _, dt := range kernels.DTypes() {
		for _, op := range kernels.Ops() {
			if kernels.Supported(op, dt) {
				t.Run(fmt.Sprintf("%v/%v", dt, op), func(t *testing.T) { f(t, op, dt) })
			}
		}
	}
}

// TestReduceGrid reduces with every number of sources, short and long tails, in place and not,
// divided and not.
func TestReduceGrid(t *testing.T) {
	h := cudatest.Load(t, 1)
	pairs(t, func(t *testing.T, op kernels.Op, dt kernels.DType) {
		per := 16 / dt.Size()
		divisors := []int{0}
		if kernels.Supported(kernels.Avg, dt) {
			divisors = []int{0, 1, 3, 1 << 40}
		}
		seed := uint64(0)
		for sources := 1; sources <= 9; sources++ {
			for _, n := range []int{0, 1, per - 1, per, 3*per + 1, 40*per + per/2} {
				for place := -1; place < sources; place++ {
					for _, divisor := range divisors {
						seed++
						off := int(seed) % 2 * 8
						offs := slices.Repeat([]int{off}, sources+1)
						reduction{op, dt, n, sources, place, offs, divisor, 2 + int(seed%3)*20, seed}.run(t, h)
					}
				}
			}
		}
	})
}

// TestReduceAlignment reduces at all addresses modulo 16, alike and not.
func TestReduceAlignment(t *testing.T) {
	h := cudatest.Load(t, 1)
	pairs(t, func(t *testing.T, op kernels.Op, dt kernels.DType) {
		for to := range 16 {
			for from := range 16 {
				for _, sources := range []int{2, 3, 10} {
					offs := append([]int{to}, slices.Repeat([]int{from}, sources)...)
					offs[2] = []int{from, to}[to%2]
					n := 64/dt.Size() + from%3
					reduction{op, dt, n, sources, -1, offs, 0, 8, uint64(16*to + from)}.run(t, h)
				}
			}
		}
	})
}

// TestReduceLong reduces so many elements that threads do several vectors each.
func TestReduceLong(t *testing.T) {
	h := cudatest.Load(t, 2)
	pairs(t, func(t *testing.T, op kernels.Op, dt kernels.DType) {
		for _, sources := range []int{2, 3, 9} {
			n := 170_001 / dt.Size()
			reduction{op, dt, n, sources, 0, slices.Repeat([]int{8}, sources+1), 0, 100, 1}.run(t, h)
		}
	})
}

// TestReduceRandomly reduces as rapid likes.
func TestReduceRandomly(t *testing.T) {
	h := cudatest.Load(t, 2)
	rapid.Check(t, func(t *rapid.T) {
		x := reduction{
			op:      rapid.SampledFrom(kernels.Ops()).Draw(t, "op"),
			dt:      rapid.SampledFrom(kernels.DTypes()).Draw(t, "type"),
			n:       rapid.IntRange(0, 20_000).Draw(t, "elements"),
			sources: rapid.OneOf(rapid.IntRange(1, 20), rapid.IntRange(1, cuda.MaxSources)).Draw(t, "sources"),
			rare:    rapid.SampledFrom([]int{1, 10, 10_000, math.MaxInt}).Draw(t, "rare"),
			seed:    rapid.Uint64().Draw(t, "seed"),
		}
		if !kernels.Supported(x.op, x.dt) {
			t.Skip("not defined")
		}
		x.n = min(x.n, 200_000/x.sources)
		x.place = rapid.IntRange(-1, x.sources-1).Draw(t, "in place")
		if kernels.Supported(kernels.Avg, x.dt) {
			x.divisor = rapid.OneOf(rapid.Just(0), rapid.IntRange(1, math.MaxInt)).Draw(t, "divisor")
		}
		x.offs = slices.Repeat([]int{rapid.IntRange(0, 15).Draw(t, "alignment")}, x.sources+1)
		if rapid.Bool().Draw(t, "unlike") {
			x.offs[rapid.IntRange(0, x.sources).Draw(t, "which")] = rapid.IntRange(0, 15).Draw(t, "another")
		}
		x.run(t, h)
	})
}

// TestReduceIsNearFloat64 compares with arithmetic in float64, for lengths around those of vectors
// and alignments that are alike and not. What is around the result stays.
func TestReduceIsNearFloat64(t *testing.T) {
	h := cudatest.Load(t, 1)
	pairs(t, func(t *testing.T, op kernels.Op, dt kernels.DType) {
		r, size := rand.New(rand.NewPCG(5, 6)), dt.Size()
		for sources := 1; sources <= 4; sources++ {
			for _, n := range []int{1, 2, 3, 5, 7, 8, 9, 15, 16, 17, 31, 33, 63, 65, 1000, 1003} {
				for _, offs := range [][]int{{0, 0}, {size, size}, {16 - size, 16 - size}, {0, size}, {1, 1}, {3, 0}} {
					dst := newBuffer(n*size, offs[0])
					srcs, addresses, from := make([]buffer, sources), make([]uint64, sources), make([][]byte, sources)
					for i := range srcs {
						srcs[i] = newBuffer(n*size, offs[1])
						cudatest.FillNear(r, dt, srcs[i].b)
						addresses[i], from[i] = address(srcs[i].b), srcs[i].b
					}
					launches, err := cuda.Reduce(op, dt, address(dst.b), addresses, uint64(n*size), 0, sms)
					if err != nil {
						t.Fatal(err)
					}
					h.Run(t, launches...)
					if err := cudatest.Near(op, dt, dst.b, from); err != nil || !dst.intact() {
						t.Fatalf("%d elements at %v modulo 16: %v; intact around it: %v", n, offs, err, dst.intact())
					}
					runtime.KeepAlive(srcs)
				}
			}
		}
	})
}

// TestReduceRefuses checks the errors.
func TestReduceRefuses(t *testing.T) {
	for name, c := range map[string]struct {
		op      kernels.Op
		dt      kernels.DType
		sources int
		bytes   uint64
		divisor int
		want    string
	}{
		"an operation that is not defined":    {kernels.Product, kernels.Float8E4M3, 2, 8, 0, "not defined"},
		"a divisor where Avg is not defined":  {kernels.Sum, kernels.Bool, 2, 8, 2, "not defined"},
		"no sources":                          {kernels.Sum, kernels.Int8, 0, 8, 0, "0 sources"},
		"too many sources":                    {kernels.Sum, kernels.Int8, cuda.MaxSources + 1, 8, 0, "505 sources"},
		"part of an element":                  {kernels.Sum, kernels.Int64, 2, 12, 0, "12 bytes"},
		"a negative divisor":                  {kernels.Sum, kernels.Int64, 2, 8, -1, "-1"},
		"a data type that does not exist yet": {kernels.Sum, 200, 2, 8, 0, "not defined"},
	} {
		_, err := cuda.Reduce(c.op, c.dt, 0, make([]uint64, c.sources), c.bytes, c.divisor, sms)
		if err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v, want %q", name, err, c.want)
		}
	}
}

// TestCopyAtAnyAddress copies between all addresses modulo 16.
func TestCopyAtAnyAddress(t *testing.T) {
	h := cudatest.Load(t, 2)
	r := rand.New(rand.NewPCG(3, 4))
	place := newBuffer(int(cuda.PlaceSize)+8, 0)
	for to := range 16 {
		for from := range 16 {
			for _, n := range []int{0, 1, 7, 15, 16, 17, 100, 70_001} {
				dst, src := newBuffer(n, to), newBuffer(n, from)
				fill(r, kernels.Uint8, src.b, 2)
				for _, launches := range [][]cuda.Launch{
					{cuda.Copy(address(dst.b), address(src.b), uint64(n), sms)},
					placedCopy(place, address(dst.b), address(src.b), uint64(n)),
				} {
					clear(dst.b)
					h.Run(t, launches...)
					if !bytes.Equal(dst.b, src.b) || !dst.intact() {
						t.Fatalf("%d bytes from an address of %d modulo 16 to one of %d are not a copy", n, from, to)
					}
				}
				h.Run(t, placedNothing(place)...)
				if !bytes.Equal(dst.b, src.b) || !place.intact() {
					t.Fatalf("the kernels of an empty place have copied")
				}
			}
		}
	}
}

// placedCopy returns the launches that copy by a place, in parts.
func placedCopy(place buffer, dst, src, n uint64) []cuda.Launch {
	clear(place.b)
	p := cuda.PlaceAt(place.b)
	for at := uint64(0); at < n; {
		part := min(n-at, n/cuda.MaxPlaceCopies+1)
		if !p.Copy(dst+at, src+at, part) || part > 1 && p.Copy(dst+at+part-1, src+at, 1) ||
			part > 1 && p.Copy(src+at, dst+at, 1) || part > 1 && p.Copy(dst+n+100, dst+at, 1) {
			panic("copies that depend on each other are together, or others are not")
		}
		at += part
	}
	at := address(place.b)
	l := cuda.Placed(0, 0, at, n, sms, at+uint64(cuda.PlaceSize), 1)
	return l[:]
}

// placedNothing returns the launches for a place that stays empty.
func placedNothing(place buffer) []cuda.Launch {
	clear(place.b)
	at := address(place.b)
	l := cuda.Placed(kernels.Sum, kernels.Float32, at, 100, sms, at+uint64(cuda.PlaceSize), 1)
	return l[:]
}

// TestKernelWaitsForWord has a kernel wait for a word that another writes.
func TestKernelWaitsForWord(t *testing.T) {
	h := cudatest.Load(t, 1)
	word := newBuffer(8, 0)
	copy(word.b, make([]byte, 8))
	for _, v := range []uint64{1, 2, 1 << 40, math.MaxUint64} {
		ended := make(chan struct{})
		go func() {
			h.Run(t, cuda.Wait(address(word.b), v))
			close(ended)
		}()
		h.Run(t, cuda.Write(address(word.b), v))
		<-ended
		if got := element(word.b, 8, 0); got != v || !word.intact() {
			t.Errorf("the word is %d, want %d", got, v)
		}
		h.Run(t, cuda.Wait(address(word.b), v-1))
	}
}

// TestHostHasTheKernels compares the compilation for the host with the modules.
func TestHostHasTheKernels(t *testing.T) {
	host := cudatest.Load(t, 1).Params()
	ptx := module(t, 9, 0)
	for _, m := range entry.FindAllStringSubmatch(ptx, -1) {
		if m[2] != strconv.Itoa(host[m[1]]) {
			t.Errorf("%s takes %s bytes on a device and %d on the host", m[1], m[2], host[m[1]])
		}
		delete(host, m[1])
	}
	for name := range host {
		t.Errorf("%s is on the host only", name)
	}
}

// TestNoRaces runs the kernels under ThreadSanitizer.
func TestNoRaces(t *testing.T) {
	program := cudatest.BuildRaces(t)
	cmd := exec.CommandContext(t.Context(), program)
	cmd.Env = append(os.Environ(), "TSAN_OPTIONS=halt_on_error=1 exitcode=66")
	text, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("%v\n%s", err, text)
	}
	if want := strconv.Itoa(len(cuda.Functions())) + " kernels\n"; string(text) != want {
		t.Errorf("%q, want %q", text, want)
	}
}
