package endpoint

import (
	"errors"
	"fmt"
)

// Errors, wrapped.
var (
	// ErrClosed says that the table was closed.
	ErrClosed = errors.New("rdma: the endpoints are closed")
	// ErrGone, in an error of a Caller, says that the peer will never answer: its process has
	// ended. Callers that wait for a connection to it return.
	ErrGone = errors.New("rdma: the peer has ended")
	// ErrPort says that the port of this end is down, or has no address that can be used. Its
	// network has to come back before Open can succeed.
	ErrPort = errors.New("no connections can be made")
)

// RefusedError says that the peer does not connect.
type RefusedError struct {
	Reason string // the peer's words
	Final  bool   // it will not either with the same configurations
}

func (e *RefusedError) Error() string {
	if e.Final {
		return "refused: " + e.Reason
	}
	return "not now: " + e.Reason
}

// FormatError says that the messages of the peer have another format: it is of another build. There
// will never be a connection.
type FormatError struct{ Peer, Own byte }

func (e *FormatError) Error() string {
	return fmt.Sprintf("rdma: the peer's handshake has format %d, expected %d: run the same build at both ends", e.Peer,
		e.Own)
}

// UndrainedError says that no queue pairs are made because too many retired connections are not
// drained: Config.Retired allows no more.
type UndrainedError struct{ Connections int }

func (e *UndrainedError) Error() string {
	return fmt.Sprintf("rdma: %d retired connections are not drained: call drained of Config.Retire, or allow more "+
		"with Config.Retired", e.Connections)
}

// PeerError says that the connection to a peer could not be made in time, or at all.
type PeerError struct {
	Peer  string
	Err   error // why the wait ended
	Cause error // of the last call that failed; may be nil
}

func (e *PeerError) Error() string {
	s := fmt.Sprintf("rdma: no connection to %s: %v", e.Peer, e.Err)
	if e.Cause != nil {
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
