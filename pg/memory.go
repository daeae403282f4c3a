package pg

import (
	"errors"
	"fmt"
	"sort"
	"sync"
	"sync/atomic"
	"unsafe"

	"tutti/p2p"
	"tutti/pg/internal/exec"
)

// memory lists the regions of a job that Alloc has returned and Free has not freed.
type memory struct {
	mu      sync.Mutex                    // held to change regions
	regions atomic.Pointer[[]*p2p.Region] // by address
}

// Alloc returns zeroed memory for n elements that is registered with the group's transports: where
// the links allow it, collectives on it copy nothing. It belongs to the caller until Free, which
// works after Close too. Closing the group, even the last one, leaves it usable as plain memory.
func Alloc[T Element](g *Group, n int) ([]T, error) {
	var zero T
	size := int(unsafe.Sizeof(zero))
	if n < 0 || n > exec.MaxBytes/size {
		return nil, &ArgumentError{Call: "alloc", Arg: "the length", Got: fmt.Sprint(n),
			Want: "zero or more elements that fit in memory"}
	}
	if n == 0 {
		return []T{}, nil
	}
	if g.closed.Load() {
		return nil, ErrClosed
	}
	r, err := g.job.proxy.Alloc(n * size)
	if errors.Is(err, p2p.ErrClosed) {
		err = ErrClosed
	}
	if err != nil {
		return nil, err
	}
	g.job.memory.add(r)
	return unsafe.Slice((*T)(unsafe.Pointer(unsafe.SliceData(r.Bytes()))), n), nil
}

// Free releases memory that Alloc returned. x must be the whole slice. No operation may be using
// it, and the caller must not use it afterwards.
func Free[T Element](g *Group, x []T) error {
	if cap(x) == 0 {
		return nil
	}
	r := g.job.memory.remove(unsafe.Pointer(unsafe.SliceData(x)))
	if r == nil {
		return &ArgumentError{Call: "free", Arg: "the slice", Got: "not from Alloc of this job, or freed before",
			Want: "what Alloc returned"}
	}
	return g.job.proxy.FreeRegion(r)
}

func regionStart(r *p2p.Region) uintptr { return uintptr(unsafe.Pointer(unsafe.SliceData(r.Bytes()))) }

func (m *memory) add(r *p2p.Region) {
	m.mu.Lock()
	defer m.mu.Unlock()
	all := []*p2p.Region{r}
	if old := m.regions.Load(); old != nil {
		all = append(all, *old...)
	}
	sort.Slice(all, func(a, b int) bool { return regionStart(all[a]) < regionStart(all[b]) })
	m.regions.Store(&all)
}

// remove takes the region that begins at ptr off the list and returns it, or nil if there is none.
func (m *memory) remove(ptr unsafe.Pointer) (found *p2p.Region) {
	m.mu.Lock()
	defer m.mu.Unlock()
	old := m.regions.Load()
	if old == nil {
		return nil
	}
	kept := make([]*p2p.Region, 0, len(*old))
	for _, r := range *old {
		if regionStart(r) == uintptr(ptr) {
			found = r
		} else {
			kept = append(kept, r)
		}
	}
	m.regions.Store(&kept)
	return found
}

// region returns the mappable region that holds n bytes at ptr, and ptr's offset in it; nil if
// there is none. It takes no lock.
func (m *memory) region(ptr unsafe.Pointer, n int) (*p2p.Region, int) {
	all := m.regions.Load()
	if all == nil {
		return nil, 0
	}
	at := sort.Search(len(*all), func(i int) bool { return regionStart((*all)[i]) > uintptr(ptr) }) - 1
	if at < 0 {
		return nil, 0
	}
	r := (*all)[at]
	off := int(uintptr(ptr) - regionStart(r))
	if !r.Shared || off+n > r.Len() {
		return nil, 0
	}
	return r, off
}
