package p2p_test

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"runtime"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"pgregory.net/rapid"

	"tutti/p2p"
)

// A couple is two ranks whose link breaks, each with its end of a channel for messages.
type couple struct {
	w    *town
	t    interface{ Fatal(...any) }
	m    [2]*member
	c    [2]*p2p.Channel
	over context.Context // has ended
}

// broken returns a couple that is linked. The second rank has not opened the channel yet.
func broken(t *testing.T, window int) *couple {
	w := newTown()
	w.window = window
	x := &couple{w: w, t: t, m: [2]*member{w.settle(t, 0, 2, 1), w.settle(t, 1, 2, 2)}}
	var cancel context.CancelFunc
	x.over, cancel = context.WithCancel(context.Background())
	cancel()
	x.open(0)
	x.renew()
	return x
}

func (x *couple) open(rank int) {
	c, err := x.m[rank].Open(known(2), p2p.Epoch{}, ranks(2), nil, true)
	if err != nil {
		x.t.Fatal(err)
	}
	x.c[rank] = c
}

// look has ranks handle what has arrived.
func (x *couple) look(ranks ...int) {
	for _, r := range ranks {
		x.m[r].Lock()
		x.m[r].Look()
		x.m[r].Unlock()
	}
}

// until looks at both ranks until both are linked, or neither is.
func (x *couple) until(linked bool) { x.untilAt(linked, 0, 1) }

// untilAt looks at ranks until all of them are linked, or none is.
func (x *couple) untilAt(linked bool, ranks ...int) {
	for end := time.Now().Add(20 * time.Second); ; runtime.Gosched() {
		x.look(ranks...)
		if !slices.ContainsFunc(ranks, func(r int) bool { return x.m[r].Linked(1-r) != 0 != linked }) {
			return
		}
		if time.Now().After(end) {
			x.t.Fatal(fmt.Sprintf("ranks %v are linked: not %v", ranks, linked))
		}
	}
}

// cut breaks the link. Ranks that it does not name read what was sent to them before.
func (x *couple) cut(ranks ...int) {
	for _, r := range ranks {
		x.m[r].cut.Store(true)
	}
	x.until(false)
	for _, r := range ranks {
		x.m[r].cut.Store(false)
	}
}

// halve breaks the link at one rank, which connects anew. The other one does not notice the break,
// and does not look meanwhile.
func (x *couple) halve(rank int) {
	m, other := x.m[rank], x.m[1-rank]
	other.deaf.Store(true)
	defer other.deaf.Store(false)
	m.cut.Store(true)
	x.untilAt(false, rank)
	m.cut.Store(false)
	other.Age(rank, p2p.HandshakeTimeout+time.Minute)
	m.Reconnect(1 - rank)
	x.untilAt(true, rank)
	x.until(true)
}

func (x *couple) renew() {
	x.m[1].Reconnect(0)
	x.m[0].Reconnect(1)
	x.until(true)
}

// send sends a message of rank 0 that goes at once.
func (x *couple) send(tag uint64, text string) {
	x.m[0].Lock()
	defer x.m[0].Unlock()
	var s p2p.SendReq
	x.c[0].PostSend(&s, 1, tag, 0, []byte(text))
	if err := x.c[0].WaitSend(patient(context.Background()), &s); err != nil {
		x.t.Fatal(err)
	}
}

// recv returns rank 1's next message with a tag.
func (x *couple) recv(from int, tag int64, n int) (string, error) {
	x.m[1].Lock()
	defer x.m[1].Unlock()
	var r p2p.RecvReq
	buf := make([]byte, n)
	x.c[1].PostMsg(&r, from, tag, 0, buf)
	err := x.c[1].WaitMsg(patient(context.Background()), &r)
	return string(buf), err
}

func (x *couple) want(t *testing.T, tag int64, want string) {
	t.Helper()
	if got, err := x.recv(0, tag, len(want)); err != nil || got != want {
		t.Errorf("the message with tag %d is %q (%v), want %q", tag, got, err, want)
	}
}

// lost checks that err says that messages of rank 0 are lost.
func lost(t *testing.T, err error) {
	t.Helper()
	var gone *p2p.PeerError
	if !errors.As(err, &gone) || gone.Rank != 0 || !errors.Is(err, p2p.ErrLost) {
		t.Errorf("got %v, want %v", err, p2p.ErrLost)
	}
}

// After a link of two live ranks was made anew, no receive gets a message in the place of one that
// was lost with it, and messages that came before are received. The receiver may open the channel
// at any time.
func TestLostMessagesAreMissed(t *testing.T) {
	for opened, name := range []string{"opened before", "opened between", "opened after"} {
		for _, came := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s, came %v", name, came), func(t *testing.T) {
				x := broken(t, 0)
				at := func(step int) {
					if step == opened {
						x.open(1)
					}
				}
				at(0)
				x.send(5, "first")
				x.send(6, "other")
				if came {
					x.look(1)
				}
				x.cut(1)
				at(1)
				x.renew()
				x.send(5, "second")
				x.look(1)
				at(2)
				if came {
					x.want(t, 5, "first")
				} else {
					_, err := x.recv(0, 5, 6)
					lost(t, err)
				}
				x.want(t, 5, "second")
				if came {
					x.want(t, 6, "other")
				}
				x.send(6, "last")
				x.want(t, 6, "last")
			})
		}
	}
}

// The next incarnation of a rank misses nothing that was sent to the one before, and is not taken
// to have sent what that one did.
func TestNextIncarnationMissesNothing(t *testing.T) {
	x := broken(t, 0)
	x.open(1)
	for _, from := range []int{0, 1} {
		x.m[from].Lock()
		var s p2p.SendReq
		x.c[from].PostSend(&s, 1-from, 5, 0, []byte("lost"))
		x.m[from].Unlock()
	}
	x.m[1].Close()
	x.m[0].MarkDead(1, 2, p2p.ErrPeerGone)
	x.m[1] = x.w.settle(t, 1, 2, 3)
	x.open(1)
	x.renew()
	x.send(5, "next")
	x.want(t, 5, "next")
	x.m[1].Lock()
	var s p2p.SendReq
	x.c[1].PostSend(&s, 0, 5, 0, []byte("back"))
	x.m[1].Unlock()
	x.m[0].Lock()
	defer x.m[0].Unlock()
	var r p2p.RecvReq
	buf := make([]byte, 4)
	x.c[0].PostMsg(&r, 1, 5, 0, buf)
	if err := x.c[0].WaitMsg(patient(t.Context()), &r); err != nil || string(buf) != "back" {
		t.Errorf("the first message of the next incarnation: %q, %v", buf, err)
	}
}

// A restricted channel has no messages with an incarnation that comes in a member's place, and that
// one does not hear of the channel. Another channel uses the same link.
func TestRestrictedChannelEndsWithIncarnation(t *testing.T) {
	for _, used := range []bool{true, false} {
		t.Run(fmt.Sprint("used before: ", used), func(t *testing.T) {
			x := broken(t, 0)
			a := x.m[0]
			c, err := a.Open(known(3), p2p.Epoch{}, ranks(2), []uint64{0, 1}, true)
			if err != nil {
				t.Fatal(err)
			}
			short, long := []byte("short"), make([]byte, 100<<10)
			send := func(msg []byte) error {
				a.Lock()
				defer a.Unlock()
				var s p2p.SendReq
				c.PostSend(&s, 1, 5, 0, msg)
				return c.WaitSend(patient(t.Context()), &s)
			}
			a.Lock()
			c.Restrict([]uint64{1, 2})
			a.Unlock()
			if used {
				if err := send(short); err != nil {
					t.Fatal(err)
				}
			}
			x.m[1].Close()
			a.MarkDead(1, 2, p2p.ErrPeerGone)

			x.m[1] = x.w.settle(t, 1, 2, 3)
			first := x.m[1].Reserve(1) // the name may be of a channel that it is about to open
			defer x.m[1].Settle(first)
			x.open(1)
			x.renew()
			x.send(5, "next")
			x.want(t, 5, "next")
			gone := func(what string, err error) {
				t.Helper()
				var of *p2p.PeerError
				if !errors.As(err, &of) || of.Rank != 1 || !errors.Is(err, p2p.ErrPeerGone) {
					t.Errorf("%s: %v, want an error that says that rank 1 is gone", what, err)
				}
			}
			gone("a short send", send(short))
			gone("a long send", send(long))
			for _, from := range []int{1, p2p.AnySlot} {
				a.Lock()
				var r p2p.RecvReq
				c.PostMsg(&r, from, 5, 0, short)
				gone(fmt.Sprint("a receive from ", from), c.WaitMsg(patient(t.Context()), &r))
				a.Unlock()
			}
			f := follows(t, a.Proxy, c)
			var s [2]p2p.SendReq
			var r [2]p2p.RecvReq
			f.send(&s[0], 1, 5, short)
			f.send(&s[1], 1, 5, long)
			f.recv(&r[0], 1, 5, 1, 0)
			f.recv(&r[1], p2p.AnySlot, 5, 1, 0)
			over := f.attend(t.Context())
			for range 4 {
				gone("a followed message", f.end())
			}
			<-over
			a.Lock()
			c.Notice([]int{1}, 0, []byte("value"))
			c.Abort(errors.New("over"), []byte("why"))
			a.Unlock()
			x.send(5, "last")
			x.want(t, 5, "last")
			if n, _ := x.m[1].Remembered(); n != 1 {
				t.Errorf("the other incarnation knows %d channels, 1 is its own", n)
			}
		})
	}
}

// A rank that waits for a late peer learns that another one is gone, or has closed the channel,
// whose message it needs as well.
func TestWaitEndsWithAnotherPeer(t *testing.T) {
	for _, when := range []struct{ closes, before bool }{{}, {closes: true}, {before: true}, {true, true}} {
		t.Run(fmt.Sprintf("closes only the channel %v, before %v", when.closes, when.before), func(t *testing.T) {
			all := cluster(t, 3, 64<<10, nil)
			defer closeAll(all)
			var cs []*p2p.Channel
			for _, p := range all {
				cs = append(cs, open(t, p, 1, 3))
			}
			for r := 1; r < 3; r++ {
				all[r].Lock()
				if err := cs[r].Send(patient(t.Context()), 0, p2p.Token{Seq: 1}, []byte("first")); err != nil {
					t.Error(err)
				}
				all[r].Unlock()
			}
			all[0].Lock()
			defer all[0].Unlock()
			var first, second [3]p2p.Recv
			post := func(recvs *[3]p2p.Recv, seq uint64) {
				for slot := 1; slot < 3; slot++ {
					cs[0].PostRecv(&recvs[slot], slot, p2p.Token{Seq: seq}, make([]byte, 5), false)
				}
			}
			post(&first, 1)
			for slot := 1; slot < 3; slot++ {
				if err := cs[0].WaitRecv(patient(t.Context()), &first[slot]); err != nil {
					t.Fatal(err)
				}
			}
			end := func() {
				if when.closes {
					cs[2].Close()
				} else {
					all[2].Close()
				}
			}
			if when.before {
				end()
				for all[0].Down(2) == nil && !cs[0].Closed(2) {
					all[0].Look()
				}
				post(&second, 2)
			} else {
				post(&second, 2)
				go end()
			}
			var gone *p2p.PeerError
			if err := cs[0].WaitRecv(patient(t.Context()), &second[1]); !errors.As(err, &gone) || gone.Rank != 2 {
				t.Errorf("waiting for rank 1 while rank 2 ends: %v, want an error that names rank 2", err)
			}
		})
	}
}

// A rank whose end of the link has failed gets another one, although the other rank does not know
// that. What had arrived there is received, and further messages are.
func TestHalfOpenLinkLosesNothingThatCame(t *testing.T) {
	for _, rank := range []int{0, 1} {
		x := broken(t, 0)
		x.open(1)
		x.send(5, "first")
		x.halve(rank)
		x.send(5, "second")
		if rank == 0 {
			x.want(t, 5, "first")
		} else { // it was not read at the end that failed
			_, err := x.recv(0, 5, len("second"))
			lost(t, err)
		}
		x.want(t, 5, "second")
	}
}

// Every receive that might have got a lost message fails, and is not in the way of later ones.
func TestPostedReceivesMissLostMessages(t *testing.T) {
	x := broken(t, 0)
	x.open(1)
	f := follows(t, x.m[1].Proxy, x.c[1])
	var r [4]p2p.RecvReq
	f.recv(&r[0], 0, 5, 1, 0)
	f.recv(&r[1], 0, p2p.AnyTag, 1, 0)
	f.recv(&r[2], p2p.AnySlot, 7, 1, 0)
	f.recv(&r[3], p2p.AnySlot, p2p.AnyTag, 1, 0)
	x.send(9, "none gets it")
	x.cut(1)
	x.renew()
	for end := time.Now().Add(20 * time.Second); len(f.ended) < len(r) && time.Now().Before(end); runtime.Gosched() {
		x.look(0, 1) // the ranks tell each other after they are linked what was lost
	}
	for range r {
		lost(t, f.end())
	}
	f.still(0)
	x.send(5, "next")
	x.want(t, 5, "next")
}

// An announced message whose link has broken is matched with no receive: the message that its
// sender announces over the next link is.
func TestAnnouncedMessageEndsWithItsLink(t *testing.T) {
	x := broken(t, 0)
	x.open(1)
	a, b := follows(t, x.m[0].Proxy, x.c[0]), follows(t, x.m[1].Proxy, x.c[1])
	long := bytes.Repeat([]byte{1}, 100<<10)
	var s p2p.SendReq
	a.send(&s, 1, 5, long)
	x.look(1)
	x.cut(1)
	var r p2p.RecvReq
	buf := b.recv(&r, 0, 5, len(long), 0)
	x.renew()
	over := b.attend(context.Background())
	sent := a.attend(context.Background())
	if err := a.end(); !errors.As(err, new(*p2p.PeerError)) {
		t.Errorf("the send over the old link: %v", err)
	}
	pass(t, sent)
	a.send(&s, 1, 5, long)
	sent = a.attend(context.Background())
	if err := b.end(); err != nil || !bytes.Equal(buf, long) {
		t.Errorf("the receive: %v", err)
	}
	if err := a.end(); err != nil {
		t.Error(err)
	}
	pass(t, sent)
	pass(t, over)
}

// Sends that end before there is a link leave nothing behind.
func TestFailedSendsAreNotQueued(t *testing.T) {
	x := broken(t, 0)
	x.m[0].MarkDead(1, 0, p2p.ErrPeerGone)
	x.m[0].Lock()
	for range 1000 {
		var s p2p.SendReq
		x.c[0].PostSend(&s, 1, 5, 0, []byte{1})
		if err := x.c[0].WaitSend(patient(context.Background()), &s); !errors.As(err, new(*p2p.PeerError)) {
			t.Fatalf("a send to a dead rank: %v", err)
		}
	}
	x.m[0].Unlock()
	if n := x.m[0].Queued(1); n != 0 {
		t.Errorf("%d streams have messages to send", n)
	}
}

// It can be asked before whether a send or a receive would fail because the peer has left: a
// receive of a message that came before does not.
func TestWhatWouldFail(t *testing.T) {
	x := broken(t, 0)
	x.open(1)
	p, c := x.m[1], x.c[1]
	check := func(send bool, recvs map[[2]int]bool) {
		t.Helper()
		p.Lock()
		defer p.Unlock()
		if err := c.SendFails(0); errors.As(err, new(*p2p.PeerError)) != send || (err != nil) != send {
			t.Errorf("a send: %v, want that it fails: %v", err, send)
		}
		for r, want := range recvs {
			err := c.RecvFails(r[0], int64(r[1]))
			if errors.As(err, new(*p2p.PeerError)) != want || (err != nil) != want {
				t.Errorf("a receive from %d with tag %d: %v, want that it fails: %v", r[0], r[1], err, want)
			}
		}
	}
	check(false, map[[2]int]bool{{0, 5}: false, {p2p.AnySlot, p2p.AnyTag}: false})
	x.send(5, "came")
	x.c[0].Close()
	for left := false; !left; runtime.Gosched() {
		p.Lock()
		p.Look()
		left = c.Closed(0)
		p.Unlock()
	}
	check(true, map[[2]int]bool{{0, 5}: false, {0, p2p.AnyTag}: false, {p2p.AnySlot, 5}: false,
		{p2p.AnySlot, p2p.AnyTag}: false, {0, 6}: true, {p2p.AnySlot, 6}: true})
	x.want(t, 5, "came")
	check(true, map[[2]int]bool{{0, 5}: true, {p2p.AnySlot, p2p.AnyTag}: true})
}

// overLinks sends messages of size bytes with tag 5, each of which arrives and is not received,
// over links that break one after the other: together they are longer than a window.
func overLinks(t *testing.T, window int) (x *couple, size, sent int) {
	x = broken(t, window)
	x.open(1)
	size = x.c[0].EagerMax() - 64
	for range 5 {
		for range window / (size + 64) / 2 {
			x.send(5, numbered(sent, size))
			x.look(1)
			sent++
		}
		x.cut(1)
		x.renew()
	}
	return x, size, sent
}

// numbered is message i of overLinks.
func numbered(i, size int) string { return string(bytes.Repeat([]byte{byte(i)}, size)) }

// What outlives links at a receiver is bounded: what exceeds a window is missed.
func TestMessagesOfEarlierLinksAreBounded(t *testing.T) {
	const window = 32 << 10
	x, size, sent := overLinks(t, window)
	got, missed := 0, 0
	for last := sent - 1; ; got++ {
		buf, err := x.recv(0, 5, size)
		if errors.Is(err, p2p.ErrLost) {
			missed++
			break
		}
		if err != nil || buf != numbered(got, size) {
			t.Fatalf("message %d of %d: %v", got, last, err)
		}
	}
	if most := window / (size + 64); got != most || missed != 1 {
		t.Errorf("%d messages are left of %d, want %d", got, sent, most)
	}
	x.send(5, "next")
	x.want(t, 5, "next")
}

// Over links that break at any moment, receives get the messages of each tag in order. Of those
// that were sent none is missing, unless a receive has said so before. No receive says so of a loss
// that has not been.
func TestMessagesOverBreakingLinks(t *testing.T) {
	outer := t
	rapid.Check(t, func(t *rapid.T) {
		x := broken(outer, 32<<10)
		x.t = t
		defer x.m[0].Close()
		defer x.m[1].Close()
		type message struct {
			p2p.SendReq
			tag         uint64
			failed, got bool
		}
		const tags = 3
		size := rapid.SampledFrom([]int{8, 3000}).Draw(t, "size")
		var sent []*message
		var latest [tags]int  // the number of the latest message
		cutAt, missed := 0, 0 // messages before the latest cut, and before a loss that a receive has told
		losses := 0
		send := func() {
			s := &message{tag: uint64(rapid.IntRange(0, tags-1).Draw(t, "tag"))}
			sent = append(sent, s)
			buf := binary.LittleEndian.AppendUint32(make([]byte, 0, size), uint32(len(sent)))[:size]
			x.m[0].Lock()
			defer x.m[0].Unlock()
			if rapid.Bool().Draw(t, "announced") {
				x.c[0].PostLater(&s.SendReq, 1, s.tag, 0, buf)
				x.c[0].Filled(&s.SendReq, size)
			} else {
				x.c[0].PostSend(&s.SendReq, 1, s.tag, 0, buf)
			}
		}
		// cutSends takes the outcomes of the sends while there is no link.
		cutSends := func() {
			x.m[0].Lock()
			defer x.m[0].Unlock()
			cutAt = len(sent)
			for _, s := range sent {
				s.failed = x.c[0].WaitSend(patient(x.over), &s.SendReq) != nil || s.failed
			}
		}
		var r *p2p.RecvReq
		buf := make([]byte, size)
		post := func(tag int64) {
			if r != nil || x.c[1] == nil {
				return
			}
			x.m[1].Lock()
			defer x.m[1].Unlock()
			r = &p2p.RecvReq{}
			x.c[1].PostMsg(r, rapid.SampledFrom([]int{0, p2p.AnySlot}).Draw(t, "from"), tag, 0, buf)
		}
		// recv ends the receive, and reports whether it took anything.
		recv := func() bool {
			if r == nil {
				return false
			}
			x.m[1].Lock()
			err := x.c[1].WaitMsg(patient(x.over), r)
			x.m[1].Unlock()
			tag := r.Tag
			r = nil
			switch {
			case errors.Is(err, p2p.ErrLost):
				losses++
				missed = cutAt
			case err == nil:
				n := int(binary.LittleEndian.Uint32(buf))
				if n <= latest[tag] || sent[n-1].tag != tag {
					t.Fatalf("message %d with tag %d, after %d", n, tag, latest[tag])
				}
				for i := max(latest[tag], missed); i < n-1; i++ {
					if sent[i].tag == tag && !sent[i].failed {
						t.Fatalf("message %d with tag %d, and not %d", n, tag, i+1)
					}
				}
				latest[tag], sent[n-1].got = n, true
			default:
				return false
			}
			return true
		}
		opened := func() {
			if x.c[1] == nil {
				x.open(1)
			}
		}
		t.Repeat(map[string]func(*rapid.T){
			"send": func(*rapid.T) { send() },
			"look": func(*rapid.T) { x.look(rapid.IntRange(0, 1).Draw(t, "rank")) },
			"open": func(*rapid.T) { opened() },
			"post": func(*rapid.T) { post(rapid.Int64Range(p2p.AnyTag, tags-1).Draw(t, "tag")) },
			"recv": func(*rapid.T) { recv() },
			"cut": func(*rapid.T) {
				x.cut(rapid.SampledFrom([][]int{{0}, {1}, {0, 1}}).Draw(t, "ranks")...)
				cutSends()
				if rapid.Bool().Draw(t, "receive") {
					post(p2p.AnyTag)
					recv()
				}
				if rapid.Bool().Draw(t, "send") {
					send()
				}
				x.renew()
			},
			"halve": func(*rapid.T) {
				x.halve(rapid.IntRange(0, 1).Draw(t, "rank"))
				cutSends()
			},
		})
		opened()
		for idle := 0; idle < 3; idle++ {
			post(p2p.AnyTag)
			x.look(0, 1, 0, 1)
			if recv() {
				idle = 0
			}
		}
		missing := 0
		for i, s := range sent {
			if !s.got && !s.failed {
				if missing++; i >= missed {
					t.Fatalf("message %d of %d is missing", i+1, len(sent))
				}
			}
		}
		if losses > missing {
			t.Fatalf("%d messages are missing, and %d receives failed because of that", missing, losses)
		}
	})
}

// TestLossIsToldAfterFurtherLinks: what is kept over a renewal may leave no room for the mark of a
// loss.
func TestLossIsToldAfterFurtherLinks(t *testing.T) {
	const window = 32 << 10
	x, size, sent := overLinks(t, window)
	x.look(1)
	x.cut(1) // nothing was sent over this link
	x.renew()
	x.send(5, numbered(99, size))
	x.look(1)
	for got := 0; ; got++ {
		buf, err := x.recv(0, 5, size)
		if errors.Is(err, p2p.ErrLost) {
			return
		}
		if err != nil {
			t.Fatal(err)
		}
		if buf == numbered(99, size) {
			t.Fatalf("got the late message after %d of %d, no loss told", got, sent)
		}
	}
}

// halfway makes a proxy that has a half of a message of rank 0, and then gets second from rank 1.
func halfway(t *testing.T, second p2p.Header) (*p2p.Proxy, *p2p.Channel, *piecemeal, *piecemeal) {
	p, a := accepting(t, p2p.Identity{Rank: 2, Incarnation: 9}, 3, false)
	c, err := p.Open(known(1), p2p.Epoch{}, ranks(3), nil, true)
	if err != nil {
		t.Fatal(err)
	}
	x := &piecemeal{muted: muted{fails: &atomic.Bool{}},
		headers: []p2p.Header{{Kind: frameOpen, Call: 1}, {Kind: frameEager, Count: 3, Len: 10}}}
	y := &piecemeal{muted: muted{fails: &atomic.Bool{}}, whole: true}
	accept(t, a.host, p2p.Identity{Rank: 0, Incarnation: 2}, x)
	accept(t, a.host, p2p.Identity{Rank: 1, Incarnation: 3}, y)
	t.Cleanup(func() { p.Close() })
	p.Lock()
	defer p.Unlock()
	for range 10 {
		p.Look()
	}
	y.headers = []p2p.Header{{Kind: frameOpen, Call: 1}, second}
	for range 10 {
		p.Look()
	}
	if x.n != 5 || len(y.headers) != 0 {
		t.Fatal("setup", x.n, len(y.headers))
	}
	return p, c, x, y
}

// TestAnyReceiveStopsAtALoss: a receive of any rank is told of a loss, though a message of another
// rank has begun before.
func TestAnyReceiveStopsAtALoss(t *testing.T) {
	p, c, _, y := halfway(t, p2p.Header{Kind: frameBegun, Seq: 1})
	p.Lock()
	defer p.Unlock()
	var r p2p.RecvReq
	c.PostMsg(&r, p2p.AnySlot, 3, 0, make([]byte, 10))
	y.headers = []p2p.Header{{Kind: frameEager, Count: 3, Len: 10}}
	for range 10 {
		p.Look()
	}
	if err := c.WaitMsg(patient(t.Context()), &r); err == nil && r.From == 1 {
		t.Error("a message of rank 1 passed its mark of lost messages")
	}
}

// TestAnyReceiveTakesAWholeMessage: it does not wait for one that has begun before.
func TestAnyReceiveTakesAWholeMessage(t *testing.T) {
	p, c, x, _ := halfway(t, p2p.Header{Kind: frameEager, Count: 3, Len: 10})
	p.Lock()
	defer p.Unlock()
	var r p2p.RecvReq
	c.PostMsg(&r, p2p.AnySlot, 3, 0, make([]byte, 10))
	x.broken = true
	for range 10 {
		p.Look()
	}
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	if err := c.WaitMsg(patient(ctx), &r); err != nil {
		t.Error("the kept message of rank 1 is not received:", err)
	}
}
