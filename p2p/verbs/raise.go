package verbs

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"time"

	"tutti/p2p"
)

// Pauses before a lane is made again. They grow twofold while lanes do not last for lasting, and
// while those beside a lane in use do not come up.
const (
	minPause = 10 * time.Millisecond
	maxPause = 2 * time.Second
	lasting  = 5 * time.Second
)

// Times after which a lane with rails that never worked is made again. They grow twofold while that
// changes nothing.
const (
	minMend = 10 * time.Second
	maxMend = 10 * time.Minute
)

// maxTasks bounds the tasks that a peer can cause.
const maxTasks = 16

// find returns a lane that is not given up, or is lost, by its number; nil: there is none.
func (l *link) find(gen uint64) *lane {
	for _, n := range l.lanes {
		if n.gen == gen {
			return n
		}
	}
	return nil
}

// has reports whether a lane is not given up.
func (l *link) has(n *lane) bool { return l.m.find(n.gen) != nil }

// stageOf returns the stage of a lane, or making if it is given up.
func (l *link) stageOf(n *lane) stage {
	if c := l.m.find(n.gen); c != nil {
		return c.stage
	}
	return making
}

// connectedLocked returns the lanes whose queue pairs are connected and carry requests.
func (l *link) connectedLocked() (list [2]*lane, n int) {
	for i := range l.m.lanes {
		if c := &l.m.lanes[i]; c.stage >= probing {
			list[n] = l.find(c.gen)
			n++
		}
	}
	return list, n
}

// didLocked carries out what the machine has decided, because of an error, if there is one, and the
// frame h, if there is one, with the setup theirs.
func (l *link) didLocked(reason error, h *p2p.Header, theirs *setup) {
	lasted := false
	for len(l.m.acts) > 0 {
		acts := l.m.acts
		l.m.acts = nil
		for _, a := range acts {
			switch n := l.find(a.gen); a.do {
			case doMake:
				l.makeLocked(&a, theirs, lasted)
			case doConnect:
				theirs := *theirs
				l.taskLocked(n, func() error { return n.connect(theirs) }, func() { l.m.connected(n.gen) })
			case doProbe:
				n.probed = n.probe()
			case doTell:
				l.tellLocked(n, &a, reason)
			case doEnd:
				if pos, _ := n.in.taken(); h.Off < pos || h.Off-pos > uint64(len(n.in.data)) {
					l.violated("its frames of lane %d end at %d, and %d are read", n.gen, h.Off, pos)
				}
				n.end = h.Off
			case doResend:
				l.rest = &consumer{data: slices.Clone(n.out.data), pos: n.down.pos, seq: n.down.seq}
				l.until = n.out.tail
			case doClose:
				lasted = a.stage == up && time.Since(l.since) > lasting
				l.closeLocked(n, &a, reason)
			}
		}
	}
	l.lanes = slices.DeleteFunc(l.lanes, func(n *lane) bool {
		return !l.has(n) && !slices.ContainsFunc(l.m.lost, func(c course) bool { return c.gen == n.gen })
	})
	l.lane = nil
	if c := l.m.use(); c != nil {
		l.lane = l.find(c.gen)
	}
	if n := l.find(l.m.rx); n != l.rx {
		if l.rx == nil {
			l.lookLocked()
		}
		l.rx = n
	}
	if n := l.find(l.m.tx); n != l.tx {
		l.goneOverLocked(n)
	}
}

// goneOverLocked says that frames are sent over n from now on.
func (l *link) goneOverLocked(n *lane) {
	old := l.tx
	if old != nil {
		old.post()
	}
	if l.tx = n; n == nil {
		return
	}
	l.since, l.apart = time.Now(), minPause
	l.t.log.Info("rdma: frames and data go over devices", "peer", l.peer, "lane", n.gen, "frames", n.port.at,
		"data", n.bulk.names())
	if old != nil && l.has(old) {
		old.bulk.leaving = true
		l.handLocked(old)
	}
}

// handLocked hands moves of a lane that is being left over to the one in use, with what is left of
// them.
func (l *link) handLocked(old *lane) {
	n := l.tx
	for _, v := range slices.Clone(old.bulk.moves) {
		if v.under > 0 || v.reads != 0 || v.abandoned {
			continue
		}
		m, at := v.m, v.at
		old.bulk.remove(v)
		if !l.beginLocked(n, m, at) {
			m.OK = false
			l.moved = append(l.moved, m)
		}
	}
}

// makeLocked begins to make a lane: the dialler's after a pause, the acceptor's for a setup.
func (l *link) makeLocked(a *act, theirs *setup, lasted bool) {
	n := &lane{gen: a.gen, peer: l.peer, end: noEnd, told: !l.dialler}
	l.lanes = append(l.lanes, n)
	if !l.dialler {
		theirs := *theirs
		l.taskLocked(n, func() error {
			if err := l.open(n, &theirs); err != nil {
				return err
			}
			return n.connect(theirs)
		}, func() { l.m.connected(n.gen) })
		return
	}
	pause := time.Duration(0)
	switch {
	case a.beside:
		pause = l.apart
		l.apart = min(2*l.apart, maxPause)
	case a.gen > 1:
		if l.pause = min(2*l.pause, maxPause); lasted {
			l.pause = minPause
		}
		pause = l.pause
	}
	l.taskLocked(n, func() error {
		l.wait(pause)
		return l.open(n, nil)
	}, func() { l.m.made(n.gen) })
}

// wait waits for the end of a pause, of the link, or until a port comes back.
func (l *link) wait(pause time.Duration) {
	if pause == 0 {
		return
	}
	timer := time.NewTimer(pause/2 + rand.N(pause))
	defer timer.Stop()
	ups := l.t.ups.Load()
	for news := l.t.next(); ups == l.t.ups.Load(); news = l.t.next() {
		select {
		case <-timer.C:
			return
		case <-l.ctx.Done():
			return
		case <-news:
		}
	}
}

// open makes the objects of n, of the acceptor's end for a proposal.
func (l *link) open(n *lane, theirs *setup) error {
	if err := l.ctx.Err(); err != nil {
		return err
	}
	return l.t.make(n, l.ring, theirs, l.attempt(), l.t.host.Wake)
}

// attempt returns which port the frames' queue pair of the next lane is on: the nearest one, unless
// lanes have never come up since the ports have last changed.
func (l *link) attempt() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	if ups := l.t.ups.Load(); ups != l.ups {
		l.ups, l.vain, l.mend = ups, 0, minMend
	}
	return l.vain
}

// taskLocked runs work on n in a goroutine, and then next with the lock, unless work has failed or
// n was dropped meanwhile.
func (l *link) taskLocked(n *lane, work func() error, next func()) {
	l.tasks++
	l.wg.Go(func() {
		err := work()
		l.mu.Lock()
		l.tasks--
		kept := l.has(n) && !l.closed
		if kept {
			if err == nil {
				next()
			} else {
				l.m.refuse(n.gen)
			}
			l.didLocked(err, nil, nil)
		}
		l.mu.Unlock()
		if !kept {
			err := l.bury(n)
			l.mu.Lock()
			l.err = errors.Join(l.err, err)
			l.mu.Unlock()
		}
		l.t.tell()
	})
}

// closeLocked closes a lane that is given up, or that both ends have left.
func (l *link) closeLocked(n *lane, a *act, reason error) {
	// A lane beside the one in use is made anew on the same port: another one may be farther.
	if alone := l.lane == nil || l.lane == n; alone && a.stage < up && a.stage != making {
		l.vain++
	}
	text := "rdma: frames go over TCP"
	if l.m.tx != 0 {
		text = "rdma: a lane is given up"
	}
	if reason != nil {
		l.t.log.Info(text, "peer", l.peer, "lane", n.gen, "reason", reason)
	}
	l.strandLocked(n)
	if !a.stage.busy() {
		l.taskLocked(n, func() error { return nil }, nil)
	}
}

// dropLocked gives up a lane, under the rules of Link or before it carries frames.
func (l *link) dropLocked(n *lane, reason error) {
	l.m.fail(n.gen)
	l.didLocked(reason, nil, nil)
}

// giveUpLocked is dropLocked for a lane in whose ring frames may be. A peer whose TCP connection
// has ended sends none of them again: then the link fails, and the lane stays to deliver them.
func (l *link) giveUpLocked(n *lane, reason error) {
	if l.listenLocked(); l.state.Load() == live && l.has(n) {
		l.dropLocked(n, reason)
	}
}

// tellLocked queues a control frame about a lane.
func (l *link) tellLocked(n *lane, a *act, reason error) {
	c := control{h: p2p.Header{Kind: a.kind, Service: service, Seq: a.gen}}
	switch a.kind {
	case frameProposal, frameAcceptance:
		n.told, c.payload = true, n.setup.encode()
	case frameRefusal:
		text := reason.Error()
		c.payload = []byte(text[:min(len(text), maxText)])
	case frameReady:
		if c.h.Call = a.follows; a.follows != 0 {
			c.h.Off = l.find(a.follows).out.tail
		}
	case frameDown:
		c.h.Count = 1
		if !a.stage.busy() {
			c.h.Off, c.h.Count = n.in.taken()
		}
		if a.followed {
			c.h.Flags = 1
		}
	}
	c.h.Len = uint32(len(c.payload))
	l.out = append(l.out, c)
}

// controlLocked handles a control frame that base has returned. False: its payload has yet to
// arrive, or the link has failed.
func (l *link) controlLocked(head *p2p.Header, payload []byte) bool {
	h := *head
	b, ok := l.takeLocked(&h, payload)
	if !ok {
		return false
	}
	if err := l.handleLocked(&h, b); err != nil {
		l.violated("%v", err)
	}
	return true
}

// takeLocked returns the payload of a control frame, until the next one is taken, and releases the
// frame. False: it has yet to arrive, or the link has failed.
func (l *link) takeLocked(h *p2p.Header, payload []byte) ([]byte, bool) {
	if h.Len > maxText {
		l.violated("%d bytes of payload in a frame of kind %d beside the ring, at most %d", h.Len, h.Kind, maxText)
		return nil, false
	}
	b := append(l.part, payload...)
	if missing := int(h.Len) - len(b); missing > 0 {
		k, err := l.base.Fill(b[len(b) : len(b)+missing : cap(b)])
		if err != nil {
			l.cut(err)
			return nil, false
		}
		if l.part = b[:len(b)+k]; k < missing {
			return nil, false
		}
		b = l.part
	}
	l.base.Release()
	l.part = l.part[:0]
	return b, true
}

// handleLocked handles a control frame. The error is a violation of the protocol.
func (l *link) handleLocked(h *p2p.Header, b []byte) error {
	var theirs setup
	var reason error
	n := l.find(h.Seq)
	switch h.Kind {
	case frameProposal, frameAcceptance:
		var err error
		if theirs, err = decodeSetup(b); err != nil {
			return err
		}
		if h.Kind == frameProposal && l.tasks >= maxTasks {
			return fmt.Errorf("frame of kind %d about lane %d during %d tasks", h.Kind, h.Seq, l.tasks)
		}
	case frameRefusal:
		reason = fmt.Errorf("refused by the peer: %q", b)
	case frameShown, frameReady, frameLeft:
	case frameWish: // its ports have changed
		l.vain = 0
	case frameDown:
		reason = fmt.Errorf("given up by the peer")
		if n != nil && l.m.sentOver(h.Seq) {
			if h.Off > n.out.tail || h.Off < n.out.freed || h.Off%unit != 0 {
				return fmt.Errorf("it has taken %d bytes of %d, and freed %d", h.Off, n.out.tail, n.out.freed)
			}
			n.down = position{h.Off, h.Count}
		}
	case frameFenced, frameClaim, frameKey, frameRevoke, frameRevoked:
		if h.Seq > l.m.gen {
			return errStage(h.Kind, h.Seq, fmt.Sprintf("after %d", l.m.gen))
		}
		return l.memoryLocked(h, b)
	default:
		return fmt.Errorf("frame of kind %d beside the ring", h.Kind)
	}
	if err := l.m.heard(h.Kind, h.Seq, h.Call, h.Flags == 1); err != nil {
		l.m.acts = nil
		return err
	}
	l.didLocked(reason, h, &theirs)
	return nil
}
