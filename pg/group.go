package pg

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"hash/fnv"
	"math"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"tutti/collectives"
	"tutti/device"
	"tutti/internal/grain"
	"tutti/internal/ident"
	"tutti/p2p"
	"tutti/pg/flight"
	"tutti/pg/internal/exec"
	"tutti/pg/internal/join"
	"tutti/pg/internal/observe"
	"tutti/pg/internal/resync"
	"tutti/pg/membership"
)

// A Group is one rank's handle on a process group with slots 0..Size-1. This rank has slot Rank.
//
// All ranks of a group call the same collectives, in the same order, with the same arguments.
// Collectives run one at a time, in that order. A blocking call runs on the caller's goroutine when
// all earlier operations have ended; its ctx bounds it from the call on. Methods and package
// functions may be called from several goroutines, which must then agree on the order. Send and
// Recv are not part of that order.
//
// After an error other than *ArgumentError, a collective has no result (an in-place buffer may be
// partly overwritten), and the group has failed: every later collective returns an error at once,
// at every rank, until Recover; or, as Config.OnFailure says, the group continues by itself among
// the remaining ranks. After a call has returned, with any outcome, nothing accesses its buffers.
type Group struct {
	job  *job // shared with subgroups
	rank int
	name p2p.Name // of coll; msgs has the next number
	// The members when the group was made: a subgroup never admits others. nil: the group of all
	// ranks.
	incarnations []uint64
	in           numbering // of its errors

	coll *p2p.Channel // collectives
	msgs *p2p.Channel // Send and Recv

	// Under the proxy's lock, except shown.
	line    line
	devices devices
	packets packets
	works   works
	busy    bool                      // a call has the turn
	seq     uint64                    // number of the latest operation
	err     error                     // why the group failed, until Recover
	aborted error                     // by Abort, final
	v       *groupView                // the group's view
	shown   atomic.Pointer[groupView] // the view that the program sees: it changes at the end of a call
	passage
	agreement

	wait     p2p.Wait
	attended bool // a goroutine polls for the started messages
	run      *exec.Runner
	track    observe.Track

	closed atomic.Bool // set before the last hold of the proxy's lock that may add to wg
	ending sync.Once   // of Close
	wg     sync.WaitGroup
	ctx    context.Context // ends at Close
	cancel context.CancelFunc
}

// View lists the active slots of a group.
type View struct {
	Epoch  uint64
	Active []int // the active slots, ascending
}

// Rank returns this rank's slot.
func (g *Group) Rank() int { return g.rank }

// Size returns the number of slots. It grows when the job does, and never shrinks.
func (g *Group) Size() int {
	return g.shown.Load().Size
}

// View returns the view in which the latest call on the group ended: it does not change between two
// calls.
func (g *Group) View() View {
	v := g.shown.Load()
	return View{Epoch: v.epoch, Active: slices.Clone(v.Active)}
}

// A groupView is a group in one view. It is immutable; a new one replaces it.
type groupView struct {
	epoch         uint64
	job           membership.View // in which the group's view was entered
	ranks         []int           // of the job, by slot
	exec.Topology                 // of the group
}

// replace replaces the present view by a copy that f has changed.
func (g *Group) replace(f func(v *groupView)) {
	v := *g.v
	f(&v)
	g.v = &v
}

// begins returns the operation that the group's view began with. Earlier ones that had not begun
// are skipped.
func (g *Group) begins() uint64 {
	o, _ := g.sync.Outcome()
	return o.Start
}

// newGroup makes the handle of a group among ranks of the job; its two channels have this name and
// the one with the next number. incarnations are those of the members, nil for the group of all
// ranks, and so are their places in the channels. The group enters its first view by move unless
// epoch is that view's.
func newGroup(j *job, ranks []int, rank int, name p2p.Name, incarnations, places []uint64, at membership.View,
	epoch uint64) (*Group, error) {
	g := &Group{job: j, rank: rank, name: name, incarnations: incarnations,
		v: &groupView{epoch: epoch, job: at, ranks: ranks, Topology: exec.Topology{Size: len(ranks),
			Active: upTo(len(ranks)), Algo: j.settings.algo}}}
	if incarnations != nil && (len(ranks) != at.Size() || !slices.Equal(ranks, upTo(len(ranks)))) {
		g.in = ranks
	}
	g.works.kick = make(chan struct{}, 1)
	g.devices.piece, g.devices.staging = grain.Get().Piece, &j.staging
	g.ballots, g.present = map[int]ballot{}, map[int]resync.Point{}
	o, err := j.observe()
	if err != nil {
		return nil, err
	}
	g.ctx, g.cancel = context.WithCancel(context.Background())
	fail := func(err error) (*Group, error) {
		g.cancel()
		for _, c := range []*p2p.Channel{g.coll, g.msgs} {
			if c != nil {
				c.Close()
			}
		}
		return nil, err
	}
	if g.coll, err = j.proxy.Open(name, p2p.Epoch{View: epoch}, ranks, places, false); err != nil {
		return fail(err)
	}
	all := ranks
	if incarnations == nil {
		all = upTo(max(len(ranks), j.settings.MaxSize))
	}
	if g.msgs, err = j.proxy.Open(p2p.Name{Maker: name.Maker, Number: name.Number + 1}, p2p.Epoch{}, all,
		places, true); err != nil {
		return fail(err)
	}
	g.plan()
	g.wait.OnLong(g.long)
	j.proxy.Lock()
	g.coll.Restrict(incarnations)
	g.msgs.Restrict(incarnations)
	if j.leaving {
		j.proxy.Unlock()
		return fail(ErrClosed)
	}
	if j.roster != nil && j.roster.EvictedLocked() {
		err := j.eviction()
		j.proxy.Unlock()
		return fail(err)
	}
	g.sync = resync.New(rank, resync.View{Epoch: epoch, Members: g.v.Active})
	g.joins = incarnations == nil && epoch < at.Epoch
	g.shown.Store(g.v)
	g.msgs.OnNotice(g.hear)
	g.msgs.OnLeft(func(slot int) { g.orphan(slot, errDeserted) })
	g.track.Open(o.Recorder(), g.id(), g.rank, g.v.ranks)
	g.wait.OnSleep(g.track.Awaits)
	j.groups[g] = struct{}{}
	if j.session.Mapped || j.local {
		if err = g.run.Expose(); err != nil {
			j.log.Warn("peers cannot map this rank's memory; what Alloc returns is copied like any other", "err", err)
		}
	}
	j.proxy.Unlock()
	return g, nil
}

// plan gives the group a new Runner.
func (g *Group) plan() {
	g.run = exec.New(exec.Config{Proxy: g.job.proxy, Wait: &g.wait, Rank: g.rank, Region: g.job.memory.region,
		Single: g.job.settings.single, Block: grain.Get().Block, Chosen: g.track.Chosen, Keep: g.track.Keep,
		Drop: g.job.drop})
	g.run.Open(g.coll, g.v.ranks)
	g.run.Settle(g.v.Topology)
}

// locate computes the topology from the ranks' places: the same at all ranks.
func (g *Group) locate(places []join.Place) {
	index := map[uint64]int{}
	hosts := make([]int, len(g.v.Active))
	ranksOn := map[join.CPUSet]int{}
	cores := 0 // 0: as many as ranks
	mapped, exchanges := g.job.session.Mapped, len(g.v.Active) <= device.MaxExchangeRanks
	user := uint32(0) // of the ranks so far, but root, if they may map each other's memory
	for i, slot := range g.v.Active {
		p := places[g.v.ranks[slot]]
		h, ok := index[p.Machine]
		if !ok {
			h = len(index)
			index[p.Machine] = h
		}
		hosts[i] = h
		mapped, exchanges = mapped && p.Maps && ident.MayTalk(user, p.User), exchanges && p.Exchanges
		user = max(user, p.User)
		ranksOn[p.CPUSet()]++
	}
	for _, slot := range g.v.Active {
		p := places[g.v.ranks[slot]]
		if ranksOn[p.CPUSet()] > p.Cores && (cores == 0 || p.Cores < cores) {
			cores = p.Cores
		}
	}
	if g.packets.refused == nil && (!exchanges || len(index) > 1) {
		g.packets.refused = errNoExchange
	}
	was := g.v.Table.Hash()
	g.replace(func(v *groupView) {
		v.Hosts, v.Table = nil, nil
		if len(index) > 1 {
			v.Hosts = hosts
		}
		v.Caps = collectives.Caps{Cores: cores, SharedMemory: mapped && len(index) == 1,
			Mapped: mapped && len(index) == 1}
		v.Asks = v.Caps.Mapped || g.job.local && g.job.settings.Devices != nil
		if t := g.job.session.Table(); g.differ(places) < 0 && t.Fits(len(v.Active), v.Hosts, v.Caps) {
			v.Table = t
		}
	})
	// A rank that comes in has had no table here.
	if (g.v.Table.Hash() != was || g.joins && g.differ(places) < 0) && g.firstWithTable(places) == g.rank {
		g.untuned(places)
	}
	g.run.Settle(g.v.Topology)
}

// differ returns an active slot with another table of algorithms than this rank's, or -1: then all
// use it.
func (g *Group) differ(places []join.Place) int {
	for _, slot := range g.v.Active {
		if places[g.v.ranks[slot]].Table != g.job.session.Here.Table {
			return slot
		}
	}
	return -1
}

// firstWithTable returns the lowest active slot with this rank's table of algorithms.
func (g *Group) firstWithTable(places []join.Place) int {
	for _, slot := range g.v.Active {
		if places[g.v.ranks[slot]].Table == g.job.session.Here.Table {
			return slot
		}
	}
	return g.rank
}

// Topology describes in a line how the ranks are distributed and linked, for display.
func (g *Group) Topology() string {
	v := g.shown.Load()
	hosts := 1
	for _, h := range v.Hosts {
		hosts = max(hosts, h+1)
	}
	how := "network links"
	switch {
	case len(v.Active) == 1:
		return "1 rank"
	case g.job.local:
		how = "one process"
	case v.Caps.SharedMemory:
		how = "shared memory"
	case hosts < len(v.Active) && g.job.session.Mapped:
		how = "shared memory and network links"
	}
	if d := g.devices.says.Load(); d != nil && *d != "" {
		how += ", " + *d
	}
	return fmt.Sprintf("%d ranks on %d host(s), %s", len(v.Active), hosts, how)
}

// LocalRank returns the number of lower ranks of the group on this rank's machine.
func (g *Group) LocalRank() int { r, _ := g.local(); return r }

// LocalSize returns how many ranks of the group are on this rank's machine.
func (g *Group) LocalSize() int { _, n := g.local(); return n }

func (g *Group) local() (rank, size int) {
	v := g.shown.Load()
	host := func(i int) int {
		if v.Hosts == nil {
			return 0
		}
		return v.Hosts[i]
	}
	me := max(slices.Index(v.Active, g.rank), 0)
	for i, slot := range v.Active {
		if host(i) == host(me) {
			if slot < g.rank {
				rank++
			}
			size++
		}
	}
	return rank, size
}

// blocking runs a collective for its caller.
func (g *Group) blocking(ctx context.Context, q *exec.Request) error { return g.operate(ctx, q, nil) }

// operate is blocking for data that arrives by a visit; v may be nil.
func (g *Group) operate(ctx context.Context, q *exec.Request, v *visit) error {
	if ctx == nil {
		return noContext(q.Kind.String())
	}
	g.job.proxy.Lock()
	if g.line.take() {
		g.begun(ctx, g.job.timeout, false)
	} else {
		c, err := g.check(q)
		if err != nil {
			g.job.proxy.Unlock()
			return err
		}
		c = c.Detached()
		if err := g.queued(ctx, c.Describe(), func() { g.expired(c, g.ready) }); err != nil {
			return err
		}
	}
	err := g.bind(q)
	if err == nil && g.rough {
		err = g.ready()
	}
	if err == nil {
		_, err = g.across(v)
	}
	g.leave()
	return err
}

// check makes a call of a request. With the proxy's lock, because the number of slots may grow.
func (g *Group) check(q *exec.Request) (exec.Call, error) {
	c, bad := exec.Check(q, g.rank, g.v.Size)
	if bad == nil {
		return c, nil
	}
	name := "an operation"
	if q.Kind.Valid() {
		name = q.Kind.String()
	}
	return c, &ArgumentError{Call: name, Arg: bad.Arg, Got: bad.Got, Want: bad.Want}
}

// bind makes the request's call the current one.
func (g *Group) bind(q *exec.Request) error {
	if b := g.run.Recall(q); b != nil {
		g.run.Use(b, q.Dst.Ptr, q.Src.Ptr)
		return nil
	}
	c, err := g.check(q)
	if err == nil {
		g.run.Adopt(c)
	}
	return err
}

// long is called from time to time while an operation waits for long (see p2p.Wait.OnLong): it
// announces the ranks that this rank waits for, as far as it knows. Other ranks pass that on, so
// that in the end all ranks know the late one. An agreement announces nothing, except in an
// exchange: in their operations the others wait for this rank.
func (g *Group) long() {
	if g.between && !g.sync.Pending() {
		g.coll.Retract() // what it has announced in an exchange that is over
		return
	}
	var slots []int
	for _, m := range g.run.Missing(g.unheard()) {
		slots = append(slots, m.Rank)
	}
	g.coll.Announce(g.run.Token(), slots)
}

// collective runs the current call, between enter and leave. here reports whether this rank has its
// result, even if there is an error.
func (g *Group) collective() (here bool, err error) {
	if err := g.launch(); err != nil {
		return false, err
	}
	return g.concluded(g.run.Run(g.seq, g.hint))
}

// barred returns why no operation can begin, or nil.
func (g *Group) barred() error {
	if g.closed.Load() {
		return ErrClosed
	}
	if g.aborted != nil {
		return g.aborted
	}
	return g.err
}

// refusal is barred for the operation that has the turn. It counts one that a failed group refuses.
func (g *Group) refusal() error {
	err := g.barred()
	if err != nil && g.err != nil {
		g.forgo()
	}
	return err
}

// launch begins the operation, or returns why it cannot begin.
func (g *Group) launch() error {
	if err := g.refusal(); err != nil {
		return err
	}
	if err := g.wait.Err(); err != nil {
		return g.miss(err)
	}
	if !g.run.Call().Uniform { // else it ends alike at all ranks, and the next one tells
		if err := g.repeated(); err != nil {
			return g.miss(err)
		}
	}
	if b := g.run.Bound(); b == nil || !g.run.Current(b) {
		g.run.Unbind()
		if bad := g.fits(); bad != nil {
			var root *RankError
			if errors.As(bad, &root) { // the same at all ranks
				g.seq++
			}
			return bad
		}
	}
	g.seq++
	g.track.Begin(g.run, g.v.epoch, g.seq, g.v.ranks)
	return nil
}

// miss ends an operation that does not begin because of err: nothing was sent, but the other ranks
// count it.
func (g *Group) miss(err error) error {
	g.forgo()
	g.rough = true
	return g.halt(g.fail(err))
}

// refused ends an operation because the group has failed, and returns why. The other ranks may have
// begun it.
func (g *Group) refused() error {
	g.forgo()
	return g.err
}

// forgo counts the next operation, which does not begin on this rank.
func (g *Group) forgo() {
	g.seq++
	g.sync.GiveUp(g.seq, g.uniform())
}

// forgone is forgo for an operation that does not begin because of err, of which the other ranks
// have been told.
func (g *Group) forgone(err error) error {
	if g.forgo(); !g.sync.Pending() && g.seq < g.begins() { // the others have ended it
		g.accuse(err)
		g.cause = nil
		return err
	}
	return g.halt(err)
}

// halt is fails for a call in which no operation runs, and returns err. With Report the group fails
// in any case.
func (g *Group) halt(err error) error {
	if !g.fails(err) && g.job.settings.OnFailure == Report {
		g.err = err
	}
	return err
}

// concluded ends the operation, whose steps have ended with err.
func (g *Group) concluded(err error) (here bool, _ error) {
	here = err == nil
	if err != nil || g.uniform() {
		here, err = g.conclude(err)
	}
	if g.coll.Hinted() && err == nil && g.run.Call().Synchronizes() { // all ranks know that the job has grown
		g.rough = true
		g.sync.Aim(g.v.epoch + 1)
	}
	g.run.Call().Forget()
	g.track.End(outcome(err))
	return here, err
}

// uniform reports whether the current call must have the same outcome at all survivors.
func (g *Group) uniform() bool {
	return g.job.settings.Uniform && g.job.meeting == nil || g.run.Call().Uniform
}

// conclude determines the outcome of the operation that has just run on this rank with err, and may
// run it again. here reports whether this rank has the result.
func (g *Group) conclude(err error) (here bool, _ error) {
	s := g.job.settings
	uniform := g.uniform()
	for {
		has := err == nil
		if has {
			here = true
			if len(g.v.Active) == 1 {
				return here, nil
			}
			if err = g.run.Confirm(); err == nil {
				return here, nil
			}
			if g.past(err, false) {
				return here, nil
			}
		}
		typed := g.marked(g.fail(err), has)
		if g.fails(typed) {
			g.sync.GiveUp(g.seq, uniform)
			return here, typed
		}
		g.rough = true
		var lost *RankError
		if errors.As(typed, &lost) {
			if out := g.verdict(lost); out != nil {
				g.sync.GiveUp(g.seq, uniform)
				return here, out
			}
			lost.Also = g.besides(lost.Rank)
			g.lost = lost
		}
		if s.OnFailure == Report {
			g.err = typed
		}
		if s.OnFailure != Retry && !uniform {
			return here, typed
		}
		g.wait.Restart() // the time of the failed attempt does not count
		intact := s.OnFailure == Retry && !g.run.Dirty() && !g.run.Once() && !has
		mine := resync.Standing{Over: g.seq - 1, Has: has, Intact: intact}
		for renew := g.coll.Err() != nil; ; renew = false {
			if err := g.move(mine, renew); err != nil {
				g.of = g.seq
				g.sync.GiveUp(g.seq, uniform)
				g.fails(err)
				return here, g.marked(err, has)
			}
			o, _ := g.sync.Outcome()
			if has && g.seq <= o.Confirmed {
				return here, nil
			}
			if g.seq < o.Start || g.err != nil {
				return here, g.marked(typed, has)
			}
			if !g.sync.Due(false) { // else others have left the channel; mine is intact, and holds there too
				break
			}
		}
		if bad := g.fits(); bad != nil {
			if !errors.As(bad, new(*RankError)) { // nobody has begun it in the new view: it has no number
				g.seq--
				g.cause, g.of = nil, 0
			}
			return here, bad
		}
		g.run.Unbind()
		g.track.Begin(g.run, g.v.epoch, g.seq, g.v.ranks)
		err = g.run.Run(g.seq, g.hint)
		if err == nil && !uniform {
			return here, nil
		}
	}
}

// past reports whether a confirmation has ended with err because another rank has failed in a later
// operation. That rank has confirmed the present one, and so all have its result. The next
// operation fails with err. joining: the confirmation is Join's, which a rank that calls Abort is
// past.
func (g *Group) past(err error, joining bool) bool {
	var ended *p2p.Aborted
	if !errors.As(err, &ended) {
		return false
	}
	a, bad := decodeAbort(ended.Payload, g.v.Size)
	if bad != nil || a.Call.Seq <= g.seq && !(joining && a.Kind == abortCall) {
		return false
	}
	g.coll.Forget()
	g.run.Stop()
	g.rough = true
	return true
}

// marked returns a copy of err, if it is a *RankError, that says whether the current call's input
// is lost; has is as in overwritten. Others read the original.
func (g *Group) marked(err error, has bool) error {
	var lost *RankError
	if !errors.As(err, &lost) {
		return err
	}
	own := *lost
	own.Overwritten = g.overwritten(has)
	return &own
}

// overwritten reports whether the current call's input is lost on this rank, which has the result
// or not.
func (g *Group) overwritten(has bool) bool {
	c := g.run.Call()
	return g.run.Dirty() || has && c.In == c.Out && c.Kind.Reduces() &&
		(c.Kind != collectives.Reduce || c.Root == g.rank)
}

// fits checks the current call against a view that has changed since it was checked.
func (g *Group) fits() error {
	c := g.run.Call()
	l := c.Kind.Layout()
	if (l.InAtRoot || l.OutAtRoot) && !slices.Contains(g.v.Active, c.Root) {
		return g.rankError(c.Root, g.rank, c.Kind.String(), errors.New("the root is not active"))
	}
	if (l.In.Parted() || l.Out.Parted()) && c.Slots != g.v.Size {
		return &ArgumentError{Call: c.Kind.String(), Arg: "the number of parts", Got: strconv.Itoa(c.Slots),
			Want: fmt.Sprintf("%d: the group has grown", g.v.Size)}
	}
	return nil
}

// fail turns the error of the collective that just ran into the caller's, sends it to the other
// ranks, and makes sure that nothing writes to the call's buffers any more. It may release the
// proxy's lock for a moment, so it must not be called while a link delivers something.
func (g *Group) fail(err error) error { return g.failing(err, g.job.settings.OnFailure == Report) }

// failing is fail; dumped: it releases the lock until the flight recorder has been written, if
// there is one. Else it keeps the lock.
func (g *Group) failing(err error, dumped bool) error {
	tell, typed := g.explain(err)
	var told *p2p.Aborted
	if tell != nil {
		g.cause, g.of = tell.encode(), g.seq
		g.coll.Abort(typed, g.cause)
	} else if errors.As(err, &told) {
		g.cause, g.of = told.Payload, g.seq
	}
	g.coll.Forget()
	g.run.Stop()
	o := outcome(typed)
	g.track.Failed(g.seq, o, typed)
	g.job.obs.Load().FailureLocked(o, dumped)
	return typed
}

// explain returns the typed error for err, and its message for the other ranks, nil if they have it
// or cannot get it.
func (g *Group) explain(err error) (*wireAbort, error) {
	now := g.run.Token()
	if now.Seq != g.seq { // it failed before its beginning
		now = g.run.Call().Token(g.seq, collectives.Auto)
	}
	var peer *p2p.PeerError
	var differ *p2p.Disagreement
	var aborted *p2p.Aborted
	var earlier *earlierError
	var graph *graphError
	switch {
	case errors.Is(err, ErrAborted), errors.Is(err, ErrEvicted): // whatever the cause of an abort is
		return nil, err
	case errors.As(err, new(*unfitError)):
		if late := (*TimeoutError)(nil); errors.As(err, &late) { // it has waited for room
			return &wireAbort{Kind: abortTimeout, A: g.rank, Call: now, After: int64(late.After), Text: late.Call,
				Canceled: errors.Is(late, context.Canceled)}, err
		}
		return &wireAbort{Kind: abortOther, A: g.rank, Call: now, Text: err.Error()}, err
	case errors.As(err, &graph):
		return g.overtakenAbort(graph.is, graph.text, now), err
	case errors.As(err, new(*RankError)), errors.As(err, new(*TimeoutError)), errors.As(err, new(*MismatchError)):
		return nil, err // handled before
	case errors.As(err, &earlier):
		e := g.overtaken(earlier.epoch, exec.Spell(now))
		return g.overtakenAbort(e, err.Error(), now), e
	case errors.As(err, &aborted):
		a, bad := decodeAbort(aborted.Payload, g.v.Size)
		if bad != nil {
			return nil, g.rankError(max(aborted.Rank, 0), g.rank, exec.Spell(now), bad)
		}
		return nil, g.told(a)
	case errors.As(err, &differ):
		ours := differ.Ours
		if differ.Theirs.Seq < ours.Seq { // of an earlier operation, from which it is left
			if t, ok := g.run.Said(differ.Theirs.Seq); ok {
				ours = t
			}
			if differ.Detail == "" && ours == differ.Theirs {
				differ.Detail = ": it sent a message that the other did not expect of it"
			}
		}
		m := &MismatchError{in: g.in, RankA: g.rank, CallA: exec.Spell(ours), RankB: differ.Rank,
			CallB: exec.Spell(differ.Theirs) + differ.Detail}
		return &wireAbort{Kind: abortMismatch, A: g.rank, B: differ.Rank, Call: ours, Other: differ.Theirs,
			Text: differ.Detail}, m
	case errors.Is(err, p2p.ErrLeft):
		return g.left(err, now)
	case errors.As(err, &peer):
		slot := g.slotOf(peer.Rank)
		e := g.rankError(slot, g.rank, exec.Spell(now), peer.Err)
		return &wireAbort{Kind: abortRank, A: g.rank, B: slot, Call: now, Text: peer.Err.Error()}, e
	case errors.Is(err, p2p.ErrTimeout), errors.Is(err, context.DeadlineExceeded), errors.Is(err, context.Canceled):
		a := &wireAbort{Kind: abortTimeout, A: g.rank, Call: now, After: int64(g.wait.Waited()),
			Missing: g.run.Missing(g.unheard()), Canceled: errors.Is(err, context.Canceled)}
		return a, g.told(a)
	case errors.Is(err, p2p.ErrClosed):
		return nil, ErrClosed
	case errors.Is(err, errMoved):
		slot, why := g.gone()
		return &wireAbort{Kind: abortRank, A: g.rank, B: slot, Call: now, Text: why.Error()},
			g.rankError(slot, g.rank, exec.Spell(now), why)
	}
	return &wireAbort{Kind: abortOther, A: g.rank, Call: now, Text: err.Error()}, err
}

// rankError returns the error about a rank, in this view, that reporter has noticed during a call.
func (g *Group) rankError(rank, reporter int, call string, cause error) *RankError {
	return &RankError{Rank: rank, Epoch: g.v.epoch, Call: call, Reporter: reporter, Err: cause, in: g.in}
}

// told returns the error that a failure message stands for.
func (g *Group) told(a *wireAbort) error {
	switch a.Kind {
	case abortRank:
		cause := error(p2p.ErrPeerGone)
		if a.Text != "" {
			cause = fmt.Errorf("%s%w", trimGone(a.Text), p2p.ErrPeerGone)
		}
		return g.rankError(a.B, a.A, exec.Spell(a.Call), cause)
	case abortDeserted:
		return g.rankError(a.B, a.A, exec.Spell(a.Call), errDeserted)
	case abortMismatch:
		if ours, theirs, graph := strings.Cut(a.Text, betweenCalls); graph {
			return &MismatchError{in: g.in, RankA: a.A, CallA: ours, RankB: a.B, CallB: theirs}
		}
		return &MismatchError{in: g.in, RankA: a.A, CallA: exec.Spell(a.Call), RankB: a.B,
			CallB: exec.Spell(a.Other) + a.Text}
	case abortTimeout:
		e := &TimeoutError{Call: cmp.Or(a.Text, exec.Spell(a.Call)), After: time.Duration(a.After), in: g.in,
			Reporter: a.A, Err: context.DeadlineExceeded}
		if a.Canceled {
			e.Err = context.Canceled
		}
		for _, m := range a.Missing {
			e.Missing = append(e.Missing, seen(m))
		}
		return e
	}
	if a.Kind == abortCall {
		g.aborted = &abortedError{Rank: a.A, Err: errors.New(a.Text), in: g.in}
		g.disconnect()
		return g.aborted
	}
	return g.rankError(a.A, a.A, exec.Spell(a.Call), mishap(a.Text))
}

// A mishap is why an operation has failed on a rank that is not lost.
type mishap string

func (m mishap) Error() string { return string(m) }

// left handles the error of a peer that does not run the operation: it goes on in another exchange.
// It waits until this rank knows why: a rank of the group is lost, or the peer says in which
// exchange it is, in a view that this rank knows. What fails the channel, or ends the group on this
// rank, ends the wait.
func (g *Group) left(err error, now p2p.Token) (*wireAbort, error) {
	var peer *p2p.PeerError
	errors.As(err, &peer)
	slot := g.slotOf(peer.Rank)
	g.await(g.deliberation(), func() bool {
		to, told := g.sync.Heard(slot)
		return g.coll.Err() != nil || g.sync.Lost() ||
			told && g.sync.At().Before(to.At) && to.At.View <= g.sync.Now().Epoch
	})
	if err := g.halted(); err != nil {
		return nil, err
	}
	if err := g.coll.Err(); err != nil {
		return g.explain(err)
	}
	why := peer.Err
	if lost, cause := g.gone(); lost != g.rank {
		slot, why = lost, cause
	}
	return &wireAbort{Kind: abortRank, A: g.rank, B: slot, Call: now, Text: why.Error()},
		g.rankError(slot, g.rank, exec.Spell(now), why)
}

// gone returns the slot that the job's view has lost first since the group's, and why: later losses
// may be consequences. It returns this rank's own slot if none is lost.
func (g *Group) gone() (int, error) {
	first, epoch := g.rank, uint64(math.MaxUint64)
	for _, slot := range g.v.Active {
		if g.out(slot) {
			if left := g.job.view().Slots[g.v.ranks[slot]].Left; left < epoch {
				first, epoch = slot, left
			}
		}
	}
	if first == g.rank {
		return first, errMoved
	}
	return first, g.whyGone(first)
}

// trimGone removes the text of ErrPeerGone from the end of a peer's text, to which it is added
// again as an error.
func trimGone(s string) string {
	gone := p2p.ErrPeerGone.Error()
	if n := len(s) - len(gone); n >= 0 && s[n:] == gone {
		return s[:n]
	}
	return s + ": "
}

func (g *Group) slotOf(rank int) int {
	for slot, r := range g.v.ranks {
		if r == rank {
			return slot
		}
	}
	return rank
}

// Close leaves the group: operations under way fail with ErrClosed, and peers are told. When the
// last group of the job is closed on this rank, its links, listeners and lease are closed too. Data
// that this rank has sent is still delivered to ranks that are in the operation. A further call
// returns nil when the first has returned. Closing a group does not close its subgroups. While this
// rank is in the job, the others cannot continue without it in a group that it has closed: their
// calls fail with a *RankError.
//
// A rank may end an operation that others have not begun, as the root of a Broadcast. If the last
// operation was of that kind, Close first waits until all ranks have begun it, so that a program
// needs no Barrier before Close. It does not wait behind an operation under way, after a failure or
// Abort, or when a rank is lost, closes the group or joins meanwhile, and no longer than
// Config.Timeout and 10 seconds: a rank that begins the operation after that gets a *RankError. A
// rank that computes answers within some tens of milliseconds. After operations in which every rank
// needs data of all others, as AllReduce or Barrier, Close does not wait. At the first rank of a
// subgroup, Close also removes the outcome of its last Agree from the store, if all members have
// it: it waits a second for them, and two for the store. Close returns in bounded time, but a rank
// 0 that serves the store (see Config.StoreAddr) waits until the other ranks have left it, as long
// as Config.Timeout, or without a bound if that is none. After a Rejoin that has failed, Close of
// the group of all ranks does that.
func (g *Group) Close() error {
	err := g.closeOnce()
	if g.name == worldName { // programs need not close the subgroups that Rejoin has closed
		g.job.leave()
	}
	return err
}

// closeOnce closes the group, if it is not closed.
func (g *Group) closeOnce() (err error) {
	g.closed.Store(true)
	g.ending.Do(func() { err = g.close() })
	return err
}

func (g *Group) close() error {
	g.awaitAll()
	g.forget()
	g.job.proxy.Lock()
	if at := g.given; at != nil { // the exchange may be complete at others
		g.coll.Abort(at.why, at.tell)
		g.given = nil
	}
	g.job.proxy.Unlock()
	g.coll.Close()
	g.msgs.Close()
	g.cancel()
	p := g.job.proxy
	p.Lock()
	mine := &waiter{turn: make(chan struct{})}
	g.line.join(mine)
	g.rouse()
	p.Unlock()
	g.wg.Wait()
	<-mine.turn // earlier calls have returned ErrClosed
	p.Lock()
	g.begun(g.ctx, g.job.timeout, true)
	g.run.Free()
	g.disconnect()
	g.track.Close()
	delete(g.job.groups, g)
	g.leave()
	unused := g.job.closeStreams(g.devices.close())
	return errors.Join(unused, g.job.release())
}

// worldName is the name of the group of all ranks.
var worldName = p2p.Name{Number: 1}

// id returns a number of the group for display, the same at all members: 1 for the group of all
// ranks, else a hash of the name.
func (g *Group) id() uint32 {
	if g.name == worldName {
		return 1
	}
	h := fnv.New32a()
	fmt.Fprint(h, g.name)
	return max(h.Sum32(), 2)
}

// Split divides the group: ranks with the same color (>= 0) form a subgroup, ordered by key and
// among equal keys by rank. A rank with a negative color gets (nil, nil). It is a collective: every
// rank calls it. Each subgroup is closed separately.
//
// Its outcome is uniform, as with Config.Uniform: if ranks are lost meanwhile, all survivors get
// their subgroups, or all get an error and none has been made. Groups may be divided concurrently.
// A member that was lost since is not in the subgroup's first view.
func (g *Group) Split(ctx context.Context, color, key int) (*Group, error) {
	// The fields that a rank sends. The lowest rank of a color determines the name of the subgroup.
	type part struct{ color, key, incarnation, number int64 }
	const fields = 4
	name := g.job.proxy.Reserve(2)
	defer g.job.proxy.Settle(name)
	mine := []int64{int64(color), int64(key), int64(g.job.session.Self.Incarnation), int64(name.Number)}
	all, err := g.exchange(ctx, mine, flight.Call(flight.Split), 0)
	if err != nil || color < 0 {
		return nil, err
	}
	var slots []int
	parts := make([]part, len(all)/fields)
	for s := range parts {
		p := part{all[fields*s], all[fields*s+1], all[fields*s+2], all[fields*s+3]}
		if parts[s] = p; p.incarnation == 0 || p.color != int64(color) { // 0: the slot is empty
			continue
		}
		if len(slots) == 0 {
			name = p2p.Name{Maker: uint64(p.incarnation), Number: uint64(p.number)}
		}
		slots = append(slots, s)
	}
	slices.SortStableFunc(slots, func(a, b int) int { return cmp.Compare(parts[a].key, parts[b].key) })
	g.job.proxy.Lock()
	in, at := g.v.ranks, g.job.view()
	g.job.proxy.Unlock()
	ranks, incarnations, places := make([]int, len(slots)), make([]uint64, len(slots)), make([]uint64, len(slots))
	rank := 0
	for i, s := range slots {
		ranks[i], incarnations[i], places[i] = in[s], uint64(parts[s].incarnation), uint64(parts[s].number)
		if s == g.rank {
			rank = i
		}
	}
	if !g.job.retain() {
		return nil, ErrClosed
	}
	sub, err := newGroup(g.job, ranks, rank, name, incarnations, places, at, 0)
	if err != nil {
		g.job.release()
		return nil, err
	}
	g.job.proxy.Lock()
	sub.locate(g.job.places)
	sub.shown.Store(sub.v)
	sub.viewChanged()
	g.job.proxy.Unlock()
	return sub, nil
}

// exchange returns what all members have sent, by slot; zeros for inactive slots. Its outcome is
// uniform. is and count say what the program has called: see exec.Call. If the group grows because
// a rank is lost meanwhile, no member has begun the operation in the new view, and all do it there.
// A step that prepares packets fails instead: those that came in have not taken the steps before.
func (g *Group) exchange(ctx context.Context, mine []int64, is flight.Call, count uint64) ([]int64, error) {
	if err := g.enter(ctx, flight.Describe(is, count), func() {
		g.expired(g.exchangeCall(len(mine), is, count), g.ready)
	}); err != nil {
		return nil, err
	}
	defer g.leave()
	for {
		g.run.Adopt(g.exchangeCall(len(mine), is, count))
		if err := g.ready(); err != nil {
			return nil, err
		}
		all := make([]int64, len(mine)*g.v.Size)
		c, err := g.check(&exec.Request{Kind: collectives.AllGather, Dst: bufferOf(all), Src: bufferOf(mine)})
		if err != nil {
			return nil, err
		}
		c.Uniform, c.For, c.ForCount = true, is, count
		g.run.Adopt(c)
		_, err = g.collective()
		grown := errors.As(err, new(*ArgumentError)) && len(all) != len(mine)*g.v.Size // see fits
		switch {
		case err == nil:
			return all, nil
		case !grown || is.Packets():
			return nil, err
		}
	}
}

// exchangeCall returns the call of exchange without its memory. With the proxy's lock.
func (g *Group) exchangeCall(n int, is flight.Call, count uint64) exec.Call {
	return exec.Call{Kind: collectives.AllGather, DType: Int64, Count: n, Slots: g.v.Size, Uniform: true,
		For: is, ForCount: count}
}
