package pgtest

import (
	"context"
	"io"
	"net"
	"sync"
	"testing"
	"time"
)

// pair returns the two ends of a connection.
func pair(t *testing.T) (a, b *net.TCPConn) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	c, err := net.Dial("tcp", l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	d, err := l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close(); d.Close() })
	return c.(*net.TCPConn), d.(*net.TCPConn)
}

// What a broken connection has held back does not pass when the cut ends, although one of its ends
// may still be open then.
func TestBrokenConnectionPassesNothing(t *testing.T) {
	r, err := newRelay(t.Context(), nil)
	if err != nil {
		t.Fatal(err)
	}
	defer r.close()
	held := make(chan struct{}, 1)
	r.holds = func() { held <- struct{}{} }
	r.set([]Rule{{Cut: true}})
	sender, src := pair(t)
	dst, receiver := pair(t)
	works, fail := context.WithCancel(r.ctx)
	defer fail()
	var pumping sync.WaitGroup
	pumping.Go(func() { r.pump(works, src, dst, 0, 1) })
	if _, err := sender.Write([]byte("lost")); err != nil {
		t.Fatal(err)
	}
	<-held
	fail()
	r.set(nil)
	sender.Close()
	pumping.Wait()
	dst.Close()
	receiver.SetReadDeadline(time.Now().Add(patience))
	if got, err := io.ReadAll(receiver); len(got) > 0 || err != nil {
		t.Errorf("%q came over a broken connection, %v; want nothing", got, err)
	}
}

// The time of a cut goes on when rules replace others that cut too. All links whose time is over
// have broken before the rules change, also those that nothing has broken yet.
func TestCutGoesOn(t *testing.T) {
	r, err := newRelay(t.Context(), nil)
	if err != nil {
		t.Fatal(err)
	}
	defer r.close()
	works, fail := context.WithCancel(r.ctx)
	defer fail()
	k := r.join(0, 1, fail)
	back := []Rule{{From: []int{1}, Cut: true, Break: time.Hour}}
	r.set(back)
	since := k.cut
	r.set(append(back, Rule{From: []int{0}, Delay: time.Second}))
	if since[1].IsZero() || k.cut != since || k.broken {
		t.Errorf("it is cut since %v, broken %v; was cut since %v", k.cut, k.broken, since)
	}
	r.set(nil)
	if k.cut != [2]time.Time{} || k.broken {
		t.Errorf("without rules it is cut since %v, broken %v", k.cut, k.broken)
	}
	r.set(back)
	k.cut[1] = k.cut[1].Add(-time.Hour)
	r.set(nil)
	if !k.broken || works.Err() == nil {
		t.Fatalf("broken %v, %v after the time of the cut", k.broken, works.Err())
	}
	if !r.breaks(works, k) {
		t.Error("the break was lost")
	}
}
