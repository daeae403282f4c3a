package rdma

import (
	"errors"
	"fmt"
	"testing"
)

// A status is recoverable if it says nothing against the request: all others stay wrong when it is
// repeated.
func TestStatusesThatMaySucceedLater(t *testing.T) {
	want := map[Status]bool{Flushed: true, RetryExceeded: true, RNRRetryExceeded: true,
		ResponseTimeout: true, RemoteAborted: true, LocalQPOperation: true, FatalError: true, GeneralError: true}
	for s := Success; s <= GeneralError; s++ {
		if got := s.Recoverable(); got != want[s] {
			t.Errorf("%v: %v, want %v", s, got, want[s])
		}
		err := fmt.Errorf("a put: %w", &StatusError{Status: s})
		if got := Fatal(err); got != (s != Success && !want[s]) {
			t.Errorf("%v: fatal %v", err, got)
		}
		flushed := fmt.Errorf("%w, because of: %w", &StatusError{Status: Flushed}, err)
		if Fatal(flushed) {
			t.Errorf("%v is fatal", flushed)
		}
	}
	if Fatal(nil) || Fatal(errors.New("x")) {
		t.Error("an error without a status is fatal")
	}
}
