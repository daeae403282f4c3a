package bootstrap

import (
	"bytes"
	"encoding/base64"
	"encoding/json"
	"maps"
	"reflect"
	"strings"
	"testing"

	"pgregory.net/rapid"
)

func equalBytes(a, b []byte) bool { return bytes.Equal(a, b) }

func TestWireRoundTrip(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		in := describeReply{
			nonce: rapid.Uint64().Draw(t, "nonce"), incarnation: rapid.Uint64().Draw(t, "incarnation"),
			endpoints: rapid.MapOfN(rapid.StringN(1, 8, maxTransport), rapid.SliceOfN(rapid.Byte(), 0, 64), 0,
				MaxEndpoints).Draw(t, "endpoints"),
		}
		b, err := wire{}.Marshal(&in)
		if err != nil || len(b) > maxMessage {
			t.Fatal(len(b), err)
		}
		var out describeReply
		if err := (wire{}).Unmarshal(b, &out); err != nil {
			t.Fatal(err)
		}
		if out.nonce != in.nonce || out.incarnation != in.incarnation ||
			!maps.EqualFunc(in.endpoints, Endpoints(out.endpoints), equalBytes) {
			t.Fatalf("%+v became %+v", in, out)
		}
		for cut := range len(b) {
			if err := (wire{}).Unmarshal(b[:cut], &out); err == nil {
				t.Fatalf("%d of %d bytes decode", cut, len(b))
			}
		}
		if err := (wire{}).Unmarshal(append(b, 0), &out); err == nil {
			t.Fatal("a byte too many decodes")
		}
		// Nothing decoded lies in the buffer, which gRPC uses again.
		if err := (wire{}).Unmarshal(b, &out); err != nil {
			t.Fatal(err)
		}
		clear(b)
		if !maps.EqualFunc(in.endpoints, Endpoints(out.endpoints), equalBytes) {
			t.Fatal("what was decoded shares the buffer")
		}
	})
	if _, err := (wire{}).Marshal(7); err == nil {
		t.Error("an int encodes")
	}
	if err := (wire{}).Unmarshal(nil, 7); err == nil {
		t.Error("an int decodes")
	}
}

func FuzzWire(f *testing.F) {
	b, _ := wire{}.Marshal(&describeReply{nonce: 1, incarnation: 2,
		endpoints: Endpoints{"tcp": []byte("x"), "shm": nil}})
	f.Add(b)
	f.Add(b[:20])
	f.Add(append(bytes.Clone(b[:16]), 255))
	f.Add([]byte("12345678"))
	f.Fuzz(func(t *testing.T, b []byte) {
		var q describeRequest
		if err := (wire{}).Unmarshal(b, &q); (err == nil) != (len(b) == 8) {
			t.Fatalf("request of %d bytes: %v", len(b), err)
		}
		var r describeReply
		if err := (wire{}).Unmarshal(b, &r); err != nil {
			return
		}
		c, err := wire{}.Marshal(&r)
		if err != nil || len(c) != len(b) { // the order of transports may differ
			t.Fatalf("%x decodes and encodes to %x, %v", b, c, err)
		}
	})
}

func FuzzFindWire(f *testing.F) {
	b, err := (&findRequest{uuid: "u", rank: 1, ids: []uint64{7, 8}}).encode()
	if err != nil {
		f.Fatal(err)
	}
	f.Add(b)
	f.Add(b[:len(b)-1])
	f.Add(append([]byte{255}, b...))
	f.Add(append([]byte{findDiffers}, encodeIDs(0, []uint64{7})...))
	f.Add(append([]byte{findGone}, goneBody{usedFault, 7, []byte("used")}.encode()...))
	f.Add(append([]byte{findGone}, goneBody{text: []byte("it was closed")}.encode()...))
	f.Fuzz(func(t *testing.T, b []byte) {
		var q findRequest
		if q.decode(b) == nil {
			if c, err := q.encode(); err != nil || !bytes.Equal(c, b) {
				t.Fatalf("%x decodes and encodes to %x, %v", b, c, err)
			}
		}
		var r findReply
		if r.decode(b) != nil {
			return
		}
		if c, err := r.encode(); err != nil || !bytes.Equal(c, b) {
			t.Fatalf("%x decodes and encodes to %x, %v", b, c, err)
		}
		if rank, ids, err := decodeIDs(r.body); err == nil && (rank >= len(ids) || len(ids) > MaxMembers) {
			t.Fatalf("%x decodes to rank %d of %d", b, rank, len(ids))
		}
		if why, err := decodeGone(r.body); err == nil && (why.rank < 0 || why.rank >= MaxMembers ||
			len(why.text) > maxReason || !bytes.Equal(why.encode(), r.body)) {
			t.Fatalf("%x decodes to %+v", b, why)
		}
	})
}

func TestDecodeGone(t *testing.T) {
	for what, b := range map[string][]byte{
		"nothing":                 nil,
		"cut short":               {byte(goneFault), 1, 0, 0},
		"an unknown fault":        {byte(versionFault) + 1, 0, 0, 0, 0},
		"a rank that is too high": {byte(goneFault), 0, 0, 1, 0},
		"a negative rank":         {byte(usedFault), 255, 255, 255, 255},
		"a rank without a fault":  {byte(ownFault), 1, 0, 0, 0},
		"a long text":             append(make([]byte, goneHeader), make([]byte, maxReason+1)...),
	} {
		if why, err := decodeGone(b); err == nil {
			t.Errorf("%s decodes to %+v", what, why)
		}
	}
}

func FuzzDecodeHandle(f *testing.F) {
	key := []byte("a secret for this test")
	h, err := EncodeHandle(NewRecord(0, 1, 3, []string{"10.0.0.1:5"}), key)
	if err != nil {
		f.Fatal(err)
	}
	for _, s := range []string{h, h[:len(h)-1], handlePrefix, "tutti1.====", "", "tutti2." + h[7:], h + "\n",
		`{"rank":0,"size":1,"incarnation":"1"}`} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		// As it came, and as the record of a handle that is intact.
		intact := handlePrefix + base64.RawURLEncoding.EncodeToString(append(tagOf(key, []byte(s)), s...))
		for _, h := range []string{s, intact} {
			r, err := DecodeHandle(h, key)
			if err != nil {
				continue
			}
			c, err := EncodeHandle(r, key)
			if err != nil {
				t.Fatalf("%q decodes to %+v, which does not encode: %v", h, r, err)
			}
			if again, err := DecodeHandle(c, key); err != nil || !reflect.DeepEqual(again, r) {
				t.Fatalf("%+v became %+v, %v", r, again, err)
			}
		}
	})
}

func FuzzDecodeRecord(f *testing.F) {
	b, err := NewRecord(1, 2, 3, []string{"10.0.0.1:5", "[::1]:6"}).Encode()
	if err != nil {
		f.Fatal(err)
	}
	f.Add(b)
	f.Add([]byte(`{"rank":1,"size":4,"first":2,"incarnation":"1"}`))
	f.Add([]byte(`{"rank":-1,"size":2,"incarnation":"1"}`))
	f.Add([]byte(`{"rank":0,"size":1,"incarnation":"0"}`))
	f.Add([]byte(`{"rank":0,"size":1,"incarnation":"1","addrs":["0.0.0.0:1"]}`))
	f.Add([]byte(`{"rank":0,"size":1,"incarnation":"1","processes":"pid:[4026531836]\u001b"}`))
	f.Add([]byte(`[[[[[[`))
	f.Add([]byte(`{"rank":0,"size":1,"incarnation":"1","host":"\u009b","settings":{"\u202e":"\u2028"}}`))
	f.Fuzz(func(t *testing.T, b []byte) {
		r, err := DecodeRecord(b)
		if err != nil {
			return
		}
		c, err := r.Encode()
		if err != nil {
			t.Fatalf("%q decodes to %+v, which does not encode: %v", b, r, err)
		}
		if again, err := DecodeRecord(c); err != nil || !reflect.DeepEqual(again, r) {
			t.Fatalf("%+v became %+v, %v", r, again, err)
		}
	})
}

func TestDecodeRecord(t *testing.T) {
	good := map[string]any{"rank": 1, "size": 2, "incarnation": "ff", "addrs": []string{"10.0.0.1:5"}, "host": "h",
		"machine": "m", "network": "n", "processes": "p", "pid": 7, "first": 2, "later": true}
	check := func(what string, change func(m map[string]any)) error {
		m := maps.Clone(good)
		change(m)
		b, err := json.Marshal(m)
		if err != nil {
			t.Fatal(err)
		}
		_, err = DecodeRecord(b)
		if err != nil && what == "" || err == nil && what != "" || err != nil && !strings.Contains(err.Error(), what) {
			t.Errorf("%s: %v, want one that says %q", b, err, what)
		}
		return err
	}
	check("", func(map[string]any) {})
	for what, v := range map[string][]any{
		"rank 2 of 2":   {"rank", 2},
		"rank 1 of 0":   {"size", 0},
		"with 3 ranks":  {"first", 3},
		"with -1 ranks": {"first", -1},
		"incarnation 0": {"incarnation", "0"},
		"hexadecimal":   {"incarnation", "xyz"},
		"IP:PORT":       {"addrs", []string{"localhost:5"}},
		`"10.0.0.1:0"`:  {"addrs", []string{"10.0.0.1:0"}},
		`"0.0.0.0:1"`:   {"addrs", []string{"0.0.0.0:1"}},
		"%eth0":         {"addrs", []string{"[fe80::1%eth0]:1"}},
		"17 addresses":  {"addrs", strings.Split(strings.Repeat("10.0.0.1:5,", 16)+"10.0.0.1:5", ",")},
		"printable":     {"host", "a\nb"},
		`pid:[1]\r`:     {"processes", "pid:[1]\r"},
		`\u202e`:        {"host", "a\u202eb"},
		`\u009b`:        {"version", "a\u009bb"},
		"255":           {"host", strings.Repeat("h", 256)},
		"pid -1":        {"pid", -1},
		"4096":          {"later", strings.Repeat("h", 5000)},
		"unmarshal":     {"rank", "one"},
	} {
		check(what, func(m map[string]any) { m[v[0].(string)] = v[1] })
	}
}
