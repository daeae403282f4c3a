package verbs

import (
	"bytes"
	"errors"
	"log/slog"
	"math"
	"runtime"
	"slices"
	"strings"
	"sync"
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

// A queue pair that cannot be closed counts as open until it is: what its requests may still change
// is not used again, and the keys that the peer has stand for no other memory.
func TestQueuePairsThatCannotBeClosed(t *testing.T) {
	for end, device := range []string{"soft1", "soft0"} {
		t.Run(device, func(t *testing.T) {
			var refuse, fail atomic.Bool
			var refused atomic.Int64
			f := soft.New(soft.Config{Seed: 71, Faults: soft.Faults{
				Call: func(at, call string) syscall.Errno {
					if at == device && strings.HasPrefix(call, "destroy") && refuse.Load() {
						refused.Add(1)
						return syscall.EBUSY
					}
					return 0
				},
				Request: func(_ string, _ uint32, r *rdma.SendRequest) rdma.Status {
					if r.Op == rdma.Write && r.ID < railDepth && len(r.Segments) == 1 &&
						fail.CompareAndSwap(true, false) {
						return rdma.RetryExceeded
					}
					return rdma.Success
				}}})
			t.Cleanup(f.Close)
			x, y := sides(t, f)
			const n = 1 << 20
			r := y.Alloc(t, n)
			to := y.Expose(t, r, 0, n, mem.Write)
			b := pattern(n, 1)
			place(t, x, b[:leastMove], to)
			s := [2]*linktest.Side{x, y}[end]
			var log bytes.Buffer
			errorsOnly := &slog.HandlerOptions{Level: slog.LevelError}
			s.Node.T.(*Transport).log = slog.New(slog.NewTextHandler(&log, errorsOnly))
			stuck := inner(s.End).lane
			refuse.Store(true)
			fail.Store(true)
			id, err := x.PutTo(b, to, 0, p2p.Signal{})
			if err != nil {
				t.Fatal(err)
			}
			turn := func() {
				t.Helper()
				if err := x.Turn(); err != nil {
					t.Fatal(err)
				}
				if err := y.Turn(); err != nil {
					t.Fatal(err)
				}
				runtime.Gosched()
			}
			late := time.Now().Add(linktest.Patience)
			for tries := int64(4 * 2); refused.Load() < tries; turn() { // those of two queue pairs
				if _, ended := x.Ended[id]; ended || time.Now().After(late) {
					t.Fatalf("after %d tries to close queue pairs the put has ended: %v", refused.Load(), ended)
				}
			}
			if err := y.Withdraw(to); err != nil {
				t.Fatal(err)
			}
			if end == 1 && stuck.port.keys.Len() == 0 {
				t.Error("the key stands for other memory while the peer's requests may come")
			}
			refuse.Store(false)
			if err := x.Await(id, nil); err == nil {
				t.Error("a put to memory that was withdrawn has ended well")
			}
			for ; stuck.port.keys.Len() > 0 || !isClosed(s, stuck); turn() {
				if time.Now().After(late) {
					t.Fatalf("%d keys are withheld", stuck.port.keys.Len())
				}
			}
			if lines := strings.Count(log.String(), "level=ERROR"); lines != 1 {
				t.Errorf("%d errors are logged, want 1: %s", lines, &log)
			}
		})
	}
}

// watch is a log in which a text is looked for.
type watch struct {
	text string
	seen atomic.Bool
}

func (w *watch) Write(b []byte) (int, error) {
	if bytes.Contains(b, []byte(w.text)) {
		w.seen.Store(true)
	}
	return len(b), nil
}

// stubborn is a queue pair whose device has not begun its requests, refuses to close it while
// refuse is set, and refuses to fail it so many times.
type stubborn struct {
	rdma.QP
	mu     sync.Mutex
	refuse bool
	fails  int
	chain  []rdma.SendRequest
}

func (s *stubborn) Post(chain []rdma.SendRequest) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, r := range chain {
		r.Segments = slices.Clone(r.Segments)
		s.chain = append(s.chain, r)
	}
	return len(chain), nil
}

// begin has the device begin the requests, and returns their number.
func (s *stubborn) begin() (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	n, err := s.QP.Post(s.chain)
	s.chain = nil
	return n, err
}

func (s *stubborn) Fail() error {
	s.mu.Lock()
	if s.fails > 0 {
		s.fails--
		s.mu.Unlock()
		return syscall.EIO
	}
	s.mu.Unlock()
	_, err := s.begin()
	return errors.Join(err, s.QP.Fail())
}

func (s *stubborn) Close() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.refuse {
		return syscall.EBUSY
	}
	return s.QP.Close()
}

// What was cancelled does not use its local memory any more, also if the device refuses to close
// the queue pair. Cancel waits until the device has failed it instead. If the device refuses that,
// too, for as long as Close of the link would wait, Cancel says so.
func TestCancelWithQueuePairsThatStay(t *testing.T) {
	for name, c := range map[string]struct {
		fails int
		used  bool // the memory is, in the end
	}{
		"failed at once": {},
		"failed late":    {fails: 3},
		"not failed":     {fails: math.MaxInt, used: true},
	} {
		t.Run(name, func(t *testing.T) {
			f := soft.New(soft.Config{Seed: 79, Late: 8})
			t.Cleanup(f.Close)
			x, y := sides(t, f)
			log := watch{text: "memory of a put or get that has ended may still be used"}
			x.Node.T.(*Transport).log = slog.New(slog.NewTextHandler(&log, nil))
			const n = 1 << 20
			r := y.Alloc(t, n)
			to := y.Expose(t, r, 0, n, mem.Read|mem.Write)
			place(t, x, make([]byte, leastMove), to)
			copy(r.Bytes(), pattern(n, 1))
			l := inner(x.End)
			rail := l.lane.bulk.rails[0]
			qp := &stubborn{QP: rail.qp, refuse: true, fails: c.fails}
			rail.qp = qp
			l.linger = linktest.Patience
			if c.used {
				l.linger = time.Millisecond
			}
			var b [2][]byte // the second one is cancelled when the lane was given up
			var ids [2]uint64
			for i := range b {
				var err error
				b[i] = make([]byte, n)
				if ids[i], err = x.GetFrom(b[i], to, 0); err != nil {
					t.Fatal(err)
				}
			}
			for i, id := range ids {
				x.Rma.Cancel(id)
				clear(b[i]) // the caller uses it again
			}
			if !c.used {
				begun, err := qp.begin()
				for out := make([]rdma.Completion, 1); begun > 0 && err == nil; runtime.Gosched() {
					var k int
					k, err = rail.cq.Poll(out)
					begun -= k
				}
				if err != nil {
					t.Fatal(err)
				}
				for i := range b {
					if !bytes.Equal(b[i], make([]byte, n)) {
						t.Errorf("memory of get %d, which was cancelled, has changed", i)
					}
				}
			}
			for _, id := range ids {
				if err := x.Await(id, nil); !errors.Is(err, p2p.ErrCancelled) {
					t.Error(err)
				}
			}
			if said := log.seen.Load(); said != c.used {
				t.Errorf("it is said that memory may be used: %v, want %v", said, c.used)
			}
			qp.mu.Lock()
			qp.refuse = false
			qp.mu.Unlock()
			raised(t, x.End, y.End) // the link goes on
		})
	}
}

// isClosed reports whether a lane of s is.
func isClosed(s *linktest.Side, n *lane) bool {
	l := inner(s.End)
	l.mu.Lock()
	defer l.mu.Unlock()
	return n.closed
}

// routes notes how queue pairs are connected.
type routes struct {
	rdma.Provider
	mu   sync.Mutex
	list []rdma.Route
}

func (r *routes) Open(name string, notify func(rdma.Event)) (rdma.Device, error) {
	d, err := r.Provider.Open(name, notify)
	return routedDevice{d, r}, err
}

type routedDevice struct {
	rdma.Device
	to *routes
}

func (d routedDevice) NewQP(cfg rdma.QPConfig) (rdma.QP, error) {
	q, err := d.Device.NewQP(cfg)
	return routedQP{q, d.to}, err
}

type routedQP struct {
	rdma.QP
	to *routes
}

func (q routedQP) Connect(r *rdma.Route) error {
	q.to.mu.Lock()
	defer q.to.mu.Unlock()
	q.to.list = append(q.to.list, *r)
	return q.QP.Connect(r)
}

// Close waits as long as a device repeats a packet, for all links of a transport that is closed
// together.
func TestLingerTime(t *testing.T) {
	f := soft.New(soft.Config{Seed: 72})
	t.Cleanup(f.Close)
	to := &routes{Provider: f}
	var made []*Transport
	open := ports{}.open(to, minRing)
	a, b := linktest.Pair(t, func(tb testing.TB) p2p.Transport {
		tr := open(tb)
		made = append(made, tr.(*Transport))
		return tr
	})
	raised(t, a, b)
	to.mu.Lock()
	defer to.mu.Unlock()
	l := inner(a)
	for _, r := range to.list {
		if repeats := time.Duration(r.Retries+1) * (4096 * time.Nanosecond << r.Timeout); l.linger < repeats {
			t.Errorf("Close lingers for %v, and a device repeats packets for %v", l.linger, repeats)
		}
	}
	if d := made[0].remaining(time.Hour); d != time.Hour {
		t.Errorf("a link lingers for %v", d)
	}
	for _, tr := range made {
		if err := tr.Close(); err != nil {
			t.Error(err)
		}
		if d := tr.remaining(time.Hour); d > tr.lingerTime() {
			t.Errorf("a link of a transport that is closed lingers for %v", d)
		}
	}
}

// With a short timeout of packets Close waits as long as with the default. With a long one it does
// not wait until the device gives up.
func TestLingerTimeHasBounds(t *testing.T) {
	usual := New(Config{}).lingerTime()
	for n, want := range map[uint8]time.Duration{1: usual, 31: time.Minute} {
		if d := New(Config{Settings: rdma.Settings{Timeout: n}}).lingerTime(); d != want {
			t.Errorf("with timeout %d Close lingers for %v, want %v", n, d, want)
		}
	}
}

// late is a provider whose device soft0 completes nothing while hold is set, until a queue pair of
// it is failed.
type late struct {
	rdma.Provider
	hold atomic.Bool
}

func (l *late) Open(name string, notify func(rdma.Event)) (rdma.Device, error) {
	d, err := l.Provider.Open(name, notify)
	if name == "soft0" {
		return lateDevice{d, l}, err
	}
	return d, err
}

type lateDevice struct {
	rdma.Device
	of *late
}

func (d lateDevice) NewCQ(depth int, wake func()) (rdma.CQ, error) {
	c, err := d.Device.NewCQ(depth, wake)
	return lateCQ{c, d.of}, err
}

func (d lateDevice) NewQP(cfg rdma.QPConfig) (rdma.QP, error) {
	cfg.Send, cfg.Recv = cfg.Send.(lateCQ).CQ, cfg.Recv.(lateCQ).CQ
	q, err := d.Device.NewQP(cfg)
	return lateQP{q, d.of}, err
}

type lateCQ struct {
	rdma.CQ
	of *late
}

func (c lateCQ) Poll(out []rdma.Completion) (int, error) {
	if c.of.hold.Load() {
		return 0, nil
	}
	return c.CQ.Poll(out)
}

type lateQP struct {
	rdma.QP
	of *late
}

func (q lateQP) Fail() error {
	q.of.hold.Store(false)
	return q.QP.Fail()
}

// give sends frames of n bytes, for which there is room.
func give(t *testing.T, e *linktest.End, frames, n int) {
	t.Helper()
	for i := range frames {
		h, p := linktest.Frame(i, n, nil)
		if ok, err := e.Send(&h, p); !ok || err != nil {
			t.Fatal(ok, err)
		}
	}
}

// arrive takes the frames that give sends at the other end.
func arrive(t *testing.T, e *linktest.End, frames, n int) {
	t.Helper()
	for i := range frames {
		if err := e.Expect(i, n); err != nil {
			t.Fatalf("frame %d: %v", i, err)
		}
	}
}

// Frames that have arrived before the peer closes the link are delivered, also if the device
// completes them later.
func TestFramesBeforeTheEndOfTheLink(t *testing.T) {
	f := soft.New(soft.Config{Seed: 77, Late: 3})
	t.Cleanup(f.Close)
	l := &late{Provider: f}
	a, b := linktest.Pair(t, ports{}.open(l, minRing))
	raised(t, a, b)
	inner(a).linger = linktest.Patience
	l.hold.Store(true)
	const frames = 3
	give(t, a, frames, 1000)
	if err := a.Close(); err != nil {
		t.Fatal(err)
	}
	arrive(t, b, frames, 1000)
	ends(t, b, p2p.ErrPeerGone)
}

// An end that gives up a lane loses no frame that has arrived before the peer has closed the link.
func TestLaneGivenUpAfterTheEndOfTheLink(t *testing.T) {
	const frames = 5
	var fail atomic.Bool
	for name, c := range map[string]struct {
		before func(t *testing.T, y *linktest.Side, to *mem.Remote) // the link is closed
		after  func(t *testing.T, x *linktest.Side)
	}{
		"failed request": {after: func(t *testing.T, x *linktest.Side) {
			fail.Store(true)
			h, p := linktest.Frame(0, 100, nil)
			if ok, err := x.Send(&h, p); !ok || err != nil {
				t.Fatal(ok, err)
			}
			l := inner(x.End)
			for late := time.Now().Add(linktest.Patience); l.lane.err == nil; runtime.Gosched() {
				l.mu.Lock()
				l.lane.reap()
				l.mu.Unlock()
				if time.Now().After(late) {
					t.Fatal("the request does not fail")
				}
			}
		}},
		"cancelled put": {after: func(_ *testing.T, x *linktest.Side) {
			inner(x.End).Drop(inner(x.End).lane.bulk.moves[0].m)
		}},
		"withdrawn memory": {
			before: func(t *testing.T, y *linktest.Side, to *mem.Remote) {
				if err := y.Withdraw(to); err != nil {
					t.Fatal(err)
				}
				l := inner(y.End)
				l.mu.Lock()
				defer l.mu.Unlock()
				l.pumpLocked()
			},
			after: func(_ *testing.T, x *linktest.Side) {
				l := inner(x.End)
				l.mu.Lock()
				defer l.mu.Unlock()
				l.turnLocked()
			}},
	} {
		t.Run(name, func(t *testing.T) {
			fail.Store(false)
			f := soft.New(soft.Config{Seed: 78, Faults: soft.Faults{
				Request: func(string, uint32, *rdma.SendRequest) rdma.Status {
					if fail.Load() {
						return rdma.RetryExceeded
					}
					return rdma.Success
				}}})
			t.Cleanup(f.Close)
			x, y := sides(t, f)
			b := pattern(leastMove, 1)
			to := y.Expose(t, y.Alloc(t, len(b)), 0, len(b), mem.Write)
			place(t, x, b, to)
			rail := inner(x.End).lane.bulk.rails[0]
			rail.cq = silent{rail.cq}
			if _, err := x.PutTo(b, to, 0, p2p.Signal{}); err != nil {
				t.Fatal(err)
			}
			give(t, y.End, frames, 4000)
			inner(y.End).linger = linktest.Patience
			if c.before != nil {
				c.before(t, y, to)
			}
			if err := y.Close(); err != nil {
				t.Fatal(err)
			}
			c.after(t, x)
			arrive(t, x.End, frames, 4000)
			ends(t, x.End, p2p.ErrPeerGone)
		})
	}
}

// stalled sends a frame from a that its device repeats in vain, because the port of b is down. The
// device gives up after some seconds only: what the caller does next comes before that.
func stalled(t *testing.T, seed uint64) (f *soft.Fabric, a, b *linktest.End) {
	t.Helper()
	var watch atomic.Bool
	began := make(chan struct{})
	f = soft.New(soft.Config{Seed: seed, Faults: soft.Faults{
		Request: func(string, uint32, *rdma.SendRequest) rdma.Status {
			if watch.CompareAndSwap(true, false) {
				close(began)
			}
			return rdma.Success
		}}})
	t.Cleanup(f.Close)
	open := ports{}.open(f, minRing)
	a, b = linktest.Pair(t, func(tb testing.TB) p2p.Transport {
		tr := open(tb).(*Transport)
		tr.cfg.Settings.Timeout = 18 // of a packet: 1 s
		return tr
	})
	raised(t, a, b)
	f.SetPort("soft0", 1, false) // b does not see it
	watch.Store(true)
	h, p := linktest.Frame(0, 100, nil)
	if ok, err := a.Send(&h, p); !ok || err != nil {
		t.Fatal(ok, err)
	}
	<-began
	return f, a, b
}

// Close waits for what was sent last, also if a control frame of the peer comes meanwhile.
func TestCloseBesideControlFrames(t *testing.T) {
	f, a, b := stalled(t, 73)
	l := inner(b)
	l.mu.Lock()
	l.tellMemoryLocked(l.lane, frameClaim, 1)
	l.pumpLocked()
	ups := l.t.ups.Load()
	l.mu.Unlock()
	f.SetPort("soft0", 1, true)
	if err := a.Close(); err != nil {
		t.Fatal(err)
	}
	for late := time.Now().Add(linktest.Patience); l.t.ups.Load() == ups; runtime.Gosched() {
		if time.Now().After(late) {
			t.Fatal("the port is not back")
		}
	}
	if err := b.Expect(0, 100); err != nil {
		t.Error(err)
	}
}

// Close does not wait for a lane that the peer gives up meanwhile.
func TestCloseAfterPeerGivesUpLane(t *testing.T) {
	_, a, b := stalled(t, 74)
	n, l := inner(a).lane, inner(b)
	l.mu.Lock()
	l.dropLocked(l.lane, errors.New("a test"))
	l.pumpLocked()
	l.mu.Unlock()
	if err := a.Close(); err != nil {
		t.Fatal(err)
	}
	if n.err == nil || !strings.Contains(n.err.Error(), "given up by the peer") {
		t.Errorf("Close has waited until %v", n.err)
	}
}

// flood is a connection on which control frames never end.
type flood struct {
	p2p.Link
	over atomic.Bool
}

func (f *flood) Recv() (*p2p.Header, []byte, error) {
	if f.over.Load() {
		return nil, nil, p2p.ErrPeerGone
	}
	return &p2p.Header{Service: service, Kind: frameRevoked}, nil, nil
}

func (f *flood) Release() {}

// Close waits no longer for a peer whose control frames never end.
func TestCloseBesideEndlessControlFrames(t *testing.T) {
	_, a, _ := stalled(t, 75)
	l := inner(a)
	base := &flood{Link: l.base}
	l.base, l.linger = base, time.Millisecond
	done := make(chan error)
	go func() { done <- a.Close() }()
	select {
	case err := <-done:
		if err != nil {
			t.Error(err)
		}
	case <-time.After(linktest.Patience):
		base.over.Store(true)
		t.Errorf("Close does not end (%v)", <-done)
	}
}

// scripted is a connection with one frame.
type scripted struct {
	p2p.Link
	h       *p2p.Header
	arrived int // bytes of its payload
	fill    error
	room    bool // Arm says that a Send may succeed
}

func (s *scripted) Recv() (*p2p.Header, []byte, error) { return s.h, nil, nil }
func (s *scripted) Arm() bool                          { return s.room || s.fill != nil }
func (s *scripted) Release()                           { s.h = nil }
func (s *scripted) Err() error                         { return s.fill }
func (s *scripted) Fill(dst []byte) (int, error) {
	n := min(len(dst), s.arrived)
	s.arrived -= n
	return n, s.fill
}

// What Close takes from the TCP connection ends its wait only if the connection has ended.
func TestFramesDuringClose(t *testing.T) {
	frame := &p2p.Header{Service: service, Kind: frameRefusal, Len: 8}
	long := &p2p.Header{Service: service, Kind: frameRefusal, Len: maxText + 1}
	for name, c := range map[string]struct {
		base        scripted
		ended, more bool
	}{
		"whole":         {scripted{h: frame, arrived: 8}, false, true},
		"part":          {scripted{h: frame, arrived: 4}, false, false},
		"part and room": {scripted{h: frame, arrived: 4, room: true}, false, true},
		"broken":        {scripted{h: frame, fill: p2p.ErrPeerGone}, true, true},
		"too long":      {scripted{h: long}, true, false},
	} {
		t.Run(name, func(t *testing.T) {
			l := &link{base: &c.base, part: make([]byte, 0, maxText)}
			if ended, more := l.skipLocked(); ended != c.ended || more != c.more {
				t.Errorf("ended: %v, more: %v, want %v and %v", ended, more, c.ended, c.more)
			}
		})
	}
}

// Close of a link does not wait for a device that refuses to close queue pairs when all links of
// its transport have had their time: it tries once more, and says which queue pairs stay, also for
// a lane given up before.
func TestCloseWithQueuePairsThatStay(t *testing.T) {
	for name, before := range map[string]bool{"in use": false, "given up": true} {
		t.Run(name, func(t *testing.T) {
			var refuse atomic.Bool
			var refused atomic.Int64
			f := soft.New(soft.Config{Seed: 76, Faults: soft.Faults{
				Call: func(at, call string) syscall.Errno {
					if at == "soft0" && strings.HasPrefix(call, "destroy") && refuse.Load() {
						refused.Add(1)
						return syscall.EBUSY
					}
					return 0
				}}})
			t.Cleanup(f.Close)
			a, b := pair(t, f)
			raised(t, a, b)
			const pairs = 2 // of a lane
			l := inner(b)
			refuse.Store(true)
			t.Cleanup(func() { refuse.Store(false) })
			if before {
				l.mu.Lock()
				l.dropLocked(l.lane, errors.New("a test"))
				l.mu.Unlock()
				for refused.Load() < 4*pairs { // the pauses are long then
					runtime.Gosched()
				}
			}
			l.t.mu.Lock()
			l.t.closed, l.t.late = true, time.Now()
			l.t.mu.Unlock()
			tries := refused.Load()
			err := b.Close()
			l.t.mu.Lock()
			l.t.closed = false // for Close of the transport
			l.t.mu.Unlock()
			if err == nil || strings.Count(err.Error(), " of soft0: ") != pairs {
				t.Errorf("Close returns %v, which does not say that %d queue pairs stay", err, pairs)
			}
			if tries = refused.Load() - tries; tries > 3*pairs {
				t.Errorf("%d tries to close %d queue pairs after the time", tries, pairs)
			}
		})
	}
}
