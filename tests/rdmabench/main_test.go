package main

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"
)

// TestMediansAreCompared: contestants take turns, the other one first in every other round, and the
// medians decide.
func TestMediansAreCompared(t *testing.T) {
	s := settings{Size: 1, Depth: streamBatch, Writes: streamBatch, Trips: 1, Deadline: time.Minute}
	for _, c := range []struct {
		ours   []float64
		missed bool
	}{{[]float64{90, 80, 1000}, false}, {[]float64{70, 1000, 60}, true}} {
		var turns string
		figures := func(who string, v []float64) func(context.Context, settings) (float64, error) {
			return func(context.Context, settings) (float64, error) {
				turns += who
				f := v[0]
				v = v[1:]
				return f, nil
			}
		}
		var out strings.Builder
		err := compare(&out, s, 3, []row{{what: "stream", program: "other", unit: "MiB/s",
			theirs: figures("a", []float64{100, 1, 101}), ours: figures("b", c.ours),
			ok: func(r float64) bool { return r >= 0.85 }, bar: "at least 0.85"}})
		if (err != nil) != c.missed || turns != "abbaab" || !strings.Contains(out.String(), "stream (other)") {
			t.Errorf("%v: error %v after turns %s, with\n%s", c.ours, err, turns, &out)
		}
	}
	broken := errors.New("no device")
	fails := func(context.Context, settings) (float64, error) { return 0, broken }
	if err := compare(&strings.Builder{}, s, 1, []row{{theirs: fails, ours: fails}}); !errors.Is(err, broken) {
		t.Errorf("%v, want %v", err, broken)
	}
}
