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
	express  *express  // how it runs if all goes well; nil: only by steps
	tok      p2p.Token // without the sequence number
	from, to int       // strides of in and out
	size     int       // see Bytes
	inPlace  bool      // its buffers may be identical
	asks     bool      // the ranks decide in each call whether they load; prog is for buffers that are sent

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
	dtype := src.DType
	if q.Kind == collectives.Barrier { // it has no buffers
		dtype = kernels.Uint8
	}
	at := &r.set.latest[slot(q.Kind, q.Op, dtype, q.Root, dst.Count)]
	b := *at
	if b == nil || b.key.kind != q.Kind || b.key.op != q.Op || b.key.dtype != dtype || b.key.root != q.Root ||
		b.key.dst != dst.Count || b.key.src != src.Count {
		if b = r.set.bound[boundKey{q.Kind, q.Op, dtype, q.Root, dst.Count, src.Count}]; b == nil {
			return nil
		}
		*at = b
	}
	if q.Kind == collectives.Barrier {
		return b
	}
	if dst.DType != src.DType || dst.Ptr == nil || src.Ptr == nil || dst.Location != "" || src.Location != "" ||
		!(b.inPlace && dst.Ptr == src.Ptr) && clash(q.Kind, q.Root, r.rank, dst, src, nil) != "" {
		return nil
	}
	return b
}

// remember binds the call that has just run, for Recall, if it has one block and uses its buffers
// as they are given. asks is as in Bound.
func (r *Runner) remember(prog *program, asks bool) {
	c, n, l := r.cur, r.set.Size, r.cur.Kind.Layout()
	if (l.InAtRoot || l.OutAtRoot) && (l.In.Parted() || l.Out.Parted()) || l.Out == collectives.Packed {
		return // its buffers differ from rank to rank
	}
	if c.For != 0 {
		return // it is a part of another call
	}
	if prog.Algo == collectives.LoadStore {
		if prog = r.sends(); prog == nil {
			return
		}
	}
	dst, src := c.elements(l.Out, n), c.elements(l.In, n)
	if (c.In == nil || c.Out == nil || c.Count == 0) && c.Kind != collectives.Barrier || r.bound != nil ||
		r.widens(prog.Algo) {
		return
	}
	b := &Bound{Call: *c, key: boundKey{c.Kind, c.Op, c.DType, c.Root, dst, src}, set: r.set, prog: prog, tok: r.tok,
		from: r.in.stride, to: r.out.stride, size: c.Bytes(n),
		inPlace: l.In == collectives.One && l.Out == collectives.One, asks: asks}
	if !asks {
		b.express = r.expressOf(b)
	}
	b.Forget()
	if len(r.set.bound) >= maxPlans {
		clear(r.set.bound)
	}
	r.cfg.Keep(b)
	r.set.bound[b.key] = b
	r.set.latest[slot(c.Kind, c.Op, c.DType, c.Root, dst)] = b
}

// sends returns the program by which the current call is sent, nil if it has several blocks.
func (r *Runner) sends() *program {
	algo := r.sendAlgo()
	if r.cur.Count > r.blockOf(algo, r.cur.DType.Size()) {
		return nil
	}
	prog, err := r.program(r.cur.Kind, algo, r.cur.DType.Size(), r.cur.Count)
	if err != nil {
		return nil // the call that is sent returns it
	}
	return prog
}

// Steady reports whether the call always runs by the same plan, which can be suspended.
func (b *Bound) Steady() bool { return !b.asks }

// Bytes returns the length in bytes of the call's longest buffer.
func (b *Bound) Bytes() int { return b.size }

// Algo returns the algorithm of the bound plan.
func (b *Bound) Algo() collectives.Algo { return b.prog.Algo }

// Current reports whether b is bound in the present topology, and can run without preparation.
func (r *Runner) Current(b *Bound) bool { return b.set == r.set }
