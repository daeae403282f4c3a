//go:build linux

// Package proctest starts the processes of tests. None of them outlives the process that started
// it, even if that is killed, for instance by go test's time limit.
//
// Two mechanisms ensure this. The kernel kills processes of Start when this process dies
// (PR_SET_PDEATHSIG). Their descendants, in any session or process group and with any credentials,
// inherit a mark in their environment, Variable, by which a keeper finds and kills them: one more
// process of this program, which reads from a pipe that only this process can write to, and ends
// with it.
//
// A program that imports the package becomes a keeper in an init function, without a change to its
// main.
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
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// Variable is in the environment of every process of Start and, unless they remove it, of its
// descendants. Its value is the mark of this process, a dot and a number. If this process has a
// mark itself, its own follows after a dot.
const Variable = "PROCTEST_MARK"

// keeperName is argv[0] of a keeper.
const keeperName = "tutti-proctest-keeper"

func init() {
	if len(os.Args) == 2 && os.Args[0] == keeperName {
		keep(os.Args[1])
		os.Exit(0)
	}
}

// keeper is the keeper of this process.
var keeper struct {
	sync.Mutex
	mark string   // "" before it runs
	life *os.File // its standard input ends when this is closed, with this process
}

// Keep starts this process's keeper, unless it is running. Start does it too; tests that count
// descriptors call it before.
func Keep() error {
	_, err := mark()
	return err
}

// mark returns the mark of this process, after starting its keeper.
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
	// It has the mark of the keeper above, whose processes include those of this process.
	p, err := os.StartProcess("/proc/self/exe", []string{keeperName, own}, &os.ProcAttr{
		Env: []string{Variable + "=" + above}, Files: []*os.File{theirs, null, null},
		Sys: &syscall.SysProcAttr{Setpgid: true}})
	if err != nil {
		ours.Close()
		return "", fmt.Errorf("start the keeper: %w", err)
	}
	p.Release() // not waited for: it outlives this process
	keeper.mark, keeper.life = own, ours
	return own, nil
}

// The bounds of killAll, in a keeper and elsewhere.
const (
	keepFor = 30 * time.Second
	killFor = 10 * time.Second
)

// keep runs a keeper.
func keep(mark string) {
	// Only its pipe ends it, not signals of a terminal or a service manager to all processes.
	signal.Ignore(syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP, syscall.SIGQUIT)
	io.Copy(io.Discard, os.Stdin) // there is no data
	killAll(mark, keepFor)
}

// KillAll kills all processes that Start has started in this process, and their descendants, waits
// for their ends, and returns their number. Start must not be called meanwhile.
func KillAll() (killed int) {
	keeper.Lock()
	mark := keeper.mark
	keeper.Unlock()
	if mark == "" {
		return 0
	}
	return killAll(mark, killFor)
}

// killAll is killAllWith for the mark of a process of Start, or of the process that starts them.
func killAll(mark string, limit time.Duration) (killed int) {
	return killAllWith(Variable, mark, limit)
}

// KillAllWith kills all processes that ProcessesWith finds, also those that are started meanwhile,
// waits for their ends, and returns their number. After a while it leaves those that do not end.
func KillAllWith(name, value string) (killed int) { return killAllWith(name, value, killFor) }

// killAllWith is KillAllWith with a limit.
func killAllWith(name, value string, limit time.Duration) (killed int) {
	for end := time.Now().Add(limit); ; {
		n, undecided := killWith(name, value, end)
		killed += n
		// A process that one of the killed has started is found in the next round.
		if n == 0 && !undecided || time.Now().After(end) {
			return killed
		}
		if n == 0 {
			time.Sleep(time.Millisecond) // execve takes a moment
		}
	}
}

// killWith kills all processes that search finds, and returns their number when they have ended, or
// at the limit.
func killWith(name, value string, limit time.Time) (n int, undecided bool) {
	all, undecided := search(name, value)
	for i := range all {
		if p := &all[i]; p.kill() == nil {
			n++
		} else {
			p.close()
		}
	}
	for i := range all {
		all[i].awaitEnd(time.Until(limit))
		all[i].close()
	}
	return n, undecided
}

// ProcessesWith lists the processes whose environments have this variable with this value, or with
// one that begins with it and a dot, except this process. It waits until those in the middle of
// execve show their environments.
func ProcessesWith(name, value string) (pids []int) {
	for end := time.Now().Add(killFor); ; time.Sleep(time.Millisecond) {
		all, undecided := search(name, value)
		pids = nil
		for i := range all {
			all[i].close()
			pids = append(pids, all[i].pid)
		}
		if !undecided || time.Now().After(end) {
			return pids
		}
	}
}

// CommandLine returns the arguments of a process, with spaces between them; "" if it has ended. It
// waits until a process in the middle of execve shows them.
func CommandLine(pid int) string {
	var buf []byte
	for end := time.Now().Add(killFor); ; time.Sleep(time.Millisecond) {
		line, unread, err := read(fmt.Sprintf("/proc/%d", pid), arguments, &buf)
		if err != nil || !unread || time.Now().After(end) {
			return string(bytes.TrimSpace(bytes.ReplaceAll(line, []byte{0}, []byte{' '})))
		}
	}
}

// found is a process that search has found.
type found struct {
	pid int
	fd  int // a handle, which stays one of this process if the number is reused; -1: there is none
}

// search finds the processes of ProcessesWith, which have to be closed. undecided: a process may be
// one of them, but does not show its environment yet.
func search(name, value string) (all []found, undecided bool) {
	var buf []byte
	dirs, _ := filepath.Glob("/proc/[0-9]*") // the pattern is valid
	for _, dir := range dirs {
		pid, err := strconv.Atoi(filepath.Base(dir))
		if err != nil || pid == os.Getpid() {
			continue
		}
		p := found{pid: pid}
		if p.fd, err = unix.PidfdOpen(pid, 0); err == unix.ENOSYS || err == unix.EPERM { // there are no handles
			p.fd = -1
		} else if err != nil {
			continue
		}
		env, unread, err := read(dir, environment, &buf)
		if err == nil && has(env, name, value) {
			all = append(all, p)
			continue
		}
		p.close()
		undecided = undecided || err == nil && unread
	}
	return all, undecided
}

func (p *found) kill() error {
	if p.fd < 0 {
		return unix.Kill(p.pid, unix.SIGKILL)
	}
	return unix.PidfdSendSignal(p.fd, unix.SIGKILL, nil, 0)
}

func (p *found) close() {
	if p.fd >= 0 {
		unix.Close(p.fd)
	}
	p.fd = -1
}

// awaitEnd waits until a process with a handle has ended, or the limit.
func (p *found) awaitEnd(limit time.Duration) {
	if p.fd < 0 {
		return
	}
	fds := []unix.PollFd{{Fd: int32(p.fd), Events: unix.POLLIN}}
	for end := time.Now().Add(limit); ; {
		_, err := unix.Poll(fds, int(max(0, time.Until(end).Milliseconds())))
		if err != unix.EINTR {
			return
		}
	}
}

// area is a part of a process's memory that the kernel shows as a file.
type area struct {
	file  string
	start int // the field of /proc/PID/stat with its start; that with its end follows
}

var arguments, environment = area{"cmdline", 48}, area{"environ", 50}

// read reads an area of the process whose directory this is, to buf, which grows as needed. unread:
// it was found empty, but has a content nevertheless, or may get one.
func read(dir string, a area, buf *[]byte) (text []byte, unread bool, err error) {
	if *buf == nil {
		*buf = make([]byte, 16<<10)
	}
	n, err := readOnce(filepath.Join(dir, a.file), *buf)
	for err == nil && n == len(*buf) { // there may be more
		*buf = make([]byte, 2*n)
		n, err = readOnce(filepath.Join(dir, a.file), *buf)
	}
	if err != nil {
		return nil, false, err
	}
	if n > 0 {
		return (*buf)[:n], false, nil
	}
	stat, err := os.ReadFile(filepath.Join(dir, "stat"))
	return nil, err == nil && a.unread(stat), err
}

// readOnce reads the beginning of a file by one system call: after the first one a process may
// execute another program, and the rest of what it had before cannot be read.
func readOnce(path string, buf []byte) (n int, err error) {
	f, err := os.Open(path)
	if err != nil {
		return 0, err
	}
	defer f.Close()
	if n, err = f.Read(buf); err == io.EOF {
		err = nil
	}
	return n, err
}

// unread reports whether an area that was found empty has a content nevertheless, or may get one,
// by the process's /proc/PID/stat. In the middle of execve it has an address space, in which the
// kernel puts down where the area is, and later where the code ends.
func (a area) unread(stat []byte) bool {
	f := bytes.Fields(stat[bytes.LastIndexByte(stat, ')')+1:]) // after the name, from field 3 on
	if len(f) <= a.start+1-3 {
		return false
	}
	size, code, start, end := string(f[23-3]), string(f[27-3]), string(f[a.start-3]), string(f[a.start+1-3])
	return size != "0" && (start != end || code == "0")
}

// has reports whether an environment in the format of /proc has a variable with this value, or with
// one that begins with it and a dot.
func has(env []byte, name, value string) bool {
	for kv := range bytes.SplitSeq(env, []byte{0}) {
		if rest, ok := bytes.CutPrefix(kv, []byte(name+"="+value)); ok && (len(rest) == 0 || rest[0] == '.') {
			return true
		}
	}
	return false
}

// started counts the processes, to number their marks.
var started atomic.Uint64

// Process is a process of Start.
type Process struct {
	// Cmd is the command. Its ProcessState is set when Done is closed.
	Cmd  *exec.Cmd
	mark string // its own
	done chan struct{}
	err  error

	mu    sync.Mutex
	alive bool // not reaped: its number and its group's are not reused
}

// Start starts cmd, and waits for its end in a goroutine. Unless cmd.SysProcAttr is set the process
// leads its own process group, so that Ctrl-C at the tests' terminal does not reach it. The caller
// must not call cmd.Wait, nor read from cmd.StdoutPipe, which Wait closes.
func Start(cmd *exec.Cmd) (*Process, error) { return start(cmd, false) }

// StartGroup is Start for a process whose group is killed at its end.
func StartGroup(cmd *exec.Cmd) (*Process, error) { return start(cmd, true) }

func start(cmd *exec.Cmd, sweep bool) (*Process, error) {
	mark, err := mark()
	if err != nil {
		return nil, err
	}
	if cmd.Env == nil {
		cmd.Env = os.Environ()
	}
	mark += "." + strconv.FormatUint(started.Add(1), 10)
	cmd.Env = append(cmd.Env[:len(cmd.Env):len(cmd.Env)], Variable+"="+mark)
	if cmd.SysProcAttr == nil {
		cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	}
	cmd.SysProcAttr.Pdeathsig = syscall.SIGKILL
	p := &Process{Cmd: cmd, mark: mark, done: make(chan struct{})}
	began := make(chan error)
	go func() {
		// The kernel sends the signal when this thread ends, so the thread must not end before the
		// process.
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		if err := cmd.Start(); err != nil {
			began <- err
			return
		}
		p.alive = true
		began <- nil
		p.live(sweep)
	}()
	if err := <-began; err != nil {
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
	if sweep && err == nil { // not reaped: the group's number is not reused
		syscall.Kill(-pid, syscall.SIGKILL)
	}
	p.alive = false
	p.mu.Unlock()
	p.err = p.Cmd.Wait()
}

func waitid(pid, options int) error { return unix.Waitid(unix.P_PID, pid, nil, options, nil) }

// PID is the process's number.
func (p *Process) PID() int { return p.Cmd.Process.Pid }

// Done is closed when the process has ended, and its output has been read: see exec.Cmd.WaitDelay.
func (p *Process) Done() <-chan struct{} { return p.done }

// Wait waits for Done and returns the result of exec.Cmd.Wait.
func (p *Process) Wait() error {
	<-p.done
	return p.err
}

// ErrEnded says that a process has ended.
var ErrEnded = errors.New("the process has ended")

// Signal sends a signal to the process; ErrEnded if it has ended.
func (p *Process) Signal(sig syscall.Signal) error { return p.send(p.PID(), sig) }

// Kill kills the process and, if it leads one, its process group, unless it has ended.
func (p *Process) Kill() {
	if p.Cmd.SysProcAttr.Setpgid {
		p.send(-p.PID(), syscall.SIGKILL)
	} else {
		p.send(p.PID(), syscall.SIGKILL)
	}
}

// KillTree kills the process and its descendants, also when it has ended already. It waits for the
// ends of those with its mark, and returns their number.
func (p *Process) KillTree() (killed int) {
	killed = killAll(p.mark, killFor)
	p.Kill() // in case it removed the mark
	return killed
}

func (p *Process) send(to int, sig syscall.Signal) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if !p.alive {
		return ErrEnded
	}
	return syscall.Kill(to, sig)
}

// Stopped returns when the process has stopped after a SIGSTOP, or has ended.
func (p *Process) Stopped() {
	for waitid(p.PID(), unix.WSTOPPED|unix.WEXITED|unix.WNOWAIT) == unix.EINTR {
	}
}
