package exec

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
	"time"
	"unsafe"

	"tutti/collectives"
	"tutti/internal/leaktest"
	"tutti/kernels"
	"tutti/p2p"
	"tutti/p2p/inproc"
)

func TestMain(m *testing.M) { leaktest.Main(m) }

// patience bounds what ends at once when all is well.
const patience = 30 * time.Second

// A rank of a test has its proxy and a Runner for each of some groups of all ranks.
type rank struct {
	proxy   *p2p.Proxy
	runners []*runner
}

type runner struct {
	*Runner
	wait  p2p.Wait
	proxy *p2p.Proxy
	coll  *p2p.Channel
	slot  int
	size  int
	seq   uint64
}

// ranks makes n ranks in as many groups. Their links lend messages of a chunk where they are taken
// for memory, and none that is as long as a chunk where they are not.
func ranks(t testing.TB, n, groups int, memory bool) []*rank {
	t.Helper()
	same := func(tr *inproc.Transport) p2p.Transport { return tr }
	return ranksOver(t, n, groups, Config{}, collectives.Caps{SharedMemory: memory}, same)
}

// ranksOver is ranks with the other fields of cfg, over what wrap makes of the transports.
func ranksOver(t testing.TB, n, groups int, cfg Config, caps collectives.Caps,
	wrap func(*inproc.Transport) p2p.Transport) []*rank {
	t.Helper()
	all := make([]*rank, n)
	everyone := make([]int, n)
	id := func(r int) p2p.Identity { return p2p.Identity{Rank: r, Incarnation: uint64(r) + 1} }
	for r := range all {
		everyone[r] = r
		all[r] = &rank{proxy: p2p.New(p2p.Config{Self: id(r), Size: n, Secret: bytes.Repeat([]byte("s"), 32),
			Transports: []p2p.Transport{wrap(inproc.New(inproc.Config{RingBytes: 512 << 10}))}, Threads: true,
			Oversubscribed: true, Turn: 16 << 10, Resolve: func(_ context.Context, rank int) (p2p.Peer, error) {
				return p2p.Peer{Identity: id(rank), Endpoints: all[rank].proxy.Endpoints()}, nil
			}})}
	}
	t.Cleanup(func() {
		for _, r := range all {
			r.proxy.Close()
		}
	})
	for r, it := range all {
		if _, err := it.proxy.Listen(t.Context()); err != nil {
			t.Fatal(err)
		}
		for g := range groups {
			c, err := it.proxy.Open(p2p.Name{Number: uint64(g) + 1}, p2p.Epoch{}, everyone, nil, false)
			if err != nil {
				t.Fatal(err)
			}
			x := &runner{proxy: it.proxy, coll: c, slot: r, size: n}
			of := cfg
			of.Proxy, of.Wait, of.Rank = it.proxy, &x.wait, r
			of.Chosen, of.Keep = func(collectives.Algo) {}, func(*Bound) {}
			x.Runner = New(of)
			it.proxy.Lock()
			x.Open(c, everyone)
			x.Settle(Topology{Size: n, Active: everyone, Caps: caps, Asks: caps.Mapped})
			it.proxy.Unlock()
			it.runners = append(it.runners, x)
		}
	}
	return all
}

// run runs one collective; algo may be Auto.
func (x *runner) run(ctx context.Context, q *Request, algo collectives.Algo) error {
	x.proxy.Lock()
	defer x.proxy.Unlock()
	if algo != x.set.Algo {
		now := x.set.Topology
		now.Algo = algo
		x.Settle(now)
	}
	x.wait.Reset(ctx, patience, false)
	x.seq++
	if b := x.Recall(q); b != nil {
		x.Use(b, q.Dst.Ptr, q.Src.Ptr)
	} else {
		c, bad := Check(q, x.slot, x.size)
		if bad != nil {
			return fmt.Errorf("%+v", bad)
		}
		x.Adopt(c)
	}
	err := x.Run(x.seq, false)
	if err != nil {
		x.coll.Forget()
		x.Stop()
	}
	return err
}

func buffer[T any](x []T, dt kernels.DType) Buffer {
	return Buffer{Ptr: unsafe.Pointer(unsafe.SliceData(x)), Count: len(x), DType: dt}
}

// Long results are made without the proxy's lock: in the middle of each another goroutine can have
// it.
func TestLargeTransfersReleaseTheLock(t *testing.T) {
	const n = 2
	all := ranks(t, n, 1, false)
	calls := 0
	var mu sync.Mutex
	testHookUnlocked = func() {
		mu.Lock()
		calls++
		mu.Unlock()
		had := make(chan struct{})
		go func() {
			for _, r := range all {
				r.proxy.Closed() // takes the lock
			}
			close(had)
		}()
		select {
		case <-had:
		case <-time.After(patience):
			t.Error("memory is moved with the lock")
		}
	}
	defer func() { testHookUnlocked = func() {} }()
	const count = 256 << 10
	for _, c := range []struct {
		what string
		q    func(rank int) *Request
		min  int // long pieces of work at both ranks
	}{
		{"a copy", func(int) *Request {
			return &Request{Kind: collectives.AllGather, Src: buffer(make([]int32, count), kernels.Int32),
				Dst: buffer(make([]int32, n*count), kernels.Int32)}
		}, 2},
		{"a reduction of messages that the link does not lend", func(int) *Request {
			x := buffer(make([]int32, 4*count), kernels.Int32)
			return &Request{Kind: collectives.ReduceScatter, Op: kernels.Sum, Src: x,
				Dst: buffer(make([]int32, 4*count/n), kernels.Int32)}
		}, 1},
		{"a conversion", func(int) *Request {
			x := buffer(make([]uint16, count), kernels.BFloat16)
			return &Request{Kind: collectives.AllReduce, Op: kernels.Sum, Src: x, Dst: x}
		}, 4},
	} {
		calls = 0
		algo := collectives.Auto
		if c.what == "a conversion" {
			algo = collectives.Ring
		}
		errs := make([]error, n)
		var wg sync.WaitGroup
		for r, it := range all {
			wg.Go(func() { errs[r] = it.runners[0].run(t.Context(), c.q(r), algo) })
		}
		wg.Wait()
		if err := errors.Join(errs...); err != nil {
			t.Fatalf("%s: %v", c.what, err)
		}
		if calls < c.min {
			t.Errorf("%s: the lock was given up %d times, want %d or more", c.what, calls, c.min)
		}
	}
}

// Several groups of the same ranks at once: every result is right, although each group moves memory
// while the others use the links, take back what these lend, and fill what is posted.
func TestConcurrentGroups(t *testing.T) {
	const n, groups = 3, 3
	rounds := 60
	if testing.Short() {
		rounds = 15
	}
	all := ranks(t, n, groups, true)
	ctx, cancel := context.WithCancel(t.Context())
	var others sync.WaitGroup
	for _, r := range all { // a waiter that ends the loans of links
		others.Go(func() {
			var w p2p.Wait
			w.Reset(ctx, 0, false)
			r.proxy.Lock()
			defer r.proxy.Unlock()
			for r.proxy.Progress(&w) == nil {
			}
		})
	}
	var wg sync.WaitGroup
	errs := make([]error, n*groups)
	for r, it := range all {
		for g, x := range it.runners {
			wg.Go(func() {
				same := rand.New(rand.NewPCG(7, uint64(g)))
				for round := range rounds {
					count := 1 + same.IntN(1<<(8+same.IntN(11)))
					algos := collectives.Algorithms(collectives.AllReduce)
					algo := algos[same.IntN(len(algos))]
					own := make([]int64, count)
					for i := range own {
						own[i] = int64((r + 1) * (i + round))
					}
					out := own
					if same.IntN(2) == 0 {
						out = make([]int64, count)
					}
					q := &Request{Kind: collectives.AllReduce, Op: kernels.Sum, Src: buffer(own, kernels.Int64),
						Dst: buffer(out, kernels.Int64)}
					if err := x.run(ctx, q, algo); err != nil {
						errs[r*groups+g] = fmt.Errorf("rank %d, group %d, round %d: %w", r, g, round, err)
						return
					}
					for i, v := range out {
						if want := int64(n * (n + 1) / 2 * (i + round)); v != want {
							errs[r*groups+g] = fmt.Errorf("rank %d, group %d, round %d: element %d of %d by %v is %d, "+
								"want %d", r, g, round, i, count, algo, v, want)
							cancel()
							return
						}
					}
				}
			})
		}
	}
	wg.Wait()
	cancel()
	others.Wait()
	for _, err := range errs {
		if err != nil {
			t.Error(err)
		}
	}
}

// A channel that is closed in the middle of an operation ends it with an error, whatever it does,
// and its memory is left alone from then on.
func TestChannelClosedWhileMemoryMoves(t *testing.T) {
	const n = 3
	rounds := 60
	if testing.Short() {
		rounds = 20
	}
	for round := range rounds {
		all := ranks(t, n, 2, round%2 == 0)
		var wg sync.WaitGroup
		began := make(chan struct{}, n)
		for _, it := range all {
			wg.Go(func() {
				x := it.runners[0]
				own := make([]int32, 1<<20)
				q := &Request{Kind: collectives.AllReduce, Op: kernels.Sum, Src: buffer(own, kernels.Int32),
					Dst: buffer(own, kernels.Int32)}
				began <- struct{}{}
				for x.run(t.Context(), q, collectives.TwoShot) == nil {
				}
				before := slices.Clone(own)
				small := []int32{1}
				q = &Request{Kind: collectives.AllReduce, Op: kernels.Sum, Src: buffer(small, kernels.Int32),
					Dst: buffer(small, kernels.Int32)}
				for range 20 { // the other group continues, and delivers later frames
					small[0] = 1
					if err := it.runners[1].run(t.Context(), q, collectives.OneShot); err != nil || small[0] != n {
						t.Errorf("round %d: beside a closed channel: %d, %v", round, small[0], err)
						return
					}
				}
				if !slices.Equal(own, before) {
					t.Errorf("round %d: memory was written after the operation had failed", round)
				}
			})
		}
		for range n {
			<-began
		}
		time.Sleep(time.Duration(rand.IntN(3000)) * time.Microsecond)
		for _, it := range all {
			it.runners[0].coll.Close()
		}
		wg.Wait()
		for _, r := range all {
			r.proxy.Close()
		}
	}
}
