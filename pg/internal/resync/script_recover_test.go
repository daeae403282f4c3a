package resync

import "fmt"

// "recover R SEQ" ends a call of Recover at rank R, whose program has called operation SEQ last,
// and prints which operation follows it, or that the call goes on in another exchange.
func (s *script) recover(args []string) error {
	r, m, err := s.rank(args, 0)
	if err != nil {
		return err
	}
	seq, err := number(args, 1)
	switch {
	case err != nil:
	case !m.Fresh(seq):
		fmt.Fprintf(&s.out, "%d: recover goes on\n", r)
	default:
		fmt.Fprintf(&s.out, "%d: recovers, operation %d is next\n", r, m.Recovered(seq)+1)
	}
	return err
}
