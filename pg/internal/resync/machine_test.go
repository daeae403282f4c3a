package resync

import (
	"bytes"
	"encoding/binary"
	"flag"
	"fmt"
	"hash/maphash"
	"maps"
	"math/rand/v2"
	"os"
	"runtime"
	"runtime/debug"
	"slices"
	"strings"
	"testing"
	"time"
)

// The model: three ranks run operations, each of which succeeds at a rank when all members of its
// exchange's view have begun it there. Ranks die, or give an operation up, at any step. Views and
// notices are delayed arbitrarily, notices between two ranks in order. A program whose group has
// failed calls Recover and continues. All states are visited; a hash of 64 bits stands for each.
const (
	modelRanks = 3
	modelOps   = 2
	manyOps    = 4 // the most
)

// The models are deep recursions that leave much garbage: each stack would be a bucket of the
// profile of memory.
func TestMain(m *testing.M) {
	runtime.MemProfileRate = 0
	debug.SetGCPercent(400)
	os.Exit(m.Run())
}

var deep = flag.Bool("resync.deep", false, "explore two failures as well: minutes")

type modelRules struct {
	report, retry, uniform bool
	deaths, gives          int
	ops                    uint64
	early                  bool // the operation ends at rank 0 alone, as a broadcast does at its root
	recovers               bool // programs call Recover after the first operation, whatever became of it
	each                   bool // programs call Recover after each operation that has failed
	lost                   bool // a fourth rank was lost in the first operation, and the exchange after it is complete
	goesOn                 bool // a rank that gives up does not fail the group
	mixed                  bool // with goesOn, it may do so
	agrees                 bool // with each, programs agree on the outcome of each operation first
	batches                bool // a rank may hear several notices before it looks
	one                    bool // only the last rank gives up, and only between operations or in exchanges
}

// modelMove is a call of Group.move.
type modelMove struct {
	on, renew, entered bool
	mine               Standing
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
	aborts  bool  // it has told that it has failed in this channel
	broken  bool  // the channel: a rank has failed in it
	hard    bool  // and its group with it
	ended   Point // the latest channel of which this rank was told that
	endHard bool
	entered bool // an exchange, since it concludes an operation
	move    modelMove
	given   bool // it has given up the exchange that it is in
	fails   bool // and its group has failed with that
	has     bool // the result of the operation that ran is here, unconfirmed
	rough   bool
	failed  bool
	told    bool              // to its program
	called  bool              // Recover
	erred   bool              // the latest operation has failed, and its program has not called Recover since
	calls   uint64            // operations that its program has called
	ends    [manyOps + 1]int8 // of these: 1 well, 2 with an error
	outcome [manyOps + 1]int8 // 1 well, -1 failed, 2 given up
}

// aligned reports whether all programs make the same calls, so that what a program calls in one
// place has the same number at all ranks where it runs.
func (rules modelRules) aligned() bool { return rules.recovers || rules.each }

// channel is what became of the operations of one exchange.
type channel struct {
	begun, left, had [modelRanks]uint64 // left: the last operation that the rank runs in it, plus one
}

// message is a standing, or that an operation has failed at a rank whose channel is at Told.At.
type message struct {
	Told
	abort bool
	hard  bool // the group has failed with it
}

type modelWorld struct {
	rules modelRules
	ranks [modelRanks]modelRank
	view  View
	wires [modelRanks][modelRanks][]message // from, to
	chans map[Point]*channel
	votes [manyOps + 1]int8   // by the place in the programs, what they have agreed on an operation: as modelRank.ends
	ran   [manyOps + 1]uint64 // by the place in the programs, the number with which an operation has run; 0: it has not
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
	f.put(s.Over, s.Given, s.Since)
	f.put(s.Stops[:]...)
	f.flags(s.Has, s.Intact, s.Joins, s.Failed, s.Calls)
	f.outcome(s.Last)
}

func (f *fingerprint) machine(m *Machine) {
	f.view(m.now)
	f.put(m.at.View, m.at.Attempt)
	f.view(m.in)
	f.standing(m.mine)
	f.flags(m.pending, m.failed, m.uneven)
	f.put(m.gave, m.upTo, m.since)
	f.put(m.stops[:]...)
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

// key identifies the state. f is memory that may be used.
func (w *modelWorld) key(f fingerprint) fingerprint {
	for r := range w.ranks {
		p := &w.ranks[r]
		f.machine(p.m)
		f.flags(p.alive, p.aborts, p.broken, p.hard, p.endHard, p.entered, p.has, p.rough, p.failed, p.told, p.called,
			p.erred, p.move.on, p.move.renew, p.move.entered, p.given, p.fails)
		f.standing(p.move.mine)
		f.put(uint64(p.doing), p.seq, p.calls, p.ended.View, p.ended.Attempt)
		for _, o := range p.outcome {
			f.put(uint64(uint8(o)))
		}
		for _, wire := range w.wires[r] {
			f.put(uint64(len(wire)))
			for _, m := range wire {
				f.put(m.At.View, m.At.Attempt)
				f.standing(m.Standing)
				f.flags(m.abort, m.hard)
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
	f.put(w.ran[:]...)
	for _, vote := range w.votes {
		f.put(uint64(vote))
	}
	for r := range w.ranks {
		for _, o := range w.ranks[r].ends {
			f.put(uint64(o))
		}
	}
	f.put(uint64(w.rules.deaths), uint64(w.rules.gives))
	return f
}

func (w *modelWorld) channel(p Point) *channel {
	if w.chans[p] == nil {
		w.chans[p] = &channel{}
	}
	return w.chans[p]
}

// standing, change, settled, answer and the rest are the driver's, as in package pg.
func (p *modelRank) standing() Standing {
	s := p.m.Between(p.seq)
	s.Failed = p.failed
	return s
}

func (w *modelWorld) change(r int, mine Standing, renew, passive bool) {
	p := &w.ranks[r]
	w.channel(p.m.at).left[r] = mine.Over + 1
	mine.Failed, p.given = p.failed, false
	tell, complete := p.m.Enter(renew, passive, mine)
	for _, s := range p.m.In().Members {
		if s != r && w.ranks[s].alive {
			w.wires[r][s] = append(w.wires[r][s], message{Told: tell})
		}
	}
	p.entered = p.doing == concluding
	p.broken = p.ended == p.m.at
	p.hard = p.broken && p.endHard
	if p.rough, p.aborts = true, false; complete {
		w.settled(r)
	}
}

func (w *modelWorld) settled(r int) {
	p := &w.ranks[r]
	o, failed := p.m.Outcome()
	p.failed, p.rough = failed || p.failed && p.seq >= o.Start, true
	if p.given && p.seq >= o.Start {
		w.abort(r, p.fails)
	}
	p.given = false
}

// look has rank r go on after what it has heard; if it may hear more first, only if that is now.
func (w *modelWorld) look(r int, now bool) {
	if now || !w.rules.batches {
		w.answer(r)
		w.advance(r)
	}
}

// inspect fails the group where it has to fail between two operations.
func (w *modelWorld) inspect(r int) {
	p := &w.ranks[r]
	if p.hard && p.m.Began(p.seq) || w.rules.report && p.m.Lost() {
		w.fail(r)
	}
}

func (w *modelWorld) fail(r int) {
	w.ranks[r].failed = true
	w.abort(r, true)
}

// abort ends the channel, and tells the others. hard: the group has failed with it.
func (w *modelWorld) abort(r int, hard bool) {
	p := &w.ranks[r]
	p.hard = p.hard || !p.broken && hard
	if p.broken = true; p.aborts {
		return
	}
	p.aborts = true
	for _, s := range p.m.In().Members {
		if s != r && w.ranks[s].alive {
			w.wires[r][s] = append(w.wires[r][s], message{Told{At: p.m.at}, true, p.hard})
		}
	}
}

func (w *modelWorld) answer(r int) {
	p := &w.ranks[r]
	if p.doing != idle || !p.m.Asked(p.failed) {
		return
	}
	w.inspect(r)
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
	if int(p.seq) <= manyOps {
		p.outcome[p.seq] = outcome
	}
	p.doing, p.has, p.erred, p.move = idle, false, outcome != 1, modelMove{}
	switch {
	case !w.rules.each:
	case p.erred:
		p.ends[p.calls] = 2
	default:
		p.ends[p.calls] = 1
	}
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

// sets begins a move.
func (p *modelRank) sets(mine Standing, renew bool) {
	p.move = modelMove{on: true, mine: mine, renew: renew && !p.m.Pending()}
}

// arrives continues the move of rank r. It returns true when the move has ended.
func (w *modelWorld) arrives(r int) bool {
	p := &w.ranks[r]
	for at := &p.move; ; {
		switch due := p.m.Due(at.renew); {
		case at.entered && !p.m.Pending():
			p.move = modelMove{}
			return true
		case p.m.Behind():
			return false
		case due:
			w.change(r, at.mine, at.renew, false)
			at.renew, at.entered = false, true
		case !p.m.Pending():
			p.move = modelMove{}
			return true
		default:
			return false
		}
	}
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
						if t.At == q.m.at && !q.broken {
							q.broken, q.hard = true, t.hard
						}
						if q.ended.Before(t.At) {
							q.ended, q.endHard = t.At, t.hard
						}
						return
					} else if q.m.Hear(s, t.Told) {
						w.settled(r)
					}
					w.ranks[r].rough = true
					w.look(r, false)
				})
			}
		}
		if w.rules.batches && p.doing != running {
			next := w.clone()
			if next.look(r, true); !bytes.Equal(next.key(nil), w.key(nil)) {
				try(say("looks what it has heard"), func(w *modelWorld) { w.look(r, true) })
			}
		}
		if w.gives(r) && w.rules.goesOn && p.doing != running && p.doing != recovering &&
			(p.doing != idle || w.more(p) && !w.recovers(p)) {
			giveUp := func(fails bool) func(w *modelWorld) {
				return func(w *modelWorld) {
					q := &w.ranks[r]
					w.rules.gives--
					if q.doing == idle {
						w.counts(q)
					}
					if q.m.Pending() {
						q.given, q.fails = true, fails
					} else {
						w.abort(r, fails)
					}
					if fails {
						q.failed, q.told = true, true
					}
					if q.rough = true; q.doing != concluding {
						q.seq++
					}
					q.m.GiveUp(q.seq, w.rules.uniform)
					w.end(r, 2)
				}
			}
			try(say("gives up what has not begun, or in an exchange"), giveUp(false))
			if w.rules.mixed {
				try(say("gives that up, and fails"), giveUp(true))
			}
		}
		switch p.doing {
		case idle:
			switch {
			case w.recovers(p):
				try(say("calls Recover"), func(w *modelWorld) {
					q := &w.ranks[r]
					q.doing, q.called = recovering, true
					w.votes[q.calls] = 2
					w.inspect(r)
					if q.failed && q.m.Stopped(q.seq) {
						w.recovered(r)
						return
					}
					mine := q.standing()
					mine.Calls = true
					q.sets(mine, q.failed || !q.m.Fresh(q.seq))
					w.advance(r)
				})
			case w.more(p):
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

// more reports whether the program of p has more operations to call.
func (w *modelWorld) more(p *modelRank) bool {
	switch {
	case w.rules.agrees && (!w.agreed(p) || !p.called && w.erred(p)):
		return false
	case w.rules.aligned():
		return p.calls < w.rules.ops
	}
	return p.seq < w.rules.ops
}

// recovers reports whether the program of p calls Recover next.
func (w *modelWorld) recovers(p *modelRank) bool {
	if w.rules.agrees {
		return w.agreed(p) && !p.called && w.erred(p)
	}
	return p.failed && p.told || w.rules.recovers && p.calls == 1 && !p.called || w.rules.each && p.erred
}

// agreed reports whether the ranks that live have all ended the latest operation of the program of
// p, so that the programs know what has become of it.
func (w *modelWorld) agreed(p *modelRank) bool {
	return p.calls == 0 || !slices.ContainsFunc(w.ranks[:], func(q modelRank) bool {
		return q.alive && (q.calls < p.calls || q.calls == p.calls && q.ends[p.calls] == 0)
	})
}

// erred reports whether the latest operation of the program of p has failed, as the programs agree.
func (w *modelWorld) erred(p *modelRank) bool {
	if vote := w.votes[p.calls]; vote != 0 {
		return vote == 2
	}
	return slices.ContainsFunc(w.ranks[:], func(q modelRank) bool { return q.alive && q.ends[p.calls] == 2 })
}

// counts counts an operation that the program of p calls.
func (w *modelWorld) counts(p *modelRank) {
	if w.rules.aligned() {
		if w.votes[p.calls] == 0 {
			w.votes[p.calls] = 1
		}
		p.calls++
		p.called = p.called && !w.rules.agrees
	}
}

// gives reports whether rank r may give up.
func (w *modelWorld) gives(r int) bool {
	return w.rules.gives > 0 && (r == modelRanks-1 || !w.rules.one)
}

// call begins the next operation.
func (w *modelWorld) call(r int) {
	p := &w.ranks[r]
	w.counts(p)
	switch {
	case p.failed:
		w.refuse(r)
		return
	case p.hard, // the operation finds it
		w.rules.report && p.m.Lost():
		w.fail(r)
		p.seq, p.told = p.seq+1, true
		p.m.GiveUp(p.seq, w.rules.uniform)
		w.end(r, -1)
		return
	}
	p.doing = entering
	w.advance(r)
}

// meets checks that no rank continues after an exchange in which all have called Recover before the
// programs of the others have come to its call.
func (w *modelWorld) meets(r int) {
	p := &w.ranks[r]
	for _, s := range p.m.got {
		if !s.Calls || !w.rules.each || p.seq+1 < p.m.last.Start {
			return
		}
	}
	for _, s := range p.m.In().Members {
		if q := &w.ranks[s]; q.alive && q.calls < p.calls {
			panic(fmt.Sprintf("rank %d, after operation %d, continues with rank %d, which is after operation %d",
				r, p.calls, s, q.calls))
		}
	}
}

// refuse ends an operation because the group has failed.
func (w *modelWorld) refuse(r int) {
	p := &w.ranks[r]
	p.seq, p.told = p.seq+1, true
	p.m.GiveUp(p.seq, w.rules.uniform)
	w.end(r, 2)
}

// advance continues what rank r waits for between operations.
func (w *modelWorld) advance(r int) {
	p := &w.ranks[r]
	switch p.doing {
	case entering:
		for {
			switch {
			case p.move.on && !w.arrives(r):
				return
			case p.failed:
				w.refuse(r)
				return
			}
			if o, _ := p.m.Outcome(); p.hard && p.seq+1 >= o.Start || w.rules.report && p.m.Lost() {
				w.fail(r)
				p.seq, p.told = p.seq+1, true
				p.m.GiveUp(p.seq, w.rules.uniform)
				w.end(r, 2)
				return
			}
			renew := p.broken || p.m.Awaited(p.seq)
			if !p.m.Pending() && !p.m.Behind() && !p.m.Due(renew) {
				break
			}
			p.sets(p.standing(), renew)
		}
		o, _ := p.m.Outcome()
		switch {
		case p.failed:
			w.refuse(r)
		case p.seq+1 < o.Start: // skipped
			p.seq++
			w.end(r, -1)
		default:
			p.seq++
			p.doing, p.rough = running, false
			for s, t := range p.m.got {
				if t.Failed && !p.m.mine.Calls && !t.over(p.m.missed) {
					panic(fmt.Sprintf("rank %d goes on though the group of rank %d has failed", r, s))
				}
			}
			w.channel(p.m.at).begun[r] = p.seq
			w.place(p)
		}
	case concluding: // the exchange decides, also if another one is due
		decided := func() bool { return p.entered && !p.m.Pending() }
		if !decided() && !w.moves(r, w.concludes(r), false) && !decided() {
			return
		}
		o, _ := p.m.Outcome()
		switch {
		case p.has && p.seq <= o.Confirmed:
			p.told = false
			w.end(r, 1)
		case p.seq < o.Start || p.failed:
			p.told = p.failed
			w.end(r, -1)
		default:
			p.doing = running
			w.channel(p.m.at).begun[r] = p.seq
		}
	case recovering:
		for {
			if p.move.on {
				if !w.arrives(r) {
					return
				}
				o, failed := p.m.Outcome()
				if !failed && p.seq < o.Start { // else the others have yet to be told
					p.failed = false
					if p.m.Fresh(p.seq) {
						w.recovered(r)
						return
					}
				}
				if p.failed && p.m.Stopped(p.seq) {
					w.recovered(r)
					return
				}
			}
			mine := p.standing()
			mine.Calls = true
			p.sets(mine, true)
		}
	}
}

// recovered ends a call of Recover.
func (w *modelWorld) recovered(r int) {
	p := &w.ranks[r]
	p.told, p.erred, p.doing = false, false, idle
	p.seq = p.m.Recovered(p.seq)
	w.meets(r)
	w.answer(r)
}

// lose has the ranks fail in the first operation, because of a fourth rank.
func (w *modelWorld) lose() {
	with := View{Epoch: 1, Members: []int{0, 1, 2, 3}}
	w.view.Epoch = 2
	for r := range w.ranks {
		p := modelRank{alive: true, m: New(r, with), seq: 1, calls: 1, erred: true, rough: true}
		p.ends[1], p.outcome[1] = 2, -1
		p.m.See(w.view)
		p.m.Enter(false, false, Standing{})
		for s := range w.ranks {
			p.m.Hear(s, Told{At: p.m.at})
		}
		w.ranks[r] = p
	}
}

// apart reports whether an operation has ended well at one rank and with an error at another, after
// which programs that call Recover after errors do not make the same calls. With rules.uniform only
// a rank that gives up an operation which others have the result of can bring that about.
func (w *modelWorld) apart() bool {
	for k := range w.ranks[0].ends {
		var has [3]bool
		for r := range w.ranks {
			has[w.ranks[r].ends[k]] = true
		}
		if w.rules.each && !w.rules.agrees && k > 0 && has[1] && has[2] {
			return true
		}
	}
	return false
}

// place notes with which number an operation of the program of p runs.
func (w *modelWorld) place(p *modelRank) {
	if !w.rules.aligned() {
		return
	}
	if was := w.ran[p.calls]; was != 0 && was != p.seq {
		panic(fmt.Sprintf("the programs' operation %d runs as number %d, and has run as number %d", p.calls, p.seq,
			was))
	}
	w.ran[p.calls] = p.seq
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
	conclude := func(w *modelWorld) {
		if !w.rules.retry && !w.rules.uniform {
			w.end(r, -1)
			return
		}
		w.ranks[r].doing, w.ranks[r].entered = concluding, false
		w.moves(r, w.concludes(r), w.ranks[r].broken)
		w.advance(r)
	}
	if lost && !p.broken {
		try(say("cannot go on"), func(w *modelWorld) {
			q := &w.ranks[r]
			q.rough = true
			dead := func(s int) bool { return !w.ranks[s].alive }
			if w.rules.recovers && !w.rules.goesOn && w.rules.gives == 0 &&
				!slices.ContainsFunc(q.m.In().Members, dead) {
				panic(fmt.Sprintf("operation %d fails at rank %d in a view whose members all live", k, r))
			}
			if w.rules.report {
				w.fail(r)
				q.told = true
			}
			conclude(w)
		})
	}
	giveUp := func(outcome int8, fails bool) func(w *modelWorld) {
		return func(w *modelWorld) {
			q := &w.ranks[r]
			q.rough = true
			if !fails {
				w.abort(r, false)
				conclude(w)
				return
			}
			w.fail(r)
			q.told = true
			q.m.GiveUp(k, w.rules.uniform)
			w.end(r, outcome)
		}
	}
	if p.broken {
		try(say("is told that another has failed"), giveUp(2, p.hard))
	}
	for _, fails := range []bool{false, true} {
		if w.gives(r) && !w.rules.one && (fails != w.rules.goesOn || w.rules.mixed) {
			try(say(fmt.Sprintf("gives up, and fails: %v", fails)), func(w *modelWorld) {
				w.rules.gives--
				giveUp(2, fails)(w)
			})
		}
	}
}

type explorer struct {
	t    *testing.T
	seed maphash.Seed
	seen map[uint64]bool // by the hashes of keys
	buf  fingerprint
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
	e.buf = w.key(e.buf[:0])
	key := maphash.Bytes(e.seed, e.buf)
	if e.seen[key] {
		return
	}
	e.seen[key] = true
	e.check(w)
	if w.apart() {
		return
	}
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
		e.end(w)
	}
}

// walk takes steps by chance until there is none.
func (e *explorer) walk(w *modelWorld, by *rand.Rand) {
	defer func() {
		if r := recover(); r != nil {
			e.fail(w, "%v", r)
		}
	}()
	for e.path = e.path[:0]; !w.apart(); {
		e.check(w)
		what, act, n := "", (func(w *modelWorld))(nil), 0
		w.steps(func(s string, f func(w *modelWorld)) {
			if n++; by.IntN(n) == 0 {
				what, act = s, f
			}
		})
		if act == nil {
			e.end(w)
			return
		}
		e.path = append(e.path, what)
		act(w)
	}
}

// end checks the state in which nothing happens any more.
func (e *explorer) end(w *modelWorld) {
	e.ends++
	for r := range w.ranks {
		p := &w.ranks[r]
		if e.calm && slices.Contains(p.outcome[1:w.rules.ops+1], -1) {
			e.fail(w, "rank %d has an operation fail, without a reason", r)
		}
		over := func(s int) bool { // its program has come to its end, and would not be told before its next call
			q := &w.ranks[s]
			return q.alive && q.doing == idle && !w.more(q) && !w.recovers(q) && (!w.rules.agrees || w.agreed(q))
		}
		if p.alive && (p.doing != idle || w.more(p) || w.rules.agrees && !w.agreed(p)) &&
			!(p.doing == recovering && slices.ContainsFunc(p.m.Missing(), over)) {
			e.fail(w, "rank %d waits for ever", r)
		}
	}
}

// attempts bounds the exchanges in a view.
func (rules modelRules) attempts() uint64 {
	if rules.each {
		return 12
	}
	return 4
}

func (e *explorer) check(w *modelWorld) {
	quiet := !w.rules.batches
	for r := range w.ranks {
		p := &w.ranks[r]
		if p.alive && p.m.at.Attempt > w.rules.attempts() {
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

// start returns the first state.
func (rules modelRules) start() *modelWorld {
	w := &modelWorld{rules: rules, view: View{Epoch: 1, Members: []int{0, 1, 2}}, chans: map[Point]*channel{}}
	for r := range w.ranks {
		w.ranks[r] = modelRank{alive: true, m: New(r, w.view)}
	}
	if rules.lost {
		w.lose()
	}
	return w
}

func (rules modelRules) explore(t *testing.T) (states int) {
	w := rules.start()
	e := &explorer{t: t, seed: maphash.MakeSeed(), seen: map[uint64]bool{}, calm: rules.deaths+rules.gives == 0}
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
		rules.goesOn, rules.one, rules.batches = true, !*deep, true
		rules.early, rules.deaths, rules.gives = true, 0, 2
		if !rules.report && (*deep || rules.uniform && !rules.retry) {
			states += rules.explore(t)
		}
	}
	t.Logf("%d states", states)
}

// An exchange is due after an operation was given up, also if the channel is whole.
func TestGivenUpOperationNeedsAnExchange(t *testing.T) {
	m := New(0, View{Epoch: 1, Members: []int{0, 1}})
	m.GiveUp(1, false)
	if s := m.Between(1); m.Due(false) || s.Over != 1 || !s.Intact {
		t.Errorf("an operation that is not uniform: due %v, standing %+v", m.Due(false), s)
	}
	m.GiveUp(2, true)
	m.GiveUp(3, false)
	mine := m.Between(3)
	if !m.Due(false) || mine.Over != 1 || mine.Given != 1 || mine.Intact || mine.Next() != 4 {
		t.Fatalf("two operations are given up: due %v, standing %+v", m.Due(false), mine)
	}
	told, _ := m.Enter(false, false, mine)
	m.GiveUp(4, true) // in the exchange
	m.Hear(1, Told{At: told.At, Standing: Standing{Over: 1, Has: true}})
	o, _ := m.Outcome()
	if s := m.Between(4); o.Start != 4 || o.Confirmed != 1 || !m.Due(false) || s.Over != 3 || s.Given != 0 ||
		s.Next() != 5 {
		t.Fatalf("a third one in the exchange: outcome %+v, due %v, standing %+v", o, m.Due(false), s)
	}
	told, _ = m.Enter(false, false, m.Between(4))
	m.Hear(1, Told{At: told.At, Standing: Standing{Over: 3, Intact: true}})
	if o, _ := m.Outcome(); o.Start != 5 || m.Due(false) || m.Between(4).Over != 4 {
		t.Errorf("all are told: outcome %+v, due %v, standing %+v", o, m.Due(false), m.Between(4))
	}
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

// The time that a rank takes to enter a view is about proportional to the number of members: what
// it does for each standing does not depend on that.
func TestStandingsOfManyMembers(t *testing.T) {
	const few, many = 1 << 10, 1 << 12
	enter := func(members int, passive bool) time.Duration {
		all := View{Epoch: 1}
		for slot := range members {
			all.Members = append(all.Members, slot)
			all.Incarnations = append(all.Incarnations, uint64(slot)+1)
		}
		next := View{Epoch: 2, Members: all.Members[:members-1], Incarnations: all.Incarnations[:members-1]}
		m, began := New(0, all), time.Now()
		m.See(next)
		for _, slot := range next.Members {
			m.Hear(slot, Told{At: Point{View: 2}, Standing: Standing{Intact: true}})
			if passive && m.Asked(false) || !passive && !m.Behind() && m.Due(false) {
				m.Enter(false, passive, m.Between(0))
			}
		}
		took := time.Since(began)
		if o, _ := m.Outcome(); o.At != (Point{View: 2}) || m.Due(false) || m.Asked(false) {
			t.Fatalf("the exchange of view 2 has not ended: %+v", o)
		}
		return took
	}
	for _, passive := range []bool{false, true} {
		least, most := enter(few, passive), enter(many, passive)
		for end := time.Now().Add(20 * time.Second); most > 2*many/few*least; {
			if time.Now().After(end) {
				t.Fatalf("passive %v: %v with %d members, %v with %d", passive, least, few, most, many)
			}
			least, most = min(least, enter(few, passive)), min(most, enter(many, passive))
		}
		t.Logf("passive %v: %v with %d members, %v with %d", passive, least, few, most, many)
	}
}

// What programs call after Recover has the same number at all ranks, however late one of them calls
// it, and no call waits for ever.
func TestRecoverEndsAlike(t *testing.T) {
	for i, rules := range []modelRules{
		{each: true, lost: true, deaths: 1},
		{each: true, lost: true, goesOn: true, one: true, gives: 1, ops: 3},
		{recovers: true, lost: true, goesOn: true, one: true, gives: 1, ops: 3},
		{each: true, agrees: true, lost: true, goesOn: true, mixed: true, gives: 1},
		{each: true, lost: true, gives: 1},
		{recovers: true, goesOn: true, one: true, gives: 2},
		{recovers: true, deaths: 2},
	} {
		if raceEnabled && i > 1 || testing.Short() && i > 3 || !*deep && i > 4 {
			break
		}
		rules.uniform, rules.ops = true, max(rules.ops, modelOps)
		rules.explore(t)
	}
}

// The same with more failures and operations, where chance decides which states are visited.
func TestRecoverEndsAlikeAfterSeveralFailures(t *testing.T) {
	walks := 1000
	switch {
	case raceEnabled:
		walks = 50
	case *deep:
		walks = 300_000
	}
	for _, rules := range []modelRules{
		{each: true, lost: true, deaths: 1, uniform: true},
		{each: true, lost: true, deaths: 1, uniform: true, goesOn: true},
		{each: true, lost: true, uniform: true, goesOn: true},
		{each: true, deaths: 1, uniform: true, retry: true},
		{each: true, deaths: 1, uniform: true, report: true},
		{recovers: true, lost: true, deaths: 1, uniform: true, goesOn: true},
		{recovers: true, lost: true, deaths: 1, early: true, goesOn: true},
		{recovers: true, deaths: 1, retry: true, goesOn: true},
		{each: true, agrees: true, uniform: true},
		{each: true, agrees: true, goesOn: true, mixed: true, uniform: true},
		{each: true, agrees: true, goesOn: true, mixed: true, uniform: true, retry: true, deaths: 1},
		{each: true, agrees: true, goesOn: true, mixed: true},
		{each: true, agrees: true, goesOn: true, mixed: true, retry: true, deaths: 1},
		{each: true, agrees: true, uniform: true, report: true, deaths: 1},
	} {
		rules.gives, rules.ops = 3, manyOps
		e := &explorer{t: t}
		for n := range walks {
			e.walk(rules.start(), rand.New(rand.NewPCG(1, uint64(n))))
		}
		if e.ends == 0 {
			t.Errorf("%+v: nothing ends", rules)
		}
	}
}
