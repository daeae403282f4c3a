package p2p

import (
	"context"
	"errors"
	"runtime"
	"time"

	"tutti/internal/yield"
)

// ErrTimeout says that a Wait's deadline has passed.
var ErrTimeout = errors.New("deadline passed")

// ErrSuspended says that a Wait was interrupted without an error: see Attend.
var ErrSuspended = errors.New("operation suspended")

// Durations and numbers of polls of a waiter before it yields, and then sleeps.
const (
	// Pure polling, when every local rank has a core; short, because the peer may be waiting for
	// this core.
	hotFor    = 10 * time.Microsecond
	yieldFor  = 500 * time.Microsecond // polling between yields
	longEvery = 5 * time.Millisecond
	longFirst = 250 * time.Millisecond
	longAgain = time.Second
	// Yields at least. With many processes that yield to each other yieldFor has passed after few,
	// and waking a process takes several times as long as yielding to it.
	yieldLeast = 64
	checks     = 64  // polls between readings of the clock
	rushPolls  = 200 // polls before any other check
	coldPolls  = 4   // the same, if each poll is followed by a yield
	hotPolls   = 16  // polls of the awaited link between rounds over all
)

// Wait holds the bounds of one goroutine's waiting, and its state. One goroutine uses it at a time;
// it is reusable.
type Wait struct {
	ctx     context.Context
	timeout time.Duration   // 0: none
	guest   context.Context // see Attend
	try     bool
	lazy    bool
	idle    bool      // its sleeps send no heartbeats
	linking bool      // the awaited peer has no link yet
	until   time.Time // when to wake at the latest; zero: not set
	sole    *peer     // the awaited peer, if no call says which
	calls   uint32    // Proxy.calls at the last sleep
	spins   int       // polls without progress
	busy    int       // progress since Reset
	long    func()    // see OnLong
	lasts   bool      // see Long
	late    bool      // see Late
	next    time.Time // next call of long; zero: none is set
	half    time.Time // when half of the time has passed; zero: never
	began   time.Time // first reading of the clock
	from    time.Time // first reading of the clock since there was progress
	wake    chan struct{}
	timer   *time.Timer
	blame   blame
}

// Reset prepares w for an operation bounded by ctx and timeout (0: none), which counts from its
// first wait. lazy says that no operation depends on its latency: it yields at once.
func (w *Wait) Reset(ctx context.Context, timeout time.Duration, lazy bool) {
	if w.wake == nil {
		w.wake = make(chan struct{}, 1)
		w.timer = time.NewTimer(time.Hour)
		w.timer.Stop()
	}
	w.ctx, w.guest, w.try, w.timeout, w.lazy = ctx, nil, false, timeout, lazy
	w.spins, w.busy, w.began, w.from = 0, 0, time.Time{}, time.Time{}
}

// Attend lets the caller run w's operation on behalf of another goroutine. When guest ends,
// WaitRecv and Send of a Channel return ErrSuspended. The operation has not failed, and a later
// call with the same arguments continues it.
func (w *Wait) Attend(guest context.Context) { w.guest, w.try, w.lazy = guest, false, false }

// Stay makes the caller run w's operation to its end: see Reset for lazy.
func (w *Wait) Stay(lazy bool) { w.guest, w.try, w.lazy = nil, false, lazy }

// Try makes WaitRecv and Send return ErrSuspended, as with Attend, as soon as they would have to
// wait.
func (w *Wait) Try() { w.guest, w.try, w.lazy = nil, true, false }

// Since makes the time of w's operation count from t, before its first wait.
func (w *Wait) Since(t time.Time) { w.begin(t) }

func (w *Wait) begin(now time.Time) {
	w.began, w.next, w.half, w.lasts, w.late = now, time.Time{}, time.Time{}, false, false
	if w.long == nil {
		return
	}
	w.next = now.Add(longFirst)
	left := w.timeout
	if d, ok := w.ctx.Deadline(); ok && (left <= 0 || d.Sub(now) < left) {
		left = d.Sub(now)
	}
	if left > 0 {
		if w.half = now.Add(left / 2); w.half.Before(w.next) {
			w.next = w.half
		}
	}
}

// Err returns why w's operation must not wait any longer, or nil if no reason is known yet.
func (w *Wait) Err() error {
	if err := w.ctx.Err(); err != nil {
		return err
	}
	if w.timeout > 0 && !w.began.IsZero() && time.Since(w.began) > w.timeout {
		return ErrTimeout
	}
	return nil
}

// Tell calls OnLong's function if that is due, and returns why w has ended, or nil. It is for an
// operation that waits for something else than frames, and does not wait itself. With the lock.
func (w *Wait) Tell() error { return w.over(time.Now()) }

// Restart gives w's operation its whole time again.
func (w *Wait) Restart() { w.began, w.from = time.Time{}, time.Time{} }

// OnLong sets a function that is called, with the proxy's lock, when an operation has waited for a
// quarter of a second, or for half of its timeout, if that is less. It is called again every
// second, and every few milliseconds at most after half of the timeout. It stays set.
func (w *Wait) OnLong(f func()) { w.long = f }

// Long reports whether OnLong's function has been called for w's operation. It does not read the
// clock.
func (w *Wait) Long() bool { return w.lasts && !w.began.IsZero() }

// Late reports whether OnLong's function has been called after half of the operation's timeout. It
// does not read the clock.
func (w *Wait) Late() bool { return w.late && !w.began.IsZero() }

// Waited returns how long w's operation has been waiting.
func (w *Wait) Waited() time.Duration {
	if w.began.IsZero() {
		return 0
	}
	return time.Since(w.began)
}

// calm records progress: the next wait starts with hot polling again.
func (w *Wait) calm() { w.spins = 0 }

// wakeAll wakes all waiters of this proxy. From any goroutine.
func (p *Proxy) wakeAll() {
	if p.asleep.Load() == 0 {
		return
	}
	p.sleepMu.Lock()
	for _, w := range p.sleepers {
		select {
		case w.wake <- struct{}{}:
		default:
		}
	}
	p.sleepMu.Unlock()
}

// progress polls once, prefer's link first (nil: no particular one), and yields according to how
// long w has waited in vain. Called with the lock, which it may release for a while. It returns nil
// whenever the caller should check its condition again, or why w has ended.
func (p *Proxy) progress(w *Wait, prefer *peer) error {
	if w.try {
		return p.glance(w, prefer)
	}
	if w.blame.on = prefer; prefer == nil {
		w.blame.on = w.sole
	} else {
		if w.linking = prefer.link == nil; w.linking {
			p.connect(prefer)
		} else if p.poll(prefer) {
			return p.advanced(w)
		}
		if w.spins%hotPolls != 0 && (p.hot(w) || w.spins%coldPolls != 0) {
			return p.giveWay(w)
		}
	}
	any := false
	for i := 0; i < len(p.links); i++ {
		if pr := p.links[i]; pr != prefer && p.poll(pr) {
			any = true
		}
	}
	// What arrived may let more be sent, or end what w waits for, so w must not sleep yet.
	if any && (prefer == nil || !p.hot(w)) {
		return p.again(w)
	}
	return p.giveWay(w) // the progress may be of another operation: the clock continues
}

// glance is progress for a Wait that must not wait: it polls prefer's link once.
func (p *Proxy) glance(w *Wait, prefer *peer) error {
	if prefer == nil || !p.poll(prefer) {
		return ErrSuspended
	}
	p.Moved(0)
	if w.busy++; w.busy%checks == 0 { // the progress may be of another operation
		return ErrSuspended
	}
	return nil
}

// advanced is giveWay after progress, possibly of another operation: w is still bounded.
func (p *Proxy) advanced(w *Wait) error {
	w.spins = 0
	return p.again(w)
}

// again is giveWay for a Wait that has to poll once more before it may sleep.
func (p *Proxy) again(w *Wait) error {
	p.Moved(0)
	if w.busy++; w.busy%checks != 0 {
		return nil
	}
	if p.wanted.Load() > 0 {
		p.mu.Unlock()
		runtime.Gosched()
		p.regain()
	}
	return w.over(time.Now())
}

// Moved counts n bytes that the caller has moved with the lock. From time to time it offers the
// lock to a goroutine that waits for it, and reports that it did. With the lock.
func (p *Proxy) Moved(n int) bool {
	if p.moved += n; p.moved < p.cfg.Turn {
		return false
	}
	p.moved = 0
	return p.yield()
}

// rush polls one link a few times without a pause, and reports whether anything arrived.
func (p *Proxy) rush(w *Wait, pr *peer) bool {
	if w.try || w.spins != 0 || pr.link == nil || !p.hot(w) || p.wanted.Load() > 0 {
		return false
	}
	for range rushPolls {
		if p.poll(pr) {
			return true
		}
	}
	return false
}

// hot reports whether w may poll without yielding its core.
func (p *Proxy) hot(w *Wait) bool { return !w.lazy && !p.oversubscribed.Load() }

func (p *Proxy) giveWay(w *Wait) error {
	if p.closed {
		return ErrClosed
	}
	w.spins++
	hot := p.hot(w)
	if hot && w.spins%checks != 0 {
		if p.wanted.Load() > 0 {
			p.mu.Unlock()
			runtime.Gosched()
			p.regain()
		} else {
			pause()
		}
		return nil
	}
	now := time.Now()
	w.blame.look(now, w.spins <= 1 || hot && w.spins <= checks)
	if err := w.over(now); err != nil {
		if err != ErrSuspended {
			p.Look()
		}
		return err
	}
	if w.spins <= checks || w.from.IsZero() {
		w.from = now
	}
	waited := now.Sub(w.from)
	switch {
	case hot && waited < hotFor:
		return nil
	case (waited < yieldFor || w.spins < yieldLeast) && !w.linking && p.working.Load() == 0:
		// While a link is made, other goroutines and processes need the time.
		p.mu.Unlock()
		switch {
		case p.cfg.Threads || p.wanted.Load() > 0:
			runtime.Gosched()
		case p.oversubscribed.Load(): // the other processors have ranks, too
			yield.Now()
		default:
			p.poller.Yield()
		}
		p.regain()
		return nil
	}
	return p.sleep(w, now)
}

// Look handles the frames that have arrived, without waiting for any. So does an operation whose
// time is over: a process that was not scheduled for long has not read yet which ranks its peers
// wait for. With the lock.
func (p *Proxy) Look() {
	const most = 64 // a peer may send without an end
	for range most {
		advanced := false
		for i := 0; i < len(p.links); i++ {
			advanced = p.poll(p.links[i]) || advanced
		}
		if !advanced {
			return
		}
	}
}

// over returns why w must not wait any longer, or nil.
func (w *Wait) over(now time.Time) error {
	if w.began.IsZero() {
		w.begin(now)
	}
	if !w.next.IsZero() && now.After(w.next) {
		w.lasts = true
		switch w.next = now.Add(longAgain); {
		case w.half.IsZero():
		case now.After(w.half):
			w.late, w.next = true, now.Add(longEvery)
		case w.half.Before(w.next):
			w.next = w.half
		}
		w.long()
	}
	if err := w.ctx.Err(); err != nil {
		return err
	}
	if w.timeout > 0 && now.Sub(w.began) > w.timeout {
		return ErrTimeout
	}
	if w.guest != nil && w.guest.Err() != nil {
		return ErrSuspended
	}
	return nil
}

// beat sends a heartbeat to the awaited peer (nil: to all), unless one was sent recently.
func (p *Proxy) beat(on *peer, now time.Time) {
	if p.cfg.Heartbeat <= 0 {
		return
	}
	one := func(pr *peer) {
		if pr.link != nil && len(pr.ctl) == 0 && !pr.unsent && pr.sendErr == nil &&
			now.Sub(pr.beaten) >= p.cfg.Heartbeat {
			pr.beaten = now
			p.transmit(pr, &Header{Kind: frameBeat}, nil, false)
		}
	}
	if on != nil {
		one(on)
		return
	}
	for _, pr := range p.links {
		one(pr)
	}
}

// sleep parks the goroutine until a link is ready, another goroutine has made progress, or the time
// is up.
func (p *Proxy) sleep(w *Wait, now time.Time) error {
	p.asleep.Add(1)
	p.sleepMu.Lock()
	p.sleepers = append(p.sleepers, w)
	p.sleepMu.Unlock()
	if !w.idle {
		p.beat(w.blame.on, now)
	}
	calls := p.calls.Load()
	ready := calls != w.calls // since the last sleep: what it was for may have come after w has looked
	w.calls = calls
	for _, pr := range p.links {
		if pr.lent != nil {
			p.unlend(pr) // no link is blocked while this goroutine sleeps
			ready = true
		}
		if pr.link.Arm() {
			ready = true
		}
	}
	if ready {
		if p.asleep.Load() > 1 { // the links that were ready are no longer armed for the other sleepers
			p.wakeAll()
		}
		p.mu.Unlock() // another goroutine may need the lock to handle what is ready
		runtime.Gosched()
		p.regain()
	} else {
		wait := 100 * time.Millisecond
		if w.linking { // dialling pauses and admissions end without a wake
			wait = dialTieBreak
		}
		if !w.next.IsZero() {
			wait = max(longEvery, min(wait, w.next.Sub(now)))
		}
		if w.timeout > 0 {
			wait = max(0, min(wait, w.timeout-now.Sub(w.began)))
		}
		if !w.until.IsZero() {
			wait = max(0, min(wait, w.until.Sub(now)))
		}
		w.timer.Reset(wait)
		w.blame.sleep()
		p.mu.Unlock()
		var gone <-chan struct{}
		if w.guest != nil {
			gone = w.guest.Done()
		}
		select {
		case <-w.wake:
		case <-w.ctx.Done():
		case <-gone:
		case <-w.timer.C:
		}
		w.timer.Stop()
		w.calls = p.calls.Load()
		p.Lock()
		w.blame.look(time.Now(), false)
	}
	p.sleepMu.Lock()
	for i, o := range p.sleepers {
		if o == w {
			p.sleepers = append(p.sleepers[:i], p.sleepers[i+1:]...)
			break
		}
	}
	p.sleepMu.Unlock()
	select {
	case <-w.wake:
	default:
	}
	if p.asleep.Add(-1) == 0 {
		for _, pr := range p.links {
			pr.link.Disarm()
		}
	}
	if p.closed {
		return ErrClosed
	}
	return nil
}
