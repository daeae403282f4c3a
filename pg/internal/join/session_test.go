package join

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"strings"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"

	"tutti/bootstrap"
	"tutti/bootstrap/storetest"
	"tutti/internal/sitetest"
	"tutti/internal/trust"
	"tutti/p2p"
	"tutti/p2p/inproc"
	"tutti/pg/membership"
)

// electing is a store that does not answer the first of its writes and reads.
type electing struct {
	unanswered
	read sync.Once
}

func (s *electing) Get(ctx context.Context, key string) ([]byte, error) {
	b, err := s.unanswered.Get(ctx, key)
	s.read.Do(func() { b, err = nil, bootstrap.ErrStoreAway })
	return b, err
}

// A rank joins although the store is away for a moment.
func TestJoinOutlastsElection(t *testing.T) {
	mem := storetest.NewMemory()
	store := &electing{unanswered: unanswered{Store: mem.Open()}}
	ss := New(&Settings{Size: 2, MaxSize: 2, Secret: []byte("the secret of this test"), Interfaces: "lo",
		OpenStore:  func(context.Context) (bootstrap.Store, error) { return store, nil },
		Transports: func() ([]p2p.Transport, error) { return []p2p.Transport{inproc.New(inproc.Config{})}, nil },
		Logger:     slog.New(slog.DiscardHandler)})
	defer ss.Close()
	if err := ss.Connect(t.Context(), Hooks{}); err != nil {
		t.Fatal(err)
	}
	if job, err := ss.Running(t.Context()); job != nil || err != nil {
		t.Errorf("a job of a rank without others: %v, %v", job, err)
	}
	if _, err := store.Get(t.Context(), bootstrap.RankKey(0)); err != nil {
		t.Error(err)
	}
}

// late returns an OpenStore of which the first two attempts do not reach the store.
func late(open func() bootstrap.Store) func(context.Context) (bootstrap.Store, error) {
	attempts := 0
	return func(context.Context) (bootstrap.Store, error) {
		if attempts++; attempts < 3 {
			return nil, bootstrap.ErrStoreAway
		}
		return open(), nil
	}
}

// A rank waits for a store that comes up later than it does, and says once that it does.
func TestJoinWaitsForStore(t *testing.T) {
	var log bytes.Buffer
	ss := New(&Settings{Size: 2, MaxSize: 2, Secret: []byte("the secret of this test"), Interfaces: "lo",
		OpenStore:  late(storetest.NewMemory().Open),
		Transports: func() ([]p2p.Transport, error) { return []p2p.Transport{inproc.New(inproc.Config{})}, nil },
		Logger:     slog.New(slog.NewTextHandler(&log, nil))})
	defer ss.Close()
	if err := ss.Connect(t.Context(), Hooks{}); err != nil {
		t.Fatal(err)
	}
	if text := log.String(); !strings.Contains(text, "store") || strings.Count(text, "\n") != 1 {
		t.Errorf("logged %q, want one line about the store", &log)
	}
}

// A rank that waits for the store says again, from time to time, why. The error has the last
// reason, and says why the wait ended.
func TestWaitForStoreTellsWhy(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var log bytes.Buffer
		var why error
		began, attempts := time.Now(), 0
		s := &Settings{Logger: slog.New(slog.NewTextHandler(&log, nil)),
			OpenStore: func(context.Context) (bootstrap.Store, error) {
				attempts++
				why = fmt.Errorf("attempt %d: %w", attempts, bootstrap.ErrStoreAway)
				return nil, why
			}}
		ctx, cancel := context.WithTimeout(t.Context(), storeWarning+storePause*3/2)
		defer cancel()
		_, err := s.open(ctx, 0)
		if !errors.Is(err, bootstrap.ErrStoreAway) || !errors.Is(err, context.DeadlineExceeded) ||
			!errors.Is(err, why) {
			t.Errorf("%v after %v, want %v and why the wait ended", err, time.Since(began), why)
		}
		if text := log.String(); strings.Count(text, "\n") != 2 || strings.Count(text, "attempt 1:") != 1 {
			t.Errorf("logged %q, want two lines with the reasons", text)
		}
	})
}

// The wait for the store ends with the context, and at once if the store refuses this process, or
// has ended.
func TestWaitForStoreEnds(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	attempts := 0
	s := &Settings{Logger: slog.New(slog.DiscardHandler), OpenStore: func(context.Context) (bootstrap.Store, error) {
		if attempts++; attempts == 2 {
			cancel()
		}
		return nil, bootstrap.ErrStoreAway
	}}
	for _, s.Listened = range []bool{true, false} {
		want := 2
		if s.Listened {
			want = 1
		}
		attempts = 0
		if _, err := s.open(ctx, 0); !errors.Is(err, bootstrap.ErrStoreAway) || attempts != want {
			t.Errorf("Listened %v: %v after %d attempts, want ErrStoreAway after %d", s.Listened, err, attempts, want)
		}
	}
	s.Listened, s.Ends = true, bootstrap.StoreEnds
	if _, err := s.open(t.Context(), 0); !errors.Is(err, bootstrap.ErrStoreEnds) {
		t.Errorf("%v where ranks can meet again, want ErrStoreEnds", err)
	}
	s.OpenStore = func(context.Context) (bootstrap.Store, error) { return nil, trust.ErrAuth }
	if _, err := s.open(t.Context(), 0); !errors.Is(err, trust.ErrAuth) {
		t.Errorf("%v, want ErrAuth", err)
	}
}

// waited is a store with a short TTL that calls again when a watch of a key is not the first one.
type waited struct {
	bootstrap.Store
	again func()
	first sync.Once
}

func (s *waited) TTL() time.Duration { return time.Millisecond }

func (s *waited) Watch(ctx context.Context, key string) <-chan bootstrap.Event {
	again := s.again
	s.first.Do(func() { again = func() {} })
	again()
	return s.Store.Watch(ctx, key)
}

// A rank waits for the lease of its predecessor, also beyond the TTL, if nothing listens at the
// predecessor's addresses, and says so.
func TestJoinOutlastsLeaseOfPredecessor(t *testing.T) {
	mem := storetest.NewMemory()
	former := mem.Open()
	if err := bootstrap.Register(t.Context(), former, bootstrap.NewRecord(0, 2, 9, []string{"127.0.0.1:1"}),
		nil); err != nil {
		t.Fatal(err)
	}
	var log bytes.Buffer
	store := &waited{Store: mem.Open(), again: func() { mem.Expire(former) }}
	ss := New(&Settings{Size: 2, MaxSize: 2, Secret: []byte("the secret of this test"), Interfaces: "lo",
		OpenStore:  func(context.Context) (bootstrap.Store, error) { return store, nil },
		Transports: func() ([]p2p.Transport, error) { return []p2p.Transport{inproc.New(inproc.Config{})}, nil },
		Dial: func(context.Context, *net.Dialer, int, string) (net.Conn, error) {
			return nil, syscall.ECONNREFUSED
		},
		Logger: slog.New(slog.NewTextHandler(&log, nil))})
	defer ss.Close()
	if err := ss.Connect(t.Context(), Hooks{}); err != nil {
		t.Error(err)
	}
	if text := log.String(); !strings.Contains(text, fmt.Sprintf("pid=%d", os.Getpid())) ||
		strings.Count(text, "\n") != 1 {
		t.Errorf("logged %q, want one line that names the predecessor", text)
	}
}

// A connection that this process's own host refuses says nothing about a process elsewhere.
func TestRefusedHereIsNotDeadElsewhere(t *testing.T) {
	own, err := net.InterfaceAddrs()
	if err != nil {
		t.Fatal(err)
	}
	elsewhere := map[string]bool{"127.0.0.1": false, "::1": false, "240.0.0.1": true}
	for _, a := range own {
		if n, ok := a.(*net.IPNet); ok {
			elsewhere[n.IP.String()] = false
		}
	}
	ss := session(0, storetest.NewMemory().Open)
	defer ss.Close()
	ss.settings.Dial = func(context.Context, *net.Dialer, int, string) (net.Conn, error) {
		return nil, syscall.ECONNREFUSED
	}
	for ip, other := range elsewhere {
		rec := bootstrap.NewRecord(0, 3, 9, []string{net.JoinHostPort(ip, "1")})
		if !ss.dead()(t.Context(), rec) {
			t.Errorf("%s: refused, in this network: want dead", ip)
		}
		if rec.Network += "x"; ss.dead()(t.Context(), rec) != other {
			t.Errorf("%s: refused, in another network: want dead %v", ip, other)
		}
		if rec.Addrs = append(rec.Addrs, "240.0.0.2:1"); !ss.dead()(t.Context(), rec) {
			t.Errorf("%s and 240.0.0.2: refused, in another network: want dead", ip)
		}
	}
}

// session returns a session of a rank of two with a handle on a store, and no more.
func session(rank int, open func() bootstrap.Store) *Session {
	ss := New(&Settings{Rank: rank, Size: 2, MaxSize: 3, Logger: slog.New(slog.DiscardHandler),
		OpenStore: func(context.Context) (bootstrap.Store, error) { return open(), nil }})
	ss.store = open()
	ss.record = bootstrap.NewRecord(rank, 3, ss.Self.Incarnation, nil)
	return ss
}

// unlike puts a record of rank 1, which has other terms than the ranks of session, into a store.
func unlike(t *testing.T, s bootstrap.Store) (rec bootstrap.Record) {
	t.Helper()
	rec = bootstrap.NewRecord(1, 3, 9, []string{"127.0.0.1:1"})
	rec.Terms.Version = "another"
	b, err := rec.Encode()
	if err == nil {
		err = s.Put(t.Context(), bootstrap.RankKey(1), b, true)
	}
	if err != nil {
		t.Fatal(err)
	}
	return rec
}

// A rank with other terms does not fit until all have met. Then its process has the place of
// another one, which did.
func TestResolveUnlikeRank(t *testing.T) {
	mem := storetest.NewMemory()
	other := mem.Open()
	defer other.Close()
	unlike(t, other)
	ss := session(0, mem.Open)
	defer ss.Close()
	ss.client = bootstrap.NewClient(bootstrap.ClientConfig{Self: ss.record, Secret: []byte("the secret of this test")})
	for _, met := range []bool{false, true} {
		ss.met.Store(met)
		_, err := ss.resolve(t.Context(), 1)
		if errors.Is(err, p2p.ErrUnfit) == met || errors.Is(err, p2p.ErrPeerGone) != met ||
			!errors.As(err, new(*bootstrap.TermsError)) {
			t.Errorf("met %v: %v", met, err)
		}
	}
}

// A rank stays for one that it does not fit with until that has gone, but not for ever.
func TestStayForUnlikeRank(t *testing.T) {
	for what, after := range map[string]time.Duration{"gone": 0, "about to go": time.Second, "stays": time.Hour} {
		synctest.Test(t, func(t *testing.T) {
			mem := storetest.NewMemory()
			other := mem.Open()
			defer other.Close()
			if after > 0 {
				unlike(t, other)
				time.AfterFunc(after, func() { mem.Expire(other) })
			}
			ss := session(0, mem.Open)
			defer ss.Close()
			began := time.Now()
			ss.Stay(t.Context(), 1)
			want := min(after, ss.Store().TTL()+2*time.Second)
			if took := time.Since(began); took < want || took > want+lookPause {
				t.Errorf("%s: it stays for %v, want %v", what, took, want)
			}
		})
	}
}

// A rank that is registered first stays until all that it does not fit with have found out, also
// those that began later.
func TestStayForUnlikeRanks(t *testing.T) {
	const size = 20
	for apart, others := range map[time.Duration]int{0: size - 1, 500 * time.Millisecond: 2,
		bootstrap.DefaultLeaseTTL - time.Second: 3} {
		synctest.Test(t, func(t *testing.T) {
			mem := storetest.NewMemory()
			keeps := mem.Open() // the job's keys
			defer keeps.Close()
			ss := session(0, mem.Open)
			ss.record.Size = size
			if err := bootstrap.Register(t.Context(), ss.Store(), ss.record, nil); err != nil {
				t.Fatal(err)
			}
			var wg sync.WaitGroup
			defer wg.Wait()
			for rank := 1; rank <= others; rank++ {
				if rank > 1 {
					time.Sleep(apart)
				}
				wg.Go(func() {
					store := mem.Open()
					defer store.Close()
					rec := bootstrap.NewRecord(rank, size, 9, nil)
					rec.Terms.Version = "another"
					if err := bootstrap.Register(t.Context(), store, rec, nil); !errors.As(err,
						new(*bootstrap.TermsError)) {
						t.Errorf("%v apart, rank %d: %v, want a TermsError", apart, rank, err)
					}
				})
				if synctest.Wait(); rank == 1 {
					wg.Go(func() {
						ss.Stay(t.Context(), 1)
						ss.Close()
					})
				}
			}
		})
	}
}

// A rank that finds ever more ranks that it does not fit with does not stay for ever.
func TestStayIsBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		mem := storetest.NewMemory()
		other := mem.Open()
		defer other.Close()
		unlike(t, other)
		ss := session(0, mem.Open)
		defer ss.Close()
		began, ended := time.Now(), make(chan struct{})
		go func() {
			defer close(ended)
			ss.Stay(t.Context(), 1)
		}()
		for again := time.NewTicker(time.Second); ; {
			select {
			case <-again.C:
				rec := unlike(t, other)
				rec.Incarnation += uint64(time.Since(began))
				b, err := rec.Encode()
				if err == nil {
					err = other.Put(t.Context(), bootstrap.RankKey(1), b, true)
				}
				if err != nil {
					t.Fatal(err)
				}
				continue
			case <-ended:
			}
			again.Stop()
			break
		}
		if took, want := time.Since(began), 2*(ss.Store().TTL()+2*time.Second); took != want {
			t.Errorf("it stays for %v, want %v", took, want)
		}
	})
}

// A rank that fits but for its transports is no longer waited for when another incarnation has its
// place.
func TestStayEndsWithIncarnation(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		mem := storetest.NewMemory()
		other := mem.Open()
		defer other.Close()
		register := func(incarnation uint64) {
			b, err := bootstrap.NewRecord(1, 3, incarnation, nil).Encode()
			if err == nil {
				err = other.Put(t.Context(), bootstrap.RankKey(1), b, true)
			}
			if err != nil {
				t.Fatal(err)
			}
		}
		register(9)
		time.AfterFunc(1500*time.Millisecond, func() { register(8) })
		ss := session(0, mem.Open)
		defer ss.Close()
		began := time.Now()
		ss.Stay(t.Context(), 1)
		if took := time.Since(began); took < 1500*time.Millisecond || took > 1500*time.Millisecond+lookPause {
			t.Errorf("it stays for %v, want 1.5 s", took)
		}
	})
}

// The error of a rank that has refused others says why.
func TestExplainRefusals(t *testing.T) {
	ss := New(&Settings{})
	if err := ss.Explain(net.ErrClosed); err != net.ErrClosed {
		t.Error(err)
	}
	for _, r := range []bootstrap.Refused{{}, {Secret: 2}, {Version: 3}, {Secret: 2, Version: 3}} {
		ss.settings.Refused = func() bootstrap.Refused { return r }
		err := ss.Explain(net.ErrClosed)
		text := err.Error()
		if !errors.Is(err, net.ErrClosed) || strings.Contains(text, "TUTTI_SECRET") != (r.Secret > 0) ||
			strings.Contains(text, "another build") != (r.Version > 0) {
			t.Errorf("%+v: %v", r, err)
		}
	}
}

// checked is a store that calls check after each change. The first attempt to adopt a key fails.
type checked struct {
	bootstrap.Store
	check func()
	once  sync.Once
}

func (s *checked) Adopt(ctx context.Context, key string, value []byte) (err error) {
	defer s.check()
	if s.once.Do(func() { err = bootstrap.ErrStoreAway }); err != nil {
		return err
	}
	return s.Store.Adopt(ctx, key, value)
}

func (s *checked) CompareAndSwap(ctx context.Context, key string, old, new []byte) error {
	defer s.check()
	return s.Store.CompareAndSwap(ctx, key, old, new)
}

func (s *checked) Close() error {
	defer s.check()
	return s.Store.Close()
}

// A rank that takes another lease, and has its record still, keeps the job's lease alive: here one
// of half a minute, which the test makes. A handle renews it at once, and then each third of that
// time.
func TestReconnectKeepsJob(t *testing.T) {
	const ttl = 30 // s
	ctx, site := t.Context(), sitetest.Start(t, sitetest.Config{})
	raw, err := clientv3.New(clientv3.Config{Endpoints: []string{strings.TrimPrefix(site.Address, "etcd://")},
		Logger: zap.NewNop()})
	if err != nil {
		t.Fatal(err)
	}
	defer raw.Close()
	lease, err := raw.Grant(ctx, ttl)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := raw.Put(ctx, bootstrap.Prefix("test")+".store/lease", "", clientv3.WithLease(lease.ID)); err != nil {
		t.Fatal(err)
	}
	ss := session(0, func() bootstrap.Store {
		store, err := bootstrap.DialStore(ctx, bootstrap.StoreConfig{Address: site.Address, Job: "test"})
		if err != nil {
			t.Fatal(err)
		}
		return store
	})
	defer ss.Close()
	lost := ss.Store()
	if err := bootstrap.Register(ctx, lost, ss.record, nil); err != nil {
		t.Fatal(err)
	}
	if err := ss.Reconnect(ctx, lost); err != nil {
		t.Fatal(err)
	}
	changes := ss.Store().Watch(ctx, bootstrap.SizeKey)
	if e := <-changes; !e.Exists {
		t.Fatalf("%+v", e)
	}
	kept := false // the lease was seen to be renewed, and not for the first time
	for last := int64(ttl); !kept; {
		select {
		case e := <-changes:
			t.Fatalf("the job's key, after Reconnect: %+v", e)
		case <-time.After(200 * time.Millisecond):
		}
		left, err := raw.TimeToLive(ctx, lease.ID)
		if err != nil || left.TTL < 0 {
			t.Fatalf("the job's lease: %+v, %v", left, err)
		}
		kept = left.TTL > last+ttl/6
		last = left.TTL
	}
}

// A rank that takes another lease is registered all the time.
func TestReconnectKeepsRecord(t *testing.T) {
	mem := storetest.NewMemory()
	other := mem.Open()
	defer other.Close()
	over := false
	check := func() {
		if _, err := other.Get(t.Context(), bootstrap.RankKey(0)); err != nil && !over {
			t.Error(err)
		}
	}
	ss := session(0, func() bootstrap.Store { return &checked{Store: mem.Open(), check: check} })
	defer ss.Close()
	lost := ss.Store()
	if err := bootstrap.Register(t.Context(), lost, ss.record, nil); err != nil {
		t.Fatal(err)
	}
	if err := ss.Reconnect(t.Context(), lost); !errors.Is(err, bootstrap.ErrStoreAway) {
		t.Fatalf("the first attempt: %v", err)
	}
	if err := ss.Reconnect(t.Context(), lost); err != nil {
		t.Fatal(err)
	}
	if err := lost.Put(t.Context(), "key", nil, true); !errors.Is(err, bootstrap.ErrStoreClosed) {
		t.Errorf("the former handle: %v", err)
	}
	over = true
}

// A rank whose record has gone with its lease registers again.
func TestReconnectRegistersAgain(t *testing.T) {
	mem := storetest.NewMemory()
	ss := session(0, mem.Open)
	defer ss.Close()
	lost := ss.Store()
	mem.Expire(lost)
	if err := ss.Reconnect(t.Context(), lost); err != nil {
		t.Fatal(err)
	}
	if _, err := ss.Store().Get(t.Context(), bootstrap.RankKey(0)); err != nil {
		t.Error(err)
	}
}

// A rank beyond the first ones that starts with the job does not take an earlier job for it.
func TestFurtherRankWaitsForItsJob(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	mem := storetest.NewMemory()
	other := mem.Open()
	defer other.Close()
	put(t, other, membership.First([]uint64{9, 8}), false)
	store := &looking{mem.Open(), make(chan struct{})}
	ss := session(2, func() bootstrap.Store { return store })
	defer ss.Close()
	var job *Job
	done := make(chan error, 1)
	go func() {
		var err error
		job, err = ss.Running(ctx)
		done <- err
	}()
	<-store.looked
	put(t, other, membership.First([]uint64{19, 18}), true)
	for {
		select {
		case <-store.looked:
		case err := <-done:
			if err != nil || job == nil || job.First != 19 {
				t.Errorf("the job is %+v, %v", job, err)
			}
			return
		}
	}
}
