package resync

import (
	"encoding/binary"
	"flag"
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"
)

// The model: three ranks run operations, each of which succeeds at a rank when all members of its
// exchange's view have begun it there. Ranks die, or give an operation up, at any step. Views and
// notices are delayed arbitrarily, notices between two ranks in order. A program whose group has
// failed calls Recover and continues. All states are visited.
const (
	modelRanks = 3
	modelOps   = 2
)

var deep = flag.Bool("resync.deep", false, "explore two failures as well: minutes")

type modelRules struct {
	report, retry, uniform bool
	deaths, gives          int
	ops                    uint64
	early                  bool // the operation ends at rank 0 alone, as a broadcast does at its root
	recovers               bool // programs call Recover after the first operation, whatever became of it
}

type doing uint8

const (
	idle doing = iota
	running
	entering   // before an operation
	concluding // after one that failed
	recovering
)

// modelRank does with its Machine what the driver does.
type modelRank struct {
	alive   bool
	m       *Machine
	doing   doing
	seq     uint64
	aborts  bool // it has told that it has failed in this channel
	broken  bool // the channel: a rank has failed in it
	has     bool // the result of the operation that ran is here, unconfirmed
	rough   bool
	failed  bool
	told    bool // to its program
	called  bool // Recover
	gave    uint64
	outcome [modelOps + 1]int8 // 1 well, -1 failed, 2 given up
}

// channel is what became of the operations of one exchange.
type channel struct {
	begun, left, had [modelRanks]uint64 // left: the last operation that the rank runs in it, plus one
}

// message is a standing, or that the group has failed at a rank whose channel is at Told.At.
type message struct {
	Told
	abort bool
}

type modelWorld struct {
	rules modelRules
	ranks [modelRanks]modelRank
	view  View
	wires [modelRanks][modelRanks][]message // from, to
	chans map[Point]*channel
}

func (w *modelWorld) clone() *modelWorld {
	c := *w
	for r := range c.ranks {
		m := *c.ranks[r].m
		m.got, m.heard = maps.Clone(m.got), maps.Clone(m.heard)
		c.ranks[r].m = &m
		for s := range c.wires[r] {
			c.wires[r][s] = slices.Clone(c.wires[r][s])
		}
	}
	c.chans = map[Point]*channel{}
	for p, ch := range w.chans {
		one := *ch
		c.chans[p] = &one
	}
	return &c
}

// fingerprint is bytes that differ where states do.
type fingerprint []byte

func (f *fingerprint) put(numbers ...uint64) {
	for _, n := range numbers {
		*f = binary.AppendUvarint(*f, n)
	}
}

func (f *fingerprint) flags(flags ...bool) {
	n := uint64(1)
	for _, set := range flags {
		if n <<= 1; set {
			n |= 1
		}
	}
	f.put(n)
}

func (f *fingerprint) view(v View) {
	f.put(v.Epoch, uint64(len(v.Members)))
	for _, slot := range v.Members {
		f.put(uint64(slot))
	}
}

func (f *fingerprint) outcome(o Outcome) { f.put(o.At.View, o.At.Attempt, o.Start, o.Confirmed) }

func (f *fingerprint) standing(s Standing) {
	f.put(s.Over)
	f.flags(s.Has, s.Intact, s.Joins, s.Failed, s.Calls)
	f.outcome(s.Last)
}

func (f *fingerprint) machine(m *Machine) {
	f.view(m.now)
	f.put(m.at.View, m.at.Attempt)
	f.view(m.in)
	f.standing(m.mine)
	f.flags(m.pending, m.failed)
	for slot := range modelRanks {
		s, told := m.got[slot]
		if f.flags(told); told {
			f.standing(s)
		}
		h, heard := m.heard[slot]
		if f.flags(heard); heard {
			f.put(h.At.View, h.At.Attempt)
			f.standing(h.Standing)
		}
	}
	f.outcome(m.last)
}

func (w *modelWorld) key() string {
	f := make(fingerprint, 0, 1024)
	for r := range w.ranks {
		p := &w.ranks[r]
		f.machine(p.m)
		f.flags(p.alive, p.aborts, p.broken, p.has, p.rough, p.failed, p.told, p.called)
		f.put(uint64(p.doing), p.seq, p.gave)
		for _, o := range p.outcome {
			f.put(uint64(uint8(o)))
		}
		for _, wire := range w.wires[r] {
			f.put(uint64(len(wire)))
			for _, m := range wire {
				f.put(m.At.View, m.At.Attempt)
				f.standing(m.Standing)
				f.flags(m.abort)
			}
		}
	}
	points := slices.SortedFunc(maps.Keys(w.chans), func(a, b Point) int {
		if a.Before(b) {
			return -1
		}
		return 1
	})
	f.put(uint64(len(points)))
	for _, p := range points {
		f.put(p.View, p.Attempt)
		c := w.chans[p]
		for r := range modelRanks {
			f.put(c.begun[r], c.left[r], c.had[r])
		}
	}
	f.view(w.view)
	f.put(uint64(w.rules.deaths), uint64(w.rules.gives))
	return string(f)
}

func (w *modelWorld) channel(p Point) *channel {
	if w.chans[p] == nil {
		w.chans[p] = &channel{}
	}
	return w.chans[p]
}

// standing, change, settled, answer and the rest are the driver's, as in package pg.
func (p *modelRank) standing() Standing {
	s := Standing{Over: p.seq, Intact: true, Failed: p.failed}
	if p.gave == p.seq && p.seq > 0 {
		s.Over, s.Intact = p.seq-1, false
	}
	return s
}

func (w *modelWorld) change(r int, mine Standing, renew, passive bool) {
	p := &w.ranks[r]
	w.channel(p.m.at).left[r] = mine.Over + 1
	tell, complete := p.m.Enter(renew, passive, mine)
	for _, s := range p.m.In().Members {
		if s != r && w.ranks[s].alive {
			w.wires[r][s] = append(w.wires[r][s], message{Told: tell})
		}
	}
	if p.rough, p.broken, p.aborts = true, false, false; complete {
		w.settled(r)
	}
}

func (w *modelWorld) settled(r int) {
	p := &w.ranks[r]
	_, failed := p.m.Outcome()
	p.failed, p.rough = p.failed || failed, true
}

// look fails the group where it has to fail between two operations.
func (w *modelWorld) look(r int) {
	p := &w.ranks[r]
	if p.broken || w.rules.report && p.m.Lost() {
		w.fail(r)
	}
}

func (w *modelWorld) fail(r int) {
	p := &w.ranks[r]
	if p.failed, p.broken = true, true; p.aborts {
		return
	}
	p.aborts = true
	for _, s := range p.m.In().Members {
		if s != r && w.ranks[s].alive {
			w.wires[r][s] = append(w.wires[r][s], message{Told{At: p.m.at}, true})
		}
	}
}

func (w *modelWorld) answer(r int) {
	p := &w.ranks[r]
	if p.doing != idle || !p.m.Asked(p.failed) {
		return
	}
	w.look(r)
	if p.m.Asked(p.failed) {
		w.change(r, p.standing(), false, true)
	}
}

// concludes is the standing of a rank whose operation has failed.
func (w *modelWorld) concludes(r int) Standing {
	p := &w.ranks[r]
	return Standing{Over: p.seq - 1, Has: p.has, Intact: w.rules.retry && !p.has, Failed: p.failed}
}

// end ends the operation at hand.
func (w *modelWorld) end(r int, outcome int8) {
	p := &w.ranks[r]
	if int(p.seq) <= modelOps {
		p.outcome[p.seq] = outcome
	}
	p.doing, p.has = idle, false
	if p.rough {
		w.answer(r)
	}
}

// moves continues a move; it returns true when the rank has arrived.
func (w *modelWorld) moves(r int, mine Standing, renew bool) bool {
	p := &w.ranks[r]
	if !p.m.Behind() && p.m.Due(renew) {
		w.change(r, mine, renew, false)
	}
	return !p.m.Behind() && !p.m.Due(false) && !p.m.Pending()
}

// step tries what rank r can do, in alternatives.
func (w *modelWorld) steps(try func(what string, act func(w *modelWorld))) {
	for r := range modelRanks {
		p := &w.ranks[r]
		if !p.alive {
			continue
		}
		say := func(what string) string { return fmt.Sprintf("%d %s", r, what) }
		if p.m.Now().Epoch < w.view.Epoch {
			try(say("sees the view"), func(w *modelWorld) {
				w.ranks[r].m.See(w.view)
				w.ranks[r].rough = true
				w.answer(r)
				w.advance(r)
			})
		}
		for s := range modelRanks {
			if len(w.wires[s][r]) > 0 {
				try(say(fmt.Sprintf("hears %d", s)), func(w *modelWorld) {
					t := w.wires[s][r][0]
					w.wires[s][r] = w.wires[s][r][1:]
					if q := &w.ranks[r]; t.abort {
						q.broken = q.broken || t.At == q.m.at
						return
					} else if q.m.Hear(s, t.Told) {
						w.settled(r)
					}
					w.ranks[r].rough = true
					w.answer(r)
					w.advance(r)
				})
			}
		}
		switch p.doing {
		case idle:
			switch {
			case p.failed && p.told || w.rules.recovers && p.seq == 1 && !p.called:
				try(say("calls Recover"), func(w *modelWorld) {
					q := &w.ranks[r]
					q.doing, q.called = recovering, true
					w.look(r)
					mine := q.standing()
					mine.Calls = true
					w.moves(r, mine, q.failed || q.broken || !q.m.Fresh(q.seq))
					w.advance(r)
				})
			case p.seq < w.rules.ops:
				try(say("calls the next operation"), func(w *modelWorld) { w.call(r) })
			}
		case running:
			w.run(r, try, say)
		}
		if w.rules.deaths > 0 {
			try(say("dies"), func(w *modelWorld) {
				w.rules.deaths--
				w.ranks[r].alive = false
				w.view = View{Epoch: w.view.Epoch + 1}
				for s := range modelRanks {
					w.wires[s][r] = nil
					if w.ranks[s].alive {
						w.view.Members = append(w.view.Members, s)
					}
				}
			})
		}
	}
}

// call begins the next operation.
func (w *modelWorld) call(r int) {
	p := &w.ranks[r]
	switch {
	case p.failed:
		p.told = true
		return
	case w.ranks[r].broken: // the operation finds it
		w.fail(r)
		p.seq, p.told = p.seq+1, true
		w.end(r, -1)
		return
	case w.rules.report && p.m.Lost():
		w.fail(r)
		p.seq, p.told = p.seq+1, true
		w.end(r, -1)
		return
	}
	p.doing = entering
	w.advance(r)
}

// advance continues what rank r waits for between operations.
func (w *modelWorld) advance(r int) {
	p := &w.ranks[r]
	switch p.doing {
	case entering:
		if !w.moves(r, p.standing(), false) {
			return
		}
		o, _ := p.m.Outcome()
		switch {
		case p.failed:
			p.told, p.doing = true, idle
		case p.seq+1 < o.Start: // skipped
			p.seq++
			w.end(r, -1)
		default:
			p.seq++
			p.doing, p.rough = running, false
			for s, t := range p.m.got {
				if t.Failed && !p.m.mine.Calls {
					panic(fmt.Sprintf("rank %d goes on though the group of rank %d has failed", r, s))
				}
			}
			w.channel(p.m.at).begun[r] = p.seq
		}
	case concluding:
		if !w.moves(r, w.concludes(r), false) {
			return
		}
		o, _ := p.m.Outcome()
		switch {
		case p.has && p.seq <= o.Confirmed:
			w.end(r, 1)
		case p.seq < o.Start || p.failed:
			p.told = p.failed
			w.end(r, -1)
		default:
			p.doing = running
			w.channel(p.m.at).begun[r] = p.seq
		}
	case recovering:
		mine := p.standing()
		mine.Calls = true
		for w.moves(r, mine, false) {
			o, failed := p.m.Outcome()
			if !failed {
				p.failed, p.told, p.doing = false, false, idle
				p.seq = max(p.seq, min(o.Start-1, w.rules.ops))
				w.answer(r)
				return
			}
			w.change(r, mine, true, false)
		}
	}
}

// run is what can happen to the operation that runs at r.
func (w *modelWorld) run(r int, try func(string, func(*modelWorld)), say func(string) string) {
	p := &w.ranks[r]
	ch, in, k := w.channel(p.m.at), p.m.In().Members, p.seq
	all := func(of *[modelRanks]uint64) bool {
		return !slices.ContainsFunc(in, func(s int) bool { return of[s] < k })
	}
	end := func(w *modelWorld) { w.end(r, 1) }
	switch {
	case p.has && all(&ch.had):
		try(say("knows that all have the result"), end)
	case !p.has && (all(&ch.begun) || w.rules.early && r == 0):
		try(say("has the result"), func(w *modelWorld) {
			if w.channel(p.m.at).had[r] = k; w.rules.uniform {
				w.ranks[r].has = true
			} else {
				w.end(r, 1)
			}
		})
	}
	lost := slices.ContainsFunc(in, func(s int) bool { return !w.ranks[s].alive || ch.left[s] > 0 && ch.left[s] <= k })
	if lost && !p.broken {
		try(say("cannot go on"), func(w *modelWorld) {
			q := &w.ranks[r]
			q.rough = true
			dead := func(s int) bool { return !w.ranks[s].alive }
			if w.rules.recovers && w.rules.gives == 0 && !slices.ContainsFunc(q.m.In().Members, dead) {
				panic(fmt.Sprintf("operation %d fails at rank %d in a view whose members all live", k, r))
			}
			if w.rules.report {
				w.fail(r)
				q.told = true
			}
			if !w.rules.retry && !w.rules.uniform {
				w.end(r, -1)
				return
			}
			q.doing = concluding
			w.moves(r, w.concludes(r), w.ranks[r].broken)
			w.advance(r)
		})
	}
	giveUp := func(outcome int8) func(w *modelWorld) {
		return func(w *modelWorld) {
			q := &w.ranks[r]
			w.fail(r)
			if q.told, q.rough = true, true; w.rules.uniform {
				q.gave = k
			}
			w.end(r, outcome)
		}
	}
	if p.broken {
		try(say("is told that another has failed"), giveUp(2))
	}
	if w.rules.gives > 0 {
		try(say("gives up"), func(w *modelWorld) { w.rules.gives--; giveUp(2)(w) })
	}
}

type explorer struct {
	t    *testing.T
	seen map[string]bool
	path []string
	ends int
	calm bool // nothing fails
}

func (e *explorer) fail(w *modelWorld, format string, args ...any) {
	e.t.Helper()
	for r := range w.ranks {
		e.t.Logf("rank %d: %+v\n%+v", r, w.ranks[r], *w.ranks[r].m)
	}
	e.t.Fatalf("%+v: %s, after\n    %s", w.rules, fmt.Sprintf(format, args...), strings.Join(e.path, "\n    "))
}

func (e *explorer) visit(w *modelWorld) {
	key := w.key()
	if e.seen[key] {
		return
	}
	e.seen[key] = true
	e.check(w)
	moved := false
	defer func() {
		if r := recover(); r != nil {
			e.fail(w, "%v", r)
		}
	}()
	w.steps(func(what string, act func(*modelWorld)) {
		next := w.clone()
		e.path = append(e.path, what)
		act(next)
		e.visit(next)
		e.path = e.path[:len(e.path)-1]
		moved = true
	})
	if !moved {
		e.ends++
		for r := range w.ranks {
			p := &w.ranks[r]
			if e.calm && slices.Contains(p.outcome[1:w.rules.ops+1], -1) {
				e.fail(w, "rank %d has an operation fail, without a reason", r)
			}
			over := func(s int) bool { // its program has come to its end, and would not be told before its next call
				q := &w.ranks[s]
				return q.alive && q.doing == idle && q.seq >= w.rules.ops && !q.told
			}
			if p.alive && (p.doing != idle || p.seq < w.rules.ops) &&
				!(p.doing == recovering && slices.ContainsFunc(p.m.Missing(), over)) {
				e.fail(w, "rank %d waits for ever", r)
			}
		}
	}
}

func (e *explorer) check(w *modelWorld) {
	quiet := true
	for r := range w.ranks {
		p := &w.ranks[r]
		if p.alive && p.m.at.Attempt > 4 {
			e.fail(w, "rank %d is in attempt %d", r, p.m.at.Attempt)
		}
		quiet = quiet && (!p.alive || p.m.Now().Epoch == w.view.Epoch)
		for s := range w.wires {
			quiet = quiet && len(w.wires[s][r]) == 0
		}
		for s := range r {
			q := &w.ranks[s]
			for k := range p.outcome {
				a, b := p.outcome[k], q.outcome[k]
				if w.rules.uniform && p.alive && q.alive && a*b == -1 {
					e.fail(w, "of operation %d one of ranks %d and %d has a result, and not both", k, r, s)
				}
			}
		}
	}
	for r := range w.ranks {
		p := &w.ranks[r]
		if !quiet || !p.alive || p.doing != entering && p.doing != concluding {
			continue
		}
		for _, s := range p.m.Missing() { // a rank that is in an operation answers when that has ended
			if q := &w.ranks[s]; q.alive && q.doing == idle {
				e.fail(w, "rank %d waits for the program of rank %d", r, s)
			}
		}
	}
}

func (rules modelRules) explore(t *testing.T) (states int) {
	w := &modelWorld{rules: rules, view: View{Epoch: 1, Members: []int{0, 1, 2}}, chans: map[Point]*channel{}}
	for r := range w.ranks {
		w.ranks[r] = modelRank{alive: true, m: New(r, w.view)}
	}
	e := &explorer{t: t, seen: map[string]bool{}, calm: rules.deaths+rules.gives == 0}
	e.visit(w)
	if e.ends == 0 {
		t.Errorf("%+v: nothing ends", rules)
	}
	t.Logf("%+v: %d states", rules, len(e.seen))
	return len(e.seen)
}

func TestExchangesWithOneFailureAtEveryStep(t *testing.T) {
	states := 0
	for bits := range 8 {
		rules := modelRules{report: bits&1 != 0, retry: bits&2 != 0, uniform: bits&4 != 0, ops: modelOps}
		if few := testing.Short() || raceEnabled; rules.report && rules.retry || few && rules.uniform {
			continue
		}
		rules.deaths = 1
		states += rules.explore(t)
		if !rules.uniform {
			rules.early = true
			states += rules.explore(t)
		}
		rules.deaths, rules.gives = 0, 1
		if !*deep {
			rules.ops = 1
		}
		states += rules.explore(t)
		rules.ops = modelOps
		rules.gives, rules.recovers = 0, true
		states += rules.explore(t)
		rules.deaths = 1
		states += rules.explore(t)
		rules.gives, rules.deaths, rules.recovers, rules.early = 1, 1, false, false
		if *deep {
			states += rules.explore(t)
		}
	}
	t.Logf("%d states", states)
}

// A rank that comes in may know of a later view than the one that admitted it, and then tells
// nothing in that one: the ranks that wait for it there follow.
func TestJoinerSkipsAView(t *testing.T) {
	all := func(epoch uint64, slots ...int) View { return View{Epoch: epoch, Members: slots} }
	a := New(1, all(11, 1))
	a.See(all(12, 0, 1))
	a.Aim(12)
	if !a.Due(false) {
		t.Fatal("the view has to be 12, and there is nothing to do")
	}
	if _, complete := a.Enter(false, false, Standing{Over: 5, Intact: true}); complete {
		t.Fatal("complete without rank 0")
	}
	j := New(0, View{Epoch: 13, Members: []int{0, 1, 2}})
	j.See(all(14, 0, 1, 2))
	j.Aim(14)
	told, _ := j.Enter(false, false, Standing{Joins: true, Intact: true})
	a.Hear(0, told)
	if a.Due(false) {
		t.Fatal("there is no view 14 yet, and it is to go there")
	}
	a.See(all(14, 0, 1, 2))
	if !a.Due(false) {
		t.Fatal("it waits for rank 0 in view 12, which is in view 14")
	}
	if told, _ := a.Enter(false, false, Standing{Over: 5, Intact: true}); told.At != (Point{View: 14}) {
		t.Fatalf("went to %v, want view 14", told.At)
	}
}
