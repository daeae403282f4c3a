package verbs

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	"tutti/mem"
	"tutti/p2p"
	"tutti/p2p/rma"
	"tutti/rdma"
)

const (
	leastMove  = 32 << 10        // bytes of a put or get that is moved; shorter ones are frames
	pieceBytes = 256 << 10       // of a request
	bulkDepth  = 16              // requests under way, of all moves in turn
	maxReads   = 16              // of these, reads at a time
	lateMove   = 3 * time.Second // without a completion: some devices never repeat a lost packet
	maxKeys    = 1024            // that a lane keeps; it moves nothing to and from other memory
)

// bulk is the part of a lane that moves the data of puts and gets: a queue pair of its own, so that
// frames do not wait behind data, and what peers may do to memory is separate from the ring.
// It is used with the link's lock.
type bulk struct {
	lane   *lane
	cq     rdma.CQ
	qp     rdma.QP
	reads  int             // at a time, of this end
	keys   map[uint64]*key // of the peer's memory, by generation
	asking int             // of these, those that the peer has yet to give
	moves  []*move         // that have not ended
	queue  []*move         // of these, those with data to be requested, in turn
	ended  []*rma.Move     // not returned by Moved yet
	pieces [bulkDepth]piece
	spare  []*move
	under  int           // pieces under way
	since  time.Time     // of these, one has ended, or the first one was posted
	late   time.Duration // see lateMove
	armed  bool          // by the latest arm
	alarm  *time.Timer   // wakes an end that sleeps, so that it sees what is late
	wake   func()

	polled  [bulkDepth]rdma.Completion
	chain   [1]rdma.SendRequest
	segment [1]rdma.Segment

	halting sync.Mutex
	halted  bool
	err     error // of halt
}

// key allows access to an exposed range of the peer.
type key struct {
	region  uint64
	given   bool
	revoked bool       // nothing new is requested
	rights  mem.Rights // none: it was refused
	address uint64
	n       uint64 // bytes
	value   uint32
	under   int // pieces under way
}

// allows reports whether the peer's device would do what m needs.
func (k *key) allows(m *rma.Move) bool {
	want := mem.Write
	if m.Read {
		want = mem.Read
	}
	n := uint64(len(m.Local))
	return !k.revoked && k.region == m.Region && k.rights.Has(want) && n <= k.n && m.Offset <= k.n-n
}

// move is a move under way.
type move struct {
	m     *rma.Move
	gen   uint64 // of the peer's memory
	key   *key
	at    int // bytes requested
	under int // pieces under way
	// abandoned: frames have to carry it.
	abandoned bool
}

// piece is a request under way. Its part of the local memory is registered for the time.
type piece struct {
	move *move // nil: none
	mr   rdma.MR
}

// open makes the objects of the lane's bulk part. The queue pair is in the state Init.
func (b *bulk) open(n *lane, rung func()) error {
	b.lane, b.keys, b.late, b.wake = n, map[uint64]*key{}, lateMove, rung
	b.reads = min(max(n.device.Attributes().MaxReads, 1), maxReads)
	var err error
	if b.cq, err = n.device.NewCQ(bulkDepth, rung); err != nil {
		return err
	}
	cfg := rdma.QPConfig{Send: b.cq, Recv: n.cq, SendDepth: bulkDepth, RecvDepth: 1}
	if b.qp, err = n.device.NewQP(cfg); err != nil {
		return err
	}
	if err := b.qp.Init(n.device.port, rdma.LocalWrite|rdma.RemoteWrite|rdma.RemoteRead); err != nil {
		return err
	}
	// Nothing is received: this receive is flushed when the queue pair fails, also because of the
	// peer's requests.
	_, err = b.qp.PostRecv(n.blank[:1])
	return err
}

// halt closes the queue pair. When it returns nil, no request of this end uses memory any more, and
// none of the peer's. It may be called without the link's lock when the lane is not in use any
// more.
func (b *bulk) halt() error {
	b.halting.Lock()
	defer b.halting.Unlock()
	if b.halted {
		return b.err
	}
	b.halted = true
	if b.alarm != nil {
		b.alarm.Stop()
	}
	if b.qp != nil {
		b.err = b.qp.Close()
	}
	for i := range b.pieces {
		if mr := b.pieces[i].mr; mr != nil {
			b.err = errors.Join(b.err, mr.Close())
		}
	}
	return b.err
}

// close closes all objects.
func (b *bulk) close() error {
	err := b.halt()
	if b.cq != nil {
		err = errors.Join(err, b.cq.Close())
	}
	return err
}

// begin begins to move m. ask: the peer has to be asked for its key. False: it cannot be moved.
func (b *bulk) begin(m *rma.Move) (ask, ok bool) {
	k := b.keys[m.Generation]
	if k == nil && len(b.keys) >= maxKeys {
		maps.DeleteFunc(b.keys, func(_ uint64, k *key) bool { return k.given && k.rights == 0 })
	}
	switch {
	case k == nil && (len(b.keys) >= maxKeys || b.asking >= p2p.MaxOutstanding):
		return false, false
	case k == nil:
		k, ask = &key{region: m.Region}, true
		b.keys[m.Generation] = k
		b.asking++
	case k.region != m.Region || k.given && !k.allows(m):
		return false, false
	}
	v := new(move)
	if i := len(b.spare); i > 0 {
		v, b.spare = b.spare[i-1], b.spare[:i-1]
	}
	*v = move{m: m, gen: m.Generation, key: k}
	b.moves = append(b.moves, v)
	if k.given {
		b.queue = append(b.queue, v)
		b.post()
	}
	return ask, true
}

// give takes the peer's answer to the question for a key. No rights: it gives none.
func (b *bulk) give(gen uint64, rights mem.Rights, address, n uint64, value uint32) error {
	k := b.keys[gen]
	if k == nil || k.given {
		return fmt.Errorf("a key for generation %d, for which it was not asked", gen)
	}
	if rights&^(mem.Read|mem.Write) != 0 || address+n < address {
		return fmt.Errorf("a key with rights %v for %d bytes at %#x", rights, n, address)
	}
	b.asking--
	k.given, k.rights, k.address, k.n, k.value = true, rights, address, n, value
	for _, v := range slices.Clone(b.moves) {
		switch {
		case v.key != k:
		case k.allows(v.m):
			b.queue = append(b.queue, v)
		default:
			b.end(v, false)
		}
	}
	b.post()
	return nil
}

// revoke takes away a key. Done: nothing with it is under way.
func (b *bulk) revoke(gen uint64) (done bool, err error) {
	k := b.keys[gen]
	if k == nil || !k.given || k.revoked || k.rights == 0 {
		return false, fmt.Errorf("it takes back a key for generation %d, which it has not given", gen)
	}
	k.revoked = true
	for _, v := range slices.Clone(b.queue) {
		if v.key == k {
			b.abandon(v)
		}
	}
	return b.forget(gen, k), nil
}

// forget removes a key that was revoked, unless requests with it are under way.
func (b *bulk) forget(gen uint64, k *key) bool {
	if !k.revoked || k.under > 0 {
		return false
	}
	delete(b.keys, gen)
	return true
}

// abandon requests nothing more for v. It ends with what is under way.
func (b *bulk) abandon(v *move) {
	v.abandoned = true
	b.queue = slices.DeleteFunc(b.queue, func(o *move) bool { return o == v })
	if v.under == 0 {
		b.end(v, false)
	}
}

// end ends a move without requests under way.
func (b *bulk) end(v *move, ok bool) {
	v.m.OK = ok
	b.ended = append(b.ended, v.m)
	b.remove(v)
}

// remove forgets a move, which may be used for another one if no request of it is under way.
func (b *bulk) remove(v *move) {
	is := func(o *move) bool { return o == v }
	b.moves, b.queue = slices.DeleteFunc(b.moves, is), slices.DeleteFunc(b.queue, is)
	if v.under == 0 {
		v.m = nil
		b.spare = append(b.spare, v)
	}
}

// arm requests a call of wake for the next completion of a request under way, and when it is late.
func (b *bulk) arm() error {
	if b.armed = b.under > 0; !b.armed {
		return nil
	}
	if b.alarm == nil {
		b.alarm = time.AfterFunc(b.late, b.wake)
	} else {
		b.alarm.Reset(b.late)
	}
	return b.cq.Arm()
}

// post posts requests as long as there is room, a piece of each move in turn.
func (b *bulk) post() {
	n := b.lane
	for n.err == nil && b.under < bulkDepth && len(b.queue) > 0 {
		v := b.queue[0]
		local := mem.Host(v.m.Local[v.at:][:min(pieceBytes, len(v.m.Local)-v.at)], mem.Anywhere)
		access := rdma.Access(0)
		if v.m.Read {
			access = rdma.LocalWrite
		}
		mr, err := n.device.Register(local, access)
		if err != nil { // too much memory is registered, for example
			b.abandon(v)
			continue
		}
		if err := b.request(v, local, mr); err != nil {
			n.fail(err)
			return
		}
		b.queue = b.queue[:copy(b.queue, b.queue[1:])]
		if v.at < len(v.m.Local) {
			b.queue = append(b.queue, v)
		}
	}
}

// request posts a request for the next bytes of v, which are registered.
func (b *bulk) request(v *move, local mem.Memory, mr rdma.MR) error {
	op := rdma.Write
	if v.m.Read {
		op = rdma.Read
	}
	i := slices.IndexFunc(b.pieces[:], func(p piece) bool { return p.move == nil })
	b.segment[0] = rdma.Segment{Address: addressOf(local.Bytes()), Key: mr.LocalKey(), Len: uint32(local.Len())}
	b.chain[0] = rdma.SendRequest{ID: uint64(i), Op: op, Segments: b.segment[:], Signaled: true,
		RemoteAddress: v.key.address + v.m.Offset + uint64(v.at), RemoteKey: v.key.value}
	if _, err := b.qp.Post(b.chain[:]); err != nil {
		return errors.Join(err, mr.Close())
	}
	if b.pieces[i] = (piece{v, mr}); b.under == 0 {
		b.since = time.Now()
	}
	v.at += local.Len()
	v.under++
	v.key.under++
	b.under++
	return nil
}

// reap takes completions, and posts more. It calls revoked with the generation of each key that was
// revoked and is not in use any more.
func (b *bulk) reap(revoked func(gen uint64)) {
	n := b.lane
	for n.err == nil && b.under > 0 {
		k, err := b.cq.Poll(b.polled[:])
		if err != nil {
			n.fail(err)
			return
		}
		for i := range b.polled[:k] {
			c := &b.polled[i]
			p := &b.pieces[c.ID%bulkDepth]
			if c.Status != rdma.Success || p.move == nil {
				op := rdma.Write
				if p.move != nil && p.move.m.Read {
					op = rdma.Read
				}
				n.fail(&rdma.StatusError{Status: c.Status, Op: op, Device: n.device.Name(), QP: c.QP, Vendor: c.Vendor})
				return
			}
			if err := p.mr.Close(); err != nil {
				n.fail(err)
				return
			}
			v := p.move
			*p = piece{}
			b.under--
			v.under--
			v.key.under--
			if b.forget(v.gen, v.key) {
				revoked(v.gen)
			}
			switch {
			case v.under > 0:
			case v.at == len(v.m.Local):
				b.end(v, true)
			case v.abandoned:
				b.end(v, false)
			}
		}
		b.post()
		switch {
		case k > 0:
			b.since = time.Now()
		case time.Since(b.since) >= b.late:
			n.fail(fmt.Errorf("%d requests of puts and gets have not moved for %v", b.under, b.late))
		}
		if k < len(b.polled) {
			return
		}
	}
}
