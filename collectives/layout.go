package collectives

// Extent is the kind of length of a collective's buffer.
type Extent uint8

// The extents.
const (
	None   Extent = iota // the operation has no such buffer
	One                  // Count elements: a vector, or one rank's part
	All                  // Count elements for each slot
	Own                  // Counts[Rank] elements
	Packed               // Counts[r] elements for each slot r, without holes; RecvCounts[r] of what AllToAllV receives
)

// Layout describes the buffers of a collective. If a buffer is at the root only, other ranks have
// none.
type Layout struct {
	In, Out             Extent
	InAtRoot, OutAtRoot bool
}

var layouts = [...]Layout{
	AllReduce:     {In: One, Out: One},
	ReduceScatter: {In: All, Out: One},
	AllGather:     {In: One, Out: All},
	AllGatherV:    {In: Own, Out: Packed},
	AllToAll:      {In: All, Out: All},
	AllToAllV:     {In: Packed, Out: Packed},
	Broadcast:     {In: One, Out: One, InAtRoot: true},
	Reduce:        {In: One, Out: One, OutAtRoot: true},
	Gather:        {In: One, Out: All, OutAtRoot: true},
	Scatter:       {In: All, Out: One, InAtRoot: true},
	Barrier:       {},
}

// Layout returns the layout of the collective's buffers.
func (k Kind) Layout() Layout {
	if int(k) < len(layouts) {
		return layouts[k]
	}
	return Layout{}
}

// Uses reports whether the root, or else another rank, reads In and writes Out. The vector of a
// Broadcast is at its root, which does not write it.
func (k Kind) Uses(root bool) (in, out bool) {
	l := k.Layout()
	in = l.In != None && (!l.InAtRoot || root)
	out = l.Out != None && (!l.OutAtRoot || root) && !(k == Broadcast && root)
	return in, out
}

// Parted reports whether the length of a buffer of this extent depends on the number of slots.
func (e Extent) Parted() bool { return e == All || e == Packed }
