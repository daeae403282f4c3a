package pg

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

// BenchmarkBarrierBeside measures a barrier of one group, from its last rank's call to its last
// rank's return, while the same two ranks repeatedly run an allreduce of 16 MiB in another group.
// "alone" is the barrier without the allreduce. The time per operation contains the pause between
// two barriers.
func BenchmarkBarrierBeside(b *testing.B) {
	const n, size = 2, 16 << 20
	const pause = 200 * time.Microsecond // between two barriers
	for _, name := range []string{"alone", "allreduce"} {
		b.Run(name, func(b *testing.B) {
			gs, err := Local(n, Config{Timeout: 20 * time.Second})
			if err != nil {
				b.Fatal(err)
			}
			ctx := context.Background()
			var wg sync.WaitGroup
			errs := make([]error, 2*n)
			small := make([]*Group, n)
			for r, g := range gs {
				wg.Go(func() { small[r], errs[r] = g.Split(ctx, 0, 0) })
			}
			wg.Wait()
			var busy sync.WaitGroup
			var enough atomic.Bool
			var reduced atomic.Int64
			for r, g := range gs {
				if name == "alone" || errs[r] != nil {
					continue
				}
				busy.Go(func() {
					x := make([]float32, size/4)
					for x[0] == 0 && errs[n+r] == nil { // a rank that has finished tells the other
						if enough.Load() {
							x[0] = 1
						}
						errs[n+r] = AllReduce(ctx, g, x, Sum)
						reduced.Add(1)
					}
				})
			}
			began, ended := make([][]time.Duration, n), make([][]time.Duration, n)
			count := b.N
			b.ResetTimer()
			start := time.Now()
			for r, g := range small {
				wg.Go(func() {
					for range count {
						time.Sleep(pause)
						began[r] = append(began[r], time.Since(start))
						if err := g.Barrier(ctx); err != nil {
							errs[r] = errors.Join(errs[r], err)
							return
						}
						ended[r] = append(ended[r], time.Since(start))
					}
				})
			}
			wg.Wait()
			b.StopTimer()
			rate := float64(reduced.Load()) / n / b.Elapsed().Seconds()
			enough.Store(true)
			busy.Wait()
			for _, g := range slices.Concat(small, gs) {
				if g != nil {
					g.Close()
				}
			}
			if err := errors.Join(errs...); err != nil {
				b.Fatal(err)
			}
			times := make([]time.Duration, count)
			for i := range times {
				times[i] = max(ended[0][i], ended[1][i]) - max(began[0][i], began[1][i])
			}
			slices.Sort(times)
			b.ReportMetric(float64(times[len(times)/2].Nanoseconds()), "p50-ns")
			b.ReportMetric(rate, "allreduces/s")
			b.ReportMetric(float64(times[len(times)-1].Nanoseconds()), "max-ns")
			b.ReportMetric(float64(times[len(times)*99/100].Nanoseconds()), "p99-ns")
		})
	}
}

// BenchmarkStartWithoutPeer measures Start of an allreduce while the other rank is absent: it comes
// when 64 operations have been started.
func BenchmarkStartWithoutPeer(b *testing.B) {
	const queue = 64
	for _, size := range []int{64, 64 << 10, 1 << 20} {
		b.Run(fmt.Sprint(size), func(b *testing.B) {
			gs, err := Local(2, Config{Timeout: 20 * time.Second})
			if err != nil {
				b.Fatal(err)
			}
			ctx := context.Background()
			works := make([]*Work, queue)
			x, y := make([]float32, size/4), make([]float32, size/4)
			var times []time.Duration
			for b.Loop() {
				for i := range works {
					began := time.Now()
					works[i] = gs[0].Start(AllReduceOp{Dst: BufferOf(x), Op: Sum})
					times = append(times, time.Since(began))
				}
				for range works {
					if err := AllReduce(ctx, gs[1], y, Sum); err != nil {
						b.Fatal(err)
					}
				}
				for _, w := range works {
					if err := w.Wait(ctx); err != nil {
						b.Fatal(err)
					}
				}
			}
			for _, g := range gs {
				g.Close()
			}
			slices.Sort(times)
			b.ReportMetric(float64(times[len(times)/2].Nanoseconds()), "p50-ns")
			b.ReportMetric(float64(times[len(times)*99/100].Nanoseconds()), "p99-ns")
		})
	}
}
