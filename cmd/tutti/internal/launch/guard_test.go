package launch

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"tutti/bootstrap/embed"
)

// The test binary is also the guard.
func TestMain(m *testing.M) {
	if IsGuard() {
		os.Exit(GuardMain())
	}
	if os.Getenv(onTerminal) != "" {
		os.Exit(openInRank())
	}
	if os.Getenv(asFirst) != "" {
		if err := orphans(); err != nil {
			fmt.Println(err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	os.Exit(m.Run())
}

func newTestGuard(t *testing.T) *Guard {
	t.Helper()
	g, err := NewGuard()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		late := time.AfterFunc(patience, func() { g.proc.Kill() })
		defer late.Stop()
		if err := g.Close(); err != nil {
			t.Error(err)
		}
		for range g.Events() {
		}
	})
	return g
}

// TestGuardKeepsEvents has more processes than the sockets have room for events.
func TestGuardKeepsEvents(t *testing.T) {
	g := newTestGuard(t)
	null, err := os.OpenFile(os.DevNull, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer null.Close()
	const n = 1000
	started := make(chan error, 1)
	go func() {
		for id := range n {
			if err := g.Start(id, Command{Path: "/no/such/program"}, null, null, null); err != nil {
				started <- err
				return
			}
		}
		started <- nil
	}()
	if err := get(t, "the last Start", started); err != nil {
		t.Fatal(err)
	}
	for id := range n {
		if e := get(t, "an event", g.Events()); e.ID != id || e.Error == "" {
			t.Fatalf("event %d: %+v", id, e)
		}
	}
	g.conn.CloseWrite()
	if e := get(t, "the guard's end", g.Events()); !e.Lost {
		t.Errorf("%+v after the last event", e)
	}
	if e := get(t, "the end of the events", g.Events()); e != (Event{}) {
		t.Errorf("%+v after the guard's end", e)
	}
}

// onTerminal is set for this binary when it has a terminal, and runs openInRank.
const onTerminal = "LAUNCH_TEST_TERMINAL"

// openInRank returns the exit code of a process of a guard that opens the terminal.
func openInRank() int {
	tty, err := os.OpenFile("/dev/tty", os.O_RDWR, 0)
	if err != nil {
		return 98
	}
	g, err := NewGuard()
	if err != nil {
		return 97
	}
	g.Start(0, Command{Path: "/bin/sh", Args: []string{"-c", "exec 3</dev/tty"}}, tty, tty, tty)
	for e := range g.Events() {
		if e.Exited {
			return e.Status.ExitStatus()
		}
	}
	return 96
}

// TestRanksHaveNoTerminal: in the background of one, a process that reads it would be stopped.
func TestRanksHaveNoTerminal(t *testing.T) {
	master, err := os.OpenFile("/dev/ptmx", os.O_RDWR|unix.O_NOCTTY, 0)
	if err != nil {
		t.Skip("no pseudo-terminals here: ", err)
	}
	defer master.Close()
	n, err := unix.IoctlGetInt(int(master.Fd()), unix.TIOCGPTN)
	if err != nil {
		t.Skip("no pseudo-terminals here: ", err)
	}
	if err := unix.IoctlSetPointerInt(int(master.Fd()), unix.TIOCSPTLCK, 0); err != nil {
		t.Fatal(err)
	}
	slave, err := os.OpenFile(fmt.Sprintf("/dev/pts/%d", n), os.O_RDWR|unix.O_NOCTTY, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer slave.Close()
	cmd := exec.CommandContext(t.Context(), "/proc/self/exe")
	cmd.Env, cmd.Stdin = append(os.Environ(), onTerminal+"=1"), slave
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true, Setctty: true}
	err = cmd.Run()
	if code := cmd.ProcessState.ExitCode(); code < 1 || code > 2 {
		t.Errorf("the process that opens the terminal ends with %d (%v), want an error of the shell", code, err)
	}
}

// asFirst is set for this binary when it is the first process of a PID namespace, and runs orphans.
const asFirst = "LAUNCH_TEST_FIRST"

// orphans has the first process of a PID namespace inherit an orphan, and wait for it beside its
// guard.
func orphans() error {
	if err := errors.Join(unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""),
		unix.Mount("proc", "/proc", "proc", 0, "")); err != nil {
		return fmt.Errorf("mount /proc: %w", err)
	}
	g, err := NewGuard()
	if err != nil {
		return err
	}
	r, w, err := os.Pipe()
	if err != nil {
		return err
	}
	// This test waits neither for the shell nor for what that leaves behind, which prints its PID.
	if _, err := os.StartProcess("/bin/sh", []string{"sh", "-c", "sh -c 'echo $$' &"},
		&os.ProcAttr{Files: []*os.File{nil, w, os.Stderr}}); err != nil {
		return err
	}
	w.Close()
	var orphan int
	if _, err := fmt.Fscan(r, &orphan); err != nil {
		return fmt.Errorf("read the orphan's PID: %w", err)
	}
	for end := time.Now().Add(patience); len(children()) > 1; time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			return fmt.Errorf("the children stay: %v; the orphan is %d, the guard %d", children(), orphan, g.proc.Pid)
		}
	}
	if left := children(); len(left) != 1 || left[0] != g.proc.Pid {
		return fmt.Errorf("the children are %v, want the guard, %d", left, g.proc.Pid)
	}
	go func() {
		for range g.Events() {
		}
	}()
	return g.Close()
}

// TestFirstProcessWaitsForOrphans: nothing else does in a PID namespace, such as a container's.
func TestFirstProcessWaitsForOrphans(t *testing.T) {
	cmd := exec.CommandContext(t.Context(), "/proc/self/exe")
	cmd.Env = append(os.Environ(), asFirst+"=1")
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: unix.CLONE_NEWPID | unix.CLONE_NEWNS}
	if uid := os.Geteuid(); uid != 0 {
		cmd.SysProcAttr.Cloneflags |= unix.CLONE_NEWUSER
		cmd.SysProcAttr.UidMappings = []syscall.SysProcIDMap{{ContainerID: 0, HostID: uid, Size: 1}}
		cmd.SysProcAttr.GidMappings = []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Getegid(), Size: 1}}
	}
	out, err := cmd.CombinedOutput()
	if errors.Is(err, unix.EPERM) || strings.HasPrefix(string(out), "mount ") {
		t.Skipf("no namespaces here: %v; %s", err, out)
	}
	if err != nil || len(out) > 0 {
		t.Errorf("%v; %s", err, out)
	}
}

// TestGuardSaysWhyNothingStarts: the error of exec is the same for a script and its interpreter.
func TestGuardSaysWhyNothingStarts(t *testing.T) {
	g := newTestGuard(t)
	null, err := os.OpenFile(os.DevNull, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer null.Close()
	path := filepath.Join(t.TempDir(), "program")
	for text, want := range map[string]string{
		"":                      "no such file or directory: " + path,
		"#! /no/such -x\necho":  `the interpreter of ` + path + `, after #! in its first line, is "/no/such -x"`,
		"#!/bin/sh\r\necho\r\n": `first line, is "/bin/sh\r"`,
		"echo\n":                path + " is no program for this machine, nor a script with #! in its first line",
	} {
		if text != "" {
			if err := os.WriteFile(path, []byte(text), 0o700); err != nil {
				t.Fatal(err)
			}
		}
		if err := g.Start(0, Command{Path: path}, null, null, null); err != nil {
			t.Fatal(err)
		}
		if e := get(t, "the error", g.Events()); !strings.HasSuffix(e.Error, want) {
			t.Errorf("%q is not started: %q, want %q", text, e.Error, want)
		}
		os.Remove(path)
	}
}

// TestSignalsForRanksSpareHelpers: SIGUSR1 reaches the process of a group that handles it, and does
// not end another one.
func TestSignalsForRanksSpareHelpers(t *testing.T) {
	g := newTestGuard(t)
	null, err := os.OpenFile(os.DevNull, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer null.Close()
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	// The shell's exit code is that of its helper. Of two signals the lower number ends that.
	const script = `sleep 1000 & trap 'kill -TERM $!; wait $!; exit $?' USR1; echo; while wait; do sleep 1; done`
	err = g.Start(0, Command{Path: "/bin/sh", Args: []string{"-c", script}, Env: os.Environ()}, null, w, null)
	w.Close()
	if err != nil {
		t.Fatal(err)
	}
	if _, err := r.Read(make([]byte, 1)); err != nil {
		t.Fatalf("the shell does not say that it is ready: %v", err)
	}
	if err := g.Signal(-1, syscall.SIGUSR1); err != nil {
		t.Fatal(err)
	}
	for {
		e := get(t, "the shell's end", g.Events())
		if e.Exited {
			if code := e.Status.ExitStatus(); code != 128+int(syscall.SIGTERM) {
				t.Errorf("the shell ends with %d, as its helper: want %d", code, 128+int(syscall.SIGTERM))
			}
			return
		}
	}
}

// TestSignalsWithoutRanks: what is only passed on to ranks does not end the launcher when there are
// none.
func TestSignalsWithoutRanks(t *testing.T) {
	// A compiler that waits for a line.
	dir := t.TempDir()
	src, path := filepath.Join(dir, "x.go"), filepath.Join(dir, "fifo")
	err := errors.Join(unix.Mkfifo(path, 0o600), os.WriteFile(src, []byte("package main\n"), 0o600),
		os.WriteFile(filepath.Join(dir, "go"), []byte("#!/bin/sh\nread x <"+path+"\necho >$3\nchmod +x $3\n"), 0o700))
	if err != nil {
		t.Fatal(err)
	}
	t.Setenv("PATH", dir+":"+os.Getenv("PATH"))
	fifo, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer fifo.Close()

	for _, sig := range []os.Signal{syscall.SIGUSR1, syscall.SIGUSR2, syscall.SIGPIPE, syscall.SIGTSTP} {
		newLauncher := func() (l *launcher, send func()) {
			// Without room, so that the first has been handled when the second is taken.
			l = &launcher{Options: Options{Nodes: 2, Stderr: os.Stderr}, signals: make(chan os.Signal), stopping: true}
			var err error
			if l.out, err = NewOutput(os.Stderr, os.Stderr, false, 1, "", nil, l.say); err != nil {
				t.Fatal(err)
			}
			t.Cleanup(l.out.Flush)
			return l, func() { l.signals <- sig; l.signals <- sig }
		}
		check := func(what string, l *launcher, err error) {
			t.Helper()
			if err != nil || l.code != 0 || l.user != 0 {
				t.Errorf("%v %s: %v, exit code %d", sig, what, err, l.code)
			}
		}

		l, send := newLauncher()
		err := l.interruptible(t.Context(), func(ctx context.Context) error {
			send()
			return ctx.Err()
		})
		check("while nodes meet", l, err)

		l, send = newLauncher()
		l.hold = &store{server: &embed.Server{}, nodes: 2, failc: make(chan broken, 1), alone: make(chan struct{}),
			watched: make(chan struct{})}
		go func() {
			send()
			close(l.hold.alone)
		}()
		check("while the store is served", l, l.hold.others(t.Context(), l))

		l, send = newLauncher()
		l.stopping, l.guard, l.temp = false, newTestGuard(t), t.TempDir()
		go func() {
			send()
			fifo.Write([]byte("\n"))
		}()
		_, err = l.build(t.Context(), Command{Path: src})
		check("while a program is built", l, err)
	}
}
