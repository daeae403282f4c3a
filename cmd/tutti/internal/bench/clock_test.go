package bench

import (
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// The clock is the machine's: two of them agree.
func TestClocksAgree(t *testing.T) {
	var a, b clock
	a.now()
	for range 100 {
		var now unix.Timespec
		before := a.now()
		if err := unix.ClockGettime(unix.CLOCK_MONOTONIC, &now); err != nil {
			t.Fatal(err)
		}
		at := time.Duration(now.Nano())
		if after := b.now(); at < before-time.Millisecond || at > after+time.Millisecond {
			t.Fatalf("the machine's clock is at %v, read between %v and %v", at, before, after)
		}
	}
}

func TestTogetherReturnsAtTick(t *testing.T) {
	var c clock
	for range 100 {
		before := c.now()
		c.together()
		if after := c.now(); after/tick < before/tick+2 {
			t.Fatalf("called at %v, it returned at %v: the next tick but one is at %v", before, after,
				(before/tick+2)*tick)
		}
	}
}
