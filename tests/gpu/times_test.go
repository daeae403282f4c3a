//go:build cgo && linux

package gpu

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"sort"
	"strings"
	"sync"
	"testing"
	"time"
	"unsafe"

	"tutti/device"
	"tutti/device/cuda"
	"tutti/device/cuda/program"
	"tutti/mem"
	"tutti/pg"
)

// faked reports whether a device is one of the fake driver, which measures nothing.
func faked(v *cuda.Device) bool { return strings.HasPrefix(v.Info().Name, "fake") }

// note adds a row to the table. On a GPU, a value beyond the target is an error; 0: there is none.
// atLeast says on which side of the target the value should be.
func note(t *testing.T, v *cuda.Device, what string, value float64, unit string, target float64, atLeast bool) {
	t.Helper()
	measured := fmt.Sprintf("%-48s %9.2f %s", what, value, unit)
	if target == 0 {
		row(t, "%s", measured)
		return
	}
	side := "at most"
	if atLeast {
		side = "at least"
	}
	row(t, "%s, target %s %.2f", measured, side, target)
	if !faked(v) && (atLeast && value < target || !atLeast && value > target) {
		t.Errorf("%s: %.2f %s, want %s %.2f", what, value, unit, side, target)
	}
}

// local runs f on n ranks of this process that share the device. If one fails, so does the test, at
// once: what it has measured is nothing.
func local(t *testing.T, v *cuda.Device, n int, f func(ctx context.Context, g *pg.Group) error) {
	t.Helper()
	groups, err := pg.Local(n, pg.Config{Devices: device.List{v}, Timeout: patience})
	if err != nil {
		t.Fatal(err)
	}
	errs := make([]error, n)
	var ranks sync.WaitGroup
	for i, g := range groups {
		ranks.Go(func() {
			if err := f(t.Context(), g); err != nil {
				errs[i] = fmt.Errorf("rank %d: %w", g.Rank(), err)
			}
		})
	}
	ranks.Wait()
	for _, g := range groups {
		errs = append(errs, g.Close())
	}
	if err := errors.Join(errs...); err != nil {
		t.Fatal(err)
	}
}

// median returns the middle one of several durations.
func median(all []time.Duration) time.Duration {
	sort.Slice(all, func(i, k int) bool { return all[i] < all[k] })
	return all[len(all)/2]
}

// copyRate returns the bytes per second that a copy on the device reads and writes together.
func (b *bench) copyRate(size int) float64 {
	dst, src := b.alloc(size), b.alloc(size)
	best := 0.0
	for range 4 {
		began := time.Now()
		for range 10 {
			b.must(b.s.Copy(dst, src))
		}
		b.finish()
		best = max(best, 20*float64(size)/time.Since(began).Seconds())
	}
	b.must(b.v.Free(dst), b.v.Free(src))
	return best
}

// TestAllReduceOfLocalRanks compares the time of a large allreduce of 4 ranks on the GPU, blocking
// and started on a stream, with that of the bytes that it has to read and write.
func TestAllReduceOfLocalRanks(t *testing.T) {
	const n = 4
	everywhere(t, func(t *testing.T, v *cuda.Device) {
		size, rounds := 64<<20, 20
		if faked(v) {
			size, rounds = 256<<10, 2
		}
		least := 2 * n * float64(size) / newBench(t, v).copyRate(size)
		times := make([][2]time.Duration, rounds) // blocking, started
		local(t, v, n, func(ctx context.Context, g *pg.Group) error {
			m, err := v.Alloc(size)
			if err != nil {
				return err
			}
			s, err := v.Stream()
			if err != nil {
				return err
			}
			defer s.Close()
			for turn := range 2 * rounds {
				if err := g.Barrier(ctx); err != nil {
					return err
				}
				began := time.Now()
				if turn%2 == 0 {
					err = g.Do(ctx, pg.AllReduceOp{Dst: pg.DeviceBuffer(m, pg.Float32, nil), Op: pg.Sum})
				} else {
					err = g.Start(pg.AllReduceOp{Dst: pg.DeviceBuffer(m, pg.Float32, s), Op: pg.Sum}).Wait(ctx)
				}
				if err != nil {
					return err
				}
				if err := g.Barrier(ctx); err != nil {
					return err
				}
				if g.Rank() == 0 {
					times[turn/2][turn%2] = time.Since(began)
				}
			}
			if s := g.Topology(); !strings.Contains(s, "loaded in place") {
				return fmt.Errorf("the memory was copied to the host: %s", s)
			}
			if err := g.Barrier(ctx); err != nil {
				return err
			}
			return v.Free(m)
		})
		for i, how := range []string{"", ", started on streams"} {
			all := make([]time.Duration, rounds)
			for round := range all {
				all[round] = times[round][i]
			}
			note(t, v, fmt.Sprintf("allreduce of %d ranks, %d KiB each%s", n, size>>10, how),
				median(all).Seconds()/least, "of the copies' time", 1.25, false)
		}
	})
}

// TestGraphReplay measures allreduces of two ranks of this process in graphs, and checks what they
// make. Long ones have no target.
func TestGraphReplay(t *testing.T) {
	const n, inGraph = 2, 20
	everywhere(t, func(t *testing.T, v *cuda.Device) {
		launches, sizes := 50, []int{8, 256, 4 << 10, 16 << 10, 128 << 10, 1 << 20, 16 << 20}
		if faked(v) {
			launches, sizes = 2, sizes[:5]
		}
		p := program.Open(t, library, v.Info().Ordinal)
		for _, size := range sizes {
			target := 4.0
			if size > 16<<10 {
				target = 0
			}
			var worst time.Duration
			local(t, v, n, func(ctx context.Context, g *pg.Group) error {
				took, err := replay(ctx, t, g, v, p, size, inGraph, launches)
				if g.Rank() == 0 {
					worst = took
				}
				return err
			})
			note(t, v, fmt.Sprintf("allreduce of %d ranks, %d bytes, graph", n, size),
				float64(worst)/float64(inGraph*launches)/1e3, "us", target, false)
		}
	})
}

func replay(ctx context.Context, t *testing.T, g *pg.Group, v *cuda.Device, p *program.Program, size, inGraph,
	launches int) (took time.Duration, err error) {
	s, err := p.Stream()
	if err != nil {
		return 0, err
	}
	defer p.Destroy(s)
	own, err := v.Stream()
	if err != nil {
		return 0, err
	}
	defer own.Close()
	pinned, err := v.AllocHost(size)
	if err != nil {
		return 0, err
	}
	m, err := v.Alloc(size)
	if err != nil {
		return 0, err
	}
	move := func(dst, src mem.Memory) error {
		if err := own.Copy(dst, src); err != nil {
			return err
		}
		e, err := own.Record()
		if err != nil {
			return err
		}
		return e.Wait(ctx)
	}
	for i := range pinned.Bytes() {
		pinned.Bytes()[i] = byte(i<<1 | g.Rank())
	}
	if err := move(m, pinned); err != nil {
		return 0, err
	}
	op := pg.AllReduceOp{Dst: pg.DeviceBuffer(m, pg.Uint8, v.Borrow(s)), Op: pg.Max}
	short := pg.AllReduceOp{Dst: pg.DeviceBuffer(m.Slice(0, 8), pg.Uint8, v.Borrow(s)), Op: pg.Max}
	if err := g.Do(ctx, short); err != nil { // makes the ranks' exchange
		return 0, err
	}
	graph, err := p.Capture(s, func() error {
		for range inGraph {
			if err := g.Start(op).Wait(ctx); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		return 0, err
	}
	if err := g.Barrier(ctx); err != nil {
		return 0, err
	}
	began := time.Now()
	for range launches {
		if err := graph.Launch(s); err != nil {
			return 0, err
		}
	}
	if err := p.Finish(s, patience); err != nil {
		return 0, err
	}
	took = time.Since(began)
	want := make([]byte, size)
	for i := range want {
		want[i] = byte(i<<1 | 1)
	}
	if err := move(pinned, m); err != nil {
		return 0, err
	}
	if k := differ(pinned.Bytes(), want); k >= 0 {
		return 0, fmt.Errorf("byte %d of %d is %d, want %d", k, size, pinned.Bytes()[k], want[k])
	}
	if err := g.Barrier(ctx); err != nil { // a launch without a result would be its error
		return 0, err
	}
	return took, first(graph.Close(), v.Free(m), v.FreeHost(pinned))
}

// TestGraphKinds has graphs of collectives of three ranks of this process, one of each kind, of
// lengths that take one round of packets and several. Every launch has what the operation has on
// host memory.
func TestGraphKinds(t *testing.T) {
	const n, root = 3, 1
	everywhere(t, func(t *testing.T, v *cuda.Device) {
		p := program.Open(t, library, v.Info().Ordinal)
		local(t, v, n, func(ctx context.Context, g *pg.Group) error {
			s, err := p.Stream()
			if err != nil {
				return err
			}
			defer p.Destroy(s)
			on, b, me := v.Borrow(s), newBench(t, v), g.Rank()
			most := 150_000 // two rounds of packets, or more
			if faked(v) {
				most = 40_000
			}
			dst, src := b.alloc(4*n*most), b.alloc(4*n*most)
			b.fill(dst, make([]byte, dst.Len()))
			number := pg.DeviceBuffer(dst.Slice(0, 4), pg.Int32, on)
			if err := g.Do(ctx, pg.AllReduceOp{Dst: number, Op: pg.Sum}); err != nil {
				return err
			}
			for _, count := range []int{1, 1001, most} {
				for _, kind := range []string{"allreduce", "reducescatter", "allgather", "alltoall", "broadcast",
					"reduce", "gather", "scatter"} {
					// of returns the operation on buffers of parts.
					of := func(dst, src func(parts int) pg.Buffer) pg.Operation {
						switch kind {
						case "allreduce":
							return pg.AllReduceOp{Dst: dst(1), Src: src(1), Op: pg.Sum}
						case "reducescatter":
							return pg.ReduceScatterOp{Dst: dst(1), Src: src(n), Op: pg.Sum}
						case "allgather":
							return pg.AllGatherOp{Dst: dst(n), Src: src(1)}
						case "alltoall":
							return pg.AllToAllOp{Dst: dst(n), Src: src(n)}
						case "broadcast":
							return pg.BroadcastOp{X: dst(1), Root: root}
						case "reduce":
							return pg.ReduceOp{X: dst(1), Op: pg.Max, Root: root}
						case "gather":
							if me != root {
								return pg.GatherOp{Src: src(1), Root: root}
							}
							return pg.GatherOp{Dst: dst(n), Src: src(1), Root: root}
						}
						if me != root {
							return pg.ScatterOp{Dst: dst(1), Root: root}
						}
						return pg.ScatterOp{Dst: dst(1), Src: src(n), Root: root}
					}
					there := func(m mem.Memory) func(parts int) pg.Buffer {
						return func(parts int) pg.Buffer {
							return pg.DeviceBuffer(m.Slice(0, 4*parts*count), pg.Int32, on)
						}
					}
					here := func(x []int32) func(parts int) pg.Buffer {
						return func(parts int) pg.Buffer { return pg.BufferOf(x[:parts*count]) }
					}
					graph, err := p.Capture(s, func() error { return g.Start(of(there(dst), there(src))).Wait(ctx) })
					if err != nil {
						return fmt.Errorf("%s of %d: %w", kind, count, err)
					}
					for launch := range 3 {
						to, from := make([]int32, n*count), make([]int32, n*count)
						for i := range to {
							to[i], from[i] = int32(-i-me-launch), int32(i*(me+2)+launch)
						}
						b.fill(dst.Slice(0, 4*len(to)), words(to))
						b.fill(src.Slice(0, 4*len(from)), words(from))
						if err := g.Do(ctx, of(here(to), here(from))); err != nil {
							return err
						}
						if err := first(graph.Launch(s), p.Finish(s, patience)); err != nil {
							return err
						}
						if k := differ(b.bytes(dst.Slice(0, 4*len(to))), words(to)); k >= 0 {
							return fmt.Errorf("%s of %d, launch %d: byte %d is another than on the host", kind, count,
								launch, k)
						}
					}
					if err := graph.Close(); err != nil {
						return err
					}
				}
			}
			return first(g.Barrier(ctx), v.Free(dst), v.Free(src))
		})
	})
}

// words returns the bytes of x.
func words(x []int32) []byte {
	return unsafe.Slice((*byte)(unsafe.Pointer(unsafe.SliceData(x))), 4*len(x))
}

func first(errs ...error) error {
	for _, err := range errs {
		if err != nil {
			return err
		}
	}
	return nil
}

// TestFirstCollective compares the first allreduce of a group with the hundredth.
func TestFirstCollective(t *testing.T) {
	const n, calls = 2, 100
	everywhere(t, func(t *testing.T, v *cuda.Device) {
		size, groups := 1<<20, 9
		if faked(v) {
			groups = 1
		}
		var early, late []time.Duration
		for range groups {
			local(t, v, n, func(ctx context.Context, g *pg.Group) error {
				m, err := v.Alloc(size)
				if err != nil {
					return err
				}
				defer v.Free(m)
				for i := range calls {
					if err := g.Barrier(ctx); err != nil {
						return err
					}
					began := time.Now()
					op := pg.AllReduceOp{Dst: pg.DeviceBuffer(m, pg.Float32, nil), Op: pg.Sum}
					if err := g.Do(ctx, op); err != nil {
						return err
					}
					switch took := time.Since(began); {
					case g.Rank() > 0:
					case i == 0:
						early = append(early, took)
					case i == calls-1:
						late = append(late, took)
					}
				}
				return g.Barrier(ctx)
			})
		}
		note(t, v, "allreduce of 1 MiB, first after Join", float64(median(early))/float64(median(late)),
			"of the hundredth's time", 1.5, false)
	})
}

// TestStaging compares what a rank alone copies to the host and back in an operation with copies of
// the driver in both directions at once.
func TestStaging(t *testing.T) {
	everywhere(t, func(t *testing.T, v *cuda.Device) {
		size, rounds := 256<<20, 5
		if faked(v) {
			size, rounds = 1<<20, 1
		}
		b, back := newBench(t, v), newBench(t, v)
		out, in := b.alloc(size), b.alloc(size)
		var pinned [2]mem.Memory
		for i := range pinned {
			var err error
			pinned[i], err = v.AllocHost(size)
			b.must(err)
		}
		driver, staged := time.Duration(1<<62), time.Duration(1<<62)
		for range rounds + 1 {
			began := time.Now()
			b.must(b.s.Copy(pinned[0], out), back.s.Copy(in, pinned[1]))
			b.finish()
			back.finish()
			driver = min(driver, time.Since(began))
		}
		b.must(v.FreeHost(pinned[0]), v.FreeHost(pinned[1]))
		local(t, v, 1, func(ctx context.Context, g *pg.Group) error {
			op := pg.AllReduceOp{Dst: pg.DeviceBuffer(in, pg.Uint8, b.s), Src: pg.DeviceBuffer(out, pg.Uint8, b.s),
				Op: pg.Sum}
			for range rounds + 1 {
				began := time.Now()
				if err := g.Start(op).Wait(ctx); err != nil {
					return err
				}
				b.finish()
				staged = min(staged, time.Since(began))
			}
			return nil
		})
		if !bytes.Equal(b.bytes(in.Slice(0, 4096)), b.bytes(out.Slice(0, 4096))) {
			t.Fatal("another result")
		}
		note(t, v, fmt.Sprintf("staging %d MiB to the host and back", size>>20), float64(driver)/float64(staged),
			"of the driver's rate", 0.9, true)
	})
}

// sanitizerTime is how long one tool of the sanitizer may take.
const sanitizerTime = 2 * time.Minute

// TestSanitizer runs the tests of all kernels under NVIDIA's compute-sanitizer, which reports
// accesses outside of allocations, and threads that race in shared memory.
func TestSanitizer(t *testing.T) {
	everywhere(t, func(t *testing.T, v *cuda.Device) {
		switch {
		case faked(v):
			t.Skip("compute-sanitizer needs a GPU")
		case !*sanitize:
			t.Skip("without -gpu.sanitizer")
		}
		sanitizer, err := sanitizer()
		if err != nil {
			t.Fatal(err)
		}
		self, err := os.Executable()
		if err != nil {
			t.Fatal(err)
		}
		for _, tool := range []string{"memcheck", "racecheck"} {
			ctx, cancel := context.WithTimeout(t.Context(), sanitizerTime)
			defer cancel()
			cmd := exec.CommandContext(ctx, sanitizer, "--tool", tool, "--error-exitcode", "77", self,
				"-test.count=1", "-test.run=^Test(Reductions|NearFloat64|Short)$/^GPU$", "-test.short", "-gpu.required",
				fmt.Sprint("-gpu.device=", *ordinal))
			cmd.WaitDelay = time.Second
			text, err := cmd.CombinedOutput()
			if err = errors.Join(err, ctx.Err()); err != nil {
				t.Errorf("%s: %v\n%s", tool, err, text)
				continue
			}
			row(t, "compute-sanitizer %s: clean", tool)
		}
	})
}

// sanitizer returns the path of compute-sanitizer, which make deps-gpu puts into the user's cache.
func sanitizer() (string, error) {
	if path, err := exec.LookPath("compute-sanitizer"); err == nil {
		return path, nil
	}
	cache, err := os.UserCacheDir()
	if err != nil {
		return "", fmt.Errorf("there is no compute-sanitizer (make deps-gpu): %w", err)
	}
	pattern := filepath.Join(cache, "tutti", "sanitizer", "lib", "python*", "site-packages", "nvidia", "*", "bin",
		"compute-sanitizer")
	if all, _ := filepath.Glob(pattern); len(all) > 0 {
		return all[0], nil
	}
	return "", fmt.Errorf("there is no compute-sanitizer in PATH or as %s (make deps-gpu)", pattern)
}
