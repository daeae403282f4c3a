package membership

// "get P [WORD]" delivers the first letter to a process, or the first that has WORD in it.
func (s *script) get(args []string) error {
	return s.deliver(args, false)
}
