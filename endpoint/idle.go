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

// ageLocked notes whether anything has happened since its last call.
func (s *session) ageLocked(now time.Time) {
	in, out := s.trafficLocked()
	sum := in + out
	if sum != s.traffic || !s.idleLocked() {
		s.traffic, s.since = sum, now
		return
	}
	if !s.bye && now.Sub(s.since) >= s.ep.cfg.IdleTimeout {
		s.bye = true
		s.conns[0].Later(wire.Header{Op: wire.Bye}.Append(nil))
		s.peer.touchLocked(s.conns[0])
	}
}

// idleLocked reports whether nothing is under way and nobody waits for something of the peer.
func (s *session) idleLocked() bool {
	return len(s.requests) == 0 && len(s.backlog)+len(s.asking) == 0 && len(s.serving) == 0 &&
		s.owed+s.owedNotes == 0 && len(s.untaken) == 0 &&
		len(s.sendq) == 0 && len(s.peer.recvs) == 0 && len(s.peer.waiting) == 0
}

// byeLocked answers that the peer has nothing to do, or ends a session that both ends have done
// with.
func (s *session) byeLocked(c *link.Conn) {
	if s.bye {
		s.partLocked()
		return
	}
	answer := wire.Stay
	if s.idleLocked() {
		answer = wire.Bye
	}
	c.Later(wire.Header{Op: answer}.Append(nil))
	s.peer.touchLocked(c)
	if answer == wire.Bye { // the peer closes the connections
		s.bye, s.up = true, false
		s.closeMailLocked(nil)
		s.tallyLocked()
		if s.peer.session == s {
			s.peer.session = nil
		}
	}
}

// stayLocked goes on with a session.
func (s *session) stayLocked() {
	if !s.bye || !s.up {
		return
	}
	s.bye = false
	s.peer.upLocked(s)
}

// partLocked ends a session in peace: what came meanwhile makes another one.
func (s *session) partLocked() {
	p := s.peer
	waiting := p.waiting
	p.waiting = nil
	s.breakLocked(fmt.Errorf("%w: it was idle", ErrBroken))
	if len(waiting) > 0 {
		p.waiting = waiting
		p.connectLocked()
	}
}
