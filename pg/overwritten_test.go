package pg

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"sync"
	"testing"
)

// A rank whose sum in place has begun to write knows that its input is lost when a peer closes the
// group, also where the group cannot go on without that peer.
func TestOverwrittenWithoutRoster(t *testing.T) {
	var closed sync.WaitGroup
	closed.Add(1)
	each(t, 3, Config{Algorithm: "ring"}, func(ctx context.Context, g *Group) error {
		if g.Rank() == 0 { // in the ring, rank 1 gets nothing to add without it
			closed.Wait()
			return g.Close()
		}
		x := make([]int64, 3<<10)
		w := g.Start(AllReduceOp{Dst: BufferOf(x), Src: BufferOf(x), Op: Sum})
		written := func() bool {
			g.job.proxy.Lock()
			defer g.job.proxy.Unlock()
			return g.run.Dirty()
		}
		if g.Rank() == 2 {
			for !written() {
				g.job.proxy.Idle()
				runtime.Gosched()
			}
			closed.Done()
		}
		var lost *RankError
		if err := w.Wait(ctx); !errors.As(err, &lost) || lost.Rank != 0 {
			return fmt.Errorf("got %v, want an error that names rank 0", err)
		}
		if lost.Overwritten != written() {
			return fmt.Errorf("it has written to its input: %v; the error says %v", written(), lost)
		}
		return nil
	})
}
