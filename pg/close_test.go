package pg_test

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"testing"

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
