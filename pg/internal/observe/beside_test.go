package observe

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"tutti/bootstrap"
	"tutti/p2p"
	"tutti/pg/flight"
)

// start starts the Observer of a rank that has a group of two ranks, until the test ends.
func start(t *testing.T, job string, rank int, alone bool) *Observer {
	t.Helper()
	p := p2p.New(p2p.Config{Self: p2p.Identity{Rank: rank, Incarnation: 1}, Size: 2, Secret: make([]byte, 32)})
	o, err := Start(Config{Self: flight.Identity{Job: job, Rank: rank, Size: 2}, Proxy: p, Alone: alone,
		Groups: func() []Glance { return []Glance{{id: 1, Slot: rank, Ranks: []int{0, 1}, Peers: []Peer{{}}}} },
		Joined: func() bool { return true }, Logger: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		o.Stop()
		p.Close()
	})
	return o
}

// others asks an Observer for its state until that says what the process is in other jobs: an
// answer may be late.
func others(t *testing.T, o *Observer, want ...string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	var got []string
	for again := true; again; again = !slices.Equal(got, want) && ctx.Err() == nil {
		text, err := o.Status(ctx, 0)
		if err != nil {
			t.Fatal(err)
		}
		s, err := flight.Parse(text)
		if err != nil {
			t.Fatal(err)
		}
		got = nil
		for _, x := range s.Others {
			got = append(got, fmt.Sprintf("%s %d %v %v", x.Job, x.Rank, x.Joined, x.Silent))
			if !x.Silent && (len(x.Groups) != 1 || x.Groups[0].Slot != x.Rank || x.Groups[0].Peers != nil) {
				t.Errorf("%+v", x)
			}
		}
	}
	if !slices.Equal(got, want) {
		t.Errorf("rank %d of job %s says %q, want %q", o.cfg.Self.Rank, o.cfg.Self.Job, got, want)
	}
}

// A rank says what its process is in other jobs, while it is there.
func TestOthers(t *testing.T) {
	a, b, c, alone := start(t, "a", 0, false), start(t, "b", 1, false), start(t, "c", 0, false), start(t, "d", 0, true)
	others(t, a, "b 1 true false", "c 0 true false")
	others(t, c, "a 0 true false", "b 1 true false")
	others(t, alone)
	c.Stop()
	others(t, a, "b 1 true false")
	twin := start(t, "a", 1, false)
	others(t, a)
	others(t, twin)
	others(t, b)
	twin.Stop()
	others(t, b, "a 0 true false")
}

// A rank answers while the lock of another job's proxy is held, and says what that job has said in
// time.
func TestOthersHeldUp(t *testing.T) {
	a, b := start(t, "a", 0, false), start(t, "b", 1, false)
	start(t, "c", 0, false)
	func() {
		b.cfg.Proxy.Lock()
		defer b.cfg.Proxy.Unlock()
		others(t, a, "b 1 false true", "c 0 true false")
	}()
	others(t, a, "b 1 true false", "c 0 true false")
}

// What other jobs say never makes the answer too large.
func TestOthersTooLarge(t *testing.T) {
	a, b := start(t, "a", 0, false), start(t, "b", 1, false)
	others(t, a, "b 1 true false")
	b.cfg.Proxy.Lock()
	b.cfg.Groups = func() []Glance { return []Glance{{Err: errors.New(strings.Repeat("x", bootstrap.MaxStatusText))}} }
	b.cfg.Proxy.Unlock()
	others(t, a, "b 1 false true")
}

// Observers start and stop while others ask them.
func TestOthersComeAndGo(t *testing.T) {
	a, b := start(t, "a", 0, false), start(t, "b", 0, false)
	over := make(chan struct{})
	var asking sync.WaitGroup
	for _, o := range []*Observer{a, b} {
		asking.Go(func() {
			for {
				o.others()
				select {
				case <-over:
					return
				default:
				}
			}
		})
	}
	for range 100 {
		start(t, "c", 0, false).Stop()
	}
	a.Stop()
	close(over)
	asking.Wait()
}
