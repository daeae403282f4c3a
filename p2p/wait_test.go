package p2p_test

import (
	"context"
	"errors"
	"testing"
	"time"

	"tutti/p2p"
)

// What a rank has said of a long wait is renewed every second, also if the wait has no bound, and
// more often when its time runs out.
func TestLongWaitsAreRenewed(t *testing.T) {
	for _, limit := range []time.Duration{0, time.Second, time.Minute} {
		var w p2p.Wait
		calls, began := 0, time.Now()
		w.OnLong(func() { calls++ })
		w.Reset(context.Background(), limit, false)
		w.Since(began)
		last := began // of the latest call, or before it
		for waited := 10 * time.Millisecond; ; waited += 10 * time.Millisecond {
			before, now := calls, began.Add(waited)
			if limit > 0 && waited > limit || waited > 5*time.Minute {
				if err := w.Over(now); (limit > 0) != errors.Is(err, p2p.ErrTimeout) {
					t.Errorf("limit %v: after %v: %v", limit, waited, err)
				}
				break
			}
			if err := w.Over(now); err != nil {
				t.Fatalf("limit %v: after %v: %v", limit, waited, err)
			}
			late := limit > 0 && waited > limit/2
			bound := time.Second
			if late {
				bound = 10 * time.Millisecond
			}
			switch quiet := now.Sub(last); {
			case calls > before:
				last = now
			case quiet > bound:
				t.Fatalf("limit %v: nothing is said between %v and %v", limit, last.Sub(began), waited)
			}
			if calls > before && !late && calls > int(waited/time.Second)+1 {
				t.Fatalf("limit %v: %d calls in %v", limit, calls, waited)
			}
			if long := waited > 250*time.Millisecond || late; w.Long() != long || w.Late() != late {
				t.Fatalf("limit %v: after %v: long %v, late %v", limit, waited, w.Long(), w.Late())
			}
		}
		if w.Restart(); w.Long() || w.Late() {
			t.Errorf("limit %v: the time begins anew, and has passed", limit)
		}
	}
}
