package endpoint

import (
	"context"
	"errors"

	"tutti/endpoint/internal/wire"
	"tutti/endpoint/stats"
)

// cause says why an operation failed.
type cause uint8

const (
	other cause = iota
	timedOut
	cancelled
	broken
	closed
	noRegion
	stale
	noRights
	outside
	wrongSize
	failed
	busy
	refused
	unauthenticated
	causes
)

// String is what statistics call it.
func (c cause) String() string {
	return [causes]string{"other", "timeout", "cancelled", "broken", "closed", "no region", "stale", "rights", "bounds",
		"size", "failed", "busy", "refused", "authentication"}[c]
}

// causeOf classifies the error of an operation.
func causeOf(err error) cause {
	for _, c := range [...]struct {
		is  error
		why cause
	}{{ErrCancelled, cancelled}, {context.DeadlineExceeded, timedOut}, {ErrClosed, closed}, {ErrAuth, unauthenticated},
		{ErrRefused, refused}, {ErrNoRegion, noRegion}, {ErrStale, stale}, {ErrRights, noRights}, {ErrBounds, outside},
		{ErrSize, wrongSize}, {ErrFailed, failed}, {ErrBusy, busy}, {ErrBroken, broken}} {
		if errors.Is(err, c.is) {
			return c.why
		}
	}
	return other
}

// codeCauses has the causes of codes of the wire.
var codeCauses = [...]cause{wire.Cancelled: cancelled, wire.NoRegion: noRegion, wire.Stale: stale,
	wire.Rights: noRights, wire.Bounds: outside, wire.Failed: failed, wire.Busy: busy, wire.Denied: refused}

// counts are what has happened with a peer. peer.mu guards them, or Endpoint.pastMu those of peers
// that were forgotten.
type counts struct {
	done             [OpRecv + 1]stats.Count
	failed           [causes]uint64
	served           [OpRecv + 1]stats.Count // OpRead and OpWrite
	refused          [causes]uint64          // requests of the peer
	sessions, broken uint64
	direct           [OpRecv + 1]stats.Count // of done, what went by RDMA
	detours          uint64                  // paths that failed
	sent, received   uint64                  // on connections of sessions that have ended, or are about to
}

// countLocked changes the peer's counts by f, or those of forgotten peers if it is one.
func (p *Peer) countLocked(f func(*counts)) {
	if !p.forgotten {
		f(&p.counts)
		return
	}
	p.ep.pastMu.Lock()
	defer p.ep.pastMu.Unlock()
	f(&p.ep.past)
}

// endedLocked counts an operation.
func (p *Peer) endedLocked(t *task) {
	if t.result.Err == nil && !p.forgotten {
		p.counts.done[t.Kind].Add(uint64(t.result.N))
		return
	}
	p.countLocked(func(c *counts) {
		if t.result.Err != nil {
			c.failed[causeOf(t.result.Err)]++
		} else {
			c.done[t.Kind].Add(uint64(t.result.N))
		}
	})
}

// servedLocked counts a request of the peer that has ended, of n bytes if it was done.
func (p *Peer) servedLocked(kind Kind, code wire.Code, n uint64) {
	if code == wire.OK && !p.forgotten {
		p.counts.served[kind].Add(n)
		return
	}
	p.countLocked(func(c *counts) {
		if code != wire.OK {
			c.refused[codeCauses[code]]++
		} else {
			c.served[kind].Add(n)
		}
	})
}

// forgetLocked moves the counts to those of forgotten peers. Endpoint.mu is held, too, so that
// Stats finds them at one place.
func (p *Peer) forgetLocked() {
	if p.forgotten {
		return
	}
	p.forgotten = true
	p.countLocked(func(c *counts) { c.add(&p.counts) })
}

func (c *counts) add(o *counts) {
	for i := range c.done {
		c.done[i].N, c.done[i].Bytes = c.done[i].N+o.done[i].N, c.done[i].Bytes+o.done[i].Bytes
		c.served[i].N, c.served[i].Bytes = c.served[i].N+o.served[i].N, c.served[i].Bytes+o.served[i].Bytes
	}
	for i := range c.failed {
		c.failed[i] += o.failed[i]
		c.refused[i] += o.refused[i]
	}
	for i := range c.direct {
		c.direct[i].N, c.direct[i].Bytes = c.direct[i].N+o.direct[i].N, c.direct[i].Bytes+o.direct[i].Bytes
	}
	c.detours += o.detours
	c.sessions += o.sessions
	c.broken += o.broken
	c.sent += o.sent
	c.received += o.received
}

// sumLocked adds what there is of a peer to s and sum.
func (p *Peer) sumLocked(s *stats.Endpoint, sum *counts) {
	sum.add(&p.counts)
	for _, t := range p.due {
		s.Pending[t.Kind.String()]++
	}
	for _, a := range p.mail.all() {
		s.Waiting.Add(uint64(a.total))
	}
	x := p.session
	if x == nil {
		return
	}
	if x.up {
		s.Connected++
		s.Modes[x.modeLocked().String()]++
		s.Paths[x.pathLocked().String()]++
	}
	for _, a := range x.arrivals {
		switch {
		case a.task != nil || a.dropped:
		case a.offered:
			s.Offered.Add(uint64(a.total))
		case a.whole:
			s.Waiting.Add(uint64(a.total))
		}
	}
	for _, c := range x.conns {
		if c != nil {
			s.Conns++
		}
	}
	in, out := x.trafficLocked()
	sum.received, sum.sent = sum.received+in-x.tallied[0], sum.sent+out-x.tallied[1]
}

// trafficLocked returns the bytes that a session has received and sent.
func (s *session) trafficLocked() (in, out uint64) {
	for _, c := range s.conns {
		if c != nil {
			r, w := c.Traffic()
			in, out = in+r, out+w
		}
	}
	return in, out
}

// tallyLocked adds the traffic of a session that ends to the counts.
func (s *session) tallyLocked() {
	in, out := s.trafficLocked()
	s.peer.countLocked(func(c *counts) {
		c.received, c.sent = c.received+in-s.tallied[0], c.sent+out-s.tallied[1]
	})
	s.tallied = [2]uint64{in, out}
}

// Stats returns the endpoint's state and counters: see package stats, whose All has those of all
// endpoints of the process. It takes the lock of each peer for a moment.
func (e *Endpoint) Stats() stats.Endpoint {
	s := stats.Endpoint{Name: e.info.Name, ID: idText(e.id), Done: map[string]stats.Count{},
		Pending: map[string]int{}, Failed: map[string]uint64{}, Served: map[string]stats.Count{},
		Refused: map[string]uint64{}, Strangers: e.strangers.Load(), Modes: map[string]int{},
		Paths: map[string]int{}, Direct: map[string]stats.Count{}}
	e.mu.Lock()
	e.pastMu.Lock()
	sum := e.past
	e.pastMu.Unlock()
	s.Peers = len(e.peers)
	for _, p := range e.peers {
		p.mu.Lock()
		p.sumLocked(&s, &sum)
		p.mu.Unlock()
	}
	e.mu.Unlock()
	for kind := OpRead; kind <= OpRecv; kind++ {
		if c := sum.done[kind]; c.N > 0 {
			s.Done[kind.String()] = c
		}
		if c := sum.served[kind]; c.N > 0 {
			s.Served[kind.String()] = c
		}
	}
	for why := range causes {
		if n := sum.failed[why]; n > 0 {
			s.Failed[why.String()] = n
		}
		if n := sum.refused[why]; n > 0 {
			s.Refused[why.String()] = n
		}
	}
	sum.directTo(&s)
	s.Sessions, s.Broken, s.Sent, s.Received = sum.sessions, sum.broken, sum.sent, sum.received
	for _, r := range e.regions.all() {
		s.Regions++
		s.RegionBytes += r.n
	}
	return s
}
