package roster

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"go.uber.org/goleak"

	"tutti/bootstrap"
	"tutti/bootstrap/storetest"
	"tutti/p2p"
	"tutti/p2p/inproc"
	"tutti/pg/membership"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// patience bounds what happens soon when all is well.
const patience = 20 * time.Second

// fixture is a roster of rank 0 in a job of which the other ranks are a test's.
type fixture struct {
	*Roster
	t     *testing.T
	mem   *storetest.Memory
	store bootstrap.Store

	mu      sync.Mutex
	opened  func(bootstrap.Store) bootstrap.Store // wraps the handles of Reconnect; nil: it does not
	known   map[int]bootstrap.Record
	answers bool // every rank answers
	refuses bool // connections are refused
	events  []string
	awaited []int
}

const (
	self   = 100 // incarnation of rank 0; rank r has self+r
	secret = "the secret of this test"
)

func newFixture(t *testing.T, ranks int) *fixture { return newFixtureOf(t, ranks, ranks) }

// newFixtureOf makes a fixture with a view of the first members of ranks.
func newFixtureOf(t *testing.T, members, ranks int, transports ...p2p.Transport) *fixture {
	t.Helper()
	f := &fixture{t: t, mem: storetest.NewMemory(), known: map[int]bootstrap.Record{}}
	f.store = f.mem.Open()
	p := p2p.New(p2p.Config{Self: p2p.Identity{Rank: 0, Incarnation: self}, Size: ranks,
		Secret: []byte(secret), Oversubscribed: true, Logger: slog.New(slog.DiscardHandler), Transports: transports,
		Resolve: func(ctx context.Context, _ int) (p2p.Peer, error) { return p2p.Peer{}, errors.New("no way") }})
	if _, err := p.Listen(t.Context()); err != nil {
		t.Fatal(err)
	}
	incarnations := make([]uint64, members)
	for r := range incarnations {
		incarnations[r] = self + uint64(r)
	}
	var err error
	f.Roster, err = New(Config{Self: membership.Peer{Slot: 0, Incarnation: self}, View: membership.First(incarnations),
		First: self, MaxSize: ranks, Window: 100 * time.Millisecond, Doubt: true, Accuses: true, Proxy: p, Directory: f,
		Groups: f,
		Logger: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		f.Stop()
		p.Close()
		f.Store().Close()
		f.mem.Close()
	})
	return f
}

func (f *fixture) Store() bootstrap.Store { f.mu.Lock(); defer f.mu.Unlock(); return f.store }

func (f *fixture) Reconnect(_ context.Context, lost bootstrap.Store) error {
	lost.Close()
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.store = f.mem.Open(); f.opened != nil {
		f.store = f.opened(f.store)
	}
	return nil
}

func (f *fixture) Known(rank int) (bootstrap.Record, bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	r, ok := f.known[rank]
	return r, ok
}

func (f *fixture) Forget(rank int, except uint64) {}

func (f *fixture) Answers(ctx context.Context, _ bootstrap.Record) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	if !f.answers {
		return errors.New("no answer")
	}
	return nil
}

func (f *fixture) Refuses(context.Context, bootstrap.Record) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.refuses
}

func (f *fixture) note(e string) { f.mu.Lock(); defer f.mu.Unlock(); f.events = append(f.events, e) }

func (f *fixture) ViewChanged() { f.note("view") }
func (f *fixture) Evicted()     { f.note("evicted") }
func (f *fixture) Accused()     { f.note("accused") }
func (f *fixture) Judged()      { f.note("judged") }

func (f *fixture) Awaited(time.Duration) []int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.awaited
}

// record publishes a rank's record.
func (f *fixture) record(rank int, incarnation uint64) bootstrap.Record {
	f.t.Helper()
	rec := bootstrap.NewRecord(rank, 3, incarnation, []string{"127.0.0.1:1"})
	b, err := rec.Encode()
	if err == nil {
		err = f.Store().Put(f.t.Context(), bootstrap.RankKey(rank), b, true)
	}
	if err != nil {
		f.t.Fatal(err)
	}
	return rec
}

// until waits for ok, and fails the test if that takes too long.
func (f *fixture) until(what string, ok func() bool) {
	f.t.Helper()
	for end := time.Now().Add(patience); !ok(); time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			f.mu.Lock()
			defer f.mu.Unlock()
			f.t.Fatalf("not within %v: %s; the groups were told of %q", patience, what, f.events)
		}
	}
}

// A process is dead if its lease or its listeners are gone, or another has its slot. It is alive if
// it answers; otherwise its state is unknown.
func TestProbe(t *testing.T) {
	peer := membership.Peer{Slot: 1, Incarnation: self + 1}
	for _, c := range []struct {
		what    string
		prepare func(f *fixture)
		want    membership.Verdict
	}{
		{"no record", func(f *fixture) {}, membership.VerdictDead},
		{"another incarnation", func(f *fixture) { f.record(1, 7) }, membership.VerdictDead},
		{"no listener", func(f *fixture) { f.record(1, self+1); f.refuses = true }, membership.VerdictDead},
		{"it answers", func(f *fixture) { f.record(1, self+1); f.answers = true }, membership.VerdictAlive},
		{"silence", func(f *fixture) { f.record(1, self+1) }, membership.VerdictUnknown},
		{"no store, unknown", func(f *fixture) { f.mem.Close() }, membership.VerdictUnknown},
		{"no store, and no listener where it was", func(f *fixture) {
			f.known[1] = f.record(1, self+1)
			f.refuses = true
			f.mem.Close()
		}, membership.VerdictDead},
		{"no store, and it answers where it was", func(f *fixture) {
			f.known[1] = f.record(1, self+1)
			f.answers = true
			f.mem.Close()
		}, membership.VerdictAlive},
	} {
		t.Run(c.what, func(t *testing.T) {
			t.Parallel()
			f := newFixture(t, 3)
			c.prepare(f)
			f.until(fmt.Sprint("the verdict is ", c.want), func() bool {
				got := f.probe(peer)
				if got != c.want && got != membership.VerdictUnknown { // that may be for lack of time
					t.Fatalf("the verdict is %v, want %v", got, c.want)
				}
				return got == c.want
			})
		})
	}
}

// A rank may be asked for a link by one that wants to join before its own Roster runs, and the news
// that an earlier link has failed may come late. The link stays in both cases.
func TestEarlyLinkOfJoinerStays(t *testing.T) {
	f := newFixtureOf(t, 2, 3, inproc.New(inproc.Config{}))
	joiner := membership.Peer{Slot: 2, Incarnation: self + 2}
	q := p2p.New(p2p.Config{Self: p2p.Identity{Rank: joiner.Slot, Incarnation: joiner.Incarnation}, Size: 3,
		Secret: []byte(secret), Oversubscribed: true, Transports: []p2p.Transport{inproc.New(inproc.Config{})},
		Resolve: func(context.Context, int) (p2p.Peer, error) {
			return p2p.Peer{Identity: p2p.Identity{Rank: 0, Incarnation: self}, Endpoints: f.proxy.Endpoints()}, nil
		}})
	if _, err := q.Listen(t.Context()); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { q.Close() })
	q.Reconnect(0)
	f.until("rank 2 has a link", func() bool { return f.proxy.Linked(2) == joiner.Incarnation })
	f.Start()
	if l := f.proxy.Linked(2); l != joiner.Incarnation {
		t.Errorf("after Start the link is with %d", l)
	}
	f.Tell(membership.LinkDown{Peer: joiner, Cause: "late news of another link"})
	if err := f.Ask(t.Context(), func(*membership.Machine) {}); err != nil {
		t.Fatal(err)
	}
	if l := f.proxy.Linked(2); l != joiner.Incarnation {
		t.Errorf("after late news the link is with %d", l)
	}
}

// The first view is published by the lowest rank. What an earlier job of the name has left makes
// room for it; a view of this job stays.
func TestFirstView(t *testing.T) {
	f := newFixture(t, 3)
	old := membership.EncodeStored(9, membership.First([]uint64{9, 8}))
	if err := f.Store().CompareAndSwap(t.Context(), membership.ViewKey, nil, old); err != nil {
		t.Fatal(err)
	}
	f.Start()
	f.until("the job's view is in the store", func() bool {
		b, err := f.Store().Get(t.Context(), membership.ViewKey)
		if err != nil {
			return false
		}
		first, v, err := membership.DecodeStored(b)
		return err == nil && first == self && v.Epoch == 1
	})
}

// refusing is a store whose first compare-and-swap has no answer.
type refusing struct {
	bootstrap.Store
	refused atomic.Bool
}

func (s *refusing) CompareAndSwap(ctx context.Context, key string, old, new []byte) error {
	if !s.refused.Swap(true) {
		return bootstrap.ErrStoreAway
	}
	return s.Store.CompareAndSwap(ctx, key, old, new)
}

// The first view is published although the store does not answer at first.
func TestFirstViewIsPublishedAgain(t *testing.T) {
	f := newFixture(t, 3)
	f.record(0, self)
	f.store = &refusing{Store: f.store}
	f.Start()
	f.until("the job's view is in the store", func() bool {
		_, err := f.Store().Get(t.Context(), membership.ViewKey)
		return err == nil
	})
}

// A rank that was lost is removed from the view, with its record, and its groups are told.
func TestDeadRankIsRemoved(t *testing.T) {
	f := newFixture(t, 3)
	f.record(1, self+1)
	f.record(2, self+2)
	f.Start()
	f.Tell(membership.Dead{Peer: membership.Peer{Slot: 2, Incarnation: self + 2}, Cause: "it is a test's"})
	f.until("rank 2 is not in the view", func() bool { return !f.View().Has(2, self+2) })
	f.proxy.Lock()
	why := f.WhyLocked(2)
	f.proxy.Unlock()
	if !strings.Contains(why, "it is a test's") {
		t.Errorf("it was removed because %q", why)
	}
	f.until("its record is gone", func() bool {
		_, err := f.Store().Get(t.Context(), bootstrap.RankKey(2))
		return errors.Is(err, bootstrap.ErrNoKey)
	})
	if v := f.View(); !v.Has(1, self+1) || v.Epoch != 2 {
		t.Errorf("the view is %v", v)
	}
}

// An awaited rank without a lease is dead; one with a lease is left alone.
func TestAwaitedRankWithoutLeaseIsDead(t *testing.T) {
	f := newFixture(t, 3)
	f.record(1, self+1)
	f.mu.Lock()
	f.awaited = []int{1, 2}
	f.mu.Unlock()
	f.Start()
	f.until("rank 2 is not in the view", func() bool { return !f.View().Has(2, self+2) })
	if !f.View().Has(1, self+1) {
		t.Errorf("the view is %v", f.View())
	}
}

// An accusation that no other rank shares is taken back within the window, and the groups are
// notified.
func TestUnsharedAccusationEnds(t *testing.T) {
	f := newFixture(t, 3)
	f.record(1, self+1)
	f.record(2, self+2)
	f.Start()
	f.proxy.Lock()
	f.AccuseLocked(1, false)
	outstanding := len(f.AccusedLocked())
	f.proxy.Unlock()
	if outstanding != 1 {
		t.Errorf("%d accusations are outstanding, want 1", outstanding)
	}
	f.until("no verdict is outstanding", func() bool {
		f.proxy.Lock()
		defer f.proxy.Unlock()
		return len(f.AccusedLocked()) == 0
	})
	if !f.View().Has(1, self+1) {
		t.Errorf("the view is %v", f.View())
	}
}

// Keys that a rank has published under its lease are published again under the next one.
func TestKeysArePublishedAgainUnderNewLease(t *testing.T) {
	f := newFixture(t, 3)
	f.record(1, self+1)
	f.record(2, self+2)
	f.Start()
	f.Knock()
	there := func() bool {
		_, err := f.Store().Get(t.Context(), knockKey+"0")
		return err == nil
	}
	f.until("the key is there", there)
	f.mem.Expire(f.Store())
	f.until("the key is there again", there)
	f.Joined()
	f.until("the key is gone", func() bool { return !there() })
}

// slowPut is a store whose answers to Put wait.
type slowPut struct {
	bootstrap.Store
	did, answer chan struct{}
}

func (s *slowPut) Put(ctx context.Context, key string, value []byte, lease bool) error {
	err := s.Store.Put(ctx, key, value, lease)
	close(s.did)
	<-s.answer
	return err
}

// noted is a store that tells of the first Get.
type noted struct {
	bootstrap.Store
	tell func()
}

func (s *noted) Get(ctx context.Context, key string) ([]byte, error) {
	s.tell()
	return s.Store.Get(ctx, key)
}

// So is a key whose writer hears late that the former lease has it.
func TestKeyOfFormerLeaseIsPublishedAgain(t *testing.T) {
	f := newFixture(t, 3)
	f.record(1, self+1)
	f.record(2, self+2)
	mem, slow := f.store, &slowPut{f.store, make(chan struct{}), make(chan struct{})}
	f.store = slow
	back := make(chan struct{})
	f.opened = func(s bootstrap.Store) bootstrap.Store {
		return &noted{s, sync.OnceFunc(func() { close(back) })} // the roster looks for its view then
	}
	f.Start()
	f.Knock()
	<-slow.did
	f.mem.Expire(mem)
	<-back
	close(slow.answer)
	f.until("the key is there", func() bool {
		_, err := f.Store().Get(t.Context(), knockKey+"0")
		return err == nil
	})
}

// After Stop nothing is answered any more, and Ask says so.
func TestAskAfterStop(t *testing.T) {
	f := newFixture(t, 3)
	f.Start()
	f.Stop()
	if err := f.Ask(t.Context(), func(*membership.Machine) {}); !errors.Is(err, p2p.ErrClosed) {
		t.Error(err)
	}
}
