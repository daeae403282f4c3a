// Package unixtest is a transport over Unix sockets, for tests. It is the least that a package has
// to have to be a transport: links without further capabilities, whose frames two goroutines move.
package unixtest

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"
	"regexp"
	"sync"
	"time"

	"tutti/internal/ident"
	"tutti/internal/trust"
	"tutti/p2p"
)

// Name is the name of the transport.
const Name = "unix"

const purpose = "unixtest"

// Transport implements p2p.Transport for ranks of one machine.
type Transport struct {
	ctx   context.Context // ends at Close
	close context.CancelFunc

	mu       sync.Mutex
	host     p2p.Host
	acceptor *trust.Acceptor
	served   sync.WaitGroup
}

// New returns a transport that does not listen yet.
func New() *Transport {
	t := new(Transport)
	t.ctx, t.close = context.WithCancel(context.Background())
	return t
}

// Name implements p2p.Transport.
func (t *Transport) Name() string { return Name }

// valid is what an endpoint looks like: the address of an abstract socket, with the hash of the
// place where it exists.
var valid = regexp.MustCompile(`^@tutti-unixtest-([0-9a-f]{16})-[0-9a-f]{16}$`)

func here() (string, error) {
	place, err := ident.Here()
	return fmt.Sprintf("%016x", place.Hash()), err
}

// Listen implements p2p.Transport.
func (t *Transport) Listen(ctx context.Context, h p2p.Host) ([]byte, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.ctx.Err() != nil || t.host != nil {
		return nil, fmt.Errorf("unixtest: Listen: %w, or already listening", p2p.ErrClosed)
	}
	place, err := here()
	if err != nil {
		return nil, err
	}
	at := fmt.Sprintf("@tutti-unixtest-%s-%016x", place, ident.New())
	l, err := new(net.ListenConfig).Listen(ctx, "unix", at)
	if err != nil {
		return nil, err
	}
	t.host = h
	t.acceptor = &trust.Acceptor{Listener: l, Secret: h.Secret(), Purpose: purpose, Timeout: p2p.HandshakeTimeout,
		Admit: t.admit, Accepted: t.accepted,
		Lost: func(h trust.Hello) { t.host.Lost(p2p.IdentityOf(h.FromRank, h.FromIncarnation)) }}
	t.served.Go(t.acceptor.Serve)
	probe, err := new(net.Dialer).DialContext(ctx, "unix", at)
	if err != nil {
		return nil, fmt.Errorf("unixtest: the listener does not answer: %w", err)
	}
	return []byte(at), probe.Close()
}

func (t *Transport) admit(_ net.Conn, h trust.Hello) error {
	if to, self := p2p.IdentityOf(h.ToRank, h.ToIncarnation), t.host.Self(); to != self {
		return &trust.Refusal{Code: trust.CodeStale, Text: fmt.Sprintf("%v listens here, not %v", self, to)}
	}
	return p2p.RefusalOf(t.host.Admit(p2p.IdentityOf(h.FromRank, h.FromIncarnation)))
}

func (t *Transport) accepted(c net.Conn, h trust.Hello, _ *trust.Session) {
	from := p2p.IdentityOf(h.FromRank, h.FromIncarnation)
	t.host.Accepted(from, newLink(from, c.(*net.UnixConn), t.host.Wake))
}

// Reaches implements p2p.Transport.
func (t *Transport) Reaches(endpoint []byte) error {
	m := valid.FindSubmatch(endpoint)
	if m == nil {
		return fmt.Errorf("unixtest: %q is no endpoint of this transport", endpoint)
	}
	place, err := here()
	if err == nil && string(m[1]) != place {
		err = errors.New("unixtest: the peer is on another machine")
	}
	return err
}

// Dial implements p2p.Transport.
func (t *Transport) Dial(ctx context.Context, to p2p.Identity, endpoint []byte) (p2p.Link, error) {
	fail := func(err error) (p2p.Link, error) { return nil, fmt.Errorf("unixtest: dial %v: %w", to, err) }
	t.mu.Lock()
	host := t.host
	t.mu.Unlock()
	if host == nil || t.ctx.Err() != nil {
		return fail(p2p.ErrClosed)
	}
	if err := t.Reaches(endpoint); err != nil {
		return fail(err)
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	defer context.AfterFunc(t.ctx, cancel)()
	var c net.Conn
	err := trust.Redial(ctx, func() (err error) {
		if c, err = new(net.Dialer).DialContext(ctx, "unix", string(endpoint)); err != nil {
			return fmt.Errorf("%w: %w", p2p.ErrPeerGone, err)
		}
		if err = prove(ctx, c, host, to); err != nil {
			c.Close()
		}
		return err
	})
	switch {
	case t.ctx.Err() != nil:
		err = p2p.ErrClosed
	case ctx.Err() != nil:
		err = ctx.Err()
	case err == nil:
		return newLink(to, c.(*net.UnixConn), host.Wake), nil
	}
	if c != nil {
		c.Close()
	}
	return fail(p2p.FromRefusal(err))
}

// prove authenticates both ends of c.
func prove(ctx context.Context, c net.Conn, h p2p.Host, to p2p.Identity) error {
	c.SetDeadline(time.Now().Add(2 * p2p.HandshakeTimeout))
	stop := context.AfterFunc(ctx, func() { c.SetDeadline(time.Unix(1, 0)) })
	self := h.Self()
	_, err := trust.Client(c, h.Secret(), purpose, trust.Hello{FromRank: self.Wire(), FromIncarnation: self.Incarnation,
		ToRank: to.Wire(), ToIncarnation: to.Incarnation}, false)
	if stop() && err == nil {
		err = c.SetDeadline(time.Time{})
	}
	return err
}

// Close implements p2p.Transport.
func (t *Transport) Close() error {
	t.close()
	t.mu.Lock()
	a := t.acceptor
	t.mu.Unlock()
	if a != nil {
		a.Close()
	}
	t.served.Wait()
	return nil
}

const (
	maxFrame = 64 << 10
	depth    = 4 // frames in each direction
)

// link implements p2p.Link. One goroutine writes what is in out to the connection, another one
// reads from it into in.
type link struct {
	name string
	conn *net.UnixConn
	wake func()
	wg   sync.WaitGroup

	mu      sync.Mutex
	change  sync.Cond // something below has changed
	out, in queue
	taken   int  // bytes of in's first frame that Fill has moved
	filling bool // Fill was called for in's first frame
	refused bool // Send or Flush was, and out has not been empty since
	armed   bool
	closed  bool
	failure error // nothing is sent or received any more
	lost    error // nothing is sent any more
}

// queue holds frames in fixed memory.
type queue struct {
	frames   [depth]frame
	first, n int
}

type frame struct {
	header p2p.Header
	data   [p2p.HeaderSize + maxFrame]byte // the encoded header, and the payload
}

func (q *queue) head() *frame { return &q.frames[q.first] }
func (q *queue) free() *frame { return &q.frames[(q.first+q.n)%depth] }
func (q *queue) pop()         { q.first, q.n = (q.first+1)%depth, q.n-1 }

func (f *frame) payload() []byte { return f.data[p2p.HeaderSize:][:f.header.Len] }

func newLink(to p2p.Identity, c *net.UnixConn, wake func()) *link {
	l := &link{name: fmt.Sprintf("unixtest link to %v", to), conn: c, wake: wake}
	l.change.L = &l.mu
	l.wg.Go(l.write)
	l.wg.Go(l.read)
	return l
}

// write moves frames from out to the connection. It records in lost why it cannot any more: a peer
// that is gone may have sent frames that read has yet to take, and fails the link after them.
func (l *link) write() {
	l.mu.Lock()
	defer l.mu.Unlock()
	for {
		for l.out.n == 0 && l.failure == nil {
			l.change.Wait()
		}
		if l.failure != nil {
			return
		}
		f := l.out.head()
		l.mu.Unlock()
		_, err := l.conn.Write(f.data[:p2p.HeaderSize+f.header.Len])
		l.mu.Lock()
		if err != nil {
			l.lost = fmt.Errorf("%s: %w: %w", l.name, p2p.ErrPeerGone, err)
			l.conn.CloseRead()
			l.changedLocked()
			return
		}
		if l.out.pop(); l.out.n == 0 {
			l.changedLocked()
		}
	}
}

// read moves frames from the connection to in.
func (l *link) read() {
	for {
		l.mu.Lock()
		for l.in.n == depth && l.failure == nil {
			l.change.Wait()
		}
		f, failed := l.in.free(), l.failure != nil
		l.mu.Unlock()
		if failed {
			return
		}
		err := l.receive(f)
		l.mu.Lock()
		if err != nil {
			l.failLocked(err)
			l.mu.Unlock()
			return
		}
		l.in.n++
		l.changedLocked()
		l.mu.Unlock()
	}
}

// receive reads the next frame into f.
func (l *link) receive(f *frame) error {
	if err := readFull(l.conn, f.data[:p2p.HeaderSize]); err != nil {
		return err
	}
	h := &f.header
	b := f.data[:]
	h.Decode((*[p2p.HeaderSize]byte)(b))
	if h.Len > maxFrame {
		return fmt.Errorf("%w: a frame of %d bytes, at most %d are allowed", p2p.ErrProtocol, h.Len, maxFrame)
	}
	return readFull(l.conn, f.payload())
}

func readFull(c net.Conn, b []byte) error {
	for len(b) > 0 {
		n, err := c.Read(b)
		if err != nil {
			return fmt.Errorf("%w: %w", p2p.ErrPeerGone, err)
		}
		b = b[n:]
	}
	return nil
}

// changedLocked tells the goroutines and, if Arm asked for it, the host of a change.
func (l *link) changedLocked() {
	l.change.Broadcast()
	if l.armed {
		l.armed = false
		l.wake()
	}
}

// failLocked records why the link has failed; the first reason stays.
func (l *link) failLocked(err error) {
	if l.failure == nil {
		l.failure = fmt.Errorf("%s: %w", l.name, err)
	}
	l.changedLocked()
}

// Send implements p2p.Link.
func (l *link) Send(h *p2p.Header, payload []byte) (bool, error) {
	if int(h.Len) != len(payload) || len(payload) > maxFrame {
		return false, fmt.Errorf("%s: a frame of %d bytes with %d bytes of payload; both must be equal and at most %d",
			l.name, h.Len, len(payload), maxFrame)
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if err := cmp.Or(l.failure, l.lost); err != nil {
		return false, err
	}
	if l.out.n == depth {
		l.refused = true
		return false, nil
	}
	f := l.out.free()
	f.header = *h
	b := f.data[:]
	h.Encode((*[p2p.HeaderSize]byte)(b))
	copy(f.payload(), payload)
	l.out.n++
	l.change.Broadcast()
	return true, nil
}

// Flush implements p2p.Link.
func (l *link) Flush() (bool, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if err := cmp.Or(l.failure, l.lost); err != nil {
		return false, err
	}
	l.refused = l.refused || l.out.n > 0 // a Send may wait for Arm
	return l.out.n == 0, nil
}

// Recv implements p2p.Link.
func (l *link) Recv() (*p2p.Header, []byte, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	switch {
	case l.closed || l.in.n == 0:
		return nil, nil, l.failure
	case l.filling:
		return &l.in.head().header, nil, nil
	}
	f := l.in.head()
	return &f.header, f.payload(), nil
}

// Fill implements p2p.Link.
func (l *link) Fill(dst []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed || l.in.n == 0 {
		return 0, l.failure
	}
	l.filling = true
	n := copy(dst, l.in.head().payload()[l.taken:])
	l.taken += n
	return n, nil
}

// Release implements p2p.Link.
func (l *link) Release() {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.in.n > 0 {
		l.in.pop()
		l.taken, l.filling = 0, false
		l.change.Broadcast()
	}
}

// MaxFrame implements p2p.Link.
func (l *link) MaxFrame() int { return maxFrame }

// Arm implements p2p.Link.
func (l *link) Arm() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.failure != nil || l.lost != nil || l.in.n > 0 || l.refused && l.out.n == 0 {
		l.refused = l.refused && l.out.n > 0
		return true
	}
	l.armed = true
	return false
}

// Disarm implements p2p.Link.
func (l *link) Disarm() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.armed = false
}

// Err implements p2p.Link.
func (l *link) Err() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	return cmp.Or(l.failure, l.lost)
}

// Close implements p2p.Link. What was flushed is in the kernel, which delivers it.
func (l *link) Close() error {
	l.mu.Lock()
	l.closed = true
	l.failLocked(p2p.ErrClosed)
	l.mu.Unlock()
	l.conn.Close()
	l.wg.Wait()
	return nil
}
