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

func TestParseBytes(t *testing.T) {
	for text, want := range map[string]int{"64M": 64 << 20, "7": 7, "1.5G": 0, "1xG": 0, "9999999999G": 0, "-1": 0,
		"G": 0} {
		if n, err := parseBytes(text); n != want || (err == nil) != (want > 0) {
			t.Errorf("%s: %d, %v", text, n, err)
		}
	}
}
