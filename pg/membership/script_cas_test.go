package membership

import "fmt"

// "cas P [FATE]" has a proposal meet the store. FATE is answer, or mute (the answer is lost), lost
// (the proposal is), late (the proposal reaches the store at the next "late") or unsure (that a
// record is gone does not prove a death).
func (s *script) cas(args []string) error {
	p, err := s.live(args, 0)
	if err != nil {
		return err
	}
	if p.cas == nil {
		return fmt.Errorf("%v has no proposal", p.me)
	}
	fate, err := choice(word(args, 1), "answer", "mute", "lost", "late", "unsure")
	if err != nil {
		return err
	}
	s.w.cas(p, fate)
	return nil
}
