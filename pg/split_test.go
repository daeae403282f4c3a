package pg

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"tutti/pg/membership"
)

// sums checks that a group of these ranks of its job works, alone among itself.
func sums(ctx context.Context, g *Group, members ...int) error {
	x := []int64{int64(g.job.session.Self.Rank) + 1, 1}
	if err := AllReduce(ctx, g, x, Sum); err != nil {
		return err
	}
	want := int64(0)
	for _, r := range members {
		want += int64(r) + 1
	}
	if x[0] != want || x[1] != int64(len(members)) {
		return fmt.Errorf("%v among ranks %v, want %d from %d", x, members, want, len(members))
	}
	return nil
}

// TestSplitOfTwoGroupsAtOnce divides groups that share some of their ranks at the same time: no two
// subgroups share a channel.
func TestSplitOfTwoGroupsAtOnce(t *testing.T) {
	lots := [][]int{{0, 1, 2}, {1, 2, 3}, {0, 3}, {0, 1, 2, 3}}
	each(t, 4, Config{Timeout: 20 * time.Second}, func(ctx context.Context, g *Group) error {
		groups := make([]*Group, len(lots))
		for i, members := range lots {
			color := -1
			if slices.Contains(members, g.Rank()) {
				color = 0
			}
			var err error
			if groups[i], err = g.Split(ctx, color, 0); err != nil {
				return err
			}
			if groups[i] != nil {
				defer groups[i].Close()
			}
		}
		var wg sync.WaitGroup
		errs := make([]error, len(lots))
		for i, members := range lots {
			if groups[i] == nil {
				continue
			}
			wg.Go(func() {
				for range 30 {
					sub, err := groups[i].Split(ctx, 0, -g.Rank())
					if err == nil {
						if err = sums(ctx, sub, members...); err == nil {
							err = sub.Barrier(ctx)
						}
						sub.Close()
					}
					if err != nil {
						errs[i] = fmt.Errorf("a subgroup of %v: %w", members, err)
						return
					}
				}
			})
		}
		wg.Wait()
		for _, err := range errs {
			if err != nil {
				return err
			}
		}
		return nil
	})
}

// TestSubgroupSurvivesManyViews has a subgroup lose a member in a view that is far from the one in
// which it was made.
func TestSubgroupSurvivesManyViews(t *testing.T) {
	for _, epoch := range []uint64{513, 1 << 20, 1<<63 + 1} {
		t.Run(fmt.Sprint(epoch), func(t *testing.T) {
			each(t, 3, Config{Timeout: 20 * time.Second, OnFailure: Shrink}, func(ctx context.Context, g *Group) error {
				sub, err := g.Split(ctx, 0, 0)
				if err != nil {
					return err
				}
				defer sub.Close()
				if err := sums(ctx, sub, 0, 1, 2); err != nil {
					return err
				}
				if err := sub.Barrier(ctx); err != nil || g.Rank() == 2 {
					return err
				}
				g.job.proxy.Lock()
				v := membership.View{Epoch: epoch, Slots: slices.Clone(g.job.initial.Slots)}
				v.Slots[2] = membership.Slot{Left: epoch}
				g.job.initial = v
				sub.viewChanged()
				g.job.proxy.Unlock()
				return sums(ctx, sub, 0, 1)
			})
		})
	}
}

// TestCallAfterALoss checks what a call says that begins after a rank was lost: that its arguments
// are invalid, if they are, and otherwise its own name, not that of the call before.
func TestCallAfterALoss(t *testing.T) {
	each(t, 3, Config{Timeout: 20 * time.Second}, func(ctx context.Context, g *Group) error {
		sub, err := g.Split(ctx, 0, 0)
		if err != nil {
			return err
		}
		defer sub.Close()
		if err := sub.Barrier(ctx); err != nil || g.Rank() == 2 {
			return err
		}
		// Both have left the barrier: the failure of one's next call would end it at the other.
		if err := Send(ctx, g, []int64{1}, 1-g.Rank(), 0); err != nil {
			return err
		}
		if _, err := Recv(ctx, g, []int64{0}, 1-g.Rank(), 0); err != nil {
			return err
		}
		g.job.proxy.Lock()
		v := membership.View{Epoch: g.job.initial.Epoch + 1, Slots: slices.Clone(g.job.initial.Slots)}
		v.Slots[2] = membership.Slot{Left: v.Epoch}
		g.job.initial = v
		sub.viewChanged()
		g.job.proxy.Unlock()
		x := []int64{1}
		var argument *ArgumentError
		if err := Broadcast(ctx, sub, x, sub.Size()); !errors.As(err, &argument) {
			return fmt.Errorf("a broadcast from rank %d of %d: %v, want an *ArgumentError", sub.Size(), sub.Size(), err)
		}
		var lost *RankError
		err = sub.Start(ReduceOp{X: BufferOf(x), Root: 1, Op: Sum}).Wait(ctx)
		if !errors.As(err, &lost) || lost.Rank != 2 || !strings.HasPrefix(lost.Call, "reduce ") {
			return fmt.Errorf("a reduce without rank 2: %v, want an error that names both", err)
		}
		return nil
	})
}

// A rank that was lost is named, and not the rank that would name it, also if another one is in its
// place when that is seen.
func TestReplacedRankIsNamed(t *testing.T) {
	each(t, 3, Config{Timeout: 20 * time.Second}, func(ctx context.Context, g *Group) error {
		sub, err := g.Split(ctx, 0, 0)
		if err != nil {
			return err
		}
		defer sub.Close()
		if err := g.Barrier(ctx); err != nil {
			return err
		}
		g.job.proxy.Lock()
		defer g.job.proxy.Unlock()
		was := g.job.initial
		defer func() { g.job.initial = was }()
		for _, apart := range []uint64{0, 1} { // epochs between the loss and the replacement
			lost := was.Epoch + 1
			v := membership.View{Epoch: lost + apart, Slots: slices.Clone(was.Slots)}
			v.Slots[2] = membership.Slot{Incarnation: was.Slots[2].Incarnation + 1, Since: v.Epoch, Left: lost}
			g.job.initial = v
			for _, of := range []*Group{g, sub} {
				var others []int
				if g.Rank() != 2 {
					others = []int{2}
				}
				if slot, err := of.gone(); slot != 2 {
					return fmt.Errorf("rank %d is lost, want 2: %w", slot, err)
				}
				if all := of.besides(g.Rank()); !slices.Equal(all, others) {
					return fmt.Errorf("ranks %v are lost, want %v", all, others)
				}
			}
		}
		return nil
	})
}

// TestCallsLikeInternalOnes makes calls of the shapes that Split and Admit agree with, which are
// uniform by themselves: those of a program are not, however each rank makes them.
func TestCallsLikeInternalOnes(t *testing.T) {
	each(t, 2, Config{Timeout: 20 * time.Second}, func(ctx context.Context, g *Group) error {
		mine, all := make([]int64, 4), make([]int64, 8)
		field := make([]uint64, admitFields)
		for range 3 {
			if _, err := g.Split(ctx, -1, 0); err != nil {
				return err
			}
			if g.Rank() == 0 {
				if err := AllGather(ctx, g, all, mine); err != nil {
					return err
				}
			} else if err := g.Start(AllGatherOp{Dst: BufferOf(all), Src: BufferOf(mine)}).Wait(ctx); err != nil {
				return err
			}
			if _, err := g.Admit(ctx); err != nil {
				return err
			}
			if g.Rank() == 0 {
				if err := AllReduce(ctx, g, field, Max); err != nil {
					return err
				}
			} else if err := g.Start(AllReduceOp{Dst: BufferOf(field), Op: Max}).Wait(ctx); err != nil {
				return err
			}
		}
		return nil
	})
}

// Calls that exchange small records of their own do not match a program's collective of the same
// shape: at both ranks the error names them.
func TestSplitMatchesNoCollective(t *testing.T) {
	gather := func(n int) func(context.Context, *Group) error {
		return func(ctx context.Context, g *Group) error {
			return AllGather(ctx, g, make([]int64, n*g.Size()), make([]int64, n))
		}
	}
	for name, calls := range map[string][2]func(context.Context, *Group) error{
		"split": {gather(4), func(ctx context.Context, g *Group) error {
			_, err := g.Split(ctx, 0, 0)
			return err
		}},
		"window": {gather(saysWords), func(ctx context.Context, g *Group) error {
			_, err := NewWindow(ctx, g, 64)
			return err
		}},
	} {
		for _, uniform := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s, uniform %t", name, uniform), func(t *testing.T) {
				each(t, 2, Config{Uniform: uniform}, func(ctx context.Context, g *Group) error {
					err := calls[g.Rank()](ctx, g)
					var differ *MismatchError
					if !errors.As(err, &differ) || !strings.Contains(err.Error(), name+" #1") {
						return fmt.Errorf("got %v, want a *MismatchError that names %s #1", err, name)
					}
					return nil
				})
			})
		}
	}
	if what := admitCall.Describe(); what != "admit" {
		t.Errorf("Admit is called %q", what)
	}
}

// The error of a rank that others wait for in Split says so.
func TestLateSplitIsNamed(t *testing.T) {
	gs, err := Local(2, Config{Timeout: 50 * time.Millisecond})
	if err != nil {
		t.Fatal(err)
	}
	defer gs[0].Close()
	defer gs[1].Close()
	_, err = gs[0].Split(t.Context(), 0, 0)
	if late := (*TimeoutError)(nil); !errors.As(err, &late) || late.Call != "split #1" {
		t.Errorf("got %v, want a *TimeoutError of split #1", err)
	}
}

// The errors of a subgroup have its own numbers of ranks, and their texts the job's, too. Those of
// a subgroup of all ranks with their numbers in the job have one number.
func TestErrorsOfSubgroupsNameRanksOfTheJob(t *testing.T) {
	each(t, 4, Config{Timeout: 20 * time.Second}, func(ctx context.Context, g *Group) error {
		all, err := g.Split(ctx, 0, 0)
		if err != nil {
			return err
		}
		defer all.Close()
		sub, err := g.Split(ctx, g.Rank()/2, -g.Rank())
		if err != nil {
			return err
		}
		defer sub.Close()
		ours := func(slot int) int { return g.Rank()/2*2 + 1 - slot } // of the job
		has := func(err error, text string) error {
			if err == nil || !strings.Contains(err.Error(), text) {
				return fmt.Errorf("%v, want %q in it", err, text)
			}
			return nil
		}
		if sub.Rank() == 0 {
			over, cancel := context.WithCancel(ctx)
			cancel()
			err = has(sub.Barrier(over), fmt.Sprintf("on rank 0 of a subgroup (rank %d of the job) after ", ours(0)))
		} else {
			err = has(sub.Barrier(ctx), fmt.Sprintf("on rank 0 of a subgroup (rank %d of the job) after ", ours(0)))
		}
		if err == nil {
			err = sub.Recover(ctx)
		}
		if err != nil {
			return err
		}
		if sub.Rank() == 0 {
			err = sub.Barrier(ctx)
		} else {
			err = AllReduce(ctx, sub, []float32{1}, Sum)
		}
		var differ *MismatchError
		if !errors.As(err, &differ) {
			return fmt.Errorf("%v, want a mismatch", err)
		}
		if err := has(err, fmt.Sprintf("ranks disagree: rank %d of a subgroup (rank %d of the job) called ",
			differ.RankA, ours(differ.RankA))); err != nil {
			return err
		}
		if err := has(err, fmt.Sprintf(", rank %d (rank %d of the job) called ", differ.RankB,
			ours(differ.RankB))); err != nil {
			return err
		}
		if err := sub.Recover(ctx); err != nil {
			return err
		}
		if err := g.Barrier(ctx); err != nil {
			return err
		}
		if g.Rank() == 3 {
			all.Abort(errors.New("enough"))
			return errors.Join(sub.Close(), all.Close(), g.Close())
		}
		if err := has(all.Barrier(ctx), "rank 3: process group aborted: enough"); err != nil {
			return err
		}
		if g.Rank() == 2 { // rank 1 of its subgroup, whose rank 0 has left the job
			err := AllReduce(ctx, sub, []float32{1}, Sum)
			var lost *RankError
			if !errors.As(err, &lost) || lost.Rank != 0 || lost.Reporter != 1 {
				return fmt.Errorf("%#v, want the loss of rank 0", err)
			}
			return has(err, "rank 0 of a subgroup (rank 3 of the job) failed during ")
		}
		return nil
	})
}
