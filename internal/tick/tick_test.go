package tick

import (
	"testing"
	"time"
)

func TestOf(t *testing.T) {
	for transports, want := range map[string]time.Duration{"": Memory, "auto": Memory, "shm": Memory, "inproc": Memory,
		"shm,tcp": Memory, "tcp": Network, "rdma": Network, "rdma,tcp": Network} {
		if got := Of(transports); got != want {
			t.Errorf("%q: %v, want %v", transports, got, want)
		}
	}
}
