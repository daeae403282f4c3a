//go:build cgo && linux

package cuda

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"
	"unsafe"

	"tutti/device"
	"tutti/internal/backoff"
	"tutti/kernels"
	gpukernels "tutti/kernels/cuda"
	"tutti/mem"
)

// A stream is a CUDA stream. What it waits for is kept until the stream has passed it, so that
// Close can release it.
//
// The driver takes a limited number of operations of a stream, about a thousand; then its calls
// wait until the stream has done some, which it may not before the caller has done something else.
// So the operations beyond mostInFlight are held here, and given to the driver when the stream has
// come further and a method of it, or of one of its events, is called.
type stream struct {
	v      *Device
	queue  queue
	staged staging

	mu      sync.Mutex
	ending  bool           // Close has begun
	closed  bool           // and has ended
	end     chan struct{}  // is closed then
	rest    chan struct{}  // is closed when Close has seen all work end, which may fail
	refused error          // why the stream takes no more work
	failed  error          // why what the driver has taken does not end
	held    []func() error // operations that the driver does not have
	pending []point        // in the order of the stream; what was passed is taken out when a marker is reached
	spare   []marker
	given   uint64 // operations that the driver was given
	passed  uint64 // of these, those before the last marker that was reached
	since   int    // operations since the last marker
	events  uint64 // that Record has returned: they are numbered from 1
	marked  uint64 // the last event that the driver was given
	reached uint64 // the last event that was reached
	blind   int    // times that the driver was not worth asking
}

// A point of a stream is a marker, or the wait for a word.
type point struct {
	marker marker // nil: a wait
	event  uint64 // of the marker; 0: of none
	given  uint64 // operations before the marker
	word   *atomic.Uint64
	v      uint64
	forge  func() // is called before Close stores to the word; may be nil
}

// met reports whether the stream does not stop here.
func (p *point) met() bool { return p.marker != nil || p.word.Load() >= p.v }

// mostInFlight is the most operations that the driver has. Between every betweenMarkers operations
// and the next one is a marker, to know which are done.
const (
	mostInFlight   = 512
	betweenMarkers = 64
)

// looks is how often the driver is asked although nothing can have been reached.
const looks = 64

// yields and nap pace the wait for the GPU.
const (
	yields = 200
	nap    = 20 * time.Microsecond
)

// captureTime is how long Close asks a driver that does not tell whether the work has ended,
// because the program captures a stream: the goroutine that is to end the capture may be in Close.
const captureTime = 2 * time.Second

func newStream(v *Device) (*stream, error) {
	s := &stream{v: v, end: make(chan struct{}), rest: make(chan struct{})}
	if err := s.staged.init(s); err != nil {
		return nil, err
	}
	var err error
	if s.queue, err = v.gpu.newQueue(); err != nil {
		return nil, errors.Join(err, s.staged.free(v))
	}
	return s, nil
}

// acceptLocked returns why the stream takes no work, if it does not.
func (s *stream) acceptLocked() error {
	switch {
	case s.ending:
		return fmt.Errorf("cuda: %s: %w", s.v.loc, device.ErrClosed)
	case s.failed != nil:
		return s.failed
	}
	return s.refused
}

// giveLocked gives the driver an operation, or holds it. An error of the driver is the stream's:
// work that is missing must not be followed by other work.
func (s *stream) giveLocked(operation func() error) {
	if len(s.held) > 0 || s.given-s.passed >= mostInFlight {
		s.held = append(s.held, operation)
		s.reapLocked()
		return
	}
	s.runLocked(operation)
}

// runLocked gives the driver an operation. The marker that is due comes before it, so that the
// driver has not been given an operation that is refused.
func (s *stream) runLocked(operation func() error) {
	if s.refused == nil && s.since >= betweenMarkers {
		s.refused = s.markLocked(0)
	}
	if s.refused != nil {
		return
	}
	s.given++
	s.since++
	s.refused = operation()
}

// same checks that memories have the length of dst.
func same(dst mem.Memory, srcs ...mem.Memory) error {
	for _, m := range srcs {
		if m.Len() != dst.Len() {
			return fmt.Errorf("cuda: %d bytes where the destination has %d: %w", m.Len(), dst.Len(), device.ErrMemory)
		}
	}
	return nil
}

// Copy implements device.Stream.
func (s *stream) Copy(dst, src mem.Memory) error {
	if err := same(dst, src); err != nil {
		return err
	}
	to, direct, err := s.v.reach(dst)
	if err != nil {
		return err
	}
	from, directly, err := s.v.reach(src)
	if err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := s.acceptLocked(); err != nil || dst.Len() == 0 || dst == src {
		return err
	}
	switch {
	case direct && directly:
		s.copyLocked(to, from, dst.Len())
	case direct:
		s.staged.fromHost(s, to, src.Bytes())
	case directly:
		s.staged.toHost(s, dst.Bytes(), from)
	default:
		s.staged.onHost(s, dst.Bytes(), src.Bytes())
	}
	return s.refused
}

func (s *stream) copyLocked(to, from uint64, n int) {
	s.giveLocked(func() error { return s.v.gpu.copy(s.queue, to, from, n) })
}

// Reduce implements device.Stream.
func (s *stream) Reduce(op kernels.Op, dt kernels.DType, dst mem.Memory, srcs []mem.Memory, divisor int) error {
	launches, err := s.v.reduction(op, dt, dst, srcs, divisor)
	if err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := s.acceptLocked(); err != nil {
		return err
	}
	for _, l := range launches {
		s.giveLocked(func() error { return s.v.launch(s.queue, l) })
	}
	return s.refused
}

// reducible checks the arguments of a stream's Reduce, and returns the addresses of srcs.
func (v *Device) reducible(op kernels.Op, dt kernels.DType, dst mem.Memory, srcs []mem.Memory,
	divisor int) ([]uint64, error) {
	if err := same(dst, srcs...); err != nil {
		return nil, err
	}
	if err := device.Reducible(op, dt, dst, srcs, divisor); err != nil {
		return nil, err
	}
	from := make([]uint64, len(srcs))
	for i, m := range append([]mem.Memory{dst}, srcs...) {
		if m.Loc() != v.loc {
			return nil, fmt.Errorf("cuda: %s: reducing memory at %q: %w", v.loc, m.Loc(), device.ErrMemory)
		}
		if i > 0 {
			from[i-1] = m.Address()
		}
	}
	return from, nil
}

// reduction returns the launches of a stream's Reduce.
func (v *Device) reduction(op kernels.Op, dt kernels.DType, dst mem.Memory, srcs []mem.Memory,
	divisor int) ([]gpukernels.Launch, error) {
	from, err := v.reducible(op, dt, dst, srcs, divisor)
	if err != nil {
		return nil, err
	}
	launches, err := gpukernels.Reduce(op, dt, dst.Address(), from, uint64(dst.Len()), divisor, v.info.SMs)
	if err != nil {
		return nil, fmt.Errorf("cuda: %s: %w", v.loc, err)
	}
	return launches, nil
}

func (v *Device) launch(q queue, l gpukernels.Launch) error {
	f := v.functions[l.Function]
	if f == nil {
		return fmt.Errorf("cuda: launch %s on %s: its kernels were loaded without it", l.Function, v.loc)
	}
	return v.gpu.launch(q, f, l.Function, l.Grid, l.Block, l.Shared, l.Params)
}

// direct returns the addresses of the memories of a copy that no goroutine takes part in.
func (v *Device) direct(dst, src mem.Memory) (at [2]uint64, err error) {
	if err := same(dst, src); err != nil {
		return at, err
	}
	for i, m := range []mem.Memory{dst, src} {
		to, ok, err := v.reach(m)
		if err == nil && !ok {
			err = fmt.Errorf("cuda: %s: copying host memory on a stream of the caller, want memory of AllocHost: %w",
				v.loc, device.ErrMemory)
		}
		if err != nil {
			return at, err
		}
		at[i] = to
	}
	return at, nil
}

// word returns the address of a word on the device, for a value.
func (v *Device) word(m mem.Memory, value uint64) (uint64, error) {
	if !m.Loc().Host() || m.Len() != mem.WordSize {
		return 0, fmt.Errorf("cuda: %s: %d bytes at %q are no word: %w", v.loc, m.Len(), m.Loc(), device.ErrMemory)
	}
	at, ok, err := v.reach(m)
	if err != nil {
		return 0, err
	}
	if !ok || at%mem.WordSize != 0 {
		return 0, fmt.Errorf("cuda: %s cannot reach this word: take it from device.Words or its AllocHost: %w",
			v.loc, device.ErrMemory)
	}
	if int64(value) < 0 {
		return 0, fmt.Errorf("cuda: %s: the value %#x of a word, want one below 1<<63", v.loc, value)
	}
	return at, nil
}

// WaitValue implements device.Stream.
func (s *stream) WaitValue(word mem.Memory, v uint64) error { return s.waitFor(word, v, nil) }

// waitFor is WaitValue. forge, if it is not nil, is called before Close stores to the word.
func (s *stream) waitFor(word mem.Memory, v uint64, forge func()) error {
	at, err := s.v.word(word, v)
	if err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := s.acceptLocked(); err != nil {
		return err
	}
	s.waitLocked(word.Word(0), at, v, forge)
	return s.refused
}

// waitLocked enqueues a wait, and remembers it for Close.
func (s *stream) waitLocked(word *atomic.Uint64, at, v uint64, forge func()) {
	s.giveLocked(func() (err error) {
		if word.Load() >= v { // what the GPU is given from now on sees what came before it
			return nil
		}
		switch {
		case s.v.info.MemoryOps:
			err = s.v.gpu.wait(s.queue, at, v)
		case s.v.blocking:
			return fmt.Errorf("cuda: %s: CUDA_LAUNCH_BLOCKING is set, and streams wait for words in kernels alone: %w",
				s.v.loc, errors.ErrUnsupported)
		default:
			err = s.v.launch(s.queue, gpukernels.Wait(at, v))
		}
		if err == nil {
			s.pending = append(s.pending, point{word: word, v: v, forge: forge})
		}
		return err
	})
}

// WriteValue implements device.Stream.
func (s *stream) WriteValue(word mem.Memory, v uint64) error {
	at, err := s.v.word(word, v)
	if err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := s.acceptLocked(); err != nil {
		return err
	}
	s.writeLocked(at, v)
	return s.refused
}

func (s *stream) writeLocked(at, v uint64) {
	s.giveLocked(func() error {
		if s.v.info.MemoryOps {
			return s.v.gpu.write(s.queue, at, v)
		}
		return s.v.launch(s.queue, gpukernels.Write(at, v))
	})
}

// Record implements device.Stream.
func (s *stream) Record() (device.Event, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.reapLocked()
	if err := s.acceptLocked(); err != nil {
		return nil, err
	}
	s.events++
	number := s.events
	s.giveLocked(func() error { return s.markLocked(number) })
	if s.refused != nil {
		return nil, s.refused
	}
	return &event{s, number}, nil
}

// markLocked records a marker, for an event or for none.
func (s *stream) markLocked(event uint64) (err error) {
	var m marker
	if n := len(s.spare); n > 0 {
		m, s.spare = s.spare[n-1], s.spare[:n-1]
	} else if m, err = s.v.gpu.newMarker(); err != nil {
		return err
	}
	if err := s.v.gpu.record(m, s.queue); err != nil {
		s.spare = append(s.spare, m)
		return err
	}
	s.pending = append(s.pending, point{marker: m, event: event, given: s.given})
	s.marked = max(s.marked, event)
	s.since = 0
	return nil
}

// reapLocked takes out the points that the stream has passed, and gives the driver what was held.
func (s *stream) reapLocked() {
	for !s.ending && s.failed == nil && s.nextLocked() {
		for len(s.held) > 0 && s.given-s.passed < mostInFlight {
			operation := s.held[0]
			s.held[0] = nil
			s.held = s.held[1:]
			s.runLocked(operation)
		}
	}
	if s.refused != nil {
		s.held = nil
	}
}

// nextLocked takes out the points up to the first marker, if the stream has passed it. It asks the
// driver, but mostly not while the marker is behind a word that has not come: only a failure would
// be news.
func (s *stream) nextLocked() bool {
	next := slices.IndexFunc(s.pending, func(p point) bool { return p.marker != nil })
	if next < 0 {
		return false
	}
	if slices.ContainsFunc(s.pending[:next], func(p point) bool { return !p.met() }) {
		if s.blind++; s.blind%looks != 0 {
			return false
		}
	}
	p := s.pending[next]
	done, err := s.v.gpu.reached(p.marker)
	if err != nil {
		s.failed = err
		s.staged.stop()
	}
	if !done {
		return false
	}
	s.passed, s.reached = p.given, max(s.reached, p.event)
	s.spare = append(s.spare, p.marker)
	clear(s.pending[:next+1])
	s.pending = s.pending[next+1:]
	return true
}

// remembers reports whether the stream may still look at a word in a block, or store to it.
func (s *stream) remembers(b block) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.reapLocked()
	return slices.ContainsFunc(s.pending, func(p point) bool {
		return p.marker == nil && b.holds(unsafe.Pointer(p.word))
	})
}

// idle implements carrier.
func (s *stream) idle() <-chan struct{} { return s.rest }

// Close implements device.Stream. What the stream waits for is released: work behind it is done
// before Close returns, with any results. If the driver does not tell whether it is, Close fails,
// and the memory of the stream stays until the device is closed. Only the first of several calls
// returns an error.
func (s *stream) Close() error {
	s.mu.Lock()
	if s.ending {
		s.mu.Unlock()
		<-s.end
		return nil
	}
	defer close(s.end)
	s.reapLocked()
	s.ending, s.held = true, nil
	reached := s.reached // the last event before the first word that has not come
	for i := range s.pending {
		p := &s.pending[i]
		if !p.met() {
			break
		}
		reached = max(reached, p.event)
	}
	s.mu.Unlock()
	s.staged.end()
	err := s.drain()
	errs := []error{err}
	for _, m := range s.spare {
		errs = append(errs, s.v.gpu.destroyMarker(m))
	}
	for _, p := range s.pending {
		if p.marker != nil {
			errs = append(errs, s.v.gpu.destroyMarker(p.marker))
		}
	}
	errs = append(errs, s.v.gpu.destroyQueue(s.queue))
	if err == nil {
		close(s.rest)
		errs = append(errs, s.staged.free(s.v))
	}
	s.v.mu.Lock()
	delete(s.v.streams, s)
	s.v.mu.Unlock()
	s.mu.Lock()
	defer s.mu.Unlock()
	s.closed, s.pending, s.spare = true, nil, nil
	known := s.failed != nil || err == nil && s.refused != nil
	switch {
	case err == nil:
		s.reached = reached
	case s.failed == nil:
		s.failed = err
	}
	if known { // its user has been told, and a context that has ended refuses every call
		return nil
	}
	return first(errs)
}

// first returns the first error, as the others often are its consequences.
func first(errs []error) error {
	for _, err := range errs {
		if err != nil {
			return err
		}
	}
	return nil
}

// drain releases the stream until its work has ended.
func (s *stream) drain() error {
	pace := backoff.Backoff{Yields: yields, Nap: nap}
	defer pace.Stop()
	told := time.Now() // when the driver has told last how far the stream is
	for {
		for i := range s.pending {
			p := &s.pending[i]
			for p.marker == nil {
				now := p.word.Load()
				if now < p.v && p.forge != nil {
					p.forge()
				}
				if now >= p.v || p.word.CompareAndSwap(now, p.v) {
					break
				}
			}
		}
		switch idle, err := s.v.gpu.idle(s.queue); {
		case idle || err != nil && time.Since(told) > captureTime:
			return err
		case err == nil:
			told = time.Now()
		}
		if err := pace.Wait(context.Background()); err != nil {
			return err
		}
	}
}

// await waits until an event is done, or ctx ends.
func await(ctx context.Context, e device.Event) error {
	pace := backoff.Backoff{Yields: yields, Nap: nap}
	defer pace.Stop()
	for !e.Done() {
		if err := pace.Wait(ctx); err != nil {
			return err
		}
	}
	return nil
}

// An event is one of a stream, by its number.
type event struct {
	s      *stream
	number uint64
}

// Done implements device.Event.
func (e *event) Done() bool {
	e.s.mu.Lock()
	defer e.s.mu.Unlock()
	if e.s.reached < e.number {
		e.s.reapLocked()
	}
	e.s.staged.seen()
	if e.s.reached >= e.number || e.s.closed {
		return true
	}
	return !e.s.ending && (e.s.failed != nil || e.s.refused != nil && e.s.marked < e.number)
}

// Wait implements device.Event.
func (e *event) Wait(ctx context.Context) error {
	if err := await(ctx, e); err != nil {
		return err
	}
	e.s.mu.Lock()
	defer e.s.mu.Unlock()
	switch {
	case e.s.reached >= e.number:
		return nil
	case e.s.failed != nil:
		return e.s.failed
	case e.s.refused != nil && e.s.marked < e.number:
		return e.s.refused
	}
	return fmt.Errorf("cuda: %s: %w", e.s.v.loc, device.ErrClosed)
}
