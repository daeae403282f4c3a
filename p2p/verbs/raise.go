package verbs

import (
	"fmt"
	"math/rand/v2"
	"time"

	"tutti/p2p"
)

// stage is how far the lane of a link has come. The dialler's goes through making, proposed,
// connecting, probing and up; the acceptor's through connecting, accepted, probing and up.
type stage int

const (
	making     stage = iota // a task makes its objects
	proposed                // the peer is asked for its end
	connecting              // a task connects the queue pair, and at the acceptor makes it before
	accepted                // the dialler is told
	probing                 // a request of this end is under way, which shows that data passes
	up                      // frames are sent over it
)

// busy reports whether a task uses the lane.
func (s stage) busy() bool { return s == making || s == connecting }

// Pauses before a lane is made again. They grow twofold while lanes do not last for lasting.
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

// makeLocked begins to make a lane after a pause.
func (l *link) makeLocked(pause time.Duration) {
	l.gen++
	n := &lane{gen: l.gen, peer: l.peer}
	l.lane, l.stage = n, making
	l.taskLocked(n, func() error {
		l.wait(pause)
		return l.open(n, nil)
	}, func() {
		l.stage, n.told = proposed, true
		l.tellLocked(frameProposal, n.gen, n.setup.encode())
	})
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
		kept := l.lane == n
		if kept {
			if err != nil {
				l.stage = accepted // of which no task is under way
				l.refuseLocked(n, err)
			} else {
				next()
			}
		}
		l.mu.Unlock()
		if !kept {
			l.bury(n)
		}
		l.t.tell()
	})
}

// refuseLocked drops a lane that could not be made.
func (l *link) refuseLocked(n *lane, err error) {
	if !l.dialler {
		text := err.Error()
		l.tellLocked(frameRefusal, n.gen, []byte(text[:min(len(text), maxText)]))
	}
	l.dropLocked(err)
}

// connectLocked begins to connect n, at the acceptor after having made it.
func (l *link) connectLocked(n *lane, theirs setup) {
	l.stage = connecting
	l.taskLocked(n, func() error {
		if !l.dialler {
			if err := l.open(n, &theirs); err != nil {
				return err
			}
		}
		return n.connect(theirs)
	}, func() {
		if l.dialler {
			l.stage, l.probe = probing, n.probe()
		} else {
			l.stage = accepted
			l.tellLocked(frameAcceptance, n.gen, n.setup.encode())
		}
	})
}

// dropLocked gives up the lane, under the rules of Link or before it carries frames: frames go over
// base from now on. The dialler begins to make another one.
func (l *link) dropLocked(reason error) {
	n := l.lane
	lasted := l.stage == up && time.Since(l.since) > lasting
	if l.stage < up {
		l.vain++
	}
	l.t.log.Info("rdma: frames go over TCP", "peer", l.peer, "lane", n.gen, "reason", reason)
	down := p2p.Header{Kind: frameDown, Service: service, Seq: n.gen, Count: 1}
	if l.rx == n {
		down.Off, down.Count = n.in.taken()
		l.rx = nil
	}
	if l.tx == n {
		l.tx, l.lost = nil, n
	}
	if n.told {
		l.out = append(l.out, control{h: down})
	}
	l.lane = nil
	l.strandLocked(n)
	if !l.stage.busy() {
		l.taskLocked(n, func() error { return nil }, nil) // closes it
	}
	if !l.dialler {
		return
	}
	if l.pause = min(2*l.pause, maxPause); lasted {
		l.pause = minPause
	}
	l.makeLocked(l.pause)
}

// tellLocked queues a control frame.
func (l *link) tellLocked(kind uint8, gen uint64, payload []byte) {
	h := p2p.Header{Kind: kind, Service: service, Seq: gen, Len: uint32(len(payload))}
	l.out = append(l.out, control{h, payload})
}

// controlLocked handles a control frame that base has returned. False: its payload has yet to
// arrive.
func (l *link) controlLocked(head *p2p.Header, payload []byte) bool {
	h := *head
	if h.Len > maxText {
		l.violated("%d bytes of payload in a frame of kind %d beside the ring, at most %d", h.Len, h.Kind, maxText)
		return true
	}
	b := append(l.part, payload...)
	if missing := int(h.Len) - len(b); missing > 0 {
		k, err := l.base.Fill(b[len(b) : len(b)+missing : cap(b)])
		if err != nil {
			l.cut(err)
			return true
		}
		if l.part = b[:len(b)+k]; k < missing {
			return false
		}
		b = l.part
	}
	l.base.Release()
	l.part = l.part[:0]
	n, current := l.lane, l.lane != nil && l.lane.gen == h.Seq
	asks := h.Kind == frameProposal
	switch {
	case l.dialler && asks || !l.dialler && (h.Kind == frameAcceptance || h.Kind == frameRefusal):
		l.violated("frame of kind %d from the wrong end", h.Kind)
		return true
	case asks == (h.Seq <= l.gen) || asks && (l.lane != nil || l.tasks >= maxTasks):
		l.violated("frame of kind %d about lane %d after %d", h.Kind, h.Seq, l.gen)
		return true
	}
	var theirs setup
	if asks || h.Kind == frameAcceptance {
		var err error
		if theirs, err = decodeSetup(b); err != nil {
			l.violated("%v", err)
			return true
		}
	}
	switch h.Kind {
	case frameProposal:
		l.gen = h.Seq
		l.lane = &lane{gen: h.Seq, peer: l.peer, told: true}
		l.connectLocked(l.lane, theirs)
	case frameAcceptance:
		if current && l.stage == proposed {
			l.connectLocked(n, theirs)
		}
	case frameRefusal:
		if current && l.stage == proposed {
			l.dropLocked(fmt.Errorf("refused by the peer: %q", b))
		}
	case frameReady:
		switch {
		case !current: // it is given up here, and the peer will know
		case l.dialler && l.stage == up && l.rx == nil:
			l.rx = n
			l.lookLocked()
		case !l.dialler && l.stage == accepted:
			l.rx, l.stage, l.probe = n, probing, n.probe()
			l.lookLocked()
		default:
			l.violated("lane %d is ready in stage %d", n.gen, l.stage)
		}
	case frameFenced, frameClaim, frameKey, frameRevoke, frameRevoked:
		if err := l.memoryLocked(&h, b); err != nil {
			l.violated("%v", err)
		}
	case frameDown:
		if current {
			l.dropLocked(fmt.Errorf("given up by the peer"))
		}
		if n := l.lost; n != nil && n.gen == h.Seq {
			if h.Off > n.out.tail || h.Off < n.out.freed {
				l.violated("it has taken %d bytes of %d, and freed %d", h.Off, n.out.tail, n.out.freed)
				return true
			}
			l.lost, l.until = nil, n.out.tail
			l.rest = &consumer{data: n.out.data, pos: h.Off, seq: h.Count}
		}
	default:
		l.violated("frame of kind %d beside the ring", h.Kind)
	}
	return true
}
