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
	"tutti/p2p"
	"tutti/pg/internal/roster"
)

// ballot holds a rank's latest votes.
type ballot struct {
	n     uint64  // number of agreements that the rank has voted in; 0: none
	yes   [2]bool // its votes in the latest and in the one before
	knows bool    // it has the latest's outcome; told by members of subgroups to their first rank
}

// agreement is a group's state of agreements.
type agreement struct {
	ballot  ballot         // this rank's votes
	ballots map[int]ballot // those of the others, by slot
	outcome bool           // of the latest agreement, if ballot.knows
	between bool           // a call is in Agree, between two operations
	began   time.Time      // that call
	unvoted []int          // slots whose votes it waits for
}

// abstains is the ballot of a rank that is coming in. Others do not wait for its vote before its
// program has the group.
var abstains = ballot{n: math.MaxUint64}

// count returns the number of agreements that this rank has taken part in, as far as it knows.
func (b ballot) count() uint64 {
	if b == abstains {
		return 0
	}
	return b.n
}

// join lets the ranks that were coming in, possibly this one, vote from agreement n+1 on. All ranks
// know of them before any of them begins that agreement. Agreements under way do not wait for them.
func (g *Group) join(n uint64) {
	first := ballot{n: n, yes: [2]bool{true, true}}
	if g.ballot == abstains {
		g.ballot = first
	}
	for slot, b := range g.ballots {
		if b == abstains {
			g.ballots[slot] = first
		}
	}
}

// A notice of key noticeBallot is a ballot: 0 n | 8 latest vote | 9 vote before it, and 2 if knows.
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
	if b.knows {
		out[9] |= 2
	}
	return out
}

func decodeBallot(b []byte) (ballot, error) {
	if len(b) != ballotSize {
		return ballot{}, fmt.Errorf("a ballot of %d bytes, want %d", len(b), ballotSize)
	}
	n := binary.LittleEndian.Uint64(b)
	if n > maxNumber {
		return ballot{}, fmt.Errorf("a ballot in agreement %d, the last possible is %d", n, uint64(maxNumber))
	}
	return ballot{n, [2]bool{b[8]&1 != 0, b[9]&1 != 0}, b[9]&2 != 0}, nil
}

// vote returns the vote in agreement n, and whether it is known. A rank that came in after n counts
// as true.
func (b ballot) vote(n uint64) (yes, known bool) {
	switch {
	case b.n < n:
		return false, false
	case b.n-n < uint64(len(b.yes)):
		return b.yes[b.n-n], true
	}
	return true, true
}

// Agree is a fault-tolerant agreement. It returns true if all ranks that took part to its end gave
// true, and the same value at every rank that returns one, even if ranks are lost meanwhile. It is
// a collective with its own order: the n-th call of a rank meets the n-th call of all others, even
// if the operations between them failed, so that a program can agree on whether an operation
// succeeded everywhere. It works on a failed group, and does not repair it. It waits for the votes
// of all ranks in the job's view, and for a round trip to the store: later calls of the group wait
// until the store has answered.
func (g *Group) Agree(ctx context.Context, yes bool) (bool, error) {
	began := time.Now()
	if err := g.enter(ctx, "agree", func() { g.cast(false) }); err != nil {
		return false, err
	}
	defer g.leave() // and no earlier: the store keeps the outcome of one agreement of a group
	g.between, g.agreement.began = true, began
	defer func() { g.between = false }()
	all, err := g.poll(yes)
	if err != nil || g.job.roster == nil {
		return all && err == nil, err
	}
	n := g.ballot.n
	g.job.proxy.Unlock()
	within, end := g.within(ctx, "agree", began)
	outcome, err := g.decide(within, n, all)
	end()
	g.job.proxy.Lock()
	if err == nil && g.name != worldName && g.halted() == nil {
		g.ballot.knows, g.outcome = true, outcome
		g.msgs.Notice(g.v.Active[:1], noticeBallot, g.ballot.encode())
	}
	return outcome, err
}

// maxForgetting bounds the wait of Close for ranks that have voted and have no outcome yet.
const maxForgetting = time.Second

// storePause is how long closed groups ask a store no more that has not removed an outcome.
var storePause = time.Minute

// forget is for the first rank of a subgroup that closes it. It removes the outcome of the last
// agreement from the store when all members have it. If one may be without it, the store keeps it.
func (g *Group) forget() {
	p := g.job.proxy
	p.Lock()
	defer p.Unlock()
	if !g.ballot.knows || g.rank != g.v.Active[0] || g.line.calls > 0 || time.Since(g.job.unforgotten) < storePause {
		return
	}
	var w p2p.Wait
	w.Reset(context.Background(), maxForgetting, false)
	for slot := range g.v.Size {
		for slot != g.rank && !g.ballots[slot].knew(g.ballot.n) {
			if g.err != nil || g.msgs.Err() != nil || g.msgs.Closed(slot) || g.out(slot) || p.Progress(&w) != nil {
				return
			}
		}
	}
	last := encodeOutcome(g.ballot.n, g.outcome)
	p.Unlock()
	ctx, cancel := context.WithTimeout(context.Background(), roster.StoreWait)
	err := g.job.session.Store().CompareAndSwap(ctx, g.outcomeKey(), last, nil)
	cancel()
	p.Lock()
	if err != nil {
		g.job.log.Debug("an outcome of a closed group stays in the store", "group", g.id(), "err", err)
		if !errors.Is(err, bootstrap.ErrConflict) {
			g.job.unforgotten = time.Now()
		}
	}
}

// knew reports whether the rank has ended agreement n.
func (b ballot) knew(n uint64) bool { return b.n > n || b.n == n && b.knows }

// outcomeKey is the key of the group's outcomes. The world's name is the same for every run of a
// job, and a previous run may have left its key in the store.
func (g *Group) outcomeKey() string {
	return fmt.Sprintf("agree/%016x/%x-%d", g.job.roster.First(), g.name.Maker, g.name.Number)
}

// encodeOutcome returns the stored form of agreement k's outcome.
func encodeOutcome(k uint64, yes bool) []byte {
	return append(binary.BigEndian.AppendUint64(nil, k), map[bool]byte{true: 1}[yes])
}

// cast sends this rank's vote in the next agreement.
func (g *Group) cast(yes bool) {
	g.ballot = ballot{n: g.ballot.n + 1, yes: [2]bool{yes, g.ballot.yes[0]}}
	g.msgs.Notice(g.v.Active, noticeBallot, g.ballot.encode())
}

// poll votes. It returns whether all ranks that are left have given true.
func (g *Group) poll(yes bool) (all bool, err error) {
	if err := g.halted(); err != nil {
		return false, err
	}
	g.cast(yes)
	g.answer()
	for {
		all, missing := yes, []int(nil)
		for _, slot := range g.v.Active {
			if slot == g.rank || g.out(slot) {
				continue
			}
			v, known := g.ballots[slot].vote(g.ballot.n)
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
		if err := g.irreplaceable(missing, "agree"); err != nil {
			return false, err
		}
		if err := g.deserted(missing, "agree"); err != nil {
			return false, err
		}
		if err := g.pause(missing); err != nil {
			err = g.overdue(err, "agree", missing, 0)
			g.accuse(err)
			if !g.survivable(err) {
				return false, err
			}
			g.wait.Restart()
			if !g.await(g.deliberation(), func() bool { return slices.ContainsFunc(missing, g.out) }) {
				return false, err
			}
		}
	}
}

// decide makes the first proposal that reaches the store the outcome of agreement k. If a rank was
// lost meanwhile, ranks may have counted votes of different ranks, and propose different outcomes.
// Without the lock. Abort of any rank ends it.
func (g *Group) decide(within *bound, k uint64, yes bool) (bool, error) {
	key, mine := g.outcomeKey(), encodeOutcome(k, yes)
	var old []byte
	ended := func() error {
		g.job.proxy.Lock()
		defer g.job.proxy.Unlock()
		return g.halted()
	}
	for {
		if err := ended(); err != nil {
			return false, err
		}
		sctx, cancel := context.WithTimeout(within.ctx, roster.StoreWait)
		b, err := g.job.session.Store().Get(sctx, key)
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
		if len(b) == 9 && binary.BigEndian.Uint64(b) > k { // the others went on after removing this rank
			cancel()
			return false, ErrEvicted
		}
		old = b
		err = g.job.session.Store().CompareAndSwap(sctx, key, old, mine)
		cancel()
		var c *bootstrap.ConflictError
		switch {
		case err == nil:
			return yes, nil
		case errors.As(err, &c):
		case !within.pause(20 * time.Millisecond): // the value may have been written: the next Get tells
			return false, within.why(err)
		}
	}
}
