package devicetest

import (
	"bytes"
	"context"
	"errors"
	"math/rand/v2"
	"testing"
	"time"

	"tutti/device"
	"tutti/kernels"
	"tutti/mem"
)

// placed returns the test of a device whose streams have places, and of none other.
func placed(f func(t *testing.T, h Harness, d device.Reserver)) func(t *testing.T, h Harness) {
	return func(t *testing.T, h Harness) {
		if d, ok := h.Device.(device.Reserver); ok {
			f(t, h, d)
		}
	}
}

// reserve reserves places in s.
func reserve(t *testing.T, d device.Reserver, s device.Stream, p device.Places) device.Stream {
	t.Helper()
	r, err := d.Reserve(s, p)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { r.Close() })
	return r
}

func record(t *testing.T, s device.Stream) device.Event {
	t.Helper()
	e, err := s.Record()
	if err != nil {
		t.Fatal(err)
	}
	return e
}

// await waits for an event, which has an error or not.
func await(t *testing.T, e device.Event) error {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	err := e.Wait(ctx)
	if ctx.Err() != nil {
		t.Fatal("an event has not come in time")
	}
	return err
}

// testPlaces gives a stream work, places, and work behind them, and then the work of the places, in
// random portions.
func testPlaces(t *testing.T, h Harness, d device.Reserver) {
	r := rand.New(rand.NewPCG(5, 1))
	const n = 40_000
	a, b, c := h.alloc(t, n), h.alloc(t, n), h.alloc(t, n)
	pinned, err := h.Device.(device.HostAllocator).AllocHost(n)
	must(t, err)
	words := h.words(t, 3)
	s := h.stream(t)
	for round := range uint64(12) {
		in, other := make([]byte, n), make([]byte, n)
		for i := range in {
			in[i], other[i] = byte(r.Uint32()), byte(r.Uint32())
		}
		copy(pinned.Bytes(), in)
		h.fill(b, other)
		// The stream: what is in pinned comes to a, and goes back. Places between: c = a+b, a = c.
		must(t, s.WaitValue(words[0], round+1), s.Copy(a, pinned))
		places := reserve(t, d, s, device.Places{N: 3 + r.IntN(3), Bytes: n, Op: kernels.Sum, DType: kernels.Uint8})
		must(t, s.Copy(pinned, a), s.WriteValue(words[1], round+1))
		come, end := record(t, places), record(t, s)
		if r.IntN(2) == 0 {
			time.Sleep(time.Millisecond)
		}
		if come.Done() || end.Done() {
			t.Fatal("places are done before the work in front of them")
		}
		words[0].Word(0).Store(round + 1)
		must(t, await(t, come))
		if words[1].Word(0).Load() != round || end.Done() {
			t.Fatal("the stream has passed places that wait for work")
		}
		must(t, places.Reduce(kernels.Sum, kernels.Uint8, c, []mem.Memory{a, b}, 0))
		summed := come
		if r.IntN(2) == 0 {
			summed = record(t, places)
			must(t, await(t, summed))
			if !summed.Done() {
				t.Fatal("an event that was waited for is not done")
			}
		}
		must(t, places.Copy(a, c), places.WriteValue(words[2], round+1))
		for words[2].Word(0).Load() != round+1 {
			time.Sleep(50 * time.Microsecond)
		}
		if words[1].Word(0).Load() != round {
			t.Fatal("the stream has passed places that are left")
		}
		last := record(t, places)
		if r.IntN(2) == 0 { // it is not given to the stream
			must(t, places.Copy(a, b))
		}
		must(t, places.Close(), places.Close(), await(t, end), await(t, last))
		for i, got := range pinned.Bytes() {
			if want := in[i] + other[i]; got != want {
				t.Fatalf("byte %d is %d, want %d", i, got, want)
			}
		}
		if err := places.Copy(a, b); !errors.Is(err, device.ErrClosed) {
			t.Fatalf("work after Close: %v", err)
		}
		if !last.Done() || !summed.Done() || !record(t, places).Done() {
			t.Fatal("events are not valid after Close")
		}
	}
	must(t, h.Device.(device.HostAllocator).FreeHost(pinned))
}

// testClosedPlaces closes a stream before its places, and while they have work.
func testClosedPlaces(t *testing.T, h Harness, d device.Reserver) {
	const n = 100
	a, b := h.alloc(t, n), h.alloc(t, n)
	for work := range 3 {
		for _, open := range []bool{false, true} {
			s, err := h.Device.Stream()
			must(t, err)
			h.fill(a, bytes.Repeat([]byte{1}, n))
			h.fill(b, bytes.Repeat([]byte{2}, n))
			places := reserve(t, d, s, device.Places{N: 3, Bytes: n})
			come := record(t, places)
			must(t, await(t, come))
			for range work {
				must(t, places.Copy(a.Slice(0, n/2), b.Slice(0, n/2)))
				come = record(t, places)
			}
			must(t, await(t, come))
			if open { // it is not given to the stream
				must(t, places.Copy(a, b))
			}
			must(t, s.Close())
			if err := places.Copy(b, a); !errors.Is(err, device.ErrClosed) {
				t.Errorf("work for places of a stream that is closed: %v", err)
			}
			if !come.Done() || !record(t, places).Done() {
				t.Error("an event is not done any more, or one of a stream that is closed")
			}
			must(t, places.Close())
			want := append(bytes.Repeat([]byte{byte(1 + min(work, 1))}, n/2), bytes.Repeat([]byte{1}, n/2)...)
			if !bytes.Equal(h.Bytes(a), want) {
				t.Errorf("after %d pieces of work the destination has %v", work, h.Bytes(a)[:3])
			}
		}
	}
}

func testPlaceRefusals(t *testing.T, h Harness, d device.Reserver) {
	const n = 64
	a, b, c := h.alloc(t, n), h.alloc(t, n), h.alloc(t, n)
	words := h.words(t, 1)
	s := h.stream(t)
	for _, p := range []device.Places{{}, {N: 1, Bytes: -1}, {N: 1, Op: kernels.BitAnd, DType: kernels.Float32}} {
		if _, err := d.Reserve(s, p); !errors.Is(err, device.ErrPlaces) {
			t.Errorf("%+v: %v", p, err)
		}
	}
	if _, err := d.Reserve(nil, device.Places{N: 1}); !errors.Is(err, errors.ErrUnsupported) {
		t.Errorf("places in no stream: %v", err)
	}
	places := reserve(t, d, s, device.Places{N: 2, Bytes: n, Op: kernels.Sum, DType: kernels.Float32})
	sources := make([]mem.Memory, device.MaxPlaceSources+1)
	for i := range sources {
		sources[i] = b
	}
	for name, err := range map[string]error{
		"ordinary memory":   places.Copy(a, mem.Host(make([]byte, n), mem.Anywhere)),
		"different lengths": places.Copy(a, b.Slice(0, n-1)),
		"memory of nobody":  places.Copy(a, mem.Device(8, n, "cuda:99")),
		"no word":           places.WriteValue(a, 1),
		"another length":    places.Reduce(kernels.Sum, kernels.Float32, a, []mem.Memory{b, c.Slice(0, n-4)}, 0),
		"an undefined op":   places.Reduce(kernels.BitOr, kernels.Float32, a, []mem.Memory{b, c}, 0),
		"part of an element": places.Reduce(kernels.Sum, kernels.Float32, a.Slice(0, 3), []mem.Memory{b.Slice(0, 3)},
			0),
	} {
		if err == nil || errors.Is(err, device.ErrPlaces) {
			t.Errorf("%s: %v", name, err)
		}
	}
	for name, err := range map[string]error{
		"another type":   places.Reduce(kernels.Sum, kernels.Float64, a, []mem.Memory{b, c}, 0),
		"another op":     places.Reduce(kernels.Product, kernels.Float32, a, []mem.Memory{b, c}, 0),
		"too many":       places.Reduce(kernels.Sum, kernels.Float32, a, sources, 0),
		"waiting a word": places.WaitValue(words[0], 1),
	} {
		if !errors.Is(err, device.ErrPlaces) {
			t.Errorf("%s: %v", name, err)
		}
	}
	must(t, places.Reduce(kernels.Avg, kernels.Float32, a, []mem.Memory{b, c}, 0), places.WriteValue(words[0], 1),
		places.Copy(b, a))
	for name, err := range map[string]error{
		"another reduction":           places.Reduce(kernels.Sum, kernels.Float32, a, []mem.Memory{b, c}, 0),
		"a copy of a copy":            places.Copy(c, b),
		"a copy over what was copied": places.Copy(b.Slice(n-1, 1), c.Slice(n-1, 1)),
		"a copy over what is read":    places.Copy(a, c),
	} {
		if !errors.Is(err, device.ErrPlaces) {
			t.Errorf("%s for two places that have work: %v", name, err)
		}
	}
	must(t, await(t, record(t, places)), places.Close())
	finish(t, s)
}

// testCopiesOfAPlace has copies that do not depend on each other share a place.
func testCopiesOfAPlace(t *testing.T, h Harness, d device.Reserver) {
	const n = device.MaxPlaceCopies * 1000
	a, b := h.alloc(t, n), h.alloc(t, n)
	want := make([]byte, n)
	for i := range want {
		want[i] = byte(i * 7)
	}
	h.fill(a, want)
	s := h.stream(t)
	places := reserve(t, d, s, device.Places{N: 2, Bytes: n})
	for i := range device.MaxPlaceCopies {
		must(t, places.Copy(b.Slice(i*1000, 1000), a.Slice(i*1000, 1000)))
	}
	must(t, places.Copy(a.Slice(0, 500), a.Slice(500, 500)), await(t, record(t, places)))
	if got := h.Bytes(b); !bytes.Equal(got, want) {
		t.Error("copies that share a place have other results")
	}
	copy(want, want[500:1000])
	if got := h.Bytes(a); !bytes.Equal(got, want) {
		t.Error("the copy after them has another result")
	}
	if err := places.Copy(b, a); !errors.Is(err, device.ErrPlaces) {
		t.Errorf("work for a third place: %v", err)
	}
	must(t, places.Close())
	finish(t, s)
}
