//go:build cgo && linux

package cuda

import (
	"bytes"
	"errors"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"tutti/device"
	"tutti/device/cuda/fake"
	"tutti/device/cuda/program"
	"tutti/kernels"
	"tutti/mem"
)

// foreign is a stream that is not of package device, as those of a program are: package cuda has
// made it, but only its handle is used.
func foreign(t *testing.T, v *Device) queue {
	t.Helper()
	q, err := v.gpu.newQueue()
	must(t, err)
	t.Cleanup(func() { must(t, v.gpu.destroyQueue(q)) })
	return q
}

// Work of a borrowed stream is in the order of the stream, also of the default stream, and given to
// the driver at once.
func TestBorrowedStreams(t *testing.T) {
	for _, config := range []fake.Config{{}, {NoMemoryOps: true}} {
		f := fake.New(t, config)
		driver, err := LoadLibrary(f.Path)
		must(t, err)
		v, err := driver.Open(0)
		must(t, err)
		t.Cleanup(func() { // after those of the streams and words
			must(t, v.Close())
			f.Empty(t)
		})
		for _, handle := range []uintptr{0, 1, uintptr(foreign(t, v))} {
			s := v.Borrow(handle)
			if s != v.Borrow(handle) {
				t.Error("two streams of one handle are different")
			}
			const n = 1 << 10
			pinned, err := v.AllocHost(n)
			must(t, err)
			back, err := v.AllocHost(n)
			must(t, err)
			for i := range pinned.Bytes() {
				pinned.Bytes()[i] = byte(i)
			}
			a, b := alloc(t, v, n), alloc(t, v, n)
			w := wordsOf(t, v, 2)
			must(t, s.WaitValue(w[0], 1), s.Copy(a, pinned), v.gpu.copy(queue(handle), b.Address(), a.Address(), n),
				s.Reduce(kernels.Sum, kernels.Uint8, a, []mem.Memory{a, b}, 0), s.Copy(back, a), s.WriteValue(w[1], 7))
			e, err := s.Record()
			must(t, err)
			if e.Done() {
				t.Error("the stream has passed a word that has not come")
			}
			w[0].Word(0).Store(1)
			must(t, e.Wait(t.Context()))
			want := make([]byte, n)
			for i := range want {
				want[i] = 2 * byte(i)
			}
			if !bytes.Equal(back.Bytes(), want) || w[1].Word(0).Load() != 7 {
				t.Errorf("stream %#x: %x... and the word %d", handle, back.Bytes()[:8], w[1].Word(0).Load())
			}
			must(t, s.Close(), s.Copy(a, b)) // it is not the stream's end
			if err := s.Copy(a, ordinary(t, n)); !errors.Is(err, device.ErrMemory) {
				t.Errorf("memory that is not pinned: %v, want %v", err, device.ErrMemory)
			}
			must(t, v.FreeHost(pinned), v.FreeHost(back), v.Free(a), v.Free(b))
		}
	}
}

// Events that are not asked about are used again.
func TestForgottenEvents(t *testing.T) {
	f := fake.New(t, fake.Config{})
	driver, err := LoadLibrary(f.Path)
	must(t, err)
	v, err := driver.Open(0)
	must(t, err)
	s := v.Borrow(0)
	for range 10 {
		_, err := s.Record()
		must(t, err)
	}
	for until := time.Now().Add(30 * time.Second); ; runtime.Gosched() {
		runtime.GC()
		v.outside.mu.Lock()
		spare := len(v.outside.spare)
		v.outside.mu.Unlock()
		if spare == 10 {
			break
		}
		if time.Now().After(until) {
			t.Fatalf("%d events of 10 came back", spare)
		}
	}
	for range 10 {
		e, err := s.Record()
		must(t, err)
		must(t, e.Wait(t.Context()))
	}
	if n := f.Census().Events; n != 10 {
		t.Errorf("%d events, want 10", n)
	}
	must(t, v.Close())
	f.Empty(t)
}

// A stream whose work goes into a graph takes none.
func TestCapturedStreams(t *testing.T) {
	f := fake.New(t, fake.Config{})
	driver, err := LoadLibrary(f.Path)
	must(t, err)
	v, err := driver.Open(0)
	must(t, err)
	t.Cleanup(func() {
		must(t, v.Close())
		f.Empty(t)
	})
	w := wordsOf(t, v, 1)
	m := alloc(t, v, 64)
	q := foreign(t, v)
	s := v.Borrow(uintptr(q))
	f.Capture(uintptr(q), true)
	_, err = s.Record()
	for i, err := range []error{err, s.Copy(m, m), s.WaitValue(w[0], 1), s.WriteValue(w[0], 1)} {
		if err == nil || !strings.Contains(err.Error(), "captured") {
			t.Errorf("call %d on a stream that is captured: %v", i, err)
		}
	}
	f.Capture(uintptr(q), false)
	must(t, s.WriteValue(w[0], 1))
	e, err := s.Record()
	must(t, err)
	must(t, e.Wait(t.Context()))
}

// Preload opens the GPUs whose primary contexts the process has, and those that it is told, once.
func TestFinderPreloadsGPUsInUse(t *testing.T) {
	f, d := start(t, fake.Config{Devices: 4})
	var gpus device.Finder = &Finder{Driver: func() (*Driver, error) { return d, nil }, Ordinals: []int{3}}
	finder := gpus.(*Finder)
	opened := func() (open []int) {
		for n := range finder.open {
			open = append(open, n)
		}
		slices.Sort(open)
		return open
	}
	used, err := d.Open(1)
	must(t, err)
	for range 2 {
		ready, err := gpus.(device.Preloader).Preload()
		must(t, err)
		if len(ready) != 2 {
			t.Errorf("%d devices are ready, want 2", len(ready))
		}
		if got := opened(); !slices.Equal(got, []int{1, 3}) {
			t.Errorf("GPUs %v are open, want 1 and 3", got)
		}
	}
	loads := f.Calls()["cuFuncLoad"]
	v, err := finder.Device(1)
	must(t, err)
	if f.Calls()["cuFuncLoad"] != loads || v == used {
		t.Error("the GPU was opened again when it was asked for")
	}
	for call, want := range map[string]string{"cuDevicePrimaryCtxGetState": "is in use", "cuDeviceGetCount": "count"} {
		f.Fail(call, 1, fake.NotSupported)
		if _, err := finder.Preload(); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s fails: %v", call, err)
		}
	}
	finder.Ordinals = []int{9, 0}
	if _, err := finder.Preload(); err == nil || !strings.Contains(err.Error(), "cuda:9") {
		t.Errorf("there is no GPU 9: %v", err)
	}
	if got := opened(); !slices.Equal(got, []int{0, 1, 3}) {
		t.Errorf("GPUs %v are open, want 0 as well", got)
	}
	must(t, finder.Close(), used.Close())
	f.Empty(t)
}

// A process that has not initialized the driver gets none from Preload.
func TestFinderPreloadLeavesTheDriverAlone(t *testing.T) {
	var gpus Finder
	ready, err := gpus.Preload()
	must(t, err)
	if len(ready) > 0 || len(gpus.open) > 0 {
		t.Error("a GPU was opened")
	}
}

// GPUs are opened when they are asked for, once, and closed together.
func TestFinder(t *testing.T) {
	f := fake.New(t, fake.Config{})
	fails := true
	gpus := Finder{Driver: func() (*Driver, error) {
		if fails {
			return nil, ErrUnavailable
		}
		return LoadLibrary(f.Path)
	}}
	if _, err := gpus.Find("cuda:1"); !errors.Is(err, ErrUnavailable) {
		t.Errorf("%v, want %v", err, ErrUnavailable)
	}
	fails = false
	d, err := gpus.Find("cuda:1")
	must(t, err)
	if again, err := gpus.Find("cuda:1"); err != nil || again != d || d.Location() != "cuda:1" {
		t.Errorf("%v at %q and %v, %v", d, d.Location(), again, err)
	}
	for _, loc := range []mem.Location{"cuda:2", "cuda:", "cuda:-1", "cuda:01", "rocm:0", "cpu:0"} {
		if d, err := gpus.Find(loc); err == nil {
			t.Errorf("%q is %v", loc, d)
		}
	}
	if n := f.Census().Contexts; n != 1 {
		t.Errorf("%d contexts, want 1", n)
	}
	must(t, gpus.Close(), gpus.Close())
	if _, err := gpus.Find("cuda:1"); !errors.Is(err, device.ErrClosed) {
		t.Errorf("%v, want %v", err, device.ErrClosed)
	}
	f.Empty(t)
}

// The program captures a stream while the device looks at events, and memory of the host is freed:
// neither ends the capture.
func TestCaptureBesideTheDevice(t *testing.T) {
	f, v := open(t, fake.Config{})
	s, w := newStreamOf(t, v), wordsOf(t, v, 1)
	must(t, s.WaitValue(w[0], 1))
	e, err := s.Record()
	must(t, err)
	host, err := v.AllocHost(1 << 20)
	must(t, err)
	p := program.Open(t, f.Path, v.Info().Ordinal)
	own, err := p.Stream()
	must(t, err)
	defer p.Destroy(own)
	g, err := p.Capture(own, func() error {
		freed := make(chan error)
		go func() {
			for range 200 { // not every call asks the driver
				e.Done()
			}
			freed <- v.FreeHost(host)
		}()
		return <-freed
	})
	must(t, err)
	must(t, g.Close())
	w[0].Word(0).Store(1)
	must(t, e.Wait(t.Context()))
}
