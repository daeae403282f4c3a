package pg_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"runtime"
	"testing"
	"time"

	"tutti/pg"
	"tutti/pg/pgtest"
)

// Receives that are cancelled at random moments lose no message, short or long: each is received
// once, whole and in order, and each Send succeeds.
func TestCancelledReceivesLoseNothing(t *testing.T) {
	program := func(ctx context.Context, g *pg.Group) error {
		const messages = 120
		rng := rand.New(rand.NewPCG(3, 4))
		given, pause := 0, rand.New(rand.NewPCG(5, 6))
		for i := range messages {
			size := []int{1 + rng.IntN(1000), 1500, 4000 + rng.IntN(40_000)}[i%3]
			x := make([]int64, size)
			if g.Rank() == 0 {
				for k := range x {
					x[k] = int64(i*1_000_000 + k)
				}
				if i == 0 { // it is sent when a receive has been given up
					if err := g.Barrier(ctx); err != nil {
						return err
					}
				}
				if err := pg.Send(ctx, g, x, 1, 5); err != nil {
					return fmt.Errorf("message %d: %w", i, err)
				}
				continue
			}
			for try := 0; ; try++ {
				c, cancel := ctx, context.CancelFunc(func() {})
				if try < 10 {
					c, cancel = context.WithTimeout(ctx, time.Duration(pause.IntN(200))*time.Microsecond)
				}
				s, err := pg.Recv(c, g, x, pg.AnyRank, pg.AnyTag)
				cancel()
				if err == nil {
					if s.From != 0 || s.Tag != 5 || s.Count != size {
						return fmt.Errorf("message %d: %+v", i, s)
					}
					break
				}
				var late *pg.TimeoutError
				if !errors.As(err, &late) {
					return fmt.Errorf("message %d: got %v, want a *TimeoutError", i, err)
				}
				if given++; given == 1 {
					if err := g.Barrier(ctx); err != nil {
						return err
					}
				}
			}
			for k := range x {
				if x[k] != int64(i*1_000_000+k) {
					return fmt.Errorf("message %d: element %d is %d", i, k, x[k])
				}
			}
		}
		return g.Barrier(ctx)
	}
	t.Run("local", func(t *testing.T) { local(t, 2, program) })
	for _, tr := range transports {
		t.Run(tr, func(t *testing.T) {
			pgtest.Run(t, 2, func(t *testing.T, g *pg.Group) {
				if err := program(t.Context(), g); err != nil {
					t.Error(err)
				}
			}, pgtest.Transport(tr))
		})
	}
}

// Messages that are started and wait need no goroutine each, and many of them keep their order.
func TestManyStartedMessages(t *testing.T) {
	const many, tags = 20_000, 7
	local(t, 2, func(ctx context.Context, g *pg.Group) error {
		before := runtime.NumGoroutine()
		works, all := make([]*pg.Work, many), make([]int32, many)
		for i := range works {
			x := all[i : i+1]
			if g.Rank() == 0 {
				x[0] = int32(i)
				works[i] = g.Start(pg.SendOp{X: pg.BufferOf(x), To: 1, Tag: i % tags})
			} else {
				works[i] = g.Start(pg.RecvOp{X: pg.BufferOf(x), From: []int{0, pg.AnyRank}[i%2], Tag: i % tags})
			}
		}
		if n := runtime.NumGoroutine() - before; n > many/100 {
			return fmt.Errorf("%d goroutines for %d messages", n, many)
		}
		x := []int32{1}
		if err := pg.AllReduce(ctx, g, x, pg.Sum); err != nil || x[0] != 2 {
			return fmt.Errorf("an operation beside them: %v, %w", x, err)
		}
		for i, w := range works {
			if err := w.Wait(ctx); err != nil {
				return fmt.Errorf("message %d: %w", i, err)
			}
			if all[i] != int32(i) {
				return fmt.Errorf("message %d is %d", i, all[i])
			}
		}
		return g.Barrier(ctx)
	})
}
