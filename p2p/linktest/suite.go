package linktest

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"runtime"
	"slices"
	"sync"
	"testing"
	"time"

	"pgregory.net/rapid"

	"tutti/p2p"
)

// Run tests transports made by open: each call returns a new one that has not listened yet; all can
// reach each other. The subtests leave no goroutine and no descriptor behind.
func Run(t *testing.T, open func(tb testing.TB) p2p.Transport) { RunExcept(t, open) }

// RunExcept is Run without the subtests named, for a transport over a simulation of its devices:
// "Allocations" would count those of the simulation.
func RunExcept(t *testing.T, open func(tb testing.TB) p2p.Transport, names ...string) {
	s := suite{open}
	t.Run("Connect", func(t *testing.T) { Pair(t, open) }) // the runtime's poller opens descriptors once
	for _, c := range []struct {
		name string
		f    func(*testing.T)
	}{
		{"Order", s.order}, {"BothWays", s.bothWays}, {"Sizes", s.sizes}, {"Held", s.held},
		{"BackPressure", s.backPressure}, {"SendAfterRefusal", s.sendAfterRefusal}, {"Sleepers", s.sleepers},
		{"CloseDelivers", s.closeDelivers}, {"CloseWakes", s.closeWakes}, {"CloseTwice", s.closeTwice},
		{"CloseBesideUse", s.closeBesideUse},
		{"Mesh", s.mesh}, {"Crossing", s.crossing}, {"Refusals", s.refusals}, {"Clients", s.clients},
		{"WrongSecret", s.wrongSecret},
		{"NotWhomIDialled", s.notWhomIDialled},
		{"DialCancelled", s.dialCancelled}, {"Endpoints", s.endpoints}, {"TransportClose", s.transportClose},
		{"Regions", s.regions}, {"Allocations", s.allocations},
		{"Put", s.put}, {"Get", s.get}, {"Signal", s.signal}, {"Strong", s.strong}, {"Words", s.words},
		{"Unplaced", s.unplaced}, {"Completion", s.completion},
		{"ClosedHere", s.closedHere}, {"Revoke", s.revoke}, {"Flush", s.flush}, {"Now", s.now},
		{"Locations", s.locations},
	} {
		if !slices.Contains(names, c.name) {
			NoLeaks(t, c.name, c.f)
		}
	}
}

type suite struct {
	open func(testing.TB) p2p.Transport
}

func (s suite) node(tb testing.TB, rank int) *Node { return Listen(tb, s.open(tb), NewHost(rank)) }

func (s suite) pair(tb testing.TB) (a, b *End) { return Pair(tb, s.open) }

// order: any sequence of frames arrives as it was sent, whatever the two sides' turns.
func (s suite) order(t *testing.T) {
	a, b := s.pair(t)
	sent, received := 0, 0
	var sizes []int
	var buf []byte
	gatherer, gathers := a.Link.(p2p.Gatherer)
	bypasser, bypasses := a.Link.(p2p.Bypasser)
	rapid.Check(t, func(rt *rapid.T) {
		b.Fill = rapid.Bool().Draw(rt, "fill")
		for _, n := range rapid.SliceOfN(rapid.IntRange(0, a.MaxFrame()), 1, 20).Draw(rt, "sizes") {
			if rapid.Bool().Draw(rt, "small") {
				n %= 200
			}
			h, p := Frame(sent, n, buf)
			buf = p
			send := a.Send
			if gathers && rapid.Bool().Draw(rt, "gather") {
				send = gatherer.Gather
			}
			if bypasses && rapid.Bool().Draw(rt, "past") {
				send = bypasser.SendPast
			}
			for deadline := time.Now().Add(Patience); ; {
				ok, err := send(&h, p)
				if err != nil {
					rt.Fatal(err)
				}
				if ok {
					sizes = append(sizes, n)
					sent++
					break
				}
				s.drain(rt, a, b, &received, sizes, 1)
				if time.Now().After(deadline) {
					rt.Fatal("no room although the peer reads")
				}
			}
			s.drain(rt, a, b, &received, sizes, rapid.IntRange(0, 3).Draw(rt, "reads"))
		}
	})
	for deadline := time.Now().Add(Patience); received < sent; {
		s.drain(t, a, b, &received, sizes, 100)
		if time.Now().After(deadline) {
			t.Fatalf("%d frames sent, %d received", sent, received)
		}
	}
	if h, _, err := b.Recv(); h != nil || err != nil {
		t.Fatalf("after the last frame: %+v, %v", h, err)
	}
}

func (s suite) drain(tb interface{ Fatal(...any) }, a, b *End, received *int, sizes []int, most int) {
	for range most {
		if _, err := a.Flush(); err != nil {
			tb.Fatal(err)
		}
		h, p, ok, err := b.Take()
		if err != nil {
			tb.Fatal(err)
		}
		if !ok {
			continue
		}
		if *received >= len(sizes) {
			tb.Fatal("more frames than were sent")
		}
		if err := Check(*received, sizes[*received], h, p); err != nil {
			tb.Fatal(err)
		}
		*received++
	}
}

// bothWays: both directions at once, each end sending and receiving in turn without sleeping.
func (s suite) bothWays(t *testing.T) {
	a, b := s.pair(t)
	const frames = 300
	side := func(e *End, seed int) func() error {
		size := func(i int) int { return (i * 7919) % (min(e.MaxFrame(), 20000) + 1) }
		return func() error {
			var buf []byte
			deadline := time.Now().Add(Patience)
			for sent, got, turn := 0, 0, 0; sent < frames || got < frames; turn++ {
				if sent < frames {
					h, p := Frame(sent, size(sent), buf)
					buf = p
					if l, ok := e.Link.(p2p.Preparer); ok { // also for frames that are not sent then
						l.Prepare(size(sent + turn%2))
					}
					ok, err := e.Send(&h, p)
					if err != nil {
						return err
					}
					if ok {
						sent++
					}
				}
				if _, err := e.Flush(); err != nil {
					return err
				}
				h, p, ok, err := e.Take()
				if err != nil {
					return err
				}
				if ok {
					if err := Check(got, size(got), h, p); err != nil {
						return err
					}
					got++
				}
				if spin(turn); time.Now().After(deadline) {
					return fmt.Errorf("side %d: sent %d, received %d of %d", seed, sent, got, frames)
				}
			}
			return e.FlushAll()
		}
	}
	both(t, side(a, 0), side(b, 1))
}

// sizes: every edge of the payload's size, the largest many times over, so that buffers wrap.
func (s suite) sizes(t *testing.T) {
	a, b := s.pair(t)
	top := a.MaxFrame()
	if b.MaxFrame() != top || top < p2p.MinFrame {
		t.Fatalf("MaxFrame is %d at one end and %d at the other, want the same and at least %d", top, b.MaxFrame(),
			p2p.MinFrame)
	}
	var list []int
	for n := range 200 {
		list = append(list, min(n, top))
	}
	for n := 256; n < top; n *= 2 {
		list = append(list, n-1, n, n+1)
	}
	for range 40 {
		list = append(list, top, 0, top-1, 1)
	}
	both(t, func() error {
		for i, n := range list {
			h, p := Frame(i, n, nil)
			if err := a.Put(&h, p); err != nil {
				return err
			}
		}
		return a.FlushAll()
	}, func() error {
		for i, n := range list {
			b.Fill = i%3 == 0
			if err := b.Expect(i, n); err != nil {
				return err
			}
		}
		return nil
	})
}

// sendAfterRefusal: after a Send that was refused, Arm says that there is room or Wake is called,
// also if Flush has succeeded since.
func (s suite) sendAfterRefusal(t *testing.T) {
	a, b := s.pair(t)
	full := make(chan struct{})
	both(t, func() error {
		h, p := Frame(0, a.MaxFrame(), nil)
		ok, err := true, error(nil)
		for deadline := time.Now().Add(Patience); ok && err == nil && time.Now().Before(deadline); {
			ok, err = a.Send(&h, p)
		}
		close(full)
		if err != nil || ok {
			return fmt.Errorf("the last Send: %v, %w, want that it is refused", ok, err)
		}
		if err := a.FlushAll(); err != nil {
			return err
		}
		if err := a.Nap(); err != nil {
			return err
		}
		h, p = Frame(0, 0, nil)
		if err := a.Put(&h, p); err != nil {
			return err
		}
		return a.FlushAll()
	}, func() error {
		<-full
		for {
			if h, _, err := b.Wait(); err != nil || h.Len == 0 {
				return err
			}
		}
	})
}

// held: until Release, Recv returns the same frame.
func (s suite) held(t *testing.T) {
	a, b := s.pair(t)
	for i := range 3 {
		h, p := Frame(i, 100, nil)
		if err := a.Put(&h, p); err != nil {
			t.Fatal(err)
		}
	}
	if err := a.FlushAll(); err != nil {
		t.Fatal(err)
	}
	for i := range 3 {
		var first *p2p.Header
		var view []byte
		deadline := time.Now().Add(Patience)
		// A transport that returns parts only by Fill ends at the deadline: 100 bytes must fit its
		// own memory.
		for view == nil {
			var err error
			if first, view, err = b.Recv(); err != nil || time.Now().After(deadline) {
				t.Fatalf("frame %d: %v, %v", i, first, err)
			}
		}
		for range 3 {
			again, p, err := b.Recv()
			if err != nil || again == nil || *again != *first || &p[0] != &view[0] {
				t.Fatalf("frame %d: Recv gave another frame before Release (%+v, %v)", i, again, err)
			}
		}
		if err := Check(i, 100, *first, view); err != nil {
			t.Fatal(err)
		}
		b.Release()
	}
}

// backPressure: a sender whose peer does not read is refused in bounded memory, sleeps, and is
// woken.
func (s suite) backPressure(t *testing.T) {
	a, b := s.pair(t)
	n := a.MaxFrame()
	const limit = 256 << 20
	sent := 0
	for {
		h, p := Frame(sent, n, nil)
		ok, err := a.Send(&h, p)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := a.Flush(); err != nil {
			t.Fatal(err)
		}
		if !ok {
			break
		}
		if sent++; sent*n > limit {
			t.Fatalf("%d bytes taken while the peer does not read", sent*n)
		}
	}
	const more = 50
	both(t, func() error {
		for i := range more {
			h, p := Frame(sent+i, n, nil)
			if err := a.Put(&h, p); err != nil {
				return err
			}
		}
		return a.FlushAll()
	}, func() error {
		for i := range sent + more {
			if err := b.Expect(i, n); err != nil {
				return err
			}
		}
		return nil
	})
}

// sleepers: ends that sleep at every chance lose no wake-up.
func (s suite) sleepers(t *testing.T) {
	a, b := s.pair(t)
	rounds := 3000
	if testing.Short() {
		rounds = 300
	}
	both(t, func() error {
		for i := range rounds {
			h, p := Frame(i, i%100, nil)
			if err := a.Put(&h, p); err != nil {
				return err
			}
			if err := a.FlushAll(); err != nil {
				return err
			}
			h, p, err := a.Wait()
			if err != nil {
				return fmt.Errorf("round %d, first: %w", i, err)
			}
			if err := Check(i, i%50, h, p); err != nil {
				return err
			}
		}
		return nil
	}, func() error {
		for i := range rounds {
			h, p, err := b.Wait()
			if err != nil {
				return fmt.Errorf("round %d, second: %w", i, err)
			}
			if err := Check(i, i%100, h, p); err != nil {
				return err
			}
			h, p = Frame(i, i%50, nil)
			if err := b.Put(&h, p); err != nil {
				return err
			}
			if err := b.FlushAll(); err != nil {
				return err
			}
		}
		return nil
	})
}

// gone waits until e reports that its peer is gone.
func gone(e *End) error {
	h, _, err := e.Wait()
	if !errors.Is(err, p2p.ErrPeerGone) {
		return fmt.Errorf("got frame %+v and error %v, want %v", h, err, p2p.ErrPeerGone)
	}
	probe, p := Frame(0, 0, nil)
	if ok, err := e.Send(&probe, p); ok || !errors.Is(err, p2p.ErrPeerGone) {
		return fmt.Errorf("a Send to a peer that is gone: %v, %v", ok, err)
	}
	if _, err := e.Flush(); !errors.Is(err, p2p.ErrPeerGone) {
		return fmt.Errorf("a Flush to a peer that is gone: %v", err)
	}
	if !errors.Is(e.Err(), p2p.ErrPeerGone) {
		return fmt.Errorf("the link's Err: %v, want %v", e.Err(), p2p.ErrPeerGone)
	}
	if !e.Arm() {
		return errors.New("a failed link's Arm lets a caller sleep")
	}
	return nil
}

// closeDelivers: what was flushed before Close arrives, also at an end that first sends something
// itself, and then ErrPeerGone.
func (s suite) closeDelivers(t *testing.T) {
	deliver := func(frames, answers int) {
		a, b := s.pair(t)
		for i := range frames {
			h, p := Frame(i, 10*i, nil)
			if err := a.Put(&h, p); err != nil {
				t.Fatal(err)
			}
		}
		if err := a.FlushAll(); err != nil {
			t.Fatal(err)
		}
		if a.Err() != nil || b.Err() != nil {
			t.Fatalf("Err of working ends: %v, %v", a.Err(), b.Err())
		}
		if err := a.Close(); err != nil {
			t.Fatal(err)
		}
		for i := range answers {
			h, p := Frame(i, 100, nil)
			if err := cmp.Or(b.Put(&h, p), b.FlushAll()); err != nil {
				if !errors.Is(err, p2p.ErrPeerGone) {
					t.Fatalf("sending to a peer that has closed: %v", err)
				}
				break
			}
		}
		for i := range frames {
			h, p, err := b.Wait()
			if err != nil {
				t.Fatalf("frame %d of %d that were flushed before Close: %v", i, frames, err)
			}
			if err := Check(i, 10*i, h, p); err != nil {
				t.Fatal(err)
			}
		}
		if err := gone(b); err != nil {
			t.Fatal(err)
		}
	}
	deliver(0, 0)
	deliver(1, 0)
	deliver(20, 0)
	deliver(20, 10)
}

// closeWakes: an end that sleeps is woken when its peer closes.
func (s suite) closeWakes(t *testing.T) {
	for range 20 {
		a, b := s.pair(t)
		both(t, func() error { return gone(a) }, b.Close)
	}
}

// closeTwice: Close is idempotent, also from several goroutines, and everything fails afterwards.
func (s suite) closeTwice(t *testing.T) {
	a, b := s.pair(t)
	var wg sync.WaitGroup
	for range 8 {
		for _, e := range []*End{a, b} {
			wg.Go(func() {
				if err := e.Close(); err != nil {
					t.Error(err)
				}
			})
		}
	}
	wg.Wait()
	for _, e := range []*End{a, b} {
		h, p := Frame(0, 8, nil)
		if ok, err := e.Send(&h, p); ok || err == nil {
			t.Errorf("Send after Close: %v, %v", ok, err)
		}
		if h, _, err := e.Recv(); h != nil || err == nil {
			t.Errorf("Recv after Close: %v, %v", h, err)
		}
		if _, err := e.Link.Fill(make([]byte, 1)); err == nil {
			t.Error("Fill after Close: no error")
		}
		if _, err := e.Flush(); err == nil {
			t.Error("Flush after Close: no error")
		}
		if e.Err() == nil {
			t.Error("Err after Close: nil")
		}
		if !e.Arm() {
			t.Error("Arm after Close lets the caller sleep")
		}
		e.Disarm()
		e.Release()
	}
}

// closeBesideUse: Close from another goroutine while both ends are in use.
func (s suite) closeBesideUse(t *testing.T) {
	for round := range 30 {
		a, b := s.pair(t)
		started := make(chan struct{}, 2)
		deadline := time.Now().Add(Patience)
		use := func(e *End) func() error {
			return func() error {
				start := sync.OnceFunc(func() { started <- struct{}{} })
				defer start() // the closer waits for it
				h, p := Frame(0, 500, nil)
				for i := 0; ; i++ {
					if i%1024 == 1023 && time.Now().After(deadline) {
						a.Close() // the other side may wait for it
						return fmt.Errorf("%d turns, and the link is not closed", i)
					}
					if i == 10*round {
						start()
					}
					_, err := e.Send(&h, p)
					if err == nil {
						_, err = e.Flush()
					}
					if err == nil {
						var got p2p.Header
						var ok bool
						if got, _, ok, err = e.Take(); ok && e.Err() == nil && got != h {
							return fmt.Errorf("header %+v, want %+v", got, h)
						}
						_, p = Frame(0, 500, nil)
					}
					if err != nil {
						if !errors.Is(err, p2p.ErrPeerGone) && !errors.Is(err, p2p.ErrClosed) {
							return fmt.Errorf("after Close: %w", err)
						}
						return nil
					}
					spin(i)
				}
			}
		}
		done := make(chan struct{})
		go func() {
			defer close(done)
			<-started
			<-started
			a.Close()
		}()
		both(t, use(a), use(b))
		<-done
	}
}

// mesh: one transport, many links; traffic does not mix.
func (s suite) mesh(t *testing.T) {
	const n = 4
	var nodes []*Node
	for r := range n {
		nodes = append(nodes, s.node(t, r))
	}
	ends := map[[2]int]*End{}
	for i := range n {
		for j := range i {
			if err := nodes[i].T.Reaches(nodes[j].Endpoint); err != nil {
				t.Fatalf("Reaches: %v", err)
			}
			ends[[2]int{i, j}], ends[[2]int{j, i}] = Connect(t, nodes[i], nodes[j])
		}
	}
	for k, e := range ends {
		h, p := Frame(k[0]*n+k[1], 64, nil)
		if err := e.Put(&h, p); err != nil {
			t.Fatal(err)
		}
		if err := e.FlushAll(); err != nil {
			t.Fatal(err)
		}
	}
	for k, e := range ends {
		h, p, err := e.Wait()
		if err != nil {
			t.Fatal(err)
		}
		if err := Check(k[1]*n+k[0], 64, h, p); err != nil {
			t.Fatalf("from %d to %d: %v", k[1], k[0], err)
		}
	}
}

// crossing: two ranks that dial each other at once end with one link when Admit decides for one
// direction.
func (s suite) crossing(t *testing.T) {
	for range 20 {
		a, b := s.node(t, 0), s.node(t, 1)
		a.Allow(func(p2p.Identity) error { return fmt.Errorf("rank 0 dials itself: %w", p2p.ErrSuperseded) })
		both(t, func() error {
			l, err := a.Dial(b)
			if err == nil {
				l.Close()
			}
			return err
		}, func() error {
			l, err := b.Dial(a)
			if err == nil {
				l.Close()
				return errors.New("both directions were admitted")
			}
			if !errors.Is(err, p2p.ErrSuperseded) {
				return err
			}
			return nil
		})
		b.Next(t).Link.Close()
	}
}

// refusals: the dialler gets the reason of a refusal, and no link is handed over.
func (s suite) refusals(t *testing.T) {
	a, b := s.node(t, 0), s.node(t, 1)
	for _, want := range []error{p2p.ErrSuperseded, p2p.ErrFailed, p2p.ErrStale, errors.New("not today")} {
		b.Allow(func(from p2p.Identity) error {
			if from != a.ID {
				t.Errorf("Admit was asked about %v, want %v", from, a.ID)
			}
			return fmt.Errorf("said the host: %w", want)
		})
		l, err := a.Dial(b)
		if err == nil {
			l.Close()
			t.Fatalf("admitted in spite of %v", want)
		}
		for _, typed := range []error{p2p.ErrSuperseded, p2p.ErrFailed, p2p.ErrStale, p2p.ErrAuth} {
			if errors.Is(err, typed) != errors.Is(want, typed) {
				t.Errorf("refused with %v, the dialler sees %v", want, err)
			}
		}
	}
	b.Allow(nil)
	Connect(t, a, b)
	if len(b.In) != 0 {
		t.Error("a refused connection was handed over")
	}
}

// clients: both ends can tell a client from a rank.
func (s suite) clients(t *testing.T) {
	c := NewHost(0)
	c.ID = p2p.Identity{Incarnation: c.ID.Incarnation, Role: p2p.RoleClient}
	a, b := Listen(t, s.open(t), c), s.node(t, 1)
	b.Allow(func(from p2p.Identity) error {
		if from != a.ID {
			t.Errorf("Admit was asked about %v, want %v", from, a.ID)
		}
		return nil
	})
	l, err := a.Dial(b)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	in := b.Next(t)
	defer in.Link.Close()
	if in.From != a.ID {
		t.Errorf("the link is of %v, want %v", in.From, a.ID)
	}
	b.Allow(func(p2p.Identity) error { return fmt.Errorf("no clients: %w", p2p.ErrStale) })
	if l, err := a.Dial(b); !errors.Is(err, p2p.ErrStale) {
		if err == nil {
			l.Close()
		}
		t.Errorf("a refused client: %v, want %v", err, p2p.ErrStale)
	}
}

// wrongSecret: neither side's Admit or Accepted is ever reached without the secret.
func (s suite) wrongSecret(t *testing.T) {
	stranger := NewHost(0)
	stranger.Key = []byte("another secret, of 32 bytes also")
	a, b := Listen(t, s.open(t), stranger), s.node(t, 1)
	never := func(p2p.Identity) error { t.Error("Admit was asked about a stranger"); return nil }
	a.Allow(never)
	b.Allow(never)
	for _, c := range [][2]*Node{{a, b}, {b, a}} {
		if l, err := c[0].Dial(c[1]); !errors.Is(err, p2p.ErrAuth) {
			if err == nil {
				l.Close()
			}
			t.Errorf("Dial with the wrong secret: %v, want %v", err, p2p.ErrAuth)
		}
	}
	if len(a.In)+len(b.In) != 0 {
		t.Error("a stranger's connection was handed over")
	}
}

// notWhomIDialled: an endpoint that belongs to another incarnation now.
func (s suite) notWhomIDialled(t *testing.T) {
	a, b := s.node(t, 0), s.node(t, 1)
	b.Allow(func(p2p.Identity) error { t.Error("Admit was asked although another was dialled"); return nil })
	for _, id := range []p2p.Identity{{Rank: 1, Incarnation: b.ID.Incarnation + 1},
		{Rank: 2, Incarnation: b.ID.Incarnation}} {
		ctx, cancel := context.WithTimeout(context.Background(), Patience)
		l, err := a.T.Dial(ctx, id, b.Endpoint)
		cancel()
		if err == nil {
			l.Close()
		}
		if !errors.Is(err, p2p.ErrStale) {
			t.Errorf("dialled %v at %v: %v, want %v", id, b.ID, err, p2p.ErrStale)
		}
	}
}

// dialCancelled: Dial ends with its context.
func (s suite) dialCancelled(t *testing.T) {
	a, b := s.node(t, 0), s.node(t, 1)
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	if l, err := a.T.Dial(ctx, b.ID, b.Endpoint); !errors.Is(err, context.Canceled) {
		if err == nil {
			l.Close()
		}
		t.Errorf("Dial with a cancelled context: %v", err)
	}
	// Depending on timing b has accepted the connection; then its link ends.
	select {
	case in := <-b.In:
		in.Link.Close()
	default:
	}
	ctx, cancel = context.WithCancel(context.Background())
	defer cancel()
	b.Allow(func(p2p.Identity) error { cancel(); return p2p.ErrStale })
	if l, err := a.T.Dial(ctx, b.ID, b.Endpoint); err == nil {
		l.Close()
		t.Error("Dial succeeded although it was refused and cancelled")
	}
}

// endpoints: invalid endpoints are refused.
func (s suite) endpoints(t *testing.T) {
	a, b := s.node(t, 0), s.node(t, 1)
	bad := [][]byte{nil, {}, {0}, []byte("garbage"), make([]byte, len(b.Endpoint)), b.Endpoint[:len(b.Endpoint)/2],
		make([]byte, p2p.MaxEndpoint), make([]byte, 2*p2p.MaxEndpoint)}
	for range 50 {
		random := make([]byte, rand.IntN(100))
		for i := range random {
			random[i] = byte(rand.Uint32())
		}
		bad = append(bad, random)
	}
	for _, ep := range bad {
		if err := a.T.Reaches(ep); err == nil {
			t.Errorf("Reaches(%q): no error", ep)
		}
		ctx, cancel := context.WithTimeout(context.Background(), Patience)
		if l, err := a.T.Dial(ctx, b.ID, ep); err == nil {
			l.Close()
			t.Errorf("Dial(%q): no error", ep)
		}
		cancel()
	}
}

// transportClose: links outlive their transport, which accepts no more.
func (s suite) transportClose(t *testing.T) {
	a, b := s.node(t, 0), s.node(t, 1)
	x, y := Connect(t, a, b)
	for range 2 {
		if err := b.T.Close(); err != nil {
			t.Fatal(err)
		}
	}
	h, p := Frame(1, 50, nil)
	if err := x.Put(&h, p); err != nil {
		t.Fatal(err)
	}
	if err := x.FlushAll(); err != nil {
		t.Fatal(err)
	}
	got, q, err := y.Wait()
	if err != nil {
		t.Fatal(err)
	}
	if err := Check(1, 50, got, q); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), Patience)
	defer cancel()
	if l, err := a.T.Dial(ctx, b.ID, b.Endpoint); err == nil || ctx.Err() != nil {
		if err == nil {
			l.Close()
		}
		t.Errorf("Dial of a closed transport: %v (context: %v)", err, ctx.Err())
	}
	if len(b.In) != 0 {
		t.Error("a link was handed over after Close")
	}
	if _, err := b.T.Dial(ctx, a.ID, a.Endpoint); err == nil {
		t.Error("Dial from a closed transport: no error")
	}
}

// Map maps a region of the peer of e within Patience.
func Map(e *End, id uint64) (*p2p.Mapping, error) {
	for deadline := time.Now().Add(Patience); ; runtime.Gosched() {
		if m, err := e.Link.(p2p.Mapper).Map(id); m != nil || err != nil {
			return m, err
		}
		if time.Now().After(deadline) {
			return nil, fmt.Errorf("region %#x: no answer for %v", id, Patience)
		}
	}
}

// regions: memory that one side allocates and the other maps. Only for transports that can.
func (s suite) regions(t *testing.T) {
	a, b := s.node(t, 0), s.node(t, 1)
	x, y := Connect(t, a, b)
	_, ok := x.Link.(p2p.Mapper)
	alloc, ok2 := b.T.(p2p.Allocator)
	if !ok || !ok2 {
		t.Logf("%s maps no regions, and does not say that it does", a.T.Name())
		return
	}
	seen := map[uint64]bool{}
	for _, n := range []int{1, 4096, 4097, 3<<20 + 5} {
		r, err := alloc.Alloc(n)
		if err != nil {
			t.Fatal(err)
		}
		if r.Len() != n || r.ID == 0 || seen[r.ID] || pageOffset(r.Bytes()) != 0 {
			t.Fatalf("Alloc(%d): %d bytes at page offset %d, id %#x", n, r.Len(), pageOffset(r.Bytes()), r.ID)
		}
		seen[r.ID] = true
		for _, v := range r.Bytes() {
			if v != 0 {
				t.Fatal("memory is not zeroed")
			}
		}
		b.Share(r.ID, r)
		if _, err := Map(x, r.ID+1); !errors.Is(err, p2p.ErrNoRegion) {
			t.Errorf("mapping a region that does not exist: %v, want %v", err, p2p.ErrNoRegion)
		}
		view, err := Map(x, r.ID)
		if err != nil {
			t.Fatal(err)
		}
		r.Bytes()[0], r.Bytes()[n-1] = 7, 9
		if n > 1 && view.Mem[0] != 7 || view.Mem[n-1] != 9 || len(view.Mem) != n {
			t.Fatal("the mapping is other memory")
		}
		again, err := Map(x, r.ID)
		if err != nil || &again.Mem[0] != &view.Mem[0] {
			t.Errorf("a second Map gave another mapping (%v)", err)
		}
		again.Release()
		b.Share(r.ID, nil)
		if err := r.Free(); err != nil {
			t.Fatal(err)
		}
		if view.Mem[n-1] != 9 {
			t.Error("a mapping that is in use has changed when its owner freed the region")
		}
		view.Release()
	}
	r, err := alloc.Alloc(100)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := Map(x, r.ID); !errors.Is(err, p2p.ErrNoRegion) {
		t.Errorf("Map of a region that is not shared: %v", err)
	}
	r.Free()
	if _, err := Map(x, r.ID); !errors.Is(err, p2p.ErrNoRegion) {
		t.Errorf("Map of a region that is freed: %v", err)
	}
	if _, err := alloc.Alloc(0); err == nil {
		t.Error("Alloc(0): no error")
	}
	both(t, func() error { // a round trip during traffic and wake-ups
		for i := range 100 {
			h, p := Frame(i, 64, nil)
			if err := x.Put(&h, p); err != nil {
				return err
			}
		}
		return nil
	}, func() error {
		for i := range 100 {
			h, p, err := y.Wait()
			if err != nil {
				return err
			}
			if err := Check(i, 64, h, p); err != nil {
				return err
			}
			if _, err := Map(x, r.ID); !errors.Is(err, p2p.ErrNoRegion) {
				return fmt.Errorf("mapping a region that does not exist, beside traffic: %v, want %v", err,
					p2p.ErrNoRegion)
			}
		}
		return nil
	})
	y.Close()
	if _, err := Map(x, 99); err == nil {
		t.Error("Map from a peer that is gone: no error")
	}
	x.Close()
	if _, err := Map(x, r.ID); err == nil {
		t.Error("Map on a closed link: no error")
	}
}

// allocations: warm calls allocate nothing.
func (s suite) allocations(t *testing.T) {
	if raceEnabled {
		t.Log("the race detector allocates: nothing to see")
		return
	}
	a, b := s.pair(t)
	h, p := Frame(0, min(1000, a.MaxFrame()), nil)
	one := func() {
		for deadline := 0; ; deadline++ {
			if ok, err := a.Send(&h, p); err != nil || deadline > 1e9 {
				t.Fatal(err)
			} else if ok {
				break
			}
		}
		for {
			if _, err := a.Flush(); err != nil {
				t.Fatal(err)
			}
			b.Arm()
			b.Disarm()
			if _, _, ok, err := b.Take(); err != nil {
				t.Fatal(err)
			} else if ok {
				return
			}
		}
	}
	for range 2000 {
		one()
	}
	if n := testing.AllocsPerRun(2000, one); n >= 1 {
		t.Errorf("%v allocations a frame", n)
	}
}

func pageOffset(b []byte) int { return int(address(b) % uintptr(os.Getpagesize())) }
