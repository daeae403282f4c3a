package roster

import (
	"context"
	"testing"

	"tutti/p2p"
	"tutti/p2p/inproc"
	"tutti/p2p/tcp"
	"tutti/pg/membership"
)

// soon returns a Wait that is patient.
func soon(ctx context.Context) *p2p.Wait {
	w := &p2p.Wait{}
	w.Reset(ctx, patience, true)
	return w
}

// send sends a message of one byte to rank 0 over channel c of p.
func send(t *testing.T, p *p2p.Proxy, c *p2p.Channel) {
	t.Helper()
	p.Lock()
	defer p.Unlock()
	if err := c.Send(soon(t.Context()), 0, p2p.Token{Seq: 1}, []byte{7}); err != nil {
		t.Fatal(err)
	}
}

// A rank is replaced while another one still has a link with its old incarnation. What the other
// one begins in the new view is with the new incarnation: it does not end with the old link. That
// is so for a member that misses the view between, and for a rank that comes in with the new
// incarnation, whether it has seen that the old one left or not.
func TestOldLinkEndsBeforeNewView(t *testing.T) {
	name, ranks := p2p.Name{Number: 1}, []int{0, 1}
	old, next := membership.Peer{Slot: 1, Incarnation: self + 1}, membership.Peer{Slot: 1, Incarnation: self + 9}
	me := membership.Peer{Slot: 0, Incarnation: self}
	full := membership.First([]uint64{self, self + 1, self + 2})
	without := full.Remove(0) // the view while rank 0 waits
	for via, transport := range map[string]func() p2p.Transport{
		"inproc": func() p2p.Transport { return inproc.New(inproc.Config{}) },
		"tcp":    func() p2p.Transport { return tcp.New(tcp.Config{Interfaces: "lo"}) },
	} {
		for what, views := range map[string][]membership.View{
			"a member":                     {full, full.Remove(1).Add(next)},
			"a rank that waits":            {without, without.Remove(1).Add(next, me)},
			"a rank that waits and looks":  {without, without.Remove(1), without.Remove(1).Add(next, me)},
			"a rank that waits for longer": {without, without.Add(next), without.Add(next).Add(me)},
		} {
			t.Run(what+" over "+via, func(t *testing.T) {
				f := newFixtureIn(t, views[0], 3, transport())
				s := f.open()
				if err := s.CompareAndSwap(t.Context(), membership.ViewKey, nil,
					membership.EncodeStored(self, views[0])); err != nil {
					t.Fatal(err)
				}
				c, err := f.proxy.Open(name, p2p.Epoch{}, ranks, nil, false)
				if err != nil {
					t.Fatal(err)
				}
				var r p2p.Recv
				f.changed = func() {
					if c, err = c.Next(p2p.Epoch{View: 1}, ranks); err == nil {
						c.PostRecv(&r, 1, p2p.Token{Seq: 1}, make([]byte, 1), false)
					}
				}
				was := f.link(old, transport())
				f.mu.Lock()
				delete(f.reached, old.Slot) // it ends
				f.mu.Unlock()
				f.Start()
				for _, v := range views[1:] {
					f.change(s, membership.EncodeStored(self, v))
					f.until("the view is known", func() (in bool) {
						err := f.Ask(t.Context(), func(m *membership.Machine) { in = m.View().Equal(v) })
						return err == nil && in
					})
				}
				f.until("the view is entered", func() bool { return f.told("view") })
				was.Close()
				f.until("the old link is down", func() bool { f.proxy.Idle(); return f.proxy.Linked(1) == 0 })
				if err != nil {
					t.Fatal(err)
				}
				now := f.link(next, transport())
				d, err := now.Open(name, p2p.Epoch{View: 1}, ranks, nil, false)
				if err != nil {
					t.Fatal(err)
				}
				send(t, now, d)
				f.proxy.Lock()
				defer f.proxy.Unlock()
				if err := c.WaitRecv(soon(t.Context()), &r); err != nil {
					t.Errorf("the message of the new incarnation: %v", err)
				}
			})
		}
	}
}

// A rank may know of a view late, and have a link with an incarnation that came after it. The link
// stays.
func TestLinkOfLaterViewStays(t *testing.T) {
	full := membership.First([]uint64{self, self + 1, self + 2})
	waiting := full.Remove(0, 1)
	me, other := membership.Peer{Slot: 0, Incarnation: self}, membership.Peer{Slot: 1, Incarnation: self + 8}
	entered, later := waiting.Add(me, other), membership.Peer{Slot: 1, Incarnation: self + 9}
	f := newFixtureIn(t, waiting, 3, inproc.New(inproc.Config{}))
	s := f.open()
	stored := membership.EncodeStored(self, waiting)
	if err := s.CompareAndSwap(t.Context(), membership.ViewKey, nil, stored); err != nil {
		t.Fatal(err)
	}
	f.Start()
	f.link(later, inproc.New(inproc.Config{}))
	for _, v := range []membership.View{entered, entered.Remove(1), entered.Remove(1).Add(later)} {
		f.change(s, membership.EncodeStored(self, v))
		f.until("the view is entered", func() bool { return f.View().Equal(v) })
		if err := f.Ask(t.Context(), func(*membership.Machine) {}); err != nil {
			t.Fatal(err)
		}
		if l := f.proxy.Linked(1); l != later.Incarnation {
			t.Errorf("after %v the link is with %d", v, l)
		}
	}
}
