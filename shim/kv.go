//go:build cgo && linux

package main

// #include <stdlib.h>
// #include <string.h>
// #include "internal.h"
import "C"

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"
	"unsafe"

	"tutti/internal/backoff"
)

// store is a store of the host: a bootstrap.KV over its callbacks. Its methods retain, leave and
// newStore accept nil, for groups without one.
type store struct {
	kv C.tutti_kv

	mu    sync.Mutex
	users int // groups, and the call of join
	calls int // that run
	done  bool
}

func newStore(kv *C.tutti_kv) *store {
	if kv == nil {
		return nil
	}
	return &store{kv: *kv, users: 1}
}

func (s *store) retain() {
	if s != nil {
		s.mu.Lock()
		s.users++
		s.mu.Unlock()
	}
}

func (s *store) leave() {
	if s != nil {
		s.mu.Lock()
		s.users--
		s.mu.Unlock()
		s.release()
	}
}

// release calls the host's release if it is time for that.
func (s *store) release() {
	s.mu.Lock()
	last := s.users == 0 && s.calls == 0 && !s.done
	s.done = s.done || last
	s.mu.Unlock()
	if last && s.kv.release != nil {
		C.tutti_kv_done(s.kv.release, s.kv.ctx)
	}
}

// slice bounds a callback, so that none outlives its group for long; poll is the pause between
// requests for a key in place of a wait, and the shortest time between repeated requests.
const (
	slice = time.Second
	poll  = 5 * time.Millisecond
)

type callback = *[0]byte

// call makes one request. It returns context.DeadlineExceeded when the time of the callback was up.
// When ctx ends it returns at once, and the callback's result is dropped.
func (s *store) call(ctx context.Context, name string, f callback, key string, value, expected []byte,
	d time.Duration) ([]byte, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	if deadline, ok := ctx.Deadline(); ok {
		d = max(min(d, time.Until(deadline)), time.Millisecond)
	}
	s.mu.Lock()
	if s.users == 0 {
		s.mu.Unlock()
		return nil, errors.New("the host's store was released")
	}
	s.calls++
	s.mu.Unlock()
	type answer struct {
		result []byte
		err    error
	}
	answered := make(chan answer, 1)
	go func() {
		result, err := s.ask(name, f, key, value, expected, d)
		s.mu.Lock()
		s.calls--
		s.mu.Unlock()
		s.release()
		answered <- answer{result, err}
	}()
	select {
	case a := <-answered:
		return a.result, a.err
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

// ask runs a callback.
func (s *store) ask(name string, f callback, key string, value, expected []byte, d time.Duration) ([]byte, error) {
	const texts = 512
	size := C.size_t(unsafe.Sizeof(C.tutti_kv_call{}))
	memory := C.calloc(1, size+C.TUTTI_MAX_VALUE+texts)
	if memory == nil {
		return nil, errNoMemory
	}
	defer C.free(memory)
	c := (*C.tutti_kv_call)(memory)
	c.struct_size, c.error_cap, c.timeout_ns = C.uint32_t(size), texts, C.int64_t(d)
	c.result, c.result_cap = unsafe.Add(memory, size), C.TUTTI_MAX_VALUE
	c.error = (*C.char)(unsafe.Add(memory, size+C.TUTTI_MAX_VALUE))
	k, v, e := C.CString(key), C.CBytes(value), C.CBytes(expected)
	defer C.free(unsafe.Pointer(k))
	defer C.free(v)
	defer C.free(e)
	c.key, c.value, c.value_len = k, v, C.uint64_t(len(value))
	c.expected, c.expected_len = e, C.uint64_t(len(expected))
	switch code := C.tutti_kv_run(f, s.kv.ctx, c); {
	case code == C.TUTTI_ETIMEOUT:
		return nil, context.DeadlineExceeded
	case code != C.TUTTI_OK:
		why := unsafe.Slice((*byte)(unsafe.Pointer(c.error)), texts)
		why[texts-1] = 0
		return nil, fmt.Errorf("the host's store: %s %q: %s: %s", name, key, C.GoString(C.tutti_code_name(code)),
			C.GoString(c.error))
	case c.result_len > C.TUTTI_MAX_VALUE:
		return nil, fmt.Errorf("the host's store: %s %q: the value has %d bytes, at most %d are possible", name, key,
			uint64(c.result_len), C.TUTTI_MAX_VALUE)
	}
	return C.GoBytes(c.result, C.int(c.result_len)), nil
}

// until repeats a request until it succeeds, fails, or ctx ends.
func (s *store) until(ctx context.Context, name string, f callback, key string,
	value, expected []byte) ([]byte, error) {
	for {
		next := time.Now().Add(poll) // a callback may say at once that its time was up
		result, err := s.call(ctx, name, f, key, value, expected, slice)
		if err != context.DeadlineExceeded {
			return result, err
		}
		if !backoff.Sleep(ctx, time.Until(next)) {
			return nil, ctx.Err()
		}
	}
}

func (s *store) Set(ctx context.Context, key string, value []byte) error {
	_, err := s.until(ctx, "set", s.kv.set, key, value, nil)
	return err
}

func (s *store) Get(ctx context.Context, key string) ([]byte, error) {
	return s.until(ctx, "get", s.kv.get, key, nil, nil)
}

func (s *store) CompareAndSet(ctx context.Context, key string, expected, desired []byte) ([]byte, error) {
	d := time.Hour // it is not repeated: its effect would not be known
	if deadline, ok := ctx.Deadline(); ok {
		d = time.Until(deadline)
	}
	return s.call(ctx, "compare_and_set", s.kv.compare_and_set, key, desired, expected, d)
}

func (s *store) Wait(ctx context.Context, key string) ([]byte, error) {
	if s.kv.wait != nil {
		return s.until(ctx, "wait", s.kv.wait, key, nil, nil)
	}
	for {
		if v, err := s.Get(ctx, key); len(v) > 0 || err != nil {
			return v, err
		}
		if !backoff.Sleep(ctx, poll) {
			return nil, ctx.Err()
		}
	}
}
