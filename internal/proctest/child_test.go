//go:build linux

package proctest

import (
	"os/exec"
	"strconv"
	"syscall"
	"testing"
)

func TestChildHearsAndTells(t *testing.T) {
	c := RunPiped(t, exec.Command("/bin/sh", "-c", "read a; echo $a; read a; printf '%s\\nlast\\n' $a; exit 3"))
	for _, word := range []string{"one", "two"} {
		c.Tell(word)
		if got := c.Hear(); got != word {
			t.Errorf("it answers %q to %q", got, word)
		}
	}
	c.Out.Await(t, "last\n")
	c.End(3)
	if got := c.Hear(); got != "last" { // what was not heard before the end
		t.Errorf("it has said %q at last", got)
	}
	if got := c.Out.String(); got != "one\ntwo\nlast\n" {
		t.Errorf("it has said %q", got)
	}
}

func TestKilledChildHasNoExitCode(t *testing.T) {
	c := RunPiped(t, exec.Command("/bin/cat"))
	c.Stop()
	c.Kill()
	if code := c.Wait(); code != -1 {
		t.Errorf("exit code %d", code)
	}
	c.Kill() // again
}

// Also those in other sessions, of a process that has ended, without its output.
func TestDescendantsOfChildEndWithTest(t *testing.T) {
	var wait func()
	outer := t
	t.Run("test", func(t *testing.T) {
		c := Run(t, exec.Command("/bin/sh", "-c", "setsid sleep 1000 >/dev/null 2>&1 & echo $!"))
		c.End(0)
		pid, err := strconv.Atoi(c.Hear())
		if err != nil {
			t.Fatal(err)
		}
		wait = ended(outer, pid)
		if err := syscall.Kill(pid, 0); err != nil {
			t.Errorf("it has ended before: %v", err)
		}
	})
	if wait == nil {
		t.Fatal("no process")
	}
	wait()
}
