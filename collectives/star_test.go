package collectives

import (
	"slices"
	"testing"
)

// The neighbours of all members are a tree: every member but the lowest has a center that names it,
// and none has many.
func TestStarNeighboursAreATree(t *testing.T) {
	for _, n := range []int{1, 2, 3, 17, starRanks, starRanks + 1, 100, 1000} {
		var members []int
		for i := range n {
			members = append(members, 3*i+1)
		}
		links, most := 0, 0
		for at, slot := range members {
			center, others := StarNeighbours(members, at)
			if (center < 0) != (at == 0) {
				t.Fatalf("%d members: the center of number %d is %d", n, at, center)
			}
			for _, o := range others {
				i := slices.Index(members, o)
				if i < 0 {
					t.Fatalf("%d members: %d has the neighbour %d, which is none", n, slot, o)
				}
				if c, _ := StarNeighbours(members, i); c != slot {
					t.Errorf("%d members: %d sends to %d, not to %d", n, o, c, slot)
				}
			}
			links, most = links+len(others), max(most, len(others))
		}
		if links != n-1 {
			t.Errorf("%d members have %d links, want %d", n, links, n-1)
		}
		if n > starRanks && most > 2*starsWidth(n) {
			t.Errorf("of %d members one has %d neighbours", n, most)
		}
	}
}
