package membership

import (
	"slices"
	"strconv"
	"strings"
)

// "tick P... [xN]" lets time pass N times at the processes that are named. "all" names all.
func (s *script) tick(args []string) error {
	times := 1
	for _, a := range args {
		if n, ok := strings.CutPrefix(a, "x"); ok {
			var err error
			if times, err = strconv.Atoi(n); err != nil {
				return err
			}
		}
	}
	for range times {
		for _, p := range s.w.procs {
			named := slices.ContainsFunc(args, func(a string) bool {
				x, err := s.proc(a)
				return err == nil && x == p
			})
			if p.alive && (word(args, 0) == "all" || named) {
				s.w.tick(p)
			}
		}
	}
	return nil
}
