// Package cuda has the GPUs of this machine as devices of package device.
//
// The CUDA driver is opened at run time (libcuda.so.1): a program that links this package also
// starts on a machine without it. [Load] says what is missing. Without cgo, or on another system
// than Linux, it is always an error. Neither the CUDA toolkit nor its headers are needed, to build
// or to run.
//
//	driver, err := cuda.Load()
//	if err != nil {
//		return err // wraps ErrUnavailable
//	}
//	d, err := driver.Open(0)
//	if err != nil {
//		return err
//	}
//	defer d.Close()
//
// A device works in the primary context of its GPU, which PyTorch and the CUDA runtime use as well:
// addresses of the one are valid for the other. Every call makes the context current for as long as
// it takes, and the thread's former one again afterwards.
//
// # Kernels
//
// [Driver.Open] loads all kernels of package kernels/cuda onto the GPU before it returns. The
// driver otherwise loads a kernel when it is launched first, and that waits for all kernels that
// run, while copies on other streams wait for the load. A kernel that waits for such a copy would
// never end.
//
// # Words
//
// A GPU waits for words of pinned memory alone: those of device.Words, or of AllocHost of the same
// device. Streams wait and write by stream memory operations, during which no kernel is resident.
// On GPUs without them kernels of one thread do the same. Values are below 1<<63, because the
// hardware compares differences.
//
// A GPU has a number of queues that streams share (8, or as CUDA_DEVICE_MAX_CONNECTIONS says). Work
// behind a word in one stream may hold up another stream of the same queue, also its Close. Streams
// that wait for each other's words, without the host between them, must not be more than there are
// queues.
//
// # Many operations
//
// A stream takes any number of operations without waiting. The driver is given 512 of them at a
// time, because its calls wait when it has many more. The others follow when the stream has come
// further and a method of it, or of one of its events, is called.
//
// # Places
//
// A [Device] is a device.Reserver: a stream gets places for work that the host chooses later, such
// as a copy from memory of another rank that the host does not know yet. The stream waits in each
// for a word, and no kernel is resident. The memory of places is used again when a stream has
// passed them, and freed with the device.
//
// # Copies
//
// A copy between device memory, and from or to pinned memory of the same device, is one call of the
// driver. Other host memory is copied by a goroutine of the stream, through two pinned buffers,
// when the stream has come to the copy: the driver itself would make the caller wait for the
// stream.
//
// # Other devices
//
// A [Device] is a device.Exporter: network cards access its memory by DMA buffers, if the driver
// has them (CUDA 11.7, the open kernel modules and Linux 5.12) and the GPU can order what is
// written so. A buffer has whole pages, and those of the whole allocation: code that registers it
// with a card names the bytes. Work sees what a card has written if it begins after the card's
// completion was polled and, on GPUs without Info.Ordered, Flush was called.
//
// # Other processes
//
// [Device.Share] returns a key of an allocation, and [Device.Import] maps it in another process of
// the machine, for which it is memory of that process's device. A device maps an allocation once,
// until its last use is released: work on memory that is not mapped would end the context. Every
// import names its owner, the incarnation of a peer: after [Device.Forget], nothing of it is used
// again. An IPC handle fails with device.ErrLater while memory that was at its place is mapped,
// because the driver may return the old mapping.
//
// Keys are of three kinds. Memory that [Device.Alloc] has given has a descriptor, if the driver can
// do that (in terms of CUDA, virtual memory management: cuMemCreate and cuMemMap). The importing
// process asks the owner's for it by an Unix socket, so that both have to be in one network
// namespace and of one user. Such memory lives until nobody has it mapped, nor has
// imported it in this process: what Free has freed may count as used for a while. It also
// has a handle of the fabric of NVSwitches if the GPU was opened by [Driver.OpenIn], which a GPU of
// the same clique uses. All other memory, that of the program included, has IPC handles, which
// [Device.ExportIPC], [Device.ImportIPC], [Device.ForgetIPC] and [Device.WithdrawIPC] give alone.
// The driver takes allocations of less than 2 MiB from blocks with others, and a handle is one of
// the block: such memory of the program is not shared.
// CUDA does not define what work on it does after its owner has freed it, and such work of the same
// process ends the context: free it only when no stream of another rank may load from it any more.
//
// # Failures and the end
//
// The first error of a stream is kept: all later calls and all events that had not been reached
// return it. It wraps an [*Error], which has the driver's name of it. Some errors end the context,
// and so every stream of the process on this GPU; the driver's text says so.
//
// No stream of this package waits for ever: Close stores the values that a stream waits for to
// their words, so that the GPU passes them. Work behind such a word is then done, with whatever the
// memory holds, before Close returns; its events fail with device.ErrClosed. Afterwards nothing of
// the stream touches memory, and the context is as usable as before. A call of an exchange that
// waits for other ranks holds up Close until it is stopped, or its limit is over; [Device.Close]
// stops it.
//
// Nothing is freed by itself. Free, and releasing what was imported by an IPC handle, may wait
// until all work on the GPU has ended, as the driver does: do not call them while a stream waits
// for something that the caller is to do. FreeHost does not wait, and keeps the memory for later
// blocks of the same size. [Device.Close] closes what is left.
//
// Do not free memory of Alloc that has a descriptor while the program captures a stream of the GPU:
// the driver refuses to wait, and the capture fails. Such memory is unmapped by the next Free of
// memory with a descriptor, or by Close. The memory of an exchange, and what was imported by a
// descriptor, is unmapped without waiting, because its user says that no work uses it.
package cuda

import (
	"errors"
	"fmt"
)

// ErrUnavailable says that there is no CUDA driver, or that it cannot be used. It is wrapped.
var ErrUnavailable = errors.New("CUDA cannot be used")

// An Error is a call of the CUDA driver that failed.
type Error struct {
	Doing string // what was attempted: "allocate 4096 bytes on cuda:0"
	Call  string // the driver's function: "cuMemAlloc"
	Code  int    // CUresult
	Name  string // of the code: "CUDA_ERROR_OUT_OF_MEMORY"
	Text  string // the driver's explanation: "out of memory"
	Log   string // what the driver's compiler wrote, for kernels that it refuses
}

// Error says all of it.
func (e *Error) Error() string {
	s := fmt.Sprintf("cuda: %s: %s: %s (%d): %s", e.Doing, e.Call, e.Name, e.Code, e.Text)
	if a := e.advice(); a != "" {
		s += "; " + a
	}
	if e.Log != "" {
		s += ": " + e.Log
	}
	return s
}

// advice returns what to do about the error, "" if nothing is known.
func (e *Error) advice() string {
	switch e.Code {
	case 2: // OUT_OF_MEMORY
		return "free some, or let other processes on the GPU use less"
	case 100: // NO_DEVICE
		return "give the container a GPU, or look at CUDA_VISIBLE_DEVICES"
	case 101: // INVALID_DEVICE
		return "choose one of those that tutti doctor lists"
	case 46, 3: // DEVICE_UNAVAILABLE, NOT_INITIALIZED
		return "another process uses the GPU exclusively, or the driver is being unloaded: look at nvidia-smi"
	case 222: // UNSUPPORTED_PTX_VERSION
		return "install a newer driver"
	case 803, 804: // SYSTEM_DRIVER_MISMATCH, COMPAT_NOT_SUPPORTED_ON_DEVICE
		return "install libcuda of the version that the kernel's module has"
	case 900, 901, 906: // STREAM_CAPTURE_UNSUPPORTED, STREAM_CAPTURE_INVALIDATED, STREAM_CAPTURE_IMPLICIT
		return "end the capture of the program's stream first"
	case 908: // STREAM_CAPTURE_WRONG_THREAD
		return "end the capture on the thread that has begun it, or begin it in the relaxed mode"
	case 999: // UNKNOWN
		return "look at dmesg; after a suspend, reload nvidia_uvm"
	case 214, 700, 702, 709, 710, 714, 715, 716, 717, 718, 719: // ends the context
		return "the process cannot use this GPU any more: end it"
	}
	return ""
}

// Info describes a GPU.
type Info struct {
	Ordinal      int    // the driver's number, which CUDA_VISIBLE_DEVICES rearranges
	Name         string // "NVIDIA H200"
	UUID         string // of the GPU, or of its instance (MIG), without a prefix; "" if it is not known
	PCI          string // address, "0000:3b:00.0"; "" if it is not known
	Memory       uint64 // bytes
	Major, Minor int    // compute capability
	SMs          int    // multiprocessors
	MemoryOps    bool   // streams can wait for words without a kernel
	DMABuf       bool   // other devices can access its memory: see Device.Export
	Ordered      bool   // what they write there needs no Flush
	VMM          bool   // memory has descriptors for other processes: see Device.Alloc
	Fabric       bool   // and handles of the fabric of NVSwitches
	rdma         bool   // such memory can be given to other devices
}
