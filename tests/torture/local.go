//go:build linux

package torture

import (
	"context"
	"log/slog"
	"sync"
	"time"

	"tutti/device"
	"tutti/internal/grain"
	"tutti/pg"
)

// localGuide is the guide of ranks of one process, which have no faults from outside.
type localGuide struct {
	hang chan Finding
}

func (localGuide) At(int) {}

func (localGuide) Gate(Gate) Go { return Go{} }

func (localGuide) Found(Finding) {}

func (l localGuide) Hang(f Finding) {
	select {
	case l.hang <- f:
	default:
	}
}

// runLocal runs programs on ranks of this process. Each has a job of its own, because such groups
// do not recover.
func runLocal(job Job, p *Program, conduct func(ctx context.Context, c *call, how How) error) *Result {
	res := &Result{Errors: map[string]int{}, Faults: map[string]int{}}
	d := newDevice(p.Seed)
	grain.Set(grain.Sizes{Block: job.Block, Piece: job.Piece})
	groups, err := pg.Local(job.Ranks,
		pg.Config{Timeout: job.Timeout, OnFailure: job.OnFailure, Algorithm: job.Algorithm, Tuning: "off",
			Logger: slog.New(slog.DiscardHandler), Devices: device.List{d}})
	if err != nil {
		res.find(&Finding{Kind: "error", Text: err.Error()})
		return res
	}
	guide := localGuide{make(chan Finding, 1)}
	reports := map[int]*Report{}
	var mu sync.Mutex
	var wg, ran sync.WaitGroup
	ran.Add(len(groups))
	for me, g := range groups {
		r, err := newRank(job, me, guide, d, nil)
		if err != nil {
			res.find(&Finding{Kind: "error", Text: err.Error()})
			return res
		}
		r.shared = true
		if conduct != nil {
			r.conduct = conduct
		}
		wg.Go(func() {
			r.enter(g)
			rep := r.run(p, 0, nil)
			ran.Done()
			ran.Wait() // waits for all ranks
			r.leave()
			r.close()
			r.unmap()
			mu.Lock()
			reports[me] = rep
			mu.Unlock()
		})
	}
	done := make(chan struct{})
	go func() { wg.Wait(); close(done) }()
	select {
	case <-done:
	case f := <-guide.hang:
		res.find(&f)
	case <-time.After(patience):
		res.find(&Finding{Kind: "stuck", Text: "the program does not end"})
	}
	mu.Lock()
	defer mu.Unlock()
	judge(res, reports, nil)
	return res
}
