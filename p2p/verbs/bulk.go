package verbs

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"math/bits"
	"slices"
	"sync"
	"time"

	"tutti/mem"
	"tutti/p2p"
	"tutti/p2p/rma"
	"tutti/rdma"
)

const (
	leastMove  = 32 << 10  // bytes of a put or get that is moved; shorter ones are frames
	pieceBytes = 256 << 10 // of a request
	railDepth  = 16        // requests under way on a rail, of all moves in turn
	maxReads   = 16        // of these, reads at a time
	maxKeys    = 1024      // that a lane keeps; it moves nothing to and from other memory
)

// bulk is the part of a lane that moves the data of puts and gets. It has queue pairs of its own,
// so that frames do not wait behind data, and what peers may do to memory is separate from the
// ring. It is used with the link's lock.
type bulk struct {
	lane   *lane
	rails  []*rail         // by number, which is the same at both ends
	left   []error         // why rails are not used, not yet reported
	dead   int             // rails that could not be made, or have failed before they worked
	keys   map[uint64]*key // of the peer's memory, by generation
	asking int             // of these, those that the peer has yet to give
	moves  []*move         // that have not ended
	queue  []*move         // of these, those with data to be requested, in turn
	ended  []*rma.Move     // not returned by Moved yet
	barred []uint64        // generations of memory that a request has failed on for good
	spare  []*move
	// leaving: no more data is requested, because another lane is in use.
	leaving bool

	polled  [railDepth]rdma.Completion
	chain   [1]rdma.SendRequest
	segment [1]rdma.Segment

	halting sync.Mutex
}

// key allows access to an exposed range of the peer.
type key struct {
	region  uint64
	given   bool
	revoked bool       // nothing new is requested
	useless bool       // nothing is requested, because this end has no memory for reads
	rights  mem.Rights // none: it was refused
	address uint64
	n       uint64    // bytes
	rails   []railKey // of the peer's device of each rail
	under   int       // pieces under way
}

// railSet is a set of rails: bit i stands for number i.
type railSet uint16

// allows reports whether the peer's device would do what m needs.
func (k *key) allows(m *rma.Move) bool {
	want := mem.Write
	if m.Read {
		want = mem.Read
	}
	n := uint64(m.Local.Len())
	return !k.revoked && !k.useless && k.region == m.Region && k.rights.Has(want) && n <= k.n && m.Offset <= k.n-n
}

// move is a move under way.
type move struct {
	m     *rma.Move
	gen   uint64 // of the peer's memory
	key   *key
	own   *local  // its memory, if it is a device's and no region; nil: not yet
	at    int     // bytes requested
	under int     // pieces under way
	reads railSet // rails with writes that no read has followed yet, though one is needed
	// abandoned: frames have to carry it.
	abandoned bool
}

// open makes the rails of the lane, and returns what the peer is told. The queue pairs are in the
// state Init. A rail that cannot be made is left out; the error says that none can.
func (b *bulk) open(n *lane, ports []port, psn uint32, rung func()) ([]path, error) {
	b.lane, b.keys = n, map[uint64]*key{}
	paths := make([]path, len(ports))
	made, tried := 0, 0
	for i, p := range ports {
		r := &rail{port: p, number: i}
		b.rails = append(b.rails, r)
		if p.device == nil {
			continue
		}
		tried++
		if err := r.open(n, rung); err != nil {
			b.left = append(b.left, err)
			b.dead++
			continue
		}
		r.state = unproven
		r.path.qp, r.path.psn = r.qp.Number(), (psn+1+uint32(i))&(1<<24-1)
		paths[i] = r.path
		made++
	}
	if made == 0 && tried > 0 {
		return nil, errors.Join(b.left...)
	}
	return paths, nil
}

// connect connects the rails that both ends have.
func (b *bulk) connect() error {
	for i, r := range b.rails {
		if theirs := &b.lane.theirs.rails[i]; r.state != unproven || theirs.qp == 0 {
			r.state = unused
		} else if err := r.connect(r.qp, &r.path, theirs); err != nil {
			return err
		}
	}
	return nil
}

// probe has each rail show that data passes.
func (b *bulk) probe() {
	for _, r := range b.rails {
		if r.state == unproven {
			if err := r.probe(&b.chain); err != nil {
				b.broken(r, err)
			}
		}
	}
}

// usable reports whether a rail works, or may yet.
func (b *bulk) usable() bool {
	return slices.ContainsFunc(b.rails, func(r *rail) bool { return r.state != unused })
}

// count returns the number of rails in a state.
func (b *bulk) count(s railState) (n int) {
	for _, r := range b.rails {
		if r.state == s {
			n++
		}
	}
	return n
}

// names returns the ports of the rails that work, or may yet.
func (b *bulk) names() (list []rdma.DevicePort) {
	for _, r := range b.rails {
		if r.state != unused {
			list = append(list, r.at)
		}
	}
	return list
}

// under returns the number of requests under way.
func (b *bulk) under() (n int) {
	for _, r := range b.rails {
		n += r.under
	}
	return n
}

// fails takes a completion with an error of a rail's receive, from the queue of the lane.
func (b *bulk) fails(c *rdma.Completion) {
	i := slices.IndexFunc(b.rails, func(r *rail) bool { return c.ID == r.receive() })
	if i < 0 {
		b.lane.fail(fmt.Errorf("%w: a completion of request %d", p2p.ErrProtocol, c.ID))
		return
	}
	if err := b.rails[i].flushed(c); err != nil {
		b.broken(b.rails[i], err)
	}
}

// broken says that a rail has failed. If it has ever worked, so has the lane: what was requested
// may still change memory until the queue pairs of both ends are closed. Otherwise it is not used.
func (b *bulk) broken(r *rail, err error) {
	switch r.state {
	case working:
		b.lane.fail(err)
	case unproven:
		r.state, r.under = unused, 0
		b.dead++
		b.left = append(b.left, err)
		if !b.usable() {
			for _, v := range slices.Clone(b.queue) {
				b.abandon(v)
			}
		}
	}
}

// halt closes the queue pairs. When it returns nil, no request of this end uses memory any more,
// and none of the peer's. After an error it may be called again. It may be called without the
// link's lock when the lane is not in use any more.
func (b *bulk) halt() (err error) {
	b.halting.Lock()
	defer b.halting.Unlock()
	return b.haltLocked()
}

func (b *bulk) haltLocked() (err error) {
	for _, r := range b.rails {
		err = errors.Join(err, r.closeQP(&r.qp))
	}
	return err
}

// free closes the queue pairs of a lane that has failed. Those that cannot be closed it fails, and
// takes what they complete. When it returns nil, no request for v uses this end's memory any more.
// After an error it may be called again.
func (b *bulk) free(v *move) error {
	b.halting.Lock() // as long as a queue pair is open, nothing else is closed
	defer b.halting.Unlock()
	err := b.haltLocked()
	if err == nil {
		return nil
	}
	uses := func(r *rail) bool {
		return r.qp != nil && slices.ContainsFunc(r.pieces[:], func(p piece) bool { return p.move == v })
	}
	for _, r := range b.rails {
		if !uses(r) {
			continue
		}
		if e := r.qp.Fail(); e != nil {
			err = errors.Join(err, e)
			continue
		}
		for more := true; more; {
			k, _ := r.cq.Poll(b.polled[:])
			for _, c := range b.polled[:k] {
				if c.ID < railDepth {
					r.pieces[c.ID].move = nil // close gives the local memory back
				}
			}
			more = k == len(b.polled)
		}
	}
	if slices.ContainsFunc(b.rails, uses) {
		return err
	}
	return nil
}

// close closes all other objects, after halt.
func (b *bulk) close() (err error) {
	for _, r := range b.rails {
		err = errors.Join(err, r.close())
	}
	return err
}

// begin begins to move m, of which the first bytes were moved already. ask: the peer has to be
// asked for its key. False: it cannot be moved.
func (b *bulk) begin(m *rma.Move, at int) (ask, ok bool) {
	k := b.keys[m.Generation]
	if k == nil && len(b.keys) >= maxKeys {
		maps.DeleteFunc(b.keys, func(_ uint64, k *key) bool { return k.given && k.rights == 0 })
	}
	switch {
	case k == nil && (len(b.keys) >= maxKeys || b.asking >= p2p.MaxOutstanding) || !b.usable():
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
	*v = move{m: m, gen: m.Generation, key: k, at: at}
	b.moves = append(b.moves, v)
	if k.given {
		b.queue = append(b.queue, v)
		b.post()
	}
	return ask, true
}

// give takes the peer's answer to the question for a key, with its value for each rail. No rights:
// it gives none, or with n == askAgain none now, so that the next move asks again.
func (b *bulk) give(gen uint64, rights mem.Rights, address, n uint64, keys []railKey) error {
	k := b.keys[gen]
	if k == nil || k.given {
		return fmt.Errorf("a key for generation %d, for which it was not asked", gen)
	}
	if rights&^(mem.Read|mem.Write) != 0 || address+n < address {
		return fmt.Errorf("a key with rights %v for %d bytes at %#x", rights, n, address)
	}
	if want := len(b.rails); rights == 0 && len(keys) > 0 || rights != 0 && len(keys) != want {
		return fmt.Errorf("a key with %d values for %d queue pairs", len(keys), want)
	}
	b.asking--
	if rights == 0 && n == askAgain {
		delete(b.keys, gen)
	}
	for i, r := range b.rails {
		if rights == 0 || keys[i].reads == 0 || r.state == unused {
			continue
		}
		// Before data is under way, to which the reads belong.
		if _, _, err := r.sink.register(b.lane.t, r.device, rdma.LocalWrite); err != nil {
			b.lane.t.log.Warn("rdma: puts and gets go in frames: memory cannot be registered", "reason", err)
			k.useless = true
		}
	}
	k.given, k.rights, k.address, k.n, k.rails = true, rights, address, n, keys
	for _, v := range slices.Clone(b.moves) {
		switch {
		case v.key != k:
		case k.allows(v.m) && b.usable():
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

// abandon requests no more data for v. It ends with what is under way, and the reads behind that,
// which a key that was revoked does not need: the peer's device has made all visible.
func (b *bulk) abandon(v *move) {
	v.abandoned = true
	if v.reads != 0 && !v.key.revoked {
		return
	}
	v.reads = 0
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
	b.disown(v)
	if v.under == 0 {
		v.m = nil
		b.spare = append(b.spare, v)
	}
}

// disown ends the registration of a move's memory, now or with the last of its pieces.
func (b *bulk) disown(v *move) {
	if v.own == nil {
		return
	}
	if err := b.lane.t.end(v.own); err != nil {
		b.lane.t.log.Warn("rdma: memory stays registered", "reason", err)
	}
	v.own = nil
}

// arm requests a call of wake for the next completion of a request under way.
func (b *bulk) arm() {
	for _, r := range b.rails {
		r.armed = r.polled()
		if !r.armed {
			continue
		}
		if err := r.cq.Arm(); err != nil {
			b.broken(r, err)
		}
	}
}

// unheard reports whether there are requests whose completions cause no wake-up, since they were
// posted after arm.
func (b *bulk) unheard() bool {
	return slices.ContainsFunc(b.rails, func(r *rail) bool { return r.under > 0 && !r.armed })
}

// needsReads reports whether no more data of v is requested.
func (b *bulk) needsReads(v *move) bool { return v.at == v.m.Local.Len() || b.leaving || v.abandoned }

// choose returns the rail for the next request of v: for a piece the one with the fewest bytes
// under way, and of these the one that has moved the fewest, for a read behind pieces the first
// that needs one; nil: there is no room.
func (b *bulk) choose(v *move) (best *rail) {
	if b.needsReads(v) {
		if r := b.rails[bits.TrailingZeros16(uint16(v.reads))]; r.under < railDepth {
			return r
		}
		return nil
	}
	for _, r := range b.rails {
		if r.state == working && r.under < railDepth-1 && (best == nil || // one request is left for a read
			cmp.Or(cmp.Compare(r.bytes, best.bytes), cmp.Compare(r.total, best.total)) < 0) {
			best = r
		}
	}
	return best
}

// post posts requests as long as there is room, a piece of each move in turn, and a read behind the
// pieces of a put on each rail that needs one. It passes those moves over whose memory is being
// registered.
func (b *bulk) post() {
	n := b.lane
	for passed := 0; n.err == nil && passed < len(b.queue); {
		v := b.queue[0]
		err := errPreparing // a read that there is no room for is passed over, too
		if b.leaving && v.reads == 0 {
			// It is handed over to the other lane.
		} else if r := b.choose(v); r != nil {
			err = b.next(r, v)
		} else if !b.needsReads(v) {
			return
		}
		switch {
		case errors.Is(err, errPreparing):
			passed++
		case err != nil && v.abandoned: // a read cannot be made
			n.fail(err)
			return
		case err != nil: // too much memory is registered, for example
			b.abandon(v)
			continue
		default:
			passed = 0
		}
		b.queue = b.queue[:copy(b.queue, b.queue[1:])]
		if v.reads != 0 || !b.needsReads(v) || b.leaving {
			b.queue = append(b.queue, v)
		}
	}
}

// next posts the next request of v on a rail. After an error it has posted none; a rail that takes
// no requests fails the lane.
func (b *bulk) next(r *rail, v *move) error {
	rest, k := v.m.Local.Len()-v.at, &v.key.rails[r.number]
	if b.needsReads(v) {
		to, mr, err := r.sink.register(b.lane.t, r.device, rdma.LocalWrite)
		if err != nil {
			return err
		}
		b.segment[0] = rdma.Segment{Address: to, Key: mr.LocalKey(), Len: 1}
		b.request(r, piece{move: v}, rdma.SendRequest{Op: rdma.Read, RemoteAddress: k.reads, RemoteKey: k.readKey})
		if b.lane.err == nil {
			v.reads &^= 1 << r.number
		}
		return nil
	}
	local := v.m.Local.Slice(v.at, min(pieceBytes, rest))
	mr, err := b.lane.t.source(r.device, v, local)
	if err != nil {
		return err
	}
	op := rdma.Read
	if !v.m.Read {
		op = rdma.Write
		if k.reads != 0 {
			v.reads |= 1 << r.number
		}
	}
	b.segment[0] = rdma.Segment{Address: rdma.Address(local), Key: mr.LocalKey(), Len: uint32(local.Len())}
	b.request(r, piece{v, mr, local.Len()}, rdma.SendRequest{Op: op, RemoteKey: k.key,
		RemoteAddress: v.key.address + v.m.Offset + uint64(v.at)})
	return nil
}

// request posts a request for p, whose local memory is that of b.segment.
func (b *bulk) request(r *rail, p piece, s rdma.SendRequest) {
	i := slices.IndexFunc(r.pieces[:], func(p piece) bool { return p.move == nil })
	s.ID, s.Segments, s.Signaled = uint64(i), b.segment[:], true
	b.chain[0] = s
	taken, err := r.qp.Post(b.chain[:])
	if taken == 0 {
		b.lane.fail(errors.Join(err, p.mr.release()))
		return
	}
	if err != nil { // the device has taken the request nevertheless
		b.lane.fail(err)
	}
	if r.under == 0 {
		r.since = time.Now()
	}
	r.pieces[i] = p
	r.under++
	r.bytes += p.bytes
	p.move.at += p.bytes
	p.move.under++
	p.move.key.under++
}

// reap takes completions, and posts more. It calls revoked with the generation of each key that was
// revoked and is not in use any more.
func (b *bulk) reap(revoked func(gen uint64)) {
	for _, r := range b.rails {
		if r.polled() {
			b.reapRail(r, revoked)
		}
	}
	b.post() // memory may have been registered
}

func (b *bulk) reapRail(r *rail, revoked func(gen uint64)) {
	for n := b.lane; n.err == nil && r.polled(); {
		now := time.Now() // before Poll: a process may be stopped for long between two calls
		k, err := r.cq.Poll(b.polled[:])
		if err != nil {
			b.broken(r, err)
			return
		}
		for i := range b.polled[:k] {
			if err := b.complete(r, &b.polled[i], revoked); err != nil {
				b.broken(r, err)
				return
			}
		}
		b.post()
		switch {
		case k > 0:
			r.since = time.Now()
		case r.under > 0 && now.Sub(r.since) >= n.late:
			b.broken(r, n.stuck(r.under, r.qp, r.at))
		}
		if k < len(b.polled) {
			return
		}
	}
}

// complete takes a completion of a rail. The error says that the rail has failed.
func (b *bulk) complete(r *rail, c *rdma.Completion, revoked func(gen uint64)) error {
	p := &r.pieces[c.ID%railDepth]
	switch {
	case c.Status != rdma.Success && c.ID == r.receive():
		return r.flushed(c)
	case c.Status != rdma.Success || c.ID < railDepth && p.move == nil:
		op := rdma.Write
		if c.ID < railDepth && p.move != nil && (p.move.m.Read || p.bytes == 0) {
			op = rdma.Read
		}
		err := &rdma.StatusError{Status: c.Status, Op: op, Device: r.Name(), QP: c.QP, Vendor: c.Vendor}
		if c.ID < railDepth && p.move != nil && rdma.Fatal(err) {
			b.barred = append(b.barred, p.move.gen)
		}
		return err
	case c.ID >= railDepth: // the probe
		r.state = working
		r.under--
		return nil
	}
	if err := p.mr.release(); err != nil {
		return err
	}
	v, size := p.move, p.bytes
	*p = piece{}
	r.under--
	r.bytes -= size
	r.total += uint64(size)
	r.moved.Add(uint64(size))
	v.under--
	v.key.under--
	if b.forget(v.gen, v.key) {
		revoked(v.gen)
	}
	switch {
	case v.under > 0:
	case v.at == v.m.Local.Len() && v.reads == 0:
		b.end(v, true)
	case v.abandoned && v.reads == 0:
		b.end(v, false)
	}
	return nil
}
