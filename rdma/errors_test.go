package rdma

import (
	"testing"
)

// A status is recoverable if it says nothing against the request: all others stay wrong when it is
// repeated.
func TestStatusesThatMaySucceedLater(t *testing.T) {
	want := map[Status]bool{Flushed: true, RetryExceeded: true, RNRRetryExceeded: true,
		ResponseTimeout: true, RemoteAborted: true, FatalError: true, GeneralError: true}
	for s := Success; s <= GeneralError; s++ {
		if got := s.Recoverable(); got != want[s] {
			t.Errorf("%v: %v, want %v", s, got, want[s])
		}
	}
}
