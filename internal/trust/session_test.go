package trust

import (
	"bytes"
	"crypto/ecdh"
	"fmt"
	"net"
	"testing"

	"pgregory.net/rapid"
)

// Both ends have the same keys if both asked for agreement. An end that did not has none.
func TestSession(t *testing.T) {
	seen := map[string]bool{} // the keys of all sessions
	rapid.Check(t, func(rt *rapid.T) {
		d := rapid.SampledFrom([]dialler{rank, alice(secret)}).Draw(rt, "dialler")
		d.agree = rapid.Bool().Draw(rt, "dialler agrees")
		a := door()
		a.Agree = rapid.Bool().Draw(rt, "acceptor agrees")
		r := shake(t, d, a)
		if r.client != nil || r.server != nil || r.who != d.hello {
			rt.Fatalf("client %v, server %v, hello %+v", r.client, r.server, r.who)
		}
		labels := rapid.SliceOfNDistinct(rapid.String(), 2, 4, rapid.ID).Draw(rt, "labels")
		n := rapid.IntRange(16, 100).Draw(rt, "n")
		for _, label := range labels {
			mine, err := r.dialler.Key(label, n)
			if (err == nil) != d.agree || err == nil && len(mine) != n || err != nil && mine != nil {
				rt.Fatalf("the dialler asked: %v; its key has %d bytes, %v", d.agree, len(mine), err)
			}
			theirs, err := r.acceptor.Key(label, n)
			if !a.Agree && (err == nil || theirs != nil) {
				rt.Fatalf("the acceptor did not ask, and has %d bytes", len(theirs))
			}
			if a.Agree && d.agree && err != nil {
				rt.Fatal(err)
			}
			both := a.Agree && d.agree
			if bytes.Equal(mine, theirs) != both && (mine != nil || theirs != nil) {
				rt.Fatalf("asked %v and %v: keys %x and %x", d.agree, a.Agree, mine, theirs)
			}
			for _, k := range [][]byte{mine, theirs} {
				if k == nil {
					continue
				}
				if seen[string(k[:16])] {
					rt.Fatalf("key %x again", k)
				}
				if both {
					break // the other one is the same
				}
			}
			for _, k := range [][]byte{mine, theirs} {
				if k != nil {
					seen[string(k[:16])] = true
				}
			}
			if again, err := r.dialler.Key(label, n); d.agree && (err != nil || !bytes.Equal(again, mine)) {
				rt.Fatalf("the second time the key is %x, %v", again, err)
			}
		}
		if d.agree {
			for _, n := range []int{-1, 0, 255*32 + 1} {
				if k, err := r.dialler.Key("", n); err == nil {
					rt.Fatalf("asked for %d bytes, got %d", n, len(k))
				}
			}
		}
	})
	if len(seen) == 0 {
		t.Error("no key was made")
	}
}

// An Acceptor passes the session on.
func TestSessionOfAcceptor(t *testing.T) {
	for _, agree := range []bool{true, false} {
		got := make(chan *Session, 1)
		addr := serve(t, &Acceptor{Timeout: patience, Agree: agree, Clients: true,
			Accepted: func(c net.Conn, _ Hello, s *Session) { got <- s; c.Close() }})
		for _, d := range []dialler{rank, alice(secret)} {
			d.agree = true
			mine, err := d.shake(dial(t, addr))
			if err != nil {
				t.Fatal(err)
			}
			theirs := <-got
			if !agree {
				if theirs != nil {
					t.Error("a session that was not asked for")
				}
				continue
			}
			a, err := mine.Key("x", 32)
			b, berr := theirs.Key("x", 32)
			if err != nil || berr != nil || !bytes.Equal(a, b) {
				t.Errorf("keys %x, %v, and %x, %v", a, err, b, berr)
			}
		}
	}
}

// No end that has the key can make the other one's keys known by a nonce of small
// order. The handshake itself succeeds: which end asked for agreement is the callers' matter.
func TestNoncesOfSmallOrder(t *testing.T) {
	for _, public := range [][nonceSize]byte{{}, {1},
		{0xe0, 0xeb, 0x7a, 0x7c, 0x3b, 0x41, 0xb8, 0xae, 0x16, 0x56, 0xe3, 0xfa, 0xf1, 0x9f, 0xc4, 0x6a,
			0xda, 0x09, 0x8d, 0xeb, 0x9c, 0x32, 0xb1, 0xfd, 0x86, 0x62, 0x05, 0x16, 0x5f, 0x49, 0xb8, 0x00}} {
		a := door()
		a.Agree = true
		c, s := ends(t)
		done := make(chan error, 1)
		go func() {
			_, session, err := a.Handshake(s)
			if key, kerr := session.Key("x", 32); err == nil && (session == nil || kerr == nil) {
				err = fmt.Errorf("session %v, key %x", session, key)
			}
			done <- err
		}()
		if _, err := client(c, secret, "p", greet, nonce{public: public}); err != nil {
			t.Error(err)
		}
		if err := <-done; err != nil {
			t.Errorf("nonce %x: %v", public, err)
		}
	}
}

// A session's keys depend on all that was said, on the key of the handshake, and on the purpose.
// The private key is forgotten.
func TestSessionCoversTranscript(t *testing.T) {
	private := func(b byte) *ecdh.PrivateKey {
		k, err := ecdh.X25519().NewPrivateKey(bytes.Repeat([]byte{b}, nonceSize))
		if err != nil {
			t.Fatal(err)
		}
		return k
	}
	theirs := private(2).PublicKey().Bytes()
	key := func(tr transcript) string {
		n := nonce{private: private(1)}
		s := n.session(theirs, &tr)
		k, err := s.Key("x", 32)
		if err != nil {
			t.Fatal(err)
		}
		if s.private != nil || n.private != nil || n.session(theirs, &tr) != nil {
			t.Fatal("the private key is kept")
		}
		return string(k)
	}
	said := make([]byte, saidSize+nonceSize+helloSize+verdictLen)
	base := transcript{secret, "p", said}
	seen := map[string]bool{key(base): true}
	if !seen[key(base)] {
		t.Fatal("the same twice gives two keys")
	}
	other := []transcript{{other, "p", said}, {secret, "q", said}, {secret, "p", said[1:]}}
	for i := range said {
		b := bytes.Clone(said)
		b[i] ^= 1
		other = append(other, transcript{secret, "p", b})
	}
	for i, tr := range other {
		k := key(tr)
		if seen[k] {
			t.Errorf("change %d gives a key that there was", i)
		}
		seen[k] = true
	}
}

// Without agreement nothing is kept of a nonce but its bytes.
func TestNonces(t *testing.T) {
	seen := map[[nonceSize]byte]bool{{}: true}
	for _, agree := range []bool{false, true} {
		for range 50 {
			n, err := newNonce(agree)
			if err != nil || seen[n.public] || (n.private != nil) != agree {
				t.Fatalf("agree %v: %+v, %v", agree, n, err)
			}
			if agree && !bytes.Equal(n.private.PublicKey().Bytes(), n.public[:]) {
				t.Fatal("the nonce is another's public key")
			}
			seen[n.public] = true
		}
	}
}
