package nvlink

import (
	"cmp"
	"fmt"
	"slices"
)

// Class is a way between the memories of two GPUs.
type Class uint8

// The classes, the slowest first.
const (
	ClassHost     Class = iota // through the host's memory: no other way is known
	ClassPCIe                  // one accesses the other's memory by PCIe
	ClassNVSwitch              // through NVSwitches
	ClassNVLink                // by NVLinks between the two
	ClassSame                  // they are the same GPU, or the same instance of one
)

// String names c.
func (c Class) String() string {
	return [...]string{"host", "PCIe", "NVSwitch", "NVLink", "same"}[c]
}

// MarshalText implements encoding.TextMarshaler.
func (c Class) MarshalText() ([]byte, error) { return []byte(c.String()), nil }

// Path is the best way between the memories of two GPUs.
type Path struct {
	Class Class `json:"class"`
	Links int   `json:"links,omitempty"` // NVLinks, of each of the two; 0 if they are not known
	Level Level `json:"level"`           // how near the two are by PCIe
}

// String returns a short form: "NV4" for four NVLinks, "NVS18" for 18 to NVSwitches, the level
// for PCIe ("P2P" if it is not known), "host", "same".
func (p Path) String() string {
	name := map[Class]string{ClassNVLink: "NV", ClassNVSwitch: "NVS"}[p.Class]
	switch {
	case name != "" && p.Links > 0:
		return fmt.Sprintf("%s%d", name, p.Links)
	case name != "":
		return name + "?"
	case p.Class == ClassPCIe && p.Level != LevelUnknown:
		return p.Level.String()
	case p.Class == ClassPCIe:
		return "P2P"
	}
	return p.Class.String()
}

// MarshalText implements encoding.TextMarshaler.
func (p Path) MarshalText() ([]byte, error) { return []byte(p.String()), nil }

// Path returns the best way between the memories of two spots of this machine. It is the same for
// (a, b) and (b, a): a way counts only if each of the two can read and write the other's memory by
// it. Spots must have a GPU of s.
func (s System) Path(a, b Spot) Path {
	p := Path{Level: s.pair(a.GPU, b.GPU).Level}
	if a == b {
		return Path{Class: ClassSame, Level: LevelBoard}
	}
	x, y := s.GPUs[a.GPU], s.GPUs[b.GPU]
	there, back := s.pair(a.GPU, b.GPU), s.pair(b.GPU, a.GPU)
	if p.Level == LevelUnknown {
		p.Level = cmp.Or(back.Level, x.Place.Level(y.Place))
	}
	if a.GPU == b.GPU { // instances do not access each other's memory
		p.Level = LevelBoard
		return p
	}
	if x.MIG == Yes || y.MIG == Yes || x.Problem != "" || y.Problem != "" ||
		both(there.Read, back.Read) == No || both(there.Write, back.Write) == No {
		return p
	}
	byNVLink := both(there.NVLink, back.NVLink)
	switch direct, known := s.direct(a.GPU, b.GPU); {
	case byNVLink == No:
	case direct > 0:
		p.Class, p.Links = ClassNVLink, direct
		return p
	case x.switched() > 0 && y.switched() > 0:
		if x.Fabric.joins(y.Fabric) {
			p.Class, p.Links = ClassNVSwitch, min(x.switched(), y.switched())
			return p
		}
	case byNVLink == Yes && !known:
		p.Class = ClassNVLink
		return p
	}
	if both(there.Read, back.Read) == Yes && both(there.Write, back.Write) == Yes &&
		both(there.PCIe, back.PCIe) != No {
		p.Class = ClassPCIe
	}
	return p
}

// pair returns what the driver says of two GPUs, nothing if it says nothing.
func (s System) pair(i, j int) Pair {
	if i >= len(s.Pairs) || j >= len(s.Pairs[i]) {
		return Pair{}
	}
	return s.Pairs[i][j]
}

// both is yes if both answers are, and no if one of them is.
func both(a, b Answer) Answer {
	switch {
	case a == No || b == No:
		return No
	case a == Yes && b == Yes:
		return Yes
	}
	return Unknown
}

// direct counts the NVLinks between two GPUs. A link that is up at one end only does not count,
// unless the other end's remote devices are not known. It also says whether all remote devices of
// one of the two are known.
func (s System) direct(i, j int) (n int, known bool) {
	a, aKnown := s.GPUs[i].linksTo(s.GPUs[j].PCI)
	b, bKnown := s.GPUs[j].linksTo(s.GPUs[i].PCI)
	switch {
	case aKnown && bKnown:
		return min(a, b), true
	case aKnown:
		return a, true
	case bKnown:
		return b, true
	}
	return max(a, b), false
}

// linksTo counts the links of g that are up and lead to the GPU with an address, and says whether
// the remote devices of all links are known. Without links, nothing is known.
func (g GPU) linksTo(pci string) (n int, known bool) {
	known = len(g.Links) > 0
	for _, l := range g.Links {
		switch {
		case !l.Up:
		case l.Remote == RemoteUnknown || l.Remote == RemoteGPU && l.PCI == "":
			known = false
		case l.Remote == RemoteGPU && l.PCI == pci:
			n++
		}
	}
	return n, known
}

// switched counts the links of g to switches that are up.
func (g GPU) switched() int {
	n := 0
	for _, l := range g.Links {
		if l.Up && l.Remote == RemoteSwitch {
			n++
		}
	}
	return n
}

// joins reports whether nothing says that two GPUs with links to switches do not reach each other
// through them. GPUs before Hopper, and old drivers, have no registration.
func (f Fabric) joins(o Fabric) bool {
	free := func(f Fabric) bool { return f.State == FabricUnknown || f.State == FabricNone }
	if free(f) && free(o) {
		return true
	}
	return f.State == FabricCompleted && o.State == FabricCompleted && f.Problem == "" && o.Problem == "" &&
		f.Cluster == o.Cluster && f.Clique == o.Clique
}

// NICLevel returns how near a GPU and a card are, both by their indices.
func (s System) NICLevel(gpu, nic int) Level { return s.GPUs[gpu].Place.Level(s.NICs[nic].Place) }

// NearestNICs returns, for each GPU, the indices of the cards that are nearest to it by PCIe and
// then by NUMA node. The first one is the GPU's own: GPUs to which the same cards are nearest use
// different ones, as far as there are enough. Cards without an active port are left out; without
// any other, a GPU has none. All processes of a machine get the same result.
func (s System) NearestNICs() [][]int {
	nearest := make([][]int, len(s.GPUs))
	for g := range s.GPUs {
		best := 0
		for n, c := range s.NICs {
			d := s.NICLevel(g, n).distance()
			switch {
			case c.Up == No || len(nearest[g]) > 0 && d > best:
				continue
			case d < best:
				nearest[g] = nil
			}
			best = d
			nearest[g] = append(nearest[g], n)
		}
		slices.SortFunc(nearest[g], func(a, b int) int {
			return cmp.Or(cmp.Compare(s.NICs[a].PCI, s.NICs[b].PCI), cmp.Compare(s.NICs[a].Name, s.NICs[b].Name))
		})
	}
	// Those with the fewest choices go first, so that the others keep off their cards.
	order := make([]int, len(s.GPUs))
	for i := range order {
		order[i] = i
	}
	slices.SortStableFunc(order, func(a, b int) int {
		return cmp.Or(cmp.Compare(len(nearest[a]), len(nearest[b])), cmp.Compare(s.GPUs[a].PCI, s.GPUs[b].PCI))
	})
	users := make([]int, len(s.NICs))
	for _, g := range order {
		if len(nearest[g]) == 0 {
			continue
		}
		first := 0
		for i, n := range nearest[g] {
			if users[n] < users[nearest[g][first]] {
				first = i
			}
		}
		nearest[g] = slices.Concat(nearest[g][first:], nearest[g][:first])
		users[nearest[g][0]]++
	}
	return nearest
}
