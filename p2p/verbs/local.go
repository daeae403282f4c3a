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

// local is a region of this rank whose life is known. It is registered once with each device that
// moves data from or to it, without rights for peers, until Deregister was called and no piece
// under way uses it. That is done beside the moves, since it may take long: until then, and if the
// device refuses it, each piece is registered for its time.
type local struct {
	region *mem.Region // keeps the memory reachable
	mem    mem.Memory
	from   uint64 // its first address
	mrs    map[*device]*localMR
	over   bool // it was deregistered
}

// localMR is the registration of a region with a device, which is retained.
type localMR struct {
	of     *local
	t      *Transport
	device *device
	mr     rdma.MR // nil: it is being registered, or was refused
	under  int     // pieces under way
}

// locals are the regions of a transport, in the order of their addresses. mu is a leaf.
type locals struct {
	mu   sync.Mutex
	list []*local
}

func (l *local) compare(o *local) int {
	return cmp.Or(cmp.Compare(l.from, o.from), cmp.Compare(l.mem.Len(), o.mem.Len()))
}

// Register implements p2p.Registrar.
func (t *Transport) Register(r *mem.Region) {
	if !r.Loc().Host() || r.Len() == 0 {
		return
	}
	l := &local{region: r, mem: r.Memory, from: addressOf(r.Bytes()), mrs: map[*device]*localMR{}}
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
	err := m.mr.Close()
	if m.device.removed() {
		err = nil // what was removed uses nothing
	}
	if err = errors.Join(err, m.device.release()); err != nil {
		return fmt.Errorf("rdma: a region of %d bytes: %w", m.of.mem.Len(), err)
	}
	return nil
}

// source returns what a piece on a device reaches b with, until release: the registration of the
// region that b is in, or one of its own.
func (t *Transport) source(d *device, b mem.Memory, access rdma.Access) (lent, error) {
	if m := t.registered(d, b); m != nil {
		return lent{m.mr, m}, nil
	}
	mr, err := d.Register(b, access)
	return lent{mr, nil}, err
}

// registered returns the registration of the region that b is in, for one piece more; nil if there
// is none yet. Of several regions that overlap only the last one before b is looked at.
func (t *Transport) registered(d *device, b mem.Memory) *localMR {
	at := addressOf(b.Bytes())
	t.locals.mu.Lock()
	list := t.locals.list
	i, _ := slices.BinarySearchFunc(list, at, func(l *local, at uint64) int {
		if l.from <= at {
			return -1
		}
		return 1
	})
	if i == 0 || at-list[i-1].from > uint64(list[i-1].mem.Len()-b.Len()) || b.Len() > list[i-1].mem.Len() {
		t.locals.mu.Unlock()
		return nil
	}
	l := list[i-1]
	m := l.mrs[d]
	if m != nil {
		defer t.locals.mu.Unlock()
		if m.mr == nil {
			return nil
		}
		m.under++
		return m
	}
	m = &localMR{of: l, t: t, device: d}
	l.mrs[d] = m
	t.locals.mu.Unlock()
	t.mu.Lock()
	defer t.mu.Unlock()
	if !t.closed {
		d.retain()
		t.wg.Go(func() { t.prepare(m) })
	}
	return nil
}

// prepare registers a region with a device.
func (t *Transport) prepare(m *localMR) {
	mr, err := m.device.Register(m.of.mem, rdma.LocalWrite)
	if err != nil {
		t.log.Info("rdma: a region is registered in pieces", "bytes", m.of.mem.Len(), "device", m.device.at,
			"reason", err)
		t.releases(m.device)
		return
	}
	var gone []*localMR
	t.locals.mu.Lock()
	m.mr = mr
	if m.of.over {
		gone = append(gone, m)
	}
	for d, o := range m.of.mrs { // a device that was removed comes back as another one
		if d.removed() && o.mr != nil && o.under == 0 && !m.of.over {
			delete(m.of.mrs, d)
			gone = append(gone, o)
		}
	}
	t.locals.mu.Unlock()
	if err := closeAll(gone); err != nil {
		t.log.Warn("rdma: memory stays registered", "reason", err)
	}
}

// lent is what a piece under way reaches its local memory with.
type lent struct {
	rdma.MR
	of *localMR // nil: it is the piece's own
}

// release ends the use by a piece.
func (l lent) release() error {
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
