package exec

import (
	"encoding/binary"
	"fmt"
	"math"
	"math/bits"
	"time"

	"tutti/collectives"
	"tutti/kernels"
)

// Plain memory of a peer on this machine can be copied in three ways: twice, through a ring; the
// same with stores that bypass the sender's caches (p2p.Bypasser); or once, by the kernel, straight
// from the peer's process (p2p.ProcessReader). Which one is fastest depends on the kernel, on the
// size of the pages that the buffers are in (with pages of 2 MiB the kernel's copy takes a third of
// the time that it takes with pages of 4 KiB), on the caches, and on how many ranks share a core.
// Nothing but the calls themselves knows all that. So the ranks try all ways, one after the other:
// of each kind and class of sizes some early calls, of one size and type, are timed, and decide how
// the following ones run. Later calls try again. Ways do not alternate, because how long a call
// takes depends on the caches that the previous one has left.
//
// Every way has the same steps in the same order, or combines the same elements in the same order:
// the results do not depend on the times.

// way is a way to copy plain memory of a peer.
type way uint8

const (
	rings way = iota
	past      // rings, with stores that bypass the caches
	single
	ways
)

// Single says when a rank reads plain memory straight from its peers' processes.
type Single uint8

const (
	SingleAuto Single = iota // when that has been faster
	SingleOn                 // always, from singleLeast on
	SingleOff                // never
)

// ParseSingle reads "auto", "on" or "off".
func ParseSingle(s string) (Single, error) {
	for i, name := range [...]string{"auto", "on", "off"} {
		if s == name {
			return Single(i), nil
		}
	}
	return 0, fmt.Errorf("%q: expected auto, on or off", s)
}

const (
	// triedFrom is the number of bytes that a rank gets from another from which on other ways than
	// rings are tried, and singleLeast from which on single copies are made if they are made
	// always. Below, calls of the system take longer than a copy.
	triedFrom   = 64 << 10
	singleLeast = 4 << 10
	// The first trial follows after firstCalls calls through rings: calls that touch memory or use
	// links for the first time say nothing.
	firstCalls = 16
	// eachCalls is the number of calls of each way in a trial.
	eachCalls = 4
	// In a trial only calls like its first one count, because others may cost more for each byte.
	// After mostOthers others in a row all calls of the class do.
	mostOthers = 256
	// A trial is repeated after some calls: leastPause, and twice as many after each trial with the
	// same result, up to mostPause.
	leastPause = 256
	mostPause  = 8192
	// A way has to take less than this share of the time of an earlier one in the list: at equal
	// times rings are preferred, because ranks work at their own pace then.
	betterShare = 0.95
	// A way is given up when the times of warmCalls calls are known, if the best of them is longer
	// than the share hopeless of the best of another one. The first call of each way does not count
	// alone: it may be the first to touch its memory.
	warmCalls = 2
	hopeless  = 1.5
	// timeUnit is the unit of the times that ranks tell each other.
	timeUnit = 16 * time.Nanosecond
)

// reads reports whether n bytes may be read by a single copy.
func (s Single) reads(n int) bool {
	switch s {
	case SingleAuto:
		return n >= triedFrom
	case SingleOn:
		return n >= singleLeast
	}
	return false
}

// trials decides for calls on plain memory how it is copied. Every rank keeps the same accounts; in
// each call those of the lowest rank count.
type trials struct {
	of      map[trialKey]*trial
	current *trial    // of the running call; nil: it is not tried
	call    trialCall // the running one
	forced  bool      // this rank proposes single copies whatever the times are
	last    timed
}

// trialKey is a class of calls. In a class the largest size is less than twice the smallest.
type trialKey struct {
	kind  collectives.Kind
	class int
}

// trialCall is what the time of a call depends on beside its way.
type trialCall struct {
	kind  collectives.Kind
	dtype kernels.DType
	op    kernels.Op
	size  int // bytes that a rank gets from each other
}

// trial is the account of a class.
type trial struct {
	first trialCall     // the calls that count in this trial
	other int           // calls that did not, since the last one that did
	can   [ways]bool    // what this rank can do
	tries [ways]int     // calls that were to run each way
	known [ways]int     // calls of each way whose times are known
	times [ways]float64 // the best of them, in time units a byte
	best  way           // the result of the last trial
	ended bool          // this one's result is known
	calls int           // since then
	pause int
}

// timed is the last call that was timed.
type timed struct {
	trial *trial
	seq   uint32
	way   way
	size  int
	begin time.Time
	took  uint32 // in time units, 0: it has not ended well
}

// propose makes the trial of c's class the current one, and returns the way that c, the next call,
// is to run, of those that this rank can.
func (t *trials) propose(c trialCall, can [ways]bool) way {
	key := trialKey{c.kind, bits.Len(uint(c.size))}
	at := t.of[key]
	if at == nil {
		if t.of == nil {
			t.of = map[trialKey]*trial{}
		}
		at = &trial{ended: true, pause: leastPause, calls: leastPause - firstCalls}
		t.of[key] = at
	}
	t.current, t.call, at.can = at, c, can
	for i := range ways {
		w := (at.best + i) % ways // the others are given up sooner if its time is known
		if !at.ended && at.takes(c) && at.races(w) && at.tries[w] < eachCalls {
			return w
		}
	}
	if can[at.best] {
		return at.best
	}
	return rings
}

// room returns how many calls may follow the running one without an exchange, so that the next
// trial begins in time.
func (t *trials) room() int {
	switch {
	case t.current == nil || t.forced:
		return mostSent
	case !t.current.ended:
		return 0
	}
	return max(t.current.pause-t.current.calls-1, 0)
}

// restart begins another trial.
func (t *trial) restart() {
	t.ended, t.calls, t.tries, t.known = false, 0, [ways]int{}, [ways]int{}
	t.first, t.other = trialCall{}, 0
	for w := range t.times {
		t.times[w] = math.Inf(1)
	}
}

// takes reports whether the time of c counts in the trial: c is like its first call, or no call is
// for so long that the calls of the program have nothing in common but their class.
func (t *trial) takes(c trialCall) bool {
	return t.first == c || t.first == (trialCall{}) || t.other >= mostOthers
}

// begin starts the clock of the current call, when all ranks have begun it. It runs the way ran,
// which may be another one than was proposed by the rank that counts.
func (t *trials) begin(seq uint64, proposed, ran way) {
	at := t.current
	if at == nil {
		t.last = timed{}
		return
	}
	t.last = timed{seq: uint32(seq), way: ran, size: t.call.size, begin: time.Now()} // others may need it
	if at.admits(t.call) {
		t.last.trial = at
		at.tries[proposed]++
	}
}

// admits counts a call that begins, and reports whether it is one of the trial.
func (t *trial) admits(c trialCall) bool {
	switch {
	case t.ended:
		t.count()
		return false
	case !t.takes(c):
		t.other++
		return false
	case t.other < mostOthers:
		t.first, t.other = c, 0
	}
	return true
}

// count counts a call, after which it may be time for another trial.
func (t *trial) count() {
	if !t.ended {
		return
	}
	if t.calls++; t.calls >= t.pause {
		t.restart()
	}
}

// end stops the clock of a call that has succeeded.
func (t *trials) end() {
	if t.current == nil || t.last.took != 0 {
		return
	}
	t.last.took = uint32(min(max(time.Since(t.last.begin)/timeUnit, 1), math.MaxUint32))
}

// report writes the time of the last call for the others, in 8 bytes.
func (t *trials) report(d []byte) {
	binary.LittleEndian.PutUint32(d, t.last.seq)
	binary.LittleEndian.PutUint32(d[4:], t.last.took)
}

// learn takes the times of the last call from the descriptors of all ranks. The slowest one counts.
func (t *trials) learn(all []byte, active []int) {
	slowest := uint32(0)
	for _, slot := range active {
		d := all[slot*descSize+56:]
		took := binary.LittleEndian.Uint32(d[4:])
		if took == 0 || binary.LittleEndian.Uint32(d) != t.last.seq {
			return
		}
		slowest = max(slowest, took)
	}
	if at := t.last.trial; at != nil {
		w := t.last.way
		at.known[w]++
		at.times[w] = min(at.times[w], float64(slowest)/float64(t.last.size))
		at.decide()
	}
	t.last = timed{}
}

// races reports whether w may be the fastest way: it has not been tried often enough to know, or
// its time is near the best one.
func (t *trial) races(w way) bool {
	least := math.Inf(1)
	for w, time := range t.times {
		if t.can[w] {
			least = min(least, time)
		}
	}
	return t.can[w] && (t.known[w] < warmCalls && t.tries[w] < eachCalls || t.times[w] <= hopeless*least)
}

// decide ends a trial when each way that may be the fastest has run as often as it has to, or only
// one is left.
func (t *trial) decide() {
	left, best, missing := 0, rings, false
	for w := range ways {
		if !t.races(w) {
			continue
		}
		left++
		missing = missing || t.tries[w] < eachCalls
		if t.times[w] < betterShare*t.times[best] || math.IsInf(t.times[best], 1) {
			best = w
		}
	}
	if t.ended || missing && left > 1 {
		return
	}
	t.ended, t.calls = true, 0
	if best == t.best {
		t.pause = min(2*t.pause, mostPause)
	} else {
		t.best, t.pause = best, leastPause
	}
}
