package roster

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"tutti/bootstrap"
	"tutti/bootstrap/storetest"
	"tutti/internal/leaktest"
	"tutti/p2p"
	"tutti/p2p/inproc"
	"tutti/pg/membership"
)

func TestMain(m *testing.M) { leaktest.Main(m) }

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
	reached map[int]p2p.Peer // whom rank 0 can dial
	without time.Time        // what HandOver returns
	changed func()           // called by ViewChanged; nil: it is not
	answers bool             // every rank answers
	refuses bool             // connections are refused
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
	incarnations := make([]uint64, members)
	for r := range incarnations {
		incarnations[r] = self + uint64(r)
	}
	return newFixtureIn(t, membership.First(incarnations), ranks, transports...)
}

// newFixtureIn makes a fixture that begins in a view.
func newFixtureIn(t *testing.T, view membership.View, ranks int, transports ...p2p.Transport) *fixture {
	t.Helper()
	f := &fixture{t: t, mem: storetest.NewMemory(), known: map[int]bootstrap.Record{}, reached: map[int]p2p.Peer{}}
	f.store = f.mem.Open()
	p := p2p.New(p2p.Config{Self: p2p.Identity{Rank: 0, Incarnation: self}, Size: ranks, Linger: patience,
		Secret: []byte(secret), Oversubscribed: true, Logger: slog.New(slog.DiscardHandler), Transports: transports,
		Resolve: func(_ context.Context, rank int) (p2p.Peer, error) {
			f.mu.Lock()
			defer f.mu.Unlock()
			if to, ok := f.reached[rank]; ok {
				return to, nil
			}
			return p2p.Peer{}, errors.New("no way")
		}})
	if _, err := p.Listen(t.Context()); err != nil {
		t.Fatal(err)
	}
	var err error
	f.Roster, err = New(Config{Self: membership.Peer{Slot: 0, Incarnation: self}, View: view, First: self,
		MaxSize: ranks, Window: 100 * time.Millisecond, Doubt: true, Accuses: true, Proxy: p, Directory: f, Groups: f,
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

func (f *fixture) HandOver() (time.Time, bool) { return f.without, !f.without.IsZero() }

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

func (f *fixture) ViewChanged() {
	if f.changed != nil {
		f.changed()
	}
	f.note("view")
}

func (f *fixture) Evicted()  { f.note("evicted") }
func (f *fixture) Accused()  { f.note("accused") }
func (f *fixture) Judged()   { f.note("judged") }
func (f *fixture) Isolated() { f.note("isolated") }

func (f *fixture) Awaited(time.Duration) []int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.awaited
}

// record publishes a rank's record under rank 0's lease.
func (f *fixture) record(rank int, incarnation uint64) bootstrap.Record {
	f.t.Helper()
	return f.recordIn(f.Store(), rank, incarnation)
}

// recordIn publishes a rank's record through a handle.
func (f *fixture) recordIn(s bootstrap.Store, rank int, incarnation uint64) bootstrap.Record {
	f.t.Helper()
	rec := bootstrap.NewRecord(rank, max(3, rank+1), incarnation, []string{"127.0.0.1:1"})
	b, err := rec.Encode()
	if err == nil {
		err = s.Put(f.t.Context(), bootstrap.RankKey(rank), b, true)
	}
	if err != nil {
		f.t.Fatal(err)
	}
	return rec
}

// open returns a handle of another process.
func (f *fixture) open() bootstrap.Store {
	s := f.mem.Open()
	f.t.Cleanup(func() { s.Close() })
	return s
}

// told reports whether the groups were told of an event.
func (f *fixture) told(event string) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	return slices.Contains(f.events, event)
}

// change replaces the view in the store; nil: by none.
func (f *fixture) change(s bootstrap.Store, to []byte) {
	f.t.Helper()
	b, err := s.Get(f.t.Context(), membership.ViewKey)
	if err == nil {
		err = s.CompareAndSwap(f.t.Context(), membership.ViewKey, b, to)
	}
	if err != nil {
		f.t.Error(err)
	}
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
		{"no record, and this rank has lost its own, too", func(f *fixture) {
			f.known[1] = f.record(2, self+1)
			f.answers, f.leaseless = true, true
		}, membership.VerdictAlive},
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

// link returns the proxy of another rank, which has a link with rank 0.
func (f *fixture) link(peer membership.Peer, transport p2p.Transport) *p2p.Proxy {
	f.t.Helper()
	id := p2p.Identity{Rank: peer.Slot, Incarnation: peer.Incarnation}
	q := p2p.New(p2p.Config{Self: id, Size: f.cfg.MaxSize,
		Secret: []byte(secret), Oversubscribed: true, Transports: []p2p.Transport{transport},
		Resolve: func(context.Context, int) (p2p.Peer, error) {
			return p2p.Peer{Identity: p2p.Identity{Rank: 0, Incarnation: self}, Endpoints: f.proxy.Endpoints()}, nil
		}})
	if _, err := q.Listen(f.t.Context()); err != nil {
		f.t.Fatal(err)
	}
	f.t.Cleanup(func() { q.Close() })
	f.mu.Lock()
	f.reached[peer.Slot] = p2p.Peer{Identity: id, Endpoints: q.Endpoints()}
	f.mu.Unlock()
	q.Reconnect(0)
	f.until(fmt.Sprintf("there is a link with %v", peer), func() bool {
		return f.proxy.Linked(peer.Slot) == peer.Incarnation
	})
	return q
}

// A rank may be asked for a link by one that wants to join before its own Roster runs, and the news
// that an earlier link has failed may come late. The link stays in both cases.
func TestEarlyLinkOfJoinerStays(t *testing.T) {
	f := newFixtureOf(t, 2, 3, inproc.New(inproc.Config{}))
	joiner := membership.Peer{Slot: 2, Incarnation: self + 2}
	f.link(joiner, inproc.New(inproc.Config{}))
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

// A rank learns that it is out, and why it thinks so, when the job has ended without it: the view
// is gone, or another job's is there.
func TestEndOfJobEvicts(t *testing.T) {
	theirs := membership.EncodeStored(9, membership.First([]uint64{9, 8}))
	for _, c := range []struct {
		what, why string
		view      []byte
		away      bool // it happens while the rank has no lease
	}{
		{"no view", "has no view of the job any more", nil, false},
		{"no view after a pause", "no rank has reached the store for longer", nil, true},
		{"another job's view", "the view of another job", theirs, false},
	} {
		t.Run(c.what, func(t *testing.T) {
			t.Parallel()
			f := newFixture(t, 3)
			f.Start()
			f.until("the job has begun", f.begun.Load)
			if c.away {
				f.opened = func(s bootstrap.Store) bootstrap.Store {
					f.change(s, c.view)
					f.recordIn(s, 0, self)
					return s
				}
				f.open() // the job outlasts rank 0's lease
				f.mem.Expire(f.Store())
			} else {
				f.change(f.open(), c.view)
			}
			f.until("the rank is out", func() bool { return f.told("evicted") })
			f.proxy.Lock()
			defer f.proxy.Unlock()
			if why := f.WhyLocked(0); !strings.Contains(why, c.why) {
				t.Errorf("because %q, want %q", why, c.why)
			}
		})
	}
}

// A store that was restored from a backup has a view that the job has left. No change of the view
// is possible then, and the ranks say why.
func TestRestoredStoreIsolates(t *testing.T) {
	f := newFixture(t, 3)
	f.Start()
	f.Tell(membership.Dead{Peer: membership.Peer{Slot: 2, Incarnation: self + 2}})
	f.until("rank 2 is not in the view", func() bool { return !f.View().Has(2, self+2) })
	f.change(f.open(), membership.EncodeStored(self, f.cfg.View))
	f.Tell(membership.Dead{Peer: membership.Peer{Slot: 1, Incarnation: self + 1}})
	var why string
	f.until("the rank is isolated", func() bool {
		f.proxy.Lock()
		defer f.proxy.Unlock()
		why = f.IsolatedLocked().Why
		return why != ""
	})
	if !strings.Contains(why, "a view of epoch 1 that does not follow the view of epoch 2") {
		t.Error(why)
	}
	f.until("the groups are told", func() bool { return f.told("isolated") })
}

// A rank that stays isolated for another reason has been isolated since the first one.
func TestIsolationKeepsItsBeginning(t *testing.T) {
	f := newFixture(t, 2)
	began := time.Now()
	f.isolated = Isolation{"slow", began}
	f.do(membership.Isolated{Why: "full"})
	f.proxy.Lock()
	defer f.proxy.Unlock()
	if got, want := f.IsolatedLocked(), (Isolation{"full", began}); got != want {
		t.Errorf("got %v, want %v", got, want)
	}
}

// late is a store whose first watch begins before the first compare-and-swap and is delivered late.
type late struct {
	bootstrap.Store
	once          sync.Once
	seen, deliver chan struct{}
}

func (s *late) Watch(ctx context.Context, key string) <-chan bootstrap.Event {
	all, out := s.Store.Watch(ctx, key), make(chan bootstrap.Event)
	go func() {
		defer close(out)
		for e := range all {
			s.once.Do(func() {
				close(s.seen)
				<-s.deliver
			})
			out <- e
		}
	}()
	return out
}

func (s *late) CompareAndSwap(ctx context.Context, key string, old, new []byte) error {
	<-s.seen
	return s.Store.CompareAndSwap(ctx, key, old, new)
}

// The view of an earlier job is no news after this job has begun.
func TestLateViewOfEarlierJob(t *testing.T) {
	f := newFixture(t, 3)
	old := membership.EncodeStored(9, membership.First([]uint64{9, 8}))
	if err := f.Store().CompareAndSwap(t.Context(), membership.ViewKey, nil, old); err != nil {
		t.Fatal(err)
	}
	s := &late{Store: f.store, seen: make(chan struct{}), deliver: make(chan struct{})}
	f.store = s
	f.Start()
	f.until("the job has begun", f.begun.Load)
	close(s.deliver)
	asks := binary.BigEndian.AppendUint64(binary.BigEndian.AppendUint64(nil, 7), 1)
	if err := s.Put(t.Context(), joinKey+"1", asks, true); err != nil {
		t.Fatal(err)
	}
	f.until("a later event is seen", func() bool { return f.asks(1) == 7 })
	for range 2 { // what the first one finds to do is done before the second one
		if err := f.Ask(t.Context(), func(*membership.Machine) {}); err != nil {
			t.Fatal(err)
		}
	}
	if f.told("evicted") {
		t.Error("the rank is out")
	}
}

// asks returns the incarnation that asks to be admitted into a slot.
func (f *fixture) asks(slot int) uint64 {
	f.Roster.mu.Lock()
	defer f.Roster.mu.Unlock()
	return f.joiners[slot]
}

// A request that is withdrawn while the store is away is withdrawn here when it is back.
func TestRequestWithdrawnMeanwhile(t *testing.T) {
	f := newFixtureOf(t, 2, 3)
	f.record(1, self+1)
	joiner := f.open()
	f.opened = func(s bootstrap.Store) bootstrap.Store {
		if err := joiner.Delete(t.Context(), joinKey+"2"); err != nil {
			t.Error(err)
		}
		return s
	}
	f.Start()
	asks := binary.BigEndian.AppendUint64(binary.BigEndian.AppendUint64(nil, self+2), 1)
	if err := joiner.Put(t.Context(), joinKey+"2", asks, true); err != nil {
		t.Fatal(err)
	}
	f.until("the request is seen", func() bool { return f.asks(2) == self+2 })
	f.mem.Expire(f.Store())
	f.until("the request is gone", func() bool { return f.asks(2) == 0 })
}

// unwritable is a store that carries out no compare-and-swap, and tells of the first one.
type unwritable struct {
	bootstrap.Store
	tell func()
}

func (s unwritable) CompareAndSwap(context.Context, string, []byte, []byte) error {
	s.tell()
	return bootstrap.ErrStoreAway
}

// brief is a store with a short lease.
type brief struct{ bootstrap.Store }

func (s brief) TTL() time.Duration { return time.Millisecond }

// If all ranks lose their leases before the first view is written, it is written when two are back.
// A rank that finds no other does not know of a job that it is in.
func TestLeaseLostBeforeFirstView(t *testing.T) {
	for what, others := range map[string]bool{"two are back": true, "one is back": false} {
		t.Run(what, func(t *testing.T) {
			t.Parallel()
			f := newFixture(t, 3)
			first, other := f.store, f.open()
			tried := make(chan struct{})
			f.store = unwritable{first, sync.OnceFunc(func() { close(tried) })}
			f.opened = func(s bootstrap.Store) bootstrap.Store {
				f.recordIn(s, 0, self)
				if others {
					f.recordIn(other, 1, self+1)
				}
				return brief{s}
			}
			f.Start()
			<-tried
			f.mem.Expire(first)
			if !others {
				f.until("the rank is out", func() bool { return f.told("evicted") })
				return
			}
			f.until("the job has begun", f.begun.Load)
			if b, err := other.Get(t.Context(), membership.ViewKey); err != nil {
				t.Error(err)
			} else if first, v, err := membership.DecodeStored(b); err != nil || first != self || v.Epoch != 1 {
				t.Errorf("the view is %v of %d, %v", v, first, err)
			}
			if f.told("evicted") {
				t.Error("the rank is out")
			}
		})
	}
}

// Ranks without a lease find, before they have seen their job's first view, that another job of the
// name runs, or has their slots. They leave it alone, and are out.
func TestLeaseLostBeforeFirstViewBesideAnotherJob(t *testing.T) {
	const theirs = 997
	for _, what := range []string{"its view is there", "a slot is taken", "its view has other ranks"} {
		t.Run(what, func(t *testing.T) {
			t.Parallel()
			f := newFixture(t, 3)
			first, other := f.store, f.open()
			tried := make(chan struct{})
			f.store = unwritable{first, sync.OnceFunc(func() { close(tried) })}
			view := membership.EncodeStored(theirs, membership.First([]uint64{theirs, theirs + 1, theirs + 2}))
			if what == "its view has other ranks" {
				view = membership.EncodeStored(theirs,
					membership.First([]uint64{theirs, theirs + 1, theirs + 2}).Remove(0, 1))
			}
			f.opened = func(s bootstrap.Store) bootstrap.Store {
				f.recordIn(other, 2, theirs+2)
				if what == "its view has other ranks" {
					f.recordIn(s, 0, self)
					f.recordIn(other, 1, self+1)
				} else {
					f.recordIn(other, 0, theirs)
				}
				if what != "a slot is taken" {
					if err := other.CompareAndSwap(t.Context(), membership.ViewKey, nil, view); err != nil {
						t.Error(err)
					}
				}
				return s
			}
			f.Start()
			<-tried
			f.mem.Expire(first)
			f.until("the rank is out", func() bool { return f.told("evicted") })
			b, err := other.Get(t.Context(), membership.ViewKey)
			if what != "a slot is taken" && !bytes.Equal(b, view) {
				t.Errorf("the other job's view is now %q, %v", b, err)
			}
		})
	}
}

// So does a rank that was without a lease before its roster was started.
func TestLeaseLostBeforeStartBesideAnotherJob(t *testing.T) {
	const theirs = 997
	f := newFixture(t, 2)
	other := f.open()
	view := membership.EncodeStored(theirs, membership.First([]uint64{theirs, theirs + 1}))
	if err := other.CompareAndSwap(t.Context(), membership.ViewKey, nil, view); err != nil {
		t.Fatal(err)
	}
	f.recordIn(other, 0, theirs)
	f.recordIn(other, 1, theirs+1)
	f.without = time.Now()
	f.Start()
	f.until("the rank is out", func() bool { return f.told("evicted") })
	if b, err := other.Get(t.Context(), membership.ViewKey); !bytes.Equal(b, view) {
		t.Errorf("the other job's view is now %q, %v", b, err)
	}
}

// A rank that registers again after it was removed gives its slot up when it learns of that.
func TestEvictedRankGivesItsSlotUp(t *testing.T) {
	f := newFixture(t, 3)
	f.open() // the job outlasts rank 0's lease
	f.opened = func(s bootstrap.Store) bootstrap.Store {
		f.change(s, membership.EncodeStored(self, f.cfg.View.Remove(0)))
		f.recordIn(s, 0, self)
		return s
	}
	f.Start()
	f.until("the job has begun", f.begun.Load)
	f.mem.Expire(f.Store())
	f.until("the rank is out", func() bool { return f.told("evicted") })
	f.until("its record is gone", func() bool {
		_, err := f.Store().Get(t.Context(), bootstrap.RankKey(0))
		return errors.Is(err, bootstrap.ErrNoKey)
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

// A rank that others have removed has no reason here if this rank knows nothing of its loss.
func TestLossWithoutReason(t *testing.T) {
	f := newFixture(t, 3)
	f.Start()
	f.until("the job has begun", f.begun.Load)
	f.change(f.open(), membership.EncodeStored(self, f.cfg.View.Remove(2)))
	f.until("rank 2 is marked dead", func() bool {
		f.proxy.Lock()
		defer f.proxy.Unlock()
		err := f.proxy.Down(2)
		return err != nil && strings.Contains(err.Error(), NoReason)
	})
	f.proxy.Lock()
	defer f.proxy.Unlock()
	if why := f.WhyLocked(2); why != "" {
		t.Errorf("it was removed because %q", why)
	}
}

// A rank that cannot reach two others removes itself, and says why; but if they were on a host that
// fell silent, and their leases have just ended, it removes them. If it has had no lease itself, it
// waits until the lack of a record is a proof.
func TestLinksAreMissing(t *testing.T) {
	for what, c := range map[string]struct{ silent, unproven bool }{
		"to live ranks": {}, "to a silent host": {true, false}, "to a silent host, after a lost lease": {true, true},
	} {
		t.Run(what, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				f := newFixture(t, 3)
				f.record(0, self)
				host := f.open()
				for r := 1; r < 3; r++ {
					f.recordIn(host, r, self+uint64(r))
				}
				if c.unproven {
					f.unproven = time.Now().Add(patience / 2)
				}
				f.store = &stopping{Store: f.store, ttl: func() {}, list: sync.OnceFunc(func() {
					if c.silent { // after the last probe
						f.mem.Expire(host)
					}
				})}
				f.Start()
				for r := 1; r < 3; r++ {
					f.Tell(membership.LinkDown{Peer: membership.Peer{Slot: r, Incarnation: self + uint64(r)}})
				}
				f.until("one side is left", func() bool { return len(f.View().Active()) == 1 || f.told("evicted") })
				f.proxy.Lock()
				defer f.proxy.Unlock()
				const why = "it and ranks 1-2 could not reach each other"
				if v := f.view; c.silent && (f.evicted || !slices.Equal(v.Active(), []int{0})) {
					t.Errorf("the view is %v, evicted: %t, because %q", v, f.evicted, f.WhyLocked(0))
				} else if !c.silent && (!f.evicted || f.WhyLocked(0) != why) {
					t.Errorf("evicted: %t, because %q, want %q", f.evicted, f.WhyLocked(0), why)
				}
			})
		})
	}
}

// A decision on missing links takes as long as is said, also if a lease is longer than the window.
func TestDecisionTime(t *testing.T) {
	for _, ttl := range []time.Duration{0, 3 * time.Second, 10 * time.Second} {
		f := newFixture(t, 4)
		f.cfg.Window = 3 * time.Second
		f.cfg.Directory = leased{f, ttl}
		ro, err := New(f.cfg)
		if err != nil {
			t.Fatal(err)
		}
		proposes := func(acts []membership.Action) bool {
			return slices.ContainsFunc(acts, func(a membership.Action) bool {
				_, ok := a.(membership.Propose)
				return ok
			})
		}
		lose := func(rank int) {
			p := membership.Peer{Slot: rank, Incarnation: self + uint64(rank)}
			ro.m.Step(membership.LinkDown{Peer: p})
			ro.m.Step(membership.Probed{Peer: p, Verdict: membership.VerdictAlive})
		}
		lose(1)
		ro.m.Step(membership.Tick{})
		took, limit := time.Duration(0), ro.DecidesWithin()
		for decided := false; !decided && took <= limit; {
			if took == (limit / 2).Truncate(tick) { // so late that the decision does not wait for its window
				lose(2)
			}
			decided = proposes(ro.m.Step(membership.Tick{}))
			took += tick
		}
		if took != limit || took < ttl {
			t.Errorf("with a lease of %v it takes %v, and %v is said", ttl, took, limit)
		}
	}
}

// leased is a Directory with a store of a given lease.
type leased struct {
	Directory
	ttl time.Duration
}

func (d leased) Store() bootstrap.Store { return ttlStore{d.Directory.Store(), d.ttl} }

type ttlStore struct {
	bootstrap.Store
	ttl time.Duration
}

func (s ttlStore) TTL() time.Duration { return s.ttl }

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

// The ranks of hosts that fell silent together leave the view together, not two at each time that
// the store is asked about awaited ranks. Awaited ranks with leases are left alone.
func TestAwaitedRanksWithoutLeasesAreRemovedTogether(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const ranks, most = 64, 8 // of views: it tells of one rank after the other
		f := newFixture(t, ranks)
		rack := f.open()
		for r := range ranks {
			s := rack
			if r < ranks/2 {
				s = f.store
			}
			f.recordIn(s, r, self+uint64(r))
			f.awaited = append(f.awaited, r)
		}
		f.awaited = f.awaited[ranks/4:]
		f.Start()
		f.mem.Expire(rack)
		f.until("half of the ranks are in the view", func() bool { return len(f.View().Active()) <= ranks/2 })
		if v := f.View(); v.Epoch > 1+most || len(v.Active()) != ranks/2 || !v.Has(ranks/2-1, self+ranks/2-1) {
			t.Errorf("%v: %d views, want %d at most", v, v.Epoch-1, most)
		}
	})
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

// noted is a store that tells of the first List.
type noted struct {
	bootstrap.Store
	tell func()
}

func (s *noted) List(ctx context.Context, prefix string) (map[string][]byte, error) {
	s.tell()
	return s.Store.List(ctx, prefix)
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
		return &noted{s, sync.OnceFunc(func() { close(back) })} // the roster looks for requests then
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
