package endpoint

import (
	"errors"
	"fmt"
	"time"

	"tutti/endpoint/internal/card"
	"tutti/endpoint/internal/link"
	"tutti/endpoint/internal/wire"
	"tutti/mem"
	"tutti/rdma"
)

// maxLoans bounds the messages to a peer whose memory is registered for it. Further ones wait.
const maxLoans = 64

// loan is the memory of a message that waits at its sender, registered for the peer to read by
// RDMA. peer.mu guards what is below key.
type loan struct {
	path    *path
	task    *task
	domain  *card.Domain
	mr      rdma.MR // of this message; nil: it lies in a region, which stays registered
	address uint64
	key     uint32

	ending bool // a goroutine ends it
	ended  bool // the peer cannot read any more, and domain is released
	taken  bool // the peer has said that it does not read any more
}

// borrowed is what this end can read a message of the peer with.
type borrowed struct {
	conn *card.Conn // only over that one
	key  key
}

// lendsLocked reports whether a message is to be read by the peer by RDMA. If that could be, and
// something is missing, it sees to that.
func (p *path) lendsLocked(t *task) bool {
	if p == nil || !p.reads || !p.reachesLocked(t) || t.n < p.s.ep.cfg.RDMA.From || t.n <= p.s.longestLocked() {
		return false
	}
	p.joinSoonLocked()
	return p.state == direct
}

// lendLocked registers the memory of a message and posts it then; false: the endpoint is closed.
func (p *path) lendLocked(t *task) bool {
	s := p.s
	if !s.ep.goes(func() { p.lend(t) }) {
		return false
	}
	s.lending, t.flight, t.stage = t, p, registering
	return true
}

func (p *path) lend(t *task) {
	l, err := p.newLoan(t)
	s := p.s
	s.peer.mu.Lock()
	defer s.peer.unlock()
	s.lending = nil
	switch {
	case err != nil:
		if t.flight = nil; t.ended {
			s.peer.over = append(s.peer.over, t)
		} else {
			if !errors.Is(err, rdma.ErrRemoved) {
				p.warnLocked(err)
				p.cannotLocked(t)
			}
			s.postLocked(t, nil)
		}
	case t.ended: // given up meanwhile, or the session is broken
		l.domain.Permit(l.key)
		l.ending, l.taken = true, true
		s.peer.mu.Unlock()
		l.end(false)
		s.peer.mu.Lock()
	default:
		p.loans[l] = struct{}{}
		s.postLocked(t, l)
	}
	if !s.broken {
		s.sendMoreLocked()
	}
}

// newLoan registers the memory of a message, unless it lies in a region that the peer may read.
func (p *path) newLoan(t *task) (*loan, error) {
	e, client := p.s.ep, p.s.peer.client
	d, err := e.card.Domain(client)
	if err != nil {
		return nil, err
	}
	l := &loan{path: p, task: t, domain: d}
	if r := e.regions.around(t.Local); r != nil && r.rightsOf(client).Has(Read) {
		if g, err := r.grantTo(p.s, d); err == nil {
			l.address, l.key = g.Address+spanOf(t.Local).first-spanOf(r.memory).first, g.RemoteKey()
			if !p.hold(r) {
				r.forget(p.s)
			}
		}
	}
	if l.address == 0 {
		g, err := d.Register(t.Local, e.ctx.exporter(t.Local), card.Read, false)
		if err != nil {
			return nil, errors.Join(err, d.Release())
		}
		l.mr, l.address, l.key = g.MR, g.Address, g.RemoteKey()
	}
	d.Withhold(l.key)
	return l, nil
}

// hold notes that the peer has the key of a region; false: the path is closed.
func (p *path) hold(r *Region) bool {
	p.s.peer.mu.Lock()
	defer p.s.peer.mu.Unlock()
	if !p.closed {
		p.holdLocked(r)
	}
	return !p.closed
}

// takenLocked notes that the peer does not read a message any more.
func (l *loan) takenLocked() {
	l.taken = true
	l.domain.Permit(l.key)
	l.endLocked(false)
	l.forgetLocked()
}

// recallLocked has a message end that is given up. The peer has some time to end what it has begun.
func (l *loan) recallLocked() {
	peer := l.path.s.peer
	time.AfterFunc(grace, func() {
		peer.mu.Lock()
		defer peer.unlock()
		l.endLocked(l.mr == nil) // the region stays, and its memory is about to change
	})
}

// endLocked ends the peer's access, by cutting the present connection if cut is set.
func (l *loan) endLocked(cut bool) {
	if l.ending || l.path.closed {
		return
	}
	l.ending = l.path.s.ep.goes(func() { l.end(cut) }) // else the session ends, and the path ends it
}

// end is endLocked, without locks. Afterwards the memory is the program's.
func (l *loan) end(cut bool) {
	p := l.path
	e, peer := p.s.ep, p.s.peer
	if l.mr != nil {
		if err := l.mr.Close(); err != nil && !errors.Is(err, rdma.ErrRemoved) {
			e.log.Error("endpoint: a message stays registered with an RDMA device", "peer", peer, "err", err)
			cut = true
		}
	}
	if cut {
		p.cut()
	}
	if err := l.domain.Release(); err != nil {
		e.log.Error("endpoint: an RDMA device was not closed", "err", err)
	}
	peer.mu.Lock()
	defer peer.unlock()
	l.ended = true
	l.forgetLocked()
	if l.task.flight = nil; l.task.ended {
		peer.over = append(peer.over, l.task)
	}
	if !p.s.broken {
		p.s.sendMoreLocked()
	}
}

// forgetLocked makes room for another loan when nothing is left of l.
func (l *loan) forgetLocked() {
	if l.ended && l.taken {
		delete(l.path.loans, l)
	}
}

// wantLocked has the peer lend its messages from now on, when a long one has come.
func (p *path) wantLocked(n int64) {
	s := p.s
	if n < s.ep.cfg.RDMA.From {
		return
	}
	if !p.wants && !s.fullLocked() {
		p.wants = true
		s.claimKeyLocked(&key{}) // of no region
	}
	p.joinSoonLocked()
}

// wantedLocked handles that the peer wants to read messages by RDMA.
func (p *path) wantedLocked(c *link.Conn, id uint64) {
	p.reads = true
	p.s.giveKeyLocked(c, id, 0, 0)
	p.joinSoonLocked()
}

// lentLocked notes a message of the peer that can be read by RDMA.
func (s *session) lentLocked(c *link.Conn, seq, total, address, remote uint64) error {
	p := s.path
	if p == nil || !p.wants || remote > 1<<32-1 || address+total < address {
		return fmt.Errorf("%w: message %d of %d bytes at %#x with key %#x", wire.ErrFrame, seq, total, address, remote)
	}
	return s.offeredLocked(c, seq, total, &borrowed{p.conn, key{address: address, remote: uint32(remote)}})
}

// borrowLocked reads a message that was lent; false: it has to be pulled.
func (p *path) borrowLocked(a *arrival) bool {
	if p == nil || a.lent == nil || p.state != direct || p.conn != a.lent.conn || !p.reachesLocked(a.task) {
		return false
	}
	a.task.key = &a.lent.key
	a.borrowed = true
	p.queue.push(a.task)
	p.flyLocked()
	return true
}

// borrowedLocked goes on with a message that the device does not read any more.
func (s *session) borrowedLocked(t *task, err error) {
	a := t.letter
	switch {
	case s.broken:
		s.peer.over = append(s.peer.over, t)
	case t.ended: // given up meanwhile
		s.peer.over = append(s.peer.over, t)
		s.refuseLocked(a)
	case err == nil:
		s.peer.countLocked(func(c *counts) { c.direct[OpRecv].Add(uint64(a.want)) })
		delete(s.arrivals, a.seq)
		s.takeNoteLocked(nil, a.seq, wire.OK, a.want)
		s.peer.receivedLocked(t, a.want, a.total)
	case a.dropped:
		s.droppedRecvLocked(a)
	case errors.As(err, new(*card.MemoryError)):
		s.pullPartsLocked(a)
	default:
		s.path.stranded = append(s.path.stranded, t)
	}
}

// droppedRecvLocked ends a message that its sender has given up, and its recv.
func (s *session) droppedRecvLocked(a *arrival) {
	s.refuseLocked(a)
	s.peer.failLocked(a.task, fmt.Errorf("the peer's send was %w", ErrCancelled))
}

// refuseLocked tells the sender that a message was not received.
func (s *session) refuseLocked(a *arrival) {
	delete(s.arrivals, a.seq)
	s.takeNoteLocked(nil, a.seq, wire.Cancelled, 0)
}

// localOf returns the memory of an operation that the device accesses.
func (t *task) localOf() mem.Memory {
	if t.Kind == OpRecv {
		return t.Local.Slice(0, int(t.letter.want))
	}
	return t.Local
}
