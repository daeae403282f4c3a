package pg

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"time"

	"tutti/p2p"
	"tutti/pg/internal/roster"
	"tutti/pg/membership"
)

// OnFailure says what a group does when one of its ranks is lost.
type OnFailure uint8

const (
	// Report: the operation in flight returns a *RankError, and so does every later collective,
	// until all survivors have called Recover.
	Report OnFailure = iota
	// Shrink: the operation in flight returns a *RankError at every survivor that had not finished
	// it. The next operation runs among the survivors. A loss that is noticed when no rank is in an
	// operation is no error of the next one: Group.View tells of it.
	Shrink
	// Retry: the operation in flight runs again among the survivors, if its inputs are intact on
	// all of them and none has finished it; otherwise as Shrink. With Config.Uniform no survivor
	// finishes an operation before all have its result, so that only lost inputs prevent a retry.
	Retry
)

var onFailureNames = []string{"report", "shrink", "retry"}

func (o OnFailure) String() string {
	if !o.valid() {
		return fmt.Sprintf("OnFailure(%d)", uint8(o))
	}
	return onFailureNames[o]
}

func (o OnFailure) valid() bool { return int(o) < len(onFailureNames) }

// parseOnFailure reads "report" (also "end", as launchers say, and ""), "shrink" or "retry".
func parseOnFailure(s string) (OnFailure, error) {
	if s == "" || s == "end" {
		return Report, nil
	}
	if i := slices.Index(onFailureNames, s); i >= 0 {
		return OnFailure(i), nil
	}
	return 0, fmt.Errorf("on failure %q: want report, shrink or retry", s)
}

// errMoved is the cause for a rank that the group has removed.
var errMoved = errors.New("the group goes on without it")

// halted returns why the group cannot be used on this rank any more, or nil.
func (g *Group) halted() error {
	switch {
	case g.closed.Load():
		return ErrClosed
	case g.aborted != nil:
		return g.aborted
	case g.job.roster != nil && g.job.roster.EvictedLocked():
		return g.job.eviction()
	}
	return g.heard()
}

// heard returns the error of an Abort, by this rank or by another one of which a channel has read,
// or nil.
func (g *Group) heard() error {
	if g.aborted != nil {
		return g.aborted
	}
	for _, err := range [...]error{g.coll.Err(), g.msgs.Err()} { // an earlier failure may hide the abort in one
		var ended *p2p.Aborted
		if errors.As(err, &ended) {
			if a, bad := decodeAbort(ended.Payload, g.v.Size); bad == nil && a.Kind == abortCall {
				return g.told(a)
			}
		}
	}
	return nil
}

// moved reports whether the job has a newer view than the group.
func (g *Group) moved() bool {
	return g.sync.Now().Epoch > g.v.epoch
}

// await waits until changed returns true after a change of membership, at most for patience, and
// returns its last value.
func (g *Group) await(patience time.Duration, changed func() bool) bool {
	m := g.job.roster
	if m == nil {
		return false
	}
	for until := time.Now().Add(patience); ; {
		if changed() {
			return true
		}
		if m.IsolatedLocked().Why != "" || g.halted() != nil || !time.Now().Before(until) ||
			g.job.proxy.Progress(&g.wait) != nil {
			return false
		}
	}
}

// deliberation returns how long the membership may take to decide which rank is lost: to notice
// that a link is missing, to wait for its return, and to change the view in the store.
func (g *Group) deliberation() time.Duration {
	if g.job.roster == nil {
		return 0
	}
	return g.job.roster.DecidesWithin() + 2*time.Second
}

// verdict waits until the membership has decided which rank is lost, and makes e name that one. A
// rank that cannot reach another is evidence against one of the two, not necessarily against the
// other: verdict returns ErrEvicted if this rank is the lost one.
func (g *Group) verdict(e *RankError) error {
	if e.Epoch < g.v.epoch || !slices.Contains(g.v.Active, e.Rank) || errors.As(e.Err, new(mishap)) ||
		errors.Is(e.Err, p2p.ErrLeft) {
		return nil // the group has gone on without the rank, or the rank is not lost
	}
	patience := g.deliberation()
	if g.incarnations != nil && g.job.proxy.Down(g.jobRank(e.Rank)) == nil { // the rank may have left only this group
		patience = 200 * time.Millisecond
	}
	moved := g.await(patience, g.moved)
	switch ro := g.job.roster; {
	case ro != nil && ro.EvictedLocked():
		return g.job.eviction()
	case !moved:
		return nil
	}
	if slot := culprit(e.Rank, e.Reporter, g.losses()); slot != e.Rank {
		e.Rank, e.Reporter, e.Err = slot, g.rank, g.whyGone(slot)
	}
	return nil
}

// whyGone returns why the job's view has lost a slot.
func (g *Group) whyGone(slot int) error {
	return errors.New(cmp.Or(g.job.why(g.v.ranks[slot]), roster.NoReason))
}

// A loss is a rank of the group's view that the job's view has no more.
type loss struct {
	slot   int
	epoch  uint64 // of the first view without it
	closed bool   // it closed the group, which is no reason for another's loss
}

// losses lists the ranks that the job's view has lost since the group's, except this one.
func (g *Group) losses() (all []loss) {
	for _, slot := range g.besides(g.rank) {
		all = append(all, loss{slot, g.job.view().Slots[g.v.ranks[slot]].Left, g.msgs.Closed(slot)})
	}
	return all
}

// culprit returns which rank to name for a loss that reporter has noticed of the rank in slot: the
// first of the others that died before it, else slot itself. The reporter may have ended because of
// the loss. If it was removed instead of the rank, what it had noticed was a link between the two.
func culprit(slot, reporter int, losses []loss) int {
	first, epoch := slot, uint64(math.MaxUint64)
	own := slices.IndexFunc(losses, func(l loss) bool { return l.slot == slot })
	if own >= 0 {
		epoch = losses[own].epoch
	}
	for _, l := range losses {
		instead := l.slot == reporter && own < 0
		if l.epoch < epoch && !l.closed && (instead || l.slot != reporter) {
			first, epoch = l.slot, l.epoch
		}
	}
	return first
}

// besides lists the slots whose ranks are no longer members, except slot.
func (g *Group) besides(slot int) (all []int) {
	for _, s := range g.v.Active {
		if s != slot && s != g.rank && g.out(s) {
			all = append(all, s)
		}
	}
	return all
}

// out reports whether the job's view has lost the rank that the group's view has in a slot, also if
// another one has taken its place.
func (g *Group) out(slot int) bool {
	v, rank := g.job.view(), g.v.ranks[slot]
	if g.incarnations != nil { // its epochs are not those of the job
		return !v.Has(rank, g.incarnations[slot])
	}
	return rank < v.Size() && v.Slots[rank].Left > g.v.epoch
}

// survivable reports whether the group can go on after err without the ranks that it names.
func (g *Group) survivable(err error) bool {
	if g.job.roster == nil || errors.Is(err, ErrEvicted) || errors.Is(err, ErrAborted) {
		return false
	}
	return errors.As(err, new(*RankError)) || g.evicts(err) != nil
}

// evicts returns the *TimeoutError in err if ranks may be removed for it, else nil.
func (g *Group) evicts(err error) *TimeoutError {
	var late *TimeoutError
	if g.job.settings.OnTimeout != TimeoutReports && errors.As(err, &late) &&
		errors.Is(late, context.DeadlineExceeded) {
		return late
	}
	return nil
}

// fails accuses the ranks that err names, and fails the group unless it can go on without them. It
// reports whether the group has failed.
func (g *Group) fails(err error) bool {
	g.accuse(err)
	if g.survivable(err) {
		return false
	}
	g.err = err
	return true
}

// Recover brings the group into a usable view after an operation failed because ranks were lost,
// timed out or disagreed. It is a collective of all survivors, with any Config.OnFailure. It waits
// until the failed ranks have been removed (or can be reached again) and all others have called it.
// If the group has failed on no rank, as after a loss with Shrink, a rank's next operation counts
// as its call, and a rank that is in the next view already returns at once. Afterwards Active lists
// the ranks that are left. Recover returns ErrEvicted if this rank is not among them, and an error
// that wraps ErrIsolated if this rank cannot take part in the decision.
//
// All ranks continue with the same operation after the same call of Recover, also if one makes the
// call when others have made it, and have given up operations since. That rank gets an error of
// each of these operations. If the others are in a later call of Recover by then, they wait until
// it has made that one too.
//
// A job over a store without leases, and groups of Local, keep all their ranks: Recover makes the
// group usable after a timeout or a mismatch, and returns a *RankError if a rank is lost.
func (g *Group) Recover(ctx context.Context) error {
	if err := g.enter(ctx, "recover", nil); err != nil {
		return err
	}
	defer g.leave()
	if err := g.halted(); err != nil {
		return err
	}
	g.look()
	// A channel that others have broken since is no reason: their programs may be in Agree and
	// wait for this one. The next operation replaces it.
	for renew := g.err != nil || !g.sync.Fresh(g.seq); g.err == nil || !g.sync.Stopped(g.seq); renew = true {
		mine := g.standing()
		mine.Calls = true
		if err := g.move(mine, renew); err != nil {
			g.accuse(err)
			g.err = err
			return err
		}
		o, failed := g.sync.Outcome()
		if failed { // other ranks' programs have yet to call it
			continue
		}
		if g.err != nil && g.seq >= o.Start { // the others have yet to be told of the failure
			g.wait.Restart()
			continue
		}
		if g.err, g.cause = nil, nil; g.sync.Fresh(g.seq) {
			break
		}
		g.wait.Restart() // the others have come so far, and have to come once more
	}
	g.seq = g.sync.Recovered(g.seq)
	return nil
}

// leastAccusing is the shortest wait that a rank is accused for: a rank that is a moment later than
// the others is not missing.
const leastAccusing = 10 * time.Millisecond

// accuse reports the ranks that err names as missing to the membership, if ranks may be removed for
// a timeout. A rank that learnt of the timeout from a peer accuses only if it had waited in the
// operation long enough itself.
func (g *Group) accuse(err error) {
	late := g.evicts(err)
	if late == nil || g.job.roster == nil || late.After < leastAccusing {
		return
	}
	alone := g.job.settings.OnTimeout == TimeoutEvictsAlone
	if alone && late.Reporter != g.rank || !alone && 2*g.wait.Waited() < late.After {
		return
	}
	for _, m := range late.Missing {
		if r := g.v.ranks[m.Rank]; m.Rank != g.rank {
			g.job.roster.AccuseLocked(r, alone)
		}
	}
}

// verdicts waits until there is a verdict on every rank that this rank has accused, in any group.
// Before that it neither begins an operation nor takes part in an exchange: a removal that came
// later would affect a rank that all others have continued with. first is the first operation that
// an error ends.
func (g *Group) verdicts(first uint64) error {
	for g.job.judging() {
		if err := g.halted(); err != nil {
			return err
		}
		g.show()
		accused := g.accused()
		if err := g.pause(accused); err != nil {
			return g.overdue(err, "", accused, first)
		}
	}
	return nil
}

// accused lists the slots of the ranks that have no verdict yet.
func (g *Group) accused() (slots []int) {
	for _, p := range g.job.roster.AccusedLocked() {
		if slot := slices.Index(g.v.ranks, p.Slot); slot >= 0 {
			slots = append(slots, slot)
		}
	}
	return slots
}

// judging reports whether a verdict is outstanding on a rank that this one has accused. It takes
// back accusations against ranks that have come to the boundary before an exchange of some group.
func (j *job) judging() bool {
	if j.roster == nil {
		return false
	}
	accused := j.roster.AccusedLocked()
	for _, p := range accused {
		for g := range j.groups {
			slot := slices.Index(g.v.ranks, p.Slot)
			if slot >= 0 && (g.sync.Arrived(slot) || !g.present[slot].Before(g.sync.Next())) {
				j.roster.AcquitLocked(p)
			}
		}
	}
	return len(accused) > 0
}

// Evict removes a rank from the job, alive or not. The rank's next call returns ErrEvicted, and it
// may come back by Rejoin. Any single rank may call Evict. It returns when the view has changed;
// the others go on as after a failure. The job's only active rank stays: Evict of it returns an
// *ArgumentError, also if it becomes the only one while Evict waits. Evict returns an error that
// wraps ErrIsolated if this rank cannot take part in the decision. After that or a *TimeoutError
// the view may still change later. The decision is the job's: Abort of the group does not end it.
func (g *Group) Evict(ctx context.Context, rank int) error {
	if ctx == nil {
		return noContext("evict")
	}
	ranks := g.shown.Load().ranks
	if rank < 0 || rank >= len(ranks) {
		return &ArgumentError{Call: "evict", Arg: "the rank", Got: fmt.Sprint(rank),
			Want: fmt.Sprintf("a rank, 0 to %d", len(ranks)-1)}
	}
	ro := g.job.roster
	if ro == nil {
		return &ArgumentError{Call: "evict", Arg: "the group", Got: "one without a store",
			Want: "a job of several processes"}
	}
	b, end := g.within(ctx, "evict", time.Now())
	defer end()
	r := ranks[rank]
	var was uint64 // the slot may be taken again before this rank sees that it was free
	if err := ro.Ask(b.ctx, func(m *membership.Machine) {
		if r < m.View().Size() {
			was = m.View().Slots[r].Incarnation
		}
	}); err != nil {
		return b.why(err)
	}
	if was == 0 {
		return nil
	}
	ro.Tell(membership.Evict{Slot: r})
	for {
		g.job.proxy.Lock()
		hopeless := g.job.stranded() // before the look at the view, which may have changed by then
		g.job.proxy.Unlock()
		var in, leaves bool
		if err := ro.Ask(b.ctx, func(m *membership.Machine) {
			in = m.View().Has(r, was) && m.Member()
			leaves = m.Condemned(membership.Peer{Slot: r, Incarnation: was})
		}); err != nil {
			return b.why(err)
		}
		switch {
		case !in:
			return nil
		case !leaves: // it was alone in the view, and may have company again
			return &ArgumentError{Call: "evict", Arg: "the rank",
				Got: fmt.Sprintf("%d: it is the job's only active rank", rank), Want: "one of several"}
		case hopeless != nil:
			return hopeless
		}
		if !b.pause(2 * time.Millisecond) {
			return b.why(b.ctx.Err())
		}
	}
}

// bound is the deadline of a call that waits for the store: the earlier one of its ctx and
// Config.Timeout.
type bound struct {
	g     *Group
	ctx   context.Context
	call  string
	began time.Time
}

// within bounds the store requests of a call that began at began by the rest of its time, and
// allows at least two requests. Close ends them as well. end releases the bound's resources.
func (g *Group) within(ctx context.Context, call string, began time.Time) (b *bound, end context.CancelFunc) {
	b = &bound{g: g, call: call, began: began}
	var cancel context.CancelFunc
	if g.job.timeout == 0 {
		b.ctx, cancel = context.WithCancel(ctx)
	} else {
		left := g.job.timeout - time.Since(began)
		if left < g.job.timeout/2 {
			left = max(left, min(2*roster.StoreWait, g.job.timeout))
		}
		b.ctx, cancel = context.WithTimeout(ctx, left)
	}
	closing := context.AfterFunc(g.ctx, cancel)
	return b, func() { closing(); cancel() }
}

// pause waits for d. It returns false if the call's time has ended.
func (b *bound) pause(d time.Duration) bool {
	select {
	case <-b.ctx.Done():
		return false
	case <-time.After(d):
		return true
	}
}

// why returns the error that the caller gets for err: ErrClosed if the group is closed, a
// *TimeoutError if the call's time has ended.
func (b *bound) why(err error) error {
	if b.g.closed.Load() {
		return ErrClosed
	}
	cause := b.ctx.Err()
	if cause == nil {
		return err
	}
	late := &TimeoutError{Call: b.call, After: time.Since(b.began), Reporter: b.g.rank, in: b.g.in, Err: cause}
	p := b.g.job.proxy
	p.Lock()
	defer p.Unlock()
	if at := b.g.job.isolated(); at.Why != "" {
		return fmt.Errorf("%w; %w: %s", late, ErrIsolated, at.Why)
	}
	return late
}

// Abort fails the group on all ranks. Operations in flight on this rank return an error that wraps
// ErrAborted and cause, and so does every later operation. Peers learn of it when they next read
// their links. Abort does not wait for peers. The group must still be closed.
func (g *Group) Abort(cause error) {
	if cause == nil {
		cause = errors.New("no cause was given")
	}
	p := g.job.proxy
	p.Lock()
	if g.aborted == nil && !g.closed.Load() {
		g.aborted = &abortedError{Rank: g.rank, Err: cause, in: g.in}
		a := &wireAbort{Kind: abortCall, A: g.rank, B: g.rank, Text: cause.Error()}
		g.disconnect()
		g.coll.Abort(g.aborted, a.encode())
		g.msgs.Abort(g.aborted, a.encode())
	}
	p.Unlock()
	p.Wake()
}
