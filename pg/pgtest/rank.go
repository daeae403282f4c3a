package pgtest

import (
	"context"
	"errors"
	"flag"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"tutti/pg"
)

// markVariable marks a process as a rank of Run: "call/TestName", with the call's number in that
// test.
const markVariable = "TUTTI_PGTEST_CALL"

// self is not nil in a process that is a rank of Run.
var self *rankProcess

type rankProcess struct {
	test    string // the test that it was started for
	call    int    // which call of Run in it
	verdict *os.File
	running atomic.Bool
	t       *testing.T // of Run, while running
}

// Contents of a rank's verdict file: the first when it calls its function, then one of the others
// when that has returned, or Kill ends it after a failure.
const (
	verdictRunning = "running"
	verdictPassed  = verdictRunning + " passed"
	verdictSkipped = verdictRunning + " skipped"
	verdictFailed  = verdictRunning + " failed"
	verdictFd      = 3
)

func init() {
	if secret, ok := os.LookupEnv(storeVariable); ok {
		serveStore(secret) // does not return
	}
	mark, ok := os.LookupEnv(markVariable)
	if !ok {
		return
	}
	os.Unsetenv(markVariable) // child processes are not this rank
	call, test, _ := strings.Cut(mark, "/")
	n, err := strconv.Atoi(call)
	if err != nil || n < 1 || test == "" {
		os.Stderr.WriteString("pgtest: " + markVariable + "=" + mark + ", want a number, a slash and a test\n")
		os.Exit(2)
	}
	closeOnExec(verdictFd)
	self = &rankProcess{test: test, call: n, verdict: os.NewFile(verdictFd, "verdict")}
}

// run implements Run in a rank's process.
func (p *rankProcess) run(t *testing.T, call int, fn func(t *testing.T, g *pg.Group), o *options) {
	t.Helper()
	if p.running.Load() {
		t.Fatal("pgtest: Run is called in a rank of Run")
	}
	if t.Name() != p.test || call != p.call {
		return
	}
	p.t = t
	p.running.Store(true)
	io.WriteString(p.verdict, verdictRunning)
	verdict := verdictFailed
	defer func() {
		if verdict == verdictFailed && t.Skipped() && !t.Failed() {
			verdict = verdictSkipped
		}
		io.WriteString(p.verdict, strings.TrimPrefix(verdict, verdictRunning))
		p.verdict.Close()
	}()
	ctx := t.Context()
	if d, ok := t.Deadline(); ok {
		var cancel context.CancelFunc
		ctx, cancel = context.WithDeadline(ctx, d)
		defer cancel()
	}
	if o.config.Dialer == nil {
		o.config.Dialer = Dialer()
	}
	g, err := pg.Join(ctx, o.config)
	if err != nil {
		t.Fatalf("join: %v", err)
	}
	closed := false
	defer func() {
		if !closed {
			g.Close()
		}
	}()
	fn(t, g)
	closed = true
	if err := g.Close(); err != nil && !errors.Is(err, pg.ErrClosed) && len(o.expect) == 0 {
		t.Errorf("close: %v", err)
	}
	if !t.Failed() {
		verdict = verdictPassed
	}
	t.SkipNow() // the rest of the test is for the test's own process; a failed test stays failed
}

// testPattern matches exactly one test in -test.run, which takes one expression for each level.
func testPattern(name string) string {
	levels := strings.Split(name, "/")
	for i, l := range levels {
		levels[i] = "^" + regexp.QuoteMeta(l) + "$"
	}
	return strings.Join(levels, "/")
}

// testFlags returns the testing package's flags for a rank: this test only, once, with its time
// limit, and the flags that change the tests themselves. Flags that name files, which each rank
// would write, or other tests are left out.
func testFlags(t *testing.T, limit time.Duration, coverDirectory string) []string {
	// A rank's deadline is visible to the test (t.Deadline). It starts later than this process's
	// and so ends the rank only if this process cannot.
	flags := []string{"-test.run=" + testPattern(t.Name()), "-test.count=1", "-test.v=true",
		"-test.timeout=" + max(limit, time.Second).String(),
		"-test.cpu=" + numCPU()}
	for _, name := range []string{"test.short", "test.paniconexit0", "test.fullpath", "test.parallel"} {
		if f := flag.Lookup(name); f != nil && f.Value.String() != f.DefValue {
			flags = append(flags, "-"+name+"="+f.Value.String())
		}
	}
	if coverDirectory != "" {
		flags = append(flags, "-test.gocoverdir="+coverDirectory)
	}
	return flags
}

// otherArguments returns args without the testing package's flags.
func otherArguments(args []string) (kept []string) {
	for i := 0; i < len(args); i++ {
		name := strings.TrimLeft(args[i], "-")
		if dashes := len(args[i]) - len(name); dashes < 1 || dashes > 2 || name == "" {
			return append(kept, args[i:]...) // flags end here
		}
		name, _, hasValue := strings.Cut(name, "=")
		width := 1
		if f := flag.Lookup(name); f != nil && !hasValue {
			if b, ok := f.Value.(interface{ IsBoolFlag() bool }); !ok || !b.IsBoolFlag() {
				width = 2
			}
		}
		end := min(i+width, len(args))
		if !strings.HasPrefix(name, "test.") {
			kept = append(kept, args[i:end]...)
		}
		i = end - 1
	}
	return kept
}

// coverage gathers the ranks' coverage. Each process has its own directory, below the one that the
// test binary reads when it writes its profile: two processes in one directory could read each
// other's half-written files.
type coverage struct{ into, below string }

func newCoverage(t *testing.T) *coverage {
	t.Helper()
	f := flag.Lookup("test.gocoverdir")
	if testing.CoverMode() == "" || f == nil || f.Value.String() == "" {
		return &coverage{}
	}
	into, err := filepath.Abs(filepath.Join(startDirectory, f.Value.String()))
	if filepath.IsAbs(f.Value.String()) {
		into, err = f.Value.String(), nil
	}
	var below string
	if err == nil {
		below, err = os.MkdirTemp(into, "ranks")
	}
	if err != nil {
		t.Fatalf("pgtest: coverage of the ranks: %v", err)
	}
	return &coverage{into, below}
}

func (c *coverage) directory(t *testing.T, rank int) string {
	t.Helper()
	if c.below == "" {
		return ""
	}
	d, err := os.MkdirTemp(c.below, strconv.Itoa(rank)) // a rank can have two processes
	if err != nil {
		t.Fatalf("pgtest: coverage of rank %d: %v", rank, err)
	}
	return d
}

// collect moves the counters to where the test binary reads them. Their names contain the process's
// number and the time.
func (c *coverage) collect(t *testing.T) {
	if c.below == "" {
		return
	}
	files, _ := filepath.Glob(filepath.Join(c.below, "*", "cov*"))
	for _, f := range files {
		if err := os.Rename(f, filepath.Join(c.into, filepath.Base(f))); err != nil {
			t.Errorf("pgtest: coverage of the ranks: %v", err)
		}
	}
	os.RemoveAll(c.below)
}
