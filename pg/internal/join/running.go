package join

import (
	"context"
	"errors"
	"fmt"
	"time"

	"tutti/bootstrap"
	"tutti/pg/internal/roster"
	"tutti/pg/membership"
)

var (
	// ErrStarted says that a job began without this incarnation of a rank.
	ErrStarted = errors.New("the job began without this incarnation of the rank")
	// ErrOver says that a job ended while this rank waited for admission.
	ErrOver = errors.New("all ranks of the job are gone")
	// ErrOut says that this rank was removed while it waited for admission.
	ErrOut = errors.New("this rank was removed before it was in")
)

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

// WatchStart calls cancel with ErrStarted when the job has begun without this rank: others had met
// before a rank was lost that this one had not met. The caller must call stop.
func (ss *Session) WatchStart(ctx context.Context, cancel context.CancelCauseFunc) (stop func()) {
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

// AwaitAdmission waits until the others have admitted this rank to the job that ro, which has been
// started, follows. It returns ErrOver if all ranks that could admit it are gone, ErrOut if they
// have removed it.
func (ss *Session) AwaitAdmission(ctx context.Context, ro *roster.Roster) error {
	if v := ro.View(); ss.Self.Rank < v.Size() && v.Slots[ss.Self.Rank].Incarnation != 0 {
		ro.Knock()
	}
	alive := time.Now() // when a rank that could admit this one was last registered
	again := time.NewTicker(time.Second)
	defer again.Stop()
	for {
		var in bool
		if err := ro.Ask(ctx, func(m *membership.Machine) { in = m.Member() }); err != nil {
			return fmt.Errorf("waiting to be let in (do the others call Admit, or have they AutoAdmit?): %w", err)
		}
		ss.Proxy.Lock()
		out := ro.EvictedLocked()
		ss.Proxy.Unlock()
		switch {
		case out:
			return ErrOut
		case in:
			ro.Joined()
			return nil
		}
		select {
		case <-ctx.Done():
		case <-time.After(2 * time.Millisecond):
		case <-again.C:
			if job, err := ss.running(ctx); err != nil || job != nil {
				alive = time.Now()
			} else if time.Since(alive) > ss.Store().TTL()+2*time.Second { // more than a loss of their leases
				return ErrOver
			}
		}
	}
}

// Anew undoes AwaitAdmission and ro, which has been stopped, so that this rank can join a job that
// begins. over is the view of the job that has ended; this rank may already be linked with ranks
// that belong to the new job.
func (ss *Session) Anew(ctx context.Context, ro *roster.Roster, over membership.View) error {
	if err := ro.Unask(ctx); err != nil {
		return err
	}
	ss.mu.Lock()
	clear(ss.records)
	ss.mu.Unlock()
	ss.SetMet(false)
	for r := range ss.settings.MaxSize {
		if l := ss.Proxy.Linked(r); l == 0 || over.Has(r, l) {
			ss.Proxy.MarkDead(r, 0, roster.NoProcess(r))
			ss.Proxy.Expect(r, 0)
		}
	}
	return nil
}

var _ roster.Directory = (*Session)(nil)
