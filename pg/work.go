package pg

import (
	"context"
	"fmt"
	"runtime/debug"
	"sync/atomic"
	"time"
	"unsafe"

	"tutti/collectives"
	"tutti/device"
	"tutti/p2p"
	"tutti/pg/flight"
	"tutti/pg/internal/exec"
)

// A Work is an operation that Start started.
//
// When it has ended, the buffers are the program's again, with one exception: an operation on a
// stream that the stream has not come to ends a second after it has failed (because a rank was
// lost, at its deadline, by Abort or Close), and the stream passes it when it comes. Others behind
// it on the stream, which have failed by then, end with it. Until it comes the stream may read the
// source and write anything to the destination: memory of a failed operation must not be freed or
// given to another stream before work that its own stream was given later is done. The stream waits
// for no rank then.
//
// Streams of other ranks may load from a buffer in a GPU's memory, also for a while after the
// operation has failed here. Such memory may be freed all the same if it is of cuda.Device.Alloc
// and not small. Other memory of a failed operation, PyTorch's for example, must stay allocated
// until the operation has ended at all ranks: see package cuda, Other processes.
type Work struct {
	// nil: the operation has ended well, with nothing more to tell, like most. A Work of one word
	// costs the garbage collector little. It is replaced once, when the operation is over.
	at atomic.Pointer[progress]
}

// progress is where an operation is. That of one that is over is immutable; else it is accessed
// with the proxy's lock, except for over and g, which do not change.
type progress struct {
	g     *Group
	over  bool
	local bool // the result is here, whatever err says
	err   error
	s     *started      // nil: it is over, or a message
	msg   *message      // Send or Recv
	visit *visit        // of an operation on a device's memory
	done  chan struct{} // nil: Done was not called before it was over
	then  func(error)   // nil: OnEnd was not called before it was over
}

// closed is the channel of operations that were over before Done was called.
var closed = make(chan struct{})

func init() { close(closed) }

// started is a collective that Start queued or suspended, until it is over. It is reused.
type started struct {
	waiter
	w      *Work
	now    progress       // of w
	bound  *exec.Bound    // the call, if it was bound when it was started; else call
	in     unsafe.Pointer // of bound
	out    unsafe.Pointer
	call   exec.Call
	counts []int         // memory of call's counts
	limit  time.Duration // bounds the operation; 0: nothing does
	eager  bool          // the worker runs it as soon as it has the turn
	at     int64         // time of Start, by the recorder's clock
	n      uint64        // ordinal among the group's started operations
}

// Done returns a channel that is closed when the operation has ended, well or not. After a call of
// Done the operation runs as soon as it has the turn, as with Wait.
func (w *Work) Done() <-chan struct{} {
	now := w.at.Load()
	if now == nil || now.over {
		return now.channel()
	}
	g := now.g
	g.job.proxy.Lock()
	defer g.job.proxy.Unlock()
	if now = w.at.Load(); now != nil && now.s != nil {
		g.line.hurry(now.s)
		g.rouse()
	}
	return now.channel()
}

func (now *progress) channel() <-chan struct{} {
	switch {
	case now == nil || now.over && now.done == nil:
		return closed
	case now.done == nil:
		now.done = make(chan struct{})
	}
	return now.done
}

// OnEnd makes the end of the operation call f with the outcome; if the operation is over, OnEnd
// calls f itself. f is called once. OnEnd may be called once for a Work. f may run with a lock of
// the group's job held: it must return soon, and must not call anything of this package but Err,
// LocalSuccess and Status of this Work. A panic of f ends the process once OnEnd has returned.
func (w *Work) OnEnd(f func(error)) {
	now := w.at.Load()
	if now != nil && !now.over {
		p := now.g.job.proxy
		p.Lock()
		defer p.Unlock()
		now = w.at.Load()
	}
	switch {
	case now == nil:
		f(nil)
	case now.over:
		f(now.err)
	default:
		now.then = f
	}
}

// Err returns the outcome. It may be called once Done is closed.
func (w *Work) Err() error {
	if now := w.at.Load(); now != nil {
		return now.err
	}
	return nil
}

// LocalSuccess reports whether this rank has the operation's result: the operation ended well, or
// only its confirmation failed (Config.Uniform) and the result does not count. It may be called
// once Done is closed.
func (w *Work) LocalSuccess() bool {
	now := w.at.Load()
	return now == nil || now.err == nil || now.local
}

// Status returns what a RecvOp received; it may be called once Done is closed and Err is nil.
func (w *Work) Status() Status {
	if now := w.at.Load(); now != nil && now.msg != nil {
		return now.msg.status()
	}
	return Status{}
}

// Wait waits for the operation to end and returns its outcome. When ctx ends first the operation
// continues; Wait then returns ctx's error and the buffers are still in use.
func (w *Work) Wait(ctx context.Context) error {
	now := w.at.Load()
	if now == nil {
		return nil
	}
	if now.over {
		return now.err
	}
	if ctx == nil {
		return noContext("wait")
	}
	g := now.g
	p := g.job.proxy
	p.Lock()
	defer p.Unlock()
	for {
		if now = w.at.Load(); now == nil {
			return nil
		}
		if now.over {
			return now.err
		}
		if err := ctx.Err(); err != nil {
			return err
		}
		if now.msg != nil { // the group's Attend polls for it
			m, done := now.msg, now.channel()
			m.waits++
			m.rec.Flags |= flight.Waited
			p.Unlock()
			select {
			case <-done:
			case <-ctx.Done():
			}
			p.Lock()
			if m.waits--; m.waits == 0 && !w.at.Load().over { // else the record may be another's by now
				m.rec.Flags &^= flight.Waited
			}
		} else if !g.drive(ctx) {
			g.sleep(now.channel(), ctx)
		}
	}
}

// end sets the outcome; local says that the result is here. With the proxy's lock.
func (w *Work) end(local bool, err error) {
	was := w.at.Load()
	if was == nil {
		if err != nil {
			w.at.Store(&progress{over: true, local: local, err: err})
		}
		return
	}
	if was.visit != nil {
		was.visit.end()
	}
	done, then := was.done, was.then
	if err == nil && done == nil && was.msg == nil {
		w.at.Store(nil)
	} else {
		w.at.Store(&progress{g: was.g, over: true, local: local, err: err, msg: was.msg, done: done})
	}
	if done != nil {
		close(done)
	}
	if then != nil {
		tell(then, err)
	}
}

// tell calls f, OnEnd's, with the proxy's lock. A panic of f ends the process here: the lock stays
// held, and Close, if the program has deferred it, would wait for it before Go prints the panic.
func tell(f func(error), err error) {
	defer func() {
		if v := recover(); v != nil {
			why := fmt.Sprintf("in a function given to Work.OnEnd: %v\n%s", v, debug.Stack())
			go func() { panic(why) }()
			select {}
		}
	}()
	f(err)
}

// An operation of up to shortTo bytes begins in Start, or in the goroutine that ends the operation
// before it. The worker begins one of eagerFrom bytes or more as soon as it has the turn. It runs
// all others after patience, if no goroutine waits for them: a handover between goroutines takes
// longer than such an operation.
const (
	shortTo   = 4 << 10
	eagerFrom = 64 << 10
	patience  = 500 * time.Microsecond
	maxSpare  = 256
	tryEvery  = 32 // see below
	watches   = 16 // periods of patience without work after which the worker sleeps until it is woken
)

// Start begins an operation and returns without waiting for a peer. Collectives run in the order of
// their Starts. Send and Recv are independent of them and of each other, except for the order of
// messages with the same peer and tag. The buffers belong to the operation until it is done, op's
// counts are the program's again when Start has returned. An error in the arguments ends the Work
// at once. Config.Timeout bounds a collective from the beginning of its run, a message from the
// call of Start.
//
// An operation makes progress without a call of Wait. One of less than 64 KiB may then continue up
// to a millisecond late.
func (g *Group) Start(op Operation) *Work { return g.begin(op, g.job.timeout) }

// StartWithin is Start with d in place of Config.Timeout. If d is 0 or less, no time limit bounds
// the operation.
func (g *Group) StartWithin(d time.Duration, op Operation) *Work { return g.begin(op, max(d, 0)) }

// begin is Start with a time limit, 0 for none.
func (g *Group) begin(op Operation, limit time.Duration) *Work {
	switch o := op.(type) {
	case SendOp:
		return g.startMessage(o.X, o.To, o.Tag, false, limit)
	case RecvOp:
		return g.startMessage(o.X, o.From, o.Tag, true, limit)
	}
	var q request
	ask(op, &q)
	if q.Dst.Location != "" || q.Src.Location != "" {
		return g.startOnDevice(q, limit)
	}
	g.job.proxy.Lock()
	w := g.newWork()
	g.start(w, &q.Request, limit)
	g.job.proxy.Unlock()
	return w
}

// start begins, or queues, the collective that q asks for. With the proxy's lock.
func (g *Group) start(w *Work, q *exec.Request, limit time.Duration) {
	if g.closed.Load() {
		w.end(false, ErrClosed)
		return
	}
	g.works.started++
	if !g.works.worker {
		g.works.worker = true
		g.wg.Add(1)
		go g.work()
	}
	b := g.run.Recall(q) // while data of the suspended operation is under way
	if g.works.suspended.work != nil && (g.line.works%tryEvery == 0 || !g.run.Sent(g.seq+uint64(g.line.calls)-1)) {
		g.advance()
	}
	if w.at.Load() != nil {
		b = nil // its data has to arrive: only the worker runs it
	}
	if b != nil && b.Bytes() <= shortTo && g.steady(b) && g.line.take() {
		g.sprint(w, q, b, limit)
		return
	}
	s := g.newStarted(w, q, b, limit)
	if b == nil {
		c, err := g.check(q)
		if err != nil {
			w.end(false, err)
			g.free(s)
			return
		}
		s.own(c)
		s.eager = c.Bytes(g.v.Size) >= eagerFrom || s.now.visit != nil
	}
	if g.line.join(&s.waiter); !g.line.taken {
		g.advance()
		return
	}
	if g.steady(b) && g.job.settings.OnFailure == Report {
		g.run.SendAhead(b, s.out, s.in, g.seq+uint64(g.line.calls)-1)
	}
	g.rouse()
}

// newWork returns a Work of a collective. Works are allocated several at a time.
func (g *Group) newWork() *Work {
	if len(g.works.fresh) == 0 {
		g.works.fresh = make([]Work, 64)
	}
	w := &g.works.fresh[0]
	g.works.fresh = g.works.fresh[1:]
	return w
}

// newStarted returns what w has until it is over. b is the call's binding; nil: the caller sets the
// call.
func (g *Group) newStarted(w *Work, q *exec.Request, b *exec.Bound, limit time.Duration) *started {
	var s *started
	if n := len(g.works.spare); n > 0 {
		s, g.works.spare = g.works.spare[n-1], g.works.spare[:n-1]
	} else {
		s = &started{}
		s.work, s.now.g, s.now.s = s, g, s
	}
	// Nothing else of it changes: another goroutine may still look whether it is over.
	s.now.done, s.now.then, s.now.visit = nil, nil, nil
	if was := w.at.Load(); was != nil {
		s.now.visit = was.visit
	}
	w.at.Store(&s.now)
	s.w, s.at, s.n, s.limit = w, flight.Now(), g.works.started, limit
	if s.bound = b; b != nil {
		s.in, s.out, s.eager = q.Src.Ptr, q.Dst.Ptr, b.Bytes() >= eagerFrom
	}
	return s
}

// own sets the call, with counts that the program cannot change: they say where the call writes.
func (s *started) own(c exec.Call) {
	s.call = c
	if n := len(c.Counts); n > 0 {
		s.counts = append(append(s.counts[:0], c.Counts...), c.RecvCounts...)
		s.call.Counts, s.call.RecvCounts = s.counts[:n:n], s.counts[n:]
	}
}

// free undoes newStarted, after the end of s's Work.
func (g *Group) free(s *started) {
	s.call.Forget()
	s.w, s.bound, s.in, s.out = nil, nil, nil, nil
	if len(g.works.spare) < maxSpare {
		g.works.spare = append(g.works.spare, s)
	}
}

// sprint runs a short bound call, which has the turn, until it has to wait for a peer, and parks it
// there.
func (g *Group) sprint(w *Work, q *exec.Request, b *exec.Bound, limit time.Duration) {
	g.begun(g.ctx, limit, false)
	g.run.Use(b, q.Dst.Ptr, q.Src.Ptr)
	here := false
	err := g.launch()
	if err == nil {
		g.wait.Try()
		if err = g.run.Run(g.seq, g.hint); err != nil {
			g.line.works++
			g.works.suspended = suspended{g.newStarted(w, q, b, limit), err}
			g.rouse()
			return
		}
		if here, err = g.concluded(nil); err == nil && g.line.first == nil {
			g.rest()
			g.line.taken = false
			g.line.calls--
			return
		}
	}
	g.finish(w, here, err)
	g.advance()
}

// A short operation whose call is bound runs as soon as it has the turn, in the goroutine that
// passed the turn on. It sends what it can, so that no peer waits for this rank's data, and is
// suspended where it has to wait. A goroutine that waits for it, or for a turn behind it, resumes
// it, and parks it again when its own ctx ends. Every Start tries it once more, until the data of
// all operations behind it has been sent: then only the arrival of the peers' data is missing, and
// one Start in tryEvery looks for that. A rank that looks too early takes a cache line from the
// peer that is about to write it. An operation that cannot be suspended runs in a waiting goroutine
// only if that goroutine's ctx cannot end, and otherwise in the worker.
//
// What such an operation sends may leave before it has the turn: when all operations before it have
// sent theirs, and it reads nothing that they write. That is done with OnFailure Report only. With
// Retry or Shrink, a rank that fails would leave others with more results that it has not got.

// works is a group's state of started operations.
type works struct {
	suspended suspended
	worker    bool          // the worker's goroutine exists
	watched   bool          // the worker wakes by itself and looks for idle operations
	started   uint64        // number of operations started
	spare     []*started    // for reuse
	fresh     []Work        // allocated, not yet used
	kick      chan struct{} // wakes the worker
}

// suspended is an operation that has the turn and that no goroutine runs. err is p2p.ErrSuspended,
// or why its plan failed.
type suspended struct {
	work *started
	err  error
}

// idle returns the operation that has the turn, or is next, if no goroutine runs it.
func (g *Group) idle() *started {
	if g.works.suspended.work != nil {
		return g.works.suspended.work
	}
	return g.line.next()
}

// steady reports whether a call that is bound to b needs nothing but the steps of its plan.
func (g *Group) steady(b *exec.Bound) bool {
	return b != nil && b.Steady() && g.run.Current(b) && !g.rough && !g.job.settings.Uniform
}

// advance runs short operations in their order until one has to wait for a peer. With the proxy's
// lock, as the functions below.
func (g *Group) advance() {
	for {
		at := g.works.suspended
		w := at.work
		if w == nil {
			if w = g.line.next(); w == nil || !g.steady(w.bound) {
				break
			}
		} else if at.err != p2p.ErrSuspended {
			break
		}
		if w.bound.Bytes() > shortTo {
			break
		}
		if g.attempt(w, g.wait.Try); g.works.suspended.work != nil {
			break
		}
	}
	g.rouse()
}

// drive runs the idle operation in a goroutine that waits, at most until ctx ends, and reports
// whether there was one that it could run.
func (g *Group) drive(ctx context.Context) bool {
	w := g.idle()
	switch {
	case w == nil:
		return false
	case ctx.Done() == nil:
		g.perform(w, false)
	case w != g.works.suspended.work && g.steady(w.bound) || w == g.works.suspended.work &&
		g.works.suspended.err == p2p.ErrSuspended:
		if g.attempt(w, func() { g.wait.Attend(ctx) }); g.works.suspended.work != nil {
			g.kickWorker()
			return true
		}
	default:
		return false
	}
	g.advance()
	return true
}

// attempt begins or resumes an operation. patient sets how long it waits for peers before it is
// suspended.
func (g *Group) attempt(w *started, patient func()) {
	begun := g.works.suspended.work == w
	if g.works.suspended = (suspended{}); !begun {
		g.line.takeNext()
		g.begun(g.ctx, w.limit, false)
		g.load(w)
		if err := g.launch(); err != nil {
			g.finish(w.w, false, err)
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
		g.works.suspended = suspended{w, err}
		return
	}
	here, err := g.concluded(nil)
	g.finish(w.w, here, err)
}

// perform runs an operation to its end.
func (g *Group) perform(w *started, lazy bool) {
	var here bool
	var err error
	if at := g.works.suspended; at.work == w {
		g.works.suspended = suspended{}
		g.wait.Stay(lazy)
		if err = at.err; err == p2p.ErrSuspended {
			err = g.run.Resume()
		}
		here, err = g.concluded(err)
		g.finish(w.w, here, err)
		return
	}
	g.line.takeNext()
	g.begun(g.ctx, w.limit, lazy)
	if g.load(w); g.rough {
		err = g.ready()
	}
	if v := w.now.visit; err == nil {
		here, err = g.across(v)
	} else if v != nil {
		v.end()
		p := g.job.proxy
		p.Leave()
		g.settle(v)
		p.Return()
	}
	g.finish(w.w, here, err)
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

// finish ends an operation that has run, and passes the turn on; here says that this rank has the
// result. The caller calls advance or rouse afterwards.
func (g *Group) finish(w *Work, here bool, err error) {
	if err != nil && g.closed.Load() {
		err = ErrClosed
	}
	g.track.Queued(0)
	g.rest()
	s := (*started)(nil)
	if now := w.at.Load(); now != nil {
		s = now.s
		g.line.works--
	}
	g.line.pass()
	g.lapse()
	w.end(here, err) // before a later operation can run, so that outcomes are set in order
	if s != nil {
		g.free(s)
	}
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

// urgent reports whether the worker has to run the idle operation now: it is eager, it has failed,
// or a goroutine sleeps, or is about to, until it or a later one is over.
func (g *Group) urgent() bool {
	w, l := g.idle(), &g.line
	failed := g.works.suspended.work != nil && g.works.suspended.err != p2p.ErrSuspended
	return w != nil && (w.eager || l.eager > 0 || l.asleep > 0 || failed)
}

// rouse wakes the worker if the idle operation is urgent, or if the worker does not wake by itself.
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

// work is the group's worker. Until Close it runs the started operations that no other goroutine
// runs.
func (g *Group) work() {
	defer g.wg.Done()
	p, l := g.job.proxy, &g.line
	timer := time.NewTimer(time.Hour)
	timer.Stop()
	p.Lock()
	defer p.Unlock()
	var seen, started uint64 // at the worker's last look: the idle operation, and the number started
	for idle := 0; ; {
		closed := g.closed.Load()
		next := g.idle()
		switch {
		case next != nil && (next.n == seen || closed) || g.urgent():
			g.perform(next, true)
			g.advance()
			if next = g.idle(); next != nil { // has waited as long
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

// Do runs any operation on any buffers, and returns when the operation or ctx has ended. It does
// not return the Status of a RecvOp: see DoRecv.
func (g *Group) Do(ctx context.Context, op Operation) error {
	switch o := op.(type) {
	case SendOp:
		_, err := g.pointToPoint(ctx, o.X, o.To, o.Tag, false)
		return err
	case RecvOp:
		_, err := g.pointToPoint(ctx, o.X, o.From, o.Tag, true)
		return err
	}
	var q request
	ask(op, &q)
	if q.Dst.Location != "" || q.Src.Location != "" {
		return g.doOnDevice(ctx, q)
	}
	return g.blocking(ctx, &q.Request)
}

// DoRecv is Do for a RecvOp, and returns its Status.
func (g *Group) DoRecv(ctx context.Context, op RecvOp) (Status, error) {
	return g.pointToPoint(ctx, op.X, op.From, op.Tag, true)
}

// request is what an operation asks for, and the streams of its buffers.
type request struct {
	exec.Request
	dst, src device.Stream
}

// ask fills q with what op, which is not a message, asks for.
func ask(op Operation, q *request) {
	switch o := op.(type) {
	case AllReduceOp:
		q.Kind, q.Op = collectives.AllReduce, o.Op
		set(&q.Dst, &q.dst, &o.Dst)
		if set(&q.Src, &q.src, &o.Src); o.Src.Ptr == nil && o.Src == (Buffer{}) {
			q.Src, q.src = q.Dst, q.dst
		}
	case ReduceScatterOp:
		q.Kind, q.Op = collectives.ReduceScatter, o.Op
		set(&q.Dst, &q.dst, &o.Dst)
		set(&q.Src, &q.src, &o.Src)
	case AllGatherOp:
		q.Kind = collectives.AllGather
		set(&q.Dst, &q.dst, &o.Dst)
		set(&q.Src, &q.src, &o.Src)
	case AllGatherVOp:
		q.Kind, q.Counts = collectives.AllGatherV, o.Counts
		set(&q.Dst, &q.dst, &o.Dst)
		set(&q.Src, &q.src, &o.Src)
	case AllToAllOp:
		q.Kind = collectives.AllToAll
		set(&q.Dst, &q.dst, &o.Dst)
		set(&q.Src, &q.src, &o.Src)
	case AllToAllVOp:
		q.Kind, q.Counts, q.RecvCounts = collectives.AllToAllV, o.SendCounts, o.RecvCounts
		set(&q.Dst, &q.dst, &o.Dst)
		set(&q.Src, &q.src, &o.Src)
	case BroadcastOp:
		q.Kind, q.Root = collectives.Broadcast, o.Root
		set(&q.Dst, &q.dst, &o.X)
		set(&q.Src, &q.src, &o.X)
	case ReduceOp:
		q.Kind, q.Op, q.Root = collectives.Reduce, o.Op, o.Root
		set(&q.Dst, &q.dst, &o.X)
		set(&q.Src, &q.src, &o.X)
	case GatherOp:
		q.Kind, q.Root = collectives.Gather, o.Root
		set(&q.Dst, &q.dst, &o.Dst)
		set(&q.Src, &q.src, &o.Src)
	case ScatterOp:
		q.Kind, q.Root = collectives.Scatter, o.Root
		set(&q.Dst, &q.dst, &o.Dst)
		set(&q.Src, &q.src, &o.Src)
	case BarrierOp:
		q.Kind = collectives.Barrier
	}
}

// set copies a buffer field by field: a processor that has just stored the words of a small struct
// one by one, or at another alignment, waits before it can load them by two.
func set(to *exec.Buffer, stream *device.Stream, from *Buffer) {
	to.Ptr, to.Count, to.DType, to.Location = from.Ptr, from.Count, from.DType, from.Location
	if from.Location != "" {
		*stream = from.Stream
	}
}
