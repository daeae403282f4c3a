//go:build cgo && linux

package pg

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"tutti/device"
	"tutti/device/cuda"
	"tutti/device/cuda/fake"
	"tutti/device/cuda/fakegpu"
	"tutti/mem"
)

// A staged is a rank's GPU, of a driver of its own, with a stream and memory.
type staged struct {
	d *cuda.Device
	f *fake.Driver
	s device.Stream
	m mem.Memory
}

// eachStaged runs f on two ranks of this process, each with its GPU and n bytes of its memory.
func eachStaged(t *testing.T, n int, cfg Config, f func(ctx context.Context, g *Group, x *staged) error) {
	var all []*staged
	var list device.List
	for rank := range 2 {
		d, f := fakegpu.Open(t, rank, fake.Config{})
		all = append(all, &staged{d: d, f: f})
		list = append(list, d)
	}
	cfg.Devices = list
	each(t, 2, cfg, func(ctx context.Context, g *Group) error {
		x := all[g.Rank()]
		s, m, release, err := streamWith(x.d, n)
		if err != nil {
			return err
		}
		defer release()
		x.s, x.m = s, m
		return f(ctx, g, x)
	})
}

func (x *staged) or() Operation { return AllReduceOp{Dst: DeviceBuffer(x.m, Uint8, x.s), Op: BitOr} }

// fill gives the memory a value.
func (x *staged) fill(v byte) { copy(x.f.Bytes(x.m), bytes.Repeat([]byte{v}, x.m.Len())) }

// has returns an error unless the memory has a value.
func (x *staged) has(v byte) error {
	if got := x.f.Bytes(x.m); slices.Max(got) != v || slices.Min(got) != v {
		return fmt.Errorf("the result is %d to %d, want %d", slices.Min(got), slices.Max(got), v)
	}
	return nil
}

// A rank closes a group while a stream of its GPU waits for an operation of another group that its
// peer begins later. A driver frees memory when the streams are idle; Close does not wait for that.
func TestCloseWhileAStreamWaits(t *testing.T) {
	eachStaged(t, 1<<20, Config{Timeout: 20 * time.Second}, func(ctx context.Context, g *Group, x *staged) error {
		sub, err := g.Split(ctx, 0, 0)
		if err != nil {
			return err
		}
		meet, err := g.Split(ctx, 0, 0)
		if err != nil {
			return err
		}
		defer meet.Close()
		x.fill(1 << g.Rank())
		if err := sub.Do(ctx, x.or()); err != nil {
			return err
		}
		if g.Rank() == 0 {
			w := g.Start(x.or())
			if err := sub.Close(); err != nil {
				return err
			}
			if err := meet.Barrier(ctx); err != nil {
				return fmt.Errorf("after Close: %w", err)
			}
			return w.Wait(ctx)
		}
		defer sub.Close()
		if err := meet.Barrier(ctx); err != nil {
			return err
		}
		return g.Start(x.or()).Wait(ctx)
	})
}

// Operations that need more memory than the limit wait for each other.
func TestStagingLimit(t *testing.T) {
	const n, limit, many = 512 << 10, 1 << 20, 12
	for _, size := range []int{n, 4 * limit} {
		cfg := Config{StagingLimit: limit, PeerDevices: "off"}
		eachStaged(t, size, cfg, func(ctx context.Context, g *Group, x *staged) error {
			for round := range 3 {
				x.fill(1 << g.Rank())
				var works []*Work
				for range many {
					works = append(works, g.Start(x.or()))
					p := g.job.staging.pools[x.d.Location()]
					g.job.staging.mu.Lock()
					bytes := p.bytes
					g.job.staging.mu.Unlock()
					if bytes > limit+size {
						return fmt.Errorf("%d bytes are in use", bytes)
					}
				}
				for i, w := range works {
					if err := w.Wait(ctx); err != nil {
						return fmt.Errorf("round %d, operation %d: %w", round, i, err)
					}
				}
				if err := x.has(3); err != nil {
					return err
				}
			}
			return g.Barrier(ctx)
		})
	}
}

// hold has the stream wait, if here is true, until the word that it returns is 1. free frees the
// word.
func (x *staged) hold(here bool) (word *atomic.Uint64, free func() error, err error) {
	words, free, err := device.Words(x.d, 1)
	if err != nil {
		return nil, nil, err
	}
	if here {
		err = x.s.WaitValue(words[0], 1)
	}
	return words[0].Word(0), free, err
}

// An operation for which there is no room in time fails at all ranks. Those before it succeed.
func TestStagingLimitInVain(t *testing.T) {
	const n = 1 << 20
	cfg := Config{StagingLimit: 2 * n, PeerDevices: "off"}
	eachStaged(t, n, cfg, func(ctx context.Context, g *Group, x *staged) error {
		x.fill(1 << g.Rank())
		word, free, err := x.hold(g.Rank() == 0)
		if err != nil {
			return err
		}
		defer free()
		var works []*Work
		for range 2 {
			works = append(works, g.Start(x.or()))
		}
		var last *Work
		if g.Rank() == 0 {
			last = g.StartWithin(50*time.Millisecond, x.or())
			word.Store(1)
		} else {
			for _, w := range works { // it has room
				if err := w.Wait(ctx); err != nil {
					return err
				}
			}
			last = g.Start(x.or())
		}
		for i, w := range works {
			if err := w.Wait(ctx); err != nil {
				return fmt.Errorf("operation %d: %w", i, err)
			}
		}
		err = last.Wait(ctx)
		var late *TimeoutError
		if !errors.As(err, &late) || late.Reporter != 0 || !strings.Contains(late.Call, "StagingLimit") ||
			!errors.Is(err, context.DeadlineExceeded) {
			return fmt.Errorf("%v, want the timeout of rank 0, which has no room", err)
		}
		return x.has(3)
	})
}

// An operation that a rank's driver refuses fails at all ranks, soon.
func TestRefusedOperationIsToldToOtherRanks(t *testing.T) {
	const n = 1 << 20
	for name, started := range map[string]bool{"blocking": false, "started": true} {
		t.Run(name, func(t *testing.T) {
			eachStaged(t, n, Config{Timeout: 30 * time.Second, PeerDevices: "off"},
				func(ctx context.Context, g *Group, x *staged) error {
					run := func() error {
						if started {
							return g.Start(x.or()).Wait(ctx)
						}
						return g.Do(ctx, x.or())
					}
					if g.Rank() == 0 {
						x.f.Fail("cuMemHostAlloc", 1, 2)
					}
					err := run()
					var refused *cuda.Error
					var lost *RankError
					switch g.Rank() {
					case 0:
						if !errors.As(err, &refused) {
							return fmt.Errorf("%v, want the driver's error", err)
						}
					case 1:
						if !errors.As(err, &lost) || lost.Rank != 0 {
							return fmt.Errorf("%v, want a failure of rank 0", err)
						}
					}
					if g.Rank() == 0 { // the failed group does not count it
						x.f.Fail("cuMemHostAlloc", 1, 2)
						if err := run(); !errors.As(err, &refused) {
							return fmt.Errorf("after a failure: %v, want the same", err)
						}
						x.f.Forget()
					}
					if err := g.Recover(ctx); err != nil {
						return err
					}
					x.fill(1 << g.Rank())
					if err := run(); err != nil {
						return fmt.Errorf("after Recover: %w", err)
					}
					return x.has(3)
				})
		})
	}
}

// Memory that nothing uses is freed.
func TestIdleStagingBuffersAreFreed(t *testing.T) {
	const n = 1 << 20
	eachStaged(t, n, Config{PeerDevices: "off"}, func(ctx context.Context, g *Group, x *staged) error {
		if err := g.Start(x.or()).Wait(ctx); err != nil {
			return err
		}
		if err := reach(ctx, x.s); err != nil {
			return err
		}
		s := &g.job.staging
		p := s.pools[x.d.Location()]
		s.sweep(p) // it was used since the sweep before
		kept := p.bytes
		s.sweep(p)
		if kept != n || p.bytes != 0 || len(p.buffers) != 0 {
			return fmt.Errorf("%d bytes after a sweep, and %d after another one", kept, p.bytes)
		}
		x.fill(1 << g.Rank())
		if err := g.Start(x.or()).Wait(ctx); err != nil {
			return err
		}
		return x.has(3)
	})
}

// A rank's stream comes to a reduction after another rank has done its part and closed the group.
func TestStreamComesAfterAPeerHasClosed(t *testing.T) {
	eachStaged(t, 4<<10, Config{}, func(ctx context.Context, g *Group, x *staged) error {
		sub, err := g.Split(ctx, 0, 0)
		if err != nil {
			return err
		}
		defer sub.Close()
		x.fill(1 << g.Rank())
		word, free, err := x.hold(g.Rank() == 0)
		if err != nil {
			return err
		}
		defer free()
		w := sub.Start(ReduceOp{X: DeviceBuffer(x.m, Uint8, x.s), Op: BitOr})
		if g.Rank() == 1 {
			return errors.Join(w.Wait(ctx), sub.Close(), g.Barrier(ctx))
		}
		if err := g.Barrier(ctx); err != nil {
			return err
		}
		select {
		case <-w.Done():
			return fmt.Errorf("the operation has ended before its stream has come: %w", w.Err())
		case <-time.After(2 * grace):
		}
		word.Store(1)
		if err := w.Wait(ctx); err != nil {
			return err
		}
		return x.has(3)
	})
}
