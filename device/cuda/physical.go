//go:build cgo && linux

package cuda

/*
#include "driver.h"
*/
import "C"

import (
	"crypto/sha256"
	"errors"
	"fmt"
	"os"
	"sync"
	"unsafe"

	"golang.org/x/sys/unix"

	"tutti/device"
	"tutti/internal/handoff"
)

// Memory that this package allocates for others to map has handles of its own kind (in terms of
// CUDA, virtual memory management): a descriptor, which the process that wants to map it asks for
// by package handoff, and for GPUs of the same clique of a fabric 64 bytes. So no other allocation
// is in the pages that are shared, as it may be with IPC handles, and the memory lives while
// another process has it mapped.

// Types of handles, CUmemAllocationHandleType.
const (
	handleDescriptor = 1
	handleFabric     = 8
)

// A physical is memory of a GPU that has handles for other processes. It is mapped at one place,
// until it was freed and no import of a device of this process uses it.
type physical struct {
	v      *Device
	at     uint64
	size   uint64 // a multiple of the granule
	handle uint64
	token  handoff.Token
	fabric *[64]byte // CUmemFabricHandle; nil: it has none

	// With the lock of offers.
	shared bool // others may ask for it
	freed  bool // nobody may
	uses   int  // that of Alloc, and those of imports
}

// cliqueOf is how keys name a clique.
func cliqueOf(name string) (clique [16]byte) {
	sum := sha256.Sum256([]byte(name))
	copy(clique[:], sum[:])
	return clique
}

// kinds is which handles the memory of a device has.
type kinds struct {
	mu      sync.Mutex
	granule uint64 // sizes are its multiples; 0: there are no handles
	types   C.int
	clique  [16]byte // with handleFabric
}

// prepareHandles finds which handles memory can have. clique is that of the GPU, "" if it is in
// none.
func (v *Device) prepareHandles(clique string) (err error) {
	if !v.info.VMM {
		return nil
	}
	k := &v.kinds
	k.types, k.clique = handleDescriptor, cliqueOf(clique)
	if v.info.Fabric && clique != "" {
		k.types |= handleFabric
	}
	for {
		k.granule, err = v.gpu.granularity(k.types, v.info.rdma)
		if !refusal(err) {
			return err
		}
		if k.types&handleFabric == 0 {
			k.granule = 0
			return nil
		}
		k.types &^= handleFabric
	}
}

// refusal reports whether an error says that memory has no handles of a type here, as without the
// rights for a fabric.
func refusal(err error) bool {
	e, ok := errors.AsType[*Error](err)
	return ok && (e.Code == codeNotPermitted || e.Code == codeNotSupported)
}

// allocPhysical decides which handles memory has. It returns nil for memory with IPC handles only,
// because the device has no others.
func (v *Device) allocPhysical(n int) (*physical, error) {
	k := &v.kinds
	k.mu.Lock()
	defer k.mu.Unlock()
	for k.granule > 0 {
		p, err := v.newPhysical(n)
		switch {
		case !refusal(err):
			return p, err
		case k.types&handleFabric != 0:
			k.types &^= handleFabric
		default:
			k.granule = 0
		}
	}
	return nil, nil
}

// newPhysical allocates memory of the present kinds. With the lock.
func (v *Device) newPhysical(n int) (p *physical, err error) {
	g, k := v.gpu, &v.kinds
	p = &physical{v: v, size: (uint64(n) + k.granule - 1) / k.granule * k.granule, token: handoff.NewToken(), uses: 1}
	if p.handle, err = g.create(p.size, k.types, v.info.rdma); err != nil {
		return nil, err
	}
	if k.types&handleFabric != 0 {
		p.fabric = new([64]byte)
		err = g.exportFabric(p.handle, p.fabric)
	}
	if err == nil {
		p.at, err = g.mapHandle(p.handle, p.size)
	}
	if err != nil {
		return nil, errors.Join(err, g.releaseHandle(p.handle))
	}
	offers.add(p)
	return p, nil
}

// free waits until all work on the GPU has ended, as the driver does when it frees other memory.
// The memory lives as long as it is mapped, here (see after) or in other processes.
func (p *physical) free() error {
	offers.remove(p)
	return p.v.gpu.after(p.drop)
}

// freeUnused is free for memory that no work of this device uses. It does not wait.
func (p *physical) freeUnused() error {
	offers.remove(p)
	return p.drop(p.v.gpu)
}

// drop ends the use of Alloc.
func (p *physical) drop(g *gpu) error { return g.drop(p.token) }

// drop ends a use of memory. After the last one it is unmapped, by this GPU or another.
func (g *gpu) drop(t handoff.Token) error {
	p := offers.drop(t)
	if p == nil {
		return nil
	}
	return first([]error{g.unmapUnused(p.at, p.size), g.releaseHandle(p.handle)})
}

// An offering is the memory of this process that has descriptors. Others may ask for that which was
// shared.
type offering struct {
	mu     sync.Mutex
	all    map[handoff.Token]*physical // that is used
	shared int                         // of all, but for what was freed
	server *handoff.Server             // while any is shared
}

var offers = offering{all: map[handoff.Token]*physical{}}

func (o *offering) add(p *physical) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.all[p.token] = p
}

// share lets other processes ask for memory, and returns the name of the server. Idempotent.
func (o *offering) share(p *physical) (server uint64, err error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if p.freed {
		return 0, fmt.Errorf("cuda: sharing memory of %s that was freed: %w", p.v.loc, device.ErrMemory)
	}
	if o.server == nil {
		if o.server, err = handoff.Serve(o.descriptor); err != nil {
			return 0, fmt.Errorf("cuda: share memory of %s with other processes: %w", p.v.loc, err)
		}
	}
	if !p.shared {
		p.shared = true
		o.shared++
	}
	return o.server.Name(), nil
}

// remove has nobody ask for memory any more, which is freed.
func (o *offering) remove(p *physical) {
	o.mu.Lock()
	p.freed = true
	var last *handoff.Server
	if p.shared {
		if o.shared--; o.shared == 0 {
			last, o.server = o.server, nil
		}
	}
	o.mu.Unlock()
	if last != nil {
		last.Close()
	}
}

// find returns the memory with a token, nil if there is none.
func (o *offering) find(t handoff.Token) *physical {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.findLocked(t)
}

func (o *offering) findLocked(t handoff.Token) *physical {
	if p := o.all[t]; p != nil && !p.freed {
		return p
	}
	return nil
}

// use is find, and adds a use of the memory.
func (o *offering) use(t handoff.Token) *physical {
	o.mu.Lock()
	defer o.mu.Unlock()
	p := o.findLocked(t)
	if p != nil {
		p.uses++
	}
	return p
}

// drop ends a use of memory. It returns the memory if that was the last one.
func (o *offering) drop(t handoff.Token) *physical {
	o.mu.Lock()
	defer o.mu.Unlock()
	p := o.all[t]
	if p.uses--; p.uses > 0 {
		return nil
	}
	delete(o.all, t)
	return p
}

// at returns the memory that has the byte at an address of a GPU, of whichever Device. nil: there
// is none.
func (o *offering) at(g *gpu, address uint64) *physical {
	o.mu.Lock()
	defer o.mu.Unlock()
	for _, p := range o.all {
		if !p.freed && p.v.gpu.same(g) && address >= p.at && address-p.at < p.size {
			return p
		}
	}
	return nil
}

// same reports whether two are the same GPU.
func (g *gpu) same(o *gpu) bool { return g.d == o.d && g.device == o.device }

// descriptor makes one for another process. With the lock the memory is not unmapped.
func (o *offering) descriptor(t handoff.Token) (fd int, err error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	p := o.findLocked(t)
	if p == nil || !p.shared {
		return -1, errors.New("there is no such memory, or not any more")
	}
	return p.v.gpu.exportDescriptor(p.handle)
}

// openOwn gives the GPU access to memory of this process, which it uses until drop.
func (g *gpu) openOwn(r region) (at uint64, err error) {
	p := offers.use(r.token)
	if p == nil {
		return 0, errNotOwn
	}
	if err := g.giveAccess(p.at, p.size); err != nil {
		return 0, errors.Join(err, g.drop(r.token))
	}
	return p.at, nil
}

// openPhysical maps memory of another process, by its handle of the fabric if r has one.
func (g *gpu) openPhysical(r region) (at uint64, err error) {
	at, err = g.mapPhysical(r)
	if e, ok := errors.AsType[*Error](err); ok && e.Code == codeInvalidValue {
		err = fmt.Errorf("cuda: a key does not name %d bytes of memory: %w: %w", r.Size, err, device.ErrMemory)
	}
	return at, err
}

func (g *gpu) mapPhysical(r region) (at uint64, err error) {
	var handle uint64
	if r.kind == kindFabric {
		handle, err = g.importFabric(&r.Driver)
	}
	if r.kind == kindDescriptor || err != nil {
		var failed error
		if handle, failed = g.takeDescriptor(r); failed != nil {
			return 0, errors.Join(err, failed)
		}
	}
	at, err = g.mapHandle(handle, r.Size)
	if err = errors.Join(err, g.releaseHandle(handle)); err != nil && at != 0 { // the mapping keeps the memory
		return 0, errors.Join(err, g.unmapUnused(at, r.Size))
	}
	return at, err
}

func (g *gpu) takeDescriptor(r region) (handle uint64, err error) {
	fd, err := handoff.Take(r.server, r.token)
	if err != nil {
		return 0, fmt.Errorf("cuda: map memory of another process for %s: %w", g.name, err)
	}
	handle, err = g.importDescriptor(fd)
	return handle, errors.Join(err, os.NewSyscallError("close", unix.Close(fd)))
}

// The calls of the driver.

func (g *gpu) granularity(types C.int, rdma bool) (uint64, error) {
	var n C.size_t
	r := C.tutti_cuda_granularity(g.d.lib, g.ptr, g.device, types, flag(rdma), &n)
	return uint64(n), g.d.failure(r, "cuMemGetAllocationGranularity", "ask for the granularity of memory of %s", g.name)
}

func flag(b bool) C.int {
	if b {
		return 1
	}
	return 0
}

func (g *gpu) create(n uint64, types C.int, rdma bool) (uint64, error) {
	var h C.uint64_t
	r := C.tutti_cuda_create(g.d.lib, g.ptr, g.device, types, flag(rdma), C.size_t(n), &h)
	return uint64(h), g.d.failure(r, "cuMemCreate", "allocate %d bytes with handles of types %#x on %s", n, int(types),
		g.name)
}

func (g *gpu) releaseHandle(h uint64) error {
	return g.d.failure(C.tutti_cuda_release_handle(g.d.lib, g.ptr, C.uint64_t(h)), "cuMemRelease",
		"release a handle of memory on %s", g.name)
}

// mapHandle maps memory and gives the GPU access to it.
func (g *gpu) mapHandle(h, n uint64) (at uint64, err error) {
	var a C.uint64_t
	if r := C.tutti_cuda_reserve(g.d.lib, g.ptr, C.size_t(n), &a); r != 0 {
		return 0, g.d.failure(r, "cuMemAddressReserve", "reserve addresses for %d bytes on %s", n, g.name)
	}
	if r := C.tutti_cuda_map(g.d.lib, g.ptr, a, C.size_t(n), C.uint64_t(h)); r != 0 {
		err := g.d.failure(r, "cuMemMap", "map %d bytes on %s", n, g.name)
		return 0, errors.Join(err, g.unreserve(uint64(a), n))
	}
	if err := g.giveAccess(uint64(a), n); err != nil {
		return 0, errors.Join(err, g.unmapUnused(uint64(a), n))
	}
	return uint64(a), nil
}

// giveAccess has the GPU use what is mapped in this process.
func (g *gpu) giveAccess(at, n uint64) error {
	r := C.tutti_cuda_give_access(g.d.lib, g.ptr, C.uint64_t(at), C.size_t(n), g.device)
	return g.d.failure(r, "cuMemSetAccess", "give %s access to %d bytes of memory", g.name, n)
}

// after calls f, which unmaps memory, when all work on the GPU has ended: work on memory that is
// not mapped would end the context. While the program captures a stream the driver refuses to wait,
// and the capture fails, whatever the mode of the thread is. The memory is then left mapped until
// the next call of after, or unmapLeft.
func (g *gpu) after(f func(*gpu) error) error {
	left, err := g.afterAll(append(g.takeLeft(), f))
	if left {
		return nil
	}
	return err
}

// unmapLeft unmaps what after has left mapped. It does not wait if that is nothing.
func (g *gpu) unmapLeft() error {
	all := g.takeLeft()
	if len(all) == 0 {
		return nil
	}
	_, err := g.afterAll(all)
	return err
}

// afterAll unmaps memory, or leaves it mapped and returns why the driver does not wait.
func (g *gpu) afterAll(all []func(*gpu) error) (left bool, err error) {
	r := C.tutti_cuda_synchronize(g.d.lib, g.ptr)
	err = g.d.failure(r, "cuCtxSynchronize", "wait for the work on %s before memory is unmapped", g.name)
	if capturing(r) {
		g.d.mu.Lock()
		defer g.d.mu.Unlock()
		if g.d.left == nil {
			g.d.left = map[C.int][]func(*gpu) error{}
		}
		g.d.left[g.device] = append(g.d.left[g.device], all...)
		return true, err
	}
	errs := []error{err}
	for _, f := range all {
		errs = append(errs, f(g))
	}
	return false, first(errs)
}

// takeLeft returns what unmaps the memory that was left mapped. The caller calls it.
func (g *gpu) takeLeft() []func(*gpu) error {
	g.d.mu.Lock()
	defer g.d.mu.Unlock()
	left := g.d.left[g.device]
	delete(g.d.left, g.device)
	return left
}

// unmapUnused unmaps memory that no work uses. It does not wait.
func (g *gpu) unmapUnused(at, n uint64) error {
	r := C.tutti_cuda_unmap(g.d.lib, g.ptr, C.uint64_t(at), C.size_t(n))
	return first([]error{g.d.failure(r, "cuMemUnmap", "unmap %d bytes on %s", n, g.name), g.unreserve(at, n)})
}

func (g *gpu) unreserve(at, n uint64) error {
	return g.d.failure(C.tutti_cuda_unreserve(g.d.lib, g.ptr, C.uint64_t(at), C.size_t(n)), "cuMemAddressFree",
		"give addresses of %d bytes on %s back", n, g.name)
}

// exportDescriptor makes a descriptor of memory, which the caller closes.
func (g *gpu) exportDescriptor(h uint64) (int, error) {
	var fd C.int
	if r := C.tutti_cuda_export_descriptor(g.d.lib, g.ptr, C.uint64_t(h), &fd); r != 0 {
		return -1, g.d.failure(r, "cuMemExportToShareableHandle", "make a descriptor of memory of %s", g.name)
	}
	unix.CloseOnExec(int(fd))
	return int(fd), nil
}

func (g *gpu) exportFabric(h uint64, to *[64]byte) error {
	r := C.tutti_cuda_export_fabric(g.d.lib, g.ptr, C.uint64_t(h), (*C.struct_tutti_cuda_fabric)(unsafe.Pointer(to)))
	return g.d.failure(r, "cuMemExportToShareableHandle", "make a handle of the fabric for memory of %s", g.name)
}

func (g *gpu) importDescriptor(fd int) (uint64, error) {
	var h C.uint64_t
	r := C.tutti_cuda_import_descriptor(g.d.lib, g.ptr, C.int(fd), &h)
	return uint64(h), g.d.failure(r, "cuMemImportFromShareableHandle",
		"take memory of another process for %s by its descriptor", g.name)
}

func (g *gpu) importFabric(from *[64]byte) (uint64, error) {
	var h C.uint64_t
	r := C.tutti_cuda_import_fabric(g.d.lib, g.ptr, (*C.struct_tutti_cuda_fabric)(unsafe.Pointer(from)), &h)
	return uint64(h), g.d.failure(r, "cuMemImportFromShareableHandle",
		"take memory of another process for %s by its handle of the fabric", g.name)
}
