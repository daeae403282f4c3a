package bootstrap

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"
)

// KV is the minimal store with which ranks find each other: a map that all of them see, like
// PyTorch's c10d stores. It has neither leases nor a list of its keys, so that a job over it is
// fixed: it ends with the first lost rank. Methods may be called concurrently, and return when ctx
// ends. Values belong to the caller. An empty value stands for a missing one.
type KV interface {
	// Set sets key unconditionally.
	Set(ctx context.Context, key string, value []byte) error
	// Get returns the value of key, empty if it has none, or an error that wraps ErrNoKey and says
	// why. It should not wait for one.
	Get(ctx context.Context, key string) ([]byte, error)
	// Wait returns the value of key as soon as it has one.
	Wait(ctx context.Context, key string) ([]byte, error)
	// CompareAndSet sets key to desired if its value is expected, atomically, and returns the
	// resulting value. An empty expected matches a missing key.
	CompareAndSet(ctx context.Context, key string, expected, desired []byte) (current []byte, err error)
}

// Elastic is a store for jobs that can lose and admit ranks.
type Elastic interface {
	KV
	// Open returns a handle with its own lease, which the caller closes. It is called again after
	// the lease was lost.
	Open(ctx context.Context) (Store, error)
}

// OpenStore returns a handle on a caller's store for a job: kv's own if it is Elastic, else one
// without leases for a fixed job. Keys begin with Prefix(job). A KV does not tell who has set a
// key: Create and CompareAndSwap of the handle without leases return nil, too, if the key has the
// new value already.
func OpenStore(ctx context.Context, kv KV, job string) (Store, error) {
	if e, ok := kv.(Elastic); ok {
		return e.Open(ctx)
	}
	return &fixedStore{kv: kv, prefix: Prefix(job), owned: map[string]bool{}}, nil
}

// fixedStore implements the Store of a fixed job over a KV. Only Close removes its keys.
type fixedStore struct {
	kv     KV
	prefix string

	mu    sync.Mutex
	owned map[string]bool // the keys that Close removes
}

// closeFixed bounds the time of Close.
const closeFixed = 2 * time.Second

// pollKV is the interval of polling a watched key: a KV does not report changes.
const pollKV = 50 * time.Millisecond

// fail explains an error of the KV.
func (s *fixedStore) fail(ctx context.Context, op, key string, err error) error {
	if err == nil {
		return nil
	}
	why := ErrStoreAway
	if ctx.Err() != nil {
		why = context.Cause(ctx)
	}
	if errors.Is(err, why) {
		return fmt.Errorf("%s %s in the caller's store: %w", op, key, err)
	}
	return fmt.Errorf("%s %s in the caller's store: %w: %w", op, key, why, err)
}

func (s *fixedStore) Put(ctx context.Context, key string, value []byte, lease bool) error {
	s.own(key, lease)
	return s.fail(ctx, "set", key, s.kv.Set(ctx, s.prefix+key, value))
}

func (s *fixedStore) Create(ctx context.Context, key string, value []byte, lease bool) error {
	err := s.CompareAndSwap(ctx, key, nil, value)
	if !errors.Is(err, ErrConflict) { // after other errors the key may exist
		s.own(key, lease)
	}
	return err
}

func (s *fixedStore) own(key string, own bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.owned[key] = true; !own {
		delete(s.owned, key)
	}
}

func (s *fixedStore) CompareAndSwap(ctx context.Context, key string, old, new []byte) error {
	now, err := s.kv.CompareAndSet(ctx, s.prefix+key, old, new)
	switch {
	case err != nil:
		return s.fail(ctx, "set", key, err)
	case !bytes.Equal(now, new):
		c := &ConflictError{Key: key}
		if len(now) > 0 {
			c.Current = now
		}
		return c
	}
	return nil
}

func (s *fixedStore) Adopt(ctx context.Context, key string, value []byte) error {
	err := s.CompareAndSwap(ctx, key, value, value)
	if err == nil {
		s.own(key, true)
	}
	return err
}

func (s *fixedStore) Get(ctx context.Context, key string) ([]byte, error) {
	b, err := s.kv.Get(ctx, s.prefix+key)
	if err == nil && len(b) == 0 {
		return nil, fmt.Errorf("key %s: %w", key, ErrNoKey)
	}
	if errors.Is(err, ErrNoKey) {
		return nil, fmt.Errorf("key %s: %w", key, err)
	}
	return b, s.fail(ctx, "get", key, err)
}

func (s *fixedStore) Delete(ctx context.Context, key string) error {
	s.own(key, false)
	return s.fail(ctx, "remove", key, s.kv.Set(ctx, s.prefix+key, nil))
}

func (s *fixedStore) Wait(ctx context.Context, key string) ([]byte, error) {
	b, err := s.kv.Wait(ctx, s.prefix+key)
	return b, s.fail(ctx, "wait for", key, err)
}

// List lists only the ranks, by the job's size: a KV cannot list its keys.
func (s *fixedStore) List(ctx context.Context, prefix string) (map[string][]byte, error) {
	if prefix != RankKeys {
		return nil, fmt.Errorf("list %s in the caller's store: %w", prefix, errors.ErrUnsupported)
	}
	all := map[string][]byte{}
	b, err := s.Get(ctx, SizeKey)
	if errors.Is(err, ErrNoKey) {
		return all, nil
	}
	n, bad := strconv.Atoi(string(b))
	if err == nil && (bad != nil || n < 0 || n > maxFixed) {
		err = fmt.Errorf("key %s: %q is no size of a job", SizeKey, clip(string(b)))
	}
	if err != nil {
		return nil, err
	}
	for r := range n {
		b, err := s.Get(ctx, RankKey(r))
		if err == nil {
			all[RankKey(r)] = b
		} else if !errors.Is(err, ErrNoKey) {
			return nil, err
		}
	}
	return all, nil
}

// maxFixed bounds the job's size that a store may claim.
const maxFixed = 1 << 16

// Watch polls one key.
func (s *fixedStore) Watch(ctx context.Context, key string) <-chan Event {
	events := make(chan Event, 1)
	go func() {
		defer close(events)
		if strings.HasSuffix(key, "/") {
			events <- Event{Err: fmt.Errorf("watch %s in the caller's store: %w", key, errors.ErrUnsupported)}
			return
		}
		var last []byte
		for first := true; ; first = false {
			b, err := s.kv.Get(ctx, s.prefix+key)
			if errors.Is(err, ErrNoKey) {
				b, err = nil, nil
			}
			e := Event{Key: key, Value: b, Exists: len(b) > 0}
			if err != nil {
				e = Event{Err: s.fail(ctx, "watch", key, err)}
			}
			if first || err != nil || !bytes.Equal(last, b) {
				select {
				case events <- e:
				case <-ctx.Done():
					return
				}
			}
			if last = b; err != nil {
				return
			}
			select {
			case <-time.After(pollKV):
			case <-ctx.Done():
				return
			}
		}
	}()
	return events
}

func (s *fixedStore) TTL() time.Duration    { return 0 }
func (s *fixedStore) Lost() <-chan struct{} { return nil }
func (s *fixedStore) Err() error            { return nil }

// Close removes what was put under a lease. It asks a store that is silent only once.
func (s *fixedStore) Close() error {
	ctx, cancel := context.WithTimeout(context.Background(), closeFixed)
	defer cancel()
	s.mu.Lock()
	keys := slices.Collect(maps.Keys(s.owned))
	s.mu.Unlock()
	var errs []error
	for i, key := range keys {
		err := s.Delete(ctx, key)
		if err != nil && ctx.Err() != nil {
			return fmt.Errorf("the caller's store: %w: it was silent for %v, and keeps %d keys of this rank",
				ErrStoreAway, closeFixed, len(keys)-i)
		}
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}
