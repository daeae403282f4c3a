package verbs

import (
	"errors"
	"runtime"
	"slices"
	"testing"
	"time"

	"tutti/p2p"
	"tutti/p2p/linktest"
	"tutti/rdma"
	"tutti/rdma/soft"
)

// forgetful is a queue pair whose device forgets its requests.
type forgetful struct{ rdma.QP }

func (forgetful) Post(list []rdma.SendRequest) (int, error) { return len(list), nil }

// An end that sleeps while its device forgets frames wakes, gives up the lane, and sends them
// again.
func TestLateFramesWake(t *testing.T) {
	for end, name := range []string{"dialler", "acceptor"} {
		t.Run(name, func(t *testing.T) {
			f := soft.New(soft.Config{Seed: 81, Devices: 4})
			t.Cleanup(f.Close)
			x, y := linktest.Pair(t, twoEach.open(f, minRing))
			raised(t, x, y)
			if end == 1 {
				x, y = y, x
			}
			l := inner(x)
			l.mu.Lock()
			n := l.lane
			n.qp, n.late = forgetful{n.qp}, 20*time.Millisecond
			l.mu.Unlock()
			const frames = 3
			give(t, x, frames, 100)
			late := time.Now().Add(linktest.Patience)
			for n.err == nil {
				if err := x.Nap(); err != nil || time.Now().After(late) {
					t.Fatalf("the lane is kept: %v", err)
				}
				if h, _, err := x.Recv(); h != nil || err != nil {
					t.Fatal(h, err)
				}
			}
			for got := 0; got < frames; runtime.Gosched() {
				if h, _, err := x.Recv(); h != nil || err != nil {
					t.Fatal(h, err)
				}
				h, p, ok, err := y.Take()
				if ok {
					err = linktest.Check(got, 100, h, p)
					got++
				}
				if err != nil || time.Now().After(late) {
					t.Fatalf("after %d frames: %v", got, err)
				}
			}
			raised(t, x, y)
		})
	}
}

// lossy is a provider whose device loses what queue pairs for frames send, and says nothing.
type lossy struct {
	rdma.Provider
	device string
}

func (p lossy) Open(name string, notify func(rdma.Event)) (rdma.Device, error) {
	d, err := p.Provider.Open(name, notify)
	if err == nil && name == p.device {
		d = lossyDevice{d}
	}
	return d, err
}

type lossyDevice struct{ rdma.Device }

func (d lossyDevice) NewQP(cfg rdma.QPConfig) (rdma.QP, error) {
	q, err := d.Device.NewQP(cfg)
	if err == nil && cfg.SendDepth == sendDepth {
		q = forgetful{q}
	}
	return q, err
}

// Where the nearest port of an end loses everything, the next lane has its frames on another one.
func TestPortThatLosesFramesIsLeft(t *testing.T) {
	for end, bad := range []string{"soft1", "soft0"} {
		t.Run(bad, func(t *testing.T) {
			f := soft.New(soft.Config{Seed: 82, Devices: 4})
			t.Cleanup(f.Close)
			x, y := linktest.Pair(t, twoEach.open(lossy{f, bad}, minRing))
			at, isUp := "", false
			look := func(e *linktest.End) {
				l := inner(e)
				l.mu.Lock()
				defer l.mu.Unlock()
				if n := l.lane; n != nil && l.stageOf(n) >= probing {
					at, isUp = n.port.at.Device, l.tx != nil && l.rx != nil
					if at == bad {
						n.late = time.Millisecond
					}
				}
			}
			for late := time.Now().Add(linktest.Patience); !isUp; runtime.Gosched() {
				for _, e := range []*linktest.End{x, y} {
					if h, _, err := e.Recv(); h != nil || err != nil {
						t.Fatal(h, err)
					}
				}
				look([]*linktest.End{x, y}[end])
				if time.Now().After(late) {
					t.Fatalf("no lane has come up; that on %s goes on", at)
				}
			}
			if at == bad {
				t.Errorf("frames go over %s", at)
			}
		})
	}
}

// unflushed is a queue pair whose device fails it, and flushes nothing.
type unflushed struct{ rdma.QP }

func (unflushed) Fail() error { return nil }

// After the peer has closed the link, an end does not wait for ever for a device that does not say
// that no more frames come.
func TestEndOfTheLinkWithoutFlush(t *testing.T) {
	f := soft.New(soft.Config{Seed: 83})
	t.Cleanup(f.Close)
	a, b := pair(t, f)
	raised(t, a, b)
	inner(a).linger = linktest.Patience
	const frames = 3
	give(t, a, frames, 1000)
	l := inner(b)
	l.mu.Lock()
	l.lane.qp = unflushed{l.lane.qp}
	l.mu.Unlock()
	if err := a.Close(); err != nil {
		t.Fatal(err)
	}
	l.mu.Lock()
	l.lane.late = time.Millisecond
	l.mu.Unlock()
	arrive(t, b, frames, 1000)
	for late := time.Now().Add(linktest.Patience); ; runtime.Gosched() {
		h, _, err := b.Recv()
		if errors.Is(err, p2p.ErrPeerGone) {
			return
		}
		if h != nil || err != nil || time.Now().After(late) {
			t.Fatalf("after the end of the link: frame %v, error %v", h, err)
		}
	}
}

// A link whose frames have all arrived sets no timer.
func TestIdleLinkSetsNoTimer(t *testing.T) {
	f := soft.New(soft.Config{Seed: 84})
	t.Cleanup(f.Close)
	a, b := pair(t, f)
	proven(t, 1, a, b)
	l := inner(a)
	give(t, a, 1, 100)
	arrive(t, b, 1, 100)
	l.mu.Lock()
	n := l.lane
	n.late = linktest.Patience
	n.since = n.since.Add(-n.late / 2)
	l.mu.Unlock()
	for sleeps := false; !sleeps || n.posted != n.finished; {
		if h, _, err := a.Recv(); h != nil || err != nil {
			t.Fatal(h, err)
		}
		if sleeps = !a.Arm(); sleeps && n.posted != n.finished {
			if err := a.Host.Sleep(); err != nil {
				t.Fatal(err)
			}
		}
		a.Disarm()
	}
	if n.alarm != nil && n.alarm.Stop() {
		t.Error("a timer was set")
	}
}

// The device completes all that is sent to an end that does nothing, so that its lane is not given
// up: every frame and position has a receive.
func TestPeerThatDoesNothing(t *testing.T) {
	f := soft.New(soft.Config{Seed: 85})
	t.Cleanup(f.Close)
	a, b := pair(t, f)
	raised(t, a, b)
	give(t, a, batch-1, 0) // b posts no receives again for these
	arrive(t, b, batch-1, 0)
	fill := func(e *linktest.End) (sent int) {
		t.Helper()
		l := inner(e)
		for late := time.Now().Add(linktest.Patience); ; runtime.Gosched() {
			h, p := linktest.Frame(sent, 0, nil)
			ok, err := e.Send(&h, p)
			if err != nil || time.Now().After(late) {
				t.Fatalf("after %d frames: %v", sent, err)
			}
			if ok {
				sent++
			} else if l.tx.out.room() < frameBytes(0) {
				return sent
			}
		}
	}
	arrive(t, a, fill(b), 0)
	fill(a)
	l := inner(a)
	l.mu.Lock()
	defer l.mu.Unlock()
	n := l.tx
	n.ask()
	for late := time.Now().Add(linktest.Patience); n.posted != n.finished; runtime.Gosched() {
		if n.turn(); n.err != nil || time.Now().After(late) {
			t.Fatalf("%d requests are under way: %v", n.posted-n.finished, n.err)
		}
	}
}

// kept is a completion queue with completions that were not taken for long.
type kept struct {
	rdma.CQ
	list *[]rdma.Completion
}

func (c kept) Poll(to []rdma.Completion) (int, error) {
	n := copy(to, *c.list)
	*c.list = (*c.list)[n:]
	return n, nil
}

// An end that was stopped for long takes what has completed, and keeps its lane. A request that it
// has not asked about is no reason to give it up either.
func TestStoppedEndKeepsItsLane(t *testing.T) {
	f := soft.New(soft.Config{Seed: 86})
	t.Cleanup(f.Close)
	a, b := pair(t, f)
	raised(t, a, b)
	l := inner(a)
	l.mu.Lock()
	defer l.mu.Unlock()
	n := l.tx
	n.ask()
	var list []rdma.Completion
	var some [rdma.PollBatch]rdma.Completion
	for late := time.Now().Add(linktest.Patience); len(list) == 0; runtime.Gosched() {
		k, err := n.cq.Poll(some[:])
		if err != nil || time.Now().After(late) {
			t.Fatalf("no completion: %v", err)
		}
		list = slices.Clone(some[:k])
	}
	n.cq, n.late = kept{n.cq, &list}, 2*linktest.Patience
	n.since = n.since.Add(-time.Hour)
	if n.turn(); n.err != nil || n.posted != n.finished {
		t.Fatalf("%d requests are under way: %v", n.posted-n.finished, n.err)
	}
	n.position()
	n.since = n.since.Add(-time.Hour)
	if n.turn(); n.err != nil || len(n.marks) != 1 {
		t.Fatalf("%d questions: %v", len(n.marks), n.err)
	}
	if n.turn(); n.err != nil { // the time begins with the question
		t.Fatal(n.err)
	}
	n.cq = n.cq.(kept).CQ
}
