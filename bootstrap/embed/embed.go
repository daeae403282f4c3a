// Package embed runs a job's store, an etcd server, inside the launcher's process.
//
// It is made for jobs: one member, on a temporary directory, without syncing to disk, ended with
// the launcher. Its only TCP port speaks gRPC after the job's secret was proved on the connection
// (addresses begin with tutti://, see bootstrap.DialStore). etcd requires a listener of its own: it
// is a Unix socket, in a directory that only this user can enter, which refuses all connections.
//
// Close leaves nothing behind. A killed launcher leaves its directory, but not the lock on it: the
// next Start in the same place removes directories whose lock is free.
package embed

import (
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"net"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"go.etcd.io/etcd/server/v3/embed"
	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc"

	"tutti/bootstrap"
	"tutti/bootstrap/internal/proof"
	"tutti/internal/etcd"
	"tutti/internal/files"
	"tutti/internal/lockdir"
	"tutti/internal/ports"
	"tutti/internal/trust"
)

// Config describes where the store listens.
type Config struct {
	Secret []byte // the job's; at least trust.MinSecret bytes
	// Host is the address to listen on; default 127.0.0.1, which serves ranks on this machine only.
	// For several machines: one of its addresses, or "0.0.0.0".
	Host string
	// Advertise is the host that Address names; default Host. Needed where Host is an unspecified
	// address.
	Advertise string
	Ports     string // see ports.ParseSpec; default "0"
	Dir       string // where the data directory is made; default os.TempDir()
	Logger    *slog.Logger

	live int64 // tests: in place of maxLive
}

// Server is a running store.
type Server struct {
	etcd    *etcd.Server
	history *history
	l       *proof.Listener
	dir     string
	held    *lockdir.Held // dir
	address string
	once    sync.Once
	err     error
}

const (
	dirPrefix = "tutti-store-"
	minFiles  = 150      // etcd ends its process if it may not have more
	minRoom   = 16 << 20 // bytes, or for less: two files of its log take 4 MiB each
)

// Start starts a store. It returns when the store serves, or ctx ends.
func Start(ctx context.Context, cfg Config) (_ *Server, err error) {
	if len(cfg.Secret) < trust.MinSecret {
		return nil, fmt.Errorf("embedded store: a secret of %d bytes is too short: expected at least %d",
			len(cfg.Secret), trust.MinSecret)
	}
	if cfg.Host == "" {
		cfg.Host = "127.0.0.1"
	}
	if cfg.Advertise == "" {
		cfg.Advertise = cfg.Host
	}
	if ip := net.ParseIP(cfg.Advertise); ip != nil && ip.IsUnspecified() {
		return nil, fmt.Errorf("embedded store: it listens on %s, which is no address to give to others: set Advertise",
			cfg.Host)
	}
	if cfg.Logger == nil {
		cfg.Logger = slog.New(slog.DiscardHandler)
	}
	if limit, known := files.Limit(); known && limit <= minFiles {
		return nil, fmt.Errorf("embedded store: this process may have %d open files (RLIMIT_NOFILE), and it "+
			"needs more than %d: raise the limit (ulimit -n)", limit, minFiles)
	}
	spec, err := ports.ParseSpec(cfg.Ports)
	if err != nil {
		return nil, fmt.Errorf("embedded store: %w", err)
	}
	l, err := ports.Listen(ctx, cfg.Host, spec)
	if err != nil {
		return nil, fmt.Errorf("embedded store: %w", err)
	}
	s := &Server{address: "tutti://" + net.JoinHostPort(cfg.Advertise, fmt.Sprint(l.Addr().(*net.TCPAddr).Port))}
	defer func() {
		if err != nil {
			l.Close()
			s.Close()
		}
	}()
	if s.dir, s.held, err = makeDir(cfg.Dir); err != nil {
		return nil, fmt.Errorf("embedded store: %w", err)
	}
	s.l = proof.Listen(l, proof.Config{Secret: cfg.Secret, Purpose: bootstrap.StorePurpose, Admit: s.admit,
		Refused: trust.LogRefused(cfg.Logger, "store"), Failing: trust.LogFailing(cfg.Logger, "store")})
	history := newHistory(cmp.Or(cfg.live, maxLive), cfg.Logger)
	c := s.config(history)
	serving := make(chan *grpc.Server, 1)
	c.ServiceRegister = func(g *grpc.Server) { serving <- g }
	if s.etcd, err = etcd.Start(ctx, c); err != nil {
		return nil, fmt.Errorf("embedded store: %w", err)
	}
	select {
	case g := <-serving: // which follows
		s.history = history
		s.history.start(s.etcd.Core())
		go g.Serve(s.l) // returns when the listener is closed
		return s, s.check(ctx, cfg.Secret)
	case err := <-s.etcd.Err():
		return nil, fmt.Errorf("embedded store: %w", err)
	case <-ctx.Done():
		return nil, fmt.Errorf("embedded store: not ready: %w", context.Cause(ctx))
	}
}

// admit refuses a proof that was made for another store with the same secret, and forwarded.
func (s *Server) admit(conn net.Conn, h trust.Hello) error {
	if !bootstrap.StoreMeant(h, strings.TrimPrefix(s.address, "tutti://"), conn.LocalAddr()) {
		text := fmt.Sprintf("the connection was meant for another store than %s: use that address", s.address)
		return &trust.Refusal{Code: 1, Text: text}
	}
	return nil
}

// check connects to the listener.
func (s *Server) check(ctx context.Context, secret []byte) error {
	conn, err := (&net.Dialer{}).DialContext(ctx, "tcp", s.l.Addr().String())
	if err != nil {
		return fmt.Errorf("embedded store: it does not answer itself: %w", err)
	}
	defer conn.Close()
	conn.SetDeadline(time.Now().Add(proof.Timeout))
	hello := bootstrap.StoreHello(0, "", conn.RemoteAddr())
	if _, err := trust.Client(conn, secret, bootstrap.StorePurpose, hello, false); err != nil {
		return fmt.Errorf("embedded store: it does not answer itself: %w", err)
	}
	return nil
}

// lastWords ends the process instead of etcd, which panics if it cannot write its files.
type lastWords struct{ dir string }

// OnWrite implements zapcore.CheckWriteHook.
func (w lastWords) OnWrite(e *zapcore.CheckedEntry, fields []zapcore.Field) {
	fmt.Fprintln(os.Stderr, w.text(e.Message, fields))
	os.Exit(1)
}

func (w lastWords) text(message string, fields []zapcore.Field) string {
	for _, f := range fields {
		if err, ok := f.Interface.(error); ok && f.Type == zapcore.ErrorType {
			message += ": " + err.Error()
		}
	}
	return fmt.Sprintf("tutti: the job's store cannot go on, and ends this process: %s; its files are in %s (TMPDIR)",
		message, w.dir)
}

func (s *Server) config(h *history) *embed.Config {
	c := etcd.Config(filepath.Join(s.dir, "data"))
	c.ZapLoggerBuilder = embed.NewZapLoggerBuilder(zap.New(zapcore.NewNopCore(),
		zap.WithPanicHook(lastWords{s.dir}), zap.WithFatalHook(lastWords{s.dir})))
	c.PreVote = false
	c.SnapshotCount, c.SnapshotCatchUpEntries = 1000, 100
	c.MaxSnapFiles = 1
	c.MaxWalFiles, c.QuotaBackendBytes = 0, -1 // neither is etcd's to bound: see history
	c.CompactionSleepInterval = time.Millisecond
	c.Metrics = "basic"
	c.MaxRequestBytes = 2 * bootstrap.MaxValue
	c.GRPCKeepAliveMinTime = time.Second
	c.GRPCKeepAliveInterval, c.GRPCKeepAliveTimeout = 10*time.Second, 5*time.Second
	// The address of a Unix socket has no room for a long path.
	etcd.Listen(c, url.URL{Scheme: "unix", Path: fmt.Sprintf("/proc/self/fd/%d/etcd", s.held.Dir.Fd())})
	c.GRPCAdditionalServerOptions = []grpc.ServerOption{grpc.Creds(proof.Credentials{}),
		grpc.ConnectionTimeout(proof.Timeout), grpc.ChainUnaryInterceptor(h.admit)}
	return c
}

// Address returns the store's address, for TUTTI_STORE.
func (s *Server) Address() string { return s.address }

// Close stops the store and removes its directory. Clients lose their connections. Idempotent.
func (s *Server) Close() error {
	s.once.Do(func() {
		if s.l != nil {
			s.l.CloseAll() // etcd would wait seconds for its clients to leave
		}
		if s.history != nil {
			s.history.stop()
		}
		if s.etcd != nil {
			s.etcd.Stop()
		}
		if s.dir != "" {
			s.err = os.RemoveAll(s.dir)
			s.held.Close()
		}
	})
	return s.err
}

// makeDir makes a locked data directory below dir and removes those of killed launchers.
func makeDir(dir string) (string, *lockdir.Held, error) {
	if dir == "" {
		dir = os.TempDir()
	}
	dir, err := filepath.Abs(dir)
	if err != nil {
		return "", nil, err
	}
	lockdir.RemoveStale(dir, func(name string) bool { return strings.HasPrefix(name, dirPrefix) })
	own, err := os.MkdirTemp(dir, dirPrefix) // mode 0700
	if err != nil {
		return "", nil, err
	}
	held, err := lockdir.Lock(own)
	if err == nil {
		if err = room(own); err == nil {
			return own, held, nil
		}
		held.Close()
	}
	os.RemoveAll(own)
	return "", nil, err
}

// room returns an error if files in dir may not have minRoom bytes.
func room(dir string) error {
	var limit unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_FSIZE, &limit); err == nil && limit.Cur < minRoom {
		return fmt.Errorf("this process may write %d bytes to a file (RLIMIT_FSIZE), and the store needs %d MiB: "+
			"raise the limit (ulimit -f)", limit.Cur, minRoom>>20)
	}
	var fs unix.Statfs_t
	if err := unix.Statfs(dir, &fs); err != nil || fs.Blocks == 0 { // some file systems do not tell
		return nil
	}
	if free := fs.Bavail * uint64(fs.Bsize); free < minRoom {
		return fmt.Errorf("%s has %d KiB left, and the store needs %d MiB: make room, or set TMPDIR to another "+
			"directory: %w", filepath.Dir(dir), free>>10, minRoom>>20, unix.ENOSPC)
	}
	return nil
}
