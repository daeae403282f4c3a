package bootstrap_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"tutti/bootstrap"
	"tutti/bootstrap/embed"
	"tutti/bootstrap/storetest"
	"tutti/internal/ident"
	"tutti/internal/ports/portstest"
	"tutti/internal/sitetest"
	"tutti/internal/trust"
)

// backend is a kind of store under the conformance tests.
type backend struct {
	name   string
	open   func(t testing.TB) bootstrap.Store // a further handle on the same store
	leave  func()                             // the store goes away
	expire func(bootstrap.Store)              // a handle's lease ends, without its doing; nil: cannot
}

// each runs f on each kind of store, all at once.
func each(t *testing.T, f func(t *testing.T, b *backend)) {
	eachWithin(t, patience, patience, f)
}

// eachWithin is each with a bound on every operation, and the time of leases. In memory they have
// none that ends.
func eachWithin(t *testing.T, opTimeout, lease time.Duration, f func(t *testing.T, b *backend)) {
	t.Run("memory", func(t *testing.T) {
		t.Parallel()
		m := storetest.NewMemory()
		f(t, &backend{"memory", func(t testing.TB) bootstrap.Store {
			s := m.Open()
			t.Cleanup(func() { s.Close() })
			return s
		}, m.Close, m.Expire})
	})
	t.Run("etcd", func(t *testing.T) {
		t.Parallel()
		e := startEtcd(t)
		f(t, &backend{"etcd", func(t testing.TB) bootstrap.Store {
			return dial(t, e, bootstrap.StoreConfig{OpTimeout: opTimeout, LeaseTTL: lease})
		}, func() { e.Close() }, nil})
	})
	t.Run("meeting", func(t *testing.T) {
		t.Parallel()
		address, stop, err := bootstrap.ServeStore(context30(t), secret)
		if err != nil {
			t.Fatal(err)
		}
		stop = sync.OnceFunc(stop)
		t.Cleanup(stop)
		f(t, &backend{"meeting", func(t testing.TB) bootstrap.Store {
			return dial(t, nil, bootstrap.StoreConfig{Address: address, OpTimeout: opTimeout, LeaseTTL: lease})
		}, stop, nil})
	})
	t.Run("site", func(t *testing.T) {
		t.Parallel()
		s := sitetest.Start(t, sitetest.Config{ClientCerts: true, Users: true})
		p := newProxy(t, strings.TrimPrefix(s.Address, "etcds://"))
		cfg := siteConfig(s)
		cfg.Address, cfg.OpTimeout, cfg.LeaseTTL = "etcds://"+p.Addr(), opTimeout, lease
		f(t, &backend{"site", func(t testing.TB) bootstrap.Store { return dial(t, nil, cfg) }, p.Close, nil})
	})
}

// brief is the time of leases that are to end, and not before because of a busy machine. Tests that
// wait for it run beside others.
const brief = 6 * time.Second

func dial(t testing.TB, e *embed.Server, cfg bootstrap.StoreConfig) bootstrap.Store {
	t.Helper()
	if cfg.Address == "" {
		cfg.Address = e.Address()
	}
	cfg.Job, cfg.Secret, cfg.DialTimeout = "test", secret, patience
	if cfg.OpTimeout == 0 {
		cfg.OpTimeout = patience
	}
	if cfg.LeaseTTL == 0 {
		cfg.LeaseTTL = patience // a busy machine may not run this process for a while
	}
	s, err := bootstrap.DialStore(context30(t), cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.Close() })
	return s
}

func next(t testing.TB, w <-chan bootstrap.Event) bootstrap.Event {
	t.Helper()
	select {
	case e, ok := <-w:
		if !ok {
			t.Fatal("the watch ended")
		}
		return e
	case <-time.After(patience):
		t.Fatal("no event")
	}
	panic("unreachable")
}

func TestStoreOperations(t *testing.T) {
	each(t, func(t *testing.T, b *backend) {
		ctx, s, o := context30(t), b.open(t), b.open(t)
		conflict := func(err error, current []byte) {
			t.Helper()
			var c *bootstrap.ConflictError
			if !errors.As(err, &c) || !errors.Is(err, bootstrap.ErrConflict) || !bytes.Equal(c.Current, current) ||
				(c.Current == nil) != (current == nil) {
				t.Errorf("%v, want a conflict with %q", err, current)
			}
		}
		ok := func(err error) {
			t.Helper()
			if err != nil {
				t.Fatal(err)
			}
		}
		if _, err := s.Get(ctx, "a"); !errors.Is(err, bootstrap.ErrNoKey) || !strings.Contains(err.Error(), "get a") {
			t.Errorf("Get of nothing: %v", err)
		}
		ok(s.Create(ctx, "a", []byte("1"), false))
		conflict(o.Create(ctx, "a", []byte("2"), true), []byte("1"))
		if v, err := o.Get(ctx, "a"); err != nil || string(v) != "1" {
			t.Errorf("Get: %q, %v", v, err)
		}
		conflict(s.CompareAndSwap(ctx, "a", nil, []byte("2")), []byte("1"))
		conflict(s.CompareAndSwap(ctx, "a", []byte("0"), []byte("2")), []byte("1"))
		ok(o.CompareAndSwap(ctx, "a", []byte("1"), []byte("2")))
		conflict(s.CompareAndSwap(ctx, "b", []byte("1"), []byte("2")), nil)
		ok(s.CompareAndSwap(ctx, "b", nil, []byte{}))
		conflict(o.Create(ctx, "b", nil, false), []byte{})
		ok(s.CompareAndSwap(ctx, "b", []byte{}, []byte("3")))
		conflict(s.CompareAndSwap(ctx, "b", []byte("4"), nil), []byte("3"))
		ok(s.CompareAndSwap(ctx, "b", []byte("3"), nil))
		if _, err := o.Get(ctx, "b"); !errors.Is(err, bootstrap.ErrNoKey) {
			t.Errorf("a key that was removed: %v", err)
		}
		ok(s.Create(ctx, "b", []byte("3"), false))
		conflict(s.Adopt(ctx, "c", []byte("1")), nil)
		conflict(s.Adopt(ctx, "a", []byte("1")), []byte("2"))
		ok(s.Put(ctx, "d/1", []byte("x"), true))
		ok(o.Put(ctx, "d/2", nil, false))
		ok(o.Put(ctx, "d/2", []byte("y"), false))
		ok(o.Put(ctx, "d/3", nil, false))
		ok(s.Delete(ctx, "d/3"))
		ok(s.Delete(ctx, "d/3"))
		l, err := s.List(ctx, "d/")
		if err != nil || fmt.Sprintf("%q", l) != `map["d/1":"x" "d/2":"y"]` {
			t.Errorf("List: %q, %v", l, err)
		}
		if l, err = s.List(ctx, ""); err != nil || len(l) != 4 {
			t.Errorf("List of all: %q, %v", l, err)
		}
		for _, key := range []string{"", "a\x00b", strings.Repeat("k", 300)} {
			if err := s.Put(ctx, key, nil, false); err == nil {
				t.Errorf("Put of key %.10q: no error", key)
			}
		}
		if err := s.Put(ctx, "big", make([]byte, bootstrap.MaxValue+1), false); err == nil ||
			!strings.Contains(err.Error(), strconv.Itoa(bootstrap.MaxValue)) {
			t.Errorf("Put beyond MaxValue: %v", err)
		}
		ok(s.Put(ctx, "big", make([]byte, bootstrap.MaxValue), false))
		// Values are the caller's, on the way in and on the way out.
		mine := []byte("mine")
		ok(s.Put(ctx, "m", mine, false))
		mine[0] = 'X'
		got, err := s.Get(ctx, "m")
		if err != nil || string(got) != "mine" {
			t.Errorf("the store shares what was put: %q, %v", got, err)
		}
		if s.TTL() < time.Second {
			t.Errorf("TTL %v", s.TTL())
		}
		gone, cancel := context.WithCancelCause(ctx)
		why := errors.New("because")
		cancel(why)
		if err := s.Put(gone, "a", nil, false); !errors.Is(err, why) {
			t.Errorf("Put under an ended ctx: %v", err)
		}
	})
}

// One of many wins each step of a compare-and-swap race.
func TestStoreSwapRace(t *testing.T) {
	each(t, func(t *testing.T, b *backend) {
		ctx := context30(t)
		const n, rounds = 4, 10
		if err := b.open(t).Put(ctx, "n", []byte("0"), false); err != nil {
			t.Fatal(err)
		}
		var wg sync.WaitGroup
		for range n {
			s := b.open(t)
			wg.Go(func() {
				for i := 0; i < rounds; {
					v, err := s.Get(ctx, "n")
					if err != nil {
						t.Error(err)
						return
					}
					k, _ := strconv.Atoi(string(v))
					err = s.CompareAndSwap(ctx, "n", v, []byte(strconv.Itoa(k+1)))
					if err == nil {
						i++
					} else if !errors.Is(err, bootstrap.ErrConflict) {
						t.Error(err)
						return
					}
				}
			})
		}
		wg.Wait()
		if v, err := b.open(t).Get(ctx, "n"); err != nil || string(v) != strconv.Itoa(n*rounds) {
			t.Errorf("%q, %v, want %d", v, err, n*rounds)
		}
	})
}

func TestStoreWait(t *testing.T) {
	each(t, func(t *testing.T, b *backend) {
		ctx, s, o := context30(t), b.open(t), b.open(t)
		// The watch is under way before the key comes: the first event says so.
		w := s.Watch(ctx, "k")
		if e := next(t, w); e.Exists || e.Key != "k" || e.Err != nil {
			t.Fatalf("%+v", e)
		}
		done := make(chan error, 1)
		go func() {
			v, err := s.Wait(ctx, "k")
			if err == nil && string(v) != "v" {
				err = fmt.Errorf("value %q", v)
			}
			done <- err
		}()
		if err := o.Put(ctx, "k", []byte("v"), false); err != nil {
			t.Fatal(err)
		}
		if err := <-done; err != nil {
			t.Error(err)
		}
		if v, err := s.Wait(ctx, "k"); err != nil || string(v) != "v" {
			t.Errorf("Wait for what is there: %q, %v", v, err)
		}
		short, cancel := context.WithTimeout(ctx, 200*time.Millisecond)
		defer cancel()
		if _, err := s.Wait(short, "never"); !errors.Is(err, context.DeadlineExceeded) ||
			!strings.Contains(err.Error(), "never") {
			t.Errorf("Wait in vain: %v", err)
		}
	})
}

func TestStoreWatch(t *testing.T) {
	each(t, func(t *testing.T, b *backend) {
		ctx, s, o := context30(t), b.open(t), b.open(t)
		wctx, cancel := context.WithCancel(ctx)
		one, all := s.Watch(wctx, "d/1"), s.Watch(wctx, "d/")
		if e := next(t, one); e.Exists {
			t.Fatalf("%+v", e)
		}
		for i := range 200 { // more than the receiver takes in between
			if err := o.Put(ctx, "d/1", []byte(strconv.Itoa(i)), false); err != nil {
				t.Fatal(err)
			}
		}
		if err := o.Put(ctx, "d/2", []byte("x"), true); err != nil {
			t.Fatal(err)
		}
		if err := o.Put(ctx, "e", []byte("x"), true); err != nil {
			t.Fatal(err)
		}
		last, events := -1, 0
		for last != 199 {
			e := next(t, one)
			n, err := strconv.Atoi(string(e.Value))
			if err != nil || n <= last || e.Key != "d/1" {
				t.Fatalf("%+v after %d", e, last)
			}
			last, events = n, events+1
		}
		seen := map[string]string{}
		for seen["d/1"] != "199" || seen["d/2"] != "x" {
			e := next(t, all)
			if e.Err != nil || !e.Exists || e.Key != "d/1" && e.Key != "d/2" {
				t.Fatalf("%+v", e)
			}
			seen[e.Key] = string(e.Value)
		}
		if err := o.Close(); err != nil { // takes d/2 along
			t.Fatal(err)
		}
		if e := next(t, all); e.Exists || e.Key != "d/2" {
			t.Errorf("%+v, want that d/2 went", e)
		}
		cancel()
		for range one {
		}
		for range all {
		}
		late := s.Watch(ctx, "d/")
		if e := next(t, late); e.Key != "d/1" || string(e.Value) != "199" {
			t.Errorf("a late watch: %+v", e)
		}
	})
}

// TestFollowBeginsAmongWrites begins to follow while another handle writes. State and changes
// together must be the values in order, none twice and none left out.
func TestFollowBeginsAmongWrites(t *testing.T) {
	each(t, func(t *testing.T, b *backend) {
		ctx, s, o := context30(t), b.open(t), b.open(t)
		f, ok := s.(bootstrap.Follower)
		if !ok {
			return // TestFollowReportsEveryChange judges that
		}
		put := func(v string) {
			if err := o.Put(ctx, "d/1", []byte(v), false); err != nil {
				t.Error(err)
			}
		}
		put("0")
		const begins = 20
		began, over, stop := make(chan struct{}, begins), make(chan error, begins), make(chan struct{})
		wrote := make(chan struct{})
		go func() {
			defer close(wrote)
			defer put("end")
			for i := 1; ; i++ {
				select {
				case <-stop:
					return
				default:
					put(strconv.Itoa(i))
				}
			}
		}()
		for range begins {
			fctx, cancel := context.WithCancel(ctx)
			at := -1
			seen := func(v string) {
				if v == "end" {
					cancel()
					return
				}
				n, err := strconv.Atoi(v)
				if err != nil || at >= 0 && n != at+1 {
					t.Errorf("%q after %d", v, at)
				}
				at = n
			}
			go func() {
				over <- f.Follow(fctx, "d/", func(state map[string][]byte) {
					seen(string(state["d/1"]))
					began <- struct{}{}
				}, func(e bootstrap.Event) { seen(string(e.Value)) })
			}()
			<-began
		}
		close(stop)
		for range begins {
			if err := <-over; !errors.Is(err, context.Canceled) {
				t.Error(err)
			}
		}
		<-wrote
	})
}

func TestFollowReportsEveryChange(t *testing.T) {
	each(t, func(t *testing.T, b *backend) {
		ctx, s, o := context30(t), b.open(t), b.open(t)
		f, ok := s.(bootstrap.Follower)
		if !ok {
			if b.name != "memory" { // which is for tests of what needs the last state alone
				t.Errorf("%T follows nothing", s)
			}
			return
		}
		for _, k := range []string{"d/1", "e"} {
			if err := o.Put(ctx, k, []byte("x"), true); err != nil {
				t.Fatal(err)
			}
		}
		var got []string
		const changes = 200
		began, done := make(chan struct{}), make(chan error, 1)
		fctx, cancel := context.WithCancel(ctx)
		go func() {
			done <- f.Follow(fctx, "d/", func(state map[string][]byte) {
				if len(state) != 1 || string(state["d/1"]) != "x" {
					t.Errorf("state %q", state)
				}
				close(began)
			}, func(e bootstrap.Event) {
				got = append(got, fmt.Sprint(e.Key, e.Exists, string(e.Value)))
				if len(got) == changes {
					cancel()
				}
			})
		}()
		<-began
		var want []string
		for i := range changes {
			k, v := fmt.Sprint("d/", i/3%5), strconv.Itoa(i)
			err := error(nil)
			if i%3 == 2 {
				want, err = append(want, fmt.Sprint(k, false)), o.Delete(ctx, k)
			} else {
				want, err = append(want, fmt.Sprint(k, true, v)), o.Put(ctx, k, []byte(v), true)
			}
			if err != nil {
				t.Fatal(err)
			}
		}
		if err := <-done; !errors.Is(err, context.Canceled) {
			t.Errorf("Follow: %v", err)
		}
		if !slices.Equal(got, want) {
			t.Errorf("%d changes\n%q, want %d\n%q", len(got), got, len(want), want)
		}
		if err := f.Follow(ctx, "d", nil, nil); err == nil {
			t.Error("it follows a prefix without a slash")
		}
		// The handle's end is Follow's.
		go func() { done <- f.Follow(ctx, "d/", func(map[string][]byte) { s.Close() }, func(bootstrap.Event) {}) }()
		if err := <-done; !errors.Is(err, bootstrap.ErrStoreClosed) {
			t.Errorf("Follow of a closed handle: %v", err)
		}
	})
}

func TestStoreClose(t *testing.T) {
	each(t, func(t *testing.T, b *backend) {
		ctx, s, o := context30(t), b.open(t), b.open(t)
		for _, k := range []string{"mine", "kept"} {
			if err := s.Put(ctx, k, nil, k == "mine"); err != nil {
				t.Fatal(err)
			}
		}
		w := s.Watch(ctx, "mine")
		next(t, w)
		if err := s.Close(); err != nil {
			t.Fatal(err)
		}
		if err := s.Close(); err != nil {
			t.Errorf("second Close: %v", err)
		}
		if e := next(t, w); !errors.Is(e.Err, bootstrap.ErrStoreClosed) {
			t.Errorf("watch ended with %+v", e)
		}
		if _, ok := <-w; ok {
			t.Error("an event after the last")
		}
		if err := s.Put(ctx, "a", nil, false); !errors.Is(err, bootstrap.ErrStoreClosed) {
			t.Errorf("Put after Close: %v", err)
		}
		if e := next(t, s.Watch(ctx, "a")); !errors.Is(e.Err, bootstrap.ErrStoreClosed) {
			t.Errorf("Watch after Close: %+v", e)
		}
		select {
		case <-s.Lost():
			t.Error("Close reports a lost lease")
		default:
		}
		if l, err := o.List(ctx, ""); err != nil || len(l) != 1 {
			t.Errorf("after Close there is %q, %v, want kept alone", l, err)
		}
	})
}

// The job's keys stay while a handle is open, and go with the last one.
func TestStoreForgetsJobWithLastHandle(t *testing.T) {
	each(t, func(t *testing.T, b *backend) {
		ctx, s, o := context30(t), b.open(t), b.open(t)
		if err := s.CompareAndSwap(ctx, "view", nil, []byte("1")); err != nil {
			t.Fatal(err)
		}
		if err := s.Create(ctx, "size", []byte("2"), false); err != nil {
			t.Fatal(err)
		}
		if err := s.Close(); err != nil {
			t.Fatal(err)
		}
		if l, err := o.List(ctx, ""); err != nil || len(l) != 2 {
			t.Errorf("beside an open handle there is %q, %v", l, err)
		}
		if err := o.CompareAndSwap(ctx, "view", []byte("1"), []byte("2")); err != nil {
			t.Error(err)
		}
		if err := o.Close(); err != nil {
			t.Fatal(err)
		}
		n := b.open(t)
		if l, err := n.List(ctx, ""); err != nil || len(l) != 0 {
			t.Errorf("the job left %q, %v", l, err)
		}
		if err := n.CompareAndSwap(ctx, "view", nil, []byte("3")); err != nil {
			t.Error(err)
		}
	})
}

// A handle that only moves its record keeps the job's keys, also after the handle that wrote them.
func TestHandleThatWritesNoJobKeyKeepsJob(t *testing.T) {
	const ttl = 6 * time.Second
	e, ctx := startEtcd(t), context30(t)
	first := dial(t, e, bootstrap.StoreConfig{})
	if err := bootstrap.LeaseJob(ctx, first, ttl); err != nil {
		t.Fatal(err)
	}
	writer, former := dial(t, e, bootstrap.StoreConfig{}), dial(t, e, bootstrap.StoreConfig{})
	if err := writer.Create(ctx, "view", nil, false); err != nil {
		t.Fatal(err)
	}
	if err := former.Create(ctx, "mine", []byte("v"), true); err != nil {
		t.Fatal(err)
	}
	fresh := dial(t, e, bootstrap.StoreConfig{})
	if err := fresh.Adopt(ctx, "mine", []byte("v")); err != nil {
		t.Fatal(err)
	}
	for _, h := range []bootstrap.Store{first, writer, former} {
		bootstrap.Lose(h, bootstrap.ErrLeaseLost)
		if err := h.Close(); err != nil {
			t.Fatal(err)
		}
	}
	changes := fresh.Watch(ctx, "view")
	if ev := next(t, changes); !ev.Exists {
		t.Fatalf("%+v", ev)
	}
	select {
	case ev := <-changes:
		t.Errorf("the job's key, with an open handle: %+v", ev)
	case <-time.After(ttl + 2*time.Second):
	}
}

// holdBehind returns a handle on a store behind p, which has put k under its lease, and one that
// reaches the store itself.
func holdBehind(t *testing.T) (ctx context.Context, p *proxy, s, far bootstrap.Store) {
	p, direct := startEtcdBehind(t)
	s = dial(t, nil, bootstrap.StoreConfig{Address: "tutti://" + p.Addr(), LeaseTTL: time.Minute})
	far, ctx = dial(t, nil, bootstrap.StoreConfig{Address: direct}), context30(t)
	if err := s.Put(ctx, "k", nil, true); err != nil {
		t.Fatal(err)
	}
	return ctx, p, s, far
}

// A handle that is closed while its connection is being made again gives its lease back.
func TestStoreCloseWhileConnecting(t *testing.T) {
	ctx, p, s, far := holdBehind(t)
	release := p.Hold()
	time.AfterFunc(20*time.Millisecond, release) // too early only hides a fault
	if err := s.Close(); err != nil {
		t.Error(err)
	}
	if _, err := far.Get(ctx, "k"); !errors.Is(err, bootstrap.ErrNoKey) {
		t.Errorf("after Close: %v, want no key", err)
	}
}

// The leases of all handles have ended: closing one of them leaves the job's keys for those that
// get other leases.
func TestStoreLostHandleLeavesJob(t *testing.T) {
	for _, noticed := range []bool{false, true} {
		t.Run(fmt.Sprintf("noticed %v", noticed), func(t *testing.T) {
			each(t, func(t *testing.T, b *backend) {
				ctx, s, o := context30(t), b.open(t), b.open(t)
				if err := s.CompareAndSwap(ctx, "view", nil, []byte("1")); err != nil {
					t.Fatal(err)
				}
				for _, h := range []bootstrap.Store{o, s} {
					if b.expire != nil {
						b.expire(h)
						continue
					}
					if err := bootstrap.EndLease(ctx, h); err != nil {
						t.Fatal(err)
					}
					if noticed {
						bootstrap.Lose(h, bootstrap.ErrLeaseLost)
					}
				}
				if err := s.Close(); err != nil {
					t.Error(err)
				}
				if v, err := b.open(t).Get(ctx, "view"); err != nil || string(v) != "1" {
					t.Errorf("after Close: %q, %v", v, err)
				}
			})
		})
	}
}

// An observer leaves the keys of a job whose processes have all lost their leases, and does not
// keep those of a job that is over.
func TestObserverNeitherEndsNorKeepsAJob(t *testing.T) {
	t.Parallel()
	ctx, e := context30(t), startEtcd(t)
	observer := bootstrap.StoreConfig{Observer: true}
	s := dial(t, e, bootstrap.StoreConfig{})
	if err := s.CompareAndSwap(ctx, "view", nil, []byte("1")); err != nil {
		t.Fatal(err)
	}
	if err := bootstrap.EndLease(ctx, s); err != nil {
		t.Fatal(err)
	}
	if err := dial(t, e, observer).Close(); err != nil {
		t.Error(err)
	}
	o, last := dial(t, e, observer), dial(t, e, bootstrap.StoreConfig{})
	if v, err := last.Get(ctx, "view"); err != nil || string(v) != "1" {
		t.Errorf("after an observer: %q, %v", v, err)
	}
	if err := last.Close(); err != nil {
		t.Error(err)
	}
	if v, err := o.Get(ctx, "view"); !errors.Is(err, bootstrap.ErrNoKey) {
		t.Errorf("when the last process has left: %q, %v", v, err)
	}
}

// Close of a handle that cannot reach the store gives the lease back, or says that it did not.
func TestStoreCloseAfterFailedConnections(t *testing.T) {
	ctx, p, s, far := holdBehind(t)
	p.Close()
	bootstrap.UntilFailed(ctx, s)
	newProxyAt(t, p.Addr(), p.to)
	err := s.Close()
	if _, there := far.Get(ctx, "k"); err == nil && !errors.Is(there, bootstrap.ErrNoKey) ||
		err != nil && !errors.Is(err, bootstrap.ErrStoreAway) {
		t.Errorf("Close: %v, and then the key of its lease: %v", err, there)
	}
}

// The store leaves while handles are in use: nothing hangs, everything says so.
func TestStoreLeaves(t *testing.T) {
	t.Parallel()
	eachWithin(t, 5*time.Second, brief, func(t *testing.T, b *backend) {
		ctx, s := context.Background(), b.open(t)
		w := s.Watch(ctx, "k")
		next(t, w)
		waited := make(chan error, 1)
		go func() {
			_, err := s.Wait(ctx, "never")
			waited <- err
		}()
		b.leave()
		ops := map[string]error{
			"Put":            s.Put(ctx, "k", nil, false),
			"CompareAndSwap": s.CompareAndSwap(ctx, "k", nil, nil),
			"Delete":         s.Delete(ctx, "k"),
		}
		_, ops["Get"] = s.Get(ctx, "k")
		_, ops["List"] = s.List(ctx, "k")
		for name, err := range ops {
			if !errors.Is(err, bootstrap.ErrStoreAway) {
				t.Errorf("%s: %v", name, err)
			}
		}
		select {
		case <-s.Lost():
		case <-time.After(patience):
			t.Fatal("the lease outlives the store")
		}
		if err := s.Err(); !errors.Is(err, bootstrap.ErrStoreAway) {
			t.Errorf("Err: %v", err)
		}
		if err := s.Put(ctx, "k", nil, true); !errors.Is(err, bootstrap.ErrStoreAway) {
			t.Errorf("Put under a lost lease: %v", err)
		}
		var last bootstrap.Event
		for e := range w {
			last = e
		}
		if last.Err == nil {
			t.Errorf("the watch ended with %+v", last)
		}
		if err := <-waited; !errors.Is(err, bootstrap.ErrStoreAway) {
			t.Errorf("Wait: %v", err)
		}
		if err := s.Close(); err != nil {
			t.Errorf("Close: %v", err)
		}
	})
}

func TestExpireEndsAHandlesLease(t *testing.T) {
	m := storetest.NewMemory()
	a, b := m.Open(), m.Open()
	defer b.Close()
	defer a.Close()
	ctx := context30(t)
	if err := a.Put(ctx, "k", nil, true); err != nil {
		t.Fatal(err)
	}
	m.Expire(a)
	<-a.Lost()
	if err := a.Err(); !errors.Is(err, bootstrap.ErrLeaseLost) {
		t.Error(err)
	}
	if err := a.Put(ctx, "k", nil, true); !errors.Is(err, bootstrap.ErrLeaseLost) {
		t.Errorf("Put: %v", err)
	}
	if l, err := a.List(ctx, ""); err != nil || len(l) != 0 {
		t.Errorf("%q, %v", l, err)
	}
}

// A network that swallows everything takes the lease, on both sides, though no connection breaks.
func TestEtcdPartition(t *testing.T) {
	t.Parallel()
	p, direct := startEtcdBehind(t)
	far := dial(t, nil, bootstrap.StoreConfig{Address: direct})
	cut := dial(t, nil, bootstrap.StoreConfig{Address: "tutti://" + p.Addr(), LeaseTTL: brief})
	ctx := context30(t)
	if err := cut.Put(ctx, "k", nil, true); err != nil {
		t.Fatal(err)
	}
	w := far.Watch(ctx, "k")
	if ev := next(t, w); !ev.Exists {
		t.Fatalf("%+v", ev)
	}
	p.Freeze()
	short, cancel := context.WithTimeout(ctx, 200*time.Millisecond)
	defer cancel()
	if _, err := cut.Get(short, "k"); !errors.Is(err, bootstrap.ErrStoreAway) ||
		!strings.Contains(err.Error(), p.Addr()) {
		t.Errorf("Get: %v", err)
	}
	if ev := next(t, w); ev.Exists {
		t.Errorf("%+v", ev)
	}
	select {
	case <-cut.Lost():
	case <-time.After(patience):
		t.Error("the lease outlives the connection")
	}
	if err := cut.Err(); !errors.Is(err, bootstrap.ErrLeaseLost) || !errors.Is(err, bootstrap.ErrStoreAway) {
		t.Errorf("Err: %v", err)
	}
}

// A lease that the store ends is lost even if everything else works: the handle notices it, and
// operations without a lease still work.
func TestEtcdLeaseRevoked(t *testing.T) {
	t.Parallel()
	p, direct := startEtcdBehind(t)
	far := dial(t, nil, bootstrap.StoreConfig{Address: direct})
	s := dial(t, nil, bootstrap.StoreConfig{Address: "tutti://" + p.Addr(), LeaseTTL: brief})
	ctx := context30(t)
	if err := s.Put(ctx, "k", nil, true); err != nil {
		t.Fatal(err)
	}
	w := far.Watch(ctx, "k")
	next(t, w)
	p.Freeze()
	if ev := next(t, w); ev.Exists { // the lease ended
		t.Fatalf("%+v", ev)
	}
	p.Cut() // the network is back: connections that lost bytes break and are made anew
	select {
	case <-s.Lost():
	case <-time.After(patience):
		t.Fatal("the handle does not notice")
	}
	if err := s.Put(ctx, "k", nil, true); !errors.Is(err, bootstrap.ErrLeaseLost) {
		t.Errorf("Put under the lost lease: %v", err)
	}
	// Operations without a lease still work.
	err := s.Put(ctx, "k", nil, false)
	// a connection may still be breaking; its write is not repeated for us
	for errors.Is(err, bootstrap.ErrStoreAway) && ctx.Err() == nil {
		err = s.Put(ctx, "k", nil, false)
	}
	if err != nil {
		t.Errorf("Put without a lease: %v", err)
	}
}

// A handle that counts its lease as lost before the store does removes the lease's keys when it is
// closed: a process that comes back at once must not find them, and lose them later.
func TestEtcdLostLeaseEndsAtClose(t *testing.T) {
	e := startEtcd(t)
	s, far, ctx := dial(t, e, bootstrap.StoreConfig{LeaseTTL: time.Minute}), dial(t, e, bootstrap.StoreConfig{}),
		context30(t)
	if err := s.Put(ctx, "k", nil, true); err != nil {
		t.Fatal(err)
	}
	bootstrap.Lose(s, bootstrap.ErrLeaseLost)
	if err := s.Close(); err != nil {
		t.Error(err)
	}
	if _, err := far.Get(ctx, "k"); !errors.Is(err, bootstrap.ErrNoKey) {
		t.Errorf("after the end of its handle: %v, want no key", err)
	}
}

// The store may have ended the lease when the handle is closed, before the handle knows it: then
// there is nothing left to give back, which is no failure.
func TestEtcdCloseAfterLeaseEnded(t *testing.T) {
	s, ctx := dial(t, startEtcd(t), bootstrap.StoreConfig{LeaseTTL: time.Minute}), context30(t)
	if err := s.Put(ctx, "k", nil, true); err != nil {
		t.Fatal(err)
	}
	if err := bootstrap.EndLease(ctx, s); err != nil {
		t.Fatal(err)
	}
	if err := s.Close(); err != nil {
		t.Error(err)
	}
}

// TestDialWithoutTime: a caller whose time is over learns nothing about the store, and says so.
func TestDialWithoutTime(t *testing.T) {
	silent, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer silent.Close()
	over := errors.New("the time is over")
	ctx, cancel := context.WithCancelCause(t.Context())
	cancel(over)
	_, err = bootstrap.DialStore(ctx, bootstrap.StoreConfig{Address: "etcd://" + silent.Addr().String(), Job: "j"})
	if !errors.Is(err, bootstrap.ErrStoreAway) || !errors.Is(err, over) ||
		!strings.HasSuffix(err.Error(), ": no time was left to connect: the time is over") {
		t.Errorf("%v", err)
	}
}

func TestDialStoreFailures(t *testing.T) {
	e := startEtcd(t)
	closed := portstest.Address(t)
	silent, err := net.Listen("tcp", "127.0.0.1:0") // accepts in the kernel's backlog and never answers
	if err != nil {
		t.Fatal(err)
	}
	defer silent.Close()
	real := strings.TrimPrefix(e.Address(), "tutti://")
	cfg := func(addr string) bootstrap.StoreConfig {
		return bootstrap.StoreConfig{Address: addr, Job: "j", Secret: secret, DialTimeout: 300 * time.Millisecond}
	}
	for _, c := range []struct {
		name string
		cfg  bootstrap.StoreConfig
		is   error
		text string
	}{
		{"no listener", cfg("etcd://" + closed), bootstrap.ErrStoreAway, closed},
		{"no listener, ours", cfg("tutti://" + closed), bootstrap.ErrStoreAway, closed},
		{"silence", cfg("etcd://" + silent.Addr().String()), bootstrap.ErrStoreAway, silent.Addr().String()},
		{"silence, ours", cfg("tutti://" + silent.Addr().String()), bootstrap.ErrStoreAway, silent.Addr().String()},
		{"unknown host", cfg("etcd://no-such-host.invalid:1"), bootstrap.ErrStoreAway, "no-such-host.invalid:1"},
		{"not proved", cfg("etcd://" + real), bootstrap.ErrStoreAway, real},
		{"wrong secret", func() bootstrap.StoreConfig {
			c := cfg(e.Address())
			c.Secret, c.DialTimeout = []byte("quite another secret"), 0
			return c
		}(), trust.ErrAuth, real},
		{"another build", func() bootstrap.StoreConfig {
			c := cfg("tutti://" + later(t, "127.0.0.1:0"))
			c.DialTimeout = 0
			return c
		}(), trust.ErrVersion, "the other end speaks tutti/Z"},
		{"no secret", bootstrap.StoreConfig{Address: e.Address(), Job: "j"}, nil, "secret is needed"},
		{"bad job", bootstrap.StoreConfig{Address: e.Address(), Job: "a/b", Secret: secret}, nil, "a/b"},
		{"bad address", bootstrap.StoreConfig{Address: "zk://x", Job: "j"}, nil, "zk://x"},
		{"missing CA", bootstrap.StoreConfig{Address: "etcds://" + closed, Job: "j", CA: "/does/not/exist"}, nil,
			"/does/not/exist"},
		{"CA without TLS", bootstrap.StoreConfig{Address: "etcd://" + closed, Job: "j", CA: "/does/not/exist"}, nil,
			"etcds://"},
	} {
		s, err := bootstrap.DialStore(context.Background(), c.cfg)
		if err == nil {
			s.Close()
		}
		if err == nil || c.is != nil && !errors.Is(err, c.is) || !strings.Contains(err.Error(), c.text) {
			t.Errorf("%s: %v", c.name, err)
		}
	}
	ctx, cancel := context.WithTimeout(context.Background(), 50*time.Millisecond)
	defer cancel()
	if _, err := bootstrap.DialStore(ctx, bootstrap.StoreConfig{Address: "etcd://" + closed, Job: "j"}); !errors.Is(err,
		context.DeadlineExceeded) || !errors.Is(err, bootstrap.ErrStoreAway) {
		t.Errorf("the caller's deadline: %v", err)
	}
}

// DialTimeout also bounds finding out why a store does not answer.
func TestStoreDialTimeoutBoundsAll(t *testing.T) {
	silent, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer silent.Close()
	least := patience // a busy machine delays some
	for range 3 {
		began := time.Now()
		s, err := bootstrap.DialStore(t.Context(), bootstrap.StoreConfig{Address: "etcd://" + silent.Addr().String(),
			Job: "j", DialTimeout: 100 * time.Millisecond})
		if err == nil {
			s.Close()
			t.Fatal("a silent store was taken")
		}
		least = min(least, time.Since(began))
	}
	if least > 2*time.Second {
		t.Errorf("it took %v", least)
	}
}

// A proof that was made for one store is not accepted by another with the same secret, if it is
// forwarded.
func TestProofForAnotherStore(t *testing.T) {
	e := startEtcd(t)
	p := newProxy(t, strings.TrimPrefix(e.Address(), "tutti://"))
	began := time.Now()
	s, err := bootstrap.DialStore(context30(t), bootstrap.StoreConfig{Address: "tutti://" + p.Addr(), Job: "j",
		Secret: secret, DialTimeout: patience})
	if err == nil {
		s.Close()
		t.Fatal("the relayed proof was taken")
	}
	if !strings.Contains(err.Error(), "meant for another store than "+e.Address()) || time.Since(began) > patience/2 {
		t.Errorf("after %v: %v", time.Since(began), err)
	}
}

// A store is meant by its published address, or by the one that the connection led to.
func TestStoreAddressIsChecked(t *testing.T) {
	at := func(s string) net.Addr { return net.TCPAddrFromAddrPort(netip.MustParseAddrPort(s)) }
	for _, c := range []struct {
		endpoint, remote string // as the dialler has it
		known, local     string // as the store has it
		want             bool
	}{
		{"10.0.0.1:9", "10.0.0.1:9", "10.0.0.1:9", "10.0.0.1:9", true},
		{"Node:9", "10.0.0.1:9", "other:9", "10.0.0.1:9", true},
		{"Node:9", "192.0.2.1:9", "node:9", "10.0.0.1:9", true},
		{"node:9", "[::ffff:10.0.0.1]:9", "other:9", "10.0.0.1:9", true},
		{"node:9", "10.0.0.1:9", "node:8", "10.0.0.1:8", false},
		{"node:9", "10.0.0.1:9", "other:9", "10.0.0.2:9", false},
	} {
		if got := bootstrap.StoreMeant(bootstrap.StoreHello(0, c.endpoint, at(c.remote)), c.known,
			at(c.local)); got != c.want {
			t.Errorf("%+v: %v", c, got)
		}
	}
}

// A store that comes up after its clients began to dial is found.
func TestDialStoreEarly(t *testing.T) {
	at := portstest.Port(t)
	dialled := make(chan error, 1)
	go func() {
		s, err := bootstrap.DialStore(context.Background(), bootstrap.StoreConfig{Address: "tutti://127.0.0.1:" + at,
			Job: "j", Secret: secret, DialTimeout: patience})
		if err == nil {
			err = s.Close()
		}
		dialled <- err
	}()
	e, err := embed.Start(context30(t), embed.Config{Secret: secret, Ports: at, Dir: t.TempDir()})
	if err != nil {
		t.Fatal(err)
	}
	defer e.Close()
	if err := <-dialled; err != nil {
		t.Error(err)
	}
}

// watched calls a function when a key is watched.
type watched struct {
	bootstrap.Store
	then func()
}

func (s watched) Watch(ctx context.Context, key string) <-chan bootstrap.Event {
	defer s.then()
	return s.Store.Watch(ctx, key)
}

func TestRegister(t *testing.T) {
	each(t, func(t *testing.T, b *backend) {
		ctx, s, o := context30(t), b.open(t), b.open(t)
		rec := func(rank, size int) bootstrap.Record {
			return bootstrap.NewRecord(rank, size, ident.New(), []string{"127.0.0.1:7"})
		}
		first := rec(1, 3)
		looked := make(chan error, 1)
		go func() {
			r, err := bootstrap.Lookup(ctx, o, 1)
			if err == nil && (r.Incarnation != first.Incarnation || !slices.Equal(r.Addrs, first.Addrs) ||
				r.PID != first.PID || r.Machine == "" || r.Network == "" || r.Host == "") {
				err = fmt.Errorf("%+v", r)
			}
			looked <- err
		}()
		if err := bootstrap.Register(ctx, s, first, nil); err != nil {
			t.Fatal(err)
		}
		if err := <-looked; err != nil {
			t.Error(err)
		}
		if err := bootstrap.Register(ctx, s, first, nil); err != nil {
			t.Errorf("the same life again: %v", err)
		}
		// Another size.
		var size *bootstrap.SizeError
		err := bootstrap.Register(ctx, hasty{o}, rec(0, 4), nil)
		if !errors.As(err, &size) || size.Own != 4 || size.Job != 3 {
			t.Errorf("another size: %v", err)
		}
		if l, err := o.List(ctx, "ranks/"); err != nil || len(l) != 1 {
			t.Errorf("a refused rank stays: %q, %v", l, err)
		}
		// The slot is taken.
		short, cancel := context.WithCancel(ctx)
		defer cancel()
		var slot *bootstrap.SlotError
		err = bootstrap.Register(short, watched{o, cancel}, rec(1, 3), nil)
		if !errors.As(err, &slot) || slot.Holder.Incarnation != first.Incarnation ||
			!strings.Contains(err.Error(), fmt.Sprintf("rank 1 is taken by incarnation %016x, pid %d on %s",
				first.Incarnation, first.PID, first.Host)) {
			t.Errorf("taken slot: %v", err)
		}
		// It is free as soon as its holder goes; the waiting rank takes it.
		second := rec(1, 3)
		done := make(chan error, 1)
		go func() { done <- bootstrap.Register(ctx, o, second, nil) }()
		if err := s.Close(); err != nil {
			t.Fatal(err)
		}
		if err := <-done; err != nil {
			t.Errorf("after its holder went: %v", err)
		}
		if r, err := bootstrap.Lookup(ctx, o, 1); err != nil || r.Incarnation != second.Incarnation {
			t.Errorf("%+v, %v", r, err)
		}
		// A rank that never comes.
		var late error
		for patient := 500 * time.Millisecond; ; patient *= 2 { // may end before the store has answered
			short, cancel := context.WithTimeout(ctx, patient)
			_, late = bootstrap.Lookup(short, o, 2)
			if cancel(); !errors.Is(late, bootstrap.ErrStoreAway) || ctx.Err() != nil {
				break
			}
		}
		if !errors.Is(late, context.DeadlineExceeded) ||
			!strings.Contains(late.Error(), "rank 2 never registered") {
			t.Errorf("Lookup in vain: %v", late)
		}
		// Records of other processes are validated.
		if err := o.Put(ctx, bootstrap.RankKey(2), []byte(`{"rank":1,"size":3,"incarnation":"7"}`), false); err != nil {
			t.Fatal(err)
		}
		if _, err := bootstrap.Lookup(ctx, o, 2); err == nil || !strings.Contains(err.Error(), "ranks/2") {
			t.Errorf("another rank's record: %v", err)
		}
		if err := o.Put(ctx, bootstrap.RankKey(2), []byte(`garbage`), false); err != nil {
			t.Fatal(err)
		}
		err = bootstrap.Register(ctx, hasty{o}, rec(2, 3), nil)
		if err == nil || !strings.Contains(err.Error(), "ranks/2") {
			t.Errorf("a slot full of garbage: %v", err)
		}
	})
}

// listed is a store that calls a function before it lists keys.
type listed struct {
	bootstrap.Store
	before func()
}

func (s listed) List(ctx context.Context, prefix string) (map[string][]byte, error) {
	s.before()
	return s.Store.List(ctx, prefix)
}

// A rank that is registered, and gives up to register again, stays registered.
func TestRegisterGivenUp(t *testing.T) {
	s := storetest.NewMemory().Open()
	defer s.Close()
	rec := bootstrap.NewRecord(0, 2, 1, nil)
	if err := bootstrap.Register(t.Context(), s, rec, nil); err != nil {
		t.Fatal(err)
	}
	if err := s.Put(t.Context(), bootstrap.SizeKey, []byte("3"), false); err != nil { // of an earlier job
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	if err := bootstrap.Register(ctx, listed{s, cancel}, rec, nil); !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
	if _, err := s.Get(t.Context(), bootstrap.RankKey(0)); err != nil {
		t.Error(err)
	}
}

// A live holder does not go: the newcomer gives up by itself.
func TestRegisterTaken(t *testing.T) {
	e := startEtcd(t)
	s, o := dial(t, e, bootstrap.StoreConfig{}), dial(t, e, bootstrap.StoreConfig{})
	ctx := context.Background()
	if err := bootstrap.Register(ctx, s, bootstrap.NewRecord(0, 1, 1, nil), nil); err != nil {
		t.Fatal(err)
	}
	var slot *bootstrap.SlotError
	alive := func(context.Context, bootstrap.Record) bool { return false }
	err := bootstrap.Register(ctx, hasty{o}, bootstrap.NewRecord(0, 1, 2, nil), alive)
	if !errors.As(err, &slot) {
		t.Errorf("%v", err)
	}
}

// hasty is a store that claims a short TTL.
type hasty struct{ bootstrap.Store }

func (hasty) TTL() time.Duration { return time.Millisecond }

// The lease of a dead holder may outlive its TTL: the newcomer waits on. So it does for one with
// another size.
func TestRegisterOutlastsLease(t *testing.T) {
	for what, r := range map[string]bootstrap.Record{"slot": bootstrap.NewRecord(0, 2, 2, nil),
		"size": bootstrap.NewRecord(1, 3, 2, nil)} {
		m := storetest.NewMemory()
		s, o := m.Open(), hasty{m.Open()}
		if err := bootstrap.Register(context30(t), s, bootstrap.NewRecord(0, 2, 1, nil), nil); err != nil {
			t.Fatal(err)
		}
		asked := 0
		if err := bootstrap.Register(context30(t), o, r, func(_ context.Context, holder bootstrap.Record) bool {
			if holder.Incarnation != 1 {
				t.Errorf("%s: incarnation %x is asked", what, holder.Incarnation)
			}
			asked++
			m.Expire(s)
			return true
		}); err != nil || asked != 1 {
			t.Errorf("%s: %v after %d questions", what, err, asked)
		}
	}
}

// An incarnation that registers through another handle is registered under that handle's lease: its
// record outlives the first handle.
func TestRegisterAgain(t *testing.T) {
	each(t, func(t *testing.T, b *backend) {
		ctx, first, second := context30(t), b.open(t), b.open(t)
		r := bootstrap.NewRecord(0, 1, 1, nil)
		for _, s := range []bootstrap.Store{first, second} {
			if err := bootstrap.Register(ctx, s, r, nil); err != nil {
				t.Fatal(err)
			}
		}
		if err := first.Close(); err != nil {
			t.Fatal(err)
		}
		if _, err := second.Get(ctx, bootstrap.RankKey(0)); err != nil {
			t.Errorf("after the end of the first handle: %v", err)
		}
	})
}

// A key that a handle adopts outlives the handle that put it, goes with the one that has it, and is
// there all the time.
func TestAdopt(t *testing.T) {
	each(t, func(t *testing.T, b *backend) {
		ctx, first, second, o := context30(t), b.open(t), b.open(t), b.open(t)
		if err := first.Put(ctx, "a", []byte("1"), true); err != nil {
			t.Fatal(err)
		}
		w := o.Watch(ctx, "a")
		next(t, w)
		if err := second.Adopt(ctx, "a", []byte("1")); err != nil {
			t.Fatal(err)
		}
		if err := first.Close(); err != nil {
			t.Fatal(err)
		}
		if e := next(t, w); !e.Exists || string(e.Value) != "1" {
			t.Errorf("after it was adopted: %+v", e)
		}
		if err := second.Close(); err != nil {
			t.Fatal(err)
		}
		if e := next(t, w); e.Exists {
			t.Errorf("after the end of the handle that had it: %+v", e)
		}
	})
}

// A size that a job of the same name left behind does not stand in the way of the next.
func TestRegisterStaleSize(t *testing.T) {
	each(t, func(t *testing.T, b *backend) {
		ctx, s := context30(t), b.open(t)
		if err := s.Put(ctx, bootstrap.SizeKey, []byte("17"), false); err != nil {
			t.Fatal(err)
		}
		const n = 4
		var wg sync.WaitGroup
		for r := range n {
			o := b.open(t)
			wg.Go(func() {
				if err := bootstrap.Register(ctx, o, bootstrap.NewRecord(r, n, ident.New(),
					nil), nil); err != nil {
					t.Error(err)
				}
			})
		}
		wg.Wait()
		if v, err := s.Get(ctx, bootstrap.SizeKey); err != nil || string(v) != "4" {
			t.Errorf("%q, %v", v, err)
		}
	})
}

// A rank that has other Terms than those that live is refused before they meet it. Those that an
// earlier job of the same name has left do not count.
func TestRegisterTerms(t *testing.T) {
	rec := func(rank int, version, algo string) bootstrap.Record {
		r := bootstrap.NewRecord(rank, 3, ident.New(), nil)
		r.Terms = bootstrap.Terms{Version: version,
			Settings: map[string]string{"TUTTI_ALGO": algo, "TUTTI_UNIFORM": "true"}}
		return r
	}
	m, ctx := storetest.NewMemory(), context30(t)
	first, second, odd := m.Open(), m.Open(), m.Open()
	defer odd.Close()
	for r, s := range []bootstrap.Store{first, second} {
		if err := bootstrap.Register(ctx, s, rec(r, "1", "auto"), nil); err != nil {
			t.Fatal(err)
		}
	}
	for _, c := range []struct {
		rec                 bootstrap.Record
		setting, own, other string
	}{
		{rec(2, "2", "auto"), "", "2", "1"},
		{rec(2, "1", "ring"), "TUTTI_ALGO", "ring", "auto"},
	} {
		var e *bootstrap.TermsError
		if err := bootstrap.Register(ctx, odd, c.rec, nil); !errors.As(err, &e) || e.Setting != c.setting ||
			e.Own != c.own || e.Other != c.other || !strings.HasPrefix(e.Peer, "rank ") {
			t.Errorf("%+v: %v", c.rec.Terms, err)
		}
	}
	if l, err := odd.List(ctx, bootstrap.RankKeys); err != nil || len(l) != 2 {
		t.Errorf("a refused rank stays: %q, %v", l, err)
	}
	first.Close()
	leaves := &leaver{odd, func() { second.Close() }}
	if err := bootstrap.Register(ctx, leaves, rec(2, "1", "ring"), nil); err != nil {
		t.Errorf("while the others end: %v", err)
	}
}

// A record that cannot be read, as one of another build, is waited for like any other.
func TestRegisterOutlastsUnreadableRecord(t *testing.T) {
	for _, leaves := range []bool{true, false} {
		synctest.Test(t, func(t *testing.T) {
			m := storetest.NewMemory()
			first, s := m.Open(), m.Open()
			defer s.Close()
			if err := first.Put(t.Context(), bootstrap.RankKey(0), []byte("other"), true); err != nil {
				t.Fatal(err)
			}
			if leaves {
				time.AfterFunc(s.TTL(), func() { m.Expire(first) })
			}
			err := bootstrap.Register(t.Context(), s, bootstrap.NewRecord(0, 2, 7, nil), nil)
			if (err == nil) != leaves || err != nil && !strings.Contains(err.Error(), "key ranks/0") {
				t.Errorf("leaves %v: %v", leaves, err)
			}
			first.Close()
		})
	}
}

// leaver is a handle that calls f when a key is watched.
type leaver struct {
	bootstrap.Store
	f func()
}

func (l *leaver) Watch(ctx context.Context, key string) <-chan bootstrap.Event {
	l.f()
	return l.Store.Watch(ctx, key)
}

// Ranks with two opinions about the size never all register, however they race.
func TestRegisterSizeRace(t *testing.T) {
	ctx := context30(t)
	var rounds sync.WaitGroup
	for range 200 {
		rounds.Go(func() {
			m := storetest.NewMemory()
			errs := make([]error, 2)
			var wg sync.WaitGroup
			for r := range errs {
				s := m.Open()
				defer s.Close()
				wg.Go(func() { errs[r] = bootstrap.Register(ctx, s, bootstrap.NewRecord(r, 3+r, 1, nil), nil) })
			}
			wg.Wait()
			if errs[0] == nil && errs[1] == nil {
				t.Error("ranks of sizes 3 and 4 both registered")
			}
		})
	}
	rounds.Wait()
}

func BenchmarkDialStore(b *testing.B) {
	e := startEtcd(b)
	for b.Loop() {
		s, err := bootstrap.DialStore(context.Background(), bootstrap.StoreConfig{Address: e.Address(), Job: "b",
			Secret: secret})
		if err != nil {
			b.Fatal(err)
		}
		s.Close()
	}
}

func BenchmarkStorePut(b *testing.B) {
	s := dial(b, startEtcd(b), bootstrap.StoreConfig{})
	for b.Loop() {
		if err := s.Put(context.Background(), "k", []byte("value"), true); err != nil {
			b.Fatal(err)
		}
	}
}

func BenchmarkStoreWait(b *testing.B) {
	s := dial(b, startEtcd(b), bootstrap.StoreConfig{})
	if err := s.Put(context.Background(), "k", []byte("value"), true); err != nil {
		b.Fatal(err)
	}
	for b.Loop() {
		if _, err := s.Wait(context.Background(), "k"); err != nil {
			b.Fatal(err)
		}
	}
}
