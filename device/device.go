// Package device defines devices and their streams.
//
// A [Device] has memory and makes streams. A [Stream] executes work asynchronously, in order: calls
// return at once, and the memory of the work belongs to the stream until an [Event] that was
// recorded afterwards is done. Streams and the host synchronize by words of host memory: a stream
// waits until a word has a value ([Stream.WaitValue]), and writes one when all earlier work is done
// ([Stream.WriteValue]).
//
//	s, err := d.Stream()
//	words, free, err := device.Words(d, 2)   // arrived, reduced
//	s.WaitValue(words[0], 1)                 // the network has filled b
//	s.Reduce(kernels.Sum, kernels.Float32, a, []mem.Memory{a, b}, 0)
//	s.WriteValue(words[1], 1)                // the network may send a
//
// The host is a device too ([NewHost]): its streams do their work in the call if they can. Package
// device/executor runs the plans of package collectives on streams, device/devicetest tests
// devices. In terms of CUDA, a Stream is a cudaStream_t, an Event a cudaEvent_t, and the two others
// are cuStreamWaitValue64 and cuStreamWriteValue64.
package device

import (
	"context"
	"errors"

	"tutti/kernels"
	"tutti/mem"
)

// A Device has memory and works on it. Its methods may be called by any goroutine.
type Device interface {
	// Location returns where the device's memory is.
	Location() mem.Location
	// Alloc returns n bytes of the device's memory with undefined contents.
	Alloc(n int) (mem.Memory, error)
	// Free frees memory of Alloc. No stream may be using it. An error wraps ErrMemory if the memory
	// is not of Alloc; others are the driver's.
	Free(m mem.Memory) error
	// Stream makes a stream. The caller closes it.
	Stream() (Stream, error)
}

// HostAllocator is a Device with host memory that it copies from and to fast (pinned memory: in
// terms of CUDA, cuMemHostAlloc). Its streams use no other words.
type HostAllocator interface {
	// AllocHost returns n bytes of host memory with undefined contents, aligned to mem.WordSize.
	AllocHost(n int) (mem.Memory, error)
	// FreeHost frees memory of AllocHost, which no stream may be using. It does not wait for other
	// work. An error wraps ErrMemory.
	FreeHost(m mem.Memory) error
}

// Exporter is a Device whose memory other devices of the machine access by themselves, such as
// network cards (in terms of CUDA, GPUDirect RDMA). Neither waits for the other: memory is given to
// another device when an event says that the work which has written it is done, and work is given
// memory that another device has written when the host knows that it has, and Flush was called
// unless Ordered is true.
type Exporter interface {
	// Export returns the descriptor of a DMA buffer in which m, memory of the device, begins at
	// offset. The caller closes it. m must stay allocated until no other device uses the buffer.
	// The error wraps errors.ErrUnsupported if the device, or its driver, has no DMA buffers.
	Export(m mem.Memory) (fd int, offset uint64, err error)
	// Ordered reports whether work that begins after another device has written memory sees what it
	// has written.
	Ordered() bool
	// Flush has work that begins after it returned see what other devices have written before.
	Flush() error
}

// A Sharer is a Device whose memory streams of other ranks load from in place: those of other
// processes of the machine, which map it (in terms of CUDA, IPC), and those of this process.
// Nothing is known about what an owner does with memory meanwhile: loads may return anything. A
// user of the data asks afterwards whether the owner had left it alone. Memory that its owner frees
// stays until the others have released it, unless a driver cannot do that: see package cuda.
type Sharer interface {
	// Share returns the key of the allocation that has m, memory of the device, and where m begins
	// in it. A key has at most MaxKey bytes, is the same for every call on an allocation, and
	// differs from those of all other allocations. The error wraps errors.ErrUnsupported if the
	// memory cannot be shared.
	Share(m mem.Memory) (key []byte, offset uint64, err error)
	// Import makes the allocation of a key accessible to the device's streams. owner is the
	// incarnation of its rank, which keeps the allocation until Import has returned. An allocation
	// is mapped once. The caller calls Release. The error says why the device does not reach it; it
	// wraps errors.ErrUnsupported if there is no path between the two devices, and ErrLater if the
	// same call may succeed when the device has done some work, or when other uses of memory that
	// was freed have ended.
	Import(owner uint64, key []byte) (Shared, error)
	// Forget says that an owner is gone: nothing of it is imported afterwards.
	Forget(owner uint64)
	// Lasts reports whether the allocation of a key that Share has returned has not been freed
	// since.
	Lasts(key []byte) bool
}

// MaxKey is the most bytes of a key of Sharer.
const MaxKey = 192

// Shared is an allocation of another rank.
type Shared interface {
	// Memory returns n bytes from offset on as memory of the device that has imported them. The
	// error wraps ErrMemory if the allocation does not have them.
	Memory(offset uint64, n int) (mem.Memory, error)
	// Path names the way to the memory, such as "same GPU".
	Path() string
	// Release ends the use, when no work of a stream uses the memory any more. The last use of an
	// allocation unmaps it, for which a driver may wait for the work on the device. If gone says
	// that its owner has freed it, a later Import is another mapping. Idempotent.
	Release(gone bool) error
}

// A Stream executes work in order. Methods are called by one goroutine at a time and do not wait
// for the work. An error says that the stream did not accept it, and wraps ErrMemory, ErrClosed or
// the failure of earlier work, unless package kernels does not define a reduction.
type Stream interface {
	// Copy copies src to dst, which has the same length and is disjoint or identical. Each is
	// memory of the device or of the host.
	Copy(dst, src mem.Memory) error
	// Reduce combines srcs, in their order, into dst, and divides by divisor if that is not 0. All
	// have the same length; dst may be one of srcs and is disjoint from the others. Package kernels
	// defines the result of op on dt, bit by bit. srcs is not kept.
	Reduce(op kernels.Op, dt kernels.DType, dst mem.Memory, srcs []mem.Memory, divisor int) error
	// WaitValue blocks later work until word, one of Words, has the value v or a larger one. Later
	// work sees what was written before that value was stored. Values are below 1<<63.
	WaitValue(word mem.Memory, v uint64) error
	// WriteValue stores v to word after all earlier work, whose results are visible to a reader of
	// v.
	WriteValue(word mem.Memory, v uint64) error
	// Record returns an event that is done when all earlier work is.
	Record() (Event, error)
	// Close ends the stream: when it returns, all its work has ended, and nothing of the stream
	// touches memory any more. Work behind a word that has not come is dropped, or, by a device
	// that cannot take it back, done with any results: then the word gets the value that the stream
	// waits for. Its events fail with ErrClosed. Idempotent.
	Close() error
}

// An Event is a point in a stream. Its methods may be called by any goroutine.
type Event interface {
	// Done reports whether the stream has reached the event, or has failed before.
	Done() bool
	// Wait waits for Done, until ctx ends, and returns the stream's failure, ctx's error or nil.
	Wait(ctx context.Context) error
}

// Errors of devices and streams, wrapped.
var (
	ErrMemory = errors.New("not memory that the device can use so")
	ErrClosed = errors.New("stream closed")
	ErrLater  = errors.New("the device has work to do before")
)
