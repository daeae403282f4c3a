package exec

import (
	"errors"
	"slices"
	"sync"
	"testing"

	"tutti/collectives"
	"tutti/kernels"
	"tutti/p2p"
)

// together runs a call at all ranks.
func together(t *testing.T, all []*rank, q func(rank int) *Request) {
	t.Helper()
	var wg sync.WaitGroup
	for rank, it := range all {
		wg.Go(func() {
			if err := it.runners[0].run(t.Context(), q(rank), collectives.Auto); err != nil {
				t.Errorf("rank %d: %v", rank, err)
			}
		})
	}
	wg.Wait()
}

// bySteps runs f while no bound call runs by express.
func bySteps(all []*rank, f func()) {
	kept := map[*Bound]*express{}
	for _, it := range all {
		for _, b := range it.runners[0].set.bound {
			kept[b], b.express = b.express, nil
		}
	}
	f()
	for b, e := range kept {
		b.express = e
	}
}

// try begins a bound call, and suspends it where it would have to wait. It reports whether the call
// has run by express.
func (x *runner) try(t *testing.T, q *Request, hint bool) (express bool, err error) {
	t.Helper()
	x.proxy.Lock()
	defer x.proxy.Unlock()
	x.wait.Reset(t.Context(), patience, false)
	x.wait.Try()
	x.seq++
	b := x.Recall(q)
	if b == nil {
		t.Fatal("the call is not bound")
	}
	x.Use(b, q.Dst.Ptr, q.Src.Ptr)
	x.recvs = nil // steps make them
	err = x.Run(x.seq, hint)
	return x.recvs == nil, err
}

// resume continues a suspended call to its end.
func (x *runner) resume() error {
	x.proxy.Lock()
	defer x.proxy.Unlock()
	x.wait.Stay(false)
	return x.Resume()
}

// A bound call runs by express at the rank that comes last, and by steps at those that have to
// wait; all get the same results, call after call, also where what has come is not only the
// operation's messages.
func TestExpressAndStepsAgree(t *testing.T) {
	const count = 3
	of := func(x []float32) Buffer { return buffer(x, kernels.Float32) }
	for _, n := range []int{2, 3, 4} {
		for _, kind := range []collectives.Kind{collectives.Barrier, collectives.AllReduce, collectives.ReduceScatter,
			collectives.AllGather, collectives.AllToAll, collectives.Broadcast, collectives.Reduce} {
			for _, inPlace := range []bool{false, true} {
				if inPlace && kind != collectives.AllReduce {
					continue
				}
				t.Run(kind.String(), func(t *testing.T) {
					all := ranks(t, n, 1, true)
					in, out := make([][]float32, n), make([][]float32, n)
					ask := func(rank int) *Request {
						q := &Request{Kind: kind, Op: kernels.Sum, Root: n - 1}
						src, dst := in[rank], out[rank]
						switch kind {
						case collectives.Barrier:
							return &Request{Kind: kind}
						case collectives.AllReduce, collectives.Reduce:
							src, dst = src[:count], dst[:count]
						case collectives.ReduceScatter:
							dst = dst[:count]
						case collectives.AllGather:
							src = src[:count]
						case collectives.Broadcast:
							src = dst[:count]
							dst = src
						}
						if !kind.Reduces() {
							q.Op = 0
						}
						if inPlace {
							src = dst
						}
						q.Dst, q.Src = of(dst), of(src)
						return q
					}
					fill := func(call int) {
						for rank := range n {
							in[rank], out[rank] = make([]float32, n*count), make([]float32, n*count)
							for i := range in[rank] {
								in[rank][i] = float32(call*100 + rank*10 + i)
							}
							if inPlace || kind == collectives.Broadcast {
								copy(out[rank], in[rank])
							}
						}
					}
					for call := range 2 { // the first binds it
						fill(call)
						together(t, all, ask)
					}
					fill(7)
					bySteps(all, func() { together(t, all, ask) })
					expected := slices.Clone(out)
					for last := range n {
						fill(7)
						parked := []int{}
						for rank, it := range all {
							if rank == last {
								continue
							}
							switch _, err := it.runners[0].try(t, ask(rank), false); {
							case errors.Is(err, p2p.ErrSuspended):
								parked = append(parked, rank)
							case err != nil:
								t.Fatalf("rank %d: %v", rank, err)
							}
						}
						express, err := all[last].runners[0].try(t, ask(last), false)
						if err != nil || !express {
							t.Fatalf("rank %d comes last: by express: %v, %v", last, express, err)
						}
						for _, rank := range parked {
							if err := all[rank].runners[0].resume(); err != nil {
								t.Fatalf("rank %d: %v", rank, err)
							}
						}
						for rank := range n {
							if got, want := out[rank], expected[rank]; !slices.Equal(got, want) {
								t.Errorf("rank %d of %d, last %d: %v, want %v", rank, n, last, got, want)
							}
						}
					}
				})
			}
		}
	}
}

// balanced checks that what each rank has sent is what its peer has taken.
func balanced(t *testing.T, all []*rank) {
	t.Helper()
	for a := range all {
		for b := range all {
			if a == b {
				continue
			}
			mine, theirs := all[a].runners[0].coll.Ledger(b), all[b].runners[0].coll.Ledger(a)
			if mine.Sent != theirs.Taken || theirs.Held != 0 {
				t.Errorf("rank %d has sent %d to rank %d, which has taken %d and holds %d", a, mine.Sent, b,
					theirs.Taken, theirs.Held)
			}
		}
	}
}

// What is not as usual runs by steps, with the same results; the call after it by express again.
func TestExpressGivesWay(t *testing.T) {
	ones := func(n int) []float32 { return slices.Repeat([]float32{1}, n) }
	x := [][]float32{ones(4), ones(4)}
	sum := func(rank int) *Request {
		of := buffer(x[rank], kernels.Float32)
		return &Request{Kind: collectives.AllReduce, Op: kernels.Sum, Dst: of, Src: of}
	}
	barrier := func(int) *Request { return &Request{Kind: collectives.Barrier} }
	begin := func(t *testing.T) []*rank {
		t.Helper()
		x = [][]float32{ones(4), ones(4)}
		all := ranks(t, 2, 1, true)
		together(t, all, sum)
		together(t, all, barrier)
		return all
	}
	// meet runs a call of which rank 0 suspends itself, and reports how rank 1 has run.
	meet := func(t *testing.T, all []*rank, hint bool) (express bool) {
		t.Helper()
		if _, err := all[0].runners[0].try(t, sum(0), hint); !errors.Is(err, p2p.ErrSuspended) {
			t.Fatalf("rank 0: %v", err)
		}
		express, err := all[1].runners[0].try(t, sum(1), false)
		if err == nil {
			err = all[0].runners[0].resume()
		}
		if err != nil {
			t.Fatal(err)
		}
		return express
	}
	t.Run("hint", func(t *testing.T) {
		all := begin(t)
		if meet(t, all, true) {
			t.Error("a message with a hint was taken by express")
		}
		all[1].proxy.Lock()
		hinted := all[1].runners[0].coll.Hinted()
		all[1].proxy.Unlock()
		if !hinted {
			t.Error("rank 1 has not got the hint")
		}
		if !meet(t, all, false) {
			t.Error("the next call ran by steps")
		}
		if !slices.Equal(x[0], []float32{8, 8, 8, 8}) || !slices.Equal(x[1], x[0]) {
			t.Errorf("results %v", x)
		}
		balanced(t, all)
	})
	t.Run("another frame comes first", func(t *testing.T) {
		all := begin(t)
		all[0].proxy.Lock()
		all[0].runners[0].coll.Notice([]int{1}, 1, []byte("news"))
		all[0].proxy.Unlock()
		if meet(t, all, false) {
			t.Error("the message behind a notice was taken by express")
		}
		if !meet(t, all, false) {
			t.Error("the next call ran by steps")
		}
		if !slices.Equal(x[0], []float32{8, 8, 8, 8}) || !slices.Equal(x[1], x[0]) {
			t.Errorf("results %v", x)
		}
		balanced(t, all)
	})
	t.Run("another call", func(t *testing.T) {
		all := begin(t)
		if _, err := all[0].runners[0].try(t, barrier(0), false); !errors.Is(err, p2p.ErrSuspended) {
			t.Fatalf("rank 0: %v", err)
		}
		_, err := all[1].runners[0].try(t, sum(1), false)
		if differ := (*p2p.Disagreement)(nil); !errors.As(err, &differ) {
			t.Errorf("rank 1 meets another call: %v", err)
		}
		if !slices.Equal(x[1], []float32{2, 2, 2, 2}) {
			t.Errorf("rank 1's input is %v", x[1])
		}
	})
	t.Run("no credit", func(t *testing.T) {
		all := begin(t)
		values := [][]float32{ones(4), ones(4)}
		from0 := func(rank int) *Request {
			of := buffer(values[rank], kernels.Float32)
			return &Request{Kind: collectives.Broadcast, Dst: of, Src: of}
		}
		together(t, all, from0)
		ahead := 0
		for ; ; ahead++ { // the root need not wait, while there is credit
			values[0][0] = float32(ahead)
			express, err := all[0].runners[0].try(t, from0(0), false)
			if errors.Is(err, p2p.ErrSuspended) {
				break
			}
			if err != nil || !express {
				t.Fatalf("call %d: by express: %v, %v", ahead, express, err)
			}
		}
		if ahead == 0 {
			t.Fatal("there was no credit")
		}
		for call := range ahead {
			if _, err := all[1].runners[0].try(t, from0(1), false); err != nil || values[1][0] != float32(call) {
				t.Fatalf("call %d of %d: %v, %v", call, ahead, values[1][0], err)
			}
		}
		if err := all[0].runners[0].resume(); err != nil {
			t.Fatal(err)
		}
		if _, err := all[1].runners[0].try(t, from0(1), false); err != nil || values[1][0] != float32(ahead) {
			t.Fatalf("the last call: %v, %v", values[1][0], err)
		}
		balanced(t, all)
	})
}
