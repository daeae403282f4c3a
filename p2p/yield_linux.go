package p2p

import "syscall"

// osYield lets another process have this core. The Go scheduler is not told of the call: it would
// take the processor from a goroutine that yields often, and its monitor thread would wake up every
// 20 us for that.
func osYield() { syscall.RawSyscall(syscall.SYS_SCHED_YIELD, 0, 0, 0) }
