package queue

import (
	"context"
	"errors"
	"runtime"
	"time"
)

const (
	yields = 100 // before the first sleep
	nap    = 50 * time.Microsecond
)

// errTime is the error of a wait whose time is over.
var errTime = errors.New("time is over")

// pace is a wait of two phases: it yields, and then sleeps for short times. Its maker stops it.
type pace struct {
	waits int
	begin time.Time
	timer *time.Timer
}

// waited returns the time since the first wait.
func (p *pace) waited() time.Duration {
	if p.begin.IsZero() {
		return 0
	}
	return time.Since(p.begin)
}

// sleeps reports whether the next wait sleeps, unless it is a busy one.
func (p *pace) sleeps() bool { return p.waits >= yields }

// wait lets others run. It returns early when bell is closed, and fails with ctx's error when ctx
// ends, and with errTime if limit, unless it is 0, has passed since the first wait. With busy,
// there was something to do, and the first phase begins again.
func (p *pace) wait(ctx context.Context, busy bool, bell <-chan struct{}, limit time.Duration) error {
	if p.begin.IsZero() {
		p.begin = time.Now()
	}
	if err := ctx.Err(); err != nil {
		return err
	}
	if limit != 0 && p.waited() >= limit {
		return errTime
	}
	if busy {
		p.waits = 0
	}
	if !p.sleeps() {
		p.waits++
		runtime.Gosched()
		return nil
	}
	if p.timer == nil {
		p.timer = time.NewTimer(nap)
	} else {
		p.timer.Reset(nap)
	}
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-bell:
	case <-p.timer.C:
	}
	return nil
}

func (p *pace) stop() {
	if p.timer != nil {
		p.timer.Stop()
	}
}
