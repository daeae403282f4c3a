package resync

import (
	"fmt"
	"strings"
	"testing"
)

// The model: a few ranks run operations 1..ops in order, each of which ends at a rank only after
// all members of the view have begun it. Any may be killed at any step, or give up an operation; a
// new view follows, in which ranks exchange standings, and any of them may be too late to hear all
// of it before the next view comes. All states are visited.
const (
	resumeRanks  = 4
	resumeOps    = 3
	resumeEpochs = 5
)

const failed = 255

type resumeRules struct {
	uniform, retry bool
	early          bool // the operation ends at the lowest rank alone, as a broadcast does at its root
	giveUp         bool // an operation may be given up once
	again          bool // and the one behind it too
	joins          bool // the last rank comes in with the second view
	n, kills, ops  int
}

// small is a Standing in few bytes.
type small struct {
	over                           uint8
	has, intact, joins             bool
	epoch, start, confirmed, given uint8
}

func (s small) standing() Standing {
	return Standing{Over: uint64(s.over), Has: s.has, Intact: s.intact, Given: uint64(s.given), Joins: s.joins,
		Last: Outcome{Point{uint64(s.epoch), 0}, uint64(s.start), uint64(s.confirmed)}}
}

type resumeRank struct {
	dead, ready, begun bool // ready: has completed the exchange of its epoch
	epoch              uint8
	at                 small
	outcome            [resumeOps + 1]uint8 // epoch in which it ended well, or failed
	ranIn              [resumeOps + 1]uint8 // epoch in which it ran last
	told               [resumeOps + 1]bool  // the program was told that it gave up
}

type resumeWorld struct {
	ranks   [resumeRanks]resumeRank
	epoch   uint8
	members [resumeEpochs + 1]uint8
	posted  [resumeEpochs + 1]uint8
	sent    [resumeEpochs + 1][resumeRanks]small
	began   [resumeEpochs + 1][resumeRanks]uint8 // the last operation begun in that epoch
	has     [resumeEpochs + 1][resumeRanks]uint8 // the last of which the result was there
	kills   int8
	gaveUp  bool
	again   bool
	joined  bool
}

type resumeModel struct {
	t     *testing.T
	rules resumeRules
	seen  map[resumeWorld]bool
	path  []string
	ends  int
	mixed int // ends at which some operation ended well and another did not
}

func (m *resumeModel) fail(w resumeWorld, format string, args ...any) {
	m.t.Helper()
	m.t.Fatalf("%s\nrules %+v, after\n    %s\n%+v", fmt.Sprintf(format, args...), m.rules,
		strings.Join(m.path, "\n    "), w.ranks[:m.rules.n])
}

// all reports whether every member of epoch has come to op.
func (w *resumeWorld) all(epoch uint8, of *[resumeRanks]uint8, op uint8) bool {
	for r := range resumeRanks {
		if w.members[epoch]>>r&1 != 0 && of[r] < op {
			return false
		}
	}
	return true
}

func (w *resumeWorld) change() {
	w.epoch++
	for r := range resumeRanks {
		if w.members[w.epoch-1]>>r&1 != 0 && !w.ranks[r].dead {
			w.members[w.epoch] |= 1 << r
		}
	}
}

// end gives the outcome of the operation at hand to the program.
func (m *resumeModel) end(w *resumeWorld, r int, outcome uint8) {
	p := &w.ranks[r]
	p.at.over++
	p.at.has, p.at.intact, p.begun = false, p.at.given == 0, false
	if p.at.given > 0 {
		p.at.given--
	}
	if int(p.at.over) <= resumeOps {
		p.outcome[p.at.over] = outcome
		if p.told[p.at.over] {
			p.outcome[p.at.over] = failed
		}
	}
}

func (m *resumeModel) visit(w resumeWorld) {
	if m.seen[w] {
		return
	}
	m.seen[w] = true
	m.check(w)
	moved := false
	try := func(what string, act func(w *resumeWorld)) {
		next := w
		m.path = append(m.path, what)
		act(&next)
		m.visit(next)
		m.path = m.path[:len(m.path)-1]
		moved = true
	}
	for r := range m.rules.n {
		p := &w.ranks[r]
		if p.dead || w.members[w.epoch]>>r&1 == 0 {
			continue
		}
		say := func(format string, args ...any) string { return fmt.Sprintf("%d: ", r) + fmt.Sprintf(format, args...) }
		k := p.at.over + 1
		if p.epoch < w.epoch {
			try(say("enter epoch %d", w.epoch), func(w *resumeWorld) {
				q := &w.ranks[r]
				q.epoch, q.ready, q.begun = w.epoch, false, false
				w.posted[w.epoch] |= 1 << r
				w.sent[w.epoch][r] = q.at
			})
		}
		switch e := p.epoch; {
		case e == 0:
		case !p.ready:
			if w.posted[e] == w.members[e] {
				try(say("complete the exchange of epoch %d", e), func(w *resumeWorld) { m.apply(w, r) })
			}
		case p.at.has: // waits for the others
			if w.all(e, &w.has[e], k) {
				try(say("confirm %d", k), func(w *resumeWorld) { m.end(w, r, e) })
			}
		case p.begun:
			if w.all(e, &w.began[e], k) || m.rules.early && r == 0 {
				try(say("result of %d", k), func(w *resumeWorld) {
					if w.has[e][r] = k; m.rules.uniform {
						w.ranks[r].at.has = true
					} else {
						m.end(w, r, e)
					}
				})
			}
		case int(k) <= m.rules.ops && p.at.intact:
			try(say("begin %d in epoch %d", k, e), func(w *resumeWorld) {
				q := &w.ranks[r]
				q.begun, q.at.intact, q.ranIn[k] = true, m.rules.retry, e
				w.began[e][r] = k
			})
		}
		if m.rules.giveUp && !w.gaveUp && p.ready && p.epoch == w.epoch && p.begun {
			try(say("give up %d", k), func(w *resumeWorld) {
				q := &w.ranks[r]
				w.gaveUp, q.begun, q.at.has, q.at.intact, q.told[k] = true, false, false, false, true
				w.change() // and there is another view
			})
		}
		if gaveUp := p.told[min(k, resumeOps)] && !p.at.intact; gaveUp && m.rules.again && !w.again &&
			int(k) < m.rules.ops {
			try(say("give up %d", k+1), func(w *resumeWorld) {
				q := &w.ranks[r]
				q.at.given, q.told[k+1] = 1, true
				w.again = true
				w.change()
			})
		}
		if w.kills > 0 && w.epoch < resumeEpochs {
			try(say("dies"), func(w *resumeWorld) { w.kills--; w.ranks[r].dead = true; w.change() })
		}
	}
	if m.rules.joins && !w.joined {
		try("the last rank comes in", func(w *resumeWorld) {
			w.joined = true
			w.change()
			w.members[w.epoch] |= 1 << m.rules.n
			w.ranks[m.rules.n] = resumeRank{at: small{joins: true, intact: true}}
			m.rules.n++
		})
		m.rules.n--
	}
	if !moved {
		m.ends++
		good, bad := false, false
		for r := range m.rules.n {
			p := w.ranks[r]
			if p.dead {
				continue
			}
			if int(p.at.over) < m.rules.ops {
				m.fail(w, "rank %d waits for ever, after operation %d", r, p.at.over)
			}
			for _, o := range p.outcome[1:] {
				good, bad = good || o != 0 && o != failed, bad || o == failed
			}
		}
		if good && bad {
			m.mixed++
		}
	}
}

// apply does what a driver does with what Resume says.
func (m *resumeModel) apply(w *resumeWorld, r int) {
	p := &w.ranks[r]
	var all []Standing
	for i := range resumeRanks {
		if w.members[p.epoch]>>((i+r)%resumeRanks)&1 != 0 {
			all = append(all, w.sent[p.epoch][(i+r)%resumeRanks].standing())
		}
	}
	late := p.at.given > w.sent[p.epoch][r].given // it gave up another one since, and has to enter a later exchange
	start, confirmed := Resume(all)
	if confirmed >= start {
		m.fail(*w, "rank %d: %d is confirmed, and is to run", r, confirmed)
	}
	if p.at.joins {
		p.at.over = uint8(start - 1)
	} else if uint64(p.at.over)+1 > start {
		m.fail(*w, "rank %d is past %d, with which epoch %d begins", r, start, p.epoch)
	}
	for uint64(p.at.over)+1 < start {
		if k := p.at.over + 1; uint64(k) <= confirmed && p.at.has {
			m.end(w, r, p.ranIn[k])
		} else {
			m.end(w, r, failed)
		}
	}
	if !p.at.intact && !late {
		m.fail(*w, "rank %d is to run %d, and cannot", r, start)
	}
	p.ready, p.at.has, p.at.joins = true, false, false
	p.at.epoch, p.at.start, p.at.confirmed = p.epoch, uint8(start), uint8(confirmed)
}

func (m *resumeModel) check(w resumeWorld) {
	for k := 1; k <= resumeOps; k++ {
		for r := range m.rules.n {
			p := w.ranks[r]
			if p.dead {
				continue
			}
			for s := range r {
				q := w.ranks[s]
				if q.dead || p.outcome[k] == 0 || q.outcome[k] == 0 {
					continue
				}
				pOK, qOK := p.outcome[k] != failed, q.outcome[k] != failed
				if pOK && qOK && p.outcome[k] != q.outcome[k] {
					m.fail(w, "operation %d ended in epoch %d at rank %d, and in epoch %d at rank %d", k, p.outcome[k],
						r, q.outcome[k], s)
				}
				if m.rules.uniform && pOK != qOK && !p.told[k] && !q.told[k] {
					m.fail(w, "of operation %d rank %d has a result, or rank %d, and not both", k, r, s)
				}
			}
			for s := range m.rules.n { // a rank with the result knows that it is not run again
				if q := w.ranks[s]; !q.dead && p.outcome[k] != 0 && p.outcome[k] != failed &&
					q.ranIn[k] > p.outcome[k] {
					m.fail(w, "operation %d ended in epoch %d at rank %d, and rank %d runs it in epoch %d", k,
						p.outcome[k], r, s, q.ranIn[k])
				}
			}
		}
	}
}

func TestResumeModel(t *testing.T) {
	states := 0
	for _, n := range []int{2, 3} {
		for bits := range 64 {
			rules := resumeRules{uniform: bits&1 != 0, retry: bits&2 != 0, early: bits&4 != 0, giveUp: bits&8 != 0,
				joins: bits&16 != 0, again: bits&32 != 0, n: n, kills: n - 1, ops: 5 - n}
			switch {
			case rules.again && !rules.giveUp:
				continue
			case rules.giveUp && rules.joins, n == 3 && rules.joins, n == 3 && rules.giveUp &&
				(rules.early || rules.retry || !rules.uniform), (testing.Short() || raceEnabled) &&
				(n == 3 && !rules.giveUp || rules.joins):
				continue // too many for every day; they hold as well
			case n == 3 && rules.giveUp:
				rules.kills = 1
			case rules.joins:
				rules.ops = 2
			}
			m := &resumeModel{t: t, rules: rules, seen: map[resumeWorld]bool{}}
			w := resumeWorld{epoch: 1, kills: int8(rules.kills)}
			for r := range n {
				w.members[1] |= 1 << r
				w.ranks[r].at.intact = true
			}
			m.visit(w)
			if m.ends == 0 || m.mixed == 0 && !rules.retry {
				t.Errorf("%+v: %d ends, %d of them with results and errors", rules, m.ends, m.mixed)
			}
			states += len(m.seen)
			if testing.Verbose() {
				t.Logf("%+v: %d states", rules, len(m.seen))
			}
		}
	}
	t.Logf("%d states", states)
}

func TestResumeExamples(t *testing.T) {
	for _, c := range []struct {
		name             string
		standings        []Standing
		start, confirmed uint64
	}{
		{"the job begins", []Standing{{Intact: true}, {Intact: true}}, 1, 0},
		{"no rank", nil, 1, 0},
		{"all retry", []Standing{{Over: 6, Intact: true}, {Over: 6, Intact: true}}, 7, 6},
		{"one cannot", []Standing{{Over: 6, Intact: true}, {Over: 6}}, 8, 6},
		{"one is ahead", []Standing{{Over: 6, Intact: true}, {Over: 7, Intact: true}}, 8, 7},
		{"one gave up what another knows that all had", []Standing{{Over: 6}, {Over: 6, Has: true},
			{Over: 7, Intact: true}}, 8, 7},
		{"all have it", []Standing{{Over: 6, Has: true}, {Over: 6, Has: true}}, 8, 7},
		{"one was told that all have it", []Standing{{Over: 6, Has: true}, {Over: 7, Intact: true}}, 8, 7},
		{"not all have it, and it can be run again", []Standing{{Over: 6, Has: true, Intact: true},
			{Over: 6, Intact: true}}, 7, 6},
		{"not all have it, and it cannot", []Standing{{Over: 6, Has: true}, {Over: 6, Intact: true}}, 8, 6},
		{"a joiner has no say", []Standing{{Over: 6, Intact: true}, {Joins: true}}, 7, 6},
		{"only joiners", []Standing{{Joins: true}, {Joins: true, Intact: true}}, 1, 0},
		{"the later of two exchanges in one view counts",
			[]Standing{{Over: 3, Intact: true, Last: Outcome{At: Point{7, 1 << 40}, Start: 4}},
				{Over: 9, Intact: true, Last: Outcome{At: Point{7, 1<<40 + 1}, Start: 10}}}, 10, 0},
		{"one did not hear what was settled", []Standing{{Over: 3, Has: true,
			Last: Outcome{At: Point{View: 1}, Start: 1}},
			{Over: 5, Last: Outcome{At: Point{View: 2}, Start: 5, Confirmed: 4}}}, 7, 4},
		{"one did not hear what was settled, and gave up what it began with", []Standing{{Over: 6, Intact: true},
			{Over: 5, Intact: true, Last: Outcome{At: Point{View: 1, Attempt: 1}, Start: 6, Confirmed: 5}}}, 7, 5},
	} {
		if start, confirmed := Resume(c.standings); start != c.start || confirmed != c.confirmed {
			t.Errorf("%s: got %d, %d; want %d, %d", c.name, start, confirmed, c.start, c.confirmed)
		}
	}
}
