//go:build linux

package proctest

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// patience bounds every wait; no test depends on its value.
const patience = 30 * time.Second

// role tells this binary what to be for a test.
const role = "PROCTEST_ROLE"

func TestMain(m *testing.M) {
	switch os.Getenv(role) {
	case "":
		os.Exit(m.Run())
	case "parent":
		parent()
	case "child":
		child()
	case "busy":
		busy()
	}
	select {} // until it is killed
}

// parent is a test binary that has started one process, which tells the numbers of all.
func parent() {
	cmd := exec.Command("/proc/self/exe")
	cmd.Env = append(os.Environ(), role+"=child")
	cmd.Stdout = os.Stdout
	if _, err := Start(cmd); err != nil {
		fmt.Println(err)
	}
}

// child has a process of its own in another session, and one in this test binary's way.
func child() {
	pids := []int{os.Getpid()}
	stray := exec.Command("/proc/self/exe")
	stray.Env = append(os.Environ(), role+"=stray")
	stray.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	err := stray.Start()
	if err == nil {
		pids = append(pids, stray.Process.Pid)
		nested := exec.Command("/proc/self/exe")
		nested.Env = append(os.Environ(), role+"=nested")
		var p *Process
		if p, err = Start(nested); err == nil {
			pids = append(pids, p.PID())
		}
	}
	fmt.Println(pids, err)
}

// ended returns a function that waits for the end of a process that is not this one's child.
func ended(t *testing.T, pid int) func() {
	t.Helper()
	fd, err := unix.PidfdOpen(pid, 0)
	if err != nil {
		t.Fatalf("process %d: %v", pid, err)
	}
	t.Cleanup(func() { unix.Close(fd) })
	return func() {
		t.Helper()
		err := error(unix.EINTR)
		n := 0
		for errors.Is(err, unix.EINTR) {
			n, err = unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, int(patience.Milliseconds()))
		}
		if n != 1 {
			line, _ := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid))
			t.Errorf("process %d (%q) does not end: %v", pid, line, err)
			unix.PidfdSendSignal(fd, unix.SIGKILL, nil, 0)
		}
	}
}

func TestProcessesEndWhenStarterIsKilled(t *testing.T) {
	// Not by Start: nothing but what is under test may end these.
	cmd := exec.Command("/proc/self/exe")
	cmd.Env = append(os.Environ(), role+"=parent")
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	line, err := bufio.NewReader(out).ReadString('\n')
	numbers, found := strings.CutSuffix(strings.TrimPrefix(line, "["), "] <nil>\n")
	fields := strings.Fields(numbers)
	if err != nil || !found || len(fields) != 3 {
		cmd.Process.Kill()
		cmd.Wait()
		t.Fatalf("the processes tell %q, %v", line, err)
	}
	var waits []func()
	for _, f := range fields {
		pid, err := strconv.Atoi(f)
		if err != nil {
			t.Fatal(err)
		}
		waits = append(waits, ended(t, pid))
	}
	cmd.Process.Kill()
	cmd.Wait()
	for _, wait := range waits {
		wait()
	}
}

func TestSignalAfterExitFails(t *testing.T) {
	p, err := Start(exec.Command("/bin/true"))
	if err != nil {
		t.Fatal(err)
	}
	if err := p.Wait(); err != nil {
		t.Error(err)
	}
	if err := p.Signal(syscall.SIGKILL); !errors.Is(err, ErrEnded) {
		t.Errorf("signal to a process that has ended: %v", err)
	}
	p.Kill()
	p.Stopped() // does not block
}

func TestStartGroupEndsGroupWithLeader(t *testing.T) {
	out, theirs, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer out.Close()
	cmd := exec.Command("/bin/sh", "-c", "sleep 1000 & echo $!")
	cmd.Stdout = theirs // only the sleeping process has it, too
	p, err := StartGroup(cmd)
	theirs.Close()
	if err != nil {
		t.Fatal(err)
	}
	if err := p.Wait(); err != nil {
		t.Error(err)
	}
	out.SetReadDeadline(time.Now().Add(patience))
	if text, err := io.ReadAll(out); err != nil {
		t.Errorf("what was left in the group lives on: %q, %v", text, err)
	}
}

func TestVariableInEnvironment(t *testing.T) {
	for env, want := range map[string]bool{
		Variable + "=a":             true,
		"X=1\x00" + Variable + "=a": true,
		Variable + "=a.b":           true,
		Variable + "=ab":            false,
		Variable + "=b.a":           false,
		"X" + Variable + "=a":       false,
		"":                          false,
	} {
		if got := has([]byte(env+"\x00"), Variable, "a"); got != want {
			t.Errorf("%q: %v, want %v", env, got, want)
		}
	}
}

// A process that is found in the middle of execve, when it shows no environment, is killed too.
func TestKillAllFindsProcessInExec(t *testing.T) {
	const again = `exec /bin/sh -c "$0" "$0"`
	for range 20 {
		p, err := Start(exec.Command("/bin/sh", "-c", again, again))
		if err != nil {
			t.Fatal(err)
		}
		n := killAll(p.mark, patience)
		p.Signal(syscall.SIGKILL) // if it was missed
		p.Wait()
		if n != 1 {
			t.Fatalf("%d processes were killed, want 1", n)
		}
	}
}

// A process that executes one program after the other is found, with its arguments.
func TestProcessesWithFindsProcessInExec(t *testing.T) {
	const again = `exec /bin/sh -c "$0" "$0"`
	cmd := exec.Command("/bin/sh", "-c", again, again)
	cmd.Env = os.Environ()
	for i := range 50 { // some come before the mark: the shell has an order of its own
		cmd.Env = append(cmd.Env, fmt.Sprintf("LONG_%d=%s", i, strings.Repeat("x", 2000)))
	}
	p, err := Start(cmd)
	if err != nil {
		t.Fatal(err)
	}
	defer p.KillTree()
	want := strings.Join([]string{"/bin/sh", "-c", again, again}, " ")
	for range 300 {
		if pids := ProcessesWith(Variable, p.mark); !slices.Equal(pids, []int{p.PID()}) {
			t.Fatalf("found %v, want %d", pids, p.PID())
		}
		if line := CommandLine(p.PID()); line != want {
			t.Fatalf("its arguments are %q, want %q", line, want)
		}
	}
	p.KillTree()
	p.Wait()
	if pids, line := ProcessesWith(Variable, p.mark), CommandLine(p.PID()); pids != nil || line != "" {
		t.Errorf("found %v, after its end, %q", pids, line)
	}
}

// What was killed has ended, and is not counted again.
func TestKillAllCountsOnce(t *testing.T) {
	for range 10 {
		var out Output
		cmd := exec.Command("/bin/sh", "-c", "for i in 1 2 3 4 5; do setsid sleep 1000 & done; echo all; wait")
		cmd.Stdout = &out
		p, err := Start(cmd)
		if err != nil {
			t.Fatal(err)
		}
		out.Await(t, "all\n")
		if n := killAll(p.mark, patience); n != 6 {
			t.Errorf("%d processes were killed, want 6", n)
		}
		if n := killAll(p.mark, patience); n != 0 {
			t.Errorf("%d processes were left", n)
		}
		p.Wait()
	}
}

// A descendant in another session ends too, and does not hold the output open.
func TestKillTree(t *testing.T) {
	var out Output
	cmd := exec.Command("/bin/sh", "-c", "setsid sleep 1000 & echo $!; exit 3")
	cmd.Stdout = &out
	p, err := Start(cmd)
	if err != nil {
		t.Fatal(err)
	}
	p.Stopped()
	if n := p.KillTree(); n != 1 {
		t.Errorf("%d processes were killed, want 1", n)
	}
	p.Wait()
	if code := cmd.ProcessState.ExitCode(); code != 3 {
		t.Errorf("exit code %d", code)
	}
}

func TestUnread(t *testing.T) {
	stat := func(size, code, start, end string) string {
		f := strings.Fields(strings.Repeat("1 ", 52-3+1))
		f[23-3], f[27-3], f[48-3], f[49-3], f[50-3], f[51-3] = size, code, start, end, start, end
		return "7 (a ) b) " + strings.Join(f, " ") + "\n"
	}
	for text, want := range map[string]bool{
		stat("4096", "0", "0", "0"):    true,  // in execve
		stat("4096", "0", "70", "70"):  true,  // a bit later
		stat("4096", "60", "70", "80"): true,  // since it was found empty
		stat("4096", "60", "80", "80"): false, // empty
		stat("0", "0", "0", "0"):       false, // a process that has ended, or the kernel's own
		"":                             false,
	} {
		for _, a := range []area{arguments, environment} {
			if got := a.unread([]byte(text)); got != want {
				t.Errorf("%s of %q: %v, want %v", a.file, text, got, want)
			}
		}
	}
	text, err := os.ReadFile("/proc/self/stat")
	if err != nil || !environment.unread(text) || !arguments.unread(text) {
		t.Errorf("this process has no environment, or no arguments: %q, %v", text, err)
	}
}
