package roster

import (
	"context"
	"errors"
	"time"

	"tutti/bootstrap"
	"tutti/pg/membership"
)

// probe finds out whether a process lives: its record is gone with its lease, or nobody listens
// where it did. A process that is just dying may still take connections, so one that neither
// refuses nor answers is asked again for a while.
func (ro *Roster) probe(p membership.Peer) membership.Verdict {
	ctx, cancel := context.WithTimeout(ro.ctx, probeWait)
	defer cancel()
	b, err := ro.dir.Store().Get(ctx, bootstrap.RankKey(p.Slot))
	if errors.Is(err, bootstrap.ErrNoKey) {
		return membership.VerdictDead
	}
	var rec bootstrap.Record
	if err == nil {
		rec, err = bootstrap.DecodeRecord(b)
	}
	if err != nil {
		known, ok := ro.dir.Known(p.Slot)
		if !ok {
			return membership.VerdictUnknown
		}
		rec = known
	}
	if rec.Incarnation != p.Incarnation {
		return membership.VerdictDead // it had to be gone for another to be there
	}
	for patience := 5 * time.Millisecond; ; {
		if ro.dir.Refuses(ctx, rec) {
			return membership.VerdictDead
		}
		patience *= 2 // a busy process takes longer to answer, a dying one never does
		actx, cancel := context.WithTimeout(ctx, patience)
		err := ro.dir.Answers(actx, rec)
		cancel()
		if err == nil {
			return membership.VerdictAlive
		}
		select {
		case <-ctx.Done():
			return membership.VerdictUnknown
		case <-time.After(2 * time.Millisecond):
		}
	}
}

// registered reports whether the store has a life's record, or does not say.
func (ro *Roster) registered(p membership.Peer) bool {
	ctx, cancel := context.WithTimeout(ro.ctx, StoreWait)
	defer cancel()
	b, err := ro.dir.Store().Get(ctx, bootstrap.RankKey(p.Slot))
	if err != nil {
		return !errors.Is(err, bootstrap.ErrNoKey)
	}
	rec, err := bootstrap.DecodeRecord(b)
	return err != nil || rec.Incarnation == p.Incarnation
}
