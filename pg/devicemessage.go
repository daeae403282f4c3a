package pg

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync/atomic"
	"time"

	"tutti/internal/backoff"
	"tutti/p2p"
)

// A deviceMessage is a message of which the data is in a device's memory. It is sent from, or
// received in, host memory, which a stream copies from or to: see visit. Pieces of a long one are
// sent while the stream brings the next ones, and fetched while the next ones arrive.
//
// A Start posts the message at once, so that messages keep their order: one whose data is not here
// is announced, and its bytes follow. A goroutine of the group polls the streams of all
// device messages; it exists while one waits for its stream.
type deviceMessage struct {
	g     *Group
	w     *Work
	m     *message
	v     *visit
	began time.Time // when the message was posted
	due   time.Time // when its time is over, zero: not set
	late  time.Time // until then it waits for its stream after the message or the group has ended, zero: not set
	dead  bool      // the group has

	filled int         // bytes of a message to send that the proxy knows of; of post, then of pollStreams
	gone   bool        // for pollStreams: it did not wait for its stream any more
	ended  atomic.Bool // the message is, with err

	// With the proxy's lock.
	err     error
	over    bool // the device message is
	watched bool
}

// errTakenBack says that a sender gave up a message of which a stream has been given a part.
var errTakenBack = errors.New("it took its message back, which had begun to arrive")

// pack makes m a device message that ends w, and begins its visit. waits says that the caller waits
// for it.
func (g *Group) pack(w *Work, m *message, waits bool) error {
	g.job.proxy.Lock()
	err := g.checkMessage(m)
	g.job.proxy.Unlock()
	if err != nil {
		return err
	}
	d, s, err := g.site(m.name(), m.x.place())
	if err != nil {
		return err
	}
	if g.closed.Load() {
		return ErrClosed
	}
	o := stay{call: m.name(), device: d, stream: s, lazy: waits, reads: !m.recv, writes: m.recv}
	if at := (span{uintptr(m.x.Ptr), m.x.size()}); m.recv {
		o.dst = at
	} else {
		o.src = at
	}
	v, err := g.devices.visit(&o, true)
	if err == nil {
		m.device = &deviceMessage{g: g, w: w, m: m, v: v}
	}
	return err
}

// post hands the device message's message to the proxy. With the proxy's lock.
func (c *deviceMessage) post() {
	m, msgs := c.m, c.g.msgs
	if m.recv {
		msgs.PostMsg(m.r, m.peer, int64(m.tag), uint64(m.x.DType), c.v.to.Bytes())
		m.r.OnMore(c.more)
		return
	}
	if buf := c.v.from.Bytes(); c.v.arrived() {
		c.filled = len(buf)
		msgs.PostSend(m.s, m.peer, uint64(m.tag), uint64(m.x.DType), buf)
	} else {
		msgs.PostLater(m.s, m.peer, uint64(m.tag), uint64(m.x.DType), buf)
		c.g.attend(c)
	}
}

// more is called when n bytes have arrived. With the proxy's lock.
func (c *deviceMessage) more(n int) {
	switch {
	case n > 0:
		c.v.release(n)
	case c.v.released(): // the stream may be copying what the next message would overwrite
		c.g.msgs.Drop(c.m.r, &p2p.PeerError{Rank: c.g.jobRank(c.m.r.From), Err: errTakenBack})
	}
}

// sent is called when the message has ended, with the caller's error. A received one has to get to
// the device, and after a failure the stream may use its memory. With the proxy's lock.
func (c *deviceMessage) sent(err error) {
	c.err = err
	c.ended.Store(true)
	got := c.m.recv && err == nil
	if got {
		c.v.release(c.v.to.Len())
	} else {
		c.v.end()
	}
	if got || c.v.using(c.g.closed.Load()) {
		c.g.attend(c)
		return
	}
	c.end(err)
}

// end ends the device message. With the proxy's lock.
func (c *deviceMessage) end(err error) {
	c.over = true
	c.v.end()
	if c.m.rec != nil {
		err = c.g.endMessage(c.m, err, false)
	}
	c.w.end(false, err)
}

// attend has the group poll a device message's stream. With the proxy's lock.
func (g *Group) attend(c *deviceMessage) {
	x := &g.devices
	if !c.watched {
		c.watched = true
		x.messages = append(x.messages, c)
	}
	if !x.watching {
		x.watching = true
		g.wg.Go(g.pollStreams)
	}
}

// pollStreams polls the streams of device messages until none waits for one.
func (g *Group) pollStreams() {
	x, p := &g.devices, g.job.proxy
	pace := backoff.Backoff{Yields: 200, Nap: 50 * time.Microsecond}
	defer pace.Stop()
	var all []*deviceMessage
	var look lookout
	var halted error
	p.Lock()
	defer p.Unlock()
	for len(x.messages) > 0 {
		all = append(all[:0], x.messages...)
		if look.due(time.Now()) {
			p.Look() // no other goroutine may be polling
			halted = g.halted()
		}
		p.Unlock()
		moved := false
		for _, c := range all {
			did, over := c.look(halted)
			moved, c.gone = moved || did, over
		}
		if moved {
			pace.Reset()
		} else {
			pace.Wait(context.Background())
		}
		p.Lock()
		x.messages = slices.DeleteFunc(x.messages, func(c *deviceMessage) bool {
			c.watched = !c.gone || c.ended.Load() && !c.over // it may have ended since the look
			return !c.watched
		})
	}
	x.watching = false
}

// look does what the stream's progress allows. It reports whether that was something, and whether
// the device message does not wait for its stream any more. halted is why the group cannot be used,
// nil if it can. Without the lock.
func (c *deviceMessage) look(halted error) (did, over bool) {
	if c.ended.Load() {
		return c.leave(halted)
	}
	p := c.g.job.proxy
	n, lost := c.v.here(), c.v.lost()
	if n == c.filled && lost == nil {
		return false, false
	}
	p.Lock()
	switch {
	case c.ended.Load():
	case lost != nil:
		c.g.msgs.Drop(c.m.s, fmt.Errorf("%s to rank %d: %w", c.m.name(), c.m.peer, lost))
	case n > c.filled:
		c.filled, did = n, true
		c.g.msgs.Filled(c.m.s, n)
	}
	p.Unlock()
	return did, n == c.v.from.Len()
}

// leave is look for a message that has been received, or has failed.
func (c *deviceMessage) leave(halted error) (did, over bool) {
	now := time.Now()
	using, lost := c.v.using(halted == ErrClosed), c.v.lost()
	if c.late.IsZero() || halted != nil && !c.dead {
		c.late, c.dead = now.Add(grace), halted != nil
	}
	timely := c.err == nil && halted == nil && (c.due.IsZero() || now.Before(c.due))
	if using && lost == nil && (now.Before(c.late) || timely) {
		return false, false
	}
	p := c.g.job.proxy
	p.Lock()
	defer p.Unlock()
	if c.over { // since the message ended
		return true, true
	}
	err := c.err
	switch {
	case err != nil || c.v.passed():
	case lost != nil:
		err = fmt.Errorf("%s from rank %d, to the device: %w", c.m.name(), c.m.r.From, lost)
	case halted != nil:
		err = halted
	case c.v.came():
		err = &TimeoutError{Call: c.m.what() + ", whose stream is held up", Reporter: c.g.rank, in: c.g.in,
			Err: context.DeadlineExceeded}
	default:
		err = c.g.explainMessage(c.m, p2p.ErrTimeout, time.Since(c.began))
	}
	c.end(err)
	return true, true
}

// doDeviceMessage is pointToPoint for a device's memory. Its stream is given nothing that writes
// there before it has come to the message.
func (g *Group) doDeviceMessage(ctx context.Context, m *message) (Status, error) {
	began := time.Now()
	w := &Work{}
	w.at.Store(&progress{g: g, msg: m})
	if err := g.pack(w, m, true); err != nil {
		return Status{}, err
	}
	p, c := g.job.proxy, m.device
	p.Lock()
	m.rec = g.track.BeginMessage(g.v.epoch, m.described(g), false)
	small := m.x.size() <= g.msgs.EagerMax()
	p.Unlock()
	limit := g.job.timeout
	err := error(nil)
	if m.recv || small { // a short message may be sent before the receiver asks for it
		within, cancel := limited(ctx, limit)
		err = g.hold(within, c.fails, c.v.brought)
		cancel()
	}
	if limit > 0 {
		limit = max(1, limit-time.Since(began))
	}
	p.Lock()
	if err == nil && g.closed.Load() {
		err = ErrClosed
	}
	if err != nil {
		c.end(g.explainMessage(m, err, time.Since(began)))
		p.Unlock()
		g.settle(c.v)
		return Status{}, w.Err()
	}
	g.follow(w, m, limit)
	done := w.at.Load().channel()
	p.Unlock()
	select {
	case <-done:
	case <-ctx.Done():
		p.Lock()
		if m.recv {
			g.msgs.Drop(m.r, ctx.Err())
		} else {
			g.msgs.Drop(m.s, ctx.Err())
		}
		p.Unlock()
		<-done
	}
	return w.Status(), w.Err()
}

// fails returns why the message, which has yet to be posted, would fail, or nil. With the proxy's
// lock.
func (c *deviceMessage) fails() error {
	if m := c.m; m.recv {
		return c.g.msgs.RecvFails(m.peer, int64(m.tag))
	}
	return c.g.msgs.SendFails(c.m.peer)
}

// brought reports whether a visit's stream has come to the operation, with all of the source, or
// returns why it does not.
func (v *visit) brought() (bool, error) {
	if v.arrived() {
		return true, nil
	}
	return false, v.lost()
}

// A lookout says when a wait for streams looks at the group. It looks at the streams more often,
// which takes no lock.
type lookout struct{ next time.Time }

// due reports whether a look at the group is due.
func (l *lookout) due(now time.Time) bool {
	if now.Before(l.next) {
		return false
	}
	l.next = now.Add(time.Millisecond)
	return true
}

// hold waits for something that a stream does, until ctx ends, the group cannot be used any more,
// or done returns an error. So does fails, unless it is nil: with the proxy's lock, it returns why
// the caller waits in vain. It has to be so for a second, since a link may come back.
func (g *Group) hold(ctx context.Context, fails func() error, done func() (bool, error)) error {
	pace := backoff.Backoff{Yields: 200, Nap: 50 * time.Microsecond}
	defer pace.Stop()
	var look lookout
	var since time.Time // of when the caller waits in vain
	for {
		if ok, err := done(); ok || err != nil {
			return err
		}
		if now := time.Now(); look.due(now) {
			halted, vain := g.noticed(fails)
			switch {
			case halted != nil:
				return halted
			case vain == nil:
				since = time.Time{}
			case since.IsZero():
				since = now
			case now.Sub(since) >= grace:
				return vain
			}
		}
		if err := pace.Wait(ctx); err != nil {
			return err
		}
	}
}

// noticed handles what other ranks have sent. It returns why the group cannot be used, and what
// fails returns, if that is not nil.
func (g *Group) noticed(fails func() error) (halted, vain error) {
	p := g.job.proxy
	p.Lock()
	defer p.Unlock()
	if !g.closed.Load() { // else the proxy may be closed
		p.Look()
	}
	if halted = g.halted(); halted == nil && fails != nil {
		vain = fails()
	}
	return halted, vain
}
