package membership

// "twice P [WORD]" is get, but the letter stays and comes again.
func (s *script) twice(args []string) error {
	return s.deliver(args, true)
}
