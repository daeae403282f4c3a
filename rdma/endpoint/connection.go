package endpoint

import (
	"errors"
	"fmt"
	"math/rand/v2"

	"tutti/rdma"
)

// Connection is one generation of queue pairs that lead to a peer.
type Connection struct {
	Peer string
	// QPs are the queue pairs, in the order of Config.Queues and of those at the peer. The table
	// closes them.
	QPs []rdma.QP
	// Generation counts the connections to the same peer, and the attempts that came to nothing.
	Generation uint64

	p       *peer
	route   rdma.Route // of this end
	offer   offer
	remote  uint64
	shown   bool          // Config.Prepare was called
	retired chan struct{} // closed when it is
}

// Remote returns the session of the peer, the id of this life of its process. It is 0 in
// Config.Prepare, before the queue pairs are connected.
func (c *Connection) Remote() uint64 { return c.remote }

// Retired returns a channel that is closed when the connection is taken out of service: by Fail, by
// Table.Close, or because the peer has replaced it.
func (c *Connection) Retired() <-chan struct{} { return c.retired }

// Fail takes the connection out of service because its queue pairs do not work any more, and does
// nothing if it is already. The next Table.Open makes another one. It must not be called in
// Config.Prepare.
func (c *Connection) Fail() {
	c.p.mu.Lock()
	defer c.p.unlock()
	if c.p.conn == c {
		c.p.stepLocked(broken{c.Generation})
	}
}

// prepareLocked makes queue pairs that are in the state Init.
func (p *peer) prepareLocked(generation uint64) (o offer, err error) {
	t := p.t
	t.mu.Lock()
	n := len(t.undrained)
	t.mu.Unlock()
	if n >= t.cfg.Retired {
		return offer{}, &UndrainedError{Connections: n}
	}
	c := &Connection{Peer: p.name, Generation: generation, p: p, retired: make(chan struct{})}
	p.conn = c
	defer func() {
		if err != nil {
			p.retireLocked()
		}
	}()
	if err := c.address(); err != nil {
		return offer{}, err
	}
	for i := range t.cfg.Queues {
		q, err := t.queue(i)
		if err != nil {
			return offer{}, err
		}
		c.QPs = append(c.QPs, q)
		c.offer.qps = append(c.offer.qps, pair{q.Number(), rand.Uint32N(1 << 24)})
	}
	if hook := t.cfg.Prepare; hook != nil {
		c.shown = true
		if err := hook(c); err != nil {
			return offer{}, err
		}
	}
	return c.offer, nil
}

// address finds out how the peer reaches the port.
func (c *Connection) address() error {
	cfg := &c.p.t.cfg
	port, err := cfg.Device.Port(cfg.Port)
	if err != nil {
		return err
	}
	if port.State != rdma.PortActive {
		return fmt.Errorf("rdma: port %d of %s is %v: %w until it is active", cfg.Port, cfg.Device.Name(), port.State,
			ErrPort)
	}
	gids, err := cfg.Device.GIDs(cfg.Port)
	if err != nil {
		return err
	}
	c.route = cfg.Route
	c.route.Port, c.route.MTU = cfg.Port, min(cfg.Route.MTU, port.MTU)
	c.offer = offer{lid: port.LID, grh: port.GRHRequired, mtu: c.route.MTU, reads: c.route.Reads}
	want := ""
	if cfg.Address.IsValid() {
		want = cfg.Address.WithZone("").String()
	}
	if len(gids) == 0 && !port.Ethernet && !port.GRHRequired && want == "" { // as rdma.Route.Lead has it
		return nil
	}
	best, err := rdma.ChooseGID(gids, want)
	if err != nil {
		return fmt.Errorf("rdma: port %d of %s: %w: %w", cfg.Port, cfg.Device.Name(), ErrPort, err)
	}
	c.offer.gid, c.offer.link, c.route.GIDIndex = best.GID, best.Type, best.Index
	return nil
}

// errUnlike says that two ends cannot be connected at all.
var errUnlike = errors.New("rdma: the ports of the two ends do not fit together")

// join connects the queue pairs with those of an offer.
func (c *Connection) join(a join) error {
	o, r := &a.offer, c.route
	if o.link != c.offer.link {
		return fmt.Errorf("%w: %v there, %v here", errUnlike, o.link, c.offer.link)
	}
	if err := r.Lead(o.link, c.offer.gid, o.gid, o.lid, o.grh || c.offer.grh); err != nil {
		return fmt.Errorf("%w: %w", errUnlike, err)
	}
	r.MTU, r.Reads = min(r.MTU, o.mtu), min(r.Reads, o.reads)
	for i, q := range c.QPs {
		r.PSN, r.Remote, r.RemotePSN = c.offer.qps[i].psn, o.qps[i].number, o.qps[i].psn
		if err := q.Connect(&r); err != nil {
			return err
		}
	}
	c.remote = a.with.session
	return nil
}

// final reports whether it is of no use to try again after an error of prepareLocked or join.
func final(err error) bool {
	return errors.Is(err, errUnlike) || errors.Is(err, rdma.ErrRemoved) || errors.Is(err, rdma.ErrClosed)
}

// retireLocked takes the queue pairs out of service.
func (p *peer) retireLocked() {
	c := p.conn
	p.conn = nil
	for _, q := range c.QPs {
		// It fails if the device is gone, and the queue pair with it.
		_ = q.Fail()
	}
	close(c.retired)
	p.t.mu.Lock()
	p.t.undrained[c] = false
	p.t.mu.Unlock()
	p.retired = append(p.retired, c)
}

// queue returns a queue pair in the state Init, of kind i. One that cannot be brought there is
// closed: the device may have reset it without effect.
func (t *Table) queue(i int) (rdma.QP, error) {
	for {
		var q rdma.QP
		t.mu.Lock()
		n := len(t.spare[i])
		if n > 0 {
			q = t.spare[i][n-1]
			t.spare[i] = t.spare[i][:n-1]
		}
		t.mu.Unlock()
		if n == 0 {
			var err error
			if q, err = t.cfg.Device.NewQP(t.cfg.Queues[i]); err != nil {
				return nil, err
			}
		}
		err := q.Init(t.cfg.Port, t.cfg.Access)
		if err == nil {
			return q, nil
		}
		closed := q.Close()
		if closed != nil && !errors.Is(closed, rdma.ErrClosed) {
			t.mu.Lock()
			t.failed = errors.Join(t.failed, closed)
			t.mu.Unlock()
		}
		if n == 0 || closed != nil {
			return nil, errors.Join(err, closed)
		}
	}
}

// release resets or destroys the queue pairs of a retired connection, once.
func (t *Table) release(c *Connection) {
	t.mu.Lock()
	released, known := t.undrained[c]
	if known {
		t.undrained[c] = true
	}
	t.mu.Unlock()
	if released || !known {
		return
	}
	var failed error
	for i, q := range c.QPs {
		if t.keep(i, q) {
			continue
		}
		if err := q.Close(); !errors.Is(err, rdma.ErrClosed) {
			failed = errors.Join(failed, err)
		}
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	t.failed = errors.Join(t.failed, failed)
	delete(t.undrained, c)
	close(t.drained)
	t.drained = make(chan struct{})
}

// keep resets a queue pair for a later connection, and reports whether that was possible.
func (t *Table) keep(i int, q rdma.QP) bool {
	if t.cfg.Device.Attributes().Quirks.NoReset {
		return false
	}
	room := func() bool { return !t.closed && len(t.spare[i]) < t.cfg.Spare }
	t.mu.Lock()
	ok := room()
	t.mu.Unlock()
	if !ok || q.Reset() != nil {
		return false
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if !room() {
		return false
	}
	t.spare[i] = append(t.spare[i], q)
	return true
}
