package metrics

import (
	"net"
	"net/http"
	"slices"
	"testing"

	"tutti/internal/ports"
)

// Connections that have sent nothing are closed first, then idle ones, then those within a request;
// those being answered stay.
func TestFewConnsEvictInOrder(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	f := &fewConns{Listener: l, room: 4, in: map[net.Conn]*visit{}}
	connect := func() net.Conn {
		a, err := net.Dial("tcp", l.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		b, err := f.Accept()
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { a.Close(); b.Close() })
		return b
	}
	kept, asks, idles, quiet := connect(), connect(), connect(), connect()
	f.note(kept, http.StateActive)
	f.at(kept, answered)
	f.note(asks, http.StateActive)
	f.note(idles, http.StateIdle)
	for i, want := range []net.Conn{quiet, idles, asks} {
		f.note(connect(), http.StateActive)
		if f.in[want] != nil {
			t.Errorf("connection %d did not take the expected one's place", i)
		}
	}
	for range 100 {
		connect()
	}
	if f.in[kept] == nil || len(f.in) != 4 {
		t.Errorf("of %d connections, the one that is answered is %v", len(f.in), f.in[kept])
	}
}

// In a range of ports each rank of a machine begins with its own.
func TestMetricsPortsOfOneMachine(t *testing.T) {
	taken, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer taken.Close()
	port := taken.Addr().(*net.TCPAddr).Port
	if port+20 > 65535 {
		t.Skip("no room for a range")
	}
	var got []int
	for local := range 3 {
		l, err := listenFrom("127.0.0.1", ports.Spec{Lo: uint16(port), Hi: uint16(port + 20)}, local)
		if err != nil {
			t.Fatal(err)
		}
		defer l.Close()
		got = append(got, l.Addr().(*net.TCPAddr).Port)
	}
	if got[0] <= port || got[1] <= got[0]-1 || got[2] < got[1] || got[2] > port+20 || slices.Contains(got, port) {
		t.Errorf("%d on, ranks 0 to 2 have %v", port, got)
	}
}
