//go:build linux

package torture

import (
	"fmt"
	"runtime"
	"sync"
	"time"
)

const (
	// slack is how much later than its deadline a call may return, on a busy machine.
	slack = 5 * time.Second
	// hung is how much later a call counts as hung.
	hung = 20 * time.Second
)

// watch knows the calls under way.
type watch struct {
	hang        func(text string)
	slack, hung time.Duration

	mu     sync.Mutex
	calls  map[*underWay]struct{}
	last   time.Time     // of the last look
	frozen time.Duration // time until then in which this process did not run
	stop   chan struct{}
}

type underWay struct {
	what   string
	began  time.Time
	frozen time.Duration
	limit  time.Duration
}

const lookEvery = 50 * time.Millisecond

// look detects that the process was stopped. With w's lock, like age.
func (w *watch) look() {
	now := time.Now()
	if gap := now.Sub(w.last); gap > 3*lookEvery {
		w.frozen += gap - lookEvery
	}
	w.last = now
}

// age returns the time of the call, without the time in which the process was stopped.
func (w *watch) age(c *underWay) time.Duration {
	w.look()
	return time.Since(c.began) - (w.frozen - c.frozen)
}

func newWatch(slack, hung time.Duration, hang func(text string)) *watch {
	w := &watch{hang: hang, slack: slack, hung: hung, calls: map[*underWay]struct{}{}, last: time.Now(),
		stop: make(chan struct{})}
	go func() {
		t := time.NewTicker(lookEvery)
		defer t.Stop()
		for {
			select {
			case <-t.C:
			case <-w.stop:
				return
			}
			w.mu.Lock()
			w.look()
			var late *underWay
			for c := range w.calls {
				if w.age(c) > c.limit+w.hung {
					late = c
				}
			}
			w.mu.Unlock()
			if late != nil {
				buf := make([]byte, 1<<20)
				w.hang(fmt.Sprintf("%s has not returned after %v, where %v were its limit\n%s", late.what,
					time.Since(late.began).Round(time.Millisecond), late.limit, buf[:runtime.Stack(buf, true)]))
				return
			}
		}
	}()
	return w
}

// call runs f, which should end within limit. The text says that it was late, or is "".
func (w *watch) call(what string, limit time.Duration, f func() error) (late string, err error) {
	w.mu.Lock()
	w.look()
	c := &underWay{what: what, began: time.Now(), frozen: w.frozen, limit: limit}
	w.calls[c] = struct{}{}
	w.mu.Unlock()
	err = f()
	w.mu.Lock()
	defer w.mu.Unlock()
	delete(w.calls, c)
	if age := w.age(c); age > limit+w.slack {
		late = fmt.Sprintf("%s returned after %v, where %v were its limit (and %v): %v", what,
			age.Round(time.Millisecond), limit, w.slack, err)
	}
	return late, err
}

func (w *watch) close() { close(w.stop) }
