package resync

// "hear R FROM" delivers the oldest letter of rank FROM to rank R.
func (s *script) hear(args []string) error {
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
		s.deliver(i)
	}
	return err
}
