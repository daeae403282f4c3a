package membership

import (
	"cmp"
	"fmt"
	"slices"
)

// Config is the initial state and the policy of a Machine.
type Config struct {
	Slot        int    // this rank
	Incarnation uint64 // random and never used before; not 0
	View        View   // is or was in the store; a machine that is not in it is a joiner
	// Window is the number of ticks that a link between two live ranks is missing before one of
	// them is evicted; 0: one tick at most.
	Window int
	// Retry is the number of ticks until a proposal whose outcome is unknown is repeated, doubled
	// for every further one up to 64 times; default 1.
	Retry     int
	MaxSize   int  // slots that the view may grow to; default its present size
	AutoAdmit bool // joiners are admitted as soon as they ask; else only with Admit
	// Proposers is the number of members that propose a change in the tick in which they learn of
	// the need. In each further tick as many more propose it, in the order of ranks. Any member can
	// make the change; this only reduces the load on the store. Default: all at once.
	Proposers int
}

// Machine is the state of one rank in the membership of a job. It is not safe for concurrent use,
// and acts only in Step.
type Machine struct {
	cfg  Config
	me   Peer
	role role
	view View
	now  uint64
	acts []Action

	incarnations [][]peerState // the known ones of each slot in the order of discovery, the active one among them

	// Evidence. Decisions based on it are made at a tick, and void as soon as the evidence changes.
	reported []Peer // what this incarnation published last
	votes    []Peer // its published votes
	seq      uint64 // number of reports published
	// broken lists the links known to be missing between two active incarnations that count, lower
	// slot first, with the tick when that was known.
	broken  map[[2]int]uint64
	changed bool  // the evidence has changed since broken was computed
	out     []int // the slots to remove because of missing links

	// The wanted change.
	wanted   bool
	wantedAt uint64 // tick
	pending  *Propose
	parts    string // why the pending proposal removes this rank; "": it does not, or others do
	retryAt  uint64 // tick before which there is no proposal
	fails    int    // proposals since the last one with a known outcome
	blind    bool   // the outcome of the last proposal is unknown
	cause    string // of that
	away     string // why the store is away; "": it is not
	isolated string // the reason that Isolated gave last; "": this rank is not isolated

	asked    uint64 // joiner: epoch of the earliest AskJoin that may have been granted; 0: none
	standing uint64 // joiner: epoch of the AskJoin that is published; 0: none
}

type role uint8

const (
	joiner role = iota
	member
	evicted
	closed
)

type linkState uint8

const (
	linkUnknown linkState = iota
	linkUp
	linkDown
)

// peerState is what a machine knows of one incarnation in a slot.
type peerState struct {
	incarnation uint64
	over        bool // dead, condemned, or left: no view that this machine proposes has it
	demanded    bool // only Evict says that it is over
	why         string
	link        linkState
	busy        bool   // a probe or a warm-up is unanswered
	tries       int    // probes or warm-ups since the link was up last
	next        uint64 // tick of the next of them; while busy, of the one under way
	suspect     bool   // the link is down, and the probe did not say that the process is gone
	report      Report // the latest one
	late        uint64 // tick until which this machine votes that it is late; 0: no vote
	ask         uint64 // epoch of its request for admission; 0: it does not wait
	admit       bool   // the program called Admit while it waited
}

// maxIncarnations bounds the incarnations remembered of one slot: the newest ones, and the active
// one.
const maxIncarnations = 8

// New returns a machine and its first actions.
func New(cfg Config) (*Machine, []Action, error) {
	if err := cfg.View.check(); err != nil {
		return nil, nil, fmt.Errorf("membership: %w", err)
	}
	cfg.MaxSize = max(cfg.MaxSize, cfg.View.Size())
	cfg.Retry = max(cfg.Retry, 1)
	if cfg.MaxSize > MaxSlots || cfg.Slot < 0 || cfg.Slot >= cfg.MaxSize || cfg.Incarnation == 0 || cfg.Window < 0 ||
		cfg.Proposers < 0 {
		return nil, nil, fmt.Errorf("membership: slot %d of at most %d, incarnation %x, window %d, proposers %d: "+
			"expected a slot within the view or MaxSize (at most %d), an incarnation, and no negative numbers",
			cfg.Slot, cfg.MaxSize, cfg.Incarnation, cfg.Window, cfg.Proposers, MaxSlots)
	}
	m := &Machine{cfg: cfg, me: Peer{cfg.Slot, cfg.Incarnation}, incarnations: make([][]peerState, cfg.MaxSize),
		broken: map[[2]int]uint64{}}
	if m.know(cfg.View); cfg.View.Has(m.me.Slot, m.me.Incarnation) {
		m.role = member
	}
	return m, m.settle(), nil
}

// View returns the newest view that the machine has seen.
func (m *Machine) View() View { return m.view }

// Self returns the machine's own incarnation.
func (m *Machine) Self() Peer { return m.me }

// Member reports whether this incarnation is active in View.
func (m *Machine) Member() bool { return m.role == member }

// Pending reports whether the machine wants to change the view or awaits the outcome of a proposal.
// If it is false after Admit, all joiners that could be admitted are.
func (m *Machine) Pending() bool { return m.wanted || m.pending != nil }

// Why describes why an incarnation has left the view, or is about to, as far as this machine knows:
// "lease expired". It returns "" if it knows nothing: of itself, if the others have removed it.
func (m *Machine) Why(p Peer) string {
	if l := m.find(p); l != nil {
		return l.why
	}
	return ""
}

// Condemned reports whether this machine is going to remove an incarnation that is in the view.
// That is final, except for its own incarnation after Evict: see there.
func (m *Machine) Condemned(p Peer) bool {
	l := m.find(p)
	return l != nil && l.over && m.view.Has(p.Slot, p.Incarnation)
}

// Step feeds the machine an event and returns its actions. Events that are not new, that concern a
// past incarnation or epoch, or that are invalid have no effect.
func (m *Machine) Step(ev Event) []Action {
	if m.role == closed {
		return nil
	}
	m.acts = nil
	switch e := ev.(type) {
	case Tick:
		m.now++
		if m.role == member {
			m.judge()
		}
	case LinkUp:
		if l := m.heard(e.Peer); l != nil && e.Peer != m.me {
			m.evidence(l.suspect)
			l.link, l.busy, l.tries, l.suspect = linkUp, false, 0, false
			m.retract(m.me, e.Peer)
			if !l.over {
				l.why = ""
			}
		}
	case LinkDown:
		if l := m.heard(e.Peer); l != nil && e.Peer != m.me {
			m.linkDown(l, e.Cause)
		}
	case Dead:
		m.finish(m.heard(e.Peer), "dead", e.Cause)
	case Missed:
		if e.Peer != m.me {
			m.finish(m.find(e.Peer), "stuck", "")
		}
	case Late:
		if l := m.find(e.Peer); l != nil && e.Peer != m.me && m.role == member {
			l.late = m.now + voteWindows*uint64(max(m.cfg.Window, 1))
		}
	case OnTime:
		if l := m.find(e.Peer); l != nil {
			l.late = 0
		}
	case Evict:
		if s := m.view.at(e.Slot); s.Incarnation != 0 && len(m.view.Active()) > 1 {
			if l := m.find(Peer{e.Slot, s.Incarnation}); !l.over {
				m.finish(l, "evicted on demand", "")
				l.demanded = true
			}
		}
	case Probed:
		m.probed(e)
	case Reported:
		if l := m.heard(e.Peer); l != nil && e.Peer != m.me && e.Report.Seq > l.report.Seq {
			before := l.report.Unreachable
			l.report = e.Report
			l.report.Unreachable, l.report.Late = slices.Clone(e.Report.Unreachable), slices.Clone(e.Report.Late)
			for _, q := range before {
				m.retract(e.Peer, q)
			}
			m.evidence(true)
		}
	case JoinAsked:
		if l := m.heard(e.Peer); l != nil && !l.over && !m.view.Has(e.Slot, e.Incarnation) {
			l.ask = max(l.ask, e.Epoch)
		}
	case JoinGone:
		if l := m.find(e.Peer); l != nil {
			l.ask, l.admit = 0, false
		}
	case Admit:
		for _, p := range m.waiting(func(*peerState) bool { return true }) {
			m.find(p).admit = true
		}
	case ViewSeen:
		m.adopt(e.View)
	case Proposed:
		m.proposed(e)
	case StoreAway:
		m.away = e.Cause
		if m.away == "" {
			m.away = "store away"
		}
	case StoreBack:
		m.away, m.blind, m.fails, m.retryAt = "", false, 0, 0
		m.renew()
	case Rejoin:
		m.rejoin(e.Incarnation)
	case Close:
		m.role = closed
		return nil
	}
	return m.settle()
}

// settle derives all actions from the state, whichever event led to it.
func (m *Machine) settle() []Action {
	switch m.role {
	case member:
		m.count()
		m.probe()
		m.publish()
		m.propose()
	case joiner:
		m.join()
	}
	acts := m.acts
	m.acts = nil
	return acts
}

func (m *Machine) do(a Action) { m.acts = append(m.acts, a) }

// find returns what is known of an incarnation, or nil. The pointer is valid until the next call of
// heard.
func (m *Machine) find(p Peer) *peerState {
	if p.Slot < 0 || p.Slot >= len(m.incarnations) || p.Incarnation == 0 {
		return nil
	}
	for i := range m.incarnations[p.Slot] {
		if l := &m.incarnations[p.Slot][i]; l.incarnation == p.Incarnation {
			return l
		}
	}
	return nil
}

// heard is like find, but adds an unknown incarnation. It returns nil for one that is impossible.
func (m *Machine) heard(p Peer) *peerState {
	if l := m.find(p); l != nil || p.Slot < 0 || p.Slot >= len(m.incarnations) || p.Incarnation == 0 {
		return l
	}
	ls := m.incarnations[p.Slot]
	if len(ls) >= maxIncarnations {
		oldest := 0
		if ls[0].incarnation == m.view.at(p.Slot).Incarnation {
			oldest = 1
		}
		ls = slices.Delete(ls, oldest, oldest+1)
	}
	m.incarnations[p.Slot] = append(ls, peerState{incarnation: p.Incarnation})
	return &m.incarnations[p.Slot][len(m.incarnations[p.Slot])-1]
}

// peers yields the incarnations that are active in the view and not over, by slot, this one
// included.
func (m *Machine) peers(yield func(Peer, *peerState) bool) {
	for i, s := range m.view.Slots {
		if p := (Peer{i, s.Incarnation}); s.Incarnation != 0 {
			if l := m.find(p); !l.over && !yield(p, l) {
				return
			}
		}
	}
}

// finish records a verdict.
func (m *Machine) finish(l *peerState, what, cause string) {
	if l == nil {
		return
	}
	if l.over {
		l.demanded = false
		return
	}
	l.over, l.ask, l.admit, l.why = true, 0, false, what
	if cause != "" {
		l.why = cause
	}
	m.evidence(true)
}

// evidence voids the decisions that were based on evidence that has changed.
func (m *Machine) evidence(changed bool) {
	if changed {
		m.changed, m.out = true, nil
	}
}

// accuses reports whether p has published that it cannot reach q.
func (m *Machine) accuses(p, q Peer) bool {
	if l := m.find(q); p == m.me {
		return l != nil && l.suspect
	}
	l := m.find(p)
	return l != nil && slices.Contains(l.report.Unreachable, q)
}

// retract restarts the window of the link between p and q, unless one of them still reports it as
// missing.
func (m *Machine) retract(p, q Peer) {
	if m.view.Has(p.Slot, p.Incarnation) && m.view.Has(q.Slot, q.Incarnation) && !m.accuses(p, q) && !m.accuses(q, p) {
		delete(m.broken, [2]int{min(p.Slot, q.Slot), max(p.Slot, q.Slot)})
	}
}

// renew begins the windows of all missing links anew, and has the links tried at once.
func (m *Machine) renew() {
	clear(m.broken)
	m.evidence(true)
	for _, l := range m.peers {
		if l.tries = 0; !l.busy {
			l.next = m.now
		}
	}
}

// linkDown records that a link broke, or could not be made.
func (m *Machine) linkDown(l *peerState, cause string) {
	switch {
	case l.link != linkDown:
		l.link, l.next = linkDown, m.now
		if !l.over {
			l.why = cause
		}
		if m.role == joiner && l.tries > 0 {
			m.later(l)
		}
		l.busy = false
	case m.role == joiner && l.busy:
		m.later(l)
	}
}

// maxDoublings bounds the pauses between tries of a link. One that was down for long is made soon
// after the network has healed.
const maxDoublings = 9

// later schedules the next probe or warm-up of l, after a pause that doubles up to maxDoublings
// times.
func (m *Machine) later(l *peerState) {
	l.busy, l.next = false, m.now+1<<min(max(l.tries-1, 0), maxDoublings)
}

func (m *Machine) probed(e Probed) {
	l := m.find(e.Peer)
	if l == nil || e.Peer == m.me {
		return
	}
	if e.Verdict == VerdictDead {
		cause := "process is dead"
		if l.why != "" {
			cause += " (" + l.why + ")"
		}
		m.finish(l, "", cause)
	} else if m.role == member && l.busy && l.link == linkDown {
		m.evidence(!l.suspect)
		l.suspect = true
		m.later(l)
	}
}

// probe probes the peers whose links are down. A dying process may answer that it is alive, so
// probes are repeated, after growing pauses.
func (m *Machine) probe() {
	for p, l := range m.peers {
		switch {
		case p == m.me || l.link != linkDown:
		case m.unanswered(l) && !l.suspect:
			l.suspect = true
			m.evidence(true)
		case !l.busy && m.now >= l.next:
			l.busy, l.next = true, m.now
			l.tries++
			m.do(Probe{p})
		}
	}
}

// voteWindows is the number of windows for which a vote holds: long enough that ranks that have
// waited together see each other's votes, and short enough that votes of different times do not add
// up.
const voteWindows = 2

// maxVotes keeps a report small enough for the store.
const maxVotes = 1024

// count removes the incarnations that more than half of those in the view vote against, if this
// rank is one of the voters: a rank that has withdrawn its vote must not act on others' votes,
// which may have been withdrawn too.
func (m *Machine) count() {
	votes := map[Peer]int{}
	for p, l := range m.peers {
		if l.late > m.now {
			votes[p]++
		}
		if p == m.me {
			continue
		}
		for _, q := range l.report.Late {
			if q != p && q != m.me {
				votes[q]++
			}
		}
	}
	for q, n := range votes {
		if l := m.find(q); 2*n > len(m.view.Active()) && m.view.Has(q.Slot, q.Incarnation) && l.late > m.now {
			m.finish(l, "late", "most ranks waited for it in vain")
		}
	}
}

// publish publishes the peers that this incarnation suspects and those that it votes against, if
// that has changed.
func (m *Machine) publish() {
	var now, votes []Peer
	for p, l := range m.peers {
		if l.suspect && p != m.me {
			now = append(now, p)
		}
		if l.late > m.now && len(votes) < maxVotes {
			votes = append(votes, p)
		}
	}
	if !slices.Equal(now, m.reported) || !slices.Equal(votes, m.votes) {
		m.reported, m.votes = now, votes
		m.seq++
		m.do(Report{Epoch: m.view.Epoch, Seq: m.seq, Unreachable: slices.Clone(now), Late: slices.Clone(votes)})
	}
}

// judge decides which ranks are removed because of missing links. When a link has been missing for
// a window, it removes those with a missing link that Keep drops. If other links are missing too,
// but not yet for that long, it waits for them for a quarter of a window more: ranks notice a
// partition at different times, and it should lead to one change.
func (m *Machine) judge() {
	if m.changed {
		m.changed = false
		m.tally()
	}
	m.out = nil
	window := uint64(m.cfg.Window)
	missing, oldest, ripe := make([][2]int, 0, len(m.broken)), uint64(0), map[int]bool{}
	young := false
	for e, since := range m.broken {
		missing = append(missing, e)
		age := m.now - since
		oldest = max(oldest, age)
		if age >= window {
			ripe[e[0]], ripe[e[1]] = true, true
		} else {
			young = true
		}
	}
	if len(ripe) == 0 || young && oldest < m.Longest() {
		return
	}
	var members []int
	for p := range m.peers {
		members = append(members, p.Slot)
	}
	kept := Keep(members, missing)
	for _, s := range members {
		if _, ok := slices.BinarySearch(kept, s); !ok && ripe[s] {
			m.out = append(m.out, s)
			if l := m.find(Peer{s, m.view.Slots[s].Incarnation}); l.why == "" && s != m.me.Slot {
				l.why = "other ranks cannot reach it"
			}
		}
	}
}

// Longest returns how many ticks a link can be known to be missing before judge decides.
func (m *Machine) Longest() uint64 { return uint64(m.cfg.Window + m.cfg.Window/4) }

// tally lists the missing links, from what this incarnation suspects and from the last reports of
// the others.
func (m *Machine) tally() {
	known := m.broken
	m.broken = make(map[[2]int]uint64, len(known))
	miss := func(a, b int) {
		e := [2]int{min(a, b), max(a, b)}
		since, ok := known[e]
		if !ok {
			since = m.now
		}
		m.broken[e] = since
	}
	for p, l := range m.peers {
		if p == m.me {
			continue
		}
		if l.suspect {
			miss(p.Slot, m.me.Slot)
		}
		for _, q := range l.report.Unreachable {
			if q.Slot != p.Slot && m.view.Has(q.Slot, q.Incarnation) && !m.find(q).over {
				miss(p.Slot, q.Slot)
			}
		}
	}
}

// waiting lists the joiners that can be admitted now and for which ok returns true: for each
// inactive slot the one with the lowest incarnation.
//
// Its request must be from an epoch in which all present members were active (it is linked with
// them), and in which the slot was as it is now: an older request may be of an incarnation that was
// admitted and has left again. For the same reason a slot is left in one change and entered in
// another.
func (m *Machine) waiting(ok func(*peerState) bool) []Peer {
	newest := uint64(0)
	for p := range m.peers {
		newest = max(newest, m.view.Slots[p.Slot].Since)
	}
	var in []Peer
	for s := range m.incarnations {
		at := m.view.at(s)
		if at.Incarnation != 0 {
			continue
		}
		best := Peer{Slot: s}
		for i := range m.incarnations[s] {
			l := &m.incarnations[s][i]
			if l.ask != 0 && !l.over && l.link != linkDown && l.ask >= max(newest, at.Left) && ok(l) &&
				(best.Incarnation == 0 || l.incarnation < best.Incarnation) {
				best.Incarnation = l.incarnation
			}
		}
		if best.Incarnation != 0 {
			in = append(in, best)
		}
	}
	return in
}

// propose proposes the view that should follow, or says that it cannot.
func (m *Machine) propose() {
	var out, stay []int
	for i, s := range m.view.Slots {
		if s.Incarnation == 0 {
			continue
		}
		if m.find(Peer{i, s.Incarnation}).over || slices.Contains(m.out, i) {
			out = append(out, i)
		} else {
			stay = append(stay, i)
		}
	}
	in := m.waiting(func(l *peerState) bool { return m.cfg.AutoAdmit || l.admit })
	if len(stay) == 0 { // without members there is no decision, so this one stays
		stay = []int{m.me.Slot}
		out = slices.DeleteFunc(out, func(s int) bool { return s == m.me.Slot })
	}
	want := len(out)+len(in) > 0
	if want && !m.wanted {
		m.wantedAt = m.now
	}
	m.wanted = want

	why := ""
	if want && len(out) > 0 && (m.away != "" || m.blind && m.fails >= 2) {
		why = fmt.Sprintf("cannot remove ranks %s from the view: %s", ranges(out),
			cmp.Or(m.away, m.cause, "the store does not answer"))
	}
	switch {
	case why == m.isolated:
	case why == "":
		m.do(Reunited{})
	default:
		m.do(Isolated{why})
	}
	m.isolated = why

	if !want || m.pending != nil || m.away != "" || m.now < m.retryAt {
		return
	}
	if m.cfg.Proposers > 0 {
		turn, stays := slices.BinarySearch(stay, m.me.Slot)
		if !stays {
			turn = len(stay) + slices.Index(out, m.me.Slot)
		}
		if m.now-m.wantedAt < uint64(turn/m.cfg.Proposers) {
			return
		}
	}
	m.pending = &Propose{m.view, m.view.change(out, in), m.preferred(stay)}
	m.do(*m.pending)
}

// preferred lists those of stay, besides this rank, that have no link to a rank in m.out. If this
// rank is in m.out, that becomes the reason for its removal, if the proposal wins.
func (m *Machine) preferred(stay []int) (peers []Peer) {
	missed := map[int]bool{} // slots without a link to one in m.out; true: to this rank, which is in it
	for e := range m.broken {
		for i, s := range e {
			if _, leaves := slices.BinarySearch(m.out, e[1-i]); leaves {
				missed[s] = missed[s] || e[1-i] == m.me.Slot
			}
		}
	}
	var unreachable []int
	for _, s := range stay {
		if mine, ok := missed[s]; ok && s != m.me.Slot {
			peers = append(peers, Peer{s, m.view.Slots[s].Incarnation})
			if mine {
				unreachable = append(unreachable, s)
			}
		}
	}
	if m.parts = ""; len(unreachable) > 0 {
		m.parts = "it and ranks " + ranges(unreachable) + " could not reach each other"
	}
	return peers
}

func (m *Machine) proposed(e Proposed) {
	if m.pending == nil || e.Epoch != m.pending.New.Epoch {
		return
	}
	p := *m.pending
	m.pending = nil
	m.blind, m.cause = e.Outcome == OutcomeUnknown, e.Cause
	if e.Outcome == OutcomeWon {
		m.part()
		m.adopt(p.New)
	} else if e.Outcome == OutcomeLost {
		m.adopt(e.Current)
	} else if e.Outcome == OutcomeHeld { // all that are in m.out may have proposed it
		m.wanted, m.fails = false, 0
		m.renew()
		return
	}
	if m.view.Epoch < e.Epoch { // no outcome became known
		m.fails++
		m.retryAt = m.now + uint64(m.cfg.Retry)<<min(m.fails-1, 6)
	}
}

// know makes v the present view and updates the incarnations in it.
func (m *Machine) know(v View) {
	was := m.view
	m.view = v
	if n := v.Size() - len(m.incarnations); n > 0 {
		m.incarnations = append(m.incarnations, make([][]peerState, n)...)
	}
	for i, s := range v.Slots {
		if o := was.at(i); o.Incarnation != s.Incarnation {
			if l := m.find(Peer{i, o.Incarnation}); l != nil {
				m.finish(l, "", l.why)
			}
			for e := range m.broken {
				if e[0] == i || e[1] == i {
					delete(m.broken, e)
				}
			}
		}
		if l := m.heard(Peer{i, s.Incarnation}); l != nil {
			l.ask, l.admit = 0, false
		}
	}
	if l := m.find(m.me); l != nil && l.demanded && slices.Equal(v.Active(), []int{m.me.Slot}) {
		l.over, l.demanded, l.why = false, false, ""
	}
	m.evidence(true)
	m.wanted, m.retryAt, m.fails, m.blind = false, 0, 0, false

	able := m.waiting(func(l *peerState) bool { return l.admit })
	for i := range m.incarnations {
		for j := range m.incarnations[i] {
			l := &m.incarnations[i][j]
			l.admit = l.admit && slices.Contains(able, Peer{i, l.incarnation})
		}
	}
}

// part notes why this machine's proposal removes its own rank, if it does.
func (m *Machine) part() {
	if m.parts != "" {
		m.find(m.me).why = m.parts
	}
}

// adopt enters a view if it is newer than the present one.
func (m *Machine) adopt(v View) {
	if v.Epoch <= m.view.Epoch || v.Size() < m.view.Size() || v.check() != nil {
		return
	}
	if m.pending != nil && v.Equal(m.pending.New) {
		m.part() // the view is seen before the outcome of the proposal is known
	}
	was := m.view.Epoch
	m.know(v)
	left, entered := m.view.Diff(was)
	has := v.Has(m.me.Slot, m.me.Incarnation)
	switch {
	case m.role == member && has:
		m.do(Enter{m.view, left, entered})
	case m.role == member:
		m.putOut()
	case m.role == joiner && has:
		m.role, m.asked, m.standing = member, 0, 0
		for i := range m.incarnations {
			for j := range m.incarnations[i] {
				l := &m.incarnations[i][j]
				l.busy, l.tries, l.next = false, 0, m.now
			}
		}
		m.do(Enter{m.view, nil, entered})
		for p, l := range m.peers { // those that came in together have no links yet
			if p != m.me && l.link == linkUnknown {
				m.do(Warm{p})
			}
		}
	case m.role == joiner && m.asked != 0:
		if s := m.view.at(m.me.Slot); s.Left > m.asked {
			// Another incarnation left, or this one did after an admission that it did not see. A
			// removed incarnation never comes back, so this machine is out in either case.
			m.putOut()
		} else if s.Incarnation != 0 {
			m.asked = 0 // another incarnation has the slot, and this request is too old by the time that it leaves
		}
	}
}

func (m *Machine) putOut() {
	m.role, m.wanted, m.out, m.asked, m.standing = evicted, false, nil, 0, 0
	if m.isolated != "" {
		m.isolated = ""
		m.do(Reunited{})
	}
	m.do(Evicted{m.view})
}

func (m *Machine) rejoin(incarnation uint64) {
	if m.role != evicted || m.heard(Peer{m.me.Slot, incarnation}) == nil || incarnation == m.me.Incarnation {
		return
	}
	m.role, m.me.Incarnation = joiner, incarnation
	m.reported, m.votes, m.seq = nil, nil, 0
	for i := range m.incarnations {
		for j := range m.incarnations[i] {
			l := &m.incarnations[i][j]
			l.link, l.busy, l.tries, l.suspect, l.late = linkUnknown, false, 0, false, 0
		}
	}
}

// unanswered reports whether a probe or a warm-up has had no answer for a window.
func (m *Machine) unanswered(l *peerState) bool {
	return l.busy && m.now-l.next >= uint64(max(m.cfg.Window, 1))
}

// join makes links, and asks for admission once it has links to all active ranks.
func (m *Machine) join() {
	warm, lost, newest := true, false, uint64(0)
	for i, s := range m.view.Slots {
		if s.Incarnation == 0 || i == m.me.Slot {
			continue
		}
		newest = max(newest, s.Since)
		p := Peer{i, s.Incarnation}
		l := m.find(p)
		if l.link == linkUp {
			continue
		}
		warm = false
		lost = lost || l.link == linkDown
		if m.unanswered(l) || !l.busy && (l.tries == 0 || l.link == linkDown && m.now >= l.next) {
			l.busy, l.next = true, m.now
			l.tries++
			m.do(Warm{p})
		}
	}
	at := m.view.at(m.me.Slot)
	switch {
	case at.Incarnation != 0 || lost:
		if m.standing != 0 {
			m.standing = 0
			m.do(UnaskJoin{m.me})
		}
	case warm && (m.standing == 0 || m.standing < max(newest, at.Left)):
		m.standing = m.view.Epoch
		if m.asked == 0 {
			m.asked = m.standing
		}
		m.do(AskJoin{m.me, m.standing})
	}
}
