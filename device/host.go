package device

import (
	"context"
	"fmt"
	"sync"
	"time"
	"unsafe"

	"tutti/internal/backoff"
	"tutti/kernels"
	"tutti/mem"
)

// NewHost returns the host as a device. Its streams work in the caller's goroutine: in the call
// itself or, while a WaitValue blocks the stream, in a later call or in an Event's.
func NewHost() Device { return host{} }

type host struct{}

func (host) Location() mem.Location { return mem.Anywhere }

func (host) Alloc(n int) (mem.Memory, error) {
	if n < 0 {
		return mem.Memory{}, fmt.Errorf("device: allocating %d bytes: %w", n, ErrMemory)
	}
	if err := mem.Fits(n); err != nil {
		return mem.Memory{}, fmt.Errorf("device: allocating %d bytes: %w", n, err)
	}
	words := make([]uint64, (n+mem.WordSize-1)/mem.WordSize) // aligned for every type
	return mem.Host(unsafe.Slice((*byte)(unsafe.Pointer(unsafe.SliceData(words))), n), mem.Anywhere), nil
}

func (host) Free(m mem.Memory) error {
	if !m.Loc().Host() {
		return fmt.Errorf("device: freeing %d bytes at %q as host memory: %w", m.Len(), m.Loc(), ErrMemory)
	}
	return nil
}

func (host) Stream() (Stream, error) { return &hostStream{}, nil }

// hostStream is a queue that is empty unless its head waits for a word.
type hostStream struct {
	mu     sync.Mutex
	queue  []task
	done   uint64 // number of finished tasks
	taken  uint64
	closed bool
}

// A task is a piece of work, and the word that it waits for, or nil.
type task struct {
	word mem.Memory
	at   uint64
	run  func()
}

// take enqueues a task and runs what can run.
func (s *hostStream) take(t task) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return fmt.Errorf("device: host: %w", ErrClosed)
	}
	s.queue = append(s.queue, t)
	s.taken++
	s.advance()
	return nil
}

// advance runs the queue as far as its words allow. With the lock.
func (s *hostStream) advance() {
	n := 0
	for ; n < len(s.queue); n++ {
		t := &s.queue[n]
		if t.word.Len() > 0 && t.word.Word(0).Load() < t.at {
			break
		}
		if t.run != nil {
			t.run()
		}
		*t = task{}
	}
	s.done += uint64(n)
	s.queue = s.queue[n:]
}

// usable checks that memories are host memory and have dst's length.
func usable(dst mem.Memory, srcs ...mem.Memory) error {
	if !dst.Loc().Host() {
		return fmt.Errorf("device: host: memory at %q: %w", dst.Loc(), ErrMemory)
	}
	for _, m := range srcs {
		if !m.Loc().Host() {
			return fmt.Errorf("device: host: memory at %q: %w", m.Loc(), ErrMemory)
		}
		if m.Len() != dst.Len() {
			return fmt.Errorf("device: host: %d bytes where the destination has %d: %w", m.Len(), dst.Len(), ErrMemory)
		}
	}
	return nil
}

func (s *hostStream) Copy(dst, src mem.Memory) error {
	if err := usable(dst, src); err != nil {
		return err
	}
	return s.take(task{run: func() { copy(dst.Bytes(), src.Bytes()) }})
}

func (s *hostStream) Reduce(op kernels.Op, dt kernels.DType, dst mem.Memory, srcs []mem.Memory, divisor int) error {
	if err := usable(dst, srcs...); err != nil {
		return err
	}
	if err := Reducible(op, dt, dst, srcs, divisor); err != nil {
		return err
	}
	fold, err := kernels.Lookup(op, dt)
	if err != nil {
		return err
	}
	ptrs := make([]unsafe.Pointer, len(srcs))
	for i, m := range srcs {
		ptrs[i] = unsafe.Pointer(unsafe.SliceData(m.Bytes()))
	}
	to, n := unsafe.Pointer(unsafe.SliceData(dst.Bytes())), dst.Len()/dt.Size()
	return s.take(task{run: func() {
		fold(to, ptrs, n)
		if divisor > 0 {
			kernels.Scale(dt, to, n, divisor)
		}
	}})
}

// Reducible checks the arguments of a reduction, except for locations. For devices.
func Reducible(op kernels.Op, dt kernels.DType, dst mem.Memory, srcs []mem.Memory, divisor int) error {
	switch {
	case len(srcs) == 0:
		return fmt.Errorf("device: %v of %v: no sources; pass at least one: %w", op, dt, ErrMemory)
	case !kernels.Supported(op, dt):
		return fmt.Errorf("device: %v of %v is not defined", op, dt)
	case divisor != 0 && !kernels.Supported(kernels.Avg, dt):
		return fmt.Errorf("device: %v of %v divided by %d is not defined", op, dt, divisor)
	case dst.Len()%dt.Size() != 0:
		return fmt.Errorf("device: %v of %v: %d bytes are no whole number of elements: %w", op, dt, dst.Len(),
			ErrMemory)
	case divisor < 0:
		return fmt.Errorf("device: a reduction divided by %d, want 0 (not at all) or more", divisor)
	}
	return nil
}

func (s *hostStream) WaitValue(word mem.Memory, v uint64) error {
	if !word.Loc().Host() || word.Len() != mem.WordSize {
		return fmt.Errorf("device: host: %d bytes at %q are no word to wait for: %w", word.Len(), word.Loc(), ErrMemory)
	}
	return s.take(task{word: word, at: v})
}

func (s *hostStream) WriteValue(word mem.Memory, v uint64) error {
	if !word.Loc().Host() || word.Len() != mem.WordSize {
		return fmt.Errorf("device: host: %d bytes at %q are no word to write: %w", word.Len(), word.Loc(), ErrMemory)
	}
	return s.take(task{run: func() { word.Word(0).Store(v) }})
}

func (s *hostStream) Record() (Event, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return nil, fmt.Errorf("device: host: %w", ErrClosed)
	}
	return &hostEvent{s, s.taken}, nil
}

func (s *hostStream) Close() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.advance()
	s.closed, s.queue = true, nil
	return nil
}

type hostEvent struct {
	s  *hostStream
	at uint64 // number of tasks before it
}

func (e *hostEvent) Done() bool {
	e.s.mu.Lock()
	defer e.s.mu.Unlock()
	if !e.s.closed {
		e.s.advance()
	}
	return e.s.closed || e.s.done >= e.at
}

// yields and nap pace Wait.
const (
	yields = 100
	nap    = 100 * time.Microsecond
)

func (e *hostEvent) Wait(ctx context.Context) error {
	pace := backoff.Backoff{Yields: yields, Nap: nap}
	defer pace.Stop()
	for !e.Done() {
		if err := pace.Wait(ctx); err != nil {
			return err
		}
	}
	e.s.mu.Lock()
	defer e.s.mu.Unlock()
	if e.s.done < e.at {
		return fmt.Errorf("device: host: %w", ErrClosed)
	}
	return nil
}
