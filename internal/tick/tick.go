// Package tick has the times at which the ranks of a measurement begin a call together: those at
// which the clock of their machine is a multiple of an interval. All whose figures are compared,
// tutti bench --touch and the programs of tests/peers, take the interval from here.
package tick

import (
	"strings"
	"time"
)

// Intervals. They are long beside the time between the first and the last rank that leave a
// barrier: ranks that leave it on both sides of a tick begin an interval apart.
const (
	Memory  = 2 * time.Microsecond   // barriers take less than one
	Network = 128 * time.Microsecond // ranks leave one over tcp within 5, one of Gloo within 20 to 30
)

// Spin is how long before a tick ranks stop leaving their processors to other threads: other ranks
// may still wait in the barrier for what a library's thread does.
const Spin = 10 * time.Microsecond

// Of returns the interval for ranks of one machine that may use some transports, separated by
// commas: Network if there is no shared memory among them.
func Of(transports string) time.Duration {
	for name := range strings.SplitSeq(transports, ",") {
		if name != "tcp" && name != "rdma" {
			return Memory
		}
	}
	return Network
}
