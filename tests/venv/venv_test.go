//go:build linux

// Package venv has tests of venv.sh.
package venv

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
)

// fake is a Python whose version is $VERSION. Its environments have a pip that works.
const fake = `#!/bin/sh
case "$1 $2 $3" in
"-c "*) echo "$VERSION" ;;
"-m venv --clear")
	rm -rf "$4" && mkdir -p "$4/bin" && ln -s /bin/true "$4/bin/python"
	echo "version = $VERSION.1" >"$4/pyvenv.cfg" ;;
*) echo "called with $*" >&2 && exit 1 ;;
esac
`

// A place has the environment of a test, and counts what is installed into it.
type place struct {
	*testing.T
	env, log, python string
}

func newPlace(t *testing.T) *place {
	dir := t.TempDir()
	p := &place{t, filepath.Join(dir, "cache", "env"), filepath.Join(dir, "log"), filepath.Join(dir, "python3")}
	if err := os.WriteFile(p.python, []byte(fake), 0o755); err != nil {
		t.Fatal(err)
	}
	return p
}

// start has venv.sh run a command of the shell in the environment, if it is to be filled.
func (p *place) start(version, what, command string) *exec.Cmd {
	c := exec.CommandContext(p.Context(), "sh", "-euc", `. ./venv.sh
version=mine what=mine
fill() { echo filled >>"$LOG"; [ $version-$what = mine-mine ]; `+command+`; }
venv "$ENVIRONMENT" "$1" fill`, "sh", what)
	c.Env = append(os.Environ(), "ENVIRONMENT="+p.env, "LOG="+p.log, "PYTHON="+p.python, "VERSION="+version)
	return c
}

// run is start, and expects how often the environment has been filled in all.
func (p *place) run(version, what, command string, fills int, fails bool) {
	p.Helper()
	out, err := p.start(version, what, command).CombinedOutput()
	if (err != nil) != fails {
		p.Fatalf("venv.sh: %v\n%s", err, out)
	}
	if n := p.fills(); n != fills {
		p.Fatalf("the environment was filled %d times, want %d", n, fills)
	}
}

func (p *place) fills() int {
	b, err := os.ReadFile(p.log)
	if err != nil {
		p.Fatal(err)
	}
	return strings.Count(string(b), "filled\n")
}

// has tells whether the environment has a file.
func (p *place) has(name string) bool {
	_, err := os.Stat(filepath.Join(p.env, name))
	return err == nil
}

func TestCompleteIsLeftAlone(t *testing.T) {
	p := newPlace(t)
	p.run("3.11", "1.0", "true", 1, false)
	p.run("3.11", "1.0", "true", 1, false)
	// What is installed stays when there is more to install.
	p.run("3.11", "1.1", `[ ! -e "$env/complete" ]; touch "$env/kept"`, 2, false)
	p.run("3.11", "1.2", "true", 3, false)
	if !p.has("kept") {
		t.Error("an environment that works was emptied")
	}
}

func TestInterruptedIsFilledAgain(t *testing.T) {
	p := newPlace(t)
	p.run("3.11", "1.0", "true", 1, false)
	p.run("3.11", "1.1", `touch "$env/kept"; false; true`, 2, true)
	if p.has("complete") {
		t.Error("an environment is complete in which nothing could be installed")
	}
	p.run("3.11", "1.0", "true", 3, false)
	if !p.has("complete") || !p.has("kept") {
		t.Error("the environment is not complete, or was emptied")
	}
}

func TestAnotherPythonMakesItAnew(t *testing.T) {
	p := newPlace(t)
	p.run("3.11", "1.0", `touch "$env/old"`, 1, false)
	p.run("3.1", "1.0", "true", 2, false)
	p.run("3.1", "1.0", "true", 2, false)
	if p.has("old") {
		t.Error("the environment has files of another Python")
	}
	if err := os.Remove(filepath.Join(p.env, "bin", "python")); err != nil {
		t.Fatal(err)
	}
	p.run("3.1", "1.0", "true", 3, false) // the interpreter has gone
}

// Without an interpreter a complete environment is not touched.
func TestNoPython(t *testing.T) {
	p := newPlace(t)
	p.run("3.11", "1.0", "true", 1, false)
	p.python += "-none"
	p.run("3.11", "1.1", "true", 1, true)
	if !p.has("complete") {
		t.Error("the environment is no longer complete")
	}
}

func TestOneAtATime(t *testing.T) {
	p := newPlace(t)
	var all sync.WaitGroup
	for range 8 {
		c := p.start("3.11", "1.0", `mkdir "$env/here"; "$PYTHON" -c >/dev/null; rmdir "$env/here"`)
		all.Go(func() {
			if out, err := c.CombinedOutput(); err != nil {
				t.Errorf("venv.sh: %v\n%s", err, out)
			}
		})
	}
	all.Wait()
	if n := p.fills(); n != 1 {
		t.Errorf("the environment was filled %d times", n)
	}
}

// An environment whose pip could not be installed, as without Debian's python3-venv, is repaired.
func TestRepairs(t *testing.T) {
	p := newPlace(t)
	p.run("3.11", "1.0", `ln -sf /bin/false "$env/bin/python"; false`, 1, true)
	p.run("3.11", "1.0", `venv_install nothing`, 2, false)
	if !p.has("complete") {
		t.Error("the environment is not complete")
	}
}
