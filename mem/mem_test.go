package mem

import (
	"bytes"
	"errors"
	"math"
	"testing"
)

func TestLocationsAreChecked(t *testing.T) {
	for _, l := range []Location{"*", "cpu:0", "cpu:12", "cuda:3"} {
		if err := l.Validate(); err != nil {
			t.Errorf("%q: %v", l, err)
		}
	}
	for _, l := range []Location{"", "cpu", "cpu:", "cpu:-1", "cpu:01", "cuda:x", "gpu:0", "**", "cuda:0 "} {
		if l.Validate() == nil {
			t.Errorf("%q is accepted", l)
		}
	}
	for l, host := range map[Location]bool{"*": true, "cpu:1": true, "cuda:0": false} {
		if l.Host() != host {
			t.Errorf("%q: Host is %v", l, l.Host())
		}
	}
}

func panics(f func()) (yes bool) {
	defer func() { yes = recover() != nil }()
	f()
	return false
}

func TestDeviceMemoryHasNoBytes(t *testing.T) {
	d := Device(0x1000, 64, "cuda:1")
	if d.Loc() != "cuda:1" || d.Len() != 64 || d.Address() != 0x1000 || d.Slice(8, 4).Address() != 0x1008 {
		t.Errorf("%+v", d)
	}
	for name, f := range map[string]func(){
		"Bytes of device memory":     func() { d.Bytes() },
		"Word of device memory":      func() { d.Word(0) },
		"address of host memory":     func() { Host(make([]byte, 8), Anywhere).Address() },
		"host memory on a device":    func() { Host(nil, "cuda:0") },
		"device memory on a host":    func() { Device(1, 1, "cpu:0") },
		"device memory with no size": func() { Device(1, -1, "cuda:0") },
	} {
		if !panics(f) {
			t.Errorf("%s: no panic", name)
		}
	}
}

func TestSlicesOfMemoryStayInside(t *testing.T) {
	b := make([]byte, 32)
	r := NewRegion(7, Host(b, "cpu:0"), false, false, nil)
	s := r.Slice(8, 16)
	s.Bytes()[0] = 5
	if b[8] != 5 || s.Len() != 16 || s.Region() != r || s.Loc() != "cpu:0" {
		t.Errorf("%+v", s)
	}
	if e := r.Slice(32, 0); e.Len() != 0 || len(e.Bytes()) != 0 {
		t.Errorf("an empty slice at the end: %+v", e)
	}
	for _, c := range [][2]int{{-1, 1}, {0, 33}, {33, 0}, {1, 32}, {math.MaxInt, 1}, {1, math.MaxInt}, {0, -1}} {
		if !panics(func() { r.Slice(c[0], c[1]) }) {
			t.Errorf("Slice(%d, %d) of 32 bytes: no panic", c[0], c[1])
		}
	}
	r.Word(24).Store(1)
	for _, off := range []int{-8, 1, 25, 32, math.MaxInt} {
		if !panics(func() { r.Word(off) }) {
			t.Errorf("Word(%d) of 32 bytes: no panic", off)
		}
	}
	if err := r.Free(); err != nil {
		t.Fatal(err)
	}
	freed := false
	f := NewRegion(8, Host(b, Anywhere), false, false, func() error { freed = true; return nil })
	if err := f.Free(); err != nil || !freed || f.Len() != 0 || f.Free() != nil {
		t.Error("Free does not give the memory back once")
	}
}

func sample() Remote {
	return Remote{ID: 0x1234, Generation: 99, Base: 4096, Len: 1 << 20, Rights: Read | Signal, Loc: "cpu:1",
		Keys: []Key{{"shm", []byte{1, 2, 3}}, {"tcp", []byte{}}, {"verbs", bytes.Repeat([]byte{9}, MaxBlob)}}}
}

func TestRemoteSurvivesItsEncoding(t *testing.T) {
	r := sample()
	b, err := r.MarshalBinary()
	if err != nil {
		t.Fatal(err)
	}
	var got Remote
	if err := got.UnmarshalBinary(b); err != nil {
		t.Fatal(err)
	}
	again, err := got.MarshalBinary()
	if err != nil || !bytes.Equal(again, b) || got.ID != r.ID || got.Generation != r.Generation || got.Base != r.Base ||
		got.Len != r.Len || got.Rights != r.Rights || got.Loc != r.Loc || len(got.Keys) != 3 {
		t.Errorf("%+v (%v), want %+v", got, err, r)
	}
	if k, ok := got.Key("shm"); !ok || !bytes.Equal(k, []byte{1, 2, 3}) {
		t.Errorf("key of shm: %v, %v", k, ok)
	}
	if _, ok := got.Key("nvlink"); ok {
		t.Error("a key that is not there")
	}
	for i := range b { // no prefix is one
		if err := new(Remote).UnmarshalBinary(b[:i]); !errors.Is(err, ErrRemote) {
			t.Errorf("the first %d bytes: %v", i, err)
		}
	}
	if err := new(Remote).UnmarshalBinary(append(b, 0)); !errors.Is(err, ErrRemote) {
		t.Errorf("a byte too many: %v", err)
	}
}

func TestInvalidRemotesAreRefused(t *testing.T) {
	for name, change := range map[string]func(*Remote){
		"no id":          func(r *Remote) { r.ID = 0 },
		"no generation":  func(r *Remote) { r.Generation = 0 },
		"no location":    func(r *Remote) { r.Loc = "" },
		"long location":  func(r *Remote) { r.Loc = "cpu:1000000000000" },
		"no rights":      func(r *Remote) { r.Rights = 0 },
		"unknown rights": func(r *Remote) { r.Rights = 0x80 | Read },
		"end overflows":  func(r *Remote) { r.Base, r.Len = math.MaxUint64, 2 },
		"end too far":    func(r *Remote) { r.Base, r.Len = 1<<62, 1 },
		"empty path":     func(r *Remote) { r.Keys[0].Path = "" },
		"long path":      func(r *Remote) { r.Keys[0].Path = "12345678901234567" },
		"long blob":      func(r *Remote) { r.Keys[0].Blob = make([]byte, MaxBlob+1) },
		"same path":      func(r *Remote) { r.Keys[1].Path = "shm" },
		"too long": func(r *Remote) {
			for i := range 3 {
				r.Keys[i].Blob = make([]byte, MaxBlob)
			}
			r.Keys = append(r.Keys, Key{"x", make([]byte, MaxBlob)})
		},
		"too many keys": func(r *Remote) {
			for i := range MaxKeys {
				r.Keys = append(r.Keys, Key{Path: string(rune('a' + i))})
			}
		},
	} {
		r := sample()
		change(&r)
		if _, err := r.MarshalBinary(); !errors.Is(err, ErrRemote) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// Whatever bytes come, decoding neither panics nor takes more memory than they have, and what is
// accepted has that one encoding.
func FuzzRemote(f *testing.F) {
	r := sample()
	b, _ := r.MarshalBinary()
	f.Add(b)
	f.Add(b[:remoteFixed])
	f.Add(make([]byte, remoteFixed))
	f.Add(bytes.Repeat([]byte{1}, MaxRemote+1))
	f.Fuzz(func(t *testing.T, b []byte) {
		var r Remote
		if err := r.UnmarshalBinary(b); err != nil {
			if !errors.Is(err, ErrRemote) {
				t.Fatalf("%v does not wrap ErrRemote", err)
			}
			if r.ID != 0 || r.Keys != nil {
				t.Fatal("a failed decoding changed the value")
			}
			return
		}
		again, err := r.MarshalBinary()
		if err != nil || !bytes.Equal(again, b) || len(b) > MaxRemote {
			t.Fatalf("%x decodes to %+v, which encodes to %x (%v)", b, r, again, err)
		}
	})
}

func TestRightsHaveNames(t *testing.T) {
	for r, want := range map[Rights]string{0: "none", Read: "read", Read | Write | Signal: "read+write+signal",
		Write | 8: "write+0x8"} {
		if r.String() != want {
			t.Errorf("%d: %s, want %s", uint8(r), r, want)
		}
	}
	if !(Read | Write).Has(Write) || (Read | Write).Has(Write|Signal) {
		t.Error("Has")
	}
}
