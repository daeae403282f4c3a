package main

import (
	"context"
	"fmt"
	"math"

	"tutti/examples/internal/nn"
)

// shape says how large a model is. heads divides dim; the number of parts divides heads (and so all
// that is cut: dim, 4 dim) and the vocabulary.
type shape struct{ dim, heads, layers, context int }

const vocabulary = 256 // bytes

func (s shape) check(parts int) error {
	switch {
	case s.dim < 1 || s.heads < 1 || s.layers < 1 || s.context < 1 || s.dim > 1<<14 || s.layers > 1<<10 ||
		s.context > 1<<13:
		return fmt.Errorf("--dim %d, --heads %d, --layers %d, %d characters: want positive numbers, at most %d, "+
			"the width, %d and %d", s.dim, s.heads, s.layers, s.context, 1<<14, 1<<10, 1<<13)
	case s.dim%s.heads != 0:
		return fmt.Errorf("--dim %d does not divide by --heads %d", s.dim, s.heads)
	case s.heads%parts != 0 || vocabulary%parts != 0:
		return fmt.Errorf("%d heads and %d characters do not divide among %d ranks", s.heads, vocabulary, parts)
	}
	return nil
}

// peers combines what the parts of a model computed. With one part both do nothing but, for gather,
// copy.
type peers interface {
	// reduce sums x over all parts, in place.
	reduce(ctx context.Context, x []float32) error
	// gather collects every part's src in dst, by part: len(dst) = parts*len(src).
	gather(ctx context.Context, dst, src []float32) error
	// alloc returns memory for reduce and gather.
	alloc(n int) ([]float32, error)
}

// model is one part of a transformer that is cut as in Shoeybi et al., "Megatron-LM: Training
// Multi-Billion Parameter Language Models Using Model Parallelism", 2019: the matrices into a half
// of a block by columns (of attention: by heads), those out of it by rows, so that a half of a
// block needs one sum over the parts; the head by columns (by characters). Embeddings and norms are
// whole in every part.
type model struct {
	shape
	part, parts int
	peers       peers

	token, position []float32 // [vocabulary,dim], [context,dim]
	blocks          []block
	norm, head      []float32 // [dim], [dim,vocabulary/parts]

	past int // positions in the cache
	x    []float32
	h    []float32 // what goes in and, summed over the parts, out of a half of a block
	wide []float32 // qkv, or up
	act  []float32
	prob []float32
	mine []float32 // this part's logits
	all  []float32 // every part's, by part
	out  []float32
}

type block struct {
	norm1, qkv, proj []float32 // [dim], [dim,3*width], [width,dim] with width = dim/parts
	norm2, up, down  []float32 // [dim], [dim,4*width], [4*width,dim]
	keys, values     []float32 // the cache, [context,width]
}

// newModel makes part number part of parts. Every part makes its own weights alone: element (i,j)
// of a matrix depends on the seed and its place only.
func newModel(s shape, seed uint64, part, parts int, p peers) (*model, error) {
	m := &model{shape: s, part: part, parts: parts, peers: p}
	d, w, stream := s.dim, s.dim/parts, uint64(0)
	// matrix makes the rows and columns of a part of a matrix of the given width.
	matrix := func(rows, columns, firstRow, firstColumn, width int, deviation float64) []float32 {
		r := nn.NewRandom(seed, stream)
		x := make([]float32, rows*columns)
		for i := range rows {
			for j := range columns {
				x[i*columns+j] = float32(deviation * r.Normal(uint64((firstRow+i)*width+firstColumn+j)))
			}
		}
		return x
	}
	whole := func(rows, columns int, deviation float64) []float32 {
		stream++
		return matrix(rows, columns, 0, 0, columns, deviation)
	}
	byColumns := func(rows, columns int, deviation float64) []float32 {
		stream++
		n := columns / parts
		return matrix(rows, n, 0, part*n, columns, deviation)
	}
	byRows := func(rows, columns int, deviation float64) []float32 {
		stream++
		n := rows / parts
		return matrix(n, columns, part*n, 0, columns, deviation)
	}
	gain := func() []float32 {
		x := whole(1, d, 0.1)
		for i := range x {
			x[i]++
		}
		return x
	}
	in := 1 / math.Sqrt(float64(d))
	residual := in / math.Sqrt(2*float64(s.layers))
	m.token, m.position = whole(vocabulary, d, 1), whole(s.context, d, 0.3)
	for range s.layers {
		b := block{norm1: gain(), proj: byRows(d, d, residual), norm2: gain(), up: byColumns(d, 4*d, in),
			down: byRows(4*d, d, residual),
			keys: make([]float32, s.context*w), values: make([]float32, s.context*w)}
		// Queries, keys and values are a matrix each; side by side they are one product.
		q, k, v := byColumns(d, d, 2*in), byColumns(d, d, 2*in), byColumns(d, d, in)
		b.qkv = make([]float32, 0, 3*d*w)
		for i := range d {
			b.qkv = append(append(append(b.qkv, q[i*w:][:w]...), k[i*w:][:w]...), v[i*w:][:w]...)
		}
		m.blocks = append(m.blocks, b)
	}
	m.norm, m.head = gain(), byColumns(d, vocabulary, 3*in)

	rows := s.context
	m.x, m.wide, m.act = make([]float32, rows*d), make([]float32, rows*4*w), make([]float32, rows*4*w)
	m.out = make([]float32, rows*vocabulary)
	for _, b := range []struct {
		mem *[]float32
		n   int
	}{{&m.h, rows * d}, {&m.mine, rows * vocabulary / parts}, {&m.all, rows * vocabulary}} {
		var err error
		if *b.mem, err = p.alloc(b.n); err != nil {
			return nil, err
		}
	}
	return m, nil
}

// forward reads the next tokens and returns the logits [len(tokens), vocabulary] that follow each,
// valid until the next call. What came before is in the cache. All parts call it with the same
// tokens and get the same logits.
func (m *model) forward(ctx context.Context, tokens []byte) ([]float32, error) {
	n, d, w, heads := len(tokens), m.dim, m.dim/m.parts, m.heads/m.parts
	if m.past+n > m.context {
		return nil, fmt.Errorf("%d tokens after %d do not fit into a context of %d", n, m.past, m.context)
	}
	x, h := m.x[:n*d], m.h[:n*d]
	for i, t := range tokens {
		for j := range d {
			x[i*d+j] = m.token[int(t)*d+j] + m.position[(m.past+i)*d+j]
		}
	}
	if need := heads * n * (m.past + n); need > len(m.prob) {
		m.prob = make([]float32, need)
	}
	for _, b := range m.blocks {
		nn.RMSNorm(h, x, b.norm1, n, d)
		qkv, attended := m.wide[:n*3*w], m.act[:n*w]
		mul(qkv, h, b.qkv, n, d, 3*w)
		for i := range n {
			copy(b.keys[(m.past+i)*w:][:w], qkv[i*3*w+w:])
			copy(b.values[(m.past+i)*w:][:w], qkv[i*3*w+2*w:])
		}
		rows := func(x []float32, stride int) nn.Rows[float32] { return nn.Rows[float32]{Data: x, Stride: stride} }
		nn.Attention(rows(attended, w), rows(qkv, 3*w), rows(b.keys, w), rows(b.values, w), m.prob, n, m.past, heads,
			d/m.heads)
		mul(h, attended, b.proj, n, w, d)
		if err := m.add(ctx, x, h); err != nil {
			return nil, err
		}

		nn.RMSNorm(h, x, b.norm2, n, d)
		up, act := m.wide[:n*4*w], m.act[:n*4*w]
		mul(up, h, b.up, n, d, 4*w)
		nn.SiLU(act, up)
		mul(h, act, b.down, n, 4*w, d)
		if err := m.add(ctx, x, h); err != nil {
			return nil, err
		}
	}
	m.past += n
	nn.RMSNorm(h, x, m.norm, n, d)
	v := vocabulary / m.parts
	mine, all, out := m.mine[:n*v], m.all[:n*vocabulary], m.out[:n*vocabulary]
	mul(mine, h, m.head, n, d, v)
	if err := m.peers.gather(ctx, all, mine); err != nil {
		return nil, err
	}
	for p := range m.parts {
		for i := range n {
			copy(out[i*vocabulary+p*v:][:v], all[(p*n+i)*v:])
		}
	}
	return out, nil
}

// add adds h, summed over the parts, to the residual x.
func (m *model) add(ctx context.Context, x, h []float32) error {
	if err := m.peers.reduce(ctx, h); err != nil {
		return err
	}
	for i, v := range h {
		x[i] += v
	}
	return nil
}

// mul is nn.MatMul that overwrites c.
func mul(c, a, b []float32, m, k, n int) {
	clear(c)
	nn.MatMul(c, a, b, m, k, n)
}

// alone are the peers of a model in one part.
type alone struct{}

func (alone) reduce(context.Context, []float32) error { return nil }
func (alone) gather(_ context.Context, dst, src []float32) error {
	copy(dst, src)
	return nil
}
func (alone) alloc(n int) ([]float32, error) { return make([]float32, n), nil }
