package roster

import (
	"context"
	"errors"
	"slices"
	"time"

	"tutti/bootstrap"
	"tutti/pg/membership"
)

// ends reports whether a process has said that it is ending.
func (ro *Roster) ends(p membership.Peer) bool {
	ro.mu.Lock()
	defer ro.mu.Unlock()
	return ro.ending[p]
}

// probe finds out whether a process is alive. It is dead if a link has said so, its record is gone
// with its lease and that is proof, or nothing listens at its addresses. A dying process may still
// accept connections, so a process that neither refuses nor answers is asked again for a while.
func (ro *Roster) probe(p membership.Peer) membership.Verdict {
	ctx, cancel := context.WithTimeout(ro.ctx, probeWait)
	defer cancel()
	if ro.ends(p) {
		return membership.VerdictDead
	}
	b, err := ro.dir.Store().Get(ctx, bootstrap.RankKey(p.Slot))
	if errors.Is(err, bootstrap.ErrNoKey) && ro.proves() {
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
		return membership.VerdictDead // another incarnation can register only after its end
	}
	for patience := 5 * time.Millisecond; ; {
		if ro.ends(p) || ro.dir.Refuses(ctx, rec) {
			return membership.VerdictDead
		}
		patience *= 2 // a busy process answers late, a dying one never
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

// unregistered reports whether the store has no record of an incarnation.
func (ro *Roster) unregistered(p membership.Peer) bool {
	ctx, cancel := context.WithTimeout(ro.ctx, StoreWait)
	defer cancel()
	b, err := ro.dir.Store().Get(ctx, bootstrap.RankKey(p.Slot))
	return errors.Is(err, bootstrap.ErrNoKey) || err == nil && another(b, p)
}

// allUnregistered returns those of peers that are in the view and have no record. peers belongs to
// it.
func (ro *Roster) allUnregistered(ctx context.Context, peers []membership.Peer) ([]membership.Peer, error) {
	v := ro.View()
	peers = slices.DeleteFunc(peers, func(p membership.Peer) bool { return !v.Has(p.Slot, p.Incarnation) })
	if len(peers) == 0 {
		return nil, nil
	}
	ctx, cancel := context.WithTimeout(ctx, StoreWait)
	defer cancel()
	records, err := ro.dir.Store().List(ctx, bootstrap.RankKeys)
	if err != nil {
		return nil, err
	}
	return slices.DeleteFunc(peers, func(p membership.Peer) bool {
		b, ok := records[bootstrap.RankKey(p.Slot)]
		return ok && !another(b, p)
	}), nil
}

// another reports whether b is the record of another incarnation than p.
func another(b []byte, p membership.Peer) bool {
	rec, err := bootstrap.DecodeRecord(b)
	return err == nil && rec.Incarnation != p.Incarnation
}
