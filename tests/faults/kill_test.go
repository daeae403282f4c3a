//go:build linux

package faults

import (
	"fmt"
	"math/rand/v2"
	"os"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"tutti/internal/proctest"
	"tutti/tests/internal/rig"
)

// mixed are numbers of elements that take the paths for small and for large operations.
var mixed = []int{0, 1, 1000, 70_000}

// A rank or the launcher is killed, or the launcher is interrupted, at every stage of a job. Each
// combination has one of the two transports, by chance which. Of those with more ranks than most
// machines of tests have cores, chance takes a half.
func TestJobsEndWhenRankOrLauncherIsKilled(t *testing.T) {
	seed := rand.Uint64()
	t.Logf("seed %#x", seed)
	rnd := rand.New(rand.NewPCG(seed, 0))
	turn := rnd.IntN(2)
	for i, n := range []int{1, 2, 3, 8} {
		if testing.Short() && n == 3 {
			continue
		}
		for j, who := range []string{"rank", "launcher", "interrupt"} {
			for k, when := range []string{"before the join", "in the join", "in collectives"} {
				if testing.Short() && rnd.IntN(3) > 0 || n > 2 && rnd.IntN(2) > 0 {
					continue
				}
				transport := []string{"shm", "tcp"}[(turn+i+j+k)%2]
				victim, rounds := rnd.IntN(n), rnd.IntN(4)
				t.Run(fmt.Sprintf("%s/%d/%s/%s", transport, n, who, when), func(t *testing.T) {
					t.Parallel()
					kill(t, transport, n, who, when, victim, rounds)
				})
			}
		}
	}
}

func kill(t *testing.T, transport string, n int, who, when string, victim, rounds int) {
	s := rig.New(t)
	job := s.Run(nil, "-n", strconv.Itoa(n), "--transport", transport)
	ranks := s.Arrive(n)
	switch when {
	case "in the join":
		// One rank does not join, so that the others stay in theirs. The last may be through with
		// it if it is the only one.
		for i, r := range ranks {
			if i != victim || n == 1 {
				r.Tell(rig.Command{Verb: "join"})
			}
		}
		if rounds > 0 { // and they have got as far as listening
			rig.Eventually(t, func() bool { return len(s.Sockets()) > 1 },
				func() string { return "no process listens" })
		}
	case "in collectives":
		rig.Well(ranks, rig.Command{Verb: "join"})
		rig.Well(ranks, rig.Command{Verb: "loop", Seed: 1, Counts: mixed})
		rig.Well(ranks, rig.Command{Verb: "await", Steps: rounds})
	}
	s.Sockets()
	switch who {
	case "rank":
		ranks[victim].Signal(syscall.SIGKILL)
		job.End(128 + int(syscall.SIGKILL))
	case "launcher":
		job.Signal(syscall.SIGKILL)
	case "interrupt":
		job.Signal(syscall.SIGINT)
	}
	for _, r := range ranks {
		r.Gone()
	}
	if code := job.Wait(); code == 0 {
		t.Error("exit code 0")
	}
	s.Clean()
}

// TestKillAnyTime kills at arbitrary times, from the start of the launcher on.
func TestKillAnyTime(t *testing.T) {
	seed := rand.Uint64()
	t.Logf("seed %#x", seed)
	rnd := rand.New(rand.NewPCG(seed, 0))
	rounds := 20
	if testing.Short() {
		rounds = 8
	}
	for i := range rounds {
		n := 2 + rnd.IntN(4)
		transport := []string{"shm", "tcp"}[i%2]
		signal := []syscall.Signal{syscall.SIGKILL, syscall.SIGKILL, syscall.SIGINT, syscall.SIGTERM}[rnd.IntN(4)]
		moment := time.Duration(rnd.IntN(500)) * time.Millisecond
		if i%3 == 0 {
			moment /= 20
		}
		launcher := rnd.IntN(2) == 0
		t.Run(fmt.Sprintf("%d/%s/%v/%v", n, transport, signal, moment), func(t *testing.T) {
			t.Parallel()
			s := rig.New(t)
			job := s.Start(nil, rig.Tutti(t), "run", "-n", strconv.Itoa(n), "--transport", transport, "--",
				rig.Tutti(t), "bench", "--max", "4M")
			<-time.After(moment) // what is being done then is up to chance, and that is the point
			s.Sockets()
			kill := job.TrySignal
			if !launcher {
				for pid, line := range s.Processes() {
					if !strings.Contains(line, "tutti bench") || strings.Contains(line, "tutti run") {
						continue
					}
					p, err := os.FindProcess(pid)
					if err != nil {
						t.Fatal(err)
					}
					defer p.Release()
					if s.Processes()[pid] == line { // else it has ended, and p may be another one of its number
						kill = func(sig syscall.Signal) { p.Signal(sig) } // it may have ended
					}
				}
			}
			kill(signal)
			job.Wait()
			s.Clean()
		})
	}
}

// All processes of a job are killed at once, as by batch systems: what that leaves in the temporary
// directory the next job there removes.
func TestNextJobRemovesWhatKilledOneLeft(t *testing.T) {
	s := rig.New(t)
	job := s.Run(nil, "-n", "3")
	rig.Well(s.Arrive(3), rig.Command{Verb: "join"})
	s.Sockets()
	all := s.Processes()
	for pid := range all {
		proctest.Stop(t, pid) // so that none sees another die
	}
	for pid := range all {
		syscall.Kill(pid, syscall.SIGKILL)
	}
	job.Wait()
	next := s.Run(nil, "-n", "3")
	ranks := s.Arrive(3)
	rig.Well(ranks, rig.Command{Verb: "join"})
	rig.Leave(ranks)
	next.End(0)
	s.Clean()
}
