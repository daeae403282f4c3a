package pg_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"tutti/collectives"
	"tutti/internal/proctest"
	"tutti/internal/tuning"
	"tutti/p2p/registry"
	"tutti/pg"
	"tutti/pg/pgtest"
)

var transports = []string{"shm", "tcp"}

func values(rank, n int) []float64 {
	x := make([]float64, n)
	for i := range x {
		x[i] = float64(rank + i%17)
	}
	return x
}

func reduced(t *testing.T, g *pg.Group, x []float64) {
	t.Helper()
	n := g.Size()
	for i, v := range x {
		if want := float64(n*(n-1)/2 + n*(i%17)); v != want {
			t.Fatalf("element %d of %d is %v, want %v", i, len(x), v, want)
		}
	}
}

func TestProcesses(t *testing.T) {
	for _, tr := range transports {
		for _, n := range []int{2, 4} {
			t.Run(fmt.Sprintf("%s/%d", tr, n), func(t *testing.T) {
				pgtest.Run(t, n, func(t *testing.T, g *pg.Group) {
					ctx := context.Background()
					for _, count := range []int{1, 100, 10_000, 1_000_000, 3_000_001} {
						x := values(g.Rank(), count)
						if err := pg.AllReduce(ctx, g, x, pg.Sum); err != nil {
							t.Fatal(err)
						}
						reduced(t, g, x)
						y, err := pg.Alloc[float64](g, count)
						if err != nil {
							t.Fatal(err)
						}
						for range 3 {
							copy(y, values(g.Rank(), count))
							if err := pg.AllReduce(ctx, g, y, pg.Sum); err != nil {
								t.Fatal(err)
							}
							reduced(t, g, y)
						}
						if err := g.Barrier(ctx); err != nil {
							t.Fatal(err)
						}
						if err := pg.Free(g, y); err != nil {
							t.Fatal(err)
						}
					}
				}, pgtest.Transport(tr))
			})
		}
	}
}

// Every survivor of a kill -9 gets the dead rank's name, at whatever point of an operation it died.
func TestSurvivorsNameKilledRank(t *testing.T) {
	for _, tr := range transports {
		for _, when := range []string{"before", "during", "during registered", "after", "before the links"} {
			t.Run(tr+"/"+when, func(t *testing.T) {
				const n, dead = 4, 2
				here := filepath.Join(t.TempDir(), "here")
				pgtest.Run(t, n, func(t *testing.T, g *pg.Group) {
					ctx := context.Background()
					x := make([]float32, 1<<20)
					if when == "before the links" { // ranks that are still in Join would be told there
						here := os.Getenv("TEST_HERE")
						if err := os.WriteFile(fmt.Sprint(here, g.Rank()), nil, 0o600); err != nil {
							t.Fatal(err)
						}
						for r := 0; r < n; {
							if _, err := os.Stat(fmt.Sprint(here, r)); err == nil {
								r++
							} else {
								time.Sleep(time.Millisecond)
							}
						}
					}
					if when == "during registered" {
						var err error
						if x, err = pg.Alloc[float32](g, len(x)); err != nil {
							t.Fatal(err)
						}
					}
					if when != "before the links" {
						if err := pg.AllReduce(ctx, g, x, pg.Sum); err != nil {
							t.Fatal(err)
						}
						through(t, g, dead)
					}
					if g.Rank() == dead {
						if when == "during" || when == "during registered" {
							w := g.Start(pg.AllReduceOp{Dst: pg.BufferOf(x), Op: pg.Sum})
							_ = w
						}
						pgtest.Kill(t)
					}
					start := time.Now()
					var err error
					for i := 0; err == nil; i++ { // what the dead rank took part in may still end well
						if i == 10 {
							t.Fatal("operations go on without the dead rank")
						}
						err = pg.AllReduce(ctx, g, x, pg.Sum)
					}
					var re *pg.RankError
					if !errors.As(err, &re) || re.Rank != dead {
						t.Fatalf("got %v, want a *RankError that names rank %d", err, dead)
					}
					if took := time.Since(start); took > 20*time.Second {
						t.Errorf("it took %v", took)
					}
					if again := g.Barrier(ctx); !errors.As(again, &re) {
						t.Errorf("afterwards: %v", again)
					}
				}, pgtest.Transport(tr), pgtest.Expect(dead, syscall.SIGKILL), pgtest.Env("TEST_HERE="+here),
					pgtest.Config(pg.Config{Timeout: 30 * time.Second}))
			})
		}
	}
}

// deadline is a context whose deadline has passed when end is closed.
type deadline struct {
	context.Context
	end <-chan struct{}
}

func (d deadline) Done() <-chan struct{} { return d.end }

func (d deadline) Err() error {
	select {
	case <-d.end:
		return context.DeadlineExceeded
	default:
		return nil
	}
}

// A rank that is stopped, not dead, is named by the timeout.
func TestErrorNamesStoppedRank(t *testing.T) {
	t.Parallel() // it waits, mostly
	pgtest.Run(t, 3, func(t *testing.T, g *pg.Group) {
		ctx := t.Context()
		if err := g.Barrier(ctx); err != nil {
			t.Fatal(err)
		}
		through(t, g, 0)
		switch g.Rank() {
		case 0:
			control := pgtest.InjectFaults(t)
			control.Stop(1, time.Minute)
			control.Await(2, 3) // it is in its second barrier, after a message
		case 1:
			through(t, g, 1)
			return
		}
		ended, end := make(chan error, 1), make(chan struct{})
		if g.Rank() == 0 {
			ctx = deadline{ctx, end}
		}
		go func() { ended <- g.Barrier(ctx) }()
		if g.Rank() == 0 {
			poll(t, "rank 1 alone is waited for", func() bool { return slices.Equal(g.Awaited(), []int{1}) })
			close(end)
		}
		err := <-ended
		var to *pg.TimeoutError
		if !errors.As(err, &to) || len(to.Missing) != 1 || to.Missing[0].Rank != 1 {
			t.Errorf("got %v, want a *TimeoutError that names rank 1", err)
		}
		if g.Rank() == 2 {
			if err := pg.Send(t.Context(), g, []byte{1}, 0, 0); err != nil {
				t.Error(err)
			}
			return
		}
		if _, err := pg.Recv(t.Context(), g, make([]byte, 1), 2, 0); err != nil { // it has its error
			t.Error(err)
		}
		pgtest.InjectFaults(t).Kill(1)
	}, pgtest.Faults(nil), pgtest.Expect(1, syscall.SIGKILL))
}

// A cancelled operation on shared memory leaves memory that no peer touches any more.
func TestCancelFencesRegisteredMemory(t *testing.T) {
	pgtest.Run(t, 2, func(t *testing.T, g *pg.Group) {
		x, err := pg.Alloc[float32](g, 1<<22)
		if err != nil {
			t.Fatal(err)
		}
		for round := 0; ; round++ {
			ctx, cancel := context.WithTimeout(context.Background(),
				time.Duration(g.Rank())*time.Second+time.Duration(20+3*round)*time.Millisecond)
			for i := range x {
				x[i] = 1
			}
			err := pg.AllReduce(ctx, g, x, pg.Sum)
			cancel()
			if err == nil {
				if x[0] != 2 || x[len(x)-1] != 2 {
					t.Fatalf("a wrong result: %v, %v", x[0], x[len(x)-1])
				}
				if g.Rank() == 0 && round > 3 { // leave rank 1 alone in the middle of the next one
					for i := range x { // it may succeed: rank 1 then checks the sum
						x[i] = 1
					}
					ctx, cancel := context.WithTimeout(context.Background(), 300*time.Microsecond)
					err = pg.AllReduce(ctx, g, x, pg.Sum)
					cancel()
				}
				if err == nil {
					continue
				}
			}
			for i := range x {
				x[i] = 5
			}
			if err := g.Close(); err != nil {
				t.Fatal(err)
			}
			for i := range x {
				if x[i] != 5 {
					t.Fatalf("element %d was written after the call had returned %v", i, err)
				}
			}
			return
		}
	})
}

// A rank needs a secret, and a store that is away ends a Join in time.
func TestJoinNeedsSecretAndStore(t *testing.T) {
	t.Parallel() // it waits, mostly
	pgtest.Run(t, 1, func(t *testing.T, g *pg.Group) {
		for _, name := range []string{"TUTTI_SECRET", "TUTTI_SECRET_FILE"} {
			os.Unsetenv(name) // of this process, which is a rank
		}
		if _, err := pg.Join(context.Background(), pg.Config{Size: 2, Rank: 0, StoreAddr: "etcd://127.0.0.1:1",
			Timeout: 10 * time.Second}); err == nil || !strings.Contains(err.Error(), "no job secret") {
			t.Errorf("without a secret: %v", err)
		}
		start := time.Now()
		_, err := pg.Join(context.Background(), pg.Config{Size: 2, Rank: 0, StoreAddr: "etcd://127.0.0.1:1",
			Secret: []byte("0123456789abcdef"), Timeout: time.Second})
		if err == nil || time.Since(start) > 19*time.Second {
			t.Errorf("a store that is away: %v after %v", err, time.Since(start))
		}
	})
}

// Ranks that have the same measured table choose by it. If one of them differs, whatever the
// reason, none does, and one line says so.
func TestTunedJobs(t *testing.T) {
	const n = 3
	ring, err := collectives.NewTable(map[collectives.Kind][]collectives.Rule{collectives.AllReduce: {
		{When: collectives.IfOneHost, MinRanks: n, Algo: collectives.Ring}}})
	if err != nil {
		t.Fatal(err)
	}
	tree, err := collectives.NewTable(map[collectives.Kind][]collectives.Rule{collectives.AllReduce: {
		{When: collectives.IfOneHost, MinRanks: n, Algo: collectives.Tree}}})
	if err != nil {
		t.Fatal(err)
	}
	file := func(ranks int, table *collectives.Table) string {
		path := filepath.Join(t.TempDir(), "tune.json")
		best := registry.Best(registry.Kinds(), registry.Options{}).Name
		if err := tuning.New(tuning.Here(ranks, best), table).Save(path); err != nil {
			t.Fatal(err)
		}
		return path
	}
	same, other, foreign := file(n, ring), file(n, tree), file(n+1, ring)
	for name, c := range map[string]struct {
		paths [n]string
		used  *collectives.Table
		log   int // lines of rank 0
	}{
		"same":    {[n]string{same, same, same}, ring, 0},
		"differ":  {[n]string{same, other, same}, nil, 1},
		"missing": {[n]string{same, same, tuning.Off}, nil, 1},
		"foreign": {[n]string{foreign, foreign, foreign}, nil, 1},
	} {
		t.Run(name, func(t *testing.T) {
			var log proctest.Output // a rank's process comes through here too, with files of its own
			rank, _ := strconv.Atoi(os.Getenv("TUTTI_RANK"))
			conf := pg.Config{Tuning: c.paths[rank%n],
				Logger: slog.New(slog.NewTextHandler(&log, &slog.HandlerOptions{Level: slog.LevelWarn}))}
			pgtest.Run(t, n, func(t *testing.T, g *pg.Group) {
				for _, count := range []int{1, 30_000} {
					x := values(g.Rank(), count)
					if err := pg.AllReduce(context.Background(), g, x, pg.Sum); err != nil {
						t.Fatal(err)
					}
					reduced(t, g, x)
				}
				if got := pg.TableHash(g); got != c.used.Hash() {
					t.Errorf("table %x, want %x", got, c.used.Hash())
				}
				want := 0
				if g.Rank() == 0 {
					want = c.log
				}
				// Other lines say something of the machine.
				lines := slices.DeleteFunc(slices.Collect(strings.Lines(log.String())),
					func(line string) bool { return !strings.Contains(line, "algorithms") })
				if len(lines) != want {
					t.Errorf("%d lines of log, want %d: %q", len(lines), want, lines)
				}
			}, pgtest.Config(conf))
		})
	}
}
