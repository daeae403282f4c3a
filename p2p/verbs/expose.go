package verbs

import (
	"sync"

	"tutti/mem"
	"tutti/rdma"
)

// exposure is exposed memory of this rank, which peers may ask a key for. It is registered, exactly
// its bytes with exactly the rights, when a peer asks first. Withdraw deregisters it. A request
// with the key fails then, and the lane that it was on. So each peer that has the key is told,
// and the key stands for no other memory until the peer has given it up, or its lane has ended.
type exposure struct {
	generation uint64
	mem        mem.Memory
	region     uint64
	rights     mem.Rights

	mu      sync.Mutex // held while the memory is registered and deregistered; before link.mu
	over    bool
	device  *device // retained while mr is open
	mr      rdma.MR
	holders map[*lane]*link // that have the key
}

// exposures are the exposures of a transport. mu is a leaf.
type exposures struct {
	mu sync.Mutex
	m  map[uint64]*exposure // by generation
}

func (t *exposures) add(e *exposure) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.m == nil {
		t.m = map[uint64]*exposure{}
	}
	t.m[e.generation] = e
}

// find returns the exposure of a region with this generation, nil if there is none.
func (t *exposures) find(region, generation uint64) *exposure {
	t.mu.Lock()
	defer t.mu.Unlock()
	if e := t.m[generation]; e != nil && e.region == region {
		return e
	}
	return nil
}

// get returns an exposure, nil if there is none.
func (t *exposures) get(generation uint64) *exposure {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.m[generation]
}

func (t *exposures) remove(generation uint64) {
	t.mu.Lock()
	defer t.mu.Unlock()
	delete(t.m, generation)
}

// all returns all of them.
func (t *exposures) all() (list []*exposure) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, e := range t.m {
		list = append(list, e)
	}
	return list
}

// access returns the rights that a device understands.
func access(r mem.Rights) (a rdma.Access) {
	if r.Has(mem.Read) {
		a |= rdma.RemoteRead
	}
	if r.Has(mem.Write) {
		a |= rdma.RemoteWrite | rdma.LocalWrite
	}
	return a
}

// grant answers the peer of lane n, which has asked for the key. The memory is registered first if
// it is not yet, which may take long.
func (e *exposure) grant(l *link, n *lane) {
	e.mu.Lock()
	defer e.mu.Unlock()
	err := e.register(n.device)
	if err != nil {
		l.t.log.Warn("rdma: puts and gets go in frames: memory cannot be registered", "bytes", e.mem.Len(),
			"reason", err)
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	switch {
	case l.lane != n:
	case e.mr == nil:
		l.answerLocked(n, e.generation, nil)
	default:
		e.holders[n], n.granted[e.generation] = l, e
		l.answerLocked(n, e.generation, e)
	}
}

// register registers the memory with d, unless it is, or was withdrawn. With mu.
func (e *exposure) register(d *device) error {
	if e.mr != nil && e.device != d { // which was removed
		if err := e.deregister(); err != nil {
			return err
		}
	}
	rights := access(e.rights)
	if e.over || e.mr != nil || rights == 0 || e.mem.Len() == 0 {
		return nil
	}
	mr, err := d.register(e.mem, rights)
	if err != nil {
		return err
	}
	d.retain()
	e.device, e.mr, e.holders = d, mr, map[*lane]*link{}
	return nil
}

// deregister ends all access by keys. With mu.
func (e *exposure) deregister() error {
	if e.mr == nil {
		return nil
	}
	key := e.mr.RemoteKey()
	for n, l := range e.holders {
		l.revoke(n, e.generation, key)
	}
	clear(e.holders)
	if err := e.mr.Close(); err != nil && !e.device.gone.Load() {
		return err
	}
	e.mr = nil
	return e.device.release()
}

// end withdraws the memory. After an error a peer may still access it, and end may be called again.
func (e *exposure) end() error {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.over = true
	return e.deregister()
}

// leave says that lane n has ended.
func (e *exposure) leave(n *lane) {
	e.mu.Lock()
	defer e.mu.Unlock()
	delete(e.holders, n)
}
