package pg_test

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"

	"tutti/pg"
	"tutti/pg/pgtest"
)

// Whatever looks at the group's size and members may be called by any goroutine while the view
// changes (run it with -race): here the group grows by AutoAdmit.
func TestCallsDuringViewChanges(t *testing.T) {
	pgtest.Run(t, 2, func(t *testing.T, g *pg.Group) {
		ctx, stop := context.WithCancel(t.Context())
		var wg sync.WaitGroup
		refused := func(err error) {
			var bad *pg.ArgumentError
			if !errors.As(err, &bad) {
				t.Errorf("got %v, want an *ArgumentError", err)
			}
		}
		for name, look := range map[string]func(){
			"size":     func() { _ = g.Size() },
			"view":     func() { _ = g.View() },
			"topology": func() { _ = g.Topology() },
			"local":    func() { _, _ = g.LocalRank(), g.LocalSize() },
			"start": func() {
				refused(g.Start(pg.AllGatherOp{Dst: pg.BufferOf(make([]int32, 7)),
					Src: pg.BufferOf(make([]int32, 1))}).Wait(ctx))
			},
			"counts": func() {
				refused(g.Start(pg.AllToAllVOp{SendCounts: []int{0},
					RecvCounts: []int{0}}).Wait(ctx))
			},
			"root": func() {
				refused(g.Start(pg.BroadcastOp{X: pg.BufferOf(make([]int32, 1)),
					Root: 9}).Wait(ctx))
			},
			"send":       func() { refused(pg.Send(ctx, g, []int32{1}, 9, 0)) },
			"start send": func() { refused(g.Start(pg.SendOp{X: pg.BufferOf([]int32{1}), To: 9}).Wait(ctx)) },
			"recv":       func() { _, err := pg.Recv(ctx, g, []int32{1}, 9, 0); refused(err) },
			"evict":      func() { refused(g.Evict(ctx, 9)) },
			"alloc": func() {
				x, err := pg.Alloc[int32](g, 1000)
				if err == nil {
					err = pg.Free(g, x)
				}
				if err != nil {
					t.Error(err)
				}
			},
		} {
			wg.Go(func() {
				for ctx.Err() == nil && !t.Failed() {
					if look(); t.Failed() {
						t.Log(name)
					}
				}
			})
		}
		all := false
		for !all && !t.Failed() {
			x := []int64{1}
			if err := pg.AllReduce(t.Context(), g, x, pg.Sum); err != nil {
				t.Error(err)
			}
			all = x[0] == 4
		}
		stop()
		wg.Wait()
		if err := holes(t, g, 20); err != nil {
			t.Error(err)
		}
		if g.Size() != 4 || fmt.Sprint(g.View().Active) != "[0 1 2 3]" {
			t.Errorf("%d slots, %v", g.Size(), g.View())
		}
	}, pgtest.Transport("shm"), pgtest.Config(pg.Config{AutoAdmit: true}), pgtest.Extend(2))
}
