package p2p

import (
	"errors"
	"fmt"
	"strconv"
	"strings"
	"sync/atomic"
)

// Location says where memory is: "*" (host memory of no particular place), "cpu:N" (NUMA node N) or
// "cuda:N" (GPU N).
type Location string

// Anywhere is the wildcard location. Control, sync and warm-up memory always has it.
const Anywhere Location = "*"

// Host reports whether the memory is host memory.
func (l Location) Host() bool { return l == Anywhere || strings.HasPrefix(string(l), "cpu:") }

// Validate returns an error that shows the accepted forms if l is none of them.
func (l Location) Validate() error {
	if l == Anywhere {
		return nil
	}
	if kind, n, ok := strings.Cut(string(l), ":"); ok && (kind == "cpu" || kind == "cuda") {
		if i, err := strconv.Atoi(n); err == nil && i >= 0 && strconv.Itoa(i) == n {
			return nil
		}
	}
	return fmt.Errorf("location %q: want \"*\", \"cpu:N\" or \"cuda:N\"", string(l))
}

// Region is memory that a transport knows: registered, and where the transport can, open to peers
// for reading.
type Region struct {
	ID       uint64 // unique in this incarnation, never 0
	Location Location
	Mem      []byte // the local mapping; the allocator's until Free
	Shared   bool   // peers can map it
	free     func() error
}

// NewRegion describes mem; free (may be nil) gives it back. For transports.
func NewRegion(id uint64, loc Location, mem []byte, shared bool, free func() error) *Region {
	return &Region{ID: id, Location: loc, Mem: mem, Shared: shared, free: free}
}

// Free unmaps the region here and asks the peers that have mapped it to do so too. Mem must not be
// touched afterwards. It does not wait for the peers. Idempotent only through the proxy.
func (r *Region) Free() error {
	if r.free == nil {
		return nil
	}
	f := r.free
	r.free, r.Mem = nil, nil
	return f()
}

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
