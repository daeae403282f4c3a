package exec

import (
	"tutti/collectives"
	"tutti/kernels"
	"tutti/p2p"
	"tutti/pg/flight"
)

// Bound is a checked call with its algorithm and plan, ready to run again on any buffers of the
// same lengths. It is valid in the topology of its set.
type Bound struct {
	Call
	key      boundKey
	set      *planSet
	prog     *program
	tok      p2p.Token // without the sequence number
	from, to int       // strides of in and out
	size     int       // see Bytes
	inPlace  bool      // its buffers may be identical

	// Record describes the call for the flight recorder in the view Epoch. Both belong to the
	// owner.
	Record flight.Record
	Epoch  uint64
}

// boundKey is the key of bound calls.
type boundKey struct {
	kind     collectives.Kind
	op       kernels.Op
	dtype    kernels.DType
	root     int
	dst, src int // counts
}

// slot is the index of a bound call in planSet.latest.
func slot(kind collectives.Kind, op kernels.Op, dtype kernels.DType, root, count int) uint {
	return uint(uint64(count<<8^root<<6^int(dtype)<<4^int(op)<<2^int(kind)) * 0x9e3779b97f4a7c15 >> 60)
}

// Recall returns the bound call for a request, or nil if the request has to be checked first.
func (r *Runner) Recall(q *Request) *Bound {
	if r.set == nil { // closed
		return nil
	}
	dst, src := &q.Dst, &q.Src
	at := &r.set.latest[slot(q.Kind, q.Op, src.DType, q.Root, dst.Count)]
	b := *at
	if b == nil || b.key.kind != q.Kind || b.key.op != q.Op || b.key.dtype != src.DType || b.key.root != q.Root ||
		b.key.dst != dst.Count || b.key.src != src.Count {
		if b = r.set.bound[boundKey{q.Kind, q.Op, src.DType, q.Root, dst.Count, src.Count}]; b == nil {
			return nil
		}
		*at = b
	}
	if dst.DType != src.DType || dst.Ptr == nil || src.Ptr == nil || dst.Location != "" || src.Location != "" ||
		!(b.inPlace && dst.Ptr == src.Ptr) && clash(q.Kind, q.Root, r.rank, dst, src, nil) != "" {
		return nil
	}
	return b
}

// remember binds the call that has just run, for Recall, if it has one block, needs no agreement on
// memory, and uses its buffers as they are given.
func (r *Runner) remember(prog *program) {
	c, n, l := r.cur, r.set.Size, r.cur.Kind.Layout()
	if (l.InAtRoot || l.OutAtRoot) && (l.In.Parted() || l.Out.Parted()) || l.Out == collectives.Packed {
		return // its buffers differ from rank to rank
	}
	dst, src := c.elements(l.Out, n), c.elements(l.In, n)
	if c.In == nil || c.Out == nil || c.Count == 0 || r.bound != nil || r.widens(prog) {
		return
	}
	b := &Bound{Call: *c, key: boundKey{c.Kind, c.Op, c.DType, c.Root, dst, src}, set: r.set, prog: prog, tok: r.tok,
		from: r.in.stride, to: r.out.stride, size: c.Bytes(n),
		inPlace: l.In == collectives.One && l.Out == collectives.One}
	b.Forget()
	b.Uniform = false // only the calls of Split and Admit are uniform by themselves
	if len(r.set.bound) >= maxPlans {
		clear(r.set.bound)
	}
	r.cfg.Keep(b)
	r.set.bound[b.key] = b
	r.set.latest[slot(c.Kind, c.Op, c.DType, c.Root, dst)] = b
}

// Bytes returns the length in bytes of the call's longest buffer.
func (b *Bound) Bytes() int { return b.size }

// Algo returns the algorithm of the bound plan.
func (b *Bound) Algo() collectives.Algo { return b.prog.Algo }

// Current reports whether b is bound in the present topology, and can run without preparation.
func (r *Runner) Current(b *Bound) bool { return b.set == r.set }
