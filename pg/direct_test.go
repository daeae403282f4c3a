package pg

import (
	"bytes"
	"context"
	"fmt"
	"testing"
	"time"

	"tutti/device"
	"tutti/device/devicetest"
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
