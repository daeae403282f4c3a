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
