package p2p

import (
	"errors"
	"fmt"
	"strconv"
	"strings"
)

// Location says where memory is: "*" (host memory of no particular place), "cpu:N" (NUMA node N) or "cuda:N" (GPU N).
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

// Region is memory that a transport knows: registered, and where the transport can, shared with peers.
type Region struct {
	ID         uint64 // unique in this incarnation, never 0
	Generation uint32 // grows when the memory behind the same addresses is exchanged; old descriptors are then refused
	Location   Location
	Mem        []byte // the local mapping; the allocator's until Free
	File       int    // descriptor to hand to peers, -1 if there is none
	free       func() error
	renew      func() error
}

// NewRegion describes mem; free (may be nil) gives it back. For transports.
func NewRegion(id uint64, loc Location, mem []byte, file int, free func() error) *Region {
	return &Region{ID: id, Location: loc, Mem: mem, File: file, free: free}
}

// Free unmaps the region and closes its descriptor. Mem must not be touched afterwards. Idempotent only through the proxy.
func (r *Region) Free() error {
	if r.free == nil {
		return nil
	}
	f := r.free
	r.free, r.Mem = nil, nil
	return f()
}

// OnRenew sets how Renew exchanges the memory. For transports.
func (r *Region) OnRenew(f func() error) { r.renew = f }

// Renew puts new memory with the same contents behind Mem's addresses and raises Generation: peers that have the region mapped keep the old memory,
// so that nothing they do reaches this process any more. It does nothing for memory that was never shared.
func (r *Region) Renew() error {
	if r.renew == nil {
		return nil
	}
	if err := r.renew(); err != nil {
		return fmt.Errorf("exchanging the memory of a region of %d bytes: %w", len(r.Mem), err)
	}
	r.Generation++
	return nil
}

// RegionDesc names a region to a peer.
type RegionDesc struct {
	ID         uint64
	Generation uint32
	Size       uint64
}

// ErrNoRegion says that no such region is shared, or no longer, or in another generation or size.
var ErrNoRegion = errors.New("no such region")
