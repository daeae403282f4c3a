package membership

// "heal P Q" restores a link.
func (s *script) heal(args []string) error {
	p, q, err := s.two(args)
	if err != nil {
		return err
	}
	s.w.heal(p, q)
	return nil
}
