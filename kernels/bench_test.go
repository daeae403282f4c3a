package kernels

import (
	"fmt"
	"slices"
	"testing"
	"time"
	"unsafe"
)

// aligned returns n bytes at a page boundary.
func aligned(n int) []byte {
	b := make([]byte, n+4096)
	b = b[-uintptr(ptr(b))&4095:][:n]
	for i := range b {
		b[i] = byte(i) & 0x3f // so that the pages exist; else all are the page of zeros
	}
	return b
}

func sources(k, bytes int, dt DType) (dst unsafe.Pointer, src []unsafe.Pointer) {
	for range k {
		src = append(src, ptr(aligned(bytes)))
	}
	return ptr(aligned(bytes)), src
}

// BenchmarkSumVersusCopy alternates a sum with a plain copy and reports the medians: GB/s counts
// every byte read and written, ratio is the sum's GB/s over the copy's. The copy moves as many
// bytes: (k+1)/2 buffers of the same size.
func BenchmarkSumVersusCopy(b *testing.B) {
	for _, size := range []int{16 << 10, 256 << 10, 64 << 20} {
		for _, dt := range []DType{Float32, BFloat16, Float16, Int8} {
			for _, k := range []int{2, 3, 4, 8} {
				for _, mode := range []string{"plain", "inplace"} {
					b.Run(fmt.Sprintf("%v/%d/%dKiB/%s", dt, k, size>>10, mode), func(b *testing.B) {
						dst, src := sources(k, size, dt)
						n := size / dt.Size()
						r, err := Lookup(Sum, dt)
						if err != nil {
							b.Fatal(err)
						}
						if mode == "inplace" {
							dst = src[0]
						}
						half := (k + 1) * size / 2 // the copy reads and writes as much together
						from, to := ptr(aligned(half)), ptr(aligned(half))
						Copy(to, from, half)
						// A sample is long enough for the clock and short enough to avoid most
						// disturbances: small buffers are processed several times, large ones in
						// pieces.
						batch, piece := max(1, (1<<20)/size), min(size, 1<<20)
						pieces := size / piece
						shifted := make([]unsafe.Pointer, k)
						var reduce, plain []float64
						for i := 0; b.Loop(); i++ {
							at := i % pieces * piece
							for j := range shifted {
								shifted[j] = unsafe.Add(src[j], at)
							}
							d, c := unsafe.Add(dst, at), i%pieces*(half/pieces)
							t0 := time.Now()
							for range batch {
								r(d, shifted, n/pieces)
							}
							t1 := time.Now()
							for range batch {
								Copy(unsafe.Add(to, c), unsafe.Add(from, c), half/pieces)
							}
							t2 := time.Now()
							reduce = append(reduce, float64(t1.Sub(t0))/float64(batch)*float64(pieces))
							plain = append(plain, float64(t2.Sub(t1))/float64(batch)*float64(pieces))
						}
						median := func(x []float64) float64 { slices.Sort(x); return x[len(x)/2] }
						bytes := float64((k + 1) * size)
						b.ReportMetric(0, "ns/op")
						b.ReportMetric(bytes/median(reduce), "GB/s")
						b.ReportMetric(bytes/median(plain), "copyGB/s")
						b.ReportMetric(median(plain)/median(reduce), "ratio")
					})
				}
			}
		}
	}
}

// BenchmarkTiny measures the cost of a call.
func BenchmarkTiny(b *testing.B) {
	for _, im := range implementations {
		for _, dt := range []DType{Float32, BFloat16, Int8} {
			for _, n := range []int{1, 16, 128} {
				b.Run(fmt.Sprintf("%s/%v/%d", im.name, dt, n), func(b *testing.B) {
					dst, src := sources(2, 4096, dt)
					r := im.t.reduce[Sum][dt]
					for b.Loop() {
						r(dst, src, n)
					}
				})
			}
		}
	}
}

// BenchmarkLevels measures every level in the nearest cache.
func BenchmarkLevels(b *testing.B) {
	for _, im := range implementations {
		supported(func(op Op, dt DType) {
			b.Run(fmt.Sprintf("%s/%v/%v", im.name, op, dt), func(b *testing.B) {
				dst, src := sources(2, 8<<10, dt)
				b.SetBytes(3 * 8 << 10)
				r := im.t.reduce[op][dt]
				for b.Loop() {
					r(dst, src, (8<<10)/dt.Size())
				}
			})
		})
		for _, f := range smallFloats() {
			b.Run(fmt.Sprintf("%s/widen/%v", im.name, f.dt), func(b *testing.B) {
				dst, src := sources(1, 16<<10, Float32)
				for b.Loop() {
					im.t.widen[f.dt](dst, src[0], 4<<10)
				}
			})
			b.Run(fmt.Sprintf("%s/narrow/%v", im.name, f.dt), func(b *testing.B) {
				dst, src := sources(1, 16<<10, Float32)
				for b.Loop() {
					im.t.narrow[f.dt](dst, src[0], 4<<10)
				}
			})
		}
	}
}
