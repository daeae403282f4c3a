package endpoint

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"slices"
	"sync/atomic"
	"syscall"
	"time"

	"tutti/endpoint/internal/link"
	"tutti/endpoint/internal/wire"
	"tutti/mem"
)

// session is the connections to a peer, from the first to the last byte. If one of them breaks, all
// do: what was under way fails, and the next operation makes another session. peer.mu guards it.
type session struct {
	ep    *Endpoint
	peer  *Peer
	id    uint64
	conns []*link.Conn
	// By connection: the start of the earliest request that was given up since the last answer.
	unanswered []time.Time
	joined     int
	tallied    [2]uint64   // bytes received and sent that peer.counts has
	frames     uint64      // that have come, but for those of inquiries: whatever happens brings one
	seen       uint64      // of those, at the last look
	since      time.Time   // when something last happened, as far as that look showed
	bye        bool        // Bye was sent: nothing begins until the peer has answered
	dialled    bool        // by this end
	up         bool        // all connections are there: operations may begin
	alone      atomic.Bool // connections of earlier sessions place nothing more
	broken     bool
	parted     bool          // Bye was answered: the peer closes the connections
	limit      *time.Timer   // of an accepted one, until it is up, and of the answer to Bye, and after it
	step       chan struct{} // gets a value for each connection that has joined
	over       chan struct{} // closed when it is broken
	err        error         // why it is broken
	theirs     wire.Greeting // the peer's

	// Requests of this end.
	last     uint64
	requests map[uint64]request
	backlog  queue[*piece]     // that do not fit
	fences   int               // writes that were given up, and that the peer may still be placing
	queries  map[string]*query // lookups, by the names of the regions
	asking   queue[*query]     // that do not fit

	// Requests of the peer.
	serving map[uint64]*service
	owed    int // requests that were not answered
	watches int // of serving

	spareServices pool[service] // that have ended

	held int // operations in succession that holdLocked has held

	path *path // nil: there is none

	mailbox
}

// request is what was asked for: a piece, a query, a key, or the answer to a piece that was
// given up.
type request struct {
	piece *piece
	query *query
	key   *key
	fence bool
}

// service is a request of the peer that takes more than one frame.
type service struct {
	link.Out // of a Get
	session  *session
	conn     *link.Conn
	region   *Region
	id       uint64
	write    bool
	total    uint64 // of a Put
	got      uint64
	code     wire.Code
	why      string // of wire.Failed
	dropped  bool   // the requester gave it up
	watch    bool
}

// Limits of what an endpoint does for a peer.
const (
	maxRequests = 1024    // that are not answered
	window      = 4 << 20 // bytes of messages that were not received
	maxWatches  = 16      // of a session
	maxMessage  = 64 << 10
	stripe      = 1 << 20 // reads and writes from this size use several connections: see share
	smallest    = 4 << 10 // an operation up to this size may be sent with the next ones
	maxKnown    = 4096    // descriptions of regions that are remembered
	maxBacklog  = 1 << 20 // bytes of answers, or of changes, that the peer has not read

	clientWindow = 16 * window // of which the n-th peer of a client gets an n-th: see roomLocked
)

// newSession makes a session of count connections. p.mu is held. Its room, which does not change,
// is what messages that were not received leave of room, a part of window. What a session that is
// still up gets after that comes on top.
func newSession(p *Peer, id uint64, count int, room int64) *session {
	if p.session != nil {
		room -= p.session.buffered
	}
	for _, a := range p.mail.all() {
		room -= int64(wire.Cost(uint64(a.total)))
	}
	return &session{ep: p.ep, peer: p, id: id, conns: make([]*link.Conn, count), unanswered: make([]time.Time, count),
		step: make(chan struct{}, count), over: make(chan struct{}),
		requests: map[uint64]request{}, queries: map[string]*query{}, serving: map[uint64]*service{},
		mailbox: mailbox{room: max(room, 0), arrivals: map[uint64]*arrival{}, untaken: map[uint64]*post{}}}
}

// greeting is the first frame of a connection. s.peer.mu is held.
func (s *session) greeting(index int) []byte {
	return s.ep.greeting(s.id, wire.Greeting{Index: uint8(index), Count: uint8(len(s.conns)),
		Last: s.peer.lastSession, Window: uint32(s.room),
		Message: uint32(min(s.room, maxMessage))})
}

// joinLocked adds a connection that has greeted; the last one makes the session usable.
func (s *session) joinLocked(c *link.Conn, g wire.Greeting) error {
	switch {
	case s.broken:
		return s.err
	case s.peer.gone != nil:
		return s.peer.gone
	case s.dialled && s.peer.session != nil && s.peer.session != s:
		return errCrossed // the peer has made that one since: messages of this one would be late
	}
	if int(g.Count) != len(s.conns) || s.conns[g.Index] != nil && s.conns[g.Index] != c {
		return fmt.Errorf("%w: connection %d of %d is there already", wire.ErrFrame, g.Index, g.Count)
	}
	if g.Index > 0 && s.conns[0] == nil {
		return fmt.Errorf("%w: connection %d comes before the first", wire.ErrFrame, g.Index)
	}
	s.conns[g.Index] = c
	if g.Index == 0 {
		s.theirs = g
	}
	s.step <- struct{}{}
	if s.joined++; s.joined == len(s.conns) {
		s.up, s.since = true, time.Now()
		s.takeEarlyNotesLocked()
		s.peer.countLocked(func(c *counts) { c.sessions++ })
		if s.limit != nil {
			s.limit.Stop()
		}
		s.peer.upLocked(s)
	}
	return nil
}

// upLocked makes s the peer's session, and begins what waits for it.
func (p *Peer) upLocked(s *session) {
	if old := p.session; old != nil && old != s {
		old.breakLocked(fmt.Errorf("%w: the peer has connected anew", ErrBroken))
	}
	p.session, p.lastSession = s, s.id
	if p.coming == s {
		p.coming = nil
	}
	if p.awaited != nil {
		close(p.awaited)
		p.awaited = nil
	}
	waiting := p.waiting
	p.waiting = nil
	for _, t := range waiting {
		if !t.ended {
			s.beginLocked(t)
		}
	}
	p.matchLocked()
}

// breakLocked ends the session.
func (s *session) breakLocked(why error) {
	if s.broken {
		return
	}
	s.broken, s.err = true, why
	if s.limit != nil {
		s.limit.Stop()
	}
	was := s.up
	s.up = false
	close(s.over)
	p := s.peer
	if p.session == s {
		p.session = nil
	}
	if p.parting == s {
		p.parting = nil
	}
	for _, c := range s.conns {
		if c != nil {
			c.Close(why)
			p.ending = append(p.ending, c)
		}
	}
	s.tallyLocked()
	if was && !s.bye && errors.Is(why, ErrBroken) {
		p.countLocked(func(c *counts) { c.broken++ })
	}
	for _, r := range s.requests {
		switch {
		case r.piece != nil:
			p.failLocked(r.piece.task, why)
		case r.query != nil:
			s.endQueryLocked(r.query, why)
		}
	}
	for _, pc := range s.backlog.all() {
		p.failLocked(pc.task, why)
	}
	for _, q := range s.asking.all() {
		s.endQueryLocked(q, why)
	}
	s.requests, s.backlog, s.asking = nil, queue[*piece]{}, queue[*query]{}
	if s.path != nil {
		s.path.breakLocked(why)
	}
	for _, sv := range s.serving {
		sv.Stop()
		if sv.watch {
			s.ep.watchers.remove(sv)
		}
	}
	s.serving = nil
	if was {
		s.closeMailLocked(why)
	}
}

// beginLocked starts a task on the session.
func (s *session) beginLocked(t *task) {
	if t.Kind == OpSend {
		s.sendLocked(t)
		return
	}
	if r, ok := s.peer.known[t.Region]; ok {
		if t.allowed(r) == nil {
			s.issueLocked(t, r)
			return
		}
		delete(s.peer.known, t.Region) // there may be another region of that name by now
	}
	t.stage = resolving
	q := s.queries[t.Region]
	if q == nil {
		q = &query{op: wire.Lookup, name: t.Region}
		s.queries[t.Region] = q
		s.askLocked(q)
	}
	q.then = append(q.then, t)
}

// fullLocked reports whether the peer takes no more requests now.
func (s *session) fullLocked() bool {
	return len(s.requests) >= int(min(s.theirs.Requests, maxRequests))
}

// holdLocked reports whether an operation that was just started is better sent with the next ones:
// it is small, and at least twice as many are with the peer as are held. A program that keeps
// several under way starts one for each that has ended, and answers often arrive together.
func (s *session) holdLocked(ops []Op) bool {
	if len(ops) != 1 || ops[0].len() > smallest || 2*(s.held+1) > len(s.requests)+len(s.untaken) {
		s.held = 0
		return false
	}
	s.held++
	return true
}

// askLocked sends a query, or puts it behind what is under way.
func (s *session) askLocked(q *query) {
	if s.fullLocked() {
		s.asking.push(q)
		return
	}
	c := s.conns[0]
	s.last++
	b := wire.Header{Size: uint64(len(q.name)), Address: s.last, Op: q.op}
	if q.op == wire.List {
		b.Size += 4
	}
	frame := b.Append(nil)
	if q.op == wire.List {
		frame = wire.Limit(frame, uint32(q.max))
	}
	s.requests[s.last] = request{query: q}
	c.Later(append(frame, q.name...))
	s.peer.touchLocked(c)
}

func (s *session) endQueryLocked(q *query, err error) {
	delete(s.queries, q.name)
	if q.ended {
		return
	}
	q.ended = true
	q.err = err
	for _, t := range q.then {
		if err != nil {
			s.peer.failLocked(t, err)
		} else if !t.ended {
			s.issueLocked(t, q.found[0])
		}
	}
	if q.done != nil {
		close(q.done)
	}
}

// issueLocked starts a read or a write of a region that is known.
func (s *session) issueLocked(t *task, r RemoteRegion) {
	if err := t.allowed(r); err != nil {
		s.peer.failLocked(t, err)
		return
	}
	t.remote = r
	if s.path == nil || !s.path.takeLocked(t, r) {
		s.sendPiecesLocked(t)
	}
}

// sendPiecesLocked has the connections carry a read or a write.
func (s *session) sendPiecesLocked(t *task) {
	k, part := s.share(t.n)
	t.stage = moving
	t.running = int(k)
	if t.pieces = t.first[:]; k > 1 {
		t.pieces = make([]piece, k)
	}
	for i := range t.pieces {
		pc := &t.pieces[i]
		pc.task = t
		pc.off = int64(i) * part
		pc.n = min(part, t.n-pc.off)
		pc.conn = s.conns[i]
		s.putLocked(pc)
	}
}

// share says on how many connections n bytes go, and how many go on each but the last.
func (s *session) share(n int64) (k, part int64) {
	k = 1
	if n >= stripe {
		k = min(int64(len(s.conns)), n/(stripe/2))
	}
	return k, ((n+k-1)/k + 4095) &^ 4095
}

// fencedLocked reports whether nothing may begin, because a write that was given up may still
// arrive on another way than the next one.
func (s *session) fencedLocked() bool {
	return s.fences > 0 && len(s.conns) > 1 || s.path != nil && s.path.state == fencing
}

// putLocked gives a piece to its connection, or to the backlog.
func (s *session) putLocked(pc *piece) {
	if s.fullLocked() || s.fencedLocked() {
		pc.task.stage = queued
		s.backlog.push(pc)
		return
	}
	t := pc.task
	t.stage = moving
	s.last++
	pc.id, pc.begun = s.last, true
	s.requests[pc.id] = request{piece: pc}
	if t.Kind == OpWrite {
		pc.Out.Framer, pc.Gate, pc.File, pc.Off, pc.N = pc, &t.gate, t.File, t.FileOffset+pc.off, pc.n
		pc.conn.Queue(&pc.Out)
	} else {
		var buf [wire.HeaderSize + wire.RangeSize]byte
		b := wire.Header{Size: wire.RangeSize, Address: pc.id, Op: wire.Get}.Append(buf[:0])
		pc.conn.Later(wire.Range{Region: t.remote.id, Generation: t.remote.generation,
			Offset: uint64(t.Offset + pc.off), Total: uint64(pc.n)}.Append(b))
	}
	s.peer.touchLocked(pc.conn)
}

// freedLocked starts pieces of the backlog for which there is room now.
func (s *session) freedLocked() {
	for s.asking.len() > 0 && !s.fullLocked() {
		if q := s.asking.pop(); !q.ended {
			s.askLocked(q)
		}
	}
	for s.backlog.len() > 0 && !s.fullLocked() && !s.fencedLocked() {
		if pc := s.backlog.pop(); !pc.task.ended {
			s.putLocked(pc)
		}
	}
	s.sendMoreLocked()
}

// withdrawLocked takes back what a task that is given up has under way.
func (s *session) withdrawLocked(t *task) {
	if t.Kind == OpSend || t.Kind == OpRecv {
		s.withdrawMailLocked(t)
		return
	}
	if t.flight != nil {
		t.flight.giveUpLocked()
	}
	for i := range t.pieces {
		pc := &t.pieces[i]
		r, open := s.requests[pc.id]
		if !pc.begun || !open || r.piece != pc {
			continue
		}
		if t.Kind == OpWrite && pc.conn.Remove(&pc.Out) {
			delete(s.requests, pc.id)
			continue
		}
		// The request stays until the peer's Done: frames may still come, and those of a write may
		// still go.
		s.requests[pc.id] = request{fence: t.Kind == OpWrite}
		if t.Kind == OpWrite {
			s.fences++
			pc.Stop() // if it is not through, its Tail tells the peer
		} else {
			pc.conn.Later(wire.Header{Address: pc.id, Op: wire.Cancel}.Append(nil))
			s.peer.touchLocked(pc.conn)
		}
	}
	s.freedLocked()
}

// compactLocked forgets tasks that have ended.
func (s *session) compactLocked() {
	s.backlog.drop(func(pc *piece) bool { return pc.task.ended })
	s.sendq.drop(ended)
	for _, q := range s.queries {
		q.then = slices.DeleteFunc(q.then, ended)
	}
	s.unaskLocked()
}

// unaskLocked forgets queries that were not sent and that nothing waits for.
func (s *session) unaskLocked() {
	s.asking.drop(func(q *query) bool {
		if q.done == nil && len(q.then) == 0 {
			delete(s.queries, q.name)
			return true
		}
		return q.ended
	})
}

// unsent forgets a write that was given up before anything of it was sent; with why, because its
// source could not be read.
func (p *Peer) unsent(pc *piece, why error) {
	p.mu.Lock()
	defer p.unlock()
	s := p.session
	if s == nil || !slices.Contains(s.conns, pc.conn) { // that of the piece is over
		return
	}
	switch r := s.requests[pc.id]; {
	case r == request{fence: true}:
		s.fences--
	case why != nil && r.piece == pc:
		s.pieceDoneLocked(pc, wire.OK, why)
	default:
		return
	}
	delete(s.requests, pc.id)
	s.freedLocked()
}

// Frame implements link.Handler.
func (s *session) Frame(c *link.Conn, h wire.Header, ext []byte) (link.Sink, error) {
	if !s.alone.Load() {
		s.quiesce()
	}
	p := s.peer
	var state []byte
	if h.Op == wire.Inquire && p.client == "" {
		state = s.ep.state() // takes the locks of all peers
	}
	p.mu.Lock()
	defer p.settle(c)
	if s.broken {
		return link.Sink{}, s.err
	}
	if s.parted && h.Op != wire.Bye { // it may have been on its way on another connection
		return link.Sink{}, nil
	}
	if h.Op != wire.Inquire && h.Op != wire.State {
		s.frames++
	}
	payload := h.Size - uint64(len(ext))
	switch h.Op {
	case wire.Data:
		return s.dataLocked(c, h.Address, wire.Word(ext, 0), payload)
	case wire.Done, wire.Taken:
		o, err := wire.DecodeOutcome(ext)
		if err != nil {
			return link.Sink{}, err
		}
		if payload > 0 {
			return link.Sink{Buf: c.Text(payload), Token: outcome{h, o}}, nil
		}
		return link.Sink{}, s.outcomeLocked(h, o, "")
	case wire.Get:
		return link.Sink{}, s.getLocked(c, h.Address, wire.DecodeRange(ext))
	case wire.Put:
		return s.placeLocked(c, h.Address, wire.DecodeRange(ext), payload)
	case wire.Cancel:
		return link.Sink{}, s.cancelledLocked(c, h.Address)
	case wire.Lookup:
		return s.textLocked(c, payload, lookup{h.Address})
	case wire.List:
		return s.textLocked(c, payload, list{h.Address, wire.DecodeLimit(ext)})
	case wire.Region:
		e, err := wire.DecodeEntry(ext)
		if err != nil {
			return link.Sink{}, err
		}
		return link.Sink{Buf: c.Text(payload), Token: found{h.Address, e}}, nil
	case wire.Ping:
		if err := s.checkBacklog(c); err != nil {
			return link.Sink{}, err
		}
		c.Later(wire.Header{Address: h.Address, Op: wire.Pong}.Append(nil))
		p.touchLocked(c)
		return link.Sink{}, nil
	case wire.Pong:
		return link.Sink{}, nil
	case wire.Inquire:
		return link.Sink{}, s.inquiredLocked(c, h.Address, state)
	case wire.State:
		return s.stateLocked(h.Address, payload)
	case wire.Bye:
		return link.Sink{}, s.byeLocked(c)
	case wire.Stay:
		s.stayLocked()
		return link.Sink{}, nil
	case wire.Watch:
		return link.Sink{}, s.watchLocked(c, h.Address)
	case wire.Gone:
		return link.Sink{Buf: c.Text(payload), Token: vanished{h.Address, wire.Word(ext, 0), wire.Word(ext, 1)}}, nil
	case wire.Join, wire.Joined:
		return link.Sink{Buf: make([]byte, payload), Token: agreement{h.Op, h.Address}}, nil
	case wire.Claim:
		return link.Sink{}, s.claimedLocked(c, h.Address, wire.Word(ext, 0), wire.Word(ext, 1))
	case wire.Key:
		return link.Sink{}, s.keyLocked(h.Address, wire.Word(ext, 0), wire.Word(ext, 1))
	case wire.Revoke:
		return link.Sink{}, s.revokedLocked(h.Address, wire.Word(ext, 0), wire.Word(ext, 1))
	case wire.Revoked:
		return link.Sink{}, s.releasedLocked(h.Address)
	case wire.Fence:
		return link.Sink{}, s.fenceLocked(h.Address)
	case wire.Fenced:
		return link.Sink{}, s.confirmedLocked(h.Address)
	case wire.Message, wire.Offer, wire.Lend, wire.Pull, wire.Piece, wire.Sent, wire.Credit,
		wire.Dropped:
		return s.mailFrameLocked(c, h, ext, payload)
	}
	return link.Sink{}, fmt.Errorf("%w: unexpected %v", wire.ErrFrame, h.Op)
}

// Tokens of frames with a text.
type (
	outcome struct {
		h wire.Header
		o wire.Outcome
	}
	lookup struct{ id uint64 }
	list   struct {
		id    uint64
		limit uint32
	}
	found struct {
		id uint64
		e  wire.Entry
	}
	vanished struct{ id, region, generation uint64 }
	inquiry  struct{ id uint64 }
)

// textLocked is the place of a text that a request of the peer carries. An empty one has arrived.
func (s *session) textLocked(c *link.Conn, n uint64, token any) (link.Sink, error) {
	if err := s.oweLocked(c); err != nil {
		return link.Sink{}, err
	}
	return link.Sink{Buf: c.Text(n), Token: token}, nil
}

// End implements link.Handler.
func (s *session) End(c *link.Conn, sink link.Sink, stored bool) error {
	p := s.peer
	p.mu.Lock()
	defer p.settle(c)
	if s.broken {
		return s.err
	}
	switch t := sink.Token.(type) {
	case *piece:
		t.arriving = false
		if !stored && !t.task.ended && t.failed == nil {
			t.failed = cmp.Or(sink.Err, errors.New("it was closed"))
		}
		return nil
	case *service:
		return s.placedLocked(c, t, stored, sink.Err)
	case *task: // part of a message to a device
		t.spoiltLocked(sink.Err)
		return nil
	case *arrival:
		if t.task != nil {
			t.task.spoiltLocked(sink.Err)
		}
		return s.arrivedLocked(c, t, stored)
	case outcome:
		return s.outcomeLocked(t.h, t.o, string(sink.Buf))
	case lookup:
		return s.lookupLocked(c, t.id, string(sink.Buf))
	case list:
		return s.listLocked(c, t, string(sink.Buf))
	case found:
		return s.foundLocked(t, string(sink.Buf))
	case vanished:
		return s.goneLocked(t, string(sink.Buf))
	case inquiry:
		return s.toldLocked(t.id, sink.Buf)
	case agreement:
		return s.agreedLocked(t, sink.Buf)
	}
	panic("endpoint: unknown token")
}

// outcomeLocked handles Done or Taken.
func (s *session) outcomeLocked(h wire.Header, o wire.Outcome, text string) error {
	if h.Op == wire.Taken {
		return s.takenLocked(h.Address, o, text)
	}
	return s.doneLocked(h.Address, o, text)
}

// Broken implements link.Handler.
func (s *session) Broken(c *link.Conn, err error) {
	p := s.peer
	p.mu.Lock()
	if !s.broken {
		s.breakLocked(fmt.Errorf("%w: %w", ErrBroken, err))
		p.resumeLocked()
	}
	p.ending = slices.DeleteFunc(p.ending, func(o *link.Conn) bool { return o == c })
	p.unlock()
}

// quiesce waits until the connections of broken sessions place nothing more. What they carry may
// have failed at the peer, which then writes anew over this session.
func (s *session) quiesce() {
	p := s.peer
	p.mu.Lock()
	var others []*link.Conn
	if !s.broken { // else a connection of this session may be waited for
		others = slices.Clone(p.ending)
	}
	up := s.up
	p.mu.Unlock()
	for _, c := range others {
		c.Quiesce()
	}
	s.alone.Store(up)
}

// dataLocked places part of what a read asked for.
func (s *session) dataLocked(c *link.Conn, id, off, n uint64) (link.Sink, error) {
	r, ok := s.requests[id]
	if !ok || r.query != nil || r.key != nil || r.fence {
		return link.Sink{}, fmt.Errorf("%w: data for request %d, which is no read", wire.ErrFrame, id)
	}
	pc := r.piece
	if pc == nil {
		return link.Sink{}, nil // it was given up
	}
	if pc.task.Kind != OpRead || pc.conn != c || n > uint64(pc.n) || off > uint64(pc.n)-n ||
		uint64(pc.got)+n > uint64(pc.n) {
		return link.Sink{}, fmt.Errorf("%w: %d bytes of data at %d for a request of %d, of which %d have come",
			wire.ErrFrame, n, off, pc.n, pc.got)
	}
	pc.got += int64(n)
	pc.arriving = true
	return link.Sink{Gate: &pc.task.gate, File: pc.task.File, Off: pc.task.FileOffset + pc.off + int64(off),
		Token: pc}, nil
}

// doneLocked ends a request of this end.
func (s *session) doneLocked(id uint64, o wire.Outcome, text string) error {
	r, ok := s.requests[id]
	if !ok {
		return fmt.Errorf("%w: the end of request %d, which is not open", wire.ErrFrame, id)
	}
	err := codeError(o.Code, text)
	switch q, pc := r.query, r.piece; {
	case err != nil:
	case q != nil && q.op == wire.Lookup:
		return fmt.Errorf("%w: the answer to a lookup has no region", wire.ErrFrame)
	case q != nil && q.op == wire.Inquire:
		return fmt.Errorf("%w: the answer to an inquiry has no state", wire.ErrFrame)
	case q != nil && q.op == wire.Watch && !q.ended:
		return fmt.Errorf("%w: the end of a watch that goes on", wire.ErrFrame)
	case r.key != nil:
		return fmt.Errorf("%w: the answer to a Claim has no key", wire.ErrFrame)
	case pc != nil && pc.task.Kind == OpRead && pc.got != pc.n:
		return fmt.Errorf("%w: a read of %d bytes ended with %d", wire.ErrFrame, pc.n, pc.got)
	}
	delete(s.requests, id)
	if r.fence {
		s.fences--
	}
	switch {
	case r.query != nil:
		s.endQueryLocked(r.query, err)
	case r.key != nil:
		r.key.refused = true
	case r.piece != nil:
		s.pieceDoneLocked(r.piece, o.Code, err)
	}
	s.freedLocked()
	return nil
}

func (s *session) pieceDoneLocked(pc *piece, code wire.Code, err error) {
	t := pc.task
	switch {
	case pc.failed != nil && (t.File != nil || t.gate.Device() != nil):
		err = fmt.Errorf("writing to %s failed: %w", t.place(), bare(pc.failed))
	case t.File != nil && errors.Is(pc.Err(), io.ErrUnexpectedEOF):
		err = fmt.Errorf("%s is shorter than %d bytes: %w", t.File.Name(), t.FileOffset+t.FileLen, io.ErrUnexpectedEOF)
	case pc.Err() != nil:
		err = fmt.Errorf("reading %s failed: %w", t.place(), pc.Err())
	}
	if code == wire.Stale || code == wire.NoRegion {
		delete(s.peer.known, t.Region)
	}
	if err == nil {
		t.result.N += pc.n
	} else if t.result.Err == nil {
		t.result.Err = fmt.Errorf("%s: %w", t.what(), err)
	}
	if t.running--; t.running == 0 {
		t.result.Total = t.result.N
		t.free = len(t.pieces) == 1 && pc.restsLocked()
		s.peer.endLocked(t)
	}
}

// checkBacklog returns an error if the peer does not read what it asks for on c, or on all
// connections.
func (s *session) checkBacklog(c *link.Conn) error {
	n := c.Backlog()
	if n <= maxBacklog/wire.MaxConns { // seldom more
		return nil
	}
	for _, other := range s.conns {
		if other != c && other != nil {
			n += other.Backlog()
		}
	}
	if n > maxBacklog {
		return fmt.Errorf("%w: another request before the answers, %d bytes, were read", wire.ErrFrame, n)
	}
	return nil
}

// oweLocked counts a request of the peer on c.
func (s *session) oweLocked(c *link.Conn) error {
	if s.owed++; s.owed > maxRequests {
		return fmt.Errorf("%w: %d requests at once, at most %d are allowed", wire.ErrFrame, s.owed, maxRequests)
	}
	return s.checkBacklog(c)
}

// answerLocked ends a request of the peer.
func (s *session) answerLocked(c *link.Conn, id uint64, code wire.Code, n uint64) {
	s.answerWhyLocked(c, id, code, n, "")
}

// answerWhyLocked is answerLocked with a text for the peer, which explains a failure.
func (s *session) answerWhyLocked(c *link.Conn, id uint64, code wire.Code, n uint64, why string) {
	if code != wire.OK {
		s.peer.servedLocked(0, code, 0)
	}
	s.replyLocked(c, id, code, n, why)
}

// replyLocked is answerWhyLocked without a count, for requests that belong to no operation.
func (s *session) replyLocked(c *link.Conn, id uint64, code wire.Code, n uint64, why string) {
	s.owed--
	var buf [wire.HeaderSize + wire.OutcomeSize]byte
	c.Later(done(buf[:0], id, code, n, why))
	s.peer.touchLocked(c)
}

func done(b []byte, id uint64, code wire.Code, n uint64, why string) []byte {
	b = wire.Header{Size: uint64(wire.OutcomeSize + len(why)), Address: id, Op: wire.Done}.Append(b)
	return append(wire.Outcome{Code: code, Bytes: n}.Append(b), why...)
}

// explanation is what a peer is told of an error of a file, whose name is not its business, or of a
// device.
func explanation(err error) string {
	switch err = bare(err); {
	case errors.Is(err, io.ErrUnexpectedEOF):
		return "the file is shorter than the region"
	case errors.As(err, new(syscall.Errno)), errors.Is(err, os.ErrClosed):
		return err.Error()
	}
	return "the file or the device failed"
}

// bare returns the cause of an error that names a file.
func bare(err error) error {
	if named := (*os.PathError)(nil); errors.As(err, &named) {
		return named.Err
	}
	return err
}

// regionLocked finds the region of a request and checks the access.
func (s *session) regionLocked(x wire.Range, n uint64, want mem.Rights) (*Region, wire.Code) {
	r, code := s.ep.regions.find(x)
	if code == wire.OK {
		code = r.check(s.peer.client, want, x.Offset, n)
	}
	return r, code
}

// getLocked serves a read.
func (s *session) getLocked(c *link.Conn, id uint64, x wire.Range) error {
	if err := s.oweLocked(c); err != nil {
		return err
	}
	if s.serving[id] != nil {
		return fmt.Errorf("%w: request %d is open already", wire.ErrFrame, id)
	}
	r, code := s.regionLocked(x, x.Total, Read)
	if code != wire.OK {
		s.answerLocked(c, id, code, 0)
		return nil
	}
	sv := s.newServiceLocked(c, id)
	sv.region = r
	sv.Framer, sv.Off, sv.N = sv, r.base+int64(x.Offset), int64(x.Total)
	sv.Gate, sv.File = &r.gate, r.file
	c.Queue(&sv.Out)
	s.peer.touchLocked(c)
	return nil
}

// newServiceLocked notes a request of the peer that takes more than one frame.
func (s *session) newServiceLocked(c *link.Conn, id uint64) *service {
	sv := s.spareServices.take()
	sv.session, sv.conn, sv.id = s, c, id
	s.serving[id] = sv
	return sv
}

// Head implements link.Framer, for the answer to a read.
func (sv *service) Head(b []byte, at, n int64) []byte {
	return wire.Bulk(b, wire.Data, sv.id, n, uint64(at))
}

// Tail implements link.Framer.
func (sv *service) Tail(b []byte, ok bool) []byte {
	s := sv.session
	s.peer.mu.Lock()
	defer s.peer.mu.Unlock()
	if s.broken { // conn sends nothing more
		return b
	}
	delete(s.serving, sv.id)
	s.owed--
	code, n, why := wire.OK, uint64(sv.N), ""
	switch {
	case ok:
		sv.region.reads.Add(n)
	case sv.dropped:
		code, n = wire.Cancelled, 0
	case sv.Err() != nil && sv.region.gate.IsOpen():
		code, n, why = wire.Failed, 0, explanation(sv.Err())
	default:
		code, n = wire.Stale, 0
	}
	s.peer.servedLocked(OpRead, code, n)
	b = done(b, sv.id, code, n, why)
	s.spareServices.put(sv)
	return b
}

// placeLocked serves a frame of a write.
func (s *session) placeLocked(c *link.Conn, id uint64, x wire.Range, n uint64) (link.Sink, error) {
	sv := s.serving[id]
	if sv == nil {
		if err := s.oweLocked(c); err != nil {
			return link.Sink{}, err
		}
		sv = s.newServiceLocked(c, id)
		sv.write, sv.total = true, x.Total
	}
	if !sv.write || sv.conn != c || sv.total != x.Total || n > x.Total-sv.got || n == 0 && x.Total > 0 {
		return link.Sink{}, fmt.Errorf("%w: %d bytes for write %d of %d, of which %d have come", wire.ErrFrame, n, id,
			x.Total, sv.got)
	}
	sv.got += n
	r, code := s.regionLocked(x, n, Write)
	if code != wire.OK {
		if sv.code == wire.OK {
			sv.code = code
		}
		return link.Sink{Token: sv}, nil
	}
	sv.region = r
	return link.Sink{Gate: &r.gate, File: r.file, Off: r.base + int64(x.Offset), Token: sv}, nil
}

// placedLocked goes on when a frame of a write has been placed.
func (s *session) placedLocked(c *link.Conn, sv *service, stored bool, err error) error {
	if s.serving[sv.id] != sv {
		return nil // given up
	}
	if !stored && sv.code == wire.OK {
		sv.code = wire.Stale
		if err != nil && sv.region.gate.IsOpen() {
			sv.code, sv.why = wire.Failed, explanation(err)
		}
	}
	if sv.got < sv.total {
		return nil
	}
	delete(s.serving, sv.id)
	n := sv.total
	if sv.code != wire.OK {
		n = 0
	} else {
		sv.region.writes.Add(n)
		s.peer.servedLocked(OpWrite, wire.OK, n)
	}
	s.answerWhyLocked(c, sv.id, sv.code, n, sv.why)
	s.spareServices.put(sv)
	return nil
}

// cancelledLocked gives up a request of the peer. What was answered already needs no other answer.
func (s *session) cancelledLocked(c *link.Conn, id uint64) error {
	sv := s.serving[id]
	switch {
	case sv == nil:
	case sv.watch:
		s.endWatchLocked(c, sv, wire.OK)
	case sv.write:
		delete(s.serving, id)
		s.answerLocked(c, id, wire.Cancelled, sv.got)
	default:
		sv.dropped = true
		sv.Stop()
	}
	return nil
}

func region(b []byte, id uint64, r *Region, client string) []byte {
	b = wire.Header{Size: uint64(wire.EntrySize + len(r.name)), Address: id, Op: wire.Region}.Append(b)
	return append(r.entry(client).Append(b), r.name...)
}

func (s *session) lookupLocked(c *link.Conn, id uint64, name string) error {
	r := s.ep.regions.lookup(name)
	if r == nil || r.rightsOf(s.peer.client) == 0 {
		s.answerLocked(c, id, wire.NoRegion, 0)
		return nil
	}
	s.owed--
	c.Later(region(nil, id, r, s.peer.client))
	s.peer.touchLocked(c)
	return nil
}

func (s *session) listLocked(c *link.Conn, l list, after string) error {
	pg := &page{session: s, list: l, after: after}
	pg.Framer = pg
	c.Queue(&pg.Out)
	s.peer.touchLocked(c)
	return nil
}

// page is the answer to a List, which is made when there is room for it.
type page struct {
	link.Out // empty
	session  *session
	list
	after string
	n     int
}

// Head implements link.Framer.
func (pg *page) Head(b []byte, _, _ int64) []byte {
	s := pg.session
	found := s.ep.regions.page(pg.after, s.peer.client, int(min(pg.limit, MaxPage)))
	for _, r := range found {
		b = region(b, pg.id, r, s.peer.client)
	}
	pg.n = len(found)
	return b
}

// Tail implements link.Framer.
func (pg *page) Tail(b []byte, _ bool) []byte {
	s := pg.session
	s.peer.mu.Lock()
	defer s.peer.mu.Unlock()
	s.owed--
	return done(b, pg.id, wire.OK, uint64(pg.n), "")
}

// foundLocked handles the description of a region of the peer.
func (s *session) foundLocked(f found, name string) error {
	r, ok := s.requests[f.id]
	if !ok {
		return fmt.Errorf("%w: a region for request %d, which is not open", wire.ErrFrame, f.id)
	}
	q := r.query
	if q == nil || q.op == wire.Inquire || q.op == wire.Lookup && q.name != name ||
		q.op == wire.List && len(q.found) >= q.max {
		return fmt.Errorf("%w: region %.40q for request %d, which did not ask for it", wire.ErrFrame, name, f.id)
	}
	if err := checkName("region", name); err != nil {
		return fmt.Errorf("%w: %w", wire.ErrFrame, err)
	}
	if q.op == wire.List && name <= q.lastName() {
		return fmt.Errorf("%w: region %.40q after %.40q in a list", wire.ErrFrame, name, q.lastName())
	}
	x := RemoteRegion{Name: name, Len: int64(f.e.Len), Rights: mem.Rights(f.e.Rights) & (Read | Write), id: f.e.Region,
		generation: f.e.Generation}
	p := s.peer
	if p.known == nil {
		p.known = map[string]RemoteRegion{}
	}
	if _, ok := p.known[name]; !ok && len(p.known) >= maxKnown {
		for other := range p.known {
			delete(p.known, other)
			break
		}
	}
	p.known[name] = x
	switch {
	case q.ended:
	case q.op == wire.Watch:
		s.eventLocked(f.id, q, RegionEvent{RemoteRegion: x})
	default:
		q.found = append(q.found, x)
	}
	if q.op == wire.Lookup {
		delete(s.requests, f.id)
		s.endQueryLocked(q, nil)
		s.freedLocked()
	}
	return nil
}

func newID() uint64 { return rand.Uint64() | 1 }
