package pg_test

import (
	"bytes"
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"tutti/device"
	"tutti/device/devicetest"
	"tutti/mem"
	"tutti/pg"
	"tutti/pg/pgtest"
)

// onLate is what a rank has on a Late device.
type onLate struct {
	t *testing.T
	d *devicetest.Late
	s device.Stream
}

func newOnLate(t *testing.T, d *devicetest.Late) *onLate {
	s, err := d.Stream()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.Close() })
	return &onLate{t, d, s}
}

// alloc returns memory that will have contents in the order of the stream.
func (o *onLate) alloc(contents []byte) mem.Memory {
	o.t.Helper()
	m, err := o.d.Alloc(len(contents))
	if err != nil {
		o.t.Fatal(err)
	}
	o.t.Cleanup(func() { o.d.Free(m) })
	o.set(m, contents)
	return m
}

func (o *onLate) set(m mem.Memory, contents []byte) {
	o.t.Helper()
	if err := o.s.Copy(m, mem.Host(bytes.Clone(contents), mem.Anywhere)); err != nil {
		o.t.Fatal(err)
	}
}

// get returns the contents of memory, in the order of the stream.
func (o *onLate) get(m mem.Memory) []byte {
	o.t.Helper()
	got := mem.Host(make([]byte, m.Len()), mem.Anywhere)
	if err := o.s.Copy(got, m); err != nil {
		o.t.Fatal(err)
	}
	o.idle()
	return got.Bytes()
}

func (o *onLate) idle() {
	o.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	e, err := o.s.Record()
	if err == nil {
		err = e.Wait(ctx)
	}
	if err != nil {
		o.t.Fatal(err)
	}
}

// Puts from and gets to a device's memory are in the order of its stream, which no goroutine waits
// for, and before a later signal.
func TestWindowBuffersOnDevices(t *testing.T) {
	const most, n = 300_000, 2
	d := devicetest.NewLate("cuda:0", 7, 20*time.Microsecond)
	everywhere(t, n, func(t *testing.T, g *pg.Group) {
		g.SetPiece(16 << 10)
		ctx, me, o := t.Context(), g.Rank(), newOnLate(t, d)
		w := newWindow(t, g, n*most)
		must := func(err error) {
			t.Helper()
			if err != nil {
				t.Fatal(err)
			}
		}
		must(g.Barrier(ctx))
		for round, size := range []int{0, 4, 1000, 100_000, most} {
			for _, stream := range []device.Stream{o.s, nil} {
				for to := range n {
					data := bytes.Repeat([]byte{byte(1 + 20*round + 5*me + to)}, size)
					m := o.alloc(data)
					if stream == nil {
						o.idle()
					}
					must(w.PutBuffer(ctx, to, me*most, pg.DeviceBuffer(m, pg.Uint8, stream)))
					if stream != nil {
						o.set(m, make([]byte, size))
					}
					must(w.Signal(ctx, to, 2))
				}
				must(g.Barrier(ctx))
				for from := range n {
					must(w.WaitSignal(ctx, from, 2, uint64(1+2*round)))
					want := bytes.Repeat([]byte{byte(1 + 20*round + 5*from + me)}, size)
					if !bytes.Equal(w.Bytes()[from*most:from*most+size], want) {
						t.Fatalf("round %d: the signal of rank %d came before its data", round, from)
					}
				}
				must(g.Barrier(ctx))
				for from := range n {
					m := o.alloc(make([]byte, size))
					if stream == nil {
						o.idle()
					}
					must(w.GetBuffer(ctx, from, me*most, pg.DeviceBuffer(m, pg.Uint8, stream)))
					want := bytes.Repeat([]byte{byte(1 + 20*round + 5*me + from)}, size)
					if got := o.get(m); !bytes.Equal(got, want) {
						t.Fatalf("round %d: got other bytes from rank %d than were put there", round, from)
					}
					must(w.Flush(ctx, from))
				}
				must(g.Barrier(ctx))
			}
		}
		x := []int32{1, 2, 3} // of the host
		must(w.PutBuffer(ctx, 1-me, 8, pg.BufferOf(x)))
		must(w.Flush(ctx, 1-me))
		y := make([]int32, 3)
		must(w.GetBuffer(ctx, 1-me, 8, pg.BufferOf(y)))
		if y[0] != 1 || y[2] != 3 {
			t.Errorf("got %v", y)
		}
		must(g.Barrier(ctx))
	}, pgtest.Config(pg.Config{Devices: device.List{d}}))
}

// What is wrong with a put or a get of a device is said. A stream that does not come, or a peer
// that is gone, ends it, and nothing touches the device's memory afterwards.
func TestWindowBuffersFail(t *testing.T) {
	d := devicetest.NewLate("cuda:0", 7, 20*time.Microsecond)
	pgtest.RunLocal(t, 2, func(t *testing.T, g *pg.Group) {
		g.SetPiece(16 << 10)
		ctx, o := t.Context(), newOnLate(t, d)
		w := newWindow(t, g, 100_000)
		other := 1 - g.Rank()
		pattern := bytes.Repeat([]byte{0xc5}, 100_000)
		m := o.alloc(pattern)
		o.idle()
		both := func(ctx context.Context, offset int, b pg.Buffer) []error {
			return []error{w.PutBuffer(ctx, other, offset, b), w.GetBuffer(ctx, other, offset, b)}
		}
		on := pg.DeviceBuffer(m, pg.Uint8, o.s)
		elsewhere := on
		elsewhere.Location = "cuda:9"
		for what, errs := range map[string][]error{
			"the range":     both(ctx, 1, on),
			"cuda:9":        both(ctx, 0, elsewhere),
			"the data type": both(ctx, 0, pg.Buffer{}),
			"the buffer":    both(ctx, 0, pg.Buffer{DType: pg.Uint8, Count: 1}),
			"the rank":      {w.PutBuffer(ctx, 2, 0, on), w.GetBuffer(ctx, -1, 0, on)},
		} {
			for _, err := range errs {
				if !errors.As(err, new(*pg.ArgumentError)) || !strings.Contains(err.Error(), what) {
					t.Errorf("%s: %v", what, err)
				}
			}
		}
		held := newOnLate(t, d)
		words, _, err := device.Words(d, 1)
		if err == nil {
			err = held.s.WaitValue(words[0], 1)
		}
		if err != nil {
			t.Fatal(err)
		}
		within, cancel := context.WithTimeout(ctx, 20*time.Millisecond)
		defer cancel()
		late := on
		late.Stream = held.s
		for _, err := range both(within, 0, late) {
			if !errors.As(err, new(*pg.TimeoutError)) || !strings.Contains(err.Error(), "stream") {
				t.Errorf("a stream that does not come: %v", err)
			}
		}
		words[0].Word(0).Store(1)
		held.idle()
		if got := o.get(m); !bytes.Equal(got, pattern) {
			t.Error("the memory was written when the stream came")
		}
		if err := g.Barrier(ctx); err != nil {
			t.Fatal(err)
		}
		if g.Rank() == 1 {
			g.Close()
			return
		}
		for end := time.Now().Add(20 * time.Second); ; {
			errs := both(ctx, 0, on)
			if lostRank(errs[0]) == 1 && lostRank(errs[1]) == 1 {
				break
			}
			if time.Now().After(end) {
				t.Fatalf("a peer that is gone: %v", errs)
			}
		}
		again := newOnLate(t, d)
		again.set(m, pattern)
		again.idle()
		if got := o.get(m); !bytes.Equal(got, pattern) {
			t.Error("the memory was written after the call")
		}
	}, pgtest.Config(pg.Config{Devices: device.List{d}}))
}
