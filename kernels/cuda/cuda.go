package cuda

import (
	"bytes"
	"compress/gzip"
	_ "embed"
	"encoding/binary"
	"fmt"
	"slices"
	"sync"
)

// A Launch is one launch of a kernel of a [Module]. A driver's launch takes it as it is.
type Launch struct {
	Function string // the name of the kernel
	Grid     uint32 // blocks
	Block    uint32 // threads of a block
	Shared   uint32 // bytes of dynamic shared memory
	Params   []byte // the struct that is the kernel's only parameter
}

//go:generate go run ./internal/gen

var (
	//go:embed ptx/sm_70.ptx.gz
	ptx70 []byte
	//go:embed ptx/sm_90.ptx.gz
	ptx90 []byte
)

// The modules, unpacked when they are first needed. A process opens several devices, or a device
// several times.
var (
	module70 = sync.OnceValues(func() ([]byte, error) { return unpack(ptx70) })
	module90 = sync.OnceValues(func() ([]byte, error) { return unpack(ptx90) })
)

// Module returns all kernels as PTX, for a device of the compute capability major.minor. The driver
// compiles it for the device. The caller must not change it. An error says that the device is too
// old.
func Module(major, minor int) (ptx []byte, err error) {
	switch {
	case major < 7:
		return nil, fmt.Errorf("kernels/cuda: a device of compute capability %d.%d: the kernels need 7.0 or more",
			major, minor)
	case major < 9:
		return module70()
	}
	return module90()
}

// unpack returns an embedded module.
func unpack(packed []byte) ([]byte, error) {
	r, err := gzip.NewReader(bytes.NewReader(packed))
	if err != nil {
		return nil, fmt.Errorf("kernels/cuda: the embedded PTX: %w", err)
	}
	size := binary.LittleEndian.Uint32(packed[len(packed)-4:]) // as gzip ends
	b := bytes.NewBuffer(make([]byte, 0, int(size)+bytes.MinRead))
	if _, err := b.ReadFrom(r); err != nil {
		return nil, fmt.Errorf("kernels/cuda: the embedded PTX: %w", err)
	}
	return b.Bytes(), nil
}

// Functions returns the names of all kernels of a module, sorted.
func Functions() []string {
	names := []string{copies, copies + placed, copies + packets, copies + byBytes + packets, "tutti_tell", "tutti_wait",
		"tutti_write"}
	for _, k := range reductions() {
		names = append(names, k, k+many, k+placed, k+packets)
	}
	slices.Sort(names)
	return names
}
