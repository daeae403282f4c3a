package main

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"tutti/bootstrap"
	"tutti/internal/proctest"
)

// Two launchers that Open MPI's has started on this host, without a secret, and without the flags
// that tell what it does.
func TestRunFindsNodesOfOuterLauncher(t *testing.T) {
	for _, flags := range [][2]string{{"", ""}, {"--nnodes 2", "--node-rank 1"}} {
		t.Run(flags[0], func(t *testing.T) { meetOnHost(t, flags) })
	}
}

// meetOnHost is TestRunFindsNodesOfOuterLauncher.
func meetOnHost(t *testing.T, flags [2]string) {
	s := newStage(t)
	start := func(node int) *tutti {
		j := s.command(append(append([]string{"run", "-n", "2"}, strings.Fields(flags[node])...), proctest.Self())...)
		j.cmd.Env = append(j.cmd.Env, fmt.Sprintf("OMPI_COMM_WORLD_RANK=%d", node), "OMPI_COMM_WORLD_SIZE=2",
			fmt.Sprintf("OMPI_COMM_WORLD_LOCAL_RANK=%d", node), "OMPI_COMM_WORLD_LOCAL_SIZE=2",
			fmt.Sprintf("PMIX_NAMESPACE=test-%d", os.Getpid()))
		return j.start()
	}
	b, a := start(1), start(0)
	all := s.arrive(4)
	for i, p := range all {
		if p.Env["LOCAL_RANK"] != fmt.Sprint(i%2) || p.Env["WORLD_SIZE"] != "4" ||
			p.Env["TUTTI_STORE"] != all[0].Env["TUTTI_STORE"] || p.Env["TUTTI_SECRET"] != all[0].Env["TUTTI_SECRET"] ||
			p.Env["TUTTI_JOB"] != fmt.Sprintf("openmpi-test-%d", os.Getpid()) {
			t.Errorf("rank %d: %v", i, p.Env)
		}
	}
	for _, p := range all {
		p.tell("join")
	}
	for _, p := range all {
		if got := p.hear(); got != "ok" {
			t.Errorf("rank %s joins: %s", p.rank(), got)
		}
	}
	for _, p := range all {
		p.tell("exit 0")
	}
	a.End(0)
	b.End(0)
	s.empty()
}

func TestRunInASlurmStep(t *testing.T) {
	const step = "SLURM_JOB_ID=7 SLURM_STEP_ID=0 SLURM_STEP_NODELIST=localhost,n2 SLURM_STEP_NUM_NODES=2 " +
		"SLURM_STEP_TASKS_PER_NODE=1(x2) SLURM_LOCALID=0"
	node := func(s *stage, n int, env string, args ...string) *tutti {
		j := s.command(append(append([]string{"run", "-n", "1"}, args...), proctest.Self())...)
		j.cmd.Env = append(j.cmd.Env, strings.Fields(step)...)
		j.cmd.Env = append(j.cmd.Env, fmt.Sprintf("SLURM_NODEID=%d", n), fmt.Sprintf("SLURM_PROCID=%d", n))
		j.cmd.Env = append(j.cmd.Env, strings.Fields(env)...)
		return j.start()
	}
	t.Run("needs the job's secret alone", func(t *testing.T) {
		s := newStage(t)
		// The number of this process keeps others that run this test from meeting here.
		env := fmt.Sprintf("SLURM_STEP_NUM_TASKS=2 SLURM_JOB_ID=%d TUTTI_SECRET=%s", os.Getpid(), bootstrap.NewSecret())
		a, b := node(s, 0, env), node(s, 1, env)
		for i, p := range s.arrive(2) {
			if p.Env["TUTTI_JOB"] != fmt.Sprintf("slurm-%d.0", os.Getpid()) ||
				!strings.HasPrefix(p.Env["TUTTI_STORE"], "tutti://localhost:2") {
				t.Errorf("rank %d: %v", i, p.Env)
			}
			p.tell("exit 0")
		}
		a.End(0)
		b.End(0)
		s.empty()
	})
	t.Run("without a secret", func(t *testing.T) {
		s := newStage(t)
		j := node(s, 0, "SLURM_STEP_NUM_TASKS=2")
		j.End(codeUsage)
		j.says("tutti secret makes one")
	})
	t.Run("with several tasks a node", func(t *testing.T) {
		s := newStage(t)
		j := node(s, 0, "SLURM_STEP_NUM_TASKS=4")
		j.End(codeUsage)
		j.says("--ntasks-per-node=1")
	})
	for _, c := range [][]string{{"--nnodes", "3"}, {"--node-rank", "0"}} {
		t.Run("contradicts "+c[0], func(t *testing.T) {
			s := newStage(t)
			j := node(s, 1, "SLURM_STEP_NUM_TASKS=2", c...)
			j.End(codeUsage)
			j.says(strings.Join(c, " ") + " contradicts slurm, which started this command as node 1 of 2")
		})
	}
	t.Run("one node, whatever started it", func(t *testing.T) {
		s := newStage(t)
		j := node(s, 1, "SLURM_STEP_NUM_TASKS=4", "--nnodes", "1")
		p := s.arrive(1)[0]
		if p.Env["WORLD_SIZE"] != "1" {
			t.Errorf("%v", p.Env)
		}
		p.tell("exit 0")
		j.End(0)
	})
	t.Run("flags are preferred", func(t *testing.T) {
		s := newStage(t)
		j := node(s, 1, "SLURM_STEP_NUM_TASKS=4", "--nnodes", "1", "--node-rank", "0")
		p := s.arrive(1)[0]
		if p.Env["WORLD_SIZE"] != "1" {
			t.Errorf("%v", p.Env)
		}
		p.tell("exit 0")
		j.End(0)
	})
}

func TestRunOnSeveralHostsOfOpenMPI(t *testing.T) {
	s := newStage(t)
	j := s.command("run", "-n", "1", proctest.Self())
	j.cmd.Env = append(j.cmd.Env, "OMPI_COMM_WORLD_RANK=0", "OMPI_COMM_WORLD_SIZE=2", "OMPI_COMM_WORLD_LOCAL_SIZE=1")
	j.start()
	j.End(codeUsage)
	j.says("give --rdzv HOST:PORT")
}

func TestRunInterruptedBeforeOtherNodesCome(t *testing.T) {
	s := newStage(t)
	j := s.command("run", "-n", "1", proctest.Self())
	j.cmd.Env = append(j.cmd.Env, "OMPI_COMM_WORLD_RANK=1", "OMPI_COMM_WORLD_SIZE=2", "OMPI_COMM_WORLD_LOCAL_RANK=1",
		"OMPI_COMM_WORLD_LOCAL_SIZE=2", fmt.Sprintf("PMIX_NAMESPACE=absent-%d", os.Getpid()))
	j.start()
	j.Err.Await(t, "looking for node 0")
	j.Signal(syscall.SIGINT)
	j.End(130)
	s.empty()
}

func TestSecret(t *testing.T) {
	s := newStage(t)
	seen := map[string]bool{}
	for range 2 {
		j := s.run("secret")
		j.End(0)
		text := strings.TrimSuffix(j.Out.String(), "\n")
		if raw, err := bootstrap.ParseSecret(text); err != nil || len(raw) != 32 || seen[text] {
			t.Errorf("tutti secret prints %q: %d bytes, %v", text, len(raw), err)
		}
		seen[text] = true
	}
	file := filepath.Join(t.TempDir(), "secret")
	j := s.run("secret", "--file", file)
	j.End(0)
	info, err := os.Stat(file)
	if err != nil || info.Mode() != 0o600 || j.Out.String() != "" {
		t.Errorf("%v, %v; stdout %q", info, err, j.Out.String())
	}
	before, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	l, err := bootstrap.FromEnv(func(name string) string { return map[string]string{"TUTTI_SECRET_FILE": file}[name] })
	if err != nil || len(l.Secret) != 32 {
		t.Errorf("the file is read as %d bytes, %v", len(l.Secret), err)
	}
	j = s.run("secret", "--file", file)
	j.End(codeUsage)
	if after, err := os.ReadFile(file); err != nil || string(after) != string(before) {
		t.Errorf("a secret that was there is now %q, %v", after, err)
	}
}

func TestSecretText(t *testing.T) {
	const text = "sixteen letters!"
	dir := t.TempDir()
	file := func(name, text string) string {
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		return path
	}
	good, zero := file("good", text+"\r\n"), file("zero", text+"\x00")
	for _, c := range []struct{ flag, secret, secretFile, name, err string }{
		{"", text + "\n", "", "TUTTI_SECRET", ""},
		{"", "", good, "TUTTI_SECRET_FILE", ""},
		{good, "another one", zero, "--secret-file", ""},
		{zero, "", "", "", "--secret-file: the file has a zero byte"},
		{"", "", zero, "", "TUTTI_SECRET_FILE: the file has a zero byte"},
		{"", text, good, "", "both set"},
		{dir, "", "", "", "--secret-file: read " + dir},
	} {
		got, name, err := secretText(c.flag, func(name string) string {
			return map[string]string{"TUTTI_SECRET": c.secret, "TUTTI_SECRET_FILE": c.secretFile}[name]
		})
		if c.err == "" && (got != text || name != c.name || err != nil) ||
			c.err != "" && (err == nil || !strings.Contains(err.Error(), c.err)) {
			t.Errorf("%+v: %q of %s, %v", c, got, name, err)
		}
	}
}

func TestSecretOfClient(t *testing.T) {
	s := newStage(t)
	secret := bootstrap.NewSecret()
	raw, err := bootstrap.ParseSecret(secret)
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	jobs := filepath.Join(dir, "job")
	if err := os.WriteFile(jobs, []byte(secret+"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	want, err := bootstrap.NewCredential(raw, "web-1")
	if err != nil {
		t.Fatal(err)
	}
	run := func(env string, args ...string) *tutti {
		j := s.command(append([]string{"secret"}, args...)...)
		j.cmd.Env = append(j.cmd.Env, env)
		return j.start()
	}
	file := filepath.Join(dir, "credential")
	for _, j := range []*tutti{
		run("TUTTI_SECRET="+secret, "--client", "web-1"),
		run("TUTTI_SECRET_FILE="+jobs, "--client", "web-1"),
		run("TUTTI_SECRET=the secret of another job", "--client", "web-1", "--secret-file", jobs),
		run("TUTTI_SECRET="+secret, "--client", "web-1", "--file", file),
	} {
		j.End(0)
		got := j.Out.String()
		if slices.Contains(j.cmd.Args, file) {
			info, err := os.Stat(file)
			b, rerr := os.ReadFile(file)
			if err != nil || rerr != nil || info.Mode() != 0o600 || got != "" {
				t.Errorf("%v, %v, %v; stdout %q", info, err, rerr, got)
			}
			got = string(b)
		}
		if got != want+"\n" || j.Err.String() != "" {
			t.Errorf("%q prints %q, want %q; stderr %q", j.cmd.Args, got, want, j.Err.String())
		}
	}
	for _, c := range []struct {
		j    *tutti
		says string
	}{
		{run("TUTTI_SECRET="+secret, "--client", ""), `--client: a client's name "": expected 1 to 32 letters`},
		{run("TUTTI_SECRET="+secret, "--client", "a b"), `--client: a client's name "a b": expected 1 to 32 letters`},
		{run("TUTTI_SECRET="+want, "--client", "b"), "TUTTI_SECRET: this is the credential of client web-1"},
		{run("TUTTI_SECRET=short", "--client", "b"), "TUTTI_SECRET: a secret of 5 bytes is too short"},
	} {
		c.j.End(codeUsage)
		c.j.says(c.says)
		if text := c.j.Err.String(); strings.Contains(text, want[len(want)-16:]) || c.j.Out.String() != "" {
			t.Errorf("stderr %q, stdout %q", text, c.j.Out.String())
		}
	}
	// A rank does not start with it.
	j := s.command("run", "-n", "1", proctest.Self())
	j.cmd.Env = append(j.cmd.Env, "TUTTI_SECRET="+want)
	j.start().End(codeUsage)
	j.says("a rank needs the job's own secret")
}
