package queue

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"tutti/internal/span"
	"tutti/rdma"
)

// Defaults of Config.
const (
	DefaultTimeout  = 10 * time.Millisecond
	DefaultDrain    = time.Second
	DefaultChunk    = 32
	DefaultMaxBytes = 1 << 30
	DefaultSpread   = 64 << 10
	DefaultPending  = 4096
)

// TimeoutVariable names the environment variable whose value stands for Config.Timeout where that
// is 0: a duration, or a number of seconds.
const TimeoutVariable = "TUTTI_RDMA_SQ_TIMEOUT"

// MaxQueues is the most queue pairs of a set.
const MaxQueues = 64

// ErrFailed is the error, wrapped, of what cannot be done because the set has failed. It wraps the
// cause too, but is no *rdma.StatusError: if the cause is one, that is the status of another
// request (see Set.Err).
var ErrFailed = errors.New("the queue pairs have failed")

// Config describes a Set. Zero values have defaults.
type Config struct {
	// Timeout is how long Submit waits for room in the send queues before it has posted anything:
	// that of TimeoutVariable, if it is set, else DefaultTimeout. Negative: not at all.
	Timeout time.Duration
	// Drain is how long a device may take to complete the requests of a failed queue pair, before
	// the queue pair is reset by force: DefaultDrain.
	Drain time.Duration
	// Chunk is the most requests that are posted with one call, of which the last one is signaled:
	// DefaultChunk, and at most half of the depth of the send queues.
	Chunk int
	// MaxBytes is the most of a request: DefaultMaxBytes, and at most 2 GiB. A port may take less
	// (rdma.Port.MaxBytes).
	MaxBytes uint64
	// Spread is the bytes for each queue pair from which a batch is divided over all:
	// DefaultSpread.
	Spread uint64
	// Pending is the most notifications that have come on some queue pairs of the set only. More
	// mean that the peer breaks the protocol: DefaultPending.
	Pending int
	// Notified is called with every notification of the peer, by the goroutine that polls: in Poll
	// or Serve, or in a call of Submit, Wait, Drain, Reset or Close. It must not block, and not
	// call the set or its poller. A notification may be lost if the set fails, also one of a batch
	// that has ended well at the peer. If Notified is nil, no receives are posted.
	Notified func(id uint32)
	// Failed is called when the set fails, once until Reset, with the cause, by the goroutine that
	// has it fail: one that polls, or one in Submit, Wait, Fail, Drain, Reset or Close, which fail
	// it too. It must not block, not take a lock that is held during such a call, and not call the
	// set or its poller.
	Failed func(cause error)
}

// A Set is the queue pairs of one device that lead to one peer. Its methods may be called from any
// goroutine.
type Set struct {
	poller *Poller
	cfg    Config
	queues []*queue
	turn   atomic.Uint32 // queue pair of the next small batch
	pool   sync.Pool     // of *submission

	changing sync.Mutex // Reset, Close

	mu     sync.Mutex
	cause  error // of the failure; nil: works
	parts  map[uint32][]uint32
	closed bool
}

// New makes a set of connected queue pairs, or ones in the state Init that will be connected before
// the first Submit. Both their completion queues are p.CQ. The peer's set has queue pairs in the
// same order. They allow remote writes, which is what flushes and notifications are, and belong to
// the set, unless there is an error: no other code calls their methods, and Close closes them.
func New(p *Poller, qps []rdma.QP, cfg Config) (*Set, error) {
	if len(qps) == 0 || len(qps) > MaxQueues {
		return nil, fmt.Errorf("rdma: a set of %d queue pairs: expected 1 to %d", len(qps), MaxQueues)
	}
	timeout, err := span.Parse(os.Getenv(TimeoutVariable))
	if err != nil {
		return nil, fmt.Errorf("rdma: %s=%q: %w", TimeoutVariable, os.Getenv(TimeoutVariable), err)
	}
	cfg.Timeout = cmp.Or(cfg.Timeout, timeout, DefaultTimeout)
	cfg.Drain = cmp.Or(cfg.Drain, DefaultDrain)
	cfg.Chunk = cmp.Or(cfg.Chunk, DefaultChunk)
	cfg.MaxBytes = min(cmp.Or(cfg.MaxBytes, DefaultMaxBytes), maxRequest)
	cfg.Spread = cmp.Or(cfg.Spread, DefaultSpread)
	cfg.Pending = cmp.Or(cfg.Pending, DefaultPending)
	s := &Set{poller: p, cfg: cfg, parts: map[uint32][]uint32{}}
	for i, qp := range qps {
		l := qp.Limits()
		if l.SendDepth < 1 || cfg.Notified != nil && l.RecvDepth < 1 {
			return nil, fmt.Errorf("rdma: queue pair %d has room for %d sends and %d receives: expected at least one",
				qp.Number(), l.SendDepth, l.RecvDepth)
		}
		s.queues = append(s.queues, &queue{set: s, index: i, qp: qp, number: qp.Number(), limits: l,
			ledger: newLedger(l.SendDepth)})
	}
	s.pool.New = func() any { return newSubmission(s) }
	for i, q := range s.queues {
		err := p.add(q)
		if err == nil {
			if err = q.renew(); err != nil {
				p.remove(q)
			}
		}
		if err != nil {
			for _, q := range s.queues[:i] {
				p.remove(q)
			}
			return nil, err
		}
	}
	return s, nil
}

// receives returns how many receives a queue has posted.
func (s *Set) receives(q *queue) int {
	if s.cfg.Notified == nil {
		return 0
	}
	return q.limits.RecvDepth
}

// Err returns why the set has failed, or nil.
func (s *Set) Err() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.cause
}

// failure returns the error of a call to a set that has failed.
func (s *Set) failure() error {
	if cause := s.Err(); cause != nil {
		return &failedError{cause}
	}
	return fmt.Errorf("rdma: %w", ErrFailed) // Fail is about to be called
}

// failedError says that a set has failed: see ErrFailed.
type failedError struct{ cause error }

func (e *failedError) Error() string { return fmt.Sprintf("rdma: %v: %v", ErrFailed, e.cause) }

func (e *failedError) Is(target error) bool { return target == ErrFailed || errors.Is(e.cause, target) }

func (e *failedError) As(target any) bool {
	_, status := target.(**rdma.StatusError)
	return !status && errors.As(e.cause, target)
}

// Fail moves all queue pairs to Failed, so that everything on them ends. It does not wait for that.
// The first cause counts.
func (s *Set) Fail(cause error) {
	s.mu.Lock()
	first := s.cause == nil
	if first {
		s.cause = cause
	}
	s.mu.Unlock()
	if !first {
		return
	}
	for _, q := range s.queues {
		q.fail()
	}
	if s.cfg.Failed != nil {
		s.cfg.Failed(cause)
	}
}

// Drain fails the set, and waits until none of its requests uses memory. If ctx ends before, or
// Config.Drain has passed, the queue pairs are reset by force. An error means that this has failed
// as well, and that memory may be in use.
func (s *Set) Drain(ctx context.Context) error {
	s.Fail(errors.New("drained"))
	var p pace
	defer p.stop()
	for _, q := range s.queues {
		q.fail() // the first caller of Fail may not have come to it yet
		for !q.drained() {
			n, err := s.poller.Poll()
			if err == nil && p.waited() < s.cfg.Drain && p.wait(ctx, n > 0, nil, 0) == nil {
				continue
			}
			if err := q.purge(); err != nil {
				return fmt.Errorf("rdma: queue pair %d uses memory, and can neither be reset nor closed: %w", q.number,
					err)
			}
		}
	}
	return nil
}

// Reset drains the set and resets its queue pairs. Then it calls connect for each, which has to
// move the queue pair to Ready, in agreement with the peer. What was submitted before has ended,
// and what comes later begins a new life, which may have failed, too, when Reset returns nil: see
// Err. It fails with errors.ErrUnsupported on a device that cannot reset queue pairs; the set has
// to be closed and made anew then, as after any other error.
func (s *Set) Reset(ctx context.Context, connect func(i int, qp rdma.QP) error) error {
	s.changing.Lock()
	defer s.changing.Unlock()
	if err := s.Drain(ctx); err != nil {
		return err
	}
	for _, q := range s.queues {
		if err := q.reset(); err != nil {
			return err
		}
	}
	s.poller.empty() // so that the new receives have room
	for i, q := range s.queues {
		if err := connect(i, q.qp); err != nil {
			return err
		}
	}
	s.mu.Lock()
	s.cause = nil
	clear(s.parts)
	s.mu.Unlock()
	var err error
	for _, q := range s.queues {
		if err = q.renew(); err != nil {
			s.Fail(err)
			break
		}
	}
	if s.Err() != nil { // Fail had no effect on queues that were not renewed yet
		for _, q := range s.queues {
			q.fail()
		}
	}
	return err
}

// Close closes the queue pairs. What is under way ends with rdma.ErrClosed. An error means that
// memory may be in use; Close may be called again then.
func (s *Set) Close() error {
	s.changing.Lock()
	defer s.changing.Unlock()
	if s.closed {
		return nil
	}
	s.Fail(rdma.ErrClosed)
	var errs []error
	for _, q := range s.queues {
		errs = append(errs, q.close())
	}
	if err := errors.Join(errs...); err != nil {
		return err
	}
	for _, q := range s.queues {
		s.poller.remove(q)
	}
	s.closed = true
	return nil
}

// notified counts a notification that has come on the queue pair with an index.
func (s *Set) notified(index int, imm uint32) {
	id := imm &^ spreadBit
	if imm&spreadBit != 0 && !s.arrived(index, id) {
		return
	}
	if s.cfg.Notified != nil {
		s.cfg.Notified(id)
	}
}

// arrived counts a part of a notification, and reports whether it was the last one.
func (s *Set) arrived(index int, id uint32) bool {
	s.mu.Lock()
	parts := s.parts[id]
	switch {
	case parts == nil && len(s.parts) >= s.cfg.Pending:
		s.mu.Unlock()
		s.Fail(fmt.Errorf("rdma: the peer has begun more than %d notifications that it has not ended", s.cfg.Pending))
		return false
	case parts == nil:
		parts = make([]uint32, len(s.queues))
		s.parts[id] = parts
	}
	defer s.mu.Unlock()
	parts[index]++
	rest := uint32(0)
	for _, n := range parts {
		if n == 0 {
			return false
		}
		rest += n - 1
	}
	for i := range parts {
		parts[i]--
	}
	if rest == 0 {
		delete(s.parts, id)
	}
	return true
}

// Usage is the account of a send queue: InUse = Recorded + Reserved.
type Usage struct {
	QP                               uint32
	Depth, InUse, Recorded, Reserved int  // requests
	Degraded, Failed                 bool // refuses requests
}

// Usage returns the accounts of the send queues.
func (s *Set) Usage() []Usage {
	all := make([]Usage, 0, len(s.queues))
	for _, q := range s.queues {
		q.mu.Lock()
		l := &q.ledger
		u := Usage{QP: q.number, Depth: l.depth, InUse: l.inUse, Reserved: l.reserved, Degraded: l.state == degraded,
			Failed: l.state == failed}
		for i := range l.n {
			u.Recorded += l.at(i).n
		}
		q.mu.Unlock()
		all = append(all, u)
	}
	return all
}
