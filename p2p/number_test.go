package p2p_test

import (
	"context"
	"errors"
	"math"
	"testing"
	"time"

	"tutti/p2p"
	"tutti/p2p/inproc"
)

func pair(t *testing.T) (a, b *member) {
	w := &town{who: map[int]*member{}, ids: map[int]p2p.Identity{}}
	return w.settle(t, 0, 2, 1), w.settle(t, 1, 2, 2)
}

// Channels that come and go over one link take each other's numbers: what a link keeps for them is
// bounded by how many are open at once.
func TestChannelNumbersAreReused(t *testing.T) {
	a, b := pair(t)
	for i := range 500 {
		name := a.Reserve(2)
		var cs []*p2p.Channel
		for _, m := range []*member{a, b} {
			c, err := m.Open(name, p2p.Epoch{View: uint64(i)}, ranks(2), nil, false)
			if err != nil {
				t.Fatal(err)
			}
			cs = append(cs, c)
		}
		send(t, a, cs[0], 1, 1, "there")
		recv(t, b, cs[1], 0, 1, "there")
		send(t, b, cs[1], 0, 2, "and back")
		recv(t, a, cs[0], 1, 2, "and back")
		cs[0] = next(t, a, cs[0], uint64(i), 7, ranks(2))
		cs[1] = next(t, b, cs[1], uint64(i), 7, ranks(2))
		send(t, a, cs[0], 1, 1, "again")
		recv(t, b, cs[1], 0, 1, "again")
		cs[0].Close()
		cs[1].Close()
	}
	for _, m := range []*member{a, b} {
		if out, in := m.Numbers(map[*member]int{a: 1, b: 0}[m]); out > 8 || in > 8 {
			t.Errorf("%d numbers were given out, %d were told, for channels of which one was open at a time", out, in)
		}
	}
}

// Names are unique among those that one rank reserves, and across ranks and incarnations.
func TestNamesAreReserved(t *testing.T) {
	a, b := pair(t)
	had := map[p2p.Name]bool{}
	for range 100 {
		for _, m := range []*member{a, b} {
			n := m.Reserve(2)
			if other := (p2p.Name{Maker: n.Maker, Number: n.Number + 1}); had[n] || had[other] {
				t.Fatalf("%v or %v is reserved twice", n, other)
			} else {
				had[n], had[other] = true, true
			}
		}
	}
}

// The credit counters wrap while messages pass.
func TestCreditWraps(t *testing.T) {
	a, b := pair(t)
	ca, cb := channel(t, a, 1, 1, 2, false), channel(t, b, 1, 1, 2, false)
	ca.SetCredit(1, math.MaxUint32-1000)
	cb.SetCredit(0, math.MaxUint32-1000)
	big := make([]byte, 300_000)
	for i := range uint64(20) {
		done := make(chan error)
		go func() {
			a.Lock()
			defer a.Unlock()
			done <- ca.Send(patient(context.Background()), 1, p2p.Token{Seq: i + 1}, big)
		}()
		recv(t, b, cb, 0, i+1, string(big))
		if err := <-done; err != nil {
			t.Fatal(err)
		}
		send(t, b, cb, 0, i+1, "taken")
		recv(t, a, ca, 1, i+1, "taken")
	}
	if l := ca.Ledger(1); l.Sent > math.MaxUint32/2 || l.Sent-l.Acked > uint32(l.Window) {
		t.Errorf("%+v: the account has not wrapped, or wrongly", l)
	}
}

// A rank that waits for a silent peer sends it a frame from time to time, so that a transport can
// detect a host that does not answer.
func TestWaitersSendHeartbeats(t *testing.T) {
	all := make([]*p2p.Proxy, 2)
	id := func(r int) p2p.Identity { return p2p.Identity{Rank: r, Incarnation: uint64(r) + 1} }
	for r := range all {
		all[r] = p2p.New(p2p.Config{Self: id(r), Size: 2, Secret: []byte("0123456789abcdef"),
			Transports: []p2p.Transport{inproc.New(inproc.Config{})}, Threads: true,
			Oversubscribed: true, Heartbeat: time.Millisecond,
			Resolve: func(_ context.Context, rank int) (p2p.Peer, error) {
				return p2p.Peer{Identity: id(rank), Endpoints: all[rank].Endpoints()}, nil
			}})
		if _, err := all[r].Listen(context.Background()); err != nil {
			t.Fatal(err)
		}
	}
	defer closeAll(all)
	c, far := open(t, all[0], 1, 2), open(t, all[1], 1, 2)
	frames := func() uint64 {
		for _, n := range all[0].Counts() {
			return n.FramesSent
		}
		return 0
	}
	ctx, stop := context.WithCancel(context.Background())
	defer stop()
	over := make(chan error)
	go func() {
		all[0].Lock()
		defer all[0].Unlock()
		var r p2p.Recv
		c.PostRecv(&r, 1, p2p.Token{Seq: 1}, make([]byte, 1), false)
		over <- c.WaitRecv(patient(ctx), &r)
	}()
	for sent := uint64(0); sent < 20; time.Sleep(time.Millisecond) { // bounded by the test's own time
		all[0].Lock()
		sent = frames()
		all[0].Unlock()
	}
	all[1].Lock()
	w := patient(context.Background())
	if err := far.Send(w, 0, p2p.Token{Seq: 1}, []byte{1}); err != nil { // and takes no notice of them
		t.Error(err)
	}
	all[1].Unlock()
	if err := <-over; err != nil {
		t.Error(err)
	}
}

// A rank that waits in an operation delays ranks that are past it: its announcement counts until it
// continues.
func TestWaitsForOfAnEarlierOperation(t *testing.T) {
	a, b := pair(t)
	ca, cb := channel(t, a, 1, 1, 2, false), channel(t, b, 1, 1, 2, false)
	send(t, b, cb, 0, 1, "x")
	recv(t, a, ca, 1, 1, "x")
	b.Lock()
	cb.Announce(p2p.Token{Seq: 1}, []int{1})
	b.Unlock()
	send(t, b, cb, 0, 1, "y") // behind what was announced
	recv(t, a, ca, 1, 1, "y")
	a.Lock()
	if slots, ok := ca.WaitsFor(1, p2p.Token{Seq: 3}); !ok || len(slots) != 1 || slots[0] != 1 {
		t.Errorf("in a later operation: %v, %v", slots, ok)
	}
	a.Unlock()
	send(t, b, cb, 0, 2, "z")
	recv(t, a, ca, 1, 2, "z")
	a.Lock()
	if slots, ok := ca.WaitsFor(1, p2p.Token{Seq: 3}); ok {
		t.Errorf("after it got on: %v", slots)
	}
	a.Unlock()
	b.Lock() // it had sent a part of a later operation ahead
	cb.Announce(p2p.Token{Seq: 1}, []int{0, 1})
	b.Unlock()
	send(t, b, cb, 0, 2, "z")
	recv(t, a, ca, 1, 2, "z")
	a.Lock()
	if slots, ok := ca.WaitsFor(1, p2p.Token{Seq: 3}); !ok || len(slots) != 2 {
		t.Errorf("behind what had come before: %v, %v", slots, ok)
	}
	a.Unlock()
	b.Lock()
	cb.Retract()
	b.Unlock()
	send(t, b, cb, 0, 1, "y") // of no later operation
	recv(t, a, ca, 1, 1, "y")
	a.Lock()
	if slots, ok := ca.WaitsFor(1, p2p.Token{Seq: 3}); ok {
		t.Errorf("after the end of its operation: %v", slots)
	}
	if _, _, ok := ca.Waiting(1); ok {
		t.Error("after the end of its operation it is said to wait")
	}
	a.Unlock()
}

// On a channel that has failed, what was announced before remains.
func TestRetractAfterAFailure(t *testing.T) {
	a, b := pair(t)
	ca, cb := channel(t, a, 1, 1, 2, false), channel(t, b, 1, 1, 2, false)
	send(t, b, cb, 0, 1, "x")
	recv(t, a, ca, 1, 1, "x")
	b.Lock()
	cb.Announce(p2p.Token{Seq: 1}, []int{1})
	cb.Abort(errors.New("its time is up"), []byte("why"))
	cb.Retract()
	b.Unlock()
	a.Lock()
	defer a.Unlock()
	var w p2p.Wait
	w.Reset(context.Background(), time.Minute, true)
	for ca.Err() == nil {
		if err := a.Progress(&w); err != nil {
			t.Fatal(err)
		}
	}
	a.Look()
	if slots, ok := ca.WaitsFor(1, p2p.Token{Seq: 1}); !ok || len(slots) != 1 || slots[0] != 1 {
		t.Errorf("rank 1 waits for %v, %v: want itself", slots, ok)
	}
}

// A member that links up after an announcement is told of it.
func TestAnnouncementReachesALaterLink(t *testing.T) {
	w := &town{who: map[int]*member{}, ids: map[int]p2p.Identity{}}
	a, b := w.settle(t, 0, 2, 1), w.settle(t, 1, 2, 2)
	ca, cb := channel(t, a, 1, 1, 2, false), channel(t, b, 1, 1, 2, false)
	b.Lock()
	cb.Announce(p2p.Token{Seq: 1}, []int{1})
	b.Unlock()
	send(t, a, ca, 1, 1, "x") // makes the link
	recv(t, b, cb, 0, 1, "x")
	send(t, b, cb, 0, 1, "y")
	recv(t, a, ca, 1, 1, "y")
	a.Lock()
	defer a.Unlock()
	if slots, ok := ca.WaitsFor(1, p2p.Token{Seq: 1}); !ok || len(slots) != 1 || slots[0] != 1 {
		t.Errorf("rank 1 waits for %v, %v: want itself", slots, ok)
	}
}

// A rank that was not scheduled until its time was up still knows what its peers have announced.
func TestTimeoutKnowsWhatHasArrived(t *testing.T) {
	w := &town{who: map[int]*member{}, ids: map[int]p2p.Identity{}}
	var all []*member
	var cs []*p2p.Channel
	for r := range 3 {
		all = append(all, w.settle(t, r, 3, uint64(r)+1))
	}
	for _, m := range all {
		cs = append(cs, channel(t, m, 1, 1, 3, false))
	}
	for _, from := range []int{1, 2} {
		send(t, all[from], cs[from], 0, 1, "x")
		recv(t, all[0], cs[0], from, 1, "x")
	}
	over, end := context.WithCancel(context.Background())
	end()
	var late p2p.Wait
	late.Reset(context.Background(), time.Minute, true)
	late.Attend(over) // the wait ends after its first look at all links
	var r p2p.Recv
	all[0].Lock()
	defer all[0].Unlock()
	cs[0].PostRecv(&r, 1, p2p.Token{Seq: 2}, make([]byte, 1), false)
	if err := cs[0].WaitRecv(&late, &r); !errors.Is(err, p2p.ErrSuspended) {
		t.Fatalf("got %v, want ErrSuspended", err)
	}

	all[2].Lock()
	cs[2].Announce(p2p.Token{Seq: 2}, []int{1})
	all[2].Unlock()

	late.Stay(true)
	late.Since(time.Now().Add(-time.Hour))
	if err := cs[0].WaitRecv(&late, &r); !errors.Is(err, p2p.ErrTimeout) {
		t.Fatalf("got %v, want ErrTimeout", err)
	}
	if slots, ok := cs[0].WaitsFor(2, p2p.Token{Seq: 2}); !ok || len(slots) != 1 || slots[0] != 1 {
		t.Errorf("rank 2 waits for %v, %v: want rank 1", slots, ok)
	}
}
