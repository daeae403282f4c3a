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
	"tutti/p2p"
	"tutti/p2p/linktest"
	"tutti/rdma"
	"tutti/rdma/soft"
)

// traffic sends frames of all sizes in both directions of a link whose lane is up, one step at a
// time, and checks that each arrives once, in order, and over a ring.
type traffic struct {
	t         *testing.T
	ends      [2]*linktest.End
	sent, got [2]int // by the end that sends
}

// size returns the bytes of frame i.
func (c *traffic) size(i int) int { return (i * 7919) % (c.ends[0].MaxFrame() + 1) >> (i % 5 * 2) }

// step has each end send a frame, if there is room, and take one, if there is one.
func (c *traffic) step() {
	c.t.Helper()
	for i, e := range c.ends {
		h, p := linktest.Frame(c.sent[i], c.size(c.sent[i]), nil)
		ok, err := e.Send(&h, p)
		if err != nil {
			c.t.Fatal(err)
		}
		if ok {
			c.sent[i]++
		}
		c.take(1 - i)
		l := inner(e)
		l.mu.Lock()
		tx, rx := l.tx != nil, l.rx != nil
		l.mu.Unlock()
		if !tx || !rx {
			c.t.Fatalf("after %d and %d frames end %d has fallen back to TCP: it sends over a ring %v, receives %v",
				c.sent[0], c.sent[1], i, tx, rx)
		}
	}
}

// take takes a frame that has come to an end, if there is one.
func (c *traffic) take(end int) {
	c.t.Helper()
	h, p, ok, err := c.ends[end].Take()
	if err != nil {
		c.t.Fatal(err)
	}
	if ok {
		if err := linktest.Check(c.got[1-end], c.size(c.got[1-end]), h, p); err != nil {
			c.t.Fatal(err)
		}
		c.got[1-end]++
	}
}

// until steps until done.
func (c *traffic) until(done func() bool) {
	c.t.Helper()
	for late := time.Now().Add(untilMended); !done(); runtime.Gosched() {
		c.step()
		if time.Now().After(late) {
			c.t.Fatalf("after %d and %d frames: it does not come", c.sent[0], c.sent[1])
		}
	}
}

// finish takes what is under way.
func (c *traffic) finish() {
	c.t.Helper()
	for late := time.Now().Add(linktest.Patience); c.got != c.sent; runtime.Gosched() {
		c.take(0)
		c.take(1)
		if time.Now().After(late) {
			c.t.Fatalf("%v frames have arrived of %v", c.got, c.sent)
		}
	}
}

// works reports whether so many rails work at each end.
func works(want int, ends ...*linktest.End) bool {
	for _, e := range ends {
		l := inner(e)
		l.mu.Lock()
		n := 0
		if l.lane != nil {
			for _, r := range l.lane.bulk.rails {
				if r.state == working {
					n++
				}
			}
		}
		l.mu.Unlock()
		if n != want {
			return false
		}
	}
	return true
}

// A lane that works carries everything until a better one does: frames never go over TCP meanwhile.
func TestBetterLaneIsMadeBesideTheOldOne(t *testing.T) {
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
			f := soft.New(soft.Config{Seed: 61, Devices: 4, Late: 3, ReuseNumbers: true, ReuseKeys: true})
			t.Cleanup(f.Close)
			x, y := sidesOf(t, f, twoEach)
			proven(t, 2, x.End, y.End)
			c.down(f, c.device)
			for late := time.Now().Add(linktest.Patience); uses(c.device, x.End, y.End); runtime.Gosched() {
				raised(t, x.End, y.End)
				if time.Now().After(late) {
					t.Fatal("the lane is kept")
				}
			}
			raised(t, x.End, y.End)
			tr := &traffic{t: t, ends: [2]*linktest.End{x.End, y.End}}
			tr.until(func() bool { return tr.got[0] > 100 && tr.got[1] > 100 })
			c.up(f, c.device)
			tr.until(func() bool {
				return works(2, x.End, y.End) && uses(c.device, x.End, y.End)
			})
			tr.finish()
			if at := inner(x.End).lane.port.at.Device; at != "soft1" {
				t.Errorf("frames go over %s", at)
			}
		})
	}
}

// uses reports whether a lane of one of the ends uses a device.
func uses(name string, ends ...*linktest.End) bool {
	return slices.ContainsFunc(ends, func(e *linktest.End) bool {
		l := inner(e)
		l.mu.Lock()
		defer l.mu.Unlock()
		return l.lane != nil && slices.ContainsFunc(l.lane.devices, func(d *device) bool { return d.at.Device == name })
	})
}

// A lane that works goes on untouched while better ones fail, whatever it is that fails, and gives
// way to the first one that does not.
func TestLaneGoesOnWhileBetterOnesFail(t *testing.T) {
	for name, c := range map[string]struct {
		fails string // a call, or "request"
		end   int
	}{
		"objects here": {"make a queue pair", 0}, "objects there": {"make a queue pair", 1},
		"connection here": {"connect", 0}, "connection there": {"connect", 1},
		"requests here": {"request", 0}, "requests there": {"request", 1},
	} {
		t.Run(name, func(t *testing.T) {
			var bad atomic.Bool
			good := map[string]bool{} // queue pairs; set before bad
			at := func(device string) bool {
				return bad.Load() && strings.Contains(twoEach.devices[c.end], device)
			}
			f := soft.New(soft.Config{Seed: 62, Devices: 4, Faults: soft.Faults{
				Call: func(device, call string) syscall.Errno {
					if at(device) && strings.HasPrefix(call, c.fails) {
						return syscall.ENOMEM
					}
					return 0
				},
				Request: func(device string, qp uint32, _ *rdma.SendRequest) rdma.Status {
					if at(device) && c.fails == "request" && !good[fmt.Sprint(device, qp)] {
						return rdma.RetryExceeded
					}
					return rdma.Success
				}}})
			t.Cleanup(f.Close)
			portDown(f, "soft3")
			portDown(f, "soft2")
			x, y := sidesOf(t, f, twoEach)
			proven(t, 1, x.End, y.End)
			was := [2]*lane{inner(x.End).lane, inner(y.End).lane}
			for _, n := range was {
				good[fmt.Sprint(n.port.Name(), n.qp.Number())] = true
				for _, r := range n.bulk.rails {
					good[fmt.Sprint(r.Name(), r.qp.Number())] = true
				}
			}
			bad.Store(true)
			portUp(f, "soft2")
			portUp(f, "soft3")
			tr := &traffic{t: t, ends: [2]*linktest.End{x.End, y.End}}
			tr.until(func() bool {
				if inUse(x.End) != was[0].gen || inUse(y.End) != was[1].gen {
					t.Fatal("the lane was given up")
				}
				return generation(x.End) > 4
			})
			bad.Store(false)
			tr.until(func() bool { return works(2, x.End, y.End) })
			tr.finish()
		})
	}
}

// generation returns the number of the newest lane of an end.
func generation(e *linktest.End) uint64 {
	l := inner(e)
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.m.gen
}

// inUse returns the number of the lane that an end uses, 0 if there is none.
func inUse(e *linktest.End) uint64 {
	l := inner(e)
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.lane == nil {
		return 0
	}
	return l.lane.gen
}

// Data that is under way when a better lane comes is neither moved twice nor carried by frames.
func TestDataGoesOnOverTheBetterLane(t *testing.T) {
	f := soft.New(soft.Config{Seed: 63, Devices: 4, Late: 2})
	t.Cleanup(f.Close)
	portDown(f, "soft3")
	x, y := sidesOf(t, f, twoEach)
	proven(t, 1, x.End, y.End)
	gen := generation(x.End)
	const n = 16 << 20
	r := y.Alloc(t, n)
	to := y.Expose(t, r, 0, n, mem.Write)
	b := pattern(n, 1)
	place(t, x, b[:leastMove], to)
	put, _ := bytesMoved(x)
	var err error
	until := func(done func() bool) {
		t.Helper()
		for late := time.Now().Add(untilMended); !done(); runtime.Gosched() {
			if err := errors.Join(x.Turn(), y.Turn()); err != nil {
				t.Fatal(err)
			}
			if time.Now().After(late) {
				t.Fatal("no better lane")
			}
		}
	}
	portUp(f, "soft3")
	puts, id := 0, uint64(0)
	until(func() bool {
		c, ended := x.Ended[id]
		if c.Err != nil {
			t.Fatal(c.Err)
		}
		if ended || puts == 0 {
			puts++
			if id, err = x.PutTo(b, to, 0, p2p.Signal{}); err != nil {
				t.Fatal(err)
			}
		}
		return inUse(x.End) > gen && inUse(y.End) > gen
	})
	if err := x.Await(id, nil); err != nil || !bytes.Equal(r.Bytes(), b) {
		t.Fatalf("%v, or other bytes have arrived", err)
	}
	if now, _ := bytesMoved(x); now != put+uint64(puts)*n {
		t.Errorf("the device has moved %d bytes of %d", now-put, puts*n)
	}
	place(t, x, b, to)
	if m := movedBy(x); m["soft3"] == 0 {
		t.Errorf("moved by devices: %v", m)
	}
}
