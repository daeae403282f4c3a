package ident

import (
	"runtime"
	"testing"
)

func TestIDsAreDistinctAndNotZero(t *testing.T) {
	seen := map[uint64]bool{0: true}
	for range 1000 {
		n := New()
		if seen[n] {
			t.Fatalf("%x twice, or 0", n)
		}
		seen[n] = true
	}
}

func TestHashTellsPlacesApart(t *testing.T) {
	p, err := Here()
	if err != nil && runtime.GOOS == "linux" {
		t.Fatal(err)
	}
	if err == nil && (p.Boot == "" || p.Network == "") {
		t.Errorf("%+v", p)
	}
	a, b := Place{"a", "b"}, Place{"ab", ""}
	if a.Hash() == b.Hash() || a.Hash() != (Place{"a", "b"}).Hash() || a.Hash() == 0 || (Place{}).Hash() != 0 {
		t.Errorf("%x, %x, %x", a.Hash(), b.Hash(), (Place{}).Hash())
	}
}

func TestOverflowUserStandsForOthers(t *testing.T) {
	const all, some = "         0          0 4294967295\n", "         0     100000      65536\n"
	for _, c := range []struct {
		uid             uint32
		overflow, users string
		want            bool
	}{
		{65534, "65534\n", all, false},
		{65534, "65534\n", some, true},
		{65534, "65534\n", "", true}, // before the namespace has users
		{65534, "65534\n", all + some, true},
		{65534, "99\n", some, false},
		{99, "99\n", some, true},
		{0, "65534\n", some, false},
		{1000, "65534\n", some, false},
	} {
		if got := standsForOthers(c.uid, c.overflow, c.users); got != c.want {
			t.Errorf("user %d, overflow user %q, users %q: %v", c.uid, c.overflow, c.users, got)
		}
	}
}
