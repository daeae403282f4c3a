package resync

import "math"

// Standing is where one rank stands in the sequence of operations, which are numbered from 1 and
// run one at a time, in order. The ranks of a new view tell each other theirs before anything else
// runs in it, and Resume makes of all of them the operation that the view begins with.
//
// An operation is over at a rank when its outcome, result or error, is certain and has been given
// to the program (or will be, whatever happens). Of a *uniform* operation the result alone is not
// the end: the rank has it, and waits until it knows that all others have it too.
type Standing struct {
	// the last operation that is over here, and with it all before; 0: none. Operation Over+1 is
	// the one at hand, begun or not
	Over uint64
	Has  bool // the operation at hand is uniform, and its result is here, unconfirmed
	// the operation at hand can run from its beginning: it has not begun, or it may be retried and
	// its inputs are as they were
	Intact bool
	Joins  bool // this rank has run no operation of this group yet: it begins where the others go on, and has no say

	Failed bool // the group has failed here, and its program is to call Recover
	Calls  bool // it has called it

	// The outcome of the last exchange that this rank completed, zero if there was none. It binds
	// ranks that took part in it and failed to complete it, because some that did may have gone on
	// since.
	Last Outcome

	More any // what the driver tells besides: not looked at
}

// Outcome is what Resume made of the standings of an exchange.
type Outcome struct {
	At               Point
	Start, Confirmed uint64
}

// after compares the exchanges whose outcomes s and o know.
func (s Standing) after(o Standing) bool { return o.Last.At.Before(s.Last.At) }

// Next is the earliest operation that the rank can still run.
func (s Standing) Next() uint64 {
	if s.Intact {
		return s.Over + 1
	}
	return s.Over + 2
}

// Resume says with which operation a new view begins, from the standings of all its members, in any
// order; all get the same. Every rank applies it to its operation at hand, k = Over+1, so:
//
//   - k <= confirmed and the rank has the result: it counts, k is over;
//   - else k < start: k ends with an error, and is over; so are those between k and start that the
//     program starts later, without being run;
//   - else k == start: k runs from its beginning in the new view. k > start cannot be.
//
// start is the largest of what each can still run, so that nobody has to run what it cannot, and an
// operation that ended well anywhere is not run again. A result counts if every member has it, for
// then somebody may have confirmed it and died, or if one is past it, who knows that all had it;
// else surely nobody has given it to the program.
//
// A rank that gave up while the others' exchange was completed does not know its outcome: the next
// one holds it to that, or to what it gave up, whichever is later.
//
// This holds if a uniform operation is over only when it is confirmed, or by a Resume. A rank that
// gives up earlier (a deadline) may tell its program so, but then it throws the result away, and
// the operation stays at hand, neither Has nor Intact, until the next exchange.
func Resume(standings []Standing) (start, confirmed uint64) {
	start = 1
	var last Standing
	for _, s := range standings {
		if s.after(last) {
			last, start, confirmed = s, s.Last.Start, s.Last.Confirmed
		}
	}
	behind, past, reached := false, uint64(0), uint64(math.MaxUint64)
	for _, s := range standings {
		switch {
		case s.Joins:
		case last.after(s):
			// It did not hear what was settled, and has run nothing since: it stands where that
			// exchange put it, at start, or after what it gave up since.
			behind = true
			start = max(start, s.Next())
		default:
			start, past = max(start, s.Next()), max(past, s.Over)
			if s.Has {
				reached = min(reached, s.Over+1)
			} else {
				reached = min(reached, s.Over)
			}
		}
	}
	if !behind && reached < math.MaxUint64 { // else nothing was confirmed since: one that is behind has no result
		confirmed = max(past, reached)
		start = max(start, confirmed+1)
	}
	return start, confirmed
}
