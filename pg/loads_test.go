package pg

import (
	"fmt"
	"testing"

	"tutti/collectives"
)

// A rank maps the memory that its plan loads, and no other: of a gather or a reduce the root alone
// maps anything, of a broadcast or a scatter all others map the root's. Whose memory is mapped
// waits for whoever maps it.
func TestDirectPlansLoadWhatTheyNeed(t *testing.T) {
	const n, root = 3, 1
	others := func(rank int) (all []int) {
		for r := range n {
			if r != rank {
				all = append(all, r)
			}
		}
		return all
	}
	for kind, want := range map[collectives.Kind]func(rank int) (in, out []int){
		collectives.AllReduce:     func(rank int) (in, out []int) { return others(rank), others(rank) },
		collectives.ReduceScatter: func(rank int) (in, out []int) { return others(rank), nil },
		collectives.AllGather:     func(rank int) (in, out []int) { return others(rank), nil },
		collectives.AllGatherV:    func(rank int) (in, out []int) { return others(rank), nil },
		collectives.AllToAll:      func(rank int) (in, out []int) { return others(rank), nil },
		collectives.Reduce: func(rank int) (in, out []int) {
			if rank == root {
				return others(rank), nil
			}
			return nil, nil
		},
		collectives.Gather: func(rank int) (in, out []int) {
			if rank == root {
				return others(rank), nil
			}
			return nil, nil
		},
		collectives.Broadcast: func(rank int) (in, out []int) {
			if rank != root {
				return []int{root}, nil
			}
			return nil, nil
		},
		collectives.Scatter: func(rank int) (in, out []int) {
			if rank != root {
				return []int{root}, nil
			}
			return nil, nil
		},
	} {
		for rank := range n {
			plan, err := collectives.Build(collectives.Direct, collectives.Shape{Kind: kind, Size: n, Active: upTo(n), Rank: rank, Root: root, Elem: 4, Count: 1000,
				Counts: []int{1000, 2000, 3000}})
			if err != nil {
				t.Fatal(err)
			}
			var in, out []int
			for _, l := range compile(plan).loads {
				if l.in {
					in = append(in, l.slot)
				}
				if l.out {
					out = append(out, l.slot)
				}
			}
			if wantIn, wantOut := want(rank); fmt.Sprint(in, out) != fmt.Sprint(wantIn, wantOut) {
				t.Errorf("%v at rank %d loads In of %v and Out of %v, want %v and %v", kind, rank, in, out, wantIn, wantOut)
			}
		}
	}
}
