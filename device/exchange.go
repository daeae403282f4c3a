package device

import (
	"context"
	"fmt"
	"time"

	"tutti/kernels"
	"tutti/mem"
)

// An Exchanger is a Sharer whose streams combine short vectors of several ranks by themselves,
// without the hosts. Each rank has memory of its own into which the others store, and nowhere else:
// its inbox.
type Exchanger interface {
	Sharer
	// NewExchange makes the exchange of a rank, numbered from 0, among ranks ranks. Its memory is
	// freed with the device, if not by Free before. The device clears the memory first, which may
	// wait for other work; if ctx ends before, the error is that of ctx.
	NewExchange(ctx context.Context, rank, ranks int) (Exchange, error)
}

// The limits of an Exchange.
const (
	MaxExchangeRanks = 8
	MaxExchangeBytes = 16 << 10 // of a vector
)

// An Exchange combines vectors of ranks. All ranks make the same calls of AllReduce, in the same
// order, and repeat alike what they have recorded. Its methods may be called by any goroutine,
// AllReduce by one at a time.
type Exchange interface {
	// Inbox returns the key of the allocation that has this rank's inbox, and where it begins: see
	// Sharer.
	Inbox() (key []byte, offset uint64, err error)
	// Connect gives it the inboxes of the other ranks, by rank. They are used until Free has
	// returned nil, or the device is closed. The error wraps errors.ErrUnsupported if the streams
	// of the ranks would not run at the same time.
	Connect(inboxes []Shared, offsets []uint64) error
	// AllReduce has s combine src of all ranks, in their order, into dst, when all earlier calls
	// have ended on whichever stream. If s records its work (Capturer), that is recorded. The work
	// waits for the streams of the other ranks, at most for limit if that is not 0. It ends without
	// a result as Failure says; so does all later work then.
	AllReduce(s Stream, op kernels.Op, dt kernels.DType, dst, src mem.Memory, limit time.Duration) error
	// Free frees its memory. It stops the exchange, has later calls of AllReduce fail, and waits
	// until the work of the earlier ones has ended. The inbox stays as long as other ranks may
	// store into it: those of this process until their own Free, those of others until the device
	// is closed, unless the inbox lives while they have it mapped. If ctx ends before the work
	// does, if a stream has recorded work, or if it is not known when the work ends, there is an
	// error, and all memory stays until the device is closed. Closing the device ends the wait.
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
}

// An ExchangeError says why work of an Exchange has no result.
type ExchangeError struct {
	Stopped bool // by Stop
	Rank    int  // else the rank that was late, or whose call differs
	Differs bool
	// The rank's call, if it differs.
	Op    kernels.Op
	DType kernels.DType
	Count int
}

func (e *ExchangeError) Error() string {
	switch {
	case e.Stopped:
		return "the exchange was stopped"
	case e.Differs:
		return fmt.Sprintf("rank %d combines %d elements, %v of %v", e.Rank, e.Count, e.Op, e.DType)
	}
	return fmt.Sprintf("nothing came from rank %d in time", e.Rank)
}
