package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"tutti/cmd/tutti/internal/launch"
	"tutti/cmd/tutti/internal/status"
	"tutti/internal/proctest"
	"tutti/internal/sitetest"
	"tutti/pg/flight"
)

// job is ranks that have joined, started by tutti run.
type statusJob struct {
	*stage
	run     *tutti
	ranks   []*puppet
	name    string
	stopped bool // a rank is, and cannot answer
}

func startJob(t *testing.T, n int, flags ...string) *statusJob {
	t.Helper()
	s := newStage(t)
	run := s.command(append(append([]string{"run", "-n", fmt.Sprint(n)}, flags...), proctest.Self())...)
	run.cmd.Env = append(run.cmd.Env, "TUTTI_LEASE=5m") // a rank that is stopped stays in the job
	j := &statusJob{stage: s, run: run.start()}
	j.ranks = s.arrive(n)
	j.name = j.ranks[0].Env["TUTTI_JOB"]
	for _, p := range j.ranks {
		p.tell("join")
	}
	for _, p := range j.ranks {
		j.heard(p)
	}
	return j
}

func (j *statusJob) heard(p *puppet) {
	j.t.Helper()
	if got := p.hear(); got != "ok" {
		j.t.Fatalf("rank %s: %s", p.rank(), got)
	}
}

// all has these ranks do something together.
func (j *statusJob) all(order string) {
	j.t.Helper()
	for _, p := range j.ranks {
		p.tell("%s", order)
	}
	for _, p := range j.ranks {
		j.heard(p)
	}
}

// leave ends the job well.
func (j *statusJob) leave() {
	j.t.Helper()
	j.all("close")
	for _, p := range j.ranks {
		p.tell("exit 0")
	}
	j.run.End(0)
}

// status runs tutti status to its end.
func (j *statusJob) status(args ...string) *tutti {
	j.t.Helper()
	return j.answered(func() *tutti { return j.command(append([]string{"status"}, args...)...) })
}

// answered runs a command to its end, and again if a rank was too slow to answer.
func (j *statusJob) answered(command func() *tutti) *tutti {
	j.t.Helper()
	for late := time.Now().Add(patience); ; {
		c := command().start()
		c.Wait()
		if j.stopped || !strings.Contains(c.Out.String(), "does not answer") || time.Now().After(late) {
			return c
		}
	}
}

// report returns what tutti status --json says of the job.
func (j *statusJob) report(args ...string) *status.Report {
	j.t.Helper()
	c := j.status(append(args, "--json", j.name)...)
	var r status.Report
	if err := json.Unmarshal([]byte(c.Out.String()), &r); err != nil {
		j.t.Fatalf("%v: %q, %q", err, c.Out.String(), c.Err.String())
	}
	return &r
}

// until asks until something is found.
func (j *statusJob) until(what string, right func(r *status.Report) bool) *status.Report {
	j.t.Helper()
	for late := time.Now().Add(patience); ; {
		r := j.report()
		if right(r) {
			return r
		}
		if time.Now().After(late) {
			b, _ := json.MarshalIndent(r, "", " ")
			j.t.Fatalf("never %s: %.4000s", what, b)
		}
	}
}

func blames(rank int, kind string) func(r *status.Report) bool {
	return func(r *status.Report) bool {
		return len(r.Findings) == 1 && r.Findings[0].Rank == rank && r.Findings[0].Kind == kind
	}
}

// TestStatusNamesMissingRank has a rank not come, and then stopped, while the others wait.
func TestStatusNamesMissingRank(t *testing.T) {
	j := startJob(t, 3)
	j.all("allreduce 1000")
	c := j.status(j.name)
	c.End(0)
	if out := c.Out.String(); !strings.HasPrefix(out, "job "+j.name+": 3 ranks, epoch 1, ") ||
		!strings.Contains(out, "\nnothing is stuck\n") || strings.Count(out, "computing") != 3 ||
		strings.Contains(out, "\x1b") {
		t.Errorf("%s", out)
	}

	for _, p := range j.ranks[:2] {
		p.tell("allreduce 1000")
	}
	j.until("is rank 2 named", blames(2, flight.FindingStuck))
	c = j.status(j.name)
	c.End(codeStuck)
	out := c.Out.String()
	for _, want := range []string{"! rank 2 has not entered allreduce #", " (last finished #",
		"; ranks 0 and 1 wait for it, ", "waits for rank ", fmt.Sprint(j.ranks[1].PID)} {
		if !strings.Contains(out, want) {
			t.Errorf("%q is not in\n%s", want, out)
		}
	}

	if err := syscall.Kill(j.ranks[2].PID, syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	j.stopped = true
	r := j.until("is only the stopped one said not to answer", func(r *status.Report) bool {
		return r.Ranks[0].Presence != flight.Silent && r.Ranks[1].Presence != flight.Silent &&
			r.Ranks[2].Presence == flight.Silent
	})
	syscall.Kill(j.ranks[2].PID, syscall.SIGCONT)
	j.stopped = false
	if len(r.Findings) != 1 || !strings.HasPrefix(r.Findings[0].Text,
		fmt.Sprintf("rank 2 does not answer (pid %d on ", j.ranks[2].PID)) ||
		!strings.Contains(r.Findings[0].Text, "; ranks 0 and 1 wait for it, ") {
		t.Errorf("%+v", r.Findings)
	}
	if r.Ranks[0].Snapshot == nil || r.Ranks[0].Snapshot.Groups[0].Running == nil ||
		!strings.HasPrefix(r.Ranks[2].State, "does not answer") {
		t.Errorf("%+v", r.Ranks)
	}
	j.ranks[2].tell("allreduce 1000")
	for _, p := range j.ranks {
		j.heard(p)
	}
	r = j.report("--ops", "5")
	if len(r.Findings) != 0 || len(r.Ranks[1].Snapshot.Operations) < 3 ||
		r.Ranks[1].Snapshot.Totals["allreduce"].Operations != 2 {
		t.Errorf("%+v %+v", r.Findings, r.Ranks[1].Snapshot)
	}
	// They waited so long for rank 2 that it is a straggler.
	if len(r.Stragglers) == 0 || r.Stragglers[0].Rank != 2 {
		t.Errorf("stragglers %+v", r.Stragglers)
	}
	j.leave()
	j.empty()
}

// While a job that may grow begins, only the ranks that it begins with are missing.
func TestStatusOfGrowableJob(t *testing.T) {
	s := newStage(t)
	run := s.command("run", "-n", "2", proctest.Self())
	run.cmd.Env = append(run.cmd.Env, "TUTTI_MAX_SIZE=4", "TUTTI_LEASE=5m")
	j := &statusJob{stage: s, run: run.start()}
	j.ranks = s.arrive(2)
	j.name = j.ranks[0].Env["TUTTI_JOB"]
	j.ranks[0].tell("join")
	for late := time.Now().Add(patience); j.status(j.name).Out.String() == ""; {
		if time.Now().After(late) { // it is an error until a rank is registered
			t.Fatal("rank 0 does not begin to join")
		}
	}
	r := j.until("is rank 1 missed", func(r *status.Report) bool {
		return len(r.Findings) > 0 && len(r.Ranks) == 4 && r.Ranks[0].Presence == flight.Present
	})
	if len(r.Findings) != 1 || !strings.HasPrefix(r.Findings[0].Text, "rank 1 has not joined yet") ||
		r.Ranks[2].Presence != flight.Vacant || r.Ranks[3].State != "empty slot" {
		t.Errorf("%+v", r)
	}
	j.ranks[1].tell("join")
	for _, p := range j.ranks {
		j.heard(p)
	}
	j.leave()
}

// TestStatusFindsJobs: by name, by a prefix, by the environment of a rank; otherwise the error
// lists the jobs.
func TestStatusFindsJobs(t *testing.T) {
	j := startJob(t, 2, "--job", "status-test-one")
	k := &statusJob{stage: j.stage, run: j.stage.run("run", "-n", "2", "--job", "status-test-two", proctest.Self())}
	k.ranks = k.arrive(2)
	for _, c := range []struct {
		args string
		code int
		says string
	}{
		{"status-test-one", 0, "job status-test-one: 2 ranks, "},
		{"status-test-o", 0, "job status-test-one: 2 ranks, "},
		{"--job status-test-one", 0, "job status-test-one: 2 ranks, "},
		{"status-test-", 1, "which job? tutti status JOB, of\n  status-test-one      2 ranks  since "},
		{"status-test-three", 1, "no job status-test-three runs here, only\n"},
		{"status-test-two", 1, "job status-test-two: no rank of it is registered in its store at tutti://127.0.0.1:"},
		{"a b", 2, "takes one job or endpoint"},
		{"a b --watch", 2, "takes one job or endpoint"},
		{"--job a b", 2, "are different jobs"},
		{"a/b", 2, "job name"},
		{"--store redis://x a", 2, "--store: store \"redis://x\": expected tutti://"},
		{"--store etcd://127.0.0.1:1", 1, "the secret of job default is needed"},
		{"--store etcd://127.0.0.1:1 a", 1, "the secret of job a is needed"},
		{"--watch=never", 2, "--watch never: expected a duration"},
		{"--watch=1ms", 2, "--watch 1ms: expected a duration"},
		{"a --watch 1ms", 2, "--watch 1ms: expected a duration of 100ms or more, such as 2s"},
		{"a --watch 5", 2, "--watch 5: expected a duration of 100ms or more, such as 5s"},
		{"--watch 5", 2, "--watch 5: expected a duration of 100ms or more, such as 5s"},
		{"--ops -5", 2, "--ops -5: expected 0 or more"},
		{"--flight --ops -5 f", 2, "--ops -5: expected 0 or more"},
		{"--flight", 2, "which flight records?"},
		{"--flight --job a f", 2, "--job is for running jobs"},
		{"--flight /no/such/file", 1, "/no/such/file: no such file"},
		{"--flight /proc/self/exe", 1, "are no"},
	} {
		got := j.status(strings.Fields(c.args)...)
		got.End(c.code)
		if all := got.Out.String() + got.Err.String(); !strings.Contains(all, c.says) {
			t.Errorf("tutti status %s: %q; want %q in it", c.args, all, c.says)
		}
	}
	e := j.answered(func() *tutti {
		e := j.command("status")
		for _, name := range []string{"TUTTI_STORE", "TUTTI_JOB", "TUTTI_SECRET"} {
			e.cmd.Env = append(e.cmd.Env, name+"="+j.ranks[0].Env[name])
		}
		return e
	})
	e.End(0)
	if out := e.Out.String(); !strings.HasPrefix(out, "job status-test-one: 2 ranks, ") {
		t.Errorf("by the environment: %q", out)
	}
	for name, says := range map[string]string{"status-test-one": "job status-test-one: 2 ranks, ",
		"status-test-three": "no job status-test-three runs here, only\n"} {
		e := j.answered(func() *tutti {
			e := j.command("status")
			e.cmd.Env = append(e.cmd.Env, "TUTTI_JOB="+name)
			return e
		})
		if all := e.Out.String() + e.Err.String(); !strings.Contains(all, says) {
			t.Errorf("TUTTI_JOB=%s: %q; want %q in it", name, all, says)
		}
	}
	wrong := j.command("status")
	wrong.cmd.Env = append(wrong.cmd.Env, "TUTTI_STORE="+j.ranks[0].Env["TUTTI_STORE"], "TUTTI_JOB=status-test-one",
		"TUTTI_SECRET=another secret altogether")
	wrong.start().End(1)
	wrong.says("secret")
	for _, p := range k.ranks {
		p.tell("exit 0")
	}
	k.run.End(0)
	j.leave()
	if gone := j.status("status-test-one"); !strings.Contains(gone.Err.String(), "no job status-test-one") {
		t.Errorf("%q", gone.Err.String())
	}
}

// TestStatusOfDeadRanks: those that are left say so, and the launcher keeps what the dead did
// last.
func TestStatusOfDeadRanks(t *testing.T) {
	logs := filepath.Join(t.TempDir(), "logs")
	j := startJob(t, 3, "--log-dir", logs)
	j.all("allreduce 1000")
	if bins, _ := filepath.Glob(filepath.Join(logs, "flight-rank*.bin")); len(bins) != 3 {
		t.Errorf("%q", bins)
	}
	for _, p := range j.ranks[1:] {
		p.tell("allreduce 5")
	}
	j.until("do they wait for rank 0", blames(0, flight.FindingStuck))
	j.ranks[0].tell("kill 9")
	for _, p := range j.ranks {
		p.gone() // the launcher ends them all
	}
	j.run.End(137)
	s, err := flight.ReadFile(filepath.Join(logs, "flight-rank0.json"))
	if err != nil {
		t.Fatal(err)
	}
	if s.Reason != "was killed by signal 9 (SIGKILL)" || s.Rank != 0 || s.PID != j.ranks[0].PID || len(s.Groups) != 1 ||
		s.Groups[0].Running != nil || s.Groups[0].Last == nil || !strings.HasPrefix(s.Groups[0].Last.Call,
		"allreduce #") {
		t.Errorf("%+v", s)
	}
	if bins, _ := filepath.Glob(filepath.Join(logs, "*.bin")); len(bins) != 0 {
		t.Errorf("left: %q", bins)
	}
	files, _ := filepath.Glob(filepath.Join(logs, "flight-rank*.json"))
	c := j.status(append([]string{"--flight"}, files...)...)
	c.End(0)
	for _, want := range []string{"job " + j.name + ": 3 ranks", "rank 0 (pid ", "was killed by signal 9",
		"allreduce #"} {
		if out := c.Out.String(); !strings.Contains(out, want) {
			t.Errorf("%q is not in\n%s", want, out)
		}
	}
}

// TestStatusOfSurvivors kills a rank of a job that continues.
func TestStatusOfSurvivors(t *testing.T) {
	j := startJob(t, 3, "--on-failure", "shrink")
	j.all("allreduce 1000")
	j.ranks[1].tell("kill 9")
	j.ranks[1].gone()
	// A rank whose processor is taken may not answer in time.
	j.until("is rank 1 out, and do the others answer", func(r *status.Report) bool {
		return (r.Ranks[1].Presence == flight.Vacant || r.Ranks[1].Presence == flight.Silent) &&
			r.Ranks[0].Snapshot != nil && r.Ranks[2].Snapshot != nil
	})
	for _, p := range []*puppet{j.ranks[0], j.ranks[2]} {
		p.tell("barrier") // may fail, or run among the two
	}
	for _, p := range []*puppet{j.ranks[0], j.ranks[2]} {
		p.hear()
		p.tell("barrier")
	}
	for _, p := range []*puppet{j.ranks[0], j.ranks[2]} {
		j.heard(p)
	}
	r := j.until("is the slot empty", func(r *status.Report) bool {
		return r.Ranks[1].Presence == flight.Vacant &&
			len(r.Findings) == 0
	})
	if r.Epoch < 2 || len(r.Active) != 2 || r.Ranks[1].State != "empty slot" {
		t.Errorf("%+v", r)
	}
}

// TestStatusWatch: not on a terminal, blocks one after the other; on one, one over the other; until
// Ctrl-C or the end of the job.
func TestStatusWatch(t *testing.T) {
	j := startJob(t, 2)
	c := j.command("status", "--watch", "100ms", j.name).start()
	c.Out.Await(t, "2 ranks")
	first := strings.Count(c.Out.String(), "job "+j.name)
	for late := time.Now().Add(patience); strings.Count(c.Out.String(),
		"job "+j.name) < first+2; time.Sleep(time.Millisecond) {
		if time.Now().After(late) {
			t.Fatalf("it shows %q", c.Out.String())
		}
	}
	c.Signal(syscall.SIGINT)
	c.End(0)
	if out := c.Out.String(); strings.Contains(out, "\x1b") || !strings.Contains(out, "\n\n") ||
		c.Err.String() != "" {
		t.Errorf("%q, %q", out, c.Err.String())
	}

	slave, shown, over := watched(t)
	v := j.command("status", "--watch=100ms", j.name)
	v.cmd.Env = append(v.cmd.Env, "TERM=xterm")
	v.cmd.Stdout = slave
	v.start()
	shown.Await(t, "nothing is stuck")
	shown.Await(t, "\x1b[J\x1b[H") // a second one, in the place of the first
	v.Signal(syscall.SIGINT)
	v.End(0)
	over()
	if out := shown.String(); !strings.HasPrefix(out, "\x1b[?1049h\x1b[?25l\x1b[H") ||
		!strings.HasSuffix(out, "\x1b[?25h\x1b[?1049l") || strings.Contains(out, "\x1b[2J") {
		t.Errorf("%q", out)
	}

	w := j.command("status", "--json", j.name, "--watch", "100ms").start()
	w.Out.Await(t, "\n")
	j.leave()
	w.End(0)
	w.says("job " + j.name + " has ended")
	for line := range strings.Lines(w.Out.String()) {
		var r status.Report
		if err := json.Unmarshal([]byte(line), &r); err != nil || r.Job != j.name {
			t.Errorf("%v: %q", err, line)
		}
	}
}

// The store of a site may be away while the job goes on: a watch ends with an error then.
func TestStatusOfStoreThatIsAway(t *testing.T) {
	site := sitetest.Start(t, sitetest.Config{})
	j := startJob(t, 2, "--store", site.Address)
	to := strings.TrimPrefix(site.Address, "etcd://")
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	over, away := context.WithCancel(t.Context())
	var forwarding sync.WaitGroup
	context.AfterFunc(over, func() { l.Close() })
	defer forwarding.Wait()
	defer away()
	forwarding.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			forwarding.Go(func() {
				defer c.Close()
				s, err := net.Dial("tcp", to)
				if err != nil {
					return
				}
				defer s.Close()
				defer context.AfterFunc(over, func() { c.Close(); s.Close() })()
				forwarding.Go(func() { io.Copy(s, c) })
				io.Copy(c, s)
			})
		}
	})
	c := j.command("status", "--watch", "100ms", "--store", "etcd://"+l.Addr().String(), "--job", j.name)
	c.cmd.Env = append(c.cmd.Env, "TUTTI_SECRET="+j.ranks[0].Env["TUTTI_SECRET"])
	c.start()
	c.Out.Await(t, "2 ranks")
	away()
	c.End(1)
	if text := c.Err.String(); strings.Contains(text, "has ended") || !strings.Contains(text, "store") {
		t.Errorf("it says %q", text)
	}

	// A job of another store is not one that runs here, though the name of that begins as its does.
	o := j.command("status", strings.TrimRight(j.name, "0123456789abcdef"))
	o.cmd.Env = append(o.cmd.Env, "TUTTI_SECRET="+j.ranks[0].Env["TUTTI_SECRET"], "TUTTI_STORE=etcd://127.0.0.1:1")
	o.start()
	o.End(1)
	o.says("etcd://127.0.0.1:1")
	j.leave()
}

// watched makes a pseudo-terminal, and collects what is written to slave until over, which closes
// that.
func watched(t *testing.T) (slave *os.File, shown *proctest.Output, over func()) {
	t.Helper()
	master, slave := terminal(t)
	shown = &proctest.Output{}
	read := make(chan struct{})
	go func() {
		defer close(read)
		io.Copy(shown, master) // ends with an error when the other end is closed
	}()
	return slave, shown, func() {
		slave.Close()
		<-read
	}
}

// terminal makes a pseudo-terminal.
func terminal(t *testing.T) (master, slave *os.File) {
	t.Helper()
	master, err := os.OpenFile("/dev/ptmx", os.O_RDWR|unix.O_NOCTTY, 0)
	if err != nil {
		t.Skip("no pseudo-terminals here: ", err)
	}
	t.Cleanup(func() { master.Close() })
	n, err := unix.IoctlGetInt(int(master.Fd()), unix.TIOCGPTN)
	if err == nil {
		err = unix.IoctlSetPointerInt(int(master.Fd()), unix.TIOCSPTLCK, 0)
	}
	if err == nil {
		err = unix.IoctlSetWinsize(int(master.Fd()), unix.TIOCSWINSZ, &unix.Winsize{Row: 24, Col: 80})
	}
	if err == nil {
		slave, err = os.OpenFile(fmt.Sprintf("/dev/pts/%d", n), os.O_RDWR|unix.O_NOCTTY, 0)
	}
	if err != nil {
		t.Skip("no pseudo-terminals here: ", err)
	}
	t.Cleanup(func() { slave.Close() })
	return master, slave
}

// TestStatusInterrupted: without an answer nothing is known of the job, so that is no success.
func TestStatusInterrupted(t *testing.T) {
	silent, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer silent.Close()
	c := newStage(t).command("status", "--store", "etcd://"+silent.Addr().String(), "x")
	c.cmd.Env = append(c.cmd.Env, "TUTTI_SECRET=0123456789abcdef")
	c.start()
	conn, err := silent.Accept()
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	c.Signal(syscall.SIGINT)
	c.End(128 + int(syscall.SIGINT))
	c.says("tutti: interrupted by SIGINT\n")
}

// A rank that others wait for waits itself in a job that its process has joined besides, for one
// that has not come there.
func TestStatusOfSeveralJobs(t *testing.T) {
	j := startJob(t, 3)
	both := func(order string) {
		t.Helper()
		for _, p := range j.ranks[1:] {
			p.tell("%s", order)
		}
		for _, p := range j.ranks[1:] {
			j.heard(p)
		}
	}
	both("beside")
	both("barrier")
	j.ranks[0].tell("barrier")
	j.ranks[1].tell("barrier") // in the other job
	r := j.until("names rank 2", func(r *status.Report) bool {
		return !slices.ContainsFunc(r.Findings, func(f flight.Finding) bool { return f.Rank != 2 }) &&
			slices.ContainsFunc(r.Findings, func(f flight.Finding) bool {
				return strings.HasPrefix(f.Text, "rank 2 has not entered barrier #3 of job pair (last finished #2, ")
			})
	})
	if got := r.Ranks[1].State; !strings.HasPrefix(got, "in barrier #3 of job pair for ") ||
		!strings.HasSuffix(got, ", waits for rank 2") {
		t.Errorf("rank 1 is %q", got)
	}
	j.ranks[2].do("barrier")
	j.heard(j.ranks[1])
	both("back")
	both("barrier")
	j.heard(j.ranks[0])
	j.leave()
}

// TestFlightRecordsOfSeveralJobs: a rank in several groups leaves records of each in one directory.
func TestFlightRecordsOfSeveralJobs(t *testing.T) {
	s, dir := newStage(t), t.TempDir()
	args := []string{"status", "--flight"}
	for i, job := range []string{"train", "torch-1", "train"} {
		snap := &flight.Snapshot{Version: flight.Version, Job: job, Rank: i, Size: 3, PID: 40 + i, Host: "node"}
		path, err := snap.Write(filepath.Join(dir, "flight-rank0-signal"))
		if err != nil {
			t.Fatal(err)
		}
		args = append(args, path)
	}
	c := s.run(args...)
	c.End(0)
	train, torch, both := strings.Cut(c.Out.String(), "\njob torch-1: 3 ranks\n")
	if !both || !strings.HasPrefix(train, "job train: 3 ranks\n") ||
		!strings.Contains(train, "rank 0 (pid 40 on node)") || !strings.Contains(train, "rank 2 (pid 42 on node)") ||
		!strings.Contains(torch, "rank 1 (pid 41 on node)") {
		t.Errorf("%s", c.Out.String())
	}
	c = s.run(append(args, "--json")...)
	c.End(0)
	d := json.NewDecoder(strings.NewReader(c.Out.String()))
	for _, want := range []string{"train", "torch-1"} {
		var r status.Report
		if err := d.Decode(&r); err != nil || r.Job != want || len(r.Ranks) != 3 {
			t.Errorf("%+v, %v; want job %s", r, err, want)
		}
	}
	if d.More() {
		t.Errorf("%s", c.Out.String())
	}
}

// The records of killed processes, which are one for each job, show together what a rank waited
// for.
func TestFlightRecordsOfKilledProcesses(t *testing.T) {
	s, dir := newStage(t), t.TempDir()
	args := []string{"status", "--flight"}
	for rank := range 2 {
		for _, job := range []string{"train", "torch-1"} {
			snap := &flight.Snapshot{Version: flight.Version, Job: job, Rank: rank, Size: 2, PID: 40 + rank,
				Host: "node", Time: time.Unix(1000, 0),
				Groups: []flight.Group{{ID: 1, Slot: rank, Size: 2, Finished: 16}}}
			if job == "torch-1" && rank == 0 {
				snap.Groups[0].Running = &flight.Operation{Group: 1, Number: 17, Kind: "allreduce",
					Started: time.Unix(960, 0), WaitsFor: []int{1}}
			}
			path, err := snap.Write(filepath.Join(dir, fmt.Sprintf("flight-rank%d", rank)))
			if err != nil {
				t.Fatal(err)
			}
			args = append(args, path)
		}
	}
	c := s.run(args...)
	c.End(0)
	want := "job train: 2 ranks\n! rank 1 has not entered allreduce #17 of job torch-1 (last finished #16); " +
		"rank 0 waits for it, 40 s so far\n"
	if got := c.Out.String(); !strings.HasPrefix(got, want) {
		t.Errorf("%s", got)
	}
}

// TestFlightRecords: a signal to the launcher has all ranks write down what they know, and so does
// a timeout.
func TestFlightRecords(t *testing.T) {
	logs := t.TempDir()
	// an earlier job's
	if err := os.WriteFile(filepath.Join(logs, "flight-rank0-timeout.json"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	j := startJob(t, 2, "--log-dir", logs, "--timeout", "15s")
	j.run.Signal(syscall.SIGUSR1)
	written := func(name string) *flight.Snapshot {
		t.Helper()
		for late := time.Now().Add(patience); ; time.Sleep(time.Millisecond) {
			s, err := flight.ReadFile(filepath.Join(logs, name))
			if err == nil {
				return s
			} else if time.Now().After(late) {
				t.Fatal(err)
			}
		}
	}
	for r := range 2 {
		if s := written(fmt.Sprintf("flight-rank%d-signal.json", r)); s.Rank != r || s.Reason != "signal" ||
			len(s.Groups) != 1 {
			t.Errorf("%+v", s)
		}
	}
	j.ranks[0].tell("allreduce 8")
	if got := j.ranks[0].hear(); !strings.Contains(got, "timed out") {
		t.Errorf("%s", got)
	}
	if s := written("flight-rank0-timeout.json"); s.Reason != "timeout" || s.Failures["timed out"] != 1 ||
		len(s.Groups) != 1 || !strings.Contains(s.Groups[0].LastError, "timed out") || s.Groups[0].Last == nil ||
		s.Groups[0].Last.Outcome != "timed out" {
		t.Errorf("%+v %+v", s, s.Groups)
	}
	c := j.status("--flight", filepath.Join(logs, "flight-rank0-timeout.json"))
	c.End(0)
	if out := c.Out.String(); !strings.Contains(out, "! the latest operation of the group has failed at rank 0: ") ||
		!strings.Contains(strings.Join(strings.Fields(out), " "), "waiting for rank 1") {
		t.Errorf("%s", out)
	}
	j.ranks[0].tell("exit 4") // without Close, and the launcher ends the other: what the files say is kept
	j.run.End(4)
	for r := range 2 {
		if _, err := flight.ReadFile(filepath.Join(logs, fmt.Sprintf("flight-rank%d.json", r))); err != nil {
			t.Error(err)
		}
	}
}

// TestMetricsOfRanks scrapes the ranks of a job, each at a port of its own, and takes a port away.
func TestMetricsOfRanks(t *testing.T) {
	s := newStage(t)
	c := s.command("run", "-n", "2", proctest.Self())
	c.cmd.Env = append(c.cmd.Env, "TUTTI_METRICS=127.0.0.1:0")
	j := &statusJob{stage: s, run: c.start()}
	j.ranks = s.arrive(2)
	j.name = j.ranks[0].Env["TUTTI_JOB"]
	j.all("join")
	j.all("allreduce 1000")
	for i, p := range j.ranks {
		p.tell("endpoint cache%d", i)
		if got := p.hear(); got != "<nil>" {
			t.Fatal(got)
		}
	}
	r := j.report()
	for i, x := range r.Ranks {
		if all := x.Snapshot.Endpoints; len(all) != 1 || all[0].Name != fmt.Sprint("cache", i) {
			t.Errorf("rank %d: %+v", i, all)
		}
		get, err := (&http.Client{Timeout: patience}).Get("http://" + x.Snapshot.Metrics + "/metrics")
		if err != nil {
			t.Fatal(err)
		}
		b, _ := io.ReadAll(get.Body)
		get.Body.Close()
		for _, want := range []string{fmt.Sprintf(`tutti_operations_total{job=%q,kind="allreduce",rank="%d"} 1`, j.name,
			i), fmt.Sprintf(`tutti_endpoint_peers{endpoint="cache%d",id=%q} 0`, i, x.Snapshot.Endpoints[0].ID),
			fmt.Sprintf(`tutti_links{job=%q,rank="%d",transport="shm"} 1`, j.name, i)} {
			if !bytes.Contains(b, []byte(want+"\n")) {
				t.Errorf("%s is not in\n%s", want, b)
			}
		}
	}
	j.leave()

	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	c = s.command("run", "-n", "1", proctest.Self())
	c.cmd.Env = append(c.cmd.Env, "TUTTI_METRICS="+l.Addr().String())
	c.start()
	p := s.arrive(1)[0]
	p.tell("join")
	if got := p.hear(); !strings.Contains(got, fmt.Sprintf("port %d of 127.0.0.1 is taken",
		l.Addr().(*net.TCPAddr).Port)) {
		t.Errorf("%s", got)
	}
	p.tell("exit 0")
	c.End(0)
}

// A script that sets the size of a job for the ranks that it starts can ask for the job's state.
func TestStatusNeedsNoPlace(t *testing.T) {
	vars := map[string]string{"TUTTI_SIZE": "2", "TUTTI_STORE": "etcd://h:1", "TUTTI_JOB": "j",
		"TUTTI_SECRET": "0123456789abcdef"}
	c, err := (&statusFlags{}).find(nil, nil, func(name string) string { return vars[name] })
	if err != nil || c.Address != "etcd://h:1" || c.Job != "j" {
		t.Errorf("%+v, %v", c, err)
	}
}

// TestServed: the address of its store tells a job from others, with its name if that is given.
func TestServed(t *testing.T) {
	all := []launch.Running{{Job: "same", Store: "tutti://a:1", PID: 1}, {Job: "same", Store: "tutti://a:2", PID: 2},
		{Job: "x", Store: "etcd://s", PID: 3}, {Job: "y", Store: "etcd://s", PID: 4}}
	for _, c := range []struct {
		at, name string
		pid      int
	}{
		{"tutti://a:1", "same", 1}, {"tutti://a:2", "", 2}, {"etcd://s", "y", 4},
		{"etcd://s", "", 0}, {"tutti://a:1", "x", 0}, {"tutti://a:3", "same", 0},
	} {
		if r, ok := served(c.at, c.name, all); ok != (c.pid > 0) || r.PID != c.pid {
			t.Errorf("%+v: %+v", c, r)
		}
	}
	if text := list(all); !strings.Contains(text, "same  --store tutti://a:1 ") || strings.Contains(text, "etcd://s") {
		t.Error(text)
	}
}

func TestPick(t *testing.T) {
	if _, err := pick("", nil); err == nil || !strings.Contains(err.Error(),
		"no job of yours was started here by tutti run") || !strings.Contains(err.Error(), "TUTTI_STORE") {
		t.Error(err)
	}
	one := []launch.Running{{Job: "run-1"}}
	if r, err := pick("", one); err != nil || r.Job != "run-1" {
		t.Error(r, err)
	}
	two := append(one, launch.Running{Job: "run-12", Ranks: 3, Program: "python3 -c a\nb"})
	if r, err := pick("run-1", two); err != nil || r.Job != "run-1" {
		t.Error(r, err)
	}
	same := []launch.Running{{Job: "default", Store: "tutti://a:1"}, {Job: "default", Store: "tutti://b:2"}}
	if _, err := pick("default", same); err == nil || !strings.Contains(err.Error(), "2 jobs with the name default") ||
		!strings.Contains(err.Error(), "tutti://b:2 ") {
		t.Errorf("two jobs of one name: %v", err)
	}
	if _, err := pick("", two); err == nil || !strings.Contains(err.Error(), "which job?") ||
		!strings.Contains(err.Error(), "\n  run-12      3 ranks  since ") ||
		!strings.HasSuffix(err.Error(), `  "python3 -c a\nb"`) {
		t.Error(err)
	}
}
