package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"tutti/bootstrap"
	"tutti/cmd/tutti/internal/cluster"
	"tutti/cmd/tutti/internal/launch"
	"tutti/endpoint"
	"tutti/internal/proctest"
	"tutti/pg"
)

// The test binary plays all parts: the test, tutti itself, the guard, and the ranks, which are
// puppets: they connect to a socket of the test and do what it says.
const (
	asTutti  = "CLI_TEST_TUTTI"
	asRanks  = "CLI_TEST_RANKS"  // the ranks that tutti starts are tutti too
	asPuppet = "CLI_TEST_PUPPET" // the path of the test's socket
)

func TestMain(m *testing.M) {
	if code, is := cluster.MemberMain(); is {
		os.Exit(code)
	}
	switch {
	case launch.IsGuard():
		os.Exit(launch.GuardMain())
	case os.Getenv(asTutti) != "":
		os.Unsetenv(asTutti)
		os.Exit(execute(os.Args[1:]))
	case os.Getenv(asRanks) != "":
		os.Exit(execute(os.Args[1:]))
	case os.Getenv(asPuppet) != "":
		os.Exit(puppetMain(os.Getenv(asPuppet)))
	}
	os.Exit(m.Run())
}

// patience bounds every wait of these tests.
const patience = proctest.Patience

// hello is the first thing that a puppet says.
type hello struct {
	PID, PGID int
	Env       map[string]string
	Args      []string
}

func puppetMain(path string) int {
	c, err := net.Dial("unix", path)
	if err != nil {
		fmt.Fprintln(os.Stderr, "puppet:", err)
		return 99
	}
	env := map[string]string{}
	for _, kv := range os.Environ() {
		k, v, _ := strings.Cut(kv, "=")
		env[k] = v
	}
	pgid, _ := unix.Getpgid(0)
	text, _ := json.Marshal(hello{os.Getpid(), pgid, env, os.Args[1:]})
	fmt.Fprintf(c, "%s\n", text)
	in := bufio.NewScanner(c)
	in.Buffer(nil, 1<<20)
	var g, first *pg.Group
	for in.Scan() {
		verb, arg, _ := strings.Cut(in.Text(), " ")
		n, _ := strconv.Atoi(arg)
		switch verb {
		case "exit":
			return n
		case "kill":
			syscall.Kill(os.Getpid(), syscall.Signal(n))
			select {}
		case "ignore":
			signal.Ignore(syscall.Signal(n))
		case "catch":
			got := make(chan os.Signal, 1)
			signal.Notify(got, syscall.Signal(n))
			go func() {
				for range got {
					fmt.Fprintln(c, "caught")
				}
			}()
		case "print", "printerr":
			s, err := strconv.Unquote(arg)
			if err != nil {
				return 98
			}
			w := os.Stdout
			if verb == "printerr" {
				w = os.Stderr
			}
			if _, err := io.WriteString(w, s); err != nil {
				return 97
			}
		case "read":
			b, err := io.ReadAll(os.Stdin)
			fmt.Fprintf(c, "%q %v\n", b, err)
			continue
		case "endpoint": // in the process of a rank
			ec, err := endpoint.NewContext(endpoint.ContextConfig{})
			if err == nil {
				_, err = endpoint.New(ec, endpoint.Config{Name: arg, Secret: env["TUTTI_SECRET"],
					Interfaces: "127.0.0.1"})
			}
			fmt.Fprintln(c, err)
			continue
		case "join", "allreduce", "barrier", "replace", "close", "beside", "back": // as a rank
			err := error(nil)
			switch ctx := context.Background(); verb {
			case "join":
				g, err = pg.Join(ctx, pg.Config{})
			case "allreduce":
				err = pg.AllReduce(ctx, g, make([]float32, n), pg.Sum)
			case "barrier":
				err = g.Barrier(ctx)
			case "replace": // works until a rank is lost, and until another has come in its stead
				// A loss that is noticed between two operations is no error of the second one.
				for err == nil && len(g.View().Active) == g.Size() {
					err = g.Barrier(ctx)
				}
				for lost := (*pg.RankError)(nil); errors.As(err, &lost); {
					err = g.Barrier(ctx)
				}
				for err == nil && len(g.View().Active) < g.Size() {
					_, err = g.Admit(ctx)
				}
			case "close":
				err = g.Close()
			case "beside": // until back, in a job of all ranks but the first
				first = g
				g, err = pg.Join(ctx, pg.Config{Job: "pair", Size: g.Size() - 1, Rank: g.Rank() - 1})
			case "back":
				err = g.Close()
				g = first
			}
			if err != nil {
				fmt.Fprintf(c, "%q\n", err)
				continue
			}
		case "spawn", "fork": // a grandchild, out of reach of the process group or in it
			cmd := exec.Command(proctest.Self())
			cmd.Stdout, cmd.Stderr = os.Stdout, os.Stderr
			cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: verb == "spawn"}
			if err := cmd.Start(); err != nil {
				return 96
			}
		}
		fmt.Fprintln(c, "ok")
	}
	select {} // the test is over; the launcher must end this
}

// puppet is the test's end of one.
type puppet struct {
	hello
	t    *testing.T
	conn net.Conn
	in   *bufio.Reader
}

func (p *puppet) rank() string { return p.Env["RANK"] }

func (p *puppet) tell(format string, args ...any) {
	p.t.Helper()
	p.conn.SetDeadline(time.Now().Add(patience))
	if _, err := fmt.Fprintf(p.conn, format+"\n", args...); err != nil {
		p.t.Fatalf("rank %s: %v", p.rank(), err)
	}
}

func (p *puppet) hear() string {
	p.t.Helper()
	p.conn.SetDeadline(time.Now().Add(patience))
	s, err := p.in.ReadString('\n')
	if err != nil {
		p.t.Fatalf("rank %s: %v", p.rank(), err)
	}
	return strings.TrimSuffix(s, "\n")
}

// do tells and waits for the answer.
func (p *puppet) do(format string, args ...any) {
	p.t.Helper()
	p.tell(format, args...)
	if got := p.hear(); got != "ok" {
		p.t.Fatalf("rank %s answered %q", p.rank(), got)
	}
}

// gone waits until the process is dead: its socket closes.
func (p *puppet) gone() {
	p.t.Helper()
	p.conn.SetDeadline(time.Now().Add(patience))
	_, err := io.Copy(io.Discard, p.in)
	if errors.Is(err, os.ErrDeadlineExceeded) {
		p.t.Fatalf("rank %s (pid %d) is still alive", p.rank(), p.PID)
	}
}

// noticed waits until tutti run knows that the process is dead: it has reaped it.
func (p *puppet) noticed() {
	p.t.Helper()
	p.gone()
	gone := func() bool { return errors.Is(syscall.Kill(p.PID, 0), syscall.ESRCH) }
	for end := time.Now().Add(patience); !gone(); time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			p.t.Fatalf("tutti run has not noticed the end of rank %s (pid %d)", p.rank(), p.PID)
		}
	}
}

// stage is where puppets arrive.
type stage struct {
	t    *testing.T
	l    net.Listener
	tmp  string // TMPDIR of what is started here
	path string
}

func newStage(t *testing.T) *stage {
	t.Helper()
	dir, err := os.MkdirTemp("", "tc") // short: socket paths are
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	s := &stage{t: t, path: filepath.Join(dir, "s"), tmp: filepath.Join(dir, "tmp")}
	if err := os.Mkdir(s.tmp, 0o700); err != nil {
		t.Fatal(err)
	}
	if s.l, err = net.Listen("unix", s.path); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.l.Close() })
	return s
}

// arrive waits for n puppets and returns them by rank.
func (s *stage) arrive(n int) []*puppet {
	s.t.Helper()
	all := make([]*puppet, n)
	for range n {
		p := s.next()
		r, err := strconv.Atoi(p.rank())
		if err != nil || r >= n || all[r] != nil {
			s.t.Fatalf("a puppet with rank %q of %d came", p.rank(), n)
		}
		all[r] = p
	}
	return all
}

func (s *stage) next() *puppet {
	s.t.Helper()
	s.l.(*net.UnixListener).SetDeadline(time.Now().Add(patience))
	c, err := s.l.Accept()
	if err != nil {
		s.t.Fatal(err)
	}
	s.t.Cleanup(func() { c.Close() })
	p := &puppet{t: s.t, conn: c, in: bufio.NewReader(c)}
	if err := json.Unmarshal([]byte(p.hear()), &p.hello); err != nil {
		s.t.Fatal(err)
	}
	return p
}

// empty says whether nothing is left in the temporary directory.
func (s *stage) empty() {
	s.t.Helper()
	entries, err := os.ReadDir(s.tmp)
	if err != nil || len(entries) > 0 {
		s.t.Errorf("left in TMPDIR: %v %v", entries, err)
	}
}

// tutti is a process of tutti, once it is started.
type tutti struct {
	*proctest.Child
	t   *testing.T
	cmd *exec.Cmd
}

// command prepares tutti with these arguments; its programs are puppets of this stage if they are
// this binary.
func (s *stage) command(args ...string) *tutti {
	t := &tutti{t: s.t}
	t.cmd = exec.Command(proctest.Self(), args...)
	for _, kv := range os.Environ() {
		if !strings.HasPrefix(kv, "TUTTI_") {
			t.cmd.Env = append(t.cmd.Env, kv)
		}
	}
	// With the race detector every process sleeps for a second before it ends, unless told not to.
	t.cmd.Env = append(t.cmd.Env, asTutti+"=1", asPuppet+"="+s.path, "TMPDIR="+s.tmp,
		"GORACE="+os.Getenv("GORACE")+" atexit_sleep_ms=0")
	return t
}

func (t *tutti) start() *tutti {
	t.t.Helper()
	t.Child = proctest.Run(t.t, t.cmd)
	return t
}

// run starts tutti.
func (s *stage) run(args ...string) *tutti { s.t.Helper(); return s.command(args...).start() }

// says checks what tutti printed on standard error.
func (t *tutti) says(text string) {
	t.t.Helper()
	if got := t.Err.String(); !strings.Contains(got, text) {
		t.t.Errorf("stderr is %q; want %q in it", got, text)
	}
}

// watch returns a function that waits for the end of process pid, which may be any process's child.
func watch(t *testing.T, pid int) func() {
	t.Helper()
	fd, err := unix.PidfdOpen(pid, 0)
	if err != nil {
		t.Fatalf("pid %d: %v", pid, err)
	}
	return func() {
		t.Helper()
		defer unix.Close(fd)
		for {
			n, err := unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, int(patience.Milliseconds()))
			switch {
			case errors.Is(err, unix.EINTR):
				continue
			case err != nil || n == 0:
				t.Errorf("process %d does not end (%v)", pid, err)
			}
			return
		}
	}
}

// parent returns the parent of process pid: of a rank, the guard.
func parent(t *testing.T, pid int) int {
	t.Helper()
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		t.Fatal(err)
	}
	f := strings.Fields(string(stat[bytes.LastIndexByte(stat, ')')+1:]))
	n, err := strconv.Atoi(f[1])
	if err != nil {
		t.Fatal(err)
	}
	return n
}

// refused checks that a job's store does not listen any more. Its port may be another program's by
// now, which does not know the job's secret.
func refused(t *testing.T, env map[string]string) {
	t.Helper()
	l, err := bootstrap.FromEnv(func(name string) string { return env[name] })
	if err != nil {
		t.Fatal(err)
	}
	_, hostport, _ := strings.Cut(l.Store, "://")
	c, err := net.DialTimeout("tcp", hostport, patience)
	if errors.Is(err, syscall.ECONNREFUSED) {
		return
	} else if err != nil {
		t.Errorf("dial %s: %v; want it refused", l.Store, err)
		return
	}
	c.Close()
	h, err := bootstrap.DialStore(t.Context(), bootstrap.StoreConfig{Address: l.Store, Job: l.Job, Secret: l.Secret,
		DialTimeout: patience / 4})
	switch {
	case err == nil:
		h.Close()
		t.Errorf("the store at %s is still there", l.Store)
	case errors.Is(err, context.DeadlineExceeded):
		t.Errorf("what listens at %s does not answer: %v", l.Store, err)
	}
}
