package roster

import (
	"maps"
	"math/rand/v2"
	"slices"
	"time"

	"tutti/pg/membership"
)

// accusation is what this rank has said of another that its operation waited for in vain.
type accusation struct {
	until    time.Time // others agree by then, or it is taken back
	withdraw bool      // it is being taken back
}

// AccuseLocked says that this rank waited in vain for a rank, which goes if most ranks say so, or at
// once if alone is set.
func (ro *Roster) AccuseLocked(rank int, alone bool) {
	p := membership.Peer{Slot: rank, Incarnation: ro.view.Slots[rank].Incarnation}
	ro.accused[p] = &accusation{until: time.Now().Add(ro.cfg.Window)}
	ro.groups.Accused()
	if alone {
		ro.Tell(membership.Missed{Peer: p})
	} else {
		ro.Tell(membership.Late{Peer: p})
	}
}

// AccusedLocked returns those on whom a verdict is outstanding.
func (ro *Roster) AccusedLocked() []membership.Peer {
	if len(ro.accused) == 0 {
		return nil
	}
	return slices.Collect(maps.Keys(ro.accused))
}

// AcquitLocked takes back what this rank said of p. It is forgotten when the machine has heard that,
// but if p's removal is under way only with that.
func (ro *Roster) AcquitLocked(p membership.Peer) {
	a := ro.accused[p]
	if a == nil || a.withdraw {
		return
	}
	a.withdraw = true
	ro.Tell(membership.OnTime{Peer: p})
	ro.inspect(func(m *membership.Machine) {
		if m.Condemned(p) {
			return
		}
		ro.state(func() {
			if ro.accused[p] == a {
				delete(ro.accused, p)
			}
			ro.groups.Judged()
		})
	})
}

// expire takes back accusations that others have not shared in time.
func (ro *Roster) expire() {
	ro.proxy.Lock()
	defer ro.proxy.Unlock()
	for p, a := range ro.accused {
		if time.Now().After(a.until) {
			ro.AcquitLocked(p)
		}
	}
}

// doubt asks the store for those whom this rank has been waiting for, in a collective, for longer
// than a lease: a host that fell silent breaks no link for a while. It asks for few and not often,
// since all may be waiting. A program that goes on without lost ranks goes on without those that
// stand still for that long, too; for others the timeout decides.
func (ro *Roster) doubt() {
	now := time.Now()
	if !ro.cfg.Doubt || now.Before(ro.doubts) {
		return
	}
	ttl := ro.dir.Store().TTL()
	var awaited []membership.Peer
	ro.proxy.Lock()
	for _, r := range ro.groups.Awaited(ttl) {
		if r < ro.view.Size() && ro.view.Slots[r].Incarnation != 0 {
			awaited = append(awaited, membership.Peer{Slot: r, Incarnation: ro.view.Slots[r].Incarnation})
		}
	}
	ro.proxy.Unlock()
	if len(awaited) == 0 {
		ro.doubts = now.Add(ttl / 8)
		return
	}
	ro.doubts = now.Add(ttl + rand.N(ttl))
	rand.Shuffle(len(awaited), func(i, k int) { awaited[i], awaited[k] = awaited[k], awaited[i] })
	for _, p := range awaited[:min(2, len(awaited))] {
		ro.aside(func() {
			if ro.registered(p) {
				return
			}
			select {
			case <-time.After(time.Second): // it may be coming back: the store was away, perhaps
			case <-ro.ctx.Done():
				return
			}
			if !ro.registered(p) {
				ro.Tell(membership.Dead{Peer: p,
					Cause: "its lease has ended: it has been silent for longer than that"})
			}
		})
	}
}
