package membership

// "silence P" ends a process and its lease. Its links break, and nobody is told more.
func (s *script) silence(args []string) error {
	p, err := s.live(args, 0)
	if err != nil {
		return err
	}
	s.w.silence(p)
	return nil
}
