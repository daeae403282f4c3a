package torture

import (
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
)

// A cover counts which combinations were tried: of an operation, the memory of its destination,
// whether it works in place, how it is called and the disturbance.
type cover struct {
	pairs map[[2]string]int
	ops   map[Op]int
}

func newCover() *cover { return &cover{map[[2]string]int{}, map[Op]int{}} }

var (
	places = []string{"in place", "out of place"}
	ways   = []string{string(Blocking), string(AtOnce), string(Started), "together"}
	labels = []string{faultNone, "cancel", "deadline", "after", "mismatch", "lost", "network"}
)

// traits returns a rank's part of a step in each dimension; "" for none.
func (s *Step) traits(p *Part, together bool) [5]string {
	t := [5]string{0: string(s.Op), 4: s.label()}
	if s.Op.collective() && s.Op != Barrier {
		t[1] = string(p.Dst)
		t[2] = places[1]
		if s.Op == Broadcast || s.Op == Reduce || p.InPlace && s.Op.canBeInPlace() {
			t[2] = places[0]
		}
	}
	if s.Op.collective() {
		if t[3] = string(p.How); p.How == Blocking && s.Op == AllReduce && !p.InPlace {
			t[3] = string(AtOnce)
		}
		if together {
			t[3] = ways[3]
		}
	}
	return t
}

func (o Op) canBeInPlace() bool {
	switch o {
	case AllReduce, AllGather, AllGatherV, Gather, Scatter, Broadcast, Reduce:
		return true
	}
	return false
}

func pairsOf(t [5]string, each func(k [2]string)) {
	for i := range t {
		for j := range i {
			if t[i] != "" && t[j] != "" {
				each([2]string{t[j], t[i]})
			}
		}
	}
}

// score returns how often the rarest pair of a step was tried.
func (c *cover) score(s *Step, together bool) int {
	low := 1 << 30
	for i := range s.Ranks {
		pairsOf(s.traits(&s.Ranks[i], together), func(k [2]string) { low = min(low, c.pairs[k]) })
	}
	return low
}

func (c *cover) add(p *Program) {
	var one func(s *Step, together bool)
	one = func(s *Step, together bool) {
		c.ops[s.Op]++
		for i := range s.Ranks {
			pairsOf(s.traits(&s.Ranks[i], together), func(k [2]string) { c.pairs[k]++ })
		}
		for i := range s.Par {
			if s.Op == Together {
				one(&s.Par[i], true)
			}
		}
	}
	for i := range p.Steps {
		one(&p.Steps[i], false)
	}
}

// wanted lists all pairs that a transport can have.
func wanted(transport string) (all [][2]string) {
	skip := func(k [2]string) bool {
		op := Op(k[0])
		switch {
		case k[1] == places[0] && !op.canBeInPlace() && slices.Contains(collectiveOps, op):
			return true
		case k[1] == places[1] && (op == Broadcast || op == Reduce):
			return true
		case op == Barrier && (slices.Contains(mems, Mem(k[1])) || slices.Contains(places, k[1])):
			return true
		case transport == "inproc" && (k[1] == "lost" || k[1] == "network"):
			return true
		case k[0] == "together" && k[1] == "mismatch":
			return true
		}
		return false
	}
	var dims [5][]string
	for _, op := range collectiveOps {
		dims[0] = append(dims[0], string(op))
	}
	for _, m := range mems {
		dims[1] = append(dims[1], string(m))
	}
	dims[2], dims[3], dims[4] = places, ways, labels
	for i := range dims {
		for j := range i {
			for _, a := range dims[j] {
				for _, b := range dims[i] {
					if k := [2]string{a, b}; !skip(k) {
						all = append(all, k)
					}
				}
			}
		}
	}
	return all
}

// print prints the coverage, and the rare pairs.
func (c *cover) print(w io.Writer, transport string, least int) {
	all := wanted(transport)
	low, total := 1<<30, 0
	var rare []string
	for _, k := range all {
		n := c.pairs[k]
		low, total = min(low, n), total+1
		if n < least {
			rare = append(rare, fmt.Sprintf("%s with %s: %d", k[0], k[1], n))
		}
	}
	fmt.Fprintf(w,
		"coverage of operation x memory x place x call x fault: %d pairs, the rarest %d times; %d less than %d times\n",
		total, low, len(rare), least)
	if len(rare) > 0 {
		slices.Sort(rare)
		fmt.Fprintf(w, "  rare: %s\n", strings.Join(rare[:min(len(rare), 40)], "; "))
	}
	for _, op := range slices.Sorted(maps.Keys(c.ops)) {
		fmt.Fprintf(w, "  %-14s %d\n", op, c.ops[op])
	}
	for d, values := range [][]string{nil, {string(MemAlloc), string(MemOffset), string(MemPlain), string(MemOdd),
		string(MemGuard), string(MemDevice)}} {
		if d == 0 {
			continue
		}
		for _, v := range values {
			n := 0
			for _, op := range collectiveOps {
				n += c.pairs[[2]string{string(op), v}]
			}
			fmt.Fprintf(w, "  memory %-7s %d\n", v, n)
		}
	}
	for _, v := range labels {
		n := 0
		for _, op := range collectiveOps {
			n += c.pairs[[2]string{string(op), v}]
		}
		fmt.Fprintf(w, "  fault %-8s  %d\n", v, n)
	}
}
