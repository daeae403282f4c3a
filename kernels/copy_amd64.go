//go:build !purego && !race

package kernels

import (
	"math/bits"
	"slices"
	"sync"
	"sync/atomic"
	"time"
	"unsafe"

	"golang.org/x/sys/cpu"
)

// moveString copies n bytes, which must not overlap, with REP MOVSB.
//
//go:noescape
func moveString(dst, src unsafe.Pointer, n int)

// moveAheadAVX512 and moveAheadAVX2 copy n bytes, 320 or more, which must not overlap. They ask for
// the lines of dst 1 KiB before they store to them (PREFETCHW).
//
//go:noescape
func moveAheadAVX512(dst, src unsafe.Pointer, n int)

//go:noescape
func moveAheadAVX2(dst, src unsafe.Pointer, n int)

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

// A way is a way to copy bytes that do not overlap.
type way uint32

const (
	whole way = iota // a string move, or Copy where these are slow
	ahead            // asks for lines before they are stored to
	ways
)

func (w way) copy(dst, src unsafe.Pointer, n int) {
	switch {
	case w == ahead && hasAVX512:
		moveAheadAVX512(dst, src, n)
	case w == ahead && hasAVX2:
		moveAheadAVX2(dst, src, n)
	case moves():
		moveString(dst, src, n)
	default:
		Copy(dst, src, n)
	}
}

// Which way is faster depends on the processor, on the length, and on where the lines of dst and
// src are. No copy shows that but those of the program: in each class of lengths copies take turns
// between the ways in a trial, are timed, and decide how the following ones are made. Later ones
// try again.
const (
	trialCopies = 32      // of each way in a trial
	trialPause  = 4 << 10 // copies from the beginning of a trial to that of the next
)

// trials has a trial for each class: lengths of less than 16 KiB, 64 KiB and 256 KiB, and others.
var trials [4]trial

// trial is what is known of a class of lengths.
type trial struct {
	best   atomic.Uint32 // a way
	copies atomic.Uint32 // of this trial, and since
	mu     sync.Mutex    // held during a copy of the trial
	times  [ways][]float64
}

func copyShared(dst, src unsafe.Pointer, n int) {
	t := &trials[min((bits.Len(uint(n))-bits.Len(sharedFrom))/2, len(trials)-1)]
	if i := t.copies.Add(1) - 1; i%trialPause >= trialCopies*uint32(ways) || !t.try(i, dst, src, n) {
		way(t.best.Load()).copy(dst, src, n)
	}
}

// try makes the i-th copy as one of the trial, and decides after the last. It reports whether it
// has: two goroutines do not try at once.
func (t *trial) try(i uint32, dst, src unsafe.Pointer, n int) bool {
	if !hasAVX2 || !t.mu.TryLock() {
		return false
	}
	defer t.mu.Unlock()
	// Copies of two kinds may take turns, as those to a ring and from it do. The sequence of Thue
	// and Morse gives each way as many of each.
	w := way(bits.OnesCount32(i) & 1)
	begin := time.Now()
	w.copy(dst, src, n)
	t.add(w, float64(time.Since(begin))/float64(n))
	return true
}

// add adds the time a byte of a copy to the trial.
func (t *trial) add(w way, time float64) {
	if len(t.times[w]) < trialCopies {
		t.times[w] = append(t.times[w], time)
	}
	for _, each := range t.times {
		if len(each) < trialCopies {
			return
		}
	}
	if quick(t.times[ahead]) < quick(t.times[whole]) {
		t.best.Store(uint32(ahead))
	} else {
		t.best.Store(uint32(whole))
	}
	for w := range t.times {
		t.times[w] = t.times[w][:0]
	}
}

// quick returns the sum of times without their longest quarter: those copies were interrupted, or
// were the first to touch their memory. It sorts times.
func quick(times []float64) (sum float64) {
	slices.Sort(times)
	for _, t := range times[:len(times)*3/4] {
		sum += t
	}
	return sum
}
