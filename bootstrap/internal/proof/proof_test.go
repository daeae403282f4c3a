package proof

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net"
	"os"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/health"
	"google.golang.org/grpc/health/grpc_health_v1"

	"tutti/internal/leaktest"
	"tutti/internal/trust"
)

func TestMain(m *testing.M) { leaktest.Main(m) }

var secret = []byte("a secret of sufficient length")

// serve runs a gRPC server behind proofs and returns its address.
func serve(t *testing.T, cfg Config) (*Listener, string) {
	raw, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	cfg.Secret, cfg.Purpose = secret, "test"
	if cfg.Admit == nil {
		cfg.Admit = func(net.Conn, trust.Hello) error { return nil }
	}
	l := Listen(raw, cfg)
	g := grpc.NewServer(grpc.Creds(Credentials{}))
	grpc_health_v1.RegisterHealthServer(g, health.NewServer())
	served := make(chan struct{})
	go func() {
		defer close(served)
		g.Serve(l)
	}()
	t.Cleanup(func() {
		l.CloseAll()
		g.Stop()
		<-served
	})
	return l, raw.Addr().String()
}

// exhausted is the listener of a process that has no descriptors left.
type exhausted struct{ net.Listener }

func (exhausted) Accept() (net.Conn, error) { return nil, syscall.EMFILE }

// Who listens is told that connections cannot be accepted.
func TestFailing(t *testing.T) {
	raw, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	told := make(chan error, 1)
	l := Listen(exhausted{raw}, Config{Secret: secret, Purpose: "test", Failing: func(err error) {
		select {
		case told <- err:
		default:
		}
	}})
	defer l.Close()
	if err := <-told; !errors.Is(err, syscall.EMFILE) {
		t.Error(err)
	}
}

// call makes one RPC over a connection that proves with key.
func call(t *testing.T, addr string, key []byte, h trust.Hello) error {
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	conn, err := net.Dial("tcp", addr)
	if err != nil {
		return err
	}
	defer conn.Close()
	conn.SetDeadline(time.Now().Add(30 * time.Second))
	if _, err := trust.Client(conn, key, "test", h, false); err != nil {
		return err
	}
	cc, err := grpc.NewClient("passthrough:///x", grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithContextDialer(func(context.Context, string) (net.Conn, error) { return conn, nil }))
	if err != nil {
		return err
	}
	defer cc.Close()
	_, err = grpc_health_v1.NewHealthClient(cc).Check(ctx, &grpc_health_v1.HealthCheckRequest{})
	return err
}

func TestProvedOnly(t *testing.T) {
	var refused atomic.Int32
	_, addr := serve(t, Config{
		Admit: func(_ net.Conn, h trust.Hello) error {
			if h.FromRank == 7 {
				return &trust.Refusal{Code: 9, Text: "not seven"}
			}
			return nil
		},
		Refused: func(net.Conn, error) { refused.Add(1) },
	})
	if err := call(t, addr, secret, trust.Hello{FromRank: 1}); err != nil {
		t.Errorf("with the secret: %v", err)
	}
	if err := call(t, addr, []byte("another secret of that length"), trust.Hello{}); !errors.Is(err, trust.ErrAuth) {
		t.Errorf("with another secret: %v", err)
	}
	var r *trust.Refusal
	if err := call(t, addr, secret, trust.Hello{FromRank: 7}); !errors.As(err, &r) || r.Code != 9 ||
		r.Text != "not seven" {
		t.Errorf("not admitted: %v", err)
	}
	key, err := trust.Derive(secret, "someone")
	if err != nil {
		t.Fatal(err)
	}
	if err := call(t, addr, key, trust.Hello{Client: "someone"}); !errors.As(err, &r) || r.Code == 9 ||
		!strings.Contains(r.Text, "client someone opens endpoints") {
		t.Errorf("a client: %v", err)
	}
	// gRPC without proof, and other garbage, gets nothing but the server's opening and the end.
	for _, garbage := range []string{"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
		"GET / HTTP/1.1\r\nHost: x\r\n\r\n" + strings.Repeat("a", 200), strings.Repeat("\x00", 4096)} {
		c, err := net.Dial("tcp", addr)
		if err != nil {
			t.Fatal(err)
		}
		c.SetDeadline(time.Now().Add(30 * time.Second))
		c.Write([]byte(garbage))
		c.(*net.TCPConn).CloseWrite()
		got, err := io.ReadAll(c)
		if len(got) > 64 || errors.Is(err, os.ErrDeadlineExceeded) || bytes.Contains(got, []byte("HTTP")) {
			t.Errorf("%.20q was answered %q, %v", garbage, got, err)
		}
		c.Close()
	}
	if n := refused.Load(); n < 5 {
		t.Errorf("%d refusals were reported, want at least 5", n)
	}
}

// A server that is handed a connection by another way, without proof, refuses it.
func TestCredentialsRefuse(t *testing.T) {
	a, b := net.Pipe()
	defer a.Close()
	defer b.Close()
	if _, _, err := (Credentials{}).ServerHandshake(a); err == nil {
		t.Error("an unproved connection passes")
	}
	if _, _, err := (Credentials{}).ClientHandshake(t.Context(), "", a); err == nil {
		t.Error("credentials of a server work for a client")
	}
}

// Connections without a proof take up the places for unauthenticated ones only for a bounded time:
// a client that knows the secret gets through.
func TestSlowLoris(t *testing.T) {
	_, addr := serve(t, Config{Timeout: 100 * time.Millisecond, Max: 4})
	var idle []net.Conn
	for i := range 12 {
		c, err := net.Dial("tcp", addr)
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		if i%2 == 0 {
			c.Write([]byte("tutti/3\n")) // begins well
		}
		idle = append(idle, c)
	}
	if err := trust.Redial(t.Context(), func() error { return call(t, addr, secret, trust.Hello{}) }); err != nil {
		t.Error(err)
	}
	for i, c := range idle {
		c.SetDeadline(time.Now().Add(30 * time.Second))
		if _, err := io.Copy(io.Discard, c); errors.Is(err, os.ErrDeadlineExceeded) {
			t.Errorf("idle connection %d lives on", i)
		}
	}
}

func TestCloseAll(t *testing.T) {
	l, addr := serve(t, Config{})
	silent, err := net.Dial("tcp", addr) // has not proved anything
	if err != nil {
		t.Fatal(err)
	}
	defer silent.Close()
	proved, err := net.Dial("tcp", addr)
	if err != nil {
		t.Fatal(err)
	}
	defer proved.Close()
	if _, err := trust.Client(proved, secret, "test", trust.Hello{}, false); err != nil {
		t.Fatal(err)
	}
	l.CloseAll()
	for name, c := range map[string]net.Conn{"silent": silent, "proved": proved} {
		c.SetDeadline(time.Now().Add(30 * time.Second))
		_, err := io.Copy(io.Discard, c)
		if errors.Is(err, os.ErrDeadlineExceeded) {
			t.Errorf("the %s connection lives on", name)
		}
	}
	if _, err := l.Accept(); !errors.Is(err, net.ErrClosed) {
		t.Errorf("Accept after Close: %v", err)
	}
	if err := l.Close(); err != nil {
		t.Errorf("second Close: %v", err)
	}
}
