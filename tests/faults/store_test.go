//go:build linux

package faults

import (
	"strconv"
	"syscall"
	"testing"
	"time"

	"tutti/internal/proctest"
	"tutti/tests/internal/rig"
)

// TestStoreLost takes the store away in the middle of a job: by death, and by silence.
func TestStoreLost(t *testing.T) {
	t.Parallel()
	for _, how := range []struct {
		name string
		take func(store *proctest.Child)
	}{{"killed", (*proctest.Child).Kill}, {"stopped", (*proctest.Child).Stop}} {
		t.Run(how.name, func(t *testing.T) {
			t.Run("collectives go on", func(t *testing.T) {
				t.Parallel()
				s := rig.New(t)
				store, address := startStore(t, s, rig.Embedded)
				job := s.Run([]string{"TUTTI_SECRET=" + secret}, "-n", "4", "--store", address, "--transport", "tcp",
					"--timeout", "20s")
				ranks := s.Arrive(4)
				rig.Well(ranks, rig.Command{Verb: "join"})
				rig.Well(ranks, rig.Command{Verb: "verify", Seed: 1, Counts: mixed})
				rig.Well(ranks, rig.Command{Verb: "loop", Seed: 2, Counts: mixed})
				before := rig.Well(ranks, rig.Command{Verb: "await", Steps: 1})[0].Steps
				how.take(store)
				// Longer than a lease lasts.
				until := time.Now().Add(4 * time.Second)
				for steps := before + 1; ; steps = rig.Well(ranks[:1], rig.Command{Verb: "await",
					Steps: steps})[0].Steps + 1 {
					if time.Now().After(until) && steps > before+5 {
						break
					}
				}
				rig.Well(ranks, rig.Command{Verb: "stop"})
				rig.Well(ranks, rig.Command{Verb: "ended"})
				rig.Leave(ranks)
				job.End(0)
				store.Kill()
			})
			t.Run("new links fail in time", func(t *testing.T) {
				t.Parallel()
				const n, timeout = 16, 20 * time.Second
				s := rig.New(t)
				store, address := startStore(t, s, rig.Embedded)
				job := s.Run([]string{"TUTTI_SECRET=" + secret}, "-n", strconv.Itoa(n), "--store", address, "--timeout",
					timeout.String())
				ranks := s.Arrive(n)
				rig.Well(ranks, rig.Command{Verb: "join"})
				how.take(store)
				failed := 0
				// some of these pairs are linked since the join, some are not
				for _, distance := range []int{1, 3, 5, 6, 7} {
					for _, r := range ranks[:n/2] {
						to := ranks[r.Number+distance]
						r.Tell(rig.Command{Verb: "send", Peer: to.Number, Steps: 10})
						to.Tell(rig.Command{Verb: "recv", Peer: r.Number, Steps: 10})
						for _, end := range []*rig.Rank{to, r} {
							a := end.Hear()
							if end == to && a.Fault != nil {
								failed++
								if a.Fault.Kind != "timeout" && a.Fault.Kind != "rank" || !a.Fault.Names(r.Number) {
									t.Errorf("rank %d from %d: %v", to.Number, r.Number, a.Fault)
								}
							}
							if a.Took >= 2*timeout {
								t.Errorf("rank %d: %v after %v, where the timeout is %v", end.Number, a.Fault, a.Took,
									timeout)
							}
						}
						if failed > 0 {
							break
						}
					}
					if failed > 0 {
						break
					}
				}
				if failed == 0 {
					t.Error("no pair of ranks needed the store: the test tests nothing")
				}
				rig.Leave(ranks)
				job.End(0)
				store.Kill()
			})
		})
	}
}

// Two jobs run on one store, and one of them dies.
func TestJobsOfOneStoreAreApart(t *testing.T) {
	t.Parallel()
	s := rig.New(t)
	store, address := startStore(t, s, rig.Embedded)
	const n = 3
	var jobs [2]*proctest.Child
	var ranks [2][]*rig.Rank
	for i := range jobs {
		jobs[i] = s.Run([]string{"TUTTI_SECRET=" + secret}, "-n", strconv.Itoa(n), "--store", address, "--job",
			"job"+strconv.Itoa(i))
		ranks[i] = s.Arrive(n)
	}
	both := append(append([]*rig.Rank{}, ranks[0]...), ranks[1]...)
	rig.Well(both, rig.Command{Verb: "join"})
	for i := range ranks {
		rig.Well(ranks[i], rig.Command{Verb: "loop", Seed: uint64(i) << 60, Counts: mixed})
	}
	rig.Well(both, rig.Command{Verb: "await", Steps: 2})
	ranks[0][1].Signal(syscall.SIGKILL)
	jobs[0].End(128 + int(syscall.SIGKILL))
	steps := rig.Well(ranks[1][:1], rig.Command{Verb: "await"})[0].Steps
	rig.Well(ranks[1], rig.Command{Verb: "await", Steps: steps + 3})
	rig.Well(ranks[1], rig.Command{Verb: "stop"})
	rig.Well(ranks[1], rig.Command{Verb: "ended"})
	rig.Leave(ranks[1])
	jobs[1].End(0)
	store.Kill()
}
