package p2p

import (
	"cmp"
	"errors"
	"slices"
)

var errLeft = errors.New("it closed its group")

// ErrLost says that messages that a peer had sent were lost with the link, which has been made
// anew: short ones of the tagged lane, or those of an epoch of the ordered lane.
var ErrLost = errors.New("messages that it had sent were lost with the link to it, which broke")

// ErrWrongSize says that a message had another length or type than the receive that matched it.
var ErrWrongSize = errors.New("message and receive differ in length or type")

// AnySlot and AnyTag match every sender and every tag.
const (
	AnySlot = -1
	AnyTag  = -1
)

// SendReq is a send of the tagged lane. Messages up to EagerMax are sent at once, within the
// credit. Larger ones are announced, stay in the sender's memory, and are sent straight to the
// receiver's buffer on request.
//
// A message is received as a whole or not at all. If a receive is cancelled while its message
// arrives, the next matching receive gets the message: the sender keeps an announced message until
// the receiver confirms all of it, and an eager one is put aside. If a sender cancels its message,
// the receive waits for the next one.
type SendReq struct {
	st     *stream
	buf    []byte
	tag    uint64
	meta   uint64
	id     uint64 // not 0: announced
	remote uint64 // not 0: the receiver's id; it has asked for the data
	off    int
	there  int // bytes of buf that are there: see PostLater
	done   bool
	err    error // why the link went down
	follow follow
}

// RecvReq is a receive of the tagged lane.
type RecvReq struct {
	buf   []byte
	from  int // slot or AnySlot
	tag   int64
	meta  uint64
	more  func(got int) // see OnMore
	st    *stream       // of the sender, once matched
	id    uint64        // not 0: of an announced message
	rts   *early        // the announcement
	total int
	got   int
	done  bool
	err   error

	order  int64    // among the posted receives
	before *RecvReq // of the posted receives from the same slot with the same tag
	after  *RecvReq
	follow follow

	// Set when the receive is matched: the sender's slot, its tag, the message's size and meta.
	From  int
	Tag   uint64
	Bytes int
	Meta  uint64
}

// EagerMax is the largest size of a message of the tagged lane that is sent without a request.
func (c *Channel) EagerMax() int { return min(c.window/8, 16<<10) }

// PostSend queues buf for slot, behind earlier messages to it. meta must equal the receive's. It
// does not block; buf belongs to the channel until WaitSend or CancelSend returns, or until a
// followed message has ended.
func (c *Channel) PostSend(s *SendReq, slot int, tag uint64, meta uint64, buf []byte) {
	*s = SendReq{st: c.stream(slot), buf: buf, tag: tag, meta: meta, there: len(buf)}
	c.enqueue(s)
}

// PostLater is PostSend for a message whose bytes come later: Filled says how many are there. It is
// announced at its place among the messages to slot, and holds up none of those behind it.
func (c *Channel) PostLater(s *SendReq, slot int, tag uint64, meta uint64, buf []byte) {
	*s = SendReq{st: c.stream(slot), buf: buf, tag: tag, meta: meta}
	c.enqueue(s)
}

// Filled says that the first n bytes of the buffer of s, a message of PostLater, are there. n does
// not decrease.
func (c *Channel) Filled(s *SendReq, n int) {
	if s.done || s.err != nil || n <= s.there {
		return
	}
	idle := s.off == s.there
	if s.there = n; idle {
		s.ask()
	}
	if s.st.pr.link != nil {
		c.p.pump(s.st.pr)
	}
	c.follows.waiter.calm()
	c.p.wakeAll()
}

// ask has the bytes of an announced message sent, if the receiver has asked for it and there are
// some.
func (s *SendReq) ask() {
	if s.remote != 0 && s.off < s.there {
		s.st.pr.bulk = append(s.st.pr.bulk, s)
	}
}

func (c *Channel) enqueue(s *SendReq) {
	st := s.st
	if st.sendq = append(st.sendq, s); len(st.sendq) > 1 {
		return // the link, or the peer, had no room for the one before
	}
	st.pr.queued = append(st.pr.queued, st)
	if st.pr.link != nil {
		c.p.pump(st.pr)
	}
}

// pump sends queued messages to a peer, in order, as far as credit and room allow: announcements
// and short messages of each channel, then data of the messages that the peer has asked for. It
// reports whether it sent anything.
func (p *Proxy) pump(pr *peer) bool {
	any := false
	for i := 0; i < len(pr.queued); {
		st := pr.queued[i]
		for len(st.sendq) > 0 && st.c.begin(st, st.sendq[0]) {
			s := st.sendq[0]
			st.sendq[0] = nil
			st.sendq = st.sendq[1:]
			any = true
			if s.done {
				st.c.end(&s.follow, nil)
			}
		}
		if len(st.sendq) > 0 {
			i++
			continue
		}
		if i < len(pr.queued) && pr.queued[i] == st { // else the end of a message has cancelled the last one
			pr.queued = slices.Delete(pr.queued, i, i+1)
		}
	}
	for len(pr.bulk) > 0 && len(pr.ctl) == 0 && pr.sendErr == nil {
		s := pr.bulk[0]
		n := min(s.there-s.off, pr.link.MaxFrame(), frameBytes)
		h := Header{Kind: frameBulk, Chan: p.number(s.st), Seq: s.remote, Off: uint64(s.off), Len: uint32(n),
			Ack: s.st.taken}
		if !p.transmit(pr, &h, s.buf[s.off:s.off+n], false) {
			break
		}
		any = true
		s.st.told = s.st.taken
		if s.off += n; s.off == s.there { // done when the peer confirms all of it
			pr.bulk[0] = nil
			pr.bulk = pr.bulk[1:]
		}
	}
	return any
}

// begin sends a short message, or announces a long one.
func (c *Channel) begin(st *stream, s *SendReq) bool {
	h := Header{Kind: frameEager, Call: s.meta, Count: s.tag, Len: uint32(len(s.buf)), Flags: flagLast}
	payload := s.buf
	if s.there < len(s.buf) || len(s.buf) > min(c.EagerMax(), st.pr.link.MaxFrame()) {
		h.Kind, h.Len, h.Flags, h.Off, h.Seq, payload = frameRTS, 0, 0, uint64(len(s.buf)), c.nextMsg, nil
	}
	if st.pr.sendErr != nil || st.replaced() || !c.push(st, &h, payload, false) {
		return false
	}
	if h.Kind == frameRTS {
		s.id = c.nextMsg
		c.nextMsg++
		c.sends[s.id] = s
	} else {
		s.done = true
		st.begun++
	}
	return true
}

// WaitSend blocks until s was taken by the link (short messages) or by the receiver. On error s is
// cancelled.
func (c *Channel) WaitSend(w *Wait, s *SendReq) error {
	for !s.done {
		err := s.fails(c)
		if err == nil {
			err = c.p.progress(w, s.st.pr)
		}
		if err != nil && !s.done {
			c.CancelSend(s)
			return err
		}
	}
	return nil
}

func (s *SendReq) fails(c *Channel) error {
	if c.err != nil {
		return c.err
	}
	if s.err != nil {
		return s.err
	}
	if err := s.st.unreachable(); err != nil {
		return c.last(s.st.pr, err)
	}
	return nil
}

// CancelSend withdraws s: its buffer is not used afterwards.
func (c *Channel) CancelSend(s *SendReq) {
	if s.done {
		return
	}
	for i, q := range s.st.sendq {
		if q != s {
			continue
		}
		if i == 0 { // as when all of many are cancelled
			s.st.sendq[0] = nil
			s.st.sendq = s.st.sendq[1:]
		} else {
			s.st.sendq = append(s.st.sendq[:i], s.st.sendq[i+1:]...)
		}
		if len(s.st.sendq) == 0 {
			s.st.unqueue()
		}
		break
	}
	s.unasked()
	if s.id != 0 && s.err == nil {
		delete(c.sends, s.id)
		c.control(s.st.pr, Header{Kind: frameCancel, Seq: s.id, Off: s.remote}, nil)
		c.p.drain()
	}
	s.done, s.buf = true, nil
}

// unqueue removes st from the streams with messages to begin.
func (st *stream) unqueue() {
	pr := st.pr
	pr.queued = slices.DeleteFunc(pr.queued, func(q *stream) bool { return q == st })
}

// unasked stops sending the data of an announced message.
func (s *SendReq) unasked() {
	pr := s.st.pr
	for i, q := range pr.bulk {
		if q == s {
			pr.bulk = append(pr.bulk[:i], pr.bulk[i+1:]...)
			return
		}
	}
}

// clearToSend handles the receiver's answer to an announced message: it has all of it, it asks for
// it, or it does not want it now.
func (c *Channel) clearToSend(st *stream, h *Header) {
	s := c.sends[h.Seq]
	if s == nil || s.st != st { // cancelled: the peer has yet to learn that
		return
	}
	switch {
	case h.Flags&flagDrop != 0:
		s.unasked()
		s.done = true
		delete(c.sends, h.Seq)
		c.end(&s.follow, nil)
	case h.Off == 0:
		s.unasked()
		s.remote, s.off = 0, 0
	case s.remote != 0: // asked for twice
	default:
		s.remote = h.Off
		s.ask()
	}
}

// received tells the sender of an announced message that all of it has arrived.
func (c *Channel) received(r *RecvReq) {
	delete(c.recvs, r.id)
	c.control(r.st.pr, Header{Kind: frameCTS, Seq: r.rts.h.Seq, Flags: flagDrop}, nil)
	c.p.drain()
}

// cancelled handles a sender's withdrawal of an announced message. The receive that it was matched
// with waits for another one.
func (c *Channel) cancelled(st *stream, h *Header) {
	for _, r := range c.recvs {
		if r.st == st && r.rts.h.Seq == h.Seq {
			delete(c.recvs, r.id)
			r.detach()
			r.st, r.rts, r.id, r.got, r.total = nil, nil, 0, 0, 0
			c.posted.putBack(r)
			if r.more != nil {
				r.more(0)
			}
			c.gather(&r.follow)
			for _, o := range c.fast {
				if o != nil {
					c.settleAll(o)
				}
			}
			return
		}
	}
	for i, e := range st.early {
		if e.h.Kind == frameRTS && e.h.Seq == h.Seq {
			c.p.dropEarly(st, i)
			return
		}
	}
}

// match returns the first posted receive that takes the message that h begins.
func (c *Channel) match(st *stream, h *Header) *RecvReq {
	if h.Kind != frameBegun {
		return c.posted.take(st.slot, h.Count)
	}
	if all := c.posted.from(st.slot); len(all) > 0 {
		return all[0]
	}
	return nil
}

// counted compares the number of short messages that the peer has sent whole over earlier links
// with those that came. If some are lost, h takes their place: no receive gets a later message of
// the peer before it, or an earlier receive, has failed.
func (c *Channel) counted(st *stream, h *Header) {
	if h.Seq == st.came {
		return
	}
	st.came = h.Seq
	if n := len(st.early); n > 0 && st.early[n-1].h.Kind == frameBegun {
		return
	}
	c.p.arrivals++
	e := &early{h: *h, order: c.p.arrivals, filled: true, paid: true}
	st.early = append(st.early, e)
	c.settle(st, e)
}

// failLost fails the receives that might have got a lost message, whose tag is not known.
func (c *Channel) failLost(st *stream) {
	err := &PeerError{st.pr.rank, ErrLost}
	for _, r := range c.posted.from(st.slot) {
		if c.posted.remove(r) {
			r.buf, r.err, r.done = nil, err, true
			c.end(&r.follow, err)
		}
	}
	c.p.wakeAll()
}

// bind matches r with the message that h begins.
func (c *Channel) bind(r *RecvReq, st *stream, h *Header) {
	c.posted.remove(r)
	r.st, r.From, r.Tag, r.Meta, r.total = st, st.slot, h.Count, h.Call, int(h.Len)
	if h.Kind == frameRTS {
		r.total = int(h.Off)
	}
	r.Bytes = r.total
	if r.total != len(r.buf) || r.Meta != r.meta {
		r.err = ErrWrongSize
	}
	if h.Kind == frameRTS {
		answer := Header{Kind: frameCTS, Seq: h.Seq}
		if r.err != nil {
			answer.Flags, r.done = flagDrop, true
		} else {
			r.id = c.nextMsg
			c.nextMsg++
			c.recvs[r.id] = r
			answer.Off = r.id
		}
		c.control(st.pr, answer, nil)
	}
	if r.done {
		c.end(&r.follow, r.err)
	} else {
		c.gather(&r.follow)
	}
}

// settle matches a kept message that is complete now. Those before it match no posted receive.
func (c *Channel) settle(st *stream, e *early) {
	if r := c.match(st, &e.h); r != nil && c.ranks != nil {
		i := len(st.early) - 1
		for st.early[i] != e {
			i--
		}
		c.consume(r, st, i)
	}
}

// settleAll matches all kept messages of one sender.
func (c *Channel) settleAll(st *stream) {
	for i := 0; i < len(st.early); {
		e := st.early[i]
		if !e.filled {
			return
		}
		r := c.match(st, &e.h)
		if r == nil || c.ranks == nil {
			i++
			continue
		}
		c.consume(r, st, i)
	}
}

// consume matches kept message i with r.
func (c *Channel) consume(r *RecvReq, st *stream, i int) {
	e := st.early[i]
	if e.h.Kind == frameBegun {
		c.p.dropEarly(st, i)
		c.failLost(st)
		return
	}
	r.rts = e
	c.bind(r, st, &e.h)
	if e.h.Kind == frameEager {
		if r.err == nil {
			copy(r.buf, e.buf)
		}
		r.got, r.done = r.total, true
	}
	c.p.dropEarly(st, i)
	if r.done {
		c.end(&r.follow, r.err)
	}
	c.p.wakeAll()
}

// PostMsg posts buf for a message from slot (or AnySlot) with tag (or AnyTag) and meta. It does not
// block; buf belongs to the channel until WaitMsg or CancelRecv returns, or until a followed
// message has ended.
func (c *Channel) PostMsg(r *RecvReq, slot int, tag int64, meta uint64, buf []byte) {
	*r = RecvReq{buf: buf, from: slot, tag: tag, meta: meta}
	c.posted.add(r)
	if st, i := c.kept(slot, tag); st != nil {
		c.consume(r, st, i)
	}
}

// kept returns where the first kept message is that a receive from slot with tag takes, nil if
// there is none.
func (c *Channel) kept(slot int, tag int64) (best *stream, at int) {
	for s, st := range c.fast {
		if st == nil || slot != AnySlot && s != slot {
			continue
		}
		for i, e := range st.early {
			if tag == AnyTag || uint64(tag) == e.h.Count || e.h.Kind == frameBegun {
				if e.filled && (best == nil || e.order < best.early[at].order) {
					best, at = st, i
				}
				break
			}
		}
	}
	return best, at
}

// SendFails returns why a message to slot that is posted now would fail, or nil. With the lock.
func (c *Channel) SendFails(slot int) error { return (&SendReq{st: c.stream(slot)}).fails(c) }

// RecvFails returns why a receive that is posted now would fail, or nil: also if a message for it
// is here, whatever has become of its sender. slot and tag are those of PostMsg. With the lock.
func (c *Channel) RecvFails(slot int, tag int64) error {
	if st, _ := c.kept(slot, tag); st != nil {
		return nil
	}
	return (&RecvReq{from: slot}).fails(c)
}

// OnMore has f called with the number of bytes that are in the buffer of r, a receive that was just
// posted, whenever some have arrived. They do not change any more, unless the sender takes its
// message back: then f is called with 0, and another message may follow. f is called with the lock,
// and not after the end.
func (r *RecvReq) OnMore(f func(got int)) { r.more = f }

// WaitMsg blocks until r is done. On error r is cancelled. ErrWrongSize: the message was consumed,
// r describes it. ErrLost, in a *PeerError: messages of the peer are lost, and r may have been for
// one of them. All receives from it that were posted fail then, or else the next one; later ones
// get the messages that follow.
func (c *Channel) WaitMsg(w *Wait, r *RecvReq) error {
	for !r.done {
		err := r.fails(c)
		if err == nil {
			err = c.p.progress(w, c.awaited(r))
		}
		if err != nil && !r.done { // a message that has arrived meanwhile is not lost
			c.CancelRecv(r)
			return err
		}
	}
	return r.err
}

// awaited returns the peer whose message r waits for, nil for any.
func (c *Channel) awaited(r *RecvReq) *peer {
	switch {
	case r.st != nil:
		return r.st.pr
	case r.from != AnySlot:
		return c.stream(r.from).pr
	}
	return nil
}

func (r *RecvReq) fails(c *Channel) error {
	switch {
	case r.err != nil && !errors.Is(r.err, ErrWrongSize): // else until the message is consumed
		return r.err
	case c.err != nil:
		return c.err
	case r.st != nil:
		return r.st.gone()
	case r.from != AnySlot:
		return c.stream(r.from).gone()
	}
	return c.noSender()
}

// unreachable returns why the peer cannot be sent to any more, or nil.
func (st *stream) unreachable() error {
	if err := st.pr.sendErr; err != nil && st.pr.err == nil {
		return &PeerError{st.pr.rank, err}
	}
	return st.gone()
}

// gone returns why the peer sends nothing any more, or nil.
func (st *stream) gone() error {
	switch {
	case st.lost != nil:
		return &PeerError{st.pr.rank, st.lost}
	case st.pr.err != nil:
		return &PeerError{st.pr.rank, st.pr.err}
	case st.left:
		return &PeerError{st.pr.rank, errLeft}
	case st.replaced():
		return &PeerError{st.pr.rank, errReplaced}
	}
	return nil
}

// noSender returns an error if no other member can send any more. It names one that has closed the
// channel only if all have: another may have been lost before it could send.
func (c *Channel) noSender() error {
	var left, lost error
	for slot, rank := range c.ranks {
		if rank == c.p.cfg.Self.Rank {
			continue
		}
		st := c.stream(slot)
		switch err := st.gone(); {
		case err == nil:
			return nil
		case st.left:
			left = err
		default:
			lost = err
		}
	}
	return cmp.Or(lost, left, errors.New("there is no other rank to receive from"))
}

// CancelRecv withdraws r: its buffer is not used afterwards. A message that was arriving for it
// goes to the next receive that matches.
func (c *Channel) CancelRecv(r *RecvReq) {
	if c.posted.remove(r) || r.done {
		return
	}
	st, pr := r.st, r.st.pr
	switch {
	case r.err != nil || c.err != nil || st.lost != nil:
		c.failRecv(r, ErrClosed)
	case r.id != 0:
		delete(c.recvs, r.id)
		r.detach()
		c.control(pr, Header{Kind: frameCTS, Seq: r.rts.h.Seq}, nil)
		c.p.drain()
		again := &early{h: r.rts.h, order: r.rts.order, filled: true, paid: true}
		at, _ := slices.BinarySearchFunc(st.early, again,
			func(a, b *early) int { return cmp.Compare(a.order, b.order) })
		st.early = slices.Insert(st.early, at, again)
		r.err, r.buf = ErrClosed, nil
		c.settleAll(st)
	case pr.target == r: // it has begun to arrive
		n := int(pr.cur.Len)
		buf := c.p.pool.get(n)
		got := n - pr.left
		copy(buf, r.buf[:got])
		c.p.arrivals++
		e := &early{h: pr.cur, buf: buf, order: c.p.arrivals}
		st.held += int(cost(n))
		st.early = append(st.early, e)
		pr.target, pr.dst = e, buf[got:]
		r.err, r.buf = ErrClosed, nil
	}
}

// failRecv ends r with its message.
func (c *Channel) failRecv(r *RecvReq, err error) {
	delete(c.recvs, r.id)
	r.err = err
	r.detach()
	r.buf = nil
}

// detach drops the rest of the frame that is arriving for r.
func (r *RecvReq) detach() {
	if pr := r.st.pr; pr.target == r {
		if h := &pr.cur; h.Kind == frameEager {
			r.st.taken += cost(int(h.Len))
		}
		pr.target, pr.dst = nil, nil
		pr.cur.Kind = frameBulk
	}
}
