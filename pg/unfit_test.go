package pg_test

import (
	"context"
	"errors"
	"net"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"tutti/bootstrap"
	"tutti/bootstrap/storetest"
	"tutti/p2p"
	"tutti/pg"
)

// unlike is a job of two ranks whose second one change makes unlike the first.
func unlike(t *testing.T, onFailure pg.OnFailure, change func(*pg.Config)) (like, other pg.Config) {
	t.Helper()
	m := storetest.NewMemory()
	t.Cleanup(m.Close)
	kv := elastic{newShared(), func(context.Context) (bootstrap.Store, error) { return m.Open(), nil }}
	like, other = fixed(kv, 0), fixed(kv, 1)
	for _, c := range []*pg.Config{&like, &other} {
		c.Size, c.MaxSize, c.OnFailure, c.Timeout = 2, 2, onFailure, 60*time.Second
	}
	change(&other)
	return like, other
}

// When a job begins with ranks that do not fit, each of them learns it, long before its time is up,
// and the reason.
func TestUnlikeRanksDoNotBegin(t *testing.T) {
	differs := func(err error) bool { return errors.As(err, new(*bootstrap.TermsError)) }
	for name, c := range map[string]struct {
		change func(*pg.Config)
		is     func(error) bool
	}{
		"settings": {func(c *pg.Config) { c.Uniform = true }, differs},
		"size": {func(c *pg.Config) { c.MaxSize = 3 }, func(err error) bool {
			return errors.As(err, new(*bootstrap.SizeError))
		}},
		"transports": {func(c *pg.Config) { c.Transport = "tcp" }, func(err error) bool {
			return errors.Is(err, p2p.ErrUnfit) && strings.Contains(err.Error(), "TUTTI_TRANSPORT alike")
		}},
	} {
		for first := range 2 { // which one is registered first
			t.Run(name, func(t *testing.T) {
				t.Parallel()
				var all [2]pg.Config
				all[first], all[1-first] = unlike(t, pg.Report, c.change)
				all[0].Rank, all[1].Rank = 0, 1
				if name == "transports" {
					all[first].Transport = "shm"
				}
				var errs [2]error
				var wg sync.WaitGroup
				for r, cfg := range all {
					wg.Go(func() {
						var g *pg.Group
						if g, errs[r] = pg.Join(t.Context(), cfg); errs[r] == nil {
							g.Close()
						}
					})
				}
				wg.Wait()
				for r, err := range errs {
					if err == nil || !c.is(err) || errors.As(err, new(*pg.TimeoutError)) ||
						strings.Contains(err.Error(), "no link within") {
						t.Errorf("rank %d: %v", r, err)
					}
				}
			})
		}
	}
}

// A job that outlasts losses begins when the rank that did not fit is replaced. Otherwise the error
// says what did not.
func TestUnlikeRankIsReplaced(t *testing.T) {
	for name, replaced := range map[string]bool{"replaced": true, "not replaced": false} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			cfg, other := unlike(t, pg.Shrink, func(c *pg.Config) { c.Uniform = true })
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			var g *pg.Group
			var err error
			done := make(chan struct{})
			go func() {
				defer close(done)
				g, err = pg.Join(ctx, cfg)
			}()
			if _, err := pg.Join(ctx, other); !errors.As(err, new(*bootstrap.TermsError)) {
				t.Errorf("the other rank: %v", err)
			}
			if replaced {
				other.Uniform = false
				again, err := pg.Join(ctx, other)
				if err != nil {
					t.Fatal(err)
				}
				defer again.Close()
			} else {
				cancel()
			}
			<-done
			if replaced {
				if err != nil {
					t.Fatal(err)
				}
				g.Close()
			} else if err == nil || !strings.Contains(err.Error(), "TUTTI_UNIFORM") {
				t.Errorf("%v, want one that says what did not fit", err)
			}
		})
	}
}

// A rank that could not reach others in time says why.
func TestJoinThatTimesOutTellsWhy(t *testing.T) {
	a, b := unlike(t, pg.Shrink, func(*pg.Config) {})
	var wg sync.WaitGroup
	for _, cfg := range []pg.Config{a, b} {
		cfg.Timeout = 3 * time.Second // the directory needs one to give up
		cfg.Dialer = func(ctx context.Context, d *net.Dialer, to int, address string) (net.Conn, error) {
			if to != cfg.Rank {
				return nil, syscall.EHOSTUNREACH
			}
			return d.DialContext(ctx, "tcp", address)
		}
		wg.Go(func() {
			var late *pg.TimeoutError
			if _, err := pg.Join(t.Context(), cfg); !errors.As(err, &late) ||
				!errors.Is(err, context.DeadlineExceeded) || !strings.Contains(err.Error(), "no route to host") {
				t.Errorf("rank %d: %v", cfg.Rank, err)
			}
		})
	}
	wg.Wait()
}
