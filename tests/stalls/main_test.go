package main

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// stopped is set in a process that looks for stops of itself: the number of them that it needs.
const stopped = "TUTTI_STALLS_STOPPED"

func TestMain(m *testing.M) {
	if os.Getenv(stopped) == "" {
		os.Exit(m.Run())
	}
	last, end, n := time.Now(), time.Now().Add(time.Minute), 0
	for last.Before(end) {
		now := time.Now()
		if now.Sub(last) > most/4 {
			n++
		}
		if last = now; n == 3 {
			os.Exit(7)
		}
	}
	os.Exit(1)
}

const most = 2 * time.Second

func TestStalls(t *testing.T) {
	t.Setenv(stopped, "1")
	// The shell is not the last of the processes: it waits for the program, and may be stopped too.
	argv := []string{"/bin/sh", "-c", `"$0" & wait $!`, os.Args[0]}
	code, err := run(options{lanes: 2, rate: 20, most: most}, argv)
	if errors.Is(err, errors.ErrUnsupported) {
		if !strings.Contains(err.Error(), "run it as root") {
			t.Error(err)
		}
		t.Log(err)
		return
	}
	if err != nil || code != 7 {
		t.Errorf("the exit code is %d, %v", code, err)
	}
	if left := groups(t, os.Getpid()); len(left) > 0 {
		t.Error("left: ", left)
	}
}

func TestCommandThatDoesNotStart(t *testing.T) {
	code, err := run(options{lanes: 1, rate: 1, most: time.Second}, []string{"/does/not/exist"})
	if !errors.Is(err, errors.ErrUnsupported) && (code != 127 || err != nil) {
		t.Errorf("%d, %v", code, err)
	}
}

// What an earlier process has left behind, stopped, continues and ends.
func TestSweep(t *testing.T) {
	base, err := newGroup()
	if errors.Is(err, errors.ErrUnsupported) {
		t.Log(err)
		return
	}
	if err != nil {
		t.Fatal(err)
	}
	old := *base
	old.dir = filepath.Join(filepath.Dir(base.dir), fmt.Sprint(prefix, 1<<30)) // no process has this number
	if err := old.make(); err != nil {
		t.Fatal(err)
	}
	lane, err := old.child("lane0")
	if err != nil {
		t.Fatal(err)
	}
	if err := lane.freeze(true); err != nil {
		t.Fatal(err)
	}
	if err := base.remove(); err != nil {
		t.Fatal(err)
	}
	if base, err = newGroup(); err != nil {
		t.Fatal(err)
	}
	if err := base.remove(); err != nil {
		t.Error(err)
	}
	if left := groups(t, 1<<30); len(left) > 0 {
		t.Error("left: ", left)
	}
}

// groups returns the groups of a process.
func groups(t *testing.T, pid int) []string {
	t.Helper()
	var all []string
	for _, pattern := range []string{"/sys/fs/cgroup/*/", "/sys/fs/cgroup/"} {
		list, err := filepath.Glob(pattern + prefix + fmt.Sprint(pid))
		if err != nil {
			t.Fatal(err)
		}
		all = append(all, list...)
	}
	return all
}
