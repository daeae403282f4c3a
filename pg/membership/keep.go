package membership

import (
	"cmp"
	"slices"
)

// Keep returns the members that stay when some pairs cannot reach each other: a large set whose
// members all reach each other. While it contains a missing pair, it drops the member that reaches
// the fewest of the others; of several, the one with the highest rank. Afterwards it takes dropped
// members back, the lowest rank first, if they reach all that are left. (The largest such set is a
// maximum clique, which is infeasible for many ranks; this greedy choice finds it for common
// failures: a dead card, a host cut off, a partition.) So each dropped member cannot reach one that
// stays, and of two that miss only each other exactly one is dropped. The result does not depend on
// the order of members, of pairs, or within a pair. Pairs that contain other ranks, or one rank
// twice, are ignored. The result is ascending, belongs to the caller, and is not empty if members
// is not.
func Keep(members []int, missing [][2]int) []int {
	kept := slices.Clone(members)
	slices.Sort(kept)
	kept = slices.Compact(kept)
	pairs := make([][2]int, 0, len(missing)) // of indices in kept, the lower first
	for _, e := range missing {
		a, okA := slices.BinarySearch(kept, min(e[0], e[1]))
		b, okB := slices.BinarySearch(kept, max(e[0], e[1]))
		if okA && okB && a != b {
			pairs = append(pairs, [2]int{a, b})
		}
	}
	slices.SortFunc(pairs, comparePairs)
	lost := make([][]int, len(kept)) // the others that each cannot reach
	for _, p := range slices.Compact(pairs) {
		lost[p[0]], lost[p[1]] = append(lost[p[0]], p[1]), append(lost[p[1]], p[0])
	}
	broken := make([]int, len(kept)) // number of missing links to those left; -1: dropped
	for i := range lost {
		broken[i] = len(lost[i])
	}
	for {
		worst := 0
		for i := range broken {
			if broken[i] >= broken[worst] {
				worst = i
			}
		}
		if len(kept) == 0 || broken[worst] <= 0 {
			break
		}
		for _, i := range lost[worst] {
			if broken[i] > 0 {
				broken[i]--
			}
		}
		broken[worst] = -1
	}
	for i := range broken {
		if !slices.ContainsFunc(lost[i], func(o int) bool { return broken[o] >= 0 }) {
			broken[i] = 0
		}
	}
	n := 0
	for i, r := range kept {
		if broken[i] >= 0 {
			kept[n] = r
			n++
		}
	}
	return kept[:n]
}

func comparePairs(a, b [2]int) int { return cmp.Or(cmp.Compare(a[0], b[0]), cmp.Compare(a[1], b[1])) }
