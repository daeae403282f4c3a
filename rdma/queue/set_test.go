package queue

import (
	"bytes"
	"context"
	"errors"
	"math/rand/v2"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"tutti/rdma"
	"tutti/rdma/soft"
)

// writes is a batch of n writes that are not contiguous.
func writes(n int) *Batch {
	b := &Batch{}
	for i := range uint64(n) {
		b.Ops = append(b.Ops, Op{Kind: rdma.Write, Local: 1<<20 + 16*i, Remote: 16 * i, Len: 8})
	}
	return b
}

// auto has the model end a request whenever there is nothing to poll.
func (w *world) auto() {
	for _, c := range w.cqs {
		c.idle = func() {
			for _, q := range w.qps {
				if len(q.sends) > 0 && (q.state == rdma.StateReady || q.state == rdma.StateFailed) {
					q.end(rdma.Success)
					return
				}
			}
		}
	}
}

func TestBatchesLargerThanTheQueue(t *testing.T) {
	for _, c := range []struct{ depth, chunk, n int }{{10, 4, 1000}, {1, 1, 20}, {2, 32, 33}, {3, 2, 50}, {7, 7, 100},
		{128, 32, 10000}} {
		w, _, s := newModel(t, 1, c.depth, 1, Config{Chunk: c.chunk})
		w.auto()
		w.qps[0].keep = true
		tr, err := s.Submit(soon(t), writes(c.n))
		if err != nil {
			t.Fatal(c, err)
		}
		if err := tr.Wait(soon(t)); err != nil || len(w.qps[0].log) != c.n || w.event != "" {
			t.Fatal(c, err, len(w.qps[0].log), w.event)
		}
		if u := s.Usage()[0]; u.InUse != 0 || u.Depth != c.depth {
			t.Fatal(u)
		}
	}
}

// TestTimeoutOfTheEnvironment: it stands for a Config without one, and one that cannot be read is
// an error of New.
func TestTimeoutOfTheEnvironment(t *testing.T) {
	for _, c := range []struct {
		set  string
		cfg  time.Duration
		want time.Duration
	}{{"", 0, DefaultTimeout}, {"3s", 0, 3 * time.Second}, {"0.25", 0, 250 * time.Millisecond},
		{"3s", time.Second, time.Second}, {"-1", 0, 0}, {"3s", -1, 0}} {
		t.Setenv(TimeoutVariable, c.set)
		synctest.Test(t, func(t *testing.T) {
			_, _, s := newModel(t, 1, 1, 1, Config{Timeout: c.cfg})
			if _, err := s.Submit(t.Context(), writes(1)); err != nil {
				t.Fatal(err)
			}
			begin := time.Now()
			_, err := s.Submit(t.Context(), writes(1))
			full, ok := errors.AsType[*rdma.QueueFullError](err)
			if took := time.Since(begin); !ok || !full.Retryable || took < c.want || took > c.want+time.Millisecond {
				t.Errorf("%+v: %v after %v", c, err, took)
			}
		})
	}
	t.Setenv(TimeoutVariable, "ten")
	w := &world{t: t}
	p, err := NewPoller(w, 2)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := New(p, []rdma.QP{w.newQP(w.cqs[0], 1, 1)}, Config{}); err == nil ||
		!strings.Contains(err.Error(), `TUTTI_RDMA_SQ_TIMEOUT="ten": expected a duration`) {
		t.Errorf("%v", err)
	}
}

func TestFullQueueIsAnError(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w, _, s := newModel(t, 1, 4, 1, Config{Chunk: 2, Timeout: time.Second})
		for range 2 {
			if _, err := s.Submit(t.Context(), writes(2)); err != nil {
				t.Fatal(err)
			}
		}
		_, err := s.Submit(t.Context(), writes(1))
		var full *rdma.QueueFullError
		if !errors.As(err, &full) || !full.Retryable || full.Degraded || full.Posted != 0 || full.InUse != 4 ||
			full.Need != 1 || full.Waited < time.Second {
			t.Fatalf("%v (%+v)", err, full)
		}
		w.auto()
		if _, err := s.Submit(t.Context(), writes(1)); err != nil {
			t.Fatal(err)
		}
	})
}

// A release wakes a submission that waits for room, without a nap's end.
func TestReleaseWakes(t *testing.T) {
	_, _, s := newModel(t, 1, 2, 1, Config{})
	q := s.queues[0]
	if err := q.reserve(2, q.currentLife()); err != nil {
		t.Fatal(err)
	}
	bell := q.wait(1)
	select {
	case <-bell:
		t.Fatal("rung without a release")
	default:
	}
	q.release(1, q.currentLife())
	<-bell
	<-q.wait(1) // there is room
}

func TestNoWaitForRoom(t *testing.T) {
	w, _, s := newModel(t, 1, 4, 1, Config{Chunk: 2, Timeout: -1})
	for range 2 {
		if _, err := s.Submit(t.Context(), writes(2)); err != nil {
			t.Fatal(err)
		}
	}
	var full *rdma.QueueFullError
	if _, err := s.Submit(t.Context(), writes(2)); !errors.As(err, &full) || !full.Retryable {
		t.Fatal(err)
	}
	w.qps[0].end(rdma.Success)
	w.qps[0].end(rdma.Success)
	if _, err := s.Submit(t.Context(), writes(2)); err != nil { // what has completed makes room
		t.Fatal(err)
	}
}

func TestPostThatFailsInTheMiddle(t *testing.T) {
	w, p, s := newModel(t, 1, 8, 1, Config{Chunk: 4})
	q := w.qps[0]
	posts := 0
	q.postFails = func(n int) int {
		if posts++; posts == 2 {
			return 3
		}
		return n
	}
	tr, err := s.Submit(t.Context(), writes(8))
	if err != nil {
		t.Fatal(err)
	}
	want := Usage{QP: q.number, Depth: 8, InUse: 8, Recorded: 8, Degraded: true} // 4, 3 and the flush
	if u := s.Usage()[0]; u != want {
		t.Fatalf("%+v", u)
	}
	var full *rdma.QueueFullError
	if _, err := s.Submit(t.Context(), writes(1)); !errors.As(err, &full) || !full.Degraded || full.Retryable {
		t.Fatal(err)
	}
	for i := range 8 {
		if tr.Ended() {
			t.Fatal("ended with requests under way", i)
		}
		q.end(rdma.Success)
		if _, err := p.Poll(); err != nil {
			t.Fatal(err)
		}
	}
	if err := tr.Wait(t.Context()); !errors.Is(err, syscall.ENOMEM) {
		t.Fatal(err)
	}
	w.auto()
	if tr, err = s.Submit(t.Context(), writes(3)); err != nil {
		t.Fatal(err)
	}
	if err := tr.Wait(t.Context()); err != nil || s.Err() != nil || w.event != "" {
		t.Fatal(err, s.Err(), w.event)
	}
}

func TestDegradedInTheMiddleOfABatch(t *testing.T) {
	w, _, s := newModel(t, 1, 8, 1, Config{Chunk: 2})
	x := newSubmission(s)
	if err := x.plan(writes(6)); err != nil {
		t.Fatal(err)
	}
	if _, _, err := x.step(); err != nil {
		t.Fatal(err)
	}
	w.qps[0].postFails = func(n int) int { return max(1, n-1) } // the flush is posted
	if _, err := s.Submit(t.Context(), writes(2)); err != nil {
		t.Fatal(err)
	}
	_, _, err := x.step()
	x.fail(err)
	var full *rdma.QueueFullError
	if !errors.As(err, &full) || full.Posted != 2 || !full.Degraded {
		t.Fatal(err)
	}
}

func TestNothingPostedIsAnErrorOfSubmit(t *testing.T) {
	w, _, s := newModel(t, 1, 8, 1, Config{})
	w.qps[0].postFails = func(int) int { return 0 }
	if tr, err := s.Submit(t.Context(), writes(2)); !errors.Is(err, syscall.ENOMEM) || tr != nil {
		t.Fatal(tr, err)
	}
	if u := s.Usage()[0]; u.InUse != 0 || u.Degraded {
		t.Fatalf("%+v", u)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if tr, err := s.Submit(ctx, writes(2)); !errors.Is(err, context.Canceled) || tr != nil {
		t.Fatal(tr, err)
	}
}

func TestFailedRequestFailsTheSet(t *testing.T) {
	var causes []error
	w, p, s := newModel(t, 2, 8, 1, Config{Failed: func(cause error) { causes = append(causes, cause) }})
	first, err := s.Submit(t.Context(), writes(2)) // to the second queue pair
	if err != nil {
		t.Fatal(err)
	}
	second, err := s.Submit(t.Context(), writes(3))
	if err != nil {
		t.Fatal(err)
	}
	w.qps[1].end(rdma.RemoteAccess)
	w.auto()
	var status *rdma.StatusError
	if err := first.Wait(soon(t)); !errors.As(err, &status) || status.Status != rdma.RemoteAccess ||
		status.QP != w.qps[1].number || status.Op != rdma.Write {
		t.Fatal(err)
	}
	if err := second.Wait(soon(t)); !errors.As(err, &status) || status.Status != rdma.Flushed || !errors.Is(err,
		s.Err()) {
		t.Fatal(err)
	}
	if _, err := s.Submit(t.Context(), writes(1)); !errors.Is(err, ErrFailed) || !errors.Is(err, s.Err()) {
		t.Fatal(err)
	}
	if s.Fail(errors.New("again")); len(causes) != 1 || causes[0] != s.Err() {
		t.Fatal(causes)
	}
	// Of the third batch's last request, but in the life before.
	late := rdma.Completion{ID: s.queues[0].name.id(data, s.queues[0].ledger.next+2), QP: w.qps[0].number}
	if err := s.Reset(soon(t), func(_ int, q rdma.QP) error { return q.Connect(nil) }); err != nil {
		t.Fatal(err)
	}
	if s.Err() != nil || len(causes) != 1 {
		t.Fatal(s.Err(), causes)
	}
	third, err := s.Submit(t.Context(), writes(3))
	if err != nil {
		t.Fatal(err)
	}
	w.cqs[0].put(late)
	if _, err := p.Poll(); err != nil || p.strays != 1 || third.Ended() {
		t.Fatal(err, p.strays, third.Ended())
	}
	if err := third.Wait(soon(t)); err != nil {
		t.Fatal(err)
	}
}

// The fatal status of a batch is not that of one which was not posted because of it, as a whole or
// in part.
func TestFatalStatusIsThatOfItsBatch(t *testing.T) {
	w, _, s := newModel(t, 2, 8, 1, Config{})
	bad, err := s.Submit(t.Context(), writes(1)) // to the second queue pair
	if err != nil {
		t.Fatal(err)
	}
	w.cqs[0].idle = func() { // when the next batch waits for room
		w.auto()
		w.qps[1].end(rdma.RemoteAccess)
	}
	part, err := s.Submit(soon(t), writes(20))
	if err != nil {
		t.Fatal(err)
	}
	if err := bad.Wait(soon(t)); !rdma.Fatal(err) {
		t.Error(err)
	}
	_, none := s.Submit(t.Context(), writes(1))
	for name, err := range map[string]error{"nothing": none, "a part": part.Wait(soon(t))} {
		var status *rdma.StatusError
		if !errors.Is(err, ErrFailed) || !errors.Is(err, s.Err()) || errors.As(err, &status) || rdma.Fatal(err) {
			t.Errorf("%s was posted: %v, fatal: %v", name, err, rdma.Fatal(err))
		}
	}
}

// Queue pairs complete in any order: a fatal status is that of its batch also if another part of it
// was flushed before.
func TestFatalStatusOfAPartThatEndsLater(t *testing.T) {
	w, _, s := newModel(t, 2, 8, 1, Config{})
	// One request to each queue pair.
	bad, err := s.Submit(t.Context(), &Batch{Ops: []Op{{Kind: rdma.Write, Local: 1 << 20, Len: 2 * DefaultSpread}}})
	if err != nil {
		t.Fatal(err)
	}
	w.qps[0].state = rdma.StateFailed
	w.qps[0].end(rdma.Success) // it is flushed
	w.qps[1].end(rdma.RemoteAccess)
	if err := bad.Wait(soon(t)); !rdma.Fatal(err) {
		t.Error(err)
	}
}

// A transfer that is cancelled ends when the device has flushed it, or else by force.
func TestCancelledTransferEndsWhenFlushed(t *testing.T) {
	for name, c := range map[string]struct {
		prepare func(*world)
		closed  bool
	}{
		"flushed":           {func(w *world) { w.auto() }, false},
		"never completes":   {func(*world) {}, false},
		"cannot be failed":  {func(w *world) { w.qps[0].failFails = true }, false},
		"cannot be reset":   {func(w *world) { w.qps[0].noReset = true }, true},
		"poll fails":        {func(w *world) { w.cqs[0].broken = syscall.EIO }, false},
		"poll, and a quirk": {func(w *world) { w.cqs[0].broken = syscall.EIO; w.qps[0].noReset = true }, true},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w, _, s := newModel(t, 1, 8, 1, Config{})
				ctx, cancel := context.WithCancel(t.Context())
				tr, err := s.Submit(ctx, writes(4))
				if err != nil {
					t.Fatal(err)
				}
				c.prepare(w)
				cancel()
				err = tr.Wait(ctx)
				if err == nil || w.cqs[0].broken == nil && !errors.Is(err, context.Canceled) {
					t.Fatal(err)
				}
				if !tr.Ended() || len(w.qps[0].sends) > 0 || w.qps[0].closed != c.closed {
					t.Fatal(tr.Ended(), len(w.qps[0].sends), w.qps[0].closed)
				}
				if again := tr.Wait(t.Context()); !errors.Is(again, tr.Err()) {
					t.Fatal(again)
				}
				err = s.Reset(t.Context(), func(_ int, q rdma.QP) error { return q.Connect(nil) })
				if errors.Is(err, errors.ErrUnsupported) != c.closed || errors.Is(err, rdma.ErrClosed) != c.closed ||
					err != nil != c.closed {
					t.Errorf("a later reset: %v", err)
				}
			})
		})
	}
}

// A wait ends for a transfer on a queue pair that will not complete it.
func TestQueuePairThatCannotBeFailed(t *testing.T) {
	w, _, s := newModel(t, 1, 8, 1, Config{})
	tr, err := s.Submit(t.Context(), writes(4))
	if err != nil {
		t.Fatal(err)
	}
	w.qps[0].failFails = true
	cause := errors.New("the device is gone")
	s.Fail(cause)
	if !tr.Ended() || !errors.Is(tr.Err(), cause) || len(w.qps[0].sends) > 0 {
		t.Fatal(tr.Ended(), tr.Err(), len(w.qps[0].sends))
	}
}

func TestNotificationsOnAllQueuePairs(t *testing.T) {
	var got []uint32
	w, p, s := newModel(t, 3, 4, 1, Config{Pending: 3, Notified: func(id uint32) { got = append(got, id) }})
	arrive := func(i int, imm uint32) {
		w.qps[i].arrive(imm)
		if _, err := p.Poll(); err != nil {
			t.Fatal(err)
		}
	}
	check := func(want ...uint32) {
		t.Helper()
		if len(got) != len(want) {
			t.Fatal(got, want)
		}
		for i := range got {
			if got[i] != want[i] {
				t.Fatal(got, want)
			}
		}
	}
	arrive(1, 7) // alone
	check(7)
	arrive(0, 5|spreadBit)
	arrive(0, 5|spreadBit)
	arrive(0, 6|spreadBit)
	arrive(1, 6|spreadBit)
	arrive(1, 5|spreadBit)
	check(7)
	arrive(2, 5|spreadBit)
	check(7, 5)
	arrive(2, 5|spreadBit)
	check(7, 5)
	arrive(1, 5|spreadBit)
	arrive(2, 6|spreadBit)
	check(7, 5, 5, 6)
	if len(s.parts) != 0 || w.event != "" || len(w.qps[0].receives) != 4 {
		t.Fatal(s.parts, w.event, len(w.qps[0].receives))
	}
	for id := range uint32(3) {
		arrive(0, id|spreadBit)
	}
	if s.Err() != nil {
		t.Fatal(s.Err())
	}
	arrive(0, 3|spreadBit)
	if s.Err() == nil {
		t.Fatal("a peer that begins notifications without end")
	}
}

func TestMessagesThatAreNoNotifications(t *testing.T) {
	for name, c := range map[string]rdma.Completion{
		"a send":    {Op: rdma.Recv},
		"with data": {Op: rdma.RecvWriteImm, HasImm: true, Bytes: 1},
		"failed":    {Status: rdma.LocalLength},
	} {
		w, p, s := newModel(t, 1, 4, 1, Config{Notified: func(uint32) { t.Error(name) }})
		c.ID, c.QP = w.qps[0].receives[0].ID, w.qps[0].number
		w.cqs[0].put(c)
		if _, err := p.Poll(); err != nil || s.Err() == nil {
			t.Error(name, err)
		}
	}
}

func TestCompletionQueueHasRoomForAll(t *testing.T) {
	w := &world{t: t}
	p, err := NewPoller(w, 10)
	if err != nil {
		t.Fatal(err)
	}
	set := func(depth int) (*Set, error) {
		return New(p, []rdma.QP{w.newQP(w.cqs[0], depth, 1)}, Config{})
	}
	a, err := set(6)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := set(5); err == nil {
		t.Fatal("11 completions in a queue of 10")
	}
	if err := a.Close(); err != nil {
		t.Fatal(err)
	}
	if err := a.Close(); err != nil {
		t.Fatal(err)
	}
	if _, err := a.Submit(t.Context(), writes(1)); !errors.Is(err, rdma.ErrClosed) {
		t.Fatal(err)
	}
	if _, err := set(10); err != nil {
		t.Fatal(err)
	}
}

// Goroutines submit, wait and cancel; both ends repair what breaks. A waiting goroutine polls.
func TestConcurrentUsers(t *testing.T) {
	for name, served := range map[string]bool{"users poll": false, "served": true} {
		t.Run(name, func(t *testing.T) { concurrentUsers(t, served) })
	}
}

func concurrentUsers(t *testing.T, served bool) {
	const (
		users = 6
		size  = 20 << 10
	)
	rounds := 150
	if raceEnabled || testing.Short() {
		rounds = 40
	}
	var faults atomic.Uint32
	f := soft.New(soft.Config{Seed: 3, Late: 3, Faults: soft.Faults{Post: func(string, uint32, int) syscall.Errno {
		if faults.Add(1)%997 == 0 {
			return syscall.ENOMEM
		}
		return 0
	}}})
	defer f.Close()
	var told atomic.Int64
	cfg := Config{Chunk: 4, Spread: 4 << 10, Timeout: time.Minute, Notified: func(uint32) { told.Add(1) }}
	a, b := newEnds(t, f, 2, 16, users*size, cfg)
	ctx, stop := context.WithCancel(soon(t))
	var serving sync.WaitGroup
	for _, e := range []*end{a, b} {
		serving.Go(func() {
			if served || e == b { // no submission waits at b
				if err := e.p.Serve(ctx); !errors.Is(err, context.Canceled) {
					t.Error(err)
				}
			}
		})
	}
	// repair is called with the set that a batch has failed on; the first caller repairs it.
	var repairing sync.Mutex
	repair := func() {
		repairing.Lock()
		defer repairing.Unlock()
		if a.s.Err() == nil && b.s.Err() == nil {
			return
		}
		for _, e := range []*end{a, b} {
			if err := e.s.Drain(ctx); err != nil {
				t.Error(err)
			}
		}
		for _, x := range [][2]*end{{a, b}, {b, a}} {
			if err := x[0].s.Reset(ctx, func(i int, q rdma.QP) error { return x[0].connect(x[1], i, q) }); err != nil {
				t.Error(err)
			}
		}
	}
	var group sync.WaitGroup
	var good, bad atomic.Int64
	for u := range users {
		group.Go(func() {
			r := rand.New(rand.NewPCG(uint64(u), 5))
			base := uint64(u * size)
			for round := range rounds {
				n := 1 + r.Uint64N(size-1)
				for i := range n {
					a.b[base+i] = byte(round)*7 + byte(i)
				}
				batch := Batch{Notify: round%4 == 0, ID: uint32(u)}
				for off := uint64(0); off < n; {
					k := min(1+r.Uint64N(3000), n-off)
					batch.Ops = append(batch.Ops, a.op(b, rdma.Write, base+off, base+off, k))
					off += k
				}
				waiting := ctx
				if r.IntN(20) == 0 {
					var cancel context.CancelFunc
					waiting, cancel = context.WithCancel(ctx)
					cancel()
				}
				tr, err := a.s.Submit(ctx, &batch)
				if err == nil {
					err = tr.Wait(waiting)
				}
				if err == nil {
					good.Add(1)
					if !bytes.Equal(a.b[base:base+n], b.b[base:base+n]) {
						t.Error("other bytes")
					}
					continue
				}
				bad.Add(1)
				if ctx.Err() != nil {
					t.Error(err)
					return
				}
				repair()
			}
		})
	}
	group.Wait()
	stop()
	serving.Wait()
	for _, e := range []*end{a, b} {
		for _, u := range e.s.Usage() {
			if u.InUse != 0 && !u.Failed && !u.Degraded {
				t.Errorf("%+v", u)
			}
		}
	}
	a.close()
	b.close()
	if good.Load() == 0 || bad.Load() == 0 || told.Load() == 0 {
		t.Error(good.Load(), bad.Load(), told.Load())
	}
	t.Logf("%d well, %d not, %d notifications", good.Load(), bad.Load(), told.Load())
}
