package rdma

import (
	"errors"
	"fmt"
	"syscall"
	"time"
)

// Status is how a request ended.
type Status uint8

// Statuses, in the order of the verbs standard.
const (
	Success Status = iota
	LocalLength
	LocalQPOperation
	LocalEEC
	LocalProtection
	Flushed
	MemoryWindow
	BadResponse
	LocalAccess
	RemoteInvalid
	RemoteAccess
	RemoteOperation
	RetryExceeded
	RNRRetryExceeded
	LocalRDD
	RemoteRDD
	RemoteAborted
	InvalidEEC
	InvalidEECState
	FatalError
	ResponseTimeout
	GeneralError
)

func (s Status) String() string {
	return name(int(s), "success", "a message longer than its receive or than the device allows",
		"malformed request for this queue pair", "end-to-end context error",
		"local memory that is not registered for this access", "flushed: the queue pair failed before",
		"memory window error", "unexpected response of the peer", "local access error",
		"the peer refused the request as invalid",
		"the peer refused access: its memory is not registered for it, or not any more",
		"the peer failed to complete the request", "no answer from the peer after all retries",
		"the peer had no receive posted after all retries", "RDD violation", "invalid RDD request",
		"aborted by the peer",
		"invalid end-to-end context", "invalid state of the end-to-end context", "fatal error of the device",
		"no response in time", "general error")
}

// Recoverable reports whether the same request may succeed over another connection or a repaired
// one: the status says nothing against the request itself. LocalQPOperation is one of these,
// because a device that has lost its route completes well-formed requests with it.
func (s Status) Recoverable() bool {
	switch s {
	case Flushed, RetryExceeded, RNRRetryExceeded, ResponseTimeout, RemoteAborted, LocalQPOperation, FatalError,
		GeneralError:
		return true
	}
	return false
}

// Fatal reports whether err is that of a request which must not be posted again, over whatever
// connection: a *StatusError whose status is neither Success nor recoverable. Requests that were
// flushed because of it may be.
func Fatal(err error) bool {
	var e *StatusError
	return errors.As(err, &e) && e.Status != Success && !e.Status.Recoverable()
}

// StatusError is the error of a request that did not end well. Fatal says whether it may be
// repeated.
type StatusError struct {
	Status Status
	Op     Opcode
	Device string
	QP     uint32
	Vendor uint32
}

func (e *StatusError) Error() string {
	s := fmt.Sprintf("rdma: %v on queue pair %d of %s: %v", e.Op, e.QP, e.Device, e.Status)
	if e.Vendor != 0 {
		s += fmt.Sprintf(" (vendor code %#x)", e.Vendor)
	}
	return s
}

// Error is a call of a device that failed.
type Error struct {
	Call   string // "register 4096 bytes"
	Device string
	Errno  syscall.Errno
	Advice string // what to do; may be empty
}

func (e *Error) Error() string {
	s := fmt.Sprintf("rdma: %s on %s: %v", e.Call, e.Device, e.Errno)
	if e.Advice != "" {
		s += ": " + e.Advice
	}
	return s
}

// Unwrap returns the errno. errors.Is(err, errors.ErrUnsupported) holds for those that mean it.
func (e *Error) Unwrap() error { return e.Errno }

// Errors, wrapped.
var (
	ErrNoDevice = errors.New("no such RDMA device")
	ErrRemoved  = errors.New("RDMA device removed")
	ErrClosed   = errors.New("RDMA object closed")
)

// QueueFullError says that a send queue had no room for requests within the time that its user
// waits.
type QueueFullError struct {
	QP        uint32
	Need      int // requests
	Depth     int
	InUse     int
	Posted    int           // requests of the same call that were posted before
	Waited    time.Duration // for room
	Retryable bool          // false: the queue can never hold Need, or is degraded
	Degraded  bool
}

func (e *QueueFullError) Error() string {
	switch {
	case e.Degraded:
		return fmt.Sprintf("rdma: queue pair %d takes no requests until it has recovered from a failure (%d of %d "+
			"in use, %d posted)", e.QP, e.InUse, e.Depth, e.Posted)
	case !e.Retryable:
		return fmt.Sprintf("rdma: %d requests at once for the send queue of queue pair %d, which holds %d (%d posted)",
			e.Need, e.QP, e.Depth, e.Posted)
	}
	return fmt.Sprintf("rdma: no room for %d requests in the send queue of queue pair %d after %v: %d of %d in use, "+
		"%d posted; try again", e.Need, e.QP, e.Waited, e.InUse, e.Depth, e.Posted)
}
