package join

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"

	"tutti/bootstrap"
	"tutti/internal/ident"
	"tutti/pg/internal/roster"
	"tutti/pg/membership"
)

// A Claim is a free slot of a running job that a process on standby has taken.
type Claim struct {
	Rank  int
	store bootstrap.Store
	told  bool // the launcher said that the slot is vacant, before the job had a view
	s     *Settings
}

// StandBy waits until a slot of the running job is free and claims it for this process. Only ctx
// bounds the wait; single requests to the store have a short limit. If the lease is lost, or the
// store does not answer, it goes on with another handle, unless the store stays away for
// Settings.Timeout. The claim holds until Release.
func StandBy(ctx context.Context, s *Settings) (*Claim, error) {
	dctx, dialed := Within(ctx, s.Timeout)
	store, err := s.open(dctx, 0)
	dialed()
	for err == nil {
		var c *Claim
		if c, err = s.await(ctx, store, ident.New()); err == nil {
			return c, nil
		}
		former := store
		if ctx.Err() == nil && (errors.Is(err, bootstrap.ErrLeaseLost) || errors.Is(err, bootstrap.ErrStoreAway)) {
			s.Logger.Info("on standby: the store is asked again", "why", err)
			store, err = s.reopen(ctx)
		}
		former.Close() // after the other is open: the job must not end between the two
	}
	return nil, err
}

// reopen opens a handle on the store, which may be away for a while.
func (s *Settings) reopen(ctx context.Context) (bootstrap.Store, error) {
	ctx, cancel := context.WithTimeout(ctx, cmp.Or(s.Timeout, bootstrap.JobTTL))
	defer cancel()
	return s.open(ctx, 0)
}

// await claims a slot; id is that of this process and the handle.
func (s *Settings) await(ctx context.Context, store bootstrap.Store, id uint64) (*Claim, error) {
	wctx, cancel := context.WithCancel(ctx)
	defer cancel()
	var view membership.View
	var idle time.Time // when no job was running
	var unread error   // why view is not that of the store
	var unfit grace    // of the job of the view
	news := false      // whether the view is to be looked at
	// records and claims disappear without a change of the view
	changes, again := store.Watch(wctx, membership.ViewKey), time.NewTicker(200*time.Millisecond)
	defer again.Stop()
	vacancies, vacant := store.Watch(wctx, bootstrap.VacantKeys), map[int]bool{}
	for {
		select {
		case e, open := <-changes:
			if err := ended(ctx, e, open); err != nil {
				return nil, err
			}
			if e.Exists {
				_, view, unread = membership.DecodeStored(e.Value)
				news = true
			}
		case e, open := <-vacancies:
			if err := ended(ctx, e, open); err != nil {
				return nil, err
			}
			if slot, err := strconv.Atoi(strings.TrimPrefix(e.Key, bootstrap.VacantKeys)); err == nil && slot >= 0 &&
				slot < s.MaxSize {
				if vacant[slot] = true; !e.Exists {
					delete(vacant, slot)
				}
			}
		case <-again.C:
		}
		free := slices.Sorted(maps.Keys(vacant)) // before there is a view
		if told := len(free); time.Since(idle) > time.Second {
			for slot, at := range view.Slots {
				if at.Incarnation == 0 && at.Left != 0 && !vacant[slot] {
					free = append(free, slot)
				}
			}
			if news || len(free) > told {
				alive, misfit, err := s.fits(ctx, store, view, unread) // it may be that of an earlier job
				if err == nil && unfit.over(misfit, store) {
					return nil, misfit
				}
				if news = err != nil || misfit != nil || !alive; news {
					free, idle = free[:told], time.Now()
				}
			}
		}
		if !unfit.began.IsZero() {
			free = nil
		}
		for _, slot := range free {
			if claim(ctx, store, slot, id) == nil {
				return &Claim{Rank: slot, store: store, told: vacant[slot], s: s}, nil
			}
		}
	}
}

// fits reports whether a rank of view is registered, and why this process cannot be in one job
// with it. unread says why there is no view.
func (s *Settings) fits(ctx context.Context, store bootstrap.Store, view membership.View, unread error) (alive bool,
	misfit, err error) {
	if unread != nil {
		misfit, err = s.foreign(ctx, store, unread)
		return false, misfit, err
	}
	rec, err := registered(ctx, store, view, -1)
	if err != nil || rec == nil {
		return false, nil, err
	}
	own := bootstrap.Record{Size: s.MaxSize, Terms: s.Terms}
	return true, own.Compare(rec), nil
}

// ended returns why a watch has ended, or nil.
func ended(ctx context.Context, e bootstrap.Event, open bool) error {
	if !open {
		return cmp.Or(context.Cause(ctx), bootstrap.ErrStoreAway)
	}
	return e.Err
}

// claim takes a slot, unless another process has it; id tells the claim from others.
func claim(ctx context.Context, store bootstrap.Store, slot int, id uint64) error {
	ctx, cancel := context.WithTimeout(ctx, roster.StoreWait)
	defer cancel()
	if _, err := store.Get(ctx, bootstrap.RankKey(slot)); !errors.Is(err, bootstrap.ErrNoKey) {
		return cmp.Or(err, bootstrap.ErrConflict) // another process has registered
	}
	value := fmt.Appendf(nil, "spare process %016x", id)
	err := store.Create(ctx, "claims/"+strconv.Itoa(slot), value, true)
	if c := new(bootstrap.ConflictError); errors.As(err, &c) && bytes.Equal(c.Current, value) {
		return nil // an attempt that had no answer
	}
	return err
}

// AwaitSlot waits until the process of holder, which has the slot of s, is gone: it was removed
// from the job's view, or no process of that is registered for longer than one takes to have
// another lease. It also ends with ctx, and if the store cannot be asked. Unlike a Session it has
// no listeners meanwhile. The caller closes the handle, if there is one, when it has another: the
// job must not end between the two.
func AwaitSlot(ctx context.Context, s *Settings, holder uint64) bootstrap.Store {
	store, err := s.reopen(ctx)
	again := time.NewTicker(lookPause)
	defer again.Stop()
	// Looks in a row that did not find the holder. Their number is the time for which this process
	// has looked: it does not look while it is stopped.
	vain := 0
	for in := false; err == nil; { // in: the holder has been in the view
		has, keeps, bad := held(ctx, store, s.Rank, holder)
		switch {
		case bad != nil && !away(bad):
			return store
		case bad == nil && in && !has:
			return store
		case bad != nil || keeps:
			vain = 0
		default:
			vain++
		}
		if in = in || has; time.Duration(vain)*lookPause > store.TTL()+2*time.Second {
			return store
		}
		if store.Err() != nil {
			former := store
			store, err = s.reopen(ctx)
			former.Close()
		}
		select {
		case <-ctx.Done():
			return store
		case <-again.C:
		}
	}
	return nil
}

// held reports whether an incarnation is in a slot of the job's view, and whether it keeps the
// slot: it is registered, or others of the view are, which decide on it.
func held(ctx context.Context, store bootstrap.Store, slot int, incarnation uint64) (has, keeps bool, err error) {
	b, err := store.Get(ctx, bootstrap.RankKey(slot))
	if err != nil && !errors.Is(err, bootstrap.ErrNoKey) {
		return false, false, err
	}
	if err == nil {
		rec, bad := bootstrap.DecodeRecord(b)
		keeps = bad == nil && rec.Incarnation == incarnation
	}
	b, err = store.Get(ctx, membership.ViewKey)
	if errors.Is(err, bootstrap.ErrNoKey) {
		return false, keeps, nil
	}
	if err != nil {
		return false, false, err
	}
	_, view, bad := membership.DecodeStored(b)
	if has = bad == nil && view.Has(slot, incarnation); has && !keeps {
		other, err := registered(ctx, store, view, slot)
		return has, other != nil, err
	}
	return has, keeps, nil
}

// Release releases the claim. joined says whether the process has joined with the slot.
func (c *Claim) Release(joined bool) {
	if c.told && joined {
		ctx, cancel := context.WithTimeout(context.Background(), roster.StoreWait)
		defer cancel()
		if err := c.store.Delete(ctx, bootstrap.VacantKeys+strconv.Itoa(c.Rank)); err != nil {
			c.s.Logger.Debug("the vacancy that this rank has taken is still told", "err", err)
		}
	}
	c.store.Close()
}
