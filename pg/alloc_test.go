//go:build !race

package pg

import (
	"context"
	"fmt"
	"runtime"
	"testing"
)

// Warm, a blocking collective allocates nothing.
func TestCollectivesAllocateNothing(t *testing.T) {
	const n, rounds = 2, 200
	each(t, n, Config{}, func(ctx context.Context, g *Group) error {
		big := make([]float32, 100_000)
		small, parts := big[:64], make([]float32, 64*n)
		halves := make([]BF16, 5000)
		counts := []int{10, 20}
		v, tens := make([]float32, 30), []int{10, 10}
		calls := map[string]func() error{
			"allreduce":     func() error { return AllReduce(ctx, g, small, Sum) },
			"big allreduce": func() error { return AllReduce(ctx, g, big, Sum) },
			"bfloat16":      func() error { return AllReduce(ctx, g, halves, Avg) },
			"reducescatter": func() error { return ReduceScatter(ctx, g, small, parts, Sum) },
			"allgather":     func() error { return AllGather(ctx, g, parts, small) },
			"alltoall":      func() error { return AllToAll(ctx, g, parts, big[1000:1000+len(parts)]) },
			"broadcast":     func() error { return Broadcast(ctx, g, small, 1) },
			"reduce":        func() error { return Reduce(ctx, g, small, 1, Max) },
			"gather":        func() error { return Gather(ctx, g, parts, small, 0) },
			"scatter":       func() error { return Scatter(ctx, g, small, parts, 0) },
			"barrier":       func() error { return g.Barrier(ctx) },
			"allgatherv":    func() error { return AllGatherV(ctx, g, v, big[:counts[g.Rank()]], counts) },
			"alltoallv":     func() error { return AllToAllV(ctx, g, v[:20], big[40:60], tens, tens) },
		}
		for _, name := range []string{"allreduce", "big allreduce", "bfloat16", "reducescatter", "allgather", "alltoall", "broadcast", "reduce", "gather", "scatter", "barrier", "allgatherv", "alltoallv"} {
			call := calls[name]
			var before, after runtime.MemStats
			for i := range 2 * rounds {
				if i == rounds {
					if err := g.Barrier(ctx); err != nil {
						return err
					}
					runtime.ReadMemStats(&before)
				}
				if err := call(); err != nil {
					return fmt.Errorf("%s: %w", name, err)
				}
			}
			runtime.ReadMemStats(&after)
			if got := after.Mallocs - before.Mallocs; got > rounds/2 { // in n*rounds calls of all ranks; sleeping and the test itself allocate now and then
				return fmt.Errorf("%s: %d allocations in %d calls", name, got, rounds)
			}
		}
		return nil
	})
}
