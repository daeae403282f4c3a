package queue

import (
	"context"
	"errors"
	"fmt"

	"tutti/rdma"
)

// Submit posts a batch. An error means that nothing was posted: a *rdma.QueueFullError if there was
// no room within Config.Timeout, or a queue pair is degraded; ErrFailed if the set has failed; an
// error of the device. Whatever happens later is reported by the transfer, and the memory of the
// batch is in use until it has ended. Submit waits for room; in a batch that is larger than the
// send queues, it waits for the requests that it has posted before, as long as ctx allows. It polls
// meanwhile.
func (s *Set) Submit(ctx context.Context, b *Batch) (*Transfer, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	x := s.pool.Get().(*submission)
	defer x.free()
	if err := x.plan(b); err != nil {
		return nil, err
	}
	var p pace
	defer p.stop()
	for x.phase != done {
		q, need, err := x.step()
		if err == nil && q != nil {
			err = x.await(ctx, &p, q, need)
		}
		if err != nil {
			if x.fail(err); x.posted == 0 {
				return nil, err
			}
			break
		}
	}
	x.t.drop(nil)
	return x.t, nil
}

// phase is what the next step of a submission does.
type phase uint8

const (
	streaming phase = iota // chunks of which others follow, and the only last one
	reserving              // the last chunks of several queue pairs
	posting                // those
	done
)

// submission is the state of a call of Submit. It advances by steps that do not wait.
type submission struct {
	set    *Set
	ops    []Op
	parts  []part // one for each queue pair of the set
	using  []*part
	notify bool
	imm    uint32
	t      *Transfer
	phase  phase
	at     int // in using
	posted int // requests
}

// part is what a queue pair gets of a batch.
type part struct {
	q        *queue
	chunk    int // the most requests of one
	limits   limits
	cursor   cursor
	reads    bool               // are among the requests so far
	requests []rdma.SendRequest // the present chunk
	segments []rdma.Segment
	kind     kind
	last     bool   // nothing follows
	held     bool   // the credits are reserved
	life     uint16 // of the queue pair when the submission began: no batch is posted across a reset
}

func newSubmission(s *Set) *submission {
	x := &submission{set: s, parts: make([]part, len(s.queues)), using: make([]*part, 0, len(s.queues))}
	for i, q := range s.queues {
		segments := max(q.limits.SendSegments, 1)
		chunk := max(1, min(s.cfg.Chunk, q.limits.SendDepth/2))
		x.parts[i] = part{q: q, chunk: chunk, limits: limits{segments, s.cfg.MaxBytes},
			requests: make([]rdma.SendRequest, 0, chunk), segments: make([]rdma.Segment, 0, chunk*segments)}
	}
	return x
}

// keep is the most operations whose memory a submission keeps.
const keep = 4096

// free returns a submission to its set's pool.
func (x *submission) free() {
	if cap(x.ops) > keep {
		x.ops = nil
	}
	for _, p := range x.using {
		p.cursor = cursor{}
	}
	x.t = nil
	x.set.pool.Put(x)
}

// plan begins with a batch.
func (x *submission) plan(b *Batch) error {
	ops, total, err := b.sorted(x.ops[:0])
	if err != nil {
		x.using = x.using[:0]
		return err
	}
	x.ops, x.using = ops, x.using[:0]
	x.notify, x.imm = b.Notify, b.ID
	x.phase, x.at, x.posted = streaming, 0, 0
	n := len(x.parts)
	c := cursor{ops: ops, left: total}
	if n == 1 || total/uint64(n) < x.set.cfg.Spread {
		x.use(&x.parts[x.set.turn.Add(1)%uint32(n)], c)
	} else {
		x.imm |= spreadBit
		for i, each := 0, share(total, n); i < n; i++ {
			if p := c.part(each); p.left > 0 || x.notify {
				x.use(&x.parts[i], p)
			}
		}
	}
	x.t = &Transfer{set: x.set, pending: 1}
	return nil
}

// use has a queue pair take the bytes of a cursor.
func (x *submission) use(p *part, c cursor) {
	p.cursor, p.held, p.reads, p.life = c, false, false, p.q.currentLife()
	x.using = append(x.using, p)
	x.fill(p)
}

// fill makes the next chunk.
func (x *submission) fill(p *part) {
	p.requests, p.segments = p.requests[:0], p.segments[:0]
	p.kind = data
	for len(p.requests) < p.chunk && p.cursor.left > 0 {
		p.requests = p.requests[:len(p.requests)+1]
		r := &p.requests[len(p.requests)-1]
		p.segments = p.cursor.next(r, p.segments, p.limits)
		p.reads = p.reads || r.Op == rdma.Read
	}
	p.last = p.cursor.left == 0
	if p.last && x.notify {
		if p.last = len(p.requests) < p.chunk; p.last {
			p.requests = append(p.requests, rdma.SendRequest{Op: rdma.WriteImm, Imm: x.imm, Fence: p.reads})
			p.kind = notification
		}
	}
}

// step does what can be done next. If that needs credits that are in use, it returns the queue and
// their number.
func (x *submission) step() (*queue, int, error) {
	switch x.phase {
	case streaming:
		return x.stream()
	case reserving:
		p := x.using[x.at]
		if err := p.q.reserve(len(p.requests), p.life); err != nil {
			x.release() // no submission waits while it holds credits that others wait for
			x.at = 0
			if errors.Is(err, errFull) {
				return p.q, len(p.requests), nil
			}
			return nil, 0, err
		}
		p.held = true
		if x.at++; x.at == len(x.using) {
			x.phase, x.at = posting, 0
		}
	case posting:
		p := x.using[x.at]
		p.held = false
		n, err := p.q.post(p.requests, p.kind, x.t, p.life)
		x.posted += n
		if err != nil {
			return nil, 0, err
		}
		if x.at++; x.at == len(x.using) {
			x.phase = done
		}
	}
	return nil, 0, nil
}

// stream posts a chunk of which others follow on its queue pair, or the last one if there is no
// other queue pair.
func (x *submission) stream() (blocked *queue, need int, err error) {
	for range x.using {
		p := x.using[x.at]
		if x.at++; x.at == len(x.using) {
			x.at = 0
		}
		if p.last && len(x.using) > 1 {
			continue
		}
		n, err := p.q.submit(p.requests, p.kind, x.t, p.life)
		x.posted += n
		switch {
		case errors.Is(err, errFull):
			blocked, need = p.q, len(p.requests)
			continue
		case err != nil:
			return nil, 0, err
		case p.last:
			x.phase = done
		default:
			x.fill(p)
		}
		return nil, 0, nil
	}
	if blocked == nil {
		x.phase, x.at = reserving, 0
	}
	return blocked, need, nil
}

// await waits for credits.
func (x *submission) await(ctx context.Context, p *pace, q *queue, need int) error {
	n, _ := x.set.poller.Poll() // an error fails the set
	limit := x.set.cfg.Timeout
	if x.posted > 0 {
		limit = 0
	}
	var bell <-chan struct{}
	if p.sleeps() {
		bell = q.wait(need)
	}
	err := p.wait(ctx, n > 0, bell, limit)
	if errors.Is(err, errTime) {
		return q.fullError(need, p.waited())
	}
	return err
}

// release gives back the credits that are reserved.
func (x *submission) release() {
	for _, p := range x.using {
		if p.held {
			p.held = false
			p.q.release(len(p.requests), p.life)
		}
	}
}

// fail ends the submission with an error: every failure comes here.
func (x *submission) fail(err error) {
	x.release()
	if full := (*rdma.QueueFullError)(nil); errors.As(err, &full) {
		full.Posted = x.posted
	}
	if x.notify && x.phase == posting && x.at > 0 {
		x.set.Fail(fmt.Errorf("rdma: a notification was posted to %d of %d queue pairs: %w", x.at, len(x.using), err))
	}
	x.t.fail(err)
}
