package endpoint

import (
	"context"
	"errors"
	"fmt"
	"os"

	"tutti/endpoint/internal/wire"
	"tutti/internal/trust"
)

// Errors of operations, wrapped by what they return.
var (
	ErrClosed    = errors.New("endpoint closed")
	ErrBroken    = errors.New("connection lost")                   // the operation may or may not have happened
	ErrCancelled = errors.New("cancelled")                         // by Cancel, or by the other end
	ErrNoRegion  = errors.New("no such region")                    // or none that this client may use
	ErrStale     = errors.New("region is not registered any more") // nothing was moved, or a part
	ErrRights    = errors.New("region does not allow that")
	ErrBounds    = errors.New("out of the region's bounds")
	ErrSize      = errors.New("message has another size")
	ErrFailed    = errors.New("the other end could not access its memory or file")
	ErrBusy      = errors.New("too many requests")
	ErrRefused   = errors.New("refused")
	ErrAuth      = errors.New("not authenticated")
	ErrName      = errors.New("invalid name")
	ErrVersion   = trust.ErrVersion // the other end is of another build
)

// TimeoutError says that an operation's time is over. It is a net.Error, and errors.Is finds
// context.DeadlineExceeded and os.ErrDeadlineExceeded.
type TimeoutError struct {
	What string // "read of region weights from peer trainer"
	Why  string // what it was waiting for
}

func (e *TimeoutError) Error() string {
	return fmt.Sprintf("%s timed out while it was %s", e.What, e.Why)
}

// Timeout implements net.Error.
func (e *TimeoutError) Timeout() bool { return true }

// Is reports whether target is context.DeadlineExceeded or os.ErrDeadlineExceeded.
func (e *TimeoutError) Is(target error) bool {
	return target == context.DeadlineExceeded || target == os.ErrDeadlineExceeded
}

// Temporary implements net.Error.
func (e *TimeoutError) Temporary() bool { return true }

// codeError returns the error for a code of the wire, nil for wire.OK.
func codeError(c wire.Code, text string) error {
	var err error
	switch c {
	case wire.OK:
		return nil
	case wire.Cancelled:
		err = ErrCancelled
	case wire.NoRegion:
		err = ErrNoRegion
	case wire.Stale:
		err = ErrStale
	case wire.Rights:
		err = ErrRights
	case wire.Bounds:
		err = ErrBounds
	case wire.Busy:
		err = ErrBusy
	case wire.Denied:
		err = ErrRefused
	default:
		err = ErrFailed
	}
	if text == "" {
		return err
	}
	return fmt.Errorf("%w: %q", err, text)
}
