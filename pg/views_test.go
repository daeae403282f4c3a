package pg_test

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"syscall"
	"testing"

	"tutti/pg"
	"tutti/pg/pgtest"
)

// beside calls from a goroutine of its own all that needs no order, until stop is called, which
// waits for it. The arguments are refused, or the rank has been evicted. A look at the group must
// be safe while its view changes: run the tests with -race.
func beside(t *testing.T, g *pg.Group) (stop func()) {
	ctx, cancel := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	refused := func(err error) {
		var bad *pg.ArgumentError
		if !errors.As(err, &bad) && !errors.Is(err, pg.ErrEvicted) {
			t.Errorf("got %v, want an *ArgumentError", err)
		}
	}
	looks := map[string]func(){
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
	}
	wg.Go(func() {
		for ctx.Err() == nil {
			for name, look := range looks { // in another order each time
				if look(); t.Failed() {
					t.Log(name)
					return
				}
			}
		}
	})
	return func() { cancel(); wg.Wait() }
}

// Whatever looks at the group's size and members may be called by any goroutine while the view
// changes: here the group grows by AutoAdmit.
func TestCallsDuringViewChanges(t *testing.T) {
	pgtest.Run(t, 2, func(t *testing.T, g *pg.Group) {
		stop := beside(t, g)
		all := false
		for !all && !t.Failed() {
			x := []int64{1}
			if err := pg.AllReduce(t.Context(), g, x, pg.Sum); err != nil {
				t.Error(err)
			}
			all = x[0] == 4
		}
		stop()
		if err := holes(t, g, 20); err != nil {
			t.Error(err)
		}
		if g.Size() != 4 || fmt.Sprint(g.View().Active) != "[0 1 2 3]" {
			t.Errorf("%d slots, %v", g.Size(), g.View())
		}
	}, pgtest.Transport("shm"), pgtest.Config(pg.Config{AutoAdmit: true}), pgtest.Extend(2))
}

// The same while the program starts operations, divides the group, and admits a rank; one rank is
// killed, and another one is evicted from outside the order of operations.
func TestCallsDuringLosses(t *testing.T) {
	const killed, evicted = 3, 2
	pgtest.Run(t, 4, func(t *testing.T, g *pg.Group) {
		ctx := t.Context()
		stop := beside(t, g)
		defer stop()
		var evicting sync.WaitGroup
		defer evicting.Wait()
		// round returns the first error; the outcome is the same at all ranks.
		round := func(settled bool) (over bool, err error) {
			x := []int64{0}
			if settled {
				x[0] = 1
			}
			if err := g.Start(pg.AllReduceOp{Dst: pg.BufferOf(x), Op: pg.Sum}).Wait(ctx); err != nil {
				return false, err
			}
			if x[0] == 3 {
				return true, nil
			}
			sub, err := g.Split(ctx, 0, 0)
			if err != nil {
				return false, err
			}
			defer sub.Close()
			stop := beside(t, sub)
			defer stop()
			if err := sub.Barrier(ctx); err != nil && lostRank(err) < 0 && !errors.Is(err, pg.ErrEvicted) {
				t.Errorf("in the subgroup: %v", err)
			}
			return false, nil
		}
		for n := 0; !t.Failed(); n++ {
			if g.Rank() == killed && n == 2 {
				pgtest.Kill(t)
			}
			if g.Rank() == 0 && n == 4 {
				evicting.Go(func() {
					if err := g.Evict(ctx, evicted); err != nil {
						t.Errorf("evicting: %v", err)
					}
				})
			}
			over, err := round(fmt.Sprint(g.View().Active) == "[0 1 4]")
			if over {
				break
			}
			if err == nil || lostRank(err) >= 0 {
				_, err = g.Admit(ctx)
			}
			if errors.Is(err, pg.ErrEvicted) && g.Rank() == evicted {
				return
			}
			if err != nil && lostRank(err) < 0 {
				t.Errorf("round %d: %v", n, err)
			}
		}
		if err := holes(t, g, 20); err != nil {
			t.Error(err)
		}
	}, pgtest.Transport("shm"), pgtest.Config(pg.Config{OnFailure: pg.Shrink, Uniform: true}), pgtest.Extend(1),
		pgtest.Expect(killed, syscall.SIGKILL))
}
