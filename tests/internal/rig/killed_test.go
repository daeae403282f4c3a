//go:build linux

package rig

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"tutti/internal/proctest"
)

// victim makes TestJobOfKilledTest run.
const victim = "RIG_VICTIM"

// A job with a launcher, whose ranks have met, and a rank without: their test prints the processes,
// and the test below kills it.
func TestJobOfKilledTest(t *testing.T) {
	if os.Getenv(victim) == "" {
		return // it is a part of the next test
	}
	s := New(t)
	s.Run(nil, "-n", "2")
	Well(s.Arrive(2), Command{Verb: "join"})
	s.Start([]string{"RANK=0", "WORLD_SIZE=1"}, proctest.Self())
	s.Arrive(1)
	text, err := json.Marshal(s.Processes())
	if err != nil {
		t.Fatal(err)
	}
	fmt.Printf("processes %s\n", text)
	select {} // until it is killed
}

func TestJobEndsWhenTestIsKilled(t *testing.T) {
	dir, err := os.MkdirTemp("", "rk") // not t.TempDir: paths of sockets are short
	if err != nil {
		t.Fatal(err)
	}
	defer os.RemoveAll(dir)
	// Not by a stage: nothing but what the victim's own stage does may end these.
	cmd := exec.Command(proctest.Self(), "-test.run=^TestJobOfKilledTest$", "-test.v", "-test.timeout=5m")
	cmd.Env = append(os.Environ(), victim+"=1", "TMPDIR="+dir)
	cmd.Stderr = os.Stderr
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	var processes map[int]string
	said := ""
	for lines := bufio.NewScanner(out); processes == nil && lines.Scan(); said += lines.Text() + "\n" {
		if text, found := strings.CutPrefix(lines.Text(), "processes "); found {
			if err := json.Unmarshal([]byte(text), &processes); err != nil {
				t.Error(err)
			}
		}
	}
	handles := map[int]int{}
	for pid := range processes {
		fd, err := unix.PidfdOpen(pid, 0)
		if err != nil {
			t.Errorf("process %d: %v", pid, err)
			continue
		}
		defer unix.Close(fd)
		handles[pid] = fd
	}
	cmd.Process.Kill()
	cmd.Wait()
	if len(handles) < 5 { // launcher, guard, two ranks, one alone
		t.Fatalf("the test that was to be killed has the processes %v and said\n%s", processes, said)
	}
	for pid, fd := range handles {
		n, err := 0, error(unix.EINTR)
		for errors.Is(err, unix.EINTR) {
			n, err = unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, int(Patience.Milliseconds()))
		}
		if n != 1 {
			t.Errorf("process %d (%s) lives on: %v", pid, processes[pid], err)
			unix.PidfdSendSignal(fd, unix.SIGKILL, nil, 0)
		}
	}
}
