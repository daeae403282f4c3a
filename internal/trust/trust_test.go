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

// opening is a dialler's first message.
func opening(key []byte, purpose string) []byte {
	nonce := bytes.Repeat([]byte{7}, nonceSize)
	return append(append([]byte(dialMagic), nonce...), mac(key, "open", purpose, nonce)...)
}

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
		_, client, server := shake(t, []byte(c[0]), []byte(c[1]), c[2], c[3],
			func(Hello) error { t.Errorf("%s: admit was asked", name); return nil })
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

// An end that goes away in the middle is no wrong secret: a rank that leaves must not look like a
// foreign job.
func TestEarlyEndIsNoWrongSecret(t *testing.T) {
	a, b := ends(t)
	go io.Copy(io.Discard, b)
	var theirs bytes.Buffer
	b.(*net.TCPConn).CloseWrite()
	if err := Client(a, secret, "p", greet); err == nil || errors.Is(err, ErrAuth) ||
		!errors.Is(err, io.ErrUnexpectedEOF) {
		t.Errorf("closed at once: %v", err)
	}
	theirs.WriteString(acceptMagic)
	theirs.Write(bytes.Repeat([]byte{1}, nonceSize))
	for n := range theirs.Len() + 1 { // every cut, up to where the verdict should come
		err := Client(&script{in: bytes.NewReader(theirs.Bytes()[:n])}, secret, "p", greet)
		if errors.Is(err, ErrAuth) || !errors.Is(err, io.ErrUnexpectedEOF) || !errors.Is(err, ErrTurnedAway) {
			t.Errorf("client after %d bytes: %v", n, err)
		}
	}
	full := opening(secret, "p")
	for n := range len(full) + 1 { // every cut, up to where the proof should come
		_, err := Server(&script{in: bytes.NewReader(full[:n])}, secret, "p", yes)
		if errors.Is(err, ErrAuth) || !errors.Is(err, io.ErrUnexpectedEOF) {
			t.Errorf("server after %d bytes: %v", n, err)
		}
	}
}

func TestGarbage(t *testing.T) {
	for _, s := range []string{"GET / HTTP/1.1\r\n\r\n", "SSH-2.0-OpenSSH\r\n", "tutti/1\nxxxx",
		strings.Repeat("\x00", 4096)} {
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

// A recorded handshake convinces neither end again.
func TestReplay(t *testing.T) {
	fromDialler, fromAcceptor := record(t)
	if _, err := Server(&script{in: bytes.NewReader(fromDialler)}, secret, "p",
		func(Hello) error { t.Error("admit was asked"); return nil }); !errors.Is(err, ErrAuth) {
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
			// a server waits for a proof, which a mirror does not have
			a.SetDeadline(time.Now().Add(50 * time.Millisecond))
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
	// A dialler's proof for one acceptor of the job, forwarded to another one: it is valid, and
	// names the intended acceptor.
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
		size := openingSize + proofSize
		if !toServer {
			size = answerSize + sha256.Size + verdictLen + len("no")
		}
		at, bit := rapid.IntRange(0, size-1).Draw(rt, "at"), rapid.IntRange(0, 7).Draw(rt, "bit")
		a, b := ends(t)
		defer a.Close()
		defer b.Close()
		bad := &flip{Conn: a, at: at, bit: bit}
		admitted := make(chan struct{}, 1)
		done := make(chan error, 1)
		server := func(c net.Conn) {
			_, err := Server(c, secret, "p", func(h Hello) error {
				admitted <- struct{}{}
				return &Refusal{Code: 4,
					Text: "no"}
			})
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

// Redial dials again while it is turned away, and then no more.
func TestRedial(t *testing.T) {
	n := 0
	if err := Redial(t.Context(), func() error {
		if n++; n < 3 {
			return fmt.Errorf("wrapped: %w", ErrTurnedAway)
		}
		return nil
	}); err != nil || n != 3 {
		t.Errorf("%d attempts: %v", n, err)
	}
	n = 0
	if err := Redial(t.Context(), func() error { n++; return ErrTurnedAway }); !errors.Is(err, ErrTurnedAway) ||
		n != redials {
		t.Errorf("%d attempts: %v", n, err)
	}
	n = 0
	if err := Redial(t.Context(), func() error { n++; return ErrAuth }); !errors.Is(err, ErrAuth) || n != 1 {
		t.Errorf("%d attempts: %v", n, err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	n = 0
	if err := Redial(ctx, func() error { n++; return ErrTurnedAway }); !errors.Is(err, ErrTurnedAway) || n != 1 {
		t.Errorf("with an ended ctx, %d attempts: %v", n, err)
	}
}

// A wrong secret is worth a warning, but not thousands of them; a peer that leaves is not.
func TestLogRefusedIsLimited(t *testing.T) {
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
	if got := out.String(); strings.Count(got, "level=WARN") != warnings ||
		strings.Count(got, "level=DEBUG") != 5*warnings || strings.Count(got, "more of them") != 1 ||
		!strings.Contains(got, "door refused a connection") {
		t.Errorf("logged:\n%s", got)
	}
}

// No input without knowledge of the secret gets past the proof, or makes either half hang, panic or
// read without limit.
func FuzzHandshake(f *testing.F) {
	f.Add([]byte(nil))
	f.Add([]byte(dialMagic))
	f.Add([]byte(acceptMagic))
	f.Add(opening(secret, "p"))
	f.Add(append(opening(secret, "p"), make([]byte, proofSize)...))
	start := append([]byte(acceptMagic), bytes.Repeat([]byte{1}, nonceSize)...)
	f.Add(start)
	f.Add(append(bytes.Clone(start), make([]byte, sha256.Size+helloSize)...))
	f.Add(append(append(bytes.Clone(start), bytes.Repeat([]byte{1}, sha256.Size)...), 0, 0, 0xff, 0xff))
	f.Add(append(append(bytes.Clone(start), bytes.Repeat([]byte{1}, sha256.Size)...),
		binary.LittleEndian.AppendUint32(nil, maxText<<16)...))
	f.Fuzz(func(t *testing.T, in []byte) {
		s := &script{in: bytes.NewReader(in)}
		if err := Client(s, secret, "p", greet); err == nil || errors.As(err, new(*Refusal)) {
			t.Errorf("client convinced: %v", err)
		}
		s = &script{in: bytes.NewReader(in)}
		if _, err := Server(s, secret, "p", func(Hello) error { t.Error("admit was asked"); return nil }); err == nil {
			t.Error("server convinced")
		}
		if s.out.Len() > answerSize+sha256.Size+verdictLen {
			t.Errorf("server sent %d bytes", s.out.Len())
		}
	})
}
