package p2p_test

import (
	"bytes"
	"context"
	"sync/atomic"
	"testing"

	"tutti/p2p"
	"tutti/p2p/inproc"
)

// bypassingLink counts frames that bypass the caches.
type bypassingLink struct {
	p2p.Link
	frames *atomic.Int64
}

func (l *bypassingLink) SendPast(h *p2p.Header, payload []byte) (bool, error) {
	ok, err := l.Link.(p2p.Bypasser).SendPast(h, payload)
	if ok {
		l.frames.Add(1)
	}
	return ok, err
}

// TestBypass: after Bypass the messages of an operation bypass the caches, until the next Begin;
// tagged messages never do.
func TestBypass(t *testing.T) {
	var all [2]*p2p.Proxy
	var chans [2]*p2p.Channel
	var frames atomic.Int64
	id := func(r int) p2p.Identity { return p2p.Identity{Rank: r, Incarnation: uint64(r) + 1} }
	for r := range all {
		all[r] = p2p.New(p2p.Config{Self: id(r), Size: len(all), Secret: []byte("0123456789abcdef"), Threads: true,
			Transports: []p2p.Transport{&wrapping{inproc.New(inproc.Config{RingBytes: 1 << 20}),
				func(l p2p.Link) p2p.Link { return &bypassingLink{l, &frames} }}},
			Resolve: func(_ context.Context, rank int) (p2p.Peer, error) {
				return p2p.Peer{Identity: id(rank), Endpoints: all[rank].Endpoints()}, nil
			}})
	}
	defer closeAll(all[:])
	for r, p := range all {
		if _, err := p.Listen(t.Context()); err != nil {
			t.Fatal(err)
		}
		var err error
		if chans[r], err = p.Open(known(1), p2p.Epoch{}, ranks(len(all)), nil, true); err != nil {
			t.Fatal(err)
		}
	}
	data := bytes.Repeat([]byte("past"), 30_000)
	move := func(seq uint64, bypass, tagged bool) {
		t.Helper()
		done := make(chan error)
		got := make([]byte, len(data))
		go func() {
			all[1].Lock()
			defer all[1].Unlock()
			w := patient(t.Context())
			if tagged {
				var in p2p.RecvReq
				chans[1].PostMsg(&in, 0, 7, 0, got)
				done <- chans[1].WaitMsg(w, &in)
				return
			}
			tok := p2p.Token{Seq: seq}
			chans[1].Begin(tok, false)
			var in p2p.Recv
			chans[1].PostRecv(&in, 0, tok, got, false)
			done <- chans[1].WaitRecv(w, &in)
		}()
		all[0].Lock()
		w := patient(t.Context())
		var err error
		if tagged {
			var out p2p.SendReq
			chans[0].PostSend(&out, 1, 7, 0, data)
			err = chans[0].WaitSend(w, &out)
		} else {
			tok := p2p.Token{Seq: seq}
			chans[0].Begin(tok, false)
			if bypass {
				if !chans[0].Bypasses(1) {
					t.Error("the link cannot bypass the caches")
				}
				chans[0].Bypass()
			}
			err = chans[0].Send(w, 1, tok, data)
		}
		all[0].Unlock()
		if err != nil {
			t.Fatal(err)
		}
		if err := <-done; err != nil {
			t.Fatal(err)
		}
		if !bytes.Equal(got, data) {
			t.Fatal("the message has other bytes")
		}
	}
	for i, c := range []struct {
		name           string
		bypass, tagged bool
	}{{"the first", false, false}, {"an operation after Bypass", true, false}, {"a tagged message", false, true},
		{"the next operation", false, false}} {
		before := frames.Load()
		move(uint64(i)+1, c.bypass, c.tagged)
		if n := frames.Load() - before; n > 0 != c.bypass {
			t.Errorf("%s: %d frames bypass the caches", c.name, n)
		}
	}
	all[0].Lock()
	defer all[0].Unlock()
	for _, c := range all[0].Counts() {
		if c.BytesPast != uint64(len(data)) || c.BytesSent < 4*c.BytesPast {
			t.Errorf("%d bytes past the caches of %d sent, want %d", c.BytesPast, c.BytesSent, len(data))
		}
	}
}
