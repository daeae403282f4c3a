package membership

import "fmt"

// "mail P" prints the letters that a process has not got.
func (s *script) mail(args []string) error {
	p, err := s.live(args, 0)
	if err != nil {
		return err
	}
	for _, m := range p.mail {
		fmt.Fprintf(&s.out, "  %s\n", letter(m))
	}
	return nil
}
