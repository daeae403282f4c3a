package bootstrap

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"
)

// Store is one process's handle on the small shared truth of a job. Keys are relative to the job
// (see Prefix); values are at most MaxValue bytes. What is put with lease true lives as long as
// this handle's lease: it goes when the handle is closed, and within the lease's TTL when the
// process dies or cannot reach the store. All else is the job's: it goes when the last handle on
// the job is closed, and within JobTTL when the last process that has one dies, or when no such
// process has reached the store for so long. All methods may be called concurrently.
//
// Every method ends when its ctx ends, and returns an error that wraps ErrStoreAway, after a
// bounded time, when the store cannot be reached. After such an error a write may or may not have
// happened. Values returned belong to the caller.
type Store interface {
	// Put sets key, whatever it was.
	Put(ctx context.Context, key string, value []byte, lease bool) error
	// Create sets key if it does not exist; else it returns a *ConflictError with the value that is
	// there.
	Create(ctx context.Context, key string, value []byte, lease bool) error
	// Get returns the value of key; an error that wraps ErrNoKey if there is none.
	Get(ctx context.Context, key string) ([]byte, error)
	// List returns the keys that begin with prefix ("ranks/") and their values.
	List(ctx context.Context, prefix string) (map[string][]byte, error)
	// CompareAndSwap replaces old by new, which is the job's, in one step; else it returns a
	// *ConflictError with the value that is there. A nil old means that key must not exist, a nil
	// new removes it.
	CompareAndSwap(ctx context.Context, key string, old, new []byte) error
	// Delete removes key; it is no error if there is none.
	Delete(ctx context.Context, key string) error
	// Wait returns the value of key as soon as it exists.
	Wait(ctx context.Context, key string) ([]byte, error)
	// Watch reports key's present state (also that it does not exist) and then its changes, in
	// order, until ctx ends; then the channel is closed. Of changes that come faster than the
	// receiver takes them only the last is reported. If key ends in "/", the states of all keys
	// below it are reported, each key for itself; ones that do not exist are not. When the lease is
	// lost or the handle closed the watch ends, and its last event carries Err.
	Watch(ctx context.Context, key string) <-chan Event
	// TTL is the lease's time to live as the store granted it.
	TTL() time.Duration
	// Lost is closed when the lease has gone, by expiry or because the store could not be reached
	// for a TTL: what this handle put under its lease is to be taken for removed. It stays open at
	// Close.
	Lost() <-chan struct{}
	// Err says why the lease was lost; nil before.
	Err() error
	// Close gives the lease back, which removes what was put under it, and releases the handle.
	// Watches end. It takes bounded time. Idempotent.
	Close() error
}

// Event is the state of one key.
type Event struct {
	Key    string
	Value  []byte // the receiver's
	Exists bool
	Err    error // not nil: the watch ended
}

// MaxValue is the largest value of a key in bytes.
const MaxValue = 64 << 10

// JobTTL is how long what belongs to a job as a whole outlives the last process that had a handle
// on it and did not close it. It is longer than a store that is away should take to come back.
const JobTTL = time.Hour

// Keys of the store's own, which List and Watch do not show: the job's lease is that of leaseKey,
// and each handle has a key below handleKeys under its own.
const (
	ownKeys    = ".store/"
	leaseKey   = ownKeys + "lease"
	handleKeys = ownKeys + "handles/"
)

// Errors of stores, wrapped.
var (
	ErrNoKey       = errors.New("no such key")
	ErrConflict    = errors.New("key has another value")
	ErrStoreAway   = errors.New("store cannot be reached")
	ErrStoreClosed = errors.New("store handle is closed")
	ErrLeaseLost   = errors.New("lease lost")
)

// ConflictError says that a key did not have the expected value. It wraps ErrConflict.
type ConflictError struct {
	Key     string
	Current []byte // nil: the key does not exist
}

func (e *ConflictError) Error() string {
	if e.Current == nil {
		return fmt.Sprintf("key %s does not exist", e.Key)
	}
	return fmt.Sprintf("key %s has another value (%d bytes)", e.Key, len(e.Current))
}

func (e *ConflictError) Unwrap() error { return ErrConflict }

// Prefix returns the beginning of all keys of a job.
func Prefix(job string) string { return "/tutti/" + job + "/" }

func checkKey(key string) error {
	if key == "" || len(key) > 256 || strings.ContainsRune(key, 0) || strings.HasPrefix(key, ownKeys) {
		return fmt.Errorf("key %q: expected 1 to 256 bytes without NUL that do not begin with %s", clip(key), ownKeys)
	}
	return nil
}

func checkPut(key string, value []byte) error {
	if len(value) > MaxValue {
		return fmt.Errorf("key %s: a value of %d bytes is too long: at most %d", key, len(value), MaxValue)
	}
	return checkKey(key)
}
