package pg_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"tutti/pg"
	"tutti/pg/pgtest"
)

// finish is the end of many programs: a few collectives in which no rank needs all others to have
// ended theirs, and then the group is closed.
func finish(ctx context.Context, g *pg.Group) error {
	n := g.Size()
	for round := range 2 {
		x, all := []int64{int64(10*round + g.Rank())}, make([]int64, n)
		if err := pg.AllGather(ctx, g, all, x); err != nil {
			return fmt.Errorf("allgather %d: %w", round, err)
		}
		for r, v := range all {
			if v != int64(10*round+r) {
				return fmt.Errorf("allgather %d: %v", round, all)
			}
		}
		if err := pg.AllReduce(ctx, g, x, pg.Max); err != nil {
			return fmt.Errorf("allreduce %d: %w", round, err)
		}
		if x[0] != int64(10*round+n-1) {
			return fmt.Errorf("allreduce %d: %v", round, x)
		}
	}
	// The root of a broadcast is through first, the root of a reduction last.
	x := []int64{1}
	if err := pg.Reduce(ctx, g, x, 0, pg.Sum); err != nil {
		return fmt.Errorf("reduce: %w", err)
	}
	big := make([]int64, 40_000)
	if g.Rank() == 0 {
		if x[0] != int64(n) {
			return fmt.Errorf("reduce: %v", x)
		}
		big[len(big)-1] = 7
	}
	if err := pg.Broadcast(ctx, g, big, 0); err != nil {
		return fmt.Errorf("broadcast: %w", err)
	}
	if big[len(big)-1] != 7 || slices.Max(big[:len(big)-1]) != 0 {
		return fmt.Errorf("broadcast: wrong data")
	}
	return nil
}

// A rank that closes its group right after its last collective takes nothing from peers that are
// still finishing theirs.
func TestCloseAfterLastCollective(t *testing.T) {
	rounds := 400
	if testing.Short() {
		rounds = 100
	}
	for i := range rounds {
		n := 2 + i%4
		gs, err := pg.Local(n, pg.Config{})
		if err != nil {
			t.Fatal(err)
		}
		var wg sync.WaitGroup
		for _, g := range gs {
			wg.Go(func() {
				defer g.Close()
				if err := finish(t.Context(), g); err != nil {
					t.Errorf("round %d, rank %d of %d: %v", i, g.Rank(), n, err)
				}
			})
		}
		wg.Wait()
		if t.Failed() {
			return
		}
	}
}

// The same between processes, where a rank's end takes its links, its listeners and its record in
// the store along.
func TestCloseAfterLastCollectiveOfProcesses(t *testing.T) {
	for _, tr := range transports {
		t.Run(tr, func(t *testing.T) {
			pgtest.Run(t, 3, func(t *testing.T, outer *pg.Group) {
				rounds := 30
				if testing.Short() {
					rounds = 8
				}
				for i := range rounds {
					// A job of its own, so that closing its one group closes everything. Ranks may
					// be a round apart.
					g, err := pg.Join(t.Context(), pg.Config{Job: fmt.Sprintf("close-%s-%d", tr, i)})
					if err != nil {
						t.Fatalf("round %d: %v", i, err)
					}
					err = finish(t.Context(), g)
					if cerr := g.Close(); err == nil {
						err = cerr
					}
					if err != nil {
						t.Fatalf("round %d: %v", i, err)
					}
				}
				if err := outer.Barrier(t.Context()); err != nil {
					t.Error(err)
				}
			}, pgtest.Transport(tr))
		})
	}
}

// late returns when rank root has left all jobs, or after a time in which it would have.
func late(root int, all ...*pg.Group) {
	const enough = 600 * time.Millisecond
	for until := time.Now().Add(enough); time.Now().Before(until) &&
		slices.ContainsFunc(all, func(g *pg.Group) bool { return slices.Contains(g.JobView(), root) }); {
		time.Sleep(time.Millisecond)
	}
}

// A rank may end an operation before others begin it, and then close its group: they get their
// results all the same.
func TestCloseBeforeOthersBeginTheLastOperation(t *testing.T) {
	const n, root = 3, 2
	broadcast := func(k int) func(t *testing.T, g *pg.Group) error {
		return func(t *testing.T, g *pg.Group) error {
			x := make([]int64, k)
			if g.Rank() == root {
				x[k-1] = 7
			}
			if err := pg.Broadcast(t.Context(), g, x, root); err != nil || x[k-1] != 7 {
				return fmt.Errorf("it ends with %d: %w", x[k-1], err)
			}
			return nil
		}
	}
	operations := []struct {
		name string
		run  func(t *testing.T, g *pg.Group) error
	}{
		{"broadcast", broadcast(1)},
		{"long broadcast", broadcast(50_000)},
		{"scatter", func(t *testing.T, g *pg.Group) error {
			x, all := make([]int64, 1), []int64{1, 2, 3}
			if err := pg.Scatter(t.Context(), g, x, all, root); err != nil || x[0] != int64(g.Rank()+1) {
				return fmt.Errorf("got %v: %w", x, err)
			}
			return nil
		}},
		{"send", func(t *testing.T, g *pg.Group) error {
			x := []int64{7}
			if g.Rank() == root {
				return errors.Join(pg.Send(t.Context(), g, x, 0, 1), pg.Send(t.Context(), g, x, 1, 1))
			}
			_, err := pg.Recv(t.Context(), g, x, root, 1)
			return err
		}},
		{"broadcast in a subgroup", broadcast(1)},
	}
	for _, tr := range transports {
		t.Run(tr, func(t *testing.T) {
			pgtest.Run(t, n, func(t *testing.T, outer *pg.Group) {
				var jobs, groups []*pg.Group
				for i := range 3 * len(operations) {
					mode := pg.OnFailure(i / len(operations))
					g, err := pg.Join(t.Context(), pg.Config{Job: fmt.Sprintf("late-%s-%d", tr, i), OnFailure: mode})
					if err != nil {
						t.Fatal(err)
					}
					jobs, groups = append(jobs, g), append(groups, g)
					if strings.Contains(operations[i%len(operations)].name, "subgroup") {
						if groups[i], err = g.Split(t.Context(), 0, g.Rank()); err != nil {
							t.Fatal(err)
						}
					}
				}
				if outer.Rank() != root {
					late(root, jobs...)
				}
				var wg sync.WaitGroup
				for i, g := range groups {
					wg.Go(func() {
						op, mode := operations[i%len(operations)], pg.OnFailure(i/len(operations))
						if err := op.run(t, g); err != nil {
							t.Errorf("%v, %s: %v", mode, op.name, err)
						}
						if err := errors.Join(g.Close(), jobs[i].Close()); err != nil {
							t.Errorf("%v, %s: close: %v", mode, op.name, err)
						}
					})
				}
				wg.Wait()
				if err := outer.Barrier(t.Context()); err != nil {
					t.Error(err)
				}
			}, pgtest.Transport(tr))
		})
	}
}

// Close waits neither for a rank that was killed nor behind an operation that it ends, and not for
// ever for one that does not come.
func TestCloseEndsItsWait(t *testing.T) {
	const n, root, other = 3, 2, 1
	for _, c := range []struct {
		name    string
		timeout time.Duration // of operations and Close
		overdue bool
	}{
		{name: "killed", timeout: time.Minute},
		{name: "under-way", timeout: time.Minute},
		{name: "never-comes", timeout: 5 * time.Second, overdue: true},
	} {
		t.Run(c.name, func(t *testing.T) {
			opts := []pgtest.Option{}
			if c.name == "killed" {
				opts = append(opts, pgtest.Expect(other, syscall.SIGKILL))
			}
			pgtest.Run(t, n, func(t *testing.T, outer *pg.Group) {
				var text bytes.Buffer
				g, err := pg.Join(t.Context(), pg.Config{Job: "ends-" + c.name,
					Logger: slog.New(slog.NewTextHandler(&text, nil))})
				if err != nil {
					t.Fatal(err)
				}
				g.SetTimeout(c.timeout)
				sent := func() { // returns when the root's broadcast is over, which a death would fail
					if c.name == "killed" {
						if _, err := pg.Recv(t.Context(), outer, make([]byte, 1), root, 0); err != nil {
							t.Error(err)
						}
					}
				}
				switch g.Rank() {
				case root:
					if err := pg.Broadcast(t.Context(), g, []int64{1}, root); err != nil {
						t.Error(err)
					}
					for to := range n {
						if to != root && c.name == "killed" {
							if err := pg.Send(t.Context(), outer, []byte{1}, to, 0); err != nil {
								t.Error(err)
							}
						}
					}
					var w *pg.Work
					if c.name == "under-way" {
						w = g.Start(pg.BroadcastOp{X: pg.BufferOf([]int64{0}), Root: other})
					}
					if err := g.Close(); err != nil {
						t.Errorf("close: %v", err)
					}
					if w != nil && !errors.Is(w.Wait(t.Context()), pg.ErrClosed) {
						t.Errorf("the operation under way ended with %v", w.Err())
					}
					if overdue := strings.Contains(text.String(), "before all ranks"); overdue != c.overdue {
						t.Errorf("Close waited in vain: %v; it says %q", overdue, text.String())
					}
				case other:
					sent()
					if late(root, g); c.name == "killed" {
						pgtest.Kill(t)
					}
				default:
					sent()
					late(other, g)
				}
				if c.name != "killed" { // the others do nothing before
					if err := outer.Barrier(t.Context()); err != nil {
						t.Error(err)
					}
				}
				g.Close()
			}, opts...)
		})
	}
}
