package bootstrap

import (
	"bytes"
	"context"
	"fmt"
	"strings"
	"sync"
	"time"
)

// MemStore is a store inside one process, for ranks that are goroutines of it and for tests. Open
// makes one handle a rank.
type MemStore struct {
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
	box *mailbox
}

type memHandle struct {
	m      *MemStore
	lost   chan struct{}
	ended  chan struct{} // the lease was lost or the handle closed: watches end
	err    error         // guarded by m.mu, as what follows
	isLost bool
	isShut bool
	wg     sync.WaitGroup
}

// NewMemStore returns an empty store.
func NewMemStore() *MemStore {
	return &MemStore{values: map[string]memValue{}, watches: map[*memWatch]struct{}{},
		handles: map[*memHandle]struct{}{}}
}

// Open returns a handle with a lease of its own. It does not expire by itself: all of its owners
// die with this process.
func (m *MemStore) Open() Store {
	h := &memHandle{m: m, lost: make(chan struct{}), ended: make(chan struct{})}
	m.mu.Lock()
	defer m.mu.Unlock()
	m.handles[h] = struct{}{}
	if m.away {
		h.lose(errMemAway)
	}
	return h
}

var errMemAway = fmt.Errorf("%w: the in-process store was closed", ErrStoreAway)

// Expire ends the lease of a handle that Open returned, as if its owner had died.
func (m *MemStore) Expire(s Store) {
	h := s.(*memHandle)
	m.mu.Lock()
	defer m.mu.Unlock()
	h.lose(fmt.Errorf("%w: it was expired", ErrLeaseLost))
	h.drop()
}

// Close makes the store unreachable for all handles.
func (m *MemStore) Close() {
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

func (m *MemStore) set(key string, value []byte, owner *memHandle) {
	m.values[key] = memValue{append([]byte{}, value...), owner}
	m.tell(key)
}

func (m *MemStore) remove(key string) {
	if _, ok := m.values[key]; ok {
		delete(m.values, key)
		m.tell(key)
	}
}

func (m *MemStore) tell(key string) {
	for w := range m.watches {
		if w.key == key || strings.HasSuffix(w.key, "/") && strings.HasPrefix(key, w.key) {
			w.box.put(m.event(key))
		}
	}
}

func (m *MemStore) event(key string) Event {
	v, ok := m.values[key]
	return Event{Key: key, Value: bytes.Clone(v.b), Exists: ok}
}

// begin checks what all operations check and locks the store.
func (h *memHandle) begin(ctx context.Context, op, key string, lease bool) error {
	if err := checkKey(key); err != nil {
		return err
	}
	if ctx.Err() != nil {
		return fmt.Errorf("store: %s %s: %w", op, key, context.Cause(ctx))
	}
	h.m.mu.Lock()
	var err error
	switch {
	case h.isShut:
		err = ErrStoreClosed
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
	if err := checkPut(key, value); err != nil {
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

func (h *memHandle) swap(ctx context.Context, op, key string, old, new []byte, lease bool) error {
	if err := checkPut(key, new); err != nil {
		return err
	}
	if err := h.begin(ctx, op, key, lease); err != nil {
		return err
	}
	defer h.m.mu.Unlock()
	if v, ok := h.m.values[key]; ok != (old != nil) || !bytes.Equal(v.b, old) {
		return &ConflictError{Key: key, Current: bytes.Clone(v.b)}
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
		return nil, fmt.Errorf("store: get %s: %w", key, ErrNoKey)
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

func (h *memHandle) Wait(ctx context.Context, key string) ([]byte, error) { return wait(ctx, h, key) }

func (h *memHandle) Watch(ctx context.Context, key string) <-chan Event {
	out := make(chan Event, 1)
	if err := h.begin(ctx, "watch", key, false); err != nil {
		if ctx.Err() == nil {
			out <- Event{Err: err}
		}
		close(out)
		return out
	}
	m, w := h.m, &memWatch{key, newMailbox()}
	m.watches[w] = struct{}{}
	if strings.HasSuffix(key, "/") {
		for k := range m.values {
			if strings.HasPrefix(k, key) {
				w.box.put(m.event(k))
			}
		}
	} else {
		w.box.put(m.event(key))
	}
	h.wg.Add(1)
	m.mu.Unlock()
	go func() {
		defer h.wg.Done()
		w.box.run(ctx, h.ended, h.why, out)
		m.mu.Lock()
		delete(m.watches, w)
		m.mu.Unlock()
	}()
	return out
}

func (h *memHandle) TTL() time.Duration    { return DefaultLeaseTTL }
func (h *memHandle) Lost() <-chan struct{} { return h.lost }

func (h *memHandle) Err() error {
	h.m.mu.Lock()
	defer h.m.mu.Unlock()
	return h.err
}

// why says why watches end.
func (h *memHandle) why() error {
	if err := h.Err(); err != nil {
		return err
	}
	return ErrStoreClosed
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
