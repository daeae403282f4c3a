package membership

// "missed P Q" tells a process that another has missed its deadline.
func (s *script) missed(args []string) error {
	p, q, err := s.two(args)
	if err != nil {
		return err
	}
	q.condemned = true
	s.w.step(p, Missed{q.me})
	return nil
}
