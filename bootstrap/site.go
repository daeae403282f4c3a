package bootstrap

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http/httptrace"
	"os"
	"strings"
	"sync"
	"time"

	"go.uber.org/atomic"
	"google.golang.org/grpc/credentials"

	"tutti/internal/dial"
	"tutti/internal/trust"
)

// tls returns the TLS configuration for the store at addr; nil: no TLS.
func (cfg *StoreConfig) tls(addr StoreAddr) (*tls.Config, error) {
	if addr.Scheme != "etcds" {
		if cfg.CA != "" || cfg.Cert != "" {
			return nil, fmt.Errorf("store %v: certificates are given, but only an etcds:// address uses them", addr)
		}
		return nil, nil
	}
	if cfg.TLS != nil {
		return cfg.TLS, nil
	}
	c := &tls.Config{MinVersion: tls.VersionTLS12}
	if cfg.CA != "" {
		pem, err := os.ReadFile(cfg.CA)
		if err != nil {
			return nil, fmt.Errorf("store's certificate authorities: %w", err)
		}
		c.RootCAs = x509.NewCertPool()
		if !c.RootCAs.AppendCertsFromPEM(pem) {
			return nil, fmt.Errorf("store's certificate authorities: %s holds no PEM certificate", cfg.CA)
		}
	}
	if cfg.Cert != "" || cfg.Key != "" {
		pair, err := tls.LoadX509KeyPair(cfg.Cert, cfg.Key)
		if err != nil {
			return nil, fmt.Errorf("store's client certificate: %w", err)
		}
		c.Certificates = []tls.Certificate{pair}
	}
	return c, nil
}

// dialer makes the connections to the store, proves the secret to an embedded store, and records
// why connections fail, which gRPC hides behind its retries.
type dialer struct {
	life    context.Context // ends with the handle
	via     dial.Func
	secret  []byte
	prove   bool
	tls     bool // a connection is made when its TLS handshake has ended
	rank    int
	guest   uint64       // of StoreConfig
	alone   bool         // the store has only one endpoint
	refused func(error)  // called with a refusal that further attempts cannot change
	last    atomic.Error // the error of the latest attempt; nil: connected
	slow    atomic.Bool  // an attempt has ended before its host name was resolved

	mu   sync.Mutex
	made map[string]*connecting // by address
}

// refusal is an error that the store returned, or that this end found in a wrong store.
type refusal struct{ error }

func (d *dialer) dial(ctx context.Context, addr string) (net.Conn, error) {
	conn, err := d.connect(ctx, addr)
	if err == nil && d.prove {
		h := StoreHello(d.rank, addr, conn.RemoteAddr())
		h.FromIncarnation = d.guest
		if err = prove(ctx, conn, d.secret, StorePurpose, h); err != nil {
			conn.Close()
			var no *trust.Refusal
			switch {
			case errors.As(err, &no) && no.Code == codeEnds:
				d.refused(ErrStoreEnds)
			case no != nil || errors.Is(err, trust.ErrAuth) || errors.Is(err, trust.ErrVersion):
				d.refused(err)
			}
		}
	}
	if err != nil {
		if ctx.Err() == nil && d.life.Err() == nil {
			d.last.Store(err)
		}
		return nil, err
	}
	if !d.tls {
		d.last.Store(nil)
	}
	return conn, nil
}

// connecting is a connection that is being made. It outlives an attempt that ends while a host name
// is being resolved, since DNS may ask its second server after more time than an attempt has. The
// next attempt waits for it.
type connecting struct {
	ctx  context.Context
	stop context.CancelFunc
	done chan connected

	mu    sync.Mutex
	host  string    // the name that is being resolved; "": none
	since time.Time // when that began
}

// connected is the result of connecting.
type connected struct {
	conn net.Conn
	err  error
}

// connect returns a connection to addr. It begins to make one, unless an earlier attempt has.
func (d *dialer) connect(ctx context.Context, addr string) (net.Conn, error) {
	d.mu.Lock()
	c := d.made[addr]
	if c == nil {
		c = d.begin(addr)
		d.made[addr] = c
	}
	d.mu.Unlock()
	var r connected
	select {
	case r = <-c.done:
	case <-c.ctx.Done():
		return nil, context.Cause(c.ctx)
	case <-ctx.Done():
		if err := c.unresolved(); err != nil {
			d.slow.Store(true)
			return nil, err
		}
		r.err = context.Cause(ctx)
	}
	d.mu.Lock()
	if d.made[addr] == c {
		delete(d.made, addr)
	}
	d.mu.Unlock()
	c.stop()
	return r.conn, r.err
}

// begin makes a connection to addr in the background, until the handle ends.
func (d *dialer) begin(addr string) *connecting {
	c := &connecting{done: make(chan connected)}
	c.ctx, c.stop = context.WithCancel(d.life)
	ctx := httptrace.WithClientTrace(c.ctx, &httptrace.ClientTrace{
		DNSStart: func(i httptrace.DNSStartInfo) { c.resolves(i.Host) },
		DNSDone: func(httptrace.DNSDoneInfo) {
			if c.ctx.Err() == nil {
				c.resolves("")
			}
		}})
	go func() {
		conn, err := d.via.Dial(ctx, &net.Dialer{}, dial.Store, addr)
		select {
		case c.done <- connected{conn, err}:
		case <-c.ctx.Done():
			if err == nil {
				conn.Close()
			}
		}
	}()
	return c
}

// resolves notes that a name is being resolved from now on; "": none.
func (c *connecting) resolves(host string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.host, c.since = host, time.Now()
}

// unresolved returns an error if a name is being resolved, or was when the handle ended.
func (c *connecting) unresolved() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.host == "" {
		return nil
	}
	return fmt.Errorf("the host name %s has not been resolved yet: DNS has not answered for %v", c.host,
		time.Since(c.since).Round(time.Millisecond))
}

// why returns the most specific reason why there is no connection, nil if none is known.
func (d *dialer) why() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, c := range d.made {
		if err := c.unresolved(); err != nil {
			return err
		}
	}
	return d.last.Load()
}

// watchedTLS are TLS credentials that report certificate errors to the dialer, of either side.
type watchedTLS struct {
	credentials.TransportCredentials
	d *dialer
}

func (w *watchedTLS) ClientHandshake(ctx context.Context, authority string, raw net.Conn) (net.Conn,
	credentials.AuthInfo, error) {
	conn, info, err := w.TransportCredentials.ClientHandshake(ctx, authority, raw)
	if err != nil {
		if ctx.Err() == nil {
			w.d.failed(err)
		}
		return nil, nil, err
	}
	w.d.last.Store(nil)
	return &watchedConn{conn, w.d}, info, nil
}

func (w *watchedTLS) Clone() credentials.TransportCredentials {
	return &watchedTLS{w.TransportCredentials.Clone(), w.d}
}

// watchedConn is a connection after its handshake. In TLS 1.3 the store's verdict on this end's
// certificate is still to come.
type watchedConn struct {
	net.Conn
	d *dialer
}

func (c *watchedConn) Read(b []byte) (int, error) {
	n, err := c.Conn.Read(b)
	if isAlert(err) {
		c.d.failed(err)
	}
	return n, err
}

// isAlert reports whether err is a TLS alert of the other end.
func isAlert(err error) bool {
	var op *net.OpError
	return errors.As(err, &op) && op.Op == "remote error"
}

// failed records a failed TLS connection. Certificate errors are permanent.
func (d *dialer) failed(err error) {
	var plain tls.RecordHeaderError
	var cert *tls.CertificateVerificationError
	final := true
	switch {
	case errors.As(err, &plain):
		err = fmt.Errorf("it does not speak TLS (%w): is it an etcd:// address?", err)
	case errors.As(err, &cert):
		if errors.As(err, new(x509.UnknownAuthorityError)) {
			err = fmt.Errorf("%w: set TUTTI_STORE_CA to the PEM file of the authority that signed the store's "+
				"certificate", err)
		}
	case isAlert(err) && strings.Contains(err.Error(), "certificate"):
		err = fmt.Errorf("it does not take this client's certificate, or misses one (%w): check TUTTI_STORE_CERT "+
			"and TUTTI_STORE_KEY", err)
	case errors.Is(err, io.EOF):
		err = fmt.Errorf("it closed the connection in the TLS handshake (%w): does it speak TLS, or is it an "+
			"etcd:// address?", err)
		final = false
	default:
		final = isAlert(err)
	}
	d.last.Store(err)
	if final && d.alone { // another of several members may work
		d.refused(err)
	}
}

// speaksTLS finds out whether endpoint speaks TLS, to explain why another protocol failed. It sends
// no data, and ends with ctx at the latest.
func speaksTLS(ctx context.Context, endpoint string) bool {
	d := tls.Dialer{Config: &tls.Config{InsecureSkipVerify: true}} // any certificate will do
	conn, err := d.DialContext(ctx, "tcp", endpoint)
	if err == nil {
		conn.Close()
	}
	return err == nil || isAlert(err)
}
