//go:build linux

package rig

import (
	"bufio"
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"tutti/internal/proctest"
)

// Patience bounds every wait for a rank. No test depends on its value, except for the time of a
// failure.
const Patience = proctest.Patience

// A Stage holds the processes of a test's jobs: their temporary directory, their /dev/shm (as
// root), and the socket to which the ranks connect.
type Stage struct {
	t    *testing.T
	mark string
	dir  string // TMPDIR of the processes is dir/tmp, /dev/shm dir/shm
	l    *net.UnixListener
	was  []string // in /dev/shm, where it is shared with the machine
	seen sockets

	ranks []*Rank
}

// New makes a stage. At the end of the test its processes are killed.
func New(t *testing.T) *Stage {
	t.Helper()
	dir, err := os.MkdirTemp("", "rig") // not t.TempDir: paths of sockets are short
	if err != nil {
		t.Fatal(err)
	}
	s := &Stage{t: t, mark: rand.Text(), dir: dir, seen: sockets{}}
	t.Cleanup(func() {
		proctest.KillAllWith(markVariable, s.mark)
		os.RemoveAll(dir)
	})
	for _, d := range []string{"tmp", "shm"} {
		if err = os.Mkdir(filepath.Join(dir, d), 0o700); err == nil {
			err = os.Chmod(filepath.Join(dir, d), 0o777|os.ModeSticky)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Chmod(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	if s.l, err = net.ListenUnix("unix", &net.UnixAddr{Name: filepath.Join(dir, "control")}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.l.Close() })
	if err := os.Chmod(filepath.Join(dir, "control"), 0o777); err != nil {
		t.Fatal(err)
	}
	s.was = names(t, s.shm())
	return s
}

// Root reports whether this process is root.
func Root() bool { return os.Geteuid() == 0 }

// NeedRoot skips a test that needs root.
func NeedRoot(t *testing.T, why string) {
	t.Helper()
	if !Root() {
		t.Skipf("needs root: %s", why)
	}
}

// Need skips a test that needs these programs.
func Need(t *testing.T, programs ...string) {
	t.Helper()
	for _, p := range programs {
		if _, err := exec.LookPath(p); err != nil {
			t.Skipf("needs the program %s: %v", p, err)
		}
	}
}

// Program returns the path of a copy of this test binary that all users may execute.
func (s *Stage) Program() string {
	s.t.Helper()
	path := filepath.Join(s.dir, "program")
	if _, err := os.Stat(path); err == nil {
		return path
	}
	from, err := os.Open(proctest.Self())
	if err != nil {
		s.t.Fatal(err)
	}
	defer from.Close()
	to, err := os.OpenFile(path, os.O_CREATE|os.O_WRONLY, 0o755)
	if err == nil {
		_, err = io.Copy(to, from)
		err = errors.Join(err, to.Close())
	}
	if err != nil {
		s.t.Fatal(err)
	}
	return path
}

// Module returns the directory of the module's root.
func Module(t *testing.T) string {
	t.Helper()
	_, file, _, _ := runtime.Caller(0)
	dir := filepath.Join(filepath.Dir(file), "..", "..", "..")
	if _, err := os.Stat(filepath.Join(dir, "go.mod")); err != nil {
		t.Fatalf("the source tree is needed: %v", err)
	}
	return dir
}

var tutti struct {
	once sync.Once
	dir  string
	err  error
}

// Tutti builds the launcher, once for the test binary, and returns its path.
func Tutti(t *testing.T) string {
	t.Helper()
	root := Module(t)
	tutti.once.Do(func() {
		if tutti.dir, tutti.err = os.MkdirTemp("", "rig-bin"); tutti.err != nil {
			return
		}
		if tutti.err = os.Chmod(tutti.dir, 0o755); tutti.err != nil {
			return
		}
		cmd := exec.Command("go", "build", "-o", tutti.dir+"/", "./cmd/tutti")
		cmd.Dir = root
		if out, err := cmd.CombinedOutput(); err != nil {
			tutti.err = fmt.Errorf("go build ./cmd/tutti: %w\n%s", err, out)
		}
	})
	if tutti.err != nil {
		t.Fatal(tutti.err)
	}
	return filepath.Join(tutti.dir, "tutti")
}

// environment returns the test's environment without variables that would change a job, and with
// those that make a process part of the stage.
func (s *Stage) environment(extra []string) []string {
	var env []string
	for _, kv := range os.Environ() {
		name, _, _ := strings.Cut(kv, "=")
		if strings.HasPrefix(name, "TUTTI_") || slices.Contains([]string{"RANK", "WORLD_SIZE", "LOCAL_RANK",
			"LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}, name) {
			continue
		}
		env = append(env, kv)
	}
	env = append(env, markVariable+"="+s.mark, controlVariable+"="+filepath.Join(s.dir, "control"),
		"TMPDIR="+filepath.Join(s.dir, "tmp"))
	return append(env, extra...)
}

// Start starts a process of the stage, with additional variables.
func (s *Stage) Start(env []string, argv ...string) *proctest.Child {
	s.t.Helper()
	return s.StartIn(nil, env, argv...)
}

// StartIn is Start with a prefix to the arguments that ends in executing the rest, such as "ip
// netns exec NAME".
func (s *Stage) StartIn(prefix, env []string, argv ...string) *proctest.Child {
	s.t.Helper()
	argv = slices.Concat(prefix, s.private(), argv)
	cmd := exec.Command(argv[0], argv[1:]...)
	cmd.Env = s.environment(env)
	cmd.Dir = Module(s.t)
	cmd.WaitDelay = Patience / 4 // so that its end shows although what it has left holds its output open
	return proctest.Run(s.t, cmd)
}

// private returns a prefix that gives a process, if possible, a /dev/shm of the stage alone, so
// that other programs of this machine do not interfere.
func (s *Stage) private() []string {
	if !Root() {
		return nil
	}
	if _, err := exec.LookPath("unshare"); err != nil {
		return nil
	}
	return []string{"unshare", "-m", "sh", "-c", `mount --bind "$0" /dev/shm && exec "$@"`, filepath.Join(s.dir, "shm")}
}

func (s *Stage) shm() string {
	if s.private() == nil {
		return "/dev/shm"
	}
	return filepath.Join(s.dir, "shm")
}

// Run starts "tutti run" with these flags; the program is this test binary.
func (s *Stage) Run(env []string, flags ...string) *proctest.Child {
	s.t.Helper()
	return s.Start(env, slices.Concat([]string{Tutti(s.t), "run"}, flags, []string{"--", proctest.Self()})...)
}

// Rank is the test's connection to a rank's process.
type Rank struct {
	Number int // of a process on standby: -1 for the first, -2 for the second, …
	PID    int
	stage  *Stage
	t      *testing.T
	conn   net.Conn
	in     *json.Decoder
}

// Arrive waits for the ranks 0..n-1 of one job.
func (s *Stage) Arrive(n int) []*Rank {
	s.t.Helper()
	all := make([]*Rank, n)
	for range n {
		r := s.Next()
		if r.Number < 0 || r.Number >= n || all[r.Number] != nil {
			s.t.Fatalf("rank %d of %d came, unexpected", r.Number, n)
		}
		all[r.Number] = r
	}
	return all
}

// Next waits for any rank.
func (s *Stage) Next() *Rank {
	s.t.Helper()
	deadline := time.Now().Add(Patience)
	s.l.SetDeadline(deadline)
	conn, err := s.l.Accept()
	if err != nil {
		s.t.Fatalf("no rank comes: %v", err)
	}
	s.t.Cleanup(func() { conn.Close() })
	conn.SetDeadline(deadline)
	r := &Rank{stage: s, t: s.t, conn: conn, in: json.NewDecoder(bufio.NewReader(conn))}
	var h hello
	if err := r.in.Decode(&h); err != nil {
		s.t.Fatalf("a rank's first words: %v", err)
	}
	r.PID = h.PID
	if h.Rank != "" {
		r.Number, err = strconv.Atoi(h.Rank)
	} else if r.Number, err = strconv.Atoi(h.Standby); err == nil {
		r.Number = -1 - r.Number
	}
	if err != nil {
		s.t.Fatalf("a rank says RANK=%q and TUTTI_STANDBY=%q", h.Rank, h.Standby)
	}
	s.ranks = append(s.ranks, r)
	return r
}

// Tell sends the rank a command.
func (r *Rank) Tell(c Command) {
	r.t.Helper()
	if err := r.tell(c); err != nil {
		r.t.Fatalf("rank %d (pid %d): %s: %v", r.Number, r.PID, c.Verb, err)
	}
}

func (r *Rank) tell(c Command) error {
	r.conn.SetDeadline(time.Now().Add(Patience))
	return json.NewEncoder(r.conn).Encode(c)
}

// Hear waits for the rank's answer.
func (r *Rank) Hear() Reply {
	r.t.Helper()
	return hear([]*Rank{r})[0]
}

// hear waits for the answers of all ranks.
func hear(ranks []*Rank) []Reply {
	all, errs := make([]Reply, len(ranks)), make([]error, len(ranks))
	var wg sync.WaitGroup
	deadline := time.Now().Add(Patience)
	for i, r := range ranks {
		r.conn.SetDeadline(deadline)
		wg.Go(func() { errs[i] = r.in.Decode(&all[i]) })
	}
	wg.Wait()
	late := false
	for i, r := range ranks {
		r.t.Helper()
		if errs[i] != nil {
			r.t.Errorf("rank %d (pid %d) does not answer: %v", r.Number, r.PID, errs[i])
			late = late || errors.Is(errs[i], os.ErrDeadlineExceeded)
		} else if all[i].Fault != nil && errors.Join(errs...) != nil {
			r.t.Errorf("rank %d answers: %v", r.Number, all[i].Fault)
		}
	}
	if late { // they print their stacks
		r := ranks[0]
		for _, o := range r.stage.ranks {
			syscall.Kill(o.PID, syscall.SIGQUIT)
		}
		for _, o := range r.stage.ranks {
			o.conn.SetDeadline(time.Now().Add(5 * time.Second))
			io.Copy(io.Discard, o.conn)
		}
	}
	if errors.Join(errs...) != nil {
		ranks[0].t.FailNow()
	}
	return all
}

// Do is Tell and Hear.
func (r *Rank) Do(c Command) Reply {
	r.t.Helper()
	r.Tell(c)
	return r.Hear()
}

// Signal sends a signal to the rank's process.
func (r *Rank) Signal(sig syscall.Signal) {
	r.t.Helper()
	if err := syscall.Kill(r.PID, sig); err != nil {
		r.t.Fatalf("rank %d: %v", r.Number, err)
	}
}

// Play hands the connection with the rank over: to the caller here, and to the Part of its Main
// there.
func (r *Rank) Play() (conn net.Conn, in *json.Decoder) {
	r.t.Helper()
	r.Tell(Command{Verb: "play"})
	r.conn.SetDeadline(time.Time{})
	return r.conn, r.in
}

// Gone waits until the rank's process has ended.
func (r *Rank) Gone() {
	r.t.Helper()
	r.conn.SetDeadline(time.Now().Add(Patience))
	if _, err := io.Copy(io.Discard, io.MultiReader(r.in.Buffered(), r.conn)); errors.Is(err, os.ErrDeadlineExceeded) {
		r.t.Fatalf("rank %d (pid %d) does not end", r.Number, r.PID)
	}
}

// Each sends all ranks the same command, and then receives all answers.
func Each(ranks []*Rank, c Command) []Reply {
	for _, r := range ranks {
		r.t.Helper()
		r.Tell(c)
	}
	return hear(ranks)
}

// Well is Each, and fails the test unless every rank answers without a fault.
func Well(ranks []*Rank, c Command) []Reply {
	all := Each(ranks, c)
	for i, a := range all {
		ranks[i].t.Helper()
		if a.Fault != nil {
			ranks[i].t.Errorf("rank %d: %s: %v", ranks[i].Number, c.Verb, a.Fault)
		}
	}
	if len(ranks) > 0 && ranks[0].t.Failed() {
		ranks[0].t.FailNow()
	}
	return all
}

// Leave closes the groups and ends the ranks without faults.
func Leave(ranks []*Rank) {
	Well(ranks, Command{Verb: "close"})
	Exit(ranks, 0)
}

// Exit ends the ranks with an exit code. It may be sent to a part of the ranks: when one fails, the
// launcher ends the others.
func Exit(ranks []*Rank, code int) {
	for _, r := range ranks {
		r.t.Helper()
		if err := r.tell(Command{Verb: "exit", Code: code}); err != nil && code == 0 {
			r.t.Fatalf("rank %d (pid %d): exit: %v", r.Number, r.PID, err)
		}
	}
}

// Eventually polls a condition until it holds; what describes the failure.
func Eventually(t *testing.T, holds func() bool, what func() string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), Patience)
	defer cancel()
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for !holds() {
		select {
		case <-tick.C:
		case <-ctx.Done():
			t.Error(what())
			return
		}
	}
}
