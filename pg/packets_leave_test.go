//go:build cgo && linux

package pg_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"syscall"
	"testing"
	"time"

	"tutti/bootstrap"
	"tutti/device"
	"tutti/device/cuda/fake"
	"tutti/device/cuda/program"
	"tutti/pg"
	"tutti/pg/pgtest"
)

// leaseless is the test's store as one without leases.
type leaseless struct{ s bootstrap.Store }

func (l leaseless) Set(ctx context.Context, key string, value []byte) error {
	return l.s.Put(ctx, key, value, false)
}

func (l leaseless) Get(ctx context.Context, key string) ([]byte, error) {
	b, err := l.s.Get(ctx, key)
	if errors.Is(err, bootstrap.ErrNoKey) {
		err = nil
	}
	return b, err
}

func (l leaseless) Wait(ctx context.Context, key string) ([]byte, error) { return l.s.Wait(ctx, key) }

func (l leaseless) CompareAndSet(ctx context.Context, key string, expected, desired []byte) ([]byte, error) {
	var err error
	if len(expected) == 0 {
		err = l.s.Create(ctx, key, desired, false)
	} else {
		err = l.s.CompareAndSwap(ctx, key, expected, desired)
	}
	if err != nil && !errors.Is(err, bootstrap.ErrConflict) {
		return nil, err
	}
	return l.Get(ctx, key)
}

// joinLeaseless has the ranks of g join a job over a store without leases.
func joinLeaseless(t *testing.T, g *pg.Group, cfg pg.Config) *pg.Group {
	secret, err := bootstrap.ParseSecret(os.Getenv("TUTTI_SECRET"))
	if err != nil {
		t.Fatal(err)
	}
	s, err := bootstrap.DialStore(t.Context(), bootstrap.StoreConfig{Address: os.Getenv("TUTTI_STORE"),
		Job: os.Getenv("TUTTI_JOB") + "-leaseless", Secret: secret, Rank: g.Rank()})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.Close() })
	cfg.Store, cfg.Size, cfg.Rank = leaseless{s}, g.Size(), g.Rank()
	h, err := pg.Join(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	return h
}

// joinMeeting has the ranks of g join a job whose rank 0 serves the store.
func joinMeeting(t *testing.T, g *pg.Group, cfg pg.Config) *pg.Group {
	setMeeting(t, g)
	cfg.Window = time.Second
	h, err := pg.Join(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	return h
}

// A graph of a process that waits for another one ends without a call of this one, if that one
// closes the group and stays in the job, or dies and cannot be removed from the view: in a job
// without leases, or with the store. The next operation names the rank.
func TestLeavingEndsGraphsOfOtherProcesses(t *testing.T) {
	const n = 3
	split := func(t *testing.T, g *pg.Group, _ pg.Config) *pg.Group {
		sub, err := g.Split(t.Context(), 0, g.Rank())
		if err != nil {
			t.Fatal(err)
		}
		return sub
	}
	for name, c := range map[string]struct {
		group  func(t *testing.T, g *pg.Group, cfg pg.Config) *pg.Group
		victim int
		dies   bool
	}{
		"it closes a subgroup":                {split, 1, false},
		"it closes the group, without leases": {joinLeaseless, 1, false},
		"it dies, without leases":             {joinLeaseless, 1, true},
		"it dies with the store":              {joinMeeting, 0, true},
	} {
		t.Run(name, func(t *testing.T) {
			victim := c.victim
			d := openGPUOf(t, ofRank(), fake.Config{})
			cfg := pg.Config{Devices: device.List{d}, Timeout: 5 * time.Minute}
			opts := []pgtest.Option{pgtest.Transport("shm"), pgtest.Config(cfg)}
			if c.dies {
				opts = append(opts, pgtest.Expect(victim, syscall.SIGKILL))
			}
			pgtest.Run(t, n, func(t *testing.T, g *pg.Group) {
				ctx, h := t.Context(), c.group(t, g, cfg)
				defer h.Close()
				p := program.Open(t, d.fake.Path, 0)
				s, err := p.Stream()
				if err != nil {
					t.Fatal(err)
				}
				defer p.Destroy(s)
				m := d.alloc(t, make([]byte, 4))
				op := pg.AllReduceOp{Dst: pg.DeviceBuffer(m, pg.Uint32, d.Borrow(s)), Op: pg.Sum}
				if err := h.Do(ctx, op); err != nil {
					t.Fatal(err)
				}
				graph, err := p.Capture(s, func() error { return h.Start(op).Wait(ctx) })
				if err != nil {
					t.Fatal(err)
				}
				defer graph.Close()
				if g.Rank() == victim {
					if through(t, g, victim); c.dies {
						pgtest.Kill(t)
					}
					if err := h.Close(); err != nil {
						t.Fatal(err)
					}
				} else {
					if err := graph.Launch(s); err != nil {
						t.Fatal(err)
					}
					through(t, g, victim)
					if err := p.Finish(s, 30*time.Second); err != nil {
						h.Abort(err) // nothing is freed before the graph ends
						t.Fatal(err)
					}
					if err := h.Barrier(ctx); lostRank(err) != victim {
						t.Errorf("after the launch: %v", err)
					}
				}
				if !c.dies {
					if err := g.Barrier(ctx); err != nil {
						t.Error(err)
					}
					return
				}
				// A survivor that closes the group before the other has looked might be named.
				other := n - victim - g.Rank() // of the ranks 0, 1 and 2
				if err := pg.Send(ctx, g, []byte{1}, other, 1); err != nil {
					t.Error(err)
				}
				if _, err := pg.Recv(ctx, g, make([]byte, 1), other, 1); err != nil {
					t.Error(err)
				}
			}, opts...)
		})
	}
}

// A process dies among short collectives that others have started. These fail once, also where
// operations are repeated, and their sources are intact. Then the survivors go on, and leave the
// lost rank's part of a result as it was.
func TestDeathAmongShortKinds(t *testing.T) {
	const n, victim, count = 3, 1, 40
	for _, mode := range []pg.OnFailure{pg.Shrink, pg.Retry} {
		for name, of := range map[string]func(dst, src func(parts int) pg.Buffer) pg.Operation{
			"allreduce": func(dst, src func(parts int) pg.Buffer) pg.Operation {
				return pg.AllReduceOp{Dst: dst(1), Src: src(1), Op: pg.Sum}
			},
			"allgather": func(dst, src func(parts int) pg.Buffer) pg.Operation {
				return pg.AllGatherOp{Dst: dst(n), Src: src(1)}
			},
			"reducescatter": func(dst, src func(parts int) pg.Buffer) pg.Operation {
				return pg.ReduceScatterOp{Dst: dst(1), Src: src(n), Op: pg.Sum}
			},
			"alltoall": func(dst, src func(parts int) pg.Buffer) pg.Operation {
				return pg.AllToAllOp{Dst: dst(n), Src: src(n)}
			},
		} {
			t.Run(fmt.Sprintf("%v, %s", mode, name), func(t *testing.T) {
				cfg := pg.Config{OnFailure: mode, Timeout: 3 * time.Minute}
				onFlow(t, fake.Config{}, 2*n*count, cfg, func(t *testing.T, f *flow, g *pg.Group) {
					ctx, b := t.Context(), f.d.fake.Bytes(f.m)
					there := func(at int) func(parts int) pg.Buffer {
						return func(parts int) pg.Buffer {
							return pg.DeviceBuffer(f.m.Slice(at, parts*count), pg.Uint8, f.s)
						}
					}
					op := of(there(0), there(n*count))
					if err := g.Do(ctx, op); err != nil {
						t.Fatal(err)
					}
					for i := range b {
						b[i] = byte(i * (g.Rank() + 3))
					}
					was := bytes.Clone(b)
					if g.Rank() == victim {
						through(t, g, victim)
						pgtest.Kill(t)
					}
					w := g.Start(op)
					through(t, g, victim)
					var lost *pg.RankError
					if err := w.Wait(ctx); !errors.As(err, &lost) || lost.Rank != victim || lost.Overwritten {
						t.Fatal(err)
					}
					if err := g.Recover(ctx); err != nil {
						t.Fatal(err)
					}
					copy(b, was)
					here := func(at int) func(parts int) pg.Buffer {
						return func(parts int) pg.Buffer { return pg.BufferOf(was[at:][:parts*count]) }
					}
					if err := errors.Join(g.Do(ctx, op), g.Do(ctx, of(here(0), here(n*count)))); err != nil {
						t.Fatal(err)
					}
					if !bytes.Equal(b, was) {
						t.Error("not the host's result")
					}
					if g.Copies() > 0 {
						t.Error("the operations have gone through the host")
					}
					if err := g.Barrier(ctx); err != nil {
						t.Fatal(err)
					}
				}, pgtest.Expect(victim, syscall.SIGKILL))
			})
		}
	}
}

// A graph of a rank that is evicted ends when the rank learns of it, and the next operation says
// that it was evicted.
func TestEvictionEndsGraphs(t *testing.T) {
	const victim = 1
	cfg := pg.Config{OnFailure: pg.Shrink, Timeout: 5 * time.Minute}
	onFlow(t, fake.Config{}, 4, cfg, func(t *testing.T, f *flow, g *pg.Group) {
		ctx := t.Context()
		p := program.Open(t, f.d.fake.Path, 0)
		s, err := p.Stream()
		if err != nil {
			t.Fatal(err)
		}
		defer p.Destroy(s)
		op := pg.AllReduceOp{Dst: pg.DeviceBuffer(f.m, pg.Uint32, f.d.Borrow(s)), Op: pg.Sum}
		if err := g.Do(ctx, op); err != nil {
			t.Fatal(err)
		}
		graph, err := p.Capture(s, func() error { return g.Start(op).Wait(ctx) })
		if err != nil {
			t.Fatal(err)
		}
		defer graph.Close()
		if g.Rank() != victim {
			if through(t, g, victim); g.Rank() == 0 {
				if _, err := pg.Recv(ctx, g, make([]byte, 1), victim, 0); err != nil {
					t.Fatal(err)
				}
				if err := g.Evict(ctx, victim); err != nil {
					t.Fatal(err)
				}
			}
			for len(g.View().Active) == 3 { // nobody closes the group before
				if g.Barrier(ctx) != nil {
					if err := g.Recover(ctx); err != nil {
						t.Fatal(err)
					}
				}
			}
			return
		}
		through(t, g, victim)
		if err := graph.Launch(s); err != nil {
			t.Fatal(err)
		}
		if err := pg.Send(ctx, g, []byte{1}, 0, 0); err != nil && !errors.Is(err, pg.ErrEvicted) {
			t.Fatal(err)
		}
		if err := p.Finish(s, 30*time.Second); err != nil {
			g.Abort(err) // nothing is freed before the graph ends
			t.Fatal(err)
		}
		if err := g.Barrier(ctx); !errors.Is(err, pg.ErrEvicted) {
			t.Errorf("after the launch: %v", err)
		}
	})
}
