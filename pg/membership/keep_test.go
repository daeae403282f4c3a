package membership

import (
	"math/rand/v2"
	"slices"
	"testing"

	"pgregory.net/rapid"
)

func TestKeepExamples(t *testing.T) {
	for _, c := range []struct {
		name    string
		members []int
		missing [][2]int
		want    []int
	}{
		{"no rank", nil, nil, []int{}},
		{"one", []int{5}, [][2]int{{5, 5}, {5, 6}}, []int{5}},
		{"all", []int{0, 1, 2}, nil, []int{0, 1, 2}},
		{"tie: the highest rank goes", []int{0, 1, 2}, [][2]int{{1, 2}}, []int{0, 1}},
		{"a dead card", []int{0, 1, 2, 3}, [][2]int{{0, 1}, {0, 2}, {0, 3}}, []int{1, 2, 3}},
		{"two ranks", []int{3, 7}, [][2]int{{7, 3}}, []int{3}},
		{"partition: the larger side", []int{0, 1, 2, 3, 4}, [][2]int{{0, 2}, {0, 3}, {0, 4}, {1, 2}, {1, 3}, {1, 4}},
			[]int{2, 3, 4}},
		{"partition in halves: the lower ranks", []int{0, 1, 2, 3}, [][2]int{{0, 2}, {0, 3}, {1, 2}, {1, 3}},
			[]int{0, 1}},
		{"a chain", []int{0, 1, 2}, [][2]int{{0, 1}, {1, 2}}, []int{0, 2}},
		{"all cut off from all", []int{1, 2, 3}, [][2]int{{1, 2}, {2, 3}, {1, 3}}, []int{1}},
		{"who went for the sake of others that go comes back", []int{0, 1, 2, 3, 4, 5},
			[][2]int{{0, 3}, {0, 4}, {1, 2}, {2, 3}, {2, 5}, {3, 5}, {4, 5}}, []int{0, 1, 5}},
		{"a pair counts once", []int{0, 1, 2, 3}, [][2]int{{0, 1}, {1, 0}, {0, 1}, {2, 3}, {2, 0}}, []int{0, 3}},
	} {
		if got := Keep(c.members, c.missing); !slices.Equal(got, c.want) {
			t.Errorf("%s: Keep(%v, %v) = %v, want %v", c.name, c.members, c.missing, got, c.want)
		}
	}
}

// bestSize is the size of the largest set of members that all reach each other, found the slow way.
func bestSize(members []int, missing [][2]int) int {
	best := 0
	for set := range 1 << len(members) {
		ok, size := true, 0
		for i, m := range members {
			if set>>i&1 == 0 {
				continue
			}
			size++
			for j, o := range members[:i] {
				ok = ok && (set>>j&1 == 0 || !slices.Contains(missing, [2]int{m, o}) &&
					!slices.Contains(missing, [2]int{o, m}))
			}
		}
		if ok {
			best = max(best, size)
		}
	}
	return best
}

func TestKeepProperties(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		members := rapid.SliceOfNDistinct(rapid.IntRange(0, 12), 0, 9, rapid.ID).Draw(t, "members")
		rank := rapid.IntRange(-1, 13)
		missing := rapid.SliceOfN(rapid.Custom(func(t *rapid.T) [2]int {
			return [2]int{rank.Draw(t, "a"),
				rank.Draw(t, "b")}
		}), 0, 20).Draw(t, "missing")
		in, inPairs := slices.Clone(members), slices.Clone(missing)
		kept := Keep(members, missing)
		if !slices.Equal(in, members) || !slices.Equal(inPairs, missing) {
			t.Fatal("its arguments were changed")
		}
		if !slices.IsSorted(kept) || len(slices.Compact(slices.Clone(kept))) != len(kept) {
			t.Fatalf("%v is not strictly ascending", kept)
		}
		if len(members) > 0 && len(kept) == 0 {
			t.Fatal("no rank is left")
		}
		for _, e := range missing {
			if e[0] == e[1] || !slices.Contains(members, e[0]) || !slices.Contains(members, e[1]) {
				continue
			}
			if slices.Contains(kept, e[0]) && slices.Contains(kept, e[1]) {
				t.Fatalf("%v has %d and %d, which cannot reach each other", kept, e[0], e[1])
			}
		}
		for _, k := range kept {
			if !slices.Contains(members, k) {
				t.Fatalf("%d is no member", k)
			}
		}
		for _, m := range members {
			if !slices.Contains(kept, m) && !slices.ContainsFunc(missing, func(e [2]int) bool {
				return e[0] == m && slices.Contains(kept, e[1]) || e[1] == m && slices.Contains(kept, e[0])
			}) {
				t.Fatalf("%d reaches all of %v, and is not in", m, kept)
			}
		}
		// Greedy removal of the worst keeps at least sum(1/(d+1)), which is at least n*n/(n+2e);
		// and never more than the best.
		if best := bestSize(members, missing); len(kept) > best {
			t.Fatalf("%v are %d, and %d is all that is possible", kept, len(kept), best)
		}
		edges := map[[2]int]bool{}
		for _, e := range missing {
			if e[0] != e[1] && slices.Contains(members, e[0]) && slices.Contains(members, e[1]) {
				edges[[2]int{min(e[0], e[1]), max(e[0], e[1])}] = true
			}
		}
		if n := len(members); n > 0 && len(kept)*(n+2*len(edges)) < n*n {
			t.Fatalf("of %d with %d links missing only %v", n, len(edges), kept)
		}
		// Order, direction and repetition make no difference, and what was kept is kept.
		r := rand.New(rand.NewPCG(rapid.Uint64().Draw(t, "order"), 1))
		r.Shuffle(len(in), func(i, j int) { in[i], in[j] = in[j], in[i] })
		for i, e := range inPairs {
			if r.IntN(2) == 0 {
				inPairs[i] = [2]int{e[1], e[0]}
			}
			if r.IntN(3) == 0 {
				inPairs = append(inPairs, e)
			}
		}
		r.Shuffle(len(inPairs), func(i, j int) { inPairs[i], inPairs[j] = inPairs[j], inPairs[i] })
		if again := Keep(in, inPairs); !slices.Equal(again, kept) {
			t.Fatalf("in another order %v, not %v", again, kept)
		}
		if again := Keep(kept, missing); !slices.Equal(again, kept) {
			t.Fatalf("of %v only %v", kept, again)
		}
	})
}

// Common failures are solved exactly: hosts that are cut off, cards that are dead.
func TestKeepIsOptimalForWholeHosts(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		n := rapid.IntRange(1, 10).Draw(t, "n")
		// Ranks on different sides cannot reach each other.
		sides := rapid.SliceOfN(rapid.IntRange(0, 2), n, n).Draw(t, "sides")
		var members []int
		var missing [][2]int
		for i := range n {
			members = append(members, i)
			for j := range i {
				if sides[i] != sides[j] {
					missing = append(missing, [2]int{i, j})
				}
			}
		}
		if kept := Keep(members, missing); len(kept) != bestSize(members, missing) {
			t.Fatalf("sides %v: kept %v", sides, kept)
		}
	})
}
