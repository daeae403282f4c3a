// Package storetest has a store for tests: it lies in the memory of the test's process, and the
// test ends its leases and makes it unreachable.
package storetest

import (
	"bytes"
	"context"
	"fmt"
	"strings"
	"sync"
	"time"

	"tutti/bootstrap"
)

// Memory is a store inside one process. Each rank opens a handle of its own.
type Memory struct {
	mu      sync.Mutex
	values  map[string]memValue
	watches map[*memWatch]struct{}
	handles map[*memHandle]struct{}
	away    bool
}

type memValue struct {
	b     []byte
	owner *memHandle // nil: no lease
}

type memWatch struct {
	key string
	box *bootstrap.Mailbox
}

type memHandle struct {
	m      *Memory
	lost   chan struct{}
	ended  chan struct{} // closed when the lease was lost or the handle closed: watches end
	err    error         // guarded by m.mu, like the fields below
	isLost bool
	isShut bool
	wg     sync.WaitGroup
}

// NewMemory returns an empty store.
func NewMemory() *Memory {
	return &Memory{values: map[string]memValue{}, watches: map[*memWatch]struct{}{},
		handles: map[*memHandle]struct{}{}}
}

// Open returns a handle with a lease of its own. The lease does not expire by itself.
func (m *Memory) Open() bootstrap.Store {
	h := &memHandle{m: m, lost: make(chan struct{}), ended: make(chan struct{})}
	m.mu.Lock()
	defer m.mu.Unlock()
	m.handles[h] = struct{}{}
	if m.away {
		h.lose(errMemAway)
	}
	return h
}

var errMemAway = fmt.Errorf("%w: the in-process store was closed", bootstrap.ErrStoreAway)

// Expire ends the lease of a handle that Open has returned, and removes what was put under it.
func (m *Memory) Expire(s bootstrap.Store) {
	h := s.(*memHandle)
	m.mu.Lock()
	defer m.mu.Unlock()
	h.lose(fmt.Errorf("%w: it was expired", bootstrap.ErrLeaseLost))
	h.drop()
}

// Close makes the store unreachable for all handles.
func (m *Memory) Close() {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.away = true
	for h := range m.handles {
		h.lose(errMemAway)
	}
}

// lose and drop need m.mu.
func (h *memHandle) lose(err error) {
	if !h.isLost && !h.isShut {
		h.isLost, h.err = true, err
		close(h.lost)
		close(h.ended)
	}
}

func (h *memHandle) drop() {
	for k, v := range h.m.values {
		if v.owner == h {
			h.m.remove(k)
		}
	}
}

func (m *Memory) set(key string, value []byte, owner *memHandle) {
	m.values[key] = memValue{append([]byte{}, value...), owner}
	m.tell(key)
}

func (m *Memory) remove(key string) {
	if _, ok := m.values[key]; ok {
		delete(m.values, key)
		m.tell(key)
	}
}

func (m *Memory) tell(key string) {
	for w := range m.watches {
		if w.key == key || strings.HasSuffix(w.key, "/") && strings.HasPrefix(key, w.key) {
			w.box.Put(m.event(key))
		}
	}
}

func (m *Memory) event(key string) bootstrap.Event {
	v, ok := m.values[key]
	return bootstrap.Event{Key: key, Value: bytes.Clone(v.b), Exists: ok}
}

// begin makes the checks of all operations and locks the store.
func (h *memHandle) begin(ctx context.Context, op, key string, lease bool) error {
	if err := bootstrap.CheckKey(key); err != nil {
		return err
	}
	if ctx.Err() != nil {
		return fmt.Errorf("store: %s %s: %w", op, key, context.Cause(ctx))
	}
	h.m.mu.Lock()
	var err error
	switch {
	case h.isShut:
		err = bootstrap.ErrStoreClosed
	case h.m.away:
		err = errMemAway
	case lease && h.isLost:
		err = h.err
	default:
		return nil
	}
	h.m.mu.Unlock()
	return fmt.Errorf("store: %s %s: %w", op, key, err)
}

func (h *memHandle) owner(lease bool) *memHandle {
	if lease {
		return h
	}
	return nil
}

func (h *memHandle) Put(ctx context.Context, key string, value []byte, lease bool) error {
	if err := bootstrap.CheckPut(key, value); err != nil {
		return err
	}
	if err := h.begin(ctx, "put", key, lease); err != nil {
		return err
	}
	defer h.m.mu.Unlock()
	h.m.set(key, value, h.owner(lease))
	return nil
}

func (h *memHandle) Create(ctx context.Context, key string, value []byte, lease bool) error {
	if value == nil {
		value = []byte{}
	}
	return h.swap(ctx, "create", key, nil, value, lease)
}

func (h *memHandle) CompareAndSwap(ctx context.Context, key string, old, new []byte) error {
	return h.swap(ctx, "compare and swap", key, old, new, false)
}

func (h *memHandle) Adopt(ctx context.Context, key string, value []byte) error {
	value = append([]byte{}, value...)
	return h.swap(ctx, "adopt", key, value, value, true)
}

func (h *memHandle) swap(ctx context.Context, op, key string, old, new []byte, lease bool) error {
	if err := bootstrap.CheckPut(key, new); err != nil {
		return err
	}
	if err := h.begin(ctx, op, key, lease); err != nil {
		return err
	}
	defer h.m.mu.Unlock()
	if v, ok := h.m.values[key]; ok != (old != nil) || !bytes.Equal(v.b, old) {
		return &bootstrap.ConflictError{Key: key, Current: bytes.Clone(v.b)}
	}
	if new == nil {
		h.m.remove(key)
	} else {
		h.m.set(key, new, h.owner(lease))
	}
	return nil
}

func (h *memHandle) Get(ctx context.Context, key string) ([]byte, error) {
	if err := h.begin(ctx, "get", key, false); err != nil {
		return nil, err
	}
	defer h.m.mu.Unlock()
	v, ok := h.m.values[key]
	if !ok {
		return nil, fmt.Errorf("store: get %s: %w", key, bootstrap.ErrNoKey)
	}
	return bytes.Clone(v.b), nil
}

func (h *memHandle) List(ctx context.Context, prefix string) (map[string][]byte, error) {
	if err := h.begin(ctx, "list", prefix+"*", false); err != nil {
		return nil, err
	}
	defer h.m.mu.Unlock()
	out := map[string][]byte{}
	for k, v := range h.m.values {
		if strings.HasPrefix(k, prefix) {
			out[k] = bytes.Clone(v.b)
		}
	}
	return out, nil
}

func (h *memHandle) Delete(ctx context.Context, key string) error {
	if err := h.begin(ctx, "delete", key, false); err != nil {
		return err
	}
	defer h.m.mu.Unlock()
	h.m.remove(key)
	return nil
}

func (h *memHandle) Wait(ctx context.Context, key string) ([]byte, error) {
	return bootstrap.WaitByWatch(ctx, h, key)
}

func (h *memHandle) Watch(ctx context.Context, key string) <-chan bootstrap.Event {
	out := make(chan bootstrap.Event, 1)
	if err := h.begin(ctx, "watch", key, false); err != nil {
		if ctx.Err() == nil {
			out <- bootstrap.Event{Err: err}
		}
		close(out)
		return out
	}
	m, w := h.m, &memWatch{key, bootstrap.NewMailbox()}
	m.watches[w] = struct{}{}
	if strings.HasSuffix(key, "/") {
		for k := range m.values {
			if strings.HasPrefix(k, key) {
				w.box.Put(m.event(k))
			}
		}
	} else {
		w.box.Put(m.event(key))
	}
	h.wg.Add(1)
	m.mu.Unlock()
	go func() {
		defer h.wg.Done()
		w.box.Run(ctx, h.ended, h.why, out)
		m.mu.Lock()
		delete(m.watches, w)
		m.mu.Unlock()
	}()
	return out
}

func (h *memHandle) TTL() time.Duration    { return bootstrap.DefaultLeaseTTL }
func (h *memHandle) Lost() <-chan struct{} { return h.lost }

func (h *memHandle) Err() error {
	h.m.mu.Lock()
	defer h.m.mu.Unlock()
	return h.err
}

// why returns why watches end.
func (h *memHandle) why() error {
	if err := h.Err(); err != nil {
		return err
	}
	return bootstrap.ErrStoreClosed
}

func (h *memHandle) Close() error {
	h.m.mu.Lock()
	if !h.isShut {
		h.isShut = true
		if !h.isLost {
			close(h.ended)
		}
		delete(h.m.handles, h)
		if !h.m.away {
			h.drop()
			if len(h.m.handles) == 0 { // the job has ended
				for k := range h.m.values {
					h.m.remove(k)
				}
			}
		}
	}
	h.m.mu.Unlock()
	h.wg.Wait()
	return nil
}
