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
	"tutti/internal/ident"
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
	// Advertise lists what peers dial instead of the listening addresses: "host" or "host:port",
	// names or addresses, at most 16. It is for hosts behind address translation or with names that
	// outlive their addresses. They too must answer before Listen returns.
	Advertise []string
	// Dial makes the connections to peers. Default: net.Dialer.
	Dial dial.Func
	// Select returns the local address from which to dial a peer's address, or an error if there is
	// no route. Default: the kernel's routing. It must not block.
	Select func(peer netip.Addr) (local netip.Addr, err error)
	// Conns is the number of connections for the big frames of one link, 1 (default) to MaxConns;
	// the smaller number of both ends counts. More than one helps if a network gives a single
	// connection only a part of its bandwidth.
	Conns int
	// MaxFrame is the largest payload of a frame in bytes, from MinFrame to MaxMaxFrame, rounded up
	// to a multiple of 4096; the smaller of both ends counts. A link keeps at most one unsent
	// frame, in memory that each of its connections allocates when the peer is first slower than
	// this end. Default 512 KiB.
	MaxFrame int
	// BufferSize is the size in bytes of a link's receive buffer for headers and small payloads, at
	// least 32 KiB. Default 64 KiB.
	BufferSize int
	// SocketBuffer is the size in bytes of the kernel's send and receive buffers. Default 0: the
	// kernel sizes them by the traffic, but for the receive buffers of connections within a host.
	SocketBuffer int
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
	MaxConns    = 16
	MinFrame    = 4 << 10
	MaxMaxFrame = 64 << 20

	frameUnit = 4 << 10
	minBuffer = 32 << 10
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
	joining   map[joinKey]*join

	adopting sync.Mutex // an adopted socket briefly has two descriptors: one socket at a time
}

// joinKey names an incoming link of several connections until it is complete.
type joinKey struct {
	from  p2p.Identity
	token uint32
}

type join struct {
	fds   []int // -1: missing
	name  string
	timer *time.Timer
}

// New returns an idle transport. Listen returns errors of cfg.
func New(cfg Config) *Transport {
	t := &Transport{cfg: cfg, log: cfg.Logger, joining: map[joinKey]*join{}}
	t.ctx, t.cancel = context.WithCancel(context.Background())
	if t.log == nil {
		t.log = slog.New(slog.DiscardHandler)
	}
	return t
}

// Name implements p2p.Transport.
func (t *Transport) Name() string { return "tcp" }

func (c *Config) complete() (ifname.Filter, ports.Spec, error) {
	def := func(p *int, v int) {
		if *p == 0 {
			*p = v
		}
	}
	def(&c.Conns, 1)
	def(&c.MaxFrame, 512<<10)
	def(&c.BufferSize, 64<<10)
	if c.PeerTimeout == 0 {
		c.PeerTimeout = 30 * time.Second
	}
	c.IdleTimeout = max(c.IdleTimeout, c.PeerTimeout)
	var err error
	switch {
	case c.Conns < 1 || c.Conns > MaxConns:
		err = fmt.Errorf("tcp: Conns is %d, want 1 to %d", c.Conns, MaxConns)
	case c.MaxFrame < MinFrame || c.MaxFrame > MaxMaxFrame:
		err = fmt.Errorf("tcp: MaxFrame is %d, want %d to %d", c.MaxFrame, MinFrame, MaxMaxFrame)
	case c.BufferSize < minBuffer:
		err = fmt.Errorf("tcp: BufferSize is %d, want at least %d", c.BufferSize, minBuffer)
	case c.SocketBuffer < 0:
		err = fmt.Errorf("tcp: SocketBuffer is %d, want 0 or more", c.SocketBuffer)
	case c.PeerTimeout < time.Second:
		err = fmt.Errorf("tcp: PeerTimeout is %v, want at least %v", c.PeerTimeout, time.Second)
	case len(c.Advertise) > maxCandidates:
		err = fmt.Errorf("tcp: Advertise has %d addresses, at most %d are allowed", len(c.Advertise), maxCandidates)
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
			Listener: &loud{Listener: l, log: t.log}, Secret: h.Secret(), Purpose: purpose,
			Timeout: p2p.HandshakeTimeout,
			Max:     max(16, trust.DefaultMax()/len(listeners)), Admit: t.admit, Accepted: t.accepted,
			Lost: t.lost, Refused: trust.LogRefused(t.log, "tcp"),
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
	if len(addrs) > maxCandidates {
		t.log.Warn("tcp: not all of this machine's addresses are published", "published", addrs[:maxCandidates],
			"left out", addrs[maxCandidates:])
		addrs = addrs[:maxCandidates]
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
		if t.cfg.SocketBuffer > 0 { // accepted sockets inherit it, in time for the window's scale
			if raw, err := l.(*net.TCPListener).SyscallConn(); err == nil {
				raw.Control(func(fd uintptr) { setBuffers(int(fd), t.cfg.SocketBuffer) })
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
	e := endpoint{conns: t.cfg.Conns, maxFrame: t.cfg.MaxFrame, host: hostID()}
	var all []candidate
	for _, s := range t.cfg.Advertise {
		c, err := parseCandidate(s, ls[0].Addr().(*net.TCPAddr).AddrPort().Port())
		if err != nil {
			return e, fmt.Errorf("tcp: Advertise: %w", err)
		}
		all = append(all, c)
	}
	if len(all) == 0 {
		for _, l := range ls {
			a := l.Addr().(*net.TCPAddr).AddrPort()
			all = append(all, candidate{addr: a.Addr().Unmap(), port: a.Port()})
		}
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
		case len(t.cfg.Advertise) > 0:
			return e, fmt.Errorf("tcp: advertised address %v does not lead here: %w", c, errs[i])
		case ctx.Err() != nil:
			return e, fmt.Errorf("tcp: the check of address %v was ended: %w", c, errs[i])
		default:
			t.log.Warn("tcp: address is not published: it does not answer", "address", c.String(), "reason", errs[i])
		}
	}
	if len(e.at) == 0 {
		return e, fmt.Errorf("tcp: none of this rank's own addresses answers: %w", list(errs))
	}
	return e, nil
}

func parseCandidate(s string, port uint16) (candidate, error) {
	host := s
	if h, p, err := net.SplitHostPort(s); err == nil {
		n, err := strconv.ParseUint(p, 10, 16)
		if err != nil || n == 0 {
			return candidate{}, fmt.Errorf("%q: port %q, want 1 to 65535", s, p)
		}
		host, port = h, uint16(n)
	}
	if a, err := netip.ParseAddr(host); err == nil && a.Zone() == "" {
		return candidate{addr: a.Unmap(), port: port}, nil
	}
	if !validName(host) {
		return candidate{}, fmt.Errorf("%q is neither a host name nor an address, with or without :port", s)
	}
	return candidate{name: host, port: port}, nil
}

// probe checks that c leads to this listener.
func (t *Transport) probe(ctx context.Context, c candidate) error {
	ctx, cancel := context.WithTimeout(ctx, p2p.HandshakeTimeout)
	defer cancel()
	self := t.host.Self()
	fd, _, err := t.connect(ctx, nil, c.String(), netip.Addr{}, hello(self, self, extra{}))
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

// extra is a connection's Hello.Extra.
type extra struct {
	token uint32 // 24 bits, the same for all connections of one link
	frame int    // largest payload
	index int    // of this connection in the link
	count int    // connections of the link; 0: a probe
}

func (e extra) pack() uint64 {
	return uint64(e.token&0xffffff)<<40 | uint64(e.frame/frameUnit)<<16 | uint64(e.index)<<8 | uint64(e.count)
}

func unpackExtra(v uint64) extra {
	return extra{token: uint32(v >> 40), frame: int(v>>16&0xffffff) * frameUnit, index: int(v >> 8 & 0xff),
		count: int(v & 0xff)}
}

func hello(from, to p2p.Identity, e extra) trust.Hello {
	return trust.Hello{FromRank: from.Wire(), FromIncarnation: from.Incarnation, ToRank: to.Wire(),
		ToIncarnation: to.Incarnation, Extra: e.pack()}
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
	x := unpackExtra(h.Extra)
	switch {
	case x.count == 0 && from == self:
		return nil
	case x.count < 1 || x.count > t.cfg.Conns || x.index >= x.count || x.frame < MinFrame || x.frame > t.cfg.MaxFrame ||
		from.Incarnation == 0 || from == self:
		return &trust.Refusal{Code: codeMisfit, Text: fmt.Sprintf("connection %d of %d with frames of %d bytes "+
			"from %v does not fit %v: at most %d and %d",
			x.index, x.count, x.frame, from, self, t.cfg.Conns, t.cfg.MaxFrame)}
	case x.index > 0:
		t.mu.Lock()
		defer t.mu.Unlock()
		if j := t.joining[joinKey{from, x.token}]; j == nil || len(j.fds) != x.count || j.fds[x.index] >= 0 {
			return &trust.Refusal{Code: codeMisfit, Text: fmt.Sprintf("connection %d of %d from %v belongs to no link",
				x.index, x.count, from)}
		}
		return nil
	}
	t.abandon(func(k joinKey) bool { return k.from == from }) // a dialler makes one link at a time
	if err := t.host.Admit(from); err != nil {
		return p2p.RefusalOf(err)
	}
	if x.count > 1 { // before the verdict: the next connection may overtake this one's accepted
		t.expect(joinKey{from, x.token}, x.count)
	}
	return nil
}

// accepted takes over an admitted connection, and passes the link to the host when it is complete.
func (t *Transport) accepted(c net.Conn, h trust.Hello, _ *trust.Session) {
	x := unpackExtra(h.Extra)
	if x.count == 0 {
		c.Close()
		return
	}
	from := p2p.IdentityOf(h.FromRank, h.FromIncarnation)
	name := linkName(from, c.RemoteAddr().String())
	fd, err := t.adopt(c)
	if err != nil {
		t.log.Warn("tcp: accepted connection is lost", "from", from, "reason", err)
		t.lost(h)
		return
	}
	fds := []int{fd}
	if x.count > 1 {
		if fds, name = t.join(joinKey{from, x.token}, x, fd, name); fds == nil {
			return
		}
	}
	l, err := t.link(name, fds, x.frame)
	if err != nil {
		t.log.Warn("tcp: accepted connection is lost", "from", from, "reason", err)
		t.host.Lost(from)
		return
	}
	t.log.Debug("tcp: link accepted", "from", from, "at", c.RemoteAddr(), "connections", len(fds))
	t.host.Accepted(from, l)
}

// lost gives up the link of an admitted connection that has failed.
func (t *Transport) lost(h trust.Hello) {
	from, x := p2p.IdentityOf(h.FromRank, h.FromIncarnation), unpackExtra(h.Extra)
	switch {
	case x.count == 1:
		t.host.Lost(from)
	case x.count > 1:
		t.abandon(func(k joinKey) bool { return k == joinKey{from, x.token} })
	}
}

// abandon gives up incomplete links.
func (t *Transport) abandon(which func(joinKey) bool) {
	var all []joinKey
	t.mu.Lock()
	for k, j := range t.joining {
		if which(k) {
			j.drop()
			delete(t.joining, k)
			all = append(all, k)
		}
	}
	t.mu.Unlock()
	for _, k := range all {
		t.host.Lost(k.from)
	}
}

// expect begins to collect a link's connections, which are dropped after a timeout.
func (t *Transport) expect(k joinKey, count int) {
	j := &join{fds: make([]int, count)}
	for i := range j.fds {
		j.fds[i] = -1
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.closed || t.joining[k] != nil {
		return
	}
	t.joining[k] = j
	j.timer = time.AfterFunc(p2p.HandshakeTimeout, func() { t.abandon(func(o joinKey) bool { return o == k }) })
}

// join adds a connection of a link. With the last one it returns all, and the link's name.
func (t *Transport) join(k joinKey, x extra, fd int, name string) ([]int, string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	j := t.joining[k]
	if j == nil || len(j.fds) != x.count || j.fds[x.index] >= 0 {
		unix.Close(fd)
		return nil, ""
	}
	j.fds[x.index] = fd
	if x.index == 0 {
		j.name = name
	}
	for _, f := range j.fds {
		if f < 0 {
			return nil, ""
		}
	}
	j.timer.Stop()
	delete(t.joining, k)
	return j.fds, j.name
}

func (j *join) drop() {
	j.timer.Stop()
	for _, f := range j.fds {
		if f >= 0 {
			unix.Close(f)
		}
	}
}

func linkName(peer p2p.Identity, at string) string {
	return fmt.Sprintf("tcp link to %v at %s", peer, at)
}

// link makes a link of connections, and closes them if that fails.
func (t *Transport) link(name string, fds []int, frame int) (p2p.Link, error) {
	l, err := newLink(name, fds, frame, t.cfg.BufferSize, t.poller)
	if err != nil {
		for _, fd := range fds {
			unix.Close(fd)
		}
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

// adopt returns the socket of c, which it closes, as a descriptor that the Go runtime's poller does
// not watch.
func (t *Transport) adopt(c net.Conn) (int, error) {
	local := oneHost(c)
	fd, err := t.duplicate(c)
	if err != nil {
		return -1, files.Explain(fmt.Errorf("duplicate a socket: %w", err))
	}
	if local && t.cfg.SocketBuffer == 0 {
		if largestBuffer() >= hostBuffer {
			unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUF, hostBuffer)
		}
	}
	// Several probes of an idle connection have to fail within IdleTimeout before it counts as
	// dead.
	seconds := int(t.cfg.IdleTimeout / time.Second)
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
	unix.SetsockoptInt(fd, unix.IPPROTO_TCP, unix.TCP_RTO_MAX_MS, max(1000, int(t.cfg.PeerTimeout.Milliseconds()/4)))
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

// oneHost reports whether both ends of c have the same address.
func oneHost(c net.Conn) bool {
	a, ok := c.LocalAddr().(*net.TCPAddr)
	b, too := c.RemoteAddr().(*net.TCPAddr)
	return ok && too && a.IP.Equal(b.IP)
}

func setBuffers(fd, size int) {
	unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_SNDBUF, size)
	unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUF, size)
}

// connect dials address, from local if that is valid, and authenticates both ends. It returns the
// socket. first is an open connection to use first, or nil.
func (t *Transport) connect(ctx context.Context, first net.Conn, address string, local netip.Addr,
	h trust.Hello) (fd int, at string, err error) {
	fd = -1
	err = trust.Redial(ctx, func() (err error) {
		c := first
		if first = nil; c == nil {
			if c, err = t.open(ctx, address, local, h); err != nil {
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
func (t *Transport) open(ctx context.Context, address string, local netip.Addr, h trust.Hello) (net.Conn, error) {
	d := net.Dialer{KeepAlive: -1}
	if local.IsValid() {
		d.LocalAddr = net.TCPAddrFromAddrPort(netip.AddrPortFrom(local, 0))
	}
	if t.cfg.SocketBuffer > 0 {
		d.Control = func(_, _ string, c syscall.RawConn) error {
			return c.Control(func(fd uintptr) { setBuffers(int(fd), t.cfg.SocketBuffer) })
		}
	}
	c, err := t.cfg.Dial.Dial(ctx, &d, int(h.ToRank), address)
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
	paths   []path
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

func (t *Transport) race(ctx context.Context, paths []path, h trust.Hello) *race {
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
		c, err := r.t.open(ctx, r.paths[i].To.String(), r.t.local(r.paths[i]), r.hello)
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

// local returns the address to dial a path from; invalid: the kernel chooses.
func (t *Transport) local(p path) netip.Addr {
	if t.cfg.Select != nil {
		return p.From
	}
	return netip.Addr{}
}

// Reaches implements p2p.Transport. It sends nothing and resolves no names: an endpoint with a host
// name counts as reachable.
func (t *Transport) Reaches(endpoint []byte) error {
	e, err := decodeEndpoint(endpoint)
	if err != nil {
		return err
	}
	named := false
	for _, c := range e.at {
		named = named || !c.addr.IsValid()
	}
	paths, why := e.paths(t.machine(), whereIs(e.host), func(string) ([]netip.Addr, error) { return nil, nil })
	if len(paths) == 0 && !named {
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
	paths, why := e.paths(t.machine(), whereIs(e.host), lookup(ctx))
	x := extra{frame: min(t.cfg.MaxFrame, e.maxFrame), count: min(t.cfg.Conns, e.conns)}
	x.token = uint32(ident.New()) & 0xffffff
	elsewhere := 0
	race := t.race(ctx, paths, hello(self, to, x))
	defer race.end()
	for {
		o, any := race.next()
		if !any {
			break
		}
		p, err := paths[o.path], o.err
		if p.Class == route.Foreign {
			t.log.Warn("tcp: the route to a peer leaves through an interface that is not allowed", "peer", to,
				"address", p.String(), "source", p.From)
		}
		var l p2p.Link
		if err == nil {
			l, err = t.try(ctx, p, o.conn, len(paths)-race.ended, self, to, x)
		}
		if err == nil {
			t.log.Debug("tcp: link dialled", "peer", to, "at", p.String(), "from", p.From, "connections", x.count)
			return l, nil
		}
		err = fmt.Errorf("%v: %w", p, err)
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
	case errors.Is(err, p2p.ErrAuth):
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

// final is a refusal of the dialled peer itself: its other addresses would return the same.
type final struct{ error }

func (f final) Unwrap() error { return f.error }

// try makes a link over one path, of which the first connection is open; others is the number of
// paths left after it.
func (t *Transport) try(ctx context.Context, p path, first net.Conn, others int, self, to p2p.Identity,
	x extra) (p2p.Link, error) {
	limit := lastTimeout
	if others > 0 {
		limit = dialTimeout
		if dl, ok := ctx.Deadline(); ok {
			limit = min(limit, time.Until(dl)/time.Duration(others+1))
		}
	}
	var fds []int
	var at string
	for x.index = range x.count {
		attempt, cancel := context.WithTimeout(ctx, limit)
		fd, where, err := t.connect(attempt, first, p.To.String(), t.local(p), hello(self, to, x))
		first = nil
		cancel()
		if err != nil {
			for _, fd := range fds {
				unix.Close(fd)
			}
			var r *trust.Refusal
			switch isRefusal := errors.As(err, &r); {
			case isRefusal && r.Code == codeElsewhere:
				return nil, fmt.Errorf("%w: %s", errElsewhere, r.Text)
			case isRefusal:
				return nil, final{p2p.FromRefusal(err)}
			}
			return nil, p2p.FromRefusal(err)
		}
		fds, at = append(fds, fd), where
	}
	l, err := t.link(linkName(to, at), fds, x.frame)
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
	for k, j := range t.joining {
		j.drop()
		delete(t.joining, k)
	}
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

// loud is a listener that logs errors of accept, at most once a minute, because the server retries.
type loud struct {
	net.Listener
	log  *slog.Logger
	last time.Time
}

func (l *loud) Accept() (net.Conn, error) {
	c, err := l.Listener.Accept()
	if err != nil && !errors.Is(err, net.ErrClosed) && time.Since(l.last) > time.Minute {
		l.last = time.Now()
		l.log.Warn("tcp: connections cannot be accepted for now", "at", l.Addr(), "reason", files.Explain(err))
	}
	return c, err
}
