package device

import (
	"sync/atomic"
	"unsafe"

	"tutti/mem"
)

// Words returns n zeroed words of host memory, each a Memory of mem.WordSize bytes, for WaitValue
// and WriteValue of d's streams: memory of AllocHost if d is a HostAllocator. The caller calls free
// when no stream uses them any more.
func Words(d Device, n int) (words []mem.Memory, free func() error, err error) {
	words = make([]mem.Memory, n)
	a, ok := d.(HostAllocator)
	if !ok || n == 0 {
		all := make([]atomic.Uint64, n)
		for i := range words {
			words[i] = mem.Host(unsafe.Slice((*byte)(unsafe.Pointer(&all[i])), mem.WordSize), mem.Anywhere)
		}
		return words, func() error { return nil }, nil
	}
	whole, err := a.AllocHost(n * mem.WordSize)
	if err != nil {
		return nil, nil, err
	}
	clear(whole.Bytes())
	for i := range words {
		words[i] = whole.Slice(i*mem.WordSize, mem.WordSize)
	}
	return words, func() error { return a.FreeHost(whole) }, nil
}
