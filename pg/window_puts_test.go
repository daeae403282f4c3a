package pg

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"runtime"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"tutti/device"
	"tutti/device/devicetest"
	"tutti/p2p"
)

// onWindows runs f on n local ranks, each with a window of size bytes.
func onWindows(t *testing.T, n, size int, f func(ctx context.Context, g *Group, w *Window) error) {
	t.Helper()
	each(t, n, Config{}, func(ctx context.Context, g *Group) error {
		w, err := NewWindow(ctx, g, size)
		if err != nil {
			return err
		}
		return errors.Join(f(ctx, g, w), g.Barrier(ctx), w.Close(ctx))
	})
}

// Puts that have ended are forgotten while an earlier one is under way.
func TestPutsEndBehindLongPut(t *testing.T) {
	const long, short, puts = 64 << 20, 64, 32
	onWindows(t, 2, long+short, func(ctx context.Context, g *Group, w *Window) error {
		if g.Rank() == 1 {
			return nil
		}
		err := w.Put(ctx, 1, 0, make([]byte, long))
		for range puts {
			err = errors.Join(err, w.Put(ctx, 1, long, make([]byte, short)))
		}
		g.job.proxy.Lock()
		if pending := len(w.parts[1].pending); pending > puts/4 {
			err = errors.Join(err, fmt.Errorf("%d puts have not ended: the long one, and how many of %d?",
				pending, puts))
		}
		g.job.proxy.Unlock()
		return errors.Join(err, w.Flush(ctx, 1))
	})
}

// Flush waits for puts that were begun before it, and gives up those, and not for later ones.
func TestFlushConcernsEarlierPuts(t *testing.T) {
	const first, second = 32 << 20, 48 << 20
	for name, givesUp := range map[string]bool{"waits": false, "gives up": true} {
		t.Run(name, func(t *testing.T) {
			onWindows(t, 2, first+second, func(ctx context.Context, g *Group, w *Window) error {
				later := bytes.Repeat([]byte{7}, second)
				if g.Rank() == 1 {
					if err := g.Barrier(ctx); err != nil {
						return err
					}
					if !bytes.Equal(w.Bytes()[first:], later) {
						return errors.New("the later put was not placed")
					}
					return nil
				}
				err := w.Put(ctx, 1, 0, make([]byte, first))
				over, cancel := context.WithCancel(ctx)
				defer cancel()
				ended := make(chan error, 1)
				go func() { ended <- w.Flush(over, 1) }()
				for begun := false; !begun && len(ended) == 0; runtime.Gosched() {
					g.job.proxy.Lock()
					begun = w.parts[1].flushes > 0
					g.job.proxy.Unlock()
				}
				err = errors.Join(err, w.Put(ctx, 1, first, later))
				if givesUp {
					cancel()
				}
				flushed := <-ended
				g.job.proxy.Lock()
				if len(w.parts[1].pending) == 0 {
					err = errors.Join(err, errors.New("the later put has ended with the Flush"))
				}
				g.job.proxy.Unlock()
				if e := w.Flush(ctx, 1); (e == nil) != (flushed == nil) {
					err = errors.Join(err, fmt.Errorf("the second Flush: %v, after %v of the first", e, flushed))
				}
				return errors.Join(err, g.Barrier(ctx))
			})
		})
	}
}

// A long put to a rank's own part, and a long get from it, let other goroutines have the lock.
func TestOwnPartSharesLock(t *testing.T) {
	const n, rounds = 16 << 20, 200
	onWindows(t, 1, n, func(ctx context.Context, g *Group, w *Window) error {
		values := [2][]byte{make([]byte, n), bytes.Repeat([]byte{1}, n)}
		x := make([]byte, n)
		for name, copying := range map[string]struct {
			dst []byte
			do  func(round int) error
		}{
			"put": {w.Bytes(), func(round int) error { return w.Put(ctx, 0, 0, values[round%2]) }},
			"get": {x, func(round int) error {
				return errors.Join(w.Put(ctx, 0, 0, values[round%2]), w.Get(ctx, 0, 0, x))
			}},
		} {
			var seen, over atomic.Bool
			looks := make(chan struct{})
			go func() {
				defer close(looks)
				for !seen.Load() && !over.Load() {
					g.job.proxy.Lock()
					seen.Store(copying.dst[0] != copying.dst[n-1])
					g.job.proxy.Unlock()
				}
			}()
			var err error
			for round := 1; err == nil && round <= rounds && !seen.Load(); round++ {
				err = copying.do(round)
			}
			over.Store(true)
			<-looks
			if err != nil || !seen.Load() {
				return fmt.Errorf("%s: %v; another goroutine had the lock in the middle: %v", name, err, seen.Load())
			}
		}
		return nil
	})
}

// A rank whose operations on windows all end at once receives what others send to it.
func TestBusyWindowReceives(t *testing.T) {
	const messages = 200
	var sent atomic.Bool
	onWindows(t, 3, 8, func(ctx context.Context, g *Group, w *Window) error {
		x := make([]int64, 1<<10)
		switch g.Rank() {
		case 0:
			for end := time.Now().Add(20 * time.Second); !sent.Load(); {
				if err := errors.Join(w.Put(ctx, 1, 0, make([]byte, 8)), w.Flush(ctx, 1)); err != nil {
					return err
				}
				if time.Now().After(end) {
					return errors.New("a rank could not send while this one put")
				}
			}
			for range messages {
				if _, err := Recv(ctx, g, x, 2, 0); err != nil {
					return err
				}
			}
		case 2:
			for range messages {
				if err := Send(ctx, g, x, 0, 0); err != nil {
					return err
				}
			}
			sent.Store(true)
		}
		return nil
	})
}

// Puts and gets whose ranges overlap within a rank's own part copy what was there before.
func TestOwnPartOverlaps(t *testing.T) {
	const n, shift = 1<<20 + 5, 100_000
	onWindows(t, 1, n+shift, func(ctx context.Context, g *Group, w *Window) error {
		b := w.Bytes()
		for name, copied := range map[string]struct {
			from, to int
			do       func() error
		}{
			"put up":   {0, shift, func() error { return w.Put(ctx, 0, shift, b[:n]) }},
			"put down": {shift, 0, func() error { return w.Put(ctx, 0, 0, b[shift:]) }},
			"get up":   {0, shift, func() error { return w.Get(ctx, 0, 0, b[shift:]) }},
			"get down": {shift, 0, func() error { return w.Get(ctx, 0, shift, b[:n]) }},
		} {
			for i := range b {
				b[i] = byte(i % 251)
			}
			want := bytes.Clone(b)
			copy(want[copied.to:copied.to+n], want[copied.from:])
			if err := copied.do(); err != nil || !bytes.Equal(b, want) {
				return fmt.Errorf("%s: %v; the data is right: %v", name, err, bytes.Equal(b, want))
			}
		}
		return nil
	})
}

// loseNext begins a long put to rank 1 and has it fail.
func loseNext(ctx context.Context, g *Group, w *Window) error {
	err := w.Put(ctx, 1, 0, make([]byte, w.Size()))
	g.job.proxy.Lock()
	defer g.job.proxy.Unlock()
	p := &w.parts[1]
	if len(p.pending) == 0 {
		return errors.Join(err, errors.New("a long put has ended at once"))
	}
	g.job.proxy.CancelTransfer(p.pending[len(p.pending)-1].Transfer)
	return err
}

// Refresh ends the effects of a failed put if a Flush or a signal has returned an error since, and
// only then.
func TestRefreshForgetsReportedFailures(t *testing.T) {
	const n = 32 << 20
	for name, fail := range map[string]func(ctx context.Context, g *Group, w *Window) (told bool, err error){
		"nobody has noticed": func(ctx context.Context, g *Group, w *Window) (bool, error) {
			return false, loseNext(ctx, g, w)
		},
		"nobody was told": func(ctx context.Context, g *Group, w *Window) (bool, error) {
			return false, errors.Join(loseNext(ctx, g, w), w.Put(ctx, 1, 0, make([]byte, n)))
		},
		"Flush has told": func(ctx context.Context, g *Group, w *Window) (bool, error) {
			return true, errors.Join(loseNext(ctx, g, w), wantCancelled("Flush", w.Flush(ctx, 1)))
		},
		"Signal has told": func(ctx context.Context, g *Group, w *Window) (bool, error) {
			return true, errors.Join(loseNext(ctx, g, w), wantCancelled("Signal", w.Signal(ctx, 1, 0)))
		},
		"another one failed later": func(ctx context.Context, g *Group, w *Window) (bool, error) {
			return false, errors.Join(loseNext(ctx, g, w), wantCancelled("Flush", w.Flush(ctx, 1)),
				loseNext(ctx, g, w))
		},
	} {
		t.Run(name, func(t *testing.T) {
			onWindows(t, 2, n, func(ctx context.Context, g *Group, w *Window) error {
				if g.Rank() == 1 {
					return errors.Join(w.Refresh(ctx), w.Refresh(ctx))
				}
				told, err := fail(ctx, g, w)
				if err = errors.Join(err, w.Refresh(ctx)); !told {
					err = errors.Join(err, wantCancelled("Flush after Refresh", w.Flush(ctx, 1)))
				}
				if told {
					err = errors.Join(err, w.Signal(ctx, 1, 0), w.Flush(ctx, 1))
				}
				return errors.Join(err, w.Refresh(ctx), w.Signal(ctx, 1, 0), w.Flush(ctx, 1))
			})
		})
	}
}

// A Flush during which another goroutine's signal returns an error, and Refresh is called, returns
// the error, too. It keeps no signal back.
func TestRefreshDuringFlush(t *testing.T) {
	const n = 64 << 20
	onWindows(t, 2, n, func(ctx context.Context, g *Group, w *Window) error {
		if g.Rank() == 1 {
			return nil
		}
		err := errors.Join(w.Put(ctx, 1, 0, make([]byte, n)), loseNext(ctx, g, w))
		ended := make(chan error, 1)
		go func() { ended <- w.Flush(ctx, 1) }()
		for begun := false; !begun && len(ended) == 0; runtime.Gosched() {
			g.job.proxy.Lock()
			begun = w.parts[1].flushes > 0
			g.job.proxy.Unlock()
		}
		err = errors.Join(err, wantCancelled("Signal", w.Signal(ctx, 1, 0)))
		g.job.proxy.Lock()
		w.adopt(slices.Clone(w.parts)) // as Refresh does, but for the time that it takes
		g.job.proxy.Unlock()
		return errors.Join(err, w.Signal(ctx, 1, 0), wantCancelled("the Flush under way", <-ended), w.Flush(ctx, 1))
	})
}

// A put of a device's memory whose pieces have gone to two incarnations of a rank is an error.
func TestPutToTwoIncarnations(t *testing.T) {
	const pieces, n = 3, 3 * smallPiece
	late := devicetest.NewLate("cuda:0", 7, 0)
	words, _, err := device.Words(late, 1)
	if err != nil {
		t.Fatal(err)
	}
	each(t, 2, Config{Devices: device.List{late}}, func(ctx context.Context, g *Group) error {
		g.SetPiece(smallPiece)
		w, err := NewWindow(ctx, g, n)
		if err != nil || g.Rank() == 1 {
			return errors.Join(err, g.Barrier(ctx), w.Close(ctx))
		}
		s, m, release, err := streamWith(&gated{late, pieces, words[0]}, n)
		if err != nil {
			return err
		}
		defer release()
		if err := s.Copy(m, hostMemory(bytes.Repeat([]byte{5}, n))); err != nil {
			return err
		}
		ended := make(chan error, 1)
		go func() { ended <- w.PutBuffer(ctx, 1, 0, DeviceBuffer(m, Uint8, s)) }()
		for got := make([]byte, 1); got[0] == 0 && len(ended) == 0; runtime.Gosched() {
			if err := w.Get(ctx, 1, 0, got); err != nil {
				return err
			}
		}
		become := func(n uint64) { // as if Refresh had found it
			g.job.proxy.Lock()
			w.parts[1].incarnation += n
			g.job.proxy.Unlock()
		}
		become(1)
		words[0].Word(0).Store(1)
		var lost *RankError
		if e := <-ended; !errors.As(e, &lost) || lost.Rank != 1 {
			err = fmt.Errorf("a put to two incarnations of rank 1: %v", e)
		}
		if e := w.Signal(ctx, 1, 0); !errors.As(e, &lost) {
			err = errors.Join(err, fmt.Errorf("the signal after it: %v", e))
		}
		become(^uint64(0))
		return errors.Join(err, g.Barrier(ctx), w.Close(ctx))
	})
}

// A put of a device's memory that is given up in the middle keeps signals back until Refresh: the
// target has a part of its data.
func TestTornPutHoldsSignalsBack(t *testing.T) {
	const pieces, n = 3, 3 * smallPiece
	late := devicetest.NewLate("cuda:0", 7, 0)
	words, _, err := device.Words(late, 1)
	if err != nil {
		t.Fatal(err)
	}
	each(t, 2, Config{Devices: device.List{late}}, func(ctx context.Context, g *Group) error {
		g.SetPiece(smallPiece)
		w, err := NewWindow(ctx, g, n)
		if err != nil {
			return err
		}
		over, cancel := context.WithCancel(ctx)
		defer cancel()
		data := bytes.Repeat([]byte{5}, n)
		if g.Rank() == 1 {
			cancel()
			err := g.Barrier(ctx)
			if e := w.WaitSignal(over, 0, 0, 1); !errors.As(e, new(*TimeoutError)) {
				err = errors.Join(err, fmt.Errorf("the signal after a torn put: %v, and %d of %d bytes are there", e,
					bytes.Count(w.Bytes(), data[:1]), n))
			}
			if err = errors.Join(err, w.Refresh(ctx), w.WaitSignal(ctx, 0, 0, 1)); err == nil &&
				!bytes.Equal(w.Bytes(), data) {
				err = errors.New("the put after Refresh was not placed before its signal")
			}
			return errors.Join(err, g.Barrier(ctx), w.Close(ctx))
		}
		s, m, release, err := streamWith(&gated{late, pieces, words[0]}, n) // one copy brings the data to the device
		if err != nil {
			return err
		}
		defer release()
		if err := s.Copy(m, hostMemory(data)); err != nil {
			return err
		}
		b := DeviceBuffer(m, Uint8, s)
		ended := make(chan error, 1)
		go func() { ended <- w.PutBuffer(over, 1, 0, b) }()
		for got := make([]byte, 1); got[0] != data[0] && len(ended) == 0; runtime.Gosched() {
			if err := w.Get(ctx, 1, 0, got); err != nil {
				return err
			}
		}
		cancel()
		if e := <-ended; !errors.As(e, new(*TimeoutError)) {
			err = fmt.Errorf("a put whose stream does not come to its last piece: %v", e)
		}
		err = errors.Join(err, wantCancelled("Signal", w.Signal(ctx, 1, 0)), wantCancelled("Flush", w.Flush(ctx, 1)),
			g.Barrier(ctx), w.Refresh(ctx))
		words[0].Word(0).Store(1)
		return errors.Join(err, w.PutBuffer(ctx, 1, 0, b), w.Signal(ctx, 1, 0), w.Flush(ctx, 1),
			g.Barrier(ctx), w.Close(ctx))
	})
}

func wantCancelled(what string, err error) error {
	if !errors.Is(err, p2p.ErrCancelled) {
		return fmt.Errorf("%s after a put was given up: %v", what, err)
	}
	return nil
}

// Ranks that refresh different windows at a time are told, and so is one that makes a window
// meanwhile. Windows that all refresh stay as they were.
func TestRefreshOfDifferentWindows(t *testing.T) {
	onWindows(t, 3, 64, func(ctx context.Context, g *Group, a *Window) error {
		b, err := NewWindow(ctx, g, 128)
		if err != nil {
			return err
		}
		defer b.Close(ctx)
		first, second := a, b
		switch g.Rank() {
		case 1:
			first, second = b, a
		case 2: // as a rank that came in
			first, second = nil, nil
		}
		for _, w := range []*Window{first, second} {
			if w != nil {
				err = w.Refresh(ctx)
			} else {
				_, err = NewWindow(ctx, g, 64)
			}
			if bad := (*ArgumentError)(nil); !errors.As(err, &bad) || bad.Arg != "the window" {
				return fmt.Errorf("got %v, want an *ArgumentError about the window", err)
			}
		}
		if g.Rank() == 2 { // it knows the window from then on
			if a, err = NewWindow(ctx, g, 64); err != nil {
				return err
			}
			defer a.Close(ctx)
		} else if err = a.Refresh(ctx); err != nil {
			return err
		}
		if first = b; g.Rank() == 2 {
			first = a
		}
		if err := first.Refresh(ctx); !errors.As(err, new(*ArgumentError)) {
			return fmt.Errorf("got %v, want an *ArgumentError", err)
		}
		return errors.Join(a.Refresh(ctx), b.Refresh(ctx), b.PutSignal(ctx, 1, g.Rank(), []byte{1}, 0),
			b.Flush(ctx, 1), g.Barrier(ctx))
	})
}

// A wait for signals ends when Refresh finds another part at the rank, whose signals have another
// tag.
func TestWaitSignalEndsWithThePart(t *testing.T) {
	each(t, 2, Config{Timeout: -1}, func(ctx context.Context, g *Group) error {
		w, err := NewWindow(ctx, g, 64)
		if err != nil {
			return err
		}
		if g.Rank() == 1 {
			if err := w.Close(ctx); err != nil {
				return err
			}
			if w, err = NewWindow(ctx, g, 64); err != nil {
				return err
			}
			return errors.Join(w.Signal(ctx, 0, 0), w.Flush(ctx, 0), g.Barrier(ctx), w.Close(ctx))
		}
		over, cancel := context.WithTimeout(ctx, time.Minute)
		defer cancel()
		ended := make(chan error, 1)
		go func() { ended <- w.WaitSignal(over, 1, 0, 1) }()
		for asleep := false; !asleep; runtime.Gosched() {
			g.job.proxy.Lock()
			asleep = w.looks == 2 && w.looked.Load() == 1
			g.job.proxy.Unlock()
		}
		if err := w.Refresh(ctx); err != nil {
			return err
		}
		var lost *RankError
		if e := <-ended; !errors.As(e, &lost) || lost.Rank != 1 {
			err = fmt.Errorf("a wait for the part before: %v", e)
		}
		return errors.Join(err, w.WaitSignal(ctx, 1, 0, 1), g.Barrier(ctx), w.Close(ctx))
	})
}

// Config.Timeout bounds Close and Refresh, whatever they wait for.
func TestWindowCloseEndsInTime(t *testing.T) {
	each(t, 1, Config{}, func(ctx context.Context, g *Group) error {
		w, err := NewWindow(ctx, g, 64)
		if err != nil {
			return err
		}
		g.job.timeout = 10 * time.Millisecond
		if err := w.turn.Acquire(ctx, 1); err != nil {
			return err
		}
		for _, call := range []func(context.Context) error{w.Close, w.Refresh} {
			var late *TimeoutError
			if err := call(ctx); !errors.As(err, &late) || !errors.Is(err, context.DeadlineExceeded) {
				return fmt.Errorf("behind another goroutine's call: %v, want a *TimeoutError", err)
			}
		}
		w.turn.Release(1)
		return w.Close(ctx)
	})
}

// Each call of a window that is closed says that of the window while the group is open, and of the
// group when that is closed, too.
func TestClosedWindowIsNoClosedGroup(t *testing.T) {
	d := devicetest.NewLate("cuda:0", 7, 0)
	each(t, 2, Config{Devices: device.List{d}}, func(ctx context.Context, g *Group) error {
		w, err := NewWindow(ctx, g, 64)
		if err != nil {
			return err
		}
		if err := errors.Join(w.Close(ctx), g.Barrier(ctx)); err != nil {
			return err
		}
		s, m, release, err := streamWith(d, 8)
		if err != nil {
			return err
		}
		defer release()
		on := DeviceBuffer(m, Uint8, s)
		calls := map[string]func(to int, b []byte) error{
			"Put":                   func(to int, b []byte) error { return w.Put(ctx, to, 0, b) },
			"PutSignal":             func(to int, b []byte) error { return w.PutSignal(ctx, to, 0, b, 0) },
			"Signal":                func(to int, _ []byte) error { return w.Signal(ctx, to, 0) },
			"Flush":                 func(to int, _ []byte) error { return w.Flush(ctx, to) },
			"Get":                   func(to int, b []byte) error { return w.Get(ctx, to, 0, b) },
			"PutBuffer of the host": func(to int, b []byte) error { return w.PutBuffer(ctx, to, 0, BufferOf(b)) },
			"GetBuffer of the host": func(to int, b []byte) error { return w.GetBuffer(ctx, to, 0, BufferOf(b)) },
			"PutBuffer":             func(to int, _ []byte) error { return w.PutBuffer(ctx, to, 0, on) },
			"GetBuffer":             func(to int, _ []byte) error { return w.GetBuffer(ctx, to, 0, on) },
			"WaitSignal":            func(to int, _ []byte) error { return w.WaitSignal(ctx, to, 0, 1) },
			"Map": func(to int, _ []byte) error {
				_, err := w.Map(ctx, to)
				return err
			},
			"Refresh": func(int, []byte) error { return w.Refresh(ctx) },
		}
		say := func(when, want string) (err error) {
			for name, call := range calls {
				for to := range 2 {
					e := call(to, make([]byte, 8))
					if !errors.Is(e, ErrClosed) || e.Error() != want {
						err = errors.Join(err, fmt.Errorf("%s to rank %d: %s: %v, want %q", when, to, name, e, want))
					}
				}
			}
			return err
		}
		err = say("the group is open", "the window is closed")
		g.Close()
		return errors.Join(err, say("the group is closed", ErrClosed.Error()))
	})
}

// Close ends the waits of other goroutines for signals, of this rank's and of a peer's, before it
// frees the words that they look at.
func TestWindowCloseEndsWaits(t *testing.T) {
	each(t, 2, Config{Timeout: -1}, func(ctx context.Context, g *Group) error {
		for _, from := range []int{g.Rank(), 1 - g.Rank()} {
			w, err := NewWindow(ctx, g, 64)
			if err != nil {
				return err
			}
			ended := make(chan error, 1)
			go func() { ended <- w.WaitSignal(ctx, from, 0, 1) }()
			for asleep := false; !asleep; runtime.Gosched() {
				g.job.proxy.Lock()
				asleep = w.looks == 2 && w.looked.Load() == 1
				g.job.proxy.Unlock()
			}
			if err := w.Close(ctx); err != nil {
				return err
			}
			if err := <-ended; !errors.Is(err, ErrClosed) || err.Error() != "the window is closed" {
				return fmt.Errorf("a wait for a signal of rank %d: %v, want ErrClosed of the window", from, err)
			}
			if b := w.Bytes(); b != nil {
				return fmt.Errorf("%d bytes of a window that is closed", len(b))
			}
		}
		return g.Barrier(ctx)
	})
}
