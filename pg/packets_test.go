//go:build cgo && linux

package pg

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"
	"unsafe"

	"tutti/device"
	"tutti/device/cuda"
	"tutti/device/cuda/fake"
	"tutti/device/cuda/program"
	"tutti/mem"
	"tutti/p2p"
)

// A packetRank is a rank with a GPU of the fake driver.
type packetRank struct {
	*Group
	d *cuda.Device
	f *fake.Driver
}

// number returns memory with a number of 4 bytes, of Uint32.
func (r packetRank) number(n uint32) (mem.Memory, error) {
	m, err := r.d.Alloc(4)
	if err == nil {
		binary.LittleEndian.PutUint32(r.f.Bytes(m), n)
	}
	return m, err
}

func (r packetRank) value(m mem.Memory) uint32 { return binary.LittleEndian.Uint32(r.f.Bytes(m)) }

// exchanged reports whether the group has an exchange.
func (g *Group) exchanged() bool { return g.packetsNow() != nil }

// onPackets runs f on n ranks of this process, on one GPU or each on its own.
func onPackets(t *testing.T, n int, c fake.Config, cfg Config, f func(ctx context.Context, r packetRank) error) {
	t.Helper()
	driver := fake.New(t, c)
	lib, err := cuda.LoadLibrary(driver.Path)
	if err != nil {
		t.Fatal(err)
	}
	finder := &cuda.Finder{Driver: func() (*cuda.Driver, error) { return lib, nil }}
	for i := range max(c.Devices, 1) {
		finder.Ordinals = append(finder.Ordinals, i)
	}
	t.Cleanup(func() {
		if err := finder.Close(); err != nil {
			t.Error(err)
		}
		driver.Empty(t)
	})
	cfg.Devices = finder
	each(t, n, cfg, func(ctx context.Context, g *Group) error {
		d, err := finder.Device(g.Rank() % max(c.Devices, 1))
		if err != nil {
			return err
		}
		return f(ctx, packetRank{g, d, driver})
	})
}

// Short allreduces of all lengths in blocking calls, started on a stream and without one have the
// bits of the host's, and nothing is copied to the host. Operations on the host are between them.
func TestPackets(t *testing.T) {
	for name, c := range map[string]fake.Config{"one GPU": {}, "a GPU each": {Devices: 3},
		"a GPU each, IPC":             {Devices: 3, NoVMM: true},
		"one GPU, waiting by kernels": {NoMemoryOps: true}} {
		t.Run(name, func(t *testing.T) {
			onPackets(t, 3, c, Config{}, func(ctx context.Context, r packetRank) error {
				s, m, release, err := streamWith(r.d, 2*device.ShortVector)
				if err != nil {
					return err
				}
				defer release()
				p := program.Open(t, r.f.Path, r.d.Info().Ordinal)
				own, err := p.Stream()
				if err != nil {
					return err
				}
				defer p.Destroy(own)
				const most = device.ShortVector
				dst, src := m.Slice(0, most), m.Slice(most, most)
				for i, n := range []int{4, 64, 16 << 10, most, 1000, 4, 8, 4} {
					x := make([]byte, n)
					for k := range x {
						x[k] = byte(k * (r.Rank() + 3))
					}
					copy(r.f.Bytes(src), x)
					if err := r.Do(ctx, AllReduceOp{Dst: BufferOf(x), Op: Avg}); err != nil {
						return err
					}
					on := []device.Stream{nil, s, r.d.Borrow(own)}[i%3]
					op := AllReduceOp{Dst: DeviceBuffer(dst.Slice(0, n), Uint8, on),
						Src: DeviceBuffer(src.Slice(0, n), Uint8, on), Op: Avg}
					for round := range 3 {
						clear(r.f.Bytes(dst))
						if (round+r.Rank())%2 == 0 { // blocking and started ones are the same operation
							err = r.Do(ctx, op)
						} else {
							err = r.Start(op).Wait(ctx)
						}
						if err != nil {
							return err
						}
						got := r.f.Bytes(dst)
						if !bytes.Equal(got[:n], x) || bytes.Count(got[n:], []byte{0}) != len(got)-n {
							return fmt.Errorf("%d bytes, round %d: not those of the host", n, round)
						}
					}
				}
				if r.Copies() > 0 || !r.exchanged() {
					return fmt.Errorf("the exchange is there: %v, and operations have used %d pieces of the host's "+
						"memory", r.exchanged(), r.Copies())
				}
				return nil
			})
		})
	}
}

// Operations that are started on several streams, and without one, depend on each other in the
// order of their calls. Start does not wait for the streams, which begin late.
func TestPacketsInTheOrderOfCalls(t *testing.T) {
	const n, many = 2, 60
	onPackets(t, n, fake.Config{}, Config{}, func(ctx context.Context, r packetRank) error {
		m, err := r.number(uint32(1 + r.Rank()))
		if err != nil {
			return err
		}
		var streams []device.Stream
		for range 2 {
			s, err := r.d.Stream()
			if err != nil {
				return err
			}
			defer s.Close()
			streams = append(streams, s)
		}
		if err := r.Do(ctx, AllReduceOp{Dst: DeviceBuffer(m, Uint32, nil), Op: Sum}); err != nil { // connects
			return err
		}
		words, free, err := device.Words(r.d, 1)
		if err != nil {
			return err
		}
		defer free()
		for _, s := range streams {
			if err := s.WaitValue(words[0], 1); err != nil {
				return err
			}
		}
		var works []*Work
		for i := range many {
			works = append(works, r.Start(AllReduceOp{Dst: DeviceBuffer(m, Uint32, streams[i%2]), Op: Sum}))
		}
		words[0].Word(0).Store(1)
		for i := range 6 {
			s := streams[i%2]
			if i%3 == 0 {
				s = nil
			}
			works = append(works, r.Start(AllReduceOp{Dst: DeviceBuffer(m, Uint32, s), Op: Max}))
		}
		for i, w := range works {
			if err := w.Wait(ctx); err != nil {
				return fmt.Errorf("operation %d: %w", i, err)
			}
		}
		want := uint32(3)
		for range many {
			want *= n
		}
		if got := r.value(m); got != want || r.Copies() > 0 {
			return fmt.Errorf("%d, want %d; %d pieces of the host's memory", got, want, r.Copies())
		}
		return nil
	})
}

// The first operation of a view in packets is given up before its turn on one rank, behind an
// operation that others have yet to call. It fails at all ranks.
func TestPacketsGivenUpBeforeTheirTurn(t *testing.T) {
	onPackets(t, 2, fake.Config{Devices: 2}, Config{}, func(ctx context.Context, r packetRank) error {
		m, err := r.number(uint32(r.Rank() + 1))
		if err != nil {
			return err
		}
		defer r.d.Free(m)
		short, op := ctx, AllReduceOp{Dst: DeviceBuffer(m, Uint32, nil), Op: Sum}
		before := r.Start(BarrierOp{})
		if r.Rank() == 0 {
			ended, cancel := context.WithCancel(ctx)
			cancel()
			short = ended
		} else if err := before.Wait(ctx); err != nil {
			return err
		}
		var late *TimeoutError
		if err := r.Do(short, op); !errors.As(err, &late) || late.Reporter != 0 || !errors.Is(err, context.Canceled) {
			return fmt.Errorf("%v, want that rank 0 has cancelled it", err)
		}
		if err := errors.Join(before.Wait(ctx), r.Recover(ctx)); err != nil {
			return err
		}
		if err := r.Do(ctx, op); err != nil {
			return err
		}
		if got := r.value(m); got != 3 {
			return fmt.Errorf("the sum is %d", got)
		}
		return nil
	})
}

// Programs that call Recover after some errors, and after operations that were refused since, get
// on with the same operations in packets at all ranks: the i-th has the sum of i, or ends with an
// error, at all of them. Some ranks give some up before they begin, and call Recover some time
// later.
func TestProgramsThatRecoverInPackets(t *testing.T) {
	const ranks, ops = 3, 60
	all := make([][ops]bool, ranks)
	onPackets(t, ranks, fake.Config{Devices: ranks}, Config{Uniform: true, Timeout: 20 * time.Second},
		func(ctx context.Context, r packetRank) error {
			over, cancel := context.WithDeadline(ctx, time.Now())
			defer cancel()
			by, failed := rand.New(rand.NewPCG(1, uint64(r.Rank()))), false
			m, err := r.d.Alloc(4)
			if err != nil {
				return err
			}
			defer r.d.Free(m)
			op := AllReduceOp{Dst: DeviceBuffer(m, Uint32, nil), Op: Sum}
			for i := range ops {
				binary.LittleEndian.PutUint32(r.f.Bytes(m), uint32(i))
				switch n := by.IntN(10); {
				case n < 2 && i < ops-8:
					err = r.Do(over, op)
				case n < 6:
					err = r.Do(ctx, op)
				default:
					err = r.Start(op).Wait(ctx)
				}
				if got := r.value(m); err == nil && got != uint32(ranks*i) {
					return fmt.Errorf("the sum of %d at %d ranks is %d", i, ranks, got)
				}
				all[r.Rank()][i] = err == nil
				if failed = failed || err != nil; !failed || i%4 < 2 { // 3 operations, or 1
					continue
				}
				failed = false
				time.Sleep(time.Duration(by.IntN(8)) * time.Millisecond)
				if err := r.Recover(ctx); err != nil {
					return fmt.Errorf("recover after operation %d: %w", i, err)
				}
			}
			return nil
		})
	for r := range all {
		if all[r] != all[0] {
			t.Errorf("outcomes differ:\n%v\n%v", all[0], all[r])
		}
	}
	if end := all[0][ops-4:]; slices.Contains(end, false) {
		t.Errorf("operations fail after all have recovered from the last that was given up: %v", all[0])
	}
}

// Ranks whose operations differ get errors that say how, whether both are in packets or one is on
// the host. The group works again after Recover.
func TestPacketsMismatch(t *testing.T) {
	onPackets(t, 2, fake.Config{}, Config{}, func(ctx context.Context, r packetRank) error {
		m, err := r.number(1)
		if err != nil {
			return err
		}
		b := DeviceBuffer(m, Uint32, nil)
		good := func() error {
			binary.LittleEndian.PutUint32(r.f.Bytes(m), 5)
			if err := r.Do(ctx, AllReduceOp{Dst: b, Op: Sum}); err != nil || r.value(m) != 10 {
				return fmt.Errorf("%d, %w", r.value(m), err)
			}
			return nil
		}
		large, err := r.d.Alloc(2 * device.ShortVector)
		if err != nil {
			return err
		}
		defer r.d.Free(large)
		// The first operation of the view prepares those in packets.
		for _, op := range []Operation{AllReduceOp{Dst: DeviceBuffer(large, Uint32, nil), Op: Sum}, BarrierOp{}} {
			if r.Rank() == 0 {
				op = AllReduceOp{Dst: b, Op: Sum}
			}
			err := r.Do(ctx, op)
			var differ *MismatchError
			if !errors.As(err, &differ) || strings.Contains(err.Error(), "allgather") {
				return fmt.Errorf("%v, want a mismatch with both ranks' calls", err)
			}
			calls := []string{differ.CallA, differ.CallB}
			if !slices.ContainsFunc(calls, func(s string) bool {
				return strings.Contains(s, "sum, 1 elements, on devices")
			}) {
				return fmt.Errorf("%v, want a mismatch with the call of one element", err)
			}
			if err := r.Recover(ctx); err != nil {
				return err
			}
		}
		if err := good(); err != nil {
			return err
		}
		gather := func(count int) Operation {
			return AllGatherOp{Dst: DeviceBuffer(large.Slice(0, 8*count), Uint32, nil),
				Src: DeviceBuffer(large.Slice(64<<10, 4*count), Uint32, nil)}
		}
		for name, c := range []struct {
			op    [2]Operation
			words string
		}{
			{[2]Operation{AllReduceOp{Dst: b, Op: Sum}, AllReduceOp{Dst: b, Op: Max}}, "max"},
			{[2]Operation{AllReduceOp{Dst: b, Op: Sum}, AllReduceOp{Dst: DeviceBuffer(m, Int8, nil), Op: Sum}}, "int8"},
			{[2]Operation{AllReduceOp{Dst: DeviceBuffer(large.Slice(0, 20000), Uint32, nil), Op: Sum},
				AllReduceOp{Dst: DeviceBuffer(large.Slice(0, 18000), Uint32, nil), Op: Sum}}, "4500 elements"},
			{[2]Operation{AllReduceOp{Dst: b, Op: Sum}, AllReduceOp{Dst: BufferOf([]uint32{1}), Op: Sum}},
				"in packets"},
			{[2]Operation{gather(64), AllReduceOp{Dst: b, Op: Sum}}, "64 elements a rank"},
			{[2]Operation{gather(64), gather(60)}, "60 elements a rank"},
			{[2]Operation{gather(4095), gather(4096)}, "4096 elements a rank"}, // less than 32 KiB, or not
			{[2]Operation{gather(1), AllGatherOp{Dst: BufferOf([]uint32{1, 2}), Src: BufferOf([]uint32{1})}},
				"in packets"},
		} {
			err := r.Do(ctx, c.op[r.Rank()])
			var differ *MismatchError
			if !errors.As(err, &differ) || !strings.Contains(err.Error(), c.words) {
				return fmt.Errorf("case %v: %v, want a mismatch with %q", name, err, c.words)
			}
			if err := r.Do(ctx, AllReduceOp{Dst: b, Op: Sum}); err == nil {
				return errors.New("the group has not failed")
			}
			if err := r.Recover(ctx); err != nil {
				return err
			}
			if err := good(); err != nil {
				return err
			}
		}
		return nil
	})
}

// The operation whose kernel has failed has the error, and not one before it, whose kernel has
// ended by then: that has its result, unless the group's failure has come to it first.
func TestPacketsThatFailAfterOthers(t *testing.T) {
	for range 8 {
		onPackets(t, 2, fake.Config{Devices: 2}, Config{}, func(ctx context.Context, r packetRank) error {
			s, m, release, err := streamWith(r.d, 20000)
			if err != nil {
				return err
			}
			defer release()
			all, some := DeviceBuffer(m, Float32, s), DeviceBuffer(m.Slice(0, 18000), Float32, s)
			if err := r.Do(ctx, AllReduceOp{Dst: all, Op: Sum}); err != nil {
				return err
			}
			first := r.Start(AllReduceOp{Dst: all, Op: Sum})
			second := r.Start(AllReduceOp{Dst: []Buffer{all, some}[r.Rank()], Op: Sum})
			for name, err := range map[string]error{"the first": first.Wait(ctx), "the second": second.Wait(ctx)} {
				if err == nil && name == "the first" {
					continue
				}
				if err == nil || !strings.Contains(err.Error(), "4500 elements") ||
					!strings.Contains(err.Error(), "5000 elements") {
					return fmt.Errorf("%s: %w", name, err)
				}
			}
			return nil
		})
	}
}

// A rank whose driver does not say whether a stream is captured fails its operation at all ranks,
// whatever its length.
func TestStreamsThatCannotBeAsked(t *testing.T) {
	onPackets(t, 2, fake.Config{Devices: 2}, Config{}, func(ctx context.Context, r packetRank) error {
		p := program.Open(t, r.f.Path, r.d.Info().Ordinal)
		s, err := p.Stream()
		if err != nil {
			return err
		}
		defer p.Destroy(s)
		m, err := r.d.Alloc(1 << 20)
		if err != nil {
			return err
		}
		for _, n := range []int{4, 1 << 20} {
			op := AllReduceOp{Dst: DeviceBuffer(m.Slice(0, n), Uint8, r.d.Borrow(s)), Op: Sum}
			if err := errors.Join(r.Do(ctx, op), r.Barrier(ctx)); err != nil {
				return err
			}
			if r.Rank() == 0 {
				r.f.Fail("cuStreamIsCapturing", 1, fake.NotSupported)
				err = r.Start(op).Wait(ctx)
			} else {
				err = r.Do(ctx, AllReduceOp{Dst: DeviceBuffer(m.Slice(0, n), Uint8, nil), Op: Sum})
			}
			if err == nil || errors.As(err, new(*TimeoutError)) {
				return fmt.Errorf("%d bytes: %w", n, err)
			}
			if err := r.Recover(ctx); err != nil {
				return err
			}
		}
		return p.Finish(s, 20*time.Second)
	})
}

// Why short vectors go through the hosts is a warning, and in what is shown of the group; but not
// if its ranks can have no exchange at all.
func TestWhyShortVectorsGoThroughTheHosts(t *testing.T) {
	const says = "short vectors through the hosts: rank "
	var log bytes.Buffer
	cfg := Config{Logger: slog.New(slog.NewTextHandler(&log, &slog.HandlerOptions{Level: slog.LevelWarn}))}
	onPackets(t, 2, fake.Config{Devices: 2}, cfg, func(ctx context.Context, r packetRank) error {
		m, err := r.number(1)
		if err == nil {
			err = r.Barrier(ctx)
		}
		if err != nil {
			return err
		}
		if r.Rank() == 0 {
			r.f.Fail("cuMemCreate", 1, fake.OutOfMemory)
		}
		op := AllReduceOp{Dst: DeviceBuffer(m, Uint32, nil), Op: Sum}
		if err := errors.Join(r.Barrier(ctx), r.Do(ctx, op)); err != nil {
			return err
		}
		if got := r.value(m); got != 2 || r.exchanged() {
			return fmt.Errorf("the sum is %d, and there is an exchange: %v", got, r.exchanged())
		}
		r.job.proxy.Lock()
		shown := r.glance().Devices
		r.job.proxy.Unlock()
		if text := r.Topology(); !strings.Contains(text, says) || !strings.Contains(shown, says) {
			return fmt.Errorf("the group is %q, its memory %q", text, shown)
		}
		return nil
	})
	if n := strings.Count(log.String(), "short vectors"); n != 2 {
		t.Errorf("%d warnings, want one of each rank: %s", n, log.String())
	}
	each(t, 2, cfg, func(ctx context.Context, g *Group) error {
		if text := g.Topology(); strings.Contains(text, "short vectors") {
			return errors.New(text)
		}
		return nil
	})
}

// begun returns a stream, a number in the device's memory and their sum over the ranks, which has
// run once.
func (r packetRank) begun(ctx context.Context) (s device.Stream, m mem.Memory, op AllReduceOp, err error) {
	if s, err = r.d.Stream(); err != nil {
		return nil, m, op, err
	}
	if m, err = r.number(1); err == nil {
		op = AllReduceOp{Dst: DeviceBuffer(m, Uint32, s), Op: Sum}
		err = r.Do(ctx, op)
	}
	if err != nil {
		s.Close()
	}
	return s, m, op, err
}

// After an operation in packets, a rank waits for no other.
func TestPacketsAwaitNobodyAfterwards(t *testing.T) {
	onPackets(t, 2, fake.Config{}, Config{}, func(ctx context.Context, r packetRank) error {
		s, _, _, err := r.begun(ctx)
		if err != nil {
			return err
		}
		defer s.Close()
		r.job.proxy.Lock()
		defer r.job.proxy.Unlock()
		if slots := r.run.Awaits(); len(slots) > 0 {
			return fmt.Errorf("it waits for %v", slots)
		}
		return nil
	})
}

// A rank that does not come leaves the others with a timeout, in blocking and in started calls. The
// stream is released and goes on, and the group after Recover.
func TestPacketsTimeout(t *testing.T) {
	for _, started := range []bool{false, true} {
		const limit = 300 * time.Millisecond
		begun, timedOut := make(chan struct{}), make(chan struct{})
		onPackets(t, 2, fake.Config{}, Config{}, func(ctx context.Context, r packetRank) error {
			s, m, op, err := r.begun(ctx)
			if r.Rank() == 1 {
				close(begun)
			}
			if err != nil {
				return err
			}
			defer s.Close()
			if <-begun; r.Rank() == 1 {
				<-timedOut
			} else {
				if started {
					err = r.StartWithin(limit, op).Wait(ctx)
				} else {
					short, cancel := context.WithCancel(ctx)
					go func() { // rank 1 does not come
						defer cancel()
						for r.f.Census().Resident == 0 && ctx.Err() == nil {
							time.Sleep(time.Millisecond)
						}
						time.Sleep(limit)
					}()
					err = r.Do(short, op)
					cancel()
				}
				close(timedOut)
				var late *TimeoutError
				if !errors.As(err, &late) || len(late.Missing) != 1 || late.Missing[0].Rank != 1 {
					return fmt.Errorf("%v, want that rank 1 is missing", err)
				}
				if err := reach(ctx, s); err != nil {
					return fmt.Errorf("the stream: %w", err)
				}
			}
			if err := r.Recover(ctx); err != nil {
				return err
			}
			binary.LittleEndian.PutUint32(r.f.Bytes(m), 4)
			if err := r.Start(op).Wait(ctx); err != nil || r.value(m) != 8 {
				return fmt.Errorf("after that: %d, %w", r.value(m), err)
			}
			return nil
		})
	}
}

// Started operations end, and their streams pass, when the group is aborted or closed by another
// rank.
func TestPacketsAbort(t *testing.T) {
	for _, abort := range []bool{true, false} {
		ready := make(chan struct{})
		onPackets(t, 2, fake.Config{}, Config{}, func(ctx context.Context, r packetRank) error {
			s, _, op, err := r.begun(ctx)
			if err != nil {
				return err
			}
			defer s.Close()
			if r.Rank() == 1 {
				if <-ready; abort {
					r.Abort(errors.New("enough"))
					return nil
				}
				return r.Close()
			}
			close(ready)
			works := []*Work{r.Start(op), r.Start(op)}
			for _, w := range works {
				err := w.Wait(ctx)
				if rank := (*RankError)(nil); abort != errors.Is(err, ErrAborted) || abort == errors.As(err, &rank) {
					return fmt.Errorf("aborted %v: %v", abort, err)
				}
			}
			return reach(ctx, s)
		})
	}
}

// A graph of operations in packets is captured and launched many times, between other operations.
// Other operations are refused in a capture, and those before the first exchange. A graph of a view
// that is over has no result, and the next operation says so.
func TestPacketsInGraphs(t *testing.T) {
	const launches = 7
	onPackets(t, 2, fake.Config{}, Config{}, func(ctx context.Context, r packetRank) error {
		p := program.Open(t, r.f.Path, 0)
		s, err := p.Stream()
		if err != nil {
			return err
		}
		defer p.Destroy(s)
		m, err := r.number(1)
		if err != nil {
			return err
		}
		pair, err := r.d.Alloc(4)
		if err != nil {
			return err
		}
		on := r.d.Borrow(s)
		op := AllReduceOp{Dst: DeviceBuffer(m, Uint32, on), Op: Sum}
		unconnected, err := p.Capture(s, func() error {
			if err := r.Start(op).Wait(ctx); !errors.Is(err, errors.ErrUnsupported) ||
				!strings.Contains(err.Error(), "once before the capture") {
				return fmt.Errorf("before the first exchange: %w", err)
			}
			return nil
		})
		if err != nil {
			return err
		}
		if err := errors.Join(unconnected.Close(), r.Do(ctx, op)); err != nil {
			return err
		}
		capture := func() (*program.Graph, error) {
			return p.Capture(s, func() error {
				for name, o := range map[string]Operation{
					"own lengths": AllGatherVOp{Dst: DeviceBuffer(pair, Uint32, on),
						Src: DeviceBuffer(m.Slice(0, 4*r.Rank()), Uint32, on), Counts: []int{0, 1}},
					"a send": SendOp{X: DeviceBuffer(m, Uint32, on), To: 1 - r.Rank()},
				} {
					if err := r.Start(o).Wait(ctx); !errors.Is(err, errors.ErrUnsupported) {
						return fmt.Errorf("%s: %w", name, err)
					}
				}
				if err := r.Do(ctx, op); !errors.Is(err, errors.ErrUnsupported) {
					return fmt.Errorf("a blocking call: %w", err)
				}
				for range 2 {
					if err := r.Start(op).Wait(ctx); err != nil {
						return err
					}
				}
				return nil
			})
		}
		graph, err := capture()
		if err != nil {
			return err
		}
		defer func() { graph.Close() }()
		run := func(doubled int) error {
			for range launches {
				if err := graph.Launch(s); err != nil {
					return err
				}
				if err := r.Start(op).Wait(ctx); err != nil {
					return err
				}
			}
			if err := p.Finish(s, 20*time.Second); err != nil {
				return err
			}
			if got := r.value(m); got != 1<<doubled {
				return fmt.Errorf("%d, want %d", got, 1<<doubled)
			}
			return nil
		}
		if err := run(1 + 3*launches); err != nil {
			return err
		}
		// Another view, of the same ranks.
		if err := r.Do(ctx, []Operation{BarrierOp{}, BroadcastOp{X: BufferOf([]byte{1})}}[r.Rank()]); err == nil {
			return errors.New("the operations do not differ")
		}
		if err := r.Recover(ctx); err != nil {
			return err
		}
		before := r.value(m)
		if err := errors.Join(graph.Launch(s), p.Finish(s, 20*time.Second)); err != nil {
			return err
		}
		err = r.Barrier(ctx)
		if !errors.As(err, new(*RankError)) || !strings.Contains(err.Error(), "capture it again") ||
			r.value(m) != before {
			return fmt.Errorf("after a graph of another view: %v, and %d instead of %d", err, r.value(m), before)
		}
		if err := errors.Join(r.Recover(ctx), r.Do(ctx, op), graph.Close()); err != nil {
			return err
		}
		if graph, err = capture(); err != nil {
			return err
		}
		binary.LittleEndian.PutUint32(r.f.Bytes(m), 1)
		if err := r.Barrier(ctx); err != nil {
			return err
		}
		return run(3 * launches)
	})
}

// A graph has collectives of every kind whose parts are of equal length, of lengths that take one
// packet and several rounds of packets, in place where that may be. Every launch has the results of
// the same operations on host memory.
func TestEveryKindInGraphs(t *testing.T) {
	for _, n := range []int{1, 3} {
		t.Run(fmt.Sprintf("%d ranks", n), func(t *testing.T) { testEveryKindInGraphs(t, n) })
	}
}

func testEveryKindInGraphs(t *testing.T, n int) {
	const launches = 2
	onPackets(t, n, fake.Config{Devices: n}, Config{Timeout: 2 * time.Minute}, func(ctx context.Context,
		r packetRank) error {
		p := program.Open(t, r.f.Path, r.d.Info().Ordinal)
		s, err := p.Stream()
		if err != nil {
			return err
		}
		defer p.Destroy(s)
		on := r.d.Borrow(s)
		return r.graphsOfEveryKind(ctx, p, s, on, n-1, []int{1, 37, device.ShortVector/4 + 9}, launches)
	})
}

// graphsOfEveryKind has graphs of one operation each, and compares what they do.
func (r packetRank) graphsOfEveryKind(ctx context.Context, p *program.Program, s uintptr, on device.Stream, root int,
	counts []int, launches int) error {
	first, err := r.number(1)
	if err != nil {
		return err
	}
	if err := r.Do(ctx, AllReduceOp{Dst: DeviceBuffer(first, Uint32, on), Op: Sum}); err != nil {
		return err
	}
	size, me := r.Size(), r.Rank()
	for _, count := range counts {
		src, err := r.d.Alloc(4 * size * count)
		if err != nil {
			return err
		}
		dst, err := r.d.Alloc(4 * size * count)
		if err != nil {
			return err
		}
		// Of each buffer, vectors and parts are at the beginning.
		for _, c := range []struct {
			name string
			of   func(dst, src func(at, parts int) Buffer) Operation
		}{
			{"allreduce", func(dst, src func(at, parts int) Buffer) Operation {
				return AllReduceOp{Dst: dst(0, 1), Src: src(0, 1), Op: Avg}
			}},
			{"allreduce in place", func(dst, _ func(at, parts int) Buffer) Operation {
				return AllReduceOp{Dst: dst(0, 1), Op: Max}
			}},
			{"reducescatter", func(dst, src func(at, parts int) Buffer) Operation {
				return ReduceScatterOp{Dst: dst(0, 1), Src: src(0, size), Op: Sum}
			}},
			{"allgather", func(dst, src func(at, parts int) Buffer) Operation {
				return AllGatherOp{Dst: dst(0, size), Src: src(0, 1)}
			}},
			{"allgather in place", func(dst, _ func(at, parts int) Buffer) Operation {
				return AllGatherOp{Dst: dst(0, size), Src: dst(me, 1)}
			}},
			{"alltoall", func(dst, src func(at, parts int) Buffer) Operation {
				return AllToAllOp{Dst: dst(0, size), Src: src(0, size)}
			}},
			{"allgatherv", func(dst, src func(at, parts int) Buffer) Operation {
				return AllGatherVOp{Dst: dst(0, size), Src: src(0, 1), Counts: slices.Repeat([]int{count}, size)}
			}},
			{"alltoallv", func(dst, src func(at, parts int) Buffer) Operation {
				all := slices.Repeat([]int{count}, size)
				return AllToAllVOp{Dst: dst(0, size), Src: src(0, size), SendCounts: all, RecvCounts: all}
			}},
			{"broadcast", func(dst, _ func(at, parts int) Buffer) Operation {
				return BroadcastOp{X: dst(0, 1), Root: root}
			}},
			{"reduce", func(dst, _ func(at, parts int) Buffer) Operation {
				return ReduceOp{X: dst(0, 1), Op: Min, Root: root}
			}},
			{"gather", func(dst, src func(at, parts int) Buffer) Operation {
				op := GatherOp{Src: src(0, 1), Root: root}
				if me == root {
					op.Dst = dst(0, size)
				}
				return op
			}},
			{"scatter", func(dst, src func(at, parts int) Buffer) Operation {
				op := ScatterOp{Dst: dst(0, 1), Root: root}
				if me == root {
					op.Src = src(0, size)
				}
				return op
			}},
		} {
			if 4*count > device.ShortVector && c.name != "allreduce" && c.name != "alltoall" {
				continue // the rounds are those of these
			}
			there := func(m mem.Memory) func(at, parts int) Buffer {
				return func(at, parts int) Buffer {
					return DeviceBuffer(m.Slice(4*at*count, 4*parts*count), Uint32, on)
				}
			}
			hosts := func(b []byte) func(at, parts int) Buffer {
				return func(at, parts int) Buffer {
					x := unsafe.Slice((*uint32)(unsafe.Pointer(unsafe.SliceData(b))), len(b)/4)
					return BufferOf(x[at*count:][:parts*count])
				}
			}
			graph, err := p.Capture(s, func() error { return r.Start(c.of(there(dst), there(src))).Wait(ctx) })
			if err != nil {
				return fmt.Errorf("%s of %d: %w", c.name, count, err)
			}
			for launch := range launches {
				for i, m := range []mem.Memory{src, dst} {
					b := r.f.Bytes(m)
					for k := range b {
						b[k] = byte(k*(me+3) + launch + 7*i + k>>8)
					}
				}
				a, b := bytes.Clone(r.f.Bytes(src)), bytes.Clone(r.f.Bytes(dst))
				if err := r.Do(ctx, c.of(hosts(b), hosts(a))); err != nil {
					return err
				}
				if err := errors.Join(graph.Launch(s), p.Finish(s, 2*time.Minute)); err != nil {
					return err
				}
				if !bytes.Equal(r.f.Bytes(dst), b) || !bytes.Equal(r.f.Bytes(src), a) {
					return fmt.Errorf("%s of %d, launch %d: not the host's result", c.name, count, launch)
				}
			}
			if err := graph.Close(); err != nil {
				return err
			}
		}
		if err := errors.Join(r.d.Free(src), r.d.Free(dst)); err != nil {
			return err
		}
	}
	return nil
}

// The launch of a graph that another rank does not repeat ends when Config.Timeout is over, and the
// next operation fails with that.
func TestPacketsOfAGraphThatWaitsInVain(t *testing.T) {
	over := make(chan struct{}) // closed when rank 0's launch has ended
	end := sync.OnceFunc(func() { close(over) })
	onPackets(t, 2, fake.Config{}, Config{}, func(ctx context.Context, r packetRank) error {
		if r.Rank() == 0 {
			defer end()
		}
		p := program.Open(t, r.f.Path, 0)
		s, err := p.Stream()
		if err != nil {
			return err
		}
		defer p.Destroy(s)
		m, err := r.number(1)
		if err != nil {
			return err
		}
		op := AllReduceOp{Dst: DeviceBuffer(m, Uint32, r.d.Borrow(s)), Op: Sum}
		if err := r.Do(ctx, op); err != nil {
			return err
		}
		if r.Rank() == 0 {
			patience := r.job.timeout
			r.SetTimeout(4 * time.Second) // for the graph alone: what comes before and after it succeeds
			graph, err := p.Capture(s, func() error { return r.Start(op).Wait(ctx) })
			if err != nil {
				return err
			}
			defer graph.Close()
			if err := errors.Join(graph.Launch(s), p.Finish(s, 20*time.Second)); err != nil {
				return err
			}
			r.SetTimeout(patience)
			end()
		}
		<-over
		err = r.Barrier(ctx)
		var late *TimeoutError
		if err == nil || r.Rank() == 0 && (!strings.Contains(err.Error(), "waiting for rank 1 ") ||
			!errors.As(err, &late) || late.Missing[0].Rank != 1) {
			return fmt.Errorf("%v", err)
		}
		if err := r.Recover(ctx); err != nil {
			return err
		}
		return r.Do(ctx, op)
	})
}

// captured captures an operation on a stream of the program, in a group that has an exchange.
func (r packetRank) captured(ctx context.Context, p *program.Program, s uintptr, op Operation) (*program.Graph, error) {
	m, err := r.number(1)
	if err != nil {
		return nil, err
	}
	if err := r.Do(ctx, AllReduceOp{Dst: DeviceBuffer(m, Uint32, nil), Op: Sum}); err != nil {
		return nil, err
	}
	return p.Capture(s, func() error { return r.Start(op).Wait(ctx) })
}

// A graph whose operations differ between the ranks has no result, and the error says what each
// rank did. An operation before it, whose kernel has ended and which has the turn later, has its
// result; one behind it has the graph's error.
func TestOperationsAroundAGraphThatFails(t *testing.T) {
	for name, early := range map[string]bool{"the one behind is started later": false, "it is started before": true} {
		t.Run(name, func(t *testing.T) { testAroundAGraph(t, early) })
	}
}

func testAroundAGraph(t *testing.T, early bool) {
	var ended sync.WaitGroup
	ended.Add(2)
	onPackets(t, 2, fake.Config{Devices: 2}, Config{}, func(ctx context.Context, r packetRank) error {
		done := sync.OnceFunc(ended.Done)
		defer done()
		p := program.Open(t, r.f.Path, r.d.Info().Ordinal)
		s, err := p.Stream()
		if err != nil {
			return err
		}
		defer p.Destroy(s)
		late, err := r.d.Stream()
		if err != nil {
			return err
		}
		defer late.Close()
		words, free, err := device.Words(r.d, 1)
		if err != nil {
			return err
		}
		defer free()
		a, err := r.number(1)
		if err != nil {
			return err
		}
		b, err := r.number(1)
		if err != nil {
			return err
		}
		long, err := r.d.Alloc(2 * device.ShortVector)
		if err != nil {
			return err
		}
		on := r.d.Borrow(s)
		graph, err := r.captured(ctx, p, s, AllReduceOp{Dst: DeviceBuffer(b, Uint32, on),
			Op: []Reduction{Sum, Max}[r.Rank()]})
		if err != nil {
			return err
		}
		defer graph.Close()
		if err := late.WaitValue(words[0], 1); err != nil {
			return err
		}
		turn := r.Start(AllReduceOp{Dst: DeviceBuffer(long, Uint32, late), Op: Sum}) // keeps the turn
		before := r.Start(AllReduceOp{Dst: DeviceBuffer(a, Uint32, on), Op: Sum})
		if err := p.Finish(s, 20*time.Second); err != nil {
			return err
		}
		if err := errors.Join(graph.Launch(s), p.Finish(s, 20*time.Second)); err != nil {
			return err
		}
		start := func() *Work { return r.Start(AllReduceOp{Dst: DeviceBuffer(a, Uint32, on), Op: Avg}) }
		var behind *Work
		if early { // the other rank's failure may come before this rank has done with the others
			behind = start()
		}
		words[0].Word(0).Store(1)
		if err := errors.Join(turn.Wait(ctx), before.Wait(ctx)); !early && (err != nil || r.value(a) != 2) {
			return fmt.Errorf("operations before the graph: %d, %w", r.value(a), err)
		}
		done()
		if ended.Wait(); !early {
			behind = start()
		}
		err = behind.Wait(ctx)
		for _, want := range []string{"launch of a graph", "allreduce (uint32 sum, 1 elements)",
			"allreduce (uint32 max, 1 elements)"} {
			if err == nil || !strings.Contains(err.Error(), want) {
				return fmt.Errorf("an operation behind the graph: %w, want %q", err, want)
			}
		}
		return r.Recover(ctx)
	})
}

// launched captures a sum of count numbers that are the rank's slot + 1 in h, a group of this rank,
// and runs f with what launches it once and with what waits for the stream and returns the last
// sum.
func (r packetRank) launched(ctx context.Context, t *testing.T, h *Group, count int, f func(launch func() error,
	sum func() (uint32, error)) error) error {
	p := program.Open(t, r.f.Path, r.d.Info().Ordinal)
	s, err := p.Stream()
	if err != nil {
		return err
	}
	defer p.Destroy(s)
	m, err := r.d.Alloc(4 * count)
	if err != nil {
		return err
	}
	defer r.d.Free(m)
	for b := r.f.Bytes(m); len(b) > 0; b = b[4:] {
		binary.LittleEndian.PutUint32(b, uint32(h.Rank()+1))
	}
	graph, err := packetRank{h, r.d, r.f}.captured(ctx, p, s,
		AllReduceOp{Dst: DeviceBuffer(m, Uint32, r.d.Borrow(s)), Op: Sum})
	if err != nil {
		return err
	}
	defer graph.Close()
	return f(func() error { return graph.Launch(s) }, func() (uint32, error) {
		err := p.Finish(s, 20*time.Second)
		if err != nil { // nothing is freed before the graph ends
			h.Abort(err)
		}
		return r.value(m.Slice(m.Len()-4, 4)), err
	})
}

// A graph that waits for a rank which leaves the group, or has called Recover instead of launching
// it, ends when this rank has heard of that, without a call of this rank, and the next operation
// names the rank.
func TestLeavingEndsGraphsOfOthers(t *testing.T) {
	gone := func(text string) func(err error) bool {
		return func(err error) bool {
			var lost *RankError
			return errors.As(err, &lost) && lost.Rank == 1 && strings.Contains(err.Error(), text)
		}
	}
	ends := func(_ context.Context, h *Group) error { return h.Close() }
	aborts := func(_ context.Context, h *Group) error { h.Abort(errors.New("enough")); return nil }
	stays := func(context.Context, *Group) error { return nil }
	for name, c := range map[string]struct {
		subgroup bool
		leave    func(ctx context.Context, h *Group) error
		is       func(err error) bool
		after    func(ctx context.Context, h *Group) error
	}{
		"it aborts the group":  {false, aborts, func(err error) bool { return errors.Is(err, ErrAborted) }, stays},
		"it closes the group":  {false, ends, gone("it closed its group"), stays},
		"it closes a subgroup": {true, ends, gone(errDeserted.Error()), stays},
		"it recovers": {false, func(ctx context.Context, h *Group) error {
			given, cancel := context.WithCancel(ctx)
			cancel()
			if err := h.Barrier(given); !errors.Is(err, context.Canceled) {
				return fmt.Errorf("a barrier that is given up: %w", err)
			}
			return h.Recover(ctx)
		}, gone(p2p.ErrLeft.Error()), func(ctx context.Context, h *Group) error { return h.Recover(ctx) }},
	} {
		t.Run(name, func(t *testing.T) {
			launched := make(chan struct{})
			cfg := Config{Timeout: 5 * time.Minute}
			onPackets(t, 2, fake.Config{Devices: 2}, cfg, func(ctx context.Context, r packetRank) error {
				h := r.Group
				if c.subgroup {
					var err error
					if h, err = r.Split(ctx, 0, r.Rank()); err != nil {
						return err
					}
					defer h.Close()
				}
				return r.launched(ctx, t, h, 1, func(launch func() error, sum func() (uint32, error)) error {
					if r.Rank() == 1 {
						<-launched
						return c.leave(ctx, h)
					}
					err := launch()
					close(launched)
					if err != nil {
						return err
					}
					if got, err := sum(); err != nil || got != 1 {
						return fmt.Errorf("after the launch: %d, %w", got, err)
					}
					if err := h.Barrier(ctx); !c.is(err) {
						return fmt.Errorf("the next operation: %w", err)
					}
					return c.after(ctx, h)
				})
			})
		})
	}
}

// Every rank has the results of the last graph that it has launched, although others have closed
// the group, or called Recover, as soon as they had theirs.
func TestLeavingTakesNothingFromGraphs(t *testing.T) {
	const n, rounds, count = 3, 20, device.ShortVector / 2 // which takes two rounds of packets
	cfg := Config{Progress: true}                          // the others hear of it at once
	onPackets(t, n, fake.Config{Devices: n}, cfg, func(ctx context.Context, r packetRank) error {
		for i := range rounds {
			h, err := r.Split(ctx, 0, r.Rank())
			if err != nil {
				return err
			}
			err = r.launched(ctx, t, h, count, func(launch func() error, sum func() (uint32, error)) error {
				if err := errors.Join(launch(), launch()); err != nil {
					return err
				}
				if got, err := sum(); err != nil || got != 6*n {
					return fmt.Errorf("%d, want %d: %w", got, 6*n, err)
				}
				if i%2 == 1 {
					return h.Recover(ctx)
				}
				return nil
			})
			if err := errors.Join(err, h.Close()); err != nil {
				return fmt.Errorf("round %d: %w", i, err)
			}
		}
		return nil
	})
}

// Ranks make an exchange of messages of one view, from all its ranks and no others.
func TestMessagesOfOneView(t *testing.T) {
	message := func(view, stage byte) []byte {
		b := make([]byte, messageSize)
		b[messageView], b[messageStage], b[messageText] = view, stage, view+stage
		return b
	}
	none := make([]byte, messageSize)
	for name, c := range map[string]struct {
		all    [][]byte
		active []int
		want   bool
	}{
		"one view":                         {[][]byte{message(4, 1), message(4, 1)}, []int{0, 1}, true},
		"a slot that is empty":             {[][]byte{message(4, 1), none, message(4, 1)}, []int{0, 2}, true},
		"a rank was lost since":            {[][]byte{message(4, 1), none, message(4, 1)}, []int{0, 1, 2}, false},
		"a rank came in since":             {[][]byte{message(4, 1), message(4, 1), message(4, 1)}, []int{0, 2}, false},
		"a rank has seen the next view":    {[][]byte{message(4, 1), none, message(5, 1)}, []int{0, 2}, false},
		"a rank begins, another continues": {[][]byte{message(4, 2), message(4, 1)}, []int{0, 1}, false},
	} {
		if got := alike(bytes.Join(c.all, nil), c.all[0][:messageHead], c.active); got != c.want {
			t.Errorf("%s: alike is %v", name, got)
		}
	}
}

// A group is closed with many operations in packets on a stream that does not come: Close does not
// wait for each of them. They pass when the stream comes.
func TestCloseWithManyPacketsOfAHeldStream(t *testing.T) {
	const many = 20
	onPackets(t, 2, fake.Config{Devices: 2}, Config{}, func(ctx context.Context, r packetRank) error {
		s, _, op, err := r.begun(ctx)
		if err != nil {
			return err
		}
		defer s.Close()
		if r.Rank() == 1 {
			return nil
		}
		let, err := hold(r.d, s)
		if err != nil {
			return err
		}
		defer let()
		var works []*Work
		for range many {
			works = append(works, r.Start(op))
		}
		began := time.Now()
		if err := r.Close(); err != nil {
			return err
		}
		if took := time.Since(began); took > many*grace/2 {
			return fmt.Errorf("Close took %v", took)
		}
		for _, w := range works {
			if err := w.Wait(ctx); !errors.Is(err, ErrClosed) {
				return err
			}
		}
		let()
		return reach(ctx, s)
	})
}

// A device makes its part of an exchange behind work of the program that does not end, without a
// time limit. The call ends when the group is aborted or closed.
func TestExchangeThatIsHeldUpEndsWithTheGroup(t *testing.T) {
	for name, c := range ends {
		if name == "a close by peer" { // the time limit bounds it
			continue
		}
		for _, started := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s, started %v", name, started), func(t *testing.T) {
				waits := make(chan struct{})
				waiting := sync.OnceFunc(func() { close(waits) })
				f := fake.Config{Devices: 2, Queues: 1}
				onPackets(t, 2, f, Config{Timeout: -1}, func(ctx context.Context, r packetRank) error {
					defer waiting()
					if err := r.Barrier(ctx); err != nil { // links the ranks
						return err
					}
					if r.Rank() == 1 {
						if <-waits; c.peer {
							return c.do(r.Group)
						}
						return nil
					}
					m, err := r.number(1)
					if err != nil {
						return err
					}
					s, err := r.d.Stream()
					if err != nil {
						return err
					}
					defer s.Close()
					let, err := hold(r.d, s)
					if err != nil {
						return err
					}
					blocks := r.f.Census().DeviceBlocks
					wait := func() {
						for r.f.Census().DeviceBlocks == blocks {
							time.Sleep(time.Millisecond)
						}
					}
					op := AllReduceOp{Dst: DeviceBuffer(m, Uint32, nil), Op: Sum}
					return endHeld(r.Group, c, waiting, wait, let, func() error {
						if started {
							return r.Start(op).Wait(ctx)
						}
						return r.Do(ctx, op)
					})
				})
			})
		}
	}
}
