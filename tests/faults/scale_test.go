//go:build linux

package faults

import (
	"fmt"
	"os"
	"strconv"
	"strings"
	"testing"
	"time"

	"tutti/tests/internal/rig"
)

// TestManyRanks runs far more ranks than there are cores.
func TestManyRanks(t *testing.T) {
	n := 64
	if testing.Short() {
		n = 24
	}
	for _, transport := range []string{"shm", "tcp"} {
		t.Run(transport, func(t *testing.T) {
			s := rig.New(t)
			began := time.Now()
			job := s.Run(nil, "-n", strconv.Itoa(n), "--transport", transport)
			ranks := s.Arrive(n)
			started := time.Now()
			rig.Well(ranks, rig.Command{Verb: "join"})
			joined := time.Now()
			rig.Well(ranks, rig.Command{Verb: "allreduce", Counts: []int{1000}})
			rig.Well(ranks, rig.Command{Verb: "barrier"})
			done := time.Now()
			threads, links := 0, 0
			for _, r := range ranks {
				b, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", r.PID))
				if err != nil {
					t.Fatal(err)
				}
				_, rest, _ := strings.Cut(string(b), "\nThreads:")
				count, _ := strconv.Atoi(strings.TrimSpace(strings.SplitN(rest, "\n", 2)[0]))
				threads += count
			}
			for _, k := range s.Sockets() {
				if !k.Listening && k.Network == "tcp" {
					links++
				}
			}
			rig.Leave(ranks)
			job.End(0)
			t.Logf("%d ranks: started in %v, joined in %v, allreduce and barrier in %v, ended in %v; %d threads, "+
				"%d ends of connections", n,
				started.Sub(began).Round(time.Millisecond), joined.Sub(started).Round(time.Millisecond),
				done.Sub(joined).Round(time.Millisecond),
				time.Since(done).Round(time.Millisecond), threads, links)
			if threads > 30*n {
				t.Errorf("%d ranks have %d threads", n, threads)
			}
			s.Clean()
		})
	}
}

// TestReadmeExample does what the first lines of a README say.
func TestReadmeExample(t *testing.T) {
	s := rig.New(t)
	p := s.Start(nil, "go", "run", "./cmd/tutti", "run", "-n", "4", "--", "./examples/hello")
	p.End(0)
	for r := range 4 {
		if want := fmt.Sprintf("[%d] rank %d of 4: the ranks sum to 6\n", r, r); !contains(p.Out.String(), want) {
			t.Errorf("it printed %q, want %q in it", p.Out.String(), want)
		}
	}
	// One line is right where the machine has more processors than this test may use.
	if text := p.Err.String(); text != "" && (!contains(text, "has bound it there") || strings.Count(text, "\n") != 1) {
		t.Errorf("on standard error: %q", text)
	}
}
