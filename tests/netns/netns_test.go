//go:build linux

// Package netns tests jobs on two hosts, which are network namespaces of this machine: each with
// addresses and ports of its own, without a common loopback and without shared memory between them.
// The links are plain, slow and lossy, several, cut, and pulled and put back.
package netns

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"tutti/bootstrap"
	"tutti/internal/proctest"
	"tutti/tests/internal/rig"
)

func TestMain(m *testing.M) { rig.Main(m, endpointMain) }

const local = 2 // ranks on each host

// job is a job with a launcher on each host.
type job struct {
	*rig.Stage
	nodes [2]*proctest.Child
	ranks []*rig.Rank
}

// launch starts launchers on both hosts that meet at rdzv, with more flags and variables, and waits
// for the ranks.
func launch(t *testing.T, a, b *rig.Host, rdzv string, env []string, flags ...string) *job {
	t.Helper()
	j := &job{Stage: rig.New(t)}
	env = append(env, "TUTTI_SECRET="+bootstrap.NewSecret())
	for node, h := range []*rig.Host{a, b} {
		j.nodes[node] = j.node(t, h, node, rdzv, env, flags...)
	}
	j.ranks = j.Arrive(2 * local)
	return j
}

func (j *job) node(t *testing.T, h *rig.Host, node int, rdzv string, env []string, flags ...string) *proctest.Child {
	t.Helper()
	return j.StartIn(h.Enter(), env, slices.Concat([]string{rig.Tutti(t), "run", "-n", fmt.Sprint(local), "--nnodes",
		"2",
		"--node-rank", fmt.Sprint(node), "--rdzv", rdzv}, flags, []string{"--", proctest.Self()})...)
}

// finish ends the job well.
func (j *job) finish(t *testing.T) {
	t.Helper()
	rig.Leave(j.ranks)
	for _, p := range j.nodes {
		p.End(0)
	}
	j.Clean()
}

// hosts makes two hosts that are not connected.
func hosts(t *testing.T) (a, b *rig.Host) {
	t.Helper()
	h := rig.NewHosts(t, 2)
	return h[0], h[1]
}

// pair makes two hosts with one link.
func pair(t *testing.T) (a, b *rig.Host) {
	t.Helper()
	a, b = hosts(t)
	rig.Connect(a, b, "data")
	a.Address("data", "10.77.1.1/24")
	b.Address("data", "10.77.1.2/24")
	return a, b
}

// rendezvous is where the hosts of pair meet.
const rendezvous = "10.77.1.1:29400"

// between lists the addresses of the connections of the ranks, but for those with the store.
func (j *job) between() (ends []netip.AddrPort) {
	for _, k := range j.Sockets() {
		if k.Network == "tcp" && !k.Listening && k.Remote.Port() != 29400 && k.Local.Port() != 29400 &&
			slices.ContainsFunc(j.ranks, func(r *rig.Rank) bool { return r.PID == k.PID }) {
			ends = append(ends, k.Local, k.Remote)
		}
	}
	return ends
}

func TestCollectives(t *testing.T) {
	for _, c := range []struct{ transport, topology string }{
		{"auto", "4 ranks on 2 host(s), shared memory and network links"},
		{"tcp", "4 ranks on 2 host(s), network links"},
	} {
		t.Run(c.transport, func(t *testing.T) {
			t.Parallel()
			a, b := pair(t)
			j := launch(t, a, b, rendezvous, nil, "--transport", c.transport)
			for r, reply := range rig.Well(j.ranks, rig.Command{Verb: "join"}) {
				if reply.Topology != c.topology || reply.LocalSize != local {
					t.Errorf("rank %d sees %q and %d ranks on its host, want %q and %d", r, reply.Topology,
						reply.LocalSize, c.topology, local)
				}
			}
			rig.Well(j.ranks, rig.Command{Verb: "verify", Seed: 1, Counts: []int{0, 1, 7, 1000, 100_000, 1_000_000}})
			ends := j.between()
			if len(ends) == 0 {
				t.Error("there are no connections between the hosts")
			}
			for _, e := range ends {
				if c.transport == "auto" && !netip.MustParsePrefix("10.77.1.0/24").Contains(e.Addr()) {
					t.Errorf("a connection at %v, where ranks of a host share memory", e)
				}
			}
			j.finish(t)
		})
	}
	t.Run("IPv6", func(t *testing.T) {
		t.Parallel()
		a, b := hosts(t)
		rig.Connect(a, b, "data")
		a.Address("data", "fd77::1/64")
		b.Address("data", "fd77::2/64")
		j := launch(t, a, b, "[fd77::1]:29400", nil)
		rig.Well(j.ranks, rig.Command{Verb: "join"})
		rig.Well(j.ranks, rig.Command{Verb: "verify", Seed: 1, Counts: []int{1, 1000}})
		j.finish(t)
	})
	t.Run("no transport reaches", func(t *testing.T) {
		t.Parallel()
		a, b := pair(t)
		j := launch(t, a, b, rendezvous, nil, "--transport", "shm", "--timeout", "10s")
		for r, reply := range rig.Each(j.ranks, rig.Command{Verb: "join"}) {
			if f := reply.Fault; f == nil || !slices.ContainsFunc(j.other(r),
				func(o int) bool { return strings.Contains(f.Text, fmt.Sprintf("rank %d", o)) }) {
				t.Errorf("rank %d: %v, want an error that names a rank of the other host", r, f)
			}
		}
		j.fail(t, 1)
	})
}

// other lists the ranks that are not on rank r's host.
func (j *job) other(r int) []int {
	if r < local {
		return []int{2, 3}
	}
	return []int{0, 1}
}

// fail ends the ranks, of which some have failed.
func (j *job) fail(t *testing.T, code int) {
	t.Helper()
	rig.Exit(j.ranks, code)
	for _, p := range j.nodes {
		if p.Wait() == 0 {
			t.Error("exit code 0")
		}
	}
	j.Clean()
}

// The link takes its time and loses packets.
func TestJobOverSlowAndLossyLink(t *testing.T) {
	run := func(t *testing.T, a, b *rig.Host) {
		j := launch(t, a, b, rendezvous, nil, "--timeout", "1m")
		for r, reply := range rig.Well(j.ranks, rig.Command{Verb: "join"}) {
			if reply.LocalSize != local {
				t.Errorf("rank %d sees %d ranks on its host", r, reply.LocalSize)
			}
		}
		rig.Well(j.ranks, rig.Command{Verb: "verify", Seed: 1, Counts: []int{1, 1000}})
		rig.Well(j.ranks, rig.Command{Verb: "allreduce", Seed: 2, Counts: []int{50_000}})
		j.finish(t)
	}
	t.Run("netem", func(t *testing.T) {
		t.Parallel()
		a, b := pair(t)
		for _, h := range []*rig.Host{a, b} {
			if !h.Netem("data", "delay", "5ms", "loss", "1.5%") {
				t.Log("this kernel has no sch_netem: the cable beside this test delays and loses frames in its place")
				return
			}
		}
		run(t, a, b)
	})
	t.Run("cable", func(t *testing.T) {
		t.Parallel()
		a, b := hosts(t)
		lost := rig.SlowCable(a, b, "data", 5*time.Millisecond, 0.015, 0)
		a.Address("data", "10.77.1.1/24")
		b.Address("data", "10.77.1.2/24")
		run(t, a, b)
		if lost.Load() == 0 {
			t.Error("the cable lost no frame")
		}
		t.Logf("the cable lost %d frames", lost.Load())
	})
}

// TestInterfaces runs on hosts with several interfaces, some of which lead nowhere, or have the
// same address on both hosts as those of container engines do.
func TestInterfaces(t *testing.T) {
	for _, c := range []struct {
		name, filter string
		used         []string // networks that connections may use
	}{
		{"none chosen", "", []string{"10.77.1.0/24", "10.77.2.0/24"}},
		{"name", "data", []string{"10.77.1.0/24"}},
		{"exclusion", "^mgmt,docker0,lo", []string{"10.77.1.0/24"}},
		{"network", "10.77.2.0/24", []string{"10.77.2.0/24"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			a, b := hosts(t)
			for _, device := range []string{"data", "mgmt"} {
				rig.Connect(a, b, device)
			}
			for i, h := range []*rig.Host{a, b} {
				h.Address("data", fmt.Sprintf("10.77.1.%d/24", i+1))
				h.Address("mgmt", fmt.Sprintf("10.77.2.%d/24", i+1))
				h.Decoy("spare", fmt.Sprintf("10.88.%d.1/24", i))
				h.Decoy("docker0", "172.17.0.1/16")
			}
			var env []string
			if c.filter != "" {
				env = append(env, "TUTTI_IFNAME="+c.filter)
			}
			j := launch(t, a, b, "10.77.2.1:29400", env)
			rig.Well(j.ranks, rig.Command{Verb: "join"})
			rig.Well(j.ranks, rig.Command{Verb: "verify", Seed: 1, Counts: []int{1, 1000, 100_000}})
			may := func(at netip.Addr) bool {
				return slices.ContainsFunc(c.used, func(n string) bool { return netip.MustParsePrefix(n).Contains(at) })
			}
			ends := j.between()
			if len(ends) == 0 {
				t.Error("there are no connections between the hosts")
			}
			for _, e := range ends {
				if !may(e.Addr()) {
					t.Errorf("a connection at %v, which is not of %v", e, c.used)
				}
			}
			for _, k := range j.Sockets() {
				if c.filter != "" && c.filter[0] != '^' && k.Listening && k.Network == "tcp" &&
					k.Local.Port() != 29400 && !may(k.Local.Addr()) {
					t.Errorf("process %d listens at %v, which is not of %v", k.PID, k.Local, c.used)
				}
			}
			j.finish(t)
		})
	}
	t.Run("none left", func(t *testing.T) {
		t.Parallel()
		a, b := pair(t)
		j := launch(t, a, b, rendezvous, []string{"TUTTI_IFNAME=ib0"}, "--timeout", "3s")
		for r, reply := range rig.Each(j.ranks, rig.Command{Verb: "join"}) {
			if f := reply.Fault; f == nil || !strings.Contains(f.Text, `"ib0" allow none of`) ||
				!strings.Contains(f.Text, fmt.Sprintf("data 10.77.1.%d", 1+r/local)) {
				t.Errorf("rank %d: %v, want the interfaces that there are", r, f)
			}
		}
		j.fail(t, 1)
	})
}

// TestCablePulled pulls the cable in the middle of collectives. The jobs wait for their timeouts,
// which bound their joins as well, at the same time.
func TestCablePulled(t *testing.T) {
	t.Run("for good", func(t *testing.T) {
		t.Parallel()
		type pulled struct {
			*job
			name string
			a    *rig.Host
		}
		var jobs []pulled
		for _, transport := range []string{"auto", "tcp"} {
			for _, counts := range [][]int{{100}, {300_000}} {
				a, b := pair(t)
				// The launchers must not end the job before the ranks notice.
				j := launch(t, a, b, rendezvous, []string{"TUTTI_LEASE=1m"}, "--transport", transport,
					"--timeout", "20s")
				rig.Well(j.ranks, rig.Command{Verb: "join"})
				rig.Well(j.ranks, rig.Command{Verb: "loop", Seed: 1, Counts: counts})
				rig.Well(j.ranks, rig.Command{Verb: "await", Steps: 2})
				jobs = append(jobs, pulled{j, fmt.Sprintf("%s, %d elements", transport, counts[0]), a})
			}
		}
		for _, j := range jobs {
			j.a.IP("link", "set", "data", "down")
		}
		// The leases of all jobs run meanwhile: what takes longer follows in a loop of its own.
		for _, j := range jobs {
			for r, reply := range rig.Each(j.ranks, rig.Command{Verb: "ended"}) {
				f := reply.Fault
				switch {
				case f == nil || f.Kind != "rank" && f.Kind != "timeout":
					t.Errorf("%s: rank %d: %v, want a RankError or a TimeoutError", j.name, r, f)
				case !slices.ContainsFunc(f.Ranks, func(o int) bool { return slices.Contains(j.other(r), o) }):
					t.Errorf("%s: rank %d: %v, want a rank of the other host named", j.name, r, f)
				}
			}
		}
		for _, j := range jobs {
			j.a.IP("link", "set", "data", "up")
		}
		for _, j := range jobs {
			rig.Each(j.ranks, rig.Command{Verb: "close"})
			j.fail(t, 5)
		}
	})
	t.Run("and put back", func(t *testing.T) {
		t.Parallel()
		a, b := pair(t)
		j := launch(t, a, b, rendezvous, nil)
		rig.Well(j.ranks, rig.Command{Verb: "join"})
		rig.Well(j.ranks, rig.Command{Verb: "loop", Seed: 1, Counts: []int{1, 30_000}})
		for range 3 {
			steps := rig.Well(j.ranks, rig.Command{Verb: "await"})[0].Steps
			rig.Well(j.ranks, rig.Command{Verb: "await", Steps: steps + 2})
			a.IP("link", "set", "data", "down")
			a.IP("link", "set", "data", "up")
		}
		steps := rig.Well(j.ranks, rig.Command{Verb: "await"})[0].Steps
		rig.Well(j.ranks, rig.Command{Verb: "await", Steps: steps + 2})
		rig.Well(j.ranks, rig.Command{Verb: "stop"})
		rig.Well(j.ranks, rig.Command{Verb: "ended"})
		j.finish(t)
	})
}

// TestCutBetweenHostsThatReachStore pulls the cable between two hosts which both reach the store
// over another one: that is decided within a few windows, long before TCP gives up.
func TestCutBetweenHostsThatReachStore(t *testing.T) {
	t.Parallel()
	a, b := pair(t)
	rig.Connect(a, b, "store")
	a.Address("store", "10.78.1.1/24")
	b.Address("store", "10.78.1.2/24")
	j := launch(t, a, b, "10.78.1.1:29400", []string{"TUTTI_IFNAME=data"}, "--timeout", "10m", "--on-failure", "shrink")
	rig.Well(j.ranks, rig.Command{Verb: "join"})
	rig.Well(j.ranks, rig.Command{Verb: "loop", Seed: 1, Counts: []int{100}})
	rig.Well(j.ranks, rig.Command{Verb: "await", Steps: 2})
	a.IP("link", "set", "data", "down")
	b.IP("link", "set", "data", "down")
	for r, reply := range rig.Each(j.ranks, rig.Command{Verb: "ended"}) {
		t.Logf("rank %d: %v after %v", r, reply.Fault, reply.Took)
		if reply.Fault == nil {
			t.Errorf("rank %d noticed nothing", r)
		}
	}
	for _, p := range j.nodes {
		p.Kill()
	}
}

// TestReplacedOnTheOtherHost kills two ranks whose places processes on standby on the other host
// take: the ranks that stayed and the new ones choose algorithms for the hosts that there are now.
func TestReplacedOnTheOtherHost(t *testing.T) {
	for _, onFailure := range []string{"shrink", "retry"} {
		t.Run(onFailure, func(t *testing.T) {
			t.Parallel()
			a, b := pair(t)
			j := &job{Stage: rig.New(t)}
			env := []string{"TUTTI_SECRET=" + bootstrap.NewSecret()}
			for node, h := range []*rig.Host{a, b} {
				j.nodes[node] = j.node(t, h, node, rendezvous, env, "--on-failure", onFailure, "--standby", "1",
					"--timeout", "1m")
			}
			came := map[int]*rig.Rank{}
			for range 2 * (local + 1) {
				r := j.Next()
				came[r.Number] = r
			}
			for r := range 2 * local {
				j.ranks = append(j.ranks, came[r])
			}
			rig.Well(j.ranks, rig.Command{Verb: "join"})
			counts := []int{0, 1, 1000, 100_000}
			rig.Well(j.ranks, rig.Command{Verb: "verify", Seed: 1, Counts: counts})
			for step, c := range []struct {
				victim, spare int
				local         []int // ranks on the host of each
			}{
				{1, -2, []int{1, 3, 3, 3}},
				{2, -1, []int{2, 2, 2, 2}}, // as at first, but others
			} {
				j.ranks[c.victim].Signal(syscall.SIGKILL)
				came[c.spare].Tell(rig.Command{Verb: "join"})
				for r, one := range j.ranks {
					if r != c.victim {
						one.Tell(rig.Command{Verb: "replace"})
					}
				}
				j.ranks[c.victim] = came[c.spare]
				for r, one := range j.ranks {
					if reply := one.Hear(); reply.Fault != nil || reply.LocalSize != c.local[r] {
						t.Fatalf("rank %d after the loss of rank %d: %v, with %d ranks on its host, want %d", r,
							c.victim, reply.Fault, reply.LocalSize, c.local[r])
					}
				}
				rig.Well(j.ranks, rig.Command{Verb: "verify", Seed: uint64(2 + step), Counts: counts})
			}
			j.finish(t)
		})
	}
}

// TestLauncherKilled kills the launcher of one host: its ranks die with it, and the other host ends
// the job.
func TestLauncherKilled(t *testing.T) {
	for node := range 2 {
		t.Run(fmt.Sprintf("node %d", node), func(t *testing.T) {
			t.Parallel()
			a, b := pair(t)
			j := launch(t, a, b, rendezvous, nil)
			rig.Well(j.ranks, rig.Command{Verb: "join"})
			rig.Well(j.ranks, rig.Command{Verb: "loop", Seed: 1, Counts: []int{1, 30_000}})
			rig.Well(j.ranks, rig.Command{Verb: "await", Steps: 1})
			j.nodes[node].Signal(syscall.SIGKILL)
			for _, r := range j.ranks {
				r.Gone()
			}
			if code := j.nodes[1-node].Wait(); code <= 0 {
				t.Errorf("exit code %d", code)
			}
			j.Clean()
		})
	}
}

// TestUnknownHost gives a rendezvous whose name does not resolve.
func TestUnknownHost(t *testing.T) {
	a, _ := pair(t)
	for node := range 2 {
		t.Run(fmt.Sprintf("node %d", node), func(t *testing.T) {
			t.Parallel()
			j := &job{Stage: rig.New(t)}
			p := j.node(t, a, node, "head.invalid:29400", []string{"TUTTI_SECRET=" + bootstrap.NewSecret()})
			// Names of hosts that are yet to start may come later, hence no error at once.
			p.Err.Await(t, "the host name of the meeting point head.invalid:29400 (--rdzv) does not resolve yet: "+
				"lookup head.invalid")
			p.Signal(syscall.SIGINT)
			p.End(128 + int(syscall.SIGINT))
			j.Clean()
		})
	}
}
