package rdma

import (
	"errors"
	"fmt"
	"sync"
	"syscall"
)

// Withheld are the keys of a device that peers may still use for memory that was deregistered. The
// device does not know, and may give them to other memory. The zero Withheld is empty. Its methods
// may be called from any goroutine.
type Withheld struct {
	mu    sync.Mutex
	times map[uint32]int // by key
	freed uint64
}

// Withhold has Register not return a key. Permit follows for each call.
func (w *Withheld) Withhold(key uint32) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.times == nil {
		w.times = map[uint32]int{}
	}
	w.times[key]++
}

// Permit undoes Withhold.
func (w *Withheld) Permit(key uint32) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.times[key]--; w.times[key] == 0 {
		delete(w.times, key)
		w.freed++
	}
}

// Free says that memory with key was deregistered.
func (w *Withheld) Free(key uint32) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.times[key] == 0 {
		w.freed++
	}
}

// Freed returns how often Register may have got one more key to return, by Permit or Free. While it
// stays the same, a Register that has failed with EAGAIN is likely to fail again.
func (w *Withheld) Freed() uint64 {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.freed
}

// Len returns the number of keys.
func (w *Withheld) Len() int {
	w.mu.Lock()
	defer w.mu.Unlock()
	return len(w.times)
}

func (w *Withheld) has(key uint32) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.times[key] > 0
}

// Register calls register until the memory has a key that is not withheld, several times at most,
// and then fails with EAGAIN. device is for the error. A key that is not taken is known only after
// the registration: until Register returns, a peer that has it may reach the memory, if its
// addresses are those of memory that was deregistered. left is why memory with such a key stays
// registered: no peer is told that key, but the memory stays pinned.
func (w *Withheld) Register(device string, register func() (MR, error)) (mr MR, left, err error) {
	var aside []MR // so that the device gives other keys
	defer func() {
		for _, r := range aside {
			left = errors.Join(left, r.Close())
		}
	}()
	for range 16 {
		r, err := register()
		if err != nil {
			return nil, nil, err
		}
		if !w.has(r.RemoteKey()) {
			return r, nil, nil
		}
		aside = append(aside, r)
	}
	return nil, nil, fmt.Errorf("rdma: %s gives only keys that peers may still use for other memory: %w", device,
		syscall.EAGAIN)
}
