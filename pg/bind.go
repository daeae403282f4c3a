package pg

import (
	"unsafe"

	"tutti/collectives"
	"tutti/p2p"
	"tutti/pg/flight"
)

// A request is a collective as the program asks for it: by a function, by Do or by Start.
type request struct {
	kind               collectives.Kind
	op                 Reduction
	root               int
	dst, src           Buffer
	counts, recvCounts []int
}

// boundCall is a call that has run, ready to run again on any buffers of its lengths: it was checked,
// its algorithm was chosen, its plan was made. A call like it needs none of that. It is good in the
// topology of its set.
type boundCall struct {
	call
	key      boundKey
	set      *planSet
	prog     *program
	tok      p2p.Token // but for its number
	from, to int       // strides of in and out
	size     int       // bytes, see call.size
	inPlace  bool      // its buffers may be the same
	record   flight.Record
	epoch    uint64 // of record
}

// boundKey is what calls have in common that are bound to the same.
type boundKey struct {
	kind     collectives.Kind
	op       Reduction
	dtype    DType
	root     int
	dst, src int // counts
}

// slot is where the latest of several bound calls is looked for first.
func slot(kind collectives.Kind, op Reduction, dtype DType, root, count int) uint {
	return uint(uint64(count<<8^root<<6^int(dtype)<<4^int(op)<<2^int(kind)) * 0x9e3779b97f4a7c15 >> 60)
}

// recall returns what a request is bound to, nil if it has to be checked and run as the first of
// its kind.
func (r *runner) recall(q *request) *boundCall {
	if r.set == nil { // closed
		return nil
	}
	dst, src := &q.dst, &q.src
	at := &r.set.latest[slot(q.kind, q.op, src.DType, q.root, dst.Count)]
	b := *at
	if b == nil || b.key.kind != q.kind || b.key.op != q.op || b.key.dtype != src.DType || b.key.root != q.root ||
		b.key.dst != dst.Count || b.key.src != src.Count {
		if b = r.set.bound[boundKey{q.kind, q.op, src.DType, q.root, dst.Count, src.Count}]; b == nil {
			return nil
		}
		*at = b
	}
	if dst.DType != src.DType || dst.Ptr == nil || src.Ptr == nil || dst.Location != "" || src.Location != "" ||
		!(b.inPlace && dst.Ptr == src.Ptr) && r.g.clash(q.kind, q.root, dst, src, nil) != "" {
		return nil
	}
	return b
}

// remember binds the call that has just run, for recall: a call of one block that needs no
// agreement on memory, whose buffers are used as they are given.
func (r *runner) remember(prog *program) {
	c := r.g.cur
	n := r.g.size
	dst, src, alike := c.count, c.count, false
	switch c.kind {
	case collectives.AllReduce, collectives.Broadcast, collectives.Reduce:
		alike = true
	case collectives.AllGather:
		dst *= n
	case collectives.ReduceScatter:
		src *= n
	case collectives.AllToAll:
		dst, src = dst*n, src*n
	default:
		return
	}
	if c.in == nil || c.out == nil || c.count == 0 || r.bound != nil || r.widens(prog) {
		return
	}
	b := &boundCall{call: *c, key: boundKey{c.kind, c.op, c.dtype, c.root, dst, src}, set: r.set, prog: prog,
		tok:  r.tok,
		from: r.in.stride, to: r.out.stride, size: c.size(n), inPlace: alike, record: r.g.tel.tpl, epoch: r.g.epoch}
	b.forget()
	b.uniform = false // as Split's and Admit's own is, and a program's is not
	if len(r.set.bound) >= maxPlans {
		clear(r.set.bound)
	}
	r.set.bound[b.key] = b
	r.set.latest[slot(c.kind, c.op, c.dtype, c.root, dst)] = b
}

// bind makes what the program asks for the current call.
func (g *Group) bind(q *request) error {
	if b := g.run.recall(q); b != nil {
		g.use(b, q.dst.Ptr, q.src.Ptr)
		return nil
	}
	c, err := g.check(q)
	if err == nil {
		g.adopt(c)
	}
	return err
}

// use makes a bound call on these buffers the current one, adopt any call.
func (g *Group) use(b *boundCall, dst, src unsafe.Pointer) {
	b.in, b.out = src, dst
	g.cur, g.run.bound = &b.call, b
}

func (g *Group) adopt(c call) {
	g.unbound = c
	g.cur, g.run.bound = &g.unbound, nil
}
