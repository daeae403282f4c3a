package membership

// "admit P" tells a process to admit those that wait.
func (s *script) admit(args []string) error {
	p, err := s.live(args, 0)
	if err != nil {
		return err
	}
	s.w.step(p, Admit{})
	return nil
}
