//go:build linux

package proctest

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"syscall"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"
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

// A process stands still when the last of its threads does.
func TestStop(t *testing.T) {
	for range 10 {
		path := filepath.Join(t.TempDir(), "counts")
		c := RunPiped(t, Again([]string{role + "=busy", countsOf + "=" + path}))
		c.Hear()
		counts, err := mapCounts(path)
		if err != nil {
			t.Fatal(err)
		}
		Stop(t, c.PID())
		before := *counts
		for range 1000 {
			runtime.Gosched()
		}
		if after := *counts; after != before {
			t.Errorf("a stopped process went from %v to %v", before, after)
		}
		c.Kill()
	}
}

// countsOf is the path of the counts of a busy process.
const countsOf = "PROCTEST_TEST_COUNTS"

// mapCounts maps what the threads of a busy process count.
func mapCounts(path string) (*[8]uint64, error) {
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	if err := f.Truncate(4096); err != nil {
		return nil, err
	}
	b, err := unix.Mmap(int(f.Fd()), 0, 4096, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		return nil, err
	}
	return (*[8]uint64)(unsafe.Pointer(&b[0])), nil
}

// busy is a process with threads that count.
func busy() {
	counts, err := mapCounts(os.Getenv(countsOf))
	if err != nil {
		fmt.Println(err)
		return
	}
	for i := range counts {
		go func() {
			runtime.LockOSThread()
			for {
				counts[i]++
			}
		}()
	}
	fmt.Println("busy")
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
