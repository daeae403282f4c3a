package pg_test

import (
	"context"
	"path/filepath"
	"slices"
	"sync"
	"testing"

	"tutti/pg"
	"tutti/pg/flight"
)

// onAll runs f at all ranks of a group at the same time, and returns what they got.
func onAll[T any](t *testing.T, groups []*pg.Group, f func(ctx context.Context, g *pg.Group) (T, error)) []T {
	t.Helper()
	out := make([]T, len(groups))
	var wg sync.WaitGroup
	for i, g := range groups {
		wg.Go(func() {
			var err error
			if out[i], err = f(t.Context(), g); err != nil {
				t.Errorf("rank %d: %v", i, err)
			}
		})
	}
	wg.Wait()
	if t.Failed() {
		t.FailNow()
	}
	return out
}

// The file of a killed rank tells the operations of its groups apart: those of a subgroup of a
// subgroup, and of a later subgroup of all ranks, whose names have the same number.
func TestFlightRecordTellsSubgroupsApart(t *testing.T) {
	const size = 4
	dir := t.TempDir()
	world := formed(t, "subgroups", members(t, size, pg.Config{LogDir: dir})...)
	halves := onAll(t, world, func(ctx context.Context, g *pg.Group) (*pg.Group, error) {
		return g.Split(ctx, g.Rank()/2, g.Rank())
	})
	upper := onAll(t, halves[2:], func(ctx context.Context, g *pg.Group) (*pg.Group, error) {
		return g.Split(ctx, 0, g.Rank())
	})
	whole := onAll(t, world, func(ctx context.Context, g *pg.Group) (*pg.Group, error) {
		return g.Split(ctx, 0, g.Rank())
	})
	barriers := func(n int) func(ctx context.Context, g *pg.Group) (struct{}, error) {
		return func(ctx context.Context, g *pg.Group) (_ struct{}, err error) {
			for range n {
				if err == nil {
					err = g.Barrier(ctx)
				}
			}
			return struct{}{}, err
		}
	}
	onAll(t, upper, barriers(3))
	onAll(t, whole, barriers(5))
	files, err := filepath.Glob(filepath.Join(dir, "flight-rank2-*.bin"))
	if err != nil || len(files) != 1 {
		t.Fatalf("%q, %v", files, err)
	}
	s, err := flight.ReadFile(files[0])
	if err != nil {
		t.Fatal(err)
	}
	last := map[uint32]string{}
	for _, g := range s.Groups {
		if g.Last != nil {
			last[g.ID] = g.Last.Call
		}
	}
	if len(s.Groups) != 4 || len(last) != 4 || s.Groups[2].Last.Call != "barrier #3" ||
		s.Groups[3].Last.Call != "barrier #5" {
		t.Errorf("%d groups, and the last operations by group are %v", len(s.Groups), last)
	}
	for _, g := range slices.Concat(whole, upper, halves, world) {
		g.Close()
	}
}
