package pg_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"tutti/bootstrap"
	"tutti/pg"
	"tutti/pg/membership"
	"tutti/pg/pgtest"
)

// After a loss, a rank that has to run an operation of one group again gets on although another,
// which has ended that operation, is in another group by then and waits for it there.
func TestGroupsDoNotWaitForEachOther(t *testing.T) {
	for _, c := range []pg.Config{{OnFailure: pg.Shrink}, {OnFailure: pg.Retry},
		{OnFailure: pg.Shrink, Uniform: true}} {
		t.Run(fmt.Sprintf("%v,uniform=%v", c.OnFailure, c.Uniform), func(t *testing.T) {
			c.Timeout = 20 * time.Second
			pgtest.Run(t, 3, func(t *testing.T, g *pg.Group) {
				ctx := t.Context()
				sub, err := g.Split(ctx, 0, g.Rank())
				if err != nil {
					t.Fatal(err)
				}
				defer sub.Close()
				if err := g.Barrier(ctx); err != nil {
					t.Fatal(err)
				}
				if through(t, g, 2); g.Rank() == 2 {
					pgtest.Kill(t)
				}
				check := func(err error) {
					t.Helper()
					if err != nil && lostRank(err) != 2 {
						t.Errorf("%v, want nil or a *RankError that names rank 2", err)
					}
				}
				part, all := []int32{int32(g.Rank())}, make([]int32, 3)
				check(pg.Gather(ctx, sub, all, part, 1)) // rank 0 has sent its part and is through
				for range 3 {
					check(g.Barrier(ctx))
				}
				for range 3 {
					check(sub.Barrier(ctx))
				}
				if err := sub.Barrier(ctx); err != nil || fmt.Sprint(sub.View().Active) != "[0 1]" {
					t.Errorf("%v, active %v", err, sub.View().Active)
				}
			}, pgtest.Transport("shm"), pgtest.Config(c), pgtest.Expect(2, syscall.SIGKILL))
		})
	}
}

// belated is a store that tells of changes of the view only after a delay.
type belated struct {
	bootstrap.Store
	delay time.Duration
}

func (s belated) Watch(ctx context.Context, key string) <-chan bootstrap.Event {
	all, out := s.Store.Watch(ctx, key), make(chan bootstrap.Event)
	go func() {
		defer close(out)
		for e := range all {
			if _, v, err := membership.DecodeStored(e.Value); err == nil && e.Key == membership.ViewKey && v.Epoch > 1 {
				select {
				case <-time.After(s.delay):
				case <-ctx.Done():
				}
			}
			select {
			case out <- e:
			case <-ctx.Done(): // nobody reads any more
			}
		}
	}()
	return out
}

// tellLate makes the store of a rank of an elasticJob a belated one.
func tellLate(cfg *pg.Config, delay time.Duration) {
	kv := cfg.Store.(elastic)
	open := kv.open
	kv.open = func(ctx context.Context) (bootstrap.Store, error) {
		s, err := open(ctx)
		return belated{s, delay}, err
	}
	cfg.Store = kv
}

// A rank of a subgroup that goes on in a view that another does not know yet is not the one that
// was lost.
func TestLeaverIsNotNamed(t *testing.T) {
	t.Parallel() // it waits, mostly
	groups, _ := elasticJob(t, 3, 3, func(cfg *pg.Config) {
		if cfg.Rank == 1 {
			tellLate(cfg, 2*time.Second)
			cfg.Window = 10 * time.Second
		}
	})
	ctx := t.Context()
	var wg sync.WaitGroup
	subs, errs := make([]*pg.Group, 3), make([]error, 3)
	for r, g := range groups {
		defer g.Close()
		wg.Go(func() {
			if subs[r], errs[r] = g.Split(ctx, 0, r); errs[r] == nil {
				errs[r] = subs[r].Barrier(ctx)
			}
		})
	}
	if wg.Wait(); errors.Join(errs...) != nil {
		t.Fatal(errs)
	}
	for r, sub := range subs {
		defer sub.Close()
		if r == 2 { // it does nothing, and the others hear nothing from it
			continue
		}
		wg.Go(func() {
			if r == 0 {
				if err := groups[0].Evict(ctx, 2); err != nil {
					t.Error(err)
				}
			}
			if err := sub.Barrier(ctx); err != nil && lostRank(err) != 2 {
				t.Errorf("rank %d: %v, want nil or a *RankError that names rank 2", r, err)
			}
			if err := sub.Barrier(ctx); err != nil {
				t.Errorf("rank %d: %v", r, err)
			}
		})
	}
	wg.Wait()
}

// A rank that learns from its links first that the others have removed it says so, and names none
// of them.
func TestRemovedRankNamesNoOther(t *testing.T) {
	for _, how := range []pg.OnFailure{pg.Report, pg.Shrink, pg.Retry} {
		t.Run(how.String(), func(t *testing.T) {
			t.Parallel() // it waits, mostly
			groups, _ := elasticJob(t, 3, 3, func(cfg *pg.Config) {
				cfg.OnFailure = how
				if cfg.Window = 10 * time.Second; cfg.Rank == 2 {
					tellLate(cfg, time.Second)
				}
			})
			ctx := t.Context()
			var wg sync.WaitGroup
			errs := make([]error, 3)
			for r, g := range groups {
				defer g.Close()
				wg.Go(func() { errs[r] = g.Barrier(ctx) })
			}
			if wg.Wait(); errors.Join(errs...) != nil {
				t.Fatal(errs)
			}
			if err := groups[0].Evict(ctx, 2); err != nil {
				t.Fatal(err)
			}
			if err := groups[2].Barrier(ctx); !errors.Is(err, pg.ErrEvicted) {
				t.Errorf("got %v, want ErrEvicted", err)
			}
		})
	}
}

// A rank that calls Recover alone ends what another one waits for at once: no view is to come.
func TestRecoverAloneEndsOperations(t *testing.T) {
	groups, _ := elasticJob(t, 2, 2, func(cfg *pg.Config) { cfg.Window = time.Hour })
	ctx := t.Context()
	both := func(f func(r int, g *pg.Group) error) {
		t.Helper()
		var wg sync.WaitGroup
		errs := make([]error, 2)
		for r, g := range groups {
			wg.Go(func() { errs[r] = f(r, g) })
		}
		if wg.Wait(); errors.Join(errs...) != nil {
			t.Fatal(errs)
		}
	}
	both(func(r int, g *pg.Group) error { return g.Barrier(ctx) })
	both(func(r int, g *pg.Group) error {
		if r == 1 {
			if err := g.Barrier(ctx); lostRank(err) != 0 {
				t.Errorf("got %v, want a *RankError that names rank 0", err)
			}
		}
		return g.Recover(ctx)
	})
	both(func(r int, g *pg.Group) error { return errors.Join(g.Barrier(ctx), g.Close()) })
}

// Close ends an operation that waits for a view of which it has heard.
func TestCloseEndsTheWaitForAView(t *testing.T) {
	groups, _ := elasticJob(t, 3, 3, func(cfg *pg.Config) {
		cfg.Window = time.Hour
		if cfg.Rank == 1 {
			tellLate(cfg, time.Hour)
		}
	})
	ctx := t.Context()
	var wg sync.WaitGroup
	errs := make([]error, 3)
	for r, g := range groups {
		wg.Go(func() { errs[r] = g.Barrier(ctx) })
	}
	if wg.Wait(); errors.Join(errs...) != nil {
		t.Fatal(errs)
	}
	ended := make(chan error, 1)
	go func() { ended <- groups[1].Barrier(ctx) }()
	if err := groups[0].Evict(ctx, 2); err != nil {
		t.Fatal(err)
	}
	goes, end := context.WithCancel(ctx)
	wg.Go(func() { groups[0].Barrier(goes) }) // in the new view
	poll(t, "rank 1 hears of the view", func() bool { return groups[1].HearsOfView(0) })
	select {
	case err := <-ended:
		t.Fatalf("it ended with %v before Close", err)
	default:
	}
	groups[1].Close()
	if err := <-ended; !errors.Is(err, pg.ErrClosed) {
		t.Errorf("got %v, want ErrClosed", err)
	}
	end()
	wg.Wait()
	groups[0].Close()
	groups[2].Close()
}

// A program may agree on whether an operation succeeded everywhere, at ranks where the group has
// failed and at others, and then recover: all together.
func TestAgreeOnFailedGroup(t *testing.T) {
	for _, how := range []pg.OnFailure{pg.Report, pg.Shrink, pg.Retry} {
		t.Run(how.String(), func(t *testing.T) {
			pgtest.Run(t, 3, func(t *testing.T, g *pg.Group) {
				ctx := t.Context()
				if err := g.Barrier(ctx); err != nil {
					t.Fatal(err)
				}
				if through(t, g, 2); g.Rank() == 2 {
					pgtest.Kill(t)
				}
				// With Retry the group may recover within a call, and no call fails then.
				for round := 0; len(g.View().Active) == 3 || round < 5; round++ {
					x := []int64{1}
					err := pg.Reduce(ctx, g, x, 0, pg.Sum) // the root alone needs all others
					if err != nil && lostRank(err) != 2 {
						t.Fatal(err)
					}
					ok, aerr := g.Agree(ctx, err == nil)
					if aerr != nil || ok && err != nil {
						t.Fatalf("agreed on %v, %v; here: %v", ok, aerr, err)
					}
					if ok {
						continue
					}
					if err := g.Recover(ctx); err != nil {
						t.Fatal(err)
					}
					y := []int64{1}
					if err := pg.AllReduce(ctx, g, y, pg.Sum); err != nil || y[0] != 2 {
						t.Fatalf("after recovering: %v, %v, want 2", y, err)
					}
				}
			}, pgtest.Config(pg.Config{OnFailure: how, Timeout: 20 * time.Second}), pgtest.Expect(2, syscall.SIGKILL))
		})
	}
}

// A rank that calls Recover after a deadline waits for a rank that has not noticed: the next call
// of that rank fails, and they recover together.
func TestRecoverWaitsForRanksInOtherCalls(t *testing.T) {
	pgtest.Run(t, 3, func(t *testing.T, g *pg.Group) {
		ctx := t.Context()
		for round := range 20 {
			failed := false
			for range 5 {
				err := error(nil)
				if g.Rank() == round%3 && !failed {
					short, cancel := ctx, context.CancelFunc(func() {})
					if round%2 == 0 {
						short, cancel = context.WithTimeout(ctx, time.Duration(round)*10*time.Microsecond)
					}
					err = pg.Broadcast(short, g, []int32{1}, g.Rank())
					cancel()
				} else {
					err = pg.Broadcast(ctx, g, []int32{1}, round%3)
				}
				var late *pg.TimeoutError
				if err != nil && !errors.As(err, &late) {
					t.Fatalf("round %d: %v, want a *TimeoutError", round, err)
				}
				failed = failed || err != nil
			}
			ok, err := g.Agree(ctx, !failed)
			if err != nil {
				t.Fatal(err)
			}
			if !ok {
				if err := g.Recover(ctx); err != nil {
					t.Fatal(err)
				}
			}
			x := []int32{1}
			if err := pg.AllReduce(ctx, g, x, pg.Sum); err != nil || x[0] != 3 {
				t.Fatalf("round %d: after recovering: %v, %v", round, x, err)
			}
			// The next failure must not affect an operation that has not ended on this rank.
			if ok, err := g.Agree(ctx, true); !ok || err != nil {
				t.Fatal(ok, err)
			}
		}
	}, pgtest.Config(pg.Config{OnFailure: pg.Shrink}))
}

// A rank that gives up its first operation does not keep another rank from joining: Join returns
// when all ranks have met each other. The way between ranks 1 and 2 is long, so that they meet
// last.
func TestFirstOperationFailsAfterAllHaveJoined(t *testing.T) {
	t.Parallel() // it waits, mostly
	pgtest.Run(t, 3, func(t *testing.T, g *pg.Group) {
		ctx := t.Context()
		first := ctx
		if g.Rank() == 0 {
			ended, cancel := context.WithCancel(ctx)
			cancel()
			first = ended
		}
		var late *pg.TimeoutError
		if err := g.Barrier(first); !errors.As(err, &late) {
			t.Fatalf("rank 0 cancelled it: %v, want a *TimeoutError", err)
		}
		if err := g.Recover(ctx); err != nil {
			t.Fatal(err)
		}
		x := []int32{1}
		if err := pg.AllReduce(ctx, g, x, pg.Sum); err != nil || x[0] != 3 {
			t.Fatalf("after recovering: %v, %v", x, err)
		}
	}, pgtest.Transport("tcp"), pgtest.Config(pg.Config{OnFailure: pg.Shrink}),
		pgtest.Faults(func(c *pgtest.Control) {
			const way = 50 * time.Millisecond // a connection takes some fifteen ways
			c.Network(pgtest.Rule{From: []int{1}, To: []int{2}, Delay: way},
				pgtest.Rule{From: []int{2}, To: []int{1}, Delay: way})
		}))
}

// besideStopped runs f on ranks 0 and 1 of a job that continues without lost ranks, while rank 2 is
// stopped for longer than its lease.
func besideStopped(t *testing.T, f func(t *testing.T, g *pg.Group)) {
	t.Helper()
	t.Parallel() // it waits, mostly
	pgtest.Run(t, 3, func(t *testing.T, g *pg.Group) {
		if err := g.Barrier(t.Context()); err != nil {
			t.Fatal(err)
		}
		if through(t, g, 0); g.Rank() == 0 {
			pgtest.InjectFaults(t).Stop(2, time.Minute)
		}
		if g.Rank() == 2 {
			through(t, g, 2)
			return
		}
		if f(t, g); g.Rank() == 0 {
			pgtest.InjectFaults(t).Kill(2)
		}
	}, pgtest.Faults(nil), pgtest.Config(pg.Config{OnFailure: pg.Shrink, Window: time.Second, Timeout: time.Minute}),
		pgtest.Expect(2, syscall.SIGKILL))
}

// A rank that is stopped for longer than its lease does not block an agreement of ranks that
// continue without lost ranks.
func TestAgreeEndsDespiteStoppedRank(t *testing.T) {
	besideStopped(t, func(t *testing.T, g *pg.Group) {
		if ok, err := g.Agree(t.Context(), true); !ok || err != nil {
			t.Errorf("%v, %v, want true", ok, err)
		}
		if ok, err := g.Agree(t.Context(), g.Rank() == 0); ok || err != nil {
			t.Errorf("%v, %v, want false", ok, err)
		}
	})
}

// A rank that is stopped for longer than its lease is lost, also to a program whose calls are all
// shorter than a lease.
func TestStoppedRankIsLostToShortCalls(t *testing.T) {
	besideStopped(t, func(t *testing.T, g *pg.Group) {
		call := func(f func(context.Context) error) error {
			ctx, cancel := context.WithTimeout(t.Context(), time.Second)
			defer cancel()
			return f(ctx)
		}
		for began := time.Now(); len(g.View().Active) == 3; {
			if call(g.Barrier) != nil {
				call(g.Recover)
			}
			if time.Since(began) > 50*time.Second {
				t.Error("rank 2 stays in the view")
				break
			}
		}
	})
}

// closedByRank2 has rank 2 close g and stay in the job, with a subgroup of all ranks, until these
// ranks have sent it a message there. The others get the subgroup, rank 2 gets nil.
func closedByRank2(t *testing.T, g *pg.Group, until ...int) *pg.Group {
	t.Helper()
	sub, err := g.Split(t.Context(), 0, 0)
	if err != nil {
		t.Fatal(err)
	}
	if g.Rank() != 2 {
		return sub
	}
	defer sub.Close()
	g.Close()
	for _, from := range until {
		if _, err := pg.Recv(t.Context(), sub, []int64{0}, from, 1); err != nil {
			t.Error(err)
		}
	}
	return nil
}

// A rank closes the group of all ranks and stays in the job with a subgroup: the others' Admit does
// not wait for it until its time is up.
func TestAdmitAfterCloseOfOneRank(t *testing.T) {
	t.Parallel() // it waits, mostly
	pgtest.Run(t, 3, func(t *testing.T, g *pg.Group) {
		ctx := t.Context()
		sub := closedByRank2(t, g, 0, 1)
		if sub == nil {
			return
		}
		defer sub.Close()
		for range 2 {
			began := time.Now()
			var lost *pg.RankError
			if _, err := g.Admit(ctx); !errors.As(err, &lost) || lost.Rank != 2 {
				t.Errorf("%v, want a *RankError: rank 2 has closed its group", err)
			}
			if took := time.Since(began); took > 20*time.Second {
				t.Errorf("it took %v", took)
			}
		}
		if err := pg.Send(ctx, sub, []int64{1}, 2, 1); err != nil {
			t.Error(err)
		}
	}, pgtest.Config(pg.Config{OnFailure: pg.Shrink, Timeout: time.Minute}))
}

// A rank has closed the group of all ranks, and leaves the job when one of the others has given up
// waiting for it in Admit, and another has not: both get an error, and then the same results.
func TestAdmitAfterCloseEndsAlike(t *testing.T) {
	t.Parallel() // it waits, mostly
	pgtest.Run(t, 3, func(t *testing.T, g *pg.Group) {
		ctx := t.Context()
		sub := closedByRank2(t, g, 1) // until rank 1 has given up
		if sub == nil {
			return
		}
		defer sub.Close()
		// Rank 0 waits until the membership has decided. Rank 1, which finds that the operation has
		// failed, waits for a second.
		if g.Rank() == 1 {
			if _, err := pg.Recv(ctx, g, []int64{0}, 0, 1); err != nil {
				t.Fatal(err)
			}
			time.Sleep(500 * time.Millisecond)
		} else if err := pg.Send(ctx, g, []int64{0}, 1, 1); err != nil {
			t.Fatal(err)
		}
		var lost *pg.RankError
		if _, err := g.Admit(ctx); !errors.As(err, &lost) {
			t.Errorf("%v, want a *RankError", err)
		}
		if g.Rank() == 1 {
			if err := pg.Send(ctx, sub, []int64{0}, 2, 1); err != nil {
				t.Fatal(err)
			}
		}
		x := []int64{1}
		err := pg.AllReduce(ctx, g, x, pg.Sum)
		for lostRank(err) == 2 {
			err = pg.AllReduce(ctx, g, x, pg.Sum)
		}
		if err != nil || x[0] != 2 {
			t.Errorf("afterwards: %v, %v, want 2", x, err)
		}
	}, pgtest.Config(pg.Config{OnFailure: pg.Shrink, Timeout: time.Minute}))
}

// A rank closes a subgroup and stays in the job: every call of the others on it returns an error in
// bounded time. When the rank has left the job, they continue without it.
func TestCloseOfSubgroupOnly(t *testing.T) {
	t.Parallel() // it waits, mostly
	for _, f := range []pg.OnFailure{pg.Report, pg.Shrink, pg.Retry} {
		t.Run(f.String(), func(t *testing.T) {
			pgtest.Run(t, 3, func(t *testing.T, g *pg.Group) {
				ctx := t.Context()
				sub, err := g.Split(ctx, 0, 0)
				if err != nil {
					t.Fatal(err)
				}
				defer sub.Close()
				if g.Rank() == 2 {
					sub.Close()
					for range 2 { // until the others have seen enough
						if _, err := pg.Recv(ctx, g, []int64{0}, pg.AnyRank, 1); err != nil {
							t.Error(err)
						}
					}
					g.Close()
					return
				}
				x := []int64{1}
				calls := []func() error{
					func() error { return pg.AllReduce(ctx, sub, x, pg.Sum) },
					func() error { return pg.AllReduce(ctx, sub, x, pg.Sum) },
					func() error { return sub.Recover(ctx) },
					func() error { _, err := sub.Agree(ctx, true); return err },
				}
				for i, call := range calls {
					began := time.Now()
					var lost *pg.RankError
					if err := call(); !errors.As(err, &lost) || lost.Rank != 2 ||
						!strings.Contains(err.Error(), "closed its group") {
						t.Errorf("call %d: %v, want a *RankError: rank 2 has closed its group", i, err)
					}
					if took := time.Since(began); took > 20*time.Second {
						t.Errorf("call %d took %v", i, took)
					}
				}
				if err := pg.Send(ctx, g, x, 2, 1); err != nil {
					t.Error(err)
				}
				for {
					err := sub.Recover(ctx)
					if err == nil {
						break
					}
					var lost *pg.RankError
					if !errors.As(err, &lost) {
						t.Fatal(err)
					}
				}
				if x[0] = 1; pg.AllReduce(ctx, sub, x, pg.Sum) != nil || x[0] != 2 {
					t.Errorf("afterwards: %v", x)
				}
			}, pgtest.Config(pg.Config{OnFailure: f, Timeout: time.Minute}))
		})
	}
}

// Several goroutines of each rank may agree at a time: each agreement has its outcome before the
// next one begins.
func TestAgreeOnSeveralGoroutines(t *testing.T) {
	pgtest.Run(t, 2, func(t *testing.T, g *pg.Group) {
		var wg sync.WaitGroup
		for range 3 {
			wg.Go(func() {
				for range 60 {
					if yes, err := g.Agree(t.Context(), true); !yes || err != nil {
						t.Errorf("got %v, %v", yes, err)
						return
					}
				}
			})
		}
		wg.Wait()
	})
}
