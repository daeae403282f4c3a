package endpoint

import (
	"bytes"
	"fmt"
	"slices"
	"sync/atomic"

	"tutti/endpoint/internal/link"
	"tutti/endpoint/internal/wire"
)

// mailbox has the messages of a session. A message up to the peer's limit goes at once, if the peer
// has room for it; any other is offered, and its receiver pulls it. So a receiver that does not
// receive has bounded memory in use, and its sender waits.
type mailbox struct {
	// Sending.
	sendq    queue[*task] // not sent, because too many are not taken, or behind lending
	lending  *task        // whose memory is being registered; nil: none
	untaken  map[uint64]*post
	lastSeq  uint64
	sent     uint64 // bytes of messages that went at once
	credited uint64 // of those, bytes that the peer has handed on

	// Receiving.
	room        int64               // bytes that this end keeps
	owedNotes   int                 // messages of which the sender has not been told what has become
	early       [][]byte            // what it is told of some of them when the session is up
	arrivals    map[uint64]*arrival // that are not with their recv
	lastArrival uint64
	expect      uint64 // number of the last message that has a recv
	buffered    int64  // bytes of messages, whole or arriving, that were not handed on
	spare       spares // of those that were
	consumed    uint64 // bytes that were handed on
	reported    uint64 // of those, what the peer knows

	spareArrivals pool[arrival] // that were delivered

	note [wire.HeaderSize + wire.OutcomeSize]byte // for takeNoteLocked
}

// post is a message that is not taken yet.
type post struct {
	task   *task                 // nil: given up
	letter letter                // its announcement, or all of it
	loan   *loan                 // of a message that the peer may read; nil: it may not
	pulled int64                 // bytes that the peer has asked for
	pulls  int                   // in so many requests
	sent   atomic.Int32          // of which so many have all their bytes
	cause  atomic.Pointer[error] // why the message could not be read
}

// arrival is a message of the peer.
type arrival struct {
	seq     uint64
	total   int64
	buf     []byte // of a message that came without a recv
	task    *task  // its recv; nil: none yet
	direct  bool   // it goes to the recv's memory
	whole   bool   // it is complete
	offered bool
	dropped bool      // the sender has given it up
	lent    *borrowed // of an offered message that can be read by RDMA

	// Of an offered message that is pulled, or read by RDMA:
	borrowed bool  // it is read
	want     int64 // bytes
	got      int64 // of which have arrived, or are arriving
	pulls    int   // requests for it that have not ended
}

// sendLocked sends a message, or puts it behind those that wait.
func (s *session) sendLocked(t *task) {
	if s.sendq.len() > 0 || !s.sendNowLocked(t) {
		t.stage = queued
		s.sendq.push(t)
	}
}

func (s *session) sendMoreLocked() {
	for s.sendq.len() > 0 {
		if t := s.sendq.first(); !t.ended && !s.sendNowLocked(t) {
			return
		}
		s.sendq.pop()
	}
}

// sendNowLocked sends the next message, after its memory was registered if the peer is to read it;
// false: it has to wait.
func (s *session) sendNowLocked(t *task) bool {
	if s.lending != nil || len(s.untaken) >= int(min(s.theirs.Requests, maxRequests)) {
		return false
	}
	if s.path.lendsLocked(t) {
		return len(s.path.loans) < maxLoans && s.path.lendLocked(t)
	}
	s.postLocked(t, nil)
	return true
}

// longestLocked is the length of the longest message that goes at once, as a whole.
func (s *session) longestLocked() int64 { return min(int64(s.theirs.Message), link.MaxWhole) }

// postLocked announces a message, with the loan that the peer can read it with if that is not nil.
func (s *session) postLocked(t *task, loan *loan) {
	t.stage = moving
	s.lastSeq++
	t.seq = s.lastSeq
	x := &t.post
	x.task, x.loan = t, loan
	l := &x.letter
	l.seq, l.op, l.of = t.seq, wire.Message, x
	l.Gate, l.N, l.Whole = &t.gate, t.n, true
	switch {
	case loan != nil:
		l.op, l.off, l.N = wire.Lend, t.n, 0
	case t.n > s.longestLocked() || s.sent-s.credited+wire.Cost(uint64(t.n)) > uint64(s.theirs.Window):
		l.op, l.off, l.N = wire.Offer, t.n, 0
	default:
		s.sent += wire.Cost(uint64(l.N))
	}
	s.untaken[t.seq] = x
	s.queueLocked(s.conns[0], l)
}

func (s *session) queueLocked(c *link.Conn, l *letter) {
	l.Framer = l
	c.Queue(&l.Out)
	s.peer.touchLocked(c)
}

// mailFrameLocked handles a frame of a message.
func (s *session) mailFrameLocked(c *link.Conn, h wire.Header, ext []byte, n uint64) (link.Sink, error) {
	switch h.Op {
	case wire.Message:
		return s.messageLocked(c, h.Address, int64(n))
	case wire.Offer:
		return link.Sink{}, s.offeredLocked(c, h.Address, wire.Word(ext, 0), nil)
	case wire.Lend:
		return link.Sink{}, s.lentLocked(c, h.Address, wire.Word(ext, 0), wire.Word(ext, 1), wire.Word(ext, 2))
	case wire.Pull:
		return link.Sink{}, s.pulledLocked(c, h.Address, wire.Word(ext, 0), wire.Word(ext, 1))
	case wire.Piece:
		return s.pieceLocked(h.Address, wire.Word(ext, 0), n)
	case wire.Sent:
		return link.Sink{}, s.sentLocked(c, h.Address)
	case wire.Credit:
		if h.Address < s.credited || h.Address > s.sent {
			return link.Sink{}, fmt.Errorf("%w: credit for %d bytes, of %d", wire.ErrFrame, h.Address, s.sent)
		}
		s.credited = h.Address
		return link.Sink{}, nil
	}
	return link.Sink{}, s.droppedLocked(c, h.Address)
}

// newArrivalLocked checks the number of a message.
func (s *session) newArrivalLocked(c *link.Conn, seq uint64, total uint64) (*arrival, error) {
	if c != s.conns[0] {
		return nil, fmt.Errorf("%w: a message on another connection than the first", wire.ErrFrame)
	}
	if seq != s.lastArrival+1 || total > wire.MaxSize {
		return nil, fmt.Errorf("%w: message %d of %d bytes, expected number %d", wire.ErrFrame, seq, total,
			s.lastArrival+1)
	}
	if err := s.oweNoteLocked(c); err != nil {
		return nil, err
	}
	s.lastArrival = seq
	a := s.spareArrivals.take()
	a.seq, a.total = seq, int64(total)
	s.arrivals[seq] = a
	return a, nil
}

// oweNoteLocked counts a message on c.
func (s *session) oweNoteLocked(c *link.Conn) error {
	if s.owedNotes++; s.owedNotes > maxRequests {
		return fmt.Errorf("%w: %d messages at once, at most %d are allowed", wire.ErrFrame, s.owedNotes, maxRequests)
	}
	return s.checkBacklog(c)
}

// messageLocked is the place of a message that came at once.
func (s *session) messageLocked(c *link.Conn, seq uint64, n int64) (link.Sink, error) {
	a, err := s.newArrivalLocked(c, seq, uint64(n))
	if err != nil {
		return link.Sink{}, err
	}
	cost := int64(wire.Cost(uint64(n)))
	if n > maxMessage || s.buffered+cost > s.room {
		return link.Sink{}, fmt.Errorf("%w: message of %d bytes, %d of %d are in use", wire.ErrFrame, n,
			s.buffered, s.room)
	}
	s.buffered += cost
	if p := s.peer; p.session == s && seq == s.expect+1 && p.mail.len() == 0 && p.recvs.len() > 0 {
		if t := p.recvs.first(); n <= t.n && !(t.Exact && n != t.n) {
			s.takeLocked(a, t)
			a.direct = true
			return link.Sink{Gate: &t.gate, Token: a}, nil
		}
	}
	a.buf = s.spare.take(int(n))
	return link.Sink{Buf: a.buf, Token: a}, nil
}

// takeLocked gives the next message to the first recv.
func (s *session) takeLocked(a *arrival, t *task) {
	p := s.peer
	p.shiftRecvLocked()
	a.task, t.letter, t.stage = t, a, arriving
	s.expect = a.seq
}

// arrivedLocked goes on when the payload of a Message is there.
func (s *session) arrivedLocked(c *link.Conn, a *arrival, stored bool) error {
	a.whole = true
	code := wire.OK
	if !stored || a.task != nil && a.task.ended {
		code = wire.Cancelled // the recv was given up
	}
	s.takeNoteLocked(c, a.seq, code, a.total)
	if a.direct {
		s.deliveredLocked(a, a.total)
	} else if a.task != nil {
		s.handOverLocked(a)
	}
	s.peer.matchLocked()
	return nil
}

// takeNoteLocked tells the sender what has become of a message. In a handler of the connection that
// carries the note, it may wait for the next frames: a program that receives often answers. Before
// the session is up the note waits: if it never is, the message is lost.
func (s *session) takeNoteLocked(c *link.Conn, seq uint64, code wire.Code, n int64) {
	b := wire.Header{Size: wire.OutcomeSize, Address: seq, Op: wire.Taken}.Append(s.note[:0])
	b = wire.Outcome{Code: code, Bytes: uint64(n)}.Append(b)
	if !s.up {
		s.early = append(s.early, bytes.Clone(b))
		return
	}
	s.owedNotes--
	s.conns[0].Later(b)
	if c != s.conns[0] {
		s.peer.touchLocked(s.conns[0])
	}
}

// takeEarlyNotesLocked sends the notes that waited for the session to be up.
func (s *session) takeEarlyNotesLocked() {
	if len(s.early) == 0 {
		return
	}
	s.owedNotes -= len(s.early)
	s.conns[0].Later(bytes.Join(s.early, nil))
	s.early = nil
	s.peer.touchLocked(s.conns[0])
}

// handOverLocked copies a whole message to its recv.
func (s *session) handOverLocked(a *arrival) {
	n := int64(0)
	if t := a.task; !t.ended {
		n = t.copyLocked(a.buf)
	}
	s.spare.put(a.buf)
	a.buf = nil
	s.deliveredLocked(a, n)
}

// copyLocked copies a message to the memory of a recv.
func (t *task) copyLocked(msg []byte) int64 {
	n := min(t.n, int64(len(msg)))
	_, err := t.gate.Store(msg[:n], 0)
	t.spoiltLocked(err)
	return n
}

// deliveredLocked ends a message that came at once.
func (s *session) deliveredLocked(a *arrival, n int64) {
	delete(s.arrivals, a.seq)
	s.consumeLocked(a.total)
	if t := a.task; t != nil && !t.ended {
		t.free = true
		s.peer.receivedLocked(t, n, a.total)
	}
	s.spareArrivals.put(a)
}

// spoiltLocked notes that a recv's memory failed, if err is not nil.
func (t *task) spoiltLocked(err error) {
	if err != nil && !t.ended && t.result.Err == nil {
		t.result.Err = fmt.Errorf("%s: writing to %s failed: %w", t.what(), t.place(), err)
	}
}

// receivedLocked ends a recv that has got its message, unless its memory failed.
func (p *Peer) receivedLocked(t *task, n, total int64) {
	t.result.Total = total
	if t.result.Err != nil {
		p.endLocked(t)
		return
	}
	t.result.N = n
	if t.Exact && total != t.n {
		t.result.Err = fmt.Errorf("%s: %w: %d bytes, expected %d", t.what(), ErrSize, total, t.n)
	}
	p.endLocked(t)
}

// consumeLocked notes that a message of n bytes was handed on.
func (s *session) consumeLocked(n int64) {
	cost := wire.Cost(uint64(n))
	s.buffered -= int64(cost)
	s.consumed += cost
	if s.consumed-s.reported >= uint64(s.room/4) {
		s.reported = s.consumed
		s.conns[0].Later(wire.Header{Address: s.consumed, Op: wire.Credit}.Append(nil))
		s.peer.touchLocked(s.conns[0])
	}
}

// matchLocked gives messages to recvs.
func (p *Peer) matchLocked() {
	for p.recvs.len() > 0 {
		t := p.recvs.first()
		if p.mail.len() > 0 {
			a := p.mail.pop()
			p.shiftRecvLocked()
			p.receivedLocked(t, t.copyLocked(a.buf), a.total)
			continue
		}
		s := p.session
		if s == nil {
			return
		}
		s.skipLocked()
		a := s.arrivals[s.expect+1]
		if a == nil {
			return
		}
		s.takeLocked(a, t)
		switch {
		case a.offered:
			s.pullLocked(a)
		case a.whole:
			s.handOverLocked(a)
		}
	}
}

// offeredLocked notes a message that waits at its sender, and how it can be read there.
func (s *session) offeredLocked(c *link.Conn, seq, total uint64, lent *borrowed) error {
	a, err := s.newArrivalLocked(c, seq, total)
	if err != nil {
		return err
	}
	a.offered, a.lent = true, lent
	if s.path != nil {
		s.path.wantLocked(a.total)
	}
	s.peer.matchLocked()
	return nil
}

// pullLocked gets a message that its recv waits for.
func (s *session) pullLocked(a *arrival) {
	t := a.task
	a.want = min(a.total, t.n)
	if t.Exact && a.total != t.n {
		a.want = 0
	}
	if a.want == 0 {
		delete(s.arrivals, a.seq)
		s.takeNoteLocked(nil, a.seq, wire.OK, 0)
		s.peer.receivedLocked(t, 0, a.total)
		return
	}
	if !s.path.borrowLocked(a) {
		s.pullPartsLocked(a)
	}
}

// pullPartsLocked has the connections carry a message.
func (s *session) pullPartsLocked(a *arrival) {
	a.borrowed, a.task.key = false, nil
	k, part := s.share(a.want)
	a.pulls = int(k)
	for i := range k {
		off := i * part
		b := wire.Header{Size: 16, Address: a.seq, Op: wire.Pull}.Append(nil)
		s.conns[i].Later(wire.Words(b, uint64(off), uint64(min(part, a.want-off))))
		s.peer.touchLocked(s.conns[i])
	}
}

// pulledLocked sends part of a message that was offered.
func (s *session) pulledLocked(c *link.Conn, seq, off, n uint64) error {
	x := s.untaken[seq]
	if x == nil && seq != 0 && seq <= s.lastSeq || x != nil && x.task == nil {
		return nil // given up: the receiver knows, or will hear of it
	}
	if x == nil || x.letter.op == wire.Message || n == 0 || n > uint64(x.task.n) || off > uint64(x.task.n)-n ||
		x.pulled+int64(n) > x.task.n {
		return fmt.Errorf("%w: %d bytes at %d of message %d, which was not offered so", wire.ErrFrame, n, off, seq)
	}
	if x.pulls-int(x.sent.Load()) >= wire.MaxConns {
		return fmt.Errorf("%w: more than %d pulls of message %d at a time", wire.ErrFrame, wire.MaxConns, seq)
	}
	x.pulled += int64(n)
	x.pulls++
	l := &letter{seq: seq, op: wire.Piece, off: int64(off), of: x}
	l.Gate, l.Off, l.N = &x.task.gate, int64(off), int64(n)
	s.queueLocked(c, l)
	return nil
}

// pieceLocked is the place of part of a message that was pulled.
func (s *session) pieceLocked(seq, off, n uint64) (link.Sink, error) {
	a := s.arrivals[seq]
	if a == nil && seq <= s.expect {
		return link.Sink{}, nil // it was dropped meanwhile
	}
	if a == nil || a.pulls == 0 || n == 0 || n > uint64(a.want) || off > uint64(a.want)-n ||
		uint64(a.got)+n > uint64(a.want) {
		return link.Sink{}, fmt.Errorf("%w: %d bytes at %d of message %d, which were not asked for", wire.ErrFrame,
			n, off, seq)
	}
	a.got += int64(n)
	sink := link.Sink{Gate: &a.task.gate, Off: int64(off)}
	if a.task.gate.Device() != nil {
		sink.Token = a.task
	}
	return sink, nil
}

// sentLocked handles the end of a part that was pulled.
func (s *session) sentLocked(c *link.Conn, seq uint64) error {
	a := s.arrivals[seq]
	if a == nil && seq <= s.expect {
		return nil
	}
	if a == nil || a.pulls == 0 || a.pulls == 1 && a.got < a.want {
		return fmt.Errorf("%w: the end of message %d, which was not asked for or is not all", wire.ErrFrame, seq)
	}
	if a.pulls--; a.pulls > 0 {
		return nil
	}
	delete(s.arrivals, seq)
	if a.task.ended || a.task.result.Err != nil {
		s.takeNoteLocked(c, seq, wire.Cancelled, 0)
	} else {
		s.takeNoteLocked(c, seq, wire.OK, a.want)
	}
	if !a.task.ended {
		s.peer.receivedLocked(a.task, a.want, a.total)
	}
	return nil
}

// takenLocked ends a send.
func (s *session) takenLocked(seq uint64, o wire.Outcome, text string) error {
	x := s.untaken[seq]
	if x == nil {
		return fmt.Errorf("%w: message %d was taken, which was not sent", wire.ErrFrame, seq)
	}
	delete(s.untaken, seq)
	if x.loan != nil {
		x.loan.takenLocked()
	}
	if o.Code == wire.Cancelled && x.letter.op == wire.Message && x.letter.unsent.Load() {
		s.sent -= wire.Cost(uint64(x.letter.N))
	}
	if t := x.task; t != nil {
		if why := x.cause.Load(); why != nil {
			s.peer.failLocked(t, fmt.Errorf("reading %s failed: %w", t.place(), *why))
		} else if err := codeError(o.Code, text); err != nil {
			s.peer.failLocked(t, fmt.Errorf("the peer's recv ended: %w", err))
		} else {
			t.result.N, t.result.Total = t.n, t.n
			t.free = x.letter.op == wire.Message && x.letter.through.Load()
			if x.loan != nil && x.pulls == 0 && o.Bytes > 0 {
				s.peer.countLocked(func(c *counts) { c.direct[OpSend].Add(uint64(t.n)) })
			}
			s.peer.endLocked(t)
		}
	}
	s.sendMoreLocked()
	return nil
}

// droppedLocked handles that the sender has given up a message.
func (s *session) droppedLocked(c *link.Conn, seq uint64) error {
	if seq == s.lastArrival+1 { // nothing of it was sent
		a, err := s.newArrivalLocked(c, seq, 0)
		if err != nil {
			return err
		}
		a.dropped = true
		s.peer.touchLocked(c)
		s.skipLocked()
		s.peer.matchLocked()
		return nil
	}
	if seq > s.lastArrival {
		return fmt.Errorf("%w: message %d was given up, which was not announced", wire.ErrFrame, seq)
	}
	a := s.arrivals[seq]
	if a == nil || !a.offered || a.dropped {
		return nil // it has been delivered, or will be
	}
	a.dropped = true
	s.peer.touchLocked(c)
	if t := a.task; t != nil && t.flight == nil { // being pulled; else it lands first
		s.droppedRecvLocked(a)
	}
	s.skipLocked()
	s.peer.matchLocked()
	return nil
}

// skipLocked removes messages that were given up and that the next recv would come to.
func (s *session) skipLocked() {
	for a := s.arrivals[s.expect+1]; a != nil && a.dropped; a = s.arrivals[s.expect+1] {
		delete(s.arrivals, a.seq)
		s.expect = a.seq
		s.takeNoteLocked(nil, a.seq, wire.Cancelled, 0)
	}
}

// withdrawMailLocked takes back a send or a recv that is given up.
func (s *session) withdrawMailLocked(t *task) {
	if t.Kind == OpRecv {
		switch a := t.letter; {
		case a == nil || !a.borrowed: // what arrives for it is dropped, because its gate is closed
		case t.flight != nil:
			t.flight.giveUpLocked()
		default:
			s.refuseLocked(a)
		}
		return
	}
	x := s.untaken[t.seq]
	if x == nil || x.task != t {
		return
	}
	x.task = nil // until the peer says what has become of it
	x.letter.Stop()
	if x.letter.op != wire.Message {
		s.queueLocked(s.conns[0], &letter{seq: t.seq, op: wire.Dropped})
	}
	if x.loan != nil {
		x.loan.recallLocked()
	}
}

// closeMailLocked ends what is under way when a session breaks that was up. Whole messages, which
// their sender knows to have arrived, stay. So do recvs that were started after Bye: like all that
// was, they wait for the next session.
func (s *session) closeMailLocked(why error) {
	p := s.peer
	for _, x := range s.untaken {
		if x.task != nil {
			p.failLocked(x.task, why)
		}
	}
	for _, t := range s.sendq.all() {
		p.failLocked(t, why)
	}
	if s.lending != nil {
		p.failLocked(s.lending, why)
	}
	var whole []*arrival
	for _, a := range s.arrivals {
		switch {
		case a.task != nil:
			p.failLocked(a.task, why)
		case a.whole:
			whole = append(whole, a)
		}
	}
	slices.SortFunc(whole, func(a, b *arrival) int { return int(int64(a.seq - b.seq)) })
	for _, a := range whole {
		p.mail.push(a)
	}
	if !s.bye {
		for _, t := range p.recvs.all() {
			p.failLocked(t, why)
		}
		p.recvs = queue[*task]{}
	}
	s.untaken, s.sendq, s.arrivals = nil, queue[*task]{}, nil
}
