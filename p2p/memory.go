package p2p

import (
	"errors"
	"fmt"
	"slices"

	"tutti/internal/ident"
)

// Registrar is a transport that must know memory before it can move it (RDMA, GPU).
type Registrar interface {
	// Register makes r known until Deregister. Called once a region.
	Register(r *Region) error
	Deregister(r *Region) error
}

// Control returns n bytes of zeroed memory for the engine's own use: slots, credits, pools,
// scratch, synchronisation, warm-up. It is the only way to such memory, and it knows no location
// but Anywhere: with a GPU's location a transport would choose a GPU path for plain host memory.
func (p *Proxy) Control(n int) (*Region, error) {
	r := NewRegion(ident.New(), Anywhere, make([]byte, n), false, func() error { return nil })
	return r, p.register(r)
}

// Register makes the caller's memory at loc known to the transports. The caller keeps the memory
// alive until Deregister.
func (p *Proxy) Register(mem []byte, loc Location) (*Region, error) {
	if err := loc.Validate(); err != nil {
		return nil, err
	}
	r := NewRegion(ident.New(), loc, mem, false, func() error { return nil })
	return r, p.register(r)
}

func (p *Proxy) register(r *Region) error {
	for i, t := range p.cfg.Transports {
		if reg, ok := t.(Registrar); ok {
			if err := reg.Register(r); err != nil {
				for _, u := range p.cfg.Transports[:i] {
					if reg, ok := u.(Registrar); ok {
						reg.Deregister(r)
					}
				}
				return fmt.Errorf("registering %d bytes at %s with %s: %w", len(r.Mem), r.Location, t.Name(), err)
			}
		}
	}
	return nil
}

// Deregister undoes Register.
func (p *Proxy) Deregister(r *Region) error {
	var errs []error
	for _, t := range p.cfg.Transports {
		if reg, ok := t.(Registrar); ok {
			errs = append(errs, reg.Deregister(r))
		}
	}
	return errors.Join(errs...)
}

// Alloc returns a region of n bytes that peers can map where a transport can do that, else plain
// memory. Free it with FreeRegion. Takes the lock itself.
func (p *Proxy) Alloc(n int) (*Region, error) {
	r, err := p.alloc(n)
	if err != nil {
		return nil, err
	}
	p.Lock()
	defer p.Unlock()
	if p.closed {
		return nil, errors.Join(ErrClosed, p.Deregister(r), r.Free())
	}
	p.regions[r.ID] = r
	return r, nil
}

// Shares reports whether there is a transport whose memory peers can map.
func (p *Proxy) Shares() bool {
	return slices.ContainsFunc(p.cfg.Transports, func(t Transport) bool { _, ok := t.(Allocator); return ok })
}

// alloc is Alloc without noting the region.
func (p *Proxy) alloc(n int) (*Region, error) {
	if n < 1 {
		return nil, fmt.Errorf("region of %d bytes: want at least 1", n)
	}
	var r *Region
	for _, t := range p.cfg.Transports {
		if a, ok := t.(Allocator); ok {
			var err error
			if r, err = a.Alloc(n); err != nil {
				return nil, fmt.Errorf("allocating %d bytes of shared memory: %w", n, err)
			}
			break
		}
	}
	if r == nil {
		r = NewRegion(ident.New(), Anywhere, make([]byte, n), false, func() error { return nil })
	}
	if err := p.register(r); err != nil {
		r.Free()
		return nil, err
	}
	return r, nil
}

// FreeRegion withdraws what Alloc returned and unmaps it. Takes the lock itself.
func (p *Proxy) FreeRegion(r *Region) error {
	p.Lock()
	_, known := p.regions[r.ID]
	delete(p.regions, r.ID)
	p.Unlock()
	if !known {
		return ErrNoRegion
	}
	return errors.Join(p.Deregister(r), r.Free())
}
