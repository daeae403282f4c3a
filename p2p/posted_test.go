package p2p

import (
	"slices"
	"testing"

	"pgregory.net/rapid"
)

// The receive that takes a message is the first posted one that matches it, as in a list that is
// searched from its beginning.
func TestFirstPostedReceiveTakesMessage(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		p := postings{lists: map[posting]*postingList{}}
		var model []*RecvReq
		slot, tag := rapid.IntRange(0, 2), rapid.Uint64Range(0, 2)
		fresh := func(t *rapid.T) *RecvReq {
			return &RecvReq{from: rapid.IntRange(AnySlot, 2).Draw(t, "from"), tag: rapid.Int64Range(AnyTag, 2).Draw(t,
				"tag")}
		}
		t.Repeat(map[string]func(*rapid.T){
			"add": func(t *rapid.T) {
				r := fresh(t)
				p.add(r)
				model = append(model, r)
			},
			"put back": func(t *rapid.T) {
				r := fresh(t)
				p.putBack(r)
				model = slices.Insert(model, 0, r)
			},
			"remove": func(t *rapid.T) {
				if len(model) == 0 {
					t.Skip("nothing is posted")
				}
				i := rapid.IntRange(0, len(model)-1).Draw(t, "which")
				if !p.remove(model[i]) || p.remove(model[i]) {
					t.Fatal("a posted receive is removed once")
				}
				model = slices.Delete(model, i, i+1)
			},
			"": func(t *rapid.T) {
				s, g := slot.Draw(t, "slot"), tag.Draw(t, "tag")
				var want *RecvReq
				for _, r := range model {
					if (r.from == AnySlot || r.from == s) && (r.tag == AnyTag || uint64(r.tag) == g) {
						want = r
						break
					}
				}
				if got := p.take(s, g); got != want {
					t.Fatalf("slot %d, tag %d: %+v, want %+v", s, g, got, want)
				}
				if len(model) == 0 && len(p.lists) != 0 {
					t.Fatalf("%d lists are left", len(p.lists))
				}
			},
		})
	})
}
