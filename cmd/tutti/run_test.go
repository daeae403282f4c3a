package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"tutti/bootstrap"
	"tutti/internal/ident"
	"tutti/internal/ports/portstest"
	"tutti/internal/proctest"
	"tutti/internal/trust"
	"tutti/pg/flight"
)

func TestRunAllWell(t *testing.T) {
	s := newStage(t)
	j := s.run("run", "-n", "3", "--", proctest.Self(), "-x", "--", "y")
	all := s.arrive(3)
	for i, p := range all {
		for name, want := range map[string]string{"RANK": fmt.Sprint(i), "WORLD_SIZE": "3", "LOCAL_RANK": fmt.Sprint(i),
			"LOCAL_WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1"} {
			if got := p.Env[name]; got != want {
				t.Errorf("rank %d: %s=%q, want %q", i, name, got, want)
			}
		}
		l, err := bootstrap.FromEnv(func(name string) string { return p.Env[name] })
		if err != nil || l.Rank != i || l.Size != 3 || l.LocalRank != i || l.LocalSize != 3 ||
			len(l.Secret) < trust.MinSecret || l.Store == "" || l.Job == "default" {
			t.Errorf("rank %d: the environment says %+v, %v", i, l, err)
		}
		if p.Env["TUTTI_SECRET"] != all[0].Env["TUTTI_SECRET"] || p.Env["TUTTI_JOB"] != all[0].Env["TUTTI_JOB"] ||
			p.Env["MASTER_PORT"] != all[0].Env["MASTER_PORT"] {
			t.Errorf("rank %d has another secret, job or port than rank 0", i)
		}
		if !slices.Equal(p.Args, []string{"-x", "--", "y"}) {
			t.Errorf("rank %d: arguments %q", i, p.Args)
		}
		if p.PGID != p.PID {
			t.Errorf("rank %d is in process group %d, not its own", i, p.PGID)
		}
	}
	// The store answers clients that know the secret.
	l, _ := bootstrap.FromEnv(func(name string) string { return all[0].Env[name] })
	h, err := bootstrap.DialStore(t.Context(), bootstrap.StoreConfig{Address: l.Store, Job: l.Job, Secret: l.Secret})
	if err != nil {
		t.Fatal(err)
	}
	h.Close()
	for i, p := range all {
		p.do("print %q", fmt.Sprintf("to out %d\n", i))
		p.do("printerr %q", fmt.Sprintf("to err %d\n", i))
		p.tell("exit 0")
	}
	j.End(0)
	for i := range all {
		if want := fmt.Sprintf("[%d] to out %d\n", i, i); !strings.Contains(j.Out.String(), want) {
			t.Errorf("stdout %q lacks %q", j.Out.String(), want)
		}
		j.says(fmt.Sprintf("[%d] to err %d\n", i, i))
	}
	if text := j.Err.String(); strings.Contains(text, "tutti:") && !strings.Contains(text, "has bound it there") {
		t.Errorf("a good end is worth no words: %q", j.Err.String())
	}
	refused(t, all[0].Env)
	s.empty()
}

func TestRunFirstFailureCounts(t *testing.T) {
	for _, c := range []struct {
		name, order, says string
		code              int
	}{
		{"exit", "exit 3", "tutti: rank 2 exited with code 3; ended the other 3 ranks\n", 3},
		{"SIGKILL", "kill 9", "tutti: rank 2 was killed by signal 9 (SIGKILL); ended the other 3 ranks\n", 137},
		// Go's runtime turns it into a crash with code 2
		{"SIGSEGV", "kill 11", "tutti: rank 2 exited with code 2; ended the other 3 ranks\n", 2},
	} {
		t.Run(c.name, func(t *testing.T) {
			s := newStage(t)
			j := s.run("run", "-n", "4", proctest.Self())
			all := s.arrive(4)
			all[2].tell("%s", c.order)
			for _, p := range all {
				p.gone()
			}
			j.End(c.code)
			j.says(c.says)
			refused(t, all[0].Env)
			s.empty()
		})
	}
}

func TestRunKillsAfterTheGrace(t *testing.T) {
	s := newStage(t)
	j := s.run("run", "-n", "3", "--grace", "15s", proctest.Self()) // rank 2 ends within it
	all := s.arrive(3)
	all[1].do("ignore %d", syscall.SIGTERM)
	all[0].tell("exit 7")
	for _, p := range all {
		p.gone()
	}
	j.End(7)
	j.says("rank 0 exited with code 7; ended the other 2 ranks, 1 of them by SIGKILL")
}

func TestRunEndsDescendants(t *testing.T) {
	s := newStage(t)
	j := s.run("run", "-n", "2", proctest.Self())
	all := s.arrive(2)
	all[1].do("spawn")
	left := s.next()
	left.do("spawn")
	deeper := s.next()
	all[0].tell("exit 0")
	all[1].tell("exit 0")
	j.End(0)
	left.gone()
	deeper.gone()
	s.empty()
}

func TestRunSignals(t *testing.T) {
	t.Run("forwarded", func(t *testing.T) {
		s := newStage(t)
		j := s.run("run", "-n", "2", proctest.Self())
		all := s.arrive(2)
		for _, p := range all {
			p.do("catch %d", syscall.SIGTERM)
			p.do("catch %d", syscall.SIGUSR1)
		}
		j.Signal(syscall.SIGUSR1)
		for _, p := range all {
			if got := p.hear(); got != "caught" {
				t.Fatal(got)
			}
		}
		j.Signal(syscall.SIGTERM)
		for _, p := range all {
			if got := p.hear(); got != "caught" {
				t.Fatal(got)
			}
			p.tell("exit 0") // as a program that saves its state and ends well
		}
		j.End(0)
	})
	t.Run("by default the ranks die of it", func(t *testing.T) {
		s := newStage(t)
		j := s.run("run", "-n", "2", proctest.Self())
		all := s.arrive(2)
		j.Signal(syscall.SIGINT)
		for _, p := range all {
			p.gone()
		}
		// Go's runtime exits with 2 on SIGINT unless the program asks otherwise.
		if j.Wait() == 0 {
			t.Error("exit code 0 after SIGINT")
		}
		j.says("interrupted by SIGINT")
		s.empty()
	})
	t.Run("a rank that is stopped", func(t *testing.T) {
		for _, ignores := range []bool{false, true} {
			s := newStage(t)
			grace := "1h" // not needed: the rank continues, and handles the signal
			if ignores {
				grace = "50ms"
			}
			j := s.run("run", "-n", "2", "--grace", grace, proctest.Self())
			all := s.arrive(2)
			for _, p := range all {
				if ignores {
					p.do("ignore %d", syscall.SIGTERM)
				}
			}
			proctest.Stop(t, all[1].PID)
			j.Signal(syscall.SIGTERM)
			for _, p := range all {
				p.gone()
			}
			j.Wait()
			j.says("interrupted by SIGTERM")
			if ignores {
				j.says("killed 2 ranks")
			}
			s.empty()
		}
	})
	t.Run("the second kills", func(t *testing.T) {
		s := newStage(t)
		j := s.run("run", "-n", "2", "--grace", "1h", proctest.Self())
		all := s.arrive(2)
		for _, p := range all {
			p.do("catch %d", syscall.SIGINT)
		}
		j.Signal(syscall.SIGINT)
		for _, p := range all {
			p.hear()
		}
		j.Signal(syscall.SIGTERM) // the same one, so soon, may be the first again
		for _, p := range all {
			p.gone()
		}
		j.End(137)
		j.says("killed 2 ranks")
	})
	t.Run("a terminal hangs up", func(t *testing.T) { // the shell and the kernel say so
		hearHangup(t)
		s := newStage(t)
		j := s.run("run", "-n", "1", "--grace", "1h", proctest.Self())
		p := s.arrive(1)[0]
		p.do("catch %d", syscall.SIGHUP)
		p.do("catch %d", syscall.SIGUSR1)
		j.Signal(syscall.SIGHUP)
		if got := p.hear(); got != "caught" {
			t.Fatal(got)
		}
		j.Signal(syscall.SIGHUP)
		j.Signal(syscall.SIGUSR1)
		if got := p.hear(); got != "caught" {
			t.Fatal(got)
		}
		p.tell("exit 0")
		j.End(0)
	})
}

// TestRunKilled kills the processes that should clean up.
func TestRunKilled(t *testing.T) {
	for _, who := range []string{"launcher", "guard"} {
		t.Run(who, func(t *testing.T) {
			s := newStage(t)
			j := s.run("run", "-n", "3", proctest.Self())
			all := s.arrive(3)
			for _, p := range all {
				p.do("ignore %d", syscall.SIGTERM)
				p.do("ignore %d", syscall.SIGHUP)
			}
			all[1].do("spawn")
			left := s.next()
			left.do("ignore %d", syscall.SIGHUP)
			guard := parent(t, all[0].PID)
			ended := watch(t, guard)
			if who == "launcher" {
				j.Signal(syscall.SIGKILL)
			} else {
				syscall.Kill(guard, syscall.SIGKILL)
			}
			for _, p := range append(all, left) {
				p.gone()
			}
			ended()
			j.Wait()
			refused(t, all[0].Env)
			if who == "launcher" {
				s.empty()
			} else {
				j.End(1)
				j.says("guard process was killed")
			}
		})
	}
}

func TestRunTwoJobsAtOnce(t *testing.T) {
	a, b := newStage(t), newStage(t)
	ja, jb := a.run("run", "-n", "2", proctest.Self()), b.run("run", "-n", "2", proctest.Self())
	pa, pb := a.arrive(2), b.arrive(2)
	for _, name := range []string{"TUTTI_STORE", "TUTTI_SECRET", "TUTTI_JOB", "MASTER_PORT"} {
		if pa[0].Env[name] == pb[0].Env[name] {
			t.Errorf("both jobs have %s=%s", name, pa[0].Env[name])
		}
	}
	pa[0].tell("kill 9")
	ja.End(137)
	for _, p := range pb { // the other one continues
		p.do("print %q", "alive\n")
		p.tell("exit 0")
	}
	jb.End(0)
}

func TestRunLogDir(t *testing.T) {
	s := newStage(t)
	dir := filepath.Join(s.tmp, "..", "logs", "deep")
	j := s.run("run", "-n", "2", "--log-dir", dir, "--no-prefix", proctest.Self())
	all := s.arrive(2)
	for _, p := range all {
		p.do("print %q", "out "+p.rank()+"\n")
		p.do("printerr %q", "err "+p.rank()) // no newline
		p.tell("exit 0")
	}
	j.End(0)
	for i := range all {
		b, err := os.ReadFile(filepath.Join(dir, fmt.Sprintf("rank-%d.log", i)))
		if err != nil || len(b) != len("out 0\nerr 0") || !strings.Contains(string(b), fmt.Sprintf("out %d\n", i)) ||
			!strings.Contains(string(b), fmt.Sprintf("err %d", i)) {
			t.Errorf("rank %d's log: %q, %v", i, b, err)
		}
	}
	if out := j.Out.String(); out != "out 0\nout 1\n" && out != "out 1\nout 0\n" {
		t.Errorf("stdout %q", out)
	}
}

func TestRunFullDisk(t *testing.T) {
	s := newStage(t)
	dir := t.TempDir()
	// Room for the log of the first writer.
	switch err := unix.Mount("tmpfs", dir, "tmpfs", 0, "mode=0700,nr_blocks=1"); {
	case errors.Is(err, unix.EPERM):
		t.Skip("only root can mount a disk that is soon full")
	case err != nil:
		t.Fatal(err)
	}
	t.Cleanup(func() { unix.Unmount(dir, unix.MNT_DETACH) })
	j := s.run("run", "-n", "2", "--log-dir", dir, proctest.Self())
	all := s.arrive(2)
	all[0].do("print %q", "line\n")
	j.Out.Await(t, "[0] line\n")
	all[1].do("print %q", "line\n")
	for range 2 {
		for _, p := range all {
			p.do("print %q", "line\n")
		}
	}
	for _, p := range all {
		p.tell("exit 0")
	}
	j.End(0)
	if n := strings.Count(j.Err.String(), "no space left"); n != 1 {
		t.Errorf("a full disk is reported %d times: %q", n, j.Err.String())
	}
	j.says("rank 1's log")
	if got := strings.Count(j.Out.String(), "[1] line\n"); got != 3 {
		t.Errorf("rank 1's lines on stdout: %d, want 3", got)
	}
	if b, _ := os.ReadFile(filepath.Join(dir, "rank-0.log")); string(b) != "line\nline\nline\n" {
		t.Errorf("rank 0's log: %q", b)
	}
	// The same for the standard output itself.
	j = s.command("run", "-n", "1", proctest.Self())
	full, err := os.OpenFile("/dev/full", os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer full.Close()
	j.cmd.Stdout = full
	j.start()
	p := s.arrive(1)[0]
	p.do("print %q", "line\n")
	p.do("print %q", "line\n")
	p.tell("exit 0")
	j.End(0)
	if n := strings.Count(j.Err.String(), "no space left"); n != 1 {
		t.Errorf("a full standard output is reported %d times: %q", n, j.Err.String())
	}
}

// What commands print themselves is lost on a full disk: they fail, and say so once.
func TestFullStandardOutput(t *testing.T) {
	s := newStage(t)
	full, err := os.OpenFile("/dev/full", os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer full.Close()
	for _, args := range []string{"secret", "version", "env", "doctor --json", "bench --max 64 --json", "--help",
		"run --help"} {
		j := s.command(strings.Fields(args)...)
		j.cmd.Env = append(j.cmd.Env, asRanks+"=1")
		j.cmd.Stdout = full
		j.start()
		j.End(1)
		if got := j.Err.String(); strings.Count(got, "no space left") != 1 || strings.Count(got, "\n") != 1 {
			t.Errorf("tutti %s says %q", args, got)
		}
	}
}

// TestRunWithClosedOutput closes the reader of the output, as head does.
func TestRunWithClosedOutput(t *testing.T) {
	s := newStage(t)
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	j := s.command("run", "-n", "2", proctest.Self())
	j.cmd.Stdout = w
	j.start()
	w.Close()
	all := s.arrive(2)
	r.Close()
	all[0].tell("print %q", "line\n")
	for _, p := range all {
		p.gone()
	}
	j.End(128 + int(syscall.SIGPIPE))
}

// unread makes a pipe, which holds size bytes. Its end r is closed with the test.
func unread(t *testing.T) (r, w *os.File, size int) {
	t.Helper()
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { r.Close() })
	if size, err = unix.FcntlInt(w.Fd(), unix.F_GETPIPE_SZ, 0); err != nil {
		t.Fatal(err)
	}
	return r, w, size
}

// TestRunEndsRanksWhenNobodyReads leaves a pipe full that is the standard error.
func TestRunEndsRanksWhenNobodyReads(t *testing.T) {
	s := newStage(t)
	r, w, size := unread(t)
	j := s.command("run", "-n", "2", "--grace", "100ms", proctest.Self())
	j.cmd.Stderr = w
	j.start()
	w.Close()
	all := s.arrive(2)
	for _, p := range all {
		p.do("ignore %d", syscall.SIGINT)
		p.do("ignore %d", syscall.SIGTERM)
	}
	for _, p := range all {
		p.tell("printerr %q", strings.Repeat("line\n", 100_000))
	}
	for end, before := time.Now().Add(patience), 0; ; time.Sleep(200 * time.Millisecond) {
		n, err := unix.IoctlGetInt(int(r.Fd()), unix.TIOCINQ)
		if err != nil {
			t.Fatal(err)
		}
		if n > size/2 && n == before { // a page that was begun by another write holds less
			break
		}
		if before = n; time.Now().After(end) {
			t.Fatalf("%d bytes are in the pipe", n)
		}
	}
	j.Signal(syscall.SIGINT)
	for _, p := range all {
		p.gone()
	}
	text, err := io.ReadAll(r)
	if err != nil {
		t.Fatal(err)
	}
	j.End(128 + int(syscall.SIGKILL))
	_, rest, ok := strings.Cut(string(text), "tutti: SIGINT: passed on to 2 ranks")
	if !ok || !strings.HasSuffix(rest, "\ntutti: interrupted by SIGINT; killed 2 ranks that had not ended\n") {
		t.Errorf("at last it says %q", text[max(0, len(text)-400):])
	}
}

// TestRunGivesUpWhatNobodyReads leaves a pipe full that is the standard output, after the rank has
// ended well.
func TestRunGivesUpWhatNobodyReads(t *testing.T) {
	s := newStage(t)
	_, w, size := unread(t)
	j := s.command("run", "-n", "1", "--log-dir", t.TempDir(), proctest.Self())
	j.cmd.Stdout = w
	j.start()
	w.Close()
	p := s.arrive(1)[0]
	p.do("print %q", strings.Repeat("line\n", 2*size/5))
	p.tell("exit 0")
	p.gone()
	for ended, end := false, time.Now().Add(patience); !ended; {
		j.TrySignal(syscall.SIGINT) // the first may come before the end of the rank is known
		select {
		case <-j.Done():
			ended = true
		case <-time.After(2 * time.Second):
			if time.Now().After(end) {
				t.Fatal("it does not end")
			}
		}
	}
	j.End(128 + int(syscall.SIGINT))
	j.says("lines of output, which nobody has read\n")
	j.says("interrupted by SIGINT")
}

func TestRunStdin(t *testing.T) {
	s := newStage(t)
	j := s.command("run", "-n", "2", "--stdin", proctest.Self())
	j.cmd.Stdin = strings.NewReader("for rank 0")
	j.start()
	for i, p := range s.arrive(2) {
		p.tell("read")
		if got, want := p.hear(), []string{`"for rank 0" <nil>`, `"" <nil>`}[i]; got != want {
			t.Errorf("rank %d read %s, want %s", i, got, want)
		}
		p.tell("exit 0")
	}
	j.End(0)
}

func TestRunPrograms(t *testing.T) {
	dir := t.TempDir()
	write := func(name, text string, mode os.FileMode) string {
		path := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(text), mode); err != nil {
			t.Fatal(err)
		}
		return path
	}
	write("go.mod", "module example\n\ngo 1.26\n", 0o644)
	hello := "package main\n\nimport (\"fmt\"; \"os\")\n\nfunc main() { fmt.Println(\"built\", " +
		"os.Getenv(\"RANK\"), os.Args[1:]) }\n"
	for _, c := range []struct {
		name, program, out, err string
		code                    int
	}{
		{"not in PATH", "no-such-program-anywhere", "", `program "no-such-program-anywhere" is not in PATH`, 127},
		{"no such file", "./no/such/file", "", `program "./no/such/file": no such file`, 127},
		{"not executable", write("plain", "x", 0o644), "", "cannot be executed: permission denied", 126},
		{"no program at all", write("garbage", "\x00\x01\x02", 0o755), "", "could not be started: exec format error",
			126},
		{"empty directory", filepath.Dir(write("empty/readme", "", 0o644)), "", "is a directory without Go files", 127},
		{"Go file", write("one.go", hello, 0o644), "[0] built 0 [a b]\n", "", 0},
		{"Go package", filepath.Dir(write("cmd/main.go", hello, 0o644)), "[0] built 0 [a b]\n", "", 0},
		{"Go library", filepath.Dir(write("lib/lib.go", "package lib\n", 0o644)), "",
			"no program: package main is needed", 126},
		{"build error", write("bad.go", "package main\n\nfunc main() { undefined() }\n", 0o644), "",
			"bad.go:3:15: undefined: undefined\n", 1},
	} {
		t.Run(c.name, func(t *testing.T) {
			s := newStage(t)
			j := s.run("run", "-n", "1", c.program, "a", "b")
			j.End(c.code)
			j.says(c.err)
			if j.Out.String() != c.out {
				t.Errorf("stdout %q, want %q", j.Out.String(), c.out)
			}
			s.empty()
		})
	}
}

// TestRunBuildCutShort ends tutti while a go command runs that never ends.
func TestRunBuildCutShort(t *testing.T) {
	for _, sig := range []syscall.Signal{syscall.SIGINT, syscall.SIGKILL} {
		s := newStage(t)
		bin := t.TempDir()
		if err := os.WriteFile(filepath.Join(bin, "go"),
			[]byte("#!/bin/sh\necho building as $$ >&2\nexec sleep 1000\n"), 0o755); err != nil {
			t.Fatal(err)
		}
		src := filepath.Join(t.TempDir(), "x.go")
		if err := os.WriteFile(src, []byte("package main\n"), 0o644); err != nil {
			t.Fatal(err)
		}
		j := s.command("run", "-n", "1", src)
		j.cmd.Env = append(j.cmd.Env, "PATH="+bin+":"+os.Getenv("PATH"))
		j.start()
		j.Err.Await(t, "\n")
		var pid int
		if _, err := fmt.Sscanf(j.Err.String(), "building as %d\n", &pid); err != nil {
			t.Fatalf("%q: %v", j.Err.String(), err)
		}
		building, guarding := watch(t, pid), watch(t, parent(t, pid))
		j.Signal(sig)
		building()
		guarding()
		if code := j.Wait(); sig == syscall.SIGINT && code != 130 {
			t.Errorf("exit code %d, want 130", code)
		}
		s.empty()
	}
}

func TestRunNodes(t *testing.T) {
	secret := filepath.Join(t.TempDir(), "secret")
	if err := os.WriteFile(secret, []byte(bootstrap.NewSecret()+"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	node := func(s *stage, rdzv string, n, nodes, node int) *tutti {
		return s.run("run", "-n", fmt.Sprint(n), "--nnodes", fmt.Sprint(nodes), "--node-rank", fmt.Sprint(node),
			"--rdzv", rdzv, "--secret-file", secret, proctest.Self())
	}
	t.Run("well", func(t *testing.T) {
		s := newStage(t)
		rdzv := portstest.Address(t)
		b := node(s, "etcd://"+rdzv, 2, 2, 1)
		a := node(s, rdzv, 2, 2, 0)
		all := s.arrive(4)
		for i, p := range all {
			if p.Env["LOCAL_RANK"] != fmt.Sprint(i%2) || p.Env["WORLD_SIZE"] != "4" ||
				p.Env["TUTTI_STORE"] != "tutti://"+rdzv || p.Env["MASTER_PORT"] != all[0].Env["MASTER_PORT"] {
				t.Errorf("rank %d: %v", i, p.Env)
			}
		}
		// Node 0 is done first, but must serve the store until the other is.
		for _, p := range all[:2] {
			p.tell("exit 0")
			p.gone()
		}
		l, err := bootstrap.FromEnv(func(name string) string { return all[3].Env[name] })
		if err != nil {
			t.Fatal(err)
		}
		h, err := bootstrap.DialStore(t.Context(), bootstrap.StoreConfig{Address: l.Store, Job: l.Job,
			Secret: l.Secret})
		if err != nil {
			t.Fatal(err)
		}
		h.Close()
		for _, p := range all[2:] {
			p.tell("exit 0")
		}
		b.End(0)
		a.End(0)
		refused(t, all[3].Env)
		s.empty()
	})
	t.Run("a node is lost and the others go on", func(t *testing.T) {
		s := newStage(t)
		rdzv := portstest.Address(t)
		start := func(node int) *tutti {
			return s.run("run", "-n", "2", "--nnodes", "2", "--node-rank", fmt.Sprint(node), "--rdzv", rdzv,
				"--secret-file", secret, "--on-failure", "shrink", proctest.Self())
		}
		a, b := start(0), start(1)
		all := s.arrive(4)
		for _, p := range all[2:] {
			p.tell("kill 9")
			p.gone()
		}
		b.End(137)
		a.Err.Await(t, "; the others go on")
		for _, p := range all[:2] {
			p.do("print %q", "still here\n")
			p.tell("exit 0")
		}
		a.End(0)
		s.empty()
	})
	t.Run("a rank fails", func(t *testing.T) {
		s := newStage(t)
		rdzv := portstest.Address(t)
		a, b := node(s, rdzv, 2, 2, 0), node(s, rdzv, 2, 2, 1)
		all := s.arrive(4)
		all[3].tell("exit 9")
		for _, p := range all {
			p.gone()
		}
		a.End(9)
		b.End(9)
		b.says("rank 3 exited with code 9; ended the other rank\n")
		a.says("node 1: rank 3 exited with code 9; ended the 2 ranks still running\n")
	})
	t.Run("a node dies", func(t *testing.T) {
		for dead := range 2 {
			s := newStage(t)
			rdzv := portstest.Address(t)
			n := []*tutti{node(s, rdzv, 1, 2, 0), node(s, rdzv, 1, 2, 1)}
			all := s.arrive(2)
			n[dead].Signal(syscall.SIGKILL)
			for _, p := range all {
				p.gone()
			}
			n[1-dead].End(1)
			n[1-dead].says([]string{"the job's store, which node 0 serves, is gone",
				"node 1: its launcher is gone"}[dead])
		}
	})
	t.Run("they disagree", func(t *testing.T) {
		for _, c := range []struct{ a, b, says string }{
			{"-n 2", "-n 3", "was started with -n "},
			{"-n 2 --on-failure retry", "-n 2", "was started with --on-failure "},
			{"-n 2 --on-failure retry", "-n 2 --on-failure shrink", "was started with --on-failure "},
		} {
			s := newStage(t)
			rdzv := portstest.Address(t)
			var both []*tutti
			for node, args := range []string{c.a, c.b} {
				both = append(both, s.run(append(append([]string{"run"}, strings.Fields(args)...), "--nnodes", "2",
					"--node-rank", fmt.Sprint(node), "--rdzv", rdzv, "--secret-file", secret, proctest.Self())...))
			}
			for _, j := range both {
				j.End(1)
			}
			if all := both[0].Err.String() + both[1].Err.String(); !strings.Contains(all, c.says) ||
				!strings.Contains(all, "they must agree") {
				t.Errorf("%s, %s: stderr %q", c.a, c.b, all)
			}
		}
	})
	t.Run("signals for ranks", func(t *testing.T) {
		s := newStage(t)
		rdzv := portstest.Address(t)
		a, b := node(s, rdzv, 1, 2, 0), node(s, rdzv, 1, 2, 1)
		all := s.arrive(2)
		all[0].tell("exit 0")
		all[0].noticed()
		a.Signal(syscall.SIGUSR1) // there are none any more
		a.Signal(syscall.SIGUSR2)
		all[1].do("print %q", "still here\n")
		b.Out.Await(t, "still here")
		all[1].tell("exit 0")
		b.End(0)
		a.End(0)
		s.empty()
	})
	t.Run("interrupted while waiting", func(t *testing.T) {
		s := newStage(t)
		a := node(s, portstest.Address(t), 1, 2, 0)
		a.Err.Await(t, "waiting for 1 other node")
		a.Signal(syscall.SIGINT)
		a.End(130)
		s.empty()
	})
}

// TestRunGoesOnAfterCtrlZ: the job's store is in the launcher.
func TestRunGoesOnAfterCtrlZ(t *testing.T) {
	s := newStage(t)
	j := s.run("run", "-n", "1", proctest.Self())
	p := s.arrive(1)[0]
	j.Signal(syscall.SIGTSTP)
	j.Err.Await(t, "SIGTSTP: it does not stop, since the job's store is in this process; Ctrl-C ends the job")
	p.tell("exit 0")
	j.End(0)
}

// TestRunRefusesABadStore: a TUTTI_STORE that is no address is not taken for none.
func TestRunRefusesABadStore(t *testing.T) {
	s := newStage(t)
	for _, value := range []string{"foo", "etdc://host:1", "etcd://"} {
		j := s.command("run", "-n", "1", "true")
		j.cmd.Env = append(j.cmd.Env, "TUTTI_STORE="+value)
		j.start()
		j.End(2)
		j.says("TUTTI_STORE: store \"" + value + "\"")
	}
}

func TestUsage(t *testing.T) {
	s := newStage(t)
	for _, c := range []struct{ args, says string }{
		{"run", "which program?"},
		{"-v run -n 1 x", "unknown shorthand flag: 'v'"},
		{"--help run -n 1 x", "unknown shorthand flag: 'n'"},
		{"status --watch 0", "such as 2s"},
		{"run x", "how many ranks? give -n N"},
		{"run -n", "flag needs an argument: 'n' in -n"},
		{"run -n two x", `"two" is no whole number`},
		{"run -n 0 x", "-n 0: expected 1 to"},
		{"run -n 2 --bogus x", "unknown flag: --bogus"},
		{"run -n 2 --nnodes 2 x", "needs --node-rank"},
		{"run -n 2 --nnodes 2 --node-rank 2 --rdzv a:1 x", "--node-rank 2: expected 0..1"},
		{"run -n 2 --nnodes 1 --node-rank 1 x", "--node-rank 1: expected 0, there is 1 node (--nnodes)"},
		{"run -n 2 --nnodes 2 --node-rank 1 x", "needs --rdzv HOST:PORT"},
		{"run -n 2 --nnodes 2 --node-rank 1 --rdzv a x", "--rdzv a: expected HOST:PORT"},
		{"run -n 2 --nnodes 2 --node-rank 1 --rdzv a:1 x", "several nodes need a secret"},
		{"run -n 2 --rdzv a:1 x", "--rdzv is for several nodes"},
		{"run -n 2 --rdzv a:1 --node-rank 0 x", "--rdzv is for several nodes"},
		{"run -n 2 --nnodes 70000 x", "--nnodes 70000: expected 1 to 65536"},
		{"run -n 2 --on-failure retry --standby 70000 x", "--standby 70000: expected 0 to 65536"},
		{"run -n 2 --secret-file /no/such/file x", "--secret-file: open /no/such/file: no such file"},
		{"run -n 2 --transport udp x", "--transport udp: expected auto, shm, rdma or tcp"},
		{"run -n 2 --on-failure ignore x", "--on-failure ignore: expected end, shrink or retry"},
		{"run -n 2 --max-restarts 1 x", "--max-restarts, --standby and --auto-admit need --on-failure shrink or retry"},
		{"run -n 2 --grace soon x", `"soon" is no duration`},
		{"run -n 2 --store redis://x y", "--store: store \"redis://x\": expected"},
		{"run -n 2 --nnodes 2 --node-rank 0 --store etcd://x:1 y", "needs --job NAME"},
		{"run -n 2 --bind socket x", "--bind socket: expected share, core or none"},
		{"run -n 9000 --bind core x", "--bind core: 9000 ranks need as many processors, there are"},
		{"run -n 2 -v -q x", "--verbose and --quiet exclude each other"},
		{"run -n 2 --job a/b x", `job name "a/b"`},
		{"bench --op allreduc", "--op allreduc: expected all, or some of allreduce,"},
		{"bench --dtype float", "--dtype float: expected all, or some of int8,"},
		{"bench --min 1K --max 1", "--max 1 is less than --min 1K"},
		{"bench --max 9X", `--max "9X": expected a size`},
		{"bench --factor 1", "--factor 1: expected 2 or more"},
		{"bench --root 2", "--root 2: expected 0..1"},
		{"bench --faults --max 1M", "--max is not for --faults"},
		{"bench x", "takes no arguments"},
		{"doctor now", "takes no arguments"},
		{"secret now", "takes no arguments"},
		{"secret --file /no/such/directory/f", "--file: open /no/such/directory/f: no such file"},
		{"secret --client a", "--client needs the job's secret: set TUTTI_SECRET or give --secret-file"},
		{"secret --client a --secret-file /no/such/file", "--secret-file: open /no/such/file: no such file"},
		{"secret --secret-file f", "--secret-file is for --client"},
		{"wat", `there is no command "wat"`},
		{"benhc", "did you mean bench?"},
		{"rn -n 4 x", `there is no command "rn"; did you mean env or run?`},
		{"bnech --op all", "did you mean bench?"},
		{"--bogus", "unknown flag: --bogus"},
		{"run -np 2 x", "-np: give -n N"},
	} {
		j := s.run(strings.Fields(c.args)...)
		j.End(2)
		j.says(c.says)
		if n := strings.Count(j.Err.String(), "\n"); n != 2 {
			t.Errorf("tutti %s: %d lines on stderr, want 2: %q", c.args, n, j.Err.String())
		}
		if j.Out.String() != "" {
			t.Errorf("tutti %s: stdout %q", c.args, j.Out.String())
		}
	}
}

func TestHelp(t *testing.T) {
	s := newStage(t)
	for _, args := range []string{"", "--help", "run --help", "bench --help", "doctor --help", "secret --help", "env",
		"version", "--version", "help", "help run", "help endpoint ls"} {
		j := s.run(strings.Fields(args)...)
		j.End(0)
		if out := j.Out.String(); len(out) < 10 || j.Err.String() != "" {
			t.Errorf("tutti %s: stdout %q, stderr %q", args, out, j.Err.String())
		}
		if bad := regexp.MustCompile(`\bemit\b|completion|TODO`).FindString(j.Out.String()); bad != "" {
			t.Errorf("tutti %s shows %q", args, bad)
		}
	}
}

// With shrink or retry the other ranks keep running when a rank dies. The exit code is that of the
// ranks that are running when the first succeeds, or of the first death if none does.
func TestRunKeepsSurvivorsRunning(t *testing.T) {
	for _, c := range []struct {
		how  string // rank 1's end
		then string // rank 0's
		last string // rank 2's
		code int
	}{
		{"kill 9", "exit 0", "exit 0", 0},
		{"exit 5", "exit 0", "exit 0", 0},
		{"kill 9", "kill 9", "exit 7", 137}, // no rank succeeded
		{"kill 9", "exit 0", "exit 7", 7},
	} {
		t.Run(c.how+", "+c.then+", "+c.last, func(t *testing.T) {
			s := newStage(t)
			j := s.run("run", "-n", "3", "--on-failure", "shrink", "--", proctest.Self())
			all := s.arrive(3)
			if got := all[0].Env["TUTTI_ON_FAILURE"]; got != "shrink" {
				t.Errorf("TUTTI_ON_FAILURE=%q", got)
			}
			all[1].tell("%s", c.how)
			all[1].gone()
			j.Err.Await(t, "; the others go on")
			all[0].do("print %q", "still here\n")
			all[0].tell("%s", c.then)
			all[0].noticed()
			if c.then == "kill 9" {
				j.Err.Await(t, "rank 0 was killed by signal 9 (SIGKILL); the others go on")
			}
			all[2].tell("%s", c.last)
			j.End(c.code)
		})
	}
}

// TUTTI_ON_FAILURE counts for the launcher as for the ranks, unless the flag says otherwise.
func TestRunOnFailureVariable(t *testing.T) {
	for _, c := range []struct {
		variable, flag string
		goesOn         bool
		ranks          string
	}{
		{"Shrink", "", true, "shrink"},
		{"retry", "--on-failure=shrink", true, "shrink"},
		{"shrink", "--on-failure=end", false, "end"},
		{"report", "", false, "report"},
	} {
		t.Run(c.variable+c.flag, func(t *testing.T) {
			s := newStage(t)
			args := append([]string{"run", "-n", "2"}, strings.Fields(c.flag)...)
			j := s.command(append(args, "--", proctest.Self())...)
			j.cmd.Env = append(j.cmd.Env, "TUTTI_ON_FAILURE="+c.variable)
			j.start()
			all := s.arrive(2)
			if got := all[0].Env["TUTTI_ON_FAILURE"]; got != c.ranks {
				t.Errorf("TUTTI_ON_FAILURE=%q, want %q", got, c.ranks)
			}
			all[1].tell("exit 5")
			if !c.goesOn {
				all[0].gone()
				j.End(5)
				return
			}
			j.Err.Await(t, "; the others go on")
			all[0].tell("exit 0")
			j.End(0)
		})
	}
	s := newStage(t)
	j := s.command("run", "-n", "2", proctest.Self())
	j.cmd.Env = append(j.cmd.Env, "TUTTI_ON_FAILURE=ignore")
	j.start().End(codeUsage)
	j.says("TUTTI_ON_FAILURE=ignore: expected report, shrink or retry")
}

// A rank dies, and the others end well, before the guard looks: the launcher takes the ends in the
// order in which they came.
func TestRunTakesEndsInTheirOrder(t *testing.T) {
	s := newStage(t)
	j := s.run("run", "-n", "3", "--on-failure", "shrink", "--", proctest.Self())
	all := s.arrive(3)
	guard := parent(t, all[0].PID)
	proctest.Stop(t, guard)
	t.Cleanup(func() { syscall.Kill(guard, syscall.SIGCONT) })
	for _, x := range []struct {
		rank  int
		order string
	}{{1, "kill 9"}, {2, "exit 0"}, {0, "exit 0"}} {
		over := watch(t, all[x.rank].PID)
		all[x.rank].tell("%s", x.order)
		over()
	}
	if err := syscall.Kill(guard, syscall.SIGCONT); err != nil {
		t.Fatal(err)
	}
	j.End(0)
	j.says("rank 1 was killed by signal 9 (SIGKILL); the others go on")
}

// A rank that died is started again, alone, as often as was said, and no more once a rank has ended
// well.
func TestRunRestarts(t *testing.T) {
	s := newStage(t)
	j := s.run("run", "-n", "2", "--on-failure", "retry", "--max-restarts", "2", "--", proctest.Self())
	all := s.arrive(2)
	for i, how := range []string{"kill 9", "exit 3"} {
		all[1].tell("%s", how)
		j.Err.Await(t, fmt.Sprintf("starting it again (%d of 2)", i+1))
		if all[1] = s.next(); all[1].rank() != "1" {
			t.Fatalf("rank %s was started", all[1].rank())
		}
	}
	all[0].do("print %q", "the same all the time\n")
	all[0].tell("exit 0")
	all[0].noticed()
	all[1].tell("kill 9")
	j.End(137)
	j.says("rank 1 was killed by signal 9 (SIGKILL), after other ranks had ended well")
}

// Processes on standby have no rank, and end when all ranks have.
func TestRunStandby(t *testing.T) {
	s := newStage(t)
	j := s.run("run", "-n", "1", "--on-failure", "shrink", "--standby", "1", "--grace", "200ms", "--", proctest.Self())
	a, b := s.next(), s.next()
	if a.rank() == "" {
		a, b = b, a
	}
	if a.rank() != "0" || b.rank() != "" || b.Env["TUTTI_STANDBY"] != "0" || b.Env["TUTTI_SIZE"] != "1" ||
		b.Env["TUTTI_STORE"] != a.Env["TUTTI_STORE"] {
		t.Errorf("%v, %v", a.Env, b.Env)
	}
	a.tell("exit 0")
	b.gone()
	j.End(0)
}

// A spare process takes the place of a rank that died before that is back. What was started again
// waits then: it is ended when the group is over, or takes the place of the spare if that dies.
func TestRunReplaced(t *testing.T) {
	for _, how := range []string{"stays", "dies"} {
		t.Run("the spare "+how, func(t *testing.T) { replace(t, how == "dies") })
	}
}

// replace is TestRunReplaced.
func replace(t *testing.T, spareDies bool) {
	s := newStage(t)
	j := s.run("run", "-n", "2", "--on-failure", "shrink", "--max-restarts", "1", "--standby", "1", "--",
		proctest.Self())
	of := map[string]*puppet{}
	for range 3 {
		p := s.next()
		of[p.rank()] = p
		p.tell("join")
	}
	stays, dies, spare := of["0"], of["1"], of[""]
	for _, p := range []*puppet{stays, dies} {
		if got := p.hear(); got != "ok" {
			t.Fatalf("rank %s: %s", p.rank(), got)
		}
	}
	stays.tell("replace")
	dies.tell("kill 9")
	again := s.next()
	if again.rank() != "1" || again.Env["TUTTI_RESTART"] != "1" {
		t.Errorf("%v", again.Env)
	}
	for _, p := range []*puppet{spare, stays} {
		if got := p.hear(); got != "ok" {
			t.Fatalf("rank %q: %s", p.rank(), got)
		}
	}
	j.Err.Await(t, "standby 0 has taken the place of rank 1\n")
	again.tell("join")
	j.Err.Await(t, "another process has the place of this one")
	ranks := []*puppet{stays, spare}
	if spareDies {
		stays.tell("replace")
		spare.tell("kill 9")
		ranks[1] = again
		for _, p := range ranks {
			if got := p.hear(); got != "ok" {
				t.Fatalf("rank %s: %s", p.rank(), got)
			}
		}
	}
	for _, p := range ranks {
		p.do("close")
		p.tell("exit 0")
		p.gone()
	}
	again.gone()
	j.End(0)
	if text := j.Err.String(); strings.Count(text, "starting it again") != 1 {
		t.Errorf("rank 1 was to be started again once: %q", text)
	}
	s.empty()
}

// A rank that dies takes its process group with it while the others continue; descendants outside
// of the group end with the job.
func TestRunSweepsOrphans(t *testing.T) {
	s := newStage(t)
	j := s.run("run", "-n", "2", "--on-failure", "shrink", "--", proctest.Self())
	all := s.arrive(2)
	all[1].do("fork")
	orphan := s.next()
	all[1].do("spawn")
	elsewhere := s.next()
	all[1].tell("kill 9")
	orphan.gone()
	for _, p := range []*puppet{all[0], elsewhere} {
		p.do("print %q", "still here\n")
	}
	all[0].tell("exit 0")
	elsewhere.gone()
	j.End(0)
	s.empty()
}

// A rank that dies before all have met is replaced, by its restart or by a spare process, while the
// others wait in Join.
func TestRunReplacesRankThatDiesInJoin(t *testing.T) {
	for _, c := range []struct {
		name   string
		flags  string
		linked bool // it dies when another has met it; else before it joins
	}{
		{"restarted", "--max-restarts 1", true},
		{"restarted, before it joins", "--max-restarts 1", false},
		{"spare", "--standby 1", true},
		{"spare, before it joins", "--standby 1", false},
	} {
		t.Run(c.name, func(t *testing.T) {
			s := newStage(t)
			spares := strings.Count(c.flags, "standby")
			j := s.run(append(append([]string{"run", "-n", "3", "--on-failure", "shrink"}, strings.Fields(c.flags)...),
				"--", proctest.Self())...)
			of := map[string]*puppet{}
			for range 3 + spares {
				p := s.next()
				of[p.rank()] = p
			}
			for _, p := range of {
				if r := p.rank(); r == "0" || r == "" || r == "2" && c.linked {
					p.tell("join")
				}
			}
			joining(t, of["0"], 0, -1)
			if c.linked {
				joining(t, of["0"], 0, 2)
			}
			syscall.Kill(of["2"].PID, syscall.SIGKILL)
			of["2"].gone()
			instead := of[""]
			if spares == 0 {
				instead = s.next()
				instead.tell("join")
			}
			of["1"].tell("join")
			for _, p := range []*puppet{of["0"], of["1"], instead} {
				if got := p.hear(); got != "ok" {
					t.Fatalf("rank %q: %s", p.rank(), got)
				}
				p.tell("barrier")
			}
			for _, p := range []*puppet{of["0"], of["1"], instead} {
				if got := p.hear(); got != "ok" {
					t.Fatalf("rank %q: %s", p.rank(), got)
				}
			}
			for _, p := range []*puppet{of["0"], of["1"], instead} {
				p.tell("exit 0")
			}
			j.End(0)
			s.empty()
		})
	}
}

// joining waits until a rank of p's job is registered and, unless to is negative, has a link with
// rank to.
func joining(t *testing.T, p *puppet, rank, to int) {
	t.Helper()
	l, err := bootstrap.FromEnv(func(name string) string { return p.Env[name] })
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	h, err := bootstrap.DialStore(ctx, bootstrap.StoreConfig{Address: l.Store, Job: l.Job, Secret: l.Secret})
	if err != nil {
		t.Fatal(err)
	}
	defer h.Close()
	b, err := h.Wait(ctx, bootstrap.RankKey(rank))
	if err != nil {
		t.Fatal(err)
	}
	rec, err := bootstrap.DecodeRecord(b)
	if err != nil {
		t.Fatal(err)
	}
	c := bootstrap.NewClient(bootstrap.ClientConfig{Self: bootstrap.NewRecord(-1, 0, ident.New(), nil),
		Secret: l.Secret})
	for linked := to < 0; !linked; {
		var s flight.Snapshot
		if b, err := c.Status(ctx, rec, 0); err != nil {
			t.Fatal(err)
		} else if err := json.Unmarshal(b, &s); err != nil {
			t.Fatal(err)
		}
		linked = slices.ContainsFunc(s.Links, func(l flight.Link) bool { return l.Rank == to && l.Up })
	}
}

// If no process can take the place of a lost rank, Join ends at its own deadline with an error that
// names that rank.
func TestRunNamesRankThatDiesInJoin(t *testing.T) {
	s := newStage(t)
	j := s.run("run", "-n", "3", "--on-failure", "shrink", "--timeout", "20s", "--", proctest.Self())
	all := s.arrive(3)
	all[0].tell("join")
	all[2].tell("join")
	joining(t, all[0], 0, 2)
	syscall.Kill(all[2].PID, syscall.SIGKILL)
	all[2].gone()
	all[1].tell("join")
	for _, p := range all[:2] {
		got := p.hear()
		if !strings.Contains(got, "rank 2") || !strings.Contains(got, "joining job") {
			t.Errorf("rank %s: %s", p.rank(), got)
		}
		t.Log(got)
		p.tell("exit 5")
	}
	j.End(137)
	j.says("rank 2 was killed by signal 9 (SIGKILL) first; no rank ended well")
}
