//go:build linux

package pg_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"strings"
	"testing"
	"time"

	"tutti/bootstrap"
	"tutti/pg"
	"tutti/pg/pgtest"
)

// setMeeting sets the variables of a launcher for a job of the ranks of outer, whose rank 0 serves
// the store.
func setMeeting(t *testing.T, outer *pg.Group) {
	t.Helper()
	for _, name := range []string{"TUTTI_RANK", "TUTTI_SIZE", "TUTTI_STORE", "TUTTI_SECRET"} {
		t.Setenv(name, "")
	}
	for _, name := range []string{"USER", "PASSWORD", "CA", "CERT", "KEY"} { // of a site's store
		t.Setenv("TUTTI_STORE_"+name, "/none")
	}
	rank, size := fmt.Sprint(outer.Rank()), fmt.Sprint(outer.Size())
	t.Setenv("RANK", rank)
	t.Setenv("LOCAL_RANK", rank)
	t.Setenv("WORLD_SIZE", size)
	t.Setenv("LOCAL_WORLD_SIZE", size)
	t.Setenv("TUTTI_JOB", os.Getenv("TUTTI_JOB")+"-meeting")
}

// meet joins the job of setMeeting.
func meet(t *testing.T, outer *pg.Group) *pg.Group {
	t.Helper()
	setMeeting(t, outer)
	g, err := pg.Join(t.Context(), pg.Config{OnFailure: pg.Shrink, Timeout: 20 * time.Second})
	if err != nil {
		t.Fatal(err)
	}
	return g
}

// The rank that serves the store from its memory is evicted, and joins again: the store, and with
// it the job, outlive that, and attempts to join that fail. So it is with another rank.
func TestRejoinWithoutAStore(t *testing.T) {
	for _, out := range []int{0, 2} {
		t.Run(fmt.Sprintf("rank %d", out), func(t *testing.T) {
			pgtest.Run(t, 3, func(t *testing.T, outer *pg.Group) {
				ctx := t.Context()
				g := meet(t, outer)
				defer func() { g.Close() }()
				together := func() {
					t.Helper()
					if err := outer.Barrier(ctx); err != nil {
						t.Fatal(err)
					}
				}
				for range 2 {
					together()
					if g.Rank() == out {
						awaitEviction(t, g)
						// The first time, its groups are closed later.
						for _, d := range []time.Duration{1, 300 * time.Millisecond, 300 * time.Millisecond} {
							short, cancel := context.WithTimeout(ctx, d)
							if _, err := g.Rejoin(short); !errors.Is(err, context.DeadlineExceeded) {
								t.Fatalf("no rank admits it: %v, want that the deadline is exceeded", err)
							}
							cancel()
							together()
						}
						var err error
						if g, err = g.Rejoin(ctx); err != nil {
							t.Fatal(err)
						}
					} else {
						evict(t, g, out)
						for range 3 {
							together()
							if ok, err := g.Agree(ctx, true); !ok || err != nil { // it needs the store
								t.Fatalf("without rank %d: %v, %v", out, ok, err)
							}
						}
						for len(g.View().Active) < 3 {
							if _, err := g.Admit(ctx); err != nil {
								t.Fatal(err)
							}
						}
					}
					x := []int64{1}
					if err := pg.AllReduce(ctx, g, x, pg.Sum); err != nil || x[0] != 3 {
						t.Fatalf("with rank %d again: %v, %v", out, x, err)
					}
				}
				together()
			})
		})
	}
}

// When all others have left, the rank that serves the store learns at once that it cannot rejoin.
func TestRejoinOfTheStoresRankAlone(t *testing.T) {
	pgtest.Run(t, 3, func(t *testing.T, outer *pg.Group) {
		ctx := t.Context()
		g := meet(t, outer)
		defer g.Close()
		if err := outer.Barrier(ctx); err != nil {
			t.Fatal(err)
		}
		if g.Rank() != 0 {
			evict(t, g, 0)
			if err := g.Barrier(ctx); err != nil { // neither leaves before the other has looked at its view
				t.Fatal(err)
			}
			return
		}
		awaitEviction(t, g)
		for err := error(nil); !errors.Is(err, pg.ErrClosed); { // the others leave meanwhile
			short, cancel := context.WithTimeout(ctx, 300*time.Millisecond)
			if _, err = g.Rejoin(short); err == nil {
				t.Fatal("it came in though no rank is there")
			}
			cancel()
		}
	})
}

// said is a log that gives a value for each message that contains text.
type said struct {
	text string
	each chan<- struct{}
}

func (s said) Write(b []byte) (int, error) {
	if strings.Contains(string(b), s.text) {
		s.each <- struct{}{}
	}
	return len(b), nil
}

// After a Rejoin that has failed, Close of the rank that serves the store waits until the others
// have left, although Rejoin has closed the groups, or closes them still. Close of a subgroup does
// not wait, and Rejoin may be called again.
func TestCloseAfterFailedRejoinKeepsTheStore(t *testing.T) {
	for name, short := range map[string]time.Duration{"closed": 300 * time.Millisecond, "being closed": 1} {
		t.Run(name, func(t *testing.T) {
			pgtest.Run(t, 3, func(t *testing.T, outer *pg.Group) {
				ctx := t.Context()
				setMeeting(t, outer)
				waits := make(chan struct{}, 10)
				g, err := pg.Join(ctx, pg.Config{OnFailure: pg.Shrink, Timeout: time.Minute,
					Logger: slog.New(slog.NewTextHandler(said{"waits for other ranks", waits}, nil))})
				if err != nil {
					t.Fatal(err)
				}
				defer g.Close()
				sub, err := g.Split(ctx, 0, 0)
				if err != nil {
					t.Fatal(err)
				}
				together := func() {
					t.Helper()
					if err := outer.Barrier(ctx); err != nil {
						t.Fatal(err)
					}
				}
				together()
				if g.Rank() != 0 {
					evict(t, g, 0)
					together()                                            // rank 0 has failed
					together()                                            // it is in Close
					if ok, err := g.Agree(ctx, true); !ok || err != nil { // it needs the store
						t.Errorf("without rank 0: %v, %v", ok, err)
					}
					if err := errors.Join(sub.Close(), g.Close()); err != nil {
						t.Error(err)
					}
					return
				}
				awaitEviction(t, g)
				rejoin := func(d time.Duration) error {
					short, cancel := context.WithTimeout(ctx, d)
					defer cancel()
					_, err := g.Rejoin(short)
					return err
				}
				if err := rejoin(short); !errors.Is(err, context.DeadlineExceeded) {
					t.Fatalf("no rank admits it: %v, want that the deadline is exceeded", err)
				}
				if err := sub.Close(); err != nil { // it does not give up the job
					t.Fatal(err)
				}
				if err := rejoin(300 * time.Millisecond); !errors.Is(err, context.DeadlineExceeded) {
					t.Fatalf("no rank admits it: %v, want that the deadline is exceeded", err)
				}
				together()
				closed := make(chan error, 1)
				go func() { closed <- g.Close() }()
				select {
				case <-waits:
				case err := <-closed:
					t.Fatalf("Close returned before the others had left: %v", err)
				}
				if _, err := g.Rejoin(ctx); !errors.Is(err, pg.ErrClosed) {
					t.Errorf("Rejoin while Close waits: %v, want ErrClosed", err)
				}
				together()
				if err := <-closed; err != nil {
					t.Error(err)
				}
			})
		})
	}
}

// The first Rejoin of the rank that serves the store waits if all others have left: their launcher
// starts them again, and the job begins anew.
func TestRejoinBeforeOthersComeBack(t *testing.T) {
	pgtest.Run(t, 3, func(t *testing.T, outer *pg.Group) {
		ctx := t.Context()
		g := meet(t, outer)
		together := func() {
			t.Helper()
			if err := outer.Barrier(ctx); err != nil {
				t.Fatal(err)
			}
		}
		together()
		if g.Rank() == 0 {
			awaitEviction(t, g)
		} else {
			evict(t, g, 0)
			if err := errors.Join(g.Barrier(ctx), g.Close()); err != nil {
				t.Fatal(err)
			}
		}
		together()
		var err error
		if g.Rank() == 0 {
			g, err = g.Rejoin(ctx)
		} else {
			g, err = pg.Join(ctx, pg.Config{OnFailure: pg.Shrink, Timeout: time.Minute})
		}
		if err != nil {
			t.Fatal(err)
		}
		defer g.Close()
		x := []int64{1}
		if err := pg.AllReduce(ctx, g, x, pg.Sum); err != nil || x[0] != 3 {
			t.Errorf("in the new job: %v, %v", x, err)
		}
	})
}

// due is a context whose deadline a test lets pass.
type due struct {
	context.Context
	passed chan struct{}
}

func (c due) Done() <-chan struct{} { return c.passed }

func (c due) Err() error {
	select {
	case <-c.passed:
		return context.DeadlineExceeded
	default:
		return nil
	}
}

// When the deadline of a call of Join passes, the store that it serves stays for a moment, in which
// the other ranks learn why they cannot join.
func TestStoreOutlastsDeadlineOfJoin(t *testing.T) {
	pgtest.Run(t, 2, func(t *testing.T, outer *pg.Group) {
		setMeeting(t, outer)
		join := due{t.Context(), make(chan struct{})}
		failed := make(chan error, 1)
		if outer.Rank() == 0 {
			go func() {
				_, err := pg.Join(join, pg.Config{Timeout: time.Minute})
				failed <- err
			}()
		} else {
			l, err := bootstrap.FromEnv(os.Getenv)
			if err != nil {
				t.Fatal(err)
			}
			m, err := l.Meet(t.Context(), nil, slog.New(slog.DiscardHandler))
			if err != nil {
				t.Fatal(err)
			}
			defer m.Close(t.Context())
			s, err := bootstrap.DialStore(t.Context(), bootstrap.StoreConfig{Address: m.Store, Job: l.Job,
				Secret: m.Secret, Rank: 1})
			if err != nil {
				t.Fatal(err)
			}
			defer s.Close()
		}
		if err := outer.Barrier(t.Context()); err != nil {
			t.Fatal(err)
		}
		if outer.Rank() == 0 {
			began := time.Now()
			close(join.passed)
			err := <-failed
			if d := time.Since(began); d < time.Second || !errors.Is(err, context.DeadlineExceeded) {
				t.Errorf("Join returned %v after its deadline: %v", d, err)
			}
		}
		if err := outer.Barrier(t.Context()); err != nil {
			t.Fatal(err)
		}
	})
}

// evict has rank 1 evict a rank; the others recover.
func evict(t *testing.T, g *pg.Group, rank int) {
	t.Helper()
	if g.Rank() == 1 {
		if err := g.Evict(t.Context(), rank); err != nil {
			t.Fatal(err)
		}
	}
	poll(t, "the rank is out", func() bool { return len(g.JobView()) <= 2 })
	if err := g.Recover(t.Context()); err != nil {
		t.Fatal(err)
	}
	if v := g.View(); len(v.Active) != 2 {
		t.Fatalf("after recovering the view is %v", v)
	}
}

// awaitEviction returns when this rank has been evicted.
func awaitEviction(t *testing.T, g *pg.Group) {
	t.Helper()
	err := error(nil)
	for err == nil || lostRank(err) >= 0 {
		err = g.Barrier(t.Context())
	}
	if !errors.Is(err, pg.ErrEvicted) {
		t.Fatal(err)
	}
}
