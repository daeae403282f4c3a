package pg

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"
	"time"

	"tutti/collectives"
	"tutti/internal/leaktest"
	"tutti/kernels"
)

func TestMain(m *testing.M) { leaktest.Main(m) }

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

// meeting returns a function that each of n ranks calls once, with the error of what it has done.
// The function returns that error when all have called it.
func meeting(n int) func(err error) error {
	var all sync.WaitGroup
	all.Add(n)
	return func(err error) error {
		all.Done()
		all.Wait()
		return err
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
	exchanged := func(i int) int64 { return int64(i/count*1_000_003 + me*count + i%count) }
	if err := expect("alltoall", all, exchanged); err != nil {
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
		if err := expect("allgatherv", v[at[r]:at[r+1]],
			func(i int) int64 { return int64(r*1_000_003 + i) }); err != nil {
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
		if err := expect("alltoallv", dst[off:off+recvs[r]],
			func(i int) int64 { return int64(r*1_000_003 + before + i) }); err != nil {
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
			each(t, 5, Config{Algorithm: a.String()}, func(ctx context.Context,
				g *Group) error {
				return everything(ctx, g, 5003)
			})
		})
	}
}

func TestManyRanks(t *testing.T) {
	n := 256
	if testing.Short() {
		n = 48
	}
	each(t, n, Config{Timeout: time.Minute}, func(ctx context.Context, g *Group) error { return everything(ctx, g, 3) })
}

func TestSendRecv(t *testing.T) {
	each(t, 3, Config{}, func(ctx context.Context, g *Group) error {
		n, me := g.Size(), g.Rank()
		next, prev := (me+1)%n, (me+n-1)%n
		for _, size := range []int{0, 1, 100, 5000, 300_000} { // eager and announced
			x, y := fill(me, size), make([]int64, size)
			r := g.Start(RecvOp{X: BufferOf(y), From: prev, Tag: 5})
			if err := Send(ctx, g, x, next, 5); err != nil {
				return err
			}
			if err := r.Wait(ctx); err != nil {
				return err
			}
			if s := r.Status(); s != (Status{prev, 5, size}) {
				return fmt.Errorf("status %+v", s)
			}
			for i, v := range y {
				if v != int64(prev*1_000_003+i) {
					return fmt.Errorf("%d elements: element %d is %d", size, i, v)
				}
			}
		}
		// Tags are matched, not the order of sending; of one tag the order holds, for long and
		// short messages alike.
		if me == 0 {
			for i := range 4 {
				for tag := range 3 {
					x := fill(100*i+tag, []int{3, 200_000}[i%2])
					w := g.Start(SendOp{X: BufferOf(x), To: 1, Tag: tag})
					defer w.Wait(ctx)
				}
			}
		}
		if me == 1 {
			for tag := 2; tag >= 0; tag-- {
				for i := range 4 {
					y := make([]int64, []int{3, 200_000}[i%2])
					if _, err := Recv(ctx, g, y, 0, tag); err != nil {
						return err
					}
					if y[1] != int64((100*i+tag)*1_000_003+1) {
						return fmt.Errorf("tag %d, message %d: got %d", tag, i, y[1])
					}
				}
			}
		}
		if err := g.Barrier(ctx); err != nil {
			return err
		}
		if me > 0 {
			return Send(ctx, g, []int32{int32(me)}, 0, 40+me)
		}
		got := map[int]bool{}
		for range n - 1 {
			y := []int32{0}
			s, err := Recv(ctx, g, y, AnyRank, AnyTag)
			if err != nil {
				return err
			}
			if s.From != int(y[0]) || s.Tag != 40+s.From || s.Count != 1 || got[s.From] {
				return fmt.Errorf("got %d with status %+v", y[0], s)
			}
			got[s.From] = true
		}
		return nil
	})
}

func TestRecvOfAnotherLengthOrType(t *testing.T) {
	for _, size := range []int{10, 100_000} {
		each(t, 2, Config{}, func(ctx context.Context, g *Group) error {
			if g.Rank() == 0 {
				for range 2 {
					if err := Send(ctx, g, make([]int64, size), 1, 1); err != nil {
						return err
					}
				}
				return Send(ctx, g, []int64{42}, 1, 1)
			}
			var ae *ArgumentError
			if _, err := Recv(ctx, g, make([]int64, size+1), 0, 1); !errors.As(err, &ae) {
				return fmt.Errorf("another length: %v", err)
			}
			if _, err := Recv(ctx, g, make([]float64, size), 0, 1); !errors.As(err, &ae) {
				return fmt.Errorf("another type: %v", err)
			}
			y := make([]int64, 1)
			if _, err := Recv(ctx, g, y, 0, 1); err != nil || y[0] != 42 {
				return fmt.Errorf("the message after: %v, %v", y, err)
			}
			return nil
		})
	}
}

// A sender that is far ahead is held back and loses nothing.
func TestBackPressure(t *testing.T) {
	const messages = 5000
	each(t, 2, Config{}, func(ctx context.Context, g *Group) error {
		x := make([]int32, 100)
		for i := range messages {
			if g.Rank() == 0 {
				x[7] = int32(i)
				if err := Send(ctx, g, x, 1, i%3); err != nil {
					return err
				}
			} else if i == 0 {
				if err := g.Barrier(ctx); err != nil { // let it run into the bound first
					return err
				}
			}
			if g.Rank() == 1 {
				if _, err := Recv(ctx, g, x, 0, i%3); err != nil {
					return err
				}
				if x[7] != int32(i) {
					return fmt.Errorf("message %d: got %d", i, x[7])
				}
			} else if i == 50 {
				if err := g.Barrier(ctx); err != nil {
					return err
				}
			}
		}
		return nil
	})
}

func TestStartedOperationsRunInOrder(t *testing.T) {
	each(t, 4, Config{}, func(ctx context.Context, g *Group) error {
		var works []*Work
		bufs := make([][]int64, 50)
		for i := range bufs {
			bufs[i] = fill(g.Rank(), 1+i*37)
			works = append(works, g.Start(AllReduceOp{Dst: BufferOf(bufs[i]), Op: Sum}))
		}
		last := []int32{int32(g.Rank())}
		if err := AllReduce(ctx, g, last, Max); err != nil { // behind them
			return err
		}
		for i, w := range works {
			select {
			case <-w.Done():
			default:
				return fmt.Errorf("operation %d is not done although a later one is", i)
			}
			if err := w.Err(); err != nil {
				return err
			}
			for k, v := range bufs[i] {
				if v != 6*1_000_003+4*int64(k) {
					return fmt.Errorf("operation %d, element %d: %d", i, k, v)
				}
			}
		}
		if last[0] != 3 {
			return fmt.Errorf("last: %d", last[0])
		}
		return nil
	})
}

func TestSplit(t *testing.T) {
	each(t, 7, Config{}, func(ctx context.Context, g *Group) error {
		color := g.Rank() % 3
		if g.Rank() == 6 {
			color = -1
		}
		sub, err := g.Split(ctx, color, -g.Rank()) // in reverse
		if err != nil {
			return err
		}
		if color < 0 {
			if sub != nil {
				return errors.New("a group without a color")
			}
			return nil
		}
		defer sub.Close()
		if sub.Size() != 2 || sub.Rank() != map[bool]int{true: 0, false: 1}[g.Rank() >= 3] {
			return fmt.Errorf("rank %d of %d", sub.Rank(), sub.Size())
		}
		if err := everything(ctx, sub, 1000); err != nil {
			return err
		}
		deeper, err := sub.Split(ctx, 0, 0)
		if err != nil {
			return err
		}
		defer deeper.Close()
		return everything(ctx, deeper, 10)
	})
}

// Two groups of the same ranks, used from two goroutines in different order of progress.
func TestGroupsAtOnce(t *testing.T) {
	each(t, 3, Config{}, func(ctx context.Context, g *Group) error {
		a, err := g.Split(ctx, 0, 0)
		if err != nil {
			return err
		}
		defer a.Close()
		failed := make(chan error, 1)
		go func() { failed <- everything(ctx, a, 20_000) }()
		err = everything(ctx, g, 30_000)
		return errors.Join(err, <-failed)
	})
}

func TestSameBits(t *testing.T) {
	for _, algo := range []string{"auto", "ring", "doubling", "halving", "twoshot", "tree"} {
		results := map[string]bool{}
		for range 3 {
			var mu sync.Mutex
			each(t, 5, Config{Algorithm: algo}, func(ctx context.Context, g *Group) error {
				x := make([]BF16, 3001)
				y := make([]float32, 3001)
				for i := range x {
					y[i] = float32(1+g.Rank()) / float32(3+i)
					x[i] = kernels.BF16From(y[i])
				}
				if err := AllReduce(ctx, g, x, Avg); err != nil {
					return err
				}
				if err := AllReduce(ctx, g, y, Sum); err != nil {
					return err
				}
				mu.Lock()
				results[fmt.Sprint(x, y)] = true
				mu.Unlock()
				return nil
			})
		}
		if len(results) != 1 {
			t.Errorf("%s: %d different results of the same sums", algo, len(results))
		}
	}
}

// Sums of small floats are rounded once, whatever the algorithm.
func TestSmallFloatsAreRoundedOnce(t *testing.T) {
	for _, algo := range []string{"auto", "ring", "doubling", "halving", "twoshot", "tree"} {
		each(t, 4, Config{Algorithm: algo}, func(ctx context.Context, g *Group) error {
			x := make([]BF16, 1000)
			for i := range x {
				x[i] = kernels.BF16From([]float32{256, 1, 1, -256}[g.Rank()]) // 256+1 is 256 in bfloat16
			}
			if err := AllReduce(ctx, g, x, Sum); err != nil {
				return err
			}
			for i, v := range x {
				if v.Float32() != 2 {
					return fmt.Errorf("%s: element %d is %v, want 2", algo, i, v.Float32())
				}
			}
			return nil
		})
	}
}

// A rank gives up its first operation and calls Recover before it is linked with the other one,
// which learns of that in the operation.
func TestFailureBeforeRanksAreLinked(t *testing.T) {
	each(t, 2, Config{}, func(ctx context.Context, g *Group) error {
		op := AllReduceOp{Dst: BufferOf(make([]byte, 1<<20)), Op: BitOr}
		first, cancel := context.WithCancel(ctx)
		defer cancel()
		if g.Rank() == 0 {
			cancel()
		} else {
			first = ctx
		}
		var late *TimeoutError
		if err := g.Do(first, op); !errors.As(err, &late) || late.Reporter != 0 || !errors.Is(err, context.Canceled) {
			return fmt.Errorf("%v, want that rank 0 has cancelled it", err)
		}
		if err := g.Recover(ctx); err != nil {
			return err
		}
		return g.Do(ctx, op)
	})
}

// A group that is closed gives back what it has in memory that peers map: a program may make and
// close any number of groups.
func TestClosedGroupsFreeTheirExposures(t *testing.T) {
	each(t, 2, Config{}, func(ctx context.Context, g *Group) error {
		board := func() (uint64, error) {
			g.job.proxy.Lock()
			defer g.job.proxy.Unlock()
			e, err := g.job.proxy.NewExposure()
			if err != nil {
				return 0, err
			}
			defer g.job.proxy.FreeExposure(e)
			region, _ := e.Place()
			return region, nil
		}
		first, err := board()
		if err != nil {
			return err
		}
		for range 1100 { // more than a board has words
			sub, err := g.Split(ctx, 0, 0)
			if err != nil {
				return err
			}
			if err := sub.Close(); err != nil {
				return err
			}
		}
		if now, err := board(); err != nil || now != first {
			return fmt.Errorf("a word in region %d, want it in region %d: %v", now, first, err)
		}
		return nil
	})
}
