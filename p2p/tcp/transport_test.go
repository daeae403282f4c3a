package tcp

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"tutti/internal/ports"
	"tutti/internal/trust"
	"tutti/p2p"
)

// taken occupies a port of 127.0.0.1, or n ports in a row, and returns the first.
func taken(t *testing.T, n int) int {
	t.Helper()
	for range 100 {
		first := 0
		var ls []net.Listener
		for i := range n {
			port := 0
			if i > 0 {
				port = first + i
			}
			l, err := net.Listen("tcp", fmt.Sprintf("127.0.0.1:%d", port))
			if err != nil {
				break
			}
			ls = append(ls, l)
			first = l.Addr().(*net.TCPAddr).Port - i
		}
		if len(ls) == n && first+n <= 65536 {
			t.Cleanup(func() {
				for _, l := range ls {
					l.Close()
				}
			})
			return first
		}
		for _, l := range ls {
			l.Close()
		}
	}
	t.Fatalf("no %d free ports in a row", n)
	return 0
}

func portsOf(t *testing.T, endpoint []byte) (ps []int) {
	for _, c := range must(decodeEndpoint(endpoint)).at {
		ps = append(ps, int(c.Port()))
	}
	return ps
}

func TestListenTakesFreePortOfRange(t *testing.T) {
	open := func(spec string) (*Transport, []byte, error) {
		tr := New(local(Config{Ports: spec}))
		t.Cleanup(func() { tr.Close() })
		e, err := tr.Listen(within(t), newHost(0))
		return tr, e, err
	}
	one := taken(t, 1)
	if _, e, err := open(fmt.Sprint(one)); e != nil || !errors.Is(err, syscall.EADDRINUSE) ||
		!strings.Contains(err.Error(), fmt.Sprintf("port %d", one)) {
		t.Errorf("a port that is taken: %v, %v", e, err)
	}
	first := taken(t, 2)
	all := fmt.Sprintf("%d-%d", first, first+1)
	if _, e, err := open(all); e != nil || !errors.Is(err, syscall.EADDRINUSE) || !strings.Contains(err.Error(), all) {
		t.Errorf("a range that is taken: %v, %v", e, err)
	}
	wide := fmt.Sprintf("%d-%d", first, min(65535, first+300))
	_, e, err := open(wide)
	if err != nil || portsOf(t, e)[0] < first+2 {
		t.Fatalf("range %s of which two are taken: %v, %v", wide, e, err)
	}
	held := must(ports.Reserve()) // from other processes, also while no transport listens
	defer held.Close()
	mine := fmt.Sprint(held.Port)
	tr, _, err := open(mine)
	if err != nil {
		t.Fatal(err)
	}
	if _, _, err := open(mine); !errors.Is(err, syscall.EADDRINUSE) {
		t.Errorf("another rank's port: %v", err)
	}
	tr.Close()
	if _, e, err := open(mine); err != nil || fmt.Sprint(portsOf(t, e)[0]) != mine {
		t.Errorf("a port that was given back: %v, %v", e, err)
	}
}

func TestBadConfig(t *testing.T) {
	for want, cfg := range map[string]Config{
		"MaxFrame is 1":      {MaxFrame: 1},
		"PeerTimeout is 1ms": {PeerTimeout: time.Millisecond},
		"port \"x\"":         {Ports: "x"},
		"127.0.0.1":          {Interfaces: "203.0.113.0/24"}, // nothing matches: the error lists what there is
		"no interface name":  {Interfaces: "a b"},
	} {
		tr := New(cfg)
		e, err := tr.Listen(within(t), newHost(0))
		if e != nil || err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%+v: %v, want an error with %q", cfg, err, want)
		}
		if err := tr.Close(); err != nil {
			t.Error(err)
		}
	}
}

func TestListenOnce(t *testing.T) {
	n := listen(t, 0, local(Config{}))
	if _, err := n.Listen(within(t), n.host); err == nil {
		t.Error("Listen twice")
	}
	n.Transport.Close()
	tr := New(Config{})
	if _, err := tr.Dial(within(t), n.self, n.endpoint); err == nil {
		t.Error("Dial without Listen")
	}
	tr.Close()
	if _, err := tr.Listen(within(t), n.host); !errors.Is(err, p2p.ErrClosed) {
		t.Errorf("Listen after Close: %v", err)
	}
}

// Every published address of this machine answers.
func TestEveryPublishedAddressAnswers(t *testing.T) {
	a, b := listen(t, 0, Config{}), listen(t, 1, Config{})
	e := must(decodeEndpoint(b.endpoint))
	t.Log(e.at)
	for i, c := range e.at {
		if c.Addr().IsLoopback() && i < len(e.at)-2 {
			t.Errorf("%v is not among the last", c)
		}
		one := e
		one.at = []netip.AddrPort{c}
		if err := a.Reaches(one.encode()); err != nil {
			t.Error(err)
		}
		l, err := a.Dial(within(t), b.self, one.encode())
		if err != nil {
			t.Errorf("%v: %v", c, err)
			continue
		}
		l.Close()
		b.accept(t).Close()
	}
}

func TestReaches(t *testing.T) {
	n := listen(t, 0, local(Config{}))
	e := endpoint{maxFrame: MinFrame, host: hostID() + 2, at: []netip.AddrPort{netip.MustParseAddrPort("127.0.0.1:1")}}
	if err := n.Reaches(e.encode()); !errors.Is(err, errNoPath) || !strings.Contains(err.Error(), "127.0.0.1:1") {
		t.Errorf("another host's loopback: %v", err)
	}
	if _, err := n.Dial(within(t), p2p.Identity{Rank: 1, Incarnation: 1}, e.encode()); !errors.Is(err,
		p2p.ErrPeerGone) || !errors.Is(err, errNoPath) {
		t.Errorf("dial another host's loopback: %v", err)
	}
	if err := n.Reaches([]byte("x")); err == nil {
		t.Error("garbage is reachable")
	}
}

// refusing returns an address that refuses connections until the test ends, and that no other
// process can listen at.
func refusing(t *testing.T) string {
	t.Helper()
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { unix.Close(fd) })
	if err := unix.Bind(fd, &unix.SockaddrInet4{Addr: [4]byte{127, 0, 0, 1}}); err != nil {
		t.Fatal(err)
	}
	at, err := unix.Getsockname(fd)
	if err != nil {
		t.Fatal(err)
	}
	return fmt.Sprintf("127.0.0.1:%d", at.(*unix.SockaddrInet4).Port)
}

// at returns n's endpoint with other addresses.
func (n *node) at(addrs ...string) []byte {
	e := must(decodeEndpoint(n.endpoint))
	e.at = nil
	for _, a := range addrs {
		e.at = append(e.at, netip.MustParseAddrPort(a))
	}
	return e.encode()
}

func (n *node) addr() string { return must(decodeEndpoint(n.endpoint)).at[0].String() }

// Dial skips addresses where nothing listens, or another process, a foreign job or garbage answers;
// if there are no others the error lists them.
func TestDialTriesAll(t *testing.T) {
	a, b, other := listen(t, 0, local(Config{})), listen(t, 1, local(Config{})), listen(t, 2, local(Config{}))
	foreign := &node{New(local(Config{})), newHost(1), nil}
	foreign.host.secret = []byte("the secret of quite another job")
	foreign.endpoint = must(foreign.Listen(within(t), foreign.host))
	defer foreign.Transport.Close()
	free := taken(t, 1)
	var served sync.WaitGroup
	t.Cleanup(served.Wait)
	says := func(s string) string {
		l := must(net.Listen("tcp", "127.0.0.1:0"))
		t.Cleanup(func() { l.Close() })
		served.Go(func() {
			for {
				c, err := l.Accept()
				if err != nil {
					return
				}
				io.WriteString(c, s)
				c.Close()
			}
		})
		return l.Addr().String()
	}
	mail := says("220 mail.example ESMTP, please introduce yourself\r\n")
	later := says("tutti/Z\r" + strings.Repeat("\x00", 32))
	dead := refusing(t)
	silent := fmt.Sprintf("127.0.0.1:%d", free)
	for _, c := range []struct {
		at   []string
		want error
		text []string
	}{
		{[]string{dead, silent, other.addr(), mail, later, foreign.addr(), b.addr()}, nil, nil},
		{[]string{dead}, p2p.ErrPeerGone, []string{dead, "refused"}},
		{[]string{dead, other.addr()}, p2p.ErrPeerGone, []string{dead,
			"rank 2 (incarnation 000000000000ace2) listens here, not rank 1"}},
		{[]string{other.addr()}, p2p.ErrStale,
			[]string{"rank 2 (incarnation 000000000000ace2) listens here, not rank 1"}},
		{[]string{foreign.addr()}, p2p.ErrAuth, []string{foreign.addr()}},
		{[]string{mail}, p2p.ErrAuth, []string{"does not speak this protocol"}},
		{[]string{later}, p2p.ErrVersion, []string{"the other end speaks tutti/Z"}},
	} {
		link, err := a.Dial(within(t), b.self, b.at(c.at...))
		if !errors.Is(err, c.want) {
			t.Errorf("%v: %v, want %v", c.at, err, c.want)
		}
		for _, s := range append(c.text, b.self.String()) {
			if err != nil && !strings.Contains(err.Error(), s) {
				t.Errorf("%v: %v: does not say %q", c.at, err, s)
			}
		}
		if c.want != p2p.ErrPeerGone && errors.Is(err, p2p.ErrPeerGone) {
			t.Errorf("%v: %v: the peer is not gone", c.at, err)
		}
		if err == nil {
			link.Close()
		}
	}
}

// The peer's own refusal ends Dial: its other addresses are not bothered.
func TestRefusalIsFinal(t *testing.T) {
	a, b := listen(t, 0, local(Config{})), listen(t, 1, local(Config{}))
	for _, reason := range []error{p2p.ErrStale, p2p.ErrSuperseded, errors.New("not today")} {
		var asked atomic.Int32
		b.host.allow(func(p2p.Identity) error { asked.Add(1); return fmt.Errorf("because: %w", reason) })
		_, err := a.Dial(within(t), b.self, b.at(b.addr(), b.addr()))
		if err == nil || !strings.Contains(err.Error(), "because: "+reason.Error()) || asked.Load() != 1 {
			t.Errorf("%v: %v, asked %d times", reason, err, asked.Load())
		}
		if named := errors.Is(reason, p2p.ErrStale) || errors.Is(reason, p2p.ErrSuperseded); named != errors.Is(err,
			reason) || errors.Is(err, p2p.ErrPeerGone) {
			t.Errorf("%v became %v", reason, err)
		}
	}
}

// Dial ends with its context and with the transport, whatever the other end does.
func TestDialEnds(t *testing.T) {
	a, b := listen(t, 0, local(Config{})), listen(t, 1, local(Config{}))
	silent := fmt.Sprintf("127.0.0.1:%d", taken(t, 1))
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	if _, err := a.Dial(ctx, b.self, b.at(silent)); !errors.Is(err, context.DeadlineExceeded) ||
		errors.Is(err, p2p.ErrPeerGone) {
		t.Errorf("deadline: %v", err)
	}
	cancel()
	ctx, cancel = context.WithCancel(t.Context())
	time.AfterFunc(50*time.Millisecond, cancel)
	if _, err := a.Dial(ctx, b.self, b.at(silent, silent)); !errors.Is(err, context.Canceled) {
		t.Errorf("cancelled: %v", err)
	}
	time.AfterFunc(50*time.Millisecond, func() { a.Transport.Close() })
	if _, err := a.Dial(within(t), b.self, b.at(silent)); !errors.Is(err, p2p.ErrClosed) {
		t.Errorf("transport closed: %v", err)
	}
	if _, err := a.Dial(within(t), b.self, b.endpoint); !errors.Is(err, p2p.ErrClosed) {
		t.Errorf("after Close: %v", err)
	}
}

// The smaller offer of both ends counts.
func TestNegotiation(t *testing.T) {
	for _, c := range []struct{ a, b, want int }{{0, 0, 2 << 20}, {5000, 1 << 20, 8192}, {1 << 20, 5000, 8192}} {
		a, b := listen(t, 0, local(Config{MaxFrame: c.a})), listen(t, 1, local(Config{MaxFrame: c.b}))
		l, err := a.Dial(within(t), b.self, b.endpoint)
		if err != nil {
			t.Fatal(err)
		}
		for _, l := range []p2p.Link{l, b.accept(t)} {
			if l.MaxFrame() != c.want {
				t.Errorf("%d and %d: frames of %d, want %d", c.a, c.b, l.MaxFrame(), c.want)
			}
			l.Close()
		}
	}
}

// The receive buffers of connections within a host are fixed, at both ends.
func TestReceiveBuffersWithinAHost(t *testing.T) {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	if err := unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUF, hostBuffer); err != nil {
		t.Fatal(err)
	}
	want := must(unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUF)) // the kernel's account and limit
	a, b, _, _ := pair(t, Config{})
	for _, l := range []p2p.Link{a, b} {
		if got := must(unix.GetsockoptInt(wire(l).stream.fd, unix.SOL_SOCKET, unix.SO_RCVBUF)); got != want {
			t.Errorf("a receive buffer of %d bytes, want %d", got, want)
		}
	}
}

// A link that does not fit this end's configuration is refused.
func TestMisfitIsRefused(t *testing.T) {
	a, b := listen(t, 0, local(Config{})), listen(t, 1, local(Config{MaxFrame: MinFrame}))
	nameless := p2p.Identity{Rank: a.self.Rank}
	for want, h := range map[string]trust.Hello{
		"frames of 2 times 4096":          hello(a.self, b.self, 2*MinFrame),
		"frames of 0 times 4096":          hello(a.self, b.self, 0),
		"frames of 1 times 4096":          hello(nameless, b.self, MinFrame),
		"from " + b.self.String():         hello(b.self, b.self, MinFrame),
		b.self.String() + " listens here": hello(a.self, a.self, MinFrame),
	} {
		if _, err := trust.Client(raw(t, b), secret, purpose, h, false); !errors.As(err, new(*trust.Refusal)) ||
			!strings.Contains(err.Error(), want) {
			t.Errorf("%+v: %v, want a refusal with %q", h, err, want)
		}
	}
}

// A client's key makes no link.
func TestClientsAreRefused(t *testing.T) {
	a, b := listen(t, 0, local(Config{})), listen(t, 1, local(Config{}))
	b.host.allow(func(from p2p.Identity) error {
		t.Errorf("Admit was asked about %v", from)
		return nil
	})
	key, err := trust.Derive(secret, "someone")
	if err != nil {
		t.Fatal(err)
	}
	h := hello(a.self, b.self, MinFrame)
	h.Client = "someone"
	if _, err := trust.Client(raw(t, b), key, purpose, h, false); !errors.As(err, new(*trust.Refusal)) ||
		!strings.Contains(err.Error(), "client someone opens endpoints") {
		t.Errorf("%v, want a refusal that names endpoints", err)
	}
}

// Neither garbage nor slow senders nor floods of connections keep honest ranks out.
func TestHostileConnections(t *testing.T) {
	a, b := listen(t, 0, local(Config{})), listen(t, 1, local(Config{}))
	b.host.allow(func(from p2p.Identity) error {
		if from != a.self {
			t.Errorf("Admit was asked about %v", from)
		}
		return nil
	})
	for _, s := range []string{"", "GET / HTTP/1.1\r\nHost: x\r\n\r\n", strings.Repeat("\xff", 1<<20),
		"tutti/3\n" + strings.Repeat("x", 1<<20)} {
		c := raw(t, b)
		io.WriteString(c, s) // fails as soon as the other side has seen enough
		c.(*net.TCPConn).CloseWrite()
		if got, err := io.Copy(io.Discard, c); errors.Is(err, os.ErrDeadlineExceeded) || got > 200 {
			t.Errorf("%.10q…: %d bytes of answer, then %v", s, got, err)
		}
	}
	for range 300 { // silent ones
		raw(t, b)
	}
	l, err := a.Dial(within(t), b.self, b.endpoint)
	if err != nil {
		t.Fatalf("behind a flood of silent connections: %v", err)
	}
	defer l.Close()
	b.accept(t).Send(header(1, 0), nil)
	if h, _, err := take(l, 1); err != nil || h.Seq != 1 {
		t.Error(h, err)
	}
}
