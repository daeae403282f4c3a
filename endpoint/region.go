package endpoint

import (
	"cmp"
	"crypto/rand"
	"encoding/binary"
	"fmt"
	"log/slog"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"unicode/utf8"
	"unsafe"

	"tutti/device"
	"tutti/endpoint/internal/card"
	"tutti/endpoint/internal/gate"
	"tutti/endpoint/internal/wire"
	"tutti/internal/plain"
	"tutti/mem"
)

// Rights of a client on a region.
const (
	Read  = mem.Read
	Write = mem.Write
)

// RegionConfig says who may do what with a region.
type RegionConfig struct {
	// Rights of every peer that has the job's secret, and of every client that Clients does not
	// name. Default: Read, unless Clients is set; then none.
	Rights mem.Rights
	// Clients has the rights of clients by their names: see trust of clients in the package
	// comment. All holders of a client's credential are that client, so that each program should
	// have its own. A client without rights does not learn that the region exists.
	Clients map[string]mem.Rights
}

// Region is memory, or a file, that peers may read or write by its name. It is registered until
// Unregister.
type Region struct {
	name       string
	id         uint64
	generation uint64
	n          int64
	cfg        RegionConfig
	gate       gate.Gate
	memory     mem.Memory      // empty: a file, or memory of a device that exports none
	exporter   device.Exporter // of memory; nil: it is of the host
	file       *os.File        // nil: memory
	base       int64           // of the region in file
	reg        *registry
	reads      atomic.Uint64 // bytes
	writes     atomic.Uint64

	gone   atomic.Bool // no key is given any more
	keyMu  sync.Mutex
	grants map[*card.Domain]*grant
}

// Name returns the region's name.
func (r *Region) Name() string { return r.name }

// Len returns the length in bytes.
func (r *Region) Len() int64 { return r.n }

// Traffic returns the bytes that peers have read and written.
func (r *Region) Traffic() (read, written uint64) { return r.reads.Load(), r.writes.Load() }

// Unregister ends all access to the region, and waits for accesses under way, which take less than
// a millisecond in memory of the host, and in that of a device or a file as long as its copy or its
// call takes; with RDMA it also waits until the device has deregistered the memory. Operations
// of peers that have not ended fail with ErrStale. Afterwards the memory is the caller's again.
// Idempotent.
func (r *Region) Unregister() {
	r.withdraw()
	r.reg.remove(r)
	r.gate.Close()
}

// rightsOf returns the rights of a client; "" has the job's secret.
func (r *Region) rightsOf(client string) mem.Rights {
	if x, ok := r.cfg.Clients[client]; ok && client != "" {
		return x
	}
	return r.cfg.Rights
}

// check checks an access.
func (r *Region) check(client string, want mem.Rights, off, n uint64) wire.Code {
	switch rights := r.rightsOf(client); {
	case rights == 0:
		return wire.NoRegion
	case !rights.Has(want):
		return wire.Rights
	case n > uint64(r.n) || off > uint64(r.n)-n:
		return wire.Bounds
	}
	return wire.OK
}

func (r *Region) entry(client string) wire.Entry {
	return wire.Entry{Region: r.id, Generation: r.generation, Len: uint64(r.n), Rights: uint8(r.rightsOf(client))}
}

// registry has the regions of an endpoint.
type registry struct {
	order   sync.Mutex // held until all have been told of a change, so that they do so in the order of changes
	mu      sync.RWMutex
	names   []string // sorted
	spans   []placed // of regions in memory, in the order of their first bytes
	byName  map[string]*Region
	byID    map[uint64]*Region
	last    uint64
	changed func(r *Region, gone bool) // called without mu
	log     *slog.Logger
}

// checkName checks the name of a region or an endpoint, which programs show to people: it must not
// change how the rest of a line is shown.
func checkName(what, name string) error {
	if len(name) == 0 || len(name) > wire.MaxName || !utf8.ValidString(name) ||
		strings.ContainsFunc(name, plain.Controls) {
		return fmt.Errorf("%w: %s %.40q: want 1 to %d bytes of UTF-8 without control characters", ErrName, what, name,
			wire.MaxName)
	}
	return nil
}

// add registers r, whose name must be free.
func (g *registry) add(r *Region) error {
	if err := checkName("region", r.name); err != nil {
		return err
	}
	if r.cfg.Rights == 0 && r.cfg.Clients == nil {
		r.cfg.Rights = Read
	}
	for _, x := range r.cfg.Clients {
		if x&^(Read|Write) != 0 {
			return fmt.Errorf("region %s: rights %v: want read, write or both", r.name, x)
		}
	}
	if r.cfg.Rights&^(Read|Write) != 0 {
		return fmt.Errorf("region %s: rights %v: want read, write or both", r.name, r.cfg.Rights)
	}
	var b [8]byte
	rand.Read(b[:])
	r.generation = binary.LittleEndian.Uint64(b[:]) | 1
	r.reg = g
	g.order.Lock()
	defer g.order.Unlock()
	g.mu.Lock()
	if g.byName == nil {
		g.byName, g.byID = map[string]*Region{}, map[uint64]*Region{}
	}
	i, taken := slices.BinarySearch(g.names, r.name)
	if taken {
		g.mu.Unlock()
		return fmt.Errorf("region %s is registered already: unregister it first", r.name)
	}
	g.last++
	r.id = g.last
	g.names = slices.Insert(g.names, i, r.name)
	g.byName[r.name], g.byID[r.id] = r, r
	if r.memory.Len() > 0 {
		x := placed{spanOf(r.memory), r}
		i, _ := slices.BinarySearchFunc(g.spans, x, placed.compare)
		g.spans = slices.Insert(g.spans, i, x)
	}
	g.mu.Unlock()
	g.changed(r, false)
	return nil
}

func (g *registry) remove(r *Region) {
	g.order.Lock()
	defer g.order.Unlock()
	g.mu.Lock()
	if g.byID[r.id] != r {
		g.mu.Unlock()
		return
	}
	i, _ := slices.BinarySearch(g.names, r.name)
	g.names = slices.Delete(g.names, i, i+1)
	delete(g.byName, r.name)
	delete(g.byID, r.id)
	if r.memory.Len() > 0 {
		i, _ := slices.BinarySearchFunc(g.spans, placed{spanOf(r.memory), r}, placed.compare)
		g.spans = slices.Delete(g.spans, i, i+1)
	}
	g.mu.Unlock()
	g.changed(r, true)
}

// span is the addresses of memory.
type span struct{ first, beyond uint64 }

func spanOf(m mem.Memory) span {
	n := uint64(m.Len())
	if !m.Loc().Host() {
		return span{m.Address(), m.Address() + n}
	}
	first := uint64(uintptr(unsafe.Pointer(unsafe.SliceData(m.Bytes()))))
	return span{first, first + n}
}

// placed is a region and where its memory lies.
type placed struct {
	span
	r *Region
}

// compare orders regions by their first bytes, and those with the same one by their numbers.
func (x placed) compare(y placed) int {
	return cmp.Or(cmp.Compare(x.first, y.first), cmp.Compare(x.r.id, y.r.id))
}

// around returns a region that has all of m, or nil. It looks at the last one that begins before m:
// where regions overlap there may be another one.
func (g *registry) around(m mem.Memory) *Region {
	x := spanOf(m)
	g.mu.RLock()
	defer g.mu.RUnlock()
	i, _ := slices.BinarySearchFunc(g.spans, x.first, func(y placed, first uint64) int {
		return cmp.Or(cmp.Compare(y.first, first), -1) // behind all that begin there
	})
	if i == 0 || g.spans[i-1].beyond < x.beyond {
		return nil
	}
	r := g.spans[i-1].r
	if at := r.memory.Loc(); at != m.Loc() && !(at.Host() && m.Loc().Host()) {
		return nil
	}
	return r
}

// find returns the region that a range names.
func (g *registry) find(x wire.Range) (*Region, wire.Code) {
	g.mu.RLock()
	r := g.byID[x.Region]
	g.mu.RUnlock()
	if r == nil || r.generation != x.Generation {
		return nil, wire.Stale
	}
	return r, wire.OK
}

func (g *registry) lookup(name string) *Region {
	g.mu.RLock()
	defer g.mu.RUnlock()
	return g.byName[name]
}

// page returns up to n regions that client may use and whose names come after a name.
func (g *registry) page(after, client string, n int) (page []*Region) {
	g.mu.RLock()
	defer g.mu.RUnlock()
	i, found := slices.BinarySearch(g.names, after)
	if found {
		i++
	}
	for ; i < len(g.names) && len(page) < n; i++ {
		if r := g.byName[g.names[i]]; r.rightsOf(client) != 0 {
			page = append(page, r)
		}
	}
	return page
}

// all returns all regions.
func (g *registry) all() []*Region {
	g.mu.RLock()
	defer g.mu.RUnlock()
	all := make([]*Region, 0, len(g.names))
	for _, name := range g.names {
		all = append(all, g.byName[name])
	}
	return all
}

// RemoteRegion describes a region of a peer.
type RemoteRegion struct {
	Name   string
	Len    int64
	Rights mem.Rights // of this end

	id, generation uint64
}
