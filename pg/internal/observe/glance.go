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
	Waited   time.Duration
	Queued   int // calls
	Peers    []Peer
	Err      error // why the group has failed
	Devices  string

	id     uint32
	record flight.Record // of the latest operation
	has    bool
	last   error
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
	v.id, v.last = t.id, t.last
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
		Finished: v.Number, Queued: v.Queued, Devices: v.Devices}
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
	if v.last != nil {
		out.LastError = v.last.Error()
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
	if v.Entering > 0 {
		out.Running = &flight.Operation{Group: v.id, Number: v.Entering, Kind: flight.Entering,
			Call: fmt.Sprintf("entering epoch %d", v.Entering), Root: -1, Epoch: v.Entering,
			Started: now.Add(-v.Waited), Outcome: flight.Running.String(), WaitsFor: v.toRanks(v.Awaits)}
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
