package rma

import (
	"errors"
	"fmt"
	"slices"
	"sync/atomic"
	"unsafe"

	"tutti/kernels"
	"tutti/mem"
	"tutti/p2p"
)

// Target is a peer's memory that this process can access: an Entry, or a mapping with the owner's
// consent. Enter and Leave bracket each access. Enter's errors are ErrRevoked, ErrRights, ErrBounds
// or the link's.
type Target interface {
	Enter(rights mem.Rights, off, n uint64) ([]byte, error)
	Leave()
}

// Reach gives a Copier access to the memory of its peer.
type Reach interface {
	// Reach returns the memory that x describes, for accesses with rights; nil without an error if
	// the peer has yet to provide it. Drop follows.
	Reach(x *mem.Remote, rights mem.Rights) (Target, error)
	// Drop ends an operation's use of t.
	Drop(t Target)
	// Signalled is called after signals were written.
	Signalled()
}

// Copier runs puts and gets of one link by copying. It implements p2p.OneSided for the link that
// owns it, under the link's rules. Reset makes it ready.
type Copier struct {
	reach Reach
	ops   []*copyOp // under way, oldest first
	turn  int
	done  []ending // not yet returned by Poll
	spare []*copyOp
	dead  func() error // returns why the link has ended, or nil
	lost  error        // with which a put has ended because the link has
}

type copyOp struct {
	id       uint64
	op       string // "put", "get" or "signal"
	local    []byte
	to       *mem.Remote
	target   Target
	off      uint64
	moved    int
	signal   p2p.Signal
	word     Target
	strong   bool
	flush    bool
	finished bool
}

// ending is the end of an operation that Poll has not returned.
type ending struct {
	p2p.Completion
	unplaced bool // a put whose data, or signal, is not placed
	word     word // of that
}

// bars reports whether a signal to w that begins now is not written because of e.
func (e *ending) bars(w word, strong bool) bool { return e.unplaced && (strong || w == e.word) }

// polled moves what Poll returns from done to out.
func polled(out []p2p.Completion, done *[]ending) int {
	n := min(len(out), len(*done))
	for i := range n {
		out[i] = (*done)[i].Completion
	}
	*done = (*done)[:copy(*done, (*done)[n:])]
	return n
}

// word names the word of a signal. The zero word is none.
type word struct{ region, generation, offset uint64 }

func wordOf(s *p2p.Signal) word {
	if s.At == nil {
		return word{}
	}
	return word{s.At.ID, s.At.Generation, s.Offset}
}

// Reset makes c access memory by r. dead returns why the link has ended, or nil.
func (c *Copier) Reset(r Reach, dead func() error) { *c = Copier{reach: r, dead: dead} }

// begin returns a new operation, ErrAgain if there are too many.
func (c *Copier) begin(id uint64) (*copyOp, error) {
	if err := c.dead(); err != nil {
		return nil, err
	}
	if len(c.ops)+len(c.done) >= p2p.MaxOutstanding {
		return nil, p2p.ErrAgain
	}
	if n := len(c.spare); n > 0 {
		o := c.spare[n-1] // free cleared it
		c.spare = c.spare[:n-1]
		o.id = id
		return o, nil
	}
	return &copyOp{id: id}, nil
}

func (c *Copier) free(o *copyOp) {
	for _, t := range []Target{o.target, o.word} {
		if t != nil {
			c.reach.Drop(t)
		}
	}
	*o = copyOp{}
	c.spare = append(c.spare, o)
}

// Put implements p2p.Putter.
func (c *Copier) Put(id uint64, local mem.Memory, to *mem.Remote, offset uint64, s p2p.Signal) error {
	if err := checkPut(local, to, offset, &s, false); err != nil {
		return err
	}
	o, err := c.begin(id)
	if err != nil {
		return err
	}
	o.op, o.local, o.off, o.signal, o.strong = "put", local.Bytes(), offset, s, s.Strong
	if o.to = to; local.Len() > 0 {
		o.target, err = c.resolve(to, mem.Write)
	}
	if err == nil && s.At != nil {
		o.word, err = c.resolve(s.At, mem.Signal)
	}
	return c.start(o, err)
}

// Get implements p2p.Getter.
func (c *Copier) Get(id uint64, local mem.Memory, from *mem.Remote, offset uint64) error {
	if err := checkGet(local, from, offset, false); err != nil {
		return err
	}
	o, err := c.begin(id)
	if err != nil {
		return err
	}
	o.op, o.local, o.to, o.off = "get", local.Bytes(), from, offset
	o.target, err = c.resolve(from, mem.Read)
	return c.start(o, err)
}

// FlushPuts implements p2p.Flusher.
func (c *Copier) FlushPuts(id uint64) error {
	o, err := c.begin(id)
	if err != nil {
		return err
	}
	o.op, o.flush, o.strong = "flush", true, true
	return c.start(o, nil)
}

// resolve asks for the memory of x. If it is not exposed, the operation begins, and its completion
// has the error.
func (c *Copier) resolve(x *mem.Remote, rights mem.Rights) (Target, error) {
	t, err := c.reach.Reach(x, rights)
	switch {
	case err == nil && t == nil:
		return nil, p2p.ErrAgain
	case errors.Is(err, p2p.ErrNoRegion), errors.Is(err, p2p.ErrRevoked):
		return refused{p2p.ErrRevoked}, nil
	}
	return t, err
}

// refused is a Target that cannot be reached.
type refused struct{ err error }

func (r refused) Enter(mem.Rights, uint64, uint64) ([]byte, error) { return nil, r.err }
func (r refused) Leave()                                           {}

// start queues an operation, and runs it if it is alone. With an error it drops it.
func (c *Copier) start(o *copyOp, err error) error {
	if err != nil {
		c.free(o)
		return err
	}
	c.ops = append(c.ops, o)
	if o.word != nil {
		w := wordOf(&o.signal)
		if slices.ContainsFunc(c.done, func(e ending) bool { return e.bars(w, o.strong) }) {
			c.end(len(c.ops)-1, p2p.ErrUnplaced)
			return nil
		}
	}
	if o.flush && c.lost != nil {
		c.end(len(c.ops)-1, c.lost)
		return nil
	}
	if len(c.ops) == 1 {
		c.run()
	}
	return nil
}

// run moves up to a share of the operations' data, a chunk of each in turn.
func (c *Copier) run() {
	signalled := false
	for left := share; left > 0 && len(c.ops) > 0; {
		if c.turn >= len(c.ops) {
			c.turn = 0
		}
		o := c.ops[c.turn]
		n, signal, err := c.step(o, c.turn == 0)
		left -= max(n, 1<<10)
		signalled = signalled || signal
		if err != nil || o.finished {
			c.end(c.turn, err)
		} else {
			c.turn++
		}
	}
	if signalled {
		c.reach.Signalled()
	}
}

// step moves a chunk of o, and writes its signal when all is moved. oldest says that no earlier
// operation is under way.
func (c *Copier) step(o *copyOp, oldest bool) (n int, signalled bool, err error) {
	if o.target != nil && (o.moved < len(o.local) || len(o.local) == 0) {
		n = min(chunk, len(o.local)-o.moved)
		rights := mem.Write
		if o.op == "get" {
			rights = mem.Read
		}
		m, err := o.target.Enter(rights, o.off+uint64(o.moved), uint64(n))
		if err != nil {
			return 0, false, o.explain(err)
		}
		theirs, mine := unsafe.Pointer(unsafe.SliceData(m)), unsafe.Pointer(unsafe.SliceData(o.local[o.moved:]))
		if rights == mem.Read {
			kernels.CopyShared(mine, theirs, n)
		} else {
			kernels.CopyOut(theirs, mine, n, len(o.local))
		}
		o.target.Leave()
		if o.moved += n; o.moved < len(o.local) {
			return n, false, nil
		}
	}
	if o.strong && !oldest || o.word != nil && c.signals(o) {
		return n, false, nil
	}
	if o.word != nil {
		m, err := o.word.Enter(mem.Signal, o.signal.Offset, mem.WordSize)
		if err != nil {
			if !access(err) {
				return n, false, err
			}
			return n, false, p2p.NewAccessError("signal", o.signal.At, o.signal.Offset, mem.WordSize, err)
		}
		atomic.StoreUint64((*uint64)(unsafe.Pointer(unsafe.SliceData(m))), o.signal.Value)
		o.word.Leave()
		signalled = true
	}
	o.finished = true
	return n, signalled, nil
}

// signals reports whether an operation before o has yet to write the word of o's signal: a word
// never goes back to an earlier value.
func (c *Copier) signals(o *copyOp) bool {
	for _, e := range c.ops {
		if e == o {
			return false
		}
		if e.word != nil && wordOf(&e.signal) == wordOf(&o.signal) {
			return true
		}
	}
	return false
}

// access reports whether err denies an access.
func access(err error) bool {
	return errors.Is(err, p2p.ErrRevoked) || errors.Is(err, p2p.ErrRights) || errors.Is(err, p2p.ErrBounds)
}

func (o *copyOp) explain(err error) error {
	if !access(err) {
		return err
	}
	return p2p.NewAccessError(o.op, o.to, o.off, uint64(len(o.local)), err)
}

// end removes operation i from the queue, with an error also those whose signals are ordered after
// it and, if a put ends because the link has, the flushes behind it.
func (c *Copier) end(i int, err error) {
	o := c.ops[i]
	e := ending{p2p.Completion{ID: o.id, Bytes: o.moved, Err: err}, err != nil && o.op == "put", wordOf(&o.signal)}
	c.done = append(c.done, e)
	c.ops = append(c.ops[:i], c.ops[i+1:]...)
	if e.unplaced && errors.Is(err, p2p.ErrPeerGone) {
		c.lost = err
	}
	for k := i; e.unplaced && k < len(c.ops); {
		switch o := c.ops[k]; {
		case o.word != nil && e.bars(wordOf(&o.signal), o.strong):
			c.end(k, p2p.ErrUnplaced)
		case o.flush && errors.Is(err, p2p.ErrPeerGone):
			c.end(k, err)
		default:
			k++
		}
	}
	c.free(o)
}

// Poll implements p2p.Completer.
func (c *Copier) Poll(out []p2p.Completion) int {
	if len(c.ops) > 0 {
		if err := c.dead(); err != nil {
			for n := len(c.ops); n > 0; n-- {
				c.end(n-1, err)
			}
		} else {
			c.run()
		}
	}
	return polled(out, &c.done)
}

// Ready reports whether Poll may make progress.
func (c *Copier) Ready() bool { return len(c.done)+len(c.ops) > 0 }

// Cancel implements p2p.Completer.
func (c *Copier) Cancel(id uint64) {
	for i := 0; i < len(c.ops); {
		if c.ops[i].id == id {
			c.end(i, p2p.ErrCancelled)
		} else {
			i++
		}
	}
}

// checkPut validates the arguments of a put. devices: local may be memory of a device.
func checkPut(local mem.Memory, to *mem.Remote, offset uint64, s *p2p.Signal, devices bool) error {
	if err := checkLocal("put", local, devices); err != nil {
		return err
	}
	if local.Len() > 0 || s.At == nil {
		if to == nil {
			return errors.New("put of data to no remote memory")
		}
		if err := p2p.CheckAccess("put", to, mem.Write, offset, uint64(local.Len())); err != nil {
			return err
		}
	}
	if s.At != nil {
		return p2p.CheckAccess("signal", s.At, mem.Signal, s.Offset, mem.WordSize)
	}
	return nil
}

// checkGet validates the arguments of a get, as checkPut does.
func checkGet(local mem.Memory, from *mem.Remote, offset uint64, devices bool) error {
	if err := checkLocal("get", local, devices); err != nil {
		return err
	}
	if from == nil {
		return errors.New("get from no remote memory")
	}
	return p2p.CheckAccess("get", from, mem.Read, offset, uint64(local.Len()))
}

func checkLocal(op string, local mem.Memory, devices bool) error {
	if !local.Loc().Host() && !devices {
		return fmt.Errorf("%s with local memory at %s: %w", op, local.Loc(), errors.ErrUnsupported)
	}
	return nil
}
