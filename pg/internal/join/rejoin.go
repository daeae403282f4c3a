package join

import (
	"context"
	"errors"
	"fmt"
	"time"

	"tutti/pg/internal/roster"
	"tutti/pg/membership"
)

var (
	// ErrOver says that a job ended while this rank waited for admission.
	ErrOver = errors.New("all ranks of the job are gone")
	// ErrOut says that this rank was removed while it waited for admission.
	ErrOut = errors.New("this rank was removed before it was in")
)

// An Admission is the way of a replacement, or of an additional rank, into a running job.
type Admission struct {
	Job *Job
	ss  *Session
}

// Rejoin begins the admission of a connected session to a running job. A rank without a record is
// gone from now on: see Session.Met.
func Rejoin(ss *Session, running *Job) *Admission {
	ss.met.Store(true)
	return &Admission{running, ss}
}

// Await waits until the others have admitted this rank to the job that ro, which has been started,
// follows. It returns ErrOver if all ranks that could admit it are gone, ErrOut if they have
// removed it.
func (a *Admission) Await(ctx context.Context, ro *roster.Roster) error {
	ss := a.ss
	if v := ro.View(); ss.Self.Rank < v.Size() && v.Slots[ss.Self.Rank].Incarnation != 0 {
		ro.Knock()
	}
	// Looks, in a row, that found no rank that could admit this one. Their number is the time for
	// which this process has looked: it does not look while it is stopped.
	vain := 0
	again := time.NewTicker(lookPause)
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
				vain = 0
			} else if vain++; time.Duration(vain)*lookPause > ss.Store().TTL()+2*time.Second ||
				vain > 2 && ss.settings.Ends != nil && ss.settings.Ends(ctx, ss.Store()) {
				return ErrOver // more than a loss of their leases, or rank 0 has left for good
			}
		}
	}
}

// Undo undoes Await and ro, which has been stopped, so that this rank can join a job that begins.
// It may already be linked with ranks that belong to the new job.
func (a *Admission) Undo(ctx context.Context, ro *roster.Roster) error {
	ss, over := a.ss, a.Job.View
	ss.keep()
	if err := ss.persist(ctx, func() error { return ro.Unask(ctx) }); err != nil {
		return err
	}
	ss.mu.Lock()
	clear(ss.records)
	ss.mu.Unlock()
	ss.met.Store(false)
	for r := range ss.settings.MaxSize {
		if l := ss.Proxy.Linked(r); l == 0 || over.Has(r, l) {
			ss.Proxy.MarkDead(r, 0, roster.NoProcess(r))
			ss.Proxy.Expect(r, 0)
		}
	}
	return nil
}
