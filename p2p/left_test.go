package p2p_test

import (
	"errors"
	"slices"
	"testing"

	"tutti/p2p"
)

// A rank hears once that a peer has closed a channel, and after the channel has failed that the
// peer has aborted it, also from a peer that is linked later. It hears nothing of its own end.
func TestOnLeft(t *testing.T) {
	for _, c := range []struct {
		name                      string
		aborts, closes, own, late bool
		want                      []bool // of each call, whether the channel had failed
	}{
		{name: "closed", closes: true, want: []bool{false}},
		{name: "aborted", aborts: true, want: []bool{true}},
		{name: "aborted and closed", aborts: true, closes: true, want: []bool{true, true}},
		{name: "closed before the link", closes: true, late: true, want: []bool{false}},
		{name: "aborted before the link", aborts: true, closes: true, late: true, want: []bool{true, true}},
		{name: "this rank", own: true},
	} {
		t.Run(c.name, func(t *testing.T) {
			all := cluster(t, 2, 64<<10, nil)
			defer closeAll(all)
			ping, cs := pinger(t, all), tagged(t, all)
			var heard []bool
			all[1].Lock()
			cs[1].OnLeft(func(slot int) {
				if slot != 0 {
					t.Errorf("slot %d has left", slot)
				}
				heard = append(heard, cs[1].Err() != nil)
			})
			all[1].Unlock()
			use := func() { // a rank is told what it has not heard when it uses the channel
				all[1].Lock()
				cs[1].Notice([]int{0}, 0, []byte{1})
				all[1].Unlock()
				ping()
			}
			if !c.late {
				use()
			}
			if c.aborts {
				all[0].Lock()
				cs[0].Abort(errors.New("late"), []byte("its time was up"))
				all[0].Unlock()
			}
			if c.closes {
				cs[0].Close()
			}
			if c.own {
				all[1].Lock()
				cs[1].Abort(p2p.ErrClosed, nil)
				all[1].Unlock()
				cs[1].Close()
			}
			if c.late {
				use()
			}
			for range 3 {
				ping()
			}
			all[1].Lock()
			defer all[1].Unlock()
			if !slices.Equal(heard, c.want) {
				t.Errorf("heard %v, want %v", heard, c.want)
			}
		})
	}
}
