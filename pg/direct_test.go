package pg

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"log/slog"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"tutti/device"
	"tutti/device/devicetest"
	"tutti/mem"
)

// Large operations on a device that several ranks of a process use load from the memory of each
// other, with the results of operations on the host.
func TestDirectOperationsOnDevices(t *testing.T) {
	for _, n := range []int{2, 3, 6} {
		d := devicetest.NewLate("cuda:0", 7, 50*time.Microsecond)
		d.Lend()
		operateWith(t, n, []int{40_001}, func(int) device.Device { return d })
		if blocks, host := d.Allocated(); blocks > 0 || host > 0 {
			t.Errorf("%d allocations of the device's memory and %d of the host's are left", blocks, host)
		}
	}
}

// Ranks load from each other's devices, and say so, from the first large operation on; an operation
// that is not on all ranks' devices is done all the same.
func TestDirectOperationsAreChosenByAll(t *testing.T) {
	const n, count = 3, 100_000
	d := devicetest.NewLate("cuda:0", 7, 0)
	d.Lend()
	each(t, n, Config{Devices: device.List{d}}, func(ctx context.Context, g *Group) error {
		m, err := d.Alloc(4 * count)
		if err != nil {
			return err
		}
		defer d.Free(m)
		s, err := d.Stream()
		if err != nil {
			return err
		}
		defer s.Close()
		for round, direct := range []bool{true, false, true} {
			x := make([]byte, 4*count)
			for i := range x {
				x[i] = byte(1 << g.Rank())
			}
			b := BufferOf(x)
			if direct || g.Rank() != 1 {
				if err := s.Copy(m, hostMemory(x)); err != nil {
					return err
				}
				b = DeviceBuffer(m, Uint8, s)
			}
			before := g.Copies()
			for range 3 {
				if err := g.Do(ctx, AllReduceOp{Dst: b, Op: Max}); err != nil {
					return err
				}
			}
			if b.Location != "" {
				if err := s.Copy(hostMemory(x), m); err != nil {
					return err
				}
				if err := reach(ctx, s); err != nil {
					return err
				}
			}
			if want := bytes.Repeat([]byte{1 << (n - 1)}, 4*count); !bytes.Equal(x, want) {
				return fmt.Errorf("round %d: %d.., want %d..", round, x[:4], want[:4])
			}
			if copied := g.Copies() > before; copied == direct && g.Rank() != 1 {
				return fmt.Errorf("round %d: buffers were copied to the host: %v", round, copied)
			}
			if err := g.Barrier(ctx); err != nil {
				return err
			}
		}
		path, err := g.Direct()
		if path != "same device" || err != nil {
			return fmt.Errorf("the path is %q, %v", path, err)
		}
		return nil
	})
}

// Started operations on streams of the caller load from the peers' devices, too. Start does not
// wait for the stream, nor for a peer, and later work of the stream sees the result.
func TestStartedOperationsAreDirect(t *testing.T) {
	const n, count, rounds = 3, 50_000, 20
	d := devicetest.NewLate("cuda:0", 7, 30*time.Microsecond)
	d.Lend()
	each(t, n, Config{Devices: device.List{d}}, func(ctx context.Context, g *Group) error {
		type lane struct {
			s       device.Stream
			m       mem.Memory
			word    mem.Memory
			release func()
		}
		var lanes [2]lane
		for i := range lanes {
			l := &lanes[i]
			var err error
			if l.s, l.m, l.release, err = streamWith(d, 4*count); err != nil {
				return err
			}
			words, free, err := device.Words(d, 1)
			if err != nil {
				return err
			}
			l.word = words[0]
			defer free()
			defer l.release()
			ones := make([]byte, 4*count)
			for k := 0; k < len(ones); k += 4 {
				ones[k] = 1
			}
			if err := l.s.Copy(l.m, hostMemory(ones)); err != nil {
				return err
			}
		}
		for round := range rounds {
			var works []*Work
			for k := range 6 { // in turns on both streams, of which one comes late
				l := &lanes[k%2]
				if k < 2 && (round+g.Rank()+k)%2 == 0 {
					if err := l.s.WaitValue(l.word, uint64(round+1)); err != nil {
						return err
					}
				}
				op := Max
				if k < 2 {
					op = Sum
				}
				works = append(works, g.Start(AllReduceOp{Dst: DeviceBuffer(l.m, Uint32, l.s), Op: op}))
			}
			var got [2][]byte
			for i, l := range lanes {
				got[i] = make([]byte, 4*count)
				if err := l.s.Copy(hostMemory(got[i]), l.m); err != nil {
					return err
				}
			}
			for _, l := range lanes {
				l.word.Word(0).Store(uint64(round + 1))
			}
			for i, l := range lanes {
				if err := reach(ctx, l.s); err != nil {
					return err
				}
				want := uint32(1)
				for range round + 1 {
					want *= n
				}
				for k := 0; k < 4*count; k += 4 {
					if v := binary.LittleEndian.Uint32(got[i][k:]); v != want {
						return fmt.Errorf("round %d: the stream sees %d at %d, want %d", round, v, k/4, want)
					}
				}
			}
			for i, w := range works {
				if err := w.Wait(ctx); err != nil {
					return fmt.Errorf("round %d, operation %d: %w", round, i, err)
				}
			}
		}
		if copies := g.Copies(); copies > 0 {
			return fmt.Errorf("%d operations were copied through the host", copies)
		}
		path, err := g.Direct()
		if path != "same device" || err != nil {
			return fmt.Errorf("the path is %q, %v", path, err)
		}
		return nil
	})
}

// A stream passes an operation when no peer loads from its memory any more: later work may change
// it, in groups of any size.
func TestStreamsHoldMemoryThatPeersLoad(t *testing.T) {
	for _, n := range []int{3, 16, 18, 34} {
		t.Run(fmt.Sprintf("%d ranks", n), func(t *testing.T) {
			const count, rounds = 40_000, 3
			d := devicetest.NewLate("cuda:0", 7, 200*time.Microsecond)
			d.Lend()
			each(t, n, Config{Devices: device.List{d}}, func(ctx context.Context, g *Group) error {
				s, m, release, err := streamWith(d, 4*count)
				if err != nil {
					return err
				}
				defer release()
				mine, poison, got := make([]byte, 4*count), bytes.Repeat([]byte{0xEE}, 4*count), make([]byte, 4*count)
				for k := 0; k < len(mine); k += 4 {
					mine[k] = byte(g.Rank() + 1)
				}
				for round := range rounds {
					err := s.Copy(m, hostMemory(mine))
					w := g.Start(AllReduceOp{Dst: DeviceBuffer(m, Uint32, s), Op: Sum})
					if err = errors.Join(err, s.Copy(hostMemory(got), m), s.Copy(m, hostMemory(poison)), reach(ctx, s),
						w.Wait(ctx)); err != nil {
						return err
					}
					for k := 0; k < len(got); k += 4 {
						if v := binary.LittleEndian.Uint32(got[k:]); v != uint32(n*(n+1)/2) {
							return fmt.Errorf("round %d: %#x at %d, want %#x", round, v, k/4, n*(n+1)/2)
						}
					}
				}
				if copies := g.Copies(); copies > 0 {
					return fmt.Errorf("%d operations were copied through the host", copies)
				}
				return nil
			})
		})
	}
}

// A failing event is that of a stream, which is reached when it fails or with nil.
type failingEvent struct {
	reached chan struct{}
	err     error
}

func (e *failingEvent) Done() bool {
	select {
	case <-e.reached:
		return true
	default:
		return false
	}
}

func (e *failingEvent) Wait(ctx context.Context) error {
	select {
	case <-e.reached:
		return e.err
	case <-ctx.Done():
		return ctx.Err()
	}
}

// A countedShare counts its releases.
type countedShare struct {
	device.Shared
	released atomic.Int32
}

func (s *countedShare) Release(bool) error {
	s.released.Add(1)
	return nil
}

// The memory of other ranks stays mapped until the streams of the device have done what operations
// that were given up had given them, and if a stream does not tell. Other devices go on.
func TestMemoryIsMappedWhileStreamsMayUseIt(t *testing.T) {
	failed := errors.New("the context has ended")
	for _, c := range []struct {
		name    string
		err     error // of the stream
		release int32
	}{
		{"done", nil, 1},
		{"the stream was closed", fmt.Errorf("late: %w", device.ErrClosed), 1},
		{"the stream has failed", failed, 0},
	} {
		t.Run(c.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				j := newJob(&settings{Config: Config{Logger: slog.New(slog.DiscardHandler)}})
				d, another := devicetest.NewLate("cuda:0", 1, 0), devicetest.NewLate("cuda:1", 1, 0)
				e, s, later, beside := &failingEvent{make(chan struct{}), c.err}, new(countedShare), new(countedShare),
					new(countedShare)
				j.doubt(d, e)
				j.drop([]device.Shared{&loaded{beside, another}}, true)
				j.unmapping.Wait()
				if beside.released.Load() != 1 {
					t.Error("the memory waits for a stream of another device")
				}
				j.drop([]device.Shared{&loaded{s, d}}, true)
				if synctest.Wait(); s.released.Load() != 0 {
					t.Error("the memory is unmapped while a stream may use it")
				}
				close(e.reached)
				j.unmapping.Wait()
				j.doubt(d, &failingEvent{e.reached, nil}) // which drops what is known to be over
				j.drop([]device.Shared{&loaded{later, d}}, true)
				j.unmapping.Wait()
				if got := [2]int32{s.released.Load(), later.released.Load()}; got != [2]int32{c.release, c.release} {
					t.Errorf("released %v times, want %d", got, c.release)
				}
				j.unretire()
			})
		})
	}
}

// A refusing stream takes no work.
type refusingStream struct{ device.Stream }

func (refusingStream) Record() (device.Event, error) { return nil, errors.New("refused") }

func (refusingStream) Close() error { return nil }

// An operation whose stream has refused work leaves a doubt when it has ended: until the stream has
// done what it had taken. A stream of the group that takes nothing more is over when it was closed.
func TestSettleDoubts(t *testing.T) {
	for _, c := range []struct {
		name string
		make func() (v *visit, end func())
		last int32 // releases in the end
	}{
		{"it takes other work", func() (*visit, func()) {
			e := &failingEvent{make(chan struct{}), nil}
			return &visit{stream: recordingStream{event: e}}, func() { close(e.reached) }
		}, 1},
		{"one of the group", func() (*visit, func()) {
			own := &ownStream{Stream: refusingStream{}, over: make(chan struct{})}
			return &visit{stream: own, own: own}, func() { own.Close() }
		}, 1},
		{"one of the caller", func() (*visit, func()) { return &visit{stream: refusingStream{}}, nil }, 0},
	} {
		t.Run(c.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				j := newJob(&settings{Config: Config{Logger: slog.New(slog.DiscardHandler)}})
				d := devicetest.NewLate("cuda:0", 1, 0)
				v, end := c.make()
				v.err, v.direct = errors.New("no place"), &direct{device: d}
				f := &feed{g: &Group{job: j}, v: v}
				if err := f.Settle(false); err == nil || len(j.doubtful) > 0 {
					t.Errorf("%v, and %d doubts of a call that goes on", err, len(j.doubtful))
				}
				if err := f.Settle(true); err == nil {
					t.Error("the stream has not failed")
				}
				s := new(countedShare)
				j.drop([]device.Shared{&loaded{s, d}}, true)
				if synctest.Wait(); s.released.Load() != 0 {
					t.Error("the memory is unmapped while a stream may use it")
				}
				if end != nil {
					end()
				}
				j.unmapping.Wait()
				if got := s.released.Load(); got != c.last {
					t.Errorf("released %d times, want %d", got, c.last)
				}
				j.unretire()
			})
		})
	}
}

// A recordingStream refuses work, and has an event.
type recordingStream struct {
	device.Stream
	event device.Event
}

func (s recordingStream) Record() (device.Event, error) { return s.event, nil }
