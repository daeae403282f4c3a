package pg

import (
	"testing"

	"tutti/pg/internal/join"
)

// Ranks map each other's memory only if each pair of their users may share memory.
func TestUsersThatMap(t *testing.T) {
	for _, c := range []struct {
		users [3]uint32
		want  bool
	}{
		{[3]uint32{7, 7, 7}, true},
		{[3]uint32{0, 0, 0}, true},
		{[3]uint32{7, 0, 7}, true},
		{[3]uint32{0, 7, 0}, true},
		{[3]uint32{7, 7, 8}, false},
		{[3]uint32{7, 0, 8}, false},
		{[3]uint32{0, 8, 7}, false},
	} {
		groups, err := Local(len(c.users), Config{})
		if err != nil {
			t.Fatal(err)
		}
		places := make([]join.Place, len(c.users))
		for r, u := range c.users {
			places[r] = join.Place{Machine: 1, Cores: 1, Maps: true, User: u}
		}
		for r, g := range groups {
			g.job.session.Mapped = true
			g.job.proxy.Lock()
			g.locate(places)
			if got := g.v.Caps; got.Mapped != c.want || got.SharedMemory != c.want {
				t.Errorf("users %v, rank %d: %+v, want mapped memory %v", c.users, r, got, c.want)
			}
			g.job.proxy.Unlock()
		}
		for _, g := range groups {
			g.Close()
		}
	}
}
