package p2p_test

import (
	"bytes"
	"context"
	"sync/atomic"
	"testing"

	"tutti/p2p"
	"tutti/p2p/inproc"
)

// longestLink notes the longest payload that it is sent.
type longestLink struct {
	p2p.Link
	longest *atomic.Int64
}

func (l *longestLink) Send(h *p2p.Header, payload []byte) (bool, error) {
	l.longest.Store(max(l.longest.Load(), int64(len(payload))))
	return l.Link.Send(h, payload)
}

// The window of a subgroup's channel depends on its members, and not on the ranks of the job: in
// all epochs, and for what comes before the channel is open. One without places may grow to all
// ranks.
func TestWindowDependsOnMembers(t *testing.T) {
	const size, messages = 4096, 7
	var all [2]*p2p.Proxy
	var longest atomic.Int64
	id := func(r int) p2p.Identity { return p2p.Identity{Rank: r, Incarnation: uint64(r) + 1} }
	for r := range all {
		all[r] = p2p.New(p2p.Config{Self: id(r), Size: size, Secret: []byte("0123456789abcdef"), Threads: true,
			Oversubscribed: true, Transports: []p2p.Transport{&wrapping{inproc.New(inproc.Config{RingBytes: 4 << 20}),
				func(l p2p.Link) p2p.Link { return &longestLink{l, &longest} }}},
			Resolve: func(_ context.Context, rank int) (p2p.Peer, error) {
				return p2p.Peer{Identity: id(rank), Endpoints: all[rank].Endpoints()}, nil
			}})
	}
	defer closeAll(all[:])
	for _, p := range all {
		if _, err := p.Listen(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	windows := func(what string, a, b *p2p.Channel, want int) {
		t.Helper()
		for r, got := range []int{a.Ledger(1).Window, b.Ledger(0).Window} {
			if got != want {
				t.Errorf("%s: rank %d has a window of %d bytes, want %d", what, r, got, want)
			}
		}
	}
	windows("all ranks", open(t, all[0], 1, 2), open(t, all[1], 1, 2), 32<<10)

	name, places := reserve(all[:])
	a := opened(t, all[:], 0, name, places)
	message := bytes.Repeat([]byte("ahead of"), 1<<17)
	polled(all[1], func() {
		all[0].Lock()
		defer all[0].Unlock()
		for i := range uint64(messages) {
			if err := a.Send(patient(t.Context()), 1, p2p.Token{Seq: i + 1}, message); err != nil {
				t.Error(err)
				return
			}
		}
	})
	b := opened(t, all[:], 1, name, places)
	windows("a subgroup of two", a, b, 8<<20)
	if n := longest.Load(); n != 512<<10 {
		t.Errorf("a message of %d bytes goes in frames of %d, want %d", len(message), n, 512<<10)
	}
	all[1].Lock()
	for i := range uint64(messages) {
		var r p2p.Recv
		b.PostRecv(&r, 0, p2p.Token{Seq: i + 1}, make([]byte, len(message)), false)
		if err := b.WaitRecv(patient(t.Context()), &r); err != nil || !bytes.Equal(r.View(), message) {
			t.Errorf("message %d: %v", i, err)
		}
	}
	all[1].Unlock()

	var cs [2]*p2p.Channel
	for r, c := range []*p2p.Channel{a, b} {
		all[r].Lock()
		var err error
		if cs[r], err = c.Next(p2p.Epoch{View: 1}, ranks(2)); err != nil {
			t.Error(err)
		}
		all[r].Unlock()
	}
	windows("the next epoch", cs[0], cs[1], 8<<20)
}

// A rank that has not opened a channel returns credit for what it drops, however little the peer
// has: another one has aborted the channel.
func TestAbortedChannelReturnsCreditBeforeItIsOpened(t *testing.T) {
	const size = 4096
	w := newTown()
	a, b, c := w.settle(t, 0, size, 1), w.settle(t, 1, size, 2), w.settle(t, 2, size, 3)
	ca, cc := open(t, a.Proxy, 1, 3), open(t, c.Proxy, 1, 3)
	after, other := open(t, c.Proxy, 2, 3), open(t, b.Proxy, 2, 3)
	send(t, c, cc, 1, 1, "the last")
	c.Lock()
	cc.Abort(p2p.ErrClosed, nil)
	c.Unlock()
	send(t, c, after, 1, 1, "aborted")
	recv(t, b, other, 2, 1, "aborted")
	polled(b.Proxy, func() {
		for i := range uint64(4 * ca.Ledger(1).Window / (8 << 10)) {
			send(t, a, ca, 1, i+1, string(make([]byte, 8<<10)))
		}
	})
}
