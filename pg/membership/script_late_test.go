package membership

import "fmt"

// "late" has the proposals that were late reach the store.
func (s *script) late(_ []string) error {
	for _, c := range s.w.limbo {
		fmt.Fprintf(&s.out, "  (%v: %t)\n", c, s.w.write(c, nil))
	}
	s.w.limbo = nil
	return nil
}
