//go:build cgo && linux

package cuda

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"reflect"
	"testing"
	"time"

	"tutti/collectives"
	"tutti/device"
	"tutti/device/cuda/fake"
	"tutti/device/cuda/program"
	"tutti/kernels"
	"tutti/mem"
)

// A connected exchange releases the inboxes that it uses when it was freed.
type connected struct {
	device.Exchange
	inboxes []device.Shared
}

func (c connected) Free(ctx context.Context) error {
	if err := c.Exchange.Free(ctx); err != nil {
		return err
	}
	var errs []error
	for _, s := range c.inboxes {
		errs = append(errs, s.Release(true))
	}
	return errors.Join(errs...)
}

// exchanges returns the connected exchanges of ranks of this process, on these devices.
func exchanges(t *testing.T, on []*Device) []device.Exchange {
	t.Helper()
	all := make([]device.Exchange, len(on))
	keys, offsets := make([][]byte, len(on)), make([]uint64, len(on))
	for r, v := range on {
		x, err := v.NewExchange(t.Context(), r, len(on))
		must(t, err)
		keys[r], offsets[r], err = x.Inbox()
		must(t, err)
		all[r] = x
	}
	for r, v := range on {
		inboxes := make([]device.Shared, len(on))
		for k := range on {
			s, err := v.Import(uint64(k), keys[k])
			must(t, err)
			inboxes[k] = s
		}
		must(t, all[r].Connect(inboxes, offsets))
		all[r] = connected{all[r], inboxes}
	}
	return all
}

// do is Do without the number.
func do(x device.Exchange, s device.Stream, c device.ExchangeCall, limit time.Duration) error {
	_, err := x.Do(s, c, limit)
	return err
}

// allReduce returns a call of all ranks with memory of the same length.
func allReduce(op kernels.Op, dt kernels.DType, dst, src mem.Memory) device.ExchangeCall {
	return device.ExchangeCall{Kind: collectives.AllReduce, Op: op, DType: dt, Count: src.Len() / dt.Size(), Dst: dst,
		Src: src}
}

// number returns memory with a number of 4 bytes.
func number(t *testing.T, f *fake.Driver, v *Device, n uint32) mem.Memory {
	m := alloc(t, v, 4)
	binary.LittleEndian.PutUint32(f.Bytes(m), n)
	return m
}

func value(f *fake.Driver, m mem.Memory) uint32 { return binary.LittleEndian.Uint32(f.Bytes(m)) }

// Ranks on one GPU, and on several, combine vectors on streams of their own and of the program, in
// any mixture: the calls of an exchange are in their order.
func TestExchange(t *testing.T) {
	for _, gpus := range []int{1, 3} {
		for name, c := range ways {
			t.Run(fmt.Sprintf("%d GPUs, %s", gpus, name), func(t *testing.T) {
				const n, calls = 3, 20
				c.Devices, c.NoVMM = gpus, c.NoMemoryOps
				f, d := start(t, c)
				t.Cleanup(func() { f.Empty(t) })
				var on []*Device
				for i := range gpus {
					v, err := d.Open(i)
					must(t, err)
					t.Cleanup(func() { must(t, v.Close()) })
					on = append(on, v)
				}
				for len(on) < n {
					on = append(on, on[0])
				}
				all := exchanges(t, on)
				var numbers []mem.Memory
				var ends []device.Event
				for r, x := range all {
					v := on[r]
					m := number(t, f, v, 1<<r)
					streams := []device.Stream{newStreamOf(t, v), newStreamOf(t, v), v.Borrow(uintptr(foreign(t, v)))}
					for i := range calls {
						s := streams[(i*i+r)%len(streams)]
						must(t, do(x, s, allReduce(kernels.Sum, kernels.Uint32, m, m), time.Minute))
						e, err := s.Record()
						must(t, err)
						ends = append(ends, e)
					}
					numbers = append(numbers, m)
				}
				for _, e := range ends {
					must(t, e.Wait(t.Context()))
				}
				want := uint32(7)
				for range calls - 1 {
					want *= n
				}
				for r, m := range numbers {
					if got := value(f, m); got != want {
						t.Errorf("rank %d has %d, want %d", r, got, want)
					}
					if why, again := all[r].Failure(); why != nil || again {
						t.Errorf("rank %d: %v, %v", r, why, again)
					}
				}
			})
		}
	}
}

// A graph repeats the calls that a stream of the program has recorded, between others. A copy is
// refused meanwhile.
func TestExchangeInGraphs(t *testing.T) {
	const n, launches = 2, 5
	f, v := open(t, fake.Config{})
	p := program.Open(t, f.Path, 0)
	all := exchanges(t, []*Device{v, v})
	var streams []uintptr
	var graphs []*program.Graph
	var numbers []mem.Memory
	for r, x := range all {
		s, err := p.Stream()
		must(t, err)
		m := number(t, f, v, uint32(1+r))
		g, err := p.Capture(s, func() error {
			b := v.Borrow(s)
			capturing, err := b.(device.Capturer).Capturing()
			if err != nil || !capturing {
				t.Errorf("capturing: %v, %v", capturing, err)
			}
			if err := b.Copy(m, m); !errors.Is(err, errors.ErrUnsupported) {
				t.Errorf("a copy: %v", err)
			}
			for range 3 {
				if err := do(x, b, allReduce(kernels.Sum, kernels.Uint32, m, m), time.Minute); err != nil {
					return err
				}
			}
			return nil
		})
		must(t, err)
		if got := value(f, m); got != uint32(1+r) {
			t.Errorf("recorded work has made %d of %d", got, 1+r)
		}
		streams, graphs, numbers = append(streams, s), append(graphs, g), append(numbers, m)
	}
	for range launches {
		for r, x := range all {
			must(t, graphs[r].Launch(streams[r]))
			must(t, do(x, v.Borrow(streams[r]), allReduce(kernels.Max, kernels.Uint32, numbers[r], numbers[r]),
				time.Minute))
		}
	}
	want := uint32(3)
	for range 3*launches - 1 {
		want *= 2
	}
	for r, s := range streams {
		must(t, p.Finish(s, patience))
		if got := value(f, numbers[r]); got != want {
			t.Errorf("rank %d has %d, want %d", r, got, want)
		}
		must(t, graphs[r].Close(), p.Destroy(s))
	}
}

// A call that waits ends when the exchange is stopped, when its limit is over, and when another
// rank makes another call. What is given or repeated afterwards ends at once, and is reported. The
// stream goes on, and the context is usable.
func TestExchangeFailures(t *testing.T) {
	sum := device.ExchangeCall{Kind: collectives.AllReduce, Op: kernels.Sum, DType: kernels.Uint32, Count: 1}
	for name, c := range map[string]struct {
		limit time.Duration
		other func(t *testing.T, all []device.Exchange, s device.Stream, m mem.Memory)
		want  device.ExchangeError
	}{
		"stopped": {0, func(t *testing.T, all []device.Exchange, _ device.Stream, _ mem.Memory) { all[0].Stop() },
			device.ExchangeError{Number: 1, Stopped: true, Ours: sum}},
		"late": {time.Millisecond, func(*testing.T, []device.Exchange, device.Stream, mem.Memory) {},
			device.ExchangeError{Number: 1, Rank: 1, Ours: sum}},
		"differs": {0, func(t *testing.T, all []device.Exchange, s device.Stream, m mem.Memory) {
			must(t, do(all[1], s, allReduce(kernels.Min, kernels.Int8, m, m), 0))
		}, device.ExchangeError{Number: 1, Rank: 1, Differs: true, Ours: sum, Theirs: device.ExchangeCall{
			Kind: collectives.AllReduce, Op: kernels.Min, DType: kernels.Int8, Count: 4}}},
	} {
		t.Run(name, func(t *testing.T) {
			f, v := open(t, fake.Config{})
			all := exchanges(t, []*Device{v, v})
			s, other := newStreamOf(t, v), newStreamOf(t, v)
			m := number(t, f, v, 5)
			must(t, do(all[0], s, allReduce(kernels.Sum, kernels.Uint32, m, m), c.limit))
			c.other(t, all, other, number(t, f, v, 6))
			must(t, wait(s))
			why, again := all[0].Failure()
			if why == nil || !reflect.DeepEqual(*why, c.want) || again || value(f, m) != 5 || why.Error() == "" {
				t.Errorf("%+v, %v, and the number is %d: want %+v", why, again, value(f, m), c.want)
			}
			must(t, do(all[0], s, allReduce(kernels.Sum, kernels.Uint32, m, m), 0), wait(s))
			if _, again := all[0].Failure(); !again {
				t.Error("a call after that is not reported")
			}
			if _, again := all[0].Failure(); again {
				t.Error("and is reported twice")
			}
			x := bytes.Repeat([]byte{1}, 4)
			must(t, s.Copy(m, mem.Host(x, mem.Anywhere)), wait(s))
			if value(f, m) != 0x01010101 {
				t.Error("the stream does not work any more")
			}
			must(t, wait(other))
		})
	}
}

// A call on a stream that has more work than the driver is given returns at once, and those on
// another stream behind it are in their order all the same.
func TestExchangeBehindManyOperations(t *testing.T) {
	f, v := open(t, fake.Config{})
	all := exchanges(t, []*Device{v, v})
	word := wordsOf(t, v, 1)[0]
	s, other := newStreamOf(t, v), newStreamOf(t, v)
	m, o := number(t, f, v, 1), number(t, f, v, 2)
	must(t, s.WaitValue(word, 1))
	for range 2 * mostInFlight {
		must(t, s.Copy(m, o))
	}
	third, x, y := newStreamOf(t, v), number(t, f, v, 10), number(t, f, v, 20)
	must(t, do(all[0], s, allReduce(kernels.Sum, kernels.Uint32, m, m), time.Minute),
		do(all[0], third, allReduce(kernels.Max, kernels.Uint32, x, x), time.Minute),
		do(all[1], other, allReduce(kernels.Sum, kernels.Uint32, o, o), time.Minute),
		do(all[1], other, allReduce(kernels.Max, kernels.Uint32, y, y), time.Minute))
	word.Word(0).Store(1)
	must(t, wait(s), wait(third), wait(other))
	if value(f, m) != 4 || value(f, o) != 4 || value(f, x) != 20 || value(f, y) != 20 {
		t.Errorf("%d, %d, %d and %d", value(f, m), value(f, o), value(f, x), value(f, y))
	}
}

// What cannot be is refused, and a driver's failure leaves nothing.
func TestExchangeRefuses(t *testing.T) {
	f, v := open(t, fake.Config{})
	for _, c := range [][2]int{{0, 1}, {2, 2}, {-1, 2}, {0, device.MaxExchangeRanks + 1}} {
		if _, err := v.NewExchange(t.Context(), c[0], c[1]); !errors.Is(err, errors.ErrUnsupported) {
			t.Errorf("rank %d of %d: %v", c[0], c[1], err)
		}
	}
	blocks, words := used(f, v)
	for _, call := range []string{"cuMemCreate", "cuMemcpyAsync", "cuStreamCreate"} {
		f.Fail(call, 1, fake.OutOfMemory)
		if _, err := v.NewExchange(t.Context(), 0, 2); err == nil {
			t.Errorf("%s fails, and there is an exchange", call)
		}
		freed(t, f, v, blocks, words)
	}
	x := exchanges(t, []*Device{v, v})[0]
	m := alloc(t, v, 8)
	s := newStreamOf(t, v)
	host := mem.Host(make([]byte, 4), mem.Anywhere)
	for what, err := range map[string]error{
		"host memory":    do(x, s, allReduce(kernels.Sum, kernels.Int32, host, host), 0),
		"a short buffer": do(x, s, allReduce(kernels.Sum, kernels.Int32, m.Slice(0, 4), m), 0),
		"few parts": do(x, s, device.ExchangeCall{Kind: collectives.AllGather, DType: kernels.Int32, Count: 1,
			Parts: []int{0, 2}, Dst: m, Src: m.Slice(0, 4)}, 0),
		"another kind": do(x, s, device.ExchangeCall{Kind: collectives.AllGatherV, DType: kernels.Int32, Count: 1,
			Dst: m, Src: m}, 0),
		"another stream": do(x, nil, allReduce(kernels.Sum, kernels.Int32, m, m), 0),
	} {
		if err == nil {
			t.Errorf("%s is accepted", what)
		}
	}
	must(t, do(x, s, allReduce(kernels.Sum, kernels.Int32, m, m), 0))
	other := v.Borrow(uintptr(foreign(t, v)))
	for _, call := range []string{"cuStreamWaitValue64_v2", "cuLaunchKernel", "cuStreamWriteValue64_v2"} {
		var failed *Error
		f.Fail(call, 1, fake.NotSupported)
		err := do(x, other, allReduce(kernels.Sum, kernels.Int32, m, m), 0)
		if !errors.As(err, &failed) {
			t.Errorf("%s fails: %v", call, err)
		}
	}
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	e, err := s.Record()
	must(t, err)
	must(t, e.Wait(ctx))
}

// Free does not free what a kernel uses that is in a stream although Do has failed: the marker that
// was due could not be made.
func TestFreeAfterAMarkerFails(t *testing.T) {
	for before := betweenMarkers - 2; before <= betweenMarkers; before++ {
		f, v := open(t, fake.Config{})
		all := exchanges(t, []*Device{v, v})
		word := wordsOf(t, v, 1)[0]
		s, err := v.Stream()
		must(t, err, s.WaitValue(word, 1))
		m, o := number(t, f, v, 5), number(t, f, v, 6)
		for range before - 1 {
			must(t, s.Copy(m, o))
		}
		launched := f.Calls()["cuLaunchKernel"]
		f.Fail("cuEventCreate", 1, fake.OutOfMemory)
		err = do(all[0], s, allReduce(kernels.Sum, kernels.Uint32, m, m), 0)
		if e, ok := errors.AsType[*Error](err); ok != (before > betweenMarkers-2) || ok && e.Call != "cuEventCreate" {
			t.Errorf("after %d operations: %v", before, err)
		}
		launched = f.Calls()["cuLaunchKernel"] - launched
		ended, cancel := context.WithCancel(t.Context())
		cancel()
		if err := all[0].Free(ended); (err == nil) != (launched == 0) {
			t.Errorf("after %d operations, Free with %d kernels in the stream: %v", before, launched, err)
		}
		f.Forget()
		word.Word(0).Store(1)
		must(t, s.Close(), all[1].Free(t.Context()))
	}
}

// What makes an exchange does not wait for the streams of the device: if it fails, or is given up
// because a stream of the same queue waits, its memory is freed when the streams have gone on.
func TestExchangeBesideAStreamThatWaits(t *testing.T) {
	for name, c := range map[string]fake.Config{"fails": {}, "fails with IPC": {NoVMM: true}, "given up": {Queues: 1}} {
		t.Run(name, func(t *testing.T) {
			f, v := open(t, c)
			s, word := newStreamOf(t, v), wordsOf(t, v, 1)[0]
			blocks, host := used(f, v)
			must(t, s.WaitValue(word, 1))
			ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
			defer cancel()
			if c.Queues == 0 {
				ctx = t.Context()
				f.Fail("cuMemcpyAsync", 1, fake.OutOfMemory)
			}
			if _, err := v.NewExchange(ctx, 0, 2); err == nil || c.Queues > 0 != errors.Is(err, ctx.Err()) {
				t.Errorf("an exchange: %v", err)
			}
			word.Word(0).Store(1)
			freed(t, f, v, blocks, host)
		})
	}
}

// used returns how many allocations a driver has, and how much of its host memory a device uses.
func used(f *fake.Driver, v *Device) (blocks, host int) {
	v.mu.Lock()
	defer v.mu.Unlock()
	return f.Census().DeviceBlocks, len(v.host.used)
}

// freed waits until no more memory is used than before an exchange that was not made: see used.
func freed(t *testing.T, f *fake.Driver, v *Device, blocks, host int) {
	t.Helper()
	f.Until(t, "the memory of an exchange that was not made is freed", func(fake.Census) bool {
		b, h := used(f, v)
		return b == blocks && h == host
	})
}

// Exchanges that are freed leave nothing. What other ranks of the process store into stays until
// they have freed theirs. Afterwards an exchange says what it has said before, and takes no calls.
func TestFreeExchanges(t *testing.T) {
	for name, c := range map[string]fake.Config{"descriptors": {Devices: 2}, "IPC": {Devices: 2, NoVMM: true}} {
		t.Run(name, func(t *testing.T) {
			f, d := start(t, c)
			var on []*Device
			for i := range 2 {
				v, err := d.Open(i)
				must(t, err)
				on = append(on, v)
			}
			t.Cleanup(func() {
				must(t, on[0].Close(), on[1].Close())
				f.Empty(t)
			})
			s := []device.Stream{newStreamOf(t, on[0]), newStreamOf(t, on[1])}
			m := []mem.Memory{number(t, f, on[0], 1), number(t, f, on[1], 2)}
			blocks, host := used(f, on[0])
			for range 5 {
				all := exchanges(t, on)
				for r, x := range all {
					must(t, do(x, s[r], allReduce(kernels.Sum, kernels.Uint32, m[r], m[r]), time.Minute))
				}
				must(t, wait(s[0]), wait(s[1]), all[0].Free(t.Context()))
				if now, _ := used(f, on[0]); now != blocks+2 {
					t.Errorf("%d allocations, want %d: the other rank may store into both inboxes", now, blocks+2)
				}
				all[0].Stop()
				if why, again := all[0].Failure(); why != nil || again {
					t.Errorf("it has failed: %v, %v", why, again)
				}
				all[1].Stop()
				err := do(all[0], s[0], allReduce(kernels.Sum, kernels.Uint32, m[0], m[0]), 0)
				if !errors.Is(err, device.ErrClosed) {
					t.Errorf("a call after Free: %v", err)
				}
				for range 2 { // which give up, and follow a failure
					must(t, do(all[1], s[1], allReduce(kernels.Sum, kernels.Uint32, m[1], m[1]), 0))
				}
				must(t, wait(s[1]), all[1].Free(t.Context()), all[1].Free(t.Context()))
				if now, words := used(f, on[0]); now != blocks || words != host {
					t.Errorf("%d allocations and %d blocks of host memory, want %d and %d", now, words, blocks, host)
				}
				for _, want := range []bool{true, false} {
					if why, again := all[1].Failure(); why == nil || !why.Stopped || again != want {
						t.Errorf("the failure is %v, %v", why, again)
					}
				}
			}
		})
	}
}

// The program may capture a stream while exchanges are freed, also one whose memory was not
// cleared.
func TestFreeExchangesDuringCaptures(t *testing.T) {
	for name, c := range map[string]fake.Config{"descriptors": {}, "IPC": {NoVMM: true}} {
		t.Run(name, func(t *testing.T) {
			f, v := open(t, c)
			blocks, host := used(f, v)
			all := exchanges(t, []*Device{v, v})
			p := program.Open(t, f.Path, 0)
			q, err := p.Stream()
			must(t, err)
			g, err := p.Capture(q, func() error {
				ended, cancel := context.WithCancel(t.Context())
				cancel()
				if x, err := v.NewExchange(ended, 0, 2); err == nil { // its memory was cleared before it looked
					must(t, x.Free(t.Context()))
				} else if !errors.Is(err, context.Canceled) {
					t.Errorf("an exchange whose context has ended: %v", err)
				}
				must(t, all[0].Free(t.Context()), all[1].Free(t.Context()))
				freed(t, f, v, blocks, host)
				return nil
			})
			must(t, err, g.Close(), p.Destroy(q))
		})
	}
}

// Free waits for the streams that have calls, and stops those. It gives up with its context, and
// when the device is closed, which frees the memory.
func TestFreeWaitsForStreams(t *testing.T) {
	f, v := open(t, fake.Config{})
	blocks := f.Census().DeviceBlocks
	all := exchanges(t, []*Device{v, v})
	word := wordsOf(t, v, 1)[0]
	s, m := newStreamOf(t, v), number(t, f, v, 5)
	must(t, s.WaitValue(word, 1), do(all[0], s, allReduce(kernels.Sum, kernels.Uint32, m, m), 0))
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := all[0].Free(ctx); !errors.Is(err, context.Canceled) {
		t.Errorf("a call has not ended: %v", err)
	}
	must(t, all[1].Free(t.Context()))
	if got := f.Census().DeviceBlocks; got != blocks+3 {
		t.Errorf("%d allocations, want both inboxes and a number beside %d", got, blocks)
	}
	freed := make(chan error)
	go func() { freed <- all[0].Free(t.Context()) }()
	word.Word(0).Store(1)
	must(t, <-freed, wait(s))
	if got := f.Census().DeviceBlocks; got != blocks+1 || value(f, m) != 5 {
		t.Errorf("%d allocations, and the number is %d", got, value(f, m))
	}
}

// Closing a device ends Free and frees the memory. An exchange of another device of the process
// leaves it alone then.
func TestCloseEndsFree(t *testing.T) {
	f, d := start(t, fake.Config{Devices: 2})
	var on []*Device
	for i := range 2 {
		v, err := d.Open(i)
		must(t, err)
		on = append(on, v)
	}
	all := exchanges(t, on)
	words, _, err := device.Words(on[0], 1)
	must(t, err)
	s, err := on[0].Stream()
	must(t, err)
	m := number(t, f, on[0], 1)
	must(t, s.WaitValue(words[0], 1), do(all[0], s, allReduce(kernels.Sum, kernels.Uint32, m, m), 0))
	all[0].Stop()
	freed := make(chan error, 1)
	go func() { freed <- all[0].Free(t.Context()) }()
	must(t, on[0].Close(), <-freed, all[1].Free(t.Context()), on[1].Close())
	f.Empty(t)
}

// Closing a device stops the exchanges whose kernels wait for other ranks in its streams.
// Afterwards an exchange says why its calls have ended, and takes none.
func TestCloseStopsExchanges(t *testing.T) {
	f, d := start(t, fake.Config{})
	v, err := d.Open(0)
	must(t, err)
	all := exchanges(t, []*Device{v, v})
	s, err := v.Stream()
	must(t, err)
	m := number(t, f, v, 1)
	must(t, do(all[0], s, allReduce(kernels.Sum, kernels.Uint32, m, m), 0))
	closed := make(chan error, 1)
	go func() { closed <- v.Close() }()
	select {
	case err := <-closed:
		must(t, err)
	case <-time.After(patience):
		t.Fatal("Close waits for a kernel that waits for another rank")
	}
	f.Empty(t)
	for i, stopped := range []bool{true, false} {
		all[i].Stop()
		if why, _ := all[i].Failure(); (why != nil) != stopped || stopped && !why.Stopped {
			t.Errorf("rank %d: %v", i, why)
		}
		err := do(all[i], s, allReduce(kernels.Sum, kernels.Uint32, m, m), 0)
		if !errors.Is(err, device.ErrClosed) {
			t.Errorf("a call after the device was closed: %v", err)
		}
		must(t, all[i].Free(t.Context()))
	}
}

// A device that is closed with exchanges ends their uses of the memory of other devices.
func TestCloseEndsUsesOfInboxes(t *testing.T) {
	for name, c := range map[string]fake.Config{"descriptors": {Devices: 2}, "IPC": {Devices: 2, NoVMM: true}} {
		t.Run(name, func(t *testing.T) {
			f, d := start(t, c)
			w, err := d.Open(1)
			must(t, err)
			blocks, host := used(f, w)
			for range 3 {
				v, err := d.Open(0)
				must(t, err)
				all := exchanges(t, []*Device{v, w})
				must(t, v.Close(), all[0].Free(t.Context()), all[1].Free(t.Context()))
				if now, words := used(f, w); now != blocks || words != host {
					t.Errorf("%d allocations and %d blocks of host memory, want %d and %d", now, words, blocks, host)
				}
			}
			must(t, w.Close())
			f.Empty(t)
		})
	}
}

// What a stream of the program may use stays mapped while the device is closed, although Free of
// an exchange and the events of the stream end then.
func TestCloseKeepsImportsUntilWorkHasEnded(t *testing.T) {
	f, keeper := open(t, fake.Config{Devices: 2, Queues: 1}) // of the context of the program's stream
	d := keeper.gpu.d
	v, err := d.Open(0)
	must(t, err)
	other, err := d.Open(1)
	must(t, err)
	all := exchanges(t, []*Device{v, other})
	theirs, m := alloc(t, other, physicalBytes), number(t, f, v, 1)
	key, _, err := other.Share(theirs)
	must(t, err)
	i, err := v.Import(1, key)
	must(t, err)
	from, err := i.Memory(0, m.Len())
	must(t, err, other.Free(theirs), all[1].Free(t.Context()))
	words, _, err := device.Words(v, 1)
	must(t, err)
	s := v.Borrow(uintptr(foreign(t, keeper)))
	must(t, s.WaitValue(words[0], 1), s.Copy(m, from), do(all[0], s, allReduce(kernels.Sum, kernels.Uint32, m, m), 0))
	e, err := s.Record()
	must(t, err)
	behind, err := v.Stream() // in the same queue, so that Close waits for it first
	must(t, err, behind.Copy(number(t, f, v, 2), m))
	mapped := f.Census().Reserved
	closed := make(chan error, 1)
	go func() { closed <- v.Close() }()
	if err := e.Wait(t.Context()); !errors.Is(err, device.ErrClosed) {
		t.Errorf("an event of a device that was closed: %v", err)
	}
	must(t, i.Release(true), all[0].Free(t.Context()))
	if n := f.Census().Reserved; n != mapped {
		t.Errorf("memory at %d places is mapped, want %d until the stream has done its work", n, mapped)
	}
	words[0].Word(0).Store(1)
	must(t, <-closed, other.Close())
}

// It is not known when the calls of an exchange end if a stream is closed that waits for another
// with an earlier call. The memory stays then, as that does which a graph may use.
func TestFreeDoesNotGuess(t *testing.T) {
	f, v := open(t, fake.Config{})
	all := exchanges(t, []*Device{v, v})
	word := wordsOf(t, v, 1)[0]
	s, other, m := newStreamOf(t, v), newStreamOf(t, v), number(t, f, v, 5)
	must(t, s.WaitValue(word, 1),
		do(all[0], s, allReduce(kernels.Sum, kernels.Uint32, m, m), 0),
		do(all[0], other, allReduce(kernels.Sum, kernels.Uint32, m, m), 0))
	all[0].Stop()
	must(t, other.Close())
	if err := all[0].Free(t.Context()); err == nil {
		t.Error("an exchange was freed that a stream has yet to come to")
	}
	word.Word(0).Store(1)
	must(t, wait(s))
	if why, _ := all[0].Failure(); why == nil || !why.Stopped {
		t.Errorf("the call has ended with %v", why)
	}
	p := program.Open(t, f.Path, 0)
	q, err := p.Stream()
	must(t, err)
	g, err := p.Capture(q, func() error {
		return do(all[1], v.Borrow(q), allReduce(kernels.Sum, kernels.Uint32, m, m), 0)
	})
	must(t, err)
	if err := all[1].Free(t.Context()); err == nil {
		t.Error("an exchange was freed that a graph repeats")
	}
	must(t, g.Launch(q), p.Finish(q, patience), g.Close(), p.Destroy(q))
	if why, _ := all[1].Failure(); why == nil || !why.Stopped {
		t.Errorf("the graph has ended with %v", why)
	}
}
