//go:build cgo && linux

package pg

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"tutti/device"
	"tutti/device/cuda"
	"tutti/device/cuda/fake"
	"tutti/device/cuda/program"
)

// A capture that is refused does not keep the exchange of a view that is over.
func TestPacketsOfARefusedCaptureAreFreed(t *testing.T) {
	onPackets(t, 2, fake.Config{Devices: 3}, Config{}, func(ctx context.Context, r packetRank) error {
		m, err := r.number(1)
		if err != nil {
			return err
		}
		third, err := r.job.settings.Devices.(*cuda.Finder).Device(2)
		if err != nil {
			return err
		}
		elsewhere, err := third.Alloc(4)
		if err != nil {
			return err
		}
		defer third.Free(elsewhere)
		p := program.Open(t, r.f.Path, 2)
		s, err := p.Stream()
		if err != nil {
			return err
		}
		defer p.Destroy(s)
		sub, before, err := r.subgroup(ctx, AllReduceOp{Dst: DeviceBuffer(m, Uint32, nil), Op: Sum})
		if err != nil {
			return err
		}
		graph, err := p.Capture(s, func() error {
			var bad *ArgumentError
			err := sub.Start(AllReduceOp{Dst: DeviceBuffer(elsewhere, Uint32, third.Borrow(s)), Op: Sum}).Wait(ctx)
			if !errors.As(err, &bad) {
				return fmt.Errorf("memory of another device: %w", err)
			}
			return nil
		})
		if err := errors.Join(err, graph.Close(), sub.Close(), r.Barrier(ctx)); err != nil {
			return err
		}
		r.f.Until(t, "the memory of a closed group is freed",
			func(c fake.Census) bool { return memoryOf(c) == before })
		return r.Barrier(ctx)
	})
}

// endsIn is an exchange whose view ends while a stream is about to record work, which fails.
type endsIn struct {
	device.Exchange
	end func()
}

var errNotRecorded = errors.New("the stream records nothing")

func (x endsIn) Do(device.Stream, device.ExchangeCall, time.Duration) (uint64, error) {
	x.end()
	return 0, errNotRecorded
}

// The exchange of a view that ends during a capture is freed when the capture has failed, and not
// before.
func TestPacketsOfAViewThatEndsInACapture(t *testing.T) {
	onPackets(t, 2, fake.Config{}, Config{}, func(ctx context.Context, r packetRank) error {
		m, err := r.number(1)
		if err != nil {
			return err
		}
		p := program.Open(t, r.f.Path, 0)
		s, err := p.Stream()
		if err != nil {
			return err
		}
		defer p.Destroy(s)
		sub, before, err := r.subgroup(ctx, AllReduceOp{Dst: DeviceBuffer(m, Uint32, nil), Op: Sum})
		if err := errors.Join(err, r.Barrier(ctx)); err != nil {
			return err
		}
		x := sub.packetsNow()
		former := func() int {
			sub.job.proxy.Lock()
			defer sub.job.proxy.Unlock()
			return len(sub.packets.former)
		}
		end := func() {
			sub.job.proxy.Lock()
			defer sub.job.proxy.Unlock()
			sub.disconnect()
		}
		if r.Rank() == 0 { // the ranks share a GPU, where nothing is freed during a capture
			x.Exchange = endsIn{x.Exchange, func() {
				if end(); former() != 1 {
					t.Error("an exchange that is being recorded was not kept")
				}
			}}
			graph, err := p.Capture(s, func() error {
				err := sub.Start(AllReduceOp{Dst: DeviceBuffer(m, Uint32, r.d.Borrow(s)), Op: Sum}).Wait(ctx)
				if !errors.Is(err, errNotRecorded) {
					return fmt.Errorf("recording has ended with %v", err)
				}
				return nil
			})
			if err == nil {
				err = graph.Close()
			}
			if err != nil {
				return err
			}
		}
		if err := r.Barrier(ctx); err != nil {
			return err
		}
		if r.Rank() != 0 {
			end()
		}
		if n := former(); n != 0 {
			return fmt.Errorf("%d exchanges are kept", n)
		}
		if err := r.Barrier(ctx); err != nil {
			return err
		}
		r.f.Until(t, "the memory of a view that is over is freed",
			func(c fake.Census) bool { return memoryOf(c) == before })
		return errors.Join(r.Barrier(ctx), sub.Close())
	})
}
