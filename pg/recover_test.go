package pg_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"tutti/bootstrap"
	"tutti/pg"
	"tutti/pg/pgtest"
)

// holes runs every collective among the active ranks of g and checks the results, and that inactive
// ranks' parts are left as they were.
func holes(t *testing.T, g *pg.Group, count int) error {
	ctx := t.Context()
	me := g.Rank()
	x := make([]float64, count)
	for i := range x {
		x[i] = float64(me + 1)
	}
	if err := pg.AllReduce(ctx, g, x, pg.Sum); err != nil {
		return err
	}
	active, n := g.View().Active, g.Size() // the operation may have begun in another view than the one before
	sum := 0.0
	for _, r := range active {
		sum += float64(r + 1)
	}
	all := make([]int64, n*count)
	for i := range all {
		all[i] = -1
	}
	mine := make([]int64, count)
	for i := range mine {
		mine[i] = int64(me*count + i)
	}
	if err := pg.AllGather(ctx, g, all, mine); err != nil {
		return err
	}
	src, part := make([]int64, n*count), make([]int64, count)
	for i := range src {
		src[i] = int64(i)
	}
	if err := pg.ReduceScatter(ctx, g, part, src, pg.Sum); err != nil {
		return err
	}
	from := make([]int64, n*count)
	for i := range from {
		from[i] = -1
	}
	if err := pg.AllToAll(ctx, g, from, src); err != nil {
		return err
	}
	in := map[int]bool{}
	for _, r := range active {
		in[r] = true
	}
	for i := range count {
		if x[i] != sum {
			return fmt.Errorf("allreduce: element %d is %g, want %g among %v", i, x[i], sum, active)
		}
		if want := int64(len(active) * (me*count + i)); part[i] != want {
			return fmt.Errorf("reduce-scatter: element %d is %d, want %d", i, part[i], want)
		}
	}
	for i, v := range all {
		want, theirs := int64(i), int64(me*count+i%count)
		if !in[i/count] {
			want, theirs = -1, -1
		}
		if v != want || from[i] != theirs {
			return fmt.Errorf("element %d of rank %d: allgather %d, want %d; alltoall %d, want %d", i, i/count, v, want,
				from[i], theirs)
		}
	}
	return nil
}

// lostRank returns the rank that err says was lost, -1 if it says nothing like that.
func lostRank(err error) int {
	var lost *pg.RankError
	if errors.As(err, &lost) {
		return lost.Rank
	}
	return -1
}

// After a kill the survivors continue by themselves, without being renumbered.
func TestSurvivorsContinueByThemselves(t *testing.T) {
	for _, tr := range transports {
		for _, count := range []int{7, 50_000} {
			t.Run(fmt.Sprintf("%s/%d", tr, count), func(t *testing.T) {
				pgtest.Run(t, 4, func(t *testing.T, g *pg.Group) {
					for range 5 {
						if err := holes(t, g, count); err != nil {
							t.Fatal(err)
						}
					}
					if through(t, g, 2); g.Rank() == 2 {
						pgtest.Kill(t)
					}
					for range 3 {
						err := holes(t, g, count)
						if lostRank(err) == 2 {
							continue
						}
						if err != nil {
							t.Fatal(err)
						}
					}
					if err := g.Barrier(t.Context()); err != nil && lostRank(err) != 2 {
						t.Fatal(err)
					}
					if v := g.View(); fmt.Sprint(v.Active) != "[0 1 3]" || g.Size() != 4 || v.Epoch < 2 {
						t.Errorf("the view is %v, size %d", v, g.Size())
					}
				}, pgtest.Transport(tr), pgtest.Config(pg.Config{OnFailure: pg.Shrink, Timeout: 20 * time.Second}),
					pgtest.Expect(2, syscall.SIGKILL))
			})
		}
	}
}

// By default the group waits for Recover.
func TestGroupWaitsForRecover(t *testing.T) {
	pgtest.Run(t, 3, func(t *testing.T, g *pg.Group) {
		if err := holes(t, g, 100); err != nil {
			t.Fatal(err)
		}
		if through(t, g, 0); g.Rank() == 0 {
			pgtest.Kill(t)
		}
		w := g.Start(pg.BarrierOp{})
		if err := w.Wait(t.Context()); lostRank(err) != 0 || w.LocalSuccess() {
			t.Fatal(err, w.LocalSuccess())
		}
		for i := range 3 {
			if err := g.Barrier(t.Context()); lostRank(err) != 0 {
				t.Fatalf("barrier %d: %v", i, err)
			}
		}
		if err := g.Recover(t.Context()); err != nil {
			t.Fatal(err)
		}
		for range 3 {
			if err := holes(t, g, 1000); err != nil {
				t.Fatal(err)
			}
		}
		if v := g.View(); fmt.Sprint(v.Active) != "[1 2]" {
			t.Errorf("the view is %v", v)
		}
	}, pgtest.Transport("shm"), pgtest.Expect(0, syscall.SIGKILL))
}

// A group can recover any number of times in one view.
func TestRecoverManyTimesInOneView(t *testing.T) {
	pgtest.Run(t, 2, func(t *testing.T, g *pg.Group) {
		epoch := g.View().Epoch
		for i := range 200 {
			if err := g.Recover(t.Context()); err != nil {
				t.Fatalf("recovery %d: %v", i, err)
			}
		}
		if err := holes(t, g, 100); err != nil {
			t.Fatal(err)
		}
		if v := g.View(); v.Epoch != epoch {
			t.Errorf("epoch %d, and %d before: no rank came or went", v.Epoch, epoch)
		}
	}, pgtest.Config(pg.Config{Timeout: 20 * time.Second}))
}

// An operation whose inputs are intact runs again by itself: with Uniform, whenever ranks die, the
// survivors see errors only if their inputs were lost.
func TestOperationsWithIntactInputsRunAgain(t *testing.T) {
	pgtest.Run(t, 4, func(t *testing.T, g *pg.Group) {
		ctx := t.Context()
		for round := range 200 {
			if round == 50+20*g.Rank() && g.Rank() < 2 {
				pgtest.Kill(t)
			}
			src, dst := []int64{int64(round), 1 << g.Rank()}, make([]int64, 2)
			w := g.Start(pg.AllReduceOp{Dst: pg.BufferOf(dst), Src: pg.BufferOf(src), Op: pg.Sum})
			if err := w.Wait(ctx); err != nil {
				t.Fatalf("round %d: %v", round, err)
			}
			who, n := dst[1], int64(0)
			for b := who; b > 0; b &= b - 1 {
				n++
			}
			if dst[0] != n*int64(round) || who&12 != 12 {
				t.Fatalf("round %d: %v", round, dst)
			}
		}
	}, pgtest.Transport("shm"), pgtest.Config(pg.Config{OnFailure: pg.Retry, Uniform: true}),
		pgtest.Expect(0, syscall.SIGKILL), pgtest.Expect(1, syscall.SIGKILL))
}

// A replacement is admitted at a step boundary, and sends and receives as its predecessor did.
func TestReplacement(t *testing.T) {
	for _, tr := range transports {
		t.Run(tr, func(t *testing.T) {
			pgtest.Run(t, 3, func(t *testing.T, g *pg.Group) {
				ctx := t.Context()
				if !pgtest.Second() {
					if err := holes(t, g, 100); err != nil {
						t.Fatal(err)
					}
					if through(t, g, 1); g.Rank() == 1 {
						pgtest.Kill(t)
					}
					for in := false; !in; {
						if _, err := g.Admit(ctx); err != nil && lostRank(err) != 1 {
							t.Fatal(err)
						}
						v := g.View()
						in = v.Epoch >= 3 && len(v.Active) == 3
					}
				}
				if v := g.View(); fmt.Sprint(v.Active) != "[0 1 2]" {
					t.Errorf("the view is %v", v)
				}
				for range 5 {
					if err := holes(t, g, 5000); err != nil {
						t.Fatal(err)
					}
				}
				x := []int{g.Rank()}
				if err := pg.Send(ctx, g, x, (g.Rank()+1)%3, 7); err != nil {
					t.Fatal(err)
				}
				if _, err := pg.Recv(ctx, g, x, (g.Rank()+2)%3, 7); err != nil || x[0] != (g.Rank()+2)%3 {
					t.Fatal(x, err)
				}
				if ok, err := g.Agree(ctx, true); !ok || err != nil {
					t.Error(ok, err)
				}
				if ok, err := g.Agree(ctx, g.Rank() != 1); ok || err != nil {
					t.Error(ok, err)
				}
			}, pgtest.Transport(tr), pgtest.Config(pg.Config{OnFailure: pg.Shrink}), pgtest.Expect(1, syscall.SIGKILL),
				pgtest.Replace(1))
		})
	}
}

// New ranks join a running group, by themselves, between two operations.
func TestRanksJoinBetweenOperations(t *testing.T) {
	pgtest.Run(t, 2, func(t *testing.T, g *pg.Group) {
		ctx := t.Context()
		for round := 0; ; round++ {
			x := []int64{1, int64(g.Size())}
			if err := pg.AllReduce(ctx, g, x, pg.Sum); err != nil {
				t.Fatal(err)
			}
			if x[0] == 4 {
				break
			}
		}
		for range 3 {
			if err := holes(t, g, 300); err != nil {
				t.Fatal(err)
			}
		}
		if g.Size() != 4 {
			t.Errorf("size %d", g.Size())
		}
	}, pgtest.Transport("shm"), pgtest.Config(pg.Config{AutoAdmit: true}), pgtest.Extend(2))
}

// jobStore returns a handle on the job's store.
func jobStore(t *testing.T) bootstrap.Store {
	t.Helper()
	l, err := bootstrap.FromEnv(os.Getenv)
	if err != nil {
		t.Fatal(err)
	}
	store, err := bootstrap.DialStore(t.Context(), bootstrap.StoreConfig{Address: l.Store, Job: l.Job,
		Secret: l.Secret})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { store.Close() })
	return store
}

// The error names all lost ranks.
func TestSeveralLost(t *testing.T) {
	pgtest.Run(t, 4, func(t *testing.T, g *pg.Group) {
		if err := g.Barrier(t.Context()); err != nil && lostRank(err) != 1 && lostRank(err) != 2 {
			t.Fatal(err)
		}
		if r := g.Rank(); r == 1 || r == 2 {
			pgtest.Kill(t)
		}
		for {
			w := g.Start(pg.BarrierOp{})
			err := w.Wait(t.Context())
			var lost *pg.RankError
			switch {
			case err == nil && len(g.View().Active) == 2: // the second may have been lost between two operations
				return
			case err == nil:
			case !errors.As(err, &lost):
				t.Fatal(err)
			default:
				all := append([]int{lost.Rank}, lost.Also...)
				slices.Sort(all)
				if text := fmt.Sprint(all); text != "[1]" && text != "[2]" && text != "[1 2]" ||
					len(lost.Also) > 0 && !strings.Contains(err.Error(), fmt.Sprintf("; so did rank %d",
						lost.Also[0])) {
					t.Fatalf("%v are said to be lost: %v", all, err)
				}
			}
		}
	}, pgtest.Transport("shm"), pgtest.Config(pg.Config{OnFailure: pg.Shrink}), pgtest.Expect(1, syscall.SIGKILL),
		pgtest.Expect(2, syscall.SIGKILL))
}

// A rank that closes its group does not take the place of another that was named, whichever was
// removed first.
func TestLossOutlivesItsReporter(t *testing.T) {
	pgtest.Run(t, 3, func(t *testing.T, g *pg.Group) {
		if err := g.Barrier(t.Context()); err != nil {
			t.Fatal(err)
		}
		if g.Rank() != 0 {
			return
		}
		for len(g.JobView()) > 1 {
			if t.Context().Err() != nil {
				t.Fatalf("%v are still members", g.JobView())
			}
			time.Sleep(time.Millisecond)
		}
		for reporter := range 3 {
			for rank := 1; rank < 3; rank++ {
				e := g.Verdict(rank, reporter)
				if e.Rank != rank {
					t.Errorf("rank %d told of the loss of rank %d: rank %d is named", reporter, rank, e.Rank)
				}
			}
		}
	}, pgtest.Transport("shm"), pgtest.Config(pg.Config{OnFailure: pg.Shrink}))
}

// A rank that has noticed a death names it, though a rank that closed its group at the same time is
// removed first.
func TestDeathIsNamedBeforeClose(t *testing.T) {
	pgtest.Run(t, 3, func(t *testing.T, g *pg.Group) {
		if err := g.Barrier(t.Context()); err != nil && g.Rank() == 2 {
			t.Fatal(err)
		}
		through(t, g, 0)
		switch g.Rank() {
		case 0:
			faults := pgtest.InjectFaults(t)
			faults.Stop(2, 300*time.Millisecond) // it notices both losses at once
			faults.Kill(1)
			return
		case 1:
			<-t.Context().Done()
			return
		}
		for g.Down(1) == nil || len(g.JobView()) == 3 {
			if t.Context().Err() != nil {
				t.Fatalf("%v are still members", g.JobView())
			}
			time.Sleep(100 * time.Microsecond)
		}
		if e := g.Verdict(1, 2); e.Rank != 1 {
			t.Errorf("rank %d is named: %v", e.Rank, e.Err)
		}
	}, pgtest.Transport("shm"), pgtest.Faults(nil), pgtest.Config(pg.Config{OnFailure: pg.Shrink}),
		pgtest.Expect(1, syscall.SIGKILL))
}

// Of several losses the one is named that may have caused the others.
func TestCulprit(t *testing.T) {
	const slot, reporter, other, self = 1, 2, 3, 0
	left := pg.LossOf(other, 2, true)
	died := func(slot int, epoch uint64) pg.Loss { return pg.LossOf(slot, epoch, false) }
	for name, c := range map[string]struct {
		by     int
		losses []pg.Loss
		want   int
	}{
		"none":                        {self, nil, slot},
		"the one":                     {self, []pg.Loss{died(slot, 2)}, slot},
		"another before it":           {self, []pg.Loss{died(slot, 3), died(other, 2)}, other},
		"another at once":             {self, []pg.Loss{died(slot, 2), died(other, 2)}, slot},
		"another after it":            {self, []pg.Loss{died(slot, 2), died(other, 3)}, slot},
		"another in its place":        {self, []pg.Loss{died(other, 2)}, other},
		"the first of others":         {self, []pg.Loss{died(3, 4), died(4, 2), died(5, 3)}, 4},
		"another left before it":      {self, []pg.Loss{died(slot, 3), left}, slot},
		"another left":                {self, []pg.Loss{left}, slot},
		"it left, another had died":   {self, []pg.Loss{pg.LossOf(slot, 3, true), died(other, 2)}, other},
		"the reporter ended first":    {reporter, []pg.Loss{died(slot, 3), died(reporter, 2)}, slot},
		"the reporter in its place":   {reporter, []pg.Loss{died(reporter, 2)}, reporter},
		"another before the reporter": {reporter, []pg.Loss{died(slot, 4), died(reporter, 3), died(other, 2)}, other},
		"the reporter, another left":  {reporter, []pg.Loss{died(reporter, 3), left}, reporter},
	} {
		if got := pg.Culprit(slot, c.by, c.losses); got != c.want {
			t.Errorf("%s: rank %d is named, want %d", name, got, c.want)
		}
	}
}

// Abort ends what is under way here at once, and the others learn of it, which until then wait for
// a message that does not come.
func TestAbortEndsWhatIsUnderWay(t *testing.T) {
	cause := errors.New("enough")
	pgtest.Run(t, 3, func(t *testing.T, g *pg.Group) {
		if err := g.Barrier(t.Context()); err != nil {
			t.Fatal(err)
		}
		through(t, g, 0)
		if g.Rank() == 0 {
			w := g.Start(pg.BarrierOp{})
			g.Abort(cause)
			if err := w.Wait(context.Background()); !errors.Is(err, pg.ErrAborted) || !errors.Is(err, cause) {
				t.Error(err)
			}
		} else if _, err := pg.Recv(t.Context(), g, make([]byte, 1), 0, 0); !errors.Is(err, pg.ErrAborted) {
			t.Errorf("got %v", err)
		}
		for range 2 {
			if err := g.Barrier(t.Context()); !errors.Is(err, pg.ErrAborted) {
				t.Errorf("got %v", err)
			}
		}
	}, pgtest.Transport("shm"))
}

// A live rank that is evicted gets ErrEvicted, and rejoins as another incarnation.
func TestEvictAndRejoin(t *testing.T) {
	pgtest.Run(t, 3, func(t *testing.T, g *pg.Group) {
		ctx := t.Context()
		// rank 2 may be evicted while others still wait for the last message
		if err := g.Barrier(ctx); err != nil && (g.Rank() == 0 || g.Rank() == 1 && lostRank(err) != 2) {
			t.Fatal(err)
		}
		if g.Rank() == 0 {
			if err := g.Evict(ctx, 2); err != nil {
				t.Fatal(err)
			}
		}
		if g.Rank() == 2 {
			var err error
			for err == nil || lostRank(err) >= 0 {
				_, err = g.Admit(ctx)
			}
			if !errors.Is(err, pg.ErrEvicted) {
				t.Fatal(err)
			}
			if g, err = g.Rejoin(ctx); err != nil {
				t.Fatal(err)
			}
			defer g.Close()
		} else {
			for in := false; !in; { // rank 2's new incarnation, not the old one
				if _, err := g.Admit(ctx); err != nil && lostRank(err) != 2 {
					t.Fatal(err)
				}
				v := g.View()
				in = v.Epoch >= 3 && len(v.Active) == 3
			}
		}
		if err := holes(t, g, 10); err != nil {
			t.Fatal(err)
		}
	}, pgtest.Transport("shm"), pgtest.Config(pg.Config{OnFailure: pg.Shrink}))
}

// Admit returns the same number at every rank, so that a program may depend on it: here while one
// rank after another is evicted and comes back, and the processors are busy.
func TestAdmitReturnsSameResultOnAllRanks(t *testing.T) {
	const rounds = 4
	pgtest.Run(t, 4, func(t *testing.T, g *pg.Group) {
		ctx := t.Context()
		busy, end := context.WithCancel(ctx)
		defer end()
		go func() {
			for busy.Err() == nil {
			}
		}()
		if err := g.Barrier(ctx); err != nil {
			t.Fatal(err)
		}
		through(t, g, 0)  // a rank that is evicted before its Join has returned would join anew by itself
		state := []int{0} // how many have come in so far
		for state[0] < rounds {
			out := 3 - state[0]%3 // never rank 0, which puts them out
			if g.Rank() == 0 {
				if err := g.Evict(ctx, out); err != nil {
					t.Fatal(err)
				}
			}
			for round := state[0]; state[0] == round; {
				in, err := g.Admit(ctx)
				switch {
				case errors.Is(err, pg.ErrEvicted) && g.Rank() == out:
					if g, err = g.Rejoin(ctx); err != nil {
						t.Fatal(err)
					}
					defer g.Close()
				case err != nil:
					t.Fatalf("round %d: %v", round, err)
				case in == 0:
					continue
				case in != 1:
					t.Fatalf("round %d: %d came in, want 1", round, in)
				default:
					state[0]++
				}
				if err := pg.Broadcast(ctx, g, state, 0); err != nil {
					t.Fatalf("round %d: %v", round, err)
				}
				through(t, g, 0) // no rank is evicted that has not finished the round
			}
		}
	}, pgtest.Config(pg.Config{OnFailure: pg.Shrink, Timeout: 20 * time.Second}))
}

// The rank that admits others dies while it does: the admitted ranks and the old members go
// on with the same operation.
func TestAdmitSurvivesDeathOfAdmitter(t *testing.T) {
	for round := range 3 {
		t.Run(fmt.Sprint(round), func(t *testing.T) {
			pgtest.Run(t, 4, func(t *testing.T, g *pg.Group) {
				ctx := t.Context()
				if !pgtest.Second() { // a rank that is evicted before it has met the others joins anew by itself
					if err := g.Barrier(ctx); err != nil {
						t.Fatal(err)
					}
					through(t, g, 1)
				}
				if g.Rank() == 0 && !pgtest.Second() {
					go func() { // the others are through with what puts rank 3 out at about this time
						time.Sleep(time.Duration(20+30*round) * time.Millisecond)
						syscall.Kill(os.Getpid(), syscall.SIGKILL)
					}()
				}
				if g.Rank() == 1 {
					if err := g.Evict(ctx, 3); err != nil {
						t.Fatal(err)
					}
				}
				came, in := 0, 0
				if pgtest.Second() {
					in = 1
				}
				for came < 2 {
					if in == 0 {
						var err error
						if in, err = g.Admit(ctx); errors.Is(err, pg.ErrEvicted) && g.Rank() == 3 {
							if g, err = g.Rejoin(ctx); err != nil {
								t.Fatal(err)
							}
							defer g.Close()
							in = 1
						}
						if err != nil {
							t.Fatal(err)
						}
						continue
					}
					all := []int{came + in}
					if err := pg.AllReduce(ctx, g, all, pg.Max); err != nil {
						t.Fatal(err)
					}
					came, in = all[0], 0
				}
			}, pgtest.Config(pg.Config{OnFailure: pg.Retry, Uniform: true, Timeout: 20 * time.Second}),
				pgtest.Expect(0, syscall.SIGKILL), pgtest.Replace(0))
		})
	}
}

// If all ranks are lost while one waits for admission, the remaining ranks begin the job anew.
func TestJobBeginsAnewWhenAllAreLost(t *testing.T) {
	t.Parallel() // it waits, mostly
	kill := syscall.SIGKILL
	pgtest.Run(t, 2, func(t *testing.T, g *pg.Group) {
		ctx := t.Context()
		if !pgtest.Second() {
			if err := g.Barrier(ctx); err != nil && g.Rank() == 0 && lostRank(err) != 1 {
				t.Fatal(err)
			}
			if g.Rank() == 0 {
				if _, err := jobStore(t).Wait(ctx, "membership/join/1"); err != nil {
					t.Fatal(err)
				}
			}
			pgtest.Kill(t)
		}
		if err := holes(t, g, 100); err != nil {
			t.Fatal(err)
		}
		if v := g.View(); v.Epoch != 1 || len(v.Active) != 2 {
			t.Errorf("view %+v, want the first of a new job", v)
		}
	}, pgtest.Transport("shm"), pgtest.Expect(0, kill),
		pgtest.Expect(1, kill), pgtest.Replace(0), pgtest.Replace(1))
}

// Subgroups follow the job's views: they lose lost ranks, admit none, and Split makes them anew
// after a rank has come back.
func TestSubgroupsFollowViews(t *testing.T) {
	pgtest.Run(t, 4, func(t *testing.T, g *pg.Group) {
		ctx := t.Context()
		var halves *pg.Group
		if !pgtest.Second() {
			var err error
			if halves, err = g.Split(ctx, g.Rank()/2, 0); err != nil {
				t.Fatal(err)
			}
			defer halves.Close()
			if err := halves.Barrier(ctx); err != nil {
				t.Fatal(err)
			}
			if through(t, g, 3); g.Rank() == 3 {
				pgtest.Kill(t)
			}
			for range 3 { // the half without the lost rank does not notice
				err := holes(t, halves, 20)
				if g.Rank() == 2 && lostRank(err) == 1 {
					continue
				}
				if err != nil {
					t.Fatal(err)
				}
			}
			want := map[bool]string{false: "[0 1]", true: "[0]"}[g.Rank() == 2]
			if v := halves.View(); fmt.Sprint(v.Active) != want {
				t.Errorf("the half of rank %d is %v, want %s", g.Rank(), v, want)
			}
			for in := false; !in; {
				if _, err := g.Admit(ctx); err != nil {
					t.Fatal(err)
				}
				v := g.View()
				in = v.Epoch >= 3 && len(v.Active) == 4
			}
			if v := halves.View(); g.Rank() == 2 && fmt.Sprint(v.Active) != "[0]" {
				t.Errorf("the old half admitted a rank: %v", v)
			}
		}
		odd, err := g.Split(ctx, g.Rank()%2, 0)
		if err != nil {
			t.Fatal(err)
		}
		defer odd.Close()
		if err := holes(t, odd, 20); err != nil {
			t.Fatal(err)
		}
		if odd.Size() != 2 || len(odd.View().Active) != 2 {
			t.Errorf("the new half is %v", odd.View())
		}
		if g.Rank() == 2 { // messages to the replacement are for groups of which it is a member
			ctx, cancel := context.WithTimeout(ctx, 20*time.Second)
			defer cancel()
			x := []float32{1}
			send, recv := pg.SendOp{X: pg.BufferOf(x), To: 1}, pg.RecvOp{X: pg.BufferOf(x), From: 1}
			any := pg.RecvOp{X: pg.BufferOf(x), From: pg.AnyRank}
			for _, op := range []pg.Operation{send, recv, any} {
				if err := halves.Do(ctx, op); lostRank(err) != 1 {
					t.Errorf("%T to or from the replacement in the old half: %v", op, err)
				}
				if err := halves.Start(op).Wait(ctx); lostRank(err) != 1 {
					t.Errorf("%T to or from the replacement in the old half, started: %v", op, err)
				}
			}
		}
	}, pgtest.Transport("shm"), pgtest.Config(pg.Config{OnFailure: pg.Shrink}), pgtest.Expect(3, syscall.SIGKILL),
		pgtest.Replace(3))
}

// Two groups are divided at the same time while a rank of both dies: each Split has one outcome at
// all survivors, and those that come after make groups that work.
func TestSplitDuringDeath(t *testing.T) {
	pgtest.Run(t, 4, func(t *testing.T, g *pg.Group) {
		ctx := t.Context()
		parts := make([]*pg.Group, 2)
		for i := range parts { // ranks 0, 1, 2 and 1, 2, 3
			color := 0
			if g.Rank() == 3*(1-i) {
				color = -1
			}
			var err error
			if parts[i], err = g.Split(ctx, color, 0); err != nil {
				t.Fatal(err)
			}
		}
		var wg sync.WaitGroup
		for i, p := range parts {
			if p == nil {
				continue
			}
			defer p.Close()
			wg.Go(func() { // in part 1 rank 2 has slot 1
				for n, after := 0, 0; after < 20; n++ {
					if g.Rank() == 2 && i == 0 && n == 10 {
						syscall.Kill(os.Getpid(), syscall.SIGKILL)
					}
					sub, err := p.Split(ctx, 0, 0)
					if err != nil && lostRank(err) != 2-i {
						t.Errorf("splitting part %d: %v", i, err)
						return
					}
					if err == nil {
						// It names the rank that died, or a survivor that has closed its group.
						err = sub.Barrier(ctx)
						sub.Close()
						if err != nil && lostRank(err) != 2-i && !strings.Contains(err.Error(), "it closed its group") {
							t.Errorf("in a group of part %d: %v", i, err)
							return
						}
					}
					if yes, err := p.Agree(ctx, err == nil && len(p.View().Active) == 2); err != nil &&
						lostRank(err) != 2-i {
						t.Errorf("agreeing in part %d: %v", i, err)
						return
					} else if yes {
						after++
					}
				}
			})
		}
		wg.Wait()
	}, pgtest.Config(pg.Config{OnFailure: pg.Shrink, Timeout: 20 * time.Second}), pgtest.Expect(2, syscall.SIGKILL))
}

// A rank that is alive and does not come is named, and evicted if the configuration says so.
func TestTimeoutEvicts(t *testing.T) {
	pgtest.Run(t, 3, func(t *testing.T, g *pg.Group) {
		ctx := t.Context()
		if err := g.Barrier(ctx); err != nil {
			t.Fatal(err)
		}
		together(t, g) // ranks 0 and 2 wait for rank 1 from the same moment on
		if g.Rank() == 1 {
			var err error
			for until := time.Now().Add(20 * time.Second); time.Now().Before(until) &&
				len(g.View().Active) == 3; time.Sleep(time.Millisecond) {
				if err = pg.Send(ctx, g, []byte{1}, 0, 9); err != nil { // it has other things to do
					break
				}
			}
			for range 100 { // first it may hear that the others have waited for it
				if err = g.Barrier(ctx); errors.Is(err, pg.ErrEvicted) {
					return
				}
			}
			t.Errorf("the stuck rank got %v", err)
			return
		}
		short, end := context.WithTimeout(ctx, 8*time.Second) // a rank that has waited for half of it votes
		defer end()
		err := g.Barrier(short)
		var late *pg.TimeoutError
		if lostRank(err) != 1 && (!errors.As(err, &late) || len(late.Missing) != 1 || late.Missing[0].Rank != 1) {
			t.Fatalf("got %v", err)
		}
		if err := holes(t, g, 10); err != nil {
			t.Fatal(err)
		}
		if v := g.View(); fmt.Sprint(v.Active) != "[0 2]" {
			t.Errorf("the view is %v", v)
		}
	}, pgtest.Transport("shm"), pgtest.Config(pg.Config{OnFailure: pg.Shrink, OnTimeout: pg.TimeoutEvicts,
		Timeout: 20 * time.Second}))
}

// One rank with an early deadline removes no other, though three are late: they continue together.
func TestTimeoutOfOneRankEvictsNoRank(t *testing.T) {
	pgtest.Run(t, 4, func(t *testing.T, g *pg.Group) {
		ctx := t.Context()
		if err := g.Barrier(ctx); err != nil {
			t.Fatal(err)
		}
		through(t, g, 0)
		if g.Rank() == 0 {
			short, end := context.WithTimeout(ctx, 300*time.Millisecond)
			defer end()
			x := []int{1}
			if err := pg.AllReduce(short, g, x, pg.Sum); !errors.As(err, new(*pg.TimeoutError)) {
				t.Fatalf("the early rank got %v, and %v", err, x)
			}
			for r := 1; r < 4; r++ {
				if err := pg.Send(ctx, g, []byte{1}, r, 3); err != nil {
					t.Fatal(err)
				}
			}
		} else if _, err := pg.Recv(ctx, g, make([]byte, 1), 0, 3); err != nil {
			t.Fatal(err)
		} else {
			// Rank 3 comes to the operation when the others have agreed to go on after it.
			if g.Rank() == 3 {
				skips(t, g, 1)
			}
			var late *pg.TimeoutError
			if err := pg.AllReduce(ctx, g, []int{1}, pg.Sum); !errors.As(err, &late) || late.Reporter != 0 {
				t.Fatalf("a late rank got %v", err)
			}
		}
		for range 3 {
			x := []int{1}
			if err := pg.AllReduce(ctx, g, x, pg.Sum); err != nil || x[0] != 4 {
				t.Fatalf("afterwards: %v, %v", err, x)
			}
		}
		if v := g.View(); len(v.Active) != 4 || v.Epoch != 1 {
			t.Errorf("the view is %v", v)
		}
	}, pgtest.Config(pg.Config{OnFailure: pg.Shrink, OnTimeout: pg.TimeoutEvicts, Timeout: 20 * time.Second}))
}

// skips waits until the other ranks have agreed to go on after this many operations that this one
// has not called.
func skips(t *testing.T, g *pg.Group, n int) {
	t.Helper()
	poll(t, "the others go on", func() bool { return g.Skips() >= n })
}

// poll waits until what a test cannot be told of is true.
func poll(t *testing.T, what string, is func() bool) {
	t.Helper()
	for until := time.Now().Add(30 * time.Second); !is(); time.Sleep(time.Millisecond) {
		if time.Now().After(until) {
			t.Fatalf("it is not true that %s", what)
		}
	}
}

// A rank comes to two operations when the others are past both: the first has timed out, and in the
// second a rank was lost. It gets the reason of each.
func TestSkippedOperationsHaveTheirOwnReasons(t *testing.T) {
	const late, victim = 1, 2
	pgtest.Run(t, 3, func(t *testing.T, g *pg.Group) {
		ctx, x := t.Context(), []int{1}
		sum := func(ctx context.Context) error { x[0] = 1; return pg.AllReduce(ctx, g, x, pg.Sum) }
		if err := g.Barrier(ctx); err != nil {
			t.Fatal(err)
		}
		through(t, g, 0)
		first := ctx
		switch g.Rank() {
		case 0:
			short, end := context.WithTimeout(ctx, 300*time.Millisecond)
			defer end()
			first = short
		case late:
			skips(t, g, 1)
			if err := pg.Send(ctx, g, []byte{1}, victim, 5); err != nil {
				t.Fatal(err)
			}
			skips(t, g, 2)
		case victim:
			skips(t, g, 1)
		}
		var timeout *pg.TimeoutError
		if err := sum(first); !errors.As(err, &timeout) || timeout.Reporter != 0 {
			t.Fatalf("the operation that timed out: %v", err)
		}
		if g.Rank() == victim {
			if _, err := pg.Recv(ctx, g, make([]byte, 1), late, 5); err != nil {
				t.Fatal(err)
			}
			pgtest.InjectFaults(t).Await(0, 5) // the barrier, two messages and both operations
			pgtest.Kill(t)
		}
		if err := sum(ctx); lostRank(err) != victim {
			t.Fatalf("the operation in which rank %d was lost: %v", victim, err)
		}
		if err := sum(ctx); err != nil || x[0] != 2 {
			t.Fatalf("afterwards: %v, %v", err, x)
		}
	}, pgtest.Config(pg.Config{OnFailure: pg.Shrink, OnTimeout: pg.TimeoutEvicts, Timeout: 20 * time.Second}),
		pgtest.Expect(victim, syscall.SIGKILL), pgtest.Faults(nil))
}

// lateRecover runs a program of four reductions at four ranks. Rank 3 dies, and all others get an
// error of the first reduction. Rank 2 calls Recover after that when the others are past the second
// one, which they give up before it begins. The i-th reduction of the program must have the sum of
// i at all ranks, or end with an error: the first two may. each: the program calls Recover after
// each error, and not only after the first one.
func lateRecover(t *testing.T, c pg.Config, each bool) {
	const slow, victim, ops = 2, 3, 4
	c.Uniform, c.OnTimeout, c.Timeout = true, pg.TimeoutEvicts, 20*time.Second
	pgtest.Run(t, 4, func(t *testing.T, g *pg.Group) {
		ctx := t.Context()
		if err := g.Barrier(ctx); err != nil {
			t.Fatal(err)
		}
		if through(t, g, victim); g.Rank() == victim {
			pgtest.Kill(t)
		}
		over, cancel := context.WithDeadline(ctx, time.Now())
		defer cancel()
		for i := 1; i <= ops; i++ {
			x, err := []int64{int64(i)}, error(nil)
			switch {
			case i == 1: // a rank that only sends has the result, so that it is not run again
				err = pg.Reduce(ctx, g, x, 0, pg.Sum)
			case i == 2 && g.Rank() != slow:
				err = pg.AllReduce(over, g, x, pg.Sum)
			default:
				err = pg.AllReduce(ctx, g, x, pg.Sum)
			}
			switch {
			case g.Rank() != slow:
			case each && i < 3:
				poll(t, "the others are in Recover", g.Called)
			case i == 1:
				skips(t, g, 1)
			}
			switch {
			case err == nil && (i < 3 || x[0] != int64(3*i)):
				t.Errorf("the sum of %d at three ranks is %d", i, x[0])
			case err != nil && i >= 3:
				t.Errorf("reduction %d: %v", i, err)
			}
			if err != nil && (each || i == 1) {
				if err := g.Recover(ctx); err != nil {
					t.Fatalf("recover after reduction %d: %v", i, err)
				}
			}
		}
	}, pgtest.Transport("shm"), pgtest.Config(c), pgtest.Expect(victim, syscall.SIGKILL))
}

// A rank calls Recover when the others, which have called it before, have given up the operation
// after it and are in the next one. What its program calls after Recover is that operation, and
// not the one that the others are in.
func TestLateRecoverSkipsNoOperationThatFollowedIt(t *testing.T) {
	for _, how := range []pg.OnFailure{pg.Shrink, pg.Retry} {
		t.Run(how.String(), func(t *testing.T) { lateRecover(t, pg.Config{OnFailure: how}, false) })
	}
}

// The others are in their second call of Recover when a rank calls it for the first time. They wait
// there for its second call.
func TestLateRecoverMeetsSecondOneOfOthers(t *testing.T) {
	for _, how := range []pg.OnFailure{pg.Shrink, pg.Retry} {
		t.Run(how.String(), func(t *testing.T) { lateRecover(t, pg.Config{OnFailure: how}, true) })
	}
}

// eachPolicy runs f with all that a job may do about failures and timeouts, all at once.
func eachPolicy(t *testing.T, f func(t *testing.T, c pg.Config)) {
	for _, how := range []pg.OnFailure{pg.Report, pg.Shrink, pg.Retry} {
		for _, late := range []pg.OnTimeout{pg.TimeoutReports, pg.TimeoutEvicts} {
			t.Run(fmt.Sprintf("%v,OnTimeout=%d", how, late), func(t *testing.T) {
				t.Parallel()
				f(t, pg.Config{OnFailure: how, OnTimeout: late})
			})
		}
	}
}

// Programs that call Recover after each error, after some time that they take for it, get on with
// the same operations at all ranks, whatever the configuration: the i-th reduction has the sum of i
// at all ranks, or ends with an error at all. Some ranks give some reductions up before they begin.
func TestProgramsThatRecoverAfterEachError(t *testing.T) {
	eachPolicy(t, func(t *testing.T, c pg.Config) {
		c.Uniform, c.Timeout = true, 20*time.Second
		pgtest.Run(t, 4, func(t *testing.T, g *pg.Group) {
			ctx := t.Context()
			over, cancel := context.WithDeadline(ctx, time.Now())
			defer cancel()
			by := rand.New(rand.NewPCG(1, uint64(g.Rank())))
			var outcomes []byte
			for i := int64(1); i <= 60; i++ {
				mine, x := ctx, []int64{i}
				if by.IntN(6) == 0 && i <= 50 {
					mine = over
				}
				err := pg.AllReduce(mine, g, x, pg.Sum)
				if err == nil && x[0] != 4*i {
					t.Fatalf("the sum of %d at four ranks is %d", i, x[0])
				}
				outcomes = append(outcomes, map[bool]byte{true: 1}[err == nil])
				if err == nil {
					continue
				}
				time.Sleep(time.Duration(by.IntN(8)) * time.Millisecond)
				if err := g.Recover(ctx); err != nil {
					t.Fatalf("recover after reduction %d: %v", i, err)
				}
			}
			if bytes.LastIndexByte(outcomes, 0) >= 52 {
				t.Errorf("reductions fail after all have recovered from the last that was given up: %v", outcomes)
			}
			theirs := make([]byte, 4*len(outcomes))
			if err := pg.AllGather(ctx, g, theirs, outcomes); err != nil {
				t.Fatal(err)
			}
			for r := range 4 {
				if got := theirs[r*len(outcomes) : (r+1)*len(outcomes)]; !bytes.Equal(got, outcomes) {
					t.Errorf("outcomes differ: here %v, at rank %d %v", outcomes, r, got)
				}
			}
		}, pgtest.Transport("shm"), pgtest.Config(c))
	})
}

// Programs that agree on the outcome of each operation, and call Recover if it has failed anywhere,
// get on, whatever the configuration, although some ranks give operations up at any moment.
func TestProgramsThatAgreeAndRecover(t *testing.T) {
	eachPolicy(t, func(t *testing.T, c pg.Config) {
		for _, c.Uniform = range []bool{false, true} {
			t.Run(fmt.Sprintf("uniform=%v", c.Uniform), func(t *testing.T) { agreeAndRecover(t, c) })
		}
	})
}

func agreeAndRecover(t *testing.T, c pg.Config) {
	c.Timeout = 20 * time.Second
	pgtest.Run(t, 4, func(t *testing.T, g *pg.Group) {
		ctx := t.Context()
		by := rand.New(rand.NewPCG(1, uint64(g.Rank())))
		for i := int64(1); i <= 40; i++ {
			mine, end := ctx, context.CancelFunc(func() {})
			switch by.IntN(10) {
			case 0: // before it begins
				mine, end = context.WithDeadline(ctx, time.Now())
			case 1: // a timeout could remove a rank, if several have waited for it for long enough
				mine, end = context.WithCancel(ctx)
				time.AfterFunc(time.Duration(by.IntN(3000))*time.Microsecond, end)
			}
			x := []int64{i}
			err := pg.AllReduce(mine, g, x, pg.Sum)
			end()
			if err == nil && x[0] != 4*i {
				t.Fatalf("the sum of %d at four ranks is %d", i, x[0])
			}
			everywhere, err := g.Agree(ctx, err == nil)
			if err != nil {
				t.Fatalf("agree after reduction %d: %v", i, err)
			}
			if everywhere {
				continue
			}
			time.Sleep(time.Duration(by.IntN(8)) * time.Millisecond)
			if err := g.Recover(ctx); err != nil {
				t.Fatalf("recover after reduction %d: %v", i, err)
			}
		}
	}, pgtest.Transport("shm"), pgtest.Config(c))
}

// A cancelled operation removes no rank, as opposed to one that timed out: it fails at every rank,
// including those that come to it after they have learnt of that.
func TestCancellationEvictsNoRank(t *testing.T) {
	pgtest.Run(t, 3, func(t *testing.T, g *pg.Group) {
		ctx := t.Context()
		for round := range 3 {
			if err := g.Barrier(ctx); err != nil {
				t.Fatalf("round %d: %v", round, err)
			}
			mine := ctx
			switch g.Rank() {
			case 1: // when the others have ended the barrier
				for _, from := range []int{0, 2} {
					if _, err := pg.Recv(ctx, g, make([]byte, 1), from, 4); err != nil {
						t.Fatal(err)
					}
				}
				var end context.CancelFunc
				mine, end = context.WithCancel(ctx)
				end()
			default:
				if err := pg.Send(ctx, g, []byte{1}, 1, 4); err != nil {
					t.Fatal(err)
				}
			}
			if g.Rank() == 2 {
				if _, err := pg.Recv(ctx, g, make([]byte, 1), 1, 3); err != nil {
					t.Fatal(err)
				}
			}
			if err := g.Barrier(mine); !errors.As(err, new(*pg.TimeoutError)) || !errors.Is(err, context.Canceled) {
				t.Errorf("round %d: the operation that was given up: %v", round, err)
			}
			if g.Rank() == 1 {
				if err := pg.Send(ctx, g, []byte{1}, 2, 3); err != nil {
					t.Fatal(err)
				}
			}
			if err := g.Recover(ctx); err != nil {
				t.Fatalf("round %d: recover: %v", round, err)
			}
		}
		if v := g.View(); v.Epoch != 1 {
			t.Errorf("the view is %v", v)
		}
	}, pgtest.Config(pg.Config{OnFailure: pg.Shrink, OnTimeout: pg.TimeoutEvicts, Timeout: 30 * time.Second}))
}

// Recover of a rank ends where that of the others has ended, also if they have given up the next
// operation since.
func TestRecoverEndsBeforeTheNextFailure(t *testing.T) {
	for _, how := range []pg.OnFailure{pg.Shrink, pg.Retry} {
		t.Run(how.String(), func(t *testing.T) {
			pgtest.Run(t, 2, func(t *testing.T, g *pg.Group) {
				ctx, giveUp := t.Context(), context.CancelFunc(nil)
				agree := func(ok bool) {
					t.Helper()
					if all, err := g.Agree(ctx, ok); err != nil || all {
						t.Fatalf("agreed %v, %v", all, err)
					}
				}
				recover := func(after string) {
					t.Helper()
					if err := g.Recover(ctx); err != nil {
						t.Fatalf("recover after %s: %v", after, err)
					}
				}
				mine := ctx
				if g.Rank() == 0 { // the time is up before it begins
					mine, giveUp = context.WithDeadline(ctx, time.Now())
					defer giveUp()
				}
				agree(g.Barrier(mine) == nil)
				mine = ctx
				if g.Rank() == 0 {
					if _, err := pg.Recv(ctx, g, make([]byte, 1), 1, 1); err != nil {
						t.Fatal(err)
					}
				}
				recover("the first")
				if g.Rank() == 1 {
					mine, giveUp = context.WithCancel(ctx)
					time.AfterFunc(time.Millisecond, giveUp)
				}
				err := g.Barrier(mine)
				if g.Rank() == 1 {
					if err := pg.Send(ctx, g, []byte{1}, 0, 1); err != nil {
						t.Fatal(err)
					}
				}
				agree(err == nil)
				recover("the second")
				if err := g.Barrier(ctx); err != nil {
					t.Error(err)
				}
			}, pgtest.Config(pg.Config{OnFailure: how, OnTimeout: pg.TimeoutEvicts, Uniform: true,
				Timeout: 20 * time.Second}))
		})
	}
}

// A program may have any rank decide.
func TestTimeoutEvictsAlone(t *testing.T) {
	pgtest.Run(t, 2, func(t *testing.T, g *pg.Group) {
		ctx := t.Context()
		if err := g.Barrier(ctx); err != nil {
			t.Fatal(err)
		}
		through(t, g, 0)
		if g.Rank() == 1 {
			var err error
			for err == nil || lostRank(err) >= 0 || errors.As(err, new(*pg.TimeoutError)) {
				if _, err = pg.Recv(ctx, g, make([]byte, 1), 0, 3); err == nil {
					err = g.Barrier(ctx)
				}
			}
			if !errors.Is(err, pg.ErrEvicted) {
				t.Fatal(err)
			}
			return
		}
		short, end := context.WithTimeout(ctx, 3*time.Second)
		defer end()
		if err := g.Barrier(short); !errors.As(err, new(*pg.TimeoutError)) {
			t.Fatal(err)
		}
		if err := g.Barrier(ctx); err != nil && lostRank(err) != 1 {
			t.Fatal(err)
		}
		if err := g.Barrier(ctx); err != nil || len(g.View().Active) != 1 {
			t.Fatal(err, g.View())
		}
	}, pgtest.Config(pg.Config{OnFailure: pg.Shrink, OnTimeout: pg.TimeoutEvictsAlone, Timeout: 30 * time.Second}))
}

// With Uniform every survivor has the same outcome of every operation, whenever a rank dies.
func TestUniformSurvivorsHaveSameOutcomes(t *testing.T) {
	pgtest.Run(t, 4, func(t *testing.T, g *pg.Group) {
		ctx := t.Context()
		var outcomes []byte
		for round := range 60 {
			if g.Rank() > 1 && round == 20*(g.Rank()-1) {
				pgtest.Kill(t)
			}
			x := make([]float64, 20_000)
			err := pg.AllReduce(ctx, g, x, pg.Sum)
			if err != nil && lostRank(err) < 2 {
				t.Fatalf("round %d: %v", round, err)
			}
			outcomes = append(outcomes, map[bool]byte{true: 1}[err == nil])
		}
		theirs := make([]byte, len(outcomes)*g.Size())
		if err := pg.AllGather(ctx, g, theirs, outcomes); err != nil {
			t.Fatal(err)
		}
		for r := range 2 {
			if got := theirs[r*len(outcomes) : (r+1)*len(outcomes)]; string(got) != string(outcomes) {
				t.Errorf("outcomes differ:\n%v\n%v", got, outcomes)
			}
		}
	}, pgtest.Transport("shm"), pgtest.Config(pg.Config{OnFailure: pg.Shrink, Uniform: true}),
		pgtest.Expect(2, syscall.SIGKILL), pgtest.Expect(3, syscall.SIGKILL))
}

// An operation that a rank has to give up before it begins, because its deadline has passed, fails
// at all ranks with Uniform, also at those that need nothing of that rank.
func TestUniformOutcomeOfAnOperationThatDoesNotBegin(t *testing.T) {
	eachPolicy(t, func(t *testing.T, c pg.Config) {
		c.Uniform = true
		pgtest.Run(t, 4, func(t *testing.T, g *pg.Group) {
			ctx := t.Context()
			late, cancel := context.WithDeadline(ctx, time.Now())
			defer cancel()
			var outcomes []byte
			for round := range 12 {
				who := round%3 + 1
				mine, x := ctx, []int64{1}
				if g.Rank() == who {
					mine = late
				}
				for range 1 + round/3%2 { // one operation, or two in succession
					var err error
					if round < 6 {
						err = pg.Broadcast(mine, g, x, 0) // no other rank needs anything of rank who
					} else {
						err = pg.Reduce(mine, g, x, 0, pg.Sum) // only rank 0 does
					}
					if err == nil {
						t.Errorf("round %d: rank %d has succeeded, and rank %d has not begun", round, g.Rank(), who)
					}
				}
				if round%2 == 0 { // without Recover, which the group may not need
					err := g.Barrier(ctx)
					outcomes = append(outcomes, map[bool]byte{true: 1}[err == nil])
				}
				if err := g.Recover(ctx); err != nil {
					t.Fatalf("round %d: %v", round, err)
				}
				if x = []int64{1}; round%3 > 0 {
					continue
				}
				if err := pg.AllReduce(ctx, g, x, pg.Sum); err != nil || x[0] != 4 {
					t.Errorf("round %d: then %v, %v", round, x, err)
				}
			}
			theirs := make([]byte, len(outcomes)*g.Size())
			if err := pg.AllGather(ctx, g, theirs, outcomes); err != nil {
				t.Fatal(err)
			}
			for r := range g.Size() {
				if got := theirs[r*len(outcomes) : (r+1)*len(outcomes)]; !bytes.Equal(got, outcomes) {
					t.Errorf("next operations without Recover: %v at rank %d, %v here", got, r, outcomes)
				}
			}
		}, pgtest.Transport("shm"), pgtest.Config(c))
	})
}

// A rank that closes its group without a failure is lost to the others like one that died, after
// all that it owed them.
func TestGracefulExit(t *testing.T) {
	for _, tr := range transports {
		t.Run(tr, func(t *testing.T) {
			pgtest.Run(t, 3, func(t *testing.T, g *pg.Group) {
				// also where others are gone before this one has read everything
				if err := holes(t, g, 30_000); err != nil {
					t.Fatal(err)
				}
				if g.Rank() == 0 {
					return
				}
				// The failure of one's barrier would end the operation at the other.
				if err := pg.Send(t.Context(), g, []byte{1}, 3-g.Rank(), 0); err != nil {
					t.Fatal(err)
				}
				if _, err := pg.Recv(t.Context(), g, make([]byte, 1), 3-g.Rank(), 0); err != nil {
					t.Fatal(err)
				}
				err := g.Barrier(t.Context())
				if lostRank(err) != 0 {
					t.Fatalf("got %v", err)
				}
				if err := g.Recover(t.Context()); err != nil {
					t.Fatal(err)
				}
				if err := holes(t, g, 100); err != nil {
					t.Fatal(err)
				}
			}, pgtest.Transport(tr))
		})
	}
}

// A rank that comes in by AutoAdmit because of a loss, while the others stand between an operation
// and the agreement on it, counts one agreement less than they do: they wait for its vote while it
// waits for them in the next operation. With Admit its first agreement is the others' next.
func TestAgreementsOfARankThatComesIn(t *testing.T) {
	for _, auto := range []bool{true, false} {
		t.Run(fmt.Sprintf("AutoAdmit=%v", auto), func(t *testing.T) {
			pgtest.Run(t, 3, func(t *testing.T, g *pg.Group) {
				ctx := t.Context()
				operate := func() error { return pg.Broadcast(ctx, g, []int{0}, 1) }
				if pgtest.Second() {
					if err := operate(); err != nil {
						t.Fatal(err)
					}
					ok, err := g.Agree(ctx, true)
					if err != nil || ok == auto { // auto: the agreement on the operation before its own
						t.Errorf("the first agreement: %v, %v", ok, err)
					}
					if err := operate(); err != nil {
						t.Fatal(err)
					}
					return
				}
				if err := g.Barrier(ctx); err != nil {
					t.Fatal(err)
				}
				through(t, g, 0) // rank 2 is not lost in the barrier
				switch g.Rank() {
				case 1: // rank 0 is in the operation meanwhile
					changes := uint64(1) // the loss and, with AutoAdmit, the replacement
					if auto {
						changes = 2
					}
					poll(t, "the job's view has changed", func() bool { return g.JobEpoch() > changes })
				case 2:
					pgtest.InjectFaults(t).Await(0, 4) // the barrier, two messages and the operation
					pgtest.Kill(t)
				}
				if err := operate(); lostRank(err) < 0 {
					t.Fatalf("the operation in which a rank is lost: %v, want a *RankError", err)
				}
				agree := func(yes bool) {
					t.Helper()
					if !auto {
						if ok, err := g.Agree(ctx, yes); err != nil || ok != yes {
							t.Fatalf("agreeing on %v: %v, %v", yes, ok, err)
						}
						return
					}
					short, cancel := context.WithTimeout(ctx, time.Second)
					defer cancel()
					var late *pg.TimeoutError
					if ok, err := g.Agree(short, yes); !errors.As(err, &late) ||
						!slices.ContainsFunc(late.Missing, func(s pg.Seen) bool { return s.Rank == 2 }) {
						t.Fatalf("agreeing on %v: %v, %v, want a *TimeoutError that names rank 2", yes, ok, err)
					}
				}
				agree(false)
				for !auto && len(g.View().Active) < 3 {
					if _, err := g.Admit(ctx); err != nil {
						t.Fatal(err)
					}
				}
				if err := operate(); err != nil {
					t.Fatal(err)
				}
				agree(true)
				if err := operate(); err != nil {
					t.Fatal(err)
				}
			}, pgtest.Transport("shm"), pgtest.Expect(2, syscall.SIGKILL), pgtest.Replace(2), pgtest.Faults(nil),
				pgtest.Config(pg.Config{AutoAdmit: auto, Uniform: true, OnFailure: pg.Shrink,
					Timeout: 30 * time.Second}))
		})
	}
}
