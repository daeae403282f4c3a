package pg_test

import (
	"os"
	"strings"
	"testing"

	"tutti/internal/sitetest"
	"tutti/pg"
	"tutti/pg/pgtest"
)

// Ranks meet in a site's own etcd, with TLS, client certificates and a user, told by nothing but the environment.
func TestSiteStore(t *testing.T) {
	const inRank = "PG_TEST_SITE_RANK"
	var env []string
	if os.Getenv(inRank) == "" { // this is the test's own process
		env = append(sitetest.Start(t, sitetest.Config{ClientCerts: true, Users: true}).Env(), "TUTTI_JOB=test", inRank+"=1")
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
