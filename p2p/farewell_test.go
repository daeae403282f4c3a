package p2p_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"sync"
	"testing"

	"tutti/p2p"
)

// A peer that is linked after a rank has closed a channel learns that, and what the channel was
// aborted with.
func TestClosingIsToldToPeersThatLinkLater(t *testing.T) {
	const why = "its time was up"
	aborted := func(err error) bool {
		var a *p2p.Aborted
		return errors.As(err, &a) && a.Rank == 0 && string(a.Payload) == why
	}
	left := func(err error) bool {
		var gone *p2p.PeerError
		return errors.As(err, &gone) && gone.Rank == 0 && strings.Contains(err.Error(), "closed its group")
	}
	for _, c := range []struct {
		name   string
		tagged bool
		abort  bool
		linked bool // before the peer opens the channel
		later  bool // the peer is in a later epoch
		is     func(error) bool
	}{
		{name: "ordered", is: left},
		{name: "ordered, linked first", linked: true, is: left},
		{name: "ordered, in a later epoch", abort: true, later: true, is: left},
		{name: "aborted", abort: true, is: aborted},
		{name: "aborted, linked first", abort: true, linked: true, is: aborted},
		{name: "messages", tagged: true, is: left},
		{name: "messages, aborted", tagged: true, abort: true, is: aborted},
	} {
		either(t, c.name, func(t *testing.T, all []*p2p.Proxy, name p2p.Name, places []uint64) {
			ping := pinger(t, all)
			closed, err := all[0].Open(name, p2p.Epoch{View: 1}, ranks(2), places, c.tagged)
			if err != nil {
				t.Fatal(err)
			}
			if c.abort {
				all[0].Lock()
				closed.Abort(errors.New("late"), []byte(why))
				all[0].Unlock()
			}
			closed.Close()
			settle(all[0], places, 0)
			if c.linked {
				ping()
			}
			epoch := p2p.Epoch{View: 1}
			if c.later {
				epoch.View = 2
			}
			ch, err := all[1].Open(name, epoch, ranks(2), places, c.tagged)
			if err != nil {
				t.Fatal(err)
			}
			polled(all[0], func() { err = receive(all[1], ch, c.tagged) })
			if !c.is(err) {
				t.Errorf("the receive failed with %v", err)
			}
		})
	}
}

// A peer that is linked after a rank has left an epoch of a channel learns that, and what the epoch
// was aborted with.
func TestLeavingIsToldToPeersThatLinkLater(t *testing.T) {
	for name, why := range map[string]string{"left": "", "aborted": "its time was up"} {
		for _, linked := range []bool{false, true} { // before the peer opens the channel
			what := fmt.Sprintf("%s, linked first: %v", name, linked)
			either(t, what, func(t *testing.T, all []*p2p.Proxy, name p2p.Name, places []uint64) {
				ping := pinger(t, all)
				c, err := all[0].Open(name, p2p.Epoch{View: 1}, ranks(2), places, false)
				if err != nil {
					t.Fatal(err)
				}
				all[0].Lock()
				if why != "" {
					c.Abort(errors.New("late"), []byte(why))
				}
				c.Leave(0)
				for view := uint64(2); view < 4; view++ { // in which it runs no operation
					if c, err = c.Next(p2p.Epoch{View: view}, ranks(2)); err != nil {
						t.Error(err)
					}
				}
				all[0].Unlock()
				settle(all[0], places, 0)
				if linked {
					ping()
				}
				ch, err := all[1].Open(name, p2p.Epoch{View: 1}, ranks(2), places, false)
				if err != nil {
					t.Fatal(err)
				}
				polled(all[0], func() { err = receive(all[1], ch, false) })
				var told *p2p.Aborted
				if why == "" && !errors.Is(err, p2p.ErrLeft) ||
					why != "" && !(errors.As(err, &told) && told.Rank == 0 && string(told.Payload) == why) {
					t.Errorf("the receive failed with %v", err)
				}
			})
		}
	}
}

// Two ranks that have both closed a channel do not go on telling each other.
func TestClosingIsNotAnswered(t *testing.T) {
	all := cluster(t, 2, 64<<10, nil)
	defer closeAll(all)
	ping := pinger(t, all)
	ping()
	a, err := all[0].Open(known(7), p2p.Epoch{}, ranks(2), nil, false)
	if err != nil {
		t.Fatal(err)
	}
	b, err := all[1].Open(known(7), p2p.Epoch{}, ranks(2), nil, false)
	if err != nil {
		t.Fatal(err)
	}
	all[1].Lock()
	if err := b.Send(patient(context.Background()), 0, p2p.Token{Seq: 1}, []byte("x")); err != nil {
		t.Error(err)
	}
	all[1].Unlock()
	a.Close() // the other's frames are still to be looked at
	b.Close()
	received := func() (n uint64) {
		all[0].Lock()
		defer all[0].Unlock()
		for _, c := range all[0].Counts() {
			n += c.FramesReceived
		}
		return n
	}
	ping()
	before := received()
	const pings = 50
	for range pings {
		ping()
	}
	if n := received() - before; n > 2*pings { // a message each, and now and then credit
		t.Errorf("%d frames came with %d messages", n, pings)
	}
}

// A channel that its members have places in is remembered while it is open, and no longer.
func TestClosedChannelsAreForgotten(t *testing.T) {
	for _, linked := range []bool{false, true} { // all of them, before
		t.Run(fmt.Sprintf("linked: %v", linked), func(t *testing.T) {
			all := cluster(t, 3, 64<<10, nil)
			defer closeAll(all)
			ping := pinger(t, all[:2])
			if linked {
				ping()
			}
			open, close := rand.New(rand.NewPCG(1, 1)), rand.New(rand.NewPCG(2, 2))
			cs := make([]*p2p.Channel, len(all))
			for i := range 300 {
				name, places := reserve(all)
				for _, r := range open.Perm(len(all)) {
					var err error
					if cs[r], err = all[r].Open(name, p2p.Epoch{}, ranks(len(all)), places, i%2 == 0); err != nil {
						t.Fatal(err)
					}
					settle(all[r], places, r)
					if i%3 == 0 { // before the others have opened it
						cs[r].Close()
					}
				}
				for _, r := range close.Perm(len(all)) {
					cs[r].Close()
				}
				if linked && i%16 == 0 {
					ping()
				}
			}
			if linked {
				ping()
			}
			for r, p := range all {
				if open, named := p.Remembered(); open > 1 || named > 1 { // that of pinger
					t.Errorf("rank %d has %d channels and remembers %d names after all were closed", r, open, named)
				}
			}
		})
	}
}

// Of the channels that failed before they were closed, a rank remembers the newest. A peer that
// comes to an older one later is told that it is closed, and no more.
func TestFailuresOfClosedChannelsAreForgotten(t *testing.T) {
	for what, fail := range map[string]func(*p2p.Channel){
		"aborted": func(c *p2p.Channel) { c.Abort(errors.New("late"), []byte("its time was up")) },
		"left":    func(c *p2p.Channel) { c.Leave(0) },
	} {
		t.Run(what, func(t *testing.T) {
			all := cluster(t, 2, 64<<10, nil)
			defer closeAll(all)
			type channel struct {
				name   p2p.Name
				places []uint64
			}
			made := make([]channel, 3*p2p.MaxFailed)
			for i := range made {
				name, places := reserve(all)
				made[i] = channel{name, places}
				c := opened(t, all, 0, name, places)
				settle(all[0], places, 0)
				all[0].Lock()
				fail(c)
				all[0].Unlock()
				c.Close()
			}
			if open, named := all[0].Remembered(); open > 0 || named != p2p.MaxFailed {
				t.Errorf("%d channels are open and %d remembered, want none and %d", open, named, p2p.MaxFailed)
			}
			first := len(made) - p2p.MaxFailed // that is remembered
			for _, i := range []int{0, first - 1, first, len(made) - 1} {
				ch := opened(t, all, 1, made[i].name, made[i].places)
				var err error
				polled(all[0], func() { err = receive(all[1], ch, false) })
				failed := errors.As(err, new(*p2p.Aborted)) || errors.Is(err, p2p.ErrLeft)
				all[1].Lock()
				closed := ch.Closed(0)
				all[1].Unlock()
				if err == nil || failed != (i >= first) || !failed && !closed {
					t.Errorf("channel %d of %d: the receive failed with %v, the peer was told that it is closed: %v", i,
						len(made), err, closed)
				}
			}
		})
	}
}

// What a peer sends on a channel before it is opened here is kept until the reservation is settled.
// Then the peer learns that it will not be opened, also if it has only named the channel.
func TestSettlingDropsUnopenedChannels(t *testing.T) {
	for _, c := range []struct{ opened, sends bool }{{true, true}, {false, true}, {false, false}} {
		t.Run(fmt.Sprintf("opened: %v, the peer sends: %v", c.opened, c.sends), func(t *testing.T) {
			all := cluster(t, 2, 64<<10, nil)
			defer closeAll(all)
			ping := pinger(t, all)
			ping()
			reserve(all)
			name, places := reserve(all)
			a := opened(t, all, 0, name, places)
			if c.sends {
				sendByte(t, all[0], a)
			} else {
				all[0].Lock()
				a.PostRecv(new(p2p.Recv), 1, p2p.Token{Seq: 1}, make([]byte, 1), false) // names the channel
				all[0].Unlock()
			}
			ping()
			if c.opened {
				b := opened(t, all, 1, name, places)
				settle(all[1], places, 1)
				if err := receive(all[1], b, false); err != nil {
					t.Error(err)
				}
				return
			}
			settle(all[1], places, 1)
			ping()
			if open, _ := all[1].Remembered(); open > 1 {
				t.Errorf("%d channels are open", open)
			}
			all[0].Lock()
			defer all[0].Unlock()
			if !a.Closed(1) {
				t.Error("the peer waits for a channel that is not opened")
			}
		})
	}
}

// A peer may have gone on to the next epoch of a channel before the reservation is settled here.
func TestSettlingKeepsLaterEpochs(t *testing.T) {
	all := cluster(t, 2, 64<<10, nil)
	defer closeAll(all)
	ping := pinger(t, all)
	name, places := reserve(all)
	next := func(r int, c *p2p.Channel) *p2p.Channel {
		t.Helper()
		all[r].Lock()
		defer all[r].Unlock()
		c, err := c.Next(p2p.Epoch{View: 1}, ranks(2))
		if err != nil {
			t.Fatal(err)
		}
		return c
	}
	a, b := opened(t, all, 0, name, places), opened(t, all, 1, name, places)
	a = next(0, a)
	sendByte(t, all[0], a)
	ping()
	settle(all[1], places, 1)
	ping()
	all[0].Lock()
	if a.Closed(1) {
		t.Error("the peer was told that the channel is closed")
	}
	all[0].Unlock()
	if err := receive(all[1], next(1, b), false); err != nil {
		t.Error(err)
	}
}

// opened opens a channel of two ranks for rank r.
func opened(t *testing.T, all []*p2p.Proxy, r int, name p2p.Name, places []uint64) *p2p.Channel {
	t.Helper()
	c, err := all[r].Open(name, p2p.Epoch{}, ranks(2), places, false)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// sendByte sends what receive gets, to rank 1.
func sendByte(t *testing.T, p *p2p.Proxy, c *p2p.Channel) {
	t.Helper()
	p.Lock()
	defer p.Unlock()
	if err := c.Send(patient(context.Background()), 1, p2p.Token{Seq: 1}, []byte{1}); err != nil {
		t.Fatal(err)
	}
}

// either runs a test with a channel that all ranks know, and with one in which they have places.
func either(t *testing.T, what string, f func(*testing.T, []*p2p.Proxy, p2p.Name, []uint64)) {
	for _, kind := range []string{"known", "reserved"} {
		t.Run(what+", "+kind, func(t *testing.T) {
			all := cluster(t, 2, 64<<10, nil)
			defer closeAll(all)
			if kind == "known" {
				f(t, all, known(7), nil)
				return
			}
			name, places := reserve(all)
			f(t, all, name, places)
		})
	}
}

// reserve has the ranks reserve names, the first of which counts.
func reserve(all []*p2p.Proxy) (name p2p.Name, places []uint64) {
	for _, p := range all {
		n := p.Reserve(2)
		if name == (p2p.Name{}) {
			name = n
		}
		places = append(places, n.Number)
	}
	return name, places
}

// settle ends a rank's reservation, if places is not nil.
func settle(p *p2p.Proxy, places []uint64, rank int) {
	if places != nil {
		p.Settle(p2p.Name{Number: places[rank]})
	}
}

// pinger returns what has rank 1 send rank 0 a message, and wait for another.
func pinger(t *testing.T, all []*p2p.Proxy) func() {
	chans := []*p2p.Channel{open(t, all[0], 1, 2), open(t, all[1], 1, 2)}
	tok := p2p.Token{}
	return func() {
		t.Helper()
		tok.Seq++
		var wg sync.WaitGroup
		for r, p := range all {
			wg.Go(func() {
				p.Lock()
				defer p.Unlock()
				var in p2p.Recv
				w := patient(context.Background())
				chans[r].PostRecv(&in, 1-r, tok, make([]byte, 1), false)
				err := chans[r].Send(w, 1-r, tok, []byte{1})
				if err == nil {
					err = chans[r].WaitRecv(w, &in)
				}
				if err != nil {
					t.Errorf("rank %d: %v", r, err)
				}
			})
		}
		wg.Wait()
	}
}

// polled calls f while another goroutine makes progress for p.
func polled(p *p2p.Proxy, f func()) {
	ctx, stop := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	wg.Go(func() {
		p.Lock()
		defer p.Unlock()
		for w := patient(ctx); p.Progress(w) == nil; {
		}
	})
	f()
	stop()
	wg.Wait()
}

// receive waits for a message of a byte from rank 0.
func receive(p *p2p.Proxy, c *p2p.Channel, tagged bool) error {
	p.Lock()
	defer p.Unlock()
	w, buf := patient(context.Background()), make([]byte, 1)
	if tagged {
		var r p2p.RecvReq
		c.PostMsg(&r, 0, 3, 0, buf)
		return c.WaitMsg(w, &r)
	}
	var r p2p.Recv
	c.PostRecv(&r, 0, p2p.Token{Seq: 1}, buf, false)
	return c.WaitRecv(w, &r)
}
