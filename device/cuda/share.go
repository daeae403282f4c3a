//go:build cgo && linux

package cuda

import (
	"encoding/binary"
	"errors"
	"fmt"

	"tutti/device"
	"tutti/internal/ident"
	"tutti/mem"
)

// A key of device.Sharer is, little-endian: kind (1 byte) | length of the GPU's name (1) | process
// (8) | what its kind has | the name: the GPU's UUID, or its PCI address if that is not known.
//
//	kindIPC         the handle
//	kindDescriptor  base (8) | size (8) | server (8) | token (16)
//	kindFabric      the same | clique (16) | handle of the fabric (64)
const (
	keyHeader       = 10
	descriptorBytes = 3*8 + 16
	fabricBytes     = descriptorBytes + 16 + 64
)

// keyBytes are what keys of a kind have between the header and the name.
var keyBytes = map[byte]int{kindIPC: ipcBytes, kindDescriptor: descriptorBytes, kindFabric: fabricBytes}

// A key as it is in a message.
type key struct {
	region
	clique [16]byte
	name   string
}

func (k *key) encode() ([]byte, error) {
	b := append(make([]byte, 0, device.MaxKey), k.kind, byte(len(k.name)))
	b = binary.LittleEndian.AppendUint64(b, k.process)
	if k.kind == kindIPC {
		var err error
		if b, err = k.AppendBinary(b); err != nil {
			return nil, err
		}
		return append(b, k.name...), nil
	}
	for _, n := range []uint64{k.Base, k.Size, k.server} {
		b = binary.LittleEndian.AppendUint64(b, n)
	}
	b = append(b, k.token[:]...)
	if k.kind == kindFabric {
		b = append(append(b, k.clique[:]...), k.Driver[:]...)
	}
	return append(b, k.name...), nil
}

// decode reads a key of a peer. Nothing in it is true but its lengths.
func decode(b []byte) (k key, err error) {
	n := 0
	if len(b) >= keyHeader {
		n = keyBytes[b[0]]
	}
	if n == 0 || len(b) != keyHeader+n+int(b[1]) {
		return k, fmt.Errorf("cuda: a key of %d bytes that this version does not know: %w", len(b), device.ErrMemory)
	}
	k.kind, k.process, k.name = b[0], binary.LittleEndian.Uint64(b[2:]), string(b[keyHeader+n:])
	b = b[keyHeader : keyHeader+n]
	if k.kind == kindIPC {
		err = k.UnmarshalBinary(b)
		return k, err
	}
	for i, to := range []*uint64{&k.Base, &k.Size, &k.server} {
		*to = binary.LittleEndian.Uint64(b[8*i:])
	}
	copy(k.token[:], b[24:])
	if k.kind == kindFabric {
		copy(k.clique[:], b[descriptorBytes:])
		copy(k.Driver[:], b[descriptorBytes+16:])
	}
	return k, nil
}

// process tells this process from the others of the machine.
var process = ident.New()

// name returns what identifies the GPU in the machine.
func (i Info) name() string {
	if i.UUID != "" {
		return i.UUID
	}
	return i.PCI
}

// Share implements device.Sharer. Memory of Alloc is shared as Alloc says, that of the program by
// ExportIPC.
func (v *Device) Share(m mem.Memory) ([]byte, uint64, error) {
	k := key{region: region{process: process}, name: v.info.name()}
	if k.name == "" {
		return nil, 0, fmt.Errorf("cuda: the driver tells neither the UUID nor the address of %s: %w", v.loc,
			errors.ErrUnsupported)
	}
	offset, err := v.describe(m, &k)
	if err != nil {
		return nil, 0, err
	}
	b, err := k.encode()
	return b, offset, err
}

// describe says in k how others map the allocation that has m, and returns where m begins in it.
func (v *Device) describe(m mem.Memory, k *key) (offset uint64, err error) {
	var p *physical
	if m.Loc() == v.loc {
		p = offers.at(v.gpu, m.Address())
	}
	if p == nil {
		k.kind = kindIPC
		k.IPCHandle, offset, err = v.ExportIPC(m)
		return offset, err
	}
	k.kind, k.Base, k.Size, k.token = kindDescriptor, p.at, p.size, p.token
	if p.fabric != nil {
		k.kind, k.clique, k.Driver = kindFabric, p.v.kinds.clique, *p.fabric
	}
	offset = m.Address() - p.at
	if m.Len() == 0 || uint64(m.Len()) > p.size-offset {
		return 0, fmt.Errorf("cuda: sharing %d bytes from %d on of an allocation of %d bytes: %w", m.Len(), offset,
			p.size, device.ErrMemory)
	}
	k.server, err = offers.share(p)
	return offset, err
}

// Import implements device.Sharer. Memory of this process is taken as it is. If it has a descriptor
// it stays mapped until Release, as that of other processes does; else its owner must not free it
// before.
func (v *Device) Import(owner uint64, b []byte) (device.Shared, error) {
	k, err := decode(b)
	if err != nil {
		return nil, err
	}
	path := sameGPU
	if k.name != v.info.name() {
		path = peerAccess
	}
	if k.process == process {
		if err := v.reachOwn(&k, path); err != nil {
			return nil, unreachable(err)
		}
		if k.kind == kindIPC {
			return &own{k.Base, k.Size, v.loc, path}, nil
		}
	} else {
		if k.kind == kindFabric && !v.inClique(k.clique) {
			k.kind, k.Driver = kindDescriptor, [64]byte{}
		}
		if k.kind == kindIPC && !v.gpu.d.IPC() || k.kind != kindIPC && !v.info.VMM {
			return nil, fmt.Errorf("cuda: this driver has no handles of other processes of kind %d: %w", k.kind,
				errors.ErrUnsupported)
		}
	}
	i, err := v.imports.take(owner, k.region)
	if err != nil {
		return nil, unreachable(err)
	}
	return &imported{i, path, func() { v.withdraw(owner, k.region) }}, nil
}

// inClique reports whether the GPU uses handles of a clique's fabric.
func (v *Device) inClique(clique [16]byte) bool {
	v.kinds.mu.Lock()
	defer v.kinds.mu.Unlock()
	return v.kinds.types&handleFabric != 0 && clique == v.kinds.clique
}

// errNotOwn says that a key of this process names no memory, or not any more.
var errNotOwn = fmt.Errorf("cuda: a key that names no memory of this process: %w", device.ErrMemory)

// reachOwn has streams reach memory of this process, or finds that an import can.
func (v *Device) reachOwn(k *key, path string) error {
	if err := v.open(); err != nil {
		return err
	}
	if k.kind == kindIPC {
		if path == peerAccess {
			return v.gpu.reach(k.name)
		}
		return nil
	}
	p := offers.find(k.token)
	switch {
	case p == nil || p.at != k.Base || p.size != k.Size:
		return errNotOwn
	case p.v.gpu.d != v.gpu.d:
		return fmt.Errorf("cuda: GPU %s is not open in this process by the same driver: %w", k.name,
			errors.ErrUnsupported)
	}
	return nil
}

// Forget implements device.Sharer: see ForgetIPC.
func (v *Device) Forget(owner uint64) { v.ForgetIPC(owner) }

// Lasts implements device.Sharer.
func (v *Device) Lasts(b []byte) bool {
	k, err := decode(b)
	if err != nil || v.open() != nil {
		return false
	}
	if k.kind != kindIPC {
		p := offers.find(k.token)
		return p != nil && p.v.gpu.same(v.gpu)
	}
	base, size, err := v.gpu.allocation(k.Base)
	if err != nil || base != k.Base || size != k.Size {
		return false
	}
	number, err := v.gpu.number(k.Base)
	return err == nil && number == k.Number
}

// Paths to memory. Which wires the access to another GPU takes is the driver's matter: package
// nvlink tells it.
const (
	sameGPU    = "same GPU"
	peerAccess = "peer access"
)

// unreachable has an error wrap errors.ErrUnsupported if it says that the driver gives one GPU no
// access to the memory of another.
func unreachable(err error) error {
	e, ok := errors.AsType[*Error](err)
	switch {
	case ok && e.Code == codePeerUnsupported:
		return fmt.Errorf("%w: %w", err, errors.ErrUnsupported)
	case ok && e.Call == "cuMemSetAccess" && e.Code == codeInvalidDevice: // which is said of the pair of GPUs
		return fmt.Errorf("%w: peer access is not supported: %w", err, errors.ErrUnsupported)
	}
	return err
}

// imported is an Import, and the way to it.
type imported struct {
	*Import
	path     string
	withdraw func()
}

func (i *imported) Path() string { return i.path }

func (i *imported) Release(gone bool) error {
	if gone {
		i.withdraw()
	}
	return i.Import.Release()
}

// other reports whether an allocation is one of another process.
func other(s device.Shared) bool {
	i, ok := s.(*imported)
	return ok && i.m.key.region.process != process
}

// own is an allocation of this process that has an IPC handle only.
type own struct {
	at, size uint64
	loc      mem.Location
	path     string
}

func (o *own) Memory(offset uint64, n int) (mem.Memory, error) {
	if n < 0 || offset > o.size || uint64(n) > o.size-offset {
		return mem.Memory{}, fmt.Errorf("cuda: %d bytes from %d on of an allocation of %d bytes: %w", n, offset, o.size,
			device.ErrMemory)
	}
	return mem.Device(o.at+offset, n, o.loc), nil
}

func (o *own) Path() string { return o.path }

func (o *own) Release(bool) error { return nil }
