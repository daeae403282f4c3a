//go:build linux

package torture

import (
	"context"
	"errors"
	"log/slog"
	"sync"
	"time"

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
	res := &Result{Errors: map[string]int{}, Faults: map[string]int{}, Graphs: map[string]int{}}
	fail := func(err error) *Result {
		res.find(&Finding{Kind: "error", Text: err.Error()})
		return res
	}
	files, err := makeGPUs()
	if err != nil && job.GPUs != NoGPUs {
		return fail(err)
	}
	seats := make([]*seat, job.Ranks)
	for i := range seats {
		if seats[i] = seats[0]; i == 0 || job.GPUs != NoGPUs { // else they share one device
			if seats[i], err = job.sit(i, p.Seed, files); err != nil {
				return fail(err)
			}
		}
	}
	grain.Set(grain.Sizes{Block: job.Block, Piece: job.Piece})
	groups, err := pg.Local(job.Ranks,
		pg.Config{Timeout: job.Timeout, OnFailure: job.OnFailure, Algorithm: job.Algorithm, Tuning: "off",
			Logger: slog.New(slog.DiscardHandler), Devices: seats[0].all, Progress: job.Progress,
			StagingLimit: job.Staging})
	if err != nil {
		return fail(err)
	}
	guide := localGuide{make(chan Finding, 1)}
	reports := map[int]*Report{}
	var mu sync.Mutex
	var wg, stepped, ran sync.WaitGroup
	stepped.Add(len(groups))
	ran.Add(len(groups))
	for me, g := range groups {
		r, err := newRank(job, me, guide, seats[me].memory, nil)
		if err != nil {
			return fail(err)
		}
		r.shared = true
		r.others = func() {
			stepped.Done()
			stepped.Wait()
		}
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
			if err := errors.Join(r.unmap(), seats[me].end()); err != nil {
				r.find("error", "%v", err)
			}
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
		abandonGPUs()
		res.find(&f)
	case <-time.After(patience):
		abandonGPUs()
		res.find(&Finding{Kind: "stuck", Text: "the program does not end"})
	}
	mu.Lock()
	defer mu.Unlock()
	judge(res, reports, nil)
	return res
}
