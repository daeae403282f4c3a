//go:build cgo && linux

package queue

import (
	"bytes"
	"context"
	"errors"
	"math/rand/v2"
	"runtime"
	"sync"
	"testing"
	"time"

	"tutti/rdma"
	"tutti/rdma/rdmatest"
	"tutti/rdma/verbs"
)

// deviceEnds returns two ends over the device of the virtual machine of make test-rdma, without
// which the test is skipped. Both are polled until the test ends.
func deviceEnds(t *testing.T, quirks rdma.Quirks, queues, depth, bytes int, cfg Config) (a, b *end) {
	t.Helper()
	p, names := rdmatest.Devices(t, verbs.Load)
	a, b = newEndsOver(t, p.WithQuirks(quirks), [2]string{names[0], names[0]}, 16, queues, depth, bytes, cfg)
	ctx, stop := context.WithCancel(context.Background())
	var serving sync.WaitGroup
	for _, e := range []*end{a, b} {
		serving.Go(func() {
			if err := e.p.Serve(ctx); err != nil && ctx.Err() == nil {
				t.Error(err)
			}
		})
	}
	t.Cleanup(func() {
		stop()
		serving.Wait()
		a.close()
		b.close()
	})
	return a, b
}

// TestDeviceBatches: batches of many writes and reads at random places, larger than the queues,
// with a notification each.
func TestDeviceBatches(t *testing.T) {
	const size, slot, rounds = 1 << 20, 4 << 10, 30
	notified := make(chan uint32, rounds)
	a, b := deviceEnds(t, rdma.Quirks{}, 3, 16, size, Config{Chunk: 4, Notified: func(id uint32) { notified <- id }})
	r := rand.New(rand.NewPCG(1, 2))
	for round := range uint32(rounds) {
		for i := range a.b {
			a.b[i] = byte(r.Uint32())
		}
		w, rd := &Batch{Notify: true, ID: round}, &Batch{}
		want := bytes.Clone(b.b)
		for _, s := range r.Perm(size / 2 / slot) {
			off, n := uint64(s*slot+r.IntN(100)), uint64(1+r.IntN(slot-200))
			w.Ops = append(w.Ops, a.op(b, rdma.Write, off, off, n))
			copy(want[off:off+n], a.b[off:off+n])
		}
		tr, err := a.s.Submit(soon(t), w)
		if err != nil {
			t.Fatal(err)
		}
		if err := tr.Wait(soon(t)); err != nil {
			t.Fatal(err)
		}
		if id := <-notified; id != round {
			t.Fatalf("notification %d in round %d", id, round)
		}
		if !bytes.Equal(b.b, want) {
			t.Fatalf("round %d: other bytes were written", round)
		}
		for s := range size / 2 / slot {
			off := uint64(s * slot)
			rd.Ops = append(rd.Ops, a.op(b, rdma.Read, size/2+off, off, slot))
		}
		if tr, err = a.s.Submit(soon(t), rd); err != nil {
			t.Fatal(err)
		}
		if err := tr.Wait(soon(t)); err != nil || !bytes.Equal(a.b[size/2:], b.b[:size/2]) {
			t.Fatalf("round %d: other bytes were read, or %v", round, err)
		}
	}
	for _, u := range a.s.Usage() {
		if u.InUse != 0 {
			t.Errorf("at rest: %+v", u)
		}
	}
}

// TestDeviceFailureAndReset: a request that the peer refuses, and a failure under load, end every
// transfer; after a reset at both ends everything works.
func TestDeviceFailureAndReset(t *testing.T) {
	a, b := deviceEnds(t, rdma.Quirks{}, 2, 16, 1<<20, Config{Chunk: 4, Timeout: time.Minute})
	for round := range 6 {
		var all []*Transfer
		for i := range uint64(20) {
			batch := &Batch{}
			for j := range uint64(8) {
				batch.Ops = append(batch.Ops, a.op(b, rdma.Write, 0, i<<15+j<<12, 2<<10))
			}
			if i == 10 && round%2 == 0 {
				batch.Ops[3].RemoteKey++
			}
			tr, err := a.s.Submit(soon(t), batch)
			if err != nil {
				if a.s.Err() == nil {
					t.Fatal(err)
				}
				break
			}
			all = append(all, tr)
			if i == 10 && round%2 == 1 {
				a.s.Fail(errors.New("on request"))
			}
		}
		failed := 0
		for _, tr := range all {
			if tr.Wait(soon(t)) != nil {
				failed++
			}
		}
		if failed == 0 && round%2 == 0 || a.s.Err() == nil { // else all may have ended before Fail
			t.Fatalf("round %d: %d transfers failed, and the set with %v", round, failed, a.s.Err())
		}
		if _, err := a.s.Submit(soon(t), writes(1)); !errors.Is(err, ErrFailed) {
			t.Fatalf("round %d: a batch after the failure: %v", round, err)
		}
		b.s.Fail(errors.New("the peer has failed"))
		for _, e := range []*end{a, b} {
			if err := e.s.Drain(soon(t)); err != nil {
				t.Fatal(err)
			}
		}
		for _, e := range []*end{a, b} {
			o := map[*end]*end{a: b, b: a}[e]
			if err := e.s.Reset(soon(t), func(i int, q rdma.QP) error { return e.connect(o, i, q) }); err != nil {
				t.Fatal(err)
			}
		}
		tr, err := a.s.Submit(soon(t), &Batch{Ops: []Op{a.op(b, rdma.Write, 0, 1<<19, 100)}})
		if err != nil {
			t.Fatal(err)
		}
		if err := tr.Wait(soon(t)); err != nil || !bytes.Equal(a.b[:100], b.b[1<<19:][:100]) {
			t.Fatal(err)
		}
	}
}

// TestDeviceCallsPerMessage: a stream of batches costs at most a call of cgo for 16 writes, polling
// included.
func TestDeviceCallsPerMessage(t *testing.T) {
	const length, batches = 64, 200
	p, names := rdmatest.Devices(t, verbs.Load)
	a, b := newEndsOver(t, p, [2]string{names[0], names[0]}, 16, 1, 4*length, 1<<20, Config{})
	defer b.close()
	defer a.close()
	batch := &Batch{}
	for i := range uint64(length) { // apart, so that each is a request
		batch.Ops = append(batch.Ops, a.op(b, rdma.Write, 64*i, 128*i, 64))
	}
	var under []*Transfer
	polls, late := 0, time.Now().Add(time.Minute)
	before := runtime.NumCgoCall()
	for done := 0; done < batches; {
		if len(under) < 2 && done+len(under) < batches { // there is room
			tr, err := a.s.Submit(soon(t), batch)
			if err != nil {
				t.Fatal(err)
			}
			under = append(under, tr)
			continue
		}
		n, err := a.p.Poll()
		if err != nil || time.Now().After(late) {
			t.Fatalf("%d of %d batches, %v", done, batches, err)
		}
		if n == 0 { // what a waiting program does with its time is its own matter
			polls++
		}
		for len(under) > 0 && under[0].Ended() {
			if err := under[0].Err(); err != nil {
				t.Fatal(err)
			}
			under = under[1:]
			done++
		}
	}
	calls := int(runtime.NumCgoCall()-before) - polls
	if calls < 2 || calls > batches*length/16 {
		t.Errorf("%d calls of cgo for %d writes, want at most one for 16", calls, batches*length)
	}
	t.Logf("%d writes: %d calls of cgo, and %d polls without a completion", batches*length, calls, polls)
}

// TestDeviceReplacesWhatCannotBeReset: on a device that cannot reset queue pairs, a set that has
// failed ends every transfer, refuses Reset, and is replaced by another one.
func TestDeviceReplacesWhatCannotBeReset(t *testing.T) {
	a, b := deviceEnds(t, rdma.Quirks{NoReset: true}, 2, 16, 1<<20, Config{Chunk: 4})
	for round := range 3 {
		batch := &Batch{}
		for i := range uint64(100) {
			batch.Ops = append(batch.Ops, a.op(b, rdma.Write, 0, i<<12, 2<<10))
		}
		batch.Ops[50].RemoteKey++
		tr, err := a.s.Submit(soon(t), batch)
		if err == nil {
			err = tr.Wait(soon(t))
		}
		if err == nil {
			t.Fatalf("round %d: a write with a wrong key has ended well", round)
		}
		b.s.Fail(errors.New("the peer has failed"))
		for _, e := range []*end{a, b} {
			if err := e.s.Reset(soon(t), nil); !errors.Is(err, errors.ErrUnsupported) {
				t.Fatalf("round %d: reset: %v, want %v", round, err, errors.ErrUnsupported)
			}
			if err := e.s.Close(); err != nil {
				t.Fatal(err)
			}
		}
		if err := join(a, b); err != nil {
			t.Fatal(err)
		}
		a.b[0] = byte(round + 1)
		tr, err = a.s.Submit(soon(t), &Batch{Ops: []Op{a.op(b, rdma.Write, 0, 1<<19, 100)}})
		if err != nil {
			t.Fatal(err)
		}
		if err := tr.Wait(soon(t)); err != nil || !bytes.Equal(a.b[:100], b.b[1<<19:][:100]) {
			t.Fatal(err)
		}
	}
}
