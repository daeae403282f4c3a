//go:build linux

package faults

import (
	"fmt"
	"slices"
	"strconv"
	"syscall"
	"testing"

	"tutti/internal/proctest"
	"tutti/tests/internal/rig"
)

// TestStoppedRankIsNotLost stops a rank without ending it: its links stay, and it is silent. The
// jobs wait for their timeouts, which bound their joins as well, at the same time.
func TestStoppedRankIsNotLost(t *testing.T) {
	t.Parallel()
	type job struct {
		name    string
		s       *rig.Stage
		p       *proctest.Child
		ranks   []*rig.Rank
		stopped int
	}
	var jobs []job
	for _, transport := range []string{"shm", "tcp"} {
		for _, n := range []int{2, 5} {
			s := rig.New(t)
			p := s.Run(nil, "-n", strconv.Itoa(n), "--transport", transport, "--timeout", "20s")
			j := job{fmt.Sprintf("%d ranks over %s", n, transport), s, p, s.Arrive(n), n / 2}
			rig.Well(j.ranks, rig.Command{Verb: "join"})
			rig.Well(j.ranks, rig.Command{Verb: "loop", Seed: 1, Counts: mixed})
			rig.Well(j.ranks, rig.Command{Verb: "await", Steps: 1})
			j.ranks[j.stopped].Signal(syscall.SIGSTOP)
			jobs = append(jobs, j)
		}
	}
	for _, j := range jobs {
		others := without(j.ranks, j.stopped)
		for i, a := range rig.Each(others, rig.Command{Verb: "ended"}) {
			if a.Fault == nil || a.Fault.Kind != "timeout" || !slices.Contains(a.Fault.Ranks, j.stopped) {
				t.Errorf("%s: rank %d: %v, want a timeout that names rank %d", j.name, others[i].Number, a.Fault,
					j.stopped)
			}
		}
		j.ranks[j.stopped].Signal(syscall.SIGCONT)
		if a := j.ranks[j.stopped].Do(rig.Command{Verb: "ended"}); a.Fault == nil || a.Fault.Kind == "wrong" {
			t.Errorf("%s: the stopped rank, when it goes on: %v", j.name, a.Fault)
		}
		rig.Each(j.ranks, rig.Command{Verb: "close"})
		rig.Exit(j.ranks, 3)
		j.p.End(3)
		j.s.Clean()
	}
}
