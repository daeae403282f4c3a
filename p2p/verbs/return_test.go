package verbs

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"tutti/p2p/linktest"
	"tutti/rdma/soft"
)

// exchange sends and receives frames from to until of both directions, asleep when there is nothing
// to do, and checks that each arrives once and in order. At reports each frame that has arrived.
func exchange(e *linktest.End, from, until int, at func(i int)) error {
	size := func(i int) int { return (i * 7919) % (e.MaxFrame() + 1) >> (i % 5 * 2) }
	var buf []byte
	for sent, got := from, from; sent < until || got < until; {
		idle := true
		if sent < until {
			h, p := linktest.Frame(sent, size(sent), buf)
			buf = p
			ok, err := e.Send(&h, p)
			if err != nil {
				return fmt.Errorf("frame %d: %w", sent, err)
			}
			if ok {
				sent++
				idle = false
			}
		}
		h, p, ok, err := e.Take()
		if err != nil {
			return fmt.Errorf("after %d frames: %w", got, err)
		}
		if ok {
			if err := linktest.Check(got, size(got), h, p); err != nil {
				return err
			}
			if at != nil {
				at(got)
			}
			got++
			idle = false
		}
		if idle {
			if err := e.Nap(); err != nil {
				return fmt.Errorf("after %d frames sent and %d received: %w", sent, got, err)
			}
		}
	}
	return e.FlushAll()
}

// together runs exchange on both ends. A side that has finished goes on to make progress.
func together(t *testing.T, a, b *linktest.End, from, until int, at func(i int)) {
	t.Helper()
	result := make(chan error, 2)
	done := make(chan struct{})
	serve := func(e *linktest.End, at func(i int)) {
		result <- exchange(e, from, until, at)
		for {
			select {
			case <-done:
				return
			case <-time.After(time.Millisecond):
				if h, _, _ := e.Recv(); h != nil {
					return
				}
			}
		}
	}
	stopped := make(chan struct{}, 2)
	go func() { serve(a, at); stopped <- struct{}{} }()
	go func() { serve(b, nil); stopped <- struct{}{} }()
	err := errors.Join(<-result, <-result)
	close(done)
	<-stopped
	<-stopped
	if err != nil {
		t.Fatal(err)
	}
}

// Frames arrive once and in order while queue pairs fail, ports go down and come back, and devices
// are removed; afterwards the ring carries them again.
func TestFramesSurviveDevices(t *testing.T) {
	breakIt := func(f *soft.Fabric, l *link) {
		l.mu.Lock()
		defer l.mu.Unlock()
		if n := l.lane; n != nil && l.stageOf(n) >= probing {
			f.Break(n.port.Name(), n.qp.Number())
		}
	}
	for name, fault := range map[string]func(f *soft.Fabric, l *link, i int){
		"failed queue pairs": func(f *soft.Fabric, l *link, _ int) { breakIt(f, l) },
		"port down":          func(f *soft.Fabric, _ *link, i int) { f.SetPort("soft0", 1, i%2 == 1) },
		"both ports down": func(f *soft.Fabric, _ *link, i int) {
			f.SetPort("soft0", 1, i%2 == 1)
			f.SetPort("soft1", 1, i%2 == 1)
		},
		"moved addresses": func(f *soft.Fabric, l *link, _ int) {
			f.MoveGIDs("soft1", 1, 1)
			breakIt(f, l)
		},
		"removed device": func(f *soft.Fabric, _ *link, i int) {
			if i%2 == 0 {
				f.Remove("soft0")
			} else {
				f.Restore("soft0")
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			f := soft.New(soft.Config{Seed: 9, Late: 2})
			t.Cleanup(f.Close)
			a, b := pair(t, f)
			raised(t, a, b)
			const frames, faults = 4000, 10
			n := 0
			together(t, a, b, 0, frames, func(i int) {
				if i%(frames/faults) == frames/faults/2 {
					fault(f, inner([]*linktest.End{a, b}[n%2]), n)
					n++
				}
			})
			if n != faults {
				t.Fatalf("%d faults", n)
			}
			raised(t, a, b)
			before := inner(a).tx.out.seq
			together(t, a, b, frames, frames+100, nil)
			if l := inner(a); l.tx == nil || l.tx.out.seq < before+100 {
				t.Error("frames do not go over the ring")
			}
		})
	}
}

// Frames that were sent over a ring and not taken are sent again exactly once, whatever the other
// end has taken, held or not, when the queue pair fails.
func TestFramesOfLostRing(t *testing.T) {
	f := soft.New(soft.Config{Seed: 10})
	t.Cleanup(f.Close)
	r := rand.New(rand.NewPCG(3, 4))
	a, b := pair(t, f)
	for round := range 30 {
		raised(t, a, b)
		inner(a).pause = minPause
		sent := 0
		var sizes []int
		for range r.IntN(40) {
			n := r.IntN(a.MaxFrame() + 1)
			if r.IntN(2) == 0 {
				n %= 200
			}
			h, p := linktest.Frame(sent, n, nil)
			ok, err := a.Send(&h, p)
			if err != nil {
				t.Fatal(err)
			}
			if !ok {
				break
			}
			sizes = append(sizes, n)
			sent++
		}
		got := 0
		for range r.IntN(sent + 1) {
			h, p, ok, err := b.Take()
			if err != nil {
				t.Fatal(err)
			}
			if ok {
				if err := linktest.Check(got, sizes[got], h, p); err != nil {
					t.Fatal(err)
				}
				got++
			}
		}
		held := round%2 == 0
		if held {
			if _, _, err := b.Recv(); err != nil {
				t.Fatal(err)
			}
		}
		n := inner([]*linktest.End{a, b}[r.IntN(2)]).lane
		f.Break(n.port.Name(), n.qp.Number())
		over := func(e *linktest.End) bool { // the end has noticed, so that the next round has another lane
			l := inner(e)
			l.mu.Lock()
			defer l.mu.Unlock()
			return l.lane == nil || l.lane.gen > n.gen
		}
		for late := time.Now().Add(linktest.Patience); got < sent || !over(a) || !over(b); {
			if _, err := a.Flush(); err != nil {
				t.Fatal(err)
			}
			if h, _, err := a.Recv(); h != nil || err != nil {
				t.Fatal(h, err)
			}
			h, p, ok, err := b.Take()
			switch {
			case err != nil:
				t.Fatal(err)
			case ok:
				if err := linktest.Check(got, sizes[got], h, p); err != nil {
					t.Fatalf("round %d: %v", round, err)
				}
				got++
			case time.Now().After(late):
				t.Fatalf("round %d: %d of %d frames have arrived", round, got, sent)
			}
		}
	}
	if g := inner(a).m.gen; g < 20 {
		t.Errorf("%d rings", g)
	}
}
