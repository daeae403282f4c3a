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
			for k, n := range p.Steps[j].Needs {
				if int(n) > i {
					p.Steps[j].Needs[k]--
				}
			}
		}
	}
	for _, c := range []struct {
		name  string
		kind  Kind
		algo  Algo
		spoil func(ps []*Plan)
		want  string
	}{
		{"deadlock", AllReduce, Flat, func(ps []*Plan) { // Sends before Recvs
			for _, p := range ps {
				p.Steps[0], p.Steps[1] = p.Steps[1], p.Steps[0]
				p.Steps[2].Needs = []int32{1}
			}
		}, "deadlock"},
		{"no Send", AllReduce, Flat, func(ps []*Plan) { remove(ps[0], 1) }, "deadlock"},
		{"no Recv", AllGather, Flat, func(ps []*Plan) { remove(ps[0], 1) }, "deadlock"},
		{"length", Broadcast, Flat, func(ps []*Plan) { find(ps[0], Send, 0).Src.Len-- }, "bytes"},
		{"no Needs", AllReduce, Flat, func(ps []*Plan) { find(ps[0], Combine, 0).Needs = nil }, "may still fill"},
		{"Needs a Send", AllReduce, Flat, func(ps []*Plan) { find(ps[0], Combine, 0).Needs = []int32{1} },
			"no earlier Recv"},
		{"writes In", AllReduce, Flat, func(ps []*Plan) { find(ps[0], Combine, 0).Dst.Buf = In }, "read only"},
		{"past the end", AllReduce, Flat, func(ps []*Plan) { find(ps[0], Send, 0).Src.Off++ }, "passes the end"},
		{"negative", AllReduce, Flat, func(ps []*Plan) { find(ps[0], Send, 0).Src.Off = -1 }, "passes the end"},
		{"part", AllReduce, Flat, func(ps []*Plan) { find(ps[0], Send, 0).Src.Part = 1 }, "passes the end"},
		{"peer", AllReduce, Flat, func(ps []*Plan) { find(ps[0], Send, 0).Peer = 0 }, "no such peer"},
		{"scratch never written", AllReduce, Flat, func(ps []*Plan) { remove(ps[0], 0) }, "needs 0"},
		{"reads rubbish", AllReduce, Doubling, func(ps []*Plan) { find(ps[0], Send, 0).Src.Buf = Tmp },
			"may still fill"},
		{"sources overlap Dst", AllReduce, Flat, func(ps []*Plan) {
			s := find(ps[0], Combine, 0)
			s.Dst.Len -= 4
			for i := range s.Srcs {
				s.Srcs[i].Len -= 4
			}
			s.Srcs[0].Off += 4
		}, "overlaps"},
		{"read twice", AllReduce, Flat, func(ps []*Plan) {
			ps[0].Steps = append(ps[0].Steps, Step{Verb: Send, Peer: 1, Src: find(ps[0], Recv, 0).Dst})
			ps[0].Steps[0].Once = true
			ps[1].Steps = append(ps[1].Steps, Step{Verb: Recv, Peer: 0, Dst: Ref{Buf: Tmp,
				Len: ps[1].Steps[0].Dst.Len}})
		}, "not all of it was written"},
		{"never read", AllReduce, Flat, func(ps []*Plan) { ps[0].Steps = ps[0].Steps[:2] }, "read once"},
		{"overwrites In", AllReduce, Flat, func(ps []*Plan) {
			p := ps[0]
			p.Steps = append(p.Steps, Step{Verb: Send, Peer: 1, Src: find(p, Send, 0).Src})
		}, "overwritten"},
		{"not marked direct", AllReduce, Direct, func(ps []*Plan) { ps[0].Direct = false }, "not marked"},
		{"leaves early", ReduceScatter, Direct, func(ps []*Plan) { remove(ps[1], 0) }, "same memory"},
		{"stores into a peer's memory", AllReduce, Direct, func(ps []*Plan) {
			s := find(ps[1], Combine, 0)
			s.Dst = s.Srcs[0]
		}, "a peer's"},
		{"says nothing after a load", AllReduce, Direct, func(ps []*Plan) {
			s := find(ps[0], Combine, 0)
			ps[0].Steps = append(ps[0].Steps, Step{Verb: Copy, Dst: s.Dst, Src: s.Srcs[1]})
		}, "sends nothing afterwards"},
		{"no barrier", Barrier, Flat, func(ps []*Plan) { ps[0].Steps, ps[1].Steps = nil, nil }, "has entered"},
		{"too many messages", Barrier, Flat, func(ps []*Plan) {
			ps[0].Steps = append(ps[0].Steps, Step{Verb: Send, Peer: 1})
		}, "never receives"},
		{"two calls", AllReduce, Flat, func(ps []*Plan) { ps[0].Algo = Ring }, "same call"},
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
				if err := Interpret(plans, mem, Schedule{Seed: seed, Eager: eager, Combine: combiner(4)}); err != nil {
					heard += err.Error() + "\n"
				}
			}
			if heard == "" || !strings.Contains(heard, c.want) {
				t.Errorf("heard %q, want %q", heard, c.want)
			}
		})
	}
}
