package resync

import "slices"

// "kill R" ends the process of rank R. What it has sent may still arrive.
func (s *script) kill(args []string) error {
	r, _, err := s.rank(args, 0)
	if err != nil {
		return err
	}
	delete(s.ranks, r)
	s.letters = slices.DeleteFunc(s.letters, func(l letter) bool { return l.to == r })
	return nil
}
