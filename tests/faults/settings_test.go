//go:build linux

package faults

import (
	"fmt"
	"net"
	"strconv"
	"testing"

	"tutti/bootstrap"
	"tutti/tests/internal/rig"
)

// TestWrongSecret gives one rank another secret.
func TestWrongSecret(t *testing.T) {
	t.Parallel()
	for _, kind := range []rig.StoreKind{rig.Embedded, rig.Site} {
		for _, odd := range []int{0, 2} {
			t.Run(fmt.Sprintf("%s/rank %d", kind, odd), func(t *testing.T) {
				t.Parallel()
				s := rig.New(t)
				_, address := startStore(t, s, kind)
				const n = 3
				for r := range n {
					more := []string{"TUTTI_TIMEOUT=20s"}
					if r == odd {
						more = append(more, "TUTTI_SECRET="+bootstrap.NewSecret())
					}
					startRank(t, s, address, r, n, more...)
				}
				ranks := s.Arrive(n)
				all := rig.Each(ranks, rig.Command{Verb: "join"})
				blames(t, all[odd:odd+1], ranks[odd:odd+1], "", "secret")
				for i, r := range ranks {
					if i != odd {
						blames(t, all[i:i+1], []*rig.Rank{r}, "", fmt.Sprintf("rank %d", odd))
					}
				}
				rig.Exit(ranks, 1)
			})
		}
	}
}

// TestDisagreement starts ranks that were told different things.
func TestDisagreement(t *testing.T) {
	t.Parallel()
	t.Run("size", func(t *testing.T) {
		t.Parallel()
		s := rig.New(t)
		_, address := startStore(t, s, rig.Embedded)
		startRank(t, s, address, 0, 2, "TUTTI_TIMEOUT=20s")
		startRank(t, s, address, 1, 3, "TUTTI_TIMEOUT=20s")
		ranks := s.Arrive(2)
		all := rig.Each(ranks, rig.Command{Verb: "join"})
		blames(t, all, ranks, "")
		told := 0
		for i, a := range all {
			if want := fmt.Sprintf("was told that the job has %d ranks, but others of it were told %d", 2+i,
				3-i); a.Fault != nil && contains(a.Fault.Text, want) {
				told++
			} else if other := fmt.Sprintf("rank %d", 1-i); a.Fault != nil && !contains(a.Fault.Text, other) {
				t.Errorf("rank %d: %v, want the sizes or %q in it", i, a.Fault, other)
			}
		}
		if told == 0 {
			t.Errorf("no rank is told of the other size: %v, %v", all[0].Fault, all[1].Fault)
		}
		rig.Exit(ranks, 1)
	})
	t.Run("algorithm", func(t *testing.T) {
		t.Parallel()
		s := rig.New(t)
		_, address := startStore(t, s, rig.Embedded)
		for r := range 3 {
			more := []string{"TUTTI_TIMEOUT=20s"}
			if r == 1 {
				more = append(more, "TUTTI_ALGO=ring")
			}
			startRank(t, s, address, r, 3, more...)
		}
		ranks := s.Arrive(3)
		all := rig.Each(ranks, rig.Command{Verb: "join"})
		blames(t, all, ranks, "")
		// The first that registers waits in vain for those that differ from it.
		told := 0
		for i, a := range all {
			switch {
			case a.Fault == nil:
			case contains(a.Fault.Text, "TUTTI_ALGO"):
				told++
			case !contains(a.Fault.Text, "rank"):
				t.Errorf("rank %d: %v, want the setting or a rank in it", i, a.Fault)
			}
		}
		if told == 0 {
			t.Error("no rank is told of the other algorithm")
		}
		rig.Exit(ranks, 1)
	})
	t.Run("number used twice", func(t *testing.T) {
		t.Parallel()
		s := rig.New(t)
		_, address := startStore(t, s, rig.Embedded)
		startRank(t, s, address, 0, 2)
		startRank(t, s, address, 1, 2)
		ranks := s.Arrive(2)
		rig.Well(ranks, rig.Command{Verb: "join"})
		startRank(t, s, address, 1, 2)
		second := []*rig.Rank{s.Next()}
		blames(t, rig.Each(second, rig.Command{Verb: "join"}), second, "", "rank 1 is taken",
			"pid "+strconv.Itoa(ranks[1].PID))
		rig.Exit(second, 1)
		rig.Well(ranks, rig.Command{Verb: "verify", Seed: 1, Counts: mixed}) // the job continues
		rig.Leave(ranks)
	})
}

// A port that is taken is named; from a range free ones are taken.
func TestJobsTakeFreePortsOfRange(t *testing.T) {
	t.Parallel()
	l, err := net.Listen("tcp", ":0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	port := l.Addr().(*net.TCPAddr).Port
	t.Run("taken", func(t *testing.T) {
		t.Parallel()
		s := rig.New(t)
		_, address := startStore(t, s, rig.Embedded)
		startRank(t, s, address, 0, 2, "TUTTI_TIMEOUT=20s")
		startRank(t, s, address, 1, 2, "TUTTI_TIMEOUT=20s", "TUTTI_PORT="+strconv.Itoa(port))
		ranks := s.Arrive(2)
		all := rig.Each(ranks, rig.Command{Verb: "join"})
		// A rank listens on two ports in a row, at once. Another test may have taken the second.
		first, second := fmt.Sprintf("port %d of ", port), fmt.Sprintf("port %d of ", port+1)
		blames(t, all[1:], ranks[1:], "", "taken")
		if f := all[1].Fault; f != nil && !contains(f.Text, first) && !contains(f.Text, second) {
			t.Errorf("rank 1: %v, want %q or %q in it", f, first, second)
		}
		blames(t, all[:1], ranks[:1], "", "rank 1")
		rig.Exit(ranks, 1)
	})
	t.Run("range", func(t *testing.T) {
		t.Parallel()
		s := rig.New(t)
		lo := min(port, 65000)
		job := s.Run([]string{fmt.Sprintf("TUTTI_PORT=%d-%d", lo, lo+200)}, "-n", "4", "--transport", "tcp")
		ranks := s.Arrive(4)
		rig.Well(ranks, rig.Command{Verb: "join"})
		of := map[int]bool{}
		for _, r := range ranks {
			of[r.PID] = true
		}
		for _, k := range s.Sockets() {
			p := int(k.Local.Port())
			if of[k.PID] && k.Listening && k.Network == "tcp" && (p < lo || p > lo+200 || p == port) {
				t.Errorf("process %d listens at %v, outside of %d-%d", k.PID, k.Local, lo, lo+200)
			}
		}
		rig.Well(ranks, rig.Command{Verb: "verify", Seed: 1, Counts: mixed})
		rig.Leave(ranks)
		job.End(0)
		s.Clean()
	})
}
