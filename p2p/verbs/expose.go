package verbs

import (
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"syscall"

	"tutti/mem"
	"tutti/rdma"
)

// exposure is exposed memory of this rank, which peers may ask keys for. It is registered, exactly
// its bytes with exactly the rights, with each device of a lane whose peer asks, when the first
// one does. Withdraw deregisters it. A request with a key fails then, and the lane that it was on.
// So each peer that has keys is told, and they stand for no other memory until the peer has given
// them up, or its lane has ended.
type exposure struct {
	generation uint64
	mem        mem.Memory
	region     uint64
	rights     mem.Rights

	over   atomic.Bool // an ending has begun
	ending *ending     // under way; nil: none. With exposures.mu

	mu      sync.Mutex          // held while the memory is registered and deregistered; before link.mu
	full    *device             // had only keys that peers may still use, as long as
	freed   uint64              // its Withheld.Freed is this
	mrs     map[*device]rdma.MR // the device is retained while its region is open
	holders map[*lane]*link     // that have the keys of their devices
}

// ending is a goroutine that ends an exposure.
type ending struct {
	brief bool          // it calls no device
	done  chan struct{} // closed at its end
	err   error         // set before
}

// held is a key that a peer may use.
type held struct {
	device *device
	key    uint32
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

// end begins to end e, unless that is under way, and removes it then. ended is called in between.
func (t *exposures) end(e *exposure, ended func()) *ending {
	t.mu.Lock()
	defer t.mu.Unlock()
	if e.ending != nil {
		return e.ending
	}
	w := &ending{done: make(chan struct{})}
	e.ending = w
	e.over.Store(true) // what is being registered now is the last
	w.brief = e.unregistered()
	go func() {
		w.err = e.end()
		ended()
		t.mu.Lock()
		if e.ending = nil; w.err == nil {
			delete(t.m, e.generation)
		}
		t.mu.Unlock()
		close(w.done)
	}()
	return w
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

// keys returns the keys of the registered memory for the rails of lane n, nil if the peer may not
// read what it would have to. A device makes visible what it receives in its order: what it writes
// to the host's memory comes before what follows in a ring that it writes as well. With several
// devices, now or after a change of lanes, a read is needed, which takes the way of the data: of
// the host's memory, or of the same GPU's. With mu.
func (e *exposure) keys(t *Transport, n *lane, several bool) ([]railKey, error) {
	keys := make([]railKey, len(n.bulk.rails))
	for i, r := range n.bulk.rails {
		if r.device == nil {
			continue
		}
		k := &keys[i]
		k.key = e.mrs[r.device].RemoteKey()
		switch host := e.mem.Loc().Host(); {
		case !host && !e.rights.Has(mem.Read):
			return nil, nil
		case !host:
			k.reads, k.readKey = rdma.Address(e.mem), k.key
		case several:
			address, mr, err := r.device.source.register(t, r.device, rdma.RemoteRead)
			if err != nil {
				return nil, err
			}
			k.reads, k.readKey = address, mr.RemoteKey()
		}
	}
	return keys, nil
}

// grant answers the peer of lane n, which has asked for the keys. The memory is registered first
// where it is not yet, which may take long.
func (e *exposure) grant(l *link, n *lane) {
	l.t.mu.Lock()
	several := len(l.t.devices) > 1
	l.t.mu.Unlock()
	e.mu.Lock()
	defer e.mu.Unlock()
	ok, err := e.register(l.t, n.devices)
	var keys []railKey
	if ok {
		keys, err = e.keys(l.t, n, several)
		ok = keys != nil
	}
	if err != nil && err != errFull {
		l.t.log.Warn("rdma: puts and gets go in frames: memory cannot be registered", "bytes", e.mem.Len(),
			"reason", err)
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	switch {
	case !l.has(n):
	case !ok:
		l.answerLocked(n, e.generation, nil, nil)
		if errors.Is(err, syscall.EAGAIN) {
			l.out[len(l.out)-1].h.Count = askAgain
		}
	default:
		if e.holders == nil {
			e.holders = map[*lane]*link{}
		}
		e.holders[n], n.granted[e.generation] = l, e
		l.answerLocked(n, e.generation, e, keys)
	}
}

// errFull is why memory is not registered while its device has only keys that peers may still use.
var errFull = fmt.Errorf("no key has become free: %w", syscall.EAGAIN)

// register registers the memory with devices, where it is not yet. False: they have it not, because
// it was withdrawn, or nothing may be done with it. With mu.
func (e *exposure) register(t *Transport, devices []*device) (bool, error) {
	for d := range e.mrs {
		if d.removed() { // it does not come back as this one
			if err := e.deregister(d); err != nil {
				return false, err
			}
		}
	}
	rights := access(e.rights)
	if rights == 0 || e.mem.Len() == 0 {
		return false, nil
	}
	for _, d := range devices {
		if e.over.Load() {
			return false, nil
		}
		if e.mrs[d] != nil {
			continue
		}
		freed := d.keys.Freed()
		if e.full == d && e.freed == freed {
			return false, errFull
		}
		mr, err := t.registerKey(d, e.mem, rights)
		if errors.Is(err, syscall.EAGAIN) && d.keys.Len() > 0 {
			e.full, e.freed = d, freed
		}
		if err != nil {
			return false, err
		}
		d.retain()
		if e.mrs == nil {
			e.mrs = map[*device]rdma.MR{}
		}
		e.mrs[d] = mr
	}
	return true, nil
}

// deregister ends all access by the key of d. With mu.
func (e *exposure) deregister(d *device) error {
	if err := d.deregister(e.mrs[d]); err != nil && !d.removed() {
		return err
	}
	delete(e.mrs, d)
	return d.release()
}

// revoke ends all access by keys. With mu.
func (e *exposure) revoke() error {
	for n, l := range e.holders {
		var keys []held
		for _, d := range n.devices {
			if mr := e.mrs[d]; mr != nil {
				keys = append(keys, held{d, mr.RemoteKey()})
			}
		}
		l.revoke(n, e.generation, keys)
	}
	clear(e.holders)
	var err error
	for d := range e.mrs {
		err = errors.Join(err, e.deregister(d))
	}
	return err
}

// end withdraws the memory. After an error a peer may still access it, and end may be called again.
// unregistered reports that no device has the memory, or gets it if over is set.
func (e *exposure) unregistered() bool {
	if !e.mu.TryLock() {
		return false // it is being registered, or deregistered
	}
	defer e.mu.Unlock()
	return len(e.mrs) == 0
}

func (e *exposure) end() error {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.revoke()
}

// leave says that lane n has ended.
func (e *exposure) leave(n *lane) {
	e.mu.Lock()
	defer e.mu.Unlock()
	delete(e.holders, n)
}
