package p2p

import (
	"context"
	"errors"
	"fmt"

	"tutti/mem"
)

// A set of small interfaces beside Transport and Link describes what they can do with remote
// memory. A rank that exposes memory calls its transports (Exposer). A peer that has the
// description calls its link to that rank (Putter, Getter, Completer, Flusher).
//
// The methods of links follow the rules of Link.Send: one goroutine at a time, no blocking, no
// allocation when warm. Operations make progress in Recv and in Poll. If frames carry the data
// (tcp), they also need progress at the target, which reads and writes the memory while its proxy
// polls the link.

// Errors of operations on remote memory, wrapped.
var (
	// ErrAgain: the operation was not begun, because there is no room, or the link does not know
	// the memory's location yet. Try again after Poll has returned completions, or Host.Wake was
	// called.
	ErrAgain = errors.New("no room for the operation now")
	// ErrRevoked: the memory is not exposed: it was withdrawn, or the generation is another one.
	ErrRevoked = errors.New("memory is not exposed, or no longer")
	// ErrRights: the memory is exposed without the right for this operation.
	ErrRights = errors.New("access right missing")
	// ErrBounds: the operation reaches beyond the exposed range, or a signal's word is not aligned.
	ErrBounds = errors.New("out of bounds")
	// ErrCancelled: Cancel was called. A put may have been placed in part or as a whole.
	ErrCancelled = errors.New("operation cancelled")
	// ErrUnplaced: the signal was not written, because data that it is ordered after is not placed.
	ErrUnplaced = errors.New("the signal was not written, because an earlier put was not placed")
)

// AccessError says that an operation on remote memory is not allowed. Err is ErrRevoked, ErrRights
// or ErrBounds.
type AccessError struct {
	Op         string // "put", "get" or "signal"
	Region     uint64 // of the peer
	Generation uint64
	Offset     uint64 // from the beginning of the exposed range
	Length     uint64 // bytes of the operation
	Err        error
}

func (e *AccessError) Error() string {
	return fmt.Sprintf("%s of %d bytes at offset %d of region %#x (generation %d): %v", e.Op, e.Length, e.Offset,
		e.Region, e.Generation, e.Err)
}

func (e *AccessError) Unwrap() error { return e.Err }

// NewAccessError describes a refused operation on to.
func NewAccessError(op string, to *mem.Remote, offset, length uint64, err error) *AccessError {
	return &AccessError{Op: op, Region: to.ID, Generation: to.Generation, Offset: offset, Length: length, Err: err}
}

// CheckAccess checks whether to allows rights on n bytes at offset. The error is an *AccessError.
func CheckAccess(op string, to *mem.Remote, rights mem.Rights, offset, n uint64) error {
	switch {
	case !to.Rights.Has(rights):
		return NewAccessError(op, to, offset, n, ErrRights)
	case n > to.Len || offset > to.Len-n || rights == mem.Signal && (to.Base+offset)%mem.WordSize != 0:
		return NewAccessError(op, to, offset, n, ErrBounds)
	}
	return nil
}

// Signal is a word that a put writes at the target. The zero Signal writes none.
//
// A word is 64 bits of host memory, aligned to 8 bytes, with one writer: a program keeps one for
// each source and counter. Value is absolute, so that it may be written twice. The target reads it
// by an atomic load (mem.Memory.Word), and then sees everything that it is ordered after.
type Signal struct {
	At     *mem.Remote // memory exposed with mem.Signal; nil: no signal
	Offset uint64      // of the word in the exposed range
	Value  uint64
	// Strong orders the signal after all puts that were begun before on this link. Otherwise it is
	// ordered only after its own put, and after earlier signals to the same word.
	//
	// If one of those fails or is cancelled before it is placed, the signal is not written, and its
	// put ends with ErrUnplaced. This does not concern puts whose completion Poll had returned when
	// the signal was begun, nor, where frames carry puts, earlier puts that the target refuses: the
	// signal may be on its way by then.
	Strong bool
}

// Completion says that an operation has ended.
type Completion struct {
	ID uint64 // as given when the operation was begun
	// Bytes is the number of bytes moved: all if Err is nil.
	Bytes int
	// Err is why the operation failed: an *AccessError, or an error that wraps ErrPeerGone,
	// ErrProtocol, ErrClosed, ErrCancelled or ErrUnplaced. It wraps errors.ErrUnsupported if local
	// memory of a device cannot be reached now: the data has to go through host memory. A put that
	// failed may have been placed in part; its signal is never written before all of its data.
	Err error
}

// Putter is a link that can write to the peer's exposed memory.
type Putter interface {
	// Put begins to copy local to offset of to, and then to write s. The caller must not change
	// local before the completion. ErrAgain: nothing was begun. Other errors concern the arguments
	// (an *AccessError if to does not allow it) or the link, or wrap ErrShortage; nothing was begun
	// then either. The completion says that the data is placed and visible to the target's CPU, and
	// the signal written. Puts end in any order. With mem.Memory{} and a signal only the signal is
	// written.
	Put(id uint64, local mem.Memory, to *mem.Remote, offset uint64, s Signal) error
}

// Immediate is a Putter that can complete puts at once, because it writes to the peer's memory
// itself.
type Immediate interface {
	// PutNow is Put of host memory of at most 1 MiB, which takes some tens of microseconds; a nil s
	// is no signal. True: it has succeeded, and all puts before it; there is no completion. False:
	// nothing was begun, use Put.
	PutNow(local []byte, to *mem.Remote, offset uint64, s *Signal) bool

	// Near returns the address at which PutNow has written to the memory of to, 0 if it is not
	// known. It is for kernels.AcquireOut alone: the memory may be gone.
	Near(to *mem.Remote) uintptr
}

// Getter is a link that can read the peer's exposed memory.
type Getter interface {
	// Get begins to copy from offset of from to local, which belongs to the link until the
	// completion, or until Cancel returns. What it has written to memory of a device, work of the
	// device sees as package device says: see device.Exporter. Errors are those of Put.
	Get(id uint64, local mem.Memory, from *mem.Remote, offset uint64) error
}

// Completer is a link that reports which operations have ended. Link.Arm returns true, or a wake
// follows, when Poll may make progress.
type Completer interface {
	// Poll makes progress, stores completions to out, and returns their number. Each operation has
	// one. When Recv has returned the link's failure, or the link was closed, all remaining
	// operations end with that error.
	Poll(out []Completion) int
	// Cancel ends the operations with id: their local memory is not used after it has returned,
	// unless a device lets go of it in no way, which the transport logs as an error. Their
	// completions follow, with ErrCancelled unless they had ended before.
	Cancel(id uint64)
}

// Flusher is a link that reports when all puts are placed.
type Flusher interface {
	// FlushPuts begins an operation that ends when all puts that were begun before have ended. If
	// one of them ends because the link has, the flush fails, too. If the target's memory belongs
	// to a device, they are then visible to the device. ErrAgain is as in Put.
	FlushPuts(id uint64) error
}

// OneSided is a link with all capabilities for remote memory.
type OneSided interface {
	Putter
	Getter
	Completer
	Flusher
}

// Revoker is a link whose peer reaches this rank's memory by frames, which may be under way when
// the peer is no member any more. The link may stay for its messages.
type Revoker interface {
	// Revoke ends the puts and signals of the peer, also those that have begun: they change no
	// memory afterwards and end with ErrRevoked. It begins no get afterwards. It follows the rules
	// of Recv.
	Revoke()
}

// MaxOutstanding is how many operations on remote memory a link takes at a time.
const MaxOutstanding = 128

// Exposer is a transport whose links can reach exposed memory of this rank. Its methods may be
// called from any goroutine; the proxy's lock must not be held.
type Exposer interface {
	// Expose opens the range of r that x describes (x is valid, without keys) to peers, and returns
	// the key for this transport's path. It fails with errors.ErrUnsupported if peers cannot reach
	// r through this transport. r must not be freed before Withdraw.
	Expose(r *mem.Region, x *mem.Remote) (key []byte, err error)
	// Withdraw ends Expose. When it returns nil, no peer reads or writes the memory through this
	// transport any more. It waits for peers that are doing so, until ctx ends; then the memory
	// must stay allocated, and Withdraw may be called again. It does not wait for peers that are
	// gone.
	Withdraw(ctx context.Context, x *mem.Remote) error
}

// WritableAllocator is a transport that can make memory for peers to write.
type WritableAllocator interface {
	// AllocWritable is Allocator.Alloc for a region that can be exposed with every right. Peers get
	// write access only while it is exposed with mem.Write or mem.Signal.
	AllocWritable(n int) (*mem.Region, error)
}
