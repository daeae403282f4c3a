package resync

// "aim R EPOCH" demands that the next operation of rank R run in a view of that epoch or later: it
// has called Admit, and the job has grown.
func (s *script) aim(args []string) error {
	_, m, err := s.rank(args, 0)
	if err != nil {
		return err
	}
	epoch, err := number(args, 1)
	if err == nil {
		m.Aim(epoch)
	}
	return err
}
