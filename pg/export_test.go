package pg

// JobView returns the slots that are active in the job's view; the group may not have entered it.
func (g *Group) JobView() []int {
	g.job.proxy.Lock()
	defer g.job.proxy.Unlock()
	return g.job.view().Active()
}

// Decides reports whether a call of Agree has all votes of agreement n, and asks the store.
func (g *Group) Decides(n uint64) bool {
	g.job.proxy.Lock()
	defer g.job.proxy.Unlock()
	return g.ballot.n == n && !g.between
}
