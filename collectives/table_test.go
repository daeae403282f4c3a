package collectives

import (
	"encoding/json"
	"math/rand/v2"
	"reflect"
	"strings"
	"testing"

	"pgregory.net/rapid"
)

// drawRules makes up rules for some kinds, mostly good ones.
func drawRules(t *rapid.T) map[Kind][]Rule {
	rules := map[Kind][]Rule{}
	for _, k := range Kinds() {
		if !rapid.Bool().Draw(t, "has "+k.String()) {
			continue
		}
		list := []Rule{}
		for range rapid.IntRange(0, 5).Draw(t, "rules") {
			r := Rule{When: Condition(rapid.IntRange(0, int(numConditions)-1).Draw(t, "when")),
				MinRanks: rapid.IntRange(0, 9).Draw(t, "min"),
				MaxBytes: rapid.SampledFrom([]int{0, 64, 4096, 1 << 20}).Draw(t, "bytes"),
				Algo:     rapid.SampledFrom(Algorithms(k)).Draw(t, "algo")}
			if rapid.Bool().Draw(t, "bounded") {
				r.MaxRanks = r.MinRanks + rapid.IntRange(0, 9).Draw(t, "more")
			}
			if c := r.Algo.Requires(); c != Always {
				r.When = c
			}
			list = append(list, r)
		}
		rules[k] = list
	}
	return rules
}

// TestTableChooses: whatever the rules, a choice can be built, is the same on all ranks, and is
// loadstore only where memory is mapped.
func TestTableChooses(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		table, err := NewTable(drawRules(t))
		if err != nil {
			t.Fatal(err)
		}
		r := rand.New(rand.NewPCG(rapid.Uint64().Draw(t, "seed"), 0))
		for range 50 {
			n := 1 + r.IntN(20)
			c := draw(r, Kinds()[r.IntN(len(Kinds()))], Algo(r.IntN(int(numAlgos))), n)
			caps := Caps{r.IntN(3) == 0, r.IntN(3) == 0, r.IntN(2) == 0, r.IntN(9)}
			first := c.rank(0)
			a := table.Choose(first, caps)
			if algos[a].makers[first.Kind] == nil {
				t.Fatalf("%v has no %v", first.Kind, a)
			}
			if a == LoadStore && !caps.Mapped || a == OneSided && !caps.Puts {
				t.Fatalf("%v: %v with %+v", c, a, caps)
			}
			if b := table.Choose(c.rank(n-1), caps); b != a {
				t.Fatalf("%v: rank %d chooses %v, another %v", c, n-1, b, a)
			}
		}
	})
}

// TestTableJSON: a table survives JSON, hash and all, and different rules have different hashes.
func TestTableJSON(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		table, err := NewTable(drawRules(t))
		if err != nil {
			t.Fatal(err)
		}
		b, err := json.Marshal(table)
		if err != nil {
			t.Fatal(err)
		}
		var back Table
		if err := json.Unmarshal(b, &back); err != nil {
			t.Fatalf("%s: %v", b, err)
		}
		if back.Hash() != table.Hash() {
			t.Fatalf("%s: hash %x, then %x", b, table.Hash(), back.Hash())
		}
		for _, k := range Kinds() {
			if a, b := table.Rules(k), back.Rules(k); len(a)+len(b) > 0 && !reflect.DeepEqual(a, b) {
				t.Fatalf("%v: %v, then %v", k, a, b)
			}
		}
		other, err := NewTable(drawRules(t))
		if err != nil {
			t.Fatal(err)
		}
		if c, _ := json.Marshal(other); (string(c) == string(b)) != (other.Hash() == table.Hash()) {
			t.Fatalf("hashes %x and %x of\n%s\n%s", table.Hash(), other.Hash(), b, c)
		}
	})
}

// TestTableHash pins a hash: ranks of different builds compare them.
func TestTableHash(t *testing.T) {
	rules := map[Kind][]Rule{}
	for _, k := range Kinds() {
		rules[k] = nil
	}
	rules[AllReduce] = []Rule{{IfMapped, 2, 8, 4096, LoadStore}, {Algo: Ring}}
	table, err := NewTable(rules)
	if err != nil {
		t.Fatal(err)
	}
	const want = 0xab5b34d84642d703
	if table.Hash() != want {
		t.Errorf("hash %#x, want %#x", table.Hash(), uint64(want))
	}
	rules[AllReduce][0].Algo = OneShot // the table has its own copy
	if got := table.Rules(AllReduce)[0].Algo; got != LoadStore {
		t.Errorf("a rule became %v", got)
	}
	var none *Table
	if none.Hash() != DefaultTable().Hash() || none.Hash() == 0 || none.Hash() == table.Hash() {
		t.Errorf("hash of no table %x, of the default %x", none.Hash(), DefaultTable().Hash())
	}
	s := Shape{Kind: AllReduce, Size: 4, Active: upTo(4), Elem: 4, Count: 1 << 20}
	for _, c := range []Caps{{}, {Mapped: true}} {
		if a, b := none.Choose(s, c), Choose(s, c); a != b {
			t.Errorf("%+v: no table chooses %v, the default %v", c, a, b)
		}
	}
	if none.Rules(0) != nil || none.Choose(Shape{}, Caps{}) != Auto {
		t.Error("rules, or a choice, for no kind")
	}
}

// TestTableRules: each part of a rule decides.
func TestTableRules(t *testing.T) {
	table, err := NewTable(map[Kind][]Rule{AllReduce: {
		{IfMapped, 0, 0, 100, LoadStore}, {IfMemory, 4, 5, 0, Ring}, {IfOversubscribed, 0, 3, 0, Tree},
		{IfLevels, 0, 0, 0, Hierarchical}, {IfOneHost, 0, 0, 50, Doubling}, {Always, 7, 0, 0, Halving}}})
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		n, bytes int
		hosts    []int
		caps     Caps
		want     Algo
	}{
		{2, 100, nil, Caps{Mapped: true}, LoadStore}, {2, 104, nil, Caps{Mapped: true}, OneShot},
		{2, 100, nil, Caps{}, OneShot},
		{4, 1000, nil, Caps{SharedMemory: true}, Ring}, {5, 1000, nil, Caps{SharedMemory: true}, Ring},
		{3, 1000, nil, Caps{SharedMemory: true}, OneShot},
		{6, 1000, nil, Caps{SharedMemory: true}, OneShot}, {3, 1000, nil, Caps{Cores: 2}, Tree},
		{3, 1000, nil, Caps{Cores: 3}, OneShot}, {4, 1000, nil, Caps{Cores: 2}, OneShot},
		{4, 8, []int{0, 0, 1, 1}, Caps{}, Hierarchical}, {4, 8, []int{0, 1, 2, 3}, Caps{}, OneShot},
		{4, 8, []int{7, 7, 7, 7}, Caps{}, Doubling}, {4, 8, nil, Caps{}, Doubling},
		{8, 1000, nil, Caps{}, Halving}, {6, 1000, nil, Caps{}, OneShot},
	} {
		s := Shape{Kind: AllReduce, Size: c.n, Active: upTo(c.n), Elem: 4, Count: c.bytes / 4, Hosts: c.hosts}
		if got := table.Choose(s, c.caps); got != c.want {
			t.Errorf("%+v: %v", c, got)
		}
	}
}

// What is sent for LoadStore has its order, and is not slower than it must be.
func TestChooseSent(t *testing.T) {
	table, err := NewTable(map[Kind][]Rule{AllReduce: {{Algo: Ring}}, ReduceScatter: {{Algo: Ring}},
		Reduce: {{MinRanks: 3, Algo: Tree}}, Broadcast: {{IfMapped, 0, 0, 0, LoadStore}, {Algo: Tree}}})
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		kind         Kind
		n, bytes     int
		cores        int
		want, normal Algo
	}{
		{AllReduce, 4, 1 << 20, 0, TwoShot, Ring}, {ReduceScatter, 4, 1 << 20, 0, Pairwise, Ring},
		{Broadcast, 4, 1 << 20, 0, Tree, LoadStore}, {Reduce, 2, 1 << 20, 0, OneShot, OneShot},
		{Reduce, 8, 64 << 10, 0, OneShot, Tree}, {Reduce, 8, 64<<10 + 4, 0, TwoShot, Tree},
		{Reduce, 9, 64 << 10, 0, TwoShot, Tree}, {Reduce, 9, 64 << 10, 9, TwoShot, Tree},
		{Reduce, 9, 64 << 10, 8, OneShot, Tree}, {Reduce, 9, 64<<10 + 4, 8, TwoShot, Tree},
	} {
		s := Shape{Kind: c.kind, Size: c.n, Active: upTo(c.n), Elem: 4, Count: c.bytes / 4}
		caps := Caps{Mapped: true, SharedMemory: true, Cores: c.cores}
		if got, normal := table.ChooseSent(s, caps), table.Choose(s, caps); got != c.want || normal != c.normal {
			t.Errorf("%+v: %v is sent, %v chosen", c, got, normal)
		}
	}
}

func TestTableRefuses(t *testing.T) {
	const always = `{"when": "always", "algo": "oneshot"}`
	for text, want := range map[string]string{
		`{"allreduce": [{"when": "always", "algo": "bruck"}]}`:      "no bruck plan",
		`{"allreduce": [{"when": "always", "algo": "auto"}]}`:       "no auto plan",
		`{"allreduce": [{"when": "always"}]}`:                       "no auto plan",
		`{"allreduce": [{"when": "memory", "algo": "loadstore"}]}`:  "only where memory is mapped",
		`{"allreduce": [{"when": "sometimes", "algo": "oneshot"}]}`: "no condition",
		`{"allreduce": [{"when": "always", "algo": "fast"}]}`:       "no algorithm",
		`{"allreduces": []}`: "no collective",
		`{"allreduce": [{"when": "always", "algo": "oneshot", "max_bytes": -1}]}`:                "-1 bytes",
		`{"allreduce": [{"when": "always", "algo": "oneshot", "min_ranks": 3, "max_ranks": 2}]}`: "3 to 2 ranks",
		`{"allreduce": [{"when": "always", "algo": "oneshot", "max_ranks": 9999999}]}`:           "9999999 ranks",
		`{"allreduce": [` + strings.Repeat(always+",", MaxRules) + always + `]}`:                 "at most 1024",
		`[]`: "cannot unmarshal",

		`{"allreduce": [{"algo": "ring"}]}`:               "no \"when\"",
		`{"allreduce": [{"when": null, "algo": "ring"}]}`: "no \"when\"",
		`{"allreduce": [null]}`:                           "no \"when\"",
		`{"allreduce": [{"max_rank": 2}]}`:                "unknown field \"max_rank\"",
		`{"allreduce": [], "oversubscribed": 1}`:          "cannot unmarshal",
	} {
		var table Table
		if err := json.Unmarshal([]byte(text), &table); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%.80s: %v, want %q", text, err, want)
		}
	}
	if _, err := NewTable(map[Kind][]Rule{99: nil}); err == nil {
		t.Error("rules for no kind")
	}
	if _, err := NewTable(map[Kind][]Rule{AllReduce: {{When: numConditions, Algo: OneShot}}}); err == nil {
		t.Error("a rule with no condition")
	}
	var table Table // a kind that is not named has the default rules
	if err := json.Unmarshal([]byte(`{"barrier": []}`), &table); err != nil ||
		!reflect.DeepEqual(table.Rules(AllReduce), DefaultTable().Rules(AllReduce)) || len(table.Rules(Barrier)) != 0 {
		t.Errorf("%v, %v, %v", err, table.Rules(AllReduce), table.Rules(Barrier))
	}
	for _, text := range []func() ([]byte, error){Kind(0).MarshalText, numAlgos.MarshalText,
		numConditions.MarshalText} {
		if b, err := text(); err == nil {
			t.Errorf("%s", b)
		}
	}
}

// A measured table fits groups that share processors as the measured ranks did; JSON and hash have
// that.
func TestMeasuredTableFits(t *testing.T) {
	rules := map[Kind][]Rule{AllReduce: {{Algo: Ring}}}
	plain, err := NewTable(rules)
	if err != nil {
		t.Fatal(err)
	}
	hashes := map[uint64]bool{plain.Hash(): true}
	for _, measured := range []bool{false, true} {
		table, err := NewMeasuredTable(rules, measured)
		if err != nil {
			t.Fatal(err)
		}
		b, err := json.Marshal(table)
		if err != nil {
			t.Fatal(err)
		}
		var back Table
		if err := json.Unmarshal(b, &back); err != nil || back.Hash() != table.Hash() || hashes[back.Hash()] {
			t.Errorf("%s: %v, hash %x, then %x; others %v", b, err, table.Hash(), back.Hash(), hashes)
		}
		hashes[back.Hash()] = true
		for _, c := range []struct {
			n       int
			hosts   []int
			cores   int
			crowded bool
		}{{4, nil, 0, false}, {4, nil, 4, false}, {4, nil, 3, true}, {4, []int{0, 0, 1, 1}, 2, false},
			{4, []int{0, 0, 0, 1}, 2, true}} {
			caps := Caps{Cores: c.cores}
			if got := back.Fits(c.n, c.hosts, caps); got != (c.crowded == measured) {
				t.Errorf("measured with too few processors: %v; %+v: fits %v", measured, c, got)
			}
			if !plain.Fits(c.n, c.hosts, caps) || !(*Table)(nil).Fits(c.n, c.hosts, caps) {
				t.Errorf("%+v: a table that was not measured does not fit", c)
			}
		}
	}
}

func FuzzTable(f *testing.F) {
	f.Add([]byte(`{"allreduce": [{"when": "mapped", "algo": "loadstore", "max_bytes": 5}], "barrier": []}`), 3, 4)
	f.Fuzz(func(t *testing.T, b []byte, n, count int) {
		var table Table
		if json.Unmarshal(b, &table) != nil || table.Hash() == 0 {
			return
		}
		for _, k := range Kinds() {
			s := Shape{Kind: k, Size: 64, Active: upTo(1 + n&63), Elem: 4, Count: count}
			if a := table.Choose(s, Caps{Cores: 2}); algos[a].makers[k] == nil || a.Requires() != Always {
				t.Fatalf("%v for %v of %s", a, k, b)
			}
		}
	})
}

// In a large job a rank exchanges parts with few others, each of which is a link, unless long ones
// would cross between hosts more than once. Jobs of up to 64 ranks are not large.
func TestLargeJobsHaveFewNeighbours(t *testing.T) {
	const n, perHost, most = 4096, 8, 32
	hosts := make([]int, n)
	for i := range hosts {
		hosts[i] = i / perHost
	}
	neighbours := func(s Shape, c Caps) (a Algo, peers int) {
		a = Choose(s, c)
		p, err := Build(a, s)
		if err != nil {
			t.Fatal(err)
		}
		met := map[int32]bool{}
		for _, step := range p.Steps {
			if step.Verb == Send || step.Verb == Recv {
				met[step.Peer] = true
			}
		}
		return a, len(met)
	}
	for _, c := range []struct {
		kind  Kind
		bytes int // of a part
	}{
		{AllGather, 1}, {AllGather, 8}, {AllGather, 32}, {AllGather, 256},
		{ReduceScatter, 4}, {ReduceScatter, 256}, {ReduceScatter, 4096},
	} {
		for _, rank := range []int{0, 9, n - 1} {
			s := Shape{Kind: c.kind, Size: n, Active: upTo(n), Rank: rank, Elem: 1, Count: c.bytes, Hosts: hosts}
			if a, peers := neighbours(s, Caps{}); peers > most {
				t.Errorf("%v of %d bytes a rank: rank %d of %d has %d neighbours with %v, want at most %d", c.kind,
					c.bytes, rank, n, peers, a, most)
			}
		}
	}
	long := Shape{Kind: AllGather, Size: n, Active: upTo(n), Elem: 1, Count: 64 << 10, Hosts: hosts}
	if a := Choose(long, Caps{}); a != Hierarchical {
		t.Errorf("long parts cross between hosts several times: %v", a)
	}
	for _, bytes := range []int{8, 1024, 64 << 10} {
		small := Shape{Kind: AllGather, Size: 64, Active: upTo(64), Elem: 1, Count: bytes, Hosts: hosts[:64]}
		if a := Choose(small, Caps{}); a != Hierarchical {
			t.Errorf("allgather of %d bytes a rank among 64 ranks: %v", bytes, a)
		}
		if small.Kind = ReduceScatter; small.Count <= 1024 {
			if a := Choose(small, Caps{}); a != Pairwise {
				t.Errorf("reducescatter of %d bytes a rank among 64 ranks: %v", bytes, a)
			}
		}
	}
}

// A job's ranks meet before they know of each other's hosts, and share processors as far as they
// know: stars need few rounds, and most ranks one link.
func TestLargeJobsMeetInStars(t *testing.T) {
	const place = 48 // bytes of a rank
	for _, n := range []int{65, 1024, 1366, 4096} {
		s := Shape{Kind: AllGather, Size: n, Active: upTo(n), Elem: 1, Count: place}
		if a := Choose(s, Caps{Cores: 1}); a != Stars {
			t.Errorf("%d ranks meet by %v, want %v", n, a, Stars)
		}
	}
}
