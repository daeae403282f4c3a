package pg

import (
	"fmt"
	"slices"
	"unsafe"

	"tutti/collectives"
	"tutti/kernels"
	"tutti/p2p"
)

const (
	// vectorBlock and partBlock bound, in bytes, what one plan covers: longer vectors (or parts,
	// over all ranks) are worked off in blocks, so that plans and scratch memory do not grow with
	// the message.
	vectorBlock = 8 << 20
	// directMin is the size in bytes from which it pays to ask whether all buffers are mapped.
	directMin = 16 << 10
	maxPlans  = 512 // cached a group
	// cachedCopy is the longest copy that is likely to stay in a shared cache.
	cachedCopy = 4 << 20
	// wireChunk is the pipelining grain on links that are no memory: a system call moves a whole
	// one.
	wireChunk = 128 << 10
)

// runner executes plans for a group. It belongs to the collective that runs, and keeps everything
// it needs for the next: a warm run allocates nothing.
type runner struct {
	g   *Group
	tok p2p.Token

	algo  collectives.Algo // forced, or Auto
	set   *planSet         // of the group's topology
	vary  []varying        // programs of the latest allgatherv and alltoallv
	last  *program         // most recent: usually the next
	lastK planKey

	recvs []p2p.Recv
	ptrs  []unsafe.Pointer
	tmp   *p2p.Region
	wide  *p2p.Region // float32 copies of small floats

	// where the memories of the running plan are
	in, out base
	scratch unsafe.Pointer
	sending int      // slot that a Send waits for, -1: none
	prog    *program // running; nil between operations
	mapped  mapped   // the peers' memories, in a direct plan

	bound *boundCall // what the current call is bound to, if it is
	next  int        // the step that is under way, or comes next

	dirty bool       // the operation works in place and has begun to write
	sets  []*planSet // of the latest topologies, the present one last
}

// repeat is collective for a bound call.
func (r *runner) repeat(b *boundCall) error {
	g := r.g
	r.tok = b.tok
	r.tok.Seq = g.seq
	g.history[g.seq%uint64(len(g.history))] = r.tok
	r.in, r.out = base{ptr: b.in, stride: b.from}, base{ptr: b.out, stride: b.to}
	if err := g.coll.Begin(r.tok, g.hint); err != nil {
		return err
	}
	return r.steps(b.prog, b.dtype)
}

// resume goes on with a bound call that was suspended.
func (r *runner) resume() error { return r.stepsFrom(r.next, r.bound.prog, r.bound.dtype) }

// base says where the parts of In or Out are: part i at ptr + i*stride, or at ptr + offs[i].
type base struct {
	ptr    unsafe.Pointer
	stride int
	offs   []int
}

func (b *base) part(i int32) unsafe.Pointer {
	if b.offs != nil {
		return unsafe.Add(b.ptr, b.offs[i])
	}
	return unsafe.Add(b.ptr, int(i)*b.stride)
}

// program is a plan made ready to run.
type program struct {
	*collectives.Plan
	lent  [][]int32 // by step: for each of its sources the Recv step whose message may be used where it lies, or -1
	recvs []int32   // all Recv steps
	sure  []bool    // by step, in a direct plan: a Send that tells others what was made of memory read since the last one
	loads []load    // the peers whose memory a direct plan loads, ascending
}

// onePass reports whether an algorithm combines every element once, from all ranks; in the others
// partial results travel.
func onePass(a collectives.Algo) bool {
	switch a {
	case collectives.Flat, collectives.Direct, collectives.TwoShot, collectives.Pairwise:
		return true
	}
	return false
}

type planKey struct {
	kind  collectives.Kind
	algo  collectives.Algo
	root  int
	elem  int
	count int
}

func (r *runner) init(g *Group) {
	r.g, r.algo, r.sending = g, g.job.algo, -1
	r.settle()
	g.wait.OnLong(r.long)
}

func compile(p *collectives.Plan) *program {
	prog := &program{Plan: p, lent: make([][]int32, len(p.Steps)), sure: make([]bool, len(p.Steps))}
	loaded := false
	for i := range p.Steps {
		s := &p.Steps[i]
		srcs := s.Srcs
		for _, ref := range append([]collectives.Ref{s.Src}, srcs...) {
			loaded = prog.note(ref) || loaded
		}
		if s.Verb == collectives.Send {
			prog.sure[i], loaded = loaded, false
		}
		switch s.Verb {
		case collectives.Recv:
			prog.recvs = append(prog.recvs, int32(i))
			continue
		case collectives.Combine:
		default:
			srcs = []collectives.Ref{s.Src}
		}
		lent := make([]int32, len(srcs))
		for j := range srcs {
			lent[j] = -1
			for _, n := range s.Needs {
				if q := &p.Steps[n]; q.Once && q.Dst == srcs[j] && q.Dst.Len > 0 {
					lent[j] = n
				}
			}
		}
		prog.lent[i] = lent
	}
	return prog
}

// load is a peer and which of its buffers are loaded.
type load struct {
	slot    int
	in, out bool
}

// note adds ref to the loads, and reports whether it is one.
func (p *program) note(ref collectives.Ref) bool {
	if ref.Len == 0 || ref.Buf != collectives.PeerIn && ref.Buf != collectives.PeerOut {
		return false
	}
	at, found := slices.BinarySearchFunc(p.loads, int(ref.Peer), func(l load, slot int) int { return l.slot - slot })
	if !found {
		p.loads = slices.Insert(p.loads, at, load{slot: int(ref.Peer)})
	}
	l := &p.loads[at]
	l.in, l.out = l.in || ref.Buf == collectives.PeerIn, l.out || ref.Buf == collectives.PeerOut
	return true
}

// varying is the program of a call with counts, and the counts that it is for.
type varying struct {
	kind               collectives.Kind
	algo               collectives.Algo
	elem               int
	counts, recvCounts []int
	offs, recvOffs     []int // bytes
	prog               *program
}

// varying returns the program of the current call, which has counts. Programs with the same counts
// again and again are common; a few are kept.
func (r *runner) varying(algo collectives.Algo, elem int) (*program, error) {
	c := r.g.cur
	at := -1
	for i := range r.vary {
		if v := &r.vary[i]; v.kind == c.kind && v.algo == algo && v.elem == elem && slices.Equal(v.counts, c.counts) && slices.Equal(v.recvCounts, c.recvCounts) {
			at = i
			break
		}
	}
	if at < 0 {
		plan, err := collectives.Build(algo, r.shape(c.kind, elem, 0))
		if err != nil {
			return nil, fmt.Errorf("planning %v: %w", c.kind, err)
		}
		v := varying{kind: c.kind, algo: algo, elem: elem, counts: slices.Clone(c.counts), recvCounts: slices.Clone(c.recvCounts),
			offs: offsets(c.counts, elem), recvOffs: offsets(c.recvCounts, elem)}
		plan.Shape.Counts, plan.Shape.RecvCounts = v.counts, v.recvCounts // the caller's may change
		v.prog = compile(plan)
		if len(r.vary) < 16 {
			r.vary = append(r.vary, v)
			at = len(r.vary) - 1
		} else {
			at = int(r.g.seq % 16)
			r.vary[at] = v
		}
	}
	v := &r.vary[at]
	r.out.offs = v.offs
	if c.kind == collectives.AllToAllV {
		r.in.offs, r.out.offs = v.offs, v.recvOffs
	}
	return v.prog, nil
}

func (r *runner) shape(kind collectives.Kind, elem, count int) collectives.Shape {
	g, t := r.g, &r.set.topology
	chunk := wireChunk
	if t.caps.SharedMemory {
		chunk = collectives.DefaultChunk
	}
	return collectives.Shape{Kind: kind, Size: t.size, Active: t.active, Rank: g.rank, Root: g.cur.root, Elem: elem, Count: count, Chunk: chunk,
		Counts: g.cur.counts, RecvCounts: g.cur.recvCounts, Hosts: t.hosts}
}

// program returns the plan for count elements of the current call.
func (r *runner) program(kind collectives.Kind, algo collectives.Algo, elem, count int) (*program, error) {
	if kind == collectives.AllGatherV || kind == collectives.AllToAllV {
		return r.varying(algo, elem)
	}
	k := planKey{kind, algo, r.g.cur.root, elem, count}
	if r.last != nil && k == r.lastK {
		return r.last, nil
	}
	if p := r.set.plans[k]; p != nil {
		r.last, r.lastK = p, k
		return p, nil
	}
	plan, err := collectives.Build(algo, r.shape(kind, elem, count))
	if err != nil {
		return nil, fmt.Errorf("planning %v: %w", kind, err)
	}
	p := compile(plan)
	if len(r.set.plans) >= maxPlans {
		clear(r.set.plans)
	}
	r.set.plans[k] = p
	r.last, r.lastK = p, k
	return p, nil
}

// choose returns the algorithm for the current call.
func (r *runner) choose(mapped bool) collectives.Algo {
	c := r.g.cur
	s := r.shape(c.kind, c.dtype.Size(), c.count)
	caps := r.g.caps
	caps.Mapped = mapped
	if r.algo != collectives.Auto && (r.algo != collectives.Direct || mapped) {
		for _, a := range collectives.Algorithms(c.kind) {
			if a == r.algo {
				return a
			}
		}
	}
	return r.g.table.Choose(s, caps)
}

// collective runs the group's current call.
func (r *runner) collective() (err error) {
	g, c := r.g, r.g.cur
	elem := c.dtype.Size()
	r.tok = c.token(g.seq, r.algo)
	g.history[g.seq%uint64(len(g.history))] = r.tok
	total := elem * c.count
	switch c.kind {
	case collectives.AllReduce, collectives.Broadcast, collectives.Reduce, collectives.Barrier:
	case collectives.AllToAllV:
		total = 0 // not known to all alike
	case collectives.AllGatherV:
		total = 0
		for _, n := range c.counts {
			total += n * elem
		}
	default:
		total *= g.size
	}
	if err := g.coll.Begin(r.tok, g.hint); err != nil {
		return err
	}
	direct := g.caps.Mapped && len(g.active) > 1 && total >= directMin
	algo := r.choose(direct)
	if algo == collectives.Direct {
		defer r.mapped.close()
		ok, err := r.exchange(elem)
		if err != nil {
			return err
		}
		if !ok {
			algo = r.choose(false)
		}
	}
	g.tel.chosen(algo)
	return r.blocks(algo, elem, direct)
}

// blocks works the call off, one plan per block. asks says that a call like it is to ask again
// whether memory is mapped.
func (r *runner) blocks(algo collectives.Algo, elem int, asks bool) error {
	g, c := r.g, r.g.cur
	r.in, r.out = base{ptr: c.in}, base{ptr: c.out}
	switch c.kind {
	case collectives.ReduceScatter, collectives.AllToAll, collectives.Scatter:
		r.in.stride = c.count * elem
	}
	switch c.kind {
	case collectives.AllGather, collectives.AllToAll, collectives.Gather:
		r.out.stride = c.count * elem
	}
	if c.kind == collectives.Broadcast || c.kind == collectives.Reduce && g.rank != c.root {
		r.out.ptr = c.in // the root's result is where it is; others have none
	}
	block := c.count
	if algo != collectives.Direct { // which has as many steps for any length
		switch c.kind {
		case collectives.AllReduce, collectives.Broadcast, collectives.Reduce:
			block = max(1, vectorBlock/elem)
		case collectives.AllGatherV, collectives.AllToAllV, collectives.Barrier:
		default:
			block = max(1, max(vectorBlock/g.size, 4<<10)/elem)
		}
	}
	if c.count <= block {
		prog, err := r.program(c.kind, algo, elem, c.count)
		if err != nil {
			return err
		}
		if err := r.block(prog, elem, c.count); err != nil {
			return err
		}
		if !asks {
			r.remember(prog)
		}
		return nil
	}
	in, out := r.in.ptr, r.out.ptr
	for at := 0; at < c.count; at += block {
		n := min(block, c.count-at)
		prog, err := r.program(c.kind, algo, elem, n)
		if err != nil {
			return err
		}
		if in != nil {
			r.in.ptr = unsafe.Add(in, at*elem)
		}
		if out != nil {
			r.out.ptr = unsafe.Add(out, at*elem)
		}
		if err := r.block(prog, elem, n); err != nil {
			return err
		}
	}
	return nil
}

func offsets(counts []int, elem int) []int {
	offs, at := make([]int, len(counts)), 0
	for i, n := range counts {
		offs[i] = at
		at += n * elem
	}
	return offs
}

// block runs one plan over count elements (of the vector, or of each part).
func (r *runner) block(prog *program, elem, count int) error {
	if r.widens(prog) {
		return r.widened(prog.Algo, count)
	}
	return r.steps(prog, r.g.cur.dtype)
}

// widens reports whether the current call's partial results travel as float32.
func (r *runner) widens(prog *program) bool {
	c := r.g.cur
	small := c.dtype == Float16 || c.dtype == BFloat16 || c.dtype == Float8E4M3 || c.dtype == Float8E5M2
	return small && c.kind.Reduces() && !onePass(prog.Algo) && len(r.g.active) > 1
}

// widened runs a reduction of 16-bit or 8-bit floats that takes several steps: partial sums travel
// and are combined as float32, and are rounded once.
func (r *runner) widened(algo collectives.Algo, count int) error {
	g, c := r.g, r.g.cur
	prog, err := r.program(c.kind, algo, 4, count)
	if err != nil {
		return err
	}
	parts := 1
	if c.kind == collectives.ReduceScatter {
		parts = g.size
	}
	if r.wide, err = r.control(r.wide, 4*count*(parts+1)); err != nil {
		return err
	}
	in, out := r.in, r.out
	wide := unsafe.Pointer(unsafe.SliceData(r.wide.Mem))
	for i := range parts {
		kernels.Widen(c.dtype, unsafe.Add(wide, i*4*count), in.part(int32(i)), count)
	}
	r.in = base{ptr: wide, stride: 4 * count}
	r.out = r.in
	if parts > 1 {
		r.out = base{ptr: unsafe.Add(wide, parts*4*count)}
	}
	dirty := r.dirty
	err = r.steps(prog, Float32)
	r.dirty = dirty // it has written to r.wide alone
	if err == nil && (c.kind != collectives.Reduce || g.rank == c.root) {
		r.dirty = r.dirty || in.ptr == out.ptr
		kernels.Narrow(c.dtype, out.ptr, r.out.ptr, count)
	}
	r.in, r.out = in, out
	return err
}

// control returns a control region of at least n bytes, keeping old if it is large enough.
func (r *runner) control(old *p2p.Region, n int) (*p2p.Region, error) {
	if old != nil && len(old.Mem) >= n {
		return old, nil
	}
	return r.g.job.proxy.Control(max(n, 4096))
}

// at returns the address of ref.
func (r *runner) at(ref *collectives.Ref) unsafe.Pointer {
	var p unsafe.Pointer
	switch ref.Buf {
	case collectives.In:
		p = r.in.part(ref.Part)
	case collectives.Out:
		p = r.out.part(ref.Part)
	case collectives.Tmp:
		p = r.scratch
	case collectives.PeerIn:
		p = unsafe.Add(r.mapped.peers[ref.Peer].in, int(ref.Part)*r.in.stride)
	case collectives.PeerOut:
		p = unsafe.Add(r.mapped.peers[ref.Peer].out, int(ref.Part)*r.out.stride)
	}
	return unsafe.Add(p, ref.Off)
}

func (r *runner) bytes(ref *collectives.Ref) []byte {
	if ref.Len == 0 {
		return nil
	}
	return unsafe.Slice((*byte)(r.at(ref)), ref.Len)
}

// source returns source j of step i: where the link has it, or where it belongs.
func (r *runner) source(prog *program, i, j int, ref *collectives.Ref) unsafe.Pointer {
	if n := prog.lent[i][j]; n >= 0 {
		return unsafe.Pointer(unsafe.SliceData(r.recvs[n].View()))
	}
	return r.at(ref)
}

// steps runs a plan over the memories in r. It has the proxy's lock, and gives it up while it waits
// or moves much memory.
func (r *runner) steps(prog *program, dtype DType) error { return r.stepsFrom(0, prog, dtype) }

// stepsFrom is steps that begins with step first: those before have run.
func (r *runner) stepsFrom(first int, prog *program, dtype DType) error {
	g := r.g
	if len(prog.Steps) > len(r.recvs) {
		r.recvs = make([]p2p.Recv, len(prog.Steps))
	}
	if prog.Tmp > 0 {
		var err error
		if r.tmp, err = r.control(r.tmp, prog.Tmp); err != nil {
			return err
		}
		r.scratch = unsafe.Pointer(unsafe.SliceData(r.tmp.Mem))
	}
	r.prog = prog
	inPlace := r.in.ptr == r.out.ptr && !r.dirty && g.cur.kind.Reduces()
	for i := first; i < len(prog.Steps); i++ {
		r.next = i
		s := &prog.Steps[i]
		for _, n := range s.Needs {
			if !r.recvs[n].Done() {
				if err := g.coll.WaitRecv(&g.wait, &r.recvs[n]); err != nil {
					return err
				}
			}
		}
		if inPlace && s.Dst.Buf == collectives.Out {
			r.dirty, inPlace = true, false
		}
		switch s.Verb {
		case collectives.Recv:
			g.coll.PostRecv(&r.recvs[i], int(s.Peer), r.tok, r.bytes(&s.Dst), s.Once)
			continue
		case collectives.Send:
			if prog.sure[i] {
				if err := r.verify(); err != nil {
					return err
				}
			}
			r.sending = int(s.Peer)
			var src []byte
			if s.Src.Len > 0 {
				src = unsafe.Slice((*byte)(r.source(prog, i, 0, &s.Src)), s.Src.Len)
			}
			if err := g.coll.Send(&g.wait, int(s.Peer), r.tok, src); err != nil {
				return err
			}
			r.sending = -1
		case collectives.Copy:
			r.copy(r.at(&s.Dst), r.source(prog, i, 0, &s.Src), s.Dst.Len)
		case collectives.Combine:
			if err := r.combine(prog, i, s, dtype); err != nil {
				return err
			}
		}
		for _, n := range prog.lent[i] {
			if n >= 0 {
				g.coll.ReleaseRecv(&r.recvs[n])
			}
		}
	}
	r.next = len(prog.Steps)
	for _, n := range prog.recvs {
		if !r.recvs[n].Done() {
			if err := g.coll.WaitRecv(&g.wait, &r.recvs[n]); err != nil {
				return err
			}
		}
	}
	r.prog = nil
	return nil
}

// unlockedFrom is the number of bytes from which memory is moved without the proxy's lock, so that
// other operations of this rank get on meanwhile.
const unlockedFrom = 128 << 10

func (r *runner) copy(dst, src unsafe.Pointer, n int) {
	if dst == src || n == 0 {
		return
	}
	if n >= unlockedFrom && r.prog.Direct {
		p := r.g.job.proxy
		p.Unlock()
		defer p.Lock()
	}
	if n <= cachedCopy { // in pieces: a longer copy of Go's goes around the caches, where this much would stay
		const piece = 256 << 10
		for ; n > piece; n -= piece {
			kernels.Copy(dst, src, piece)
			dst, src = unsafe.Add(dst, piece), unsafe.Add(src, piece)
		}
	}
	kernels.Copy(dst, src, n)
}

// combine runs one Combine step.
func (r *runner) combine(prog *program, i int, s *collectives.Step, dtype DType) error {
	if s.Dst.Len == 0 {
		return nil
	}
	op := r.g.cur.op
	scale := false
	if op == Avg && len(s.Srcs) != len(r.g.active) {
		op, scale = Sum, s.Final
	}
	fold, err := kernels.Lookup(op, dtype)
	if err != nil {
		return err
	}
	r.ptrs = r.ptrs[:0]
	for j := range s.Srcs {
		r.ptrs = append(r.ptrs, r.source(prog, i, j, &s.Srcs[j]))
	}
	dst, size := r.at(&s.Dst), dtype.Size()
	if s.Dst.Len >= unlockedFrom && prog.Direct {
		p := r.g.job.proxy
		p.Unlock()
		defer p.Lock()
	}
	fold(dst, r.ptrs, s.Dst.Len/size)
	if scale {
		kernels.Scale(dtype, dst, s.Dst.Len/size, len(r.g.active))
	}
	return nil
}

// awaits returns the slots that the running operation waits for. With the proxy's lock, as what
// follows.
func (r *runner) awaits() (slots []int) {
	if r.prog == nil {
		return nil
	}
	if r.sending >= 0 {
		slots = append(slots, r.sending)
	}
	for _, n := range r.prog.recvs {
		if rc := &r.recvs[n]; rc.Posted() && !rc.Done() && !slices.Contains(slots, int(r.prog.Steps[n].Peer)) {
			slots = append(slots, int(r.prog.Steps[n].Peer))
		}
	}
	return slots
}

// long is called when half of an operation's time is over, and again: the others learn who keeps
// this rank, as far as it knows, and tell on what they learn. So in the end everybody knows who
// keeps them all.
func (r *runner) long() {
	var slots []int
	for _, m := range r.missing() {
		slots = append(slots, m.Rank)
	}
	r.g.coll.Announce(r.tok, slots)
}

// missing lists the ranks that keep the operation, with what was last seen of them: those that it
// waits for, but where one of these has said that it is waiting itself, those that it waits for.
func (r *runner) missing() (all []lastSeen) {
	c := r.g.coll
	queue := r.awaits()
	first := slices.Clone(queue)
	done := map[int]bool{r.g.rank: true}
	for len(queue) > 0 {
		slot := queue[0]
		queue = queue[1:]
		if done[slot] {
			continue
		}
		done[slot] = true
		if next, waits := c.WaitsFor(slot, r.tok); waits {
			queue = append(queue, next...)
			continue
		}
		t, ok := c.Seen(slot)
		all = append(all, lastSeen{Rank: slot, Has: ok, Last: t})
	}
	all = append(all, r.g.unheard()...)
	if len(all) == 0 { // they wait for each other, or for us
		for _, slot := range first {
			t, ok := c.Seen(slot)
			all = append(all, lastSeen{Rank: slot, Has: ok, Last: t})
		}
	}
	return all
}

// share is a small allgather inside of another operation: mine of every rank, in all.
func (r *runner) share(mine, all []byte) error {
	g := r.g
	algo := collectives.Choose(r.shape(collectives.AllGather, 1, len(mine)), collectives.Caps{SharedMemory: g.caps.SharedMemory, Cores: g.caps.Cores})
	prog, err := r.program(collectives.AllGather, algo, 1, len(mine))
	if err != nil {
		return err
	}
	r.in, r.out = base{ptr: unsafe.Pointer(&mine[0])}, base{ptr: unsafe.Pointer(&all[0]), stride: len(mine)}
	return r.steps(prog, Uint8)
}

// topology is all that a plan depends on but for the call: which slots take part, on which hosts
// they are, what their links can do, and what chooses the algorithm.
type topology struct {
	size   int
	active []int
	hosts  []int
	caps   collectives.Caps
	algo   collectives.Algo
	table  *collectives.Table
}

func (t *topology) equal(o *topology) bool {
	return t.size == o.size && t.caps == o.caps && t.algo == o.algo && t.table == o.table &&
		slices.Equal(t.active, o.active) && slices.Equal(t.hosts, o.hosts)
}

// planSet is the plans that were made for a topology, and the calls that are bound in it. Shapes
// are made of the topology in it, so that a plan cannot depend on more than its set's key.
type planSet struct {
	topology
	plans  map[planKey]*program
	bound  map[boundKey]*boundCall
	latest [16]*boundCall // of bound, by slot
}

// reset ends what belongs to the view that the group leaves.
func (r *runner) reset() {
	r.last, r.vary, r.prog = nil, nil, nil
	r.sending = -1
}

// settle goes over to the plans for the group's topology. Those of the latest are kept: a rank that
// is lost often comes back.
func (r *runner) settle() {
	const most = 4
	g := r.g
	now := topology{g.size, slices.Clone(g.active), slices.Clone(g.hosts), g.caps, r.algo, g.table}
	if r.set != nil && r.set.equal(&now) {
		return
	}
	r.last, r.vary = nil, nil
	at := slices.IndexFunc(r.sets, func(s *planSet) bool { return s.equal(&now) })
	if at >= 0 {
		r.set = r.sets[at]
		r.sets = slices.Delete(r.sets, at, at+1)
	} else {
		r.set = &planSet{topology: now, plans: map[planKey]*program{}, bound: map[boundKey]*boundCall{}}
	}
	if len(r.sets) == most {
		r.sets = slices.Delete(r.sets, 0, 1)
	}
	r.sets = append(r.sets, r.set)
}

// stop notes that the operation which ran has failed.
func (r *runner) stop() { r.prog, r.sending = nil, -1 }

// confirm is a small exchange after an operation of a uniform group: when it returns nil, every
// rank has the result.
func (r *runner) confirm() error {
	all := make([]byte, r.g.size)
	return r.share([]byte{1}, all)
}

// free gives back the runner's memory.
func (r *runner) free() {
	r.set, r.sets, r.last, r.recvs, r.tmp, r.wide = nil, nil, nil, nil, nil, nil
}
