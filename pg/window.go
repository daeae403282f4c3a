package pg

import (
	"cmp"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"runtime"
	"strconv"
	"sync/atomic"
	"time"
	"unsafe"

	"golang.org/x/sync/semaphore"

	"tutti/kernels"
	"tutti/mem"
	"tutti/p2p"
	"tutti/pg/flight"
	"tutti/pg/internal/exec"
)

// WindowCounters is how many signal counters a rank has at each other rank of a Window.
const WindowCounters = 16

// A Window is memory of a group for one-sided operations (put, get, signal): a part of the same
// size at every rank (MPI_Win_allocate; NCCL: ncclCommWindowRegister). Operations on a window are
// not part of the order of collectives. Those of different goroutines are not ordered with each
// other.
//
//	win, err := pg.NewWindow(ctx, g, 1<<20)
//	err = win.Put(ctx, to, 0, x)          // begun: x must not change
//	err = win.Signal(ctx, to, 0)          // after the data of all puts to that rank
//	err = win.Flush(ctx, to)              // placed: x may change
//
//	err = win.WaitSignal(ctx, from, 0, 1) // at the other rank
//	use(win.Bytes())
//
// A part is memory of the host, because other ranks put to it without an action of its owner, which
// a device's memory may need. PutBuffer and GetBuffer put from and get to the memory of a device.
//
// Progress: a put over shared memory needs no action of its target. Over a network the target
// places puts and answers gets while it is in a call of this package; a target that computes for
// long delays other ranks.
//
// Failures: an operation on the part of a lost rank fails with a *RankError that names it; only
// signals that had come from it can still be waited for, until Refresh. All other parts stay as
// they are, in every view of the group. A rank that came in has a part after it has called
// NewWindow and the members Refresh. After an error, an operation does not touch this rank's memory
// any more; data that was being put may have been placed in part or as a whole. What a lost rank
// was putting to this rank's part ends with Refresh, with two exceptions that Refresh names. A put
// that fails ends all signals to its rank, and Flush returns its error, until Refresh.
type Window struct {
	g      *Group
	n      int
	region *mem.Region // own, followed by the words that other ranks signal to
	own    []byte      // the part
	words  int         // their offset
	tag    uint64      // of this rank's signals

	// Sent to the other ranks.
	number        uint64 // the same at all ranks, of no other window; 0: not known yet
	data, signals *mem.Remote

	near []atomic.Uintptr    // by slot: where puts to the part write in this process, 0 if not known
	turn *semaphore.Weighted // of Refresh and Close

	// Under the proxy's lock. closed is also read, and looked counted up, without it.
	parts    []part // by slot
	waits    []*p2p.Wait
	spare    []*p2p.Transfer
	unpolled int           // operations since the last poll: see pollEvery
	looks    uint64        // looks at words of the region that have begun, which may release the lock
	looked   atomic.Uint64 // those that are over
	closed   atomic.Bool
}

// part is what this rank knows of a rank's part of the window.
type part struct {
	incarnation   uint64 // 0: there is none
	data, signals mem.Remote
	tag           uint64
	sent          [WindowCounters]uint64
	signal        p2p.Signal   // of the put that is being begun
	begun         uint64       // puts that did not end at once
	pending       []pendingPut // those that have not ended, the oldest first
	flushes       int          // goroutines in Flush
	failure       *failure     // of puts since Refresh: another one after it
	mapping       *p2p.Mapping
}

// holder tells a rank's parts of a window apart: no two parts have the same.
type holder struct{ incarnation, generation uint64 }

func (p *part) holder() holder { return holder{p.incarnation, p.data.Generation} }

// tag returns the tag of the signals of the rank that has the part: another one than for its other
// parts, and those of its slot's other incarnations, as far as the bits reach.
func (h holder) tag() uint64 { return (h.incarnation + h.generation*0x9e3779b97f4a7c15) >> countBits }

// failure is whether puts have failed.
type failure struct {
	err  error // of the first one, nil: none has
	told bool  // a Flush or a signal has returned an error since the last one
}

func (f *failure) add(err error) { f.err, f.told = cmp.Or(f.err, err), false }

// pendingPut is a put that was begun, and the visit that has brought its data from a device, nil
// for the host's.
type pendingPut struct {
	*p2p.Transfer
	v      *visit
	number uint64 // part.begun before it
}

// unplaced returns why signals to p must not be sent: a put has failed. A rank that sees a signal
// has to see the data of the puts before it. The caller tells the program. With the proxy's lock.
func (w *Window) unplaced(p *part) error {
	if len(p.pending) > 0 {
		w.reap(p)
	}
	if p.failure.err == nil {
		return nil
	}
	p.failure.told = true
	return fmt.Errorf("%w: %w", p2p.ErrUnplaced, p.failure.err)
}

func (t pendingPut) end() {
	if t.v != nil {
		t.v.end()
	}
}

// Each source has a row of words. A word holds the source's tag in its upper bits and its count in
// the lower ones, so that signals of an earlier incarnation, or with an earlier part, are not
// counted.
const (
	rowSize   = WindowCounters * mem.WordSize
	countBits = 40
	maxCount  = 1<<countBits - 1
)

// Fields of the exchange, in words of 8 bytes; two encoded remotes follow.
const (
	saysIncarnation = iota
	saysNumber      // of the window; 0: the rank is making it
	saysBytes
	saysStatus // 0: the rank has no memory
	saysFirst  // length of data's encoding, and of signals' in the upper half
	saysRemotes
	saysWords = saysRemotes + 2*mem.MaxRemote/8
)

// NewWindow makes a window with a zeroed part of bytes at every rank of g. It is a collective: all
// active ranks call it, with the same size, in the order of the group's other collectives. Its
// outcome is the same at all ranks that return one, as with Config.Uniform. Close releases the
// window.
//
// A rank that came in to a group with windows calls NewWindow for each of them, while the others
// call Refresh. So does a rank that has closed its window, or whose NewWindow has failed: its error
// does not say that the others' Refresh has, too.
func NewWindow(ctx context.Context, g *Group, bytes int) (*Window, error) {
	if ctx == nil {
		return nil, noContext("window")
	}
	if bytes < 1 || bytes > exec.MaxBytes {
		w := &Window{g: g, n: bytes}
		w.exchange(ctx, false) // tells the other ranks, which may have good sizes
		return nil, &ArgumentError{Call: "window", Arg: "the size", Got: strconv.Itoa(bytes) + " bytes",
			Want: "1 byte or more that fit in memory"}
	}
	if g.closed.Load() {
		return nil, ErrClosed
	}
	w := &Window{g: g, turn: semaphore.NewWeighted(1), n: bytes, words: (bytes + 63) &^ 63}
	rows := max(g.Size(), g.job.settings.MaxSize)
	w.near = make([]atomic.Uintptr, rows)
	p := g.job.proxy
	var err error
	if w.region, err = p.AllocWritable(w.words + rows*rowSize); err == nil {
		w.own = w.region.Bytes()[:bytes:bytes]
		if w.data, err = p.Expose(w.region, 0, bytes, mem.Read|mem.Write); err == nil {
			w.tag = holder{g.job.session.Self.Incarnation, w.data.Generation}.tag()
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
		w.exchange(ctx, false) // tells the other ranks that this one has no part
	}
	if err != nil { // ctx may have ended, and nobody can close it later
		cctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 10*time.Second)
		defer cancel()
		return nil, errors.Join(err, w.close(cctx))
	}
	return w, nil
}

// exchange sends this rank's part, if it has one, to all ranks and receives theirs.
func (w *Window) exchange(ctx context.Context, has bool) error {
	g := w.g
	mine := make([]int64, saysWords)
	mine[saysIncarnation], mine[saysBytes] = int64(g.job.session.Self.Incarnation), int64(w.n)
	mine[saysNumber] = int64(w.number)
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
	all, err := g.exchange(ctx, mine, flight.Call(flight.Window), 0)
	if err != nil {
		return err
	}
	parts := make([]part, len(all)/saysWords)
	var number, drawn uint64 // the window that is refreshed, or else that is made
	var of int               // the rank that said number
	for slot := range parts {
		its := uint64(all[slot*saysWords+saysNumber])
		switch {
		case its == 0: // also of an empty slot
		case number == 0:
			number, of = its, slot
		case its != number:
			return &ArgumentError{Call: "window", Arg: "the window",
				Got:  fmt.Sprintf("another one at rank %d than at rank %d", slot, of),
				Want: "the same at all ranks: those with several windows refresh them in one order"}
		}
	}
	for slot := range parts {
		said := all[slot*saysWords : (slot+1)*saysWords]
		if said[saysIncarnation] == 0 { // the slot is empty
			continue
		}
		switch {
		case said[saysBytes] != int64(w.n):
			return &ArgumentError{Call: "window", Arg: "the size", Got: fmt.Sprintf("%d bytes", w.n),
				Want: fmt.Sprintf("that of rank %d, which is %d", slot, said[saysBytes])}
		case said[saysStatus] == 0:
			return fmt.Errorf("rank %d has no memory for a window of %d bytes", slot, said[saysBytes])
		}
		if err := parts[slot].decode(said); err != nil {
			return &RankError{Rank: slot, Call: "window", Reporter: g.rank, in: g.in, Err: err}
		}
		if drawn == 0 { // by the lowest rank: no other rank has its incarnation
			drawn = parts[slot].incarnation + parts[slot].data.Generation
		}
	}
	w.number = cmp.Or(number, drawn)
	g.job.proxy.Lock()
	defer g.job.proxy.Unlock()
	w.adopt(parts)
	g.job.proxy.Wake() // goroutines may be waiting for signals of a part that is gone
	return nil
}

// decode reads a rank's fields.
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
	p.failure = new(failure)
	err := errors.Join(p.data.UnmarshalBinary(b[:first]), p.signals.UnmarshalBinary(b[first:first+second]))
	p.tag = p.holder().tag()
	return err
}

// adopt takes over the parts that an exchange found. Parts that were known stay as they are, and
// the mapping of a lost rank's part until its slot has another rank. With the proxy's lock.
func (w *Window) adopt(parts []part) {
	for slot := range w.parts {
		old := &w.parts[slot]
		empty := slot < len(parts) && parts[slot].incarnation == 0
		if old.incarnation == 0 && old.mapping == nil {
			continue
		}
		if !empty && slot < len(parts) && old.holder() == parts[slot].holder() {
			if w.reap(old); old.failure.told {
				old.failure = new(failure) // a Flush under way has the other one
			}
			parts[slot] = *old
			continue
		}
		w.near[slot].Store(0)
		if w.lost(slot, old.holder()) { // it may be noticed here before MarkDead is called
			w.g.job.proxy.Revoke(w.g.jobRank(slot), old.incarnation)
		}
		if empty {
			parts[slot].mapping, old.mapping = old.mapping, nil
		}
		w.drop(old)
	}
	w.parts = parts
}

// drop releases this rank's hold on a part. With the proxy's lock.
func (w *Window) drop(p *part) {
	for _, t := range p.pending {
		w.g.job.proxy.CancelTransfer(t.Transfer)
		t.end()
	}
	if p.mapping != nil {
		p.mapping.Release()
	}
	*p = part{}
}

// Refresh adds the parts of ranks that have come in to the group since NewWindow or the last
// Refresh, and drops those of lost ranks. It is a collective of all active ranks, in which the
// ranks that came in call NewWindow instead. A group with several windows refreshes them in one
// order at all ranks: else all get an *ArgumentError. Parts of ranks that stayed do not change. The
// counters between this rank and a new part begin at 0: one of a new incarnation, or one that a
// rank has made by another NewWindow.
//
// Refresh also ends what failed puts and signals to a rank cause, if a Flush or a signal to it has
// returned an error since the last of them failed. If none has, the next one returns the error, and
// only a later Refresh ends it: call Flush for each rank before Refresh.
//
// After Refresh, this rank places nothing more that a lost rank has put to its part. If the process
// of that rank lives on, as one that was evicted or stopped may, two ways to the part are left. A
// put over shared memory that has begun goes on when its process does, with at most 1 MiB and its
// signal. Data that an RDMA device moves by itself may be written while the link to the rank stays
// for its last messages, which is at most a second after its loss. Close returns when both are
// over: a program that cannot bear them closes the window and makes another one.
func (w *Window) Refresh(ctx context.Context) error {
	done, err := w.await(ctx, "refreshing")
	if err != nil {
		return err
	}
	defer done()
	if err := w.open(); err != nil {
		return err
	}
	return w.exchange(ctx, true)
}

// await waits for the turn of a Refresh or Close, which done ends.
func (w *Window) await(ctx context.Context, what string) (done func(), err error) {
	if ctx == nil {
		return nil, noContext(what + " a window")
	}
	done = func() { w.turn.Release(1) }
	if w.turn.TryAcquire(1) {
		return done, nil
	}
	began := time.Now()
	ctx, cancel := limited(ctx, w.g.job.timeout)
	defer cancel()
	if err := w.turn.Acquire(ctx, 1); err != nil {
		return nil, w.late(what+" a window, which waited for another goroutine's Refresh or Close,", began, err)
	}
	return done, nil
}

// late returns the error of a call that has ended with err because its context has.
func (w *Window) late(what string, began time.Time, err error) error {
	return &TimeoutError{Call: what, After: time.Since(began), Reporter: w.g.rank, in: w.g.in, Err: expiry(err)}
}

// Bytes returns this rank's part, nil after Close was called. Other ranks may write to it at any
// time; data that was put before a signal is complete when WaitSignal has returned. It must not be
// used after Close.
func (w *Window) Bytes() []byte {
	if w.closed.Load() {
		return nil
	}
	return w.own
}

// Size returns the size of each part in bytes.
func (w *Window) Size() int { return w.n }

// call is an operation on the window in progress.
type call struct {
	w    *Window
	name string
	wait *p2p.Wait
}

// pollEvery is how many short operations are between two polls of the links; a longer one counts
// for one more each 16 KiB. Operations that end at once poll none, and peers may wait for this rank
// to place puts and answer gets.
const pollEvery = 256

// reach begins an operation on n bytes at offset of rank's part. If it succeeds, it holds the
// proxy's lock.
func (w *Window) reach(name string, rank, offset, n int) (*part, error) {
	w.g.job.proxy.Lock()
	if w.unpolled += 1 + n>>14; w.unpolled >= pollEvery {
		w.unpolled = 0
		w.g.job.proxy.Unlock()
		w.g.job.proxy.Idle()
		w.g.job.proxy.Lock()
	}
	p, err := w.part(name, rank)
	if err == nil && (offset < 0 || n > w.n || offset > w.n-n) {
		err = &ArgumentError{Call: name, Arg: "the range", Got: fmt.Sprintf("%d bytes at offset %d", n, offset),
			Want: fmt.Sprintf("one within the %d bytes of a part", w.n)}
	}
	if err != nil {
		w.g.job.proxy.Unlock()
		return nil, err
	}
	return p, nil
}

// begin prepares an operation that may have to wait. With the proxy's lock, which leave releases.
func (w *Window) begin(ctx context.Context, name string) call {
	c := call{w: w, name: name}
	if k := len(w.waits); k > 0 {
		c.wait, w.waits = w.waits[k-1], w.waits[:k-1]
	} else {
		c.wait = new(p2p.Wait)
	}
	c.wait.Reset(ctx, w.g.job.timeout, false)
	return c
}

// enter combines reach and begin.
func (w *Window) enter(ctx context.Context, name string, rank, offset, n int) (c call, p *part, err error) {
	if ctx == nil {
		return c, nil, noContext(name)
	}
	if p, err = w.reach(name, rank, offset, n); err == nil {
		c = w.begin(ctx, name)
	}
	return c, p, err
}

// part returns rank's part, or why it cannot be used. With the proxy's lock.
func (w *Window) part(name string, rank int) (*part, error) {
	g := w.g
	switch {
	case g.closed.Load():
		return nil, ErrClosed
	case w.closed.Load():
		return nil, windowClosed{}
	case g.aborted != nil:
		return nil, g.aborted
	case rank < 0 || rank >= g.v.Size:
		return nil, &ArgumentError{Call: name, Arg: "the rank", Got: strconv.Itoa(rank),
			Want: fmt.Sprintf("a rank, 0 to %d", g.v.Size-1)}
	}
	lost := func(why error) (*part, error) {
		g.job.proxy.Look() // the rank may have aborted the group before it left
		if err := g.heard(); err != nil {
			return nil, err
		}
		return nil, g.rankError(rank, g.rank, name, why)
	}
	if rank >= len(w.parts) || w.parts[rank].incarnation == 0 {
		return lost(errors.New("it has no part of the window: see Window.Refresh"))
	}
	p := &w.parts[rank]
	if w.lost(rank, p.holder()) {
		why := errors.New("its part of the window went with it")
		if text := g.job.why(g.jobRank(rank)); text != "" {
			why = fmt.Errorf("%s: %w", text, why)
		}
		return lost(why)
	}
	return p, nil
}

// lost reports whether the job's view has lost the incarnation of rank that has this part. With the
// proxy's lock.
func (w *Window) lost(rank int, of holder) bool {
	return w.g.job.roster != nil && !w.g.job.view().Has(w.g.jobRank(rank), of.incarnation)
}

// leave ends an operation, and returns the caller's error for err.
func (c *call) leave(rank int, err error) error {
	w := c.w
	if err != nil {
		err = c.explain(rank, err)
	}
	w.waits = append(w.waits, c.wait)
	w.g.job.proxy.Unlock()
	return err
}

// explain returns the typed error for err.
func (c *call) explain(rank int, err error) error {
	g := c.w.g
	var peer *p2p.PeerError
	heard := g.heard()
	switch {
	case c.w.closed.Load():
		return c.w.open()
	case heard != nil:
		return heard
	case errors.As(err, &peer):
		return g.rankError(g.slotOf(peer.Rank), g.rank, c.name, peer.Err)
	case errors.Is(err, p2p.ErrRevoked):
		return g.rankError(rank, g.rank, c.name,
			fmt.Errorf("it has closed the window, or it is another incarnation of it: %w", err))
	case errors.Is(err, p2p.ErrClosed) || g.closed.Load():
		return ErrClosed
	case errors.Is(err, p2p.ErrCancelled):
		if _, lost := c.w.part(c.name, rank); lost != nil {
			return lost
		}
		return fmt.Errorf("%s: a call that could not wait longer gave up a put to rank %d; refresh the window, or "+
			"make it again (torch: register the tensor again), and repeat the put: %w", c.name, rank, err)
	case errors.Is(err, p2p.ErrTimeout), errors.Is(err, context.DeadlineExceeded), errors.Is(err, context.Canceled):
		e := &TimeoutError{Call: c.name, After: c.wait.Waited(), Reporter: g.rank, in: g.in, Err: expiry(err),
			Missing: []Seen{{Rank: rank, What: "nothing yet"}}}
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

// reap removes the puts that are done from p's list. With the proxy's lock.
func (w *Window) reap(p *part) {
	open := p.pending[:0]
	for _, t := range p.pending {
		if !t.Done() {
			open = append(open, t)
			continue
		}
		if err := t.Err(); err != nil {
			p.failure.add(err)
		}
		if p.flushes == 0 { // else a Flush may still read it
			w.spare = append(w.spare, t.Transfer)
		}
		t.end()
	}
	clear(p.pending[len(open):])
	p.pending = open
}

// Put begins to copy src to offset of rank's part. It returns when the transfer has begun, which
// may have to wait for earlier ones. src must not change before Flush has returned, or Put has
// returned an error. Flush reports the outcome. Puts are not ordered with each other.
func (w *Window) Put(ctx context.Context, rank, offset int, src []byte) error {
	return w.put(ctx, "put", rank, offset, src, nil, -1, false)
}

// PutSignal is a Put that adds one to this rank's counter at rank (0 to WindowCounters-1) after src
// is placed. A target that sees the signal sees the data of this put and of earlier ones with the
// same counter, but not necessarily that of others. After a failed put it fails as Signal does.
func (w *Window) PutSignal(ctx context.Context, rank, offset int, src []byte, counter int) error {
	if counter < 0 {
		return badCounter("put", counter)
	}
	return w.put(ctx, "put", rank, offset, src, nil, counter, false)
}

// Signal adds one to this rank's counter at rank (0 to WindowCounters-1), after the data of all
// puts to rank that this rank began before: a target that sees the signal sees that data. It
// returns when the signal has begun. Flush reports the outcome. If one of those puts fails or is
// given up, the signal is not sent, and nor are later ones of any goroutine, which return an error,
// until Refresh. The next signal that is sent counts for those that were begun and not sent, too.
func (w *Window) Signal(ctx context.Context, rank, counter int) error {
	return w.put(ctx, "signal", rank, 0, nil, nil, counter, true)
}

// put implements Put, PutSignal and Signal. A negative counter means none. v is the visit that src
// belongs to, or nil; after an error it is the caller's.
func (w *Window) put(ctx context.Context, name string, rank, offset int, src []byte, v *visit, counter int,
	strong bool) error {
	if counter >= WindowCounters || strong && counter < 0 {
		return badCounter(name, counter)
	}
	if ctx == nil {
		return noContext(name)
	}
	// To take the lines first is quicker than to let the copy's stores take them: they take all at
	// once, and meanwhile the checks are made. The word of the signal is not taken here: its target
	// polls it, and would take it back.
	if uint(rank) < uint(len(w.near)) {
		if at := w.near[rank].Load(); at != 0 {
			kernels.AcquireOut(at+uintptr(offset), len(src))
		}
	}
	p, err := w.reach(name, rank, offset, len(src))
	if err != nil {
		return err
	}
	var signal *p2p.Signal
	if counter >= 0 {
		if err := w.unplaced(p); err != nil {
			c := w.begin(ctx, name)
			return c.leave(rank, err)
		}
		if p.sent[counter] == maxCount {
			w.g.job.proxy.Unlock()
			return fmt.Errorf("counter %d at rank %d has been signalled %d times, as often as it can be", counter, rank,
				uint64(maxCount))
		}
		signal = &p.signal // and not a copy: to copy what was just stored in words takes longer than the put
		signal.At, signal.Offset = &p.signals, uint64(w.g.rank*rowSize+counter*mem.WordSize)
		signal.Value, signal.Strong = w.tag<<countBits|p.sent[counter]+1, strong
	}
	placed := true
	switch {
	case rank == w.g.rank:
		if p, err = w.copyOwn(w.own[offset:], src, p); err != nil {
			c := w.begin(ctx, name)
			return c.leave(rank, err)
		}
		if counter >= 0 {
			// p.signal may be that of another goroutine by now.
			w.word(rank, counter).Store(w.tag<<countBits | p.sent[counter] + 1)
			w.g.job.proxy.Wake() // another goroutine may be waiting for the word
		}
	case len(src) > 0 || counter >= 0:
		placed = w.g.msgs.PutNow(rank, src, &p.data, uint64(offset), signal)
		if len(src) > 0 && (!placed || w.near[rank].Load() == 0) {
			w.near[rank].Store(w.g.msgs.Near(rank, &p.data))
		}
	}
	if placed {
		if counter >= 0 {
			p.sent[counter]++
		}
		w.g.job.proxy.Unlock()
		pendingPut{v: v}.end()
		return nil
	}
	return w.putLater(ctx, name, rank, offset, src, v, counter, p)
}

// putLater is put for a transfer that does not end at once. With the proxy's lock, which it
// releases.
func (w *Window) putLater(ctx context.Context, name string, rank, offset int, src []byte, v *visit, counter int,
	p *part) error {
	c := w.begin(ctx, name)
	w.reap(p)
	t, of, to := w.transfer(), p.holder(), p.data
	var s p2p.Signal
	var value func() (uint64, error)
	if counter >= 0 {
		signals := p.signals
		s, value = p.signal, func() (uint64, error) { // the lock may have been released since
			now := w.again(rank, of)
			if now == nil {
				return 0, &p2p.PeerError{Rank: w.g.jobRank(rank), Err: p2p.ErrPeerGone}
			}
			return w.tag<<countBits | now.sent[counter] + 1, w.unplaced(now)
		}
		s.At = &signals
	}
	err := w.g.msgs.Put(c.wait, t, rank, mem.Host(src, mem.Anywhere), &to, uint64(offset), s, value)
	if err != nil {
		w.spare = append(w.spare, t)
		return c.leave(rank, err)
	}
	if p = w.again(rank, of); p == nil {
		w.g.job.proxy.CancelTransfer(t)
		return c.leave(rank, &p2p.PeerError{Rank: w.g.jobRank(rank), Err: p2p.ErrPeerGone})
	}
	if counter >= 0 {
		p.sent[counter]++
	}
	p.pending = append(p.pending, pendingPut{t, v, p.begun})
	p.begun++
	w.reap(p)
	return c.leave(rank, nil)
}

func badCounter(name string, counter int) error {
	return &ArgumentError{Call: name, Arg: "the counter", Got: strconv.Itoa(counter),
		Want: fmt.Sprintf("a counter, 0 to %d", WindowCounters-1)}
}

// Flush returns when all puts and signals to rank that were begun before it have ended: their data
// is placed, and their sources may change. If ctx ends, Flush gives up those that have not ended;
// their sources may change then, too.
//
// After a put or a signal to rank has failed or was given up, whichever goroutine had begun it,
// every Flush to rank returns the error of the first one, until a Refresh after a Flush or a signal
// has returned it: see Refresh. A Flush that had begun before that Refresh returns it, too.
func (w *Window) Flush(ctx context.Context, rank int) error {
	if ctx == nil {
		return noContext("flush")
	}
	p, err := w.reach("flush", rank, 0, 0)
	if err != nil {
		w.giveUp(rank)
		return err
	}
	if len(p.pending) == 0 && p.failure.err == nil {
		w.g.job.proxy.Unlock()
		return nil
	}
	c := w.begin(ctx, "flush")
	of, until, before := p.holder(), p.begun, p.failure
	p.flushes++
	for err == nil && len(p.pending) > 0 && p.pending[0].number < until {
		t := p.pending[0].Transfer
		e := w.g.msgs.WaitTransfer(c.wait, t)
		if errors.Is(t.Err(), p2p.ErrCancelled) && !errors.Is(e, p2p.ErrCancelled) {
			err = e // the wait has ended, and not because another goroutine gave up t
		}
		if p = w.again(rank, of); p == nil {
			return c.leave(rank, &p2p.PeerError{Rank: w.g.jobRank(rank), Err: p2p.ErrPeerGone})
		}
		if err != nil {
			w.cancel(p, until)
		}
		w.reap(p)
	}
	p.flushes--
	if err = cmp.Or(err, before.err, p.failure.err); err != nil {
		p.failure.told = true
	}
	return c.leave(rank, err)
}

// cancel ends the puts to p with numbers below until. With the proxy's lock.
func (w *Window) cancel(p *part, until uint64) {
	for _, t := range p.pending {
		if t.number < until {
			w.g.job.proxy.CancelTransfer(t.Transfer)
		}
	}
}

// again returns rank's part after the lock was released, or nil if the slot has another part or the
// window is closed; all transfers have ended then. With the proxy's lock.
func (w *Window) again(rank int, of holder) *part {
	if w.closed.Load() || rank >= len(w.parts) || w.parts[rank].holder() != of {
		return nil
	}
	return &w.parts[rank]
}

// giveUp ends the transfers to a part that can no longer be reached.
func (w *Window) giveUp(rank int) {
	p := w.g.job.proxy
	p.Lock()
	defer p.Unlock()
	if !w.closed.Load() && rank >= 0 && rank < len(w.parts) {
		w.cancel(&w.parts[rank], w.parts[rank].begun)
		w.reap(&w.parts[rank])
	}
}

// copyOwn copies src to dst, one of which is in this rank's part p, and returns where p is then.
// They may overlap. After each piece it may release the proxy's lock for a while. With that lock.
func (w *Window) copyOwn(dst, src []byte, p *part) (*part, error) {
	const piece = 256 << 10
	n, of := min(len(dst), len(src)), p.holder()
	to, from := uintptr(unsafe.Pointer(unsafe.SliceData(dst))), uintptr(unsafe.Pointer(unsafe.SliceData(src)))
	backward := to > from && to-from < uintptr(n) // dst starts inside src
	for done := 0; done < n; done += piece {
		i, k := done, min(piece, n-done)
		if backward {
			i = n - done - k
		}
		if !w.g.job.proxy.Moved(copy(dst[i:i+k], src[i:])) {
			continue
		}
		if p = w.again(w.g.rank, of); p == nil {
			return nil, &p2p.PeerError{Rank: w.g.jobRank(w.g.rank), Err: p2p.ErrPeerGone}
		}
	}
	return p, nil
}

// Get copies from offset of rank's part to dst, and returns when the data is there. After an error
// dst may be partly overwritten.
func (w *Window) Get(ctx context.Context, rank, offset int, dst []byte) error {
	c, p, err := w.enter(ctx, "get", rank, offset, len(dst))
	if err != nil {
		return err
	}
	switch {
	case rank == w.g.rank:
		_, err = w.copyOwn(dst, w.own[offset:], p)
	case len(dst) > 0:
		t := w.transfer()
		from := p.data // p may be replaced meanwhile
		if err = w.g.msgs.Get(c.wait, t, rank, mem.Host(dst, mem.Anywhere), &from, uint64(offset)); err == nil {
			err = w.g.msgs.WaitTransfer(c.wait, t)
		}
		w.spare = append(w.spare, t)
	}
	return c.leave(rank, err)
}

// WaitSignal returns when rank's counter at this rank (0 to WindowCounters-1) has reached n, that
// is, when rank has signalled n times since both ranks have their parts. Data that rank put before,
// as Signal and PutSignal say, is then in Bytes. This holds until Refresh if rank has been lost
// since. It fails with a *RankError if rank is lost, or Refresh finds another part at rank, while
// it waits. n is at most 2^40-1, as often as a rank signals.
func (w *Window) WaitSignal(ctx context.Context, rank, counter int, n uint64) error {
	const name = "wait for a signal"
	switch {
	case ctx == nil:
		return noContext(name)
	case counter < 0 || counter >= WindowCounters:
		return badCounter(name, counter)
	case n > maxCount:
		return &ArgumentError{Call: name, Arg: "the number of signals", Got: strconv.FormatUint(n, 10),
			Want: fmt.Sprintf("at most %d", uint64(maxCount))}
	}
	p, err := w.reach(name, rank, 0, 0)
	if err != nil {
		return w.arrived(err, rank, counter, n)
	}
	word, tag := w.word(rank, counter), p.tag
	w.looks++
	w.g.job.proxy.Unlock()
	reached := func(v uint64) bool { return w.closed.Load() || signalled(v, tag, n) }
	found := w.g.job.proxy.PollWord(word, reached)
	if w.looked.Add(1); found {
		return w.open()
	}
	c, p, err := w.enter(ctx, name, rank, 0, 0)
	if err != nil {
		return w.arrived(err, rank, counter, n)
	}
	tag = p.tag // of another part, perhaps
	w.looks++
	if rank == w.g.rank {
		for err == nil && !reached(word.Load()) {
			if err = w.g.msgs.Err(); err == nil {
				err = w.g.job.proxy.Progress(c.wait)
			}
		}
	} else {
		// The loss of the rank may be over when this wait sees its peer again: another incarnation,
		// which does not signal with this tag, is linked or expected then.
		of := p.holder()
		var v uint64
		v, err = w.g.msgs.WaitWord(c.wait, rank, word, func(v uint64) bool {
			return reached(v) || w.lost(rank, of) || w.again(rank, of) == nil
		})
		if err == nil && !reached(v) {
			if _, err = w.part(name, rank); err == nil {
				err = &p2p.PeerError{Rank: w.g.jobRank(rank), Err: p2p.ErrPeerGone}
			}
		}
	}
	w.looked.Add(1)
	return c.leave(rank, cmp.Or(w.open(), err))
}

// open returns an error that wraps ErrClosed if the window is closed. It says whether the group is.
func (w *Window) open() error {
	switch {
	case !w.closed.Load():
		return nil
	case w.g.closed.Load():
		return ErrClosed
	}
	return windowClosed{}
}

// arrived returns err, with which reach has failed, or nil if rank is lost and had signalled n
// times.
func (w *Window) arrived(err error, rank, counter int, n uint64) error {
	w.g.job.proxy.Lock()
	defer w.g.job.proxy.Unlock()
	if errors.As(err, new(*RankError)) && rank < len(w.parts) && w.parts[rank].incarnation != 0 &&
		signalled(w.word(rank, counter).Load(), w.parts[rank].tag, n) {
		return nil
	}
	return err
}

// word returns the word that rank signals to for counter.
func (w *Window) word(rank, counter int) *atomic.Uint64 {
	return w.region.Word(w.words + rank*rowSize + counter*mem.WordSize)
}

// signalled reports whether word says that the rank with tag has signalled n times.
func signalled(word, tag, n uint64) bool {
	return n == 0 || word>>countBits == tag && word&maxCount >= n
}

// Map returns the part of a rank on this machine as read-only memory of this process: a write
// faults. Its own part it returns as Bytes does. The mapping stays until Close, or until Refresh
// has found another part at rank; after a rank has died, its part can still be read. For
// ranks that cannot be mapped Map fails with an error that wraps errors.ErrUnsupported. If this
// process lacks a descriptor or memory, Map fails with an error that is no *RankError, and may be
// called again.
func (w *Window) Map(ctx context.Context, rank int) ([]byte, error) {
	c, p, err := w.enter(ctx, "map", rank, 0, 0)
	if err != nil {
		return nil, err
	}
	var b []byte
	switch {
	case rank == w.g.rank:
		b = w.own
	case p.mapping != nil:
		b = p.mapping.Mem[:w.n:w.n]
	default:
		var m *p2p.Mapping
		id, of := p.data.ID, p.holder()
		if m, err = w.g.msgs.Map(c.wait, rank, id); err != nil {
			break
		}
		switch p = w.again(rank, of); {
		case p == nil:
			m.Release()
			err = &p2p.PeerError{Rank: w.g.jobRank(rank), Err: p2p.ErrPeerGone}
		case len(m.Mem) < w.n:
			m.Release()
			err = fmt.Errorf("%w: rank %d has %d bytes for a part of %d", p2p.ErrProtocol, rank, len(m.Mem), w.n)
		case p.mapping != nil: // another goroutine mapped it first
			m.Release()
			b = p.mapping.Mem[:w.n:w.n]
		default:
			p.mapping = m
			b = m.Mem[:w.n:w.n]
		}
	}
	return b, c.leave(rank, err)
}

// Close releases this rank's part, and its mappings of other parts. It is not a collective: other
// ranks get a *RankError if they use the part afterwards, so that a program usually calls Barrier
// first. Puts of this rank that have not ended are given up. Other goroutines may be in operations
// on the window: those that wait for signals or in Flush end with an error that wraps ErrClosed,
// and so do later ones. Bytes must not be used afterwards.
//
// Close waits until no peer is writing to the part. If ctx or Config.Timeout ends before that, the
// memory stays, and Close may be called again. Close works after the group's Close, and may be
// called more than once.
func (w *Window) Close(ctx context.Context) error {
	if ctx == nil {
		return noContext("closing a window")
	}
	ctx, cancel := limited(ctx, w.g.job.timeout)
	defer cancel()
	return w.close(ctx)
}

// close is Close without Config.Timeout.
func (w *Window) close(ctx context.Context) error {
	began := time.Now()
	done, err := w.await(ctx, "closing")
	if err != nil {
		return err
	}
	defer done()
	p := w.g.job.proxy
	p.Lock()
	w.closed.Store(true)
	for i := range w.parts {
		w.drop(&w.parts[i])
	}
	w.parts = nil
	p.Wake()
	for w.looked.Load() < w.looks { // they see that it is closed
		p.Unlock()
		runtime.Gosched()
		p.Lock()
	}
	p.Unlock()
	switch err = w.free(ctx); {
	case err == nil:
		return nil
	case errors.Is(err, context.DeadlineExceeded), errors.Is(err, context.Canceled):
		return fmt.Errorf("%w: %w", w.late("closing a window", began, err), err)
	}
	return fmt.Errorf("closing a window: %w", err)
}

// free withdraws the part and frees its memory.
func (w *Window) free(ctx context.Context) error {
	p := w.g.job.proxy
	for _, x := range []**mem.Remote{&w.data, &w.signals} {
		if *x != nil {
			if err := p.Withdraw(ctx, *x); err != nil {
				return err
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
