package collectives

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
)

// unordered finds, by looking at every pair of steps of a call, two that use the same bytes, one of
// them writing, and neither of which begins after the other has completed; or a step that uses a
// peer's memory and is not over when the peer leaves. It says "" if there are none. Memory that may
// be the same is taken for the same.
func unordered(plans []*Plan) string {
	type node struct{ rank, step int }
	before := map[node]map[node]bool{} // what is over when a step begins
	over := map[node]map[node]bool{}   // and when it has completed
	var find func(n node) bool
	busy := map[node]bool{}
	nth := func(n node) int {
		k := 0
		for j := range n.step {
			if plans[n.rank].Steps[j].lane() == plans[n.rank].Steps[n.step].lane() {
				k++
			}
		}
		return k
	}
	find = func(n node) bool {
		if over[n] != nil {
			return true
		}
		if busy[n] {
			return false // a circle
		}
		busy[n] = true
		s := &plans[n.rank].Steps[n.step]
		begin := map[node]bool{}
		add := func(to map[node]bool, d node) bool {
			if !find(d) {
				return false
			}
			for k := range over[d] {
				to[k] = true
			}
			return true
		}
		for _, d := range s.Needs {
			if !add(begin, node{n.rank, int(d)}) {
				return false
			}
		}
		end := map[node]bool{n: true}
		for k := range begin {
			end[k] = true
		}
		if s.Verb == Recv || s.Verb == WaitSignal {
			verb := Send
			if s.Verb == WaitSignal {
				verb = Signal
			}
			peer := plans[0].Shape.index(int(s.Peer))
			cause := node{peer, -1}
			left := nth(n)
			for j := range plans[peer].Steps {
				if o := &plans[peer].Steps[j]; o.Verb == verb && int(o.Peer) == plans[n.rank].Shape.Rank {
					if left--; left < 0 {
						cause.step = j
						break
					}
				}
			}
			if cause.step < 0 || !add(end, cause) {
				return false
			}
		}
		before[n], over[n] = begin, end
		return true
	}
	type use struct {
		at    node
		owner int
		key   memKey
		ref   Ref
		write bool
		local bool // a Copy of what is in its place where it may be
	}
	var uses []use
	for i, p := range plans {
		for j := range p.Steps {
			n := node{i, j}
			if !find(n) {
				return "a step that never begins"
			}
			s := &p.Steps[j]
			note := func(r Ref, write, local bool) {
				if r.Len == 0 {
					return
				}
				owner := i
				if r.Buf.Remote() {
					owner = p.Shape.index(int(r.Peer))
				}
				there := r
				if r.Buf.Remote() {
					there.Buf, there.Peer = r.Buf-PeerIn, 0
				}
				key := plans[owner].Shape.key(there)
				uses = append(uses, use{n, owner, key, there, write, local})
			}
			for _, r := range s.reads() {
				note(r, false, false)
			}
			if s.Verb != Send && s.Verb != Signal {
				note(s.Dst, true, s.Verb == Copy && p.Shape.key(s.Src) == p.Shape.key(s.Dst))
			}
		}
	}
	for i, a := range uses {
		if a.owner != a.at.rank {
			known := false
			for j := range plans[a.owner].Steps {
				known = known || over[node{a.owner, j}][a.at]
			}
			if !known {
				return fmt.Sprintf("rank %d leaves while %v uses its memory", a.owner, a.at)
			}
		}
		for _, b := range uses[:i] {
			if a.at != b.at && a.owner == b.owner && a.key == b.key && (a.write || b.write) &&
				(a.at.rank == b.at.rank || !a.local && !b.local) &&
				a.ref.Off < b.ref.Off+b.ref.Len && b.ref.Off < a.ref.Off+a.ref.Len &&
				!before[a.at][b.at] && !before[b.at][a.at] {
				return fmt.Sprintf("%v and %v of rank %d", a.at, b.at, a.owner)
			}
		}
	}
	return ""
}

// TestEveryNeedIsNecessary removes one need after the other from plans. If two steps can then use
// the same bytes concurrently, or a rank leaves early, the proof must find that, and nothing else.
func TestEveryNeedIsNecessary(t *testing.T) {
	for _, k := range Kinds() {
		for _, a := range Algorithms(k) {
			t.Run(k.String()+"/"+a.String(), func(t *testing.T) {
				t.Parallel()
				r := rand.New(rand.NewPCG(uint64(k), uint64(a)))
				tries, most, needed, found := 4, 5, 0, 0
				if testing.Short() {
					tries, most = 3, 3
				}
				for range tries {
					n := 2 + r.IntN(most-1)
					c := draw(r, k, a, n)
					c.shape.Elem, c.shape.Chunk = 8, 64
					c.shape.Count = min(c.shape.Count, 12*n)
					c.alias = true
					plans, mem, _, err := c.setUp()
					if err != nil {
						t.Fatal(err)
					}
					if why := unordered(plans); why != "" {
						t.Fatalf("%v: %s", c, why)
					}
					for i, p := range plans {
						for j := range p.Steps {
							needs := p.Steps[j].Needs
							for d := range needs {
								spoilt := *p
								spoilt.Steps = slices.Clone(p.Steps)
								spoilt.Steps[j].Needs = slices.Delete(slices.Clone(needs), d, d+1)
								plans[i] = &spoilt
								why := unordered(plans)
								m := &machine{rng: rand.New(rand.NewPCG(1, 1)), links: map[lane]*link{}}
								err := m.load(plans, mem)
								if err == nil {
									err = m.prove()
								}
								if why != "" {
									needed++
								}
								if err != nil {
									found++
								}
								if why != "" && err == nil {
									t.Fatalf("%v\n%v\nwithout need %d of step %d: %s, and the proof finds nothing",
										c, p, needs[d], j, why)
								}
								if why == "" && err != nil && !c.shape.Empty() {
									t.Fatalf("%v\n%v\nwithout need %d of step %d the proof finds %v, and there is "+
										"nothing", c, p, needs[d], j, err)
								}
							}
						}
						plans[i] = p
					}
				}
				if needed == 0 && (k.Reduces() || a == Ring || a.Requires() != Always && k != Barrier) {
					t.Errorf("no need of any plan counts")
				}
				t.Logf("%d needs count, %d were found", needed, found)
			})
		}
	}
}
