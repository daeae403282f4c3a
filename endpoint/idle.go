package endpoint

import (
	"fmt"
	"time"

	"tutti/endpoint/internal/link"
	"tutti/endpoint/internal/wire"
)

// sweep says goodbye on sessions that have been idle for IdleTimeout.
func (e *Endpoint) sweep() {
	tick := time.NewTicker(max(e.cfg.IdleTimeout/4, time.Millisecond))
	defer tick.Stop()
	for {
		select {
		case <-tick.C:
		case <-e.life.Done():
			return
		}
		for _, p := range e.Peers() {
			p.mu.Lock()
			if s := p.session; s != nil && s.up {
				s.ageLocked(time.Now())
			}
			p.unlock()
		}
	}
}

// ageLocked notes whether anything but inquiries has happened since its last call.
func (s *session) ageLocked(now time.Time) {
	if s.frames != s.seen || !s.restsLocked() {
		s.seen, s.since = s.frames, now
		return
	}
	if !s.bye && s.idleLocked() && now.Sub(s.since) >= s.ep.cfg.IdleTimeout {
		s.byeToLocked(s.conns[:1])
	}
}

// byeToLocked tells the peer that this end has nothing to do, and begins nothing any more. Without
// an answer the session ends after a while.
func (s *session) byeToLocked(conns []*link.Conn) {
	s.bye = true
	s.limitLocked(func() {
		if s.bye { // the peer is lost, or has stopped
			s.breakLocked(fmt.Errorf("%w: the peer did not answer", ErrBroken))
			s.peer.resumeLocked()
		}
	})
	for _, c := range conns {
		c.Later(wire.Header{Op: wire.Bye}.Append(nil))
		s.peer.touchLocked(c)
	}
}

// idleLocked reports whether nothing is under way and no call waits for the peer.
func (s *session) idleLocked() bool {
	return len(s.requests)+s.asking.len() == 0 && s.restsLocked()
}

// restsLocked is idleLocked, but for inquiries of this end, which do not keep a session.
func (s *session) restsLocked() bool {
	for _, r := range s.requests {
		if r.query == nil || r.query.op != wire.Inquire {
			return false
		}
	}
	for _, q := range s.asking.all() {
		if q.op != wire.Inquire {
			return false
		}
	}
	return s.path.restsLocked() && s.backlog.len()+len(s.serving) == 0 && s.owed+s.owedNotes == 0 &&
		len(s.untaken)+s.sendq.len() == 0 && s.lending == nil && s.peer.recvs.len()+len(s.peer.waiting) == 0
}

// limitLocked has f called with the lock after greetTimeout, unless the session is broken by then
// or has another limit. The time has two halves, so that a process that was stopped handles what
// has come meanwhile before its time is over.
func (s *session) limitLocked(f func()) {
	if s.limit != nil {
		s.limit.Stop()
	}
	var t *time.Timer
	again := true
	t = time.AfterFunc(greetTimeout/2, func() {
		s.peer.mu.Lock()
		switch {
		case s.limit != t || s.broken:
		case again:
			again = false
			t.Reset(greetTimeout / 2)
		default:
			f()
		}
		s.peer.unlock()
	})
	s.limit = t
}

// byeLocked answers that the peer has nothing to do, or ends a session that both ends have done
// with.
func (s *session) byeLocked(c *link.Conn) error {
	switch {
	case s.bye:
		s.partLocked()
		return nil
	case !s.up && !s.dialled:
		s.breakLocked(fmt.Errorf("%w: the peer has ended it before it was complete", ErrBroken))
		s.peer.resumeLocked()
		return nil
	}
	if err := s.checkBacklog(c); err != nil {
		return err
	}
	answer := wire.Stay
	if s.up && s.idleLocked() && !s.path.usedLocked(s.ep.cfg.IdleTimeout) {
		answer = wire.Bye
	}
	c.Later(wire.Header{Op: answer}.Append(nil))
	s.peer.touchLocked(c)
	if answer == wire.Bye { // the peer closes the connections
		s.bye, s.up, s.parted = true, false, true
		s.closeMailLocked(nil)
		s.tallyLocked()
		p := s.peer
		if p.session == s {
			p.session = nil
		}
		if p.parting != nil {
			p.parting.partLocked()
		}
		p.parting = s
		s.limitLocked(s.partLocked)
	}
	return nil
}

// stayLocked goes on with a session.
func (s *session) stayLocked() {
	if !s.bye || !s.up {
		return
	}
	s.bye = false
	s.limit.Stop()
	s.peer.upLocked(s)
}

// partLocked ends a session in peace: what came meanwhile makes another one.
func (s *session) partLocked() {
	s.breakLocked(fmt.Errorf("%w: it was idle", ErrBroken))
	s.peer.resumeLocked()
}
