package bench

import (
	"context"
	"errors"
	"maps"
	"math"
	"reflect"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"tutti/collectives"
	"tutti/pg"
)

func tuneLocal(t *testing.T, n int, spec TuneSpec) ([]map[collectives.Kind][]collectives.Rule, []TuneEvent, error) {
	t.Helper()
	gs, err := pg.Local(n, pg.Config{Timeout: 30 * time.Second})
	if err != nil {
		t.Fatal(err)
	}
	var events []TuneEvent
	all, errs := make([]map[collectives.Kind][]collectives.Rule, n), make([]error, n)
	var wg sync.WaitGroup
	for i, g := range gs {
		wg.Go(func() {
			all[i], errs[i] = Tune(context.Background(), g, spec, func(e TuneEvent) { events = append(events, e) })
			g.Close()
		})
	}
	wg.Wait()
	return all, events, errors.Join(errs...)
}

// TestTune: all ranks find the same rules, which make a table, for exactly their number.
func TestTune(t *testing.T) {
	const n = 3
	all, events, err := tuneLocal(t, n, TuneSpec{Kinds: collectives.Kinds(), Min: 64, Max: 64 << 10, Factor: 32,
		Rounds: 2, Time: time.Minute / 60, Cores: 8})
	if err != nil {
		t.Fatal(err)
	}
	for r := range all {
		if !reflect.DeepEqual(all[r], all[0]) {
			t.Errorf("rank %d: %v\nrank 0: %v", r, all[r], all[0])
		}
	}
	table, err := collectives.NewTable(all[0])
	if err != nil {
		t.Fatal(err)
	}
	percent, points := 0, map[collectives.Kind]int{}
	for _, e := range events {
		if e.LeftOut != nil { // the machine is slow
			continue
		}
		if p := e.Point; p != nil {
			points[p.Kind]++
			if _, ok := p.All[p.Default]; !ok && len(p.All) > 2 || p.Registered || p.Time <= 0 ||
				p.All[collectives.Hierarchical] > 0 {
				t.Errorf("%+v", p)
			}
		} else if e.Next == "" || e.Percent < percent || e.Percent > 99 {
			t.Errorf("%+v after %d %%", e, percent)
		} else {
			percent = e.Percent
		}
	}
	for k := range all[0] {
		if want := len(Spec{Min: 64, Max: 64 << 10, Factor: 32}.sizesOf(k)); points[k] < want {
			t.Errorf("%v: %d points, want %d or more", k, points[k], want)
		}
		rules := table.Rules(k)
		first := slices.IndexFunc(rules, func(r collectives.Rule) bool { return r.When == collectives.IfOneHost })
		if first < 0 {
			t.Fatalf("%v: no measured rule in %v", k, rules)
		}
		if slices.ContainsFunc(rules[first:], func(r collectives.Rule) bool { return r.When == collectives.IfLevels }) {
			t.Errorf("%v: rules for several hosts behind measured ones: %v", k, rules)
		}
		for bytes, last := first, 0; rules[bytes].When == collectives.IfOneHost; bytes++ {
			r := rules[bytes]
			if r.MinRanks != n || r.MaxRanks != n || r.MaxBytes != 0 && r.MaxBytes <= last {
				t.Errorf("%v: %v", k, rules)
			}
			if last = r.MaxBytes; last == 0 {
				break
			}
		}
		// Other numbers of ranks, and several hosts, are none of its business.
		s := TuneSpec{Cores: 8}
		for _, size := range []int{64, 4096, 1 << 20} {
			for _, ranks := range []int{2, 4, 30} {
				shape, caps := s.Call(k, ranks, size, false)
				if a, b := table.Choose(shape, caps), collectives.Choose(shape, caps); a != b {
					t.Errorf("%v of %d ranks: %v, not the default %v", k, ranks, a, b)
				}
			}
			shape, caps := s.Call(k, n, size, false)
			shape.Hosts = []int{0, 0, 1}
			if a, b := table.Choose(shape, caps), collectives.Choose(shape, caps); a != b {
				t.Errorf("%v on two hosts: %v, not the default %v", k, a, b)
			}
		}
	}
	if len(all[0]) == 0 {
		t.Error("no rules")
	}
}

func (s Spec) sizesOf(k collectives.Kind) []int {
	if k == collectives.Barrier {
		return []int{0}
	}
	return s.sizes()
}

// Collectives for which there is no time are named, and get no rules.
func TestTuneNamesWhatItLeavesOut(t *testing.T) {
	kinds := []collectives.Kind{collectives.Barrier, collectives.AllGather, collectives.Gather}
	all, events, err := tuneLocal(t, 2, TuneSpec{Kinds: kinds, Min: 64, Max: 64, Factor: 2, Rounds: 1, Time: 1,
		Cores: 2})
	if err != nil {
		t.Fatal(err)
	}
	var left []collectives.Kind
	for _, e := range events {
		left = append(left, e.LeftOut...)
	}
	if len(all[0]) != 1 || all[0][kinds[0]] == nil || !slices.Equal(left, kinds[1:]) {
		t.Errorf("rules for %v, %v is left out", slices.Collect(maps.Keys(all[0])), left)
	}
}

// The largest size is measured, also if no number of steps leads there.
func TestTuneSizesEndAtTheLargest(t *testing.T) {
	for _, c := range []struct {
		largest, factor int
		want            []int
	}{
		{64, 4, []int{64}},
		{4096, 4, []int{64, 256, 1024, 4096}},
		{5000, 4, []int{64, 256, 1024, 4096, 5000}},
		{5000, math.MaxInt, []int{64, 5000}},
	} {
		tu := &tuner{TuneSpec: TuneSpec{Min: 64, Max: c.largest, Factor: c.factor}}
		if got := tu.sizes(collectives.AllReduce); !slices.Equal(got, c.want) {
			t.Errorf("up to %d, factor %d: %v, want %v", c.largest, c.factor, got, c.want)
		}
	}
}

// TestTuneChecks: an algorithm that gives a wrong result ends it.
func TestTuneChecks(t *testing.T) {
	_, _, err := tuneLocal(t, 2, TuneSpec{Kinds: []collectives.Kind{collectives.AllGather}, Min: 64, Max: 64, Factor: 2,
		Rounds: 1, Time: time.Second, Cores: 2,
		corrupt: func(op string, rank int, output []byte) {
			if rank == 1 {
				output[5] ^= 1
			}
		}})
	if err == nil || !strings.Contains(err.Error(), "allgather: oneshot, 64 bytes in plain memory: 1 wrong elements") {
		t.Error(err)
	}
}

func TestDecide(t *testing.T) {
	const oneshot, ring, tree, twoshot = collectives.OneShot, collectives.Ring, collectives.Tree, collectives.TwoShot
	for _, c := range []struct {
		all           map[collectives.Algo]float64
		usual, before collectives.Algo
		want          collectives.Algo
	}{
		{map[collectives.Algo]float64{oneshot: 10, ring: 9, tree: 20}, oneshot, tree, ring},
		{map[collectives.Algo]float64{oneshot: 10, ring: 9.8, tree: 20}, oneshot, ring, oneshot}, // not clearly
		{map[collectives.Algo]float64{oneshot: 10, ring: 9.8, tree: 20}, twoshot, tree, ring},
		{map[collectives.Algo]float64{oneshot: 10, ring: 9.8, tree: 20}, twoshot, oneshot, oneshot},
		{map[collectives.Algo]float64{oneshot: 10, ring: 10}, tree, collectives.Auto, oneshot},
	} {
		p := &TunePoint{Kind: collectives.AllReduce, Default: c.usual, All: c.all}
		p.decide(c.before, false)
		if p.Best != c.want || p.Time != c.all[c.want] || p.DefaultTime != c.all[c.usual] {
			t.Errorf("%v, usually %v, before %v: %+v", c.all, c.usual, c.before, p)
		}
		if f := p.fastest(2); len(f) != 2 || f[0] != p.Best || f[1] == f[0] {
			t.Errorf("%v: fastest %v", c.all, f)
		}
		if f := p.fastest(9); len(f) != len(slices.Collect(maps.Keys(c.all))) {
			t.Errorf("%v: fastest %v", c.all, f)
		}
	}
}

// Where registered memory is loaded, an algorithm wins in plain memory that a call really uses.
func TestPlainMemoryHasTheAlgorithmsThatAreSent(t *testing.T) {
	const ring, twoshot, load = collectives.Ring, collectives.TwoShot, collectives.LoadStore
	for _, usual := range []collectives.Algo{ring, twoshot} {
		p := &TunePoint{Kind: collectives.AllReduce, Default: usual,
			All: map[collectives.Algo]float64{ring: 5, twoshot: 10}}
		if p.decide(ring, true); p.Best != twoshot || p.Time != 10 {
			t.Errorf("usually %v: %+v", usual, p)
		}
	}
	tu := &tuner{TuneSpec: TuneSpec{Memory: true, Cores: 64}} // it has no group, and cannot measure
	spans, err := tu.crossovers(t.Context(), collectives.AllReduce, []span{{64 << 10, ring}, {1 << 20, twoshot}}, false,
		[]span{{0, load}})
	least := collectives.LoadStoreMin(collectives.AllReduce)
	if err != nil || len(spans) != 2 || spans[0].algo != ring || spans[0].bytes >= least {
		t.Errorf("%v, %v", spans, err)
	}
	table, err := collectives.NewTable(map[collectives.Kind][]collectives.Rule{collectives.AllReduce: {
		{When: collectives.IfMapped, MaxBytes: 1 << 20, Algo: load}, {Algo: ring}}})
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		bytes           int
		plain, register collectives.Algo
	}{{least - 4, ring, ring}, {least, twoshot, load}, {1 << 20, twoshot, load}, {1<<20 + 4, ring, ring}} {
		plain := tu.Choose(table, collectives.AllReduce, 4, c.bytes, false)
		register := tu.Choose(table, collectives.AllReduce, 4, c.bytes, true)
		if plain != c.plain || register != c.register {
			t.Errorf("%+v: %v in plain memory, %v in registered memory", c, plain, register)
		}
	}
}

// Measurements below the sizes that are loaded say nothing about those: there the default rules
// hold, with which plain memory is read by a single copy where that is faster.
func TestShortMeasurementsKeepLoads(t *testing.T) {
	gs, err := pg.Local(2, pg.Config{})
	if err != nil {
		t.Fatal(err)
	}
	defer gs[0].Close()
	defer gs[1].Close()
	tu := &tuner{TuneSpec: TuneSpec{Memory: true, Cores: 64}, g: gs[0]}
	for _, k := range collectives.Kinds() {
		most, best := collectives.LoadStoreMin(k)/2, tu.contenders(k)[0]
		plain, err := tu.crossovers(t.Context(), k, []span{{most, best}}, false, nil)
		if err != nil {
			t.Fatal(err)
		}
		table, err := collectives.NewTable(map[collectives.Kind][]collectives.Rule{k: tu.rules(k, plain, nil)})
		if err != nil {
			t.Fatal(err)
		}
		want := best
		if slices.Contains(collectives.Algorithms(k), collectives.LoadStore) {
			want = collectives.LoadStore
		}
		s, caps := tu.Call(k, 2, most, true)
		if got := table.Choose(s, caps); got != best {
			t.Errorf("%v: %v for %d bytes, want %v", k, got, most, best)
		}
		s, caps = tu.Call(k, 2, 1<<20, true)
		if got := table.Choose(s, caps); got != want {
			t.Errorf("%v, measured up to %d bytes: %v for 1 MiB, want %v", k, most, got, want)
		}
	}
}

// Algorithms with the same plans are measured once, as the one that the default table uses.
func TestAlgorithmsWithOnePlanAreMeasuredOnce(t *testing.T) {
	gs, err := pg.Local(2, pg.Config{})
	if err != nil {
		t.Fatal(err)
	}
	defer gs[0].Close()
	defer gs[1].Close()
	tu := &tuner{g: gs[0]}
	if got := tu.contenders(collectives.ReduceScatter); slices.Contains(got, collectives.OneShot) ||
		!slices.Contains(got, collectives.Pairwise) {
		t.Errorf("reducescatter: %v", got)
	}
	for _, k := range collectives.Kinds() {
		got := tu.contenders(k)
		if len(got) == 0 {
			t.Errorf("%v: nothing to measure", k)
		}
		for _, a := range collectives.Algorithms(k) {
			if b := tu.same(k, a); tu.same(k, b) != b {
				t.Errorf("%v: %v stands for %v but not for itself", k, b, a)
			} else if k.Reduces() && a.OnePass() && !b.OnePass() {
				t.Errorf("%v: %v, which may be sent for loadstore, is measured as %v, which may not", k, a, b)
			}
		}
		for _, size := range []int{64, 1 << 20} {
			if usual := tu.usual(k, size, false); !slices.Contains(got, usual) {
				t.Errorf("%v: the default %v is not among %v", k, usual, got)
			}
		}
	}
	if got := tu.contenders(collectives.AllReduce); !slices.Contains(got, collectives.OneShot) ||
		!slices.Contains(got, collectives.TwoShot) || len(got) < 4 {
		t.Errorf("allreduce: %v", got)
	}
}
