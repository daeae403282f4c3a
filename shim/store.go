//go:build cgo && linux

package main

// #include "internal.h"
import "C"

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"sync"
	"time"
	"unsafe"

	"tutti/bootstrap"
	"tutti/internal/backoff"
	"tutti/internal/trust"
)

// jobStore is a store that the host has opened: the part of the job's keys that belongs to the
// program.
type jobStore struct {
	dial func(context.Context) (bootstrap.Store, error)
	life context.Context // ends at the release
	end  context.CancelFunc
	work sync.WaitGroup

	mu     sync.Mutex
	handle bootstrap.Store
	err    error         // why the last attempt to replace handle failed; nil: it did not
	tried  chan struct{} // closed after the next attempt
}

var errReleased = errors.New("the store was released")

// retry is the pause before what has failed for want of the store is tried again. That before
// another attempt to take a handle grows up to longestRetry.
const (
	retry        = 100 * time.Millisecond
	longestRetry = 5 * time.Second
)

var jobStores = table[jobStore]{kind: C.KIND_STORE}

// longestKey is the most bytes of a key of the program: see bootstrap.CheckKey.
const longestKey = 256 - len(bootstrap.ProgramKeys)

// openStore connects to the store of the job that c describes.
func openStore(ctx context.Context, c *C.tutti_config) (uint64, error) {
	moderate(c)
	if c.kv != nil {
		return 0, &coded{"tutti_config: kv is set: such a store is the program's own already", errInvalid}
	}
	cfg, err := config(c)
	if err != nil {
		return 0, err
	}
	l, err := bootstrap.FromEnv(cfg.Getenv)
	if err != nil && !errors.As(err, new(*bootstrap.PlaceError)) { // a store needs no place
		return 0, err
	}
	either := func(own, environment string) string {
		if own != "" {
			return own
		}
		return environment
	}
	place := bootstrap.StoreConfig{Address: either(cfg.StoreAddr, l.Store), Job: either(cfg.Job, l.Job),
		Secret: cfg.Secret, Rank: l.Rank, User: either(cfg.StoreUser, l.StoreUser),
		Password: either(cfg.StorePassword, l.StorePassword), CA: l.StoreCA, Cert: l.StoreCert, Key: l.StoreKey,
		LeaseTTL: cfg.LeaseTTL, Logger: cfg.Logger}
	if place.Secret == nil {
		place.Secret = l.Secret
	}
	switch {
	case place.Address == "":
		return 0, errors.New("no store: set TUTTI_STORE=etcd://HOST:PORT, or start the program with tutti run")
	case place.Job == "":
		return 0, l.JobMissing()
	}
	addr, err := bootstrap.ParseStore(place.Address)
	if err == nil {
		err = bootstrap.CheckJob(place.Job)
	}
	if err != nil {
		return 0, &coded{err.Error(), errInvalid}
	}
	if n := len(place.Secret); addr.Scheme == "tutti" && n > 0 && n < trust.MinSecret {
		return 0, &coded{fmt.Sprintf("the job's secret has %d bytes, want at least %d", n, trust.MinSecret), errInvalid}
	}
	s, err := newJobStore(ctx, func(ctx context.Context) (bootstrap.Store, error) {
		return bootstrap.DialStore(ctx, place)
	})
	if err != nil {
		return 0, err
	}
	return jobStores.add(s), nil
}

// newJobStore returns a store whose handles are those of dial.
func newJobStore(ctx context.Context, dial func(context.Context) (bootstrap.Store, error)) (*jobStore, error) {
	h, err := dial(ctx)
	if err != nil {
		return nil, err
	}
	s := &jobStore{dial: dial, handle: h, tried: make(chan struct{})}
	s.life, s.end = context.WithCancel(context.Background())
	s.work.Go(func() { s.keep(h) })
	return s, nil
}

// release ends requests, and closes the handle.
func (s *jobStore) release() {
	s.end()
	s.work.Wait()
}

// keep replaces the handle when its lease was lost, as that of a process that was stopped is.
func (s *jobStore) keep(h bootstrap.Store) {
	for {
		select {
		case <-h.Lost():
		case <-s.life.Done():
			h.Close()
			return
		}
		h.Close()
		wait := retry
		for h = s.replace(); h == nil; h = s.replace() {
			if !backoff.Sleep(s.life, wait) {
				return
			}
			wait = min(2*wait, longestRetry)
		}
	}
}

// replace takes a new handle, and returns it, nil if the store gives none.
func (s *jobStore) replace() bootstrap.Store {
	h, err := s.dial(s.life)
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.err = err; err == nil {
		s.handle = h
	}
	close(s.tried)
	s.tried = make(chan struct{})
	return h
}

// get returns a handle that has its lease. It waits for one until ctx ends, unless the store
// refuses to give one, or, once, the last attempt to take one has failed.
func (s *jobStore) get(ctx context.Context, once bool) (bootstrap.Store, error) {
	for {
		s.mu.Lock()
		h, err, tried := s.handle, s.err, s.tried
		s.mu.Unlock()
		switch {
		case s.life.Err() != nil:
			return nil, errReleased
		case h.Err() == nil:
			return h, nil
		case err != nil && (once || !errors.Is(err, bootstrap.ErrStoreAway)):
			return nil, err
		}
		select {
		case <-tried:
		case <-s.life.Done():
		case <-ctx.Done():
			return nil, fmt.Errorf("%w: %w", context.Cause(ctx), cmp.Or(err, h.Err()))
		}
	}
}

// ask makes a request, and returns the resulting value of its key. While the store is away it makes
// the request again until ctx ends, except a compare and set, which may have happened.
func (s *jobStore) ask(ctx context.Context, kind int, key string, value, expected []byte) ([]byte, error) {
	once := kind == C.STORE_COMPARE_AND_SET
	for {
		h, err := s.get(ctx, once)
		if err != nil {
			return nil, err
		}
		b, err := request(ctx, h, kind, bootstrap.ProgramKeys+key, value, expected)
		closed := errors.Is(err, bootstrap.ErrStoreClosed)
		switch {
		case closed && s.life.Err() != nil:
			return nil, errReleased
		case closed:
			err = fmt.Errorf("%w: its lease was lost", bootstrap.ErrStoreAway)
		case !errors.Is(err, bootstrap.ErrStoreAway) && !errors.Is(err, bootstrap.ErrLeaseLost):
			return b, err
		}
		if once || !backoff.Sleep(ctx, retry) {
			return nil, err
		}
	}
}

// request makes a request on a handle.
func request(ctx context.Context, h bootstrap.Store, kind int, key string, value, expected []byte) ([]byte, error) {
	switch kind {
	case C.STORE_SET:
		if len(value) == 0 {
			return nil, h.Delete(ctx, key)
		}
		return nil, h.Put(ctx, key, value, false)
	case C.STORE_WAIT:
		return h.Wait(ctx, key)
	case C.STORE_COMPARE_AND_SET:
		err := h.CompareAndSwap(ctx, key, absent(expected), absent(value))
		var differs *bootstrap.ConflictError
		if errors.As(err, &differs) {
			return differs.Current, nil
		}
		return value, err
	default:
		b, err := h.Get(ctx, key)
		if errors.Is(err, bootstrap.ErrNoKey) {
			return nil, nil
		}
		return b, err
	}
}

// absent returns the value that stands for b in a bootstrap.Store: nil is that of a missing key.
func absent(b []byte) []byte {
	if len(b) == 0 {
		return nil
	}
	return b
}

// goStore makes a request to a store that the host has opened.
//
//export goStore
func goStore(h C.uint64_t, kind C.int, c *C.tutti_kv_call) C.int {
	refuse := func(code C.int, err error) C.int {
		if c.error != nil && c.error_cap > 0 {
			text := unsafe.Slice((*byte)(unsafe.Pointer(c.error)), int(c.error_cap))
			text[copy(text[:len(text)-1], err.Error())] = 0
		}
		return code
	}
	c.result_len = 0
	s := jobStores.get(uint64(h))
	if s == nil {
		return refuse(C.TUTTI_EINVAL, fmt.Errorf("%#x is no store, or one that was released", uint64(h)))
	}
	switch {
	case c.key == nil || c.timeout_ns <= 0:
		return refuse(C.TUTTI_EINVAL, errors.New("tutti_kv_call: key is NULL, or timeout_ns is not above 0"))
	case c.value == nil && c.value_len > 0 || c.expected == nil && c.expected_len > 0 ||
		c.result == nil && c.result_cap > 0 || c.error == nil && c.error_cap > 0:
		return refuse(C.TUTTI_EINVAL, errors.New("tutti_kv_call: value, expected, result or error is NULL, and its "+
			"length or room is not 0"))
	}
	key := C.GoString(c.key)
	if n := len(key); n == 0 || n > longestKey {
		return refuse(C.TUTTI_EINVAL, fmt.Errorf("tutti_kv_call: key has %d bytes, want 1 to %d", n, longestKey))
	}
	if n := max(c.value_len, c.expected_len); n > C.TUTTI_MAX_VALUE {
		return refuse(C.TUTTI_EINVAL, fmt.Errorf("tutti_kv_call: a value of %d bytes is too long, want at most %d",
			uint64(n), C.TUTTI_MAX_VALUE))
	}
	copied := func(data unsafe.Pointer, n C.uint64_t) []byte { return C.GoBytes(data, C.int(n)) }
	ctx, cancel := context.WithTimeout(context.Background(), time.Duration(c.timeout_ns))
	defer cancel()
	b, err := s.ask(ctx, int(kind), key, copied(c.value, c.value_len), copied(c.expected, c.expected_len))
	switch {
	case err != nil && ctx.Err() != nil:
		return refuse(C.TUTTI_ETIMEOUT, err)
	case err != nil:
		return refuse(C.TUTTI_EINTERNAL, err)
	case uint64(len(b)) > uint64(c.result_cap):
		return refuse(C.TUTTI_EINVAL, fmt.Errorf("the value has %d bytes, and there is room for %d", len(b),
			uint64(c.result_cap)))
	}
	if len(b) > 0 {
		copy(unsafe.Slice((*byte)(c.result), len(b)), b)
	}
	c.result_len = C.uint64_t(len(b))
	return C.TUTTI_OK
}

// goStoreRelease releases a store that the host has opened.
//
//export goStoreRelease
func goStoreRelease(h C.uint64_t) {
	if s := jobStores.remove(uint64(h)); s != nil {
		s.release()
	}
}
