package collectives

// Caps is what the links between the ranks of a call can do. Every rank must pass Choose the same Caps, so they hold only what all
// ranks know to be true of all.
type Caps struct {
	Mapped       bool // every active rank's In and Out can be loaded and stored by all the others
	SharedMemory bool // all links are memory, none a wire
	Cores        int  // processors that the ranks of one host share; 0: as many as ranks
}

// A rule of the table below: it holds for up to ranks active ranks and up to bytes bytes (of the vector, or of all parts together where the
// kind has parts); 0 is no limit.
type rule struct {
	when  condition
	ranks int
	bytes int
	algo  Algo
}

type condition uint8

const (
	always  condition = iota
	mapped            // Caps.Mapped
	memory            // Caps.SharedMemory
	crowded           // more ranks on a host than processors: each round costs a wake-up, so few rounds win over few bytes
	levels            // several hosts, and several ranks on at least one
)

// The table: the first rule that holds decides. Its reasoning, by the costs a (one message), B (one byte moved) and g (one byte folded):
//
//   - flat has the fewest rounds, one, and moves and folds n-1 times the bytes: for a few KiB among few ranks nothing beats it.
//   - direct moves the fewest bytes of all, but takes a round to enter and one to leave: worth it as soon as copying a message costs more than
//     a round, at some KiB.
//   - doubling takes log2(n) rounds of all bytes: for short vectors of many ranks.
//   - twoshot takes two rounds, 2(n-1)/n of the bytes in and out, and each byte folded once; ring has the same bytes in 2(n-1) rounds, but only two
//     neighbours: it is for so many ranks that n-1 peers at once choke a wire. halving is in between.
//   - chain is the best broadcast of long vectors on links that carry both directions at once, tree of short ones.
var table = [numKinds][]rule{
	AllReduce: {
		{levels, 0, 8 << 10, Doubling},
		{levels, 0, 0, Hierarchical},
		{crowded, 8, 16 << 10, Flat},
		{always, 2, 16 << 10, Flat},
		{always, 4, 8 << 10, Flat},
		{mapped, 8, 2 << 10, Flat},
		{mapped, 0, 2 << 10, Doubling},
		{mapped, 0, 0, Direct},
		{always, 0, 16 << 10, Doubling},
		{always, 32, 0, TwoShot},
		{memory, 0, 0, TwoShot},
		{always, 0, 1 << 20, Halving},
		{always, 0, 0, Ring},
	},
	ReduceScatter: {
		{always, 8, 16 << 10, Pairwise},
		{mapped, 0, 0, Direct},
		{always, 32, 0, Pairwise},
		{memory, 0, 0, Pairwise},
		{always, 0, 1 << 20, Pairwise},
		{always, 0, 0, Ring},
	},
	AllGather: {
		{levels, 0, 0, Hierarchical},
		{always, 8, 16 << 10, Flat},
		{mapped, 0, 0, Direct},
		{always, 8, 0, Flat},
		{always, 0, 64 << 10, Bruck},
		{always, 64, 0, Pairwise},
		{always, 0, 0, Ring},
	},
	AllGatherV: {
		{levels, 0, 0, Hierarchical},
		{always, 8, 16 << 10, Flat},
		{mapped, 0, 0, Direct},
		{always, 8, 0, Flat},
		{always, 64, 0, Pairwise},
		{always, 0, 0, Ring},
	},
	AllToAll: {
		{always, 8, 16 << 10, Flat},
		{mapped, 0, 0, Direct},
		{always, 8, 0, Flat},
		{always, 0, 16 << 10, Bruck},
		{always, 0, 0, Pairwise},
	},
	AllToAllV: {
		{always, 8, 0, Flat},
		{always, 0, 0, Pairwise},
	},
	Broadcast: {
		{levels, 0, 0, Hierarchical},
		{always, 2, 16 << 10, Flat},
		{always, 4, 8 << 10, Flat},
		{mapped, 0, 16 << 10, Tree},
		{mapped, 0, 0, Direct},
		{always, 2, 0, Chain},
		{always, 0, 64 << 10, Tree},
		{always, 16, 0, TwoShot},
		{always, 0, 0, Chain},
	},
	Reduce: {
		{levels, 0, 0, Hierarchical},
		{always, 4, 16 << 10, Flat},
		{mapped, 0, 16 << 10, Tree},
		{mapped, 0, 0, Direct},
		{always, 2, 0, Flat},
		{always, 0, 64 << 10, Tree},
		{always, 32, 0, TwoShot},
		{always, 0, 0, Chain},
	},
	Gather: {
		{always, 8, 64 << 10, Flat},
		{mapped, 0, 0, Direct},
		{always, 32, 0, Flat},
		{always, 0, 64 << 10, Tree},
		{always, 0, 0, Flat},
	},
	Scatter: {
		{always, 8, 64 << 10, Flat},
		{mapped, 0, 0, Direct},
		{always, 32, 0, Flat},
		{always, 0, 64 << 10, Tree},
		{always, 0, 0, Flat},
	},
	Barrier: {
		{levels, 0, 0, Hierarchical},
		{always, 4, 0, Flat},
		{crowded, 16, 0, Flat},
		{always, 0, 0, Dissemination},
	},
}

// Choose returns the algorithm for a call, from one table. It looks only at what all ranks share: never at s.Rank, nor at the counts of
// an AllToAllV. It never returns Direct without c.Mapped. For a shape that Build refuses the answer means nothing.
func Choose(s Shape, c Caps) Algo {
	if !s.Kind.Valid() {
		return Auto
	}
	n := len(s.Active)
	total := s.Elem * s.Count
	switch s.Kind {
	case ReduceScatter, AllGather, AllToAll, Gather, Scatter:
		total *= n
	case AllGatherV:
		total = 0
		for _, k := range s.Counts {
			total += k * s.Elem
		}
	case AllToAllV, Barrier:
		total = 0
	}
	hosts, most := spread(s.Hosts, n)
	for _, r := range table[s.Kind] {
		var holds bool
		switch r.when {
		case always:
			holds = true
		case mapped:
			holds = c.Mapped
		case memory:
			holds = c.SharedMemory
		case crowded:
			holds = c.Cores > 0 && most > c.Cores
		case levels:
			holds = hosts > 1 && most > 1
		}
		if holds && (r.ranks == 0 || n <= r.ranks) && (r.bytes == 0 || total <= r.bytes) {
			return r.algo
		}
	}
	return Flat
}

// spread returns how many hosts there are and the most ranks that share one.
func spread(hosts []int, n int) (count, most int) {
	if hosts == nil {
		return 1, n
	}
	on := map[int]int{}
	for _, h := range hosts {
		on[h]++
		most = max(most, on[h])
	}
	return len(on), most
}
