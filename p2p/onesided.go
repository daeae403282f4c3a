package p2p

import (
	"context"
	"errors"
	"fmt"

	"tutti/mem"
)

// What a transport and a link can do with remote memory is a set of small interfaces beside
// Transport and Link. A rank that exposes memory calls its transports (Exposer); a peer that got
// the description calls the link to that rank (Putter, Getter, Completer, Flusher).
//
// The methods of links follow the rules of Link.Send: one goroutine at a time, no blocking, no
// allocation when warm. Operations make progress in Recv, which takes what the peer sends, and in
// Poll. At the target they need its progress too where frames carry the data (tcp): there memory is
// written, and read, while the target's proxy polls the link.

// Errors of operations on remote memory, wrapped.
var (
	// ErrAgain: the operation was not begun, for there is no room, or the link has yet to be told
	// where the memory is. Try again after Poll has returned something, or Host.Wake was called.
	ErrAgain = errors.New("no room for the operation now")
	// ErrRevoked: the memory is not exposed: it was withdrawn, or the generation is another's.
	ErrRevoked = errors.New("memory is not exposed, or no longer")
	// ErrRights: the memory is exposed, but not for this.
	ErrRights = errors.New("access right missing")
	// ErrBounds: the operation reaches beyond the exposed range, or a signal's word is not aligned.
	ErrBounds = errors.New("out of bounds")
	// ErrCancelled: Cancel was called. A put may have been placed, in part or whole.
	ErrCancelled = errors.New("operation cancelled")
)

// AccessError says that an operation on remote memory is not allowed. Err is ErrRevoked, ErrRights
// or ErrBounds.
type AccessError struct {
	Op         string // "put", "get" or "signal"
	Region     uint64 // of the peer
	Generation uint64
	Offset     uint64 // from the beginning of the exposed range
	Length     uint64 // bytes that were to be moved
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

// CheckAccess says whether n bytes at offset of to may be used with rights, as far as to itself
// says. The error is an *AccessError.
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
// each source and counter. Value is absolute, so that writing it again does no harm; the target
// sees it by an atomic load (mem.Memory.Word), and with it everything that it is ordered after.
type Signal struct {
	At     *mem.Remote // memory exposed with mem.Signal; nil: no signal
	Offset uint64      // of the word in the exposed range
	Value  uint64
	// Strong orders the signal after all puts that were begun before on this link; otherwise it
	// follows its own put alone.
	Strong bool
}

// Completion says that an operation has ended.
type Completion struct {
	ID uint64 // as given when it was begun
	// Bytes is how much was moved: everything if Err is nil.
	Bytes int
	// Err is why the operation failed: an *AccessError, or an error that wraps ErrPeerGone,
	// ErrClosed or ErrCancelled. A put that failed may have been placed in part, its signal was not
	// written before all of it was.
	Err error
}

// Putter is a link that can write to memory which the peer has exposed.
type Putter interface {
	// Put begins to copy local to offset of to, and then to write s. local stays the caller's, who
	// must not change it before the completion. ErrAgain: nothing was begun. Other errors say what
	// is wrong with the arguments (an *AccessError where to itself does not allow it), or with the
	// link; nothing was begun then either. The completion says that the data is placed and visible
	// to the target's CPU, and the signal written. Puts end in any order. With mem.Memory{} and a
	// signal it is a signal alone.
	Put(id uint64, local mem.Memory, to *mem.Remote, offset uint64, s Signal) error
}

// Immediate is a Putter that can end small puts at once, as one can that writes to the peer's memory
// itself.
type Immediate interface {
	// PutNow is Put for a transfer that takes no longer than a microsecond or so. True: it has ended
	// well, and all puts before it; there is no completion. False: nothing was begun, use Put.
	PutNow(local mem.Memory, to *mem.Remote, offset uint64, s Signal) bool
}

// Getter is a link that can read memory which the peer has exposed.
type Getter interface {
	// Get begins to copy from offset of from to local, which belongs to the link until the
	// completion, or until Cancel returns. Errors are as of Put.
	Get(id uint64, local mem.Memory, from *mem.Remote, offset uint64) error
}

// Completer is a link that says which operations have ended. Link.Arm returns true, or a wake
// follows, when Poll may get further.
type Completer interface {
	// Poll makes progress and stores completions to out, and returns how many. Each operation that
	// was begun has one. When the link has failed, and Recv has said so, or was closed, all that
	// are left end with why.
	Poll(out []Completion) int
	// Cancel ends the operations with id: their local memory is not touched after it has returned.
	// Their completions follow, with ErrCancelled unless they had ended before.
	Cancel(id uint64)
}

// Flusher is a link that can tell when all that was put is placed.
type Flusher interface {
	// FlushPuts begins an operation that ends when all puts that were begun before have ended. Where
	// the target's memory is a device's, they are visible to the device then. ErrAgain as of Put.
	FlushPuts(id uint64) error
}

// OneSided is a link with all capabilities for remote memory.
type OneSided interface {
	Putter
	Getter
	Completer
	Flusher
}

// MaxOutstanding is how many operations on remote memory a link takes at a time.
const MaxOutstanding = 128

// Exposer is a transport whose links can reach memory that this rank has exposed. Its methods may be
// called from any goroutine; the proxy's lock must not be held.
type Exposer interface {
	// Expose opens the range of r that x describes (all of it but the keys, valid) to peers that
	// learn of it, and returns the key for the path of this transport. It fails with
	// errors.ErrUnsupported if peers cannot reach r through this transport. r must not be freed
	// before Withdraw.
	Expose(r *mem.Region, x *mem.Remote) (key []byte, err error)
	// Withdraw ends what Expose began. When it returns nil, nobody reads or writes the memory
	// through this transport, and nobody will. It waits for peers that are just doing so, until ctx
	// ends; then the memory must stay, and Withdraw be called again. A peer that is gone is not
	// waited for.
	Withdraw(ctx context.Context, x *mem.Remote) error
}

// WritableAllocator is a transport that can make memory which peers may be allowed to write.
type WritableAllocator interface {
	// AllocWritable is Allocator.Alloc for a region that can be exposed with every right. Peers get
	// it for writing only while it is exposed with mem.Write or mem.Signal.
	AllocWritable(n int) (*mem.Region, error)
}
