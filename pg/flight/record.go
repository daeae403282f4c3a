package flight

import (
	"fmt"

	"tutti/collectives"
	"tutti/kernels"
)

// Call packs an operation into one word: kind, data type, reduction and algorithm take a byte each
// from the lowest, and the root (of a message, the peer) the upper half. The headers of messages
// carry it for comparison: there the algorithm is the forced one, and the root a slot of the group.
// In records the algorithm is the chosen one, and the root a rank of the job. Calls in packets have
// a mark instead of an algorithm.
type Call uint64

// These kinds are operations of a group that have no data of the program. They are collectives of
// small records, whose messages and records have these kinds instead.
const (
	Admit  collectives.Kind = 27
	Window collectives.Kind = 28 // NewWindow or Window.Refresh
	Split  collectives.Kind = 29
)

// Sends and receives are recorded as these kinds; their number is the tag.
const (
	Send collectives.Kind = 30
	Recv collectives.Kind = 31
)

const kinds = 32 // Call.Kind is below it, else invalid

// Pack makes a Call. root is a rank or -1.
func Pack(kind collectives.Kind, dtype kernels.DType, op kernels.Op, algo collectives.Algo, root int) Call {
	return Call(kind) | Call(dtype)<<8 | Call(op)<<16 | Call(algo)<<24 | Call(uint32(root))<<32
}

// Kind returns the collective, or Send or Recv.
func (c Call) Kind() collectives.Kind { return collectives.Kind(c) }

// DType returns the elements' type.
func (c Call) DType() kernels.DType { return kernels.DType(c >> 8) }

// Reduction returns the reduction, 0 if there is none.
func (c Call) Reduction() kernels.Op { return kernels.Op(c >> 16) }

// Algorithm returns the algorithm, if not Packets; Auto: not chosen yet, or not recorded.
func (c Call) Algorithm() collectives.Algo { return collectives.Algo(c >> 24) }

// Root returns the root, or the peer of a message; -1: any.
func (c Call) Root() int { return int(int32(c >> 32)) }

// With returns c with another algorithm.
func (c Call) With(a collectives.Algo) Call { return c&^(0xff<<24) | Call(a)<<24 }

// What a call in packets has in the place of an algorithm. Number step of the operations that
// prepare one has packetsPrepared - step.
const (
	inPackets       = 0xff
	packetsPrepared = 0xfe
	prepareSteps    = 2
)

// InPackets returns c as one that the ranks' devices do in packets, without messages of the hosts.
func (c Call) InPackets() Call { return c.With(inPackets) }

// PreparesPackets returns c, which the ranks' devices are to do in packets, as number step, 0 or 1,
// of the operations of the hosts that prepare it.
func (c Call) PreparesPackets(step int) Call { return c.With(packetsPrepared - collectives.Algo(step)) }

// Packets reports whether the ranks' devices do c in packets, or c prepares that.
func (c Call) Packets() bool { return c.Algorithm() > packetsPrepared-prepareSteps }

// Name returns the name of the kind.
func (c Call) Name() string {
	switch c.Kind() {
	case Admit:
		return "admit"
	case Window:
		return "window"
	case Split:
		return "split"
	case Send:
		return "send"
	case Recv:
		return "recv"
	}
	return c.Kind().String()
}

// bare reports whether the operation has no data of the program.
func (c Call) bare() bool {
	return c.Kind() == collectives.Barrier || c.Kind() >= Admit && c.Kind() <= Split
}

// Spell describes an operation by its number, its call, and its count: elements or, of an
// allgatherv, a hash of the counts. For example "allreduce #12 (float32 sum, 1024 elements, ring)".
func Spell(number uint64, c Call, count uint64) string {
	kind := c.Kind()
	if kind == Send || kind == Recv {
		peer, way := "any rank", "to"
		if kind == Recv {
			way = "from"
		}
		if r := c.Root(); r >= 0 {
			peer = fmt.Sprintf("rank %d", r)
		}
		tag := fmt.Sprint("tag ", number)
		if int64(number) < 0 {
			tag = "any tag"
		}
		return fmt.Sprintf("%s %s %s (%s, %d elements, %s)", c.Name(), way, peer, c.DType(), count, tag)
	}
	return fmt.Sprintf("%s #%d%s", c.Name(), number, details(c, count))
}

// Describe is Spell for a collective that has no number yet.
func Describe(c Call, count uint64) string { return c.Name() + details(c, count) }

func details(c Call, count uint64) string {
	kind := c.Kind()
	if c.bare() {
		return ""
	}
	s := " (" + c.DType().String()
	if op := c.Reduction(); op != 0 {
		s += " " + op.String()
	}
	switch kind {
	case collectives.AllGatherV:
		s += fmt.Sprintf(", counts with hash %08x", uint32(count))
	case collectives.AllToAllV:
	case collectives.AllReduce, collectives.Broadcast, collectives.Reduce:
		s += fmt.Sprintf(", %d elements", count)
	default:
		s += fmt.Sprintf(", %d elements a rank", count)
	}
	switch kind {
	case collectives.Broadcast, collectives.Reduce, collectives.Gather, collectives.Scatter:
		s += fmt.Sprintf(", root %d", c.Root())
	}
	switch a := c.Algorithm(); {
	case c.Packets():
		s += ", on devices, in packets"
		if a != inPackets {
			s += fmt.Sprintf(", being prepared: step %d", packetsPrepared-a+1)
		}
	case a != collectives.Auto:
		s += ", " + a.String()
	}
	return s + ")"
}

// Outcome is the result of an operation.
type Outcome uint8

// The outcomes. The zero value is a record that was never written.
const (
	none Outcome = iota
	Running
	OK
	RankFailed // a rank died, left or could not be reached
	TimedOut
	Cancelled
	Mismatched
	Closed  // the group was closed here
	Failed  // for another reason
	Aborted // a rank aborted the group
	outcomes
)

var outcomeNames = [outcomes]string{"", "running", "ok", "rank failed", "timed out", "cancelled", "mismatch", "closed",
	"failed", "aborted"}

func (o Outcome) String() string {
	if o >= outcomes {
		return fmt.Sprintf("outcome(%d)", uint8(o))
	}
	return outcomeNames[o]
}

// Failures returns the outcomes of operations that did not end well.
func Failures() (all []Outcome) {
	for o := OK + 1; o < outcomes; o++ {
		all = append(all, o)
	}
	return all
}

// Record is one operation in the ring: 64 bytes, one cache line, without pointers. Times are
// nanoseconds since 1970 by the coarse clock.
type Record struct {
	Number  uint64 // in its group, from 1; of a message its tag
	Call    Call
	Count   uint64 // see Spell
	Bytes   uint64 // as in tutti bench: of the vector, or of all ranks' parts
	Started int64
	Ended   int64
	Group   uint32
	Epoch   uint32
	Awaited uint32 // one more than the job's rank that the operation last waited for; 0: none
	Queued  uint16 // time in the queue before the start, in units of 10 ms, saturated
	State   Outcome
	Flags   uint8
}

// Flags of a Record.
const (
	Async  = 1 << iota // started by Start: the program may not be waiting for it
	Waited             // the program waits for it, or did until it ended
)
