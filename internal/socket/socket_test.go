package socket

import (
	"net"
	"testing"

	"golang.org/x/sys/unix"
)

// Both ends of a connection within a host have the congestion control of such connections, whatever
// the system's default is, and still deliver.
func TestDetachSelectsCongestionControl(t *testing.T) {
	for _, addr := range []string{"127.0.0.1:0", "[::1]:0"} {
		l, err := net.Listen("tcp", addr)
		if err != nil {
			t.Logf("cannot listen at %s: %v", addr, err)
			continue
		}
		defer l.Close()
		dialed, err := net.Dial("tcp", l.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		accepted, err := l.Accept()
		if err != nil {
			t.Fatal(err)
		}
		var fds [2]int
		for i, c := range []net.Conn{dialed, accepted} {
			if !WithinHost(c) {
				t.Errorf("%v and %v are not within a host", c.LocalAddr(), c.RemoteAddr())
			}
			fd, err := Detach(c)
			if err != nil {
				t.Fatal(err)
			}
			defer unix.Close(fd)
			fds[i] = fd
			if got, err := unix.GetsockoptString(fd, unix.IPPROTO_TCP, unix.TCP_CONGESTION); err != nil ||
				got != hostControl {
				t.Errorf("congestion control %q, want %q (%v)", got, hostControl, err)
			}
		}
		if n, e := Send(fds[0], []byte("data")); n != 4 || e != 0 {
			t.Fatalf("Send: %d bytes, %v", n, e)
		}
		ready := []unix.PollFd{{Fd: int32(fds[1]), Events: unix.POLLIN}}
		if n, err := unix.Poll(ready, 10_000); n != 1 {
			t.Fatalf("nothing has arrived (%v)", err)
		}
		b := make([]byte, 8)
		if n, e := Recv(fds[1], b); e != 0 || string(b[:n]) != "data" {
			t.Fatalf("Recv: %q, %v", b[:n], e)
		}
	}
}

// Other connections keep the system's choice.
func TestWithinHost(t *testing.T) {
	a, b := &net.TCPAddr{IP: net.IPv4(192, 0, 2, 1), Port: 1}, &net.TCPAddr{IP: net.IPv4(192, 0, 2, 2), Port: 1}
	for _, c := range []struct {
		from, to net.Addr
		want     bool
	}{{a, b, false}, {a, &net.TCPAddr{IP: a.IP, Port: 2}, true}, {a, &net.UnixAddr{}, false}} {
		if got := WithinHost(ends{from: c.from, to: c.to}); got != c.want {
			t.Errorf("%v to %v: %v, want %v", c.from, c.to, got, c.want)
		}
	}
}

// ends is a connection with given addresses.
type ends struct {
	net.Conn
	from, to net.Addr
}

func (e ends) LocalAddr() net.Addr  { return e.from }
func (e ends) RemoteAddr() net.Addr { return e.to }
