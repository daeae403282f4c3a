package trust

import (
	"bytes"
	"crypto/sha256"
	"errors"
	"io"
	"net"
	"strings"
	"testing"
	"time"

	"pgregory.net/rapid"
)

// Keys of clients differ by secret and by name, and only proper names have one.
func TestDerive(t *testing.T) {
	long := strings.Repeat("n", MaxClient)
	seen := map[string]string{string(secret): "the secret"}
	for _, s := range [][]byte{secret, other} {
		for _, name := range []string{"a", "b", "A", "a.", "az", long, "-_.0129AZaz", ".", "-"} {
			key, err := Derive(s, name)
			if err != nil || len(key) != 32 {
				t.Errorf("key of %q: %d bytes, %v", name, len(key), err)
			}
			if before, is := seen[string(key)]; is {
				t.Errorf("%q has the key of %s", name, before)
			}
			seen[string(key)] = name
		}
	}
	for _, name := range bad {
		if key, err := Derive(secret, name); err == nil || key != nil {
			t.Errorf("%q has key %x", name, key)
		}
		d := rank
		d.hello.Client = name
		s := &script{in: strings.NewReader("")}
		if _, err := d.shake(s); err == nil || s.out.Len() > 0 || errors.Is(err, ErrTurnedAway) {
			t.Errorf("a client with the name %q sent %d bytes: %v", name, s.out.Len(), err)
		}
	}
	if key, err := Derive(secret[:MinSecret-1], "a"); err == nil || key != nil {
		t.Errorf("a short secret gives key %x", key)
	}
}

// bad are names that no client can have.
var bad = []string{"a b", " a", "a\n", "a/b", "a:b", "a\\b", "ä", "\xff", "\x7f", "a@", "[", "`", "{", "^", "a\x00b",
	"\x00a", strings.Repeat("n", MaxClient+1), "\x01"}

// An acceptor does not look further at a first message whose name is no proper one, even if its MAC
// is that of a key derived from this name, or from a part of it.
func TestMalformedNames(t *testing.T) {
	try := func(field, client string) (answer []byte, err error) {
		key := secret
		if client != "" {
			key = mac(secret, "client", client, nil)
		}
		said := append([]byte(field), make([]byte, nonceSize)...)
		s := &script{in: bytes.NewReader(append(append([]byte(dialMagic), said...), mac(key, "open", "p", said)...))}
		_, _, err = shut(t).Handshake(s)
		return s.out.Bytes(), err
	}
	pad := func(name, with string) string { return name + strings.Repeat(with, nameSize-len(name)) }
	denial := append([]byte(acceptMagic), denied[:]...)
	for _, name := range []string{"", "a", strings.Repeat("n", MaxClient)} {
		if answer, err := try(pad(name, "\x00"), name); bytes.Equal(answer, denial) ||
			!errors.Is(err, io.ErrUnexpectedEOF) {
			t.Errorf("the proper name %q: %v, answer %x", name, err, answer)
		}
	}
	fields := []string{pad("", "\x01"), pad("a", "\x01"), pad("a", " "), pad("a\x00\x00", "\x01"), pad("\x00", "a"),
		pad("", "\x00")[1:] + "a"}
	for _, name := range bad {
		if len(name) <= nameSize {
			fields = append(fields, pad(name, "\x00"))
		}
	}
	for _, field := range fields {
		before, _, _ := strings.Cut(field, "\x00")
		for _, client := range []string{"", "a", before, field, strings.TrimRight(field, "\x00"),
			strings.Trim(field, "\x00"), strings.TrimSpace(field), strings.ReplaceAll(field, "\x00", "")} {
			if answer, err := try(field, client); !bytes.Equal(answer, denial) || !errors.Is(err, ErrAuth) {
				t.Errorf("the name %q, with the key of %q: %v, answer %x", field, client, err, answer)
			}
		}
	}
}

// Of all diallers exactly those are admitted that have the key of what they claim to be, and each
// is known by that.
func TestOnlyOwnName(t *testing.T) {
	name := rapid.StringMatching(`[A-Za-z0-9._-]{0,32}`)
	rapid.Check(t, func(rt *rapid.T) {
		has, claims := name.Draw(rt, "has the key of"), name.Draw(rt, "claims to be")
		if rapid.Bool().Draw(rt, "honest") {
			claims = has
		}
		d := rank
		d.hello.Client = claims
		if has != "" {
			var err error
			if d.key, err = Derive(secret, has); err != nil {
				rt.Fatal(err)
			}
		}
		r := shake(t, d, door())
		if has == claims && (r.client != nil || r.server != nil || r.who != d.hello) {
			rt.Fatalf("client %v, server %v, hello %+v", r.client, r.server, r.who)
		}
		if has != claims && (!errors.Is(r.client, ErrAuth) || !errors.Is(r.server, ErrAuth) || r.who != Hello{}) {
			rt.Fatalf("client %v, server %v, hello %+v", r.client, r.server, r.who)
		}
	})
}

// A MAC of another message, or one that leaves something out, is no proof, and none of a verdict.
func TestMACsOfOtherMessages(t *testing.T) {
	for _, d := range []dialler{rank, alice(secret)} {
		hello := d.hello.encode()
		first := opening(d.key, d.hello.Client, "p")
		for _, label := range []string{"open", "dial", "accept", "session", "client"} {
			for _, skip := range []int{0, nameSize, saidSize} {
				c, s := ends(t)
				done := make(chan error, 1)
				go func() { _, _, err := door().Handshake(s); s.Close(); done <- err }()
				c.Write(first)
				var answer [answerSize]byte
				if _, err := io.ReadFull(c, answer[:]); err != nil {
					t.Fatal(err)
				}
				said := append(bytes.Clone(first[magicSize:magicSize+saidSize]), answer[magicSize:]...)
				said = append(said, hello[:]...)
				c.Write(append(mac(d.key, label, "p", said[skip:]), hello[:]...))
				got, _ := io.ReadAll(c)
				right := label == "dial" && skip == 0
				if err := <-done; (err == nil) != right || !right && !errors.Is(err, ErrAuth) {
					t.Errorf("%q: MAC %q without %d bytes as a proof: %v", d.hello.Client, label, skip, err)
				} else if bytes.HasPrefix(got, denied[:]) == right {
					t.Errorf("%q: MAC %q without %d bytes as a proof: answer %x", d.hello.Client, label, skip, got)
				}

				c, s = ends(t)
				go func() { _, err := d.shake(c); c.Close(); done <- err }()
				in := make([]byte, openingSize)
				if _, err := io.ReadFull(s, in); err != nil {
					t.Fatal(err)
				}
				s.Write(answer[:])
				said = append(bytes.Clone(in[magicSize:magicSize+saidSize]), answer[magicSize:]...)
				if _, err := io.ReadFull(s, in[:proofSize]); err != nil {
					t.Fatal(err)
				}
				verdict := make([]byte, verdictLen)
				said = append(append(said, in[sha256.Size:proofSize]...), verdict...)
				s.Write(append(mac(d.key, label, "p", said[skip:]), verdict...))
				right = label == "accept" && skip == 0
				if err := <-done; (err == nil) != right || !right && !errors.Is(err, ErrAuth) {
					t.Errorf("%q: MAC %q without %d bytes as a verdict: %v", d.hello.Client, label, skip, err)
				}
			}
		}
	}
}

// A client's key proves both ends to each other. So its holders can answer each other as any
// acceptor, but neither another client nor a rank.
func TestHoldersOfOneKeyCanPoseAsAcceptors(t *testing.T) {
	bob := dialler{mac(secret, "client", "bob", nil), "p", greet, false}
	bob.hello.Client = "bob"
	for _, d := range []dialler{alice(secret), bob, rank} {
		c, s := ends(t)
		go func() { // it has alice's key alone
			defer s.Close()
			in := make([]byte, openingSize+proofSize)
			if _, err := io.ReadFull(s, in[:openingSize]); err != nil {
				return
			}
			nonce := bytes.Repeat([]byte{7}, nonceSize)
			s.Write(append([]byte(acceptMagic), nonce...))
			if _, err := io.ReadFull(s, in[openingSize:]); err != nil {
				return
			}
			verdict := make([]byte, verdictLen)
			said := append(bytes.Clone(in[magicSize:magicSize+saidSize]), nonce...)
			said = append(append(said, in[openingSize+sha256.Size:]...), verdict...)
			s.Write(append(mac(alice(secret).key, "accept", "p", said), verdict...))
		}()
		if _, err := d.shake(c); d.hello.Client == "alice" && err != nil ||
			d.hello.Client != "alice" && !errors.Is(err, ErrAuth) {
			t.Errorf("client %q, answered with alice's key: %v", d.hello.Client, err)
		}
	}
}

// A service of the ranks tells a client, after its proof, that it is at the wrong door.
func TestClientAtARanksService(t *testing.T) {
	check := func(err error) {
		t.Helper()
		var r *Refusal
		if !errors.As(err, &r) || r.Code == 0 || !strings.Contains(r.Text, "client alice opens endpoints") ||
			!strings.Contains(r.Text, "job's own secret") {
			t.Errorf("%v, want a refusal that says what a client's key opens", err)
		}
	}
	a := shut(t)
	a.Clients = false
	r := shake(t, alice(secret), a)
	check(r.client)
	check(r.server)

	refused := make(chan error, 1)
	addr := serve(t, &Acceptor{Timeout: patience, Admit: a.Admit,
		Accepted: func(c net.Conn, h Hello, _ *Session) { t.Errorf("accepted %+v", h); c.Close() },
		Refused:  func(_ net.Conn, err error) { refused <- err }})
	told := func() error {
		select {
		case err := <-refused:
			return err
		case <-time.After(patience):
			return errors.New("Refused was not told")
		}
	}
	_, err := alice(secret).shake(dial(t, addr))
	check(err)
	check(told())
	// Without the proof there is no such answer.
	if _, err := alice(other).shake(dial(t, addr)); !errors.Is(err, ErrAuth) {
		t.Errorf("a client of another job: %v", err)
	}
	if err := told(); !errors.Is(err, ErrAuth) {
		t.Errorf("refused for %v", err)
	}
}

// An Acceptor that takes clients tells Admit and Accepted the client's name.
func TestAcceptorKnowsClients(t *testing.T) {
	asked, accepted := make(chan Hello, 1), make(chan Hello, 1)
	addr := serve(t, &Acceptor{Timeout: patience, Clients: true,
		Admit:    func(_ net.Conn, h Hello) error { asked <- h; return nil },
		Accepted: func(c net.Conn, h Hello, _ *Session) { accepted <- h; c.Close() }})
	for _, d := range []dialler{rank, alice(secret)} {
		if _, err := d.shake(dial(t, addr)); err != nil {
			t.Fatal(err)
		}
		if a, b := <-asked, <-accepted; a != d.hello || b != d.hello {
			t.Errorf("Admit was asked about %+v, Accepted told of %+v, want %+v", a, b, d.hello)
		}
	}
}

// Clients do not displace an end that a service of the ranks can accept.
func TestRefusedClientsDisplaceNoRank(t *testing.T) {
	addr := serve(t, &Acceptor{Timeout: patience, Max: 2}) // one of each class
	begin := func(d dialler) (c net.Conn, said []byte) {
		c = dial(t, addr)
		first := opening(d.key, d.hello.Client, "p")
		c.Write(first)
		var answer [answerSize]byte
		if _, err := io.ReadFull(c, answer[:]); err != nil || [nonceSize]byte(answer[magicSize:]) == denied {
			t.Fatalf("a valid first message is answered with %x, %v", answer, err)
		}
		return c, append(bytes.Clone(first[magicSize:magicSize+saidSize]), answer[magicSize:]...)
	}
	c, said := begin(rank)
	for range 5 {
		begin(alice(secret))
	}
	hello := rank.hello.encode()
	c.Write(append(mac(secret, "dial", "p", append(said, hello[:]...)), hello[:]...))
	var verdict [sha256.Size + verdictLen]byte
	if _, err := io.ReadFull(c, verdict[:]); err != nil || verdict[sha256.Size] != 0 {
		t.Errorf("the rank is answered with %x, %v", verdict, err)
	}
}
