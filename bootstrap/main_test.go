package bootstrap_test

import (
	"context"
	"io"
	"net"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"tutti/bootstrap"
	"tutti/bootstrap/embed"
	"tutti/internal/leaktest"
)

func TestMain(m *testing.M) { leaktest.Main(m) }

var secret = []byte("a secret for the tests of this package")

// patience is longer than anything takes that works: it turns a hang into a failure.
const patience = 30 * time.Second

func context30(t testing.TB) context.Context {
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	t.Cleanup(cancel)
	return ctx
}

func startEtcd(t testing.TB) *embed.Server {
	t.Helper()
	s, err := embed.Start(context30(t), embed.Config{Secret: secret, Dir: t.TempDir()})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.Close() })
	return s
}

// later is a process of a later build at an address, whose handshake has another version. It
// returns the address.
func later(t testing.TB, at string) string {
	l, err := net.Listen("tcp", at)
	if err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	wg.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			wg.Go(func() {
				defer c.Close()
				c.SetDeadline(time.Now().Add(patience))
				io.ReadFull(c, make([]byte, 104)) // what this build sends first
				c.Write([]byte("tutti/Z\r" + strings.Repeat("\x00", 32)))
			})
		}
	})
	t.Cleanup(func() {
		l.Close()
		wg.Wait()
	})
	return l.Addr().String()
}

// proxy stands between a client and a server; Freeze makes it a network that swallows everything.
type proxy struct {
	l      net.Listener
	to     string
	frozen atomic.Bool
	dialed chan struct{} // gets a token for a new connection, if it is empty
	mu     sync.Mutex
	conns  []net.Conn
	wg     sync.WaitGroup
}

func newProxy(t testing.TB, to string) *proxy { return newProxyAt(t, "127.0.0.1:0", to) }

// startEtcdBehind starts a store whose published address is a proxy's; direct leads to the store
// itself.
func startEtcdBehind(t testing.TB) (p *proxy, direct string) {
	t.Helper()
	const public = "127.0.0.2"
	s, err := embed.Start(context30(t), embed.Config{Secret: secret, Dir: t.TempDir(), Advertise: public})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.Close() })
	at := strings.TrimPrefix(s.Address(), "tutti://")
	direct = "127.0.0.1" + strings.TrimPrefix(at, public)
	return newProxyAt(t, at, direct), "tutti://" + direct
}

func newProxyAt(t testing.TB, at, to string) *proxy {
	l, err := net.Listen("tcp", at)
	if err != nil {
		t.Fatal(err)
	}
	p := &proxy{l: l, to: to, dialed: make(chan struct{}, 1)}
	p.wg.Add(1)
	go p.accept()
	t.Cleanup(p.Close)
	return p
}

// Close is a server that goes away. Idempotent.
func (p *proxy) Close() {
	p.l.Close()
	p.Cut()
	p.wg.Wait()
}

func (p *proxy) accept() {
	defer p.wg.Done()
	for {
		a, err := p.l.Accept()
		if err != nil {
			return
		}
		b, err := net.Dial("tcp", p.to)
		if err != nil {
			a.Close()
			continue
		}
		select {
		case p.dialed <- struct{}{}:
		default:
		}
		p.mu.Lock()
		p.conns = append(p.conns, a, b)
		p.mu.Unlock()
		for _, d := range [][2]net.Conn{{a, b}, {b, a}} {
			p.wg.Add(1)
			go func() {
				defer p.wg.Done()
				defer d[0].Close()
				defer d[1].Close()
				buf := make([]byte, 4096)
				for {
					n, err := d[0].Read(buf)
					if !p.frozen.Load() {
						if _, werr := d[1].Write(buf[:n]); werr != nil {
							return
						}
					}
					if err != nil {
						return
					}
				}
			}()
		}
	}
}

func (p *proxy) Addr() string { return p.l.Addr().String() }
func (p *proxy) Freeze()      { p.frozen.Store(true) }

// Cut breaks all connections and lets new ones through.
func (p *proxy) Cut() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.cutLocked()
}

func (p *proxy) cutLocked() {
	for _, c := range p.conns {
		c.Close()
	}
	p.conns = nil
	p.frozen.Store(false)
}

// Hold breaks all connections, and returns when there is a new one. New ones are silent until
// release.
func (p *proxy) Hold() (release func()) {
	p.mu.Lock()
	select {
	case <-p.dialed:
	default:
	}
	p.cutLocked()
	select {
	case <-p.dialed:
	case <-time.After(patience): // the test fails
	}
	return p.mu.Unlock
}

var _ io.Closer = bootstrap.Store(nil)
