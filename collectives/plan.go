package collectives

import "fmt"

// Kind names a collective.
type Kind uint8

// The collectives, with the contents of In and Out of each (P = one part of Count elements; the
// parts of a buffer are numbered by slot, and the part of an inactive slot is never read nor
// written):
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

// String returns the name of the collective.
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

// Shape holds everything that one rank's plan depends on. All ranks of a call have equal Shapes
// except for Rank (and, in AllToAllV, Counts and RecvCounts).
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

// Buf names one of the memories of a plan.
type Buf uint8

// The memories of a plan. PeerIn, PeerOut and PeerTmp are memories of Ref.Peer. Only LoadStore
// plans load PeerIn and PeerOut, only OneSided plans put into PeerOut and PeerTmp, and both only
// after every rank has entered the operation. A rank that has loaded sends a message afterwards:
// before that Send the runner checks that the owner was still in the operation.
const (
	In Buf = iota
	Out
	Tmp
	PeerIn
	PeerOut
	PeerTmp
)

// Remote reports whether b is a peer's memory.
func (b Buf) Remote() bool { return b >= PeerIn }

// Ref is a byte range. Its address is the start of part Part of Buf, plus Off. Buffers without
// parts, and Tmp, have only part 0.
type Ref struct {
	Buf  Buf
	Peer int32 // slot of the owner, if Buf is Remote; else 0
	Part int32
	Off  int
	Len  int
}

// Verb is the kind of a Step.
type Verb uint8

// The verbs.
//
// Send sends Src to Peer; it may wait until Peer has posted the matching Recv (plans must be free
// of deadlock even then), and when it has completed Src may be overwritten. Recv posts Dst for the
// next message of Peer, and completes when it has arrived; the n-th Recv from a peer gets its n-th
// Send. Send and Recv with Len 0 are pure signals. Copy copies Src to Dst; if both are the same
// memory it does nothing. ReduceInto combines Srcs, in their order, into Dst.
//
// Put writes Src into Dst, memory of Peer; it completes when the data is placed and visible to
// Peer. Signal adds one to a counter of this rank at Peer, and completes at once; the n-th
// WaitSignal for a peer completes when Peer's n-th Signal has arrived. After the WaitSignal the
// peer sees everything that the Signal needs.
const (
	Send Verb = iota + 1
	Recv
	Copy
	ReduceInto
	Put
	Signal
	WaitSignal
)

// Late reports whether a runner only begins a step of this verb, and a peer or the network
// completes it.
func (v Verb) Late() bool { return v == Recv || v == Put || v == WaitSignal }

// Step is a node of a plan's graph. It may begin when everything in Needs has completed,
// independently of earlier steps of the plan; but Sends to one peer begin in the order of the plan,
// as do Recvs from one peer, Signals to one and WaitSignals for one. A plan is complete when all
// its steps are. Two steps that use the same bytes, one of them writing, are ordered by Needs
// alone, directly or indirectly.
//
// The list of steps is in an order that the graph allows. A runner that begins the steps in this
// order, and waits for all except the Late verbs, does not deadlock.
type Step struct {
	Verb  Verb
	Peer  int32 // Send, Recv, Put, Signal, WaitSignal: slot of the other side
	Final bool  // ReduceInto: the last one over this range (an average divides here)
	// Recv: Dst is in Tmp and read by exactly one later ReduceInto, so that a runner may lend the
	// message to it instead of copying.
	Once  bool
	Dst   Ref     // Recv, Copy, ReduceInto, Put
	Src   Ref     // Send, Copy, Put
	Srcs  []Ref   // ReduceInto, at least one; each is Dst or disjoint from it
	Needs []int32 // indices of earlier steps, ascending
}

// Plan is the work of one rank in one collective, as data. It is immutable and may be shared.
type Plan struct {
	Shape     Shape
	Algo      Algo
	Steps     []Step
	Tmp       int  // bytes of scratch memory
	LoadStore bool // loads PeerIn or PeerOut

	OneSided bool // puts into PeerOut or PeerTmp
}
