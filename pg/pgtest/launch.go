package pgtest

import (
	"bytes"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"tutti/internal/proctest"
)

// launch runs n processes and watches them.
type launch struct {
	t           *testing.T
	n           int
	o           *options
	limit       time.Duration
	directory   string
	environment []string
	keepOutput  bool                    // of standard output
	argv        func(rank int) []string // called on the test's goroutine
	check       func(p *process) string // the fault of a process that ended with status 0, "" if none
	scratch     string                  // directory of the ranks' temporary files

	// With the option Faults.
	relay   *relay
	flights string // directory of the ranks' flight records

	mu  sync.Mutex
	now map[int]*process // the last process of each rank
}

// process returns the present process of a rank, nil if there is no such rank.
func (l *launch) process(rank int) *process {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.now[rank]
}

// faulty prepares the injection of faults. inject begins it, when the ranks run; end ends it.
func (l *launch) faulty() (inject, end func()) {
	ctx, cancel := context.WithCancelCause(context.Background())
	l.flights = filepath.Join(l.scratch, "flights")
	err := os.Mkdir(l.flights, 0o700)
	if err == nil {
		l.relay, err = newRelay(ctx, l.execute)
	}
	if err != nil {
		l.t.Fatalf("pgtest: Faults: %v", err)
	}
	l.environment = append(l.environment, "TUTTI_LOG_DIR="+l.flights)
	var injector sync.WaitGroup
	inject = func() {
		if l.o.inject != nil {
			c := &Control{l.t, func(o order) error { return l.execute(ctx, l.relay, o) }}
			injector.Go(func() { l.o.inject(c) })
		}
	}
	return inject, func() {
		cancel(errors.New("the ranks have ended"))
		injector.Wait()
		l.relay.close()
	}
}

// tidy gives the ranks a directory for their temporary files: one that is killed does not remove
// its own. The caller calls remove when they have ended.
func (l *launch) tidy() (remove func()) {
	l.t.Helper()
	var err error
	if l.scratch, err = os.MkdirTemp("", "pgtest"); err != nil { // not t.TempDir: paths of sockets are short
		l.t.Fatalf("pgtest: %v", err)
	}
	if !slices.ContainsFunc(l.o.env, func(v string) bool { return strings.HasPrefix(v, "TMPDIR=") }) {
		l.environment = append(l.environment, "TMPDIR="+l.scratch)
	}
	return func() { os.RemoveAll(l.scratch) }
}

// process is one rank.
type process struct {
	rank    int
	cmd     *exec.Cmd
	writers [2]*lineWriter // of its standard output and error: one and the same unless the output is kept
	output  bytes.Buffer   // kept
	verdict string
	second  bool          // of its rank
	err     error         // of Start or Wait
	done    chan struct{} // closed when all of the above is final

	mu      sync.Mutex
	started *proctest.Process // nil before the start
	ended   string            // why this process ended it, "" if it did not
}

// run starts the ranks and returns when all have ended. It fails the test immediately unless all
// ended as expected.
func (l *launch) run() []*process {
	l.t.Helper()
	l.now = map[int]*process{}
	defer l.tidy()()
	inject := func() {}
	if l.o.faults {
		begin, end := l.faulty()
		defer end()
		inject = begin
	}
	ranks := make([]*process, l.n)
	gone := make(chan *process, 2*l.n)
	for r := range ranks {
		ranks[r] = l.prepare(r)
	}
	begin := func(p *process) {
		l.mu.Lock()
		l.now[p.rank] = p
		l.mu.Unlock()
		go func() {
			p.err = p.live()
			close(p.done)
			gone <- p
		}()
	}
	for _, p := range ranks {
		begin(p)
	}
	inject()
	all := slices.Clone(ranks)
	var failed *process // the first
	began := time.Now()
	timer := time.NewTimer(l.limit)
	defer timer.Stop()
	for left := l.n; left > 0; {
		select {
		case p := <-gone:
			left--
			if failed == nil && l.fault(p) != "" {
				failed = p
				timer.Reset(max(0, min(grace, l.limit-time.Since(began))))
			} else if failed == nil && l.o.replace[p.rank] && !p.second {
				again := l.prepare(p.rank)
				again.second = true
				again.cmd.Env = append(again.cmd.Env, secondVariable+"=1")
				all = append(all, again)
				left++
				begin(again)
			}
		case <-timer.C:
			why := fmt.Sprintf("was still running after %v", time.Since(began).Round(time.Millisecond))
			if failed != nil {
				why = fmt.Sprintf("was still running when rank %d had failed and %v had passed", failed.rank, grace)
			}
			for _, p := range all {
				p.mark(why)
			}
			for i, p := range all {
				patience := stacksTime
				if d, ok := l.t.Deadline(); ok { // a share for each rank, and one for the report
					patience = min(patience, time.Until(d)/time.Duration(len(all)-i+1))
				}
				p.end(patience)
			}
		}
	}
	bad := false
	for _, p := range all {
		if f := l.fault(p); f != "" {
			bad = true
			l.t.Errorf("rank %d %s", p.rank, f)
		}
	}
	if bad {
		l.t.FailNow()
	}
	return ranks
}

// stacksTime bounds the time in which a rank that is ended prints its stacks.
const stacksTime = 5 * time.Second

func (l *launch) prepare(rank int) *process {
	argv := l.argv(rank)
	p := &process{rank: rank, cmd: exec.Command(argv[0], argv[1:]...), done: make(chan struct{})}
	writer := func() *lineWriter {
		return &lineWriter{to: l.t.Output(), prefix: fmt.Sprintf("rank %d| ", rank), framed: !l.keepOutput}
	}
	p.writers[0] = writer()
	p.writers[1] = p.writers[0]
	c := p.cmd
	c.Stdout, c.Stderr = p.writers[0], p.writers[1]
	if l.keepOutput {
		p.writers[1] = writer()
		c.Stdout, c.Stderr = io.MultiWriter(&p.output, p.writers[0]), p.writers[1]
	}
	c.Dir = l.directory
	c.Env = append(l.environment[:len(l.environment):len(l.environment)], rankEnvironment(rank)...)
	if l.relay != nil {
		c.Env = append(c.Env, l.relay.variable(rank))
	}
	// For processes outside of the group that hold the output open. It bounds the copying of the
	// output too, which takes long on a busy machine.
	c.WaitDelay = 30 * time.Second
	return p
}

// live runs a process from its start to its end and that of its group.
func (p *process) live() error {
	reader, writer, err := os.Pipe()
	if err != nil {
		return err
	}
	defer reader.Close()
	p.cmd.ExtraFiles = []*os.File{writer} // verdictFd
	p.mu.Lock()
	if p.ended != "" { // before it began
		err = errors.New("not started")
	} else {
		p.started, err = proctest.StartGroup(p.cmd)
	}
	p.mu.Unlock()
	writer.Close()
	if err != nil {
		return err
	}
	err = p.started.Wait()
	for _, w := range p.writers {
		w.flush()
	}
	p.verdict = written(reader)
	return err
}

// written returns what a pipe holds. It does not wait for more: the rank has ended, though its
// children could hold a copy of its end of the pipe.
func written(pipe *os.File) string {
	b := make([]byte, 64)
	n := 0
	if raw, err := pipe.SyscallConn(); err == nil {
		raw.Control(func(fd uintptr) { n, _ = unix.Read(int(fd), b) }) // it does not block
	}
	return string(b[:max(n, 0)])
}

// mark records why a process is about to be ended.
func (p *process) mark(why string) {
	select {
	case <-p.done:
	default:
		p.mu.Lock()
		p.ended = why
		p.mu.Unlock()
	}
}

// end ends a process that has not ended by itself, and returns when it is gone: it asks for its
// stacks and, after patience, kills it. Processes are ended one after the other, so that their
// stacks do not mix.
func (p *process) end(patience time.Duration) {
	p.signal(syscall.SIGQUIT)
	select {
	case <-p.done:
		return
	case <-time.After(patience):
	}
	p.mu.Lock()
	started := p.started
	p.mu.Unlock()
	if started != nil {
		started.KillTree() // with what holds its output open
	}
	<-p.done
}

// fault describes an unexpected end of a process, "" for an expected one.
func (l *launch) fault(p *process) string {
	state := p.cmd.ProcessState
	if state == nil && p.ended == "" {
		return fmt.Sprintf("could not be started: %v", p.err)
	}
	if p.ended != "" {
		return p.ended + " and was ended"
	}
	status, _ := state.Sys().(syscall.WaitStatus)
	want, expected := l.o.expect[p.rank]
	expected = expected && !p.second
	how := state.String()
	switch {
	case status.Signaled():
		how = fmt.Sprintf("was killed by %s", signalName(status.Signal()))
		if expected && status.Signal() == want {
			if strings.Contains(p.verdict, "failed") {
				return "failed before it " + how
			}
			return ""
		}
	case p.err != nil && state.Success():
		how = p.err.Error()
	case state.Success():
		if how = l.check(p); how == "" && !expected {
			return ""
		} else if how == "" {
			how = "passed"
		}
	default:
		how = "failed: " + how
	}
	if expected {
		how += fmt.Sprintf(", where it was expected to be killed by %s", signalName(want))
	}
	return how
}

// newJob names a job that shares the store with others.
func newJob() string { return "pgtest-" + rand.Text() }

// framing matches what the testing package prints around a rank's single test, which is noise in
// the test's own output.
var framing = regexp.MustCompile(`^\s*(=== (RUN|PAUSE|CONT|NAME|ATTR) .*|` +
	`--- (PASS|SKIP): .*|PASS|FAIL|coverage: .*)\n$`)

// lineWriter marks each line with its rank, and drops the framing.
type lineWriter struct {
	to     io.Writer
	prefix string
	framed bool   // by the testing package
	part   []byte // of a line
}

const longestLine = 64 << 10

func (w *lineWriter) Write(b []byte) (int, error) {
	n := len(b)
	for len(b) > 0 {
		line, rest, whole := bytes.Cut(b, []byte("\n"))
		w.part = append(w.part, line...)
		if whole || len(w.part) > longestLine {
			w.emit()
		}
		b = rest
	}
	return n, nil
}

func (w *lineWriter) flush() {
	if len(w.part) > 0 {
		w.emit()
	}
}

func (w *lineWriter) emit() {
	line := strings.TrimRight(string(w.part), "\r") + "\n"
	w.part = w.part[:0]
	if !w.framed || !framing.MatchString(line) {
		io.WriteString(w.to, w.prefix+line) // one Write, so that lines of ranks do not mix
	}
}
