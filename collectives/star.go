package collectives

// The star plans: ranks send their data to a center, which makes the result and sends it back, so
// that most ranks have one link, and one message in each direction.

// starRanks is the number of ranks from which on a single center has too much to do.
const starRanks = 64

// starsWidth returns the number of ranks of each star of stars, its center included: consecutive
// ones, of which the lowest is the center.
func starsWidth(n int) int {
	width := 1
	for width*width < n {
		width++
	}
	return width
}

// stars returns this rank's place in stars of width ranks whose centers form a star around the
// lowest rank.
func (b *builder) stars(width int) node {
	first := b.me - b.me%width
	if b.me != first {
		return node{parent: b.Active[first], lo: b.me, hi: b.me + 1}
	}
	nd := node{parent: -1, lo: first, hi: min(first+width, b.n)}
	inner, outer := b.Active[nd.lo:nd.hi], []int{b.Rank}
	if first > 0 {
		nd.parent = b.Active[0]
	} else {
		for c := width; c < b.n; c += width {
			outer = append(outer, b.Active[c])
			nd.limbs = append(nd.limbs, limb{c, c, min(c+width, b.n)})
		}
		nd.hi = b.n
	}
	for p := first + 1; p < first+len(inner); p++ {
		nd.limbs = append(nd.limbs, limb{p, p, p + 1})
	}
	for _, l := range nd.limbs {
		nd.children = append(nd.children, b.Active[l.child])
	}
	for _, stage := range [][]int{inner, outer} {
		if len(stage) > 1 {
			nd.stages = append(nd.stages, stage)
		}
	}
	return nd
}

// StarNeighbours returns the neighbours of member at of members in a star or, if they are many, in
// stars: the one that it sends to, -1 for the lowest, and those that send to it.
func StarNeighbours(members []int, at int) (center int, others []int) {
	b := &builder{Shape: Shape{Active: members, Rank: members[at]}, n: len(members), me: at}
	width := b.n
	if b.n > starRanks {
		width = starsWidth(b.n)
	}
	nd := b.stars(width)
	return nd.parent, nd.children
}

func starAllReduce(b *builder)  { b.starAllReduce(b.n) }
func starsAllReduce(b *builder) { b.starAllReduce(starsWidth(b.n)) }

func (b *builder) starAllReduce(width int) {
	nd := b.stars(width)
	b.up(nd, b.mine(In, 0), b.mine(Out, 0), b.chunk)
	b.down(nd, b.mine(Out, 0), b.mine(Out, 0), b.chunk)
}

func starAllGather(b *builder)  { b.starAllGather(b.n) }
func starsAllGather(b *builder) { b.starAllGather(starsWidth(b.n)) }

// starAllGather: the parts of a star go to the lowest rank as one message, and all parts back as
// one.
func (b *builder) starAllGather(width int) {
	nd := b.stars(width)
	part := b.Count * b.Elem
	grain := min(b.chunk, part)
	all := b.tmp(b.n * grain)
	pack := all
	if nd.parent >= 0 && nd.hi-nd.lo > 1 {
		pack = b.tmp((nd.hi - nd.lo) * grain)
	}
	for c := range b.chunks(part, 4*b.n) {
		off, n := b.cut(part, c)
		block := func(lo, hi int) Ref { return pack.sub((lo-nd.lo)*n, (hi-lo)*n) }
		for _, l := range nd.limbs {
			b.recv(b.Active[l.child], block(l.lo, l.hi))
		}
		mine, whole := b.own().sub(off, n), all.sub(0, b.n*n)
		b.copy(b.outPart(b.me).sub(off, n), mine)
		if nd.hi-nd.lo > 1 {
			b.copy(block(b.me, b.me+1), mine)
			mine = block(nd.lo, nd.hi)
		}
		if nd.parent >= 0 {
			b.recv(nd.parent, whole)
			b.send(nd.parent, mine)
		}
		for _, child := range nd.children {
			b.send(child, whole)
		}
		for p := range b.n {
			if p != b.me {
				b.copy(b.outPart(p).sub(off, n), all.sub(p*n, n))
			}
		}
	}
}

func starBarrier(b *builder)  { b.signalTree(b.stars(b.n), nil) }
func starsBarrier(b *builder) { b.signalTree(b.stars(starsWidth(b.n)), nil) }
