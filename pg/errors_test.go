package pg

import (
	"context"
	"errors"
	"testing"

	"tutti/pg/flight"
)

// An abort is recorded as one, whatever cause the program has given.
func TestOutcomeOfAbort(t *testing.T) {
	for _, cause := range []error{errors.New("enough"), context.Canceled, context.DeadlineExceeded, ErrClosed,
		&RankError{}, &TimeoutError{}, &MismatchError{}} {
		if o := outcome(&abortedError{Rank: 1, Err: cause}); o != flight.Aborted {
			t.Errorf("%v: it is recorded as %q", cause, o)
		}
	}
}

// Texts name ranks of a subgroup by the group's number and by the job's.
func TestErrorsNameRanksOfSubgroups(t *testing.T) {
	cause := errors.New("a cause")
	for _, c := range []struct {
		err  func(in numbering) error
		want []string // of a group of all ranks, and of a subgroup
	}{
		{func(in numbering) error {
			return &RankError{Rank: 1, Also: []int{0, 2}, Call: "barrier #1", Reporter: 3, Err: cause, in: in}
		}, []string{"rank 1 failed during barrier #1 (epoch 0, seen by rank 3): a cause; so did ranks 0 and 2",
			"rank 1 of a subgroup (rank 5 of the job) failed during barrier #1 (epoch 0, seen by rank 3 (rank 2 " +
				"of the job)): a cause; so did ranks 0 and 2 (ranks 4 and 7 of the job)"}},
		{func(in numbering) error {
			return &TimeoutError{Call: "barrier #1", Missing: []Seen{{1, "x"}, {2, "y"}}, Err: context.Canceled, in: in}
		}, []string{"barrier #1 was cancelled on rank 0 after 0s, waiting for rank 1 (last seen: x); rank 2 (last " +
			"seen: y)", "barrier #1 was cancelled on rank 0 of a subgroup (rank 7 of the job) after 0s, waiting for " +
			"rank 1 (rank 5 of the job, last seen: x); rank 2 (rank 4 of the job, last seen: y)"}},
		{func(in numbering) error { return &MismatchError{RankA: 1, CallA: "x", RankB: 3, CallB: "y", in: in} },
			[]string{"ranks disagree: rank 1 called x, rank 3 called y", "ranks disagree: rank 1 of a subgroup " +
				"(rank 5 of the job) called x, rank 3 (rank 2 of the job) called y"}},
		{func(in numbering) error { return &abortedError{1, cause, in} },
			[]string{"rank 1: process group aborted: a cause",
				"rank 1 of a subgroup (rank 5 of the job): process group aborted: a cause"}},
		{func(in numbering) error { return &RankError{Rank: 9, Reporter: -1, Err: cause, in: in} },
			[]string{"rank 9 failed (epoch 0, seen by rank -1): a cause",
				"rank 9 failed (epoch 0, seen by rank -1): a cause"}},
	} {
		for i, in := range []numbering{nil, {7, 5, 4, 2}} {
			if got := c.err(in).Error(); got != c.want[i] {
				t.Errorf("%q, want %q", got, c.want[i])
			}
		}
	}
}
