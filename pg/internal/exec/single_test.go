package exec

import (
	"encoding/binary"
	"testing"

	"tutti/collectives"
	"tutti/kernels"
)

// A group of ranks that make calls of one kind on plain memory, with the times that each takes.
type trialled struct {
	ranks   []trials
	time    func(rank int, w way) uint32
	refused bool // the last rank cannot make single copies
	silent  bool // the last rank takes no part in trials
	seq     uint64
	calls   [ways]int
}

// call runs one call of size bytes, and returns its way.
func (g *trialled) call(size int) way {
	return g.run(trialCall{kind: collectives.AllGather, size: size})
}

// run runs one call, and returns its way.
func (g *trialled) run(c trialCall) way {
	g.seq++
	descs := make([]byte, descSize*len(g.ranks))
	active := make([]int, len(g.ranks))
	for r := range g.ranks {
		t, d, last := &g.ranks[r], descs[r*descSize:], r == len(g.ranks)-1
		active[r], d[0] = r, accessRead
		can := [ways]bool{true, true, !g.refused || !last}
		if can[single] {
			d[1] = canRead
		}
		if t.current = nil; !g.silent || !last {
			d[1] |= tries | byte(t.propose(c, can))<<wayBits
		}
		t.report(d[56:])
	}
	all := agree(descs, active)
	runs := all.way()
	for r := range g.ranks {
		if t := &g.ranks[r]; all.tried {
			t.learn(descs, active)
			t.begin(g.seq, all.proposed, runs)
			t.last.took = g.time(r, runs)
		}
	}
	g.calls[runs]++
	return runs
}

// settle runs calls until the trials are as seldom as they get, and then some more, which count.
func (g *trialled) settle() {
	const size = 300 << 10
	for range 2 * mostPause {
		g.call(size)
	}
	g.calls = [ways]int{}
	for range 20 * mostPause {
		g.call(size)
	}
}

// TestTrialsFindTheFastestWay: after a trial calls run the fastest way, whichever it is, and ranks
// agree on it; now and then they try the other ones, ever less often, until one has become faster.
func TestTrialsFindTheFastestWay(t *testing.T) {
	var times [ways]uint32
	g := &trialled{ranks: make([]trials, 3), time: func(rank int, w way) uint32 { return times[w] + uint32(rank) }}
	for _, c := range []struct {
		times [ways]uint32
		want  way
	}{
		{[ways]uint32{rings: 100, past: 110, single: 60}, single},
		{[ways]uint32{rings: 100, past: 110, single: 120}, rings},
		{[ways]uint32{rings: 100, past: 50, single: 120}, past},
		{[ways]uint32{rings: 100, past: 50, single: 40}, single},
		{[ways]uint32{rings: 1000, past: 50, single: 1000}, past},
		{[ways]uint32{rings: 100, past: 500, single: 500}, rings},
		{[ways]uint32{rings: 100, past: 500, single: 90}, single},
		{[ways]uint32{rings: 100, past: 98, single: 97}, rings}, // no difference that counts
	} {
		times = c.times
		g.settle()
		for w, n := range g.calls {
			hopeless := 20*(warmCalls+1) + eachCalls
			most := g.calls[c.want] / 50
			if way(w) != c.want && (n == 0 || n > most || times[w] >= 500 && n > hopeless) {
				t.Errorf("times %v: calls of each way %v, want almost all of way %d", c.times, g.calls, c.want)
				break
			}
		}
	}
}

// TestTrialsSurviveColdMemory: first calls that are slow, because memory is touched for the first
// time, do not decide.
func TestTrialsSurviveColdMemory(t *testing.T) {
	calls := 0
	g := &trialled{ranks: make([]trials, 2), time: func(rank int, w way) uint32 {
		if calls++; calls <= 4 {
			return uint32(1000 * calls)
		} else if w == single {
			return 60
		}
		return 100
	}}
	for range 40 {
		g.call(1 << 20)
	}
	if w := g.call(1 << 20); w != single {
		t.Errorf("way %d, which is slower", w)
	}
}

// TestTrialsGoByTheSlowestRank: a way that is faster for one rank only is not taken.
func TestTrialsGoByTheSlowestRank(t *testing.T) {
	g := &trialled{ranks: make([]trials, 2), time: func(rank int, w way) uint32 {
		switch {
		case rank == 0 && w == single:
			return 10
		case w == single:
			return 200
		}
		return 100
	}}
	for range 50 {
		g.call(1 << 20)
	}
	if g.calls[single] > eachCalls {
		t.Errorf("%d single copies, which are slower for rank 1", g.calls[single])
	}
}

// TestTrialsOfWhatOneRankCannot: a way that the lowest rank proposes, and another one cannot go,
// ends no trial of the others, and is not proposed again and again.
func TestTrialsOfWhatOneRankCannot(t *testing.T) {
	g := &trialled{ranks: make([]trials, 2), refused: true, time: func(_ int, w way) uint32 {
		return [ways]uint32{rings: 100, past: 60, single: 10}[w]
	}}
	g.settle()
	if g.calls[single] > 0 || g.calls[rings] > g.calls[past]/50 {
		t.Errorf("calls of each way %v, want almost all of way %d", g.calls, past)
	}
}

// TestTrialsWithoutOneRank: if a rank takes no part in trials, none begins, and calls go through
// rings; when it does again, the fastest way is found.
func TestTrialsWithoutOneRank(t *testing.T) {
	g := &trialled{ranks: make([]trials, 2), silent: true, time: func(_ int, w way) uint32 {
		return [ways]uint32{rings: 100, past: 60, single: 80}[w]
	}}
	for range 1000 {
		g.call(1 << 20)
	}
	if g.calls[past]+g.calls[single] > 0 {
		t.Errorf("calls of each way %v, want all of way %d", g.calls, rings)
	}
	g.silent = false
	for range firstCalls + 3*eachCalls + 1 {
		g.call(1 << 20)
	}
	if w := g.call(1 << 20); w != past {
		t.Errorf("way %d after a trial, want %d", w, past)
	}
}

// TestAgreement: which way a call goes follows from the descriptors of all active ranks, and from
// no other ones.
func TestAgreement(t *testing.T) {
	const some = canRead | tries
	on := func(w way) byte { return byte(w) << wayBits }
	for _, c := range []struct {
		descs [3][3]byte // access, offers and pause; the second is of no active rank
		want  agreed
		way   way
	}{
		{[3][3]byte{{accessRead, some | on(single), 7}, {}, {accessRead, some | on(past), 9}},
			agreed{readable: true, tried: true, proposed: single, pause: 7}, single},
		{[3][3]byte{{accessRead, some | on(single), 0}, {}, {accessRead, tries, 0}},
			agreed{tried: true, proposed: single}, rings},
		{[3][3]byte{{accessRead, some | on(past), 3}, {}, {accessMapped, canRead, 0}},
			agreed{readable: true, proposed: past, pause: 3}, past},
		{[3][3]byte{{accessMapped, 0, 0}, {}, {accessMapped, some, 0}}, agreed{mapped: true}, rings},
		{[3][3]byte{{accessDevice, 0, 0}, {}, {accessDevice, 0, 0}}, agreed{direct: true}, rings},
		{[3][3]byte{{accessRead, some | on(single), 0}, {}, {}}, agreed{proposed: single}, rings},
		{[3][3]byte{{accessRead, some | 3<<wayBits, 0}, {}, {accessRead, some, 0}}, // no such way
			agreed{readable: true, tried: true, proposed: rings}, rings},
	} {
		descs := make([]byte, 3*descSize)
		for slot, d := range c.descs {
			copy(descs[slot*descSize:], d[:])
		}
		got := agree(descs, []int{0, 2})
		if got != c.want || got.way() != c.way {
			t.Errorf("%v: %+v, way %d, want %+v, way %d", c.descs, got, got.way(), c.want, c.way)
		}
	}
}

// TestTrialsAreOfAClass: what is found for some sizes says nothing about others.
func TestTrialsAreOfAClass(t *testing.T) {
	small := true
	g := &trialled{ranks: make([]trials, 2), time: func(_ int, w way) uint32 {
		if (w == single) == small {
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
	if g.call(127<<10) == single {
		t.Error("a single copy where rings are faster")
	}
	small = false
	if g.call(2<<20+1) != single {
		t.Error("rings where a single copy is faster")
	}
}

// TestTrialsCompareEqualCalls: calls of a class whose cost for a byte differs, because of their
// size or their type, are not compared with each other. If none is like another, all are.
func TestTrialsCompareEqualCalls(t *testing.T) {
	const small, large = 70 << 10, 127 << 10
	for name, c := range map[string]struct {
		like func(i int) trialCall // the i-th call
		cost func(c trialCall, w way) uint32
		want way
	}{
		// A fixed cost, and equal ways.
		"sizes": {func(i int) trialCall {
			return trialCall{kind: collectives.AllGather, size: [2]int{small, large}[i/4%2]}
		}, func(c trialCall, _ way) uint32 { return 1000 + uint32(c.size>>10) }, rings},
		"types": {func(i int) trialCall {
			return trialCall{kind: collectives.AllReduce, size: large, dtype: [2]kernels.DType{kernels.Float16,
				kernels.Float32}[i/4%2]}
		}, func(c trialCall, _ way) uint32 { return 500 * uint32(5-c.dtype.Size()) }, rings},
		"each other": {func(i int) trialCall {
			return trialCall{kind: collectives.AllGather, size: small + 4*i%(large-small)}
		}, func(c trialCall, w way) uint32 { return uint32(c.size>>10) * [ways]uint32{20, 19, 10}[w] }, single},
	} {
		g := &trialled{ranks: make([]trials, 2)}
		for i := range firstCalls + mostOthers + 3*eachCalls + 2 {
			next := c.like(i)
			g.time = func(_ int, w way) uint32 { return c.cost(next, w) }
			g.run(next)
		}
		for _, r := range g.ranks {
			for _, at := range r.of {
				if at.best != c.want {
					t.Errorf("%s: way %d is the best, want %d", name, at.best, c.want)
				}
			}
		}
	}
}

// TestTrialsOfRanksOutOfPhase: a rank that comes in has tried nothing. Its trial needs the times of
// ranks that have ended theirs, or count other calls.
func TestTrialsOfRanksOutOfPhase(t *testing.T) {
	for name, sizes := range map[string][]int{"equal calls": {100 << 10}, "two sizes in turn": {70 << 10, 120 << 10}} {
		for fresh := range 2 {
			g := &trialled{ranks: make([]trials, 2), time: func(_ int, w way) uint32 {
				return [ways]uint32{rings: 100, past: 110, single: 60}[w]
			}}
			calls := 0
			run := func(n int) {
				for range n {
					g.call(sizes[calls%len(sizes)])
					calls++
				}
			}
			run(firstCalls + 3*eachCalls*len(sizes) + 5)
			g.ranks[fresh] = trials{}
			run(firstCalls + 3*eachCalls*len(sizes) + 5)
			g.calls = [ways]int{}
			run(10)
			if g.calls[single] != 10 {
				t.Errorf("%s, rank %d came in: %v calls went each way, want 10 as single copies", name, fresh, g.calls)
			}
		}
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
		a.propose(trialCall{kind: collectives.AllGather, size: 1 << 20}, [ways]bool{true, true, true})
		at := a.current
		at.restart()
		a.begin(7, rings, rings)
		a.end()
		tell(0, 7, 40)
		tell(1, c.seq, c.took)
		a.learn(all, []int{0, 1})
		if got := at.times[rings] == 50.0/(1<<20); got != c.counts {
			t.Errorf("%+v: the time is %v", c, at.times[rings])
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
