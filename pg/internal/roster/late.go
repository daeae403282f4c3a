package roster

import (
	"maps"
	"math/rand/v2"
	"slices"
	"time"

	"tutti/pg/membership"
)

// accusation is this rank's claim that an operation waited for another in vain.
type accusation struct {
	until    time.Time // it is taken back unless others agree by then
	withdraw bool      // it is being taken back
}

// AccuseLocked accuses a rank that this one waited for in vain. The rank is removed if most ranks
// accuse it, or at once if alone is set.
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

// AccusedLocked returns the ranks that have no verdict yet.
func (ro *Roster) AccusedLocked() []membership.Peer {
	if len(ro.accused) == 0 {
		return nil
	}
	return slices.Collect(maps.Keys(ro.accused))
}

// AcquitLocked takes back the accusation of p. It is dropped when the machine has processed that;
// if p's removal is under way, only with its end.
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
	if !ro.cfg.Accuses {
		return
	}
	ro.proxy.Lock()
	defer ro.proxy.Unlock()
	for p, a := range ro.accused {
		if time.Now().After(a.until) {
			ro.AcquitLocked(p)
		}
	}
}

// doubt asks the store about ranks that this one has waited for in a collective for longer than a
// lease, or than half of the call's time, because the links to a host that fell silent do not break
// for a while. A program may make each of its calls shorter than a lease. doubt asks about few
// ranks, and rarely, since all ranks may be waiting. If one of them has no record, it asks about
// all that it waits for: many may have been on such hosts, and each view costs all ranks time. A
// program that continues without lost ranks also continues without ranks that stand still for that
// long; for others the timeout decides.
func (ro *Roster) doubt() {
	now := time.Now()
	ro.ticked(now)
	if !ro.cfg.Doubt || !ro.proves() || now.Before(ro.doubts) {
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
	ro.aside(func() {
		if !slices.ContainsFunc(awaited[:min(2, len(awaited))], ro.unregistered) {
			return
		}
		gone, err := ro.allUnregistered(ro.ctx, awaited)
		if err != nil {
			return
		}
		select {
		case <-time.After(time.Second): // the store may have been unreachable, and the ranks may be coming back
		case <-ro.ctx.Done():
			return
		}
		if gone, err = ro.allUnregistered(ro.ctx, gone); err != nil || !ro.proves() {
			return
		}
		for _, p := range gone {
			ro.Tell(membership.Dead{Peer: p, Cause: "its lease has ended: it has been silent for longer than that"})
		}
	})
}

// ticked says that this process runs. After a pause that may have ended leases it counts as one
// that was stopped, and so may all.
func (ro *Roster) ticked(now time.Time) {
	pause, regained := ro.pause(), now.Add(ro.regain())
	ro.mu.Lock()
	defer ro.mu.Unlock()
	if !ro.ran.IsZero() && now.Sub(ro.ran) > pause {
		ro.unproven = regained
	}
	ro.ran = now
}

// proves reports whether the lack of a record proves that a rank is dead. It does not while this
// rank has no lease, and until the others have had the time to register again: they may have lost
// their leases, too. Nor does it soon after this process was stopped.
func (ro *Roster) proves() bool {
	now, pause := time.Now(), ro.pause()
	ro.mu.Lock()
	defer ro.mu.Unlock()
	return !ro.leaseless && now.After(ro.unproven) && (ro.ran.IsZero() || now.Sub(ro.ran) <= pause)
}

// pause returns how long this process may stand still without losing its lease, which it keeps
// alive more often.
func (ro *Roster) pause() time.Duration { return ro.dir.Store().TTL() / 2 }

// regain returns the time that ranks have to be registered again after they have lost their leases.
func (ro *Roster) regain() time.Duration { return ro.dir.Store().TTL() + 2*time.Second }
