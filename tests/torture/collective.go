//go:build linux

package torture

import (
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"time"
	"unsafe"

	"tutti/kernels"
	"tutti/pg"
)

// handle is this rank's handle on a group.
type handle struct {
	g     *pg.Group
	ranks []int // of the job, by slot
	loose bool  // made during a disturbance: some ranks may lack it
}

func (h *handle) slot() int { return h.g.Rank() }

// grow adds the slots that the group of all ranks has gained.
func (h *handle) grow() {
	for slot := len(h.ranks); slot < h.g.Size(); slot++ {
		h.ranks = append(h.ranks, slot)
	}
}

// differs reports whether a rank of the group makes a different call in a step.
func (s *Step) differs(h *handle) bool { return s.Alt != nil && slices.Contains(h.ranks, s.Alt.Rank) }

// call is one collective of this rank: its arguments, and its expected result.
type call struct {
	name     string
	op       Op
	red      pg.Reduction
	d        datum
	h        *handle
	root, n  int // slots
	count    int
	counts   []int // AllGatherV: of all; AllToAllV: sent
	recv     []int
	dst, src []byte
	device   *deviceMemory
	stream   *deviceStream // of buffers there, or nil
	held     bool          // it comes to the call later
	ends     bool          // the call's context ends, or its limit
	limit    time.Duration // of a started operation, 0: the group's
	copied   []byte        // the result, by later work of the stream
	bufs     []*buffer
	inPlace  bool
	opaque   bool
	before   pg.View
	work     *pg.Work
	step     *Step
}

// lengths returns the number of elements in dst and src on this rank.
func (c *call) lengths() (dst, src int) {
	me := c.h.slot()
	sum := func(counts []int) (n int) {
		for _, k := range counts {
			n += k
		}
		return n
	}
	switch c.op {
	case AllReduce:
		return c.count, c.count
	case ReduceScatter:
		return c.count, c.n * c.count
	case AllGather:
		return c.n * c.count, c.count
	case AllToAll:
		return c.n * c.count, c.n * c.count
	case AllGatherV:
		return sum(c.counts), c.counts[me]
	case AllToAllV:
		return sum(c.recv), sum(c.counts)
	case Broadcast, Reduce:
		return c.count, 0
	case Gather:
		if me == c.root {
			return c.n * c.count, c.count
		}
		return 0, c.count
	case Scatter:
		if me == c.root {
			return c.count, c.n * c.count
		}
		return c.count, 0
	}
	return 0, 0
}

// ragged returns the number of elements from a to b.
func ragged(seed uint64, count, a, b int) int {
	h := hash(seed^0x5bd1e995, a, b)
	if h&3 == 0 {
		return 0
	}
	return int(h >> 8 % uint64(count+1))
}

// newCall makes the call of a step, on the rank with this number in the job.
func newCall(s *Step, seed uint64, me int, h *handle) *call {
	c := &call{op: s.Op, red: s.Red, h: h, n: h.g.Size(), count: s.Count, step: s, opaque: s.May&Opaque != 0}
	dt := s.DType
	c.root = s.Root % c.n
	alt := s.Alt
	if alt != nil && alt.Rank != me {
		alt = nil
	}
	if alt != nil {
		switch alt.What {
		case "count", "zero":
			c.count = alt.Count
		case "dtype":
			if dt = pg.Int32; s.DType == pg.Int32 {
				dt = pg.Float64
			}
		case "reduction":
			if c.red = pg.Max; s.Red == pg.Max {
				c.red = pg.Sum
			}
		case "root":
			c.root = (c.root + 1) % c.n
		case "kind":
			if c.op = AllGather; s.Op == AllGather {
				c.op = AllReduce
			}
		}
	}
	c.d = newDatum(dt, c.red, seed)
	if !c.op.reduces() {
		c.d = newDatum(dt, pg.Sum, seed)
	} else if alt != nil && !supported(c.red, dt) {
		c.red = pg.Sum
	}
	switch c.op {
	case AllGatherV:
		for slot := range c.n {
			c.counts = append(c.counts, ragged(seed, c.count, h.ranks[slot], 1<<10))
		}
	case AllToAllV:
		for slot := range c.n {
			c.counts = append(c.counts, ragged(seed, s.Count, me, h.ranks[slot]))
			c.recv = append(c.recv, ragged(seed, s.Count, h.ranks[slot], me))
		}
		if alt != nil && c.n > 1 { // it expects another number than is sent
			from := (h.slot() + 1) % c.n
			if c.recv[from] > 0 {
				c.recv[from] = 0
			} else {
				c.recv[from] = 5
			}
		}
	}
	c.name = fmt.Sprintf("%s (%v, %v, %d elements)", c.op, dt, c.red, c.count)
	return c
}

// scatterBase is where AllToAllV's data for a rank begin.
const scatterBase = 1 << 24

// fill writes this rank's input.
func (c *call) fill(me int) {
	c.input(me, c.src, c.dst)
}

// changed returns how the input of a call that is not in place differs from what this rank wrote,
// "" if it does not.
func (c *call) changed(me int) string {
	if c.inPlace || len(c.src) == 0 {
		return ""
	}
	want := slices.Clone(c.src)
	c.input(me, want, nil)
	return c.d.compare(c.src, want)
}

// input writes the input of rank me to src, or to dst if the call is in place.
func (c *call) input(me int, src, dst []byte) {
	_, n := c.lengths()
	switch c.op {
	case Broadcast, Reduce:
		if c.op == Broadcast && c.h.ranks[c.root] != me {
			return
		}
		c.d.put(dst, c.count, func(i int) int64 { return c.d.value(me, i) })
	case AllToAllV:
		at := 0
		for slot, k := range c.counts {
			c.d.put(src[at*c.d.size:], k, func(i int) int64 { return c.d.value(me, c.h.ranks[slot]*scatterBase+i) })
			at += k
		}
	default:
		c.d.put(src, n, func(i int) int64 { return c.d.value(me, i) })
	}
}

// want writes the result of these active slots to b, which has the former contents of dst.
func (c *call) want(b []byte, active []int) {
	me := c.h.slot()
	size := c.d.size
	ranks := make([]int, len(active))
	for i, s := range active {
		ranks[i] = c.h.ranks[s]
	}
	part := func(at, n, slot, from int) {
		r := c.h.ranks[slot]
		c.d.put(b[at*size:], n, func(i int) int64 { return c.d.value(r, from+i) })
	}
	switch c.op {
	case AllReduce:
		c.d.put(b, c.count, func(i int) int64 { return c.d.fold(ranks, i) })
	case Reduce:
		if me == c.root {
			c.d.put(b, c.count, func(i int) int64 { return c.d.fold(ranks, i) })
		} else {
			part(0, c.count, me, 0)
		}
	case ReduceScatter:
		c.d.put(b, c.count, func(i int) int64 { return c.d.fold(ranks, me*c.count+i) })
	case AllGather, Gather:
		if c.op == AllGather || me == c.root {
			for _, s := range active {
				part(s*c.count, c.count, s, 0)
			}
		}
	case AllGatherV:
		at := 0
		for s, k := range c.counts {
			if slices.Contains(active, s) {
				part(at, k, s, 0)
			}
			at += k
		}
	case AllToAll:
		for _, s := range active {
			part(s*c.count, c.count, s, me*c.count)
		}
	case AllToAllV:
		at := 0
		for s, k := range c.recv {
			if slices.Contains(active, s) {
				part(at, k, s, c.h.ranks[me]*scatterBase)
			}
			at += k
		}
	case Broadcast:
		part(0, c.count, c.root, 0)
	case Scatter:
		part(0, c.count, c.root, me*c.count)
	}
}

// result returns what is wrong with a result, "" if nothing, and the slots that contributed. The
// views before and after the call bound these; by is nil if the result does not tell.
func (c *call) result(dst []byte, was []byte, after pg.View) (wrong string, by []int) {
	want := make([]byte, len(dst))
	try := func(active []int) string {
		copy(want, was)
		c.want(want, active)
		return c.d.compare(dst, want)
	}
	if after.Epoch == c.before.Epoch {
		return try(after.Active), after.Active
	}
	var sure, perhaps []int
	for s := range c.n {
		a, b := slices.Contains(c.before.Active, s), slices.Contains(after.Active, s)
		if a && b || s == c.h.slot() {
			sure = append(sure, s)
		} else if a || b {
			perhaps = append(perhaps, s)
		}
	}
	if c.op == AllGather { // a part of a slot that was lost meanwhile may be incomplete
		for _, s := range perhaps {
			from, to := s*c.count*c.d.size, (s+1)*c.count*c.d.size
			copy(was[from:to], dst[from:to])
		}
	}
	found := false
	for mask := range 1 << min(len(perhaps), 8) {
		active := slices.Clone(sure)
		for i, s := range perhaps {
			if mask>>i&1 != 0 {
				active = append(active, s)
			}
		}
		slices.Sort(active)
		text := try(active)
		switch {
		case text != "" && wrong == "":
			wrong = text
		case text == "" && found:
			return "", nil // several sets of slots match
		case text == "":
			found, by = true, active
		}
	}
	if found {
		return "", by
	}
	return fmt.Sprintf("%s; nor is it the result of any others between the views %v and %v", wrong, c.before,
		after), nil
}

// exchanged reports whether every result depends on the data of all ranks, so that it shows who
// contributed.
func (c *call) exchanged() bool {
	return c.count > 0 && (c.op == AllReduce || c.op == AllGather)
}

func (c *call) buffer(b []byte) pg.Buffer {
	if len(b) == 0 {
		return pg.Buffer{DType: c.d.dtype}
	}
	if c.device.has(b) {
		return c.device.buffer(b, c.d.dtype, c.stream)
	}
	return pg.Buffer{Ptr: unsafe.Pointer(unsafe.SliceData(b)), Count: len(b) / c.d.size, DType: c.d.dtype}
}

// operation returns the call for Start.
func (c *call) operation() pg.Operation {
	dst, src := c.buffer(c.dst), c.buffer(c.src)
	switch c.op {
	case AllReduce:
		if c.inPlace {
			src = pg.Buffer{}
		}
		return pg.AllReduceOp{Dst: dst, Src: src, Op: c.red}
	case ReduceScatter:
		return pg.ReduceScatterOp{Dst: dst, Src: src, Op: c.red}
	case AllGather:
		return pg.AllGatherOp{Dst: dst, Src: src}
	case AllGatherV:
		return pg.AllGatherVOp{Dst: dst, Src: src, Counts: c.counts}
	case AllToAll:
		return pg.AllToAllOp{Dst: dst, Src: src}
	case AllToAllV:
		return pg.AllToAllVOp{Dst: dst, Src: src, SendCounts: c.counts, RecvCounts: c.recv}
	case Broadcast:
		return pg.BroadcastOp{X: dst, Root: c.root}
	case Reduce:
		return pg.ReduceOp{X: dst, Root: c.root, Op: c.red}
	case Gather:
		return pg.GatherOp{Dst: dst, Src: src, Root: c.root}
	case Scatter:
		return pg.ScatterOp{Dst: dst, Src: src, Root: c.root}
	}
	return pg.BarrierOp{}
}

// block makes the blocking call.
func (c *call) block(ctx context.Context) error {
	switch c.d.dtype {
	case pg.Int8:
		return number[int8](ctx, c)
	case pg.Int16:
		return number[int16](ctx, c)
	case pg.Int32:
		return number[int32](ctx, c)
	case pg.Int64:
		return number[int64](ctx, c)
	case pg.Uint8:
		return number[uint8](ctx, c)
	case pg.Uint16:
		return number[uint16](ctx, c)
	case pg.Uint32:
		return number[uint32](ctx, c)
	case pg.Uint64:
		return number[uint64](ctx, c)
	case pg.Float32:
		return number[float32](ctx, c)
	case pg.Float64:
		return number[float64](ctx, c)
	case pg.Float16:
		return number[pg.F16](ctx, c)
	case pg.BFloat16:
		return number[pg.BF16](ctx, c)
	case pg.Float8E4M3:
		return number[pg.F8E4M3](ctx, c)
	case pg.Float8E5M2:
		return number[pg.F8E5M2](ctx, c)
	case pg.Bool:
		return element[bool](ctx, c)
	}
	return c.h.g.Do(ctx, c.operation()) // a type that has come since
}

func as[T pg.Element](b []byte) []T {
	var t T
	return unsafe.Slice((*T)(unsafe.Pointer(unsafe.SliceData(b))), len(b)/int(unsafe.Sizeof(t)))
}

func number[T pg.Number](ctx context.Context, c *call) error {
	dst, src := as[T](c.dst), as[T](c.src)
	switch c.op {
	case AllReduce:
		return pg.AllReduce(ctx, c.h.g, dst, c.red)
	case ReduceScatter:
		return pg.ReduceScatter(ctx, c.h.g, dst, src, c.red)
	case Reduce:
		return pg.Reduce(ctx, c.h.g, dst, c.root, c.red)
	}
	return element[T](ctx, c)
}

func element[T pg.Element](ctx context.Context, c *call) error {
	dst, src := as[T](c.dst), as[T](c.src)
	switch c.op {
	case AllGather:
		return pg.AllGather(ctx, c.h.g, dst, src)
	case AllGatherV:
		return pg.AllGatherV(ctx, c.h.g, dst, src, c.counts)
	case AllToAll:
		return pg.AllToAll(ctx, c.h.g, dst, src)
	case AllToAllV:
		return pg.AllToAllV(ctx, c.h.g, dst, src, c.counts, c.recv)
	case Broadcast:
		return pg.Broadcast(ctx, c.h.g, dst, c.root)
	case Gather:
		return pg.Gather(ctx, c.h.g, dst, src, c.root)
	case Scatter:
		return pg.Scatter(ctx, c.h.g, dst, src, c.root)
	}
	return c.h.g.Barrier(ctx)
}

// conduct makes a call as its part says. It is a field of a rank so that tests of this package can
// replace it.
func conduct(ctx context.Context, c *call, how How) (err error) {
	far := c.device.has(c.dst) || c.device.has(c.src)
	if how == Blocking && !far && (c.op != AllReduce || c.inPlace) && (c.d.dtype != pg.Bool || !c.op.reduces()) {
		return c.block(ctx)
	}
	if how == Blocking { // there is no such function
		return c.h.g.Do(ctx, c.operation())
	}
	if c.limit > 0 {
		c.work = c.h.g.StartWithin(c.limit, c.operation())
	} else {
		c.work = c.h.g.Start(c.operation())
	}
	if how == Started {
		return nil
	}
	return waitFor(ctx, c.work)
}

// waitFor waits for a Work twice: for a moment, which may interrupt it anywhere, and until it has
// ended or ctx ends.
func waitFor(ctx context.Context, w *pg.Work) error {
	brief := time.Duration(rand.IntN(300)) * time.Microsecond
	if rand.IntN(2) == 0 {
		brief *= 10
	}
	short, cancel := context.WithTimeout(ctx, brief)
	defer cancel()
	w.Wait(short)
	return w.Wait(ctx)
}

// supported reports whether a reduction exists.
func supported(red pg.Reduction, dt pg.DType) bool { return kernels.Supported(red, dt) }

func view(v pg.View) string {
	return strings.ReplaceAll(fmt.Sprintf("epoch %d %v", v.Epoch, v.Active), " ", ",")
}

// within returns the context of the part of a step.
func (p *Part) within(parent context.Context) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithCancel(parent)
	if p.Limit > 0 {
		cancel()
		ctx, cancel = context.WithTimeout(parent, p.Limit)
	}
	switch {
	case p.Cancel < 0:
		cancel()
	case p.Cancel > 0:
		t := time.AfterFunc(p.Cancel, cancel)
		inner := cancel
		cancel = func() { t.Stop(); inner() }
	}
	return ctx, cancel
}
