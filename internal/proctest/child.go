//go:build linux

package proctest

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
)

// Patience bounds every wait for a Child, unless it has another one. No test depends on its value,
// except for the time of a failure.
const Patience = 2 * time.Minute

// Self returns the path of this program.
func Self() string {
	path, err := os.Executable()
	if err != nil { // only without /proc
		panic(err)
	}
	return path
}

// Again returns a command that runs this program with arguments, and with variables beside those of
// this process.
func Again(env []string, args ...string) *exec.Cmd {
	cmd := exec.Command(Self(), args...)
	cmd.Env = append(os.Environ(), env...)
	return cmd
}

// Child is a process of a test. Its methods fail the test rather than return errors, so that only
// the test's goroutine may call them; others call those of its Process.
type Child struct {
	Out Output   // what it has written to standard output
	Err Output   // and to standard error
	In  *os.File // its standard input, with RunPiped
	// Patience bounds the waits for what takes longer than usual.
	Patience time.Duration
	t        testing.TB
	p        *Process
}

// Run starts cmd as Start does, and collects the output for which cmd has no file. At the end of
// the test the process and its descendants are killed, and the output of a failed test's is logged.
func Run(t testing.TB, cmd *exec.Cmd) *Child {
	t.Helper()
	c := &Child{Patience: Patience, t: t}
	if cmd.Stdout == nil {
		cmd.Stdout = &c.Out
	}
	if cmd.Stderr == nil {
		cmd.Stderr = &c.Err
	}
	var err error
	if c.p, err = Start(cmd); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.cleanUp)
	return c
}

// RunPiped is Run of a command to whose standard input the test writes, and whose errors go to
// those of this process.
func RunPiped(t testing.TB, cmd *exec.Cmd) *Child {
	t.Helper()
	theirs, in, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer theirs.Close()
	t.Cleanup(func() { in.Close() })
	cmd.Stdin, cmd.Stderr = theirs, os.Stderr
	c := Run(t, cmd)
	c.In = in
	return c
}

func (c *Child) cleanUp() {
	c.p.Signal(syscall.SIGKILL)
	killAll(c.p.mark, killFor) // what it has left, which may hold its output open
	select {
	case <-c.p.done:
	case <-time.After(Patience):
		c.t.Errorf("pid %d does not die", c.PID())
	}
	if text := c.Out.String() + c.Err.String(); text != "" && c.t.Failed() {
		c.t.Logf("%s printed\n%s", strings.Join(c.p.Cmd.Args, " "), text)
	}
}

// PID is the process's number.
func (c *Child) PID() int { return c.p.PID() }

// Process returns the process, whose methods do not fail the test.
func (c *Child) Process() *Process { return c.p }

// Done is closed when the process has ended, and its output has been read.
func (c *Child) Done() <-chan struct{} { return c.p.done }

// Signal sends a signal to the process, which must not have ended.
func (c *Child) Signal(sig syscall.Signal) {
	c.t.Helper()
	if err := c.p.Signal(sig); err != nil {
		c.t.Fatal(err)
	}
}

// TrySignal sends a signal to the process, unless it has ended.
func (c *Child) TrySignal(sig syscall.Signal) {
	c.t.Helper()
	if err := c.p.Signal(sig); err != nil && !errors.Is(err, ErrEnded) {
		c.t.Fatal(err)
	}
}

// Stop stops the process, and returns when it has stopped, or ended.
func (c *Child) Stop() {
	c.t.Helper()
	c.Signal(syscall.SIGSTOP)
	c.p.Stopped()
}

// Stop stops a process that need not be a child of this one, and returns when all its threads stand
// still, or it has ended.
func Stop(t testing.TB, pid int) {
	t.Helper()
	if err := syscall.Kill(pid, syscall.SIGSTOP); err != nil {
		if err != syscall.ESRCH {
			t.Fatalf("stop pid %d: %v", pid, err)
		}
		return
	}
	for late := time.Now().Add(Patience); !still(pid); time.Sleep(time.Millisecond) {
		if time.Now().After(late) {
			t.Fatalf("pid %d does not stop", pid)
		}
	}
}

// still reports whether no thread of a process runs.
func still(pid int) bool {
	threads, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/stat", pid)) // the pattern is valid
	for _, path := range threads {
		stat, err := os.ReadFile(path)
		if err != nil { // the thread has ended
			continue
		}
		state := stat[bytes.LastIndexByte(stat, ')')+1:]
		if !bytes.HasPrefix(state, []byte(" T")) && !bytes.HasPrefix(state, []byte(" Z")) {
			return false
		}
	}
	return true
}

// Kill ends the process, if it has not ended, and waits for its end.
func (c *Child) Kill() {
	c.t.Helper()
	c.p.Signal(syscall.SIGKILL)
	c.Wait()
}

// Wait waits for Done and returns the exit code; -1: it was killed.
func (c *Child) Wait() int {
	c.t.Helper()
	select {
	case <-c.p.done:
	case <-time.After(c.Patience):
		c.t.Fatalf("pid %d does not end; it has printed %q and %q", c.PID(), c.Out.String(), c.Err.String())
	}
	return c.p.Cmd.ProcessState.ExitCode()
}

// End is Wait for an expected exit code.
func (c *Child) End(code int) {
	c.t.Helper()
	if got := c.Wait(); got != code {
		c.t.Errorf("pid %d ended with exit code %d, want %d; it has printed %q", c.PID(), got, code, c.Err.String())
	}
}

// Tell writes a line to the standard input.
func (c *Child) Tell(line string) {
	c.t.Helper()
	err := c.In.SetWriteDeadline(time.Now().Add(c.Patience))
	if err == nil {
		_, err = fmt.Fprintln(c.In, line)
	}
	if err != nil {
		c.t.Fatalf("tell pid %d %q: %v", c.PID(), line, err)
	}
}

// Hear returns the next line of the output, when there is one. The test fails if the process ends
// without.
func (c *Child) Hear() string {
	c.t.Helper()
	late := time.After(c.Patience)
	for done := c.p.done; ; {
		line, more := c.Out.next()
		if more == nil {
			return line
		}
		select {
		case <-more:
		case <-done: // what it has written last has been read by now
			done = nil
			if line, more := c.Out.next(); more == nil {
				return line
			}
			c.t.Fatalf("pid %d has ended, after %q", c.PID(), line)
		case <-late:
			c.t.Fatalf("pid %d prints no line, but %q", c.PID(), line)
		}
	}
}

// Output is what a process has written, readable while it runs.
type Output struct {
	mu   sync.Mutex
	b    bytes.Buffer
	read int           // by next
	more chan struct{} // closed at the next Write; nil if nobody waits
}

// Write appends to the output.
func (o *Output) Write(p []byte) (int, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.more != nil {
		close(o.more)
		o.more = nil
	}
	return o.b.Write(p)
}

// String returns all that has been written.
func (o *Output) String() string {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.b.String()
}

// next returns the next line, or what there is of it and a channel that is closed when there is
// more.
func (o *Output) next() (line string, more <-chan struct{}) {
	o.mu.Lock()
	defer o.mu.Unlock()
	rest := o.b.Bytes()[o.read:]
	if n := bytes.IndexByte(rest, '\n'); n >= 0 {
		o.read += n + 1
		return string(rest[:n]), nil
	}
	return string(rest), o.growsLocked()
}

func (o *Output) growsLocked() <-chan struct{} {
	if o.more == nil {
		o.more = make(chan struct{})
	}
	return o.more
}

// Await waits until text has been written.
func (o *Output) Await(t testing.TB, text string) {
	t.Helper()
	late := time.After(Patience)
	for {
		o.mu.Lock()
		have, more := bytes.Contains(o.b.Bytes(), []byte(text)), o.growsLocked()
		o.mu.Unlock()
		if have {
			return
		}
		select {
		case <-more:
		case <-late:
			t.Fatalf("%q was never printed, but %q", text, o.String())
		}
	}
}

// Descriptors returns the number of descriptors that this process has open. It panics if the system
// does not tell.
func Descriptors() int {
	all, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		panic(err)
	}
	return len(all)
}
