package p2p_test

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"tutti/mem"
	"tutti/p2p"
	"tutti/p2p/inproc"
	"tutti/p2p/linktest"
	"tutti/p2p/rma"
	"tutti/p2p/shm"
	"tutti/p2p/tcp"
)

// transports are those whose links have remote memory.
var transports = map[string]func() p2p.Transport{
	"inproc": func() p2p.Transport { return inproc.New(inproc.Config{RingBytes: 16 << 10}) },
	"shm":    func() p2p.Transport { return shm.New(shm.Config{}) },
	"tcp":    func() p2p.Transport { return tcp.New(tcp.Config{Interfaces: "lo"}) },
}

// party is a rank on a channel.
type party struct {
	*p2p.Proxy
	c *p2p.Channel
}

func members(t *testing.T, all []*p2p.Proxy) (p, q party) {
	return party{all[0], open(t, all[0], 1, 2)}, party{all[1], open(t, all[1], 1, 2)}
}

// each runs f with two ranks that are linked over each transport.
func each(t *testing.T, f func(t *testing.T, p, q party)) {
	for name, make := range transports {
		t.Run(name, func(t *testing.T) {
			all := cluster(t, 2, 0, func(p2p.Transport) p2p.Transport { return make() })
			defer closeAll(all)
			p, q := members(t, all)
			f(t, p, q)
		})
	}
}

// exposed is memory of p that q may use.
func exposed(t *testing.T, p party, n int) (*p2p.Region, *mem.Remote) {
	t.Helper()
	r, err := p.AllocWritable(n)
	if err != nil {
		t.Fatal(err)
	}
	x, err := p.Expose(r, 0, n, mem.Read|mem.Write|mem.Signal)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := p.Withdraw(context.Background(), x); err != nil {
			t.Error(err)
		}
	})
	return r, x
}

// with runs f with the lock of p.
func with(p party, f func(w *p2p.Wait) error) error {
	p.Lock()
	defer p.Unlock()
	return f(patient(context.Background()))
}

// takesPart has p take part until stop has returned, or the test ends.
func takesPart(t *testing.T, p party) (stop func()) {
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() {
		defer close(done)
		p.Lock()
		defer p.Unlock()
		for w := patient(ctx); p.Progress(w) == nil; {
		}
	}()
	return func() {
		cancel()
		<-done
	}
}

// TestTransfers: what one rank puts and signals the other sees, and the other way round.
func TestTransfers(t *testing.T) {
	each(t, func(t *testing.T, p, q party) {
		const n = 1 << 20
		r, x := exposed(t, p, n)
		back, y := exposed(t, q, 64)
		served := make(chan error, 1)
		const rounds = 50
		go func() {
			served <- with(p, func(w *p2p.Wait) error {
				var ack p2p.Transfer
				for i := uint64(1); i <= rounds; i++ {
					if _, err := p.c.WaitWord(w, 1, r.Word(0), func(v uint64) bool { return v >= i }); err != nil {
						return err
					}
					if b := r.Bytes()[64 : 64+i*1000]; !bytes.Equal(b, bytes.Repeat([]byte{byte(i)}, len(b))) {
						return fmt.Errorf("signal %d came before its data", i)
					}
					if err := p.c.Put(w, &ack, 1, mem.Memory{}, nil, 0, p2p.Signal{At: y, Value: i}, nil); err != nil {
						return err
					}
					if err := p.c.WaitTransfer(w, &ack); err != nil {
						return err
					}
				}
				// The peer reads, and gets answers while this rank polls.
				_, err := p.c.WaitWord(w, 1, r.Word(0), func(v uint64) bool { return v > rounds })
				return err
			})
		}()
		if err := with(q, func(w *p2p.Wait) error {
			var put, get, flush p2p.Transfer
			for i := uint64(1); i <= rounds; i++ {
				local := bytes.Repeat([]byte{byte(i)}, int(i)*1000)
				err := q.c.Put(w, &put, 0, mem.Host(local, mem.Anywhere), x, 64, p2p.Signal{At: x, Value: i}, nil)
				if err != nil {
					return err
				}
				if err := q.c.FlushPuts(w, &flush, 0); err != nil {
					return err
				}
				if err := q.c.WaitTransfer(w, &flush); err != nil {
					return err
				}
				if !put.Done() || put.Err() != nil || put.Bytes() != len(local) {
					return fmt.Errorf("a put that was flushed: %v, %d bytes, %v", put.Done(), put.Bytes(), put.Err())
				}
				if _, err := q.c.WaitWord(w, 0, back.Word(0), func(v uint64) bool { return v >= i }); err != nil {
					return err
				}
			}
			got := make([]byte, rounds*1000)
			if err := q.c.Get(w, &get, 0, mem.Host(got, mem.Anywhere), x, 64); err != nil {
				return err
			}
			err := q.c.WaitTransfer(w, &get)
			if err != nil || !bytes.Equal(got, bytes.Repeat([]byte{rounds}, len(got))) {
				return fmt.Errorf("get: %w, or other bytes", err)
			}
			if err := q.c.Put(w, &put, 0, mem.Memory{}, nil, 0, p2p.Signal{At: x, Value: rounds + 1}, nil); err != nil {
				return err
			}
			return q.c.WaitTransfer(w, &put)
		}); err != nil {
			t.Error(err)
		}
		if err := <-served; err != nil {
			t.Error(err)
		}
		const sum = 1000 * rounds * (rounds + 1) / 2
		countsTransfers(t, q, p2p.PeerCounts{Puts: rounds + 1, BytesPut: sum, Gets: 1, BytesGot: 1000 * rounds})
		countsTransfers(t, p, p2p.PeerCounts{Puts: rounds})
	})
}

// countsTransfers checks what p has counted of its transfers with its one peer.
func countsTransfers(t *testing.T, p party, want p2p.PeerCounts) {
	t.Helper()
	p.Lock()
	defer p.Unlock()
	all := p.Counts()
	if len(all) != 1 {
		t.Fatalf("%d peers are counted, want 1", len(all))
	}
	if c := all[0]; c.Puts != want.Puts || c.BytesPut != want.BytesPut || c.Gets != want.Gets ||
		c.BytesGot != want.BytesGot {
		t.Errorf("%d puts of %d bytes and %d gets of %d bytes are counted, want %d, %d, %d and %d", c.Puts, c.BytesPut,
			c.Gets, c.BytesGot, want.Puts, want.BytesPut, want.Gets, want.BytesGot)
	}
}

// TestForbiddenTransfers: the error gives the reason, and the link does not fail.
func TestForbiddenTransfers(t *testing.T) {
	each(t, func(t *testing.T, p, q party) {
		_, x := exposed(t, p, 4096)
		stop := make(chan struct{})
		served := make(chan error, 1)
		ctx, cancel := context.WithCancel(t.Context())
		go func() { // progress at the target
			w := patient(ctx)
			p.Lock()
			defer p.Unlock()
			for {
				if err := p.Progress(w); err != nil {
					served <- nil
					return
				}
			}
		}()
		defer func() { cancel(); close(stop); <-served }()
		local := mem.Host(make([]byte, 100), mem.Anywhere)
		try := func(to *mem.Remote, off uint64) error {
			return with(q, func(w *p2p.Wait) error {
				var put p2p.Transfer
				if err := q.c.Put(w, &put, 0, local, to, off, p2p.Signal{}, nil); err != nil {
					return err
				}
				return q.c.WaitTransfer(w, &put)
			})
		}
		if err := try(x, 0); err != nil {
			t.Fatal(err)
		}
		if err := try(x, 4000); !errors.Is(err, p2p.ErrBounds) {
			t.Errorf("out of bounds: %v", err)
		}
		stale := *x
		stale.Generation += 1 << 32
		var access *p2p.AccessError
		if err := try(&stale, 0); !errors.Is(err, p2p.ErrRevoked) || !errors.As(err, &access) || access.Region != x.ID {
			t.Errorf("a generation that never was: %v", err)
		}
		elsewhere := *x
		elsewhere.Keys = []mem.Key{{Path: "nvlink"}}
		var peer *p2p.PeerError
		err := try(&elsewhere, 0)
		if !errors.Is(err, errors.ErrUnsupported) || !errors.As(err, &peer) || peer.Rank != 0 {
			t.Errorf("no path: %v", err)
		}
		if err := with(q, func(w *p2p.Wait) error {
			return q.c.Put(w, new(p2p.Transfer), 0, mem.Device(0x1000, 8, "cuda:0"), x, 0, p2p.Signal{}, nil)
		}); !errors.Is(err, errors.ErrUnsupported) {
			t.Errorf("memory of a device: %v", err)
		}
		device := mem.NewRegion(9, mem.Device(1, 8, "cuda:0"), false, false, nil)
		if _, err := p.Expose(device, 0, 8, mem.Read); !errors.Is(err, errors.ErrUnsupported) {
			t.Errorf("exposing memory of a device: %v", err)
		}
		if err := try(x, 0); err != nil {
			t.Errorf("after what was not allowed: %v", err)
		}
		if err := p.Withdraw(t.Context(), x); err != nil {
			t.Fatal(err)
		}
		if err := try(x, 0); !errors.Is(err, p2p.ErrRevoked) {
			t.Errorf("after Withdraw: %v", err)
		}
		countsTransfers(t, q, p2p.PeerCounts{Puts: 2, BytesPut: 200}) // not those that failed
	})
}

// TestTransfersEndWithPeer: every transfer under way ends with an error when the peer is gone; so
// does a wait for its signal.
func TestTransfersEndWithPeer(t *testing.T) {
	each(t, func(t *testing.T, p, q party) {
		const n = 4 << 20
		_, x := exposed(t, p, n)
		mine, _ := exposed(t, q, 64)
		p.Lock() // p makes no progress: over tcp nothing ends
		var all [60]p2p.Transfer
		buf := make([]byte, n)
		ready := make(chan error, 1)
		go func() { // the link is made by both sides
			ready <- with(q, func(w *p2p.Wait) error {
				for i := range all {
					var err error
					if i%2 == 0 {
						err = q.c.Put(w, &all[i], 0, mem.Host(buf, mem.Anywhere), x, 0, p2p.Signal{}, nil)
					} else {
						err = q.c.Get(w, &all[i], 0, mem.Host(buf, mem.Anywhere), x, 0)
					}
					if err != nil {
						return err
					}
				}
				return nil
			})
		}()
		p.Unlock()
		if err := <-ready; err != nil {
			t.Fatal(err)
		}
		waiting := make(chan error, 1)
		go func() {
			waiting <- with(q, func(w *p2p.Wait) error {
				_, err := q.c.WaitWord(w, 0, mine.Word(0), func(v uint64) bool { return v > 0 })
				return err
			})
		}()
		p.Close()
		var peer *p2p.PeerError
		if err := <-waiting; !errors.Is(err, p2p.ErrPeerGone) || !errors.As(err, &peer) || peer.Rank != 0 {
			t.Errorf("who waits for a signal gets %v", err)
		}
		for i := range all {
			err := with(q, func(w *p2p.Wait) error { return q.c.WaitTransfer(w, &all[i]) })
			if err != nil && (!errors.Is(err, p2p.ErrPeerGone) || !errors.As(err, &peer) || peer.Rank != 0) {
				t.Errorf("transfer %d ended with %v", i, err)
			}
		}
		if err := with(q, func(w *p2p.Wait) error {
			return q.c.Put(w, new(p2p.Transfer), 0, mem.Host(buf, mem.Anywhere), x, 0, p2p.Signal{}, nil)
		}); !errors.Is(err, p2p.ErrPeerGone) {
			t.Errorf("a put to a rank that is gone: %v", err)
		}
	})
}

// violated is a link that fails with err once the peer has violated the protocol.
type violated struct {
	muted
	err     error // of the link
	refused error // of puts, while the link works
	ids     []uint64
	ended   []p2p.Completion
}

func (v *violated) Recv() (*p2p.Header, []byte, error) { return nil, nil, v.err }
func (v *violated) Err() error                         { return v.err }
func (v *violated) Put(id uint64, _ mem.Memory, _ *mem.Remote, _ uint64, _ p2p.Signal) error {
	if err := cmp.Or(v.err, v.refused); err != nil {
		return err
	}
	v.ids = append(v.ids, id)
	return nil
}
func (v *violated) Get(uint64, mem.Memory, *mem.Remote, uint64) error { return errors.ErrUnsupported }
func (v *violated) FlushPuts(uint64) error                            { return errors.ErrUnsupported }
func (v *violated) Cancel(uint64)                                     {}
func (v *violated) Poll(out []p2p.Completion) int {
	for _, id := range v.ids {
		if v.err != nil {
			v.ended = append(v.ended, p2p.Completion{ID: id, Err: v.err})
		}
	}
	if v.err != nil {
		v.ids = nil
	}
	n := copy(out, v.ended)
	v.ended = v.ended[n:]
	return n
}

// TestTransfersEndWithAViolation: transfers with a peer that violates the protocol end as with one
// that is gone, whether they are under way or begin before anybody has read that the link failed.
func TestTransfersEndWithAViolation(t *testing.T) {
	link := func(t *testing.T) (*p2p.Proxy, *p2p.Channel, *violated, func(*p2p.Transfer) error) {
		p, a := accepting(t, p2p.Identity{Rank: 0, Incarnation: 1}, 2, true)
		c := open(t, p, 1, 2)
		l := &violated{muted: muted{fails: &atomic.Bool{}}}
		accept(t, a.host, p2p.Identity{Rank: 1, Incarnation: 2}, l)
		x := &mem.Remote{ID: 1, Generation: 1, Len: 8, Rights: mem.Write, Loc: mem.Anywhere,
			Keys: []mem.Key{{Path: "hostile"}}}
		return p, c, l, func(put *p2p.Transfer) error {
			return c.Put(patient(t.Context()), put, 1, mem.Host(make([]byte, 8), mem.Anywhere), x, 0, p2p.Signal{}, nil)
		}
	}
	violation := fmt.Errorf("%w: as a test wants", p2p.ErrProtocol)
	check := func(t *testing.T, err error, gone bool) {
		t.Helper()
		var peer *p2p.PeerError
		if !errors.As(err, &peer) || peer.Rank != 1 || !errors.Is(err, p2p.ErrProtocol) ||
			errors.Is(err, p2p.ErrPeerGone) != gone {
			t.Errorf("it ends with %v (%T)", err, err)
		}
	}
	t.Run("under way", func(t *testing.T) {
		p, c, l, begin := link(t)
		p.Lock()
		defer p.Unlock()
		var put p2p.Transfer
		if err := begin(&put); err != nil {
			t.Fatal(err)
		}
		l.err = violation
		check(t, c.WaitTransfer(patient(t.Context()), &put), true)
		check(t, begin(&put), true)
	})
	t.Run("not read yet", func(t *testing.T) {
		p, _, l, begin := link(t)
		p.Lock()
		defer p.Unlock()
		l.err = violation
		check(t, begin(new(p2p.Transfer)), true)
	})
	t.Run("the link works", func(t *testing.T) { // the peer describes its memory wrongly
		p, _, l, begin := link(t)
		p.Lock()
		defer p.Unlock()
		l.refused = violation
		check(t, begin(new(p2p.Transfer)), false)
		if l.refused = nil; begin(new(p2p.Transfer)) != nil {
			t.Error("the link does not work any more")
		}
	})
	t.Run("tcp", func(t *testing.T) {
		peer := linktest.NewHost(1)
		at := linktest.Listen(t, transports["tcp"](), peer)
		p := p2p.New(p2p.Config{Self: p2p.Identity{Rank: 0, Incarnation: 1}, Size: 2, Secret: linktest.Secret,
			Transports: []p2p.Transport{transports["tcp"]()}, Threads: true, Oversubscribed: true,
			Resolve: func(context.Context, int) (p2p.Peer, error) {
				return p2p.Peer{Identity: peer.ID, Endpoints: map[string][]byte{"tcp": at.Endpoint}}, nil
			}})
		defer p.Close()
		if _, err := p.Listen(t.Context()); err != nil {
			t.Fatal(err)
		}
		c := open(t, p, 1, 2)
		x := &mem.Remote{ID: 1, Generation: 1, Len: 8, Rights: mem.Write, Loc: mem.Anywhere,
			Keys: []mem.Key{{Path: "tcp"}}}
		p.Lock()
		defer p.Unlock()
		var put p2p.Transfer
		err := c.Put(patient(t.Context()), &put, 1, mem.Host(make([]byte, 8), mem.Anywhere), x, 0, p2p.Signal{}, nil)
		if err != nil {
			t.Fatal(err)
		}
		l := (<-peer.In).Link
		defer l.Close()
		if ok, err := l.Send(&p2p.Header{Service: rma.Service, Kind: 77}, nil); !ok || err != nil {
			t.Fatal(ok, err)
		}
		if _, err := l.Flush(); err != nil {
			t.Fatal(err)
		}
		check(t, c.WaitTransfer(patient(t.Context()), &put), true)
	})
}

// TestPutsEndWithTheChannel: a rank that has closed the channel gets no put any more, short or
// long, although its memory is still exposed.
func TestPutsEndWithTheChannel(t *testing.T) {
	each(t, func(t *testing.T, p, q party) {
		r, x := exposed(t, p, 64)
		stop := takesPart(t, p) // until the ranks are linked
		put := func(w *p2p.Wait, v byte) error {
			local := []byte{v}
			if q.c.PutNow(0, local, x, 0, nil) {
				return nil
			}
			var put p2p.Transfer
			if err := q.c.Put(w, &put, 0, mem.Host(local, mem.Anywhere), x, 0, p2p.Signal{}, nil); err != nil {
				return err
			}
			return q.c.WaitTransfer(w, &put)
		}
		if err := with(q, func(w *p2p.Wait) error {
			for range 3 { // the later ones may be at once
				if err := put(w, 1); err != nil {
					return err
				}
			}
			return nil
		}); err != nil {
			t.Fatal(err)
		}
		stop()
		p.c.Close()
		if err := with(q, func(w *p2p.Wait) error {
			for !q.c.Closed(0) {
				if err := q.Progress(w); err != nil {
					t.Fatal(err)
				}
			}
			return put(w, 2)
		}); !errors.As(err, new(*p2p.PeerError)) || !errors.Is(err, p2p.ErrPeerGone) {
			t.Errorf("a put to a rank that has closed the channel: %v", err)
		}
		if v := r.Bytes()[0]; v != 1 {
			t.Errorf("its memory has %d", v)
		}
	})
}

// cancels is a link that notes which transfers were cancelled.
type cancels struct {
	p2p.Link
	p2p.OneSided
	ids *sync.Map
}

func (c cancels) Cancel(id uint64) {
	c.ids.Store(id, true)
	c.OneSided.Cancel(id)
}

// TestTransfersOfALinkThatIsGivenUp: they are cancelled at the link, which works, before they end:
// a device may be using their memory.
func TestTransfersOfALinkThatIsGivenUp(t *testing.T) {
	var ids sync.Map
	all := cluster(t, 2, 0, func(p2p.Transport) p2p.Transport {
		tr := transports["tcp"]()
		return struct {
			*wrapping
			p2p.Exposer
		}{&wrapping{tr, func(l p2p.Link) p2p.Link { return cancels{l, l.(p2p.OneSided), &ids} }}, tr.(p2p.Exposer)}
	})
	defer closeAll(all)
	p, q := members(t, all)
	const n = 4 << 20
	_, x := exposed(t, p, n)
	stop := takesPart(t, p) // until the ranks are linked
	var gets [2]p2p.Transfer
	if err := with(q, func(w *p2p.Wait) error {
		if err := q.c.Get(w, &gets[0], 0, mem.Host(make([]byte, 8), mem.Anywhere), x, 0); err != nil {
			return err
		}
		return q.c.WaitTransfer(w, &gets[0])
	}); err != nil {
		t.Fatal(err)
	}
	stop()
	if err := with(q, func(w *p2p.Wait) error {
		return q.c.Get(w, &gets[1], 0, mem.Host(make([]byte, n), mem.Anywhere), x, 0)
	}); err != nil {
		t.Fatal(err)
	}
	q.Close()
	cancelled := 0
	ids.Range(func(any, any) bool { cancelled++; return true })
	if cancelled == 0 {
		t.Error("nothing was cancelled")
	}
}

// TestCancelledTransfersReleaseMemory: a rank whose time is up gets its memory back at once.
func TestCancelledTransfersReleaseMemory(t *testing.T) {
	all := cluster(t, 2, 0, func(p2p.Transport) p2p.Transport { return transports["tcp"]() })
	defer closeAll(all)
	p, q := members(t, all)
	const n = 1 << 20
	r, x := exposed(t, p, n)
	for i := range r.Bytes() {
		r.Bytes()[i] = 7
	}
	stop := takesPart(t, p) // until it is told not to
	buf := make([]byte, n)
	var get p2p.Transfer
	if err := with(q, func(w *p2p.Wait) error {
		if err := q.c.Get(w, &get, 0, mem.Host(buf[:8], mem.Anywhere), x, 0); err != nil {
			return err
		}
		return q.c.WaitTransfer(w, &get)
	}); err != nil {
		t.Fatal(err)
	}
	stop() // p is not polled
	clear(buf)
	short, end := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer end()
	if err := with(q, func(*p2p.Wait) error {
		w := patient(short)
		if err := q.c.Get(w, &get, 0, mem.Host(buf, mem.Anywhere), x, 0); err != nil {
			return err
		}
		return q.c.WaitTransfer(w, &get)
	}); !errors.Is(err, context.DeadlineExceeded) {
		t.Fatalf("a get that is not served: %v", err)
	}
	if !get.Done() || !errors.Is(get.Err(), p2p.ErrCancelled) {
		t.Errorf("it is done: %v, with %v", get.Done(), get.Err())
	}
	served := make(chan error, 1)
	again, stop := context.WithCancel(t.Context())
	go func() {
		p.Lock()
		defer p.Unlock()
		var err error
		for w := patient(again); err == nil; {
			err = p.Progress(w)
		}
		served <- nil
	}()
	if err := with(q, func(w *p2p.Wait) error { // what was asked for comes before this
		if err := q.c.Get(w, &get, 0, mem.Host(make([]byte, 8), mem.Anywhere), x, 0); err != nil {
			return err
		}
		return q.c.WaitTransfer(w, &get)
	}); err != nil {
		t.Error(err)
	}
	stop()
	<-served
	for i, v := range buf {
		if v != 0 {
			t.Fatalf("byte %d was written after the get was given up", i)
		}
	}
}
