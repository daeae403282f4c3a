package pg

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math"
	"time"

	"tutti/bootstrap"
	"tutti/collectives"
	"tutti/internal/files"
	"tutti/p2p"
	"tutti/pg/internal/join"
	"tutti/pg/internal/resync"
	"tutti/pg/membership"
)

// Join makes this process a rank of its job and returns the group of all ranks. It returns when
// every rank has joined, or with an error when ctx or Config.Timeout ends before that. It listens
// for peers on the transports' own addresses; links to them come up when they are first needed.
//
// If OnFailure is Shrink or Retry, Join waits for ranks that are lost before all have joined: such
// a rank may be started again, or a process on standby may take its place. With Report, Join fails
// at the ranks that had met the lost one. In a running job it fails if a rank is lost while it
// admits this one.
//
// A rank that loses its lease before all have joined, because it was stopped or the store was away,
// takes another one. Join fails if another process has taken its place meanwhile.
//
// A process on standby (TUTTI_STANDBY) waits until a slot is free, bounded by ctx alone. If another
// process takes the slot first, or the ranks do not admit this one within Config.Timeout, it waits
// again. So does a rank that was started again (TUTTI_RESTART) while another process, which may
// have been on standby, has its slot.
func Join(ctx context.Context, cfg Config) (*Group, error) {
	if ctx == nil {
		return nil, noContext("join")
	}
	var former bootstrap.Store
	for {
		s, err := cfg.fromEnv()
		if err != nil {
			return nil, err
		}
		g, err := s.enter(ctx)
		if former != nil {
			former.Close()
		}
		taken := (*bootstrap.SlotError)(nil)
		if !s.again() || !errors.As(err, &taken) || ctx.Err() != nil {
			return g, err
		}
		s.Logger.Warn("another process has the place of this one, which waits until that is gone",
			"pid", taken.Holder.PID, "host", taken.Holder.Host)
		js, bad := s.session()
		if bad != nil {
			return nil, bad
		}
		former = join.AwaitSlot(ctx, js, taken.Holder.Incarnation)
		if ctx.Err() != nil {
			if former != nil {
				former.Close()
			}
			return nil, fmt.Errorf("%w (%w)", err, context.Cause(ctx))
		}
	}
}

// again reports whether this process is a rank of its launcher's job that was started again.
func (s *settings) again() bool {
	return s.launch.Restarted && s.Rank == s.launch.Rank && s.Job == s.launch.Job
}

// enter is an attempt of Join.
func (s *settings) enter(ctx context.Context) (*Group, error) {
	s.preload()
	if !s.launch.Standby {
		ctx, cancel := join.Within(ctx, s.Timeout)
		defer cancel()
		for given := s.Config; ; s.Config = given {
			g, err := s.meetAndJoin(ctx)
			if s.meeting == nil || !errors.Is(err, bootstrap.ErrStoreEnds) || ctx.Err() != nil {
				return g, err
			}
			s.Logger.Info("rank 0 leaves an earlier job: this process waits for its next meeting", "err", err)
			select {
			case <-ctx.Done():
			case <-time.After(joinPause):
			}
		}
	}
	for {
		js, err := s.session()
		if err != nil {
			return nil, err
		}
		claim, err := join.StandBy(ctx, js)
		if err != nil {
			return nil, fmt.Errorf("standing by for job %q: %w", s.Job, err)
		}
		s.take(claim.Rank)
		g, err := s.join(ctx)
		if claim.Release(err == nil); err == nil || ctx.Err() != nil || !displaced(err) {
			return g, err
		}
		s.Logger = cmp.Or(s.log, s.Logger)
		s.Logger.Info("this process could not take a free place: it stands by again", "rank", s.Rank, "err", err)
		select {
		case <-ctx.Done():
		case <-time.After(joinPause):
		}
	}
}

// meetAndJoin joins once, and first meets the other ranks if they were given no store.
func (s *settings) meetAndJoin(ctx context.Context) (*Group, error) {
	if err := s.meet(ctx); err != nil {
		return nil, err
	}
	g, err := s.join(ctx)
	if err != nil {
		// The deadline of ctx bounds what has failed, and not part.
		pctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), partSoon)
		defer cancel()
		defer context.AfterFunc(ctx, func() {
			if errors.Is(ctx.Err(), context.Canceled) {
				cancel()
			}
		})()
		s.part(pctx, s.meeting)
	}
	return g, err
}

// displaced reports whether a process on standby should try again after err.
func displaced(err error) bool {
	return errors.As(err, new(*bootstrap.SlotError)) || errors.Is(err, context.DeadlineExceeded) ||
		errors.Is(err, ErrEvicted) || errors.Is(err, p2p.ErrPeerGone) || errors.As(err, new(*TimeoutError)) ||
		errors.As(err, new(*RankError)) || errors.Is(err, bootstrap.ErrStoreAway) ||
		errors.Is(err, bootstrap.ErrLeaseLost)
}

// joinPause is the pause between two incarnations of a rank in Join.
const joinPause = 100 * time.Millisecond

// join makes this process the rank s.Rank of its job.
func (s *settings) join(ctx context.Context) (*Group, error) {
	js, err := s.session()
	if err == nil && s.MaxSize > 1 {
		js.Table = s.tuned()
	}
	if err != nil {
		return nil, s.failed(err)
	}
	ctx, cancel := join.Within(ctx, s.Timeout)
	defer cancel()
	var before error // why the previous incarnation failed
	for {
		g, again, err := s.attempt(ctx, js)
		if err == nil {
			return g, nil
		}
		if err = files.Explain(err); !again && before != nil {
			err = fmt.Errorf("%w (before that: %w)", err, before)
		}
		if !again {
			return nil, s.failed(err)
		}
		s.Logger.Info("a rank was lost before all had met: joining anew", "err", err)
		if before == nil || !errors.Is(before, p2p.ErrUnfit) || errors.Is(err, p2p.ErrUnfit) {
			before = err
		}
		select { // peers that met the last incarnation drop it before the next one begins
		case <-ctx.Done():
		case <-time.After(joinPause):
		}
	}
}

func (s *settings) failed(err error) error {
	return fmt.Errorf("joining job %q as rank %d of %d: %w", s.Job, s.Rank, s.Size, err)
}

// attempt joins with one incarnation. again reports that another incarnation may succeed: a rank
// was lost, or gave up, before all had met. Ranks that met the lost one know this incarnation and
// its links, so both end here.
func (s *settings) attempt(ctx context.Context, js *join.Settings) (g *Group, again bool, err error) {
	j := newJob(s)
	j.session = join.New(js)
	jctx, lost := context.WithCancelCause(ctx)
	defer lost(nil)
	hooks := join.Hooks{Link: j.link, Status: j.status, Lost: func(err error) { lost(&placeError{err}) }}
	if err = j.session.Connect(ctx, hooks); err == nil {
		j.proxy = j.session.Proxy
		g, err = j.enterJob(jctx)
	}
	if err == nil {
		return g, false, nil
	}
	if jctx.Err() != nil && ctx.Err() == nil {
		err = context.Cause(jctx)
	}
	if unfit := new(*RankError); errors.Is(err, p2p.ErrUnfit) && errors.As(err, unfit) {
		j.session.Stay(ctx, (*unfit).Rank)
	}
	again = elsewhere(err) && s.OnFailure != Report && !j.session.Met() && ctx.Err() == nil
	err = j.session.Explain(err)
	j.shut()
	return nil, again, err
}

// placeError says that this incarnation of a rank cannot have its place in the job any more.
type placeError struct{ error }

func (e *placeError) Unwrap() error { return e.error }

// elsewhere reports whether a rank that had not met all others failed with err because of another
// rank. A link that this process has no room for names its peer, too.
func elsewhere(err error) bool {
	return !errors.Is(err, p2p.ErrShortage) && (errors.As(err, new(*RankError)) || errors.As(err, new(*TimeoutError)) ||
		errors.Is(err, p2p.ErrPeerGone) || errors.Is(err, join.ErrStarted))
}

// enterJob makes the group of all ranks, of a new or a running job.
func (j *job) enterJob(ctx context.Context) (*Group, error) {
	s, self := j.settings, j.session.Self
	if s.MaxSize == 1 {
		j.places, j.initial = []join.Place{j.session.Here}, membership.First([]uint64{self.Incarnation})
		g, err := j.world()
		if err == nil {
			g.placed()
		}
		return g, err
	}
	running, err := j.session.Running(ctx)
	if err != nil {
		return nil, err
	}
	if running != nil {
		admission := join.Rejoin(j.session, running)
		g, err := j.admitted(ctx, admission)
		if !errors.Is(err, join.ErrOver) {
			return g, err
		}
		j.log.Info("all ranks that could have let this one in are gone: the job begins anew")
		ro := j.detach()
		ro.Stop()
		if err := admission.Undo(ctx, ro); err != nil {
			return nil, err
		}
	}
	start, err := join.First(ctx, j.session)
	if err != nil {
		return nil, err
	}
	return j.first(ctx, start)
}

// first begins a job. It returns when all ranks have met.
func (j *job) first(ctx context.Context, start *join.Start) (*Group, error) {
	s, self := j.settings, j.session.Self
	incarnations := make([]uint64, s.Size)
	incarnations[s.Rank] = self.Incarnation
	j.initial = membership.First(incarnations) // those of the other ranks are learnt at the meeting
	g, err := j.world()
	if err != nil {
		return nil, err
	}
	mctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	fail := func(err error) { cancel(&placeError{err}) }
	if s.OnFailure != Report {
		defer start.Watch(mctx, fail)()
	}
	j.proxy.Lock()
	j.meeting = fail
	j.proxy.Unlock()
	if err := g.meet(mctx); err != nil {
		// A rank that times out names whom it waited for, and then leaves: that is no loss.
		if mctx.Err() != nil && ctx.Err() == nil && !errors.Is(err, context.DeadlineExceeded) {
			err = context.Cause(mctx)
		}
		return nil, err
	}
	defer g.leave()
	for r, p := range j.places {
		incarnations[r] = p.Incarnation
	}
	g.firstView(membership.First(incarnations))
	g.warn()
	j.meeting = nil
	// A peer was lost after it met this rank, and other ranks may not have met that incarnation; or
	// another process has the place of this one. Only the end of the caller's time does not matter.
	if cause := context.Cause(mctx); errors.As(cause, new(*placeError)) {
		return nil, cause
	}
	start.Met()
	if s.fixed() {
		return g, nil
	}
	if s.MaxSize > membership.MaxSlots {
		j.log.Warn("the job is too large for views: lost ranks are not replaced, and the group ends with the first",
			"ranks", s.MaxSize,
			"at most", membership.MaxSlots)
		return g, nil
	}
	view := j.initial
	j.proxy.Unlock()
	err = j.follow(view, incarnations[0])
	j.proxy.Lock()
	return g, err
}

// firstView gives the group of all ranks the job's first view with its incarnations, which were not
// known when the group was made. Standings that have arrived since stay. With the proxy's lock.
func (g *Group) firstView(view membership.View) {
	g.job.initial = view
	g.replace(func(v *groupView) { v.job = view })
	early := g.sync
	g.sync = resync.New(g.rank, g.view(view))
	for slot := range g.job.settings.MaxSize {
		if t, ok := early.Heard(slot); ok {
			g.sync.Hear(slot, t)
		}
	}
}

// placed tells the group of all ranks, and its program, the places that the job has.
func (g *Group) placed() {
	g.job.proxy.Lock()
	defer g.job.proxy.Unlock()
	g.locate(g.job.places)
	g.shown.Store(g.v)
}

// admitted joins a running job. It returns when the other ranks have admitted this one, at one of
// their step boundaries.
func (j *job) admitted(ctx context.Context, admission *join.Admission) (*Group, error) {
	if err := j.follow(admission.Job.View, admission.Job.First); err != nil {
		return nil, err
	}
	if err := admission.Await(ctx, j.roster); err != nil {
		if errors.Is(err, join.ErrOut) {
			err = ErrEvicted
		}
		return nil, err
	}
	view := j.roster.View()
	g, err := newGroup(j, upTo(view.Size()), j.session.Self.Rank, worldName, nil, nil, view, view.Epoch-1)
	if err != nil {
		return nil, err
	}
	if err := g.enter(ctx, "join", nil); err != nil {
		return nil, err
	}
	defer g.leave()
	g.sync.Aim(view.Epoch)
	g.viewChanged()
	if err := g.move(resync.Standing{Joins: true, Intact: true}, false); err != nil {
		return nil, err
	}
	g.joins = false
	g.seq = g.begins() - 1
	if !j.settings.AutoAdmit { // the others call Admit, or will when an operation reports the lost rank
		if _, err := g.admit(ctx, math.MaxUint64); err != nil {
			return nil, err
		}
	}
	return g, nil
}

// world makes the group of all ranks.
func (j *job) world() (*Group, error) {
	return newGroup(j, upTo(j.settings.Size), j.session.Self.Rank, worldName, nil, nil, j.initial, 1)
}

func upTo(n int) []int {
	all := make([]int, n)
	for i := range all {
		all[i] = i
	}
	return all
}

// meet is the first collective of a job: it exchanges the ranks' places. When it returns nil, all
// ranks have joined, and this one has the turn, with the proxy's lock, until leave: others may be
// out of Join, and their exchanges are not answered before this rank can take part.
func (g *Group) meet(ctx context.Context) error {
	mine := make([]byte, join.PlaceSize)
	g.job.session.Here.Encode(mine)
	p := g.job.proxy
	p.Lock()
	all := make([]byte, join.PlaceSize*g.v.Size)
	forced := g.v.Algo
	g.replace(func(v *groupView) { v.Algo, v.Caps = collectives.Auto, collectives.Caps{Cores: 1} }) // not agreed on yet
	g.run.Settle(g.v.Topology)
	g.track.Uncounted = true
	p.Unlock()
	if err := AllGather(ctx, g, all, mine); err != nil {
		return g.unlinked(err)
	}
	if err := g.enter(ctx, "join", nil); err != nil {
		return err
	}
	g.track.Uncounted = false
	err := g.acquainted()
	if err == nil {
		g.replace(func(v *groupView) { v.Algo = forced })
		g.read(all)
		return nil
	}
	g.leave()
	return g.unlinked(err)
}

// unlinked returns err. If it says that ranks were waited for in vain, it also says why this one
// has no links to them.
func (g *Group) unlinked(err error) error {
	if late := new(*TimeoutError); errors.As(err, late) {
		for _, m := range (*late).Missing {
			if why := g.job.proxy.Unlinked(g.v.ranks[m.Rank]); why != nil {
				err = fmt.Errorf("%w; no link to rank %d: %v", err, m.Rank, why)
			}
		}
	}
	return err
}

// acquainted waits until all ranks have what meet exchanges: what a rank does after it has joined
// must not keep another one from joining. With the turn.
func (g *Group) acquainted() error {
	if len(g.v.Active) == 1 {
		return nil
	}
	err := g.run.Confirm()
	if err == nil || g.past(err, true) {
		return nil
	}
	return g.fail(err)
}

// read takes the ranks' places from what meet has exchanged. With the proxy's lock.
func (g *Group) read(all []byte) {
	places := make([]join.Place, g.v.Size)
	for r := range places {
		places[r] = join.DecodePlace(all[r*join.PlaceSize:])
	}
	g.job.places = places
	g.locate(places)
	g.job.shareCores(g)
}

// Local makes n ranks inside this process, for tests and for programs that are parallel in threads.
// The caller runs a goroutine for each of the groups returned. Local uses Algorithm, Timeout,
// Devices, PeerDevices, StagingLimit, Progress and Logger of cfg, and the default table of
// algorithms.
func Local(n int, cfg Config) ([]*Group, error) {
	if cfg.Size, cfg.Rank, cfg.MaxSize = n, 0, n; n < 1 {
		return nil, &ArgumentError{Call: "local", Arg: "the number of ranks", Got: fmt.Sprint(n), Want: "at least 1"}
	}
	cfg.Job = cmp.Or(cfg.Job, "default")
	s, err := cfg.resolve(func(string) string { return "" })
	if err != nil {
		return nil, err
	}
	s.preload()
	fail := func(err error) ([]*Group, error) { return nil, fmt.Errorf("%d local ranks: %w", n, err) }
	sessions, err := join.Local(n, &join.Settings{Size: n, MaxSize: n, Logger: s.Logger,
		Progress: s.Progress, Exchanges: s.exchanges})
	if err != nil {
		return fail(err)
	}
	places, incarnations := make([]join.Place, n), make([]uint64, n)
	for r, ss := range sessions {
		places[r], incarnations[r] = ss.Here, ss.Self.Incarnation
	}
	view := membership.First(incarnations)
	groups := make([]*Group, n)
	for r, ss := range sessions {
		j := newJob(s)
		j.session, j.proxy, j.local, j.places, j.initial = ss, ss.Proxy, true, places, view
		g, err := j.world()
		if err != nil {
			for _, g := range groups[:r] {
				g.Close()
			}
			for _, ss := range sessions[r:] {
				ss.Close()
			}
			return fail(err)
		}
		g.placed()
		groups[r] = g
	}
	return groups, nil
}

// Rejoin closes all groups of this rank and joins the job again in the same slot, as a new
// incarnation. It is for a rank that was evicted and is alive. It returns the new group of all
// ranks when the others have admitted this one. A Split that runs meanwhile fails with ErrClosed,
// or its group is closed, too. If ctx ends before the groups are closed, Rejoin returns, and they
// are closed in the background. After an error it may be called again.
//
// If this rank serves the job's store from its memory, the store stays: while Rejoin runs, and
// after an error until no other rank is connected with it. Then a further call fails at once with
// ErrClosed. A program that gives up closes the group of all ranks, although Rejoin has done that:
// Close waits for the others. If they have left already, the first call waits for them to come
// back, because their launcher may start them again: then the job begins anew.
func (g *Group) Rejoin(ctx context.Context) (*Group, error) {
	if ctx == nil {
		return nil, noContext("rejoin")
	}
	j := g.job
	if j.roster == nil {
		return nil, &ArgumentError{Call: "rejoin", Arg: "the group", Got: "one without a store",
			Want: "a job of several processes"}
	}
	ctx, end := join.Within(ctx, j.timeout)
	defer end()
	j.mu.Lock()
	meeting := j.settings.meeting
	busy, over := j.rejoining == rejoins, j.rejoining == rejoinOver || meeting.Over()
	if !busy && !over {
		j.rejoining = rejoins
	}
	j.mu.Unlock()
	switch {
	case busy:
		return nil, fmt.Errorf("rejoining job %q: another call of Rejoin is under way, "+
			"or has joined: %w", j.settings.Job, ErrClosed)
	case over:
		return nil, fmt.Errorf("rejoining job %q: all ranks that could have let this one in have left, or this one "+
			"has, and so its store was closed: %w", j.settings.Job, ErrClosed)
	}
	again, err := j.rejoin(ctx, meeting != nil)
	if err == nil {
		again.job.settings.meeting = meeting
		return again, nil // the job of the old incarnation is over
	}
	j.mu.Lock()
	j.rejoining = rejoinFailed
	j.mu.Unlock()
	meeting.CloseLater()
	return nil, err
}

// rejoin ends the job on this rank and joins it again. met says that the job's store is in the
// memory of a rank.
func (j *job) rejoin(ctx context.Context, met bool) (*Group, error) {
	j.proxy.Lock()
	j.leaving = true
	for g := range j.groups {
		go g.closeOnce()
	}
	j.proxy.Unlock()
	select {
	case <-j.ended:
	case <-ctx.Done():
		return nil, fmt.Errorf("rejoining job %q: its groups are still being closed: %w", j.settings.Job,
			context.Cause(ctx))
	}
	cfg := j.settings.Config
	cfg.Rank = j.session.Self.Rank
	s, err := cfg.fromEnv()
	if err != nil {
		return nil, err
	}
	s.launch.Standby = false // it has a slot, also if the launcher started it on standby
	s.listened, s.guest = met || j.settings.listened, j.settings.guest
	if met {
		s.withoutSite()
	}
	return s.enter(ctx)
}
