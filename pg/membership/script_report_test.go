package membership

import "strconv"

// "report P Q SEQ [UNREACHABLE...]" gives a process the report of another in epoch 1.
func (s *script) report(args []string) error {
	p, q, err := s.two(args)
	if err != nil {
		return err
	}
	seq, err := strconv.ParseUint(word(args, 2), 10, 64)
	if err != nil {
		return err
	}
	r := Report{Epoch: 1, Seq: seq}
	for _, a := range args[3:] {
		x, err := parsePeer(a)
		if err != nil {
			return err
		}
		r.Unreachable = append(r.Unreachable, x)
		if l := s.w.process(x); l != nil && l != q {
			s.w.missed[s.w.pair(l, q)] = true
		}
	}
	s.w.step(p, Reported{q.me, r})
	return nil
}
