package p2p

import (
	"fmt"
	"time"
)

// pollAll makes progress on every link and reports whether there was any.
func (p *Proxy) pollAll() bool {
	any := false
	for i := 0; i < len(p.links); i++ { // a link may fail and leave the list
		if p.poll(p.links[i]) {
			any = true
		}
	}
	return any
}

// poll makes progress on one link.
func (p *Proxy) poll(pr *peer) bool {
	l := pr.link
	if l == nil {
		return false
	}
	busy := p.collect(pr)
	if busy && p.asleep.Load() > 0 {
		p.wakeAll()
	}
	if pr.lent != nil {
		return busy
	}
	if pr.unsent {
		done, err := l.Flush()
		if err != nil {
			pr.sendErr, done = err, true
		}
		pr.unsent = !done
		busy = busy || done
	}
	for len(pr.ctl) > 0 && !pr.unsent && pr.sendErr == nil {
		if !p.transmit(pr, &pr.ctl[0].h, pr.ctl[0].payload, false) {
			break
		}
		pr.ctl = pr.ctl[:copy(pr.ctl, pr.ctl[1:])]
		busy = true
	}
	if len(pr.queued)+len(pr.bulk) > 0 && !pr.unsent && p.pump(pr) {
		busy = true
		if p.asleep.Load() > 0 {
			p.wakeAll()
		}
	}
	if pr.left > 0 {
		return p.fill(pr) || busy
	}
	h, payload, err := l.Recv()
	if err != nil {
		p.down(pr, err)
		return true
	}
	if h == nil {
		return busy
	}
	if err := p.deliver(pr, h, payload); err != nil {
		p.log.Warn("closing link", "peer", pr.rank, "err", err)
		p.down(pr, err)
	}
	if p.asleep.Load() > 0 {
		p.wakeAll()
	}
	return true
}

// fill takes the next part of a payload that arrives in pieces.
func (p *Proxy) fill(pr *peer) bool {
	dst := pr.dst
	if dst == nil {
		if p.discard == nil {
			p.discard = make([]byte, 64<<10)
		}
		dst = p.discard[:min(len(p.discard), pr.left)]
	}
	n, err := pr.link.Fill(dst)
	if err != nil {
		p.down(pr, err)
		return true
	}
	if n == 0 {
		return false
	}
	p.moved += n
	if pr.left -= n; pr.dst != nil {
		pr.dst = pr.dst[n:]
	}
	if pr.left == 0 {
		p.finish(pr)
		if p.asleep.Load() > 0 {
			p.wakeAll()
		}
	}
	return true
}

// take moves the current frame's payload to dst (nil: drops it), now or as it arrives. finish
// follows.
func (p *Proxy) take(pr *peer, payload, dst []byte) {
	if payload == nil && pr.cur.Len > 0 {
		pr.dst, pr.left = dst, int(pr.cur.Len)
		p.fill(pr)
		return
	}
	copy(dst, payload)
	p.moved += len(payload)
	p.finish(pr)
}

// finish ends the current frame, whose payload is complete.
func (p *Proxy) finish(pr *peer) {
	pr.link.Release()
	h := &pr.cur
	pr.dst = nil
	st, to := pr.st, pr.target
	pr.target = nil
	switch {
	case st == nil: // the channel was closed
		if e, ok := to.(*early); ok {
			p.pool.put(e.buf)
		}
	case to != nil:
		to.placed(p, st, h)
	default:
		if h.Kind == frameData || h.Kind == frameEager || h.Kind == frameRTS { // dropped
			st.taken += cost(int(h.Len))
		}
		p.repay(st)
	}
}

func (r *Recv) placed(p *Proxy, st *stream, h *Header) {
	st.c.advance(r, h)
	st.taken += cost(int(h.Len))
	p.repay(st)
}

func (r *RecvReq) placed(p *Proxy, st *stream, h *Header) {
	r.got += int(h.Len)
	if r.done = r.got == r.total; r.done && r.id != 0 {
		st.c.received(r)
	}
	if h.Kind == frameEager {
		st.taken += cost(int(h.Len))
	}
	p.repay(st)
	switch {
	case r.done:
		st.c.end(&r.follow, r.err)
	case r.more != nil && r.err == nil:
		r.more(r.got)
	}
}

func (e *early) placed(_ *Proxy, st *stream, _ *Header) {
	e.filled = true
	st.c.arrived(st, e)
}

// deliver handles a frame that the link returned. An error means that the peer violated the
// protocol.
func (p *Proxy) deliver(pr *peer, h *Header, payload []byte) error {
	pr.cur = *h
	h = &pr.cur
	if h.Service != 0 {
		return fmt.Errorf("%w: rank %d sent a frame of service %d, which is unknown here", ErrProtocol, pr.rank,
			h.Service)
	}
	pr.counts.received(int(h.Len))
	if h.Kind == frameBeat {
		if h.Len != 0 {
			return fmt.Errorf("%w: rank %d sent a heartbeat with %d bytes", ErrProtocol, pr.rank, h.Len)
		}
		pr.link.Release()
		return nil
	}
	if h.Kind == frameOpen {
		if err := p.opened(pr, h); err != nil {
			return err
		}
		pr.link.Release()
		return nil
	}
	if int64(h.Chan) >= int64(len(pr.in)) {
		return fmt.Errorf("%w: rank %d uses channel number %d, having opened %d", ErrProtocol, pr.rank, h.Chan,
			len(pr.in))
	}
	st := pr.in[h.Chan].st
	if st == nil || st.c.retired {
		var err error
		if st, err = p.streamFor(pr, &pr.in[h.Chan]); err != nil {
			return err
		}
		if st == nil {
			pr.st = nil
			p.take(pr, payload, nil)
			return nil
		}
		st.in, st.from = h.Chan, pr.linkNo
		pr.in[h.Chan].st = st
	}
	pr.st = st
	c := st.c
	if h.Ack-st.acked > st.sent-st.acked {
		return fmt.Errorf("%w: rank %d acknowledges more than was sent to it", ErrProtocol, pr.rank)
	}
	st.acked = h.Ack
	switch h.Kind {
	case frameData:
		st.seen, st.hasSeen = Token{h.Seq, h.Call, h.Count}, true
		if c.err != nil {
			p.take(pr, payload, nil)
			return nil
		}
		if r := st.posted.front(); r != nil && len(st.early) == 0 {
			if !c.accepts(r, h) {
				p.take(pr, payload, nil)
				return nil
			}
			if r.lend && payload != nil && r.got == 0 && h.Flags&flagLast != 0 {
				st.posted.pop()
				r.view, r.done = payload, true
				pr.lent = r
				c.came++
				return nil
			}
			pr.target = r
			p.take(pr, payload, r.buf[r.got:r.got+int(h.Len)])
			return nil
		}
		c.compare(st, h)
		return p.keep(pr, st, payload)
	case frameEager, frameRTS:
		st.seen, st.hasSeen = Token{Seq: h.Count}, true
		if h.Kind == frameEager {
			st.came++
		}
		if h.Kind == frameEager && c.err == nil && c.ranks != nil && len(st.early) == 0 {
			if r := c.match(st, h); r != nil { // straight to its place
				c.bind(r, st, h)
				pr.target = r
				if r.err != nil {
					p.take(pr, payload, nil)
				} else {
					p.take(pr, payload, r.buf)
				}
				return nil
			}
		}
		return p.keep(pr, st, payload)
	case frameBulk:
		r := c.recvs[h.Seq]
		if r == nil || r.st != st || r.err != nil {
			p.take(pr, payload, nil)
			return nil
		}
		if h.Off != uint64(r.got) || h.Len == 0 || r.got+int(h.Len) > len(r.buf) {
			return fmt.Errorf("%w: rank %d sent bytes outside of an announced message", ErrProtocol, pr.rank)
		}
		pr.target = r
		p.take(pr, payload, r.buf[r.got:r.got+int(h.Len)])
		return nil
	case frameCredit:
	case frameStatus:
		st.waits, st.waitFor, st.before = Token{h.Seq, h.Call, h.Count}, h.Off, st.seen.Seq
		c.compareWait(st)
	case frameCTS:
		c.clearToSend(st, h)
	case frameCancel:
		c.cancelled(st, h)
	case frameBegun:
		c.counted(st, h)
	case frameLost:
		c.severed(st)
	case frameLeave:
		st.until = h.Seq + 1
	case frameBye:
		pr.bye, st.left, st.heard = true, true, time.Now()
		if st.posted.size > 0 { // as in sever
			c.fail(st.gone())
		}
		c.miss(st)
	case frameNotice:
		if err := p.checkNotice(pr, h); err != nil {
			return err
		}
		if payload == nil {
			return p.keep(pr, st, nil) // it arrives in pieces
		}
		c.noticed(st, h, payload)
		p.take(pr, payload, nil)
		return nil
	case frameAbort:
		if h.Len > MaxAbort || payload == nil && h.Len > 0 {
			if h.Len > MaxAbort {
				return fmt.Errorf("%w: rank %d sent an abort of %d bytes", ErrProtocol, pr.rank, h.Len)
			}
			return p.keep(pr, st, nil) // rare: it arrives in pieces
		}
		c.abortedBy(st, append([]byte{}, payload...))
		p.take(pr, payload, nil)
		return nil
	default:
		return fmt.Errorf("%w: rank %d sent a frame of kind %d", ErrProtocol, pr.rank, h.Kind)
	}
	if h.Len != 0 {
		return fmt.Errorf("%w: rank %d sent a frame of kind %d with %d bytes", ErrProtocol, pr.rank, h.Kind, h.Len)
	}
	pr.link.Release()
	return nil
}

// streamFor returns the peer's traffic on a channel, which may not be open yet; nil if the channel
// or this epoch of it was closed.
func (p *Proxy) streamFor(pr *peer, i *inbound) (*stream, error) {
	key := i.key
	c := p.chans[key]
	if c == nil {
		if f := p.floor(i); f.above(key.epoch) {
			return nil, nil
		}
	}
	if c == nil || c.ranks == nil && c.streams[pr.rank] == nil {
		if most := p.mostUnopened(); pr.unopened == most {
			return nil, fmt.Errorf("%w: rank %d uses more than %d channels that are not open", ErrProtocol, pr.rank,
				most)
		}
		pr.unopened++
	}
	if c == nil {
		c = p.newChannel(key)
		c.place = i.place
	}
	if c.ranks != nil && !c.has(pr.rank) { // else Open will look
		return nil, fmt.Errorf("%w: rank %d sent on channel %v, of which it is no member", ErrProtocol, pr.rank,
			key.name)
	}
	return c.streamOf(pr), nil
}

// keep puts the current frame aside until a receive matches it. The peer's credit bounds the
// memory.
func (p *Proxy) keep(pr *peer, st *stream, payload []byte) error {
	n := int(pr.cur.Len)
	// No receive matches these frames: they are handled on arrival.
	unasked := pr.cur.Kind == frameAbort || pr.cur.Kind == frameNotice
	if !unasked {
		if st.held += int(cost(n)); st.held > st.c.window {
			return fmt.Errorf("%w: rank %d sent more than its credit of %d bytes", ErrProtocol, pr.rank, st.c.window)
		}
	}
	buf := p.pool.get(n)
	p.arrivals++
	e := &early{h: pr.cur, buf: buf, order: p.arrivals}
	if !unasked {
		st.early = append(st.early, e)
	}
	pr.target = e
	p.take(pr, payload, buf)
	return nil
}

// arrived is called when a kept frame is complete. A receive may have been matched with it while it
// arrived.
func (c *Channel) arrived(st *stream, e *early) {
	switch e.h.Kind {
	case frameAbort:
		c.abortedBy(st, append([]byte{}, e.buf...))
		c.p.pool.put(e.buf)
	case frameNotice:
		c.noticed(st, &e.h, e.buf)
		c.p.pool.put(e.buf)
	case frameData:
		for len(st.early) > 0 && st.early[0].filled && st.posted.size > 0 && c.err == nil {
			c.p.takeEarly(st)
		}
	default:
		c.settle(st, e)
	}
}

// takeEarly delivers the oldest kept frame of the ordered lane to the receive that waits for it.
func (p *Proxy) takeEarly(st *stream) {
	e := st.early[0]
	if r := st.posted.front(); st.c.accepts(r, &e.h) {
		copy(r.buf[r.got:], e.buf)
		st.c.advance(r, &e.h)
	}
	p.dropEarly(st, 0)
}

// dropEarly removes kept frame i, which was consumed.
func (p *Proxy) dropEarly(st *stream, i int) {
	e := st.early[i]
	st.early = append(st.early[:i], st.early[i+1:]...)
	p.pool.put(e.buf)
	if e.paid {
		return
	}
	st.held -= int(cost(len(e.buf)))
	st.taken += cost(len(e.buf))
	p.repay(st)
}

// abortedBy records a peer's abort and passes it on once to the linked members. A member that waits
// for the aborting rank has a link to that rank.
func (c *Channel) abortedBy(st *stream, payload []byte) {
	c.Abort(&Aborted{Rank: st.slot, Payload: payload}, payload)
	c.miss(st)
}
