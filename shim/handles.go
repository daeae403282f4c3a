//go:build cgo && linux

package main

// #include "internal.h"
import "C"

import (
	"sync"
	"sync/atomic"

	"tutti/pg"
)

// Handles consist of a kind, a generation and an index: see doc.go.
const (
	generationBits = 28
	kindShift      = 60
)

func handle(kind, generation, index uint32) uint64 {
	return uint64(kind)<<kindShift | uint64(generation)<<32 | uint64(index)
}

// table gives handles to objects. Looking up takes no lock.
type table[T any] struct {
	kind uint32
	mu   sync.Mutex // held to change entries
	all  atomic.Pointer[[]*entry[T]]
	free []uint32
}

type entry[T any] struct {
	generation uint32 // odd: in use
	object     *T
}

// add returns a handle for object.
func (t *table[T]) add(object *T) uint64 {
	t.mu.Lock()
	defer t.mu.Unlock()
	var entries []*entry[T]
	if old := t.all.Load(); old != nil {
		entries = append(entries, *old...)
	}
	e, index := &entry[T]{generation: 1, object: object}, uint32(len(entries))
	if n := len(t.free); n > 0 {
		index, t.free = t.free[n-1], t.free[:n-1]
		e.generation = (entries[index].generation + 1) % (1 << generationBits)
		entries[index] = e
	} else {
		entries = append(entries, e)
	}
	t.all.Store(&entries)
	return handle(t.kind, e.generation, index)
}

// get returns the object of a handle, nil if the handle is invalid.
func (t *table[T]) get(h uint64) *T {
	entries := t.all.Load()
	if index := uint32(h); entries != nil && int(index) < len(*entries) {
		if e := (*entries)[index]; e.object != nil && handle(t.kind, e.generation, index) == h {
			return e.object
		}
	}
	return nil
}

// remove makes a handle invalid and returns its object, nil if it was invalid before.
func (t *table[T]) remove(h uint64) *T {
	t.mu.Lock()
	defer t.mu.Unlock()
	object := t.get(h)
	if object == nil {
		return nil
	}
	entries := append([]*entry[T]{}, *t.all.Load()...)
	index := uint32(h)
	entries[index] = &entry[T]{generation: entries[index].generation + 1}
	t.free = append(t.free, index)
	t.all.Store(&entries)
	return object
}

// group is a group of the host.
type group struct {
	*pg.Group
	store *store // of the host's callbacks, or nil
}

var (
	groups  = table[group]{kind: C.KIND_GROUP}
	windows = table[pg.Window]{kind: C.KIND_WINDOW}
)

// findGroup returns the group of a handle, or nil after describing the failure.
func findGroup(h C.uint64_t, f *C.struct_failure) *group {
	g := groups.get(uint64(h))
	if g == nil {
		invalid(f, "%#x is no group, or one that was closed", uint64(h))
	}
	return g
}
