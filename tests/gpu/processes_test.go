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

// TestProcesses: processes that share the GPU load from each other's memory, and every operation,
// blocking or started on a stream, has the result that it has on the host.
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
			before := bytes.Clone(raw(dst))
			b.must(g.Do(t.Context(), c.op(pg.BufferOf(dst), pg.BufferOf(src))))
			for _, s := range []device.Stream{nil, b.s} {
				there := pg.Buffer{}
				if c.src > 0 {
					there = pg.DeviceBuffer(from, pg.Float32, s)
				}
				if op := c.op(pg.DeviceBuffer(to, pg.Float32, s), there); s == nil {
					b.must(g.Do(t.Context(), op))
				} else {
					b.fill(to, before)
					b.must(g.Start(op).Wait(t.Context()))
				}
				if !bytes.Equal(b.bytes(to), raw(dst)) {
					t.Errorf("%s of %d elements, on a stream: %v: not the bits of the operation on the host", c.name,
						count, s != nil)
				}
			}
			b.must(v.Free(to), v.Free(from))
		}
	}
	if s := g.Topology(); !strings.Contains(s, "loaded in place") {
		t.Errorf("the memory was copied to the host: %s", s)
	}
	b.must(g.Barrier(t.Context()))
}

// TestHandles: memory has a descriptor, if the driver says that it can, or else an IPC handle.
// Another process reads and writes it, maps it once, and what it has mapped stays when the owner
// frees it, in the case of a descriptor.
func TestHandles(t *testing.T) {
	everywhere(t, func(t *testing.T, v *cuda.Device) {
		pgtest.Run(t, 2, func(t *testing.T, g *pg.Group) { exchangeMemory(t, g, v) }, pgtest.Transport("shm"))
	})
}

func exchangeMemory(t *testing.T, g *pg.Group, v *cuda.Device) {
	const most = 8 << 20
	b, other, ctx := newBench(t, v), 1-g.Rank(), t.Context()
	fill := func(rank, n int) []byte { return bytes.Repeat([]byte{byte(11*rank + n>>10 + 1)}, n) }
	for _, n := range []int{4096, 5 << 20, most} {
		own, local := b.alloc(n), b.alloc(n)
		b.fill(own, fill(g.Rank(), n))
		b.fill(local, make([]byte, n))
		mine, offset, err := v.Share(own)
		b.must(err)
		if byDescriptor := mine[0] != 1; byDescriptor != v.Info().VMM || offset >= uint64(most) {
			t.Errorf("the key of %d bytes has kind %d, and the driver has VMM: %v", n, mine[0], v.Info().VMM)
		}
		const room = device.MaxKey + 2
		all := make([]byte, 2*room)
		message := append([]byte{byte(len(mine))}, mine...)
		b.must(pg.AllGather(ctx, g, all, append(message, make([]byte, room-len(message))...)))
		offsets := make([]uint64, 2)
		b.must(pg.AllGather(ctx, g, offsets, []uint64{offset}))
		key := all[other*room+1:][:all[other*room]]
		began := time.Now()
		one, err := v.Import(uint64(other)+1, key)
		b.must(err)
		took := time.Since(began)
		two, err := v.Import(uint64(other)+1, key)
		b.must(err)
		m, err := one.Memory(offsets[other], n)
		b.must(err)
		if again, err := two.Memory(offsets[other], n); err != nil || again != m {
			t.Errorf("a second import has mapped %v, %v, the first %v", again, err, m)
		}
		b.must(b.s.Copy(local, m))
		b.finish()
		if !bytes.Equal(b.bytes(local), fill(other, n)) {
			t.Errorf("%d bytes: not what the other process has", n)
		}
		b.must(g.Barrier(ctx)) // both have read
		b.fill(local, fill(7, n))
		b.must(b.s.Copy(m, local))
		b.finish()
		b.must(g.Barrier(ctx))
		if !bytes.Equal(b.bytes(own), fill(7, n)) {
			t.Errorf("%d bytes: not what the other process has written", n)
		}
		if _, err := v.Import(9, key[:len(key)-1]); err == nil {
			t.Error("a key that was cut was imported")
		}
		b.must(g.Barrier(ctx))
		if mine[0] != 1 {
			b.must(v.Free(own))
			b.must(g.Barrier(ctx))
			b.must(b.s.Copy(local, m))
			b.finish()
			if !bytes.Equal(b.bytes(local), fill(7, n)) {
				t.Errorf("%d bytes have changed when their owner freed them", n)
			}
		}
		b.must(one.Release(true), two.Release(true))
		b.must(g.Barrier(ctx))
		if mine[0] == 1 {
			b.must(v.Free(own))
		} else if _, err := v.Import(uint64(other)+1, key); err == nil {
			t.Error("memory that was freed was imported")
		}
		b.must(v.Free(local))
		b.must(g.Barrier(ctx))
		if g.Rank() == 0 {
			t.Logf("%d bytes of kind %d: mapped within %v", n, mine[0], took)
		}
	}
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
			pgtest.Config(pg.Config{Devices: device.List{v}, OnFailure: pg.Shrink, Uniform: true}))
	})
}
