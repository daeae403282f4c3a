package pg

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"time"

	"tutti/p2p"
	"tutti/pg/internal/exec"
	"tutti/pg/internal/join"
	"tutti/pg/internal/resync"
	"tutti/pg/membership"
)

// How a group goes from one view to the next. Package resync decides; this file carries what the
// ranks tell each other, as notices on the channel of messages, and opens the channels.

// passage is a group's part in going from view to view. Of what package resync does not know:
//
//   - rough is set by whatever may keep the next operation from running as the one before did: a
//     new view, a notice of an exchange, a failure, an accusation. While it is not set no exchange is
//     under way or wanted, and the next operation looks at nothing of this but err. Group.ready
//     looks, and clears it.
//   - joins is set during Join into a running job alone: the rank answers no exchange before it has
//     begun its own.
//   - hint is set from a view that has only grown until the group enters another: with AutoAdmit
//     alone.
//   - cause belongs to Group.err, and gave to the operation that ran last: it is over with the next
//     exchange.
type passage struct {
	sync  *resync.Machine // the exchange that the group is in, or was in last
	rough bool            // something has happened that the next operation has to look at first
	joins bool            // the rank is about to enter the group's view, and its program has no group yet
	hint  bool            // the job has grown, and the others are to know
	lost  *RankError      // the latest
	cause []byte          // why the group has failed: what the others are told
	gave  uint64          // the uniform operation that was given up last

	present map[int]resync.Point // to which boundaries others have come, by slot
	shows   resync.Point         // to which this rank has said that it has come
}

// The keys of a group's notices.
const (
	noticeStanding = iota
	noticeBallot
	noticePresent
)

// A notice of key noticeStanding says where a rank stands in an exchange, little-endian, in
// standingSize bytes and more:
//
//	0 view of the exchange | 8 attempt | 16 Over | 24 the last that was completed: view | 32 attempt
//	40 Start | 48 Confirmed | 56 agreements | 64 flags | 72 place
//	112 why the group has failed: what Abort told
const standingSize = 72 + join.PlaceSize

const (
	standHas = 1 << iota
	standIntact
	standJoins
	standFailed
	standCalls
)

// A notice of key noticePresent says that a rank is at the boundary before an exchange, and would
// take part in it but for a verdict that it waits for: view and attempt, little-endian.
const presentSize = 16

func encodePresent(at resync.Point) []byte {
	b := binary.LittleEndian.AppendUint64(make([]byte, 0, presentSize), at.View)
	return binary.LittleEndian.AppendUint64(b, at.Attempt)
}

func decodePresent(b []byte) (at resync.Point, err error) {
	if len(b) < presentSize {
		return at, fmt.Errorf("a boundary of %d bytes, want at least %d", len(b), presentSize)
	}
	return resync.Point{View: binary.LittleEndian.Uint64(b), Attempt: binary.LittleEndian.Uint64(b[8:])}, nil
}

// maxAttempt leaves room to count on from what a peer says.
const maxAttempt = 1 << 62

// told is what a standing has besides: resync.Standing.More.
type told struct {
	place  join.Place
	ballot uint64 // agreements that the rank has taken part in
	cause  []byte
}

func encodeTold(t resync.Told) []byte {
	more := t.More.(told)
	flags := uint64(0)
	for i, b := range []bool{t.Has, t.Intact, t.Joins, t.Failed, t.Calls} {
		if b {
			flags |= 1 << i
		}
	}
	b := make([]byte, 0, standingSize+len(more.cause))
	last := t.Last
	for _, n := range []uint64{t.At.View, t.At.Attempt, t.Over, last.At.View, last.At.Attempt, last.Start,
		last.Confirmed,
		more.ballot, flags} {
		b = binary.LittleEndian.AppendUint64(b, n)
	}
	b = b[:standingSize]
	more.place.Encode(b[72:])
	return append(b, more.cause...)
}

func decodeTold(b []byte) (t resync.Told, err error) {
	if len(b) < standingSize {
		return t, fmt.Errorf("a standing of %d bytes, want at least %d", len(b), standingSize)
	}
	u := func(at int) uint64 { return binary.LittleEndian.Uint64(b[at:]) }
	flags := u(64)
	t.At = resync.Point{View: u(0), Attempt: u(8)}
	if t.At.Attempt > maxAttempt {
		return t, fmt.Errorf("a standing in attempt %d, the last possible is %d", t.At.Attempt, uint64(maxAttempt))
	}
	last := resync.Outcome{At: resync.Point{View: u(24), Attempt: u(32)}, Start: u(40), Confirmed: u(48)}
	t.Standing = resync.Standing{Over: u(16), Last: last,
		Has: flags&standHas != 0, Intact: flags&standIntact != 0, Joins: flags&standJoins != 0,
		Failed: flags&standFailed != 0, Calls: flags&standCalls != 0,
		More: told{join.DecodePlace(b[72:]), u(56), b[standingSize:]}}
	return t, nil
}

// members of the group in the job's view: their slots, and the epoch of that for this group. With
// the proxy's lock, as most of this file.
func (g *Group) members(v membership.View) (active []int, epoch uint64) {
	if g.incarnations == nil {
		return v.Active(), v.Epoch
	}
	ranks, epoch := v.Subset(g.v.ranks, g.incarnations)
	for _, r := range ranks {
		active = append(active, g.slotOf(r))
	}
	return active, epoch
}

// view is what package resync has to know of a view of the job.
func (g *Group) view(v membership.View) resync.View {
	active, epoch := g.members(v)
	now := resync.View{Epoch: epoch, Members: active}
	if g.incarnations == nil {
		for _, slot := range active {
			now.Incarnations = append(now.Incarnations, v.Slots[slot].Incarnation)
		}
	}
	return now
}

// viewChanged looks at the job's new view. If the group has lost a rank, the next operation begins
// with that; the one in flight ends by itself, for its links with the lost one do, and may still
// end well: a rank that closes its group has sent all that it owed. If the group has only grown,
// that waits for a boundary.
func (g *Group) viewChanged() {
	g.sync.See(g.view(g.job.view()))
	if g.sync.Now().Epoch > g.v.epoch && !g.sync.Lost() && g.job.settings.AutoAdmit {
		g.hint = true
	}
	g.rough = true
	g.answer()
}

// hear takes in a notice.
func (g *Group) hear(slot, key int, value []byte) {
	var err error
	switch key {
	case noticeStanding:
		var t resync.Told
		if t, err = decodeTold(value); err == nil {
			if g.sync.Hear(slot, t) {
				g.settled()
			}
			g.rough = true
			g.answer()
		}
	case noticeBallot:
		var b ballot
		if b, err = decodeBallot(value); err == nil {
			g.ballots[slot] = b
		}
	case noticePresent:
		var at resync.Point
		if at, err = decodePresent(value); err == nil {
			g.present[slot] = at
			g.answer()
		}
	}
	if err != nil {
		g.job.log.Warn("a notice is not one", "from", slot, "err", err)
	}
}

// show tells the others that this rank has come to the boundary before the next exchange: it is
// late no longer.
func (g *Group) show() {
	if at := g.sync.Next(); g.shows.Before(at) {
		g.shows = at
		g.msgs.Notice(g.v.Active, noticePresent, encodePresent(at))
	}
}

// answer has the group, if no call of it runs, take part in an exchange that others wait for.
func (g *Group) answer() {
	if g.busy && !g.between || g.joins || g.halted() != nil || !g.sync.Asked(g.err != nil) {
		return
	}
	if g.job.judging() { // it answers after the verdict
		return
	}
	g.look()
	if !g.sync.Asked(g.err != nil) {
		return
	}
	if err := g.change(g.standing(), false, true); err != nil {
		g.err = err
	}
}

// look fails the group if it has to fail because of what happened since its last operation.
func (g *Group) look() {
	if g.err != nil {
		return
	}
	report := g.job.settings.OnFailure == Report
	if err := g.coll.Err(); err != nil && (report || !g.passing(err)) {
		g.err = g.fail(err)
	} else if slot, _ := g.gone(); report && slot != g.rank {
		g.err = g.fail(errMoved)
	}
}

// passing reports whether why the channel failed, between two operations, is nothing that the
// program has to know: the group goes on without those that it is about.
func (g *Group) passing(err error) bool {
	_, typed := g.explain(err)
	return g.survivable(typed)
}

// standing says where this rank stands between two operations.
func (g *Group) standing() resync.Standing {
	s := resync.Standing{Over: g.seq, Intact: true, Failed: g.err != nil}
	if g.gave == g.seq && g.seq > 0 { // its result, where there is one, does not count
		s.Over, s.Intact = g.seq-1, false
	}
	return s
}

// ready brings the group to where its next operation can run. The error is the operation's.
func (g *Group) ready() error {
	if err := g.halted(); err != nil {
		return err
	}
	if g.err != nil {
		return g.err
	}
	if err := g.verdicts(); err != nil {
		g.seq++
		g.fails(err)
		return err
	}
	broken := g.coll.Err() != nil
	switch {
	case broken && (g.job.settings.OnFailure == Report || !g.passing(g.coll.Err())):
		return nil // the operation finds it, and fails
	case g.job.settings.OnFailure == Report && g.sync.Lost(): // between two operations
		g.seq++
		g.err = g.fail(errMoved)
		return g.err
	case g.sync.Pending() || g.sync.Behind() || g.sync.Due(broken):
		if err := g.move(g.standing(), broken); err != nil {
			g.seq++ // it is over here, and not elsewhere
			g.fails(err)
			return err
		}
		if g.err != nil {
			return g.err
		}
	}
	if g.seq+1 < g.begins() {
		g.seq++
		return g.skipped()
	}
	g.rough = false
	return nil
}

// skipped is the outcome of an operation that other ranks could not run to its end.
func (g *Group) skipped() error {
	if g.lost != nil {
		e := *g.lost
		e.Call = fmt.Sprintf("operation #%d", g.seq)
		return &e
	}
	return &RankError{Rank: g.rank, Epoch: g.v.epoch, Call: fmt.Sprintf("operation #%d", g.seq), Reporter: g.rank,
		Err: errors.New("other ranks are past it")}
}

// move takes the group into an exchange, in the job's present view or anew in the one that it is
// in, and returns when that is complete: all members have told where they stand, and know with
// which operation to begin, or that the group has failed (g.err). renew asks for another exchange
// though nothing else does.
func (g *Group) move(mine resync.Standing, renew bool) error {
	began := time.Now()
	for {
		if err := g.halted(); err != nil {
			return err
		}
		if !g.sync.Member() {
			return ErrEvicted
		}
		var ended *p2p.Aborted
		if errors.As(g.coll.Err(), &ended) {
			if a, bad := decodeAbort(ended.Payload, g.v.Size); bad == nil && a.Kind == abortCall {
				return g.told(a) // for good
			}
		}
		switch due := g.sync.Due(renew); {
		case g.sync.Behind():
		case due && g.job.judging():
			if err := g.verdicts(); err != nil {
				return err
			}
			continue
		case due:
			if err := g.change(mine, renew, false); err != nil {
				return err
			}
			renew = false
			continue
		case !g.sync.Pending():
			return nil
		}
		missing := g.sync.Missing()
		if err := g.deserted(missing, began, "entering a view"); err != nil {
			return err
		}
		if err := g.pause(missing); err != nil {
			return g.overdue(err, "", missing)
		}
	}
}

// departure is how long a rank that leaves the job may take from closing a group until it is out of
// the view.
const departure = time.Second

// deserted returns an error if one of missing, for which a call has been waiting since began, has
// closed the group and stays in the job: it says nothing more in this group, and the view keeps it.
func (g *Group) deserted(missing []int, began time.Time, call string) error {
	for _, slot := range missing {
		if g.msgs.Closed(slot) && time.Since(began) > departure {
			return &RankError{Rank: slot, Epoch: g.v.epoch, Call: call, Reporter: g.rank,
				Err: errors.New("it closed its group and is still in the job, so that the group cannot go on without it")}
		}
	}
	return nil
}

// change leaves the channel for that of another exchange, and tells its members where this rank
// stands.
func (g *Group) change(mine resync.Standing, renew, passive bool) error {
	if slot, why := g.gone(); slot != g.rank {
		g.lost = &RankError{Rank: slot, Epoch: g.v.epoch, Reporter: g.rank, Err: why}
	}
	if !mine.Joins { // a rank that comes in has been in no epoch before
		g.coll.Leave(mine.Over)
	}
	more := told{place: g.job.session.Here, ballot: g.ballot.count()}
	if mine.Failed {
		more.cause = g.cause
	}
	mine.More = more
	tell, complete := g.sync.Enter(renew, passive, mine)
	if err := g.open(tell.At); err != nil {
		return err
	}
	g.msgs.Notice(g.v.Active, noticeStanding, encodeTold(tell))
	g.job.log.Debug("entering a view", "group", g.id(), "epoch", tell.At.View, "attempt", tell.At.Attempt,
		"over", mine.Over, "has", mine.Has, "intact", mine.Intact, "failed", mine.Failed, "calls", mine.Calls,
		"passive", passive, "missing", g.sync.Missing())
	if g.rough = true; complete {
		g.settled()
	}
	return nil
}

// open opens the channel for an exchange.
func (g *Group) open(at resync.Point) error {
	view, ranks := g.job.view(), g.v.ranks
	if g.incarnations == nil && view.Size() > len(ranks) {
		ranks = upTo(view.Size())
	}
	linked := make([]int, len(ranks))
	for i := range linked {
		linked[i] = -1
	}
	active := g.sync.In().Members
	for _, slot := range active {
		linked[slot] = ranks[slot]
	}
	c, err := g.coll.Next(p2p.Epoch(at), linked)
	if err != nil {
		return err
	}
	for slot, b := range g.ballots { // of another life than the one that is there now
		if b.n > 0 && g.incarnations == nil && slot < g.v.job.Size() && slot < view.Size() &&
			g.v.job.Slots[slot].Incarnation != view.Slots[slot].Incarnation {
			delete(g.ballots, slot)
		}
	}
	g.coll, g.hint = c, false
	g.replace(func(v *groupView) {
		v.epoch, v.job, v.ranks, v.Size, v.Active = at.View, view, ranks, len(ranks), active
		v.Hosts = nil // until the exchange tells
	})
	g.run.Open(c, g.v.ranks)
	return nil
}

// settled draws the conclusion of an exchange that is complete.
func (g *Group) settled() {
	o, failed := g.sync.Outcome()
	g.job.log.Debug("entered a view", "group", g.id(), "epoch", o.At.View, "attempt", o.At.Attempt,
		"start", o.Start, "confirmed", o.Confirmed, "failed", failed)
	places := slices.Clone(g.job.places)
	for len(places) < g.job.settings.MaxSize {
		places = append(places, join.Place{Cores: 1})
	}
	ballots := uint64(0) // agreements so far
	for _, slot := range g.v.Active {
		s, _ := g.sync.Told(slot)
		more := s.More.(told)
		places[g.v.ranks[slot]] = more.place
		switch _, told := g.ballots[slot]; {
		case !s.Joins:
			ballots = max(ballots, more.ballot)
		case slot == g.rank:
			g.ballot = abstains
		case !told:
			g.ballots[slot] = abstains
		}
		if failed && s.Failed && g.err == nil {
			if a, bad := decodeAbort(more.cause, g.v.Size); bad == nil {
				g.err, g.cause = g.told(a), more.cause
			} else {
				g.err = &RankError{Rank: slot, Epoch: g.v.epoch, Call: fmt.Sprintf("operation #%d", g.seq+1),
					Reporter: slot,
					Err:      errors.New("its group has failed")}
			}
		}
	}
	if g.job.settings.AutoAdmit { // else Admit does
		g.join(ballots)
	}
	if g.incarnations == nil {
		g.job.places = places
		g.job.shareCores(g)
	}
	g.locate(places)
}

// pause waits a little for what missing ranks have to tell, or if there are none for anything.
func (g *Group) pause(missing []int) error {
	if at := g.job.isolated(); at.Why != "" && time.Since(at.Since) > g.job.settings.Window {
		return fmt.Errorf("%w: %s", ErrIsolated, at.Why)
	}
	if len(missing) == 0 {
		return g.job.proxy.Progress(&g.wait)
	}
	return g.msgs.Reach(&g.wait, missing[0])
}

// overdue is the error of a call that must not wait any longer for what missing ranks have not
// told: of an agreement, or, if call is empty, of an exchange, whose members it tells.
func (g *Group) overdue(err error, call string, missing []int) error {
	switch {
	case errors.Is(err, p2p.ErrClosed):
		return ErrClosed
	case !errors.Is(err, p2p.ErrTimeout) && !errors.Is(err, context.DeadlineExceeded) &&
		!errors.Is(err, context.Canceled):
		return err
	}
	a := &wireAbort{Kind: abortTimeout, A: g.rank, Call: exec.EnterToken, After: int64(g.wait.Waited()),
		Canceled: errors.Is(err, context.Canceled)}
	for _, slot := range missing {
		a.Missing = append(a.Missing, exec.Seen{Rank: slot})
	}
	late := g.told(a).(*TimeoutError)
	for i := range late.Missing {
		if why := g.job.proxy.Down(g.jobRank(late.Missing[i].Rank)); why != nil {
			late.Missing[i].What = fmt.Sprintf("not reachable (%v), and not removed from the view", why)
		}
	}
	if call != "" {
		late.Call = call
	} else {
		g.cause = a.encode()
		g.coll.Abort(late, g.cause)
	}
	return late
}

// unheard lists the ranks whose standing is missing.
func (g *Group) unheard() (all []exec.Seen) {
	for _, slot := range g.sync.Missing() {
		t, ok := g.coll.Seen(slot)
		all = append(all, exec.Seen{Rank: slot, Has: ok, Last: t})
	}
	return all
}

func (g *Group) jobRank(slot int) int {
	if slot < len(g.v.ranks) {
		return g.v.ranks[slot]
	}
	return slot // the group of all ranks grows
}
