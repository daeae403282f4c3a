//go:build cgo && linux

package cuda

import (
	"bytes"
	"errors"
	"strings"
	"testing"

	"tutti/device"
	"tutti/device/cuda/fake"
	"tutti/kernels"
	"tutti/mem"
)

// Places of borrowed streams, also of the default stream, are in the order of the caller's work.
func TestPlacesOfBorrowedStreams(t *testing.T) {
	for _, config := range []fake.Config{{}, {NoMemoryOps: true}} {
		f, v := open(t, config)
		for _, handle := range []uintptr{0, 1, uintptr(foreign(t, v))} {
			s := v.Borrow(handle)
			const n = 1 << 12
			a, b, c := alloc(t, v, n), alloc(t, v, n), alloc(t, v, n)
			copy(f.Bytes(a), bytes.Repeat([]byte{1}, n))
			copy(f.Bytes(b), bytes.Repeat([]byte{2}, n))
			places, err := v.Reserve(s, device.Places{N: 3, Bytes: n, Op: kernels.Max, DType: kernels.Uint8})
			must(t, err)
			must(t, v.gpu.copy(queue(handle), c.Address(), a.Address(), n))
			end, err := s.Record()
			must(t, err)
			must(t, places.Reduce(kernels.Max, kernels.Uint8, a, []mem.Memory{a, b}, 0))
			e, err := places.Record()
			must(t, err)
			must(t, e.Wait(t.Context()))
			if end.Done() || f.Bytes(c)[0] == 2 {
				t.Error("the stream has passed places that are left")
			}
			must(t, places.Close(), end.Wait(t.Context()))
			if !bytes.Equal(f.Bytes(c), bytes.Repeat([]byte{2}, n)) {
				t.Errorf("the work behind the places has copied %v", f.Bytes(c)[:4])
			}
			must(t, v.Free(a), v.Free(b), v.Free(c))
		}
	}
}

// A stream that is captured has no places, and is not given any.
func TestCapturedStreamsHaveNoPlaces(t *testing.T) {
	f, v := open(t, fake.Config{})
	q := foreign(t, v)
	f.Capture(uintptr(q), true)
	before := f.Calls()["cuLaunchKernel"]
	if _, err := v.Reserve(v.Borrow(uintptr(q)), device.Places{N: 1}); !errors.Is(err, errors.ErrUnsupported) ||
		!strings.Contains(err.Error(), "captured") {
		t.Errorf("places in a stream that is captured: %v", err)
	}
	if f.Calls()["cuLaunchKernel"] != before {
		t.Error("a kernel was launched")
	}
	f.Capture(uintptr(q), false)
}

// The memory of places is used again, once a stream has passed them.
func TestPlacesUseMemoryAgain(t *testing.T) {
	f, v := open(t, fake.Config{})
	s := newStreamOf(t, v)
	reserveTwice := func() {
		var places [2]device.Stream
		for i, n := range []int{3, 2} {
			var err error
			places[i], err = v.Reserve(s, device.Places{N: n})
			must(t, err)
		}
		must(t, places[1].Close(), places[0].Close(), wait(s))
	}
	reserveTwice()
	blocks, host := used(f, v)
	for range 20 {
		reserveTwice()
	}
	if more, moreHost := used(f, v); more != blocks || moreHost != host {
		t.Errorf("%d allocations on the device and %d on the host, %d and %d before", more, moreHost, blocks, host)
	}
}

// More places than a stream takes operations are held by it, and follow when it has room.
func TestManyPlaces(t *testing.T) {
	f, v := open(t, fake.Config{})
	s := newStreamOf(t, v)
	const n, count = 256, 300
	a, b := alloc(t, v, n), alloc(t, v, n)
	copy(f.Bytes(a), bytes.Repeat([]byte{0}, n))
	copy(f.Bytes(b), bytes.Repeat([]byte{1}, n))
	places, err := v.Reserve(s, device.Places{N: count, Bytes: n, Op: kernels.Sum, DType: kernels.Uint8})
	must(t, err)
	for range count {
		must(t, places.Reduce(kernels.Sum, kernels.Uint8, a, []mem.Memory{a, b}, 0))
	}
	e, err := places.Record()
	must(t, err)
	must(t, e.Wait(t.Context()), places.Close(), wait(s))
	if got := f.Bytes(a)[0]; got != count%256 {
		t.Errorf("%d additions are %d", count, got)
	}
}

// Where launches wait for their kernels, no stream has places and no ranks have an exchange: both
// wait in kernels for what comes later.
func TestBlockingLaunches(t *testing.T) {
	for set, want := range map[string]bool{"": false, "0": false, "1": true} {
		t.Setenv("CUDA_LAUNCH_BLOCKING", set)
		_, v := open(t, fake.Config{})
		x, err := v.NewExchange(t.Context(), 0, 2)
		if err == nil {
			must(t, x.Free(t.Context()))
		}
		if v.Reserves() == want || errors.Is(err, errors.ErrUnsupported) != want {
			t.Errorf("%q: places %v, exchange %v", set, v.Reserves(), err)
		}
	}
}
