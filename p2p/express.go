package p2p

import "errors"

// Short messages of the ordered lane without a Recv: a rank that has sent all it has to send in an
// operation looks at the next frame of each peer where the link has it, and takes the frames when
// all have come. Whatever is not as usual (credit, room, control frames, an early or another
// message, a link that is not up) is left to Send, PostRecv and WaitRecv: until Take, a frame that
// was looked at is still the link's next one.

// Prepare says that a message of n bytes will be sent to slot within some tens of nanoseconds. With
// the lock.
func (c *Channel) Prepare(slot, n int) {
	if st := c.fast[slot]; st != nil && st.pr.link != nil && st.pr.preparer != nil {
		st.pr.preparer.Prepare(n)
	}
}

// SendNow is Send for a message of one frame, if nothing delays it. It reports whether the message
// was sent. One that is not urgent may stay with the link until this rank waits for a peer. With
// the lock.
func (c *Channel) SendNow(slot int, tok *Token, buf []byte, urgent bool) bool {
	st := c.fast[slot]
	if st == nil || !c.open(st) {
		return false
	}
	pr, n := st.pr, cost(len(buf))
	if len(buf) > st.grain(len(buf)) || st.sent+n-st.acked > uint32(c.window) || pr.refused ||
		st.part > 0 {
		return false
	}
	// Field by field: a processor that has just stored the words of a small struct one by one waits
	// before it can load two of them at once, as a copy of a composite literal does.
	h := &pr.out
	h.Kind, h.Flags, h.Service, h.Len = frameData, flagLast, 0, uint32(len(buf))
	h.Chan, h.Ack, h.Off = st.out, st.taken, 0
	h.Seq, h.Call, h.Count = tok.Seq, tok.Call, tok.Count
	var ok bool
	var err error
	gathers := !urgent && pr.gatherer != nil
	if gathers {
		ok, err = pr.gatherer.Gather(&pr.out, buf)
	} else {
		ok, err = pr.link.Send(&pr.out, buf)
	}
	if !ok || err != nil {
		return false // Send will find the same
	}
	pr.counts.sent(len(buf))
	st.sent += n
	st.told = st.taken
	c.p.moved += len(buf)
	if gathers {
		pr.unsent = true
		return true
	}
	flushed, err := pr.link.Flush()
	if err != nil {
		pr.sendErr = err // as in transmit
	}
	pr.unsent = !flushed && err == nil
	return true
}

// plain reports whether nothing but the channel's next frame is under way between this rank and
// st's peer.
func (c *Channel) plain(st *stream) bool {
	return st.posted.size == 0 && len(st.early) == 0 && !st.pr.unsent && c.open(st)
}

// open reports whether nothing but short messages of this rank is under way to st's peer.
func (c *Channel) open(st *stream) bool {
	pr := st.pr
	return pr.link != nil && st.on == pr.linkNo && pr.lent == nil && pr.left == 0 &&
		len(pr.ctl)+len(pr.queued)+len(pr.bulk)+len(pr.transfers.open) == 0 && pr.sendErr == nil && pr.err == nil &&
		st.lost == nil && !st.left && st.until == 0 && c.err == nil && !c.hint && !c.retired
}

// errUnusual: a message has to be received by PostRecv and WaitRecv.
var errUnusual = errors.New("not the next frame of the link")

// Look waits for the message of tok from slot as long as polling is worth while, and returns its n
// bytes, in the link's memory, if it is the next frame and a whole message. It takes nothing. The
// memory is valid until the caller gives up the lock, or Take. After ErrSuspended, which only a w
// with Try gets, Look may be called again; after another error only PostRecv. With the lock.
func (c *Channel) Look(w *Wait, slot int, tok *Token, n int) (message []byte, err error) {
	st := c.fast[slot]
	switch {
	case st == nil:
		return nil, errUnusual
	case w.try && st.pr.unsent && st.pr.gatherer != nil && c.open(st):
		return nil, ErrSuspended // more may be gathered
	case !c.plain(st):
		return nil, errUnusual
	}
	pr, polls := st.pr, 1
	if !w.try && w.spins == 0 && c.p.hot(w) && c.p.wanted.Load() == 0 {
		polls = rushPolls
	}
	for range polls {
		h, payload, err := pr.link.Recv()
		if err != nil {
			return nil, errUnusual // WaitRecv will find the same
		}
		if h == nil {
			continue
		}
		pr.cur.Ack = h.Ack // for Take; no other frame is under way
		if h.Kind == frameData && h.Flags == flagLast && h.Service == 0 && h.Seq == tok.Seq &&
			h.Call == tok.Call && h.Count == tok.Count && h.Off == 0 && int(h.Len) == n && len(payload) == n &&
			int64(h.Chan) < int64(len(pr.in)) && pr.in[h.Chan].st == st && h.Ack-st.acked <= st.sent-st.acked {
			return payload, nil
		}
		return nil, errUnusual
	}
	if w.try {
		return nil, ErrSuspended
	}
	if polls > 1 {
		w.spins++ // WaitRecv pauses between its polls
	}
	return nil, errUnusual
}

// Take takes the message of tok, of n bytes, that Look has returned from slot. With the lock, which
// was held since.
func (c *Channel) Take(slot int, tok *Token, n int) {
	st := c.fast[slot]
	pr, p := st.pr, c.p
	st.acked = pr.cur.Ack // which Look has checked
	pr.link.Release()
	pr.counts.received(n)
	st.seen, st.hasSeen = *tok, true
	st.taken += cost(n)
	p.moved += n
	p.repay(st)
	if p.asleep.Load() > 0 {
		p.wakeAll()
	}
}
