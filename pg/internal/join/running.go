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
			if err = ended(ctx, e, open); away(err) {
				changes, err = nil, nil // the store elects a leader, say: the ticker goes on
			}
		case <-again.C:
		case <-ctx.Done():
			err = context.Cause(ctx)
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

// look is running for a rank that joins: the store, or the lease, may be away for a while.
func (ss *Session) look(ctx context.Context) (job *Job, err error) {
	err = ss.persist(ctx, func() (err error) {
		job, err = ss.running(ctx)
		return err
	})
	return job, err
}

// running is Running, which does not wait for a job.
func (ss *Session) running(ctx context.Context) (*Job, error) {
	for unfit := (grace{}); ; {
		job, misfit, err := ss.stored(ctx)
		if err != nil || misfit == nil {
			return job, err
		}
		if unfit.over(misfit, ss.Store()) {
			return nil, misfit
		}
		select {
		case <-ctx.Done():
			return nil, fmt.Errorf("%w (%w)", misfit, context.Cause(ctx))
		case <-time.After(lookPause):
		}
	}
}

// stored returns the job of the view in the store, nil if it does not run, or why this process does
// not fit into it.
func (ss *Session) stored(ctx context.Context) (job *Job, misfit, err error) {
	store := ss.Store()
	b, err := store.Get(ctx, membership.ViewKey)
	if errors.Is(err, bootstrap.ErrNoKey) {
		return nil, nil, nil
	}
	if err != nil {
		return nil, nil, err
	}
	first, view, err := membership.DecodeStored(b)
	if err != nil {
		misfit, err = ss.settings.foreign(ctx, store, err)
		return nil, misfit, err
	}
	if rec, err := registered(ctx, store, view, ss.Self.Rank); err != nil || rec == nil {
		return nil, nil, err
	}
	return &Job{view, first}, nil, nil
}

// A grace is the time for which a process waits for a job that it does not fit into: that may be an
// earlier one, which is about to end, or whose leases are.
type grace struct{ began time.Time } // zero: the process may fit

// over reports whether the grace is over. misfit is why the process does not fit, nil if it does.
func (g *grace) over(misfit error, store bootstrap.Store) bool {
	switch {
	case misfit == nil:
		g.began = time.Time{}
		return false
	case g.began.IsZero():
		g.began = time.Now()
	}
	return time.Since(g.began) > store.TTL()+time.Second
}

// foreign returns why this process does not fit, if the view that this build cannot read, because
// of bad, is that of a running job: a rank of another build is registered. If not, it is that of an
// earlier job.
func (s *Settings) foreign(ctx context.Context, store bootstrap.Store, bad error) (misfit, err error) {
	records, err := store.List(ctx, bootstrap.RankKeys)
	for key, b := range records {
		if rec, unread := bootstrap.DecodeRecord(b); unread != nil || rec.Terms.Version != s.Terms.Version {
			return fmt.Errorf("the job's view, key %s, is of another build of the library, and so is key %s: run the "+
				"same build at all ranks, end those of the other one, or use another TUTTI_JOB: %w", membership.ViewKey,
				key, bad), nil
		}
	}
	return nil, err
}

// registered returns the record of an incarnation of view that is registered, in another slot than
// that of a rank that joins. If there is none, the view is that of an earlier job.
func registered(ctx context.Context, store bootstrap.Store, view membership.View, joins int) (*bootstrap.Record,
	error) {
	records, err := store.List(ctx, bootstrap.RankKeys)
	for _, b := range records {
		if rec, bad := bootstrap.DecodeRecord(b); bad == nil && rec.Rank != joins &&
			view.Has(rec.Rank, rec.Incarnation) {
			return &rec, nil
		}
	}
	return nil, err
}
