// Package device is where memory lies and who works on it: devices and their streams.
//
// A [Device] has memory and makes streams. A [Stream] takes work, and does it in the order in which
// it came, some time later: calls return at once, and the memories of what was given to a stream
// belong to it until an [Event] that was recorded afterwards is over. Streams and the host meet in
// words of host memory: a stream waits until a word has a value ([Stream.WaitValue]), and writes one
// when all before it is done ([Stream.WriteValue]).
//
//	s, err := d.Stream()
//	s.WaitValue(arrived, 1)                  // the network has filled b
//	s.Reduce(kernels.Sum, kernels.Float32, a, []mem.Memory{a, b}, 0)
//	s.WriteValue(reduced, 1)                 // the network may send a
//
// The host is a device too ([NewHost]): its streams do what they can in the call itself. Package
// device/executor runs the plans of package collectives on streams, device/devicetest tests devices.
// In terms of CUDA, a Stream is a cudaStream_t, an Event a cudaEvent_t, and the two others are
// cuStreamWaitValue64 and cuStreamWriteValue64.
package device

import (
	"context"
	"errors"

	"tutti/kernels"
	"tutti/mem"
)

// A Device has memory and works on it. Its methods may be called by any goroutine.
type Device interface {
	// mem.Location is where its memory is.
	Location() mem.Location
	// Alloc returns n bytes of the device's memory, whose content is undefined.
	Alloc(n int) (mem.Memory, error)
	// Free gives back what Alloc returned. No stream may be using it. An error wraps ErrMemory.
	Free(m mem.Memory) error
	// Stream makes a stream. The caller closes it.
	Stream() (Stream, error)
}

// A Stream works off what it is given, in order. Methods are called by one goroutine at a time and
// do not wait for the work. An error says that the stream did not take it, and wraps ErrMemory,
// ErrClosed or why an earlier piece of work failed.
type Stream interface {
	// Copy copies src to dst, which has the same length and overlaps it not at all or exactly.
	Copy(dst, src mem.Memory) error
	// Reduce folds srcs, in their order, into dst, and divides by divisor if that is not 0. All have
	// the same length; dst may be exactly one of srcs and overlaps no other. What op means on dt,
	// and the bits of its result, package kernels defines. srcs is not kept.
	Reduce(op kernels.Op, dt kernels.DType, dst mem.Memory, srcs []mem.Memory, divisor int) error
	// WaitValue holds up what comes after it until word, which is host memory, has the value v or a
	// larger one. What was written before that value was stored is visible to what comes after.
	WaitValue(word mem.Memory, v uint64) error
	// WriteValue stores v to word when all before it is done, and visible to whoever sees v.
	WriteValue(word mem.Memory, v uint64) error
	// Record returns an event that is over when all before it is done.
	Record() (Event, error)
	// Close ends the stream. Work that has not begun is dropped, and events that wait for it fail
	// with ErrClosed; work that has begun is waited for. Idempotent.
	Close() error
}

// An Event is a point in a stream. Its methods may be called by any goroutine.
type Event interface {
	// Done reports whether the stream has come to the event, or has failed before.
	Done() bool
	// Wait waits for that, until ctx ends at most, and returns why the stream has failed, ctx's error
	// or nil.
	Wait(ctx context.Context) error
}

// Errors of devices and streams, wrapped.
var (
	ErrMemory = errors.New("not memory that the device can use so")
	ErrClosed = errors.New("stream closed")
)
