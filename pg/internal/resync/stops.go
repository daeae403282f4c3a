package resync

import "math"

// Stops are operations that followed calls of Recover on some rank: the first few, ascending. 0, at
// the end, stands for none.
type Stops [4]uint64

// add adds n, unless it is 0 or there is no room for it.
func (s *Stops) add(n uint64) {
	for i := range s {
		switch {
		case n == 0 || n == s[i]:
			return
		case s[i] == 0 || n < s[i]:
			s[i], n = n, s[i]
		}
	}
}

// merge adds those of o, which may be in any order.
func (s *Stops) merge(o Stops) {
	for _, n := range o {
		s.add(n)
	}
}

// forget removes those up to n.
func (s *Stops) forget(n uint64) {
	var kept Stops
	for _, stop := range s {
		if stop > n {
			kept.add(stop)
		}
	}
	*s = kept
}

// after returns the first one after n, or the highest number.
func (s Stops) after(n uint64) uint64 {
	for _, stop := range s {
		if stop > n {
			return stop
		}
	}
	return math.MaxUint64
}
