//go:build cgo && linux

package gpu

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"strings"
	"syscall"
	"testing"
	"time"
	"unsafe"

	"tutti/device"
	"tutti/device/cuda"
	"tutti/pg"
	"tutti/pg/pgtest"
)

// float32s returns n numbers whose sums are exact.
func float32s(rng *rand.Rand, n int) []float32 {
	x := make([]float32, n)
	for i := range x {
		x[i] = float32(rng.IntN(1000))
	}
	return x
}

func raw(x []float32) []byte {
	return unsafe.Slice((*byte)(unsafe.Pointer(unsafe.SliceData(x))), 4*len(x))
}

// TestProcesses: processes that share the GPU load from each other's memory by IPC, and every
// operation has the result that it has on the host.
func TestProcesses(t *testing.T) {
	everywhere(t, func(t *testing.T, v *cuda.Device) {
		for _, n := range []int{2, 4} {
			t.Run(fmt.Sprint(n), func(t *testing.T) {
				pgtest.Run(t, n, func(t *testing.T, g *pg.Group) { operate(t, g, v) }, pgtest.Transport("shm"),
					pgtest.Config(pg.Config{Devices: device.List{v}}))
			})
		}
	})
}

func operate(t *testing.T, g *pg.Group, v *cuda.Device) {
	b, n, root := newBench(t, v), g.Size(), g.Size()-1
	rng := rand.New(rand.NewPCG(3, uint64(g.Rank())))
	for _, count := range []int{32 << 10, 1<<20 + 3, 4 << 20} {
		for _, c := range []struct {
			name     string
			dst, src int
			op       func(d, s pg.Buffer) pg.Operation
		}{
			{"allreduce", count, count,
				func(d, s pg.Buffer) pg.Operation { return pg.AllReduceOp{Dst: d, Src: s, Op: pg.Sum} }},
			{"allgather", n * count, count,
				func(d, s pg.Buffer) pg.Operation { return pg.AllGatherOp{Dst: d, Src: s} }},
			{"reducescatter", count, n * count,
				func(d, s pg.Buffer) pg.Operation { return pg.ReduceScatterOp{Dst: d, Src: s, Op: pg.Max} }},
			{"alltoall", n * count, n * count,
				func(d, s pg.Buffer) pg.Operation { return pg.AllToAllOp{Dst: d, Src: s} }},
			{"broadcast", count, 0,
				func(d, _ pg.Buffer) pg.Operation { return pg.BroadcastOp{X: d, Root: root} }},
		} {
			dst, src := float32s(rng, c.dst), float32s(rng, c.src)
			to, from := b.alloc(4*c.dst), b.alloc(4*c.src)
			b.fill(to, raw(dst))
			b.fill(from, raw(src))
			b.finish()
			b.must(g.Do(t.Context(), c.op(pg.BufferOf(dst), pg.BufferOf(src))))
			there := pg.Buffer{}
			if c.src > 0 {
				there = pg.DeviceBuffer(from, pg.Float32, nil)
			}
			b.must(g.Do(t.Context(), c.op(pg.DeviceBuffer(to, pg.Float32, nil), there)))
			if !bytes.Equal(b.bytes(to), raw(dst)) {
				t.Errorf("%s of %d elements: not the bits of the operation on the host", c.name, count)
			}
			b.must(v.Free(to), v.Free(from))
		}
	}
	if s := g.Topology(); !strings.Contains(s, "loaded in place") {
		t.Errorf("the memory was copied to the host: %s", s)
	}
	b.must(g.Barrier(t.Context()))
}

// TestDeadProcess: the GPU is usable after a process has died while the others loaded from its
// memory, and these go on.
func TestDeadProcess(t *testing.T) {
	const n, victim, size = 4, 2, 8 << 20
	everywhere(t, func(t *testing.T, v *cuda.Device) {
		pgtest.Run(t, n, func(t *testing.T, g *pg.Group) {
			b := newBench(t, v)
			m := b.alloc(size)
			sum := func() error {
				b.fill(m, bytes.Repeat([]byte{byte(1) << g.Rank()}, size))
				b.finish()
				err := g.Do(t.Context(), pg.AllReduceOp{Dst: pg.DeviceBuffer(m, pg.Uint8, nil), Op: pg.Sum})
				if err == nil {
					got := b.bytes(m)
					if got[0] != 15 && got[0] != 15-1<<victim || bytes.Count(got, got[:1]) != size {
						t.Fatalf("the sum is %d..", got[0])
					}
				}
				return err
			}
			b.must(sum())
			if g.Rank() == victim {
				go func() {
					time.Sleep(5 * time.Millisecond)
					pgtest.Kill(t)
				}()
			}
			for len(g.View().Active) == n {
				if err := sum(); err != nil {
					b.must(g.Recover(t.Context()))
				}
			}
			for range 5 {
				b.must(sum())
			}
			if s := g.Topology(); !strings.Contains(s, "loaded in place") {
				t.Errorf("the memory was copied to the host: %s", s)
			}
			b.must(g.Barrier(t.Context()), v.Free(m))
		}, pgtest.Transport("shm"), pgtest.Expect(victim, syscall.SIGKILL),
			pgtest.Config(pg.Config{Devices: device.List{v}, OnFailure: pg.Shrink}))
	})
}
