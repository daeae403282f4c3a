package endpoint

import (
	"bytes"
	"fmt"
	"reflect"
	"strings"
	"testing"

	"tutti/rdma"
)

func exampleOffer(n int) offer {
	o := offer{link: rdma.RoCEv2, gid: rdma.GID{10: 0xff, 11: 0xff, 12: 10, 15: 1}, lid: 3, mtu: 4096, reads: 16}
	for i := range n {
		o.qps = append(o.qps, pair{uint32(1<<24 - 1 - i), uint32(i)})
	}
	return o
}

func examples() []*message {
	a, b := end{0xa1, 6}, end{1<<64 - 1, 1<<63 + 1}
	global := exampleOffer(1)
	global.link, global.grh = rdma.InfiniBand, true
	return []*message{
		{kind: request, from: a, offer: exampleOffer(1)},
		{kind: request, from: a, to: b, offer: exampleOffer(MaxQPs)},
		{kind: accepted, from: b, to: a, offer: exampleOffer(3)},
		{kind: stale, from: b, to: a},
		{kind: busy, from: b, to: a, text: "later"},
		{kind: refused, from: b, to: a, text: strings.Repeat("é", maxText/2)},
		{kind: request, from: a, offer: global},
	}
}

func TestMessagesSurviveTheWire(t *testing.T) {
	for _, m := range examples() {
		b := m.encode()
		if len(b) > MaxMessage {
			t.Errorf("%v: %d bytes", m, len(b))
		}
		got, err := decode(b)
		if err != nil {
			t.Fatalf("%v: %v", m, err)
		}
		if !reflect.DeepEqual(got, m) {
			t.Errorf("%+v became %+v", m, got)
		}
	}
}

func TestBusyAnswersARequest(t *testing.T) {
	for _, to := range []end{{}, {3, 0}, {3, 2}} {
		r := &message{kind: request, from: end{1, 1}, to: to, offer: examples()[0].offer}
		b, err := Busy(r.encode(), "the device is away")
		if err != nil {
			t.Fatal(err)
		}
		m, err := decodeKind(b, false)
		if err != nil || m.kind != busy || m.to != r.from || m.text != "the device is away" {
			t.Errorf("the reply to %v is %v, %v", r, m, err)
		}
	}
	if _, err := Busy(make([]byte, 3), ""); err == nil {
		t.Error("a malformed request was answered")
	}
}

func TestReasonsBecomeALine(t *testing.T) {
	for _, c := range [][2]string{
		{"x" + strings.Repeat("é", maxText), "x" + strings.Repeat("é", maxText/2-1)},
		{"one\ntwo\x00\u009b\u202e", "one two   "},
		{"a\xffb", "a\ufffdb"},
	} {
		m := &message{kind: refused, from: end{1, 1}, to: end{2, 2}, text: c[0]}
		if got, err := decode(m.encode()); err != nil || got.text != c[1] {
			t.Errorf("%q became %v, %v; want %q", c[0], got, err, c[1])
		}
	}
}

// The bytes of a message are part of the protocol: another version of them needs another format.
func TestBytesOfARequest(t *testing.T) {
	m := &message{kind: request, from: end{0x0102030405060708, 6}, to: end{0xa1, 3}, offer: exampleOffer(1)}
	const want = "02010102" + "0807060504030201" + "0600000000000000" + "a100000000000000" + "0300000000000000" +
		"00000000000000000000ffff0a000001" + "0300" + "04" + "10" + "0000" + "0000" + "ffffff0000000000"
	if got := fmt.Sprintf("%x", m.encode()); got != want {
		t.Errorf("got  %s\nwant %s", got, want)
	}
}

func TestMalformedMessagesAreRefused(t *testing.T) {
	for _, c := range []struct {
		what   string
		of     int // which example
		change func(b []byte) []byte
		want   string
	}{
		{"empty", 0, func(b []byte) []byte { return nil }, "0 bytes"},
		{"short", 0, func(b []byte) []byte { return b[:headerSize-1] }, "59 bytes"},
		{"cut", 1, func(b []byte) []byte { return b[:len(b)-1] }, "bytes for 64"},
		{"longer", 1, func(b []byte) []byte { return append(b, 0) }, "bytes for 64"},
		{"long", 1, func(b []byte) []byte { return append(b, make([]byte, MaxMessage)...) }, "expected 60 to"},
		{"another format", 0, func(b []byte) []byte { b[0] = 1; return b }, "format 1, expected 2"},
		{"kind 0", 0, func(b []byte) []byte { b[1] = 0; return b }, "kind 0"},
		{"kind 6", 0, func(b []byte) []byte { b[1] = 6; return b }, "kind 6"},
		{"no queue pairs", 0, func(b []byte) []byte { b[2] = 0; return b[:headerSize] }, "with 0 queue pairs"},
		{"stale with queue pairs", 0, func(b []byte) []byte { b[1], b[20] = byte(stale), 1; return b }, "stale with 1"},
		{"stale with an address", 3, func(b []byte) []byte { b[40] = 1; return b }, "with an address"},
		{"protocol", 0, func(b []byte) []byte { b[3] = 3; return b }, "protocol 3"},
		{"MTU", 0, func(b []byte) []byte { b[54] = 5; return b }, "MTU code 5"},
		{"no session", 0, func(b []byte) []byte { clear(b[4:12]); return b }, "without a session"},
		{"version of no session", 0, func(b []byte) []byte { b[28] = 1; return b }, "without a session"},
		{"accepted by no process", 2, func(b []byte) []byte { b[12] &^= 1; return b }, "not connected"},
		{"number 0", 0, func(b []byte) []byte { clear(b[60:64]); return b }, "the number 0"},
		{"number of 25 bits", 0, func(b []byte) []byte { b[63] = 1; return b }, "the number 33554431"},
		{"packet number of 25 bits", 0, func(b []byte) []byte { b[67] = 1; return b }, "packet number 16777216"},
		{"the same number twice", 2, func(b []byte) []byte { copy(b[68:72], b[60:64]); return b }, "queue pair 2 of 3"},
		{"a reason with a control character", 4, func(b []byte) []byte { b[61] = 7; return b }, "not text"},
		{"a reason with a control character of two bytes", 4,
			func(b []byte) []byte { copy(b[60:], "\u009b"); return b }, "not text"},
		{"a reason that is not UTF-8", 4, func(b []byte) []byte { b[61] = 0xff; return b }, "not text"},
		{"stale with a wish for addresses", 3, func(b []byte) []byte { b[58] = 1; return b }, "with an address"},
		{"padding", 0, func(b []byte) []byte { b[58] = 2; return b }, "bytes for 1"},
	} {
		m, err := decode(c.change(examples()[c.of].encode()))
		if err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v, %v; want %q", c.what, m, err, c.want)
		}
	}
}

func FuzzDecode(f *testing.F) {
	for _, m := range examples() {
		f.Add(m.encode())
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		m, err := decode(b)
		if err != nil {
			return
		}
		if again := m.encode(); !bytes.Equal(again, b) {
			t.Errorf("%x\nis read as %v, which is\n%x", b, m, again)
		}
	})
}
