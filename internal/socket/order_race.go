//go:build race

package socket

import "sync/atomic"

var order atomic.Uint64

// ordered tells the race detector that what was sent over a socket comes before what follows its
// receipt, as package syscall does. It does not see the system calls of this package.
func ordered() { order.Add(1) }
