package pg

import (
	"context"
	"fmt"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"

	"tutti/collectives"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// each runs f on n local ranks and fails the test with every rank's error.
func each(t testing.TB, n int, cfg Config, f func(ctx context.Context, g *Group) error) {
	t.Helper()
	if cfg.Timeout == 0 {
		cfg.Timeout = 20 * time.Second
	}
	gs, err := Local(n, cfg)
	if err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	for _, g := range gs {
		wg.Add(1)
		go func() {
			defer wg.Done()
			if err := f(context.Background(), g); err != nil {
				t.Errorf("rank %d: %v", g.Rank(), err)
			}
		}()
	}
	wg.Wait()
	for _, g := range gs {
		if err := g.Close(); err != nil {
			t.Errorf("rank %d: close: %v", g.Rank(), err)
		}
	}
}

func fill(rank, n int) []int64 {
	x := make([]int64, n)
	for i := range x {
		x[i] = int64(rank*1_000_003 + i)
	}
	return x
}

// everything runs each collective once with count elements and checks its result.
func everything(ctx context.Context, g *Group, count int) error {
	n, me := g.Size(), g.Rank()
	expect := func(what string, got []int64, want func(i int) int64) error {
		for i, v := range got {
			if v != want(i) {
				return fmt.Errorf("%s of %d elements: element %d is %d, want %d", what, count, i, v, want(i))
			}
		}
		return nil
	}
	sum := func(i int) int64 { return int64(n*(n-1)/2)*1_000_003 + int64(n*i) }
	x := fill(me, count)
	if err := AllReduce(ctx, g, x, Sum); err != nil {
		return err
	}
	if err := expect("allreduce", x, sum); err != nil {
		return err
	}
	part := make([]int64, count)
	if err := ReduceScatter(ctx, g, part, fill(me, n*count), Sum); err != nil {
		return err
	}
	if err := expect("reducescatter", part, func(i int) int64 { return sum(me*count + i) }); err != nil {
		return err
	}
	all := make([]int64, n*count)
	if err := AllGather(ctx, g, all, fill(me, count)); err != nil {
		return err
	}
	gathered := func(i int) int64 { return int64(i/count*1_000_003 + i%count) }
	if err := expect("allgather", all, gathered); err != nil {
		return err
	}
	clear(all)
	if err := AllToAll(ctx, g, all, fill(me, n*count)); err != nil {
		return err
	}
	if err := expect("alltoall", all, func(i int) int64 { return int64(i/count*1_000_003 + me*count + i%count) }); err != nil {
		return err
	}
	root := count % n
	y := fill(me, count)
	if err := Broadcast(ctx, g, y, root); err != nil {
		return err
	}
	if err := expect("broadcast", y, func(i int) int64 { return int64(root*1_000_003 + i) }); err != nil {
		return err
	}
	y = fill(me, count)
	if err := Reduce(ctx, g, y, root, Sum); err != nil {
		return err
	}
	if err := expect("reduce", y, func(i int) int64 {
		if me == root {
			return sum(i)
		}
		return int64(me*1_000_003 + i)
	}); err != nil {
		return err
	}
	clear(all)
	if err := Gather(ctx, g, all, fill(me, count), root); err != nil {
		return err
	}
	if me == root {
		if err := expect("gather", all, gathered); err != nil {
			return err
		}
	}
	if err := Scatter(ctx, g, part, fill(me, n*count), root); err != nil {
		return err
	}
	if err := expect("scatter", part, func(i int) int64 { return int64(root*1_000_003 + me*count + i) }); err != nil {
		return err
	}
	counts, total, at := make([]int, n), 0, make([]int, n+1)
	for r := range counts {
		counts[r] = (count * r) / n
		at[r] = total
		total += counts[r]
	}
	at[n] = total
	v := make([]int64, total)
	if err := AllGatherV(ctx, g, v, fill(me, counts[me]), counts); err != nil {
		return err
	}
	for r := range n {
		if err := expect("allgatherv", v[at[r]:at[r+1]], func(i int) int64 { return int64(r*1_000_003 + i) }); err != nil {
			return err
		}
	}
	sends, recvs, in := make([]int, n), make([]int, n), 0
	out := 0
	for r := range n {
		sends[r], recvs[r] = (me*7+r*3)%(count+1), (r*7+me*3)%(count+1)
		in += recvs[r]
		out += sends[r]
	}
	dst := make([]int64, in)
	if err := AllToAllV(ctx, g, dst, fill(me, out), sends, recvs); err != nil {
		return err
	}
	for r, off := 0, 0; r < n; r++ {
		before := 0
		for q := range me {
			before += (r*7 + q*3) % (count + 1)
		}
		if err := expect("alltoallv", dst[off:off+recvs[r]], func(i int) int64 { return int64(r*1_000_003 + before + i) }); err != nil {
			return err
		}
		off += recvs[r]
	}
	return g.Barrier(ctx)
}

func TestCollectives(t *testing.T) {
	for _, n := range []int{1, 2, 3, 4, 5, 8} {
		for _, count := range []int{1, 7, 1000, 70_001} {
			t.Run(fmt.Sprintf("%dranks/%d", n, count), func(t *testing.T) {
				each(t, n, Config{}, func(ctx context.Context, g *Group) error { return everything(ctx, g, count) })
			})
		}
	}
}

func TestEveryAlgorithm(t *testing.T) {
	seen := map[collectives.Algo]bool{}
	for _, k := range collectives.Kinds() {
		for _, a := range collectives.Algorithms(k) {
			seen[a] = true
		}
	}
	for a := range seen {
		t.Run(a.String(), func(t *testing.T) {
			each(t, 5, Config{Algorithm: a.String()}, func(ctx context.Context, g *Group) error { return everything(ctx, g, 5003) })
		})
	}
}
