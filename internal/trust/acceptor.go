package trust

import (
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"tutti/internal/epoll"
	"tutti/internal/files"
	"tutti/internal/ident"
)

// MaxUnproved bounds the unauthenticated connections of one listener. They also take at most a
// sixteenth of the process's descriptors.
const MaxUnproved = 1024

// DefaultMax is MaxUnproved within the limit of this process's descriptors.
func DefaultMax() int {
	if limit, known := files.Limit(); known && limit/16 < MaxUnproved {
		return max(int(limit/16), 16)
	}
	return MaxUnproved
}

// Acceptor runs the accepting half for a listener. An unauthenticated connection costs a descriptor
// and less than a kilobyte, and no goroutine: one goroutine accepts, and one reads from all
// connections. A connection is closed when it sends an invalid message, when its first message does
// not arrive within Timeout, or its second within Timeout after that. If there are more than Max,
// some are closed: see pending. A member of the job has usually sent its first message by then,
// which strangers cannot make; if it was slow it dials again. A client where none is taken keeps
// its place among strangers, and has Timeout for both messages.
type Acceptor struct {
	Listener net.Listener // its connections implement syscall.Conn
	Secret   []byte       // the job's, of at least MinSecret bytes
	Purpose  string
	Timeout  time.Duration
	Max      int // unproved connections at once; default DefaultMax
	// Clients says that holders of a client's key are taken, too. If not, such an end is refused
	// after its proof, and Admit is not asked.
	Clients bool
	// Agree asks for key agreement. This costs a scalar multiplication on the curve for each
	// connection whose first message was valid, and another one if keys are made: see Session.
	Agree bool
	// Admit decides whether an authenticated end is accepted: nil: it is; a *Refusal keeps its
	// code, any other error is sent as code 1. It must compare the Hello's To… with itself and,
	// with Clients, look at the Hello's Client. It runs in its own goroutine.
	Admit func(net.Conn, Hello) error
	// Accepted owns the connection, whose deadline is cleared. It must not block for long. The
	// session is nil without Agree.
	Accepted func(net.Conn, Hello, *Session)
	// Lost, if not nil, is called in place of Accepted for an end that Admit has accepted, if its
	// connection fails before it has the verdict, or Close comes between.
	Lost    func(Hello)
	Refused func(net.Conn, error) // may be nil; the connection is about to be closed; see LogRefused
	// Failing, if not nil, is called by Serve for every try to accept that fails; see LogFailing.
	Failing func(error)

	wg sync.WaitGroup // the goroutines

	mu       sync.Mutex
	poll     *epoll.Instance // nil: Serve has not begun
	pending  *pending
	unproved map[uint64]*candidate // those in pending, by id
	proved   map[*candidate]struct{}
	last     uint64
	closed   bool
	end      chan struct{} // closed by Close
}

// ErrDisplaced says that a connection was closed in favour of others: see Acceptor.
var ErrDisplaced = errors.New("it had proved nothing when there were too many connections")

// source is the origin of a connection as the kernel knows it: the peer's address, or its process.
type source struct {
	addr netip.Addr // of IPv6 the prefix of 64 bits, all of which one host may have
	uid  uint32
	pid  int32
}

// candidate is a connection within the handshake.
type candidate struct {
	member
	conn net.Conn
	raw  syscall.RawConn
	id   uint64 // in the poll
	half half
	n    int // bytes of in that have arrived
	in   [max(openingSize, proofSize)]byte
}

// dropped is a connection to close, and the reason.
type dropped struct {
	c   *candidate
	err error
}

// Serve accepts until Close closes the listener, and then returns after the last handshake ended.
func (a *Acceptor) Serve() {
	defer a.wg.Wait()
	pause := shortPause
	for {
		err := a.begin()
		if err == nil {
			var some bool
			if some, err = a.accept(); some {
				pause = shortPause
			}
		}
		if a.isClosed() || errors.Is(err, net.ErrClosed) {
			a.Close()
			a.mu.Lock()
			if a.poll != nil {
				a.poll.Close() // ends read
			}
			a.mu.Unlock()
			return
		}
		// For example, no descriptors are left: the listener stays open.
		if a.Failing != nil {
			a.Failing(err)
		}
		if out := a.shed(); len(out) > 0 {
			a.drop(out)
			continue
		}
		select { // retrying at once would only use the CPU
		case <-a.ended():
		case <-time.After(pause):
		}
		pause = min(2*pause, longPause)
	}
}

// Serve's first and last pause after an Accept that failed.
const (
	shortPause = 5 * time.Millisecond
	longPause  = time.Second
)

// begin makes what Serve needs, once.
func (a *Acceptor) begin() error {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.poll != nil || a.closed {
		return nil
	}
	p, err := epoll.New()
	if err != nil {
		return err
	}
	if a.Max <= 0 {
		a.Max = DefaultMax()
	}
	a.poll, a.pending, a.unproved, a.proved = p, newPending(a.Max), map[uint64]*candidate{}, map[*candidate]struct{}{}
	a.wg.Go(a.read)
	return nil
}

// accept accepts connections until that fails; some: there were any.
func (a *Acceptor) accept() (some bool, err error) {
	for {
		conn, err := a.Listener.Accept()
		if err != nil {
			return some, err
		}
		some = true
		c, err := newCandidate(conn)
		if err != nil {
			conn.Close()
			continue
		}
		a.drop(a.enter(c))
	}
}

func newCandidate(conn net.Conn) (*candidate, error) {
	sc, ok := conn.(syscall.Conn)
	if !ok {
		return nil, fmt.Errorf("a connection without a descriptor: %T", conn)
	}
	raw, err := sc.SyscallConn()
	if err != nil {
		return nil, err
	}
	c := &candidate{conn: conn, raw: raw}
	c.source, c.who = sourceOf(conn, raw), c
	return c, nil
}

// enter adds a connection, reads what has arrived, and returns the connections to drop.
func (a *Acceptor) enter(c *candidate) (out []dropped) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.closed {
		return []dropped{{c, net.ErrClosed}}
	}
	a.last++
	c.id = a.last
	watch := epoll.Event(unix.EPOLLIN|unix.EPOLLRDHUP, c.id)
	if err := a.poll.ControlConn(unix.EPOLL_CTL_ADD, c.raw, &watch); err != nil {
		return []dropped{{c, err}}
	}
	a.unproved[c.id] = c
	now := time.Now()
	idle := a.pending.size() == 0
	if victim := a.pending.enter(&c.member, now); victim != nil {
		out = append(out, a.displacedLocked(victim))
	}
	if idle {
		a.poll.WakeAt(now.Add(a.Timeout))
	}
	return a.advanceLocked(c, now, out)
}

// displacedLocked removes a connection that another one has displaced.
func (a *Acceptor) displacedLocked(m *member) dropped {
	c := m.who
	a.forgetLocked(c)
	return dropped{c, ErrDisplaced}
}

// shed makes room when this process has no descriptors left.
func (a *Acceptor) shed() (out []dropped) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.pending != nil {
		if m := a.pending.shed(); m != nil {
			out = append(out, a.displacedLocked(m))
		}
	}
	return out
}

func (a *Acceptor) forgetLocked(c *candidate) {
	a.pending.leave(&c.member)
	delete(a.unproved, c.id)
}

// read reads from unauthenticated connections, and ends those whose time has run out.
func (a *Acceptor) read() {
	var ids []uint64
	for {
		var err error
		if ids, err = a.poll.Wait(ids[:0]); err != nil {
			return // closed
		}
		var out []dropped
		a.mu.Lock()
		now := time.Now()
		for _, id := range ids {
			if c := a.unproved[id]; c != nil {
				out = a.advanceLocked(c, now, out)
			}
		}
		for m := a.pending.oldest(); m != nil; m = a.pending.oldest() {
			if end := m.since.Add(a.Timeout); now.Before(end) {
				a.poll.WakeAt(end)
				break
			}
			a.forgetLocked(m.who)
			out = append(out, dropped{m.who, os.ErrDeadlineExceeded})
		}
		a.mu.Unlock()
		a.drop(out)
	}
}

// advanceLocked handles what has arrived on c, answers it, and adds the connections to drop to out.
func (a *Acceptor) advanceLocked(c *candidate, now time.Time, out []dropped) []dropped {
	fail := func(err error) []dropped {
		a.forgetLocked(c)
		return append(out, dropped{c, err})
	}
	for {
		n, err := c.receive(c.in[c.n:c.half.want()])
		if err != nil {
			return fail(err)
		}
		c.n += n
		if answer, wrong := c.half.begin(c.in[:c.n]); wrong != nil {
			c.send(answer) // best effort
			return fail(wrong)
		}
		if c.n < c.half.want() {
			return out
		}
		in := c.in[:c.n]
		c.n = 0
		if !c.half.opened() {
			answer, wrong := c.half.opening(a, in)
			if err := c.send(answer); wrong != nil || err != nil {
				return fail(errors.Join(wrong, err))
			}
			if c.half.client != "" && !a.Clients {
				continue // it makes no room for itself among those that can be accepted
			}
			if victim := a.pending.open(&c.member, now); victim != nil {
				out = append(out, a.displacedLocked(victim))
			}
			continue
		}
		who, answer, wrong := c.half.proof(in)
		if wrong != nil {
			c.send(answer) // best effort
			return fail(wrong)
		}
		a.forgetLocked(c)
		a.poll.ControlConn(unix.EPOLL_CTL_DEL, c.raw, nil)
		a.proved[c] = struct{}{} // authenticated: only Close and its deadline end it
		a.wg.Go(func() { a.finish(c, who) })
		return out
	}
}

// finish calls Admit for an authenticated end, and sends the verdict.
func (a *Acceptor) finish(c *candidate, who Hello) {
	c.conn.SetDeadline(time.Now().Add(a.Timeout))
	s, err := a.answer(c.conn, &c.half, who)
	a.mu.Lock()
	delete(a.proved, c)
	late := err == nil && a.closed
	a.mu.Unlock()
	if late {
		err = net.ErrClosed
		a.lose(who)
	}
	if err != nil {
		a.drop([]dropped{{c, err}})
		return
	}
	c.conn.SetDeadline(time.Time{})
	a.Accepted(c.conn, who, s)
}

// answer decides on an authenticated end, and sends the verdict.
func (a *Acceptor) answer(conn net.Conn, h *half, who Hello) (*Session, error) {
	var refused error
	if who.Client != "" && !a.Clients {
		refused = &Refusal{Code: 1, Text: fmt.Sprintf("the key of client %s opens endpoints, and no service of the "+
			"ranks: this one needs the job's own secret", who.Client)}
	} else {
		refused = a.Admit(conn, who)
	}
	_, err := conn.Write(h.verdict(refused))
	if refused != nil {
		return nil, refused
	}
	if err != nil {
		a.lose(who)
		return nil, err
	}
	return h.session(), nil
}

func (a *Acceptor) lose(who Hello) {
	if a.Lost != nil {
		a.Lost(who)
	}
}

// Handshake runs the accepting half on one connection, with a's Secret, Purpose, Clients, Agree and
// Admit. conn's deadline bounds it. When it returns an error the caller closes conn. A listener
// that strangers can reach needs Serve.
func (a *Acceptor) Handshake(conn net.Conn) (Hello, *Session, error) {
	if err := checkKey(a.Secret); err != nil {
		return Hello{}, nil, err
	}
	var h half
	var buf [max(openingSize, proofSize)]byte
	in := buf[:h.want()]
	if _, err := io.ReadFull(conn, in[:magicSize]); err != nil {
		return Hello{}, nil, ended(err)
	}
	if _, wrong := h.begin(in[:magicSize]); wrong == nil { // else the rest will not come
		if _, err := io.ReadFull(conn, in[magicSize:]); err != nil {
			return Hello{}, nil, ended(err)
		}
	}
	answer, err := h.opening(a, in)
	if err != nil {
		conn.Write(answer) // best effort
		return Hello{}, nil, err
	}
	if _, err := conn.Write(answer); err != nil {
		return Hello{}, nil, err
	}
	in = buf[:h.want()]
	if _, err := io.ReadFull(conn, in); err != nil {
		return Hello{}, nil, ended(err)
	}
	who, answer, err := h.proof(in)
	if err != nil {
		conn.Write(answer) // best effort
		return Hello{}, nil, err
	}
	s, err := a.answer(conn, &h, who)
	return who, s, err
}

// drop closes connections. Without the lock, because Refused may block.
func (a *Acceptor) drop(out []dropped) {
	for _, d := range out {
		if a.Refused != nil {
			a.Refused(d.c.conn, d.err)
		}
		d.c.conn.Close()
	}
}

func (a *Acceptor) ended() chan struct{} {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.endLocked()
}

// endLocked returns a channel that Close closes.
func (a *Acceptor) endLocked() chan struct{} {
	if a.end == nil {
		a.end = make(chan struct{})
	}
	return a.end
}

func (a *Acceptor) isClosed() bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.closed
}

// Close closes the listener and the connections within the handshake.
func (a *Acceptor) Close() error {
	a.mu.Lock()
	if a.closed {
		a.mu.Unlock()
		return nil
	}
	a.closed = true
	close(a.endLocked())
	var out []dropped
	for _, c := range a.unproved {
		a.forgetLocked(c)
		out = append(out, dropped{c, net.ErrClosed})
	}
	for c := range a.proved {
		c.conn.Close() // ends its handshake
	}
	a.mu.Unlock()
	a.drop(out)
	return a.Listener.Close()
}

// receive reads what is available. 0 bytes without an error mean that nothing is.
func (c *candidate) receive(b []byte) (n int, err error) {
	e := c.raw.Read(func(fd uintptr) bool {
		for {
			if n, err = unix.Read(int(fd), b); err != unix.EINTR {
				return true
			}
		}
	})
	switch {
	case e != nil:
		return 0, e
	case err == unix.EAGAIN:
		return 0, nil
	case err != nil:
		return 0, os.NewSyscallError("read", err)
	case n == 0:
		return 0, ended(io.EOF)
	}
	return n, nil
}

// send sends b, which fits into the buffer of a socket that nothing has been sent on.
func (c *candidate) send(b []byte) (err error) {
	n := 0
	e := c.raw.Write(func(fd uintptr) bool {
		for {
			if n, err = unix.SendmsgN(int(fd), b, nil, nil, unix.MSG_DONTWAIT|unix.MSG_NOSIGNAL); err != unix.EINTR {
				return true
			}
		}
	})
	switch {
	case e != nil:
		return e
	case err != nil:
		return os.NewSyscallError("sendmsg", err)
	case n < len(b):
		return io.ErrShortWrite
	}
	return nil
}

// sourceOf returns the source of a connection.
func sourceOf(conn net.Conn, raw syscall.RawConn) (s source) {
	switch at := conn.RemoteAddr().(type) {
	case *net.TCPAddr:
		s.addr = at.AddrPort().Addr().Unmap().WithZone("")
		if s.addr.Is6() {
			if p, err := s.addr.Prefix(64); err == nil {
				s.addr = p.Addr()
			}
		}
	case *net.UnixAddr:
		if cred, err := ident.Peer(raw); err == nil {
			s.uid, s.pid = cred.Uid, cred.Pid
		}
	}
	return s
}
