package directory_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"tutti/bootstrap"
	"tutti/endpoint"
	"tutti/endpoint/directory"
	"tutti/internal/leaktest"
	"tutti/internal/proctest"
	"tutti/internal/sitetest"
	"tutti/mem"
)

// asPublisher makes the test binary a program that publishes: STORE NAME CONTENTS.
const asPublisher = "DIRECTORY_TEST_PUBLISHER"

const secret = "a secret for the tests of this package"

// patience is longer than anything takes that works: it turns a hang into a failure.
const patience = 60 * time.Second

func TestMain(m *testing.M) {
	if args := os.Getenv(asPublisher); args != "" {
		if err := publisher(strings.Fields(args)); err != nil {
			fmt.Println(err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	leaktest.Main(m)
}

func within(t testing.TB) context.Context {
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	t.Cleanup(cancel)
	return ctx
}

// publisher publishes an endpoint with a region until its standard input ends.
func publisher(args []string) error {
	ctx := context.Background()
	d, err := directory.Open(ctx, directory.Config{Store: storeAt(args[0])})
	if err != nil {
		return err
	}
	defer d.Close()
	c, err := endpoint.NewContext(endpoint.ContextConfig{})
	if err != nil {
		return err
	}
	defer c.Close()
	e, err := endpoint.New(c, endpoint.Config{Name: "process", Secret: secret, Interfaces: "127.0.0.1"})
	if err != nil {
		return err
	}
	defer e.Close()
	if _, err := e.Register("r", mem.Host([]byte(args[2]), mem.Anywhere), endpoint.RegionConfig{}); err != nil {
		return err
	}
	for { // the store may notice late that the process before has died
		_, err := d.Publish(ctx, args[1], e.Info())
		if err == nil {
			break
		}
		if !errors.As(err, new(*directory.TakenError)) {
			return err
		}
	}
	fmt.Println("published", e.Info())
	io.Copy(io.Discard, os.Stdin)
	return nil
}

// process starts a publisher. kill ends it by SIGKILL; up waits until it has published.
func process(t *testing.T, store, name, contents string) (up, kill func()) {
	t.Helper()
	p := proctest.RunPiped(t, proctest.Again([]string{fmt.Sprintf("%s=%s %s %s", asPublisher, store, name, contents)}))
	return func() {
		t.Helper()
		if line := p.Hear(); !strings.HasPrefix(line, "published ") {
			t.Fatalf("a publisher says %q", line)
		}
	}, p.Kill
}

// storeAt configures the store at an address.
func storeAt(address string) bootstrap.StoreConfig {
	return bootstrap.StoreConfig{Address: address, Secret: []byte(secret), DialTimeout: patience,
		OpTimeout: patience}
}

func open(t testing.TB, address string) *directory.Directory {
	t.Helper()
	return openWith(t, storeAt(address))
}

// lasting is open with a lease that outlasts a machine on which nothing runs for some seconds.
func lasting(t testing.TB, address string) *directory.Directory {
	t.Helper()
	cfg := storeAt(address)
	cfg.LeaseTTL = time.Minute
	return openWith(t, cfg)
}

func openWith(t testing.TB, cfg bootstrap.StoreConfig) *directory.Directory {
	t.Helper()
	d, err := directory.Open(within(t), directory.Config{Store: cfg})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { d.Close() })
	return d
}

// raw returns a handle on the keys of the directory.
func raw(t testing.TB, address string) bootstrap.Store {
	t.Helper()
	cfg := storeAt(address)
	cfg.Job, cfg.LeaseTTL = directory.DefaultName, time.Minute
	s, err := bootstrap.DialStore(within(t), cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.Close() })
	return s
}

func put(t testing.TB, s bootstrap.Store, name, value string) {
	t.Helper()
	if err := s.Put(within(t), "names/"+name, []byte(value), true); err != nil {
		t.Fatal(err)
	}
}

// site starts an etcd.
func site(t testing.TB) string {
	t.Helper()
	return sitetest.Start(t, sitetest.Config{}).Address
}

func newEndpoint(t testing.TB, name string) *endpoint.Endpoint {
	t.Helper()
	c, err := endpoint.NewContext(endpoint.ContextConfig{})
	if err != nil {
		t.Fatal(err)
	}
	e, err := endpoint.New(c, endpoint.Config{Name: name, Secret: secret, Interfaces: "127.0.0.1"})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { e.Close(); c.Close() })
	return e
}

// info is a well-formed Info of no endpoint.
func info(n int) endpoint.Info {
	return endpoint.Info{ID: uint64(n), Name: fmt.Sprint(n), Addrs: []string{"127.0.0.1:1"}}
}

// network stands between a process and the store.
type network struct {
	l       net.Listener
	mu      sync.Mutex
	to      string // HOST:PORT of the store; "": no answer
	conns   map[net.Conn]struct{}
	serving sync.WaitGroup
}

// newNetwork returns a network before the store at an address, and the address in it.
func newNetwork(t testing.TB, address string) (*network, string) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	n := &network{l: l, conns: map[net.Conn]struct{}{}}
	n.lead(address)
	n.serving.Go(n.serve)
	t.Cleanup(func() {
		l.Close()
		n.cut()
		n.serving.Wait()
	})
	return n, "etcd://" + l.Addr().String()
}

func (n *network) serve() {
	for {
		a, err := n.l.Accept()
		if err != nil {
			return
		}
		n.mu.Lock()
		to := n.to
		n.mu.Unlock()
		b, err := net.Dial("tcp", to)
		if to == "" || err != nil {
			a.Close()
			continue
		}
		n.mu.Lock()
		if n.to == to {
			n.conns[a], n.conns[b] = struct{}{}, struct{}{}
		} else {
			a.Close()
			b.Close()
		}
		n.mu.Unlock()
		for _, d := range [][2]net.Conn{{a, b}, {b, a}} {
			n.serving.Go(func() {
				io.Copy(d[0], d[1])
				a.Close()
				b.Close()
			})
		}
	}
}

// cut ends all connections, and lets no other ones through.
func (n *network) cut() {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.to = ""
	for c := range n.conns {
		c.Close()
	}
	clear(n.conns)
}

// lead lets connections through to the store at an address.
func (n *network) lead(address string) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.to = strings.TrimPrefix(address, "etcd://")
}
