package shm

import (
	"bytes"
	"context"
	"errors"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"tutti/mem"
	"tutti/p2p"
	"tutti/p2p/linktest"
)

// hammered is a child that puts without end to memory of this process.
type hammered struct {
	*linktest.Peer
	l  *link
	r  *mem.Region
	to *mem.Remote
}

func hammer(t *testing.T) hammered {
	t.Helper()
	p := start(t, "storer")
	r := p.Alloc(t, 1<<20)
	h := hammered{p, p.Link.(*link), r, p.Expose(t, r, 0, r.Len(), mem.Write)}
	b, err := h.to.MarshalBinary()
	if err != nil {
		t.Fatal(err)
	}
	if err := p.Put(&p2p.Header{Len: uint32(len(b))}, b); err != nil {
		t.Fatal(err)
	}
	h.until(t, "a put", func() bool { return h.busy() > 10 })
	return h
}

func (h *hammered) until(t *testing.T, what string, done func() bool) {
	t.Helper()
	for deadline := time.Now().Add(linktest.Patience); !done(); runtime.Gosched() {
		if time.Now().After(deadline) {
			t.Fatalf("waited for %s in vain", what)
		}
	}
}

// busy is the child's word.
func (h *hammered) busy() uint64 { return h.l.words.at(busyAt, 1-h.l.side).Load() }

// stop stops the child in the middle of a chunk. Between two attempts the child gets further: one
// that is stopped again before it has run is where it was.
func (h *hammered) stop(t *testing.T) {
	t.Helper()
	h.until(t, "the child to be in the middle of a put", func() bool {
		h.Proc.Stop()
		at := h.busy()
		if at%2 == 1 {
			return true
		}
		h.Proc.Signal(unix.SIGCONT)
		h.until(t, "the child to go on", func() bool { return h.busy() != at })
		return false
	})
}

func (h *hammered) withdraw(d time.Duration) error {
	ctx, cancel := context.WithTimeout(context.Background(), d)
	defer cancel()
	return h.Node.T.(*Transport).Withdraw(ctx, h.to)
}

// quiet fails if the memory changes although the child may try anything.
func (h *hammered) quiet(t *testing.T) {
	t.Helper()
	before := bytes.Clone(h.r.Bytes())
	begun := h.busy()
	if h.l.Err() == nil { // a live child asks again, and is refused
		h.until(t, "the child to try again", func() bool { return h.busy() > begun+20 || h.l.Err() != nil })
	}
	if !bytes.Equal(before, h.r.Bytes()) {
		t.Error("the memory has changed after Withdraw")
	}
}

// TestWithdrawWaitsForStoringProcess: Withdraw waits for a live process, which puts nothing
// afterwards.
func TestWithdrawWaitsForStoringProcess(t *testing.T) {
	for range 8 {
		h := hammer(t)
		if err := h.withdraw(linktest.Patience); err != nil {
			t.Fatal(err)
		}
		h.quiet(t)
	}
}

// TestWithdrawKeepsMemoryOfStoppedProcess: a process that is stopped during an access keeps the
// memory until ctx ends, and the error names it. After it continues the memory can be freed.
func TestWithdrawKeepsMemoryOfStoppedProcess(t *testing.T) {
	h := hammer(t)
	h.stop(t)
	if err := h.withdraw(20 * time.Millisecond); !errors.Is(err, context.DeadlineExceeded) ||
		!strings.Contains(err.Error(), "rank 1") {
		t.Fatalf("Withdraw while the child is in the middle of a put: %v", err)
	}
	h.Proc.Signal(unix.SIGCONT)
	if err := h.withdraw(linktest.Patience); err != nil {
		t.Fatal(err)
	}
	h.quiet(t)
}

// TestWithdrawIgnoresKilledProcess: one that was killed in the middle is not waited for.
func TestWithdrawIgnoresKilledProcess(t *testing.T) {
	for range 5 {
		h := hammer(t)
		h.stop(t)
		h.Proc.Kill()
		if err := h.withdraw(linktest.Patience); err != nil {
			t.Fatal(err)
		}
		if h.busy()%2 == 0 {
			t.Error("it was not in the middle")
		}
		h.quiet(t)
	}
}

// TestWithdrawAfterClose: when this end closes the link while the peer is in the middle of a put,
// Withdraw still waits for that put, or for the peer's end, and no other put begins.
func TestWithdrawAfterClose(t *testing.T) {
	for name, sig := range map[string]unix.Signal{"it goes on": unix.SIGCONT, "it is killed": unix.SIGKILL} {
		t.Run(name, func(t *testing.T) {
			h := hammer(t)
			h.stop(t)
			if err := h.l.Close(); err != nil {
				t.Fatal(err)
			}
			if err := h.withdraw(20 * time.Millisecond); !errors.Is(err, context.DeadlineExceeded) {
				t.Fatalf("Withdraw while the child is in the middle of a put: %v", err)
			}
			h.Proc.Signal(sig)
			if err := h.withdraw(linktest.Patience); err != nil {
				t.Fatal(err)
			}
			before := bytes.Clone(h.r.Bytes())
			h.Proc.Wait() // it ends with its link
			if !bytes.Equal(before, h.r.Bytes()) {
				t.Error("the memory has changed after Withdraw")
			}
		})
	}
}

// TestGoneWithoutPidfds: a process that has ended is known to be gone where the system opens none.
func TestGoneWithoutPidfds(t *testing.T) {
	defer func(f func(int, int) (int, error)) { openProcess = f }(openProcess)
	c := exec.Command("true")
	if err := c.Run(); err != nil {
		t.Fatal(err)
	}
	for _, why := range []error{unix.ENOSYS, unix.EPERM} {
		openProcess = func(int, int) (int, error) { return -1, why }
		if !gone(c.Process.Pid) || gone(os.Getpid()) {
			t.Errorf("%v: one that has ended is gone: %v; this one: %v", why, gone(c.Process.Pid), gone(os.Getpid()))
		}
	}
}

// TestCloseDuringAccess: a transport that is closed while a peer is in the middle of a put keeps
// nothing of its own memory mapped, and Withdraw still waits for the peer.
func TestCloseDuringAccess(t *testing.T) {
	h := hammer(t)
	h.stop(t)
	x := h.l.exports
	if err := h.l.Close(); err != nil {
		t.Fatal(err)
	}
	if err := h.Node.T.Close(); err != nil {
		t.Fatal(err)
	}
	if len(x.boards) > 0 {
		t.Errorf("%d boards are left", len(x.boards))
	}
	if err := h.withdraw(20 * time.Millisecond); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("Withdraw while the child is in the middle of a put: %v", err)
	}
	h.Proc.Signal(unix.SIGCONT)
	if err := h.withdraw(linktest.Patience); err != nil {
		t.Error(err)
	}
	if len(x.grants) > 0 {
		t.Errorf("%d grants are left", len(x.grants))
	}
}

// TestOnlyExposedMemoryCanBeWritten: the descriptor for writing is given out while the region is
// exposed for that, and no other leads to it.
func TestOnlyExposedMemoryCanBeWritten(t *testing.T) {
	a, b := node(t, 0), node(t, 1)
	x, y := linktest.Connect(t, a, b)
	l := x.Link.(*link)
	owner := linktest.NewSide(y, b)
	ask := func(id uint64, store bool) (*p2p.Mapping, error) {
		for deadline := time.Now().Add(linktest.Patience); ; runtime.Gosched() {
			if m, err := l.mapping(importKey{id, store}); m != nil || err != nil {
				return m, err
			}
			if time.Now().After(deadline) {
				t.Fatal("no answer")
			}
		}
	}
	r := owner.Alloc(t, 4096)
	if _, err := ask(r.ID, true); !errors.Is(err, p2p.ErrNoRegion) {
		t.Errorf("writing to memory that is not exposed: %v", err)
	}
	owner.Expose(t, r, 0, 4096, mem.Read)
	if _, err := ask(r.ID, true); !errors.Is(err, p2p.ErrNoRegion) {
		t.Errorf("writing to memory that is exposed for reading: %v", err)
	}
	m, err := ask(r.ID, false)
	if err != nil {
		t.Fatal(err)
	}
	if err := unix.Mprotect(m.Mem, unix.PROT_READ|unix.PROT_WRITE); err == nil {
		t.Error("a mapping for reading can be made writable")
	}
	m.Release()
	to := owner.Expose(t, r, 0, 4096, mem.Write)
	if m, err = ask(r.ID, true); err != nil {
		t.Fatal(err)
	}
	if m.Mem[5] = 9; r.Bytes()[5] != 9 {
		t.Error("the mapping is other memory")
	}
	m.Release()
	if err := owner.Withdraw(to); err != nil {
		t.Fatal(err)
	}
	sealed, err := b.T.(*Transport).Alloc(4096)
	if err != nil {
		t.Fatal(err)
	}
	defer sealed.Free()
	remote := &mem.Remote{ID: sealed.ID, Generation: 1, Len: 4096, Rights: mem.Write, Loc: mem.Anywhere}
	if _, err := b.T.(*Transport).Expose(sealed, remote); !errors.Is(err, errors.ErrUnsupported) {
		t.Errorf("exposing sealed memory for writing: %v", err)
	}
	if _, err := ask(sealed.ID, true); !errors.Is(err, p2p.ErrNoRegion) {
		t.Errorf("writing to sealed memory: %v", err)
	}
	foreign := mem.NewRegion(77, mem.Host(make([]byte, 8), mem.Anywhere), false, false, nil)
	if _, err := b.T.(*Transport).Expose(foreign, remote); !errors.Is(err, errors.ErrUnsupported) {
		t.Errorf("exposing plain memory: %v", err)
	}
}

// TestGrantsAreReused: exposing and withdrawing again and again takes no more memory.
func TestGrantsAreReused(t *testing.T) {
	b := node(t, 0)
	tr := b.T.(*Transport)
	r, err := tr.AllocWritable(64)
	if err != nil {
		t.Fatal(err)
	}
	defer r.Free()
	var open []*mem.Remote
	for i := range uint64(2500) { // several boards
		x := &mem.Remote{ID: r.ID, Generation: i + 1, Len: 64, Rights: mem.Write, Loc: mem.Anywhere}
		if _, err := tr.Expose(r, x); err != nil {
			t.Fatal(err)
		}
		open = append(open, x)
	}
	most := len(tr.exports.boards)
	for range 3 {
		for i, x := range open {
			if err := tr.Withdraw(t.Context(), x); err != nil {
				t.Fatal(err)
			}
			next := *x
			next.Generation += 10_000
			open[i] = &next
			if _, err := tr.Expose(r, open[i]); err != nil {
				t.Fatal(err)
			}
		}
	}
	if n := len(tr.exports.boards); n != most || n != 3 {
		t.Errorf("%d boards, %d before, want 3", n, most)
	}
	for _, x := range open {
		if err := tr.Withdraw(t.Context(), x); err != nil {
			t.Fatal(err)
		}
	}
	if n := len(tr.exports.boards); n != 1 {
		t.Errorf("%d boards are kept for nothing", n)
	}
}

// TestGateEndsPuts: a link whose owner has closed its end takes no put any more, before the other
// end has been told.
func TestGateEndsPuts(t *testing.T) {
	x, y := linktest.Sides(t, func(testing.TB) p2p.Transport { return New(Config{}) })
	r := y.Alloc(t, 64)
	to := y.Expose(t, r, 0, 64, mem.Write)
	id, err := x.PutTo([]byte{1}, to, 0, p2p.Signal{})
	if err := x.Await(id, err); err != nil {
		t.Fatal(err)
	}
	l := y.Link.(*link)
	l.words.at(gateAt, l.side).Store(1)
	id, err = x.PutTo([]byte{2}, to, 0, p2p.Signal{})
	if err := x.Await(id, err); !errors.Is(err, p2p.ErrPeerGone) || r.Bytes()[0] != 1 {
		t.Errorf("a put through a closed gate: %v", err)
	}
}
