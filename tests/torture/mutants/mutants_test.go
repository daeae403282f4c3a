package main

import (
	"path/filepath"
	"testing"
)

// TestMutantsApply looks whether every mistake can still be planted, and compiles.
func TestMutantsApply(t *testing.T) {
	root, err := moduleRoot()
	if err != nil {
		t.Fatal(err)
	}
	seen := map[string]bool{}
	for i := range mutants {
		m := &mutants[i]
		if seen[m.name] {
			t.Errorf("two mutants %s", m.name)
		}
		seen[m.name] = true
		files, err := m.apply(root)
		if err != nil {
			t.Error(err)
			continue
		}
		for path := range files {
			if !filepath.IsAbs(path) {
				t.Errorf("mutant %s: the overlay needs an absolute path of %s", m.name, path)
			}
		}
	}
}

func TestInapplicableEditIsAnError(t *testing.T) {
	root, err := moduleRoot()
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range []edit{
		{"p2p", "Ticket.Valid", "return t.word.Load() == 7", "return true"},
		{"p2p", "Ticket.Invalid", "return", ""},
		{"p2p", "Ticket.Valid", "t", "u"},
		{"p2p", "Ticket.Valid", "return t.word.Load() == t.value", "return )"},
	} {
		if _, err := (&mutant{name: "bad", edits: []edit{e}}).apply(root); err == nil {
			t.Errorf("%+v applies", e)
		}
	}
}
