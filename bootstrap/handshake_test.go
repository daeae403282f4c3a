package bootstrap_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"tutti/bootstrap"
	"tutti/bootstrap/storetest"
	"tutti/internal/ident"
	"tutti/internal/ports/portstest"
	"tutti/internal/trust"
)

type describer func(ctx context.Context, from int, incarnation uint64) (bootstrap.Endpoints, error)

func fixed(eps bootstrap.Endpoints) describer {
	return func(context.Context, int, uint64) (bootstrap.Endpoints, error) { return eps, nil }
}

// rank starts the endpoint of a rank on loopback and returns its record.
func rank(t testing.TB, r, size int, d describer) (*bootstrap.Server, bootstrap.Record) {
	t.Helper()
	inc := ident.New()
	s, err := bootstrap.Serve(context30(t), bootstrap.ServerConfig{Rank: r, Incarnation: inc, Secret: secret,
		Interfaces: "127.0.0.1", Ports: portstest.Port(t), Describe: d})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.Close)
	return s, bootstrap.NewRecord(r, size, inc, s.Addrs())
}

func client(self bootstrap.Record) *bootstrap.Client {
	return bootstrap.NewClient(bootstrap.ClientConfig{Self: self, Secret: secret})
}

func TestDescribe(t *testing.T) {
	eps := bootstrap.Endpoints{"tcp": []byte("somewhere"), "shm": nil}
	var asked atomic.Uint64
	_, peer := rank(t, 1, 2, func(_ context.Context, from int, inc uint64) (bootstrap.Endpoints, error) {
		if from != 0 {
			return nil, fmt.Errorf("rank %d asks", from)
		}
		asked.Store(inc)
		return eps, nil
	})
	self := bootstrap.NewRecord(0, 2, ident.New(), nil)
	got, err := client(self).Describe(context30(t), peer)
	if err != nil || len(got) != 2 || string(got["tcp"]) != "somewhere" || len(got["shm"]) != 0 ||
		asked.Load() != self.Incarnation {
		t.Errorf("%q, %v, asked by %x", got, err, asked.Load())
	}
	self.Rank = 5
	self.Size, peer.Size = 6, 6
	if _, err := client(self).Describe(context30(t), peer); err == nil ||
		!strings.Contains(err.Error(), "rank 5 asks") || !strings.Contains(err.Error(), "rank 1 ") {
		t.Errorf("the peer's own error: %v", err)
	}
}

func TestDescribeRefusals(t *testing.T) {
	srv, peer := rank(t, 1, 2, func(_ context.Context, from int, _ uint64) (bootstrap.Endpoints, error) {
		return nil, fmt.Errorf("rank 0 left: %w", bootstrap.ErrStale)
	})
	self := bootstrap.NewRecord(0, 2, 77, nil)
	ctx := context30(t)
	for name, c := range map[string]struct {
		change func(*bootstrap.ClientConfig, *bootstrap.Record)
		is     error
		text   string
	}{
		"wrong secret": {func(c *bootstrap.ClientConfig,
			_ *bootstrap.Record) {
			c.Secret = []byte("a secret of another job")
		}, bootstrap.ErrAuth, peer.Addrs[0]},
		"another handshake": {func(_ *bootstrap.ClientConfig, r *bootstrap.Record) {
			r.Addrs = []string{later(t, "127.0.0.1:0")}
		}, bootstrap.ErrVersion, "the other end speaks tutti/Z"},
		"an earlier life": {func(_ *bootstrap.ClientConfig, r *bootstrap.Record) { r.Incarnation++ },
			bootstrap.ErrStale, "rank 1"},
		"another rank": {func(_ *bootstrap.ClientConfig, r *bootstrap.Record) { r.Rank = 0 }, bootstrap.ErrStale,
			"this is rank 1"},
		"an asker without id": {func(c *bootstrap.ClientConfig, _ *bootstrap.Record) { c.Self.Incarnation = 0 },
			bootstrap.ErrStale, ""},
		"an asker who left": {func(*bootstrap.ClientConfig, *bootstrap.Record) {}, bootstrap.ErrStale, "rank 0 left"},
		"another size":      {func(_ *bootstrap.ClientConfig, r *bootstrap.Record) { r.Size = 3 }, nil, "2 ranks"},
		"another build": {func(_ *bootstrap.ClientConfig, r *bootstrap.Record) { r.Terms.Version = "2" }, nil,
			"another build of the library than rank 1"},
		"nowhere": {func(_ *bootstrap.ClientConfig, r *bootstrap.Record) { r.Addrs = nil }, nil,
			"TUTTI_IFNAME"},
		"another's loopback": {func(_ *bootstrap.ClientConfig, r *bootstrap.Record) { r.Network = "elsewhere" }, nil,
			"TUTTI_IFNAME"},
	} {
		cfg, to := bootstrap.ClientConfig{Self: self, Secret: secret}, peer
		c.change(&cfg, &to)
		_, err := bootstrap.NewClient(cfg).Describe(ctx, to)
		if err == nil || c.is != nil && !errors.Is(err, c.is) || !strings.Contains(err.Error(), c.text) ||
			ctx.Err() != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
	// What this rank refuses is counted, by its reason.
	for _, said := range []string{"tutti/Z\n", "tutti/0\n"} {
		c, err := net.Dial("tcp", peer.Addrs[0])
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		c.SetDeadline(time.Now().Add(patience))
		io.WriteString(c, said)
		if _, err := io.ReadAll(c); err != nil {
			t.Error(err)
		}
	}
	if r := srv.Refused(); r.Secret < 1 || r.Version != 1 {
		t.Errorf("refused: %+v, want some of another secret, and 1 of another build", r)
	}
	// A peer that is not there is waited for until the deadline, and named.
	srv.Close()
	short, cancel := context.WithCancel(ctx)
	defer cancel()
	patient := bootstrap.NewClient(bootstrap.ClientConfig{Self: self, Secret: secret,
		Dial: func(ctx context.Context, d *net.Dialer, _ int, address string) (net.Conn, error) {
			defer cancel()
			return d.DialContext(ctx, "tcp", address)
		}})
	if _, err := patient.Describe(short, peer); !errors.Is(err, context.Canceled) ||
		!strings.Contains(err.Error(), "rank 1 (incarnation") || !strings.Contains(err.Error(), "refused") {
		t.Errorf("a peer that ended: %v", err)
	}
}

// Descriptors beyond the limits do not leave the rank that made them.
func TestDescribeLimits(t *testing.T) {
	self := bootstrap.NewRecord(0, 2, 77, nil)
	many := bootstrap.Endpoints{}
	for i := range bootstrap.MaxEndpoints + 1 {
		many[fmt.Sprint(i)] = nil
	}
	full := bootstrap.Endpoints{}
	for i := range bootstrap.MaxEndpoints {
		full[fmt.Sprintf("%032d", i)] = make([]byte, bootstrap.MaxEndpointSize)
	}
	for name, c := range map[string]struct {
		eps bootstrap.Endpoints
		ok  bool
	}{
		"full":     {full, true},
		"many":     {many, false},
		"long":     {bootstrap.Endpoints{"tcp": make([]byte, bootstrap.MaxEndpointSize+1)}, false},
		"nameless": {bootstrap.Endpoints{"": nil}, false},
	} {
		_, peer := rank(t, 1, 2, fixed(c.eps))
		got, err := client(self).Describe(context30(t), peer)
		if (err == nil) != c.ok || len(got) != len(c.eps) && c.ok {
			t.Errorf("%s: %d transports, %v", name, len(got), err)
		}
	}
}

// A peer that starts late is found.
func TestDescribeEarly(t *testing.T) {
	at := portstest.Port(t)
	peer := bootstrap.NewRecord(1, 2, 99, []string{"127.0.0.1:" + at})
	done := make(chan error, 1)
	go func() {
		_, err := client(bootstrap.NewRecord(0, 2, 77, nil)).Describe(context30(t), peer)
		done <- err
	}()
	s, err := bootstrap.Serve(context30(t), bootstrap.ServerConfig{Rank: 1, Incarnation: 99, Secret: secret,
		Interfaces: "127.0.0.1", Ports: at, Describe: fixed(nil)})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	if err := <-done; err != nil {
		t.Error(err)
	}
}

// Of several addresses Describe uses the one that leads to the peer, and ignores answers of other
// processes.
func TestDescribeMisleadingAddresses(t *testing.T) {
	_, other := rank(t, 0, 3, fixed(nil)) // another rank
	silent, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer silent.Close()
	rude, err := net.Listen("tcp", "127.0.0.1:0") // another program
	if err != nil {
		t.Fatal(err)
	}
	defer rude.Close()
	go func() {
		for {
			c, err := rude.Accept()
			if err != nil {
				return
			}
			io.WriteString(c, "220 mail.example ESMTP ready, and a long banner at that: welcome, welcome, welcome\r\n")
			c.Close()
		}
	}()
	_, peer := rank(t, 1, 3, fixed(bootstrap.Endpoints{"tcp": []byte("x")}))
	peer.Addrs = append([]string{silent.Addr().String(), rude.Addr().String(), other.Addrs[0]}, peer.Addrs...)
	got, err := client(bootstrap.NewRecord(2, 3, 77, nil)).Describe(context30(t), peer)
	if err != nil || string(got["tcp"]) != "x" {
		t.Errorf("%q, %v", got, err)
	}
}

func TestServePorts(t *testing.T) {
	ctx := context30(t)
	taken, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer taken.Close()
	port := taken.Addr().(*net.TCPAddr).Port
	cfg := bootstrap.ServerConfig{Incarnation: 1, Secret: secret, Interfaces: "127.0.0.1", Ports: fmt.Sprint(port),
		Describe: fixed(nil)}
	if _, err := bootstrap.Serve(ctx, cfg); err == nil || !strings.Contains(err.Error(),
		fmt.Sprintf("port %d of 127.0.0.1 is taken", port)) {
		t.Errorf("a taken port: %v", err)
	}
	if port < 65000 {
		cfg.Ports = fmt.Sprintf("%d-%d", port, port+500)
		s, err := bootstrap.Serve(ctx, cfg)
		if err != nil {
			t.Fatal(err)
		}
		if p := netip.MustParseAddrPort(s.Addrs()[0]).Port(); int(p) <= port || int(p) > port+500 {
			t.Errorf("range %s gave %d", cfg.Ports, p)
		}
		s.Close()
	}
	for name, change := range map[string]func(*bootstrap.ServerConfig){
		"9-8":         func(c *bootstrap.ServerConfig) { c.Ports = "9-8" },
		"no-such-if0": func(c *bootstrap.ServerConfig) { c.Interfaces = "no-such-if0" },
		"secret":      func(c *bootstrap.ServerConfig) { c.Secret = nil },
		"incarnation": func(c *bootstrap.ServerConfig) { c.Incarnation = 0 },
	} {
		c := bootstrap.ServerConfig{Incarnation: 1, Secret: secret, Describe: fixed(nil)}
		change(&c)
		if s, err := bootstrap.Serve(ctx, c); err == nil || !strings.Contains(err.Error(), name) {
			t.Errorf("%s: %v, %v", name, s, err)
		}
	}
	ended, cancel := context.WithCancel(ctx)
	cancel()
	if _, err := bootstrap.Serve(ended, bootstrap.ServerConfig{Incarnation: 1, Secret: secret,
		Describe: fixed(nil)}); !errors.Is(err, context.Canceled) {
		t.Errorf("an ended ctx: %v", err)
	}
}

// With every interface allowed, all addresses are published and each of them works; an interface
// that is not allowed is turned away although the socket is open on it.
func TestServeAddresses(t *testing.T) {
	ctx := context30(t)
	s, err := bootstrap.Serve(ctx, bootstrap.ServerConfig{Rank: 1, Incarnation: 99, Secret: secret,
		Describe: fixed(bootstrap.Endpoints{"x": nil})})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	for _, a := range s.Addrs() {
		if _, err := client(bootstrap.NewRecord(0, 2, 77, nil)).Describe(ctx,
			bootstrap.NewRecord(1, 2, 99, []string{a})); err != nil {
			t.Errorf("%s: %v", a, err)
		}
	}
	p, err := bootstrap.Serve(ctx, bootstrap.ServerConfig{Rank: 1, Incarnation: 99, Secret: secret,
		Interfaces: "^127.0.0.0/8", Describe: fixed(nil)})
	if err != nil {
		t.Skip("nothing but 127.0.0.1 here: ", err)
	}
	defer p.Close()
	if len(p.Addrs()) == 1 {
		t.Skip("one address besides 127.0.0.1: the socket is bound to it")
	}
	conn, err := net.Dial("tcp", fmt.Sprintf("127.0.0.1:%d", netip.MustParseAddrPort(p.Addrs()[0]).Port()))
	if err != nil {
		t.Skip("no socket there: ", err)
	}
	defer conn.Close()
	conn.SetDeadline(time.Now().Add(patience))
	if _, err := trust.Client(conn, secret, "rpc", trust.Hello{FromIncarnation: 1, ToRank: 1,
		ToIncarnation: 99}, false); err == nil || errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("an address that is not allowed serves: %v", err)
	}
}

// A client that knows the secret may send garbage over the authenticated connection. It gets an end
// or an error; other clients are served meanwhile.
func TestServerGarbage(t *testing.T) {
	_, peer := rank(t, 1, 2, fixed(nil))
	preface := "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
	settings := "\x00\x00\x00\x04\x00\x00\x00\x00\x00"
	for _, g := range []string{
		"nonsense, and more of it so that it is longer than the preface",
		preface + "\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff",           // a frame of 16 MB
		preface + settings + "\x00\x40\x01\x01\x04\x00\x00\x00\x01",    // headers beyond the limit of a frame
		preface + settings + "\x00\x00\x04\x08\x00\x00\x00\x00\x00abc", // cut short
	} {
		conn, err := net.Dial("tcp", peer.Addrs[0])
		if err != nil {
			t.Fatal(err)
		}
		conn.SetDeadline(time.Now().Add(patience))
		if _, err := trust.Client(conn, secret, "rpc", trust.Hello{FromIncarnation: 77, ToRank: 1,
			ToIncarnation: peer.Incarnation}, false); err != nil {
			t.Fatal(err)
		}
		io.WriteString(conn, g)
		conn.(*net.TCPConn).CloseWrite()
		if _, err := io.Copy(io.Discard, conn); errors.Is(err, os.ErrDeadlineExceeded) {
			t.Errorf("%.60q keeps the connection open", g)
		}
		conn.Close()
	}
	if _, err := client(bootstrap.NewRecord(0, 2, 77, nil)).Describe(context30(t), peer); err != nil {
		t.Error(err)
	}
}

// Close ends a call that is under way: its ctx ends.
func TestServerCloseWhileDescribing(t *testing.T) {
	entered := make(chan struct{})
	var once sync.Once
	s, peer := rank(t, 1, 2, func(ctx context.Context, _ int, _ uint64) (bootstrap.Endpoints, error) {
		once.Do(func() { close(entered) })
		<-ctx.Done()
		return nil, ctx.Err()
	})
	ctx, cancel := context.WithCancel(context30(t))
	done := make(chan error, 1)
	go func() {
		_, err := client(bootstrap.NewRecord(0, 2, 77, nil)).Describe(ctx, peer)
		done <- err
	}()
	<-entered
	s.Close()
	s.Close()
	cancel()
	if err := <-done; !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
}

// A mesh of many ranks comes up at once, none of them with more connections under way than the
// process allows itself.
func TestMeshOfManyRanksComesUpAtOnce(t *testing.T) {
	n := 64
	if testing.Short() {
		n = 24
	}
	m := storetest.NewMemory()
	var now, most atomic.Int32
	ctx, cancel := context.WithTimeout(t.Context(), 4*patience) // for n * (n - 1) proofs
	defer cancel()
	var wg sync.WaitGroup
	for r := range n {
		wg.Go(func() {
			inc := ident.New()
			srv, err := bootstrap.Serve(ctx, bootstrap.ServerConfig{Rank: r, Incarnation: inc, Secret: secret,
				Interfaces: "127.0.0.1",
				Describe: func(_ context.Context, from int, _ uint64) (bootstrap.Endpoints, error) {
					k := now.Add(1)
					defer now.Add(-1)
					for o := most.Load(); k > o && !most.CompareAndSwap(o, k); o = most.Load() {
					}
					return bootstrap.Endpoints{"test": fmt.Append(nil, r, from)}, nil
				}})
			if err != nil {
				t.Error(err)
				return
			}
			t.Cleanup(srv.Close)
			s := m.Open()
			t.Cleanup(func() { s.Close() })
			self := bootstrap.NewRecord(r, n, inc, srv.Addrs())
			if err := bootstrap.Register(ctx, s, self, nil); err != nil {
				t.Error(err)
				return
			}
			c := client(self)
			for p := range n {
				if p == r {
					continue
				}
				wg.Go(func() {
					rec, err := bootstrap.Lookup(ctx, s, p)
					if err != nil {
						t.Error(err)
						return
					}
					eps, err := c.Describe(ctx, rec)
					if err != nil || string(eps["test"]) != fmt.Sprint(p, r) {
						t.Errorf("rank %d asks %d: %q, %v", r, p, eps, err)
					}
				})
			}
		})
	}
	wg.Wait()
	if k := most.Load(); k < 1 || k > 16 {
		t.Errorf("up to %d calls at once, want 1..16", k)
	}
}

func BenchmarkServe(b *testing.B) {
	for b.Loop() {
		s, err := bootstrap.Serve(context.Background(), bootstrap.ServerConfig{Incarnation: 1, Secret: secret,
			Describe: fixed(nil)})
		if err != nil {
			b.Fatal(err)
		}
		s.Close()
	}
}

func BenchmarkDescribe(b *testing.B) {
	_, peer := rank(b, 1, 2, fixed(bootstrap.Endpoints{"tcp": make([]byte, 100)}))
	c := client(bootstrap.NewRecord(0, 2, 77, nil))
	for b.Loop() {
		if _, err := c.Describe(context.Background(), peer); err != nil {
			b.Fatal(err)
		}
	}
}

// A client that knows that its peers have started does not wait for one that refuses connections.
func TestDescribeEndedPeer(t *testing.T) {
	srv, peer := rank(t, 1, 2, fixed(nil))
	srv.Close()
	c := bootstrap.NewClient(bootstrap.ClientConfig{Self: bootstrap.NewRecord(0, 2, 77, nil), Secret: secret,
		Started: true})
	ctx := context30(t)
	if _, err := c.Describe(ctx, peer); err == nil || ctx.Err() != nil || !strings.Contains(err.Error(), "refused") {
		t.Errorf("%v", err)
	}
}
