//go:build linux

package rig

import (
	"context"
	"errors"
	"fmt"
	"os"
	"runtime"
	"slices"
	"strings"
	"time"

	"tutti/pg"
)

// Usage lists the resources of a rank's process.
type Usage struct {
	Files      int // open descriptors
	Maps       int // of shared memory
	Goroutines int
	Heap       uint64 // bytes that are reachable
}

// Use returns the usage of this process.
func Use() *Usage {
	for range 2 { // the second collects what finalizers held
		runtime.GC()
	}
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	u := &Usage{Goroutines: runtime.NumGoroutine(), Heap: m.HeapAlloc}
	fds, _ := os.ReadDir("/proc/self/fd")
	u.Files = len(fds)
	maps, _ := os.ReadFile("/proc/self/maps")
	for line := range strings.Lines(string(maps)) {
		if strings.Contains(line, "/dev/shm/") || strings.Contains(line, "/memfd:") {
			u.Maps++
		}
	}
	return u
}

// chaos runs the rounds of a rank that continues after all losses, its own included. Ranks come and
// go, so that results cannot be computed in advance: every rank stamps its input with a number that
// it has never used before, results carry the stamps of all ranks that contributed, and have to
// match them.
type chaos struct {
	g      *pg.Group
	counts []int
	stamp  int64
	last   []int64 // the highest stamp seen of each slot
	l      *loop
}

// errLost ends a round whose group cannot be used on this rank any more.
var errLost = errors.New("no member any more")

// slots bounds the ranks of a job in chaos.
const slots = 8

func (l *loop) chaos(c Command) {
	// Stamps of later processes are higher: Seed is the number of the process. A sum of eight stays
	// exact in an int64.
	k := &chaos{counts: c.Counts, stamp: int64(c.Seed) << 32, last: make([]int64, slots), l: l}
	err := k.run(context.Background())
	if k.g != nil {
		k.g.Close()
	}
	l.mu.Lock()
	l.over, l.err = true, err
	l.more.Broadcast()
	l.mu.Unlock()
}

func (k *chaos) stopped() bool {
	k.l.mu.Lock()
	defer k.l.mu.Unlock()
	return k.l.stop
}

// note records what this rank does, for the verb "look".
func (k *chaos) note(format string, args ...any) {
	k.l.mu.Lock()
	k.l.doing = fmt.Sprintf(format, args...)
	k.l.mu.Unlock()
}

func (k *chaos) run(ctx context.Context) error {
	k.note("joining")
	for !k.stopped() {
		if k.g == nil {
			g, err := pg.Join(ctx, pg.Config{})
			if err != nil { // the store may be unreachable
				k.note("joining again after %v", err)
				continue
			}
			k.g = g
			k.l.mu.Lock()
			k.l.group = g
			k.l.joins++
			k.l.mu.Unlock()
		}
		if err := k.round(ctx); errors.Is(err, errLost) {
			k.note("joining again after %v", err)
			k.g.Close()
			k.g = nil
			continue
		} else if err != nil {
			return err
		}
		k.l.mu.Lock()
		k.l.steps++
		k.l.more.Broadcast()
		k.l.mu.Unlock()
	}
	return nil
}

// outcome interprets an operation's error: nil for expected ones, after which the next operation
// runs.
func (k *chaos) outcome(err error) error {
	var lost *pg.RankError
	switch {
	case errors.As(err, &lost):
		k.note("after %v", err)
		return nil
	case errors.Is(err, pg.ErrEvicted), errors.Is(err, pg.ErrIsolated):
		return fmt.Errorf("%w: %w", errLost, err)
	}
	return err
}

// round does each collective with each number of elements, and admits waiting ranks.
func (k *chaos) round(ctx context.Context) error {
	for _, n := range k.counts {
		for _, op := range []func(context.Context, int) error{k.allReduce, k.allGather, k.reduceScatter, k.allToAll,
			k.barrier} {
			began := time.Now()
			if err := k.outcome(op(ctx, n)); err != nil {
				return fmt.Errorf("%w (after %v)", err, time.Since(began).Round(time.Millisecond))
			}
		}
	}
	k.note("admit")
	_, err := k.g.Admit(ctx)
	return k.outcome(err)
}

func (k *chaos) next() int64 {
	k.stamp++
	return k.stamp
}

// datum is the input of the rank in slot at i under a stamp.
func datum(stamp int64, slot, i int) int64 { return int64(value(uint64(stamp), slot, i)) }

// seen checks the stamps in a result, 0 from ranks that contributed nothing: this rank's own is in
// it, and no stamp occurs twice.
func (k *chaos) seen(what string, stamps []int64, mine int64) error {
	for slot, s := range stamps {
		switch {
		case slot == k.g.Rank() && s != mine:
			return &WrongError{what + ": this rank's own stamp", slot, len(stamps), s, mine}
		case s != 0 && s <= k.last[slot]:
			return &WrongError{fmt.Sprintf("%s: a stamp of before (%d and earlier)", what, k.last[slot]), slot,
				len(stamps), s, k.last[slot] + 1}
		}
	}
	for slot, s := range stamps {
		k.last[slot] = max(k.last[slot], s)
	}
	return nil
}

func (k *chaos) allReduce(ctx context.Context, n int) error {
	me, mine := k.g.Rank(), k.next()
	k.note("allreduce of %d, stamp %#x", n, mine)
	x := make([]int64, slots+n)
	x[me] = mine
	for i := range n {
		x[slots+i] = datum(mine, me, i)
	}
	if err := pg.AllReduce(ctx, k.g, x, pg.Sum); err != nil {
		return err
	}
	return k.sum("allreduce", x, mine, 0)
}

// sum checks a sum of all inputs from offset at on.
func (k *chaos) sum(what string, x []int64, mine int64, at int) error {
	stamps := x[:slots]
	if err := k.seen(what, stamps, mine); err != nil {
		return err
	}
	return same(what, x[slots:], func(i int) (sum int64) {
		for slot, s := range stamps {
			if s != 0 {
				sum += datum(s, slot, at+i)
			}
		}
		return sum
	})
}

func (k *chaos) allGather(ctx context.Context, n int) error {
	me, mine := k.g.Rank(), k.next()
	k.note("allgather of %d, stamp %#x", n, mine)
	src, dst := make([]int64, 1+n), make([]int64, (1+n)*k.g.Size())
	src[0] = mine
	for i := range n {
		src[1+i] = datum(mine, me, i)
	}
	if err := pg.AllGather(ctx, k.g, dst, src); err != nil {
		return err
	}
	return k.parts("allgather", dst, n, mine, 0)
}

// parts checks the parts of all ranks, from offset at on, one after the other. The part of a rank
// that contributed nothing is unchanged.
func (k *chaos) parts(what string, dst []int64, n int, mine int64, at int) error {
	stamps := make([]int64, k.g.Size())
	for slot := range stamps {
		stamps[slot] = dst[slot*(1+n)]
	}
	if err := k.seen(what, stamps, mine); err != nil {
		return err
	}
	for slot, s := range stamps {
		if err := same(fmt.Sprintf("%s from rank %d", what, slot), dst[slot*(1+n)+1:(slot+1)*(1+n)], func(i int) int64 {
			if s == 0 {
				return 0
			}
			return datum(s, slot, at+i)
		}); err != nil {
			return err
		}
	}
	return nil
}

func (k *chaos) reduceScatter(ctx context.Context, n int) error {
	me, mine, size := k.g.Rank(), k.next(), k.g.Size()
	k.note("reducescatter of %d, stamp %#x", n, mine)
	src, dst := make([]int64, (slots+n)*size), make([]int64, slots+n)
	for to := range size {
		part := src[to*(slots+n):]
		part[me] = mine
		for i := range n {
			part[slots+i] = datum(mine, me, to*n+i)
		}
	}
	if err := pg.ReduceScatter(ctx, k.g, dst, src, pg.Sum); err != nil {
		return err
	}
	return k.sum("reducescatter", dst, mine, me*n)
}

func (k *chaos) allToAll(ctx context.Context, n int) error {
	me, mine, size := k.g.Rank(), k.next(), k.g.Size()
	k.note("alltoall of %d, stamp %#x", n, mine)
	src, dst := make([]int64, (1+n)*size), make([]int64, (1+n)*size)
	for to := range size {
		part := src[to*(1+n):]
		part[0] = mine
		for i := range n {
			part[1+i] = datum(mine, me, to*n+i)
		}
	}
	if err := pg.AllToAll(ctx, k.g, dst, src); err != nil {
		return err
	}
	return k.parts("alltoall", dst, n, mine, me*n)
}

func (k *chaos) barrier(ctx context.Context, _ int) error {
	k.note("barrier")
	return k.g.Barrier(ctx)
}

// Chaos is the state of a rank in chaos.
type Chaos struct {
	Joins  int
	Epoch  uint64
	Active []int
	Doing  string
}

func (l *loop) look() *Chaos {
	l.mu.Lock()
	defer l.mu.Unlock()
	c := &Chaos{Joins: l.joins, Doing: l.doing}
	if l.group != nil {
		v := l.group.View()
		c.Epoch, c.Active = v.Epoch, slices.Clone(v.Active)
	}
	return c
}
