// Command stalls runs a command and stops processes of it, now one and now another, for random
// times, as a busy machine does. A test that fails then relies on a process that continues in time:
//
//	go build -o .build/stalls ./tests/stalls
//	go test -exec "$PWD/.build/stalls -rate 4 -most 900ms" -count=1 ./pg
//
// The freezer of control groups stops them: unlike SIGSTOP, neither they nor their parents see it,
// and SIGCONT does not end it. It needs a mounted control group, of either version, in which this
// process may make others: usually root.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"os/signal"
	"sync"
	"syscall"
	"time"

	"tutti/internal/backoff"
)

// options say how often, and for how long, processes are stopped.
type options struct {
	lanes int           // processes that may be stopped at the same time
	rate  float64       // a lane stops this many a second, in the mean, while none of its is stopped
	most  time.Duration // that one is stopped
}

func main() {
	var o options
	flag.IntVar(&o.lanes, "lanes", 2, "`number` of processes that may be stopped at the same time")
	flag.Float64Var(&o.rate, "rate", 4, "stops a `second` of each lane, while none of its is stopped")
	flag.DurationVar(&o.most, "most", 900*time.Millisecond, "longest stop; a quarter of it is the mean")
	flag.Parse()
	if flag.NArg() == 0 || o.lanes < 1 || o.rate <= 0 || o.most <= 0 {
		fmt.Fprintln(os.Stderr, "usage: stalls [-lanes N] [-rate R] [-most D] COMMAND [ARGUMENT]...")
		os.Exit(2)
	}
	code, err := run(o, flag.Args())
	if err != nil {
		fmt.Fprintln(os.Stderr, "stalls:", err)
		os.Exit(2)
	}
	os.Exit(code)
}

// run runs the command and returns its exit code.
func run(o options, argv []string) (code int, err error) {
	base, err := newGroup()
	if err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, base.remove()) }()
	var lanes []*group
	for i := range o.lanes {
		lane, err := base.child(fmt.Sprint("lane", i))
		if err != nil {
			return 0, err
		}
		defer func() { err = errors.Join(err, lane.remove()) }() // before base
		lanes = append(lanes, lane)
	}

	// The command begins in base: its processes are born there, or where the parent is stopped.
	cmd := exec.Command("/bin/sh", append([]string{"-c", `echo $$ >"$0" && exec "$@"`, base.procs()}, argv...)...)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	signals := make(chan os.Signal, 8)
	signal.Notify(signals, syscall.SIGINT, syscall.SIGTERM, syscall.SIGQUIT, syscall.SIGHUP)
	defer signal.Stop(signals)
	if err := cmd.Start(); err != nil {
		return 0, err
	}
	ctx, end := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	for _, lane := range lanes {
		wg.Go(func() { disturb(ctx, o, base, lane) })
	}
	wg.Go(func() {
		for {
			select {
			case s := <-signals:
				if s == syscall.SIGTERM || s == syscall.SIGQUIT { // a terminal sends the others to the command, too
					_ = cmd.Process.Signal(s)
				}
			case <-ctx.Done():
				return
			}
		}
	})
	err = cmd.Wait()
	end()
	wg.Wait()
	if e := (*exec.ExitError)(nil); errors.As(err, &e) {
		if s, ok := e.Sys().(syscall.WaitStatus); ok && s.Signaled() {
			return 128 + int(s.Signal()), nil
		}
		return e.ExitCode(), nil
	}
	return 0, err
}

// disturb stops processes of base in lane until ctx ends. What it has stopped continues before it
// returns.
func disturb(ctx context.Context, o options, base, lane *group) {
	for backoff.Sleep(ctx, time.Duration(rand.ExpFloat64()/o.rate*float64(time.Second))) {
		all := base.members()
		if len(all) == 0 {
			continue
		}
		one := all[rand.IntN(len(all))]
		if lane.take(one) == nil && lane.freeze(true) == nil { // it has not ended
			u := rand.Float64()
			backoff.Sleep(ctx, time.Duration(u*u*u*float64(o.most)))
		}
		_ = lane.freeze(false)
		lane.empty(base)
	}
}
