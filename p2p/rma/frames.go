package rma

import (
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"sync/atomic"
	"unsafe"

	"tutti/mem"
	"tutti/p2p"
)

// Service marks the frames of this package in p2p.Header.Service.
const Service = 1

// Kinds of frames, in p2p.Header.Kind. Chan is always the slot of the operation at its initiator.
// Call and Seq are the region and its generation, Off the position in the exposed range.
const (
	// Data to be placed. flagSignal: the payload begins with a signal record, which is written when
	// the data is placed.
	framePut    = iota + 1
	frameSignal // a word to write: Count is its value
	frameGet    // a request for Count bytes
	frameData   // data of a get. Off: its position in the operation
	frameDone   // payload: records of operations that have ended, doneSize bytes each: slot, status
	frameCancel // the initiator cancels the operation; it ends with statusCancelled
	frameEnd
)

// flagLast ends an operation: frameDone answers. flagSignal: see framePut.
const (
	flagLast = 1 << iota
	flagSignal
)

// Results of an operation at the target.
const (
	statusOK = iota
	statusRevoked
	statusRights
	statusBounds
	statusCancelled
	statusEnd
	statusSignal = 1 << 7 // the data was placed, the signal was refused
)

var statusErrors = [statusEnd]error{nil, p2p.ErrRevoked, p2p.ErrRights, p2p.ErrBounds, p2p.ErrCancelled}

func statusOf(err error) uint8 {
	for s, e := range statusErrors {
		if errors.Is(err, e) {
			return uint8(s)
		}
	}
	return statusRevoked
}

const (
	doneSize   = 8
	recordSize = 32 // a signal: region, generation, offset, value
	// Puts up to this size are sent together with their signal, in one frame.
	together = 4 << 10
	// How often the engine yields when an ordinary frame found no room.
	stepBack = 64
	slots    = p2p.MaxOutstanding
)

// Frames implements p2p.OneSided over a link: puts and gets are sent as frames between the link's
// own, and the Frames at the other end places them. It replaces the link for its user, under the
// rules of Link and OneSided. Both ends of the link must be wrapped.
//
// Region, generation, rights and bounds of a peer's frames are checked before a byte is placed. If
// a check fails, the operation ends with the reason. A malformed frame ends the link.
//
// Reading never waits for writing: data is placed at once or dropped, and the slots bound the
// answers. So both directions may be full of puts without a deadlock. After an ordinary frame found
// no room, the engine yields to it.
type Frames struct {
	link    p2p.Link
	mover   Mover // the link, if it is one
	table   *Table
	revoked bool // the peer reaches no memory any more
	wake    func()

	closed atomic.Bool
	broken atomic.Pointer[failure] // the error that Recv or Fill of the link returned

	// Operations of this side.
	ops     [slots]*frameOp // by slot, nil: free
	queue   []*frameOp      // with frames to be sent, oldest first
	spare   []*frameOp
	turn    int
	number  uint64 // of operations begun
	flushes int    // among ops
	done    []ending
	busy    int // ops and done
	bars    int // of these, puts that will not be placed
	scratch []byte
	unsent  bool // the link has unsent data
	blocked bool // the engine's latest frame found no room
	yield   int  // how often to yield to an ordinary frame
	moving  int  // operations whose data the mover has
	stalled int  // how many operations all had to wait for moves when pump looked last

	// Operations of the peer.
	status  [slots]uint8 // of puts that have begun
	serving []serve
	answers []answer
	news    uint64 // counts written signals
	heard   uint64 // news when Arm last read it

	// The frame whose payload is being read.
	in struct {
		active bool
		h      p2p.Header
		entry  *Entry
		off    uint64   // destination of the next byte: in the entry, or in the local memory of a get
		get    *frameOp // whose data it is
		left   int      // bytes that have not arrived
		head   int      // bytes of record that have arrived
		record [slots * doneSize]byte
		want   int // bytes of the payload that belong to record
	}
	discard [4 << 10]byte
}

type failure struct{ err error }

type opKind uint8

const (
	opPut opKind = iota
	opGet
	opFlush
)

func (k opKind) String() string { return [...]string{"put", "get", "flush"}[k] }

type frameOp struct {
	id        uint64
	number    uint64
	slot      uint32
	kind      opKind
	strong    bool
	waiting   bool  // everything is sent
	cancelled error // why it ends before its time; nil: it does not
	begun     bool  // something is sent
	told      bool  // frameCancel was sent
	moving    bool  // the mover has move
	framed    bool  // the mover is not asked, or not again
	unplaced  bool  // a put that will not be placed
	move      Move
	local     mem.Memory
	to        mem.Remote // without keys
	off       uint64
	moved     int // bytes sent of a put, received of a get
	signal    p2p.Signal
	word      mem.Remote
}

// serve is a get by the peer.
type serve struct {
	slot  uint32
	entry *Entry
	off   uint64
	n     uint64
	sent  uint64
}

type answer struct {
	slot   uint32
	status uint8
}

// NewFrames wraps link, whose frames have Service 0. table is this rank's exposed memory. wake is
// called when an operation has ended or a signal was written, and must not block.
func NewFrames(link p2p.Link, table *Table, wake func()) *Frames {
	mover, _ := link.(Mover)
	return &Frames{link: link, mover: mover, table: table, wake: wake}
}

// Send implements p2p.Link.
func (f *Frames) Send(h *p2p.Header, payload []byte) (bool, error) {
	if b := f.broken.Load(); b != nil {
		return false, b.err
	}
	ok, err := f.link.Send(h, payload)
	if f.yield = 0; !ok {
		f.yield = stepBack
	}
	return ok, err
}

// Flush implements p2p.Link.
func (f *Frames) Flush() (bool, error) {
	ok, err := f.link.Flush()
	if ok {
		f.unsent = false
	}
	return ok, err
}

// Fill implements p2p.Link.
func (f *Frames) Fill(dst []byte) (int, error) { return f.link.Fill(dst) }

// Release implements p2p.Link.
func (f *Frames) Release() { f.link.Release() }

// MaxFrame implements p2p.Link.
func (f *Frames) MaxFrame() int { return f.link.MaxFrame() }

// Disarm implements p2p.Link.
func (f *Frames) Disarm() { f.link.Disarm() }

// Err implements p2p.Link.
func (f *Frames) Err() error {
	if b := f.broken.Load(); b != nil {
		return b.err
	}
	return f.link.Err()
}

// Close implements p2p.Link.
func (f *Frames) Close() error {
	f.closed.Store(true)
	return f.link.Close()
}

// Arm implements p2p.Link.
func (f *Frames) Arm() bool {
	if len(f.done) > 0 || f.pending() && !f.blocked && !f.unsent && !f.waits() {
		return true
	}
	if f.news != f.heard { // a waiter has to check its word again
		f.heard = f.news
		return true
	}
	return f.link.Arm()
}

// pending reports whether there is anything to send.
func (f *Frames) pending() bool { return len(f.queue)+len(f.serving)+len(f.answers) > 0 }

// waits reports whether everything that is to be sent waits for moves.
func (f *Frames) waits() bool { return len(f.answers) == 0 && len(f.queue)+len(f.serving) == f.stalled }

// Recv implements p2p.Link. It handles the frames of this service, up to a share of them, and sends
// pending frames.
func (f *Frames) Recv() (*p2p.Header, []byte, error) {
	for taken := 0; taken < share; {
		if f.in.active {
			n, err := f.fill()
			if err != nil {
				return nil, nil, f.fail(err)
			}
			if taken += n; f.in.active {
				break
			}
			continue
		}
		h, payload, err := f.link.Recv()
		if err != nil {
			return nil, nil, f.fail(err)
		}
		if h == nil {
			break
		}
		switch h.Service {
		case 0:
			if f.pending() { // so that a peer which sends without end does not block this end's frames
				f.pump()
			}
			return h, payload, nil
		case Service:
		default:
			return nil, nil, f.violated("frame of service %d", h.Service)
		}
		taken += 1<<10 + int(h.Len)
		if err := f.take(h, payload); err != nil {
			return nil, nil, f.fail(err)
		}
	}
	f.pump()
	return nil, nil, nil
}

func (f *Frames) fail(err error) error {
	if f.broken.CompareAndSwap(nil, &failure{err}) {
		f.wake()
	}
	return f.broken.Load().err
}

func (f *Frames) violated(format string, args ...any) error {
	return f.fail(fmt.Errorf("%w: %s", p2p.ErrProtocol, fmt.Sprintf(format, args...)))
}

// take begins a frame of the peer: it decides the destination of the payload.
func (f *Frames) take(h *p2p.Header, payload []byte) error {
	in := &f.in
	in.h, in.entry, in.get, in.left, in.head, in.want = *h, nil, nil, int(h.Len), 0, 0
	h = &in.h
	if h.Chan >= slots && h.Kind != frameDone {
		return f.violated("slot %d, there are %d", h.Chan, slots)
	}
	switch h.Kind {
	case framePut:
		if h.Flags&flagSignal != 0 {
			if in.want = recordSize; h.Len < recordSize {
				return f.violated("a put of %d bytes has no room for its signal", h.Len)
			}
		}
		f.admit(mem.Write, uint64(in.left-in.want))
		in.off = h.Off
	case frameSignal, frameGet, frameCancel:
		if h.Len != 0 {
			return f.violated("frame of kind %d with %d bytes", h.Kind, h.Len)
		}
	case frameData:
		o := f.ops[h.Chan]
		if o == nil || o.kind != opGet || !o.begun || h.Len == 0 || h.Off != uint64(o.moved) ||
			o.cancelled == nil && int64(h.Len) > int64(o.local.Len()-o.moved) {
			return f.violated("%d bytes at %d for slot %d, which asked for none of them", h.Len, h.Off, h.Chan)
		}
		in.get, in.off = o, h.Off
	case frameDone:
		if in.want = int(h.Len); h.Len%doneSize != 0 || h.Len == 0 || int(h.Len) > len(in.record) {
			return f.violated("%d bytes of records", h.Len)
		}
	default:
		return f.violated("frame of kind %d of this service", h.Kind)
	}
	in.active = true
	if payload != nil || h.Len == 0 {
		f.place(payload)
		return f.finish()
	}
	return nil
}

// Revoke implements p2p.Revoker. What a Mover moves into memory whose keys the peer has is not
// ended.
func (f *Frames) Revoke() { f.revoked = true }

// find returns the entry that the peer names, nil if there is none for it.
func (f *Frames) find(id, generation uint64) *Entry {
	if f.revoked {
		return nil
	}
	return f.table.Find(id, generation)
}

// admit looks up the destination of a put. Errors end the operation, not the link.
func (f *Frames) admit(rights mem.Rights, n uint64) {
	in := &f.in
	status := &f.status[in.h.Chan]
	if *status != statusOK { // the rest of a refused put
		return
	}
	e := f.find(in.h.Call, in.h.Seq)
	if e == nil {
		*status = statusRevoked
		return
	}
	if _, err := e.Enter(rights, in.h.Off, n); err != nil {
		*status = statusOf(err)
		return
	}
	e.Leave()
	in.entry = e
}

// place writes the next bytes of the payload to their destination.
func (f *Frames) place(b []byte) {
	in := &f.in
	if k := in.want - in.head; k > 0 {
		k = copy(in.record[in.head:in.want], b)
		in.head += k
		in.left -= k
		b = b[k:]
	}
	if len(b) == 0 {
		return
	}
	if dst := f.enter(len(b)); dst != nil {
		copy(dst, b)
		f.leave(len(dst))
	}
	in.left -= len(b)
}

// enter returns the destination of the next n bytes of the payload, nil if they are dropped; leave
// follows unless it is nil.
func (f *Frames) enter(n int) []byte {
	in := &f.in
	switch {
	case in.get != nil:
		if in.get.cancelled != nil {
			return nil
		}
		return in.get.local.Bytes()[in.off : in.off+uint64(n)]
	case in.entry != nil && f.revoked: // in the middle of its frame
		f.status[in.h.Chan], in.entry = statusRevoked, nil
	case in.entry != nil:
		m, err := in.entry.Enter(mem.Write, in.off, uint64(n))
		if err == nil {
			return m
		}
		f.status[in.h.Chan], in.entry = statusOf(err), nil // withdrawn meanwhile
	}
	return nil
}

// leave ends enter, with n bytes placed.
func (f *Frames) leave(n int) {
	in := &f.in
	in.off += uint64(n)
	if in.get == nil {
		in.entry.Leave()
	}
}

// fill reads more of a payload that arrives in pieces, and returns the number of bytes.
func (f *Frames) fill() (int, error) {
	in := &f.in
	var n int
	var err error
	if in.head < in.want {
		n, err = f.link.Fill(in.record[in.head:in.want])
		in.head += n
	} else if dst := f.enter(in.left); dst != nil {
		n, err = f.link.Fill(dst)
		f.leave(n)
	} else {
		n, err = f.link.Fill(f.discard[:min(len(f.discard), in.left)])
	}
	in.left -= n
	if err != nil || in.left > 0 {
		return n, err
	}
	return n, f.finish()
}

// finish ends the current frame, whose payload is complete.
func (f *Frames) finish() error {
	in := &f.in
	in.active = false
	f.link.Release()
	h := &in.h
	switch h.Kind {
	case framePut:
		if h.Flags&flagSignal != 0 && f.status[h.Chan] == statusOK {
			le := binary.LittleEndian
			f.signal(h.Chan, le.Uint64(in.record[0:]), le.Uint64(in.record[8:]), le.Uint64(in.record[16:]),
				le.Uint64(in.record[24:]))
		}
	case frameSignal:
		if f.status[h.Chan] == statusOK {
			f.signal(h.Chan, h.Call, h.Seq, h.Off, h.Count)
		}
	case frameGet:
		return f.serve(h)
	case frameData:
		if in.get != nil {
			in.get.moved += int(h.Len)
			in.get = nil
		}
		return nil
	case frameDone:
		for at := 0; at < in.want; at += doneSize {
			slot := binary.LittleEndian.Uint32(in.record[at:])
			status := binary.LittleEndian.Uint32(in.record[at+4:])
			if err := f.ended(slot, status); err != nil {
				return err
			}
		}
		return nil
	case frameCancel:
		if i := slices.IndexFunc(f.serving, func(s serve) bool { return s.slot == h.Chan }); i >= 0 {
			f.serving = slices.Delete(f.serving, i, i+1)
		}
		f.status[h.Chan] = statusOK
		return f.answer(h.Chan, statusCancelled)
	}
	in.entry = nil
	if h.Flags&flagLast != 0 {
		status := f.status[h.Chan]
		f.status[h.Chan] = statusOK
		return f.answer(h.Chan, status)
	}
	return nil
}

// signal writes a word for the peer.
func (f *Frames) signal(slot uint32, id, generation, off, value uint64) {
	e := f.find(id, generation)
	if e == nil {
		f.status[slot] = statusRevoked | statusSignal
		return
	}
	m, err := e.Enter(mem.Signal, off, mem.WordSize)
	if err != nil {
		f.status[slot] = statusOf(err) | statusSignal
		return
	}
	atomic.StoreUint64((*uint64)(unsafe.Pointer(unsafe.SliceData(m))), value)
	e.Leave()
	f.news++
	f.wake()
}

// serve begins a get by the peer.
func (f *Frames) serve(h *p2p.Header) error {
	if slices.ContainsFunc(f.serving, func(s serve) bool { return s.slot == h.Chan }) {
		return f.violated("a second get in slot %d", h.Chan)
	}
	e := f.find(h.Call, h.Seq)
	if e == nil {
		return f.answer(h.Chan, statusRevoked)
	}
	if _, err := e.Enter(mem.Read, h.Off, h.Count); err != nil {
		return f.answer(h.Chan, statusOf(err))
	}
	e.Leave()
	if h.Count == 0 {
		return f.answer(h.Chan, statusOK)
	}
	f.serving = append(f.serving, serve{slot: h.Chan, entry: e, off: h.Off, n: h.Count})
	return nil
}

// answer queues the result of the peer's operation. A peer has no more operations than slots, and
// each may be cancelled while its result is on the way.
func (f *Frames) answer(slot uint32, status uint8) error {
	if len(f.answers) >= 2*slots {
		return f.violated("more than %d operations that are not answered", slots)
	}
	f.answers = append(f.answers, answer{slot, status})
	return nil
}

// ended handles the result of an operation of this side.
func (f *Frames) ended(slot, status uint32) error {
	reason := status &^ statusSignal
	if slot >= slots || reason >= statusEnd {
		return f.violated("slot %d ended with status %d", slot, status)
	}
	o := f.ops[slot]
	switch {
	case o == nil || !o.begun || o.kind == opPut && !o.waiting:
		return f.violated("slot %d ended, in which nothing was to end", slot)
	case o.kind == opGet && status == statusOK && o.moved < o.local.Len() && o.cancelled == nil:
		return f.violated("slot %d ended before its last byte", slot)
	case (status == statusCancelled) && !o.told:
		return f.violated("slot %d was cancelled by the wrong side", slot)
	case o.told && status != statusCancelled: // it ended before the cancellation arrived; statusCancelled follows
		return nil
	}
	err := statusErrors[reason]
	if err != nil && o.cancelled == nil {
		f.bar(o)
	}
	switch {
	case o.cancelled != nil:
		err = o.cancelled
	case err != nil && status&statusSignal != 0:
		err = p2p.NewAccessError("signal", &o.word, o.signal.Offset, mem.WordSize, err)
	case err != nil:
		err = p2p.NewAccessError(o.kind.String(), &o.to, o.off, uint64(o.local.Len()), err)
	}
	f.unqueue(o) // it was cancelled, and the peer has yet to be told
	f.complete(o, err)
	return nil
}

// complete ends an operation of this side.
func (f *Frames) complete(o *frameOp, err error) {
	n := o.moved
	if o.kind == opPut && err != nil {
		n = 0
	}
	f.done = append(f.done, ending{p2p.Completion{ID: o.id, Bytes: n, Err: err}, o.unplaced, o.at()})
	if f.in.get == o { // drops the rest of the arriving frame
		f.in.get = nil
	}
	f.ops[o.slot] = nil
	kind := o.kind
	*o = frameOp{}
	f.spare = append(f.spare, o)
	if kind == opFlush {
		f.flushes--
	} else if f.flushes > 0 {
		f.settle()
	}
	f.wake()
}

// bar ends the operations whose signals are ordered after o, a put that will not be placed, and
// have not been sent.
func (f *Frames) bar(o *frameOp) {
	if o.kind != opPut {
		return
	}
	if !o.unplaced {
		o.unplaced = true
		f.bars++
	}
	for _, e := range slices.Clone(f.queue) {
		if e.number > o.number && e.word.ID != 0 && e.cancelled == nil && (e.strong || e.at() == o.at()) {
			f.cancel(e, p2p.ErrUnplaced)
		}
	}
}

// barred reports whether an earlier put that will not be placed, whose completion Poll has not
// returned, keeps the signal of o back.
func (f *Frames) barred(o *frameOp) bool {
	w := o.at()
	if f.bars == 0 {
		return false
	}
	return slices.ContainsFunc(f.ops[:], func(e *frameOp) bool {
		return e != nil && e.unplaced && (o.strong || e.at() == w)
	}) || slices.ContainsFunc(f.done, func(e ending) bool { return e.bars(w, o.strong) })
}

// at returns the word of o's signal.
func (o *frameOp) at() word {
	if o.word.ID == 0 {
		return word{}
	}
	return word{o.word.ID, o.word.Generation, o.signal.Offset}
}

// settle ends the flushes without an earlier put under way. After the link's end Poll does, with
// the reason: puts that end with it are not placed.
func (f *Frames) settle() {
	if f.over() != nil {
		return
	}
	oldest := ^uint64(0)
	for i := range f.ops {
		if o := f.ops[i]; o != nil && o.kind == opPut {
			oldest = min(oldest, o.number)
		}
	}
	for i := range f.ops {
		if o := f.ops[i]; o != nil && o.kind == opFlush && o.number < oldest {
			f.complete(o, nil)
		}
	}
}

func (f *Frames) unqueue(o *frameOp) {
	f.stalled = 0
	if i := slices.Index(f.queue, o); i >= 0 {
		f.queue = slices.Delete(f.queue, i, i+1)
	}
}

// begin returns a new operation in a free slot, ErrAgain if there is none.
func (f *Frames) begin(id uint64, kind opKind) (*frameOp, error) {
	if err := f.over(); err != nil {
		return nil, err
	}
	if f.busy == slots {
		return nil, p2p.ErrAgain
	}
	slot := slices.Index(f.ops[:], nil)
	if slot < 0 {
		return nil, p2p.ErrAgain
	}
	f.busy++
	f.number++
	var o *frameOp
	if n := len(f.spare); n > 0 {
		o, f.spare = f.spare[n-1], f.spare[:n-1]
	} else {
		o = new(frameOp)
	}
	*o = frameOp{id: id, number: f.number, slot: uint32(slot), kind: kind}
	f.ops[slot] = o
	return o, nil
}

// over returns why the link has ended, or nil.
func (f *Frames) over() error {
	b := f.broken.Load()
	switch {
	case b != nil:
		return b.err
	case f.closed.Load():
		if err := f.link.Err(); err != nil {
			return err
		}
		return p2p.ErrClosed
	}
	return nil
}

// Put implements p2p.Putter.
func (f *Frames) Put(id uint64, local mem.Memory, to *mem.Remote, offset uint64, s p2p.Signal) error {
	if err := checkPut(local, to, offset, &s, f.mover != nil); err != nil {
		return err
	}
	o, err := f.begin(id, opPut)
	if err != nil {
		return err
	}
	o.local, o.off, o.strong, o.signal = local, offset, s.Strong, s
	if to != nil {
		o.to = *to
	}
	if s.At != nil {
		o.word = *s.At
	}
	f.queue = append(f.queue, o)
	if o.word.ID != 0 && f.barred(o) {
		f.cancel(o, p2p.ErrUnplaced)
		return nil
	}
	f.hurry()
	return nil
}

// Get implements p2p.Getter.
func (f *Frames) Get(id uint64, local mem.Memory, from *mem.Remote, offset uint64) error {
	if err := checkGet(local, from, offset, f.mover != nil); err != nil {
		return err
	}
	o, err := f.begin(id, opGet)
	if err != nil {
		return err
	}
	o.local, o.off, o.to = local, offset, *from
	f.queue = append(f.queue, o)
	f.hurry()
	return nil
}

// FlushPuts implements p2p.Flusher: a put has ended when it is placed.
func (f *Frames) FlushPuts(id uint64) error {
	o, err := f.begin(id, opFlush)
	if err != nil {
		return err
	}
	o.waiting = true
	f.flushes++
	f.settle()
	return nil
}

// hurry sends a small operation at once if it is alone.
func (f *Frames) hurry() {
	if len(f.queue) == 1 {
		f.pump()
	}
}

// Poll implements p2p.Completer.
func (f *Frames) Poll(out []p2p.Completion) int {
	if err := f.over(); err != nil {
		f.queue, f.serving, f.answers = nil, nil, nil
		for _, o := range f.ops[:] {
			if o != nil {
				f.drop(o)
				f.complete(o, err)
			}
		}
	} else if f.pending() {
		f.pump()
	}
	for i := 0; i < min(len(out), len(f.done)) && f.bars > 0; i++ {
		if f.done[i].unplaced {
			f.bars--
		}
	}
	n := polled(out, &f.done)
	f.busy -= n
	return n
}

// Cancel implements p2p.Completer.
func (f *Frames) Cancel(id uint64) {
	for i := range f.ops {
		if o := f.ops[i]; o != nil && o.id == id && o.cancelled == nil {
			f.cancel(o, p2p.ErrCancelled)
		}
	}
}

// cancel ends an operation with the error why, when the peer has been told if it has begun. Its
// local memory is not used afterwards.
func (f *Frames) cancel(o *frameOp, why error) {
	o.cancelled = why
	if !o.waiting { // else all of a put was sent
		f.bar(o)
	}
	switch {
	case o.kind == opFlush:
		f.complete(o, why)
	case !o.begun:
		f.drop(o)
		f.unqueue(o)
		f.complete(o, why)
	default:
		o.local = mem.Memory{}
		if o.waiting && o.kind == opGet { // makes the peer stop sending
			o.waiting = false
			f.queue = append(f.queue, o)
		}
	}
}

// pump sends pending frames, up to a share: answers, then a frame of each operation in turn.
func (f *Frames) pump() {
	if f.over() != nil {
		return
	}
	if f.moving > 0 {
		f.land()
	}
	if f.unsent {
		if ok, err := f.link.Flush(); err != nil || !ok {
			return
		}
		f.unsent = false
	}
	f.blocked = false
	for len(f.answers) > 0 {
		n := min(len(f.answers), f.link.MaxFrame()/doneSize, slots)
		b := f.buffer(n * doneSize)[:0]
		for _, a := range f.answers[:n] {
			b = binary.LittleEndian.AppendUint32(b, a.slot)
			b = binary.LittleEndian.AppendUint32(b, uint32(a.status))
		}
		if !f.send(&p2p.Header{Kind: frameDone}, b) {
			return
		}
		f.answers = f.answers[:copy(f.answers, f.answers[n:])]
	}
	if f.yield > 0 {
		f.yield--
		return
	}
	skipped := 0
	f.stalled = 0
	for left := share; left > 0 && len(f.queue)+len(f.serving) > skipped; {
		all := len(f.queue) + len(f.serving)
		if f.turn >= all {
			f.turn = 0
		}
		var n int
		var over, ok bool
		if f.turn < len(f.queue) {
			o := f.queue[f.turn]
			if n, over, ok = f.next(o, f.turn == 0); ok && over {
				f.queue = slices.Delete(f.queue, f.turn, f.turn+1)
				if o.waiting = o.begun; !o.begun {
					f.bar(o)
					f.complete(o, o.errStuck())
				}
			}
		} else {
			i := f.turn - len(f.queue)
			if n, over, ok = f.reply(&f.serving[i]); ok && over {
				f.serving = slices.Delete(f.serving, i, i+1)
			}
		}
		if !ok {
			if f.blocked {
				return
			}
			skipped++ // it waits for its move, or a signal for earlier operations
			f.turn++
			if skipped == all {
				f.stalled = all
			}
			continue
		}
		skipped = 0
		if left -= 1<<10 + n; !over {
			f.turn++
		}
	}
}

func (f *Frames) buffer(n int) []byte {
	if cap(f.scratch) < n {
		f.scratch = make([]byte, max(n, recordSize+together))
	}
	return f.scratch[:n]
}

// send offers a frame of this service to the link.
func (f *Frames) send(h *p2p.Header, payload []byte) bool {
	h.Service, h.Len = Service, uint32(len(payload))
	ok, err := f.link.Send(h, payload)
	if err != nil || !ok { // Recv returns the failure
		f.blocked = true
		return false
	}
	flushed, err := f.link.Flush()
	f.unsent = err == nil && !flushed
	f.blocked = f.unsent
	return true
}

// next sends the next frame of an operation of this side. oldest says that everything begun before
// has been sent. It returns the number of bytes sent, and whether nothing is left: then the
// operation has begun, or is stuck. ok is false if nothing was sent, because the link is blocked or
// a signal has to wait.
func (f *Frames) next(o *frameOp, oldest bool) (n int, over, ok bool) {
	h := p2p.Header{Chan: o.slot, Call: o.to.ID, Seq: o.to.Generation, Off: o.off}
	if o.cancelled != nil {
		h.Kind = frameCancel
		o.told = f.send(&h, nil)
		return 0, true, o.told
	}
	switch {
	case o.moving || f.offer(o):
		return 0, false, false
	case o.stuck(): // it has not begun
		return 0, true, true
	}
	if o.kind == opGet {
		h.Kind, h.Count = frameGet, uint64(o.local.Len())
		ok = f.send(&h, nil)
		o.begun = o.begun || ok
		return 0, true, ok
	}
	signal := o.word.ID != 0
	most := min(f.link.MaxFrame(), putFrame)
	rest := o.local.Len() - o.moved
	switch {
	case rest > 0 && signal && o.moved == 0 && rest <= min(together, most-recordSize) && (oldest || !o.strong) &&
		!f.signals(o):
		b := f.buffer(recordSize)[:0]
		for _, v := range [...]uint64{o.word.ID, o.word.Generation, o.signal.Offset, o.signal.Value} {
			b = binary.LittleEndian.AppendUint64(b, v)
		}
		b = append(b, o.local.Bytes()...)
		h.Kind, h.Flags, n, over = framePut, flagLast|flagSignal, rest, true
		ok = f.send(&h, b)
	case rest > 0 || !signal:
		n = min(rest, most)
		h.Kind, h.Off = framePut, o.off+uint64(o.moved)
		if over = n == rest && !signal; over {
			h.Flags = flagLast
		}
		ok = f.send(&h, o.local.Bytes()[o.moved:o.moved+n])
	case o.strong && !oldest || f.signals(o):
		return 0, false, false
	default:
		h = p2p.Header{Kind: frameSignal, Flags: flagLast, Chan: o.slot, Call: o.word.ID, Seq: o.word.Generation,
			Off: o.signal.Offset, Count: o.signal.Value}
		over = true
		ok = f.send(&h, nil)
	}
	if ok {
		o.begun = true
		o.moved += n
	}
	return n, over, ok
}

// signals reports whether an operation before o has yet to send a signal to the word of o's: a word
// never goes back to an earlier value.
func (f *Frames) signals(o *frameOp) bool {
	if o.word.ID == 0 {
		return false
	}
	for _, e := range f.queue {
		if e == o {
			return false
		}
		if e.cancelled == nil && e.at() == o.at() {
			return true
		}
	}
	return false
}

// reply sends the next frame of a get by the peer.
func (f *Frames) reply(s *serve) (n int, over, ok bool) {
	n = int(min(s.n-s.sent, uint64(f.link.MaxFrame()), chunk))
	m, err := s.entry.Enter(mem.Read, s.off+s.sent, uint64(n))
	if err != nil { // withdrawn meanwhile
		f.answers = append(f.answers, answer{s.slot, statusOf(err)})
		return 0, true, true
	}
	ok = f.send(&p2p.Header{Kind: frameData, Chan: s.slot, Off: s.sent}, m)
	s.entry.Leave()
	if ok {
		if s.sent += uint64(n); s.sent == s.n {
			over = true
			f.answers = append(f.answers, answer{s.slot, statusOK})
		}
	}
	return n, over, ok
}
