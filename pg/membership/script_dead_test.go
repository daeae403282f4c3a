package membership

// "dead P Q" tells a process that another is dead.
func (s *script) dead(args []string) error {
	p, q, err := s.two(args)
	if err != nil {
		return err
	}
	q.condemned = true
	s.w.step(p, Dead{q.me, "a process said so"})
	return nil
}
