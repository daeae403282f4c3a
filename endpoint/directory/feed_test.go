package directory

import (
	"testing"

	"tutti/bootstrap"
)

// A program that takes nothing has bounded memory in use, and goes on with the state.
func TestSlowWatch(t *testing.T) {
	f := &feed{more: make(chan struct{}, 1)}
	state := change{state: map[string][]byte{}}
	event := change{Event: bootstrap.Event{Key: "names/a"}}
	if !f.put(state) {
		t.Fatal("a state was dropped")
	}
	for range maxChanges - 1 {
		if !f.put(event) {
			t.Fatal("an event was dropped too early")
		}
	}
	for range 2 {
		if f.put(event) {
			t.Fatal("an event was kept that is too much")
		}
	}
	if got := f.take(); len(got) != 0 {
		t.Fatalf("%d changes are left", len(got))
	}
	if f.put(event) {
		t.Fatal("an event before the state")
	}
	if !f.put(state) || !f.put(event) {
		t.Fatal("it does not go on")
	}
	if got := f.take(); len(got) != 2 || got[0].state == nil {
		t.Errorf("%+v", got)
	}
	for range 3 { // states do not add up
		f.put(event)
		f.put(state)
	}
	if got := f.take(); len(got) > 4 {
		t.Errorf("%d changes", len(got))
	}
}

func FuzzEntry(f *testing.F) {
	f.Add("names/a", []byte("tutti-endpoint://127.0.0.1:1/a?id=0000000000000001"))
	f.Add("names/", []byte("h:1"))
	f.Fuzz(func(t *testing.T, key string, value []byte) {
		x, err := entryOf(key, value)
		if err != nil {
			return
		}
		if CheckName(x.Name) != nil {
			t.Fatalf("%q", x.Name)
		}
		b, err := encode(x.Info)
		if err != nil {
			t.Fatal(err)
		}
		if again, err := parse(b); err != nil || again.String() != x.Info.String() {
			t.Fatalf("%v became %v, %v", x.Info, again, err)
		}
	})
}
