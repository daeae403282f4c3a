package launch

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

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
