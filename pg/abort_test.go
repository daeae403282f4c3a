package pg

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"sync"
	"testing"
	"time"
)

// Abort ends also what waits for the standing or the vote of the rank that calls it, although the
// channel of operations has failed before.
func TestAbortEndsRecoverAndAgree(t *testing.T) {
	cause := errors.New("enough")
	for name, call := range map[string]func(context.Context, *Group) error{
		"recover": func(ctx context.Context, g *Group) error { return g.Recover(ctx) },
		"agree":   func(ctx context.Context, g *Group) error { _, err := g.Agree(ctx, true); return err },
	} {
		for _, failed := range []bool{true, false} {
			if name == "recover" && !failed {
				continue // it has nothing to do
			}
			gs, err := Local(2, Config{})
			if err != nil {
				t.Fatal(err)
			}
			if failed {
				over, cancel := context.WithCancel(t.Context())
				cancel()
				var wg sync.WaitGroup
				for i, ctx := range []context.Context{over, t.Context()} {
					wg.Go(func() {
						if err := gs[i].Barrier(ctx); err == nil {
							t.Error("a barrier that one rank gives up succeeds")
						}
					})
				}
				wg.Wait()
			}
			done := make(chan error, 1)
			go func() { done <- call(t.Context(), gs[1]) }()
			waits := func() bool {
				p := gs[1].job.proxy
				p.Lock()
				defer p.Unlock()
				return gs[1].sync.Pending() || gs[1].between
			}
			for !waits() && len(done) == 0 {
				runtime.Gosched()
			}
			gs[0].Abort(cause)
			select {
			case err = <-done:
				if !errors.Is(err, ErrAborted) {
					t.Errorf("%s, on a group that has failed: %v: got %v", name, failed, err)
				}
			case <-time.After(time.Minute):
				t.Errorf("%s, on a group that has failed: %v: it does not end", name, failed)
			}
			for _, g := range gs {
				g.Close()
			}
		}
	}
}

// What Abort ends fails with its cause, also if that is the end of a context.
func TestAbortWithTheEndOfAContext(t *testing.T) {
	for _, cause := range []error{context.Canceled, context.DeadlineExceeded, ErrClosed} {
		each(t, 2, Config{}, func(ctx context.Context, g *Group) error {
			if g.Rank() == 1 {
				return nil
			}
			x := []byte{0}
			works := []*Work{g.Start(BarrierOp{}), g.Start(RecvOp{X: BufferOf(x), From: 1})}
			g.Abort(cause)
			works = append(works, g.Start(BarrierOp{}))
			for i, w := range works {
				if err := w.Wait(ctx); !errors.Is(err, ErrAborted) || !errors.Is(err, cause) {
					return fmt.Errorf("operation %d: %v", i, err)
				}
			}
			return nil
		})
	}
}
