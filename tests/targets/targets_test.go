//go:build linux

// Package targets has tests of the Makefile, with programs that stand in for go, gofmt and apt-get.
package targets

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// run makes a target with a script in the place of go. PATH has nothing but these programs.
func run(t *testing.T, script string, env []string, args ...string) (string, error) {
	t.Helper()
	tools, err := exec.LookPath("make")
	if err != nil {
		t.Skipf("there is no make: %v", err)
	}
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "go"), []byte("#!/bin/sh\n"+script), 0o755); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"sh", "id", "grep", "dirname"} {
		path, err := exec.LookPath(name)
		if err == nil {
			err = os.Symlink(path, filepath.Join(dir, name))
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	cmd := exec.CommandContext(t.Context(), tools, args...)
	cmd.Dir = "../.."
	cmd.Env = append([]string{"PATH=" + dir, "HOME=" + dir}, env...)
	out, err := cmd.CombinedOutput()
	return string(out), err
}

// A package that cannot be listed is not left out silently.
func TestFailedListIsAnError(t *testing.T) {
	for _, target := range []string{"race-others", "test-unit"} {
		const script = `[ "$1" != list ] || { echo tutti/some; exit $FAILS; }; echo "called: $*"`
		for fails, want := range map[string]bool{"0": true, "1": false} {
			out, err := run(t, script, []string{"FAILS=" + fails}, target)
			if (err == nil) != want || strings.Contains(out, "tutti/some") != want {
				t.Errorf("%s where go list ends with %s: %v\n%s", target, fails, err, out)
			}
		}
	}
}

func TestLintNeedsGofmt(t *testing.T) {
	out, err := run(t, `echo "called: $*"`, nil, "lint")
	if err == nil || strings.Contains(out, "called") {
		t.Errorf("make lint without gofmt: %v\n%s", err, out)
	}
}

// Root's cache is not filled in the place of that of a user who calls sudo.
func TestOwnCache(t *testing.T) {
	for _, target := range []string{"deps-peers", "deps-cuda"} {
		for command, want := range map[string]bool{"/usr/bin/make " + target: true, "/bin/bash": false, "": false} {
			out, err := run(t, "", []string{"SUDO_COMMAND=" + command}, target, "APT_GET=echo called: apt-get; exit 3;")
			refused, called := strings.Contains(out, "without sudo"), strings.Contains(out, "called: apt-get\n")
			if err == nil || refused != want || called == want {
				t.Errorf("make %s by %q: %v\n%s", target, command, err, out)
			}
		}
	}
}
