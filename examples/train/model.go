package main

import (
	"fmt"
	"math"

	"tutti/examples/internal/nn"
)

// shape says how large a model is. heads divides dim.
type shape struct{ vocab, dim, heads, layers, seq int }

func (s shape) check() error {
	for _, p := range []struct {
		name  string
		value int
	}{{"dim", s.dim}, {"heads", s.heads}, {"layers", s.layers}, {"seq", s.seq}} {
		if p.value < 1 || p.value > 1<<16 {
			return fmt.Errorf("--%s is %d, want 1..%d", p.name, p.value, 1<<16)
		}
	}
	if s.dim%s.heads != 0 {
		return fmt.Errorf("--dim %d does not divide by --heads %d", s.dim, s.heads)
	}
	return nil
}

// model is a language model: a transformer with RMS normalisation before each half of a block,
// learned positions and no biases. All weights are one slice and all gradients another, in the
// order in which backward finishes them: the head, the blocks from last to first, the embeddings.
// Each of these is a bucket, which can be reduced as soon as it is ready.
type model[T nn.Float] struct {
	shape
	weights []T
	grads   []T // the batch's loss, then one gradient for every weight
	buckets []span
	w, g    layout[T] // views of weights and grads
}

// span is a range of grads.
type span struct{ begin, end int }

// layout names the parts of the weights, or of their gradients.
type layout[T nn.Float] struct {
	norm, head      []T // [dim], [dim,vocab]
	blocks          []block[T]
	token, position []T // [vocab,dim], [seq,dim]
}

type block[T nn.Float] struct {
	norm1, qkv, proj []T // [dim], [dim,3dim], [dim,dim]
	norm2, up, down  []T // [dim], [dim,4dim], [4dim,dim]
}

// size is the number of weights.
func (s shape) size() int {
	_, n := lay[float32](s, nil)
	return n[len(n)-1]
}

// lay cuts x, nil or of the model's size, into its parts. ends says where each bucket ends.
func lay[T nn.Float](s shape, x []T) (l layout[T], ends []int) {
	at := 0
	cut := func(n int) (part []T) {
		if x != nil {
			part = x[at : at+n : at+n]
		}
		at += n
		return part
	}
	bucket := func() { ends = append(ends, at) }
	d := s.dim
	l.norm, l.head = cut(d), cut(d*s.vocab)
	bucket()
	l.blocks = make([]block[T], s.layers)
	for i := s.layers - 1; i >= 0; i-- {
		l.blocks[i] = block[T]{norm1: cut(d), qkv: cut(d * 3 * d), proj: cut(d * d), norm2: cut(d), up: cut(d * 4 * d),
			down: cut(4 * d * d)}
		bucket()
	}
	l.token, l.position = cut(s.vocab*d), cut(s.seq*d)
	bucket()
	return l, ends
}

// newModel makes a model whose gradients live in grads, 1+size elements. Its weights are zero.
func newModel[T nn.Float](s shape, grads []T) *model[T] {
	m := &model[T]{shape: s, weights: make([]T, s.size()), grads: grads}
	var ends []int
	m.w, ends = lay(s, m.weights)
	m.g, _ = lay(s, grads[1:])
	begin := 0 // the loss travels with the first bucket
	for _, end := range ends {
		m.buckets = append(m.buckets, span{begin, 1 + end})
		begin = 1 + end
	}
	return m
}

// init draws the weights: normal, with a deviation that keeps the size of what passes through a
// layer.
func (m *model[T]) init(seed uint64) {
	stream := uint64(0)
	fill := func(x []T, deviation float64) {
		r := nn.NewRandom(seed, stream)
		stream++
		for i := range x {
			x[i] = T(r.Normal(uint64(i)) * deviation)
		}
	}
	ones := func(x []T) {
		for i := range x {
			x[i] = 1
		}
	}
	in := 1 / math.Sqrt(float64(m.dim))
	residual := 1 / math.Sqrt(2*float64(m.layers)) // each block adds twice to the residual
	fill(m.w.token, 0.5)
	fill(m.w.position, 0.1)
	for _, b := range m.w.blocks {
		ones(b.norm1)
		ones(b.norm2)
		fill(b.qkv, in)
		fill(b.proj, in*residual)
		fill(b.up, in)
		fill(b.down, in*residual/2)
	}
	ones(m.w.norm)
	fill(m.w.head, 0.1*in) // nearly uniform predictions: the loss begins at ln(vocab)
}

// activations is what forward leaves for backward: memory for a number of sequences.
type activations[T nn.Float] struct {
	sequences    int
	layers       []layerState[T]
	out, norm    []T // after the last block, and normalised
	logits       []T
	dx, dh, dact []T // backward's working space
	dqkv         []T
	scratch      []T
}

type layerState[T nn.Float] struct {
	in, norm1, qkv, probs, att []T
	mid, norm2, up, act        []T
}

func (m *model[T]) newActivations(sequences int) *activations[T] {
	rows, d := sequences*m.seq, m.dim
	mem := func(columns int) []T { return make([]T, rows*columns) }
	a := &activations[T]{sequences: sequences, out: mem(d), norm: mem(d), logits: mem(m.vocab),
		dx: mem(d), dh: mem(d), dact: mem(4 * d), dqkv: mem(3 * d), scratch: make([]T, m.seq)}
	for range m.layers {
		a.layers = append(a.layers, layerState[T]{in: mem(d), norm1: mem(d), qkv: mem(3 * d),
			probs: mem(m.heads * m.seq), att: mem(d),
			mid: mem(d), norm2: mem(d), up: mem(4 * d), act: mem(4 * d)})
	}
	return a
}

// forward computes the logits [sequences*seq, vocab] of tokens [sequences*seq].
func (m *model[T]) forward(a *activations[T], tokens []byte) []T {
	d, rows := m.dim, a.sequences*m.seq
	x := a.out
	if m.layers > 0 {
		x = a.layers[0].in
	}
	for i, token := range tokens {
		e, p := m.w.token[int(token)*d:][:d], m.w.position[i%m.seq*d:][:d]
		for j := range d {
			x[i*d+j] = e[j] + p[j]
		}
	}
	for l, w := range m.w.blocks {
		s, next := &a.layers[l], a.out
		if l+1 < m.layers {
			next = a.layers[l+1].in
		}
		nn.RMSNorm(s.norm1, s.in, w.norm1, rows, d)
		mul(s.qkv, s.norm1, w.qkv, rows, d, 3*d)
		for b := range a.sequences {
			q, k, v := m.split(s.qkv, b)
			nn.Attention(m.part(s.att, b), q, k, v, m.heatmap(s.probs, b), m.seq, 0, m.heads, d/m.heads)
		}
		copy(s.mid, s.in)
		nn.MatMul(s.mid, s.att, w.proj, rows, d, d)
		nn.RMSNorm(s.norm2, s.mid, w.norm2, rows, d)
		mul(s.up, s.norm2, w.up, rows, d, 4*d)
		nn.SiLU(s.act, s.up)
		copy(next, s.mid)
		nn.MatMul(next, s.act, w.down, rows, 4*d, d)
	}
	nn.RMSNorm(a.norm, a.out, m.w.norm, rows, d)
	mul(a.logits, a.norm, m.w.head, rows, d, m.vocab)
	return a.logits
}

// mul is nn.MatMul that overwrites c.
func mul[T nn.Float](c, a, b []T, m, k, n int) {
	clear(c)
	nn.MatMul(c, a, b, m, k, n)
}

// split returns the queries, keys and values of sequence b.
func (m *model[T]) split(qkv []T, b int) (q, k, v nn.Rows[T]) {
	x, stride := qkv[b*m.seq*3*m.dim:], 3*m.dim
	return nn.Rows[T]{Data: x, Stride: stride}, nn.Rows[T]{Data: x[m.dim:], Stride: stride},
		nn.Rows[T]{Data: x[2*m.dim:], Stride: stride}
}

func (m *model[T]) part(x []T, b int) nn.Rows[T] {
	return nn.Rows[T]{Data: x[b*m.seq*m.dim:], Stride: m.dim}
}

func (m *model[T]) heatmap(x []T, b int) []T {
	n := m.heads * m.seq * m.seq
	return x[b*n:][:n]
}

// gradients sets grads to the loss of predicting targets from tokens, summed over all positions and
// times scale, and to its gradients. It calls ready(i) as soon as bucket i is complete and will not
// be written again: what ready starts runs while the other buckets are computed.
func (m *model[T]) gradients(a *activations[T], tokens, targets []byte, scale T, ready func(bucket int)) {
	logits := m.forward(a, tokens)
	clear(m.grads)
	d, rows := m.dim, a.sequences*m.seq

	dlogits := logits
	m.grads[0] = T(nn.CrossEntropyGrad(dlogits, targets, rows, m.vocab, scale)) * scale
	nn.MatMulAT(m.g.head, a.norm, dlogits, rows, d, m.vocab)
	clear(a.dh)
	nn.MatMulBT(a.dh, dlogits, m.w.head, rows, m.vocab, d)
	clear(a.dx)
	nn.RMSNormGrad(a.dx, m.g.norm, a.dh, a.out, m.w.norm, rows, d)
	ready(0)

	// a.dx is the gradient of the residual; what a half of a block adds to it passes by that half's
	// own way as well.
	for l := m.layers - 1; l >= 0; l-- {
		s, w, g := &a.layers[l], m.w.blocks[l], m.g.blocks[l]
		nn.MatMulAT(g.down, s.act, a.dx, rows, 4*d, d)
		clear(a.dact)
		nn.MatMulBT(a.dact, a.dx, w.down, rows, d, 4*d)
		nn.SiLUGrad(a.dact, s.up)
		nn.MatMulAT(g.up, s.norm2, a.dact, rows, d, 4*d)
		clear(a.dh)
		nn.MatMulBT(a.dh, a.dact, w.up, rows, 4*d, d)
		nn.RMSNormGrad(a.dx, g.norm2, a.dh, s.mid, w.norm2, rows, d)

		nn.MatMulAT(g.proj, s.att, a.dx, rows, d, d)
		clear(a.dh)
		nn.MatMulBT(a.dh, a.dx, w.proj, rows, d, d)
		clear(a.dqkv)
		for b := range a.sequences {
			q, k, v := m.split(s.qkv, b)
			dq, dk, dv := m.split(a.dqkv, b)
			nn.AttentionGrad(dq, dk, dv, m.part(a.dh, b), q, k, v, m.heatmap(s.probs, b), a.scratch, m.seq, m.heads,
				d/m.heads)
		}
		nn.MatMulAT(g.qkv, s.norm1, a.dqkv, rows, d, 3*d)
		clear(a.dh)
		nn.MatMulBT(a.dh, a.dqkv, w.qkv, rows, 3*d, d)
		nn.RMSNormGrad(a.dx, g.norm1, a.dh, s.in, w.norm1, rows, d)
		ready(m.layers - l)
	}

	for i, token := range tokens {
		e, p := m.g.token[int(token)*d:][:d], m.g.position[i%m.seq*d:][:d]
		for j, v := range a.dx[i*d:][:d] {
			e[j] += v
			p[j] += v
		}
	}
	ready(len(m.buckets) - 1)
}

// adam is the optimiser of Kingma and Ba, "Adam: A Method for Stochastic Optimization", 2015.
type adam[T nn.Float] struct{ mean, square []T }

func newAdam[T nn.Float](n int) *adam[T] { return &adam[T]{make([]T, n), make([]T, n)} }

// update moves the weights whose gradients lie in the span s of grads. step counts from 1.
func (o *adam[T]) update(m *model[T], s span, step int, rate float64) {
	const beta1, beta2, epsilon = 0.9, 0.95, 1e-8
	begin, end := max(s.begin-1, 0), s.end-1
	size := T(rate * math.Sqrt(1-math.Pow(beta2, float64(step))) / (1 - math.Pow(beta1, float64(step))))
	mean, square, weights := o.mean[begin:end], o.square[begin:end], m.weights[begin:end]
	for i, g := range m.grads[begin+1 : end+1] {
		mean[i] += (1 - beta1) * (g - mean[i])
		square[i] += (1 - beta2) * (g*g - square[i])
		weights[i] -= size * mean[i] / (T(math.Sqrt(float64(square[i]))) + epsilon)
	}
}
