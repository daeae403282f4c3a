package rdma

import (
	"errors"
	"fmt"
	"syscall"
	"unsafe"

	"tutti/mem"
)

// Exporter makes DMA buffers of a device's memory: see device.Exporter.
type Exporter interface {
	Export(m mem.Memory) (fd int, offset uint64, err error)
}

// Address returns the address of the first byte of memory, for requests with a key of Register.
func Address(m mem.Memory) uint64 {
	if m.Loc().Host() {
		return uint64(uintptr(unsafe.Pointer(unsafe.SliceData(m.Bytes()))))
	}
	return m.Address()
}

// Register registers memory wherever it is. Memory that is not of the host needs the Exporter of
// its device; nil: there is none. An error wraps errors.ErrUnsupported if one of the two devices
// cannot do that.
func Register(d Device, m mem.Memory, e Exporter, access Access) (MR, error) {
	if m.Loc().Host() {
		return d.Register(m, access)
	}
	if e == nil {
		return nil, fmt.Errorf("register memory at %s, which is not exported, with %s: %w", m.Loc(), d.Name(),
			errors.ErrUnsupported)
	}
	fd, offset, err := e.Export(m)
	if err != nil {
		return nil, fmt.Errorf("register memory at %s with %s: %w", m.Loc(), d.Name(), err)
	}
	r, err := d.RegisterDMABuf(fd, offset, uint64(m.Len()), m.Address(), access)
	if cerr := syscall.Close(fd); err == nil && cerr != nil {
		return nil, errors.Join(fmt.Errorf("close a DMA buffer of memory at %s: %w", m.Loc(), cerr), r.Close())
	}
	return r, err
}
