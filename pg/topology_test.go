package pg

import (
	"context"
	"fmt"
	"testing"
	"time"

	"tutti/p2p"
	"tutti/pg/internal/join"
)

// relocate takes the group of a rank to where places says that its ranks are, as a change of the
// view does.
func (g *Group) relocate(places []join.Place, epoch uint64) error {
	if err := g.enter(context.Background(), "relocate", nil); err != nil {
		return err
	}
	defer g.leave()
	c, err := g.coll.Next(p2p.Epoch{View: epoch}, g.v.ranks)
	if err != nil {
		return err
	}
	g.coll = c
	g.run.Open(c, g.v.ranks)
	g.locate(places)
	return nil
}

// TestPlansFollowHosts has a rank replaced by one on another host: the ranks that stayed, which
// have plans of before, and the new one, which has none, plan alike.
func TestPlansFollowHosts(t *testing.T) {
	const n = 4
	each(t, n, Config{Timeout: 20 * time.Second}, func(ctx context.Context, g *Group) error {
		spread := func(machines ...uint64) []join.Place {
			places := make([]join.Place, n)
			for r := range places {
				places[r] = g.job.places[r]
				places[r].Machine = machines[r]
			}
			return places
		}
		for i, places := range [][]join.Place{spread(1, 2, 1, 2), spread(1, 1, 1, 1), spread(1, 1, 2, 2),
			spread(1, 1, 1, 1),
			spread(1, 2, 1, 2), spread(1, 1, 2, 2)} {
			if err := g.relocate(places, uint64(2+i)); err != nil {
				return err
			}
			if g.Rank() == i%n { // its successor in the slot has never planned anything
				g.plan()
			}
			for _, count := range []int{3, 3000, 100_000} {
				if err := everything(ctx, g, count); err != nil {
					return fmt.Errorf("placement %d: %w", i, err)
				}
			}
		}
		return nil
	})
}
