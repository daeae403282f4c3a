package p2p_test

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"testing"

	"tutti/p2p"
)

// piecemeal is a link whose messages of ten bytes come whole, or of which five come and then
// nothing or, if it is broken, the end of the link.
type piecemeal struct {
	muted
	headers       []p2p.Header
	whole, broken bool
	n             int
}

func (c *piecemeal) Recv() (*p2p.Header, []byte, error) {
	if len(c.headers) == 0 {
		return nil, nil, nil
	}
	h := &c.headers[0]
	if h.Len == 0 || c.whole {
		return h, make([]byte, h.Len), nil
	}
	return h, nil, nil
}
func (c *piecemeal) Release() { c.headers = c.headers[1:] }
func (c *piecemeal) Fill(b []byte) (int, error) {
	switch {
	case c.n == 0:
		c.n = copy(b, "half ")
		return c.n, nil
	case c.broken:
		return 0, fmt.Errorf("it is gone: %w", p2p.ErrPeerGone)
	}
	return 0, nil
}

// acceptor gives a proxy links of its peer.
type acceptor struct {
	hostile
	host p2p.Host
}

func (a *acceptor) Listen(_ context.Context, h p2p.Host) ([]byte, error) {
	a.host = h
	return []byte{1}, nil
}

// accepting returns a proxy that dials nobody and listens until the test ends, and what gives it
// links.
func accepting(t *testing.T, self p2p.Identity, size int, oversubscribed bool) (*p2p.Proxy, *acceptor) {
	t.Helper()
	a := &acceptor{}
	p := p2p.New(p2p.Config{Self: self, Size: size, Secret: []byte("0123456789abcdef"), Threads: true,
		Oversubscribed: oversubscribed, Transports: []p2p.Transport{a},
		Resolve: func(context.Context, int) (p2p.Peer, error) { return p2p.Peer{}, errors.New("it is not asked") }})
	t.Cleanup(func() { p.Close() })
	if _, err := p.Listen(t.Context()); err != nil {
		t.Fatal(err)
	}
	return p, a
}

// A receive whose message has begun to arrive fails with its link, though the peer has another link
// before anybody looks.
func TestMessageThatIsCutShortFailsItsReceive(t *testing.T) {
	peer := p2p.Identity{Rank: 0, Incarnation: 2} // of the lower rank, which may link at any time
	p, a := accepting(t, p2p.Identity{Rank: 1, Incarnation: 1}, 2, false)
	c, err := p.Open(known(1), p2p.Epoch{}, ranks(2), nil, true)
	if err != nil {
		t.Fatal(err)
	}
	first := &piecemeal{muted: muted{fails: &atomic.Bool{}}, broken: true, headers: []p2p.Header{
		{Kind: frameOpen, Call: 1}, {Kind: frameEager, Count: 3, Len: 10}}}
	accept(t, a.host, peer, first)
	var r p2p.RecvReq
	p.Lock()
	c.PostMsg(&r, 0, 3, 1, make([]byte, 10))
	for first.n == 0 || len(first.headers) == 2 {
		p.Look()
	}
	p.Look() // the link ends
	p.Unlock()
	p.Reconnect(0)
	accept(t, a.host, peer, &muted{fails: &atomic.Bool{}})
	p.Lock()
	defer p.Unlock()
	var gone *p2p.PeerError
	if err := c.WaitMsg(patient(t.Context()), &r); !errors.As(err, &gone) || gone.Rank != 0 {
		t.Errorf("the receive: %v", err)
	}
}

// tells is a link on which the channel is aborted once its rank has slept.
type tells struct {
	muted
	armed, late int // rounds before sleeps, and those of them after the news
	frames      []p2p.Header
}

func (l *tells) Recv() (*p2p.Header, []byte, error) {
	if l.armed == 0 || len(l.frames) == 0 {
		return nil, nil, nil
	}
	return &l.frames[0], []byte{}, nil
}
func (l *tells) Release() { l.frames = l.frames[1:] }
func (l *tells) Arm() bool {
	if l.armed++; len(l.frames) == 0 {
		l.late++
	}
	return false
}

// A waiter that shares its processor looks at what another rank has told before it sleeps again.
func TestWaiterLooksBeforeItSleeps(t *testing.T) {
	p, a := accepting(t, p2p.Identity{Rank: 0, Incarnation: 1}, 3, true)
	c := open(t, p, 1, 3)
	const frameAbort = 3 // see proxy.go
	other := &tells{muted: muted{fails: &atomic.Bool{}}, frames: []p2p.Header{
		{Kind: frameOpen, Call: 1}, {Kind: frameAbort}}}
	accept(t, a.host, p2p.Identity{Rank: 1, Incarnation: 2}, &muted{fails: &atomic.Bool{}})
	accept(t, a.host, p2p.Identity{Rank: 2, Incarnation: 3}, other)
	p.Lock()
	defer p.Unlock()
	var r p2p.Recv
	c.Begin(p2p.Token{Seq: 1}, false)
	c.PostRecv(&r, 1, p2p.Token{Seq: 1}, make([]byte, 8), true)
	if err := c.WaitRecv(patient(t.Context()), &r); !errors.As(err, new(*p2p.Aborted)) || other.late != 0 {
		t.Errorf("%v, after %d sleeps since the news", err, other.late)
	}
	c.Forget()
}
