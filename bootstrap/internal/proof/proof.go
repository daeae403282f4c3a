// Package proof puts package trust in front of a gRPC server: every connection proves the job's
// secret before HTTP/2 begins.
//
// A Listener runs the accepting half of trust on every connection and passes only the authenticated
// ones to grpc.Server.Serve; Credentials make sure that a server gets no others. Handlers get the
// caller's identity from Info, as it was proved and not as the call claims it. The package serves
// the handshake between ranks and the embedded store, which use gRPC; the transports use trust in
// front of their own protocols.
package proof

import (
	"context"
	"errors"
	"net"
	"sync"
	"time"

	"google.golang.org/grpc/credentials"

	"tutti/internal/trust"
)

// Timeout bounds each step of a connection's proof, and then the beginning of HTTP/2.
const Timeout = 5 * time.Second

// Config says how connections authenticate.
type Config struct {
	Secret  []byte
	Purpose string                            // see trust.Client
	Admit   func(net.Conn, trust.Hello) error // see trust.Acceptor
	Refused func(net.Conn, error)             // see trust.Acceptor; may be nil
	Failing func(error)                       // see trust.Acceptor; may be nil
	Timeout time.Duration                     // default Timeout
	Max     int                               // see trust.Acceptor
}

// Conn is an authenticated connection, with the identity of its other end.
type Conn struct {
	net.Conn
	Hello trust.Hello
	l     *Listener
}

// Close closes the connection. Idempotent.
func (c *Conn) Close() error {
	c.l.mu.Lock()
	delete(c.l.open, c)
	if len(c.l.open) == 0 && c.l.none != nil {
		close(c.l.none)
		c.l.none = nil
	}
	c.l.mu.Unlock()
	return c.Conn.Close()
}

// Listener is a net.Listener whose Accept returns only authenticated connections, as *Conn.
type Listener struct {
	a      trust.Acceptor
	ready  chan *Conn
	done   chan struct{}
	served chan struct{}
	once   sync.Once
	mu     sync.Mutex
	open   map[*Conn]struct{}
	none   chan struct{} // closed when open becomes empty; nil: there is no waiter
}

// Listen begins to accept on l, and owns it.
func Listen(l net.Listener, cfg Config) *Listener {
	if cfg.Timeout == 0 {
		cfg.Timeout = Timeout
	}
	p := &Listener{ready: make(chan *Conn), done: make(chan struct{}), served: make(chan struct{}),
		open: map[*Conn]struct{}{}}
	p.a = trust.Acceptor{Listener: l, Secret: cfg.Secret, Purpose: cfg.Purpose, Timeout: cfg.Timeout, Max: cfg.Max,
		Admit: cfg.Admit, Refused: cfg.Refused, Failing: cfg.Failing, Accepted: p.accepted}
	go func() {
		defer close(p.served)
		p.a.Serve()
	}()
	return p
}

func (p *Listener) accepted(conn net.Conn, h trust.Hello, _ *trust.Session) {
	c := &Conn{Conn: conn, Hello: h, l: p}
	p.mu.Lock()
	p.open[c] = struct{}{}
	p.mu.Unlock()
	select {
	case p.ready <- c:
	case <-p.done:
		c.Close()
	}
}

// Accept returns the next authenticated connection.
func (p *Listener) Accept() (net.Conn, error) {
	select {
	case c := <-p.ready:
		return c, nil
	case <-p.done:
		return nil, net.ErrClosed
	}
}

// Addr returns the listening address.
func (p *Listener) Addr() net.Addr { return p.a.Listener.Addr() }

// Close stops accepting. It returns when no handshake is running; accepted connections stay open.
func (p *Listener) Close() error {
	var err error
	p.once.Do(func() {
		close(p.done)
		err = p.a.Close()
	})
	<-p.served
	return err
}

// CloseAll closes the listener and every connection that it accepted and that is still open.
func (p *Listener) CloseAll() {
	p.Close()
	p.mu.Lock()
	conns := make([]*Conn, 0, len(p.open))
	for c := range p.open {
		conns = append(conns, c)
	}
	p.mu.Unlock()
	for _, c := range conns {
		c.Close()
	}
}

// Open returns the number of connections that were accepted and are open.
func (p *Listener) Open() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return len(p.open)
}

// Wait returns nil when no connection that was accepted is open, or an error when ctx ends.
func (p *Listener) Wait(ctx context.Context) error {
	p.mu.Lock()
	if len(p.open) == 0 {
		p.mu.Unlock()
		return nil
	}
	if p.none == nil {
		p.none = make(chan struct{})
	}
	none := p.none
	p.mu.Unlock()
	select {
	case <-none:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// Info identifies the caller to a handler: the peer.AuthInfo of a call over a Conn.
type Info struct {
	credentials.CommonAuthInfo
	Hello trust.Hello
}

// AuthType returns "tutti".
func (Info) AuthType() string { return "tutti" }

// Credentials are the transport credentials of a server that serves a Listener: they refuse every
// connection that is not an authenticated Conn.
type Credentials struct{}

var errServerOnly = errors.New("proof: credentials of a server")

func (Credentials) ServerHandshake(conn net.Conn) (net.Conn, credentials.AuthInfo, error) {
	c, ok := conn.(*Conn)
	if !ok {
		return nil, nil, errors.New("proof: connection without proof of the job's secret")
	}
	return conn, Info{credentials.CommonAuthInfo{SecurityLevel: credentials.NoSecurity}, c.Hello}, nil
}

func (Credentials) ClientHandshake(context.Context, string, net.Conn) (net.Conn, credentials.AuthInfo, error) {
	return nil, nil, errServerOnly
}

func (Credentials) Info() credentials.ProtocolInfo {
	return credentials.ProtocolInfo{SecurityProtocol: "tutti"}
}
func (c Credentials) Clone() credentials.TransportCredentials { return c }
func (Credentials) OverrideServerName(string) error           { return nil }
