package join

import (
	"context"
	"fmt"

	"tutti/pg/membership"
)

// A Start is the first start of a rank: the job begins when all its ranks have met.
type Start struct{ ss *Session }

// First begins a first start of a connected session.
func First(ss *Session) (*Start, error) {
	if s := ss.settings; s.Rank >= s.Size {
		return nil, fmt.Errorf("rank %d is beyond the job's first %d, and the store has a job that is over",
			s.Rank, s.Size)
	}
	return &Start{ss}, nil
}

// Watch calls cancel with ErrStarted when the job has begun without this rank: others had met
// before a rank was lost that this one had not met. The caller must call stop.
func (st *Start) Watch(ctx context.Context, cancel context.CancelCauseFunc) (stop func()) {
	ss := st.ss
	ctx, end := context.WithCancel(ctx)
	done := make(chan struct{})
	go func() {
		defer close(done)
		for e := range ss.Store().Watch(ctx, membership.ViewKey) {
			if e.Err != nil || !e.Exists {
				continue
			}
			if _, v, err := membership.DecodeStored(e.Value); err != nil || v.Has(ss.Self.Rank, ss.Self.Incarnation) {
				continue
			}
			// else it belongs to an earlier job
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
