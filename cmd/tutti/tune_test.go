package main

import (
	"encoding/json"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"tutti/cmd/tutti/internal/bench"
	"tutti/collectives"
	"tutti/internal/tuning"
)

// TestTune: what tune writes, a job of as many ranks uses, and any other refuses.
func TestTune(t *testing.T) {
	s := newStage(t)
	dir := t.TempDir()
	command := func(args ...string) *tutti {
		j := s.command(args...)
		j.cmd.Env = append(j.cmd.Env, asRanks+"=1", "TUTTI_LEASE=60s", "XDG_CONFIG_HOME="+dir)
		return j
	}
	path := filepath.Join(dir, "tutti", "tune.json")
	for _, transport := range []string{"shm", "tcp"} {
		var j *tutti
		var out string
		for limit := 5 * time.Second; limit == 5*time.Second || strings.Contains(out, "--time is over"); limit *= 2 {
			j = command("tune", "-n", "2", "--transport", transport, "--op", "allreduce,alltoallv,barrier", "--max",
				"256K", "--factor", "16", "--rounds", "2", "--time", limit.String())
			j.start().End(0)
			out = j.Out.String()
		}
		for _, want := range []string{"allreduce ", "alltoallv ", "barrier ", path} {
			if !strings.Contains(out, want) {
				t.Errorf("%s: no %q in %s", transport, want, out)
			}
		}
		if strings.Contains(out, "TUTTI_TUNE") || strings.Contains(out, "registered") != (transport == "shm") ||
			j.Err.String() != "" {
			t.Errorf("%s: stdout %s, stderr %s", transport, out, j.Err.String())
		}
		table, err := tuning.Load(path, tuning.Here(2, transport))
		if err != nil {
			t.Fatalf("%s: %v", transport, err)
		}
		if apart := runtime.NumCPU() > 1; table.Fits(2, nil, collectives.Caps{}) != apart ||
			table.Fits(2, nil, collectives.Caps{Cores: 1}) == apart {
			t.Errorf("%s: the table does not tell that its ranks shared no processor: %v", transport, apart)
		}
		own := func(k collectives.Kind) int {
			return len(slices.DeleteFunc(table.Rules(k), func(r collectives.Rule) bool {
				return r.MinRanks != 2 ||
					r.MaxRanks != 2
			}))
		}
		if own(collectives.AllReduce) == 0 || own(collectives.AllToAllV) != 1 || own(collectives.Barrier) != 1 ||
			own(collectives.Broadcast) != 0 {
			t.Errorf("%s: measured rules: %d %d %d %d", transport, own(collectives.AllReduce),
				own(collectives.AllToAllV), own(collectives.Barrier), own(collectives.Broadcast))
		}
		// A job of two ranks takes it, one of three says why not.
		for n, want := range map[string]string{"2": "chosen by a measured table",
			"3": "foreign: measured with 2 ranks"} {
			j := command("bench", "-n", n, "--transport", transport, "--max", "4K", "--iters", "1", "--rounds", "1",
				"--json")
			j.cmd.Env = append(j.cmd.Env, "TUTTI_LOG=debug")
			j.start().End(0)
			if log := j.Err.String(); !strings.Contains(log, want) {
				t.Errorf("%s, %s ranks: no %q in %s", transport, n, want, log)
			}
		}
	}
	own := filepath.Join(dir, "own.json")
	j := command("tune", "-n", "2", "--op", "allgather", "--max", "256K", "--factor", "8", "--rounds", "1", "--time",
		"50ms", "-o", own, "--json", "--")
	j.start().End(0)
	n := 0
	for line := range strings.Lines(j.Out.String()) {
		var p bench.TunePoint
		if err := json.Unmarshal([]byte(line), &p); err != nil {
			t.Fatalf("%q: %v", line, err)
		}
		if n++; p.Kind != collectives.AllGather || p.Time <= 0 || p.All[p.Best] != p.Time || len(p.All) < 2 {
			t.Errorf("%s", line)
		}
		if p.Default == collectives.Star && runtime.NumCPU() > 1 && p.Bytes >= 32<<10 { // as if they shared one
			t.Errorf("the ranks take themselves for oversubscribed: %s", line)
		}
		if _, loads := p.All[collectives.LoadStore]; loads && !p.Registered {
			t.Errorf("loadstore in plain memory: %s", line)
		}
	}
	if n < 5+1 {
		t.Errorf("%d points", n)
	}
	if _, err := tuning.Load(own, tuning.Here(2, "shm")); err != nil {
		t.Error(err)
	}
	for _, flag := range []string{"--json=false", "--json"} {
		j := command("tune", "-n", "2", "--op", "allgather,barrier", "--max", "64", "--rounds", "1", "--time", "1ns",
			"-o", own, flag)
		j.start().End(0)
		out, notes := j.Out.String(), j.Err.String()
		if flag == "--json" {
			out, notes = notes, out
		}
		const left = "# not measured, --time is over: "
		if !strings.Contains(out, left) || strings.Contains(notes, left) {
			t.Errorf("%s: stdout %s, stderr %s", flag, j.Out.String(), j.Err.String())
		}
	}
	s.empty()

	for _, c := range []struct {
		args []string
		env  string
		want string
	}{
		{[]string{"-n", "1"}, "", "expected 2 to 64"},
		{[]string{"--transport", "shm,tcp"}, "", "expected shm, rdma or tcp"},
		{[]string{"--op", "allreduces"}, "", "expected all"},
		{[]string{"--factor", "1"}, "", "expected 2 or more"},
		{[]string{"--time", "0"}, "", "--time"},
		{[]string{"--max", "2G"}, "", "at most 1G"},
		{nil, "TUTTI_TUNE=off", "-o FILE"},
		{nil, "RANK=0 WORLD_SIZE=2", "starts its own"},
	} {
		j := command(append([]string{"tune"}, c.args...)...)
		j.cmd.Env = append(j.cmd.Env, strings.Fields(c.env)...)
		j.start().End(codeUsage)
		if !strings.Contains(j.Err.String(), c.want) {
			t.Errorf("%v %s: %s", c.args, c.env, j.Err.String())
		}
	}
	if err := os.Mkdir(filepath.Join(dir, "d"), 0o755); err != nil {
		t.Fatal(err)
	}
	j = command("tune", "-o", filepath.Join(dir, "d"))
	j.start().End(1)
	if !strings.Contains(j.Err.String(), "cannot write the table") {
		t.Error(j.Err.String())
	}
}
