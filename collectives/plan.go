package collectives

import "fmt"

// Kind names a collective.
type Kind uint8

// The collectives. What In and Out hold, per kind (P = one part of Count elements; the parts of a
// buffer are numbered by slot, and the part of an inactive slot is never read nor written):
//
//	AllReduce      In: Count elements      Out: Count elements, may be the same memory as In
//	ReduceScatter  In: Size parts          Out: one part
//	AllGather      In: one part            Out: Size parts (In may be Out's own part)
//	AllToAll       In: Size parts          Out: Size parts, no overlap
//	Broadcast      In at the root: Count   Out elsewhere: Count (the root's Out is In)
//	Reduce         In: Count               Out at the root: Count, may be In
//	Gather         In: one part            Out at the root: Size parts (In may be its own part)
//	Scatter        In at the root: parts   Out: one part (may be In's own part)
//	Barrier        nothing
//	AllGatherV     In: Counts[Rank]        Out: parts of Counts[slot] elements, packed
//	AllToAllV      In: parts of Counts[slot], packed; Out: parts of RecvCounts[slot], packed
const (
	AllReduce Kind = iota + 1
	ReduceScatter
	AllGather
	AllToAll
	Broadcast
	Reduce
	Gather
	Scatter
	Barrier
	AllGatherV
	AllToAllV
	numKinds
)

var kindNames = [numKinds]string{AllReduce: "allreduce", ReduceScatter: "reducescatter", AllGather: "allgather",
	AllToAll:  "alltoall",
	Broadcast: "broadcast", Reduce: "reduce", Gather: "gather", Scatter: "scatter", Barrier: "barrier",
	AllGatherV: "allgatherv", AllToAllV: "alltoallv"}

// Valid reports whether k is one of the kinds above.
func (k Kind) Valid() bool { return k > 0 && k < numKinds }

// String returns the name that the command line uses.
func (k Kind) String() string {
	if !k.Valid() {
		return fmt.Sprintf("kind(%d)", uint8(k))
	}
	return kindNames[k]
}

// Kinds returns every kind, in the order of their numbers.
func Kinds() []Kind {
	var all []Kind
	for k := Kind(1); k < numKinds; k++ {
		all = append(all, k)
	}
	return all
}

// Shape is everything that one rank's plan depends on. All ranks of a call have the same Shape but
// for Rank (and, in AllToAllV, Counts and RecvCounts).
type Shape struct {
	Kind       Kind
	Size       int   // slots of the group, active or not
	Active     []int // the active slots, ascending; never empty
	Rank       int   // this rank's slot; active
	Root       int   // slot of the root, for the kinds that have one; active
	Elem       int   // bytes of one element
	Count      int   // elements of the vector or of one part, see Kind
	Counts     []int // AllGatherV, AllToAllV: elements by slot, length Size
	RecvCounts []int // AllToAllV: elements by slot, length Size
	Hosts      []int // host number of Active[i], for hierarchical plans; nil: one host
	Chunk      int   // pipelining grain in bytes, 0: DefaultChunk
}

// Buf names one of the memories that a plan works on.
type Buf uint8

// The memories of a plan. PeerIn and PeerOut are the In and Out of Ref.Peer, loaded where they are
// and never stored to: only plans of direct algorithms use them, and only after every rank has
// entered the operation. A rank that has read them sends something afterwards: before that Send the
// runner makes sure that their owner was still in the operation.
const (
	In Buf = iota
	Out
	Tmp
	PeerIn
	PeerOut
)

// Ref is a byte range. Its address is the start of part Part of Buf, plus Off. Buffers without
// parts, and Tmp, have the one part 0.
type Ref struct {
	Buf  Buf
	Peer int32 // slot of the owner, for PeerIn and PeerOut; else 0
	Part int32
	Off  int
	Len  int
}

// Verb says what a Step does.
type Verb uint8

// The verbs.
//
// Send hands Src to Peer; it may block until Peer has posted the matching Recv (plans must be free
// of deadlock under that reading), and when it is done Src may be overwritten. Recv posts Dst for
// the next message of Peer and does not block; the n-th Recv from a peer gets its n-th Send. Send
// and Recv with Len 0 are pure signals. Copy copies Src to Dst; where both are the same memory it
// does nothing. Combine folds Srcs, in their order, into Dst.
const (
	Send Verb = iota + 1
	Recv
	Copy
	Combine
)

// Step is one instruction. A rank runs its steps in order; before a step, everything in Needs has
// completed; at the plan's end every Recv has completed.
type Step struct {
	Verb  Verb
	Peer  int32 // Send, Recv: slot of the other side
	Final bool  // Combine: the last one over this range (an average divides here)
	// Recv: Dst is in Tmp and read by exactly one later step, so a runner may lend the message to
	// it instead of copying
	Once  bool
	Dst   Ref     // Recv, Copy, Combine
	Src   Ref     // Send, Copy
	Srcs  []Ref   // Combine, at least one; never overlapping Dst but as exactly the same range
	Needs []int32 // indices of earlier Recv steps whose data (or signal) this step depends on
}

// Plan is what one rank does in one collective: data, not code. It is immutable and may be shared.
type Plan struct {
	Shape  Shape
	Algo   Algo
	Steps  []Step
	Tmp    int  // bytes of scratch memory
	Direct bool // uses PeerIn or PeerOut
}
