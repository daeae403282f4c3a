package queue

import (
	"errors"
	"fmt"
	"syscall"
	"testing"

	"tutti/rdma"
)

// world is a device in memory whose every step the test chooses. It checks what a set asks of it.
type world struct {
	rdma.Device
	t     testing.TB
	cqs   []*modelCQ
	qps   []*modelQP
	event string // violation of a rule
}

func (w *world) Name() string { return "model0" }

func (w *world) NewCQ(depth int, wake func()) (rdma.CQ, error) {
	c := &modelCQ{w: w, depth: depth, wake: wake}
	w.cqs = append(w.cqs, c)
	return c, nil
}

func (w *world) violation(format string, args ...any) {
	if w.event == "" {
		w.event = fmt.Sprintf(format, args...)
	}
}

type modelCQ struct {
	w      *world
	depth  int
	wake   func()
	ready  []rdma.Completion
	idle   func() // called by Poll if nothing is ready
	broken error
}

func (c *modelCQ) Poll(out []rdma.Completion) (int, error) {
	if c.broken != nil {
		return 0, c.broken
	}
	if len(c.ready) == 0 && c.idle != nil {
		c.idle()
	}
	n := copy(out, c.ready)
	c.ready = c.ready[n:]
	return n, nil
}
func (c *modelCQ) Arm() error   { return nil }
func (c *modelCQ) Depth() int   { return c.depth }
func (c *modelCQ) Close() error { return nil }

func (c *modelCQ) put(x rdma.Completion) {
	if c.ready = append(c.ready, x); len(c.ready) > c.depth {
		c.w.violation("completion queue of %d overflowed", c.depth)
	}
}

// modelQP keeps what was posted, and ends it when the test says so.
type modelQP struct {
	w        *world
	cq       *modelCQ
	number   uint32
	limits   rdma.QPLimits
	state    rdma.State
	sends    []rdma.SendRequest
	receives []rdma.RecvRequest
	log      []rdma.SendRequest // all that were ever posted, with copies of segments
	keep     bool               // log
	// postFails is asked how many requests of a chain are posted; nil: all.
	postFails func(n int) int
	posting   func(chain []rdma.SendRequest)
	failing   func() // called in Fail, when it begins
	failFails bool
	noReset   bool
	closed    bool
}

func (w *world) newQP(c *modelCQ, depth, segments int) *modelQP {
	q := &modelQP{w: w, cq: c, number: uint32(100 + len(w.qps)), state: rdma.StateReady,
		limits: rdma.QPLimits{SendDepth: depth, RecvDepth: depth, SendSegments: segments, RecvSegments: segments}}
	w.qps = append(w.qps, q)
	return q
}

func (q *modelQP) Number() uint32              { return q.number }
func (q *modelQP) Limits() rdma.QPLimits       { return q.limits }
func (q *modelQP) State() (rdma.State, error)  { return q.state, nil }
func (q *modelQP) Init(int, rdma.Access) error { return nil }
func (q *modelQP) Connect(*rdma.Route) error   { q.state = rdma.StateReady; return nil }

func (q *modelQP) Fail() error {
	if q.failFails {
		return &rdma.Error{Call: "fail", Device: "model0", Errno: syscall.EIO}
	}
	if q.failing != nil {
		q.failing()
	}
	q.state = rdma.StateFailed
	return nil
}

func (q *modelQP) Reset() error {
	if q.noReset {
		return errors.ErrUnsupported
	}
	q.state, q.sends, q.receives = rdma.StateReset, nil, nil
	return nil
}

func (q *modelQP) Close() error {
	if q.closed {
		return rdma.ErrClosed
	}
	q.closed, q.sends, q.receives = true, nil, nil
	return nil
}

func (q *modelQP) Post(chain []rdma.SendRequest) (int, error) {
	n := len(chain)
	if q.posting != nil {
		q.posting(chain)
	}
	if q.postFails != nil {
		n = q.postFails(n)
	}
	if q.closed || q.state != rdma.StateReady && q.state != rdma.StateFailed {
		n = 0
	}
	for i, r := range chain {
		if len(r.Segments) > q.limits.SendSegments {
			q.w.violation("%d segments of at most %d", len(r.Segments), q.limits.SendSegments)
		}
		if r.Signaled != (i == len(chain)-1) {
			q.w.violation("request %d of a chain of %d has Signaled %v", i, len(chain), r.Signaled)
		}
	}
	for _, r := range chain[:n] {
		r.Segments = append([]rdma.Segment(nil), r.Segments...)
		q.sends = append(q.sends, r)
		if q.keep {
			q.log = append(q.log, r)
		}
	}
	if len(q.sends) > q.limits.SendDepth {
		q.w.violation("%d requests in a send queue of %d", len(q.sends), q.limits.SendDepth)
	}
	if n < len(chain) {
		return n, &rdma.Error{Call: "post", Device: "model0", Errno: syscall.ENOMEM}
	}
	return n, nil
}

func (q *modelQP) PostRecv(chain []rdma.RecvRequest) (int, error) {
	if q.receives = append(q.receives, chain...); len(q.receives) > q.limits.RecvDepth {
		q.w.violation("%d requests in a receive queue of %d", len(q.receives), q.limits.RecvDepth)
	}
	return len(chain), nil
}

// end completes the oldest request, which must exist. In a failed queue pair it is flushed.
func (q *modelQP) end(status rdma.Status) {
	r := q.sends[0]
	q.sends = q.sends[1:]
	if q.state == rdma.StateFailed {
		status = rdma.Flushed
	}
	if status != rdma.Success {
		q.state = rdma.StateFailed
	}
	if status != rdma.Success || r.Signaled {
		q.cq.put(rdma.Completion{ID: r.ID, QP: q.number, Status: status, Op: r.Op})
	}
}

// arrive completes the oldest receive with immediate data.
func (q *modelQP) arrive(imm uint32) {
	r := q.receives[0]
	q.receives = q.receives[1:]
	q.cq.put(rdma.Completion{ID: r.ID, QP: q.number, Op: rdma.RecvWriteImm, Imm: imm, HasImm: true})
}

// newModel returns a set of n queue pairs.
func newModel(t testing.TB, n, depth, segments int, cfg Config) (*world, *Poller, *Set) {
	w := &world{t: t}
	p, err := NewPoller(w, 2*n*depth)
	if err != nil {
		t.Fatal(err)
	}
	qps := []rdma.QP{}
	for range n {
		qps = append(qps, w.newQP(w.cqs[0], depth, segments))
	}
	s, err := New(p, qps, cfg)
	if err != nil {
		t.Fatal(err)
	}
	return w, p, s
}

// verify returns the first rule that is broken.
func (s *Set) verify() error {
	for _, q := range s.queues {
		q.mu.Lock()
		err := q.ledger.check()
		q.mu.Unlock()
		if err != nil {
			return fmt.Errorf("queue pair %d: %w", q.number, err)
		}
	}
	return nil
}
