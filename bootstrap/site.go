package bootstrap

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"strings"

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
	via     dial.Func
	secret  []byte
	prove   bool
	rank    int
	guest   uint64       // of StoreConfig
	alone   bool         // the store has only one endpoint
	refused func(error)  // called with a refusal that further attempts cannot change
	last    atomic.Error // the error of the latest attempt; nil: connected
}

// refusal is an error that the store returned, or that this end found in a wrong store.
type refusal struct{ error }

func (d *dialer) dial(ctx context.Context, addr string) (net.Conn, error) {
	conn, err := d.via.Dial(ctx, &net.Dialer{}, dial.Store, addr)
	if err == nil && d.prove {
		h := StoreHello(d.rank, addr, conn.RemoteAddr())
		h.FromIncarnation = d.guest
		if err = prove(ctx, conn, d.secret, StorePurpose, h); err != nil {
			conn.Close()
			var no *trust.Refusal
			switch {
			case errors.As(err, &no) && no.Code == codeEnds:
				d.refused(ErrStoreEnds)
			case no != nil || errors.Is(err, trust.ErrAuth):
				d.refused(err)
			}
		}
	}
	if err != nil {
		if ctx.Err() == nil {
			d.last.Store(err)
		}
		return nil, err
	}
	d.last.Store(nil)
	return conn, nil
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
