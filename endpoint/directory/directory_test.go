package directory_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"

	"tutti/bootstrap"
	"tutti/bootstrap/embed"
	"tutti/endpoint"
	"tutti/endpoint/directory"
	"tutti/internal/sitetest"
	"tutti/mem"
)

// each runs a test with every kind of store.
func each(t *testing.T, f func(t *testing.T, address string)) {
	t.Run("site", func(t *testing.T) { f(t, site(t)) })
	t.Run("launcher", func(t *testing.T) {
		s, err := embed.Start(within(t), embed.Config{Secret: []byte(secret), Dir: t.TempDir()})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { s.Close() })
		f(t, s.Address())
	})
}

// noName checks that a name is not published.
func noName(t *testing.T, d *directory.Directory, name string) {
	t.Helper()
	if x, err := d.Lookup(within(t), name); !errors.Is(err, directory.ErrNoName) ||
		!strings.Contains(err.Error(), "name "+name) {
		t.Errorf("%+v, %v; want ErrNoName", x, err)
	}
}

// has checks that a name leads to an endpoint.
func has(t *testing.T, d *directory.Directory, name string, want endpoint.Info) {
	t.Helper()
	x, err := d.Lookup(within(t), name)
	if err != nil || x.Name != name || x.Info.String() != want.String() {
		t.Errorf("%+v, %v; want %v", x, err, want)
	}
}

func publish(t *testing.T, d *directory.Directory, name string, i endpoint.Info) *directory.Publication {
	t.Helper()
	p, err := d.Publish(within(t), name, i)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

func TestEntriesComeAndGo(t *testing.T) {
	each(t, func(t *testing.T, address string) {
		d, o := lasting(t, address), open(t, address)
		noName(t, o, "a")
		waited := make(chan directory.Entry, 1)
		go func() {
			x, err := o.Wait(within(t), "a")
			if err != nil {
				t.Error(err)
			}
			waited <- x
		}()
		a := publish(t, d, "a", info(1))
		if x := <-waited; x.Name != "a" || x.Info.ID != 1 {
			t.Errorf("Wait: %+v", x)
		}
		has(t, o, "a", info(1))
		publish(t, d, "é/b", info(2))
		publish(t, d, "c", info(1)) // an endpoint may have several names
		all, err := o.Entries(within(t))
		if err != nil || len(all) != 3 || all[0].Name != "a" || all[1].Name != "c" || all[2].Name != "é/b" {
			t.Errorf("%+v, %v", all, err)
		}
		_, err = d.Publish(within(t), "a", info(3))
		if err == nil || !strings.Contains(err.Error(), "withdraw it first") {
			t.Errorf("published twice: %v", err)
		}
		if a.Err() != nil {
			t.Error(a.Err())
		}
		for range 2 {
			if err := a.Withdraw(within(t)); err != nil || !errors.Is(a.Err(), directory.ErrWithdrawn) {
				t.Errorf("%v, %v", err, a.Err())
			}
		}
		noName(t, o, "a")
		again := publish(t, d, "a", info(3))
		has(t, o, "a", info(3))
		if err := d.Close(); err != nil {
			t.Fatal(err)
		}
		for _, name := range []string{"a", "é/b", "c"} {
			noName(t, o, name)
		}
		if _, err := d.Publish(within(t), "a", info(3)); !errors.Is(err, directory.ErrClosed) ||
			!errors.Is(again.Err(), directory.ErrClosed) {
			t.Errorf("%v, %v; want ErrClosed", err, again.Err())
		}
		for what, err := range map[string]error{
			"Lookup":  second(d.Lookup(within(t), "a")),
			"Wait":    second(d.Wait(within(t), "a")),
			"Entries": second(d.Entries(within(t))),
			"Connect": second(d.Connect(within(t), newEndpoint(t, ""), "a")),
		} {
			if err == nil {
				t.Errorf("%s of a closed directory works", what)
			}
		}
	})
}

func second[T any](_ T, err error) error { return err }

func TestDirectoriesOfOneStoreAreApart(t *testing.T) {
	address := site(t)
	cfg := storeAt(address)
	cfg.Job, cfg.LeaseTTL = "other", time.Minute // as that of lasting
	d, o := lasting(t, address), openWith(t, cfg)
	publish(t, d, "a", info(1))
	noName(t, o, "a")
	publish(t, o, "a", info(2))
	has(t, d, "a", info(1))
}

func TestNamesAndEndpointsAreChecked(t *testing.T) {
	d := open(t, site(t))
	for _, name := range []string{"", " ", "a b", "a\n", "a\x00", "\xff", "a\u202eb", "a\u200bb",
		strings.Repeat("n", directory.MaxName+1)} {
		for what, err := range map[string]error{
			"Publish": second(d.Publish(within(t), name, info(1))),
			"Lookup":  second(d.Lookup(within(t), name)),
			"Wait":    second(d.Wait(within(t), name)),
		} {
			if !errors.Is(err, directory.ErrName) || strings.ContainsAny(err.Error(), "\n\x00\u202e\u200b") {
				t.Errorf("%s of %q: %v, want ErrName", what, name, err)
			}
		}
	}
	publish(t, d, strings.Repeat("n", directory.MaxName), info(1))
	for _, i := range []endpoint.Info{{}, {ID: 1}, {Addrs: []string{"h:1"}}, {ID: 1, Addrs: []string{"h"}},
		{ID: 1, Addrs: slices.Repeat([]string{"h:1"}, 17)}} {
		if _, err := d.Publish(within(t), "b", i); !errors.Is(err, directory.ErrMalformed) {
			t.Errorf("%v: %v, want ErrMalformed", i, err)
		}
	}
	noName(t, d, "b")
}

func TestTakenName(t *testing.T) {
	t.Parallel()
	address := site(t)
	d, o := lasting(t, address), open(t, address) // a publisher that waits does so as long as its lease, and a bit
	p := publish(t, d, "a", info(1))
	var taken *directory.TakenError
	if _, err := o.Publish(within(t), "a", info(2)); !errors.As(err, &taken) || taken.Name != "a" ||
		taken.By.String() != info(1).String() || !strings.Contains(err.Error(), info(1).String()) {
		t.Fatalf("%v, want a TakenError", err)
	}
	has(t, d, "a", info(1))
	// The second publisher waits for the first, which may be slow.
	next := lasting(t, address)
	up := make(chan error, 1)
	go func() { up <- second(next.Publish(within(t), "a", info(2))) }()
	if err := p.Withdraw(within(t)); err != nil {
		t.Fatal(err)
	}
	if err := <-up; err != nil {
		t.Fatal(err)
	}
	has(t, d, "a", info(2))
	// The endpoint itself has it at once, under a lease of its own.
	same := lasting(t, address)
	publish(t, same, "a", info(2))
	if err := next.Close(); err != nil {
		t.Fatal(err)
	}
	has(t, d, "a", info(2))
	// A publication that is given up leaves nothing.
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := d.Publish(ctx, "b", info(3)); err == nil {
		t.Error("published although the context had ended")
	}
	publish(t, d, "b", info(4))
	has(t, d, "b", info(4))
}

func TestRemovedEntryComesBack(t *testing.T) {
	address := site(t)
	d, r := lasting(t, address), raw(t, address)
	p := publish(t, d, "a", info(1))
	if err := r.Delete(within(t), "names/a"); err != nil {
		t.Fatal(err)
	}
	if x, err := d.Wait(within(t), "a"); err != nil || x.Info.ID != 1 {
		t.Errorf("%+v, %v", x, err)
	}
	put(t, r, "a", info(2).String())
	select {
	case <-p.Done():
	case <-time.After(patience):
		t.Fatal("the publication does not notice")
	}
	var taken *directory.TakenError
	if err := p.Err(); !errors.As(err, &taken) || taken.By.ID != 2 {
		t.Errorf("%v, want a TakenError", err)
	}
	if err := p.Withdraw(within(t)); err != nil {
		t.Error(err)
	}
	has(t, d, "a", info(2))
}

func TestKilledPublisherIsFollowed(t *testing.T) {
	t.Parallel()
	address := site(t)
	d, e := open(t, address), newEndpoint(t, "")
	read := func(want string) *endpoint.Peer {
		t.Helper()
		p, err := d.Connect(within(t), e, "server")
		if err != nil {
			t.Fatal(err)
		}
		b := make([]byte, len(want))
		if err := p.Read(b, "r", 0).Wait(within(t)); err != nil || string(b) != want {
			t.Fatalf("%q, %v; want %q", b, err, want)
		}
		return p
	}
	up, kill := process(t, address, "server", "first")
	old := read("first") // it waits for the entry
	up()
	again := read("first")
	if again != old {
		t.Error("two peers for one endpoint")
	}
	// Another process takes its name when the store knows that it is dead.
	kill()
	up, _ = process(t, address, "server", "second")
	up()
	if err := old.Read(make([]byte, 1), "r", 0).Wait(within(t)); !errors.Is(err, endpoint.ErrBroken) {
		t.Errorf("%v, want ErrBroken", err)
	}
	if p := read("second"); p == old || p.ID() == old.ID() {
		t.Error("one peer for two endpoints")
	}
	// Without another process the entry goes.
	up, kill = process(t, address, "lonely", "x")
	up()
	w := watch(t, d)
	w.until("lonely", false)
	kill()
	w.until("lonely", true)
}

func TestConnectTakesTheNewAddress(t *testing.T) {
	address := site(t)
	d, r, e, server := open(t, address), raw(t, address), newEndpoint(t, ""), newEndpoint(t, "server")
	hole, err := net.Listen("tcp", "127.0.0.1:0") // accepts, and says nothing
	if err != nil {
		t.Fatal(err)
	}
	defer hole.Close()
	gone := info(7)
	gone.Addrs = []string{hole.Addr().String()}
	put(t, r, "a", gone.String())
	connected := make(chan error, 1)
	go func() {
		p, err := d.Connect(within(t), e, "a")
		if err == nil && p.ID() != server.Info().ID {
			err = fmt.Errorf("connected to %v", p)
		}
		connected <- err
	}()
	c, err := hole.Accept() // it is connecting
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	put(t, r, "a", server.Info().String())
	if err := <-connected; err != nil {
		t.Error(err)
	}
}

func TestConnectSaysWhyNot(t *testing.T) {
	address := site(t)
	d, r, e := open(t, address), raw(t, address), newEndpoint(t, "")
	soon, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
	defer cancel()
	if _, err := d.Connect(soon, e, "a"); !errors.Is(err, directory.ErrNoName) ||
		!errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("no endpoint there: %v", err)
	}
	c, err := endpoint.NewContext(endpoint.ContextConfig{})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	ctx, cancel := context.WithCancel(within(t))
	defer cancel()
	var dials atomic.Int32
	dialler, err := endpoint.New(c, endpoint.Config{Secret: secret, Interfaces: "127.0.0.1",
		Dialer: func(ctx context.Context, d *net.Dialer, _ int, address string) (net.Conn, error) {
			if dials.Add(1) > 1 {
				cancel()
			}
			return d.DialContext(context.WithoutCancel(ctx), "tcp", address)
		}})
	if err != nil {
		t.Fatal(err)
	}
	defer dialler.Close()
	put(t, r, "a", info(7).String()) // where no process listens
	if _, err := d.Connect(ctx, dialler, "a"); !errors.Is(err, endpoint.ErrBroken) ||
		!errors.Is(err, context.Canceled) || !strings.Contains(err.Error(), "127.0.0.1:1") {
		t.Errorf("no answer: %v", err)
	}
	other, err := endpoint.New(c, endpoint.Config{Secret: strings.Repeat("other", 5), Interfaces: "127.0.0.1"})
	if err != nil {
		t.Fatal(err)
	}
	defer other.Close()
	put(t, r, "a", other.Info().String())
	if _, err := d.Connect(within(t), e, "a"); !errors.Is(err, endpoint.ErrAuth) {
		t.Errorf("another secret: %v", err)
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	later := make(chan error, 1)
	go func() { // an endpoint of a later build
		c, err := l.Accept()
		if err == nil {
			_, err = c.Write([]byte("tutti/Z\r"))
			io.Copy(io.Discard, c)
			c.Close()
		}
		later <- err
	}()
	i := info(7)
	i.Addrs = []string{l.Addr().String()}
	put(t, r, "a", i.String())
	if _, err := d.Connect(within(t), e, "a"); !errors.Is(err, endpoint.ErrVersion) {
		t.Errorf("another build: %v", err)
	}
	if err := <-later; err != nil {
		t.Error(err)
	}
	put(t, r, "a", e.Info().String())
	if _, err := d.Connect(within(t), e, "a"); err == nil || !strings.Contains(err.Error(), "this endpoint itself") {
		t.Errorf("itself: %v", err)
	}
}

// A context that ends during an attempt does not hide why the one before it failed.
func TestConnectKeepsTheReason(t *testing.T) {
	address := site(t)
	d, r := open(t, address), raw(t, address)
	c, err := endpoint.NewContext(endpoint.ContextConfig{})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	ctx, cancel := context.WithCancel(within(t))
	defer cancel()
	var dials atomic.Int32
	e, err := endpoint.New(c, endpoint.Config{Secret: secret, Interfaces: "127.0.0.1",
		Dialer: func(ctx context.Context, d *net.Dialer, _ int, address string) (net.Conn, error) {
			if dials.Add(1) == 1 {
				return d.DialContext(ctx, "tcp", address) // refused
			}
			cancel()
			<-ctx.Done()
			return nil, ctx.Err()
		}})
	if err != nil {
		t.Fatal(err)
	}
	defer e.Close()
	put(t, r, "a", info(7).String())
	if _, err := d.Connect(ctx, e, "a"); !errors.Is(err, endpoint.ErrBroken) || !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
}

// A program may overwrite its copy of the secret, which each connection to the store proves.
func TestSecretIsKept(t *testing.T) {
	s, err := embed.Start(within(t), embed.Config{Secret: []byte(secret), Dir: t.TempDir()})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.Close() })
	conns := make(chan net.Conn, 16)
	cfg := storeAt(s.Address())
	cfg.Dial = func(ctx context.Context, d *net.Dialer, _ int, address string) (net.Conn, error) {
		c, err := d.DialContext(ctx, "tcp", address)
		if err == nil {
			select {
			case conns <- c:
			default:
			}
		}
		return c, err
	}
	d := openWith(t, cfg)
	clear(cfg.Secret)
	for len(conns) > 0 {
		(<-conns).Close()
	}
	noName(t, d, "a")
	if len(conns) == 0 {
		t.Error("there was no other connection")
	}
}

// follower takes the events of a watch.
type follower struct {
	t      *testing.T
	events chan directory.Event
}

func watch(t *testing.T, d *directory.Directory) *follower {
	f := &follower{t, make(chan directory.Event, 1<<16)}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() {
		defer close(done)
		for e, err := range d.Watch(ctx) {
			if err != nil {
				if !errors.Is(err, context.Canceled) && !errors.Is(err, directory.ErrClosed) {
					t.Error(err)
				}
				return
			}
			f.events <- e
		}
	}()
	t.Cleanup(func() {
		cancel()
		<-done
	})
	return f
}

// next checks the next event. id 0: the name is gone.
func (f *follower) next(name string, id uint64) {
	f.t.Helper()
	select {
	case e := <-f.events:
		if e.Name != name || e.Gone != (id == 0) || id != 0 && e.Info.ID != id {
			f.t.Fatalf("%+v, want name %s and id %d", e, name, id)
		}
	case <-time.After(patience):
		f.t.Fatalf("no event, want name %s and id %d", name, id)
	}
}

// until skips the events before that of a name that is there, or gone.
func (f *follower) until(name string, gone bool) {
	f.t.Helper()
	f.skip(fmt.Sprintf("name %s, gone: %v", name, gone), func(e directory.Event) bool {
		return e.Name == name && e.Gone == gone
	})
}

// skip skips the events up to the first that is what.
func (f *follower) skip(what string, is func(directory.Event) bool) {
	f.t.Helper()
	for late := time.After(patience); ; {
		select {
		case e := <-f.events:
			if is(e) {
				return
			}
		case <-late:
			f.t.Fatalf("no event of %s", what)
		}
	}
}

// untilGone skips the events before those after which none of these names is there.
func (f *follower) untilGone(names ...string) {
	f.t.Helper()
	gone := map[string]bool{}
	for late := time.After(patience); len(gone) < len(names); {
		select {
		case e := <-f.events:
			if delete(gone, e.Name); e.Gone && slices.Contains(names, e.Name) {
				gone[e.Name] = true
			}
		case <-late:
			f.t.Fatalf("not all of %v are gone, only %v", names, gone)
		}
	}
}

func TestStoreAway(t *testing.T) {
	t.Parallel()
	address := site(t)
	n, through := newNetwork(t, address)
	cfg := storeAt(through)
	cfg.LeaseTTL = 20 * time.Second // it is to end below, and not before on a busy machine
	d, o := openWith(t, cfg), lasting(t, address)
	p, q := publish(t, d, "a", info(1)), publish(t, d, "b", info(2))
	w := watch(t, o)
	w.next("a", 1)
	w.next("b", 2)
	inside := watch(t, d)
	inside.next("a", 1)
	inside.next("b", 2)

	// For a moment, which no call notices.
	n.cut()
	n.lead(address)
	has(t, d, "a", info(1))

	// Until the lease has ended: one name is taken meanwhile.
	has(t, o, "a", info(1))
	has(t, o, "b", info(2))
	n.cut()
	w.untilGone("a", "b")
	soon, cancel := context.WithTimeout(t.Context(), time.Second)
	defer cancel()
	if _, err := d.Lookup(soon, "a"); !errors.Is(err, bootstrap.ErrStoreAway) {
		t.Errorf("%v, want ErrStoreAway", err)
	}
	publish(t, o, "b", info(3))
	w.next("b", 3)
	n.lead(address)
	w.next("a", 1)
	select {
	case <-q.Done():
	case <-time.After(patience):
		t.Fatal("the publication does not notice")
	}
	if !errors.As(q.Err(), new(*directory.TakenError)) || p.Err() != nil {
		t.Errorf("%v, %v", q.Err(), p.Err())
	}
	// Who watches from inside sees what is different; a is as it was, or has been away for a
	// moment.
	inside.skip("b with id 3", func(e directory.Event) bool { return e.Name == "b" && !e.Gone && e.Info.ID == 3 })

	// What is withdrawn while the store is away goes when it is back.
	n.cut()
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if err := p.Withdraw(ctx); !errors.Is(err, bootstrap.ErrStoreAway) {
		t.Errorf("%v, want ErrStoreAway", err)
	}
	n.lead(address)
	if err := p.Withdraw(within(t)); err != nil {
		t.Error(err)
	}
	noName(t, o, "a")

	// Close does not wait for a store that is away.
	d.Close()
	cfg = storeAt(through)
	cfg.OpTimeout = 5 * time.Second
	d = openWith(t, cfg)
	publish(t, d, "c", info(4))
	n.cut()
	began := time.Now()
	d.Close()
	if took := time.Since(began); took > patience/2 {
		t.Errorf("Close took %v", took)
	}
}

// saying is a log, and a channel that has its lines.
type saying chan string

func (s saying) Write(b []byte) (int, error) {
	s <- string(b)
	return len(b), nil
}

// The log tells that entries are gone if there were entries.
func TestLogOfLostEntries(t *testing.T) {
	t.Parallel()
	address := site(t)
	for _, held := range []bool{false, true} {
		n, through := newNetwork(t, address)
		cfg, lines := storeAt(through), make(saying, 1<<16)
		cfg.LeaseTTL = time.Second
		d, err := directory.Open(within(t), directory.Config{Store: cfg,
			Logger: slog.New(slog.NewTextHandler(lines, &slog.HandlerOptions{Level: slog.LevelDebug}))})
		if err != nil {
			t.Fatal(err)
		}
		defer d.Close()
		if held {
			publish(t, d, "a", info(1))
		}
		n.cut()
		said := false
		for again := false; !again; {
			select {
			case line := <-lines:
				gone := strings.Contains(line, "entries of this process are gone")
				if said = said || gone; gone || strings.Contains(line, "the store is away") {
					n.lead(address)
				}
				again = strings.Contains(line, "answers again")
			case <-within(t).Done():
				t.Fatal("the store does not answer again")
			}
		}
		if said != held {
			t.Errorf("that entries are gone was said: %v, want %v", said, held)
		}
	}
}

// The store is started again, with its data or without.
func TestStoreRestarts(t *testing.T) {
	for _, keeps := range []bool{true, false} {
		t.Run(map[bool]string{true: "data", false: "no data"}[keeps], func(t *testing.T) {
			dir := t.TempDir()
			address, stop, err := sitetest.Serve(within(t), dir)
			if err != nil {
				t.Fatal(err)
			}
			n, through := newNetwork(t, address)
			d, o := open(t, through), open(t, through)
			publish(t, d, "a", info(1))
			w := watch(t, o)
			w.next("a", 1)
			n.cut()
			stop()
			if !keeps {
				dir = t.TempDir()
			}
			if address, stop, err = sitetest.Serve(within(t), dir); err != nil {
				t.Fatal(err)
			}
			defer stop()
			n.lead(address)
			publish(t, o, "z", info(2))
			w.until("z", false)
			if x, err := o.Wait(within(t), "a"); err != nil || x.Info.ID != 1 {
				t.Errorf("%+v, %v", x, err)
			}
			d.Close()
			o.Close()
		})
	}
}

func TestWatchReportsEveryChangeInOrder(t *testing.T) {
	t.Parallel()
	each(t, func(t *testing.T, address string) {
		d, r := lasting(t, address), raw(t, address)
		const names, changes = 7, 1500
		put(t, r, "0", info(1).String())
		w := watch(t, d)
		w.next("0", 1)
		for i := 1; i < changes; i++ {
			name := fmt.Sprint(i % names)
			if i%11 == 0 {
				if err := r.Delete(within(t), "names/"+name); err != nil {
					t.Fatal(err)
				}
				continue
			}
			put(t, r, name, info(i+1).String())
		}
		there := map[string]bool{"0": true}
		for i := 1; i < changes; i++ {
			name := fmt.Sprint(i % names)
			switch {
			case i%11 != 0:
				w.next(name, uint64(i+1))
				there[name] = true
			case there[name]:
				w.next(name, 0)
				delete(there, name)
			}
		}
	})
}

func TestWatchAfterCompaction(t *testing.T) {
	address := site(t)
	n, through := newNetwork(t, address)
	cfg := storeAt(through)
	cfg.LeaseTTL = time.Minute // only the history is lost
	d, r := openWith(t, cfg), raw(t, address)
	put(t, r, "stays", info(1).String())
	put(t, r, "goes", info(2).String())
	put(t, r, "moves", info(3).String())
	w := watch(t, d)
	w.next("goes", 2)
	w.next("moves", 3)
	w.next("stays", 1)
	n.cut()
	for i := range 20 {
		put(t, r, "moves", info(10+i).String())
	}
	put(t, r, "comes", info(4).String())
	if err := r.Delete(within(t), "names/goes"); err != nil {
		t.Fatal(err)
	}
	c, err := clientv3.New(clientv3.Config{Endpoints: []string{strings.TrimPrefix(address, "etcd://")},
		Logger: zap.NewNop()})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	now, err := c.Get(within(t), "x")
	if err == nil {
		_, err = c.Compact(within(t), now.Header.Revision, clientv3.WithCompactPhysical())
	}
	if err != nil {
		t.Fatal(err)
	}
	n.lead(address)
	w.next("goes", 0)
	w.next("comes", 4)
	w.next("moves", 29)
	put(t, r, "stays", info(5).String())
	w.next("stays", 5)
}

func TestMalformedEntriesArePassedOver(t *testing.T) {
	t.Parallel()
	address := site(t)
	d, r := open(t, address), raw(t, address)
	w := watch(t, d)
	put(t, r, "ok", info(1).String())
	w.next("ok", 1)
	for i, bad := range []string{"", "x", "host:1", "tutti-endpoint:///a?id=0000000000000001",
		"tutti-endpoint://h:1/a?id=0000000000000000", strings.Repeat("h:1,", 2000), info(1).String() + "\n"} {
		put(t, r, "bad", bad)
		if x, err := d.Lookup(within(t), "bad"); !errors.Is(err, directory.ErrMalformed) {
			t.Errorf("%d: %+v, %v; want ErrMalformed", i, x, err)
		}
	}
	put(t, r, "bad name\u202e", info(1).String())
	if all, err := d.Entries(within(t)); err != nil || len(all) != 1 || all[0].Name != "ok" {
		t.Errorf("%+v, %v", all, err)
	}
	put(t, r, "ok", "x") // counts as none
	w.next("ok", 0)
	var taken *directory.TakenError
	if _, err := d.Publish(within(t), "bad", info(2)); !errors.As(err, &taken) || taken.By.ID != 0 ||
		!strings.Contains(err.Error(), "malformed") {
		t.Errorf("%v, want a TakenError", err)
	}
}

func TestMemoryIsServedByName(t *testing.T) {
	address := site(t)
	d, server, client := open(t, address), newEndpoint(t, "server"), newEndpoint(t, "client")
	if _, err := server.Register("r", mem.Host([]byte("bytes"), mem.Anywhere), endpoint.RegionConfig{}); err != nil {
		t.Fatal(err)
	}
	publish(t, d, "name", server.Info())
	p, err := open(t, address).Connect(within(t), client, "name")
	if err != nil {
		t.Fatal(err)
	}
	b := make([]byte, 5)
	if err := p.Read(b, "r", 0).Wait(within(t)); err != nil || string(b) != "bytes" {
		t.Errorf("%q, %v", b, err)
	}
}
