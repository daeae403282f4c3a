// Package endpointtest tests package endpoint over the devices of any provider.
package endpointtest

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"
	"time"
	"unsafe"

	"tutti/mem"
	"tutti/rdma"
	"tutti/rdma/endpoint"
)

// Patience is how long a test waits for what has to happen.
const Patience = 2 * time.Minute

// Faults are what the network between tables does to calls, beside delivering them in any order.
// The zero value does nothing.
type Faults struct {
	Lose      float64 // share of requests, and of replies, that are lost
	Duplicate float64 // share of requests that arrive again when some other call is made
}

// Cluster is ranks that call each other within the process.
type Cluster struct {
	t        testing.TB
	provider rdma.Provider
	devices  []string
	change   func(cfg *endpoint.Config)
	faults   Faults

	carriers sync.WaitGroup

	mu      sync.Mutex
	rng     *rand.Rand
	ranks   []*Rank
	packets []func() // on their way
	late    []func() // requests that will arrive again, when another call is made
	some    sync.Cond
	closed  bool
}

// carriers is the number of packets that arrive at the same time.
const carriers = 4

// Rank is one life of a rank.
type Rank struct {
	Number int
	Table  *endpoint.Table
	Device rdma.Device

	c      *Cluster
	cq     rdma.CQ
	words  []uint64 // one for each rank, which it writes to; then those that are written from
	mr     rdma.MR
	wake   chan struct{}
	stop   chan struct{}
	polled sync.WaitGroup

	mu      sync.Mutex
	writes  uint64
	waiting map[uint64]chan<- rdma.Status
}

// New starts n ranks, which use the devices in turn. Change, if it is not nil, is called with the
// configuration of every table. The ranks end with the test.
func New(t testing.TB, provider rdma.Provider, devices []string, n int, faults Faults,
	change func(cfg *endpoint.Config)) *Cluster {
	c := &Cluster{t: t, provider: provider, devices: devices, change: change, faults: faults,
		rng: rand.New(rand.NewPCG(1, 2)), ranks: make([]*Rank, n)}
	c.some.L = &c.mu
	for range carriers {
		c.carriers.Go(c.carry)
	}
	for i := range n {
		c.start(i)
	}
	t.Cleanup(func() {
		for i := range n {
			c.Rank(i).end()
		}
		c.mu.Lock()
		c.closed = true
		c.some.Broadcast()
		c.mu.Unlock()
		c.carriers.Wait()
	})
	return c
}

// carry has packets arrive, in any order, until the test ends.
func (c *Cluster) carry() {
	c.mu.Lock()
	defer c.mu.Unlock()
	for {
		n := len(c.packets)
		switch {
		case n > 0:
			i := c.rng.IntN(n)
			arrive := c.packets[i]
			c.packets[i] = c.packets[n-1]
			c.packets = c.packets[:n-1]
			c.mu.Unlock()
			arrive()
			c.mu.Lock()
		case c.closed:
			return
		default:
			c.some.Wait()
		}
	}
}

// sendLocked puts a packet on its way.
func (c *Cluster) sendLocked(arrive func()) {
	c.packets = append(c.packets, arrive)
	c.some.Signal()
}

// Rank returns the present life of a rank.
func (c *Cluster) Rank(i int) *Rank {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.ranks[i]
}

// Name returns the name of a rank.
func Name(i int) string { return fmt.Sprintf("rank %d", i) }

func (c *Cluster) start(i int) {
	r := &Rank{Number: i, c: c, words: make([]uint64, 2*len(c.ranks)), wake: make(chan struct{}, 1),
		stop: make(chan struct{}), waiting: map[uint64]chan<- rdma.Status{}}
	must := func(err error) {
		if err != nil {
			c.t.Error(err)
			panic(err)
		}
	}
	var err error
	r.Device, err = c.provider.Open(c.devices[i%len(c.devices)], nil)
	must(err)
	r.cq, err = r.Device.NewCQ(16*len(c.ranks), func() {
		select {
		case r.wake <- struct{}{}:
		default:
		}
	})
	must(err)
	b := unsafe.Slice((*byte)(unsafe.Pointer(unsafe.SliceData(r.words))), 8*len(r.words))
	r.mr, err = r.Device.Register(mem.Host(b, mem.Anywhere), rdma.LocalWrite|rdma.RemoteWrite)
	must(err)
	qp := rdma.QPConfig{Send: r.cq, Recv: r.cq, SendDepth: 4, RecvDepth: 1}
	cfg := endpoint.Config{Session: rand.Uint64() | 1, Device: r.Device, Caller: caller{c, i},
		Queues: []rdma.QPConfig{qp, qp}, Access: rdma.LocalWrite | rdma.RemoteWrite}
	if c.change != nil {
		c.change(&cfg)
	}
	r.Table, err = endpoint.New(cfg)
	must(err)
	r.polled.Add(1)
	go r.poll()
	c.mu.Lock()
	c.ranks[i] = r
	c.mu.Unlock()
}

// end ends a life.
func (r *Rank) end() {
	ctx, cancel := context.WithTimeout(context.Background(), Patience)
	defer cancel()
	// If the device is gone, so are the queue pairs, and closing them may fail.
	err := r.Table.Close(ctx)
	close(r.stop)
	r.polled.Wait()
	err = errors.Join(err, r.cq.Close(), r.mr.Close(), r.Device.Close())
	if err != nil {
		r.c.t.Errorf("rank %d ends: %v", r.Number, err)
	}
}

// Restart ends the present life of a rank, and begins another one.
func (c *Cluster) Restart(i int) {
	c.Rank(i).end()
	c.start(i)
}

// caller is the Caller of a rank.
type caller struct {
	c    *Cluster
	from int
}

var errLost = errors.New("no reply: lost by the test")

// Call implements endpoint.Caller.
func (k caller) Call(ctx context.Context, peer string, b []byte) ([]byte, error) {
	c := k.c
	var to int
	if _, err := fmt.Sscanf(peer, "rank %d", &to); err != nil {
		return nil, err
	}
	type result struct {
		reply []byte
		err   error
	}
	done := make(chan result, 1)
	handle := func() result {
		reply, err := c.Rank(to).Table.Handle(Name(k.from), b)
		return result{reply, err}
	}
	c.mu.Lock()
	if n := len(c.late); n > 0 {
		i := c.rng.IntN(n)
		c.sendLocked(c.late[i])
		c.late[i] = c.late[n-1]
		c.late = c.late[:n-1]
	}
	if c.rng.Float64() < c.faults.Duplicate {
		c.late = append(c.late, func() { handle() })
	}
	loseRequest, loseReply := c.rng.Float64() < c.faults.Lose, c.rng.Float64() < c.faults.Lose
	if !loseRequest {
		c.sendLocked(func() {
			r := handle()
			c.mu.Lock()
			defer c.mu.Unlock()
			c.sendLocked(func() { done <- r })
		})
	}
	c.mu.Unlock()
	if loseRequest {
		return nil, errLost
	}
	select {
	case r := <-done:
		if loseReply {
			return nil, errLost
		}
		return r.reply, r.err
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

// poll gives completions to the goroutines that wait for them, until stop.
func (r *Rank) poll() {
	defer r.polled.Done()
	var out [rdma.PollBatch]rdma.Completion
	for armed := false; ; {
		n, err := r.cq.Poll(out[:])
		if err != nil {
			r.mu.Lock() // the device is gone
			for _, w := range r.waiting {
				w <- rdma.FatalError
			}
			clear(r.waiting)
			r.mu.Unlock()
			<-r.stop
			return
		}
		for _, c := range out[:n] {
			r.mu.Lock()
			w := r.waiting[c.ID]
			delete(r.waiting, c.ID)
			r.mu.Unlock()
			if w != nil {
				w <- c.Status
			}
		}
		if n > 0 {
			armed = false
			continue
		}
		if !armed {
			armed = r.cq.Arm() == nil
			continue
		}
		armed = false
		select {
		case <-r.wake:
		case <-r.stop:
			return
		}
	}
}

// write writes a word to a peer by every queue pair of a connection.
func (r *Rank) write(ctx context.Context, conn *endpoint.Connection, to *Rank) error {
	return Write(ctx, conn, func(done chan<- rdma.Status) rdma.SendRequest {
		r.mu.Lock()
		defer r.mu.Unlock()
		r.writes++
		r.waiting[r.writes] = done
		return rdma.SendRequest{ID: r.writes, Segments: []rdma.Segment{{
			Address: address(&r.words[len(r.c.ranks)+to.Number]), Key: r.mr.LocalKey(), Len: 8}},
			// Every rank has a word of its own there.
			RemoteAddress: address(&to.words[r.Number]), RemoteKey: to.mr.RemoteKey()}
	})
}

// Write writes by every queue pair of a connection, one after the other. next returns the request,
// with an ID of its own, whose completion is to be sent to done.
func Write(ctx context.Context, conn *endpoint.Connection,
	next func(done chan<- rdma.Status) rdma.SendRequest) error {
	for _, q := range conn.QPs {
		done := make(chan rdma.Status, 1)
		w := next(done)
		w.Op, w.Signaled = rdma.Write, true
		if _, err := q.Post([]rdma.SendRequest{w}); err != nil {
			return err
		}
		select {
		case s := <-done:
			if s != rdma.Success {
				return &rdma.StatusError{Status: s, Op: rdma.Write, QP: q.Number()}
			}
		case <-conn.Retired():
			return errors.New("the connection was retired")
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	return nil
}

func address(w *uint64) uint64 { return uint64(uintptr(unsafe.Pointer(w))) }

// Meet has every rank of from open each of to at the same time, and returns how long that took.
// Then each of them writes to the peer. A connection over which that fails is dead: there may be
// none, unless mayFail is set. Then it is replaced, until a write succeeds.
func (c *Cluster) Meet(from, to []int, mayFail bool) time.Duration {
	c.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), Patience)
	defer cancel()
	var wg sync.WaitGroup
	all := func(do func(r, to *Rank) error) {
		for _, i := range from {
			for _, j := range to {
				if i != j {
					wg.Go(func() {
						if err := do(c.Rank(i), c.Rank(j)); err != nil {
							c.t.Errorf("rank %d to rank %d: %v", i, j, err)
						}
					})
				}
			}
		}
		wg.Wait()
	}
	begin := time.Now()
	all(func(r, to *Rank) error {
		_, err := r.Table.Open(ctx, Name(to.Number))
		return err
	})
	took := time.Since(begin)
	all(func(r, to *Rank) error {
		for {
			conn, err := r.Table.Open(ctx, Name(to.Number))
			if err != nil {
				return err
			}
			if err = r.write(ctx, conn, to); err == nil || !mayFail || ctx.Err() != nil {
				return err
			}
			conn.Fail()
		}
	})
	return took
}

// All returns the numbers of all ranks.
func (c *Cluster) All() (all []int) {
	for i := range c.ranks {
		all = append(all, i)
	}
	return all
}

// RunSimultaneous has n ranks open each other at the same time, and returns how long that took. All
// restart and do it again, until there were at least so many opens.
func RunSimultaneous(t testing.TB, provider rdma.Provider, devices []string, n, opens int, faults Faults,
	change func(cfg *endpoint.Config)) (took time.Duration) {
	c := New(t, provider, devices, n, faults, change)
	for {
		took += c.Meet(c.All(), c.All(), faults != Faults{})
		if opens -= n * (n - 1); opens <= 0 || t.Failed() {
			return took
		}
		var wg sync.WaitGroup
		for i := range n {
			wg.Go(func() { c.Restart(i) })
		}
		wg.Wait()
	}
}

// RunRestarts has n ranks open each other while others restart, several times.
func RunRestarts(t testing.TB, provider rdma.Provider, devices []string, n, rounds int, faults Faults,
	change func(cfg *endpoint.Config)) {
	c := New(t, provider, devices, n, faults, change)
	for round := range rounds {
		restarted := round % n
		var others []int
		for _, i := range c.All() {
			if i != restarted {
				others = append(others, i)
			}
		}
		var wg sync.WaitGroup
		wg.Go(func() { c.Restart(restarted) })
		c.Meet(others, others, true)
		wg.Wait()
		c.Meet(c.All(), c.All(), true)
	}
}

// RunVanished has a rank write to a peer whose queue pairs are gone without notice: the device has
// to give up. The ranks keep the repetitions of endpoint.DefaultRoute.
func RunVanished(t testing.TB, provider rdma.Provider, devices []string) {
	c := New(t, provider, devices, 2, Faults{}, nil)
	c.Meet(c.All(), c.All(), true) // a busy machine may answer late
	ctx, cancel := context.WithTimeout(context.Background(), Patience)
	defer cancel()
	open := func(from, to int) *endpoint.Connection {
		conn, err := c.Rank(from).Table.Open(ctx, Name(to))
		if err != nil {
			t.Fatal(err)
		}
		return conn
	}
	for _, q := range open(1, 0).QPs {
		if err := q.Close(); err != nil {
			t.Fatal(err)
		}
	}
	err := c.Rank(0).write(ctx, open(0, 1), c.Rank(1))
	if s := (*rdma.StatusError)(nil); !errors.As(err, &s) || s.Status != rdma.RetryExceeded {
		t.Errorf("a write to queue pairs that are gone: %v, expected %v", err, rdma.RetryExceeded)
	}
}
