package membership

import "fmt"

// "verdict P WHAT" answers the oldest probe of a process: unknown, alive or dead.
func (s *script) verdict(args []string) error {
	p, err := s.live(args, 0)
	if err != nil {
		return err
	}
	if len(p.probes) == 0 {
		return fmt.Errorf("%v has no probe", p.me)
	}
	what, err := choice(word(args, 1), "unknown", "alive", "dead")
	if err != nil {
		return err
	}
	s.w.answer(p, Verdict(what))
	return nil
}
