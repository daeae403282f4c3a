package device

import (
	"context"
	"fmt"
	"slices"
	"time"

	"tutti/collectives"
	"tutti/kernels"
	"tutti/mem"
)

// An Exchanger is a Sharer whose streams do collectives of several ranks by themselves, without the
// hosts. Each rank has memory of its own into which the others store, and nowhere else: its inbox.
type Exchanger interface {
	Sharer
	// NewExchange makes the exchange of a rank, numbered from 0, among ranks ranks. Its memory is
	// freed with the device, if not by Free before. The device clears the memory first, which may
	// wait for other work; if ctx ends before, the error is that of ctx.
	NewExchange(ctx context.Context, rank, ranks int) (Exchange, error)
}

// MaxExchangeRanks is the most ranks of an Exchange.
const MaxExchangeRanks = 8

// ShortVector is the length in bytes of a vector up to which an allreduce by an Exchange is meant
// to be faster than streams that load from each other's memory. Longer ones are right, too.
const ShortVector = 128 << 10

// An ExchangeCall is a collective of an Exchange. What its buffers hold is that of the kind: see
// package collectives, whose slots are the parts of a buffer.
type ExchangeCall struct {
	Kind  collectives.Kind // one whose buffers are vectors, or have parts of equal length
	Op    kernels.Op       // of a kind that reduces
	DType kernels.DType
	Root  int   // rank, of a kind that has one
	Count int   // elements of a vector, or of a part
	Parts []int // of each rank in buffers that have several
	// Memory of the device, in which the result has the place that package collectives allows. A
	// rank that does not use one of them has none.
	Dst, Src mem.Memory
}

// String returns the call in words: "reduce (float32 sum, 1024 elements, root 1)".
func (c *ExchangeCall) String() string {
	s := fmt.Sprintf("%v (%v", c.Kind, c.DType)
	if c.Kind.Reduces() {
		s += " " + c.Op.String()
	}
	s += fmt.Sprintf(", %d elements", c.Count)
	l := c.Kind.Layout()
	if l.In.Parted() || l.Out.Parted() {
		s += " a rank"
	}
	if l.InAtRoot || l.OutAtRoot {
		s += fmt.Sprintf(", root %d", c.Root)
	}
	return s + ")"
}

// Lengths returns the bytes of the destination and of the source that a rank needs.
func (c *ExchangeCall) Lengths(rank int) (dst, src int) {
	l := c.Kind.Layout()
	n := c.Count * c.DType.Size()
	of := func(e collectives.Extent) int {
		if e.Parted() && len(c.Parts) > 0 {
			return n * (slices.Max(c.Parts) + 1)
		}
		return n
	}
	reads, writes := c.Kind.Uses(rank == c.Root)
	if reads {
		src = of(l.In)
	}
	if writes {
		dst = of(l.Out)
	}
	return dst, src
}

// An Exchange does collectives of ranks. All ranks make the same calls of Do, in the same order,
// and repeat alike what they have recorded. Its methods may be called by any goroutine, Do by one
// at a time.
type Exchange interface {
	// Inbox returns the key of the allocation that has this rank's inbox, and where it begins: see
	// Sharer.
	Inbox() (key []byte, offset uint64, err error)
	// Connect gives it the inboxes of the other ranks, by rank. They are used until Free has
	// returned nil, or the device is closed. The error wraps errors.ErrUnsupported if the streams
	// of the ranks would not run at the same time.
	Connect(inboxes []Shared, offsets []uint64) error
	// Do has s do this rank's part of a collective when all earlier calls have ended on whichever
	// stream. Reductions are in the order of the ranks. If s records its work (Capturer), that is
	// recorded. The work waits for the streams of the other ranks, at most for limit if that is not
	// 0. Close of s waits as well: call Stop before. It ends without a result as Failure says; so
	// does all later work then. The number of the call is one more than that of the call before,
	// and 0 if it is recorded.
	Do(s Stream, c ExchangeCall, limit time.Duration) (number uint64, err error)
	// Free frees its memory. It stops the exchange, has later calls of Do fail, and waits
	// until the work of the earlier ones has ended. The inbox stays as long as other ranks may
	// store into it: those of this process until their own Free, those of others until the device
	// is closed, unless the inbox lives while they have it mapped. If ctx ends before the work
	// does, if a stream has recorded work, or if it is not known when the work ends, there is an
	// error, and all memory stays until the device is closed. Closing the device calls Stop, and
	// ends the wait.
	// Idempotent.
	Free(ctx context.Context) error
	// Stop ends the work that waits, and all that is given later or repeated. Idempotent.
	Stop()
	// Failure returns why work has ended without a result first, nil if none has, and whether other
	// work has begun after that, since the latest call of Failure. It may be called after Free.
	Failure() (why *ExchangeError, again bool)
}

// A Capturer is a Stream that records its work instead of doing it, while its owner wants that (in
// terms of CUDA, stream capture). What was recorded is done later, any number of times.
type Capturer interface {
	Capturing() (bool, error)
	// RecordCopy is Copy within memory of the device while it records, when Copy is refused.
	RecordCopy(dst, src mem.Memory) error
}

// An ExchangeError says why work of an Exchange has no result.
type ExchangeError struct {
	// Number is that of the call that has ended so first. If Recorded, it was one without a number,
	// and this is that of the call after it.
	Number   uint64
	Recorded bool
	Stopped  bool // by Stop
	Rank     int  // else the rank that was late, or whose call differs
	Differs  bool
	// The call of this rank, and that of the other one if it differs, without their buffers.
	Ours, Theirs ExchangeCall
}

func (e *ExchangeError) Error() string {
	switch {
	case e.Stopped:
		return "the exchange was stopped"
	case e.Differs:
		return fmt.Sprintf("rank %d did %v, and this rank %v", e.Rank, &e.Theirs, &e.Ours)
	}
	return fmt.Sprintf("nothing came from rank %d in time for %v", e.Rank, &e.Ours)
}
