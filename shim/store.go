//go:build cgo && linux

package main

// #include "internal.h"
import "C"

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"
	"unsafe"

	"tutti/bootstrap"
)

// jobStore is a store that the host has opened: the part of the job's keys that belongs to the
// program.
type jobStore struct {
	cfg bootstrap.StoreConfig

	mu     sync.Mutex
	handle bootstrap.Store // nil: closed
}

var jobStores = table[jobStore]{kind: C.KIND_STORE}

// programKeys begin the keys of the program.
const programKeys = "program/"

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
	l, err := bootstrap.FromEnv(getenv)
	if err != nil && !errors.As(err, new(*bootstrap.PlaceError)) { // a store needs no place
		return 0, err
	}
	either := func(own, environment string) string {
		if own != "" {
			return own
		}
		return environment
	}
	s := &jobStore{cfg: bootstrap.StoreConfig{Address: either(cfg.StoreAddr, l.Store), Job: either(cfg.Job, l.Job),
		Secret: cfg.Secret, Rank: l.Rank, User: either(cfg.StoreUser, l.StoreUser),
		Password: either(cfg.StorePassword, l.StorePassword), CA: l.StoreCA, Cert: l.StoreCert, Key: l.StoreKey,
		LeaseTTL: cfg.LeaseTTL, Logger: cfg.Logger}}
	if s.cfg.Secret == nil {
		s.cfg.Secret = l.Secret
	}
	switch {
	case s.cfg.Address == "":
		return 0, errors.New("no store: set TUTTI_STORE=etcd://HOST:PORT, or start the program with tutti run")
	case s.cfg.Job == "":
		return 0, l.JobMissing()
	}
	if s.handle, err = bootstrap.DialStore(ctx, s.cfg); err != nil {
		return 0, err
	}
	return jobStores.add(s), nil
}

// get returns the store's handle, a new one if the lease of the last was lost, as that of a process
// that was stopped is.
func (s *jobStore) get(ctx context.Context) (bootstrap.Store, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.handle == nil {
		return nil, errors.New("the store was released")
	}
	if s.handle.Err() != nil {
		again, err := bootstrap.DialStore(ctx, s.cfg)
		if err != nil {
			return nil, err
		}
		s.handle.Close()
		s.handle = again
	}
	return s.handle, nil
}

// ask makes a request, and returns the resulting value of its key.
func (s *jobStore) ask(ctx context.Context, kind C.int, key string, value, expected []byte) ([]byte, error) {
	h, err := s.get(ctx)
	if err != nil {
		return nil, err
	}
	key = programKeys + key
	var b []byte
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
		if b, err = h.Get(ctx, key); errors.Is(err, bootstrap.ErrNoKey) {
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
		if c.error_cap > 0 {
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
	if c.key == nil || c.timeout_ns <= 0 {
		return refuse(C.TUTTI_EINVAL, errors.New("tutti_kv_call: key is NULL, or timeout_ns is not above 0"))
	}
	copied := func(data unsafe.Pointer, n C.uint64_t) []byte {
		if n > C.TUTTI_MAX_VALUE+1 { // too long, which the store says
			n = C.TUTTI_MAX_VALUE + 1
		}
		return C.GoBytes(data, C.int(n))
	}
	ctx, cancel := context.WithTimeout(context.Background(), time.Duration(c.timeout_ns))
	defer cancel()
	b, err := s.ask(ctx, kind, C.GoString(c.key), copied(c.value, c.value_len), copied(c.expected, c.expected_len))
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
		s.mu.Lock()
		defer s.mu.Unlock()
		s.handle.Close()
		s.handle = nil
	}
}
