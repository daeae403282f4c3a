package collectives

import (
	"fmt"
	"math"
	"slices"
)

// A team is the ranks of one phase of a plan, and this rank's place among them.
type team struct {
	slots []int
	me    int // index in slots; -1: not a member
}

func (t team) n() int { return len(t.slots) }

// at returns the slot d places after this rank's, cyclically; d may be negative.
func (t team) at(d int) int { return ((t.me+d)%len(t.slots) + len(t.slots)) % len(t.slots) }

// memKey names one part of one memory, of this rank or of peer. Buffers that may be the same memory
// have the same key.
type memKey struct {
	buf  Buf
	peer int32
	part int32
}

// A builder makes one plan. It records which steps use which ranges, and derives Needs from that.
// It drops steps without bytes, as the peer's builder does, except whole parts of lengths that
// ranks may not agree on (sendPart). The first error stays in err.
type builder struct {
	Shape
	plan    *Plan
	all     team
	n, me   int // number of all ranks, and this rank's index
	chunk   int // pipelining grain, bytes, a multiple of Elem
	top     int // scratch memory in use
	used    frontier
	after   []int32 // needs of all steps added from now on
	touched []int32 // steps that used peers' memory since the last signals, which need them
	needs   []int32 // of the step that is being added
	err     error
}

func newBuilder(a Algo, s Shape) *builder {
	b := &builder{Shape: s, plan: &Plan{Shape: s, Algo: a}, n: len(s.Active), me: s.index(s.Rank), used: frontier{}}
	b.all = team{s.Active, b.me}
	if b.chunk = s.Chunk; b.chunk == 0 {
		b.chunk = DefaultChunk
	}
	if line := lcm(max(s.Elem, 1), 64); b.chunk >= line {
		b.chunk -= b.chunk % line
	} else if s.Elem > 0 {
		b.chunk = max(s.Elem, b.chunk-b.chunk%s.Elem)
	}
	return b
}

func (b *builder) fail(err error) {
	if b.err == nil {
		b.err = err
	}
}

// key returns the key of r; buffers that callers may alias, see Kind, have one key.
func (s *Shape) key(r Ref) memKey {
	switch {
	case r.Buf == In && (s.Kind == AllReduce || s.Kind == Reduce):
		return memKey{Out, 0, r.Part}
	case r.Buf == In && (s.Kind == AllGather || s.Kind == AllGatherV || s.Kind == Gather && s.Rank == s.Root):
		return memKey{Out, 0, int32(s.Rank)}
	case r.Buf == Out && s.Kind == Scatter && s.Rank == s.Root:
		return memKey{In, 0, int32(s.Rank)}
	}
	return memKey{r.Buf, r.Peer, r.Part}
}

// touch makes the next step need the steps that conflict with its use of r.
func (b *builder) touch(r Ref, write bool) {
	next := int32(len(b.plan.Steps))
	b.used.use(b.Shape.key(r), r.Off, r.Off+r.Len, next, write, func(step int32) { b.needs = append(b.needs, step) })
}

// add adds a step whose ranges were touched.
func (b *builder) add(s Step) int32 {
	needs := append(b.needs, b.after...)
	b.needs = needs[:0]
	if len(b.plan.Steps) >= MaxSteps {
		b.fail(b.tooLong())
		return 0
	}
	if len(needs) > 0 {
		slices.Sort(needs)
		s.Needs = slices.Clone(slices.Compact(needs))
	}
	b.plan.Steps = append(b.plan.Steps, s)
	step := int32(len(b.plan.Steps) - 1)
	if s.Verb == Put || s.Src.Buf.Remote() || slices.ContainsFunc(s.Srcs, func(r Ref) bool { return r.Buf.Remote() }) {
		b.touched = append(b.touched, step)
	}
	return step
}

func (b *builder) tooLong() error {
	return fmt.Errorf("collectives: %s %s over %d ranks, %d elements of %d bytes in chunks of %d: %w: more than "+
		"%d steps; cut the vector into blocks or raise Chunk",
		b.plan.Algo, b.Kind, b.n, b.Count, b.Elem, b.chunk, ErrTooLong, MaxSteps)
}

func (b *builder) send(peer int, src Ref) {
	if src.Len > 0 {
		b.touch(src, false)
		b.add(Step{Verb: Send, Peer: int32(peer), Src: src})
	}
}

func (b *builder) recv(peer int, dst Ref) int32 { return b.post(peer, dst, false) }

// borrow posts a Recv into scratch memory that exactly one later step reads.
func (b *builder) borrow(peer int, dst Ref) int32 { return b.post(peer, dst, true) }

func (b *builder) post(peer int, dst Ref, once bool) int32 {
	if dst.Len == 0 {
		return -1
	}
	b.touch(dst, true)
	return b.add(Step{Verb: Recv, Peer: int32(peer), Dst: dst, Once: once})
}

// sendPart and recvPart are send and recv for one part, or its first chunk, of a kind whose parts
// differ in length. Without bytes they are a signal, so that ranks which disagree on the lengths
// notice it.
func (b *builder) sendPart(peer int, src Ref) {
	if src.Len == 0 && b.Kind.varies() {
		b.signal(peer)
		return
	}
	b.send(peer, src)
}

func (b *builder) recvPart(peer int, dst Ref) int32 {
	if dst.Len == 0 && b.Kind.varies() {
		return b.await(peer)
	}
	return b.recv(peer, dst)
}

// copy moves src to dst. If they are the same memory the step costs nothing.
func (b *builder) copy(dst, src Ref) {
	if src.Len > 0 {
		b.touch(src, false)
		b.touch(dst, true)
		b.add(Step{Verb: Copy, Dst: dst, Src: src})
	}
}

// put writes src into peer's memory dst.
func (b *builder) put(peer int, dst, src Ref) {
	b.plan.OneSided = true
	if src.Len > 0 {
		b.touch(src, false)
		b.touch(dst, true)
		b.add(Step{Verb: Put, Peer: int32(peer), Dst: dst, Src: src})
	}
}

// reduce folds srcs, in their order, into dst.
func (b *builder) reduce(final bool, dst Ref, srcs []Ref) {
	if dst.Len == 0 {
		return
	}
	for _, r := range srcs {
		b.touch(r, false)
	}
	b.touch(dst, true)
	b.add(Step{Verb: ReduceInto, Final: final, Dst: dst, Srcs: srcs})
}

// signal sends an empty message to peer, after all use of peers' memory; await posts its Recv.
func (b *builder) signal(peer int) {
	b.needs = append(b.needs, b.touched...)
	b.add(Step{Verb: Send, Peer: int32(peer)})
}

func (b *builder) await(peer int) int32 { return b.add(Step{Verb: Recv, Peer: int32(peer)}) }

// notify is a Signal to peer after all Puts to it since the last; expect is its WaitSignal.
func (b *builder) notify(peer int) {
	b.touched = slices.DeleteFunc(b.touched, func(step int32) bool {
		to := int(b.plan.Steps[step].Peer) == peer
		if to {
			b.needs = append(b.needs, step)
		}
		return to
	})
	b.add(Step{Verb: Signal, Peer: int32(peer)})
}

func (b *builder) expect(peer int) int32 { return b.add(Step{Verb: WaitSignal, Peer: int32(peer)}) }

// tmp allocates n bytes of scratch memory on their own cache lines. Resetting b.top frees what was
// allocated since.
func (b *builder) tmp(n int) Ref {
	if n > math.MaxInt-64-b.top {
		b.fail(b.bad("scratch memory would pass the address space; lower Chunk"))
		return Ref{Buf: Tmp}
	}
	r := Ref{Buf: Tmp, Off: b.top, Len: n}
	b.top += (n + 63) &^ 63
	b.plan.Tmp = max(b.plan.Tmp, b.top)
	return r
}

// slots allocates n scratch ranges of size bytes each.
func (b *builder) slots(n, size int) []Ref {
	if size > 0 && n > (math.MaxInt-b.top)/(size+64) {
		b.fail(b.bad("scratch memory would pass the address space; lower Chunk"))
		return make([]Ref, n)
	}
	rs := make([]Ref, n)
	for i := range rs {
		rs[i] = b.tmp(size)
	}
	return rs
}

// chunks returns the number of chunks of b.chunk bytes in a range of size bytes, when one chunk
// needs about steps steps; 0 if the plan would be too long.
func (b *builder) chunks(size, steps int) int {
	k := (size-1)/b.chunk + 1
	if size == 0 {
		k = 0
	}
	if k > MaxSteps/max(steps, 1) && k > 1 {
		b.fail(b.tooLong())
		return 0
	}
	return k
}

// cut returns the offset and length of chunk c of a range of size bytes; length 0 past its end.
func (b *builder) cut(size, c int) (off, n int) {
	off = min(c*b.chunk, size)
	return off, min(b.chunk, size-off)
}

func (r Ref) sub(off, n int) Ref {
	r.Off += off
	r.Len = n
	return r
}

// mine returns this rank's part of In or Out, as a whole.
func (b *builder) mine(buf Buf, part int) Ref {
	return Ref{Buf: buf, Part: int32(part), Len: b.PartBytes(buf, b.Rank, part)}
}

// far returns a part of a peer's In or Out.
func (b *builder) far(buf Buf, peer, part int) Ref {
	b.plan.LoadStore = true
	return b.there(buf, peer, part)
}

// there is far for plans that put.
func (b *builder) there(buf Buf, peer, part int) Ref {
	return Ref{Buf: PeerIn + buf, Peer: int32(peer), Part: int32(part), Len: b.PartBytes(buf, peer, part)}
}

// split divides count elements into n parts and returns their n+1 bounds in bytes: multiples of a
// cache line if each part gets at least one, else of an element. Parts differ by at most one unit;
// the last one takes the remainder.
func split(count, n, elem int) []int {
	unit := 64 / gcd(64, elem)
	if count/unit < n {
		unit = 1
	}
	units := count / unit
	q, r := units/n, units%n
	bounds := make([]int, n+1)
	for p := range n {
		bounds[p] = (q*p + min(p, r)) * unit * elem
	}
	bounds[n] = count * elem
	return bounds
}

// widest returns the largest distance between neighbouring bounds.
func widest(bounds []int) int {
	w := 0
	for i := 1; i < len(bounds); i++ {
		w = max(w, bounds[i]-bounds[i-1])
	}
	return w
}

func gcd(a, b int) int {
	for b != 0 {
		a, b = b, a%b
	}
	return a
}

func lcm(a, b int) int { return a / gcd(a, b) * b }

// alone is the plan of a single active rank.
func (b *builder) alone() {
	out, in := b.mine(Out, b.Rank), b.mine(In, b.Rank)
	if b.Parts(In, b.Rank) == 1 {
		in = b.mine(In, 0)
	}
	if b.Parts(Out, b.Rank) == 1 {
		out = b.mine(Out, 0)
	}
	switch {
	case b.Kind.Reduces():
		b.reduce(true, out, []Ref{in})
	case b.Kind != Broadcast && b.Kind != Barrier:
		b.copy(out, in)
	}
}
