package join

import (
	"context"
	"errors"
	"fmt"

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

// Running returns the job if it is running, that is, if an incarnation of its view is registered.
// It returns nil if the job is about to begin, or the store contains the keys of an earlier job of
// the same name. A rank beyond the job's first ones waits until the job runs or begins.
func (ss *Session) Running(ctx context.Context) (*Job, error) {
	if s := ss.settings; s.Rank >= s.Size && !ss.Met() {
		if _, err := ss.Store().Wait(ctx, membership.ViewKey); err != nil {
			return nil, fmt.Errorf("rank %d is beyond the job's first %d, and no job runs that it could join: %w",
				s.Rank, s.Size, err)
		}
	}
	return ss.running(ctx)
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
	records, err := store.List(ctx, bootstrap.RankKeys)
	if err != nil {
		return nil, err
	}
	for _, b := range records {
		if rec, err := bootstrap.DecodeRecord(b); err == nil && rec.Rank != ss.Self.Rank &&
			view.Has(rec.Rank, rec.Incarnation) {
			return &Job{view, first}, nil
		}
	}
	return nil, nil
}
