package p2p

import (
	"context"
	"errors"
	"fmt"
	"sync"

	"tutti/internal/ident"
	"tutti/mem"
)

// Registrar is a transport that can keep memory registered with its devices. It is told of the
// regions whose life the proxy knows, those of Alloc and AllocWritable. Transfers from and to other
// memory work as well.
type Registrar interface {
	// Register says that r lives until Deregister. It is called once for a region, with its memory
	// in any location.
	Register(r *Region)
	// Deregister ends that. Operations with the memory may be under way, if they were given up.
	Deregister(r *Region) error
}

// Control returns n bytes of zeroed memory for the engine's own use: slots, credits, pools,
// scratch, synchronisation, warm-up. All such memory comes from here, and has the location
// Anywhere: with a GPU's location a transport would choose a GPU path for plain host memory.
func (p *Proxy) Control(n int) *Region { return heap(n) }

// heap returns a region of plain memory.
func heap(n int) *Region {
	return mem.NewRegion(ident.New(), mem.Host(make([]byte, n), Anywhere), false, false, func() error { return nil })
}

// register tells the transports of a region.
func (p *Proxy) register(r *Region) {
	for _, t := range p.cfg.Transports {
		if reg, ok := t.(Registrar); ok {
			reg.Register(r)
		}
	}
}

// deregister undoes register.
func (p *Proxy) deregister(r *Region) error {
	var errs []error
	for _, t := range p.cfg.Transports {
		if reg, ok := t.(Registrar); ok {
			errs = append(errs, reg.Deregister(r))
		}
	}
	return errors.Join(errs...)
}

// Alloc returns a region of n bytes that peers can map if a transport supports that, else plain
// memory. Free it with FreeRegion. Takes the lock itself.
func (p *Proxy) Alloc(n int) (*Region, error) {
	r, err := p.alloc(n, false)
	return p.known(r, true, err)
}

// AllocWritable returns a region of n bytes that can be exposed with every right. Peers can map it
// only while a range of it is exposed for reading. Free it with FreeRegion. Takes the lock itself.
func (p *Proxy) AllocWritable(n int) (*Region, error) {
	r, err := p.alloc(n, true)
	return p.known(r, false, err)
}

// known adds an allocated region, which peers may map if it is shared, to the proxy's list.
func (p *Proxy) known(r *Region, shared bool, err error) (*Region, error) {
	if err != nil {
		return nil, err
	}
	p.Lock()
	defer p.Unlock()
	if p.closed {
		return nil, errors.Join(ErrClosed, p.deregister(r), r.Free())
	}
	p.regions.add(r, shared)
	return r, nil
}

// Shares reports whether peers on this machine can map memory of Alloc. Links to them are of the
// first transport, because every transport reaches them.
func (p *Proxy) Shares() bool {
	if len(p.cfg.Transports) == 0 {
		return false
	}
	_, ok := p.cfg.Transports[0].(Allocator)
	return ok
}

// alloc implements Alloc and, with writable, AllocWritable. It takes the first transport that makes
// such memory, else plain memory.
func (p *Proxy) alloc(n int, writable bool) (r *Region, err error) {
	if n < 1 {
		return nil, fmt.Errorf("region of %d bytes: want at least 1", n)
	}
	if err := mem.Fits(n); err != nil {
		return nil, fmt.Errorf("allocating %d bytes: %w", n, err)
	}
	for _, t := range p.cfg.Transports {
		plain, shares := t.(Allocator)
		open, opens := t.(WritableAllocator)
		switch {
		case writable && opens:
			r, err = open.AllocWritable(n)
		case !writable && shares:
			r, err = plain.Alloc(n)
		default:
			continue
		}
		if err != nil {
			return nil, fmt.Errorf("allocating %d bytes of shared memory: %w", n, err)
		}
		break
	}
	if r == nil {
		r = heap(n)
	}
	p.register(r)
	return r, nil
}

// FreeRegion frees and unmaps a region of Alloc or AllocWritable. From any goroutine.
func (p *Proxy) FreeRegion(r *Region) error {
	if !p.regions.remove(r.ID) {
		return ErrNoRegion
	}
	return errors.Join(p.deregister(r), r.Free())
}

// Expose opens n bytes of r, from offset off, with these rights to peers that get the remote. The
// remote has a key for each transport through which peers can reach the memory. If there is none,
// Expose fails with errors.ErrUnsupported. r must not be freed before Withdraw has returned nil.
// The lock must not be held.
func (p *Proxy) Expose(r *Region, off, n int, rights mem.Rights) (*mem.Remote, error) {
	if off < 0 || n < 0 || off > r.Len()-n {
		return nil, fmt.Errorf("exposing %d bytes at offset %d of a region of %d: %w", n, off, r.Len(), ErrBounds)
	}
	x := &mem.Remote{ID: r.ID, Generation: p.tickets.Add(1), Base: uint64(off), Len: uint64(n), Rights: rights,
		Loc: r.Loc()}
	if err := x.Validate(); err != nil {
		return nil, err
	}
	var why []error
	for _, t := range p.cfg.Transports {
		e, ok := t.(Exposer)
		if !ok {
			continue
		}
		key, err := e.Expose(r, x)
		if err == nil {
			x.Keys = append(x.Keys, mem.Key{Path: t.Name(), Blob: key})
		} else if why = append(why, fmt.Errorf("%s: %w", t.Name(), err)); !errors.Is(err, errors.ErrUnsupported) {
			ctx, over := context.WithCancel(context.Background())
			over() // no peer has a key, so that there is none to wait for
			if err := p.Withdraw(ctx, x); !errors.Is(err, context.Canceled) {
				why = append(why, err)
			}
			return nil, errors.Join(why...)
		}
	}
	if len(x.Keys) == 0 && len(p.cfg.Transports) > 0 {
		return nil, fmt.Errorf("exposing region %#x: no transport reaches it: %w", r.ID,
			errors.Join(append(why, errors.ErrUnsupported)...))
	}
	return x, nil
}

// Withdraw ends Expose. When it returns nil, no peer reads or writes the memory any more. It blocks
// while peers do so, until ctx ends; then the memory must stay allocated, and Withdraw may be
// called again. The lock must not be held.
func (p *Proxy) Withdraw(ctx context.Context, x *mem.Remote) error {
	var errs []error
	for _, t := range p.cfg.Transports {
		if e, ok := t.(Exposer); ok {
			if _, opened := x.Key(t.Name()); opened {
				if err := e.Withdraw(ctx, x); err != nil {
					errs = append(errs, fmt.Errorf("%s: %w", t.Name(), err))
				}
			}
		}
	}
	return errors.Join(errs...)
}

// regions lists the regions of this rank by ID, and which of them peers may map without an
// exposure. Its lock is a leaf: no other lock is taken under it.
type regions struct {
	mu sync.Mutex
	m  map[uint64]listed
}

type listed struct {
	*Region
	shared bool
}

func (t *regions) add(r *Region, shared bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.m == nil {
		t.m = map[uint64]listed{}
	}
	t.m[r.ID] = listed{r, shared}
}

// remove removes a region and reports whether it was there.
func (t *regions) remove(id uint64) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	_, known := t.m[id]
	delete(t.m, id)
	return known
}

// shared returns a region that peers may map, or nil.
func (t *regions) shared(id uint64) *Region {
	t.mu.Lock()
	defer t.mu.Unlock()
	if r := t.m[id]; r.shared {
		return r.Region
	}
	return nil
}
