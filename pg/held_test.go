package pg

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"tutti/device"
	"tutti/device/devicetest"
	"tutti/mem"
	"tutti/p2p"
)

// An end is how a group ends for a call that waits for its stream.
type end struct {
	peer bool // the other rank does it
	do   func(g *Group) error
	is   func(err error) bool
}

var ends = map[string]end{
	"an abort":         {false, aborts, isAbort},
	"an abort by peer": {true, aborts, isAbort},
	"a close":          {false, (*Group).Close, func(err error) bool { return errors.Is(err, ErrClosed) }},
	"a close by peer": {true, (*Group).Close, func(err error) bool {
		var lost *RankError
		return errors.As(err, &lost) && lost.Rank == 1
	}},
}

func aborts(g *Group) error { g.Abort(context.DeadlineExceeded); return nil }

func isAbort(err error) bool {
	return errors.Is(err, ErrAborted) && !errors.As(err, new(*TimeoutError))
}

// endHeld runs calls of rank 0 that wait for their streams, without a time limit. When wait has
// returned, it calls waiting, and the group ends. The calls must return; then let lets the streams
// go, and waits for them.
func endHeld(g *Group, c end, waiting, wait, let func(), calls ...func() error) error {
	done := make(chan error, len(calls))
	for _, call := range calls {
		go func() { done <- call() }()
	}
	defer let()
	wait()
	waiting()
	if !c.peer {
		if err := c.do(g); err != nil {
			return err
		}
	}
	for range calls {
		select {
		case err := <-done:
			if !c.is(err) {
				return fmt.Errorf("got %v", err)
			}
		case <-time.After(time.Minute):
			return errors.New("a call waits for its stream all the same")
		}
	}
	return nil
}

// A heldTest is a test of rank 0 of two that have a window. It calls waiting, which then ends the
// group as c says, if another rank does that.
type heldTest func(ctx context.Context, w *Window, c end, d *devicetest.Late, waiting func()) error

// eachHeld runs f for every way in which the group ends, but those of but. Rank 1 runs other
// before.
func eachHeld(t *testing.T, but []string, other func(ctx context.Context, g *Group) error, f heldTest) {
	for name, c := range ends {
		if slices.Contains(but, name) {
			continue
		}
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			d, waits := devicetest.NewLate("cuda:0", 7, 0), make(chan struct{})
			waiting := sync.OnceFunc(func() { close(waits) })
			cfg := Config{Devices: device.List{d}, Timeout: -1}
			each(t, 2, cfg, func(ctx context.Context, g *Group) error {
				w, err := NewWindow(ctx, g, windowSize)
				if err != nil {
					return err
				}
				defer w.Close(ctx)
				if g.Rank() == 0 {
					defer waiting()
					return f(ctx, w, c, d, waiting)
				}
				if err := other(ctx, g); err != nil {
					return err
				}
				if <-waits; c.peer {
					return c.do(g)
				}
				return nil
			})
		})
	}
}

func nothing(context.Context, *Group) error { return nil }

const windowSize = 100

// heldStreams returns streams that wait until let is called, which waits for them, with n bytes of
// memory each.
func heldStreams(d device.Device, k, n int) (all []Buffer, let, release func(), err error) {
	var lets, releases []func()
	for range k {
		s, m, release, err := streamWith(d, n)
		if err != nil {
			return nil, nil, nil, err
		}
		let, err := hold(d, s)
		if err != nil {
			return nil, nil, nil, err
		}
		all, releases = append(all, DeviceBuffer(m, Uint8, s)), append(releases, release)
		lets = append(lets, func() { let(); reach(context.Background(), s) })
	}
	do := func(all []func()) func() {
		return func() {
			for _, f := range all {
				f()
			}
		}
	}
	return all, do(lets), do(releases), nil
}

// Blocking messages, puts and gets of a device's memory whose streams do not come end when the
// group does, here or at the peer, and not only when their time is over.
func TestBlockingCallsOfHeldStreamsEndWithTheGroup(t *testing.T) {
	eachHeld(t, nil, nothing, func(ctx context.Context, w *Window, c end, d *devicetest.Late, waiting func()) error {
		g := w.g
		on, let, release, err := heldStreams(d, 4, windowSize)
		if err != nil {
			return err
		}
		defer release()
		wait := func() {
			for g.Copies() < uint64(len(on)) {
				runtime.Gosched()
			}
		}
		return endHeld(g, c, waiting, wait, let,
			func() error { return g.Do(ctx, SendOp{X: on[0], To: 1}) },
			func() error { return g.Do(ctx, RecvOp{X: on[1], From: 1}) },
			func() error { return w.PutBuffer(ctx, 1, 0, on[2]) },
			func() error { return w.GetBuffer(ctx, 1, 0, on[3]) })
	})
}

// An operation whose stream does not come names the rank that was lost, not one that has closed the
// group since.
func TestHeldOperationNamesTheLostRank(t *testing.T) {
	for lost := 1; lost <= 2; lost++ {
		t.Run(fmt.Sprintf("rank %d is lost", lost), func(t *testing.T) {
			t.Parallel()
			d, waits := devicetest.NewLate("cuda:0", 7, 0), make(chan struct{})
			waiting := sync.OnceFunc(func() { close(waits) })
			each(t, 3, Config{Devices: device.List{d}, Timeout: -1}, func(ctx context.Context, g *Group) error {
				if g.Rank() != 0 {
					err := Send(ctx, g, []byte{1}, 0, 0) // that links it
					if <-waits; g.Rank() == lost {
						return err
					}
					return errors.Join(err, g.Close())
				}
				defer waiting()
				for range 2 {
					if _, err := Recv(ctx, g, make([]byte, 1), AnyRank, 0); err != nil {
						return err
					}
				}
				on, let, release, err := heldStreams(d, 1, windowSize)
				if err != nil {
					return err
				}
				defer release()
				p := g.job.proxy
				p.MarkDead(lost, p.Linked(lost), p2p.ErrPeerGone)
				w := g.Start(AllReduceOp{Dst: on[0], Op: Sum})
				v := w.at.Load().visit
				wait := func() {
					for noticed := false; !noticed; runtime.Gosched() {
						p.Lock()
						noticed = v.bereaved.epoch == g.v.epoch
						p.Unlock()
					}
				}
				c := end{peer: true, is: func(err error) bool {
					var e *RankError
					return errors.As(err, &e) && e.Rank == lost
				}}
				return endHeld(g, c, waiting, wait, let, func() error { return w.Wait(ctx) })
			})
		})
	}
}

// A rank that has closed the group is not named while another may be lost.
func TestLossIsAwaitedBeforeACloseIsNamed(t *testing.T) {
	const lost, left = 1, 2
	each(t, 3, Config{Timeout: -1}, func(ctx context.Context, g *Group) error {
		switch g.Rank() {
		case lost:
			_, err := Recv(ctx, g, make([]byte, 1), 0, 0)
			return err
		case left:
			return errors.Join(Send(ctx, g, []byte{1}, 0, 0), g.Close())
		}
		if _, err := Recv(ctx, g, make([]byte, 1), left, 0); err != nil {
			return err
		}
		if err := Send(ctx, g, []byte{1}, lost, 0); err != nil { // that links it
			return err
		}
		p, past := g.job.proxy, time.Now().Add(-2*grace)
		var w p2p.Wait
		w.Reset(ctx, 0, true)
		p.Lock()
		for !g.coll.Closed(left) {
			if err := p.Progress(&w); err != nil {
				p.Unlock()
				return err
			}
		}
		p.Unlock()
		p.MarkDead(lost, p.Linked(lost), p2p.ErrPeerGone)
		p.Lock()
		defer p.Unlock()
		b := &bereaved{epoch: g.v.epoch, since: map[int]time.Time{left: past}}
		if err := g.lacks(b); err != nil {
			return fmt.Errorf("while rank %d may come back: %w", lost, err)
		}
		b.since[lost] = past
		var e *p2p.PeerError
		if err := g.lacks(b); !errors.As(err, &e) || e.Rank != lost {
			return fmt.Errorf("got %v, want that rank %d is lost", err, lost)
		}
		return nil
	})
}

// A link that is broken for a moment does not end a call that waits for its stream.
func TestHeldCallsOutlastABrokenLink(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		each(t, 1, Config{}, func(ctx context.Context, g *Group) error {
			looks, began := 0, time.Now()
			return g.hold(ctx, func() error {
				if looks++; looks%5 < 3 {
					return errors.New("the link is broken")
				}
				return nil
			}, func() (bool, error) { return time.Since(began) > 3*grace, nil })
		})
	})
}

// A tellingStream tells when it is given a copy.
type tellingStream struct {
	device.Stream
	tell func()
}

func (s *tellingStream) Copy(dst, src mem.Memory) error {
	s.tell()
	return s.Stream.Copy(dst, src)
}

// So do calls that have their data, which the stream is held up to take to the device. The loss of
// the peer does not end them.
func TestCallsWhoseResultIsHeldUpEndWithTheGroup(t *testing.T) {
	but := []string{"a close by peer"}
	op := func(x Buffer) Operation { return AllReduceOp{Dst: x, Op: Sum} }
	message := func(ctx context.Context, g *Group) error { return Send(ctx, g, make([]byte, windowSize), 0, 0) }
	sum := func(ctx context.Context, g *Group) error { return g.Do(ctx, op(BufferOf(make([]byte, windowSize)))) }
	for name, k := range map[string]struct {
		copies int // before that of the result
		other  func(ctx context.Context, g *Group) error
		call   func(ctx context.Context, w *Window, x Buffer) error
	}{
		"a get": {0, nothing, func(ctx context.Context, w *Window, x Buffer) error {
			return w.GetBuffer(ctx, 1, 0, x)
		}},
		"a message": {0, message, func(ctx context.Context, w *Window, x Buffer) error {
			return w.g.Do(ctx, RecvOp{X: x, From: 1})
		}},
		"a sum": {1, sum, func(ctx context.Context, w *Window, x Buffer) error { return w.g.Do(ctx, op(x)) }},
	} {
		t.Run(name, func(t *testing.T) {
			eachHeld(t, but, k.other, func(ctx context.Context, w *Window, c end, d *devicetest.Late,
				waiting func()) error {
				words, _, err := device.Words(d, 1)
				if err != nil {
					return err
				}
				s, m, release, err := streamWith(&gated{d, k.copies, words[0]}, windowSize)
				if err != nil {
					return err
				}
				defer release()
				given, copies := make(chan struct{}), 0
				x := DeviceBuffer(m, Uint8, &tellingStream{s, func() {
					if copies++; copies == k.copies+1 {
						close(given)
					}
				}})
				let := func() { words[0].Word(0).Store(1); reach(ctx, s) }
				return endHeld(w.g, c, waiting, func() { <-given }, let, func() error { return k.call(ctx, w, x) })
			})
		})
	}
}

// So do a started message that has come, and a started operation with its result.
func TestStartedCallsWhoseResultIsHeldUpEndWithTheGroup(t *testing.T) {
	op := func(x Buffer) Operation { return AllReduceOp{Dst: x, Op: Sum} }
	other := func(ctx context.Context, g *Group) error {
		x := make([]byte, windowSize)
		return errors.Join(Send(ctx, g, x, 0, 0), g.Do(ctx, op(BufferOf(x))))
	}
	eachHeld(t, []string{"a close by peer"}, other, func(ctx context.Context, w *Window, c end, d *devicetest.Late,
		waiting func()) error {
		words, _, err := device.Words(d, 1)
		if err != nil {
			return err
		}
		var on []Buffer
		for copies := range 2 {
			s, m, release, err := streamWith(&gated{d, copies, words[0]}, windowSize)
			if err != nil {
				return err
			}
			defer release()
			on = append(on, DeviceBuffer(m, Uint8, s))
		}
		message, sum := w.g.Start(RecvOp{X: on[0], From: 1}), w.g.Start(op(on[1]))
		received, v := message.at.Load().msg.device, sum.at.Load().visit
		wait := func() {
			for !received.ended.Load() || v.word(wordOver) < v.at {
				runtime.Gosched()
			}
		}
		let := func() {
			words[0].Word(0).Store(1)
			for _, x := range on {
				reach(ctx, x.Stream)
			}
		}
		return endHeld(w.g, c, waiting, wait, let,
			func() error { return message.Wait(ctx) }, func() error { return sum.Wait(ctx) })
	})
}

// A message that came before its sender closed the group is received when the stream comes.
func TestHeldReceiveOfMessageThatCame(t *testing.T) {
	d := devicetest.NewLate("cuda:0", 7, 0)
	each(t, 2, Config{Devices: device.List{d}}, func(ctx context.Context, g *Group) error {
		if g.Rank() == 1 {
			return errors.Join(Send(ctx, g, []byte{5}, 0, 0), g.Close())
		}
		p := g.job.proxy
		for left := false; !left; runtime.Gosched() {
			p.Lock()
			p.Look()
			left = g.msgs.Closed(1)
			p.Unlock()
		}
		on, let, release, err := heldStreams(d, 1, 1)
		if err != nil {
			return err
		}
		defer release()
		done := make(chan error, 1)
		go func() { done <- g.Do(ctx, RecvOp{X: on[0], From: 1}) }()
		for range 1000 {
			runtime.Gosched()
		}
		let()
		if err := <-done; err != nil {
			return err
		}
		if got := d.Bytes(mem.Device(uint64(uintptr(on[0].Ptr)), 1, d.Location())); got[0] != 5 {
			return fmt.Errorf("got %d", got[0])
		}
		return nil
	})
}

// A mark is an event.
type mark struct{ done atomic.Bool }

func (m *mark) Done() bool                 { return m.done.Load() }
func (m *mark) Wait(context.Context) error { return nil }

// Of the operations that end on a stream that does not come, the first waits for it, and the others
// do not until it has passed the first. One that the stream has come to is waited for.
func TestOperationsWaitOnceForAStream(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		type stream struct{ device.Stream }
		g, s, other := &Group{}, &stream{}, &stream{}
		visitOf := func(s device.Stream, e *mark) *visit {
			words, _, err := device.Words(device.NewHost(), bufferWords)
			if err != nil {
				t.Fatal(err)
			}
			return &visit{words: words, at: 2, in: []int{1}, stream: s, event: e}
		}
		came := visitOf(s, new(mark))
		came.words[wordArrived].Word(0).Store(1)
		kernel := &visit{stream: s, event: new(mark), launch: &launch{x: &exchange{}}}
		kernel.launch.given.Store(true)
		first := new(mark)
		for i, step := range []struct {
			v    *visit
			want time.Duration
		}{
			{visitOf(s, first), grace},
			{visitOf(s, new(mark)), 0},
			{kernel, 0},
			{visitOf(other, new(mark)), grace},
			{came, grace},
			{visitOf(s, new(mark)), 0},
		} {
			began := time.Now()
			g.settle(step.v)
			if took := time.Since(began); took != step.want {
				t.Errorf("step %d took %v, want %v", i, took, step.want)
			}
		}
		for _, e := range g.devices.late {
			e.(*mark).done.Store(true)
		}
		began := time.Now()
		if g.settle(visitOf(s, new(mark))); time.Since(began) != grace {
			t.Errorf("after the stream has gone on: %v, want %v", time.Since(began), grace)
		}
		if len(g.devices.late) != 1 {
			t.Errorf("%d events are kept", len(g.devices.late))
		}
	})
}

// Many operations on a stream that does not come end soon after an abort, and pass when it comes.
func TestManyOperationsOfAHeldStreamEndTogether(t *testing.T) {
	const many = 20
	d := devicetest.NewLate("cuda:0", 7, 0)
	each(t, 2, Config{Devices: device.List{d}, Timeout: -1}, func(ctx context.Context, g *Group) error {
		if g.Rank() == 1 {
			return nil
		}
		on, let, release, err := heldStreams(d, 1, 4000)
		if err != nil {
			return err
		}
		defer release()
		defer let()
		var works []*Work
		for range many {
			works = append(works, g.Start(AllReduceOp{Dst: on[0], Op: Sum}))
		}
		began := time.Now()
		g.Abort(errors.New("enough"))
		for _, w := range works {
			if err := w.Wait(ctx); !errors.Is(err, ErrAborted) {
				return err
			}
		}
		if took := time.Since(began); took > many*grace/2 {
			return fmt.Errorf("%d operations ended after %v", many, took)
		}
		return nil
	})
}
