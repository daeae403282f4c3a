package collectives

// The hierarchical plans: as little data as possible crosses between hosts, and the ranks of a host
// share it equally. Hosts are ordered by their lowest active slot.

// hosts returns the active slots by host, the number of this rank's host, and its place there.
func (b *builder) hosts() (groups [][]int, host, place int) {
	number := map[int]int{}
	for i, slot := range b.Active {
		h := 0
		if b.Hosts != nil {
			h = b.Hosts[i]
		}
		g, ok := number[h]
		if !ok {
			g = len(groups)
			number[h] = g
			groups = append(groups, nil)
		}
		if slot == b.Rank {
			host, place = g, len(groups[g])
		}
		groups[g] = append(groups[g], slot)
	}
	return groups, host, place
}

// hierAllReduce has L lanes, with L ranks on the smallest host. The l-th rank of each host reduces
// lane l of its host's vectors, in slot order. The l-th ranks of all hosts then allreduce the lane,
// by doubling if it is short, else as a two-shot, with hosts in order, and share it with their
// hosts.
func hierAllReduce(b *builder) {
	groups, host, place := b.hosts()
	lanes := b.n
	for _, g := range groups {
		lanes = min(lanes, len(g))
	}
	bounds := split(b.Count, lanes, b.Elem)
	lane := widest(bounds)
	for len(bounds) <= len(groups[host]) {
		bounds = append(bounds, b.Count*b.Elem)
	}
	local := team{groups[host], place}
	in, out := b.mine(In, 0), b.mine(Out, 0)
	if local.n() > 1 {
		pairwise(b, over(local, bounds, in, out, exchange{reduce: true, final: len(groups) == 1}))
		in = out
	}
	b.top = 0 // each phase has read all of its scratch memory
	if len(groups) > 1 && place < lanes {
		between := team{me: host}
		for _, g := range groups {
			between.slots = append(between.slots, g[place])
		}
		size := bounds[place+1] - bounds[place]
		src, dst := in.sub(bounds[place], size), out.sub(bounds[place], size)
		if lane <= b.chunk {
			b.doubling(between, src, dst)
		} else {
			pairwise(b, over(between, split(size/b.Elem, between.n(), b.Elem), src, dst,
				exchange{reduce: true, final: true, share: true}))
		}
	}
	b.top = 0
	if local.n() > 1 {
		pairwise(b, over(local, bounds, out, out, exchange{share: true}))
	}
}

// leader returns the place of the leader of host g: the root, or the lowest rank.
func (b *builder) leader(group []int) int {
	for i, slot := range group {
		if slot == b.Root && b.Kind.rooted() {
			return i
		}
	}
	return 0
}

// hierTree is the tree of trees: binomial within each host towards its leader, and binomial between
// the leaders.
func (b *builder) hierTree() (nd node, leaders team) {
	groups, host, place := b.hosts()
	leaders.me = -1
	root := 0
	for g, slots := range groups {
		l := b.leader(slots)
		leaders.slots = append(leaders.slots, slots[l])
		if g == host && l == place {
			leaders.me = host
		}
		if b.Kind.rooted() && slots[l] == b.Root {
			root = g
		}
	}
	nd = b.binomial(team{groups[host], place}, b.leader(groups[host]))
	if leaders.me >= 0 && b.Kind != Barrier {
		top := b.binomial(leaders, root)
		nd.parent = top.parent
		nd.stages = append(nd.stages, top.stages...)
		nd.children = append(top.children, nd.children...)
	}
	return nd, leaders
}

func hierBroadcast(b *builder) {
	nd, _ := b.hierTree()
	b.spread(nd, b.chunk)
}

func hierReduce(b *builder) {
	nd, _ := b.hierTree()
	b.reduceTree(nd, b.chunk)
}

// hierBarrier gathers signals on each host, then the leaders meet, then signals spread.
func hierBarrier(b *builder) {
	nd, leaders := b.hierTree()
	if leaders.me < 0 {
		b.signalTree(nd, nil)
		return
	}
	b.signalTree(nd, b.meet(leaders))
}

// hierAllGather sends a part to each other host once: to the rank whose place there is the sender's
// place modulo the host's size, which passes it to the others of its host.
func hierAllGather(b *builder) {
	groups, host, place := b.hosts()
	local := team{groups[host], place}
	part := func(slot int) Ref { return b.mine(Out, slot) }
	// carried yields the slots of other hosts whose parts arrive at place p.
	carried := func(p int, yield func(slot int)) {
		for d := 1; d < len(groups); d++ {
			far := groups[(host+d)%len(groups)]
			for j := p; j < len(far); j += local.n() {
				yield(far[j])
			}
		}
	}
	b.copy(part(b.Rank), b.own())
	carried(place, func(slot int) { b.recvPart(slot, part(slot)) })
	for d := 1; d < local.n(); d++ {
		p := local.at(-d)
		b.recvPart(local.slots[p], part(local.slots[p]))
		carried(p, func(slot int) { b.recvPart(local.slots[p], part(slot)) })
	}
	for d := 1; d < len(groups); d++ {
		far := groups[(host-d+len(groups))%len(groups)]
		b.sendPart(far[place%len(far)], b.own())
	}
	for d := 1; d < local.n(); d++ {
		b.sendPart(local.slots[local.at(d)], b.own())
	}
	carried(place, func(slot int) {
		for d := 1; d < local.n(); d++ {
			b.sendPart(local.slots[local.at(d)], part(slot))
		}
	})
}
