package bootstrap

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"
)

// Store is one process's handle on the shared state of a job. Keys are relative to the job (see
// Prefix); values are at most MaxValue bytes. A key that is put with lease true exists while this
// handle's lease does: it goes when the handle is closed, and within the lease's TTL when the
// process dies or cannot reach the store. All other keys belong to the job: they go when the last
// handle on the job is closed, or some time (see JobTTL) after the last process with a handle died
// or last reached the store. All methods may be called concurrently.
//
// Every method returns when its ctx ends. If the store cannot be reached, it returns an error that
// wraps ErrStoreAway after a bounded time. After such an error a write may or may not have
// happened. Returned values belong to the caller.
type Store interface {
	// Put sets key unconditionally.
	Put(ctx context.Context, key string, value []byte, lease bool) error
	// Create sets key if it does not exist; else it returns a *ConflictError with the present
	// value. See OpenStore for an exception.
	Create(ctx context.Context, key string, value []byte, lease bool) error
	// Get returns the value of key; an error that wraps ErrNoKey if there is none.
	Get(ctx context.Context, key string) ([]byte, error)
	// List returns the keys that begin with prefix ("ranks/") and their values.
	List(ctx context.Context, prefix string) (map[string][]byte, error)
	// CompareAndSwap replaces old by new, which belongs to the job, atomically; else it returns a
	// *ConflictError with the present value. A nil old means that key must not exist, a nil new
	// removes it. See OpenStore for an exception.
	CompareAndSwap(ctx context.Context, key string, old, new []byte) error
	// Adopt puts key under this handle's lease, in one step, if it has value; else it returns a
	// *ConflictError with the present value.
	Adopt(ctx context.Context, key string, value []byte) error
	// Delete removes key; a missing key is no error.
	Delete(ctx context.Context, key string) error
	// Wait returns the value of key as soon as it exists.
	Wait(ctx context.Context, key string) ([]byte, error)
	// Watch reports key's present state (even if it does not exist) and then its changes, in order,
	// until ctx ends; then the channel is closed. Of changes that come faster than the receiver
	// takes them only the last is reported. If key ends in "/", the states of all existing keys
	// below it are reported, each separately. When the lease is lost or the handle closed the watch
	// ends, and its last event carries Err.
	Watch(ctx context.Context, key string) <-chan Event
	// TTL is the lease's time to live as the store granted it.
	TTL() time.Duration
	// Lost is closed when the lease is lost, because it expired or the store could not be reached
	// for a TTL: keys under the lease count as removed. Close does not close it.
	Lost() <-chan struct{}
	// Err returns why the lease was lost; nil before.
	Err() error
	// Close returns the lease, which removes the keys under it, and releases the handle. Watches
	// end. It takes bounded time. Idempotent.
	Close() error
}

// Follower is a Store that reports every change. Those of DialStore are.
type Follower interface {
	Store
	// Follow calls state with the keys that begin with prefix, which ends in "/", and their values,
	// and then change with every change of them, in order. It calls state again when the store does
	// not have all changes since any more. It returns an error when ctx ends, the store cannot be
	// reached, the lease is lost or the handle closed. The functions should return soon: changes
	// that were not taken are in memory. Their arguments belong to them.
	Follow(ctx context.Context, prefix string, state func(map[string][]byte), change func(Event)) error
}

// Event is the state of one key.
type Event struct {
	Key    string
	Value  []byte // belongs to the receiver
	Exists bool
	Err    error // not nil: the watch ended
}

// MaxValue is the largest value of a key in bytes.
const MaxValue = 64 << 10

// JobTTL is how long a job's keys outlive its last process with a handle that was not closed, or
// two thirds of that: handles renew the lease three times in it. A store that is away should come
// back, and a job that is stopped as a whole should continue, earlier. Another job of the same
// name must not find the keys of a program (JobStore in PyTorch) that was killed long ago.
// What tutti run and rank 0 serve ends with the job, and is stopped with it: the keys there outlive
// a longer pause, embeddedTTL.
const (
	JobTTL      = time.Hour
	embeddedTTL = 7 * 24 * time.Hour
)

// Keys of the store itself, which List and Watch do not show: leaseKey holds the job's lease, and
// each handle has a key below handleKeys under its own lease.
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

// ErrStoreEnds says that rank 0 has left the job whose store it serves from its memory, and that
// the store ends when the others have left as well: a process that joins has to meet rank 0 again.
var ErrStoreEnds = fmt.Errorf("rank 0 has left an earlier job of the launch, and ends its store: %w", ErrStoreAway)

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

// allJobs begins the keys of all jobs.
const allJobs = "/tutti/"

// Prefix returns the prefix of all keys of a job.
func Prefix(job string) string { return allJobs + job + "/" }

// ProgramKeys begins those keys of a job that are the program's own, and not the library's.
const ProgramKeys = "program/"

// OfProgram reports whether key, which begins with a job's Prefix, is one of a program's own.
func OfProgram(key string) bool {
	rest, of := strings.CutPrefix(key, allJobs)
	_, rest, _ = strings.Cut(rest, "/")
	return of && strings.HasPrefix(rest, ProgramKeys)
}

// CheckKey returns an error unless a Store takes key: 1 to 256 bytes without NUL. Keys that begin
// with ".store/" are the store's own.
func CheckKey(key string) error {
	if key == "" || len(key) > 256 || strings.ContainsRune(key, 0) || strings.HasPrefix(key, ownKeys) {
		return fmt.Errorf("key %q: expected 1 to 256 bytes without NUL that do not begin with %s", clip(key), ownKeys)
	}
	return nil
}

// CheckPut returns an error unless a Store takes key, and a value as long as this one.
func CheckPut(key string, value []byte) error {
	if len(value) > MaxValue {
		return fmt.Errorf("key %s: a value of %d bytes is too long: at most %d", key, len(value), MaxValue)
	}
	return CheckKey(key)
}
