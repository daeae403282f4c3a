package verbs

import (
	"context"
	"errors"
	"fmt"
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

// lingerTime bounds how long Close waits for the device to complete what was sent.
const lingerTime = 500 * time.Millisecond

// framed is a link whose puts and gets travel as frames, and the data of long ones by RDMA. It
// implements p2p.OneSided.
type framed struct{ *rma.Frames }

// Distant implements p2p.Distant.
func (framed) Distant() {}

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
	err     error // of Close
	heard   uint64
	refused int    // bytes of the last frame, if there was no room for it; else -1
	part    []byte // of the payload of a control frame

	lane  *lane // in stage; nil: there is none
	stage stage
	probe int    // requests that must have finished before frames are sent over the lane
	gen   uint64 // of the newest lane
	pause time.Duration
	vain  int           // lanes that have not come up since the ports have changed
	ups   uint64        // when they have: see Transport.ups
	since time.Time     // the lane is up
	mend  time.Duration // see minMend
	tx    *lane         // frames are sent over its ring; nil: over base
	limbo []*lane       // given up, with moves or ghosts that may still change memory
	moved []*rma.Move   // that have ended
	later []*rma.Move   // puts that wait until no ghosts are in limbo
	lost  *lane         // frames that were sent over it wait for frameDown
	rest  *consumer     // of these, those to be sent again over base, which are all in its ring's copy
	until uint64        // the position behind them
	out   []control     // to be sent over base, oldest first

	ctx    context.Context // ends at Close
	cancel context.CancelFunc
	tasks  int // that make, connect or close lanes
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
	l := &link{t: t, peer: peer, dialler: dialler, base: base, linger: lingerTime, least: leastMove,
		ring: ringOf(base.MaxFrame()), heard: ^uint64(0), refused: -1, part: make([]byte, 0, maxText),
		pause: minPause, mend: minMend}
	l.max = maxFrame(l.ring)
	l.ctx, l.cancel = context.WithCancel(context.Background())
	if dialler {
		l.mu.Lock()
		l.makeLocked(0)
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
func (l *link) Send(h *p2p.Header, payload []byte) (bool, error) {
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
	sent := l.tx != nil && l.tx.send(h, payload)
	if !sent {
		l.turnLocked()
		switch {
		case l.state.Load() != live:
		case l.tx != nil:
			sent = l.tx.send(h, payload)
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
func (l *link) idleLocked() bool { return len(l.out) == 0 && l.lost == nil && l.rest == nil }

// turnLocked makes progress, under the rules of Link: it takes completions, reads base if frames do
// not arrive there, and sends what waits.
func (l *link) turnLocked() {
	if l.closed {
		return
	}
	if n := l.lane; n != nil && l.stage >= probing {
		n.turn()
		l.reapLocked()
		if n.err == nil && n.lost() {
			n.fail(errors.New("a port is down"))
		}
		l.betterLocked(n)
		l.checkLocked()
	}
	for news := l.t.news.Load(); news != l.heard && l.state.Load() == live; news = l.t.news.Load() {
		l.heard = news
		l.listenLocked()
	}
	l.pumpLocked()
}

// betterLocked gives up a lane whose addresses have moved, and one in use if another one may use
// more ports or rails.
func (l *link) betterLocked(n *lane) {
	if n.err != nil {
		return
	}
	ups := l.t.ups.Load()
	if n.seen != ups {
		n.seen = ups
		if err := n.moved(); err != nil {
			n.fail(err)
			return
		}
	}
	if l.stage != up {
		return
	}
	if n.ups != ups {
		n.ups = ups
		// An acceptor with a port for each rail of its peer cannot use more of them.
		if n.bulk.dead > 0 || (l.dialler || len(n.bulk.rails) > len(n.devices)) && l.t.missing(n) {
			l.pause = minPause
			n.fail(errors.New("ports have come back or changed"))
			return
		}
	}
	if l.dialler && n.bulk.dead > 0 && time.Since(l.since) > l.mend {
		l.mend = min(2*l.mend, maxMend)
		n.fail(fmt.Errorf("%d queue pairs for data do not work", n.bulk.dead))
	}
}

// checkLocked drops the lane if it has failed.
func (l *link) checkLocked() {
	switch n := l.lane; {
	case n == nil || n.err == nil:
	case errors.Is(n.err, p2p.ErrProtocol):
		l.violated("%v", n.err)
	default:
		l.dropLocked(n.err)
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

// pumpLocked sends what waits to be sent over base, in its order: control frames, frames of a lost
// lane, and that frames follow over a new one.
func (l *link) pumpLocked() {
	for len(l.out) > 0 {
		if !l.sendLocked(&l.out[0].h, l.out[0].payload) {
			return
		}
		if n := l.lane; l.out[0].h.Kind == frameKey && n != nil && n.gen == l.out[0].h.Seq {
			n.claims--
		}
		l.out = l.out[:copy(l.out, l.out[1:])]
	}
	for l.rest != nil {
		c := l.rest
		if !c.held {
			if c.pos == l.until {
				l.rest = nil
				break
			}
			if ok, err := c.next(); !ok || c.pos+frameBytes(uint64(c.hdr.Len)) > l.until {
				l.violated("it has taken %d bytes of %d, where no frame ends (%v)", c.pos, l.until, err)
				return
			}
		}
		if !l.sendLocked(&c.hdr, c.payload) {
			return
		}
		c.release()
	}
	if n := l.lane; n != nil && l.stage == probing && n.finished >= l.probe && l.lost == nil &&
		(l.dialler || l.rx == n) && l.sendLocked(&p2p.Header{Kind: frameReady, Service: service, Seq: n.gen}, nil) {
		l.stage, l.tx, l.since = up, n, time.Now()
		l.t.log.Info("rdma: frames and data go over devices", "peer", l.peer, "lane", n.gen, "frames", n.port.at,
			"data", n.bulk.names())
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
	if l.tx != nil && l.tx.err == nil {
		return true, nil
	}
	l.turnLocked()
	done := l.tx != nil
	if !done && l.state.Load() == live {
		var err error
		if done, err = l.base.Flush(); err != nil {
			l.cut(err)
		}
		done = done && l.lost == nil && l.rest == nil
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
		ok, err := n.in.next()
		switch {
		case err != nil:
			l.violated("%v", err)
		case ok:
			l.held = n
		case state == draining:
			return nil, nil, l.Err()
		case !l.poll():
			return nil, nil, nil
		}
	}
}

// recvBase is Recv while frames arrive over base. Again: the caller looks anew.
func (l *link) recvBase(state uint32) (h *p2p.Header, payload []byte, again bool, err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed {
		return nil, nil, true, nil
	}
	if state == live && (l.t.news.Load() != l.heard || len(l.out) > 0 || l.rest != nil ||
		l.lane != nil && l.stage >= probing) {
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
	if l.state.Load() != live || l.rx != nil && l.rx.in.arrived() {
		return true
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed {
		return true
	}
	if n := l.lane; n != nil && l.stage >= probing && n.err == nil {
		if err := n.arm(); err != nil {
			n.fail(err)
		}
	}
	// What has arrived before Arm wakes nobody.
	tx := l.tx
	l.turnLocked()
	switch {
	case l.state.Load() != live || l.rx != nil && l.rx.in.arrived() || len(l.moved) > 0:
		return true
	case l.lane != nil && l.stage >= probing && l.lane.bulk.unheard(): // it was given a key just now
		return true
	case l.refused >= 0 && (l.tx != tx || l.tx != nil && l.tx.fits(l.tx.out.needs(uint64(l.refused)))):
		return true
	case l.base.Arm():
		l.lookLocked()
		return true
	}
	return l.t.news.Load() != l.heard
}

// Disarm implements p2p.Link. A wake may still come. Beside a ring base stays armed: what comes
// there is not polled for.
func (l *link) Disarm() {
	if l.rx == nil {
		l.base.Disarm()
	}
}

// Close implements p2p.Link. It waits until the device has completed what was sent, at most for
// lingerTime, and not for a peer that has ended.
func (l *link) Close() error {
	l.once.Do(func() {
		working := l.state.Load() == live
		l.fail(fmt.Errorf("rdma: link to %v: %w", l.peer, p2p.ErrClosed), false)
		l.mu.Lock()
		l.closed = true
		if n := l.tx; n != nil && working {
			l.lingerLocked(n)
		}
		n := l.lane
		if n != nil && l.stage.busy() { // its task closes it
			n = nil
		}
		l.lane, l.tx = nil, nil
		if n != nil {
			l.strandLocked(n)
		}
		l.mu.Unlock()
		l.cancel()
		l.wg.Wait()
		if n != nil {
			l.err = l.bury(n)
		}
		l.err = errors.Join(l.err, l.base.Close())
	})
	return l.err
}

// lingerLocked waits until what was sent over n has arrived. It gives up the lock meanwhile.
func (l *link) lingerLocked(n *lane) {
	timer := time.NewTimer(l.linger)
	defer timer.Stop()
	asked := false
	for {
		news := l.t.next()
		armed := n.cq.Arm()
		n.reap()
		if n.posted == n.finished || armed != nil || n.err != nil {
			return
		}
		if !asked && n.posted-n.finished < sendDepth {
			asked = true
			n.ask()
		}
		if l.rx != nil { // else another goroutine may be using base
			if _, _, err := l.base.Recv(); err != nil || l.base.Arm() {
				return
			}
		}
		l.mu.Unlock()
		timeout := false
		select {
		case <-n.woken:
		case <-news:
		case <-timer.C:
			timeout = true
		}
		l.mu.Lock()
		if timeout {
			return
		}
	}
}
