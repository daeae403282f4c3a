//go:build !race

package pg_test

import (
	"context"
	"maps"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"tutti/kernels"
	"tutti/pg"
	"tutti/pg/pgtest"
)

// singly are collectives on plain memory, each of which returns its rank's result.
var singly = map[string]func(ctx context.Context, g *pg.Group, x []float32) ([]float32, error){
	"allreduce": func(ctx context.Context, g *pg.Group, x []float32) ([]float32, error) {
		return x, pg.AllReduce(ctx, g, x, pg.Sum)
	},
	"mean": func(ctx context.Context, g *pg.Group, x []float32) ([]float32, error) {
		return x, pg.AllReduce(ctx, g, x, pg.Avg)
	},
	"reduce_scatter": func(ctx context.Context, g *pg.Group, x []float32) ([]float32, error) {
		y := make([]float32, len(x)/g.Size())
		return y, pg.ReduceScatter(ctx, g, y, x, pg.Sum)
	},
	"allgather": func(ctx context.Context, g *pg.Group, x []float32) ([]float32, error) {
		y := make([]float32, len(x)*g.Size())
		return y, pg.AllGather(ctx, g, y, x)
	},
	"allgather in place": func(ctx context.Context, g *pg.Group, x []float32) ([]float32, error) {
		part := len(x) / g.Size()
		return x, pg.AllGather(ctx, g, x, x[g.Rank()*part:(g.Rank()+1)*part])
	},
	"alltoall": func(ctx context.Context, g *pg.Group, x []float32) ([]float32, error) {
		y := make([]float32, len(x))
		return y, pg.AllToAll(ctx, g, y, x)
	},
	"broadcast": func(ctx context.Context, g *pg.Group, x []float32) ([]float32, error) {
		return x, pg.Broadcast(ctx, g, x, 1)
	},
	"scatter": func(ctx context.Context, g *pg.Group, x []float32) ([]float32, error) {
		y := make([]float32, len(x)/g.Size())
		return y, pg.Scatter(ctx, g, y, x, 2)
	},
	"gather": func(ctx context.Context, g *pg.Group, x []float32) ([]float32, error) {
		y := make([]float32, len(x)*g.Size())
		return y, pg.Gather(ctx, g, y, x, 0)
	},
}

// TestSingleCopies: on plain memory that the peers read, every collective has the bits that it has
// through rings, and little goes through these.
func TestSingleCopies(t *testing.T) {
	pgtest.Run(t, 3, func(t *testing.T, g *pg.Group) {
		unix.Prctl(unix.PR_SET_PTRACER, ^uintptr(0), 0, 0, 0) // where yama asks for that
		ctx := t.Context()
		const little = 16 << 10
		for late := time.Now().Add(30 * time.Second); ; { // until all links know that they can read
			before, x := g.Sent(t), make([]float32, 3<<14)
			if err := pg.AllReduce(ctx, g, x, pg.Sum); err != nil {
				t.Fatal(err)
			}
			much := []int32{0}
			if g.Sent(t)-before > little {
				much[0] = 1
			}
			if err := pg.AllReduce(ctx, g, much, pg.Max); err != nil {
				t.Fatal(err)
			}
			if much[0] == 0 {
				break
			}
			if time.Now().After(late) {
				t.Fatal("no single copies are made")
			}
		}
		random := rand.New(rand.NewPCG(3, uint64(g.Rank())))
		for _, name := range slices.Sorted(maps.Keys(singly)) {
			for _, count := range []int{3 << 14, 3 * 99_991, 3 << 18} {
				x := make([]float32, count)
				for i := range x {
					x[i] = random.Float32()
				}
				algorithm := "oneshot"
				if name == "reduce_scatter" {
					algorithm = "pairwise"
				}
				var results [2][]float32
				for i, algorithm := range []string{algorithm, "auto"} {
					if err := g.SetAlgorithm(algorithm); err != nil {
						t.Fatal(err)
					}
					before := g.Sent(t)
					y, err := singly[name](ctx, g, slices.Clone(x))
					if err != nil {
						t.Fatalf("%s of %d elements, %s: %v", name, count, algorithm, err)
					}
					if n := g.Sent(t) - before; algorithm == "auto" && n > little {
						t.Errorf("%s of %d elements sends %d bytes", name, count, n)
					}
					results[i] = y
				}
				if !slices.Equal(results[0], results[1]) {
					t.Errorf("%s of %d elements has other bits with single copies", name, count)
				}
			}
		}
	}, pgtest.Transport("shm"), pgtest.Config(pg.Config{SingleCopy: "on"}))
}

// TestWaysOfPlainMemory: while calls on plain memory try all ways to copy it, and afterwards, every
// collective has the bits that it has through rings.
func TestWaysOfPlainMemory(t *testing.T) {
	for _, single := range []string{"auto", "off"} {
		t.Run(single, func(t *testing.T) {
			pgtest.Run(t, 3, func(t *testing.T, g *pg.Group) {
				unix.Prctl(unix.PR_SET_PTRACER, ^uintptr(0), 0, 0, 0) // where yama asks for that
				random := rand.New(rand.NewPCG(5, uint64(g.Rank())))
				for _, name := range slices.Sorted(maps.Keys(singly)) {
					algorithm := "oneshot" // as with single copies
					if name == "reduce_scatter" {
						algorithm = "pairwise"
					}
					past := g.SentPast()
					for i := range 30 { // 16 before the trial, and twelve of it
						x := make([]float32, 3*50_021)
						for i := range x {
							x[i] = random.Float32()
						}
						var results [2][]float32
						for j, algorithm := range []string{algorithm, "auto"} {
							if err := g.SetAlgorithm(algorithm); err != nil {
								t.Fatal(err)
							}
							y, err := singly[name](t.Context(), g, slices.Clone(x))
							if err != nil {
								t.Fatalf("%s, call %d, %s: %v", name, i, algorithm, err)
							}
							results[j] = y
						}
						if !slices.Equal(results[0], results[1]) {
							t.Fatalf("%s, call %d: other bits", name, i)
						}
					}
					sent := []uint64{g.SentPast() - past}
					if err := pg.AllReduce(t.Context(), g, sent, pg.Max); err != nil {
						t.Fatal(err)
					}
					// Two go on with the trial of another one, of the same kind.
					first := name != "mean" && name != "allgather in place"
					if kernels.NonTemporal() && first && sent[0] == 0 {
						t.Errorf("%s: no rank has sent anything past its caches", name)
					}
				}
			}, pgtest.Transport("shm"), pgtest.Config(pg.Config{SingleCopy: single}))
		})
	}
}
