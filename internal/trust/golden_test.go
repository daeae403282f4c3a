package trust

import (
	"bytes"
	"crypto/ecdh"
	"encoding/hex"
	"encoding/json"
	"errors"
	"net"
	"os"
	"testing"
)

// hexes are bytes that a file has as hex digits.
type hexes []byte

func (h *hexes) UnmarshalText(b []byte) (err error) {
	*h, err = hex.DecodeString(string(b))
	return err
}

// golden is testdata/handshake.json, which another implementation has computed.
type golden struct {
	DeniedAnswer  hexes `json:"denied_answer"`
	DeniedVerdict hexes `json:"denied_verdict"`
	Handshakes    []struct {
		About, Client, Purpose, Text string
		Secret, Key                  hexes
		Code                         uint8
		Hello                        struct {
			FromRank        uint32 `json:"from_rank"`
			ToRank          uint32 `json:"to_rank"`
			FromIncarnation uint64 `json:"from_incarnation"`
			ToIncarnation   uint64 `json:"to_incarnation"`
			Extra           uint64
		}
		DiallerPrivate  hexes `json:"dialler_private"`
		DiallerNonce    hexes `json:"dialler_nonce"`
		AcceptorPrivate hexes `json:"acceptor_private"`
		AcceptorNonce   hexes `json:"acceptor_nonce"`

		Opening, Answer, Proof, Verdict hexes

		Keys []struct {
			Label string
			Key   hexes
		}
	}
}

// fixed returns a nonce that is not fresh.
func fixed(t *testing.T, public, private hexes) nonce {
	n := nonce{public: [nonceSize]byte(public)}
	if len(private) > 0 {
		var err error
		if n.private, err = ecdh.X25519().NewPrivateKey(private); err != nil {
			t.Fatal(err)
		}
		if !bytes.Equal(n.private.PublicKey().Bytes(), public) {
			t.Fatal("the public key is of another private one")
		}
	}
	return n
}

// Every message of both ends has the bytes that other implementations expect.
func TestGolden(t *testing.T) {
	b, err := os.ReadFile("testdata/handshake.json")
	if err != nil {
		t.Fatal(err)
	}
	var g golden
	d := json.NewDecoder(bytes.NewReader(b))
	d.DisallowUnknownFields()
	if err := d.Decode(&g); err != nil {
		t.Fatal(err)
	}
	keys := 0
	for _, c := range g.Handshakes {
		hello := Hello{c.Client, c.Hello.FromRank, c.Hello.ToRank, c.Hello.FromIncarnation, c.Hello.ToIncarnation,
			c.Hello.Extra}
		var refused error
		if c.Code != 0 {
			refused = &Refusal{Code: c.Code, Text: c.Text}
		}
		same := func(what string, got, want []byte) {
			t.Helper()
			if !bytes.Equal(got, want) {
				t.Errorf("%s: %s\n%x, want\n%x", c.About, what, got, want)
			}
		}
		agreed := func(end string, s *Session) {
			t.Helper()
			for _, k := range c.Keys {
				got, err := s.Key(k.Label, len(k.Key))
				if err != nil {
					t.Errorf("%s: %s: key %q: %v", c.About, end, k.Label, err)
				}
				same(end+"'s key "+k.Label, got, k.Key)
				keys++
			}
		}
		if c.Client != "" {
			key, err := Derive(c.Secret, c.Client)
			if err != nil {
				t.Error(err)
			}
			same("client's key", key, c.Key)
		}
		s := &script{in: bytes.NewReader(append(bytes.Clone(c.Answer), c.Verdict...))}
		session, err := client(s, c.Key, c.Purpose, hello, fixed(t, c.DiallerNonce, c.DiallerPrivate))
		var r *Refusal
		if refused == nil && err != nil || refused != nil && (!errors.As(err, &r) || *r != *refused.(*Refusal)) {
			t.Errorf("%s: the dialler got %v", c.About, err)
		}
		same("dialler's messages", s.out.Bytes(), append(bytes.Clone(c.Opening), c.Proof...))
		agreed("dialler", session)

		a := &Acceptor{Secret: c.Secret, Purpose: c.Purpose, Clients: true,
			Admit: func(net.Conn, Hello) error { return refused }}
		var h half
		if n := h.want(); n != len(c.Opening) {
			t.Fatalf("%s: the first message has %d bytes, want %d", c.About, n, len(c.Opening))
		}
		answer, err := h.opening(a, c.Opening)
		if err != nil {
			t.Fatalf("%s: the acceptor refuses the first message: %v", c.About, err)
		}
		same("answer", answer, append([]byte(acceptMagic), h.mine.public[:]...))
		same("nonce of the answer", h.said[saidSize:], h.mine.public[:])
		h.mine = fixed(t, c.AcceptorNonce, c.AcceptorPrivate)
		copy(h.said[saidSize:], c.AcceptorNonce)
		same("golden answer", append([]byte(acceptMagic), c.AcceptorNonce...), c.Answer)
		who, _, err := h.proof(c.Proof)
		if err != nil || who != hello {
			t.Errorf("%s: the acceptor sees %+v, %v", c.About, who, err)
		}
		s = &script{}
		session, err = a.answer(s, &h, who)
		if err != refused {
			t.Errorf("%s: the acceptor ended with %v", c.About, err)
		}
		same("verdict", s.out.Bytes(), c.Verdict)
		agreed("acceptor", session)

		// What the acceptor finds wrong it answers with zeros.
		wrong := bytes.Clone(c.Opening)
		wrong[len(wrong)-1] ^= 1
		h = half{}
		if answer, err = h.opening(a, wrong); !errors.Is(err, ErrAuth) {
			t.Errorf("%s: a wrong first message: %v", c.About, err)
		}
		same("answer to a wrong first message", answer, g.DeniedAnswer)
		if _, err := h.opening(a, c.Opening); err != nil {
			t.Fatal(err)
		}
		if _, answer, err = h.proof(c.Proof); !errors.Is(err, ErrAuth) { // for another nonce
			t.Errorf("%s: a wrong proof: %v", c.About, err)
		}
		same("answer to a wrong proof", answer, g.DeniedVerdict)
	}
	if keys == 0 {
		t.Error("no key was compared")
	}
}
