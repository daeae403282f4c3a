package p2p

import (
	"errors"
	"sync/atomic"

	"tutti/mem"
)

// Location says where memory is: see package mem.
type Location = mem.Location

// Anywhere is the wildcard location. Control, sync and warm-up memory always has it.
const Anywhere = mem.Anywhere

// Region is memory that a transport knows: see package mem.
type Region = mem.Region

// Mapping is a peer's region in this process, for loads only. All users of the region share it, and
// it counts them: the memory is unmapped when its link has retired it and the last user has
// released it.
type Mapping struct {
	Mem   []byte
	users atomic.Int64 // plus one until Retire; below 1: unmapped
	unmap func([]byte)
}

// NewMapping describes mem, which unmap (may be nil) unmaps. For links, which keep the mapping and
// return it by Acquire.
func NewMapping(mem []byte, unmap func([]byte)) *Mapping {
	m := &Mapping{Mem: mem, unmap: unmap}
	m.users.Store(1)
	return m
}

// Acquire counts one more user. It must not be called after Retire.
func (m *Mapping) Acquire() *Mapping {
	m.users.Add(1)
	return m
}

// Release ends a use that Map or Acquire began. The user must not access Mem afterwards.
func (m *Mapping) Release() {
	if m.users.Add(-1) == 0 && m.unmap != nil {
		m.unmap(m.Mem)
	}
}

// Retire ends the link's own use of the mapping. Acquire must not be called afterwards.
func (m *Mapping) Retire() { m.Release() }

// ErrNoRegion says that the peer has no such shared region, or no longer.
var ErrNoRegion = errors.New("no such region")
