package shm

import "testing"

// A shortage says nothing about the machine.
func TestCheck(t *testing.T) {
	forget := func() { checked.known, checked.err = false, nil }
	forget()
	defer forget()
	if _, err := Identify(); err != nil { // which is asked once, too
		t.Fatal(err)
	}
	free := fill(t, 0)
	err := Check()
	known := checked.known
	free()
	if err != nil || known {
		t.Errorf("without descriptors: %v, for good: %v", err, known)
	}
	if err := Check(); err != nil || !checked.known {
		t.Errorf("%v, for good: %v", err, checked.known)
	}
}
