package cuda

import (
	"encoding/binary"
	"errors"
	"fmt"
	"sync"

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

// A region names an allocation of another process. The kind says what else than Base and Size it
// has: an IPC handle, or a descriptor that a server has, and for kindFabric a handle of the fabric
// in Driver, which is tried first.
type region struct {
	kind byte
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

// An Import is the use of an allocation of another process, which stays mapped until Release.
type Import struct {
	in      *imports
	m       *mapping
	release sync.Once
	err     error // of Release
}

// Memory returns n bytes from offset on, as memory of the device that has imported them. It is
// valid until Release. An error wraps device.ErrMemory: the allocation does not have these bytes.
func (i *Import) Memory(offset uint64, n int) (mem.Memory, error) {
	if n < 0 || offset > i.m.region.Size || uint64(n) > i.m.region.Size-offset {
		return mem.Memory{}, fmt.Errorf("cuda: %d bytes from %d on of an allocation of %d bytes: %w", n, offset,
			i.m.region.Size, device.ErrMemory)
	}
	return mem.Device(i.m.at+offset, n, i.in.loc), nil
}

// Release ends the use. No work of a stream may use the memory any more. The mapping stays for the
// next Import, unless its owner is gone or has withdrawn it. Idempotent.
func (i *Import) Release() error {
	i.release.Do(func() { i.err = i.in.release(i.m) })
	return i.err
}

// imports is the allocations of other processes that a device has mapped. Each is mapped once. The
// lock is held during calls of the driver.
type imports struct {
	loc   mem.Location
	open  func(region) (at uint64, err error) // maps at least Size bytes
	close func(r region, at uint64) error

	mu     sync.Mutex
	ended  bool
	mapped map[importKey]*mapping
	dying  []*mapping // that are used, but no longer in mapped
}

type importKey struct {
	owner  uint64
	region region
}

type mapping struct {
	region region
	at     uint64
	uses   int
	dying  bool
}

func (in *imports) take(owner uint64, r region) (*Import, error) {
	in.mu.Lock()
	defer in.mu.Unlock()
	if in.ended {
		return nil, fmt.Errorf("cuda: %s was closed: %w", in.loc, device.ErrClosed)
	}
	if r.Size == 0 || r.Base+r.Size < r.Base || r.Size > 1<<62 {
		return nil, fmt.Errorf("cuda: a handle of %d bytes at %#x: %w", r.Size, r.Base, device.ErrMemory)
	}
	key := importKey{owner, r}
	m := in.mapped[key]
	if m == nil {
		// The owner has freed what it had there before. Drivers may otherwise return the old
		// mapping.
		err := in.drop(func(k importKey) bool {
			return k.owner == owner && k.region.Base < r.Base+r.Size && r.Base < k.region.Base+k.region.Size
		})
		if err != nil {
			return nil, err
		}
		at, err := in.open(r)
		if err != nil {
			return nil, err
		}
		m = &mapping{region: r, at: at}
		in.mapped[key] = m
	}
	m.uses++
	return &Import{in: in, m: m}, nil
}

func (in *imports) release(m *mapping) error {
	in.mu.Lock()
	defer in.mu.Unlock()
	m.uses--
	if !m.dying || m.uses > 0 || in.ended {
		return nil
	}
	for i, d := range in.dying {
		if d == m {
			in.dying = append(in.dying[:i], in.dying[i+1:]...)
			break
		}
	}
	return in.close(m.region, m.at)
}

// drop forgets mappings. Those that are not used are closed now, the others by their last Release.
// With the lock.
func (in *imports) drop(which func(importKey) bool) error {
	var errs []error
	for k, m := range in.mapped {
		if !which(k) {
			continue
		}
		delete(in.mapped, k)
		if m.uses > 0 {
			m.dying = true
			in.dying = append(in.dying, m)
			continue
		}
		errs = append(errs, in.close(m.region, m.at))
	}
	return errors.Join(errs...)
}

func (in *imports) forget(which func(importKey) bool) error {
	in.mu.Lock()
	defer in.mu.Unlock()
	return in.drop(which)
}

// end closes all mappings, also those that are used.
func (in *imports) end() error {
	in.mu.Lock()
	defer in.mu.Unlock()
	in.ended = true
	var errs []error
	for _, m := range in.mapped {
		errs = append(errs, in.close(m.region, m.at))
	}
	for _, m := range in.dying {
		errs = append(errs, in.close(m.region, m.at))
	}
	in.mapped, in.dying = nil, nil
	return errors.Join(errs...)
}
