package shm

import (
	"bytes"
	"strings"
	"testing"
)

func TestReaches(t *testing.T) {
	here := "b0 net:[1]"
	for _, c := range []struct {
		machine    string
		mine, uid  uint32
		here, want string // part of the explanation; empty: reachable
	}{
		{here, 5, 5, here, ""},
		{here, 5, 0, here, ""},
		{here, 0, 5, here, ""},
		{here, 5, 6, here, "user 6"},
		{"b1 net:[1]", 5, 5, here, "another machine"},
		{"b0 net:[2]", 5, 5, here, "network namespace"},
		{"b0", 5, 5, here, "network namespace"},
		{"", 5, 5, here, "another machine"},
		{here, 5, 5, "", "could not be identified"},
	} {
		err := endpoint{uid: c.uid, machine: c.machine}.reaches(c.here, c.mine)
		if c.want == "" && err != nil || c.want != "" && (err == nil || !strings.Contains(err.Error(), c.want)) {
			t.Errorf("%+v: %v", c, err)
		}
	}
}

func FuzzEndpoint(f *testing.F) {
	f.Add(endpoint{uid: 1000, name: [16]byte{1, 2}, machine: "boot net:[4026531840]"}.encode())
	f.Add([]byte{endpointVersion})
	f.Add(bytes.Repeat([]byte{1}, endpointFixed+maxMachine+1))
	f.Fuzz(func(t *testing.T, b []byte) {
		e, err := decodeEndpoint(b)
		if err != nil {
			return
		}
		if !bytes.Equal(e.encode(), b) {
			t.Fatalf("%x decodes to %+v", b, e)
		}
		if a := e.address(); len(a) != len("@tutti-")+32 || strings.Trim(a[1:], "tui-0123456789abcdef") != "" {
			t.Fatalf("address %q", a)
		}
		if msg := e.reaches("b n", 1); msg != nil && len(msg.Error()) > 1000 {
			t.Fatal("a peer's bytes fill the error")
		}
	})
}

func FuzzMessage(f *testing.F) {
	for kind := range uint8(msgEnd + 1) {
		m := message{kind, 1, 2, 3}.encode()
		f.Add(m[:])
	}
	f.Add(bytes.Repeat([]byte{1}, messageSize))
	f.Fuzz(func(t *testing.T, b []byte) {
		var in [messageSize]byte
		if copy(in[:], b) < messageSize {
			return
		}
		m, err := decodeMessage(&in)
		if err == nil && (m.encode() != in || m.kind < msgBell || m.kind >= msgEnd) {
			t.Fatalf("%x decodes to %+v", in, m)
		}
	})
}
