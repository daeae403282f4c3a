package membership

import "fmt"

// "why P Q" prints the reason that a process has for the removal of another.
func (s *script) why(args []string) error {
	p, q, err := s.two(args)
	if err != nil {
		return err
	}
	fmt.Fprintf(&s.out, "  %q\n", p.m.Why(q.me))
	return nil
}
