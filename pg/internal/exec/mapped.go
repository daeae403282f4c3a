package exec

import (
	"encoding/binary"
	"fmt"
	"unsafe"

	"tutti/collectives"
	"tutti/p2p"
)

// mapped is the state of a load-store plan: the peers' memory in this process, and the exposure of
// this rank's. It belongs to the running operation from exchange to close.
type mapped struct {
	exposure  *p2p.Exposure // nil: this rank's memory cannot be mapped
	begun     bool          // whether the running operation has begun the exposure
	peers     []peerMemory  // by slot
	loads     []load        // of the plan that runs
	mine, all []byte        // this rank's and all ranks' descriptors
}

// peerMemory holds the buffers of a peer in this process. in or out is nil if the plan does not
// load it.
type peerMemory struct {
	in, out unsafe.Pointer
	ticket  p2p.Ticket
	held    []*p2p.Mapping
}

// A descriptor tells the peers where this rank's buffers are, in descSize bytes, little-endian:
//
//	0 ok (1 byte): they can be mapped | 4 offset of the exposure's word (4) | 8 its region | 16 ticket
//	24 region of In | 32 offset in it | 40 region of Out | 48 offset in it | 56 zero
//
// A region is 0 if the peers do not need that buffer of this rank.
const descSize = 64

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

// exchange tells all ranks where this rank's buffers are, and maps the peers' buffers that its plan
// loads. It maps no others, because a rank that no peer waits for may have ended the operation
// before, and freed its memory. It returns false, at every rank alike, if any buffer that the plan
// loads cannot be mapped. It also marks the begin of the operation: when it returns, every rank has
// begun, and peers may load the buffers of the call until close.
func (r *Runner) exchange(elem int) (bool, error) {
	c, m, size := r.cur, &r.mapped, r.set.Size
	if len(m.all) != descSize*size {
		m.mine, m.all, m.peers = make([]byte, descSize), make([]byte, descSize*size), make([]peerMemory, size)
	}
	clear(m.mine)
	if m.exposure != nil {
		in, out := c.loaded(r.rank, elem)
		if r.describe(m.mine[24:40], c.In, in) && r.describe(m.mine[40:56], c.Out, out) {
			board, off := m.exposure.Place()
			m.mine[0] = 1
			binary.LittleEndian.PutUint32(m.mine[4:], uint32(off))
			binary.LittleEndian.PutUint64(m.mine[8:], board)
			binary.LittleEndian.PutUint64(m.mine[16:], m.exposure.Begin())
			m.begun = true
		}
	}
	if err := r.share(m.mine, m.all); err != nil {
		return false, err
	}
	for _, slot := range r.set.Active {
		if m.all[slot*descSize] == 0 {
			return false, nil
		}
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

// describe writes the region that n bytes at ptr are in, and their offset in it. It returns false
// if peers cannot map them.
func (r *Runner) describe(d []byte, ptr unsafe.Pointer, n int) bool {
	if n == 0 {
		return true
	}
	reg, off := r.cfg.Region(ptr, n)
	if reg == nil {
		return false
	}
	binary.LittleEndian.PutUint64(d, reg.ID)
	binary.LittleEndian.PutUint64(d[8:], uint64(off))
	return true
}

// locate maps the buffers of a peer that the plan loads.
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
	board, err := r.peerRegion(slot, binary.LittleEndian.Uint64(d[8:]))
	if err != nil {
		return err
	}
	at.held = append(at.held, board)
	off, ticket := int(binary.LittleEndian.Uint32(d[4:])), binary.LittleEndian.Uint64(d[16:])
	if at.ticket, err = p2p.NewTicket(board, off, ticket); err != nil {
		return &p2p.PeerError{Rank: r.ranks[slot], Err: err}
	}
	return nil
}

// load maps n bytes that the peer in slot described in d.
func (r *Runner) load(at *peerMemory, slot int, d []byte, n int) (unsafe.Pointer, error) {
	if n == 0 {
		return nil, nil
	}
	m, err := r.peerRegion(slot, binary.LittleEndian.Uint64(d))
	if err != nil {
		return nil, err
	}
	at.held = append(at.held, m)
	off := binary.LittleEndian.Uint64(d[8:])
	if size := uint64(len(m.Mem)); off > size || uint64(n) > size-off {
		return nil, &p2p.PeerError{Rank: r.ranks[slot],
			Err: fmt.Errorf("%w: a buffer of %d bytes at offset %d of a region of %d", p2p.ErrProtocol, n, off, size)}
	}
	return unsafe.Pointer(&m.Mem[off]), nil
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

// close ends the exposure of this rank's memory and releases that of the peers. Peers discard
// whatever they load from the call's buffers after close has returned.
func (m *mapped) close() {
	if m.begun {
		m.exposure.Withdraw()
		m.begun = false
	}
	for _, l := range m.loads {
		at := &m.peers[l.slot]
		for _, h := range at.held {
			h.Release()
		}
		*at = peerMemory{held: at.held[:0]}
	}
	m.loads = nil
}
