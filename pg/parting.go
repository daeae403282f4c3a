package pg

import (
	"context"
	"encoding/binary"
	"fmt"
	"math"
	"time"

	"tutti/p2p"
	"tutti/pg/internal/resync"
)

// A rank may end an operation that others have not begun: the root of a broadcast does not wait.
// If it left the job then, the job's view would change, and the operation of the late ranks would
// fail although its data is on the way. So Close waits until every rank has come to the last
// operation that this rank has run. A rank that is in that operation when the view changes, or past
// it, needs nothing more of this one.
//
// Package resync decides; the ranks are the tree along which they pass on standings. If every rank
// closes the group, they send the messages of a barrier. A rank whose program does something else
// answers when it polls: in any call of this package, at each tick of the roster, or in job.attend.

// maxParting bounds the wait of Close, which Config.Timeout bounds as well.
const maxParting = 10 * time.Second

// A notice of key noticeParting is a resync.Parting: its fields in their order, little-endian.
const partingSize = 32

func encodeParting(p resync.Parting) []byte {
	b := make([]byte, 0, partingSize)
	for _, n := range []uint64{p.Epoch, p.Wanted, p.Below, p.All} {
		b = binary.LittleEndian.AppendUint64(b, n)
	}
	return b
}

func decodeParting(b []byte) (p resync.Parting, err error) {
	if len(b) != partingSize {
		return p, fmt.Errorf("a parting of %d bytes, want %d", len(b), partingSize)
	}
	for i, n := range []*uint64{&p.Epoch, &p.Wanted, &p.Below, &p.All} {
		*n = binary.LittleEndian.Uint64(b[8*i:])
	}
	return p, nil
}

// part tells this rank's neighbours what is new about ranks that close the group. With the proxy's
// lock.
func (g *Group) part() {
	wants := uint64(0)
	if g.parts {
		wants = g.seq
	}
	parent, neighbours := g.neighbours()
	if !g.partings.Update(g.v.epoch, wants, g.came(), parent, neighbours) {
		return
	}
	if parent >= 0 {
		neighbours = append(neighbours, parent)
	}
	g.msgs.Notice(neighbours, noticeParting, encodeParting(g.partings.Told()))
	for _, slot := range neighbours {
		g.msgs.Request(slot)
	}
}

// came returns the operation that this rank has come to, for ranks that close the group.
func (g *Group) came() uint64 {
	if g.parts || g.err != nil {
		return math.MaxUint64
	}
	return g.seq
}

// sought reports whether a rank that closes the group waits for this one.
func (g *Group) sought() bool {
	t := g.partings.Told()
	return t.Epoch == g.v.epoch && g.came() < t.Wanted
}

// awaitAll waits until every rank has come to the last operation that has run on this one, or until
// that cannot be expected any more: a rank is lost or has closed the group, the job's view has
// changed, or the time is up. Ranks in one process need no wait: they have no views.
func (g *Group) awaitAll() {
	p := g.job.proxy
	p.Lock()
	defer p.Unlock()
	if g.job.local || g.line.calls > 0 || len(g.v.Active) == 1 || g.job.settings.Uniform || !g.run.Leads(g.seq) {
		return
	}
	limit := maxParting
	if g.job.timeout > 0 {
		limit = min(limit, g.job.timeout)
	}
	var w p2p.Wait
	w.Reset(context.Background(), limit, false)
	g.parts = true
	for g.part(); g.partings.Told().All < g.seq && g.whole(); {
		if err := p.Progress(&w); err != nil {
			g.job.log.Warn("a group was closed before all ranks had come to its last operation", "group", g.id(),
				"operation", g.seq, "waited", w.Waited(), "err", err)
			return
		}
	}
}

// whole reports whether the group works and all its ranks are in it, as far as this one knows.
func (g *Group) whole() bool {
	if g.err != nil || g.aborted != nil || g.coll.Err() != nil || g.moved() {
		return false
	}
	for _, slot := range g.v.Active {
		if slot != g.rank && (g.msgs.Closed(slot) || g.job.proxy.Down(g.jobRank(slot)) != nil) {
			return false
		}
	}
	return true
}
