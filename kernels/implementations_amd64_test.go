//go:build !purego

package kernels

import (
	"bytes"
	"math/rand/v2"
	"os"
	"regexp"
	"strings"
	"testing"
	"unsafe"
)

func init() {
	for _, l := range levels() {
		implementations = append(implementations, implementation{l.name, l.reducers()})
	}
}

// TestKernelsAlone runs the kernels without the reducers around them, which use them for a part of
// a buffer each.
func TestKernelsAlone(t *testing.T) {
	for _, l := range levels() {
		var kernels [numOps][numDTypes]kernel
		var widen, narrow [numDTypes]func(dst, src unsafe.Pointer, n int)
		l.fill(&kernels, &widen, &narrow)
		supported(func(op Op, dt DType) {
			k := kernels[op][dt]
			if k == nil {
				return
			}
			r := rand.New(rand.NewPCG(uint64(op), uint64(dt)))
			size := dt.Size()
			for range 60 {
				n, sources := r.IntN(1200), 2+r.IntN(18)
				if !l.masked {
					n &^= 31
				}
				var src []unsafe.Pointer
				for range sources {
					b := make([]byte, n*size+40)[r.IntN(40):][:n*size]
					draw(r, dt, b)
					src = append(src, ptr(b))
				}
				want := make([]byte, n*size)
				portable.reduce[op][dt](ptr(want), src, n)
				b := bytes.Repeat([]byte{0xa5}, n*size+256)
				at := 64 + int(-uintptr(ptr(b))&63)
				k(ptr(b[at:]), &src[0], sources, 0, n, sources, variant(op, dt))
				if !bytes.Equal(b[at:at+n*size], want) {
					t.Fatalf("%s: %v of %v: %d elements, %d sources: wrong", l.name, op, dt, n, sources)
				}
				if bytes.Count(b, []byte{0xa5})-bytes.Count(want, []byte{0xa5}) != 256 {
					t.Fatalf("%s: %v of %v: %d elements: wrote outside of the destination", l.name, op, dt, n)
				}
			}
		})
	}
}

// A type that a processor has no kernels for is reduced by the portable ones.
func TestTypesWithoutVectorKernelsStayPortable(t *testing.T) {
	for _, l := range levels() {
		fill := l.fill
		l.fill = func(t *[numOps][numDTypes]kernel, widen, narrow *[numDTypes]func(dst, src unsafe.Pointer, n int)) {
			fill(t, widen, narrow)
			for op := range t {
				t[op][Float8E5M2], t[op][BFloat16] = nil, nil
			}
			widen[Float8E5M2], narrow[Float8E5M2] = nil, nil
		}
		im := implementation{l.name + " with less", l.reducers()}
		r := rand.New(rand.NewPCG(21, 22))
		supported(func(op Op, dt DType) {
			if dt != Float8E5M2 && dt != BFloat16 {
				return
			}
			if err := compare(im, op, dt, 1000, -1, make([]int, 3),
				func(b []byte) { draw(r, dt, b) }); err != nil {
				t.Error(err)
			}
		})
	}
}

// TestAVX2UsesNoAVX512 reads the assembly: a register above 15 would silently select an encoding
// that an AVX2 machine lacks.
func TestAVX2UsesNoAVX512(t *testing.T) {
	src, err := os.ReadFile("kernels_amd64.s")
	if err != nil {
		t.Skip("the assembly is not beside the test: ", err)
	}
	beyond := regexp.MustCompile(`\b(Z\d+|[XY](1[6-9]|2\d|3[01])|K[0-7])\b`)
	functions := 0
	for _, f := range strings.Split(string(src), "\nTEXT ")[1:] {
		name, _, _ := strings.Cut(f, "(")
		if !strings.HasSuffix(name, "AVX2") {
			continue
		}
		functions++
		if m := beyond.FindString(f); m != "" {
			t.Errorf("%s uses %s", name, m)
		}
	}
	if functions < 40 {
		t.Fatalf("found only %d functions", functions)
	}
}
