//go:build cgo && linux

package pg_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"
	"unsafe"

	"tutti/device"
	"tutti/device/cuda"
	"tutti/device/cuda/fake"
	"tutti/device/cuda/fakegpu"
	"tutti/kernels"
	"tutti/mem"
	"tutti/pg"
	"tutti/pg/pgtest"
)

// A gpu is a GPU of the fake driver in the process of a rank. Processes that use the same number
// share one.
type gpu struct {
	*cuda.Device
	fake *fake.Driver
}

// kindsOfHandles are those that memory of Alloc has.
var kindsOfHandles = map[string]fake.Config{"descriptors": {}, "IPC": {NoVMM: true}}

// onHandles runs f on a GPU for each kind of handles.
func onHandles(t *testing.T, f func(t *testing.T, d *gpu)) {
	for name, c := range kindsOfHandles {
		t.Run(name, func(t *testing.T) { f(t, openGPUOf(t, 0, c)) })
	}
}

// openGPUOf is openGPU on a machine with 4 GPUs.
func openGPUOf(t *testing.T, ordinal int, c fake.Config) *gpu {
	t.Helper()
	c.Devices = 4
	d, f := fakegpu.Open(t, ordinal, c)
	return &gpu{d, f}
}

// ofRank is the number of the rank that this process is, 0 in the process of the test.
func ofRank() int { n, _ := strconv.Atoi(os.Getenv("TUTTI_RANK")); return n }

// opened returns how many allocations of other processes were mapped until now.
func (d *gpu) opened() int {
	calls := d.fake.Calls()
	return calls["cuIpcOpenMemHandle_v2"] + calls["cuMemImportFromShareableHandle"]
}

// alloc returns memory with contents, which is freed when the test has ended.
func (d *gpu) alloc(t *testing.T, contents []byte) mem.Memory {
	t.Helper()
	m, err := d.Alloc(len(contents))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { d.Free(m) })
	copy(d.fake.Bytes(m), contents)
	return m
}

// ones returns n elements of which each is 0 or 1, whose reductions are exact in every type.
func ones(rng *rand.Rand, dt pg.DType, n int) []byte {
	one := uint64(1)
	if f := dt.Format(); dt.Class() == kernels.Float {
		one = uint64(1)<<(f.Exponent-1) - 1
		one <<= f.Fraction
	}
	all := make([]byte, n*dt.Size())
	for i := range n {
		if rng.IntN(2) == 0 {
			continue
		}
		for k := range dt.Size() {
			all[i*dt.Size()+k] = byte(one >> (8 * k))
		}
	}
	return all
}

// hostBuffer describes host memory as elements.
func hostBuffer(b []byte, dt pg.DType) pg.Buffer {
	return pg.Buffer{Ptr: unsafe.Pointer(unsafe.SliceData(b)), Count: len(b) / dt.Size(), DType: dt}
}

// directCase is an operation on dst and src elements.
type directCase struct {
	name     string
	dst, src int
	op       func(dst, src pg.Buffer) pg.Operation
}

// reducing returns the operations that combine elements.
func reducing(n, count int, op kernels.Op) []directCase {
	return []directCase{
		{"allreduce", count, count,
			func(d, s pg.Buffer) pg.Operation { return pg.AllReduceOp{Dst: d, Src: s, Op: op} }},
		{"allreduce in place", count, 0,
			func(d, _ pg.Buffer) pg.Operation { return pg.AllReduceOp{Dst: d, Op: op} }},
		{"reducescatter", count, n * count,
			func(d, s pg.Buffer) pg.Operation { return pg.ReduceScatterOp{Dst: d, Src: s, Op: op} }},
		{"reduce", count, 0, func(d, _ pg.Buffer) pg.Operation { return pg.ReduceOp{X: d, Root: n - 1, Op: op} }},
	}
}

// copying returns the others.
func copying(rank, n, count int) []directCase {
	at := func(root, n int) int {
		if rank != root {
			return 0
		}
		return n
	}
	counts, packed := make([]int, n), 0
	for r := range counts {
		counts[r] = count / (r + 1)
		packed += counts[r]
	}
	return []directCase{
		{"allgather", n * count, count,
			func(d, s pg.Buffer) pg.Operation { return pg.AllGatherOp{Dst: d, Src: s} }},
		{"allgatherv", packed, counts[rank],
			func(d, s pg.Buffer) pg.Operation { return pg.AllGatherVOp{Dst: d, Src: s, Counts: counts} }},
		{"alltoall", n * count, n * count,
			func(d, s pg.Buffer) pg.Operation { return pg.AllToAllOp{Dst: d, Src: s} }},
		{"broadcast", count, 0, func(d, _ pg.Buffer) pg.Operation { return pg.BroadcastOp{X: d, Root: 1} }},
		{"gather", at(0, n*count), count,
			func(d, s pg.Buffer) pg.Operation { return pg.GatherOp{Dst: d, Src: s, Root: 0} }},
		{"scatter", count, at(1, n*count),
			func(d, s pg.Buffer) pg.Operation { return pg.ScatterOp{Dst: d, Src: s, Root: 1} }},
	}
}

// A way is how an operation is called.
type way int

const (
	blocking way = iota
	started
	onStream // started, on a stream of the caller's
	ways
)

// run runs an operation in a way, at most until ctx ends, and returns when its result is there. op
// is given the stream of its buffers.
func (d *gpu) run(ctx context.Context, g *pg.Group, how way, op func(s device.Stream) pg.Operation) error {
	start := g.Start
	if end, limited := ctx.Deadline(); limited {
		start = func(op pg.Operation) *pg.Work { return g.StartWithin(max(time.Until(end), 1), op) }
	}
	switch how {
	case blocking:
		return g.Do(ctx, op(nil))
	case started:
		return start(op(nil)).Wait(context.Background())
	}
	s, err := d.Stream()
	if err != nil {
		return err
	}
	defer s.Close()
	words, free, err := device.Words(d, 2)
	if err != nil {
		return err
	}
	defer free()
	if err := s.WaitValue(words[0], 1); err != nil {
		return err
	}
	w := start(op(s))
	behind := s.WriteValue(words[1], 1)
	if words[1].Word(0).Load() != 0 {
		return errors.New("the stream has passed an operation that it has not come to")
	}
	words[0].Word(0).Store(1)
	if err := errors.Join(behind, w.Wait(context.Background())); err != nil {
		return err
	}
	e, err := s.Record()
	if err != nil {
		return err
	}
	return e.Wait(ctx)
}

// compare runs a case on the host and on the device, and compares all bits.
func (d *gpu) compare(t *testing.T, g *pg.Group, c directCase, dt pg.DType, rng *rand.Rand, how way) {
	t.Helper()
	dst, src := ones(rng, dt, c.dst), ones(rng, dt, c.src)
	m := d.alloc(t, slices.Concat(dst, src))
	defer d.Free(m)
	on := func(s device.Stream, at, n int) pg.Buffer {
		if n == 0 {
			return pg.Buffer{DType: dt}
		}
		return pg.DeviceBuffer(m.Slice(at, n), dt, s)
	}
	if err := g.Do(t.Context(), c.op(hostBuffer(dst, dt), hostBuffer(src, dt))); err != nil {
		t.Fatalf("%s of %v on the host: %v", c.name, dt, err)
	}
	err := d.run(t.Context(), g, how, func(s device.Stream) pg.Operation {
		return c.op(on(s, 0, len(dst)), on(s, len(dst), len(src)))
	})
	if err != nil {
		t.Fatalf("%s of %v: %v", c.name, dt, err)
	}
	if got := d.fake.Bytes(m); !bytes.Equal(got[:len(dst)], dst) || !bytes.Equal(got[len(dst):], src) {
		t.Errorf("%s of %d elements of %v: not the bits of the operation on the host", c.name, c.dst, dt)
	}
}

// Processes that share a GPU load from each other's memory there: every operation has the result
// that it has on the host, for all types and reductions, on both sides of the sizes at which
// something changes. Nothing is copied to the host, and each allocation is mapped once.
func TestDirectBetweenProcesses(t *testing.T) {
	for _, n := range []int{2, 4} {
		t.Run(fmt.Sprint(n), func(t *testing.T) {
			d := openGPUOf(t, 0, fake.Config{NoVMM: n == 4})
			pgtest.Run(t, n, func(t *testing.T, g *pg.Group) {
				rng := rand.New(rand.NewPCG(1, uint64(g.Rank())))
				all := kernels.DTypes()
				for i, dt := range all {
					const bytes = 128 << 10
					for _, op := range kernels.Ops() {
						few := testing.Short() || n > 2 // the kernels are the same
						if !kernels.Supported(op, dt) || few && op != pg.Sum && i%4 != 0 {
							continue
						}
						for _, c := range reducing(n, bytes/dt.Size()+3, op) {
							d.compare(t, g, c, dt, rng, way(i)%ways)
						}
					}
				}
				// Where a vector is shorter than what is loaded, and longer than a block.
				sizes := []int{1, 1000, 128<<10 - 1, 128 << 10, 1 << 20}
				if !testing.Short() {
					sizes = append(sizes, 9<<20)
				}
				for i, size := range sizes {
					for _, c := range slices.Concat(copying(g.Rank(), n, size), reducing(n, size, pg.Sum)) {
						d.compare(t, g, c, pg.Uint8, rng, way(i)%ways)
					}
				}
				before := g.Copies()
				for _, c := range slices.Concat(copying(g.Rank(), n, 128<<10), reducing(n, 128<<10, pg.Sum)) {
					d.compare(t, g, c, pg.Uint8, rng, onStream)
				}
				// With IPC handles, memory at the place of former memory is mapped later.
				if g.Copies() != before && n == 2 {
					t.Error("started operations on a stream were copied through the host")
				}
				if path, err := g.Direct(); path != "same GPU" || err != nil {
					t.Errorf("the path is %q, %v", path, err)
				}
			}, pgtest.Transport("shm"), pgtest.Config(pg.Config{Devices: device.List{d}}))
		})
	}
}

// sum is sumBy for a blocking call.
func (d *gpu) sum(ctx context.Context, g *pg.Group, m mem.Memory, want ...byte) error {
	return d.sumBy(ctx, g, blocking, m, want...)
}

// sumBy runs an allreduce on the device that adds 1<<rank, and checks the result: it is one of
// these.
func (d *gpu) sumBy(ctx context.Context, g *pg.Group, how way, m mem.Memory, want ...byte) error {
	b := d.fake.Bytes(m)
	for i := range b {
		b[i] = byte(1 << g.Rank())
	}
	err := d.run(ctx, g, how, func(s device.Stream) pg.Operation {
		return pg.AllReduceOp{Dst: pg.DeviceBuffer(m, pg.Uint8, s), Op: pg.Sum}
	})
	if err != nil {
		return err
	}
	if !slices.Contains(want, b[0]) || bytes.Count(b, b[:1]) != len(b) {
		return fmt.Errorf("the sum is %d.., want one of %v", b[0], want)
	}
	return nil
}

// An allocation is mapped once and stays mapped for later operations. Memory of the host is never
// mapped so, though all ranks have GPUs; nor is that of other operations with devices.
func TestDirectMapsOnce(t *testing.T) {
	const n, size = 3, 256 << 10
	onHandles(t, func(t *testing.T, d *gpu) {
		pgtest.Run(t, n, func(t *testing.T, g *pg.Group) {
			ctx, m := t.Context(), d.alloc(t, make([]byte, size))
			host, err := pg.Alloc[float32](g, 1<<16)
			if err != nil {
				t.Fatal(err)
			}
			for range 5 {
				if err := errors.Join(pg.AllReduce(ctx, g, make([]float32, 1<<16), pg.Sum),
					pg.AllReduce(ctx, g, host, pg.Sum), g.Barrier(ctx)); err != nil {
					t.Fatal(err)
				}
			}
			if d.opened() != 0 {
				t.Error("memory of the host was mapped as a device's")
			}
			for range 10 {
				if err := d.sum(ctx, g, m, 1<<n-1); err != nil {
					t.Fatal(err)
				}
			}
			if got := d.opened(); got != n-1 {
				t.Errorf("%d allocations were mapped, want %d: one of each other rank", got, n-1)
			}
			if g.Copies() != 0 {
				t.Error("buffers were copied to the host")
			}
			for range 5 {
				if err := errors.Join(pg.AllReduce(ctx, g, make([]float32, 1<<16), pg.Sum),
					pg.AllReduce(ctx, g, host, pg.Sum)); err != nil {
					t.Fatal(err)
				}
			}
			for range 20 {
				other, err := d.Alloc(size)
				if err != nil {
					t.Fatal(err)
				}
				if err := d.sum(ctx, g, other, 1<<n-1); err != nil {
					t.Fatal(err)
				}
				if err := errors.Join(g.Barrier(ctx), d.Free(other)); err != nil {
					t.Fatal(err)
				}
				// What was freed is unmapped when the next one is mapped.
				d.fake.Until(t, "memory that was freed is unmapped",
					func(c fake.Census) bool { return c.Imported <= 2*(n-1) })
			}
			var kept []mem.Memory
			for range 70 { // more than stay mapped
				other, err := d.Alloc(128 << 10)
				if err != nil {
					t.Fatal(err)
				}
				if kept = append(kept, other); d.sum(ctx, g, other, 1<<n-1) != nil {
					t.Fatal("an operation has failed")
				}
			}
			d.fake.Until(t, "64 allocations of a rank are mapped",
				func(c fake.Census) bool { return c.Imported <= 64*(n-1) })
			if err := g.Barrier(ctx); err != nil {
				t.Fatal(err)
			}
			for _, m := range kept {
				d.Free(m)
			}
			if err := d.sum(ctx, g, m, 1<<n-1); err != nil {
				t.Fatal(err)
			}
			if err := pg.Free(g, host); err != nil {
				t.Fatal(err)
			}
		}, pgtest.Transport("shm"), pgtest.Config(pg.Config{Devices: device.List{d}}))
	})
}

// Memory that its owner has freed does not stay mapped at the others because the group in which
// they mapped it was closed before. No memory is allocated where other was.
func TestMemoryOfClosedGroupsIsUnmapped(t *testing.T) {
	const n, size = 2, 512 << 10
	onHandles(t, func(t *testing.T, d *gpu) {
		pgtest.Run(t, n, func(t *testing.T, g *pg.Group) {
			ctx := t.Context()
			var all []mem.Memory
			for range 20 {
				sub, err := g.Split(ctx, 0, g.Rank())
				if err != nil {
					t.Fatal(err)
				}
				m, err := d.Alloc(size)
				if err != nil {
					t.Fatal(err)
				}
				all = append(all, m)
				if err := errors.Join(d.sum(ctx, sub, m, 1<<n-1), sub.Close()); err != nil {
					t.Fatal(err)
				}
			}
			if err := g.Barrier(ctx); err != nil {
				t.Fatal(err)
			}
			for _, m := range all {
				if err := d.Free(m); err != nil {
					t.Fatal(err)
				}
			}
			m := d.alloc(t, make([]byte, size))
			if err := d.sum(ctx, g, m, 1<<n-1); err != nil {
				t.Fatal(err)
			}
			d.fake.Until(t, "memory that was freed is unmapped", func(c fake.Census) bool { return c.Imported <= 2 })
			if err := g.Barrier(ctx); err != nil {
				t.Fatal(err)
			}
		}, pgtest.Transport("shm"), pgtest.Config(pg.Config{Devices: device.List{d}}))
	})
}

// A rank that dies at any moment, while the others load from its memory or map it for the first
// time, costs the survivors at most one operation; no result is wrong, and what was mapped of it is
// unmapped.
func TestDeathDuringDirectOperations(t *testing.T) {
	for _, how := range []pg.OnFailure{pg.Shrink, pg.Retry} {
		for moment := range 6 {
			if testing.Short() && moment%3 != 0 {
				continue
			}
			t.Run(fmt.Sprintf("%v/%d", how, moment), func(t *testing.T) {
				const n, victim = 4, 2
				d := openGPUOf(t, 0, fake.Config{NoVMM: moment%2 == 1})
				pgtest.Run(t, n, func(t *testing.T, g *pg.Group) {
					ctx := t.Context()
					var early *pg.RankError
					if err := g.Barrier(ctx); err != nil && (!errors.As(err, &early) || early.Rank != victim) {
						t.Fatal(err)
					}
					if g.Rank() == victim {
						go func() {
							time.Sleep(time.Duration(moment) * 2 * time.Millisecond)
							pgtest.Kill(t)
						}()
					}
					for after := 0; after < 5; {
						m, err := d.Alloc(512 << 10)
						if err != nil {
							t.Fatal(err)
						}
						err = d.sumBy(ctx, g, way(moment)%ways, m, 15, 15-1<<victim)
						var lost *pg.RankError
						switch {
						case errors.As(err, &lost) && lost.Rank == victim:
						case err != nil:
							t.Fatalf("%v, want a *RankError that names rank %d", err, victim)
						case d.fake.Bytes(m)[0] != 15:
							after++
						}
						if err := d.Free(m); err != nil {
							t.Fatal(err)
						}
					}
					if path, err := g.Direct(); path != "same GPU" {
						t.Errorf("after the death, the path is %q: %v", path, err)
					}
					if err := g.Barrier(ctx); err != nil {
						t.Fatal(err)
					}
				}, pgtest.Transport("shm"), pgtest.Config(pg.Config{OnFailure: how, Devices: device.List{d}}),
					pgtest.Expect(victim, syscall.SIGKILL))
			})
		}
	}
}

// What was mapped of a rank that has died is unmapped, and that of its next incarnation is mapped
// anew.
func TestDirectMapsTheNextIncarnation(t *testing.T) {
	const n, victim, size = 3, 1, 256 << 10
	onHandles(t, func(t *testing.T, d *gpu) {
		pgtest.Run(t, n, func(t *testing.T, g *pg.Group) {
			ctx, m := t.Context(), d.alloc(t, make([]byte, size))
			mapped := func(want int) {
				t.Helper()
				d.fake.Until(t, fmt.Sprintf("%d allocations are mapped", want),
					func(c fake.Census) bool { return c.Imported == want })
			}
			if !pgtest.Second() {
				if err := d.sum(ctx, g, m, 7); err != nil {
					t.Fatal(err)
				}
				mapped(2)
				if through(t, g, victim); g.Rank() == victim {
					pgtest.Kill(t)
				}
				for in, first := false, true; !in; {
					if _, err := g.Admit(ctx); err != nil && lostRank(err) != victim {
						t.Fatal(err)
					}
					v := g.View()
					in = v.Epoch >= 3 && len(v.Active) == n
					if first && len(v.Active) == n-1 {
						if first = false; d.fake.Census().Imported > 2 {
							t.Error("the dead rank's memory was mapped again")
						}
					}
				}
			}
			before := d.opened()
			for range 3 {
				if err := d.sum(ctx, g, m, 7); err != nil {
					t.Fatal(err)
				}
			}
			mapped(2)
			if got := d.opened() - before; got > 2 || got == 0 {
				t.Errorf("%d allocations were mapped in the new view", got)
			}
			if path, err := g.Direct(); path != "same GPU" {
				t.Errorf("the path is %q: %v", path, err)
			}
			if err := g.Barrier(ctx); err != nil {
				t.Fatal(err)
			}
		}, pgtest.Transport("shm"), pgtest.Config(pg.Config{OnFailure: pg.Shrink, Devices: device.List{d}}),
			pgtest.Expect(victim, syscall.SIGKILL), pgtest.Replace(victim))
	})
}

// A rank that is stopped delays no other past its deadline. Afterwards no stream works for the
// operation, and the group goes on.
func TestDirectDeadlines(t *testing.T) {
	const n, victim = 3, 1
	onHandles(t, func(t *testing.T, d *gpu) {
		pgtest.Run(t, n, func(t *testing.T, g *pg.Group) {
			ctx := t.Context()
			control := pgtest.InjectFaults(t)
			s, err := d.Stream()
			if err != nil {
				t.Fatal(err)
			}
			defer s.Close()
			for round := range 3 {
				if err := g.Barrier(ctx); err != nil {
					t.Fatal(err)
				}
				together(t, g)
				stopped := make(chan struct{})
				if g.Rank() == 0 {
					go func() {
						defer close(stopped)
						time.Sleep(time.Duration(rand.IntN(8000)) * time.Microsecond)
						control.Stop(victim, 2*time.Second)
					}()
				} else {
					close(stopped)
				}
				for err = nil; err == nil; {
					m, bad := d.Alloc(256 << 10)
					if bad != nil {
						t.Fatal(bad)
					}
					cctx, cancel := context.WithTimeout(ctx, 300*time.Millisecond)
					began := time.Now()
					err = d.sumBy(cctx, g, way(round)%ways, m, 1<<n-1)
					if took := time.Since(began); g.Rank() != victim && took > 20*time.Second {
						t.Errorf("round %d: it returned after %v, with %v", round, took, err)
					}
					cancel()
					if err == nil {
						err = d.Free(m)
						continue
					}
					mine := bytes.Repeat([]byte{99}, m.Len())
					copy(d.fake.Bytes(m), mine)
					e, bad := s.Record()
					if bad = errors.Join(bad, e.Wait(ctx)); bad != nil {
						t.Fatalf("the context is not usable after %v: %v", err, bad)
					}
					time.Sleep(20 * time.Millisecond) // in which something could be written
					if !bytes.Equal(d.fake.Bytes(m), mine) {
						t.Fatalf("round %d: memory was written after %v", round, err)
					}
					if bad := d.Free(m); bad != nil {
						t.Fatal(bad)
					}
				}
				<-stopped
				if err := g.Recover(ctx); err != nil {
					t.Fatal(err)
				}
			}
		}, pgtest.Transport("shm"), pgtest.Faults(nil),
			pgtest.Config(pg.Config{OnFailure: pg.Report, Devices: device.List{d}}))
	})
}

// Ranks on GPUs that reach each other load from them; others copy through the host, and say why.
// There peers may read what was copied straight from the process.
func TestDirectNeedsPeerAccess(t *testing.T) {
	const n, size = 2, 256 << 10
	for _, c := range []struct {
		name      string
		isolated  bool
		ipc       bool
		single    string // Config.SingleCopy
		path, why string
	}{
		{name: "reached", path: "peer access"},
		{name: "reached by IPC", ipc: true, path: "peer access"},
		{name: "isolated", isolated: true, why: "peer access is not supported"},
		{name: "isolated, by IPC", isolated: true, ipc: true, why: "peer access is not supported"},
		{name: "isolated, single copies", isolated: true, single: "on", why: "peer access is not supported"},
	} {
		t.Run(c.name, func(t *testing.T) {
			d := openGPUOf(t, ofRank(), fake.Config{Isolated: c.isolated, NoVMM: c.ipc})
			pgtest.Run(t, n, func(t *testing.T, g *pg.Group) {
				m := d.alloc(t, make([]byte, size))
				for range 8 {
					if err := d.sum(t.Context(), g, m, 3); err != nil {
						t.Fatal(err)
					}
				}
				path, err := g.Direct()
				if path != c.path || (err == nil) != (c.why == "") ||
					err != nil && !strings.Contains(err.Error(), c.why) {
					t.Errorf("the path is %q: %v", path, err)
				}
				if text := g.Topology(); !strings.Contains(text, "memory of GPUs") ||
					!strings.Contains(text, c.path+c.why) {
					t.Errorf("the group says %q", text)
				}
				if direct := g.Copies() == 0; direct != (c.path != "") {
					t.Errorf("nothing was copied to the host: %v", direct)
				}
				if d.opened() != 1 {
					t.Errorf("%d allocations were mapped, or tried", d.opened())
				}
			}, pgtest.Transport("shm"), pgtest.Config(pg.Config{Devices: device.List{d}, SingleCopy: c.single}))
		})
	}
}

// A rank finds that it does not reach its peer's GPU while a stream of its own waits for the next
// operation of the group.
func TestDirectNeedsPeerAccessBesideWaitingStreams(t *testing.T) {
	for name, c := range map[string]fake.Config{"descriptors": {}, "IPC": {NoVMM: true}} {
		t.Run(name, func(t *testing.T) {
			c.Isolated = true
			d := openGPUOf(t, ofRank(), c)
			pgtest.Run(t, 2, func(t *testing.T, g *pg.Group) {
				beside, err := g.Split(t.Context(), 0, g.Rank())
				if err != nil {
					t.Fatal(err)
				}
				defer beside.Close()
				var works []*pg.Work
				start := func() {
					s, err := d.Stream()
					if err != nil {
						t.Fatal(err)
					}
					t.Cleanup(func() { s.Close() })
					for _, s := range []device.Stream{nil, s} {
						x := pg.DeviceBuffer(d.alloc(t, make([]byte, 256<<10)), pg.Uint8, s)
						works = append(works, g.Start(pg.AllReduceOp{Dst: x, Op: pg.BitOr}))
					}
				}
				if g.Rank() == 1 {
					start()
				}
				if err := beside.Barrier(t.Context()); err != nil {
					t.Fatal(err)
				}
				if g.Rank() == 0 {
					start()
				}
				for _, w := range works {
					if err := w.Wait(t.Context()); err != nil {
						t.Error(err)
					}
				}
				if _, err := g.Direct(); err == nil {
					t.Error("the GPUs reach each other")
				}
			}, pgtest.Transport("shm"), pgtest.Config(pg.Config{Devices: device.List{d}, Timeout: 20 * time.Second}))
		})
	}
}

// A rank that may not load from other devices has all copy through the host.
func TestDirectIsSwitchedOff(t *testing.T) {
	const n, size = 3, 256 << 10
	onHandles(t, func(t *testing.T, d *gpu) {
		may := "auto"
		if ofRank() == 1 {
			may = "off"
		}
		pgtest.Run(t, n, func(t *testing.T, g *pg.Group) {
			m := d.alloc(t, make([]byte, size))
			for range 5 {
				if err := d.sum(t.Context(), g, m, 7); err != nil {
					t.Fatal(err)
				}
			}
			if d.opened() != 0 || g.Copies() == 0 {
				t.Error("memory of other processes was mapped")
			}
			if path, err := g.Direct(); path != "" || g.Rank() != 1 && err == nil {
				t.Errorf("the path is %q: %v", path, err)
			}
		}, pgtest.Transport("shm"), pgtest.Config(pg.Config{Devices: device.List{d}, PeerDevices: may}))
	})
}

// Subgroups load from the same mappings; what they use of a rank that has died is unmapped too.
func TestDirectInSubgroups(t *testing.T) {
	const n, victim, size = 4, 3, 256 << 10
	onHandles(t, func(t *testing.T, d *gpu) {
		pgtest.Run(t, n, func(t *testing.T, g *pg.Group) {
			ctx, m := t.Context(), d.alloc(t, make([]byte, size))
			if err := d.sum(ctx, g, m, 15); err != nil {
				t.Fatal(err)
			}
			sub, err := g.Split(ctx, g.Rank()%2, g.Rank()) // 0 and 2, 1 and 3
			if err != nil {
				t.Fatal(err)
			}
			defer sub.Close()
			if err := d.sum(ctx, sub, m, 3); err != nil {
				t.Fatal(err)
			}
			if got := d.opened(); got != n-1 {
				t.Errorf("%d allocations were mapped, want %d", got, n-1)
			}
			if err := g.Barrier(ctx); err != nil {
				t.Fatal(err)
			}
			if through(t, g, victim); g.Rank() == victim {
				pgtest.Kill(t)
			}
			for err = nil; err == nil; {
				err = d.sum(ctx, g, m, 15, 7)
				if len(g.View().Active) < n {
					break
				}
			}
			if err := d.sum(ctx, g, m, 7); err != nil {
				t.Fatal(err)
			}
			want := byte(3)
			if g.Rank() == 1 {
				want = 1
			}
			for {
				if err = d.sum(ctx, sub, m, want); err == nil {
					break
				}
				if lostRank(err) < 0 {
					t.Fatal(err)
				}
			}
			d.fake.Until(t, "the dead rank's memory is unmapped", func(c fake.Census) bool { return c.Imported <= n-2 })
			if err := g.Barrier(ctx); err != nil {
				t.Fatal(err)
			}
		}, pgtest.Transport("shm"), pgtest.Config(pg.Config{OnFailure: pg.Shrink, Devices: device.List{d}}),
			pgtest.Expect(victim, syscall.SIGKILL))
	})
}

// A driver that cannot map an allocation of another process costs the operation nothing but the
// copy, at any rank.
func TestDirectFallsBackWhenMappingFails(t *testing.T) {
	const n, size = 3, 256 << 10
	onHandles(t, func(t *testing.T, d *gpu) {
		pgtest.Run(t, n, func(t *testing.T, g *pg.Group) {
			if g.Rank() == 1 {
				d.fake.Fail("cuIpcOpenMemHandle_v2", 2, fake.OutOfMemory)
				d.fake.Fail("cuMemMap", 3, fake.OutOfMemory) // the first one is of this rank's memory
			}
			m := d.alloc(t, make([]byte, size))
			for range 3 {
				if err := d.sum(t.Context(), g, m, 7); err != nil {
					t.Fatal(err)
				}
			}
			if path, err := g.Direct(); path != "" || err == nil ||
				!strings.Contains(err.Error(), "rank 1 does not reach") {
				t.Errorf("the path is %q: %v", path, err)
			}
		}, pgtest.Transport("shm"), pgtest.Config(pg.Config{Devices: device.List{d}}))
	})
}

// Ranks make the same calls, each on memory of the host or of its GPU and in its own way,
// so that some of them can be direct and some cannot: all have their results.
func TestDirectAmongOtherOperations(t *testing.T) {
	const n = 3
	onHandles(t, func(t *testing.T, d *gpu) {
		pgtest.Run(t, n, func(t *testing.T, g *pg.Group) {
			ctx := t.Context()
			rounds := 150
			if testing.Short() {
				rounds = 60
			}
			all := rand.New(rand.NewPCG(1, 2))                // the same at all ranks
			own := rand.New(rand.NewPCG(3, uint64(g.Rank()))) // of this one
			s, err := d.Stream()
			if err != nil {
				t.Fatal(err)
			}
			defer s.Close()
			direct := 0
			for round := range rounds {
				size := []int{100, 40 << 10, 128 << 10, 300_000, 300_001}[all.IntN(5)]
				mixed := all.IntN(3) == 0 // ranks choose by themselves
				cases := slices.Concat(copying(g.Rank(), n, size), reducing(n, size, pg.Sum))
				c := cases[all.IntN(len(cases))]
				dst, src := ones(own, pg.Uint8, c.dst), ones(own, pg.Uint8, c.src)
				there := slices.Concat(dst, src)
				if err := g.Do(ctx, c.op(hostBuffer(dst, pg.Uint8), hostBuffer(src, pg.Uint8))); err != nil {
					t.Fatal(err)
				}
				mode := []int{1, 2, 4}[all.IntN(3)]
				if mixed {
					mode = own.IntN(5)
				}
				// A short collective is on the memory of GPUs at all ranks, or at none.
				host := mode == 0 && size != 100
				m := d.alloc(t, there)
				var on device.Stream
				if mode > 2 {
					on = s
				}
				at := func(from, n int) pg.Buffer {
					switch {
					case n == 0:
						return pg.Buffer{DType: pg.Uint8}
					case host:
						return hostBuffer(there[from:from+n], pg.Uint8)
					}
					return pg.DeviceBuffer(m.Slice(from, n), pg.Uint8, on)
				}
				op, before := c.op(at(0, len(dst)), at(len(dst), len(src))), g.Copies()
				if mode%2 == 0 {
					err = g.Start(op).Wait(ctx)
				} else {
					err = g.Do(ctx, op)
				}
				if err != nil {
					t.Fatalf("round %d, %s: %v", round, c.name, err)
				}
				got := there
				if !host {
					if got = d.fake.Bytes(m); g.Copies() == before && len(there) > 0 {
						direct++
					}
				}
				if !bytes.Equal(got, slices.Concat(dst, src)) {
					t.Fatalf("round %d, %s of %d bytes, mode %d: another result than on the host", round, c.name,
						size, mode)
				}
				if all.IntN(4) == 0 { // or it stays mapped
					if err := errors.Join(g.Barrier(ctx), d.Free(m)); err != nil {
						t.Fatal(err)
					}
				}
			}
			if err := g.Barrier(ctx); err != nil {
				t.Fatal(err)
			}
			t.Logf("%d of %d operations were direct", direct, rounds)
			if direct < rounds/10 {
				t.Errorf("%d of %d operations were direct", direct, rounds)
			}
		}, pgtest.Transport("shm"), pgtest.Config(pg.Config{Devices: device.List{d}}))
	})
}
