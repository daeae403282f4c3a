package endpoint

import (
	"errors"
	"fmt"
)

// Errors, wrapped.
var (
	// ErrClosed says that the table was closed.
	ErrClosed = errors.New("rdma: the endpoints are closed")
	// ErrGone, in an error of a Caller, says that the peer will never answer: its process has ended.
	// Who waits for a connection to it does so no longer.
	ErrGone = errors.New("rdma: the peer has ended")
)

// RefusedError says that the peer does not connect, and will not with the same configurations.
type RefusedError struct {
	Peer   string
	Reason string // the peer's words
}

func (e *RefusedError) Error() string {
	return fmt.Sprintf("rdma: %s refuses a connection: %s", e.Peer, e.Reason)
}

// PeerError says that the connection to a peer could not be made in time, or at all.
type PeerError struct {
	Peer  string
	Err   error // why the wait ended
	Cause error // of the last call that failed; may be nil
}

func (e *PeerError) Error() string {
	s := fmt.Sprintf("rdma: no connection to %s: %v", e.Peer, e.Err)
	if e.Cause != nil && e.Cause != e.Err {
		s += fmt.Sprintf(" (last attempt: %v)", e.Cause)
	}
	return s
}

// Unwrap returns both errors.
func (e *PeerError) Unwrap() []error {
	if e.Cause == nil {
		return []error{e.Err}
	}
	return []error{e.Err, e.Cause}
}
