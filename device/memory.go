package device

import (
	"fmt"
	"strings"
	"sync/atomic"
	"unsafe"
)

// Location says where memory is: "*" (host memory of no particular place), "cpu:N" (NUMA node N) or
// "cuda:N" (GPU N).
type Location string

// Anywhere is the location of the host device's memory, and of the words that streams wait for.
const Anywhere Location = "*"

// Host reports whether l is a location of host memory.
func (l Location) Host() bool { return l == Anywhere || strings.HasPrefix(string(l), "cpu:") }

// Memory is a range of memory: bytes of the host, or addresses that only a device understands. It is
// a value and owns nothing; one of host memory keeps the bytes reachable. The zero Memory is empty.
type Memory struct {
	loc    Location
	n      int
	host   unsafe.Pointer // of host memory
	device uint64         // of device memory
}

// Host describes b.
func Host(b []byte) Memory {
	return Memory{loc: Anywhere, n: len(b), host: unsafe.Pointer(unsafe.SliceData(b))}
}

// At describes n bytes at address of the device at loc, which is no location of host memory.
func At(address uint64, n int, loc Location) Memory {
	if loc.Host() || n < 0 {
		panic(fmt.Sprintf("device: %d bytes of device memory at %q, want 0 or more at \"cuda:N\"", n, string(loc)))
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

// Bytes returns host memory. It panics for device memory, whose addresses this processor must not
// use: ask Loc().Host() first.
func (m Memory) Bytes() []byte {
	if !m.Loc().Host() {
		panic(fmt.Sprintf("device: Bytes of device memory at %q", string(m.loc)))
	}
	return unsafe.Slice((*byte)(m.host), m.n)
}

// Address returns the address of device memory on its device. It panics for host memory.
func (m Memory) Address() uint64 {
	if m.Loc().Host() {
		panic("device: device address of host memory")
	}
	return m.device
}

// Slice returns n bytes of m from offset off. It panics if m does not have them, as slicing does.
func (m Memory) Slice(off, n int) Memory {
	if off < 0 || n < 0 || off > m.n-n {
		panic(fmt.Sprintf("device: %d bytes at offset %d of %d", n, off, m.n))
	}
	m.n = n
	switch {
	case !m.Loc().Host():
		m.device += uint64(off)
	case n > 0: // an address behind the end would keep other memory alive
		m.host = unsafe.Add(m.host, off)
	}
	return m
}

// WordSize is the size of what Word returns, and what its address is a multiple of, in bytes.
const WordSize = 8

// Word returns the 64-bit word that host memory begins with, for atomic access. It panics if m is
// too short or not aligned.
func (m Memory) Word() *atomic.Uint64 {
	b := m.Bytes()
	if len(b) < WordSize || uintptr(m.host)%WordSize != 0 {
		panic(fmt.Sprintf("device: %d bytes at %p are no word", len(b), m.host))
	}
	return (*atomic.Uint64)(m.host)
}

// Words returns n zeroed words of host memory, each a Memory of WordSize bytes.
func Words(n int) []Memory {
	words := make([]atomic.Uint64, n)
	all := make([]Memory, n)
	for i := range words {
		all[i] = Memory{loc: Anywhere, n: WordSize, host: unsafe.Pointer(&words[i])}
	}
	return all
}
