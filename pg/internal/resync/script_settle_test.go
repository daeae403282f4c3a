package resync

// "settle" delivers all letters, in the order in which they were sent.
func (s *script) settle([]string) error {
	for len(s.letters) > 0 {
		s.deliver(0)
	}
	return nil
}
