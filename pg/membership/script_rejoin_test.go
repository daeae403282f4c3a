package membership

// "rejoin P" has an evicted process go on as the next incarnation.
func (s *script) rejoin(args []string) error {
	p, err := s.live(args, 0)
	if err != nil {
		return err
	}
	s.w.rejoin(p, int(p.me.Incarnation%16)+1)
	return nil
}
