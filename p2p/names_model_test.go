package p2p_test

import (
	"context"
	"slices"
	"testing"

	"pgregory.net/rapid"

	"tutti/p2p"
)

// The states of a rank in a channel of TestNamesOfChannels.
const (
	isReserved = iota
	isOpen     // but its reservation is not settled
	isSettled
	isClosed
	isRefused // settled without being opened
)

// Ranks open, settle, use, refuse and close several channels at a time, in any order. What a rank
// sends before it closes a channel arrives at each that opens it, no rank is told of an end that
// has not been, each is told of those that have, and nothing remains.
func TestNamesOfChannels(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		const n = 3
		all := cluster(t, n, 64<<10, nil)
		defer closeAll(all)
		world := meshOf(t, all)
		if rapid.Bool().Draw(t, "linked") {
			world()
		}
		type channel struct {
			name   p2p.Name
			places []uint64
			of     [n]*p2p.Channel
			state  [n]int
			sent   [n][n]bool
		}
		var live []*channel
		check := func(x *channel, r int) {
			var in [n]p2p.Recv
			all[r].Lock()
			for s := range n {
				switch {
				case s == r:
				case x.sent[s][r] || x.state[s] < isClosed:
					x.of[r].PostRecv(&in[s], s, p2p.Token{Seq: 1}, make([]byte, 1), false)
				default: // a receive would fail the channel
					x.of[r].Notice([]int{s}, 0, nil) // s answers that it has ended the channel
				}
			}
			all[r].Unlock()
			world()
			world() // an answer to what the first one has brought
			all[r].Lock()
			defer all[r].Unlock()
			for s := range n {
				if s == r {
					continue
				}
				if ended := x.state[s] >= isClosed; x.of[r].Closed(s) != ended {
					t.Fatalf("rank %d takes rank %d to have closed the channel: %v; the states are %v", r, s, !ended,
						x.state)
				}
				if in[s].Done() != x.sent[s][r] {
					t.Fatalf("rank %d has got a message of rank %d: %v; the states are %v", r, s, in[s].Done(), x.state)
				}
				x.sent[s][r] = false
			}
			x.of[r].Forget()
		}
		step := func(x *channel, r int) {
			switch p := all[r]; x.state[r] {
			case isReserved:
				if rapid.IntRange(0, 7).Draw(t, "refuse") == 0 {
					settle(p, x.places, r)
					x.state[r] = isRefused
					return
				}
				c, err := p.Open(x.name, p2p.Epoch{}, ranks(n), x.places, false)
				if err != nil {
					t.Fatal(err)
				}
				x.of[r], x.state[r] = c, isOpen
			case isOpen:
				settle(p, x.places, r)
				x.state[r] = isSettled
			case isSettled:
				switch to := rapid.IntRange(0, n-1).Draw(t, "to"); rapid.IntRange(0, 2).Draw(t, "what") {
				case 0:
					if to == r || x.sent[r][to] || x.state[to] >= isClosed {
						return
					}
					p.Lock()
					err := x.of[r].Send(patient(context.Background()), to, p2p.Token{Seq: 1}, []byte{1})
					p.Unlock()
					if err != nil {
						t.Fatalf("rank %d sends to rank %d: %v; the states are %v", r, to, err, x.state)
					}
					x.sent[r][to] = true
				case 1:
					check(x, r)
				default:
					x.of[r].Close()
					x.state[r] = isClosed
				}
			}
		}
		over := func(x *channel) bool { return slices.Min(x.state[:]) >= isClosed }
		for made := rapid.IntRange(1, 20).Draw(t, "channels"); made > 0 || len(live) > 0; {
			if made > 0 && len(live) < 4 {
				x := &channel{}
				for r := range rapid.IntRange(0, n).Draw(t, "others") { // reserve for something else
					all[r].Settle(all[r].Reserve(2))
				}
				x.name, x.places = reserve(all)
				live = append(live, x)
				made--
			}
			x := live[rapid.IntRange(0, len(live)-1).Draw(t, "channel")]
			step(x, rapid.IntRange(0, n-1).Draw(t, "rank"))
			live = slices.DeleteFunc(live, over)
		}
		world()
		world()
		for r, p := range all {
			if open, named := p.Remembered(); open != 1 || named != 1 { // that of world
				t.Fatalf("rank %d has %d channels and remembers %d names, after the end of all", r, open, named)
			}
		}
	})
}

// meshOf returns what has every rank send every other one a message, and wait for theirs.
func meshOf(t interface{ Fatal(...any) }, all []*p2p.Proxy) func() {
	var cs []*p2p.Channel
	for _, p := range all {
		cs = append(cs, open(t, p, 1, len(all)))
	}
	tok := p2p.Token{}
	each := func(f func(p *p2p.Proxy, c *p2p.Channel, peer int) error) {
		for r, p := range all {
			p.Lock()
			for s := range all {
				if s == r {
					continue
				}
				if err := f(p, cs[r], s); err != nil {
					t.Fatal(err)
				}
			}
			p.Unlock()
		}
	}
	return func() {
		tok.Seq++
		w := patient(context.Background())
		each(func(_ *p2p.Proxy, c *p2p.Channel, peer int) error { return c.Send(w, peer, tok, []byte{1}) })
		each(func(_ *p2p.Proxy, c *p2p.Channel, peer int) error {
			var in p2p.Recv
			c.PostRecv(&in, peer, tok, make([]byte, 1), false)
			return c.WaitRecv(w, &in)
		})
	}
}
