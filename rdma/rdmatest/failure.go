package rdmatest

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"runtime"
	"slices"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"tutti/rdma"
)

// remoteAccess: memory that is not open to peers is not accessed, and the connection fails.
func remoteAccess(t *testing.T, s Subject) {
	r := newRig(t, s)
	src := r.memory(64, 0, all)
	src.fill(1)
	open, readable, writable := r.memory(4096, 0, all), r.memory(4096, 0, rdma.RemoteRead), r.memory(4096, 0,
		rdma.RemoteWrite|rdma.LocalWrite)
	gone := r.memory(4096, 0, all)
	if err := gone.Close(); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		name   string
		op     rdma.Opcode
		m      *region
		off    int
		key    uint32
		access rdma.Access // of the target's queue pair
	}{
		{"behind the end", rdma.Write, open, 4096 - 63, open.RemoteKey(), all},
		{"before the begin", rdma.Write, open, -1, open.RemoteKey(), all},
		{"far away", rdma.Write, open, 1 << 40, open.RemoteKey(), all},
		{"with a wrong key", rdma.Write, open, 0, open.RemoteKey() ^ 0x55, all},
		{"of a closed region", rdma.Write, gone, 0, gone.RemoteKey(), all},
		{"not for writing", rdma.Write, readable, 0, readable.RemoteKey(), all},
		{"not for reading", rdma.Read, writable, 0, writable.RemoteKey(), all},
		{"read behind the end", rdma.Read, open, 4096 - 63, open.RemoteKey(), all},
		{"at a queue pair without the right", rdma.Write, open, 0, open.RemoteKey(), rdma.LocalWrite},
		{"with a number", rdma.WriteImm, open, 4096, open.RemoteKey(), all},
	} {
		t.Run(c.name, func(t *testing.T) {
			r := *r
			r.t = t
			a, b := r.pair(rdma.QPConfig{})
			r.join(a, b, all, nil)
			r.join(b, a, c.access, nil)
			c.m.fill(2)
			want, here := slices.Clone(c.m.b), slices.Clone(src.b)
			if c.op == rdma.WriteImm {
				b.receive(rdma.RecvRequest{ID: 9})
			}
			a.post(rdma.SendRequest{ID: 1, Op: c.op, Segments: src.segs(), RemoteAddress: c.m.at(c.off),
				RemoteKey: c.key,
				Signaled:  true})
			// A queue pair without the right may call the request invalid.
			ok := []rdma.Status{rdma.RemoteAccess}
			if c.access != all {
				ok = append(ok, rdma.RemoteInvalid)
			}
			a.failed(1, ok...)
			a.reaches(rdma.StateFailed)
			b.reaches(rdma.StateFailed)
			same(t, "the target", c.m.b, want)
			same(t, "the source", src.b, here)
		})
	}
}

// localProtection: memory that is not registered here for it is not used. Soft-RoCE calls some of
// these requests malformed.
func localProtection(t *testing.T, s Subject) {
	r := newRig(t, s)
	src, dst := r.memory(4096, 0, 0), r.memory(8192, 0, all)
	gone := r.memory(64, 0, all)
	if err := gone.Close(); err != nil {
		t.Fatal(err)
	}
	for name, c := range map[string]struct {
		op  rdma.Opcode
		seg rdma.Segment
	}{
		"a wrong key":           {rdma.Write, rdma.Segment{Address: src.at(0), Key: src.LocalKey() ^ 0x55, Len: 64}},
		"behind the end":        {rdma.Write, src.part(4000, 97)},
		"a closed region":       {rdma.Write, rdma.Segment{Address: gone.at(0), Key: gone.LocalKey(), Len: 64}},
		"read into a read-only": {rdma.Read, src.part(0, 64)},
	} {
		t.Run(name, func(t *testing.T) {
			r := *r
			r.t = t
			a, _ := r.connected(rdma.QPConfig{}, nil)
			want := slices.Clone(src.b)
			a.post(rdma.SendRequest{ID: 1, Op: c.op, Segments: []rdma.Segment{c.seg}, RemoteAddress: dst.at(0),
				RemoteKey: dst.RemoteKey(), Signaled: true})
			a.failed(1, rdma.LocalProtection, rdma.LocalAccess, rdma.LocalQPOperation)
			a.reaches(rdma.StateFailed)
			same(t, "the source", src.b, want)
		})
	}
}

// longMessage: a message longer than its receive is not placed behind it, and both ends learn of
// it. Soft-RoCE calls the receive malformed.
func longMessage(t *testing.T, s Subject) {
	r := newRig(t, s)
	a, b := r.connected(rdma.QPConfig{}, nil)
	src, dst := r.memory(65, 0, 0), r.memory(128, 0, all)
	src.fill(1)
	dst.fill(2)
	kept := slices.Clone(dst.b[64:])
	b.receive(rdma.RecvRequest{ID: 1, Segments: []rdma.Segment{dst.part(0, 64)}})
	a.post(sendOf(2, src))
	b.failed(1, rdma.LocalLength, rdma.LocalQPOperation)
	a.failed(2, rdma.RemoteInvalid, rdma.RemoteOperation)
	same(t, "behind the receive", dst.b[64:], kept)
}

// noReceive: a send to a queue pair without a receive fails after its repetitions.
func noReceive(t *testing.T, s Subject) {
	r := newRig(t, s)
	a, b := r.connected(rdma.QPConfig{}, func(o *rdma.Route) { o.RNRRetries = 2 })
	src := r.memory(8, 0, 0)
	a.post(sendOf(1, src), sendOf(2, src))
	got := a.take(2)
	if got[0].ID != 1 || got[0].Status != rdma.RNRRetryExceeded || got[1].ID != 2 || got[1].Status != rdma.Flushed {
		t.Errorf("%+v", got)
	}
	b.none()
}

// lateReceive: with repetitions for ever a send waits for its receive.
func lateReceive(t *testing.T, s Subject) {
	r := newRig(t, s)
	a, b := r.connected(rdma.QPConfig{}, nil)
	src, dst := r.memory(8, 0, 0), r.memory(8, 0, all)
	src.fill(3)
	a.post(sendOf(1, src))
	a.none()
	b.receive(rdma.RecvRequest{ID: 2, Segments: dst.segs()})
	b.done(2, rdma.Recv)
	a.done(1, rdma.Send)
	same(t, "data", dst.b, src.b)
}

// noAnswer: requests to a queue pair that is not there fail after their repetitions.
func noAnswer(t *testing.T, s Subject) {
	r := newRig(t, s)
	a, b := r.connected(rdma.QPConfig{}, func(o *rdma.Route) { o.Timeout, o.Retries = 12, 1 }) // 17 ms
	src, dst := r.memory(8, 0, 0), r.memory(8, 0, all)
	if err := b.Close(); err != nil {
		t.Fatal(err)
	}
	a.post(writeOf(1, src, dst, 0), writeOf(2, src, dst, 0))
	got := a.take(2)
	if got[0].ID != 1 || got[0].Status != rdma.RetryExceeded || got[1].ID != 2 || got[1].Status != rdma.Flushed {
		t.Errorf("%+v", got)
	}
	a.reaches(rdma.StateFailed)
}

// failFlushes: after Fail everything that was posted completes, in order, and what is posted later
// does so with Flushed.
func failFlushes(t *testing.T, s Subject) {
	r := newRig(t, s)
	a, b := r.connected(rdma.QPConfig{SendDepth: 32, RecvDepth: 32}, nil)
	m := r.memory(8, 0, all)
	var sends []rdma.SendRequest
	var recvs []rdma.RecvRequest
	for i := range 20 {
		sends = append(sends, rdma.SendRequest{ID: uint64(i), Op: rdma.Send, Segments: m.segs(), Signaled: i%2 == 0})
		recvs = append(recvs, rdma.RecvRequest{ID: uint64(100 + i), Segments: m.segs()})
	}
	a.post(sends...) // b has no receives
	a.receive(recvs...)
	if err := a.Fail(); err != nil {
		t.Fatal(err)
	}
	a.post(rdma.SendRequest{ID: 20, Op: rdma.Send, Segments: m.segs()})
	a.receive(rdma.RecvRequest{ID: 120, Segments: m.segs()})
	next, nextRecv := uint64(0), uint64(100)
	for _, c := range a.take(42) {
		if c.Status != rdma.Flushed || c.QP != a.Number() {
			t.Errorf("%+v (%v), want it flushed", c, c.Status)
		}
		switch c.ID {
		case next:
			next++
		case nextRecv:
			nextRecv++
		default:
			t.Fatalf("%+v, want %d or %d", c, next, nextRecv)
		}
	}
	a.none()
	b.none()
}

// flushAfterError: the requests behind one that failed are flushed, and those before it succeed.
func flushAfterError(t *testing.T, s Subject) {
	r := newRig(t, s)
	a, _ := r.connected(rdma.QPConfig{}, nil)
	src, dst := r.memory(64, 0, 0), r.memory(64, 0, all)
	chain := []rdma.SendRequest{writeOf(0, src, dst, 0), writeOf(1, src, dst, 0), writeOf(2, src, dst, 1),
		writeOf(3, src, dst, 0), writeOf(4, src, dst, 0)}
	a.post(chain...)
	want := []rdma.Status{rdma.Success, rdma.Success, rdma.RemoteAccess, rdma.Flushed, rdma.Flushed}
	for i, c := range a.take(5) {
		if c.ID != uint64(i) || c.Status != want[i] {
			t.Errorf("completion %d: %+v (%v), want %v", i, c, c.Status, want[i])
		}
	}
	a.reaches(rdma.StateFailed)
	a.post(writeOf(5, src, dst, 0))
	a.failed(5, rdma.Flushed)
}

// resetAndReuse: a queue pair that was reset serves a new connection, and no request of the old one
// completes.
func resetAndReuse(t *testing.T, s Subject) {
	r := newRig(t, s)
	if r.Attributes().Quirks.NoReset {
		t.Log("this device's queue pairs cannot be reset")
		return
	}
	a, b := r.pair(rdma.QPConfig{})
	src, dst := r.memory(64, 0, 0), r.memory(64, 0, all)
	for round := range 5 {
		r.join(a, b, all, nil)
		r.join(b, a, all, nil)
		src.fill(round)
		a.post(writeOf(uint64(round), src, dst, 0))
		a.done(uint64(round), rdma.Write)
		same(t, "data", dst.b, src.b)
		// What is under way now never completes.
		b.receive(rdma.RecvRequest{ID: 100, Segments: dst.segs()})
		a.receive(rdma.RecvRequest{ID: 100, Segments: dst.segs()})
		if round%2 == 1 { // from Failed
			for _, e := range []*end{a, b} {
				if err := e.Fail(); err != nil {
					t.Fatal(err)
				}
				e.failed(100, rdma.Flushed)
			}
		}
		for _, e := range []*end{a, b} {
			if err := e.Reset(); err != nil {
				t.Fatal(err)
			}
			e.reaches(rdma.StateReset)
			e.none()
		}
	}
}

// closeUnderWay: a queue pair is closed with requests under way; none of them completes, and its
// completion queue serves others.
func closeUnderWay(t *testing.T, s Subject) {
	r := newRig(t, s)
	c := r.cq(256, nil)
	src, dst := r.memory(8, 0, 0), r.memory(8, 0, all)
	for range 5 {
		cfg := rdma.QPConfig{Send: c, Recv: c, SendDepth: 16, RecvDepth: 16}
		a, b := &end{QP: r.qp(cfg), r: r, cq: c}, &end{QP: r.qp(cfg), r: r, cq: c}
		r.join(a, b, all, nil)
		r.join(b, a, all, nil)
		a.post(sendOf(66, src), sendOf(67, src)) // b has no receive
		a.receive(rdma.RecvRequest{ID: 68, Segments: dst.segs()})
		if err := a.Close(); err != nil {
			t.Fatal(err)
		}
		x, y := &end{QP: r.qp(cfg), r: r, cq: c}, &end{QP: r.qp(cfg), r: r, cq: c}
		r.join(x, y, all, nil)
		r.join(y, x, all, nil)
		x.post(writeOf(1, src, dst, 0))
		if got := x.take(1)[0]; got.ID != 1 || got.Status != rdma.Success || got.QP != x.Number() {
			t.Fatalf("%+v", got)
		}
		x.none()
		for _, e := range []*end{b, x, y} {
			if err := e.Close(); err != nil {
				t.Fatal(err)
			}
		}
	}
}

// sharedQueue: the completions of several queue pairs in one queue say whose they are.
func sharedQueue(t *testing.T, s Subject) {
	r := newRig(t, s)
	const pairs, each = 4, 16
	c := r.cq(pairs*each*2, nil)
	src, dst := r.memory(8, 0, 0), r.memory(8, 0, all)
	next := map[uint32]uint64{}
	var ends []*end
	for range pairs {
		cfg := rdma.QPConfig{Send: c, Recv: c, SendDepth: each, RecvDepth: 1}
		a, b := &end{QP: r.qp(cfg), r: r, cq: c}, &end{QP: r.qp(cfg), r: r, cq: c}
		r.join(a, b, all, nil)
		r.join(b, a, all, nil)
		ends = append(ends, a)
		next[a.Number()] = 0
	}
	for i := range each {
		for _, e := range ends {
			e.post(writeOf(uint64(i), src, dst, 0))
		}
	}
	for _, got := range take(t, c, pairs*each) {
		want, known := next[got.QP]
		if !known || got.ID != want || got.Status != rdma.Success {
			t.Fatalf("%+v, want request %d (%v)", got, want, known)
		}
		next[got.QP]++
	}
}

// noLostWakeUp: a thread that polls once more after Arm, and finds nothing, is woken by the next
// completion, at whatever moment that comes.
func noLostWakeUp(t *testing.T, s Subject) {
	r := newRig(t, s)
	const total, window = 2000, 8
	rings := newBell()
	c := r.cq(64, rings.ring)
	other := r.cq(64, nil)
	cfg := rdma.QPConfig{SendDepth: 2 * window, RecvDepth: 2 * window, Send: other, Recv: c}
	target := r.qp(cfg)
	cfg.Recv = other
	source := &end{QP: r.qp(cfg), r: r, cq: other}
	r.join(source, target, all, nil)
	r.join(target, source, all, nil)
	receive := func(n int) error {
		chain := make([]rdma.RecvRequest, n)
		_, err := target.PostRecv(chain)
		return err
	}
	if err := receive(window); err != nil {
		t.Fatal(err)
	}
	var got atomic.Int64
	var failed atomic.Bool
	sleeps := 0
	group(func() { // receives
		out := make([]rdma.Completion, 64)
		for got.Load() < total {
			n, err := c.Poll(out)
			if n == 0 && err == nil {
				if err = c.Arm(); err == nil {
					n, err = c.Poll(out)
				}
				if n == 0 && err == nil {
					sleeps++
					err = rings.wait()
				}
			}
			if err == nil && n > 0 {
				err = receive(n)
			}
			if err != nil {
				t.Errorf("after %d of %d: %v", got.Load(), total, err)
				failed.Store(true)
				return
			}
			got.Add(int64(n))
		}
	}, func() { // sends, at random moments
		rng := rand.New(rand.NewPCG(3, 4))
		out := make([]rdma.Completion, 64)
		under, late := 0, time.Now().Add(4*patience)
		for sent := 0; (sent < total || under > 0) && !failed.Load(); {
			if sent < total && under < window && rng.IntN(3) > 0 {
				if _, err := source.Post([]rdma.SendRequest{{Op: rdma.Send, Signaled: true}}); err != nil {
					t.Error(err)
					return
				}
				sent++
				under++
			}
			for range rng.IntN(20) {
				runtime.Gosched()
			}
			n, err := other.Poll(out)
			if err != nil || time.Now().After(late) {
				t.Errorf("%d sent: %v", sent, err)
				return
			}
			under -= n
		}
	})
	if sleeps == 0 || rings.count.Load() == 0 {
		t.Errorf("%d sleeps, %d calls of wake: nothing was tested", sleeps, rings.count.Load())
	}
}

// wakeEndsWithClose: wake is not called after Close has returned.
func wakeEndsWithClose(t *testing.T, s Subject) {
	r := newRig(t, s)
	src, dst := r.memory(8, 0, 0), r.memory(8, 0, all)
	for range 10 {
		var over, after atomic.Bool
		c := r.cq(16, func() {
			if over.Load() {
				after.Store(true)
			}
		})
		cfg := rdma.QPConfig{Send: c, Recv: c, SendDepth: 4, RecvDepth: 4}
		a, b := &end{QP: r.qp(cfg), r: r, cq: c}, &end{QP: r.qp(cfg), r: r, cq: c}
		r.join(a, b, all, nil)
		r.join(b, a, all, nil)
		if err := c.Arm(); err != nil {
			t.Fatal(err)
		}
		a.post(writeOf(1, src, dst, 0))
		for _, close := range []func() error{a.Close, b.Close, c.Close} {
			if err := close(); err != nil {
				t.Fatal(err)
			}
		}
		over.Store(true)
		runtime.Gosched()
		if after.Load() {
			t.Fatal("wake was called after Close")
		}
	}
}

// overflow: a completion queue with more completions than it holds says that it is unusable.
func overflow(t *testing.T, s Subject) {
	r := newRig(t, s)
	c := r.cq(4, nil)
	const depth = 64
	cfg := rdma.QPConfig{Send: c, Recv: c, SendDepth: depth, RecvDepth: 1}
	a, b := &end{QP: r.qp(cfg), r: r, cq: c}, &end{QP: r.qp(cfg), r: r, cq: c}
	r.join(a, b, all, nil)
	r.join(b, a, all, nil)
	src, dst := r.memory(8, 0, 0), r.memory(8, 0, all)
	late := time.Now().Add(patience)
	for posted := 0; posted <= c.Depth(); {
		if time.Now().After(late) {
			t.Fatalf("%d requests posted, want more than %d", posted, c.Depth())
		}
		chain := make([]rdma.SendRequest, depth)
		for i := range chain {
			chain[i] = writeOf(uint64(i), src, dst, 0)
		}
		n, err := a.Post(chain)
		if err != nil && !errors.Is(err, syscall.ENOMEM) {
			t.Fatal(err)
		}
		if posted += n; n == 0 {
			runtime.Gosched()
		}
	}
	r.event(rdma.CQFailed)
	out := make([]rdma.Completion, 64)
	for range c.Depth() + 1 {
		if _, err := c.Poll(out); err != nil {
			return
		}
	}
	t.Error("an overflowed queue is polled without an error")
}

// concurrency: the methods of a queue pair may be called at the same time, also Close.
func concurrency(t *testing.T, s Subject) {
	r := newRig(t, s)
	m := r.memory(64, 0, all)
	for round := range 8 {
		a, b := r.connected(rdma.QPConfig{SendDepth: 64, RecvDepth: 64}, nil)
		allowed := func(what string, err error) bool {
			if err == nil || errors.Is(err, syscall.ENOMEM) {
				return true
			}
			if !closed(err) {
				t.Errorf("round %d, %s: %v", round, what, err)
			}
			return false
		}
		// Each goes on until the queue pair is closed, or nothing more fits.
		repeat := func(what string, f func() error) func() {
			return func() {
				for range 200 {
					if !allowed(what, f()) {
						return
					}
				}
			}
		}
		group(
			repeat("post", func() error {
				_, err := a.Post([]rdma.SendRequest{writeOf(1, m, m, 0)})
				return err
			}),
			repeat("post receives", func() error {
				_, err := a.PostRecv([]rdma.RecvRequest{{ID: 2, Segments: m.segs()}})
				return err
			}),
			repeat("query", func() error { _, err := a.State(); return err }),
			repeat("poll", func() error { _, err := a.cq.Poll(make([]rdma.Completion, 64)); return err }),
			func() {
				for range round * 100 {
					runtime.Gosched()
				}
				if round%2 == 1 {
					allowed("fail", a.Fail())
				}
				if err := a.Close(); err != nil {
					t.Error(fmt.Errorf("close: %w", err))
				}
			},
		)
		if err := b.Close(); err != nil {
			t.Error(err)
		}
	}
}
