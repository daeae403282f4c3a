package join

import (
	"context"
	"errors"
	"log/slog"
	"sync"
	"testing"
	"time"

	"tutti/bootstrap"
	"tutti/bootstrap/storetest"
)

// unanswered is a store in which the first claim succeeds without an answer.
type unanswered struct {
	bootstrap.Store
	once sync.Once
}

func (s *unanswered) Create(ctx context.Context, key string, value []byte, lease bool) error {
	err := s.Store.Create(ctx, key, value, lease)
	s.once.Do(func() { err = errors.Join(bootstrap.ErrStoreAway, err) })
	return err
}

// standBy has a process stand by in a job of which slot 1 is free. ready is called before the slot
// is; it may end the lease of the first handle.
func standBy(t *testing.T, wrap func(bootstrap.Store) bootstrap.Store, ready func(*storetest.Memory, bootstrap.Store)) {
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	mem := storetest.NewMemory()
	launcher, opened := mem.Open(), make(chan bootstrap.Store, 8)
	defer launcher.Close()
	s := &Settings{MaxSize: 2, Timeout: 20 * time.Second, Logger: slog.New(slog.DiscardHandler),
		OpenStore: func(context.Context) (bootstrap.Store, error) {
			h := mem.Open()
			opened <- h
			return wrap(h), nil
		}}
	done := make(chan error, 1)
	go func() {
		c, err := StandBy(ctx, s)
		if err == nil && c.Rank != 1 {
			t.Errorf("the process claims slot %d", c.Rank)
		}
		if err == nil {
			c.Release(false)
		}
		done <- err
	}()
	ready(mem, <-opened)
	if err := launcher.Put(ctx, bootstrap.VacantKeys+"1", nil, true); err != nil {
		t.Fatal(err)
	}
	if err := <-done; err != nil {
		t.Error(err)
	}
}

// A claim that had no answer is this process's.
func TestUnansweredClaimHolds(t *testing.T) {
	standBy(t, func(s bootstrap.Store) bootstrap.Store { return &unanswered{Store: s} },
		func(*storetest.Memory, bootstrap.Store) {})
}

// A process on standby goes on when its lease is lost.
func TestStandbyOutlastsLease(t *testing.T) {
	standBy(t, func(s bootstrap.Store) bootstrap.Store { return s }, (*storetest.Memory).Expire)
}
