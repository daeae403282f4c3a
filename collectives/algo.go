package collectives

import (
	"errors"
	"fmt"
	"math"
	"strings"
)

// Algo names a family of plans.
type Algo uint8

// The algorithms. doc.go describes each, with its origin and its order of reduction.
const (
	Auto Algo = iota // Choose decides
	// All messages at once, each from the rank that has the data straight to the one that needs it.
	OneShot
	LoadStore // loads from the peers' mapped memory
	// Every rank reduces one part straight from all sources, then shares it; pipelined in chunks.
	TwoShot
	Pairwise      // one part from each peer in rotated rounds
	Doubling      // recursive doubling
	Halving       // recursive halving, and for an allreduce then doubling (Rabenseifner)
	Ring          // n-1 rounds between neighbours
	Tree          // binomial tree, pipelined in chunks
	Chain         // chain, pipelined in chunks
	Bruck         // ceil(log2 n) messages, each of many parts
	Dissemination // ceil(log2 n) rounds of signals
	Hierarchical  // within each host, between hosts, within each host
	OneSided      // puts into the peers' memory, and signals
	Star          // to the lowest rank, and back
	Stars         // two levels of stars
	numAlgos
)

// plans are the functions of one algorithm that build plans, by kind. They run with at least two
// active ranks and some data.
type plans [numKinds]func(*builder)

// algos describes the algorithms. DefaultTable has the rules by which they are chosen.
var algos = [numAlgos]struct {
	name     string
	former   string    // an old name that programs and tuning files may contain
	requires Condition // under which it can run: Always, IfMapped or IfPuts
	onePass  bool      // every element is combined once, from all ranks; else partial results travel
	makers   plans
}{
	Auto: {name: "auto"},
	OneShot: {
		name: "oneshot", former: "flat", onePass: true,
		makers: plans{
			AllReduce: oneShotAllReduce, ReduceScatter: pairwiseReduceScatter, AllGather: oneShotAllGather,
			AllToAll: oneShotAllToAll, Broadcast: oneShotBroadcast, Reduce: oneShotReduce, Gather: oneShotGather,
			Scatter: oneShotScatter, Barrier: oneShotBarrier, AllGatherV: oneShotAllGather,
			AllToAllV: oneShotAllToAll,
		},
	},
	LoadStore: {
		name: "loadstore", former: "direct", requires: IfMapped, onePass: true,
		makers: plans{
			AllReduce: loadStoreAllReduce, ReduceScatter: loadStoreReduceScatter, AllGather: loadStoreAllGather,
			AllToAll: loadStoreAllToAll, Broadcast: loadStoreBroadcast, Reduce: loadStoreReduce,
			Gather: loadStoreGather, Scatter: loadStoreScatter, AllGatherV: loadStoreAllGather,
		},
	},
	TwoShot: {
		name: "twoshot", onePass: true,
		makers: plans{
			AllReduce: twoShotAllReduce, Broadcast: twoShotBroadcast, Reduce: twoShotReduce,
		},
	},
	Pairwise: {
		name: "pairwise", onePass: true,
		makers: plans{
			ReduceScatter: pairwiseReduceScatter, AllGather: pairwiseAllGather, AllToAll: pairwiseAllToAll,
			AllGatherV: pairwiseAllGather, AllToAllV: pairwiseAllToAll,
		},
	},
	Doubling: {
		name: "doubling",
		makers: plans{
			AllReduce: doublingAllReduce,
		},
	},
	Halving: {
		name: "halving",
		makers: plans{
			AllReduce: halvingAllReduce, ReduceScatter: halvingReduceScatter,
		},
	},
	Ring: {
		name: "ring",
		makers: plans{
			AllReduce: ringAllReduce, ReduceScatter: ringReduceScatter, AllGather: ringAllGather,
			AllGatherV: ringAllGather,
		},
	},
	Tree: {
		name: "tree",
		makers: plans{
			AllReduce: treeAllReduce, Broadcast: treeBroadcast, Reduce: treeReduce, Gather: treeGather,
			Scatter: treeScatter, Barrier: treeBarrier,
		},
	},
	Chain: {
		name: "chain",
		makers: plans{
			Broadcast: chainBroadcast, Reduce: chainReduce,
		},
	},
	Bruck: {
		name: "bruck",
		makers: plans{
			AllGather: bruckAllGather, AllToAll: bruckAllToAll,
		},
	},
	Dissemination: {
		name: "dissemination",
		makers: plans{
			Barrier: disseminationBarrier,
		},
	},
	Hierarchical: {
		name: "hierarchical",
		makers: plans{
			AllReduce: hierAllReduce, AllGather: hierAllGather, Broadcast: hierBroadcast, Reduce: hierReduce,
			Barrier: hierBarrier, AllGatherV: hierAllGather,
		},
	},
	OneSided: {
		name: "onesided", requires: IfPuts, onePass: true,
		makers: plans{
			AllReduce: oneSidedAllReduce, AllGather: oneSidedAllGather, AllToAll: oneSidedAllToAll,
			Broadcast: oneSidedBroadcast, Gather: oneSidedGather, Scatter: oneSidedScatter,
			AllGatherV: oneSidedAllGather,
		},
	},
	Star: {
		name: "star", onePass: true,
		makers: plans{
			AllReduce: starAllReduce, AllGather: starAllGather, Barrier: starBarrier,
		},
	},
	Stars: {
		name: "stars",
		makers: plans{
			AllReduce: starsAllReduce, AllGather: starsAllGather, Barrier: starsBarrier,
		},
	},
}

// Requires returns the condition under which the algorithm can run: Always, IfMapped or IfPuts.
func (a Algo) Requires() Condition {
	if !a.Valid() {
		return Always
	}
	return algos[a].requires
}

// OnePass reports whether an algorithm combines every element once, from all ranks. In the others
// partial results travel.
func (a Algo) OnePass() bool { return a.Valid() && algos[a].onePass }

// Valid reports whether a is one of the algorithms above, Auto included.
func (a Algo) Valid() bool { return a < numAlgos }

// String returns the algorithm's name.
func (a Algo) String() string {
	if !a.Valid() {
		return fmt.Sprintf("algo(%d)", uint8(a))
	}
	return algos[a].name
}

// ParseAlgo returns the algorithm of a name, which may be a former one. Its error lists the present
// names.
func ParseAlgo(name string) (Algo, error) {
	var names []string
	for a := range algos {
		if row := &algos[a]; name == row.name || name != "" && name == row.former {
			return Algo(a), nil
		}
		names = append(names, algos[a].name)
	}
	return Auto, fmt.Errorf("collectives: no algorithm %q; there are %s", name, strings.Join(names, ", "))
}

// ParseKind returns the collective of a name. Its error lists the valid names.
func ParseKind(name string) (Kind, error) {
	for k := Kind(1); k < numKinds; k++ {
		if kindNames[k] == name {
			return k, nil
		}
	}
	return 0, fmt.Errorf("collectives: no collective %q; there are %s", name, strings.Join(kindNames[1:], ", "))
}

// Algorithms returns the algorithms that have a plan for k, in numerical order. Each works for any
// number of ranks.
func Algorithms(k Kind) []Algo {
	var all []Algo
	if k.Valid() {
		for a := range algos {
			if algos[a].makers[k] != nil {
				all = append(all, Algo(a))
			}
		}
	}
	return all
}

const (
	// DefaultChunk is the pipelining grain in bytes of a Shape without one: large enough that a
	// message's fixed cost is small, and small enough that the chunks in flight stay in a core's
	// private cache.
	DefaultChunk = 64 << 10
	// MaxChunk bounds Shape.Chunk, and with it the scratch memory of a plan.
	MaxChunk = 1 << 30
	// MaxSize bounds the slots of a group.
	MaxSize = 1 << 20
	// MaxSteps bounds the steps of one plan. Longer vectors must be cut into blocks.
	MaxSteps = 1 << 18

	maxBytes = math.MaxInt >> 7 // of one buffer, so that offsets can be added without overflow
)

// ErrShape is wrapped by all errors about invalid shapes.
var ErrShape = errors.New("bad shape")

// ErrTooLong is wrapped by the error for a plan of more than MaxSteps steps.
var ErrTooLong = errors.New("plan too long")

func (s Shape) bad(format string, args ...any) error {
	return fmt.Errorf("collectives: %s of rank %d: %w: %s", s.Kind, s.Rank, ErrShape, fmt.Sprintf(format, args...))
}

// index returns the position of slot in s.Active, or -1.
func (s Shape) index(slot int) int {
	lo, hi := 0, len(s.Active)
	for lo < hi {
		if m := (lo + hi) / 2; s.Active[m] < slot {
			lo = m + 1
		} else {
			hi = m
		}
	}
	if lo < len(s.Active) && s.Active[lo] == slot {
		return lo
	}
	return -1
}

// rooted reports whether the kind has a root.
func (k Kind) rooted() bool { return k == Broadcast || k == Reduce || k == Gather || k == Scatter }

// Reduces reports whether the kind combines elements, and needs a reduction.
func (k Kind) Reduces() bool { return k == AllReduce || k == ReduceScatter || k == Reduce }

// Validate checks s, which may come from anywhere. The error wraps ErrShape and names the field.
func (s Shape) Validate() error {
	if !s.Kind.Valid() {
		return s.bad("Kind %d is none", uint8(s.Kind))
	}
	if s.Size < 1 || s.Size > MaxSize {
		return s.bad("Size %d, want 1..%d", s.Size, MaxSize)
	}
	if len(s.Active) == 0 {
		return s.bad("no slot is active")
	}
	for i, a := range s.Active {
		if a < 0 || a >= s.Size || i > 0 && a <= s.Active[i-1] {
			return s.bad("Active[%d] is %d, want ascending slots below %d", i, a, s.Size)
		}
	}
	if s.index(s.Rank) < 0 {
		return s.bad("Rank is not an active slot")
	}
	if s.Kind.rooted() && s.index(s.Root) < 0 {
		return s.bad("Root %d is not an active slot", s.Root)
	}
	if s.Chunk < 0 || s.Chunk > MaxChunk {
		return s.bad("Chunk %d, want 0 (%d) to %d bytes", s.Chunk, DefaultChunk, MaxChunk)
	}
	if s.Hosts != nil && len(s.Hosts) != len(s.Active) {
		return s.bad("%d Hosts for %d active slots", len(s.Hosts), len(s.Active))
	}
	if s.Kind == Barrier {
		return nil
	}
	if s.Elem < 1 || s.Elem > MaxChunk {
		return s.bad("Elem %d, want 1..%d bytes", s.Elem, MaxChunk)
	}
	counts := func(name string, c []int) error {
		if len(c) != s.Size {
			return s.bad("%d %s for %d slots", len(c), name, s.Size)
		}
		left := maxBytes / s.Elem
		for i, n := range c {
			if n < 0 || n > left {
				return s.bad("%s[%d] is %d; want none negative and less than %d bytes in all", name, i, n, maxBytes)
			}
			left -= n
		}
		return nil
	}
	switch s.Kind {
	case AllToAllV:
		if err := counts("RecvCounts", s.RecvCounts); err != nil {
			return err
		}
		if err := counts("Counts", s.Counts); err != nil {
			return err
		}
		if s.Counts[s.Rank] != s.RecvCounts[s.Rank] {
			return s.bad("Counts[%d] is %d but RecvCounts[%d] is %d: a rank sends itself what it receives from itself",
				s.Rank, s.Counts[s.Rank], s.Rank, s.RecvCounts[s.Rank])
		}
		return nil
	case AllGatherV:
		return counts("Counts", s.Counts)
	}
	if s.Count < 0 || s.Count > maxBytes/s.Elem/s.Size {
		return s.bad("Count %d of %d bytes in %d parts, want at most %d bytes in all", s.Count, s.Elem, s.Size,
			maxBytes)
	}
	return nil
}

// varies reports whether the parts of a kind may differ in length.
func (k Kind) varies() bool { return k == AllGatherV || k == AllToAllV }

// Empty reports whether all ranks know that there is no data: such a call is a barrier. It is false
// for an AllToAllV, of which no rank knows that.
func (s Shape) Empty() bool {
	switch s.Kind {
	case Barrier:
		return true
	case AllToAllV:
		return false
	case AllGatherV:
		for _, slot := range s.Active {
			if s.Counts[slot] > 0 {
				return false
			}
		}
		return true
	}
	return s.Count == 0
}

// Parts returns the number of parts of buffer In or Out on the rank slot; 0 if the rank has no such
// buffer.
func (s Shape) Parts(buf Buf, slot int) int {
	all, one := s.Size, 1
	if s.Kind.rooted() && slot != s.Root { // a rank other than the root
		all = 0
		if s.Kind == Reduce && buf == Out || s.Kind == Broadcast && buf == In {
			one = 0
		}
	}
	switch s.Kind {
	case AllReduce, Reduce:
		return one
	case Broadcast:
		if buf == Out && slot == s.Root {
			return 0
		}
		return one
	case ReduceScatter, Scatter:
		if buf == In {
			return all
		}
		return 1
	case AllGather, Gather, AllGatherV:
		if buf == In {
			return 1
		}
		return all
	case AllToAll, AllToAllV:
		return s.Size
	}
	return 0
}

// PartBytes returns the bytes of one part of buffer In or Out of the rank slot; 0 for other ranks'
// buffers of an AllToAllV, which are unknown.
func (s Shape) PartBytes(buf Buf, slot, part int) int {
	if part < 0 || part >= s.Parts(buf, slot) {
		return 0
	}
	switch {
	case s.Kind == AllGatherV && buf == In:
		return s.Counts[slot] * s.Elem
	case s.Kind == AllGatherV:
		return s.Counts[part] * s.Elem
	case s.Kind == AllToAllV && slot != s.Rank:
		return 0
	case s.Kind == AllToAllV && buf == In:
		return s.Counts[part] * s.Elem
	case s.Kind == AllToAllV:
		return s.RecvCounts[part] * s.Elem
	}
	return s.Count * s.Elem
}

// Build makes the plan of s.Rank by algorithm a. It is a pure function: ranks with the same a and
// matching shapes get plans that match. Auto stands for Choose(s, Caps{}). The plan shares the
// slices of s, which must not change afterwards. Errors: ErrShape; ErrTooLong; or a has no plan for
// the kind (the text lists the algorithms that have).
func Build(a Algo, s Shape) (*Plan, error) {
	if err := s.Validate(); err != nil {
		return nil, err
	}
	if a == Auto {
		a = Choose(s, Caps{})
	}
	if !a.Valid() || algos[a].makers[s.Kind] == nil {
		return nil, fmt.Errorf("collectives: %s has no %s plan; it has %v", s.Kind, a, Algorithms(s.Kind))
	}
	b := newBuilder(a, s)
	switch {
	case b.n == 1:
		b.alone()
	case s.Empty() && s.Kind != Barrier: // with any algorithm
		b.meet(b.all)()
	default:
		algos[a].makers[s.Kind](b)
	}
	if b.err != nil {
		return nil, b.err
	}
	return b.plan, nil
}
