package wire

import (
	"bytes"
	"crypto/hkdf"
	"crypto/hmac"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"
)

// rows returns the cells of the table in docs/wire.md that follows a header.
func rows(t *testing.T, header string) (table [][]string) {
	t.Helper()
	b, err := os.ReadFile("../../../docs/wire.md")
	if err != nil {
		t.Fatal(err)
	}
	_, rest, found := strings.Cut(string(b), "\n"+header+"\n")
	if !found || strings.Contains(rest, "\n"+header+"\n") {
		t.Fatalf("docs/wire.md does not have the line %q once", header)
	}
	for i, line := range strings.Split(rest, "\n") {
		if !strings.HasPrefix(line, "|") {
			break
		}
		if i == 0 { // the rule
			continue
		}
		cells := strings.Split(strings.Trim(line, "|"), "|")
		for i := range cells {
			cells[i] = strings.TrimSpace(cells[i])
		}
		table = append(table, cells)
	}
	return table
}

// unhex reads hex digits in backquotes, in which spaces are ignored.
func unhex(t *testing.T, cell string) []byte {
	t.Helper()
	b, err := hex.DecodeString(strings.NewReplacer("`", "", " ", "").Replace(cell))
	if err != nil || len(cell) < 2 || cell[0] != '`' || cell[len(cell)-1] != '`' {
		t.Fatalf("%q is no bytes: %v", cell, err)
	}
	return b
}

func TestDocumentHasTheFrames(t *testing.T) {
	all, table := examples(), rows(t, "| frame | bytes |")
	for i, x := range all {
		if i < len(table) && table[i][0] == x.what && bytes.Equal(unhex(t, table[i][1]), x.frame) {
			continue
		}
		t.Errorf("docs/wire.md, row %d of the frames: want\n| %s | `%s` |", i+1, x.what, golden[i])
	}
	if len(table) > len(all) {
		t.Errorf("docs/wire.md has %d frames, want %d", len(table), len(all))
	}
}

func TestDocumentHasTheLimits(t *testing.T) {
	var got, want []string
	for _, row := range rows(t, "| opcode | name | extension | payload, at most | extension's fields | payload |") {
		got = append(got, strings.Join(row[:4], " "))
	}
	for op := First; op < beyond; op++ {
		s := shapes[op-First]
		payload := fmt.Sprint(s.payload)
		if s.payload == MaxSize {
			payload = "2^62"
		}
		want = append(want, fmt.Sprintf("0x%02x %v %d %s", uint8(op), op, s.ext, payload))
	}
	if !slices.Equal(got, want) {
		t.Errorf("docs/wire.md has the opcodes\n%s\nwant\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
}

func TestDocumentHasTheCodes(t *testing.T) {
	want := []struct {
		code Code
		name string
	}{{OK, "OK"}, {Cancelled, "Cancelled"}, {NoRegion, "NoRegion"}, {Stale, "Stale"}, {Rights, "Rights"},
		{Bounds, "Bounds"}, {Failed, "Failed"}, {Busy, "Busy"}, {Denied, "Denied"}}
	table := rows(t, "| code | name | meaning |")
	if len(table) != len(want) || len(want) != int(codes) {
		t.Fatalf("docs/wire.md has %d codes, this test %d, the package %d", len(table), len(want), codes)
	}
	for i, w := range want {
		if table[i][0] != fmt.Sprint(uint8(w.code)) || table[i][1] != w.name {
			t.Errorf("docs/wire.md: code %s is %s, want %d, %s", table[i][0], table[i][1], w.code, w.name)
		}
	}
}

// recordRows are the rows of the table of records, but for the bytes.
func recordRows(t *testing.T) (what []string, b [][]byte) {
	prk := make([]byte, 32)
	for i := range prk {
		prk[i] = byte(100 + i)
	}
	var secrets [2][]byte
	for i, label := range []string{DiallerSecret, AcceptorSecret} {
		var err error
		if secrets[i], err = hkdf.Expand(sha256.New, prk, label, SecretSize); err != nil {
			t.Fatal(err)
		}
	}
	first, err := hkdf.Expand(sha256.New, secrets[0], "key", keySize+nonceSize)
	if err != nil {
		t.Fatal(err)
	}
	add := func(text string, bytes []byte) { what, b = append(what, text), append(b, bytes) }
	add("secret of the dialler's records", secrets[0])
	add("secret of the acceptor's records", secrets[1])
	add("key and IV of the dialler's first records", first)
	ping := frame(Ping, 5, nil, "")
	checked, err := NewGuard(Checked, nil, nil)
	if err != nil {
		t.Fatal(err)
	}
	add("checked record 0: Ping 5", checked.Out.Append(nil, ping))
	add("checked record 1: Ping 5", checked.Out.Append(nil, ping))
	g, err := NewGuard(Sealed, secrets[0], secrets[1])
	if err != nil {
		t.Fatal(err)
	}
	other, err := NewGuard(Sealed, secrets[1], secrets[0])
	if err != nil {
		t.Fatal(err)
	}
	add("sealed record 0 of the dialler: Ping 5", g.Out.Append(nil, ping))
	add("sealed record 1 of the dialler: Ping 5", g.Out.Append(nil, ping))
	add("sealed record 0 of the acceptor: Ping 5", other.Out.Append(nil, ping))
	for n, buf := uint64(2), make([]byte, 0, 100); n < keyLife; n++ {
		g.Out.Append(buf, ping)
	}
	add(fmt.Sprintf("sealed record %d of the dialler: Ping 5", keyLife), g.Out.Append(nil, ping))
	return what, b
}

// The document has records that another implementation has computed, and this one makes the same.
func TestDocumentHasTheRecords(t *testing.T) {
	what, want := recordRows(t)
	table := rows(t, "| record | bytes |")
	if len(table) != len(want) {
		t.Fatalf("docs/wire.md has %d records, want %d", len(table), len(want))
	}
	for i := range want {
		if table[i][0] != what[i] || !bytes.Equal(unhex(t, table[i][1]), want[i]) {
			t.Errorf("docs/wire.md, row %d of the records: want\n| %s | `%x` |", i+1, what[i], want[i])
		}
	}
	limit := fmt.Sprintf("bytes of the body, 1 to %d", MaxRecord)
	if got := rows(t, "| offset | field of a record | |")[0][2]; got != limit {
		t.Errorf("docs/wire.md says of a record's length: %s, want %s", got, limit)
	}
}

// shake has the messages of a handshake.
type shake struct{ opening, answer, proof, verdict []byte }

// mac is a MAC as docs/wire.md describes it.
func mac(key []byte, label, purpose string, said []byte) []byte {
	m := hmac.New(sha256.New, key)
	for _, s := range []string{label, purpose} {
		m.Write(binary.LittleEndian.AppendUint32(nil, uint32(len(s))))
		m.Write([]byte(s))
	}
	m.Write(said)
	return m.Sum(nil)
}

// handshake makes the messages as docs/wire.md describes them.
func handshake(key []byte, purpose, client string, dialler, acceptor, hello []byte, code uint8, text string) (h shake) {
	name := make([]byte, 32)
	copy(name, client)
	said := slices.Concat(name, dialler)
	h.opening = slices.Concat([]byte("tutti/3\n"), said, mac(key, "open", purpose, said))
	h.answer = append([]byte("tutti/3\r"), acceptor...)
	said = slices.Concat(said, acceptor, hello)
	h.proof = append(mac(key, "dial", purpose, said), hello...)
	verdict := append(binary.LittleEndian.AppendUint16([]byte{code, 0}, uint16(len(text))), text...)
	h.verdict = append(mac(key, "accept", purpose, append(said, verdict...)), verdict...)
	return h
}

func hello(fromRank, toRank uint32, from, to, extra uint64) []byte {
	le := binary.LittleEndian
	b := le.AppendUint32(le.AppendUint32(nil, fromRank), toRank)
	return le.AppendUint64(le.AppendUint64(le.AppendUint64(b, from), to), extra)
}

// digits are bytes that a file has as hex digits.
type digits []byte

func (d *digits) UnmarshalText(b []byte) (err error) {
	*d, err = hex.DecodeString(string(b))
	return err
}

// The description of the handshake leads to the bytes that package trust is tested with, and the
// document has such bytes.
func TestDocumentHasTheHandshake(t *testing.T) {
	b, err := os.ReadFile("../../../internal/trust/testdata/handshake.json")
	if err != nil {
		t.Fatal(err)
	}
	var file struct {
		Handshakes []struct {
			About, Client, Purpose, Text string
			Code                         uint8
			Secret, Key                  digits
			Hello                        struct {
				FromRank        uint32 `json:"from_rank"`
				ToRank          uint32 `json:"to_rank"`
				FromIncarnation uint64 `json:"from_incarnation"`
				ToIncarnation   uint64 `json:"to_incarnation"`
				Extra           uint64
			}
			DiallerNonce                    digits `json:"dialler_nonce"`
			AcceptorNonce                   digits `json:"acceptor_nonce"`
			Opening, Answer, Proof, Verdict digits
		}
	}
	if err := json.Unmarshal(b, &file); err != nil {
		t.Fatal(err)
	}
	if len(file.Handshakes) == 0 {
		t.Fatal("no handshakes")
	}
	for _, x := range file.Handshakes {
		key := []byte(x.Secret)
		if x.Client != "" {
			key = mac(x.Secret, "client", x.Client, nil)
		}
		h := x.Hello
		got := handshake(key, x.Purpose, x.Client, x.DiallerNonce, x.AcceptorNonce,
			hello(h.FromRank, h.ToRank, h.FromIncarnation, h.ToIncarnation, h.Extra), x.Code, x.Text)
		for _, p := range [][2][]byte{{key, x.Key}, {got.opening, x.Opening}, {got.answer, x.Answer},
			{got.proof, x.Proof}, {got.verdict, x.Verdict}} {
			if !bytes.Equal(p[0], p[1]) {
				t.Errorf("%s: %x, want %x", x.About, p[0], p[1])
			}
		}
	}

	count := func(from byte) (b []byte) {
		for i := range byte(32) {
			b = append(b, from+i)
		}
		return b
	}
	key := mac([]byte("a secret that both ends know"), "client", "c", nil)
	h := handshake(key, "endpoint", "c", count(0), count(100), hello(0, 0, exampleEndpoint, 0, 1), 0, "")
	want := []struct {
		part string
		b    []byte
	}{{"key", key}, {"opening", h.opening}, {"answer", h.answer}, {"proof", h.proof}, {"verdict", h.verdict}}
	table := rows(t, "| part | bytes |")
	if len(table) != len(want) {
		t.Fatalf("docs/wire.md has %d messages of the handshake, want %d", len(table), len(want))
	}
	for i, w := range want {
		if table[i][0] != w.part || !bytes.Equal(unhex(t, table[i][1]), w.b) {
			t.Errorf("docs/wire.md, handshake: want\n| %s | `%x` |", w.part, w.b)
		}
	}
}
