//go:build linux

package torture

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"tutti/kernels"
	"tutti/pg"
)

// A chain is a step whose operations, Par, are started one after the other on two buffers, x and y,
// of Count elements for each rank: each reads what those before it have written. Root is that of an
// operation, or the part of a buffer that it uses; with New 1 it reads y and writes x.
type chain struct {
	r    *rank
	s    *Step
	c    *call
	bufs [2][]byte
	n    int // ranks
	k    int // elements of a part
}

// chainOps are the operations of chains.
var chainOps = []Op{AllReduce, Broadcast, Reduce, ReduceScatter, AllGather, AllToAll, Gather, Scatter, Barrier}

// chainTypes are those whose sums wrap around.
var chainTypes = []pg.DType{pg.Int32, pg.Uint8, pg.Int64, pg.Uint16, pg.Int16}

var chainReductions = []pg.Reduction{pg.Sum, pg.Sum, pg.Max, pg.Min, pg.BitXor}

// chain runs a chain, and compares the buffers with those after its operations one by one.
func (r *rank) chain(ctx context.Context, s *Step, part *Part, h *handle) {
	dt := s.DType
	if !slices.Contains(chainTypes, dt) {
		dt = pg.Int32
	}
	c := &call{h: h, step: s, d: newDatum(dt, pg.Sum, r.p.Seed+uint64(r.now)*64), device: r.device}
	x := &chain{r: r, s: s, c: c, n: h.g.Size(), k: max(s.Count, 1)}
	var kinds []string
	for i := range s.Par {
		kinds = append(kinds, string(s.Par[i].Op))
	}
	c.name = fmt.Sprintf("step %d: chain of %s (%v, %d elements a rank)", r.now, strings.Join(kinds, ", "), dt, x.k)
	on := part.Dst
	if first := r.job.GPUs != NoGPUs && len(s.Ranks) > 0; first && s.Ranks[0].Dst == MemDevice { // see Step.place
		on = shortDevice
	} else if on == MemDevice {
		if on = shortDevice; first {
			on = MemPlain
		}
	}
	state := x.inputs()
	for i := range x.bufs {
		b := r.take(on, x.n*x.k*c.d.size, c.d.size, c.name)
		c.bufs, x.bufs[i] = append(c.bufs, b), b.bytes()
		x.encode(x.bufs[i], state[h.slot()][i])
	}
	if c.stream = r.stream(h, part, 0, x.bufs[0], x.bufs[1]); c.stream != nil && part.Hold > 0 {
		if err := c.stream.hold(part.Hold); err != nil {
			r.find("error", "%s: its stream: %v", c.name, err)
		}
	}
	before := h.g.View()
	var works []*pg.Work
	for i := range s.Par {
		r.timed(c.name+": start", r.limit(&Part{}), func() error {
			works = append(works, h.g.Start(x.operation(&s.Par[i])))
			return nil
		})
	}
	var failed error
	limit := r.limit(&Part{}) + time.Duration(len(works))*r.job.Timeout
	for i, w := range works {
		err := r.timed(c.name, limit, func() error { return w.Wait(ctx) })
		r.judge(fmt.Sprintf("%s: operation %d", c.name, i), s.May, err)
		failed = errors.Join(failed, err)
	}
	if err := c.settle(r.limit(&Part{})); err != nil {
		r.find("error", "%v", err)
	}
	if after := h.g.View(); failed == nil && before.Epoch == after.Epoch && len(after.Active) == x.n {
		for i := range s.Par {
			x.apply(&s.Par[i], state)
		}
		for i, b := range x.bufs {
			want := make([]byte, len(b))
			x.encode(want, state[h.slot()][i])
			if text := c.d.compare(b, want); text != "" {
				r.find("wrong", "%s: buffer %d on %s: %s", c.name, i, c.where(), text)
			}
		}
	}
	r.giveBack(c)
}

// inputs returns the contents of the two buffers, by slot.
func (x *chain) inputs() (state [][2][]int64) {
	for slot := range x.n {
		var both [2][]int64
		for i := range both {
			for j := range x.n * x.k {
				both[i] = append(both[i], x.c.d.value(x.c.h.ranks[slot], i*x.n*x.k+j))
			}
		}
		state = append(state, both)
	}
	return state
}

func (x *chain) encode(b []byte, from []int64) {
	x.c.d.put(b, len(from), func(i int) int64 { return from[i] })
}

// operation returns the call of an operation.
func (x *chain) operation(s *Step) pg.Operation {
	from, to := x.bufs[s.New%2], x.bufs[1-s.New%2]
	size := x.k * x.c.d.size
	root := s.Root % x.n
	part := func(b []byte) pg.Buffer { return x.c.buffer(b[root*size : (root+1)*size]) }
	all := x.c.buffer
	switch s.Op {
	case AllReduce:
		if s.Root%2 == 0 {
			return pg.AllReduceOp{Dst: all(to), Op: s.Red}
		}
		return pg.AllReduceOp{Dst: all(to), Src: all(from), Op: s.Red}
	case Broadcast:
		return pg.BroadcastOp{X: all(to), Root: root}
	case Reduce:
		return pg.ReduceOp{X: all(to), Root: root, Op: s.Red}
	case ReduceScatter:
		return pg.ReduceScatterOp{Dst: part(to), Src: all(from), Op: s.Red}
	case AllGather:
		return pg.AllGatherOp{Dst: all(to), Src: part(from)}
	case AllToAll:
		return pg.AllToAllOp{Dst: all(to), Src: all(from)}
	case Gather:
		op := pg.GatherOp{Src: part(from), Root: root}
		if op.Dst = x.c.buffer(nil); x.c.h.slot() == root {
			op.Dst = all(to)
		}
		return op
	case Scatter:
		op := pg.ScatterOp{Dst: part(to), Root: root}
		if op.Src = x.c.buffer(nil); x.c.h.slot() == root {
			op.Src = all(from)
		}
		return op
	}
	return pg.BarrierOp{}
}

// apply does an operation on the buffers of all ranks.
func (x *chain) apply(s *Step, state [][2][]int64) {
	in, out := s.New%2, 1-s.New%2
	root := s.Root % x.n
	part := func(slot, buf, i int) []int64 { return state[slot][buf][i*x.k : (i+1)*x.k] }
	switch s.Op {
	case AllReduce:
		if s.Root%2 == 0 {
			in = out
		}
		sum := x.fold(s.Red, state, in)
		for slot := range state {
			copy(state[slot][out], sum)
		}
	case Broadcast:
		for slot := range state {
			copy(state[slot][out], state[root][out])
		}
	case Reduce:
		copy(state[root][out], x.fold(s.Red, state, out))
	case ReduceScatter:
		sum := x.fold(s.Red, state, in)
		for slot := range state {
			copy(part(slot, out, root), sum[slot*x.k:])
		}
	case AllGather:
		for slot := range state {
			for from := range state {
				copy(part(slot, out, from), part(from, in, root))
			}
		}
	case AllToAll:
		for slot := range state {
			for from := range state {
				copy(part(slot, out, from), part(from, in, slot))
			}
		}
	case Gather:
		for from := range state {
			copy(part(root, out, from), part(from, in, root))
		}
	case Scatter:
		for slot := range state {
			copy(part(slot, out, root), part(root, in, slot))
		}
	}
}

// fold combines a buffer of all ranks.
func (x *chain) fold(red pg.Reduction, state [][2][]int64, buf int) []int64 {
	sum := slices.Clone(state[0][buf])
	for _, other := range state[1:] {
		for i, v := range other[buf] {
			switch red {
			case pg.Sum:
				sum[i] = x.wrap(sum[i] + v)
			case pg.Max:
				sum[i] = max(sum[i], v)
			case pg.Min:
				sum[i] = min(sum[i], v)
			case pg.BitXor:
				sum[i] ^= v
			}
		}
	}
	return sum
}

// wrap returns the number of the type with the low bits of v.
func (x *chain) wrap(v int64) int64 {
	shift := 64 - 8*x.c.d.size
	if x.c.d.dtype.Class() == kernels.Signed {
		return v << shift >> shift
	}
	return int64(uint64(v) << shift >> shift)
}
