package rma

import (
	"errors"
	"fmt"
	"sync"

	"tutti/mem"
	"tutti/p2p"
)

// Table lists the memory that a rank has exposed to peers through links that access it in this
// process. The zero Table is empty. Its methods may be called from any goroutine.
type Table struct {
	mu sync.RWMutex
	m  map[uint64]*Entry // by generation
}

// Entry is a range of memory that is or was exposed. An access holds mu for reading.
type Entry struct {
	mu     sync.RWMutex
	mem    []byte // nil once withdrawn
	region []byte // all of it
	id     uint64
	rights mem.Rights
	base   uint64
	n      uint64
	open   bool
}

// Expose adds the range of r that x describes.
func (t *Table) Expose(r *mem.Region, x *mem.Remote) error {
	if !r.Loc().Host() {
		return fmt.Errorf("memory at %s: %w", r.Loc(), errors.ErrUnsupported)
	}
	e := &Entry{mem: r.Slice(int(x.Base), int(x.Len)).Bytes(), region: r.Bytes(), id: x.ID, rights: x.Rights,
		base: x.Base, n: x.Len, open: true}
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.m == nil {
		t.m = map[uint64]*Entry{}
	}
	t.m[x.Generation] = e
	return nil
}

// Withdraw ends Expose. It waits for accesses under way, none of which takes longer than copying a
// chunk or a system call that does not block.
func (t *Table) Withdraw(x *mem.Remote) {
	t.mu.Lock()
	e := t.m[x.Generation]
	delete(t.m, x.Generation)
	t.mu.Unlock()
	if e != nil {
		e.mu.Lock()
		e.mem, e.open = nil, false
		e.mu.Unlock()
	}
}

// Find returns the entry of region id with this generation, nil if there is none.
func (t *Table) Find(id, generation uint64) *Entry {
	t.mu.RLock()
	defer t.mu.RUnlock()
	if e := t.m[generation]; e != nil && e.id == id {
		return e
	}
	return nil
}

// Readable returns the memory of region id if a range of it is exposed for reading, else nil.
func (t *Table) Readable(id uint64) []byte {
	t.mu.RLock()
	defer t.mu.RUnlock()
	for _, e := range t.m {
		if e.id == id && e.rights.Has(mem.Read) {
			return e.region
		}
	}
	return nil
}

// Enter begins an access to n bytes at off and returns them, or fails with ErrRevoked, ErrRights or
// ErrBounds. After success Leave must follow soon: Withdraw waits for it.
func (e *Entry) Enter(rights mem.Rights, off, n uint64) ([]byte, error) {
	e.mu.RLock()
	var err error
	switch {
	case !e.open:
		err = p2p.ErrRevoked
	case !e.rights.Has(rights):
		err = p2p.ErrRights
	case n > e.n || off > e.n-n || rights == mem.Signal && (e.base+off)%mem.WordSize != 0:
		err = p2p.ErrBounds
	default:
		return e.mem[off : off+n], nil
	}
	e.mu.RUnlock()
	return nil, err
}

// Leave ends an access.
func (e *Entry) Leave() { e.mu.RUnlock() }
