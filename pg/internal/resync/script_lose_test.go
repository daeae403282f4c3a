package resync

import "slices"

// "lose R FROM" drops the oldest letter of rank FROM to rank R: the link has broken.
func (s *script) lose(args []string) error {
	r, _, err := s.rank(args, 0)
	if err != nil {
		return err
	}
	from, err := number(args, 1)
	if err != nil {
		return err
	}
	i, err := s.oldest(r, int(from))
	if err == nil {
		s.letters = slices.Delete(s.letters, i, i+1)
	}
	return err
}
