package verbs

import (
	"errors"
	"time"

	"tutti/rdma"
)

// railState is what is known of a rail.
type railState uint8

const (
	unused   railState = iota // one end has left it out, or it has failed before it worked
	unproven                  // nothing has passed it yet
	working                   // a request of this end has
)

// rail is a queue pair of a lane for data, on a port of this end and one of the peer. It is used
// with the link's lock.
type rail struct {
	port   // without a device: this end leaves it out
	number int
	state  railState
	cq     rdma.CQ
	own    bool // its receive completes in cq; else in that of the lane
	qp     rdma.QP
	pieces [railDepth]piece
	under  int       // requests under way
	bytes  int       // of these
	total  uint64    // bytes moved
	since  time.Time // of the requests under way, one has ended, or the first one was posted
	armed  bool      // by the latest arm
}

// piece is a request under way.
type piece struct {
	move  *move // nil: none
	mr    lent  // of its part of the local memory
	bytes int   // 0: a read whose contents do not matter
}

// open makes the objects of a rail of a lane. The queue pair is in the state Init.
func (r *rail) open(n *lane, rung func()) error {
	r.path.reads = min(max(r.Attributes().MaxReads, 1), maxReads)
	var err error
	if r.cq, err = r.NewCQ(railDepth+1, rung); err != nil {
		return err
	}
	cfg := rdma.QPConfig{Send: r.cq, Recv: n.cq, SendDepth: railDepth, RecvDepth: 1,
		PKey: r.settings.PKey}
	if r.own = r.device != n.port.device; r.own {
		cfg.Recv = r.cq
	}
	if r.qp, err = r.NewQP(cfg); err != nil {
		return err
	}
	if err := r.qp.Init(r.at.Port, rdma.LocalWrite|rdma.RemoteWrite|rdma.RemoteRead); err != nil {
		return err
	}
	// Nothing is received: this receive is flushed when the queue pair fails, also because of the
	// peer's requests.
	_, err = r.qp.PostRecv([]rdma.RecvRequest{{ID: r.receive()}})
	return err
}

// receive returns the identifier of the receive. It is none of those of other requests.
func (r *rail) receive() uint64 { return railDepth + 1 + uint64(r.number) }

// flushed takes a completion with an error of the receive. The error says that the rail has failed.
// With requests under way their completions say so, and why: the queue pair completes all of them
// with an error, and the first of these may be seen after that of the receive.
func (r *rail) flushed(c *rdma.Completion) error {
	if r.under > 0 {
		return nil
	}
	return &rdma.StatusError{Status: c.Status, Op: rdma.Recv, Device: r.Name(), QP: c.QP, Vendor: c.Vendor}
}

// probe posts a request that shows that data passes, in a chain.
func (r *rail) probe(chain *[1]rdma.SendRequest) error {
	chain[0] = rdma.SendRequest{ID: railDepth, Op: rdma.Write, Signaled: true}
	_, err := r.qp.Post(chain[:])
	r.under, r.since = 1, time.Now()
	return err
}

// polled reports whether the completion queue has to be polled: something may come.
func (r *rail) polled() bool { return r.state != unused && (r.under > 0 || r.own) }

// close gives back the local memory of pieces, and closes the completion queue, once and after the
// queue pair.
func (r *rail) close() (err error) {
	for i := range r.pieces {
		if mr := r.pieces[i].mr; mr.MR != nil {
			err = errors.Join(err, mr.release())
		}
	}
	if r.cq != nil {
		err = errors.Join(err, r.cq.Close())
	}
	return err
}
