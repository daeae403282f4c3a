package devicetest

import (
	"bytes"
	"context"
	"errors"
	"math"
	"math/rand/v2"
	"slices"
	"testing"
	"time"
	"unsafe"

	"tutti/device"
	"tutti/kernels"
	"tutti/mem"
)

// Fold computes Stream.Reduce on bytes of the host. dst may be one of srcs.
func Fold(op kernels.Op, dt kernels.DType, dst []byte, srcs [][]byte, divisor int) error {
	if err := kernels.Reduce(op, dt, dst, srcs...); err != nil {
		return err
	}
	if divisor > 0 {
		kernels.Scale(dt, unsafe.Pointer(unsafe.SliceData(dst)), len(dst)/dt.Size(), divisor)
	}
	return nil
}

// patience bounds waits that end at once unless the test fails.
const patience = 30 * time.Second

// A Harness is a device under test, with access to its memory while no stream uses it.
type Harness struct {
	Device device.Device
	// Bytes returns contents of the device's memory.
	Bytes func(mem.Memory) []byte
	// Fill sets them; nil if what Bytes returns is the memory itself.
	Fill func(mem.Memory, []byte)
}

// fill sets the contents of memory.
func (h Harness) fill(m mem.Memory, b []byte) {
	if h.Fill == nil {
		copy(h.Bytes(m), b)
		return
	}
	h.Fill(m, b)
}

// Suite tests that a device fulfils its contract.
func Suite(t *testing.T, open func(t *testing.T) Harness) {
	for name, f := range map[string]func(t *testing.T, h Harness){
		"memory": testMemory, "order": testOrder, "words": testWords, "events": testEvents,
		"host memory": testHostMemory, "reductions": testReductions, "refusals": testRefusals, "closing": testClosing,
		"places": placed(testPlaces), "places of a closed stream": placed(testClosedPlaces),
		"refusals of places": placed(testPlaceRefusals), "copies of a place": placed(testCopiesOfAPlace),
	} {
		t.Run(name, func(t *testing.T) { f(t, open(t)) })
	}
}

func (h Harness) alloc(t *testing.T, n int) mem.Memory {
	t.Helper()
	m, err := h.Device.Alloc(n)
	if err != nil {
		t.Fatal(err)
	}
	return m
}

func (h Harness) stream(t *testing.T) device.Stream {
	t.Helper()
	s, err := h.Device.Stream()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.Close() })
	return s
}

// words returns words of the device, which are freed when the test has ended.
func (h Harness) words(t *testing.T, n int) []mem.Memory {
	t.Helper()
	words, free, err := device.Words(h.Device, n)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { must(t, free()) })
	return words
}

// finish waits until all work of s is done.
func finish(t *testing.T, s device.Stream) {
	t.Helper()
	e, err := s.Record()
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	if err := e.Wait(ctx); err != nil {
		t.Fatal(err)
	}
	if !e.Done() {
		t.Fatal("an event that was waited for is not over")
	}
}

func must(t *testing.T, errs ...error) {
	t.Helper()
	if err := errors.Join(errs...); err != nil {
		t.Fatal(err)
	}
}

func testMemory(t *testing.T, h Harness) {
	for _, n := range []int{0, 1, 7, 4096, 1 << 20} {
		m := h.alloc(t, n)
		if m.Len() != n || m.Loc() != h.Device.Location() {
			t.Errorf("%d bytes at %q, want %d at %q", m.Len(), m.Loc(), n, h.Device.Location())
		}
		if got := len(h.Bytes(m.Slice(n/3, n/2))); got != n/2 {
			t.Errorf("a slice of %d bytes, want %d", got, n/2)
		}
		must(t, h.Device.Free(m))
	}
	if _, err := h.Device.Alloc(-1); !errors.Is(err, device.ErrMemory) {
		t.Errorf("less than no memory: %v", err)
	}
	if _, err := h.Device.Alloc(math.MaxInt); err == nil {
		t.Error("more memory than there is: no error")
	}
	other := mem.Device(1<<40, 8, "cuda:7")
	if err := h.Device.Free(other); !errors.Is(err, device.ErrMemory) {
		t.Errorf("freeing another device's memory: %v", err)
	}
}

// testOrder moves numbers in a random sequence of copies, which one stream must execute in order.
func testOrder(t *testing.T, h Harness) {
	s, r := h.stream(t), rand.New(rand.NewPCG(1, 2))
	const cells, size, moves = 8, 64, 300
	all := h.alloc(t, cells*size)
	want := make([][]byte, cells)
	for i := range want {
		want[i] = bytes.Repeat([]byte{byte(i + 1)}, size)
		h.fill(all.Slice(i*size, size), want[i])
	}
	cell := func(i int) mem.Memory { return all.Slice(i*size, size) }
	for range moves {
		a, b, c := r.IntN(cells), r.IntN(cells), r.IntN(cells)
		if r.IntN(2) == 0 {
			must(t, s.Copy(cell(a), cell(b)))
			want[a] = slices.Clone(want[b])
			continue
		}
		must(t, s.Reduce(kernels.Sum, kernels.Uint32, cell(a), []mem.Memory{cell(b), cell(c)}, 0))
		sum := make([]byte, size)
		must(t, Fold(kernels.Sum, kernels.Uint32, sum, [][]byte{want[b], want[c]}, 0))
		want[a] = sum
	}
	finish(t, s)
	for i := range want {
		if got := h.Bytes(cell(i)); !bytes.Equal(got, want[i]) {
			t.Fatalf("cell %d holds %x, want %x", i, got, want[i])
		}
	}
}

// testWords passes data between two streams and the host, synchronized only by words.
func testWords(t *testing.T, h Harness) {
	const rounds, size = 50, 256
	words := h.words(t, 3)
	a, b := h.stream(t), h.stream(t)
	x, y := h.alloc(t, size), h.alloc(t, size)
	filled, copied, back := words[0], words[1], words[2]
	for i := uint64(1); i <= rounds; i++ {
		must(t, a.WaitValue(filled, i), a.Copy(y, x), a.WriteValue(copied, i))
		must(t, b.WaitValue(copied, i),
			b.Reduce(kernels.Sum, kernels.Uint8, x, []mem.Memory{y, y}, 0), b.WriteValue(back, i))
	}
	events := []device.Event{}
	for _, s := range []device.Stream{a, b} {
		e, err := s.Record()
		must(t, err)
		events = append(events, e)
	}
	for i := uint64(1); i <= rounds; i++ {
		h.fill(x, bytes.Repeat([]byte{byte(i)}, size))
		filled.Word(0).Store(i)
		for until := time.Now().Add(patience); back.Word(0).Load() < i; {
			if events[0].Done(); events[1].Done() && back.Word(0).Load() < i || time.Now().After(until) {
				t.Fatalf("round %d: the streams stand still", i)
			}
		}
		if got := h.Bytes(x); !bytes.Equal(got, bytes.Repeat([]byte{byte(2 * i)}, size)) {
			t.Fatalf("round %d: %x", i, got[:8])
		}
	}
}

func testEvents(t *testing.T, h Harness) {
	gate := h.words(t, 1)[0]
	s := h.stream(t)
	before, err := s.Record()
	must(t, err, s.WaitValue(gate, 2))
	after, err := s.Record()
	must(t, err, before.Wait(t.Context()))
	gate.Word(0).Store(1)
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Millisecond)
	defer cancel()
	if err := after.Wait(ctx); !errors.Is(err, context.DeadlineExceeded) || after.Done() {
		t.Errorf("an event behind a word with a smaller value: %v", err)
	}
	gate.Word(0).Store(3)
	must(t, after.Wait(t.Context()))
}

func testReductions(t *testing.T, h Harness) {
	s := h.stream(t)
	for _, dt := range []kernels.DType{kernels.Float32, kernels.BFloat16, kernels.Int64, kernels.Uint8} {
		for n := 1; n <= 4; n++ {
			for _, divisor := range []int{0, 3} {
				const size = 120
				srcs, host := make([]mem.Memory, n), make([][]byte, n)
				for i := range srcs {
					srcs[i] = h.alloc(t, size)
					host[i] = bytes.Repeat([]byte{1, 0x40, 2, 0x41}, size/4)
					h.fill(srcs[i], host[i])
				}
				want := make([]byte, size)
				must(t, Fold(kernels.Sum, dt, want, host, divisor))
				dst := h.alloc(t, size)
				must(t, s.Reduce(kernels.Sum, dt, dst, srcs, divisor),
					s.Reduce(kernels.Sum, dt, srcs[n-1], srcs, divisor))
				finish(t, s)
				for what, m := range map[string]mem.Memory{"elsewhere": dst, "in place": srcs[n-1]} {
					if got := h.Bytes(m); !bytes.Equal(got, want) {
						t.Errorf("%d sources of %v over %d, %s: %x, want %x", n, dt, divisor, what, got[:8], want[:8])
					}
				}
			}
		}
	}
}

// testHostMemory copies from the host to the device, and back, in host memory of either kind.
func testHostMemory(t *testing.T, h Harness) {
	const n = 10000
	s := h.stream(t)
	m := h.alloc(t, n)
	kinds := []mem.Memory{mem.Host(make([]byte, n), mem.Anywhere)}
	if a, ok := h.Device.(device.HostAllocator); ok {
		own, err := a.AllocHost(n)
		if err != nil || !own.Loc().Host() || own.Len() != n {
			t.Fatal(own.Loc(), own.Len(), err)
		}
		defer func() { must(t, a.FreeHost(own)) }()
		kinds = append(kinds, own)
		if err := a.FreeHost(kinds[0]); !errors.Is(err, device.ErrMemory) {
			t.Errorf("freeing other host memory: %v", err)
		}
	}
	for i, k := range kinds {
		want := bytes.Repeat([]byte{byte(i + 1)}, n)
		copy(k.Bytes(), want)
		must(t, s.Copy(m, k), s.Copy(k, m))
		e, err := s.Record()
		must(t, err)
		ctx, cancel := context.WithTimeout(t.Context(), patience)
		must(t, e.Wait(ctx))
		cancel()
		if !bytes.Equal(k.Bytes(), want) || !bytes.Equal(h.Bytes(m), want) {
			t.Errorf("host memory %d: other bytes", i)
		}
	}
	finish(t, s)
}

func testRefusals(t *testing.T, h Harness) {
	s := h.stream(t)
	m, short, other := h.alloc(t, 8), h.alloc(t, 4), mem.Device(1<<40, 8, "cuda:7")
	for what, err := range map[string]error{
		"a copy of another length":          s.Copy(m, short),
		"a copy from another device":        s.Copy(m, other),
		"a copy to another device":          s.Copy(other, m),
		"a reduction of nothing":            s.Reduce(kernels.Sum, kernels.Int8, m, nil, 0),
		"a reduction of another length":     s.Reduce(kernels.Sum, kernels.Int8, m, []mem.Memory{m, short}, 0),
		"a reduction of parts of elements":  s.Reduce(kernels.Sum, kernels.Int64, short, []mem.Memory{short}, 0),
		"a word of the wrong length":        s.WaitValue(mem.Host(make([]byte, 4), mem.Anywhere), 1),
		"a word to write on another device": s.WriteValue(other, 1),
	} {
		if !errors.Is(err, device.ErrMemory) {
			t.Errorf("%s: %v", what, err)
		}
	}
	for what, err := range map[string]error{
		"a reduction that is not defined":    s.Reduce(kernels.BitAnd, kernels.Float32, m, []mem.Memory{m}, 0),
		"a division that is not defined":     s.Reduce(kernels.Sum, kernels.Bool, m, []mem.Memory{m}, 2),
		"a division by less than nothing":    s.Reduce(kernels.Sum, kernels.Int8, m, []mem.Memory{m}, -1),
		"a reduction of no elements at all":  s.Reduce(kernels.Sum, 0, m, []mem.Memory{m}, 0),
		"a reduction by no operation at all": s.Reduce(0, kernels.Int8, m, []mem.Memory{m}, 0),
	} {
		if err == nil {
			t.Errorf("%s was taken", what)
		}
	}
	finish(t, s)
}

func testClosing(t *testing.T, h Harness) {
	gate := h.words(t, 1)[0]
	s := h.stream(t)
	m := h.alloc(t, 8)
	src := h.alloc(t, 8)
	must(t, s.Copy(m, src))
	reached, err := s.Record()
	must(t, err, reached.Wait(t.Context()), s.WaitValue(gate, 1), s.Copy(m, src))
	e, err := s.Record()
	must(t, err, s.Close(), s.Close())
	if err := e.Wait(t.Context()); !errors.Is(err, device.ErrClosed) || !e.Done() {
		t.Errorf("an event of a stream that was closed: %v", err)
	}
	if err := reached.Wait(t.Context()); err != nil {
		t.Errorf("an event that was reached before the stream was closed: %v", err)
	}
	if err := s.Copy(m, src); !errors.Is(err, device.ErrClosed) {
		t.Errorf("work for a stream that was closed: %v", err)
	}
	if _, err := s.Record(); !errors.Is(err, device.ErrClosed) {
		t.Errorf("an event of a stream that was closed: %v", err)
	}
	own := []byte("the host")
	h.fill(m, own)
	gate.Word(0).Store(1)
	after := h.stream(t)
	must(t, after.Copy(src, src))
	finish(t, after)
	if !bytes.Equal(h.Bytes(m), own) {
		t.Error("a stream did after Close what it was held up before")
	}
}
