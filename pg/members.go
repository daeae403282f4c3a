package pg

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"net"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"tutti/bootstrap"
	"tutti/internal/detour"
	"tutti/p2p"
	"tutti/pg/membership"
)

// Keys of the membership in the job's store. All but the view live as long as the lease of the rank
// that wrote them. Each value begins with eight bytes that say whose it is: of the view the job's
// (a store may outlive jobs of the same name), of the others an incarnation.
const (
	membersPrefix = "membership/"
	viewKey       = membersPrefix + "view"
	reportKey     = membersPrefix + "report/"
	joinKey       = membersPrefix + "join/"
	knockKey      = membersPrefix + "knock/" // a new life found an old one in its slot: is that alive?
)

const (
	tick      = 50 * time.Millisecond // the machine's unit of time
	storeWait = 2 * time.Second       // bound of one call of the store
	probeWait = 500 * time.Millisecond
)

// members runs one rank's membership machine: it carries events to it and does what it says. One
// goroutine steps the machine; others wait for the store.
type members struct {
	j      *job
	self   membership.Peer
	first  uint64 // names the job in the view's key: the incarnation of the lowest slot of its first view
	m      *membership.Machine
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
	isolated string // why this rank cannot decide anything; "": it can
	since    time.Time
	evicted  bool
	accused  map[membership.Peer]*accusation // on whom a verdict is outstanding
}

// accusation is what this rank has said of another that its operation waited for in vain.
type accusation struct {
	until    time.Time // others agree by then, or it is taken back
	withdraw bool      // it is being taken back
}

// startMembers begins to run the machine of this rank with view, which may not have it yet.
func (j *job) startMembers(view membership.View, first uint64) error {
	s := j.settings
	self := membership.Peer{Slot: j.self.Rank, Incarnation: j.self.Incarnation}
	// Longer than a lease: else a host that fell silent, whose lease is not over yet, might win
	// against ranks that live.
	window := max(s.Window, j.store.TTL()+500*time.Millisecond)
	m, acts, err := membership.New(membership.Config{Slot: self.Slot, Incarnation: self.Incarnation, View: view,
		Window: int((window + tick - 1) / tick),
		Retry:  2, MaxSize: s.MaxSize, AutoAdmit: s.AutoAdmit, Proposers: 4})
	if err != nil {
		return err
	}
	ms := &members{j: j, self: self, first: first, m: m, kick: make(chan struct{}, 1), dirty: make(chan struct{}, 1),
		want: map[string][]byte{}, kept: map[string][]byte{}, joiners: map[int]uint64{},
		accused: map[membership.Peer]*accusation{}}
	ms.ctx, ms.cancel = context.WithCancel(context.Background())
	for r := range s.MaxSize {
		switch {
		case r == self.Slot:
		case r < view.Size() && view.Slots[r].Incarnation != 0:
			j.proxy.Expect(r, view.Slots[r].Incarnation)
		default:
			j.proxy.Vacate(r, 0, nobody(r))
		}
	}
	j.proxy.Lock()
	j.view, j.members = view, ms
	j.proxy.Unlock()
	ms.wg.Add(3)
	go ms.run(acts)
	go ms.watch()
	go ms.write()
	if active := view.Active(); len(active) > 0 && active[0] == self.Slot && view.Epoch == 1 {
		ms.aside(func() { ms.publishFirst(ms.ctx, view) })
	}
	return nil
}

func (ms *members) stop() {
	ms.cancel()
	ms.wg.Wait()
}

// aside runs f beside the machine until it is done or the job ends.
func (ms *members) aside(f func()) {
	ms.wg.Add(1)
	go func() { defer ms.wg.Done(); f() }()
}

// tell queues an event. It never blocks.
func (ms *members) tell(e membership.Event) {
	ms.mu.Lock()
	ms.queue = append(ms.queue, e)
	ms.mu.Unlock()
	ms.nudge(ms.kick)
}

func (ms *members) nudge(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}

// inspect has f look at the machine, after the events that were told before, in the goroutine that
// steps it. It never blocks.
func (ms *members) inspect(f func(*membership.Machine)) {
	ms.mu.Lock()
	ms.asks = append(ms.asks, f)
	ms.mu.Unlock()
	ms.nudge(ms.kick)
}

// ask has f look at the machine, after the events that were told before, and returns when it has.
func (ms *members) ask(ctx context.Context, f func(*membership.Machine)) error {
	done := make(chan struct{})
	ms.inspect(func(m *membership.Machine) { f(m); close(done) })
	select {
	case <-done:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	case <-ms.ctx.Done():
		return ErrClosed
	}
}

// accuse says that this rank waits in vain for p, which goes if most ranks say so, or at once if
// alone. With the proxy's lock.
func (ms *members) accuse(p membership.Peer, alone bool) {
	ms.accused[p] = &accusation{until: time.Now().Add(ms.j.settings.Window)}
	for g := range ms.j.groups {
		g.rough = true
	}
	if alone {
		ms.tell(membership.Missed{Peer: p})
	} else {
		ms.tell(membership.Late{Peer: p})
	}
}

// acquit takes back what this rank said of p. It is forgotten when the machine has heard that, but
// if p's removal is under way only with that. With the proxy's lock.
func (ms *members) acquit(p membership.Peer) {
	a := ms.accused[p]
	if a == nil || a.withdraw {
		return
	}
	a.withdraw = true
	ms.tell(membership.OnTime{Peer: p})
	ms.inspect(func(m *membership.Machine) {
		if m.Condemned(p) {
			return
		}
		ms.state(func() {
			if ms.accused[p] == a {
				delete(ms.accused, p)
			}
			for g := range ms.j.groups {
				g.answer()
			}
		})
	})
}

// expire takes back accusations that others have not shared in time.
func (ms *members) expire() {
	if ms.j.settings.OnTimeout == TimeoutReports {
		return
	}
	ms.j.proxy.Lock()
	defer ms.j.proxy.Unlock()
	for p, a := range ms.accused {
		if time.Now().After(a.until) {
			ms.acquit(p)
		}
	}
}

// link is the proxy's word of a link that came up or went down; called with its lock.
func (ms *members) link(peer p2p.Identity, err error) {
	p := membership.Peer{Slot: peer.Rank, Incarnation: peer.Incarnation}
	if p.Incarnation == 0 && p.Slot < len(ms.j.view.Slots) { // never linked: with whom we wanted to be
		p.Incarnation = ms.j.view.Slots[p.Slot].Incarnation
	}
	if err == nil {
		ms.tell(membership.LinkUp{Peer: p})
	} else {
		ms.tell(membership.LinkDown{Peer: p, Cause: err.Error()})
	}
}

func (ms *members) run(acts []membership.Action) {
	defer ms.wg.Done()
	ticker := time.NewTicker(tick)
	defer ticker.Stop()
	for {
		for _, a := range acts {
			ms.do(a)
		}
		acts = nil
		ms.mu.Lock()
		if len(ms.queue) > 0 {
			e := ms.queue[0]
			ms.queue = ms.queue[1:]
			ms.mu.Unlock()
			if d, ok := e.(membership.LinkDown); ok && !ms.m.View().Has(d.Slot, d.Incarnation) &&
				(d.Incarnation != 0 || ms.j.proxy.Linked(d.Slot) == 0) {
				ms.j.proxy.Vacate(d.Slot, d.Incarnation, nobody(d.Slot)) // the next one who wants the slot may come
			}
			acts = ms.m.Step(e)
			continue
		}
		asks := ms.asks
		ms.asks = nil
		ms.mu.Unlock()
		for _, f := range asks {
			f(ms.m)
		}
		select {
		case <-ms.kick:
		case <-ticker.C:
			ms.j.proxy.Idle()
			ms.doubt()
			ms.expire()
			acts = ms.m.Step(membership.Tick{})
		case <-ms.ctx.Done():
			return
		}
	}
}

func (ms *members) do(a membership.Action) {
	ms.j.log.Debug("membership", "do", a.String())
	switch a := a.(type) {
	case membership.Propose:
		ms.aside(func() { ms.propose(a) })
	case membership.Enter:
		ms.enter(a)
	case membership.Probe:
		ms.aside(func() {
			verdict := ms.probe(a.Peer)
			ms.tell(membership.Probed{Peer: a.Peer, Verdict: verdict})
			if verdict == membership.VerdictAlive {
				ms.j.proxy.Relink(a.Slot)
			}
		})
	case membership.Warm:
		ms.warm(a.Peer)
	case membership.Report:
		key := reportKey + strconv.Itoa(ms.self.Slot)
		if len(a.Unreachable)+len(a.Late) == 0 && a.Seq == 1 {
			return
		}
		ms.publish(key, append(stamp(ms.self.Incarnation), a.Encode()...))
	case membership.AskJoin:
		ms.publish(joinKey+strconv.Itoa(ms.self.Slot), binary.BigEndian.AppendUint64(stamp(ms.self.Incarnation),
			a.Epoch))
	case membership.UnaskJoin:
		ms.publish(joinKey+strconv.Itoa(ms.self.Slot), nil)
	case membership.Evicted:
		ms.j.log.Warn("this rank was evicted", "view", a.View.String())
		ms.state(func() { ms.evicted = true; ms.j.interrupt(ErrEvicted) })
	case membership.Isolated:
		ms.j.log.Warn("this rank cannot decide who is a member", "why", a.Why)
		ms.state(func() { ms.isolated, ms.since = a.Why, time.Now() })
	case membership.Reunited:
		ms.state(func() { ms.isolated = "" })
	}
}

// state changes what groups look at, and has them look.
func (ms *members) state(f func()) {
	ms.j.proxy.Lock()
	f()
	ms.j.proxy.Unlock()
	ms.j.proxy.Wake()
}

// enter makes a view this rank's.
func (ms *members) enter(a membership.Enter) {
	j := ms.j
	var old membership.View
	why := map[int]string{}
	ms.state(func() {
		old = j.view
		for _, r := range a.Removed {
			if r < len(old.Slots) {
				why[r] = ms.m.Why(membership.Peer{Slot: r, Incarnation: old.Slots[r].Incarnation})
			}
			if why[r] == "" {
				why[r] = "other ranks removed it"
			}
		}
		j.view = a.View
		if j.why == nil {
			j.why = map[int]string{}
		}
		maps.Copy(j.why, why)
		for p := range ms.accused {
			if !j.view.Has(p.Slot, p.Incarnation) {
				delete(ms.accused, p)
			}
		}
		for g := range j.groups {
			g.viewChanged()
		}
	})
	j.mu.Lock()
	for _, r := range append(slices.Clone(a.Removed), a.Added...) {
		delete(j.records, r)
	}
	j.mu.Unlock()
	for _, r := range a.Removed {
		if r >= len(old.Slots) || r == ms.self.Slot {
			continue
		}
		because := strings.TrimSuffix(why[r], ": "+p2p.ErrPeerGone.Error())
		ms.j.proxy.Vacate(r, old.Slots[r].Incarnation, fmt.Errorf("%s: %w", because, p2p.ErrPeerGone))
	}
	// The dead one's record need not wait for the end of its lease: whoever replaces it may have
	// the slot.
	if active := a.View.Active(); slices.Index(active, ms.self.Slot) < 2 {
		for _, r := range a.Removed {
			if r < len(old.Slots) && old.Slots[r].Incarnation != 0 {
				ms.aside(func() { ms.clear(r, old.Slots[r].Incarnation) })
			}
		}
	}
	// while it waited to be let in, it tried in vain to link with ranks that have been lost since:
	// who replaces them is welcome
	if !old.Has(ms.self.Slot, ms.self.Incarnation) {
		for r := range j.settings.MaxSize {
			if r != ms.self.Slot && (r >= a.View.Size() || a.View.Slots[r].Incarnation == 0) && j.proxy.Linked(r) == 0 {
				j.proxy.Vacate(r, 0, nobody(r))
			}
		}
	}
	for _, r := range a.Added {
		if r != ms.self.Slot {
			j.proxy.Expect(r, a.View.Slots[r].Incarnation)
		}
	}
}

// nobody is why a slot's rank is not linked that no process has.
func nobody(rank int) error { return fmt.Errorf("nobody is rank %d: %w", rank, p2p.ErrPeerGone) }

// clear removes the record of a life that is over.
func (ms *members) clear(slot int, incarnation uint64) {
	ctx, cancel := context.WithTimeout(ms.ctx, storeWait)
	defer cancel()
	key := bootstrap.RankKey(slot)
	b, err := ms.j.directory().Get(ctx, key)
	if err != nil {
		return
	}
	if rec, err := bootstrap.DecodeRecord(b); err == nil && rec.Incarnation == incarnation {
		if err := ms.j.directory().CompareAndSwap(ctx, key, b, nil); err != nil &&
			!errors.Is(err, bootstrap.ErrConflict) {
			ms.j.log.Debug("a lost rank's record stays until its lease ends", "err", err)
		}
	}
}

// warm makes a link with a life, or says that there is one.
func (ms *members) warm(p membership.Peer) {
	if ms.j.proxy.Linked(p.Slot) == p.Incarnation {
		ms.tell(membership.LinkUp{Peer: p})
		return
	}
	ms.j.mu.Lock()
	if r, ok := ms.j.records[p.Slot]; ok && r.Incarnation != p.Incarnation {
		delete(ms.j.records, p.Slot)
	}
	ms.j.mu.Unlock()
	ms.j.proxy.Expect(p.Slot, p.Incarnation)
	ms.j.proxy.Relink(p.Slot)
}

func stamp(id uint64) []byte { return binary.BigEndian.AppendUint64(nil, id) }

func (ms *members) encode(v membership.View) []byte { return append(stamp(ms.first), v.Encode()...) }

// decodeView takes the view's key apart.
func decodeView(b []byte) (first uint64, v membership.View, err error) {
	if len(b) < 8 {
		return 0, v, fmt.Errorf("key %s: %d bytes, want at least 8", viewKey, len(b))
	}
	v, err = membership.DecodeView(b[8:])
	return binary.BigEndian.Uint64(b), v, err
}

// publishFirst writes the job's first view. A view of another job, which had the same name and is
// over, makes room for it.
func (ms *members) publishFirst(ctx context.Context, v membership.View) error {
	var old []byte
	for {
		cctx, cancel := context.WithTimeout(ctx, storeWait)
		err := ms.j.directory().CompareAndSwap(cctx, viewKey, old, ms.encode(v))
		cancel()
		var c *bootstrap.ConflictError
		switch {
		case err == nil:
			ms.begun.Store(true)
			return nil
		case !errors.As(err, &c):
			ms.j.log.Debug("the first view is not in the store", "err", err)
			return err
		}
		if first, _, err := decodeView(c.Current); err == nil && first == ms.first {
			ms.begun.Store(true)
			return nil
		}
		old = c.Current
	}
}

// propose does the compare-and-swap.
func (ms *members) propose(a membership.Propose) {
	ctx, cancel := context.WithTimeout(ms.ctx, storeWait)
	defer cancel()
	answer := membership.Proposed{Epoch: a.New.Epoch}
	err := ms.j.directory().CompareAndSwap(ctx, viewKey, ms.encode(a.Old), ms.encode(a.New))
	var c *bootstrap.ConflictError
	if errors.As(err, &c) && a.Old.Epoch == 1 && !ms.begun.Load() { // it may not have been written yet
		if first, _, bad := decodeView(c.Current); bad != nil || first != ms.first {
			if err = ms.publishFirst(ctx, a.Old); err == nil {
				err = ms.j.directory().CompareAndSwap(ctx, viewKey, ms.encode(a.Old), ms.encode(a.New))
			}
		}
	}
	switch {
	case err == nil:
		answer.Outcome = membership.OutcomeWon
	case errors.As(err, &c):
		if first, v, bad := decodeView(c.Current); bad == nil && first == ms.first {
			answer.Outcome, answer.Current = membership.OutcomeLost, v
		} else if ms.begun.Load() {
			ms.over()
		}
	default:
		answer.Cause = storeCause(err)
		ms.j.log.Debug("a view was proposed in vain", "err", err)
	}
	ms.tell(answer)
}

// over says that the job has ended without this rank: what was the job's is gone from the store, or
// another job's. That happens only when all others have left, and this rank has lost its lease: it
// was put out, or may have been.
func (ms *members) over() {
	ms.j.proxy.Lock()
	v := ms.j.view
	ms.j.proxy.Unlock()
	if !v.Has(ms.self.Slot, ms.self.Incarnation) { // it waits to be let in
		return
	}
	v.Epoch++
	v.Slots = slices.Clone(v.Slots)
	v.Slots[ms.self.Slot].Incarnation, v.Slots[ms.self.Slot].Left = 0, v.Epoch
	ms.tell(membership.ViewSeen{View: v})
}

// storeCause says why the store did not do what this rank asked of it: that it cannot be reached is
// one reason of several.
func storeCause(err error) string {
	if errors.Is(err, bootstrap.ErrStoreAway) {
		return fmt.Sprintf("%v: this rank may be on the minority side of a partition", err)
	}
	return err.Error()
}

// probe finds out whether a process lives: its record is gone with its lease, or nobody listens
// where it did. A process that is just dying may still take connections, so one that neither
// refuses nor answers is asked again for a while.
func (ms *members) probe(p membership.Peer) membership.Verdict {
	ctx, cancel := context.WithTimeout(ms.ctx, probeWait)
	defer cancel()
	b, err := ms.j.directory().Get(ctx, bootstrap.RankKey(p.Slot))
	if errors.Is(err, bootstrap.ErrNoKey) {
		return membership.VerdictDead
	}
	var rec bootstrap.Record
	if err == nil {
		rec, err = bootstrap.DecodeRecord(b)
	}
	if err != nil {
		ms.j.mu.Lock()
		known, ok := ms.j.records[p.Slot]
		ms.j.mu.Unlock()
		if !ok {
			return membership.VerdictUnknown
		}
		rec = known
	}
	if rec.Incarnation != p.Incarnation {
		return membership.VerdictDead // it had to be gone for another to be there
	}
	for patience := 5 * time.Millisecond; ; {
		refused := len(rec.Addrs) > 0
		for _, addr := range rec.Addrs {
			dctx, cancel := context.WithTimeout(ctx, 200*time.Millisecond)
			c, err := detour.Dial(dctx, &net.Dialer{}, p.Slot, addr)
			cancel()
			if err == nil {
				c.Close()
			}
			refused = refused && errors.Is(err, syscall.ECONNREFUSED)
		}
		if refused {
			return membership.VerdictDead
		}
		patience *= 2 // a busy process takes longer to answer, a dying one never does
		actx, cancel := context.WithTimeout(ctx, patience)
		_, err := ms.j.client.Describe(actx, rec)
		cancel()
		if err == nil {
			return membership.VerdictAlive
		}
		select {
		case <-ctx.Done():
			return membership.VerdictUnknown
		case <-time.After(2 * time.Millisecond):
		}
	}
}

// doubt asks the store for those whom this rank has been waiting for, in a collective, for longer
// than a lease: a host that fell silent breaks no link for a while. It asks for few and not often,
// since all may be waiting. A program that goes on without lost ranks goes on without those that
// stand still for that long, too; for others the timeout decides.
func (ms *members) doubt() {
	j, ttl := ms.j, ms.j.directory().TTL()
	now := time.Now()
	if j.settings.OnFailure == Report || now.Before(ms.doubts) {
		return
	}
	var awaited []membership.Peer
	j.proxy.Lock()
	for g := range j.groups {
		if g.busy && g.wait.Waited() > ttl {
			for _, slot := range g.awaits() {
				if r := g.jobRank(slot); r < j.view.Size() && j.view.Slots[r].Incarnation != 0 {
					awaited = append(awaited, membership.Peer{Slot: r, Incarnation: j.view.Slots[r].Incarnation})
				}
			}
		}
	}
	j.proxy.Unlock()
	if len(awaited) == 0 {
		ms.doubts = now.Add(ttl / 8)
		return
	}
	ms.doubts = now.Add(ttl + rand.N(ttl))
	rand.Shuffle(len(awaited), func(i, k int) { awaited[i], awaited[k] = awaited[k], awaited[i] })
	for _, p := range awaited[:min(2, len(awaited))] {
		ms.aside(func() {
			if !ms.registered(p) {
				select {
				case <-time.After(time.Second): // it may be coming back: the store was away, perhaps
				case <-ms.ctx.Done():
					return
				}
				if !ms.registered(p) {
					ms.tell(membership.Dead{Peer: p, Cause: "its lease has ended: it has been silent for " +
						"longer than that"})
				}
			}
		})
	}
}

// registered reports whether the store has a life's record, or does not say.
func (ms *members) registered(p membership.Peer) bool {
	ctx, cancel := context.WithTimeout(ms.ctx, storeWait)
	defer cancel()
	b, err := ms.j.directory().Get(ctx, bootstrap.RankKey(p.Slot))
	if err != nil {
		return !errors.Is(err, bootstrap.ErrNoKey)
	}
	rec, err := bootstrap.DecodeRecord(b)
	return err != nil || rec.Incarnation == p.Incarnation
}

// publish has key hold value, or nothing; the newest wish counts.
func (ms *members) publish(key string, value []byte) {
	ms.mu.Lock()
	ms.want[key], ms.kept[key] = value, value
	ms.mu.Unlock()
	ms.nudge(ms.dirty)
}

// write carries wishes to the store.
func (ms *members) write() {
	defer ms.wg.Done()
	for {
		ms.mu.Lock()
		var key string
		var value []byte
		for key, value = range ms.want {
			break
		}
		ms.mu.Unlock()
		if key == "" {
			select {
			case <-ms.dirty:
				continue
			case <-ms.ctx.Done():
				return
			}
		}
		ctx, cancel := context.WithTimeout(ms.ctx, storeWait)
		var err error
		if value == nil {
			err = ms.j.directory().Delete(ctx, key)
		} else {
			err = ms.j.directory().Put(ctx, key, value, true)
		}
		cancel()
		if err == nil {
			ms.mu.Lock()
			if now, ok := ms.want[key]; ok && slices.Equal(now, value) {
				delete(ms.want, key)
			}
			ms.mu.Unlock()
			continue
		}
		select {
		case <-ms.ctx.Done():
			return
		case <-time.After(100 * time.Millisecond):
		}
	}
}

// watch follows the store. When the lease is lost it comes back with another, as the same
// incarnation.
func (ms *members) watch() {
	defer ms.wg.Done()
	for ms.ctx.Err() == nil {
		store := ms.j.directory()
		for e := range store.Watch(ms.ctx, membersPrefix) {
			if e.Err != nil {
				ms.tell(membership.StoreAway{Cause: storeCause(e.Err)})
				break
			}
			ms.seen(e)
		}
		for ms.ctx.Err() == nil {
			err := ms.j.reconnect(ms.ctx, store)
			if err == nil {
				ms.mu.Lock()
				maps.Copy(ms.want, ms.kept) // it went with the lease
				ms.mu.Unlock()
				ms.nudge(ms.dirty)
				// While this rank had no lease the job may have begun, gone on without it, and
				// ended.
				ms.begun.Store(true)
				ctx, cancel := context.WithTimeout(ms.ctx, storeWait)
				if _, err := ms.j.directory().Get(ctx, viewKey); errors.Is(err, bootstrap.ErrNoKey) {
					ms.over()
				}
				cancel()
				ms.tell(membership.StoreBack{})
				break
			}
			ms.j.log.Debug("the store stays away", "err", err)
			select {
			case <-ms.ctx.Done():
			case <-time.After(200 * time.Millisecond):
			}
		}
	}
}

// seen takes in one key of the store. Anything may be in it.
func (ms *members) seen(e bootstrap.Event) {
	if e.Key == viewKey {
		first, v, err := decodeView(e.Value)
		switch {
		case e.Exists && err != nil:
			ms.j.log.Warn("the view in the store is not one", "err", err)
		case e.Exists && first == ms.first:
			ms.begun.Store(true)
			ms.tell(membership.ViewSeen{View: v})
		case ms.begun.Load():
			ms.over()
		}
		return
	}
	at := strings.LastIndexByte(e.Key, '/') + 1
	slot, err := strconv.Atoi(e.Key[at:])
	if err != nil || slot < 0 || slot >= ms.j.settings.MaxSize || slot == ms.self.Slot {
		return
	}
	p := membership.Peer{Slot: slot}
	if e.Exists {
		if len(e.Value) < 8 {
			return
		}
		p.Incarnation = binary.BigEndian.Uint64(e.Value)
	}
	switch e.Key[:at] {
	case reportKey:
		if e.Exists {
			if r, err := membership.DecodeReport(e.Value[8:]); err == nil {
				ms.tell(membership.Reported{Peer: p, Report: r})
			}
		}
	case joinKey:
		ms.mu.Lock()
		before := ms.joiners[slot]
		delete(ms.joiners, slot)
		if e.Exists && len(e.Value) == 16 {
			ms.joiners[slot] = p.Incarnation
		}
		ms.mu.Unlock()
		if before != 0 && before != p.Incarnation {
			ms.tell(membership.JoinGone{Peer: membership.Peer{Slot: slot, Incarnation: before}})
		}
		if e.Exists && len(e.Value) == 16 {
			ms.tell(membership.JoinAsked{Peer: p, Epoch: binary.BigEndian.Uint64(e.Value[8:])})
		}
	case knockKey:
		ms.j.proxy.Lock()
		v := ms.j.view
		ms.j.proxy.Unlock()
		if e.Exists && slot < len(v.Slots) && v.Slots[slot].Incarnation != 0 &&
			v.Slots[slot].Incarnation != p.Incarnation {
			old := membership.Peer{Slot: slot, Incarnation: v.Slots[slot].Incarnation}
			ms.aside(func() {
				if ms.probe(old) == membership.VerdictDead {
					ms.tell(membership.Dead{Peer: old, Cause: "its process has ended, and another has its place"})
				}
			})
		}
	}
}
