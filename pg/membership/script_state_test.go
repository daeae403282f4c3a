package membership

import "fmt"

// "state" prints which processes have which view, and what is under way.
func (s *script) state(_ []string) error {
	fmt.Fprintf(&s.out, "store: %v\n", s.w.current())
	for _, p := range s.w.procs {
		if !p.alive {
			continue
		}
		role := [...]string{"joiner", "member", "evicted", "closed"}[p.m.role]
		fmt.Fprintf(&s.out, "  %v: %s in epoch %d", p.me, role, p.m.View().Epoch)
		if p.m.Pending() {
			s.out.WriteString(", wants a change")
		}
		if p.cas != nil {
			s.out.WriteString(", proposal under way")
		}
		if n := len(p.mail); n > 0 {
			fmt.Fprintf(&s.out, ", %d letters", n)
		}
		s.out.WriteByte('\n')
	}
	return nil
}
