package device

import (
	"sync/atomic"
	"unsafe"

	"tutti/mem"
)

// Words returns n zeroed words of host memory, each a Memory of mem.WordSize bytes, for WaitValue
// and WriteValue of streams.
func Words(n int) []mem.Memory {
	words := make([]atomic.Uint64, n)
	all := make([]mem.Memory, n)
	for i := range words {
		all[i] = mem.Host(unsafe.Slice((*byte)(unsafe.Pointer(&words[i])), mem.WordSize), mem.Anywhere)
	}
	return all
}
