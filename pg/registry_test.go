package pg_test

import (
	"context"
	"errors"
	"testing"

	"tutti/p2p"
	"tutti/p2p/registry"
	"tutti/p2p/tcp"
	"tutti/pg"
	"tutti/pg/pgtest"
)

// renamed is a transport of a program's own: here it is tcp under another name.
type renamed struct{ *tcp.Transport }

func (renamed) Name() string { return "renamed" }

// A transport takes one package and one row: with them it is chosen, named in errors, and works.
func TestCallersTransport(t *testing.T) {
	defer registry.Add(registry.Kind{Name: "renamed", Reach: registry.Network, Works: func() error { return nil },
		New: func(o registry.Options) (p2p.Transport, error) {
			return renamed{tcp.New(tcp.Config{Interfaces: o.Interfaces, Ports: o.Ports, Logger: o.Logger})}, nil
		}})()
	pgtest.Run(t, 3, func(t *testing.T, g *pg.Group) {
		x := []int64{int64(g.Rank())}
		if err := pg.AllReduce(t.Context(), g, x, pg.Sum); err != nil || x[0] != 3 {
			t.Errorf("%v, %v", x, err)
		}
	}, pgtest.Transport("renamed"))
	_, err := pg.Join(context.Background(), pg.Config{Size: 2, Transport: "none"})
	var bad *pg.ArgumentError
	if !errors.As(err, &bad) || bad.Want != "auto, or a list of renamed, shm, rdma or tcp" {
		t.Error(err)
	}
}
