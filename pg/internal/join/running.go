package join

import (
	"context"
	"errors"
	"fmt"
	"time"

	"tutti/bootstrap"
	"tutti/pg/membership"
)

// ErrStarted says that a job began without this incarnation of a rank.
var ErrStarted = errors.New("the job began without this incarnation of the rank")

// A Job is a running job, as described in the store.
type Job struct {
	View  membership.View
	First uint64 // names it in the store: see membership.EncodeStored
}

// lookPause is the pause between two looks whether a job is running: the records of its ranks come
// back without a change of the view.
const lookPause = time.Second

// Running returns the job if it is running, that is, if an incarnation of its view is registered.
// It returns nil if the job is about to begin, or the store contains the keys of an earlier job of
// the same name. A rank beyond the job's first ones waits until the job runs.
func (ss *Session) Running(ctx context.Context) (*Job, error) {
	job, err := ss.look(ctx)
	s := ss.settings
	if err != nil || job != nil || s.Rank < s.Size || ss.Met() {
		return job, err
	}
	wctx, cancel := context.WithCancel(ctx)
	defer cancel()
	changes, again := ss.Store().Watch(wctx, membership.ViewKey), time.NewTicker(lookPause)
	defer again.Stop()
	for job == nil && err == nil {
		select {
		case e, open := <-changes:
			if err = ended(ctx, e, open); errors.Is(err, bootstrap.ErrStoreAway) && ss.Store().Err() == nil {
				changes, err = nil, nil // the store elects a leader, say: the ticker goes on
			}
		case <-again.C:
		}
		if err == nil {
			job, err = ss.look(ctx)
		}
	}
	if err != nil {
		err = fmt.Errorf("rank %d is beyond the job's first %d, and no job runs that it could join: %w", s.Rank, s.Size,
			err)
	}
	return job, err
}

// look is running for a rank that joins: the store may be away for a while.
func (ss *Session) look(ctx context.Context) (job *Job, err error) {
	err = ss.persist(ctx, func() (err error) {
		job, err = ss.running(ctx)
		return err
	})
	return job, err
}

func (ss *Session) running(ctx context.Context) (*Job, error) {
	store := ss.Store()
	b, err := store.Get(ctx, membership.ViewKey)
	if errors.Is(err, bootstrap.ErrNoKey) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	first, view, err := membership.DecodeStored(b)
	if err != nil {
		return nil, err
	}
	if alive, err := runs(ctx, store, view, ss.Self.Rank); err != nil || !alive {
		return nil, err
	}
	return &Job{view, first}, nil
}

// runs reports whether an incarnation of view is registered, in another slot than that of a rank
// that joins: otherwise the view is that of an earlier job.
func runs(ctx context.Context, store bootstrap.Store, view membership.View, joins int) (bool, error) {
	records, err := store.List(ctx, bootstrap.RankKeys)
	for _, b := range records {
		if rec, bad := bootstrap.DecodeRecord(b); bad == nil && rec.Rank != joins &&
			view.Has(rec.Rank, rec.Incarnation) {
			return true, nil
		}
	}
	return false, err
}
