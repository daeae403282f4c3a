package embed

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"
	"golang.org/x/sys/unix"

	"tutti/bootstrap"
	"tutti/internal/leaktest"
	"tutti/internal/ports/portstest"
	"tutti/internal/proctest"
)

const (
	childDir   = "EMBED_TEST_CHILD_DIR"
	childPorts = "EMBED_TEST_CHILD_PORTS"
	childSpace = "EMBED_TEST_CHILD_SPACE" // how many further bytes of addresses it may have; default any
)

func TestMain(m *testing.M) {
	if dir := os.Getenv(childDir); dir != "" {
		if text := os.Getenv(childSpace); text != "" {
			if err := limitSpace(text); err != nil {
				fmt.Println("error", err)
				os.Exit(1)
			}
		}
		s, err := Start(context.Background(), Config{Secret: secret, Dir: dir, Ports: os.Getenv(childPorts)})
		if err != nil {
			fmt.Println("error", err)
			os.Exit(1)
		}
		fmt.Println(s.Address())
		select {} // until it is killed
	}
	leaktest.Main(m)
}

func limitSpace(text string) error {
	more, err := strconv.ParseUint(text, 10, 64)
	if err != nil {
		return err
	}
	b, err := os.ReadFile("/proc/self/statm")
	if err != nil {
		return err
	}
	var pages uint64
	if _, err := fmt.Sscan(string(b), &pages); err != nil {
		return err
	}
	limit := pages*uint64(os.Getpagesize()) + more
	return unix.Setrlimit(unix.RLIMIT_AS, &unix.Rlimit{Cur: limit, Max: limit})
}

var secret = []byte("a secret for the tests of this package")

const patience = 30 * time.Second

func start(t testing.TB, cfg Config) *Server {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	cfg.Secret = secret
	s, err := Start(ctx, cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.Close() })
	return s
}

func entries(t testing.TB, dir string) (names []string) {
	t.Helper()
	es, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range es {
		names = append(names, e.Name())
	}
	return names
}

func dial(t testing.TB, address string) (bootstrap.Store, error) {
	t.Helper()
	return bootstrap.DialStore(t.Context(), bootstrap.StoreConfig{Address: address, Job: "j", Secret: secret,
		DialTimeout: patience, OpTimeout: patience, LeaseTTL: patience})
}

func TestStartClose(t *testing.T) {
	dir := t.TempDir()
	s := start(t, Config{Dir: dir, Ports: portstest.Port(t)})
	if !strings.HasPrefix(s.Address(), "tutti://127.0.0.1:") {
		t.Errorf("address %s", s.Address())
	}
	if fi, err := os.Stat(s.dir); err != nil || fi.Mode().Perm() != 0o700 {
		t.Errorf("directory: %v, %v", fi.Mode(), err)
	}
	c, err := dial(t, s.Address())
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if err := c.Put(t.Context(), "k", []byte("v"), true); err != nil {
		t.Fatal(err)
	}
	w := c.Watch(t.Context(), "k") // a client that has something under way does not hold Close up
	if e := <-w; e.Err != nil {
		t.Fatal(e.Err)
	}
	short, err := bootstrap.DialStore(t.Context(), bootstrap.StoreConfig{Address: s.Address(), Job: "j", Secret: secret,
		DialTimeout: patience})
	if err != nil {
		t.Fatal(err)
	}
	if short.TTL() != bootstrap.DefaultLeaseTTL || c.TTL() != patience {
		t.Errorf("TTL %v by default, %v where it is %v", short.TTL(), c.TTL(), patience)
	}
	if err := short.Close(); err != nil {
		t.Error(err)
	}
	if err := s.Close(); err != nil {
		t.Error(err)
	}
	if err := s.Close(); err != nil {
		t.Error(err)
	}
	if left := entries(t, dir); len(left) != 0 {
		t.Errorf("Close leaves %v", left)
	}
	if conn, err := net.Dial("tcp", strings.TrimPrefix(s.Address(), "tutti://")); err == nil {
		conn.Close()
		t.Error("Close leaves the port open")
	}
}

func TestConfigErrors(t *testing.T) {
	taken, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer taken.Close()
	port := taken.Addr().(*net.TCPAddr).Port
	dir := t.TempDir()
	for text, cfg := range map[string]Config{
		"secret":                           {Secret: []byte("short")},
		"set Advertise":                    {Secret: secret, Host: "0.0.0.0"},
		"9-8":                              {Secret: secret, Ports: "9-8"},
		fmt.Sprintf("port %d of 12", port): {Secret: secret, Ports: fmt.Sprint(port)},
		"192.0.2.1":                        {Secret: secret, Host: "192.0.2.1"},
		"no such file":                     {Secret: secret, Dir: filepath.Join(dir, "none")},
	} {
		cfg.Dir = cmp.Or(cfg.Dir, dir)
		s, err := Start(t.Context(), cfg)
		if err == nil {
			s.Close()
		}
		if err == nil || !strings.Contains(err.Error(), text) {
			t.Errorf("%v, want one that says %q", err, text)
		}
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := Start(ctx, Config{Secret: secret, Dir: dir}); !errors.Is(err, context.Canceled) {
		t.Errorf("an ended ctx: %v", err)
	}
	if left := entries(t, dir); len(left) != 0 {
		t.Errorf("failures leave %v", left)
	}
	s := start(t, Config{Dir: dir, Host: "0.0.0.0", Advertise: "127.0.0.1",
		Ports: fmt.Sprintf("%d-%d", port, min(port+500, 65535))})
	c, err := dial(t, s.Address())
	if err != nil {
		t.Fatal(err)
	}
	c.Close()
}

// The path of the directory may be longer than that of a Unix socket.
func TestLongDirectory(t *testing.T) {
	dir := filepath.Join(t.TempDir(), strings.Repeat("d", 200))
	if err := os.Mkdir(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	s := start(t, Config{Dir: dir})
	c, err := dial(t, s.Address())
	if err != nil {
		t.Fatal(err)
	}
	if err := c.Put(t.Context(), "k", []byte("v"), true); err != nil {
		t.Error(err)
	}
	c.Close()
	if err := s.Close(); err != nil {
		t.Error(err)
	}
	if left := entries(t, dir); len(left) != 0 {
		t.Errorf("Close leaves %v", left)
	}
}

// Neither etcd's own socket nor the port serves a client that has not proved the secret.
func TestClientsMustProveSecret(t *testing.T) {
	s := start(t, Config{Dir: t.TempDir()})
	for name, endpoint := range map[string]string{
		"port":   "http://" + strings.TrimPrefix(s.Address(), "tutti://"),
		"socket": "unix://" + filepath.Join(s.dir, "etcd"),
	} {
		c, err := clientv3.New(clientv3.Config{Endpoints: []string{endpoint}, Logger: zap.NewNop(), MaxUnaryRetries: 2})
		if err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
		if r, err := c.Get(ctx, "k"); err == nil {
			t.Errorf("%s: %v", name, r)
		}
		cancel()
		c.Close()
	}
}

// Stores side by side in one directory leave each other alone.
func TestSideBySide(t *testing.T) {
	dir := t.TempDir()
	var wg sync.WaitGroup
	stores := make([]*Server, 4)
	for i := range stores {
		wg.Go(func() { stores[i] = start(t, Config{Dir: dir}) })
	}
	wg.Wait()
	if n := len(entries(t, dir)); n != len(stores) {
		t.Fatalf("%d directories of %d stores", n, len(stores))
	}
	for _, s := range stores {
		c, err := dial(t, s.Address())
		if err != nil {
			t.Fatal(err)
		}
		if err := c.Create(t.Context(), "k", nil, false); err != nil {
			t.Error(err)
		}
		c.Close()
	}
}

// A store runs where addresses are few, as for a program under ulimit -v.
func TestLimitedAddressSpace(t *testing.T) {
	p := proctest.Run(t, proctest.Again([]string{childDir + "=" + t.TempDir(), childSpace + "=" + fmt.Sprint(4<<30)}))
	c, err := dial(t, p.Hear())
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if err := c.Put(t.Context(), "k", make([]byte, bootstrap.MaxValue), true); err != nil {
		t.Error(err)
	}
}

// A store whose files have no room is an error that says how much it needs, and leaves nothing.
func TestStartWithoutRoom(t *testing.T) {
	var before unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_FSIZE, &before); err != nil {
		t.Fatal(err)
	}
	if err := unix.Setrlimit(unix.RLIMIT_FSIZE, &unix.Rlimit{Cur: 1 << 20, Max: before.Max}); err != nil {
		t.Fatal(err)
	}
	defer unix.Setrlimit(unix.RLIMIT_FSIZE, &before)
	dir := t.TempDir()
	s, err := Start(t.Context(), Config{Secret: secret, Dir: dir})
	if err == nil {
		s.Close()
	}
	if err == nil || !strings.Contains(err.Error(), "the store needs 16 MiB") {
		t.Errorf("got %v", err)
	}
	if left := entries(t, dir); len(left) > 0 {
		t.Errorf("it left %v", left)
	}
}

// A store that cannot write its files ends the process with one line.
func TestStoreThatCannotWrite(t *testing.T) {
	dir := t.TempDir()
	p := proctest.Run(t, proctest.Again([]string{childDir + "=" + dir}))
	c, err := dial(t, p.Hear())
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if err := os.RemoveAll(filepath.Join(dir, entries(t, dir)[0], "data")); err != nil {
		t.Fatal(err)
	}
	for err == nil { // until the log is in need of another file
		err = c.Put(t.Context(), "k", make([]byte, bootstrap.MaxValue), true)
	}
	p.End(1)
	if said := p.Err.String(); !strings.HasPrefix(said, "tutti: the job's store cannot go on") ||
		strings.Count(said, "\n") != 1 {
		t.Errorf("it said %q", said)
	}
}

// A store that was killed leaves no port, and its directory goes at the next start.
func TestKilledStoreLeavesNothing(t *testing.T) {
	dir := t.TempDir()
	p := proctest.Run(t, proctest.Again([]string{childDir + "=" + dir, childPorts + "=" + portstest.Port(t)}))
	address := p.Hear()
	c, err := dial(t, address)
	if err != nil {
		t.Error(err)
	}
	p.Kill()
	if err == nil {
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		if err := c.Put(ctx, "k", nil, false); !errors.Is(err, bootstrap.ErrStoreAway) {
			t.Errorf("Put to a killed store: %v", err)
		}
		c.Close()
	}
	if conn, err := net.Dial("tcp", strings.TrimPrefix(address, "tutti://")); err == nil {
		conn.Close()
		t.Error("the port is still open")
	}
	left := entries(t, dir)
	if len(left) != 1 {
		t.Fatalf("a killed store left %v", left)
	}
	foreign := filepath.Join(dir, dirPrefix+"being-made") // as it is for a moment in every Start
	if err := os.Mkdir(foreign, 0o700); err != nil {
		t.Fatal(err)
	}
	s := start(t, Config{Dir: dir})
	if _, err := os.Stat(filepath.Join(dir, left[0])); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the killed store's directory is still there: %v", err)
	}
	if _, err := os.Stat(foreign); err != nil {
		t.Errorf("a directory without a lock: %v", err)
	}
	if err := s.Close(); err != nil {
		t.Error(err)
	}
}

func BenchmarkStart(b *testing.B) {
	dir := b.TempDir()
	for b.Loop() {
		s, err := Start(context.Background(), Config{Secret: secret, Dir: dir})
		if err != nil {
			b.Fatal(err)
		}
		b.StopTimer()
		s.Close()
		b.StartTimer()
	}
}
