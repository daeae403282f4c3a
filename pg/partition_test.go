package pg_test

import (
	"context"
	"errors"
	"slices"
	"syscall"
	"testing"
	"time"

	"tutti/p2p"
	"tutti/pg"
	"tutti/pg/pgtest"
)

// swap is a collective in which every rank sends to every other, and which ranks may repeat without
// knowing which of the repetitions failed where: all count alike.
func swap(t *testing.T, g *pg.Group) error {
	return pg.AllToAll(t.Context(), g, make([]int64, g.Size()), make([]int64, g.Size()))
}

// until calls swap, whatever is lost on the way, until all ranks of the group agree that it has at
// most this many members. It returns the error that ends this rank's part in it.
func until(t *testing.T, g *pg.Group, members int) error {
	for {
		for _, op := range []func() (bool, error){
			func() (bool, error) { return false, swap(t, g) },
			func() (bool, error) { return g.Agree(t.Context(), len(g.View().Active) <= members) },
		} {
			if yes, err := op(); yes {
				return nil
			} else if err != nil && lostRank(err) < 0 && !errors.As(err, new(*pg.TimeoutError)) {
				return err
			}
		}
	}
}

// through returns at rank when all active ranks have called it, and with it finished all operations
// before; elsewhere at once.
func through(t *testing.T, g *pg.Group, rank int) {
	t.Helper()
	if g.Rank() != rank {
		if err := pg.Send(t.Context(), g, []byte{1}, rank, 0); err != nil {
			t.Fatal(err)
		}
		return
	}
	for _, r := range g.View().Active {
		if r != rank {
			if _, err := pg.Recv(t.Context(), g, make([]byte, 1), r, 0); err != nil {
				t.Fatal(err)
			}
		}
	}
}

// back lets ranks in until this many are there.
func back(t *testing.T, g *pg.Group, members int) {
	t.Helper()
	for len(g.View().Active) < members {
		if _, err := g.Admit(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
}

// A rank that is cut off from the others and from the store at once decides nothing and returns an
// error that says so. The others continue, and admit it again.
func TestMinorityDecidesNothing(t *testing.T) {
	t.Parallel() // it waits, mostly
	pgtest.Run(t, 4, func(t *testing.T, g *pg.Group) {
		ctx := t.Context()
		if err := holes(t, g, 100); err != nil {
			t.Fatal(err)
		}
		through(t, g, 3)
		faults := pgtest.InjectFaults(t)
		if g.Rank() == 3 {
			with := []int{0, 1, 2, pgtest.Store}
			faults.Network(pgtest.Rule{From: with, To: []int{3}, Cut: true, Break: time.Second},
				pgtest.Rule{From: []int{3}, To: with, Cut: true, Break: time.Second})
			err := until(t, g, 0)
			if !errors.Is(err, pg.ErrIsolated) {
				t.Fatalf("got %v, want ErrIsolated", err)
			}
			faults.Network()
			if g, err = g.Rejoin(ctx); err != nil {
				t.Fatal(err)
			}
			defer g.Close()
		} else {
			if err := until(t, g, 3); err != nil {
				t.Fatal(err)
			}
			back(t, g, 4)
		}
		if err := holes(t, g, 100); err != nil {
			t.Fatal(err)
		}
	}, pgtest.Transport("tcp"), pgtest.Faults(nil), pgtest.Config(pg.Config{OnFailure: pg.Shrink}))
}

// A host that falls silent breaks no link: a rank that waits for its ranks notices that their
// leases have ended.
func TestSilentHostIsRemovedAfterItsLease(t *testing.T) {
	t.Parallel() // it waits, mostly
	pgtest.Run(t, 3, func(t *testing.T, g *pg.Group) {
		if err := swap(t, g); err != nil {
			t.Fatal(err)
		}
		through(t, g, 2)
		faults := pgtest.InjectFaults(t)
		if g.Rank() == 2 {
			faults.Partition([]int{0, 1, pgtest.Store}, []int{2})
			err := until(t, g, 0) // the others continue, and mend the network
			if !errors.Is(err, pg.ErrEvicted) && !errors.Is(err, pg.ErrIsolated) {
				t.Fatal(err)
			}
			return
		}
		if err := until(t, g, 2); err != nil {
			t.Fatal(err)
		}
		faults.Network()
	}, pgtest.Transport("tcp"), pgtest.Faults(nil),
		pgtest.Config(pg.Config{OnFailure: pg.Shrink, Window: time.Second}))
}

// Of two ranks one of which does not hear the other, one is evicted when patience with them ends
// (or both: each keeps others), learns it, and comes back.
func TestOneWayPartitionEvicts(t *testing.T) {
	pgtest.Run(t, 4, func(t *testing.T, g *pg.Group) {
		ctx := t.Context()
		if err := holes(t, g, 100); err != nil {
			t.Fatal(err)
		}
		through(t, g, 0)
		faults := pgtest.InjectFaults(t)
		if g.Rank() == 0 {
			faults.Network(pgtest.Rule{From: []int{1}, To: []int{2}, Cut: true})
		}
		together(t, g) // none of its messages is between ranks 1 and 2
		const patience = 8 * time.Second
		g.SetTimeout(patience) // not before: it would bound Join
		err := until(t, g, 3)
		g.SetTimeout(5 * time.Minute) // nobody is to be evicted from now on, and Rejoin may take long
		switch r := g.Rank(); {
		case errors.Is(err, pg.ErrEvicted) && (r == 1 || r == 2):
			faults.Network()
			if g, err = g.Rejoin(ctx); err != nil {
				t.Fatal(err)
			}
			defer g.Close()
			back(t, g, 4) // the other one may have been evicted, too
		case err != nil:
			t.Fatal(err)
		default:
			if a := g.View().Active; !slices.Contains(a, 0) || !slices.Contains(a, 3) {
				t.Fatalf("active are %v", a)
			}
			back(t, g, 4)
		}
		if err := holes(t, g, 100); err != nil {
			t.Fatal(err)
		}
	}, pgtest.Transport("tcp"), pgtest.Faults(nil),
		pgtest.Config(pg.Config{OnFailure: pg.Shrink, OnTimeout: pg.TimeoutEvicts}))
}

// A rank that is stopped for longer than its lease is still a member if no rank waited for it in a
// collective, and new ranks find it.
func TestLeaseLostAndBack(t *testing.T) {
	t.Parallel() // it waits, mostly
	pgtest.Run(t, 3, func(t *testing.T, g *pg.Group) {
		ctx := t.Context()
		if !pgtest.Second() {
			if err := g.Barrier(ctx); err != nil {
				t.Fatal(err)
			}
			through(t, g, 0)
			if g.Rank() == 0 {
				pgtest.InjectFaults(t).Stop(0, 5*time.Second)
				for r := 1; r < 3; r++ {
					if err := pg.Send(ctx, g, []byte{1}, r, 0); err != nil {
						t.Fatal(err)
					}
				}
			} else if _, err := pg.Recv(ctx, g, make([]byte, 1), 0, 0); err != nil {
				t.Fatal(err)
			}
			if err := holes(t, g, 100); err != nil {
				t.Fatal(err)
			}
			if v := g.View(); v.Epoch != 1 {
				t.Fatalf("view %+v", v)
			}
			through(t, g, 2)
			if g.Rank() == 2 {
				pgtest.Kill(t)
			}
			if err := until(t, g, 2); err != nil {
				t.Fatal(err)
			}
			back(t, g, 3)
		}
		if err := holes(t, g, 100); err != nil {
			t.Fatal(err)
		}
	}, pgtest.Faults(nil), pgtest.Config(pg.Config{OnFailure: pg.Shrink, LeaseTTL: 3 * time.Second}),
		pgtest.Expect(2, syscall.SIGKILL), pgtest.Replace(2))
}

// A store whose disk is slow makes changes of the view slow, and nothing else.
func TestSlowStore(t *testing.T) {
	t.Parallel() // it waits, mostly
	pgtest.Run(t, 3, func(t *testing.T, g *pg.Group) {
		ctx := t.Context()
		if !pgtest.Second() {
			if err := g.Barrier(ctx); err != nil {
				t.Fatal(err)
			}
			through(t, g, 2)
			if g.Rank() == 2 {
				pgtest.InjectFaults(t).Network(pgtest.Rule{From: []int{pgtest.Store}, Delay: 300 * time.Millisecond})
				pgtest.Kill(t)
			}
			if err := until(t, g, 2); err != nil {
				t.Fatal(err)
			}
			back(t, g, 3)
		}
		if err := holes(t, g, 100); err != nil {
			t.Fatal(err)
		}
	}, pgtest.Faults(nil), pgtest.Config(pg.Config{OnFailure: pg.Shrink}), pgtest.Expect(2, syscall.SIGKILL),
		pgtest.Replace(2))
}

// A rank that waits for a store that does not answer stops at the deadline of its call.
func TestCallsEndWithoutStore(t *testing.T) {
	t.Parallel() // it waits, mostly
	const timeout = 5 * time.Second
	pgtest.Run(t, 3, func(t *testing.T, g *pg.Group) {
		ctx := t.Context()
		if err := g.Barrier(ctx); err != nil {
			t.Fatal(err)
		}
		through(t, g, 0)
		if g.Rank() == 0 {
			pgtest.InjectFaults(t).Network(pgtest.Rule{From: []int{pgtest.Store}, Cut: true},
				pgtest.Rule{To: []int{pgtest.Store}, Cut: true})
		}
		together(t, g) // all are past the injection
		g.SetTimeout(timeout)
		short, end := context.WithTimeout(ctx, time.Second)
		defer end()
		for _, c := range []struct {
			name  string
			limit time.Duration
			call  func() error
		}{
			{"agree", timeout, func() error { _, err := g.Agree(ctx, true); return err }},
			{"evict", timeout, func() error { return g.Evict(ctx, (g.Rank()+1)%3) }},
			{"evict with a short context", time.Second, func() error { return g.Evict(short, (g.Rank()+1)%3) }},
			{"rejoin", timeout, func() error { _, err := g.Rejoin(ctx); return err }},
		} {
			began := time.Now()
			err := c.call()
			if took := time.Since(began); !errors.Is(err, context.DeadlineExceeded) || took > c.limit+20*time.Second {
				t.Errorf("%s: %v after %v, want a timeout after %v", c.name, err, took, c.limit)
			}
			if !errors.As(err, new(*pg.TimeoutError)) && c.name != "rejoin" {
				t.Errorf("%s: %v is not a *TimeoutError", c.name, err)
			}
		}
	}, pgtest.Faults(nil), pgtest.Config(pg.Config{OnFailure: pg.Shrink, Window: time.Minute}))
}

// Calls on other goroutines that wait for the store end when the group is closed.
func TestCloseEndsCallsThatWaitForTheStore(t *testing.T) {
	t.Parallel() // it waits, mostly
	pgtest.Run(t, 3, func(t *testing.T, g *pg.Group) {
		ctx := t.Context()
		if err := g.Barrier(ctx); err != nil {
			t.Fatal(err)
		}
		through(t, g, 0)
		if g.Rank() == 0 {
			pgtest.InjectFaults(t).Network(pgtest.Rule{From: []int{pgtest.Store}, Cut: true},
				pgtest.Rule{To: []int{pgtest.Store}, Cut: true})
		}
		together(t, g) // all are past the injection
		g.SetTimeout(time.Minute)
		agreed, evicted := make(chan error, 1), make(chan error, 1)
		go func() { _, err := g.Agree(ctx, true); agreed <- err }()
		poll(t, "all votes are there", func() bool { return g.Decides(1) })
		together(t, g) // no rank leaves before all have the votes
		go func() { evicted <- g.Evict(ctx, (g.Rank()+1)%3) }()
		select {
		case err := <-agreed:
			t.Fatalf("agree: %v", err)
		case err := <-evicted:
			t.Fatalf("evict: %v", err)
		default:
		}
		g.Close()
		for name, end := range map[string]chan error{"agree": agreed, "evict": evicted} {
			if err := <-end; !errors.Is(err, pg.ErrClosed) {
				t.Errorf("%s: %v, want ErrClosed", name, err)
			}
		}
	}, pgtest.Faults(nil), pgtest.Config(pg.Config{OnFailure: pg.Shrink, Window: time.Minute}))
}

// A rank that has begun nothing in a group misses what another one has sent there over a link that
// breaks and is made anew: it gets an error that says so, and both go on.
func TestLostBroadcastIsMissed(t *testing.T) {
	t.Parallel() // it waits, mostly
	pgtest.Run(t, 2, func(t *testing.T, g *pg.Group) {
		ctx := t.Context()
		part, err := g.Split(ctx, 0, g.Rank())
		if err != nil {
			t.Fatal(err)
		}
		defer part.Close()
		through(t, g, 0)
		x, mark := []int64{int64(g.Rank())}, []byte{1}
		again := func(f func() error) { // until there is another link
			for err := f(); err != nil; err = f() {
				if lostRank(err) != 1-g.Rank() {
					t.Fatal(err)
				}
			}
		}
		get := func() error { _, err := pg.Recv(ctx, g, mark, 1-g.Rank(), 0); return err }
		put := func() error { return pg.Send(ctx, g, mark, 1-g.Rank(), 0) }
		if g.Rank() == 0 {
			faults := pgtest.InjectFaults(t)
			there, back := pgtest.Rule{From: []int{0}, To: []int{1}, Cut: true},
				pgtest.Rule{From: []int{1}, To: []int{0}, Cut: true}
			faults.Network(there, back)
			if err := pg.Broadcast(ctx, part, x, 0); err != nil {
				t.Fatal(err)
			}
			there.Break, back.Break = time.Second, time.Second
			faults.Network(there, back)
			if err := get(); lostRank(err) != 1 { // when the link breaks
				t.Fatal(err)
			}
			faults.Network()
			again(put)
			again(get) // before the next operation, which would tell the other rank
		} else {
			again(get)
			if err := pg.Broadcast(ctx, part, x, 0); lostRank(err) != 0 || !errors.Is(err, p2p.ErrLost) {
				t.Errorf("got %v, want an error that says that messages of rank 0 are lost", err)
			}
			again(put)
		}
		if err := until(t, part, 2); err != nil {
			t.Fatal(err)
		}
		if err := holes(t, part, 100); err != nil {
			t.Fatal(err)
		}
		if v := g.View(); v.Epoch != 1 {
			t.Errorf("view %+v", v)
		}
	}, pgtest.Transport("tcp"), pgtest.Faults(nil),
		pgtest.Config(pg.Config{OnFailure: pg.Shrink, Window: time.Minute, Timeout: 30 * time.Second}))
}

// A slow network that loses packets changes no result.
func TestSlowLossyNetworkKeepsResults(t *testing.T) {
	pgtest.Run(t, 3, func(t *testing.T, g *pg.Group) {
		for _, r := range []pgtest.Rule{{Delay: 3 * time.Millisecond}, {Loss: 0.02}} {
			if g.Rank() == 0 {
				pgtest.InjectFaults(t).Network(r)
			}
			for _, n := range []int{1, 5000} {
				if err := holes(t, g, n); err != nil {
					t.Fatal(err)
				}
			}
		}
		// No rank leaves before all are done; a late rank finds that others have left, which is no
		// failure.
		g.Barrier(t.Context())
	}, pgtest.Transport("tcp"), pgtest.Faults(nil))
}

// Faults come from outside, too: at an operation of a rank that knows nothing of them.
func TestKillFromOutside(t *testing.T) {
	pgtest.Run(t, 3, func(t *testing.T, g *pg.Group) {
		if err := until(t, g, 2); err != nil {
			t.Fatal(err)
		}
		if a := g.View().Active; !slices.Equal(a, []int{0, 2}) {
			t.Fatalf("active are %v", a)
		}
	}, pgtest.Transport("shm"), pgtest.Config(pg.Config{OnFailure: pg.Shrink}), pgtest.Expect(1, syscall.SIGKILL),
		pgtest.Faults(func(c *pgtest.Control) {
			c.Await(1, 40)
			c.Kill(1)
		}))
}
