package pg

import (
	"context"
	"sync"
	"sync/atomic"
	"time"
)

// A line is the order in which a group's calls run: one at a time, in the order in which they came.
// Whoever is first has the turn.
type line struct {
	n     atomic.Int32 // the call that has the turn, and those behind it
	mu    sync.Mutex   // taken after the proxy's lock, if with it
	queue []chan struct{}
}

// enter takes the turn if no call has it.
func (l *line) enter() bool { return l.n.CompareAndSwap(0, 1) }

// joinLocked takes a place in the line; what it returns is closed when that is the first one. With
// l.mu.
func (l *line) joinLocked() <-chan struct{} {
	turn := make(chan struct{})
	if l.n.Add(1) == 1 {
		close(turn)
	} else {
		l.queue = append(l.queue, turn)
	}
	return turn
}

// leave passes the turn on.
func (l *line) leave() {
	if l.n.CompareAndSwap(1, 0) {
		return
	}
	l.mu.Lock()
	next := l.queue[0]
	l.queue[0] = nil
	l.queue = l.queue[1:]
	l.n.Add(-1)
	l.mu.Unlock()
	close(next)
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
	if g.line.enter() {
		g.begun(ctx, time.Time{}, false)
		return nil
	}
	l := &g.line
	l.mu.Lock()
	turn := l.joinLocked()
	l.mu.Unlock()
	return g.queued(ctx, turn, what, stead)
}

// queued is enter for a call that has a place in the line already.
func (g *Group) queued(ctx context.Context, turn <-chan struct{}, what string, stead func()) error {
	began := time.Now()
	var late <-chan time.Time
	if g.job.timeout > 0 {
		t := time.NewTimer(g.job.timeout)
		defer t.Stop()
		late = t.C
	}
	err := context.DeadlineExceeded
	select {
	case <-turn:
		g.begun(ctx, began, false)
		return nil
	case <-ctx.Done():
		err = ctx.Err()
	case <-late:
	}
	l := &g.line
	l.mu.Lock()
	if g.closed.Load() { // whoever is before this call is about to fail
		l.mu.Unlock()
		<-turn
		l.leave()
		return ErrClosed
	}
	g.wg.Add(1)
	l.mu.Unlock()
	e := g.impatient(what, time.Since(began), err)
	go func() {
		defer g.wg.Done()
		<-turn
		if stead == nil {
			l.leave()
			return
		}
		ended, cancel := context.WithDeadline(ctx, began)
		defer cancel()
		g.begun(ended, began, true)
		stead()
		g.leave()
	}()
	return e
}

// begun takes the proxy's lock for the call that has the turn and starts its clock: at began, or if
// that is zero when the call first waits.
func (g *Group) begun(ctx context.Context, began time.Time, lazy bool) {
	g.job.proxy.Lock()
	g.busy = true
	g.wait.Reset(ctx, g.job.timeout, lazy)
	if !began.IsZero() {
		g.wait.Since(began)
	}
}

// leave is enter's counterpart.
func (g *Group) leave() {
	g.rest()
	g.line.leave()
}

// rest ends what begun began.
func (g *Group) rest() {
	if g.shown.epoch != g.epoch {
		g.shown = shown{g.epoch, g.size, g.active}
	}
	if g.busy = false; g.rough {
		g.answer()
	}
	g.job.proxy.Unlock()
}

// expired stands in for a collective whose caller gave up before its turn: the operation fails here
// as one whose time is up when it begins, and so at all ranks. c has the call without its memory.
func (g *Group) expired(c call) {
	err := g.ready()
	if err == nil {
		g.run.hot = hot{}
		g.cur = c
		err = g.collective()
	}
	g.job.log.Debug("an operation was given up before its turn", "call", c.describe(), "err", err)
}

// impatient is the error of a call that gave up before its turn: it waited for those whom the
// running operation waits for.
func (g *Group) impatient(what string, after time.Duration, why error) *TimeoutError {
	e := &TimeoutError{Call: what, After: after, Reporter: g.rank, Err: why}
	p := g.job.proxy
	p.Lock()
	defer p.Unlock()
	if !g.busy {
		return e
	}
	e.Call += ", which waited for its turn behind " + spell(g.run.tok)
	for _, m := range g.run.missing() {
		e.Missing = append(e.Missing, m.seen())
	}
	return e
}
