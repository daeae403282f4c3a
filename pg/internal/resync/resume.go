package resync

import "math"

// Standing is where one rank stands in the sequence of operations, which are numbered from 1 and
// run one at a time, in order. The ranks of a new view tell each other theirs before the first
// operation in it, and Resume computes from them the operation that the view begins with.
//
// An operation is over at a rank when its outcome, result or error, is certain and has been given
// to the program (or will be in any case). The result of a *uniform* operation does not end it: the
// rank has the result, and waits until it knows that all others have it too.
type Standing struct {
	// Over is the last operation that is over on this rank, and all before it are; 0: none.
	// Operation Over+1 is the one at hand, begun or not.
	Over uint64
	Has  bool // the operation at hand is uniform, and this rank has its result, unconfirmed
	// Intact: the operation at hand can run from its beginning. It has not begun, or it may be
	// retried and its inputs are unchanged.
	Intact bool
	// Given is the number of operations after the one at hand that this rank has given up too. If
	// it is not 0, the rank has given up the one at hand, and Has and Intact are false.
	Given uint64
	Joins bool // this rank has run no operation of this group: it begins where the others are, without a say

	Failed bool // the group has failed on this rank, and its program has to call Recover
	Calls  bool // the program has called Recover

	// Since is the operation that followed the program's latest Recover; 0: there was none. Stops
	// are such operations of any ranks, as far as this one knows. Resume uses neither.
	Since uint64
	Stops Stops

	// Last is the outcome of the last exchange that this rank completed, zero if there was none. It
	// binds ranks that took part and did not complete it, because a rank that completed it may have
	// continued since.
	Last Outcome

	More any // further fields of the driver, which Resume does not use
}

// Outcome is the result of Resume for an exchange.
type Outcome struct {
	At               Point
	Start, Confirmed uint64
}

// after reports whether s knows the outcome of a later exchange than o.
func (s Standing) after(o Standing) bool { return o.Last.At.Before(s.Last.At) }

// over reports whether all that the rank has given up ended with an outcome that it missed.
func (s Standing) over(o Outcome) bool { return s.Last.At.Before(o.At) && s.Next() <= o.Start }

// past returns the last operation that cannot follow the call of Recover that the rank is in: its
// program has called that operation before, or it followed an earlier Recover.
func (s Standing) past() uint64 { return max(s.Next()-1, s.Since) }

// Next is the earliest operation that the rank can still run.
func (s Standing) Next() uint64 {
	if s.Intact {
		return s.Over + 1
	}
	return s.Over + 2 + s.Given
}

// Resume returns with which operation a new view begins, from the standings of all its members, in
// any order. All members get the same result. Each rank applies it to its operation at hand, k =
// Over+1:
//
//   - k <= confirmed and the rank has the result: it counts, k is over;
//   - else k < start: k ends with an error, and is over. Operations between k and start that the
//     program starts later end with an error as well, without being run;
//   - else k == start: k runs from its beginning in the new view. k > start is impossible.
//
// start is the largest of the operations that the members can still run: no rank has to run an
// operation that it cannot, and one that succeeded anywhere is not run again. A result counts if
// every member has it, because a member may have confirmed it and died, or if a member is past it,
// and so knows that all had it. Otherwise no rank has given it to its program.
//
// A rank that gave up while others completed the exchange does not know its outcome. The next
// exchange assigns it that outcome, or what follows the operations that it gave up, whichever is
// later.
//
// This requires that a uniform operation is over only when it is confirmed, or by a Resume. A rank
// that gives up earlier (a deadline) may tell its program, but then it discards the result, and the
// operation stays at hand, neither Has nor Intact, until the next exchange. The operations that it
// gives up after that one, before the exchange, are Given.
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
			// The member missed the outcome, and has run nothing since: it stands at that
			// exchange's start, or after the operations that it gave up since.
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
	if !behind && reached < math.MaxUint64 { // else nothing was confirmed since; a member that is behind has no result
		confirmed = max(past, reached)
		start = max(start, confirmed+1)
	}
	return start, confirmed
}
