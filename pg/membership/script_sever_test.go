package membership

// "sever P Q [P]" breaks a link. Both ends notice, or the one that is named again.
func (s *script) sever(args []string) error {
	p, q, err := s.two(args)
	if err != nil {
		return err
	}
	only := word(args, 2)
	s.w.sever(p, q, only == "" || only == args[0], only == "" || only == args[1])
	return nil
}
