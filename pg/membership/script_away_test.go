package membership

// "away P" takes the store away from a process.
func (s *script) away(args []string) error {
	p, err := s.live(args, 0)
	if err != nil {
		return err
	}
	s.w.storeAway(p)
	return nil
}
