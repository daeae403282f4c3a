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
		if o := outcome(&abortedError{1, cause}); o != flight.Aborted {
			t.Errorf("%v: it is recorded as %q", cause, o)
		}
	}
}
