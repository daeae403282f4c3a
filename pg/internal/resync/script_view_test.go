package resync

import (
	"maps"
	"slices"
)

// "view EPOCH MEMBERS [R...]" shows that view to ranks R, or to all.
func (s *script) view(args []string) error {
	v, err := s.parseView(args, 0)
	if err != nil {
		return err
	}
	ranks := slices.Collect(maps.Keys(s.ranks))
	if len(args) > 2 {
		ranks = nil
		for i := 2; i < len(args); i++ {
			r, _, err := s.rank(args, i)
			if err != nil {
				return err
			}
			ranks = append(ranks, r)
		}
	}
	for _, r := range ranks {
		s.ranks[r].See(v)
	}
	return nil
}
