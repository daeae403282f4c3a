package bench

import (
	"context"
	"fmt"
	"math"
	"slices"
	"time"

	"tutti/collectives"
	"tutti/kernels"
	"tutti/pg"
)

// TuneSpec says what Tune measures. All ranks have the same.
type TuneSpec struct {
	Kinds    []collectives.Kind
	Min, Max int           // bytes
	Factor   int           // between sizes, before crossovers are searched; at least 2
	Rounds   int           // their median counts
	Time     time.Duration // of the whole measurement: rounds are made as long as fits
	Memory   bool          // the ranks are linked by shared memory, and can map registered memory
	Cores    int           // processors that the ranks share

	corrupt func(op string, rank int, output []byte) // tests spoil results here
}

// TunePoint is the result for one size of one collective: the best algorithm, and the default
// table's choice.
type TunePoint struct {
	Kind        collectives.Kind             `json:"kind"`
	Bytes       int                          `json:"bytes"`
	Registered  bool                         `json:"registered"`
	Best        collectives.Algo             `json:"best"`
	Default     collectives.Algo             `json:"default"`
	Time        float64                      `json:"time_us"` // of the best
	DefaultTime float64                      `json:"default_time_us"`
	All         map[collectives.Algo]float64 `json:"all_us"` // every algorithm that was measured
}

// TuneEvent is a step of Tune: what is measured now, a result, or that the time is over.
type TuneEvent struct {
	Percent int                `json:"percent"`
	Next    string             `json:"next,omitempty"`
	Point   *TunePoint         `json:"point,omitempty"`
	LeftOut []collectives.Kind `json:"left_out,omitempty"` // not measured
}

const (
	// keep is the share of the default choice's time that another algorithm must beat to replace
	// it: less may be noise.
	keep = 0.95
	// hopeless is the multiple of the fastest time that excludes an algorithm after its first
	// round.
	hopeless = 3
	// refinements is how often the gap between two sizes with different winners is halved (on a
	// logarithmic scale).
	refinements = 2
)

type tuner struct {
	TuneSpec
	g              *pg.Group
	report         func(TuneEvent)
	plain, mapped  run
	began          time.Time
	rx             reduction
	done, expected int // number of contenders
	aliases        map[collectives.Kind]map[collectives.Algo]collectives.Algo
}

// Tune measures every algorithm of spec's collectives at every size and returns, by collective,
// rules for the beginning of a table: they hold only for g's number of ranks, on one host.
// Hierarchical algorithms, which need several hosts, are omitted. Every rank of g calls it, with
// all ranks on one host; all get the same rules. Contenders take turns round by round and medians
// count. Every algorithm's result is checked; a wrong one is an error. report is called at rank 0.
// When the time is exceeded by half, the remaining collectives are left out and get no rules; the
// first one always has some.
func Tune(ctx context.Context, g *pg.Group, spec TuneSpec,
	report func(TuneEvent)) (map[collectives.Kind][]collectives.Rule, error) {
	if g.Rank() != 0 {
		report = func(TuneEvent) {}
	}
	t := &tuner{TuneSpec: spec, g: g, report: report, began: time.Now(),
		rx: newReduction(kernels.Sum, kernels.Float32, g.Size())}
	t.plain = run{Spec: Spec{Max: spec.Max, Check: true, corrupt: spec.corrupt}, g: g, report: func(Event) {}}
	t.mapped = t.plain
	t.mapped.Registered = true
	for _, r := range []*run{&t.plain, &t.mapped} {
		if r.Registered && !spec.Memory {
			continue
		}
		if err := r.allocate(); err != nil {
			return nil, err
		}
		defer r.free()
	}
	for _, k := range spec.Kinds {
		for _, size := range t.sizes(k) {
			t.expected += len(t.contenders(k))
			if t.maps(k, size) {
				t.expected += 3
			}
		}
	}
	t.expected += t.expected / 4 // for crossovers
	rules := map[collectives.Kind][]collectives.Rule{}
	for i, k := range spec.Kinds {
		elapsed, err := t.elapsed(ctx)
		if err != nil {
			return nil, err
		}
		if i > 0 && elapsed > spec.Time*3/2 {
			report(TuneEvent{LeftOut: spec.Kinds[i:]})
			break
		}
		own, err := t.kind(ctx, k)
		if g.SetAlgorithm("auto"); err != nil {
			return nil, fmt.Errorf("%v: %w", k, err)
		}
		rules[k] = own
	}
	return rules, nil
}

// sizes returns the sizes that are measured before crossovers are searched, the last of which is
// Max: rules for larger ones follow from it.
func (t *tuner) sizes(k collectives.Kind) []int {
	if k == collectives.Barrier {
		return []int{0}
	}
	s := Spec{Min: t.Min, Max: t.Max, Factor: t.Factor}
	all := s.sizes()
	if all[len(all)-1] < t.Max {
		all = append(all, t.Max)
	}
	return all
}

// contenders returns the algorithms for plain memory, without those with the same plans as another
// one at this number of ranks.
func (t *tuner) contenders(k collectives.Kind) []collectives.Algo {
	return slices.DeleteFunc(collectives.Algorithms(k), func(a collectives.Algo) bool {
		return a.Requires() != collectives.Always || a == collectives.Hierarchical || t.same(k, a) != a
	})
}

// same returns the representative of all algorithms of k with the same plans as a: if possible, one
// that the default table uses.
func (t *tuner) same(k collectives.Kind, a collectives.Algo) collectives.Algo {
	if stands, ok := t.aliases[k]; ok {
		return stands[a]
	}
	all := []collectives.Algo{}
	for _, r := range collectives.DefaultTable().Rules(k) {
		all = append(all, r.Algo)
	}
	stands, plans := map[collectives.Algo]collectives.Algo{}, map[string]collectives.Algo{}
next:
	for _, a := range append(all, collectives.Algorithms(k)...) {
		if _, ok := stands[a]; ok {
			continue
		}
		if a.Requires() != collectives.Always || a == collectives.Hierarchical { // these have no equals
			stands[a] = a
			continue
		}
		text := ""
		for _, bytes := range []int{64 * t.g.Size(), 1 << 20} { // short ones and pipelined ones
			s, _ := t.Call(k, t.g.Size(), bytes, false)
			s.Counts[0] = bytes
			s.RecvCounts = s.Counts
			for s.Rank = range s.Size {
				p, err := collectives.Build(a, s)
				if err != nil { // it stays separate; its use will return the error
					stands[a] = a
					continue next
				}
				text += fmt.Sprint(p.Steps)
			}
		}
		if b, ok := plans[text]; ok {
			stands[a] = b
			continue
		}
		plans[text], stands[a] = a, a
	}
	if t.aliases == nil {
		t.aliases = map[collectives.Kind]map[collectives.Algo]collectives.Algo{}
	}
	t.aliases[k] = stands
	return stands[a]
}

// maps reports whether mapped memory is considered for size bytes.
func (t *TuneSpec) maps(k collectives.Kind, size int) bool {
	return t.Memory && size >= collectives.LoadStoreMin(k) &&
		slices.Contains(collectives.Algorithms(k), collectives.LoadStore)
}

// elapsed returns the same time at all ranks.
func (t *tuner) elapsed(ctx context.Context) (time.Duration, error) {
	e := []int64{int64(time.Since(t.began))}
	err := pg.AllReduce(ctx, t.g, e, pg.Max)
	return time.Duration(e[0]), err
}

// A span is an algorithm and the size in bytes up to which it is best.
type span struct {
	bytes int
	algo  collectives.Algo
}

// kind measures one collective and makes its rules.
func (t *tuner) kind(ctx context.Context, k collectives.Kind) ([]collectives.Rule, error) {
	var plain, mapped []span
	sums := map[collectives.Algo]float64{}
	var last *TunePoint
	for _, size := range t.sizes(k) {
		p, err := t.point(ctx, k, size, false, t.contenders(k), previous(plain))
		if err != nil {
			return nil, err
		}
		for a, us := range p.All {
			sums[a] += math.Log(max(us, 1e-3))
		}
		last = p
		if !t.maps(k, p.Bytes) {
			t.report(TuneEvent{Point: p})
			plain = append(plain, span{p.Bytes, p.Best})
			continue
		}
		algos := append(p.fastest(2), collectives.LoadStore)
		if usual := t.usual(k, p.Bytes, true); !slices.Contains(algos, usual) {
			algos = append(algos, usual)
		}
		m, err := t.point(ctx, k, size, true, algos, previous(mapped))
		if err != nil {
			return nil, err
		}
		if m.Best == collectives.LoadStore && k.Reduces() {
			p.decide(previous(plain), true)
		}
		t.report(TuneEvent{Point: p})
		t.report(TuneEvent{Point: m})
		if m.Best != collectives.LoadStore {
			m.Best = p.Best // as in plain memory, where more algorithms were measured
		}
		plain = append(plain, span{p.Bytes, p.Best})
		mapped = append(mapped, span{m.Bytes, m.Best})
	}
	// Not all ranks know its size: one algorithm for all.
	if k == collectives.AllToAllV || k == collectives.Barrier {
		best := last.Default
		for _, a := range t.contenders(k) {
			if sums[a] < sums[best] && sums[a] < sums[last.Default]+float64(len(plain))*math.Log(keep) {
				best = a
			}
		}
		plain = []span{{last.Bytes, best}}
	}
	mapped, err := t.crossovers(ctx, k, mapped, true, nil)
	if err != nil {
		return nil, err
	}
	if plain, err = t.crossovers(ctx, k, plain, false, mapped); err != nil {
		return nil, err
	}
	return t.rules(k, plain, mapped), nil
}

// crossovers replaces the size at the end of each run of equal winners by the one at which the next
// becomes faster; the last run has no end. others are the spans of registered memory, for those of
// plain memory. Where they have LoadStore, only an algorithm that may be sent for it wins. If no
// size that can be loaded was measured, the last run ends at the largest one: a rule without an end
// would keep larger calls from loading, and from reading plain memory by single copies.
func (t *tuner) crossovers(ctx context.Context, k collectives.Kind, spans []span, mapped bool,
	others []span) ([]span, error) {
	var out []span
	for i, s := range spans {
		if i+1 == len(spans) {
			if mapped || len(others) > 0 || !t.maps(k, collectives.LoadStoreMin(k)) {
				s.bytes = 0 // without a limit
			}
			return append(out, s), nil
		}
		next := spans[i+1]
		if s.algo == next.algo {
			continue
		}
		lo, hi := s.bytes, next.bytes
		for range refinements {
			mid := int(math.Sqrt(float64(lo)*float64(hi))) &^ 63
			if mid <= lo || mid >= hi {
				break
			}
			first := s.algo.OnePass()
			if first == next.algo.OnePass() || !k.Reduces() || !t.loads(k, mid, others) {
				p, err := t.point(ctx, k, mid, mapped, []collectives.Algo{s.algo, next.algo}, s.algo)
				if err != nil {
					return nil, err
				}
				t.report(TuneEvent{Point: p})
				first = p.All[s.algo] <= p.All[next.algo]
			}
			if first {
				lo = mid
			} else {
				hi = mid
			}
		}
		out = append(out, span{int(math.Sqrt(float64(lo) * float64(hi))), s.algo})
	}
	return out, nil
}

// loads reports whether spans of registered memory have LoadStore for size bytes.
func (t *tuner) loads(k collectives.Kind, size int, spans []span) bool {
	i := slices.IndexFunc(spans, func(s span) bool { return s.bytes == 0 || size <= s.bytes })
	return i >= 0 && spans[i].algo == collectives.LoadStore && t.maps(k, size)
}

// rules makes the rules of k: the default table's for several hosts, then the measured ones, for
// this number of ranks; then the others of the default table.
func (t *tuner) rules(k collectives.Kind, plain, mapped []span) []collectives.Rule {
	var levels, others, own []collectives.Rule
	for _, r := range collectives.DefaultTable().Rules(k) {
		if r.When == collectives.IfLevels {
			levels = append(levels, r)
		} else {
			others = append(others, r)
		}
	}
	n, here := t.g.Size(), collectives.IfOneHost
	if t.Memory {
		here = collectives.IfMemory
	}
	if slices.ContainsFunc(mapped, func(s span) bool { return s.algo == collectives.LoadStore }) {
		for _, s := range mapped {
			own = append(own, collectives.Rule{When: collectives.IfMapped, MinRanks: n, MaxRanks: n, MaxBytes: s.bytes,
				Algo: s.algo})
		}
	}
	for _, s := range plain {
		own = append(own, collectives.Rule{When: here, MinRanks: n, MaxRanks: n, MaxBytes: s.bytes, Algo: s.algo})
	}
	return slices.Concat(levels, own, others)
}

// fastest returns the n fastest algorithms of p, the best first.
func (p *TunePoint) fastest(n int) []collectives.Algo {
	all := []collectives.Algo{p.Best}
	for range n - 1 {
		next := collectives.Auto
		for _, a := range collectives.Algorithms(p.Kind) { // in an order that all ranks share
			if us, ok := p.All[a]; ok && !slices.Contains(all, a) && (next == collectives.Auto || us < p.All[next]) {
				next = a
			}
		}
		if next != collectives.Auto {
			all = append(all, next)
		}
	}
	return all
}

// point measures the algorithms at one size. All ranks see the same times, and get the same result.
func (t *tuner) point(ctx context.Context, k collectives.Kind, size int, registered bool, algos []collectives.Algo,
	before collectives.Algo) (*TunePoint, error) {
	r, memory := &t.plain, "plain"
	if registered {
		r, memory = &t.mapped, "registered"
	}
	o := find(k.String())
	in := newInstance(t.g, o, kernels.Float32, kernels.Sum, &t.rx, r.mem, size, 0, o.in && !o.parts)
	p := &TunePoint{Kind: k, Bytes: in.bytes, Registered: registered, Default: t.usual(k, in.bytes, registered),
		All: map[collectives.Algo]float64{}}
	elapsed, err := t.elapsed(ctx)
	if err != nil {
		return nil, err
	}
	left := max(0, t.Time-elapsed) / time.Duration(max(1, t.expected-t.done))
	r.RoundTime = min(max(left/time.Duration(t.Rounds+2), 50*time.Microsecond), 50*time.Millisecond)
	t.report(TuneEvent{Percent: min(99, max(100*t.done/max(1, t.expected), int(100*elapsed/max(1, t.Time)))),
		Next: fmt.Sprintf("%v of %d bytes in %s memory", k, in.bytes, memory)})
	t.done += len(algos)

	samples := make([][]float64, len(algos))
	iters := make([]int, len(algos))
	fastest := math.Inf(1)
	for round := range t.Rounds {
		for i, a := range algos {
			if round > 0 && samples[i][0] > hopeless*fastest {
				continue
			}
			if err := t.g.SetAlgorithm(a.String()); err != nil {
				return nil, err
			}
			if round == 0 {
				if iters[i], err = t.prepare(ctx, r, in, o); err != nil {
					return nil, fmt.Errorf("%v, %d bytes in %s memory: %w", a, in.bytes, memory, err)
				}
			}
			s, err := r.counted(func(n int) (float64, float64, error) { return r.round(ctx, in, n) }, &iters[i])
			if err != nil {
				return nil, fmt.Errorf("%v, %d bytes in %s memory: %w", a, in.bytes, memory, err)
			}
			samples[i] = append(samples[i], s)
			fastest = min(fastest, s)
		}
	}
	for i, a := range algos {
		p.All[a] = median(samples[i]) * 1e6
	}
	p.decide(before, false)
	return p, nil
}

// decide chooses the best: the default table's choice, else the best at the last size, unless
// another is clearly faster. Ties go to the algorithm with the lower number. If sent is set, it
// chooses only among those that may be sent for LoadStore.
func (p *TunePoint) decide(before collectives.Algo, sent bool) {
	p.Best = collectives.Auto
	for _, a := range collectives.Algorithms(p.Kind) {
		if us, ok := p.All[a]; ok && (!sent || a.OnePass()) && (p.Best == collectives.Auto || us < p.All[p.Best]) {
			p.Best = a
		}
	}
	p.DefaultTime = p.All[p.Default]
	fastest := p.All[p.Best]
	for _, a := range []collectives.Algo{p.Default, before} {
		if us, ok := p.All[a]; ok && (!sent || a.OnePass()) && fastest > keep*us {
			p.Best = a
			break
		}
	}
	p.Time = p.All[p.Best]
}

// previous is the algorithm of the last span, Auto if there is none.
func previous(spans []span) collectives.Algo {
	if len(spans) == 0 {
		return collectives.Auto
	}
	return spans[len(spans)-1].algo
}

// prepare checks the result of one call, and determines the number of calls in a round.
func (t *tuner) prepare(ctx context.Context, r *run, in *instance, o *operation) (int, error) {
	var row Row
	if err := r.verify(ctx, in, &row); err != nil {
		return 0, err
	}
	if row.Wrong > 0 {
		return 0, fmt.Errorf("%d wrong elements", row.Wrong)
	}
	return r.calibrate(func(n int) (float64, float64, error) { return r.round(ctx, in, n) })
}

// usual returns the default table's choice for bytes in total.
func (t *tuner) usual(k collectives.Kind, bytes int, registered bool) collectives.Algo {
	return t.same(k, t.Choose(nil, k, t.g.Size(), bytes, registered))
}

// Choose returns the algorithm by which n ranks like the measured ones run a call on bytes in
// total, if they have the table.
func (t *TuneSpec) Choose(table *collectives.Table, k collectives.Kind, n, bytes int,
	registered bool) collectives.Algo {
	s, caps := t.Call(k, n, bytes, t.maps(k, bytes))
	algo := table.Choose(s, caps)
	if algo == collectives.LoadStore && !registered {
		algo = table.ChooseSent(s, caps)
	}
	return algo
}

// Call returns the arguments of Table.Choose for a call on bytes in total, among n ranks like the
// measured ones.
func (t *TuneSpec) Call(k collectives.Kind, n, bytes int, mapped bool) (collectives.Shape, collectives.Caps) {
	s := collectives.Shape{Kind: k, Size: n, Elem: 1, Count: bytes, Counts: make([]int, n)}
	for i := range n {
		s.Active = append(s.Active, i)
	}
	switch k {
	case collectives.ReduceScatter, collectives.AllGather, collectives.AllToAll, collectives.Gather,
		collectives.Scatter:
		s.Count /= n // of one part
	case collectives.AllGatherV:
		s.Counts[0] = bytes
	}
	caps := collectives.Caps{Mapped: mapped, SharedMemory: t.Memory}
	if n > t.Cores {
		caps.Cores = t.Cores
	}
	return s, caps
}

func median(xs []float64) float64 {
	s := slices.Sorted(slices.Values(xs))
	return (s[(len(s)-1)/2] + s[len(s)/2]) / 2
}
