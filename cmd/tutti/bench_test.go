package main

import (
	"bytes"
	"encoding/json"
	"io"
	"os"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"tutti/cmd/tutti/internal/bench"
	"tutti/cmd/tutti/internal/pair"
	"tutti/internal/proctest"
)

func TestBench(t *testing.T) {
	s := newStage(t)
	for _, transport := range []string{"auto", "shm", "tcp", "inproc"} {
		j := s.command("bench", "-n", "2", "--transport", transport, "--op", "allreduce,alltoall,barrier", "--max",
			"4K", "--iters", "2", "--rounds", "1", "--json")
		j.cmd.Env = append(j.cmd.Env, asRanks+"=1", "TUTTI_LEASE=60s")
		j.start().End(0)
		n := 0
		for line := range strings.Lines(j.Out.String()) {
			var r bench.Row
			if err := json.Unmarshal([]byte(line), &r); err != nil {
				t.Fatalf("%q: %v", line, err)
			}
			if n++; r.Ranks != 2 || r.Transport != transport || r.Wrong != 0 || r.Time <= 0 {
				t.Errorf("%s", line)
			}
		}
		if n != 3*2+3+1 {
			t.Errorf("--transport %s: %d rows", transport, n)
		}
		if j.Err.String() != "" {
			t.Errorf("--transport %s: stderr %q", transport, j.Err.String())
		}
	}
	s.empty()

	for _, flags := range [][]string{
		{"--touch", "--registered", "--op", "allreduce"}, {"--queue", "1"}, {"--queue", "7", "--op", "all"},
		{"--queue", "3", "--touch", "--"},
	} {
		few := []string{"bench", "-n", "2", "--max", "4K", "--iters", "2", "--rounds", "1", "--json"}
		j := s.command(append(few, flags...)...)
		j.cmd.Env = append(j.cmd.Env, asRanks+"=1")
		j.start().End(0)
		n := 0
		for line := range strings.Lines(j.Out.String()) {
			var r bench.Row
			err := json.Unmarshal([]byte(line), &r)
			touch, queue := slices.Contains(flags, "--touch"), slices.Contains(flags, "--queue")
			if n++; err != nil || r.Touch != touch || (r.Queue > 0) != queue || r.Wrong != 0 || r.Time <= 0 {
				t.Errorf("%v: %s, %v", flags, line, err)
			}
		}
		if n == 0 {
			t.Errorf("%v: no rows: %s", flags, j.Err.String())
		}
		if err := j.Err.String(); strings.Contains(err, "skipped: ") != slices.Contains(flags, "all") {
			t.Errorf("%v: stderr %q", flags, err)
		}
	}

	j := s.command("bench", "-n", "1", "--op", "put", "--json")
	j.cmd.Env = append(j.cmd.Env, asRanks+"=1")
	j.start().End(codeUsage)
	if !strings.Contains(j.Err.String(), "nothing to measure: put: needs 2 ranks") {
		t.Errorf("one rank puts: %s", j.Err.String())
	}

	// As a rank of an existing job: rank 0 prints, the others are silent.
	j = s.command("run", "-n", "2", proctest.Self(), "bench", "--max", "64", "--iters", "1", "--rounds", "1")
	j.cmd.Env = append(j.cmd.Env, asRanks+"=1")
	j.start().End(0)
	if out := j.Out.String(); strings.Count(out, "float32") != 1 || strings.Contains(out, "[1]") ||
		!strings.Contains(out, "# wrong elements         0") {
		t.Errorf("stdout %s", out)
	}
}

// TestRefusedUsage: what a command cannot do as it is told is an error of usage, in its words.
func TestRefusedUsage(t *testing.T) {
	s := newStage(t)
	for _, c := range []struct{ args, says string }{
		{"bench --op p2p,allreduce", ",barrier, or p2p alone\n"},
		{"bench --op foo", ",barrier, or p2p alone\n"},
		{"tune --op foo", "some of allreduce"},
		{"bench --min 3 --max 3", "--max 3 is less than one element of float32, 4 bytes"},
		{"doctor --json --plot -", "--json and --plot exclude each other"},
		{"status a b", "status takes one job or endpoint, got 2\n"},
		{"endpoint read a", "got 1 argument\n"},
	} {
		j := s.command(strings.Fields(c.args)...)
		j.start().End(codeUsage)
		if text := j.Err.String(); !strings.Contains(text, c.says) || !strings.Contains(text, "--help tells more") {
			t.Errorf("%s: %s", c.args, text)
		}
	}
}

// The header names the transports that are used: those of --transport, else of TUTTI_TRANSPORT.
func TestBenchTransport(t *testing.T) {
	s := newStage(t)
	few := []string{"bench", "--max", "64", "--iters", "1", "--rounds", "1"}
	under := append([]string{"run", "-n", "2", "--no-prefix", proctest.Self()}, few...)
	for _, c := range []struct {
		args []string
		says string
	}{
		{few, "transport tcp: 2 ranks on 1 host(s), network links"},
		{append(slices.Clone(few), "--transport", "auto"), "transport auto: 2 ranks on 1 host(s), shared memory"},
		{under, "transport tcp: 2 ranks on 1 host(s), network links"},
		{append(slices.Clone(under), "--transport", "auto"), "transport auto: 2 ranks on 1 host(s), shared memory"},
	} {
		j := s.command(c.args...)
		j.cmd.Env = append(j.cmd.Env, asRanks+"=1", "TUTTI_TRANSPORT=tcp")
		j.start().End(0)
		if !strings.Contains(j.Out.String(), c.says) {
			t.Errorf("%q prints %q, want %q", c.args, j.Out.String(), c.says)
		}
	}
}

// TestProgress: the line fits into a narrow terminal, and the next one begins in its place.
func TestProgress(t *testing.T) {
	for name, show := range map[string]func(to *os.File, text string){
		"bench": func(to *os.File, text string) {
			(&bench.Printer{Out: io.Discard, Progress: to}).Show(bench.Event{Next: text})
		},
		"tune": func(to *os.File, text string) {
			b, err := json.Marshal(tuneEvent{TuneEvent: bench.TuneEvent{Next: text}})
			if err != nil {
				t.Fatal(err)
			}
			v := tuneView{out: io.Discard, progress: to}
			if err := v.show(bytes.NewReader(b)); err != nil {
				t.Error(err)
			}
		},
	} {
		master, slave := terminal(t)
		if err := unix.IoctlSetWinsize(int(master.Fd()), unix.TIOCSWINSZ, &unix.Winsize{Row: 24, Col: 20}); err != nil {
			t.Fatal(err)
		}
		show(slave, strings.Repeat("x", 30))
		slave.Close()
		shown, _ := io.ReadAll(master) // ends with an error
		if want := "\r\x1b[K  0%  " + strings.Repeat("x", 13) + "\r"; !strings.HasPrefix(string(shown), want) {
			t.Errorf("%s: %q, want %q", name, shown, want)
		}
	}
}

func TestParseSize(t *testing.T) {
	for s, want := range map[string]int{"1": 1, "64": 64, "64K": 65536, "64k": 65536, "1M": 1 << 20, "1MiB": 1 << 20,
		"2G": 2 << 30, "512b": 512} {
		if got, err := parseSize(s); got != want || err != nil {
			t.Errorf("%s: %d, %v", s, got, err)
		}
	}
	for _, s := range []string{"", "0", "-1", "K", "1T", "1.5M", "9999999999G", "1KK"} {
		if got, err := parseSize(s); err == nil {
			t.Errorf("%q is taken as %d", s, got)
		}
	}
}

// A rank is killed and replaced, and each moment is measured.
func TestBenchFaults(t *testing.T) {
	s := newStage(t)
	for _, transport := range []string{"shm", "tcp"} {
		j := s.command("bench", "--faults", "-n", "3", "--rounds", "2", "--transport", transport, "--json")
		j.cmd.Env = append(j.cmd.Env, asRanks+"=1")
		j.start().End(0)
		rows := json.NewDecoder(strings.NewReader(j.Out.String()))
		for _, leader := range []bool{false, true} {
			var r faultRow
			if err := rows.Decode(&r); err != nil {
				t.Fatalf("%q: %v", j.Out.String(), err)
			}
			if r.Ranks != 3 || r.Leader != leader || r.Rounds != 2 || r.Detected[0] <= 0 || r.Next[0] < r.Detected[0] ||
				r.Next[1] < r.Next[0] || r.Admitted[0] <= 0 {
				t.Errorf("%s: %+v", transport, r)
			}
		}
	}
}

// Every row has figures of both contestants, and all bytes arrive; nothing is left behind.
func TestBenchP2P(t *testing.T) {
	s := newStage(t)
	j := s.command("bench", "--op", "p2p", "--min", "1", "--max", "2M", "--factor", "1024", "--queue", "3", "--iters",
		"4", "--rounds", "2", "--json")
	j.cmd.Env = append(j.cmd.Env, asRanks+"=1")
	j.start().End(0)
	type key struct {
		op           string
		bytes, depth int
	}
	var want []key
	for _, op := range []string{"sendrecv", "read", "write"} {
		for _, depth := range []int{1, 3} {
			for _, n := range []int{1, 1 << 10, 1 << 20} {
				want = append(want, key{op, n, depth})
			}
		}
	}
	want = append(want, key{"batch", 256 << 10, 1}, key{"batch", 256 << 10, 64})
	var got []key
	for line := range strings.Lines(j.Out.String()) {
		var r pair.Row
		if err := json.Unmarshal([]byte(line), &r); err != nil {
			t.Fatalf("%q: %v", line, err)
		}
		got = append(got, key{r.Op, r.Bytes, r.Depth})
		if r.Tutti <= 0 || r.Raw <= 0 || r.Ratio <= 0 || r.Wrong != 0 {
			t.Errorf("%s", line)
		}
	}
	if !slices.Equal(got, want) {
		t.Errorf("rows %v, expected %v", got, want)
	}
	if j.Err.String() != "" {
		t.Errorf("stderr %q", j.Err.String())
	}
	s.empty()

	for _, flag := range []string{"--ranks=2", "--transport=shm", "--dtype=float32", "--max=2G", "--queue=-1"} {
		s.command("bench", "--op", "p2p", flag).start().End(2)
	}
}
