package p2p_test

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"testing"

	"pgregory.net/rapid"

	"tutti/p2p"
)

// settled returns when rank 1 has handled everything that rank 0 says over their link before a
// message of it.
func (x *couple) settled(t *testing.T) {
	t.Helper()
	x.send(9, "mark")
	x.want(t, 9, "mark")
}

// inOrder opens a rank's end of another channel, for the ordered lane.
func (x *couple) inOrder(t *testing.T, rank int) *p2p.Channel {
	t.Helper()
	return channel(t, x.m[rank], 3, 0, 2, false)
}

// A message of the ordered lane that is lost with the link is missed at both ends, also if the
// receiver has used the channel with nobody when the link breaks, or has not opened it. The
// receiver may open it and post the receive at any time. Both go on in the next epoch.
func TestLostOrderedMessagesAreMissed(t *testing.T) {
	steps := []string{"before the cut", "without a link", "while it is made", "before the news", "after the news"}
	for opened := range steps {
		for posted := opened; posted < len(steps); posted++ {
			t.Run(fmt.Sprintf("opened %s, posted %s", steps[opened], steps[posted]), func(t *testing.T) {
				x := broken(t, 0)
				x.open(1)
				a, b := x.m[0], x.m[1]
				ca := x.inOrder(t, 0)
				var cb *p2p.Channel
				var r p2p.Recv
				at := func(step int) {
					if step == opened {
						cb = x.inOrder(t, 1)
					}
					if step == posted {
						b.Lock()
						cb.PostRecv(&r, 0, p2p.Token{Seq: 1}, make([]byte, 4), false)
						b.Unlock()
					}
				}
				at(0)
				send(t, a, ca, 1, 1, "lost")
				x.cut(1)
				at(1)
				b.Reconnect(0)
				at(2)
				a.Reconnect(1)
				x.until(true)
				at(3)
				x.settled(t)
				at(4)
				b.Lock()
				var gone *p2p.PeerError
				if err := cb.Err(); !errors.As(err, &gone) || gone.Rank != 0 {
					t.Errorf("the channel: %v, want an error that names rank 0", err)
				} else if posted > 1 && !errors.Is(err, p2p.ErrLost) {
					t.Errorf("the channel: %v, want %v", err, p2p.ErrLost)
				}
				b.Unlock()
				ca, cb = next(t, a, ca, 1, 0, ranks(2)), next(t, b, cb, 1, 0, ranks(2))
				send(t, a, ca, 1, 1, "next")
				recv(t, b, cb, 0, 1, "next")
				send(t, b, cb, 0, 1, "back")
				recv(t, a, ca, 1, 1, "back")
			})
		}
	}
}

// What a rank says of an epoch that has ended at the other one, or that the other one has not come
// to yet, ends nothing in the epoch between.
func TestLostOrderedMessagesAreOfTheirEpoch(t *testing.T) {
	for _, ahead := range []int{0, 1} {
		t.Run(fmt.Sprintf("rank %d is ahead", ahead), func(t *testing.T) {
			x := broken(t, 0)
			x.open(1)
			c := []*p2p.Channel{x.inOrder(t, 0), x.inOrder(t, 1)}
			move := func(rank int, view uint64) { c[rank] = next(t, x.m[rank], c[rank], view, 0, ranks(2)) }
			if ahead == 0 {
				move(0, 1)
			}
			send(t, x.m[0], c[0], 1, 1, "lost")
			x.cut(1)
			if ahead == 1 {
				move(1, 1)
			}
			x.renew()
			x.settled(t)
			x.m[1].Lock()
			if err := c[1].Err(); err != nil {
				t.Errorf("the other epoch: %v", err)
			}
			x.m[1].Unlock()
			if ahead == 1 {
				move(0, 1)
				send(t, x.m[1], c[1], 0, 1, "next")
				recv(t, x.m[0], c[0], 1, 1, "next")
				return
			}
			move(1, 1)
			x.m[1].Lock()
			var r p2p.Recv
			c[1].PostRecv(&r, 0, p2p.Token{Seq: 1}, make([]byte, 4), false)
			err := c[1].Err()
			x.m[1].Unlock()
			lost(t, err)
			x.m[1].Lock()
			_, err = c[1].SendSome(0, p2p.Token{Seq: 1}, []byte("none gets it"))
			x.m[1].Unlock()
			lost(t, err)
			move(0, 2)
			move(1, 2)
			send(t, x.m[0], c[0], 1, 1, "next")
			recv(t, x.m[1], c[1], 0, 1, "next")
		})
	}
}

// The next incarnation of a rank hears nothing of what was lost with the one before, and makes no
// room for its channels.
func TestNextIncarnationHearsOfNoLostChannels(t *testing.T) {
	x := broken(t, 0)
	x.open(1)
	send(t, x.m[0], x.inOrder(t, 0), 1, 1, "lost")
	x.m[1].Close()
	x.m[0].MarkDead(1, 2, p2p.ErrPeerGone)
	x.m[1] = x.w.settle(t, 1, 2, 3)
	x.open(1)
	x.renew()
	x.settled(t)
	if n, _ := x.m[1].Unopened(0); n != 0 {
		t.Errorf("rank 0 uses %d channels that are not open, want none", n)
	}
}

// A rank that learns over a new link that its peer has aborted gets the reason, not that messages
// were lost.
func TestAbortSaysMoreThanALoss(t *testing.T) {
	x := broken(t, 0)
	x.open(1)
	ca, cb := x.inOrder(t, 0), x.inOrder(t, 1)
	send(t, x.m[0], ca, 1, 1, "lost")
	x.cut(1)
	x.m[0].Lock()
	ca.Abort(errors.New("why"), []byte("why"))
	x.m[0].Unlock()
	x.m[1].Reconnect(0)
	x.m[1].Lock()
	var r p2p.Recv
	cb.PostRecv(&r, 0, p2p.Token{Seq: 1}, make([]byte, 4), false)
	x.m[1].Unlock()
	x.m[0].Reconnect(1)
	x.until(true)
	x.settled(t)
	x.m[1].Lock()
	defer x.m[1].Unlock()
	var why *p2p.Aborted
	if err := cb.Err(); !errors.As(err, &why) || string(why.Payload) != "why" {
		t.Errorf("the channel: %v, want the abort", err)
	}
}

// Only an epoch of the ordered lane ends when the peer says so.
func TestTaggedChannelHasNoLostEpoch(t *testing.T) {
	p, c, _, y := halfway(t, p2p.Header{Kind: frameLost})
	p.Lock()
	defer p.Unlock()
	var r p2p.RecvReq
	c.PostMsg(&r, 1, 3, 0, make([]byte, 10))
	y.headers = []p2p.Header{{Kind: frameEager, Count: 3, Len: 10}}
	if err := c.WaitMsg(patient(t.Context()), &r); err != nil {
		t.Error(err)
	}
}

// Over links that break at any moment, the receives of an epoch get its messages in order. One that
// waits for a message that was sent gets it or fails, and nothing fails in an epoch without a
// break.
func TestOrderedMessagesOverBreakingLinks(t *testing.T) {
	outer := t
	rapid.Check(t, func(t *rapid.T) {
		x := broken(outer, 32<<10)
		x.open(1)
		x.t = t
		defer x.m[0].Close()
		defer x.m[1].Close()
		size := rapid.SampledFrom([]int{16, 20 << 10}).Draw(t, "size")
		message := func(from int, view, seq uint64) []byte {
			b := binary.LittleEndian.AppendUint64(make([]byte, 0, size), uint64(from)<<32|view<<16|seq)
			return b[:size]
		}
		type end struct {
			c    *p2p.Channel
			view uint64
			sent map[uint64]uint64 // messages, by view
			got  uint64
			r    *p2p.Recv
		}
		ends := [2]*end{{sent: map[uint64]uint64{}}, {sent: map[uint64]uint64{}}}
		breaks := map[uint64]bool{} // views in which a rank was when there was no link
		broke := func() { breaks[ends[0].view], breaks[ends[1].view] = true, true }
		move := func(rank int) {
			e := ends[rank]
			if e.c == nil {
				e.c = channel(outer, x.m[rank], 3, 0, 2, false)
				return
			}
			e.view, e.got, e.r = e.view+1, 0, nil
			e.c = next(outer, x.m[rank], e.c, e.view, 0, ranks(2))
		}
		send := func(rank int) {
			e := ends[rank]
			if e.c == nil {
				return
			}
			x.m[rank].Lock()
			defer x.m[rank].Unlock()
			seq := e.sent[e.view] + 1
			sent, err := e.c.SendSome(1-rank, p2p.Token{Seq: seq}, message(rank, e.view, seq))
			switch {
			case sent:
				e.sent[e.view] = seq
			case err != nil && !breaks[e.view]:
				t.Fatalf("rank %d sends in view %d: %v", rank, e.view, err)
			}
		}
		post := func(rank int) {
			e := ends[rank]
			if e.c == nil || e.r != nil {
				return
			}
			x.m[rank].Lock()
			defer x.m[rank].Unlock()
			if e.c.Err() == nil {
				e.r = &p2p.Recv{}
				e.c.PostRecv(e.r, 1-rank, p2p.Token{Seq: e.got + 1}, make([]byte, size), false)
			}
		}
		// check looks at the receive of a rank, and reports whether it has got a message.
		check := func(rank int) bool {
			e := ends[rank]
			if e.c == nil {
				return false
			}
			x.m[rank].Lock()
			defer x.m[rank].Unlock()
			err := e.c.Err()
			if err != nil && (!errors.As(err, new(*p2p.PeerError)) || !breaks[e.view]) {
				t.Fatalf("rank %d in view %d: %v", rank, e.view, err)
			}
			if e.r == nil || !e.r.Done() {
				return false
			}
			e.got++
			if !bytes.Equal(e.r.View(), message(1-rank, e.view, e.got)) {
				t.Fatalf("rank %d has got another message than number %d of view %d", rank, e.got, e.view)
			}
			e.r = nil
			return true
		}
		drawn := func() int { return rapid.IntRange(0, 1).Draw(t, "rank") }
		actions := map[string]func(*rapid.T){
			"send": func(*rapid.T) { send(drawn()) },
			"post": func(*rapid.T) { post(drawn()) },
			"look": func(*rapid.T) {
				rank := drawn()
				x.look(rank)
				check(rank)
			},
			"move": func(*rapid.T) {
				if rank := drawn(); ends[rank].view <= ends[1-rank].view {
					move(rank)
				}
			},
			"cut": func(*rapid.T) {
				broke()
				x.cut(rapid.SampledFrom([][]int{{0}, {1}, {0, 1}}).Draw(t, "ranks")...)
				for range rapid.IntRange(0, 2).Draw(t, "without a link") {
					switch rank := drawn(); rapid.IntRange(0, 2).Draw(t, "what") {
					case 0:
						send(rank)
					case 1:
						post(rank)
					case 2:
						if ends[rank].view <= ends[1-rank].view {
							move(rank)
							broke()
						}
					}
				}
				x.renew()
			},
			"halve": func(*rapid.T) {
				broke()
				x.halve(drawn())
			},
		}
		t.Repeat(actions)
		for rank, e := range ends {
			for e.c == nil || e.view < ends[1-rank].view {
				move(rank)
			}
		}
		for idle := 0; idle < 3; idle++ {
			for rank := range ends {
				post(rank)
				x.look(0, 1)
				if check(rank) {
					idle = 0
				}
			}
		}
		for rank, e := range ends {
			x.m[rank].Lock()
			err := e.c.Err()
			x.m[rank].Unlock()
			if err == nil && e.got < ends[1-rank].sent[e.view] {
				t.Fatalf("rank %d waits for message %d of %d in view %d, which does not come", rank, e.got+1,
					ends[1-rank].sent[e.view], e.view)
			}
		}
	})
}
