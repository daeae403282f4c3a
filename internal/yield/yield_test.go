package yield

import (
	"testing"
	"time"

	"pgregory.net/rapid"
)

// spin has a Poller note yields of a length, one every 10 us for a time, and returns when it moved.
func spin(p *Poller, from, d time.Duration, took int64, random func(int64) int64) (moves []time.Duration) {
	for at := from; at < from+d; at += 10 * time.Microsecond {
		if p.note(int64(at), took, random) {
			moves = append(moves, at)
		}
	}
	return moves
}

func never(int64) int64 { return 0 }

func TestPollerMovesAwayFromAnother(t *testing.T) {
	var p Poller
	if m := spin(&p, time.Hour, time.Second, taken-1, never); len(m) != 0 {
		t.Errorf("moved %d times while it was alone", len(m))
	}
	m := spin(&p, 2*time.Hour, time.Millisecond, taken, func(n int64) int64 { return n - 1 })
	if len(m) != 1 || m[0] > 2*time.Hour+most*10*time.Microsecond {
		t.Errorf("moved at %v, want once, within %d yields", m, most)
	}
	if m := spin(&p, 3*time.Hour, 15*time.Microsecond, slice+1, never); len(m) != 1 {
		t.Errorf("moved %d times after two long absences, want once", len(m))
	}
}

// Where all processors are busy, moves become rare.
func TestPollerMovesSeldomUnderContention(t *testing.T) {
	var p Poller
	m := spin(&p, time.Hour, time.Minute, slice+1, never)
	if n := len(m); n < 60 || n > 70 {
		t.Errorf("moved %d times in a minute, want about once a second", n)
	}
	m = spin(&p, 2*time.Hour, time.Duration(2*first), taken, never)
	if len(m) != 2 { // at once, and after the first pause
		t.Errorf("moved at %v after a quiet time", m)
	}
}

// Yields that returned at once make it forget the others, and moves are never nearer than first.
func TestPollerCounts(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var p Poller
		at, run, moved := int64(time.Hour), int64(0), int64(0)
		for range rapid.IntRange(1, 500).Draw(t, "yields") {
			took := rapid.SampledFrom([]int64{0, taken - 1, taken, slice, slice + 1}).Draw(t, "took")
			at += took + rapid.Int64Range(0, last).Draw(t, "between")>>rapid.IntRange(0, 30).Draw(t, "shift")
			switch {
			case took < taken:
				run = 0
			case took > slice:
				run += heavy
			default:
				run++
			}
			if !p.note(at, took, func(n int64) int64 { return rapid.Int64Range(0, n-1).Draw(t, "random") }) {
				if run >= most && at-moved >= last {
					t.Fatalf("not moved after %d, %v after the last time", run, time.Duration(at-moved))
				}
				continue
			}
			if run < least || at-moved < first {
				t.Fatalf("moved after %d, %v after the last time", run, time.Duration(at-moved))
			}
			run, moved = 0, at
		}
	})
}

// A thread that yields continues, moved or not.
func TestYield(t *testing.T) {
	var p Poller
	for range 1000 {
		p.Yield()
	}
}
