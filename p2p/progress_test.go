package p2p_test

import (
	"bytes"
	"context"
	"slices"
	"sync/atomic"
	"testing"

	"tutti/p2p"
	"tutti/p2p/inproc"
)

// With Config.Progress a rank answers its peers while it is in no call: a long message arrives
// although its receiver only looks.
func TestProgressWithoutAWaiter(t *testing.T) {
	const n = 2
	all := make([]*p2p.Proxy, n)
	id := func(r int) p2p.Identity { return p2p.Identity{Rank: r, Incarnation: uint64(r) + 1} }
	for r := range all {
		all[r] = p2p.New(p2p.Config{Self: id(r), Size: n, Secret: []byte("0123456789abcdef"),
			Transports: []p2p.Transport{inproc.New(inproc.Config{RingBytes: 16 << 10})}, Threads: true,
			Progress: r == 1, Resolve: func(_ context.Context, rank int) (p2p.Peer, error) {
				return p2p.Peer{Identity: id(rank), Endpoints: all[rank].Endpoints()}, nil
			}})
	}
	defer closeAll(all)
	var chans [n]*p2p.Channel
	for r, p := range all {
		if _, err := p.Listen(t.Context()); err != nil {
			t.Fatal(err)
		}
		var err error
		if chans[r], err = p.Open(known(1), p2p.Epoch{}, ranks(n), nil, true); err != nil {
			t.Fatal(err)
		}
	}
	for round := range 20 {
		data := bytes.Repeat([]byte{byte(round + 1)}, 300_000)
		got := make([]byte, len(data))
		var in p2p.RecvReq
		all[1].Lock()
		chans[1].PostMsg(&in, 0, 7, 0, got)
		all[1].Unlock()
		var out p2p.SendReq
		all[0].Lock()
		chans[0].PostSend(&out, 1, 7, 0, data)
		err := chans[0].WaitSend(patient(t.Context()), &out)
		all[0].Unlock()
		if err != nil {
			t.Fatalf("round %d: %v", round, err)
		}
		all[1].Lock() // the sender knows that all of it is there
		same := bytes.Equal(got, data)
		all[1].Unlock()
		if !same {
			t.Fatalf("round %d: the message is not there", round)
		}
	}
}

// A rank that computes handles the frames that have arrived about as fast as they come, not one of
// a link in each call of Idle.
func TestIdleHandlesAllFrames(t *testing.T) {
	p, a := accepting(t, p2p.Identity{Rank: 1, Incarnation: 1}, 2, false)
	const frames, most = 100, 10 // a call is short, and the goroutine may have to wait for its core
	l := &piecemeal{muted: muted{fails: &atomic.Bool{}},
		headers: slices.Repeat([]p2p.Header{{Kind: frameBeat}}, frames)}
	accept(t, a.host, p2p.Identity{Rank: 0, Incarnation: 2}, l)
	for range most {
		p.Idle()
	}
	if n := len(l.headers); n > 0 {
		t.Errorf("%d of %d frames are left after %d calls", n, frames, most)
	}
}
