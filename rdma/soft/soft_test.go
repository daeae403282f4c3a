package soft

import (
	"bytes"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync/atomic"
	"syscall"
	"testing"
	"time"
	"unsafe"

	"tutti/mem"
	"tutti/rdma"
)

// side is one end of a connection, with registered memory.
type side struct {
	t  *testing.T
	f  *Fabric
	d  rdma.Device
	cq rdma.CQ
	qp rdma.QP
	b  []byte
	mr rdma.MR
}

const all = rdma.LocalWrite | rdma.RemoteWrite | rdma.RemoteRead

func newSide(t *testing.T, f *Fabric, device string, depth int, wake func()) *side {
	t.Helper()
	s := &side{t: t, f: f, b: make([]byte, 1<<16)}
	var err error
	if s.d, err = f.Open(device, nil); err != nil {
		t.Fatal(err)
	}
	if s.mr, err = s.d.Register(mem.Host(s.b, mem.Anywhere), all); err != nil {
		t.Fatal(err)
	}
	if s.cq, err = s.d.NewCQ(4*depth, wake); err != nil {
		t.Fatal(err)
	}
	if s.qp, err = s.d.NewQP(rdma.QPConfig{Send: s.cq, Recv: s.cq, SendDepth: depth, RecvDepth: depth, Segments: 4,
		Inline: 64}); err != nil {
		t.Fatal(err)
	}
	return s
}

// route returns how s reaches o.
func (s *side) route(o *side) *rdma.Route {
	gids, err := o.d.GIDs(1)
	if err != nil {
		s.t.Fatal(err)
	}
	own, err := s.d.GIDs(1)
	if err != nil {
		s.t.Fatal(err)
	}
	return &rdma.Route{Port: 1, GIDIndex: own[2].Index, Global: true, MTU: 4096, PSN: s.qp.Number(),
		Remote:    o.qp.Number(),
		RemotePSN: o.qp.Number(), GID: gids[2].GID, Reads: 4, Timeout: 1, Retries: 7, RNRRetries: 7}
}

func (s *side) connect(o *side) {
	s.t.Helper()
	if err := s.qp.Init(1, all); err != nil {
		s.t.Fatal(err)
	}
	if err := s.qp.Connect(s.route(o)); err != nil {
		s.t.Fatal(err)
	}
}

// pair returns two connected ends on two devices.
func pair(t *testing.T, f *Fabric, depth int) (*side, *side) {
	t.Helper()
	a, b := newSide(t, f, "soft0", depth, nil), newSide(t, f, "soft1", depth, nil)
	a.connect(b)
	b.connect(a)
	return a, b
}

func address(b []byte) uint64 { return uint64(uintptr(unsafe.Pointer(unsafe.SliceData(b)))) }

// write is a signaled write of n bytes at off here to the same place there.
func (s *side) write(o *side, id uint64, off, n int) rdma.SendRequest {
	return rdma.SendRequest{ID: id, Op: rdma.Write, Signaled: true,
		Segments:      []rdma.Segment{{Address: address(s.b) + uint64(off), Key: s.mr.LocalKey(), Len: uint32(n)}},
		RemoteAddress: address(o.b) + uint64(off), RemoteKey: o.mr.RemoteKey()}
}

func (s *side) post(r ...rdma.SendRequest) {
	s.t.Helper()
	if n, err := s.qp.Post(r); err != nil || n != len(r) {
		s.t.Fatal(n, err)
	}
}

// run runs steps until there are none, and returns the completions of s.
func (s *side) run() (all []rdma.Completion) {
	s.t.Helper()
	for s.f.Step() {
	}
	return s.poll()
}

func (s *side) poll() (all []rdma.Completion) {
	s.t.Helper()
	var out [rdma.PollBatch]rdma.Completion
	for {
		n, err := s.cq.Poll(out[:])
		if err != nil {
			s.t.Fatal(err)
		}
		if all = append(all, out[:n]...); n == 0 {
			return all
		}
	}
}

func fill(b []byte, seed uint64) {
	r := rand.New(rand.NewPCG(seed, 0))
	for i := range b {
		b[i] = byte(r.Uint32())
	}
}

func manual(t *testing.T, cfg Config) *Fabric {
	cfg.Manual = true
	f := New(cfg)
	t.Cleanup(f.Close)
	return f
}

func TestWritesArePlacedAndCompleteInOrder(t *testing.T) {
	f := manual(t, Config{Seed: 1})
	a, b := pair(t, f, 16)
	fill(a.b, 1)
	for i := range 10 {
		a.post(a.write(b, uint64(i), i*5000, 5000))
	}
	for i, c := range a.run() {
		if c.ID != uint64(i) || c.Status != rdma.Success || c.QP != a.qp.Number() {
			t.Fatal(i, c)
		}
	}
	if !bytes.Equal(a.b[:50000], b.b[:50000]) {
		t.Fatal("other bytes")
	}
}

// The data of a write may be placed before that of the write in front of it. Both are placed when a
// receive of the later one has completed, and completions keep their order.
func TestWritesOvertakeWrites(t *testing.T) {
	first, second := 0, 0 // of both writes, the only one that is placed
	for seed := range uint64(100) {
		f := manual(t, Config{Seed: seed})
		a, b := pair(t, f, 16)
		a.b[0], a.b[1000] = 7, 8
		w := a.write(b, 2, 1000, 8)
		w.Op = rdma.WriteImm
		if n, err := b.qp.PostRecv([]rdma.RecvRequest{{}}); n != 1 || err != nil {
			t.Fatal(n, err)
		}
		a.post(a.write(b, 1, 0, 8), w)
		for received := false; !received; {
			if !f.Step() {
				t.Fatal("the write with immediate value is not received")
			}
			switch [2]byte{b.b[0], b.b[1000]} {
			case [2]byte{7, 0}:
				first++
			case [2]byte{0, 8}:
				second++
			}
			received = len(b.poll()) > 0
		}
		if b.b[0] != 7 || b.b[1000] != 8 {
			t.Fatalf("seed %d: received with %d and %d in memory", seed, b.b[0], b.b[1000])
		}
		if c := a.run(); len(c) != 2 || c[0].ID != 1 || c[1].ID != 2 {
			t.Fatalf("seed %d: %+v", seed, c)
		}
	}
	if first == 0 || second == 0 {
		t.Errorf("in %d steps only the first write was placed, in %d only the second one", first, second)
	}
}

func TestSameSeedSameHistory(t *testing.T) {
	history := func(seed uint64) string {
		f := manual(t, Config{Seed: seed, Late: 3})
		a, b := pair(t, f, 32)
		log := ""
		for i := range 20 {
			a.post(a.write(b, uint64(i), 0, 3000))
			b.post(b.write(a, uint64(100+i), 8000, 3000))
			for range 3 {
				f.Step()
			}
			for _, c := range append(a.poll(), b.poll()...) {
				log += fmt.Sprint(c.ID, " ")
			}
			log += "/"
		}
		return log
	}
	if x, y := history(7), history(7); x != y {
		t.Fatalf("%s\n%s", x, y)
	}
	if history(7) == history(8) {
		t.Fatal("another seed has the same history")
	}
}

func TestPlaceInQueueIsFreeAfterPollOnly(t *testing.T) {
	f := manual(t, Config{})
	a, b := pair(t, f, 4)
	w := a.write(b, 1, 0, 8)
	w.Signaled = false
	a.post(w, w, w)
	a.post(a.write(b, 2, 0, 8))
	for f.Step() {
	}
	n, err := a.qp.Post([]rdma.SendRequest{w})
	if !errors.Is(err, syscall.ENOMEM) || n != 0 {
		t.Fatal(n, err)
	}
	if c := a.poll(); len(c) != 1 || c[0].ID != 2 {
		t.Fatal(c)
	}
	a.post(w, w, w, w)
}

func TestPostStopsAtBadRequest(t *testing.T) {
	fails := 2
	f := manual(t, Config{Faults: Faults{Post: func(_ string, _ uint32, i int) syscall.Errno {
		if i == fails {
			return syscall.EAGAIN
		}
		return 0
	}}})
	a, b := pair(t, f, 16)
	w := a.write(b, 1, 0, 8)
	n, err := a.qp.Post([]rdma.SendRequest{w, w, w, w})
	if n != 2 || !errors.Is(err, syscall.EAGAIN) {
		t.Fatal(n, err)
	}
	if c := a.run(); len(c) != 2 {
		t.Fatal(c)
	}
}

func TestAccessIsChecked(t *testing.T) {
	for name, change := range map[string]func(a, b *side, r *rdma.SendRequest){
		"key":       func(_, _ *side, r *rdma.SendRequest) { r.RemoteKey++ },
		"own key":   func(a, _ *side, r *rdma.SendRequest) { r.RemoteKey = a.mr.RemoteKey() },
		"before":    func(_, _ *side, r *rdma.SendRequest) { r.RemoteAddress-- },
		"behind":    func(_, b *side, r *rdma.SendRequest) { r.RemoteAddress += uint64(len(b.b)) - 7 },
		"overflow":  func(_, _ *side, r *rdma.SendRequest) { r.RemoteAddress = ^uint64(0) - 3 },
		"withdrawn": func(_, b *side, _ *rdma.SendRequest) { b.mr.Close() },
	} {
		t.Run(name, func(t *testing.T) {
			f := manual(t, Config{})
			a, b := pair(t, f, 4)
			fill(a.b, 1)
			r := a.write(b, 1, 0, 8)
			change(a, b, &r)
			a.post(r, a.write(b, 2, 0, 8))
			c := a.run()
			if len(c) != 2 || c[0].Status != rdma.RemoteAccess || c[1].Status != rdma.Flushed {
				t.Fatal(c)
			}
			if !bytes.Equal(b.b, make([]byte, len(b.b))) {
				t.Fatal("bytes were placed")
			}
			for _, s := range []*side{a, b} { // the peer's fails as well
				if state, err := s.qp.State(); err != nil || state != rdma.StateFailed {
					t.Fatal(state, err)
				}
			}
		})
	}
}

func TestDelayedWrites(t *testing.T) {
	for name, show := range map[string]func(a, b *side){
		"read": func(a, b *side) {
			r := a.write(b, 2, 8, 8)
			r.Op = rdma.Read
			a.post(r)
			a.run()
		},
		"receive": func(a, b *side) {
			if _, err := b.qp.PostRecv([]rdma.RecvRequest{{ID: 9}}); err != nil {
				t.Fatal(err)
			}
			a.post(rdma.SendRequest{ID: 2, Op: rdma.WriteImm, Signaled: true})
			a.run()
		},
		"end of registration": func(_, b *side) { b.mr.Close() },
	} {
		t.Run(name, func(t *testing.T) {
			f := manual(t, Config{Delayed: []string{"soft1"}})
			a, b := pair(t, f, 4)
			fill(a.b, 1)
			a.post(a.write(b, 1, 0, 100))
			if c := a.run(); len(c) != 1 || c[0].Status != rdma.Success || b.b[0] != 0 {
				t.Fatalf("completions %v, and the memory begins with %d", c, b.b[0])
			}
			if show(a, b); !bytes.Equal(a.b[:8], b.b[:8]) || !bytes.Equal(a.b[16:100], b.b[16:100]) {
				t.Error("the data is not visible")
			}
		})
	}
}

func TestPortDownIsSurvivedWithinRetries(t *testing.T) {
	f := manual(t, Config{})
	a, b := pair(t, f, 4)
	fill(a.b, 1)
	f.SetPort("soft1", 1, false)
	a.post(a.write(b, 1, 0, 100))
	for range 5 {
		if !f.Step() {
			t.Fatal("nothing to do")
		}
	}
	f.SetPort("soft1", 1, true)
	if c := a.run(); len(c) != 1 || c[0].Status != rdma.Success || !bytes.Equal(a.b[:100], b.b[:100]) {
		t.Fatal(c)
	}
	f.SetPort("soft0", 1, false)
	a.post(a.write(b, 2, 0, 100), a.write(b, 3, 0, 100))
	if c := a.run(); len(c) != 2 || c[0].Status != rdma.RetryExceeded || c[1].Status != rdma.Flushed {
		t.Fatal(c)
	}
}

// A queue pair with the number of a destroyed one gets none of its packets.
func TestNumberThatIsUsedAgain(t *testing.T) {
	f := manual(t, Config{ReuseNumbers: true})
	a, b := pair(t, f, 4)
	number := b.qp.Number()
	if err := b.qp.Close(); err != nil {
		t.Fatal(err)
	}
	fresh := newSide(t, f, "soft1", 4, nil)
	other := newSide(t, f, "soft0", 4, nil)
	if fresh.qp.Number() == number { // another device context, the same hardware
		fresh.connect(other)
	} else {
		t.Fatal(fresh.qp.Number(), number)
	}
	a.post(a.write(fresh, 1, 0, 8))
	if c := a.run(); len(c) != 1 || c[0].Status != rdma.RetryExceeded {
		t.Fatal(c)
	}
}

func TestReadIsOvertakenUnlessFenced(t *testing.T) {
	const free, fenced, behind = 0, 1, 2
	saw := []map[byte]bool{free: {}, fenced: {}, behind: {}}
	for seed := range uint64(200) {
		for fence := range saw {
			f := manual(t, Config{Seed: seed})
			a, b := pair(t, f, 4)
			a.b[0], b.b[100] = 7, 1
			read := a.write(b, 1, 100, 1)
			read.Op = rdma.Read
			w := a.write(b, 2, 0, 1)
			w.RemoteAddress = read.RemoteAddress
			w.Fence = fence == fenced
			posted := []rdma.SendRequest{read, w}
			if fence == behind {
				other := a.write(b, 3, 0, 1)
				other.Fence = true
				posted = []rdma.SendRequest{read, other, w}
			}
			a.post(posted...)
			if c := a.run(); len(c) != len(posted) || c[0].ID != 1 || c[0].Status != 0 || c[1].Status != 0 ||
				b.b[100] != 7 {
				t.Fatal(c)
			}
			saw[fence][a.b[100]] = true
		}
	}
	if len(saw[free]) != 2 || len(saw[fenced]) != 1 || !saw[fenced][1] || len(saw[behind]) != 1 || !saw[behind][1] {
		t.Fatal(saw)
	}
}

func TestOverflowOfCompletionQueueFailsItsQueuePairs(t *testing.T) {
	f := manual(t, Config{})
	var events []rdma.Event
	d, err := f.Open("soft0", func(e rdma.Event) { events = append(events, e) })
	if err != nil {
		t.Fatal(err)
	}
	a, b := newSide(t, f, "soft0", 16, nil), newSide(t, f, "soft1", 16, nil)
	small, err := a.d.NewCQ(3, nil)
	if err != nil {
		t.Fatal(err)
	}
	if a.qp, err = a.d.NewQP(rdma.QPConfig{Send: small, Recv: small, SendDepth: 16, RecvDepth: 1}); err != nil {
		t.Fatal(err)
	}
	a.connect(b)
	b.connect(a)
	for range 5 {
		a.post(a.write(b, 1, 0, 8))
	}
	for f.Step() {
	}
	if _, err := small.Poll(make([]rdma.Completion, 1)); !errors.Is(err, syscall.EIO) {
		t.Fatal(err)
	}
	kinds := []rdma.EventKind{}
	for _, e := range events {
		kinds = append(kinds, e.Kind)
	}
	if !slices.Equal(kinds, []rdma.EventKind{rdma.CQFailed, rdma.QPFailed}) {
		t.Fatal(events)
	}
	if err := d.Close(); err != nil {
		t.Fatal(err)
	}
}

func TestRemovedDevice(t *testing.T) {
	f := manual(t, Config{})
	a, b := pair(t, f, 4)
	a.post(a.write(b, 1, 0, 8))
	f.Remove("soft0")
	for f.Step() {
	}
	var c [2]rdma.Completion // of what was under way
	if n, err := a.cq.Poll(c[:]); err != nil || n != 1 || c[0].Status != rdma.Flushed {
		t.Fatal(n, err, c)
	}
	if _, err := a.cq.Poll(make([]rdma.Completion, 1)); !errors.Is(err, rdma.ErrRemoved) {
		t.Fatal(err)
	}
	if _, err := a.d.Register(mem.Host(a.b, mem.Anywhere), all); !errors.Is(err, rdma.ErrRemoved) {
		t.Fatal(err)
	}
	if names, _ := f.Devices(); !slices.Equal(names, []string{"soft1"}) {
		t.Fatal(names)
	}
	f.Restore("soft0")
	if _, err := a.d.NewCQ(1, nil); !errors.Is(err, rdma.ErrRemoved) { // has to be opened again
		t.Fatal(err)
	}
	for _, close := range []func() error{a.qp.Close, a.cq.Close, a.mr.Close, a.d.Close} {
		if err := close(); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := f.Open("soft0", nil); err != nil {
		t.Fatal(err)
	}
}

// A queue that is closed before the fabric has woken its user wakes nobody.
func TestCloseBeforeWake(t *testing.T) {
	f := manual(t, Config{})
	wakes := 0
	a := newSide(t, f, "soft0", 4, func() { wakes++ })
	if err := a.cq.Arm(); err != nil {
		t.Fatal(err)
	}
	f.Remove("soft0")
	if err := errors.Join(a.qp.Close(), a.cq.Close()); err != nil {
		t.Fatal(err)
	}
	for f.Step() {
	}
	if wakes > 0 {
		t.Errorf("woken %d times", wakes)
	}
}

// The goroutine of a fabric that is not manual moves data, and wakes armed queues.
func TestArmWakes(t *testing.T) {
	f := New(Config{Seed: 3, Late: 4})
	defer f.Close()
	woken := make(chan struct{}, 1)
	a := newSide(t, f, "soft0", 8, func() {
		select {
		case woken <- struct{}{}:
		default:
		}
	})
	b := newSide(t, f, "soft1", 8, nil)
	a.connect(b)
	b.connect(a)
	flag := (*uint64)(unsafe.Pointer(&b.b[8]))
	for i := range uint64(2000) {
		*(*uint64)(unsafe.Pointer(&a.b[8])) = i + 1
		a.post(a.write(b, i, 8, 8))
		for atomic.LoadUint64(flag) != i+1 {
		}
		for got := a.poll(); len(got) == 0; got = a.poll() {
			if err := a.cq.Arm(); err != nil {
				t.Fatal(err)
			}
			if got = a.poll(); len(got) > 0 {
				break
			}
			select {
			case <-woken:
			case <-time.After(20 * time.Second):
				t.Fatal("not woken")
			}
		}
	}
}

// Users see requests of which some have completed and others have not.
func TestUsersSeeWhatIsHalfDone(t *testing.T) {
	const n, rounds = 8, 10_000
	f := New(Config{Seed: 5, Late: 4})
	defer f.Close()
	a, b := pair(t, f, n)
	var out [n]rdma.Completion
	for range rounds {
		var all []rdma.SendRequest
		for i := range uint64(n) {
			all = append(all, a.write(b, i, int(8*i), 8))
		}
		a.post(all...)
		some := false
		for got := 0; got < n; {
			now, err := a.cq.Poll(out[:n-got])
			if err != nil {
				t.Fatal(err)
			}
			got += now
			some = some || 0 < got && got < n
		}
		if some {
			return
		}
	}
	t.Errorf("in %d rounds each poll found none or all of %d completions", rounds, n)
}
