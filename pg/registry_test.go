package pg_test

import (
	"context"
	"errors"
	"testing"

	"tutti/p2p"
	"tutti/p2p/registry"
	"tutti/p2p/unixtest"
	"tutti/pg"
	"tutti/pg/pgtest"
)

// A transport takes one package and one row: with them it is chosen, named in errors, and works.
func TestCallersTransport(t *testing.T) {
	defer registry.Add(registry.Kind{Name: unixtest.Name, Reach: registry.Machine,
		Works: func(registry.Options) error { return nil },
		New:   func(registry.Options) (p2p.Transport, error) { return unixtest.New(), nil }})()
	pgtest.Run(t, 3, func(t *testing.T, g *pg.Group) {
		x := []int64{int64(g.Rank())}
		if err := pg.AllReduce(t.Context(), g, x, pg.Sum); err != nil || x[0] != 3 {
			t.Errorf("%v, %v", x, err)
		}
		large := make([]int64, 300_000)
		large[len(large)-1] = int64(g.Rank())
		if err := pg.AllReduce(t.Context(), g, large, pg.Sum); err != nil || large[len(large)-1] != 3 {
			t.Errorf("%v, %v", large[len(large)-1], err)
		}
	}, pgtest.Transport(unixtest.Name))
	_, err := pg.Join(context.Background(), pg.Config{Size: 2, Transport: "none"})
	var bad *pg.ArgumentError
	if !errors.As(err, &bad) || bad.Want != "auto, or a list of unix, shm, rdma or tcp" {
		t.Error(err)
	}
}
