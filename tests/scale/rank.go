//go:build linux

package main

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"strconv"
	"syscall"
	"time"

	"tutti/pg"
	"tutti/tests/internal/stats"
)

// Variables that make this program a rank of a job.
const (
	rankVariable     = "TUTTI_SCALE_RANK" // the part
	receivesVariable = "TUTTI_SCALE_RECEIVES"
	sendsVariable    = "TUTTI_SCALE_SENDS"
)

// runRank is a rank of a part. Rank 0 prints the figures.
func runRank(which string) error {
	ctx := context.Background()
	began := time.Now()
	g, err := pg.Join(ctx, pg.Config{})
	if err != nil {
		return err
	}
	defer g.Close()
	joined := time.Since(began)
	var figures []float64
	switch which {
	case "start":
		figures, err = rankOfStart(ctx, g, joined)
	case "messages":
		figures, err = rankOfMessages(ctx, g)
	default:
		err = fmt.Errorf("there is no part %q of ranks", which)
	}
	if err == nil {
		err = g.Barrier(ctx)
	}
	if err != nil || g.Rank() != 0 {
		return err
	}
	return json.NewEncoder(os.Stdout).Encode(figures)
}

// milliseconds returns the longest of all ranks' times.
func milliseconds(ctx context.Context, g *pg.Group, took ...time.Duration) ([]float64, error) {
	ms := make([]float64, len(took))
	for i, d := range took {
		ms[i] = float64(d) / float64(time.Millisecond)
	}
	return ms, pg.AllReduce(ctx, g, ms, pg.Max)
}

func rankOfStart(ctx context.Context, g *pg.Group, joined time.Duration) ([]float64, error) {
	x := make([]float32, 32<<10/4)
	for i := range x {
		x[i] = 1
	}
	t := time.Now()
	if err := pg.AllReduce(ctx, g, x, pg.Sum); err != nil {
		return nil, err
	}
	first := time.Since(t)
	for i, v := range x {
		if v != float32(g.Size()) {
			return nil, fmt.Errorf("element %d is %v, want %d", i, v, g.Size())
		}
	}
	return milliseconds(ctx, g, joined, first)
}

// number returns the value of a variable that this program has set.
func number(name string) (int, error) {
	n, err := strconv.Atoi(os.Getenv(name))
	if err != nil {
		return 0, fmt.Errorf("%s: %w", name, err)
	}
	return n, nil
}

// used returns the processor time that this process has used.
func used() (time.Duration, error) {
	var u syscall.Rusage
	err := syscall.Getrusage(syscall.RUSAGE_SELF, &u)
	return time.Duration(u.Utime.Nano() + u.Stime.Nano()), err
}

// Tags of the messages of rankOfMessages.
const (
	tagPosted = 1
	tagStored = 2
)

func rankOfMessages(ctx context.Context, g *pg.Group) ([]float64, error) {
	receives, err := number(receivesVariable)
	if err != nil {
		return nil, err
	}
	sends, err := number(sendsVariable)
	if err != nil {
		return nil, err
	}
	ratio, idle, err := beside(ctx, g, receives)
	if err != nil {
		return nil, err
	}
	began, err := manySends(ctx, g, sends)
	if err != nil {
		return nil, err
	}
	all := []float64{ratio, idle, began}
	return all, pg.AllReduce(ctx, g, all, pg.Max)
}

// beside returns the time of an allreduce while both ranks have posted receives, divided by that
// without, and the share of a processor, in percent, that a rank uses meanwhile without operations.
func beside(ctx context.Context, g *pg.Group, receives int) (ratio, idle float64, err error) {
	const calls = 4000
	x := make([]float32, 16)
	reduce := func() error { return pg.AllReduce(ctx, g, x, pg.Max) }
	var alone, with float64
	if _, err = median(calls, reduce); err != nil { // links and plans are made
		return 0, 0, err
	}
	if alone, err = median(calls, reduce); err != nil {
		return 0, 0, err
	}
	peer := 1 - g.Rank()
	got := make([]int64, receives)
	works := make([]*pg.Work, receives)
	for i := range works {
		works[i] = g.Start(pg.RecvOp{X: pg.BufferOf(got[i : i+1]), From: peer, Tag: tagPosted})
	}
	if with, err = median(calls, reduce); err != nil {
		return 0, 0, err
	}
	const rest = 2 * time.Second
	before, err := used()
	if err != nil {
		return 0, 0, err
	}
	time.Sleep(rest) // this is what is measured
	after, err := used()
	if err != nil {
		return 0, 0, err
	}
	for i := range works {
		if err := pg.Send(ctx, g, []int64{int64(i)}, peer, tagPosted); err != nil {
			return 0, 0, err
		}
	}
	for i, w := range works {
		if err := w.Wait(ctx); err != nil {
			return 0, 0, err
		}
		if got[i] != int64(i) {
			return 0, 0, fmt.Errorf("receive %d got message %d", i, got[i])
		}
	}
	again, err := median(calls, reduce)
	return with / stats.Median([]float64{alone, again}), 100 * float64(after-before) / float64(rest), err
}

// manySends returns how long rank 0 takes to start that many sends, in milliseconds. Rank 1
// receives them afterwards.
func manySends(ctx context.Context, g *pg.Group, sends int) (ms float64, err error) {
	if g.Rank() == 1 {
		if err := g.Barrier(ctx); err != nil { // all have been started
			return 0, err
		}
		for i := range sends {
			x := make([]int64, 8)
			if _, err := pg.Recv(ctx, g, x, 0, tagStored); err != nil {
				return 0, err
			}
			if x[0] != int64(i) {
				return 0, fmt.Errorf("receive %d got message %d", i, x[0])
			}
		}
		return 0, nil
	}
	data := make([]int64, 8*sends)
	works := make([]*pg.Work, sends)
	for i := range sends {
		data[8*i] = int64(i)
	}
	t := time.Now()
	for i := range works {
		works[i] = g.Start(pg.SendOp{X: pg.BufferOf(data[8*i : 8*i+8]), To: 1, Tag: tagStored})
	}
	took := time.Since(t)
	if err := g.Barrier(ctx); err != nil {
		return 0, err
	}
	for _, w := range works {
		if err := w.Wait(ctx); err != nil {
			return 0, err
		}
	}
	return float64(took) / float64(time.Millisecond), nil
}
