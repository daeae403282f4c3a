package join

import (
	"context"
	"errors"
	"log/slog"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"tutti/bootstrap"
	"tutti/bootstrap/storetest"
	"tutti/p2p"
	"tutti/pg/internal/roster"
	"tutti/pg/membership"
)

// alone implements roster.Groups for a rank without groups.
type alone struct{}

func (alone) ViewChanged()                {}
func (alone) Evicted()                    {}
func (alone) Accused()                    {}
func (alone) Judged()                     {}
func (alone) Isolated()                   {}
func (alone) Awaited(time.Duration) []int { return nil }

// listing is a store that tells of each List before it answers.
type listing struct {
	bootstrap.Store
	tell func()
}

func (s *listing) List(ctx context.Context, prefix string) (map[string][]byte, error) {
	s.tell()
	return s.Store.List(ctx, prefix)
}

// A rank that waits for admission does not take the job for over because it was stopped, with all
// others, for longer than their leases; but it does at the third look if rank 0 has left.
func TestAdmissionOutlastsStop(t *testing.T) {
	for what, back := range map[string]bool{"the others are back": true, "the others are gone": false,
		"the others are back, and rank 0 has left": true, "the others are gone, and rank 0 has left": false} {
		t.Run(what, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				mem := storetest.NewMemory()
				other := mem.Open()
				defer other.Close()
				view := membership.First([]uint64{9, 8})
				put(t, other, view, true)
				looks := 0
				ss := session(2, func() bootstrap.Store {
					return &listing{mem.Open(), func() {
						if looks++; looks == 2 { // while the process was stopped the leases have ended
							mem.Expire(other)
							time.Sleep(time.Minute)
						}
						if looks == 4 && back {
							again := mem.Open()
							t.Cleanup(func() { again.Close() })
							put(t, again, view, true)
						}
					}}
				})
				defer ss.Close()
				left := strings.Contains(what, "left")
				ss.settings.Ends = func(context.Context, bootstrap.Store) bool { return left }
				ss.Proxy = p2p.New(p2p.Config{Self: ss.Self, Size: 3, Secret: []byte("the secret of this test"),
					Oversubscribed: true, Logger: slog.New(slog.DiscardHandler),
					Resolve: func(context.Context, int) (p2p.Peer, error) { return p2p.Peer{}, errors.New("no way") }})
				ro, err := roster.New(roster.Config{Self: membership.Peer{Slot: 2, Incarnation: ss.Self.Incarnation},
					View: view, First: 9, MaxSize: 3, Window: time.Second, Proxy: ss.Proxy, Directory: ss,
					Groups: alone{}, Logger: slog.New(slog.DiscardHandler)})
				if err != nil {
					t.Fatal(err)
				}
				ro.Start()
				defer ro.Stop()
				ctx, cancel := context.WithTimeout(t.Context(), 90*time.Second)
				defer cancel()
				err = Rejoin(ss, &Job{View: view, First: 9}).Await(ctx, ro)
				if errors.Is(err, ErrOver) == back || errors.Is(err, context.DeadlineExceeded) != back ||
					(left && !back) != (looks == 4) {
					t.Errorf("after %d looks: %v", looks, err)
				}
			})
		})
	}
}

// A rank does not begin a job without rank 0 where that serves the store: it waits until rank 0 is
// registered, or has left the job before.
func TestStartWaitsForRankZero(t *testing.T) {
	for what, ends := range map[string]bool{"rank 0 comes": false, "rank 0 is there": true, "rank 0 has left": true} {
		t.Run(what, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				mem := storetest.NewMemory()
				host := mem.Open()
				defer host.Close()
				register := func() {
					if err := host.Put(t.Context(), bootstrap.RankKey(0), nil, true); err != nil {
						t.Error(err)
					}
				}
				ss := session(1, mem.Open)
				defer ss.Close()
				var left atomic.Bool
				ss.settings.Ends = func(context.Context, bootstrap.Store) bool { return left.Load() }
				if what == "rank 0 is there" {
					register()
				}
				began := time.Now()
				time.AfterFunc(time.Minute, func() {
					if left.Store(ends); !ends {
						register()
					}
				})
				_, err := First(t.Context(), ss)
				took := time.Since(began)
				if gone := what == "rank 0 has left"; errors.Is(err, bootstrap.ErrStoreEnds) != gone ||
					!gone && err != nil || (took < time.Minute) != (what == "rank 0 is there") {
					t.Errorf("after %v: %v", took, err)
				}
			})
		})
	}
}

// A rank that begins a job learns that the job runs without it when the others, whose leases had
// ended, are registered again.
func TestStartLearnsOfRunningJob(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		mem := storetest.NewMemory()
		other := mem.Open()
		defer other.Close()
		view := membership.First([]uint64{9, 8})
		put(t, other, view, false)
		ss := session(1, mem.Open)
		defer ss.Close()
		st, err := First(t.Context(), ss)
		if err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithCancelCause(t.Context())
		defer st.Watch(ctx, cancel)()
		time.Sleep(10 * time.Second)
		if err := context.Cause(ctx); err != nil {
			t.Fatal("nobody is registered: ", err)
		}
		rec, err := bootstrap.NewRecord(0, 2, 9, nil).Encode()
		if err == nil {
			err = other.Put(t.Context(), bootstrap.RankKey(0), rec, true)
		}
		if err != nil {
			t.Fatal(err)
		}
		time.Sleep(2 * lookPause)
		if err := context.Cause(ctx); !errors.Is(err, ErrStarted) {
			t.Errorf("the wait ended with %v, want ErrStarted", err)
		}
	})
}
