package exec

import (
	"encoding/binary"
	"fmt"
	"math"
	"math/bits"
	"time"

	"tutti/collectives"
)

// Plain memory of a peer on this machine can be copied in two ways: twice, through a ring, or once,
// by the kernel, straight from the peer's process (p2p.ProcessReader). Which one is faster depends
// on the kernel, on the size of the pages that the buffers are in (with pages of 2 MiB the kernel's
// copy takes a third of the time that it takes with pages of 4 KiB), on the caches, and on how many
// ranks share a core. Nothing but the calls themselves knows all that. So the ranks try both ways:
// of each kind and class of sizes the first calls alternate between them, are timed, and decide how
// the following ones run. Later calls try again.
//
// Every way has the same steps in the same order, or combines the same elements in the same order:
// the results do not depend on the times.

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
	// singleLeast is the number of bytes read at once from which on single copies are made if they
	// are made always, and singleTried from which on they are tried. Below, calls of the system
	// take longer than a copy.
	singleLeast = 4 << 10
	singleTried = 64 << 10
	// trialCalls is the number of calls of a trial, in which both ways take turns.
	trialCalls = 8
	// A trial is repeated after some calls: leastPause, and twice as many after each trial with the
	// same result, up to mostPause.
	leastPause = 128
	mostPause  = 4096
	// A single copy has to take less than this share of the time of two: at equal times rings are
	// preferred, because ranks work at their own pace then.
	singleShare = 0.95
	// A trial ends after warmCalls if its best single copy takes longer than the share hopeless.
	// The first call of each way does not count alone: it may be the first to touch its memory.
	warmCalls = 4
	hopeless  = 1.5
	// timeUnit is the unit of the times that ranks tell each other.
	timeUnit = 16 * time.Nanosecond
)

// reads reports whether n bytes may be read by a single copy.
func (s Single) reads(n int) bool {
	switch s {
	case SingleAuto:
		return n >= singleTried
	case SingleOn:
		return n >= singleLeast
	}
	return false
}

// trials decides for calls on plain memory whether their ranks read it. Every rank keeps the same
// accounts; in each call those of the lowest rank count.
type trials struct {
	of      map[trialKey]*trial
	current *trial // of the running call; nil: it is not tried
	size    int    // of the running call
	last    timed
}

// trialKey is a class of calls. In a class the largest size is less than twice the smallest.
type trialKey struct {
	kind  collectives.Kind
	class int
}

// trial is the account of a class. The times are the best of the trial, in time units a byte.
type trial struct {
	calls  int
	times  [2]float64 // of rings, of single copies
	single bool       // the result of the last trial
	ended  bool       // this one's result is known
	pause  int
}

// timed is the last call that was timed.
type timed struct {
	trial *trial
	seq   uint32
	way   int // 0: rings, 1: single copies
	size  int
	begin time.Time
	took  uint32 // in time units, 0: it has not ended well
}

// propose makes the trial of calls of a kind in which a rank reads size bytes from each other the
// current one, and reports whether the next call is to be a single copy.
func (t *trials) propose(kind collectives.Kind, size int) bool {
	key := trialKey{kind, bits.Len(uint(size))}
	at := t.of[key]
	if at == nil {
		if t.of == nil {
			t.of = map[trialKey]*trial{}
		}
		at = &trial{pause: leastPause}
		at.restart()
		t.of[key] = at
	}
	t.current, t.size = at, size
	if at.calls < trialCalls {
		return at.calls%2 == 1
	}
	return at.single
}

// undecided reports whether the running call belongs to a trial whose result is not known.
func (t *trials) undecided() bool { return t.current != nil && !t.current.ended }

// skip counts n calls like the running one that are made without an exchange.
func (t *trials) skip(n int) {
	if t.current != nil {
		t.current.count(n)
	}
}

// restart begins another trial.
func (t *trial) restart() { t.calls, t.times, t.ended = 0, [2]float64{math.Inf(1), math.Inf(1)}, false }

// begin starts the clock of the current call, when all ranks have begun it.
func (t *trials) begin(seq uint64, single bool) {
	if t.current == nil {
		return
	}
	t.last = timed{trial: t.current, seq: uint32(seq), size: t.size, begin: time.Now()}
	if single {
		t.last.way = 1
	}
	t.current.count(1)
}

// count counts n calls, after which it may be time for another trial.
func (t *trial) count(n int) {
	if t.calls += n; t.calls >= trialCalls+t.pause {
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
		at.times[t.last.way] = min(at.times[t.last.way], float64(slowest)/float64(t.last.size))
		at.decide()
	}
	t.last = timed{}
}

// decide ends a trial whose calls have all run, or whose single copies are hopeless.
func (t *trial) decide() {
	both := !math.IsInf(t.times[0], 1) && !math.IsInf(t.times[1], 1)
	if t.ended || t.calls < warmCalls || t.calls < trialCalls && !(both && t.times[1] > hopeless*t.times[0]) {
		return
	}
	single := both && t.times[1] < singleShare*t.times[0]
	t.calls = max(t.calls, trialCalls)
	if t.ended = true; single == t.single {
		t.pause = min(2*t.pause, mostPause)
	} else {
		t.single, t.pause = single, leastPause
	}
}
