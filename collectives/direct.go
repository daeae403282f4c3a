package collectives

// The direct plans: every rank has entered, and every rank's In and Out can be loaded. Ranks only
// pull: each loads what it needs from its peers' memory and stores into its own, so that a rank
// which leaves the operation early, or is stopped within it, spoils nobody's memory. Whoever has
// read a peer's memory sends something afterwards: before that Send the runner makes sure that the
// peer was still in the operation when it was read. At the end signals tell when the memory is free
// again. The peers' parts are visited in rotated order.

// directAllReduce: each rank folds part me of all vectors, in slot order, into part me of its own
// result, and loads the other parts from the results of those who have folded them. For two ranks
// that is S bytes loaded from the peer. Handing the parts on in chunks, while they are in a cache,
// gains nothing: it was measured.
func directAllReduce(b *builder) {
	folded := b.meet(b.all)
	bounds := split(b.Count, b.n, b.Elem)
	part := func(r Ref, p int) Ref { return r.sub(bounds[p], bounds[p+1]-bounds[p]) }
	b.combine(true, part(b.mine(Out, 0), b.me), b.everyIn(0, func(r Ref) Ref { return part(r, b.me) }))
	folded()
	for d := 1; d < b.n; d++ {
		p := b.all.at(d)
		b.copy(part(b.mine(Out, 0), p), part(b.far(Out, b.Active[p], 0), p))
	}
	b.meet(b.all)()
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

// directReduce: the root folds all vectors. Only its core works, but nothing is copied on the way.
func directReduce(b *builder) {
	b.collect(func() { b.combine(true, b.mine(Out, 0), b.everyIn(0, func(r Ref) Ref { return r })) })
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

// directGather: the root loads all parts.
func directGather(b *builder) {
	b.collect(func() {
		b.copy(b.outPart(b.me), b.own())
		for d := 1; d < b.n; d++ {
			p := b.all.at(d)
			b.copy(b.outPart(p), b.far(In, b.Active[p], 0))
		}
	})
}

// collect: the root does work and then tells the others that it is done with their memory.
func (b *builder) collect(work func()) {
	b.plan.Direct = true
	if b.Rank != b.Root {
		b.await(b.Root)
		return
	}
	work()
	for d := 1; d < b.n; d++ {
		b.signal(b.Active[b.all.at(d)])
	}
}
