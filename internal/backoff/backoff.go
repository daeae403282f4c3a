// Package backoff paces loops that poll or try again.
package backoff

import (
	"context"
	"runtime"
	"time"
)

// A Backoff paces one loop: it yields the processor for a while, and then sleeps. The zero value is
// ready. Its maker calls Stop in the end.
type Backoff struct {
	// Yields is how often Wait yields before it sleeps.
	Yields int
	// Nap is how long a sleep takes.
	Nap time.Duration

	waits int
	timer *time.Timer
}

// Wait lets others run for a moment. It returns ctx's error if ctx has ended.
func (b *Backoff) Wait(ctx context.Context) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	if b.waits < b.Yields {
		b.waits++
		runtime.Gosched()
		return nil
	}
	if b.timer == nil {
		b.timer = time.NewTimer(b.Nap)
	} else {
		b.timer.Reset(b.Nap)
	}
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-b.timer.C:
		return nil
	}
}

// Reset says that the loop has found something to do: Wait yields again before it sleeps.
func (b *Backoff) Reset() { b.waits = 0 }

// Stop releases what the Backoff holds.
func (b *Backoff) Stop() {
	if b.timer != nil {
		b.timer.Stop()
	}
}

// Sleep waits for d. It returns false if ctx ended first.
func Sleep(ctx context.Context, d time.Duration) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return ctx.Err() == nil
	case <-ctx.Done():
		return false
	}
}
