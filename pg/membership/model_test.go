package membership

import (
	"fmt"
	"slices"
	"testing"
)

// Faults of a model, besides the order of everything.
const (
	mayKill = 1 << iota
	mayCut
	mayHeal
	mayMute
	mayLate
	mayLease
	mayStart
	mayEvict
	mayAway
	mayDuplicate
	maySilence
	mayHold
)

type modelState struct {
	w      *sim
	faults int
	story  *storyLine
}

type storyLine struct {
	what   string
	before *storyLine
}

func (s *storyLine) String() string {
	if s == nil {
		return ""
	}
	return s.before.String() + "\n    " + s.what
}

// explore visits every state that n ranks can come to by faults of the given kinds while ticks
// steps of time pass (at some of them), and from each of them has the world converge.
func explore(t *testing.T, n int, cfg Config, kinds, faults, ticks, bound int) {
	begin := newSim(n, cfg, nil)
	begin.settle(1)
	for _, p := range begin.procs {
		p.now = 0
	}
	seen := map[uint64]bool{}
	queue := []modelState{{w: begin, faults: faults}}
	views := 0
	for len(queue) > 0 {
		s := queue[0]
		queue[0] = modelState{}
		queue = queue[1:]
		end := s.w.clone()
		end.converge()
		if end.err != nil {
			t.Fatalf("%v, after%v\nand then rest", end.err, s.story)
		}
		views = max(views, len(end.history))
		try := func(cost int, what string, act func(w *sim)) {
			w := s.w.clone()
			act(w)
			if w.err != nil {
				t.Fatalf("%v, after%v\n    %s", w.err, s.story, what)
			}
			key := w.key()*31 + uint64(s.faults-cost)
			for _, p := range w.procs {
				key += uint64(p.now) * 1e9
			}
			if !seen[key] {
				seen[key] = true
				queue = append(queue, modelState{w, s.faults - cost, &storyLine{what, s.story}})
			}
		}
		passed := 0
		for _, p := range s.w.procs {
			passed += p.now
		}
		may := func(kind int) bool { return s.faults > 0 && kinds&kind != 0 }
		for i, p := range s.w.procs {
			if !p.alive {
				continue
			}
			for _, j := range p.deliverable() {
				m := p.mail[j]
				what := fmt.Sprintf("%v gets %T%v", p.me, m.ev, m.ev)
				try(0, what, func(w *sim) { w.deliver(w.procs[i], j, false) })
				if m.from && may(mayDuplicate) {
					try(1, what+", and will again", func(w *sim) { w.deliver(w.procs[i], j, true) })
				}
			}
			if p.cas != nil && !p.away {
				try(0, fmt.Sprintf("%v: %v", p.me, *p.cas), func(w *sim) { w.cas(w.procs[i], casAnswer) })
			}
			for _, f := range []struct{ kind, fate int }{{mayMute, casMute}, {mayMute, casLost}, {mayLate, casLate},
				{mayHold, casUnsure}} {
				if p.cas != nil && may(f.kind) && (!p.away || f.fate != casMute) {
					try(1, fmt.Sprintf("%v: %v, fate %d", p.me, *p.cas, f.fate),
						func(w *sim) { w.cas(w.procs[i], f.fate) })
				}
			}
			if len(p.probes) > 0 {
				truth := s.w.truth(p)
				try(0, fmt.Sprintf("%v asks after %v: %d", p.me, p.probes[0], truth),
					func(w *sim) { w.answer(w.procs[i], truth) })
				if truth == VerdictDead {
					try(0, fmt.Sprintf("%v asks after %v: no answer", p.me, p.probes[0]),
						func(w *sim) { w.answer(w.procs[i], VerdictUnknown) })
				}
			}
			if passed < ticks {
				try(0, fmt.Sprintf("%v: tick", p.me), func(w *sim) { w.tick(w.procs[i]) })
			}
			if may(mayKill) {
				try(1, fmt.Sprintf("kill %v", p.me), func(w *sim) { w.kill(w.procs[i]) })
			}
			if may(maySilence) {
				try(1, fmt.Sprintf("silence %v", p.me), func(w *sim) { w.silence(w.procs[i]) })
			}
			if may(mayLease) {
				try(1, fmt.Sprintf("lease of %v", p.me), func(w *sim) { w.expire(w.procs[i]) })
			}
			if may(mayEvict) {
				try(1, fmt.Sprintf("%v evicts 0", p.me), func(w *sim) {
					if v := w.procs[i].m.View(); v.Has(w.procs[0].me.Slot, w.procs[0].me.Incarnation) {
						w.procs[0].condemned = true
					}
					w.step(w.procs[i], Evict{0})
				})
			}
			if may(mayAway) && !p.away {
				try(1, fmt.Sprintf("%v loses the store", p.me), func(w *sim) { w.storeAway(w.procs[i]) })
			}
			if p.away {
				try(0, fmt.Sprintf("%v finds the store", p.me), func(w *sim) { w.storeBack(w.procs[i], false) })
				try(0, fmt.Sprintf("%v finds the store, and not its state yet", p.me),
					func(w *sim) { w.storeBack(w.procs[i], true) })
			}
			for j := range i {
				q := s.w.procs[j]
				if !q.alive {
					continue
				}
				if cut := s.w.cut[s.w.pair(p, q)]; !cut && may(mayCut) {
					for side := range 3 {
						try(1, fmt.Sprintf("cut %v %v, side %d", q.me, p.me, side),
							func(w *sim) { w.sever(w.procs[j], w.procs[i], side != 1, side != 0) })
					}
				} else if cut && may(mayHeal) {
					try(1, fmt.Sprintf("heal %v %v", q.me, p.me), func(w *sim) { w.heal(w.procs[j], w.procs[i]) })
				}
			}
		}
		for i, c := range s.w.limbo {
			try(0, fmt.Sprintf("late: %v", c), func(w *sim) {
				w.limbo = slices.Delete(slices.Clone(w.limbo), i, i+1)
				w.write(c, nil)
			})
		}
		if may(mayStart) {
			me := Peer{n - 1, incarnation(n-1, 1+len(s.w.procs))}
			try(1, fmt.Sprintf("start %v", me), func(w *sim) { w.start(me, w.current()) })
		}
		if len(seen) > bound {
			t.Fatalf("more than %d states", bound)
		}
	}
	t.Logf("%d states, up to epoch %d", len(seen), views)
	if views < 2 {
		t.Error("nothing was ever decided")
	}
}

// TestModel visits all interleavings of small worlds.
func TestModel(t *testing.T) {
	for _, c := range []struct {
		name                 string
		n                    int
		cfg                  Config
		kinds, faults, ticks int
	}{
		{"two, one dies", 2, Config{Window: 1}, mayKill, 1, 4},
		{"two, both may die, answers are lost", 2, Config{}, mayKill | mayMute | mayLate, 2, 4},
		{"two, cut", 2, Config{Window: 1}, mayCut, 1, 2},
		{"two, cut and healed", 2, Config{Window: 1}, mayCut | mayHeal, 2, 2},
		{"two, cut, one dies", 2, Config{}, mayCut | mayKill, 2, 1},
		{"two, one falls silent", 2, Config{Window: 1}, maySilence | mayHold, 2, 4},
		{"two, cut, one falls silent", 2, Config{}, mayCut | maySilence, 2, 2},
		{"three, one falls silent", 3, Config{}, maySilence, 1, 1},
		{"two, a lease runs out", 2, Config{}, mayLease, 2, 2},
		{"two, one is evicted", 2, Config{}, mayEvict | mayDuplicate, 2, 2},
		{"two, the store goes away", 2, Config{}, mayKill | mayAway, 2, 4},
		{"two, cut, the store goes away", 2, Config{}, mayCut | mayAway, 2, 1},
		{"two, one dies and comes back", 2, Config{AutoAdmit: true}, mayKill | mayStart, 2, 0},
		{"three, one dies", 3, Config{}, mayKill, 1, 0},
		{"three, cut", 3, Config{}, mayCut, 1, 1},
		{"three, cut twice", 3, Config{}, mayCut, 2, 0},
	} {
		if few() && c.n == 3 {
			continue
		}
		t.Run(c.name, func(t *testing.T) { explore(t, c.n, c.cfg, c.kinds, c.faults, c.ticks, 400000) })
	}
}
