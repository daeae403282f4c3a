package exec

import (
	"fmt"
	"testing"

	"tutti/collectives"
)

// A rank maps only the memory that its plan loads: of a gather or a reduce only the root maps any,
// of a broadcast or a scatter all others map the root's. A rank whose memory is mapped waits for
// the ranks that map it.
func TestLoadStorePlansMapOnlyWhatTheyLoad(t *testing.T) {
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
			plan, err := collectives.Build(collectives.LoadStore, collectives.Shape{Kind: kind, Size: n,
				Active: []int{0, 1, 2}, Rank: rank, Root: root, Elem: 4, Count: 1000,
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
				t.Errorf("%v at rank %d loads In of %v and Out of %v, want %v and %v", kind, rank, in, out,
					wantIn, wantOut)
			}
		}
	}
}

// OnePass is correct for every rank's plan.
func TestOnePass(t *testing.T) {
	for _, k := range []collectives.Kind{collectives.AllReduce, collectives.Reduce, collectives.ReduceScatter} {
		for _, a := range collectives.Algorithms(k) {
			if !a.OnePass() {
				continue
			}
			for n := 2; n < 9; n++ {
				active := make([]int, n)
				for i := range active {
					active[i] = i
				}
				for rank := range n {
					p, err := collectives.Build(a, collectives.Shape{Kind: k, Size: n, Active: active,
						Rank: rank, Root: n / 2, Elem: 4, Count: 1001, Chunk: 512})
					if err != nil {
						t.Fatal(err)
					}
					for i, s := range p.Steps {
						if s.Verb == collectives.ReduceInto && (!s.Final || len(s.Srcs) != n) {
							t.Fatalf("%v %v: step %d of rank %d of %d combines %d sources",
								k, a, i, rank, n, len(s.Srcs))
						}
					}
				}
			}
		}
	}
}
