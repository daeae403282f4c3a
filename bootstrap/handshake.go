package bootstrap

import (
	"bytes"
	"cmp"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"log/slog"
	mrand "math/rand/v2"
	"net"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sync/semaphore"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"

	"tutti/bootstrap/internal/proof"
	"tutti/internal/backoff"
	"tutti/internal/dial"
	"tutti/internal/ident"
	"tutti/internal/ifname"
	"tutti/internal/ports"
	"tutti/internal/route"
	"tutti/internal/trust"
)

const (
	rpcPurpose = "rpc"
	rpcMethod  = "/tutti.Handshake/Describe"

	// MaxEndpoints and MaxEndpointSize bound the answer of Describe: transports, and bytes of one
	// descriptor.
	MaxEndpoints    = 16
	MaxEndpointSize = 4096
	maxTransport    = 32 // bytes of a transport's name
	maxMessage      = 1 + MaxEndpoints*(2+maxTransport+2+MaxEndpointSize) + 64
)

// ErrStale says that a connection was made to, or by, another incarnation than the known one: look
// the peer up again.
var ErrStale = trust.ErrStale

// ErrAuth says that a peer, or the embedded store, does not know the job's secret.
var ErrAuth = trust.ErrAuth

// ErrVersion says that a peer, or the embedded store, is of another build, whose handshake differs.
var ErrVersion = trust.ErrVersion

// Endpoints holds a rank's transport descriptors by the transport's name. Each is opaque except to
// that transport.
type Endpoints map[string][]byte

// Request and reply, little-endian:
//
//	request  nonce u64
//	reply    nonce u64, incarnation u64, count u8, count times (length u8, name, length u16, descriptor)
type (
	describeRequest struct{ nonce uint64 }
	describeReply   struct {
		nonce, incarnation uint64
		endpoints          Endpoints
	}
)

// wire is the codec of the service: fixed layouts of two messages, validated before use.
type wire struct{}

func (wire) Name() string { return "tutti" }

func (wire) Marshal(v any) ([]byte, error) {
	switch m := v.(type) {
	case *describeRequest:
		return binary.LittleEndian.AppendUint64(nil, m.nonce), nil
	case interface{ encode() ([]byte, error) }:
		return m.encode()
	}
	return nil, fmt.Errorf("handshake: cannot encode %T", v)
}

func (wire) Unmarshal(b []byte, v any) error {
	switch m := v.(type) {
	case *describeRequest:
		if len(b) != 8 {
			return fmt.Errorf("handshake: request of %d bytes, expected 8", len(b))
		}
		m.nonce = binary.LittleEndian.Uint64(b)
		return nil
	case interface{ decode([]byte) error }:
		return m.decode(b)
	}
	return fmt.Errorf("handshake: cannot decode %T", v)
}

func (m *describeReply) encode() ([]byte, error) {
	if len(m.endpoints) > MaxEndpoints {
		return nil, fmt.Errorf("handshake: %d transports, at most %d", len(m.endpoints), MaxEndpoints)
	}
	b := binary.LittleEndian.AppendUint64(nil, m.nonce)
	b = binary.LittleEndian.AppendUint64(b, m.incarnation)
	b = append(b, byte(len(m.endpoints)))
	for name, ep := range m.endpoints {
		if name == "" || len(name) > maxTransport || len(ep) > MaxEndpointSize {
			return nil, fmt.Errorf("handshake: transport %q with a descriptor of %d bytes: at most %d and %d bytes",
				clip(name), len(ep), maxTransport, MaxEndpointSize)
		}
		b = append(append(b, byte(len(name))), name...)
		b = append(binary.LittleEndian.AppendUint16(b, uint16(len(ep))), ep...)
	}
	return b, nil
}

func (m *describeReply) decode(b []byte) error {
	take := func(n int) []byte {
		if n > len(b) {
			b = nil
			return nil
		}
		head := b[:n:n]
		b = b[n:]
		return head
	}
	bad := func(what string) error { return fmt.Errorf("handshake: malformed reply: %s", what) }
	head := take(17)
	if head == nil {
		return bad("too short")
	}
	m.nonce, m.incarnation = binary.LittleEndian.Uint64(head), binary.LittleEndian.Uint64(head[8:])
	n := int(head[16])
	if n > MaxEndpoints {
		return bad("too many transports")
	}
	m.endpoints = make(Endpoints, n)
	for range n {
		size := take(1)
		if size == nil || size[0] == 0 || size[0] > maxTransport {
			return bad("transport's name")
		}
		name := take(int(size[0]))
		length := take(2)
		if name == nil || length == nil || binary.LittleEndian.Uint16(length) > MaxEndpointSize {
			return bad("descriptor's length")
		}
		ep := take(int(binary.LittleEndian.Uint16(length)))
		if ep == nil {
			return bad("descriptor cut short")
		}
		if _, ok := m.endpoints[string(name)]; ok {
			return bad("transport named twice")
		}
		m.endpoints[string(name)] = bytes.Clone(ep)
	}
	if len(b) != 0 {
		return bad("trailing bytes")
	}
	return nil
}

// ServerConfig describes the rank that answers.
type ServerConfig struct {
	Rank        int
	Incarnation uint64
	Secret      []byte
	Interfaces  string // see ifname.Parse: addresses to listen on and to publish; default all
	Ports       string // see ports.ParseSpec; default "0"
	// Describe returns the descriptors for the rank that asks. It may be called concurrently and
	// must return when ctx ends. Its error is final, and sent to the client as text.
	Describe func(ctx context.Context, from int, incarnation uint64) (Endpoints, error)
	// Status returns the state of the rank, with at most ops of its last operations, for clients
	// that know the secret. It is called once at a time and must return when ctx ends. nil: there
	// is no answer.
	Status func(ctx context.Context, ops int) ([]byte, error)
	Logger *slog.Logger // nil: no logging

	find func(ctx context.Context, q *findRequest) *findReply // of a Member, which has no Rank and no Describe
}

// Server answers peers that ask for the endpoints of this rank's transports.
type Server struct {
	cfg   ServerConfig
	l     *proof.Listener
	g     *grpc.Server
	addrs []string
	done  chan struct{}
	once  sync.Once

	answering chan struct{} // held by the status request that is being answered
	refused   refusals
}

// Refused counts connections that a listener has refused. If ranks do not find each other, these
// are likely reasons.
type Refused struct {
	Secret  int // they did not prove the job's secret
	Version int // they were of another build, whose handshake differs
}

// refusals makes a Refused.
type refusals struct{ secret, version atomic.Int64 }

// note counts a connection that was refused with err.
func (r *refusals) note(err error) {
	switch {
	case errors.Is(err, ErrAuth):
		r.secret.Add(1)
	case errors.Is(err, ErrVersion):
		r.version.Add(1)
	}
}

func (r *refusals) count() Refused { return Refused{int(r.secret.Load()), int(r.version.Load())} }

// Serve opens the handshake endpoint. Before it returns, it has connected to the endpoint with this
// incarnation. It blocks until ctx ends at the latest.
func Serve(ctx context.Context, cfg ServerConfig) (*Server, error) {
	spec, err := ports.ParseSpec(cfg.Ports)
	if err != nil {
		return nil, fmt.Errorf("handshake: %w", err)
	}
	filter, err := ifname.Parse(cfg.Interfaces)
	if err != nil {
		return nil, fmt.Errorf("handshake: %w", err)
	}
	ips, err := filter.Addrs()
	if err != nil {
		return nil, fmt.Errorf("handshake: %w", err)
	}
	ips = ips[:min(len(ips), MaxAddrs)]
	switch {
	case len(cfg.Secret) < trust.MinSecret:
		return nil, fmt.Errorf("handshake: a secret of %d bytes is too short: expected at least %d (TUTTI_SECRET)",
			len(cfg.Secret), trust.MinSecret)
	case cfg.Incarnation == 0:
		return nil, errors.New("handshake: incarnation 0")
	}
	if cfg.Logger == nil {
		cfg.Logger = slog.New(slog.DiscardHandler)
	}
	host := "" // several addresses need one socket on all, which refuses connections to the others
	if len(ips) == 1 {
		host = ips[0].String()
	}
	l, err := ports.Listen(ctx, host, spec)
	if err != nil {
		return nil, fmt.Errorf("handshake: %w", err)
	}
	port := uint16(l.Addr().(*net.TCPAddr).Port)
	if filter.String() != "" {
		l = &pickyListener{l, ips}
	}
	s := &Server{cfg: cfg, done: make(chan struct{}), answering: make(chan struct{}, 1)}
	for _, ip := range ips {
		s.addrs = append(s.addrs, netip.AddrPortFrom(ip, port).String())
	}
	note := trust.LogRefused(cfg.Logger, "handshake")
	s.l = proof.Listen(l, proof.Config{Secret: cfg.Secret, Purpose: rpcPurpose, Admit: s.admit,
		Failing: trust.LogFailing(cfg.Logger, "handshake"),
		Refused: func(c net.Conn, err error) {
			s.refused.note(err)
			note(c, err)
		}})
	s.g = grpc.NewServer(
		grpc.Creds(proof.Credentials{}),
		grpc.ForceServerCodec(wire{}),
		grpc.ConnectionTimeout(proof.Timeout),
		grpc.MaxRecvMsgSize(cfg.maxRequest()), grpc.MaxSendMsgSize(max(maxMessage, 16+MaxStatus, maxFindReply)),
		grpc.MaxConcurrentStreams(4), grpc.MaxHeaderListSize(4096),
		grpc.ReadBufferSize(4096), grpc.WriteBufferSize(4096),
		grpc.WaitForHandlers(true),
	)
	s.g.RegisterService(&grpc.ServiceDesc{
		ServiceName: "tutti.Handshake",
		HandlerType: (*any)(nil),
		Methods: []grpc.MethodDesc{{MethodName: "Describe", Handler: serveDescribe},
			{MethodName: "Status", Handler: serveStatus}, {MethodName: "Find", Handler: serveFind}},
	}, s)
	go func() {
		defer close(s.done)
		s.g.Serve(s.l) // returns when the listener is closed
	}()
	if err := s.check(ctx, ips[len(ips)-1], port); err != nil {
		s.Close()
		return nil, err
	}
	return s, nil
}

// maxRequest bounds a request in bytes.
func (c *ServerConfig) maxRequest() int {
	if c.find != nil {
		return maxFindRequest
	}
	return 64
}

// Refused counts the connections that the endpoint has refused.
func (s *Server) Refused() Refused { return s.refused.count() }

// pickyListener accepts only connections to some of this machine's addresses.
type pickyListener struct {
	net.Listener
	allowed []netip.Addr
}

func (l *pickyListener) Accept() (net.Conn, error) {
	for {
		c, err := l.Listener.Accept()
		if err != nil {
			return nil, err
		}
		if a, ok := c.LocalAddr().(*net.TCPAddr); ok && slices.Contains(l.allowed, a.AddrPort().Addr().Unmap()) {
			return c, nil
		}
		c.Close()
	}
}

// admit refuses connections to another incarnation; Describe decides on the client.
func (s *Server) admit(_ net.Conn, h trust.Hello) error {
	rank := int64(h.ToRank) == int64(s.cfg.Rank) || s.cfg.find != nil // a member has another rank in each job
	if !rank || h.ToIncarnation != s.cfg.Incarnation || h.FromIncarnation == 0 {
		return &trust.Refusal{Code: trust.CodeStale, Text: fmt.Sprintf("this is rank %d (incarnation %016x), not rank "+
			"%d (incarnation %016x)",
			s.cfg.Rank, s.cfg.Incarnation, h.ToRank, h.ToIncarnation)}
	}
	return nil
}

func serveDescribe(srv any, ctx context.Context, decode func(any) error, _ grpc.UnaryServerInterceptor) (any, error) {
	s := srv.(*Server)
	var req describeRequest
	if err := decode(&req); err != nil {
		return nil, status.Error(codes.InvalidArgument, err.Error())
	}
	p, ok := peer.FromContext(ctx)
	if !ok {
		return nil, status.Error(codes.Unauthenticated, "no peer")
	}
	info, ok := p.AuthInfo.(proof.Info)
	if !ok {
		return nil, status.Error(codes.Unauthenticated, "no proof")
	}
	reply := &describeReply{nonce: req.nonce, incarnation: s.cfg.Incarnation}
	if h := info.Hello; int64(h.FromRank) == int64(s.cfg.Rank) && h.FromIncarnation == s.cfg.Incarnation {
		return reply, nil // the self-check: descriptors may not be ready
	}
	if s.cfg.Describe == nil {
		return nil, status.Error(codes.Unimplemented, "this is a member, no rank")
	}
	eps, err := s.cfg.Describe(ctx, int(info.Hello.FromRank), info.Hello.FromIncarnation)
	switch {
	case errors.Is(err, ErrStale):
		return nil, status.Error(codes.FailedPrecondition, err.Error())
	case err != nil:
		return nil, status.Error(codes.Aborted, err.Error())
	}
	reply.endpoints = eps
	return reply, nil
}

// check connects to the endpoint. If it listens on all addresses any of them will do; the last is
// the nearest.
func (s *Server) check(ctx context.Context, ip netip.Addr, port uint16) error {
	addr := netip.AddrPortFrom(ip, port).String()
	self := trust.Hello{FromRank: uint32(s.cfg.Rank), ToRank: uint32(s.cfg.Rank), FromIncarnation: s.cfg.Incarnation,
		ToIncarnation: s.cfg.Incarnation}
	within, cancel := context.WithTimeout(ctx, proofTimeout)
	defer cancel()
	conn, err := dialPeer(within, nil, addr, s.cfg.Secret, self)
	if err == nil {
		_, err = describe(within, conn, s.cfg.Incarnation)
	}
	switch {
	case err == nil:
		return nil
	case ctx.Err() != nil:
		return fmt.Errorf("handshake: the check of the endpoint at %s was ended: %w", addr, context.Cause(ctx))
	}
	return fmt.Errorf("handshake: the endpoint at %s does not answer itself (is there a firewall?): %w", addr, err)
}

// Addrs returns the addresses to publish, IP:PORT, best first.
func (s *Server) Addrs() []string { return slices.Clone(s.addrs) }

// Close ends the endpoint and its connections, and returns when no call is running. Idempotent.
func (s *Server) Close() {
	s.once.Do(func() {
		s.l.CloseAll()
		s.g.Stop()
	})
	<-s.done
}

// ClientConfig describes the client.
type ClientConfig struct {
	Self   Record // its Addrs are not used
	Secret []byte
	Dial   dial.Func // makes the connections; nil: net.Dialer
	// Started says that all peers listen before this client knows of them, so that one whose
	// addresses all refuse connections has ended: Describe then returns at once.
	Started bool
}

// Client asks peers for the endpoints of their transports. It keeps no connection between calls and
// may be used concurrently.
type Client struct{ cfg ClientConfig }

// NewClient returns a client. It does no I/O.
func NewClient(cfg ClientConfig) *Client { return &Client{cfg} }

// attempts bounds the connections that this process makes at a time: when many ranks start at once,
// each dials all others.
var attempts = semaphore.NewWeighted(16)

const (
	attemptTimeout = 2 * time.Second        // of one address, connection and proof
	attemptStagger = 150 * time.Millisecond // before the next address is tried beside one that does not answer
	firstPause     = 5 * time.Millisecond
	longestPause   = 500 * time.Millisecond
	authRounds     = 3 // another process may have the address of a peer that ends, for a moment
	lateRounds     = 3 // for an address that does not answer in time, beside another process that does
)

// Describe asks the rank that published to for its descriptors. It retries a peer that cannot be
// reached until ctx ends, because it may be starting (but see ClientConfig.Started). An error that
// wraps ErrStale says that another incarnation answers there, ErrAuth that the peer does not know
// the job's secret, ErrVersion that it is of another build, *SizeError that it has another job
// size, *TermsError that it has other Terms; other errors name the peer and its addresses.
func (c *Client) Describe(ctx context.Context, to Record) (Endpoints, error) {
	name := to.name()
	if err := c.cfg.Self.Compare(&to); err != nil {
		return nil, fmt.Errorf("%s: %w", name, err)
	}
	addrs := c.order(to)
	if len(addrs) == 0 {
		return nil, fmt.Errorf("%s: no address of %q can be reached from %s: set TUTTI_IFNAME on both to a "+
			"network they share", name, to.Addrs, c.cfg.Self.Host)
	}
	hello := trust.Hello{FromRank: uint32(c.cfg.Self.Rank), FromIncarnation: c.cfg.Self.Incarnation,
		ToRank: uint32(to.Rank), ToIncarnation: to.Incarnation}
	pause, auth := firstPause, 0
	var last error // of the latest attempt that the end of ctx did not cut short
	for {
		eps, err := c.round(ctx, addrs, hello)
		if err == nil {
			return eps, nil
		}
		if last == nil || ctx.Err() == nil && !timedOut(err) {
			last = err
		}
		var final *finalError
		if errors.Is(err, ErrAuth) || errors.Is(err, ErrVersion) {
			auth++
		}
		ended := c.cfg.Started && errors.As(err, new(*refusedError))
		if errors.As(err, &final) || errors.Is(err, ErrStale) || auth == authRounds || ended {
			return nil, fmt.Errorf("%s at %v: %w", name, addrs, err)
		}
		if !backoff.Sleep(ctx, time.Duration(float64(pause)*(0.5+mrand.Float64()))) {
			return nil, fmt.Errorf("%s at %v: %w; last attempt: %w", name, addrs, context.Cause(ctx), last)
		}
		pause = min(2*pause, longestPause)
	}
}

// finalError is a peer's authenticated refusal.
type finalError struct{ text string }

func (e *finalError) Error() string { return "the peer says: " + e.text }

// round tries the addresses one after the other, without waiting long for slow ones, and uses the
// first that works.
func (c *Client) round(ctx context.Context, addrs []string, hello trust.Hello) (Endpoints, error) {
	if err := attempts.Acquire(ctx, 1); err != nil {
		return nil, context.Cause(ctx)
	}
	defer attempts.Release(1)
	conn, err := c.reach(ctx, addrs, hello)
	if err != nil {
		return nil, err
	}
	cctx, cancel := context.WithTimeout(ctx, proofTimeout)
	defer cancel()
	return describe(cctx, conn, hello.ToIncarnation)
}

// reach connects to the first address that works. Where another process answers, the peer may still
// be at an address whose attempt ran out of time: those are tried again, a few times.
func (c *Client) reach(ctx context.Context, addrs []string, hello trust.Hello) (net.Conn, error) {
	conn, slow, err := c.pass(ctx, addrs, hello)
	for n := 1; n < lateRounds && errors.Is(err, ErrStale) && len(slow) > 0 && ctx.Err() == nil; n++ {
		var again error
		if conn, slow, again = c.pass(ctx, slow, hello); again == nil {
			return conn, nil
		}
	}
	return conn, err
}

// pass tries each address once. If none works it also returns those whose attempts ran out of time.
func (c *Client) pass(ctx context.Context, addrs []string, hello trust.Hello) (won net.Conn, slow []string, _ error) {
	rctx, cancel := context.WithCancel(ctx)
	defer cancel()
	type result struct {
		addr string
		conn net.Conn
		err  error
	}
	results := make(chan result)
	started, running := 0, 0
	start := func() {
		addr := addrs[started]
		started++
		running++
		go func() {
			actx, cancel := context.WithTimeout(rctx, attemptTimeout)
			defer cancel()
			conn, err := dialPeer(actx, c.cfg.Dial, addr, c.cfg.Secret, hello)
			results <- result{addr, conn, err}
		}()
	}
	start()
	next := time.NewTicker(attemptStagger)
	defer next.Stop()
	var errs []error
	for running > 0 {
		select {
		case <-next.C:
			if started < len(addrs) && won == nil {
				start()
			}
		case r := <-results:
			running--
			switch {
			case r.err == nil && won == nil:
				won = r.conn
				if running > 0 {
					cancel() // ends the other attempts; the call has its own bound
				}
			case r.err == nil:
				r.conn.Close()
			default:
				errs = append(errs, r.err)
				if timedOut(r.err) {
					slow = append(slow, r.addr)
				}
				if started < len(addrs) && won == nil {
					start()
				}
			}
		}
	}
	if won == nil {
		// Misdirected attempts say less than one that got somewhere, so the definite errors come
		// first.
		slices.SortStableFunc(errs, func(a, b error) int { return cmp.Compare(weight(b), weight(a)) })
		if slices.ContainsFunc(errs, func(err error) bool { return !errors.Is(err, syscall.ECONNREFUSED) }) {
			return nil, slow, errs[0]
		}
		return nil, slow, &refusedError{errs[0]}
	}
	return won, nil, nil
}

func timedOut(err error) bool {
	var late net.Error
	return errors.As(err, &late) && late.Timeout()
}

// refusedError says that nothing listens at any address.
type refusedError struct{ error }

func (e *refusedError) Unwrap() error { return e.error }

func weight(err error) int {
	switch {
	case errors.Is(err, ErrStale):
		return 2
	case errors.Is(err, ErrAuth), errors.Is(err, ErrVersion):
		return 1
	}
	return 0
}

// dialPeer connects to a peer's endpoint and proves the secret there.
func dialPeer(ctx context.Context, via dial.Func, addr string, secret []byte, h trust.Hello) (conn net.Conn,
	err error) {
	err = trust.Redial(ctx, func() error {
		conn, err = dialPeerOnce(ctx, via, addr, secret, h)
		return err
	})
	return conn, err
}

func dialPeerOnce(ctx context.Context, via dial.Func, addr string, secret []byte, h trust.Hello) (net.Conn, error) {
	conn, err := via.Dial(ctx, &net.Dialer{}, int(h.ToRank), addr)
	if err != nil {
		return nil, err
	}
	if err := prove(ctx, conn, secret, rpcPurpose, h); err != nil {
		conn.Close()
		var r *trust.Refusal
		if errors.As(err, &r) && r.Code == trust.CodeStale {
			err = fmt.Errorf("%w (the peer says: %s)", ErrStale, r.Text)
		}
		return nil, fmt.Errorf("%s: %w", addr, err)
	}
	return conn, nil
}

// describe asks over an authenticated connection, which it owns and closes.
func describe(ctx context.Context, conn net.Conn, incarnation uint64) (Endpoints, error) {
	req, reply := &describeRequest{ident.New()}, &describeReply{}
	if err := call(ctx, conn, rpcMethod, req, reply, maxMessage); err != nil {
		return nil, err
	}
	if reply.nonce != req.nonce || reply.incarnation != incarnation {
		return nil, fmt.Errorf("%w (the answer comes from incarnation %016x)", ErrStale, reply.incarnation)
	}
	return reply.endpoints, nil
}

// call makes one call over an authenticated connection, which it owns and closes. limit bounds the
// answer in bytes.
func call(ctx context.Context, conn net.Conn, method string, req, reply any, limit int) error {
	defer conn.Close()
	var once sync.Once
	cc, err := grpc.NewClient("passthrough:///"+conn.RemoteAddr().String(),
		grpc.WithContextDialer(func(context.Context, string) (c net.Conn, err error) {
			err = net.ErrClosed
			once.Do(func() { c, err = conn, nil })
			return c, err
		}),
		grpc.WithTransportCredentials(insecure.NewCredentials()), // the connection is authenticated
		grpc.WithDefaultCallOptions(grpc.ForceCodec(wire{}), grpc.MaxCallRecvMsgSize(limit)),
		grpc.WithReadBufferSize(4096), grpc.WithWriteBufferSize(4096),
		grpc.WithDisableServiceConfig(), grpc.WithDisableRetry(), grpc.WithMaxHeaderListSize(4096),
	)
	if err != nil {
		return err
	}
	defer cc.Close()
	if err := cc.Invoke(ctx, method, req, reply); err != nil {
		st := status.Convert(err)
		switch st.Code() {
		case codes.FailedPrecondition:
			return fmt.Errorf("%w (the peer says: %s)", ErrStale, st.Message())
		case codes.Unavailable, codes.DeadlineExceeded, codes.Canceled:
			return errors.New(st.Message())
		}
		return &finalError{st.Message()}
	}
	return nil
}

// order returns those of a record's addresses that a route leads to, best first.
func (c *Client) order(to Record) []string {
	here := route.This(ifname.Filter{})
	where := route.Unknown
	if to.Network != "" && c.cfg.Self.Network != "" {
		where = route.Elsewhere
		if to.Network == c.cfg.Self.Network {
			where = route.Here
		}
	}
	var paths []route.Path
	for _, a := range to.Addrs {
		ap, err := netip.ParseAddrPort(a)
		if err != nil {
			continue
		}
		p, err := here.Judge(netip.AddrPortFrom(ap.Addr().Unmap(), ap.Port()), where)
		// Without a descriptor the route is not known, and the dial gives the reason.
		if err == nil || errors.Is(err, syscall.EMFILE) {
			paths = append(paths, p)
		}
	}
	slices.SortStableFunc(paths, route.Compare)
	addrs := make([]string, len(paths))
	for i, p := range paths {
		addrs[i] = p.To.String()
	}
	return addrs
}
