package pg

import (
	"context"
	"time"

	"tutti/pg/internal/exec"
)

// A line is the order in which a group's calls run: one at a time, in the order in which they came.
// A blocking call runs in its caller's goroutine. What Start started runs in a goroutine that waits
// for it, or for its own turn behind it, or in the group's worker: see work.go. All of it is under
// the proxy's lock.
type line struct {
	taken       bool    // a goroutine has the turn
	calls       int     // the one that has the turn, and those that wait
	works       int     // of those that wait, what was started
	eager       int     // of those, what is not to wait for anybody
	asleep      int     // goroutines that sleep until works in the line have run
	first, last *waiter // of those that wait; the first was started unless the turn is taken
}

// A waiter is a call that waits for its turn.
type waiter struct {
	work   *started      // what was started; nil: a blocking call
	turn   chan struct{} // of a blocking call: closed when it has the turn
	queued bool          // it is in the line
	next   *waiter
}

// take takes the turn if nobody is before the caller.
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

// hurry makes w eager, which may wait in the line.
func (l *line) hurry(w *started) {
	if !w.eager {
		w.eager = true
		if w.queued {
			l.eager++
		}
	}
}

// next returns what was started whose turn it is, if nobody has taken it.
func (l *line) next() *started {
	if l.taken || l.first == nil {
		return nil
	}
	return l.first.work
}

// takeNext takes the turn of what next has returned.
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

// pass gives the turn up.
func (l *line) pass() {
	l.calls--
	l.taken = false
	l.serve()
}

// serve gives the turn to a blocking call that is first.
func (l *line) serve() {
	if p := l.first; p != nil && p.work == nil && !l.taken {
		l.pop()
		l.taken = true
		close(p.turn)
	}
}

// enter is how a call begins: it waits for its turn, takes the proxy's lock, and starts the call's
// clock, which began when it took its place. Whoever waits for peers gives the lock up meanwhile,
// but not the turn.
//
// ctx and Config.Timeout bound the wait for the turn too. A call that gives up there has touched
// nothing; enter returns a *TimeoutError. Its place in the line stays where it is, for the other
// ranks count with an operation there: when the place is first, stead runs with a clock that has
// run out (see expired). A nil stead: the call has no number that others count.
func (g *Group) enter(ctx context.Context, what string, stead func()) error {
	g.job.proxy.Lock()
	if g.line.take() {
		g.begun(ctx, false)
		return nil
	}
	return g.queued(ctx, what, stead)
}

// queued is enter for a call that is not first. It has the proxy's lock, and gives it up if it
// fails. Meanwhile it runs what was started before it.
func (g *Group) queued(ctx context.Context, what string, stead func()) error {
	p, began := g.job.proxy, time.Now()
	mine := &waiter{turn: make(chan struct{})}
	g.line.join(mine)
	within, cancel := ctx, context.CancelFunc(func() {})
	if g.job.timeout > 0 {
		within, cancel = context.WithTimeout(ctx, g.job.timeout)
	}
	defer cancel()
	for {
		select {
		case <-mine.turn:
			g.begun(ctx, false)
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
	if g.closed.Load() { // whoever is before this call is about to fail
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
	e := g.impatient(what, time.Since(began), err)
	g.wg.Add(1)
	p.Unlock()
	go func() {
		defer g.wg.Done()
		<-mine.turn
		p.Lock()
		if stead == nil {
			g.pass()
			p.Unlock()
			return
		}
		ended, cancel := context.WithDeadline(ctx, began)
		defer cancel()
		g.begun(ended, true)
		g.wait.Since(began)
		stead()
		g.leave()
	}()
	return e
}

// begun starts the clock of the call that has the turn, which goes when it first waits. With the
// proxy's lock.
func (g *Group) begun(ctx context.Context, lazy bool) {
	g.busy = true
	g.wait.Reset(ctx, g.job.timeout, lazy)
}

// leave is enter's counterpart.
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

// rest ends what begun began.
func (g *Group) rest() {
	if g.shown.Load() != g.v && !g.sync.Pending() {
		g.shown.Store(g.v)
	}
	if g.busy = false; g.rough {
		g.answer()
	}
}

// pass gives the turn to whoever is next.
func (g *Group) pass() {
	g.line.pass()
	g.rouse()
}

// expired stands in for a collective whose caller gave up before its turn: the operation fails here
// as one whose time is up when it begins, and so at all ranks. c has the call without its memory.
func (g *Group) expired(c exec.Call) {
	err := g.ready()
	if err == nil {
		g.run.Adopt(c)
		_, err = g.collective()
	}
	g.job.log.Debug("an operation was given up before its turn", "call", c.Describe(), "err", err)
}

// impatient is the error of a call that gave up before its turn: it waited for those whom the
// running operation waits for. With the proxy's lock.
func (g *Group) impatient(what string, after time.Duration, why error) *TimeoutError {
	e := &TimeoutError{Call: what, After: after, Reporter: g.rank, Err: why}
	if !g.busy {
		return e
	}
	e.Call += ", which waited for its turn behind " + exec.Spell(g.run.Token())
	for _, m := range g.run.Missing(g.unheard()) {
		e.Missing = append(e.Missing, seen(m))
	}
	return e
}
