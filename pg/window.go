package pg

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"strconv"
	"sync"

	"tutti/mem"
	"tutti/p2p"
	"tutti/pg/internal/exec"
)

// WindowCounters is how many signal counters a rank has at each other rank of a Window.
const WindowCounters = 16

// A Window is memory of a group that its ranks put to, get from and signal: a part of the same size
// at every rank (MPI_Win_allocate; NCCL: ncclCommWindowRegister). A rank's operations on a window
// stand outside of the order of collectives, and on different goroutines outside of each other's.
//
//	win, err := pg.NewWindow(ctx, g, 1<<20)
//	err = win.Put(ctx, to, 0, x)          // begun: x must not change
//	err = win.Signal(ctx, to, 0)          // after the data of all puts to that rank
//	err = win.Flush(ctx, to)              // placed: x may change
//
//	err = win.WaitSignal(ctx, from, 0, 1) // at the other rank
//	use(win.Bytes())
//
// Progress: where ranks share memory a put needs nothing of its target. Over a network the target
// places what comes, and answers gets, while it is in a call of this package; a target that computes
// for long delays those who wait for it.
//
// Failures: an operation on a part whose rank was lost fails with a *RankError that names it; all
// other parts stay as they are, in whatever view the group goes on. A rank that came in has no part
// before the members have called Refresh, and it NewWindow. When an operation has returned with an
// error, nothing of this rank's memory is touched any more; what it was to put may have been placed,
// in part or whole.
type Window struct {
	g      *Group
	n      int
	region *mem.Region // the part, and behind it the words that others signal to
	words  int         // where they begin
	tag    uint64      // of this rank's signals

	// What the others are told.
	data, signals *mem.Remote

	closing sync.Mutex // held by Refresh and Close

	// Under the proxy's lock.
	parts  []part // by slot
	waits  []*p2p.Wait
	spare  []*p2p.Transfer
	closed bool
}

// part is a rank's part of the window, as this rank knows it.
type part struct {
	incarnation   uint64 // 0: there is none
	data, signals mem.Remote
	tag           uint64
	sent          [WindowCounters]uint64
	pending       []*p2p.Transfer // puts that were begun, the oldest first
	flushes       int             // goroutines in Flush
	failed        error           // what the first put that failed since Flush did
	mapping       *p2p.Mapping
}

// The words of a source are a row. A word is the source's tag in the upper bits and its count in the
// lower ones: what an earlier life of the source has signalled is never taken for this one's.
const (
	rowSize   = WindowCounters * mem.WordSize
	countBits = 40
	maxCount  = 1<<countBits - 1
)

// What the ranks tell each other, in words of 8 bytes: the fields, then two remotes.
const (
	saysIncarnation = iota
	saysBytes
	saysStatus // 0: the rank has no memory
	saysFirst  // lengths of the remotes: data's, and signals' in the upper half
	saysRemotes
	saysWords = saysRemotes + 2*mem.MaxRemote/8
)

// NewWindow makes a window of bytes at every rank of g, which is zeroed. It is a collective: all
// active ranks call it, with the same size, in the order of the group's other collectives. Its outcome
// is the same at all ranks that return one, as with Config.Uniform. Close gives the window back.
//
// A rank that has come in to a group with windows calls it for each of them, when the others call
// Refresh.
func NewWindow(ctx context.Context, g *Group, bytes int) (*Window, error) {
	if bytes < 1 || bytes > exec.MaxBytes {
		return nil, &ArgumentError{Call: "window", Arg: "the size", Got: strconv.Itoa(bytes) + " bytes",
			Want: "1 byte or more that fit in memory"}
	}
	if g.closed.Load() {
		return nil, ErrClosed
	}
	w := &Window{g: g, n: bytes, words: (bytes + 63) &^ 63, tag: g.job.session.Self.Incarnation >> countBits}
	rows := max(g.Size(), g.job.settings.MaxSize)
	p := g.job.proxy
	var err error
	if w.region, err = p.AllocWritable(w.words + rows*rowSize); err == nil {
		if w.data, err = p.Expose(w.region, 0, bytes, mem.Read|mem.Write); err == nil {
			w.signals, err = p.Expose(w.region, w.words, rows*rowSize, mem.Signal)
		}
	}
	if errors.Is(err, p2p.ErrClosed) {
		return nil, errors.Join(ErrClosed, w.free(ctx))
	}
	if err == nil {
		err = w.exchange(ctx, true)
	} else {
		err = fmt.Errorf("window of %d bytes: %w", bytes, err)
		w.exchange(ctx, false) // the others learn that this rank has none
	}
	if err != nil {
		return nil, errors.Join(err, w.Close(ctx))
	}
	return w, nil
}

// exchange tells all ranks where this rank's part is, if it has one, and learns where theirs are.
func (w *Window) exchange(ctx context.Context, has bool) error {
	g := w.g
	mine := make([]int64, saysWords)
	mine[saysIncarnation], mine[saysBytes] = int64(g.job.session.Self.Incarnation), int64(w.n)
	if has {
		b := make([]byte, 0, 2*mem.MaxRemote)
		b, err := w.data.AppendBinary(b)
		first := len(b)
		if err == nil {
			b, err = w.signals.AppendBinary(b)
		}
		if err != nil {
			return err
		}
		mine[saysStatus], mine[saysFirst] = 1, int64(first)|int64(len(b)-first)<<32
		b = append(b, make([]byte, 2*mem.MaxRemote-len(b))...)
		for i := saysRemotes; i < saysWords; i++ {
			mine[i] = int64(binary.LittleEndian.Uint64(b[8*(i-saysRemotes):]))
		}
	}
	all, err := g.exchange(ctx, mine)
	if err != nil {
		return err
	}
	parts := make([]part, len(all)/saysWords)
	for slot := range parts {
		said := all[slot*saysWords : (slot+1)*saysWords]
		if said[saysIncarnation] == 0 { // nobody has the slot
			continue
		}
		switch {
		case said[saysStatus] == 0:
			return fmt.Errorf("rank %d has no memory for a window of %d bytes", slot, said[saysBytes])
		case said[saysBytes] != int64(w.n):
			return &ArgumentError{Call: "window", Arg: "the size", Got: fmt.Sprintf("%d bytes", w.n),
				Want: fmt.Sprintf("that of rank %d, which is %d", slot, said[saysBytes])}
		}
		if err := parts[slot].decode(said); err != nil {
			return &RankError{Rank: slot, Call: "window", Reporter: g.rank, Err: err}
		}
	}
	g.job.proxy.Lock()
	defer g.job.proxy.Unlock()
	w.adopt(parts)
	return nil
}

// decode takes in what a rank says.
func (p *part) decode(said []int64) error {
	b := make([]byte, 0, 8*(saysWords-saysRemotes))
	for _, v := range said[saysRemotes:saysWords] {
		b = binary.LittleEndian.AppendUint64(b, uint64(v))
	}
	first, second := uint64(said[saysFirst])&(1<<32-1), uint64(said[saysFirst])>>32
	if first > mem.MaxRemote || second > mem.MaxRemote {
		return fmt.Errorf("%w: %d and %d bytes", mem.ErrRemote, first, second)
	}
	p.incarnation = uint64(said[saysIncarnation])
	p.tag = p.incarnation >> countBits
	return errors.Join(p.data.UnmarshalBinary(b[:first]), p.signals.UnmarshalBinary(b[first:first+second]))
}

// adopt takes in where the parts are. Those of lives that are known stay as they are. With the
// proxy's lock.
func (w *Window) adopt(parts []part) {
	for slot := range w.parts {
		old := &w.parts[slot]
		if slot < len(parts) && old.incarnation == parts[slot].incarnation {
			parts[slot] = *old
			continue
		}
		w.drop(old)
	}
	w.parts = parts
}

// drop gives up what this rank holds of a part. With the proxy's lock.
func (w *Window) drop(p *part) {
	for _, t := range p.pending {
		w.g.job.proxy.CancelTransfer(t)
	}
	if p.mapping != nil {
		p.mapping.Release()
	}
	*p = part{}
}

// Refresh takes in the parts of ranks that have come in to the group since the window was made, or
// refreshed last, and forgets those of ranks that are gone. It is a collective of all active ranks,
// in which those that came in call NewWindow instead. Parts of ranks that stayed are not touched.
// The counters between this rank and a new life of another begin at 0.
func (w *Window) Refresh(ctx context.Context) error {
	w.closing.Lock()
	defer w.closing.Unlock()
	if w.region == nil {
		return ErrClosed
	}
	return w.exchange(ctx, true)
}

// Bytes returns this rank's part. Others write to it as they like; what they have signalled after
// is there when WaitSignal has returned. It must not be touched after Close.
func (w *Window) Bytes() []byte { return w.region.Bytes()[:w.n:w.n] }

// Size returns the size of each part in bytes.
func (w *Window) Size() int { return w.n }

// call is an operation on the window that runs.
type call struct {
	w    *Window
	name string
	wait *p2p.Wait
}

// enter begins an operation on n bytes at offset of rank's part. Unless it fails it has the proxy's
// lock, which leave gives up.
func (w *Window) enter(ctx context.Context, name string, rank, offset, n int) (call, *part, error) {
	g := w.g
	c := call{w: w, name: name}
	g.job.proxy.Lock()
	p, err := w.part(name, rank)
	if err == nil && (offset < 0 || n > w.n || offset > w.n-n) {
		err = &ArgumentError{Call: name, Arg: "the range", Got: fmt.Sprintf("%d bytes at offset %d", n, offset),
			Want: fmt.Sprintf("one within the %d bytes of a part", w.n)}
	}
	if err != nil {
		g.job.proxy.Unlock()
		return c, nil, err
	}
	if k := len(w.waits); k > 0 {
		c.wait, w.waits = w.waits[k-1], w.waits[:k-1]
	} else {
		c.wait = new(p2p.Wait)
	}
	c.wait.Reset(ctx, g.job.timeout, false)
	return c, p, nil
}

// part returns rank's part if it can be reached. With the proxy's lock.
func (w *Window) part(name string, rank int) (*part, error) {
	g := w.g
	switch {
	case w.closed || g.closed.Load():
		return nil, ErrClosed
	case g.aborted != nil:
		return nil, g.aborted
	case rank < 0 || rank >= g.v.Size:
		return nil, &ArgumentError{Call: name, Arg: "the rank", Got: strconv.Itoa(rank),
			Want: fmt.Sprintf("a rank, 0 to %d", g.v.Size-1)}
	}
	lost := func(why error) (*part, error) {
		return nil, &RankError{Rank: rank, Epoch: g.v.epoch, Call: name, Reporter: g.rank, Err: why}
	}
	if rank >= len(w.parts) || w.parts[rank].incarnation == 0 {
		return lost(errors.New("it has no part of the window: see Window.Refresh"))
	}
	p := &w.parts[rank]
	if r := g.jobRank(rank); g.job.roster != nil && !g.job.view().Has(r, p.incarnation) {
		why := errors.New("its part of the window went with it")
		if text := g.job.why(r); text != "" {
			why = fmt.Errorf("%s: %w", text, why)
		}
		return lost(why)
	}
	return p, nil
}

// leave ends an operation, and returns err as the program sees it.
func (c *call) leave(rank int, err error) error {
	w := c.w
	if err != nil {
		err = c.explain(rank, err)
	}
	w.waits = append(w.waits, c.wait)
	w.g.job.proxy.Unlock()
	return err
}

// explain makes a typed error of err.
func (c *call) explain(rank int, err error) error {
	g := c.w.g
	var peer *p2p.PeerError
	var aborted *p2p.Aborted
	switch {
	case g.aborted != nil:
		return g.aborted
	case errors.As(err, &aborted):
		if a, bad := decodeAbort(aborted.Payload, g.v.Size); bad == nil && a.Kind == abortCall {
			return g.told(a)
		}
	case errors.As(err, &peer):
		return &RankError{Rank: g.slotOf(peer.Rank), Epoch: g.v.epoch, Call: c.name, Reporter: g.rank, Err: peer.Err}
	case errors.Is(err, p2p.ErrRevoked):
		return &RankError{Rank: rank, Epoch: g.v.epoch, Call: c.name, Reporter: g.rank,
			Err: fmt.Errorf("it has closed the window, or it is another life of it: %w", err)}
	case errors.Is(err, p2p.ErrClosed) || g.closed.Load():
		return ErrClosed
	case errors.Is(err, p2p.ErrTimeout), errors.Is(err, context.DeadlineExceeded), errors.Is(err, context.Canceled):
		e := &TimeoutError{Call: c.name, After: c.wait.Waited(), Reporter: g.rank, Err: context.DeadlineExceeded,
			Missing: []Seen{{Rank: rank, What: "nothing yet"}}}
		if errors.Is(err, context.Canceled) {
			e.Err = context.Canceled
		}
		if t, ok := g.coll.Seen(rank); ok {
			e.Missing[0].What = exec.Spell(t)
		}
		return e
	}
	return err
}

// transfer returns a Transfer that is ready for use. With the proxy's lock.
func (w *Window) transfer() *p2p.Transfer {
	if k := len(w.spare); k > 0 {
		t := w.spare[k-1]
		w.spare = w.spare[:k-1]
		return t
	}
	return new(p2p.Transfer)
}

// reap takes puts that are done from the front of p's list. With the proxy's lock.
func (w *Window) reap(p *part) {
	k := 0
	for k < len(p.pending) && p.pending[k].Done() {
		t := p.pending[k]
		if err := t.Err(); err != nil && p.failed == nil {
			p.failed = err
		}
		if p.flushes == 0 { // else somebody may be about to look at it
			w.spare = append(w.spare, t)
		}
		k++
	}
	p.pending = p.pending[:copy(p.pending, p.pending[k:])]
}

// Put begins to copy src to offset of rank's part. It returns when the transfer has been begun, which
// may have to wait for earlier ones; src must not change before Flush, or an error of it, has
// returned. What becomes of the put, Flush says. Puts are in no order with each other.
func (w *Window) Put(ctx context.Context, rank, offset int, src []byte) error {
	return w.put(ctx, "put", rank, offset, src, -1, false)
}

// PutSignal is Put, and when src is placed adds one to this rank's counter at rank (0 to
// WindowCounters-1): who sees the signal there sees the data of this put, and perhaps not yet that
// of earlier ones.
func (w *Window) PutSignal(ctx context.Context, rank, offset int, src []byte, counter int) error {
	if counter < 0 {
		return badCounter("put", counter)
	}
	return w.put(ctx, "put", rank, offset, src, counter, false)
}

// Signal adds one to this rank's counter at rank (0 to WindowCounters-1), after the data of all puts
// to rank that this rank began before: who sees the signal there sees all of it. It returns when the
// signal was begun; what becomes of it, Flush says.
func (w *Window) Signal(ctx context.Context, rank, counter int) error {
	return w.put(ctx, "signal", rank, 0, nil, counter, true)
}

// put is Put, PutSignal and Signal; a counter below 0 is none.
func (w *Window) put(ctx context.Context, name string, rank, offset int, src []byte, counter int, strong bool) error {
	if counter >= WindowCounters || strong && counter < 0 {
		return badCounter(name, counter)
	}
	c, p, err := w.enter(ctx, name, rank, offset, len(src))
	if err != nil {
		return err
	}
	signal := p2p.Signal{}
	if counter >= 0 {
		signal = p2p.Signal{At: &p.signals, Offset: uint64(w.g.rank*rowSize + counter*mem.WordSize), Strong: strong,
			Value: w.tag<<countBits | p.sent[counter] + 1}
	}
	switch {
	case counter >= 0 && p.sent[counter] == maxCount:
		err = fmt.Errorf("counter %d at rank %d has been signalled %d times, as often as it can be", counter, rank,
			uint64(maxCount))
	case rank == w.g.rank:
		copy(w.Bytes()[offset:], src)
		if counter >= 0 {
			w.region.Word(w.words + int(signal.Offset)).Store(signal.Value)
			p.sent[counter]++
			w.g.job.proxy.Wake() // another goroutine may wait for it
		}
	case len(src) > 0 || counter >= 0:
		w.reap(p)
		t := w.transfer()
		if err = w.g.msgs.Put(c.wait, t, rank, mem.Host(src, mem.Anywhere), &p.data, uint64(offset),
			signal); err != nil {
			w.spare = append(w.spare, t)
			break
		}
		if counter >= 0 {
			p.sent[counter]++
		}
		p.pending = append(p.pending, t)
		w.reap(p)
	}
	return c.leave(rank, err)
}

func badCounter(name string, counter int) error {
	return &ArgumentError{Call: name, Arg: "the counter", Got: strconv.Itoa(counter),
		Want: fmt.Sprintf("a counter, 0 to %d", WindowCounters-1)}
}

// Flush returns when all puts and signals to rank that were begun before have ended: their data is
// placed, and the memory that they were from may change. Its error is that of the first one which
// failed since the last Flush. If ctx ends, those that have not ended are given up; their memory may
// be changed then, too.
func (w *Window) Flush(ctx context.Context, rank int) error {
	c, p, err := w.enter(ctx, "flush", rank, 0, 0)
	if err != nil {
		w.giveUp(rank)
		return err
	}
	life := p.incarnation
	p.flushes++
	for len(p.pending) > 0 && err == nil {
		t := p.pending[0]
		if e := w.g.msgs.WaitTransfer(c.wait, t); errors.Is(t.Err(), p2p.ErrCancelled) {
			err = e // of the waiting
		}
		if p = w.again(rank, life); p == nil {
			return c.leave(rank, &p2p.PeerError{Rank: w.g.jobRank(rank), Err: p2p.ErrPeerGone})
		}
		if err != nil {
			for _, t := range p.pending {
				w.g.job.proxy.CancelTransfer(t)
			}
		}
		w.reap(p)
	}
	p.flushes--
	failed := p.failed
	if p.failed = nil; err == nil {
		err = failed
	}
	return c.leave(rank, err)
}

// again returns rank's part after the lock was given up, nil if it is another life's now, or the
// window is closed: what was under way is over then. With the proxy's lock.
func (w *Window) again(rank int, life uint64) *part {
	if w.closed || rank >= len(w.parts) || w.parts[rank].incarnation != life {
		return nil
	}
	return &w.parts[rank]
}

// giveUp ends what is under way with a part that cannot be reached any more.
func (w *Window) giveUp(rank int) {
	p := w.g.job.proxy
	p.Lock()
	defer p.Unlock()
	if !w.closed && rank >= 0 && rank < len(w.parts) {
		for _, t := range w.parts[rank].pending {
			p.CancelTransfer(t)
		}
		w.reap(&w.parts[rank])
		w.parts[rank].failed = nil
	}
}

// Get copies from offset of rank's part to dst, and returns when it is there. After an error dst may
// be partly overwritten.
func (w *Window) Get(ctx context.Context, rank, offset int, dst []byte) error {
	c, p, err := w.enter(ctx, "get", rank, offset, len(dst))
	if err != nil {
		return err
	}
	switch {
	case rank == w.g.rank:
		copy(dst, w.Bytes()[offset:])
	case len(dst) > 0:
		t := w.transfer()
		from := p.data // p may become another's meanwhile
		if err = w.g.msgs.Get(c.wait, t, rank, mem.Host(dst, mem.Anywhere), &from, uint64(offset)); err == nil {
			err = w.g.msgs.WaitTransfer(c.wait, t)
		}
		w.spare = append(w.spare, t)
	}
	return c.leave(rank, err)
}

// WaitSignal returns when rank's counter at this rank (0 to WindowCounters-1) has come to n: when rank
// has signalled n times since both have their parts of the window. What rank had put before, as
// Signal and PutSignal say, is in Bytes then.
func (w *Window) WaitSignal(ctx context.Context, rank, counter int, n uint64) error {
	if counter < 0 || counter >= WindowCounters {
		return badCounter("wait for a signal", counter)
	}
	c, p, err := w.enter(ctx, "wait for a signal", rank, 0, 0)
	if err != nil {
		return err
	}
	word, tag := w.region.Word(w.words+rank*rowSize+counter*mem.WordSize), p.tag
	reached := func(v uint64) bool { return n == 0 || v>>countBits == tag && v&maxCount >= n }
	if rank == w.g.rank {
		for err == nil && !reached(word.Load()) {
			if err = w.g.msgs.Err(); err == nil {
				err = w.g.job.proxy.Progress(c.wait)
			}
		}
	} else {
		_, err = w.g.msgs.WaitWord(c.wait, rank, word, reached)
	}
	return c.leave(rank, err)
}

// Map returns the part of a rank on this machine as memory of this process, for reading alone:
// writing to it faults. It stays until Close, or until Refresh has found another life at rank; a rank
// that is gone leaves its part as it was. For ranks that cannot be mapped it fails with an error
// that wraps errors.ErrUnsupported.
func (w *Window) Map(ctx context.Context, rank int) ([]byte, error) {
	c, p, err := w.enter(ctx, "map", rank, 0, 0)
	if err != nil {
		return nil, err
	}
	var b []byte
	switch {
	case rank == w.g.rank:
		b = w.Bytes()
	case p.mapping != nil:
		b = p.mapping.Mem[:w.n:w.n]
	default:
		var m *p2p.Mapping
		id, life := p.data.ID, p.incarnation
		if m, err = w.g.msgs.Map(c.wait, rank, id); err != nil {
			break
		}
		switch p = w.again(rank, life); {
		case p == nil:
			m.Release()
			err = &p2p.PeerError{Rank: w.g.jobRank(rank), Err: p2p.ErrPeerGone}
		case len(m.Mem) < w.n:
			m.Release()
			err = fmt.Errorf("%w: rank %d has %d bytes for a part of %d", p2p.ErrProtocol, rank, len(m.Mem), w.n)
		case p.mapping != nil: // another goroutine was sooner
			m.Release()
			b = p.mapping.Mem[:w.n:w.n]
		default:
			p.mapping = m
			b = m.Mem[:w.n:w.n]
		}
	}
	return b, c.leave(rank, err)
}

// Close gives this rank's part back, and what it has mapped of others'. It is no collective: others
// get a *RankError when they use the part afterwards, so that a program usually calls Barrier first.
// Puts of this rank that have not ended are given up. No operation on the window may be running on
// another goroutine, and Bytes must not be used afterwards.
//
// Close waits until no peer is in the middle of writing to the part, until ctx ends: then the memory
// stays, and Close may be called again. It works after the group's Close, too. Idempotent.
func (w *Window) Close(ctx context.Context) error {
	w.closing.Lock()
	defer w.closing.Unlock()
	p := w.g.job.proxy
	p.Lock()
	w.closed = true
	for i := range w.parts {
		w.drop(&w.parts[i])
	}
	w.parts = nil
	p.Unlock()
	return w.free(ctx)
}

// free withdraws the part and gives its memory back.
func (w *Window) free(ctx context.Context) error {
	p := w.g.job.proxy
	for _, x := range []**mem.Remote{&w.data, &w.signals} {
		if *x != nil {
			if err := p.Withdraw(ctx, *x); err != nil {
				return fmt.Errorf("closing a window: %w", err)
			}
			*x = nil
		}
	}
	if w.region == nil {
		return nil
	}
	r := w.region
	w.region = nil
	return p.FreeRegion(r)
}
