package exec

import (
	"cmp"
	"fmt"
	"math"
	"runtime"
	"slices"
	"unsafe"

	"tutti/collectives"
	"tutti/device"
	"tutti/kernels"
	"tutti/p2p"
	"tutti/pg/flight"
)

const (
	// VectorBlock bounds the bytes that one plan covers. Longer vectors (or parts, over all ranks)
	// are processed in blocks, so that plans and scratch memory do not grow with the message. Some
	// plans cover a chunk of each part if that is more: see lean.
	VectorBlock = 8 << 20
	maxPlans    = 512 // cached a group
	// A vector to or from a root is copied by one rank while another copies what came before, so it
	// is cut into leastPieces pieces over shared memory, if these have leastChunk bytes.
	leastPieces = 8
	leastChunk  = 16 << 10
	// wireChunk is the pipelining grain on links without shared memory. One system call moves a
	// whole chunk. Nothing is passed on in a broadcast between two ranks, which needs no grain.
	wireChunk = 512 << 10
)

// Config describes the rank and the group of a Runner.
type Config struct {
	Proxy *p2p.Proxy
	Wait  *p2p.Wait // of the operation that runs
	Rank  int       // this rank's slot

	// Region returns the region, mapped by peers on request, that holds n bytes at ptr, and the
	// offset of ptr in it; nil if there is none.
	Region func(ptr unsafe.Pointer, n int) (*p2p.Region, int)
	// Single says when to read plain memory straight from the peers' processes.
	Single Single
	Block  int // instead of VectorBlock, the same at all ranks; 0: VectorBlock
	// Chosen is called with the algorithm of a call that is not bound, or whose buffers decide it.
	Chosen func(collectives.Algo)
	// Keep is called with a call that has been bound.
	Keep func(*Bound)
	// Drop releases memory of other ranks' devices: see device.Shared. It does not wait.
	Drop func(shared []device.Shared, gone bool)
}

// A Feed brings the source of a call while it runs, and takes its result. It is used with the
// proxy's lock, which Need may release.
type Feed interface {
	// Need returns when the first n bytes of the source are there, All for the whole. An error
	// fails the call.
	Need(n int) error
	// Have says that the first n bytes of the result do not change any more, unless the call runs
	// again.
	Have(n int)
}

// A Whole is a Feed of a call that is done without messages. It is not run again after a failure.
type Whole interface {
	Feed
	// Do returns when the call is over. It is called with the proxy's lock, which it may release.
	Do() error
}

// All is more bytes than a source has.
const All = math.MaxInt

// Runner executes the calls of one rank in a group, one at a time, over the group's channel. It
// keeps plans, bound calls and memory for later calls: a warm run allocates nothing. All methods
// are called with the proxy's lock; Run, Resume and Confirm release it while they wait or move much
// memory.
type Runner struct {
	cfg   Config
	proxy *p2p.Proxy
	wait  *p2p.Wait
	rank  int
	coll  *p2p.Channel
	ranks []int // of the job, by slot

	single bool // Go uses one processor

	cur     *Call // the running or the last call: a bound one, or unbound
	feed    Feed  // of the running call, or nil
	bound   *Bound
	unbound Call
	seq     uint64
	tok     p2p.Token
	history [64]p2p.Token // of the latest calls, by number
	came    uint64        // messages that had come when steps out of turn were last looked for

	set   *planSet   // of the group's topology
	sets  []*planSet // of the latest topologies, the present one last
	vary  []varying  // programs of the latest allgatherv and alltoallv
	last  *program   // most recent: usually the next
	lastK planKey

	recvs []p2p.Recv
	ptrs  []unsafe.Pointer
	tmp   *p2p.Region
	wide  *p2p.Region // float32 copies of small floats

	staged *p2p.Region // pieces of the peers' plain memory

	// The memories of the running plan.
	in, out  base
	scratch  unsafe.Pointer
	ahead    int      // Send steps of the running plan that have been made out of turn: see express
	looking  bool     // the running plan is suspended in receive
	sent     sent     // Send steps that were made before their plan has run
	sending  int      // slot that a Send, or a mapping of its memory, waits for, -1: none
	prog     *program // running; nil between operations
	next     int      // the running or the next step in the order of the plan
	over     uint64   // bit k: step next+k, a later one, has been made out of turn
	worked   int      // bytes that the running step has made with the lock
	dirty    bool     // the operation works in place and has begun to write
	once     bool     // the operation cannot run again: a peer may have its result
	whole    bool     // the running call is done without messages
	mapped   mapped   // the peers' memory, in a load-store plan
	direct   direct   // the same in the memory of devices
	outcomes outcomes // of exchanges
	trials   trials   // of ways to copy plain memory
}

// New makes a Runner. Open and Settle must be called before its first call.
func New(cfg Config) *Runner {
	cfg.Block = cmp.Or(cfg.Block, VectorBlock)
	r := &Runner{cfg: cfg, proxy: cfg.Proxy, wait: cfg.Wait, rank: cfg.Rank, sending: -1}
	r.cur = &r.unbound
	r.direct.drop = cfg.Drop
	r.single = runtime.GOMAXPROCS(0) == 1
	return r
}

// Expose makes this rank's memory mappable by its peers.
func (r *Runner) Expose() (err error) {
	r.mapped.exposure, err = r.proxy.NewExposure()
	return err
}

// Open runs the following calls over channel c; ranks are the job's rank of each slot. It ends the
// state of the view that the group leaves.
func (r *Runner) Open(c *p2p.Channel, ranks []int) {
	r.coll, r.ranks = c, ranks
	r.last, r.vary, r.prog = nil, nil, nil
	r.sending = -1
	r.outcomes = outcomes{}
	r.mapped.forget()
	r.direct.close()
}

// Call returns the current call: the argument of the last Adopt or Use.
func (r *Runner) Call() *Call { return r.cur }

// Feed has f feed the calls that run from now on; nil: their memory is complete.
func (r *Runner) Feed(f Feed) { r.feed = f }

// need returns when the first n bytes of the source are there.
func (r *Runner) need(n int) error {
	if r.feed == nil {
		return nil
	}
	return r.feed.Need(n)
}

// Bound returns the bound call of the current call, nil after Adopt.
func (r *Runner) Bound() *Bound { return r.bound }

// Adopt makes c the current call.
func (r *Runner) Adopt(c Call) {
	r.unbound = c
	r.cur, r.bound = &r.unbound, nil
}

// Use makes a bound call on these buffers the current one.
func (r *Runner) Use(b *Bound, dst, src unsafe.Pointer) {
	b.In, b.Out = src, dst
	r.cur, r.bound = &b.Call, b
	r.prepare(b)
}

// Unbind makes the current call run as one that is not bound.
func (r *Runner) Unbind() {
	if r.bound == nil {
		return
	}
	c := *r.cur
	r.cur.Forget()
	r.Adopt(c)
}

// Run runs the current call as operation seq of the group. hint tells the peers that the job has
// grown. Errors are those of the proxy. After p2p.ErrSuspended, which only bound calls return,
// Resume continues.
func (r *Runner) Run(seq uint64, hint bool) error {
	r.seq, r.dirty, r.once, r.ahead, r.looking, r.whole = seq, false, false, 0, false, false
	if w, ok := r.feed.(Whole); ok {
		r.tok = r.cur.Token(seq, collectives.Auto)
		r.tok.Call = uint64(flight.Call(r.tok.Call).InPackets())
		r.history[seq%uint64(len(r.history))] = r.tok
		r.dirty, r.once, r.whole = r.cur.Kind.Reduces() && r.cur.In == r.cur.Out, true, true
		if err := r.coll.Begin(r.tok, false); err != nil {
			return err
		}
		err := w.Do()
		r.whole = err != nil // until Stop
		return err
	}
	if b := r.bound; b != nil {
		if !b.asks {
			if err := r.stage(); err != nil {
				return err
			}
		}
		if err := r.need(All); err != nil {
			return err
		}
		r.ahead = r.made(b)
		// Field by field, as in set.
		r.tok.Seq, r.tok.Call, r.tok.Count = seq, b.tok.Call, b.tok.Count
		said := &r.history[seq%uint64(len(r.history))]
		said.Seq, said.Call, said.Count = seq, b.tok.Call, b.tok.Count
		r.in, r.out = base{ptr: b.In, stride: b.from}, base{ptr: b.Out, stride: b.to}
		if err := r.coll.Begin(r.tok, hint && r.ahead == 0); err != nil { // what was sent ahead had no hint
			return err
		}
		if b.asks {
			return r.asked(b)
		}
		if b.express != nil {
			if err := r.express(b); err == nil || err == p2p.ErrSuspended {
				return err
			}
		}
		return r.steps(b.prog, b.DType)
	}
	return r.first(hint)
}

// asked runs a bound call of which the buffers decide whether they are loaded.
func (r *Runner) asked(b *Bound) error {
	if err := r.approach(); err != nil {
		return err
	}
	elem, in, out := b.DType.Size(), r.in, r.out
	r.trials.current = nil
	defer r.leave()
	load, err := r.loads(elem)
	if err != nil {
		return err
	}
	prog := b.prog
	r.in, r.out = in, out
	if load {
		prog, err = r.program(b.Kind, collectives.LoadStore, elem, b.Count)
	} else {
		err = r.stage()
	}
	if err != nil {
		return err
	}
	r.cfg.Chosen(prog.Algo)
	if err := r.steps(prog, b.DType); err != nil {
		return err
	}
	r.trials.end()
	return nil
}

// Resume continues a bound call that was suspended.
func (r *Runner) Resume() error {
	if r.looking {
		if err := r.receive(r.bound); err == nil || err == p2p.ErrSuspended {
			return err
		}
		return r.steps(r.bound.prog, r.bound.DType)
	}
	return r.resume(r.bound.prog, r.bound.DType)
}

// Whole reports whether the operation has a Whole, which does it without messages.
func (r *Runner) Whole() bool {
	_, ok := r.feed.(Whole)
	return ok
}

// Dirty reports whether the last operation worked in place, and had begun to write.
func (r *Runner) Dirty() bool { return r.dirty }

// Once reports whether the last operation has no way to run again.
func (r *Runner) Once() bool { return r.once }

// Token returns the token that the last operation sent to its peers.
func (r *Runner) Token() p2p.Token { return r.tok }

// Said returns the token that operation seq sent to its peers, if it is one of the latest.
func (r *Runner) Said(seq uint64) (p2p.Token, bool) {
	t := r.history[seq%uint64(len(r.history))]
	return t, t.Seq == seq
}

// Leads reports whether operation seq was run last, and other ranks may not have begun it. A Split
// and the like, which tell no count, count as a barrier.
func (r *Runner) Leads(seq uint64) bool {
	c := Call{Kind: flight.Call(r.tok.Call).Kind(), Count: int(r.tok.Count)}
	return seq > 0 && r.tok.Seq == seq && !c.Synchronizes()
}

// Running reports whether a plan is running or suspended.
func (r *Runner) Running() bool { return r.prog != nil }

// base is the address of the parts of In or Out: part i is at ptr + i*stride, or at ptr + offs[i].
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

// program is a plan with what its execution needs.
type program struct {
	*collectives.Plan
	// By ReduceInto step: for each of its sources the Recv step whose message may be read in the
	// link's memory, or -1.
	lent  [][]int32
	lends []bool    // by Recv step: its message may be read in the link's memory
	waits [][]int32 // by step: the Recv steps that it needs; all others have ended when it begins
	recvs []int32   // all Recv steps
	prior []int32   // by Send and Recv step: the one before it with the same verb and peer, or -1
	apart bool      // steps may be made out of turn
	sure  []bool    // by step, in a load-store plan: a Send that tells what was made of memory read since the last
	loads []load    // the peers whose memory a load-store plan loads, ascending

	copies int   // bytes that Copy steps write
	folds  int   // bytes that ReduceInto steps write
	own    int32 // the Copy step from In to Out, which writes nothing in place; or -1
}

// fills returns the number of bytes that the plan's steps write in the running call to memory that
// it has not read.
func (r *Runner) fills(prog *program) int {
	n := prog.copies
	if r.in.ptr != r.out.ptr {
		n += prog.folds
	}
	if prog.own >= 0 {
		if s := &prog.Steps[prog.own]; r.at(&s.Dst) == r.at(&s.Src) {
			n -= s.Dst.Len
		}
	}
	return n
}

type planKey struct {
	kind  collectives.Kind
	algo  collectives.Algo
	root  int
	elem  int
	count int
}

func compile(p *collectives.Plan) *program {
	n := len(p.Steps)
	prog := &program{Plan: p, lent: make([][]int32, n), lends: make([]bool, n), waits: make([][]int32, n),
		sure: make([]bool, n), prior: make([]int32, n), own: -1}
	loaded := false
	latest := map[lane]int32{}
	for i := range p.Steps {
		s := &p.Steps[i]
		prog.prior[i] = -1
		if s.Verb == collectives.Send || s.Verb == collectives.Recv {
			at := lane{s.Verb, s.Peer}
			if n, ok := latest[at]; ok {
				prog.prior[i] = n
			}
			latest[at] = int32(i)
		}
		for _, n := range s.Needs {
			if p.Steps[n].Verb == collectives.Recv {
				prog.waits[i] = append(prog.waits[i], n)
			}
		}
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
		case collectives.Copy:
			prog.copies += s.Dst.Len
			if s.Src.Buf == collectives.In && s.Dst.Buf == collectives.Out {
				prog.own = int32(i)
			}
			continue
		case collectives.ReduceInto:
			prog.folds += s.Dst.Len
		default:
			continue
		}
		lent := make([]int32, len(srcs))
		for j := range srcs {
			lent[j] = -1
			for _, n := range prog.waits[i] {
				if q := &p.Steps[n]; q.Once && q.Dst == srcs[j] && q.Dst.Len > 0 {
					lent[j], prog.lends[n] = n, true
				}
			}
		}
		prog.lent[i] = lent
	}
	// The Sends of a load-store plan vouch for what was read before them in the order of the plan.
	prog.apart = len(prog.loads) == 0 && len(latest) > 2
	return prog
}

// lane is what orders Sends, or Recvs, among each other.
type lane struct {
	verb collectives.Verb
	peer int32
}

// load is a peer, and which of its buffers are loaded.
type load struct {
	slot    int
	in, out bool
}

// note adds ref to the loads if it is a load. It reports whether it is one.
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

// varying is the program of a call with counts, and its counts.
type varying struct {
	kind               collectives.Kind
	algo               collectives.Algo
	elem               int
	counts, recvCounts []int
	offs, recvOffs     []int // bytes
	prog               *program
}

// varying returns the program of the current call, which has counts. A few programs are kept,
// because calls with equal counts are often repeated.
func (r *Runner) varying(algo collectives.Algo, elem int) (*program, error) {
	c := r.cur
	at := -1
	for i := range r.vary {
		if v := &r.vary[i]; v.kind == c.Kind && v.algo == algo && v.elem == elem &&
			slices.Equal(v.counts, c.Counts) && slices.Equal(v.recvCounts, c.RecvCounts) {
			at = i
			break
		}
	}
	if at < 0 {
		plan, err := collectives.Build(algo, r.shape(c.Kind, elem, 0))
		if err != nil {
			return nil, fmt.Errorf("planning %v: %w", c.Kind, err)
		}
		v := varying{kind: c.Kind, algo: algo, elem: elem,
			counts: slices.Clone(c.Counts), recvCounts: slices.Clone(c.RecvCounts),
			offs: offsets(c.Counts, elem), recvOffs: offsets(c.RecvCounts, elem)}
		plan.Shape.Counts, plan.Shape.RecvCounts = v.counts, v.recvCounts // the caller may change its slices
		v.prog = compile(plan)
		if len(r.vary) < 16 {
			r.vary = append(r.vary, v)
			at = len(r.vary) - 1
		} else {
			at = int(r.seq % 16)
			r.vary[at] = v
		}
	}
	v := &r.vary[at]
	r.out.offs = v.offs
	if c.Kind == collectives.AllToAllV {
		r.in.offs, r.out.offs = v.offs, v.recvOffs
	}
	return v.prog, nil
}

func (r *Runner) shape(kind collectives.Kind, elem, count int) collectives.Shape {
	t := &r.set.Topology
	chunk := wireChunk
	switch {
	case !t.Caps.SharedMemory && kind == collectives.Broadcast && t.Size == 2:
		chunk = VectorBlock
	case t.Caps.SharedMemory:
		chunk = collectives.DefaultChunk
		if kind == collectives.Broadcast || kind == collectives.Reduce {
			chunk = min(chunk, max(count*elem/leastPieces, leastChunk))
		}
	}
	return collectives.Shape{Kind: kind, Size: t.Size, Active: t.Active, Rank: r.rank, Root: r.cur.Root, Elem: elem,
		Count: count, Chunk: chunk, Counts: r.cur.Counts, RecvCounts: r.cur.RecvCounts, Hosts: t.Hosts}
}

// program returns the plan for count elements of the current call.
func (r *Runner) program(kind collectives.Kind, algo collectives.Algo, elem, count int) (*program, error) {
	if kind == collectives.AllGatherV || kind == collectives.AllToAllV {
		return r.varying(algo, elem)
	}
	k := planKey{kind, algo, r.cur.Root, elem, count}
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
func (r *Runner) choose(mapped bool) collectives.Algo {
	c := r.cur
	s := r.shape(c.Kind, c.DType.Size(), c.Count)
	caps := r.set.Caps
	caps.Mapped = mapped
	if forced := r.set.Algo; forced.Requires() == collectives.Always && forced != collectives.Auto ||
		forced == collectives.LoadStore && mapped {
		for _, a := range collectives.Algorithms(c.Kind) {
			if a == forced {
				return a
			}
		}
	}
	return r.set.Table.Choose(s, caps)
}

// sendAlgo returns the algorithm by which the current call, a load-store one if its buffers can be
// loaded, is sent.
func (r *Runner) sendAlgo() collectives.Algo {
	c := r.cur
	return r.set.Table.ChooseSent(r.shape(c.Kind, c.DType.Size(), c.Count), r.set.Caps)
}

// first runs a call that is not bound.
func (r *Runner) first(hint bool) (err error) {
	c := r.cur
	elem := c.DType.Size()
	r.tok = c.Token(r.seq, r.set.Algo)
	r.history[r.seq%uint64(len(r.history))] = r.tok
	total := 0
	if c.Kind != collectives.AllToAllV { // its size may differ between ranks
		total = c.Bytes(r.set.Size)
	}
	if err := r.coll.Begin(r.tok, hint); err != nil {
		return err
	}
	r.trials.current = nil
	algo := r.choose(r.set.Asks && len(r.set.Active) > 1 && total >= collectives.LoadStoreMin(c.Kind))
	asks := algo == collectives.LoadStore
	load := false
	if asks {
		defer r.leave()
		err = r.approach()
		if err == nil && (r.set.Caps.Mapped || r.onDevice() != nil) { // peers read it when they know where it is
			err = r.need(All)
		}
		if err != nil {
			return err
		}
		if load, err = r.loads(elem); err != nil {
			return err
		}
		if !load {
			algo = r.sendAlgo()
		}
	}
	if !load {
		if err := r.stage(); err != nil {
			return err
		}
	}
	r.cfg.Chosen(algo)
	if err := r.blocks(algo, elem, asks); err != nil {
		return err
	}
	r.trials.end()
	return nil
}

// blocks runs the call, one plan per block. asks says that the buffers decide whether they are
// loaded.
func (r *Runner) blocks(algo collectives.Algo, elem int, asks bool) error {
	c, l := r.cur, r.cur.Kind.Layout()
	r.in, r.out = base{ptr: c.In}, base{ptr: c.Out}
	if l.In == collectives.All {
		r.in.stride = c.Count * elem
	}
	if l.Out == collectives.All {
		r.out.stride = c.Count * elem
	}
	if c.Kind == collectives.Broadcast || c.Kind == collectives.Reduce && r.rank != c.Root {
		r.out.ptr = c.In // the root's result is already there; other ranks have none
	}
	block := r.blockOf(algo, elem)
	if c.Count <= block {
		prog, err := r.program(c.Kind, algo, elem, c.Count)
		if err != nil {
			return err
		}
		if err := r.need(All); err != nil {
			return err
		}
		if err := r.block(prog, elem, c.Count); err != nil {
			return err
		}
		r.remember(prog, asks)
		return nil
	}
	in, out := r.in.ptr, r.out.ptr
	if l.In != collectives.One {
		if err := r.need(All); err != nil {
			return err
		}
	}
	for at := 0; at < c.Count; at += block {
		n := min(block, c.Count-at)
		prog, err := r.program(c.Kind, algo, elem, n)
		if err != nil {
			return err
		}
		if in != nil {
			r.in.ptr = unsafe.Add(in, at*elem)
		}
		if out != nil {
			r.out.ptr = unsafe.Add(out, at*elem)
		}
		if err := r.need((at + n) * elem); err != nil {
			return err
		}
		if err := r.block(prog, elem, n); err != nil {
			return err
		}
		if r.feed != nil && l.Out == collectives.One {
			r.feed.Have((at + n) * elem)
		}
	}
	return nil
}

// blockOf returns the number of elements of the vector, or of a part, that one plan of the current
// call covers.
func (r *Runner) blockOf(algo collectives.Algo, elem int) int {
	l := r.cur.Kind.Layout()
	switch { // a LoadStore plan has the same number of steps for any length
	case algo == collectives.LoadStore, l.Out == collectives.Packed, l.Out == collectives.None:
		return r.cur.Count
	case l.In == collectives.One && l.Out == collectives.One:
		return max(1, r.cfg.Block/elem)
	}
	part := max(r.cfg.Block/r.set.Size, 4<<10)
	if r.lean(algo) {
		part = max(part, min(r.shape(r.cur.Kind, elem, r.cur.Count).Chunk, r.cfg.Block))
	}
	return max(1, part/elem)
}

// lean reports whether a plan of the current call, which has parts, has as many steps for a chunk
// of each part as for less of it, and runs with a few chunks of memory.
func (r *Runner) lean(algo collectives.Algo) bool {
	switch algo {
	case collectives.Ring:
		return !r.widens(algo)
	case collectives.OneShot, collectives.Pairwise, collectives.Hierarchical:
		return !r.cur.Kind.Reduces()
	}
	return false
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
func (r *Runner) block(prog *program, elem, count int) error {
	if r.widens(prog.Algo) {
		return r.widened(prog.Algo, count)
	}
	return r.steps(prog, r.cur.DType)
}

// widens reports whether the current call sends partial results as float32.
func (r *Runner) widens(algo collectives.Algo) bool {
	c := r.cur
	return c.DType.SmallFloat() && c.Kind.Reduces() && !algo.OnePass() && len(r.set.Active) > 1
}

// widened runs a reduction of 16-bit or 8-bit floats with partial sums: these are sent and combined
// as float32, and rounded once.
func (r *Runner) widened(algo collectives.Algo, count int) error {
	c := r.cur
	prog, err := r.program(c.Kind, algo, 4, count)
	if err != nil {
		return err
	}
	parts := 1
	if c.Kind.Layout().In == collectives.All {
		parts = r.set.Size
	}
	r.wide = r.control(r.wide, 4*count*(parts+1))
	in, out := r.in, r.out
	wide := unsafe.Pointer(unsafe.SliceData(r.wide.Bytes()))
	for i := range parts {
		if err := r.convert(kernels.Widen, unsafe.Add(wide, i*4*count), in.part(int32(i)), count, 4,
			c.DType.Size()); err != nil {
			return err
		}
	}
	r.in = base{ptr: wide, stride: 4 * count}
	r.out = r.in
	if parts > 1 {
		r.out = base{ptr: unsafe.Add(wide, parts*4*count)}
	}
	dirty := r.dirty
	err = r.steps(prog, kernels.Float32)
	r.dirty = dirty // it has written only to r.wide
	if err == nil && (c.Kind != collectives.Reduce || r.rank == c.Root) {
		r.dirty = r.dirty || in.ptr == out.ptr
		err = r.convert(kernels.Narrow, out.ptr, r.out.ptr, count, c.DType.Size(), 4)
	}
	r.in, r.out = in, out
	return err
}

// control returns a control region of at least n bytes: old if it is large enough.
func (r *Runner) control(old *p2p.Region, n int) *p2p.Region {
	if old != nil && old.Len() >= n {
		return old
	}
	return r.proxy.Control(max(n, 4096))
}

// at returns the address of ref.
func (r *Runner) at(ref *collectives.Ref) unsafe.Pointer {
	var p unsafe.Pointer
	switch ref.Buf {
	case collectives.In:
		p = r.in.part(ref.Part)
	case collectives.Out:
		p = r.out.part(ref.Part)
	case collectives.Tmp:
		p = r.scratch
	case collectives.PeerIn:
		p = unsafe.Add(r.mapped.peers[ref.Peer].in.ptr, int(ref.Part)*r.in.stride)
	case collectives.PeerOut:
		p = unsafe.Add(r.mapped.peers[ref.Peer].out.ptr, int(ref.Part)*r.out.stride)
	}
	return unsafe.Add(p, ref.Off)
}

func (r *Runner) bytes(ref *collectives.Ref) []byte {
	if ref.Len == 0 {
		return nil
	}
	return unsafe.Slice((*byte)(r.at(ref)), ref.Len)
}

// steps runs a plan over the memories in r. With the proxy's lock, which it releases while it waits
// or moves much memory.
func (r *Runner) steps(prog *program, dtype kernels.DType) error {
	r.next, r.over = 0, 0
	return r.resume(prog, dtype)
}

// resume runs the steps that have not run: from r.next on, except r.over.
func (r *Runner) resume(prog *program, dtype kernels.DType) error {
	if len(prog.Steps) > len(r.recvs) {
		r.recvs = make([]p2p.Recv, len(prog.Steps))
	}
	if prog.Tmp > 0 {
		r.tmp = r.control(r.tmp, prog.Tmp)
		r.scratch = unsafe.Pointer(unsafe.SliceData(r.tmp.Bytes()))
	}
	r.prog = prog
	for ; r.next < len(prog.Steps); r.next, r.over = r.next+1, r.over>>1 {
		if r.over&1 != 0 {
			continue
		}
		s := &prog.Steps[r.next]
		for _, n := range prog.waits[r.next] {
			if !r.recvs[n].Done() {
				if err := r.await(prog, n, dtype); err != nil {
					return err
				}
			}
		}
		if s.Verb == collectives.Send {
			if err := r.send(prog, s, dtype); err != nil {
				return err
			}
			continue
		}
		if err := r.step(prog, r.next, dtype); err != nil {
			return err
		}
	}
	if err := r.settle(); err != nil {
		return err
	}
	for _, n := range prog.recvs {
		if !r.recvs[n].Done() {
			if err := r.coll.WaitRecv(r.wait, &r.recvs[n]); err != nil {
				return err
			}
		}
	}
	r.prog = nil
	return nil
}

// step runs step i, not a Send, whose needs are complete.
func (r *Runner) step(prog *program, i int, dtype kernels.DType) (err error) {
	s := &prog.Steps[i]
	if s.Dst.Buf == collectives.Out && r.in.ptr == r.out.ptr && r.cur.Kind.Reduces() {
		r.dirty = true
	}
	switch s.Verb {
	case collectives.Recv:
		r.coll.PostRecv(&r.recvs[i], int(s.Peer), r.tok, r.bytes(&s.Dst), prog.lends[i])
		return nil
	case collectives.Copy:
		if r.direct.call != nil {
			err = r.copyThere(r.at(&s.Dst), r.at(&s.Src), s.Dst.Len)
		} else if addr, reader := r.far(&s.Src); reader != nil {
			err = r.copyFar(r.at(&s.Dst), int(s.Src.Peer), addr, reader, s.Dst.Len)
		} else {
			err = r.copy(r.at(&s.Dst), r.at(&s.Src), s.Dst.Len)
		}
	case collectives.ReduceInto:
		if r.direct.call != nil {
			err = r.reduceThere(s, dtype)
		} else {
			err = r.reduce(prog, i, s, dtype)
		}
	}
	if err != nil {
		return err
	}
	for _, n := range prog.lent[i] {
		if n >= 0 {
			r.coll.ReleaseRecv(&r.recvs[n])
		}
	}
	if r.worked > 0 {
		r.proxy.Moved(r.worked)
		r.worked = 0
	}
	return nil
}

// send runs the next step, a Send whose needs are complete.
func (r *Runner) send(prog *program, s *collectives.Step, dtype kernels.DType) error {
	if r.ahead > 0 {
		r.ahead--
		return nil
	}
	if err := r.settle(); err != nil {
		return err
	}
	if prog.sure[r.next] {
		if err := r.verify(); err != nil {
			return err
		}
	}
	r.sending = int(s.Peer)
	if prog.apart {
		for turn := 0; ; turn++ {
			sent, err := r.coll.SendSome(r.sending, r.tok, r.bytes(&s.Src))
			if err != nil {
				return err
			}
			if sent {
				break
			}
			if err := r.elsewhere(prog, turn, dtype); err != nil {
				return err
			}
			if err := r.coll.PollSend(r.wait, r.sending); err != nil {
				return err
			}
		}
	} else if err := r.coll.Send(r.wait, r.sending, r.tok, r.bytes(&s.Src)); err != nil {
		return err
	}
	r.sending = -1
	return nil
}

// await returns when Recv step n is complete.
func (r *Runner) await(prog *program, n int32, dtype kernels.DType) error {
	if !prog.apart {
		return r.coll.WaitRecv(r.wait, &r.recvs[n])
	}
	for turn := 0; ; turn++ {
		if err := r.elsewhere(prog, turn, dtype); err != nil {
			return err
		}
		if r.recvs[n].Done() {
			return nil
		}
		if err := r.coll.PollRecv(r.wait, &r.recvs[n]); err != nil {
			return err
		}
	}
}

const (
	within     = 64 // steps from the next one that may be made out of turn: those with a bit in over
	againEvery = 16 // turns of a wait after which steps are looked for that no message makes ready
)

// elsewhere makes a later step that is ready while the next step is not. turn counts the rounds of
// the wait. Errors of links are left to the step's turn.
func (r *Runner) elsewhere(prog *program, turn int, dtype kernels.DType) error {
	came := r.coll.Came()
	if r.ahead > 0 || turn%againEvery != 0 && came == r.came {
		return nil
	}
	r.came = came
	for i := r.next + 1; i < min(r.next+within, len(prog.Steps)); i++ {
		bit := uint64(1) << (i - r.next)
		if r.over&bit != 0 || !r.ready(prog, i) {
			continue
		}
		s := &prog.Steps[i]
		if s.Verb == collectives.Send {
			if sent, err := r.coll.SendSome(int(s.Peer), r.tok, r.bytes(&s.Src)); err != nil || !sent {
				continue
			}
		} else if err := r.step(prog, i, dtype); err != nil {
			return err
		}
		r.over |= bit
		if s.Verb != collectives.Recv { // the next step may be ready
			r.came-- // to look again if it is not
			return nil
		}
	}
	return nil
}

// ready reports whether step i, a later one than the next, may be made.
func (r *Runner) ready(prog *program, i int) bool {
	begun := func(n int32) bool { return int(n) < r.next || r.over>>(int(n)-r.next)&1 != 0 }
	if n := prog.prior[i]; n >= 0 && !begun(n) {
		return false
	}
	for _, n := range prog.Steps[i].Needs {
		if !begun(n) || prog.Steps[n].Verb == collectives.Recv && !r.recvs[n].Done() {
			return false
		}
	}
	return true
}

// Awaits returns the slots that the running operation waits for.
func (r *Runner) Awaits() (slots []int) {
	if r.sending >= 0 {
		slots = append(slots, r.sending)
	}
	switch {
	case r.whole:
		for _, slot := range r.set.Active {
			if slot != r.rank {
				slots = append(slots, slot)
			}
		}
		return slots
	case r.prog == nil:
		return slots
	}
	for _, n := range r.prog.recvs {
		slot := int(r.prog.Steps[n].Peer)
		if (r.looking || r.recvs[n].Posted() && !r.recvs[n].Done()) && !slices.Contains(slots, slot) {
			slots = append(slots, slot)
		}
	}
	return slots
}

// Seen is a rank that is waited for, with the last token seen of it.
type Seen struct {
	Rank int
	Has  bool // there is one
	Last p2p.Token
}

// Missing lists the ranks that the operation waits for, followed by more. A rank that has announced
// that it is waiting itself is replaced by the ranks that it waits for.
func (r *Runner) Missing(more []Seen) (all []Seen) {
	look := func(slot int) Seen {
		t, ok := r.coll.Seen(slot)
		return Seen{slot, ok, t}
	}
	queue := r.Awaits()
	first := slices.Clone(queue)
	done := map[int]bool{r.rank: true}
	for len(queue) > 0 {
		slot := queue[0]
		queue = queue[1:]
		if done[slot] {
			continue
		}
		done[slot] = true
		if next, waits := r.coll.WaitsFor(slot, r.tok); waits {
			queue = append(queue, next...)
			continue
		}
		all = append(all, look(slot))
	}
	if all = append(all, more...); len(all) == 0 { // they wait for each other, or for this rank
		for _, slot := range first {
			all = append(all, look(slot))
		}
	}
	return all
}

// share is a small allgather within another operation: mine of every rank, into all.
func (r *Runner) share(mine, all []byte) error {
	set := r.set
	if set.shares == nil || set.shared != len(mine) {
		algo := collectives.Choose(r.shape(collectives.AllGather, 1, len(mine)),
			collectives.Caps{SharedMemory: set.Caps.SharedMemory, Cores: set.Caps.Cores})
		prog, err := r.program(collectives.AllGather, algo, 1, len(mine))
		if err != nil {
			return err
		}
		set.shares, set.shared = prog, len(mine)
	}
	r.in, r.out = base{ptr: unsafe.Pointer(&mine[0])}, base{ptr: unsafe.Pointer(&all[0]), stride: len(mine)}
	return r.steps(set.shares, kernels.Uint8)
}

// Topology holds everything that a plan depends on except the call: the active slots, their hosts,
// the capabilities of their links, and the choice of algorithms.
type Topology struct {
	Size   int   // slots
	Active []int // slots, ascending
	Hosts  []int // of Active; nil: one host
	Caps   collectives.Caps
	Asks   bool               // the ranks ask each other for buffers that can be loaded
	Algo   collectives.Algo   // forced, or Auto
	Table  *collectives.Table // nil: the default
}

func (t *Topology) equal(o *Topology) bool {
	return t.Size == o.Size && t.Caps == o.Caps && t.Asks == o.Asks && t.Algo == o.Algo && t.Table == o.Table &&
		slices.Equal(t.Active, o.Active) && slices.Equal(t.Hosts, o.Hosts)
}

// planSet holds the plans of a topology, and the calls that are bound in it. Shapes are made from
// its topology, so that a plan cannot depend on more than the set's key.
type planSet struct {
	Topology
	plans  map[planKey]*program
	bound  map[boundKey]*Bound
	latest [16]*Bound // of bound, by slot
	shares *program   // the latest of share, for vectors of shared bytes
	shared int
}

// Settle switches to the plans for a topology. The latest topologies are kept, because a lost rank
// is often replaced.
func (r *Runner) Settle(now Topology) {
	const most = 4
	if r.set != nil && r.set.equal(&now) {
		return
	}
	now.Active, now.Hosts = slices.Clone(now.Active), slices.Clone(now.Hosts)
	r.last, r.vary = nil, nil
	at := slices.IndexFunc(r.sets, func(s *planSet) bool { return s.equal(&now) })
	if at >= 0 {
		r.set = r.sets[at]
		r.sets = slices.Delete(r.sets, at, at+1)
	} else {
		r.set = &planSet{Topology: now, plans: map[planKey]*program{}, bound: map[boundKey]*Bound{}}
	}
	if len(r.sets) == most {
		r.sets = slices.Delete(r.sets, 0, 1)
	}
	r.sets = append(r.sets, r.set)
}

// Stop ends the operation after a failure.
func (r *Runner) Stop() { r.prog, r.sending, r.ahead, r.looking, r.whole = nil, -1, 0, false, false }

// Confirm is a small exchange after an operation of a uniform group. When it returns nil, every
// rank has the result.
func (r *Runner) Confirm() error {
	all := make([]byte, r.set.Size)
	return r.share([]byte{1}, all)
}

// Free releases the runner's memory and plans. No call may follow.
func (r *Runner) Free() {
	r.direct.close()
	r.mapped.forget()
	if r.mapped.exposure != nil {
		r.proxy.FreeExposure(r.mapped.exposure)
		r.mapped.exposure = nil
	}
	r.set, r.sets, r.last, r.recvs, r.tmp, r.wide, r.staged = nil, nil, nil, nil, nil, nil, nil
}
