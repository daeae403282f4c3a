package membership

import "fmt"

// "start SLOT/INCARNATION" begins a process, which knows what the store holds.
func (s *script) start(args []string) error {
	me, err := parsePeer(word(args, 0))
	if err != nil || me.Incarnation == 0 {
		return fmt.Errorf("start %s: want slot/incarnation (%v)", word(args, 0), err)
	}
	s.w.start(me, s.w.current())
	return nil
}
