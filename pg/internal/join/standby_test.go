package join

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"tutti/bootstrap"
	"tutti/bootstrap/storetest"
	"tutti/pg/membership"
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

// looking is a store that tells of each List.
type looking struct {
	bootstrap.Store
	looked chan struct{}
}

func (s *looking) List(ctx context.Context, prefix string) (map[string][]byte, error) {
	all, err := s.Store.List(ctx, prefix)
	select {
	case s.looked <- struct{}{}:
	case <-ctx.Done():
	}
	return all, err
}

// put writes a view of a job of two ranks, of which the first is registered if alive is set.
func put(t *testing.T, s bootstrap.Store, view membership.View, alive bool) {
	t.Helper()
	first := view.Slots[0].Incarnation
	record, err := bootstrap.NewRecord(0, 2, first, nil).Encode()
	if err == nil && alive {
		err = s.Put(t.Context(), bootstrap.RankKey(0), record, true)
	}
	if err == nil {
		err = s.Put(t.Context(), membership.ViewKey, membership.EncodeStored(first, view), false)
	}
	if err != nil {
		t.Fatal(err)
	}
}

// A free slot of an earlier job's view is not claimed.
func TestSlotOfEarlierJobIsNotFree(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	mem := storetest.NewMemory()
	store := &looking{mem.Open(), make(chan struct{})}
	job := mem.Open()
	defer job.Close()
	view := membership.First([]uint64{9, 8}).Remove(1)
	put(t, job, view, false)
	done := make(chan error, 1)
	go func() {
		c, err := StandBy(ctx, &Settings{MaxSize: 2, Logger: slog.New(slog.DiscardHandler),
			OpenStore: func(context.Context) (bootstrap.Store, error) { return store, nil }})
		if err == nil {
			c.Release(false)
		}
		done <- err
	}()
	for range 2 { // the second time it is done with the first one
		select {
		case <-store.looked:
		case err := <-done:
			t.Fatal("the slot was claimed: ", err)
		}
	}
	put(t, job, view, true) // one of its ranks is there
	for {
		select {
		case <-store.looked:
		case err := <-done:
			if err != nil {
				t.Error(err)
			}
			return
		}
	}
}

// later puts a view that this build cannot read into a store.
func later(t *testing.T, s bootstrap.Store) {
	t.Helper()
	view := membership.EncodeStored(9, membership.First([]uint64{9, 8}))
	view[8]++
	if err := s.Put(t.Context(), membership.ViewKey, view, false); err != nil {
		t.Fatal(err)
	}
}

// register puts the record of a rank of two, of a build with this version, into a store.
func register(t *testing.T, s bootstrap.Store, rank int, version string) {
	t.Helper()
	rec := bootstrap.NewRecord(rank, 2, uint64(9-rank), nil)
	rec.Terms.Version = version
	b, err := rec.Encode()
	if err == nil {
		err = s.Put(t.Context(), bootstrap.RankKey(rank), b, true)
	}
	if err != nil {
		t.Fatal(err)
	}
}

// A process on standby that cannot be in the job says so, and does not wait until it is needed. A
// job that is about to end does not count.
func TestStandbyThatDoesNotFit(t *testing.T) {
	differs := func(err error) bool { return errors.As(err, new(*bootstrap.TermsError)) }
	for name, c := range map[string]struct {
		job  func(t *testing.T, s bootstrap.Store)
		size int
		is   func(error) bool // nil: it fits
	}{
		"fits": {func(t *testing.T, s bootstrap.Store) {
			put(t, s, membership.First([]uint64{9, 8}), true)
			register(t, s, 0, "1")
		}, 2, nil},
		"another build": {func(t *testing.T, s bootstrap.Store) {
			put(t, s, membership.First([]uint64{9, 8}), true)
			register(t, s, 0, "2")
		}, 2, differs},
		"another build, which no rank uses": {func(t *testing.T, s bootstrap.Store) {
			put(t, s, membership.First([]uint64{9, 8}), false)
		}, 2, nil},
		"another size": {func(t *testing.T, s bootstrap.Store) {
			put(t, s, membership.First([]uint64{9, 8}), true)
			register(t, s, 0, "1")
		}, 3, func(err error) bool { return errors.As(err, new(*bootstrap.SizeError)) }},
		"another view": {func(t *testing.T, s bootstrap.Store) {
			later(t, s)
			register(t, s, 0, "2")
		}, 2, func(err error) bool {
			return err != nil && strings.Contains(err.Error(), "key membership/view, is of another build") &&
				strings.Contains(err.Error(), "ranks/0") &&
				strings.Contains(err.Error(), "begins with 0xa2, expected 0xa1")
		}},
		"another view, of an earlier job": {func(t *testing.T, s bootstrap.Store) { later(t, s) }, 2, nil},
		"another view, of a job before that of this build": {func(t *testing.T, s bootstrap.Store) {
			later(t, s)
			register(t, s, 0, "1")
		}, 2, nil},
	} {
		for _, ends := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s, ends %v", name, ends), func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					mem := storetest.NewMemory()
					job := mem.Open()
					defer job.Close()
					c.job(t, job)
					ctx, cancel := context.WithTimeout(t.Context(), time.Hour)
					defer cancel()
					began := time.Now()
					if ends {
						time.AfterFunc(job.TTL(), func() { mem.Expire(job) })
					}
					_, err := StandBy(ctx, &Settings{MaxSize: c.size, Terms: bootstrap.Terms{Version: "1"},
						Logger:    slog.New(slog.DiscardHandler),
						OpenStore: func(context.Context) (bootstrap.Store, error) { return mem.Open(), nil }})
					if fits := c.is == nil || ends; fits != errors.Is(err, context.DeadlineExceeded) ||
						!fits && (!c.is(err) || time.Since(began) > 3*job.TTL()) {
						t.Errorf("after %v: %v", time.Since(began), err)
					}
				})
			})
		}
	}
}

// A rank that joins passes over a view that it cannot read, as an earlier job of another build has
// left, unless a rank of another build is there.
func TestRunningPassesOverForeignView(t *testing.T) {
	for version, fits := range map[string]bool{"": true, "1": true, "2": false} {
		for _, ends := range []bool{false, true} { // the job was about to
			synctest.Test(t, func(t *testing.T) {
				mem := storetest.NewMemory()
				job := mem.Open()
				defer job.Close()
				later(t, job)
				if version != "" {
					register(t, job, 1, version)
				}
				if ends {
					time.AfterFunc(job.TTL(), func() { mem.Expire(job) })
				}
				ss := session(0, mem.Open)
				defer ss.Close()
				ss.settings.Terms.Version = "1"
				began := time.Now()
				if running, err := ss.Running(t.Context()); running != nil || (err == nil) != (fits || ends) ||
					err != nil && !strings.Contains(err.Error(), "key membership/view, is of another build") ||
					time.Since(began) > 2*job.TTL() {
					t.Errorf("with a rank of version %q, ends %v, after %v: %+v, %v", version, ends, time.Since(began),
						running, err)
				}
			})
		}
	}
}

// While a rank that joins waits for a job of another build to end, its context may.
func TestForeignViewDoesNotOutlastContext(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		mem := storetest.NewMemory()
		job := mem.Open()
		defer job.Close()
		later(t, job)
		register(t, job, 1, "2")
		ss := session(0, mem.Open)
		defer ss.Close()
		ctx, cancel := context.WithTimeout(t.Context(), lookPause/2)
		defer cancel()
		_, err := ss.Running(ctx)
		if !errors.Is(err, context.DeadlineExceeded) || !strings.Contains(err.Error(), "is of another build") {
			t.Errorf("%v, want one that says that time was up, and the other build", err)
		}
	})
}

// A process on standby that was found not to fit does not take a place that the launcher offers.
func TestStandbyThatDoesNotFitTakesNoPlace(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		mem := storetest.NewMemory()
		job := mem.Open()
		defer job.Close()
		put(t, job, membership.First([]uint64{9, 8}), true)
		register(t, job, 0, "2")
		done := make(chan error, 1)
		go func() {
			c, err := StandBy(t.Context(), &Settings{MaxSize: 2, Terms: bootstrap.Terms{Version: "1"},
				Logger:    slog.New(slog.DiscardHandler),
				OpenStore: func(context.Context) (bootstrap.Store, error) { return mem.Open(), nil }})
			if err == nil {
				c.Release(false)
			}
			done <- err
		}()
		synctest.Wait() // it has seen the view
		if err := job.Put(t.Context(), bootstrap.VacantKeys+"1", nil, true); err != nil {
			t.Fatal(err)
		}
		if err := <-done; !errors.As(err, new(*bootstrap.TermsError)) {
			t.Errorf("%v, want a TermsError", err)
		}
	})
}

// A process on standby waits for a store that comes up later than it does.
func TestStandbyWaitsForStore(t *testing.T) {
	mem := storetest.NewMemory()
	launcher := mem.Open()
	defer launcher.Close()
	if err := launcher.Put(t.Context(), bootstrap.VacantKeys+"1", nil, true); err != nil {
		t.Fatal(err)
	}
	c, err := StandBy(t.Context(), &Settings{MaxSize: 2, Logger: slog.New(slog.DiscardHandler),
		OpenStore: late(mem.Open)})
	if err != nil {
		t.Fatal(err)
	}
	c.Release(false)
}

// A process on standby goes on when its lease is lost.
func TestStandbyOutlastsLease(t *testing.T) {
	standBy(t, func(s bootstrap.Store) bootstrap.Store { return s }, (*storetest.Memory).Expire)
}

// A process whose slot another one has waits until that is gone, and not while that takes another
// lease.
func TestAwaitSlot(t *testing.T) {
	const holder = 9
	for _, gone := range []string{"it was removed", "it has no record", "the wait is given up"} {
		synctest.Test(t, func(t *testing.T) {
			mem := storetest.NewMemory()
			job := mem.Open()
			defer job.Close()
			register := func() bootstrap.Store {
				s := mem.Open()
				record, err := bootstrap.NewRecord(1, 2, holder, nil).Encode()
				if err == nil {
					err = s.Put(t.Context(), bootstrap.RankKey(1), record, true)
				}
				if err != nil {
					t.Fatal(err)
				}
				return s
			}
			other := register()
			view := membership.First([]uint64{8, holder})
			put(t, job, view, true)
			var mine bootstrap.Store
			ss := session(1, func() bootstrap.Store {
				mine = mem.Open()
				return mine
			})
			defer ss.Close()
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			over := make(chan struct{})
			go func() {
				defer close(over)
				AwaitSlot(ctx, ss.settings, holder).Close()
			}()
			waits := func(d time.Duration) {
				t.Helper()
				time.Sleep(d)
				select {
				case <-over:
					t.Fatal("it does not wait")
				default:
				}
			}
			waits(time.Minute)
			mem.Expire(other)
			other.Close()
			waits(job.TTL() + time.Second)
			other = register()
			waits(time.Minute)
			mem.Expire(mine)
			waits(time.Minute)
			began := time.Now()
			switch gone {
			case "it was removed":
				view.Epoch, view.Slots[1] = 2, membership.Slot{Left: 2}
				put(t, job, view, true)
			case "it has no record":
				other.Close()
				waits(time.Minute) // the others decide
				if err := job.Delete(t.Context(), bootstrap.RankKey(0)); err != nil {
					t.Fatal(err)
				}
				began = time.Now()
			default:
				cancel()
			}
			<-over
			limit := lookPause
			if gone == "it has no record" {
				limit = job.TTL() + 5*time.Second
			}
			if took := time.Since(began); took > limit {
				t.Errorf("%s: it waits for another %v", gone, took)
			}
			other.Close()
		})
	}
}

// A process that waits for its slot does not wait for a store that refuses it.
func TestAwaitSlotWithoutStore(t *testing.T) {
	refused := errors.New("refused")
	ss := session(1, storetest.NewMemory().Open)
	defer ss.Close()
	ss.settings.OpenStore = func(context.Context) (bootstrap.Store, error) { return nil, refused }
	if store := AwaitSlot(t.Context(), ss.settings, 9); store != nil {
		t.Error("there is a handle")
	}
	ss.settings.OpenStore = func(context.Context) (bootstrap.Store, error) {
		return &mute{storetest.NewMemory().Open(), refused}, nil
	}
	AwaitSlot(t.Context(), ss.settings, 9).Close()
}

// mute is a store that answers no question.
type mute struct {
	bootstrap.Store
	why error
}

func (s *mute) Get(context.Context, string) ([]byte, error) { return nil, s.why }
