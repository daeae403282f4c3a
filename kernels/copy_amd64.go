//go:build !purego && !race

package kernels

import (
	"math"
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

// moveNonTemporalAVX512 and moveNonTemporalAVX2 copy n bytes, 320 or more, which must not overlap.
// Their stores (VMOVNTDQ) bypass the caches, and are ordered before later ones (SFENCE).
//
//go:noescape
func moveNonTemporalAVX512(dst, src unsafe.Pointer, n int)

//go:noescape
func moveNonTemporalAVX2(dst, src unsafe.Pointer, n int)

// Acquire begins to take the cache lines of n bytes at an address from other processors, where the
// processor can do that: stores to them that follow in some tens of nanoseconds need not wait for
// them. It changes no memory, and the address need not be valid.
func Acquire(at uintptr, n int)

// acquireMax bounds what AcquireOut takes, in bytes.
const acquireMax = 4 << 10

// AcquireOut is Acquire for the beginning of a CopyOut of n bytes, unless that is long, or will be
// a string move. String moves and non-temporal stores take lines without moving them, and would
// wait for those that are moved.
func AcquireOut(at uintptr, n int) {
	if n < sharedFrom || n < outFrom && (way(class(sharedTrials, n).best.Load()) == ahead || !moves()) {
		Acquire(at, min(n, acquireMax))
	}
}

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
	whole       way = iota // a string move, Copy where these are slow, or ahead where one would be
	ahead                  // asks for lines before they are stored to
	nonTemporal            // bypasses the caches
	ways
)

// aliased reports whether string moves from src to dst may be slow: that dst is less than a cache
// line behind src, modulo 4096. On an AMD EPYC (Zen 3) they take ten times as long then, because
// the processor takes that for an overlap.
func aliased(dst, src unsafe.Pointer) bool {
	behind := (uintptr(dst) - uintptr(src)) % 4096
	return 0 < behind && behind < 64
}

func (w way) copy(dst, src unsafe.Pointer, n int) {
	switch {
	case w == nonTemporal && hasAVX512:
		moveNonTemporalAVX512(dst, src, n)
	case w == nonTemporal && hasAVX2:
		moveNonTemporalAVX2(dst, src, n)
	case w != ahead && !moves():
		Copy(dst, src, n)
	case w != ahead && !aliased(dst, src):
		moveString(dst, src, n)
	case hasAVX512:
		moveAheadAVX512(dst, src, n)
	case hasAVX2:
		moveAheadAVX2(dst, src, n)
	default:
		Copy(dst, src, n)
	}
}

// Which way is faster depends on the processor, on the length, and on where the lines of dst and
// src are. No copy shows that but those of the program: in each class of lengths copies take turns
// between the ways in a trial, are timed, and decide how the following ones are made. Later ones
// try again. A transfer is a copy, or several that are counted as one.

// trial is what is known of a class of lengths of transfers.
type trial struct {
	*rules
	best    atomic.Uint32 // a way
	made    atomic.Uint32 // transfers of this trial, and since, in parts
	running atomic.Bool   // copies of it have been made
	mu      sync.Mutex    // held during a copy of the trial
	times   [ways][]float64
}

// rules are those of the trials of a function.
type rules struct {
	ways  way    // below which they try
	turns uint32 // of each way
	turn  uint32 // transfers in a turn
	skip  uint32 // of these that do not count
	pause uint32 // transfers from the beginning of a trial to that of the next: a power of two
}

// How long a copy takes depends on the way of the previous ones to the same memory, too: it decides
// in what state the reader's cache has the lines of dst. So the turns of CopyOut are long. On an
// AMD EPYC (Zen 4) a string move of 512 KiB takes 34 us after many others, and 13 us in the first
// sixteen after non-temporal stores.
var (
	sharedRules = rules{ways: nonTemporal, turns: 32, turn: 1, pause: 4 << 10}
	outRules    = rules{ways: ways, turns: 1, turn: 64, skip: 32, pause: 16 << 10}
)

// A trial sees the time of the writer alone. The reader of what was copied by non-temporal stores
// takes it from memory instead of the writer's cache. That takes it lateRead longer, whatever the
// length, since it reads ahead (measured on an AMD EPYC with 64 KiB to 1 MiB: 1.8 to 2.5 us).
const lateRead = 2 * time.Microsecond

// sharedTrials are those of CopyShared, and outTrials those of CopyOut: of lengths of less than 16
// KiB, 64 KiB, 256 KiB and so on, and others. CopyOut does not use the first two.
var (
	sharedTrials = newTrials(4, &sharedRules)
	outTrials    = newTrials(7, &outRules)
)

const (
	// A way has to take less than this share of the time of an earlier one in the list.
	betterShare = 0.95

	parts      = 256 // in a transfer
	leastTimes = 16  // of copies of each way, to decide
	mostTimes  = 256 // of copies of each way that count
)

func newTrials(classes int, r *rules) []trial {
	t := make([]trial, classes)
	for i := range t {
		t[i].rules = r
	}
	return t
}

// class returns the trial of copies of n bytes.
func class(trials []trial, n int) *trial {
	return &trials[min((bits.Len(uint(n))-bits.Len(sharedFrom))/2, len(trials)-1)]
}

func copyShared(dst, src unsafe.Pointer, n int) { class(sharedTrials, n).copy(dst, src, n, n) }

func copyOut(dst, src unsafe.Pointer, n, of int) { class(outTrials, of).copy(dst, src, n, of) }

func copyNonTemporal(dst, src unsafe.Pointer, n int) { nonTemporal.copy(dst, src, n) }

// NonTemporal reports whether CopyNonTemporal bypasses the caches on this processor.
func NonTemporal() bool { return hasAVX2 }

// copy copies n bytes of a transfer of of.
func (t *trial) copy(dst, src unsafe.Pointer, n, of int) {
	part := uint32(max(uint64(n)*parts/uint64(of), 1))
	i := (t.made.Add(part) - part) / parts % t.pause
	if i < t.length() && t.try(i, dst, src, n, of) {
		return
	}
	if i >= t.length() && t.running.Load() {
		t.decide()
	}
	way(t.best.Load()).copy(dst, src, n)
}

// length returns the number of transfers of a trial.
func (r *rules) length() uint32 { return uint32(r.ways) * r.turns * r.turn }

// way returns that of the i-th transfer. Each way has one turn in as many turns as there are ways.
// Copies of several kinds may take turns, as those to a ring and from it do: so that each way has
// as many of each kind, its turn moves by the sequence of Thue and Morse.
func (r *rules) way(i uint32) way {
	n := uint32(r.ways)
	i /= r.turn
	return way((i + uint32(bits.OnesCount32(i/n))) % n)
}

// try makes a copy of the i-th transfer of the trial. It reports whether it has: two goroutines do
// not try at once.
func (t *trial) try(i uint32, dst, src unsafe.Pointer, n, of int) bool {
	if !hasAVX2 || !t.mu.TryLock() {
		return false
	}
	defer t.mu.Unlock()
	t.running.Store(true)
	w := t.way(i)
	begin := time.Now()
	w.copy(dst, src, n)
	each := float64(time.Since(begin)) / float64(n)
	if w == nonTemporal {
		each += float64(lateRead) / float64(of)
	}
	if i%t.turn >= t.skip {
		t.add(w, each)
	}
	return true
}

// add adds the time a byte of a copy to the trial.
func (t *trial) add(w way, time float64) {
	if len(t.times[w]) < mostTimes {
		t.times[w] = append(t.times[w], time)
	}
}

// decide ends a trial, unless another goroutine makes a copy of it or does the same. It changes
// nothing if a way has not been tried often enough.
func (t *trial) decide() {
	if !t.mu.TryLock() {
		return
	}
	defer t.mu.Unlock()
	if !t.running.Swap(false) {
		return
	}
	defer func() {
		for w := range t.times {
			t.times[w] = t.times[w][:0]
		}
	}()
	best, least := whole, math.Inf(1)
	for w, times := range t.times[:t.ways] {
		if len(times) < leastTimes {
			return
		}
		if time := quick(times); time < betterShare*least {
			best, least = way(w), time
		}
	}
	t.best.Store(uint32(best))
}

// quick returns the mean of the times without their longest quarter: those copies were interrupted,
// or were the first to touch their memory. It sorts times.
func quick(times []float64) float64 {
	slices.Sort(times)
	times = times[:len(times)*3/4]
	sum := 0.0
	for _, t := range times {
		sum += t
	}
	return sum / float64(len(times))
}
