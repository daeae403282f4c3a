package wire

import (
	"bytes"
	"encoding/hex"
	"errors"
	"fmt"
	"math"
	"strings"
	"testing"

	"tutti/internal/trust"
)

// example is a frame and what it says.
type example struct {
	what  string
	frame []byte
}

const (
	exampleSession    = 0x0102030405060708
	exampleEndpoint   = 0x1112131415161718
	exampleGeneration = 0x2122232425262729
)

// frame encodes a frame.
func frame(op Opcode, address uint64, ext []byte, payload string) []byte {
	h := Header{Size: uint64(len(ext) + len(payload)), Address: address, Op: op}
	return append(append(h.Append(nil), ext...), payload...)
}

// examples has a frame of every opcode.
func examples() []example {
	span := Range{Region: 2, Generation: exampleGeneration, Offset: 4096, Total: 10}
	part := Range{Region: 2, Generation: exampleGeneration, Offset: 4096, Total: 3}
	entry := Entry{Region: 2, Generation: exampleGeneration, Len: 1 << 20, Rights: 1}
	hello := Greeting{Version: 2, Index: 0, Count: 2, Requests: 1024, Window: 4 << 20, Message: 64 << 10,
		Endpoint: exampleEndpoint, Last: 0x2122232425262728}
	return []example{
		{"RawSend of 4096 bytes, address 0x7f0000001000", Header{4096, 0x7f0000001000, RawSend}.Append(nil)},
		{"RawRead of 4096 bytes, address 0x7f0000001000", Header{4096, 0x7f0000001000, RawRead}.Append(nil)},
		{"RawWrite of 4096 bytes, address 0x7f0000001000", Header{4096, 0x7f0000001000, RawWrite}.Append(nil)},
		{"Hello of session 0x0102030405060708: version 2, connection 0 of 2, 1024 requests, window 4194304, " +
			"messages of up to 65536, endpoint 0x1112131415161718, last 0x2122232425262728, name reader",
			frame(Hello, exampleSession, hello.Append(nil), "reader")},
		{"Ping 5", frame(Ping, 5, nil, "")},
		{"Pong 5", frame(Pong, 5, nil, "")},
		{"Bye", frame(Bye, 0, nil, "")},
		{"Stay", frame(Stay, 0, nil, "")},
		{"Get, request 1: region 2, generation 0x2122232425262729, offset 4096, total 10",
			frame(Get, 1, span.Append(nil), "")},
		{"Put, request 2: region 2, generation 0x2122232425262729, offset 4096, total 3, payload abc",
			append(Bulk(nil, Put, 2, 3, part.Region, part.Generation, part.Offset, part.Total), "abc"...)},
		{"Data, request 1: offset 0, payload 0123456789", append(Bulk(nil, Data, 1, 10, 0), "0123456789"...)},
		{"Done, request 1: OK, 10 bytes", frame(Done, 1, Outcome{OK, 10}.Append(nil), "")},
		{"Done, request 2: Failed, 0 bytes, text disk", frame(Done, 2, Outcome{Failed, 0}.Append(nil), "disk")},
		{"Cancel, request 1", frame(Cancel, 1, nil, "")},
		{"Lookup, request 3: weights", frame(Lookup, 3, nil, "weights")},
		{"List, request 4: at most 100, after weights", frame(List, 4, Limit(nil, 100), "weights")},
		{"Watch, request 6", frame(Watch, 6, nil, "")},
		{"Region, request 3: region 2, generation 0x2122232425262729, 1048576 bytes, rights 1, name weights",
			frame(Region, 3, entry.Append(nil), "weights")},
		{"Gone, request 6: region 2, generation 0x2122232425262729, name weights",
			frame(Gone, 6, Words(nil, 2, exampleGeneration), "weights")},
		{"Message 1: hello", append(Bulk(nil, Message, 1, 5), "hello"...)},
		{"Offer 2: 3145728 bytes", frame(Offer, 2, Words(nil, 3<<20), "")},
		{"Pull 2: offset 0, 3145728 bytes", frame(Pull, 2, Words(nil, 0, 3<<20), "")},
		{"Piece 2: offset 1048576, payload abc", append(Bulk(nil, Piece, 2, 3, 1<<20), "abc"...)},
		{"Sent 2", frame(Sent, 2, nil, "")},
		{"Taken 1: OK, 5 bytes", frame(Taken, 1, Outcome{OK, 5}.Append(nil), "")},
		{"Credit 5", frame(Credit, 5, nil, "")},
		{"Dropped 3", frame(Dropped, 3, nil, "")},
		{"Inquire, request 7", frame(Inquire, 7, nil, "")},
		{`State, request 7: {"name":"a"}`, frame(State, 7, nil, `{"name":"a"}`)},
		{"Done, request 7: Denied, 0 bytes", frame(Done, 7, Outcome{Denied, 0}.Append(nil), "")},
		{"Join 1: abc", frame(Join, 1, nil, "abc")},
		{"Joined 1: there will be none", frame(Joined, 1, nil, "")},
		{"Claim, request 8: region 2, generation 0x2122232425262729",
			frame(Claim, 8, Words(nil, 2, exampleGeneration), "")},
		{"Key, request 8: address 0x7f0000001000, key 0x1234", frame(Key, 8, Words(nil, 0x7f0000001000, 0x1234), "")},
		{"Revoke 2: region 2, generation 0x2122232425262729",
			frame(Revoke, 2, Words(nil, 2, exampleGeneration), "")},
		{"Revoked 2", frame(Revoked, 2, nil, "")},
		{"Fence 3", frame(Fence, 3, nil, "")},
		{"Fenced 3", frame(Fenced, 3, nil, "")},
		{"Lend 4: 3145728 bytes, address 0x7f0000001000, key 0x1234",
			frame(Lend, 4, Words(nil, 3<<20, 0x7f0000001000, 0x1234), "")},
	}
}

// zeros39 ends the extensions of Data and Piece.
var zeros39 = strings.Repeat("00", 39)

// golden has the bytes of examples, in hex digits: size, address, opcode, extension, payload. They
// were written by hand.
var golden = []string{
	"0010000000000000 00100000007f0000 00",
	"0010000000000000 00100000007f0000 01",
	"0010000000000000 00100000007f0000 02",
	"2600000000000000 0807060504030201 10 0200 00 02 00040000 00004000 00000100 1817161514131211" +
		"2827262524232221 726561646572",
	"0000000000000000 0500000000000000 11",
	"0000000000000000 0500000000000000 12",
	"0000000000000000 0000000000000000 13",
	"0000000000000000 0000000000000000 14",
	"2000000000000000 0100000000000000 15 0200000000000000 2927262524232221 0010000000000000 0a00000000000000",
	"3200000000000000 0200000000000000 16 0200000000000000 2927262524232221 0010000000000000 0300000000000000" +
		" 000000000000000000000000000000 616263",
	"3900000000000000 0100000000000000 17 0000000000000000 " + zeros39 + " 30313233343536373839",
	"0900000000000000 0100000000000000 18 00 0a00000000000000",
	"0d00000000000000 0200000000000000 18 06 0000000000000000 6469736b",
	"0000000000000000 0100000000000000 19",
	"0700000000000000 0300000000000000 1a 77656967687473",
	"0b00000000000000 0400000000000000 1b 64000000 77656967687473",
	"0000000000000000 0600000000000000 1c",
	"2000000000000000 0300000000000000 1d 0200000000000000 2927262524232221 0000100000000000 01 77656967687473",
	"1700000000000000 0600000000000000 1e 0200000000000000 2927262524232221 77656967687473",
	"3400000000000000 0100000000000000 1f " + zeros39 + "0000000000000000 68656c6c6f",
	"0800000000000000 0200000000000000 20 0000300000000000",
	"1000000000000000 0200000000000000 21 0000000000000000 0000300000000000",
	"3200000000000000 0200000000000000 22 0000100000000000 " + zeros39 + " 616263",
	"0000000000000000 0200000000000000 23",
	"0900000000000000 0100000000000000 24 00 0500000000000000",
	"0000000000000000 0500000000000000 25",
	"0000000000000000 0300000000000000 26",
	"0000000000000000 0700000000000000 27",
	"0c00000000000000 0700000000000000 28 7b226e616d65223a2261227d",
	"0900000000000000 0700000000000000 18 08 0000000000000000",
	"0300000000000000 0100000000000000 29 616263",
	"0000000000000000 0100000000000000 2a",
	"1000000000000000 0800000000000000 2b 0200000000000000 2927262524232221",
	"1000000000000000 0800000000000000 2c 00100000007f0000 3412000000000000",
	"1000000000000000 0200000000000000 2d 0200000000000000 2927262524232221",
	"0000000000000000 0200000000000000 2e",
	"0000000000000000 0300000000000000 2f",
	"0000000000000000 0300000000000000 30",
	"1800000000000000 0400000000000000 31 0000300000000000 00100000007f0000 3412000000000000",
}

func TestGoldenFrames(t *testing.T) {
	all := examples()
	if len(all) != len(golden) {
		t.Fatalf("%d examples, %d golden frames", len(all), len(golden))
	}
	seen := map[Opcode]bool{}
	for i, x := range all {
		want, err := hex.DecodeString(strings.ReplaceAll(golden[i], " ", ""))
		if err != nil {
			t.Fatal(err)
		}
		if !bytes.Equal(x.frame, want) {
			t.Errorf("%s:\n%x, want\n%x", x.what, x.frame, want)
		}
		h := Decode(x.frame)
		seen[h.Op] = true
		if name, _, _ := strings.Cut(strings.ReplaceAll(x.what, ",", " "), " "); name != h.Op.String() {
			t.Errorf("%s: its opcode is %v", x.what, h.Op)
		}
		if h.Op <= RawWrite {
			continue
		}
		if _, err := h.Check(); err != nil || uint64(len(x.frame)) != HeaderSize+h.Size {
			t.Errorf("%s: %d bytes, header %+v: %v", x.what, len(x.frame), h, err)
		}
	}
	for op := First; op < beyond; op++ {
		if !seen[op] {
			t.Errorf("%v has no example", op)
		}
	}
}

// limit is what a frame of an opcode may have.
type limit struct {
	op      Opcode
	ext     uint64
	payload uint64
}

// limits are those of every opcode.
var limits = []limit{
	{Hello, 32, 255}, {Ping, 0, 0}, {Pong, 0, 0}, {Bye, 0, 0}, {Stay, 0, 0}, {Get, 32, 0}, {Put, 47, 1 << 62},
	{Data, 47, 1 << 62}, {Done, 9, 512}, {Cancel, 0, 0}, {Lookup, 0, 255}, {List, 4, 255}, {Watch, 0, 0},
	{Region, 25, 255}, {Gone, 16, 255}, {Message, 47, 1 << 20}, {Offer, 8, 0}, {Pull, 16, 0}, {Piece, 47, 1 << 62},
	{Sent, 0, 0}, {Taken, 9, 512}, {Credit, 0, 0}, {Dropped, 0, 0}, {Inquire, 0, 0},
	{State, 0, 16384}, {Join, 0, 1024}, {Joined, 0, 1024}, {Claim, 16, 0}, {Key, 16, 0}, {Revoke, 16, 0},
	{Revoked, 0, 0}, {Fence, 0, 0}, {Fenced, 0, 0},
}

func TestCheckAtTheLimits(t *testing.T) {
	known := map[Opcode]bool{}
	for _, l := range limits {
		known[l.op] = true
		if l.ext > MaxExt {
			t.Errorf("%v: an extension of %d bytes, MaxExt is %d", l.op, l.ext, MaxExt)
		}
		for _, size := range []uint64{l.ext, l.ext + l.payload/2, l.ext + l.payload} {
			ext, err := Header{Size: size, Address: math.MaxUint64, Op: l.op}.Check()
			if err != nil || uint64(ext) != l.ext {
				t.Errorf("%v of %d bytes: extension of %d, %v; want %d", l.op, size, ext, err, l.ext)
			}
		}
		wrong := []uint64{l.ext + l.payload + 1, 1 << 63, math.MaxUint64}
		if l.ext > 0 {
			wrong = append(wrong, 0, l.ext-1)
		}
		for _, size := range wrong {
			if _, err := (Header{Size: size, Op: l.op}).Check(); !errors.Is(err, ErrFrame) {
				t.Errorf("%v of %d bytes: %v, want ErrFrame", l.op, size, err)
			}
		}
	}
	for i := range 256 {
		op := Opcode(i)
		if known[op] {
			continue
		}
		_, err := Header{Op: op}.Check()
		if !errors.Is(err, ErrFrame) {
			t.Errorf("%v: %v, want ErrFrame", op, err)
		}
		if raw := strings.Contains(fmt.Sprint(err), "raw address"); raw != (op <= 2) {
			t.Errorf("%v: %v", op, err)
		}
	}
}

func TestDecodeRefuses(t *testing.T) {
	good := Greeting{Version: Version, Count: 1, Requests: 1}
	change := func(f func(*Greeting)) error {
		g := good
		f(&g)
		back, err := DecodeGreeting(g.Append(nil))
		if back != g {
			t.Errorf("%+v became %+v", g, back)
		}
		return err
	}
	entry := func(n, generation uint64) error {
		_, err := DecodeEntry(Entry{Len: n, Generation: generation}.Append(nil))
		return err
	}
	outcome := func(c Code) error {
		_, err := DecodeOutcome(Outcome{Code: c}.Append(nil))
		return err
	}
	for _, c := range []struct {
		what string
		err  error
		ok   bool
	}{
		{"the smallest Hello", change(func(*Greeting) {}), true},
		{"16 connections", change(func(g *Greeting) { g.Index, g.Count = 15, 16 }), true},
		{"17 connections", change(func(g *Greeting) { g.Count = 17 }), false},
		{"no connections", change(func(g *Greeting) { g.Count = 0 }), false},
		{"connection 3 of 3", change(func(g *Greeting) { g.Index, g.Count = 3, 3 }), false},
		{"no requests", change(func(g *Greeting) { g.Requests = 0 }), false},
		{"messages as long as the window", change(func(g *Greeting) { g.Window, g.Message = 9, 9 }), true},
		{"messages longer than the window", change(func(g *Greeting) { g.Window, g.Message = 9, 10 }), false},
		{"messages of 1 MiB", change(func(g *Greeting) { g.Window, g.Message = 1<<20, 1<<20 }), true},
		{"longer messages", change(func(g *Greeting) { g.Window, g.Message = 1<<20+1, 1<<20+1 }), false},
		{"a region of 2^62 bytes", entry(1<<62, 1), true},
		{"a longer region", entry(1<<62+1, 1), false},
		{"generation 0", entry(0, 0), false},
		{"the last code", outcome(Denied), true},
		{"the code behind it", outcome(Denied + 1), false},
		{"code 255", outcome(255), false},
	} {
		if c.ok && c.err != nil || !c.ok && !errors.Is(c.err, ErrFrame) {
			t.Errorf("%s: %v", c.what, c.err)
		}
	}
}

// A Hello of another version is not malformed, whatever else it has.
func TestDecodeNamesVersions(t *testing.T) {
	for _, version := range []uint16{0, Version + 1, math.MaxUint16} {
		for _, g := range []Greeting{{Count: 1, Requests: 1}, {}, {Index: 255, Message: math.MaxUint32}} {
			g.Version = version
			_, err := DecodeGreeting(g.Append(nil))
			want := fmt.Sprintf("of version %d, this one's of version %d", version, Version)
			if !errors.Is(err, trust.ErrVersion) || errors.Is(err, ErrFrame) || !strings.Contains(err.Error(), want) {
				t.Errorf("%+v: %v", g, err)
			}
		}
	}
}

// recode decodes an extension and encodes it again; false: it is refused.
func recode(op Opcode, ext []byte) ([]byte, bool) {
	switch op {
	case Hello:
		g, err := DecodeGreeting(ext)
		return g.Append(nil), err == nil
	case Get:
		return DecodeRange(ext).Append(nil), true
	case Put: // zeros follow, which nobody looks at
		return append(DecodeRange(ext).Append(nil), ext[RangeSize:]...), true
	case Message:
		return ext, true
	case Data, Piece:
		return append(Words(nil, Word(ext, 0)), ext[8:]...), true
	case Done, Taken:
		o, err := DecodeOutcome(ext)
		return o.Append(nil), err == nil
	case Region:
		e, err := DecodeEntry(ext)
		return e.Append(nil), err == nil
	case List:
		return Limit(nil, DecodeLimit(ext)), true
	}
	var vs []uint64
	for i := range len(ext) / 8 {
		vs = append(vs, Word(ext, i))
	}
	return Words(nil, vs...), true
}

func FuzzFrame(f *testing.F) {
	for _, x := range examples() {
		f.Add(x.frame)
	}
	f.Add(bytes.Repeat([]byte{0xff}, HeaderSize+MaxExt))
	f.Fuzz(func(t *testing.T, b []byte) {
		if len(b) < HeaderSize {
			return
		}
		h := Decode(b)
		if again := h.Append(nil); !bytes.Equal(again, b[:HeaderSize]) {
			t.Fatalf("header %x became %x", b[:HeaderSize], again)
		}
		n, err := h.Check()
		if err != nil {
			if !errors.Is(err, ErrFrame) {
				t.Fatalf("%v is not ErrFrame", err)
			}
			return
		}
		if n > MaxExt || uint64(n) > h.Size {
			t.Fatalf("%v of %d bytes has an extension of %d", h.Op, h.Size, n)
		}
		if len(b) < HeaderSize+n {
			return
		}
		ext := b[HeaderSize : HeaderSize+n]
		if again, ok := recode(h.Op, ext); ok && !bytes.Equal(again, ext) {
			t.Fatalf("extension %x of %v became %x", ext, h.Op, again)
		}
	})
}
