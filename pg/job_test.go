package pg

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"tutti/bootstrap"
	"tutti/bootstrap/embed"
	"tutti/internal/sitetest"
)

// heard is a handler that passes the messages of a log on.
type heard chan string

func (heard) Enabled(context.Context, slog.Level) bool { return true }
func (h heard) Handle(_ context.Context, r slog.Record) error {
	select {
	case h <- r.Message:
	default:
	}
	return nil
}
func (h heard) WithAttrs([]slog.Attr) slog.Handler { return h }
func (h heard) WithGroup(string) slog.Handler      { return h }

// TestJoinOutlastsStartOfStore has a rank join whose store comes up later than it does.
func TestJoinOutlastsStartOfStore(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	log, begun, address := make(heard, 1000), make(chan struct{}), ""
	cfg := Config{Size: 2, Rank: 1, Job: "early", StoreAddr: "tutti://127.0.0.1:1", Logger: slog.New(log),
		Secret: []byte("a secret of this test alone"), Getenv: func(string) string { return "" },
		Dialer: func(ctx context.Context, d *net.Dialer, to int, peer string) (net.Conn, error) {
			if to != ToStore {
				return d.DialContext(ctx, "tcp", peer)
			}
			select {
			case <-begun:
				return d.DialContext(ctx, "tcp", address)
			default:
				return nil, syscall.ECONNREFUSED
			}
		}}
	use := func(cfg Config, dialTimeout time.Duration) error {
		s, err := cfg.fromEnv()
		if err != nil {
			return err
		}
		s.dialTimeout = dialTimeout
		g, err := s.enter(ctx)
		if err != nil {
			return err
		}
		defer g.Close()
		return sums(ctx, g, 0, 1)
	}
	done := make(chan error, 1)
	go func() { done <- use(cfg, time.Second) }()
	for waits := ""; !strings.Contains(waits, "store cannot be reached"); {
		select {
		case waits = <-log:
		case err := <-done:
			t.Fatalf("the rank did not wait for the store: %v", err)
		case <-ctx.Done():
			t.Fatal("the rank does not say that it waits for the store")
		}
	}
	store, err := embed.Start(ctx, embed.Config{Secret: cfg.Secret})
	if err != nil {
		t.Fatal(err)
	}
	defer store.Close()
	address = strings.TrimPrefix(store.Address(), "tutti://")
	close(begun)
	cfg.Rank = 0
	if err := use(cfg, 0); err != nil {
		t.Error("rank 0:", err)
	}
	if err := <-done; err != nil {
		t.Error("rank 1:", err)
	}
}

// TestStandbyOutlastsTimeout has a process on standby find a free place in a job whose other rank
// comes only after the process's Timeout.
func TestStandbyOutlastsTimeout(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	site := sitetest.Start(t, sitetest.Config{})
	store, err := bootstrap.DialStore(ctx, bootstrap.StoreConfig{Address: site.Address, Job: "spared"})
	if err != nil {
		t.Fatal(err)
	}
	defer store.Close()
	if err := store.Put(ctx, bootstrap.VacantKeys+"1", []byte("its process has ended"), true); err != nil {
		t.Fatal(err)
	}
	log := make(heard, 1000)
	cfg := Config{Size: 2, Job: "spared", StoreAddr: site.Address, Secret: []byte("a secret of this test alone"),
		OnFailure: Shrink, Timeout: 5 * time.Second, Logger: slog.New(log)}
	use := func(g *Group, err error) error {
		if err != nil {
			return err
		}
		defer g.Close()
		g.SetTimeout(30 * time.Second) // cfg.Timeout is for Join alone
		return sums(ctx, g, 0, 1)
	}
	done := make(chan error, 1)
	t.Setenv("TUTTI_SIZE", "2")
	t.Setenv("TUTTI_STANDBY", "0")
	go func() { done <- use(Join(ctx, cfg)) }()
	for waits := ""; waits != "this process could not take a free place: it stands by again"; {
		select {
		case waits = <-log:
		case err := <-done:
			t.Fatalf("the process on standby ended: %v", err)
		case <-ctx.Done():
			t.Fatal("the process on standby does not say that it waits on")
		}
	}
	os.Unsetenv("TUTTI_STANDBY")
	cfg.Timeout = 30 * time.Second
	if err := use(Join(ctx, cfg)); err != nil {
		t.Error(err)
	}
	if err := <-done; err != nil {
		t.Error("on standby:", err)
	}
}

// TestStandbyLogsItsRank has a process on standby take a place: what it logs to the standard error
// names that from then on.
func TestStandbyLogsItsRank(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	site := sitetest.Start(t, sitetest.Config{})
	store, err := bootstrap.DialStore(ctx, bootstrap.StoreConfig{Address: site.Address, Job: "logs"})
	if err != nil {
		t.Fatal(err)
	}
	defer store.Close()
	if err := store.Put(ctx, bootstrap.VacantKeys+"1", []byte("its process has ended"), true); err != nil {
		t.Fatal(err)
	}
	to, err := os.Create(filepath.Join(t.TempDir(), "log"))
	if err != nil {
		t.Fatal(err)
	}
	defer to.Close()
	env := map[string]string{"TUTTI_SIZE": "2", "TUTTI_STANDBY": "0", "TUTTI_LOG": "debug"}
	cfg := Config{Job: "logs", StoreAddr: site.Address, Secret: []byte("a secret of this test alone"),
		OnFailure: Shrink, Getenv: func(name string) string { return env[name] }}
	was := os.Stderr
	os.Stderr = to
	s, err := cfg.fromEnv()
	os.Stderr = was
	if err != nil {
		t.Fatal(err)
	}
	other := make(chan error, 1)
	go func() {
		cfg := cfg
		cfg.Size, cfg.Getenv, cfg.Logger = 2, func(string) string { return "" }, slog.New(slog.DiscardHandler)
		g, err := Join(ctx, cfg)
		if err == nil {
			g.Close()
		}
		other <- err
	}()
	g, err := s.enter(ctx)
	if err == nil {
		g.job.settings.Logger.Info("in the job")
		g.Close()
	}
	if err := errors.Join(err, <-other); err != nil {
		t.Fatal(err)
	}
	b, err := os.ReadFile(to.Name())
	log := string(b)
	if err != nil || !strings.Contains(log, `msg="in the job" rank=1`) || strings.Contains(log, "rank=-1") {
		t.Errorf("%v, logged\n%s", err, log)
	}
}
