package resync

import (
	"fmt"
	"slices"
)

// "ask R [failed] [renew]" prints whether rank R should enter an exchange before its next operation
// (due), and whether others wait for it in one while its program does not wait (asked). failed: its
// group has failed; renew: its channel is broken, or its program calls Recover.
func (s *script) ask(args []string) error {
	r, m, err := s.rank(args, 0)
	if err == nil {
		fmt.Fprintf(&s.out, "%d: due %t, asked %t\n", r, m.Due(slices.Contains(args, "renew")),
			m.Asked(slices.Contains(args, "failed")))
	}
	return err
}
