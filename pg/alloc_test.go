//go:build !race

package pg_test

import (
	"context"
	"fmt"
	"runtime"
	"testing"

	"tutti/pg"
	"tutti/pg/pgtest"
)

// Warm, a blocking collective allocates nothing: within one process, and between processes over
// every transport.
func TestCollectivesAllocateNothing(t *testing.T) {
	for _, n := range []int{2, 4} {
		t.Run(fmt.Sprintf("inproc, %d ranks", n), func(t *testing.T) { pgtest.RunLocal(t, n, allocateNothing) })
	}
	for _, tr := range transports {
		t.Run(tr, func(t *testing.T) { pgtest.Run(t, 2, allocateNothing, pgtest.Transport(tr)) })
	}
}

func allocateNothing(t *testing.T, g *pg.Group) {
	const rounds = 200
	ctx, n := context.Background(), g.Size()
	few := uint64(rounds / 10)
	if n > 2 { // all ranks count, and those that share a processor sleep, and keep messages that come early
		few = uint64(n * rounds / 4)
	}
	big := make([]float32, 100_000)
	registered, err := pg.Alloc[float32](g, 100_000)
	if err != nil {
		t.Fatal(err)
	}
	small, parts := big[:64], make([]float32, 64*n)
	halves := make([]pg.BF16, 5000)
	counts, tens, total := make([]int, n), make([]int, n), 0
	for r := range n {
		counts[r], tens[r] = 10*(r+1), 10
		total += counts[r]
	}
	v := make([]float32, total)
	for _, c := range []struct {
		name string
		call func() error
	}{
		{"allreduce", func() error { return pg.AllReduce(ctx, g, small, pg.Sum) }},
		{"big allreduce", func() error { return pg.AllReduce(ctx, g, big, pg.Sum) }},
		{"registered allreduce", func() error { return pg.AllReduce(ctx, g, registered, pg.Sum) }},
		{"bfloat16", func() error { return pg.AllReduce(ctx, g, halves, pg.Avg) }},
		{"reducescatter", func() error { return pg.ReduceScatter(ctx, g, small, parts, pg.Sum) }},
		{"allgather", func() error { return pg.AllGather(ctx, g, parts, small) }},
		{"alltoall", func() error { return pg.AllToAll(ctx, g, parts, big[1000:1000+len(parts)]) }},
		{"broadcast", func() error { return pg.Broadcast(ctx, g, small, 1) }},
		{"reduce", func() error { return pg.Reduce(ctx, g, small, 1, pg.Max) }},
		{"gather", func() error { return pg.Gather(ctx, g, parts, small, 0) }},
		{"scatter", func() error { return pg.Scatter(ctx, g, small, parts, 0) }},
		{"barrier", func() error { return g.Barrier(ctx) }},
		{"allgatherv", func() error { return pg.AllGatherV(ctx, g, v, big[:counts[g.Rank()]], counts) }},
		{"alltoallv", func() error { return pg.AllToAllV(ctx, g, v[:10*n], big[1000:1000+10*n], tens, tens) }},
	} {
		// Other activity of the process (its lease, a waiter that falls asleep) allocates
		// occasionally, more on a busy machine. So the minimum of several tries counts, repeated
		// until all ranks have seen a good one.
		least, bad := uint64(1<<62), []int32{1}
		for try := 0; try < 2 || bad[0] != 0 && try < 100; try++ { // the first warms up
			if err := g.Barrier(ctx); err != nil {
				t.Fatal(err)
			}
			var before, after runtime.MemStats
			runtime.ReadMemStats(&before)
			for range rounds {
				if err := c.call(); err != nil {
					t.Fatalf("%s: %v", c.name, err)
				}
			}
			runtime.ReadMemStats(&after)
			if least = min(least, after.Mallocs-before.Mallocs); least <= few {
				bad[0] = 0
			} else {
				bad[0] = 1
			}
			if err := pg.AllReduce(ctx, g, bad, pg.Max); err != nil {
				t.Fatal(err)
			}
		}
		if least > few {
			t.Errorf("%s: %d allocations in %d calls", c.name, least, rounds)
		}
	}
	if err := pg.Free(g, registered); err != nil {
		t.Error(err)
	}
}
