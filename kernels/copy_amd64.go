//go:build !purego && !race

package kernels

import (
	"sync"
	"time"
	"unsafe"

	"golang.org/x/sys/cpu"
)

// moveString copies n bytes, which must not overlap, with REP MOVSB.
//
//go:noescape
func moveString(dst, src unsafe.Pointer, n int)

// Acquire begins to take the cache lines of n bytes at an address from other processors, where the
// processor can do that: stores to them that follow in some tens of nanoseconds need not wait for
// them. It changes no memory, and the address need not be valid.
func Acquire(at uintptr, n int)

// moves reports whether string moves of this processor are not slow. It compares them with Copy in
// this processor's cache, where they have no advantage.
var moves = sync.OnceValue(func() bool {
	if !cpu.X86.HasERMS {
		return false
	}
	const n, rounds = 32 << 10, 8
	dst, src := make([]byte, n), make([]byte, n)
	best := func(f func(dst, src unsafe.Pointer, n int)) time.Duration {
		least := time.Duration(1<<63 - 1)
		for range rounds {
			begin := time.Now()
			f(unsafe.Pointer(&dst[0]), unsafe.Pointer(&src[0]), n)
			least = min(least, time.Since(begin))
		}
		return least
	}
	return best(moveString) <= 2*best(Copy)
})

func copyShared(dst, src unsafe.Pointer, n int) {
	if moves() {
		moveString(dst, src, n)
	} else {
		Copy(dst, src, n)
	}
}
