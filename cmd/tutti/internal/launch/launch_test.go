package launch

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"golang.org/x/sys/unix"
)

// TestDirectoryDoesNotHideProgram: a name without a slash is that of a program in PATH.
func TestDirectoryDoesNotHideProgram(t *testing.T) {
	t.Chdir(t.TempDir())
	bin := t.TempDir()
	t.Setenv("PATH", bin)
	if err := os.Mkdir("tool", 0o700); err != nil {
		t.Fatal(err)
	}
	l := &launcher{Options: Options{Program: "tool"}}
	_, err := l.program(t.Context())
	if e := (*Error)(nil); !errors.As(err, &e) || e.Code != CodeNotFound ||
		!strings.HasPrefix(err.Error(), "tool is a directory without Go files") {
		t.Errorf("without one in PATH: %v", err)
	}
	if err := os.WriteFile(filepath.Join(bin, "tool"), nil, 0o700); err != nil {
		t.Fatal(err)
	}
	if c, err := l.program(t.Context()); err != nil || c.Path != filepath.Join(bin, "tool") {
		t.Errorf("%q, %v", c.Path, err)
	}
}

// TestOneRequestOfTwoSignals: a signal that comes with another of its number, or with SIGHUP, is no
// second request, nor is a second SIGHUP ever.
func TestOneRequestOfTwoSignals(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		for _, c := range []struct {
			first, second syscall.Signal
			after         time.Duration
			want          bool
		}{
			{syscall.SIGTERM, syscall.SIGTERM, time.Millisecond, false},
			{syscall.SIGTERM, syscall.SIGTERM, time.Second, true},
			{syscall.SIGTERM, syscall.SIGINT, time.Millisecond, true},
			{syscall.SIGHUP, syscall.SIGHUP, time.Hour, false},
			{syscall.SIGINT, syscall.SIGHUP, time.Hour, false},
			{syscall.SIGHUP, syscall.SIGTERM, time.Millisecond, false},
			{syscall.SIGHUP, syscall.SIGTERM, time.Second, true},
			{syscall.SIGHUP, syscall.SIGINT, time.Millisecond, true},
		} {
			l := &launcher{}
			if l.interrupts(syscall.SIGUSR1) || !l.interrupts(c.first) {
				t.Errorf("%v is not the first request", c.first)
			}
			time.Sleep(c.after)
			if got := l.interrupts(c.second); got != c.want {
				t.Errorf("%v %v after %v is another request: %v", c.second, c.after, c.first, got)
			}
		}
	})
}

// TestSignalBesideAFailure: a signal that comes while ranks are being ended, because one has
// failed, leaves them their time, as the failure may be why it comes. The next one does not. Output
// that nobody reads is given up after either, at the latest when the ranks have ended.
func TestSignalBesideAFailure(t *testing.T) {
	for _, c := range []struct {
		signals []syscall.Signal
		kills   bool
	}{{[]syscall.Signal{syscall.SIGTERM}, false}, {[]syscall.Signal{syscall.SIGTERM, syscall.SIGINT}, true},
		{[]syscall.Signal{syscall.SIGINT}, true}} {
		f := newFake(t, 1, 0, 0)
		f.guard, f.out = deafGuard(t), &Output{hurry: make(chan struct{})}
		f.code = 3
		for _, s := range c.signals {
			f.signal(s)
		}
		if kills := !f.killedAt.IsZero(); kills != c.kills || f.code != 3 {
			t.Errorf("%v: the ranks are killed: %v, and the code is %d", c.signals, kills, f.code)
		}
		hurries := func() bool {
			select {
			case <-f.out.hurry:
				return true
			default:
				return false
			}
		}
		if hurries() != c.kills {
			t.Errorf("%v: what the ranks write is given up: %v", c.signals, !c.kills)
		}
		if f.unlessInterrupted(func() {}); !hurries() {
			t.Errorf("%v: at the end it waits for who reads the output", c.signals)
		}
	}
}

// deafGuard is a guard that does nothing and tells nothing.
func deafGuard(t *testing.T) *Guard {
	t.Helper()
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { unix.Close(fds[1]) }) // nobody reads what the guard is told
	conn, err := unixConn(fds[0])
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	return &Guard{conn: conn}
}

// TestProcessesThatSIGKILLDoesNotEnd: the launcher does not wait for them for ever.
func TestProcessesThatSIGKILLDoesNotEnd(t *testing.T) {
	guard := deafGuard(t)
	synctest.Test(t, func(t *testing.T) {
		f := newFake(t, 1, 0, 0)
		f.Elastic, f.signals, f.out = false, make(chan os.Signal, 1), &Output{broken: make(chan struct{}),
			hurry: make(chan struct{})}
		f.guard = guard
		f.guard.events = make(chan Event)
		began := time.Now()
		f.kill()
		go func() {
			time.Sleep(dieBy / 2)
			f.signals <- syscall.SIGINT
		}()
		if err := f.supervise(t.Context()); err != nil || time.Since(began) != dieBy || f.live != 1 ||
			f.code != 128+int(syscall.SIGINT) {
			t.Errorf("%v after %v; %d processes are left, code %d", err, time.Since(began), f.live, f.code)
		}
	})
}

// TestTooFewDescriptors: the launcher that serves the store has connections to all ranks and
// launchers.
func TestTooFewDescriptors(t *testing.T) {
	var old unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &old); err != nil {
		t.Fatal(err)
	}
	low := old
	low.Cur = 100
	if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &low); err != nil {
		t.Fatal(err)
	}
	defer unix.Setrlimit(unix.RLIMIT_NOFILE, &old)
	l := &launcher{Options: Options{N: 2, Nodes: 10, Standby: 1, LogDir: "x"}, ranks: make([]rank, 3)}
	const want = "100 open files (RLIMIT_NOFILE), and for 3 ranks here and on 9 other nodes it needs up to 127:"
	if err := l.run(t.Context()); err == nil || !strings.Contains(err.Error(), want) {
		t.Errorf("%v, want %q in it", err, want)
	}
	for _, o := range []Options{{Nodes: 10, Store: "x"}, {Nodes: 10, Node: 1}, {Nodes: 1}} {
		l.Options = o
		if need, what := l.descriptors(); need != 52 || what != "3 ranks" {
			t.Errorf("%+v: %d files for %s", o, need, what)
		}
	}
}
