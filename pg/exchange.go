package pg

import (
	"cmp"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"time"

	"tutti/collectives"
	"tutti/p2p"
	"tutti/pg/internal/exec"
	"tutti/pg/internal/join"
	"tutti/pg/internal/resync"
	"tutti/pg/membership"
)

// A group moves from one view to the next by an exchange. Package resync decides; this file sends
// what the ranks tell each other, as notices on the message channel, and opens the channels.

// passage is a group's state of view changes beside package resync:
//
//   - rough is set by everything after which the next operation may not simply run: a new view,
//     a notice of an exchange, a failure, an accusation, a rank that closes the group and waits for
//     this one. While it is not set, no exchange is under way or wanted, and the next operation
//     checks only err. Group.ready checks and clears it.
//   - joins is set only during Join into a running job: the rank answers no exchange before it
//     has begun its own.
//   - hint is set, with AutoAdmit only, from a view that has only grown until the group enters
//     another one.
//   - cause and of are set when an operation fails, or the group with that of another rank, and
//     sent with all standings that follow. Recover clears cause.
//   - given is set when a call gives an exchange up, until the exchange is complete or this rank is
//     in another one.
//   - skips covers the operations that exchanges have ended and this rank has not called.
//   - parts is set from the beginning of the wait in Close on: only in a closed group.
//   - agreement.between is set only while a call has the turn (Group.busy).
//
// The tests check this after every event (illegal in export_test.go), but what is said of cause.
// Otherwise the fields are independent of each other: lost is for the texts of errors only, and
// Group.attended concerns messages between two ranks, which belong to no view.
type passage struct {
	sync  *resync.Machine // the exchange that the group is in, or was in last
	rough bool            // the next operation has to check for changes first
	joins bool            // the rank is entering the group's view, and its program has no group yet
	hint  bool            // the job has grown, and the other ranks have to be told
	lost  *RankError      // the latest
	held  uint64          // the view of the latest complete exchange
	cause []byte          // why an operation or the group has failed, as the other ranks are told
	of    uint64          // that operation
	given *gaveUp         // the exchange that this rank is in
	skips []skip          // in order

	present map[int]resync.Point // boundaries that the other ranks have reached, by slot
	shows   resync.Point         // the boundary that this rank has announced

	partings resync.Partings
	parts    bool // this rank waits in Close
}

// The keys of a group's notices.
const (
	noticeStanding = iota
	noticeBallot
	noticePresent
	noticeParting
)

// A notice of key noticeStanding says where a rank stands in an exchange, little-endian, in
// standingSize bytes and more:
//
//	0 view of the exchange | 8 attempt | 16 Over | 24 last complete exchange: view | 32 attempt
//	40 Start | 48 Confirmed | 56 agreements | 64 flags | 72 Given | 80 place
//	128 the operation that has failed last | 136 Since | 144 Stops
//	176 why that operation or the group has failed: the payload of Abort
const (
	standingPlace = 80
	standingOf    = standingPlace + join.PlaceSize
	standingSince = standingOf + 8
	standingStops = standingSince + 8
	standingSize  = standingStops + 8*len(resync.Stops{})
)

const (
	standHas = 1 << iota
	standIntact
	standJoins
	standFailed
	standCalls
	standHost
)

// A notice of key noticePresent says that a rank has reached the boundary before an exchange, and
// takes part in it once a verdict is there: view and attempt, little-endian.
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

// A gaveUp is why this rank has given an exchange up, what its members are told of that, the first
// operation that has ended with it here, and the slots that were missing.
type gaveUp struct {
	why     error
	tell    []byte
	first   uint64
	missing []int
}

// maxNumber bounds the numbers of attempts, operations and agreements that a peer may send, so that
// later ones and sums cannot overflow.
const maxNumber = 1 << 62

// told holds the fields of a standing beyond package resync: resync.Standing.More.
type told struct {
	place  join.Place
	ballot uint64 // agreements that the rank has taken part in
	host   bool   // its short vectors in the memory of devices go through the host: see packets.go
	of     uint64 // the operation that cause is of
	cause  []byte
}

// A skip says why operations have ended that this rank has not called.
type skip struct {
	last uint64 // of them; the first follows those of the skip before
	why  error
	loss bool // no rank has failed for another reason than a lost rank
}

func encodeTold(t resync.Told) []byte {
	more := t.More.(told)
	flags := uint64(0)
	for i, b := range []bool{t.Has, t.Intact, t.Joins, t.Failed, t.Calls, more.host} {
		if b {
			flags |= 1 << i
		}
	}
	b := make([]byte, 0, standingSize+len(more.cause))
	last := t.Last
	for _, n := range []uint64{t.At.View, t.At.Attempt, t.Over, last.At.View, last.At.Attempt, last.Start,
		last.Confirmed, more.ballot, flags, t.Given} {
		b = binary.LittleEndian.AppendUint64(b, n)
	}
	b = b[:standingSize]
	more.place.Encode(b[standingPlace:])
	binary.LittleEndian.PutUint64(b[standingOf:], more.of)
	binary.LittleEndian.PutUint64(b[standingSince:], t.Since)
	for i, n := range t.Stops {
		binary.LittleEndian.PutUint64(b[standingStops+8*i:], n)
	}
	return append(b, more.cause...)
}

func decodeTold(b []byte) (t resync.Told, err error) {
	if len(b) < standingSize {
		return t, fmt.Errorf("a standing of %d bytes, want at least %d", len(b), standingSize)
	}
	u := func(at int) uint64 { return binary.LittleEndian.Uint64(b[at:]) }
	flags := u(64)
	t.At = resync.Point{View: u(0), Attempt: u(8)}
	last := resync.Outcome{At: resync.Point{View: u(24), Attempt: u(32)}, Start: u(40), Confirmed: u(48)}
	t.Standing = resync.Standing{Over: u(16), Given: u(72), Since: u(standingSince), Last: last,
		Has: flags&standHas != 0, Intact: flags&standIntact != 0, Joins: flags&standJoins != 0,
		Failed: flags&standFailed != 0, Calls: flags&standCalls != 0,
		More: told{join.DecodePlace(b[standingPlace:]), u(56), flags&standHost != 0, u(standingOf), b[standingSize:]}}
	most := max(t.At.Attempt, t.Over, t.Given, t.Since, last.Start, last.Confirmed, u(56))
	for i := range t.Stops {
		t.Stops[i] = u(standingStops + 8*i)
		most = max(most, t.Stops[i])
	}
	if most > maxNumber {
		return t, fmt.Errorf("a standing with the number %d, the highest possible is %d", most, uint64(maxNumber))
	}
	return t, nil
}

// members returns the slots of the group's members in the job's view v, and the group's epoch for
// it. With the proxy's lock, like most of this file.
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

// view returns the view v of the job for package resync.
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

// testHookChanged is called, with the proxy's lock, when an event has changed the state of view
// changes.
var testHookChanged = func(*Group) {}

// viewChanged reacts to the job's new view. If the group has lost a rank, the next operation begins
// with an exchange. The operation in flight is left alone: its links to the lost rank fail, or it
// succeeds if that rank had sent everything before it closed the group. If the group has only
// grown, the exchange waits for a boundary.
func (g *Group) viewChanged() {
	g.sync.See(g.view(g.job.view()))
	if g.sync.Now().Epoch > g.v.epoch && !g.sync.Lost() && g.job.settings.AutoAdmit {
		g.hint = true
	}
	if x := g.packets.now; x != nil && g.moved() && g.sync.Lost() { // graphs may wait for the lost rank
		x.Stop()
	}
	g.rough = true
	g.answer()
	testHookChanged(g)
}

// hear handles a notice.
func (g *Group) hear(slot, key int, value []byte) {
	defer testHookChanged(g)
	var err error
	switch key {
	case noticeStanding:
		var t resync.Told
		if t, err = decodeTold(value); err == nil {
			if old, ok := g.sync.Heard(slot); !ok || old.At.Before(t.At) {
				g.relay(slot, t)
			}
			if g.sync.Hear(slot, t) {
				g.settled()
			}
			g.rough = true
			g.answer()
			if g.sync.At().Before(t.At) { // the rank does nothing more in this one
				g.orphan(slot, p2p.ErrLeft)
			}
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
	case noticeParting:
		var t resync.Parting
		if t, err = decodeParting(value); err == nil {
			g.partings.Hear(slot, t)
			g.rough = true
			g.part()
		}
	}
	if err != nil {
		g.job.log.Warn("a notice is not one", "from", slot, "err", err)
	}
}

// show tells the other ranks that this one has reached the boundary before the next exchange and is
// no longer late.
func (g *Group) show() {
	if at := g.sync.Next(); g.shows.Before(at) {
		g.shows = at
		g.msgs.Notice(g.v.Active, noticePresent, encodePresent(at))
	}
}

// answer joins an exchange that other ranks wait for, if no call of the group is running.
func (g *Group) answer() {
	if g.busy && !g.between || g.joins || g.halted() != nil || !g.sync.Asked(g.err != nil) {
		return
	}
	if g.job.judging() { // the rank joins after the verdict
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

// look fails the group if an event since its last operation requires that. If no operation has run
// here since the exchange, an operation that a rank has given up is one that the program of this
// rank has yet to call, and that fails then. look keeps the lock: a link may be delivering a
// notice.
func (g *Group) look() {
	if g.err != nil {
		return
	}
	report := g.job.settings.OnFailure == Report
	err := g.coll.Err()
	if !g.sync.Began(g.seq) && errors.As(err, new(*p2p.Aborted)) {
		err = nil
	}
	if err != nil && (report || !g.passing(err)) {
		g.err = g.failing(err, false)
	} else if slot, _ := g.gone(); report && slot != g.rank {
		g.err = g.failing(errMoved, false)
	}
}

// passing reports whether the failure why of the channel, between two operations, can be hidden
// from the program because the group goes on without the ranks that caused it.
func (g *Group) passing(err error) bool {
	_, typed := g.explain(err)
	return g.survivable(typed)
}

// standing returns where this rank stands between two operations.
func (g *Group) standing() resync.Standing {
	return g.sync.Between(g.seq)
}

// ready brings the group into a state in which the current call can run as its next operation. The
// error is the operation's. The group's view may be another one afterwards.
func (g *Group) ready() error {
	if err := g.catchUp(); err != nil {
		return err
	}
	if s, ok := g.skip(); ok {
		return s.why
	}
	return nil
}

// catchUp enters the view that is due before the next operation. An error is that operation's.
func (g *Group) catchUp() error {
	if err := g.halted(); err != nil {
		return err
	}
	if g.err != nil {
		return g.refused()
	}
	if err := g.verdicts(g.standing().Over + 1); err != nil {
		return g.forgone(err)
	}
	for {
		broken := g.coll.Err() != nil
		if broken && (g.job.settings.OnFailure == Report || !g.passing(g.coll.Err())) {
			return nil // the operation fails
		}
		if g.job.settings.OnFailure == Report && g.sync.Lost() { // between two operations
			return g.miss(errMoved)
		}
		renew := broken || g.sync.Awaited(g.seq)
		if !g.sync.Pending() && !g.sync.Behind() && !g.sync.Due(renew) {
			g.rough = g.sought()
			return nil
		}
		if err := g.move(g.standing(), renew); err != nil {
			return g.forgone(err)
		}
		if g.err != nil {
			return g.refused()
		}
	}
}

// skip counts the next operation if an exchange has ended it before this rank called it.
func (g *Group) skip() (s skip, ok bool) {
	if g.seq+1 >= g.begins() {
		g.skips = nil
		return skip{}, false
	}
	g.seq++
	g.rough = true
	for g.skips[0].last < g.seq {
		g.skips = g.skips[1:]
	}
	s = g.skips[0]
	if lost, is := s.why.(*RankError); is {
		own := *lost
		own.Call = fmt.Sprintf("operation #%d", g.seq)
		s.why = &own
	}
	return s, true
}

// reasons returns why operations from number from on have failed at members, as these have told in
// the latest exchange: the first reason that is the loss of a rank, and the first that is not.
func (g *Group) reasons(from uint64) (loss, other *wireAbort) {
	for _, slot := range g.v.Active {
		s, ok := g.sync.Told(slot)
		if !ok || s.More.(told).of < from {
			continue
		}
		switch a, bad := decodeAbort(s.More.(told).cause, g.v.Size); {
		case bad != nil || a.Kind == abortCall:
		case a.Kind != abortRank:
			other = cmp.Or(other, a)
		default:
			loss = cmp.Or(loss, a)
		}
	}
	return loss, other
}

// unfinished notes why the operations before number start that this rank has not called have ended,
// in the latest exchange, unless an earlier one has ended them.
func (g *Group) unfinished(start uint64) {
	from := g.seq + 1
	if n := len(g.skips); n > 0 {
		from = max(from, g.skips[n-1].last+1)
	}
	if start <= from {
		return
	}
	loss, other := g.reasons(from)
	s := skip{last: start - 1, loss: other == nil}
	switch {
	case other != nil:
		s.why = g.told(other)
	case g.lost != nil && g.lost.Epoch >= g.held:
		s.why = g.lost
	case loss != nil:
		lost := g.told(loss).(*RankError)
		lost.Epoch = g.held
		s.why = lost
	default:
		s.why = g.rankError(g.rank, g.rank, "", errors.New("other ranks are past it"))
	}
	g.skips = append(g.skips, s)
}

// move enters an exchange, for the job's present view or for another attempt in the group's view.
// It returns when the exchange is complete: all members know with which operation to begin, or that
// the group has failed (g.err). renew demands another exchange even if nothing else does. Another
// one may be due by then: mine is not where this rank stands in it.
func (g *Group) move(mine resync.Standing, renew bool) error {
	began, entered := time.Now(), false
	renew = renew && !g.sync.Pending() // else the caller decides when that exchange is complete
	for {
		if err := g.halted(); err != nil {
			return err
		}
		if !g.sync.Member() {
			return g.job.eviction()
		}
		switch due := g.sync.Due(renew); {
		case entered && !g.sync.Pending():
			return nil
		case g.sync.Behind():
		case due && g.job.judging():
			if err := g.verdicts(mine.Over + 1); err != nil {
				return err
			}
			continue
		case due:
			if err := g.change(mine, renew, false); err != nil {
				return err
			}
			renew, entered = false, true
			continue
		case !g.sync.Pending():
			return nil
		}
		missing := g.sync.Missing()
		if err := g.deserted(missing, "entering a view"); err != nil {
			var lost *RankError
			errors.As(err, &lost)
			a := wireAbort{Kind: abortDeserted, A: g.rank, B: lost.Rank, Call: exec.EnterToken}
			g.cause, g.of = a.encode(), g.seq+1
			return err
		}
		if err := g.irreplaceable(missing, "entering a view"); err != nil {
			return err
		}
		if err := g.pause(g.reach(missing, time.Since(began))); err != nil {
			return g.overdue(err, "", missing, mine.Over+1)
		}
	}
}

// The members of an exchange are a tree, along which they pass on the standings of others, so that
// a member needs few links to learn all. A member that waits for long makes links to all those
// whose standings are missing, because one between may have stopped.

// relayed is how long a member relies on others to pass on standings, at most half of its time.
const relayed = 250 * time.Millisecond

// neighbours returns the slots of this rank's parent and children in the tree of the latest view's
// members; parent is -1 at its root.
func (g *Group) neighbours() (parent int, children []int) {
	members := g.sync.Now().Members
	at, is := slices.BinarySearch(members, g.rank)
	if !is {
		return -1, nil
	}
	return collectives.StarNeighbours(members, at)
}

// relay passes a standing on to this rank's neighbours, which may know it.
func (g *Group) relay(slot int, t resync.Told) {
	parent, to := g.neighbours()
	if slot == g.rank || len(to) == 0 {
		return
	}
	if parent >= 0 {
		to = append(to, parent)
	}
	g.msgs.Relay(to, slot, noticeStanding, encodeTold(t))
}

// reach returns the members that an exchange needs links to, given those whose standings are
// missing and how long this rank has waited for them.
func (g *Group) reach(missing []int, waited time.Duration) []int {
	if parent, _ := g.neighbours(); parent >= 0 && len(missing) > 0 && waited < relayed && !g.wait.Late() {
		return []int{parent}
	}
	return missing
}

// departure bounds the time from a leaving rank's close of a group until it is out of the view: see
// p2p.Proxy.Close.
const departure = 5 * time.Second

var errDeserted = errors.New("it closed its group, which cannot go on without it while it stays in the job")

// deserted returns an error if one of missing, which a call waits for, has closed the group and
// stays in the job: such a rank sends nothing more in this group, and the view keeps it.
func (g *Group) deserted(missing []int, call string) error {
	for _, slot := range missing {
		if g.msgs.ClosedFor(slot) > departure {
			return g.rankError(slot, g.rank, call, errDeserted)
		}
	}
	return nil
}

// irreplaceable returns an error if one of missing is lost and the job cannot remove it.
func (g *Group) irreplaceable(missing []int, call string) error {
	if g.job.roster != nil {
		return nil
	}
	for _, slot := range missing {
		if err := g.job.proxy.Down(g.jobRank(slot)); err != nil {
			return g.rankError(slot, g.rank, call, err)
		}
	}
	return nil
}

// change replaces the channel by that of another exchange, and tells its members where this rank
// stands.
func (g *Group) change(mine resync.Standing, renew, passive bool) error {
	if slot, why := g.gone(); slot != g.rank {
		g.lost = g.rankError(slot, g.rank, "", why)
	}
	if !mine.Joins { // a rank that comes in was in no epoch before
		over := mine.Over
		if g.given != nil { // others may run in the exchange what has ended here
			over = min(over, g.given.first-1)
		}
		g.coll.Leave(over)
		mine.Failed = g.err != nil
	}
	g.given = nil
	mine.More = told{g.job.session.Here, g.ballot.count(), g.packets.refused != nil, g.of, g.cause}
	tell, complete := g.sync.Enter(renew, passive, mine)
	if err := g.open(tell.At); err != nil {
		return err
	}
	g.msgs.Notice(g.v.Active, noticeStanding, encodeTold(tell))
	for _, slot := range g.v.Active { // the ranks that were here first
		if t, ok := g.sync.Heard(slot); ok && t.At == tell.At {
			g.relay(slot, t)
		}
	}
	g.job.log.Debug("entering a view", "group", g.id(), "epoch", tell.At.View, "attempt", tell.At.Attempt,
		"over", mine.Over, "given", mine.Given, "has", mine.Has, "intact", mine.Intact, "failed", mine.Failed,
		"calls", mine.Calls, "passive", passive, "missing", g.sync.Missing())
	if g.rough = true; complete {
		g.settled()
	}
	testHookChanged(g)
	return nil
}

// open opens the channel of an exchange.
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
	for slot, b := range g.ballots { // of another incarnation than the present one
		if b.n > 0 && g.incarnations == nil && slot < g.v.job.Size() && slot < view.Size() &&
			g.v.job.Slots[slot].Incarnation != view.Slots[slot].Incarnation {
			delete(g.ballots, slot)
		}
	}
	g.disconnect()
	g.coll, g.hint = c, false
	g.replace(func(v *groupView) {
		v.epoch, v.job, v.ranks, v.Size, v.Active = at.View, view, ranks, len(ranks), active
		v.Hosts = nil // known after the exchange
	})
	g.run.Open(c, g.v.ranks)
	g.forgetGone()
	return nil
}

// settled applies the outcome of a complete exchange.
func (g *Group) settled() {
	o, failed := g.sync.Outcome()
	g.job.log.Debug("entered a view", "group", g.id(), "epoch", o.At.View, "attempt", o.At.Attempt,
		"start", o.Start, "confirmed", o.Confirmed, "failed", failed)
	places := slices.Clone(g.job.places)
	for len(places) < g.job.settings.MaxSize {
		places = append(places, join.Place{Cores: 1})
	}
	stale := g.err == nil || !g.sync.Fails(g.rank) // its operation is over
	ballots := uint64(0)                           // agreements until now
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
		if failed && stale && g.sync.Fails(slot) {
			stale = false
			if a, bad := decodeAbort(more.cause, g.v.Size); bad == nil {
				g.err, g.cause, g.of = g.told(a), more.cause, more.of
			} else {
				g.err = g.rankError(slot, slot, fmt.Sprintf("operation #%d", g.seq+1),
					errors.New("its group has failed"))
			}
		}
	}
	if !failed && g.seq < o.Start { // what has failed here since this rank told its standing is over
		g.err, g.cause = nil, nil
	}
	if late := g.given; late != nil {
		if g.seq >= o.Start { // the others run an operation that this rank has given up
			g.coll.Abort(late.why, late.tell)
		}
		if g.job.roster != nil {
			for _, p := range g.job.roster.AccusedLocked() {
				if slices.Contains(late.missing, slices.Index(g.v.ranks, p.Slot)) { // it has come
					g.job.roster.AcquitLocked(p)
				}
			}
		}
		g.given = nil
	}
	g.unfinished(o.Start)
	g.held = g.v.epoch
	if g.job.settings.AutoAdmit { // else Admit does
		g.join(ballots)
	}
	if g.incarnations == nil {
		g.job.places = places
		g.job.shareCores(g)
	}
	g.locate(places)
	for _, slot := range g.v.Active {
		if s, _ := g.sync.Told(slot); s.More.(told).host {
			g.refuse(fmt.Errorf("so it was at rank %d in an earlier view", slot))
		}
	}
}

// mostSought is how many more ranks than the first a call seeks links to at a time, before half of
// its time has passed.
const mostSought = 64

// pause waits for a moment for notices of missing ranks or, if there are none, for any event. At
// first it seeks a link to the first of them only. A call that has waited for long seeks more: the
// first may be late, and those without a link would be taken for late as well.
func (g *Group) pause(missing []int) error {
	if err := g.job.stranded(); err != nil {
		return err
	}
	if len(missing) == 0 {
		return g.job.proxy.Progress(&g.wait)
	}
	if g.wait.Long() {
		more := missing[1:]
		if !g.wait.Late() {
			more = more[:min(len(more), mostSought)]
		}
		for _, slot := range more {
			g.msgs.Request(slot)
		}
	}
	return g.msgs.Reach(&g.wait, missing[0])
}

// overdue returns the error of a call whose time ended while it waited for missing ranks: of an
// agreement, or, if call is empty, of an exchange, whose members are then informed if they run an
// operation that has ended here: first, or a later one. While the exchange is not complete, that is
// not known. It will be complete when none is missing any more.
func (g *Group) overdue(err error, call string, missing []int, first uint64) error {
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
		return late
	}
	g.cause, g.of = a.encode(), g.seq+1
	switch {
	case g.sync.Pending():
		late := &gaveUp{late, nil, first, slices.Clone(missing)}
		if g.given != nil {
			late.first, late.missing = g.given.first, append(late.missing, g.given.missing...)
		}
		a.Missing = nil
		late.tell = a.encode()
		g.given = late
	case first >= g.begins():
		g.coll.Abort(late, g.cause)
	}
	return late
}

// unheard lists the ranks whose standing has not arrived.
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
