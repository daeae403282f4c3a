package bench

import (
	"slices"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"tutti/internal/tick"
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
	for _, interval := range []time.Duration{tick.Memory, tick.Network} {
		for range 100 {
			before := c.now()
			c.together(interval)
			if after, next := c.now(), (before/interval+2)*interval; after < next {
				t.Fatalf("called at %v, it returned at %v: the next tick of %v but one is at %v", before, after,
					interval, next)
			}
		}
	}
}

func TestSpansFromFirstBeginningToLastEnd(t *testing.T) {
	// two calls of two ranks: from 10 and 12 to 15 and 13, and from 20 and 19 to 21 and 25
	times := []float64{max(-10, -12), max(15, 13), max(-20, -19), max(21, 25)}
	if got := spans(times); !slices.Equal(got, []float64{5, 6}) {
		t.Errorf("spans of %v, want 5 and 6", got)
	}
}
