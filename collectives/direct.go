package collectives

// The direct plans: every rank has entered, and every rank's In and Out can be loaded and stored. Each byte is read once from where it is and
// written once to where it belongs; then signals tell when the memory is free again. Nobody writes a range of a peer that anybody else reads
// or writes in the same operation, and the peers' parts are visited in rotated order.
//
// What can be had by loads is pulled (the data ends in the cache of the core that wants it) unless only one rank would do the work: a gather is
// pushed, so that all ranks' cores share it.

// directAllReduce: part me of all vectors is folded, in slot order, into part me of all results. For two ranks that is 2·S bytes read and 2·S
// written, which is the least possible.
func directAllReduce(b *builder) {
	leave := b.meet(b.all)
	bounds := split(b.Count, b.n, b.Elem)
	part := func(r Ref) Ref { return r.sub(bounds[b.me], bounds[b.me+1]-bounds[b.me]) }
	var more []Ref
	for d := 1; d < b.n; d++ {
		more = append(more, part(b.far(Out, b.Active[b.all.at(d)], 0)))
	}
	b.combine(true, part(b.mine(Out, 0)), b.everyIn(0, part), more...)
	leave()
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

// directReduce: each rank folds its part of all vectors into the root's memory.
func directReduce(b *builder) {
	leave := b.meet(b.all)
	bounds := split(b.Count, b.n, b.Elem)
	part := func(r Ref) Ref { return r.sub(bounds[b.me], bounds[b.me+1]-bounds[b.me]) }
	dst := b.mine(Out, 0)
	if b.Rank != b.Root {
		dst = b.far(Out, b.Root, 0)
	}
	b.combine(true, part(dst), b.everyIn(0, part))
	leave()
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

func directGather(b *builder) {
	b.plan.Direct = true
	b.release(func() {
		if b.Rank == b.Root {
			b.copy(b.outPart(b.me), b.own())
		} else {
			b.copy(b.far(Out, b.Root, b.Rank), b.own())
		}
	})
}
