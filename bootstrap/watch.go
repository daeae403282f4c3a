package bootstrap

import (
	"context"
	"fmt"
	"sync"
)

// mailbox carries the events of one watch from the store to the receiver, at most one a key: the
// newest, in the order in which the keys first changed.
type mailbox struct {
	mu    sync.Mutex
	order []string
	last  map[string]Event
	more  chan struct{} // holds one token after put
}

func newMailbox() *mailbox { return &mailbox{last: map[string]Event{}, more: make(chan struct{}, 1)} }

func (m *mailbox) put(events ...Event) {
	m.mu.Lock()
	for _, e := range events {
		if _, ok := m.last[e.Key]; !ok {
			m.order = append(m.order, e.Key)
		}
		m.last[e.Key] = e
	}
	m.mu.Unlock()
	select {
	case m.more <- struct{}{}:
	default:
	}
}

func (m *mailbox) pop() (Event, bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if len(m.order) == 0 {
		return Event{}, false
	}
	e := m.last[m.order[0]]
	delete(m.last, e.Key)
	m.order = m.order[1:]
	return e, true
}

// newer takes the event that supersedes e, if there is one.
func (m *mailbox) newer(e Event) Event {
	m.mu.Lock()
	defer m.mu.Unlock()
	n, ok := m.last[e.Key]
	if !ok {
		return e
	}
	delete(m.last, e.Key)
	for i, k := range m.order {
		if k == e.Key {
			m.order = append(m.order[:i:i], m.order[i+1:]...)
			break
		}
	}
	return n
}

// run delivers to out, which must have room for one event, until ctx ends, end is closed or an
// event with Err was delivered, and closes it. If end is closed the last event carries why.
func (m *mailbox) run(ctx context.Context, end <-chan struct{}, why func() error, out chan Event) {
	defer close(out)
	final := func() {
		for {
			select {
			case out <- Event{Err: why()}:
				return
			default: // nobody takes the event before it, which this one makes worthless
				select {
				case <-out:
				default:
				}
			}
		}
	}
	for {
		e, ok := m.pop()
		if !ok {
			select {
			case <-m.more:
			case <-ctx.Done():
				return
			case <-end:
				final()
				return
			}
			continue
		}
		for sent := false; !sent; {
			select {
			case out <- e:
				if sent = true; e.Err != nil {
					return
				}
			case <-m.more:
				e = m.newer(e)
			case <-ctx.Done():
				return
			case <-end:
				final()
				return
			}
		}
	}
}

// wait is Store.Wait by a watch.
func wait(ctx context.Context, s Store, key string) ([]byte, error) {
	wctx, cancel := context.WithCancel(ctx)
	defer cancel()
	for e := range s.Watch(wctx, key) {
		if e.Err != nil || e.Exists {
			return e.Value, e.Err
		}
	}
	return nil, fmt.Errorf("wait for key %s: %w", key, context.Cause(ctx))
}
