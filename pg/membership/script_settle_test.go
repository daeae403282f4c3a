package membership

// "settle" is flush, and lets time pass until no process has anything to do.
func (s *script) settle(_ []string) error {
	s.w.settle(2*s.w.cfg.Window + 3)
	return nil
}
