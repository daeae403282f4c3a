package queue

import (
	"cmp"
	"errors"
	"fmt"
	"sync"
	"time"

	"tutti/rdma"
)

// queue is a queue pair of a set, with the accounts of its send and its receive queue.
type queue struct {
	set    *Set
	index  int // in the set
	qp     rdma.QP
	number uint32
	limits rdma.QPLimits

	mu      sync.Mutex
	name    name // its life ends with a reset
	ledger  ledger
	bell    chan struct{} // closed when credits were released, or the state has changed; nil: none waits
	gone    bool          // the queue pair was reset or closed: it has no requests
	closed  bool
	unreset error // why it was closed and not reset; nil: it was not
	// Receives are posted and complete in order.
	receives  int    // posted
	nextRecv  uint32 // number of the next one
	flushes   []rdma.SendRequest
	receiving []rdma.RecvRequest
}

// claim returns how many completions there can be at a time.
func (q *queue) claim() int { return q.ledger.depth + q.set.receives(q) }

// ringLocked wakes the submissions that wait for room.
func (q *queue) ringLocked() {
	if q.bell != nil {
		close(q.bell)
		q.bell = nil
	}
}

// wait returns a channel that is closed when trying again to reserve n credits makes sense.
func (q *queue) wait(n int) <-chan struct{} {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.ledger.fits(n) != full {
		return rung
	}
	if q.bell == nil {
		q.bell = make(chan struct{})
	}
	return q.bell
}

// rung is a closed channel.
var rung = func() <-chan struct{} {
	c := make(chan struct{})
	close(c)
	return c
}()

// errFull is the error of a reservation for which there is no room at present.
var errFull = errors.New("the send queue is full")

// refusedLocked returns the error of a reservation of n credits.
func (q *queue) refusedLocked(n int, r refusal) error {
	switch {
	case r == full:
		return errFull
	case q.ledger.state == failed:
		return q.set.failure()
	}
	return &rdma.QueueFullError{QP: q.number, Need: n, Depth: q.ledger.depth, InUse: q.ledger.inUse,
		Degraded: r == barred}
}

// fullError returns the error of a submission that has waited for n credits in vain, nil if there
// is room now.
func (q *queue) fullError(n int, waited time.Duration) error {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.ledger.fits(n) != full {
		return nil
	}
	return &rdma.QueueFullError{QP: q.number, Need: n, Depth: q.ledger.depth, InUse: q.ledger.inUse, Waited: waited,
		Retryable: true}
}

// currentLife returns the life that a submission which begins now belongs to.
func (q *queue) currentLife() uint16 {
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.name.life
}

// reserve takes n credits for a submission that began in life.
func (q *queue) reserve(n int, life uint16) error {
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.reserveLocked(n, life)
}

func (q *queue) reserveLocked(n int, life uint16) error {
	if q.name.life != life {
		return q.set.failure()
	}
	if r := q.ledger.reserve(n); r != granted {
		return q.refusedLocked(n, r)
	}
	return nil
}

// release gives reserved credits back.
func (q *queue) release(n int, life uint16) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.name.life == life {
		q.ledger.release(n)
		q.ringLocked()
	}
}

// submit is reserve and post.
func (q *queue) submit(chain []rdma.SendRequest, k kind, t *Transfer, life uint16) (int, error) {
	q.mu.Lock()
	if err := q.reserveLocked(len(chain), life); err != nil {
		q.mu.Unlock()
		return 0, err
	}
	return q.postLocked(chain, k, t)
}

// post posts a chunk whose credits were reserved, and returns how many requests were posted. The
// credits of others are released.
func (q *queue) post(chain []rdma.SendRequest, k kind, t *Transfer, life uint16) (int, error) {
	q.mu.Lock()
	if q.name.life != life {
		defer q.mu.Unlock()
		return 0, q.set.failure()
	}
	if q.ledger.state != ready {
		defer q.mu.Unlock()
		q.ledger.release(len(chain))
		q.ringLocked()
		return 0, q.refusedLocked(len(chain), barred)
	}
	return q.postLocked(chain, k, t)
}

// postLocked releases q.mu.
func (q *queue) postLocked(chain []rdma.SendRequest, k kind, t *Transfer) (int, error) {
	first := q.ledger.write(len(chain), chain[0].Op, t)
	for i := range chain {
		chain[i].ID = q.name.id(data, first+uint32(i))
	}
	last := &chain[len(chain)-1]
	last.ID, last.Signaled = q.name.id(k, first+uint32(len(chain)-1)), true
	t.hold()
	n, err := q.qp.Post(chain)
	if err == nil && n == len(chain) {
		q.mu.Unlock()
		return n, nil
	}
	if err == nil {
		err = fmt.Errorf("rdma: queue pair %d took %d of %d requests", q.number, n, len(chain))
	}
	q.ledger.posted(n)
	if n == 0 {
		q.ringLocked()
		q.mu.Unlock()
		t.drop(nil)
		return 0, err
	}
	flushed := q.flushLocked()
	q.ringLocked()
	q.mu.Unlock()
	if flushed != nil {
		q.set.Fail(fmt.Errorf("rdma: queue pair %d has no completion for its requests: %w", q.number,
			errors.Join(err, flushed)))
	}
	return n, err
}

// flushLocked posts a signaled request without data.
func (q *queue) flushLocked() error {
	number, ok := q.ledger.flush()
	if !ok {
		return fmt.Errorf("no room for a flush in %d of %d", q.ledger.inUse, q.ledger.depth)
	}
	q.flushes = append(q.flushes[:0], rdma.SendRequest{ID: q.name.id(data, number), Op: rdma.Write, Signaled: true})
	if n, err := q.qp.Post(q.flushes); n == 0 {
		q.ledger.posted(0)
		return cmp.Or(err, errors.New("the flush was not posted"))
	}
	return nil
}

// complete handles a completion of a send request, and reports whether it belongs to one.
func (q *queue) complete(c *rdma.Completion, k kind, n name, number uint32) bool {
	q.mu.Lock()
	if n != q.name || q.gone || k != data && k != notification {
		q.mu.Unlock()
		return false
	}
	before := q.ledger.state
	v, op := q.ledger.complete(number, c.Status, c.Vendor)
	after := q.ledger.state
	q.settleLocked()
	q.mu.Unlock()
	switch {
	case v == skipped:
		q.set.Fail(fmt.Errorf("rdma: completion of request %d of queue pair %d without those of the requests before it",
			number, q.number))
	case after == failed && before != failed:
		q.set.Fail(&rdma.StatusError{Status: c.Status, Op: op, Device: q.set.poller.device, QP: q.number,
			Vendor: c.Vendor})
	}
	return v != stray
}

// settleLocked ends the transfers of records that have ended.
func (q *queue) settleLocked() {
	for {
		r, ok := q.ledger.pop()
		if !ok {
			break
		}
		if r.owner == nil {
			continue
		}
		var err error
		if r.status != rdma.Success {
			err = &rdma.StatusError{Status: r.status, Op: r.op, Device: q.set.poller.device, QP: q.number,
				Vendor: r.vendor}
		}
		r.owner.drop(err)
	}
	q.ringLocked()
}

// fail moves the queue pair to Failed. It is reset or closed if that cannot be done, or if the last
// requests would have no completion.
func (q *queue) fail() {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.gone {
		return
	}
	q.ledger.state = failed
	err := q.qp.Fail()
	if err == nil && q.ledger.loose() {
		err = q.flushLocked()
	}
	if err != nil {
		_ = q.purgeLocked() // Drain tries again, and reports it
	}
	q.ringLocked()
}

// drained returns whether the queue pair has no requests of ours any more.
func (q *queue) drained() bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.gone || q.ledger.n == 0
}

func (q *queue) purge() error {
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.purgeLocked()
}

// purgeLocked ends all requests by a reset of the queue pair or, if that fails, by closing it. If
// even this fails the memory may be in use.
func (q *queue) purgeLocked() error {
	if q.gone {
		return nil
	}
	if unreset := q.qp.Reset(); unreset != nil {
		if err := q.closeLocked(); err != nil {
			return err
		}
		q.unreset = unreset
	}
	q.abandonLocked()
	return nil
}

// closeLocked closes the queue pair.
func (q *queue) closeLocked() error {
	if q.closed {
		return nil
	}
	if err := q.qp.Close(); err != nil && !errors.Is(err, rdma.ErrClosed) {
		return err
	}
	q.closed = true
	return nil
}

// abandonLocked ends all records: the queue pair forgot its requests. It begins another life.
func (q *queue) abandonLocked() {
	q.gone = true
	q.name.life++
	q.receives = 0
	q.ledger.abandon()
	q.settleLocked()
}

// close closes the queue pair, and ends all its requests.
func (q *queue) close() error {
	q.mu.Lock()
	defer q.mu.Unlock()
	err := q.closeLocked()
	if err == nil && !q.gone {
		q.abandonLocked()
	}
	return err
}

// reset resets the queue pair. Its requests must have ended.
func (q *queue) reset() error {
	q.mu.Lock()
	defer q.mu.Unlock()
	switch {
	case q.unreset != nil:
		return fmt.Errorf("rdma: queue pair %d was closed, because it could not be reset; make another set: %w (%w)",
			q.number, rdma.ErrClosed, q.unreset)
	case q.closed:
		return fmt.Errorf("rdma: queue pair %d: %w", q.number, rdma.ErrClosed)
	}
	if err := q.qp.Reset(); err != nil {
		return err
	}
	if !q.gone {
		q.abandonLocked()
	}
	return nil
}

// renew begins to take requests. The queue pair is ready again.
func (q *queue) renew() error {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.ledger.renew()
	q.gone = false
	return q.refillLocked()
}

// received handles the completion of a receive. It reports whether receives are to be posted, and
// whether the completion belongs to one.
func (q *queue) received(c *rdma.Completion, n name, number uint32) (refill, ok bool) {
	q.mu.Lock()
	oldest := q.nextRecv - uint32(q.receives)
	if n != q.name || q.gone || number-oldest >= uint32(q.receives) {
		q.mu.Unlock()
		return false, false
	}
	q.receives -= int(number-oldest) + 1
	q.mu.Unlock()
	switch {
	case c.Status != rdma.Success:
		q.set.Fail(&rdma.StatusError{Status: c.Status, Op: rdma.Recv, Device: q.set.poller.device, QP: q.number,
			Vendor: c.Vendor})
	case c.Op != rdma.RecvWriteImm || c.Bytes != 0 || number != oldest:
		q.set.Fail(fmt.Errorf("rdma: a %v of %d bytes on queue pair %d: expected notifications, in order", c.Op,
			c.Bytes,
			q.number))
	default: // it has come, also if the queue pair has failed since
		q.set.notified(q.index, c.Imm)
	}
	return true, true
}

// refill posts receives in place of those that have completed.
func (q *queue) refill() {
	q.mu.Lock()
	err := q.refillLocked()
	q.mu.Unlock()
	if err != nil {
		q.set.Fail(err)
	}
}

func (q *queue) refillLocked() error {
	want := q.set.receives(q) - q.receives
	if want == 0 || q.gone || q.ledger.state == failed {
		return nil
	}
	q.receiving = q.receiving[:0]
	for i := range want {
		q.receiving = append(q.receiving, rdma.RecvRequest{ID: q.name.id(receive, q.nextRecv+uint32(i))})
	}
	n, err := q.qp.PostRecv(q.receiving)
	q.receives += n
	q.nextRecv += uint32(n)
	return err
}
