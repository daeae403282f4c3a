package membership

// "waits P Q" tells a process that it has waited for another in vain.
func (s *script) waits(args []string) error {
	p, q, err := s.two(args)
	if err != nil {
		return err
	}
	q.condemned = true
	s.w.step(p, Late{q.me})
	return nil
}
