package resync

// "join R EPOCH MEMBERS" starts a process of rank R, which that view has admitted. It tells its
// standing in the view by "enter".
func (s *script) join(args []string) error {
	r, err := number(args, 0)
	if err != nil {
		return err
	}
	s.incarnations[int(r)]++
	v, err := s.parseView(args, 1)
	if err != nil {
		return err
	}
	m := New(int(r), View{})
	m.See(v)
	m.Aim(v.Epoch)
	s.ranks[int(r)] = m
	return nil
}
