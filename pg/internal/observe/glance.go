package observe

import (
	"fmt"
	"slices"
	"time"

	"tutti/p2p"
	"tutti/pg/flight"
)

// A Glance is a copy of a group's state, made under the proxy's lock.
type Glance struct {
	Slot     int
	Ranks    []int // of the job, by slot
	Active   []int // slots
	Epoch    uint64
	Number   uint64 // of the latest operation
	Awaits   []int  // slots that the running call waits for
	Entering uint64 // the view that the group is about to enter; 0: none
	Agreed   uint64 // the latest agreement that the rank has voted in
	Agreeing bool   // a call waits for its outcome
	Waited   time.Duration
	Queued   int // calls
	Peers    []Peer
	Err      error // why the group has failed
	Last     error // of the operation that failed last
	Devices  string

	id     uint32
	record flight.Record // of the latest operation
	has    bool
}

// A Peer is the state of another slot of a group, as far as it is known.
type Peer struct {
	Slot        int
	Seen, Waits p2p.Token
	HasSeen     bool
	HasWaits    bool
	WaitsFor    []int // slots
}

// Fill sets the fields of v that t knows.
func (t *Track) Fill(v *Glance) {
	v.id, v.Last = t.id, t.last
	v.record, v.has = t.latest(v.Number)
}

// Running reports whether a recorded operation is running.
func (v *Glance) Running() bool { return v.has && v.record.State == flight.Running }

// toRanks returns the job's ranks of slots, ascending.
func (v *Glance) toRanks(slots []int) (all []int) {
	for _, s := range slots {
		if s < len(v.Ranks) {
			all = append(all, v.Ranks[s])
		}
	}
	slices.Sort(all)
	return all
}

// describe returns the group's part of a snapshot.
func (v *Glance) describe(now time.Time) flight.Group {
	out := flight.Group{ID: v.id, Slot: v.Slot, Size: len(v.Ranks), Epoch: v.Epoch, Number: v.Number,
		Finished: v.Number, Agreed: v.Agreed, Queued: v.Queued, Devices: v.Devices}
	for slot, r := range v.Ranks {
		if r != slot {
			out.Ranks = v.Ranks
			break
		}
	}
	if len(v.Active) < len(v.Ranks) {
		out.Active = v.toRanks(v.Active)
	}
	if v.Err != nil {
		out.Error = v.Err.Error()
	}
	if v.Last != nil {
		out.LastError = v.Last.Error()
	}
	if v.has {
		op := v.record.Operation()
		if v.Running() {
			op.WaitsFor = v.toRanks(v.Awaits)
			out.Running = &op
			out.Finished--
		} else {
			out.Last = &op
		}
	}
	between := func(kind, call string, number, epoch uint64) {
		out.Running = &flight.Operation{Group: v.id, Number: number, Kind: kind, Call: call, Root: -1, Epoch: epoch,
			Started: now.Add(-v.Waited), Outcome: flight.Running.String(), WaitsFor: v.toRanks(v.Awaits)}
	}
	switch {
	case v.Agreeing:
		between(flight.Agreeing, fmt.Sprintf("agree #%d", v.Agreed), v.Agreed, v.Epoch)
	case v.Entering > 0:
		between(flight.Entering, fmt.Sprintf("entering epoch %d", v.Entering), v.Entering, v.Entering)
	}
	for _, p := range v.Peers {
		peer := flight.Peer{Rank: v.Ranks[p.Slot]}
		if p.HasSeen {
			peer.Seen, peer.Number = spellIn(p.Seen, v.Ranks), p.Seen.Seq
		}
		if p.HasWaits {
			peer.Waits, peer.WaitsFor = spellIn(p.Waits, v.Ranks), v.toRanks(p.WaitsFor)
		}
		out.Peers = append(out.Peers, peer)
	}
	return out
}
