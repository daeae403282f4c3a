package trust

import (
	"bytes"
	"context"
	"errors"
	"io"
	"math"
	"net"
	"os"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"tutti/internal/files"
)

// serve runs an Acceptor on a loopback listener until the test ends.
func serve(t *testing.T, a *Acceptor) string {
	t.Helper()
	if a.Listener == nil {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		a.Listener = l
	}
	a.Secret, a.Purpose = secret, "p"
	if a.Admit == nil {
		a.Admit = func(net.Conn, Hello) error { return nil }
	}
	if a.Accepted == nil {
		a.Accepted = func(c net.Conn, _ Hello, _ *Session) { c.Close() }
	}
	done := make(chan struct{})
	go func() { defer close(done); a.Serve() }()
	t.Cleanup(func() {
		a.Close()
		select {
		case <-done:
		case <-time.After(patience):
			t.Error("Serve did not end")
		}
		if err := a.Close(); err != nil {
			t.Errorf("second Close: %v", err)
		}
	})
	return a.Listener.Addr().String()
}

func dial(t *testing.T, addr string) net.Conn {
	t.Helper()
	c, err := net.Dial("tcp", addr)
	if err != nil {
		t.Fatal(err)
	}
	c.SetDeadline(time.Now().Add(patience))
	t.Cleanup(func() { c.Close() })
	return c
}

// attack holds n connections to addr that have sent what first says and nothing else, and makes
// about a thousand more a second for as long as the test runs; the oldest make room for them. It
// returns when the n are there. made counts all of them.
func attack(t *testing.T, addr string, n int, local net.Addr, first []byte) (made *atomic.Int64) {
	t.Helper()
	ctx, stop := context.WithCancel(t.Context())
	ready := make(chan struct{})
	var wg sync.WaitGroup
	made = new(atomic.Int64)
	began := time.Now()
	wg.Go(func() {
		var held []net.Conn
		defer func() {
			for _, c := range held {
				c.Close()
			}
		}()
		tick := time.NewTicker(time.Millisecond)
		defer tick.Stop()
		d := net.Dialer{LocalAddr: local}
		for i := 0; ctx.Err() == nil; i++ {
			if len(held) >= n { // from here on at the pace of the clock
				if i == n {
					close(ready)
				}
				select {
				case <-tick.C:
				case <-ctx.Done():
				}
				held[i%n].Close()
			}
			c, err := d.DialContext(ctx, "tcp", addr)
			if err != nil {
				if ctx.Err() == nil && i < n {
					i--
				}
				continue
			}
			c.Write(first)
			if made.Add(1); len(held) < n {
				held = append(held, c)
			} else {
				held[i%n] = c
			}
		}
	})
	t.Cleanup(func() {
		stop()
		wg.Wait()
		t.Logf("%d connections in %v", made.Load(), time.Since(began).Round(time.Millisecond))
	})
	select {
	case <-ready:
	case <-time.After(patience):
		t.Fatalf("only %d connections could be made", made.Load())
	}
	return made
}

// many is how many connections an attack of this process can hold: 5,000 where it may.
func many() int {
	limit, known := files.Limit()
	if !known {
		limit = 1024
	}
	return min(5000, int(limit)/2)
}

// An honest end gets in within seconds while thousands of connections are held and a thousand a
// second are made from its own address, whatever these send that strangers can.
func TestHonestClientsConnectDuringAttack(t *testing.T) {
	for name, first := range map[string][]byte{
		"silent":              nil,
		"junk":                bytes.Repeat([]byte{0xff}, 40),
		"junk after magic":    append([]byte(dialMagic), make([]byte, 32)...),
		"wrong first message": opening(other, "", "p"),
		"replayed":            opening(secret, "", "p"),
		"client's":            opening(alice(secret).key, "alice", "p"),
	} {
		t.Run(name, func(t *testing.T) {
			addr := serve(t, &Acceptor{Timeout: patience})
			before := runtime.NumGoroutine()
			made := attack(t, addr, many(), nil, first)
			var took []time.Duration
			least := math.MaxInt // goroutines
			const few = 20       // the first may meet a queue that is full, and wait for 1 s
			for start := made.Load(); made.Load() < start+500 || len(took) < few; {
				began := time.Now()
				if err := honest(t, addr); err != nil {
					t.Fatalf("after %v: %v", time.Since(began), err)
				}
				took = append(took, time.Since(began))
				least = min(least, runtime.NumGoroutine())
			}
			if least > before+50 {
				t.Errorf("%d goroutines during the attack, %d before", least, before)
			}
			slices.Sort(took)
			median := took[len(took)/2]
			t.Logf("%d honest ends, median %v, longest %v", len(took), median, took[len(took)-1])
			if median > 3*time.Second { // more than a lost SYN costs
				t.Errorf("half of the honest ends waited for longer than %v", median)
			}
		})
	}
}

// honest connects and proves itself as the transports do.
func honest(t *testing.T, addr string) error {
	return Redial(t.Context(), func() error {
		c, err := net.Dial("tcp", addr)
		if err != nil {
			return err
		}
		defer c.Close()
		c.SetDeadline(time.Now().Add(patience))
		_, err = rank.shake(c)
		return err
	})
}

// An end that is slow to speak keeps its place while another source floods the listener.
func TestSlowConnectionsOfOtherSourcesStay(t *testing.T) {
	var displaced atomic.Int64
	addr := serve(t, &Acceptor{Timeout: patience, Max: 32, Refused: func(_ net.Conn, err error) {
		if errors.Is(err, ErrDisplaced) {
			displaced.Add(1)
		}
	}})
	slow := dial(t, addr)
	attack(t, addr, 100, &net.TCPAddr{IP: net.IPv4(127, 0, 0, 2)}, nil)
	for deadline := time.Now().Add(patience); displaced.Load() < 200; runtime.Gosched() {
		if time.Now().After(deadline) {
			t.Fatalf("only %d connections made room", displaced.Load())
		}
	}
	if _, err := rank.shake(slow); err != nil {
		t.Error(err)
	}
}

// A connection that has proved itself is not closed for others' sake, however long Admit takes.
func TestProvedConnectionsSurviveFlood(t *testing.T) {
	asked, answer := make(chan struct{}), make(chan struct{})
	displaced := make(chan error)
	addr := serve(t, &Acceptor{Timeout: 100 * patience, Max: 2,
		Admit: func(net.Conn, Hello) error { close(asked); <-answer; return nil },
		Refused: func(_ net.Conn, err error) {
			select {
			case displaced <- err:
			case <-answer:
			}
		},
	})
	done := make(chan error, 1)
	c := dial(t, addr)
	go func() { _, err := rank.shake(c); done <- err }()
	<-asked
	attack(t, addr, 1, nil, nil)
	for range 20 {
		select {
		case err := <-displaced:
			if !errors.Is(err, ErrDisplaced) && !errors.Is(err, io.ErrUnexpectedEOF) {
				t.Errorf("refused for %v", err)
			}
		case <-time.After(patience):
			t.Fatal("no connection makes room")
		}
	}
	close(answer)
	if err := <-done; err != nil {
		t.Errorf("honest client: %v", err)
	}
}

// Connections that do not finish in time are closed, and hold no more than their places until then.
func TestSlowConnectionsEnd(t *testing.T) {
	const most = 8
	refused := make(chan error, 100)
	addr := serve(t, &Acceptor{Timeout: 100 * time.Millisecond, Max: most,
		Refused: func(_ net.Conn, err error) { refused <- err }})
	var conns []net.Conn
	for i := range 3 * most {
		c := dial(t, addr)
		c.Write([][]byte{nil, []byte(dialMagic), opening(secret, "", "p")}[i%3])
		conns = append(conns, c)
	}
	for i, c := range conns {
		if _, err := io.Copy(io.Discard, c); errors.Is(err, os.ErrDeadlineExceeded) {
			t.Errorf("connection %d lives on", i)
		}
		if err := <-refused; !errors.Is(err, ErrDisplaced) && !errors.Is(err, os.ErrDeadlineExceeded) {
			t.Errorf("refused for %v", err)
		}
	}
}

// A dialler of another version is told so as soon as its magic is there, in however many pieces
// that comes, and keeps no place.
func TestOtherVersionIsAnswered(t *testing.T) {
	refused := make(chan error, 1)
	addr := serve(t, &Acceptor{Timeout: patience, Max: 2, Refused: func(_ net.Conn, err error) { refused <- err }})
	for range 5 {
		c := dial(t, addr)
		c.(*net.TCPConn).SetNoDelay(true)
		for _, b := range []byte("tutti/4\n") {
			c.Write([]byte{b})
			runtime.Gosched()
		}
		answer, err := io.ReadAll(c)
		if got := string(answer); got != acceptMagic+string(denied[:]) || err != nil {
			t.Errorf("the answer is %q, %v", got, err)
		}
		if err := <-refused; !errors.Is(err, ErrVersion) || errors.Is(err, ErrAuth) {
			t.Errorf("refused for %v", err)
		}
	}
	if err := honest(t, addr); err != nil {
		t.Error(err)
	}
}

// Messages that arrive in pieces are put together.
func TestMessagesInPieces(t *testing.T) {
	addr := serve(t, &Acceptor{Timeout: patience, Clients: true})
	for _, d := range []dialler{rank, alice(secret)} {
		if _, err := d.shake(pieces{dial(t, addr)}); err != nil {
			t.Error(err)
		}
	}
}

// pieces writes byte by byte.
type pieces struct{ net.Conn }

func (p pieces) Write(b []byte) (int, error) {
	for i := range b {
		if _, err := p.Conn.Write(b[i : i+1]); err != nil {
			return i, err
		}
		runtime.Gosched()
	}
	return len(b), nil
}

// An end that was admitted and cannot be told so is reported as lost.
func TestAdmittedEndIsLost(t *testing.T) {
	lost, refused := make(chan Hello, 1), make(chan error, 1)
	addr := serve(t, &Acceptor{Timeout: patience,
		Admit:    func(c net.Conn, _ Hello) error { return c.Close() },
		Accepted: func(net.Conn, Hello, *Session) { t.Error("it was accepted") },
		Lost:     func(h Hello) { lost <- h }, Refused: func(_ net.Conn, err error) { refused <- err }})
	if _, err := Client(dial(t, addr), secret, "p", greet, false); err == nil {
		t.Error("the client has a verdict")
	}
	if err := <-refused; !errors.Is(err, net.ErrClosed) {
		t.Errorf("refused for %v", err)
	}
	select {
	case h := <-lost:
		if h != greet {
			t.Errorf("lost %+v", h)
		}
	default:
		t.Error("nothing is lost")
	}
}

// Ends with another secret are told, and counted as strangers.
func TestAcceptorNamesTheWrongSecret(t *testing.T) {
	refused := make(chan error, 1)
	addr := serve(t, &Acceptor{Timeout: patience, Refused: func(_ net.Conn, err error) { refused <- err }})
	if _, err := Client(dial(t, addr), other, "p", greet, false); !errors.Is(err, ErrAuth) {
		t.Errorf("client: %v", err)
	}
	if err := <-refused; !errors.Is(err, ErrAuth) {
		t.Errorf("acceptor: %v", err)
	}
}

// A process without free descriptors drops a silent connection to accept a new one.
func TestShedWhenOutOfDescriptors(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	f := &failing{Listener: l, failed: make(chan struct{}, 64)}
	a := &Acceptor{Listener: f, Timeout: patience, Max: 8}
	addr := serve(t, a)
	silent := dial(t, addr)
	for !held(a) {
		runtime.Gosched()
	}
	f.left.Store(1)
	if _, err := rank.shake(dial(t, addr)); err != nil { // accepted by the call that waits already
		t.Fatal(err)
	}
	if err := honest(t, addr); err != nil {
		t.Fatal(err)
	}
	if _, err := io.Copy(io.Discard, silent); errors.Is(err, os.ErrDeadlineExceeded) {
		t.Error("the silent connection was kept")
	}
}

func held(a *Acceptor) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.pending != nil && a.pending.size() > 0
}

// A listener that fails for a while is not given up, and one that is waiting to try again can be
// closed.
func TestAcceptRetriesAfterErrors(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	f := &failing{Listener: l, failed: make(chan struct{}, 64)}
	f.left.Store(3)
	var told atomic.Int64
	a := &Acceptor{Listener: f, Timeout: patience, Max: 2, Failing: func(err error) {
		if errors.Is(err, syscall.EMFILE) {
			told.Add(1)
		}
	}}
	addr := serve(t, a)
	if _, err := rank.shake(dial(t, addr)); err != nil {
		t.Errorf("after three failures: %v", err)
	}
	if n := told.Load(); n != 3 {
		t.Errorf("Failing was told of %d failures of three", n)
	}
	f.left.Store(1 << 30)
	for range 6 { // the pause is a good part of a second by now
		dial(t, addr).Close()
		<-f.failed
	}
}

type failing struct {
	net.Listener
	left   atomic.Int64
	failed chan struct{}
}

func (f *failing) Accept() (net.Conn, error) {
	if f.left.Add(-1) >= 0 {
		select {
		case f.failed <- struct{}{}:
		default:
		}
		return nil, &net.OpError{Op: "accept", Err: os.NewSyscallError("accept4", syscall.EMFILE)}
	}
	return f.Listener.Accept()
}

// Close ends handshakes that are under way, and nothing is accepted after it.
func TestCloseDuringHandshake(t *testing.T) {
	asked, answer := make(chan struct{}), make(chan struct{})
	refused := make(chan error, 4)
	a := &Acceptor{Timeout: patience, Max: 4,
		Admit:    func(net.Conn, Hello) error { close(asked); <-answer; return nil },
		Accepted: func(c net.Conn, _ Hello, _ *Session) { t.Error("accepted after Close"); c.Close() },
		Refused:  func(_ net.Conn, err error) { refused <- err },
	}
	addr := serve(t, a)
	silent := dial(t, addr)
	done := make(chan error, 1)
	c := dial(t, addr)
	go func() { _, err := rank.shake(c); done <- err }()
	<-asked
	a.Close()
	close(answer)
	if err := <-done; err == nil || errors.Is(err, ErrAuth) {
		t.Errorf("client whose acceptor closed: %v, want an error that does not blame the secret", err)
	}
	if _, err := io.Copy(io.Discard, silent); errors.Is(err, os.ErrDeadlineExceeded) {
		t.Error("a silent connection outlived Close")
	}
	for range 2 {
		select {
		case err := <-refused:
			if err == nil {
				t.Error("Refused was told no reason")
			}
		case <-time.After(patience):
			t.Fatal("Refused was not told")
		}
	}
}

// A stranger is not authenticated, yet nothing is said of its secret.
func TestStranger(t *testing.T) {
	if err := checkMagic([]byte("GET / HTTP/1.1\r\n\r\n"), dialMagic); !errors.Is(err, ErrAuth) ||
		strings.Contains(err.Error(), "secret") {
		t.Error(err)
	}
}
