package pg

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"
)

// A waiter runs the operation that it waits for. When its context ends the operation continues, at
// any point: before its first step, waiting for a peer, or within a message that exceeds the
// window.
func TestOperationOutlivesCancelledWait(t *testing.T) {
	for _, count := range []int{16, 4 << 10, 2 << 20} {
		t.Run(fmt.Sprint(count), func(t *testing.T) {
			const n = 3
			each(t, n, Config{}, func(ctx context.Context, g *Group) error {
				x := make([]float32, count)
				ops := map[string]func() Operation{
					"allreduce": func() Operation {
						for i := range x {
							x[i] = float32(i%7 + g.Rank())
						}
						return AllReduceOp{Dst: BufferOf(x), Op: Sum}
					},
					"broadcast": func() Operation {
						for i := range x {
							x[i] = float32(g.Rank() * (i%7*n + n))
						}
						return BroadcastOp{X: BufferOf(x), Root: 1}
					},
				}
				for _, name := range []string{"allreduce", "broadcast"} {
					for round := range 6 {
						// The first is checked and planned; later ones are bound, and run by their
						// waiters.
						late := round % n
						op := ops[name]()
						if g.Rank() == late { // the others have given up once when it comes
							for peer := range n {
								if peer != late {
									if _, err := Recv(ctx, g, []int32{0}, peer, round); err != nil {
										return err
									}
								}
							}
						}
						w := g.Start(op)
						if g.Rank() != late {
							short, cancel := context.WithTimeout(ctx, time.Duration(rand.IntN(2000))*time.Microsecond)
							err := w.Wait(short)
							cancel()
							if err != nil && !errors.Is(err, context.DeadlineExceeded) {
								return fmt.Errorf("%s: the first wait: %v", name, err)
							}
							if err := Send(ctx, g, []int32{0}, late, round); err != nil {
								return err
							}
						}
						if err := w.Wait(ctx); err != nil {
							return fmt.Errorf("%s: %v", name, err)
						}
						for i, v := range x {
							if want := float32(n*(i%7) + n); v != want {
								return fmt.Errorf("%s: element %d is %v, want %v", name, i, v, want)
							}
						}
					}
				}
				return nil
			})
		})
	}
}

// A started operation ends without a waiter.
func TestStartedOperationEndsWithoutWaiter(t *testing.T) {
	each(t, 2, Config{}, func(ctx context.Context, g *Group) error {
		for i, count := range []int{8, 8, 8, 100_000, 8, 100_000, 100_000} {
			x := slices.Repeat([]int64{1}, count)
			var last *Work
			for range 3 {
				last = g.Start(AllReduceOp{Dst: BufferOf(x), Op: Max})
			}
			if i%2 == 0 { // without a waiter
				for over := false; !over; runtime.Gosched() {
					g.job.proxy.Lock()
					at := last.at.Load()
					over = at == nil || at.over
					g.job.proxy.Unlock()
				}
			}
			select {
			case <-last.Done():
			case <-ctx.Done():
				return fmt.Errorf("%d elements: %w", count, ctx.Err())
			}
			if err := last.Err(); err != nil {
				return err
			}
		}
		return nil
	})
}

// A group is closed while a goroutine in Wait runs one of its operations.
func TestCloseEndsWait(t *testing.T) {
	gs, err := Local(2, Config{})
	if err != nil {
		t.Fatal(err)
	}
	defer gs[1].Close()
	g, x := gs[0], []int64{1}
	warm := make(chan error, 1)
	go func() { warm <- AllReduce(context.Background(), gs[1], []int64{1}, Sum) }()
	if err := errors.Join(AllReduce(t.Context(), g, x, Sum), <-warm); err != nil {
		t.Fatal(err)
	}
	works := []*Work{g.Start(AllReduceOp{Dst: BufferOf(x), Op: Sum}), g.Start(BarrierOp{})}
	ended := make(chan error, len(works))
	for _, w := range works {
		go func() { ended <- w.Wait(t.Context()) }()
	}
	for waits := false; !waits; runtime.Gosched() {
		g.job.proxy.Lock()
		waits = g.busy && g.run.Running()
		g.job.proxy.Unlock()
	}
	if err := g.Close(); err != nil {
		t.Error(err)
	}
	for range works {
		if err := <-ended; !errors.Is(err, ErrClosed) {
			t.Errorf("got %v, want ErrClosed", err)
		}
	}
}

// Blocking calls, and calls that are started and waited for, by several goroutines, in one order:
// all of them end, and callers that give up early leave no operation undone.
func TestMixedCallsRunInOrder(t *testing.T) {
	const n, calls = 3, 400
	seed := rand.Uint64()
	each(t, n, Config{}, func(ctx context.Context, g *Group) error {
		shared := rand.New(rand.NewPCG(seed, 1)) // the same at all ranks
		own := rand.New(rand.NewPCG(seed, uint64(g.Rank())+2))
		type pending struct {
			w *Work
			x []int64
		}
		var works []pending
		check := func(x []int64) error {
			for _, v := range x {
				if v != n*(n-1)/2 {
					return fmt.Errorf("got %d, want %d (seed %#x)", v, n*(n-1)/2, seed)
				}
			}
			return nil
		}
		for range calls {
			x := slices.Repeat([]int64{int64(g.Rank())}, []int{1, 16, 1000, 20_000}[shared.IntN(4)])
			op := AllReduceOp{Dst: BufferOf(x), Op: Sum}
			switch own.IntN(4) { // each rank goes its own way
			case 0:
				if err := AllReduce(ctx, g, x, Sum); err != nil {
					return err
				}
			case 1:
				if err := g.Do(ctx, op); err != nil {
					return err
				}
			default:
				works = append(works, pending{g.Start(op), x})
				continue
			}
			if err := check(x); err != nil {
				return err
			}
			for len(works) > 0 && own.IntN(3) > 0 {
				i := own.IntN(len(works))
				short, cancel := context.WithTimeout(ctx, time.Duration(own.IntN(100))*time.Microsecond)
				err := works[i].w.Wait(short)
				cancel()
				if err == nil {
					err = check(works[i].x)
					works = slices.Delete(works, i, i+1)
				} else if errors.Is(err, context.DeadlineExceeded) {
					err = nil
				}
				if err != nil {
					return err
				}
			}
		}
		for _, p := range works {
			if err := errors.Join(p.w.Wait(ctx), check(p.x)); err != nil {
				return err
			}
		}
		return nil
	})
}

// An unknown operation is refused, and the group is usable.
func TestUnknownOperationIsRefused(t *testing.T) {
	gs, err := Local(1, Config{})
	if err != nil {
		t.Fatal(err)
	}
	g := gs[0]
	defer g.Close()
	x := []int64{1}
	for _, op := range []Operation{nil, &AllReduceOp{Dst: BufferOf(x), Op: Sum}} {
		var bad *ArgumentError
		if err := g.Do(t.Context(), op); !errors.As(err, &bad) {
			t.Errorf("%T: got %v, want an *ArgumentError", op, err)
		}
		if err := g.Start(op).Wait(t.Context()); !errors.As(err, &bad) {
			t.Errorf("%T, started: got %v, want an *ArgumentError", op, err)
		}
	}
	if err := AllReduce(t.Context(), g, x, Sum); err != nil {
		t.Error(err)
	}
}

// A Work that comes to its turn when the worker has stopped looking, because nothing was started
// and everything in the line was behind a long operation, ends all the same.
func TestWorkBehindLongOperationEnds(t *testing.T) {
	each(t, 2, Config{}, func(ctx context.Context, g *Group) error {
		for range 3 { // bound from here on
			if err := AllReduce(ctx, g, []int64{1}, Sum); err != nil {
				return err
			}
		}
		x, y := []int64{1}, []int64{1}
		if g.Rank() == 1 { // late for both
			for i := range 2 {
				if _, err := Recv(ctx, g, []int32{0}, 0, i); err != nil {
					return err
				}
				if err := AllReduce(ctx, g, [][]int64{x, y}[i], Sum); err != nil {
					return err
				}
			}
			return nil
		}
		a := g.Start(AllReduceOp{Dst: BufferOf(x), Op: Sum})
		b := g.Start(AllReduceOp{Dst: BufferOf(y), Op: Sum})
		go func() {
			// The worker sleeps for good, or it was first and runs a while Wait sleeps.
			for n := 0; n < 300; time.Sleep(time.Millisecond) {
				g.job.proxy.Lock()
				if g.works.worker && g.busy && (!g.works.watched || g.line.asleep > 0) {
					n++
				}
				g.job.proxy.Unlock()
				if n == 0 && g.closed.Load() {
					return
				}
			}
			Send(ctx, g, []int32{0}, 1, 0)
		}()
		bounded, cancel := context.WithTimeout(ctx, time.Minute)
		defer cancel()
		if err := a.Wait(bounded); err != nil {
			return err
		}
		if err := Send(ctx, g, []int32{0}, 1, 1); err != nil {
			return err
		}
		select {
		case <-b.Done():
			return b.Err()
		case <-time.After(time.Minute):
			return errors.New("the second operation never ends, though its Done is waited for")
		}
	})
}

// The function of OnEnd is called once, with the outcome, whether the operation is over before or
// not.
func TestOnEndCallsItsFunctionOnceWithTheOutcome(t *testing.T) {
	each(t, 2, Config{}, func(ctx context.Context, g *Group) error {
		small, big := make([]float32, 8), make([]float32, 1<<20)
		peer := 1 - g.Rank()
		for round := range 50 {
			ops := []Operation{
				AllReduceOp{Dst: BufferOf(small), Op: Sum},
				BarrierOp{},
				AllReduceOp{Dst: BufferOf(big), Op: Sum},
				AllReduceOp{Dst: Buffer{Count: 1, DType: Float32}, Op: Sum}, // no memory
				RecvOp{X: BufferOf([]int32{0}), From: peer, Tag: round},
				SendOp{X: BufferOf([]int32{1}), To: peer, Tag: round},
				SendOp{X: BufferOf([]int32{1}), To: g.Rank()}, // not to itself
			}
			type end struct{ at, during error }
			works, ends := make([]*Work, len(ops)), make([]chan end, len(ops))
			for i, op := range ops {
				w, c := g.Start(op), make(chan end, 2)
				works[i], ends[i] = w, c
				then := func(err error) { c <- end{err, w.Err()} }
				if round%2 == 0 {
					w.OnEnd(then)
				} else {
					defer func() {
						w.OnEnd(then)
						if len(c) != 1 {
							t.Errorf("%T: OnEnd after the end made %d calls", op, len(c))
						}
					}()
				}
			}
			for i, w := range works {
				err := w.Wait(ctx)
				if bad := i == 3 || i == 6; bad != errors.As(err, new(*ArgumentError)) || !bad && err != nil {
					return fmt.Errorf("operation %d: %v", i, err)
				}
				if round%2 != 0 {
					continue
				}
				if e := <-ends[i]; e.at != err || e.during != err {
					return fmt.Errorf("operation %d: %v, but OnEnd's function got %v and saw %v", i, err,
						e.at, e.during)
				}
				if len(ends[i]) > 0 {
					return fmt.Errorf("operation %d: OnEnd's function was called again", i)
				}
			}
		}
		return nil
	})
}

// Close ends operations that run, and so calls the functions of OnEnd.
func TestOnEndHearsOfClose(t *testing.T) {
	gs, err := Local(2, Config{})
	if err != nil {
		t.Fatal(err)
	}
	defer gs[1].Close()
	outcomes := make(chan error, 2)
	gs[0].Start(BarrierOp{}).OnEnd(func(err error) { outcomes <- err })
	gs[0].Start(RecvOp{X: BufferOf([]int32{0}), From: 1}).OnEnd(func(err error) { outcomes <- err })
	gs[0].Close()
	for range 2 {
		if err := <-outcomes; !errors.Is(err, ErrClosed) {
			t.Errorf("the outcome is %v, want %v", err, ErrClosed)
		}
	}
}

// StartWithin's limit counts instead of Config.Timeout, whether it is shorter or longer.
func TestStartWithinReplacesTheTimeout(t *testing.T) {
	for _, c := range []struct {
		name           string
		timeout, limit time.Duration
		ends           bool
	}{
		{"shorter", time.Hour, 20 * time.Millisecond, true},
		{"longer", 20 * time.Millisecond, time.Hour, false},
		{"none", 20 * time.Millisecond, 0, false},
	} {
		for name, op := range map[string]Operation{
			"barrier": BarrierOp{},
			"recv":    RecvOp{X: BufferOf([]int32{0}), From: 1},
		} {
			t.Run(c.name+" "+name, func(t *testing.T) {
				gs, err := Local(2, Config{Timeout: c.timeout})
				if err != nil {
					t.Fatal(err)
				}
				defer gs[0].Close()
				defer gs[1].Close()
				w := gs[0].StartWithin(c.limit, op)
				if c.ends {
					if err := w.Wait(context.Background()); !errors.As(err, new(*TimeoutError)) {
						t.Errorf("the operation ended with %v, want a *TimeoutError", err)
					}
					return
				}
				short, cancel := context.WithTimeout(context.Background(), 5*c.timeout)
				defer cancel()
				if err := w.Wait(short); err != short.Err() {
					t.Errorf("Wait returned %v, want %v: the operation has more time", err, short.Err())
				}
			})
		}
	}
}

// The counts are the program's again after Start, also of an operation that waits for its turn.
func TestStartKeepsItsCounts(t *testing.T) {
	const guard = -1
	start := map[string]func(g *Group, dst, src []int64, counts []int) *Work{
		"allgatherv": func(g *Group, dst, src []int64, counts []int) *Work {
			return g.Start(AllGatherVOp{Dst: BufferOf(dst), Src: BufferOf(src[:1]), Counts: counts})
		},
		"alltoallv": func(g *Group, dst, src []int64, counts []int) *Work {
			return g.Start(AllToAllVOp{Dst: BufferOf(dst), Src: BufferOf(src), SendCounts: counts, RecvCounts: counts})
		},
	}
	for name, start := range start {
		t.Run(name, func(t *testing.T) {
			each(t, 2, Config{}, func(ctx context.Context, g *Group) error {
				if err := g.enter(ctx, "test", nil); err != nil { // the operation waits for its turn
					return err
				}
				g.job.proxy.Unlock()
				x, counts := slices.Repeat([]int64{guard}, 8), []int{1, 1}
				me := int64(g.Rank())
				w := start(g, x[:2], []int64{me, me}, counts)
				counts[0], counts[1] = 3, 3
				g.job.proxy.Lock()
				g.leave()
				if err := w.Wait(ctx); err != nil {
					return err
				}
				if want := append([]int64{0, 1}, slices.Repeat([]int64{guard}, 6)...); !slices.Equal(x, want) {
					return fmt.Errorf("got %v, want %v", x, want)
				}
				return nil
			})
		})
	}
}

// A panic in a function of OnEnd, which runs with a lock that Close needs, ends a program that has
// deferred Close.
func TestPanicOfOnEndEndsTheProcess(t *testing.T) {
	const child = "TUTTI_TEST_PANIC"
	if os.Getenv(child) == "" {
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		c := exec.CommandContext(ctx, os.Args[0], "-test.run=^"+t.Name()+"$")
		c.Env = append(os.Environ(), child+"=1")
		out, err := c.CombinedOutput()
		says := string(out)
		if ctx.Err() != nil || err == nil || !strings.Contains(says, "work_test.go") ||
			!strings.Contains(says, "panic: in a function given to Work.OnEnd: boom") {
			t.Errorf("got %v, and %s, want the panic and where it was", err, says)
		}
		return
	}
	gs, err := Local(1, Config{Timeout: -1})
	if err != nil {
		t.Fatal(err)
	}
	g := gs[0]
	defer g.Close()
	if err := g.Barrier(t.Context()); err != nil { // a later one runs where the turn is passed on
		t.Fatal(err)
	}
	if err := g.enter(t.Context(), "test", nil); err != nil {
		t.Fatal(err)
	}
	g.job.proxy.Unlock()
	g.Start(BarrierOp{}).OnEnd(func(error) { panic("boom") })
	g.job.proxy.Lock()
	g.leave()
}
