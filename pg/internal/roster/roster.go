package roster

import (
	"context"
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
	View      membership.View // in which the roster begins; Self need not be active in it
	First     uint64          // names the job in the store: see membership.EncodeStored
	MaxSize   int             // slots that the job may grow to
	Window    time.Duration   // how long two live ranks may be unable to reach each other
	AutoAdmit bool            // ranks that wait are let in without Admit
	Doubt     bool            // the store is asked for ranks that are waited for longer than a lease
	Proxy     *p2p.Proxy
	Directory Directory
	Groups    Groups
	Logger    *slog.Logger
}

// A Directory is the way to the job's store and to other ranks. Its methods are called from any
// goroutine, without the proxy's lock.
type Directory interface {
	// Store returns the handle in use.
	Store() bootstrap.Store
	// Reconnect replaces a handle whose lease was lost, and registers this rank again.
	Reconnect(ctx context.Context, lost bootstrap.Store) error
	// Known returns the record by which a rank was reached last.
	Known(rank int) (bootstrap.Record, bool)
	// Forget drops what is known of a rank, unless it is of the incarnation except.
	Forget(rank int, except uint64)
	// Answers returns nil if the process that published rec answers.
	Answers(ctx context.Context, rec bootstrap.Record) error
	// Refuses reports whether nobody listens at any of rec's addresses.
	Refuses(ctx context.Context, rec bootstrap.Record) bool
}

// Groups is told what the membership has decided. All methods are called with the proxy's lock.
type Groups interface {
	ViewChanged() // Roster.View has
	Evicted()     // this rank is no member any more
	Accused()     // a verdict is outstanding, before which no operation begins
	Judged()      // a verdict is outstanding no longer
	// Awaited returns the ranks that operations have been waiting for longer than d.
	Awaited(d time.Duration) []int
}

// A Roster drives the membership machine of one rank: it carries events to it and does what it
// says. One goroutine steps the machine; others wait for the store. Methods are safe for concurrent
// use; those that need the proxy's lock end in Locked.
type Roster struct {
	cfg    Config
	self   membership.Peer
	proxy  *p2p.Proxy
	dir    Directory
	groups Groups
	log    *slog.Logger
	m      *membership.Machine
	acts   []membership.Action // of its making
	ctx    context.Context
	cancel context.CancelFunc
	wg     sync.WaitGroup
	kick   chan struct{}
	dirty  chan struct{}

	doubts time.Time   // when to look next whom this rank waits for
	listed time.Time   // when Admit asked the store last who waits
	begun  atomic.Bool // the job's view has been in the store

	mu      sync.Mutex
	queue   []membership.Event
	asks    []func(*membership.Machine) // run by the goroutine that steps the machine
	want    map[string][]byte           // what is to be in the store, nil: nothing; until it is
	kept    map[string][]byte           // what is in it under the lease
	joiners map[int]uint64              // who waits in which slot, as the store says

	// Under the proxy's lock.
	view     membership.View
	why      map[int]string // why ranks were removed, when they were last
	isolated Isolation
	evicted  bool
	accused  map[membership.Peer]*accusation // on whom a verdict is outstanding
}

// Isolation says that a rank cannot take part in deciding who is a member.
type Isolation struct {
	Why   string // "": it can
	Since time.Time
}

// New makes a Roster. It does nothing before Start.
func New(cfg Config) (*Roster, error) {
	// Longer than a lease: else a host that fell silent, whose lease is not over yet, might win
	// against ranks that live.
	window := max(cfg.Window, cfg.Directory.Store().TTL()+500*time.Millisecond)
	m, acts, err := membership.New(membership.Config{Slot: cfg.Self.Slot, Incarnation: cfg.Self.Incarnation,
		View: cfg.View, Window: int((window + tick - 1) / tick), Retry: 2, MaxSize: cfg.MaxSize,
		AutoAdmit: cfg.AutoAdmit, Proposers: 4})
	if err != nil {
		return nil, err
	}
	ro := &Roster{cfg: cfg, self: cfg.Self, proxy: cfg.Proxy, dir: cfg.Directory, groups: cfg.Groups, log: cfg.Logger,
		m: m, acts: acts, view: cfg.View, why: map[int]string{},
		kick: make(chan struct{}, 1), dirty: make(chan struct{}, 1),
		want: map[string][]byte{}, kept: map[string][]byte{}, joiners: map[int]uint64{},
		accused: map[membership.Peer]*accusation{}}
	ro.ctx, ro.cancel = context.WithCancel(context.Background())
	return ro, nil
}

// Start has the proxy expect the ranks of the view, and begins to run the machine, until Stop.
func (ro *Roster) Start() {
	view := ro.cfg.View
	for r := range ro.cfg.MaxSize {
		switch {
		case r == ro.self.Slot:
		case r < view.Size() && view.Slots[r].Incarnation != 0:
			ro.proxy.Expect(r, view.Slots[r].Incarnation)
		default:
			ro.proxy.Vacate(r, 0, Nobody(r))
		}
	}
	ro.wg.Add(3)
	go ro.run()
	go ro.watch()
	go ro.write()
	if active := view.Active(); len(active) > 0 && active[0] == ro.self.Slot && view.Epoch == 1 {
		ro.aside(func() { ro.publishFirst(ro.ctx, view) })
	}
}

// Stop ends what Start began, in bounded time.
func (ro *Roster) Stop() {
	ro.cancel()
	ro.wg.Wait()
}

// First returns the number that names the job in its store.
func (ro *Roster) First() uint64 { return ro.cfg.First }

// ViewLocked returns the job's view, as this rank knows it. It is not to be changed.
func (ro *Roster) ViewLocked() membership.View { return ro.view }

// View is ViewLocked for callers without the proxy's lock.
func (ro *Roster) View() membership.View {
	ro.proxy.Lock()
	defer ro.proxy.Unlock()
	return ro.view
}

// WhyLocked says why a rank was removed when it was last; "" if it never was.
func (ro *Roster) WhyLocked(rank int) string { return ro.why[rank] }

// EvictedLocked reports whether this rank has been removed.
func (ro *Roster) EvictedLocked() bool { return ro.evicted }

// IsolatedLocked says whether this rank can take part in deciding who is a member.
func (ro *Roster) IsolatedLocked() Isolation { return ro.isolated }

// aside runs f beside the machine until it is done or the job ends.
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

// inspect has f look at the machine, after the events that were told before, in the goroutine that
// steps it. It never blocks.
func (ro *Roster) inspect(f func(*membership.Machine)) {
	ro.mu.Lock()
	ro.asks = append(ro.asks, f)
	ro.mu.Unlock()
	nudge(ro.kick)
}

// Ask has f look at the machine, after the events that were told before, and returns when it has.
// It returns ctx's error when that ends first, and one that wraps p2p.ErrClosed after Stop.
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

// LinkLocked is the proxy's word of a link that came up, or went down because of err.
func (ro *Roster) LinkLocked(peer p2p.Identity, err error) {
	p := membership.Peer{Slot: peer.Rank, Incarnation: peer.Incarnation}
	if p.Incarnation == 0 && p.Slot < len(ro.view.Slots) { // never linked: with whom we wanted to be
		p.Incarnation = ro.view.Slots[p.Slot].Incarnation
	}
	if err == nil {
		ro.Tell(membership.LinkUp{Peer: p})
	} else {
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
			if d, ok := e.(membership.LinkDown); ok && !ro.m.View().Has(d.Slot, d.Incarnation) &&
				(d.Incarnation != 0 || ro.proxy.Linked(d.Slot) == 0) {
				ro.proxy.Vacate(d.Slot, d.Incarnation, Nobody(d.Slot)) // the next one who wants the slot may come
			}
			acts = ro.m.Step(e)
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
			acts = ro.m.Step(membership.Tick{})
		case <-ro.ctx.Done():
			return
		}
	}
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
				ro.proxy.Relink(a.Slot)
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
		ro.log.Warn("this rank was evicted", "view", a.View.String())
		ro.state(func() { ro.evicted = true; ro.groups.Evicted() })
	case membership.Isolated:
		ro.log.Warn("this rank cannot decide who is a member", "why", a.Why)
		ro.state(func() { ro.isolated = Isolation{a.Why, time.Now()} })
	case membership.Reunited:
		ro.state(func() { ro.isolated = Isolation{} })
	}
}

// state changes what groups look at, and has them look.
func (ro *Roster) state(f func()) {
	ro.proxy.Lock()
	f()
	ro.proxy.Unlock()
	ro.proxy.Wake()
}

// enter makes a view this rank's.
func (ro *Roster) enter(a membership.Enter) {
	var old membership.View
	why := map[int]string{}
	ro.state(func() {
		old = ro.view
		for _, r := range a.Removed {
			if r < len(old.Slots) {
				why[r] = ro.m.Why(membership.Peer{Slot: r, Incarnation: old.Slots[r].Incarnation})
			}
			if why[r] == "" {
				why[r] = "other ranks removed it"
			}
		}
		ro.view = a.View
		maps.Copy(ro.why, why)
		for p := range ro.accused {
			if !ro.view.Has(p.Slot, p.Incarnation) {
				delete(ro.accused, p)
			}
		}
		ro.groups.ViewChanged()
	})
	for _, r := range slices.Concat(a.Removed, a.Added) {
		ro.dir.Forget(r, 0)
	}
	for _, r := range a.Removed {
		if r >= len(old.Slots) || r == ro.self.Slot {
			continue
		}
		because := strings.TrimSuffix(why[r], ": "+p2p.ErrPeerGone.Error())
		ro.proxy.Vacate(r, old.Slots[r].Incarnation, fmt.Errorf("%s: %w", because, p2p.ErrPeerGone))
	}
	// The dead one's record need not wait for the end of its lease: whoever replaces it may have
	// the slot.
	if active := a.View.Active(); slices.Index(active, ro.self.Slot) < 2 {
		for _, r := range a.Removed {
			if r < len(old.Slots) && old.Slots[r].Incarnation != 0 {
				ro.aside(func() { ro.clear(r, old.Slots[r].Incarnation) })
			}
		}
	}
	// While it waited to be let in, it tried in vain to link with ranks that have been lost since:
	// who replaces them is welcome.
	if !old.Has(ro.self.Slot, ro.self.Incarnation) {
		for r := range ro.cfg.MaxSize {
			if r != ro.self.Slot && (r >= a.View.Size() || a.View.Slots[r].Incarnation == 0) && ro.proxy.Linked(r) == 0 {
				ro.proxy.Vacate(r, 0, Nobody(r))
			}
		}
	}
	for _, r := range a.Added {
		if r != ro.self.Slot {
			ro.proxy.Expect(r, a.View.Slots[r].Incarnation)
		}
	}
}

// Nobody returns why a slot's rank is not linked that no process has. It wraps p2p.ErrPeerGone.
func Nobody(rank int) error { return fmt.Errorf("nobody is rank %d: %w", rank, p2p.ErrPeerGone) }

// warm makes a link with a life, or says that there is one.
func (ro *Roster) warm(p membership.Peer) {
	if ro.proxy.Linked(p.Slot) == p.Incarnation {
		ro.Tell(membership.LinkUp{Peer: p})
		return
	}
	ro.dir.Forget(p.Slot, p.Incarnation)
	ro.proxy.Expect(p.Slot, p.Incarnation)
	ro.proxy.Relink(p.Slot)
}

// Knock asks the members to look whether the process that has this rank's slot in the view still
// lives.
func (ro *Roster) Knock() { ro.publish(knockKey, ro.signed(nil)) }

// Joined takes back what this rank has asked for in order to be let in.
func (ro *Roster) Joined() {
	ro.publish(joinKey, nil)
	ro.publish(knockKey, nil)
}

// Unask removes from the store what a Roster of this rank, which has been stopped, has asked for.
func (ro *Roster) Unask(ctx context.Context) error {
	for _, prefix := range []string{joinKey, knockKey} {
		if err := ro.dir.Store().Delete(ctx, prefix+strconv.Itoa(ro.self.Slot)); err != nil {
			return err
		}
	}
	return nil
}

// Admit has the machine let in who waits, and returns the view in which they are. Who waits it
// knows from its watch of the store. It asks the store as well, but once a tick at most: programs
// admit in each of their steps. It waits for the store, at most until ctx ends.
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
		if err := ro.Ask(sctx, func(m *membership.Machine) { pending, v = m.Pending(), m.View() }); err != nil ||
			!pending {
			return v, err
		}
		select {
		case <-sctx.Done():
			return v, sctx.Err()
		case <-time.After(time.Millisecond):
		}
	}
}
