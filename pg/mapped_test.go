package pg_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"runtime"
	"strings"
	"testing"
	"time"

	"tutti/pg"
	"tutti/pg/pgtest"
)

// canary is what a test fills memory with that no call may write to.
const canary = -7.25e11

// alloc returns registered memory that is freed at the end of the test.
func alloc(t *testing.T, g *pg.Group, n int) []float64 {
	t.Helper()
	x, err := pg.Alloc[float64](g, n)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { pg.Free(g, x) })
	return x
}

// plain returns memory that is not registered.
func plain(_ *testing.T, _ *pg.Group, n int) []float64 { return make([]float64, n) }

func fill(x []float64, v float64) {
	for i := range x {
		x[i] = v
	}
}

func all(x []float64, v float64) error {
	for i := range x {
		if x[i] != v {
			return fmt.Errorf("element %d of %d is %v, want %v", i, len(x), x[i], v)
		}
	}
	return nil
}

// together returns when all ranks have called it. It uses messages, which a collective that fails
// elsewhere does not end.
func together(t *testing.T, g *pg.Group) {
	t.Helper()
	through(t, g, 0)
	if g.Rank() > 0 {
		if _, err := pg.Recv(t.Context(), g, make([]byte, 1), 0, 1); err != nil {
			t.Fatal(err)
		}
		return
	}
	for r := 1; r < g.Size(); r++ {
		if err := pg.Send(t.Context(), g, []byte{1}, r, 1); err != nil {
			t.Fatal(err)
		}
	}
}

// A call on registered memory that was cancelled at any moment, at any rank, has the result or an
// error, and leaves the memory alone from its return on.
func TestCancelledCallsDoNotWriteRegisteredMemory(t *testing.T) {
	cancelled(t, 150, alloc)
}

// Registered memory is not mapped over links that cannot map it: those of the first transport.
func TestRegisteredMemoryOverTCP(t *testing.T) {
	const count = 8 << 10
	pgtest.Run(t, 2, func(t *testing.T, g *pg.Group) {
		in, out := alloc(t, g, count), alloc(t, g, 2*count)
		fill(in, float64(g.Rank()))
		if err := pg.AllGather(t.Context(), g, out, in); err != nil {
			t.Fatal(err)
		}
		for r := range 2 {
			if err := all(out[r*count:(r+1)*count], float64(r)); err != nil {
				t.Errorf("part of rank %d: %v", r, err)
			}
		}
	}, pgtest.Transport("tcp,shm"))
}

// The same holds for plain memory that peers read from this process.
func TestCancelledCallsDoNotWritePlainMemory(t *testing.T) {
	cancelled(t, 150, plain, pgtest.Config(pg.Config{SingleCopy: "on"}))
}

// The same holds if a rank uses either memory, whatever the others do. The ranks exchange that only
// in some of the calls, and after a cancelled one all do again.
func TestCancelledCallsOnAnyMemory(t *testing.T) {
	cancelled(t, 600, func(t *testing.T, g *pg.Group, n int) []float64 {
		if rand.IntN(3) == 0 {
			return alloc(t, g, n)
		}
		return plain(t, g, n)
	}, pgtest.Config(pg.Config{SingleCopy: "off"}))
}

// Calls on plain memory do not keep those on registered memory that follow from loading it for
// long.
func TestRegisteredMemoryIsLoadedAfterPlain(t *testing.T) {
	const count, least = 64 << 10, 64 << 10
	pgtest.Run(t, 2, func(t *testing.T, g *pg.Group) {
		memory := map[bool][]float64{false: plain(t, g, count), true: alloc(t, g, count)}
		sent := func(registered bool) uint64 {
			before := g.Sent(t)
			fill(memory[registered], 1)
			if err := pg.AllReduce(t.Context(), g, memory[registered], pg.Sum); err != nil {
				t.Fatal(err)
			}
			if err := all(memory[registered], 2); err != nil {
				t.Fatal(err)
			}
			return g.Sent(t) - before
		}
		for round := range 3 {
			for range 300 {
				if n := sent(false); n < least {
					t.Fatalf("round %d: plain memory, %d bytes sent", round, n)
				}
			}
			calls := 1
			for ; sent(true) >= least; calls++ {
			}
			if calls > 64 {
				t.Errorf("round %d: loaded in call %d", round, calls)
			}
			for range 10 {
				if n := sent(true); n >= least {
					t.Fatalf("round %d: registered memory, %d bytes sent", round, n)
				}
			}
		}
	}, pgtest.Transport("shm"), pgtest.Config(pg.Config{SingleCopy: "off"}))
}

func cancelled(t *testing.T, rounds int, alloc func(t *testing.T, g *pg.Group, n int) []float64,
	opts ...pgtest.Option) {
	const n = 3
	pgtest.Run(t, n, func(t *testing.T, g *pg.Group) {
		ctx := t.Context()
		same, own := rand.New(rand.NewPCG(1, 1)), rand.New(rand.NewPCG(2, uint64(g.Rank())))
		failed := 0
		for round := range rounds {
			count := 1 << (14 + same.IntN(3))
			x := alloc(t, g, count)
			for range same.IntN(5) { // of the same shape
				fill(x, float64(g.Rank()))
				if err := pg.AllReduce(ctx, g, x, pg.Sum); err != nil {
					t.Fatalf("round %d: %v", round, err)
				}
				if bad := all(x, float64(n*(n-1)/2)); bad != nil {
					t.Fatalf("round %d: %v", round, bad)
				}
			}
			fill(x, float64(g.Rank()+round))
			hasty, late := same.IntN(n), same.IntN(n)
			cctx, cancel := ctx, context.CancelFunc(func() {})
			together(t, g)
			patience := time.Duration(50+same.IntN(400)) * time.Microsecond
			began := time.Now()
			if hasty == g.Rank() {
				cctx, cancel = context.WithTimeout(ctx, patience)
			} else if late == g.Rank() { // about when the other one gives up
				for time.Since(began) < patience-time.Duration(30-own.IntN(100))*time.Microsecond {
				}
			}
			err := pg.AllReduce(cctx, g, x, pg.Sum)
			if err == nil {
				if bad := all(x, float64(n*(n-1)/2+n*round)); bad != nil {
					t.Fatalf("round %d, no error: %v", round, bad)
				}
			}
			cancel()
			fill(x, canary)
			if err == nil {
				err = g.Barrier(ctx)
			}
			if err != nil {
				failed++
				var late *pg.TimeoutError
				if !errors.As(err, &late) {
					t.Fatalf("round %d: %v, want a *TimeoutError", round, err)
				}
				if err := g.Recover(ctx); err != nil {
					t.Fatalf("round %d: %v", round, err)
				}
			}
			together(t, g)
			if bad := all(x, canary); bad != nil {
				t.Fatalf("round %d: memory was written after the call had returned: %v", round, bad)
			}
		}
		t.Logf("%d of %d rounds failed", failed, rounds)
		if failed == 0 {
			t.Error("no call was given up: the test tests nothing")
		}
	}, append(opts, pgtest.Transport("shm"))...)
}

// A rank that dies at any moment, while the others map each other's memory for the first time,
// costs the survivors at most one operation, and none where its inputs are intact; no result is
// wrong.
func TestDeathWhileMemoryIsMapped(t *testing.T) { death(t, alloc, "auto") }

// The same holds while others read its plain memory.
func TestDeathWhileMemoryIsRead(t *testing.T) { death(t, plain, "on") }

func death(t *testing.T, alloc func(t *testing.T, g *pg.Group, n int) []float64, singleCopy string) {
	for _, how := range []pg.OnFailure{pg.Shrink, pg.Retry} {
		for moment := range 8 {
			if testing.Short() && moment%3 != 0 {
				continue
			}
			t.Run(fmt.Sprintf("%v/%d", how, moment), func(t *testing.T) {
				const n, victim = 4, 2
				pgtest.Run(t, n, func(t *testing.T, g *pg.Group) {
					ctx := t.Context()
					// Ranks that have not met the victim before it dies wait until it is started
					// again.
					var early *pg.RankError
					if err := g.Barrier(ctx); err != nil && (!errors.As(err, &early) || early.Rank != victim) {
						t.Fatal(err)
					}
					if g.Rank() == victim {
						go func() {
							time.Sleep(time.Duration(moment) * 700 * time.Microsecond)
							pgtest.Kill(t)
						}()
					}
					for round, after := 0, 0; after < 10; round++ {
						x := alloc(t, g, 1<<14)
						y := x
						if (g.Rank()+round)%2 == 0 {
							y = alloc(t, g, 1<<14)
						}
						fill(x, float64(int(1)<<g.Rank()))
						err := g.Start(pg.AllReduceOp{Dst: pg.BufferOf(y), Src: pg.BufferOf(x), Op: pg.Sum}).Wait(ctx)
						var lost *pg.RankError
						switch {
						case errors.As(err, &lost) && lost.Rank == victim:
						case err != nil:
							t.Fatalf("%v, want a *RankError that names rank %d", err, victim)
						case y[0] != 15 && y[0] != 15-1<<victim:
							t.Fatalf("the sum is %v", y[0])
						default:
							if bad := all(y, y[0]); bad != nil {
								t.Fatal(bad)
							}
						}
						if err == nil && y[0] != 15 { // all ranks count the same operations
							after++
						}
					}
				}, pgtest.Transport("shm"), pgtest.Config(pg.Config{OnFailure: how, SingleCopy: singleCopy}),
					pgtest.Expect(victim, 9))
			})
		}
	}
}

// An operation that fails on one half of an allocation touches neither what the program stores to
// the other half nor another group's operation there.
func TestFailureWritesOnlyInsideTheBuffer(t *testing.T) {
	const n, half = 3, 1 << 16
	pgtest.Run(t, n, func(t *testing.T, g *pg.Group) {
		ctx := t.Context()
		other, err := g.Split(ctx, 0, g.Rank())
		if err != nil {
			t.Fatal(err)
		}
		defer other.Close()
		x := alloc(t, g, 3*half)
		mine, theirs, stores := x[:half], x[half:2*half], x[2*half:]
		done := make(chan error, 1)
		go func() { // the program and another group, beside failures
			for round := range 200 {
				fill(theirs, float64(g.Rank()+round))
				fill(stores, float64(round))
				if err := pg.AllReduce(ctx, other, theirs, pg.Sum); err != nil {
					done <- err
					return
				}
				if err := errors.Join(all(theirs, float64(n*(n-1)/2+n*round)),
					all(stores, float64(round))); err != nil {
					done <- fmt.Errorf("round %d: %w", round, err)
					return
				}
			}
			done <- nil
		}()
		for round := range 30 {
			together(t, g)
			cctx, cancel := ctx, context.CancelFunc(func() {})
			if round%n == g.Rank() {
				cctx, cancel = context.WithTimeout(ctx, time.Duration(round*10)*time.Microsecond)
			}
			err := pg.AllReduce(cctx, g, mine, pg.Sum)
			cancel()
			if err == nil {
				err = g.Barrier(ctx)
			}
			if err != nil {
				if err := g.Recover(ctx); err != nil {
					t.Fatal(err)
				}
			}
		}
		if err := <-done; err != nil {
			t.Fatal(err)
		}
		together(t, g)
	}, pgtest.Transport("shm"))
}

// A rank that is stopped at any moment delays no other past a deadline.
func TestDeadlineHoldsWhileOwnerIsStopped(t *testing.T) {
	t.Parallel() // it waits, mostly
	const n, victim = 3, 1
	pgtest.Run(t, n, func(t *testing.T, g *pg.Group) {
		ctx := t.Context()
		control := pgtest.InjectFaults(t)
		for round := range 4 {
			if err := g.Barrier(ctx); err != nil {
				t.Fatal(err)
			}
			together(t, g)
			stopped := make(chan struct{})
			if g.Rank() == 0 {
				go func() {
					defer close(stopped)
					time.Sleep(time.Duration(rand.IntN(2000)) * time.Microsecond)
					control.Stop(victim, 3*time.Second)
				}()
			} else {
				close(stopped)
			}
			var err error
			for err == nil {
				x := alloc(t, g, 1<<13) // which the others map anew
				fill(x, 1)
				cctx, cancel := context.WithTimeout(ctx, 300*time.Millisecond)
				began := time.Now()
				err = pg.AllReduce(cctx, g, x, pg.Sum)
				if d := time.Since(began); g.Rank() != victim && d > 20*time.Second {
					t.Errorf("round %d: it returned after %v, with %v", round, d, err)
				}
				cancel()
				if err == nil && all(x, n) != nil {
					t.Fatal(all(x, n))
				}
				pg.Free(g, x)
			}
			<-stopped
			if err := g.Recover(ctx); err != nil {
				t.Fatal(err)
			}
		}
	}, pgtest.Transport("shm"), pgtest.Faults(nil), pgtest.Config(pg.Config{OnFailure: pg.Report}))
}

// Memory that is allocated, used and freed again and again does not add up at the peers.
func TestFreeUnmapsAtPeers(t *testing.T) {
	pgtest.Run(t, 2, func(t *testing.T, g *pg.Group) {
		ctx := t.Context()
		mappings := func() int {
			text, err := os.ReadFile("/proc/self/maps")
			if err != nil {
				t.Fatal(err)
			}
			return strings.Count(string(text), "memfd:tutti")
		}
		round := func() {
			x, err := pg.Alloc[float64](g, 1<<16)
			if err != nil {
				t.Fatal(err)
			}
			fill(x, 1)
			if err := pg.AllReduce(ctx, g, x, pg.Sum); err != nil {
				t.Fatal(err)
			}
			if err := pg.Free(g, x); err != nil {
				t.Fatal(err)
			}
		}
		for range 5 {
			round()
		}
		before := mappings()
		for range 150 {
			round()
		}
		for deadline := time.Now().Add(30 * time.Second); mappings() > before; runtime.Gosched() {
			if time.Now().After(deadline) {
				t.Fatalf("%d mappings of shared memory, %d before", mappings(), before)
			}
		}
		if err := g.Barrier(ctx); err != nil {
			t.Fatal(err)
		}
	}, pgtest.Transport("shm"))
}
