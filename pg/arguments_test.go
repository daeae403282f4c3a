package pg_test

import (
	"context"
	"errors"
	"fmt"
	"math"
	"testing"
	"time"
	"unsafe"

	"tutti/pg"
	"tutti/pg/pgtest"
)

// local runs f on n ranks of this process.
func local(t *testing.T, n int, f func(ctx context.Context, g *pg.Group) error) {
	t.Helper()
	gs, err := pg.Local(n, pg.Config{Timeout: 20 * time.Second})
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan error, n)
	for _, g := range gs {
		go func() {
			err := f(t.Context(), g)
			if err != nil {
				err = fmt.Errorf("rank %d: %w", g.Rank(), err)
			}
			done <- err
		}()
	}
	for range gs {
		if err := <-done; err != nil {
			t.Error(err)
		}
	}
	for _, g := range gs {
		g.Close()
	}
}

// buffers of one piece of memory, in elements.
func piece(mem []int64, at, n int) pg.Buffer { return pg.BufferOf(mem[at : at+n]) }

// Each operation takes buffers that are apart or, where it may work in place, exactly so; anything
// between is an *ArgumentError, and leaves the memory alone.
func TestOverlappingBuffersAreRefused(t *testing.T) {
	const n, k = 3, 10
	local(t, n, func(ctx context.Context, g *pg.Group) error {
		me := g.Rank()
		mem := make([]int64, 200)
		vec := pg.AllReduceOp{Op: pg.Sum}
		ones := []int{k, k, k}
		try := func(name string, ok bool, op pg.Operation) error {
			for i := range mem {
				mem[i] = int64(i)
			}
			err := g.Start(op).Wait(ctx)
			var bad *pg.ArgumentError
			switch {
			case ok && err != nil:
				return fmt.Errorf("%s: %w", name, err)
			case !ok && !errors.As(err, &bad):
				return fmt.Errorf("%s: got %v, want an *ArgumentError", name, err)
			}
			for i := range mem {
				if !ok && mem[i] != int64(i) {
					return fmt.Errorf("%s: element %d was written", name, i)
				}
			}
			return nil
		}
		vec.Dst, vec.Src = piece(mem, 0, k), piece(mem, 0, k)
		errs := []error{try("allreduce in place", true, vec)}
		vec.Src = piece(mem, k, k)
		errs = append(errs, try("allreduce apart", true, vec))
		for _, shift := range []int{1, k - 1} {
			vec.Src = piece(mem, shift, k)
			errs = append(errs, try("allreduce a little further", false, vec))
			vec.Dst, vec.Src = vec.Src, vec.Dst
			errs = append(errs, try("allreduce a little before", false, vec))
			vec.Dst, vec.Src = vec.Src, vec.Dst
		}
		const base = 5
		own, apart := base+me*k, base+n*k
		all := piece(mem, base, n*k)
		for i, at := range []int{own, apart, own - 1, own + 1, apart - 1} {
			ok := i < 2
			part := piece(mem, at, k)
			errs = append(errs,
				try(fmt.Sprint("allgather from ", at), ok, pg.AllGatherOp{Dst: all, Src: part}),
				try(fmt.Sprint("allgatherv from ", at), ok, pg.AllGatherVOp{Dst: all, Src: part, Counts: ones}),
				try(fmt.Sprint("reducescatter to ", at), at == apart, pg.ReduceScatterOp{Dst: part, Src: all,
					Op: pg.Sum}),
				try(fmt.Sprint("alltoall to ", at), at == apart, pg.AllToAllOp{Dst: piece(mem, at, n*k), Src: all}),
				try(fmt.Sprint("alltoallv to ", at), at == apart, pg.AllToAllVOp{Dst: piece(mem, at, n*k), Src: all,
					SendCounts: ones, RecvCounts: ones}))
		}
		return errors.Join(errs...)
	})
}

// At the root of a gather or scatter this rank's part may be where it belongs; elsewhere the other
// buffer is not looked at.
func TestOverlapAtRoot(t *testing.T) {
	const n, k = 3, 10
	local(t, n, func(ctx context.Context, g *pg.Group) error {
		mem := make([]int64, 200)
		for root := range n {
			part, all := piece(mem, root*k, k), piece(mem, 0, n*k)
			for i := range mem {
				mem[i] = int64(1000*g.Rank() + i)
			}
			if err := g.Start(pg.GatherOp{Dst: all, Src: part, Root: root}).Wait(ctx); err != nil {
				return err
			}
			for i := range n * k {
				if want := int64(1000*(i/k) + root*k + i%k); g.Rank() == root && mem[i] != want {
					return fmt.Errorf("gather to %d: element %d is %d, want %d", root, i, mem[i], want)
				}
			}
			for i := range mem {
				mem[i] = int64(1000*g.Rank() + i)
			}
			if err := g.Start(pg.ScatterOp{Dst: part, Src: all, Root: root}).Wait(ctx); err != nil {
				return err
			}
			for i := range k {
				if want := int64(1000*root + g.Rank()*k + i); mem[root*k+i] != want {
					return fmt.Errorf("scatter of %d: element %d is %d, want %d", root, i, mem[root*k+i], want)
				}
			}
			var bad *pg.ArgumentError
			if g.Rank() == root {
				off := piece(mem, root*k+1, k)
				if err := g.Start(pg.GatherOp{Dst: all, Src: off, Root: root}).Wait(ctx); !errors.As(err, &bad) {
					return fmt.Errorf("gather of an overlapping part: %v", err)
				}
				if err := g.Start(pg.ScatterOp{Dst: off, Src: all, Root: root}).Wait(ctx); !errors.As(err, &bad) {
					return fmt.Errorf("scatter to an overlapping part: %v", err)
				}
			}
		}
		return nil
	})
}

// Lengths that no memory has are *ArgumentErrors, whatever their product with an element's size or
// the number of ranks happens to be.
func TestLengthsThatOverflow(t *testing.T) {
	local(t, 2, func(ctx context.Context, g *pg.Group) error {
		x := make([]int64, 8)
		huge := func(count int) pg.Buffer {
			return pg.Buffer{Ptr: unsafe.Pointer(&x[0]), Count: count, DType: pg.Int64}
		}
		for _, count := range []int{math.MaxInt, math.MaxInt/8 + 1, 1 << 61, 1 << 60, 1<<61 + 8, 1 << 62, 1<<62 + 4,
			1<<63/16 + 1} {
			big, eight := huge(count), huge(8)
			for name, op := range map[string]pg.Operation{
				"allreduce":        pg.AllReduceOp{Dst: big, Op: pg.Sum},
				"allreduce apart":  pg.AllReduceOp{Dst: eight, Src: big, Op: pg.Sum},
				"broadcast":        pg.BroadcastOp{X: big},
				"reduce":           pg.ReduceOp{X: big, Op: pg.Sum},
				"allgather":        pg.AllGatherOp{Dst: eight, Src: big},
				"allgather into":   pg.AllGatherOp{Dst: big, Src: eight},
				"reducescatter":    pg.ReduceScatterOp{Dst: big, Src: eight, Op: pg.Sum},
				"reducescatter of": pg.ReduceScatterOp{Dst: eight, Src: big, Op: pg.Sum},
				"alltoall":         pg.AllToAllOp{Dst: big, Src: big},
				"gather":           pg.GatherOp{Dst: eight, Src: big, Root: g.Rank()},
				"scatter":          pg.ScatterOp{Dst: big, Src: eight, Root: g.Rank()},
				"allgatherv":       pg.AllGatherVOp{Dst: eight, Src: eight, Counts: []int{count, count}},
				"allgatherv to 8":  pg.AllGatherVOp{Dst: eight, Src: big, Counts: []int{count, math.MinInt}},
				"alltoallv": pg.AllToAllVOp{Dst: big, Src: big, SendCounts: []int{count, 0},
					RecvCounts: []int{count, 0}},
				"send":               pg.SendOp{X: big, To: 1 - g.Rank()},
				"recv":               pg.RecvOp{X: big, From: 1 - g.Rank()},
				"negative":           pg.AllReduceOp{Dst: huge(-count), Op: pg.Sum},
				"negative broadcast": pg.BroadcastOp{X: huge(-count)},
			} {
				var bad *pg.ArgumentError
				if err := g.Start(op).Wait(ctx); !errors.As(err, &bad) {
					return fmt.Errorf("%s of %d elements: got %v, want an *ArgumentError", name, count, err)
				}
			}
			var bad *pg.ArgumentError
			if _, err := pg.Alloc[int64](g, count); !errors.As(err, &bad) {
				return fmt.Errorf("alloc of %d elements: got %v, want an *ArgumentError", count, err)
			}
		}
		return pg.AllReduce(ctx, g, x, pg.Sum) // the group is still usable
	})
}

// Close leaves memory of Alloc to the program: it keeps its contents, can be read and written, and
// is freed by Free. There is no new one.
func TestMemoryOutlivesClose(t *testing.T) {
	check := func(ctx context.Context, g *pg.Group) error {
		x, err := pg.Alloc[int64](g, 100_000)
		if err != nil {
			return err
		}
		for i := range x {
			x[i] = int64(i)
		}
		if err := pg.AllReduce(ctx, g, x, pg.Sum); err != nil {
			return err
		}
		if err := g.Close(); err != nil {
			return err
		}
		for i := range x {
			if x[i] != int64(i*g.Size()) {
				return fmt.Errorf("after Close: element %d is %d, want %d", i, x[i], i*g.Size())
			}
			x[i]++
		}
		if _, err := pg.Alloc[int64](g, 10); !errors.Is(err, pg.ErrClosed) {
			return fmt.Errorf("Alloc after Close: %v, want ErrClosed", err)
		}
		if err := pg.Free(g, x); err != nil {
			return fmt.Errorf("Free after Close: %w", err)
		}
		return nil
	}
	t.Run("local", func(t *testing.T) { local(t, 2, check) })
	t.Run("shm", func(t *testing.T) {
		pgtest.Run(t, 2, func(t *testing.T, outer *pg.Group) {
			ctx := t.Context()
			g, err := pg.Join(ctx, pg.Config{Job: "memory-outlives-close"})
			if err != nil {
				t.Fatal(err)
			}
			if err := check(ctx, g); err != nil {
				t.Error(err)
			}
			if err := outer.Barrier(ctx); err != nil {
				t.Error(err)
			}
		}, pgtest.Transport("shm"))
	})
}

// A call with a nil ctx is refused, and holds no lock afterwards: the group can be used and closed.
func TestNilContextIsRefused(t *testing.T) {
	gs, err := pg.Local(1, pg.Config{Timeout: 20 * time.Second})
	if err != nil {
		t.Fatal(err)
	}
	g, ctx := gs[0], t.Context()
	w, err := pg.NewWindow(ctx, g, 64)
	if err != nil {
		t.Fatal(err)
	}
	two, err := pg.Local(2, pg.Config{Timeout: 20 * time.Second})
	if err != nil {
		t.Fatal(err)
	}
	defer two[1].Close()
	defer two[0].Close()
	waits := two[0].Start(pg.BarrierOp{})
	x, none := []int64{1}, context.Context(nil)
	only := func(_ any, err error) error { return err }
	for name, call := range map[string]func() error{
		"AllReduce":  func() error { return pg.AllReduce(none, g, x, pg.Sum) },
		"Do":         func() error { return g.Do(none, pg.BarrierOp{}) },
		"Send":       func() error { return pg.Send(none, g, x, 0, 1) },
		"Recv":       func() error { return only(pg.Recv(none, g, x, 0, 1)) },
		"Wait":       func() error { return waits.Wait(none) },
		"Split":      func() error { return only(g.Split(none, 0, 0)) },
		"Agree":      func() error { return only(g.Agree(none, true)) },
		"Recover":    func() error { return g.Recover(none) },
		"Admit":      func() error { return only(g.Admit(none)) },
		"Evict":      func() error { return g.Evict(none, 0) },
		"Rejoin":     func() error { return only(g.Rejoin(none)) },
		"Join":       func() error { return only(pg.Join(none, pg.Config{Size: 1})) },
		"NewMember":  func() error { return only(pg.NewMember(none, pg.Config{})) },
		"NewWindow":  func() error { return only(pg.NewWindow(none, g, 64)) },
		"Put":        func() error { return w.Put(none, 0, 0, []byte{1}) },
		"PutSignal":  func() error { return w.PutSignal(none, 0, 0, []byte{1}, 0) },
		"Signal":     func() error { return w.Signal(none, 0, 0) },
		"Flush":      func() error { return w.Flush(none, 0) },
		"Get":        func() error { return w.Get(none, 0, 0, []byte{1}) },
		"PutBuffer":  func() error { return w.PutBuffer(none, 0, 0, pg.BufferOf(x)) },
		"WaitSignal": func() error { return w.WaitSignal(none, 0, 0, 1) },
		"Map":        func() error { return only(w.Map(none, 0)) },
		"Refresh":    func() error { return w.Refresh(none) },
		"Close":      func() error { return w.Close(none) },
	} {
		var bad *pg.ArgumentError
		if err := call(); !errors.As(err, &bad) || bad.Arg != "ctx" {
			t.Errorf("%s: got %v, want an *ArgumentError about ctx", name, err)
		}
	}
	if err := errors.Join(g.Barrier(ctx), w.Close(ctx), g.Close()); err != nil {
		t.Error(err)
	}
}
