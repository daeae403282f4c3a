//go:build cgo && linux

package pg

import (
	"bytes"
	"context"
	"fmt"
	"testing"
	"unsafe"

	"tutti/device"
	"tutti/device/cuda"
	"tutti/device/cuda/fake"
	"tutti/mem"
)

// fakeGPU returns a GPU of the fake driver.
func fakeGPU(t *testing.T) device.Device {
	t.Helper()
	f := fake.New(t, fake.Config{})
	driver, err := cuda.LoadLibrary(f.Path)
	if err != nil {
		t.Fatal(err)
	}
	d, err := driver.Open(0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := d.Close(); err != nil {
			t.Error(err)
		}
		f.Empty(t)
	})
	return d
}

// Every collective does on a GPU of the fake driver what it does on the host.
func TestOperationsOnGPUs(t *testing.T) {
	d := fakeGPU(t)
	operateOn(t, 2, func(int) device.Device { return d })
}

// Messages on a GPU of the fake driver arrive whole, in the order of streams.
func TestMessagesOnGPUs(t *testing.T) { messagesOn(t, fakeGPU(t)) }

// More operations than a stream gives to the driver at once are started, behind more work than
// that, which does not begin yet, and waited for without a look at the stream.
func TestManyStartedOperationsOnAGPU(t *testing.T) {
	const n, many, count = 2, 400, 16
	d := fakeGPU(t)
	each(t, n, Config{Devices: device.List{d}}, func(ctx context.Context, g *Group) error {
		s, m, release, err := streamWith(d, 4*count)
		if err != nil {
			return err
		}
		defer release()
		ones := make([]int32, count)
		for i := range ones {
			ones[i] = 1
		}
		raw := unsafe.Slice((*byte)(unsafe.Pointer(unsafe.SliceData(ones))), 4*count)
		if err := s.Copy(m, mem.Host(raw, mem.Anywhere)); err != nil {
			return err
		}
		words, free, err := device.Words(d, 1)
		if err != nil {
			return err
		}
		defer free()
		if err := s.WaitValue(words[0], 1); err != nil {
			return err
		}
		for range 1000 {
			if err := s.Copy(m.Slice(4, 4), m.Slice(0, 4)); err != nil {
				return err
			}
		}
		var works []*Work
		for i := range many {
			op := Max
			if i%20 == 0 {
				op = Sum // of what both have, so that it doubles
			}
			works = append(works, g.Start(AllReduceOp{Dst: DeviceBuffer(m, Int32, s), Op: op}))
		}
		words[0].Word(0).Store(1)
		for i, w := range works {
			if err := w.Wait(ctx); err != nil {
				return fmt.Errorf("operation %d: %w", i, err)
			}
		}
		got := mem.Host(make([]byte, 4*count), mem.Anywhere)
		if err := s.Copy(got, m); err != nil {
			return err
		}
		if err := reach(ctx, s); err != nil {
			return err
		}
		for i := range ones {
			ones[i] = 1 << (many / 20)
		}
		if !bytes.Equal(got.Bytes(), raw) {
			return fmt.Errorf("after %d operations: %x", many, got.Bytes())
		}
		return nil
	})
}

// Ranks of a process on several GPUs load from each other's where the driver gives them access, and
// have the same results where it does not.
func TestDirectOperationsOnSeveralGPUs(t *testing.T) {
	const n, count = 3, 100_000
	for name, access := range map[string]bool{"reached": true, "isolated": false} {
		t.Run(name, func(t *testing.T) {
			f := fake.New(t, fake.Config{Devices: n, Isolated: !access})
			driver, err := cuda.LoadLibrary(f.Path)
			if err != nil {
				t.Fatal(err)
			}
			finder := &cuda.Finder{Driver: func() (*cuda.Driver, error) { return driver, nil }}
			each(t, n, Config{Devices: finder}, func(ctx context.Context, g *Group) error {
				d, err := finder.Device(g.Rank())
				if err != nil {
					return err
				}
				m, err := d.Alloc(4 * count)
				if err != nil {
					return err
				}
				for round := range 3 {
					x := make([]int32, count)
					for i := range x {
						x[i] = int32(1 << g.Rank())
					}
					raw := unsafe.Slice((*byte)(unsafe.Pointer(unsafe.SliceData(x))), 4*count)
					copy(f.Bytes(m), raw)
					if err := g.Do(ctx, AllReduceOp{Dst: DeviceBuffer(m, Int32, nil), Op: Sum}); err != nil {
						return err
					}
					for i := range x {
						x[i] = 1<<n - 1
					}
					if !bytes.Equal(f.Bytes(m), raw) {
						return fmt.Errorf("round %d: not the sum", round)
					}
				}
				if path, err := g.Direct(); access != (path != "" && err == nil) {
					return fmt.Errorf("the path is %q, %v", path, err)
				}
				if copied := g.Copies() > 0; copied == access {
					return fmt.Errorf("buffers were copied to the host: %v", copied)
				}
				return g.Barrier(ctx)
			})
			if err := finder.Close(); err != nil {
				t.Error(err)
			}
			f.Empty(t)
		})
	}
}
