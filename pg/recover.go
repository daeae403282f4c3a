package pg

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"time"

	"tutti/bootstrap"
	"tutti/collectives"
	"tutti/p2p"
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

// errMoved fails a channel whose members have changed.
var errMoved = errors.New("the group goes on without it")

// errAgain says that a rank could not enter the view in which an operation was about to run,
// because there was another one already.
var errAgain = errors.New("it could not enter the view")

// members of the group in the job's view: their slots, and the epoch of that for this group. With
// the proxy's lock, as most of this file.
func (g *Group) members(v membership.View) (active []int, epoch uint64) {
	if g.lives == nil {
		return v.Active(), v.Epoch
	}
	ranks, epoch := v.Subset(g.ranks, g.lives)
	for _, r := range ranks {
		active = append(active, g.slotOf(r))
	}
	return active, epoch
}

// viewChanged looks at the job's new view. If the group has lost a rank, the next operation begins
// with that; the one in flight ends by itself, for its links with the lost one do, and may still
// end well: a rank that closes its group has sent all that it owed. If the group has only grown,
// that waits for a boundary.
func (g *Group) viewChanged() {
	active, epoch := g.members(g.job.view)
	if epoch <= g.epoch {
		return
	}
	if g.standing != nil { // it is entering another view, which is old now
		g.coll.Fail(errMoved)
		return
	}
	lost := false
	for _, slot := range g.active {
		lost = lost || !slices.Contains(active, slot)
	}
	for _, slot := range active {
		if slot < g.size && g.lives == nil && slices.Contains(g.active, slot) && g.at.Slots[g.ranks[slot]].Incarnation != g.job.view.Slots[g.ranks[slot]].Incarnation {
			lost = true
		}
	}
	if lost {
		g.moving = true
	} else if g.job.settings.AutoAdmit {
		g.hint = true
	}
}

// halted says why the group is at an end on this rank, nil if it is not.
func (g *Group) halted() error {
	switch {
	case g.closed.Load():
		return ErrClosed
	case g.aborted != nil:
		return g.aborted
	case g.job.members != nil && g.job.members.evicted:
		return ErrEvicted
	}
	return nil
}

// await waits for another view of the group, for a while, and reports whether there is one.
func (g *Group) await(patience time.Duration) bool {
	m := g.job.members
	if m == nil {
		return false
	}
	for until := time.Now().Add(patience); ; {
		if _, epoch := g.members(g.job.view); epoch > g.epoch {
			return true
		}
		if m.isolated != "" || m.evicted || !time.Now().Before(until) || g.job.proxy.Progress(&g.wait) != nil {
			return false
		}
	}
}

// verdict waits until it is decided who is lost: that somebody could not reach a rank is evidence,
// and perhaps against the one who says so.
func (g *Group) verdict(e *RankError) {
	patience := g.job.settings.Window + 2*time.Second
	if g.lives != nil && g.job.proxy.Down(g.jobRank(e.Rank)) == nil { // it may have left this group alone
		patience = 200 * time.Millisecond
	}
	if !g.await(patience) {
		return
	}
	if slot, why := g.gone(); slot != g.rank && slot != e.Rank {
		e.Rank, e.Reporter, e.Err = slot, g.rank, why
	}
}

// besides lists who is a member no longer, but for slot.
func (g *Group) besides(slot int) (all []int) {
	active, epoch := g.members(g.job.view)
	if epoch <= g.epoch {
		return nil
	}
	for _, s := range g.active {
		if s != slot && s != g.rank && !slices.Contains(active, s) {
			all = append(all, s)
		}
	}
	return all
}

// survivable reports whether the group can go on after err without the ranks that it names.
func (g *Group) survivable(err error) bool {
	var lost *RankError
	var late *TimeoutError
	switch {
	case g.job.members == nil || errors.Is(err, ErrEvicted) || errors.Is(err, ErrAborted):
		return false
	case errors.As(err, &lost):
		return true
	case errors.As(err, &late) && g.job.settings.OnTimeout != TimeoutReports && errors.Is(late, context.DeadlineExceeded):
		for _, m := range late.Missing {
			r := g.ranks[m.Rank]
			who := membership.Peer{Slot: r, Incarnation: g.job.view.Slots[r].Incarnation}
			switch {
			case m.Rank == g.rank:
			case g.job.settings.OnTimeout == TimeoutEvictsAlone:
				g.job.members.tell(membership.Missed{Peer: who})
			case 2*g.wait.Waited() >= late.After: // a witness: it was in the operation for long itself, and does not just hear of it
				g.job.members.tell(membership.Late{Peer: who})
			}
		}
		return len(late.Missing) > 0
	}
	return false
}

// ready brings the group to where its next operation can run. The error is the operation's.
func (g *Group) ready() error {
	if err := g.halted(); err != nil {
		return err
	}
	if g.err != nil {
		return g.err
	}
	if g.moving {
		if slot, _ := g.gone(); slot != g.rank && g.job.settings.OnFailure == Report && !g.insist { // lost between two operations
			g.seq++
			g.err = g.fail(errMoved)
			return g.err
		}
		if err := g.move(membership.Standing{Over: g.seq, Intact: true}, false); err != nil {
			g.seq++ // it is over here, and not elsewhere
			g.err = err
			return err
		}
	}
	if g.seq+1 < g.begins {
		g.seq++
		return g.skipped()
	}
	return nil
}

// skipped is the outcome of an operation that other ranks could not run to its end.
func (g *Group) skipped() error {
	if g.lost != nil {
		e := *g.lost
		e.Call = fmt.Sprintf("operation #%d", g.seq)
		return &e
	}
	return &RankError{Rank: g.rank, Epoch: g.epoch, Reporter: g.rank, Call: fmt.Sprintf("operation #%d", g.seq), Err: errors.New("other ranks are past it")}
}

// move takes the group into the job's present view, or anew into the one that it is in if that
// failed, together with all members of that view: when it returns nil they all have told each other
// where they stand, and know with which operation to begin. again asks for it though nothing seems
// to be wrong.
func (g *Group) move(mine membership.Standing, again bool) error {
	broken := again || g.coll.Err() != nil
	g.moving = true
	for {
		if err := g.halted(); err != nil {
			return err
		}
		active, epoch := g.members(g.job.view)
		if !slices.Contains(active, g.rank) {
			return ErrEvicted
		}
		attempt := uint64(0)
		down := g.down(active)
		switch {
		case down >= 0 || epoch < g.must:
			if err := g.linger(down); err != nil {
				return err
			}
			continue
		case epoch == g.epoch && !broken:
			g.moving = false
			return nil
		case epoch == g.epoch:
			attempt = g.attempt + 1
		}
		if slot, why := g.gone(); slot != g.rank {
			g.lost = &RankError{Rank: slot, Epoch: g.epoch, Reporter: g.rank, Err: why}
		}
		if !mine.Joins { // a rank that comes in has been in no epoch before
			g.coll.Leave(mine.Over)
		}
		err := g.open(active, epoch, attempt)
		if err == nil {
			err = g.stand(mine)
		}
		if err == nil {
			err = g.coll.Err() // another view came with the last standing: nothing can run in this one
		}
		if err == nil {
			g.moving, g.must = false, 0
			g.viewChanged() // there may be a newer one already
			return nil
		}
		g.job.log.Debug("a view could not be entered yet", "epoch", epoch, "attempt", attempt, "err", err)
		g.coll.Forget()
		var peer *p2p.PeerError
		var told *p2p.Aborted
		if errors.As(err, &told) {
			if a, bad := decodeAbort(told.Payload, g.size); bad == nil && a.Kind == abortCall {
				return g.told(a) // for good
			}
		}
		if errors.As(err, &peer) || told != nil || errors.Is(err, errMoved) {
			g.coll.Abort(err, (&wireAbort{Kind: abortAgain, A: g.rank, B: g.rank}).encode())
			broken = true
			continue
		}
		tell, typed := g.explain(err)
		if tell != nil {
			g.coll.Abort(typed, tell.encode())
		}
		return typed
	}
}

// down returns a slot that cannot be reached, -1 if all can.
func (g *Group) down(active []int) int {
	for _, slot := range active {
		if slot != g.rank && g.job.proxy.Down(g.jobRank(slot)) != nil {
			return slot
		}
	}
	return -1
}

func (g *Group) jobRank(slot int) int {
	if slot < len(g.ranks) {
		return g.ranks[slot]
	}
	return slot // the group of all ranks grows
}

// linger waits for a view, or for a link with slot (-1: none in particular).
func (g *Group) linger(slot int) error {
	m := g.job.members
	if m != nil && m.isolated != "" && time.Since(m.since) > g.job.settings.Window {
		return fmt.Errorf("%w: %s", ErrIsolated, m.isolated)
	}
	err := g.job.proxy.Progress(&g.wait)
	if err == nil {
		return nil
	}
	if errors.Is(err, p2p.ErrClosed) {
		return ErrClosed
	}
	e := &TimeoutError{Call: "going over to another view", After: g.wait.Waited(), Reporter: g.rank, Err: context.DeadlineExceeded}
	if errors.Is(err, context.Canceled) {
		e.Err = context.Canceled
	}
	if slot >= 0 {
		e.Missing = []Seen{{Rank: slot, What: fmt.Sprintf("not reachable (%v), and not removed from the view", g.job.proxy.Down(g.jobRank(slot)))}}
	}
	return e
}

// open opens the channel for a view.
func (g *Group) open(active []int, epoch, attempt uint64) error {
	if g.lives == nil && g.job.view.Size() > len(g.ranks) {
		for r := len(g.ranks); r < g.job.view.Size(); r++ {
			g.ranks = append(slices.Clone(g.ranks), r)
		}
	}
	ranks := make([]int, len(g.ranks))
	for i := range ranks {
		ranks[i] = -1
	}
	for _, slot := range active {
		ranks[slot] = g.ranks[slot]
	}
	c, err := g.coll.Next(p2p.Epoch{View: epoch, Attempt: attempt}, ranks)
	if err != nil {
		return err
	}
	g.coll, g.epoch, g.attempt, g.at = c, epoch, attempt, g.job.view
	g.size, g.active, g.hint = len(ranks), active, false
	g.run.reset()
	return nil
}

// standingSize is what a rank tells when it enters a view: where it stands, and where it is.
const standingSize = 6*8 + placeSize

// standToken marks these messages. No operation has number 0.
var standToken = p2p.Token{Call: 1 << 63}

// stand exchanges where the members of the view stand and draws the conclusion.
func (g *Group) stand(mine membership.Standing) error {
	mine.Epoch, mine.Attempt, mine.Start, mine.Confirmed = g.agreed.Epoch, g.agreed.Attempt, g.agreed.Start, g.agreed.Confirmed
	out := make([]byte, 0, standingSize)
	for _, n := range []uint64{mine.Over, mine.Epoch, mine.Start, mine.Confirmed, mine.Attempt} {
		out = binary.LittleEndian.AppendUint64(out, n)
	}
	flags := uint64(0)
	for i, b := range []bool{mine.Has, mine.Intact, mine.Joins} {
		if b {
			flags |= 1 << i
		}
	}
	out = binary.LittleEndian.AppendUint64(out, flags)
	out = out[:standingSize]
	g.job.here.encode(out[6*8:])

	in := make([]byte, standingSize*len(g.active))
	recvs := make([]p2p.Recv, len(g.active))
	g.standing, g.run.tok = recvs, standToken
	defer func() { g.standing = nil }()
	if err := g.coll.Begin(standToken, false); err != nil {
		return err
	}
	for i, slot := range g.active {
		if slot != g.rank {
			g.coll.PostRecv(&recvs[i], slot, standToken, in[i*standingSize:(i+1)*standingSize], false)
		}
	}
	for _, slot := range g.active {
		if slot != g.rank {
			if err := g.coll.Send(&g.wait, slot, standToken, out); err != nil {
				return err
			}
		}
	}
	all := make([]membership.Standing, len(g.active))
	places := slices.Clone(g.job.places)
	for len(places) < g.job.settings.MaxSize {
		places = append(places, place{cores: 1})
	}
	for i, slot := range g.active {
		b := out
		if slot != g.rank {
			if err := g.coll.WaitRecv(&g.wait, &recvs[i]); err != nil {
				return err
			}
			b = in[i*standingSize : (i+1)*standingSize]
		}
		u := func(at int) uint64 { return binary.LittleEndian.Uint64(b[8*at:]) }
		all[i] = membership.Standing{Over: u(0), Epoch: u(1), Start: u(2), Confirmed: u(3), Attempt: u(4), Has: u(5)&1 != 0, Intact: u(5)&2 != 0, Joins: u(5)&4 != 0}
		places[g.ranks[slot]] = decodePlace(b[6*8:])
	}
	g.begins, g.confirmed = membership.Resume(all)
	g.agreed = membership.Standing{Epoch: g.epoch, Attempt: g.attempt, Start: g.begins, Confirmed: g.confirmed}
	if g.lives == nil {
		g.job.settle(g, places)
	}
	g.locate(places)
	return nil
}

// unheard lists the ranks whose standing is missing.
func (g *Group) unheard() (all []lastSeen) {
	for i, slot := range g.active {
		if slot != g.rank && i < len(g.standing) && g.standing[i].Posted() && !g.standing[i].Done() {
			t, ok := g.coll.Seen(slot)
			all = append(all, lastSeen{Rank: slot, Has: ok, Last: t})
		}
	}
	return all
}

// Recover takes the group into a view that it can work in, after an operation failed because ranks
// were lost, timed out or disagreed. It is a collective of all survivors, whatever Config.OnFailure
// says: it waits until those that failed have been removed (or can be reached again) and all others
// have called it. Afterwards Active tells who is left. It returns ErrEvicted if this rank is not,
// and an error that wraps ErrIsolated if this rank cannot take part in the decision.
func (g *Group) Recover(ctx context.Context) error {
	if err := g.enter(ctx, "recover", nil); err != nil {
		return err
	}
	defer g.leave()
	if err := g.halted(); err != nil {
		return err
	}
	if g.job.members == nil {
		return g.err
	}
	g.err = nil
	if err := g.move(membership.Standing{Over: g.seq, Intact: true}, true); err != nil {
		g.err = err
		return err
	}
	g.seq = max(g.seq, g.begins-1)
	return nil
}

// Admit lets ranks in that wait to join: replacements of lost ones, and new ones up to
// Config.MaxSize. It is a collective, for a step boundary: all ranks call it, and when it returns
// all are in the view in which all that were waiting are active, if there were any. It returns how
// many came in, the same number at every rank. A rank that comes in returns from Join meanwhile;
// the program then brings it up to date, by a Broadcast of the model's state for example.
func (g *Group) Admit(ctx context.Context) (int, error) {
	if g.lives != nil {
		return 0, &ArgumentError{Call: "admit", Arg: "the group", Got: "a subgroup", Want: "the group of all ranks: subgroups are made anew by Split"}
	}
	if g.job.members == nil {
		return 0, nil
	}
	if err := g.enter(ctx, "admit", func() { g.expired(call{kind: collectives.AllReduce, dtype: Uint64, op: Max, count: admitFields}) }); err != nil {
		return 0, err
	}
	defer g.leave()
	return g.admit(ctx, g.at.Epoch)
}

// What the ranks tell each other in Admit. The largest of each counts.
const (
	goal   = iota // the view that the lowest rank's membership has come to
	latest        // the latest view that a rank is in, and the complement of the earliest
	early
	arrived // how many lives are in it that a program does not know of
	coming  // and will be in the goal
	admitFields
)

// admit agrees with all other ranks, those that come in meanwhile included, that everybody is in
// who is to be. since is the view up to which this rank's program knows who is there. All that
// decides what becomes of it, and the outcome, is in the result of a uniform allreduce: none of it
// is what this rank happens to know.
func (g *Group) admit(ctx context.Context, since uint64) (int, error) {
	news := func(v membership.View, since uint64) (n uint64) {
		for _, s := range v.Slots {
			if s.Since > since {
				n++
			}
		}
		return n
	}
	for {
		var lost *RankError
		if err := g.ready(); errors.As(err, &lost) && g.err == nil {
			continue // the others are past an operation that this rank did not begin
		} else if err != nil {
			return 0, err
		}
		said := []uint64{latest: g.at.Epoch, early: ^g.at.Epoch, arrived: news(g.at, since), admitFields - 1: 0}
		if g.active[0] == g.rank {
			g.job.proxy.Unlock()
			v, err := g.job.members.admit(ctx)
			g.job.proxy.Lock()
			if err != nil {
				g.job.log.Warn("nobody could be admitted", "err", err)
			} else {
				said[goal], said[coming] = v.Epoch, news(v, since)
			}
		}
		b := BufferOf(said)
		err := g.check(&g.cur, collectives.AllReduce, Max, 0, b, b, nil, nil)
		if err == nil {
			g.run.hot = hot{}
			g.insist = true
			err = g.collective()
			g.insist = false
		}
		if errors.As(err, &lost) && g.err == nil { // all survivors see it alike
			continue
		}
		if err != nil {
			return 0, err
		}
		there := said[goal] <= said[latest] && said[latest] == ^said[early]
		if there {
			return int(said[arrived]), nil
		}
		if g.must = max(said[goal], said[latest]); g.must > g.epoch {
			g.moving = true
			if err := g.move(membership.Standing{Over: g.seq, Intact: true}, false); err != nil {
				g.err = err
				return 0, err
			}
		}
		if g.must = 0; g.job.settings.AutoAdmit { // who comes in does not know that there was an Admit
			return int(max(said[arrived], said[coming])), nil
		}
	}
}

// admit has the machine let in who waits, and returns the view in which they are.
func (ms *members) admit(ctx context.Context) (v membership.View, err error) {
	sctx, cancel := context.WithTimeout(ctx, storeWait)
	defer cancel()
	all, err := ms.j.directory().List(sctx, joinKey)
	if err != nil {
		return v, err
	}
	for key, value := range all {
		ms.seen(bootstrap.Event{Key: key, Value: value, Exists: true})
	}
	ms.tell(membership.Admit{})
	for {
		var pending bool
		if err := ms.ask(sctx, func(m *membership.Machine) { pending, v = m.Pending(), m.View() }); err != nil || !pending {
			return v, err
		}
		select {
		case <-sctx.Done():
			return v, sctx.Err()
		case <-time.After(time.Millisecond):
		}
	}
}

// Evict removes a rank from the job, alive or not: it learns of it by ErrEvicted. Any rank may call
// it, alone; it returns when the view is changed, and the others go on as after a failure. The rank
// may come back by Rejoin. A *TimeoutError says that the view was not changed in time; it may be
// later.
func (g *Group) Evict(ctx context.Context, rank int) error {
	g.job.proxy.Lock()
	ranks := g.ranks
	g.job.proxy.Unlock()
	if rank < 0 || rank >= len(ranks) {
		return &ArgumentError{Call: "evict", Arg: "the rank", Got: fmt.Sprint(rank), Want: fmt.Sprintf("a rank, 0 to %d", len(ranks)-1)}
	}
	ms := g.job.members
	if ms == nil {
		return &ArgumentError{Call: "evict", Arg: "the group", Got: "one without a store", Want: "a job of several processes"}
	}
	b, end := g.within(ctx, "evict", time.Now())
	defer end()
	r := ranks[rank]
	ms.tell(membership.Evict{Slot: r})
	for {
		var in bool
		if err := ms.ask(b.ctx, func(m *membership.Machine) {
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
		left = max(left, min(2*storeWait, g.job.timeout))
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
	if m := b.g.job.members; m != nil && m.isolated != "" {
		return fmt.Errorf("%w; %w: %s", late, ErrIsolated, m.isolated)
	}
	return late
}

// Rejoin closes this rank's groups, all of them, and joins its job again in the same slot, as a new
// incarnation: for a rank that was evicted, and lives. It returns the new group of all ranks when
// the others have admitted it.
func (g *Group) Rejoin(ctx context.Context) (*Group, error) {
	j := g.job
	ctx, end := j.settings.within(ctx)
	defer end()
	if j.members == nil {
		return nil, &ArgumentError{Call: "rejoin", Arg: "the group", Got: "one without a store", Want: "a job of several processes"}
	}
	j.proxy.Lock()
	var all []*Group
	for o := range j.groups {
		all = append(all, o)
	}
	j.proxy.Unlock()
	for _, o := range all {
		o.Close()
	}
	cfg := j.settings.Config
	cfg.Rank = j.self.Rank
	return Join(ctx, cfg)
}

// Agree is a fault-tolerant agreement: it returns true if all ranks that took part to its end gave
// true, and the same value at every rank that returns one, whoever is lost meanwhile. It is a
// collective. It costs a small allreduce and a round trip to the store.
func (g *Group) Agree(ctx context.Context, yes bool) (bool, error) {
	began := time.Now()
	vote := []uint8{0}
	if yes {
		vote[0] = 1
	}
	if err := g.enter(ctx, "agree", func() { g.expired(call{kind: collectives.AllReduce, dtype: Uint8, op: Min, count: 1}) }); err != nil {
		return false, err
	}
	g.insist = true
	k, err := uint64(0), g.ready()
	if err == nil {
		b := BufferOf(vote)
		if err = g.check(&g.cur, collectives.AllReduce, Min, 0, b, b, nil, nil); err == nil {
			g.run.hot = hot{}
			err = g.collective()
		}
	}
	k = g.seq
	g.insist = false
	g.leave()
	if g.job.members == nil {
		return vote[0] == 1 && err == nil, err
	}
	var lost *RankError
	if err != nil && !errors.As(err, &lost) {
		return false, err
	}
	within, end := g.within(ctx, "agree", began)
	defer end()
	return g.decide(within, k, vote[0] == 1, err)
}

// decide makes the first proposal that reaches the store the outcome of agreement k. A rank with
// failed set has none to make: others finished without it, and they have decided before they went
// on.
func (g *Group) decide(within *bound, k uint64, yes bool, failed error) (bool, error) {
	// The world's name is the same in every life of a job; what an earlier life left may be there
	// still.
	key := fmt.Sprintf("agree/%016x/%x-%d", g.job.members.first, g.name.Maker, g.name.Number)
	mine := binary.BigEndian.AppendUint64(nil, k)
	mine = append(mine, map[bool]byte{true: 1}[yes])
	var old []byte
	for {
		sctx, cancel := context.WithTimeout(within.ctx, storeWait)
		b, err := g.job.directory().Get(sctx, key)
		if err != nil && !errors.Is(err, bootstrap.ErrNoKey) { // the store may come back
			cancel()
			if !within.pause(20 * time.Millisecond) {
				return false, within.why(err)
			}
			continue
		}
		if len(b) == 9 && binary.BigEndian.Uint64(b) == k {
			cancel()
			return b[8] == 1, nil
		}
		if failed != nil || len(b) == 9 && binary.BigEndian.Uint64(b) > k {
			cancel()
			if failed == nil {
				failed = errors.New("agree: other ranks are past it")
			}
			return false, failed
		}
		old = b
		err = g.job.directory().CompareAndSwap(sctx, key, old, mine)
		cancel()
		var c *bootstrap.ConflictError
		switch {
		case err == nil:
			return yes, nil
		case errors.As(err, &c):
		case !within.pause(20 * time.Millisecond): // it may have been written: the next look tells
			return false, within.why(err)
		}
	}
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

// interrupt ends what is under way in all groups. With the proxy's lock.
func (j *job) interrupt(err error) {
	for g := range j.groups {
		g.coll.Fail(err)
		g.msgs.Fail(err)
	}
}
