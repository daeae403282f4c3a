package collectives

import (
	"strings"
	"testing"
)

// TestFindsBadPlans spoils good plans and expects to hear of it, in Check or in Interpret.
func TestFindsBadPlans(t *testing.T) {
	find := func(p *Plan, v Verb, nth int) *Step {
		for i := range p.Steps {
			if p.Steps[i].Verb == v {
				if nth--; nth < 0 {
					return &p.Steps[i]
				}
			}
		}
		t.Fatalf("no such step in %v", p)
		return nil
	}
	remove := func(p *Plan, i int) {
		p.Steps = append(p.Steps[:i:i], p.Steps[i+1:]...)
		for j := range p.Steps {
			var needs []int32
			for _, n := range p.Steps[j].Needs {
				if int(n) > i {
					n--
				} else if int(n) == i {
					continue
				}
				needs = append(needs, n)
			}
			p.Steps[j].Needs = needs
		}
	}
	all := func(p *Plan) (needs []int32) {
		for i := range p.Steps {
			needs = append(needs, int32(i))
		}
		return needs
	}
	for _, c := range []struct {
		name  string
		kind  Kind
		algo  Algo
		spoil func(ps []*Plan)
		want  string
	}{
		{"deadlock", AllReduce, OneShot, func(ps []*Plan) { // Sends before Recvs
			for _, p := range ps {
				p.Steps[0], p.Steps[1] = p.Steps[1], p.Steps[0]
			}
		}, "deadlock"},
		{"no Send", AllReduce, OneShot, func(ps []*Plan) { remove(ps[0], 1) }, "deadlock"},
		{"no Recv", AllGather, OneShot, func(ps []*Plan) { remove(ps[0], 1) }, "deadlock"},
		{"length", Broadcast, OneShot, func(ps []*Plan) { find(ps[0], Send, 0).Src.Len-- }, "bytes"},
		{"no Needs", AllReduce, OneShot, func(ps []*Plan) { find(ps[0], ReduceInto, 0).Needs = nil }, "may still fill"},
		{"needs itself", AllReduce, OneShot, func(ps []*Plan) { find(ps[0], ReduceInto, 0).Needs = []int32{2} },
			"no earlier step"},
		{"does not wait until what it overwrites is sent", AllReduce, OneShot, func(ps []*Plan) {
			find(ps[0], ReduceInto, 0).Needs = []int32{0}
		}, "is not ordered before"},
		{"sends what may be lent", AllReduce, OneShot, func(ps []*Plan) {
			p := ps[0]
			p.Steps = append(p.Steps[:2], Step{Verb: Send, Peer: 1, Src: p.Steps[0].Dst, Needs: []int32{0}})
		}, "is combined once"},
		{"writes In", AllReduce, OneShot, func(ps []*Plan) { find(ps[0], ReduceInto, 0).Dst.Buf = In }, "read only"},
		{"past the end", AllReduce, OneShot, func(ps []*Plan) { find(ps[0], Send, 0).Src.Off++ }, "passes the end"},
		{"negative", AllReduce, OneShot, func(ps []*Plan) { find(ps[0], Send, 0).Src.Off = -1 }, "passes the end"},
		{"part", AllReduce, OneShot, func(ps []*Plan) { find(ps[0], Send, 0).Src.Part = 1 }, "passes the end"},
		{"peer", AllReduce, OneShot, func(ps []*Plan) { find(ps[0], Send, 0).Peer = 0 }, "no such peer"},
		{"scratch never written", AllReduce, OneShot, func(ps []*Plan) { remove(ps[0], 0) },
			"not all of it was written"},
		{"reads rubbish", AllReduce, Doubling, func(ps []*Plan) { find(ps[0], Send, 0).Src.Buf = Tmp },
			"may still fill"},
		{"sources overlap Dst", AllReduce, OneShot, func(ps []*Plan) {
			s := find(ps[0], ReduceInto, 0)
			s.Dst.Len -= 4
			for i := range s.Srcs {
				s.Srcs[i].Len -= 4
			}
			s.Srcs[0].Off += 4
		}, "overlaps"},
		{"read twice", AllReduce, OneShot, func(ps []*Plan) {
			c := *find(ps[0], ReduceInto, 0)
			c.Needs, c.Srcs = all(ps[0]), []Ref{ps[0].Steps[0].Dst}
			ps[0].Steps = append(ps[0].Steps, c)
		}, "not all of it was written"},
		{"never read", AllReduce, OneShot, func(ps []*Plan) { ps[0].Steps = ps[0].Steps[:2] },
			"no step reads a Once Recv"},
		{"overwrites In", AllReduce, OneShot, func(ps []*Plan) {
			p := ps[0]
			p.Steps = append(p.Steps, Step{Verb: Send, Peer: 1, Src: find(p, Send, 0).Src, Needs: all(p)})
		}, "overwritten"},
		{"not marked loadstore", AllReduce, LoadStore, func(ps []*Plan) { ps[0].LoadStore = false }, "not marked"},
		{"leaves early", ReduceScatter, LoadStore, func(ps []*Plan) { remove(ps[1], 0) }, "same memory"},
		{"stores into a peer's memory", AllReduce, LoadStore, func(ps []*Plan) {
			s := find(ps[1], ReduceInto, 0)
			s.Dst = s.Srcs[0]
		}, "a peer's"},
		{"says nothing after a load", AllReduce, LoadStore, func(ps []*Plan) {
			s := find(ps[0], ReduceInto, 0)
			ps[0].Steps = append(ps[0].Steps, Step{Verb: Copy, Dst: s.Dst, Src: s.Srcs[1], Needs: all(ps[0])})
		}, "sends nothing afterwards"},
		{"not marked onesided", AllGather, OneSided, func(ps []*Plan) { ps[0].OneSided = false }, "not marked"},
		{"puts into a peer's In", AllGather, OneSided, func(ps []*Plan) { find(ps[0], Put, 0).Dst.Buf = PeerIn },
			"the wrong memory"},
		{"puts past the end", AllGather, OneSided, func(ps []*Plan) { find(ps[0], Put, 0).Dst.Off++ },
			"passes the end"},
		{"puts past the end of scratch memory", AllReduce, OneSided, func(ps []*Plan) {
			find(ps[0], Put, 0).Dst.Off = ps[1].Tmp
		}, "passes the end"},
		{"tells before it has put", AllGather, OneSided, func(ps []*Plan) { find(ps[0], Signal, 0).Needs = nil },
			"same memory"},
		{"sends no signal", AllGather, OneSided, func(ps []*Plan) {
			remove(ps[0], 2)
			remove(ps[1], 0)
		}, "same memory"},
		{"waits for a signal that is not sent", AllGather, OneSided, func(ps []*Plan) { remove(ps[0], 2) }, "deadlock"},
		{"combines what is not there", AllReduce, OneSided, func(ps []*Plan) {
			find(ps[0], ReduceInto, 0).Needs = find(ps[0], ReduceInto, 0).Needs[1:]
		}, "same memory"},
		{"no barrier", Barrier, OneShot, func(ps []*Plan) { ps[0].Steps, ps[1].Steps = nil, nil }, "has entered"},
		{"too many messages", Barrier, OneShot, func(ps []*Plan) {
			ps[0].Steps = append(ps[0].Steps, Step{Verb: Send, Peer: 1})
		}, "never receives"},
		{"two calls", AllReduce, OneShot, func(ps []*Plan) { ps[0].Algo = Ring }, "same call"},
	} {
		t.Run(c.name, func(t *testing.T) {
			s := Shape{Kind: c.kind, Size: 2, Active: []int{0, 1}, Elem: 4, Count: 64}
			heard := ""
			for seed := range uint64(20) {
				plans := buildAll(t, c.algo, s)
				c.spoil(plans)
				var mem []Memory
				for _, p := range plans {
					mem = append(mem, Memory{make([]byte, size(p.Shape, In)), make([]byte, size(p.Shape, Out))})
				}
				eager := c.name == "too many messages" || c.name == "leaves early" && seed%2 == 0
				if err := Interpret(plans, mem, Schedule{Seed: seed, Eager: eager, Fold: reducer(4)}); err != nil {
					heard += err.Error() + "\n"
				}
			}
			if heard == "" || !strings.Contains(heard, c.want) {
				t.Errorf("heard %q, want %q", heard, c.want)
			}
		})
	}
}
