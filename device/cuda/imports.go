package cuda

import (
	"cmp"
	"encoding/binary"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	"tutti/device"
	"tutti/internal/handoff"
	"tutti/mem"
)

// IPCHandle names an allocation of a process for the other processes of the machine. It is valid
// until the allocation is freed. The zero handle names nothing.
type IPCHandle struct {
	Driver [64]byte // CUipcMemHandle
	Number uint64   // that no other allocation of the process has had; 0 if the driver has none
	Base   uint64   // address of the allocation in its process
	Size   uint64   // of the allocation, in bytes
}

// ipcBytes is the length of an encoded handle.
const ipcBytes = 64 + 3*8

// AppendBinary implements encoding.BinaryAppender.
func (h IPCHandle) AppendBinary(b []byte) ([]byte, error) {
	b = append(b, h.Driver[:]...)
	for _, n := range []uint64{h.Number, h.Base, h.Size} {
		b = binary.LittleEndian.AppendUint64(b, n)
	}
	return b, nil
}

// UnmarshalBinary implements encoding.BinaryUnmarshaler.
func (h *IPCHandle) UnmarshalBinary(b []byte) error {
	if len(b) != ipcBytes {
		return fmt.Errorf("cuda: a handle of %d bytes, want %d: %w", len(b), ipcBytes, device.ErrMemory)
	}
	copy(h.Driver[:], b)
	for i, n := range []*uint64{&h.Number, &h.Base, &h.Size} {
		*n = binary.LittleEndian.Uint64(b[64+8*i:])
	}
	return nil
}

// A region names an allocation, mostly of another process. The kind says what else than Base and
// Size it has: an IPC handle, or a descriptor that a server has, and for kindFabric a handle of the
// fabric in Driver, which is tried first.
type region struct {
	kind    byte
	process uint64 // that has it
	IPCHandle
	server uint64
	token  handoff.Token
}

// Kinds of regions, and of keys (see Share).
const (
	kindIPC        = 1
	kindDescriptor = 2
	kindFabric     = 3
)

// An Import is the use of an allocation, mostly of another process, which stays mapped until
// Release.
type Import struct {
	in      *imports
	m       *mapping
	release sync.Once
	err     error // of Release
}

// Memory returns n bytes from offset on, as memory of the device that has imported them. It is
// valid until Release. An error wraps device.ErrMemory: the allocation does not have these bytes.
func (i *Import) Memory(offset uint64, n int) (mem.Memory, error) {
	if n < 0 || offset > i.m.key.region.Size || uint64(n) > i.m.key.region.Size-offset {
		return mem.Memory{}, fmt.Errorf("cuda: %d bytes from %d on of an allocation of %d bytes: %w", n, offset,
			i.m.key.region.Size, device.ErrMemory)
	}
	return mem.Device(i.m.at+offset, n, i.in.loc), nil
}

// Release ends the use. No work of a stream may use the memory any more. The last Release unmaps
// the allocation, for which the driver may wait for the work on the GPU if it was mapped by an IPC
// handle. Idempotent.
func (i *Import) Release() error {
	i.release.Do(func() { i.err = i.in.release(i.m) })
	return i.err
}

// imports is the allocations of other processes that a device has mapped, and those of this process
// that have descriptors. Each is mapped once, while it is used. The lock is held while the driver
// maps one, but not while it unmaps one: that waits for work, which may wait for an operation that
// maps another.
type imports struct {
	loc   mem.Location
	open  func(region) (at uint64, err error) // maps at least Size bytes, also with an error, unless at is 0
	close func(r region, at uint64) error
	held  func() bool // a stream waits in places for an operation, which may be the one that maps

	mu      sync.Mutex
	ended   bool // see stop
	mapped  map[importKey]*mapping
	dying   []*mapping // that are used, but no longer in mapped
	closing []*mapping // that the driver unmaps
	failed  error      // the first of those that were not used
}

func newImports(loc mem.Location, open func(region) (uint64, error),
	unmap func(r region, at uint64) error, held func() bool) *imports {
	return &imports{loc: loc, open: open, close: unmap, held: held, mapped: map[importKey]*mapping{}}
}

// How long take waits for the driver to unmap memory, and once for the uses of a mapping to end.
const (
	unmapTime   = time.Second
	releaseTime = 10 * time.Millisecond
)

type importKey struct {
	owner  uint64
	region region
}

type mapping struct {
	key      importKey
	at       uint64
	uses     int
	awaited  bool          // take has waited for the uses to end
	unmapped chan struct{} // closed after closing had it
}

// stale reports whether its process has freed old if it now has another allocation, r.
func (old region) stale(r region) bool {
	return old.process == r.process && (old != r || r.kind == kindIPC && r.Number == 0) &&
		old.Base < r.Base+r.Size && r.Base < old.Base+old.Size
}

func (in *imports) take(owner uint64, r region) (*Import, error) {
	in.mu.Lock()
	defer in.mu.Unlock()
	if r.Size == 0 || r.Base+r.Size < r.Base || r.Size > 1<<62 {
		return nil, fmt.Errorf("cuda: a handle of %d bytes at %#x: %w", r.Size, r.Base, device.ErrMemory)
	}
	key := importKey{owner, r}
	for !in.ended && in.mapped[key] == nil {
		in.drop(func(k importKey) bool { return k.region.stale(r) })
		m := in.inTheWayLocked(r)
		if m == nil {
			break
		}
		if err := in.awaitUnmappedLocked(m); err != nil {
			return nil, err
		}
	}
	if in.ended {
		return nil, fmt.Errorf("cuda: %s was closed: %w", in.loc, device.ErrClosed)
	}
	m := in.mapped[key]
	if m == nil {
		at, err := in.open(r)
		m = &mapping{key: key, at: at, unmapped: make(chan struct{})}
		if err != nil {
			if at != 0 {
				in.refuseLocked(m)
			}
			return nil, err
		}
		in.mapped[key] = m
	}
	m.uses++
	return &Import{in: in, m: m}, nil
}

// inTheWayLocked returns a mapping, dropped before, that the driver may return for r, an IPC
// handle, until it is unmapped. It returns nil if there is none.
func (in *imports) inTheWayLocked(r region) *mapping {
	if r.kind != kindIPC {
		return nil
	}
	stale := func(m *mapping) bool { return m.key.region.kind == kindIPC && m.key.region.stale(r) }
	for _, all := range [][]*mapping{in.dying, in.closing} {
		if i := slices.IndexFunc(all, stale); i >= 0 {
			return all[i]
		}
	}
	return nil
}

// awaitUnmappedLocked waits for a while until m, of memory that was freed, is unmapped. A group
// that has not been told so uses m for any time. The driver waits for the work on the device, which
// may wait for the operation that maps other memory.
func (in *imports) awaitUnmappedLocked(m *mapping) error {
	limit, why := unmapTime, "the GPU has work"
	if m.uses > 0 {
		limit, why = releaseTime, "a group has not been told that it was freed"
	}
	if in.held() || m.uses > 0 && m.awaited {
		limit = 0
	}
	m.awaited = m.awaited || limit > 0
	if in.waitLocked(m, time.After(limit)) {
		return nil
	}
	return fmt.Errorf("cuda: memory that %s had mapped at the place of other memory is not unmapped yet, "+
		"because %s: %w", in.loc, why, device.ErrLater)
}

func (in *imports) release(m *mapping) error {
	in.mu.Lock()
	defer in.mu.Unlock()
	m.uses--
	if m.uses > 0 || in.ended {
		return nil
	}
	if in.mapped[m.key] == m {
		delete(in.mapped, m.key)
	}
	in.dying = slices.DeleteFunc(in.dying, func(o *mapping) bool { return o == m })
	in.closing = append(in.closing, m)
	return in.unmapLocked(m)
}

// refuseLocked has a goroutine unmap m, which is not used: take does not wait for the work on the
// GPU.
func (in *imports) refuseLocked(m *mapping) {
	in.closing = append(in.closing, m)
	go func() {
		in.mu.Lock()
		defer in.mu.Unlock()
		err := in.unmapLocked(m)
		in.failed = cmp.Or(in.failed, err)
	}()
}

// unmapLocked has the driver unmap m, which is in closing until it has.
func (in *imports) unmapLocked(m *mapping) error {
	in.mu.Unlock()
	err := in.close(m.key.region, m.at)
	in.mu.Lock()
	in.closing = slices.DeleteFunc(in.closing, func(o *mapping) bool { return o == m })
	close(m.unmapped)
	return err
}

// waitLocked waits until the driver has unmapped m, and reports whether it has. A nil limit is
// none.
func (in *imports) waitLocked(m *mapping, limit <-chan time.Time) bool {
	in.mu.Unlock()
	defer in.mu.Lock()
	select {
	case <-m.unmapped:
		return true
	case <-limit:
		return false
	}
}

// drop has no later use take a mapping, which its last Release unmaps. With the lock.
func (in *imports) drop(which func(importKey) bool) {
	for k, m := range in.mapped {
		if which(k) {
			delete(in.mapped, k)
			in.dying = append(in.dying, m)
		}
	}
}

func (in *imports) forget(which func(importKey) bool) {
	in.mu.Lock()
	defer in.mu.Unlock()
	in.drop(which)
}

// stop has Release leave mappings to end. Nothing more is mapped.
func (in *imports) stop() {
	in.mu.Lock()
	defer in.mu.Unlock()
	in.ended = true
}

// end, after stop, has unmap close all mappings, also those that are used. It returns also what
// refuseLocked has kept.
func (in *imports) end(unmap func(r region, at uint64) error) error {
	in.mu.Lock()
	for len(in.closing) > 0 {
		in.waitLocked(in.closing[0], nil)
	}
	errs := []error{in.failed}
	all := slices.AppendSeq(in.dying, maps.Values(in.mapped))
	in.mapped, in.dying = nil, nil
	in.mu.Unlock() // Release does not wait for the work on the GPU
	for _, m := range all {
		errs = append(errs, unmap(m.key.region, m.at))
	}
	return errors.Join(errs...)
}
