package pg_test

import (
	"context"
	"fmt"
	"sync"
	"testing"
	"time"

	"tutti/pg"
)

// The contents of buffers after a failed operation match the package's documentation, when a rank
// comes late or never, or the caller cancels.
func TestBuffersAfterFailedOperation(t *testing.T) {
	const n, guard = 3, 64
	ones := func(k int) []int { return []int{k, k, k} }
	for _, k := range []int{8, 60_000} {
		// Each operation works on mem, of n parts of k elements and some more; kept says which of
		// the elements it must leave alone.
		ops := map[string]func(g *pg.Group, mem []int64) (op pg.Operation, kept func(i int) bool){
			"allreduce": func(g *pg.Group, mem []int64) (pg.Operation, func(i int) bool) {
				return pg.AllReduceOp{Dst: piece(mem, k, k), Src: piece(mem, 0, k), Op: pg.Sum},
					func(i int) bool { return i < k || i >= 2*k }
			},
			"allreduce in place": func(g *pg.Group, mem []int64) (pg.Operation, func(i int) bool) {
				return pg.AllReduceOp{Dst: piece(mem, 0, k), Op: pg.Sum}, func(i int) bool { return i >= k }
			},
			"reducescatter": func(g *pg.Group, mem []int64) (pg.Operation, func(i int) bool) {
				return pg.ReduceScatterOp{Dst: piece(mem, n*k, k), Src: piece(mem, 0, n*k), Op: pg.Sum},
					func(i int) bool { return i < n*k || i >= (n+1)*k }
			},
			"allgather": func(g *pg.Group, mem []int64) (pg.Operation, func(i int) bool) {
				return pg.AllGatherOp{Dst: piece(mem, 0, n*k), Src: piece(mem, n*k, k)},
					func(i int) bool { return i >= n*k }
			},
			"allgather in place": func(g *pg.Group, mem []int64) (pg.Operation, func(i int) bool) {
				me := g.Rank()
				return pg.AllGatherOp{Dst: piece(mem, 0, n*k), Src: piece(mem, me*k, k)},
					func(i int) bool { return i/k == me || i >= n*k }
			},
			"allgatherv in place": func(g *pg.Group, mem []int64) (pg.Operation, func(i int) bool) {
				me := g.Rank()
				return pg.AllGatherVOp{Dst: piece(mem, 0, n*k), Src: piece(mem, me*k, k), Counts: ones(k)},
					func(i int) bool { return i/k == me || i >= n*k }
			},
			"alltoall": func(g *pg.Group, mem []int64) (pg.Operation, func(i int) bool) {
				return pg.AllToAllOp{Dst: piece(mem, n*k, n*k), Src: piece(mem, 0, n*k)},
					func(i int) bool { return i < n*k || i >= 2*n*k }
			},
			"alltoallv": func(g *pg.Group, mem []int64) (pg.Operation, func(i int) bool) {
				return pg.AllToAllVOp{Dst: piece(mem, n*k, n*k), Src: piece(mem, 0, n*k), SendCounts: ones(k),
					RecvCounts: ones(k)}, func(i int) bool { return i < n*k || i >= 2*n*k }
			},
			"broadcast": func(g *pg.Group, mem []int64) (pg.Operation, func(i int) bool) {
				return pg.BroadcastOp{X: piece(mem, 0, k), Root: 2}, func(i int) bool { return i >= k }
			},
			"reduce": func(g *pg.Group, mem []int64) (pg.Operation, func(i int) bool) {
				return pg.ReduceOp{X: piece(mem, 0, k), Root: 0, Op: pg.Sum},
					func(i int) bool { return g.Rank() != 0 || i >= k }
			},
			"gather in place": func(g *pg.Group, mem []int64) (pg.Operation, func(i int) bool) {
				return pg.GatherOp{Dst: piece(mem, 0, n*k), Src: piece(mem, 0, k), Root: 0},
					func(i int) bool { return g.Rank() != 0 || i < k || i >= n*k }
			},
			"scatter": func(g *pg.Group, mem []int64) (pg.Operation, func(i int) bool) {
				return pg.ScatterOp{Dst: piece(mem, n*k, k), Src: piece(mem, 0, n*k), Root: 2},
					func(i int) bool { return i < n*k || i >= (n+1)*k }
			},
			"recv": func(g *pg.Group, mem []int64) (pg.Operation, func(i int) bool) {
				return pg.RecvOp{X: piece(mem, 0, k), From: 2}, func(i int) bool { return i >= k }
			},
		}
		for name, setup := range ops {
			for _, cause := range []string{"timeout", "loss", "close"} {
				t.Run(fmt.Sprintf("%s/%d/%s", name, k, cause), func(t *testing.T) {
					t.Parallel()
					gs, err := pg.Local(n, pg.Config{Timeout: time.Minute})
					if err != nil {
						t.Fatal(err)
					}
					var wg, past sync.WaitGroup
					past.Add(n)
					for _, g := range gs {
						wg.Go(func() {
							if err := g.Barrier(context.Background()); err != nil {
								t.Error(err)
							}
							past.Done()
							past.Wait()
							if g.Rank() == 2 {
								if cause == "loss" {
									g.Close()
								}
								return
							}
							mem := make([]int64, 2*n*k+guard)
							for i := range mem {
								mem[i] = int64(1000*g.Rank() + i)
							}
							op, kept := setup(g, mem)
							run := func() error {
								if cause == "timeout" {
									ctx, cancel := context.WithTimeout(context.Background(), 100*time.Millisecond)
									defer cancel()
									return g.Do(ctx, op)
								}
								w := g.Start(op)
								if cause == "close" {
									g.Close()
								}
								return w.Wait(context.Background())
							}
							leaf := name == "reduce" || name == "gather in place" // what it sends may be through
							if err := run(); err == nil && !leaf {
								t.Error("it succeeded")
							}
							for i := range mem {
								if kept(i) && mem[i] != int64(1000*g.Rank()+i) {
									t.Errorf("rank %d: element %d was written", g.Rank(), i)
									return
								}
							}
						})
					}
					wg.Wait()
					for _, g := range gs {
						g.Close()
					}
				})
			}
		}
	}
}
