//go:build cgo && linux

package cuda

import (
	"errors"
	"fmt"

	"tutti/device"
	"tutti/mem"
)

// ExportIPC returns a handle by which other processes of the machine map the allocation that has m,
// and where m begins in it. The allocation may be any in the GPU's primary context. It must
// not be freed before no other process has it mapped. The error wraps errors.ErrUnsupported if the
// driver cannot share it so: memory of cuMemCreate, also that of Alloc, of cuMemAllocAsync, and in
// PyTorch of expandable segments. Share shares what Alloc has given. It does so too for
// allocations of less than 2 MiB: the driver takes several of these from one block, and a handle is
// one of the block. What PyTorch allocates from the driver is 2 MiB or more.
func (v *Device) ExportIPC(m mem.Memory) (h IPCHandle, offset uint64, err error) {
	switch {
	case m.Loc() != v.loc || m.Len() == 0:
		return h, 0, fmt.Errorf("cuda: sharing %d bytes at %q of %s: %w", m.Len(), m.Loc(), v.loc, device.ErrMemory)
	case !v.gpu.d.IPC():
		return h, 0, fmt.Errorf("cuda: this driver has no handles for other processes: %w", errors.ErrUnsupported)
	}
	if err := v.open(); err != nil {
		return h, 0, err
	}
	h, err = v.gpu.shared(m.Address())
	if e, ok := errors.AsType[*Error](err); ok && e.Call == "cuIpcGetMemHandle" &&
		(e.Code == codeInvalidValue || e.Code == codeNotSupported) {
		err = fmt.Errorf("%w: %w", err, errors.ErrUnsupported)
	}
	if err != nil {
		return IPCHandle{}, 0, err
	}
	offset = m.Address() - h.Base
	if uint64(m.Len()) > h.Size-offset {
		return IPCHandle{}, 0, fmt.Errorf("cuda: sharing %d bytes from %d on of an allocation of %d bytes: %w", m.Len(),
			offset, h.Size, device.ErrMemory)
	}
	return h, offset, nil
}

// ipcBlock is what the driver takes small allocations from.
const ipcBlock = 2 << 20

// Codes of errors that do not mean a failure, CUresult.
const (
	codeInvalidValue       = 1
	codeInvalidDevice      = 101
	codeAlreadyMapped      = 208
	codePeerUnsupported    = 217
	codeNotPermitted       = 800
	codeNotSupported       = 801
	codeCaptureUnsupported = 900
	codeCaptureInvalidated = 901
	codeCaptureImplicit    = 906
)

// ImportIPC maps an allocation of another process, which owner names: the incarnation of a peer. An
// allocation that is mapped already is not mapped again. The caller releases the Import. A process
// cannot import its own memory, for which it has the address.
//
// Nothing is known about what the owner does with the memory: it may be gone, and its memory freed,
// while it is mapped here. Then reads return anything. A user of such data asks afterwards whether
// the owner was still there.
func (v *Device) ImportIPC(owner uint64, h IPCHandle) (*Import, error) {
	if !v.gpu.d.IPC() {
		return nil, fmt.Errorf("cuda: this driver has no handles of other processes: %w", errors.ErrUnsupported)
	}
	return v.imports.take(owner, ownersRegion(owner, h))
}

// WithdrawIPC says that an owner frees an allocation: a later import is another mapping.
func (v *Device) WithdrawIPC(owner uint64, h IPCHandle) {
	v.withdraw(owner, ownersRegion(owner, h))
}

// ownersRegion returns the region of a handle without its process: an owner stands for one.
func ownersRegion(owner uint64, h IPCHandle) region {
	return region{kind: kindIPC, process: owner, IPCHandle: h}
}

func (v *Device) withdraw(owner uint64, r region) {
	v.imports.forget(func(k importKey) bool { return k.owner == owner && k.region == r })
}

// ForgetIPC is WithdrawIPC for all allocations of an owner that is gone.
func (v *Device) ForgetIPC(owner uint64) {
	v.imports.forget(func(k importKey) bool { return k.owner == owner })
}

// openImport maps an allocation, and checks that it has the size that its owner has said. One that
// fails the check stays mapped: unmapping it may wait for the work on the GPU.
func (g *gpu) openImport(r region) (uint64, error) {
	switch {
	case r.kind == kindIPC:
	case r.process == process:
		return g.openOwn(r)
	default:
		return g.openPhysical(r)
	}
	h := r.IPCHandle
	at, err := g.openShared(h)
	if err != nil {
		return 0, err
	}
	base, size, err := g.allocation(at)
	if err == nil && (base != at || size < h.Size) {
		err = fmt.Errorf("cuda: a handle of %d bytes, mapped at %#x, names an allocation of %d at %#x: %w", h.Size, at,
			size, base, device.ErrMemory)
	}
	return at, err
}

// closeImport unmaps an allocation that no work uses.
func (g *gpu) closeImport(r region, at uint64) error {
	switch {
	case r.kind == kindIPC:
		return g.closeShared(at)
	case r.process == process:
		return g.drop(r.token)
	}
	return g.unmapUnused(at, r.Size)
}

// closeUsedImport unmaps an allocation when all work on the GPU has ended.
func (g *gpu) closeUsedImport(r region, at uint64) error {
	if r.kind == kindIPC {
		return g.closeShared(at)
	}
	return g.after(func(g *gpu) error { return g.closeImport(r, at) })
}
