package collectives

import "slices"

// The plans without reduction: AllGather(V), AllToAll(V), Broadcast, Gather, Scatter, Barrier.

// own returns this rank's only part of In.
func (b *builder) own() Ref { return b.mine(In, 0) }

// outPart returns the part of active rank p in Out.
func (b *builder) outPart(p int) Ref { return b.mine(Out, b.Active[p]) }

// oneShotAllGather sends this rank's part to all others at once.
func oneShotAllGather(b *builder) { b.rotate(func(int) Ref { return b.own() }, b.outPart, b.n) }

// pairwiseAllGather is oneShotAllGather with few messages under way.
func pairwiseAllGather(b *builder) { b.rotate(func(int) Ref { return b.own() }, b.outPart, window) }

// oneShotAllToAll sends each other rank its part at once.
func oneShotAllToAll(b *builder) { b.rotate(b.inPart, b.outPart, b.n) }

// pairwiseAllToAll is oneShotAllToAll with few messages under way.
func pairwiseAllToAll(b *builder) { b.rotate(b.inPart, b.outPart, window) }

// window is the number of rounds of a pairwise exchange that a rank may be ahead of what it has
// received: enough to cover a round's latency, few enough not to flood a slow rank.
const window = 2

// rotate sends src(me+d) to rank me+d and receives dst(me-d) from rank me-d, for d = 1, 2, ..., w
// rounds ahead.
func (b *builder) rotate(src, dst func(p int) Ref, w int) {
	b.copy(dst(b.me), src(b.me))
	got := make([]int32, b.n)
	post := func(d int) {
		if d < b.n {
			p := b.all.at(-d)
			got[d] = b.recvPart(b.Active[p], dst(p))
		}
	}
	for d := 1; d <= w && d < b.n; d++ {
		post(d)
	}
	for d := 1; d < b.n; d++ {
		if d > w {
			if got[d-w] >= 0 {
				b.after = []int32{got[d-w]}
			}
			post(d)
		}
		p := b.all.at(d)
		b.sendPart(b.Active[p], src(p))
		b.after = nil
	}
}

func ringAllGather(b *builder) {
	size := 0
	for p := range b.n {
		size = max(size, b.outPart(p).Len)
	}
	if b.Kind.varies() { // it is not cut into blocks: the chunks grow until the plan is short enough
		most := max(MaxSteps/(2*b.n), 1)
		b.chunk *= size/most/b.chunk + 1
	}
	b.copy(b.outPart(b.me), b.own())
	b.ringShare(b.chunks(size, 2*b.n), b.outPart)
}

// bruckAllGather: in round k each rank sends the first 2^k parts that it has to the rank 2^k below,
// as one message.
func bruckAllGather(b *builder) {
	part := b.Count * b.Elem
	have := b.tmp(b.n * min(b.chunk, part))
	for c := range b.chunks(part, 4*b.n) {
		off, n := b.cut(part, c)
		b.copy(have.sub(0, n), b.own().sub(off, n))
		for k := 1; k < b.n; k *= 2 {
			m := min(k, b.n-k)
			b.recv(b.Active[b.all.at(k)], have.sub(k*n, m*n))
			b.send(b.Active[b.all.at(-k)], have.sub(0, m*n))
		}
		b.copy(b.outPart(b.me).sub(off, n), b.own().sub(off, n))
		for d := 1; d < b.n; d++ {
			b.copy(b.outPart(b.all.at(d)).sub(off, n), have.sub(d*n, n))
		}
	}
}

// bruckAllToAll: the part for the rank d places ahead moves 2^k places in every round k whose bit
// is set in d; all parts that move in a round are one message.
func bruckAllToAll(b *builder) {
	part := b.Count * b.Elem
	grain := min(b.chunk, part)
	half := 0 // the largest number of parts that move in one round
	for h := 1; h < b.n; h *= 2 {
		m := 0
		for d := 1; d < b.n; d++ {
			m += d / h & 1
		}
		half = max(half, m)
	}
	var area []Ref // one receive area for each round
	for h := 1; h < b.n; h *= 2 {
		area = append(area, b.tmp(half*grain))
	}
	pack := b.tmp(half * grain)
	for c := range b.chunks(part, 4*b.n) {
		off, n := b.cut(part, c)
		at := make([]Ref, b.n) // location of the part that is d places from its destination
		for d := range at {
			at[d] = b.inPart(b.all.at(d)).sub(off, n)
		}
		for k := 0; 1<<k < b.n; k++ {
			m := 0
			for d := 1; d < b.n; d++ {
				if d>>k&1 == 1 {
					b.copy(pack.sub(m*n, n), at[d])
					at[d] = area[k].sub(m*n, n)
					m++
				}
			}
			b.recv(b.Active[b.all.at(-1<<k)], area[k].sub(0, m*n))
			b.send(b.Active[b.all.at(1<<k)], pack.sub(0, m*n))
		}
		for d := range at {
			b.copy(b.outPart(b.all.at(-d)).sub(off, n), at[d])
		}
	}
}

// Broadcast.

func (b *builder) spread(nd node, chunk int) { b.down(nd, b.mine(In, 0), b.mine(Out, 0), chunk) }

// oneShotBroadcast: the root sends the whole vector to each other rank.
func oneShotBroadcast(b *builder) {
	b.spread(b.linear(b.all, b.index(b.Root)), max(b.Count*b.Elem, b.chunk))
}

func treeBroadcast(b *builder) { b.spread(b.binomial(b.all, b.index(b.Root)), b.chunk) }

// chainBroadcast passes the vector from the root upwards, cyclically to the rank below it.
func chainBroadcast(b *builder) {
	nd := node{parent: b.Active[b.all.at(-1)]}
	if b.Rank == b.Root {
		nd.parent = -1
	}
	if next := b.Active[b.all.at(1)]; next != b.Root {
		nd.children = []int{next}
	}
	b.spread(nd, b.chunk)
}

// twoShotBroadcast: the root sends each other rank one part, and these send their parts to each
// other (van de Geijn), chunk by chunk.
func twoShotBroadcast(b *builder) {
	root := b.index(b.Root)
	bounds := split(b.Count, b.n-1, b.Elem)
	// piece returns chunk c of the part of the rank q places after the root.
	piece := func(r Ref, q, c int) Ref {
		off, n := b.cut(bounds[q]-bounds[q-1], c)
		return r.sub(bounds[q-1]+off, n)
	}
	k := b.chunks(widest(bounds), 3*b.n)
	slot := func(q int) int { return b.Active[(root+q)%b.n] }
	me := (b.me - root + b.n) % b.n
	if me == 0 {
		for c := range k {
			for q := 1; q < b.n; q++ {
				b.send(slot(q), piece(b.mine(In, 0), q, c))
			}
		}
		return
	}
	out := b.mine(Out, 0)
	others := func(yield func(q int) bool) {
		for d := 1; d < b.n-1; d++ {
			if !yield((me-1+d)%(b.n-1) + 1) {
				return
			}
		}
	}
	for c := range k + 1 {
		if c < k {
			b.recv(b.Root, piece(out, me, c))
			for q := range others {
				b.recv(slot(q), piece(out, q, c))
			}
		}
		if c > 0 {
			for q := range others {
				b.send(slot(q), piece(out, me, c-1))
			}
		}
	}
}

// Gather and Scatter.

func oneShotGather(b *builder) {
	if b.Rank != b.Root {
		b.send(b.Root, b.own())
		return
	}
	for d := 1; d < b.n; d++ {
		p := b.all.at(d)
		b.recv(b.Active[p], b.outPart(p))
	}
	b.copy(b.outPart(b.me), b.own())
}

func oneShotScatter(b *builder) {
	if b.Rank != b.Root {
		b.recv(b.Root, b.mine(Out, 0))
		return
	}
	for d := 1; d < b.n; d++ {
		p := b.all.at(d)
		b.send(b.Active[p], b.inPart(p))
	}
	b.copy(b.mine(Out, 0), b.inPart(b.me))
}

// treeGather: blocks of parts, packed in slot order, go up the binomial tree.
func treeGather(b *builder) {
	nd := b.binomial(b.all, b.index(b.Root))
	parent, limbs, lo, hi := nd.parent, nd.limbs, nd.lo, nd.hi
	part := b.Count * b.Elem
	grain := min(b.chunk, part)
	var pack Ref
	if parent < 0 || hi-lo > 1 {
		pack = b.tmp((hi - lo) * grain)
	}
	for c := range b.chunks(part, 2*b.n) {
		off, n := b.cut(part, c)
		block := func(from, to int) Ref { return pack.sub((from-lo)*n, (to-from)*n) }
		for _, l := range limbs {
			if parent < 0 && l.hi-l.lo == 1 {
				b.recv(b.Active[l.child], b.outPart(l.lo).sub(off, n))
			} else {
				b.recv(b.Active[l.child], block(l.lo, l.hi))
			}
		}
		mine := b.own().sub(off, n)
		switch {
		case parent < 0:
			b.copy(b.outPart(b.me).sub(off, n), mine)
			for _, l := range limbs {
				for p := l.lo; p < l.hi && l.hi-l.lo > 1; p++ {
					b.copy(b.outPart(p).sub(off, n), block(p, p+1))
				}
			}
		case hi-lo == 1:
			b.send(parent, mine)
		default:
			b.copy(block(b.me, b.me+1), mine)
			b.send(parent, block(lo, hi))
		}
	}
}

// treeScatter: blocks of parts, packed in slot order, go down the binomial tree.
func treeScatter(b *builder) {
	nd := b.binomial(b.all, b.index(b.Root))
	parent, limbs, lo, hi := nd.parent, nd.limbs, nd.lo, nd.hi
	part := b.Count * b.Elem
	grain := min(b.chunk, part)
	out := b.mine(Out, 0)
	var pack Ref
	if hi-lo > 1 {
		pack = b.tmp((hi - lo) * grain)
	}
	for c := range b.chunks(part, 2*b.n) {
		off, n := b.cut(part, c)
		block := func(from, to int) Ref { return pack.sub((from-lo)*n, (to-from)*n) }
		if parent >= 0 && hi-lo == 1 {
			b.recv(parent, out.sub(off, n))
			continue
		}
		if parent >= 0 {
			b.recv(parent, block(lo, hi))
		}
		for i := len(limbs) - 1; i >= 0; i-- { // the largest subtree first
			l := limbs[i]
			src := block(l.lo, l.hi)
			if parent < 0 {
				if l.hi-l.lo == 1 {
					src = b.inPart(l.lo).sub(off, n)
				} else {
					for p := l.lo; p < l.hi; p++ {
						b.copy(block(p, p+1), b.inPart(p).sub(off, n))
					}
				}
			}
			b.send(b.Active[l.child], src)
		}
		if parent < 0 {
			b.copy(out.sub(off, n), b.inPart(b.me).sub(off, n))
		} else {
			b.copy(out.sub(off, n), block(b.me, b.me+1))
		}
	}
}

// Barriers: messages without bytes.

// oneShotBarrier signals all other ranks.
func oneShotBarrier(b *builder) { b.meetFlat(b.all)() }

// disseminationBarrier: in round k each rank signals the one 2^k places ahead.
func disseminationBarrier(b *builder) { b.meetDissemination(b.all)() }

// meet posts the Recvs of a barrier among t and returns a function for the rest: all later steps
// wait for the barrier's end. Among few ranks one round of n-1 signals is fastest.
func (b *builder) meet(t team) func() {
	if t.n() <= 4 {
		return b.meetFlat(t)
	}
	return b.meetDissemination(t)
}

func (b *builder) meetFlat(t team) func() {
	var got []int32
	for d := 1; d < t.n(); d++ {
		got = append(got, b.await(t.slots[t.at(-d)]))
	}
	return func() {
		for d := 1; d < t.n(); d++ {
			b.signal(t.slots[t.at(d)])
		}
		b.touched = nil
		b.after = slices.Concat(b.after, got)
	}
}

func (b *builder) meetDissemination(t team) func() {
	var got []int32
	for k := 1; k < t.n(); k *= 2 {
		got = append(got, b.await(t.slots[t.at(-k)]))
	}
	return func() {
		for i, k := 0, 1; k < t.n(); i, k = i+1, k*2 {
			b.signal(t.slots[t.at(k)])
			b.after = append(slices.Clip(b.after), got[i])
		}
		b.touched = nil
	}
}

// treeBarrier gathers signals towards the lowest rank and spreads one from there.
func treeBarrier(b *builder) { b.signalTree(b.binomial(b.all, 0), nil) }

// signalTree gathers signals at the root of a tree, does middle there, and spreads signals back.
func (b *builder) signalTree(nd node, middle func()) {
	var up, back []int32
	for i := len(nd.children) - 1; i >= 0; i-- {
		up = append(up, b.await(nd.children[i]))
	}
	if nd.parent >= 0 {
		back = append(back, b.await(nd.parent))
	}
	b.after = up
	if nd.parent >= 0 {
		b.signal(nd.parent)
		b.after = back
	} else if middle != nil {
		middle()
	}
	for _, child := range nd.children {
		b.signal(child)
	}
	b.after = nil
}
