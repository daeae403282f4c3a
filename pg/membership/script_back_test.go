package membership

// "back P" gives the store back to a process.
func (s *script) back(args []string) error {
	p, err := s.live(args, 0)
	if err != nil {
		return err
	}
	s.w.storeBack(p, false)
	return nil
}
