package verbs

import (
	"bytes"
	"fmt"
	"runtime"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"tutti/mem"
	"tutti/p2p"
	"tutti/p2p/linktest"
	"tutti/rdma/soft"
)

// countCalls returns a fabric that counts the calls of devices that are picked, each of which fails
// with what fail returns, unless that is 0.
func countCalls(t *testing.T, cfg soft.Config, picked func(call string) bool,
	fail func(call string) syscall.Errno) (f *soft.Fabric, n *atomic.Int64) {
	n = new(atomic.Int64)
	cfg.Faults.Call = func(_, call string) syscall.Errno {
		if !picked(call) {
			return 0
		}
		n.Add(1)
		return fail(call)
	}
	f = soft.New(cfg)
	t.Cleanup(f.Close)
	return f, n
}

// registrations returns a fabric that counts the registrations of memory, and refuses them while
// refuse is set.
func registrations(t *testing.T, cfg soft.Config) (f *soft.Fabric, n *atomic.Int64, refuse *atomic.Bool) {
	refuse = new(atomic.Bool)
	f, n = countCalls(t, cfg, func(call string) bool { return strings.HasPrefix(call, "register") },
		func(call string) syscall.Errno {
			if refuse.Load() && strings.Contains(call, "5242883") { // the whole region
				return syscall.ENOMEM
			}
			return 0
		})
	return f, n, refuse
}

// TestRegionsAreRegisteredOnce: the device reaches a region that the transport knows with one
// registration, whole or in parts, until Deregister. It reaches other memory, and a region that it
// cannot register, with one for each piece.
func TestRegionsAreRegisteredOnce(t *testing.T) { overRails(t, testRegionsAreRegisteredOnce) }

func testRegionsAreRegisteredOnce(t *testing.T, p ports) {
	f, calls, refuse := registrations(t, soft.Config{Seed: 31, Devices: 4, Late: 3})
	x, y := sidesOf(t, f, p)
	const most = 5<<20 + 3
	r := y.Alloc(t, most)
	to := y.Expose(t, r, 0, most, mem.Read|mem.Write)
	place(t, x, make([]byte, leastMove), to)
	local := mem.NewRegion(7, mem.Host(make([]byte, most), mem.Anywhere), false, false, nil)
	reg := x.Node.T.(p2p.Registrar)
	// used puts and gets all of the local memory and parts of it, and returns the registrations.
	used := func(round int) int64 {
		t.Helper()
		copy(local.Bytes(), pattern(most, round))
		want := bytes.Clone(local.Bytes())
		before := calls.Load()
		if err := x.Await(x.PutTo(local.Bytes(), to, 0, p2p.Signal{})); err != nil {
			t.Fatal(err)
		}
		if !bytes.Equal(r.Bytes(), want) {
			t.Fatal("other bytes have arrived")
		}
		clear(local.Bytes())
		for _, half := range [][2]int{{0, most / 2}, {most / 2, most}} {
			b := local.Bytes()[half[0]:half[1]]
			if err := x.Await(x.GetFrom(b, to, uint64(half[0]))); err != nil {
				t.Fatal(err)
			}
		}
		if !bytes.Equal(local.Bytes(), want) {
			t.Fatal("other bytes have come")
		}
		return calls.Load() - before
	}
	const pieces = 2 * (most/pieceBytes + 1)
	if n := used(0); n < pieces {
		t.Errorf("%d registrations of memory that is not known, want at least %d", n, pieces)
	}
	_, _, before := f.Objects()
	reg.Register(local)
	for round, late := 1, time.Now().Add(linktest.Patience); used(round) > 0; round++ {
		if time.Now().After(late) {
			t.Fatal("a region is registered again and again")
		}
	}
	if _, _, n := f.Objects(); n <= before {
		t.Errorf("%d registrations, and %d before", n, before)
	}
	if err := reg.Deregister(local); err != nil {
		t.Error(err)
	}
	if _, _, n := f.Objects(); n != before {
		t.Errorf("%d registrations after Deregister, want %d", n, before)
	}
	if n := used(100); n < pieces {
		t.Errorf("%d registrations after Deregister, want at least %d", n, pieces)
	}
	refuse.Store(true)
	reg.Register(local)
	for round := range 3 {
		if n := used(round); n < pieces {
			t.Errorf("%d registrations of a region that the device refuses, want at least %d", n, pieces)
		}
	}
	if err := reg.Deregister(local); err != nil {
		t.Error(err)
	}
}

// TestRegionsStayForPiecesUnderWay: Deregister leaves what is under way its registration, which
// ends with the last piece, or with the queue pairs.
func TestRegionsStayForPiecesUnderWay(t *testing.T) {
	for _, cancelled := range []bool{false, true} {
		f, _, _ := registrations(t, soft.Config{Seed: 32})
		x, y := sides(t, f)
		const most = 4 << 20
		r := y.Alloc(t, most)
		to := y.Expose(t, r, 0, most, mem.Write)
		place(t, x, make([]byte, leastMove), to)
		_, _, before := f.Objects()
		local := mem.NewRegion(7, mem.Host(pattern(most, 1), mem.Anywhere), false, false, nil)
		reg, tr := x.Node.T.(p2p.Registrar), x.Node.T.(*Transport)
		reg.Register(local)
		under := func() (n int) {
			tr.locals.mu.Lock()
			defer tr.locals.mu.Unlock()
			for _, l := range tr.locals.list {
				for _, m := range l.mrs {
					n += m.under
				}
			}
			return n
		}
		var id uint64
		for late := time.Now().Add(linktest.Patience); under() == 0; {
			var err error
			if id, err = x.PutTo(local.Bytes(), to, 0, p2p.Signal{}); err != nil {
				t.Fatal(err)
			}
			for n := 0; n < 100 && under() == 0; n++ {
				if _, ok := x.Ended[id]; ok {
					break
				}
				if err := x.Turn(); err != nil {
					t.Fatal(err)
				}
			}
			if under() == 0 {
				if err := x.Await(id, nil); err != nil {
					t.Fatal(err)
				}
			}
			if time.Now().After(late) {
				t.Fatal("no piece uses the region's registration")
			}
		}
		if err := reg.Deregister(local); err != nil {
			t.Error(err)
		}
		if cancelled {
			x.Rma.Cancel(id)
		}
		if err := x.Await(id, nil); err != nil && !cancelled {
			t.Fatal(err)
		}
		if !cancelled && !bytes.Equal(r.Bytes(), local.Bytes()) {
			t.Error("other bytes have arrived")
		}
		for late := time.Now().Add(linktest.Patience); ; runtime.Gosched() {
			raised(t, x.End, y.End)
			_, _, n := f.Objects()
			if n <= before {
				break
			}
			if time.Now().After(late) {
				t.Fatalf("cancelled %v: %d registrations, want %d", cancelled, n, before)
			}
		}
	}
}

// A piece whose memory cannot be registered, after others that reads have to follow, costs no lane:
// frames carry the put.
func TestLaneOutlivesRefusedPiece(t *testing.T) {
	var left atomic.Int64
	left.Store(1 << 40)
	f, _ := countCalls(t, soft.Config{Seed: 47, Devices: 4, Delayed: []string{"soft0", "soft1", "soft2", "soft3"}},
		func(call string) bool { return call == fmt.Sprintf("register %d bytes", pieceBytes) },
		func(string) syscall.Errno {
			if left.Add(-1) < 0 {
				return syscall.ENOMEM
			}
			return 0
		})
	x, y := sidesOf(t, f, twoEach)
	const n = 4 * pieceBytes
	r := y.Alloc(t, n)
	to := y.Expose(t, r, 0, n, mem.Read|mem.Write)
	place(t, x, make([]byte, leastMove), to) // so that the keys are there
	gen := inner(x.End).lane.gen
	for round := range 4 {
		left.Store(int64(round))
		b := pattern(n, round)
		if place(t, x, b, to); !bytes.Equal(r.Bytes(), b) {
			t.Fatalf("after %d pieces: other bytes have arrived", round)
		}
	}
	if now := inner(x.End).lane.gen; now != gen {
		t.Errorf("lane %d is in use, want %d", now, gen)
	}
}
