//go:build !race

package ring

import (
	"sync"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Commands of membarrier(2): a barrier on every core that runs a thread of a process that has
// registered.
const (
	cmdGlobalExpedited         = 1 << 1
	cmdRegisterGlobalExpedited = 1 << 2
)

// registerBarrier registers this process for barriers, its own and those of others, and reports
// whether the system supports it. In a process of several threads the first call takes a grace
// period of the kernel's RCU, 10 ms and more: see Prepare.
var registerBarrier = sync.OnceValue(func() bool {
	_, _, e := unix.Syscall(unix.SYS_MEMBARRIER, cmdRegisterGlobalExpedited, 0, 0)
	return e == 0
})

func barrier() { unix.Syscall(unix.SYS_MEMBARRIER, cmdGlobalExpedited, 0, 0) }

// storeRelease stores v after all earlier stores, without waiting for them.
func storeRelease(p *uint64, v uint64)

func prefetch(p unsafe.Pointer)
