package pg

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"sync"
	"testing"
	"time"
)

// sentTo returns how much this rank has sent to slot for collectives, in cost units.
func sentTo(g *Group, slot int) uint32 { return g.coll.Ledger(slot).Sent }

// TestQueuedOperationsAreSent starts short operations while the other rank is in none. Their data
// leaves at once, unless an operation reads what an earlier one writes: then it waits for that one.
func TestQueuedOperationsAreSent(t *testing.T) {
	const k = 8 // elements
	for _, mode := range []OnFailure{Report, Shrink} {
		for name, op := range map[string]func(x []int64, i int) Operation{
			"apart": func(x []int64, i int) Operation { return AllReduceOp{Dst: BufferOf(x[k*i:][:k]), Op: Sum} },
			"chained": func(x []int64, i int) Operation {
				return AllReduceOp{Dst: BufferOf(x[k*(i+1):][:k]), Src: BufferOf(x[k*i:][:k]), Op: Sum}
			},
		} {
			t.Run(fmt.Sprint(mode, " ", name), func(t *testing.T) {
				const many = 10
				started := make(chan struct{})
				each(t, 2, Config{OnFailure: mode}, func(ctx context.Context, g *Group) error {
					x := make([]int64, k*(many+1))
					for range 3 { // then the call is bound
						if err := g.Do(ctx, op(x, 0)); err != nil {
							return err
						}
					}
					for i := range x {
						x[i] = int64(i%5 + g.Rank())
					}
					if err := g.Barrier(ctx); err != nil {
						return err
					}
					works := make([]*Work, many)
					if g.Rank() == 1 {
						<-started
					}
					before := sentTo(g, 1-g.Rank())
					for i := range works {
						if works[i] = g.Start(op(x, i)); i == 0 && g.Rank() == 0 {
							before = sentTo(g, 1)
						}
					}
					if g.Rank() == 0 {
						ahead := sentTo(g, 1) - before
						if want := mode == Report && name == "apart"; want != (ahead > 0) {
							t.Errorf("%d units were sent behind an operation that waits", ahead)
						}
						close(started)
					}
					for _, w := range works {
						if err := w.Wait(ctx); err != nil {
							return err
						}
					}
					for i, v := range x {
						want := int64(2*(i%5) + 1)
						if name == "chained" {
							want = (int64(2*(i%k%5)) + 1) << max(i/k-1, 0)
							if i < k {
								want = int64(i%5 + g.Rank())
							}
						} else if i >= k*many {
							want = int64(i%5 + g.Rank())
						}
						if v != want {
							return fmt.Errorf("element %d is %d, want %d", i, v, want)
						}
					}
					return nil
				})
			})
		}
	}
}

// TestQueuesOfRandomOperations queues short operations on parts of one array, which overlap and
// depend on each other, and compares the array with what a program with one thread makes.
func TestQueuesOfRandomOperations(t *testing.T) {
	for _, n := range []int{2, 3, 4, 6} {
		t.Run(fmt.Sprint(n, " ranks"), func(t *testing.T) {
			seed := rand.Uint64()
			t.Logf("seed %#x", seed)
			each(t, n, Config{}, func(ctx context.Context, g *Group) error {
				const size, longest = 40, 6
				same := rand.New(rand.NewPCG(seed, 0)) // the same at all ranks
				own := rand.New(rand.NewPCG(seed, uint64(g.Rank())+1))
				x, model := make([]int64, size), make([][]int64, n)
				for r := range model {
					model[r] = make([]int64, size)
					for i := range size {
						model[r][i] = int64(same.IntN(100))
					}
				}
				copy(x, model[g.Rank()])
				for round := range 300 {
					var works []*Work
					for range 1 + same.IntN(20) {
						count := 1 + same.IntN(longest)
						src, dst := same.IntN(size-count), same.IntN(size-count)
						if src < dst+count && dst < src+count {
							src = dst // in place
						}
						switch same.IntN(4) {
						default:
							works = append(works, g.Start(AllReduceOp{Dst: BufferOf(x[dst:][:count]),
								Src: BufferOf(x[src:][:count]), Op: Max}))
							for i := range count {
								v := model[0][src+i]
								for r := range model {
									v = max(v, model[r][src+i])
								}
								for r := range model {
									model[r][dst+i] = v
								}
							}
						case 0:
							root := same.IntN(n)
							works = append(works, g.Start(BroadcastOp{X: BufferOf(x[dst:][:count]), Root: root}))
							for r := range model {
								copy(model[r][dst:][:count], model[root][dst:])
							}
						}
						if own.IntN(8) == 0 {
							if err := works[own.IntN(len(works))].Wait(ctx); err != nil {
								return err
							}
						}
					}
					own.Shuffle(len(works), func(i, j int) { works[i], works[j] = works[j], works[i] })
					for _, w := range works {
						if err := w.Wait(ctx); err != nil {
							return err
						}
					}
					for i, v := range x {
						if v != model[g.Rank()][i] {
							return fmt.Errorf("round %d: element %d is %d, want %d", round, i, v, model[g.Rank()][i])
						}
					}
					i := same.IntN(size)
					for r := range model {
						model[r][i] = int64(same.IntN(100))
					}
					x[i] = model[g.Rank()][i]
				}
				return nil
			})
		})
	}
}

// TestQueueEndsAtTheFirstFailure has one rank queue operations whose data is sent ahead, and the
// other fail in the middle. The error names the operation that failed, all later ones fail, and
// Recover makes the group usable.
func TestQueueEndsAtTheFirstFailure(t *testing.T) {
	const k, many, good = 4, 12, 5
	for _, how := range []string{"mismatch", "timeout"} {
		t.Run(how, func(t *testing.T) {
			over := make(chan struct{})
			told := sync.OnceFunc(func() { close(over) })
			each(t, 2, Config{}, func(ctx context.Context, g *Group) error {
				if g.Rank() == 0 {
					defer told()
				}
				x := make([]int64, k*many)
				op := func(i int) Operation { return AllReduceOp{Dst: BufferOf(x[k*i:][:k]), Op: Sum} }
				for range 3 {
					if err := g.Do(ctx, op(0)); err != nil {
						return err
					}
				}
				works := make([]*Work, many)
				for i := range works {
					limit := 20 * time.Second
					if how == "timeout" && i >= good {
						limit = 300 * time.Millisecond
					}
					switch {
					case g.Rank() == 0 || i < good:
						works[i] = g.StartWithin(limit, op(i))
					case i == good && how == "mismatch":
						works[i] = g.Start(AllReduceOp{Dst: BufferOf(x[k*i:][:k-1]), Op: Sum})
					}
				}
				for i, w := range works {
					if w == nil {
						break
					}
					err := w.Wait(ctx)
					var differ *MismatchError
					var late *TimeoutError
					switch {
					case i < good && err != nil:
						return fmt.Errorf("operation %d: %w", i, err)
					case i < good:
						continue
					case err == nil:
						return fmt.Errorf("operation %d succeeded", i)
					case how == "mismatch" && !errors.As(err, &differ), how == "timeout" && !errors.As(err, &late):
						return fmt.Errorf("operation %d: %w", i, err)
					case i == good && !strings.Contains(err.Error(), "allreduce"):
						return fmt.Errorf("operation %d: %w, want an error that names it", i, err)
					}
				}
				if g.Rank() == 0 {
					told()
				}
				<-over
				if err := g.Recover(ctx); err != nil {
					return err
				}
				x[0] = int64(g.Rank() + 1)
				if err := AllReduce(ctx, g, x[:1], Sum); err != nil {
					return err
				}
				if x[0] != 3 {
					return fmt.Errorf("after Recover: %d, want 3", x[0])
				}
				return nil
			})
		})
	}
}

// TestQueueIsLongerThanTheWindow queues more than a peer takes before it runs operations itself.
func TestQueueIsLongerThanTheWindow(t *testing.T) {
	const n, k, many = 3, 128, 4000
	started := make(chan struct{}, n-1)
	each(t, n, Config{}, func(ctx context.Context, g *Group) error {
		x := make([]int64, k*many)
		for i := range x {
			x[i] = int64(i%97 + g.Rank())
		}
		part := func(i int) Operation { return AllReduceOp{Dst: BufferOf(x[k*i:][:k]), Op: Sum} }
		for i := range 3 {
			if err := g.Do(ctx, part(i)); err != nil {
				return err
			}
		}
		if g.Rank() == n-1 {
			for range n - 1 {
				<-started
			}
		}
		var works []*Work
		for i := 3; i < many; i++ {
			works = append(works, g.Start(part(i)))
		}
		if g.Rank() != n-1 {
			started <- struct{}{}
		}
		for _, w := range works {
			if err := w.Wait(ctx); err != nil {
				return err
			}
		}
		for i, v := range x {
			if want := int64(n*(i%97) + n*(n-1)/2); v != want {
				return fmt.Errorf("element %d is %d, want %d", i, v, want)
			}
		}
		return nil
	})
}
