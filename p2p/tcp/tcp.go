// Package tcp makes p2p links over TCP connections.
//
// A listener publishes the addresses of the allowed network interfaces, each after it has connected
// to itself there as this incarnation. A dialler tries them in the order of its routing. Every
// connection proves the job's secret (internal/trust) and names both incarnations before other data
// is read, so that a port that another rank, incarnation or job has taken over is detected.
//
// A link moves frames by non-blocking system calls of the polling goroutine, directly between the
// caller's memory and the socket: many small frames are received at a time into one buffer, big
// payloads at their destination. Sockets are outside the Go runtime's poller; see poller. Linux
// only.
package tcp

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"net"
	"net/netip"
	"os"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"tutti/internal/dial"
	"tutti/internal/files"
	"tutti/internal/ifname"
	"tutti/internal/ports"
	"tutti/internal/route"
	"tutti/internal/socket"
	"tutti/internal/trust"
	"tutti/mem"
	"tutti/p2p"
	"tutti/p2p/rma"
)

// Config configures a Transport. The zero Config listens on all interfaces, on ports that the
// kernel chooses.
type Config struct {
	// Interfaces selects the addresses to listen on, to publish and to dial from: names, prefixes
	// of names ("eth*"), addresses and networks, separated by commas, excluded after "^" (the
	// syntax of TUTTI_IFNAME; see internal/ifname). Default: all that are up, loopback last.
	// Link-local addresses are never used.
	Interfaces string
	// Ports is "0" (default: the kernel chooses), "29500" (that port or an error) or "29500-29600"
	// (the first free one). Each address has a port of its own.
	Ports string
	// Dial makes the connections to peers. Default: net.Dialer.
	Dial dial.Func
	// MaxFrame is the largest payload of a frame in bytes, from MinFrame to MaxMaxFrame, rounded up
	// to a multiple of 4096; the smaller of both ends counts. A link keeps at most one unsent
	// frame, in memory that it allocates when the peer is first slower than this end. Default
	// 2 MiB.
	MaxFrame int
	// PeerTimeout is the time after which a peer's host that answers nothing counts as gone. A host
	// that answers while its process does not read is not gone; deadlines of operations handle
	// that. Detection takes up to a quarter longer, and before Linux 6.15 up to minutes if the
	// process had not read for long when its host went. Default 30 s, at least 1 s.
	PeerTimeout time.Duration
	// IdleTimeout is the same for a link without traffic: the kernel sends only a few probes in
	// that time, so that a network which loses packets needs a longer one. Default and minimum:
	// PeerTimeout.
	IdleTimeout time.Duration
	// Plain makes links that pass on frames of every service, and have no capabilities beside
	// p2p.Link: for a transport that is built on them. Both ends must have the same Plain.
	Plain bool
	// Logger gets messages that are no errors. Default: no logging.
	Logger *slog.Logger
}

// Limits of Config.
const (
	MinFrame    = 4 << 10
	MaxMaxFrame = 64 << 20

	frameUnit = 4 << 10
)

const purpose = "tcp"

// dialTimeout bounds the handshake over one path while there are others to try. lastTimeout bounds
// that over the last one, and opening any connection.
const (
	dialTimeout = 2 * time.Second
	lastTimeout = 30 * time.Second
)

// Transport implements p2p.Transport and p2p.Exposer. Its links implement p2p.OneSided.
type Transport struct {
	table  rma.Table // this rank's exposed memory
	cfg    Config
	filter ifname.Filter
	ctx    context.Context // ends at Close
	cancel context.CancelFunc
	log    *slog.Logger

	mu        sync.Mutex
	listened  bool
	closed    bool
	host      p2p.Host // set by Listen
	poller    *poller
	acceptors []*trust.Acceptor
	serving   sync.WaitGroup

	adopting sync.Mutex // an adopted socket briefly has two descriptors: one socket at a time

	// Tests set these before Listen.
	buffer int          // size of a link's receive buffer for headers and small payloads
	socket func(fd int) // sets the buffers of listening sockets and of those to be dialled from; or nil
}

// New returns an idle transport. Listen returns errors of cfg.
func New(cfg Config) *Transport {
	t := &Transport{cfg: cfg, log: cfg.Logger, buffer: 64 << 10}
	t.ctx, t.cancel = context.WithCancel(context.Background())
	if t.log == nil {
		t.log = slog.New(slog.DiscardHandler)
	}
	return t
}

// Name implements p2p.Transport.
func (t *Transport) Name() string { return "tcp" }

func (c *Config) complete() (ifname.Filter, ports.Spec, error) {
	if c.MaxFrame == 0 {
		c.MaxFrame = 2 << 20
	}
	if c.PeerTimeout == 0 {
		c.PeerTimeout = 30 * time.Second
	}
	c.IdleTimeout = max(c.IdleTimeout, c.PeerTimeout)
	var err error
	switch {
	case c.MaxFrame < MinFrame || c.MaxFrame > MaxMaxFrame:
		err = fmt.Errorf("tcp: MaxFrame is %d, want %d to %d", c.MaxFrame, MinFrame, MaxMaxFrame)
	case c.PeerTimeout < time.Second:
		err = fmt.Errorf("tcp: PeerTimeout is %v, want at least %v", c.PeerTimeout, time.Second)
	}
	if err != nil {
		return ifname.Filter{}, ports.Spec{}, err
	}
	c.MaxFrame = (c.MaxFrame + frameUnit - 1) / frameUnit * frameUnit
	filter, err := ifname.Parse(c.Interfaces)
	if err != nil {
		return filter, ports.Spec{}, err
	}
	spec, err := ports.ParseSpec(c.Ports)
	return filter, spec, err
}

// Listen implements p2p.Transport.
func (t *Transport) Listen(ctx context.Context, h p2p.Host) ([]byte, error) {
	t.mu.Lock()
	if t.listened || t.closed {
		defer t.mu.Unlock()
		return nil, fmt.Errorf("tcp: Listen: %w or already listening", p2p.ErrClosed)
	}
	t.listened = true
	t.mu.Unlock()
	filter, spec, err := t.cfg.complete()
	if err != nil {
		return nil, err
	}
	listeners, err := t.bind(ctx, filter, spec)
	if err != nil {
		return nil, err
	}
	p, err := newPoller(t.cfg.PeerTimeout, h.Wake)
	if err != nil {
		for _, l := range listeners {
			l.Close()
		}
		return nil, err
	}
	t.mu.Lock()
	if t.closed {
		t.mu.Unlock()
		for _, l := range listeners {
			l.Close()
		}
		p.release()
		return nil, fmt.Errorf("tcp: Listen: %w", p2p.ErrClosed)
	}
	t.host, t.poller, t.filter = h, p, filter
	for _, l := range listeners {
		a := &trust.Acceptor{
			Listener: l, Secret: h.Secret(), Purpose: purpose, Timeout: p2p.HandshakeTimeout,
			Max: max(16, trust.DefaultMax()/len(listeners)), Admit: t.admit, Accepted: t.accepted,
			Lost: t.lost, Refused: trust.LogRefused(t.log, "tcp"), Failing: trust.LogFailing(t.log, "tcp"),
		}
		t.acceptors = append(t.acceptors, a)
		t.serving.Go(a.Serve)
	}
	t.mu.Unlock()
	e, err := t.publish(ctx, listeners)
	if err != nil {
		t.Close()
		return nil, err
	}
	t.log.Debug("tcp: listening", "at", e.at)
	return e.encode(), nil
}

// bind opens a listener on every allowed address. A port that is taken on any of them is an error.
func (t *Transport) bind(ctx context.Context, filter ifname.Filter, spec ports.Spec) (ls []net.Listener, err error) {
	defer func() {
		if err != nil {
			for _, l := range ls {
				l.Close()
			}
		}
	}()
	addrs, err := filter.Addrs()
	if err != nil {
		return nil, fmt.Errorf("tcp: %w", files.Explain(err))
	}
	if len(addrs) > maxAddresses {
		t.log.Warn("tcp: not all of this machine's addresses are published", "published", addrs[:maxAddresses],
			"left out", addrs[maxAddresses:])
		addrs = addrs[:maxAddresses]
	}
	var skipped list
	for _, a := range addrs {
		l, err := ports.Listen(ctx, a.String(), spec)
		if errors.Is(err, syscall.EADDRNOTAVAIL) { // an IPv6 address that is still tentative, or was removed
			skipped = append(skipped, err)
			continue
		}
		if err != nil {
			return ls, fmt.Errorf("tcp: %w", files.Explain(err))
		}
		ls = append(ls, l)
		if t.socket != nil { // accepted sockets inherit what it sets
			if raw, err := l.(*net.TCPListener).SyscallConn(); err == nil {
				raw.Control(func(fd uintptr) { t.socket(int(fd)) })
			}
		}
	}
	if len(ls) == 0 {
		return nil, fmt.Errorf("tcp: no address to listen on: %w", skipped)
	}
	return ls, nil
}

// publish probes every address to be published, and returns those that answered.
func (t *Transport) publish(ctx context.Context, ls []net.Listener) (endpoint, error) {
	e := endpoint{maxFrame: t.cfg.MaxFrame, host: hostID()}
	all := make([]netip.AddrPort, len(ls))
	for i, l := range ls {
		a := l.Addr().(*net.TCPAddr).AddrPort()
		all[i] = netip.AddrPortFrom(a.Addr().Unmap(), a.Port())
	}
	errs := make([]error, len(all))
	var wg sync.WaitGroup
	for i, c := range all {
		wg.Go(func() { errs[i] = t.probe(ctx, c) })
	}
	wg.Wait()
	for i, c := range all {
		switch {
		case errs[i] == nil:
			e.at = append(e.at, c)
		case ctx.Err() != nil:
			return e, fmt.Errorf("tcp: the check of address %v was ended: %w", c, errs[i])
		default:
			t.log.Warn("tcp: address is not published: it does not answer", "address", c, "reason", errs[i])
		}
	}
	if len(e.at) == 0 {
		return e, fmt.Errorf("tcp: none of this rank's own addresses answers: %w", list(errs))
	}
	return e, nil
}

// probe checks that the address at leads to this listener.
func (t *Transport) probe(ctx context.Context, at netip.AddrPort) error {
	ctx, cancel := context.WithTimeout(ctx, p2p.HandshakeTimeout)
	defer cancel()
	self := t.host.Self()
	fd, _, err := t.connect(ctx, nil, at, hello(self, self, 0))
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	for ctx.Err() == nil { // until the other end is closed, too, and its descriptor free
		if n, err := unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, 100); n != 0 && err != unix.EINTR {
			break
		}
	}
	return nil
}

// hello introduces from to to. Extra is the largest payload of the link's frames, in units of
// frameUnit; 0: the connection is a probe.
func hello(from, to p2p.Identity, frame int) trust.Hello {
	return trust.Hello{FromRank: from.Wire(), FromIncarnation: from.Incarnation, ToRank: to.Wire(),
		ToIncarnation: to.Incarnation, Extra: uint64(frame / frameUnit)}
}

// Verdict codes beside those of p2p.RefusalOf: the connection reached another process of the same
// job, or does not match.
const (
	codeElsewhere = 65
	codeMisfit    = 66
)

func (t *Transport) admit(_ net.Conn, h trust.Hello) error {
	self := t.host.Self()
	from := p2p.IdentityOf(h.FromRank, h.FromIncarnation)
	if to := p2p.IdentityOf(h.ToRank, h.ToIncarnation); to != self {
		return &trust.Refusal{Code: codeElsewhere, Text: fmt.Sprintf("%v listens here, not %v", self, to)}
	}
	switch {
	case h.Extra == 0 && from == self:
		return nil
	case h.Extra == 0 || h.Extra > uint64(t.cfg.MaxFrame/frameUnit) || from.Incarnation == 0 || from == self:
		return &trust.Refusal{Code: codeMisfit, Text: fmt.Sprintf("a link with frames of %d times %d bytes from %v "+
			"does not fit %v: at most %d bytes", h.Extra, frameUnit, from, self, t.cfg.MaxFrame)}
	}
	if err := t.host.Admit(from); err != nil {
		return p2p.RefusalOf(err)
	}
	return nil
}

// accepted takes over an admitted connection and passes its link to the host.
func (t *Transport) accepted(c net.Conn, h trust.Hello, _ *trust.Session) {
	if h.Extra == 0 {
		c.Close()
		return
	}
	from := p2p.IdentityOf(h.FromRank, h.FromIncarnation)
	name := linkName(from, c.RemoteAddr().String())
	var l p2p.Link
	fd, err := t.adopt(c)
	if err == nil {
		l, err = t.link(name, fd, int(h.Extra)*frameUnit)
	}
	if err != nil {
		t.log.Warn("tcp: accepted connection is lost", "from", from, "reason", err)
		t.host.Lost(from)
		return
	}
	t.log.Debug("tcp: link accepted", "from", from, "at", c.RemoteAddr())
	t.host.Accepted(from, l)
}

// lost gives up the link of an admitted connection that has failed.
func (t *Transport) lost(h trust.Hello) {
	if h.Extra != 0 {
		t.host.Lost(p2p.IdentityOf(h.FromRank, h.FromIncarnation))
	}
}

func linkName(peer p2p.Identity, at string) string {
	return fmt.Sprintf("tcp link to %v at %s", peer, at)
}

// link makes a link of a connection, and closes it if that fails.
func (t *Transport) link(name string, fd, frame int) (p2p.Link, error) {
	l, err := newLink(name, fd, frame, t.buffer, t.poller)
	if err != nil {
		unix.Close(fd)
		return nil, fmt.Errorf("%s: %w", name, files.Explain(err))
	}
	if t.cfg.Plain {
		return l, nil
	}
	return &framed{rma.NewFrames(l, &t.table, t.host.Wake), l}, nil
}

// Expose implements p2p.Exposer: any host memory, with an empty key.
func (t *Transport) Expose(r *mem.Region, x *mem.Remote) ([]byte, error) {
	if err := t.table.Expose(r, x); err != nil {
		return nil, fmt.Errorf("tcp: %w", err)
	}
	return []byte{}, nil
}

// Withdraw implements p2p.Exposer. It waits at most for a system call that does not block.
func (t *Transport) Withdraw(_ context.Context, x *mem.Remote) error {
	t.table.Withdraw(x)
	return nil
}

// maxKeepIdle is the largest value of TCP_KEEPIDLE, in seconds.
const maxKeepIdle = 32767

// adopt returns the socket of c, which it closes, as a descriptor that the Go runtime's poller does
// not watch.
func (t *Transport) adopt(c net.Conn) (int, error) {
	local := socket.WithinHost(c)
	fd, err := t.duplicate(c)
	if err != nil {
		return -1, files.Explain(fmt.Errorf("%w: duplicate a socket: %w", p2p.ErrShortage, err))
	}
	if local && t.socket == nil && largestBuffer() >= hostBuffer {
		unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUF, hostBuffer)
	}
	// Several probes of an idle connection have to fail within IdleTimeout before it counts as
	// dead.
	seconds := int(min(t.cfg.IdleTimeout/time.Second, 3*maxKeepIdle))
	idle, every := max(1, seconds/3), max(1, seconds/6)
	for _, o := range [...]struct{ level, opt, value int }{
		{unix.IPPROTO_TCP, unix.TCP_NODELAY, 1},
		{unix.SOL_SOCKET, unix.SO_KEEPALIVE, 1},
		{unix.IPPROTO_TCP, unix.TCP_KEEPIDLE, idle},
		{unix.IPPROTO_TCP, unix.TCP_KEEPINTVL, every},
		{unix.IPPROTO_TCP, unix.TCP_KEEPCNT, max(1, (seconds-idle)/every)},
	} {
		if err := unix.SetsockoptInt(fd, o.level, o.opt, o.value); err != nil {
			unix.Close(fd)
			return -1, fmt.Errorf("set a socket's options: %w", err)
		}
	}
	// Linux 6.15 can keep the pauses between retransmissions below that, too.
	unix.SetsockoptInt(fd, unix.IPPROTO_TCP, unix.TCP_RTO_MAX_MS, int(min(max(1000, t.cfg.PeerTimeout.Milliseconds()/4),
		math.MaxInt32)))
	return fd, nil
}

// duplicate returns a new descriptor of c's socket, and closes c.
func (t *Transport) duplicate(c net.Conn) (fd int, err error) {
	t.adopting.Lock()
	defer t.adopting.Unlock()
	return socket.Detach(c)
}

// hostBuffer is the size of the receive buffer of a connection within this host. Otherwise the
// kernel lets it grow with what arrives in a round trip, which says nothing there. A buffer that is
// smaller than what both ends send at once is worse than that.
const hostBuffer = 2 << 20

// largestBuffer returns the largest receive buffer in bytes that the system gives a program, 0 if
// it does not say.
var largestBuffer = sync.OnceValue(func() int {
	b, err := os.ReadFile("/proc/sys/net/core/rmem_max")
	if err != nil {
		return 0
	}
	n, _ := strconv.Atoi(strings.TrimSpace(string(b)))
	return n
})

// connect dials to and authenticates both ends. It returns the socket and the peer's address. first
// is an open connection to use first, or nil.
func (t *Transport) connect(ctx context.Context, first net.Conn, to netip.AddrPort, h trust.Hello) (
	fd int, at string, err error) {
	fd = -1
	err = trust.Redial(ctx, func() (err error) {
		c := first
		if first = nil; c == nil {
			if c, err = t.open(ctx, to, h); err != nil {
				return err
			}
		}
		fd, at, err = t.prove(ctx, c, h)
		return err
	})
	if first != nil {
		first.Close()
	}
	return fd, at, err
}

// open opens a connection without sending anything.
func (t *Transport) open(ctx context.Context, to netip.AddrPort, h trust.Hello) (net.Conn, error) {
	d := net.Dialer{KeepAlive: -1}
	if t.socket != nil {
		d.Control = func(_, _ string, c syscall.RawConn) error {
			return c.Control(func(fd uintptr) { t.socket(int(fd)) })
		}
	}
	c, err := t.cfg.Dial.Dial(ctx, &d, int(h.ToRank), to.String())
	return c, files.Explain(err)
}

// prove authenticates both ends of c and returns its socket. c is closed.
func (t *Transport) prove(ctx context.Context, c net.Conn, h trust.Hello) (fd int, at string, err error) {
	// The acceptor may be busy with other connections first, hence twice its limit.
	c.SetDeadline(time.Now().Add(2 * p2p.HandshakeTimeout))
	stop := context.AfterFunc(ctx, func() { c.SetDeadline(time.Unix(1, 0)) })
	_, err = trust.Client(c, t.host.Secret(), purpose, h, false)
	if !stop() && err == nil {
		err = ctx.Err()
	}
	if err != nil {
		c.Close()
		if ctx.Err() != nil {
			err = fmt.Errorf("%w in the handshake: %w", ctx.Err(), err)
		}
		return -1, "", err
	}
	at = c.RemoteAddr().String()
	fd, err = t.adopt(c)
	return fd, at, err
}

// race opens connections over several paths: over the first at once, over each further one when the
// one before has failed or has taken headStart. Handshakes over the open connections are then tried
// one at a time.
type race struct {
	t       *Transport
	ctx     context.Context
	cancel  context.CancelFunc
	paths   []route.Path
	hello   trust.Hello
	begun   int // paths that were tried
	ended   int // with a result
	results chan opened
}

// opened is the result of a path.
type opened struct {
	path int
	conn net.Conn
	err  error
}

// headStart is how long a path is tried alone. On a working network a connection is open by then,
// even after the retransmission of one lost packet.
const headStart = 250 * time.Millisecond

func (t *Transport) race(ctx context.Context, paths []route.Path, h trust.Hello) *race {
	r := &race{t: t, paths: paths, hello: h, results: make(chan opened, len(paths))}
	r.ctx, r.cancel = context.WithCancel(ctx)
	r.begin()
	return r
}

// begin tries the next path, if there is one.
func (r *race) begin() {
	if r.begun == len(r.paths) {
		return
	}
	i := r.begun
	r.begun++
	go func() {
		ctx, cancel := context.WithTimeout(r.ctx, lastTimeout)
		defer cancel()
		c, err := r.t.open(ctx, r.paths[i].To, r.hello)
		r.results <- opened{i, c, err}
	}()
}

// next returns the next result, false if there is none left.
func (r *race) next() (opened, bool) {
	for r.ended < len(r.paths) {
		if r.ended == r.begun {
			r.begin()
		}
		timer := time.NewTimer(headStart)
		select {
		case o := <-r.results:
			timer.Stop()
			r.ended++
			return o, true
		case <-timer.C:
			r.begin()
		}
	}
	return opened{}, false
}

// end closes unused connections, and waits for it.
func (r *race) end() {
	r.cancel()
	for ; r.ended < r.begun; r.ended++ {
		if o := <-r.results; o.conn != nil {
			o.conn.Close()
		}
	}
}

// Reaches implements p2p.Transport. It sends nothing.
func (t *Transport) Reaches(endpoint []byte) error {
	e, err := decodeEndpoint(endpoint)
	if err != nil {
		return err
	}
	if paths, why := e.paths(t.machine(), whereIs(e.host)); len(paths) == 0 {
		return fmt.Errorf("tcp: %w: %w", errNoPath, list(why))
	}
	return nil
}

// Dial implements p2p.Transport.
func (t *Transport) Dial(ctx context.Context, to p2p.Identity, endpoint []byte) (p2p.Link, error) {
	fail := func(err error) (p2p.Link, error) { return nil, fmt.Errorf("tcp: dial %v: %w", to, err) }
	t.mu.Lock()
	host, closed := t.host, t.closed
	t.mu.Unlock()
	switch {
	case closed:
		return fail(fmt.Errorf("the transport is %w", p2p.ErrClosed))
	case host == nil:
		return fail(errors.New("Listen was not called or failed"))
	}
	self := host.Self()
	if to == self {
		return fail(errors.New("that is this rank itself"))
	}
	e, err := decodeEndpoint(endpoint)
	if err != nil {
		return fail(err)
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	defer context.AfterFunc(t.ctx, cancel)()
	paths, why := e.paths(t.machine(), whereIs(e.host))
	frame := min(t.cfg.MaxFrame, e.maxFrame)
	elsewhere := 0
	race := t.race(ctx, paths, hello(self, to, frame))
	defer race.end()
	for {
		o, any := race.next()
		if !any {
			break
		}
		p, err := paths[o.path], o.err
		if p.Class == route.Foreign {
			t.log.Warn("tcp: the route to a peer leaves through an interface that is not allowed", "peer", to,
				"address", p.To, "source", p.From)
		}
		var l p2p.Link
		if err == nil {
			l, err = t.try(ctx, p, o.conn, len(paths)-race.ended, to, frame)
		}
		if err == nil {
			t.log.Debug("tcp: link dialled", "peer", to, "at", p.To, "from", p.From)
			return l, nil
		}
		err = fmt.Errorf("%v: %w", p.To, err)
		if errors.As(err, new(final)) {
			return fail(err)
		}
		why = append(why, err)
		if errors.Is(err, errElsewhere) {
			elsewhere++
		}
		if over(ctx) != nil {
			break
		}
	}
	err = list(why)
	switch {
	case t.ctx.Err() != nil:
		return fail(fmt.Errorf("the transport was %w: %w", p2p.ErrClosed, err))
	case over(ctx) != nil:
		return fail(fmt.Errorf("%w: %w", over(ctx), err))
	case errors.Is(err, p2p.ErrAuth), errors.Is(err, p2p.ErrVersion), errors.Is(err, syscall.EMFILE),
		errors.Is(err, syscall.ENFILE):
		return fail(err)
	case elsewhere > 0 && elsewhere == len(paths):
		return fail(fmt.Errorf("%w: %w", p2p.ErrStale, err))
	case len(paths) == 0:
		return fail(fmt.Errorf("%w: %w: %w", p2p.ErrPeerGone, errNoPath, err))
	}
	return fail(fmt.Errorf("%w: %w", p2p.ErrPeerGone, err))
}

// over returns ctx.Err. At the deadline it does so even if the context's timer has not fired yet.
func over(ctx context.Context) error {
	if dl, ok := ctx.Deadline(); ok && !time.Now().Before(dl) {
		return context.DeadlineExceeded
	}
	return ctx.Err()
}

// errElsewhere says that a connection reached another member of the job than the one dialled: one
// that took over its port, or has the same private address.
var errElsewhere = errors.New("another process answers")

// final is a refusal of the dialled peer itself, whose other addresses would return the same, or a
// failure after the peer has accepted.
type final struct{ error }

func (f final) Unwrap() error { return f.error }

// try makes a link over one path, over which first is an open connection. others is the number of
// paths left after it.
func (t *Transport) try(ctx context.Context, p route.Path, first net.Conn, others int, to p2p.Identity, frame int) (
	p2p.Link, error) {
	limit := lastTimeout
	if others > 0 {
		limit = dialTimeout
		if dl, ok := ctx.Deadline(); ok {
			limit = min(limit, time.Until(dl)/time.Duration(others+1))
		}
	}
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	fd, at, err := t.connect(ctx, first, p.To, hello(t.host.Self(), to, frame))
	if err != nil {
		var r *trust.Refusal
		switch isRefusal := errors.As(err, &r); {
		case isRefusal && r.Code == codeElsewhere:
			return nil, fmt.Errorf("%w: %s", errElsewhere, r.Text)
		case isRefusal, errors.Is(err, p2p.ErrShortage):
			return nil, final{p2p.FromRefusal(err)}
		}
		return nil, p2p.FromRefusal(err)
	}
	l, err := t.link(linkName(to, at), fd, frame)
	if err != nil {
		return nil, final{err}
	}
	return l, nil
}

// Close implements p2p.Transport.
func (t *Transport) Close() error {
	t.mu.Lock()
	first := !t.closed
	t.closed = true
	acceptors, p := t.acceptors, t.poller
	t.mu.Unlock()
	t.cancel()
	for _, a := range acceptors {
		a.Close()
	}
	t.serving.Wait()
	if first && p != nil {
		p.release()
	}
	return nil
}
