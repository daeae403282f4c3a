package exec

import (
	"cmp"
	"encoding/binary"
	"errors"
	"fmt"
	"unsafe"

	"tutti/collectives"
	"tutti/kernels"
	"tutti/p2p"
)

// mapped is the state of a load-store plan: the peers' memory, mapped or to be read from their
// processes, and the exposure of this rank's. It belongs to the running operation from exchange to
// close.
type mapped struct {
	exposure  *p2p.Exposure // nil: peers cannot load this rank's memory
	begun     bool          // whether the running operation has begun the exposure
	peers     []peerMemory  // by slot
	boards    []board       // by slot
	loads     []load        // of the plan that runs
	mine, all []byte        // this rank's and all ranks' descriptors
	shown     [2]shown      // In and Out of this rank
}

// shown is plain memory of this rank: whether peers can read it. It stays known while calls have
// the same buffer.
type shown struct {
	ptr uintptr
	n   int
	can bool
}

// peerMemory holds the buffers of a peer. in or out is zero if the plan does not load it.
type peerMemory struct {
	in, out source
	ticket  p2p.Ticket
	held    []*p2p.Mapping
	reader  p2p.ProcessReader // of sources that are not mapped
}

// A board is the memory with the tickets of a peer. It stays mapped until the view ends, because
// each call of the peer has its ticket there.
type board struct {
	id      uint64
	mapping *p2p.Mapping // nil: none yet
}

// source is a buffer of a peer: mapped at ptr, or else at an address of the peer's process.
type source struct {
	ptr unsafe.Pointer
	far uint64
}

// A descriptor tells the peers where this rank's buffers are, in descSize bytes, little-endian:
//
//	0 access (1 byte) | 1 offers (1) | 2 pause (1) | 3 device (1)
//	4 offset of the exposure's word (4) | 8 its region | 16 ticket
//	24 region of In | 32 offset in it | 40 region of Out | 48 offset in it
//	56 sequence number of the last call that was timed (4) | 60 its time (4)
//
// A region is 0 if the peers do not need that buffer of this rank; or if it is plain memory, and
// then the offset is its address. The ranks load if all memory is mapped; or if none is closed, all
// can read plain memory of all others, and the lowest of them proposes that for this call. In the
// memory of a device, a region is an allocation, by its rank's number: see direct.
const descSize = 64

// Access to the buffers of a rank.
const (
	accessNone = iota
	accessMapped
	accessRead   // some are plain memory
	accessDevice // all that are loaded are in the memory of a device
)

// What a rank offers for plain memory: it can read that of its peers; it tries which way is
// fastest; and, shifted by wayBits, the way that it proposes.
const (
	canRead = 1 << iota
	tries
	wayBits = iota
)

// loaded returns how many bytes of In and Out of slot its peers load in a load-store plan of c.
func (c *Call) loaded(slot, elem int) (in, out int) {
	l := c.Kind.Layout()
	switch {
	case l.In == collectives.Own:
		return c.Counts[slot] * elem, 0
	case l.In == collectives.Packed, l.InAtRoot && slot != c.Root:
		return 0, 0
	case c.Kind == collectives.AllReduce: // a rank that has folded a part has its result
		out = c.Count * elem
	}
	return c.elements(l.In, c.Slots) * elem, out
}

// An outcome is what the last exchange about calls of one shape has shown. It is the same at all
// ranks, but for pause.
//
// Most programs never register memory. If the buffers of a call were sent, those of the next calls
// of the same shape are sent without an exchange: as many as the lowest rank has said, one, three,
// seven and so on up to mostSent while no exchange has another outcome.
type outcome struct {
	until uint64 // calls before this operation are sent
	pause byte   // what this rank would say
	past  bool   // they are sent past the caches
	trial *trial // of which way is fastest, in which all ranks took part; or nil
}

// mostSent is the largest number of calls that are sent without an exchange. Memory that is
// registered meanwhile is not loaded before they are over.
const mostSent = 63

// outcomes are those of the shapes that were called since Open.
type outcomes struct {
	m     map[planKey]*outcome
	last  *outcome // most recent: usually the next
	lastK planKey
}

// of returns the outcome of a shape.
func (o *outcomes) of(key planKey) *outcome {
	if o.last != nil && key == o.lastK {
		return o.last
	}
	at := o.m[key]
	if at == nil {
		if at = (&outcome{}); o.m == nil || len(o.m) >= maxPlans { // at all ranks in the same operation
			o.m = map[planKey]*outcome{}
		}
		o.m[key] = at
	}
	o.last, o.lastK = at, key
	return at
}

// loads reports whether the current call loads from the peers' memory, at every rank alike. If so,
// the memory is there: see exchange.
func (r *Runner) loads(elem int) (bool, error) {
	at := r.outcomes.of(planKey{kind: r.cur.Kind, root: r.cur.Root, elem: elem, count: r.cur.Count})
	load, err := false, error(nil)
	switch {
	case r.seq >= at.until:
		load, err = r.exchange(elem, at)
	case at.trial != nil:
		at.trial.count()
	}
	if !load && at.past {
		r.coll.Bypass()
	}
	return load, err
}

// exchange tells all ranks where this rank's buffers are, and maps the peers' buffers that its plan
// loads. It maps no others, because a rank that no peer waits for may have ended the operation
// before, and freed its memory. It returns false, at every rank alike, if any buffer that the plan
// loads cannot be mapped. It also marks the begin of the operation: when it returns, every rank has
// begun, and peers may load the buffers of the call until close.
func (r *Runner) exchange(elem int, at *outcome) (bool, error) {
	c, m, size := r.cur, &r.mapped, r.set.Size
	if len(m.all) != descSize*size {
		m.forget()
		m.mine, m.all = make([]byte, descSize), make([]byte, descSize*size)
		m.peers, m.boards = make([]peerMemory, size), make([]board, size)
	}
	clear(m.mine)
	m.mine[2] = at.pause
	d := r.onDevice()
	r.direct.forgetMany(r.rank)
	if m.exposure != nil {
		in, out := c.loaded(r.rank, elem)
		var access, offers byte
		switch {
		case d != nil:
			access = r.offer(d, m.mine, in, out)
		case r.set.Caps.Mapped:
			access = max(r.describe(m.mine[24:40], c.In, in), r.describe(m.mine[40:56], c.Out, out))
			offers = r.offers(elem, in, out)
		}
		if offers != 0 || access == accessMapped || access == accessDevice {
			board, off := m.exposure.Place()
			m.mine[0], m.mine[1] = access, offers
			binary.LittleEndian.PutUint32(m.mine[4:], uint32(off))
			binary.LittleEndian.PutUint64(m.mine[8:], board)
			binary.LittleEndian.PutUint64(m.mine[16:], m.exposure.Begin())
			m.begun = true
			r.trials.report(m.mine[56:])
			if at.trial != nil {
				m.mine[2] = byte(min(int(m.mine[2]), r.trials.room()))
			}
		}
	}
	if err := r.share(m.mine, m.all); err != nil {
		return false, err
	}
	all := agree(m.all, r.set.Active)
	direct := all.direct
	if direct {
		var err error
		if direct, err = r.introduce(d); err != nil {
			return false, err
		}
	} else if d != nil {
		r.direct.why = cmp.Or(r.direct.why, errMixed)
	}
	plain, runs := !all.mapped && !direct, all.way()
	at.past, at.trial = plain && runs == past, nil
	if plain && all.tried {
		at.trial = r.trials.current
		r.trials.learn(m.all, r.set.Active)
		r.trials.begin(r.tok.Seq, all.proposed, runs)
	} else {
		r.trials.current = nil
	}
	if plain && runs != single {
		at.until, at.pause = r.seq+1+uint64(all.pause), min(2*at.pause+1, mostSent)
		return false, nil
	}
	at.pause = 0
	if direct {
		r.direct.call, r.direct.why = d, nil
	}
	prog, err := r.program(c.Kind, collectives.LoadStore, elem, c.Count)
	if err != nil {
		return false, err
	}
	m.loads = prog.loads
	for _, l := range m.loads {
		if err := r.locate(l, elem); err != nil {
			return false, err
		}
	}
	return true, nil
}

// agreed is what the descriptors of a call say, at every rank alike.
type agreed struct {
	mapped   bool // all memory is mapped,
	direct   bool // or in that of devices
	readable bool // all ranks can read plain memory of all others
	tried    bool // all ranks try which way is fastest to copy it
	proposed way  // by the lowest rank
	pause    byte // of the lowest rank
}

func agree(descs []byte, active []int) agreed {
	first := descs[active[0]*descSize:]
	a := agreed{mapped: true, direct: true, readable: true, tried: true,
		proposed: way(first[1] >> wayBits % byte(ways)), pause: first[2]}
	for _, slot := range active {
		d := descs[slot*descSize:]
		a.mapped = a.mapped && d[0] == accessMapped
		a.direct = a.direct && d[0] == accessDevice
		a.readable = a.readable && (d[0] == accessMapped || d[0] == accessRead) && d[1]&canRead != 0
		a.tried = a.tried && d[1]&tries != 0
	}
	return a
}

// way returns the way that a call on plain memory runs.
func (a agreed) way() way {
	if a.proposed == single && !a.readable {
		return rings
	}
	return a.proposed
}

// describe writes where n bytes at ptr are, and returns the access to them.
func (r *Runner) describe(d []byte, ptr unsafe.Pointer, n int) (access byte) {
	if n == 0 {
		return accessMapped
	}
	reg, off := r.cfg.Region(ptr, n)
	if reg == nil {
		binary.LittleEndian.PutUint64(d[8:], uint64(uintptr(ptr)))
		return accessRead
	}
	binary.LittleEndian.PutUint64(d, reg.ID)
	binary.LittleEndian.PutUint64(d[8:], uint64(off))
	return accessMapped
}

// offers returns whether this rank can read plain memory of all others in the current call, and
// they the in and out bytes of its buffers; and the way that it proposes.
func (r *Runner) offers(elem, in, out int) (bits byte) {
	c, n := r.cur, len(r.set.Active)
	size := c.Count * elem // what a rank gets from another
	switch c.Kind {
	case collectives.AllReduce:
		size /= n
	case collectives.AllGatherV:
		size = c.elements(collectives.Packed, n) * elem / n
	}
	can := [ways]bool{rings: true, past: size >= triedFrom && r.bypasses(), single: r.reads(size) && r.shows(in, out)}
	if can[single] {
		bits = canRead
	}
	if can[single] || can[past] {
		w := r.trials.propose(trialCall{c.Kind, c.DType, c.Op, size}, can)
		if r.trials.forced = can[single] && r.cfg.Single == SingleOn; r.trials.forced {
			w = single
		}
		bits |= tries | byte(w)<<wayBits
	}
	return bits
}

// reads reports whether this rank may read size bytes of plain memory of each other one at once.
func (r *Runner) reads(size int) bool {
	return r.cfg.Single.reads(size) && r.peers(func(slot int) bool { return r.coll.ProcessReader(slot) != nil })
}

// shows reports whether the peers can read in bytes of In and out of Out, as far as that is plain
// memory that was described. This rank must be able to read theirs.
func (r *Runner) shows(in, out int) bool {
	m, c := &r.mapped, r.cur
	var reader p2p.ProcessReader
	for _, slot := range r.set.Active {
		if slot != r.rank {
			reader = r.coll.ProcessReader(slot)
			break
		}
	}
	for i, b := range [...]struct {
		ptr  unsafe.Pointer
		n    int
		desc []byte
	}{{c.In, in, m.mine[24:]}, {c.Out, out, m.mine[40:]}} {
		if b.n == 0 || binary.LittleEndian.Uint64(b.desc) != 0 || reader == nil {
			continue
		}
		if at := &m.shown[i]; at.ptr != uintptr(b.ptr) || at.n != b.n {
			*at = shown{uintptr(b.ptr), b.n, reader.Readable(unsafe.Slice((*byte)(b.ptr), b.n))}
		}
		if !m.shown[i].can {
			return false
		}
	}
	return true
}

// bypasses reports whether this rank's links can bypass the caches, as far as they are up.
func (r *Runner) bypasses() bool {
	return kernels.NonTemporal() && r.peers(func(slot int) bool { return r.coll.Bypasses(slot) })
}

// peers reports whether f is true of all other ranks.
func (r *Runner) peers(f func(slot int) bool) bool {
	for _, slot := range r.set.Active {
		if slot != r.rank && !f(slot) {
			return false
		}
	}
	return true
}

// locate finds the buffers of a peer that the plan loads, and maps them unless they are plain.
func (r *Runner) locate(l load, elem int) (err error) {
	slot := l.slot
	d, at := r.mapped.all[slot*descSize:(slot+1)*descSize], &r.mapped.peers[slot]
	in, out := r.cur.loaded(slot, elem)
	if !l.in {
		in = 0
	}
	if !l.out {
		out = 0
	}
	if at.in, err = r.load(at, slot, d[24:40], in); err != nil {
		return err
	}
	if at.out, err = r.load(at, slot, d[40:56], out); err != nil {
		return err
	}
	b := &r.mapped.boards[slot]
	if id := binary.LittleEndian.Uint64(d[8:]); b.mapping == nil || b.id != id {
		m, err := r.peerRegion(slot, id)
		if err != nil {
			return err
		}
		b.forget()
		*b = board{id, m}
	}
	off, ticket := int(binary.LittleEndian.Uint32(d[4:])), binary.LittleEndian.Uint64(d[16:])
	if at.ticket, err = p2p.NewTicket(b.mapping, off, ticket); err != nil {
		return &p2p.PeerError{Rank: r.ranks[slot], Err: err}
	}
	return nil
}

// load finds n bytes that the peer in slot described in d.
func (r *Runner) load(at *peerMemory, slot int, d []byte, n int) (source, error) {
	if n == 0 {
		return source{}, nil
	}
	id, off := binary.LittleEndian.Uint64(d), binary.LittleEndian.Uint64(d[8:])
	if r.direct.call != nil {
		return r.place(slot, id, off, n)
	}
	if id == 0 {
		return r.plain(at, slot, off, n)
	}
	m, err := r.peerRegion(slot, id)
	if err != nil {
		return source{}, err
	}
	at.held = append(at.held, m)
	if size := uint64(len(m.Mem)); off > size || uint64(n) > size-off {
		return source{}, &p2p.PeerError{Rank: r.ranks[slot],
			Err: fmt.Errorf("%w: a buffer of %d bytes at offset %d of a region of %d", p2p.ErrProtocol, n, off, size)}
	}
	return source{ptr: unsafe.Pointer(&m.Mem[off])}, nil
}

// plain is load for n bytes at address addr of the peer's process.
func (r *Runner) plain(at *peerMemory, slot int, addr uint64, n int) (source, error) {
	if addr == 0 || addr+uint64(n) < addr || r.mapped.mine[1]&canRead == 0 { // this rank would not have agreed
		return source{}, &p2p.PeerError{Rank: r.ranks[slot],
			Err: fmt.Errorf("%w: plain memory of %d bytes at %#x", p2p.ErrProtocol, n, addr)}
	}
	if at.reader == nil {
		at.reader = r.coll.ProcessReader(slot)
	}
	if at.reader == nil { // its link has failed since the exchange
		r.sending = slot
		return source{}, r.coll.WaitLeft(r.wait, slot, r.tok.Seq)
	}
	return source{far: addr}, nil
}

// far returns the address of ref in its peer's process, and what reads there; nil if ref is mapped,
// or of this rank.
func (r *Runner) far(ref *collectives.Ref) (addr uint64, reader p2p.ProcessReader) {
	switch ref.Buf {
	case collectives.PeerIn:
		at := &r.mapped.peers[ref.Peer]
		if addr = at.in.far; addr != 0 {
			return addr + uint64(int(ref.Part)*r.in.stride+ref.Off), at.reader
		}
	case collectives.PeerOut:
		at := &r.mapped.peers[ref.Peer]
		if addr = at.out.far; addr != 0 {
			return addr + uint64(int(ref.Part)*r.out.stride+ref.Off), at.reader
		}
	}
	return 0, nil
}

// unread turns the error of a read from slot into the operation's. If the peer has left the
// operation or ended, it waits until the cause is known. With the lock.
func (r *Runner) unread(slot int, err error) error {
	if !r.mapped.peers[slot].ticket.Valid() || errors.Is(err, p2p.ErrPeerGone) {
		r.sending = slot
		return r.coll.WaitLeft(r.wait, slot, r.tok.Seq)
	}
	return &p2p.PeerError{Rank: r.ranks[slot], Err: err}
}

// copyFar copies n bytes at address addr of the process of the peer in slot to dst.
func (r *Runner) copyFar(dst unsafe.Pointer, slot int, addr uint64, reader p2p.ProcessReader, n int) error {
	var refused error
	r.proxy.Leave()
	err := r.pieces(n, turnEvery, func(at, n int) {
		if refused == nil {
			refused = reader.ReadProcess(unsafe.Slice((*byte)(unsafe.Add(dst, at)), n), addr+uint64(at))
		}
	})
	r.proxy.Return()
	if refused != nil {
		return r.unread(slot, refused)
	}
	return err
}

// foldFar runs ReduceInto step s, of which some sources are plain memory of peers. It reads a piece
// of each into memory that stays in this processor's cache, and folds the pieces.
func (r *Runner) foldFar(f fold, s *collectives.Step) (err error) {
	apart := 0
	for j := range s.Srcs {
		if _, reader := r.far(&s.Srcs[j]); reader != nil {
			apart++
		}
	}
	piece := stagedBytes
	for piece*apart > stagedBytes && piece > stagedLeast {
		piece /= 2
	}
	r.staged = r.control(r.staged, apart*piece)
	var refused error
	from := 0
	r.proxy.Leave()
	err = r.pieces(s.Dst.Len, piece, func(at, n int) {
		room := r.staged.Bytes()
		r.ptrs = r.ptrs[:0]
		for j := range s.Srcs {
			addr, reader := r.far(&s.Srcs[j])
			switch {
			case refused != nil:
				return
			case reader == nil:
				r.ptrs = append(r.ptrs, unsafe.Add(r.at(&s.Srcs[j]), at))
				continue
			}
			refused, from = reader.ReadProcess(room[:n], addr+uint64(at)), int(s.Srcs[j].Peer)
			r.ptrs = append(r.ptrs, unsafe.Pointer(unsafe.SliceData(room)))
			room = room[piece:]
		}
		if refused == nil {
			f.do(r.ptrs, at, n)
		}
	})
	r.proxy.Return()
	if refused != nil {
		return r.unread(from, refused)
	}
	return err
}

// verify checks that the peers whose memory was loaded had not left the operation before. If one
// had, it waits until the cause is known, and returns it.
func (r *Runner) verify() error {
	for _, l := range r.mapped.loads {
		if !r.mapped.peers[l.slot].ticket.Valid() {
			r.sending = l.slot
			return r.coll.WaitLeft(r.wait, l.slot, r.tok.Seq)
		}
	}
	return nil
}

// peerRegion maps a region of the rank in slot, which has to answer if it is the first time.
func (r *Runner) peerRegion(slot int, id uint64) (*p2p.Mapping, error) {
	r.sending = slot
	m, err := r.coll.Map(r.wait, slot, id)
	if err == nil {
		r.sending = -1
	}
	return m, err
}

func (b *board) forget() {
	if b.mapping != nil {
		b.mapping.Release()
	}
	*b = board{}
}

// forget ends the view.
func (m *mapped) forget() {
	for i := range m.boards {
		m.boards[i].forget()
	}
}

// close releases the peers' memory. See Runner.leave.
func (m *mapped) close() {
	m.begun = false
	for _, l := range m.loads {
		at := &m.peers[l.slot]
		for _, h := range at.held {
			h.Release()
		}
		*at = peerMemory{held: at.held[:0]}
	}
	m.loads = nil
}
