package endpoint

import (
	"context"
	"fmt"
	"math"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"tutti/endpoint/internal/args"
	"tutti/endpoint/internal/gate"
	"tutti/endpoint/internal/link"
	"tutti/endpoint/internal/wire"
	"tutti/mem"
)

// Kind is what an operation does.
type Kind uint8

// Kinds of operations.
const (
	OpRead  Kind = 1 + iota // from a region of the peer into Local
	OpWrite                 // from Local to a region of the peer
	OpSend                  // Local as a message to the peer
	OpRecv                  // the next message of the peer into Local
)

// String returns "read", "write", "send" or "recv".
func (k Kind) String() string {
	if k < OpRead || k > OpRecv {
		return fmt.Sprintf("kind %d", uint8(k))
	}
	return [...]string{"read", "write", "send", "recv"}[k-1]
}

// Op is one operation of a batch.
type Op struct {
	Kind Kind
	// Local is the memory here: the source of a write or a send, the destination of a read or a
	// recv. It is the endpoint's until the operation has ended.
	Local mem.Memory
	// File is the source of a write, or the destination of a read, instead of Local: FileLen bytes
	// from FileOffset. The kernel moves what is written from the file to the connection without a
	// copy in this process, unless the connection has a guard (Config.Checksum, Config.Seal); what
	// is read goes through a buffer. The file must stay open until the operation has ended.
	File                *os.File
	FileOffset, FileLen int64
	// Region is the name of the peer's region, of a read or a write.
	Region string
	// Offset is where the range of Local's length begins in the region, in bytes.
	Offset int64
	// Exact makes it an error, ErrSize, if a message is not as long as Local. Otherwise a longer
	// one is truncated.
	Exact bool
	// Timeout bounds the operation, from its start. Default: Config.Timeout.
	Timeout time.Duration
}

// NoTimeout is the Timeout of an operation that nothing bounds but its end.
const NoTimeout = time.Duration(math.MaxInt64)

// Result is the end of an operation.
type Result struct {
	// N is the number of bytes that were moved; of a recv, the bytes of the message that are in
	// Local.
	N int64
	// Total is the length of a message that a recv got, which may exceed N. Otherwise it is N.
	Total int64
	// Err is nil if the operation has been done: the peer's region, or the message, has arrived in
	// Local; the peer has acknowledged a write; the peer has a message, in memory of a recv or its
	// own.
	Err error
}

// Future is the handle of one operation, or of a batch. Its methods may be called from any
// goroutine.
type Future struct {
	peer    *Peer
	results []result
	one     [1]result    // of a future of one operation
	left    atomic.Int32 // operations that have not ended

	mu   sync.Mutex
	done chan struct{} // made when it is first needed
}

// result is the end of an operation of a Future. peer.mu guards it until all have ended.
type result struct {
	Result
	task *task // nil: it has ended
}

// task is an operation under way. peer.mu guards it, except gate. It is apart from the Future,
// which a program may keep: a task that is free when it ends is used again for another operation,
// with its piece and its post.
type task struct {
	Op
	future   *Future
	result   *result
	gate     gate.Gate // of Local
	n        int64     // bytes of Local
	deadline time.Time
	at       int // index in the peer's heap of deadlines; -1: none
	stage    stage
	ended    bool
	free     bool // once it has ended, nothing but Peer.over refers to it or a part of it

	pieces  []piece  // of a read or a write
	first   [1]piece // those, if there is one
	running int      // pieces that have not ended
	seq     uint64   // of a message
	post    post     // of a send
	letter  *arrival // of a recv that has a message

	remote RemoteRegion // of a read or a write that was begun
	key    *key         // of what it reads or writes, if the path has taken it
	flight *path        // whose device, or that of the peer, may access Local; nil: none
}

// began returns when the operation was started.
func (t *task) began() time.Time { return t.deadline.Add(-t.Timeout) }

// stage says what a task waits for.
type stage string

const (
	connecting  stage = "waiting for a connection"
	resolving   stage = "waiting for the description of the region"
	queued      stage = "waiting for earlier operations"
	moving      stage = "waiting for the peer"
	registering stage = "registering memory with the RDMA device"
	receiving   stage = "waiting for a message"
	arriving    stage = "receiving a message"
)

// piece is the part of a read or a write that one connection carries.
type piece struct {
	link.Out // of a write
	task     *task
	conn     *link.Conn
	id       uint64
	off      int64 // in the range
	n        int64
	got      int64
	begun    bool        // the request was given to conn
	arriving bool        // conn places bytes of a read
	headed   bool        // the connection's: a frame of a write was sent
	through  atomic.Bool // all of a write was sent: conn has done with it
	failed   error       // why the bytes were not placed
}

// restsLocked reports whether conn does not use a piece any more whose request has ended.
func (p *piece) restsLocked() bool {
	if p.task.Kind == OpWrite {
		return p.through.Load()
	}
	return !p.arriving
}

// Head implements link.Framer, for a write.
func (p *piece) Head(b []byte, at, n int64) []byte {
	p.headed = true
	r := p.task.remote
	return wire.Bulk(b, wire.Put, p.id, n, r.id, r.generation, uint64(p.task.Offset+p.off+at), uint64(p.n))
}

// Tail implements link.Framer.
func (p *piece) Tail(b []byte, ok bool) []byte {
	switch {
	case ok:
		p.through.Store(true)
		return b
	case !p.headed: // the peer does not know of it
		p.task.future.peer.unsent(p, p.Err())
		return b
	}
	return wire.Header{Address: p.id, Op: wire.Cancel}.Append(b)
}

// letter is what is sent of a message: the whole of it (Message), that there is one (Offer or
// Lend), part of one (Piece), or that it was given up (Dropped).
type letter struct {
	link.Out
	op  wire.Opcode
	seq uint64
	off int64 // of a Piece: in the message; of an Offer or a Lend: the length of the message
	of  *post // not of a Dropped
	// through says that all was sent: the connection has done with it.
	through atomic.Bool
	// unsent says that nothing of a Message was sent, or will be.
	unsent atomic.Bool
}

// Head implements link.Framer.
func (l *letter) Head(b []byte, at, n int64) []byte {
	h := wire.Header{Address: l.seq, Op: l.op}
	switch l.op {
	case wire.Message:
		return wire.Bulk(b, l.op, l.seq, n)
	case wire.Piece:
		return wire.Bulk(b, l.op, l.seq, n, uint64(l.off+at))
	case wire.Offer:
		h.Size = 8
		return wire.Words(h.Append(b), uint64(l.off))
	case wire.Lend:
		h.Size = 24
		return wire.Words(h.Append(b), uint64(l.off), l.of.loan.address, uint64(l.of.loan.key))
	}
	return h.Append(b)
}

// Tail implements link.Framer.
func (l *letter) Tail(b []byte, ok bool) []byte {
	switch {
	case !ok:
		if err := l.Err(); err != nil {
			l.of.cause.CompareAndSwap(nil, &err)
		}
		l.unsent.Store(true)
		return wire.Header{Address: l.seq, Op: wire.Dropped}.Append(b)
	case l.op == wire.Piece:
		l.of.sent.Add(1)
		b = wire.Header{Address: l.seq, Op: wire.Sent}.Append(b)
	}
	l.through.Store(true)
	return b
}

// fileName describes a file, which may be nil, for errors.
func fileName(f *os.File) string {
	if f == nil {
		return "a file that is nil"
	}
	return "the file " + f.Name()
}

// place describes the file, or the device, whose failure is the operation's.
func (o *Op) place() string {
	if o.File != nil {
		return o.File.Name()
	}
	return fmt.Sprintf("memory at %s", o.Local.Loc())
}

// len returns the bytes that the operation moves.
func (o *Op) len() int64 {
	if o.File != nil {
		return o.FileLen
	}
	return int64(o.Local.Len())
}

// check returns an error if the operation's arguments are wrong, for endpoints of c.
func (o *Op) check(c *Context) error {
	if o.Timeout < 0 {
		return fmt.Errorf("%v: timeout %v is negative", o.Kind, o.Timeout)
	}
	switch o.Kind {
	case OpSend, OpRecv:
		if o.File != nil || o.FileOffset != 0 || o.FileLen != 0 {
			return fmt.Errorf("%v: File is for reads and writes", o.Kind)
		}
		if o.Region != "" || o.Offset != 0 {
			return fmt.Errorf("%v: region %q and offset %d are for reads and writes", o.Kind, o.Region, o.Offset)
		}
	case OpRead, OpWrite:
		if o.Exact {
			return fmt.Errorf("%v: Exact is for recv", o.Kind)
		}
		if err := checkName("region", o.Region); err != nil {
			return fmt.Errorf("%v: %w", o.Kind, err)
		}
		if o.File == nil && (o.FileOffset != 0 || o.FileLen != 0) {
			return fmt.Errorf("%v: %d bytes at %d of %s: want a file", o.Kind, o.FileLen, o.FileOffset,
				fileName(o.File))
		}
		if o.File != nil && (o.Local.Len() > 0 || o.FileOffset < 0 || o.FileLen < 0 ||
			o.FileOffset > math.MaxInt64-o.FileLen) {
			return fmt.Errorf("%v: %d bytes at %d of %s, and %d bytes of memory: want a range of the file, and no "+
				"memory", o.Kind, o.FileLen, o.FileOffset, fileName(o.File), o.Local.Len())
		}
		if o.Offset < 0 || o.Offset > math.MaxInt64-o.len() {
			return fmt.Errorf("%v of region %s: %d bytes at offset %d: %w", o.Kind, o.Region, o.len(), o.Offset,
				ErrBounds)
		}
	default:
		return fmt.Errorf("operation of %v: want OpRead, OpWrite, OpSend or OpRecv", o.Kind)
	}
	if err := c.reach(o.Local); err != nil {
		return fmt.Errorf("%v: %w", o.Kind, err)
	}
	return nil
}

// allowed returns an error if a region does not allow the task, a read or a write.
func (t *task) allowed(r RemoteRegion) error {
	want := Read
	if t.Kind == OpWrite {
		want = Write
	}
	switch {
	case t.Offset > r.Len || t.n > r.Len-t.Offset:
		return fmt.Errorf("%w: %d bytes at offset %d of %d", ErrBounds, t.n, t.Offset, r.Len)
	case !r.Rights.Has(want):
		return fmt.Errorf("%w: its rights are %v", ErrRights, r.Rights)
	}
	return nil
}

// what describes the operation for errors.
func (t *task) what() string {
	switch t.Kind {
	case OpRead:
		return fmt.Sprintf("read of %d bytes of region %s from %v", t.n, t.Region, t.future.peer)
	case OpWrite:
		return fmt.Sprintf("write of %d bytes to region %s of %v", t.n, t.Region, t.future.peer)
	case OpSend:
		return fmt.Sprintf("send of %d bytes to %v", t.n, t.future.peer)
	}
	return fmt.Sprintf("recv from %v", t.future.peer)
}

// Ended reports whether the operations have ended.
func (f *Future) Ended() bool { return f.left.Load() == 0 }

// Done returns a channel that is closed when the operations have ended.
func (f *Future) Done() <-chan struct{} {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.done == nil {
		f.done = make(chan struct{})
		if f.Ended() {
			close(f.done)
		}
	}
	return f.done
}

// Err returns the first error among the operations, in their order; nil if there is none, or not
// all of them have ended.
func (f *Future) Err() error {
	if !f.Ended() {
		return nil
	}
	for i := range f.results {
		if err := f.results[i].Err; err != nil {
			return err
		}
	}
	return nil
}

// Len returns the number of operations.
func (f *Future) Len() int { return len(f.results) }

// Result returns the result of operation i of the batch, in the order of Batch's argument, once all
// have ended; before, it panics.
func (f *Future) Result(i int) Result {
	if !f.Ended() {
		panic("endpoint: Result of a Future that is not done")
	}
	return f.results[i].Result
}

// Wait waits for the operations and returns Err. When ctx ends first, it cancels those that have
// not ended. After it returned, none of their memory is accessed. If ctx is nil, Wait returns an
// error at once, and the operations go on.
func (f *Future) Wait(ctx context.Context) error {
	if err := args.Context(ctx, f.peer, "wait"); err != nil {
		return err
	}
	for !f.Ended() {
		conns := f.peer.polled(f)
		if len(conns) > 0 && link.Await(ctx, conns, f) {
			break
		}
		select {
		case <-f.Done():
		case <-ctx.Done():
			f.cancel(fmt.Errorf("%w: %w", ErrCancelled, context.Cause(ctx)))
		}
		if len(conns) > 0 {
			link.Woken(conns)
		}
	}
	return f.Err()
}

// Cancel cancels the operations that have not ended: they end with ErrCancelled, and their memory
// is not accessed after Cancel returned. A write that is cancelled may have happened in part, and
// may have left zeros in its range of the region; it does not overwrite what is written later. A
// send that is cancelled may have happened, but not in part.
func (f *Future) Cancel() { f.cancel(ErrCancelled) }

func (f *Future) cancel(err error) {
	p := f.peer
	p.mu.Lock()
	now := time.Now()
	since := now
	for i := range f.results {
		if t := f.results[i].task; t != nil {
			since = first(since, t.began())
			p.giveUpLocked(t, fmt.Errorf("%s: %w", t.what(), err))
		}
	}
	if since != now {
		p.checkHostLocked(since)
	}
	p.unlock()
	<-f.Done() // another goroutine may be about to end them
}

// finish notes that one of the operations has ended, whose result is set. Without locks.
func (f *Future) finish() {
	if f.left.Add(-1) > 0 {
		return
	}
	f.mu.Lock()
	if f.done != nil {
		select {
		case <-f.done:
		default:
			close(f.done)
		}
	}
	f.mu.Unlock()
}

// deadlines is a heap of tasks.
type deadlines []*task

func (h deadlines) less(i, j int) bool { return h[i].deadline.Before(h[j].deadline) }

func (h deadlines) swap(i, j int) {
	h[i], h[j] = h[j], h[i]
	h[i].at, h[j].at = i, j
}

func (h *deadlines) push(t *task) {
	t.at = len(*h)
	*h = append(*h, t)
	h.up(t.at)
}

func (h *deadlines) remove(t *task) {
	i, n := t.at, len(*h)-1
	if i < 0 {
		return
	}
	if i != n {
		h.swap(i, n)
	}
	(*h)[n] = nil
	*h = (*h)[:n]
	t.at = -1
	if i != n {
		h.down(i)
		h.up(i)
	}
}

func (h deadlines) up(i int) {
	for i > 0 && h.less(i, (i-1)/2) {
		h.swap(i, (i-1)/2)
		i = (i - 1) / 2
	}
}

func (h deadlines) down(i int) {
	for {
		c := 2*i + 1
		if c >= len(h) {
			return
		}
		if c+1 < len(h) && h.less(c+1, c) {
			c++
		}
		if !h.less(c, i) {
			return
		}
		h.swap(i, c)
		i = c
	}
}
