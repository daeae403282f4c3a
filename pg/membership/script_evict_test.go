package membership

import "strconv"

// "evict P SLOT" tells a process to evict the rank in a slot.
func (s *script) evict(args []string) error {
	p, err := s.live(args, 0)
	if err != nil {
		return err
	}
	slot, err := strconv.Atoi(word(args, 1))
	if err != nil {
		return err
	}
	if x := s.w.process(Peer{slot, p.m.View().at(slot).Incarnation}); x != nil {
		x.condemned = true
	}
	s.w.step(p, Evict{slot})
	return nil
}
