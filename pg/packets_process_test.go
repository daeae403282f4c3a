//go:build cgo && linux

package pg_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"
	"unsafe"

	"tutti/device"
	"tutti/device/cuda/fake"
	"tutti/device/cuda/program"
	"tutti/internal/proctest"
	"tutti/mem"
	"tutti/p2p"
	"tutti/pg"
	"tutti/pg/pgtest"
)

// memoryOps are the two ways in which streams wait for words, with the two kinds of handles.
var memoryOps = map[string]fake.Config{"memory operations, descriptors": {},
	"kernels, IPC": {NoMemoryOps: true, NoVMM: true}}

// startedSizes are those of operations in packets, of some that go through the host, because then
// PeerDevices is off, and of some that load from the other GPUs.
var startedSizes = []int{64, copiedSize, 1 << 20}

const copiedSize = 100 << 10

// A flow is a stream of a rank's program, with memory for its operations.
type flow struct {
	d *gpu
	s device.Stream
	m mem.Memory
}

// start starts several sums, each in place on the results of the one before, on all ranks' bytes.
// It waits for neither.
func (f *flow) start(g *pg.Group) (works []*pg.Work) {
	b := pg.DeviceBuffer(f.m, pg.Uint8, f.s)
	for _, op := range []pg.Reduction{pg.BitOr, pg.BitOr, pg.BitOr} {
		works = append(works, g.Start(pg.AllReduceOp{Dst: b, Op: op}))
	}
	return works
}

// fill gives the memory the rank's bytes, in the order of the stream.
func (f *flow) fill(v byte) error {
	if err := f.s.Copy(f.m, mem.Host(slices.Repeat([]byte{v}, f.m.Len()), mem.Anywhere)); err != nil {
		return err
	}
	return f.passes()
}

// passes returns an error if the stream does not do its work, or the context cannot be used.
func (f *flow) passes() error {
	e, err := f.s.Record()
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	if err := e.Wait(ctx); err != nil {
		return fmt.Errorf("the stream was not released: %w", err)
	}
	return nil
}

// sum runs the started operations to their end. It returns their error, or one that the test fails
// with.
func (f *flow) sum(ctx context.Context, g *pg.Group, want ...byte) (failed, bad error) {
	if err := f.fill(1 << g.Rank()); err != nil {
		return nil, err
	}
	for _, w := range f.start(g) {
		failed = errors.Join(failed, w.Wait(ctx))
	}
	if err := f.passes(); err != nil {
		return failed, err
	}
	got := f.d.fake.Bytes(f.m)
	if failed == nil && (!slices.Contains(want, got[0]) || slices.Max(got) != slices.Min(got)) {
		return nil, fmt.Errorf("the result is %d.., want one of %v", got[0], want)
	}
	return failed, nil
}

// goesOn fails the test unless the ranks that are left give sums of their bytes, and meet.
func (f *flow) goesOn(t *testing.T, g *pg.Group, want byte) {
	for range 3 {
		if failed, bad := f.sum(t.Context(), g, want); failed != nil || bad != nil {
			t.Fatal(failed, bad)
		}
	}
	if err := g.Barrier(t.Context()); err != nil {
		t.Fatal(err)
	}
}

// onFlow runs f on three processes, each with its GPU.
func onFlow(t *testing.T, c fake.Config, size int, cfg pg.Config, f func(t *testing.T, f *flow, g *pg.Group),
	opts ...pgtest.Option) {
	d := openGPUOf(t, ofRank(), c)
	cfg.Devices = device.List{d}
	if size == copiedSize {
		cfg.PeerDevices = "off"
	}
	pgtest.Run(t, 3, func(t *testing.T, g *pg.Group) {
		s, err := d.Stream()
		if err != nil {
			t.Fatal(err)
		}
		defer s.Close()
		f(t, &flow{d, s, d.alloc(t, make([]byte, size))}, g)
	}, append(opts, pgtest.Transport("shm"), pgtest.Config(cfg))...)
}

// A process dies among operations that others have started on their streams. These end, the streams
// are released, the contexts can be used, and the survivors go on.
func TestDeathAmongStartedOperations(t *testing.T) {
	const n, victim = 3, 1
	for name, c := range memoryOps {
		for _, size := range startedSizes {
			t.Run(fmt.Sprintf("%s, %d bytes", name, size), func(t *testing.T) {
				cfg := pg.Config{OnFailure: pg.Shrink}
				onFlow(t, c, size, cfg, func(t *testing.T, f *flow, g *pg.Group) {
					ctx := t.Context()
					for range 3 {
						if failed, bad := f.sum(ctx, g, 7); failed != nil || bad != nil {
							t.Fatal(failed, bad)
						}
					}
					if (g.Copies() == 0) != (size != copiedSize) {
						t.Errorf("%d pieces of the host's memory were used", g.Copies())
					}
					through(t, g, victim)
					if g.Rank() == victim {
						if err := f.fill(1 << victim); err != nil {
							t.Fatal(err)
						}
						f.start(g)
						pgtest.Kill(t)
					}
					for ok := true; ok; { // one survivor may have what the other has not
						failed, bad := f.sum(ctx, g, 7, 5)
						if bad != nil || failed != nil && lostRank(failed) != victim {
							t.Fatal(failed, bad)
						}
						var err error
						if ok, err = g.Agree(ctx, failed == nil && len(g.View().Active) == n); err != nil {
							t.Fatal(err)
						}
					}
					if err := g.Recover(ctx); err != nil {
						t.Fatal(err)
					}
					f.goesOn(t, g, 5)
				}, pgtest.Expect(victim, syscall.SIGKILL))
			})
		}
	}
}

// When a rank dies, one survivor has started three operations. The other one starts each after the
// one before has ended, so that it has come into the next view by then. The operations end on both,
// and the survivors go on.
func TestStartedOperationsOfAnEarlierView(t *testing.T) {
	const victim = 1
	onFlow(t, fake.Config{}, 64, pg.Config{OnFailure: pg.Shrink}, func(t *testing.T, f *flow, g *pg.Group) {
		ctx := t.Context()
		if failed, bad := f.sum(ctx, g, 7); failed != nil || bad != nil {
			t.Fatal(failed, bad)
		}
		var failed error
		switch g.Rank() {
		case victim:
			through(t, g, victim)
			pgtest.Kill(t)
		case 0:
			for i := range 3 {
				w := g.Start(pg.AllReduceOp{Dst: pg.DeviceBuffer(f.m, pg.Uint8, f.s), Op: pg.BitOr})
				if i == 0 {
					through(t, g, victim)
				}
				failed = errors.Join(failed, w.Wait(ctx))
			}
		case 2:
			works := f.start(g)
			through(t, g, victim)
			for _, w := range works {
				failed = errors.Join(failed, w.Wait(ctx))
			}
		}
		if lostRank(failed) != victim {
			t.Fatal(failed)
		}
		if err := f.passes(); err != nil {
			t.Fatal(err)
		}
		if err := g.Recover(ctx); err != nil {
			t.Fatal(err)
		}
		f.goesOn(t, g, 5)
	}, pgtest.Expect(victim, syscall.SIGKILL))
}

// After a rank was lost, graphs have the results of the host, with the parts of the others where
// they were, and the rank that does not launch one is named.
func TestGraphsWithoutARank(t *testing.T) {
	const victim, count = 1, 3_007
	cfg := pg.Config{OnFailure: pg.Shrink, Timeout: 2 * time.Minute}
	onFlow(t, fake.Config{}, 64, cfg, func(t *testing.T, f *flow, g *pg.Group) {
		ctx, me, n := t.Context(), g.Rank(), 4*count
		p := program.Open(t, f.d.fake.Path, 0)
		s, err := p.Stream()
		if err != nil {
			t.Fatal(err)
		}
		defer p.Destroy(s)
		on := f.d.Borrow(s)
		short := pg.AllReduceOp{Dst: pg.DeviceBuffer(f.d.alloc(t, make([]byte, 4)), pg.Uint32, on), Op: pg.Sum}
		if err := g.Do(ctx, short); err != nil {
			t.Fatal(err)
		}
		old, err := p.Capture(s, func() error { return g.Start(short).Wait(ctx) })
		if err != nil {
			t.Fatal(err)
		}
		if through(t, g, victim); me == victim {
			pgtest.Kill(t)
		}
		for len(g.View().Active) == 3 {
			if g.Barrier(ctx) != nil {
				if err := g.Recover(ctx); err != nil {
					t.Fatal(err)
				}
			}
		}
		var lost *pg.RankError
		if me == 0 { // a graph of the former view
			if err := errors.Join(old.Launch(s), p.Finish(s, 2*time.Minute)); err != nil {
				t.Fatal(err)
			}
		}
		if _, err := g.Admit(ctx); err != nil { // which ends alike at all ranks
			t.Fatal(err)
		}
		if err := g.Do(ctx, short); !errors.As(err, &lost) || lost.Rank != victim ||
			me == 0 && (lost.Overwritten || !strings.Contains(err.Error(), "capture it again")) {
			t.Errorf("after the launch of a graph of the former view: %v", err)
		}
		if err := errors.Join(g.Do(ctx, short), old.Close()); err != nil {
			t.Fatal(err)
		}
		dst, src := f.d.alloc(t, make([]byte, 3*n)), f.d.alloc(t, make([]byte, 3*n))
		for i, of := range []func(dst, src func(parts int) pg.Buffer) pg.Operation{
			func(dst, src func(parts int) pg.Buffer) pg.Operation {
				return pg.AllReduceOp{Dst: dst(1), Src: src(1), Op: pg.Avg}
			},
			func(dst, src func(parts int) pg.Buffer) pg.Operation {
				return pg.ReduceScatterOp{Dst: dst(1), Src: src(3), Op: pg.Sum}
			},
			func(dst, src func(parts int) pg.Buffer) pg.Operation { return pg.AllGatherOp{Dst: dst(3), Src: src(1)} },
			func(dst, src func(parts int) pg.Buffer) pg.Operation { return pg.AllToAllOp{Dst: dst(3), Src: src(3)} },
			func(dst, _ func(parts int) pg.Buffer) pg.Operation { return pg.BroadcastOp{X: dst(1), Root: 2} },
			func(dst, src func(parts int) pg.Buffer) pg.Operation {
				if me != 2 {
					return pg.ScatterOp{Dst: dst(1), Root: 2}
				}
				return pg.ScatterOp{Dst: dst(1), Src: src(3), Root: 2}
			},
		} {
			there := func(m mem.Memory) func(parts int) pg.Buffer {
				return func(parts int) pg.Buffer { return pg.DeviceBuffer(m.Slice(0, parts*n), pg.Uint32, on) }
			}
			here := func(b []byte) func(parts int) pg.Buffer {
				return func(parts int) pg.Buffer {
					return pg.BufferOf(unsafe.Slice((*uint32)(unsafe.Pointer(unsafe.SliceData(b))), parts*count))
				}
			}
			graph, err := p.Capture(s, func() error { return g.Start(of(there(dst), there(src))).Wait(ctx) })
			if err != nil {
				t.Fatal(err)
			}
			for _, m := range []mem.Memory{dst, src} {
				b := f.d.fake.Bytes(m)
				for k := range b {
					b[k] = byte(k*(me+3) + i)
				}
			}
			to, from := bytes.Clone(f.d.fake.Bytes(dst)), bytes.Clone(f.d.fake.Bytes(src))
			if err := g.Do(ctx, of(here(to), here(from))); err != nil {
				t.Fatal(err)
			}
			if err := errors.Join(graph.Launch(s), p.Finish(s, 2*time.Minute)); err != nil {
				t.Fatal(err)
			}
			if !bytes.Equal(f.d.fake.Bytes(dst), to) {
				t.Errorf("operation %d: not the host's result", i)
			}
			if err := errors.Join(g.Barrier(ctx), graph.Close()); err != nil {
				t.Fatal(err)
			}
		}
		if _, err := p.Capture(s, func() error {
			return g.Start(pg.BroadcastOp{X: pg.DeviceBuffer(dst, pg.Uint32, on), Root: victim}).Wait(ctx)
		}); !errors.As(err, &lost) || lost.Rank != victim || !errors.Is(err, p2p.ErrPeerGone) {
			t.Errorf("a broadcast of the lost rank: %v", err)
		}
		differs := pg.AllReduceOp{Dst: short.Dst, Op: []pg.Reduction{pg.Sum, 0, pg.Max}[me]}
		graph, err := p.Capture(s, func() error { return g.Start(differs).Wait(ctx) })
		if err != nil {
			t.Fatal(err)
		}
		if err := errors.Join(graph.Launch(s), p.Finish(s, 2*time.Minute)); err != nil {
			t.Fatal(err)
		}
		through(t, g, 2) // it leaves only then
		err = g.Barrier(ctx)
		var differ *pg.MismatchError
		if want := "rank 2 called allreduce (uint32 max, 1 elements)"; me == 0 && (!errors.As(err, &differ) ||
			differ.RankB != 2 || !strings.Contains(err.Error(), want)) ||
			err == nil || strings.Contains(err.Error(), "rank 1") {
			t.Errorf("%v, want %q", err, want)
		}
	}, pgtest.Expect(victim, syscall.SIGKILL))
}

// A process dies while the streams of operations that others have started do not come to them.
// These fail soon all the same. When the streams come later, they pass them.
func TestDeathWhileStreamsDoNotCome(t *testing.T) {
	const victim = 1
	for name, mode := range map[string]pg.OnFailure{"report": pg.Report, "shrink": pg.Shrink} {
		for _, size := range startedSizes {
			t.Run(fmt.Sprintf("%s, %d bytes", name, size), func(t *testing.T) {
				cfg := pg.Config{OnFailure: mode, Timeout: 3 * time.Minute}
				c := fake.Config{NoVMM: mode == pg.Shrink}
				onFlow(t, c, size, cfg, func(t *testing.T, f *flow, g *pg.Group) {
					ctx := t.Context()
					if failed, bad := f.sum(ctx, g, 7); failed != nil || bad != nil {
						t.Fatal(failed, bad)
					}
					words, free, err := device.Words(f.d, 1)
					if err != nil {
						t.Fatal(err)
					}
					defer free()
					if g.Rank() == victim {
						through(t, g, victim)
						pgtest.Kill(t)
					}
					if err := f.s.WaitValue(words[0], 1); err != nil {
						t.Fatal(err)
					}
					w := g.Start(pg.AllReduceOp{Dst: pg.DeviceBuffer(f.m, pg.Uint8, f.s), Op: pg.BitOr})
					through(t, g, victim)
					began := time.Now()
					if err := w.Wait(ctx); lostRank(err) != victim {
						t.Fatal(err)
					}
					if took := time.Since(began); took > time.Minute {
						t.Errorf("the operation failed after %v", took)
					}
					if err := g.Recover(ctx); err != nil {
						t.Fatal(err)
					}
					words[0].Word(0).Store(1)
					if err := f.passes(); err != nil {
						t.Fatal(err)
					}
					if failed, bad := f.sum(ctx, g, 5); failed != nil || bad != nil {
						t.Fatal(failed, bad)
					}
					if err := g.Barrier(ctx); err != nil {
						t.Fatal(err)
					}
				}, pgtest.Expect(victim, syscall.SIGKILL))
			})
		}
	}
}

// A process is stopped while others have started operations on their streams. These end in time,
// the streams are released, and all go on when it is back.
func TestDeadlinesOfStartedOperations(t *testing.T) {
	const victim = 2
	for name, c := range memoryOps {
		for _, size := range startedSizes {
			t.Run(fmt.Sprintf("%s, %d bytes", name, size), func(t *testing.T) {
				onFlow(t, c, size, pg.Config{}, func(t *testing.T, f *flow, g *pg.Group) {
					ctx := t.Context()
					control := pgtest.InjectFaults(t)
					failed, bad := f.sum(ctx, g, 7)
					if failed != nil || bad != nil {
						t.Fatal(failed, bad)
					}
					// On no rank do the short timeouts begin before all ranks have the sum.
					if together(t, g); g.Rank() == 0 {
						control.Stop(victim, 2*time.Second)
					}
					for failed == nil {
						if err := f.fill(1 << g.Rank()); err != nil {
							t.Fatal(err)
						}
						b := pg.DeviceBuffer(f.m, pg.Uint8, f.s)
						failed = g.StartWithin(300*time.Millisecond, pg.AllReduceOp{Dst: b, Op: pg.BitOr}).Wait(ctx)
						if err := f.passes(); err != nil {
							t.Fatalf("after %v: %v", failed, err)
						}
					}
					if err := g.Recover(ctx); err != nil {
						t.Fatal(err)
					}
					if failed, bad := f.sum(ctx, g, 7); failed != nil || bad != nil {
						t.Fatal(failed, bad)
					}
					if err := g.Barrier(ctx); err != nil {
						t.Fatal(err)
					}
				}, pgtest.Faults(nil))
			})
		}
	}
}

// Groups whose ranks cannot combine short vectors by their devices leave nothing on the devices:
// here several processes share one.
func TestPacketsRefusedLeaveNothing(t *testing.T) {
	const n = 2
	onHandles(t, func(t *testing.T, d *gpu) {
		pgtest.Run(t, n, func(t *testing.T, g *pg.Group) {
			ctx, m := t.Context(), d.alloc(t, make([]byte, 64))
			blocks := d.fake.Census().DeviceBlocks
			for range 20 {
				sub, err := g.Split(ctx, 0, g.Rank())
				if err != nil {
					t.Fatal(err)
				}
				if err := errors.Join(d.sum(ctx, sub, m, 1<<n-1), sub.Close()); err != nil {
					t.Fatal(err)
				}
			}
			d.fake.Until(t, "inboxes are freed and unmapped",
				func(c fake.Census) bool { return c.DeviceBlocks == blocks && c.Imported == 0 })
			if err := g.Barrier(ctx); err != nil {
				t.Fatal(err)
			}
		}, pgtest.Transport("shm"), pgtest.Config(pg.Config{Devices: device.List{d}}))
	})
}

// onGPUs runs f on n ranks, each a process with a GPU of its own, for each kind of handles.
func onGPUs(t *testing.T, n int, cfg pg.Config, f func(t *testing.T, d *gpu, g *pg.Group), opts ...pgtest.Option) {
	for name, c := range kindsOfHandles {
		t.Run(name, func(t *testing.T) {
			d := openGPUOf(t, ofRank(), c)
			cfg.Devices = device.List{d}
			pgtest.Run(t, n, func(t *testing.T, g *pg.Group) { f(t, d, g) },
				append(opts, pgtest.Transport("shm"), pgtest.Config(cfg))...)
		})
	}
}

// packetsLeave fails the test unless no more of a GPU's memory is used than one exchange needs that
// has kept the inboxes of others mapped. Inboxes with IPC handles stay.
func (d *gpu) packetsLeave(t *testing.T, what string, was fake.Census) {
	if !d.fake.Until(t, what, func(c fake.Census) bool {
		return c.Imported <= was.Imported && c.Physical <= was.Physical && c.Reserved <= was.Reserved &&
			(c.DeviceBlocks <= was.DeviceBlocks || !d.Info().VMM)
	}) {
		t.FailNow()
	}
}

// Groups that end leave nothing of their operations in packets on the devices of their processes,
// and no descriptor; but an inbox with an IPC handle stays until the device is closed.
func TestPacketsOfClosedGroupsAreFreedBetweenProcesses(t *testing.T) {
	const n = 3
	onGPUs(t, n, pg.Config{}, func(t *testing.T, d *gpu, g *pg.Group) {
		ctx, m := t.Context(), d.alloc(t, make([]byte, 64))
		was, files := d.fake.Census(), 0
		for round := range 12 {
			sub, err := g.Split(ctx, 0, g.Rank())
			if err != nil {
				t.Fatal(err)
			}
			for range 3 {
				if err := d.sum(ctx, sub, m, 1<<n-1); err != nil {
					t.Fatal(err)
				}
			}
			if sub.Copies() > 0 {
				t.Error("the operations have gone through the host")
			}
			if err := errors.Join(sub.Close(), g.Barrier(ctx)); err != nil {
				t.Fatal(err)
			}
			d.packetsLeave(t, "the memory of a closed group is freed", was)
			if round == 0 {
				files = proctest.Descriptors()
			}
		}
		if !d.Info().VMM {
			files += 11 // the fake driver has one for each allocation
		}
		d.fake.Until(t, "descriptors are closed", func(fake.Census) bool { return proctest.Descriptors() <= files })
		if err := g.Barrier(ctx); err != nil {
			t.Fatal(err)
		}
	})
}

// A rank dies and is replaced. What the survivors had for operations in packets with its former
// incarnation, and among themselves, is freed.
func TestPacketsOfADeadRankAreFreed(t *testing.T) {
	const n, victim = 3, 1
	onGPUs(t, n, pg.Config{OnFailure: pg.Shrink}, func(t *testing.T, d *gpu, g *pg.Group) {
		ctx, m := t.Context(), d.alloc(t, make([]byte, 64))
		var was fake.Census
		if !pgtest.Second() {
			if err := d.sum(ctx, g, m, 7); err != nil {
				t.Fatal(err)
			}
			was = d.fake.Census()
			if err := g.Barrier(ctx); err != nil {
				t.Fatal(err)
			}
			if through(t, g, victim); g.Rank() == victim {
				pgtest.Kill(t)
			}
			for in := false; !in; {
				if _, err := g.Admit(ctx); err != nil && lostRank(err) != victim {
					t.Fatal(err)
				}
				v := g.View()
				in = v.Epoch >= 3 && len(v.Active) == n
			}
		}
		for range 3 {
			if err := d.sum(ctx, g, m, 7); err != nil {
				t.Fatal(err)
			}
		}
		if !pgtest.Second() {
			d.packetsLeave(t, "the memory of former views is freed", was)
		}
		if err := g.Barrier(ctx); err != nil {
			t.Fatal(err)
		}
	}, pgtest.Expect(victim, syscall.SIGKILL), pgtest.Replace(victim))
}

// Groups end, and others make their first operation in packets, while a stream of the program waits
// for the latter. The memory of the former is freed when the stream goes on.
func TestPacketsWhileAStreamWaits(t *testing.T) {
	const n = 2
	onGPUs(t, n, pg.Config{}, func(t *testing.T, d *gpu, g *pg.Group) {
		ctx, m := t.Context(), d.alloc(t, make([]byte, 64))
		s, err := d.Stream()
		if err != nil {
			t.Fatal(err)
		}
		defer s.Close()
		words, free, err := device.Words(d, 1)
		if err != nil {
			t.Fatal(err)
		}
		defer free()
		was := d.fake.Census()
		for i := range 4 {
			sub, err := g.Split(ctx, 0, g.Rank())
			if err != nil {
				t.Fatal(err)
			}
			if err := d.sum(ctx, sub, m, 1<<n-1); err != nil {
				t.Fatal(err)
			}
			if i == 0 {
				if err := s.WaitValue(words[0], 1); err != nil {
					t.Fatal(err)
				}
			}
			if err := sub.Close(); err != nil {
				t.Fatal(err)
			}
		}
		words[0].Word(0).Store(1)
		d.packetsLeave(t, "the memory of closed groups is freed", was)
		if err := g.Barrier(ctx); err != nil {
			t.Fatal(err)
		}
	})
}
