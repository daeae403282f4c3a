//go:build linux

package rig

import (
	"context"
	"fmt"
	"slices"

	"tutti/pg"
)

// WrongError says that a collective succeeded with a wrong result.
type WrongError struct {
	What      string
	At, Count int
	Got, Want any
}

func (e *WrongError) Error() string {
	return fmt.Sprintf("%s: element %d of %d is %v, want %v", e.What, e.At, e.Count, e.Got, e.Want)
}

// subgroupError is an error of a subgroup, which names ranks by their slots there.
type subgroupError struct {
	error
	rank func(slot int) int
}

func (e *subgroupError) Unwrap() error { return e.error }

// value returns element i of a rank's input: 0..15, so that sums of 64 ranks are exact in every
// type of at least 16 bits.
func value(seed uint64, rank, i int) int {
	h := seed*0x9e3779b97f4a7c15 + uint64(rank)*0xbf58476d1ce4e5b9 + uint64(i)*0x94d049bb133111eb
	h ^= h >> 31
	return int(h * 0x9e3779b97f4a7c15 >> 60)
}

func fill[T pg.Number](x []T, seed uint64, rank, from int) {
	for i := range x {
		x[i] = T(value(seed, rank, from+i))
	}
}

func same[T pg.Number](what string, x []T, want func(i int) T) error {
	for i, v := range x {
		if w := want(i); v != w {
			return &WrongError{fmt.Sprintf("%s of %T", what, x), i, len(x), v, w}
		}
	}
	return nil
}

// Verify runs every collective, and messages around the ring of ranks, with each of these numbers
// of elements, on registered and on plain memory, and compares every element of the results. All
// ranks call it with the same arguments.
func Verify(ctx context.Context, g *pg.Group, seed uint64, counts []int) (err error) {
	most := slices.Max(counts) * (2*g.Size() + 1)
	shared, err := pg.Alloc[float32](g, most)
	if err != nil {
		return err
	}
	defer func() { // a later collective has ended, so the peers do not use it any more
		if ferr := pg.Free(g, shared); err == nil {
			err = ferr
		}
	}()
	plain := make([]int32, most)
	for i, n := range counts {
		seed := seed + uint64(i)<<40
		if err := verify(ctx, g, seed, n, shared); err != nil {
			return err
		}
		if err := verify(ctx, g, seed+1<<20, n, plain); err != nil {
			return err
		}
	}
	return g.Barrier(ctx)
}

func verify[T pg.Number](ctx context.Context, g *pg.Group, seed uint64, n int, mem []T) error {
	size, me := g.Size(), g.Rank()
	root := int(seed % uint64(size))
	one, all, src := mem[:n], mem[n:n+n*size], mem[n+n*size:n+2*n*size]
	total := func(i int) (sum int) {
		for r := range size {
			sum += value(seed, r, i)
		}
		return sum
	}
	extreme := func(i int, pick func(a, b int) int) int {
		v := value(seed, 0, i)
		for r := 1; r < size; r++ {
			v = pick(v, value(seed, r, i))
		}
		return v
	}
	// Of uneven parts, rank r has counts[r]; some are empty.
	counts, back, sum := make([]int, size), make([]int, size), 0
	for r := range counts {
		counts[r] = n * ((r + int(seed%3)) % 3) / 2
		sum += counts[r]
	}
	for r := range back {
		back[r] = counts[me]
	}
	for _, step := range []struct {
		name   string
		do     func() error
		want   func(i int) T
		result func() []T
	}{
		{"allreduce sum", func() error {
			fill(one, seed, me, 0)
			return pg.AllReduce(ctx, g, one, pg.Sum)
		}, func(i int) T { return T(total(i)) }, func() []T { return one }},
		{"allreduce max", func() error {
			fill(one, seed, me, 0)
			return pg.AllReduce(ctx, g, one, pg.Max)
		}, func(i int) T { return T(extreme(i, func(a, b int) int { return max(a, b) })) }, func() []T { return one }},
		{"reducescatter", func() error {
			fill(all, seed, me, 0)
			return pg.ReduceScatter(ctx, g, one, all, pg.Sum)
		}, func(i int) T { return T(total(me*n + i)) }, func() []T { return one }},
		{"allgather", func() error {
			fill(one, seed, me, 0)
			clear(all)
			return pg.AllGather(ctx, g, all, one)
		}, func(i int) T { return T(value(seed, i/n, i%n)) }, func() []T { return all }},
		{"alltoall", func() error {
			fill(src, seed, me, 0)
			clear(all)
			return pg.AllToAll(ctx, g, all, src)
		}, func(i int) T { return T(value(seed, i/n, me*n+i%n)) }, func() []T { return all }},
		{"broadcast", func() error {
			clear(one)
			if me == root {
				fill(one, seed, root, 0)
			}
			return pg.Broadcast(ctx, g, one, root)
		}, func(i int) T { return T(value(seed, root, i)) }, func() []T { return one }},
		{"reduce", func() error {
			fill(one, seed, me, 0)
			return pg.Reduce(ctx, g, one, root, pg.Min)
		}, func(i int) T {
			if me != root {
				return T(value(seed, me, i))
			}
			return T(extreme(i, func(a, b int) int { return min(a, b) }))
		}, func() []T { return one }},
		{"gather", func() error {
			fill(one, seed, me, 0)
			clear(all)
			return pg.Gather(ctx, g, all, one, root)
		}, func(i int) T {
			if me != root {
				return 0
			}
			return T(value(seed, i/n, i%n))
		}, func() []T { return all }},
		{"scatter", func() error {
			clear(one)
			fill(all, seed, me, 0)
			return pg.Scatter(ctx, g, one, all, root)
		}, func(i int) T { return T(value(seed, root, me*n+i)) }, func() []T { return one }},
		{"barrier", func() error { return g.Barrier(ctx) }, nil, func() []T { return nil }},
		{"allgatherv", func() error {
			fill(src[:counts[me]], seed, me, 0)
			return pg.AllGatherV(ctx, g, all[:sum], src[:counts[me]], counts)
		}, func(i int) T {
			r := 0
			for ; i >= counts[r]; r++ {
				i -= counts[r]
			}
			return T(value(seed, r, i))
		}, func() []T { return all[:sum] }},
		{"alltoallv", func() error {
			// Every rank sends counts[r] to rank r.
			fill(src[:sum], seed, me, 0)
			return pg.AllToAllV(ctx, g, all[:size*counts[me]], src[:sum], counts, back)
		}, func(i int) T {
			at := 0
			for _, c := range counts[:me] {
				at += c
			}
			return T(value(seed, i/counts[me], at+i%counts[me]))
		}, func() []T { return all[:size*counts[me]] }},
		{"messages around the ring", func() error {
			if size == 1 {
				fill(one, seed, me, 0)
				return nil
			}
			fill(src[:n], seed, me, 0)
			w := g.Start(pg.SendOp{X: pg.BufferOf(src[:n]), To: (me + 1) % size, Tag: int(seed & 0xff)})
			_, err := pg.Recv(ctx, g, one, (me+size-1)%size, int(seed&0xff))
			if werr := w.Wait(ctx); err == nil {
				err = werr
			}
			return err
		}, func(i int) T { return T(value(seed, (me+size-1)%size, i)) }, func() []T { return one }},
		{"allreduce in a subgroup", func() error {
			sub, err := g.Split(ctx, me%2, me)
			if err != nil {
				return err
			}
			defer sub.Close()
			fill(one, seed, me, 0)
			if err := pg.AllReduce(ctx, sub, one, pg.Sum); err != nil {
				return &subgroupError{err, func(slot int) int { return me%2 + 2*slot }}
			}
			return nil
		}, func(i int) T {
			v := 0
			for r := me % 2; r < size; r += 2 {
				v += value(seed, r, i)
			}
			return T(v)
		}, func() []T { return one }},
	} {
		if err := step.do(); err != nil {
			return err
		}
		if err := same(step.name, step.result(), step.want); err != nil {
			return err
		}
	}
	return nil
}

// allReduce sums registered vectors, and compares.
func allReduce(ctx context.Context, g *pg.Group, seed uint64, counts []int) error {
	for _, n := range counts {
		x, err := pg.Alloc[float32](g, n)
		if err != nil {
			return err
		}
		fill(x, seed, g.Rank(), 0)
		if err := pg.AllReduce(ctx, g, x, pg.Sum); err != nil {
			return err
		}
		err = same("allreduce sum", x, func(i int) float32 {
			sum := 0
			for r := range g.Size() {
				sum += value(seed, r, i)
			}
			return float32(sum)
		})
		if err != nil {
			return err
		}
	}
	return nil
}
