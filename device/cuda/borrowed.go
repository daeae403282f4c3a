//go:build cgo && linux

package cuda

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"sync"

	"tutti/device"
	"tutti/kernels"
	gpukernels "tutti/kernels/cuda"
	"tutti/mem"
)

// Borrow returns a stream of the caller's as a device.Stream: handle is a CUstream or cudaStream_t
// of this GPU's primary context, 0 the default stream. Streams of the same handle are equal.
//
// The work of its methods is in the order of the stream with the caller's own, so all of it goes to
// the driver at once: a call waits, like those of CUDA, while the stream has a thousand operations
// that are not done. Host memory that is copied must be pinned memory of AllocHost. A stream that
// is being captured into a graph takes no work but that of an exchange (device.Exchange) and copies
// by RecordCopy: a graph would repeat the values of words. Close does nothing, so what waits for a
// word is not released by it.
func (v *Device) Borrow(handle uintptr) device.Stream { return borrowed{v, queue(handle)} }

// A borrowed stream has no state.
type borrowed struct {
	v     *Device
	queue queue
}

// accept returns why the stream takes no work, if it does not.
func (b borrowed) accept() error {
	captured, err := b.Capturing()
	if err == nil && captured {
		err = fmt.Errorf("cuda: %s: the stream is being captured into a graph, which cannot hold this work: end the "+
			"capture first: %w", b.v.loc, errors.ErrUnsupported)
	}
	return err
}

// enqueue gives the stream a kernel.
func (b borrowed) enqueue(l gpukernels.Launch) error {
	if err := b.accept(); err != nil {
		return err
	}
	return b.v.launch(b.queue, l)
}

// waitFor is WaitValue: no Close stores to the word.
func (b borrowed) waitFor(word mem.Memory, n uint64, _ func()) error { return b.WaitValue(word, n) }

// idle returns nil: Close does nothing.
func (b borrowed) idle() <-chan struct{} { return nil }

// Capturing implements device.Capturer.
func (b borrowed) Capturing() (bool, error) {
	if err := b.v.open(); err != nil {
		return false, err
	}
	return b.v.gpu.captured(b.queue)
}

// RecordCopy implements device.Capturer.
func (b borrowed) RecordCopy(dst, src mem.Memory) error {
	for _, m := range []mem.Memory{dst, src} {
		if m.Loc() != b.v.loc {
			return fmt.Errorf("cuda: %s: recording a copy of memory at %q: %w", b.v.loc, m.Loc(), device.ErrMemory)
		}
	}
	at, err := b.v.direct(dst, src)
	if err != nil || dst.Len() == 0 || dst == src {
		return err
	}
	return b.v.gpu.copy(b.queue, at[0], at[1], dst.Len())
}

// Copy implements device.Stream.
func (b borrowed) Copy(dst, src mem.Memory) error {
	at, err := b.v.direct(dst, src)
	if err != nil {
		return err
	}
	if err := b.accept(); err != nil || dst.Len() == 0 || dst == src {
		return err
	}
	return b.v.gpu.copy(b.queue, at[0], at[1], dst.Len())
}

// Reduce implements device.Stream.
func (b borrowed) Reduce(op kernels.Op, dt kernels.DType, dst mem.Memory, srcs []mem.Memory, divisor int) error {
	launches, err := b.v.reduction(op, dt, dst, srcs, divisor)
	if err != nil {
		return err
	}
	err = b.accept()
	for i := 0; err == nil && i < len(launches); i++ {
		err = b.v.launch(b.queue, launches[i])
	}
	return err
}

// WaitValue implements device.Stream.
func (b borrowed) WaitValue(word mem.Memory, n uint64) error {
	return b.word(word, n, b.v.gpu.wait, gpukernels.Wait)
}

// WriteValue implements device.Stream.
func (b borrowed) WriteValue(word mem.Memory, n uint64) error {
	return b.word(word, n, b.v.gpu.write, gpukernels.Write)
}

// word does an operation on a word, or launches the kernel that does it.
func (b borrowed) word(word mem.Memory, n uint64, operation func(q queue, at, n uint64) error,
	kernel func(at, n uint64) gpukernels.Launch) error {
	at, err := b.v.word(word, n)
	if err != nil {
		return err
	}
	if err := b.accept(); err != nil {
		return err
	}
	if b.v.info.MemoryOps {
		return operation(b.queue, at, n)
	}
	return b.v.launch(b.queue, kernel(at, n))
}

// Record implements device.Stream.
func (b borrowed) Record() (device.Event, error) {
	if err := b.accept(); err != nil {
		return nil, err
	}
	m, err := b.v.outside.take(b.v.gpu)
	if err != nil {
		return nil, err
	}
	if err := b.v.gpu.record(m, b.queue); err != nil {
		b.v.outside.put(m)
		return nil, err
	}
	e := &recorded{v: b.v, marker: m}
	e.forgotten = runtime.AddCleanup(e, b.v.outside.put, m)
	return e, nil
}

// Close implements device.Stream.
func (b borrowed) Close() error { return nil }

// markers are the markers of borrowed streams.
type markers struct {
	mu    sync.Mutex
	all   []marker
	spare []marker
}

func (p *markers) take(g *gpu) (marker, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if n := len(p.spare); n > 0 {
		m := p.spare[n-1]
		p.spare = p.spare[:n-1]
		return m, nil
	}
	m, err := g.newMarker()
	if err == nil {
		p.all = append(p.all, m)
	}
	return m, err
}

func (p *markers) put(m marker) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.spare = append(p.spare, m)
}

// free destroys all markers.
func (p *markers) free(g *gpu) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	var errs []error
	for _, m := range p.all {
		errs = append(errs, g.destroyMarker(m))
	}
	p.all, p.spare = nil, nil
	return errors.Join(errs...)
}

// recorded is an event of a borrowed stream.
type recorded struct {
	v         *Device
	marker    marker
	forgotten runtime.Cleanup // of an event that is not seen done

	mu   sync.Mutex
	done bool
	err  error
}

// Done implements device.Event.
func (e *recorded) Done() bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	if !e.done {
		if e.err = e.v.open(); e.err == nil {
			e.done, e.err = e.v.gpu.reached(e.marker)
		}
		if e.done = e.done || e.err != nil; e.done {
			e.forgotten.Stop()
			e.v.outside.put(e.marker)
		}
	}
	return e.done
}

// Wait implements device.Event.
func (e *recorded) Wait(ctx context.Context) error {
	if err := await(ctx, e); err != nil {
		return err
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.err
}
