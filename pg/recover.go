package pg

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

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
	// it, the next one runs among the survivors.
	Shrink
	// Retry: an operation whose inputs are intact at all survivors, and that none of them has
	// finished, runs again among them by itself; else as Shrink. With Config.Uniform no survivor
	// finishes an operation before all have its result, so that only lost inputs stand against a
	// retry.
	Retry
)

var onFailureNames = []string{"report", "shrink", "retry"}

func (o OnFailure) String() string { return onFailureNames[min(int(o), len(onFailureNames)-1)] }

// ParseOnFailure reads "report" (also "end", as launchers say, and ""), "shrink" or "retry".
func ParseOnFailure(s string) (OnFailure, error) {
	if s == "" || s == "end" {
		return Report, nil
	}
	if i := slices.Index(onFailureNames, s); i >= 0 {
		return OnFailure(i), nil
	}
	return 0, fmt.Errorf("on failure %q: want report, shrink or retry", s)
}

// errMoved says that the group has gone on without a rank.
var errMoved = errors.New("the group goes on without it")

// halted says why the group is at an end on this rank, nil if it is not.
func (g *Group) halted() error {
	switch {
	case g.closed.Load():
		return ErrClosed
	case g.aborted != nil:
		return g.aborted
	case g.job.roster != nil && g.job.roster.EvictedLocked():
		return ErrEvicted
	}
	return nil
}

// moved reports whether there is another view of the group than the one that it is in.
func (g *Group) moved() bool {
	return g.sync.Now().Epoch > g.v.epoch
}

// await waits until the membership has changed in some way, for a while, and reports whether it
// has.
func (g *Group) await(patience time.Duration, changed func() bool) bool {
	m := g.job.roster
	if m == nil {
		return false
	}
	for until := time.Now().Add(patience); ; {
		if changed() {
			return true
		}
		if m.IsolatedLocked().Why != "" || m.EvictedLocked() || !time.Now().Before(until) || g.job.proxy.Progress(&g.wait) != nil {
			return false
		}
	}
}

// verdict waits until it is decided who is lost: that somebody could not reach a rank is evidence,
// and perhaps against the one who says so.
func (g *Group) verdict(e *RankError) {
	patience := g.job.settings.Window + 2*time.Second
	if g.incarnations != nil && g.job.proxy.Down(g.jobRank(e.Rank)) == nil { // it may have left this group alone
		patience = 200 * time.Millisecond
	}
	if !g.await(patience, g.moved) {
		return
	}
	if slot, why := g.gone(); slot != g.rank && slot != e.Rank {
		e.Rank, e.Reporter, e.Err = slot, g.rank, why
	}
}

// besides lists who is a member no longer, but for slot.
func (g *Group) besides(slot int) (all []int) {
	active, epoch := g.members(g.job.view())
	if epoch <= g.v.epoch {
		return nil
	}
	for _, s := range g.v.Active {
		if s != slot && s != g.rank && !slices.Contains(active, s) {
			all = append(all, s)
		}
	}
	return all
}

// survivable reports whether the group can go on after err without the ranks that it names.
func (g *Group) survivable(err error) bool {
	if g.job.roster == nil || errors.Is(err, ErrEvicted) || errors.Is(err, ErrAborted) {
		return false
	}
	return errors.As(err, new(*RankError)) || g.evicts(err) != nil
}

// evicts returns the timeout that err tells of, if ranks may be removed for it; else nil.
func (g *Group) evicts(err error) *TimeoutError {
	var late *TimeoutError
	if g.job.settings.OnTimeout != TimeoutReports && errors.As(err, &late) &&
		errors.Is(late, context.DeadlineExceeded) {
		return late
	}
	return nil
}

// fails has the group fail because of err, unless it can go on without the ranks that err names. It
// accuses them. It reports whether the group has failed.
func (g *Group) fails(err error) bool {
	g.accuse(err)
	if g.survivable(err) {
		return false
	}
	g.err = err
	return true
}

// Recover takes the group into a view that it can work in, after an operation failed because ranks
// were lost, timed out or disagreed. It is a collective of all survivors, whatever Config.OnFailure
// says: it waits until those that failed have been removed (or can be reached again) and all others
// have called it; where nobody's group has failed, as after a loss with Shrink, the next operation
// of a rank does as well. Afterwards Active tells who is left. It returns ErrEvicted if this rank
// is not, and an error that wraps ErrIsolated if this rank cannot take part in the decision.
func (g *Group) Recover(ctx context.Context) error {
	if err := g.enter(ctx, "recover", nil); err != nil {
		return err
	}
	defer g.leave()
	if err := g.halted(); err != nil {
		return err
	}
	if g.job.roster == nil {
		return g.err
	}
	g.look()
	for {
		mine := g.standing()
		mine.Calls = true
		if err := g.move(mine, true); err != nil {
			g.accuse(err)
			g.err = err
			return err
		}
		if _, failed := g.sync.Outcome(); !failed { // else there are ranks whose programs have yet to call it
			break
		}
	}
	g.err = nil
	g.seq = max(g.seq, g.begins()-1)
	return nil
}

// accuse tells the membership whom this rank waited for in vain, if err says so and ranks may be
// removed for that. Of those who merely hear of it only a witness has a voice: who was in the
// operation for long itself.
func (g *Group) accuse(err error) {
	late := g.evicts(err)
	if late == nil || g.job.roster == nil {
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

// verdicts waits until there is a verdict on all ranks that this rank has accused, in any group. It
// neither begins an operation nor takes part in an exchange before that: a removal that came later
// would hit a rank which all have gone on with.
func (g *Group) verdicts() error {
	for g.job.judging() {
		if err := g.halted(); err != nil {
			return err
		}
		g.show()
		accused := g.accused()
		if err := g.pause(accused); err != nil {
			return g.overdue(err, "", accused)
		}
	}
	return nil
}

// accused lists the slots of those on whom a verdict is outstanding.
func (g *Group) accused() (slots []int) {
	for _, p := range g.job.roster.AccusedLocked() {
		if slot := slices.Index(g.v.ranks, p.Slot); slot >= 0 {
			slots = append(slots, slot)
		}
	}
	return slots
}

// judging reports whether a verdict on ranks that this rank has accused is outstanding. It acquits
// those that have shown themselves, at the boundary before an exchange of some group.
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

// Evict removes a rank from the job, alive or not: it learns of it by ErrEvicted. Any rank may call
// it, alone; it returns when the view is changed, and the others go on as after a failure. The rank
// may come back by Rejoin. A *TimeoutError says that the view was not changed in time; it may be
// later.
func (g *Group) Evict(ctx context.Context, rank int) error {
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
	ro.Tell(membership.Evict{Slot: r})
	for {
		var in bool
		if err := ro.Ask(b.ctx, func(m *membership.Machine) {
			in = r < m.View().Size() && m.View().Slots[r].Incarnation != 0 && m.Member()
		}); err != nil {
			return b.why(err)
		}
		if !in {
			return nil
		}
		if !b.pause(2 * time.Millisecond) {
			return b.why(b.ctx.Err())
		}
	}
}

// bound is the one deadline of a call that waits for the store: what its caller's ctx and
// Config.Timeout leave it.
type bound struct {
	g     *Group
	ctx   context.Context
	call  string
	began time.Time
}

// within bounds what a call that began at began asks the store for: by the rest of its time, but so
// that two questions can be answered. end gives the bound's resources back.
func (g *Group) within(ctx context.Context, call string, began time.Time) (b *bound, end context.CancelFunc) {
	b = &bound{g: g, ctx: ctx, call: call, began: began}
	if g.job.timeout == 0 {
		return b, func() {}
	}
	left := g.job.timeout - time.Since(began)
	if left < g.job.timeout/2 {
		left = max(left, min(2*roster.StoreWait, g.job.timeout))
	}
	b.ctx, end = context.WithTimeout(ctx, left)
	return b, end
}

// pause waits for d, and reports whether the call's time is not over.
func (b *bound) pause(d time.Duration) bool {
	select {
	case <-b.ctx.Done():
		return false
	case <-time.After(d):
		return true
	}
}

// why is what the call returns because of err: what the program sees if its time is over.
func (b *bound) why(err error) error {
	cause := b.ctx.Err()
	if cause == nil {
		return err
	}
	late := &TimeoutError{Call: b.call, After: time.Since(b.began), Reporter: b.g.rank, Err: cause}
	p := b.g.job.proxy
	p.Lock()
	defer p.Unlock()
	if at := b.g.job.isolated(); at.Why != "" {
		return fmt.Errorf("%w; %w: %s", late, ErrIsolated, at.Why)
	}
	return late
}

// Abort ends the group, at once and on all ranks: what is under way on this rank returns an error
// that wraps ErrAborted and cause, and so does every later operation; peers learn of it from their
// next look at their links. It does not wait for anybody. The group is still to be closed.
func (g *Group) Abort(cause error) {
	if cause == nil {
		cause = errors.New("no cause was given")
	}
	p := g.job.proxy
	p.Lock()
	if g.aborted == nil && !g.closed.Load() {
		g.aborted = fmt.Errorf("rank %d: %w: %w", g.rank, ErrAborted, cause)
		a := &wireAbort{Kind: abortCall, A: g.rank, B: g.rank, Text: cause.Error()}
		g.coll.Abort(g.aborted, a.encode())
		g.msgs.Abort(g.aborted, a.encode())
	}
	p.Unlock()
	p.Wake()
}
