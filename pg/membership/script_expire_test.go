package membership

// "expire P" ends the lease of a live process.
func (s *script) expire(args []string) error {
	p, err := s.live(args, 0)
	if err != nil {
		return err
	}
	s.w.expire(p)
	return nil
}
