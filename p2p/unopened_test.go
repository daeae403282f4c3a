package p2p_test

import (
	"errors"
	"sync/atomic"
	"testing"

	"tutti/p2p"
)

// early is a link on which a peer sends an empty message on each channel with these numbers.
type early struct {
	muted
	numbers []int
	sent    uint32
	named   bool
	h       p2p.Header
}

func (e *early) Recv() (*p2p.Header, []byte, error) {
	switch {
	case len(e.numbers) == 0:
		return nil, nil, nil
	case e.named:
		e.h = p2p.Header{Kind: frameEager, Chan: e.sent}
	default:
		e.h = p2p.Header{Kind: frameOpen, Chan: e.sent, Call: uint64(e.numbers[0])}
	}
	return &e.h, []byte{}, nil
}

func (e *early) Release() {
	if e.named = !e.named; !e.named {
		e.sent, e.numbers = e.sent+1, e.numbers[1:]
	}
}

// A peer that uses too many channels that are not open loses its own link alone, and its next
// incarnation may use as many as any.
func TestChannelsThatAreNotOpenCountForTheirUser(t *testing.T) {
	p, a := accepting(t, p2p.Identity{Rank: 0, Incarnation: 1}, 3, true)
	_, most := p.Unopened(1)
	send := func(rank int, incarnation uint64, numbers ...int) {
		t.Helper()
		e := &early{muted: muted{fails: &atomic.Bool{}}, numbers: numbers}
		accept(t, a.host, p2p.Identity{Rank: rank, Incarnation: incarnation}, e)
		p.Lock()
		defer p.Unlock()
		for len(e.numbers) > 0 && p.Down(rank) == nil {
			p.Look()
		}
	}
	count := func(rank, want int) {
		t.Helper()
		if n, _ := p.Unopened(rank); n != want {
			t.Errorf("rank %d uses %d channels that are not open, want %d", rank, n, want)
		}
	}
	down := func(rank int) error {
		p.Lock()
		defer p.Unlock()
		return p.Down(rank)
	}
	many := make([]int, most+1)
	for i := range many {
		many[i] = i + 1
	}
	send(1, 2, many...)
	if err := down(1); !errors.Is(err, p2p.ErrProtocol) {
		t.Errorf("after %d channels: %v", len(many), err)
	}
	count(1, most)
	send(2, 3, 1, 9999) // one of which rank 1 has used, and one of its own
	if err := down(2); err != nil {
		t.Errorf("another rank, after two channels: %v", err)
	}
	count(2, 2)

	p.MarkDead(1, 2, errors.New("it has left"))
	send(1, 4, 2)
	if err := down(1); err != nil {
		t.Errorf("the next incarnation: %v", err)
	}
	count(1, 1)
	if n, _ := p.Remembered(); n != 3 {
		t.Errorf("there are %d channels, want 3", n)
	}
	for i, number := range []uint64{1, 2} { // of rank 2, and of rank 1
		c, err := p.Open(known(number), p2p.Epoch{}, ranks(3), nil, true)
		if err != nil {
			t.Fatal(err)
		}
		p.Lock()
		var r p2p.RecvReq
		c.PostMsg(&r, 2-i, p2p.AnyTag, 0, nil)
		if err := c.WaitMsg(patient(t.Context()), &r); err != nil {
			t.Errorf("the message that came before channel %d was opened: %v", number, err)
		}
		p.Unlock()
	}
	count(1, 0)
	count(2, 1)
}
