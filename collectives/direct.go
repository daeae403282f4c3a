package collectives

// The direct plans: every rank has entered, and every rank's In and Out can be loaded. Ranks only pull: each loads what it needs from its
// peers' memory and stores into its own, so that a rank which leaves the operation early, or is stopped within it, spoils nobody's memory.
// Whoever has read a peer's memory sends something afterwards: before that Send the runner makes sure that the peer was still in the operation
// when it was read. At the end signals tell when the memory is free again. The peers' parts are visited in rotated order.

// directOnce is the length in bytes of a vector up to which every rank of a few folds the whole of it: it saves a round.
const directOnce = 16 << 10

// directChunks is how many times Shape.Chunk the grain is in which folded parts are handed on, while they are in a cache: nothing is
// copied on the way, and a round costs more than a message.
const directChunks = 4

// directAllReduce: each rank folds part me of all vectors, in slot order, into part me of its own result, and loads the other parts from the
// results of those who fold them, chunk by chunk. For two ranks that is S bytes read from the peer.
func directAllReduce(b *builder) {
	size := b.Count * b.Elem
	if size <= min(directOnce, b.chunk) && b.n <= fewRanks {
		leave := b.meet(b.all)
		sum := b.tmp(size)
		whole := func(r Ref) Ref { return r }
		b.combine(true, sum, b.everyIn(0, whole))
		leave() // the result may lie where the peers read
		b.copy(b.mine(Out, 0), sum)
		return
	}
	bounds := split(b.Count, b.n, b.Elem)
	k, grain := b.grains(widest(bounds))
	chunk := func(r Ref, p, c int) Ref {
		off := bounds[p] + min(c*grain, bounds[p+1]-bounds[p])
		return r.sub(off, min(grain, bounds[p+1]-off))
	}
	load := func(c int) {
		for d := 1; d < b.n; d++ {
			p := b.all.at(d)
			b.copy(chunk(b.mine(Out, 0), p, c), chunk(b.far(Out, b.Active[p], 0), p, c))
		}
	}
	fold := func(c int) {
		b.combine(true, chunk(b.mine(Out, 0), b.me, c), b.everyIn(0, func(r Ref) Ref { return chunk(r, b.me, c) }))
	}
	if b.n > fewRanks {
		for c := range k {
			folded := b.meet(b.all)
			fold(c)
			folded()
			load(c)
		}
		b.meet(b.all)()
		return
	}
	var before []int32 // the signals that the peers have folded the chunk before, which is loaded while they fold the next
	for c := range k {
		var folded []int32
		for d := 1; d < b.n; d++ {
			folded = append(folded, b.await(b.Active[b.all.at(-d)]))
		}
		fold(c)
		for d := 1; d < b.n; d++ {
			b.signal(b.Active[b.all.at(d)])
		}
		if c > 0 {
			b.after = append(b.after, before...)
			load(c - 1)
		}
		before = folded
	}
	leave := b.meet(b.all)
	b.after = append(b.after, before...)
	load(k - 1)
	leave()
}

// grains cuts size bytes into at most 64 chunks of at least directChunks chunks, multiples of Elem and of cache lines: how many, and how long.
func (b *builder) grains(size int) (k, grain int) {
	unit := lcm(b.Elem, 64)
	grain = max(directChunks*b.chunk, (size+63)/64)
	grain = (grain + unit - 1) / unit * unit
	return max(1, (size+grain-1)/grain), grain
}

// everyIn is cut(part of In) of all ranks, in slot order.
func (b *builder) everyIn(part int, cut func(Ref) Ref) []Ref {
	srcs := make([]Ref, b.n)
	for p, slot := range b.Active {
		if p == b.me {
			srcs[p] = cut(b.mine(In, part))
		} else {
			srcs[p] = cut(b.far(In, slot, part))
		}
	}
	return srcs
}

func directReduceScatter(b *builder) {
	leave := b.meet(b.all)
	b.combine(true, b.mine(Out, 0), b.everyIn(b.Rank, func(r Ref) Ref { return r }))
	leave()
}

// directReduce: each rank folds its part of all vectors, and sends it to the root.
func directReduce(b *builder) {
	bounds := split(b.Count, b.n, b.Elem)
	k := b.chunks(widest(bounds), 2*b.n)
	chunk := func(r Ref, p, c int) Ref {
		off, n := b.cut(bounds[p+1]-bounds[p], c)
		return r.sub(bounds[p]+off, n)
	}
	tmp := b.slots(b.n, min(b.chunk, widest(bounds)))
	for c := range k {
		mine := b.everyIn(0, func(r Ref) Ref { return chunk(r, b.me, c) })
		if b.Rank != b.Root {
			sum := tmp[0].sub(0, mine[0].Len)
			b.combine(true, sum, mine)
			b.send(b.Root, sum)
			continue
		}
		for p, slot := range b.Active { // not where it belongs at once: peers read there until they have sent it
			if p != b.me {
				b.borrow(slot, tmp[p].sub(0, chunk(mine[0], p, c).Len))
			}
		}
		b.combine(true, chunk(b.mine(Out, 0), b.me, c), mine)
		for p := range b.Active {
			if dst := chunk(b.mine(Out, 0), p, c); p != b.me {
				b.copy(dst, tmp[p].sub(0, dst.Len))
			}
		}
	}
	b.meet(b.all)()
}

func directAllGather(b *builder) {
	leave := b.meet(b.all)
	b.copy(b.outPart(b.me), b.own())
	for d := 1; d < b.n; d++ {
		p := b.all.at(d)
		b.copy(b.outPart(p), b.far(In, b.Active[p], 0))
	}
	leave()
}

func directAllToAll(b *builder) {
	leave := b.meet(b.all)
	b.copy(b.outPart(b.me), b.inPart(b.me))
	for d := 1; d < b.n; d++ {
		p := b.all.at(d)
		b.copy(b.outPart(p), b.far(In, b.Active[p], b.Rank))
	}
	leave()
}

// release: the others tell the root that they are done with its memory.
func (b *builder) release(work func()) {
	if b.Rank == b.Root {
		for d := 1; d < b.n; d++ {
			b.await(b.Active[b.all.at(d)])
		}
		work()
		return
	}
	work()
	b.signal(b.Root)
	b.plan.Direct = true
}

func directBroadcast(b *builder) {
	b.plan.Direct = true
	b.release(func() {
		if b.Rank != b.Root {
			b.copy(b.mine(Out, 0), b.far(In, b.Root, 0))
		}
	})
}

func directScatter(b *builder) {
	b.plan.Direct = true
	b.release(func() {
		if b.Rank == b.Root {
			b.copy(b.mine(Out, 0), b.mine(In, b.Rank))
		} else {
			b.copy(b.mine(Out, 0), b.far(In, b.Root, b.Rank))
		}
	})
}

// directGather: the root loads all parts. Only its core works, but nothing is copied twice.
func directGather(b *builder) {
	b.plan.Direct = true
	if b.Rank != b.Root {
		b.await(b.Root)
		return
	}
	b.copy(b.outPart(b.me), b.own())
	for d := 1; d < b.n; d++ {
		p := b.all.at(d)
		b.copy(b.outPart(p), b.far(In, b.Active[p], 0))
	}
	for d := 1; d < b.n; d++ {
		b.signal(b.Active[b.all.at(d)])
	}
}
