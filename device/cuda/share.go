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

// A key of device.Sharer is, little-endian: format (1 byte) | length of the UUID (1) | process (8)
// | handle | UUID of the GPU. Without a UUID, the PCI address is in its place.
const (
	keyFormat = 1
	keyHeader = 10
)

// process tells this process from the others of the machine.
var process = ident.New()

// name returns what identifies the GPU in the machine.
func (i Info) name() string {
	if i.UUID != "" {
		return i.UUID
	}
	return i.PCI
}

// Share implements device.Sharer: see ExportIPC.
func (v *Device) Share(m mem.Memory) (key []byte, offset uint64, err error) {
	name := v.info.name()
	if name == "" {
		return nil, 0, fmt.Errorf("cuda: the driver tells neither the UUID nor the address of %s: %w", v.loc,
			errors.ErrUnsupported)
	}
	h, offset, err := v.ExportIPC(m)
	if err != nil {
		return nil, 0, err
	}
	key = append(make([]byte, 0, device.MaxKey), keyFormat, byte(len(name)))
	key = binary.LittleEndian.AppendUint64(key, process)
	if key, err = h.AppendBinary(key); err != nil {
		return nil, 0, err
	}
	return append(key, name...), offset, nil
}

// Import implements device.Sharer: see ImportIPC. Memory of this process is taken as it is.
func (v *Device) Import(owner uint64, key []byte) (device.Shared, error) {
	if len(key) < keyHeader+ipcBytes || key[0] != keyFormat || len(key) != keyHeader+ipcBytes+int(key[1]) {
		return nil, fmt.Errorf("cuda: a key of %d bytes that this version does not know: %w", len(key),
			device.ErrMemory)
	}
	var h IPCHandle
	if err := h.UnmarshalBinary(key[keyHeader : keyHeader+ipcBytes]); err != nil {
		return nil, err
	}
	name, path := string(key[keyHeader+ipcBytes:]), sameGPU
	if name != v.info.name() {
		path = peerAccess
	}
	if binary.LittleEndian.Uint64(key[2:]) == process {
		if path == peerAccess {
			if err := v.gpu.reach(name); err != nil {
				return nil, unreachable(err)
			}
		}
		if err := v.open(); err != nil {
			return nil, err
		}
		return &own{h.Base, h.Size, v.loc, path}, nil
	}
	i, err := v.ImportIPC(owner, h)
	if err != nil {
		return nil, unreachable(err)
	}
	return &imported{i, path, func() error { return v.WithdrawIPC(owner, h) }}, nil
}

// Forget implements device.Sharer: see ForgetIPC.
func (v *Device) Forget(owner uint64) error { return v.ForgetIPC(owner) }

// Lasts implements device.Sharer.
func (v *Device) Lasts(key []byte) bool {
	var h IPCHandle
	if len(key) < keyHeader+ipcBytes || h.UnmarshalBinary(key[keyHeader:keyHeader+ipcBytes]) != nil || v.open() != nil {
		return false
	}
	base, size, err := v.gpu.allocation(h.Base)
	if err != nil || base != h.Base || size != h.Size {
		return false
	}
	number, err := v.gpu.number(h.Base)
	return err == nil && number == h.Number
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
	if e, ok := errors.AsType[*Error](err); ok && e.Code == codePeerUnsupported {
		return fmt.Errorf("%w: %w", err, errors.ErrUnsupported)
	}
	return err
}

// imported is an Import, and the way to it.
type imported struct {
	*Import
	path  string
	unmap func() error
}

func (i *imported) Path() string { return i.path }

func (i *imported) Release(gone bool) error {
	if gone {
		return errors.Join(i.unmap(), i.Import.Release())
	}
	return i.Import.Release()
}

// own is an allocation of this process.
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
