package join

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"tutti/bootstrap"
	"tutti/bootstrap/storetest"
	"tutti/p2p"
	"tutti/p2p/inproc"
	"tutti/pg/membership"
)

// linkable returns a session of a rank of two that can be connected, with handles that open opens.
func linkable(t *testing.T, rank int, open func() bootstrap.Store) *Session {
	ss := New(&Settings{Rank: rank, Size: 2, MaxSize: 3, Secret: []byte("the secret of this test"), Interfaces: "lo",
		OpenStore:  func(context.Context) (bootstrap.Store, error) { return open(), nil },
		Transports: func() ([]p2p.Transport, error) { return []p2p.Transport{inproc.New(inproc.Config{})}, nil },
		Logger:     slog.New(slog.DiscardHandler)})
	t.Cleanup(func() { ss.Close() })
	return ss
}

// expired returns a session of a rank that has lost the lease with which it registered, and waits
// for another.
func expired(t *testing.T, rank int, mem *storetest.Memory) *Session {
	t.Helper()
	ss := session(rank, mem.Open)
	if err := bootstrap.Register(t.Context(), ss.Store(), ss.record, nil); err != nil {
		t.Fatal(err)
	}
	mem.Expire(ss.Store())
	ss.keep()
	return ss
}

// A rank whose lease ends before all have met is registered again, and finds the others, and they
// it.
func TestLeaseIsTakenAgainBeforeMeeting(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	mem := storetest.NewMemory()
	early, late := linkable(t, 0, mem.Open), linkable(t, 1, mem.Open)
	if err := early.Connect(ctx, Hooks{}); err != nil {
		t.Fatal(err)
	}
	resolve := func(ss *Session, rank int) error {
		for { // an attempt takes a second at most
			if _, err := ss.resolve(ctx, rank); !errors.Is(err, context.DeadlineExceeded) || ctx.Err() != nil {
				return err
			}
		}
	}
	found := make(chan error, 1)
	go func() { found <- resolve(early, 1) }()
	mem.Expire(early.Store())
	if err := late.Connect(ctx, Hooks{}); err != nil {
		t.Fatal(err)
	}
	if err := resolve(late, 0); err != nil {
		t.Error("the rank whose lease has ended: ", err)
	}
	if err := <-found; err != nil {
		t.Error("the rank that came later: ", err)
	}
}

// A rank that loses its lease while it waits for its predecessor's takes another.
func TestLeaseIsTakenAgainWhileSlotIsTaken(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	mem := storetest.NewMemory()
	former := mem.Open()
	defer former.Close()
	if err := bootstrap.Register(ctx, former, bootstrap.NewRecord(0, 3, 9, []string{"127.0.0.1:1"}), nil); err != nil {
		t.Fatal(err)
	}
	var first sync.Once
	ss := linkable(t, 0, func() bootstrap.Store {
		h := mem.Open()
		s := &waited{Store: h, again: func() { mem.Expire(former) }}
		first.Do(func() { s.again = func() { mem.Expire(h) } })
		return s
	})
	ss.settings.Dial = func(context.Context, *net.Dialer, int, string) (net.Conn, error) {
		return nil, syscall.ECONNREFUSED
	}
	if err := ss.Connect(ctx, Hooks{}); err != nil {
		t.Fatal(err)
	}
	if _, err := ss.Store().Get(ctx, bootstrap.RankKey(0)); err != nil || ss.Store().Err() != nil {
		t.Errorf("%v, with a handle that has %v", err, ss.Store().Err())
	}
}

// A wait of a rank that joins goes on after the loss of its lease.
func TestWaitsOutlastLeases(t *testing.T) {
	for what, wait := range map[string]func(ctx context.Context, mem *storetest.Memory, other bootstrap.Store) error{
		"a rank beyond the first ones waits for a job": func(ctx context.Context, mem *storetest.Memory,
			other bootstrap.Store) error {
			ss := expired(t, 2, mem)
			defer ss.Close()
			time.AfterFunc(time.Minute, func() { put(t, other, membership.First([]uint64{9, 8}), true) })
			job, err := ss.Running(ctx)
			if err == nil && job.First != 9 {
				t.Errorf("the job is %+v", job)
			}
			return err
		},
		"a rank waits for rank 0": func(ctx context.Context, mem *storetest.Memory, other bootstrap.Store) error {
			ss := expired(t, 1, mem)
			defer ss.Close()
			ss.settings.Ends = func(context.Context, bootstrap.Store) bool { return false }
			time.AfterFunc(time.Minute, func() { other.Put(ctx, bootstrap.RankKey(0), nil, true) })
			_, err := First(ctx, ss)
			return err
		},
		"a rank that begins a job learns that it runs": func(ctx context.Context, mem *storetest.Memory,
			other bootstrap.Store) error {
			ss := expired(t, 1, mem)
			defer ss.Close()
			st, err := First(ctx, ss)
			if err != nil {
				return err
			}
			mctx, cancel := context.WithCancelCause(ctx)
			defer st.Watch(mctx, cancel)()
			time.AfterFunc(time.Minute, func() { put(t, other, membership.First([]uint64{9, 8}), true) })
			if <-mctx.Done(); !errors.Is(context.Cause(mctx), ErrStarted) {
				return context.Cause(mctx)
			}
			return nil
		},
	} {
		t.Run(what, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				mem := storetest.NewMemory()
				other := mem.Open()
				defer other.Close()
				ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
				defer cancel()
				began := time.Now()
				if err := wait(ctx, mem, other); err != nil || time.Since(began) < time.Minute {
					t.Errorf("after %v: %v", time.Since(began), err)
				}
			})
		})
	}
}

// replaced is a store that calls before when a key is asked for, or waited for.
type replaced struct {
	bootstrap.Store
	before func()
}

func (s *replaced) Get(ctx context.Context, key string) ([]byte, error) {
	s.before()
	return s.Store.Get(ctx, key)
}

func (s *replaced) Wait(ctx context.Context, key string) ([]byte, error) {
	s.before()
	return s.Store.Wait(ctx, key)
}

func (s *replaced) List(ctx context.Context, prefix string) (map[string][]byte, error) {
	s.before()
	return s.Store.List(ctx, prefix)
}

// What asks the store goes on if the handle is replaced, and closed, before it is used.
func TestQuestionsOutlastHandle(t *testing.T) {
	for what, ask := range map[string]func(context.Context, *Session) error{
		"the record of a rank": func(ctx context.Context, ss *Session) error {
			rec, err := ss.lookup(ctx, 0)
			if err == nil && rec.Incarnation != 9 {
				err = fmt.Errorf("the record is %+v", rec)
			}
			return err
		},
		"the job that runs": func(ctx context.Context, ss *Session) error {
			job, err := ss.look(ctx)
			if err == nil && (job == nil || job.First != 9) {
				err = fmt.Errorf("the job is %+v", job)
			}
			return err
		},
		"ranks that do not fit": func(ctx context.Context, ss *Session) error {
			began := time.Now()
			if ss.Stay(ctx, 0); time.Since(began) < ss.Store().TTL() {
				return fmt.Errorf("it stays for %v", time.Since(began))
			}
			return nil
		},
	} {
		t.Run(what, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				mem := storetest.NewMemory()
				other := mem.Open()
				defer other.Close()
				put(t, other, membership.First([]uint64{9, 8}), true)
				ss := session(1, mem.Open)
				defer ss.Close()
				lost := &replaced{Store: ss.store}
				lost.before = func() {
					if err := ss.Reconnect(t.Context(), lost); err != nil {
						t.Error(err)
					}
				}
				ss.store = lost
				if err := ask(t.Context(), ss); err != nil || ss.Store() == lost {
					t.Error(err)
				}
			})
		})
	}
}

// A wait for the store that ends with its context says why.
func TestWaitWithoutLeaseTellsWhy(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ss := session(1, storetest.NewMemory().Open)
		defer ss.Close()
		gone := errors.New("gone")
		ctx, cancel := context.WithTimeoutCause(t.Context(), time.Minute, gone)
		defer cancel()
		err := ss.persist(ctx, func() error { return bootstrap.ErrStoreAway })
		if !errors.Is(err, gone) || !errors.Is(err, bootstrap.ErrStoreAway) {
			t.Errorf("%v, want that the store is away, and why the wait ended", err)
		}
	})
}

// A rank whose place another process has taken while it had no lease is told.
func TestLostLeaseAndPlace(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		mem := storetest.NewMemory()
		other := mem.Open()
		defer other.Close()
		ss := session(0, mem.Open)
		defer ss.Close()
		told := make(chan error, 1)
		ss.lost = func(err error) { told <- err }
		mem.Expire(ss.Store())
		if err := bootstrap.Register(t.Context(), other, bootstrap.NewRecord(0, 3, 9, nil), nil); err != nil {
			t.Fatal(err)
		}
		ss.keep()
		if err := <-told; !errors.As(err, new(*bootstrap.SlotError)) {
			t.Errorf("%v, want a SlotError", err)
		}
	})
}

// The error of a rank without a lease says so, once, unless it has another reason.
func TestExplainLostLease(t *testing.T) {
	mem := storetest.NewMemory()
	ss := session(0, mem.Open)
	defer ss.Close()
	inVain := errors.New("in vain")
	if err := ss.Explain(inVain); err != inVain {
		t.Error(err)
	}
	mem.Expire(ss.Store())
	why := ss.Store().Err()
	for _, c := range []struct {
		err  error
		says bool
	}{{inVain, true}, {&bootstrap.SlotError{}, true}, {fmt.Errorf("wait: %w", why), false},
		{bootstrap.ErrStoreEnds, false}, {&bootstrap.SizeError{}, false}, {p2p.ErrUnfit, false}} {
		err := ss.Explain(c.err)
		if !errors.Is(err, c.err) || (err != c.err) != c.says || c.says && !errors.Is(err, why) ||
			!c.says && strings.Contains(err.Error(), "has no lease") {
			t.Errorf("%v: %v", c.err, err)
		}
	}
}

// A store of a rank that invites may be away for a while, as when that rank is stopped, and no
// longer. Others are waited for.
func TestStoreOfRankIsAway(t *testing.T) {
	for _, c := range []struct {
		listened, again bool // ranks can meet again
		away            time.Duration
		want            error
	}{{true, true, storePatience - time.Second, nil}, {true, true, time.Hour, bootstrap.ErrStoreEnds},
		{true, false, time.Hour, bootstrap.ErrStoreAway}, {false, false, time.Hour, nil}} {
		synctest.Test(t, func(t *testing.T) {
			mem := storetest.NewMemory()
			ss := session(1, mem.Open)
			defer ss.Close()
			began := time.Now()
			ss.settings.OpenStore = func(context.Context) (bootstrap.Store, error) {
				if time.Since(began) < c.away {
					return nil, bootstrap.ErrStoreAway
				}
				return mem.Open(), nil
			}
			if ss.settings.Listened = c.listened; c.again {
				ss.settings.Ends = bootstrap.StoreEnds
			}
			var told atomic.Pointer[error]
			ss.lost = func(err error) { told.Store(&err) }
			mem.Expire(ss.Store())
			ss.keep()
			time.Sleep(c.away + time.Second)
			if err := told.Load(); c.want == nil && (err != nil || ss.Store().Err() != nil) ||
				c.want != nil && (err == nil || !errors.Is(*err, c.want)) {
				t.Errorf("%+v: %v", c, err)
			}
		})
	}
}

// A rank that is invited to its store waits on when it loses its lease once more, however long
// after the first time, and its waits do, too.
func TestLeaseIsLostTwice(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		mem := storetest.NewMemory()
		other := mem.Open()
		defer other.Close()
		ss := session(1, mem.Open)
		defer ss.Close()
		var back time.Time
		ss.settings.Listened, ss.settings.Ends = true, bootstrap.StoreEnds
		ss.settings.OpenStore = func(context.Context) (bootstrap.Store, error) {
			if time.Now().Before(back) {
				return nil, bootstrap.ErrStoreAway
			}
			return mem.Open(), nil
		}
		ss.lost = func(err error) { t.Error(err) }
		ss.keep()
		found := make(chan error, 1)
		go func() {
			_, err := ss.lookup(t.Context(), 0)
			found <- err
		}()
		for range 2 {
			back = time.Now().Add(storePatience - time.Second)
			mem.Expire(ss.Store())
			time.Sleep(2 * storePatience)
			if err := ss.Store().Err(); err != nil {
				t.Error(err)
			}
		}
		put(t, other, membership.First([]uint64{9, 8}), true)
		if err := <-found; err != nil {
			t.Error(err)
		}
	})
}

// A process that is stopped does not count that towards the time for which its store is away.
func TestStopIsNoTimeWithoutStore(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		mem := storetest.NewMemory()
		attempts := 0
		s := &Settings{Listened: true, Ends: bootstrap.StoreEnds, Logger: slog.New(slog.DiscardHandler),
			OpenStore: func(context.Context) (bootstrap.Store, error) {
				if attempts++; attempts == 1 {
					time.Sleep(time.Hour)
					return nil, bootstrap.ErrStoreAway
				}
				return mem.Open(), nil
			}}
		store, err := s.open(t.Context(), storePatience)
		if err != nil {
			t.Fatal(err)
		}
		store.Close()
	})
}

// A rank that cannot have another lease yet says so again and again, and Close ends its wait.
func TestWaitForLease(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		mem := storetest.NewMemory()
		ss := session(1, mem.Open)
		var log bytes.Buffer
		ss.settings.Logger = slog.New(slog.NewTextHandler(&log, nil))
		ss.settings.OpenStore = func(ctx context.Context) (bootstrap.Store, error) {
			select {
			case <-ctx.Done():
			case <-time.After(time.Second):
			}
			return nil, bootstrap.ErrStoreAway
		}
		mem.Expire(ss.Store())
		ss.keep()
		time.Sleep(2*storeWarning + 10*time.Second)
		began := time.Now()
		if err := ss.Close(); err != nil || time.Since(began) > 0 {
			t.Errorf("after %v: %v", time.Since(began), err)
		}
		if text := log.String(); strings.Count(text, "level=WARN") != 3 {
			t.Errorf("logged %q, want three warnings", text)
		}
	})
}

// hanging is a store that does not answer until ctx ends.
type hanging struct {
	bootstrap.Store
	asked chan struct{}
}

func (s *hanging) Adopt(ctx context.Context, key string, value []byte) error {
	s.asked <- struct{}{}
	<-ctx.Done()
	return bootstrap.ErrStoreAway
}

// counted is a store that counts its first Close.
type counted struct {
	bootstrap.Store
	once   sync.Once
	closed *int
}

func (s *counted) Close() error {
	s.once.Do(func() { *s.closed++ })
	return s.Store.Close()
}

// Who takes over while a rank registers with another lease goes on with that: until it has, the
// handle is a lost one. All handles are closed in the end.
func TestHandOverWithoutRecord(t *testing.T) {
	mem := storetest.NewMemory()
	opened, closed, asked := 0, 0, make(chan struct{}, 1)
	ss := session(0, func() bootstrap.Store {
		var s bootstrap.Store = &counted{Store: mem.Open(), closed: &closed}
		if opened++; opened == 2 {
			s = &hanging{s, asked}
		}
		return s
	})
	if without, late := ss.HandOver(); !without.IsZero() || late {
		t.Errorf("the rank, which has its lease, was without one at %v, late: %v", without, late)
	}
	lost := ss.Store()
	mem.Expire(lost.(*counted).Store)
	began := time.Now()
	ss.keep()
	<-asked
	if without, late := ss.HandOver(); without.Before(began) || !late || ss.Store() != lost {
		t.Errorf("the rank was last without a lease at %v, before %v, or its handle is one without its record", without,
			began)
	}
	short, cancel := context.WithCancel(t.Context())
	go func() { <-asked; cancel() }()
	if err := ss.Reconnect(short, lost); !errors.Is(err, bootstrap.ErrStoreAway) || ss.Store() != lost || opened != 2 {
		t.Errorf("%v, with handle %d", err, opened)
	}
	mem.Expire(ss.next.(*hanging).Store.(*counted).Store)
	if err := ss.Reconnect(t.Context(), lost); err != nil || ss.Store().Err() != nil || opened != 3 {
		t.Fatalf("%v, with handle %d", err, opened)
	}
	if _, err := ss.Store().Get(t.Context(), bootstrap.RankKey(0)); err != nil {
		t.Error(err)
	}
	without, late := ss.HandOver()
	if without.Before(began) || !late {
		t.Errorf("the rank was last without a lease at %v, before %v, or not late: %v", without, began, late)
	}
	ss.linked.Store(true) // the others cannot have met before
	if again, late := ss.HandOver(); !again.Equal(without) || late {
		t.Errorf("with a later link it was without a lease at %v, not %v, or late: %v", again, without, late)
	}
	if err := ss.Close(); err != nil || closed != opened {
		t.Errorf("%d of %d handles are closed: %v", closed, opened, err)
	}
}

// unlisted is a store that does not answer requests for lists until ctx ends.
type unlisted struct {
	bootstrap.Store
	asked chan struct{}
}

func (s *unlisted) List(ctx context.Context, prefix string) (map[string][]byte, error) {
	close(s.asked)
	<-ctx.Done()
	return nil, context.Cause(ctx)
}

// A rank that is cut off while it registers with another lease keeps the record that it has put.
func TestHandOverKeepsRecord(t *testing.T) {
	mem := storetest.NewMemory()
	other := mem.Open() // the job's keys
	defer other.Close()
	if err := other.Put(t.Context(), bootstrap.SizeKey, []byte("7"), false); err != nil { // of an earlier job
		t.Fatal(err)
	}
	asked := make(chan struct{})
	first := mem.Open()
	opens := []bootstrap.Store{first, &unlisted{mem.Open(), asked}}
	ss := session(0, func() bootstrap.Store {
		s := opens[0]
		opens = opens[1:]
		return s
	})
	defer ss.Close()
	mem.Expire(first)
	ss.keep()
	<-asked
	ss.HandOver()
	if _, err := other.Get(t.Context(), bootstrap.RankKey(0)); err != nil {
		t.Error(err)
	}
	if err := ss.next.Adopt(t.Context(), bootstrap.RankKey(0), nil); !errors.Is(err, bootstrap.ErrConflict) {
		t.Error("the next attempt begins without the handle: ", err)
	}
}
