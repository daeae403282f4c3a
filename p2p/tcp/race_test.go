package tcp

import (
	"context"
	"errors"
	"net"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// swallowing returns an address at which the kernel drops what would open a connection: a listener
// whose queue is full.
func swallowing(t *testing.T) string {
	t.Helper()
	fd := must(unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0))
	t.Cleanup(func() { unix.Close(fd) })
	if err := errors.Join(unix.Bind(fd, &unix.SockaddrInet4{Addr: [4]byte{127, 0, 0, 1}}),
		unix.Listen(fd, 0)); err != nil {
		t.Fatal(err)
	}
	at := &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1), Port: must(unix.Getsockname(fd)).(*unix.SockaddrInet4).Port}
	for range 16 {
		c, err := net.DialTimeout("tcp", at.String(), 2*time.Second)
		if err != nil {
			return at.String()
		}
		t.Cleanup(func() { c.Close() })
	}
	t.Fatal("the queue of a listener does not fill up")
	return ""
}

// Networks that swallow packets cost a link a moment, not what an attempt may take: that is longer
// than this test waits.
func TestDialSkipsSilentAddresses(t *testing.T) {
	a, b := listen(t, 0, local(Config{})), listen(t, 1, local(Config{}))
	hole := swallowing(t)
	l, err := a.Dial(within(t), b.self, b.at(hole, hole, hole, b.addr()))
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	b.accept(t)
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	if _, err := a.Dial(ctx, b.self, b.at(hole, hole)); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("only such addresses: %v", err)
	}
}
