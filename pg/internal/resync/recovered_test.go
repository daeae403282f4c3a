package resync

import (
	"math"
	"math/rand/v2"
	"slices"
	"testing"
)

// meet has ranks 0, 1, ... complete another exchange with these standings.
func meet(ranks []*Machine, mine ...Standing) {
	told := make([]Told, len(ranks))
	for r, m := range ranks {
		told[r], _ = m.Enter(true, false, mine[r])
	}
	for _, m := range ranks {
		for slot, t := range told {
			m.Hear(slot, t)
		}
	}
}

// afterFailure makes ranks, which get an error of operation 1 and begin with operation 2.
func afterFailure(n int) (ranks []*Machine) {
	v := View{Epoch: 1}
	for r := range n {
		v.Members = append(v.Members, r)
	}
	for r := range n {
		ranks = append(ranks, New(r, v))
	}
	meet(ranks, make([]Standing, n)...)
	return ranks
}

func checkRecovered(t *testing.T, m *Machine, seq, want uint64) {
	t.Helper()
	if got := m.Recovered(seq); got != want {
		t.Errorf("rank %d: Recover after operation %d ends with %d, want %d", m.self, seq, got, want)
	}
}

// A rank whose group has failed again, after a Recover in the same view, answers another rank that
// waits for it: that one has to learn of the new failure. It answers once, until its program calls
// Recover.
func TestFailedAgainAfterRecover(t *testing.T) {
	ranks := afterFailure(2)
	failed := Standing{Over: 1, Intact: true, Failed: true, Calls: true}
	meet(ranks, failed, failed)
	checkRecovered(t, ranks[0], 1, 1)
	checkRecovered(t, ranks[1], 1, 1)
	waits, _ := ranks[1].Enter(true, false, Standing{Over: 1, Intact: true})
	ranks[0].Hear(1, waits)
	if !ranks[0].Asked(true) {
		t.Fatal("the rank does not answer")
	}
	if _, complete := ranks[0].Enter(false, true, Standing{Over: 2, Failed: true}); !complete {
		t.Error("its answer does not complete the exchange")
	}
	waits, _ = ranks[1].Enter(true, false, Standing{Over: 2, Intact: true})
	if ranks[0].Hear(1, waits); ranks[0].Asked(true) {
		t.Error("it answers again before its program has called Recover")
	}
}

// A rank calls Recover twice between two operations, because of something else than an operation.
// The second call is none that the others have made: it ends with the beginning of the view, so
// that no rank is always one call behind.
func TestSecondRecoverOfOneRank(t *testing.T) {
	ranks := afterFailure(3)
	checkRecovered(t, ranks[0], 1, 1)
	checkRecovered(t, ranks[1], 1, 1)
	late := Standing{Over: 1, Intact: true, Calls: true}
	meet(ranks, Standing{Over: 1, Calls: true}, late, late)
	if ranks[0].Fresh(2) || ranks[1].Fresh(1) || !ranks[2].Fresh(1) {
		t.Errorf("the calls can end: %v at rank 0, %v at rank 1, %v at rank 2, want only the last", ranks[0].Fresh(2),
			ranks[1].Fresh(1), ranks[2].Fresh(1))
	}
	checkRecovered(t, ranks[2], 1, 1)
	meet(ranks, Standing{Over: 2, Intact: true, Calls: true}, late, late)
	checkRecovered(t, ranks[0], 2, 2)
	checkRecovered(t, ranks[1], 1, 2)
	checkRecovered(t, ranks[2], 1, 2)
}

// What a lost rank has told of its Recover counts at all ranks, or at none.
func TestStopOfLostRank(t *testing.T) {
	ranks := afterFailure(3)
	checkRecovered(t, ranks[0], 1, 1)
	calls := Standing{Over: 1, Intact: true, Calls: true}
	first, _ := ranks[0].Enter(true, false, Standing{Over: 1, Calls: true}) // it has given operation 2 up
	for _, m := range ranks[1:] {
		m.Enter(true, false, calls)
	}
	ranks[1].Hear(0, first)
	ranks[1].Hear(2, Told{At: first.At, Standing: calls}) // rank 2 hears neither
	for _, m := range ranks[1:] {
		m.See(View{Epoch: 2, Members: []int{1, 2}})
	}
	one, _ := ranks[1].Enter(false, false, calls)
	two, _ := ranks[2].Enter(false, false, calls)
	ranks[1].Hear(2, two)
	ranks[2].Hear(1, one)
	for _, m := range ranks[1:] {
		if o, _ := m.Outcome(); o.At != one.At || o.Start != 3 {
			t.Errorf("rank %d: outcome %+v", m.self, o)
		}
		checkRecovered(t, m, 1, 1)
	}
}

// An operation counts as a call of Recover: a rank that is about to begin one joins a member which
// is in Recover in a later exchange, unless it can have what it needs of that member where it is.
func TestOperationMeetsRecover(t *testing.T) {
	for _, c := range []struct {
		mine    Standing
		awaited bool
	}{
		{Standing{Over: 1, Intact: true, Calls: true}, true},
		{Standing{Over: 2, Intact: true, Calls: true}, false}, // it has run operation 2
		{Standing{Over: 1, Calls: true}, false},               // it has given operation 2 up
		{Standing{Over: 1, Intact: true, Calls: true, Failed: true}, false},
		{Standing{Over: 1, Intact: true}, false}, // Due says so
	} {
		ranks := afterFailure(2)
		told, _ := ranks[0].Enter(true, false, c.mine)
		m := ranks[1]
		m.Hear(0, told)
		if m.Awaited(1) != c.awaited || m.Awaited(0) || m.Fresh(1) == c.mine.Calls {
			t.Errorf("%+v: awaited before operation 2: %v, before operation 1: %v; fresh: %v", c.mine, m.Awaited(1),
				m.Awaited(0), m.Fresh(1))
		}
		if !c.awaited {
			continue
		}
		if told, complete := m.Enter(true, false, m.Between(1)); !complete || told.At != ranks[0].At() || m.Awaited(1) {
			t.Errorf("%+v: entered %v, complete %v, awaited %v", c.mine, told.At, complete, m.Awaited(1))
		}
	}
}

// An exchange in which all call Recover, and some of them earlier than others, serves for nothing
// else than the end of the earlier calls.
func TestUnevenExchange(t *testing.T) {
	ranks := afterFailure(3)
	checkRecovered(t, ranks[0], 1, 1)
	late := Standing{Over: 1, Intact: true, Calls: true}
	meet(ranks, Standing{Over: 1, Calls: true}, late, late)
	if ranks[0].Fresh(2) || !ranks[1].Fresh(1) {
		t.Errorf("fresh after operation 2: %v, after operation 1: %v", ranks[0].Fresh(2), ranks[1].Fresh(1))
	}
	checkRecovered(t, ranks[1], 1, 1)
	checkRecovered(t, ranks[2], 1, 1)
	if m := ranks[1]; m.Fresh(2) || m.Awaited(1) || !m.Awaited(2) {
		t.Errorf("fresh after operation 2: %v; awaited before it: %v, after it: %v", m.Fresh(2), m.Awaited(1),
			m.Awaited(2))
	}
	again := Standing{Over: 2, Intact: true, Calls: true}
	meet(ranks, again, again, Standing{Over: 2, Intact: true}) // rank 2 calls operation 3
	for _, m := range ranks {
		if !m.Fresh(2) || m.Awaited(2) {
			t.Errorf("rank %d: fresh %v, awaited %v", m.self, m.Fresh(2), m.Awaited(2))
		}
		checkRecovered(t, m, 2, 2)
	}
}

// An operation that is given up, and which an exchange has ended, is over.
func TestGivenUpOperationThatIsOver(t *testing.T) {
	ranks := afterFailure(2)
	meet(ranks, Standing{Over: 1}, Standing{Over: 1, Intact: true})
	m := ranks[1]
	m.GiveUp(2, true)
	if s := m.Between(2); s.Over != 2 || !s.Intact || m.Due(false) {
		t.Errorf("standing %+v, due %v", s, m.Due(false))
	}
}

func TestStops(t *testing.T) {
	by := rand.New(rand.NewPCG(1, 2))
	for range 10_000 {
		var s, o Stops
		var all []uint64
		for i := range o {
			o[i] = by.Uint64N(8)
			all = append(all, o[i])
		}
		for range by.IntN(3) {
			n := by.Uint64N(8)
			s.add(n)
			all = append(all, n)
		}
		s.merge(o)
		slices.Sort(all)
		all = slices.DeleteFunc(slices.Compact(all), func(n uint64) bool { return n == 0 })
		all = all[:min(len(all), len(s))]
		past := by.Uint64N(8)
		rest := slices.DeleteFunc(slices.Clone(all), func(n uint64) bool { return n <= past })
		next := uint64(math.MaxUint64)
		if len(rest) > 0 {
			next = rest[0]
		}
		kept := s
		kept.forget(past)
		var want, left Stops
		copy(want[:], all)
		copy(left[:], rest)
		if s != want || kept != left || s.after(past) != next {
			t.Fatalf("stops %v, want %v; after %d: %v, want %v; the first: %d, want %d", s, want, past, kept, left,
				s.after(past), next)
		}
	}
}
