package pg

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"
)

// calls are all blocking calls that take the group's turn, over memory of their own: each is given
// the group's size.
func turnTakers(n int) map[string]func(ctx context.Context, g *Group) error {
	x := func(k int) []int64 { return make([]int64, k) }
	ones := slices.Repeat([]int{1}, n)
	return map[string]func(ctx context.Context, g *Group) error{
		"allreduce":     func(ctx context.Context, g *Group) error { return AllReduce(ctx, g, x(8), Sum) },
		"reducescatter": func(ctx context.Context, g *Group) error { return ReduceScatter(ctx, g, x(1), x(n), Sum) },
		"allgather":     func(ctx context.Context, g *Group) error { return AllGather(ctx, g, x(n), x(1)) },
		"allgatherv":    func(ctx context.Context, g *Group) error { return AllGatherV(ctx, g, x(n), x(1), ones) },
		"alltoall":      func(ctx context.Context, g *Group) error { return AllToAll(ctx, g, x(n), x(n)) },
		"alltoallv":     func(ctx context.Context, g *Group) error { return AllToAllV(ctx, g, x(n), x(n), ones, ones) },
		"broadcast":     func(ctx context.Context, g *Group) error { return Broadcast(ctx, g, x(8), 0) },
		"reduce":        func(ctx context.Context, g *Group) error { return Reduce(ctx, g, x(8), 0, Sum) },
		"gather":        func(ctx context.Context, g *Group) error { return Gather(ctx, g, x(n), x(1), 0) },
		"scatter":       func(ctx context.Context, g *Group) error { return Scatter(ctx, g, x(1), x(n), 0) },
		"barrier":       func(ctx context.Context, g *Group) error { return g.Barrier(ctx) },
		"split": func(ctx context.Context, g *Group) error {
			sub, err := g.Split(ctx, 0, 0)
			if sub != nil {
				sub.Close()
			}
			return err
		},
		"agree": func(ctx context.Context, g *Group) error { _, err := g.Agree(ctx, true); return err },
	}
}

// A call whose ctx ends while an operation that was started before it is still under way never
// begins: it returns a *TimeoutError at once, its memory is left alone, and the operation fails at
// the other ranks as one that timed out, when it is its turn.
func TestQueuedCallEndsAtItsDeadline(t *testing.T) {
	const n = 3
	calls := turnTakers(n)
	delete(calls, "agree") // fails nothing: see TestCancelledAgreeVotesNo
	for name, call := range calls {
		t.Run(name, func(t *testing.T) {
			gaveUp := make(chan struct{})
			// The others have their result from rank 0 alone, before they hear of its failure.
			each(t, n, Config{Algorithm: "doubling"}, func(ctx context.Context, g *Group) error {
				first := []int64{int64(g.Rank())}
				if g.Rank() == 0 {
					w := g.Start(AllReduceOp{Dst: BufferOf(first), Op: Sum})
					for waits := false; !waits; runtime.Gosched() {
						g.job.proxy.Lock()
						waits = g.busy && g.run.Running()
						g.job.proxy.Unlock()
					}
					short, cancel := context.WithCancel(ctx)
					time.AfterFunc(20*time.Millisecond, cancel)
					err := call(short, g)
					var late *TimeoutError
					if !errors.As(err, &late) || !errors.Is(err, context.Canceled) || late.Reporter != 0 {
						return fmt.Errorf("got %v, want a *TimeoutError of rank 0 that wraps context.Canceled", err)
					}
					if !strings.Contains(late.Call, "behind allreduce #1") {
						return fmt.Errorf("%v: does not say what it waited for", late)
					}
					close(gaveUp)
					if err := w.Wait(ctx); err != nil || first[0] != 0+1+2 {
						return fmt.Errorf("the operation before it: %v, %v", first, err)
					}
				} else {
					<-gaveUp
					if err := AllReduce(ctx, g, first, Sum); err != nil || first[0] != 0+1+2 {
						return fmt.Errorf("the operation before it: %v, %v", first, err)
					}
					err := call(ctx, g)
					if err == nil { // it needs nothing of rank 0
						err = g.Barrier(ctx)
					}
					var late *TimeoutError
					if !errors.As(err, &late) || !errors.Is(err, context.Canceled) || late.Reporter != 0 {
						return fmt.Errorf("got %v, want the *TimeoutError of rank 0", err)
					}
				}
				var late *TimeoutError
				if err := g.Barrier(ctx); !errors.As(err, &late) {
					return fmt.Errorf("afterwards: %v, want a *TimeoutError", err)
				}
				return nil
			})
		})
	}
}

// Config.Timeout bounds the wait for the turn as well.
func TestTimeoutCountsFromTheCall(t *testing.T) {
	gs, err := Local(2, Config{Timeout: 4 * time.Second})
	if err != nil {
		t.Fatal(err)
	}
	defer gs[1].Close()
	defer gs[0].Close()
	ctx, cancel := context.WithCancel(context.Background())
	defer time.AfterFunc(time.Minute, cancel).Stop()
	if err := gs[0].enter(ctx, "test", nil); err != nil { // something that does not end
		t.Fatal(err)
	}
	gs[0].job.proxy.Unlock()
	x := []int64{1}
	err = AllReduce(ctx, gs[0], x, Sum)
	var late *TimeoutError
	if !errors.As(err, &late) || !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("got %v, want a *TimeoutError", err)
	}
	gs[0].job.proxy.Lock()
	gs[0].leave()
	gs[1].SetTimeout(20 * time.Second) // its time is not what this is about
	if err := AllReduce(ctx, gs[1], x, Sum); !errors.As(err, &late) || late.Reporter != 0 {
		t.Errorf("the other rank got %v, want the *TimeoutError of rank 0", err)
	}
}

// A call that comes to its turn in time is cancelled as any other, by its own ctx: when it returns,
// nothing touches its memory.
func TestQueuedCallIsCancelledWhileItRuns(t *testing.T) {
	const n = 2
	var queued, started sync.WaitGroup
	queued.Add(1)
	started.Add(1)
	each(t, n, Config{}, func(ctx context.Context, g *Group) error {
		first, x := []int64{1}, make([]int64, 200_000)
		if g.Rank() == 0 {
			w := g.Start(AllReduceOp{Dst: BufferOf(first), Op: Sum})
			short, cancel := context.WithCancel(ctx)
			queued.Done()
			go func() { started.Wait(); cancel() }()
			err := AllReduce(short, g, x, Sum) // rank 1 does not come
			clear(x)
			var late *TimeoutError
			if !errors.As(err, &late) || !errors.Is(err, context.Canceled) {
				return fmt.Errorf("got %v, want a *TimeoutError", err)
			}
			if err := w.Wait(ctx); err != nil {
				return err
			}
			if slices.Max(x) != 0 {
				return errors.New("the memory was written after the call had returned")
			}
			return nil
		}
		queued.Wait()
		if err := AllReduce(ctx, g, first, Sum); err != nil {
			return err
		}
		started.Done()
		for { // until the other rank has given up
			if err := g.probe(ctx); err != nil {
				break
			}
		}
		for i := range x {
			x[i] = 7
		}
		var late *TimeoutError
		if err := AllReduce(ctx, g, x, Sum); !errors.As(err, &late) {
			return fmt.Errorf("got %v, want the *TimeoutError of rank 0", err)
		}
		return nil
	})
}

// Calls of several goroutines, some of which give up, and what was started: one at a time, all end,
// and Close does too.
func TestLineUnderLoad(t *testing.T) {
	gs, err := Local(1, Config{})
	if err != nil {
		t.Fatal(err)
	}
	g := gs[0]
	var wg sync.WaitGroup
	for i := range 8 {
		wg.Go(func() {
			x := []int64{1}
			for k := range 300 {
				ctx, cancel := context.WithCancel(context.Background())
				switch (i + k) % 4 {
				case 0:
					g.Start(AllReduceOp{Dst: BufferOf(x), Op: Sum}).Wait(context.Background())
				case 1:
					go cancel()
					AllReduce(ctx, g, x, Sum)
				case 2:
					AllReduce(ctx, g, x, Sum)
				case 3:
					g.SetAlgorithm("auto")
				}
				cancel()
			}
		})
	}
	wg.Wait()
	if err := g.Close(); err != nil {
		t.Error(err)
	}
	if n := g.line.calls; n != 0 {
		t.Errorf("%d calls are left in the line", n)
	}
}

// A rank that gives up an agreement, before its turn or in it, has voted no, and the group works.
func TestCancelledAgreeVotesNo(t *testing.T) {
	each(t, 3, Config{}, func(ctx context.Context, g *Group) error {
		if g.Rank() == 0 {
			x := []int64{1}
			w := g.Start(AllReduceOp{Dst: BufferOf(x), Op: Sum})
			short, cancel := context.WithCancel(ctx)
			time.AfterFunc(20*time.Millisecond, cancel)
			var late *TimeoutError
			if _, err := g.Agree(short, true); !errors.As(err, &late) || !errors.Is(err, context.Canceled) {
				return fmt.Errorf("got %v, want a *TimeoutError that wraps context.Canceled", err)
			}
			if err := Send(ctx, g, x, 1, 1); err != nil {
				return err
			}
			if err := w.Wait(ctx); err != nil || x[0] != 3 {
				return fmt.Errorf("the operation before it: %v, %v", x, err)
			}
		} else {
			x := []int64{1}
			if g.Rank() == 1 {
				if _, err := Recv(ctx, g, x, 0, 1); err != nil {
					return err
				}
			}
			if err := AllReduce(ctx, g, x, Sum); err != nil || x[0] != 3 {
				return fmt.Errorf("the operation before it: %v, %v", x, err)
			}
			if ok, err := g.Agree(ctx, true); ok || err != nil {
				return fmt.Errorf("got %v, %v, want false", ok, err)
			}
		}
		if ok, err := g.Agree(ctx, true); !ok || err != nil {
			return fmt.Errorf("the next one: got %v, %v, want true", ok, err)
		}
		return g.Barrier(ctx)
	})
}

// The other ranks learn that a call was given up before its turn even where the group is closed as
// soon as the operation before it has ended.
func TestCallThatGaveUpIsToldBeforeClose(t *testing.T) {
	ends := map[string]func(ctx context.Context, w *Work) error{
		"wait": func(ctx context.Context, w *Work) error { return w.Wait(ctx) },
		"done": func(_ context.Context, w *Work) error { <-w.Done(); return w.Err() },
	}
	for name, end := range ends {
		t.Run(name, func(t *testing.T) {
			for range 100 {
				gaveUp := make(chan struct{})
				each(t, 2, Config{}, func(ctx context.Context, g *Group) error {
					sub, err := g.Split(ctx, 0, g.Rank())
					if err != nil {
						return err
					}
					defer sub.Close()
					x := []float32{1}
					if g.Rank() == 0 {
						w := sub.Start(ReduceOp{X: BufferOf(x), Root: 0, Op: Sum})
						over, cancel := context.WithCancel(ctx)
						cancel()
						var late *TimeoutError
						if err := Reduce(over, sub, x, 1, Sum); !errors.As(err, &late) {
							return fmt.Errorf("the call that gives up: %v, want a *TimeoutError", err)
						}
						close(gaveUp)
						return end(ctx, w)
					}
					<-gaveUp
					if err := Reduce(ctx, sub, x, 0, Sum); err != nil {
						return err
					}
					var late *TimeoutError
					err = Reduce(ctx, sub, x, 1, Sum)
					if !errors.As(err, &late) || !errors.Is(err, context.Canceled) || late.Reporter != 0 {
						return fmt.Errorf("got %v, want the *TimeoutError of rank 0", err)
					}
					return nil
				})
				if t.Failed() {
					return
				}
			}
		})
	}
}
