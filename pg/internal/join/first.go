package join

import (
	"context"
	"fmt"
	"time"

	"tutti/bootstrap"
	"tutti/pg/membership"
)

// A Start is the first start of a rank: the job begins when all its ranks have met.
type Start struct{ ss *Session }

// First begins a first start of a connected session. If rank 0 serves the store it waits until that
// is registered, and returns bootstrap.ErrStoreEnds if it has left an earlier job of the launch
// instead.
func First(ctx context.Context, ss *Session) (*Start, error) {
	if s := ss.settings; s.Rank >= s.Size {
		return nil, fmt.Errorf("rank %d is beyond the job's first %d, and the store has a job that is over",
			s.Rank, s.Size)
	}
	if ss.settings.Ends != nil {
		if err := ss.awaitHost(ctx); err != nil {
			return nil, fmt.Errorf("waiting for rank 0, which serves the store: %w", err)
		}
	}
	return &Start{ss}, nil
}

// awaitHost is First's wait for rank 0.
func (ss *Session) awaitHost(ctx context.Context) error {
	wctx, cancel := context.WithCancel(ctx)
	defer cancel()
	changes, again := ss.Store().Watch(wctx, bootstrap.RankKey(0)), time.NewTicker(lookPause)
	defer again.Stop()
	for {
		select {
		case e, open := <-changes:
			switch err := ended(ctx, e, open); {
			case away(err):
				changes = nil // until the next tick
			case err != nil || e.Exists:
				return err
			}
		case <-again.C:
			if changes == nil {
				changes = ss.Store().Watch(wctx, bootstrap.RankKey(0))
			}
		case <-ctx.Done():
			return context.Cause(ctx)
		}
		if ss.settings.Ends(ctx, ss.Store()) {
			return bootstrap.ErrStoreEnds
		}
	}
}

// Watch calls cancel with ErrStarted when the job has begun without this rank: others had met
// before a rank was lost that this one had not met. The caller must call stop.
func (st *Start) Watch(ctx context.Context, cancel context.CancelCauseFunc) (stop func()) {
	ss := st.ss
	ctx, end := context.WithCancel(ctx)
	done := make(chan struct{})
	go func() {
		defer close(done)
		// All ranks look, at the records of all.
		again := time.NewTicker(max(lookPause, time.Duration(ss.settings.Size)*10*time.Millisecond))
		changes := ss.Store().Watch(ctx, membership.ViewKey)
		defer again.Stop()
		lacks := false // this rank is not in the view, which may also be that of an earlier job
		for ctx.Err() == nil {
			select {
			case e, open := <-changes:
				switch {
				case !open:
					changes = nil
				case e.Err == nil:
					_, v, err := membership.DecodeStored(e.Value)
					lacks = e.Exists && err == nil && !v.Has(ss.Self.Rank, ss.Self.Incarnation)
				}
			case <-again.C:
				if changes == nil {
					changes = ss.Store().Watch(ctx, membership.ViewKey)
				}
			case <-ctx.Done():
			}
			if !lacks {
				continue
			}
			if job, err := ss.running(ctx); err == nil && job != nil &&
				!job.View.Has(ss.Self.Rank, ss.Self.Incarnation) {
				cancel(ErrStarted)
			}
		}
	}()
	return func() {
		end()
		<-done
	}
}

// Met says that this rank has met all others.
func (st *Start) Met() { st.ss.met.Store(true) }
