package bench

import (
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"tutti/internal/tick"
	"tutti/internal/yield"
)

// clock reads the monotonic clock of the machine, which is the same in all processes, without a
// call of the system.
type clock struct {
	set    sync.Once
	origin time.Time
	offset time.Duration // of the machine's clock at origin
}

var machine clock

// now returns the time since some point in the past that all processes of the machine share.
func (c *clock) now() time.Duration {
	c.set.Do(func() {
		c.origin = time.Now()
		best := time.Duration(1<<63 - 1)
		for range 100 { // the quickest reading has the least error
			var t unix.Timespec
			before := time.Since(c.origin)
			if unix.ClockGettime(unix.CLOCK_MONOTONIC, &t) != nil {
				return // without it, ranks begin when they can
			}
			if took := time.Since(c.origin) - before; took < best {
				best, c.offset = took, time.Duration(t.Nano())-before-took/2
			}
		}
	})
	return c.offset + time.Since(c.origin)
}

// together returns at the next multiple of an interval but one. Ranks that leave a barrier one
// after the other begin what follows together: else a root that leaves it first is ahead of those
// that wait for it. Until shortly before, other threads may have the processor (see measure.h of
// tests/peers).
func (c *clock) together(interval time.Duration) {
	until := (c.now()/interval + 2) * interval
	for c.now() < until-tick.Spin {
		yield.Now()
	}
	for c.now() < until {
	}
}

// spans returns how long calls took of which times has two numbers each, maxima over the ranks: of
// the negative times of their beginnings, and of the times of their ends. It uses the memory of
// times.
func spans(times []float64) []float64 {
	n := len(times) / 2
	for i := range n {
		times[i] = times[2*i] + times[2*i+1]
	}
	return times[:n]
}
