package resync

import "fmt"

// "fresh R SEQ" prints whether rank R, whose program has called operation SEQ last, needs no other
// exchange for a call of Recover.
func (s *script) fresh(args []string) error {
	r, m, err := s.rank(args, 0)
	if err != nil {
		return err
	}
	seq, err := number(args, 1)
	if err == nil {
		fmt.Fprintf(&s.out, "%d: fresh %t\n", r, m.Fresh(seq))
	}
	return err
}
