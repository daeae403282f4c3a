// Package nn has the few numeric kernels of a transformer that the examples need, in plain Go:
// matrix products, RMS normalisation, SiLU, causal attention and cross entropy, each with its
// gradient. Matrices are dense and row-major; "a [m,k]" is m rows of k elements in one slice.
//
// A row of a result depends on that row of the inputs alone and is summed in one fixed order:
// results do not change with the number of rows, and so not with the number of ranks that a batch
// is split among. Sums over rows (the gradients of weights) are in row order.
package nn

import "math"

// Float is the element type of a model.
type Float interface{ ~float32 | ~float64 }

// MatMul adds the product of a [m,k] and b [k,n] to c [m,n].
func MatMul[T Float](c, a, b []T, m, k, n int) {
	for i := range m {
		axpyRows(c[i*n:i*n+n], a[i*k:i*k+k], 1, b, k)
	}
}

// MatMulAT adds the product of the transposed a [m,k] and b [m,n] to c [k,n]: the gradient of a
// weight, from a layer's input and the gradient of its output.
func MatMulAT[T Float](c, a, b []T, m, k, n int) {
	for j := range k {
		axpyRows(c[j*n:j*n+n], a[j:], k, b, m)
	}
}

// axpyRows adds to y the first rows rows of b, each of len(y) elements, times x[0], x[stride], …:
// four rows a pass, so that y is loaded and stored a quarter as often.
func axpyRows[T Float](y, x []T, stride int, b []T, rows int) {
	n, r := len(y), 0
	for ; r+4 <= rows; r += 4 {
		x0, x1, x2, x3 := x[r*stride], x[(r+1)*stride], x[(r+2)*stride], x[(r+3)*stride]
		b0 := b[r*n:][:n]
		b1 := b[(r+1)*n:][:n]
		b2 := b[(r+2)*n:][:n]
		b3 := b[(r+3)*n:][:n]
		for j := range y {
			y[j] += x0*b0[j] + x1*b1[j] + x2*b2[j] + x3*b3[j]
		}
	}
	for ; r < rows; r++ {
		axpy(y, x[r*stride], b[r*n:])
	}
}

func axpy[T Float](y []T, a T, x []T) {
	x = x[:len(y)]
	for j := range y {
		y[j] += a * x[j]
	}
}

// MatMulBT adds the product of a [m,k] and the transposed b [n,k] to c [m,n]: the gradient of a
// layer's input, from the gradient of its output and its weight.
func MatMulBT[T Float](c, a, b []T, m, k, n int) {
	for i := range m {
		x, y := a[i*k:][:k], c[i*n:][:n]
		j := 0
		for ; j+4 <= n; j += 4 {
			b0 := b[j*k:][:len(x)]
			b1 := b[(j+1)*k:][:len(x)]
			b2 := b[(j+2)*k:][:len(x)]
			b3 := b[(j+3)*k:][:len(x)]
			var s0, s1, s2, s3 T
			for l, v := range x {
				s0 += v * b0[l]
				s1 += v * b1[l]
				s2 += v * b2[l]
				s3 += v * b3[l]
			}
			y[j] += s0
			y[j+1] += s1
			y[j+2] += s2
			y[j+3] += s3
		}
		for ; j < n; j++ {
			y[j] += dot(x, b[j*k:])
		}
	}
}

func dot[T Float](x, y []T) (s T) {
	y = y[:len(x)]
	for i, v := range x {
		s += v * y[i]
	}
	return s
}

const epsilon = 1e-5 // keeps RMSNorm finite on a row of zeros

// RMSNorm writes to y [m,d] the rows of x, each divided by the root of its mean square and
// multiplied by gain [d]. (Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019.)
func RMSNorm[T Float](y, x, gain []T, m, d int) {
	for i := range m {
		row, out := x[i*d:][:d], y[i*d:][:d]
		inv := inverseRMS(row)
		for j, v := range row {
			out[j] = v * inv * gain[j]
		}
	}
}

// RMSNormGrad adds to dx and dgain the gradients of RMSNorm at x for the output gradient dy [m,d].
func RMSNormGrad[T Float](dx, dgain, dy, x, gain []T, m, d int) {
	for i := range m {
		row, up, down := x[i*d:][:d], dy[i*d:][:d], dx[i*d:][:d]
		inv := inverseRMS(row)
		var s T
		for j, v := range row {
			dgain[j] += up[j] * v * inv
			s += up[j] * gain[j] * v
		}
		s *= inv * inv * inv / T(d)
		for j, v := range row {
			down[j] += up[j]*gain[j]*inv - v*s
		}
	}
}

func inverseRMS[T Float](x []T) T {
	return T(1 / math.Sqrt(float64(dot(x, x))/float64(len(x))+epsilon))
}

// SiLU writes x·sigmoid(x) to y.
func SiLU[T Float](y, x []T) {
	for i, v := range x {
		y[i] = v * sigmoid(v)
	}
}

// SiLUGrad multiplies dy, the gradient of SiLU's output, by SiLU's derivative at x: what remains is
// the gradient of its input.
func SiLUGrad[T Float](dy, x []T) {
	for i, v := range x {
		s := sigmoid(v)
		dy[i] *= s * (1 + v*(1-s))
	}
}

func sigmoid[T Float](x T) T { return T(1 / (1 + math.Exp(-float64(x)))) }

// Rows is a matrix inside a wider one: row i begins at Data[i*Stride].
type Rows[T Float] struct {
	Data   []T
	Stride int
}

func (r Rows[T]) row(i, col, n int) []T { return r.Data[i*r.Stride+col:][:n] }

// Attention is causal self-attention of several heads, each of headDim columns. The n queries stand
// at positions past..past+n-1 and see the keys and values of positions 0..their own (rows of k and
// v). It overwrites out [n, heads*headDim] and probs [heads, n, past+n].
func Attention[T Float](out, q, k, v Rows[T], probs []T, n, past, heads, headDim int) {
	scale, width := T(1/math.Sqrt(float64(headDim))), past+n
	for h := range heads {
		col := h * headDim
		for i := range n {
			p := probs[(h*n+i)*width:][:width]
			seen := past + i + 1
			query := q.row(i, col, headDim)
			for j := range seen {
				p[j] = scale * dot(query, k.row(j, col, headDim))
			}
			softmax(p[:seen])
			clear(p[seen:])
			o := out.row(i, col, headDim)
			clear(o)
			for j := range seen {
				axpy(o, p[j], v.row(j, col, headDim))
			}
		}
	}
}

// AttentionGrad adds to dq, dk and dv the gradients of Attention with past 0, for the output
// gradient dout and the probs that Attention left. scratch has at least n elements.
func AttentionGrad[T Float](dq, dk, dv, dout, q, k, v Rows[T], probs, scratch []T, n, heads, headDim int) {
	scale := T(1 / math.Sqrt(float64(headDim)))
	for h := range heads {
		col := h * headDim
		for i := range n {
			p, dp := probs[(h*n+i)*n:][:i+1], scratch[:i+1]
			up := dout.row(i, col, headDim)
			var s T
			for j := range p {
				axpy(dv.row(j, col, headDim), p[j], up)
				dp[j] = dot(up, v.row(j, col, headDim))
				s += p[j] * dp[j]
			}
			query, down := q.row(i, col, headDim), dq.row(i, col, headDim)
			for j := range p {
				g := scale * p[j] * (dp[j] - s) // through softmax
				axpy(down, g, k.row(j, col, headDim))
				axpy(dk.row(j, col, headDim), g, query)
			}
		}
	}
}

func softmax[T Float](x []T) {
	top := x[0]
	for _, v := range x {
		top = max(top, v)
	}
	var sum T
	for i, v := range x {
		x[i] = T(math.Exp(float64(v - top)))
		sum += x[i]
	}
	inv := 1 / sum
	for i := range x {
		x[i] *= inv
	}
}

// Softmax turns x into probabilities, in place. x is not empty.
func Softmax[T Float](x []T) { softmax(x) }

// CrossEntropyGrad returns the sum over the m rows of -log softmax(logits)[target], and replaces
// the logits [m,v] by the sum's gradient times scale.
func CrossEntropyGrad[T Float](logits []T, targets []byte, m, v int, scale T) (loss float64) {
	for i := range m {
		p := logits[i*v:][:v]
		softmax(p)
		t := int(targets[i])
		loss -= math.Log(max(float64(p[t]), 1e-30))
		p[t] -= 1
		for j := range p {
			p[j] *= scale
		}
	}
	return loss
}

// Random is a stream of random numbers that is addressed, not advanced: number i of stream s under
// a seed is the same for every caller and order, so that a rank can make its part of a matrix,
// or of a batch, alone. (The mixing function is SplitMix64's: Steele, Lea and Flood, "Fast
// Splittable Pseudorandom Number Generators", 2014.)
type Random struct{ key uint64 }

// NewRandom returns stream number stream of a seed.
func NewRandom(seed, stream uint64) Random { return Random{mix(mix(seed) + stream)} }

// Uint64 returns number i.
func (r Random) Uint64(i uint64) uint64 { return mix(r.key + i*0x9e3779b97f4a7c15) }

// Float64 returns number i as one of [0, 1).
func (r Random) Float64(i uint64) float64 { return float64(r.Uint64(i)>>11) / (1 << 53) }

// Normal returns number i as one of the standard normal distribution (Box and Muller).
func (r Random) Normal(i uint64) float64 {
	u, v := r.Float64(2*i), r.Float64(2*i+1)
	return math.Sqrt(-2*math.Log(1-u)) * math.Cos(2*math.Pi*v)
}

func mix(x uint64) uint64 {
	x += 0x9e3779b97f4a7c15
	x = (x ^ x>>30) * 0xbf58476d1ce4e5b9
	x = (x ^ x>>27) * 0x94d049bb133111eb
	return x ^ x>>31
}
