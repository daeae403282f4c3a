package pg

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"slices"
	"time"

	"tutti/bootstrap"
)

// ballot is what a rank says of the agreements that it has taken part in.
type ballot struct {
	n   uint64  // how many; 0: none
	yes [2]bool // its votes in the latest and in the one before
}

// A notice of key noticeBallot is a ballot: 0 n | 8 the latest vote | 9 the one before.
const ballotSize = 10

func (b ballot) encode() []byte {
	out := binary.LittleEndian.AppendUint64(make([]byte, 0, ballotSize), b.n)
	for _, yes := range b.yes {
		v := byte(0)
		if yes {
			v = 1
		}
		out = append(out, v)
	}
	return out
}

func decodeBallot(b []byte) (ballot, error) {
	if len(b) != ballotSize {
		return ballot{}, fmt.Errorf("a ballot of %d bytes, want %d", len(b), ballotSize)
	}
	return ballot{binary.LittleEndian.Uint64(b), [2]bool{b[8] == 1, b[9] == 1}}, nil
}

// vote returns the vote in agreement n, and whether it is known.
func (b ballot) vote(n uint64) (yes, known bool) {
	switch {
	case b.n < n:
		return false, false
	case b.n-n < uint64(len(b.yes)):
		return b.yes[b.n-n], true
	}
	return true, true
}

// agreements is what a rank knows of a group's agreements, which are numbered from 1. Every rank
// counts its own calls. A rank that comes in begins with an operation; its first agreement is the
// one that follows the beginning of that at the others, who tell it the number (start). Until then
// it counts from zero, and has no number for its votes.
type agreements struct {
	mine   ballot
	counts bool           // mine.n counts from the group's first agreement, not from this rank's
	floor  uint64         // if not: how many there have been at least
	begins uint64         // if not, or if it was not: the operation that this rank has begun with
	base   uint64         // how many were counted before mine
	told   start          // what others have told of that
	heard  map[int]ballot // the others' votes, by slot
	fresh  map[int]uint64 // ranks that came in, and the operation that each begins with: not begun here
	first  map[int]start  // ranks that came in, whose first agreement is known
}

// start is with what a rank begins that comes in: an operation, and how many agreements the others
// had begun before that.
type start struct{ begins, agreed uint64 }

// A notice of key noticeStart is a start: 0 begins | 8 agreed.
const startSize = 16

func (s start) encode() []byte {
	b := binary.LittleEndian.AppendUint64(make([]byte, 0, startSize), s.begins)
	return binary.LittleEndian.AppendUint64(b, s.agreed)
}

func decodeStart(b []byte) (start, error) {
	if len(b) != startSize {
		return start{}, fmt.Errorf("a start of %d bytes, want %d", len(b), startSize)
	}
	return start{binary.LittleEndian.Uint64(b), binary.LittleEndian.Uint64(b[8:])}, nil
}

// byAdmit stands for the operation that a rank begins with when it does not begin with any: Admit
// tells all how many agreements there have been.
const byAdmit = math.MaxUint64

// afresh is how many numbers are left out when no rank is left that knows how many agreements there
// were.
const afresh = 1 << 32

func newAgreements() agreements {
	return agreements{counts: true, heard: map[int]ballot{}, fresh: map[int]uint64{}, first: map[int]start{}}
}

// count is how many agreements there have been, as far as this rank knows.
func (a *agreements) count() uint64 {
	if a.counts {
		return a.mine.n
	}
	return a.floor
}

// forget drops what is known of the rank in slot: another life is there now.
func (a *agreements) forget(slot int) {
	delete(a.heard, slot)
	delete(a.fresh, slot)
	delete(a.first, slot)
}

// from is 0 if this rank counts from the group's first agreement, else the operation from whose
// beginning it counts.
func (a *agreements) from() uint64 {
	if a.counts {
		return 0
	}
	return a.begins
}

// meet takes in the outcome of an exchange: who came in, with which operation they begin, how many
// agreements there have been at least, and the least from of the others, or if there are no others
// that operation: 0 but where nobody is left who counts from the first agreement. Then those who
// have been here longest begin with numbers that nobody has used.
func (a *agreements) meet(self int, joiners []int, begins, floor, from uint64) {
	for _, slot := range joiners {
		if slot == self {
			a.mine, a.counts, a.begins, a.base = ballot{}, false, begins, 0
			continue
		}
		a.forget(slot)
		a.fresh[slot] = begins
	}
	if a.floor = floor; from != 0 {
		a.floor += afresh
		if a.counts { // it has been told since it said that it does not
			a.shift(-a.base)
			a.counts = false
		}
		if a.begins == from {
			a.told = start{from, a.floor}
		}
	}
	a.start(a.told)
}

// join has the ranks that came in, this one perhaps, take part from agreement n+1 on.
func (a *agreements) join(n uint64) {
	if !a.counts {
		a.start(start{a.begins, n - a.mine.n})
	}
	for slot, begins := range a.fresh {
		a.first[slot] = start{begins, n}
	}
	clear(a.fresh)
}

// start takes in what others tell this rank of its beginning. It reports whether that was not known.
func (a *agreements) start(s start) bool {
	a.told = s
	if a.counts || s.begins != a.begins || s.agreed < a.floor {
		return false
	}
	a.counts = true
	a.shift(s.agreed)
	return true
}

// shift adds n to all numbers that this rank has counted itself.
func (a *agreements) shift(n uint64) {
	a.base += n
	a.mine.n += n
	for slot, f := range a.first {
		f.agreed += n
		a.first[slot] = f
	}
}

// cast counts this rank's vote in its next agreement, which follows operation seq here. Ranks that
// have begun with that, or an earlier one, take part in it.
func (a *agreements) cast(yes bool, seq uint64) {
	for slot, begins := range a.fresh {
		if begins <= seq {
			a.first[slot] = start{begins, a.mine.n}
			delete(a.fresh, slot)
		}
	}
	a.mine = ballot{a.mine.n + 1, [2]bool{yes, a.mine.yes[0]}}
}

// untold returns what ranks that came in may not know of their beginning: those that have not voted
// since.
func (a *agreements) untold() map[int]start {
	for slot, s := range a.first {
		if s.agreed < min(a.heard[slot].n, a.mine.n) {
			delete(a.first, slot)
		}
	}
	return a.first
}

// vote returns the vote of the rank in slot in this rank's latest agreement, and whether it is
// known. Who comes in has no say in those before its first.
func (a *agreements) vote(slot int) (yes, known bool) {
	if !a.counts {
		return false, false
	}
	if _, fresh := a.fresh[slot]; fresh {
		return true, true
	}
	if f, ok := a.first[slot]; ok && a.mine.n <= f.agreed {
		return true, true
	}
	return a.heard[slot].vote(a.mine.n)
}

// Agree is a fault-tolerant agreement: it returns true if all ranks that took part to its end gave
// true, and the same value at every rank that returns one, whoever is lost meanwhile. It is a
// collective with an order of its own: the n-th call of a rank meets the n-th call of all others,
// whatever became of the operations between them, so that a program can agree on whether one
// succeeded everywhere. It works on a group that has failed, and leaves it so. It waits for the
// votes of all that are in the job's view, and for a round trip to the store.
func (g *Group) Agree(ctx context.Context, yes bool) (bool, error) {
	began := time.Now()
	if err := g.enter(ctx, "agree", func() { g.cast(false) }); err != nil {
		return false, err
	}
	all, err := g.poll(yes)
	n := g.agreed.mine.n
	g.leave()
	if err != nil || g.job.members == nil {
		return all && err == nil, err
	}
	within, end := g.within(ctx, "agree", began)
	defer end()
	return g.decide(within, n, all)
}

// cast gives this rank's vote in the next agreement.
func (g *Group) cast(yes bool) {
	g.agreed.cast(yes, g.seq)
	g.tell()
}

// tell tells the others this rank's votes, and those who came in with what they have begun.
func (g *Group) tell() {
	if !g.agreed.counts {
		return
	}
	if g.agreed.mine.n > 0 {
		g.msgs.Notice(g.active, noticeBallot, g.agreed.mine.encode())
	}
	for slot, s := range g.agreed.untold() {
		if s.begins != byAdmit && slices.Contains(g.active, slot) {
			g.msgs.Notice([]int{slot}, noticeStart, s.encode())
		}
	}
}

// poll votes, and returns whether all that are left have given true.
func (g *Group) poll(yes bool) (all bool, err error) {
	if err := g.halted(); err != nil {
		return false, err
	}
	g.cast(yes)
	began := time.Now()
	g.between = true
	defer func() { g.between = false }()
	g.answer()
	for {
		all, missing := yes, []int(nil)
		for _, slot := range g.active {
			if slot == g.rank || g.out(slot) {
				continue
			}
			v, known := g.agreed.vote(slot)
			if all = all && v; !known {
				missing = append(missing, slot)
			}
		}
		if g.unvoted = missing; len(missing) == 0 {
			return all, nil
		}
		if err := g.halted(); err != nil {
			return false, err
		}
		if err := g.job.proxy.Down(g.jobRank(missing[0])); err != nil && g.job.members == nil {
			return false, &RankError{Rank: missing[0], Epoch: g.epoch, Call: "agree", Reporter: g.rank, Err: err}
		}
		if err := g.deserted(missing, began, "agree"); err != nil {
			return false, err
		}
		if err := g.pause(missing); err != nil {
			err = g.overdue(err, "agree", missing)
			g.accuse(err)
			if !g.survivable(err) {
				return false, err
			}
			g.wait.Restart()
			gone := func() bool { return slices.ContainsFunc(missing, g.out) }
			if !g.await(g.job.settings.Window+2*time.Second, gone) {
				return false, err
			}
		}
	}
}

// out reports whether the life that the group has in slot is not in the job's view.
func (g *Group) out(slot int) bool {
	switch {
	case g.job.members == nil:
		return false
	case g.lives == nil:
		return !g.job.view.Has(slot, g.at.Slots[slot].Incarnation)
	}
	return !g.job.view.Has(g.ranks[slot], g.lives[slot])
}

// decide makes the first proposal that reaches the store the outcome of agreement k: ranks that
// took votes of different ranks, because one was lost meanwhile, may propose different ones.
func (g *Group) decide(within *bound, k uint64, yes bool) (bool, error) {
	// The world's name is the same in every life of a job; what an earlier life left may be there
	// still.
	key := fmt.Sprintf("agree/%016x/%x-%d", g.job.members.first, g.name.Maker, g.name.Number)
	mine := binary.BigEndian.AppendUint64(nil, k)
	mine = append(mine, map[bool]byte{true: 1}[yes])
	var old []byte
	for {
		sctx, cancel := context.WithTimeout(within.ctx, storeWait)
		b, err := g.job.directory().Get(sctx, key)
		if err != nil && !errors.Is(err, bootstrap.ErrNoKey) { // the store may come back
			cancel()
			if !within.pause(20 * time.Millisecond) {
				return false, within.why(err)
			}
			continue
		}
		if len(b) == 9 && binary.BigEndian.Uint64(b) == k {
			cancel()
			return b[8] == 1, nil
		}
		if len(b) == 9 && binary.BigEndian.Uint64(b) > k { // they went on when this rank was removed
			cancel()
			return false, ErrEvicted
		}
		old = b
		err = g.job.directory().CompareAndSwap(sctx, key, old, mine)
		cancel()
		var c *bootstrap.ConflictError
		switch {
		case err == nil:
			return yes, nil
		case errors.As(err, &c):
		case !within.pause(20 * time.Millisecond): // it may have been written: the next look tells
			return false, within.why(err)
		}
	}
}
