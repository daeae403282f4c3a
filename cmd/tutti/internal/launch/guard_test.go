package launch

import (
	"context"
	"errors"
	"os"
	"path/filepath"
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

	for _, sig := range []os.Signal{syscall.SIGUSR1, syscall.SIGUSR2, syscall.SIGPIPE} {
		newLauncher := func() (l *launcher, send func()) {
			// Without room, so that the first has been handled when the second is taken.
			l = &launcher{Options: Options{Nodes: 2, Stderr: os.Stderr}, signals: make(chan os.Signal), stopping: true}
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
