package membership

import (
	"encoding/binary"
	"fmt"
	"hash/maphash"
	"maps"
	"slices"
	"sort"
)

// sim is a simulated world: processes with machines, links between them, and a store whose
// notifications and answers arrive when a test delivers them. It drives all machines, and checks
// the invariants after every event. The first violation is in err.
type sim struct {
	cfg     Config // without Slot, Incarnation and View
	history []View // all that were in the store; epoch e is history[e-1]
	procs   []*proc
	cut     map[[2]int]bool // links that are broken, by indices of procs, lower first
	missed  map[[2]int]bool // links that are, or were, missing between two that lived
	limbo   []Propose       // writes without a waiter that may still happen
	err     error
	pick    func(n int) int // which mail comes next when all is delivered; nil: the oldest
	log     func(who Peer, what string)
}

// proc is one incarnation.
type proc struct {
	me    Peer
	m     *Machine
	alive bool
	away  bool // cannot reach the store
	now   int  // ticks
	mail  []mail

	cas      *Propose // proposed, has not reached the store
	answered bool     // it has, and the answer is on its way
	probes   []Peer
	report   *Report
	ask      uint64

	last      uint64 // epoch entered last
	wasIn     bool
	removed   bool
	gone      bool   // its record, with its lease
	out       bool   // Evicted
	isolated  string // why; "": it is not
	condemned bool   // a verdict or Evict removes it
}

// mail is an event on its way. Of one lane it arrives in order; lane "" has none.
type mail struct {
	ev   Event
	lane string
	from bool // from the store
	due  int  // tick of the receiver at which it must have arrived; 0: any time
}

func (w *sim) fail(format string, args ...any) {
	if w.err == nil {
		w.err = fmt.Errorf(format, args...)
	}
}

func (w *sim) current() View { return w.history[len(w.history)-1] }

// incarnation gives incarnations readable numbers: the second one of slot 1 is 1/22.
func incarnation(slot, n int) uint64 { return uint64(16*(slot+1) + n) }

func newSim(n int, cfg Config, log func(Peer, string)) *sim {
	w := &sim{cfg: cfg, cut: map[[2]int]bool{}, missed: map[[2]int]bool{}, log: log}
	incs := make([]uint64, n)
	for i := range incs {
		incs[i] = incarnation(i, 1)
	}
	w.history = []View{First(incs)}
	for i := range incs {
		w.start(Peer{i, incs[i]}, w.history[0])
	}
	return w
}

// start begins an incarnation that knows the given view.
func (w *sim) start(me Peer, v View) *proc {
	cfg := w.cfg
	cfg.Slot, cfg.Incarnation, cfg.View = me.Slot, me.Incarnation, v
	m, acts, err := New(cfg)
	if err != nil {
		w.fail("%v: %v", me, err)
		return nil
	}
	p := &proc{me: me, m: m, alive: true, last: v.Epoch}
	p.wasIn = m.Member()
	w.procs = append(w.procs, p)
	w.present(p)
	w.do(p, acts)
	return p
}

// present mails what the store holds.
func (w *sim) present(p *proc) {
	p.post(mail{ev: ViewSeen{w.current()}, from: true})
	for _, q := range w.procs {
		if q == p {
			continue
		}
		if !q.alive {
			p.post(mail{ev: Dead{q.me, "its record is not there"}, from: true, due: p.now + 1})
			continue
		}
		if q.report != nil {
			p.post(mail{ev: Reported{q.me, *q.report}, from: true})
		}
		if q.ask != 0 {
			p.post(mail{ev: JoinAsked{q.me, q.ask}, from: true, lane: "ask" + q.me.String()})
		}
	}
}

func (p *proc) post(m mail) { p.mail = append(p.mail, m) }

func (w *sim) broadcast(but *proc, m mail) {
	for _, q := range w.procs {
		if q != but && q.alive {
			if due := m.due; due != 0 {
				m.due = q.now + due
				q.post(m)
				m.due = due
			} else {
				q.post(m)
			}
		}
	}
}

func (w *sim) index(p *proc) int { return slices.Index(w.procs, p) }

func (w *sim) process(me Peer) *proc {
	for _, p := range w.procs {
		if p.me == me {
			return p
		}
	}
	return nil
}

func (w *sim) pair(p, q *proc) [2]int {
	a, b := w.index(p), w.index(q)
	return [2]int{min(a, b), max(a, b)}
}

// step tells p's machine something and does what it wants.
func (w *sim) step(p *proc, ev Event) {
	if !p.alive || w.err != nil {
		return
	}
	if _, ok := ev.(Proposed); ok {
		p.answered = false
	}
	if _, ok := ev.(Tick); ok {
		p.now++
	}
	was := p.m.View().Epoch
	acts := p.m.Step(ev)
	if p.m.View().Epoch < was {
		w.fail("%v went back from epoch %d to %d", p.me, was, p.m.View().Epoch)
	}
	w.do(p, acts)
	v := p.m.View()
	if v.Epoch > uint64(len(w.history)) || !w.history[v.Epoch-1].Equal(v) {
		w.fail("%v holds %v, which was never in the store", p.me, v)
	}
	if p.m.Member() && (!v.Has(p.me.Slot, p.me.Incarnation) || p.last != v.Epoch) {
		w.fail("%v is a member of %v and entered epoch %d last", p.me, v, p.last)
	}
}

func (w *sim) do(p *proc, acts []Action) {
	for _, a := range acts {
		if w.log != nil {
			w.log(p.me, a.String())
		}
		switch a := a.(type) {
		case Propose:
			switch {
			case p.cas != nil || p.answered:
				w.fail("%v proposes while a proposal is unanswered", p.me)
			case p.out:
				w.fail("%v proposes after it was evicted", p.me)
			case !p.m.Member() || !a.Old.Has(p.me.Slot, p.me.Incarnation):
				w.fail("%v proposes and is no member", p.me)
			case len(a.New.Active()) == 0:
				w.fail("%v proposes an empty view", p.me)
			case a.New.Epoch != a.Old.Epoch+1 || a.Old.Epoch > uint64(len(w.history)) ||
				!w.history[a.Old.Epoch-1].Equal(a.Old):
				w.fail("%v proposes %v from %v, which was never in the store", p.me, a.New, a.Old)
			case a.New.check() != nil:
				w.fail("%v proposes an impossible view: %v", p.me, a.New.check())
			}
			p.cas = &a
		case Enter:
			w.entered(p, a)
		case Probe:
			p.probes = append(p.probes, a.Peer)
		case Report:
			r := a
			p.report = &r
			if !p.away {
				w.broadcast(p, mail{ev: Reported{p.me, r}, from: true})
			}
		case Warm:
			w.warm(p, w.process(a.Peer))
		case AskJoin:
			p.ask = a.Epoch
			if !p.away {
				w.broadcast(p, mail{ev: JoinAsked{p.me, a.Epoch}, from: true, lane: "ask" + p.me.String()})
			}
		case UnaskJoin:
			p.ask = 0
			if !p.away {
				w.broadcast(p, mail{ev: JoinGone{p.me}, from: true, lane: "ask" + p.me.String()})
			}
		case Isolated, Reunited:
			is, _ := a.(Isolated)
			if is.Why == p.isolated {
				w.fail("%v says twice: %v", p.me, a)
			}
			p.isolated = is.Why
		case Evicted:
			p.out = true
			if v := w.current(); v.Has(p.me.Slot, p.me.Incarnation) {
				w.fail("%v thinks that it was evicted, and is in %v", p.me, v)
			}
		}
	}
}

func (w *sim) entered(p *proc, e Enter) {
	v := e.View
	if v.Epoch > uint64(len(w.history)) || !w.history[v.Epoch-1].Equal(v) {
		w.fail("%v entered %v, which was never in the store", p.me, v)
		return
	}
	if v.Epoch <= p.last && p.wasIn || !v.Has(p.me.Slot, p.me.Incarnation) || !p.m.Member() || !p.m.View().Equal(v) {
		w.fail("%v, last in epoch %d, entered %v", p.me, p.last, v)
	}
	var left, in []int // what the views between say, one by one
	for i := range v.Slots {
		for e := p.last; e < v.Epoch; e++ {
			a, b := w.history[e-1].at(i), w.history[e].at(i)
			if a.Incarnation != 0 && a.Incarnation != b.Incarnation && p.wasIn && !slices.Contains(left, i) {
				left = append(left, i)
			}
		}
		if v.Slots[i].Incarnation != 0 && v.Slots[i].Incarnation != w.history[p.last-1].at(i).Incarnation {
			in = append(in, i)
		}
	}
	if !slices.Equal(left, e.Removed) || p.wasIn && !slices.Equal(in, e.Added) ||
		!p.wasIn && !slices.Contains(e.Added, p.me.Slot) {
		w.fail("%v went from epoch %d to %v: removed %v, expected %v; added %v, expected %v", p.me, p.last, v,
			e.Removed, left, e.Added, in)
	}
	p.last, p.wasIn = v.Epoch, true
}

// warm answers a wish for a link.
func (w *sim) warm(p, q *proc) {
	if q == nil {
		w.fail("%v wants a link to a process that does not exist", p.me)
		return
	}
	if !q.alive || w.cut[w.pair(p, q)] {
		p.post(mail{ev: LinkDown{q.me, "cannot connect"}, lane: "link" + q.me.String()})
		return
	}
	p.post(mail{ev: LinkUp{q.me}, lane: "link" + q.me.String()})
	q.post(mail{ev: LinkUp{p.me}, lane: "link" + p.me.String()})
}

// sever breaks a link; only the ends that see it are told.
func (w *sim) sever(p, q *proc, pSees, qSees bool) {
	w.cut[w.pair(p, q)] = true
	w.missed[w.pair(p, q)] = true
	if pSees {
		p.post(mail{ev: LinkDown{q.me, "connection lost"}, lane: "link" + q.me.String()})
	}
	if qSees {
		q.post(mail{ev: LinkDown{p.me, "connection lost"}, lane: "link" + p.me.String()})
	}
}

func (w *sim) heal(p, q *proc) {
	if k := w.pair(p, q); w.cut[k] {
		delete(w.cut, k)
		if p.alive && q.alive {
			w.warm(p, q)
		}
	}
}

// kill ends a process. The others lose their links, and learn of the death in time.
func (w *sim) kill(p *proc) {
	w.end(p)
	w.expire(p)
}

// silence ends a process and its lease. The others lose their links, and learn of the death only if
// they ask: until then it may be one that they cannot reach.
func (w *sim) silence(p *proc) {
	for _, q := range w.procs {
		w.missed[w.pair(p, q)] = true
	}
	w.end(p)
	w.endLease(p)
}

func (w *sim) end(p *proc) {
	p.alive, p.mail, p.probes = false, nil, nil
	if p.cas != nil {
		w.limbo = append(slices.Clip(w.limbo), *p.cas)
		p.cas = nil
	}
	for _, q := range w.procs {
		if q.alive {
			q.post(mail{ev: LinkDown{p.me, "connection lost"}, lane: "link" + p.me.String()})
		}
	}
}

// expire ends an incarnation's lease: all hear that it is dead, within a window.
func (w *sim) expire(p *proc) {
	w.endLease(p)
	w.broadcast(nil, mail{ev: Dead{p.me, "lease expired"}, from: true, due: max(w.cfg.Window, 1)})
}

func (w *sim) endLease(p *proc) {
	if p.ask != 0 {
		p.ask = 0
		w.broadcast(p, mail{ev: JoinGone{p.me}, from: true, lane: "ask" + p.me.String()})
	}
	p.gone, p.condemned = true, true
}

// rejoin gives an evicted process a new incarnation. The process keeps its machine.
func (w *sim) rejoin(p *proc, n int) *proc {
	w.expire(p)
	q := &proc{me: Peer{p.me.Slot, incarnation(p.me.Slot, n)}, m: p.m, alive: true, away: p.away, now: p.now,
		cas: p.cas, answered: p.answered, last: p.m.View().Epoch}
	for _, m := range p.mail {
		if _, ok := m.ev.(Proposed); ok {
			q.post(m)
		}
	}
	p.alive, p.mail, p.cas, p.answered = false, nil, nil, false
	w.procs = append(w.procs, q)
	for i, r := range w.procs {
		if r.alive && w.cut[w.pair(p, r)] && i != len(w.procs)-1 {
			w.cut[w.pair(q, r)], w.missed[w.pair(q, r)] = true, true // the same cable
		}
	}
	w.present(q)
	w.step(q, Rejoin{q.me.Incarnation})
	return q
}

// write is the store's compare-and-swap, by a process that has looked for the records of Stay
// before. With nil it comes late: meanwhile leases may have ended.
func (w *sim) write(c Propose, by *proc) bool {
	cur := w.current()
	if string(cur.Encode()) != string(c.Old.Encode()) {
		return false
	}
	v, err := DecodeView(c.New.Encode())
	if err != nil {
		w.fail("%v", err)
		return false
	}
	for i, s := range v.Slots {
		o := cur.at(i)
		if o.Incarnation == s.Incarnation {
			continue
		}
		if o.Incarnation != 0 {
			p := w.process(Peer{i, o.Incarnation})
			p.removed = true
			if p.alive && !p.condemned && !slices.ContainsFunc(w.procs, func(q *proc) bool {
				return v.Has(q.me.Slot, q.me.Incarnation) && w.missed[w.pair(p, q)] &&
					(by == nil || by == q || !q.gone)
			}) { // so of two that miss only each other exactly one goes
				w.fail("%v is alive, has never missed a live one of those that stay, and was removed by %v", p.me, v)
			}
			if s.Incarnation != 0 {
				w.fail("slot %d went from one incarnation to another in one change", i)
			}
			if s.Left != v.Epoch {
				w.fail("slot %d was left in epoch %d, and says %d", i, v.Epoch, s.Left)
			}
		}
		if s.Incarnation != 0 {
			p := w.process(Peer{i, s.Incarnation})
			if p == nil || p.removed || p.out {
				w.fail("%v takes back %d/%x, which was removed", v, i, s.Incarnation)
			}
			if s.Since != v.Epoch {
				w.fail("slot %d was entered in epoch %d, and says %d", i, v.Epoch, s.Since)
			}
		}
	}
	w.history = append(slices.Clip(w.history), v)
	w.broadcast(nil, mail{ev: ViewSeen{v}, from: true})
	return true
}

// The fates of a proposal.
const (
	casAnswer = iota // it reaches the store, and the answer comes
	casMute          // it reaches the store, and the answer is lost
	casLost          // it does not reach the store
	casLate          // there is no answer, and it may reach the store later
	casUnsure        // the lack of a record does not prove a death; else as casAnswer
	casFates
)

func (w *sim) cas(p *proc, fate int) {
	c := p.cas
	p.cas, p.answered = nil, true
	answer := Proposed{Epoch: c.New.Epoch}
	for _, q := range c.Stay {
		if q == p.me {
			w.fail("%v proposes, and asks for its own record", p.me)
		}
		if w.process(q).gone && fate != casLost {
			answer.Outcome = OutcomeHeld
			if fate != casUnsure {
				w.step(p, Dead{q, "its record is gone"})
			}
		}
	}
	if answer.Outcome == OutcomeHeld {
		p.post(mail{ev: answer})
		return
	}
	switch fate {
	case casAnswer, casUnsure:
		if w.write(*c, p) {
			answer.Outcome = OutcomeWon
		} else {
			answer.Outcome, answer.Current = OutcomeLost, w.current()
		}
	case casMute:
		w.write(*c, p)
	case casLate:
		w.limbo = append(slices.Clip(w.limbo), *c)
	}
	p.post(mail{ev: answer})
}

// answer resolves p's oldest probe.
func (w *sim) answer(p *proc, v Verdict) {
	who := p.probes[0]
	p.probes = slices.Clone(p.probes[1:])
	p.post(mail{ev: Probed{who, v}})
}

func (w *sim) truth(p *proc) Verdict {
	if w.process(p.probes[0]).alive {
		return VerdictAlive
	}
	return VerdictDead
}

// deliverable lists the mail that can arrive now: of each lane the first.
func (p *proc) deliverable() []int {
	var is []int
	seen := map[string]bool{}
	for i, m := range p.mail {
		if m.lane != "" && seen[m.lane] || m.from && p.away {
			continue
		}
		seen[m.lane] = true
		is = append(is, i)
	}
	return is
}

func (w *sim) deliver(p *proc, i int, again bool) {
	m := p.mail[i]
	if !again {
		p.mail = slices.Delete(slices.Clone(p.mail), i, i+1)
	}
	w.step(p, m.ev)
}

// tick lets time pass at p, unless a lease would have run out that p does not know of; then it
// learns of that first.
func (w *sim) tick(p *proc) {
	for !p.away {
		i := slices.IndexFunc(p.mail, func(m mail) bool { return m.due != 0 && m.due <= p.now+1 })
		if i < 0 {
			break
		}
		w.deliver(p, i, false)
	}
	w.step(p, Tick{})
}

func (w *sim) storeAway(p *proc) {
	if !p.away {
		p.away = true
		w.step(p, StoreAway{"no route to the store"})
	}
}

// storeBack says that the store is back, and tells its present state: before that or, if early,
// later.
func (w *sim) storeBack(p *proc, early bool) {
	if !p.away {
		return
	}
	p.away = false
	for !early && p.alive && w.err == nil {
		i := slices.IndexFunc(p.mail, func(m mail) bool { return m.from })
		if i < 0 {
			break
		}
		w.deliver(p, i, false)
	}
	if p.report != nil {
		w.broadcast(p, mail{ev: Reported{p.me, *p.report}, from: true})
	}
	if p.ask != 0 {
		w.broadcast(p, mail{ev: JoinAsked{p.me, p.ask}, from: true, lane: "ask" + p.me.String()})
	} else {
		w.broadcast(p, mail{ev: JoinGone{p.me}, from: true, lane: "ask" + p.me.String()})
	}
	before := p.cas
	if w.step(p, StoreBack{}); p.cas == nil || p.cas == before {
		return
	}
	for i, s := range p.cas.Old.Slots {
		if q := w.process(Peer{i, s.Incarnation}); q != nil && q.alive && !q.condemned &&
			!p.cas.New.Has(i, s.Incarnation) { // a missing link may have come back with the store
			w.fail("%v proposes to remove %v, which is alive, as soon as it finds the store", p.me, q.me)
		}
	}
}

// settle delivers everything, in the order in which it was sent, and lets time pass until no
// process has anything to do for quiet ticks.
func (w *sim) settle(quiet int) {
	for _, p := range w.procs {
		w.storeBack(p, false)
	}
	for idle, rounds := 0, 0; idle < quiet && w.err == nil; rounds++ {
		if rounds > 400 {
			w.fail("no rest after %d rounds", rounds)
			return
		}
		w.flush()
		log, busy := w.log, false
		w.log = func(who Peer, what string) {
			busy = true
			if log != nil {
				log(who, what)
			}
		}
		for _, p := range w.procs {
			if p.alive {
				w.tick(p)
				busy = busy || p.m.Pending()
			}
		}
		w.log = log
		idle++
		if busy {
			idle = 0
		}
	}
}

// flush delivers and answers all that is under way, without time passing.
func (w *sim) flush() {
	for more, n := true, 0; more && w.err == nil; n++ {
		if n > 10000 {
			w.fail("endless chatter within one tick")
		}
		more = false
		for _, p := range w.procs {
			if !p.alive {
				continue
			}
			switch ds := p.deliverable(); {
			case p.cas != nil && !p.away:
				w.cas(p, casAnswer)
			case p.cas != nil:
				w.cas(p, casLost)
			case len(p.probes) > 0:
				w.answer(p, w.truth(p))
			case len(ds) > 0:
				i := ds[0]
				if w.pick != nil {
					i = ds[w.pick(len(ds))]
				}
				w.deliver(p, i, false)
			default:
				continue
			}
			more = true
		}
	}
}

// converge ends all faults except cut links, and checks that all processes reach the expected view.
func (w *sim) converge() {
	for _, c := range w.limbo {
		w.write(c, nil) // harmless
	}
	w.limbo = nil
	var v View
	for { // admit all that wait; some without links to each other are removed again, and others wait for their slots
		w.settle(2*w.cfg.Window + 3)
		if v = w.current(); w.err != nil {
			return
		}
		i := slices.IndexFunc(w.procs, func(p *proc) bool { return p.alive && v.Has(p.me.Slot, p.me.Incarnation) })
		if i < 0 {
			return // no process is left to decide
		}
		w.step(w.procs[i], Admit{})
		if !w.procs[i].m.Pending() {
			break
		}
	}
	for _, s := range v.Active() {
		p := w.process(Peer{s, v.Slots[s].Incarnation})
		if !p.alive {
			w.fail("at the end %v is dead and in %v", p.me, v)
		}
		for _, q := range w.procs {
			if q != p && v.Has(q.me.Slot, q.me.Incarnation) && w.cut[w.pair(p, q)] {
				w.fail("at the end %v and %v cannot reach each other, and are both in %v", p.me, q.me, v)
			}
		}
	}
	for _, p := range w.procs {
		in := v.Has(p.me.Slot, p.me.Incarnation)
		switch {
		case !p.alive:
		case in && (!p.m.Member() || !p.m.View().Equal(v)):
			w.fail("at the end %v has %v, and the store %v", p.me, p.m.View(), v)
		case !in && (p.m.Member() || !p.out && p.wasIn):
			w.fail("at the end %v does not know that it is not in %v", p.me, v)
		case !in && !p.out:
			free := v.at(p.me.Slot).Incarnation == 0 && !p.condemned
			for _, q := range w.procs {
				if v.Has(q.me.Slot, q.me.Incarnation) && w.cut[w.pair(p, q)] ||
					q != p && q.alive && !q.out && q.me.Slot == p.me.Slot {
					free = false
				}
			}
			if free && p.me.Slot < max(w.cfg.MaxSize, v.Size()) {
				w.fail("at the end %v still waits to be let into %v", p.me, v)
			}
		}
		if p.alive && (p.m.Pending() || p.isolated != "") {
			w.fail("at the end %v still wants something", p.me)
		}
		if !in || !p.alive {
			continue
		}
		if len(p.m.broken) != 0 || p.report != nil && len(p.report.Unreachable) != 0 {
			w.fail("at the end %v still misses links: %v, %v", p.me, p.m.broken, p.report)
		}
		for q, l := range p.m.peers {
			if q != p.me && (l.link == linkDown || l.link == linkUnknown &&
				max(v.Slots[q.Slot].Since, v.Slots[p.me.Slot].Since) > 1) {
				w.fail("at the end %v has no link to %v", p.me, q)
			}
		}
	}
}

// clone copies the world, so that two things can happen to it.
func (w *sim) clone() *sim {
	c := *w
	c.cut = make(map[[2]int]bool, len(w.cut))
	for k := range w.cut {
		c.cut[k] = true
	}
	c.missed = maps.Clone(w.missed)
	c.procs = make([]*proc, len(w.procs))
	for i, p := range w.procs {
		q := *p
		q.mail = slices.Clone(p.mail)
		q.m = p.m.clone()
		c.procs[i] = &q
	}
	return &c
}

func (m *Machine) clone() *Machine {
	c := *m
	c.incarnations = make([][]peerState, len(m.incarnations))
	for i, ls := range m.incarnations {
		c.incarnations[i] = slices.Clone(ls)
	}
	c.broken = make(map[[2]int]uint64, len(m.broken))
	for k, v := range m.broken {
		c.broken[k] = v
	}
	return &c
}

// fingerprint is equal for events with the same effect on the receiver. Views of an epoch are
// equal.
func fingerprint(ev Event) string {
	var b []byte
	num := func(kind byte, p Peer, xs ...uint64) {
		b = binary.AppendUvarint(append(b, kind), p.Incarnation)
		for _, x := range xs {
			b = binary.AppendUvarint(b, x)
		}
	}
	switch e := ev.(type) {
	case LinkUp:
		num(1, e.Peer)
	case LinkDown:
		num(2, e.Peer)
	case Dead:
		num(3, e.Peer)
	case Probed:
		num(4, e.Peer, uint64(e.Verdict))
	case ViewSeen:
		num(5, Peer{}, e.View.Epoch)
	case Proposed:
		num(6, Peer{}, e.Epoch, uint64(e.Outcome), e.Current.Epoch)
	case Reported:
		num(7, e.Peer)
		b = append(b, e.Report.Encode()...)
	case JoinAsked:
		num(8, e.Peer, e.Epoch)
	case JoinGone:
		num(9, e.Peer)
	default:
		panic(fmt.Sprintf("%T is never mailed", ev))
	}
	return string(b)
}

var seed = maphash.MakeSeed()

// key identifies a state of the world, up to what makes no difference to its future.
func (w *sim) key() uint64 {
	var b []byte
	num := func(xs ...uint64) {
		for _, x := range xs {
			b = binary.AppendUvarint(b, x)
		}
	}
	flag := func(fs ...bool) {
		x := uint64(0)
		for _, f := range fs {
			x <<= 1
			if f {
				x |= 1
			}
		}
		num(x)
	}
	peer := func(ps ...Peer) {
		num(uint64(len(ps)))
		for _, p := range ps {
			num(p.Incarnation)
		}
	}
	for _, v := range w.history {
		b = append(b, v.Encode()...)
	}
	for i := range w.procs {
		for j := range i {
			flag(w.cut[[2]int{j, i}], w.missed[[2]int{j, i}])
		}
	}
	for _, c := range w.limbo {
		b = append(append(b, c.Old.Encode()...), c.New.Encode()...)
	}
	for _, p := range w.procs {
		peer(p.me)
		flag(p.alive, p.away, p.isolated != "", p.answered, p.wasIn, p.removed, p.out, p.condemned, p.gone,
			p.cas != nil)
		if p.cas != nil {
			b = append(append(b, p.cas.Old.Encode()...), p.cas.New.Encode()...)
		}
		if p.cas != nil {
			peer(p.cas.Stay...)
		}
		num(p.ask, p.last)
		if p.report != nil {
			b = append(b, p.report.Encode()...)
		}
		if !p.alive {
			continue
		}
		peer(p.probes...)
		var letters []string
		place := map[string]int{} // order counts within a lane only
		for _, m := range p.mail {
			if m.lane != "" {
				place[m.lane]++
			}
			letters = append(letters, fingerprint(m.ev)+m.lane+"/"+string(rune(place[m.lane]))+
				string(rune(max(m.due-p.now, 0))))
		}
		sort.Strings(letters)
		for _, l := range letters {
			b = append(b, l...)
		}
		m := p.m
		age := func(t uint64) uint64 { return min(m.now-t, uint64(2*m.cfg.Window+2)) }
		left := func(t uint64) uint64 { return max(t, m.now) - m.now }
		num(uint64(m.role), m.me.Incarnation, m.view.Epoch, m.seq, left(m.retryAt), uint64(m.fails), m.asked,
			m.standing, age(m.wantedAt))
		flag(m.changed, m.wanted, m.pending != nil, m.blind, m.away != "", m.isolated != "")
		if m.pending != nil {
			b = append(b, m.pending.New.Encode()...)
			peer(m.pending.Stay...)
		}
		peer(m.reported...)
		num(uint64(len(m.out)))
		for _, o := range m.out {
			num(uint64(o))
		}
		for i := range m.incarnations {
			for j := range i {
				if t, ok := m.broken[[2]int{j, i}]; ok {
					num(1, age(t))
				} else {
					num(0)
				}
			}
			num(uint64(len(m.incarnations[i])))
			for _, l := range m.incarnations[i] {
				num(l.incarnation, uint64(l.link), uint64(l.tries), left(l.next), l.report.Seq, l.ask)
				if l.busy {
					num(age(l.next))
				}
				flag(l.over, l.demanded, l.busy, l.suspect, l.admit)
				peer(l.report.Unreachable...)
			}
		}
	}
	return maphash.Bytes(seed, b)
}
