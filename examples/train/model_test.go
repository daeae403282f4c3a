package main

import (
	"bytes"
	"io"
	"math"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"tutti/examples/internal/nn"
	"tutti/pg"
	"tutti/pg/pgtest"
)

var tiny = shape{vocab: 7, dim: 4, heads: 2, layers: 2, seq: 5}

func tinyBatch(sequences int) (tokens, targets []byte) {
	r := nn.NewRandom(3, 3)
	tokens, targets = make([]byte, sequences*tiny.seq), make([]byte, sequences*tiny.seq)
	for i := range tokens {
		tokens[i], targets[i] = byte(r.Uint64(uint64(2*i))%uint64(tiny.vocab)),
			byte(r.Uint64(uint64(2*i+1))%uint64(tiny.vocab))
	}
	return tokens, targets
}

// Every weight's gradient against the slope of the loss.
func TestGradients(t *testing.T) {
	m := newModel(tiny, make([]float64, 1+tiny.size()))
	m.init(1)
	tokens, targets := tinyBatch(3)
	a := m.newActivations(3)
	const scale = 1.0 / 15
	loss := func() float64 {
		return scale * nn.CrossEntropyGrad(m.forward(a, tokens), targets, len(tokens), m.vocab, 1)
	}
	m.gradients(a, tokens, targets, scale, func(int) {})
	if got, want := m.grads[0], loss(); math.Abs(got-want) > 1e-12 {
		t.Fatalf("loss %g, want %g", got, want)
	}
	const h = 1e-5
	for i := range m.weights {
		w := m.weights[i]
		m.weights[i] = w + h
		up := loss()
		m.weights[i] = w - h
		want := (up - loss()) / (2 * h)
		m.weights[i] = w
		if got := m.grads[1+i]; math.Abs(got-want) > 1e-7*(1+math.Abs(want)) {
			t.Fatalf("gradient of weight %d is %g, the loss's slope is %g", i, got, want)
		}
	}
}

// A bucket is announced once, in order, and not written afterwards; together they are all of grads.
func TestBucketsAreFinalWhenReady(t *testing.T) {
	m := newModel(tiny, make([]float32, 1+tiny.size()))
	m.init(1)
	tokens, targets := tinyBatch(2)
	var seen [][]float32
	m.gradients(m.newActivations(2), tokens, targets, 0.1, func(i int) {
		if i != len(seen) {
			t.Fatalf("bucket %d is ready, want %d", i, len(seen))
		}
		seen = append(seen, append([]float32(nil), m.grads[m.buckets[i].begin:m.buckets[i].end]...))
	})
	at := 0
	for i, s := range m.buckets {
		if s.begin != at {
			t.Fatalf("bucket %d begins at %d, want %d", i, s.begin, at)
		}
		for j, v := range m.grads[s.begin:s.end] {
			if v != seen[i][j] {
				t.Fatalf("gradient %d of bucket %d was %g when ready and is %g at the end", j, i, seen[i][j], v)
			}
		}
		at = s.end
	}
	if len(seen) != len(m.buckets) || at != len(m.grads) {
		t.Fatalf("%d of %d buckets were ready and they end at %d of %d", len(seen), len(m.buckets), at, len(m.grads))
	}
}

// The parts of a batch, as ranks compute them, sum to the whole.
func TestPartsOfABatchSum(t *testing.T) {
	tokens, targets := tinyBatch(4)
	grads := func(parts int) []float64 {
		sum := make([]float64, 1+tiny.size())
		n := 4 / parts
		for p := range parts {
			m := newModel(tiny, make([]float64, len(sum)))
			m.init(1)
			at := p * n * tiny.seq
			m.gradients(m.newActivations(n), tokens[at:at+n*tiny.seq], targets[at:at+n*tiny.seq], 0.05, func(int) {})
			for i, g := range m.grads {
				sum[i] += g
			}
		}
		return sum
	}
	want := grads(1)
	for _, parts := range []int{2, 4} {
		for i, got := range grads(parts) {
			if math.Abs(got-want[i]) > 1e-12 {
				t.Fatalf("%d parts: gradient %d is %g, want %g", parts, i, got, want[i])
			}
		}
	}
}

// Ranks draw the batch that one rank would.
func TestBatchIsTheSameForAnyRanks(t *testing.T) {
	o := options{shape: tiny, batch: 4, seed: 9}
	text := encode([]byte(strings.Repeat("what is drawn does not depend on who draws it\n", 9)))
	for step := 1; step < 4; step++ {
		tokens, targets := newBatch(text, o, 0, 4).next(step)
		for i := range tokens[:len(tokens)-1] {
			if (i+1)%o.seq != 0 && targets[i] != tokens[i+1] {
				t.Fatalf("target %d is %d, want the next token, %d", i, targets[i], tokens[i+1])
			}
		}
		for r := range 4 {
			part, _ := newBatch(text, o, r, 1).next(step)
			if want := tokens[r*o.seq:][:o.seq]; !bytes.Equal(part, want) {
				t.Fatalf("step %d rank %d drew %v, want %v", step, r, part, want)
			}
		}
	}
}

// On one rank, without a group: the loss starts at that of a guess and falls, in the same bits each
// time.
func TestLossFalls(t *testing.T) {
	s := shape{vocab: vocabulary, dim: 16, heads: 2, layers: 1, seq: 8}
	o := options{shape: s, batch: 8, steps: 150, seed: 1, rate: 1e-2}
	learn := func() (first, last float32) {
		m := newModel(s, make([]float32, 1+s.size()))
		m.init(o.seed)
		batch := newBatch(encode([]byte(strings.Repeat("for i := range n {\n\tsum += x[i]\n}\n", 20))), o, 0, o.batch)
		a, optimizer := m.newActivations(o.batch), newAdam[float32](len(m.weights))
		for step := 1; step <= o.steps; step++ {
			tokens, targets := batch.next(step)
			m.gradients(a, tokens, targets, 1/float32(o.batch*o.seq), func(int) {})
			for _, b := range m.buckets {
				optimizer.update(m, b, step, rate(o, step))
			}
			last = m.grads[0]
			if step == 1 {
				first = last
			}
		}
		return first, last
	}
	first, last := learn()
	if guess := math.Log(vocabulary); math.Abs(float64(first)-guess) > 0.3 || last > 0.5 {
		t.Fatalf("loss went from %g to %g, want from about %g to less than 0.5", first, last, guess)
	}
	if f, l := learn(); f != first || l != last {
		t.Fatalf("a second run's loss went from %g to %g, the first's from %g to %g", f, l, first, last)
	}
}

func TestText(t *testing.T) {
	dir := t.TempDir()
	for name, text := range map[string]string{"b.go": "second\t~", "a/x.go": "first\n", "c.txt": "no",
		"testdata/d.go": "no"} {
		os.MkdirAll(filepath.Dir(filepath.Join(dir, name)), 0o755)
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	for limit, want := range map[int]string{100: "first\nsecond\t~", 8: "first\nse"} {
		if text, err := readText(dir, limit); err != nil || decode(encode(text)) != want {
			t.Errorf("read %q, %v; want %q", text, err, want)
		}
	}
	if got := decode(encode([]byte("a\xffé\r"))); got != "a????" {
		t.Errorf("unprintable characters read as %q", got)
	}
	if _, err := readText(filepath.Join(dir, "none"), 10); err == nil {
		t.Error("a missing file is no error")
	}
	if _, err := readText(t.TempDir(), 10); err == nil {
		t.Error("an empty directory is no error")
	}
	if text, err := readText("", 1000); err != nil || len(text) != 1000 {
		t.Errorf("standard library: %d bytes, %v", len(text), err)
	}
}

func TestDivide(t *testing.T) {
	for _, n := range []int{20, 100, 5000, 1 << 20} {
		learn, exam := divide(make([]byte, n))
		if len(learn)+len(exam) != n || len(exam) < n/40 || len(exam) > n/6 {
			t.Errorf("%d bytes are divided into %d and %d", n, len(learn), len(exam))
		}
	}
}

// One bit of one rank's weights is a failure on every rank.
func TestProof(t *testing.T) {
	for _, flip := range []bool{false, true} {
		pgtest.RunLocal(t, 3, func(t *testing.T, g *pg.Group) {
			weights := make([]float32, 1000)
			if flip && g.Rank() == 1 {
				weights[999] = math.Float32frombits(1)
			}
			if err := prove(t.Context(), g, weights, io.Discard); (err != nil) != flip {
				t.Errorf("flip %v: %v", flip, err)
			}
		})
	}
}

// When rank 0 finds no text, all ranks end with an error.
func TestMissingTextFailsOnAllRanks(t *testing.T) {
	o := options{shape: tiny, text: filepath.Join(t.TempDir(), "none"), limit: 1000}
	pgtest.RunLocal(t, 2, func(t *testing.T, g *pg.Group) {
		if _, err := shareText(t.Context(), g, o); err == nil || !strings.Contains(err.Error(), "no ") {
			t.Errorf("%v", err)
		}
	})
}

func TestOptionsAreChecked(t *testing.T) {
	good := options{shape: tiny, steps: 1, batch: 4, every: 1, limit: 1, dtype: "float32"}
	if err := good.check(2); err != nil {
		t.Error(err)
	}
	for what, spoil := range map[string]func(o *options){
		"batch": func(o *options) { o.batch = 5 }, "steps": func(o *options) { o.steps = 0 },
		"dtype": func(o *options) { o.dtype = "int8" },
		"seq":   func(o *options) { o.seq = 0 }, "heads": func(o *options) { o.heads = 3 },
		"bytes": func(o *options) { o.limit = -1 },
	} {
		o := good
		spoil(&o)
		if o.check(2) == nil {
			t.Errorf("%s: %+v passes", what, o)
		}
	}
}
