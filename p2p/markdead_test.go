package p2p_test

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"tutti/mem"
	"tutti/p2p"
	"tutti/p2p/inproc"
)

// delayed delivers nothing while it is held, and late while the process stalls.
type delayed struct {
	p2p.Link
	held, stalls *atomic.Bool
}

func (d *delayed) Distant() {}

func (d *delayed) Recv() (*p2p.Header, []byte, error) {
	if d.held.Load() {
		return nil, nil, nil
	}
	if d.stalls.Load() {
		time.Sleep(2 * p2p.ReadFor)
	}
	return d.Link.Recv()
}

// leavers are two ranks. Tests can hold the network to the first; the second has successive
// incarnations.
type leavers struct {
	t      *testing.T
	linger time.Duration
	held   atomic.Bool
	stalls atomic.Bool
	mu     sync.Mutex
	all    [2]*p2p.Proxy
	lives  [2]uint64
}

func (x *leavers) settle(rank int, life uint64) *p2p.Proxy {
	id := p2p.Identity{Rank: rank, Incarnation: life}
	held, stalls := &x.held, &x.stalls
	if rank != 0 {
		held, stalls = new(atomic.Bool), new(atomic.Bool)
	}
	p := p2p.New(p2p.Config{Self: id, Size: 2, Secret: []byte("0123456789abcdef"), Threads: true, Oversubscribed: true,
		Linger: x.linger,
		Transports: []p2p.Transport{&wrapping{inproc.New(inproc.Config{RingBytes: 16 << 10}),
			func(l p2p.Link) p2p.Link { return &delayed{l, held, stalls} }}},
		Resolve: func(_ context.Context, r int) (p2p.Peer, error) {
			x.mu.Lock()
			defer x.mu.Unlock()
			return p2p.Peer{Identity: p2p.Identity{Rank: r, Incarnation: x.lives[r]}, Endpoints: x.all[r].Endpoints()},
				nil
		}})
	if _, err := p.Listen(context.Background()); err != nil {
		x.t.Fatal(err)
	}
	x.t.Cleanup(func() { p.Close() })
	x.mu.Lock()
	x.all[rank], x.lives[rank] = p, life
	x.mu.Unlock()
	return p
}

// leaver has rank 1 send its last messages, from number 2 on, and leave while the network delays
// them.
func leaver(t *testing.T, linger time.Duration, messages int) (x *leavers, c *p2p.Channel) {
	x = &leavers{t: t, linger: linger}
	a, b := x.settle(0, 1), x.settle(1, 2)
	c, far := open(t, a, 1, 2), open(t, b, 1, 2)
	put := func(p *p2p.Proxy, c *p2p.Channel, to int, seq uint64) {
		p.Lock()
		defer p.Unlock()
		if err := c.Send(patient(context.Background()), to, p2p.Token{Seq: seq}, []byte{byte(seq)}); err != nil {
			t.Fatal(err)
		}
	}
	put(a, c, 1, 1)
	x.held.Store(true)
	for i := range messages {
		put(b, far, 0, uint64(2+i))
	}
	b.Close()
	return x, c
}

// markedDead is leaver with one message, and has rank 0 mark rank 1 dead.
func markedDead(t *testing.T, linger time.Duration) (x *leavers, c *p2p.Channel) {
	x, c = leaver(t, linger, 1)
	x.all[0].MarkDead(1, 2, errLeft)
	return x, c
}

var errLeft = errors.New("it left")

// await takes the message seq of rank 1 at rank 0.
func await(p *p2p.Proxy, c *p2p.Channel, seq uint64) error {
	p.Lock()
	defer p.Unlock()
	var r p2p.Recv
	c.PostRecv(&r, 1, p2p.Token{Seq: seq}, make([]byte, 1), false)
	err := c.WaitRecv(patient(context.Background()), &r)
	if err == nil && r.View()[0] != byte(seq) {
		err = errors.New("another message")
	}
	return err
}

// Frames that a rank sent before it left arrive, even over a slow network; then its link ends and
// another incarnation may link.
func TestLastFramesOfLeaverArrive(t *testing.T) {
	x, c := markedDead(t, time.Hour)
	late := time.AfterFunc(200*time.Millisecond, func() { x.held.Store(false); x.all[0].Wake() })
	defer late.Stop()
	if err := await(x.all[0], c, 2); err != nil {
		t.Fatalf("what it sent last: %v", err)
	}
	var gone *p2p.PeerError
	if err := await(x.all[0], c, 3); !errors.As(err, &gone) || !errors.Is(err, errLeft) {
		t.Errorf("what it never sent: %v", err)
	}
	b := x.settle(1, 3)
	b.Reconnect(0)
	linked(t, x.all[0], 3)
}

// Frames that have arrived are read however slowly this process runs.
func TestLastFramesInMemoryAreRead(t *testing.T) {
	x, c := leaver(t, 0, 3)
	x.stalls.Store(true)
	x.held.Store(false)
	x.all[0].MarkDead(1, 2, errLeft)
	for seq := range uint64(3) {
		if err := await(x.all[0], c, 2+seq); err != nil {
			t.Errorf("message %d: %v", 2+seq, err)
		}
	}
}

// No rank waits for a leaver longer than Linger.
func TestLingerEnds(t *testing.T) {
	x, c := markedDead(t, 20*time.Millisecond)
	if err := await(x.all[0], c, 2); !errors.Is(err, errLeft) {
		t.Errorf("what the network keeps: %v", err)
	}
}

// Another incarnation of a leaver need not wait for frames in the network, whether it is expected
// or dials.
func TestNewIncarnationEndsOldLink(t *testing.T) {
	for name, come := range map[string]func(a, b *p2p.Proxy){
		"expected": func(a, _ *p2p.Proxy) { a.Expect(1, 3) },
		"dials":    func(_, b *p2p.Proxy) { b.Reconnect(0) },
	} {
		t.Run(name, func(t *testing.T) {
			x, c := markedDead(t, time.Hour)
			over := make(chan error, 1)
			go func() { over <- await(x.all[0], c, 2) }()
			b := x.settle(1, 3)
			come(x.all[0], b)
			if err := <-over; !errors.Is(err, errLeft) {
				t.Errorf("what the network keeps: %v", err)
			}
			b.Reconnect(0)
			linked(t, x.all[0], 3)
		})
	}
}

// Word that an incarnation is gone may come when the next one is linked: that one stays.
func TestNextIncarnationStays(t *testing.T) {
	x, _ := markedDead(t, 0)
	b := x.settle(1, 3)
	b.Reconnect(0)
	linked(t, x.all[0], 3)
	x.all[0].MarkDead(1, 2, errLeft)
	if life := x.all[0].Linked(1); life != 3 {
		t.Errorf("linked with incarnation %d, want 3", life)
	}
	x.held.Store(false)
	b.Close()
	x.all[0].MarkDead(1, 3, errLeft)
	linked(t, x.all[0], 0)
}

// linked waits until a is linked with an incarnation of rank 1.
func linked(t *testing.T, a *p2p.Proxy, life uint64) {
	t.Helper()
	w := patient(context.Background())
	for a.Linked(1) != life {
		a.Lock()
		err := a.Progress(w)
		a.Unlock()
		if err != nil {
			t.Fatalf("linked with life %d instead of %d: %v", a.Linked(1), life, err)
		}
	}
}

// What a rank has put before it was marked dead, and this rank has not placed, changes no memory:
// whoever was told that the rank is gone may use it for something else.
func TestMarkDeadEndsPuts(t *testing.T) {
	all := cluster(t, 2, 0, func(p2p.Transport) p2p.Transport { return transports["tcp"]() })
	defer closeAll(all)
	p, q := members(t, all)
	r, x := exposed(t, p, 64)
	stop := takesPart(t, p) // until the first put is placed
	var puts [2]p2p.Transfer
	put := func(w *p2p.Wait, i int) error {
		return q.c.Put(w, &puts[i], 0, mem.Host([]byte{byte(i + 1)}, mem.Anywhere), x, 8, p2p.Signal{At: x, Value: 7},
			nil)
	}
	if err := with(q, func(w *p2p.Wait) error {
		if err := put(w, 0); err != nil {
			return err
		}
		return q.c.WaitTransfer(w, &puts[0])
	}); err != nil {
		t.Fatal(err)
	}
	stop() // p is not polled
	clear(r.Bytes())
	if err := with(q, func(w *p2p.Wait) error { return put(w, 1) }); err != nil {
		t.Fatal(err)
	}
	q.Idle() // the frame is at p
	p.MarkDead(1, 2, p2p.ErrPeerGone)
	for i, v := range r.Bytes() {
		if v != 0 {
			t.Fatalf("byte %d was written afterwards: %d", i, v)
		}
	}
}
