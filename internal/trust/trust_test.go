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
	"testing/synctest"
	"time"
	"unicode/utf8"

	"pgregory.net/rapid"

	"tutti/internal/leaktest"
)

func TestMain(m *testing.M) { leaktest.Main(m) }

const patience = 20 * time.Second

var (
	secret = []byte("a secret that both ends know")
	other  = []byte("a secret that only one end knows")
	greet  = Hello{FromRank: 3, ToRank: 5, FromIncarnation: 33, ToIncarnation: 55, Extra: 1 << 63}
	rank   = dialler{secret, "p", greet, false}
)

// alice has the key of client alice of the job with that secret.
func alice(secret []byte) dialler {
	d := dialler{mac(secret, "client", "alice", nil), "p", greet, false}
	d.hello.Client = "alice"
	return d
}

// dialler is the dialling end of a handshake.
type dialler struct {
	key     []byte
	purpose string
	hello   Hello
	agree   bool
}

func (d dialler) shake(conn net.Conn) (*Session, error) {
	return Client(conn, d.key, d.purpose, d.hello, d.agree)
}

// door is an acceptor of the job that takes every holder of a key.
func door() *Acceptor {
	return &Acceptor{Secret: secret, Purpose: "p", Clients: true, Admit: func(net.Conn, Hello) error { return nil }}
}

// shut is a door whose Admit must not be asked.
func shut(t testing.TB) *Acceptor {
	a := door()
	a.Admit = func(_ net.Conn, h Hello) error { t.Errorf("admit was asked about %+v", h); return nil }
	return a
}

// opening is a dialler's first message.
func opening(key []byte, client, purpose string) []byte {
	said := append(make([]byte, nameSize), bytes.Repeat([]byte{7}, nonceSize)...)
	copy(said, client)
	return append(append([]byte(dialMagic), said...), mac(key, "open", purpose, said)...)
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

// result is what both ends of a handshake know after it.
type result struct {
	who               Hello
	dialler, acceptor *Session
	client, server    error
}

// shake runs both halves; a half that fails closes its end.
func shake(t testing.TB, d dialler, a *Acceptor) (r result) {
	t.Helper()
	c, s := ends(t)
	done := make(chan struct{})
	go func() {
		defer close(done)
		if r.who, r.acceptor, r.server = a.Handshake(s); r.server != nil {
			s.Close()
		}
	}()
	if r.dialler, r.client = d.shake(c); r.client != nil {
		c.Close()
	}
	<-done
	return r
}

func TestHandshake(t *testing.T) {
	for _, d := range []dialler{rank, alice(secret)} {
		if r := shake(t, d, door()); r.client != nil || r.server != nil || r.who != d.hello {
			t.Errorf("%q: client %v, server %v, hello %+v", d.hello.Client, r.client, r.server, r.who)
		}
	}
	claim := func(d dialler, client string) dialler { d.hello.Client = client; return d }
	foreign := func(d dialler) dialler { d.purpose = "q"; return d }
	for name, d := range map[string]dialler{
		"secret":                                 {other, "p", greet, false},
		"purpose":                                foreign(rank),
		"prefix of the purpose":                  {secret, "", greet, false},
		"purpose of a client":                    foreign(alice(secret)),
		"job's client":                           alice(other),
		"client's key, claimed as another":       claim(alice(secret), "bob"),
		"client's key, claimed as a longer name": claim(alice(secret), "alice2"),
		"client's key, claimed as a rank":        claim(alice(secret), ""),
		"rank that claims to be a client":        claim(rank, "alice"),
	} {
		if r := shake(t, d, shut(t)); !errors.Is(r.client, ErrAuth) || !errors.Is(r.server, ErrAuth) {
			t.Errorf("other %s: client %v, server %v", name, r.client, r.server)
		}
	}
	// Who has only a client's key is no acceptor for ranks and for other clients.
	bob := alice(secret)
	bob.hello.Client, bob.key = "bob", mac(secret, "client", "bob", nil)
	for _, d := range []dialler{rank, bob, alice(secret)} {
		a := shut(t)
		a.Secret = alice(secret).key
		if r := shake(t, d, a); !errors.Is(r.client, ErrAuth) || !errors.Is(r.server, ErrAuth) {
			t.Errorf("%q at one with the key of alice: client %v, server %v", d.hello.Client, r.client, r.server)
		}
	}
	for name, s := range map[string][]byte{"none": nil, "short": secret[:MinSecret-1]} {
		c, b := ends(t)
		if _, err := Client(c, s, "p", greet, false); err == nil || errors.Is(err, ErrAuth) {
			t.Errorf("client with a secret that is %s: %v", name, err)
		}
		a := shut(t)
		a.Secret = s
		if _, _, err := a.Handshake(b); err == nil || errors.Is(err, ErrAuth) {
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
		{errors.New("full\x1b[2J\r\n\u009b\u202etutti: rank 0 has ended"), 1, "full [2J    tutti: rank 0 has ended"},
	} {
		a := door()
		a.Admit = func(net.Conn, Hello) error { return c.admit }
		got := shake(t, rank, a)
		var r *Refusal
		if !errors.As(got.client, &r) || r.Code != c.code || r.Text != c.text || !utf8.ValidString(r.Text) {
			t.Errorf("refused with %v: client %#v", c.admit, got.client)
		}
		if got.server != c.admit {
			t.Errorf("refused with %v: server %v", c.admit, got.server)
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
	if _, err := rank.shake(a); err == nil || errors.Is(err, ErrAuth) ||
		!errors.Is(err, io.ErrUnexpectedEOF) {
		t.Errorf("closed at once: %v", err)
	}
	theirs.WriteString(acceptMagic)
	theirs.Write(bytes.Repeat([]byte{1}, nonceSize))
	for n := range theirs.Len() + 1 { // every cut, up to where the verdict should come
		_, err := rank.shake(&script{in: bytes.NewReader(theirs.Bytes()[:n])})
		if errors.Is(err, ErrAuth) || !errors.Is(err, io.ErrUnexpectedEOF) || !errors.Is(err, ErrTurnedAway) {
			t.Errorf("client after %d bytes: %v", n, err)
		}
	}
	for _, full := range [][]byte{opening(secret, "", "p"), opening(alice(secret).key, "alice", "p")} {
		for n := range len(full) + proofSize { // every cut, also in a proof
			in := append(bytes.Clone(full), make([]byte, proofSize)...)[:n]
			_, _, err := shut(t).Handshake(&script{in: bytes.NewReader(in)})
			if errors.Is(err, ErrAuth) || !errors.Is(err, io.ErrUnexpectedEOF) {
				t.Errorf("server after %d bytes: %v", n, err)
			}
		}
	}
}

func TestGarbageIsRefused(t *testing.T) {
	for _, s := range []string{"GET / HTTP/1.1\r\n\r\n", "SSH-2.0-OpenSSH\r\n", "tutti/!\nxxxx",
		"tutti/2\txxxx", strings.Repeat("\x00", 4096)} {
		if _, err := rank.shake(&script{in: strings.NewReader(s)}); !errors.Is(err, ErrAuth) {
			t.Errorf("client reads %q: %v", s, err)
		}
		if _, _, err := shut(t).Handshake(&script{in: strings.NewReader(s)}); !errors.Is(err, ErrAuth) {
			t.Errorf("server reads %q: %v", s, err)
		}
	}
}

// An end of another version of the protocol is no end with another secret: both ends say what they
// speak, whatever follows the magic.
func TestOtherVersion(t *testing.T) {
	for _, v := range []string{"1", "4", "9", "A", "Z"} {
		for _, rest := range [][]byte{nil, make([]byte, 8), make([]byte, 4096)} {
			s := &script{in: io.MultiReader(strings.NewReader("tutti/"+v+"\r"), bytes.NewReader(rest))}
			want := "the other end speaks tutti/" + v + ", this one tutti/3:"
			if _, err := rank.shake(s); !errors.Is(err, ErrVersion) || errors.Is(err, ErrAuth) ||
				errors.Is(err, ErrTurnedAway) || !strings.Contains(err.Error(), want) {
				t.Errorf("client of an acceptor of version %s: %v", v, err)
			}
			s = &script{in: io.MultiReader(strings.NewReader("tutti/"+v+"\n"), bytes.NewReader(rest))}
			if _, _, err := shut(t).Handshake(s); !errors.Is(err, ErrVersion) || errors.Is(err, ErrAuth) ||
				!strings.Contains(err.Error(), want) {
				t.Errorf("server of a dialler of version %s: %v", v, err)
			}
			if got := s.out.String(); got != acceptMagic+string(denied[:]) {
				t.Errorf("server of a dialler of version %s answers %q", v, got)
			}
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

func record(t *testing.T, d dialler, a *Acceptor) (fromDialler, fromAcceptor []byte) {
	t.Helper()
	c, s := ends(t)
	r := &tap{Conn: c}
	done := make(chan error, 1)
	go func() { _, _, err := a.Handshake(s); done <- err }()
	_, err := d.shake(r)
	if err := errors.Join(err, <-done); err != nil {
		t.Fatal(err)
	}
	return r.sent.Bytes(), r.got.Bytes()
}

// A recorded handshake convinces neither end again, with nonces of either kind.
func TestReplay(t *testing.T) {
	for _, d := range []dialler{rank, alice(secret)} {
		for _, d.agree = range []bool{false, true} {
			a := door()
			a.Agree = d.agree
			fromDialler, fromAcceptor := record(t, d, a)
			a = shut(t)
			a.Agree = d.agree
			s := &script{in: bytes.NewReader(fromDialler)}
			if _, _, err := a.Handshake(s); !errors.Is(err, ErrAuth) || s.out.Len() <= answerSize {
				t.Errorf("server: %v after %d bytes, want it to refuse the proof", err, s.out.Len())
			}
			s = &script{in: bytes.NewReader(fromAcceptor)}
			if _, err := d.shake(s); !errors.Is(err, ErrAuth) || s.out.Len() != openingSize+proofSize {
				t.Errorf("client: %v after %d bytes, want it to refuse the verdict", err, s.out.Len())
			}
		}
	}
}

// An end that is sent its own messages is not convinced, whatever of the rest is made up.
func TestReflection(t *testing.T) {
	for _, d := range []dialler{rank, alice(secret)} {
		a, b := ends(t)
		go io.Copy(b, b) // a mirror
		if _, err := d.shake(a); err == nil {
			t.Error("a client took its own reflection for a peer")
		}
		b.Close()
		// Two clients that are connected to each other.
		a, b = ends(t)
		done := make(chan error, 1)
		go func() { _, err := d.shake(b); done <- err }()
		if _, err := d.shake(a); !errors.Is(err, ErrAuth) {
			t.Errorf("client facing a client: %v", err)
		}
		if err := <-done; err == nil {
			t.Error("client facing a client: no error")
		}
		// A dialler's proof for one acceptor of the job, forwarded to another one: it is valid, and
		// names the intended acceptor.
		a, b = ends(t)
		c, e := ends(t)
		go io.Copy(c, b)
		go io.Copy(b, c)
		go d.shake(a)
		there := door()
		there.Admit = func(_ net.Conn, h Hello) error {
			if h.ToRank != 6 {
				return &Refusal{Code: 9, Text: "not me"}
			}
			return nil
		}
		h, _, err := there.Handshake(e)
		if err == nil || h != d.hello {
			t.Errorf("relayed: %+v, %v", h, err)
		}
		b.Close()
		c.Close()
	}
}

// Any change to any byte of either direction is noticed.
func TestTampering(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		d := rapid.SampledFrom([]dialler{rank, alice(secret)}).Draw(rt, "dialler")
		d.agree = rapid.Bool().Draw(rt, "agree")
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
			s := door()
			s.Agree = d.agree
			s.Admit = func(net.Conn, Hello) error {
				admitted <- struct{}{}
				return &Refusal{Code: 4, Text: "no"}
			}
			_, _, err := s.Handshake(c)
			c.Close()
			done <- err
		}
		var err error
		if toServer { // what the server reads is changed
			bad.Conn = b
			go server(bad)
			_, err = d.shake(a)
		} else {
			go server(b)
			_, err = d.shake(bad)
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
	for range 2 * warnings {
		refused(&script{}, fmt.Errorf("wrapped: %w", ErrAuth))
		refused(&script{}, fmt.Errorf("wrapped: %w", ErrVersion))
		refused(&script{}, ErrDisplaced)
	}
	if got := out.String(); strings.Count(got, "level=WARN") != warnings ||
		strings.Count(got, "level=DEBUG") != 5*warnings || strings.Count(got, "another version") != 2*warnings ||
		strings.Count(got, "more of them") != 1 || !strings.Contains(got, "door refused a connection") {
		t.Errorf("logged:\n%s", got)
	}
}

// What keeps a listener from accepting is logged once a minute, and says what to do.
func TestLogFailingIsLimited(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var out bytes.Buffer
		failing := LogFailing(slog.New(slog.NewTextHandler(&out, nil)), "door")
		for range 90 {
			failing(&net.OpError{Op: "accept", Err: os.NewSyscallError("accept4", syscall.EMFILE)})
			time.Sleep(time.Second)
		}
		if got := out.String(); strings.Count(got, "level=WARN") != 2 || !strings.Contains(got, "door cannot accept") ||
			!strings.Contains(got, "ulimit -n") {
			t.Errorf("logged:\n%s", got)
		}
	})
}

// No input without knowledge of the secret gets past the proof, or makes either half hang, panic or
// read without limit.
func FuzzHandshake(f *testing.F) {
	f.Add([]byte(nil))
	f.Add([]byte(dialMagic))
	f.Add([]byte(acceptMagic))
	f.Add([]byte("tutti/4\n"))
	f.Add(append([]byte("tutti/4\r"), make([]byte, nonceSize)...))
	f.Add(opening(secret, "", "p"))
	f.Add(append(opening(secret, "", "p"), make([]byte, proofSize)...))
	f.Add(append(opening(alice(secret).key, "alice", "p"), make([]byte, proofSize)...))
	f.Add(opening(secret, "a\x00b", "p"))
	start := append([]byte(acceptMagic), bytes.Repeat([]byte{1}, nonceSize)...)
	f.Add(start)
	f.Add(append(bytes.Clone(start), make([]byte, sha256.Size+helloSize)...))
	f.Add(append(append(bytes.Clone(start), bytes.Repeat([]byte{1}, sha256.Size)...), 0, 0, 0xff, 0xff))
	f.Add(append(append(bytes.Clone(start), bytes.Repeat([]byte{1}, sha256.Size)...),
		binary.LittleEndian.AppendUint32(nil, maxText<<16)...))
	f.Fuzz(func(t *testing.T, in []byte) {
		for _, agree := range []bool{false, true} {
			d := alice(secret)
			d.agree = agree
			for _, d := range []dialler{rank, d} {
				s := &script{in: bytes.NewReader(in)}
				if _, err := d.shake(s); err == nil || errors.As(err, new(*Refusal)) {
					t.Errorf("client convinced: %v", err)
				}
			}
			a := shut(t)
			a.Agree = agree
			s := &script{in: bytes.NewReader(in)}
			if _, _, err := a.Handshake(s); err == nil {
				t.Error("server convinced")
			}
			if s.out.Len() > answerSize+sha256.Size+verdictLen {
				t.Errorf("server sent %d bytes", s.out.Len())
			}
		}
	})
}
