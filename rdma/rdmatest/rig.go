package rdmatest

import (
	"bytes"
	"fmt"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"
	"unsafe"

	"tutti/mem"
	"tutti/rdma"
)

// patience bounds every wait. It is generous: a device may be emulated on a busy machine.
const patience = 30 * time.Second

// all is the access of memory and of queue pairs that no test restricts.
const all = rdma.LocalWrite | rdma.RemoteWrite | rdma.RemoteRead

// rig is an open device, and closes what it made.
type rig struct {
	t *testing.T
	s Subject
	rdma.Device

	events chan rdma.Event
}

func newRig(t *testing.T, s Subject) *rig {
	t.Helper()
	r := &rig{t: t, s: s, events: make(chan rdma.Event, 1024)}
	d, err := s.Provider.Open(s.Device, func(e rdma.Event) { r.events <- e })
	if err != nil {
		t.Fatal(err)
	}
	r.Device = d
	r.atEnd("device", d.Close)
	return r
}

// atEnd closes something at the end of the test, unless it is closed.
func (r *rig) atEnd(what string, end func() error) {
	r.t.Cleanup(func() {
		if err := end(); err != nil && !closed(err) {
			r.t.Errorf("close %s: %v", what, err)
		}
	})
}

// event waits for an event of a kind.
func (r *rig) event(kind rdma.EventKind) rdma.Event {
	r.t.Helper()
	late := time.After(patience)
	for {
		select {
		case e := <-r.events:
			if e.Kind == kind {
				return e
			}
			r.t.Logf("meanwhile: %v", e)
		case <-late:
			r.t.Fatalf("no event %v", kind)
		}
	}
}

// region is registered memory.
type region struct {
	rdma.MR
	b []byte
}

// memory registers n bytes. They begin off bytes behind the begin of a page.
func (r *rig) memory(n, off int, access rdma.Access) *region {
	r.t.Helper()
	b := pages(n + off)[off:][:n:n]
	m, err := r.Register(mem.Host(b, mem.Anywhere), access)
	if err != nil {
		r.t.Fatal(err)
	}
	r.atEnd("memory", m.Close)
	return &region{m, b}
}

// pages returns n bytes from the begin of a page.
func pages(n int) []byte {
	const page = 4096
	b := make([]byte, n+page)
	skip := -int(uintptr(unsafe.Pointer(unsafe.SliceData(b)))) & (page - 1)
	return b[skip:][:n:n]
}

func addressOf(b []byte) uint64 { return uint64(uintptr(unsafe.Pointer(unsafe.SliceData(b)))) }

// at returns the address of offset off.
func (m *region) at(off int) uint64 { return addressOf(m.b) + uint64(off) }

// part returns n bytes at offset off as a segment.
func (m *region) part(off, n int) rdma.Segment {
	return rdma.Segment{Address: m.at(off), Key: m.LocalKey(), Len: uint32(n)}
}

// segs returns all of m as the segments of a request.
func (m *region) segs() []rdma.Segment { return []rdma.Segment{m.part(0, len(m.b))} }

// fill writes a pattern that depends on seed.
func (m *region) fill(seed int) {
	x := uint32(seed)*2654435761 + 1
	for i := range m.b {
		x = x*1664525 + 1013904223
		m.b[i] = byte(x >> 24)
	}
}

func (r *rig) cq(depth int, wake func()) rdma.CQ {
	r.t.Helper()
	q, err := r.NewCQ(depth, wake)
	if err != nil {
		r.t.Fatal(err)
	}
	r.atEnd("completion queue", q.Close)
	return q
}

func (r *rig) qp(cfg rdma.QPConfig) rdma.QP {
	r.t.Helper()
	q, err := r.NewQP(cfg)
	if err != nil {
		r.t.Fatal(err)
	}
	r.atEnd("queue pair", q.Close)
	return q
}

// end is one end of a connection, with a completion queue of its own.
type end struct {
	rdma.QP
	r  *rig
	cq rdma.CQ
}

// pair makes two ends, which are not connected. Zero values of cfg have defaults.
func (r *rig) pair(cfg rdma.QPConfig) (a, b *end) {
	r.t.Helper()
	for _, d := range []struct {
		at   *int
		want int
	}{{&cfg.SendDepth, 16}, {&cfg.RecvDepth, 16}, {&cfg.Segments, 1}} {
		if *d.at == 0 {
			*d.at = d.want
		}
	}
	var ends [2]*end
	for i := range ends {
		q := r.cq(2*(cfg.SendDepth+cfg.RecvDepth)+64, nil)
		cfg.Send, cfg.Recv = q, q
		ends[i] = &end{QP: r.qp(cfg), r: r, cq: q}
	}
	return ends[0], ends[1]
}

// route returns the route from q to peer. change (may be nil) changes it.
func (r *rig) route(q, peer rdma.QP, change func(*rdma.Route)) *rdma.Route {
	r.t.Helper()
	p, err := r.Port(1)
	if err != nil {
		r.t.Fatal(err)
	}
	gids, err := r.GIDs(1)
	if err != nil {
		r.t.Fatal(err)
	}
	g, err := rdma.ChooseGID(gids, "")
	if err != nil {
		r.t.Fatal(err)
	}
	psn := func(n uint32) uint32 { return n * 7919 & 0xffffff }
	route := &rdma.Route{Port: 1, GIDIndex: g.Index, Global: true, MTU: min(p.MTU, 1024), PSN: psn(q.Number()),
		Remote: peer.Number(), RemotePSN: psn(peer.Number()), LID: p.LID, GID: g.GID,
		Reads:   min(r.Attributes().MaxReads, 4),
		Timeout: 17, Retries: 7, RNRRetries: 7, HopLimit: 64}
	if change != nil {
		change(route)
	}
	return route
}

// join brings q to Ready, towards peer.
func (r *rig) join(q, peer rdma.QP, access rdma.Access, change func(*rdma.Route)) {
	r.t.Helper()
	if err := q.Init(1, access); err != nil {
		r.t.Fatal(err)
	}
	if err := q.Connect(r.route(q, peer, change)); err != nil {
		r.t.Fatal(err)
	}
}

// connected makes a connection.
func (r *rig) connected(cfg rdma.QPConfig, change func(*rdma.Route)) (a, b *end) {
	r.t.Helper()
	a, b = r.pair(cfg)
	r.join(a, b, all, change)
	r.join(b, a, all, change)
	return a, b
}

// post posts a chain, all of it.
func (e *end) post(chain ...rdma.SendRequest) {
	e.r.t.Helper()
	if n, err := e.Post(chain); n != len(chain) || err != nil {
		e.r.t.Fatalf("posted %d of %d: %v", n, len(chain), err)
	}
}

// receive posts receives, all of them.
func (e *end) receive(chain ...rdma.RecvRequest) {
	e.r.t.Helper()
	if n, err := e.PostRecv(chain); n != len(chain) || err != nil {
		e.r.t.Fatalf("posted %d of %d receives: %v", n, len(chain), err)
	}
}

// take waits for n completions.
func take(t *testing.T, q rdma.CQ, n int) []rdma.Completion {
	t.Helper()
	var got []rdma.Completion
	out := make([]rdma.Completion, 100)
	for late := time.Now().Add(patience); len(got) < n; runtime.Gosched() {
		i, err := q.Poll(out)
		if err != nil {
			t.Fatal(err)
		}
		if i > rdma.PollBatch {
			t.Fatalf("%d completions at once, want at most %d", i, rdma.PollBatch)
		}
		got = append(got, out[:i]...)
		if i == 0 && time.Now().After(late) {
			t.Fatalf("%d completions, want %d: %+v", len(got), n, got)
		}
	}
	if len(got) > n {
		t.Fatalf("%d completions, want %d: %+v", len(got), n, got)
	}
	return got
}

func (e *end) take(n int) []rdma.Completion {
	e.r.t.Helper()
	return take(e.r.t, e.cq, n)
}

// none checks that nothing has completed.
func (e *end) none() {
	e.r.t.Helper()
	if n, err := e.cq.Poll(make([]rdma.Completion, 1)); n != 0 || err != nil {
		e.r.t.Errorf("%d completions (%v), want none", n, err)
	}
}

// done waits for the next completion, which has to be that of a request that ended well.
func (e *end) done(id uint64, op rdma.Opcode) rdma.Completion {
	e.r.t.Helper()
	c := e.take(1)[0]
	if c.ID != id || c.Status != rdma.Success || c.Op != op || c.QP != e.Number() {
		e.r.t.Fatalf("completion %+v, want %v %d of queue pair %d to succeed", c, op, id, e.Number())
	}
	return c
}

// failed waits for the next completion, which has to be a failure with one of the statuses.
func (e *end) failed(id uint64, want ...rdma.Status) {
	e.r.t.Helper()
	c := e.take(1)[0]
	if c.ID != id || c.QP != e.Number() || !slices.Contains(want, c.Status) {
		e.r.t.Fatalf("completion %+v (%v), want %d of queue pair %d with %v", c, c.Status, id, e.Number(), want)
	}
}

// reaches waits until the queue pair is in a state.
func (e *end) reaches(want rdma.State) {
	e.r.t.Helper()
	for late := time.Now().Add(patience); ; runtime.Gosched() {
		got, err := e.State()
		if err != nil {
			e.r.t.Fatal(err)
		}
		if got == want {
			return
		}
		if time.Now().After(late) {
			e.r.t.Fatalf("state %v, want %v", got, want)
		}
	}
}

// same checks bytes.
func same(t *testing.T, what string, got, want []byte) {
	t.Helper()
	if bytes.Equal(got, want) {
		return
	}
	for i := range got {
		if got[i] != want[i] {
			t.Fatalf("%s: byte %d of %d is %#x, want %#x", what, i, len(got), got[i], want[i])
		}
	}
}

// writeOf is a signaled write of src to off of dst.
func writeOf(id uint64, src *region, dst *region, off int) rdma.SendRequest {
	return rdma.SendRequest{ID: id, Op: rdma.Write, Segments: src.segs(), RemoteAddress: dst.at(off),
		RemoteKey: dst.RemoteKey(), Signaled: true}
}

// sendOf is a signaled send of src.
func sendOf(id uint64, src *region) rdma.SendRequest {
	return rdma.SendRequest{ID: id, Op: rdma.Send, Segments: src.segs(), Signaled: true}
}

// bell counts the calls of a wake function and lets a goroutine wait for one.
type bell struct {
	rung  chan struct{}
	count atomic.Int64
}

func newBell() *bell { return &bell{rung: make(chan struct{}, 1)} }

func (b *bell) ring() {
	b.count.Add(1)
	select {
	case b.rung <- struct{}{}:
	default:
	}
}

func (b *bell) wait() error {
	late := time.NewTimer(patience)
	defer late.Stop()
	select {
	case <-b.rung:
		return nil
	case <-late.C:
		return fmt.Errorf("no wake-up in %v", patience)
	}
}

// group runs functions at the same time and waits for them.
func group(fs ...func()) {
	var wg sync.WaitGroup
	for _, f := range fs {
		wg.Go(f)
	}
	wg.Wait()
}
