package resync

import "slices"

// A Parting is what a rank tells its neighbours in a tree of the group's ranks about ranks that
// close the group. Its numbers only grow within a view.
type Parting struct {
	Epoch  uint64 // of the group's view
	Wanted uint64 // the latest operation that a closing rank has run, as far as the teller knows
	Below  uint64 // all ranks of the teller's subtree have come to this operation
	All    uint64 // all ranks of the group have
}

// Partings is the state of one rank with regard to ranks that close the group. A rank that has run
// operation n, and is about to close the group, wants to know that every rank has come to n. What
// it wants is passed on through the tree; each rank tells its parent when its subtree has come to
// what is wanted, and the root then tells all. The zero value is a rank that has told nothing. It
// is not safe for concurrent use.
type Partings struct {
	told  Parting
	heard map[int]Parting
}

// Told returns what the neighbours are to know of this rank.
func (p *Partings) Told() Parting { return p.told }

// Hear handles what the rank in slot has told.
func (p *Partings) Hear(slot int, t Parting) {
	if p.heard == nil {
		p.heard = map[int]Parting{}
	}
	p.heard[slot] = t
}

// Update brings Told up to date, and reports whether that has news for the neighbours: parent, -1
// at the root, and children. wants is the operation that this rank waits for, 0 if for none, and at
// the one that it has come to, in the view of epoch. A rank that will run no other operation in
// this view has come to all of them.
func (p *Partings) Update(epoch, wants, at uint64, parent int, children []int) bool {
	heard := func(slot int) Parting {
		if t := p.heard[slot]; t.Epoch == epoch {
			return t
		}
		return Parting{}
	}
	was := p.told
	if was.Epoch != epoch {
		was = Parting{Epoch: epoch}
	}
	now := was
	now.Wanted = max(now.Wanted, wants)
	for slot := range p.heard {
		now.Wanted = max(now.Wanted, heard(slot).Wanted)
	}
	if at >= now.Wanted &&
		!slices.ContainsFunc(children, func(slot int) bool { return heard(slot).Below < now.Wanted }) {
		now.Below = now.Wanted
	}
	if now.All = now.Below; parent >= 0 {
		now.All = max(was.All, heard(parent).All)
	}
	p.told = now
	return now != was
}
