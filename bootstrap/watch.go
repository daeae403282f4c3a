package bootstrap

import (
	"context"
	"fmt"
	"sync"
)

// A Mailbox helps to implement Store.Watch. It carries the events of one watch from the store to
// the receiver. It holds at most one event a key, the newest, in the order in which the keys first
// changed.
type Mailbox struct {
	mu    sync.Mutex
	order []string
	last  map[string]Event
	more  chan struct{} // holds one token after put
}

// NewMailbox returns an empty Mailbox.
func NewMailbox() *Mailbox { return &Mailbox{last: map[string]Event{}, more: make(chan struct{}, 1)} }

// Put adds events. It does not block.
func (m *Mailbox) Put(events ...Event) {
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

func (m *Mailbox) pop() (Event, bool) {
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

// newer returns the event that supersedes e, or e.
func (m *Mailbox) newer(e Event) Event {
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

// Run delivers the events to out until ctx ends, end is closed, or an event with Err has been
// delivered. Then it closes out. If end is closed the last event carries why(). out must have room
// for one event.
func (m *Mailbox) Run(ctx context.Context, end <-chan struct{}, why func() error, out chan Event) {
	defer close(out)
	final := func() {
		for {
			select {
			case out <- Event{Err: why()}:
				return
			default: // the receiver has not taken the last event, which this one replaces
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

// WaitByWatch implements Store.Wait by Store.Watch.
func WaitByWatch(ctx context.Context, s Store, key string) ([]byte, error) {
	wctx, cancel := context.WithCancel(ctx)
	defer cancel()
	for e := range s.Watch(wctx, key) {
		if e.Err != nil || e.Exists {
			return e.Value, e.Err
		}
	}
	return nil, fmt.Errorf("wait for key %s: %w", key, context.Cause(ctx))
}
