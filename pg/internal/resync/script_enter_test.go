package resync

import (
	"fmt"
	"strconv"
	"strings"
)

// "enter R over=N [given=N] [has] [intact] [joins] [failed] [calls] [renew] [passive]" has rank R
// enter an exchange with that standing, if it should. passive: its program does not wait.
func (s *script) enter(args []string) error {
	r, m, err := s.rank(args, 0)
	if err != nil {
		return err
	}
	var mine Standing
	var renew, passive bool
	for _, w := range args[1:] {
		switch name, value, _ := strings.Cut(w, "="); name {
		case "over":
			if mine.Over, err = strconv.ParseUint(value, 10, 64); err != nil {
				return err
			}
		case "given":
			if mine.Given, err = strconv.ParseUint(value, 10, 64); err != nil {
				return err
			}
		case "has":
			mine.Has = true
		case "intact":
			mine.Intact = true
		case "joins":
			mine.Joins = true
		case "failed":
			mine.Failed = true
		case "calls":
			mine.Calls = true
		case "renew":
			renew = true
		case "passive":
			passive = true
		default:
			return fmt.Errorf("%q is no part of a standing", w)
		}
	}
	if passive && !m.Asked(mine.Failed) || !passive && !m.Due(renew) {
		fmt.Fprintf(&s.out, "%d: stays in %v\n", r, m.At())
		return nil
	}
	tell, complete := m.Enter(renew, passive, mine)
	fmt.Fprintf(&s.out, "%d: enters %v with %v: %s\n", r, tell.At, m.In().Members, standing(tell.Standing))
	for _, slot := range m.In().Members {
		if slot != r && s.ranks[slot] != nil {
			s.letters = append(s.letters, letter{r, slot, tell})
		}
	}
	if complete {
		s.completed(r)
	}
	return nil
}
