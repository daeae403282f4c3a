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

// A Finder asks its own environment, not that of the process.
func TestBlockingLaunchesOfAFinder(t *testing.T) {
	f := fake.New(t, fake.Config{})
	for _, set := range []string{"", "1"} {
		gpus := Finder{Driver: func() (*Driver, error) { return LoadLibrary(f.Path) },
			Getenv: func(string) string { return set }}
		d, err := gpus.Device(0)
		must(t, err)
		if d.Reserves() != (set == "") {
			t.Errorf("%q: places %v", set, d.Reserves())
		}
		must(t, gpus.Close())
	}
}

// Places that a stream does not take leave their memory to others: when a borrowed stream has
// passed what it was given, and when a stream is closed.
func TestFailedReserveFreesItsRoom(t *testing.T) {
	f, v := open(t, fake.Config{})
	q := foreign(t, v)
	rooms := 0
	for call, n := range map[string]int{"cuStreamWriteValue64_v2": 1, "cuStreamWaitValue64_v2": 3, "cuMemcpyAsync": 3,
		"cuLaunchKernel": 6} {
		for k := 1; k <= n; k++ {
			own, err := v.Stream()
			must(t, err)
			for name, s := range map[string]device.Stream{"borrowed": v.Borrow(uintptr(q)), "own": own} {
				f.Fail(call, k, fake.OutOfMemory)
				_, err = v.Reserve(s, device.Places{N: 3})
				if e, ok := errors.AsType[*Error](err); !ok || e.Code != fake.OutOfMemory {
					t.Fatalf("call %d of %s fails: %v", k, call, err)
				}
				if s == own {
					must(t, own.Close())
				} else {
					must(t, wait(s))
				}
				rooms = max(rooms, len(v.rooms.all))
				if v.rooms.held() || rooms != 1 {
					t.Fatalf("%s, call %d of %s fails: a room of %d is not free", name, k, call, len(v.rooms.all))
				}
			}
		}
	}
	s := newStreamOf(t, v)
	places, err := v.Reserve(s, device.Places{N: 3})
	must(t, err)
	m := alloc(t, v, 16)
	copy(f.Bytes(m), "abcdefghijklmnop")
	must(t, places.Copy(m.Slice(0, 8), m.Slice(8, 8)), wait(places), places.Close(), wait(s))
	if got := string(f.Bytes(m)); got != "ijklmnopijklmnop" || len(v.rooms.all) != 1 {
		t.Errorf("%d rooms, and places have made %q", len(v.rooms.all), got)
	}
}

// A stream that is closed drops places that the driver has not been given. Their memory is used
// again, and their events fail also then.
func TestClosedStreamFreesRooms(t *testing.T) {
	_, v := open(t, fake.Config{})
	word := wordsOf(t, v, 1)[0]
	m := alloc(t, v, 16)
	order := device.Places{N: mostInFlight}
	s, err := v.Stream()
	must(t, err, s.WaitValue(word, 1))
	places, err := v.Reserve(s, order)
	must(t, err)
	for range order.N {
		must(t, places.WriteValue(word, 1))
	}
	e, err := places.Record()
	must(t, err, s.Close())
	if v.rooms.held() {
		t.Error("a stream that was closed has places to pass")
	}
	rooms := len(v.rooms.all)
	other := newStreamOf(t, v)
	again, err := v.Reserve(other, order)
	must(t, err, again.Close(), wait(other))
	if len(v.rooms.all) != rooms {
		t.Errorf("%d rooms, want %d", len(v.rooms.all), rooms)
	}
	if err := e.Wait(t.Context()); !errors.Is(err, device.ErrClosed) {
		t.Errorf("an event of a place that was dropped: %v", err)
	}
	if err := places.Copy(m.Slice(0, 8), m.Slice(8, 8)); !errors.Is(err, device.ErrClosed) {
		t.Errorf("a copy in a place that was dropped: %v", err)
	}
	must(t, places.Close())
}

// Events of places tell what they did after the device was closed, also those of an earlier use of
// the room.
func TestEventsOfPlacesOutliveTheDevice(t *testing.T) {
	_, d := start(t, fake.Config{})
	v, err := d.Open(0)
	must(t, err)
	s, err := v.Stream()
	must(t, err)
	var all []device.Stream
	var done []device.Event
	for range 2 {
		places, err := v.Reserve(s, device.Places{N: 2})
		must(t, err)
		e, err := places.Record()
		must(t, err, places.Close(), wait(s))
		all, done = append(all, places), append(done, e)
	}
	words, _, err := device.Words(v, 1)
	must(t, err, s.WaitValue(words[0], 1))
	places, err := v.Reserve(s, device.Places{N: mostInFlight}) // more than the driver is given
	must(t, err)
	for range mostInFlight {
		must(t, places.WriteValue(words[0], 1))
	}
	dropped, err := places.Record()
	must(t, err, v.Close())
	for _, e := range done {
		if !e.Done() {
			t.Error("an event is not done any more")
		}
		must(t, e.Wait(t.Context()))
	}
	if err := dropped.Wait(t.Context()); !errors.Is(err, device.ErrClosed) {
		t.Errorf("an event of a place that was dropped: %v", err)
	}
	for _, places := range append(all, places) {
		must(t, places.Close())
		if e, err := places.Record(); err != nil || !e.Done() {
			t.Errorf("places of a device that was closed: %v", err)
		}
	}
}

// A stream that has not been seen to end may still do its work: the memory of its places and its
// buffers are not used again.
func TestUnfinishedStreamsKeepMemory(t *testing.T) {
	f, v := open(t, fake.Config{})
	word := wordsOf(t, v, 1)[0]
	order := device.Places{N: mostInFlight} // more than the driver is given
	s, err := v.Stream()
	must(t, err, s.WaitValue(word, 1))
	places, err := v.Reserve(s, order)
	must(t, err)
	f.Fail("cuStreamQuery", 1, fake.OutOfMemory)
	if e, ok := errors.AsType[*Error](s.Close()); !ok || e.Code != fake.OutOfMemory {
		t.Errorf("the end of a stream that is not known: %v", e)
	}
	rooms := len(v.rooms.all)
	other := newStreamOf(t, v)
	again, err := v.Reserve(other, order)
	must(t, err, again.Close(), wait(other), places.Close())
	if len(v.rooms.all) != rooms+1 {
		t.Errorf("%d rooms, want %d", len(v.rooms.all), rooms+1)
	}
	if other.(*stream).staged.whole == s.(*stream).staged.whole {
		t.Error("two streams have the same buffers")
	}
}
