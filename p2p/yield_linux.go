package p2p

import "syscall"

// osYield lets another process have this core.
func osYield() { syscall.Syscall(syscall.SYS_SCHED_YIELD, 0, 0, 0) }
