package exec

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"slices"
	"sync"
	"testing"
	"time"

	"tutti/collectives"
	"tutti/kernels"
)

// arrived reports whether every message of x's running plan has come that is not from the rank in
// slot late.
func (x *runner) arrived(late int) bool {
	x.proxy.Lock()
	defer x.proxy.Unlock()
	if x.prog == nil {
		return false
	}
	for _, n := range x.prog.recvs {
		if int(x.prog.Steps[n].Peer) != late && !(x.recvs[n].Posted() && x.recvs[n].Done()) {
			return false
		}
	}
	return true
}

// While a rank is late, the others exchange all that they have for each other: a Send that waits
// for the late rank does not hold up those after it.
func TestStepsRunWhileOthersWait(t *testing.T) {
	const n = 4
	for late := range n {
		t.Run(fmt.Sprintf("rank %d is late", late), func(t *testing.T) {
			all := ranks(t, n, 1, true)
			const count = 256 << 10 // elements of a part, which the links cannot hold
			ctx, cancel := context.WithTimeout(t.Context(), patience)
			defer cancel()
			errs := make([]error, n)
			bufs := make([][]int64, n)
			var wg sync.WaitGroup
			start := func(r int) {
				src := make([]int64, n*count)
				bufs[r] = make([]int64, n*count)
				for i := range src {
					src[i] = int64(r*n*count + i)
				}
				q := &Request{Kind: collectives.AllToAll, Src: buffer(src, kernels.Int64),
					Dst: buffer(bufs[r], kernels.Int64)}
				wg.Go(func() { errs[r] = all[r].runners[0].run(ctx, q, collectives.OneShot) })
			}
			for r := range n {
				if r != late {
					start(r)
				}
			}
			for r := range n {
				for r != late && !all[r].runners[0].arrived(late) {
					if ctx.Err() != nil {
						t.Errorf("rank %d waits for rank %d, and not all of the others' messages have come", r, late)
						break
					}
					runtime.Gosched()
				}
			}
			start(late)
			wg.Wait()
			if err := errors.Join(errs...); err != nil {
				t.Fatal(err)
			}
			for r, dst := range bufs {
				for i, v := range dst {
					if want := int64(i/count*n*count + r*count + i%count); v != want {
						t.Fatalf("rank %d: element %d is %d, want %d", r, i, v, want)
					}
				}
			}
		})
	}
}

// BenchmarkLateRank measures an alltoall among four ranks of which one comes 20 ms after the
// others, from its call to the last rank's return.
func BenchmarkLateRank(b *testing.B) {
	const n, late, head = 4, 3, 20 * time.Millisecond
	for _, part := range []int{256 << 10, 2 << 20} {
		b.Run(fmt.Sprintf("%dK", part>>10), func(b *testing.B) {
			all := ranks(b, n, 1, true)
			src, dst := make([][]int64, n), make([][]int64, n)
			for r := range n {
				src[r], dst[r] = make([]int64, n*part/8), make([]int64, n*part/8)
			}
			var took []time.Duration
			for b.Loop() {
				errs := make([]error, n)
				var wg sync.WaitGroup
				var begun time.Time
				for r := range n {
					wg.Go(func() {
						if r == late {
							time.Sleep(head)
							begun = time.Now()
						}
						q := &Request{Kind: collectives.AllToAll, Src: buffer(src[r], kernels.Int64),
							Dst: buffer(dst[r], kernels.Int64)}
						errs[r] = all[r].runners[0].run(b.Context(), q, collectives.OneShot)
					})
				}
				wg.Wait()
				took = append(took, time.Since(begun))
				if err := errors.Join(errs...); err != nil {
					b.Fatal(err)
				}
			}
			slices.Sort(took)
			b.ReportMetric(float64(took[len(took)/2].Nanoseconds()), "p50-late-ns")
		})
	}
}
