package p2p_test

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"tutti/p2p"
	"tutti/p2p/inproc"
)

// member is a rank of a job in which ranks come and go.
type member struct {
	*p2p.Proxy
	mu     sync.Mutex
	events []error // of links, nil: up
	cut    atomic.Bool
	deaf   atomic.Bool   // it does not notice that links fail
	asked  chan struct{} // gets a value for every dial that arrives, unless it is full
}

// town is a directory of members, by rank.
type town struct {
	mu     sync.Mutex
	who    map[int]*member
	ids    map[int]p2p.Identity
	window int
}

func newTown() *town { return &town{who: map[int]*member{}, ids: map[int]p2p.Identity{}} }

func (w *town) settle(t *testing.T, rank, size int, incarnation uint64) *member {
	m := &member{asked: make(chan struct{}, 1)}
	id := p2p.Identity{Rank: rank, Incarnation: incarnation}
	m.Proxy = p2p.New(p2p.Config{Self: id, Size: size, Secret: []byte("0123456789abcdef"), Threads: true,
		Oversubscribed: true, Window: w.window,
		Transports: []p2p.Transport{&wrapping{&asking{inproc.New(inproc.Config{RingBytes: 16 << 10}), m},
			func(l p2p.Link) p2p.Link { return &cutLink{l, m} }}},
		Notify: func(_ p2p.Identity, err error) {
			m.mu.Lock()
			m.events = append(m.events, err)
			m.mu.Unlock()
		},
		Resolve: func(_ context.Context, r int) (p2p.Peer, error) {
			w.mu.Lock()
			defer w.mu.Unlock()
			return p2p.Peer{Identity: w.ids[r], Endpoints: w.who[r].Endpoints()}, nil
		}})
	if _, err := m.Listen(context.Background()); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { m.Close() })
	w.mu.Lock()
	w.who[rank], w.ids[rank] = m, id
	w.mu.Unlock()
	return m
}

func (m *member) lastEvent() error {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.events[len(m.events)-1]
}

// asking tells its member when a peer asks for a link.
type asking struct {
	p2p.Transport
	m *member
}

func (a *asking) Listen(ctx context.Context, h p2p.Host) ([]byte, error) {
	return a.Transport.Listen(ctx, &askedHost{h, a.m})
}

type askedHost struct {
	p2p.Host
	m *member
}

func (h *askedHost) Admit(from p2p.Identity) error {
	defer func() {
		select {
		case h.m.asked <- struct{}{}:
		default:
		}
	}()
	return h.Host.Admit(from)
}

// cutLink fails, or hides that it has failed, when its member says so.
type cutLink struct {
	p2p.Link
	m *member
}

func (l *cutLink) Recv() (*p2p.Header, []byte, error) {
	if l.m.cut.Load() {
		return nil, nil, p2p.ErrPeerGone
	}
	h, payload, err := l.Link.Recv()
	if err != nil && l.m.deaf.Load() {
		return nil, nil, nil
	}
	return h, payload, err
}

func channel(t *testing.T, m *member, number, view uint64, n int, tagged bool) *p2p.Channel {
	t.Helper()
	c, err := m.Open(known(number), p2p.Epoch{View: view}, ranks(n), nil, tagged)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

func send(t *testing.T, m *member, c *p2p.Channel, to int, seq uint64, text string) {
	t.Helper()
	m.Lock()
	defer m.Unlock()
	if err := c.Send(patient(context.Background()), to, p2p.Token{Seq: seq}, []byte(text)); err != nil {
		t.Fatal(err)
	}
}

func recv(t *testing.T, m *member, c *p2p.Channel, from int, seq uint64, want string) {
	t.Helper()
	m.Lock()
	defer m.Unlock()
	var r p2p.Recv
	c.PostRecv(&r, from, p2p.Token{Seq: seq}, make([]byte, len(want)), false)
	if err := c.WaitRecv(patient(context.Background()), &r); err != nil {
		t.Fatal(err)
	}
	if string(r.View()) != want {
		t.Errorf("got %q, want %q", r.View(), want)
	}
}

func next(t *testing.T, m *member, c *p2p.Channel, view, attempt uint64, ranks []int) *p2p.Channel {
	t.Helper()
	m.Lock()
	defer m.Unlock()
	c, err := c.Next(p2p.Epoch{View: view, Attempt: attempt}, ranks)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// Only what was sent in the epoch that a rank has come to arrives there: nothing of earlier ones,
// and everything that came too soon.
func TestMessagesArriveInTheirEpochOnly(t *testing.T) {
	w := newTown()
	a, b := w.settle(t, 0, 2, 1), w.settle(t, 1, 2, 2)
	const first, many = 1<<40 - 1, 1 << 63 // nothing of an epoch is cut off
	ca, cb := channel(t, a, 7, first, 2, false), channel(t, b, 7, first, 2, false)
	send(t, a, ca, 1, 1, "both are in the first")
	recv(t, b, cb, 0, 1, "both are in the first")
	send(t, a, ca, 1, 2, "of the first")
	send(t, b, cb, 0, 2, "of the first")
	ca = next(t, a, ca, first, 1<<20, ranks(2))
	send(t, a, ca, 1, 3, "of the second, where b never is")
	ca = next(t, a, ca, many, 0, ranks(2))
	send(t, a, ca, 1, 4, "of the third")
	var r p2p.Recv
	b.Lock()
	cb.PostRecv(&r, 0, p2p.Token{Seq: 9}, make([]byte, 3), false)
	b.Unlock()
	cb = next(t, b, cb, many, 0, ranks(2))
	send(t, b, cb, 0, 5, "back")
	recv(t, b, cb, 0, 4, "of the third")
	recv(t, a, ca, 1, 5, "back")
	for _, c := range []*p2p.Channel{ca, cb} {
		l := c.Ledger(map[*p2p.Channel]int{ca: 1, cb: 0}[c])
		if l.Held != 0 {
			t.Errorf("%+v: something is left over", l)
		}
	}
	ca.Close()
	if _, err := a.Open(known(7), p2p.Epoch{View: many + 1}, ranks(2), nil, false); err == nil {
		t.Error("a closed channel was opened again")
	}
}

// Another incarnation takes a dead rank's place: operations under way fail, later ones work, over
// the links that stay.
func TestReplacement(t *testing.T) {
	w := newTown()
	a, b, c := w.settle(t, 0, 3, 1), w.settle(t, 1, 3, 2), w.settle(t, 2, 3, 3)
	all := []*member{a, b, c}
	var ord, tag [3]*p2p.Channel
	for i, m := range all {
		ord[i], tag[i] = channel(t, m, 1, 1, 3, false), channel(t, m, 2, 0, 3, true)
	}
	send(t, a, ord[0], 1, 1, "hello")
	recv(t, b, ord[1], 0, 1, "hello")
	send(t, a, ord[0], 2, 1, "hello")
	recv(t, c, ord[2], 0, 1, "hello")
	link := a.Linked(2)

	big, in := make([]byte, 1<<20), make([]byte, 10)
	var s p2p.SendReq
	var r p2p.RecvReq
	a.Lock()
	tag[0].PostSend(&s, 1, 5, 0, big)
	tag[0].PostMsg(&r, 1, 6, 0, in)
	a.Unlock()
	b.Close()
	var gone *p2p.PeerError
	a.Lock()
	if err := tag[0].WaitSend(patient(context.Background()), &s); !errors.As(err, &gone) || gone.Rank != 1 {
		t.Errorf("a send to the dead: %v", err)
	}
	if err := tag[0].WaitMsg(patient(context.Background()), &r); !errors.As(err, &gone) || gone.Rank != 1 {
		t.Errorf("a receive from the dead: %v", err)
	}
	a.Unlock()
	for _, m := range []*member{a, c} {
		m.MarkDead(1, 0, p2p.ErrPeerGone)
	}
	if err := a.lastEvent(); err == nil {
		t.Error("Notify was not called although the link is down")
	}

	b = w.settle(t, 1, 3, 99)
	ord[1], tag[1] = channel(t, b, 1, 2, 3, false), channel(t, b, 2, 0, 3, true)
	b.Reconnect(0)
	b.Reconnect(2)
	b.Lock()
	tag[1].PostMsg(&r, 0, 5, 0, big)
	b.Unlock()
	send(t, b, ord[1], 0, 1, "in the new epoch") // a is not there yet
	if a.Linked(1) != 99 {
		t.Errorf("linked with incarnation %d", a.Linked(1))
	}
	a.Lock()
	var lost p2p.Recv
	ord[0].PostRecv(&lost, 1, p2p.Token{Seq: 2}, in, false)
	if err := ord[0].WaitRecv(patient(context.Background()), &lost); !errors.As(err, &gone) {
		t.Errorf("a receive in the old epoch: %v", err)
	}
	a.Unlock()
	ord[0] = next(t, a, ord[0], 2, 0, ranks(3))
	recv(t, a, ord[0], 1, 1, "in the new epoch")
	done := make(chan error)
	go func() {
		a.Lock()
		defer a.Unlock()
		tag[0].PostSend(&s, 1, 5, 0, big)
		done <- tag[0].WaitSend(patient(context.Background()), &s)
	}()
	b.Lock()
	if err := tag[1].WaitMsg(patient(context.Background()), &r); err != nil {
		t.Error(err)
	}
	b.Unlock()
	if err := <-done; err != nil {
		t.Error(err)
	}
	if a.Linked(2) != link {
		t.Error("the survivors' link was made anew")
	}
}

// Two live ranks that have lost their link make another one, whichever calls Reconnect first and
// however long before the other. Lost messages stay lost.
func TestLostLinkIsMadeAnewFromEitherSide(t *testing.T) {
	for first := range 2 {
		w := newTown()
		a, b := w.settle(t, 0, 2, 1), w.settle(t, 1, 2, 2)
		ca, cb := channel(t, a, 1, 1, 2, false), channel(t, b, 1, 1, 2, false)
		send(t, a, ca, 1, 1, "x")
		recv(t, b, cb, 0, 1, "x")
		a.cut.Store(true)
		for _, x := range []struct {
			m    *member
			c    *p2p.Channel
			from int
		}{{a, ca, 1}, {b, cb, 0}} {
			x.m.Lock()
			var r p2p.Recv
			x.c.PostRecv(&r, x.from, p2p.Token{Seq: 2}, make([]byte, 1), false)
			if err := x.c.WaitRecv(patient(context.Background()), &r); !errors.Is(err, p2p.ErrPeerGone) {
				t.Error(err)
			}
			x.m.Unlock()
		}
		a.cut.Store(false)
		all := []*member{a, b}
		early, late := all[first], all[1-first]
		select {
		case <-late.asked: // for the first link
		default:
		}
		early.Reconnect(1 - first)
		for range 2 { // it is refused, and asks again
			select {
			case <-late.asked:
			case <-time.After(20 * time.Second):
				t.Fatalf("rank %d does not ask again", first)
			}
		}
		late.Reconnect(first)
		ca, cb = next(t, a, ca, 2, 0, ranks(2)), next(t, b, cb, 2, 0, ranks(2))
		send(t, a, ca, 1, 1, "y")
		recv(t, b, cb, 0, 1, "y")
		send(t, b, cb, 0, 1, "z")
		recv(t, a, ca, 1, 1, "z")
		if a.lastEvent() != nil || b.lastEvent() != nil {
			t.Error("a link that came up was not told of")
		}
	}
}

// A hint reaches every rank whose result depends on the hinting rank's data, along a chain.
func TestHintsReachDependentRanks(t *testing.T) {
	const n = 4
	for hinting := range n {
		all := cluster(t, n, 0, nil)
		chans := make([]*p2p.Channel, n)
		for r, p := range all {
			chans[r] = open(t, p, 1, n)
			p.Lock()
			chans[r].Begin(p2p.Token{Seq: 1}, r == hinting)
			p.Unlock()
		}
		for r, p := range all {
			p.Lock()
			w := patient(context.Background())
			var rc p2p.Recv
			if r > 0 {
				chans[r].PostRecv(&rc, r-1, p2p.Token{Seq: 1}, make([]byte, 1), false)
				if err := chans[r].WaitRecv(w, &rc); err != nil {
					t.Fatal(err)
				}
			}
			if r < n-1 {
				if err := chans[r].Send(w, r+1, p2p.Token{Seq: 1}, []byte{1}); err != nil {
					t.Fatal(err)
				}
			}
			if got := chans[r].Hinted(); got != (r >= hinting) {
				t.Errorf("rank %d with a hint of rank %d: %v", r, hinting, got)
			}
			p.Unlock()
		}
		closeAll(all)
	}
}
