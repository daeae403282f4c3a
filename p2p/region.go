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

// Mapping is a peer's region in this process, for loads only. It is shared by all who map the
// region, and counts them: the memory is unmapped when its link has retired it and the last user
// has released it.
type Mapping struct {
	Mem   []byte
	users atomic.Int64 // and one until Retire; below 1: unmapped
	unmap func([]byte)
}

// NewMapping describes mem, which unmap (may be nil) gives back. For links, which keep it and hand
// it out by Acquire.
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

// Release ends a use that Map or Acquire began. The user must not touch Mem afterwards.
func (m *Mapping) Release() {
	if m.users.Add(-1) == 0 && m.unmap != nil {
		m.unmap(m.Mem)
	}
}

// Retire says that nobody will Acquire the mapping any more. For the link that keeps it, once.
func (m *Mapping) Retire() { m.Release() }

// ErrNoRegion says that the peer has no such region open to others, or no longer.
var ErrNoRegion = errors.New("no such region")
