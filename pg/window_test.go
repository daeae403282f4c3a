package pg_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"runtime"
	"slices"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sync/errgroup"

	"tutti/p2p"
	"tutti/pg"
	"tutti/pg/pgtest"
)

// everywhere runs fn with ranks of one process, and with processes over each transport.
func everywhere(t *testing.T, n int, fn func(t *testing.T, g *pg.Group), opts ...pgtest.Option) {
	t.Run("local", func(t *testing.T) { pgtest.RunLocal(t, n, fn, opts...) })
	for _, tr := range transports {
		t.Run(tr, func(t *testing.T) { pgtest.Run(t, n, fn, append(opts, pgtest.Transport(tr))...) })
	}
}

func newWindow(t *testing.T, g *pg.Group, n int) *pg.Window {
	t.Helper()
	w, err := pg.NewWindow(t.Context(), g, n)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
		defer cancel()
		if err := w.Close(ctx); err != nil {
			t.Error(err)
		}
	})
	return w
}

// Every rank puts to every other, and signals; a target that sees the signal sees the data, and can
// read it with Get and through Map.
func TestWindowsOfAllRanksExchangeData(t *testing.T) {
	const part, n = 100_000, 3
	everywhere(t, n, func(t *testing.T, g *pg.Group) {
		ctx, me := t.Context(), g.Rank()
		w := newWindow(t, g, n*part)
		if w.Size() != n*part || len(w.Bytes()) != w.Size() || !bytes.Equal(w.Bytes(), make([]byte, n*part)) {
			t.Fatal("the part is not what was asked for, zeroed")
		}
		if err := g.Barrier(ctx); err != nil {
			t.Fatal(err)
		}
		pattern := func(from, to, round int) []byte {
			return bytes.Repeat([]byte{byte(1 + from*50 + to*7 + round)}, part)
		}
		for round := 1; round <= 5; round++ {
			for to := range n {
				x := pattern(me, to, round)
				if err := w.Put(ctx, to, me*part, x[:part-8]); err != nil {
					t.Fatal(err)
				}
				if round%2 == 0 { // one strong signal, or the second put's own
					if err := w.Put(ctx, to, me*part+part-8, x[:8]); err != nil {
						t.Fatal(err)
					}
					if err := w.Signal(ctx, to, 3); err != nil {
						t.Fatal(err)
					}
				} else {
					if err := w.Flush(ctx, to); err != nil {
						t.Fatal(err)
					}
					if err := w.PutSignal(ctx, to, me*part+part-8, x[:8], 3); err != nil {
						t.Fatal(err)
					}
				}
			}
			for from := range n {
				if err := w.WaitSignal(ctx, from, 3, uint64(round)); err != nil {
					t.Fatal(err)
				}
				if !bytes.Equal(w.Bytes()[from*part:(from+1)*part], pattern(from, me, round)) {
					t.Fatalf("round %d: the signal of rank %d came before its data", round, from)
				}
			}
			for to := range n {
				if err := w.Flush(ctx, to); err != nil {
					t.Fatal(err)
				}
			}
			if err := g.Barrier(ctx); err != nil {
				t.Fatal(err)
			}
			for to := range n {
				got := make([]byte, part)
				if err := w.Get(ctx, to, me*part, got); err != nil {
					t.Fatal(err)
				}
				if !bytes.Equal(got, pattern(me, to, round)) {
					t.Errorf("round %d: Get from rank %d has other bytes than were put", round, to)
				}
				switch b, err := w.Map(ctx, to); {
				case err == nil && !bytes.Equal(b[me*part:(me+1)*part], got):
					t.Errorf("round %d: Map of rank %d has other bytes", round, to)
				case err != nil && !errors.Is(err, errors.ErrUnsupported):
					t.Error(err)
				}
			}
			if err := g.Barrier(ctx); err != nil {
				t.Fatal(err)
			}
		}
	})
}

// TestWindowArguments: what is wrong with a call is said, and nothing of it was begun.
func TestWindowArguments(t *testing.T) {
	pgtest.RunLocal(t, 2, func(t *testing.T, g *pg.Group) {
		ctx := t.Context()
		argument := func(what string, err error) {
			t.Helper()
			if !errors.As(err, new(*pg.ArgumentError)) {
				t.Errorf("%s: %v", what, err)
			}
		}
		_, err := pg.NewWindow(ctx, g, 0)
		argument("a window of nothing", err)
		_, err = pg.NewWindow(ctx, g, 100+g.Rank())
		argument("windows of different sizes", err)
		for _, bad := range []int{0, -1, math.MaxInt} {
			_, err = pg.NewWindow(ctx, g, []int{100, bad}[g.Rank()])
			argument(fmt.Sprintf("a window of %d bytes at one rank", bad), err)
		}
		w := newWindow(t, g, 100)
		other, x := 1-g.Rank(), make([]byte, 101)
		for what, err := range map[string]error{
			"beyond the end":   w.Put(ctx, other, 1, x[:100]),
			"more than a part": w.Put(ctx, other, 0, x),
			"before the part":  w.Get(ctx, other, -1, x[:1]),
			"behind the end":   w.Get(ctx, other, 100, x[:1]),
			"far away":         w.Put(ctx, other, int(^uint(0)>>1), x[:2]),
			"no such rank":     w.Put(ctx, 2, 0, x[:1]),
			"a negative rank":  w.Flush(ctx, -1),
			"no such counter":  w.Signal(ctx, other, pg.WindowCounters),
			"negative counter": w.PutSignal(ctx, other, 0, x[:1], -1),
			"waiting for none": w.WaitSignal(ctx, other, -1, 1),
			"wait on no rank":  w.WaitSignal(ctx, 7, 0, 1),
			"too many signals": w.WaitSignal(ctx, other, 0, 1<<40),
		} {
			argument(what, err)
		}
		if err := g.Barrier(ctx); err != nil {
			t.Fatal(err)
		}
		if !bytes.Equal(w.Bytes(), make([]byte, 100)) {
			t.Error("memory has changed")
		}
	})
}

// TestWaitSignalEndsEarly: a deadline, a cancelled context, Abort and Close end a wait with a typed
// error, and the window is usable after the first two.
func TestWaitSignalEndsEarly(t *testing.T) {
	everywhere(t, 2, func(t *testing.T, g *pg.Group) {
		w := newWindow(t, g, 1<<20)
		other := 1 - g.Rank()
		ctx, cancel := context.WithTimeout(t.Context(), 30*time.Millisecond)
		defer cancel()
		var late *pg.TimeoutError
		err := w.WaitSignal(ctx, other, 7, 1)
		if !errors.As(err, &late) || !errors.Is(err, context.DeadlineExceeded) || len(late.Missing) != 1 ||
			late.Missing[0].Rank != other {
			t.Fatalf("a deadline: %v", err)
		}
		ctx, cancel = context.WithCancel(t.Context())
		cancel()
		if err := w.WaitSignal(ctx, other, 7, 1); !errors.Is(err, context.Canceled) {
			t.Errorf("a cancelled context: %v", err)
		}
		if err := w.Signal(t.Context(), other, 0); err != nil {
			t.Fatal(err)
		}
		if err := w.WaitSignal(t.Context(), other, 0, 1); err != nil {
			t.Fatal(err)
		}
		if err := w.Flush(t.Context(), other); err != nil {
			t.Fatal(err)
		}
		together(t, g)
		enough := errors.New("enough")
		if g.Rank() == 0 {
			g.Abort(enough)
		}
		if err := w.WaitSignal(t.Context(), other, 1, 1); !errors.Is(err, pg.ErrAborted) {
			t.Errorf("Abort: %v", err)
		}
		g.Close()
		if err := w.Put(t.Context(), other, 0, []byte{1}); !errors.Is(err, pg.ErrClosed) {
			t.Errorf("a put after the group's Close: %v", err)
		}
	})
}

// A rank that has aborted the group and left the job is no lost rank: its window fails with the
// abort, also if no other call has told of that before.
func TestWindowOfRankThatAbortedAndLeft(t *testing.T) {
	groups, _ := elasticJob(t, 2, 2)
	windows := make([]*pg.Window, len(groups))
	var eg errgroup.Group
	for r, g := range groups {
		defer g.Close()
		eg.Go(func() (err error) {
			windows[r], err = pg.NewWindow(t.Context(), g, 100)
			return err
		})
	}
	if err := eg.Wait(); err != nil {
		t.Fatal(err)
	}
	groups[0].Abort(errors.New("enough"))
	groups[0].Close()
	poll(t, "rank 0 has left", func() bool { return slices.Equal(groups[1].JobView(), []int{1}) })
	poll(t, "its abort has come", groups[1].Stopped)
	for what, call := range map[string]func() error{
		"waiting for a signal": func() error { return windows[1].WaitSignal(t.Context(), 0, 0, 1) },
		"a put":                func() error { return windows[1].Put(t.Context(), 0, 0, []byte{1}) },
	} {
		groups[1].ForgetAbort()
		if err := call(); !errors.Is(err, pg.ErrAborted) {
			t.Errorf("%s: %v, want ErrAborted", what, err)
		}
	}
	for _, w := range windows {
		if err := w.Close(t.Context()); err != nil {
			t.Error(err)
		}
	}
}

// TestWindowSurvivesLostRank: a rank that dies in the middle of it costs its own part, by name; the
// others use theirs, before the group has gone on and after.
func TestWindowSurvivesLostRank(t *testing.T) {
	for _, tr := range transports {
		t.Run(tr, func(t *testing.T) {
			pgtest.Run(t, 4, func(t *testing.T, g *pg.Group) {
				ctx := t.Context()
				const last = 4 << 20
				w := newWindow(t, g, last+1)
				x := bytes.Repeat([]byte{7}, last)
				came := func() { // what the rank that died had signalled before
					t.Helper()
					if err := w.WaitSignal(ctx, 2, 7, 1); err != nil || w.Bytes()[last] != 9 {
						t.Errorf("what a rank put and signalled before it died: %d, %v", w.Bytes()[last], err)
					}
					if err := w.WaitSignal(ctx, 2, 7, 2); lostRank(err) != 2 {
						t.Errorf("waiting for a rank that died: %v", err)
					}
				}
				if err := g.Barrier(ctx); err != nil {
					t.Fatal(err)
				}
				if through(t, g, 2); g.Rank() == 2 {
					for _, to := range []int{0, 1, 3} {
						if err := errors.Join(w.PutSignal(ctx, to, last, []byte{9}, 7), w.Flush(ctx, to)); err != nil {
							t.Fatal(err)
						}
					}
					if err := w.Put(ctx, 0, 0, x); err != nil {
						t.Fatal(err)
					}
					pgtest.Kill(t)
				}
				for { // until it is noticed
					err := w.Put(ctx, 2, 0, x)
					if err == nil {
						err = w.Flush(ctx, 2)
					}
					if err == nil {
						continue
					}
					if lostRank(err) != 2 {
						t.Fatalf("a put to a rank that died: %v", err)
					}
					break
				}
				came()
				if err := w.Get(ctx, 2, 0, x[:8]); lostRank(err) != 2 {
					t.Errorf("a get from a rank that died: %v", err)
				}
				for round := uint64(1); round <= 2; round++ { // in both views
					for _, to := range []int{0, 1, 3} {
						x := bytes.Repeat([]byte{byte(round)}, 100)
						if err := w.PutSignal(ctx, to, 100*g.Rank(), x, 5); err != nil {
							t.Fatal(err)
						}
					}
					for _, from := range []int{0, 1, 3} {
						if err := w.WaitSignal(ctx, from, 5, round); err != nil {
							t.Fatal(err)
						}
						if w.Bytes()[100*from+99] != byte(round) {
							t.Errorf("round %d: the signal came before its data", round)
						}
					}
					for _, to := range []int{0, 1, 3} {
						if err := w.Flush(ctx, to); err != nil {
							t.Fatal(err)
						}
					}
					for range 3 { // all make the same calls, whichever of them tells of the loss
						if err := g.Barrier(ctx); err != nil && lostRank(err) != 2 {
							t.Fatal(err)
						}
					}
					if len(g.View().Active) != 3 {
						t.Fatalf("the view is %v", g.View())
					}
				}
				came()
				if err := w.Put(ctx, 2, 0, x[:1]); lostRank(err) != 2 {
					t.Errorf("a put to a rank that is no member any more: %v", err)
				}
			}, pgtest.Transport(tr), pgtest.Expect(2, syscall.SIGKILL),
				pgtest.Config(pg.Config{OnFailure: pg.Shrink, Timeout: 30 * time.Second}))
		})
	}
}

// The mapping of a lost rank's part stays when Refresh has dropped the part, also by a second one.
func TestMappedPartOfLostRankOutlivesRefresh(t *testing.T) {
	pgtest.Run(t, 3, func(t *testing.T, g *pg.Group) {
		ctx := t.Context()
		w := newWindow(t, g, 1<<16)
		w.Bytes()[100] = byte(g.Rank() + 10)
		if err := g.Barrier(ctx); err != nil {
			t.Fatal(err)
		}
		b, err := w.Map(ctx, 1)
		if err != nil {
			t.Fatal(err)
		}
		if through(t, g, 1); g.Rank() == 1 {
			pgtest.Kill(t)
		}
		if err := until(t, g, 2); err != nil {
			t.Fatal(err)
		}
		for range 2 {
			if err := w.Refresh(ctx); err != nil {
				t.Fatal(err)
			}
			if b[100] != 11 {
				t.Errorf("the part of the lost rank has %d", b[100])
			}
		}
		if _, err := w.Map(ctx, 1); lostRank(err) != 1 {
			t.Errorf("another Map: %v", err)
		}
	}, pgtest.Transport("shm"), pgtest.Expect(1, syscall.SIGKILL), pgtest.Config(pg.Config{OnFailure: pg.Shrink}))
}

// TestWindowReachesReplacementAfterRefresh: after Refresh the replacement's part is used like any
// other, and signals of its earlier incarnation do not count.
func TestWindowReachesReplacementAfterRefresh(t *testing.T) {
	for _, tr := range transports {
		t.Run(tr, func(t *testing.T) {
			pgtest.Run(t, 3, func(t *testing.T, g *pg.Group) {
				ctx, me := t.Context(), g.Rank()
				var w *pg.Window
				if !pgtest.Second() {
					w = newWindow(t, g, 4096)
					for to := range 3 { // three signals from every rank
						for range 3 {
							if err := w.Signal(ctx, to, 0); err != nil {
								t.Fatal(err)
							}
						}
					}
					for from := range 3 {
						if err := w.WaitSignal(ctx, from, 0, 3); err != nil {
							t.Fatal(err)
						}
					}
					for to := range 3 {
						if err := w.Flush(ctx, to); err != nil {
							t.Fatal(err)
						}
					}
					together(t, g)
					if me == 1 {
						pgtest.Kill(t)
					}
					for {
						v := g.View()
						if v.Epoch > 2 && len(v.Active) == 3 {
							break
						}
						if _, err := g.Admit(ctx); err != nil && lostRank(err) != 1 {
							t.Fatal(err)
						}
					}
					if err := w.Put(ctx, 1, 0, []byte{1}); lostRank(err) != 1 {
						t.Errorf("a put to a rank whose part is not known: %v", err)
					}
					if err := w.Refresh(ctx); err != nil {
						t.Fatal(err)
					}
				} else {
					w = newWindow(t, g, 4096)
				}
				// Between old incarnations the counters continue; to and from the new one they
				// begin anew.
				count := func(peer int) uint64 {
					if me == 1 || peer == 1 {
						return 1
					}
					return 4
				}
				for to := range 3 {
					if err := w.PutSignal(ctx, to, 8*me, []byte{byte(100 + me)}, 0); err != nil {
						t.Fatal(err)
					}
				}
				for from := range 3 {
					if err := w.WaitSignal(ctx, from, 0, count(from)); err != nil {
						t.Fatal(err)
					}
					if w.Bytes()[8*from] != byte(100+from) {
						t.Errorf("the signal of rank %d came before its data", from)
					}
				}
				short, cancel := context.WithTimeout(ctx, 20*time.Millisecond)
				defer cancel()
				for from := range 3 {
					if err := w.WaitSignal(short, from, 0, count(from)+1); !errors.Is(err, context.DeadlineExceeded) {
						t.Errorf("rank %d has signalled more often than it has: %v", from, err)
					}
				}
				for to := range 3 {
					if err := w.Flush(ctx, to); err != nil {
						t.Fatal(err)
					}
				}
				if err := g.Barrier(ctx); err != nil {
					t.Fatal(err)
				}
			}, pgtest.Transport(tr), pgtest.Expect(1, syscall.SIGKILL), pgtest.Replace(1),
				pgtest.Config(pg.Config{OnFailure: pg.Shrink, Timeout: 30 * time.Second}))
		})
	}
}

// A rank that makes its part anew while the others refresh the window is reached like one that came
// in: its counters and those of the others at it begin anew.
func TestWindowReachesPartMadeAnew(t *testing.T) {
	everywhere(t, 3, func(t *testing.T, g *pg.Group) {
		ctx, me := t.Context(), g.Rank()
		w, err := pg.NewWindow(ctx, g, 4096)
		if err != nil {
			t.Fatal(err)
		}
		flush := func() {
			t.Helper()
			for to := range 3 {
				if err := w.Flush(ctx, to); err != nil {
					t.Fatal(err)
				}
			}
			if err := g.Barrier(ctx); err != nil {
				t.Fatal(err)
			}
		}
		const anew = 2
		want := [3]uint64{}
		for round := byte(1); round <= 3; round++ {
			if round > 1 {
				if me == anew {
					if err := w.Close(ctx); err != nil {
						t.Fatal(err)
					}
					w, err = pg.NewWindow(ctx, g, 4096)
				} else {
					err = w.Refresh(ctx)
				}
				if err != nil {
					t.Fatal(err)
				}
				for from := range want {
					if me == anew || from == anew {
						want[from] = 0
					}
				}
				over, cancel := context.WithCancel(ctx)
				cancel()
				if err := w.WaitSignal(over, anew, 0, 1); !errors.Is(err, context.Canceled) {
					t.Errorf("round %d: a signal of the part before counts: %v", round, err)
				}
				if err := g.Barrier(ctx); err != nil {
					t.Fatal(err)
				}
			}
			for to := range 3 {
				for range 2 {
					if err := w.PutSignal(ctx, to, 8*me, []byte{round}, 0); err != nil {
						t.Fatal(err)
					}
				}
			}
			for from := range want {
				want[from] += 2
				if err := w.WaitSignal(ctx, from, 0, want[from]); err != nil {
					t.Fatal(err)
				}
				if w.Bytes()[8*from] != round {
					t.Errorf("round %d: the signal of rank %d came before its data", round, from)
				}
			}
			flush()
		}
		if err := w.Close(ctx); err != nil {
			t.Error(err)
		}
	})
}

// A rank dies while others make a window, and one that extends the job waits to come in: it comes
// in with the loss, and the window has a part at it.
func TestWindowOfGroupThatGrowsMeanwhile(t *testing.T) {
	pgtest.Run(t, 3, func(t *testing.T, g *pg.Group) {
		ctx := t.Context()
		if g.Rank() == 2 {
			for len(g.JobView()) < 4 {
				runtime.Gosched()
			}
			pgtest.Kill(t)
		}
		w := newWindow(t, g, 64)
		for _, to := range []int{0, 1, 3} {
			if err := errors.Join(w.PutSignal(ctx, to, g.Rank(), []byte{7}, 0), w.Flush(ctx, to)); err != nil {
				t.Fatal(err)
			}
		}
		for _, from := range []int{0, 1, 3} {
			if err := w.WaitSignal(ctx, from, 0, 1); err != nil {
				t.Fatal(err)
			}
		}
		if err := g.Barrier(ctx); err != nil {
			t.Fatal(err)
		}
	}, pgtest.Transport("shm"), pgtest.Extend(1), pgtest.Expect(2, syscall.SIGKILL),
		pgtest.Config(pg.Config{OnFailure: pg.Retry, AutoAdmit: true, Timeout: 30 * time.Second}))
}

// TestWindowCloses: after Close of a part its use fails with an error that names the rank, and the
// rank's other windows still work.
func TestWindowCloses(t *testing.T) {
	everywhere(t, 2, func(t *testing.T, g *pg.Group) {
		ctx := t.Context()
		first, second := newWindow(t, g, 64), newWindow(t, g, 64)
		other := 1 - g.Rank()
		if err := first.Put(ctx, other, 0, []byte{1}); err != nil {
			t.Fatal(err)
		}
		if err := first.Flush(ctx, other); err != nil {
			t.Fatal(err)
		}
		if err := g.Barrier(ctx); err != nil {
			t.Fatal(err)
		}
		if g.Rank() == 1 {
			for range 2 {
				if err := first.Close(ctx); err != nil {
					t.Fatal(err)
				}
			}
			if err := first.Put(ctx, other, 0, []byte{1}); !errors.Is(err, pg.ErrClosed) {
				t.Errorf("a put on a window that is closed: %v", err)
			}
			if err := first.Refresh(ctx); !errors.Is(err, pg.ErrClosed) {
				t.Errorf("Refresh of a window that is closed: %v", err)
			}
		}
		if err := g.Barrier(ctx); err != nil {
			t.Fatal(err)
		}
		if g.Rank() == 0 {
			err := first.Put(ctx, 1, 0, []byte{2})
			done := make(chan error, 1)
			go func() { done <- first.Flush(ctx, 1) }()
			if second.Signal(ctx, 1, 0) != nil {
				t.Error("the second window")
			}
			begun := err == nil
			if e := <-done; err == nil {
				err = e
			}
			if lostRank(err) != 1 {
				t.Errorf("a put to a part that is closed: %v", err)
			}
			if begun {
				if err := first.Flush(ctx, 1); lostRank(err) != 1 {
					t.Errorf("another Flush of that put: %v", err)
				}
			}
			if err := second.Signal(ctx, 1, 1); err != nil {
				t.Fatal(err)
			}
		} else if err := second.WaitSignal(ctx, 0, 1, 1); err != nil {
			t.Fatal(err)
		}
		if err := second.Flush(ctx, other); err != nil {
			t.Fatal(err)
		}
		if err := g.Barrier(ctx); err != nil {
			t.Fatal(err)
		}
	})
}

// TestWindowPrograms: random puts, gets and signals, all ranks at once, with an oracle: of each
// source's region at each target the source knows what must be there.
func TestWindowPrograms(t *testing.T) {
	const n, area, steps = 3, 150_000, 120
	everywhere(t, n, func(t *testing.T, g *pg.Group) {
		ctx, me := t.Context(), g.Rank()
		w := newWindow(t, g, n*area)
		r := rand.New(rand.NewPCG(42, uint64(me)))
		var model [n][]byte // what this rank's area at each target holds
		var signals [n]uint64
		for to := range model {
			model[to] = make([]byte, area)
		}
		var flying [n][][]byte // puts that are not flushed must not overlap
		used := [n]int{}
		flush := func(to int) {
			if err := w.Flush(ctx, to); err != nil {
				t.Fatal(err)
			}
			flying[to], used[to] = nil, 0
		}
		for step := range steps {
			to := r.IntN(n)
			size := []int{1, 8, 100, 4096, 70_000}[r.IntN(5)]
			switch r.IntN(5) {
			case 0, 1: // a put behind those that are under way
				if used[to]+size > area {
					flush(to)
				}
				x := make([]byte, size)
				for i := range x {
					x[i] = byte(r.Uint32())
				}
				off := used[to]
				used[to] += size
				copy(model[to][off:], x)
				flying[to] = append(flying[to], x)
				var err error
				if r.IntN(2) == 0 {
					signals[to]++
					err = w.PutSignal(ctx, to, me*area+off, x, 0)
				} else {
					err = w.Put(ctx, to, me*area+off, x)
				}
				if err != nil {
					t.Fatalf("step %d: %v", step, err)
				}
			case 2:
				signals[to]++
				if err := w.Signal(ctx, to, 0); err != nil {
					t.Fatalf("step %d: %v", step, err)
				}
			case 3:
				flush(to)
			case 4:
				flush(to)
				off := r.IntN(area - size + 1)
				got := make([]byte, size)
				if err := w.Get(ctx, to, me*area+off, got); err != nil {
					t.Fatalf("step %d: %v", step, err)
				}
				if !bytes.Equal(got, model[to][off:off+size]) {
					t.Fatalf("step %d: %d bytes at %d of rank %d are not what was put", step, size, off, to)
				}
			}
		}
		for to := range n {
			flush(to)
		}
		mine := make([]int64, n)
		for to, k := range signals {
			mine[to] = int64(k)
		}
		all := make([]int64, n*n)
		if err := pg.AllGather(ctx, g, all, mine); err != nil {
			t.Fatal(err)
		}
		for from := range n {
			if err := w.WaitSignal(ctx, from, 0, uint64(all[from*n+me])); err != nil {
				t.Fatal(err)
			}
		}
		sums := make([]uint64, n*n)
		own := make([]uint64, n)
		for to := range n {
			own[to] = checksum(model[to])
		}
		if err := pg.AllGather(ctx, g, sums, own); err != nil {
			t.Fatal(err)
		}
		for from := range n {
			if checksum(w.Bytes()[from*area:(from+1)*area]) != sums[from*n+me] {
				t.Errorf("the area of rank %d is not what it has put", from)
			}
		}
		if err := g.Barrier(ctx); err != nil {
			t.Fatal(err)
		}
	})
}

func checksum(b []byte) (h uint64) {
	for _, v := range b {
		h = h*1099511628211 + uint64(v) + 1
	}
	return h
}

// BenchmarkWindow: the time until a target has seen 64 B and 1 MiB with its signal: half of a round
// trip in which both targets poll.
func BenchmarkWindow(b *testing.B) {
	for _, size := range []int{64, 1 << 20} {
		b.Run(fmt.Sprintf("inproc/%d", size), func(b *testing.B) {
			groups, err := pg.Local(2, pg.Config{})
			if err != nil {
				b.Fatal(err)
			}
			done := make(chan error, 2)
			for _, g := range groups {
				go func() {
					defer g.Close()
					done <- pingPong(b.Context(), g, size, b.N, b.ResetTimer)
				}()
			}
			for range groups {
				if err := <-done; err != nil {
					b.Fatal(err)
				}
			}
			b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(2*b.N), "ns/one-way")
		})
	}
}

// pingPong has two ranks put size bytes with a signal to each other in turn, rounds times.
func pingPong(ctx context.Context, g *pg.Group, size, rounds int, reset func()) error {
	w, err := pg.NewWindow(ctx, g, size)
	if err != nil {
		return err
	}
	defer w.Close(ctx)
	x, other := make([]byte, size), 1-g.Rank()
	turn := func(i int) error {
		if g.Rank() == 0 {
			if err := w.PutSignal(ctx, other, 0, x, 0); err != nil {
				return err
			}
		}
		if err := w.WaitSignal(ctx, other, 0, uint64(i)); err != nil {
			return err
		}
		if g.Rank() == 1 {
			return w.PutSignal(ctx, other, 0, x, 0)
		}
		return nil
	}
	const warm = 100
	for i := 1; i <= rounds+warm; i++ {
		if i == warm+1 && g.Rank() == 0 {
			reset()
		}
		if err := turn(i); err != nil {
			return err
		}
	}
	if err := w.Flush(ctx, other); err != nil {
		return err
	}
	return g.Barrier(ctx)
}

// A rank that sees a signal sees the data of the put before it, also if that put was given up: then
// no signal is sent, and every Flush returns the error, until Refresh.
func TestSignalsOfPutsThatFailAreNotSent(t *testing.T) {
	const n, rounds = 32 << 20, 6 // rounds at least, until a put has been given up
	everywhere(t, 2, func(t *testing.T, g *pg.Group) {
		ctx, w := t.Context(), newWindow(t, g, n)
		over, cancel := context.WithCancel(ctx)
		cancel()
		data := func(round int) []byte { return bytes.Repeat([]byte{byte(round)}, n) }
		failed, late := 0, time.Now().Add(time.Minute)
		for round, last := 1, false; ; round++ {
			if last {
				over = ctx
			}
			if g.Rank() == 0 {
				x := data(round)
				if err := errors.Join(w.Put(ctx, 1, 0, x), w.Signal(ctx, 1, 2)); err != nil {
					t.Fatalf("round %d: %v", round, err)
				}
				switch err := w.Flush(over, 1); {
				case err != nil && last:
					t.Fatal(err)
				case err != nil:
					failed++
					for what, err := range map[string]error{"Flush": w.Flush(ctx, 1), "Signal": w.Signal(ctx, 1, 2),
						"PutSignal": w.PutSignal(ctx, 1, 0, nil, 2)} {
						if !errors.Is(err, p2p.ErrCancelled) {
							t.Errorf("%s after a put was given up: %v", what, err)
						}
					}
				}
			}
			if err := g.Barrier(ctx); err != nil {
				t.Fatal(err)
			}
			if g.Rank() == 1 {
				switch err := w.WaitSignal(over, 0, 2, uint64(round)); {
				case err == nil && !bytes.Equal(w.Bytes(), data(round)):
					t.Errorf("round %d: the signal came without the data", round)
				case last && err != nil:
					t.Error(err)
				}
			}
			if err := w.Refresh(ctx); err != nil {
				t.Fatal(err)
			}
			if last {
				break
			}
			enough := []int{0}
			if g.Rank() == 0 && round >= rounds-1 && (failed > 0 || time.Now().After(late)) {
				enough[0] = 1
			}
			if err := pg.AllReduce(ctx, g, enough, pg.Max); err != nil {
				t.Fatal(err)
			}
			last = enough[0] == 1
		}
		if g.Rank() == 0 && failed == 0 {
			t.Error("no put was given up")
		}
	})
}

// Signals that many goroutines send to the same counter, more than a link takes at a time, are all
// counted.
func TestConcurrentSignalsAreCounted(t *testing.T) {
	const workers, rounds, size = 200, 4, 16 << 10
	everywhere(t, 2, func(t *testing.T, g *pg.Group) {
		ctx := t.Context()
		w := newWindow(t, g, workers*size)
		var puts errgroup.Group
		for k := range workers {
			puts.Go(func() error {
				if g.Rank() == 1 {
					return nil
				}
				x := make([]byte, size)
				for range rounds {
					if err := w.PutSignal(ctx, 1, k*size, x, 3); err != nil {
						return err
					}
				}
				return nil
			})
		}
		if err := puts.Wait(); err != nil {
			t.Fatal(err)
		}
		if g.Rank() == 1 {
			if err := w.WaitSignal(ctx, 0, 3, workers*rounds); err != nil {
				t.Fatal(err)
			}
		} else if err := w.Flush(ctx, 1); err != nil {
			t.Fatal(err)
		}
		if err := g.Barrier(ctx); err != nil {
			t.Fatal(err)
		}
	})
}
