//go:build cgo && linux

package pg

import (
	"bytes"
	"context"
	"fmt"
	"testing"
	"time"
	"unsafe"

	"tutti/device"
	"tutti/device/cuda"
	"tutti/device/cuda/fake"
	"tutti/device/cuda/fakegpu"
	"tutti/mem"
)

// ways are the two ways in which the streams of a GPU wait for words: by stream memory operations,
// and by kernels that are resident meanwhile.
var ways = map[string]fake.Config{"memory operations": {}, "kernels": {NoMemoryOps: true}}

// fakeGPU returns a GPU of a fake driver.
func fakeGPU(t *testing.T, c fake.Config) device.Device {
	t.Helper()
	d, _ := fakegpu.Open(t, 0, c)
	return d
}

// Every collective does on a GPU of the fake driver what it does on the host.
func TestOperationsOnGPUs(t *testing.T) {
	for name, c := range ways {
		t.Run(name, func(t *testing.T) {
			d := fakeGPU(t, c)
			operateOn(t, 2, func(int) device.Device { return d })
		})
	}
}

// Messages on a GPU of the fake driver arrive whole, in the order of streams.
func TestMessagesOnGPUs(t *testing.T) {
	for name, c := range ways {
		t.Run(name, func(t *testing.T) { messagesOn(t, fakeGPU(t, c)) })
	}
}

// Join loads the kernels of a GPU that the process uses. So the first operation on its memory loads
// none, and does not wait for a kernel of the program's that is resident and waits for the
// operation in turn; a GPU that is opened by the first operation does.
func TestJoinPreloadsGPUs(t *testing.T) {
	t.Setenv("CUDA_MODULE_LOADING", "LAZY")
	join := map[string]func(Config) (*Group, error){
		"join": func(c Config) (*Group, error) {
			c.Size, c.Getenv = 1, func(string) string { return "" }
			return Join(t.Context(), c)
		},
		"local": func(c Config) (*Group, error) {
			all, err := Local(1, c)
			return append(all, nil)[0], err
		},
		"form": func(c Config) (*Group, error) {
			c.Secret, c.Getenv = []byte("a secret of 16 bytes or more"), func(string) string { return "" }
			m, err := NewMember(t.Context(), c)
			if err != nil {
				return nil, err
			}
			t.Cleanup(func() { m.Close() })
			return m.Form(t.Context(), "one", []string{m.Handle()})
		},
	}
	for name, join := range join {
		for _, inUse := range []bool{true, false} {
			t.Run(fmt.Sprintf("%s, in use %v", name, inUse), func(t *testing.T) {
				preloads(t, join, inUse)
			})
		}
	}
}

func preloads(t *testing.T, join func(Config) (*Group, error), inUse bool) {
	f := fake.New(t, fake.Config{NoMemoryOps: true})
	driver, err := cuda.LoadLibrary(f.Path)
	if err != nil {
		t.Fatal(err)
	}
	finder := &cuda.Finder{Driver: func() (*cuda.Driver, error) { return driver, nil }}
	open := func() *cuda.Device { // what stands for the program's own use of the GPU
		d, err := driver.Open(0)
		if err != nil {
			t.Fatal(err)
		}
		return d
	}
	var d *cuda.Device
	if inUse {
		d = open()
	}
	g, err := join(Config{Devices: finder, Timeout: 20 * time.Second})
	if err != nil {
		t.Fatal(err)
	}
	if !inUse {
		d = open()
	}
	s, m, release, err := streamWith(d, 64)
	if err != nil {
		t.Fatal(err)
	}
	words, free, err := device.Words(d, 1)
	if err != nil {
		t.Fatal(err)
	}
	before := f.Calls()["cuFuncLoad"]
	if err := s.WaitValue(words[0], 1); err != nil {
		t.Fatal(err)
	}
	f.Until(t, "the program's kernel is resident", func(n fake.Census) bool { return n.Resident == 1 })
	done := make(chan error, 1)
	go func() { done <- g.Do(t.Context(), AllReduceOp{Dst: DeviceBuffer(m, Int32, nil), Op: Sum}) }()
	if inUse {
		if err := <-done; err != nil {
			t.Error(err)
		}
		if n := f.Calls()["cuFuncLoad"] - before; n > 0 || f.Census().Resident != 1 {
			t.Errorf("%d kernels were loaded by the operation, and %d are resident", n, f.Census().Resident)
		}
	} else {
		f.Until(t, "the load waits for the kernel", func(n fake.Census) bool { return n.Loading == 1 })
	}
	words[0].Word(0).Store(1)
	if !inUse {
		if err := <-done; err != nil {
			t.Error(err)
		}
	}
	release()
	for _, end := range []func() error{free, g.Close, d.Close, finder.Close} {
		if err := end(); err != nil {
			t.Error(err)
		}
	}
	f.Empty(t)
}

// More operations than a stream gives to the driver at once are started, behind more work than
// that, which does not begin yet, and waited for without a look at the stream.
func TestManyStartedOperationsOnAGPU(t *testing.T) {
	for name, c := range ways {
		t.Run(name, func(t *testing.T) { manyStarted(t, fakeGPU(t, c), 400, 16) })
		t.Run(name+", in places", func(t *testing.T) { manyStarted(t, fakeGPU(t, c), 200, 40_000) })
	}
}

func manyStarted(t *testing.T, d device.Device, many, count int) {
	const n = 2
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
	for name, c := range map[string]fake.Config{"reached": {}, "isolated": {Isolated: true},
		"reached, IPC": {NoVMM: true}, "isolated, IPC": {Isolated: true, NoVMM: true},
		"reached, without memory operations": {NoMemoryOps: true}} {
		t.Run(name, func(t *testing.T) {
			access := !c.Isolated
			c.Devices = n
			f := fake.New(t, c)
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
