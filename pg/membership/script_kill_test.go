package membership

// "kill P" ends a process. Its links break and its lease ends, in time.
func (s *script) kill(args []string) error {
	p, err := s.live(args, 0)
	if err != nil {
		return err
	}
	s.w.kill(p)
	return nil
}
