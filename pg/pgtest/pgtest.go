// Package pgtest runs the ranks of a process group inside `go test`: real processes, each with its
// own memory, that can really die.
//
//	func TestSum(t *testing.T) {
//		pgtest.Run(t, 4, func(t *testing.T, g *pg.Group) {
//			x := []float32{float32(g.Rank())}
//			if err := pg.AllReduce(t.Context(), g, x, pg.Sum); err != nil || x[0] != 6 {
//				t.Fatalf("sum is %g, %v", x[0], err)
//			}
//		})
//	}
//
// Run starts the test binary n times more, with -test.run set to exactly the test that called it.
// Each of these processes, when it comes to the same call, joins the group and calls the function.
// So the code of the test before Run runs in every rank too (t.Chdir, t.Setenv, tables of subtests
// and TestMain have their effect there). The code after it runs only in the test's own process,
// which has no rank. The function must not depend on what earlier calls of Run in the same test
// left in memory: in a rank of a later call they do nothing.
//
// The output of a rank is the test's output, each line marked with the rank. A rank that fails,
// panics, dies of a signal or exceeds the time limit fails the test, and the other ranks are ended
// in bounded time: first asked for their stacks (SIGQUIT), then killed. No process survives the
// test: every rank has its own process group, which is killed with it, and dies with the test's
// process. The ranks' directory for temporary files (os.TempDir) is removed after them.
//
// The ranks meet in a store, which is one more process of the test binary: the first Run starts it,
// all others share it, and it ends with the test binary. Programs that link only package pg do not
// link that store.
package pgtest

import (
	"fmt"
	"io"
	"maps"
	"os"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"tutti/pg"
)

// DefaultTimeout bounds a Run, RunLocal or Exec without the option Timeout. The test's own deadline
// (go test -timeout) bounds it as well, some seconds earlier than it would end the test binary.
const DefaultTimeout = 2 * time.Minute

// grace is how long the ranks may continue after the first has failed: enough to notice that
// through the store, and to report it.
const grace = 10 * time.Second

// Option changes how ranks are run.
type Option func(*options)

type options struct {
	config    pg.Config
	transport string
	env       []string
	timeout   time.Duration
	expect    map[int]syscall.Signal
	replace   map[int]bool
	extend    int
	faults    bool
	inject    func(c *Control)
}

// Config sets the Config of Join, or Local. Size, Rank, Job, Store and Secret are set by pgtest.
// Exec does not support it.
func Config(c pg.Config) Option {
	return func(o *options) { o.config = c }
}

// Transport selects the transports, like the field of pg.Config.
func Transport(name string) Option {
	return func(o *options) { o.transport = name }
}

// Env adds variables, "NAME=value", to the environment of every rank's process. RunLocal does not
// support it.
func Env(variables ...string) Option {
	return func(o *options) { o.env = append(o.env, variables...) }
}

// Timeout bounds the time from the start of the ranks to their end.
func Timeout(d time.Duration) Option {
	return func(o *options) { o.timeout = d }
}

// Expect says that a rank dies of a signal: the test fails if it does not, and the other ranks have
// to pass. It also fails if the rank has failed before its death and its function has ended, or has
// called Kill. RunLocal does not support it.
func Expect(rank int, s syscall.Signal) Option {
	return func(o *options) { o.expect[rank] = s }
}

// Replace says that a rank which dies as expected is started again, once. Its function runs from
// the beginning, with the group that the new process has joined (see Second), and has to pass.
// RunLocal does not support it.
func Replace(rank int) Option {
	return func(o *options) { o.replace[rank] = true }
}

// Extend starts k more ranks, with numbers n and above, which join the running group when its ranks
// admit them. RunLocal does not support it.
func Extend(k int) Option {
	return func(o *options) { o.extend = k }
}

// Second reports whether this process is the second one of its rank: see Replace.
func Second() bool { return os.Getenv(secondVariable) != "" }

const secondVariable = "TUTTI_PGTEST_SECOND"

func collect(t *testing.T, n int, opts []Option) *options {
	t.Helper()
	o := &options{timeout: DefaultTimeout, expect: map[int]syscall.Signal{}, replace: map[int]bool{}}
	for _, f := range opts {
		f(o)
	}
	if n < 1 || n > pg.MaxRanks {
		t.Fatalf("pgtest: %d ranks, want 1..%d", n, pg.MaxRanks)
	}
	for r := range o.expect {
		if r < 0 || r >= n {
			t.Fatalf("pgtest: Expect for rank %d of %d", r, n)
		}
	}
	for r := range o.replace {
		if _, ok := o.expect[r]; !ok {
			t.Fatalf("pgtest: Replace for rank %d, which Expect does not say is to die", r)
		}
	}
	if o.extend > 0 {
		o.config.MaxSize = max(o.config.MaxSize, n+o.extend)
	}
	for _, v := range o.env {
		if i := strings.IndexByte(v, '='); i < 1 {
			t.Fatalf("pgtest: Env %q, want NAME=value", v)
		}
	}
	c := &o.config
	c.Size, c.Rank, c.Job, c.StoreAddr, c.Secret = 0, 0, "", "", nil
	return o
}

// limit is the time for the ranks: the timeout, but early enough before the test's deadline to
// report.
func (o *options) limit(t *testing.T) time.Duration {
	limit := o.timeout
	if d, ok := t.Deadline(); ok {
		left := time.Until(d)
		limit = min(limit, left-min(max(left/10, time.Second), 10*time.Second))
	}
	return max(limit, 0)
}

// Run calls fn in n processes, each a rank of one group, and returns when all have ended. It fails
// the test immediately unless every rank passed: see the package's comment. If some ranks skipped
// and none failed, the test is skipped. fn's t is the rank's own copy of t. All its methods work,
// and so do subtests, except parallel ones, which would run after fn. The group is closed when fn
// returns.
func Run(t *testing.T, n int, fn func(t *testing.T, g *pg.Group), opts ...Option) {
	t.Helper()
	o := collect(t, n, opts)
	call := nextCall(t)
	if self != nil {
		self.run(t, call, fn, o)
		return
	}
	address, secret := sharedStore(t)
	limit := o.limit(t)
	coverage := newCoverage(t)
	defer coverage.collect(t)
	l := launch{t: t, n: n + o.extend, o: o, limit: limit, directory: startDirectory,
		environment: environment(n, address, secret, o)}
	if o.extend > 0 {
		l.environment = append(l.environment, fmt.Sprintf("TUTTI_MAX_SIZE=%d", n+o.extend),
			fmt.Sprintf("TUTTI_LOCAL_SIZE=%d", n+o.extend), fmt.Sprintf("LOCAL_WORLD_SIZE=%d", n+o.extend))
	}
	l.environment = append(l.environment, markVariable+"="+strconv.Itoa(call)+"/"+t.Name())
	l.argv = func(rank int) []string {
		return append(append([]string{executable(t)}, testFlags(t, limit, coverage.directory(t, rank))...),
			otherArguments(os.Args[1:])...)
	}
	l.check = func(p *process) string {
		switch p.verdict {
		case verdictPassed, verdictSkipped:
			return ""
		case "":
			return "ended without coming to this call of pgtest.Run: is it made in every run of the test, in the " +
				"same order?"
		}
		return "ended with status 0 before its function returned"
	}
	ranks := l.run()
	var skipped []string
	for _, p := range ranks {
		if p.verdict == verdictSkipped {
			skipped = append(skipped, strconv.Itoa(p.rank))
		}
	}
	if skipped != nil {
		t.Skipf("skipped by rank %s of %d", strings.Join(skipped, ", "), n)
	}
}

// Exec runs a program, argv[0] with its arguments, as the n ranks of one group and returns the
// standard output of each, when all have ended. It fails the test immediately unless every rank
// ended with status 0. In a rank of Run it does nothing and returns n empty strings.
func Exec(t *testing.T, n int, argv []string, opts ...Option) []string {
	t.Helper()
	o := collect(t, n, opts)
	if self != nil {
		return make([]string, n)
	}
	address, secret := sharedStore(t)
	l := launch{t: t, n: n, o: o, limit: o.limit(t), environment: environment(n, address, secret, o), keepOutput: true}
	l.argv = func(int) []string { return argv }
	l.check = func(*process) string { return "" }
	out := make([]string, n)
	for i, p := range l.run() {
		out[i] = p.output.String()
	}
	return out
}

// RunLocal calls fn for n ranks of one group inside this process, each in its own goroutine and
// subtest ("rank 2"). Unlike a process, a rank that hangs outside of the group's operations cannot
// be ended: on timeout all groups are closed, which ends every operation.
func RunLocal(t *testing.T, n int, fn func(t *testing.T, g *pg.Group), opts ...Option) {
	t.Helper()
	o := collect(t, n, opts)
	if o.env != nil || len(o.expect) > 0 || o.extend > 0 || o.faults {
		t.Fatal("pgtest: RunLocal has no processes for the options Env, Expect, Extend and Faults")
	}
	if self != nil {
		return
	}
	if o.transport != "" {
		o.config.Transport = o.transport
	}
	groups, err := pg.Local(n, o.config)
	if err != nil {
		t.Fatalf("pgtest: %d local ranks: %v", n, err)
	}
	limit := o.limit(t)
	late := make(chan struct{})
	timer := time.AfterFunc(limit, func() {
		defer close(late)
		for _, g := range groups {
			g.Close()
		}
	})
	var wg sync.WaitGroup
	for r, g := range groups {
		wg.Go(func() {
			t.Run(fmt.Sprintf("rank %d", r), func(t *testing.T) {
				defer g.Close()
				fn(t, g)
			})
		})
	}
	wg.Wait()
	if !timer.Stop() {
		<-late
		t.Fatalf("pgtest: ranks were still running after %v: their groups were closed", limit)
	}
}

// Kill ends this rank, a process of Run, as `kill -9` does: without deferred calls, cleanup, or a
// message to the peers. Give Run the option Expect(rank, syscall.SIGKILL). It does not return.
func Kill(t *testing.T) {
	t.Helper()
	if self == nil || !self.running.Load() {
		t.Fatal("pgtest: Kill is for the ranks of Run")
	}
	if self.t.Failed() { // or one of its subtests
		io.WriteString(self.verdict, strings.TrimPrefix(verdictFailed, verdictRunning))
	}
	p, err := os.FindProcess(os.Getpid())
	if err == nil {
		err = p.Kill()
	}
	if err != nil {
		t.Fatalf("pgtest: Kill: %v", err)
	}
	select {} // the signal may take its time
}

// calls counts the calls of Run by test, so that a rank finds its own.
var calls = struct {
	sync.Mutex
	of map[*testing.T]int
}{of: map[*testing.T]int{}}

func nextCall(t *testing.T) int {
	calls.Lock()
	defer calls.Unlock()
	if calls.of[t]++; calls.of[t] == 1 {
		t.Cleanup(func() {
			calls.Lock()
			defer calls.Unlock()
			delete(calls.of, t)
		})
	}
	return calls.of[t]
}

// environment returns the variables of all ranks: this process's without those of other launchers,
// and this job's.
func environment(n int, address, secret string, o *options) []string {
	drop := map[string]bool{}
	for _, name := range strings.Fields(`RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT
		TUTTI_RANK TUTTI_SIZE TUTTI_LOCAL_RANK TUTTI_LOCAL_SIZE TUTTI_JOB TUTTI_STORE TUTTI_STORE_USER
		TUTTI_STORE_PASSWORD TUTTI_STORE_CA TUTTI_STORE_CERT TUTTI_STORE_KEY TUTTI_SECRET TUTTI_SECRET_FILE
		TUTTI_PORT PGTEST_RELAY`) {
		drop[name] = true
	}
	env := slices.DeleteFunc(os.Environ(), func(v string) bool {
		name, _, _ := strings.Cut(v, "=")
		return drop[name]
	})
	size := strconv.Itoa(n)
	own := map[string]string{"TUTTI_SIZE": size, "TUTTI_LOCAL_SIZE": size, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size,
		"TUTTI_STORE": address, "TUTTI_SECRET": secret, "TUTTI_JOB": newJob()}
	if o.transport != "" {
		own["TUTTI_TRANSPORT"] = o.transport
	}
	for _, name := range slices.Sorted(maps.Keys(own)) {
		env = append(env, name+"="+own[name])
	}
	return append(env, o.env...)
}

// rankEnvironment returns the variables of one rank.
func rankEnvironment(rank int) []string {
	r := strconv.Itoa(rank)
	return []string{"TUTTI_RANK=" + r, "TUTTI_LOCAL_RANK=" + r, "RANK=" + r, "LOCAL_RANK=" + r}
}

func executable(t *testing.T) string {
	t.Helper()
	path, err := os.Executable()
	if err != nil {
		t.Fatalf("pgtest: cannot find the test binary: %v", err)
	}
	return path
}

// startDirectory is the directory in which the test binary was started; t.Chdir does not change it.
var startDirectory, _ = os.Getwd()

// numCPU returns the value of -test.cpu for the running test.
func numCPU() string { return strconv.Itoa(runtime.GOMAXPROCS(0)) }
