package collectives

// The one-sided plans require that every rank has entered, and every rank's Out and Tmp can be put
// into. Ranks put data to where their peers need it, and signal. No answers are needed: a rank is
// done when all its Puts have completed and all its peers have signalled. The peers are visited in
// rotated order.

// pass puts src into peer's memory dst and signals, even without data.
func (b *builder) pass(peer int, dst, src Ref) {
	b.put(peer, dst, src)
	b.notify(peer)
}

// spreadParts puts src(p) into dst(p) at each other rank p.
func (b *builder) spreadParts(src, dst func(p int) Ref) {
	for d := 1; d < b.n; d++ {
		b.expect(b.Active[b.all.at(-d)])
	}
	for d := 1; d < b.n; d++ {
		p := b.all.at(d)
		b.pass(b.Active[p], dst(p), src(p))
	}
}

func oneSidedAllGather(b *builder) {
	b.spreadParts(func(int) Ref { return b.own() },
		func(p int) Ref { return b.there(Out, b.Active[p], b.Rank) })
	b.copy(b.outPart(b.me), b.own())
}

func oneSidedAllToAll(b *builder) {
	b.spreadParts(b.inPart, func(p int) Ref { return b.there(Out, b.Active[p], b.Rank) })
	b.copy(b.outPart(b.me), b.inPart(b.me))
}

// fromRoot: the root puts src(p) into Out of each other rank p.
func (b *builder) fromRoot(src func(p int) Ref) {
	if b.Rank != b.Root {
		b.plan.OneSided = true
		b.expect(b.Root)
		return
	}
	for d := 1; d < b.n; d++ {
		p := b.all.at(d)
		b.pass(b.Active[p], b.there(Out, b.Active[p], 0), src(p))
	}
}

func oneSidedBroadcast(b *builder) { b.fromRoot(func(int) Ref { return b.mine(In, 0) }) }

func oneSidedScatter(b *builder) {
	b.fromRoot(b.inPart)
	if b.Rank == b.Root {
		b.copy(b.mine(Out, 0), b.inPart(b.me))
	}
}

// oneSidedGather: the others put their parts into the root's Out.
func oneSidedGather(b *builder) {
	if b.Rank != b.Root {
		b.pass(b.Root, b.there(Out, b.Root, b.Rank), b.own())
		return
	}
	b.plan.OneSided = true
	for d := 1; d < b.n; d++ {
		b.expect(b.Active[b.all.at(d)])
	}
	b.copy(b.outPart(b.me), b.own())
}

// oneSidedAllReduce is a two-shot: each rank reduces one part, whose contributions its peers put
// into its scratch memory, and puts the result into all peers' Out, chunk by chunk. Scratch memory
// holds two chunks of each peer: chunk c replaces chunk c-2 when the result of that one has
// arrived. The signals between any two ranks have the same order on both sides: contribution c,
// result c-1, contribution c+1, ... .
func oneSidedAllReduce(b *builder) {
	n, me := b.n, b.me
	bounds := split(b.Count, n, b.Elem)
	size := func(p int) int { return bounds[p+1] - bounds[p] }
	part := func(r Ref, p, c int) Ref {
		off, k := b.cut(size(p), c)
		return r.sub(bounds[p]+off, k)
	}
	rounds := b.chunks(widest(bounds), 6*n)
	slot := func(p, from, c int) Ref { // place of chunk c of rank from's contribution at rank p
		grain := (min(b.chunk, size(p)) + 63) &^ 63
		_, k := b.cut(size(p), c)
		return Ref{Buf: Tmp, Off: (c%2*(n-1) + (from-p+n)%n - 1) * grain, Len: k}
	}
	b.tmp(min(rounds, 2) * (n - 1) * ((min(b.chunk, size(me)) + 63) &^ 63))
	in, out := b.mine(In, 0), b.mine(Out, 0)
	contributed := make([][]int32, rounds) // the WaitSignals of each round
	result := make([][]int32, rounds)      // by peer
	for c := 0; c <= rounds && rounds > 0; c++ {
		if c < rounds {
			result[c] = make([]int32, n)
			for d := 1; d < n; d++ {
				if slot(me, me, c).Len > 0 {
					contributed[c] = append(contributed[c], b.expect(b.Active[b.all.at(-d)]))
				}
			}
			for d := 1; d < n; d++ {
				p := b.all.at(d)
				src := part(in, p, c)
				if src.Len == 0 {
					continue
				}
				if c > 1 {
					b.needs = append(b.needs, result[c-2][p])
				}
				dst := slot(p, me, c)
				dst.Buf, dst.Peer = PeerTmp, int32(b.Active[p])
				b.pass(b.Active[p], dst, src)
			}
		}
		if c == 0 {
			continue
		}
		prev := c - 1
		for d := 1; d < n; d++ {
			if p := b.all.at(-d); part(out, p, prev).Len > 0 {
				result[prev][p] = b.expect(b.Active[p])
			}
		}
		mine := part(out, me, prev)
		if mine.Len == 0 {
			continue
		}
		srcs := make([]Ref, n)
		for p := range srcs {
			if srcs[p] = slot(me, p, prev); p == me {
				srcs[p] = part(in, me, prev)
			}
		}
		b.needs = append(b.needs, contributed[prev]...)
		b.reduce(true, mine, srcs)
		for d := 1; d < n; d++ {
			p := b.Active[b.all.at(d)]
			dst := part(b.there(Out, p, 0), me, prev)
			b.pass(p, dst, mine)
		}
	}
}
