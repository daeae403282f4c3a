package pg

import (
	"testing"

	"tutti/pg/flight"
)

// Sent returns the number of bytes that this rank has sent to others.
func (g *Group) Sent(t *testing.T) (n uint64) {
	t.Helper()
	text, err := g.job.status(t.Context(), 1)
	if err != nil {
		t.Fatal(err)
	}
	s, err := flight.Parse(text)
	if err != nil {
		t.Fatal(err)
	}
	for _, l := range s.Links {
		n += l.BytesSent
	}
	return n
}

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

// Copies returns how many staging buffers the group's visits have used.
func (g *Group) Copies() (n uint64) {
	g.devices.mu.Lock()
	defer g.devices.mu.Unlock()
	for _, all := range g.devices.buffers {
		for _, b := range all {
			n += b.uses
		}
	}
	return n
}

// Direct returns how the group's calls use the memory of devices: see exec.Runner.Direct.
func (g *Group) Direct() (path string, err error) {
	g.job.proxy.Lock()
	defer g.job.proxy.Unlock()
	return g.run.Direct()
}
