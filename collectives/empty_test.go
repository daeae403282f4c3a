package collectives

import (
	"fmt"
	"slices"
	"testing"
)

// TestEmptyCollectivesAreBarriers runs every algorithm of every kind over nothing: no rank leaves
// before all have entered (Interpret checks it).
func TestEmptyCollectivesAreBarriers(t *testing.T) {
	for _, k := range Kinds() {
		for _, a := range Algorithms(k) {
			for _, n := range []int{1, 2, 3, 4, 5, 7, 8, 13, 32} {
				s := Shape{Kind: k, Elem: 4, Size: n + 1}
				for slot := range n + 1 { // with a hole
					if slot != n/2 || n == 1 && slot != 1 {
						s.Active = append(s.Active, slot)
					}
				}
				s.Active = s.Active[:n]
				s.Root = s.Active[n-1]
				s.Counts = make([]int, n+1)
				c := call{algo: a, shape: s}
				if k == AllToAllV {
					c.sent = slices.Repeat([][]int{make([]int, n)}, n)
				}
				for seed := range uint64(4) {
					c.how = Schedule{Seed: seed, Eager: seed%2 == 0, Late: seed/2 == 0}
					if err := c.run(); err != nil {
						t.Fatalf("%v: %v", c, err)
					}
				}
			}
		}
	}
}

// TestEmptyPartsAreSent: if each rank alone knows the lengths of its parts, every rank gets a
// message for each part that it is to receive, empty or not.
func TestEmptyPartsAreSent(t *testing.T) {
	count := func(p *Plan, v Verb, peer int) (n int) {
		for i := range p.Steps {
			s := &p.Steps[i]
			said := s.Verb == v || v == Send && s.Verb == Signal || v == Recv && s.Verb == WaitSignal
			if said && int(s.Peer) == peer {
				n++
			}
		}
		return n
	}
	for _, k := range []Kind{AllGatherV, AllToAllV} {
		for _, a := range Algorithms(k) {
			for _, n := range []int{2, 3, 5, 8} {
				for zero := range n {
					counts := slices.Repeat([]int{3}, n)
					counts[zero] = 0
					all := make([]int, n)
					for i := range all {
						all[i] = i
					}
					heard := 0
					for r := range n {
						own := slices.Clone(counts)
						own[r] = counts[r]
						p, err := Build(a, Shape{Kind: k, Elem: 4, Size: n, Active: all, Rank: r, Counts: own,
							RecvCounts: own})
						if err != nil {
							t.Fatal(err)
						}
						what := fmt.Sprintf("%v %v, %d ranks, nothing of rank %d: rank %d", k, a, n, zero, r)
						if count(p, Send, (r+1)%n) == 0 || count(p, Recv, (r+n-1)%n) == 0 {
							t.Errorf("%s does not talk to its neighbours:\n%v", what, p)
						}
						heard += count(p, Recv, zero)
						if k == AllToAllV {
							for peer := range n {
								if peer != r && (count(p, Send, peer) != 1 || count(p, Recv, peer) != 1) {
									t.Errorf("%s and rank %d: want one message each way\n%v", what, peer, p)
								}
							}
						}
					}
					if heard == 0 {
						t.Errorf("%v %v, %d ranks: no rank hears rank %d", k, a, n, zero)
					}
				}
			}
		}
	}
}
