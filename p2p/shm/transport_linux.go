package shm

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"net"
	"os"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"tutti/internal/files"
	"tutti/internal/ident"
	"tutti/internal/trust"
	"tutti/mem"
	"tutti/p2p"
	"tutti/p2p/ring"
)

const (
	name    = "shm"
	purpose = "shm"
)

// Transport implements p2p.Transport, p2p.Allocator, p2p.WritableAllocator and p2p.Exposer. Its
// links implement p2p.Mapper and p2p.OneSided.
type Transport struct {
	cfg     Config
	uid     uint32
	exports *exports
	timeout time.Duration // of a handshake, p2p.HandshakeTimeout; tests set it before Listen

	mu       sync.Mutex
	host     p2p.Host
	machine  string
	acceptor *trust.Acceptor
	closed   bool
	served   sync.WaitGroup
}

// New returns a transport that does not listen yet.
func New(cfg Config) *Transport {
	return &Transport{cfg: cfg.withDefaults(), uid: uint32(os.Geteuid()), exports: newExports(),
		timeout: p2p.HandshakeTimeout}
}

// Identify returns the identity that two processes must have in common to share memory through this
// package: the machine since its last boot, and the network namespace, which abstract socket names
// belong to.
func Identify() (string, error) {
	place, err := ident.Here()
	if err != nil {
		return "", fmt.Errorf("shm: %w", err)
	}
	id := place.Boot + " " + place.Network
	if len(id) > maxMachine {
		return "", fmt.Errorf("shm: boot id and network namespace %q are longer than %d bytes", id, maxMachine)
	}
	return id, nil
}

// Name implements p2p.Transport.
func (t *Transport) Name() string { return name }

// Listen implements p2p.Transport.
func (t *Transport) Listen(ctx context.Context, h p2p.Host) ([]byte, error) {
	if n := len(h.Secret()); n < trust.MinSecret {
		return nil, fmt.Errorf("shm: a job secret of %d bytes, want at least %d", n, trust.MinSecret)
	}
	machine, err := Identify()
	if err != nil {
		return nil, err
	}
	e := endpoint{uid: t.uid, machine: machine}
	rand.Read(e.name[:])
	t.mu.Lock()
	if t.closed || t.acceptor != nil {
		defer t.mu.Unlock()
		if t.closed {
			return nil, fmt.Errorf("shm: transport: %w", p2p.ErrClosed)
		}
		return nil, errors.New("shm: the transport listens already; make one for each rank")
	}
	var lc net.ListenConfig
	l, err := lc.Listen(ctx, "unix", e.address())
	if err != nil {
		t.mu.Unlock()
		return nil, fmt.Errorf("shm: listening on %s: %w", e.address(), err)
	}
	t.host, t.machine = h, machine
	t.acceptor = &trust.Acceptor{
		Listener: &sameUser{l.(*net.UnixListener), t.uid},
		Secret:   h.Secret(), Purpose: purpose, Timeout: t.timeout,
		Admit: t.admit, Accepted: t.accepted, Lost: t.lost, Refused: trust.LogRefused(t.cfg.Logger, "shm"),
		Failing: trust.LogFailing(t.cfg.Logger, "shm"),
	}
	t.served.Go(t.acceptor.Serve)
	t.served.Go(ring.Prepare) // SleepSeldom needs it later, when peers may be waiting for this rank
	t.mu.Unlock()
	conn, err := t.connect(ctx, e, h.Self())
	if err != nil {
		t.Close()
		if ctx.Err() != nil {
			return nil, fmt.Errorf("shm: the check of the listener was ended: %w", context.Cause(ctx))
		}
		return nil, fmt.Errorf("shm: the listener does not answer itself: %w", err)
	}
	conn.Read(make([]byte, 1)) // waits until the other end of the probe is closed, too
	conn.Close()
	return e.encode(), nil
}

// sameUser is a listener that drops connections of other users.
type sameUser struct {
	*net.UnixListener
	uid uint32
}

func (l *sameUser) Accept() (net.Conn, error) {
	for {
		conn, err := l.AcceptUnix()
		if err != nil {
			return nil, err
		}
		if checkPeer(conn, l.uid) == nil {
			return conn, nil
		}
		conn.Close()
	}
}

func (t *Transport) admit(_ net.Conn, h trust.Hello) error {
	self, from := t.host.Self(), p2p.IdentityOf(h.FromRank, h.FromIncarnation)
	if to := p2p.IdentityOf(h.ToRank, h.ToIncarnation); to != self {
		return p2p.RefusalOf(fmt.Errorf("%w: this is %v, not %v", p2p.ErrStale, self, to))
	}
	if from == self { // Listen's probe
		return nil
	}
	return p2p.RefusalOf(t.host.Admit(from))
}

// accepted makes the link's memory and passes it to the dialler.
func (t *Transport) accepted(conn net.Conn, h trust.Hello, _ *trust.Session) {
	from := p2p.IdentityOf(h.FromRank, h.FromIncarnation)
	if from == t.host.Self() {
		conn.Close()
		return
	}
	l, err := t.found(conn.(*net.UnixConn), from)
	if err != nil {
		t.cfg.Logger.Warn("shm: accepted connection is lost", "from", from, "reason", files.Explain(err))
		t.lost(h)
		return
	}
	t.host.Accepted(from, l)
}

// lost ends an admission whose connection has failed.
func (t *Transport) lost(h trust.Hello) {
	if from := p2p.IdentityOf(h.FromRank, h.FromIncarnation); from != t.host.Self() {
		t.host.Lost(from)
	}
}

func (t *Transport) found(conn *net.UnixConn, from p2p.Identity) (*link, error) {
	sock, err := newSocket(conn)
	if err != nil {
		conn.Close()
		return nil, err
	}
	fd, mem, err := newRing(linkBytes(t.cfg.RingBytes))
	if err == nil {
		if err = sock.send(message{kind: msgSetup, size: uint64(t.cfg.RingBytes), version: version}, fd); err != nil {
			unmap(mem)
		}
		unix.Close(fd)
	}
	if err != nil {
		var errno unix.Errno
		errors.As(err, &errno)
		sock.send(message{kind: msgFail, size: uint64(errno)}, -1)
		conn.Close()
		return nil, err
	}
	return newLink(t.host, from, t.exports, sock, mem, t.cfg.RingBytes, 1)
}

// Reaches implements p2p.Transport.
func (t *Transport) Reaches(b []byte) error {
	e, err := decodeEndpoint(b)
	if err != nil {
		return err
	}
	t.mu.Lock()
	here := t.machine
	t.mu.Unlock()
	if here == "" {
		if here, err = Identify(); err != nil {
			return err
		}
	}
	return e.reaches(here, t.uid)
}

// Dial implements p2p.Transport.
func (t *Transport) Dial(ctx context.Context, to p2p.Identity, b []byte) (p2p.Link, error) {
	t.mu.Lock()
	usable := t.acceptor != nil && !t.closed
	t.mu.Unlock()
	if !usable {
		return nil, fmt.Errorf("shm: dialling %v from a transport that does not listen: %w", to, p2p.ErrClosed)
	}
	if err := t.Reaches(b); err != nil {
		return nil, fmt.Errorf("dialling %v: %w", to, err)
	}
	e, err := decodeEndpoint(b)
	if err != nil {
		return nil, err
	}
	l, err := t.dial(ctx, to, e)
	if err != nil {
		if ctx.Err() != nil && !errors.Is(err, ctx.Err()) {
			err = fmt.Errorf("%w: %w", ctx.Err(), err)
		}
		return nil, fmt.Errorf("shm: dialling %v: %w", to, err)
	}
	return l, nil
}

func (t *Transport) dial(ctx context.Context, to p2p.Identity, e endpoint) (*link, error) {
	conn, err := t.connect(ctx, e, to)
	if err != nil {
		return nil, err
	}
	sock, err := newSocket(conn)
	if err != nil {
		conn.Close()
		return nil, err
	}
	stop := context.AfterFunc(ctx, func() { conn.SetDeadline(time.Unix(1, 0)) })
	mem, data, err := receive(sock)
	if !stop() && err == nil {
		unmap(mem)
		err = ctx.Err()
	}
	if err != nil {
		sock.drop()
		conn.Close()
		return nil, err
	}
	conn.SetDeadline(time.Time{})
	return newLink(t.host, to, t.exports, sock, mem, data, 0)
}

// connect returns an authenticated connection to e, with a deadline.
func (t *Transport) connect(ctx context.Context, e endpoint, to p2p.Identity) (conn *net.UnixConn, err error) {
	err = trust.Redial(ctx, func() error {
		conn, err = t.connectOnce(ctx, e, to)
		return err
	})
	return conn, err
}

func (t *Transport) connectOnce(ctx context.Context, e endpoint, to p2p.Identity) (*net.UnixConn, error) {
	var d net.Dialer
	var c net.Conn
	for pause := time.Millisecond; ; pause = min(2*pause, 100*time.Millisecond) {
		var err error
		if c, err = d.DialContext(ctx, "unix", e.address()); err == nil {
			break
		}
		if errors.Is(err, unix.ECONNREFUSED) {
			return nil, fmt.Errorf("no listener on %s: %w: %w", e.address(), p2p.ErrPeerGone, err)
		}
		if !errors.Is(err, unix.EAGAIN) { // EAGAIN: the listener's backlog is full
			return nil, err
		}
		timer := time.NewTimer(pause)
		select {
		case <-timer.C:
		case <-ctx.Done():
			timer.Stop()
			return nil, fmt.Errorf("%w; the peer's backlog is full", ctx.Err())
		}
	}
	conn := c.(*net.UnixConn)
	// The peer may be busy with other connections: its limit counts from accept.
	conn.SetDeadline(time.Now().Add(2 * t.timeout))
	stop := context.AfterFunc(ctx, func() { conn.SetDeadline(time.Unix(1, 0)) })
	err := checkPeer(conn, t.uid)
	if err == nil {
		self := t.host.Self()
		_, err = trust.Client(conn, t.host.Secret(), purpose, trust.Hello{FromRank: self.Wire(),
			FromIncarnation: self.Incarnation, ToRank: to.Wire(), ToIncarnation: to.Incarnation}, false)
		err = p2p.FromRefusal(err)
	}
	if !stop() && err == nil {
		err = ctx.Err()
	}
	if err != nil {
		conn.Close()
		return nil, err
	}
	return conn, nil
}

// receive receives and maps the acceptor's memory. It returns the size of its rings, too.
func receive(sock *socket) (mem []byte, data int, err error) {
	m, fd, untaken, err := sock.next()
	if err = errors.Join(err, untaken); err != nil {
		return nil, 0, fmt.Errorf("waiting for the shared memory: %w", err)
	}
	if fd >= 0 {
		defer unix.Close(fd)
	}
	if m.kind == msgFail {
		return nil, 0, fmt.Errorf("the peer could not make the shared memory: %v (a limit of its process or machine)",
			unix.Errno(m.size))
	}
	if m.kind != msgSetup || m.version != version ||
		m.size < ring.MinData || m.size > ring.MaxData || ring.Round(int(m.size)) != int(m.size) {
		return nil, 0, fmt.Errorf("%w: set-up message %+v", p2p.ErrProtocol, m)
	}
	n := linkBytes(int(m.size))
	if err := checkMemory(fd, n); err != nil {
		return nil, 0, err
	}
	mem, err = mapMemory(fd, n, unix.PROT_READ|unix.PROT_WRITE)
	return mem, int(m.size), err
}

// Close implements p2p.Transport. It waits for calls of Host.Admit and Host.Accepted; the caller
// must not hold a lock that they need. Regions stay until they are freed.
func (t *Transport) Close() error {
	t.mu.Lock()
	t.closed = true
	a := t.acceptor
	t.mu.Unlock()
	var err error
	if a != nil {
		err = a.Close()
	}
	t.served.Wait()
	return errors.Join(err, t.exports.close())
}

// linkBytes is the size of the memory of a link with rings of data bytes: the rings, and a page of
// words for puts and gets.
func linkBytes(data int) int { return pages(ring.Bytes(data)) + pages(1) }

// Alloc implements p2p.Allocator with shared memory that peers can map for reading only.
func (t *Transport) Alloc(n int) (*p2p.Region, error) { return t.exports.alloc(n, false) }

// AllocWritable implements p2p.WritableAllocator with shared memory. Peers get its descriptor for
// writing while it is exposed for that.
func (t *Transport) AllocWritable(n int) (*p2p.Region, error) { return t.exports.alloc(n, true) }

// Expose implements p2p.Exposer, for memory of this transport only.
func (t *Transport) Expose(r *mem.Region, x *mem.Remote) ([]byte, error) {
	return t.exports.expose(r, x)
}

// Withdraw implements p2p.Exposer.
func (t *Transport) Withdraw(ctx context.Context, x *mem.Remote) error {
	return t.exports.withdraw(ctx, x)
}
