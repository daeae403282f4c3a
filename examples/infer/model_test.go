package main

import (
	"context"
	"fmt"
	"io"
	"math"
	"slices"
	"strings"
	"sync"
	"testing"

	"tutti/pg"
	"tutti/pg/pgtest"
)

// hall is where the parts of a model in one process meet: each reduce and gather takes two rounds
// of a barrier.
type hall struct {
	n       int
	mu      sync.Mutex
	arrived int
	turn    chan struct{}
	given   [][]float32
}

func newHall(n int) *hall { return &hall{n: n, turn: make(chan struct{}), given: make([][]float32, n)} }

func (h *hall) meet() {
	h.mu.Lock()
	turn := h.turn
	if h.arrived++; h.arrived == h.n {
		h.arrived, h.turn = 0, make(chan struct{})
		close(turn)
	}
	h.mu.Unlock()
	<-turn
}

type guest struct {
	*hall
	part int
}

func (g guest) alloc(n int) ([]float32, error) { return make([]float32, n), nil }

func (g guest) reduce(_ context.Context, x []float32) error {
	g.given[g.part] = append([]float32(nil), x...)
	g.meet()
	clear(x)
	for _, y := range g.given {
		for i, v := range y {
			x[i] += v
		}
	}
	g.meet()
	return nil
}

func (g guest) gather(_ context.Context, dst, src []float32) error {
	g.given[g.part] = src
	g.meet()
	for p, y := range g.given {
		copy(dst[p*len(src):], y)
	}
	g.meet()
	return nil
}

var small = shape{dim: 16, heads: 4, layers: 2, context: 12}

// read is the logits after each token, read in pieces.
func read(m *model, text string, pieces ...int) ([]float32, error) {
	var all []float32
	for _, n := range pieces {
		logits, err := m.forward(context.Background(), []byte(text[:n]))
		if err != nil {
			return nil, err
		}
		all, text = append(all, logits...), text[n:]
	}
	return all, nil
}

func differ(a, b []float32) float64 {
	if len(a) != len(b) {
		return math.Inf(1)
	}
	worst := 0.0
	for i := range a {
		worst = max(worst, math.Abs(float64(a[i]-b[i])))
	}
	return worst
}

func TestPartsMatchWholeModel(t *testing.T) {
	const text = "some tokens"
	whole, err := newModel(small, 5, 0, 1, alone{})
	if err != nil {
		t.Fatal(err)
	}
	want, err := read(whole, text, len(text))
	if err != nil {
		t.Fatal(err)
	}
	spread := 0.0
	for _, v := range want {
		spread = max(spread, math.Abs(float64(v)))
	}
	if spread < 1 || math.IsNaN(spread) {
		t.Fatalf("logits are at most %g: nothing to compare", spread)
	}
	for _, parts := range []int{1, 2, 4} {
		for _, pieces := range [][]int{{11}, {4, 7}, {5, 1, 1, 1, 1, 1, 1}} {
			t.Run(fmt.Sprint(parts, pieces), func(t *testing.T) {
				h := newHall(parts)
				got, errs := make([][]float32, parts), make([]error, parts)
				var wg sync.WaitGroup
				for p := range parts {
					wg.Go(func() {
						var m *model
						if m, errs[p] = newModel(small, 5, p, parts, guest{h, p}); errs[p] == nil {
							got[p], errs[p] = read(m, text, pieces...)
						}
					})
				}
				wg.Wait()
				for p := range parts {
					if errs[p] != nil {
						t.Fatal(errs[p])
					}
					if d := differ(got[p], want); !(d < 1e-4) {
						t.Errorf("part %d differs from the whole by %g", p, d)
					}
					if d := differ(got[p], got[0]); d != 0 {
						t.Errorf("part %d differs from part 0 by %g", p, d)
					}
				}
			})
		}
	}
}

// Each part has its columns, or rows, of the whole's matrices.
func TestWeightsAreSharded(t *testing.T) {
	whole, _ := newModel(small, 5, 0, 1, alone{})
	const parts = 2
	d, w := small.dim, small.dim/parts
	for p := range parts {
		m, _ := newModel(small, 5, p, parts, alone{})
		for l, b := range m.blocks {
			a := whole.blocks[l]
			for i := range d {
				for j := range w {
					for k := range 3 {
						if b.qkv[i*3*w+k*w+j] != a.qkv[i*3*d+k*d+p*w+j] {
							t.Fatalf("part %d: qkv %d of row %d column %d", p, k, i, j)
						}
					}
					if b.proj[j*d+i] != a.proj[(p*w+j)*d+i] {
						t.Fatalf("part %d: proj row %d column %d", p, j, i)
					}
				}
			}
		}
	}
}

func TestCacheIsBounded(t *testing.T) {
	m, _ := newModel(small, 1, 0, 1, alone{})
	if _, err := read(m, "0123456789abc", 12, 1); err == nil {
		t.Fatal("13 tokens fit into a context of 12")
	}
}

func TestCheck(t *testing.T) {
	for parts, ok := range map[int]bool{1: true, 2: true, 4: true, 3: false, 8: false} {
		if err := small.check(parts); (err == nil) != ok {
			t.Errorf("%d parts: %v", parts, err)
		}
	}
	for _, s := range []shape{{}, {dim: 10, heads: 4, layers: 1, context: 1},
		{dim: -4, heads: 4, layers: 1, context: 1}, {dim: 4, heads: 4, layers: 1, context: 1 << 30}} {
		if s.check(1) == nil {
			t.Errorf("%+v passes", s)
		}
	}
}

// The comparison with one rank passes, and can fail: on all ranks.
func TestComparison(t *testing.T) {
	o := options{shape: small, prompt: "some", tokens: 5, seed: 1}
	for tolerance, ok := range map[float64]bool{1e-3: true, -1: false, math.NaN(): false} {
		o.tolerance = tolerance
		t.Run(fmt.Sprint(tolerance), func(t *testing.T) {
			pgtest.RunLocal(t, 2, func(t *testing.T, g *pg.Group) {
				var out strings.Builder
				err := infer(t.Context(), g, o, &out)
				if (err == nil) != ok || err != nil && !strings.Contains(err.Error(), "differ") {
					t.Errorf("%v", err)
				}
				if g.Rank() == 0 && !strings.Contains(out.String(), "differ by at most") {
					t.Errorf("rank 0 wrote %q", out.String())
				}
			})
		})
	}
}

// What is not a number is a difference, whatever comes before and after it.
func TestComparisonKeepsWhatIsNoNumber(t *testing.T) {
	o := options{shape: small, prompt: "some", tokens: 5, seed: 1}
	m, err := newModel(o.shape, o.seed, 0, 1, alone{})
	if err != nil {
		t.Fatal(err)
	}
	text, logits, err := write(t.Context(), m, o, nil, io.Discard, "alone")
	if err != nil {
		t.Fatal(err)
	}
	if d, err := compare(t.Context(), o, text, logits, io.Discard); d != 0 || err != nil {
		t.Fatalf("the logits differ from themselves by %g: %v", d, err)
	}
	for _, at := range []int{0, len(logits) / 2, len(logits) - 1} {
		wrong := slices.Clone(logits)
		wrong[at] = float32(math.NaN())
		if d, err := compare(t.Context(), o, text, wrong, io.Discard); !math.IsNaN(d) || err != nil {
			t.Errorf("logit %d of %d is not a number: they differ by %g, %v", at, len(logits), d, err)
		}
	}
}
