//go:build linux

// Package proctest starts the processes of tests. None of them outlives the process that started
// it, however that ends: a test binary may be killed at any time, by go test's own time limit for
// instance.
//
// Two means see to it. The kernel kills what Start has started when this process dies
// (PR_SET_PDEATHSIG). All that these processes have started, in whichever session or process group
// and with whichever credentials, is found by a mark that it inherits in its environment, Variable,
// and killed by a keeper: one more process of this program, which reads from a pipe that only this
// process can write to. The keeper ends with this process.
//
// A program that imports the package becomes a keeper in an init function, so that its main needs
// to know nothing of it.
package proctest

import (
	"bytes"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"runtime"
	"strconv"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// Variable is in the environment of every process that Start has started and, unless they remove
// it, of what these have started. Its value is the mark of this process; where this process has a
// mark itself its own follows after a dot.
const Variable = "PROCTEST_MARK"

// keeperName is argv[0] of a keeper.
const keeperName = "tutti-proctest-keeper"

func init() {
	if len(os.Args) == 2 && os.Args[0] == keeperName {
		keep(os.Args[1])
		os.Exit(0)
	}
}

// keeper is the one of this process.
var keeper struct {
	sync.Mutex
	mark string   // "" until it runs
	life *os.File // its standard input ends when this is closed, with this process
}

// Keep starts this process's keeper, unless it runs. Start does it too; who counts descriptors
// calls it before.
func Keep() error {
	_, err := mark()
	return err
}

// mark returns the mark of this process, whose keeper runs.
func mark() (string, error) {
	keeper.Lock()
	defer keeper.Unlock()
	if keeper.mark != "" {
		return keeper.mark, nil
	}
	theirs, ours, err := os.Pipe()
	if err != nil {
		return "", fmt.Errorf("make the keeper's pipe: %w", err)
	}
	defer theirs.Close()
	null, err := os.OpenFile(os.DevNull, os.O_RDWR, 0)
	if err != nil {
		ours.Close()
		return "", err
	}
	defer null.Close()
	above := os.Getenv(Variable)
	own := rand.Text()
	if above != "" {
		own = above + "." + own
	}
	// Not under its own mark, but under that of the keeper above, whose processes include ours.
	p, err := os.StartProcess("/proc/self/exe", []string{keeperName, own}, &os.ProcAttr{
		Env: []string{Variable + "=" + above}, Files: []*os.File{theirs, null, null},
		Sys: &syscall.SysProcAttr{Setpgid: true}})
	if err != nil {
		ours.Close()
		return "", fmt.Errorf("start the keeper: %w", err)
	}
	p.Release() // it outlives this process
	keeper.mark, keeper.life = own, ours
	return own, nil
}

// keepFor bounds a keeper's work after the end of the process that it is for.
const keepFor = 30 * time.Second

// keep is the life of a keeper.
func keep(mark string) {
	// It ends when its pipe does, not by what a terminal or a service manager sends to all.
	signal.Ignore(syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP, syscall.SIGQUIT)
	io.Copy(io.Discard, os.Stdin) // nobody writes to it
	// Until none is left that could have started another meanwhile; who cannot die is left.
	for limit := time.Now().Add(keepFor); killMarked(mark) > 0 && time.Now().Before(limit); {
		time.Sleep(time.Millisecond) // they take a moment to die
	}
}

// KillAll kills what Start has started in this process and all that this has started, and returns
// how many processes there were. Start must not be called meanwhile.
func KillAll() (killed int) {
	keeper.Lock()
	mark := keeper.mark
	keeper.Unlock()
	if mark == "" {
		return 0
	}
	for range 10 { // a process that forks while we look is found the next time
		n := killMarked(mark)
		if n == 0 {
			break
		}
		killed += n
	}
	return killed
}

// killMarked kills all processes with this mark, or one that begins with it and a dot, and returns
// how many there were.
func killMarked(mark string) (n int) {
	paths, _ := filepath.Glob("/proc/[0-9]*/environ") // the pattern is correct
	for _, path := range paths {
		pid, err := strconv.Atoi(filepath.Base(filepath.Dir(path)))
		if err != nil || pid == os.Getpid() {
			continue
		}
		p, err := os.FindProcess(pid) // a handle of this process, though the number be given to another
		if err != nil {
			continue
		}
		if env, err := os.ReadFile(path); err == nil && marked(env, mark) && p.Kill() == nil {
			n++
		}
		p.Release()
	}
	return n
}

// marked reports whether an environment, as /proc shows it, has the mark.
func marked(env []byte, mark string) bool {
	for kv := range bytes.SplitSeq(env, []byte{0}) {
		if rest, ok := bytes.CutPrefix(kv, []byte(Variable+"="+mark)); ok && (len(rest) == 0 || rest[0] == '.') {
			return true
		}
	}
	return false
}

// Process is a process that Start has started.
type Process struct {
	// Cmd is what was started. Its ProcessState is set when Done is closed.
	Cmd  *exec.Cmd
	done chan struct{}
	err  error

	mu    sync.Mutex
	alive bool // not waited for: its number is its own, and its group's
}

// Start starts cmd, and waits for its end in a goroutine of its own. Unless cmd.SysProcAttr is set
// the process heads a process group of its own, so that a Ctrl-C at the tests' terminal is the
// tests' alone. The caller leaves cmd.Wait to the Process, and so does not read from
// cmd.StdoutPipe, which Wait closes.
func Start(cmd *exec.Cmd) (*Process, error) { return start(cmd, false) }

// StartGroup is Start for a process whose group ends with it: what it leaves there is killed.
func StartGroup(cmd *exec.Cmd) (*Process, error) { return start(cmd, true) }

func start(cmd *exec.Cmd, sweep bool) (*Process, error) {
	mark, err := mark()
	if err != nil {
		return nil, err
	}
	if cmd.Env == nil {
		cmd.Env = os.Environ()
	}
	cmd.Env = append(cmd.Env[:len(cmd.Env):len(cmd.Env)], Variable+"="+mark)
	if cmd.SysProcAttr == nil {
		cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	}
	cmd.SysProcAttr.Pdeathsig = syscall.SIGKILL
	p := &Process{Cmd: cmd, done: make(chan struct{})}
	started := make(chan error)
	go func() {
		// The kernel takes the end of the thread for that of this process: it must not end before.
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		if err := cmd.Start(); err != nil {
			started <- err
			return
		}
		p.alive = true
		started <- nil
		p.live(sweep)
	}()
	if err := <-started; err != nil {
		return nil, err
	}
	return p, nil
}

// live waits for the process's end.
func (p *Process) live(sweep bool) {
	defer close(p.done)
	pid := p.PID()
	err := error(unix.EINTR)
	for err == unix.EINTR {
		err = waitid(pid, unix.WEXITED|unix.WNOWAIT)
	}
	p.mu.Lock()
	if sweep && err == nil { // not waited for: the group's number is not another's
		syscall.Kill(-pid, syscall.SIGKILL)
	}
	p.alive = false
	p.mu.Unlock()
	p.err = p.Cmd.Wait()
}

func waitid(pid, options int) error { return unix.Waitid(unix.P_PID, pid, nil, options, nil) }

// PID is the process's number.
func (p *Process) PID() int { return p.Cmd.Process.Pid }

// Done is closed when the process has ended, and its output has been taken: see exec.Cmd.WaitDelay.
func (p *Process) Done() <-chan struct{} { return p.done }

// Wait waits for that and returns what exec.Cmd.Wait returned.
func (p *Process) Wait() error {
	<-p.done
	return p.err
}

// ErrEnded says that a process has ended by itself.
var ErrEnded = errors.New("the process has ended")

// Signal sends a signal to the process; ErrEnded if it is gone.
func (p *Process) Signal(sig syscall.Signal) error { return p.send(p.PID(), sig) }

// Kill kills the process with its process group, if it heads one and has not ended.
func (p *Process) Kill() {
	if p.Cmd.SysProcAttr.Setpgid {
		p.send(-p.PID(), syscall.SIGKILL)
	} else {
		p.send(p.PID(), syscall.SIGKILL)
	}
}

func (p *Process) send(to int, sig syscall.Signal) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if !p.alive {
		return ErrEnded
	}
	return syscall.Kill(to, sig)
}

// Stopped returns when the process stands still after a SIGSTOP, or has ended.
func (p *Process) Stopped() {
	for waitid(p.PID(), unix.WSTOPPED|unix.WEXITED|unix.WNOWAIT) == unix.EINTR {
	}
}
