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

// Register registers memory wherever it is, and returns the address of its first byte for requests.
// Memory that is not of the host needs the Exporter of its device; nil: there is none. An error
// wraps errors.ErrUnsupported if one of the two devices cannot do that.
func Register(d Device, m mem.Memory, e Exporter, access Access) (r MR, address uint64, err error) {
	if m.Loc().Host() {
		r, err = d.Register(m, access)
		return r, uint64(uintptr(unsafe.Pointer(unsafe.SliceData(m.Bytes())))), err
	}
	if e == nil {
		return nil, 0, fmt.Errorf("register memory at %s, which is not exported, with %s: %w", m.Loc(), d.Name(),
			errors.ErrUnsupported)
	}
	fd, offset, err := e.Export(m)
	if err != nil {
		return nil, 0, fmt.Errorf("register memory at %s with %s: %w", m.Loc(), d.Name(), err)
	}
	r, err = d.RegisterDMABuf(fd, offset, uint64(m.Len()), m.Address(), access)
	if cerr := syscall.Close(fd); err == nil && cerr != nil {
		return nil, 0, errors.Join(fmt.Errorf("close a DMA buffer of memory at %s: %w", m.Loc(), cerr), r.Close())
	}
	return r, m.Address(), err
}
