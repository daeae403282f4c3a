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
	"tutti/p2p"
	"tutti/p2p/inproc"
	"tutti/pg/membership"
)

// electing is a store that does not answer the first of its writes and reads.
type electing struct {
	unanswered
	read sync.Once
}

func (s *electing) Get(ctx context.Context, key string) ([]byte, error) {
	b, err := s.unanswered.Get(ctx, key)
	s.read.Do(func() { b, err = nil, bootstrap.ErrStoreAway })
	return b, err
}

// A rank joins although the store is away for a moment.
func TestJoinOutlastsElection(t *testing.T) {
	mem := storetest.NewMemory()
	store := &electing{unanswered: unanswered{Store: mem.Open()}}
	ss := New(&Settings{Size: 2, MaxSize: 2, Secret: []byte("the secret of this test"), Interfaces: "lo",
		OpenStore:  func(context.Context) (bootstrap.Store, error) { return store, nil },
		Transports: func() ([]p2p.Transport, error) { return []p2p.Transport{inproc.New(inproc.Config{})}, nil },
		Logger:     slog.New(slog.DiscardHandler)})
	defer ss.Close()
	if err := ss.Connect(t.Context(), Hooks{}); err != nil {
		t.Fatal(err)
	}
	if job, err := ss.Running(t.Context()); job != nil || err != nil {
		t.Errorf("a job of a rank without others: %v, %v", job, err)
	}
	if _, err := store.Get(t.Context(), bootstrap.RankKey(0)); err != nil {
		t.Error(err)
	}
}

// session returns a session of a rank of two with a handle on a store, and no more.
func session(rank int, open func() bootstrap.Store) *Session {
	ss := New(&Settings{Rank: rank, Size: 2, MaxSize: 3, Logger: slog.New(slog.DiscardHandler),
		OpenStore: func(context.Context) (bootstrap.Store, error) { return open(), nil }})
	ss.store = open()
	ss.record = bootstrap.NewRecord(rank, 3, ss.Self.Incarnation, nil)
	return ss
}

// checked is a store that calls check after each change. The first attempt to adopt a key fails.
type checked struct {
	bootstrap.Store
	check func()
	once  sync.Once
}

func (s *checked) Adopt(ctx context.Context, key string, value []byte) (err error) {
	defer s.check()
	if s.once.Do(func() { err = bootstrap.ErrStoreAway }); err != nil {
		return err
	}
	return s.Store.Adopt(ctx, key, value)
}

func (s *checked) CompareAndSwap(ctx context.Context, key string, old, new []byte) error {
	defer s.check()
	return s.Store.CompareAndSwap(ctx, key, old, new)
}

func (s *checked) Close() error {
	defer s.check()
	return s.Store.Close()
}

// A rank that takes another lease is registered all the time.
func TestReconnectKeepsRecord(t *testing.T) {
	mem := storetest.NewMemory()
	other := mem.Open()
	defer other.Close()
	over := false
	check := func() {
		if _, err := other.Get(t.Context(), bootstrap.RankKey(0)); err != nil && !over {
			t.Error(err)
		}
	}
	ss := session(0, func() bootstrap.Store { return &checked{Store: mem.Open(), check: check} })
	defer ss.Close()
	lost := ss.Store()
	if err := bootstrap.Register(t.Context(), lost, ss.record); err != nil {
		t.Fatal(err)
	}
	if err := ss.Reconnect(t.Context(), lost); !errors.Is(err, bootstrap.ErrStoreAway) {
		t.Fatalf("the first attempt: %v", err)
	}
	if err := ss.Reconnect(t.Context(), lost); err != nil {
		t.Fatal(err)
	}
	if err := lost.Put(t.Context(), "key", nil, true); !errors.Is(err, bootstrap.ErrStoreClosed) {
		t.Errorf("the former handle: %v", err)
	}
	over = true
}

// A rank whose record has gone with its lease registers again.
func TestReconnectRegistersAgain(t *testing.T) {
	mem := storetest.NewMemory()
	ss := session(0, mem.Open)
	defer ss.Close()
	lost := ss.Store()
	mem.Expire(lost)
	if err := ss.Reconnect(t.Context(), lost); err != nil {
		t.Fatal(err)
	}
	if _, err := ss.Store().Get(t.Context(), bootstrap.RankKey(0)); err != nil {
		t.Error(err)
	}
}

// A rank beyond the first ones that starts with the job does not take an earlier job for it.
func TestFurtherRankWaitsForItsJob(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	mem := storetest.NewMemory()
	other := mem.Open()
	defer other.Close()
	put(t, other, membership.First([]uint64{9, 8}), false)
	store := &looking{mem.Open(), make(chan struct{})}
	ss := session(2, func() bootstrap.Store { return store })
	defer ss.Close()
	var job *Job
	done := make(chan error, 1)
	go func() {
		var err error
		job, err = ss.Running(ctx)
		done <- err
	}()
	<-store.looked
	put(t, other, membership.First([]uint64{19, 18}), true)
	for {
		select {
		case <-store.looked:
		case err := <-done:
			if err != nil || job == nil || job.First != 19 {
				t.Errorf("the job is %+v, %v", job, err)
			}
			return
		}
	}
}
