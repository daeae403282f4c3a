package shm

import (
	"testing"

	"golang.org/x/sys/unix"
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
	if err := x.pass(r.ID, n, func(fd int) error {
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
