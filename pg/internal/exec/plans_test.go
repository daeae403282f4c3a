package exec

import (
	"fmt"
	"testing"

	"tutti/collectives"
	"tutti/kernels"
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

// A call is cut into few plans where one for long pieces has no more steps than one for short ones,
// and little scratch memory: each of a ring costs n-1 rounds.
func TestBlocksOfManyRanks(t *testing.T) {
	const n, perHost, part = 512, 8, 1 << 20
	topology := Topology{Size: n}
	for i := range n {
		topology.Active, topology.Hosts = append(topology.Active, i), append(topology.Hosts, i/perHost)
	}
	for _, c := range []struct {
		kind  collectives.Kind
		algo  collectives.Algo
		dtype kernels.DType
		want  int // plans
	}{
		{collectives.ReduceScatter, collectives.Ring, kernels.Float32, part / wireChunk},
		{collectives.AllGather, collectives.Hierarchical, kernels.Float32, part / wireChunk},
		{collectives.AllGather, collectives.Ring, kernels.BFloat16, part / wireChunk},
		{collectives.AllToAll, collectives.Pairwise, kernels.Float32, part / wireChunk},
		{collectives.Gather, collectives.OneShot, kernels.Float32, part / wireChunk},
		// Their scratch memory, or what holds float32 copies of small floats, grows with the parts.
		{collectives.ReduceScatter, collectives.Ring, kernels.BFloat16, n * part / VectorBlock},
		{collectives.ReduceScatter, collectives.Pairwise, kernels.Float32, n * part / VectorBlock},
		{collectives.ReduceScatter, collectives.Halving, kernels.Float32, n * part / VectorBlock},
		{collectives.AllGather, collectives.Bruck, kernels.Float32, n * part / VectorBlock},
		{collectives.Gather, collectives.Tree, kernels.Float32, n * part / VectorBlock},
	} {
		r := New(Config{})
		r.Settle(topology)
		elem := c.dtype.Size()
		r.Adopt(Call{Kind: c.kind, DType: c.dtype, Count: part / elem, Slots: n})
		block := r.blockOf(c.algo, elem)
		if plans := (part/elem + block - 1) / block; plans != c.want {
			t.Errorf("%v %v of %v is cut into %d plans, want %d", c.algo, c.kind, c.dtype, plans, c.want)
		}
		build := func(count int) *collectives.Plan {
			p, err := collectives.Build(c.algo, r.shape(c.kind, elem, count))
			if err != nil {
				t.Fatal(err)
			}
			return p
		}
		if p, short := build(block), build(1024); len(p.Steps) != len(short.Steps) || p.Tmp > 2*VectorBlock+n*64 {
			t.Errorf("%v %v of %v: a plan has %d steps, one of 1024 elements %d; its scratch memory has %d bytes",
				c.algo, c.kind, c.dtype, len(p.Steps), len(short.Steps), p.Tmp)
		}
	}
}
