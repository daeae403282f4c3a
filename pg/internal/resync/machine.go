package resync

import (
	"maps"
	"math"
	"slices"
)

// Point names an exchange of a group: the epoch of the view whose members take part, and the number
// of earlier exchanges in that view.
type Point struct{ View, Attempt uint64 }

// Before reports whether p precedes o.
func (p Point) Before(o Point) bool {
	return p.View < o.View || p.View == o.View && p.Attempt < o.Attempt
}

// View lists the members of the group in an epoch of the job's view: slots, ascending, and their
// incarnations.
type View struct {
	Epoch        uint64
	Members      []int
	Incarnations []uint64
}

// Has reports whether slot is a member.
func (v View) Has(slot int) bool {
	_, is := slices.BinarySearch(v.Members, slot)
	return is
}

// lost reports whether an incarnation of v is not in next.
func (v View) lost(next View) bool {
	for i, slot := range v.Members {
		at, is := slices.BinarySearch(next.Members, slot)
		if !is || i < len(v.Incarnations) && at < len(next.Incarnations) &&
			v.Incarnations[i] != next.Incarnations[at] {
			return true
		}
	}
	return false
}

// Machine is the state of one rank in the exchanges of a group. It is not safe for concurrent use.
type Machine struct {
	self int
	now  View // the job's latest view

	at      Point // the exchange that this rank entered last
	in      View  // the members of that exchange
	lost    bool  // one of them is not in the latest view
	mine    Standing
	pending bool             // the exchange is not complete on this rank
	aim     uint64           // the next operation needs a view of this epoch or later; 0: any
	got     map[int]Standing // the standings of that exchange
	heard   map[int]Told     // the latest standing of each slot
	newest  Point            // the latest exchange of those

	last   Outcome
	missed Outcome // the latest that a member knew when it entered that exchange
	failed bool

	gave, upTo uint64 // the first and the last operation of GiveUp of which no exchange has decided; 0: none

	since  uint64 // of Standing
	stops  Stops  // that were told in the latest complete exchange, and before
	uneven bool   // the latest complete exchange: see complete
}

// Told is a standing and the exchange that it belongs to.
type Told struct {
	At Point
	Standing
}

// New makes the machine of the rank in slot self of a group that is in view. The next operation is
// 1, and no exchange is needed.
func New(self int, view View) *Machine {
	return &Machine{self: self, now: view, in: view, at: Point{View: view.Epoch}, heard: map[int]Told{}}
}

// See handles a view of the job. Views older than the latest are ignored.
func (m *Machine) See(v View) {
	if v.Epoch >= m.now.Epoch {
		m.now, m.lost = v, m.in.lost(v)
	}
}

// Now returns the latest view.
func (m *Machine) Now() View { return m.now }

// In returns the view of the exchange that was entered last.
func (m *Machine) In() View { return m.in }

// At returns the exchange that was entered last.
func (m *Machine) At() Point { return m.at }

// Next returns the exchange that this rank waits for: the one that it is in or, if that is
// complete, the one after it.
func (m *Machine) Next() Point {
	if m.pending {
		return m.at
	}
	return Point{View: m.at.View, Attempt: m.at.Attempt + 1}
}

// Arrived reports whether the rank in slot has told its standing in the exchange that this rank
// waits for, or in a later one.
func (m *Machine) Arrived(slot int) bool {
	t, ok := m.heard[slot]
	return ok && !t.At.Before(m.Next())
}

// Heard returns the latest standing that the rank in slot has told.
func (m *Machine) Heard(slot int) (Told, bool) {
	t, ok := m.heard[slot]
	return t, ok
}

// Hear handles another rank's standing. It reports whether that completes the exchange.
func (m *Machine) Hear(slot int, t Told) bool {
	if slot == m.self {
		return false
	}
	if old, ok := m.heard[slot]; !ok || old.At.Before(t.At) {
		m.heard[slot] = t
		if m.newest.Before(t.At) {
			m.newest = t.At
		}
	}
	if m.pending && t.At == m.at && m.in.Has(slot) {
		if _, told := m.got[slot]; !told {
			m.got[slot] = t.Standing
			return m.complete()
		}
	}
	return false
}

// Aim demands that the next operation run in a view of at least that epoch. Entering such a view,
// or Aim(0), ends the demand.
func (m *Machine) Aim(epoch uint64) { m.aim = epoch }

// Target returns the epoch of the view that this rank should be in, as far as it is known.
func (m *Machine) Target() uint64 { return max(m.now.Epoch, m.aim) }

// Lost reports whether an incarnation that takes part in this rank's exchange is no longer in the
// latest view.
func (m *Machine) Lost() bool { return m.lost }

// Member reports whether this rank is in the latest view.
func (m *Machine) Member() bool { return m.now.Has(m.self) }

// target returns the exchange that this rank should enter at the next boundary between operations:
// the present one, unless there is a reason for another. Reasons are a loss; a grown view, if Aim
// demands its epoch; a broken channel or a call of Recover (renew), unless the present exchange is
// not complete; and members that have entered another exchange. Members that call Recover or are
// coming in wait for programs, and are no reason by themselves, unless that call has ended at this
// rank already. passive: this rank's program is in no call, and the rank only follows others.
func (m *Machine) target(renew, passive bool) Point {
	renew = !m.pending && (renew || m.gave > 0) // the others have to learn of it before the next operation
	stuck := !passive && m.stuck()
	leaves := !passive && (stuck || m.Lost() || m.aim > m.at.View)
	next := m.at
	if leaves && next.View < m.now.Epoch {
		next = Point{View: m.now.Epoch}
	}
	if next.Before(m.newest) {
		for slot, t := range m.heard {
			if t.At.View != m.now.Epoch || !next.Before(t.At) || !m.now.Has(slot) {
				continue
			}
			if t.Joins && stuck || !t.Joins && (leaves || renew && !passive || !t.Calls || t.past() < m.since) {
				next = t.At
			}
		}
	}
	if next == m.at && renew && !passive {
		next.Attempt++
	}
	return next
}

// stuck reports whether the exchange that this rank is in cannot be completed here: a member has
// entered another one without having told its standing in this one. A member that had told it may
// have completed it.
func (m *Machine) stuck() bool {
	if !m.at.Before(m.newest) {
		return false
	}
	for _, slot := range m.Missing() {
		if t, ok := m.heard[slot]; ok && m.at.Before(t.At) {
			return true
		}
	}
	return false
}

// Behind reports whether this rank has to wait for a view that it does not know yet, because other
// ranks are in it or Aim has named it.
func (m *Machine) Behind() bool {
	if m.aim > m.now.Epoch {
		return true
	}
	if m.newest.View <= m.now.Epoch {
		return false
	}
	for slot, t := range m.heard {
		if t.At.View > m.now.Epoch && !t.Joins && m.now.Has(slot) {
			return true
		}
	}
	return false
}

// Due reports whether this rank should enter another exchange before its next operation.
func (m *Machine) Due(renew bool) bool {
	return m.Member() && m.target(renew, false) != m.at
}

// Asked reports whether other ranks wait in an exchange for this one, while its program does not
// wait. A rank whose group has failed tells its standing once in an epoch, and again after each
// call of Recover; then the others know that its program has to call Recover.
func (m *Machine) Asked(failed bool) bool {
	if !m.Member() || failed && m.mine.Failed && !m.mine.Calls && m.at.View == m.now.Epoch {
		return false
	}
	return m.target(false, true) != m.at
}

// Began reports whether the operations that this rank's program has called, of which seq is the
// latest, include one that follows the exchange that this rank entered last.
func (m *Machine) Began(seq uint64) bool { return !m.pending && seq >= m.last.Start }

// Fresh reports whether the exchange that this rank entered last serves as that of a call of
// Recover; seq is the latest operation that its program has called. Unless the group has failed
// since, it does if no operation has run on this rank in it: another one would end the operations
// that other ranks have begun. If it is uneven (see complete), or a member is in Recover in a later
// one, it serves only for a call that ends at a stop.
func (m *Machine) Fresh(seq uint64) bool {
	return !m.Began(seq) &&
		(m.pending || m.stop(seq) < m.last.Start || !m.uneven && !m.called(func(Standing) bool { return true }))
}

// Stopped reports whether the call of Recover after operation seq has ended at another rank
// already. Then the group has failed, if it has, since that call: in an operation that the program
// has yet to call here.
func (m *Machine) Stopped(seq uint64) bool {
	return !m.Began(seq) && !m.pending && m.stops.after(max(seq, m.since)) <= m.last.Start
}

// Awaited reports whether the operation that the program calls next, after seq, cannot run in the
// exchange that this rank entered last, because a member is in Recover in a later one, or will be.
// That member has not run the operation: it waits there for this rank.
func (m *Machine) Awaited(seq uint64) bool {
	return !m.pending && seq+1 >= m.last.Start &&
		(m.uneven || m.called(func(s Standing) bool { return !s.Failed && s.Next() <= seq+1 }))
}

// called reports whether a member has called Recover, with such a standing, in a later exchange
// than the one that this rank entered last.
func (m *Machine) called(such func(s Standing) bool) bool {
	if !m.at.Before(m.newest) {
		return false
	}
	for slot, t := range m.heard {
		if t.Calls && m.at.Before(t.At) && t.At.View == m.now.Epoch && m.now.Has(slot) && such(t.Standing) {
			return true
		}
	}
	return false
}

// Recovered notes that a call of Recover ends, and returns the number of the operation before the
// one that the program calls next; seq is the latest that it has called. After the same call all
// ranks continue with the same operation, although some may have made the call, and given up
// operations since, before others. So the call ends at the first stop after seq and after this
// rank's own latest call: there the same call has ended on another rank. If there is no such stop,
// the call ends where the view begins. The operations between a stop and that beginning are over.
// They end with an error, without being run, when the program calls them.
func (m *Machine) Recovered(seq uint64) uint64 {
	m.since = max(seq+1, m.stop(seq))
	return m.since - 1
}

// stop returns the operation that follows a call of Recover: a stop, or the first one of the view.
func (m *Machine) stop(seq uint64) uint64 {
	return min(m.stops.after(max(seq, m.since)), m.last.Start)
}

// GiveUp notes that this rank ends operation seq, the one at hand, without knowing what becomes of
// it at others: they may have its result. The exchange in which this rank tells of it decides, and
// is due before the next operation. An operation that is not uniform, and follows none that is
// noted, is over when it ends, and is not noted. Nor is one that an exchange has ended.
func (m *Machine) GiveUp(seq uint64, uniform bool) {
	if seq < m.last.Start {
		return
	}
	if m.gave == 0 && uniform {
		m.gave = seq
	}
	if m.gave > 0 {
		m.upTo = seq
	}
}

// Between returns where this rank stands between two operations, of which seq is the last that its
// program has called.
func (m *Machine) Between(seq uint64) Standing {
	if m.gave > 0 {
		return Standing{Over: m.gave - 1, Given: seq - m.gave}
	}
	return Standing{Over: seq, Intact: true}
}

// Enter enters the exchange of Due or Asked, with standing mine, and returns what to tell the other
// members. complete reports whether all have told theirs.
func (m *Machine) Enter(renew, passive bool, mine Standing) (tell Told, complete bool) {
	if m.at, m.in, m.lost = m.target(renew, passive), m.now, false; m.at.View >= m.aim {
		m.aim = 0
	}
	mine.Last, mine.Since, mine.Stops = m.last, m.since, m.stops
	mine.Stops.add(m.since)
	m.mine, m.pending = mine, true
	m.got = map[int]Standing{m.self: mine}
	for _, slot := range m.in.Members {
		if t, ok := m.heard[slot]; ok && t.At == m.at && slot != m.self {
			m.got[slot] = t.Standing
		}
	}
	return Told{m.at, mine}, m.complete()
}

// complete ends the exchange if all members have told their standings.
//
// An exchange is uneven if all members are in Recover, and the calls of some end at stops. Those
// programs get an error of each operation that they have missed, and then call Recover again, or
// the first operation of the view. The calls of the other ranks wait for that in another exchange.
// Otherwise their next operations would wait for those programs, and could end, by a deadline,
// before these had come to them. All would then be in Recover as before, and this could go on for
// ever.
func (m *Machine) complete() bool {
	if !m.pending || len(m.got) < len(m.in.Members) {
		return false
	}
	m.pending = false
	m.missed = Outcome{}
	for _, s := range m.got {
		if m.missed.At.Before(s.Last.At) {
			m.missed = s.Last
		}
	}
	m.last = Outcome{At: m.at}
	m.last.Start, m.last.Confirmed = Resume(slices.Collect(maps.Values(m.got)))
	if m.upTo < m.last.Start {
		m.gave, m.upTo = 0, 0
	} else { // this rank gave them up after it had told its standing
		m.gave = max(m.gave, m.last.Start)
	}
	failed, all, together, least := false, true, true, uint64(math.MaxUint64)
	for _, s := range m.got {
		failed = failed || m.fails(s)
		all, together = all && (s.Calls || s.Joins), together && s.Calls
		if !s.Joins {
			least = min(least, s.past())
		}
		m.stops.merge(s.Stops)
	}
	m.failed = failed && !all
	m.stops.forget(least)
	m.uneven = together && m.stops.after(least) < m.last.Start
	return true
}

// Fails reports whether the rank in slot has told in the exchange that was completed last that its
// group has failed, in an operation that was not over.
func (m *Machine) Fails(slot int) bool { return m.fails(m.got[slot]) }

func (m *Machine) fails(s Standing) bool { return s.Failed && !s.over(m.missed) }

// Pending reports whether the exchange that was entered last is not complete.
func (m *Machine) Pending() bool { return m.pending }

// Told returns the standing of slot in the exchange that was entered last.
func (m *Machine) Told(slot int) (Standing, bool) {
	s, ok := m.got[slot]
	return s, ok
}

// Outcome returns the outcome of the exchange that was completed last, and whether the group has
// failed in it, at all members, until all have called Recover.
func (m *Machine) Outcome() (o Outcome, failed bool) { return m.last, m.failed }

// Missing lists the members whose standings are missing in the exchange that was entered last.
func (m *Machine) Missing() (slots []int) {
	if !m.pending {
		return nil
	}
	for _, slot := range m.in.Members {
		if _, told := m.got[slot]; !told {
			slots = append(slots, slot)
		}
	}
	return slots
}
