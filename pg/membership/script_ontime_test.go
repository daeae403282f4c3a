package membership

// "ontime P Q" tells a process that another, for which it waited, has come.
func (s *script) ontime(args []string) error {
	p, q, err := s.two(args)
	if err != nil {
		return err
	}
	s.w.step(p, OnTime{q.me})
	return nil
}
