package membership

// "down P Q" tells a process that its link to another is down.
func (s *script) down(args []string) error {
	p, q, err := s.two(args)
	if err != nil {
		return err
	}
	s.w.missed[s.w.pair(p, q)] = true
	s.w.step(p, LinkDown{q.me, "connection lost"})
	return nil
}
