//go:build linux

package faults

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
	"testing"

	"tutti/internal/proctest"
	"tutti/tests/internal/rig"
)

func contains(s, part string) bool { return strings.Contains(s, part) }

// works runs a job whose launcher, or with ranksOnly whose ranks, are started through a shell that
// does setup first.
func works(t *testing.T, setup string, flags ...string) {
	t.Helper()
	s := rig.New(t)
	if !slices.Contains(flags, "--") {
		flags = append(flags, "--")
	}
	job := s.Start(nil, slices.Concat([]string{"sh", "-c", setup + `exec "$@"`, "sh", rig.Tutti(t), "run"}, flags,
		[]string{s.Program()})...)
	n, _ := strconv.Atoi(flags[1])
	ranks := s.Arrive(n)
	rig.Well(ranks, rig.Command{Verb: "join"})
	rig.Well(ranks, rig.Command{Verb: "verify", Seed: 1, Counts: append([]int{300_000}, mixed...)})
	rig.Leave(ranks)
	job.End(0)
	s.Clean()
}

// TestSmallDevShm shows that /dev/shm, which containers make small, does not matter.
func TestSmallDevShm(t *testing.T) {
	rig.NeedRoot(t, "it mounts something else over /dev/shm, in a mount namespace of its own")
	rig.Need(t, "unshare", "mount", "dd")
	for name, mount := range map[string]string{
		"tiny": "mount -t tmpfs -o size=64k none /dev/shm || exit 90\n",
		"full": "mount -t tmpfs -o size=64k none /dev/shm || exit 90\ndd if=/dev/zero of=/dev/shm/full " +
			"bs=4k 2>/dev/null && exit 91\n",
		"read-only": "mount -t tmpfs -o ro none /dev/shm || exit 90\n",
	} {
		t.Run(name, func(t *testing.T) { works(t, mount, "-n", "4", "--transport", "shm") })
	}
}

// TestLockedMemory runs a job as a user that may not lock memory.
func TestLockedMemory(t *testing.T) {
	rig.NeedRoot(t, "it becomes another user, for root is not bound by limits")
	rig.Need(t, "setpriv")
	works(t, "ulimit -l 0 || exit 90\nset -- setpriv --reuid 65534 --regid 65534 --clear-groups \"$@\"\n", "-n", "4")
}

// Jobs with few file descriptors work, or say which limit it was and what to do.
func TestJobsSayThatDescriptorsAreTooFew(t *testing.T) {
	const n = 8
	for _, limit := range []int{48, 120} { // too few for the launcher, and for the store
		t.Run(fmt.Sprintf("%d for all", limit), func(t *testing.T) {
			s := rig.New(t)
			job := s.Start(nil, "sh", "-c", `ulimit -n "$0" || exit 90; exec "$@"`, strconv.Itoa(limit), rig.Tutti(t),
				"run", "-n", strconv.Itoa(n), "--", proctest.Self())
			job.End(1)
			if !contains(job.Err.String(), "ulimit -n") {
				t.Errorf("it printed %q", job.Err.String())
			}
			s.Clean()
		})
	}
	for _, transport := range []string{"shm", "tcp"} {
		t.Run(transport+"/64 for ranks", func(t *testing.T) {
			works(t, "", "-n", strconv.Itoa(n), "--transport", transport, "--", "sh", "-c",
				"ulimit -n 64 || exit 90\nexec \"$0\"")
		})
		for limit := 12; limit <= 40; limit += 4 { // what a process has before it joins differs
			if testing.Short() && limit%8 > 0 {
				continue
			}
			t.Run(fmt.Sprintf("%s/%d for ranks", transport, limit), func(t *testing.T) {
				t.Parallel()
				s := rig.New(t)
				job := s.Start(nil, rig.Tutti(t), "run", "-n", strconv.Itoa(n), "--transport", transport, "--timeout",
					"10s", "--",
					"sh", "-c", fmt.Sprintf("ulimit -n %d || exit 90\nexec \"$0\"", limit), proctest.Self())
				ranks := s.Arrive(n)
				all := rig.Each(ranks, rig.Command{Verb: "join"})
				ok := func(a rig.Reply) bool { return a.Fault == nil }
				if !slices.ContainsFunc(all, func(a rig.Reply) bool { return !ok(a) }) {
					all = rig.Each(ranks, rig.Command{Verb: "verify", Seed: 1, Counts: mixed})
				}
				if !slices.ContainsFunc(all, func(a rig.Reply) bool {
					return ok(a) ||
						contains(a.Fault.Text, "ulimit -n")
				}) {
					t.Errorf("no rank names the limit: %v", all)
				}
				if !slices.ContainsFunc(all, func(a rig.Reply) bool { return !ok(a) }) {
					t.Log("it works")
				}
				rig.Exit(ranks, 0)
				job.Wait()
				s.Clean()
			})
		}
	}
}

// TestNoFilesLeft lets a program use up its file descriptors before it needs another link.
func TestNoFilesLeft(t *testing.T) {
	for _, transport := range []string{"shm", "tcp"} {
		t.Run(transport, func(t *testing.T) {
			t.Parallel()
			const n = 16
			s := rig.New(t)
			job := s.Start(nil, rig.Tutti(t), "run", "-n", strconv.Itoa(n), "--transport", transport,
				"--timeout", "20s", "--", "sh", "-c", "ulimit -n 64 || exit 90\nexec \"$0\"", proctest.Self())
			ranks := s.Arrive(n)
			rig.Well(ranks, rig.Command{Verb: "join"})
			from := ranks[1] // rank 0 is linked with all others since the join
			from.Do(rig.Command{Verb: "exhaust"})
			failed := 0
			for _, to := range ranks[2:] { // with some of them it is linked since the join
				to.Tell(rig.Command{Verb: "recv", Peer: from.Number, Steps: 10})
				a := from.Do(rig.Command{Verb: "send", Peer: to.Number, Steps: 10})
				to.Hear()
				if a.Fault != nil {
					if failed++; !contains(a.Fault.Text, "ulimit -n") {
						t.Errorf("a message to rank %d: %v, want the limit named", to.Number, a.Fault)
					}
					break
				}
			}
			if failed == 0 {
				t.Error("no message needed a new link: the test tests nothing")
			}
			rig.Each(ranks, rig.Command{Verb: "close"})
			rig.Exit(ranks, 0)
			job.Wait()
			s.Clean()
		})
	}
}

// The launcher has no room for its store.
func TestLauncherSaysThatDiskIsFull(t *testing.T) {
	rig.NeedRoot(t, "it mounts a file system, in a mount namespace of its own")
	rig.Need(t, "unshare", "mount")
	s := rig.New(t)
	job := s.Start(nil, "sh", "-c", "mount -t tmpfs -o size=1m,mode=1777 none \"$TMPDIR\" || exit 90\nexec \"$@\"",
		"sh", rig.Tutti(t), "run", "-n", "2", "--", proctest.Self())
	if code := job.Wait(); code <= 0 || code == 90 {
		t.Errorf("exit code %d", code)
	}
	if !contains(job.Err.String(), "store") || !contains(job.Err.String(), "no space left on device") {
		t.Errorf("it printed %q", job.Err.String())
	}
	s.Clean()
}
