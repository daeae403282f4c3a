package trust

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"
	"unicode/utf8"

	"go.uber.org/goleak"
	"pgregory.net/rapid"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const patience = 20 * time.Second

var (
	secret = []byte("a secret that both ends know")
	other  = []byte("a secret that only one end knows")
	greet  = Hello{FromRank: 3, ToRank: 5, FromIncarnation: 33, ToIncarnation: 55, Extra: 1 << 63}
)

func yes(Hello) error { return nil }

// ends returns the two ends of a connection, with deadlines.
func ends(t testing.TB) (dialler, acceptor net.Conn) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	if dialler, err = net.Dial("tcp", l.Addr().String()); err != nil {
		t.Fatal(err)
	}
	if acceptor, err = l.Accept(); err != nil {
		t.Fatal(err)
	}
	for _, c := range []net.Conn{dialler, acceptor} {
		c.SetDeadline(time.Now().Add(patience))
		t.Cleanup(func() { c.Close() })
	}
	return dialler, acceptor
}

// shake runs both halves; a half that fails closes its end.
func shake(t testing.TB, cs, ss []byte, cp, sp string, admit func(Hello) error) (got Hello, client, server error) {
	t.Helper()
	a, b := ends(t)
	done := make(chan error, 1)
	go func() {
		var err error
		if got, err = Server(b, ss, sp, admit); err != nil {
			b.Close()
		}
		done <- err
	}()
	client = Client(a, cs, cp, greet)
	if client != nil {
		a.Close()
	}
	return got, client, <-done
}

func TestHandshake(t *testing.T) {
	got, client, server := shake(t, secret, secret, "p", "p", yes)
	if client != nil || server != nil || got != greet {
		t.Errorf("client %v, server %v, hello %+v", client, server, got)
	}
	for name, c := range map[string][4]string{
		"secret":  {string(secret), string(other), "p", "p"},
		"purpose": {string(secret), string(secret), "p", "q"},
		"prefix":  {string(secret), string(secret), "p", ""},
	} {
		_, client, server := shake(t, []byte(c[0]), []byte(c[1]), c[2], c[3], func(Hello) error { t.Errorf("%s: admit was asked", name); return nil })
		if !errors.Is(client, ErrAuth) || !errors.Is(server, ErrAuth) {
			t.Errorf("other %s: client %v, server %v", name, client, server)
		}
	}
	for name, s := range map[string][]byte{"none": nil, "short": secret[:MinSecret-1]} {
		a, b := ends(t)
		if err := Client(a, s, "p", greet); err == nil || errors.Is(err, ErrAuth) {
			t.Errorf("client with a secret that is %s: %v", name, err)
		}
		if _, err := Server(b, s, "p", yes); err == nil || errors.Is(err, ErrAuth) {
			t.Errorf("server with a secret that is %s: %v", name, err)
		}
	}
}

func TestRefusal(t *testing.T) {
	long := strings.Repeat("ä", maxText)
	for _, c := range []struct {
		admit error
		code  uint8
		text  string
	}{
		{&Refusal{Code: 7, Text: "seven"}, 7, "seven"},
		{fmt.Errorf("wrapped: %w", &Refusal{Code: 255, Text: "x"}), 255, "wrapped: x"},
		{&Refusal{Code: 0, Text: "zero"}, 1, "zero"},
		{errors.New("no"), 1, "no"},
		{errors.New(""), 1, ""},
		{errors.New("a" + long), 1, "a" + long[:maxText-2]},
	} {
		_, client, server := shake(t, secret, secret, "p", "p", func(Hello) error { return c.admit })
		var r *Refusal
		if !errors.As(client, &r) || r.Code != c.code || r.Text != c.text || !utf8.ValidString(r.Text) {
			t.Errorf("refused with %v: client %#v", c.admit, client)
		}
		if server != c.admit {
			t.Errorf("refused with %v: server %v", c.admit, server)
		}
	}
}

// An end that goes away in the middle is no wrong secret: a rank that leaves must not look like a foreign job.
func TestEndInTheMiddle(t *testing.T) {
	a, b := ends(t)
	go io.Copy(io.Discard, b)
	var theirs bytes.Buffer
	b.(*net.TCPConn).CloseWrite()
	if err := Client(a, secret, "p", greet); err == nil || errors.Is(err, ErrAuth) || !errors.Is(err, io.ErrUnexpectedEOF) {
		t.Errorf("closed at once: %v", err)
	}
	theirs.WriteString(magic)
	theirs.Write(make([]byte, nonceSize))
	full := theirs.Bytes()
	for n := range len(full) + 1 { // every cut, up to where the proof should come
		if err := Client(&script{in: bytes.NewReader(full[:n])}, secret, "p", greet); errors.Is(err, ErrAuth) || !errors.Is(err, io.ErrUnexpectedEOF) {
			t.Errorf("client after %d bytes: %v", n, err)
		}
		if _, err := Server(&script{in: bytes.NewReader(full[:n])}, secret, "p", yes); errors.Is(err, ErrAuth) || !errors.Is(err, io.ErrUnexpectedEOF) {
			t.Errorf("server after %d bytes: %v", n, err)
		}
	}
}

func TestGarbage(t *testing.T) {
	for _, s := range []string{"GET / HTTP/1.1\r\n\r\n", "SSH-2.0-OpenSSH\r\n", "tutti/0\nxxxx", strings.Repeat("\x00", 4096)} {
		if err := Client(&script{in: strings.NewReader(s)}, secret, "p", greet); !errors.Is(err, ErrAuth) {
			t.Errorf("client reads %q: %v", s, err)
		}
		if _, err := Server(&script{in: strings.NewReader(s)}, secret, "p", yes); !errors.Is(err, ErrAuth) {
			t.Errorf("server reads %q: %v", s, err)
		}
	}
}

// script is a connection on which a prepared input arrives and nothing that is sent matters.
type script struct {
	net.Conn
	in  io.Reader
	out bytes.Buffer
}

func (s *script) Read(b []byte) (int, error)  { return s.in.Read(b) }
func (s *script) Write(b []byte) (int, error) { return s.out.Write(b) }
func (s *script) RemoteAddr() net.Addr        { return &net.TCPAddr{} }

// tap passes a connection's bytes on and keeps them.
type tap struct {
	net.Conn
	sent, got bytes.Buffer
}

func (c *tap) Read(b []byte) (int, error) {
	n, err := c.Conn.Read(b)
	c.got.Write(b[:n])
	return n, err
}

func (c *tap) Write(b []byte) (int, error) {
	c.sent.Write(b)
	return c.Conn.Write(b)
}

func record(t *testing.T) (fromDialler, fromAcceptor []byte) {
	t.Helper()
	a, b := ends(t)
	r := &tap{Conn: a}
	done := make(chan error, 1)
	go func() { _, err := Server(b, secret, "p", yes); done <- err }()
	if err := errors.Join(Client(r, secret, "p", greet), <-done); err != nil {
		t.Fatal(err)
	}
	return r.sent.Bytes(), r.got.Bytes()
}

// What was overheard convinces neither end another time.
func TestReplay(t *testing.T) {
	fromDialler, fromAcceptor := record(t)
	if _, err := Server(&script{in: bytes.NewReader(fromDialler)}, secret, "p", func(Hello) error { t.Error("admit was asked"); return nil }); !errors.Is(err, ErrAuth) {
		t.Errorf("server: %v", err)
	}
	if err := Client(&script{in: bytes.NewReader(fromAcceptor)}, secret, "p", greet); !errors.Is(err, ErrAuth) {
		t.Errorf("client: %v", err)
	}
}

// An end that is sent its own messages is not convinced, whatever of the rest is made up.
func TestReflection(t *testing.T) {
	for _, role := range []string{"client", "server"} {
		a, b := ends(t)
		go io.Copy(b, b) // a mirror
		var err error
		if role == "client" {
			err = Client(a, secret, "p", greet)
		} else {
			a.SetDeadline(time.Now().Add(50 * time.Millisecond)) // a server waits for a proof, which a mirror does not have
			_, err = Server(a, secret, "p", func(Hello) error { t.Error("admit was asked"); return nil })
		}
		if err == nil {
			t.Errorf("a %s took its own reflection for a peer", role)
		}
		b.Close()
	}
	// Two clients that are connected to each other, and two servers.
	a, b := ends(t)
	done := make(chan error, 1)
	go func() { done <- Client(b, secret, "p", greet) }()
	if err := Client(a, secret, "p", greet); !errors.Is(err, ErrAuth) {
		t.Errorf("client facing a client: %v", err)
	}
	if err := <-done; err == nil {
		t.Error("client facing a client: no error")
	}
	// The proof of a dialler for one acceptor of the job, passed on to another by somebody in between: it is valid, and says whom it was for.
	a, b = ends(t)
	c, d := ends(t)
	go io.Copy(c, b)
	go io.Copy(b, c)
	go Client(a, secret, "p", greet)
	h, err := Server(d, secret, "p", func(h Hello) error {
		if h.ToRank != 6 {
			return &Refusal{Code: 9, Text: "not me"}
		}
		return nil
	})
	if err == nil || h != greet {
		t.Errorf("relayed: %+v, %v", h, err)
	}
	b.Close()
	c.Close()
}

// Any change to any byte of either direction is noticed.
func TestTampering(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		toServer := rapid.Bool().Draw(rt, "to server")
		size := opening + sha256.Size + helloSize
		if !toServer {
			size = opening + sha256.Size + verdictLen + len("no")
		}
		at, bit := rapid.IntRange(0, size-1).Draw(rt, "at"), rapid.IntRange(0, 7).Draw(rt, "bit")
		a, b := ends(t)
		defer a.Close()
		defer b.Close()
		bad := &flip{Conn: a, at: at, bit: bit}
		admitted := make(chan struct{}, 1)
		done := make(chan error, 1)
		server := func(c net.Conn) {
			_, err := Server(c, secret, "p", func(h Hello) error { admitted <- struct{}{}; return &Refusal{Code: 4, Text: "no"} })
			c.Close()
			done <- err
		}
		var err error
		if toServer { // what the server reads is changed
			bad.Conn = b
			go server(bad)
			err = Client(a, secret, "p", greet)
		} else {
			go server(b)
			err = Client(bad, secret, "p", greet)
			a.Close()
		}
		<-done
		var r *Refusal
		if err == nil || errors.As(err, &r) {
			rt.Fatalf("the client saw %v", err)
		}
		if toServer && len(admitted) > 0 {
			rt.Fatal("admit was asked")
		}
	})
}

// flip changes one bit of what is read.
type flip struct {
	net.Conn
	at, bit, seen int
}

func (f *flip) Read(b []byte) (int, error) {
	n, err := f.Conn.Read(b)
	if i := f.at - f.seen; i >= 0 && i < n {
		b[i] ^= 1 << f.bit
	}
	f.seen += n
	return n, err
}

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
		a.Admit = yes
	}
	if a.Accepted == nil {
		a.Accepted = func(c net.Conn, _ Hello) { c.Close() }
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

// Connections that send slowly or nothing take no more than their slots, and those only until the timeout; an honest one gets through behind them.
func TestSlowConnections(t *testing.T) {
	const most = 4
	var open, peak atomic.Int32
	a := &Acceptor{Timeout: 100 * time.Millisecond, Max: most}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	a.Listener = counting{l, &open, &peak}
	addr := serve(t, a)
	var wg sync.WaitGroup
	ctx, stop := context.WithCancel(t.Context())
	for range 3 * most {
		c := dial(t, addr)
		wg.Go(func() {
			for _, b := range []byte(magic) { // one byte now and then, never all
				select {
				case <-ctx.Done():
					return
				case <-time.After(30 * time.Millisecond):
				}
				if _, err := c.Write([]byte{b}); err != nil {
					return
				}
			}
		})
	}
	if err := Client(dial(t, addr), secret, "p", greet); err != nil {
		t.Errorf("honest client: %v", err)
	}
	stop()
	wg.Wait()
	if p := peak.Load(); p > most+1 {
		t.Errorf("%d connections were held at once, want at most %d and one that waits", p, most)
	}
}

// flood keeps n connections open to addr that send what opening says and nothing else; one that is closed is replaced at once. The func ends them.
func flood(t *testing.T, addr string, n int, opening []byte) (stop func()) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	for range n {
		wg.Go(func() {
			for ctx.Err() == nil {
				c, err := net.Dial("tcp", addr)
				if err != nil {
					return // the acceptor has gone
				}
				end := context.AfterFunc(ctx, func() { c.Close() })
				c.Write(opening)
				io.Copy(io.Discard, c)
				c.Close()
				end()
			}
		})
	}
	stop = func() { cancel(); wg.Wait() }
	t.Cleanup(stop)
	return stop
}

// More silent connections than there are slots, without end, do not keep honest ones out, though none of them would run into the timeout.
func TestFlood(t *testing.T) {
	for name, opening := range map[string][]byte{
		"silent":  nil,
		"opening": append([]byte(magic), make([]byte, nonceSize)...),
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			const most = 2
			addr := serve(t, &Acceptor{Timeout: 100 * patience, Max: most})
			stop := flood(t, addr, 3*most, opening)
			for range 2 {
				if err := Client(dial(t, addr), secret, "p", greet); err != nil {
					t.Fatalf("honest client: %v", err)
				}
			}
			stop()
		})
	}
}

// A connection that has proved itself keeps its slot for as long as Admit takes.
func TestFloodDuringAdmit(t *testing.T) {
	asked, answer := make(chan struct{}), make(chan struct{})
	crowded := make(chan error)
	addr := serve(t, &Acceptor{Timeout: 100 * patience, Max: 2,
		Admit: func(Hello) error { close(asked); <-answer; return nil },
		Refused: func(_ net.Conn, err error) {
			select {
			case crowded <- err:
			case <-answer:
			}
		},
	})
	done := make(chan error, 1)
	c := dial(t, addr)
	go func() { done <- Client(c, secret, "p", greet) }()
	<-asked
	stop := flood(t, addr, 4, nil)
	for range 2 * int(slowGrace/silentGrace) { // one after the other: by then it is older than any grace
		select {
		case err := <-crowded:
			if !errors.Is(err, ErrCrowded) {
				t.Errorf("refused for %v", err)
			}
		case <-time.After(patience):
			t.Fatal("nobody makes room")
		}
	}
	close(answer)
	if err := <-done; err != nil {
		t.Errorf("honest client: %v", err)
	}
	stop()
}

// A wrong secret is worth a warning, but not thousands of them; a peer that leaves is not.
func TestLogRefused(t *testing.T) {
	var out bytes.Buffer
	refused := LogRefused(slog.New(slog.NewTextHandler(&out, &slog.HandlerOptions{Level: slog.LevelDebug})), "door")
	reset := &net.OpError{Op: "read", Err: os.NewSyscallError("read", syscall.ECONNRESET)}
	for range 3 * warnings {
		for _, err := range []error{reset, ended(io.EOF), os.ErrDeadlineExceeded, &Refusal{Text: "no"}} {
			refused(&script{}, err)
		}
	}
	if strings.Contains(out.String(), "WARN") {
		t.Errorf("a warning about a peer that left:\n%s", &out)
	}
	out.Reset()
	for range 3 * warnings {
		refused(&script{}, fmt.Errorf("wrapped: %w", ErrAuth))
		refused(&script{}, ErrCrowded)
	}
	if got := out.String(); strings.Count(got, "level=WARN") != warnings || strings.Count(got, "level=DEBUG") != 5*warnings || strings.Count(got, "more of them") != 1 ||
		!strings.Contains(got, "door refused a connection") {
		t.Errorf("logged:\n%s", got)
	}
}

// counting counts the open connections that it accepted.
type counting struct {
	net.Listener
	open, peak *atomic.Int32
}

type counted struct {
	net.Conn
	once sync.Once
	open *atomic.Int32
}

func (l counting) Accept() (net.Conn, error) {
	c, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	n := l.open.Add(1)
	for p := l.peak.Load(); n > p && !l.peak.CompareAndSwap(p, n); p = l.peak.Load() {
	}
	return &counted{Conn: c, open: l.open}, nil
}

func (c *counted) Close() error {
	c.once.Do(func() { c.open.Add(-1) })
	return c.Conn.Close()
}

// A listener that fails for a while is not given up, and one that is waiting to try again can be closed.
func TestAcceptFailsForAWhile(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	f := &failing{Listener: l, failed: make(chan struct{}, 64)}
	f.left.Store(3)
	a := &Acceptor{Listener: f, Timeout: patience, Max: 2}
	addr := serve(t, a)
	if err := Client(dial(t, addr), secret, "p", greet); err != nil {
		t.Errorf("after three failures: %v", err)
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
		Admit:    func(Hello) error { close(asked); <-answer; return nil },
		Accepted: func(c net.Conn, _ Hello) { t.Error("accepted after Close"); c.Close() },
		Refused:  func(_ net.Conn, err error) { refused <- err },
	}
	addr := serve(t, a)
	silent := dial(t, addr)
	done := make(chan error, 1)
	c := dial(t, addr)
	go func() { done <- Client(c, secret, "p", greet) }()
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

// No input without knowledge of the secret gets past the proof, or makes either half hang, panic or read without limit.
func FuzzHandshake(f *testing.F) {
	f.Add([]byte(nil))
	f.Add([]byte(magic))
	start := append([]byte(magic), make([]byte, nonceSize)...)
	f.Add(start)
	f.Add(append(bytes.Clone(start), make([]byte, sha256.Size+helloSize)...))
	f.Add(append(append(bytes.Clone(start), bytes.Repeat([]byte{1}, sha256.Size)...), 0, 0, 0xff, 0xff))
	f.Add(append(append(bytes.Clone(start), bytes.Repeat([]byte{1}, sha256.Size)...), binary.LittleEndian.AppendUint32(nil, maxText<<16)...))
	f.Fuzz(func(t *testing.T, in []byte) {
		s := &script{in: bytes.NewReader(in)}
		if err := Client(s, secret, "p", greet); err == nil || errors.As(err, new(*Refusal)) {
			t.Errorf("client convinced: %v", err)
		}
		s = &script{in: bytes.NewReader(in)}
		if _, err := Server(s, secret, "p", func(Hello) error { t.Error("admit was asked"); return nil }); err == nil {
			t.Error("server convinced")
		}
		if s.out.Len() > opening+sha256.Size+verdictLen {
			t.Errorf("server sent %d bytes", s.out.Len())
		}
	})
}
