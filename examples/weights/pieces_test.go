package main

import "testing"

// Every weight of every part is fetched once, from its shard.
func TestEveryWeightIsFetchedOnce(t *testing.T) {
	for _, n := range []int{12, 1200, 12 * piece, 12*piece + 12} {
		for shards := 1; shards <= 4; shards++ {
			m := manifest{Weights: n / shards * shards, Shards: shards}
			seen := make([]bool, m.Weights)
			for parts := 1; parts <= 3; parts++ {
				clear(seen)
				for i := range parts {
					from, to := m.span(i, parts)
					if i == parts-1 {
						to = m.Weights
					}
					for _, p := range pieces(m, from, to) {
						a, b := m.span(p.shard, shards)
						if p.from < a || p.to > b || p.off != int64(p.from-a) || p.to-p.from > piece {
							t.Fatal(m, parts, i, p)
						}
						for w := p.from; w < p.to; w++ {
							if seen[w] {
								t.Fatal(m, parts, i, p, w, "twice")
							}
							seen[w] = true
						}
					}
				}
				for w, ok := range seen {
					if !ok {
						t.Fatal(m, parts, w, "never")
					}
				}
			}
		}
	}
}
