//go:build cgo && linux

package gpu

import (
	"bytes"
	"context"
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"testing"
	"time"

	"tutti/device"
	"tutti/device/cuda"
	"tutti/device/cuda/fake"
	"tutti/device/devicetest"
	"tutti/kernels"
	"tutti/kernels/cuda/cudatest"
	"tutti/mem"
	"tutti/pg"
)

var (
	ordinal  = flag.Int("gpu.device", 0, "the GPU to test")
	required = flag.Bool("gpu.required", false, "fail without a GPU, instead of skipping the tests")
	table    = flag.String("gpu.table", "", "a file that gets the rows of the table, too")
	sanitize = flag.Bool("gpu.sanitizer", false, "run the kernels under compute-sanitizer, for minutes")
)

// row prints a row of the table at once: the process may not come to its end.
func row(t *testing.T, format string, args ...any) {
	t.Helper()
	text := fmt.Sprintf(format+"\n", args...)
	fmt.Print(text)
	if *table == "" {
		return
	}
	f, err := os.OpenFile(*table, os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o666)
	if err == nil {
		_, err = f.WriteString(text)
		err = errors.Join(err, f.Close())
	}
	if err != nil {
		t.Error(err)
	}
}

// patience bounds waits that end soon unless the test fails.
const patience = time.Minute

// library is the path of the driver of the test that runs.
var library string

// everywhere runs a test on the fake driver and on the machine's GPU. The fake has as many queues
// as run.sh gives a GPU: ranks of one process need as many as they have streams.
func everywhere(t *testing.T, f func(t *testing.T, v *cuda.Device)) {
	on := func(t *testing.T, d *cuda.Driver, path string, n int) {
		library = path
		v, err := d.Open(n)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			if err := v.Close(); err != nil {
				t.Error(err)
			}
		})
		f(t, v)
	}
	t.Run("fake", func(t *testing.T) {
		path := fake.New(t, fake.Config{Queues: 32}).Path
		d, err := cuda.LoadLibrary(path)
		if err != nil {
			t.Fatal(err)
		}
		on(t, d, path, 0)
	})
	t.Run("GPU", func(t *testing.T) {
		d, err := cuda.Load()
		var all []cuda.Info
		if err == nil {
			all, err = d.Devices()
		}
		switch {
		case err == nil && len(all) > 0:
			on(t, d, "libcuda.so.1", *ordinal)
		case *required || err != nil && !errors.Is(err, cuda.ErrUnavailable):
			t.Fatalf("no GPU can be used: %v", err)
		default:
			t.Skipf("no GPU (tests/gpu/run.sh): %v", err)
		}
	})
}

// A bench is a device with a stream and pinned memory, to look at the device's memory.
type bench struct {
	t *testing.T
	v *cuda.Device
	s device.Stream
}

func newBench(t *testing.T, v *cuda.Device) *bench {
	s, err := v.Stream()
	b := &bench{t, v, s}
	b.must(err)
	t.Cleanup(func() { b.must(s.Close()) })
	return b
}

func (b *bench) must(errs ...error) {
	b.t.Helper()
	if err := errors.Join(errs...); err != nil {
		b.t.Fatal(err)
	}
}

func (b *bench) alloc(n int) mem.Memory {
	m, err := b.v.Alloc(n)
	b.must(err)
	return m
}

func (b *bench) finish() {
	b.t.Helper()
	e, err := b.s.Record()
	b.must(err)
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	b.must(e.Wait(ctx))
}

// through copies between the device and the host by pinned memory.
func (b *bench) through(n int, f func(pinned mem.Memory)) {
	if n == 0 {
		return
	}
	pinned, err := b.v.AllocHost(n)
	b.must(err)
	f(pinned)
	b.must(b.v.FreeHost(pinned))
}

func (b *bench) bytes(m mem.Memory) (all []byte) {
	b.through(m.Len(), func(pinned mem.Memory) {
		b.must(b.s.Copy(pinned, m))
		b.finish()
		all = bytes.Clone(pinned.Bytes())
	})
	return all
}

func (b *bench) fill(m mem.Memory, with []byte) {
	b.through(m.Len(), func(pinned mem.Memory) {
		copy(pinned.Bytes(), with)
		b.must(b.s.Copy(m, pinned))
		b.finish()
	})
}

func TestSuite(t *testing.T) {
	everywhere(t, func(t *testing.T, v *cuda.Device) {
		devicetest.Suite(t, func(t *testing.T) devicetest.Harness {
			b := newBench(t, v)
			return devicetest.Harness{Device: v, Bytes: b.bytes, Fill: b.fill}
		})
	})
}

// Every operation on every type has the bits of package kernels, for several numbers of sources,
// lengths and alignments, divided and not, in place and elsewhere; nothing around it is written.
func TestReductions(t *testing.T) {
	most, margin := 9, 64
	if testing.Short() { // under a sanitizer
		most = 3
	}
	everywhere(t, func(t *testing.T, v *cuda.Device) {
		b, r := newBench(t, v), rand.New(rand.NewPCG(5, 6))
		lengths := []int{1, 3, 16, 100, 5000}
		room := 2*margin + 5000*8
		all := b.alloc((most + 1) * room)
		host := make([]byte, all.Len())
		for _, dt := range kernels.DTypes() {
			for _, op := range kernels.Ops() {
				if !kernels.Supported(op, dt) {
					continue
				}
				for n := 1; n <= most; n++ {
					count := lengths[r.IntN(len(lengths))]
					size := count * dt.Size()
					divisor := 0
					if kernels.Supported(kernels.Avg, dt) && r.IntN(2) == 0 {
						divisor = 1 + r.IntN(5)
					}
					for i := range host {
						host[i] = byte(r.Uint32())
					}
					at := func(i int) int { return i*room + margin + dt.Size()*[]int{0, 1, 3}[r.IntN(3)] }
					dst := at(most)
					srcs, from, in := make([]mem.Memory, n), make([][]byte, n), -1
					if r.IntN(2) == 0 {
						in = r.IntN(n)
					}
					for i := range srcs {
						off := at(i)
						if i == in {
							off = dst
						}
						srcs[i], from[i] = all.Slice(off, size), host[off:off+size]
					}
					b.fill(all, host)
					b.must(b.s.Reduce(op, dt, all.Slice(dst, size), srcs, divisor))
					want := bytes.Clone(host)
					b.must(devicetest.Fold(op, dt, want[dst:dst+size], from, divisor))
					got := b.bytes(all)
					if k := differ(got, want); k >= 0 {
						where := "the result"
						if k < dst || k >= dst+size {
							where = "memory that does not belong to it"
						}
						t.Errorf("%v of %d elements of %v from %d sources, divided by %d, in place of %d: byte %d of "+
							"%s is %#x, want %#x", op, count, dt, n, divisor, in, k-dst, where, got[k], want[k])
					}
				}
			}
		}
	})
}

// differ returns where two slices differ first, -1 if they do not.
func differ(a, b []byte) int {
	if bytes.Equal(a, b) {
		return -1
	}
	for i := range a {
		if a[i] != b[i] {
			return i
		}
	}
	return -1
}

// Every operation on every type is near what float64 arithmetic makes, for lengths around those of
// vectors and several alignments. The result was poison before, and what is around it stays so.
func TestNearFloat64(t *testing.T) {
	everywhere(t, func(t *testing.T, v *cuda.Device) {
		const most, margin, room, poison = 4, 64, 2*64 + 1003*8, 0xFB
		counts := []int{1, 7, 16, 33, 1003}
		if testing.Short() { // under a sanitizer
			counts = counts[3:]
		}
		b, r := newBench(t, v), rand.New(rand.NewPCG(7, 8))
		all := b.alloc((most + 1) * room)
		host := make([]byte, all.Len())
		for _, dt := range kernels.DTypes() {
			for _, op := range kernels.Ops() {
				if !kernels.Supported(op, dt) {
					continue
				}
				for _, count := range counts {
					size, n := count*dt.Size(), 1+r.IntN(most)
					for i := range host {
						host[i] = poison
					}
					at := func(i int) int { return i*room + margin + dt.Size()*[]int{0, 1, 3}[r.IntN(3)] }
					dst := at(most)
					srcs, from := make([]mem.Memory, n), make([][]byte, n)
					for i := range srcs {
						off := at(i)
						srcs[i], from[i] = all.Slice(off, size), host[off:off+size]
						cudatest.FillNear(r, dt, from[i])
					}
					b.fill(all, host)
					b.must(b.s.Reduce(op, dt, all.Slice(dst, size), srcs, 0))
					got := b.bytes(all)
					if err := cudatest.Near(op, dt, got[dst:dst+size], from); err != nil {
						t.Error(err)
					}
					copy(host[dst:dst+size], got[dst:])
					if k := differ(got, host); k >= 0 {
						t.Errorf("%v of %d elements of %v: byte %d was written, which does not belong to it", op, count,
							dt, k-dst)
					}
				}
			}
		}
	})
}

// Short allreduces of ranks of this process on the GPU are near what float64 arithmetic makes, for
// every operation and type. The result was poison before.
func TestShort(t *testing.T) {
	const n = 3
	everywhere(t, func(t *testing.T, v *cuda.Device) {
		local(t, v, n, func(ctx context.Context, g *pg.Group) error {
			b := newBench(t, v)
			const most = 16 << 10
			dst, src := b.alloc(most), b.alloc(most)
			for _, dt := range kernels.DTypes() {
				for _, op := range kernels.Ops() {
					if !kernels.Supported(op, dt) {
						continue
					}
					all := rand.New(rand.NewPCG(uint64(dt), uint64(op))) // the same at all ranks
					size := []int{1, 3, 100, most / dt.Size()}[all.IntN(4)] * dt.Size()
					from := make([][]byte, n)
					for i := range from {
						from[i] = make([]byte, size)
						cudatest.FillNear(all, dt, from[i])
					}
					b.fill(src.Slice(0, size), from[g.Rank()])
					b.fill(dst, bytes.Repeat([]byte{0xFB}, most))
					if err := g.Do(ctx, pg.AllReduceOp{Dst: pg.DeviceBuffer(dst.Slice(0, size), dt, nil),
						Src: pg.DeviceBuffer(src.Slice(0, size), dt, nil), Op: op}); err != nil {
						return fmt.Errorf("%v of %v: %w", op, dt, err)
					}
					got := b.bytes(dst)
					if err := cudatest.Near(op, dt, got[:size], from); err != nil {
						return err
					}
					if bytes.Count(got[size:], []byte{0xFB}) != most-size {
						return fmt.Errorf("%v of %v: bytes after the result were written", op, dt)
					}
				}
			}
			return first(g.Barrier(ctx), v.Free(dst), v.Free(src))
		})
	})
}

// TestBandwidths fills the table.
func TestBandwidths(t *testing.T) {
	everywhere(t, func(t *testing.T, v *cuda.Device) {
		size, rounds := 256<<20, 20
		if faked(v) {
			size, rounds = 1<<20, 2
		}
		b := newBench(t, v)
		dst, srcs := b.alloc(size), make([]mem.Memory, 8)
		for i := range srcs {
			srcs[i] = b.alloc(size)
			b.must(b.s.Copy(srcs[i], dst))
		}
		pinned, err := v.AllocHost(size)
		b.must(err)
		// rate returns bytes per second for work that moves this many bytes at a time.
		rate := func(moves int, work func() error) float64 {
			b.must(work())
			b.finish()
			best := 0.0
			for range 3 {
				began := time.Now()
				for range rounds {
					b.must(work())
				}
				b.finish()
				best = max(best, float64(moves)*float64(rounds)/time.Since(began).Seconds())
			}
			return best
		}
		i := v.Info()
		row(t, "%s, %d MiB, GB/s read and written", i.Name, size>>20)
		note := func(what string, rate float64, more string) { row(t, "%-32s %8.1f%s", what, rate/1e9, more) }
		whole := rate(2*size, func() error { return b.s.Copy(dst, srcs[0]) })
		note("copy, device to device", whole, "")
		for _, dt := range []kernels.DType{kernels.Float32, kernels.BFloat16} {
			for n := 2; n <= 8; n++ {
				what, r := fmt.Sprintf("sum of %d, %v", n, dt), rate((n+1)*size, func() error {
					return b.s.Reduce(kernels.Sum, dt, dst, srcs[:n], 0)
				})
				note(what, r, fmt.Sprintf("  %.2f of the copy", r/whole))
				if !faked(v) && r < 0.92*whole {
					t.Errorf("%s: %.2f of the copy's bandwidth, want at least 0.92", what, r/whole)
				}
			}
		}
		note("copy, pinned host to device", rate(size, func() error { return b.s.Copy(dst, pinned) }), "")
		note("copy, device to pinned host", rate(size, func() error { return b.s.Copy(pinned, dst) }), "")
	})
}
