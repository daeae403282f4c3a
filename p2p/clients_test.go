package p2p_test

import (
	"context"
	"errors"
	"log/slog"
	"testing"

	"tutti/p2p"
	"tutti/p2p/inproc"
	"tutti/p2p/linktest"
)

// counter takes clients.
type counter struct {
	links chan p2p.Link
	only  uint64 // incarnation that is admitted
}

func (c *counter) Admit(from p2p.Identity) error {
	if from.Incarnation != c.only {
		return p2p.ErrStale
	}
	return nil
}

func (c *counter) Accepted(from p2p.Identity, l p2p.Link, transport string) {
	if from.Role != p2p.RoleClient || transport != "inproc" {
		panic("a link of " + from.String() + " over " + transport)
	}
	c.links <- l
}

// A client's link is passed to Config.Clients, and is no peer of the proxy; without Clients it is
// refused.
func TestLinksOfClientsAreNoPeers(t *testing.T) {
	me := linktest.NewHost(0)
	me.ID = p2p.Identity{Incarnation: me.ID.Incarnation, Role: p2p.RoleClient}
	client := linktest.Listen(t, inproc.New(inproc.Config{}), me)
	takes := &counter{links: make(chan p2p.Link, 1), only: client.ID.Incarnation}
	for _, c := range []p2p.Clients{nil, takes, &counter{only: 1}} {
		self := p2p.Identity{Rank: 0, Incarnation: 7}
		p := p2p.New(p2p.Config{Self: self, Size: 2, Secret: linktest.Secret, Clients: c,
			Transports: []p2p.Transport{inproc.New(inproc.Config{})}, Logger: slog.New(slog.DiscardHandler),
			Resolve: func(context.Context, int) (p2p.Peer, error) { return p2p.Peer{}, p2p.ErrPeerGone }})
		at, err := p.Listen(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		l, err := client.T.Dial(t.Context(), self, at["inproc"])
		if c == takes {
			if err != nil {
				t.Fatal(err)
			}
			(<-takes.links).Close()
		} else if !errors.Is(err, p2p.ErrStale) {
			t.Errorf("with %v: %v, want %v", c, err, p2p.ErrStale)
		}
		if l != nil {
			l.Close()
		}
		p.Lock()
		for _, n := range p.Counts() {
			if n.Up {
				t.Errorf("rank %d is linked", n.Rank)
			}
		}
		p.Unlock()
		p.Close()
	}
}
