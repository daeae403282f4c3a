package queue

import (
	"context"
	"fmt"
	"sync"

	"tutti/rdma"
)

// A Poller has a completion queue, and gives completions to the sets whose queue pairs use it. Its
// methods may be called from any goroutine.
type Poller struct {
	cq     rdma.CQ
	device string
	wake   chan struct{}

	mu       sync.Mutex
	places   []*queue // nil: free
	lives    []uint16 // the latest of each place
	room     int      // completions that no queue pair has a claim to
	out      [rdma.PollBatch]rdma.Completion
	touched  []*queue // have receives to post
	strays   uint64   // completions of queue pairs that were reset or closed before
	unusable error
}

// NewPoller makes a completion queue for at least depth completions. The depths of all queues of
// the queue pairs that use it may be as many together.
func NewPoller(d rdma.Device, depth int) (*Poller, error) {
	p := &Poller{device: d.Name(), wake: make(chan struct{}, 1)}
	var err error
	p.cq, err = d.NewCQ(depth, func() {
		select {
		case p.wake <- struct{}{}:
		default:
		}
	})
	if err != nil {
		return nil, err
	}
	p.room = p.cq.Depth()
	return p, nil
}

// CQ returns the completion queue, for rdma.QPConfig. Only the Poller polls it.
func (p *Poller) CQ() rdma.CQ { return p.cq }

// Poll handles the completions that there are, at most rdma.PollBatch, and returns their number. It
// does not wait. If another goroutine is polling, it returns 0. An error means that the completion
// queue is unusable; the sets have failed then, and their queue pairs were reset or closed.
func (p *Poller) Poll() (int, error) {
	if !p.mu.TryLock() {
		return 0, nil
	}
	defer p.mu.Unlock()
	return p.pollLocked()
}

func (p *Poller) pollLocked() (int, error) {
	if p.unusable != nil {
		return 0, p.unusable
	}
	n, err := p.cq.Poll(p.out[:])
	for i := range p.out[:n] {
		p.dispatchLocked(&p.out[i])
	}
	for i, q := range p.touched {
		q.refill()
		p.touched[i] = nil
	}
	p.touched = p.touched[:0]
	if err != nil {
		p.breakLocked(err)
	}
	return n, p.unusable
}

// breakLocked fails all sets. Their requests will not complete, so that the queue pairs are reset.
func (p *Poller) breakLocked(err error) {
	p.unusable = fmt.Errorf("rdma: the completion queue is unusable: %w", err)
	for _, q := range p.places {
		if q != nil {
			q.set.Fail(p.unusable)
			_ = q.purge() // Drain tries again, and reports it
		}
	}
}

// dispatchLocked gives a completion to its queue pair.
func (p *Poller) dispatchLocked(c *rdma.Completion) {
	k, name, number := parseID(c.ID)
	var q *queue
	if int(name.place) < len(p.places) {
		q = p.places[name.place]
	}
	switch {
	case q == nil:
		p.strays++
	case k == receive:
		refill, ok := q.received(c, name, number)
		if !ok {
			p.strays++
		}
		if refill && (len(p.touched) == 0 || p.touched[len(p.touched)-1] != q) {
			p.touched = append(p.touched, q)
		}
	case !q.complete(c, k, name, number):
		p.strays++
	}
}

// Serve polls until ctx ends, and sleeps while there are no completions. It returns ctx's error, or
// that of Poll. A program whose own calls do not wait for transfers runs it in a goroutine.
func (p *Poller) Serve(ctx context.Context) error {
	poll := func(arm bool) (int, error) {
		p.mu.Lock()
		defer p.mu.Unlock()
		if arm && p.unusable == nil {
			if err := p.cq.Arm(); err != nil {
				p.breakLocked(err)
			}
		}
		return p.pollLocked()
	}
	for arm := false; ; {
		n, err := poll(arm)
		if err != nil {
			return err
		}
		if n == 0 && arm {
			select {
			case <-ctx.Done():
			case <-p.wake:
			}
		}
		if ctx.Err() != nil {
			return ctx.Err()
		}
		arm = n == 0 && !arm
	}
}

// empty polls until the queue has no completions, so that none is left of queue pairs that were
// reset or closed.
func (p *Poller) empty() {
	p.mu.Lock()
	defer p.mu.Unlock()
	for {
		if n, err := p.pollLocked(); n == 0 || err != nil {
			return
		}
	}
}

// add gives a queue pair a place and a claim to completions.
func (p *Poller) add(q *queue) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	need := q.claim()
	switch {
	case p.unusable != nil:
		return p.unusable
	case need > p.room:
		return fmt.Errorf("rdma: queue pair %d may have %d completions at a time, and its completion queue of %d has "+
			"room for %d more: make a deeper one", q.qp.Number(), need, p.cq.Depth(), p.room)
	}
	at := 0
	for at < len(p.places) && p.places[at] != nil {
		at++
	}
	switch {
	case at == maxPlaces:
		return fmt.Errorf("rdma: a completion queue for more than %d queue pairs", maxPlaces)
	case at == len(p.places):
		p.places, p.lives = append(p.places, nil), append(p.lives, 0)
	}
	p.room -= need
	p.places[at] = q
	p.lives[at]++
	q.name = name{uint16(at), p.lives[at]}
	return nil
}

// remove takes back what add gave. The queue pair was closed.
func (p *Poller) remove(q *queue) {
	p.empty()
	p.mu.Lock()
	defer p.mu.Unlock()
	q.mu.Lock()
	defer q.mu.Unlock()
	if at := q.name.place; p.places[at] == q {
		p.places[at] = nil
		p.lives[at] = q.name.life
		p.room += q.claim()
	}
}

// Close closes the completion queue. The sets must have been closed before, and Serve must have
// returned.
func (p *Poller) Close() error { return p.cq.Close() }
