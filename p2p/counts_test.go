package p2p_test

import (
	"context"
	"testing"

	"tutti/p2p"
)

// TestBothEndsCountWaits has rank 0 wait for rank 1 until it sleeps, and compares what both have
// counted.
func TestBothEndsCountWaits(t *testing.T) {
	all := cluster(t, 3, 0, nil)
	defer closeAll(all)
	chans := []*p2p.Channel{open(t, all[0], 1, 3), open(t, all[1], 1, 3), open(t, all[2], 1, 3)}
	asleep := make(chan int, 1)
	w := patient(context.Background())
	w.OnSleep(func(rank int) {
		select {
		case asleep <- rank:
		default:
		}
	})
	received := make(chan error)
	tok := p2p.Token{Seq: 1}
	go func() {
		var r p2p.Recv
		p := all[0]
		p.Lock()
		chans[0].Begin(tok, false)
		chans[0].PostRecv(&r, 1, tok, make([]byte, 5), false)
		err := chans[0].WaitRecv(w, &r)
		p.Unlock()
		received <- err
	}()
	if rank := <-asleep; rank != 1 {
		t.Errorf("it sleeps because of rank %d", rank)
	}
	all[1].Lock()
	chans[1].Begin(tok, false)
	err := chans[1].Send(patient(context.Background()), 0, tok, []byte("hello"))
	all[1].Unlock()
	if err != nil {
		t.Fatal(err)
	}
	if err := <-received; err != nil {
		t.Fatal(err)
	}
	counts := func(r int) []p2p.PeerCounts {
		all[r].Lock()
		defer all[r].Unlock()
		return all[r].Counts()
	}
	a, b := counts(0), counts(1)
	if len(a) != 1 || len(b) != 1 || a[0].Rank != 1 || b[0].Rank != 0 {
		t.Fatalf("%+v\n%+v", a, b)
	}
	if x := a[0]; !x.Up || x.Transport != "inproc" || x.Incarnation != 2 || x.Waited <= 0 || x.FramesReceived < 1 ||
		x.BytesReceived != 5 || x.Err != nil {
		t.Errorf("rank 0 has counted %+v", x)
	}
	if x := b[0]; x.FramesSent < 1 || x.BytesSent != 5 {
		t.Errorf("rank 1 has counted %+v", x)
	}
	if none := counts(2); len(none) != 0 {
		t.Errorf("rank 2 has counted %+v", none)
	}
}
