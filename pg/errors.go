package pg

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"tutti/pg/flight"
)

// Errors of a group without details, for errors.Is.
var (
	// ErrClosed: the group was closed on this rank. Calls of a Window that was closed wrap it, too.
	ErrClosed = errors.New("process group is closed")
	// ErrEvicted: this rank was removed from the group although it is alive, because it and others
	// could not reach each other or a program called Evict; or the job's view is no longer in the
	// store. If it was not removed by others, the text says why. See Group.Rejoin.
	ErrEvicted = errors.New("this rank was evicted from the process group")
	// ErrIsolated: ranks were lost, and this rank cannot take part in deciding which ranks remain.
	// The store that decides it cannot be reached (this rank may be on the minority side of a
	// partition) or does not accept the decision; the text says which.
	ErrIsolated = errors.New("this rank cannot take part in deciding which ranks remain")
	// ErrAborted: Group.Abort was called, here or on another rank.
	ErrAborted = errors.New("process group aborted")
)

// windowClosed is the ErrClosed of a Window that was closed in a group that is open.
type windowClosed struct{}

func (windowClosed) Error() string { return "the window is closed" }

func (windowClosed) Unwrap() error { return ErrClosed }

// A numbering is how the text of a group's error names ranks. It has the job's rank of each number
// of a subgroup. It is nil for the group of all ranks, and for a subgroup of all ranks with the
// job's numbers: their texts have only one number of a rank.
type numbering []int

// of returns what follows the number of a rank: the numbers in the job, "" if there are no others.
func (n numbering) of(ranks ...int) string {
	var all []int
	for _, r := range ranks {
		if r >= 0 && r < len(n) {
			all = append(all, n[r])
		}
	}
	if len(all) == 0 || len(all) < len(ranks) {
		return ""
	}
	return flight.RankList(all) + " of the job"
}

// rank names a rank: "rank 1", "rank 1 (rank 3 of the job)". details follow in the brackets.
func (n numbering) rank(rank int, details ...string) string {
	if of := n.of(rank); of != "" {
		details = append([]string{of}, details...)
	}
	return fmt.Sprintf("rank %d", rank) + brackets(details)
}

// group names a rank and says that it is one of a subgroup, for the first rank in a text.
func (n numbering) group(rank int) string {
	if of := n.of(rank); of != "" {
		return fmt.Sprintf("rank %d of a subgroup (%s)", rank, of)
	}
	return n.rank(rank)
}

func brackets(details []string) string {
	if len(details) == 0 {
		return ""
	}
	return " (" + strings.Join(details, ", ") + ")"
}

// abortedError says that rank Rank called Group.Abort.
type abortedError struct {
	Rank int
	Err  error // the cause
	in   numbering
}

func (e *abortedError) Error() string {
	return fmt.Sprintf("%s: %v: %v", e.in.group(e.Rank), ErrAborted, e.Err)
}

func (e *abortedError) Unwrap() []error { return []error{ErrAborted, e.Err} }

// RankError says that a rank died, left, or cannot be reached. The operation that returns it has no
// result. After a collective Config.OnFailure says how the group goes on; by default every later
// one returns an error until Recover. A message, or an operation on a Window, that fails fails no
// collective. The fields have the group's numbers of ranks; in a subgroup the text has those of the
// job, too.
type RankError struct {
	Rank int   // the rank that failed
	Also []int // other ranks that had failed by then; ascending
	// Overwritten says that the operation worked in place and had begun to write: its input is
	// lost. Otherwise inputs are as they were; the destination of an operation that does not work
	// in place may be partly written.
	Overwritten bool
	Epoch       uint64 // of the view
	Call        string // the operation during which this rank noticed, "" if none
	Reporter    int    // the rank that noticed: this one, or a peer that sent an Abort
	Err         error  // the cause; the text of one that a link reports has the job's numbers

	in numbering
}

func (e *RankError) Error() string {
	s := e.in.group(e.Rank) + " failed"
	if e.Call != "" {
		s += " during " + e.Call
	}
	s = fmt.Sprintf("%s (epoch %d, seen by %s): %v", s, e.Epoch, e.in.rank(e.Reporter), e.Err)
	if len(e.Also) > 0 {
		s += "; so did " + flight.RankList(e.Also)
		if of := e.in.of(e.Also...); of != "" {
			s += " (" + of + ")"
		}
	}
	if e.Overwritten {
		s += "; the buffer is partly overwritten"
	}
	return s
}

func (e *RankError) Unwrap() error { return e.Err }

// Seen is the last operation that a rank was seen in.
type Seen struct {
	Rank int
	What string // "nothing yet", "allreduce #12 (float32 sum, 1024 elements)"
}

// TimeoutError says that an operation did not end in time, and which ranks it waited for. It wraps
// context.DeadlineExceeded or context.Canceled. After a collective the group is unusable until
// Recover, unless only a stream of this rank was late to take the result to its device. After a
// message, an operation on a Window other than NewWindow and Refresh, or Evict, the group is as it
// was: other ranks have no reason to call Recover then. A rank that was waited for may be in an
// operation of another group, or of another job that its process has joined, and wait there for a
// rank that Missing does not name: tutti status and flight records say so. The fields have the
// group's numbers of ranks; in a subgroup the text has those of the job, too.
type TimeoutError struct {
	Call     string        // the operation
	After    time.Duration // the operation's time until then
	Missing  []Seen        // the ranks that were waited for
	Reporter int           // the rank that timed out
	Err      error

	in numbering
}

func (e *TimeoutError) Error() string {
	var b strings.Builder
	verb := "timed out"
	if e.Err != nil && strings.Contains(e.Err.Error(), "cancel") {
		verb = "was cancelled"
	}
	fmt.Fprintf(&b, "%s %s on %s after %v", e.Call, verb, e.in.group(e.Reporter), e.After.Round(time.Millisecond))
	for i, m := range e.Missing {
		sep := "; "
		if i == 0 {
			sep = ", waiting for "
		}
		b.WriteString(sep + e.in.rank(m.Rank, "last seen: "+m.What))
	}
	return b.String()
}

func (e *TimeoutError) Unwrap() error { return e.Err }

// expiry returns what a TimeoutError wraps when a wait has ended with err.
func expiry(err error) error {
	if errors.Is(err, context.Canceled) {
		return context.Canceled
	}
	return context.DeadlineExceeded
}

// MismatchError says that two ranks called different operations where all must call the same. The
// group is unusable afterwards, until Recover. The fields have the group's numbers of ranks; in a
// subgroup the text has those of the job, too.
type MismatchError struct {
	RankA int
	CallA string
	RankB int
	CallB string

	in numbering
}

func (e *MismatchError) Error() string {
	return fmt.Sprintf("ranks disagree: %s called %s, %s called %s", e.in.group(e.RankA), e.CallA,
		e.in.rank(e.RankB), e.CallB)
}

// ArgumentError describes an invalid call. Nothing was sent, and the group is usable. Peers that
// made the same call correctly wait for this rank. But Recv may have consumed a message of another
// length or type, and where NewWindow or Refresh find differences between ranks, all ranks get the
// error.
type ArgumentError struct {
	Call string // "allgather"
	Arg  string // the offending argument
	Want string // what was expected
	Got  string
}

func (e *ArgumentError) Error() string {
	return fmt.Sprintf("%s: %s is %s, want %s", e.Call, e.Arg, e.Got, e.Want)
}

// unreadable returns the error of an argument whose text cannot be read: err says what is expected.
func unreadable(call, arg, text string, err error) error {
	return &ArgumentError{Call: call, Arg: arg, Got: fmt.Sprintf("%.60q", text), Want: "a valid one: " + err.Error()}
}

// noContext is the error of a call with a nil ctx. Calls look for that before they take a lock,
// which a panic would leave held.
func noContext(call string) error {
	return &ArgumentError{Call: call, Arg: "ctx", Got: "nil", Want: "a context, such as context.Background()"}
}

// inJob returns the error of a group with the job's ranks instead of slots. ranks has the rank of
// each slot. Calls in words keep the root's slot.
func inJob(err error, ranks []int) error {
	of := func(slot int) int {
		if slot >= 0 && slot < len(ranks) {
			return ranks[slot]
		}
		return slot
	}
	switch e := err.(type) {
	case *RankError:
		own := *e
		own.Rank, own.Reporter, own.Also, own.in = of(e.Rank), of(e.Reporter), nil, nil
		for _, slot := range e.Also {
			own.Also = append(own.Also, of(slot))
		}
		return &own
	case *TimeoutError:
		own := *e
		own.Reporter, own.Missing, own.in = of(e.Reporter), nil, nil
		for _, m := range e.Missing {
			own.Missing = append(own.Missing, Seen{of(m.Rank), m.What})
		}
		return &own
	case *MismatchError:
		own := *e
		own.RankA, own.RankB, own.in = of(e.RankA), of(e.RankB), nil
		return &own
	case *abortedError:
		return &abortedError{Rank: of(e.Rank), Err: e.Err}
	case *graphError:
		return &graphError{e.text, inJob(e.is, ranks)}
	}
	return err
}

// outcome is the flight recorder's name for the error of an operation.
func outcome(err error) flight.Outcome {
	switch {
	case err == nil:
		return flight.OK
	case errors.Is(err, ErrAborted): // whatever the cause was that the program gave
		return flight.Aborted
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
