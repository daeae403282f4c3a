package verbs

import (
	"errors"
	"fmt"
	"slices"
	"time"

	"tutti/mem"
	"tutti/p2p"
	"tutti/p2p/rma"
	"tutti/rdma"
)

// Move implements rma.Mover.
func (l *link) Move(m *rma.Move) bool {
	waits := l.haunted.Load() && !m.Read
	if m.Local.Len() < l.least && !waits {
		return false
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if waits && l.haunted.Load() {
		l.later = append(l.later, m)
		return true
	}
	n := l.tx
	if m.Local.Len() < l.least {
		return false
	}
	if n == nil || n.err != nil || l.closed || l.state.Load() != live || l.barred.has(m.Generation) {
		return false
	}
	ok := l.beginLocked(n, m, 0)
	l.pumpLocked()
	return ok
}

// beginLocked begins to move m over n, from byte at on. False: it cannot be moved.
func (l *link) beginLocked(n *lane, m *rma.Move, at int) bool {
	ask, ok := n.bulk.begin(m, at)
	if ask {
		l.tellMemoryLocked(n, frameClaim, m.Generation)
		l.out[len(l.out)-1].h.Off = m.Region
	}
	l.endedLocked(n)
	return ok
}

// Moved implements rma.Mover.
func (l *link) Moved() *rma.Move {
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(l.moved) == 0 && !l.closed {
		lanes, k := l.connectedLocked()
		for _, n := range lanes[:k] {
			if l.has(n) {
				l.reapLocked(n)
				if n.err != nil && l.state.Load() == live {
					l.laneLocked(n)
				}
			}
		}
	}
	if len(l.moved) == 0 {
		return nil
	}
	m := l.moved[0]
	l.moved = l.moved[:copy(l.moved, l.moved[1:])]
	return m
}

// Drop implements rma.Mover. A queue pair cannot take back a request: it is closed, with its lane,
// or failed if the device refuses to close it. What the network has of a put may still be placed
// until the peer's queue pair is closed, so that later puts wait for that.
func (l *link) Drop(m *rma.Move) {
	l.mu.Lock()
	defer l.mu.Unlock()
	is := func(o *rma.Move) bool { return o == m }
	l.moved, l.later = slices.DeleteFunc(l.moved, is), slices.DeleteFunc(l.later, is)
	lanes, k := l.connectedLocked()
	for _, n := range append(slices.Clone(l.limbo), lanes[:k]...) {
		i := slices.IndexFunc(n.bulk.moves, func(v *move) bool { return v.m == m })
		if i < 0 {
			continue
		}
		v := n.bulk.moves[i]
		if v.under > 0 || v.reads != 0 {
			if l.has(n) && l.state.Load() == live {
				l.giveUpLocked(n, errors.New("a put or a get under way was cancelled"))
			}
			n.fail(errors.New("its queue pair for data is closed")) // if it is still the link's
			l.freeLocked(n, v)
			n.ghosts = n.ghosts || !m.Read && slices.Contains(l.limbo, n)
		}
		n.bulk.remove(v)
		l.settleLocked(n)
		return
	}
}

// freeLocked waits until no request for v uses this end's memory any more. Callers may hold locks
// that the rank needs for everything: while a device refuses, all moves of the transport together
// wait for lingerTime at most.
func (l *link) freeLocked(n *lane, v *move) {
	for pause := minPause; ; pause *= 2 {
		err := n.bulk.free(v)
		if err == nil {
			if pause > minPause {
				l.t.lets()
			}
			return
		}
		left := time.Until(l.t.patience(l.linger))
		if left <= 0 {
			l.t.log.Error("rdma: memory of a put or get that has ended may still be used: the device neither closes a "+
				"queue pair nor completes its requests", "peer", l.peer, "lane", n.gen, "reason", err)
			return
		}
		time.Sleep(min(pause, left))
	}
}

// reapLocked takes what the device has completed of moves on a lane.
func (l *link) reapLocked(n *lane) {
	n.bulk.reap(func(generation uint64) { l.tellMemoryLocked(n, frameRevoked, generation) })
	l.endedLocked(n)
	for _, err := range n.bulk.left {
		l.t.log.Info("rdma: a queue pair for data is left out", "peer", l.peer, "lane", n.gen, "reason", err)
	}
	n.bulk.left = nil
	for _, generation := range n.bulk.barred {
		l.barred.add(generation)
	}
	n.bulk.barred = nil
}

// bars are the generations of the peer's memory that no lane moves data to or from any more: a
// request has failed in a way that another lane does not change. Frames carry such data, and have
// the reason if there is one. Only the latest maxKeys are kept.
type bars struct {
	set   map[uint64]struct{}
	order []uint64
}

func (b *bars) has(generation uint64) bool {
	_, ok := b.set[generation]
	return ok
}

func (b *bars) add(generation uint64) {
	if b.has(generation) {
		return
	}
	if b.set == nil {
		b.set = map[uint64]struct{}{}
	}
	if len(b.order) == maxKeys {
		delete(b.set, b.order[0])
		b.order = b.order[:copy(b.order, b.order[1:])]
	}
	b.set[generation] = struct{}{}
	b.order = append(b.order, generation)
}

// tellMemoryLocked queues a frame about memory.
func (l *link) tellMemoryLocked(n *lane, kind uint8, generation uint64) {
	l.out = append(l.out, control{h: p2p.Header{Kind: kind, Service: service, Seq: n.gen, Call: generation}})
}

// endedLocked takes over the moves of n that have ended.
func (l *link) endedLocked(n *lane) {
	for _, m := range n.bulk.ended {
		if m.OK {
			count := &l.t.put
			if m.Read {
				count = &l.t.got
			}
			count.Add(uint64(m.Local.Len()))
		}
	}
	l.moved = append(l.moved, n.bulk.ended...)
	n.bulk.ended = n.bulk.ended[:0]
}

// strandLocked ends the moves of a lane that is given up. Those with requests under way end when
// the queue pairs of both ends are closed.
func (l *link) strandLocked(n *lane) {
	for _, v := range slices.Clone(n.bulk.moves) {
		if v.under == 0 && v.reads == 0 {
			n.bulk.end(v, false)
		}
	}
	l.endedLocked(n)
	if len(n.bulk.moves) > 0 {
		l.limbo = append(l.limbo, n)
	}
}

// settleLocked ends the moves of a lane in limbo if none of them can change memory any more.
func (l *link) settleLocked(n *lane) {
	if n.closed && n.fenced {
		for _, v := range slices.Clone(n.bulk.moves) {
			n.bulk.end(v, false)
		}
		l.endedLocked(n)
		n.ghosts = false
	}
	if len(n.bulk.moves) == 0 && !n.ghosts {
		l.limbo = slices.DeleteFunc(l.limbo, func(o *lane) bool { return o == n })
	}
	l.haunted.Store(slices.ContainsFunc(l.limbo, func(o *lane) bool { return o.ghosts }))
	if !l.haunted.Load() { // frames carry what was put off
		l.moved, l.later = append(l.moved, l.later...), l.later[:0]
	}
}

// bury closes a lane that is not in use any more, and says so to the peer. A device that is being
// reset closes no queue pairs for some time, in which the peer may reach memory: bury tries again,
// as long as the link lives or its Close waits.
func (l *link) bury(n *lane) error {
	err := n.halt()
	if err != nil {
		l.t.log.Error("rdma: memory may still be used until a queue pair can be closed", "peer", l.peer, "lane", n.gen,
			"reason", err)
	}
	waits := func() bool { return l.ctx.Err() == nil || time.Now().Before(l.late) }
	for pause := minPause; err != nil && waits(); pause = min(2*pause, maxPause) {
		if l.wait(pause); l.ctx.Err() != nil {
			time.Sleep(minPause)
		}
		err = n.halt()
	}
	if err != nil {
		return fmt.Errorf("rdma: lane %d to %v is not closed: %w", n.gen, l.peer, err)
	}
	if err = n.close(); err != nil {
		err = fmt.Errorf("rdma: lane %d to %v: %w", n.gen, l.peer, err)
	}
	for _, e := range l.gone(n) {
		e.leave(n)
	}
	return err
}

// gone says that the queue pairs of n are closed. It returns what the peer had keys for.
func (l *link) gone(n *lane) map[uint64]*exposure {
	l.mu.Lock()
	defer l.mu.Unlock()
	n.closed = true
	for generation := range n.revoking {
		n.permit(generation)
	}
	for _, v := range n.bulk.moves {
		n.bulk.disown(v)
	}
	if n.told && !l.closed {
		l.tellMemoryLocked(n, frameFenced, 0)
	}
	l.settleLocked(n)
	return n.granted
}

// permit undoes the withholding of keys for a generation.
func (n *lane) permit(generation uint64) {
	for _, h := range n.revoking[generation] {
		h.device.keys.Permit(h.key)
	}
	delete(n.revoking, generation)
}

// revoke tells the peer of lane n that its keys for memory end now. They are withheld until the
// peer has given them up.
func (l *link) revoke(n *lane, generation uint64, keys []held) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if n.closed {
		return
	}
	for _, h := range keys {
		h.device.keys.Withhold(h.key)
	}
	n.revoking[generation] = keys
	delete(n.granted, generation)
	if len(n.revoking) > maxKeys {
		n.fail(fmt.Errorf("the peer has not given up %d keys that it was asked to", len(n.revoking)))
	}
	if l.has(n) {
		l.tellMemoryLocked(n, frameRevoke, generation)
	}
}

// answerLocked answers the peer's question for a key of each rail; a nil e refuses them. With e.mu.
func (l *link) answerLocked(n *lane, generation uint64, e *exposure, keys []railKey) {
	l.tellMemoryLocked(n, frameKey, generation)
	if e == nil {
		return
	}
	c := &l.out[len(l.out)-1]
	for _, k := range keys {
		c.payload = k.append(c.payload)
	}
	c.h.Len, c.h.Flags = uint32(len(c.payload)), uint8(e.rights&(mem.Read|mem.Write))
	c.h.Off, c.h.Count = rdma.Address(e.mem), uint64(e.mem.Len())
}

// memoryLocked handles a frame about memory. The error is a violation of the protocol.
func (l *link) memoryLocked(h *p2p.Header, payload []byte) error {
	n := l.find(h.Seq)
	switch {
	case n != nil && l.has(n):
		if s := l.stageOf(n); h.Kind == frameFenced || s < probing {
			return errStage(h.Kind, n.gen, fmt.Sprintf("in stage %d", s))
		}
	default:
		i := slices.IndexFunc(l.limbo, func(n *lane) bool { return n.gen == h.Seq })
		if h.Kind == frameFenced && i >= 0 {
			n = l.limbo[i]
			n.fenced = true
			l.settleLocked(n)
		}
		return nil // it is given up here, and the peer will know
	}
	switch h.Kind {
	case frameClaim:
		if n.claims++; n.claims > p2p.MaxOutstanding {
			return fmt.Errorf("more than %d questions for keys", p2p.MaxOutstanding)
		}
		e := l.t.keys.find(h.Off, h.Call)
		if e == nil {
			l.answerLocked(n, h.Call, nil, nil)
			return nil
		}
		for _, d := range n.devices {
			d.retain()
		}
		l.wg.Go(func() {
			e.grant(l, n)
			for _, d := range n.devices {
				l.t.releases(d)
			}
			l.t.tell()
		})
	case frameKey:
		var keys []railKey
		for ; len(payload) >= keyBytes; payload = payload[keyBytes:] {
			keys = append(keys, decodeKey(payload))
		}
		if len(payload) > 0 {
			return fmt.Errorf("a key with %d bytes too many", len(payload))
		}
		if err := n.bulk.give(h.Call, mem.Rights(h.Flags), h.Off, h.Count, keys); err != nil {
			return err
		}
		l.endedLocked(n)
	case frameRevoke:
		done, err := n.bulk.revoke(h.Call)
		if err != nil {
			return err
		}
		l.endedLocked(n)
		if done {
			l.tellMemoryLocked(n, frameRevoked, h.Call)
		} else { // a device may take seconds to fail a request that it has begun
			l.giveUpLocked(n, errors.New("the peer has withdrawn memory of a put or get under way"))
		}
	case frameRevoked:
		if _, ok := n.revoking[h.Call]; !ok {
			return fmt.Errorf("a key for generation %d given up that it was not asked to", h.Call)
		}
		n.permit(h.Call)
	}
	return nil
}
