package pg_test

import (
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"

	"tutti/bootstrap"
	"tutti/internal/sitetest"
	"tutti/pg"
	"tutti/pg/pgtest"
)

// A job's agreements do not depend on those of an earlier job of the same name in the same store. A
// job's keys go with its last rank, and before that depend on leases.
func TestJobsOfOneNameDoNotShareStore(t *testing.T) {
	const inRank = "PG_TEST_SITE_RANK"
	var env []string
	var store bootstrap.Store
	var raw *clientv3.Client
	parent := os.Getenv(inRank) == ""
	keys := func(leased bool) (names []string) {
		r, err := raw.Get(t.Context(), bootstrap.Prefix("test"), clientv3.WithPrefix())
		if err != nil {
			t.Fatal(err)
		}
		for _, kv := range r.Kvs {
			if leased && kv.Lease == 0 {
				t.Errorf("key %s is under no lease", kv.Key)
			}
			names = append(names, string(kv.Key))
		}
		return names
	}
	if parent {
		site := sitetest.Start(t, sitetest.Config{})
		env = append(site.Env(), "TUTTI_JOB=test", inRank+"=1")
		var err error
		if store, err = bootstrap.DialStore(t.Context(), bootstrap.StoreConfig{Address: site.Address,
			Job: "test"}); err != nil {
			t.Fatal(err) // and while it is open nothing goes: as if the first job's ranks had been killed
		}
		if raw, err = clientv3.New(clientv3.Config{Endpoints: []string{strings.TrimPrefix(site.Address, "etcd://")},
			Logger: zap.NewNop()}); err != nil {
			t.Fatal(err)
		}
		defer raw.Close()
	}
	for _, yes := range []bool{false, true} {
		t.Run(fmt.Sprint(yes), func(t *testing.T) {
			pgtest.Run(t, 2, func(t *testing.T, g *pg.Group) {
				for range 2 {
					if got, err := g.Agree(t.Context(), yes); err != nil || got != yes {
						t.Errorf("all say %v, and agree on %v, %v", yes, got, err)
					}
				}
			}, pgtest.Env(env...))
		})
		if parent {
			if names := keys(true); !slices.ContainsFunc(names,
				func(k string) bool { return strings.Contains(k, "/agree/") }) {
				t.Errorf("of the job there is only %q", names)
			}
		}
	}
	if parent {
		if err := store.Close(); err != nil {
			t.Error(err)
		}
		if names := keys(false); len(names) != 0 {
			t.Errorf("the job left %q", names)
		}
	}
}

// A rank is lost while the store is full: the survivors are told that, and not of a partition.
func TestErrorNamesFullStore(t *testing.T) {
	t.Parallel() // it waits, mostly
	const inRank = "PG_TEST_SITE_RANK"
	var env []string
	if os.Getenv(inRank) == "" {
		env = append(sitetest.Start(t, sitetest.Config{Quota: 4 << 20}).Env(), "TUTTI_JOB=test", inRank+"=1")
	}
	pgtest.Run(t, 3, func(t *testing.T, g *pg.Group) {
		ctx := t.Context()
		if g.Rank() == 0 {
			s, err := bootstrap.DialStore(ctx, bootstrap.StoreConfig{Address: os.Getenv("TUTTI_STORE"), Job: "default"})
			if err != nil {
				t.Fatal(err)
			}
			defer s.Close()
			for i := 0; err == nil || errors.Is(err, bootstrap.ErrStoreAway); i++ { // it may be slow meanwhile
				err = s.Put(ctx, fmt.Sprint("k", i), make([]byte, bootstrap.MaxValue), false)
			}
			if !strings.Contains(err.Error(), "it is full") {
				t.Fatal(err)
			}
		}
		if err := g.Barrier(ctx); err != nil {
			t.Fatal(err)
		}
		if through(t, g, 2); g.Rank() == 2 {
			syscall.Kill(os.Getpid(), syscall.SIGKILL)
		}
		if err := g.Barrier(ctx); err == nil {
			t.Fatal("a barrier without rank 2")
		}
		err := g.Recover(ctx)
		if !errors.Is(err, pg.ErrIsolated) || !strings.Contains(err.Error(), "it is full") ||
			strings.Contains(err.Error(), "partition") {
			t.Errorf("%v, want ErrIsolated, and that the store is full", err)
		}
	}, pgtest.Env(env...), pgtest.Expect(2, syscall.SIGKILL),
		pgtest.Config(pg.Config{OnFailure: pg.Shrink, Timeout: 20 * time.Second}))
}

// Ranks meet in a site's own etcd, with TLS, client certificates and a user, told by nothing but
// the environment.
func TestSiteStore(t *testing.T) {
	const inRank = "PG_TEST_SITE_RANK"
	var env []string
	if os.Getenv(inRank) == "" { // this is the test's own process
		env = append(sitetest.Start(t, sitetest.Config{ClientCerts: true, Users: true}).Env(), "TUTTI_JOB=test",
			inRank+"=1")
	}
	pgtest.Run(t, 2, func(t *testing.T, g *pg.Group) {
		if s := os.Getenv("TUTTI_STORE"); !strings.HasPrefix(s, "etcds://") {
			t.Fatalf("the store is %s", s)
		}
		x := []int64{int64(g.Rank()) + 1}
		if err := pg.AllReduce(t.Context(), g, x, pg.Sum); err != nil || x[0] != 3 {
			t.Errorf("%v, %v", x, err)
		}
	}, pgtest.Env(env...))
}
