package stats

import (
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	"pgregory.net/rapid"
)

func TestBounds(t *testing.T) {
	// tables of the sign test
	for _, c := range []struct{ n, k int }{{6, 0}, {8, 0}, {9, 1}, {12, 2}, {20, 5}, {100, 39}} {
		if k, err := Bounds(c.n, 0.95); k != c.k || err != nil {
			t.Errorf("%d samples: %d, %v; want %d", c.n, k, err, c.k)
		}
	}
	for _, n := range []int{0, 1, 5} {
		if _, err := Bounds(n, 0.95); err == nil {
			t.Errorf("%d samples have an interval", n)
		}
	}
	for _, c := range []float64{0, 1, -1, 2, math.NaN()} {
		if _, err := Bounds(100, c); err == nil {
			t.Errorf("a confidence of %v is accepted", c)
		}
	}
}

// The interval holds the median of a skewed distribution as often as it says, and not much more
// often.
func TestIntervalHoldsTheMedian(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	const trials, n = 20_000, 12
	held := 0
	for range trials {
		xs := make([]float64, n)
		for i := range xs {
			xs[i] = rng.ExpFloat64()
		}
		lo, hi, err := Interval(xs, 0.95)
		if err != nil {
			t.Fatal(err)
		}
		if lo <= math.Ln2 && math.Ln2 <= hi {
			held++
		}
	}
	if p := float64(held) / trials; p < 0.95 || p > 0.97 { // 0.9614 for 12 samples
		t.Errorf("it holds the median with a probability of %v", p)
	}
}

func TestMedianAndGeomean(t *testing.T) {
	for _, c := range []struct {
		xs           []float64
		median, mean float64
	}{
		{[]float64{3}, 3, 3},
		{[]float64{8, 2}, 5, 4},
		{[]float64{100, 1, 10}, 10, 10},
		{[]float64{4, 1, 16, 1}, 2.5, math.Sqrt(8)},
	} {
		in := slices.Clone(c.xs)
		if m, g := Median(c.xs), Geomean(c.xs); m != c.median || math.Abs(g-c.mean) > 1e-12*g {
			t.Errorf("%v: median %v, geometric mean %v; want %v, %v", c.xs, m, g, c.median, c.mean)
		}
		if !slices.Equal(in, c.xs) {
			t.Errorf("median changed its argument to %v", c.xs)
		}
	}
	if !math.IsNaN(Median(nil)) || !math.IsNaN(Geomean(nil)) {
		t.Error("nothing has no middle")
	}
	rapid.Check(t, func(t *rapid.T) {
		xs := rapid.SliceOfN(rapid.Float64Range(0.01, 1e6), 1, 9).Draw(t, "xs")
		m := Median(xs)
		below, above := 0, 0
		for _, x := range xs {
			if x < m {
				below++
			}
			if x > m {
				above++
			}
		}
		if below > len(xs)/2 || above > len(xs)/2 {
			t.Fatalf("median %v of %v: %d below, %d above", m, xs, below, above)
		}
		if g := Geomean(xs); g < slices.Min(xs)*(1-1e-9) || g > slices.Max(xs)*(1+1e-9) {
			t.Fatalf("geometric mean %v of %v", g, xs)
		}
	})
}
