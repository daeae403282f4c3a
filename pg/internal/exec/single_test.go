package exec

import (
	"encoding/binary"
	"testing"

	"tutti/collectives"
)

// A group of ranks that make calls of one kind on plain memory, with the times that each takes.
type trialled struct {
	ranks []trials
	time  func(rank int, single bool) uint32
	seq   uint64
	calls [2]int // by way
}

// call runs one call of size bytes, and reports whether it was a single copy.
func (g *trialled) call(size int) (single bool) {
	g.seq++
	all := make([]byte, descSize*len(g.ranks))
	active := make([]int, len(g.ranks))
	for r := range g.ranks {
		t := &g.ranks[r]
		t.current = nil
		if t.propose(collectives.AllGather, size) {
			all[r*descSize+1] = rather
		}
		t.report(all[r*descSize+56:])
		active[r] = r
	}
	single = all[1]&rather != 0
	for r := range g.ranks {
		t := &g.ranks[r]
		t.learn(all, active)
		t.begin(g.seq, single)
		t.last.took = g.time(r, single)
	}
	if single {
		g.calls[1]++
	} else {
		g.calls[0]++
	}
	return single
}

// TestTrialsFindTheFasterWay: after a trial calls run the faster way, whichever it is, and ranks
// agree on it; now and then they try the other one, ever less often, until that has become faster.
func TestTrialsFindTheFasterWay(t *testing.T) {
	times := [2]uint32{100, 60}
	g := &trialled{ranks: make([]trials, 3), time: func(rank int, single bool) uint32 {
		if single {
			return times[1] + uint32(rank)
		}
		return times[0] + uint32(rank)
	}}
	const size = 300 << 10
	settle := func() {
		for range 2 * mostPause {
			g.call(size)
		}
		g.calls = [2]int{}
		for range 20 * mostPause {
			g.call(size)
		}
	}
	settle()
	if g.calls[0] > g.calls[1]/50 {
		t.Errorf("%d calls through rings and %d single copies, which are faster", g.calls[0], g.calls[1])
	}
	times = [2]uint32{100, 120}
	settle()
	if g.calls[1] == 0 || g.calls[1] > g.calls[0]/50 {
		t.Errorf("%d calls through rings, which are faster, and %d single copies", g.calls[0], g.calls[1])
	}
	times = [2]uint32{100, 500}
	settle()
	if hopeless := g.calls[1]; hopeless == 0 || hopeless > 20*warmCalls/2+warmCalls {
		t.Errorf("%d hopeless single copies in %d calls", hopeless, g.calls[0])
	}
	times = [2]uint32{100, 98} // no difference that counts
	settle()
	if g.calls[1] > g.calls[0]/50 {
		t.Errorf("%d calls through rings, which are as fast, and %d single copies", g.calls[0], g.calls[1])
	}
}

// TestTrialsSurviveColdMemory: a first single copy that is slow, because memory is touched for the
// first time, does not end the trial.
func TestTrialsSurviveColdMemory(t *testing.T) {
	calls := 0
	g := &trialled{ranks: make([]trials, 2), time: func(rank int, single bool) uint32 {
		if calls++; calls <= 4 {
			return uint32(1000 * calls)
		} else if single {
			return 60
		}
		return 100
	}}
	for range 40 {
		g.call(1 << 20)
	}
	if !g.call(1 << 20) {
		t.Error("rings, which are slower")
	}
}

// TestTrialsGoByTheSlowestRank: a way that is faster for one rank only is not taken.
func TestTrialsGoByTheSlowestRank(t *testing.T) {
	g := &trialled{ranks: make([]trials, 2), time: func(rank int, single bool) uint32 {
		switch {
		case rank == 0 && single:
			return 10
		case single:
			return 200
		}
		return 100
	}}
	for range 50 {
		g.call(1 << 20)
	}
	if g.calls[1] > trialCalls/2 {
		t.Errorf("%d single copies, which are slower for rank 1", g.calls[1])
	}
}

// TestTrialsAreOfAClass: what is found for some sizes says nothing about others.
func TestTrialsAreOfAClass(t *testing.T) {
	small := true
	g := &trialled{ranks: make([]trials, 2), time: func(_ int, single bool) uint32 {
		if single == small {
			return 200
		}
		return 100
	}}
	for i := range 100 {
		if small = i%2 == 0; small {
			g.call(100 << 10)
		} else {
			g.call(3 << 20)
		}
	}
	small = true
	if g.call(127 << 10) {
		t.Error("a single copy where rings are faster")
	}
	small = false
	if !g.call(2<<20 + 1) {
		t.Error("rings where a single copy is faster")
	}
}

// TestTrialsIgnoreOtherCalls: times of another call than the last one, and calls that have not
// ended, do not count.
func TestTrialsIgnoreOtherCalls(t *testing.T) {
	var a trials
	all := make([]byte, 2*descSize)
	tell := func(rank int, seq, took uint32) {
		binary.LittleEndian.PutUint32(all[rank*descSize+56:], seq)
		binary.LittleEndian.PutUint32(all[rank*descSize+60:], took)
	}
	for _, c := range []struct {
		seq, took uint32
		counts    bool
	}{{6, 50, false}, {7, 0, false}, {7, 50, true}} {
		a.propose(collectives.AllGather, 1<<20)
		a.begin(7, false)
		a.end()
		at := a.current
		at.restart()
		tell(0, 7, 40)
		tell(1, c.seq, c.took)
		a.learn(all, []int{0, 1})
		if got := at.times[0] == 50.0/(1<<20); got != c.counts {
			t.Errorf("%+v: the time is %v", c, at.times[0])
		}
	}
}

func TestParseSingle(t *testing.T) {
	for s, want := range map[string]Single{"auto": SingleAuto, "on": SingleOn, "off": SingleOff} {
		if got, err := ParseSingle(s); got != want || err != nil {
			t.Errorf("%s: %v, %v", s, got, err)
		}
	}
	if _, err := ParseSingle("yes"); err == nil {
		t.Error("yes is accepted")
	}
}
