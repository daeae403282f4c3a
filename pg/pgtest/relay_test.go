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
