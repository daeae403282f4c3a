package collectives

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
)

// The tests' elements are hashes. folded(a, b) is neither commutative nor associative, so a result
// is right only if exactly the documented fold, in the documented order and association, was made;
// finished must have been applied once, at the end.

func mix(x uint64) uint64 {
	x ^= x >> 32
	x *= 0xd6e8feb86659fd93
	x ^= x >> 29
	x *= 0xa0761d6478bd642f
	return x ^ x>>32
}

func folded(a, b uint64) uint64    { return mix(a*3 + mix(b+0x9e3779b97f4a7c15)) }
func finished(a uint64) uint64     { return mix(a ^ 0x46494e) }
func leaf(slot, elem int) uint64   { return mix(uint64(slot)<<32 | uint64(elem) | 1<<63) }
func trunc(x uint64, w int) uint64 { return x & (1<<(8*w-1)<<1 - 1) }

func put(b []byte, x uint64) {
	var w [8]byte
	binary.LittleEndian.PutUint64(w[:], x)
	copy(b, w[:])
}

// combiner is Schedule.ReduceInto for elements of w bytes, at most 8.
func reducer(w int) func(dst []byte, srcs [][]byte, final bool) {
	return func(dst []byte, srcs [][]byte, final bool) {
		for i := 0; i < len(dst); i += w {
			acc := word(srcs[0][i : i+w])
			for _, s := range srcs[1:] {
				acc = trunc(folded(acc, word(s[i:i+w])), w)
			}
			if final {
				acc = trunc(finished(acc), w)
			}
			put(dst[i:i+w], acc)
		}
	}
}

func word(b []byte) uint64 {
	var x [8]byte
	copy(x[:], b)
	return binary.LittleEndian.Uint64(x[:])
}

// The associations that doc.go states, over the contributions xs in slot order.

type fold func(xs []uint64) uint64

func left(w int) fold {
	return func(xs []uint64) uint64 {
		acc := xs[0]
		for _, x := range xs[1:] {
			acc = trunc(folded(acc, x), w)
		}
		return acc
	}
}

// blocks is the balanced tree over aligned blocks of 2^k.
func blocks(w int) fold {
	var f fold
	f = func(xs []uint64) uint64 {
		if len(xs) == 1 {
			return xs[0]
		}
		half := 1
		for half*2 < len(xs) {
			half *= 2
		}
		return trunc(folded(f(xs[:half]), f(xs[half:])), w)
	}
	return f
}

// paired folds the first pairs so that a power of two remains, then blocks.
func paired(w int) fold {
	return func(xs []uint64) uint64 {
		p := 1
		for p*2 <= len(xs) {
			p *= 2
		}
		var ys []uint64
		for rem := len(xs) - p; rem > 0; rem-- {
			ys = append(ys, trunc(folded(xs[0], xs[1]), w))
			xs = xs[2:]
		}
		return blocks(w)(append(ys, xs...))
	}
}

// association returns the fold of element e of the vector (or, in a ReduceScatter, of part `part`).
func association(a Algo, s Shape, part, e int) fold {
	w, n := s.Elem, len(s.Active)
	round := func(p int) fold {
		return func(xs []uint64) uint64 { return left(w)(append(append([]uint64{}, xs[p+1:]...), xs[:p+1]...)) }
	}
	switch a {
	case Doubling, Halving:
		return paired(w)
	case Tree:
		return blocks(w)
	case Stars:
		return func(xs []uint64) uint64 {
			var centers []uint64
			width := starsWidth(n)
			for lo := 0; lo < n; lo += width {
				centers = append(centers, left(w)(xs[lo:min(lo+width, n)]))
			}
			return left(w)(centers)
		}
	case Chain:
		return func(xs []uint64) uint64 {
			r := s.index(s.Root)
			acc := left(w)(xs[:r+1])
			if r == n-1 {
				return acc
			}
			right := xs[n-1]
			for i := n - 2; i > r; i-- {
				right = trunc(folded(xs[i], right), w)
			}
			return trunc(folded(acc, right), w)
		}
	case Ring:
		if s.Kind == ReduceScatter {
			return round(part)
		}
		bounds := split(s.Count, n, w)
		for p := range n {
			if e*w < bounds[p+1] {
				return round(p)
			}
		}
	case Hierarchical:
		var order []int
		groups := map[int][]int{}
		least := n
		for i := range s.Active {
			h := 0
			if s.Hosts != nil {
				h = s.Hosts[i]
			}
			if groups[h] == nil {
				order = append(order, h)
			}
			groups[h] = append(groups[h], i)
		}
		for _, g := range groups {
			least = min(least, len(g))
		}
		inside, between := left(w), paired(w)
		if s.Kind == Reduce {
			inside, between = blocks(w), blocks(w)
		} else if b := newBuilder(a, s); widest(split(s.Count, least, w)) > b.chunk {
			between = left(w)
		}
		return func(xs []uint64) uint64 {
			var hosts []uint64
			for _, h := range order {
				var mine []uint64
				for _, i := range groups[h] {
					mine = append(mine, xs[i])
				}
				hosts = append(hosts, inside(mine))
			}
			return between(hosts)
		}
	}
	return left(w)
}

// A call is one collective as all ranks make it.
type call struct {
	algo  Algo
	shape Shape   // Rank is of no meaning
	sent  [][]int // AllToAllV: elements from the i-th to the j-th active rank
	alias bool    // In and Out are the same memory where Kind allows it
	how   Schedule
}

func (c call) String() string {
	return fmt.Sprintf("%s %s active %v of %d root %d elem %d count %d counts %v hosts %v chunk %d alias %v "+
		"eager %v late %v grain %d seed %d", c.algo, c.shape.Kind,
		c.shape.Active, c.shape.Size, c.shape.Root, c.shape.Elem, c.shape.Count, c.shape.Counts, c.shape.Hosts,
		c.shape.Chunk, c.alias, c.how.Eager, c.how.Late, c.how.Grain, c.how.Seed)
}

func (c call) rank(i int) Shape {
	s := c.shape
	s.Rank = s.Active[i]
	if s.Kind == AllToAllV {
		s.Counts, s.RecvCounts = make([]int, s.Size), make([]int, s.Size)
		for j, slot := range s.Active {
			s.Counts[slot], s.RecvCounts[slot] = c.sent[i][j], c.sent[j][i]
		}
		for slot := range s.Size {
			if s.index(slot) < 0 { // parts of inactive slots take room and are left alone
				s.Counts[slot], s.RecvCounts[slot] = slot%3, slot%2
			}
		}
	}
	return s
}

func size(s Shape, b Buf) (n int) {
	for p := range s.Parts(b, s.Rank) {
		n += s.PartBytes(b, s.Rank, p)
	}
	return n
}

// value is element e of part `part` of slot's In.
func value(slot, part, e int) uint64 { return leaf(slot, part<<16|e) }

// setUp returns the plans of all ranks, their memories, and what Out is to be.
func (c call) setUp() (plans []*Plan, mem []Memory, want [][]byte, err error) {
	n := len(c.shape.Active)
	w := c.shape.Elem
	for i := range n {
		s := c.rank(i)
		p, err := Build(c.algo, s)
		if err != nil {
			return nil, nil, nil, err
		}
		if p.Tmp > 0 && c.algo != Bruck && c.algo != Tree && p.Tmp > 2*(n+4)*(max(newBuilder(c.algo, s).chunk, w)+63) {
			return nil, nil, nil, fmt.Errorf("%d bytes of scratch memory are too many", p.Tmp)
		}
		plans = append(plans, p)
		m := Memory{make([]byte, size(s, In)), make([]byte, size(s, Out))}
		at := 0
		for part := range s.Parts(In, s.Rank) {
			for e := range s.PartBytes(In, s.Rank, part) / max(w, 1) {
				for k := 0; k < w; k += 8 {
					put(m.In[at+k:at+w], value(s.Rank, part, e)+uint64(k))
				}
				at += w
			}
		}
		for k := range m.Out {
			m.Out[k] = 0xEE
		}
		if c.alias {
			switch s.Kind {
			case AllReduce, Reduce:
				if len(m.Out) > 0 {
					copy(m.Out, m.In)
					m.In = m.Out
				}
			case Scatter:
				if s.Rank == s.Root {
					base := s.Rank * len(m.Out)
					m.Out = m.In[base : base+len(m.Out) : base+len(m.Out)]
				}
			case AllGather, AllGatherV, Gather:
				if len(m.Out) == 0 {
					break
				}
				base := 0
				for part := range s.Rank {
					base += s.PartBytes(Out, s.Rank, part)
				}
				copy(m.Out[base:], m.In)
				m.In = m.Out[base : base+len(m.In) : base+len(m.In)]
			}
		}
		mem = append(mem, m)
		want = append(want, c.want(s, m.Out))
	}
	return plans, mem, want, nil
}

// run builds, interprets and compares.
func (c call) run() error {
	n := len(c.shape.Active)
	plans, mem, want, err := c.setUp()
	if err != nil {
		return err
	}
	w := c.shape.Elem
	before := make([][]byte, n)
	for i := range mem {
		before[i] = bytes.Clone(mem[i].In)
	}
	c.how.Fold = reducer(w)
	if err := Interpret(plans, mem, c.how); err != nil {
		return err
	}
	for i := range n {
		if !bytes.Equal(mem[i].Out, want[i]) {
			for k := range want[i] {
				if mem[i].Out[k] != want[i][k] {
					return fmt.Errorf("rank %d: Out differs from byte %d of %d\n%s", c.shape.Active[i], k, len(want[i]),
						plans[i])
				}
			}
		}
		if !c.alias && !bytes.Equal(mem[i].In, before[i]) {
			return fmt.Errorf("rank %d: In was written", c.shape.Active[i])
		}
	}
	return nil
}

// want is the Out that Kind defines, on top of what out holds.
func (c call) want(s Shape, out []byte) []byte {
	w := s.Elem
	out = bytes.Clone(out)
	at := 0
	elems := func(n int, f func(e int) uint64) {
		for e := range n {
			for k := 0; k < w; k += 8 {
				put(out[at+k:at+w], f(e)+uint64(k))
			}
			at += w
		}
	}
	reduced := func(part int) func(e int) uint64 {
		return func(e int) uint64 {
			xs := make([]uint64, len(s.Active))
			for i, slot := range s.Active {
				xs[i] = trunc(value(slot, part, e), w)
			}
			return trunc(finished(association(c.algo, s, s.index(s.Rank), e)(xs)), w)
		}
	}
	moved := func(slot, part int) func(e int) uint64 {
		return func(e int) uint64 { return value(slot, part, e) }
	}
	if len(out) == 0 {
		return out
	}
	switch s.Kind {
	case AllReduce, Reduce:
		elems(s.Count, reduced(0))
	case ReduceScatter:
		elems(s.Count, reduced(s.Rank))
	case Broadcast:
		elems(s.Count, moved(s.Root, 0))
	case Scatter:
		elems(s.Count, moved(s.Root, s.Rank))
	default:
		for slot := range s.Size {
			k := s.PartBytes(Out, s.Rank, slot) / w
			switch {
			case s.index(slot) < 0:
				at += k * w
			case s.Kind == AllToAll || s.Kind == AllToAllV:
				elems(k, moved(slot, s.Rank))
			default:
				elems(k, moved(slot, 0))
			}
		}
	}
	return out
}

// draw makes up a call of n ranks.
func draw(r *rand.Rand, k Kind, a Algo, n int) call {
	s := Shape{Kind: k, Elem: []int{8, 8, 4, 2, 1}[r.IntN(5)]}
	if !k.Reduces() && r.IntN(4) == 0 {
		s.Elem = 1 + r.IntN(17)
	}
	holes := []int{0, 0, 1, 3}[r.IntN(4)]
	s.Size = n + holes
	s.Active = r.Perm(s.Size)[:n]
	slices.Sort(s.Active)
	s.Root = s.Active[r.IntN(n)]
	long := 8 * n
	if k == AllToAll || k == AllGather || k == Gather || k == Scatter || k == ReduceScatter {
		long = 2 + 200/n
	}
	s.Count = []int{0, 1, n - 1, n, 3, r.IntN(long + 1), long, min(long, 5*n+3)}[r.IntN(8)]
	if r.IntN(6) == 0 {
		s.Count = r.IntN(1 + 1000/n)
	}
	if s.Chunk = []int{0, 1, 8, 24, 64, 128}[r.IntN(6)]; s.Chunk > 0 { // but not so many steps that it takes long
		s.Chunk = max(s.Chunk, s.Count*s.Elem*n*n/8000)
	}
	if k == AllGatherV {
		s.Counts = make([]int, s.Size)
		for i := range s.Counts {
			s.Counts[i] = []int{0, 1, r.IntN(20)}[r.IntN(3)]
		}
	}
	c := call{algo: a, alias: r.IntN(2) == 0, how: Schedule{Seed: r.Uint64(), Eager: r.IntN(2) == 0,
		Late:  r.IntN(2) == 0,
		Grain: s.Elem * []int{0, 1, 5}[r.IntN(3)]}}
	if k == AllToAllV {
		for range n {
			row := make([]int, n)
			for j := range row {
				row[j] = []int{0, 1, r.IntN(12)}[r.IntN(3)]
			}
			c.sent = append(c.sent, row)
		}
	}
	if a == Hierarchical && r.IntN(8) > 0 {
		hosts := 1 + r.IntN(n)
		if r.IntN(2) == 0 {
			hosts = min(1+r.IntN(4), n)
		}
		s.Hosts = make([]int, n)
		for i := range s.Hosts {
			s.Hosts[i] = 7 * r.IntN(hosts)
			if r.IntN(4) > 0 && i > 0 { // mostly in blocks, as launchers place ranks
				s.Hosts[i] = 7 * (i * hosts / n)
			}
		}
	}
	c.shape = s
	return c
}

// TestSweep runs every algorithm of every kind for 1 to 24 ranks and some numbers up to 64, over
// random shapes, memories and schedules.
func TestSweep(t *testing.T) {
	for _, k := range Kinds() {
		for _, a := range Algorithms(k) {
			t.Run(k.String()+"/"+a.String(), func(t *testing.T) {
				t.Parallel()
				r := rand.New(rand.NewPCG(uint64(k), uint64(a)))
				for n := 1; n <= 64; n++ {
					if n > 24 && n%6 != 1 && n != 64 { // 31, 37 and others stay
						continue
					}
					tries := 1 + 100/(n*n)
					if testing.Short() {
						if tries = 1 + 40/(n*n); n > 20 && n%9 != 0 {
							continue
						}
					}
					for range tries {
						if c := draw(r, k, a, n); c.run() != nil {
							t.Fatalf("%v\n%v", c, c.run())
						}
					}
				}
			})
		}
	}
}
