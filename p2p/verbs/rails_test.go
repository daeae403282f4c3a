package verbs

import (
	"bytes"
	"errors"
	"fmt"
	"runtime"
	"slices"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"tutti/mem"
	"tutti/p2p/linktest"
	"tutti/rdma"
	"tutti/rdma/soft"
)

// portsOf returns ports with names such as "a1" and "b2/IB", for tests of their choice.
func portsOf(names ...string) (list []port) {
	for _, n := range names {
		name, ib := strings.CutSuffix(n, "/IB")
		p := port{device: &device{at: rdma.DevicePort{Device: name, Port: 1}}, path: path{link: rdma.RoCEv2}}
		if ib {
			p.path.link = rdma.InfiniBand
		}
		list = append(list, p)
	}
	return list
}

// TestQueuePairsUseDisjointPorts: each queue pair of a lane has a port at both ends, and disjoint
// ones if there are enough.
func TestQueuePairsUseDisjointPorts(t *testing.T) {
	for _, c := range []struct {
		name             string
		dialler, accepts []port // the nearest first
		per, attempt     int
		frames, rails    string
	}{
		{"one each", portsOf("a"), portsOf("x"), 1, 0, "a-x", "a-x"},
		{"two queue pairs", portsOf("a"), portsOf("x"), 2, 0, "a-x", "a-x a-x"},
		{"two each", portsOf("a", "b"), portsOf("x", "y"), 1, 0, "a-x", "a-x b-y"},
		{"two each, other distances", portsOf("b", "a"), portsOf("x", "y"), 1, 0, "b-y", "a-x b-y"},
		{"two each, second attempt", portsOf("a", "b"), portsOf("y", "x"), 1, 1, "b-y", "a-x b-y"},
		{"two each, third attempt", portsOf("a", "b"), portsOf("y", "x"), 1, 2, "a-x", "a-x b-y"},
		{"two each, two queue pairs", portsOf("a", "b"), portsOf("x", "y"), 2, 0, "a-x", "a-x b-y a-x b-y"},
		{"one and two", portsOf("a"), portsOf("x", "y"), 2, 0, "a-x", "a-x a-y"},
		{"two and one", portsOf("a", "b"), portsOf("x"), 1, 0, "a-x", "a-x b-x"},
		{"three and two", portsOf("a", "b", "c"), portsOf("x", "y"), 1, 0, "a-x", "a-x b-y c-x"},
		{"protocols", portsOf("a", "b/IB", "c"), portsOf("u/IB", "v", "w"), 1, 0, "a-v", "a-v b-u c-w"},
		{"a protocol is missing", portsOf("a", "b/IB"), portsOf("x"), 1, 0, "a-x", "a-x b-"},
		{"its frames", portsOf("b/IB", "a"), portsOf("x"), 1, 0, "", ""},
		{"its frames, second attempt", portsOf("b/IB", "a"), portsOf("x"), 1, 1, "a-x", "a-x b-"},
	} {
		frames, rails := propose(c.dialler, c.per, c.attempt)
		s := setup{frames: frames.path}
		for _, r := range rails {
			r.path.qp = 1
			s.rails = append(s.rails, r.path)
		}
		s.frames.qp = 1
		var all []string
		theirs, others, err := accept(c.accepts, &s)
		for i, o := range others {
			all = append(all, rails[i].at.Device+"-")
			if o.device != nil {
				all[i] += o.at.Device
			}
		}
		pair := ""
		if err == nil {
			pair = frames.at.Device + "-" + theirs.at.Device
		}
		if got := strings.Join(all, " "); pair != c.frames || got != c.rails {
			t.Errorf("%s: frames over %s, want %s; rails %s, want %s (%v)", c.name, pair, c.frames, got, c.rails, err)
		}
	}
	var many []port
	for i := range 40 {
		many = append(many, portsOf(fmt.Sprintf("d%02d", 39-i))...)
	}
	frames, rails := propose(many, 3, 0)
	if len(rails) != maxRails || frames.at.Device != "d39" || rails[0].at.Device != "d24" {
		t.Errorf("%d rails on %v, frames on %v", len(rails), names(rails), frames.at)
	}
}

// untilMended bounds waits for rails: on a busy machine one may be tried in vain, again after 10 s,
// and after 20.
const untilMended = 3 * linktest.Patience

// proven waits until so many rails work at each end.
func proven(t testing.TB, want int, ends ...*linktest.End) {
	t.Helper()
	for late := time.Now().Add(untilMended); ; runtime.Gosched() {
		raised(t, ends...)
		ready := 0
		last := ""
		for _, e := range ends {
			l := inner(e)
			l.mu.Lock()
			if n := l.lane; n != nil {
				works := 0
				for _, r := range n.bulk.rails {
					if r.state == working {
						works++
					}
				}
				if works == want {
					ready++
				}
				last += fmt.Sprintf(" %v", n.bulk.names())
			}
			l.mu.Unlock()
		}
		if ready == len(ends) {
			return
		}
		if time.Now().After(late) {
			t.Fatalf("not %d rails:%s", want, last)
		}
	}
}

// movedBy returns how many bytes each device of a side has moved.
func movedBy(s *linktest.Side) map[string]uint64 {
	t := s.Node.T.(*Transport)
	t.mu.Lock()
	defer t.mu.Unlock()
	m := map[string]uint64{}
	for _, d := range t.devices {
		m[d.at.Device] = d.moved.Load()
	}
	return m
}

// shares puts n bytes and checks that the named devices of x, and no others, have moved them in
// about equal parts.
func shares(t *testing.T, x *linktest.Side, to *mem.Remote, n int, devices ...string) {
	t.Helper()
	before := movedBy(x)
	place(t, x, pattern(n, n), to)
	for name, total := range movedBy(x) {
		part := int(total - before[name])
		if want := n / len(devices); slices.Contains(devices, name) {
			if part < want*2/3 || part > want*4/3 {
				t.Errorf("%s has moved %d bytes of %d; want about %d", name, part, n, want)
			}
		} else if part > 0 {
			t.Errorf("%s has moved %d bytes", name, part)
		}
	}
}

// The data of one put goes over all rails.
func TestPutGoesOverAllRails(t *testing.T) {
	for name, p := range wide {
		t.Run(name, func(t *testing.T) {
			f := soft.New(soft.Config{Seed: 41, Devices: 4})
			t.Cleanup(f.Close)
			x, y := sidesOf(t, f, p)
			rails, devices := max(p.queuePairs, 1), []string{"soft1"}
			if p.devices[0] != "" {
				rails, devices = 2*rails, []string{"soft1", "soft3"}
			}
			proven(t, rails, x.End, y.End)
			const n = 8 << 20
			to := y.Expose(t, y.Alloc(t, n), 0, n, mem.Write)
			shares(t, x, to, n, devices...)
			l := inner(x.End)
			for _, r := range l.lane.bulk.rails {
				if want := uint64(n / rails); r.total < want*2/3 || r.total > want*4/3 {
					t.Errorf("rail %d has moved %d bytes; want about %d", r.number, r.total, want)
				}
			}
			moveBothWays(t, x, y)
			moveBothWays(t, y, x)
		})
	}
}

// Ends with different numbers of devices are connected, and use what they have.
func TestUnequalDevices(t *testing.T) {
	one, two, three := "=soft0", "=soft1,soft2", "=soft0,soft3,soft4"
	for _, c := range []struct {
		name       string
		devices    [2]string // of the dialler and the acceptor
		queuePairs int
		rails      int
		used       [2]string
	}{
		{"two and one", [2]string{two, one}, 1, 2, [2]string{two, one}},
		{"one and two", [2]string{one, two}, 1, 1, [2]string{one, "=soft1"}},
		{"one and two, two queue pairs", [2]string{one, two}, 2, 2, [2]string{one, two}},
		{"three and two", [2]string{three, two}, 2, 6, [2]string{three, two}},
		{"two and three", [2]string{two, three}, 1, 2, [2]string{two, "=soft0,soft3"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			f := soft.New(soft.Config{Seed: 42, Devices: 5})
			t.Cleanup(f.Close)
			x, y := sidesOf(t, f, ports{c.devices, c.queuePairs})
			proven(t, c.rails, x.End, y.End)
			moveBothWays(t, x, y)
			const size = 12 << 20
			for i, s := range []*linktest.Side{x, y} {
				other := []*linktest.Side{y, x}[i]
				to := other.Expose(t, other.Alloc(t, size), 0, size, mem.Write)
				shares(t, s, to, size, strings.Split(c.used[i][1:], ",")...)
			}
		})
	}
}

// A port that goes down under load costs nothing but its part of the bandwidth, and is used again
// when it is back. So is a device that was removed. The frames' one is no exception.
func TestPortsReturn(t *testing.T) {
	for _, c := range []struct {
		name, device string // of the four
		down, up     func(f *soft.Fabric, device string)
	}{
		{"port of frames here", "soft1", portDown, portUp},
		{"port of frames there", "soft0", portDown, portUp},
		{"other port here", "soft3", portDown, portUp},
		{"other port there", "soft2", portDown, portUp},
		{"device of frames here", "soft1", (*soft.Fabric).Remove, (*soft.Fabric).Restore},
		{"other device there", "soft2", (*soft.Fabric).Remove, (*soft.Fabric).Restore},
	} {
		t.Run(c.name, func(t *testing.T) {
			f := soft.New(soft.Config{Seed: 43, Devices: 4, Late: 3, ReuseKeys: true, ReuseNumbers: true,
				Delayed: []string{"soft0", "soft1", "soft2", "soft3"}})
			t.Cleanup(f.Close)
			x, y := sidesOf(t, f, twoEach)
			proven(t, 2, x.End, y.End)
			const size, part = 8 << 20, 256 << 10
			to := y.Expose(t, y.Alloc(t, size), 0, size, mem.Write)
			shares(t, x, to, size, "soft1", "soft3")
			// Rounds of survive with faults: down in the first, up in the next one.
			survive(t, x, y, 12, 3, 900_000, func(i int) {
				if i%2 == 0 {
					c.down(f, c.device)
				} else {
					c.up(f, c.device)
				}
			})
			proven(t, 2, x.End, y.End)
			// in reports whether the device is in use, by a rail that works.
			in := func(device string) bool {
				for _, e := range []*linktest.End{x.End, y.End} {
					l := inner(e)
					l.mu.Lock()
					defer l.mu.Unlock()
					if n := l.lane; n != nil && slices.ContainsFunc(n.bulk.rails, func(r *rail) bool {
						return r.device != nil && r.state == working && r.Name() == device
					}) {
						return true
					}
				}
				return false
			}
			// until puts until that is so, and a put has gone by RDMA as a whole.
			until := func(used bool) {
				t.Helper()
				for late := time.Now().Add(untilMended); ; {
					put, _ := bytesMoved(x)
					place(t, x, pattern(part, 3), to)
					if now, _ := bytesMoved(x); now == put+part && in(c.device) == used {
						return
					}
					if time.Now().After(late) {
						t.Fatalf("%s in use: %v", c.device, in(c.device))
					}
				}
			}
			c.down(f, c.device)
			until(false)
			c.up(f, c.device)
			until(true)
			proven(t, 2, x.End, y.End)
			if at := inner(x.End).lane.port.at.Device; at != "soft1" {
				t.Errorf("frames go over %s", at)
			}
			shares(t, x, to, size, "soft1", "soft3")
		})
	}
}

func portDown(f *soft.Fabric, device string) { f.SetPort(device, 1, false) }
func portUp(f *soft.Fabric, device string)   { f.SetPort(device, 1, true) }

// A port that is down when the transport begins to listen is used when it is up.
func TestPortsThatComeLate(t *testing.T) {
	f := soft.New(soft.Config{Seed: 49, Devices: 4})
	t.Cleanup(f.Close)
	portDown(f, "soft1") // where frames go here
	portDown(f, "soft2")
	x, y := sidesOf(t, f, twoEach)
	proven(t, 1, x.End, y.End)
	portUp(f, "soft2")
	portUp(f, "soft1")
	proven(t, 2, x.End, y.End)
	const size = 8 << 20
	to := y.Expose(t, y.Alloc(t, size), 0, size, mem.Write)
	shares(t, x, to, size, "soft1", "soft3")
	if at := inner(x.End).lane.port.at.Device; at != "soft1" {
		t.Errorf("frames go over %s", at)
	}
}

// Ports that change give up no lane that cannot use them.
func TestPortsThatDoNotMatter(t *testing.T) {
	f := soft.New(soft.Config{Seed: 50, Devices: 3})
	t.Cleanup(f.Close)
	x, y := sidesOf(t, f, ports{devices: [2]string{"=soft0", "=soft1,soft2"}})
	proven(t, 1, x.End, y.End)
	for _, d := range []string{"soft0", "soft1", "soft2"} {
		f.MoveGIDs(d, 1, 0)
	}
	for late := time.Now().Add(linktest.Patience); ; {
		raised(t, x.End, y.End)
		noticed := 0
		for e, changes := range map[*linktest.End]uint64{x.End: 1, y.End: 2} {
			l := inner(e)
			l.mu.Lock()
			if l.lane != nil && l.lane.ups == changes {
				noticed++
			}
			l.mu.Unlock()
		}
		if noticed == 2 {
			break
		}
		if time.Now().After(late) {
			t.Fatal("the changes go unnoticed")
		}
	}
	if gen := inner(x.End).m.gen; gen != 1 {
		t.Errorf("lane %d", gen)
	}
}

// A rail over which nothing passes is left out, and does no harm. It is tried again when ports
// change.
func TestRailsThatNeverWork(t *testing.T) {
	var broken atomic.Bool
	broken.Store(true)
	f := soft.New(soft.Config{Seed: 44, Devices: 4, Faults: soft.Faults{
		Request: func(device string, _ uint32, r *rdma.SendRequest) rdma.Status {
			if (device == "soft2" || device == "soft3") && broken.Load() {
				return rdma.RetryExceeded
			}
			return rdma.Success
		}}})
	t.Cleanup(f.Close)
	x, y := sidesOf(t, f, twoEach)
	proven(t, 1, x.End, y.End)
	mendAfter(time.Hour, x, y)
	const size = 8 << 20
	to := y.Expose(t, y.Alloc(t, size), 0, size, mem.Write)
	shares(t, x, to, size, "soft1")
	if gen := inner(x.End).m.gen; gen != 1 {
		t.Errorf("lane %d", gen)
	}
	broken.Store(false)
	f.MoveGIDs("soft3", 1, 1)
	proven(t, 2, x.End, y.End)
	shares(t, x, to, size, "soft1", "soft3")
}

// mendAfter sets after which time rails without use are tried again.
func mendAfter(d time.Duration, sides ...*linktest.Side) {
	for _, s := range sides {
		l := inner(s.End)
		l.mu.Lock()
		l.mend = d
		l.mu.Unlock()
	}
}

// Without an event, it is tried again after a while.
func TestRailsAreMended(t *testing.T) {
	var broken atomic.Bool
	broken.Store(true)
	f := soft.New(soft.Config{Seed: 45, Devices: 4, Faults: soft.Faults{
		Request: func(device string, _ uint32, r *rdma.SendRequest) rdma.Status {
			if (device == "soft2" || device == "soft3") && broken.Load() {
				return rdma.RetryExceeded
			}
			return rdma.Success
		}}})
	t.Cleanup(f.Close)
	x, y := sidesOf(t, f, twoEach)
	proven(t, 1, x.End, y.End)
	broken.Store(false)
	mendAfter(time.Nanosecond, x, y)
	proven(t, 2, x.End, y.End)
}

// Frames go over another port if nothing passes the nearest one, which looks well.
func TestFramesMoveToAnotherPort(t *testing.T) {
	f := soft.New(soft.Config{Seed: 46, Devices: 4, Faults: soft.Faults{
		Request: func(device string, _ uint32, r *rdma.SendRequest) rdma.Status {
			if device == "soft0" || device == "soft1" {
				return rdma.RetryExceeded
			}
			return rdma.Success
		}}})
	t.Cleanup(f.Close)
	x, y := sidesOf(t, f, twoEach)
	proven(t, 1, x.End, y.End)
	for s, want := range map[*linktest.Side]string{x: "soft3", y: "soft2"} {
		if n := inner(s.End).lane; n.port.at.Device != want {
			t.Errorf("frames go over %v, want %s", n.port.at, want)
		}
	}
	moveBothWays(t, x, y)
}

// A device that refuses a queue pair for data is left out, at either end.
func TestRailsThatCannotBeMade(t *testing.T) {
	for _, device := range []string{"soft2", "soft3"} {
		f := soft.New(soft.Config{Seed: 47, Devices: 4, Faults: soft.Faults{
			Call: func(at, call string) syscall.Errno {
				if at == device && call == "make a queue pair" {
					return syscall.ENOMEM
				}
				return 0
			}}})
		x, y := sidesOf(t, f, twoEach)
		proven(t, 1, x.End, y.End)
		moveBothWays(t, x, y)
		moveBothWays(t, y, x)
		if err := errors.Join(x.Close(), y.Close()); err != nil {
			t.Error(err)
		}
		f.Close()
	}
}

// Without a rail, data goes in frames.
func TestNoRails(t *testing.T) {
	f := soft.New(soft.Config{Seed: 48, Faults: soft.Faults{
		Request: func(_ string, _ uint32, r *rdma.SendRequest) rdma.Status {
			if r.ID == railDepth { // of a rail's probe; frames have no identifiers
				return rdma.RetryExceeded
			}
			return rdma.Success
		}}})
	t.Cleanup(f.Close)
	x, y := sides(t, f)
	const n = 1 << 20
	r := y.Alloc(t, n)
	to := y.Expose(t, r, 0, n, mem.Read|mem.Write)
	for round := range 3 {
		b, back := pattern(n, round), make([]byte, n)
		place(t, x, b, to)
		if err := x.Await(x.GetFrom(back, to, 0)); err != nil || !bytes.Equal(back, b) || !bytes.Equal(r.Bytes(), b) {
			t.Fatalf("round %d: %v, or other bytes", round, err)
		}
	}
	proven(t, 0, x.End, y.End)
	if put, got := bytesMoved(x); put+got > 0 {
		t.Errorf("%d bytes were put and %d got", put, got)
	}
}

// A lane whose address has moved is given up when the device says so, not when its requests have
// been repeated in vain.
func TestMovedAddresses(t *testing.T) {
	for _, device := range []string{"soft0", "soft1"} {
		t.Run(device, func(t *testing.T) {
			f := soft.New(soft.Config{Seed: 4})
			t.Cleanup(f.Close)
			a, b := pair(t, f)
			raised(t, a, b)
			old := [2]*lane{inner(a).lane, inner(b).lane}
			f.MoveGIDs(device, 1, 1)
			for late := time.Now().Add(linktest.Patience); ; {
				raised(t, a, b)
				if inner(a).lane != old[0] && inner(b).lane != old[1] {
					break
				}
				if time.Now().After(late) {
					t.Fatal("the lane is kept")
				}
			}
			if text := fmt.Sprint(old[0].err, old[1].err); !strings.Contains(text, "the address of "+device) {
				t.Errorf("%v and %v, want the address of %s", old[0].err, old[1].err, device)
			}
		})
	}
}
