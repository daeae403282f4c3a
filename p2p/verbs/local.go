package verbs

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"sync"

	"tutti/mem"
	"tutti/rdma"
)

// local is memory of this rank whose life is known: a region, or a device's memory of one move. It
// is registered once with each RDMA device that moves data from or to it, without rights for peers,
// until end was called and no piece under way uses it. That is done beside the moves, since it may
// take long. Until then, and if the RDMA device refuses it, each piece of host memory is registered
// for its time. Pieces of a device's memory wait, and end if it is refused.
type local struct {
	region *mem.Region // keeps the memory reachable; nil: it is that of a move
	mem    mem.Memory
	space  mem.Location // of its addresses: "" for the host's
	from   uint64       // its first address
	access rdma.Access
	mrs    map[*device]*localMR
	over   bool // end was called
}

// errPreparing says that memory is being registered. There is news when it is.
var errPreparing = errors.New("memory is being registered")

// localMR is the registration of a region with a device, which is retained.
type localMR struct {
	of     *local
	t      *Transport
	device *device
	mr     rdma.MR // nil: it is being registered, or was refused
	err    error   // why it was refused
	under  int     // pieces under way
}

// locals are the regions of a transport, in the order of their addresses. mu is a leaf.
type locals struct {
	mu   sync.Mutex
	list []*local
}

// newLocal describes m, which moves need access to.
func newLocal(m mem.Memory, access rdma.Access) *local {
	return &local{mem: m, space: space(m), from: rdma.Address(m), access: access, mrs: map[*device]*localMR{}}
}

// space returns what the addresses of m belong to.
func space(m mem.Memory) mem.Location {
	if m.Loc().Host() {
		return ""
	}
	return m.Loc()
}

func (l *local) compare(o *local) int {
	return cmp.Or(cmp.Compare(l.space, o.space), cmp.Compare(l.from, o.from), cmp.Compare(l.mem.Len(), o.mem.Len()))
}

// findLocked returns the region that m is in, nil if none is known. Of several regions that overlap
// only the last one before m is looked at.
func (t *locals) findLocked(m mem.Memory) *local {
	in, at := space(m), rdma.Address(m)
	i, _ := slices.BinarySearchFunc(t.list, at, func(l *local, at uint64) int {
		return cmp.Or(cmp.Compare(l.space, in), cmp.Compare(l.from, at), -1)
	})
	if i == 0 {
		return nil
	}
	l := t.list[i-1]
	if l.space != in || m.Len() > l.mem.Len() || at-l.from > uint64(l.mem.Len()-m.Len()) {
		return nil
	}
	return l
}

// Register implements p2p.Registrar.
func (t *Transport) Register(r *mem.Region) {
	if r.Len() == 0 {
		return
	}
	l := newLocal(r.Memory, rdma.LocalWrite)
	l.region = r
	t.locals.mu.Lock()
	defer t.locals.mu.Unlock()
	i, _ := slices.BinarySearchFunc(t.locals.list, l, (*local).compare)
	t.locals.list = slices.Insert(t.locals.list, i, l)
}

// Deregister implements p2p.Registrar. What pieces under way use is deregistered with the last one.
func (t *Transport) Deregister(r *mem.Region) error {
	t.locals.mu.Lock()
	i := slices.IndexFunc(t.locals.list, func(l *local) bool { return l.region == r })
	if i < 0 {
		t.locals.mu.Unlock()
		return nil
	}
	l := t.locals.list[i]
	t.locals.list = slices.Delete(t.locals.list, i, i+1)
	t.locals.mu.Unlock()
	return t.end(l)
}

// end ends the registrations of l, which is in no list.
func (t *Transport) end(l *local) error {
	t.locals.mu.Lock()
	idle := l.endLocked()
	t.locals.mu.Unlock()
	return closeAll(idle)
}

// endLocals deregisters all regions.
func (t *Transport) endLocals() error {
	t.locals.mu.Lock()
	var idle []*localMR
	for _, l := range t.locals.list {
		idle = append(idle, l.endLocked()...)
	}
	t.locals.list = nil
	t.locals.mu.Unlock()
	return closeAll(idle)
}

// endLocked returns the registrations that nothing uses.
func (l *local) endLocked() (idle []*localMR) {
	l.over = true
	for _, m := range l.mrs {
		if m.mr != nil && m.under == 0 {
			idle = append(idle, m)
		}
	}
	return idle
}

func closeAll(list []*localMR) (err error) {
	for _, m := range list {
		err = errors.Join(err, m.close())
	}
	return err
}

// close deregisters the memory.
func (m *localMR) close() error {
	err := m.device.deregister(m.mr)
	if m.device.removed() {
		err = nil // what was removed uses nothing
	}
	if err = errors.Join(err, m.device.release()); err != nil {
		return fmt.Errorf("rdma: %d bytes at %s: %w", m.of.mem.Len(), m.of.mem.Loc(), err)
	}
	return nil
}

// source returns what the next piece of a move, b, is reached with on a device, until release: the
// registration of the region that b is in, or of the move's memory, or one of its own. The error
// wraps errPreparing if that comes later.
func (t *Transport) source(d *device, v *move, b mem.Memory) (lent, error) {
	access := rdma.Access(0)
	if v.m.Read {
		access = rdma.LocalWrite
	}
	host := b.Loc().Host()
	if !host {
		if err := d.refuses(b.Loc()); err != nil {
			return lent{}, err
		}
	}
	t.locals.mu.Lock()
	l := t.locals.findLocked(b)
	if l == nil && !host {
		if v.own == nil {
			v.own = newLocal(v.m.Local, access)
		}
		l = v.own
	}
	if l != nil {
		m := l.mrs[d]
		switch {
		case m == nil:
			m = &localMR{of: l, t: t, device: d}
			l.mrs[d] = m
			defer t.begin(m)
		case m.mr != nil:
			m.under++
			t.locals.mu.Unlock()
			return lent{m.mr, m}, nil
		case m.err != nil && !host:
			t.locals.mu.Unlock()
			return lent{}, m.err
		}
	}
	t.locals.mu.Unlock()
	if !host {
		return lent{}, errPreparing
	}
	mr, err := d.Register(b, access)
	return lent{mr, nil}, err
}

// begin begins to register memory with a device.
func (t *Transport) begin(m *localMR) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if !t.closed {
		m.device.retain()
		t.wg.Go(func() { t.prepare(m) })
	}
}

// prepare registers memory with a device.
func (t *Transport) prepare(m *localMR) {
	of := m.of
	mr, err := t.register(m.device, of.mem, of.access)
	var gone []*localMR
	t.locals.mu.Lock()
	if m.mr, m.err = mr, err; err == nil && of.over {
		gone = append(gone, m)
	}
	for d, o := range of.mrs { // a device that was removed comes back as another one
		if err == nil && d.removed() && o.mr != nil && o.under == 0 && !of.over {
			delete(of.mrs, d)
			gone = append(gone, o)
		}
	}
	over := of.over
	t.locals.mu.Unlock()
	if err != nil {
		if !over { // else it may have been freed
			t.log.Info("rdma: memory is not registered as a whole", "bytes", of.mem.Len(), "location", of.mem.Loc(),
				"device", m.device.at, "reason", err)
			m.device.refuse(of.mem.Loc(), err)
		}
		t.releases(m.device)
	}
	if err := closeAll(gone); err != nil {
		t.log.Warn("rdma: memory stays registered", "reason", err)
	}
	if of.space != "" {
		t.tell()
	}
}

// lent is what a piece under way reaches its local memory with.
type lent struct {
	rdma.MR
	of *localMR // nil: it is the piece's own
}

// release ends the use by a piece.
func (l lent) release() error {
	if l.MR == nil {
		return nil
	}
	if l.of == nil {
		return l.Close()
	}
	regions := &l.of.t.locals
	regions.mu.Lock()
	l.of.under--
	last := l.of.under == 0 && l.of.of.over
	regions.mu.Unlock()
	if last {
		return l.of.close()
	}
	return nil
}
