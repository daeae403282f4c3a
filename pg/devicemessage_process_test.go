package pg_test

import (
	"bytes"
	"context"
	"errors"
	"syscall"
	"testing"
	"time"

	"tutti/device"
	"tutti/device/devicetest"
	"tutti/mem"
	"tutti/pg"
	"tutti/pg/pgtest"
)

// A rank that dies ends its messages with streams of the others, by name; these streams go on, and
// so does the group.
func TestDeathReleasesStreamsOfMessages(t *testing.T) {
	const n = 300_000
	for _, tr := range transports {
		t.Run(tr, func(t *testing.T) {
			d := devicetest.NewLate("cuda:0", 7, 20*time.Microsecond)
			pgtest.Run(t, 3, func(t *testing.T, g *pg.Group) {
				g.SetPiece(16 << 10)
				ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
				defer cancel()
				must := func(err error) {
					t.Helper()
					if err != nil {
						t.Fatal(err)
					}
				}
				s, err := d.Stream()
				must(err)
				defer s.Close()
				memory := func(fill byte) mem.Memory {
					m, err := d.Alloc(n)
					must(err)
					must(s.Copy(m, mem.Host(bytes.Repeat([]byte{fill}, n), mem.Anywhere)))
					return m
				}
				idle := func() {
					t.Helper()
					e, err := s.Record()
					must(err)
					must(e.Wait(ctx))
				}
				on := func(m mem.Memory) pg.Buffer { return pg.DeviceBuffer(m, pg.Uint8, s) }
				x, y := memory(1), memory(2)
				must(g.Barrier(ctx))
				if through(t, g, 2); g.Rank() == 2 {
					must(g.Do(ctx, pg.SendOp{X: on(x), To: 0}))
					g.Start(pg.SendOp{X: on(x), To: 0, Tag: 1})
					idle()
					pgtest.Kill(t)
				}
				if g.Rank() == 0 {
					must(g.Do(ctx, pg.RecvOp{X: on(x), From: 2}))
				}
				works := []*pg.Work{g.Start(pg.SendOp{X: on(x), To: 2, Tag: 3}),
					g.Start(pg.RecvOp{X: on(y), From: 2, Tag: 4}), g.Start(pg.RecvOp{X: on(y), From: 2, Tag: 5})}
				idle() // before any goroutine waits for the works
				for i, w := range works {
					var lost *pg.RankError
					if err := w.Wait(ctx); !errors.As(err, &lost) || lost.Rank != 2 {
						t.Errorf("message %d with a dead rank: %v", i, err)
					}
				}
				err = g.Do(ctx, pg.RecvOp{X: on(y), From: 2})
				if !errors.As(err, new(*pg.RankError)) {
					t.Errorf("a receive from a dead rank: %v", err)
				}
				must(g.Recover(ctx))
				z := memory(3)
				if g.Rank() == 0 {
					must(s.Copy(z, mem.Host(bytes.Repeat([]byte{9}, n), mem.Anywhere)))
					must(g.Start(pg.SendOp{X: on(z), To: 1}).Wait(ctx))
				} else {
					must(g.Start(pg.RecvOp{X: on(z), From: 0}).Wait(ctx))
				}
				must(g.Do(ctx, pg.AllReduceOp{Dst: on(z), Op: pg.Max}))
				got := make([]byte, n)
				must(s.Copy(mem.Host(got, mem.Anywhere), z))
				if idle(); bytes.Count(got, []byte{9}) != n {
					t.Error("the survivors' message is not what was sent")
				}
				must(g.Barrier(ctx))
			}, pgtest.Transport(tr), pgtest.Expect(2, syscall.SIGKILL),
				pgtest.Config(pg.Config{Devices: device.List{d}, OnFailure: pg.Shrink}))
		})
	}
}

// Ranks that read large buffers straight from each other's process read those of devices when all
// of them has come from there.
func TestPeersReadWhatHasComeFromTheDevice(t *testing.T) {
	const n = 2 << 20
	d := devicetest.NewLate("cuda:0", 7, 20*time.Millisecond)
	pgtest.Run(t, 2, func(t *testing.T, g *pg.Group) {
		g.SetPiece(64 << 10)
		o := newOnLate(t, d)
		for round := range 8 {
			m := o.alloc(bytes.Repeat([]byte{byte(1 + round + 10*g.Rank())}, n))
			op := pg.BroadcastOp{X: pg.DeviceBuffer(m, pg.Uint8, o.s), Root: round % 2}
			if err := g.Start(op).Wait(t.Context()); err != nil {
				t.Fatal(err)
			}
			if got := o.get(m); bytes.Count(got, []byte{byte(1 + round + 10*(round%2))}) != n {
				t.Fatalf("round %d: other bytes than the root's", round)
			}
		}
	}, pgtest.Transport("shm"), pgtest.Config(pg.Config{Devices: device.List{d}, SingleCopy: "on"}))
}
