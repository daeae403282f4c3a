package join

import (
	"cmp"
	"context"
	"errors"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"

	"tutti/bootstrap"
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
// bounds the wait; single requests to the store have a short limit. The claim holds until Release.
func StandBy(ctx context.Context, s *Settings) (c *Claim, err error) {
	dctx, dialed := Within(ctx, s.Timeout)
	defer dialed()
	store, err := s.OpenStore(dctx)
	if err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			store.Close()
		}
	}()
	wctx, cancel := context.WithCancel(ctx)
	defer cancel()
	var view membership.View
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
				if _, view, err = membership.DecodeStored(e.Value); err != nil {
					return nil, err
				}
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
		for slot, at := range view.Slots {
			if at.Incarnation == 0 && at.Left != 0 && !vacant[slot] {
				free = append(free, slot)
			}
		}
		for _, slot := range free {
			if claim(ctx, store, slot) == nil {
				return &Claim{Rank: slot, store: store, told: vacant[slot], s: s}, nil
			}
		}
	}
}

// ended returns why a watch has ended, or nil.
func ended(ctx context.Context, e bootstrap.Event, open bool) error {
	if !open {
		return cmp.Or(context.Cause(ctx), bootstrap.ErrStoreAway)
	}
	return e.Err
}

// claim takes a slot for this process, unless another process has it.
func claim(ctx context.Context, store bootstrap.Store, slot int) error {
	ctx, cancel := context.WithTimeout(ctx, roster.StoreWait)
	defer cancel()
	if _, err := store.Get(ctx, bootstrap.RankKey(slot)); !errors.Is(err, bootstrap.ErrNoKey) {
		return cmp.Or(err, bootstrap.ErrConflict) // another process has registered
	}
	return store.Create(ctx, "claims/"+strconv.Itoa(slot), []byte("a spare process"), true)
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
