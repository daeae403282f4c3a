// Package sitetest starts an etcd like that of a site, with TLS, client certificates, users and
// passwords. It is for tests of etcd:// and etcds:// addresses; a launcher's own store is in
// package embed.
//
// The certificates are those of an authority that exists only during the test.
package sitetest

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"math/big"
	"net"
	"net/url"
	"os"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"go.etcd.io/etcd/server/v3/embed"
	"go.uber.org/zap"

	"tutti/internal/etcd"
)

// The user that Config.Users makes beside root. It may read and write what is below /tutti/test/
// and /tutti/default/, and nothing else.
const (
	User     = "rank"
	Password = "the password of the ranks"
)

// patience bounds every step.
const patience = 30 * time.Second

// Config describes the site.
type Config struct {
	TLS         bool  // clients connect by TLS
	ClientCerts bool  // and must show a certificate of the site's authority; implies TLS
	Users       bool  // clients must authenticate as User, with Password
	Expired     bool  // the site's certificate has expired
	Quota       int64 // bytes that the store may hold; default etcd's
	TokenTTL    uint  // lifetime of an authentication token in seconds; default etcd's
}

// Site is a running etcd.
type Site struct {
	Address   string // for TUTTI_STORE
	Authority *Authority
	CA        string // PEM files, "" without TLS
	Cert, Key string // a client's, "" unless they are needed
	users     bool
}

// Start starts a site, which ends with the test.
func Start(t testing.TB, cfg Config) *Site {
	t.Helper()
	s := &Site{users: cfg.Users}
	c := config(t.TempDir())
	if cfg.Quota > 0 {
		c.QuotaBackendBytes = cfg.Quota
	}
	if cfg.TokenTTL > 0 {
		c.AuthTokenTTL = cfg.TokenTTL
	}
	scheme := "http"
	if cfg.TLS || cfg.ClientCerts {
		scheme = "https"
		etcd.Listen(c, url.URL{Scheme: scheme, Host: "127.0.0.1:0"})
		s.Authority = NewAuthority(t)
		s.CA = s.Authority.File
		tls := &c.ClientTLSInfo
		tls.CertFile, tls.KeyFile = s.Authority.Issue(t, Certificate{Host: "127.0.0.1", Expired: cfg.Expired})
		if cfg.ClientCerts {
			tls.ClientCertAuth, tls.TrustedCAFile = true, s.CA
			s.Cert, s.Key = s.Authority.Issue(t, Certificate{Name: User})
		}
	}
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	e, err := etcd.Start(ctx, c)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(e.Stop)
	s.Address = map[string]string{"http": "etcd://", "https": "etcds://"}[scheme] + e.Address()
	if cfg.Users {
		s.makeUsers(t, scheme+"://"+e.Address())
	}
	return s
}

// Serve starts a site without authentication and encryption, with its data in dir. It returns when
// the site serves, or ctx ends.
func Serve(ctx context.Context, dir string) (address string, stop func(), err error) {
	e, err := etcd.Start(ctx, config(dir))
	if err != nil {
		return "", nil, err
	}
	return "etcd://" + e.Address(), e.Stop, nil
}

func config(dir string) *embed.Config {
	c := etcd.Config(dir)
	c.BcryptCost = 4 // the minimum, also in time
	return c
}

// makeUsers makes root and User, and requires authentication.
func (s *Site) makeUsers(t testing.TB, endpoint string) {
	conf := clientv3.Config{Endpoints: []string{endpoint}, Logger: zap.NewNop(), DialTimeout: patience}
	if s.CA != "" {
		conf.TLS = &tls.Config{RootCAs: s.Authority.Pool()}
		if s.Cert != "" {
			pair, err := tls.LoadX509KeyPair(s.Cert, s.Key)
			if err != nil {
				t.Fatal(err)
			}
			conf.TLS.Certificates = []tls.Certificate{pair}
		}
	}
	c, err := clientv3.New(conf)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	ok := func(_ any, err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	ok(c.UserAdd(ctx, "root", "the password of root"))
	ok(c.UserGrantRole(ctx, "root", "root"))
	ok(c.UserAdd(ctx, User, Password))
	ok(c.RoleAdd(ctx, "ranks"))
	for _, prefix := range []string{"/tutti/test/", "/tutti/default/"} {
		ok(c.RoleGrantPermission(ctx, "ranks", prefix, clientv3.GetPrefixRangeEnd(prefix),
			clientv3.PermissionType(clientv3.PermReadWrite)))
	}
	ok(c.UserGrantRole(ctx, User, "ranks"))
	ok(c.AuthEnable(ctx))
}

// Env returns the variables by which a rank finds the site, NAME=value.
func (s *Site) Env() []string {
	env := []string{"TUTTI_STORE=" + s.Address}
	if s.CA != "" {
		env = append(env, "TUTTI_STORE_CA="+s.CA)
	}
	if s.Cert != "" {
		env = append(env, "TUTTI_STORE_CERT="+s.Cert, "TUTTI_STORE_KEY="+s.Key)
	}
	if s.users {
		env = append(env, "TUTTI_STORE_USER="+User, "TUTTI_STORE_PASSWORD="+Password)
	}
	return env
}

// Authority issues certificates.
type Authority struct {
	File string // its own certificate
	dir  string
	cert *x509.Certificate
	key  *ecdsa.PrivateKey
	n    int64
}

// NewAuthority makes an authority that ends with the test.
func NewAuthority(t testing.TB) *Authority {
	t.Helper()
	a := &Authority{dir: t.TempDir()}
	a.File, _ = a.Issue(t, Certificate{Name: "authority of a test"})
	return a
}

// Certificate describes a certificate to issue.
type Certificate struct {
	Name    string // of the subject
	Host    string // the server's address; "": a client's certificate
	Expired bool   // an hour ago
}

// Issue returns the PEM files of a certificate and its key.
func (a *Authority) Issue(t testing.TB, c Certificate) (cert, key string) {
	t.Helper()
	check := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	own, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	check(err)
	a.n++
	end := time.Now().Add(time.Hour)
	if c.Expired {
		end = time.Now().Add(-time.Hour)
	}
	x := &x509.Certificate{SerialNumber: big.NewInt(a.n), Subject: pkix.Name{CommonName: c.Name},
		NotBefore: time.Now().Add(-48 * time.Hour), NotAfter: end,
		KeyUsage: x509.KeyUsageDigitalSignature}
	parent, signer := a.cert, a.key
	switch {
	case parent == nil:
		x.IsCA, x.BasicConstraintsValid, x.KeyUsage = true, true, x509.KeyUsageCertSign
		parent, signer = x, own
	case c.Host != "":
		x.ExtKeyUsage, x.IPAddresses = []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth},
			[]net.IP{net.ParseIP(c.Host)}
	default:
		x.ExtKeyUsage = []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth}
	}
	der, err := x509.CreateCertificate(rand.Reader, x, parent, &own.PublicKey, signer)
	check(err)
	if a.cert == nil {
		a.cert, err = x509.ParseCertificate(der)
		check(err)
		a.key = own
	}
	secret, err := x509.MarshalPKCS8PrivateKey(own)
	check(err)
	write := func(kind string, b []byte) string {
		f, err := os.CreateTemp(a.dir, kind+"-*.pem")
		check(err)
		check(pem.Encode(f, &pem.Block{Type: kind, Bytes: b}))
		check(f.Close())
		return f.Name()
	}
	return write("CERTIFICATE", der), write("PRIVATE KEY", secret)
}

// Pool returns a pool that contains only the authority.
func (a *Authority) Pool() *x509.CertPool {
	p := x509.NewCertPool()
	p.AddCert(a.cert)
	return p
}
