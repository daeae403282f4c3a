package devicetest

import (
	"errors"
	"fmt"
	"sync"
	"unsafe"

	"tutti/device"
	"tutti/kernels"
	"tutti/mem"
)

// reserved is a stream of places in another one.
type reserved struct {
	s     *stream
	order device.Places

	mu     sync.Mutex
	work   []func() // of places, by their order
	copies []span   // that are in the latest one: what is written, and what is read, in turns
	open   bool     // the carrier may not do the latest one
	closed bool
	done   []chan struct{} // that the carrier has done a place; the first one: that it has come
}

// A span is memory.
type span struct {
	at uintptr
	n  int
}

func spanOf(b []byte) span { return span{uintptr(unsafe.Pointer(unsafe.SliceData(b))), len(b)} }

// apart reports whether two spans have no byte in common.
func (s span) apart(o span) bool { return s.at+uintptr(s.n) <= o.at || o.at+uintptr(o.n) <= s.at }

// Reserves implements device.Reserver.
func (d *Late) Reserves() bool { return true }

// Reserve implements device.Reserver.
func (d *Late) Reserve(s device.Stream, p device.Places) (device.Stream, error) {
	c, ok := s.(*stream)
	if !ok || c.d != d {
		return nil, fmt.Errorf("late: places in a stream of another device: %w", errors.ErrUnsupported)
	}
	if p.N < 1 || p.Bytes < 0 || p.Op != 0 && !kernels.Supported(p.Op, p.DType) {
		return nil, fmt.Errorf("late: %d places for %d bytes, %v of %v: %w", p.N, p.Bytes, p.Op, p.DType,
			device.ErrPlaces)
	}
	r := &reserved{s: c, order: p, done: make([]chan struct{}, p.N+1)}
	for i := range r.done {
		r.done[i] = make(chan struct{})
	}
	return r, c.take(r.run)
}

// run does the places, on the carrier.
func (r *reserved) run() {
	close(r.done[0])
	for i := range r.order.N {
		var work func()
		r.s.until(func() bool {
			r.mu.Lock()
			defer r.mu.Unlock()
			given := len(r.work)
			if r.open {
				given--
			}
			if i < given {
				work = r.work[i]
			}
			return i < given || r.closed
		})
		select {
		case <-r.s.closing:
			return
		default:
		}
		if r.s.d.tarry(); work != nil {
			work()
		}
		close(r.done[i+1])
	}
}

// ended reports whether the carrier was closed.
func (r *reserved) ended() bool {
	select {
	case <-r.s.closing:
		return true
	default:
		return r.closed
	}
}

// take puts f into the next place.
func (r *reserved) take(f func()) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	switch {
	case r.ended():
		return fmt.Errorf("late: %w", device.ErrClosed)
	case len(r.work) == r.order.N:
		return fmt.Errorf("late: all %d places have work: %w", r.order.N, device.ErrPlaces)
	}
	r.work, r.open, r.copies = append(r.work, f), true, nil
	return nil
}

// join puts a copy into the latest place, and reports whether it has room for it.
func (r *reserved) join(to, from span, f func()) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	if !r.open || r.ended() || len(r.copies) == 0 || len(r.copies) == 2*device.MaxPlaceCopies {
		return false
	}
	for i := 0; i < len(r.copies); i += 2 {
		if written, read := r.copies[i], r.copies[i+1]; !written.apart(to) || !written.apart(from) || !read.apart(to) {
			return false
		}
	}
	last := &r.work[len(r.work)-1]
	work := *last
	*last, r.copies = func() { f(); work() }, append(r.copies, to, from)
	return true
}

// reach is Late.reach for host memory of AllocHost.
func (r *reserved) reach(m mem.Memory) ([]byte, error) {
	if !m.Loc().Host() {
		return r.s.d.find(m)
	}
	d := r.s.d
	d.mu.Lock()
	defer d.mu.Unlock()
	at := uintptr(unsafe.Pointer(unsafe.SliceData(m.Bytes())))
	for first, n := range d.host {
		if off := at - uintptr(unsafe.Pointer(first)); off <= uintptr(n) && uintptr(m.Len()) <= uintptr(n)-off {
			return m.Bytes(), nil
		}
	}
	return nil, fmt.Errorf("late: %d bytes of host memory that is not of AllocHost: %w", m.Len(), device.ErrMemory)
}

func (r *reserved) Copy(dst, src mem.Memory) error {
	f, err := r.s.d.copying(r.reach, dst, src)
	if err != nil || dst.Len() == 0 || dst == src {
		return err
	}
	to, err := r.reach(dst)
	if err != nil {
		return err
	}
	from, err := r.reach(src)
	if err != nil {
		return err
	}
	if r.join(spanOf(to), spanOf(from), f) {
		return nil
	}
	if err := r.take(f); err != nil {
		return err
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.copies = []span{spanOf(to), spanOf(from)}
	return nil
}

func (r *reserved) Reduce(op kernels.Op, dt kernels.DType, dst mem.Memory, srcs []mem.Memory, divisor int) error {
	f, err := r.s.d.reducing(op, dt, dst, srcs, divisor)
	if err != nil {
		return err
	}
	one := func(op kernels.Op) kernels.Op {
		if op == kernels.Avg {
			return kernels.Sum
		}
		return op
	}
	if dt != r.order.DType || one(op) != one(r.order.Op) || len(srcs) > device.MaxPlaceSources {
		return fmt.Errorf("late: %v of %d sources of %v in a place for %v of %v: %w", op, len(srcs), dt, r.order.Op,
			r.order.DType, device.ErrPlaces)
	}
	return r.take(f)
}

func (r *reserved) WaitValue(mem.Memory, uint64) error {
	return fmt.Errorf("late: waiting for a word in a place: %w", device.ErrPlaces)
}

func (r *reserved) WriteValue(word mem.Memory, v uint64) error {
	if err := checkWord(word); err != nil {
		return err
	}
	store := func() { word.Word(0).Store(v) }
	r.mu.Lock()
	if r.open && !r.ended() {
		last := &r.work[len(r.work)-1]
		work := *last
		*last, r.open = func() { work(); store() }, false
		r.mu.Unlock()
		return nil
	}
	r.mu.Unlock()
	err := r.take(store)
	r.mu.Lock()
	defer r.mu.Unlock()
	r.open = false
	return err
}

func (r *reserved) Record() (device.Event, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.open = false
	return &event{s: r.s, over: r.done[len(r.work)]}, nil
}

func (r *reserved) Close() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.open && !r.closed {
		r.work = r.work[:len(r.work)-1]
	}
	r.closed, r.open = true, false
	return nil
}
