// Package yield leaves processors to other threads, for goroutines that poll.
package yield

import (
	"math/rand/v2"
	"sync/atomic"
	"syscall"
	"time"

	"tutti/internal/cpus"
)

// Now lets other threads that are ready have this one's processor. If there is none it returns at
// once. The Go scheduler is not told of the call: it would take the processor from a goroutine that
// yields often, and its monitor thread would wake up every 20 us for that.
func Now() { syscall.RawSyscall(syscall.SYS_SCHED_YIELD, 0, 0, 0) }

// Durations, in nanoseconds, and numbers of yields.
const (
	taken = int64(1500)                   // a yield that takes longer has let another thread run
	slice = int64(500 * time.Microsecond) // one that did not give the processor back by itself
	most  = 64                            // yields in succession with another thread, before a move
	least = 16
	heavy = 8 // such yields that one of a slice counts for
	first = int64(time.Millisecond)
	last  = int64(time.Second)
)

// Poller yields for a goroutine that polls. If another thread takes the processor each time, as a
// peer does that polls too, it moves the goroutine's thread to another processor. The kernel does
// that as well, but only after tens of milliseconds: it counts neither of the two as waiting. Two
// pollers that meet move after different numbers of yields, so that one stays. If the other
// processors are busy too, the thread is moved after ever longer times, of a second in the end.
//
// The zero value is ready for use. Goroutines may share a Poller, if seldom more than one polls.
type Poller struct {
	shared atomic.Int64 // yields in succession that have let another thread run
	moved  atomic.Int64 // when it was moved last, or tried to
	pause  atomic.Int64 // until the next time; 0: it never was
}

// Yield is Now, and moves the thread when that helps.
func (p *Poller) Yield() {
	from := now()
	Now()
	at := now()
	if p.note(at, at-from, rand.Int64N) && !cpus.Move() {
		p.pause.Store(last)
	}
}

// note records a yield that took a time and has ended at another, and reports whether the thread is
// to be moved.
func (p *Poller) note(at, took int64, random func(int64) int64) bool {
	if took < taken {
		p.shared.Store(0)
		return false
	}
	n := int64(1)
	if took > slice {
		n = heavy
	}
	since, pause := at-p.moved.Load(), p.pause.Load()
	if p.shared.Add(n) < least+random(most-least) || pause != 0 && since < pause {
		return false
	}
	if since < 2*pause {
		pause = min(2*pause, last)
	} else {
		pause = first
	}
	p.shared.Store(0)
	p.moved.Store(at)
	p.pause.Store(pause)
	return true
}

func now() int64 { return int64(time.Since(start)) }

var start = time.Now()
