package mem

import (
	"fmt"
	"sync/atomic"
	"unsafe"
)

// Memory is a range of memory. It is a value and owns nothing; a Memory of host memory keeps the
// bytes reachable. The zero Memory is empty.
type Memory struct {
	loc    Location
	n      int
	host   unsafe.Pointer // of host memory
	device uint64         // of device memory
	region *Region        // nil: not registered
}

// Host describes b, at location loc. It panics if loc is no location of host memory.
func Host(b []byte, loc Location) Memory {
	if !loc.Host() {
		panic(fmt.Sprintf("mem: host memory at %q, want \"*\" or \"cpu:N\"", string(loc)))
	}
	return Memory{loc: loc, n: len(b), host: unsafe.Pointer(unsafe.SliceData(b))}
}

// Device describes n bytes at address of the device at loc. It panics if loc is a location of host
// memory or n is negative.
func Device(address uint64, n int, loc Location) Memory {
	if loc.Host() || n < 0 {
		panic(fmt.Sprintf("mem: %d bytes of device memory at %q, want 0 or more at \"cuda:N\"", n, string(loc)))
	}
	return Memory{loc: loc, n: n, device: address}
}

// Loc returns where the memory is; Anywhere for the zero Memory.
func (m Memory) Loc() Location {
	if m.loc == "" {
		return Anywhere
	}
	return m.loc
}

// Len returns the length in bytes.
func (m Memory) Len() int { return m.n }

// Region returns the region that contains the memory, nil if it is not known to be registered.
func (m Memory) Region() *Region { return m.region }

// Bytes returns host memory. It panics for device memory, which this processor cannot access: check
// Loc().Host() first.
func (m Memory) Bytes() []byte {
	if m.host == nil && m.n > 0 {
		panic(fmt.Sprintf("mem: Bytes of device memory at %q", string(m.loc)))
	}
	return unsafe.Slice((*byte)(m.host), m.n)
}

// Address returns the address of device memory on its device. It panics for host memory.
func (m Memory) Address() uint64 {
	if m.Loc().Host() {
		panic("mem: device address of host memory")
	}
	return m.device
}

// Slice returns n bytes of m from offset off. It panics if they are out of range, as slicing does.
func (m Memory) Slice(off, n int) Memory {
	if off < 0 || n < 0 || off > m.n-n {
		panic(fmt.Sprintf("mem: %d bytes at offset %d of %d", n, off, m.n))
	}
	if m.host != nil {
		if n == 0 { // an address behind the end would keep other memory alive
			return Memory{loc: m.loc, host: m.host, region: m.region}
		}
		m.host = unsafe.Add(m.host, off)
	} else {
		m.device += uint64(off)
	}
	m.n = n
	return m
}

// WordSize is the size and the alignment of a word in bytes.
const WordSize = 8

// Word returns the 64-bit word at offset off of host memory, for atomic access: a signal. It panics
// if the word is out of range or not aligned to WordSize.
func (m Memory) Word(off int) *atomic.Uint64 {
	if off < 0 || off > m.n-WordSize {
		panic(fmt.Sprintf("mem: word at offset %d of %d bytes", off, m.n))
	}
	p := unsafe.Pointer(&m.Bytes()[off])
	if uintptr(p)%WordSize != 0 {
		panic(fmt.Sprintf("mem: word at offset %d is not aligned to %d bytes", off, WordSize))
	}
	return (*atomic.Uint64)(p)
}

// Region is memory that is registered with a transport and, if that supports it, shared with peers.
type Region struct {
	Memory          // the local mapping; the allocator's until Free
	ID       uint64 // unique in this incarnation, never 0
	Shared   bool   // peers can map it for reading
	Writable bool   // peers that hold a remote with Write or Signal can map it for writing
	free     func() error
}

// NewRegion describes m; free (may be nil) frees it. For transports.
func NewRegion(id uint64, m Memory, shared, writable bool, free func() error) *Region {
	r := &Region{Memory: m, ID: id, Shared: shared, Writable: writable, free: free}
	r.Memory.region = r
	return r
}

// Free unmaps the region here and asks the peers that have mapped it to do so too. Its memory must
// not be accessed afterwards. It does not wait for the peers. A second call does nothing. It is not
// for several goroutines, nor for regions of a proxy, which FreeRegion of the proxy frees.
func (r *Region) Free() error {
	if r.free == nil {
		return nil
	}
	f := r.free
	r.free, r.Memory = nil, Memory{}
	return f()
}
