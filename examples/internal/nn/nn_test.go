package nn

import (
	"math"
	"testing"

	"pgregory.net/rapid"
)

func normals(seed uint64, n int) []float64 {
	x, r := make([]float64, n), NewRandom(seed, 0)
	for i := range x {
		x[i] = r.Normal(uint64(i))
	}
	return x
}

func near(t interface{ Fatalf(string, ...any) }, what string, got, want []float64, tolerance float64) {
	if len(got) != len(want) {
		t.Fatalf("%s: %d elements, want %d", what, len(got), len(want))
	}
	for i := range want {
		if d := math.Abs(got[i] - want[i]); !(d <= tolerance*(1+math.Abs(want[i]))) {
			t.Fatalf("%s: element %d is %g, want %g", what, i, got[i], want[i])
		}
	}
}

// The three products against the definition, for shapes on both sides of the unrolling.
func TestMatMul(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		dim := rapid.IntRange(1, 11)
		m, k, n := dim.Draw(t, "m"), dim.Draw(t, "k"), dim.Draw(t, "n")
		a, b, c := normals(1, m*k), normals(2, k*n), normals(3, m*n)
		want := make([]float64, m*n)
		at, bt := make([]float64, k*m), make([]float64, n*k)
		for i := range m {
			for j := range n {
				want[i*n+j] = c[i*n+j]
				for l := range k {
					want[i*n+j] += a[i*k+l] * b[l*n+j]
					at[l*m+i], bt[j*k+l] = a[i*k+l], b[l*n+j]
				}
			}
		}
		for what, f := range map[string]func(c []float64){
			"a b":   func(c []float64) { MatMul(c, a, b, m, k, n) },
			"a bT":  func(c []float64) { MatMulBT(c, a, bt, m, k, n) },
			"aT' b": func(c []float64) { MatMulAT(c, at, b, k, m, n) },
		} {
			got := append([]float64(nil), c...)
			f(got)
			near(t, what, got, want, 1e-12)
		}
	})
}

// A row's result has the same bits whether it is computed alone or among others.
func TestRowsAreIndependent(t *testing.T) {
	const m, k, n = 5, 13, 9
	a, b := make([]float32, m*k), make([]float32, k*n)
	r := NewRandom(7, 7)
	for i := range a {
		a[i] = float32(r.Normal(uint64(i)))
	}
	for i := range b {
		b[i] = float32(r.Normal(uint64(1000 + i)))
	}
	for _, f := range []func(c, a, b []float32, m, k, n int){MatMul[float32], MatMulBT[float32]} {
		all := make([]float32, m*n)
		f(all, a, b, m, k, n)
		for i := range m {
			one := make([]float32, n)
			f(one, a[i*k:][:k], b, 1, k, n)
			for j := range one {
				if one[j] != all[i*n+j] {
					t.Fatalf("row %d column %d: %g alone, %g among others", i, j, one[j], all[i*n+j])
				}
			}
		}
	}
}

// slope is the numeric gradient of f at x.
func slope(x []float64, f func() float64) []float64 {
	const h = 1e-5
	g := make([]float64, len(x))
	for i := range x {
		v := x[i]
		x[i] = v + h
		up := f()
		x[i] = v - h
		g[i] = (up - f()) / (2 * h)
		x[i] = v
	}
	return g
}

// weigh makes one number of a function's output, so that its gradient by the output is the weights.
func weigh(y, w []float64) float64 { return dot(y, w) }

func TestRMSNormGrad(t *testing.T) {
	const m, d = 3, 7
	x, gain, dy := normals(1, m*d), normals(2, d), normals(3, m*d)
	f := func() float64 {
		y := make([]float64, m*d)
		RMSNorm(y, x, gain, m, d)
		return weigh(y, dy)
	}
	dx, dgain := make([]float64, m*d), make([]float64, d)
	RMSNormGrad(dx, dgain, dy, x, gain, m, d)
	near(t, "dx", dx, slope(x, f), 1e-7)
	near(t, "dgain", dgain, slope(gain, f), 1e-7)
}

func TestSiLUGrad(t *testing.T) {
	x, dy := normals(1, 20), normals(2, 20)
	want := slope(x, func() float64 {
		y := make([]float64, len(x))
		SiLU(y, x)
		return weigh(y, dy)
	})
	SiLUGrad(dy, x)
	near(t, "dx", dy, want, 1e-7)
}

func TestAttentionGrad(t *testing.T) {
	const n, heads, dim, w = 5, 2, 3, 6
	qkv, dy := normals(1, n*3*w), normals(2, n*w)
	part := func(x []float64, i int) Rows[float64] { return Rows[float64]{x[i*w:], 3 * w} }
	probs := make([]float64, heads*n*n)
	f := func() float64 {
		y := Rows[float64]{make([]float64, n*w), w}
		Attention(y, part(qkv, 0), part(qkv, 1), part(qkv, 2), probs, n, 0, heads, dim)
		return weigh(y.Data, dy)
	}
	want := slope(qkv, f)
	f()
	got := make([]float64, len(qkv))
	AttentionGrad(part(got, 0), part(got, 1), part(got, 2), Rows[float64]{dy, w}, part(qkv, 0), part(qkv, 1),
		part(qkv, 2), probs, make([]float64, n), n, heads, dim)
	near(t, "dqkv", got, want, 1e-7)
}

// Queries that come later, with what went before them in the cache, see what they would have seen
// in one call.
func TestAttentionWithPast(t *testing.T) {
	const n, heads, dim, w = 6, 2, 3, 6
	q, k, v := Rows[float64]{normals(1, n*w), w}, Rows[float64]{normals(2, n*w), w}, Rows[float64]{normals(3, n*w), w}
	all := make([]float64, n*w)
	Attention(Rows[float64]{all, w}, q, k, v, make([]float64, heads*n*n), n, 0, heads, dim)
	for past := range n {
		got := make([]float64, (n-past)*w)
		Attention(Rows[float64]{got, w}, Rows[float64]{q.Data[past*w:], w}, k, v, make([]float64, heads*(n-past)*n),
			n-past, past, heads, dim)
		near(t, "out", got, all[past*w:], 0)
	}
}

func TestCrossEntropyGrad(t *testing.T) {
	const m, v = 3, 5
	x, targets := normals(1, m*v), []byte{4, 0, 2}
	f := func() float64 {
		return CrossEntropyGrad(append([]float64(nil), x...), targets, m, v, 1)
	}
	want := slope(x, f)
	for i := range want {
		want[i] *= 0.25
	}
	CrossEntropyGrad(x, targets, m, v, 0.25)
	near(t, "dlogits", x, want, 1e-7)
}

func TestNormalMoments(t *testing.T) {
	const n = 100000
	var sum, square float64
	for _, x := range normals(42, n) {
		sum += x
		square += x * x
	}
	if mean, variance := sum/n, square/n; math.Abs(mean) > 0.02 || math.Abs(variance-1) > 0.02 {
		t.Fatalf("mean %g and mean square %g of %d numbers, want about 0 and 1", mean, variance, n)
	}
}

func BenchmarkMatMul(b *testing.B) {
	const m, k, n = 256, 64, 256
	x, y, z := make([]float32, m*k), make([]float32, k*n), make([]float32, m*n)
	for what, f := range map[string]func(){
		"AB":  func() { MatMul(z, x, y, m, k, n) },
		"ABT": func() { MatMulBT(z, x, y, m, k, n) },
		"ATB": func() { MatMulAT(y, x, z, m, k, n) },
	} {
		b.Run(what, func(b *testing.B) {
			for b.Loop() {
				f()
			}
			b.ReportMetric(2*m*k*n*float64(b.N)/float64(b.Elapsed().Nanoseconds()), "GFLOP/s")
		})
	}
}
