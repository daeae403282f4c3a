//go:build !linux || !amd64 || race

package ring

import (
	"sync/atomic"
	"unsafe"
)

// The race detector does not know of barriers between processors.
func registerBarrier() bool            { return false }
func barrier()                         {}
func storeRelease(p *uint64, v uint64) { atomic.StoreUint64(p, v) }
func prefetch(unsafe.Pointer)          {}
