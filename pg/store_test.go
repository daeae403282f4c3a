package pg_test

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"tutti/bootstrap"
	"tutti/bootstrap/storetest"
	"tutti/pg"
	"tutti/pg/membership"
)

// shared is a bootstrap.KV in this process.
type shared struct {
	mu      sync.Mutex
	values  map[string][]byte
	changed chan struct{}
}

func newShared() *shared { return &shared{values: map[string][]byte{}, changed: make(chan struct{})} }

func (s *shared) Set(_ context.Context, key string, value []byte) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.put(key, value)
	return nil
}

func (s *shared) put(key string, value []byte) {
	s.values[key] = slices.Clone(value)
	close(s.changed)
	s.changed = make(chan struct{})
}

func (s *shared) Get(_ context.Context, key string) ([]byte, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Clone(s.values[key]), nil
}

func (s *shared) Wait(ctx context.Context, key string) ([]byte, error) {
	for {
		s.mu.Lock()
		v, changed := slices.Clone(s.values[key]), s.changed
		s.mu.Unlock()
		if len(v) > 0 {
			return v, nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
}

func (s *shared) CompareAndSet(_ context.Context, key string, expected, desired []byte) ([]byte, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if bytes.Equal(s.values[key], expected) {
		s.put(key, desired)
	}
	return slices.Clone(s.values[key]), nil
}

// keys lists the keys that have values.
func (s *shared) keys() (all []string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for k, v := range s.values {
		if len(v) > 0 {
			all = append(all, k)
		}
	}
	slices.Sort(all)
	return all
}

func fixed(kv bootstrap.KV, rank int) pg.Config {
	return pg.Config{Size: 3, Rank: rank, Store: kv, Secret: []byte("the secret of this test"),
		Timeout: 20 * time.Second}
}

// Ranks meet over a store of the program's own, of which they need no more than a KV has.
func TestCallersStore(t *testing.T) {
	kv := newShared()
	groups, errs := make([]*pg.Group, 3), make([]error, 3)
	var wg sync.WaitGroup
	for r := range groups {
		wg.Go(func() { groups[r], errs[r] = pg.Join(t.Context(), fixed(kv, r)) })
	}
	wg.Wait()
	if err := errors.Join(errs...); err != nil {
		t.Fatal(err)
	}
	for r, g := range groups {
		wg.Go(func() {
			x := []int64{int64(r)}
			if errs[r] = pg.AllReduce(t.Context(), g, x, pg.Sum); errs[r] == nil && x[0] != 3 {
				t.Errorf("rank %d: %d", r, x[0])
			}
		})
	}
	wg.Wait()
	if err := errors.Join(errs...); err != nil {
		t.Fatal(err)
	}
	// A request for a rank that is taken is refused at once, and so is another size.
	var taken *bootstrap.SlotError
	if _, err := pg.Join(t.Context(), fixed(kv, 1)); !errors.As(err, &taken) {
		t.Errorf("a second rank 1: %v", err)
	}
	larger := fixed(kv, 3)
	larger.Size = 4
	var size *bootstrap.SizeError
	if _, err := pg.Join(t.Context(), larger); !errors.As(err, &size) {
		t.Errorf("a job of another size: %v", err)
	}
	// A rank that goes ends the others' operations, and the group.
	groups[2].Close()
	for r, g := range groups[:2] {
		wg.Go(func() { errs[r] = g.Barrier(t.Context()) })
	}
	wg.Wait()
	for r, err := range errs[:2] {
		var lost *pg.RankError
		if !errors.As(err, &lost) || lost.Rank != 2 {
			t.Errorf("rank %d: %v, want a *RankError that names rank 2", r, err)
		}
		if err := groups[r].Recover(t.Context()); !errors.As(err, &lost) || lost.Rank != 2 {
			t.Errorf("rank %d recovered: %v, want a *RankError that names rank 2", r, err)
		}
		groups[r].Close()
	}
	if left := kv.keys(); !slices.Equal(left, []string{"/tutti/default/size", "/tutti/default/terms"}) {
		t.Errorf("the store holds %q", left)
	}
}

// A rank that begins an operation late names the rank that was lost, though another one has left
// because of that loss meanwhile.
func TestLateRankNamesFirstLoss(t *testing.T) {
	sum := func(g *pg.Group) error { return pg.AllReduce(t.Context(), g, make([]float32, 3), pg.Sum) }
	kv := newShared()
	groups, errs := make([]*pg.Group, 3), make([]error, 3)
	var wg sync.WaitGroup
	for r := range groups {
		wg.Go(func() {
			cfg := fixed(kv, r)
			cfg.Transport = "shm"
			if groups[r], errs[r] = pg.Join(t.Context(), cfg); errs[r] == nil {
				all := make([]float32, 3) // afterwards all have links to all
				errs[r] = errors.Join(pg.AllToAll(t.Context(), groups[r], all, make([]float32, 3)), sum(groups[r]))
			}
		})
	}
	wg.Wait()
	if err := errors.Join(errs...); err != nil {
		t.Fatal(err)
	}
	groups[2].Close()
	left := make(chan struct{})
	wg.Go(func() {
		defer close(left)
		errs[1] = sum(groups[1])
		groups[1].Close()
	})
	select {
	case <-left:
	case <-time.After(time.Second): // it has not noticed, and waits for rank 0
	}
	errs[0] = sum(groups[0])
	groups[0].Close()
	wg.Wait()
	for r, err := range errs[:2] {
		var lost *pg.RankError
		if !errors.As(err, &lost) || lost.Rank != 2 {
			t.Errorf("rank %d: %v, want a *RankError that names rank 2", r, err)
		}
	}
}

// A job whose ranks cannot be removed recovers from a timeout and from a mismatch.
func TestRecoverOfAFixedJob(t *testing.T) {
	for name, groups := range map[string]func(*testing.T) []*pg.Group{
		"store": func(t *testing.T) []*pg.Group {
			kv := newShared()
			groups, errs := make([]*pg.Group, 3), make([]error, 3)
			var wg sync.WaitGroup
			for r := range groups {
				wg.Go(func() { groups[r], errs[r] = pg.Join(t.Context(), fixed(kv, r)) })
			}
			wg.Wait()
			if err := errors.Join(errs...); err != nil {
				t.Fatal(err)
			}
			return groups
		},
		"local": func(t *testing.T) []*pg.Group {
			groups, err := pg.Local(3, pg.Config{Timeout: 20 * time.Second})
			if err != nil {
				t.Fatal(err)
			}
			return groups
		},
	} {
		t.Run(name, func(t *testing.T) {
			var wg sync.WaitGroup
			given := make(chan struct{})
			for _, g := range groups(t) {
				wg.Go(func() {
					defer g.Close()
					sub, err := g.Split(t.Context(), 0, g.Rank())
					if err != nil {
						t.Errorf("rank %d: %v", g.Rank(), err)
						return
					}
					defer sub.Close()
					for _, g := range []*pg.Group{g, sub, g} {
						if err := fixedRound(t, g, given); err != nil {
							t.Errorf("rank %d: %v", g.Rank(), err)
						}
					}
				})
			}
			wg.Wait()
		})
	}
}

// fixedRound has rank 2 come too late to an operation and then call another one than the others,
// and recovers from both. Each of the two others gives given a value when it has given up.
func fixedRound(t *testing.T, g *pg.Group, given chan struct{}) error {
	var late *pg.TimeoutError
	var differ *pg.MismatchError
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if g.Rank() == 2 {
		ctx = t.Context()
		<-given
		<-given
	}
	for i := range 2 { // the second one finds the group failed
		err := g.Barrier(ctx)
		if done := i == 0 && g.Rank() == 2 && err == nil; !done && !errors.As(err, &late) {
			return fmt.Errorf("barrier %d gave %v, want a *TimeoutError", i, err)
		}
	}
	if g.Rank() < 2 {
		given <- struct{}{}
	}
	if err := g.Recover(t.Context()); err != nil {
		return fmt.Errorf("recover after the timeout: %w", err)
	}
	if err := pg.AllReduce(t.Context(), g, make([]int64, 1+g.Rank()/2), pg.Sum); !errors.As(err, &differ) {
		return fmt.Errorf("the allreduce gave %v, want a *MismatchError", err)
	}
	if err := g.Recover(t.Context()); err != nil {
		return fmt.Errorf("recover after the mismatch: %w", err)
	}
	x := []int64{1}
	if err := pg.AllReduce(t.Context(), g, x, pg.Sum); err != nil || x[0] != 3 {
		return fmt.Errorf("the allreduce of the recovered group gave %d, %w", x[0], err)
	}
	return nil
}

// Features that need leases return an error.
func TestStoreWithoutLeases(t *testing.T) {
	for arg, change := range map[string]func(c *pg.Config){
		"OnFailure, or TUTTI_ON_FAILURE,": func(c *pg.Config) { c.OnFailure = pg.Shrink },
		"AutoAdmit, or TUTTI_AUTO_ADMIT,": func(c *pg.Config) { c.AutoAdmit = true },
		"MaxSize, or TUTTI_MAX_SIZE,":     func(c *pg.Config) { c.MaxSize = 5 },
		"Job":                             func(c *pg.Config) { c.Job = "a/b" },
	} {
		cfg := fixed(newShared(), 0)
		change(&cfg)
		var bad *pg.ArgumentError
		if _, err := pg.Join(t.Context(), cfg); !errors.As(err, &bad) || bad.Arg != arg {
			t.Errorf("%s: %v", arg, err)
		}
	}
}

// elastic is a store of the program's own with leases: here the one of the library.
type elastic struct {
	*shared
	open func(ctx context.Context) (bootstrap.Store, error)
}

func (e elastic) Open(ctx context.Context) (bootstrap.Store, error) { return e.open(ctx) }

// elasticJob joins n ranks of a job that shrinks and may grow, over a store in this process. change
// changes its configuration.
func elasticJob(t *testing.T, n, most int, change ...func(*pg.Config)) (groups []*pg.Group,
	config func(rank int) pg.Config) {
	t.Helper()
	m := storetest.NewMemory()
	t.Cleanup(m.Close)
	kv := elastic{newShared(), func(context.Context) (bootstrap.Store, error) { return m.Open(), nil }}
	config = func(rank int) pg.Config {
		cfg := fixed(kv, rank)
		cfg.Size, cfg.MaxSize, cfg.OnFailure = n, most, pg.Shrink
		for _, f := range change {
			f(&cfg)
		}
		return cfg
	}
	groups, errs := make([]*pg.Group, n), make([]error, n)
	var wg sync.WaitGroup
	for r := range groups {
		wg.Go(func() { groups[r], errs[r] = pg.Join(t.Context(), config(r)) })
	}
	wg.Wait()
	if err := errors.Join(errs...); err != nil {
		t.Fatal(err)
	}
	return groups, config
}

// Over a store with leases a job continues without a lost rank.
func TestCallersElasticStore(t *testing.T) {
	groups, _ := elasticJob(t, 3, 3)
	var wg sync.WaitGroup
	groups[2].Close()
	for r, g := range groups[:2] {
		wg.Go(func() {
			defer g.Close()
			for range 100 {
				x := []int64{1}
				err := pg.AllReduce(t.Context(), g, x, pg.Sum)
				if err == nil && x[0] == 2 && slices.Equal(g.View().Active, []int{0, 1}) {
					return
				}
				var lost *pg.RankError
				if err != nil && (!errors.As(err, &lost) || lost.Rank != 2) {
					t.Errorf("rank %d: %v, want a *RankError that names rank 2", r, err)
					return
				}
			}
			t.Errorf("rank %d is not in a view of ranks 0 and 1: %v", r, g.View())
		})
	}
	wg.Wait()
}

// A process that was on standby rejoins in the slot that it had, and takes no other one that is
// free.
func TestStandbyRejoinsItsSlot(t *testing.T) {
	ctx := t.Context()
	m := storetest.NewMemory()
	t.Cleanup(m.Close)
	kv := elastic{newShared(), func(context.Context) (bootstrap.Store, error) { return m.Open(), nil }}
	launcher := m.Open()
	defer launcher.Close()
	if err := launcher.Put(ctx, bootstrap.VacantKeys+"2", []byte("its process has ended"), true); err != nil {
		t.Fatal(err)
	}
	groups, errs := make([]*pg.Group, 3), make([]error, 3)
	var wg sync.WaitGroup
	for r := range groups {
		cfg := fixed(kv, r)
		cfg.Size, cfg.OnFailure = 3, pg.Shrink
		if r == 2 {
			cfg.Size, cfg.Rank = 0, 0
			env := map[string]string{"TUTTI_STANDBY": "0", "TUTTI_SIZE": "3"}
			cfg.Getenv = func(name string) string { return env[name] }
		}
		wg.Go(func() { groups[r], errs[r] = pg.Join(ctx, cfg) })
	}
	wg.Wait()
	if err := errors.Join(errs...); err != nil {
		t.Fatal(err)
	}
	groups[1].Close()
	wg.Go(func() {
		g := groups[2]
		for !errors.Is(errs[2], pg.ErrEvicted) && ctx.Err() == nil {
			errs[2] = g.Barrier(ctx)
		}
		if groups[2], errs[2] = g.Rejoin(ctx); errs[2] != nil {
			t.Errorf("Rejoin: %v", errs[2])
		}
	})
	g := groups[0]
	defer g.Close()
	for !slices.Equal(g.View().Active, []int{0, 2}) && ctx.Err() == nil {
		g.Barrier(ctx)
	}
	if err := g.Evict(ctx, 2); err != nil {
		t.Fatal(err)
	}
	for n := 0; n == 0 && ctx.Err() == nil; {
		n, _ = g.Admit(ctx)
	}
	wg.Wait()
	if v := g.View(); !slices.Equal(v.Active, []int{0, 2}) {
		t.Errorf("the view has ranks %v, want 0 and 2", v.Active)
	}
	if errs[2] == nil {
		groups[2].Close()
	}
}

// full is a store that may be too full to change what it has.
type full struct {
	bootstrap.Store
	is *atomic.Bool
}

func (s full) CompareAndSwap(ctx context.Context, key string, old, new []byte) error {
	if s.is.Load() {
		return errors.New("it is full")
	}
	return s.Store.CompareAndSwap(ctx, key, old, new)
}

// Evict waits for a store that does not accept the decision no longer than other calls do, whatever
// its deadline, and Abort ends it.
func TestEvictEndsWithoutDecision(t *testing.T) {
	for _, aborted := range []bool{false, true} {
		t.Run(fmt.Sprintf("the group is aborted %v", aborted), func(t *testing.T) {
			var is atomic.Bool
			groups, _ := elasticJob(t, 2, 2, func(cfg *pg.Config) {
				kv := cfg.Store.(elastic)
				cfg.Store = elastic{kv.shared, func(ctx context.Context) (bootstrap.Store, error) {
					s, err := kv.open(ctx)
					return full{s, &is}, err
				}}
				cfg.Window, cfg.Timeout = 100*time.Millisecond, -1
			})
			is.Store(true)
			ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
			defer cancel()
			if aborted {
				groups[0].Abort(errors.New("enough"))
			}
			err := groups[0].Evict(ctx, 1)
			if !errors.Is(err, pg.ErrIsolated) || errors.As(err, new(*pg.TimeoutError)) {
				t.Errorf("%v, want ErrIsolated, and no timeout", err)
			}
			is.Store(false)
			for _, g := range groups {
				g.Close()
			}
		})
	}
}

// gated is a store whose first two changes of a value wait for each other while shut is set.
type gated struct {
	bootstrap.Store
	shut *atomic.Bool
	came *atomic.Int32
	both chan struct{}
}

func (s gated) CompareAndSwap(ctx context.Context, key string, old, new []byte) error {
	if s.shut.Load() {
		if s.came.Add(1) == 2 {
			close(s.both)
		}
		select {
		case <-s.both:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	return s.Store.CompareAndSwap(ctx, key, old, new)
}

// The job's last rank is not evicted, also if it has become the last one while it waited. It stays
// when others come back.
func TestEvictOfLastRank(t *testing.T) {
	for _, at := range []string{"one after the other", "at a time"} {
		t.Run(at, func(t *testing.T) {
			var shut atomic.Bool
			var came atomic.Int32
			both := make(chan struct{})
			groups, _ := elasticJob(t, 2, 2, func(cfg *pg.Config) {
				kv := cfg.Store.(elastic)
				cfg.Store = elastic{kv.shared, func(ctx context.Context) (bootstrap.Store, error) {
					s, err := kv.open(ctx)
					return gated{s, &shut, &came, both}, err
				}}
			})
			ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
			defer cancel()
			errs := make([]error, len(groups))
			if at == "at a time" {
				shut.Store(true)
				var wg sync.WaitGroup
				for r, g := range groups {
					wg.Go(func() { errs[r] = g.Evict(ctx, r) })
				}
				wg.Wait()
			} else {
				for r, g := range groups {
					errs[r] = g.Evict(ctx, r)
				}
			}
			last := 1
			if errs[1] == nil {
				last = 0
			}
			var bad *pg.ArgumentError
			if err := errs[1-last]; err != nil {
				t.Errorf("the rank that was evicted first: %v", err)
			}
			if err := errs[last]; !errors.As(err, &bad) || !strings.Contains(err.Error(), "only active rank") {
				t.Fatalf("the last rank: %v, want an *ArgumentError that says so", err)
			}
			var wg sync.WaitGroup
			wg.Go(func() {
				g, err := groups[1-last].Rejoin(ctx)
				if err == nil {
					defer g.Close()
					err = g.Barrier(ctx)
				}
				if err != nil {
					t.Errorf("the rank that came back: %v", err)
				}
			})
			g := groups[last]
			defer g.Close()
			for back := false; !back; { // as another incarnation
				if _, err := g.Admit(ctx); err != nil && lostRank(err) != 1-last {
					t.Error(err)
					break
				}
				v := g.View()
				back = v.Epoch >= 3 && len(v.Active) == 2
			}
			if err := g.Barrier(ctx); err != nil {
				t.Errorf("the last rank, with company again: %v", err)
			}
			wg.Wait()
		})
	}
}

// A rank that is evicted while it makes a subgroup gets none: the operations of that would not be
// told of the eviction.
func TestNoSubgroupOfAnEvictedRank(t *testing.T) {
	groups, _ := elasticJob(t, 2, 2)
	for _, g := range groups {
		defer g.Close()
	}
	if err := groups[0].Evict(t.Context(), 1); err != nil {
		t.Fatal(err)
	}
	var err error
	for err == nil || lostRank(err) >= 0 {
		err = groups[1].Barrier(t.Context())
	}
	if _, split := groups[1].MakeAlone(); !errors.Is(err, pg.ErrEvicted) || !errors.Is(split, pg.ErrEvicted) {
		t.Errorf("%v; a subgroup: %v, want ErrEvicted", err, split)
	}
}

// A rank that was started again waits while another process has its slot, and is admitted when that
// one has gone.
func TestRestartWaitsForItsSlot(t *testing.T) {
	groups, config := elasticJob(t, 2, 2)
	log, warn := io.Pipe()
	cfg := config(1)
	cfg.Size, cfg.Rank, cfg.Job, cfg.Logger = 0, 0, "default", slog.New(slog.NewTextHandler(warn, nil))
	cfg.Getenv = func(name string) string {
		return map[string]string{"RANK": "1", "WORLD_SIZE": "2", "TUTTI_JOB": "default", "TUTTI_RESTART": "1"}[name]
	}
	var again *pg.Group
	var failed error
	joined := make(chan struct{})
	go func() {
		defer close(joined)
		again, failed = pg.Join(t.Context(), cfg)
		warn.Close()
	}()
	text := bufio.NewScanner(log)
	for waits := false; !waits; waits = strings.Contains(text.Text(), "another process has the place of this one") {
		if !text.Scan() {
			<-joined
			t.Fatalf("it did not wait: %v", failed)
		}
	}
	go io.Copy(io.Discard, log)
	groups[1].Close()
	for admitted := 0; admitted == 0; {
		var err error
		if admitted, err = groups[0].Admit(t.Context()); err != nil && !errors.As(err, new(*pg.RankError)) {
			t.Fatal(err)
		}
	}
	if <-joined; failed != nil {
		t.Fatal(failed)
	}
	groups[1] = again
	var wg sync.WaitGroup
	for r, g := range groups {
		wg.Go(func() {
			defer g.Close()
			if err := g.Barrier(t.Context()); err != nil {
				t.Errorf("rank %d: %v", r, err)
			}
		})
	}
	wg.Wait()
}

// A rank whose job's view is gone from the store is told that, and not only that it was evicted.
func TestVanishedViewIsSaid(t *testing.T) {
	ctx := t.Context()
	groups, config := elasticJob(t, 2, 2)
	for _, g := range groups {
		defer g.Close()
	}
	store, err := config(0).Store.(elastic).Open(ctx)
	if err != nil {
		t.Fatal(err)
	}
	defer store.Close()
	const key = "membership/view"
	view, err := store.Get(ctx, key)
	for ; errors.Is(err, bootstrap.ErrNoKey); view, err = store.Get(ctx, key) {
	}
	told := make(chan error, 1)
	go func() {
		_, err := pg.Recv(ctx, groups[0], []byte{1}, 1, 0) // rank 1 sends nothing
		told <- err
	}()
	for err == nil { // until the rank has seen both
		if err = store.Put(ctx, key, view, false); err == nil {
			err = store.CompareAndSwap(ctx, key, view, nil)
		}
		select {
		case said := <-told:
			if !errors.Is(said, pg.ErrEvicted) ||
				!strings.Contains(said.Error(), "the store has no view of the job any more") {
				t.Errorf("%v, want ErrEvicted that says why", said)
			}
			return
		case <-time.After(50 * time.Millisecond):
		}
	}
	t.Fatal(err)
}

// Subgroups that have agreed and are closed leave nothing in the store, however many there are.
func TestClosedSubgroupsLeaveNoOutcomes(t *testing.T) {
	ctx := t.Context()
	pg.SetStorePause(t, 0) // else one answer that is late leaves all outcomes after it
	groups, config := elasticJob(t, 2, 2)
	store, err := config(0).Store.(elastic).Open(ctx)
	if err != nil {
		t.Fatal(err)
	}
	defer store.Close()
	const rounds = 100
	var wg sync.WaitGroup
	for r, g := range groups {
		defer g.Close()
		wg.Go(func() {
			for i := range rounds {
				sub, err := g.Split(ctx, 0, 0)
				if err != nil {
					t.Errorf("rank %d: %v", r, err)
					return
				}
				if ok, err := sub.Agree(ctx, i%2 == 0); ok != (i%2 == 0) || err != nil {
					t.Errorf("rank %d, group %d: %v, %v", r, i, ok, err)
				}
				if err := sub.Close(); err != nil {
					t.Errorf("rank %d, group %d: %v", r, i, err)
				}
			}
		})
	}
	wg.Wait()
	// A rank that was late by more than Close waits leaves one.
	if left, err := store.List(ctx, "agree/"); err != nil || len(left) > rounds/10 {
		t.Errorf("%d of %d outcomes are left, %v", len(left), rounds, err)
	}
}

// held is a store that does not tell outcomes of agreements before open is closed.
type held struct {
	bootstrap.Store
	open chan struct{}
}

func (h *held) Get(ctx context.Context, key string) ([]byte, error) {
	if strings.HasPrefix(key, "agree/") {
		select {
		case <-h.open:
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
	return h.Store.Get(ctx, key)
}

// listless is a store that does not answer requests for lists while away is set.
type listless struct {
	bootstrap.Store
	away *atomic.Bool
}

func (s listless) List(ctx context.Context, prefix string) (map[string][]byte, error) {
	if s.away.Load() {
		return nil, bootstrap.ErrStoreAway
	}
	return s.Store.List(ctx, prefix)
}

// Admit of a job whose store is away admits nobody, and says so only in the log. When the store is
// back, Admit admits the rank that waits.
func TestAdmitWithoutStore(t *testing.T) {
	m := storetest.NewMemory()
	t.Cleanup(m.Close)
	var away atomic.Bool
	kv := elastic{newShared(), func(context.Context) (bootstrap.Store, error) { return listless{m.Open(), &away}, nil }}
	join := func(rank int) (*pg.Group, error) {
		cfg := fixed(kv, rank)
		cfg.Size, cfg.MaxSize, cfg.OnFailure = 2, 3, pg.Shrink
		return pg.Join(t.Context(), cfg)
	}
	both := func(f func(rank int) error) {
		t.Helper()
		errs := make(chan error, 2)
		for rank := range 2 {
			go func() { errs <- f(rank) }()
		}
		if err := errors.Join(<-errs, <-errs); err != nil {
			t.Fatal(err)
		}
	}
	groups := make([]*pg.Group, 2)
	both(func(rank int) (err error) {
		groups[rank], err = join(rank)
		return err
	})
	joined := make(chan error, 1)
	go func() {
		g, err := join(2)
		if err == nil {
			err = g.Close()
		}
		joined <- err
	}()
	observer := m.Open()
	defer observer.Close()
	if _, err := observer.Wait(t.Context(), membership.StoreKeys+"join/2"); err != nil {
		t.Fatal(err)
	}
	for _, want := range []int{0, 1} {
		away.Store(want == 0)
		both(func(rank int) error {
			n, err := groups[rank].Admit(t.Context())
			for try := 1; n < want && err == nil && try < 10; try++ { // the store may have been slow
				n, err = groups[rank].Admit(t.Context())
			}
			if n != want || err != nil {
				return fmt.Errorf("rank %d: Admit gives %d, %v, want %d", rank, n, err, want)
			}
			return nil
		})
	}
	if err := <-joined; err != nil {
		t.Error(err)
	}
	for _, g := range groups {
		g.Close()
	}
}

// early joins rank 0 of a job of two in the background. The lease with which it has registered is
// lost when early returns.
func early(t *testing.T, m *storetest.Memory, how pg.OnFailure, before func(bootstrap.Store)) (
	config func(int) pg.Config, joined chan error, group chan *pg.Group) {
	t.Helper()
	handles := make(chan bootstrap.Store, 100)
	kv := elastic{newShared(), func(context.Context) (bootstrap.Store, error) {
		h := m.Open()
		handles <- h
		return h, nil
	}}
	config = func(rank int) pg.Config {
		cfg := fixed(kv, rank)
		cfg.Size, cfg.OnFailure = 2, how
		return cfg
	}
	joined, group = make(chan error, 1), make(chan *pg.Group, 1)
	go func() {
		g, err := pg.Join(t.Context(), config(0))
		if err == nil {
			group <- g
		}
		joined <- err
	}()
	observer := m.Open()
	t.Cleanup(func() { observer.Close() })
	if _, err := observer.Wait(t.Context(), bootstrap.RankKey(0)); err != nil {
		t.Fatal(err)
	}
	before(observer)
	m.Expire(<-handles)
	return config, joined, group
}

// A rank that loses its lease while it waits for another one joins with that nevertheless.
func TestJoinOutlastsLease(t *testing.T) {
	for _, how := range []pg.OnFailure{pg.Report, pg.Shrink} {
		m := storetest.NewMemory()
		t.Cleanup(m.Close)
		var observer bootstrap.Store
		config, joined, group := early(t, m, how, func(s bootstrap.Store) { observer = s })
		ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
		defer cancel()
		if _, err := observer.Wait(ctx, bootstrap.RankKey(0)); err != nil {
			t.Fatal("the rank is not registered again: ", err)
		}
		g, err := pg.Join(ctx, config(1))
		if err != nil {
			t.Fatal(err)
		}
		if err := errors.Join(<-joined, g.Close()); err != nil {
			t.Fatal(err)
		}
		alone := <-group
		defer alone.Close()
		for goes := how == pg.Report; !goes; { // also if all others leave at once
			err := alone.Barrier(ctx)
			if err != nil && lostRank(err) != 1 {
				t.Fatal(err)
			}
			goes = err == nil && len(alone.View().Active) == 1
		}
	}
}

// A rank that has lost its lease, and its place to another process, fails in Join, which says so.
func TestJoinLosesPlace(t *testing.T) {
	m := storetest.NewMemory()
	t.Cleanup(m.Close)
	_, joined, _ := early(t, m, pg.Shrink, func(s bootstrap.Store) {
		rec, err := bootstrap.NewRecord(0, 2, 9, nil).Encode()
		if err == nil { // no lease of the rank's ends it
			err = s.Put(t.Context(), bootstrap.RankKey(0), rec, true)
		}
		if err != nil {
			t.Fatal(err)
		}
	})
	if err := <-joined; !errors.As(err, new(*bootstrap.SlotError)) || !errors.Is(err, bootstrap.ErrLeaseLost) {
		t.Errorf("%v, want a SlotError after the loss of a lease", err)
	}
}

// A rank that has the outcome of an agreement and closes the group leaves it to one that is late.
func TestOutcomeStaysForLateRank(t *testing.T) {
	ctx, m, open := t.Context(), storetest.NewMemory(), make(chan struct{})
	t.Cleanup(m.Close)
	stores := []func() bootstrap.Store{m.Open, func() bootstrap.Store { return &held{m.Open(), open} }}
	subs, errs := make([]*pg.Group, len(stores)), make([]error, len(stores))
	var wg sync.WaitGroup
	for r, store := range stores {
		wg.Go(func() {
			open := func(context.Context) (bootstrap.Store, error) { return store(), nil }
			cfg := fixed(elastic{newShared(), open}, r)
			cfg.Size, cfg.OnFailure = len(stores), pg.Shrink
			g, err := pg.Join(ctx, cfg)
			if err == nil {
				defer g.Close()
				subs[r], err = g.Split(ctx, 0, 0)
			}
			errs[r] = err
		})
	}
	wg.Wait()
	if err := errors.Join(errs...); err != nil {
		t.Fatal(err)
	}
	defer subs[1].Close()
	late := make(chan error, 1)
	go func() {
		ok, err := subs[1].Agree(ctx, true)
		if err == nil && !ok {
			err = errors.New("all have given true, and agree on false")
		}
		late <- err
	}()
	if ok, err := subs[0].Agree(ctx, true); !ok || err != nil {
		t.Error(ok, err)
	}
	if err := subs[0].Close(); err != nil {
		t.Error(err)
	}
	observer := m.Open()
	defer observer.Close()
	if all, err := observer.List(ctx, "agree/"); len(all) != 1 || err != nil {
		t.Errorf("before the late rank has asked, the store has the outcomes %q, %v; want one", all, err)
	}
	close(open)
	if err := <-late; err != nil {
		t.Errorf("the late rank: %v", err)
	}
}

// A replacement with a setting that the others do not have is refused, and the job goes on.
func TestReplacementWithOtherSettings(t *testing.T) {
	groups, config := elasticJob(t, 2, 3)
	both := func(call func(g *pg.Group) error) {
		t.Helper()
		errs := make([]error, len(groups))
		var wg sync.WaitGroup
		for r, g := range groups {
			wg.Go(func() { errs[r] = call(g) })
		}
		wg.Wait()
		if err := errors.Join(errs...); err != nil {
			t.Fatal(err)
		}
	}
	for name, change := range map[string]func(*pg.Config){
		"TUTTI_ALGO":       func(c *pg.Config) { c.Algorithm = "ring" },
		"TUTTI_ON_FAILURE": func(c *pg.Config) { c.OnFailure = pg.Retry },
		"OnTimeout":        func(c *pg.Config) { c.OnTimeout = pg.TimeoutEvicts },
	} {
		cfg := config(2)
		change(&cfg)
		var differs *bootstrap.TermsError
		if _, err := pg.Join(t.Context(), cfg); !errors.As(err, &differs) || differs.Setting != name {
			t.Errorf("another %s: %v", name, err)
		}
	}
	both(func(g *pg.Group) error {
		_, err := g.Admit(t.Context())
		return err
	})
	both(func(g *pg.Group) error { return g.Barrier(t.Context()) })
	both(func(g *pg.Group) error { return g.Close() })
}

// A rank closes a group while another one, which has ended the group's last operation, is in a call
// of another group: Close needs no call of that rank in the group.
func TestCloseWhileOthersAreInAnotherGroup(t *testing.T) {
	var log strings.Builder // of rank 0
	var groups [2][2]*pg.Group
	var wg sync.WaitGroup
	each := func(f func(r int) error) {
		t.Helper()
		for r := range 2 {
			wg.Go(func() {
				if err := f(r); err != nil {
					t.Errorf("rank %d: %v", r, err)
				}
			})
		}
		if wg.Wait(); t.Failed() {
			t.FailNow()
		}
	}
	for i := range groups {
		kv := newShared()
		each(func(r int) (err error) {
			cfg := fixed(kv, r)
			if cfg.Size = 2; i == 0 && r == 0 {
				cfg.Logger = slog.New(slog.NewTextHandler(&log, nil))
			}
			groups[i][r], err = pg.Join(t.Context(), cfg)
			return err
		})
	}
	ended := make(chan struct{}) // the broadcast, on rank 1
	each(func(r int) error {
		x, y := groups[0][r], groups[1][r]
		if err := pg.Broadcast(t.Context(), x, []int64{1}, 0); err != nil {
			return err
		}
		if r == 1 {
			close(ended)
			return errors.Join(y.Barrier(t.Context()), x.Close(), y.Close())
		}
		<-ended
		return errors.Join(x.Close(), y.Barrier(t.Context()), y.Close())
	})
	if log.Len() > 0 {
		t.Error(log.String())
	}
}
