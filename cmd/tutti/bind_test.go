package main

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"tutti/cmd/tutti/internal/launch"
	"tutti/internal/cpus"
	"tutti/internal/proctest"
)

// processors returns the processors that the threads of a process may run on, "" while not all may
// run on the same.
func processors(t *testing.T, pid int) string {
	t.Helper()
	files, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/status", pid))
	if err != nil || len(files) == 0 {
		t.Fatalf("process %d has no threads: %v", pid, err)
	}
	all := ""
	for i, path := range files {
		text, _ := os.ReadFile(path)
		_, rest, _ := strings.Cut(string(text), "Cpus_allowed_list:\t")
		list, _, _ := strings.Cut(rest, "\n")
		if i > 0 && list != all {
			return ""
		}
		all = list
	}
	return all
}

// shares returns what n ranks get that this process starts.
func shares(t *testing.T, n int) []cpus.Set {
	t.Helper()
	machine, err := launch.Processors()
	if err != nil {
		t.Fatal(err)
	}
	return cpus.Share(machine, n)
}

func TestRunBindsRanksToTheirShares(t *testing.T) {
	allowed, err := cpus.Allowed()
	if err != nil {
		t.Fatal(err)
	}
	all := func(n int) (s []cpus.Set) {
		for range n {
			s = append(s, allowed)
		}
		return s
	}
	many := 2 * len(allowed)
	for _, c := range []struct {
		flags, env string
		n          int
		want       []cpus.Set
	}{
		{"", "", 2, shares(t, 2)},
		{"", "", many, shares(t, many)},
		{"", "share", 2, shares(t, 2)},
		{"--bind none", "", 2, all(2)},
		{"", "none", 2, all(2)},
		{"--bind share", "none", 2, shares(t, 2)},
		{"--bind core", "", 1, []cpus.Set{allowed[:1]}},
	} {
		s := newStage(t)
		args := append([]string{"run", "-v", "-n", fmt.Sprint(c.n)}, strings.Fields(c.flags)...)
		j := s.command(append(args, proctest.Self())...)
		j.cmd.Env = append(j.cmd.Env, "TUTTI_BIND="+c.env)
		j.start()
		for i, p := range s.arrive(c.n) {
			if got := processors(t, p.PID); got != c.want[i].String() {
				t.Errorf("%s TUTTI_BIND=%s: rank %d of %d runs on %s, not %v", c.flags, c.env, i, c.n, got, c.want[i])
			}
			p.tell("exit 0")
		}
		j.End(0)
		for i, set := range c.want {
			line := fmt.Sprintf("rank %d runs on processors %v\n", i, set)
			if says := strings.Contains(j.Err.String(), line); says == strings.Contains(c.flags+c.env, "none") &&
				c.flags != "--bind share" {
				t.Errorf("%s TUTTI_BIND=%s: stderr %q, line %q", c.flags, c.env, j.Err.String(), line)
			}
		}
		s.empty()
	}
}

// A launcher that is bound itself divides what it has.
func TestRunRespectsItsOwnBinding(t *testing.T) {
	allowed, err := cpus.Allowed()
	if err != nil {
		t.Fatal(err)
	}
	online, err := cpus.Online(os.DirFS("/sys/devices/system"))
	if err != nil {
		t.Fatal(err)
	}
	last := allowed[len(allowed)-1:]
	s := newStage(t)
	j := s.command("run", "-n", "2", proctest.Self())
	j.cmd.Path, err = exec.LookPath("taskset")
	if err != nil {
		t.Fatal(err)
	}
	j.cmd.Args = append([]string{"taskset", "-c", last.String(), proctest.Self()}, j.cmd.Args[1:]...)
	j.start()
	for i, p := range s.arrive(2) {
		if got := processors(t, p.PID); got != last.String() {
			t.Errorf("rank %d runs on %s, and tutti run on %v", i, got, last)
		}
		p.tell("exit 0")
	}
	j.End(0)
	if says := strings.Contains(j.Err.String(), "2 ranks on 1 processor of "); says != (len(online) > 1) {
		t.Errorf("of processors %v it has %v, and says %q", online, last, j.Err.String())
	}
}

// A rank that is started again has the processors of the first; a spare process gets those of the
// rank whose place it takes, and has all before that.
func TestReplacementsGetTheProcessorsOfTheirSlots(t *testing.T) {
	want := shares(t, 2)
	allowed, err := cpus.Allowed()
	if err != nil {
		t.Fatal(err)
	}
	s := newStage(t)
	j := s.run("run", "-n", "2", "-v", "--on-failure", "shrink", "--max-restarts", "1", "--standby", "1", "--",
		proctest.Self())
	of := map[string]*puppet{}
	for range 3 {
		p := s.next()
		of[p.rank()] = p
	}
	spare := of[""]
	if got := processors(t, spare.PID); got != allowed.String() {
		t.Errorf("on standby: %s, want %v", got, allowed)
	}
	for _, p := range of {
		p.tell("join")
	}
	for _, rank := range []string{"0", "1"} {
		if got := of[rank].hear(); got != "ok" {
			t.Fatalf("rank %s: %s", rank, got)
		}
	}
	of["0"].tell("replace")
	of["1"].tell("kill 9")
	if again := s.next(); processors(t, again.PID) != want[1].String() {
		t.Errorf("rank 1 was started again on %s, want %v", processors(t, again.PID), want[1])
	}
	if got := spare.hear(); got != "ok" {
		t.Fatalf("standby: %s", got)
	}
	for end := time.Now().Add(patience); processors(t, spare.PID) != want[1].String(); time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("standby in place of rank 1: %s, want %v", processors(t, spare.PID), want[1])
		}
	}
	j.Err.Await(t, fmt.Sprintf("rank 1 (standby 0) runs on processors %v\n", want[1]))
	j.Signal(syscall.SIGINT)
	j.End(130)
	s.empty()
}
