package pg

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/hashicorp/go-multierror"

	"tutti/bootstrap"
	"tutti/p2p"
	"tutti/pg/flight"
	"tutti/pg/internal/join"
	"tutti/pg/internal/observe"
	"tutti/pg/internal/roster"
	"tutti/pg/membership"
)

// job is the state that all groups of one rank share: its links, its listeners, its place in the
// store.
type job struct {
	settings *settings
	log      *slog.Logger
	timeout  time.Duration // 0: none
	local    bool          // all ranks are in this process
	session  *join.Session
	proxy    *p2p.Proxy // the session's
	memory   memory
	obs      atomic.Pointer[observe.Observer]

	// Under the proxy's lock.
	roster  *roster.Roster  // nil: lost ranks are not replaced
	initial membership.View // the job's view if there is no roster
	places  []join.Place    // by rank
	groups  map[*Group]struct{}
	leaving bool // Rejoin closes the groups: none is made any more
	// When the store last failed to remove the outcome of a closed group.
	unforgotten time.Time
	meeting     context.CancelCauseFunc // ends the first meeting of all ranks; nil: it is over
	unattend    func()                  // ends attend; nil: it was not called

	staging   staging
	unmapping sync.WaitGroup  // goroutines that free and unmap memory
	retiring  context.Context // in which exchanges wait for their work
	unretire  context.CancelFunc
	doubtful  []doubt // under mu

	mu        sync.Mutex
	refs      int                   // groups that are open
	imported  map[importer]struct{} // whose memory has been mapped
	rejoining rejoining             // decides who leaves the meeting
	ended     chan struct{}         // closed when the last group has been closed and the job has ended here
}

// rejoining says what has become of the calls of Rejoin.
type rejoining int

const (
	noRejoin     rejoining = iota // none was made: the meeting is left with the last group
	rejoins                       // one is under way, or has joined, and has the meeting
	rejoinFailed                  // Rejoin may be called again, or rank 0 leaves the meeting in Close
	rejoinOver                    // rank 0 leaves the meeting, or has left it
)

func newJob(s *settings) *job {
	j := &job{settings: s, log: s.Logger, timeout: s.Timeout, refs: 1, groups: map[*Group]struct{}{},
		ended: make(chan struct{})}
	j.retiring, j.unretire = context.WithCancel(context.Background())
	j.staging.limit, j.staging.discard = s.StagingLimit, j.discard
	return j
}

// view returns the job's view. With the proxy's lock.
func (j *job) view() membership.View {
	if j.roster != nil {
		return j.roster.ViewLocked()
	}
	return j.initial
}

// why returns the reason for which a rank was removed from the view, "" if it is not known. With
// the proxy's lock.
func (j *job) why(rank int) string {
	if j.roster == nil {
		return ""
	}
	return j.roster.WhyLocked(rank)
}

// eviction returns ErrEvicted, with the reason if the others have not removed this rank. With the
// proxy's lock.
func (j *job) eviction() error {
	if why := j.why(j.session.Self.Rank); why != "" {
		return fmt.Errorf("%w: %s", ErrEvicted, why)
	}
	return ErrEvicted
}

// isolated says whether this rank can take part in decisions on the membership. With the proxy's
// lock.
func (j *job) isolated() roster.Isolation {
	if j.roster == nil {
		return roster.Isolation{}
	}
	return j.roster.IsolatedLocked()
}

// stranded returns ErrIsolated, with the reason, if this rank could not take part in decisions on
// the membership for longer than Config.Window, else nil. With the proxy's lock.
func (j *job) stranded() error {
	if at := j.isolated(); at.Why != "" && time.Since(at.Since) > j.settings.Window {
		return fmt.Errorf("%w: %s", ErrIsolated, at.Why)
	}
	return nil
}

// follow starts the roster from view, which may not contain this rank yet.
func (j *job) follow(view membership.View, first uint64) error {
	s, self := j.settings, j.session.Self
	ro, err := roster.New(roster.Config{Self: membership.Peer{Slot: self.Rank, Incarnation: self.Incarnation},
		View: view, First: first, MaxSize: s.MaxSize, Window: s.Window, AutoAdmit: s.AutoAdmit,
		Accuses: s.OnTimeout != TimeoutReports, Doubt: s.OnFailure != Report, Proxy: j.proxy, Directory: j.session,
		Groups: audience{j}, Logger: j.log})
	if err != nil {
		return err
	}
	j.proxy.Lock()
	j.roster = ro
	j.proxy.Unlock()
	ro.Start()
	return nil
}

// detach takes the roster from the job.
func (j *job) detach() *roster.Roster {
	j.proxy.Lock()
	defer j.proxy.Unlock()
	ro := j.roster
	j.roster = nil
	return ro
}

// audience implements roster.Groups for the job's groups.
type audience struct{ *job }

func (a audience) ViewChanged() {
	for g := range a.groups {
		g.viewChanged()
	}
}

// Evicted ends the operations in flight in all groups, and graphs that wait for other ranks.
func (a audience) Evicted() {
	for g := range a.groups {
		err := g.job.eviction()
		g.coll.Fail(err)
		g.msgs.Fail(err)
		if x := g.packets.now; x != nil {
			x.Stop()
		}
	}
}

// Isolated ends graphs that wait for lost ranks, which the view may keep.
func (a audience) Isolated() {
	if a.stranded() == nil {
		return
	}
	for g := range a.groups {
		for _, slot := range g.v.Active {
			if why := a.proxy.Down(g.jobRank(slot)); why != nil {
				g.orphan(slot, why)
			}
		}
	}
}

func (a audience) Accused() {
	for g := range a.groups {
		g.rough = true
	}
}

func (a audience) Judged() {
	for g := range a.groups {
		g.answer()
	}
}

func (a audience) Awaited(d time.Duration) (ranks []int) {
	for g := range a.groups {
		if g.busy && (g.wait.Waited() > d || g.wait.Late()) {
			for _, slot := range g.awaits() {
				ranks = append(ranks, g.jobRank(slot))
			}
		}
	}
	return ranks
}

// link is the proxy's callback for links that come up (err is nil) or fail. With the proxy's lock.
func (j *job) link(peer p2p.Identity, err error) {
	if s := j.settings; err == nil && (s.fixed() || s.MaxSize > membership.MaxSlots) { // else a roster will poll
		j.attend()
	}
	if j.meeting != nil && j.settings.OnFailure != Report && errors.Is(err, p2p.ErrPeerGone) {
		j.meeting(fmt.Errorf("rank %d was lost before all ranks had joined: %w", peer.Rank, err))
	}
	if j.roster != nil {
		j.roster.LinkLocked(peer, err)
	} else if err != nil {
		for g := range j.groups {
			g.orphan(slices.Index(g.v.ranks, peer.Rank), err)
		}
	}
}

// attend has a goroutine poll from time to time until shut: other ranks may wait for an answer, or
// a graph for them, while the program computes, or is in a call of another job. With the proxy's
// lock.
func (j *job) attend() {
	if j.unattend != nil || j.settings.Progress {
		return
	}
	proxy := j.session.Proxy // j.proxy may not be set yet
	over, done := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(done)
		ticker := time.NewTicker(50 * time.Millisecond)
		defer ticker.Stop()
		for {
			select {
			case <-ticker.C:
				proxy.Idle()
			case <-over:
				return
			}
		}
	}()
	j.unattend = func() {
		close(over)
		<-done
	}
}

// shareCores finds out whether ranks of the group share this rank's processors. With the proxy's
// lock.
func (j *job) shareCores(g *Group) {
	alike, here := 0, j.session.Here
	for _, slot := range g.v.Active {
		if j.places[g.v.ranks[slot]].CPUSet() == here.CPUSet() {
			alike++
		}
	}
	j.proxy.SetOversubscribed(alike > here.Cores)
}

// retain counts one more open group. It returns false if the job is closed.
func (j *job) retain() bool {
	j.mu.Lock()
	defer j.mu.Unlock()
	if j.refs == 0 {
		return false
	}
	j.refs++
	return true
}

// release undoes retain. The last call ends the job on this rank.
func (j *job) release() error {
	j.mu.Lock()
	j.refs--
	last, meeting := j.refs == 0, j.settings.meeting
	if j.rejoining != noRejoin {
		meeting = nil
	}
	j.mu.Unlock()
	if !last {
		return nil
	}
	defer close(j.ended)
	if j.refuses() {
		meeting.Refuse()
	}
	defer j.settings.part(context.Background(), meeting)
	return j.shut()
}

// leave has the rank that serves the store wait for the others after a Rejoin that has failed,
// which has closed all groups without that.
func (j *job) leave() {
	j.mu.Lock()
	first := j.rejoining == rejoinFailed && j.settings.serves()
	if first {
		j.rejoining = rejoinOver
	}
	leaves := j.rejoining == rejoinOver
	j.mu.Unlock()
	if first && j.refuses() {
		j.settings.meeting.Refuse()
	}
	if leaves {
		j.settings.part(context.Background(), j.settings.meeting)
	}
}

// refuses reports whether a rank that leaves the job refuses its meeting: else a job goes on that
// lets ranks in.
func (j *job) refuses() bool {
	return j.settings.OnFailure == Report || j.settings.Rank == 0 && !j.evicted()
}

// evicted reports whether the others go on without this rank.
func (j *job) evicted() bool {
	j.proxy.Lock()
	defer j.proxy.Unlock()
	return j.roster != nil && j.roster.EvictedLocked()
}

func (j *job) shut() error {
	var errs *multierror.Error
	j.staging.close()
	j.unmapAll()
	if j.roster != nil {
		j.roster.Stop()
	}
	if err := j.session.Close(); err != nil {
		errs = multierror.Append(errs, err)
	}
	if j.unattend != nil { // no link comes up any more
		j.unattend()
	}
	if o := j.obs.Load(); o != nil {
		o.Stop()
	}
	return errs.ErrorOrNil()
}

// identity returns the identity of this rank in its flight records.
func (j *job) identity() flight.Identity {
	self := j.session.Self
	return flight.Identity{Job: j.settings.Job, Rank: self.Rank, Size: max(j.settings.Size, self.Rank+1),
		Incarnation: self.Incarnation, Host: bootstrap.NewRecord(0, 1, 0, nil).Host}
}

// observe returns this rank's observer, and starts it with the first group.
func (j *job) observe() (*observe.Observer, error) {
	if o := j.obs.Load(); o != nil {
		return o, nil
	}
	s := j.settings
	cfg := observe.Config{Self: j.identity(), Dir: s.LogDir, NoSignal: s.NoSignal, Metrics: s.Metrics,
		LocalRank: max(s.launch.LocalRank, 0), Proxy: j.proxy, Groups: j.glances, Alone: j.local, Logger: j.log,
		Joined: func() bool { return s.MaxSize == 1 || j.session.Met() }}
	if j.local {
		cfg.Dir, cfg.Metrics = "", ""
	}
	o, err := observe.Start(cfg)
	if err == nil {
		j.obs.Store(o)
	}
	return o, err
}

// glances describes the job's groups. With the proxy's lock.
func (j *job) glances() (all []observe.Glance) {
	for g := range j.groups {
		all = append(all, g.glance())
	}
	return all
}

// status answers a status request of the handshake RPC. It ends with ctx.
func (j *job) status(ctx context.Context, ops int) ([]byte, error) {
	o := j.obs.Load()
	if o == nil { // the rank has not joined yet
		return observe.Blank(j.identity()).JSON(false)
	}
	text, err := o.Status(ctx, ops)
	if errors.Is(err, observe.ErrStopped) {
		err = ErrClosed
	}
	return text, err
}

// awaits lists the slots that the operation in flight waits for.
func (g *Group) awaits() []int {
	if g.sync.Pending() {
		return g.sync.Missing()
	}
	if g.between {
		return g.unvoted
	}
	return g.run.Awaits()
}

// glance describes the group. With the proxy's lock.
func (g *Group) glance() observe.Glance {
	v := observe.Glance{Slot: g.rank, Active: slices.Clone(g.v.Active), Epoch: g.v.epoch, Number: g.seq,
		Agreed: g.ballot.count(), Agreeing: g.between, Queued: g.line.calls, Err: g.err}
	if g.aborted != nil {
		v.Err = g.aborted
	}
	for slot := range g.v.Size {
		v.Ranks = append(v.Ranks, g.jobRank(slot))
	}
	v.Devices = g.loads()
	g.track.Fill(&v)
	v.Err, v.Last = inJob(v.Err, v.Ranks), inJob(v.Last, v.Ranks)
	if v.Running() {
		v.Awaits = g.awaits()
	}
	switch {
	case g.between:
		v.Waited, v.Awaits = time.Since(g.agreement.began), g.unvoted
	case g.busy && (g.sync.Pending() || g.sync.Behind()):
		v.Entering, v.Waited, v.Awaits = g.sync.Target(), g.wait.Waited(), g.awaits()
	}
	for slot := range g.v.Size {
		if slot == g.rank {
			continue
		}
		p := observe.Peer{Slot: slot}
		p.Seen, p.HasSeen = g.coll.Seen(slot)
		p.Waits, p.WaitsFor, p.HasWaits = g.coll.Waiting(slot)
		if p.HasSeen || p.HasWaits {
			v.Peers = append(v.Peers, p)
		}
	}
	return v
}
