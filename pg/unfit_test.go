package pg_test

import (
	"context"
	"errors"
	"fmt"
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

// unlike is a job of size ranks whose last one change makes unlike the others. begun waits until a
// key of its store exists: a rank with the key is then registered before one that starts later.
func unlike(t *testing.T, size int, onFailure pg.OnFailure, change func(*pg.Config)) (all []pg.Config,
	begun func(key string)) {
	t.Helper()
	m := storetest.NewMemory()
	t.Cleanup(m.Close)
	kv := elastic{newShared(), func(context.Context) (bootstrap.Store, error) { return m.Open(), nil }}
	for rank := range size {
		c := fixed(kv, rank)
		c.Size, c.MaxSize, c.OnFailure, c.Timeout = size, size, onFailure, unfitTimeout
		all = append(all, c)
	}
	change(&all[size-1])
	return all, func(key string) {
		ctx, cancel := context.WithTimeout(t.Context(), unfitTimeout)
		defer cancel()
		store := m.Open()
		defer store.Close()
		if _, err := store.Wait(ctx, key); err != nil {
			t.Error(err)
		}
	}
}

// unfitTimeout bounds each Join of this file's tests: a rank that it ends was not told.
const unfitTimeout = 20 * time.Second

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
		for first := range 2 { // the rank that is registered first
			t.Run(fmt.Sprintf("%s, rank %d first", name, first), func(t *testing.T) {
				t.Parallel()
				all, begun := unlike(t, 2, pg.Report, c.change)
				if name == "transports" {
					all[0].Transport = "shm"
				}
				var wg sync.WaitGroup
				defer wg.Wait()
				wg.Go(func() { doesNotBegin(t, all[first], c.is) })
				begun(bootstrap.TermsKey)
				wg.Go(func() { doesNotBegin(t, all[1-first], c.is) })
			})
		}
	}
}

// doesNotBegin joins a rank that should fail for a reason, and in time.
func doesNotBegin(t *testing.T, cfg pg.Config, is func(error) bool) {
	g, err := pg.Join(t.Context(), cfg)
	if err == nil {
		g.Close()
	}
	if err == nil || !is(err) || errors.As(err, new(*pg.TimeoutError)) ||
		strings.Contains(err.Error(), "no link within") {
		t.Errorf("rank %d: %v", cfg.Rank, err)
	}
}

// A rank that is registered first, and is unlike all others, does not leave before each has found
// out.
func TestRankUnlikeAllOthers(t *testing.T) {
	t.Parallel()
	all, begun := unlike(t, 3, pg.Report, func(c *pg.Config) { c.Uniform = true })
	differs := func(err error) bool { return errors.As(err, new(*bootstrap.TermsError)) }
	var wg sync.WaitGroup
	defer wg.Wait()
	wg.Go(func() { doesNotBegin(t, all[2], differs) })
	begun(bootstrap.TermsKey)
	for _, cfg := range all[:2] {
		wg.Go(func() { doesNotBegin(t, cfg, differs) })
		begun(bootstrap.RankKey(cfg.Rank))
	}
}

// A job that outlasts losses begins when the rank that did not fit is replaced. Otherwise the error
// says what did not.
func TestUnlikeRankIsReplaced(t *testing.T) {
	for name, replaced := range map[string]bool{"replaced": true, "not replaced": false} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			all, begun := unlike(t, 2, pg.Shrink, func(c *pg.Config) { c.Uniform = true })
			cfg, other := all[0], all[1]
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			var g *pg.Group
			var err error
			done := make(chan struct{})
			go func() {
				defer close(done)
				g, err = pg.Join(ctx, cfg)
			}()
			begun(bootstrap.TermsKey)
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
	t.Parallel()
	all, _ := unlike(t, 2, pg.Shrink, func(*pg.Config) {})
	var wg sync.WaitGroup
	for _, cfg := range all {
		cfg.Timeout = 15 * time.Second // the directory needs one to give up
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
