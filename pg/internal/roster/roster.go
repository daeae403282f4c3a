package roster

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"tutti/bootstrap"
	"tutti/p2p"
	"tutti/pg/membership"
)

const (
	tick      = 50 * time.Millisecond // the machine's unit of time
	probeWait = 500 * time.Millisecond
)

// StoreWait bounds one call of the store by a rank that has joined.
const StoreWait = 2 * time.Second

// Config describes a rank to its Roster.
type Config struct {
	Self      membership.Peer
	View      membership.View // the view that the roster begins in; Self need not be active in it
	First     uint64          // names the job in the store: see membership.EncodeStored
	MaxSize   int             // slots that the job may grow to
	Window    time.Duration   // how long two live ranks may be unable to reach each other
	AutoAdmit bool            // waiting ranks are admitted without Admit
	Accuses   bool            // AccuseLocked is called: ranks that are late can be removed
	Doubt     bool            // the store is asked about ranks that operations have waited for longer than a lease
	Proxy     *p2p.Proxy
	Directory Directory
	Groups    Groups
	Logger    *slog.Logger
}

// A Directory gives access to the job's store and to other ranks. Its methods are called from any
// goroutine, without the proxy's lock.
type Directory interface {
	// Store returns the handle in use.
	Store() bootstrap.Store
	// HandOver ends what has taken another lease so far when one was lost. From then on Reconnect
	// does, and Store may be a lost handle already. It returns when this rank was last without a
	// lease, zero if it never was, and whether the job may have begun by then.
	HandOver() (without time.Time, late bool)
	// Reconnect replaces a handle whose lease was lost, and registers this rank again.
	Reconnect(ctx context.Context, lost bootstrap.Store) error
	// Known returns the record by which a rank was last reached.
	Known(rank int) (bootstrap.Record, bool)
	// Forget drops the record of a rank, unless it is of the incarnation except.
	Forget(rank int, except uint64)
	// Answers returns nil if the process that published rec answers.
	Answers(ctx context.Context, rec bootstrap.Record) error
	// Refuses reports whether nothing listens at any of rec's addresses.
	Refuses(ctx context.Context, rec bootstrap.Record) bool
}

// Groups receives the decisions of the membership. All methods are called with the proxy's lock.
type Groups interface {
	ViewChanged() // Roster.View has a new view
	Evicted()     // this rank is not a member any more
	Accused()     // a verdict is outstanding, before which no operation begins
	Judged()      // a verdict has been reached
	Isolated()    // at each tick at which this rank cannot take part in decisions
	// Awaited returns the ranks that operations have been waiting for longer than d, or than half
	// of their time.
	Awaited(d time.Duration) []int
}

// A Roster drives the membership machine of one rank: it feeds it events and carries out its
// actions. One goroutine steps the machine; others wait for the store. Methods are safe for
// concurrent use; those that need the proxy's lock end in Locked.
type Roster struct {
	cfg    Config
	self   membership.Peer
	proxy  *p2p.Proxy
	dir    Directory
	groups Groups
	log    *slog.Logger
	m      *membership.Machine
	acts   []membership.Action // the first ones, of membership.New
	within time.Duration       // what DecidesWithin returns
	ctx    context.Context
	cancel context.CancelFunc
	wg     sync.WaitGroup
	kick   chan struct{}
	dirty  chan struct{}

	doubts time.Time   // when to check next which ranks this one waits for
	listed time.Time   // when Admit last listed the waiting ranks in the store
	begun  atomic.Bool // the job's view has been in the store
	lapsed atomic.Bool // this rank has had no lease: the view may have been in the store meanwhile

	mu      sync.Mutex
	queue   []membership.Event
	asks    []func(*membership.Machine) // run by the goroutine that steps the machine
	want    map[string][]byte           // values to be written to the store, nil: to be deleted
	kept    map[string][]byte           // values that are in it under the lease
	joiners map[int]uint64              // waiting incarnations by slot, as in the store
	ending  map[membership.Peer]bool    // whose processes are known to end

	ran       time.Time // when ticked was last called
	leaseless bool      // this rank has lost its lease, and has no other yet
	unproven  time.Time // until when the lack of a record proves nothing

	// Under the proxy's lock.
	view     membership.View
	why      map[int]string // what WhyLocked returns
	isolated Isolation
	evicted  bool
	accused  map[membership.Peer]*accusation // accusations without a verdict
}

// Isolation says why a rank cannot take part in decisions on the membership.
type Isolation struct {
	Why   string // the newest reason; "": it can
	Since time.Time
}

// New makes a Roster. It is idle until Start.
func New(cfg Config) (*Roster, error) {
	// The window is longer than a lease: otherwise a silent host whose record is still there might
	// win against live ranks.
	window := max(cfg.Window, cfg.Directory.Store().TTL()+500*time.Millisecond)
	m, acts, err := membership.New(membership.Config{Slot: cfg.Self.Slot, Incarnation: cfg.Self.Incarnation,
		View: cfg.View, Window: int((window + tick - 1) / tick), Retry: 2, MaxSize: cfg.MaxSize,
		AutoAdmit: cfg.AutoAdmit, Proposers: 4})
	if err != nil {
		return nil, err
	}
	ro := &Roster{cfg: cfg, self: cfg.Self, proxy: cfg.Proxy, dir: cfg.Directory, groups: cfg.Groups, log: cfg.Logger,
		m: m, acts: acts, within: time.Duration(m.Longest()) * tick, view: cfg.View, why: map[int]string{},
		kick: make(chan struct{}, 1), dirty: make(chan struct{}, 1),
		want: map[string][]byte{}, kept: map[string][]byte{}, joiners: map[int]uint64{},
		accused: map[membership.Peer]*accusation{}}
	ro.ctx, ro.cancel = context.WithCancel(context.Background())
	return ro, nil
}

// DecidesWithin returns how long a link between two live ranks is known to be missing, at most,
// before they propose to remove one of them.
func (ro *Roster) DecidesWithin() time.Duration { return ro.within }

// Start makes the proxy expect the ranks of the view, and runs the machine until Stop. Links of
// other ranks stay: a rank that joins may know this one's view before this one's Roster runs.
func (ro *Roster) Start() {
	view := ro.cfg.View
	for r := range ro.cfg.MaxSize {
		switch {
		case r == ro.self.Slot:
		case r < view.Size() && view.Slots[r].Incarnation != 0:
			ro.proxy.Expect(r, view.Slots[r].Incarnation)
		default:
			ro.proxy.MarkDeadUnlinked(r, 0, NoProcess(r))
		}
	}
	if without, late := ro.dir.HandOver(); !without.IsZero() {
		ro.lapsed.Store(late)
		ro.unproven = without.Add(ro.regain())
	}
	ro.wg.Add(3)
	go ro.run()
	go ro.watch()
	go ro.write()
	if view.Epoch == 1 && view.Has(ro.self.Slot, ro.self.Incarnation) {
		ro.aside(func() { ro.begin(view) })
	}
}

// Stop stops what Start has started, in bounded time.
func (ro *Roster) Stop() {
	ro.cancel()
	ro.wg.Wait()
}

// First returns the number that names the job in its store.
func (ro *Roster) First() uint64 { return ro.cfg.First }

// ViewLocked returns the job's view as this rank knows it. The caller must not change it.
func (ro *Roster) ViewLocked() membership.View { return ro.view }

// View is ViewLocked for callers without the proxy's lock.
func (ro *Roster) View() membership.View {
	ro.proxy.Lock()
	defer ro.proxy.Unlock()
	return ro.view
}

// NoReason is what is said of the loss of a rank that this rank knows nothing of.
const NoReason = "other ranks removed it"

// WhyLocked returns why a rank was last removed; "" if it never was, or if this rank knows nothing
// of its loss. For this rank it returns why it has removed itself, or takes itself for evicted; ""
// if the others have removed it.
func (ro *Roster) WhyLocked(rank int) string { return ro.why[rank] }

// EvictedLocked reports whether this rank has been removed.
func (ro *Roster) EvictedLocked() bool { return ro.evicted }

// IsolatedLocked says whether this rank can take part in decisions on the membership.
func (ro *Roster) IsolatedLocked() Isolation { return ro.isolated }

// aside runs f on a goroutine until it is done or the job ends.
func (ro *Roster) aside(f func()) {
	ro.wg.Add(1)
	go func() { defer ro.wg.Done(); f() }()
}

// Tell queues an event. It never blocks.
func (ro *Roster) Tell(e membership.Event) {
	ro.mu.Lock()
	ro.queue = append(ro.queue, e)
	ro.mu.Unlock()
	nudge(ro.kick)
}

func nudge(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}

// inspect queues a call of f with the machine, after the events that were queued before, in the
// goroutine that steps it. It never blocks.
func (ro *Roster) inspect(f func(*membership.Machine)) {
	ro.mu.Lock()
	ro.asks = append(ro.asks, f)
	ro.mu.Unlock()
	nudge(ro.kick)
}

// Ask calls f with the machine, after the events that were queued before, and returns when f has.
// It returns ctx's error when ctx ends first, and an error that wraps p2p.ErrClosed after Stop.
// After an error f may still be called, and what it writes must not be read.
func (ro *Roster) Ask(ctx context.Context, f func(*membership.Machine)) error {
	done := make(chan struct{})
	ro.inspect(func(m *membership.Machine) { f(m); close(done) })
	select {
	case <-done:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	case <-ro.ctx.Done():
		return p2p.ErrClosed
	}
}

// LinkLocked is the proxy's callback for a link that came up (err is nil) or failed.
func (ro *Roster) LinkLocked(peer p2p.Identity, err error) {
	p := membership.Peer{Slot: peer.Rank, Incarnation: peer.Incarnation}
	if p.Incarnation == 0 && p.Slot < len(ro.view.Slots) { // never linked: the incarnation in the view
		p.Incarnation = ro.view.Slots[p.Slot].Incarnation
	}
	if err == nil {
		ro.Tell(membership.LinkUp{Peer: p})
	} else {
		if errors.Is(err, p2p.ErrPeerEnds) {
			ro.mu.Lock()
			if ro.ending == nil {
				ro.ending = map[membership.Peer]bool{}
			}
			ro.ending[p] = true
			ro.mu.Unlock()
		}
		ro.Tell(membership.LinkDown{Peer: p, Cause: err.Error()})
	}
}

func (ro *Roster) run() {
	defer ro.wg.Done()
	ticker := time.NewTicker(tick)
	defer ticker.Stop()
	for acts := ro.acts; ; {
		for _, a := range acts {
			ro.do(a)
		}
		acts = nil
		ro.mu.Lock()
		if len(ro.queue) > 0 {
			e := ro.queue[0]
			ro.queue = ro.queue[1:]
			ro.mu.Unlock()
			if d, ok := e.(membership.LinkDown); ok && !ro.m.View().Has(d.Slot, d.Incarnation) {
				// The next process may take the slot.
				ro.proxy.MarkDeadUnlinked(d.Slot, d.Incarnation, NoProcess(d.Slot))
			}
			acts = ro.step(e)
			continue
		}
		asks := ro.asks
		ro.asks = nil
		ro.mu.Unlock()
		for _, f := range asks {
			f(ro.m)
		}
		select {
		case <-ro.kick:
		case <-ticker.C:
			ro.proxy.Idle()
			ro.doubt()
			ro.expire()
			if ro.isolated.Why != "" { // only this goroutine changes it
				ro.proxy.Lock()
				ro.groups.Isolated()
				ro.proxy.Unlock()
			}
			acts = ro.step(membership.Tick{})
		case <-ro.ctx.Done():
			return
		}
	}
}

// step steps the machine. Links end before the view is entered in which others have their slots.
func (ro *Roster) step(e membership.Event) []membership.Action {
	was := ro.m.View()
	acts := ro.m.Step(e)
	if now := ro.m.View(); now.Epoch != was.Epoch && !ro.evicted { // only this goroutine changes it
		ro.succeed(was, now)
	}
	return acts
}

// succeed ends the links with incarnations that have left the view, and expects those that have
// their slots now. Otherwise operations of the new view would use an old link, and lose what they
// have with the new incarnation when it ends. A link with an incarnation that was in no view stays:
// it may be in a later one.
//
// A member leaves slots that are empty now to enter. A rank that waits does not enter views, so its
// links with incarnations that have no successors end here.
func (ro *Roster) succeed(was, now membership.View) {
	member := was.Has(ro.self.Slot, ro.self.Incarnation)
	if member && !now.Has(ro.self.Slot, ro.self.Incarnation) {
		return
	}
	for r, s := range now.Slots {
		var old uint64
		if r < was.Size() {
			old = was.Slots[r].Incarnation
		}
		if r == ro.self.Slot || old == s.Incarnation || member && s.Incarnation == 0 {
			continue
		}
		if old != 0 {
			ro.proxy.MarkDead(r, old, ro.lost(membership.Peer{Slot: r, Incarnation: old}))
		}
		if s.Incarnation != 0 {
			ro.dir.Forget(r, s.Incarnation)
			ro.proxy.Expect(r, s.Incarnation)
		}
	}
}

// lost returns the error for links to an incarnation that has left the view.
func (ro *Roster) lost(p membership.Peer) error {
	because := strings.TrimSuffix(cmp.Or(ro.m.Why(p), NoReason), ": "+p2p.ErrPeerGone.Error())
	return fmt.Errorf("%s: %w", because, p2p.ErrPeerGone)
}

func (ro *Roster) do(a membership.Action) {
	ro.log.Debug("membership", "do", a.String())
	switch a := a.(type) {
	case membership.Propose:
		ro.aside(func() { ro.propose(a) })
	case membership.Enter:
		ro.enter(a)
	case membership.Probe:
		ro.aside(func() {
			verdict := ro.probe(a.Peer)
			ro.Tell(membership.Probed{Peer: a.Peer, Verdict: verdict})
			if verdict == membership.VerdictAlive {
				ro.proxy.Reconnect(a.Slot)
			}
		})
	case membership.Warm:
		ro.warm(a.Peer)
	case membership.Report:
		if len(a.Unreachable)+len(a.Late) > 0 || a.Seq != 1 {
			ro.publish(reportKey, ro.signed(a.Encode()))
		}
	case membership.AskJoin:
		ro.publish(joinKey, ro.signed(encodeEpoch(a.Epoch)))
	case membership.UnaskJoin:
		ro.publish(joinKey, nil)
	case membership.Evicted:
		var why string
		ro.state(func() {
			why = cmp.Or(ro.why[ro.self.Slot], ro.m.Why(ro.self))
			ro.why[ro.self.Slot], ro.evicted = why, true
			ro.groups.Evicted()
		})
		ro.log.Warn("this rank was evicted", "view", a.View.String(),
			"why", cmp.Or(why, "the other ranks have removed it"))
		ro.aside(func() { ro.clear(ro.self.Slot, ro.self.Incarnation) }) // a replacement can take the slot
	case membership.Isolated:
		level := slog.LevelDebug // of another reason
		ro.state(func() {
			if ro.isolated.Why == "" {
				ro.isolated.Since, level = time.Now(), slog.LevelWarn
			}
			ro.isolated.Why = a.Why
		})
		ro.log.Log(ro.ctx, level, "this rank cannot take part in decisions on the membership", "why", a.Why)
	case membership.Reunited:
		ro.state(func() { ro.isolated = Isolation{} })
	}
}

// state changes state that groups read, and notifies them.
func (ro *Roster) state(f func()) {
	ro.proxy.Lock()
	f()
	ro.proxy.Unlock()
	ro.proxy.Wake()
}

// enter makes a view current.
func (ro *Roster) enter(a membership.Enter) {
	var old membership.View
	why := map[int]string{}
	ro.state(func() {
		old = ro.view
		for _, r := range a.Removed {
			if why[r] = ""; r < len(old.Slots) {
				why[r] = ro.m.Why(membership.Peer{Slot: r, Incarnation: old.Slots[r].Incarnation})
			}
		}
		ro.view = a.View
		maps.Copy(ro.why, why)
		for p := range ro.accused {
			if !ro.view.Has(p.Slot, p.Incarnation) {
				delete(ro.accused, p)
			}
		}
		ro.mu.Lock()
		for p := range ro.ending {
			if !ro.view.Has(p.Slot, p.Incarnation) {
				delete(ro.ending, p)
			}
		}
		ro.mu.Unlock()
		ro.groups.ViewChanged()
	})
	for _, r := range a.Removed {
		if a.View.Slots[r].Incarnation != 0 { // see succeed
			continue
		}
		if ro.dir.Forget(r, 0); r >= len(old.Slots) || r == ro.self.Slot {
			continue
		}
		p := membership.Peer{Slot: r, Incarnation: old.Slots[r].Incarnation}
		ro.proxy.MarkDead(r, p.Incarnation, ro.lost(p))
	}
	// The record of the dead rank is removed before its lease ends, so that a replacement can take
	// the slot.
	if active := a.View.Active(); slices.Index(active, ro.self.Slot) < 2 {
		for _, r := range a.Removed {
			if r < len(old.Slots) && old.Slots[r].Incarnation != 0 {
				ro.aside(func() { ro.clear(r, old.Slots[r].Incarnation) })
			}
		}
	}
	// While this rank waited for admission, it tried to link with ranks that have been lost since.
	// It has to accept their replacements.
	if !old.Has(ro.self.Slot, ro.self.Incarnation) {
		for r := range ro.cfg.MaxSize {
			if r != ro.self.Slot && (r >= a.View.Size() || a.View.Slots[r].Incarnation == 0) {
				ro.proxy.MarkDeadUnlinked(r, 0, NoProcess(r))
			}
		}
	}
}

// NoProcess returns the error for links to a slot without a process. It wraps p2p.ErrPeerGone.
func NoProcess(rank int) error { return fmt.Errorf("no process is rank %d: %w", rank, p2p.ErrPeerGone) }

// warm connects to an incarnation, or reports that the link is up.
func (ro *Roster) warm(p membership.Peer) {
	if ro.proxy.Linked(p.Slot) == p.Incarnation {
		ro.Tell(membership.LinkUp{Peer: p})
		return
	}
	ro.dir.Forget(p.Slot, p.Incarnation)
	ro.proxy.Expect(p.Slot, p.Incarnation)
	ro.proxy.Reconnect(p.Slot)
}

// Knock asks the members to check whether the process that holds this rank's slot in the view is
// still alive.
func (ro *Roster) Knock() { ro.publish(knockKey, ro.signed(nil)) }

// Joined withdraws the requests that this rank made to be admitted.
func (ro *Roster) Joined() {
	ro.publish(joinKey, nil)
	ro.publish(knockKey, nil)
}

// Unask removes the requests of this rank's Roster, which has been stopped, from the store.
func (ro *Roster) Unask(ctx context.Context) error {
	for _, prefix := range []string{joinKey, knockKey} {
		if err := ro.dir.Store().Delete(ctx, prefix+strconv.Itoa(ro.self.Slot)); err != nil {
			return err
		}
	}
	return nil
}

// Admit makes the machine admit the waiting ranks, and returns the view that contains them. The
// waiting ranks are known from the watch of the store. The store is also listed, but once a tick at
// most, because programs call Admit in each of their steps. Admit waits for the store until ctx
// ends, and at most for StoreWait, because all ranks wait for this one.
func (ro *Roster) Admit(ctx context.Context) (v membership.View, err error) {
	sctx, cancel := context.WithTimeout(ctx, StoreWait)
	defer cancel()
	if now := time.Now(); now.Sub(ro.listed) >= tick {
		all, err := ro.dir.Store().List(sctx, joinKey)
		if err != nil {
			return v, err
		}
		ro.listed = now
		for key, value := range all {
			ro.seen(bootstrap.Event{Key: key, Value: value, Exists: true})
		}
	}
	ro.Tell(membership.Admit{})
	for {
		var pending bool
		var now membership.View
		if err := ro.Ask(sctx, func(m *membership.Machine) { pending, now = m.Pending(), m.View() }); err != nil {
			return v, err
		}
		if !pending {
			return now, nil
		}
		select {
		case <-sctx.Done():
			return v, sctx.Err()
		case <-time.After(time.Millisecond):
		}
	}
}
