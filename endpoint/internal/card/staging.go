package card

import (
	"sync"

	"tutti/mem"
	"tutti/rdma/memheap"
)

// Requests up to staged bytes are copied through registered memory of the domain: to register their
// own takes longer.
const (
	staged      = 16 << 10
	stagingSize = 4 << 20
)

// staging is registered memory that requests of one domain share. It is made when it is first
// needed.
type staging struct {
	mu   sync.Mutex
	heap *memheap.Heap // nil: not made yet
	b    []byte
	reg  Registration
}

// place is a part of a staging, for one request.
type place struct {
	off uint64
	b   []byte
	to  []byte // where a read goes in the end; nil: a write
}

// stage returns a place for a request, with the bytes of a write; false if it is too long or of a
// device, or there is no room.
func (d *Domain) stage(r *Request) (p place, ok bool) {
	n := r.Local.Len()
	if n > staged || r.Exporter != nil {
		return place{}, false
	}
	if p, ok = d.take(n); !ok {
		return place{}, false
	}
	if r.Write {
		copy(p.b, r.Local.Bytes())
	} else {
		p.to = r.Local.Bytes()
	}
	return p, true
}

// take returns a place of n bytes.
func (d *Domain) take(n int) (p place, ok bool) {
	s := &d.staging
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.heap == nil {
		b := make([]byte, stagingSize)
		reg, err := d.Register(mem.Host(b, mem.Anywhere), nil, 0, true)
		if err != nil {
			return place{}, false // the request's own memory may be registered nonetheless
		}
		s.heap, s.b, s.reg = memheap.New(stagingSize), b, reg
	}
	off, err := s.heap.Alloc(uint64(n), 64)
	if err != nil {
		return place{}, false
	}
	return place{off: off, b: s.b[off:][:n]}, true
}

// unstage gives places back. Nothing may access them any more.
func (d *Domain) unstage(places []place) {
	s := &d.staging
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, p := range places {
		if err := s.heap.Free(p.off); err != nil {
			panic("card: " + err.Error())
		}
	}
}

// close deregisters the memory.
func (s *staging) close() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.heap == nil {
		return nil
	}
	return s.reg.Close()
}
