//go:build cgo && linux

package main

import (
	"context"
	"errors"
	"sync"
	"time"
)

// errCancelled is the cause of calls that the host's check has ended.
var errCancelled = errors.New("the call was interrupted")

// limit is a context with a deadline. Unlike those of package context it is reused if its time was
// not up, so that a call with a timeout allocates nothing.
type limit struct {
	mu       sync.Mutex
	done     chan struct{}
	err      error
	deadline time.Time
	timer    *time.Timer
}

var limits = sync.Pool{New: func() any {
	l := &limit{done: make(chan struct{})}
	l.timer = time.AfterFunc(time.Hour, func() { l.end(context.DeadlineExceeded) })
	l.timer.Stop()
	return l
}}

// within returns a context that ends after d. The caller must release it.
func within(d time.Duration) *limit {
	l := limits.Get().(*limit)
	l.deadline = time.Now().Add(d)
	l.timer.Reset(d)
	return l
}

// release ends the use of l. Nothing may use it afterwards.
func (l *limit) release() {
	if l.timer.Stop() {
		limits.Put(l)
	}
}

func (l *limit) end(err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.err == nil {
		l.err = err
		close(l.done)
	}
}

func (l *limit) Deadline() (time.Time, bool) { return l.deadline, true }
func (l *limit) Done() <-chan struct{}       { return l.done }
func (l *limit) Value(any) any               { return nil }

func (l *limit) Err() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.err
}
