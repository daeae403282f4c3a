package shm

import (
	"errors"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"

	"tutti/p2p"
)

// After Renew, what a peer still has mapped is no longer this process's memory; the contents and the addresses stay.
func TestRenewTakesMemoryBack(t *testing.T) {
	var x exports
	const n = 100_000
	r, err := x.alloc(n)
	if err != nil {
		t.Fatal(err)
	}
	for i := range r.Mem {
		r.Mem[i] = byte(i)
	}
	peer, err := mapMemory(r.File, pages(n))
	if err != nil {
		t.Fatal(err)
	}
	defer unmap(peer)
	peer[5] = 77
	if r.Mem[5] != 77 {
		t.Fatal("the mapping is not shared to begin with")
	}
	gen, at := r.Generation, &r.Mem[0]
	if err := r.Renew(); err != nil {
		t.Fatal(err)
	}
	if r.Generation == gen || &r.Mem[0] != at {
		t.Errorf("generation %d, then %d; address %p, then %p", gen, r.Generation, at, &r.Mem[0])
	}
	peer[5] = 1
	if r.Mem[5] != 77 || r.Mem[n-1] != byte((n-1)%256) {
		t.Error("the peer still writes to the memory, or its contents are lost")
	}
	r.Mem[6] = 200
	if peer[6] != 6 {
		t.Error("the peer still sees what this process writes")
	}
	// New peers get the new memory.
	if err := x.pass(r.ID, n, r.Generation, func(fd int) error {
		again, err := mapMemory(fd, pages(n))
		if err != nil {
			return err
		}
		defer unmap(again)
		if again[6] != 200 {
			t.Error("a descriptor of the old memory is handed out")
		}
		return nil
	}); err != nil {
		t.Error(err)
	}
	if err := r.Free(); err != nil {
		t.Error(err)
	}
	if _, err := unix.FcntlInt(uintptr(r.File), unix.F_GETFD, 0); err == nil && r.File >= 0 {
		t.Log("descriptor number in use again") // another test's, perhaps
	}
}

// What a peer may map changes generation in the same instant as the memory: asked for the old one, nothing is passed.
func TestRenewFencesOldGenerations(t *testing.T) {
	var x exports
	r, err := x.alloc(10)
	if err != nil {
		t.Fatal(err)
	}
	passed := func(gen uint32) int {
		fd := -1
		if err := x.pass(r.ID, 10, gen, func(n int) error { fd = n; return nil }); err != nil && !errors.Is(err, p2p.ErrNoRegion) {
			t.Fatal(err)
		}
		return fd
	}
	if passed(0) != r.File || passed(1) >= 0 {
		t.Errorf("before: generation 0 gives %d, 1 gives %d, want %d and nothing", passed(0), passed(1), r.File)
	}
	old := r.File
	if _, err := x.renew(r.ID, unsafe.Slice(&r.Mem[0], pages(10))); err == nil { // below Region.Renew, which has yet to raise Generation
		if passed(0) >= 0 || passed(1) < 0 || passed(1) == old {
			t.Errorf("after: generation 0 gives %d, 1 gives %d", passed(0), passed(1))
		}
	} else {
		t.Error(err)
	}
	if err := r.Renew(); err != nil {
		t.Fatal(err)
	}
	if r.File != passed(2) {
		t.Errorf("File is %d, the descriptor passed on is %d", r.File, passed(2))
	}
	if err := r.Free(); err != nil {
		t.Fatal(err)
	}
	if _, err := x.renew(r.ID, make([]byte, pages(10))); !errors.Is(err, p2p.ErrNoRegion) || passed(2) >= 0 {
		t.Errorf("renewing what was freed: %v", err)
	}
}
