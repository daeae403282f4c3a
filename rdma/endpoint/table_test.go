package endpoint_test

import (
	"bytes"
	"context"
	"errors"
	"net/netip"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"tutti/internal/leaktest"
	"tutti/rdma"
	"tutti/rdma/endpoint"
	"tutti/rdma/endpoint/endpointtest"
	"tutti/rdma/rdmatest"
	"tutti/rdma/soft"
)

func TestMain(m *testing.M) { leaktest.Main(m) }

// fabric returns a fabric, and the names of its devices. No object may be left on it.
func fabric(t *testing.T, cfg soft.Config) (*soft.Fabric, []string) {
	t.Helper()
	f := soft.New(cfg)
	t.Cleanup(func() {
		qps, cqs, mrs := f.Objects()
		if qps+cqs+mrs > 0 {
			t.Errorf("%d queue pairs, %d completion queues and %d memory regions are left", qps, cqs, mrs)
		}
		f.Close()
	})
	names, err := f.Devices()
	if err != nil {
		t.Fatal(err)
	}
	return f, names
}

// brisk repeats packets soon.
func brisk(cfg *endpoint.Config) {
	cfg.Route = endpoint.DefaultRoute()
	cfg.Route.Timeout = 8
}

func TestSimultaneousOpens(t *testing.T) {
	f, names := fabric(t, soft.Config{Devices: 16})
	took := endpointtest.RunSimultaneous(t, f, names, 16, 240, endpointtest.Faults{}, nil)
	t.Logf("240 opens took %v", took)
	if *bars && took > time.Second {
		t.Errorf("240 opens took %v, expected a second", took)
	}
}

func TestSimultaneousOpensOfTenThousand(t *testing.T) {
	f, names := fabric(t, soft.Config{Devices: 8})
	const n = 101
	faults := endpointtest.Faults{Lose: 0.05, Duplicate: 0.1}
	took := endpointtest.RunSimultaneous(t, f, names, n, n*(n-1), faults, brisk)
	t.Logf("%d opens took %v", n*(n-1), took)
}

func TestVanishedQueuePairs(t *testing.T) {
	f, names := fabric(t, soft.Config{})
	endpointtest.RunVanished(t, f, names)
}

func TestRestarts(t *testing.T) {
	for _, quirks := range []rdma.Quirks{{}, {NoReset: true}} {
		// Numbers of queue pairs repeat as often as possible.
		f, names := fabric(t, soft.Config{ReuseNumbers: true, Attributes: rdma.Attributes{Quirks: quirks}})
		endpointtest.RunRestarts(t, f, names, 6, 12, endpointtest.Faults{Lose: 0.1, Duplicate: 0.3}, brisk)
	}
}

// callerFunc is a Caller.
type callerFunc func(ctx context.Context, peer string, request []byte) ([]byte, error)

func (c callerFunc) Call(ctx context.Context, peer string, request []byte) ([]byte, error) {
	return c(ctx, peer, request)
}

// pair is two tables, "a" and "b", on two devices. What calls do can be changed.
type pair struct {
	t     *testing.T
	f     *soft.Fabric
	table [2]*endpoint.Table
	calls atomic.Int64
	// call does a call of a table; nil: the other table's Handle.
	call func(ctx context.Context, from int, request []byte) ([]byte, error)
}

var names = [2]string{"a", "b"}

func newPair(t *testing.T, cfg soft.Config, change func(i int, cfg *endpoint.Config)) *pair {
	t.Helper()
	f, devices := fabric(t, cfg)
	p := &pair{t: t, f: f}
	for i := range p.table {
		d, err := f.Open(devices[i], nil)
		if err != nil {
			t.Fatal(err)
		}
		cq, err := d.NewCQ(64, nil)
		if err != nil {
			t.Fatal(err)
		}
		qp := rdma.QPConfig{Send: cq, Recv: cq, SendDepth: 4, RecvDepth: 4}
		tc := endpoint.Config{Session: uint64(i + 1), Device: d, Queues: []rdma.QPConfig{qp, qp, qp},
			Caller: callerFunc(func(ctx context.Context, peer string, b []byte) ([]byte, error) {
				p.calls.Add(1)
				if peer != names[1-i] {
					t.Errorf("%s calls %s", names[i], peer)
				}
				if p.call != nil {
					return p.call(ctx, i, b)
				}
				return p.handle(i, b)
			})}
		if change != nil {
			change(i, &tc)
		}
		if p.table[i], err = endpoint.New(tc); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			if err := p.table[i].Close(patient(t)); err != nil && !errors.Is(err, endpoint.ErrClosed) {
				t.Error(err)
			}
			if err := errors.Join(cq.Close(), d.Close()); err != nil {
				t.Error(err)
			}
		})
	}
	return p
}

// handle has the other table handle a request.
func (p *pair) handle(from int, b []byte) ([]byte, error) {
	return p.table[1-from].Handle(names[from], b)
}

func (p *pair) open(ctx context.Context, i int) (*endpoint.Connection, error) {
	return p.table[i].Open(ctx, names[1-i])
}

func (p *pair) mustOpen(i int) *endpoint.Connection {
	p.t.Helper()
	c, err := p.open(patient(p.t), i)
	if err != nil {
		p.t.Fatal(err)
	}
	return c
}

// patient returns a context that ends only if something hangs.
func patient(t *testing.T) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), endpointtest.Patience)
	t.Cleanup(cancel)
	return ctx
}

func TestOpenConnectsBothEnds(t *testing.T) {
	p := newPair(t, soft.Config{}, nil)
	a := p.mustOpen(0)
	b := p.mustOpen(1)
	if a.Remote() != 2 || b.Remote() != 1 || len(a.QPs) != 3 || a.Peer != "b" {
		t.Errorf("%+v, %+v", a, b)
	}
	for _, c := range []*endpoint.Connection{a, b} {
		for _, q := range c.QPs {
			if s, err := q.State(); s != rdma.StateReady || err != nil {
				t.Errorf("%s: %v, %v", c.Peer, s, err)
			}
		}
	}
	if again := p.mustOpen(0); again != a {
		t.Error("another connection")
	}
	if n := p.calls.Load(); n != 1 {
		t.Errorf("%d calls", n)
	}
	if cs := p.table[1].Connections(); len(cs) != 1 || cs[0] != b {
		t.Errorf("connections %v", cs)
	}
}

// The lock is not held during a call: a request of the peer connects an endpoint that is being
// opened, and calls that fail afterwards change nothing.
func TestRequestConnectsAnEndpointThatCalls(t *testing.T) {
	p := newPair(t, soft.Config{}, nil)
	began, release, verified := make(chan struct{}), make(chan struct{}), make(chan struct{})
	calls := 0
	p.call = func(ctx context.Context, from int, b []byte) ([]byte, error) {
		if from == 1 {
			return p.handle(from, b)
		}
		switch calls++; calls { // one at a time
		case 1:
			close(began)
			<-release
		case 5:
			close(verified)
		}
		return nil, errors.New("out of order")
	}
	got := make(chan *endpoint.Connection, 1)
	go func() { got <- p.mustOpen(0) }()
	<-began
	b := p.mustOpen(1)
	a := <-got
	close(release)
	select {
	case <-verified:
	case <-a.Retired():
	}
	if p.mustOpen(0) != a || p.mustOpen(1) != b {
		t.Error("the connection was replaced")
	}
}

func TestWaitersShareOneAttempt(t *testing.T) {
	p := newPair(t, soft.Config{}, nil)
	release := make(chan struct{})
	p.call = func(ctx context.Context, from int, b []byte) ([]byte, error) {
		<-release
		return p.handle(from, b)
	}
	const n = 1000
	var entered, done sync.WaitGroup
	entered.Add(n)
	var conns sync.Map
	for range n {
		done.Go(func() {
			entered.Done()
			conns.Store(p.mustOpen(0), true)
		})
	}
	entered.Wait()
	close(release)
	done.Wait()
	distinct := 0
	conns.Range(func(any, any) bool { distinct++; return true })
	if n := p.calls.Load(); distinct != 1 || n != 1 {
		t.Errorf("%d connections by %d calls", distinct, n)
	}
}

func TestContextsEndWhileOthersWait(t *testing.T) {
	p := newPair(t, soft.Config{}, nil)
	began, release := make(chan struct{}), make(chan struct{})
	p.call = func(ctx context.Context, from int, b []byte) ([]byte, error) {
		close(began)
		<-release
		return p.handle(from, b)
	}
	got := make(chan *endpoint.Connection, 1)
	go func() { got <- p.mustOpen(0) }()
	<-began
	short, cancel := context.WithCancel(patient(t))
	var wg sync.WaitGroup
	for range 100 {
		wg.Go(func() {
			var pe *endpoint.PeerError
			if c, err := p.open(short, 0); !errors.Is(err, context.Canceled) || !errors.As(err, &pe) || pe.Peer != "b" {
				t.Errorf("%v, %v", c, err)
			}
		})
	}
	cancel()
	wg.Wait()
	close(release)
	if c := <-got; c == nil || c.Remote() != 2 {
		t.Errorf("%v", c)
	}
	if _, err := p.open(short, 0); !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
}

// When no caller waits any more, the call that is under way may still succeed. If it fails, the
// queue pairs are retired.
func TestCallAfterLastWaiterLeft(t *testing.T) {
	for _, lost := range []bool{false, true} {
		retired := make(chan *endpoint.Connection, 10)
		p := newPair(t, soft.Config{}, func(i int, cfg *endpoint.Config) {
			cfg.Prepare = func(*endpoint.Connection) error { return nil }
			cfg.Retire = func(c *endpoint.Connection, drained func()) {
				drained()
				retired <- c
			}
		})
		ctx, cancel := context.WithCancel(patient(t))
		left := make(chan struct{})
		p.call = func(_ context.Context, from int, b []byte) ([]byte, error) {
			cancel()
			if <-left; lost && p.calls.Load() == 1 {
				return nil, errors.New("lost")
			}
			return p.handle(from, b)
		}
		if _, err := p.open(ctx, 0); !errors.Is(err, context.Canceled) {
			t.Fatal(err)
		}
		close(left)
		generation, calls := uint64(0), int64(1)
		if lost {
			if c := <-retired; c.Peer != "b" || c.Generation != 0 || len(c.QPs) != 3 {
				t.Errorf("%+v", c)
			}
			generation, calls = 1, 2
		}
		if c := p.mustOpen(0); c.Generation != generation || p.calls.Load() != calls {
			t.Errorf("lost %t: generation %d after %d calls", lost, c.Generation, p.calls.Load())
		}
	}
}

func TestPeerThatEndsOrRefuses(t *testing.T) {
	p := newPair(t, soft.Config{}, func(i int, cfg *endpoint.Config) { cfg.Queues = cfg.Queues[i:] })
	var refused *endpoint.RefusedError
	for i := range 2 {
		if _, err := p.open(patient(t), i); !errors.As(err, &refused) || !refused.Final ||
			!strings.Contains(err.Error(), "need the same number") {
			t.Error(err)
		}
	}
	// A peer of another build: it learns that from the reply, and this end from the request.
	other := func(b []byte) []byte { b = bytes.Clone(b); b[0]++; return b }
	for n, answered := range map[int]bool{1: false, 59: false, 60: true, endpoint.MaxMessage: true,
		endpoint.MaxMessage + 1: false} {
		request := bytes.Repeat([]byte{7}, n)
		reply, err := p.table[1].Handle("a", request)
		if format := new(*endpoint.FormatError); !errors.As(err, format) || (*format).Peer != 7 ||
			strings.Contains(string(reply), err.Error()) != answered || (len(reply) > 0) != answered {
			t.Errorf("a request of %d bytes, of another format: %q, %v", n, reply, err)
		}
	}
	p.calls.Store(0)
	var there error
	p.call = func(_ context.Context, from int, b []byte) (reply []byte, err error) {
		reply, there = p.handle(from, other(b))
		return other(reply), nil
	}
	if _, err := p.open(patient(t), 0); !errors.As(err, new(*endpoint.FormatError)) ||
		!errors.As(there, new(*endpoint.FormatError)) || p.calls.Load() != 1 {
		t.Errorf("%d calls of a peer of another format: %v, there %v", p.calls.Load(), err, there)
	}
	p.call = func(context.Context, int, []byte) ([]byte, error) { return nil, endpoint.ErrGone }
	if _, err := p.open(patient(t), 0); !errors.Is(err, endpoint.ErrGone) {
		t.Error(err)
	}
	if err := p.table[1].Close(patient(t)); err != nil {
		t.Fatal(err)
	}
	p.call = nil
	if _, err := p.table[1].Handle("a", nil); err == nil || errors.Is(err, endpoint.ErrClosed) {
		t.Errorf("an empty request: %v", err)
	}
	if _, err := p.open(patient(t), 1); !errors.Is(err, endpoint.ErrClosed) {
		t.Error(err)
	}
}

func TestCloseWakesWaiters(t *testing.T) {
	p := newPair(t, soft.Config{}, nil)
	began := make(chan struct{}, 100) // calls that take too long are made again
	p.call = func(ctx context.Context, from int, b []byte) ([]byte, error) {
		began <- struct{}{}
		<-ctx.Done()
		return nil, ctx.Err()
	}
	var wg sync.WaitGroup
	wg.Go(func() {
		if _, err := p.open(patient(t), 0); !errors.Is(err, endpoint.ErrClosed) {
			t.Error(err)
		}
	})
	<-began
	if err := p.table[0].Close(patient(t)); err != nil {
		t.Error(err)
	}
	wg.Wait()
	if err := p.table[0].Close(patient(t)); !errors.Is(err, endpoint.ErrClosed) {
		t.Error(err)
	}
}

// A device that can reset its queue pairs reuses them; on others they are replaced.
func TestQueuePairsAreResetOrReplaced(t *testing.T) {
	for _, quirks := range []rdma.Quirks{{}, {NoReset: true}} {
		var mades, resets atomic.Int64
		p := newPair(t, soft.Config{Attributes: rdma.Attributes{Quirks: quirks}, Faults: soft.Faults{
			Call: func(_, call string) syscall.Errno {
				if call == "make a queue pair" {
					mades.Add(1)
				} else if strings.HasPrefix(call, "reset") {
					resets.Add(1)
				}
				return 0
			}}}, nil)
		const n = 5
		for i := range n {
			a := p.mustOpen(0)
			if a.Generation != uint64(i) {
				t.Errorf("generation %d, want %d", a.Generation, i)
			}
			a.Fail()
			<-a.Retired()
			a.Fail()
		}
		// At the end that is replaced, new queue pairs are prepared before the old ones are
		// drained.
		wantMade, wantReset := int64(3+2*3), int64(3*(2*n-1))
		if quirks.NoReset {
			wantMade, wantReset = 2*3*n, 0
		}
		if made, reset := mades.Load(), resets.Load(); made != wantMade || reset != wantReset {
			t.Errorf("%+v: %d made and %d reset, want %d and %d", quirks, made, reset, wantMade, wantReset)
		}
	}
}

// Retired queue pairs stay until they are drained, and there is a limit to them.
func TestRetiredQueuePairsAreDrained(t *testing.T) {
	var mu sync.Mutex
	var drains []func()
	prepared := map[*endpoint.Connection]int{}
	p := newPair(t, soft.Config{}, func(i int, cfg *endpoint.Config) {
		cfg.Retired, cfg.Spare = 2, -1
		if i == 0 {
			cfg.Prepare = func(c *endpoint.Connection) error {
				mu.Lock()
				defer mu.Unlock()
				prepared[c]++
				for _, q := range c.QPs {
					if s, err := q.State(); s != rdma.StateInit || err != nil {
						t.Errorf("%v, %v", s, err)
					}
				}
				return nil
			}
			cfg.Retire = func(c *endpoint.Connection, drained func()) {
				mu.Lock()
				defer mu.Unlock()
				prepared[c]--
				for _, q := range c.QPs {
					if s, err := q.State(); s != rdma.StateFailed || err != nil {
						t.Errorf("%v, %v", s, err)
					}
				}
				drains = append(drains, drained)
			}
		}
	})
	for range 2 {
		p.mustOpen(0).Fail()
	}
	var undrained *endpoint.UndrainedError
	if _, err := p.open(patient(t), 0); !errors.As(err, &undrained) || undrained.Connections != 2 {
		t.Fatal(err)
	}
	// The peer is told to come back later, and does until its queue pairs are drained.
	ctx, cancel := context.WithCancel(patient(t))
	p.call = func(_ context.Context, from int, b []byte) ([]byte, error) {
		if p.calls.Load() > 20 {
			cancel()
		}
		return p.handle(from, b)
	}
	b := p.table[1].Connections()
	for _, c := range b {
		c.Fail()
	}
	var refused *endpoint.RefusedError
	if _, err := p.open(ctx, 1); !errors.Is(err, context.Canceled) || !errors.As(err, &refused) || refused.Final {
		t.Fatal(err)
	}
	mu.Lock()
	drains[0]()
	drains[0]() // once counts
	mu.Unlock()
	p.call = nil
	p.mustOpen(1).Fail()
	mu.Lock()
	for _, drained := range drains[1:] {
		drained()
	}
	mu.Unlock()
	p.mustOpen(0)
	// Close does not wait for ever for the last one.
	ended, cancel := context.WithCancel(context.Background())
	cancel()
	if err := p.table[0].Close(ended); err == nil || !strings.Contains(err.Error(), "were not drained") {
		t.Error(err)
	}
	for c, n := range prepared {
		if n != 0 {
			t.Errorf("generation %d was prepared %d times more than retired", c.Generation, n)
		}
	}
}

// Whatever happens to a device during a handshake, waiting callers get a result, and nothing is
// left.
func TestDeviceFailsDuringHandshake(t *testing.T) {
	for _, c := range []struct {
		name string
		harm func(p *pair, call int64) // during a call
		want error                     // of the open; nil: it succeeds in the end
	}{
		{"removed here", func(p *pair, _ int64) { p.f.Remove("soft0") }, rdma.ErrRemoved},
		{"removed there", func(p *pair, _ int64) { p.f.Remove("soft1") }, &endpoint.RefusedError{}},
		{"port there is down for a while", func(p *pair, call int64) { p.f.SetPort("soft1", 1, call > 4) }, nil},
		{"addresses move", func(p *pair, _ int64) { p.f.MoveGIDs("soft1", 1, 2) }, nil},
		{"queue pair fails", func(p *pair, _ int64) { p.f.Break("soft0", 17) }, &rdma.Error{}},
	} {
		t.Run(c.name, func(t *testing.T) {
			p := newPair(t, soft.Config{}, nil)
			p.call = func(_ context.Context, from int, b []byte) ([]byte, error) {
				c.harm(p, p.calls.Load())
				return p.handle(from, b)
			}
			_, err := p.open(patient(t), 0)
			switch want := c.want.(type) {
			case nil:
				if err != nil {
					t.Error(err)
				}
				p.mustOpen(1)
			case *endpoint.RefusedError:
				if !errors.As(err, &want) {
					t.Error(err)
				}
			case *rdma.Error:
				if !errors.As(err, &want) {
					t.Error(err)
				}
			default:
				if !errors.Is(err, want) {
					t.Error(err)
				}
			}
		})
	}
}

func TestPortOfThisEndIsDown(t *testing.T) {
	p := newPair(t, soft.Config{}, nil)
	p.f.SetPort("soft0", 1, false)
	if _, err := p.open(patient(t), 0); err == nil || !strings.Contains(err.Error(), "until it is active") {
		t.Error(err)
	}
	p.f.SetPort("soft0", 1, true)
	p.mustOpen(0)
}

// TestAddressesAreReadAgain: the index of an address is another one when its port comes back, and
// connections that are made then use that.
func TestAddressesAreReadAgain(t *testing.T) {
	p := newPair(t, soft.Config{}, nil)
	for range 3 {
		c := p.mustOpen(0)
		p.f.SetPort("soft0", 1, false)
		c.Fail()
		if _, err := p.open(patient(t), 0); !errors.Is(err, endpoint.ErrPort) {
			t.Errorf("%v, want %v", err, endpoint.ErrPort)
		}
		p.f.MoveGIDs("soft0", 1, 2)
		p.f.SetPort("soft0", 1, true)
		p.mustOpen(0)
	}
}

func TestAddressIsChosen(t *testing.T) {
	for _, c := range []struct {
		address string
		want    string
	}{{"10.0.0.1", ""}, {"fe80::1", ""}, {"10.9.9.9", `the port has no address "10.9.9.9"`}} {
		p := newPair(t, soft.Config{}, func(i int, cfg *endpoint.Config) {
			if i == 0 {
				cfg.Address = netip.MustParseAddr(c.address)
			}
		})
		if _, err := p.open(patient(t), 0); c.want == "" && err != nil ||
			c.want != "" && (err == nil || !strings.Contains(err.Error(), c.want)) {
			t.Errorf("%s: %v", c.address, err)
		}
	}
}

func TestConfigsAreChecked(t *testing.T) {
	f, devices := fabric(t, soft.Config{})
	d, err := f.Open(devices[0], nil)
	if err != nil {
		t.Fatal(err)
	}
	defer d.Close()
	good := endpoint.Config{Session: 1, Device: d, Caller: callerFunc(nil), Queues: make([]rdma.QPConfig, 1)}
	if _, err := endpoint.New(good); err != nil {
		t.Fatal(err)
	}
	for what, change := range map[string]func(c *endpoint.Config){
		"session": func(c *endpoint.Config) { c.Session = 0 },
		"device":  func(c *endpoint.Config) { c.Device = nil },
		"caller":  func(c *endpoint.Config) { c.Caller = nil },
		"none":    func(c *endpoint.Config) { c.Queues = nil },
		"many":    func(c *endpoint.Config) { c.Queues = make([]rdma.QPConfig, endpoint.MaxQPs+1) },
		"port":    func(c *endpoint.Config) { c.Port = 2 },
		"MTU":     func(c *endpoint.Config) { c.Route.MTU = 1500 },
		"reads":   func(c *endpoint.Config) { c.Route.Reads = -1 },
		"calls":   func(c *endpoint.Config) { c.Calls = -1 },
		"pause":   func(c *endpoint.Config) { c.Pause = -1 },
	} {
		c := good
		change(&c)
		if _, err := endpoint.New(c); err == nil {
			t.Errorf("%s: no error", what)
		}
	}
}

func TestPeersAreLimited(t *testing.T) {
	p := newPair(t, soft.Config{}, func(_ int, cfg *endpoint.Config) { cfg.Peers = 1 })
	p.mustOpen(0)
	if _, err := p.table[0].Open(patient(t), "c"); err == nil || !strings.Contains(err.Error(),
		"Config.Peers allows 1") {
		t.Error(err)
	}
}

// A port that needs packets with an address gets them from both ends of its connections.
func TestPortsThatNeedAddresses(t *testing.T) {
	f, names := fabric(t, soft.Config{})
	endpointtest.RunSimultaneous(t, rdmatest.InfiniBand(f, "soft0"), names, 2, 2, endpointtest.Faults{}, nil)
}

// Queue pairs that a device resets without effect are replaced.
func TestResetWithoutEffect(t *testing.T) {
	reset := map[string]bool{} // by the queue pair
	p := newPair(t, soft.Config{Faults: soft.Faults{Call: func(device, call string) syscall.Errno {
		what, number, _ := strings.Cut(call, " queue pair ")
		switch at := device + " " + number; {
		case what == "reset":
			reset[at] = true
		case what == "initialize" && reset[at]:
			return syscall.EINVAL
		}
		return 0
	}}}, nil)
	for range 3 {
		p.mustOpen(0).Fail()
	}
}

// A queue pair that can be neither used nor closed is an error of Close.
func TestQueuePairsThatStayOpen(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	f := soft.New(soft.Config{Faults: soft.Faults{Call: func(_, call string) syscall.Errno {
		switch what, _, _ := strings.Cut(call, " queue pair "); what {
		case "initialize":
			return syscall.EINVAL
		case "destroy":
			cancel() // after the first attempt
			return syscall.EBUSY
		}
		return 0
	}}})
	t.Cleanup(f.Close)
	d, err := f.Open("soft0", nil)
	if err != nil {
		t.Fatal(err)
	}
	cq, err := d.NewCQ(64, nil)
	if err != nil {
		t.Fatal(err)
	}
	table, err := endpoint.New(endpoint.Config{Session: 1, Device: d,
		Queues: []rdma.QPConfig{{Send: cq, Recv: cq, SendDepth: 1, RecvDepth: 1}},
		Caller: callerFunc(func(context.Context, string, []byte) ([]byte, error) {
			return nil, errors.New("no peer")
		})})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := table.Open(ctx, "b"); err == nil {
		t.Error("connected")
	}
	if err := table.Close(patient(t)); !errors.Is(err, syscall.EBUSY) {
		t.Errorf("Close: %v, want %v", err, syscall.EBUSY)
	}
}
