package collectives

import "math/bits"

// The plans with reduction: AllReduce, ReduceScatter, Reduce. If In and Out may be the same memory,
// a range of Out is written (or its Recv posted) only after the last step that reads that range of
// In.

// oneShotAllReduce sends the whole vector to all ranks, and each reduces all n in slot order: an
// exchange in which each rank's part is the whole.
func oneShotAllReduce(b *builder) {
	whole := func(int) Ref { return b.mine(In, 0) }
	pairwise(b, exchange{team: b.all, size: b.partSize, src: whole, dst: b.outWhole, reduce: true, final: true})
}

// pairwiseReduceScatter sends one message from each rank to each, and reduces once in slot order. A
// one-shot algorithm would be the same.
func pairwiseReduceScatter(b *builder) {
	pairwise(b, exchange{team: b.all, size: b.partSize, src: b.inPart, dst: b.outWhole, reduce: true, final: true})
}

func (b *builder) partSize(int) int { return b.Count * b.Elem }
func (b *builder) inPart(p int) Ref { return b.mine(In, b.Active[p]) }
func (b *builder) outWhole(int) Ref { return b.mine(Out, 0) }

// oneShotReduce sends all vectors to the root, which reduces them in slot order.
func oneShotReduce(b *builder) { b.reduceTree(b.linear(b.all, b.index(b.Root)), b.chunk) }

// twoShotAllReduce: each rank reduces one part of all n sources, in slot order, and sends the
// result to all.
func twoShotAllReduce(b *builder) {
	bounds := split(b.Count, b.n, b.Elem)
	pairwise(b, over(b.all, bounds, b.mine(In, 0), b.mine(Out, 0), exchange{reduce: true, final: true, share: true}))
}

// twoShotReduce: each rank reduces one part of all n sources, in slot order, and sends the result
// to the root.
func twoShotReduce(b *builder) {
	bounds := split(b.Count, b.n, b.Elem)
	pairwise(b, over(b.all, bounds, b.mine(In, 0), b.mine(Out, 0),
		exchange{reduce: true, final: true, share: true, toRoot: true, root: b.index(b.Root)}))
}

// An exchange is a team's reduce-scatter, allgather, or both, by messages straight from the member
// that has the data to the one that needs it.
type exchange struct {
	team
	size   func(p int) int // bytes of part p, which member p finishes
	src    func(p int) Ref // this rank's contribution to part p
	dst    func(p int) Ref // destination of the finished part p
	reduce bool            // part p is a fold of all contributions; else dst of the own part already holds it
	final  bool            // the fold is the last one over its range
	share  bool            // the finished part goes to all members, or
	toRoot bool            // ... only to member root
	root   int
}

// over returns an exchange of the parts of one vector.
func over(t team, bounds []int, src, dst Ref, x exchange) exchange {
	x.team = t
	x.size = func(p int) int { return bounds[p+1] - bounds[p] }
	x.src = func(p int) Ref { return src.sub(bounds[p], bounds[p+1]-bounds[p]) }
	x.dst = func(p int) Ref { return dst.sub(bounds[p], bounds[p+1]-bounds[p]) }
	return x
}

// pairwise plans an exchange as a software pipeline. Round c sends the contributions to chunk c,
// reduces chunk c-1, and sends its result. Between any two ranks the order is the same on both
// sides: contribution c, result c-1, contribution c+1, ... . Every Recv of a round is posted before
// the round's first Send that a peer's could wait for, so that a Send waits only for ranks in
// earlier rounds. Peers are visited in rotated order, so that the ranks do not all send to the same
// one at once.
func pairwise(b *builder, x exchange) {
	n, me := x.n(), x.me
	longest := 0
	for p := range n {
		longest = max(longest, x.size(p))
	}
	rounds := b.chunks(longest, 4*n)
	own := x.size(me)
	acc := x.dst(me)
	bounce := x.toRoot && me != x.root // the caller has no memory for results
	grain := min(b.chunk, own)
	var got, out []Ref
	if x.reduce {
		got = b.slots(min(rounds, 2)*(n-1), grain)
		if bounce {
			out = b.slots(min(rounds, 2), grain)
		}
	}
	result := func(c int) Ref {
		off, k := b.cut(own, c)
		if bounce {
			return out[c%2].sub(0, k)
		}
		return acc.sub(off, k)
	}
	for c := 0; c <= rounds && rounds > 0; c++ {
		if x.reduce && c < rounds {
			_, k := b.cut(own, c)
			for d := 1; d < n; d++ {
				p := x.at(-d)
				b.borrow(x.slots[p], got[c%2*(n-1)+d-1].sub(0, k))
			}
			for d := 1; d < n; d++ {
				p := x.at(d)
				off, k := b.cut(x.size(p), c)
				b.send(x.slots[p], x.src(p).sub(off, k))
			}
		}
		if c == 0 {
			continue
		}
		prev := c - 1
		if x.share && !bounce {
			for d := 1; d < n; d++ {
				p := x.at(-d)
				off, k := b.cut(x.size(p), prev)
				b.recv(x.slots[p], x.dst(p).sub(off, k))
			}
		}
		off, k := b.cut(own, prev)
		if x.reduce {
			srcs := make([]Ref, n)
			for d := 1; d < n; d++ {
				srcs[x.at(-d)] = got[prev%2*(n-1)+d-1].sub(0, k)
			}
			srcs[me] = x.src(me).sub(off, k)
			b.reduce(x.final, result(prev), srcs)
		}
		if x.share {
			for d := 1; d < n; d++ {
				if p := x.at(d); !x.toRoot || p == x.root {
					b.send(x.slots[p], result(prev))
				}
			}
		}
	}
}

// The ring. Part p starts at rank p+1 and moves round to rank p; each rank adds its own
// contribution. The result of part p is (x[p+1] + x[p+2]) + ... + x[p], indices modulo n.

func ringAllReduce(b *builder) {
	in, out := b.mine(In, 0), b.mine(Out, 0)
	bounds := split(b.Count, b.n, b.Elem)
	part := func(r Ref) func(int) Ref {
		return func(p int) Ref { return r.sub(bounds[p], bounds[p+1]-bounds[p]) }
	}
	b.ring(widest(bounds), part(in), part(out), true)
}

func ringReduceScatter(b *builder) { b.ring(b.Count*b.Elem, b.inPart, b.outWhole, false) }

// ring reduces part me into dst(me); with gather the finished parts then move round once more. The
// chunks of a part move in groups, within a group round by round. With several chunks in the group,
// the next one is sent before this one is reduced.
func (b *builder) ring(size int, src, dst func(p int) Ref, gather bool) {
	left, right := b.Active[b.all.at(-1)], b.Active[b.all.at(1)]
	k, last := b.chunks(size, 6*b.n), b.n-2
	grain := min(b.chunk, size)
	got := b.slots(2, grain)
	group := k
	var hold []Ref // partial results between two rounds if there is no Out to hold them: for one group
	if !gather {
		group = min(k, 4)
		if last > 0 {
			hold = b.slots(group, grain)
		}
	}
	type op struct{ round, chunk, prev int } // prev: the op whose fold this one sends, or -1
	var ops []op
	for g := 0; g < k; g += group {
		width := min(group, k-g)
		for r := range b.n - 1 {
			for c := range width {
				prev := -1
				if r > 0 {
					prev = len(ops) - width
				}
				ops = append(ops, op{r, g + c, prev})
			}
		}
	}
	piece := func(r Ref, c int) Ref { return r.sub(b.cut(r.Len, c)) }
	partial := func(o op) Ref {
		mine := piece(src(b.all.at(-2-o.round)), o.chunk)
		if gather || o.round == last {
			return piece(dst(b.all.at(-2-o.round)), o.chunk)
		}
		return hold[o.chunk%group].sub(0, mine.Len)
	}
	folded := -1
	fold := func(through int) {
		for ; folded < through; folded++ {
			o := ops[folded+1]
			mine := piece(src(b.all.at(-2-o.round)), o.chunk)
			b.reduce(o.round == last, partial(o), []Ref{got[(folded+1)%2].sub(0, mine.Len), mine})
		}
	}
	for t, o := range ops {
		fold(o.prev)
		b.borrow(left, got[t%2].sub(0, piece(src(b.all.at(-2-o.round)), o.chunk).Len))
		if o.prev < 0 {
			b.send(right, piece(src(b.all.at(-1)), o.chunk))
		} else {
			b.send(right, partial(ops[o.prev]))
		}
		fold(t - 1)
	}
	fold(len(ops) - 1)
	if gather {
		b.ringShare(k, dst)
	}
}

// ringShare passes the parts round: in round s each rank sends part me-s and receives part me-1-s,
// in k chunks each.
func (b *builder) ringShare(k int, dst func(p int) Ref) {
	left, right := b.Active[b.all.at(-1)], b.Active[b.all.at(1)]
	for s := range b.n - 1 {
		for c := range k {
			in, out := dst(b.all.at(-1-s)), dst(b.all.at(-s))
			from, to := in.sub(b.cut(in.Len, c)), out.sub(b.cut(out.Len, c))
			if c == 0 {
				b.recvPart(left, from)
				b.sendPart(right, to)
			} else {
				b.recv(left, from)
				b.send(right, to)
			}
		}
	}
}

// Recursive doubling and halving. If n is not a power of two, the first n-2^k pairs of neighbours
// act as one: the upper rank sends its vector to the lower and gets the result back. Round k
// combines two blocks of 2^k actors, the lower block's partial result first, so that the
// association is the balanced tree over aligned blocks, in slot order.

// actors returns the number of actors, this rank's number among them (-1: it sits out), and the
// team index of actor a.
func (t team) actors() (count, id int, index func(a int) int) {
	count = 1
	for count*2 <= t.n() {
		count *= 2
	}
	rem := t.n() - count
	switch {
	case t.me >= 2*rem:
		id = t.me - rem
	case t.me%2 == 0:
		id = t.me / 2
	default:
		id = -1
	}
	return count, id, func(a int) int {
		if a < rem {
			return 2 * a
		}
		return a + rem
	}
}

func doublingAllReduce(b *builder) { b.doubling(b.all, b.mine(In, 0), b.mine(Out, 0)) }

// doubling exchanges whole vectors, from src into dst, which may be src.
func (b *builder) doubling(t team, src, dst Ref) {
	count, id, index := t.actors()
	rem := t.n() - count
	grain := min(b.chunk, src.Len)
	got := b.slots(3, grain)
	for c := range b.chunks(src.Len, 32) {
		off, n := b.cut(src.Len, c)
		cur, out := src.sub(off, n), dst.sub(off, n)
		if id < 0 {
			b.send(t.slots[t.me-1], cur)
			b.recv(t.slots[t.me-1], out)
			continue
		}
		post := func(k int) {
			if 1<<k < count {
				b.borrow(t.slots[index(id^1<<k)], got[k%2].sub(0, n))
			}
		}
		if t.me < 2*rem {
			b.borrow(t.slots[t.me+1], got[2].sub(0, n))
			post(0)
			b.reduce(false, out, []Ref{cur, got[2].sub(0, n)})
			cur = out
		} else {
			post(0)
		}
		for k := 0; 1<<k < count; k++ {
			post(k + 1)
			b.send(t.slots[index(id^1<<k)], cur)
			srcs := []Ref{cur, got[k%2].sub(0, n)}
			if id>>k&1 == 1 {
				srcs[0], srcs[1] = srcs[1], srcs[0]
			}
			b.reduce(2<<k >= count, out, srcs)
			cur = out
		}
		if t.me < 2*rem {
			b.send(t.slots[t.me+1], out)
		}
	}
}

// halvingAllReduce: in round k neighbours 2^k apart split what they hold, and each reduces one
// half; then the halves move back the same way. Nearest neighbours exchange most, and the blocks
// stay in slot order.
func halvingAllReduce(b *builder) {
	count, id, index := b.all.actors()
	rem := b.n - count
	in, out := b.mine(In, 0), b.mine(Out, 0)
	k := b.chunks(in.Len, 16)
	grain := min(b.chunk, in.Len)
	cut := func(r Ref, c int) Ref { return r.sub(b.cut(r.Len, c)) }
	if id < 0 {
		for c := range k {
			b.send(b.Active[b.me-1], cut(in, c))
		}
		for c := range k {
			b.recv(b.Active[b.me-1], cut(out, c))
		}
		return
	}
	got := b.slots(2, grain)
	cur := in
	// fold receives the peer's contribution to a range of cur, in chunks, while it sends the peer
	// the range that the peer keeps.
	fold := func(peer int, keep, give Ref, peerFirst, final bool) {
		rounds := b.chunks(max(keep.Len, give.Len), 8)
		for c := 0; c <= rounds && rounds > 0; c++ {
			if c < rounds {
				b.borrow(peer, got[c%2].sub(0, cut(keep, c).Len))
				b.send(peer, cut(give, c))
			}
			if c == 0 {
				continue
			}
			mine := cut(keep, c-1)
			srcs := []Ref{mine, got[(c-1)%2].sub(0, mine.Len)}
			if peerFirst {
				srcs[0], srcs[1] = srcs[1], srcs[0]
			}
			dst := mine
			dst.Buf = Out
			b.reduce(final, dst, srcs)
		}
	}
	if b.me < 2*rem {
		fold(b.Active[b.me+1], in, Ref{}, false, false)
		cur = out
	}
	type level struct {
		peer       int
		keep, give Ref
	}
	var levels []level
	for k := 0; 1<<k < count; k++ {
		bounds := split(cur.Len/b.Elem, 2, b.Elem)
		low, high := cur.sub(0, bounds[1]), cur.sub(bounds[1], cur.Len-bounds[1])
		if id>>k&1 == 1 {
			low, high = high, low
		}
		peer := b.Active[index(id^1<<k)]
		fold(peer, low, high, id>>k&1 == 1, 2<<k >= count)
		low.Buf, high.Buf = Out, Out
		levels = append(levels, level{peer, low, high})
		cur = low
	}
	for i := len(levels) - 1; i >= 0; i-- {
		l := levels[i]
		for c := range b.chunks(max(l.keep.Len, l.give.Len), 4) {
			b.recv(l.peer, cut(l.give, c))
			b.send(l.peer, cut(l.keep, c))
		}
	}
	if b.me < 2*rem {
		for c := range k {
			b.send(b.Active[b.me+1], cut(out, c))
		}
	}
}

// halvingReduceScatter: in round k neighbours 2^k apart split the parts that they hold, and each
// reduces one half. Nearest neighbours exchange most, and the blocks stay in slot order.
func halvingReduceScatter(b *builder) {
	count, id, index := b.all.actors()
	rem, shift := b.n-count, bits.LeadingZeros(uint(count-1))
	// The parts lie in the order of their actors' reversed numbers: those of actors with the same
	// low bits are together.
	var order []int // parts, by ranks' indices
	first := []int{0}
	for place := range count {
		a := int(bits.Reverse(uint(place)) >> shift)
		if order = append(order, index(a)); a < rem {
			order = append(order, index(a)+1)
		}
		first = append(first, len(order))
	}
	part := b.Count * b.Elem
	grain := min(b.chunk, part)
	acc, got := b.tmp(b.n*grain), b.tmp(b.n*grain)
	for c := range b.chunks(part, 2*b.n) {
		off, n := b.cut(part, c)
		held := func(r Ref, from, to int) Ref { return r.sub(first[from]*n, (first[to]-first[from])*n) }
		for i, p := range order {
			b.copy(acc.sub(i*n, n), b.inPart(p).sub(off, n))
		}
		out := b.outWhole(b.me).sub(off, n)
		lo, hi := 0, count // the places whose parts this rank holds
		if id < 0 {
			b.recv(b.Active[b.me-1], out)
			b.send(b.Active[b.me-1], held(acc, lo, hi))
			continue
		}
		if b.me < 2*rem {
			b.borrow(b.Active[b.me+1], held(got, lo, hi))
			b.reduce(false, held(acc, lo, hi), []Ref{held(acc, lo, hi), held(got, lo, hi)})
		}
		for k := 0; 1<<k < count; k++ {
			mid, peer := (lo+hi)/2, b.Active[index(id^1<<k)]
			upper := id>>k&1 == 1
			give := held(acc, mid, hi)
			if upper {
				give = held(acc, lo, mid)
				lo = mid
			} else {
				hi = mid
			}
			b.borrow(peer, held(got, lo, hi))
			b.send(peer, give)
			srcs := []Ref{held(acc, lo, hi), held(got, lo, hi)}
			if upper {
				srcs[0], srcs[1] = srcs[1], srcs[0]
			}
			b.reduce(2<<k >= count, held(acc, lo, hi), srcs)
		}
		b.copy(out, acc.sub(first[lo]*n, n))
		if b.me < 2*rem {
			b.send(b.Active[b.me+1], acc.sub((first[lo]+1)*n, n))
		}
	}
}

// Trees.

// A node is this rank's place in a tree that reduces towards its root or spreads from it. Stages
// are the reductions on the way up: each lists slots in the order of the reduction; this rank's own
// slot stands for its partial result.
type node struct {
	parent   int // slot; -1 at the root
	stages   [][]int
	children []int  // slots, in the order in which to spread
	limbs    []limb // the subtrees behind the children; binomial: smallest first
	lo, hi   int    // team indices of this rank's own subtree, [lo, hi)
}

// A limb is the subtree with members [lo, hi) of a team below child.
type limb struct{ child, lo, hi int }

// linear returns the tree of depth one.
func (b *builder) linear(t team, root int) node {
	if t.me != root {
		return node{parent: t.slots[root]}
	}
	nd := node{parent: -1, stages: [][]int{t.slots}}
	for d := 1; d < t.n(); d++ {
		nd.children = append(nd.children, t.slots[t.at(d)])
	}
	return nd
}

// binomial returns the tree over aligned blocks of 2^k members: the holders of a block's two halves
// meet, and the root's half, or else the lower, holds the whole. The association of a reduction
// does not depend on the root.
func (b *builder) binomial(t team, root int) node {
	holder := func(lo, size int) int {
		if lo <= root && root < lo+size {
			return root
		}
		return lo
	}
	nd := node{parent: -1, lo: t.me, hi: t.me + 1}
	for size := 1; size < t.n(); size *= 2 {
		lo := t.me &^ (2*size - 1)
		if lo+size >= t.n() {
			continue // no upper half
		}
		give := limb{holder(lo, size), lo, lo + size}
		if keep := holder(lo, 2*size); keep == give.child {
			give = limb{holder(lo+size, size), lo + size, min(lo+2*size, t.n())}
		}
		if t.me == give.child {
			nd.parent = t.slots[holder(lo, 2*size)]
			break
		}
		child := t.slots[give.child]
		nd.limbs = append(nd.limbs, give)
		nd.children = append([]int{child}, nd.children...) // spread to the largest subtree first
		if last := len(nd.stages) - 1; give.lo < nd.lo {
			nd.stages = append(nd.stages, []int{child, t.slots[t.me]})
		} else if last >= 0 {
			nd.stages[last] = append(nd.stages[last], child)
		} else {
			nd.stages = append(nd.stages, []int{t.slots[t.me], child})
		}
		nd.lo, nd.hi = min(nd.lo, give.lo), max(nd.hi, give.hi)
	}
	return nd
}

// chains returns two chains that end at the root, from the lowest member up and from the highest
// down. The result is ((x0+x1)+...) + x[root] + (...+(x[n-2]+x[n-1])).
func (b *builder) chains(t team, root int) node {
	nd := node{parent: -1}
	stage := []int{t.slots[t.me]}
	if t.me > 0 && t.me <= root {
		stage = append([]int{t.slots[t.me-1]}, stage...)
	}
	if t.me < t.n()-1 && t.me >= root {
		stage = append(stage, t.slots[t.me+1])
	}
	if len(stage) > 1 {
		nd.stages = [][]int{stage}
	}
	if t.me < root {
		nd.parent = t.slots[t.me+1]
	} else if t.me > root {
		nd.parent = t.slots[t.me-1]
	}
	return nd
}

// up reduces vectors towards the root of a tree, chunk by chunk; a chunk's messages are posted
// before the previous chunk is reduced. If out is empty, partial results are kept in scratch
// memory.
func (b *builder) up(nd node, in, out Ref, chunk int) {
	from := 0
	for _, st := range nd.stages {
		from += len(st) - 1
	}
	keep := b.chunk
	defer func() { b.chunk = keep }()
	b.chunk = chunk
	grain := min(chunk, in.Len)
	rounds := b.chunks(in.Len, 3*from+4)
	got := b.slots(min(rounds, 2)*from, grain)
	var acc Ref
	if out.Len == 0 && from > 0 {
		acc = b.tmp(grain)
	}
	post := func(c int) {
		if c >= rounds {
			return
		}
		_, n := b.cut(in.Len, c)
		i := c % 2 * from
		for _, st := range nd.stages {
			for _, slot := range st {
				if slot != b.Rank {
					b.borrow(slot, got[i].sub(0, n))
					i++
				}
			}
		}
	}
	post(0)
	for c := range rounds {
		post(c + 1)
		off, n := b.cut(in.Len, c)
		cur, i := in.sub(off, n), c%2*from
		for s, st := range nd.stages {
			dst := acc.sub(0, n)
			if out.Len > 0 {
				dst = out.sub(off, n)
			}
			srcs := make([]Ref, len(st))
			for j, slot := range st {
				if slot == b.Rank {
					srcs[j] = cur
				} else {
					srcs[j] = got[i].sub(0, n)
					i++
				}
			}
			b.reduce(nd.parent < 0 && s == len(nd.stages)-1, dst, srcs)
			cur = dst
		}
		if nd.parent >= 0 {
			b.send(nd.parent, cur)
		}
	}
}

// down spreads src from the root of a tree, chunk by chunk; the other ranks receive it in dst and
// pass it on.
func (b *builder) down(nd node, src, dst Ref, chunk int) {
	keep := b.chunk
	defer func() { b.chunk = keep }()
	b.chunk = chunk
	if nd.parent >= 0 {
		src = dst
	}
	rounds := b.chunks(src.Len, len(nd.children)+2)
	for c := range rounds + 1 {
		if off, n := b.cut(src.Len, c); c < rounds && nd.parent >= 0 {
			b.recv(nd.parent, dst.sub(off, n))
		}
		if c == 0 {
			continue
		}
		off, n := b.cut(src.Len, c-1)
		for _, child := range nd.children {
			b.send(child, src.sub(off, n))
		}
	}
}

func (b *builder) reduceTree(nd node, chunk int) { b.up(nd, b.mine(In, 0), b.mine(Out, 0), chunk) }

func treeReduce(b *builder)  { b.reduceTree(b.binomial(b.all, b.index(b.Root)), b.chunk) }
func chainReduce(b *builder) { b.reduceTree(b.chains(b.all, b.index(b.Root)), b.chunk) }

// treeAllReduce reduces towards the lowest rank and spreads from there.
func treeAllReduce(b *builder) {
	nd := b.binomial(b.all, 0)
	b.up(nd, b.mine(In, 0), b.mine(Out, 0), b.chunk)
	b.down(nd, b.mine(Out, 0), b.mine(Out, 0), b.chunk)
}
