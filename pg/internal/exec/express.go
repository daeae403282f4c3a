package exec

import (
	"errors"
	"slices"
	"unsafe"

	"tutti/collectives"
	"tutti/kernels"
	"tutti/p2p"
)

// Bounds of the calls that run by express.
const (
	expressPeers = 3    // that send to this rank
	expressBytes = 2048 // of a step
)

// errSteps: a call has to run by the steps of its plan.
var errSteps = errors.New("not an express")

// An express is the plan of a short bound call in an order that needs no waiting in between: all
// messages are sent, all messages have come, and are read where the link has them.
type express struct {
	first        []int32 // Copy steps from In to Out that come before a Send; they may run twice
	sends, recvs []int32
	rest         []int32   // Copy and ReduceInto steps
	from         [][]int32 // by element of rest: the place in recvs of each source, -1: it is in this rank's memory
	reduce       kernels.Reducer
}

// expressOf returns the express of a bound call, nil if it has none: it is too long, sends what it
// has received or made, receives twice from a rank, or divides a sum.
func (r *Runner) expressOf(b *Bound) *express {
	prog := b.prog
	e := &express{}
	if len(prog.loads) > 0 {
		return nil
	}
	for i := range prog.Steps {
		if prog.Steps[i].Verb != collectives.Send {
			continue
		}
		for _, n := range prog.Steps[i].Needs {
			s := &prog.Steps[n]
			if s.Verb == collectives.Copy && len(s.Needs) == 0 && s.Src.Buf == collectives.In &&
				s.Dst.Buf == collectives.Out && !b.Kind.Reduces() && !slices.Contains(e.first, n) {
				e.first = append(e.first, n)
			}
		}
	}
	late := func(n int32) bool { return prog.Steps[n].Verb != collectives.Send && !slices.Contains(e.first, n) }
	for i := range prog.Steps {
		s := &prog.Steps[i]
		if max(s.Dst.Len, s.Src.Len) > expressBytes || prog.sure[i] {
			return nil
		}
		switch s.Verb {
		case collectives.Send:
			if slices.ContainsFunc(s.Needs, late) {
				return nil
			}
			e.sends = append(e.sends, int32(i))
			continue
		case collectives.Recv:
			if slices.ContainsFunc(s.Needs, late) ||
				slices.ContainsFunc(e.recvs, func(n int32) bool { return prog.Steps[n].Peer == s.Peer }) {
				return nil
			}
			e.recvs = append(e.recvs, int32(i))
			continue
		case collectives.ReduceInto:
			if b.Op == kernels.Avg && len(s.Srcs) != len(r.set.Active) {
				return nil
			}
			var err error
			if e.reduce, err = kernels.Lookup(b.Op, b.DType); err != nil {
				return nil
			}
		case collectives.Copy:
			if slices.Contains(e.first, int32(i)) {
				continue
			}
		default:
			return nil
		}
		from := make([]int32, len(prog.lent[i]))
		for j, n := range prog.lent[i] {
			from[j] = int32(slices.Index(e.recvs, n))
		}
		e.rest, e.from = append(e.rest, int32(i)), append(e.from, from)
	}
	if len(e.recvs) > expressPeers {
		return nil
	}
	return e
}

// express runs a bound call, unless it would have to wait for long: then it returns an error, and
// the plan continues by steps, with r.ahead, or after p2p.ErrSuspended with receive. It holds the
// proxy's lock all the time.
func (r *Runner) express(b *Bound) error {
	e, prog := b.express, b.prog
	if prog.Tmp > 0 {
		if r.tmp == nil || r.tmp.Len() < prog.Tmp {
			return errSteps
		}
		r.scratch = unsafe.Pointer(unsafe.SliceData(r.tmp.Bytes()))
	}
	for _, i := range e.first {
		r.copyNow(&prog.Steps[i])
	}
	if r.ahead += r.sendNow(e.sends[r.ahead:], prog, &r.tok, true); r.ahead < len(e.sends) {
		return errSteps
	}
	err := r.receive(b)
	if err != nil {
		r.noteSent(b)
	}
	return err
}

// receive is express after all Send steps.
func (r *Runner) receive(b *Bound) error {
	e, prog := b.express, b.prog
	var came [expressPeers][]byte
	for k, i := range e.recvs {
		s := &prog.Steps[i]
		var err error
		if came[k], err = r.coll.Look(r.wait, int(s.Peer), &r.tok, s.Dst.Len); err != nil {
			if r.looking = err == p2p.ErrSuspended; r.looking {
				r.prog = prog
			}
			return err
		}
	}
	r.ahead, r.looking, r.prog = 0, false, nil
	r.dirty = b.Kind.Reduces() && r.in.ptr == r.out.ptr
	for k, i := range e.recvs {
		if s := &prog.Steps[i]; !prog.lends[i] && s.Dst.Len > 0 {
			kernels.Copy(r.at(&s.Dst), unsafe.Pointer(unsafe.SliceData(came[k])), s.Dst.Len)
		}
	}
	for k, i := range e.rest {
		s := &prog.Steps[i]
		if s.Verb == collectives.Copy {
			r.copyNow(s)
			continue
		}
		r.ptrs = r.ptrs[:0]
		for j, n := range e.from[k] {
			if n >= 0 {
				r.ptrs = append(r.ptrs, unsafe.Pointer(unsafe.SliceData(came[n])))
			} else {
				r.ptrs = append(r.ptrs, r.at(&s.Srcs[j]))
			}
		}
		if s.Dst.Len > 0 {
			e.reduce(r.at(&s.Dst), r.ptrs, s.Dst.Len/b.DType.Size())
		}
	}
	for _, i := range e.recvs {
		s := &prog.Steps[i]
		r.coll.Take(int(s.Peer), &r.tok, s.Dst.Len)
	}
	return nil
}

// sendNow makes Send steps until one cannot be made at once, and returns how many it has made.
func (r *Runner) sendNow(steps []int32, prog *program, tok *p2p.Token, urgent bool) int {
	for k, i := range steps {
		s := &prog.Steps[i]
		if !r.coll.SendNow(int(s.Peer), tok, r.bytes(&s.Src), urgent) {
			return k
		}
	}
	return len(steps)
}

// prepare has the links make ready for the Send steps of b. A cache line takes as long to come from
// the core that has read it last as all that is to be done before it is written.
func (r *Runner) prepare(b *Bound) {
	if b.express == nil {
		return
	}
	for _, i := range b.express.sends {
		s := &b.prog.Steps[i]
		r.coll.Prepare(int(s.Peer), s.Src.Len)
	}
}

// sent says what was sent of operations that have not ended.
type sent struct {
	coll *p2p.Channel // over which; state of another channel is void
	seq  uint64       // all Send steps up to this operation were made
	next int          // of the operation after it, the first next steps
	// The addresses that these operations write to are from lo to hi, exclusive.
	lo, hi uintptr
}

// noteSent records that the running call, b, has made its Send steps.
func (r *Runner) noteSent(b *Bound) {
	if r.sent.coll == r.coll && r.sent.seq >= r.seq {
		return
	}
	lo := uintptr(b.Out)
	r.sent = sent{coll: r.coll, seq: r.seq, lo: lo, hi: lo + uintptr(b.size)}
}

// SendAhead makes the Send steps of a bound call on these buffers, which will run as operation seq,
// while an earlier operation waits for its peers. It makes none if not all Send steps of the
// operations before were made, if the call reads what they may still write, or if it would have to
// wait. Links may gather what it sends until an operation waits.
func (r *Runner) SendAhead(b *Bound, dst, src unsafe.Pointer, seq uint64) {
	e, ahead := b.express, &r.sent
	from, to, n := uintptr(src), uintptr(dst), uintptr(b.size)
	if e == nil || len(e.first) > 0 || r.prog == nil || ahead.coll != r.coll || ahead.seq+1 != seq || ahead.next > 0 ||
		from < ahead.hi && ahead.lo < from+n {
		return
	}
	tok, in := b.tok, r.in
	tok.Seq = seq
	r.in = base{ptr: src, stride: b.from}
	ahead.next = r.sendNow(e.sends, b.prog, &tok, false)
	r.in = in
	r.prepare(b) // the next operation may be like this one
	if ahead.next == len(e.sends) {
		ahead.seq, ahead.next = seq, 0
		ahead.lo, ahead.hi = min(ahead.lo, to), max(ahead.hi, to+n)
	}
}

// Sent reports whether all Send steps of the operations up to seq were made, of which at least one
// has not ended.
func (r *Runner) Sent(seq uint64) bool { return r.sent.coll == r.coll && r.sent.seq >= seq }

// made returns how many Send steps of b, which now runs as operation r.seq, were made ahead.
func (r *Runner) made(b *Bound) int {
	switch ahead := &r.sent; {
	case ahead.coll != r.coll || b.express == nil:
		return 0
	case r.seq <= ahead.seq:
		return len(b.express.sends)
	case r.seq == ahead.seq+1:
		return ahead.next
	}
	return 0
}

// copyNow runs a short Copy step.
func (r *Runner) copyNow(s *collectives.Step) {
	if dst, src := r.at(&s.Dst), r.at(&s.Src); dst != src && s.Dst.Len > 0 {
		kernels.Copy(dst, src, s.Dst.Len)
	}
}
