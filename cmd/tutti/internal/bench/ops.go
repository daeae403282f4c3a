package bench

import (
	"context"
	"unsafe"

	"tutti/kernels"
	"tutti/pg"
)

// operation describes a measured operation.
type operation struct {
	name     string
	reduces  bool
	rooted   bool
	parts    bool // its size is the sum of all ranks' parts
	out, in  bool // supports out of place, in place
	minRanks int
	single   bool // cannot be started asynchronously
	// factor is bus bandwidth over algorithm bandwidth, for n ranks: the least that the links must
	// carry, over the size.
	factor func(n float64) float64
}

func one(float64) float64           { return 1 }
func others(n float64) float64      { return (n - 1) / n }
func twiceOthers(n float64) float64 { return 2 * (n - 1) / n }
func nothing(float64) float64       { return 0 }

var operations = []*operation{
	{name: "allreduce", reduces: true, out: true, in: true, factor: twiceOthers},
	{name: "reducescatter", reduces: true, parts: true, out: true, factor: others},
	{name: "allgather", parts: true, out: true, in: true, factor: others},
	{name: "allgatherv", parts: true, out: true, in: true, factor: others},
	{name: "alltoall", parts: true, out: true, factor: others},
	{name: "alltoallv", parts: true, out: true, factor: others},
	{name: "broadcast", rooted: true, in: true, factor: one},
	{name: "reduce", reduces: true, rooted: true, in: true, factor: one},
	{name: "gather", rooted: true, parts: true, out: true, factor: others},
	{name: "scatter", rooted: true, parts: true, out: true, factor: others},
	{name: "sendrecv", out: true, minRanks: 2, single: true, factor: one},
	{name: "put", out: true, minRanks: 2, single: true, factor: one},
	{name: "barrier", out: true, factor: nothing},
}

// Ops lists the names of the operations.
func Ops() []string {
	var names []string
	for _, o := range operations {
		names = append(names, o.name)
	}
	return names
}

func find(name string) *operation {
	for _, o := range operations {
		if o.name == name {
			return o
		}
	}
	return nil
}

// instance is one operation on one size: its buffers, inputs, call, and check.
type instance struct {
	count, bytes int
	// first is the element of the infinite tables with which all data begins: another value gives
	// other inputs and another result.
	first   int
	write   func()       // writes the inputs
	op      pg.Operation // nil: the call has several
	call    func(context.Context) error
	calls   int          // number of operations in a call
	result  func() int64 // reads the result, and counts wrong elements
	kept    func() int64 // the same for inputs that the call must preserve; nil: none
	outs    [][]byte     // what the call writes, with margins
	outputs []byte       // the last of them, without margins
}

// fill poisons what the call writes and writes the inputs.
func (in *instance) fill() {
	for _, o := range in.outs {
		poisoned(o)
	}
	in.write()
}

// wrong counts all elements that are wrong after fill and one call, and the bytes that the call
// wrote outside of its outputs.
func (in *instance) wrong() int64 {
	w := in.result()
	if in.kept != nil {
		w += in.kept()
	}
	for _, o := range in.outs {
		w += spoilt(o[:margin]) + spoilt(o[len(o)-margin:])
	}
	return w
}

// margin is the number of bytes around an output that are checked, and poison the value that they
// and outputs have before a call.
const (
	margin = 64
	poison = 0xa5
)

func poisoned(b []byte) {
	for i := range b {
		b[i] = poison
	}
}

func spoilt(b []byte) (n int64) {
	for _, x := range b {
		if x != poison {
			n++
		}
	}
	return n
}

// arena is the memory of a rank's two buffers, aligned, each with a margin before and behind. Of a
// put, b is the rank's part of win.
type arena struct {
	a, b []byte
	win  *window
}

// window is a window, and how many signals its ranks have sent to each other.
type window struct {
	*pg.Window
	signals uint64
}

// vcounts returns the uneven counts of allgatherv, count on average.
func vcounts(n, count int) []int {
	c := make([]int, n)
	for r := range c {
		c[r] = count * 2 * (r + 1) / (n + 1)
	}
	return c
}

// pcounts returns the count from rank a to rank b in alltoallv.
func pcounts(n, count, a, b int) int { return count * 2 * ((a+2*b)%n + 1) / (n + 1) }

func sum(c []int) (s int) {
	for _, x := range c {
		s += x
	}
	return s
}

// newInstance makes operation o of about size bytes. The arena must hold 2*size bytes and the
// margins in each buffer.
func newInstance(g *pg.Group, o *operation, dt kernels.DType, red pg.Reduction, rx *reduction, mem arena,
	size, root int, inPlace bool) *instance {
	n, me, es := g.Size(), g.Rank(), dt.Size()
	count := max(1, size/es)
	if o.parts {
		count = max(1, size/es/n)
	}
	in := &instance{count: count, bytes: count * es, calls: 1}
	in.call = func(ctx context.Context) error { return g.Do(ctx, in.op) }
	if o.parts {
		in.bytes *= n
	}
	a, b := mem.a[margin:], mem.b[margin:]
	buffer := func(mem []byte, elems int) pg.Buffer {
		return pg.Buffer{Ptr: unsafe.Pointer(unsafe.SliceData(mem)), Count: elems, DType: dt}
	}
	output := func(buf []byte, elems int) pg.Buffer {
		in.outs = append(in.outs, buf[:2*margin+elems*es])
		in.outputs = buf[margin : margin+elems*es]
		return buffer(in.outputs, elems)
	}
	tables := map[[2]int]table{}
	bits := func(from, part int) table {
		t, ok := tables[[2]int{from, part}]
		if !ok {
			t = bitsTable(dt, from, part)
			tables[[2]int{from, part}] = t
		}
		return t
	}
	bytesOf := func(mem []byte, first, elems int) []byte { return mem[first*es : (first+elems)*es] }
	switch o.name {
	case "allreduce", "reduce":
		if inPlace {
			x := output(mem.b, count)
			xb := bytesOf(b, 0, count)
			in.write = func() { rx.inputs[me].fill(xb, in.first, es) }
			in.op = pg.AllReduceOp{Dst: x, Op: red}
			in.result = func() int64 { return rx.result.wrong(xb, in.first, es) }
			if o.name == "reduce" {
				in.op = pg.ReduceOp{X: x, Root: root, Op: red}
				if me != root {
					in.result, in.kept = func() int64 { return 0 },
						func() int64 { return rx.inputs[me].wrong(xb, in.first, es) }
				}
			}
			break
		}
		src, dst := buffer(a, count), output(mem.b, count)
		sb, db := bytesOf(a, 0, count), bytesOf(b, 0, count)
		in.write = func() { rx.inputs[me].fill(sb, in.first, es) }
		in.op = pg.AllReduceOp{Dst: dst, Src: src, Op: red}
		in.result = func() int64 { return rx.result.wrong(db, in.first, es) }
		in.kept = func() int64 { return rx.inputs[me].wrong(sb, in.first, es) }
	case "reducescatter":
		src, dst := buffer(a, n*count), output(mem.b, count)
		sb, db := bytesOf(a, 0, n*count), bytesOf(b, 0, count)
		in.write = func() { rx.inputs[me].fill(sb, in.first, es) }
		in.op = pg.ReduceScatterOp{Dst: dst, Src: src, Op: red}
		in.result = func() int64 { return rx.result.wrong(db, me*count+in.first, es) }
		in.kept = func() int64 { return rx.inputs[me].wrong(sb, in.first, es) }
	case "allgather", "allgatherv":
		counts := vcounts(n, count)
		if o.name == "allgather" {
			for r := range counts {
				counts[r] = count
			}
		}
		total, mine := sum(counts), sum(counts[:me])
		in.bytes = total * es
		dst := output(mem.b, total)
		db, sb := bytesOf(b, 0, total), bytesOf(a, 0, counts[me])
		src := buffer(a, counts[me])
		if inPlace {
			sb = bytesOf(b, mine, counts[me])
			src = buffer(sb, counts[me])
		}
		in.write = func() { bits(me, 0).fill(sb, in.first, es) }
		in.op = pg.AllGatherOp{Dst: dst, Src: src}
		if o.name == "allgatherv" {
			in.op = pg.AllGatherVOp{Dst: dst, Src: src, Counts: counts}
		}
		in.result = func() (w int64) {
			for r, at := 0, 0; r < n; at, r = at+counts[r], r+1 {
				w += bits(r, 0).wrong(bytesOf(db, at, counts[r]), in.first, es)
			}
			return w
		}
		if !inPlace {
			in.kept = func() int64 { return bits(me, 0).wrong(sb, in.first, es) }
		}
	case "alltoall", "alltoallv":
		sends, recvs := make([]int, n), make([]int, n)
		for r := range n {
			sends[r], recvs[r] = count, count
			if o.name == "alltoallv" {
				sends[r], recvs[r] = pcounts(n, count, me, r), pcounts(n, count, r, me)
			}
		}
		src, dst := buffer(a, sum(sends)), output(mem.b, sum(recvs))
		sb, db := bytesOf(a, 0, sum(sends)), bytesOf(b, 0, sum(recvs))
		in.write = func() {
			for r, at := 0, 0; r < n; at, r = at+sends[r], r+1 {
				bits(me, r).fill(bytesOf(sb, at, sends[r]), in.first, es)
			}
		}
		in.op = pg.AllToAllOp{Dst: dst, Src: src}
		if o.name == "alltoallv" {
			in.op = pg.AllToAllVOp{Dst: dst, Src: src, SendCounts: sends, RecvCounts: recvs}
		}
		in.result = func() (w int64) {
			for r, at := 0, 0; r < n; at, r = at+recvs[r], r+1 {
				w += bits(r, me).wrong(bytesOf(db, at, recvs[r]), in.first, es)
			}
			return w
		}
		in.kept = func() (w int64) {
			for r, at := 0, 0; r < n; at, r = at+sends[r], r+1 {
				w += bits(me, r).wrong(bytesOf(sb, at, sends[r]), in.first, es)
			}
			return w
		}
	case "broadcast":
		x := output(mem.b, count)
		xb := bytesOf(b, 0, count)
		in.write = func() {
			if me == root {
				bits(me, 0).fill(xb, in.first, es)
			}
		}
		in.op = pg.BroadcastOp{X: x, Root: root}
		in.result = func() int64 { return bits(root, 0).wrong(xb, in.first, es) }
	case "gather":
		src := buffer(a, count)
		sb := bytesOf(a, 0, count)
		var dst pg.Buffer
		if me == root {
			dst = output(mem.b, n*count)
		} else {
			output(mem.b, 0)
		}
		in.write = func() { bits(me, 0).fill(sb, in.first, es) }
		in.op = pg.GatherOp{Dst: dst, Src: src, Root: root}
		in.result = func() (w int64) {
			for r := 0; me == root && r < n; r++ {
				w += bits(r, 0).wrong(bytesOf(b, r*count, count), in.first, es)
			}
			return w
		}
		in.kept = func() int64 { return bits(me, 0).wrong(sb, in.first, es) }
	case "scatter":
		var src pg.Buffer
		if me == root {
			src = buffer(a, n*count)
		}
		dst := output(mem.b, count)
		in.write = func() {
			for r := 0; me == root && r < n; r++ {
				bits(root, r).fill(bytesOf(a, r*count, count), in.first, es)
			}
		}
		in.op = pg.ScatterOp{Dst: dst, Src: src, Root: root}
		in.result = func() int64 { return bits(root, me).wrong(bytesOf(b, 0, count), in.first, es) }
		in.kept = func() (w int64) {
			for r := 0; me == root && r < n; r++ {
				w += bits(root, r).wrong(bytesOf(a, r*count, count), in.first, es)
			}
			return w
		}
	case "sendrecv":
		const tag = 7
		to, from := (me+1)%n, (me+n-1)%n
		src, dst := buffer(a, count), output(mem.b, count)
		sb, db := bytesOf(a, 0, count), bytesOf(b, 0, count)
		in.write = func() { bits(me, to).fill(sb, in.first, es) }
		in.call = func(ctx context.Context) error {
			w := g.Start(pg.RecvOp{X: dst, From: from, Tag: tag})
			if err := g.Do(ctx, pg.SendOp{X: src, To: to, Tag: tag}); err != nil {
				return err
			}
			return w.Wait(ctx)
		}
		in.result = func() int64 { return bits(from, me).wrong(db, in.first, es) }
		in.kept = func() int64 { return bits(me, to).wrong(sb, in.first, es) }
	case "put": // once round the ring: each rank puts after the put of the one before
		to, from := (me+1)%n, (me+n-1)%n
		output(mem.b, count)
		sb, db, win := bytesOf(a, 0, count), bytesOf(b, 0, count), mem.win
		in.write = func() { bits(me, to).fill(sb, in.first, es) }
		in.calls = n
		in.call = func(ctx context.Context) error {
			win.signals++
			if me != 0 {
				if err := win.WaitSignal(ctx, from, 0, win.signals); err != nil {
					return err
				}
			}
			if err := win.PutSignal(ctx, to, margin, sb, 0); err != nil {
				return err
			}
			if err := win.Flush(ctx, to); err != nil || me != 0 {
				return err
			}
			return win.WaitSignal(ctx, from, 0, win.signals)
		}
		in.result = func() int64 { return bits(from, me).wrong(db, in.first, es) }
		in.kept = func() int64 { return bits(me, to).wrong(sb, in.first, es) }
	case "barrier":
		in.count, in.bytes = 0, 0
		in.write = func() {}
		in.op = pg.BarrierOp{}
		in.result = func() int64 { return 0 }
	}
	return in
}

// queue combines instances of one operation on one size into one call, which starts all of them,
// then waits for each.
func queue(g *pg.Group, each []*instance) *instance {
	q := *each[0]
	q.calls, q.outs = len(each), nil
	for _, in := range each {
		q.outs = append(q.outs, in.outs...)
	}
	q.write = func() {
		for _, in := range each {
			in.first = q.first
			in.write()
		}
	}
	count := func(what func(in *instance) func() int64) func() int64 {
		return func() (w int64) {
			for _, in := range each {
				w += what(in)()
			}
			return w
		}
	}
	q.result = count(func(in *instance) func() int64 { return in.result })
	if q.kept != nil {
		q.kept = count(func(in *instance) func() int64 { return in.kept })
	}
	works := make([]*pg.Work, len(each))
	q.call = func(ctx context.Context) error {
		for i, in := range each {
			works[i] = g.Start(in.op)
		}
		for _, w := range works {
			if err := w.Wait(ctx); err != nil {
				return err
			}
		}
		return nil
	}
	return &q
}
