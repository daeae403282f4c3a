package pg

import (
	"context"
	"errors"
	"time"
	"unsafe"

	"tutti/collectives"
	"tutti/p2p"
	"tutti/pg/flight"
	"tutti/pg/internal/exec"
)

// A Work is an operation that Start started.
type Work struct {
	g   *Group
	msg *message // Send or Recv

	// With the proxy's lock, but for what is read once the operation is over.
	s     *started // nil: it is over, or a message
	over  bool
	local bool // the result is here, whatever err says
	err   error
	done  chan struct{}
}

// started is a collective that Start started, until it is over. It is used again.
type started struct {
	waiter
	w     *Work
	bound *exec.Bound    // the call, if it was bound when it was started; else call
	in    unsafe.Pointer // of bound
	out   unsafe.Pointer
	call  exec.Call
	eager bool   // it is not to wait for who waits for it
	at    int64  // when it was started, by the recorder's clock
	n     uint64 // of all that the group has started
}

// Done is closed when the operation has ended, one way or the other. Who asks for it has the
// operation begin as soon as its turn comes, as Wait does.
func (w *Work) Done() <-chan struct{} {
	p := w.g.job.proxy
	p.Lock()
	defer p.Unlock()
	if w.s != nil {
		w.g.line.hurry(w.s)
		w.g.rouse()
	}
	return w.doneLocked()
}

func (w *Work) doneLocked() <-chan struct{} {
	if w.done == nil {
		if w.done = make(chan struct{}); w.over {
			close(w.done)
		}
	}
	return w.done
}

// Err returns the outcome; it may be called once Done is closed.
func (w *Work) Err() error { return w.err }

// LocalSuccess reports whether the operation's result is here: that it ended well, or that only its
// confirmation failed (Config.Uniform), so that the result does not count although this rank has
// it. It may be called once Done is closed.
func (w *Work) LocalSuccess() bool { return w.err == nil || w.local }

// FailedRanks returns the ranks because of which the operation failed: those that were lost, or
// those that were waited for in vain. It may be called once Done is closed.
func (w *Work) FailedRanks() (ranks []int) {
	var lost *RankError
	var late *TimeoutError
	switch {
	case errors.As(w.err, &lost):
		ranks = append([]int{lost.Rank}, lost.Also...)
	case errors.As(w.err, &late):
		for _, m := range late.Missing {
			ranks = append(ranks, m.Rank)
		}
	}
	return ranks
}

// Status returns what a RecvOp received; it may be called once Done is closed and Err is nil.
func (w *Work) Status() Status {
	if w.msg == nil {
		return Status{}
	}
	return w.msg.status()
}

// Wait waits for the operation to end and returns its outcome. When ctx ends first the operation
// goes on; Wait then returns ctx's error and the buffers are still in use.
func (w *Work) Wait(ctx context.Context) error {
	g := w.g
	p := g.job.proxy
	p.Lock()
	defer p.Unlock()
	for !w.over {
		if err := ctx.Err(); err != nil {
			return err
		}
		if w.msg != nil { // it has a goroutine of its own
			done := w.doneLocked()
			p.Unlock()
			select {
			case <-done:
			case <-ctx.Done():
			}
			p.Lock()
		} else if !g.drive(ctx) {
			g.sleep(w.doneLocked(), ctx)
		}
	}
	return w.err
}

// end says how the operation ended. With the proxy's lock.
func (w *Work) end(err error) {
	if w.err, w.over = err, true; w.done != nil {
		close(w.done)
	}
}

// Operations of up to shortTo bytes begin with the goroutine that starts them or runs the one
// before, those of eagerFrom and more in the worker, at once. The worker is also who goes on with
// the others, and begins those between, if nobody waits for them within patience: a handover takes
// longer than they do.
const (
	shortTo   = 4 << 10
	eagerFrom = 64 << 10
	patience  = 500 * time.Microsecond
	maxSpare  = 256
	watches   = 16 // times that the worker looks in vain before it sleeps for good
)

// Start begins an operation and returns at once. Collectives run in the order in which they were
// started; Send and Recv are independent of them and of each other, but for the order of messages
// with the same peer and tag. The buffers belong to the operation until it is done. An error in the
// arguments ends the Work at once. Config.Timeout bounds a collective from when it begins to run, a
// message from now on.
//
// Started operations need nobody who waits for them. If nobody does, one of less than 64 KiB may go
// on as late as a millisecond after it could.
func (g *Group) Start(op Operation) *Work {
	switch o := op.(type) {
	case SendOp:
		return g.startMessage(o.X, o.To, o.Tag, false)
	case RecvOp:
		return g.startMessage(o.X, o.From, o.Tag, true)
	}
	var q exec.Request
	ask(op, &q)
	w := &Work{g: g}
	g.job.proxy.Lock()
	defer g.job.proxy.Unlock()
	if g.closed.Load() {
		w.end(ErrClosed)
		return w
	}
	b := g.run.Recall(&q)
	var c exec.Call
	if b == nil {
		var err error
		if c, err = g.check(&q); err != nil {
			w.end(err)
			return w
		}
	}
	g.lineUp(w, &q, b, &c)
	if !g.works.worker {
		g.works.worker = true
		g.wg.Add(1)
		go g.work()
	} else if w.s.eager || !g.works.watched {
		g.kickWorker()
	}
	g.advance()
	return w
}

// lineUp puts a Work into the line: for a bound call, or for c.
func (g *Group) lineUp(w *Work, q *exec.Request, b *exec.Bound, c *exec.Call) {
	var s *started
	if n := len(g.works.spare); n > 0 {
		s, g.works.spare = g.works.spare[n-1], g.works.spare[:n-1]
	} else {
		s = &started{}
		s.work = s
	}
	w.s, s.w, s.at = s, w, flight.Now()
	if s.bound = b; b != nil {
		s.in, s.out = q.Src.Ptr, q.Dst.Ptr
		s.eager = b.Bytes() >= eagerFrom
	} else {
		s.call = *c
		s.eager = c.Bytes(g.v.Size) >= eagerFrom
	}
	g.works.started++
	s.n = g.works.started
	g.line.join(&s.waiter)
}

// A Work that is short, its call being bound, begins as soon as it has the turn, in whichever
// goroutine passed it on: that sends what can be sent, so that no peer waits for this rank's data.
// When it comes to where it has to wait it is parked. A goroutine that waits for it, or for its own
// turn behind it, goes on with it; when that goroutine's ctx ends, it is parked again. All others
// run in such a goroutine only if that need not give up, and else in the worker, which also takes
// what is left lying.

// works is what a group has to know of what was started.
type works struct {
	parked  parked
	worker  bool          // there is one
	watched bool          // it looks now and then whether what was started has been left lying
	started uint64        // how many works were
	spare   []*started    // for the next ones
	kick    chan struct{} // wakes the worker
}

// parked is a Work that has the turn and that no goroutine runs: its plan was interrupted, or has
// failed, with err.
type parked struct {
	work *started
	err  error
}

// idle returns the Work whose turn it is, if no goroutine runs it.
func (g *Group) idle() *started {
	if g.works.parked.work != nil {
		return g.works.parked.work
	}
	return g.line.next()
}

// steady reports whether only the steps of its plan are to be done for w.
func (g *Group) steady(w *started) bool {
	return w.bound != nil && g.run.Current(w.bound) && !g.rough && !g.job.settings.Uniform
}

// advance begins what is short, one after the other until one is parked. With the proxy's lock, as
// what follows.
func (g *Group) advance() {
	for g.works.parked.work == nil {
		w := g.line.next()
		if w == nil || !g.steady(w) || w.bound.Bytes() > shortTo {
			return
		}
		g.attempt(w, g.wait.Try)
	}
	g.rouse()
}

// drive runs the Work whose turn it is on behalf of a goroutine that waits, until ctx ends at most,
// and reports whether there was one that it could run.
func (g *Group) drive(ctx context.Context) bool {
	w := g.idle()
	switch {
	case w == nil:
		return false
	case ctx.Done() == nil:
		g.perform(w, false)
	case w != g.works.parked.work && g.steady(w) || w == g.works.parked.work && g.works.parked.err == p2p.ErrSuspended:
		if g.attempt(w, func() { g.wait.Attend(ctx) }); g.works.parked.work != nil {
			g.kickWorker()
			return true
		}
	default:
		return false
	}
	g.advance()
	return true
}

// attempt runs a Work, or goes on with it, as far as patient has its waits go.
func (g *Group) attempt(w *started, patient func()) {
	begun := g.works.parked.work == w
	if g.works.parked = (parked{}); !begun {
		g.line.takeNext()
		g.begun(g.ctx, false)
		g.load(w)
		if err := g.launch(); err != nil {
			g.finish(w, err)
			return
		}
	}
	patient()
	var err error
	if begun {
		err = g.run.Resume()
	} else {
		err = g.run.Run(g.seq, g.hint)
	}
	if err != nil {
		g.works.parked = parked{w, err}
		return
	}
	w.w.local, err = g.concluded(nil)
	g.finish(w, err)
}

// perform runs a Work to its end.
func (g *Group) perform(w *started, lazy bool) {
	var err error
	if at := g.works.parked; at.work == w {
		g.works.parked = parked{}
		g.wait.Stay(lazy)
		if err = at.err; err == p2p.ErrSuspended {
			err = g.run.Resume()
		}
		w.w.local, err = g.concluded(err)
		g.finish(w, err)
		return
	}
	g.line.takeNext()
	g.begun(g.ctx, lazy)
	if g.rough {
		err = g.ready()
	}
	if err == nil {
		g.load(w)
		w.w.local, err = g.collective()
	}
	g.finish(w, err)
}

// load makes w the current call.
func (g *Group) load(w *started) {
	g.track.Queued(w.at)
	switch b := w.bound; {
	case b == nil:
		g.run.Adopt(w.call)
	case g.run.Current(b):
		g.run.Use(b, w.out, w.in)
	default:
		c := b.Call
		c.In, c.Out = w.in, w.out
		g.run.Adopt(c)
	}
}

// finish ends a Work that has run, and passes the turn on.
func (g *Group) finish(w *started, err error) {
	if err != nil && g.closed.Load() {
		err = ErrClosed
	}
	g.track.Queued(0)
	g.rest()
	w.w.end(err) // before a later one can end
	w.w.s = nil
	w.call.Forget()
	w.w, w.bound, w.in, w.out = nil, nil, nil, nil
	if len(g.works.spare) < maxSpare {
		g.works.spare = append(g.works.spare, w)
	}
	g.line.works--
	g.pass()
}

// sleep gives up the proxy's lock until until is closed or ctx ends.
func (g *Group) sleep(until <-chan struct{}, ctx context.Context) {
	p := g.job.proxy
	g.line.asleep++
	g.rouse()
	p.Unlock()
	select {
	case <-until:
	case <-ctx.Done():
	}
	p.Lock()
	g.line.asleep--
}

// urgent reports whether what is idle is not to be left lying: somebody sleeps, or will, until it,
// or what is behind it, is over; or it has failed.
func (g *Group) urgent() bool {
	w, l := g.idle(), &g.line
	failed := g.works.parked.work != nil && g.works.parked.err != p2p.ErrSuspended
	return w != nil && (w.eager || l.eager > 0 || l.asleep > 0 || failed)
}

// rouse wakes the worker if it has something to do at once, or has to look after what may be left
// lying.
func (g *Group) rouse() {
	if g.urgent() || g.idle() != nil && !g.works.watched || g.closed.Load() {
		g.kickWorker()
	}
}

func (g *Group) kickWorker() {
	select {
	case g.works.kick <- struct{}{}:
	default:
	}
}

// work is the group's worker: it runs what was started, where nobody else does, until Close.
func (g *Group) work() {
	defer g.wg.Done()
	p, l := g.job.proxy, &g.line
	timer := time.NewTimer(time.Hour)
	timer.Stop()
	p.Lock()
	defer p.Unlock()
	var seen, started uint64 // what was idle when the worker looked last, and how many were started by then
	for idle := 0; ; {
		closed := g.closed.Load()
		next := g.idle()
		switch {
		case next != nil && (next.n == seen || closed) || g.urgent():
			g.perform(next, true)
			g.advance()
			if next = g.idle(); next != nil { // it has been left lying as long
				seen = next.n
			}
			continue
		case closed && l.works == 0:
			return
		}
		if next != nil {
			seen = next.n
		}
		if next != nil || started != g.works.started {
			idle, started = 0, g.works.started
		} else if idle < watches {
			idle++
		}
		g.works.watched = idle < watches
		p.Unlock()
		if idle < watches {
			timer.Reset(patience)
			select {
			case <-g.works.kick:
			case <-timer.C:
			}
			timer.Stop()
		} else {
			<-g.works.kick
		}
		p.Lock()
	}
}

// Do runs an operation and returns when it has ended, or when ctx has: a blocking call of any
// operation on any buffers. What it returns of a RecvOp's message is Recv's business.
func (g *Group) Do(ctx context.Context, op Operation) error {
	switch o := op.(type) {
	case SendOp:
		_, err := g.pointToPoint(ctx, o.X, o.To, o.Tag, false)
		return err
	case RecvOp:
		_, err := g.pointToPoint(ctx, o.X, o.From, o.Tag, true)
		return err
	}
	var q exec.Request
	ask(op, &q)
	return g.blocking(ctx, &q)
}

// ask is what the program asks for with op, which is no message.
func ask(op Operation, q *exec.Request) {
	switch o := op.(type) {
	case AllReduceOp:
		if o.Src == (Buffer{}) {
			o.Src = o.Dst
		}
		q.Kind, q.Op, q.Dst, q.Src = collectives.AllReduce, o.Op, exec.Buffer(o.Dst), exec.Buffer(o.Src)
	case ReduceScatterOp:
		q.Kind, q.Op, q.Dst, q.Src = collectives.ReduceScatter, o.Op, exec.Buffer(o.Dst), exec.Buffer(o.Src)
	case AllGatherOp:
		q.Kind, q.Dst, q.Src = collectives.AllGather, exec.Buffer(o.Dst), exec.Buffer(o.Src)
	case AllGatherVOp:
		q.Kind, q.Dst, q.Src, q.Counts = collectives.AllGatherV, exec.Buffer(o.Dst), exec.Buffer(o.Src), o.Counts
	case AllToAllOp:
		q.Kind, q.Dst, q.Src = collectives.AllToAll, exec.Buffer(o.Dst), exec.Buffer(o.Src)
	case AllToAllVOp:
		q.Kind, q.Dst, q.Src, q.Counts, q.RecvCounts = collectives.AllToAllV, exec.Buffer(o.Dst), exec.Buffer(o.Src),
			o.SendCounts, o.RecvCounts
	case BroadcastOp:
		q.Kind, q.Root, q.Dst, q.Src = collectives.Broadcast, o.Root, exec.Buffer(o.X), exec.Buffer(o.X)
	case ReduceOp:
		q.Kind, q.Op, q.Root, q.Dst, q.Src = collectives.Reduce, o.Op, o.Root, exec.Buffer(o.X), exec.Buffer(o.X)
	case GatherOp:
		q.Kind, q.Root, q.Dst, q.Src = collectives.Gather, o.Root, exec.Buffer(o.Dst), exec.Buffer(o.Src)
	case ScatterOp:
		q.Kind, q.Root, q.Dst, q.Src = collectives.Scatter, o.Root, exec.Buffer(o.Dst), exec.Buffer(o.Src)
	case BarrierOp:
		q.Kind = collectives.Barrier
	}
}
