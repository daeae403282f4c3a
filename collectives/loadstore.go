package collectives

// The load-store plans require that every rank has entered, and every rank's In and Out can be
// loaded. Ranks only load from their peers' memory and store into their own, so that a rank which
// leaves the operation early, or is stopped within it, corrupts no memory of others. A rank that
// has read a peer's memory sends a message afterwards: before that Send the runner checks that the
// peer was still in the operation when it was read. At the end signals tell when the memory is free
// again. The peers' parts are visited in rotated order.

// loadStoreAllReduce: each rank reduces part me of all vectors, in slot order, into part me of its
// own result, and loads the other parts from the ranks that reduced them. For two ranks that is S
// bytes loaded from the peer. Passing the parts on in chunks, while they are in a cache, was
// measured and is not faster.
func loadStoreAllReduce(b *builder) {
	folded := b.meet(b.all)
	bounds := split(b.Count, b.n, b.Elem)
	part := func(r Ref, p int) Ref { return r.sub(bounds[p], bounds[p+1]-bounds[p]) }
	b.reduce(true, part(b.mine(Out, 0), b.me), b.everyIn(0, func(r Ref) Ref { return part(r, b.me) }))
	folded()
	for d := 1; d < b.n; d++ {
		p := b.all.at(d)
		b.copy(part(b.mine(Out, 0), p), part(b.far(Out, b.Active[p], 0), p))
	}
	b.meet(b.all)()
}

// everyIn returns cut(part of In) of all ranks, in slot order.
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

func loadStoreReduceScatter(b *builder) {
	leave := b.meet(b.all)
	b.reduce(true, b.mine(Out, 0), b.everyIn(b.Rank, func(r Ref) Ref { return r }))
	leave()
}

// loadStoreReduce: the root reduces all vectors. Only its core works, but nothing is copied.
func loadStoreReduce(b *builder) {
	b.collect(func() { b.reduce(true, b.mine(Out, 0), b.everyIn(0, func(r Ref) Ref { return r })) })
}

func loadStoreAllGather(b *builder) {
	leave := b.meet(b.all)
	b.copy(b.outPart(b.me), b.own())
	for d := 1; d < b.n; d++ {
		p := b.all.at(d)
		b.copy(b.outPart(p), b.far(In, b.Active[p], 0))
	}
	leave()
}

func loadStoreAllToAll(b *builder) {
	leave := b.meet(b.all)
	b.copy(b.outPart(b.me), b.inPart(b.me))
	for d := 1; d < b.n; d++ {
		p := b.all.at(d)
		b.copy(b.outPart(p), b.far(In, b.Active[p], b.Rank))
	}
	leave()
}

// release runs work; then the other ranks tell the root that they no longer use its memory.
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
	b.plan.LoadStore = true
}

func loadStoreBroadcast(b *builder) {
	b.plan.LoadStore = true
	b.release(func() {
		if b.Rank != b.Root {
			b.copy(b.mine(Out, 0), b.far(In, b.Root, 0))
		}
	})
}

func loadStoreScatter(b *builder) {
	b.plan.LoadStore = true
	b.release(func() {
		if b.Rank == b.Root {
			b.copy(b.mine(Out, 0), b.mine(In, b.Rank))
		} else {
			b.copy(b.mine(Out, 0), b.far(In, b.Root, b.Rank))
		}
	})
}

// loadStoreGather: the root loads all parts.
func loadStoreGather(b *builder) {
	b.collect(func() {
		b.copy(b.outPart(b.me), b.own())
		for d := 1; d < b.n; d++ {
			p := b.all.at(d)
			b.copy(b.outPart(p), b.far(In, b.Active[p], 0))
		}
	})
}

// collect runs work at the root, which then tells the others that it no longer uses their memory.
func (b *builder) collect(work func()) {
	b.plan.LoadStore = true
	if b.Rank != b.Root {
		b.await(b.Root)
		return
	}
	work()
	for d := 1; d < b.n; d++ {
		b.signal(b.Active[b.all.at(d)])
	}
}
