package tcp

import (
	"fmt"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"tutti/p2p"
	"tutti/p2p/rma"
)

// framed is a link whose puts and gets travel as frames. It implements p2p.OneSided.
type framed struct {
	*rma.Frames
	link *link
}

// Distant implements p2p.Distant.
func (framed) Distant() {}

// Delivers implements p2p.Deliverer.
func (f framed) Delivers() bool { return f.link.Delivers() }

// link implements p2p.Link over a connection. Each direction is an independent state machine.
//
// The polling goroutine owns all fields except mu, closed, failure and armed.
type link struct {
	name     string // "tcp link to rank 3 (incarnation …) at 10.0.0.3:29500"
	maxFrame int
	poller   *poller
	mu       sync.Mutex // held during system calls on the stream's descriptor, against Close
	closed   atomic.Bool
	done     chan struct{} // closed when Close is through
	failure  atomic.Pointer[failure]
	armed    atomic.Bool
	stream   stream

	// Receiving.
	buf    []byte // buf[r:w] has arrived and was not consumed
	r, w   int
	ahead  int        // size of one read into buf
	head   p2p.Header // the current frame's
	cur    bool       // there is a current frame
	filled bool       // Fill was called for it
	left   int        // bytes of its payload that were not consumed
	ended  bool       // the socket delivers nothing any more; failure says why

	// Sending.
	scratch [headerSpace + copyLimit]byte
	refused bool // Send returned false, and Arm has not reported room since
}

type failure struct{ err error }

// gone is the reason of a failure that wraps p2p.ErrPeerGone.
func gone(why string) error { return fmt.Errorf("%w: %s", p2p.ErrPeerGone, why) }

const (
	// A frame begins with its header and zeros, which the receiver ignores, of a cache line
	// together. The kernel copies a payload from where it is to a page of a socket's buffer, and
	// from there to its destination. If whole lines come before it, it begins in the page at a
	// multiple of 64, as memory of large vectors does. AMD's Zen 3 takes ten times as long for a
	// string move whose destination is 1 to 31 bytes behind its source, modulo 4096.
	headerSpace = 64
	// Payloads up to this size are collected in the receive buffer, longer ones are read to their
	// destination.
	inline = 16 << 10
	// Size of a read when a long payload may follow, most of which should bypass the receive
	// buffer.
	shortRead = 4 << 10
)

func newLink(name string, fd, maxFrame, buffer int, p *poller) (*link, error) {
	l := &link{name: name, maxFrame: maxFrame, poller: p, done: make(chan struct{}), buf: make([]byte, buffer),
		ahead: buffer}
	l.stream.link, l.stream.fd = l, fd
	if err := p.add(l); err != nil {
		return nil, err
	}
	return l, nil
}

// fail records why the link has failed; the first reason stays. It returns that reason.
func (l *link) fail(why error) error {
	l.failure.CompareAndSwap(nil, &failure{fmt.Errorf("%s: %w", l.name, why)})
	return l.failure.Load().err
}

func (l *link) failErrno(op string, e syscall.Errno) error {
	return l.fail(gone(op + ": " + e.Error()))
}

// Err implements p2p.Link.
func (l *link) Err() error {
	if f := l.failure.Load(); f != nil {
		return f.err
	}
	if l.closed.Load() {
		return l.errClosed()
	}
	return nil
}

func (l *link) errClosed() error { return fmt.Errorf("%s: %w on this side", l.name, p2p.ErrClosed) }

// MaxFrame implements p2p.Link.
func (l *link) MaxFrame() int { return l.maxFrame }

// Send implements p2p.Link.
func (l *link) Send(h *p2p.Header, payload []byte) (bool, error) {
	if uint64(h.Len) != uint64(len(payload)) || len(payload) > l.maxFrame {
		return false, fmt.Errorf("%s: a frame of %d bytes with %d bytes of payload was to be sent; both must be "+
			"equal and at most %d", l.name, h.Len, len(payload), l.maxFrame)
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.refused = true
	if done, err := l.flush(); !done {
		return false, err
	}
	if !l.stream.room() {
		return false, nil
	}
	head := l.scratch[:headerSpace]
	h.Encode((*[p2p.HeaderSize]byte)(head))
	taken, e := l.stream.put(head, payload)
	if e != 0 {
		return false, l.failErrno("send", e)
	}
	l.refused = !taken
	return taken, nil
}

// Gather implements p2p.Gatherer.
func (f *framed) Gather(h *p2p.Header, payload []byte) (bool, error) {
	if err := f.Frames.Err(); err != nil {
		return false, err
	}
	return f.link.Gather(h, payload)
}

// gathered is how many bytes of frames Gather keeps: they fit in a peer's receive buffer.
const gathered = 16 << 10

// Gather implements p2p.Gatherer.
func (l *link) Gather(h *p2p.Header, payload []byte) (bool, error) {
	n := headerSpace + len(payload)
	if n > gathered || uint64(h.Len) != uint64(len(payload)) {
		return l.Send(h, payload)
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if err := l.Err(); err != nil {
		return false, err
	}
	s := &l.stream
	if len(s.kept)-s.sent+n > gathered {
		l.refused = true
		if done, err := l.flush(); !done {
			return false, err
		}
		l.refused = false
	}
	head := l.scratch[:headerSpace]
	h.Encode((*[p2p.HeaderSize]byte)(head))
	s.kept = append(append(s.kept, head...), payload...)
	return true, nil
}

// Flush implements p2p.Link.
func (l *link) Flush() (bool, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.flush()
}

func (l *link) flush() (bool, error) {
	if l.failure.Load() != nil || l.closed.Load() {
		return false, l.Err()
	}
	if len(l.stream.kept) == 0 {
		return true, nil
	}
	done, e := l.stream.flush()
	if e != 0 {
		return false, l.failErrno("send", e)
	}
	return done, nil
}

// took interprets the result of a receiving call: it returns the number of bytes, and sets ended
// and failure at the end of the stream.
func (l *link) took(n int, e syscall.Errno) int {
	switch {
	case e == unix.EAGAIN:
	case e != 0:
		l.ended = true
		l.failErrno("receive", e)
	case n == 0:
		l.ended = true
		where := "at the end of a frame"
		if l.cur || l.w > l.r {
			where = "in the middle of a frame"
		}
		l.fail(gone("it closed the connection " + where))
	}
	return n
}

// read tries once to read more into the receive buffer, which must not hold a payload that the
// caller uses.
func (l *link) read() {
	if l.ended {
		return
	}
	if l.r > 0 {
		l.w = copy(l.buf, l.buf[l.r:l.w]) // less than a frame, so that it fits
		l.r = 0
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed.Load() {
		return
	}
	l.w += l.took(l.stream.recv(l.buf[l.w:min(len(l.buf), l.w+l.ahead)]))
}

// Recv implements p2p.Link.
func (l *link) Recv() (*p2p.Header, []byte, error) {
	if l.closed.Load() {
		return nil, nil, l.Err()
	}
	if !l.cur {
		if l.w-l.r < headerSpace {
			if l.read(); l.w-l.r < headerSpace {
				return l.none()
			}
		}
		l.head.Decode((*[p2p.HeaderSize]byte)(l.buf[l.r:]))
		if uint64(l.head.Len) > uint64(l.maxFrame) {
			l.ended = true
			return nil, nil, l.fail(fmt.Errorf("%w: it announced a frame of %d bytes, at most %d are allowed",
				p2p.ErrProtocol, l.head.Len, l.maxFrame))
		}
		l.r += headerSpace
		l.cur, l.filled, l.left = true, false, int(l.head.Len)
		if l.ahead = len(l.buf); l.left > inline {
			l.ahead = shortRead
		}
	}
	if l.left == 0 || l.filled {
		return &l.head, nil, nil
	}
	if l.w-l.r < l.left && l.left <= inline {
		l.read()
	}
	if l.w-l.r >= l.left {
		return &l.head, l.buf[l.r : l.r+l.left : l.r+l.left], nil
	}
	if l.ended {
		return l.none()
	}
	return &l.head, nil, nil
}

// none returns Recv's result when no frame is available.
func (l *link) none() (*p2p.Header, []byte, error) {
	if l.ended || l.failure.Load() != nil {
		return nil, nil, l.Err()
	}
	return nil, nil, nil
}

// Fill implements p2p.Link.
func (l *link) Fill(dst []byte) (int, error) {
	if l.closed.Load() {
		return 0, l.Err()
	}
	dst = dst[:min(len(dst), l.left)]
	l.filled = l.cur
	n := copy(dst, l.buf[l.r:l.w])
	l.r += n
	l.left -= n
	if n == len(dst) {
		return n, nil
	}
	if !l.ended {
		n += l.direct(dst[n:])
	}
	if n == 0 && (l.ended || l.failure.Load() != nil) {
		return 0, l.Err()
	}
	return n, nil
}

// direct reads payload to its destination and, in the same call, what follows its end into the
// empty receive buffer.
func (l *link) direct(dst []byte) int {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed.Load() {
		return 0
	}
	if len(dst) < l.left {
		n := l.took(l.stream.recv(dst))
		l.left -= n
		return n
	}
	l.r, l.w = 0, 0
	n := l.took(l.stream.recv2(dst, l.buf[:l.ahead]))
	if n > len(dst) {
		l.w = n - len(dst)
		n = len(dst)
	}
	l.left -= n
	return n
}

// Release implements p2p.Link.
func (l *link) Release() {
	if !l.cur {
		return
	}
	if l.left > 0 {
		if l.w-l.r < l.left {
			panic(fmt.Sprintf("%s: Release with %d bytes of the frame's payload not received", l.name, l.left))
		}
		l.r += l.left
		l.left = 0
	}
	l.cur = false
}

// Arm implements p2p.Link.
func (l *link) Arm() bool {
	if l.ended || l.cur && (l.left == 0 || l.w > l.r) || !l.cur && l.w-l.r >= headerSpace {
		return true
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed.Load() || l.failure.Load() != nil {
		return true
	}
	want, room := uint32(unix.EPOLLIN|unix.EPOLLRDHUP), true
	if len(l.stream.kept) > 0 || l.refused && !l.stream.room() {
		want |= unix.EPOLLOUT
		room = false
	}
	if l.refused && room {
		l.refused = false
		return true
	}
	l.armed.Store(true)
	if l.poller.watch(&l.stream, want) != nil {
		l.armed.Store(false)
		return true
	}
	return false
}

// Disarm implements p2p.Link. An event that the kernel still reports is ignored once, and serves
// the next Arm until then.
func (l *link) Disarm() { l.armed.Store(false) }

// Delivers implements p2p.Deliverer.
func (l *link) Delivers() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.failure.Load() == nil && !l.closed.Load() && l.stream.owes()
}

// lingerTime bounds how long Close waits for the peer's kernel to acknowledge what was sent.
const lingerTime = 500 * time.Millisecond

// Close implements p2p.Link.
func (l *link) Close() error {
	l.mu.Lock()
	first := l.closed.CompareAndSwap(false, true)
	l.mu.Unlock() // calls under way have ended, and new ones fail
	if !first {
		<-l.done
		return nil
	}
	l.poller.remove(l)
	if l.failure.Load() == nil {
		l.stream.finish(time.Now().Add(lingerTime))
	}
	unix.Close(l.stream.fd)
	l.poller.release()
	close(l.done)
	return nil
}
