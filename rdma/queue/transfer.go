package queue

import (
	"context"
	"errors"
	"fmt"
	"sync"

	"tutti/rdma"
)

// A Transfer is a batch under way. Its methods may be called from any goroutine.
type Transfer struct {
	set *Set

	mu      sync.Mutex
	pending int // records, and Submit
	err     error
	bell    chan struct{}
}

// hold adds a record.
func (t *Transfer) hold() {
	t.mu.Lock()
	t.pending++
	t.mu.Unlock()
}

// drop removes a record that ended with err, or Submit.
func (t *Transfer) drop(err error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.failLocked(err)
	if t.pending--; t.pending == 0 && t.bell != nil {
		close(t.bell)
	}
}

// fail has the transfer end with err, unless there was an error before.
func (t *Transfer) fail(err error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.failLocked(err)
}

// failLocked keeps the first error that is no consequence of another failure of the set.
func (t *Transfer) failLocked(err error) {
	if err == nil || t.pending == 0 || t.err != nil && (follows(err) || !follows(t.err)) {
		return
	}
	if flushed(err) {
		if cause := t.set.Err(); cause != nil {
			err = fmt.Errorf("%w, because of: %w", err, cause)
		}
	}
	t.err = err
}

// follows reports whether a request has err because another one failed before it.
func follows(err error) bool { return flushed(err) || errors.Is(err, ErrFailed) }

func flushed(err error) bool {
	var status *rdma.StatusError
	return errors.As(err, &status) && status.Status == rdma.Flushed
}

// Done returns a channel that is closed when the transfer has ended. A goroutine has to poll.
func (t *Transfer) Done() <-chan struct{} {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.bell == nil {
		t.bell = make(chan struct{})
		if t.pending == 0 {
			close(t.bell)
		}
	}
	return t.bell
}

// Ended reports whether the transfer has ended. If so, nothing uses its memory, and Err returns its
// result.
func (t *Transfer) Ended() bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.pending == 0
}

// Err returns the result of a transfer that has ended: nil, or an error, a *rdma.StatusError or why
// the rest of the batch was not posted. It is the first one, unless that was a consequence of a
// failure (a flush, ErrFailed) and another one of the batch was not. It returns nil before.
func (t *Transfer) Err() error {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.pending > 0 {
		return nil
	}
	return t.err
}

// Wait waits until the transfer has ended, and returns its result. It polls. If ctx ends before,
// the transfer is cancelled: its whole set fails, and Wait returns ctx's error when nothing uses
// the memory any more, within Config.Drain. If even that is impossible, Wait returns the error of
// Set.Drain, and the transfer has not ended.
func (t *Transfer) Wait(ctx context.Context) error {
	var p pace
	defer p.stop()
	for !t.Ended() {
		n, err := t.set.poller.Poll()
		if t.Ended() {
			break
		}
		if err == nil {
			var bell <-chan struct{}
			if p.sleeps() {
				bell = t.Done()
			}
			err = p.wait(ctx, n > 0, bell, 0)
		}
		if err == nil {
			continue
		}
		cancelled := fmt.Errorf("rdma: the transfer was cancelled: %w", err)
		if ended := t.cancel(cancelled); ended != nil {
			return errors.Join(cancelled, ended)
		}
	}
	return t.Err()
}

// cancel ends the transfer with an error, unless it has ended.
func (t *Transfer) cancel(err error) error {
	if t.Ended() {
		return nil
	}
	t.fail(err)
	t.set.Fail(err)
	return t.set.Drain(context.Background())
}
