package pg_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"tutti/pg"
	"tutti/pg/pgtest"
)

// A differing is a call that ranks make differently: odd says that this rank is the one that does.
type differing struct {
	name string
	call func(ctx context.Context, g *pg.Group, odd bool) error
}

// nothings are all kinds with a length that is nothing at some ranks and something at others.
func nothings(few, many int) (all []differing) {
	add := func(name string, call func(ctx context.Context, g *pg.Group, k int) error) {
		all = append(all,
			differing{name + " of nothing at one rank", func(ctx context.Context, g *pg.Group, odd bool) error {
				return call(ctx, g, map[bool]int{true: 0, false: few}[odd])
			}},
			differing{name + " of something at one rank", func(ctx context.Context, g *pg.Group, odd bool) error {
				return call(ctx, g, map[bool]int{true: few, false: 0}[odd])
			}},
			differing{name + " of much at one rank", func(ctx context.Context, g *pg.Group, odd bool) error {
				return call(ctx, g, map[bool]int{true: many, false: 0}[odd])
			}})
	}
	x := func(k int) []float32 { return make([]float32, k) }
	add("allreduce", func(ctx context.Context, g *pg.Group, k int) error { return pg.AllReduce(ctx, g, x(k), pg.Sum) })
	add("allreduce of bfloat16", func(ctx context.Context, g *pg.Group, k int) error {
		return pg.AllReduce(ctx, g, make([]pg.BF16, k), pg.Sum)
	})
	add("reducescatter", func(ctx context.Context, g *pg.Group, k int) error {
		return pg.ReduceScatter(ctx, g, x(k), x(k*g.Size()), pg.Sum)
	})
	add("allgather", func(ctx context.Context, g *pg.Group, k int) error {
		return pg.AllGather(ctx, g, x(k*g.Size()),
			x(k))
	})
	add("alltoall", func(ctx context.Context, g *pg.Group, k int) error {
		return pg.AllToAll(ctx, g, x(k*g.Size()), x(k*g.Size()))
	})
	add("broadcast", func(ctx context.Context, g *pg.Group, k int) error { return pg.Broadcast(ctx, g, x(k), 0) })
	add("reduce", func(ctx context.Context, g *pg.Group, k int) error { return pg.Reduce(ctx, g, x(k), 0, pg.Sum) })
	add("gather", func(ctx context.Context, g *pg.Group, k int) error {
		return pg.Gather(ctx, g, x(k*g.Size()), x(k),
			0)
	})
	add("scatter", func(ctx context.Context, g *pg.Group, k int) error {
		return pg.Scatter(ctx, g, x(k), x(k*g.Size()),
			0)
	})
	add("allgatherv", func(ctx context.Context, g *pg.Group, k int) error {
		return pg.AllGatherV(ctx, g, x(k*g.Size()), x(k), slices.Repeat([]int{k}, g.Size()))
	})
	add("allgatherv of one part", func(ctx context.Context, g *pg.Group, k int) error {
		counts := make([]int, g.Size())
		counts[0] = k
		return pg.AllGatherV(ctx, g, x(k), x(counts[g.Rank()]), counts)
	})
	add("alltoallv", func(ctx context.Context, g *pg.Group, k int) error {
		counts := slices.Repeat([]int{k}, g.Size())
		return pg.AllToAllV(ctx, g, x(k*g.Size()), x(k*g.Size()), counts, counts)
	})
	add("alltoallv that is sent and not expected", func(ctx context.Context, g *pg.Group, k int) error {
		counts, none := make([]int, g.Size()), make([]int, g.Size())
		counts[(g.Rank()+1)%g.Size()] = k
		return pg.AllToAllV(ctx, g, nil, x(k), counts, none)
	})
	return all
}

// silent are calls in which ranks wait for each other, and send each other nothing.
func silent() []differing {
	x := func(k int) []float32 { return make([]float32, k) }
	root := func(g *pg.Group, odd bool) int {
		if odd {
			return g.Rank()
		}
		return 0
	}
	return []differing{
		{"roots of a reduce", func(ctx context.Context, g *pg.Group, odd bool) error {
			return pg.Reduce(ctx, g, x(4), root(g, odd), pg.Sum)
		}},
		{"roots of a gather", func(ctx context.Context, g *pg.Group, odd bool) error {
			return pg.Gather(ctx, g, x(4*g.Size()), x(4), root(g, odd))
		}},
		{"roots of a scatter", func(ctx context.Context, g *pg.Group, odd bool) error {
			return pg.Scatter(ctx, g, x(4), x(4*g.Size()), root(g, odd))
		}},
		{"roots of a broadcast", func(ctx context.Context, g *pg.Group, odd bool) error {
			return pg.Broadcast(ctx, g, x(4), root(g, odd))
		}},
		{"parts of an allgatherv", func(ctx context.Context, g *pg.Group, odd bool) error {
			counts := make([]int, g.Size())
			if odd {
				counts[0] = 5 // all others are waited for, and wait
			} else {
				counts[g.Size()-1] = 5
			}
			return pg.AllGatherV(ctx, g, x(5), x(counts[g.Rank()]), counts)
		}},
		{"an operation that a rank leaves out", func(ctx context.Context, g *pg.Group, odd bool) error {
			if !odd {
				if err := g.Barrier(ctx); err != nil {
					return err
				}
			}
			return pg.Reduce(ctx, g, x(4), 0, pg.Sum)
		}},
	}
}

// mustDiffer makes the call and, if that ends well here because this rank needed nothing of those
// that disagree, a barrier, and one more if those found out in the first when they had told this
// rank already that they were there: it must end with a *MismatchError that names two different
// calls.
func mustDiffer(ctx context.Context, g *pg.Group, d differing) error {
	err := d.call(ctx, g, g.Rank() == g.Size()-1)
	for barriers := 0; err == nil && barriers < 2; barriers++ {
		err = g.Barrier(ctx)
	}
	var m *pg.MismatchError
	if !errors.As(err, &m) {
		return fmt.Errorf("%s: got %v, want a *MismatchError", d.name, err)
	}
	if m.CallA == m.CallB || m.RankA == m.RankB || strings.Contains(m.Error(), "kind(") {
		return fmt.Errorf("%s: %v does not tell two calls of two ranks", d.name, m)
	}
	return nil
}

// Whatever the ranks' calls differ in, nothing at one and something at others included, all get a
// *MismatchError, and soon.
func TestEveryDifferenceIsAMismatch(t *testing.T) {
	for _, n := range []int{2, 3, 5} {
		for _, d := range append(nothings(5, 100_000), silent()...) {
			t.Run(fmt.Sprintf("%s/%d", d.name, n), func(t *testing.T) {
				gs, err := pg.Local(n, pg.Config{Timeout: 30 * time.Second})
				if err != nil {
					t.Fatal(err)
				}
				var wg sync.WaitGroup
				for _, g := range gs {
					wg.Go(func() {
						if err := mustDiffer(t.Context(), g, d); err != nil {
							t.Errorf("rank %d: %v", g.Rank(), err)
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

// The same between processes; and after Recover the group works, and tells of what differs then.
func TestEveryDifferenceIsAMismatchOfProcesses(t *testing.T) {
	for _, tr := range transports {
		t.Run(tr, func(t *testing.T) {
			pgtest.Run(t, 3, func(t *testing.T, g *pg.Group) {
				ctx := t.Context()
				past, err := g.Split(ctx, 0, 0) // not concerned by a failure of g
				if err != nil {
					t.Fatal(err)
				}
				defer past.Close()
				for _, d := range append(nothings(5, 100_000), silent()...) {
					if err := mustDiffer(ctx, g, d); err != nil {
						t.Fatal(err)
					}
					if err := g.Recover(ctx); err != nil {
						t.Fatalf("%s: recover: %v", d.name, err)
					}
					x := []int64{1}
					if err := pg.AllReduce(ctx, g, x, pg.Sum); err != nil || x[0] != 3 {
						t.Fatalf("%s: after recover: %v, %v", d.name, x, err)
					}
					// The next difference fails g also at a rank that is in the allreduce.
					if err := past.Barrier(ctx); err != nil {
						t.Fatalf("%s: after the allreduce: %v", d.name, err)
					}
				}
			}, pgtest.Transport(tr))
		})
	}
}

// A call of nothing is a barrier: no rank returns before all have called.
func TestEmptyCallsAreBarriers(t *testing.T) {
	for _, d := range nothings(0, 0) {
		if strings.HasPrefix(d.name, "alltoallv") || !strings.HasSuffix(d.name, "of nothing at one rank") {
			continue
		}
		t.Run(d.name, func(t *testing.T) {
			gs, err := pg.Local(6, pg.Config{Timeout: 30 * time.Second})
			if err != nil {
				t.Fatal(err)
			}
			var mu sync.Mutex
			called := 0
			var wg, others sync.WaitGroup
			others.Add(len(gs) - 1)
			for _, g := range gs {
				wg.Go(func() {
					if g.Rank() == 3 { // comes last
						others.Wait()
					}
					mu.Lock()
					called++
					mu.Unlock()
					if g.Rank() != 3 {
						others.Done()
					}
					if err := d.call(t.Context(), g, false); err != nil {
						t.Errorf("rank %d: %v", g.Rank(), err)
					}
					mu.Lock()
					defer mu.Unlock()
					if called != len(gs) {
						t.Errorf("rank %d is through when %d ranks have called", g.Rank(), called)
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
