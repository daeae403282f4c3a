//go:build cgo && linux

package pg

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"testing"

	"tutti/device"
	"tutti/device/cuda/fake"
	"tutti/device/cuda/fakegpu"
	"tutti/internal/proctest"
)

// inProcess are the ways in which ranks of one process have GPUs and handles.
var inProcess = map[string]fake.Config{"one GPU": {}, "a GPU each": {Devices: 3},
	"a GPU each, IPC": {Devices: 3, NoVMM: true}}

// memoryOf returns what a driver's census says of the memory of devices.
func memoryOf(c fake.Census) fake.Census {
	return fake.Census{DeviceBlocks: c.DeviceBlocks, Imported: c.Imported, Physical: c.Physical, Reserved: c.Reserved}
}

// subgroup waits for the other ranks, and makes a group of all of them, which has run op. It also
// returns the memory that there was before.
func (r packetRank) subgroup(ctx context.Context, op AllReduceOp) (sub *Group, before fake.Census, err error) {
	if err := r.Barrier(ctx); err != nil {
		return nil, before, err
	}
	before = memoryOf(r.f.Census())
	if sub, err = r.Split(ctx, 0, r.Rank()); err != nil {
		return nil, before, err
	}
	return sub, before, sub.Do(ctx, op)
}

// packetsNow returns the group's exchange.
func (g *Group) packetsNow() *exchange {
	g.job.proxy.Lock()
	defer g.job.proxy.Unlock()
	return g.packets.now
}

// Groups that end leave nothing of their operations in packets on the devices, and no descriptor.
func TestPacketsOfClosedGroupsAreFreed(t *testing.T) {
	const n = 3
	for name, c := range inProcess {
		t.Run(name, func(t *testing.T) {
			onPackets(t, n, c, Config{}, func(ctx context.Context, r packetRank) error {
				m, err := r.number(1)
				if err != nil {
					return err
				}
				if err := r.Barrier(ctx); err != nil {
					return err
				}
				before, files := memoryOf(r.f.Census()), 0
				for round := range 12 {
					sub, err := r.Split(ctx, 0, r.Rank())
					if err != nil {
						return err
					}
					for range 3 {
						binary.LittleEndian.PutUint32(r.f.Bytes(m), 5)
						if err := sub.Do(ctx, AllReduceOp{Dst: DeviceBuffer(m, Uint32, nil), Op: Sum}); err != nil {
							return err
						}
						if got := r.value(m); got != 5*n || !sub.exchanged() {
							return fmt.Errorf("%d, want %d", got, 5*n)
						}
					}
					if err := errors.Join(sub.Close(), r.Barrier(ctx)); err != nil {
						return err
					}
					if !r.f.Until(t, "the memory of a closed group is freed",
						func(c fake.Census) bool { return memoryOf(c) == before }) {
						return fmt.Errorf("round %d", round)
					}
					if round == 0 {
						files = proctest.Descriptors()
					}
					if err := r.Barrier(ctx); err != nil {
						return err
					}
				}
				r.f.Until(t, "descriptors are closed",
					func(fake.Census) bool { return proctest.Descriptors() <= files })
				return r.Barrier(ctx)
			})
		})
	}
}

// Views that are over leave nothing of their operations in packets, though the group goes on.
func TestPacketsOfFormerViewsAreFreed(t *testing.T) {
	for name, c := range inProcess {
		t.Run(name, func(t *testing.T) {
			onPackets(t, 2, c, Config{}, func(ctx context.Context, r packetRank) error {
				m, err := r.number(1)
				if err != nil {
					return err
				}
				op := AllReduceOp{Dst: DeviceBuffer(m, Uint32, nil), Op: Sum}
				if err := errors.Join(r.Do(ctx, op), r.Barrier(ctx)); err != nil {
					return err
				}
				one := memoryOf(r.f.Census())
				for range 8 {
					if err := r.Barrier(ctx); err != nil {
						return err
					}
					if err := r.Do(ctx, []Operation{op, BarrierOp{}}[r.Rank()]); err == nil {
						return errors.New("the operations do not differ")
					}
					if err := r.Recover(ctx); err != nil {
						return err
					}
					binary.LittleEndian.PutUint32(r.f.Bytes(m), 7)
					if err := r.Do(ctx, op); err != nil || r.value(m) != 14 {
						return fmt.Errorf("%d, %w", r.value(m), err)
					}
					if !r.f.Until(t, "the memory of the former view is freed",
						func(c fake.Census) bool { return memoryOf(c) == one }) {
						return nil
					}
				}
				return r.Barrier(ctx)
			})
		})
	}
}

// A group is closed while a stream of the program has yet to come to its kernel. What the kernel
// uses is there until it has ended, at all ranks, and is freed then.
func TestPacketsOfAStreamThatComesLate(t *testing.T) {
	for name, c := range inProcess {
		t.Run(name, func(t *testing.T) {
			onPackets(t, 2, c, Config{}, func(ctx context.Context, r packetRank) error {
				s, m, release, err := streamWith(r.d, 4)
				if err != nil {
					return err
				}
				defer release()
				words, free, err := device.Words(r.d, 1)
				if err != nil {
					return err
				}
				defer free()
				op := AllReduceOp{Dst: DeviceBuffer(m, Uint32, s), Op: Sum}
				sub, before, err := r.subgroup(ctx, op)
				if err != nil {
					return err
				}
				late := r.Rank() == 0
				if late {
					if err := s.WaitValue(words[0], 1); err != nil {
						return err
					}
				}
				w := sub.Start(op)
				x := sub.packetsNow()
				if err := r.Barrier(ctx); err != nil {
					return err
				}
				closed := sub.Close()
				if err := w.Wait(ctx); err == nil {
					return errors.New("the operation has succeeded")
				}
				if err := errors.Join(closed, r.Barrier(ctx)); err != nil {
					return err
				}
				if late {
					if memoryOf(r.f.Census()) == before {
						return errors.New("the memory of a kernel that is to come was freed")
					}
					words[0].Word(0).Store(1)
				}
				if err := reach(ctx, s); err != nil {
					return err
				}
				r.f.Until(t, "the memory of a closed group is freed",
					func(c fake.Census) bool { return memoryOf(c) == before })
				x.Stop()
				if why, _ := x.Failure(); why == nil || !why.Stopped {
					return fmt.Errorf("the kernel has ended with %v", why)
				}
				return r.Barrier(ctx)
			})
		})
	}
}

// A job is closed while a stream of the program has yet to come to its kernel. Close returns. The
// stream passes when it comes, and closing the device frees all.
func TestPacketsOfAStreamThatOutlivesTheJob(t *testing.T) {
	d, f := fakegpu.Open(t, 0, fake.Config{})
	var streams [2]device.Stream
	words, free, err := device.Words(d, 1)
	if err != nil {
		t.Fatal(err)
	}
	var works [2]*Work
	each(t, 2, Config{Devices: device.List{d}}, func(ctx context.Context, g *Group) error {
		s, _, op, err := packetRank{g, d, f}.begun(ctx)
		if err != nil {
			return err
		}
		if err := errors.Join(g.Barrier(ctx), s.WaitValue(words[0], 1)); err != nil {
			return err
		}
		streams[g.Rank()], works[g.Rank()] = s, g.Start(op)
		return nil
	})
	for _, w := range works {
		if err := w.Wait(t.Context()); err == nil {
			t.Error("an operation has ended without its stream")
		}
	}
	before := f.Census().DeviceBlocks
	words[0].Word(0).Store(1)
	for _, s := range streams {
		if err := errors.Join(reach(t.Context(), s), s.Close()); err != nil {
			t.Error(err)
		}
	}
	if got := f.Census().DeviceBlocks; got != before {
		t.Errorf("%d allocations after the kernels have ended, %d before", got, before)
	}
	if err := free(); err != nil {
		t.Error(err)
	}
}
