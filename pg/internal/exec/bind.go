package exec

import (
	"tutti/collectives"
	"tutti/kernels"
	"tutti/p2p"
	"tutti/pg/flight"
)

// Bound is a call that has run, ready to run again on any buffers of its lengths: it was checked,
// its algorithm was chosen, its plan was made. A call like it needs none of that. It is good in the
// topology of its set.
type Bound struct {
	Call
	key      boundKey
	set      *planSet
	prog     *program
	tok      p2p.Token // but for its number
	from, to int       // strides of in and out
	size     int       // see Bytes
	inPlace  bool      // its buffers may be the same

	// Record describes the call for the flight recorder in the view with this epoch. It is the
	// owner's, as Epoch.
	Record flight.Record
	Epoch  uint64
}

// boundKey is what calls have in common that are bound to the same.
type boundKey struct {
	kind     collectives.Kind
	op       kernels.Op
	dtype    kernels.DType
	root     int
	dst, src int // counts
}

// slot is where the latest of several bound calls is looked for first.
func slot(kind collectives.Kind, op kernels.Op, dtype kernels.DType, root, count int) uint {
	return uint(uint64(count<<8^root<<6^int(dtype)<<4^int(op)<<2^int(kind)) * 0x9e3779b97f4a7c15 >> 60)
}

// Recall returns what a request is bound to, nil if it has to be checked and run as the first of
// its kind.
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

// remember binds the call that has just run, for Recall: a call of one block that needs no
// agreement on memory, whose buffers are used as they are given.
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
	b.Uniform = false // as Split's and Admit's own is, and a program's is not
	if len(r.set.bound) >= maxPlans {
		clear(r.set.bound)
	}
	r.cfg.Keep(b)
	r.set.bound[b.key] = b
	r.set.latest[slot(c.Kind, c.Op, c.DType, c.Root, dst)] = b
}

// Bytes returns how many bytes the call is about.
func (b *Bound) Bytes() int { return b.size }

// Algo returns the algorithm that it is bound to.
func (b *Bound) Algo() collectives.Algo { return b.prog.Algo }

// Current reports whether b is bound in the present topology: nothing has to be made for it.
func (r *Runner) Current(b *Bound) bool { return b.set == r.set }
