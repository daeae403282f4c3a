package ports

import (
	"context"
	"net"
	"testing"
)

// The port of a reservation can be listened on and connected to, again and again, and no listener
// that asks for any port receives it.
func TestReserve(t *testing.T) {
	r, err := Reserve()
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	for range 3 {
		l, err := Listen(context.Background(), "127.0.0.1", Spec{r.Port, r.Port})
		if err != nil {
			t.Fatal(err)
		}
		c, err := net.Dial("tcp", r.Address())
		if err != nil {
			t.Fatal(err)
		}
		s, err := l.Accept()
		if err != nil {
			t.Fatal(err)
		}
		s.Close() // first: the connection stays in TIME_WAIT on this side
		c.Close()
		l.Close()
	}
	for range 2000 { // held, so that the kernel has to choose among those that are left
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Logf("stopped early: %v", err)
			break
		}
		defer l.Close()
		if port(l) == r.Port {
			t.Fatalf("port %d was reserved and given to another", r.Port)
		}
	}
}
