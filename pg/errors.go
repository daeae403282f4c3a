package pg

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"tutti/pg/flight"
)

// Errors of a group that need no details, to be tested with errors.Is.
var (
	ErrClosed = errors.New("process group is closed")
	// ErrEvicted: the others go on without this rank, which was put out although it lives: they
	// could not reach it, or somebody asked for it. See Group.Rejoin.
	ErrEvicted = errors.New("this rank was evicted from the process group")
	// ErrIsolated: ranks were lost, and this rank cannot take part in deciding who goes on. The
	// store, where that is decided, is away (this rank may be on the minority side of a partition)
	// or does not take the decision; the text says which.
	ErrIsolated = errors.New("this rank cannot take part in deciding who goes on")
	// ErrAborted: Group.Abort was called, here or on another rank.
	ErrAborted = errors.New("process group aborted")
)

// RankError says that a rank failed: it died, left, or cannot be reached. The operation that
// returns it has no result. Config.OnFailure says how the group goes on; by default every later
// collective returns an error until Recover.
type RankError struct {
	Rank int   // who failed
	Also []int // who else had, as far as was decided by then; ascending
	// Overwritten says that the operation worked in place and had begun to: its input is lost.
	// Otherwise inputs are as they were; the destination of an operation that does not work in
	// place may be partly written.
	Overwritten bool
	Epoch       uint64 // in which view
	Call        string // the operation during which it was noticed here, "" if none
	Reporter    int    // the rank that noticed; this one, or a peer that told
	Err         error  // what was seen
}

func (e *RankError) Error() string {
	s := fmt.Sprintf("rank %d failed", e.Rank)
	if e.Call != "" {
		s += " during " + e.Call
	}
	s = fmt.Sprintf("%s (epoch %d, seen by rank %d): %v", s, e.Epoch, e.Reporter, e.Err)
	if len(e.Also) > 0 {
		s += "; so did " + flight.RankList(e.Also)
	}
	if e.Overwritten {
		s += "; the buffer is partly overwritten"
	}
	return s
}

func (e *RankError) Unwrap() error { return e.Err }

// Seen is what a rank was last seen doing.
type Seen struct {
	Rank int
	What string // "nothing yet", "allreduce #12 (float32 sum, 1024 elements)"
}

// TimeoutError says that an operation did not end in time, and because of whom. It wraps
// context.DeadlineExceeded or context.Canceled. The group is unusable afterwards, until Recover.
type TimeoutError struct {
	Call     string        // the operation
	After    time.Duration // how long it had been running
	Missing  []Seen        // the ranks that were waited for
	Reporter int           // the rank whose patience ended
	Err      error
}

func (e *TimeoutError) Error() string {
	var b strings.Builder
	verb := "timed out"
	if e.Err != nil && strings.Contains(e.Err.Error(), "cancel") {
		verb = "was cancelled"
	}
	fmt.Fprintf(&b, "%s %s on rank %d after %v", e.Call, verb, e.Reporter, e.After.Round(time.Millisecond))
	for i, m := range e.Missing {
		sep := "; "
		if i == 0 {
			sep = ", waiting for "
		}
		fmt.Fprintf(&b, "%srank %d (last seen: %s)", sep, m.Rank, m.What)
	}
	return b.String()
}

func (e *TimeoutError) Unwrap() error { return e.Err }

// MismatchError says that two ranks called different things where all must call the same. The group
// is unusable afterwards, until Recover.
type MismatchError struct {
	RankA int
	CallA string
	RankB int
	CallB string
}

func (e *MismatchError) Error() string {
	return fmt.Sprintf("ranks disagree: rank %d called %s, rank %d called %s", e.RankA, e.CallA, e.RankB, e.CallB)
}

// An ArgumentError says what was wrong with a call that was not started: nothing was sent and the
// group goes on. Note that peers which made the same call correctly will wait for this rank.
type ArgumentError struct {
	Call string // "allgather"
	Arg  string // the offending argument
	Want string // what was expected
	Got  string
}

func (e *ArgumentError) Error() string {
	return fmt.Sprintf("%s: %s is %s, want %s", e.Call, e.Arg, e.Got, e.Want)
}

// outcome is how the flight recorder calls an error of an operation.
func outcome(err error) flight.Outcome {
	switch {
	case err == nil:
		return flight.OK
	case errors.Is(err, context.Canceled):
		return flight.Cancelled
	case errors.As(err, new(*TimeoutError)), errors.Is(err, context.DeadlineExceeded):
		return flight.TimedOut
	case errors.As(err, new(*RankError)):
		return flight.RankFailed
	case errors.As(err, new(*MismatchError)):
		return flight.Mismatched
	case errors.Is(err, ErrClosed):
		return flight.Closed
	}
	return flight.Failed
}
