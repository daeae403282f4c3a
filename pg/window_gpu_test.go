//go:build cgo && linux

package pg_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"tutti/device"
	"tutti/device/cuda"
	"tutti/device/cuda/fake"
	"tutti/device/cuda/fakegpu"
	"tutti/mem"
	"tutti/p2p"
	"tutti/p2p/registry"
	"tutti/p2p/tcp"
	"tutti/p2p/verbs"
	"tutti/pg"
	"tutti/rdma"
	"tutti/rdma/soft"
)

// softLinks is the transport over RDMA devices under another name.
type softLinks struct{ *verbs.Transport }

func (softLinks) Name() string { return "soft" }

// newFabric adds the transport "soft" until the end of the test, over a device for each rank.
func newFabric(t *testing.T, cfg soft.Config) *soft.Fabric {
	f := soft.New(cfg)
	t.Cleanup(f.Close)
	var made atomic.Int64
	t.Cleanup(registry.Add(registry.Kind{Name: "soft", Reach: registry.Network,
		Works: func(registry.Options) error { return nil },
		New: func(o registry.Options) (p2p.Transport, error) {
			return softLinks{verbs.New(verbs.Config{Provider: f, Devices: fmt.Sprint("=soft", made.Add(1)-1),
				Exporter: registry.Exporter(o.Devices),
				TCP:      tcp.Config{Interfaces: "127.0.0.1", Logger: o.Logger}})}, nil
		}}))
	return f
}

// A card puts from and gets to the memory of a GPU where it can, in the order of the buffer's
// stream. Otherwise the data is copied. The results are the same.
func TestWindowBuffersOverRDMA(t *testing.T) {
	for name, c := range map[string]struct {
		fake      fake.Config
		errno     syscall.Errno // of registrations
		unflushed bool          // the GPU cannot be flushed
		puts      bool          // a card does
		gets      bool
	}{
		"ordered":      {fake.Config{DMABuf: true}, 0, false, true, true},
		"unordered":    {fake.Config{DMABuf: true, Unordered: true}, 0, false, true, true},
		"no flush":     {fake.Config{DMABuf: true, Unordered: true}, 0, true, true, false},
		"not exported": {fake.Config{}, 0, false, false, false},
		"refused":      {fake.Config{DMABuf: true}, syscall.EOPNOTSUPP, false, false, false},
	} {
		t.Run(name, func(t *testing.T) {
			refuse := func(_, call string) syscall.Errno {
				if strings.HasSuffix(call, "of a DMA buffer") {
					return c.errno
				}
				return 0
			}
			f := newFabric(t, soft.Config{Seed: 1, Late: 3, Faults: soft.Faults{Call: refuse}})
			d, driver := fakegpu.Open(t, 0, c.fake)
			onBoth(t, d, func(g *pg.Group, w *pg.Window) {
				stream, err := d.Stream()
				if err != nil {
					t.Error(err)
					return
				}
				o := &putter{t, d, driver, g, w, stream}
				defer o.stream.Close()
				for round, size := range []int{1, 100_000, 1 << 20, windowBytes} {
					if c.unflushed {
						driver.Fail("cuFlushGPUDirectRDMAWrites", 1, fake.NotSupported)
					}
					put, got := o.round(round, size)
					if put && (!c.puts || size < 1<<18) || got && (!c.gets || size < 1<<18) {
						t.Errorf("a card has put %d bytes: %t, got them: %t", size, put, got)
					}
				}
				for i := 0; i < 3 && !c.unflushed; i++ {
					o.until(c.puts, c.gets)
					f.Remove("soft0")
					o.round(8, windowBytes) // while there is no card, or another connection of it
					f.Restore("soft0")
				}
				flushes := func() int { return driver.Calls()["cuFlushGPUDirectRDMAWrites"] }
				late := time.Now().Add(20 * time.Second)
				for c.unflushed && flushes() == 0 && time.Now().Before(late) {
					driver.Fail("cuFlushGPUDirectRDMAWrites", 1, fake.NotSupported) // a card comes later than the link
					if _, got := o.round(7, windowBytes); got {
						t.Error("a card has got what the device may not see")
					}
				}
				if n := flushes(); n > 0 != (c.fake.Unordered && c.fake.DMABuf) {
					t.Errorf("%d flushes", n)
				}
				driver.Forget()
				o.late()
			})
		})
	}
}

// A put that a card has begun and not finished, and whose copy fails, keeps signals back: the
// target has a part of its data.
func TestPutOverRDMAFailsInTheMiddle(t *testing.T) {
	const requestBytes = 256 << 10
	var left atomic.Int32 // requests until one fails
	newFabric(t, soft.Config{Seed: 1, Faults: soft.Faults{
		Request: func(_ string, _ uint32, r *rdma.SendRequest) rdma.Status {
			if r.Op == rdma.Write && len(r.Segments) == 1 && r.Segments[0].Len == requestBytes && left.Add(-1) == 0 {
				return rdma.RemoteAccess
			}
			return rdma.Success
		}}})
	d, driver := fakegpu.Open(t, 0, fake.Config{DMABuf: true})
	onBoth(t, d, func(g *pg.Group, w *pg.Window) {
		ctx := t.Context()
		stream, err := d.Stream()
		if err != nil {
			t.Error(err)
			return
		}
		defer stream.Close()
		(&putter{t, d, driver, g, w, stream}).until(true, true)
		m, err := d.Alloc(windowBytes)
		if err != nil {
			t.Error(err)
			return
		}
		defer d.Free(m)
		copy(driver.Bytes(m), bytes.Repeat([]byte{77}, windowBytes))
		left.Store(2)
		driver.Fail("cuMemcpyAsync", 1, fake.OutOfMemory)
		err = w.PutBuffer(ctx, 1, 0, pg.DeviceBuffer(m, pg.Uint8, stream))
		got := make([]byte, windowBytes)
		if e := w.Get(ctx, 1, 0, got); e != nil {
			t.Error(e)
		}
		if n := bytes.Count(got, []byte{77}); err == nil || n == 0 || n == windowBytes {
			t.Errorf("%v, and %d of %d bytes were put; want an error in the middle", err, n, windowBytes)
		}
		for what, err := range map[string]error{"Signal": w.Signal(ctx, 1, 0), "Flush": w.Flush(ctx, 1)} {
			if err == nil || !strings.Contains(err.Error(), "cuMemcpyAsync") {
				t.Errorf("%s: %v, want the error of the put", what, err)
			}
		}
	})
}

const windowBytes = 3<<20 + 5

// onBoth runs fn in one of two ranks with a window, over the transport "soft". After a Refresh that
// rank can signal, whatever fn did.
func onBoth(t *testing.T, d device.Device, fn func(g *pg.Group, w *pg.Window)) {
	groups := formed(t, t.Name(), members(t, 2, pg.Config{Transport: "soft", Devices: device.List{d}})...)
	var wg sync.WaitGroup
	for _, g := range groups {
		wg.Go(func() {
			defer g.Close()
			ctx := t.Context()
			w, err := pg.NewWindow(ctx, g, windowBytes)
			if err != nil {
				t.Error(err)
				return
			}
			if g.Rank() == 0 {
				fn(g, w)
				err = errors.Join(w.Refresh(ctx), w.Signal(ctx, 1, 0))
			} else {
				err = errors.Join(w.Refresh(ctx), w.WaitSignal(ctx, 0, 0, 1))
			}
			if err = errors.Join(err, g.Barrier(ctx), w.Close(ctx)); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
}

// putter puts to rank 1 and gets from it.
type putter struct {
	t      *testing.T
	d      *cuda.Device
	driver *fake.Driver
	g      *pg.Group
	w      *pg.Window
	stream device.Stream
}

// until has rounds until cards put and get, or do not.
func (o *putter) until(puts, gets bool) {
	for late := time.Now().Add(20 * time.Second); ; {
		put, got := o.round(7, windowBytes)
		if put == puts && got == gets {
			return
		}
		if time.Now().After(late) {
			o.t.Errorf("a card has put: %t, got: %t", put, got)
			return
		}
	}
}

// late checks that a put and a get end in time if the buffer's stream does not come, and that the
// memory stays as it is.
func (o *putter) late() {
	t := o.t
	m, err := o.d.Alloc(windowBytes)
	if err != nil {
		t.Error(err)
		return
	}
	defer o.d.Free(m)
	words, free, err := device.Words(o.d, 1)
	if err == nil {
		err = o.stream.WaitValue(words[0], 1)
	}
	if err != nil {
		t.Error(err)
		return
	}
	want := bytes.Repeat([]byte{5}, windowBytes)
	copy(o.driver.Bytes(m), want)
	for _, f := range []func(context.Context, int, int, pg.Buffer) error{o.w.PutBuffer, o.w.GetBuffer} {
		within, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
		err := f(within, 1, 0, pg.DeviceBuffer(m, pg.Uint8, o.stream))
		cancel()
		if !errors.As(err, new(*pg.TimeoutError)) || !strings.Contains(err.Error(), "stream") {
			t.Errorf("a stream that does not come: %v", err)
		}
	}
	words[0].Word(0).Store(1)
	if err := errors.Join(o.stream.Close(), free()); err != nil {
		t.Error(err)
	}
	if !bytes.Equal(o.driver.Bytes(m), want) {
		t.Error("the memory has changed")
	}
}

// copies returns how many copies the driver was asked for.
func (o *putter) copies() (n int) {
	for name, k := range o.driver.Calls() {
		if strings.HasPrefix(name, "cuMemcpy") {
			n += k
		}
	}
	return n
}

// round puts bytes and gets them, and reports whether that took no copy.
func (o *putter) round(round, size int) (put, got bool) {
	t, ctx := o.t, o.t.Context()
	must := func(err error) {
		if err != nil {
			t.Errorf("round %d of %d bytes: %v", round, size, err)
		}
	}
	m, err := o.d.Alloc(size)
	if err != nil {
		t.Error(err)
		return
	}
	defer o.d.Free(m)
	want := bytes.Repeat([]byte{byte(10 + round), 3, byte(round)}, size/3+1)[:size]
	other := bytes.Repeat([]byte{0xee}, size)
	copyTo := func(dst, src mem.Memory) { must(o.stream.Copy(dst, src)) }
	copyTo(m, mem.Host(want, mem.Anywhere))
	before := o.copies()
	must(o.w.PutBuffer(ctx, 1, windowBytes-size, pg.DeviceBuffer(m, pg.Uint8, o.stream)))
	put = o.copies() == before
	copyTo(m, mem.Host(other, mem.Anywhere))
	must(o.w.Flush(ctx, 1))
	back := make([]byte, size)
	must(o.w.Get(ctx, 1, windowBytes-size, back))
	if !bytes.Equal(back, want) {
		t.Errorf("round %d: other bytes than those %d were put", round, size)
	}
	before = o.copies()
	must(o.w.GetBuffer(ctx, 1, windowBytes-size, pg.DeviceBuffer(m, pg.Uint8, o.stream)))
	got = o.copies() == before
	copyTo(mem.Host(back, mem.Anywhere), m)
	e, err := o.stream.Record()
	must(err)
	within, cancel := context.WithTimeout(ctx, 20*time.Second)
	defer cancel()
	must(e.Wait(within))
	if !bytes.Equal(back, want) {
		t.Errorf("round %d: other bytes than those %d were got", round, size)
	}
	return put, got
}
