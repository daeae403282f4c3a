package queue

import (
	"math/rand/v2"
	"testing"

	"tutti/rdma"
)

func sound(t *testing.T, l *ledger, state condition, inUse int) {
	t.Helper()
	if err := l.check(); err != nil || l.state != state || l.inUse != inUse {
		t.Fatalf("%v; %v with %d in use, expected %v with %d", err, l.state, l.inUse, state, inUse)
	}
}

func chunk(t *testing.T, l *ledger, n int) uint32 {
	t.Helper()
	if r := l.reserve(n); r != granted {
		t.Fatal(r)
	}
	return l.write(n, rdma.Write, nil)
}

func TestReservations(t *testing.T) {
	l := newLedger(10)
	if r := l.reserve(11); r != never {
		t.Fatal(r)
	}
	chunk(t, &l, 4)
	second := chunk(t, &l, 4)
	if r := l.reserve(4); r != full {
		t.Fatal(r)
	}
	if r := l.reserve(2); r != granted {
		t.Fatal(r)
	}
	sound(t, &l, ready, 10)
	l.release(2)
	if v, _ := l.complete(second-1, rdma.Success, 0); v != expected {
		t.Fatal(v)
	}
	sound(t, &l, ready, 4)
	if r := l.reserve(4); r != granted {
		t.Fatal(r)
	}
}

func TestCompletionReleasesItsRecordOnly(t *testing.T) {
	l := newLedger(16)
	a, b, c := chunk(t, &l, 3), chunk(t, &l, 2), chunk(t, &l, 4)
	for _, x := range []struct {
		number uint32
		status rdma.Status
		want   verdict
		inUse  int
	}{
		{a, rdma.Success, stray, 9},       // an unsignaled request
		{c + 4, rdma.Success, stray, 9},   // not posted
		{a - 1, rdma.Success, stray, 9},   // before the first
		{b + 1, rdma.Success, skipped, 9}, // that of the first record is missing
		{a + 2, rdma.Success, expected, 6},
		{a + 2, rdma.Success, stray, 6}, // again
		{b + 1, rdma.Success, expected, 4},
		{c + 1, rdma.RemoteAccess, expected, 4}, // fails in the middle
		{c + 2, rdma.Flushed, expected, 4},
		{c + 3, rdma.Flushed, expected, 0},
		{c + 3, rdma.Flushed, stray, 0},
	} {
		if v, _ := l.complete(x.number, x.status, 0); v != x.want || l.inUse != x.inUse || l.check() != nil {
			t.Fatalf("%+v: %v, %d in use, %v", x, v, l.inUse, l.check())
		}
	}
	for _, want := range []rdma.Status{rdma.Success, rdma.Success, rdma.RemoteAccess} {
		if r, ok := l.pop(); !ok || r.status != want {
			t.Fatal(r, ok)
		}
	}
	sound(t, &l, failed, 0)
}

func TestOrphansEndWithTheFlush(t *testing.T) {
	l := newLedger(8)
	a := chunk(t, &l, 2)
	chunk(t, &l, 6)
	l.posted(5)
	sound(t, &l, degraded, 7)
	if r := l.reserve(1); r != barred {
		t.Fatal(r)
	}
	f, ok := l.flush()
	if !ok {
		t.Fatal("no room for the flush")
	}
	if _, again := l.flush(); again {
		t.Fatal("more than the queue holds")
	}
	sound(t, &l, degraded, 8)
	l.complete(a+1, rdma.Success, 0)
	sound(t, &l, degraded, 6)
	if v, _ := l.complete(f, rdma.Success, 0); v != expected {
		t.Fatal(v)
	}
	sound(t, &l, ready, 0)
}

func TestUnpostedChunkIsUsedAgain(t *testing.T) {
	l := newLedger(8)
	first := chunk(t, &l, 3)
	l.posted(0)
	sound(t, &l, ready, 0)
	if second := chunk(t, &l, 1); second != first {
		t.Fatal(first, second)
	}
}

func TestNumbersWrapAround(t *testing.T) {
	l := newLedger(8)
	l.next = ^uint32(0) - 1
	a, b := chunk(t, &l, 3), chunk(t, &l, 2)
	if v, _ := l.complete(a+2, rdma.Success, 0); v != expected {
		t.Fatal(v)
	}
	if v, _ := l.complete(b+1, rdma.Success, 0); v != expected || b+1 != 2 {
		t.Fatal(v, b)
	}
	sound(t, &l, ready, 0)
}

func popAll(l *ledger) {
	for _, ok := l.pop(); ok; _, ok = l.pop() {
	}
}

// Whatever is completed, the accounts are right, and nothing is released twice.
func TestCompletionsOfAnything(t *testing.T) {
	for seed := range uint64(2000) {
		r := rand.New(rand.NewPCG(seed, 2))
		l := newLedger(1 + r.IntN(8))
		l.next = r.Uint32()
		for range 60 {
			switch n := 1 + r.IntN(3); r.IntN(5) {
			case 0, 1:
				if l.reserve(n) == granted {
					l.write(n, rdma.Write, nil)
					if r.IntN(5) == 0 {
						l.posted(r.IntN(n))
					}
				}
			case 2:
				l.complete(l.next-r.Uint32N(12), rdma.Status(r.IntN(10)/9*5), 0)
			case 3:
				l.complete(l.at(0).last(), rdma.Success, 0)
			default:
				if l.state == degraded {
					l.flush()
				} else if l.state == failed && r.IntN(3) == 0 {
					l.abandon()
					popAll(&l)
					if l.n != 0 {
						t.Fatal(seed, "records are left")
					}
					l.renew()
				}
			}
			popAll(&l)
			if err := l.check(); err != nil {
				t.Fatal(seed, err)
			}
		}
	}
}
