package link

import (
	"errors"
	"fmt"
	"io"
	"os"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"tutti/endpoint/internal/gate"
	"tutti/endpoint/internal/wire"
	"tutti/internal/epoll"
	"tutti/internal/socket"
)

// Handler handles what arrives on connections. Calls for one connection follow each other; those
// for several connections may be made at the same time.
type Handler interface {
	// Frame is called when the header and the extension of a frame have arrived, and says where the
	// payload goes. An error ends the connection. ext must not be kept.
	Frame(c *Conn, h wire.Header, ext []byte) (Sink, error)
	// End is called when the payload has arrived, if the Sink has a Token. stored is false if the
	// Sink's gate was closed before all of it was stored, or its File could not be written.
	End(c *Conn, s Sink, stored bool) error
	// Broken is called once, as the last call, when the connection is closed.
	Broken(c *Conn, err error)
}

// Sink is the place of a frame's payload. The zero Sink drops it.
type Sink struct {
	Gate  *gate.Gate // the payload goes to its memory from Off
	File  *os.File   // with a Gate: the payload goes to the file instead, while the gate is open
	Off   int64
	Buf   []byte // without a Gate: as long as the payload
	Token any    // for End
	Err   error  // for End, set by the Conn: why File could not be written, nil if it could
}

// Framer makes the frames of a transfer. Its methods must not call the Conn.
type Framer interface {
	// Head appends the header and the extension of a frame with bytes [at, at+n) of the transfer.
	Head(b []byte, at, n int64) []byte
	// Tail appends what follows the last frame, and is called once, also if the transfer was given
	// up: then ok is false.
	Tail(b []byte, ok bool) []byte
}

// Out is a transfer: bytes that a Conn cuts into frames and sends. It belongs to the Conn from
// Queue until Tail was called or the connection broke.
type Out struct {
	Framer
	Gate *gate.Gate // its memory is the source; once it is closed the transfer is given up; nil: N is 0
	File *os.File   // is the source instead, if it is set
	Off  int64      // of the first byte in the source
	N    int64
	// Whole has all bytes copied when the first is sent: the transfer is then sent as a whole or
	// not at all. It has at most MaxWhole bytes.
	Whole bool

	at      int64 // bytes that were put into frames
	err     error // of File; set before stopped
	stopped atomic.Bool
	next    *Out
}

// Stop has the transfer given up after the frame that is being sent.
func (o *Out) Stop() { o.stopped.Store(true) }

// Stopped reports whether the transfer was given up, which it is before a byte is sent that is not
// of its source.
func (o *Out) Stopped() bool { return o.stopped.Load() }

// Err returns why the source could not be read, nil if the transfer was not given up for that.
func (o *Out) Err() error {
	if !o.Stopped() {
		return nil
	}
	return o.err
}

// Sizes in bytes.
const (
	inSize   = 64 << 10  // of a connection without a guard: see guardIn
	short    = 16 << 10  // received at first; such calls are cheaper
	small    = 16 << 10  // a payload up to this size is copied behind its header
	gather   = 64 << 10  // frames are collected up to this size
	Chunk    = 2 << 20   // the largest frame of a transfer
	staging  = 512 << 10 // that of one from a device, and the host's memory for a device and a direction
	MaxWhole = staging   // the largest transfer that is copied as a whole
	direct   = 8 << 10   // a payload of which more is missing is received at its place
	ahead    = 4 << 10   // what is read behind a payload that is received at its place
	rxShare  = 2 << 20   // received in one call of Poll
	txShare  = 4 << 20   // sent in one call of Flush
	textSize = wire.MaxText
)

// Values of Conn.stalled.
const (
	full = 1 + iota // the socket has no room
	more            // the goroutine that sent had its share
)

// zeros is what a frame ends with whose source was closed.
var zeros [small]byte

// Conn is a connection. Its methods may be called from any goroutine unless they say otherwise.
type Conn struct {
	handler Handler
	loop    *Loop
	fd      int
	id      uint64
	guard   *guard // nil: frames go as they are
	mode    wire.Mode

	listed   atomic.Bool  // the loop serves it: it is not armed
	waiters  atomic.Int32 // that attend
	parked   atomic.Int32 // waiters that sleep
	polled   atomic.Int64 // when a waiter left with what it waited for, in nanoseconds
	misses   atomic.Int32 // how often waiters polled in vain, in succession
	failure  atomic.Pointer[failure]
	received atomic.Uint64 // bytes
	wrote    atomic.Uint64

	until    int64 // the loop's: when it has been active for long enough; negative: it was busy
	vain     int   // the loop's: how often it polled in vain
	released bool  // the loop's

	rx      sync.Mutex
	closed  bool // the descriptor is closed
	in      []byte
	r, w    int  // in[r:w] has arrived and was not consumed
	inside  bool // a frame's payload is arriving
	sink    Sink
	left    int64 // bytes of it that are missing
	whole   bool  // all of it was stored so far
	empty   bool  // the last call of receive found nothing
	wide    bool  // the last read may have left something
	text    [textSize]byte
	flush   bool // after what has arrived
	vin     socket.Vector
	placed  int // bytes in inStage, which go to a device together
	inStage stage

	mu       sync.Mutex
	flushing bool // a goroutine owns what is below stalled, and of guard what is sent
	ctl      []byte
	taken    int  // bytes of ctl that are in out
	first    *Out // a list
	last     *Out
	quiet    sync.Cond    // flushing was cleared
	stalled  atomic.Int32 // why what is left is not being sent: full or more, or 0

	out      []byte // out[sent:] is to be sent
	sent     int
	cur      *Out  // its payload follows out
	rest     int64 // bytes of it
	pad      bool  // they are zeros
	vout     socket.Vector
	staged   []byte // the payload, if it comes from a device
	outStage stage
	pollfd   [1]unix.PollFd
}

type failure struct{ err error }

// stage is host memory on the way from or to a device.
type stage struct {
	b    []byte // nil until it is needed
	free func()
}

// get returns the memory, staging bytes.
func (s *stage) get(d gate.Device) (_ []byte, err error) {
	if s.b == nil {
		s.b, s.free, err = d.Stage(staging)
	}
	return s.b, err
}

func (s *stage) release() {
	if s.free != nil {
		s.free()
	}
	*s = stage{}
}

// ErrEnded says that the other end closed the connection between two frames.
var ErrEnded = errors.New("the peer closed the connection")

// Backlog returns the bytes of frames that wait to be sent, without transfers. Those that are being
// sent count until all of them are.
func (c *Conn) Backlog() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return len(c.ctl) + c.taken
}

// Text returns memory for a payload of at most wire.MaxText bytes that the handler reads in End.
func (c *Conn) Text(n uint64) []byte { return c.text[:n] }

// Err returns why the connection does not work any more, or nil.
func (c *Conn) Err() error {
	if f := c.failure.Load(); f != nil {
		return f.err
	}
	return nil
}

// Mode returns the mode of the connection.
func (c *Conn) Mode() wire.Mode { return c.mode }

// Traffic returns the bytes that were received and sent.
func (c *Conn) Traffic() (in, out uint64) { return c.received.Load(), c.wrote.Load() }

// Silence is socket.Silence of the connection, 0 if it does not work any more.
func (c *Conn) Silence() time.Duration {
	c.mu.Lock() // which release takes before it closes the descriptor
	defer c.mu.Unlock()
	if c.Err() != nil {
		return 0
	}
	return socket.Silence(c.fd)
}

// Close ends the connection for the reason err: nothing more is sent, but for what a system call is
// sending. The loop closes the descriptor and calls Broken.
func (c *Conn) Close(err error) {
	if c.failure.CompareAndSwap(nil, &failure{err}) {
		c.loop.kick(c)
	}
}

// Quiesce waits for the end of a system call that receives, after Close: from then on nothing that
// the connection carries is placed. It is not for handlers of this connection.
func (c *Conn) Quiesce() {
	c.rx.Lock()
	defer c.rx.Unlock()
}

// Send sends frames, whole ones, as soon as possible.
func (c *Conn) Send(frames []byte) {
	c.Later(frames)
	c.Flush()
}

// FlushAfter has what there is sent when everything that has arrived is handled. For handlers.
func (c *Conn) FlushAfter() { c.flush = true }

// SetHandler replaces the handler. For handlers.
func (c *Conn) SetHandler(h Handler) { c.handler = h }

// Remove takes back a transfer of which nothing has been sent, and reports whether it could.
func (c *Conn) Remove(o *Out) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	for p, before := c.first, (*Out)(nil); p != nil; p, before = p.next, p {
		if p != o {
			continue
		}
		if o.at > 0 {
			return false
		}
		if before == nil {
			c.first = o.next
		} else {
			before.next = o.next
		}
		if c.last == o {
			c.last = before
		}
		return true
	}
	return false
}

// Later has frames sent with the next ones, or soon.
func (c *Conn) Later(frames []byte) {
	c.mu.Lock()
	c.ctl = append(c.ctl, frames...)
	c.mu.Unlock()
}

// Queue adds transfers, which take turns with those that are there. Flush sends them.
func (c *Conn) Queue(outs ...*Out) {
	c.mu.Lock()
	for _, o := range outs {
		c.pushLocked(o)
	}
	c.mu.Unlock()
}

func (c *Conn) pushLocked(o *Out) {
	o.next = nil
	if c.last == nil {
		c.first = o
	} else {
		c.last.next = o
	}
	c.last = o
}

// Flush sends what there is until nothing is left or the socket is full. If another goroutine is
// doing that it returns at once.
func (c *Conn) Flush() {
	for c.stalled.Load() == 0 && c.Err() == nil { // else the polling thread goes on
		c.mu.Lock()
		if c.flushing || c.idleLocked() {
			c.mu.Unlock()
			return
		}
		c.flushing = true
		c.mu.Unlock()
		stalled, err := c.write()
		c.stalled.Store(stalled)
		c.mu.Lock()
		c.flushing = false
		c.quiet.Broadcast()
		c.mu.Unlock()
		if err != nil {
			c.Close(err)
		} else if stalled != 0 {
			c.loop.kick(c)
		}
	}
}

// FlushAll is Flush, but waits for a goroutine that is sending, unless the socket becomes full.
func (c *Conn) FlushAll() {
	for {
		c.Flush()
		c.mu.Lock()
		for c.flushing && c.Err() == nil {
			c.quiet.Wait()
		}
		done := c.stalled.Load() != 0 || c.Err() != nil || c.idleLocked()
		c.mu.Unlock()
		if done {
			return
		}
	}
}

// FlushSoon is Flush, but leaves the work to a waiter or to the loop if one of them is about to
// look: a waiter that comes does so at once, the loop within about a millisecond. So what a program
// starts in succession goes with one system call.
func (c *Conn) FlushSoon() {
	if !c.listed.Load() || c.waiters.Load() > 0 { // a waiter that polls does not look
		c.Flush()
	}
}

// idleLocked reports whether there is nothing to send. No flush is under way.
func (c *Conn) idleLocked() bool {
	return c.first == nil && len(c.ctl) == 0 && c.rest == 0 && c.sent == len(c.out) && !c.guard.pending()
}

// write sends, and returns what stalled is then. The caller owns the sending fields.
func (c *Conn) write() (stalled int32, err error) {
	for share := 0; share < txShare; {
		if c.rest == 0 && (c.sent == 0 || c.sent == len(c.out)) {
			if c.collect(); len(c.out) == 0 && c.rest == 0 && !c.guard.pending() {
				return 0, nil
			}
		}
		if c.Err() != nil { // what was given up for that must not look as if it had ended
			return 0, nil
		}
		n, e := c.push()
		if e == unix.EAGAIN {
			return full, nil
		}
		if e != 0 {
			return 0, os.NewSyscallError("send", e)
		}
		share += n
		c.wrote.Add(uint64(n))
	}
	return more, nil
}

// push makes one system call.
func (c *Conn) push() (n int, e syscall.Errno) {
	head := c.out[c.sent:]
	if c.rest == 0 {
		n, e = c.send(head, nil)
		c.sent += max(n, 0)
		return n, e
	}
	o := c.cur
	switch from := o.Off + o.at - c.rest; {
	case c.pad:
		n, e = c.send(head, zeros[:min(c.rest, int64(len(zeros)))])
	case o.File != nil && len(head) > 0:
		n, e = c.send(head, nil)
	case o.File != nil:
		if _, ok := o.Gate.Enter(0, 0); ok {
			n, e = c.sendFile(o, from)
			o.Gate.Leave()
		}
		if n <= 0 && e != unix.EAGAIN { // the gate was closed, or the file cannot be read
			c.pad = true
			o.Stop()
			return 0, 0
		}
	case c.staged != nil:
		n, e = c.send(head, c.staged[int64(len(c.staged))-c.rest:])
	default:
		b, ok := o.Gate.Enter(from, c.rest)
		if !ok {
			c.pad = true
			o.Stop()
			return 0, 0
		}
		n, e = c.send(head, b)
		o.Gate.Leave()
	}
	n = max(n, 0)
	k := min(n, len(head))
	c.sent += k
	c.rest -= int64(n - k)
	if c.rest == 0 && c.sent == len(c.out) {
		c.advance(o)
	}
	return n, e
}

// send sends the beginning of a and then b, and returns how much.
func (c *Conn) send(a, b []byte) (n int, e syscall.Errno) {
	switch {
	case c.guard != nil:
		return c.guard.send(c.fd, a, b)
	case len(b) == 0:
		return socket.Send(c.fd, a)
	}
	return c.vout.Send(c.fd, a, b)
}

// sendFile makes one system call. An error that is not the connection's is o.err: if it is
// nevertheless, the next call finds it.
func (c *Conn) sendFile(o *Out, from int64) (n int, e syscall.Errno) {
	if c.guard != nil {
		return c.guard.sendFile(c.fd, o, from, c.rest)
	}
	for {
		n, err := unix.Sendfile(c.fd, int(o.File.Fd()), &from, int(min(c.rest, Chunk)))
		switch {
		case err == nil && n == 0:
			o.err = io.ErrUnexpectedEOF // it is shorter than it was
			return 0, 0
		case err == nil:
			return n, 0
		case err == unix.EAGAIN:
			return 0, unix.EAGAIN
		case err != unix.EINTR:
			o.err = err
			return 0, 0
		}
	}
}

// advance puts a transfer whose frame was sent back into the queue, or ends it.
func (c *Conn) advance(o *Out) {
	c.out, c.sent, c.cur, c.pad, c.staged = c.out[:0], 0, nil, false, nil
	if o.at == o.N || o.stopped.Load() {
		c.out = o.Tail(c.out, !o.stopped.Load())
		return
	}
	c.mu.Lock()
	c.pushLocked(o)
	c.mu.Unlock()
}

// collect adds what is to be sent next to out.
func (c *Conn) collect() {
	through := c.sent > 0
	if through {
		c.out, c.sent = c.out[:0], 0
		if cap(c.out) > 2*MaxWhole { // the peer has read little for some time
			c.out = nil
		}
	}
	c.mu.Lock()
	if through {
		c.taken = 0
	}
	if c.taken += len(c.ctl); len(c.ctl) > 0 {
		c.out, c.ctl = append(c.out, c.ctl...), c.ctl[:0]
		if cap(c.ctl) > gather {
			c.ctl = nil
		}
	}
	for c.first != nil && len(c.out) < gather {
		o := c.first
		if c.first = o.next; c.first == nil {
			c.last = nil
		}
		c.mu.Unlock()
		if c.begin(o) {
			c.mu.Lock()
			break
		}
		c.mu.Lock()
	}
	c.mu.Unlock()
}

// begin adds the next frame of o to out; true: its payload follows out.
func (c *Conn) begin(o *Out) bool {
	n := min(o.N-o.at, o.frame())
	copied := n > 0 && (n <= small || o.Whole) && o.File == nil // Enter looks at the gate
	if o.stopped.Load() || !copied && o.Gate != nil && !o.Gate.IsOpen() {
		c.out = o.Tail(c.out, false)
		return false
	}
	if n == 0 { // an empty transfer has one frame
		c.out = o.Tail(o.Head(c.out, 0, 0), true)
		return false
	}
	staged, ok := c.load(o, n)
	if !ok {
		o.Stop()
		c.out = o.Tail(c.out, false)
		return false
	}
	if copied {
		b := staged
		if b == nil {
			if b, ok = o.Gate.Enter(o.Off+o.at, n); !ok {
				c.out = o.Tail(c.out, false)
				return false
			}
		}
		c.out = append(o.Head(c.out, o.at, n), b...)
		if staged == nil {
			o.Gate.Leave() // Tail takes locks
		}
		o.at += n // the rest of a transfer, or all of it
		c.out = o.Tail(c.out, true)
		return false
	}
	c.out = o.Head(c.out, o.at, n)
	o.at += n
	c.cur, c.rest, c.pad, c.staged = o, n, false, staged
	return true
}

// frame is the largest frame of o, in bytes.
func (o *Out) frame() int64 {
	if o.fromDevice() {
		return staging
	}
	return Chunk
}

// fromDevice reports whether the source is memory of a device.
func (o *Out) fromDevice() bool { return o.File == nil && o.Gate != nil && o.Gate.Device() != nil }

// load copies the next n bytes of o to memory of the host, if they are in a device. false: its gate
// was closed, or o.err says why the device could not be read.
func (c *Conn) load(o *Out, n int64) (b []byte, ok bool) {
	if !o.fromDevice() || n == 0 {
		return nil, true
	}
	if b, o.err = c.outStage.get(o.Gate.Device()); o.err != nil {
		return nil, false
	}
	b = b[:n]
	ok, o.err = o.Gate.Load(b, o.Off+o.at)
	return b, ok
}

// Poll receives and handles what has arrived, and sends if there is room again. It reports whether
// it did anything. If another goroutine is receiving it returns at once.
func (c *Conn) Poll() bool {
	if !c.rx.TryLock() {
		return false
	}
	defer c.rx.Unlock()
	if c.closed || c.Err() != nil {
		return false
	}
	did := c.resume()
	if c.empty && !socket.Ready(c.fd) {
		return did
	}
	n, err := c.receive()
	c.empty = n == 0
	if err != nil {
		c.Close(err)
		return true
	}
	return did || n > 0
}

// resume goes on with sending. If the socket was full it waits until the kernel has a good part of
// its buffer free: otherwise frames would be sent in small pieces.
func (c *Conn) resume() bool {
	switch c.stalled.Load() {
	case 0:
		return false
	case full:
		c.pollfd[0] = unix.PollFd{Fd: int32(c.fd), Events: unix.POLLOUT}
		if n, err := unix.Poll(c.pollfd[:], 0); err != nil || n == 0 {
			return false
		}
	}
	c.stalled.Store(0)
	c.Flush()
	return true
}

// receive receives until nothing more has arrived, or its share is used, and returns the bytes.
func (c *Conn) receive() (int, error) {
	total := 0
	for total < rxShare {
		if err := c.Err(); err != nil {
			return total, err
		}
		n, full, err := c.read()
		if n == 0 || err != nil {
			return total, err
		}
		total += n
		c.received.Add(uint64(n))
		if c.guard == nil {
			err = c.consume()
		} else {
			err = c.consumeRecords()
		}
		if c.flush {
			c.flush = false
			c.Flush()
		}
		if err != nil {
			return total, err
		}
		if !full { // the socket is empty: another call would only tell that
			return total, nil
		}
	}
	return total, nil
}

// read makes one system call. full: there may be more.
func (c *Conn) read() (n int, full bool, err error) {
	if c.guard != nil {
		return c.readRecords()
	}
	var e syscall.Errno
	if c.inside && c.left >= direct && c.r == c.w && c.sink.Gate != nil && c.sink.File == nil {
		if c.sink.Gate.Device() != nil {
			return c.readStaged()
		}
		k := min(c.left, rxShare)
		if b, ok := c.sink.Gate.Enter(c.sink.Off, k); ok {
			c.r, c.w = 0, 0
			n, e = c.vin.Recv(c.fd, b, c.in[:ahead])
			c.sink.Gate.Leave()
			if e == 0 && n > 0 {
				placed := min(int64(n), k)
				c.sink.Off += placed
				c.left -= placed
				c.w = n - int(placed)
			}
			return c.result(n, int(k)+ahead, e)
		}
		c.sink.Gate, c.whole = nil, false
	}
	if c.r > 0 {
		c.w = copy(c.in, c.in[c.r:c.w])
		c.r = 0
	}
	b := c.in[c.w:]
	if !c.wide {
		b = b[:min(len(b), short)]
	}
	n, e = socket.Recv(c.fd, b)
	c.w += max(n, 0)
	c.wide = n == len(b)
	return c.result(n, len(b), e)
}

// readStaged is read for a payload that goes to a device.
func (c *Conn) readStaged() (n int, full bool, err error) {
	b, e := []byte(nil), syscall.Errno(0)
	if b, c.sink.Err = c.inStage.get(c.sink.Gate.Device()); c.sink.Err != nil {
		c.sink.Gate, c.whole = nil, false
		return c.read()
	}
	b = b[c.placed:min(int64(len(b)), int64(c.placed)+c.left)]
	c.r, c.w = 0, 0
	n, e = c.vin.Recv(c.fd, b, c.in[:ahead])
	if e == 0 && n > 0 {
		k := min(n, len(b))
		c.placed += k
		c.left -= int64(k)
		c.w = n - k
		c.unload(c.left == 0)
	}
	return c.result(n, len(b)+ahead, e)
}

// unload copies what is in inStage to the device, if that is full or there is nothing else to come.
func (c *Conn) unload(last bool) {
	if s := &c.sink; c.placed > 0 && (last || c.placed == len(c.inStage.b)) && s.Gate != nil {
		ok := false
		if ok, s.Err = s.Gate.Store(c.inStage.b[:c.placed], s.Off); !ok {
			s.Gate, c.whole = nil, false
		}
		s.Off += int64(c.placed)
		c.placed = 0
	}
}

func (c *Conn) result(n, want int, e syscall.Errno) (int, bool, error) {
	switch {
	case e == unix.EAGAIN:
		return 0, false, nil
	case e != 0:
		return 0, false, os.NewSyscallError("recv", e)
	case n == 0 && c.r == c.w && !c.inside && (c.guard == nil || c.guard.p == c.guard.q):
		return 0, false, ErrEnded
	case n == 0:
		return 0, false, fmt.Errorf("the peer closed the connection within a frame: %w", io.ErrUnexpectedEOF)
	}
	return n, n == want, nil
}

// consume handles what is in the buffer.
func (c *Conn) consume() error {
	for {
		if c.inside {
			if k := min(int64(c.w-c.r), c.left); k > 0 {
				c.store(c.in[c.r : c.r+int(k)])
				c.r += int(k)
				c.left -= k
			}
			if c.left > 0 {
				return nil
			}
			c.inside = false
			s := c.sink
			c.sink = Sink{}
			if s.Token != nil {
				if err := c.handler.End(c, s, c.whole); err != nil {
					return err
				}
			}
		}
		b := c.in[c.r:c.w]
		if len(b) < wire.HeaderSize {
			return nil
		}
		h := wire.Decode(b)
		ext, err := h.Check()
		if err != nil {
			return err
		}
		if len(b) < wire.HeaderSize+ext {
			return nil
		}
		s, err := c.handler.Frame(c, h, b[wire.HeaderSize:wire.HeaderSize+ext])
		if err != nil {
			return err
		}
		c.r += wire.HeaderSize + ext
		c.inside, c.sink, c.whole, c.placed = true, s, true, 0
		c.left = int64(h.Size) - int64(ext)
	}
}

// store puts b to the payload's place.
func (c *Conn) store(b []byte) {
	s := &c.sink
	switch {
	case s.Gate != nil && s.File != nil:
		_, ok := s.Gate.Enter(0, 0)
		if ok {
			_, s.Err = s.File.WriteAt(b, s.Off)
			s.Gate.Leave()
			ok = s.Err == nil
		}
		if !ok {
			s.Gate, c.whole = nil, false
		}
	case s.Gate != nil && s.Gate.Device() != nil:
		c.storeStaged(b)
		return
	case s.Gate != nil:
		if ok, _ := s.Gate.Store(b, s.Off); !ok {
			s.Gate, c.whole = nil, false
		}
	case s.Buf != nil:
		copy(s.Buf[s.Off:], b)
	default:
		c.whole = false
	}
	s.Off += int64(len(b))
}

// storeStaged is store for a device.
func (c *Conn) storeStaged(b []byte) {
	last := int64(len(b)) == c.left
	for s := &c.sink; len(b) > 0 && s.Gate != nil; {
		at, err := c.inStage.get(s.Gate.Device())
		if err != nil {
			s.Gate, s.Err, c.whole = nil, err, false
			return
		}
		n := copy(at[c.placed:], b)
		c.placed += n
		b = b[n:]
		c.unload(last && len(b) == 0)
	}
}

// arm has the loop woken when there is something to receive, or room to send.
func (c *Conn) arm() error {
	mask := uint32(unix.EPOLLIN | unix.EPOLLRDHUP | unix.EPOLLONESHOT)
	if c.stalled.Load() != 0 {
		mask |= unix.EPOLLOUT
	}
	e := epoll.Event(mask, c.id)
	return c.loop.poll.Control(unix.EPOLL_CTL_MOD, c.fd, &e)
}

// release closes the descriptor and tells the handler. The loop calls it.
func (c *Conn) release() {
	c.rx.Lock()
	defer c.rx.Unlock()
	if c.closed {
		return
	}
	c.mu.Lock()
	for c.flushing {
		c.quiet.Wait()
	}
	c.flushing = true // for ever
	c.first, c.last, c.cur, c.ctl, c.out, c.rest, c.staged = nil, nil, nil, nil, nil, 0, nil
	c.mu.Unlock()
	c.closed = true
	c.inStage.release()
	c.outStage.release()
	unix.Close(c.fd)
	c.handler.Broken(c, c.Err())
}

func now() int64 { return int64(time.Since(start)) }

var start = time.Now()
