package pg

import (
	"context"
	"time"

	"tutti/pg/internal/exec"
)

// A line is the order in which a group's calls run: one at a time, in the order of the calls. A
// blocking call runs in its caller's goroutine. A started operation runs in Start, in a goroutine
// that waits for it or for a turn behind it, or in the group's worker: see work.go. All fields are
// under the proxy's lock.
type line struct {
	taken       bool    // a goroutine has the turn
	calls       int     // that have the turn or wait for it
	works       int     // started operations that are not over
	eager       int     // eager ones that wait for the turn
	asleep      int     // goroutines that sleep until operations of the line have run
	first, last *waiter // that wait for the turn; the first is a started one unless the turn is taken
}

// A waiter is a call that waits for its turn.
type waiter struct {
	work   *started      // nil: a blocking call
	turn   chan struct{} // of a blocking call: closed when it gets the turn
	lapsed *lapsed       // of a blocking call that gave up and has returned
	queued bool          // in the line
	next   *waiter
}

// A lapsed call gave up before its turn.
type lapsed struct {
	ctx   context.Context // of the call
	began time.Time
	stead func() // runs when its turn has come; nil: nothing does
}

// take takes the turn if no call has it or waits for it.
func (l *line) take() bool {
	if l.taken || l.first != nil {
		return false
	}
	l.taken = true
	l.calls++
	return true
}

// join puts p at the end of the line.
func (l *line) join(p *waiter) {
	l.calls++
	if l.last == nil {
		l.first = p
	} else {
		l.last.next = p
	}
	l.last, p.queued = p, true
	if p.work != nil {
		l.works++
		if p.work.eager {
			l.eager++
		}
	}
	l.serve()
}

// hurry makes w eager.
func (l *line) hurry(w *started) {
	if !w.eager {
		w.eager = true
		if w.queued {
			l.eager++
		}
	}
}

// next returns the started operation that is first, if the turn is free.
func (l *line) next() *started {
	if l.taken || l.first == nil {
		return nil
	}
	return l.first.work
}

// takeLapsed takes the turn for the first call, if that has lapsed and no call has the turn.
func (l *line) takeLapsed() *lapsed {
	if l.taken || l.first == nil || l.first.lapsed == nil {
		return nil
	}
	c := l.first.lapsed
	l.pop()
	l.taken = true
	return c
}

// takeNext takes the turn for the operation that next has returned.
func (l *line) takeNext() {
	w := l.first.work
	l.pop()
	l.taken = true
	if w.eager {
		l.eager--
	}
}

func (l *line) pop() {
	p := l.first
	if l.first = p.next; l.first == nil {
		l.last = nil
	}
	p.next, p.queued = nil, false
}

// pass gives up the turn. Lapsed calls that are first afterwards have to be taken: see lapse.
func (l *line) pass() {
	l.calls--
	l.taken = false
	l.serve()
}

// serve gives the turn to a blocking call that is first.
func (l *line) serve() {
	if p := l.first; p != nil && p.work == nil && p.lapsed == nil && !l.taken {
		l.pop()
		l.taken = true
		close(p.turn)
	}
}

// enter begins a call: it takes the proxy's lock, waits for the turn, and starts the call's clock,
// which counts from the call of enter. A call that waits for peers gives up the lock meanwhile, but
// not the turn.
//
// ctx and Config.Timeout bound the wait for the turn as well. A call that gives up there has
// touched nothing, and enter returns a *TimeoutError. Its place in the line remains, because the
// other ranks count an operation there: when the place is first, stead runs with a clock that has
// run out (see expired and lapse). A nil stead is for a call without a number that others count.
func (g *Group) enter(ctx context.Context, what string, stead func()) error {
	if ctx == nil {
		return noContext(what)
	}
	g.job.proxy.Lock()
	if g.line.take() {
		g.begun(ctx, g.job.timeout, false)
		return nil
	}
	return g.queued(ctx, what, stead)
}

// limited returns ctx with a time limit, unless that is 0 or less.
func limited(ctx context.Context, limit time.Duration) (context.Context, context.CancelFunc) {
	if limit <= 0 {
		return ctx, func() {}
	}
	return context.WithTimeout(ctx, limit)
}

// queued is enter for a call that is not first. It is called with the proxy's lock, and unlocks it
// if it fails. While it waits it runs the started operations before it.
func (g *Group) queued(ctx context.Context, what string, stead func()) error {
	p, began := g.job.proxy, time.Now()
	mine := &waiter{turn: make(chan struct{})}
	g.line.join(mine)
	within, cancel := limited(ctx, g.job.timeout)
	defer cancel()
	for {
		select {
		case <-mine.turn:
			g.begun(ctx, g.job.timeout, false)
			g.wait.Since(began)
			return nil
		default:
		}
		if within.Err() != nil {
			break
		}
		if !g.drive(within) {
			g.sleep(mine.turn, within)
		}
	}
	if g.closed.Load() { // the calls before this one are about to fail
		p.Unlock()
		<-mine.turn
		p.Lock()
		g.pass()
		p.Unlock()
		return ErrClosed
	}
	err := ctx.Err()
	if err == nil {
		err = context.DeadlineExceeded
	}
	mine.lapsed = &lapsed{ctx, began, stead}
	e := g.impatient(what, time.Since(began), err)
	p.Unlock()
	return e
}

// lapse ends the calls at the head of the line that have lapsed. It has to run when the turn is
// passed on, before the program can learn that the operation before has ended: the program may
// close the group then, and the other ranks have to know by then why the operation fails.
func (g *Group) lapse() {
	for c := g.line.takeLapsed(); c != nil; c = g.line.takeLapsed() {
		if c.stead != nil {
			ctx, cancel := context.WithDeadline(c.ctx, c.began)
			g.begun(ctx, g.job.timeout, true)
			g.wait.Since(c.began)
			c.stead()
			g.rest()
			cancel()
		}
		g.line.pass()
	}
}

// begun prepares the call that has the turn, which ctx and limit (0: none) bound. Its clock starts
// when it first waits. With the proxy's lock.
func (g *Group) begun(ctx context.Context, limit time.Duration, lazy bool) {
	g.busy = true
	g.wait.Reset(ctx, limit, lazy)
}

// leave undoes enter.
func (g *Group) leave() {
	g.rest()
	if l := &g.line; l.first == nil {
		l.taken = false
		l.calls--
	} else {
		g.pass()
		g.advance()
	}
	g.job.proxy.Unlock()
}

// rest undoes begun.
func (g *Group) rest() {
	g.coll.Retract()
	if g.shown.Load() != g.v && !g.sync.Pending() {
		g.shown.Store(g.v)
	}
	if g.busy = false; g.rough {
		g.answer()
		g.part()
	}
}

// pass gives the turn to the next call.
func (g *Group) pass() {
	g.line.pass()
	g.lapse()
	g.rouse()
}

// expired runs in place of a collective whose caller gave up before its turn. The operation fails
// here as one whose time is up when it begins, and therefore at all ranks. c is the call without
// its memory, and ready Group.ready or what the call does instead.
func (g *Group) expired(c exec.Call, ready func() error) {
	g.run.Adopt(c)
	err := ready()
	if err == nil {
		_, err = g.collective()
	}
	g.job.log.Debug("an operation was given up before its turn", "call", c.Describe(), "err", err)
}

// impatient returns the error of a call that gave up before its turn. Its Missing are the ranks
// that the running operation waits for. With the proxy's lock.
func (g *Group) impatient(what string, after time.Duration, why error) *TimeoutError {
	e := &TimeoutError{Call: what, After: after, Reporter: g.rank, in: g.in, Err: why}
	if !g.busy {
		return e
	}
	if g.between {
		e.Call += ", which waited for its turn behind agree"
		for _, slot := range g.unvoted {
			e.Missing = append(e.Missing, Seen{Rank: slot, What: "nothing yet"})
		}
		return e
	}
	e.Call += ", which waited for its turn behind " + exec.Spell(g.run.Token())
	for _, m := range g.run.Missing(g.unheard()) {
		e.Missing = append(e.Missing, seen(m))
	}
	return e
}
