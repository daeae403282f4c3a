//go:build linux

package launchers

import (
	"fmt"
	"strings"
	"sync"
	"syscall"
	"testing"

	"tutti/internal/proctest"
	"tutti/tests/internal/rig"
)

// ranks starts n ranks of one host that know of no store, and has them join.
func ranks(t *testing.T, s *rig.Stage, n int, env ...string) ([]*proctest.Child, []*rig.Rank) {
	t.Helper()
	var all []*proctest.Child
	for i := range n {
		all = append(all, s.Start(append(env, fmt.Sprint("RANK=", i), fmt.Sprint("WORLD_SIZE=", n),
			fmt.Sprint("LOCAL_RANK=", i), fmt.Sprint("LOCAL_WORLD_SIZE=", n),
			fmt.Sprintf("TUTTI_JOB=%s-%d", t.Name(), syscall.Getpid())), proctest.Self()))
	}
	there := s.Arrive(n)
	rig.Well(there, rig.Command{Verb: "join"})
	return all, there
}

func TestStorelessRanksLeaveNoFiles(t *testing.T) {
	for _, transport := range []string{"shm", "tcp"} {
		s := rig.New(t)
		processes, all := ranks(t, s, 3, "TUTTI_TRANSPORT="+transport)
		rig.Well(all, rig.Command{Verb: "verify", Seed: 1, Counts: []int{0, 1, 1000, 70_000}})
		s.Sockets()
		// Rank 0, which serves the store, leaves first; it waits for the others.
		all[0].Tell(rig.Command{Verb: "close"})
		rig.Well(all[1:], rig.Command{Verb: "close"})
		if a := all[0].Hear(); a.Fault != nil {
			t.Errorf("rank 0 leaves: %v", a.Fault)
		}
		rig.Exit(all, 0)
		for _, p := range processes {
			p.End(0)
		}
		s.Clean()
	}
}

// Ranks leave a job and join the next at once, while rank 0 is still in the first.
func TestStorelessRanksJoinTheNextJob(t *testing.T) {
	s := rig.New(t)
	_, all := ranks(t, s, 3)
	for range 3 {
		rig.Well(all, rig.Command{Verb: "barrier"})
		rig.Well(all[1:], rig.Command{Verb: "close"})
		for _, r := range all[1:] {
			r.Tell(rig.Command{Verb: "join"})
		}
		rig.Well(all[:1], rig.Command{Verb: "close"})
		rig.Well(all[:1], rig.Command{Verb: "join"})
		for _, r := range all[1:] {
			if a := r.Hear(); a.Fault != nil {
				t.Fatalf("rank %d joins again: %v", r.Number, a.Fault)
			}
		}
	}
	rig.Leave(all)
	s.Clean()
}

func TestStorelessRanksShrink(t *testing.T) {
	s := rig.New(t)
	_, all := ranks(t, s, 3, "TUTTI_ON_FAILURE=shrink")
	rig.Well(all, rig.Command{Verb: "barrier"})
	s.Sockets()
	rest := all[:2]
	for _, r := range rest {
		r.Tell(rig.Command{Verb: "barrier"})
	}
	all[2].Signal(syscall.SIGKILL)
	all[2].Gone()
	passed := 0 // both, if they have noticed the loss before they begin
	for _, r := range rest {
		if a := r.Hear(); a.Fault == nil {
			passed++
		} else if a.Fault.Kind != "rank" || !a.Fault.Names(2) {
			t.Errorf("rank %d ends the barrier with %v", r.Number, a.Fault)
		}
	}
	if passed == 1 {
		t.Error("one rank has a barrier without the other")
	}
	rig.Well(rest, rig.Command{Verb: "barrier"}) // in another view, which the store has taken
	rig.Leave(rest)
	s.Clean()
}

func TestStorelessRanksSeeDeathOfRankZero(t *testing.T) {
	s := rig.New(t)
	_, all := ranks(t, s, 3)
	rig.Well(all, rig.Command{Verb: "loop", Seed: 1, Counts: []int{1000}})
	rig.Well(all, rig.Command{Verb: "await", Steps: 3})
	s.Sockets()
	all[0].Signal(syscall.SIGKILL)
	// The one that misses rank 0 first closes its group: the other may be waiting for it only.
	var ends sync.WaitGroup
	for _, r := range all[1:] {
		ends.Go(func() {
			a := r.Do(rig.Command{Verb: "ended"})
			// Whether the rank or its store is missed first is up to chance.
			if a.Fault == nil || !(a.Fault.Kind == "rank" && (a.Fault.Names(0) || a.Fault.Names(3-r.Number))) &&
				!strings.Contains(a.Fault.Text, "store cannot be reached") {
				t.Errorf("rank %d ends its loop with %v", r.Number, a.Fault)
			}
			if a := r.Do(rig.Command{Verb: "close"}); a.Fault != nil {
				t.Errorf("rank %d closes its group with %v", r.Number, a.Fault)
			}
		})
	}
	ends.Wait()
	rig.Exit(all[1:], 0)
	s.Clean()
}
