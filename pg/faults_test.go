package pg

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"reflect"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"tutti/collectives"
	"tutti/p2p"
	"tutti/pg/flight"
	"tutti/pg/internal/exec"
)

func TestMismatchNamesBothCalls(t *testing.T) {
	bg := context.Background()
	calls := map[string]func(g *Group, odd bool) error{
		"length": func(g *Group, odd bool) error {
			n := 8
			if odd {
				n = 9
			}
			return AllReduce(bg, g, make([]float32, n), Sum)
		},
		"op": func(g *Group, odd bool) error {
			if odd {
				return AllReduce(bg, g, make([]float32, 8), Max)
			}
			return AllReduce(bg, g, make([]float32, 8), Sum)
		},
		"dtype": func(g *Group, odd bool) error {
			if odd {
				return AllReduce(bg, g, make([]int32, 8), Sum)
			}
			return AllReduce(bg, g, make([]float32, 8), Sum)
		},
		"kind": func(g *Group, odd bool) error {
			if odd {
				return g.Barrier(bg)
			}
			return AllReduce(bg, g, make([]float32, 8), Sum)
		},
		"root": func(g *Group, odd bool) error { // both roots only send: it comes out in the next operation
			root := 0
			if odd {
				root = g.Rank()
			}
			if err := Broadcast(bg, g, make([]float32, 8), root); err != nil {
				return err
			}
			return g.Barrier(bg)
		},
		"counts": func(g *Group, odd bool) error {
			counts := make([]int, g.Size())
			for i := range counts {
				counts[i] = 2
			}
			if odd {
				counts[g.Rank()]++
			}
			total := 2 * g.Size()
			if odd {
				total++
			}
			return AllGatherV(bg, g, make([]float32, total), make([]float32, counts[g.Rank()]), counts)
		},
		"long": func(g *Group, odd bool) error {
			n := 300_000
			if odd {
				n++
			}
			return AllReduce(bg, g, make([]float32, n), Sum)
		},
	}
	for name, call := range calls {
		for _, n := range []int{2, 3, 5} {
			t.Run(fmt.Sprintf("%s/%d", name, n), func(t *testing.T) {
				each(t, n, Config{}, func(_ context.Context, g *Group) error {
					err := call(g, g.Rank() == n-1)
					var m *MismatchError
					if !errors.As(err, &m) {
						return fmt.Errorf("got %v, want a *MismatchError", err)
					}
					if m.RankA != n-1 && m.RankB != n-1 {
						return fmt.Errorf("%v: rank %d, which differs, is not named", m, n-1)
					}
					if m.CallA == m.CallB {
						return fmt.Errorf("%v: the two calls read alike", m)
					}
					if again := g.Barrier(bg); !errors.As(again, &m) {
						return fmt.Errorf("afterwards: got %v, want the same *MismatchError", again)
					}
					return nil
				})
			})
		}
	}
}

func TestAllToAllVCountsDisagree(t *testing.T) {
	each(t, 2, Config{}, func(ctx context.Context, g *Group) error {
		send, recv := []int{1, 1}, []int{1, 1}
		if g.Rank() == 1 {
			recv[0] = 2
		}
		err := AllToAllV(ctx, g, make([]int32, recv[0]+recv[1]), make([]int32, 2), send, recv)
		if g.Rank() == 0 && err == nil { // has what it was to get; the other one's trouble reaches it now
			err = g.Barrier(ctx)
		}
		var m *MismatchError
		if !errors.As(err, &m) {
			return fmt.Errorf("got %v, want a *MismatchError", err)
		}
		return nil
	})
}

// With every algorithm, all ranks name the one rank that has not come.
func TestTimeoutNamesMissingRank(t *testing.T) {
	for _, algo := range []string{"auto", "oneshot", "doubling", "halving", "ring", "tree", "twoshot"} {
		for _, n := range []int{2, 5} {
			if n == 2 && algo != "auto" {
				continue // every wait is for the other rank
			}
			t.Run(fmt.Sprintf("%s/%d", algo, n), func(t *testing.T) {
				t.Parallel()       // they mostly wait
				past := meeting(n) // the short time is for the operation that a rank misses
				each(t, n, Config{Algorithm: algo}, func(ctx context.Context, g *Group) error {
					if err := past(AllReduce(ctx, g, make([]float32, 8), Sum)); err != nil {
						return err
					}
					if g.Rank() == 1 { // does not enter
						return nil
					}
					g.SetTimeout(6 * time.Second)
					err := AllReduce(ctx, g, make([]float32, 8), Sum)
					var to *TimeoutError
					if !errors.As(err, &to) || !errors.Is(err, context.DeadlineExceeded) {
						return fmt.Errorf("got %v, want a *TimeoutError", err)
					}
					if len(to.Missing) != 1 || to.Missing[0].Rank != 1 {
						return fmt.Errorf("%v: want rank 1 named, and no other", err)
					}
					return nil
				})
			})
		}
	}
}

// A rank that waits in an agreement, and not in the operation of the others, is named.
func TestTimeoutNamesRankInAgreement(t *testing.T) {
	const n, missing = 5, 1
	for _, algo := range []string{"oneshot", "ring"} {
		t.Run(algo, func(t *testing.T) {
			t.Parallel() // the ranks mostly wait
			past := meeting(n)
			each(t, n, Config{Algorithm: algo}, func(ctx context.Context, g *Group) error {
				if err := past(AllReduce(ctx, g, make([]float32, 8), Sum)); err != nil {
					return err
				}
				g.SetTimeout(6 * time.Second)
				var to *TimeoutError
				if g.Rank() == missing {
					if _, err := g.Agree(ctx, true); !errors.As(err, &to) {
						return fmt.Errorf("got %v, want a *TimeoutError", err)
					}
					return nil
				}
				err := AllReduce(ctx, g, make([]float32, 8), Sum)
				if !errors.As(err, &to) || len(to.Missing) != 1 || to.Missing[0].Rank != missing {
					return fmt.Errorf("got %v, want a *TimeoutError that names rank %d alone", err, missing)
				}
				return nil
			})
		})
	}
}

// A rank that was kept waiting in an operation, and does not call the next one, is named itself,
// and not the rank that it had waited for.
func TestTimeoutNamesRankThatWaitedBefore(t *testing.T) {
	const n, late, missing = 5, 2, 3
	t.Parallel() // the ranks mostly wait
	gs, err := Local(n, Config{Timeout: time.Minute, Algorithm: "ring"})
	if err != nil {
		t.Fatal(err)
	}
	past := meeting(n)
	calls := func(g *Group) error {
		if err := past(AllReduce(t.Context(), g, make([]float32, 8), Sum)); err != nil || g.Rank() == missing {
			return err
		}
		g.SetTimeout(6 * time.Second)
		var to *TimeoutError
		err := AllReduce(t.Context(), g, make([]float32, 8), Sum)
		if !errors.As(err, &to) || len(to.Missing) != 1 || to.Missing[0].Rank != missing {
			return fmt.Errorf("got %v, want a *TimeoutError that names rank %d", err, missing)
		}
		return nil
	}
	ends := make(chan error, n)
	for _, g := range gs {
		defer g.Close()
		if g.Rank() != late {
			go func() { ends <- calls(g) }()
		}
	}
	until(t, gs[missing+1], "hears that its neighbour waits", func(s *flight.Snapshot) bool {
		return slices.ContainsFunc(s.Groups[0].Peers, func(p flight.Peer) bool {
			return p.Rank == missing && slices.Equal(p.WaitsFor, []int{late})
		})
	})
	ends <- calls(gs[late])
	for range n {
		if err := <-ends; err != nil {
			t.Error(err)
		}
	}
}

// A late rank alone is named by an agreement, and by an exchange whose first member it is, also if
// the other ranks have no links to each other before.
func TestLateRankIsNamedAlone(t *testing.T) {
	const n = 5
	for name, c := range map[string]struct {
		late  int
		stops bool // nothing of the rank's process goes on
		call  func(context.Context, *Group) error
	}{
		"agree": {1, false, func(ctx context.Context, g *Group) error { _, err := g.Agree(ctx, true); return err }},
		"recover": {0, true, func(ctx context.Context, g *Group) error {
			over, cancel := context.WithCancel(ctx)
			if cancel(); g.Barrier(over) == nil {
				return errors.New("a barrier that was cancelled succeeds")
			}
			return g.Recover(ctx)
		}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel() // the ranks mostly wait
			gs, err := Local(n, Config{Timeout: time.Minute})
			if err != nil {
				t.Fatal(err)
			}
			for _, g := range gs {
				defer g.Close()
			}
			if c.stops {
				p := gs[c.late].job.proxy
				p.Lock()
				defer p.Unlock()
			}
			ctx, cancel := context.WithCancel(t.Context())
			var wg sync.WaitGroup
			defer wg.Wait()
			defer cancel()
			for _, g := range slices.Delete(slices.Clone(gs), c.late, c.late+1) {
				wg.Go(func() {
					var late *TimeoutError
					if err := c.call(ctx, g); !errors.As(err, &late) || len(late.Missing) != 1 ||
						late.Missing[0].Rank != c.late {
						t.Errorf("rank %d got %v, want a *TimeoutError that names rank %d alone", g.Rank(), err, c.late)
					}
				})
			}
			for _, g := range slices.Delete(slices.Clone(gs), c.late, c.late+1) {
				until(t, g, "waits for the late rank alone", func(s *flight.Snapshot) bool {
					o := s.Groups[0].Running
					return o != nil && slices.Equal(o.WaitsFor, []int{c.late})
				})
			}
		})
	}
}

func TestCancelEndsCallOnAllRanks(t *testing.T) {
	each(t, 3, Config{}, func(ctx context.Context, g *Group) error {
		if err := g.Barrier(ctx); err != nil {
			return err
		}
		if g.Rank() != 2 {
			if err := Send(ctx, g, []byte{1}, 2, 0); err != nil {
				return err
			}
		} else { // cancelled while it waits for rank 1, which does not wait
			for from := range 2 { // they have ended the barrier
				if _, err := Recv(ctx, g, make([]byte, 1), from, 0); err != nil {
					return err
				}
			}
			ctx, cancel := context.WithTimeout(ctx, 20*time.Millisecond)
			defer cancel()
			err := Broadcast(ctx, g, make([]byte, 10), 1)
			if !errors.Is(err, context.DeadlineExceeded) {
				return fmt.Errorf("got %v, want context.DeadlineExceeded", err)
			}
			return nil
		}
		var to *TimeoutError
		if g.Rank() == 0 {
			if err := Broadcast(ctx, g, make([]byte, 10), 1); !errors.As(err, &to) || to.Reporter != 2 {
				return fmt.Errorf("got %v, want rank 2's *TimeoutError", err)
			}
			return nil
		}
		for { // rank 1 learns of it when it comes
			err := g.probe(ctx)
			if err != nil {
				break
			}
		}
		if err := Broadcast(ctx, g, make([]byte, 10), 1); !errors.As(err, &to) {
			return fmt.Errorf("got %v, want rank 2's *TimeoutError", err)
		}
		return nil
	})
}

// probe polls once and returns why the group's channel failed.
func (g *Group) probe(ctx context.Context) error {
	p := g.job.proxy
	p.Lock()
	defer p.Unlock()
	var w p2p.Wait
	w.Reset(ctx, 0, true)
	return g.coll.Probe(&w)
}

func TestClosedGroup(t *testing.T) {
	each(t, 2, Config{}, func(ctx context.Context, g *Group) error {
		if err := g.Barrier(ctx); err != nil {
			return err
		}
		w := g.Start(RecvOp{X: BufferOf(make([]int32, 3)), From: 1 - g.Rank(), Tag: 7}) // there is no Send
		if err := g.Close(); err != nil {
			return err
		}
		if err := w.Wait(ctx); err == nil {
			return errors.New("a receive outlived its group")
		}
		for name, err := range map[string]error{
			"barrier": g.Barrier(ctx), "send": Send(ctx, g, []int32{1}, 1-g.Rank(), 0),
			"start": g.Start(BarrierOp{}).Wait(ctx), "close": errors.Join(g.Close(), ErrClosed),
		} {
			if !errors.Is(err, ErrClosed) {
				return fmt.Errorf("%s after Close: %v, want ErrClosed", name, err)
			}
		}
		return nil
	})
}

// Admit of a job without a store has nobody to admit, and tells as other calls do that the group
// cannot be used, or that its time is over.
func TestAdmitOfUnusableGroup(t *testing.T) {
	each(t, 2, Config{}, func(ctx context.Context, g *Group) error {
		said := func(when string, is func(error) bool) error {
			if n, err := g.Admit(ctx); n != 0 || !is(err) {
				return fmt.Errorf("%s: Admit returns %d and %v", when, n, err)
			}
			return nil
		}
		fine := func(err error) bool { return err == nil }
		op := Operation(BarrierOp{})
		if g.Rank() == 1 {
			op = AllReduceOp{Dst: BufferOf([]int32{1}), Op: Sum}
		}
		if err := g.Do(ctx, op); err == nil {
			return errors.New("different operations ended well")
		}
		err := said("after a mismatch", func(err error) bool { return errors.As(err, new(*MismatchError)) })
		if err = cmp.Or(err, g.Recover(ctx), said("after Recover", fine)); err != nil {
			return err
		}
		live := ctx
		ctx, cancel := context.WithCancel(ctx)
		cancel()
		err = said("with a context that has ended", func(err error) bool {
			return errors.As(err, new(*TimeoutError)) && errors.Is(err, context.Canceled)
		})
		if ctx = live; err != nil {
			return err
		}
		if err = cmp.Or(g.Barrier(ctx), said("with another context", fine)); err != nil {
			return err
		}
		if g.Rank() == 0 {
			g.Abort(errors.New("enough"))
		} else if err := g.Barrier(ctx); err == nil {
			return errors.New("a barrier of an aborted group ended well")
		}
		if err := said("after Abort", func(err error) bool { return errors.Is(err, ErrAborted) }); err != nil {
			return err
		}
		g.Close()
		return said("after Close", func(err error) bool { return errors.Is(err, ErrClosed) })
	})
}

// A second Close returns when the first has ended, and not before.
func TestSecondCloseWaitsForTheFirst(t *testing.T) {
	again := make(chan struct{})
	each(t, 2, Config{}, func(ctx context.Context, g *Group) error {
		if g.Rank() == 1 {
			<-again
			return errors.Join(Broadcast(ctx, g, []int32{0}, 0), g.Close())
		}
		if err := Broadcast(ctx, g, []int32{1}, 0); err != nil {
			return err
		}
		first := make(chan error, 1)
		go func() { first <- g.Close() }()
		for !errors.Is(g.Barrier(ctx), ErrClosed) {
		}
		close(again)
		if err := g.Close(); err != nil {
			return err
		}
		select {
		case <-g.job.ended:
		default:
			return errors.New("it returned before the job had ended on this rank")
		}
		return <-first
	})
}

// No group is made while Rejoin closes the groups: the job ends on this rank with those that are
// there.
func TestSplitWhileRejoinCloses(t *testing.T) {
	each(t, 2, Config{}, func(ctx context.Context, g *Group) error {
		if g.Rank() == 1 {
			g.job.proxy.Lock()
			g.job.leaving = true
			g.job.proxy.Unlock()
		}
		sub, err := g.Split(ctx, 0, 0)
		if g.Rank() == 0 {
			if err != nil {
				return err
			}
			return errors.Join(sub.Close(), g.Close())
		}
		if !errors.Is(err, ErrClosed) {
			return fmt.Errorf("split: %v, want ErrClosed", err)
		}
		if err := g.Close(); err != nil {
			return err
		}
		<-g.job.ended
		return nil
	})
}

// Refresh and Close of a window wait for another Refresh, and no longer than until their ctx ends.
func TestRefreshWaitsWithinItsContext(t *testing.T) {
	each(t, 2, Config{}, func(ctx context.Context, g *Group) error {
		w, err := NewWindow(ctx, g, 64)
		if err != nil {
			return err
		}
		if err := w.turn.Acquire(ctx, 1); err != nil { // as another Refresh does
			return err
		}
		short, cancel := context.WithTimeout(ctx, time.Millisecond)
		defer cancel()
		for what, err := range map[string]error{"refresh": w.Refresh(short), "close": w.Close(short)} {
			if !errors.Is(err, context.DeadlineExceeded) {
				return fmt.Errorf("%s: %v, want the end of ctx", what, err)
			}
		}
		w.turn.Release(1)
		if err := w.Refresh(ctx); err != nil {
			return err
		}
		return errors.Join(g.Barrier(ctx), w.Close(ctx))
	})
}

func TestErrorNamesLeavingRank(t *testing.T) {
	for _, n := range []int{2, 4} {
		each(t, n, Config{}, func(ctx context.Context, g *Group) error {
			err := g.Barrier(ctx)
			if g.Rank() == n-1 && err == nil {
				return g.Close()
			}
			if err == nil { // else a rank that has left the barrier has failed, and told this one
				err = AllReduce(ctx, g, make([]float32, 1000), Sum)
			}
			var re *RankError
			if !errors.As(err, &re) || re.Rank != n-1 {
				return fmt.Errorf("got %v, want a *RankError that names rank %d", err, n-1)
			}
			return nil
		})
	}
}

// A rank that left before there was a link to it is found out too, and soon.
func TestErrorNamesRankThatLeftEarly(t *testing.T) {
	gs, err := Local(2, Config{})
	if err != nil {
		t.Fatal(err)
	}
	defer gs[0].Close()
	gs[1].Close()
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	var re *RankError
	if err := gs[0].Barrier(ctx); !errors.As(err, &re) || re.Rank != 1 {
		t.Errorf("got %v, want a *RankError that names rank 1", err)
	}
}

func TestBadArguments(t *testing.T) {
	each(t, 2, Config{}, func(ctx context.Context, g *Group) error {
		f := make([]float32, 6)
		for name, err := range map[string]error{
			"reducescatter length": ReduceScatter(ctx, g, f[:2], f[:5], Sum),
			"allgather length":     AllGather(ctx, g, f[:5], f[:2]),
			"alltoall odd":         AllToAll(ctx, g, make([]float32, 5), f[:5]),
			"alltoall lengths":     AllToAll(ctx, g, make([]float32, 4), f[:6]),
			"alltoall overlap":     AllToAll(ctx, g, f[:4], f[2:6]),
			"root high":            Broadcast(ctx, g, f, 2),
			"root negative":        Reduce(ctx, g, f, -1, Sum),
			"gather length":        Gather(ctx, g, f[:3], f[:2], g.Rank()),
			"scatter length":       Scatter(ctx, g, f[:2], f[:3], g.Rank()),
			"op for floats":        AllReduce(ctx, g, f, BitXor),
			"op unknown":           AllReduce(ctx, g, f, Reduction(99)),
			"counts missing":       AllGatherV(ctx, g, f, f[:3], nil),
			"counts negative":      AllGatherV(ctx, g, f, f[:3], []int{7, -1}),
			"counts and source":    AllGatherV(ctx, g, f, f[:2], []int{3, 3}),
			"alltoallv own":        AllToAllV(ctx, g, f[:3], make([]float32, 3), []int{1, 2}, []int{2, 1}),
			"send to itself":       Send(ctx, g, f, g.Rank(), 0),
			"send to no rank":      Send(ctx, g, f, 2, 0),
			"send to any":          Send(ctx, g, f, AnyRank, 0),
			"tag negative":         Send(ctx, g, f, 1-g.Rank(), -5),
			"tag high":             Send(ctx, g, f, 1-g.Rank(), MaxTag+1),
			"nil with a length":    g.Start(AllReduceOp{Dst: Buffer{Count: 3, DType: Float32}, Op: Sum}).Wait(ctx),
			"no dtype":             g.Start(AllReduceOp{Dst: Buffer{Count: 3}, Op: Sum}).Wait(ctx),
			"device memory": g.Start(AllReduceOp{Dst: Buffer{Ptr: BufferOf(f).Ptr, Count: 3, DType: Float32,
				Location: "cuda:0"}, Op: Sum}).Wait(ctx),
			"dtypes differ": g.Start(AllGatherOp{Dst: BufferOf(make([]int32, 4)),
				Src: BufferOf(f[:2])}).Wait(ctx),
			"free of foreign slice": Free(g, f),
		} {
			var ae *ArgumentError
			if !errors.As(err, &ae) {
				return fmt.Errorf("%s: got %v, want an *ArgumentError", name, err)
			}
		}
		return AllReduce(ctx, g, f, Sum) // the group is still usable
	})
}

func TestEmptyBuffers(t *testing.T) {
	each(t, 3, Config{}, func(ctx context.Context, g *Group) error {
		for _, err := range []error{
			AllReduce[float32](ctx, g, nil, Sum), AllGather[int8](ctx, g, nil, nil),
			ReduceScatter[int64](ctx, g, nil, []int64{}, Max),
			AllToAll[bool](ctx, g, nil, nil), Broadcast[uint16](ctx, g, nil, 1), Reduce[uint8](ctx, g, nil, 2, Sum),
			Gather[float64](ctx, g, nil, nil, 0),
			Scatter[float64](ctx, g, nil, nil, 0), AllGatherV[int32](ctx, g, nil, nil, []int{0, 0, 0}),
			AllToAllV[int32](ctx, g, nil, nil, []int{0, 0, 0}, []int{0, 0, 0}),
		} {
			if err != nil {
				return err
			}
		}
		if x, err := Alloc[float32](g, 0); err != nil || len(x) != 0 {
			return fmt.Errorf("Alloc of nothing: %v, %v", x, err)
		}
		return everything(ctx, g, 0)
	})
}

func TestLocalRefusesBadSizes(t *testing.T) {
	for _, n := range []int{-1, 0, MaxRanks + 1} {
		if _, err := Local(n, Config{}); err == nil {
			t.Errorf("Local(%d) worked", n)
		}
	}
	if _, err := Local(2, Config{Algorithm: "magic"}); err == nil || !strings.Contains(err.Error(), "ring") {
		t.Errorf("an unknown algorithm: %v, want an error that lists the known ones", err)
	}
}

func FuzzDecodeAbort(f *testing.F) {
	for kind := byte(abortRank); kind <= abortDeserted; kind++ {
		a := wireAbort{Kind: kind, A: 1, B: 2, Call: p2p.Token{Seq: 1, Call: 2, Count: 3}, After: 5,
			Missing: []exec.Seen{{Rank: 1, Has: true}}, Text: "x"}
		f.Add(a.encode())
	}
	f.Add([]byte{})
	f.Fuzz(func(t *testing.T, b []byte) {
		a, err := decodeAbort(b, 4)
		if err != nil {
			return
		}
		g := &Group{job: &job{}, v: &groupView{}}
		if g.told(a).Error() == "" {
			t.Error("a failure without a text")
		}
		if len(a.encode()) > p2p.MaxAbort {
			t.Error("too long")
		}
	})
}

// The other ranks are told which ranks the failure of a graph names.
func TestGraphFailureNamesRanks(t *testing.T) {
	gs, err := Local(3, Config{})
	if err != nil {
		t.Fatal(err)
	}
	for _, g := range gs {
		defer g.Close()
	}
	g := gs[0]
	g.job.proxy.Lock()
	defer g.job.proxy.Unlock()
	for _, e := range []error{
		&TimeoutError{Call: "allreduce in a graph", After: time.Second, Missing: []Seen{{2, "nothing yet"}},
			Err: context.DeadlineExceeded},
		&MismatchError{RankA: 0, CallA: "allreduce in a graph", RankB: 2, CallB: "allgather"},
	} {
		tell, _ := g.explain(&graphError{text: "it has no result", is: e})
		a, err := decodeAbort(tell.encode(), 3)
		if err != nil {
			t.Fatal(err)
		}
		if got := g.told(a); !reflect.DeepEqual(got, e) {
			t.Errorf("told: %#v, want %#v", got, e)
		}
	}
}

func TestAbortRoundTrip(t *testing.T) {
	a := wireAbort{Kind: abortTimeout, A: 3, B: 1, Call: p2p.Token{Seq: 1, Call: uint64(collectives.AllReduce),
		Count: 3}, Other: p2p.Token{Seq: 9}, After: 5, Text: strings.Repeat("y", 5000), Canceled: true}
	for i := range 40 {
		a.Missing = append(a.Missing, exec.Seen{Rank: i % 4, Has: i%2 == 0, Last: p2p.Token{Seq: uint64(i)}})
	}
	b, err := decodeAbort(a.encode(), 4)
	if err != nil {
		t.Fatal(err)
	}
	if b.Kind != a.Kind || b.A != a.A || b.B != a.B || b.Call != a.Call || b.Other != a.Other || b.After != a.After ||
		!b.Canceled || len(b.Missing) != maxMissing || b.Missing[4] != a.Missing[4] {
		t.Errorf("got %+v", b)
	}
}
