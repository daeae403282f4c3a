//go:build cgo && linux

package cuda

/*
#cgo LDFLAGS: -ldl
#include "driver.h"
#include <stdlib.h>
*/
import "C"

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"sync"
	"unsafe"

	"tutti/device"
)

// Driver is the CUDA driver. Its methods may be called by any goroutine.
type Driver struct {
	lib     *C.tutti_cuda
	version int // 1000*major + 10*minor

	mu   sync.Mutex
	gpus []*gpu                       // of the Devices that are open
	left map[C.int][]func(*gpu) error // what unmaps memory, by device: see gpu.after
}

// library is what Load opens.
const library = "libcuda.so.1"

var load = sync.OnceValues(func() (*Driver, error) { return LoadLibrary(library) })

// loaded reports whether the process has initialized the driver that Load opens.
func loaded() bool {
	name := C.CString(library)
	defer C.free(unsafe.Pointer(name))
	return C.tutti_cuda_loaded(name) != 0
}

// active returns the GPUs whose primary contexts the process has.
func (d *Driver) active() (ordinals []int, err error) {
	n, err := d.count()
	if err != nil {
		return nil, err
	}
	for i := range n {
		var device, active C.int
		if r := C.tutti_cuda_device(d.lib, C.int(i), &device); r != 0 {
			return nil, d.failure(r, "cuDeviceGet", "find cuda:%d", i)
		}
		if r := C.tutti_cuda_active(d.lib, device, &active); r != 0 {
			return nil, d.failure(r, "cuDevicePrimaryCtxGetState", "ask whether cuda:%d is in use", i)
		}
		if active != 0 {
			ordinals = append(ordinals, i)
		}
	}
	return ordinals, nil
}

// Load opens the CUDA driver, once in a process. Its error wraps ErrUnavailable and says what is
// missing. A driver without GPUs is no error.
func Load() (*Driver, error) { return load() }

// LoadLibrary is Load with another library: tests use a fake one.
func LoadLibrary(path string) (*Driver, error) {
	name := C.CString(path)
	defer C.free(unsafe.Pointer(name))
	d := &Driver{}
	var why [512]C.char
	if C.tutti_cuda_open(name, &d.lib, &why[0], C.size_t(len(why))) != 0 {
		return nil, fmt.Errorf("%w: %s", ErrUnavailable, C.GoString(&why[0]))
	}
	if r := C.tutti_cuda_init(d.lib); r != 0 && r != C.TUTTI_CUDA_NO_DEVICE {
		return nil, fmt.Errorf("%w: %w", ErrUnavailable, d.failure(r, "cuInit", "open the driver"))
	}
	var v C.int
	if r := C.tutti_cuda_version(d.lib, &v); r != 0 {
		return nil, fmt.Errorf("%w: %w", ErrUnavailable, d.failure(r, "cuDriverGetVersion", "ask for its version"))
	}
	d.version = int(v)
	return d, nil
}

// Version returns the newest version of CUDA that the driver supports.
func (d *Driver) Version() (major, minor int) { return d.version / 1000, d.version % 1000 / 10 }

// failure returns the error of a call, nil if there is none.
func (d *Driver) failure(r C.int, call, format string, args ...any) error {
	if r == 0 {
		return nil
	}
	e := &Error{Doing: fmt.Sprintf(format, args...), Call: call, Code: int(r), Name: "an error without a name",
		Text: "this driver has no text for it"}
	if s := C.tutti_cuda_error_name(d.lib, r); s != nil {
		e.Name = C.GoString(s)
	}
	if s := C.tutti_cuda_error_text(d.lib, r); s != nil {
		e.Text = C.GoString(s)
	}
	return e
}

// count returns how many GPUs this process may use.
func (d *Driver) count() (int, error) {
	var n C.int
	switch r := C.tutti_cuda_count(d.lib, &n); r {
	case 0:
		return int(n), nil
	case C.TUTTI_CUDA_NO_DEVICE, C.TUTTI_CUDA_NOT_INITIALIZED: // cuInit has found none
		return 0, nil
	default:
		return 0, d.failure(r, "cuDeviceGetCount", "count the GPUs")
	}
}

// Devices describes the GPUs that this process may use. It makes no context.
func (d *Driver) Devices() ([]Info, error) {
	n, err := d.count()
	if err != nil {
		return nil, err
	}
	all := make([]Info, 0, n)
	for i := range n {
		info, _, err := d.info(i)
		if err != nil {
			return nil, err
		}
		all = append(all, info)
	}
	return all, nil
}

// Attributes, CUdevice_attribute.
const (
	attributeSMs       = 16
	attributeMajor     = 75
	attributeMinor     = 76
	attributeVMM       = 102
	attributeFile      = 103 // memory has descriptors as handles
	attributeRDMA      = 110 // and other devices can be given access to it
	attributeFlush     = 117 // how writes of other devices are flushed: 1 is by a call of the host
	attributeOrdering  = 118 // of these writes: 100 or more, the GPU sees them in any case
	attributeMemoryOps = 122 // of 64 bits, second version
	attributeDMABuf    = 124
	attributeFabric    = 128 // memory has handles of the fabric
)

func (d *Driver) info(ordinal int) (Info, C.int, error) {
	i := Info{Ordinal: ordinal}
	var device C.int
	if r := C.tutti_cuda_device(d.lib, C.int(ordinal), &device); r != 0 {
		return i, 0, d.failure(r, "cuDeviceGet", "find cuda:%d", ordinal)
	}
	var name [C.TUTTI_CUDA_NAME]C.char
	if r := C.tutti_cuda_name(d.lib, device, &name[0]); r != 0 {
		return i, 0, d.failure(r, "cuDeviceGetName", "ask cuda:%d for its name", ordinal)
	}
	i.Name = C.GoString(&name[0])
	var total C.uint64_t
	if r := C.tutti_cuda_memory(d.lib, device, &total); r != 0 {
		return i, 0, d.failure(r, "cuDeviceTotalMem", "ask cuda:%d for its memory", ordinal)
	}
	i.Memory = uint64(total)
	var u [C.TUTTI_CUDA_UUID]C.uchar // drivers need not tell this, nor the address
	if C.tutti_cuda_uuid(d.lib, device, &u[0]) == 0 {
		b := C.GoBytes(unsafe.Pointer(&u[0]), C.int(len(u)))
		i.UUID = fmt.Sprintf("%x-%x-%x-%x-%x", b[:4], b[4:6], b[6:8], b[8:10], b[10:])
	}
	var pci [C.TUTTI_CUDA_PCI]C.char
	if C.tutti_cuda_pci(d.lib, device, &pci[0]) == 0 {
		i.PCI = strings.ToLower(C.GoString(&pci[0]))
	}
	var vmm, file, rdma, flush, ordering, ops, dmaBuf, fabric int
	for _, a := range []struct {
		number C.int
		to     *int
	}{{attributeSMs, &i.SMs}, {attributeMajor, &i.Major}, {attributeMinor, &i.Minor}, {attributeVMM, &vmm},
		{attributeFile, &file}, {attributeRDMA, &rdma}, {attributeFlush, &flush}, {attributeOrdering, &ordering},
		{attributeMemoryOps, &ops}, {attributeDMABuf, &dmaBuf}, {attributeFabric, &fabric}} {
		var v C.int
		r := C.tutti_cuda_attribute(d.lib, device, a.number, &v)
		if r != 0 && a.number < attributeVMM { // older drivers do not know the others
			return i, 0, d.failure(r, "cuDeviceGetAttribute", "ask cuda:%d for attribute %d", ordinal, int(a.number))
		}
		*a.to = int(v)
	}
	i.VMM = vmm != 0 && file != 0 && C.tutti_cuda_has_physical(d.lib) != 0
	i.Fabric, i.rdma = i.VMM && fabric != 0, rdma != 0
	i.MemoryOps = ops != 0 && C.tutti_cuda_has_memory_operations(d.lib) != 0
	i.Ordered = ordering >= 100
	i.DMABuf = dmaBuf != 0 && C.tutti_cuda_has_export(d.lib) != 0 &&
		(i.Ordered || flush&1 != 0 && C.tutti_cuda_has_flush(d.lib) != 0)
	return i, device, nil
}

// A gpu is a GPU with its primary context, and the calls that need it. Pointers of Go are passed to
// none that keeps them.
type gpu struct {
	d      *Driver
	ptr    unsafe.Pointer
	device C.int
	name   string // "cuda:0", for errors
	known  string // Info.name, for reach
}

// Handles of the driver.
type (
	module   = unsafe.Pointer
	function = unsafe.Pointer
	queue    = C.uintptr_t    // CUstream
	marker   = unsafe.Pointer // CUevent
)

// retain takes a reference to the primary context, which release gives back. reach finds the GPU
// by its name until then.
func (d *Driver) retain(device C.int, ordinal int, known string) (*gpu, error) {
	g := &gpu{d: d, device: device, name: fmt.Sprintf("cuda:%d", ordinal), known: known}
	if r := C.tutti_cuda_retain(d.lib, device, &g.ptr); r != 0 {
		return nil, d.failure(r, "cuDevicePrimaryCtxRetain", "use the primary context of %s", g.name)
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.gpus = append(d.gpus, g)
	return g, nil
}

// reach has work on g access the memory of the process on the GPU with a name, which is open.
func (g *gpu) reach(name string) error {
	g.d.mu.Lock()
	i := slices.IndexFunc(g.d.gpus, func(o *gpu) bool { return o.known == name })
	if i < 0 {
		g.d.mu.Unlock()
		return fmt.Errorf("cuda: GPU %s is not open in this process: %w", name, errors.ErrUnsupported)
	}
	peer := g.d.gpus[i].device
	g.d.mu.Unlock()
	var context unsafe.Pointer // retained, because the GPU may be closed meanwhile
	if r := C.tutti_cuda_retain(g.d.lib, peer, &context); r != 0 {
		return g.d.failure(r, "cuDevicePrimaryCtxRetain", "use the primary context of GPU %s", name)
	}
	err := g.d.failure(C.tutti_cuda_enable_peer(g.d.lib, g.ptr, context), "cuCtxEnablePeerAccess",
		"give %s access to the memory of GPU %s", g.name, name)
	return first([]error{err, g.d.failure(C.tutti_cuda_release(g.d.lib, peer), "cuDevicePrimaryCtxRelease",
		"give the primary context of GPU %s back", name)})
}

func (g *gpu) release() error {
	g.d.mu.Lock()
	g.d.gpus = slices.DeleteFunc(g.d.gpus, func(o *gpu) bool { return o == g })
	g.d.mu.Unlock()
	return g.d.failure(C.tutti_cuda_release(g.d.lib, g.device), "cuDevicePrimaryCtxRelease",
		"give the primary context of %s back", g.name)
}

// loadModule loads PTX, which the driver's compiler translates.
func (g *gpu) loadModule(ptx []byte) (m module, err error) {
	image := bytes.Clone(ptx)
	image = append(image, 0)
	log := make([]C.char, C.TUTTI_CUDA_LOG)
	r := C.tutti_cuda_module_load(g.d.lib, g.ptr, (*C.char)(unsafe.Pointer(&image[0])), &m, &log[0])
	if r == 0 {
		return m, nil
	}
	err = g.d.failure(r, "cuModuleLoadDataEx", "load the kernels onto %s", g.name)
	log[len(log)-1] = 0
	err.(*Error).Log = C.GoString(&log[0])
	return nil, err
}

func (g *gpu) unloadModule(m module) error {
	return g.d.failure(C.tutti_cuda_module_unload(g.d.lib, g.ptr, m), "cuModuleUnload", "unload the kernels of %s",
		g.name)
}

func (g *gpu) function(m module, name string) (f function, err error) {
	s := C.CString(name)
	defer C.free(unsafe.Pointer(s))
	r := C.tutti_cuda_function(g.d.lib, g.ptr, m, s, &f)
	return f, g.d.failure(r, "cuModuleGetFunction", "find the kernel %s of %s", name, g.name)
}

func (g *gpu) loadFunction(f function, name string) error {
	return g.d.failure(C.tutti_cuda_function_load(g.d.lib, g.ptr, f), "cuFuncLoad", "load the kernel %s onto %s", name,
		g.name)
}

func (g *gpu) alloc(n uint64) (uint64, error) {
	var at C.uint64_t
	r := C.tutti_cuda_alloc(g.d.lib, g.ptr, C.size_t(n), &at)
	return uint64(at), g.d.failure(r, "cuMemAlloc", "allocate %d bytes on %s", n, g.name)
}

func (g *gpu) free(at uint64) error {
	return g.d.failure(C.tutti_cuda_free(g.d.lib, g.ptr, C.uint64_t(at)), "cuMemFree", "free memory of %s", g.name)
}

// export returns a DMA buffer that has the byte at an address, and where.
func (g *gpu) export(at uint64) (fd int, offset uint64, err error) {
	var f C.int
	var o C.uint64_t
	r := C.tutti_cuda_export(g.d.lib, g.ptr, C.uint64_t(at), C.uint64_t(os.Getpagesize()), &f, &o)
	if r != 0 {
		return -1, 0, g.d.failure(r, "cuMemGetHandleForAddressRange", "export memory of %s as a DMA buffer", g.name)
	}
	return int(f), uint64(o), nil
}

func (g *gpu) flush() error {
	return g.d.failure(C.tutti_cuda_flush(g.d.lib, g.ptr), "cuFlushGPUDirectRDMAWrites",
		"flush what other devices have written to %s", g.name)
}

// allocation returns the allocation that has the byte at an address.
func (g *gpu) allocation(at uint64) (base, size uint64, err error) {
	var b, n C.uint64_t
	r := C.tutti_cuda_allocation(g.d.lib, g.ptr, C.uint64_t(at), &b, &n)
	return uint64(b), uint64(n), g.d.failure(r, "cuMemGetAddressRange", "find an allocation on %s", g.name)
}

// shared describes the allocation that has the byte at an address for other processes.
func (g *gpu) shared(at uint64) (h IPCHandle, err error) {
	if h.Base, h.Size, err = g.allocation(at); err != nil {
		return h, err
	}
	if h.Base%ipcBlock != 0 || h.Size < ipcBlock {
		return h, fmt.Errorf("cuda: an allocation of %d bytes at %#x on %s may be in a block with others, which its "+
			"IPC handle would share: allocate %d bytes or more: %w", h.Size, h.Base, g.name, ipcBlock,
			errors.ErrUnsupported)
	}
	if h.Number, err = g.number(at); err != nil {
		return h, err
	}
	r := C.tutti_cuda_ipc_get(g.d.lib, g.ptr, C.uint64_t(h.Base), (*C.struct_tutti_cuda_ipc)(unsafe.Pointer(&h.Driver)))
	return h, g.d.failure(r, "cuIpcGetMemHandle", "share memory of %s with other processes", g.name)
}

// number returns the driver's number of the allocation that has the byte at an address.
func (g *gpu) number(at uint64) (uint64, error) {
	var id C.uint64_t
	r := C.tutti_cuda_allocation_number(g.d.lib, g.ptr, C.uint64_t(at), &id)
	return uint64(id), g.d.failure(r, "cuPointerGetAttribute", "ask for the number of an allocation on %s", g.name)
}

// openShared maps an allocation of another process.
func (g *gpu) openShared(h IPCHandle) (at uint64, err error) {
	var a C.uint64_t
	r := C.tutti_cuda_ipc_open(g.d.lib, g.ptr, (*C.struct_tutti_cuda_ipc)(unsafe.Pointer(&h.Driver)), &a)
	err = g.d.failure(r, "cuIpcOpenMemHandle", "map memory of another process for %s", g.name)
	if r == codeAlreadyMapped { // other memory is mapped that was there, and will be unmapped
		err = fmt.Errorf("%w: %w", err, device.ErrLater)
	}
	return uint64(a), err
}

func (g *gpu) closeShared(at uint64) error {
	return g.d.failure(C.tutti_cuda_ipc_close(g.d.lib, g.ptr, C.uint64_t(at)), "cuIpcCloseMemHandle",
		"unmap memory of another process on %s", g.name)
}

// IPC reports whether the driver has handles by which other processes map memory.
func (d *Driver) IPC() bool { return C.tutti_cuda_has_ipc(d.lib) != 0 }

// allocHost returns pinned memory, which is not Go's, and its address on the device.
func (g *gpu) allocHost(n int) (p unsafe.Pointer, device uint64, err error) {
	if r := C.tutti_cuda_alloc_host(g.d.lib, g.ptr, C.size_t(n), &p); r != 0 {
		return nil, 0, g.d.failure(r, "cuMemHostAlloc", "allocate %d bytes of pinned memory for %s", n, g.name)
	}
	var at C.uint64_t
	if r := C.tutti_cuda_host_address(g.d.lib, g.ptr, p, &at); r != 0 {
		C.tutti_cuda_free_host(g.d.lib, g.ptr, p)
		return nil, 0, g.d.failure(r, "cuMemHostGetDevicePointer", "find the address of pinned memory on %s", g.name)
	}
	return p, uint64(at), nil
}

func (g *gpu) freeHost(p unsafe.Pointer) error {
	return g.d.failure(C.tutti_cuda_free_host(g.d.lib, g.ptr, p), "cuMemFreeHost", "free pinned memory of %s", g.name)
}

func (g *gpu) newQueue() (q queue, err error) {
	r := C.tutti_cuda_stream_create(g.d.lib, g.ptr, &q)
	return q, g.d.failure(r, "cuStreamCreate", "make a stream on %s", g.name)
}

func (g *gpu) destroyQueue(q queue) error {
	return g.d.failure(C.tutti_cuda_stream_destroy(g.d.lib, g.ptr, q), "cuStreamDestroy", "close a stream on %s",
		g.name)
}

// capturing reports whether the driver refuses a call because the program captures a stream. It
// says nothing about the work then, and is asked again later.
func capturing(r C.int) bool {
	return r == codeCaptureUnsupported || r == codeCaptureInvalidated || r == codeCaptureImplicit
}

// idle reports whether all work of a queue has ended, or nothing more can be known about it. An
// error with false says that the driver does not tell now: see capturing.
func (g *gpu) idle(q queue) (bool, error) {
	r := C.tutti_cuda_stream_query(g.d.lib, g.ptr, q)
	if r == C.TUTTI_CUDA_NOT_READY {
		return false, nil
	}
	return !capturing(r), g.d.failure(r, "cuStreamQuery", "wait for the work of a stream on %s", g.name)
}

// captured reports whether the work of a queue goes into a graph. Drivers without the question
// capture nothing.
func (g *gpu) captured(q queue) (bool, error) {
	var status C.int
	if r := C.tutti_cuda_stream_captured(g.d.lib, g.ptr, q, &status); r != 0 {
		return false, g.d.failure(r, "cuStreamIsCapturing", "use a stream of the caller on %s", g.name)
	}
	return status != 0, nil
}

func (g *gpu) newMarker() (m marker, err error) {
	r := C.tutti_cuda_event_create(g.d.lib, g.ptr, &m)
	return m, g.d.failure(r, "cuEventCreate", "make an event on %s", g.name)
}

func (g *gpu) destroyMarker(m marker) error {
	return g.d.failure(C.tutti_cuda_event_destroy(g.d.lib, g.ptr, m), "cuEventDestroy", "free an event on %s", g.name)
}

func (g *gpu) record(m marker, q queue) error {
	r := C.tutti_cuda_event_record(g.d.lib, g.ptr, m, q)
	if r == 0 {
		return nil
	}
	return g.d.failure(r, "cuEventRecord", "record an event on %s", g.name)
}

// reached reports whether a marker was reached.
func (g *gpu) reached(m marker) (bool, error) {
	r := C.tutti_cuda_event_query(g.d.lib, g.ptr, m)
	if r == 0 || r == C.TUTTI_CUDA_NOT_READY || capturing(r) {
		return r == 0, nil
	}
	return false, g.d.failure(r, "cuEventQuery", "do the work of a stream on %s", g.name)
}

func (g *gpu) copy(q queue, dst, src uint64, n int) error {
	r := C.tutti_cuda_copy(g.d.lib, g.ptr, q, C.uint64_t(dst), C.uint64_t(src), C.size_t(n))
	if r == 0 {
		return nil
	}
	return g.d.failure(r, "cuMemcpyAsync", "copy %d bytes on %s", n, g.name)
}

func (g *gpu) wait(q queue, word, v uint64) error {
	r := C.tutti_cuda_wait(g.d.lib, g.ptr, q, C.uint64_t(word), C.uint64_t(v))
	if r == 0 {
		return nil
	}
	return g.d.failure(r, "cuStreamWaitValue64", "wait for a word on %s", g.name)
}

func (g *gpu) write(q queue, word, v uint64) error {
	r := C.tutti_cuda_write(g.d.lib, g.ptr, q, C.uint64_t(word), C.uint64_t(v))
	if r == 0 {
		return nil
	}
	return g.d.failure(r, "cuStreamWriteValue64", "write a word on %s", g.name)
}

// launch launches a kernel, whose one parameter is copied.
func (g *gpu) launch(q queue, f function, name string, grid, block, shared uint32, params []byte) error {
	r := C.tutti_cuda_launch(g.d.lib, g.ptr, q, f, C.uint(grid), C.uint(block), C.uint(shared),
		unsafe.Pointer(unsafe.SliceData(params)))
	if r == 0 {
		return nil
	}
	return g.d.failure(r, "cuLaunchKernel", "launch %s on %s", name, g.name)
}
