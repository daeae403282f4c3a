package verbs

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"tutti/p2p"
	"tutti/p2p/rma"
)

// States of a link.
const (
	live     = iota
	draining // failed; frames that have arrived are still delivered
	ended    // no more frames
)

// short is the most bytes of a frame that is gathered with others.
const short = 4 << 10

// framed is a link whose puts and gets travel as frames, and the data of long ones by RDMA. It
// implements p2p.OneSided, p2p.Pather and p2p.Gatherer.
type framed struct {
	*rma.Frames
	link  *link
	local p2p.LocationKinds
}

// Gather implements p2p.Gatherer.
func (f framed) Gather(h *p2p.Header, payload []byte) (bool, error) {
	if err := f.Frames.Err(); err != nil {
		return false, err
	}
	return f.link.offer(h, payload, len(payload) <= short)
}

// Paths implements p2p.Pather.
func (f framed) Paths() []p2p.Path {
	return []p2p.Path{{Spec: p2p.PathSpec{Local: f.local, Remote: p2p.HostMemory}, OneSided: f}}
}

// Distant implements p2p.Distant.
func (framed) Distant() {}

// Delivers implements p2p.Deliverer, for the TCP connection.
func (f framed) Delivers() bool {
	d, ok := f.link.base.(p2p.Deliverer)
	return ok && d.Delivers()
}

// link implements p2p.Link and rma.Mover over a TCP connection and, most of the time, a lane beside
// it.
type link struct {
	t       *Transport
	peer    p2p.Identity
	dialler bool
	base    p2p.Link // the TCP connection
	max     int
	ring    int // bytes of a lane's ring
	linger  time.Duration
	least   int // see leastMove
	state   atomic.Uint32
	haunted atomic.Bool // there are ghosts in limbo
	failed  atomic.Pointer[failure]

	// Under the rules of Link, without mu.
	rx   *lane // frames arrive in its ring; nil: over base
	held *lane // the current frame is one of its ring
	idle int   // polls of an empty ring

	mu      sync.Mutex // held during calls on the objects of the device, and for what follows
	closed  bool
	once    sync.Once
	err     error // of Close: also what lanes that were given up before have left
	heard   uint64
	refused int    // bytes of the last frame, if there was no room for it; else -1
	part    []byte // of the payload of a control frame

	m      machine
	lanes  []*lane // of m, with those that are lost
	lane   *lane   // in use or, as long as none is, the only one; nil: there is none
	pause  time.Duration
	apart  time.Duration // the pause before a lane beside the one in use
	vain   int           // lanes that have not come up since the ports have changed
	ups    uint64        // when they have: see Transport.ups
	since  time.Time     // frames are sent over tx
	mend   time.Duration // see minMend
	tx     *lane         // frames are sent over its ring; nil: over base
	limbo  []*lane       // given up, with moves or ghosts that may still change memory
	moved  []*rma.Move   // that have ended
	later  []*rma.Move   // puts that wait until no ghosts are in limbo
	barred bars          // memory of the peer that data is not moved to and from
	rest   *consumer     // frames of a lost lane to be sent again over base, which are all in its ring's copy
	until  uint64        // the position behind them
	out    []control     // to be sent over base, oldest first

	ctx    context.Context // ends at Close
	cancel context.CancelFunc
	late   time.Time // when Close waits for devices no longer; set before ctx ends
	tasks  int       // that make, connect or close lanes
	wg     sync.WaitGroup
}

type failure struct{ err error }

// control is a frame of this transport.
type control struct {
	h       p2p.Header
	payload []byte
}

// newLink makes a link over base, which it owns. The dialler's end begins to make a lane.
func (t *Transport) newLink(peer p2p.Identity, base p2p.Link, dialler bool) *link {
	l := &link{t: t, peer: peer, dialler: dialler, base: base, linger: t.lingerTime(), least: leastMove,
		ring: ringOf(base.MaxFrame()), heard: ^uint64(0), refused: -1, part: make([]byte, 0, maxText),
		pause: minPause, apart: minPause, mend: minMend, m: machine{dialler: dialler}}
	l.max = maxFrame(l.ring)
	l.ctx, l.cancel = context.WithCancel(context.Background())
	if dialler {
		l.mu.Lock()
		l.m.settle()
		l.didLocked(nil, nil, nil)
		l.mu.Unlock()
	}
	return l
}

// fail ends the link: Send fails with err, and so does Recv, after it has delivered what has
// arrived if drain is set. The first err stays.
func (l *link) fail(err error, drain bool) {
	l.failed.CompareAndSwap(nil, &failure{err})
	to := uint32(ended)
	if drain {
		to = draining
	}
	for {
		now := l.state.Load()
		if now >= to || l.state.CompareAndSwap(now, to) {
			return
		}
	}
}

// violated ends the link because of the peer.
func (l *link) violated(format string, args ...any) {
	l.fail(fmt.Errorf("rdma: %v: %w: %s", l.peer, p2p.ErrProtocol, fmt.Sprintf(format, args...)), false)
}

// cut ends the link because the TCP connection has failed.
func (l *link) cut(err error) {
	l.fail(fmt.Errorf("rdma: %w", err), !errors.Is(err, p2p.ErrProtocol))
}

// Err implements p2p.Link.
func (l *link) Err() error {
	if f := l.failed.Load(); f != nil {
		return f.err
	}
	return nil
}

// MaxFrame implements p2p.Link.
func (l *link) MaxFrame() int { return l.max }

// Send implements p2p.Link.
func (l *link) Send(h *p2p.Header, payload []byte) (bool, error) { return l.offer(h, payload, false) }

// offer implements Send and, with gather, Gatherer.Gather.
func (l *link) offer(h *p2p.Header, payload []byte, gather bool) (bool, error) {
	if l.state.Load() != live {
		return false, l.Err()
	}
	if uint64(h.Len) != uint64(len(payload)) || len(payload) > l.max || h.Service == service {
		return false, fmt.Errorf("rdma: frame of service %d with %d bytes of payload for a header that says %d; the "+
			"largest is %d", h.Service, len(payload), h.Len, l.max)
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed {
		return false, l.Err()
	}
	put := (*lane).send
	if gather {
		put = (*lane).gather
	}
	sent := l.tx != nil && put(l.tx, h, payload)
	if !sent {
		l.turnLocked()
		switch {
		case l.state.Load() != live:
		case l.tx != nil:
			sent = put(l.tx, h, payload)
		case l.idleLocked():
			var err error
			if sent, err = l.base.Send(h, payload); err != nil {
				l.cut(err)
			}
		}
	}
	if l.tx != nil && l.tx.err != nil {
		l.turnLocked()
	}
	if l.refused = -1; !sent {
		l.refused = len(payload)
	}
	if !sent && l.state.Load() != live {
		return false, l.Err()
	}
	return sent, nil
}

// idleLocked reports whether nothing waits to be sent over base, or for frameDown.
func (l *link) idleLocked() bool { return len(l.out) == 0 && len(l.m.lost) == 0 }

// turnLocked makes progress, under the rules of Link: it takes completions, reads base if frames do
// not arrive there, and sends what waits. A link that has failed gives up no lane any more: frames
// that have arrived may be in its ring.
func (l *link) turnLocked() {
	if l.state.Load() != live {
		return
	}
	lanes, k := l.connectedLocked()
	for _, n := range lanes[:k] {
		if l.has(n) { // and not given up with the one before
			l.laneLocked(n)
		}
	}
	for news := l.t.news.Load(); news != l.heard && l.state.Load() == live; news = l.t.news.Load() {
		l.heard = news
		l.listenLocked()
	}
	l.passLocked()
	l.pumpLocked()
}

// laneLocked makes progress on a lane, and drops it if it has failed.
func (l *link) laneLocked(n *lane) {
	n.turn()
	l.reapLocked(n)
	if n.err == nil && n.lost() {
		n.fail(errors.New("a port is down"))
	}
	if n.err == nil {
		l.betterLocked(n)
	}
	switch {
	case n.err == nil:
		l.raiseLocked(n)
	case errors.Is(n.err, p2p.ErrProtocol):
		l.violated("%v", n.err)
	default:
		l.giveUpLocked(n, n.err)
	}
}

// raiseLocked takes a lane further if its requests have passed, and one that is being left if none
// are under way.
func (l *link) raiseLocked(n *lane) {
	beside := l.lane != n && l.lane != nil
	switch c := l.m.find(n.gen); {
	case c.stage == probing:
		// Beside a lane that works there is time to see which rails do.
		if n.finished < n.probed || beside && n.bulk.count(unproven) > 0 {
			return
		}
		if mine, old := n.bulk.count(working), 0; l.dialler && beside && n.bulk.dead > 0 {
			if old = l.lane.bulk.count(working); mine <= old {
				l.m.wanted = false
				l.dropLocked(n, fmt.Errorf("it is not better: %d queue pairs for data work, as against %d", mine, old))
				return
			}
		}
		l.m.proved(n.gen)
	case n.bulk.leaving:
		l.handLocked(n)
		if c != l.m.leaving() || len(n.bulk.moves) > 0 || n.bulk.under() > 0 {
			return
		}
		l.m.drained()
	default:
		return
	}
	l.didLocked(nil, nil, nil)
}

// passLocked goes over to the ring of the newer lane where the peer's frames in the older one end.
func (l *link) passLocked() {
	if n := l.rx; n != nil && n.in.pos == n.end {
		n.in.untold = 0 // no call waits for room
		l.m.passedEnd()
		l.didLocked(nil, nil, nil)
	}
}

// betterLocked gives up a lane whose addresses have moved, and wants another one beside the one in
// use if that may use more ports or rails.
func (l *link) betterLocked(n *lane) {
	ups := l.t.ups.Load()
	if n.seen != ups {
		n.seen = ups
		if err := n.moved(); err != nil {
			n.fail(err)
			return
		}
	}
	if n != l.lane || !l.m.steady() || l.m.wanted {
		return
	}
	better := false
	if n.ups != ups {
		n.ups = ups
		// An acceptor with a port for each rail of its peer cannot use more of them.
		better = n.bulk.dead > 0 || (l.dialler || len(n.bulk.rails) > len(n.devices)) && l.t.missing(n)
	}
	if l.dialler && n.bulk.dead > 0 && time.Since(l.since) > l.mend {
		l.mend = min(2*l.mend, maxMend)
		better = true
	}
	if better {
		l.t.log.Info("rdma: a better lane is made", "peer", l.peer, "beside", n.gen, "rails without use", n.bulk.dead)
		l.apart = minPause
		l.m.want()
		l.didLocked(nil, nil, nil)
	}
}

// listenLocked reads control frames from base while other frames arrive in a ring.
func (l *link) listenLocked() {
	for l.rx != nil && l.state.Load() == live {
		h, payload, err := l.base.Recv()
		switch {
		case err != nil:
			l.cut(err)
		case h == nil:
			if !l.base.Arm() {
				return
			}
		case h.Service != service:
			l.violated("frame of kind %d beside the ring", h.Kind)
		case !l.controlLocked(h, payload):
			return
		}
	}
}

// lookLocked makes the next turn look at base.
func (l *link) lookLocked() { l.heard = l.t.news.Load() - 1 }

// pumpLocked sends what waits to be sent over base, in its order: control frames, and frames of
// lost lanes.
func (l *link) pumpLocked() {
	for {
		for len(l.out) > 0 {
			if !l.sendLocked(&l.out[0].h, l.out[0].payload) {
				return
			}
			if n := l.find(l.out[0].h.Seq); l.out[0].h.Kind == frameKey && n != nil {
				n.claims--
			}
			l.out = l.out[:copy(l.out, l.out[1:])]
		}
		c := l.rest
		switch {
		case c == nil:
			return
		case !c.held && c.pos == l.until:
			l.rest = nil
			l.m.resent()
			l.didLocked(nil, nil, nil)
			continue
		case !c.held:
			if err := c.next(); err != nil || c.pos+frameBytes(uint64(c.hdr.Len)) > l.until {
				l.violated("it has taken %d bytes of %d, where no frame ends (%v)", c.pos, l.until, err)
				return
			}
		}
		if !l.sendLocked(&c.hdr, c.payload) {
			return
		}
		c.release()
	}
}

// sendLocked sends a frame over base.
func (l *link) sendLocked(h *p2p.Header, payload []byte) bool {
	if l.state.Load() != live {
		return false
	}
	ok, err := l.base.Send(h, payload)
	if err == nil && ok {
		_, err = l.base.Flush()
	}
	if err != nil {
		l.cut(err)
		return false
	}
	return ok
}

// Flush implements p2p.Link. What was sent over a lane that is lost may have to be sent again.
func (l *link) Flush() (bool, error) {
	if l.state.Load() != live {
		return false, l.Err()
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed {
		return false, l.Err()
	}
	if l.tx != nil {
		l.tx.post()
	}
	sent := func() bool { return l.tx != nil && l.tx.err == nil && len(l.m.lost) == 0 }
	if sent() {
		return true, nil
	}
	l.turnLocked()
	done := sent()
	if !done && l.state.Load() == live {
		var err error
		if done, err = l.base.Flush(); err != nil {
			l.cut(err)
		}
		done = done && len(l.m.lost) == 0
	}
	if l.state.Load() != live {
		return false, l.Err()
	}
	return done, nil
}

// Recv implements p2p.Link.
func (l *link) Recv() (*p2p.Header, []byte, error) {
	for {
		// Read before the ring, so that frames which arrived before the link failed are seen.
		state := l.state.Load()
		if state == ended {
			return nil, nil, l.Err()
		}
		if n := l.held; n != nil {
			if n.in.filling {
				return &n.in.hdr, nil, nil
			}
			return &n.in.hdr, n.in.payload, nil
		}
		n := l.rx
		if n == nil {
			h, payload, again, err := l.recvBase(state)
			if again {
				continue
			}
			return h, payload, err
		}
		if n.in.pos == n.end {
			l.mu.Lock()
			l.passLocked()
			l.mu.Unlock()
			continue
		}
		switch arrived, more := l.arrived(n, state); {
		case arrived:
			if err := n.in.next(); err != nil {
				l.violated("%v", err)
			} else {
				l.held = n
			}
		case !more:
			return nil, nil, l.Err()
		case state == draining || !l.poll():
			return nil, nil, nil
		}
	}
}

// arrived reports whether there is a frame to take in the ring of n, and whether one may come yet.
// Without a completion, what is in the ring says only that the device is to be asked.
func (l *link) arrived(n *lane, state uint32) (arrived, more bool) {
	if n.arrived() || state == live && !n.in.begun() {
		return n.arrived(), true
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if !l.closed {
		if state == draining {
			n.drain()
		}
		n.reap()
	}
	return n.arrived(), !n.flushed || state == live
}

// recvBase is Recv while frames arrive over base. Again: the caller looks anew.
func (l *link) recvBase(state uint32) (h *p2p.Header, payload []byte, again bool, err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed {
		return nil, nil, true, nil
	}
	if state == live && (l.t.news.Load() != l.heard || len(l.out) > 0 || l.rest != nil || l.lane != nil &&
		l.stageOf(l.lane) >= probing) {
		l.turnLocked()
		if l.rx != nil || l.state.Load() != live {
			return nil, nil, true, nil
		}
	}
	h, payload, err = l.base.Recv()
	switch {
	case err != nil && state == draining:
		return nil, nil, false, l.Err()
	case err != nil:
		l.cut(err)
		return nil, nil, true, nil
	case h == nil || h.Service != service:
		return h, payload, false, nil
	}
	again = l.controlLocked(h, payload)
	l.pumpLocked()
	return nil, nil, again, nil
}

// poll is a poll of an empty ring. Seldom, or with a reason, it makes progress. It reports whether
// the ring is not in use any more.
func (l *link) poll() bool {
	n := l.rx
	if l.idle++; l.idle%idlePolls != 0 && !n.due() && l.t.news.Load() == l.heard {
		return false
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.turnLocked()
	return l.rx != n || l.state.Load() != live
}

// Fill implements p2p.Link.
func (l *link) Fill(dst []byte) (int, error) {
	if l.state.Load() == ended {
		return 0, l.Err()
	}
	if l.held == nil {
		n, err := l.base.Fill(dst)
		if err != nil {
			l.cut(err)
			return n, l.Err()
		}
		return n, nil
	}
	c := &l.held.in
	c.filling = true
	n := copy(dst, c.payload)
	c.payload = c.payload[n:]
	return n, nil
}

// Release implements p2p.Link.
func (l *link) Release() {
	n := l.held
	if n == nil {
		l.base.Release()
		return
	}
	l.held = nil
	n.in.release()
	if n == l.rx && n.due() {
		l.mu.Lock()
		defer l.mu.Unlock()
		l.turnLocked()
	}
}

// Arm implements p2p.Link.
func (l *link) Arm() bool {
	if l.state.Load() != live || l.rx != nil && l.rx.arrived() {
		return true
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed {
		return true
	}
	lanes, k := l.connectedLocked()
	for _, n := range lanes[:k] {
		if err := n.arm(); err != nil {
			n.fail(err)
		}
	}
	// What has arrived before Arm causes no wake-up.
	tx := l.tx
	l.turnLocked()
	lanes, k = l.connectedLocked()
	for _, n := range lanes[:k] {
		n.watch()
	}
	switch {
	case l.state.Load() != live || l.rx != nil && l.rx.arrived() || len(l.moved) > 0:
		return true
	case l.unheardLocked(): // it was given a key just now, for example
		return true
	case l.refused >= 0 && (l.tx != tx || l.tx != nil && l.tx.fits(l.tx.out.needs(uint64(l.refused)))):
		return true
	case l.base.Arm():
		l.lookLocked()
		return true
	}
	return l.t.news.Load() != l.heard
}

// unheardLocked reports whether there are requests whose completions cause no wake-up.
func (l *link) unheardLocked() bool {
	lanes, k := l.connectedLocked()
	return slices.ContainsFunc(lanes[:k], func(n *lane) bool { return n.bulk.unheard() })
}

// Disarm implements p2p.Link. A wake may still come. Beside a ring base stays armed: what comes
// there is not polled for.
func (l *link) Disarm() {
	if l.rx == nil {
		l.base.Disarm()
	}
}

// Close implements p2p.Link. It waits until the device has completed what was sent, but not for a
// peer that has ended or given up the lane, and until its queue pairs are closed; for both at most
// for lingerTime. After Close of the transport all its links have that time together: their devices
// repeat packets at the same time. The error names all queue pairs that stay open.
func (l *link) Close() error {
	l.once.Do(func() {
		working := l.state.Load() == live
		l.fail(fmt.Errorf("rdma: link to %v: %w", l.peer, p2p.ErrClosed), false)
		l.mu.Lock()
		l.closed, l.late = true, time.Now().Add(l.t.remaining(l.linger))
		if working {
			l.lingerLocked()
		}
		var left []*lane
		for i := range l.m.lanes {
			if c := &l.m.lanes[i]; !c.stage.busy() { // else its task closes it
				left = append(left, l.find(c.gen))
			}
		}
		l.m, l.lane, l.tx = machine{dialler: l.dialler, gen: l.m.gen}, nil, nil
		for _, n := range left {
			l.strandLocked(n)
		}
		l.mu.Unlock()
		l.cancel()
		l.wg.Wait()
		for _, n := range left {
			l.err = errors.Join(l.err, l.bury(n))
		}
		l.err = errors.Join(l.err, l.base.Close())
	})
	return l.err
}

// lingerLocked waits until what was sent over the lanes has arrived. It gives up the lock
// meanwhile.
func (l *link) lingerLocked() {
	timer := time.NewTimer(time.Until(l.late))
	defer timer.Stop()
	lanes, k := l.connectedLocked()
	for _, n := range lanes[:k] {
		if l.stageOf(n) == up && !l.lingerOnLocked(n, timer.C) {
			return
		}
	}
}

// lingerOnLocked waits for one lane. False: the time is over, or the peer has ended.
func (l *link) lingerOnLocked(n *lane, late <-chan time.Time) bool {
	asked := false
	for {
		news := l.t.next()
		armed := n.cq.Arm()
		n.reap()
		if n.posted == n.finished || armed != nil || n.err != nil {
			return true
		}
		if !asked && n.posted-n.finished < sendDepth {
			asked = true
			n.ask()
		}
		if l.rx != nil { // else another goroutine may be using base
			ended, more := l.skipLocked()
			if ended {
				return false
			}
			if more {
				n.ring()
			}
		}
		l.mu.Unlock()
		timeout := false
		select {
		case <-n.woken:
		case <-news:
		case <-late:
			timeout = true
		}
		l.mu.Lock()
		if timeout {
			return false
		}
	}
}

// skipLocked drops a control frame, if one has come over base. One by which the peer gives up a
// lane fails the lane; the others change nothing any more. Ended: base has. Unless there may be
// more, the next frame, or the end, is news.
func (l *link) skipLocked() (ended, more bool) {
	h, payload, err := l.base.Recv()
	if err != nil || h != nil && h.Len > maxText {
		return true, false
	}
	if h != nil {
		kind, gen := h.Kind, h.Seq
		if _, more = l.takeLocked(h, payload); more && kind == frameDown {
			if n := l.find(gen); n != nil {
				n.fail(errors.New("given up by the peer"))
			}
		}
	}
	more = more || l.base.Arm()
	return l.base.Err() != nil, more
}
