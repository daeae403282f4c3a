//go:build linux

package faults

import (
	"slices"
	"strconv"
	"syscall"
	"testing"

	"tutti/tests/internal/rig"
)

// TestStoppedRankIsNotLost stops a rank without ending it: its links stay, and it is silent.
func TestStoppedRankIsNotLost(t *testing.T) {
	t.Parallel()
	for _, transport := range []string{"shm", "tcp"} {
		for _, n := range []int{2, 5} {
			t.Run(transport+"/"+strconv.Itoa(n), func(t *testing.T) {
				t.Parallel()
				s := rig.New(t)
				job := s.Run(nil, "-n", strconv.Itoa(n), "--transport", transport, "--timeout", "8s")
				ranks := s.Arrive(n)
				rig.Well(ranks, rig.Command{Verb: "join"})
				rig.Well(ranks, rig.Command{Verb: "loop", Seed: 1, Counts: mixed})
				rig.Well(ranks, rig.Command{Verb: "await", Steps: 1})
				stopped := n / 2
				ranks[stopped].Signal(syscall.SIGSTOP)
				others := without(ranks, stopped)
				for i, a := range rig.Each(others, rig.Command{Verb: "ended"}) {
					if a.Fault == nil || a.Fault.Kind != "timeout" || !slices.Contains(a.Fault.Ranks, stopped) {
						t.Errorf("rank %d: %v, want a timeout that names rank %d", others[i].Number, a.Fault, stopped)
					}
				}
				ranks[stopped].Signal(syscall.SIGCONT)
				if a := ranks[stopped].Do(rig.Command{Verb: "ended"}); a.Fault == nil || a.Fault.Kind == "wrong" {
					t.Errorf("the stopped rank, when it goes on: %v", a.Fault)
				}
				rig.Each(ranks, rig.Command{Verb: "close"})
				rig.Exit(ranks, 3)
				job.End(3)
				s.Clean()
			})
		}
	}
}
