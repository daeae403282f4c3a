//go:build cgo && linux

package cuda

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"

	"tutti/device"
	"tutti/kernels"
	gpukernels "tutti/kernels/cuda"
	"tutti/mem"
)

// Places of a stream (device.Reserver) are, for the driver, each
//
//	a wait until the first word of a room has the number of the place,
//	a copy of the place from the room's host memory to its memory on the device,
//	a kernel that does what is in the place, and
//	one that stores the number to the second word, and what WriteValue has asked for.
//
// So the stream reads a place when the host has raised the first word, and no kernel waits on the
// device. A room is used again when a stream has passed all of its places.

const (
	_ = uint(gpukernels.MaxPlaceSources - device.MaxPlaceSources)
	_ = uint(gpukernels.MaxPlaceCopies - device.MaxPlaceCopies)
)

// A room has the memory of the places of a stream.
type room struct {
	words    [2]mem.Memory // numbers of places: that the stream may do, that it has done
	host     mem.Memory    // the places, pinned
	device   mem.Memory    // and on the device
	capacity int           // places
	uses     uint64        // the number of the last place of the latest use
	user     *reserved     // that use
}

// rooms are those of a device. They stay until it is closed, as many as streams have had places in
// at a time.
type rooms struct {
	mu   sync.Mutex
	all  []*room
	rest mem.Memory // of the device, for further rooms
}

const (
	roomUnit  = 4        // the smallest capacity of a room; capacities are powers of two
	roomChunk = 32 << 10 // bytes of the device that are allocated for rooms, at least
)

// take gives u a room that no stream uses.
func (r *rooms) take(u *reserved) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	capacity := roomUnit
	for capacity < u.order.N {
		capacity *= 2
	}
	var x *room
	if i := slices.IndexFunc(r.all, func(x *room) bool { return x.capacity == capacity && x.free() }); i >= 0 {
		if x = r.all[i]; x.user != nil {
			x.user.leave()
		}
	} else {
		var err error
		if x, err = r.addLocked(u.v, capacity); err != nil {
			return err
		}
	}
	u.room, u.base = x, x.uses+1
	x.user, x.uses = u, x.uses+uint64(u.order.N)+1
	return nil
}

// prepare makes a room, so that the first operation need not.
func (r *rooms) prepare(v *Device) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	_, err := r.addLocked(v, roomUnit)
	return err
}

func (r *rooms) addLocked(v *Device, capacity int) (*room, error) {
	x := &room{capacity: capacity}
	size := capacity * int(gpukernels.PlaceSize)
	if r.rest.Len() < size {
		m, err := v.alloc(max(size, roomChunk), false)
		if err != nil {
			return nil, err
		}
		r.rest = m
	}
	whole, err := v.AllocHost(size + len(x.words)*mem.WordSize)
	if err != nil {
		return nil, err
	}
	x.device, r.rest = r.rest.Slice(0, size), r.rest.Slice(size, r.rest.Len()-size)
	x.host = whole.Slice(0, size)
	for i := range x.words {
		x.words[i] = whole.Slice(size+i*mem.WordSize, mem.WordSize)
		x.words[i].Word(0).Store(0)
	}
	r.all = append(r.all, x)
	return x, nil
}

// passed reports whether the stream has passed all places of the latest use.
func (x *room) passed() bool { return x.words[1].Word(0).Load() >= x.uses }

// free reports whether no stream uses the room: the latest one has passed all places, or its work
// has ended because it was closed before it was given all of them.
func (x *room) free() bool {
	if x.passed() {
		return true
	}
	select {
	case <-x.user.idle:
		return true
	default:
		return false
	}
}

// leave has the device's streams use no room any more: the device is closed.
func (r *rooms) leave() {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, x := range r.all {
		if x.user != nil {
			x.user.leave()
		}
	}
	r.all = nil
}

// held reports whether streams have places to pass.
func (r *rooms) held() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return slices.ContainsFunc(r.all, func(x *room) bool { return !x.free() })
}

// A carrier is a stream of the driver, which places are in.
type carrier interface {
	device.Stream
	// enqueue gives it a kernel.
	enqueue(l gpukernels.Launch) error
	// waitFor is WaitValue. forge, if it is not nil, is called before Close of the stream stores
	// the value to the word.
	waitFor(word mem.Memory, v uint64, forge func()) error
	// idle returns a channel that is closed when Close has seen all work of the stream end; nil if
	// it does not look.
	idle() <-chan struct{}
}

// reserved is the stream of places.
type reserved struct {
	v     *Device
	room  *room
	order device.Places
	base  uint64 // the number before that of the first place
	ended device.Event
	idle  <-chan struct{} // of the carrier

	mu     sync.Mutex
	left   *uint64 // the number of the last place that was done, when r left the room; nil: it is there
	given  int     // places that the carrier may do
	open   bool    // the next one has work
	closed bool    // it takes no more
}

// Reserves implements device.Reserver.
func (v *Device) Reserves() bool { return !v.blocking }

// Reserve implements device.Reserver.
func (v *Device) Reserve(s device.Stream, p device.Places) (device.Stream, error) {
	c, ok := s.(carrier)
	switch {
	case !ok:
		return nil, fmt.Errorf("cuda: %s: places in a stream of another package: %w", v.loc, errors.ErrUnsupported)
	case p.N < 1 || p.Bytes < 0 || p.Op != 0 && !kernels.Supported(p.Op, p.DType):
		return nil, fmt.Errorf("cuda: %s: %d places for %d bytes, %v of %v: %w", v.loc, p.N, p.Bytes, p.Op, p.DType,
			device.ErrPlaces)
	}
	if err := v.open(); err != nil {
		return nil, err
	}
	if b, ok := s.(borrowed); ok {
		if err := b.accept(); err != nil {
			return nil, err
		}
	}
	r := &reserved{v: v, order: p, idle: c.idle()}
	if err := v.rooms.take(r); err != nil {
		return nil, err
	}
	clear(r.room.host.Bytes())
	if err := r.reserve(c); err != nil {
		r.Close() // the carrier passes what it was given
		// The room is free behind that, or when a stream that takes no more is closed.
		_ = c.WriteValue(r.room.words[1], r.base+uint64(p.N))
		return nil, err
	}
	return r, nil
}

// reserve gives the carrier the places.
func (r *reserved) reserve(c carrier) error {
	if err := c.WriteValue(r.room.words[1], r.base); err != nil {
		return err
	}
	done, err := r.v.word(r.room.words[1], r.base)
	if err != nil {
		return err
	}
	for i := range r.order.N {
		number := r.base + uint64(i) + 1
		host, there := r.place(r.room.host, i), r.place(r.room.device, i)
		launches := gpukernels.Placed(r.order.Op, r.order.DType, there.Address(), uint64(r.order.Bytes), r.v.info.SMs,
			done, number)
		if err := c.waitFor(r.room.words[0], number, r.forge); err != nil {
			return err
		}
		if err := c.Copy(there, host); err != nil {
			return err
		}
		for _, l := range launches {
			if err := c.enqueue(l); err != nil {
				return err
			}
		}
	}
	r.ended, err = c.Record()
	return err
}

// place returns the memory of a place.
func (r *reserved) place(m mem.Memory, i int) mem.Memory {
	return m.Slice(i*int(gpukernels.PlaceSize), int(gpukernels.PlaceSize))
}

// leave has r use the room no more. The carrier has passed its places, or was closed, and its work
// has ended, or the device is closed.
func (r *reserved) leave() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.closeLocked()
	done := r.room.words[1].Word(0).Load()
	r.left = &done
}

// forge says that the carrier is closed, and passes all places.
func (r *reserved) forge() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.closeLocked()
}

// closeLocked has the places keep what they have, but for work that was not given to the carrier.
func (r *reserved) closeLocked() {
	if r.open {
		*r.nowLocked() = gpukernels.Place{}
	}
	r.closed, r.open = true, false
}

// flushLocked gives the carrier the place that has work.
func (r *reserved) flushLocked() {
	if r.open {
		r.open = false
		r.given++
		r.room.words[0].Word(0).Store(r.base + uint64(r.given))
	}
}

// nextLocked returns the next place, which is empty.
func (r *reserved) nextLocked() (*gpukernels.Place, error) {
	if r.closed {
		return nil, fmt.Errorf("cuda: %s: %w", r.v.loc, device.ErrClosed)
	}
	r.flushLocked()
	if r.given == r.order.N {
		return nil, fmt.Errorf("cuda: %s: all %d places have work: %w", r.v.loc, r.given, device.ErrPlaces)
	}
	return r.nowLocked(), nil
}

// nowLocked returns the first place that the carrier may not do.
func (r *reserved) nowLocked() *gpukernels.Place {
	return gpukernels.PlaceAt(r.place(r.room.host, r.given).Bytes())
}

// Copy implements device.Stream.
func (r *reserved) Copy(dst, src mem.Memory) error {
	at, err := r.v.direct(dst, src)
	if err != nil {
		return err
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if dst.Len() == 0 || dst == src || r.open && r.nowLocked().Copy(at[0], at[1], uint64(dst.Len())) {
		return nil
	}
	p, err := r.nextLocked()
	if err != nil {
		return err
	}
	r.open = p.Copy(at[0], at[1], uint64(dst.Len()))
	return nil
}

// Reduce implements device.Stream.
func (r *reserved) Reduce(op kernels.Op, dt kernels.DType, dst mem.Memory, srcs []mem.Memory, divisor int) error {
	from, err := r.v.reducible(op, dt, dst, srcs, divisor)
	if err != nil {
		return err
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	p, err := r.nextLocked()
	if err != nil {
		return err
	}
	if r.order.Op == 0 || !gpukernels.SamePlace(op, dt, r.order.Op, r.order.DType) {
		return fmt.Errorf("cuda: %s: %v of %v in a place for %v of %v: %w", r.v.loc, op, dt, r.order.Op, r.order.DType,
			device.ErrPlaces)
	}
	if err := p.Reduce(op, dt, dst.Address(), from, uint64(dst.Len()), divisor); err != nil {
		return fmt.Errorf("cuda: %s: %w: %w", r.v.loc, err, device.ErrPlaces)
	}
	r.open = true
	return nil
}

// WaitValue implements device.Stream. It is refused: the host waits instead.
func (r *reserved) WaitValue(mem.Memory, uint64) error {
	return fmt.Errorf("cuda: %s: waiting for a word in a place: %w", r.v.loc, device.ErrPlaces)
}

// WriteValue implements device.Stream.
func (r *reserved) WriteValue(word mem.Memory, n uint64) error {
	at, err := r.v.word(word, n)
	if err != nil {
		return err
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if !r.open {
		if _, err := r.nextLocked(); err != nil {
			return err
		}
		r.open = true
	}
	r.nowLocked().Write(at, n)
	r.flushLocked()
	return nil
}

// Record implements device.Stream.
func (r *reserved) Record() (device.Event, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.flushLocked()
	return &placeEvent{r: r, number: r.base + uint64(r.given)}, nil
}

// Close implements device.Stream. It does not wait. Any goroutine may call it.
func (r *reserved) Close() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.closeLocked()
	if r.left != nil {
		return nil
	}
	raise(r.room.words[0].Word(0), r.base+uint64(r.order.N))
	return nil
}

// raise has a word become v, unless it is larger.
func raise(word *atomic.Uint64, v uint64) {
	for now := word.Load(); now < v && !word.CompareAndSwap(now, v); now = word.Load() {
	}
}

// A placeEvent is done when its place is, or the carrier has failed.
type placeEvent struct {
	r      *reserved
	number uint64
}

func (e *placeEvent) reached() bool {
	e.r.mu.Lock()
	defer e.r.mu.Unlock()
	if e.r.left != nil { // others use the word
		return *e.r.left >= e.number
	}
	return e.r.room.words[1].Word(0).Load() >= e.number
}

// Done implements device.Event.
func (e *placeEvent) Done() bool { return e.reached() || e.r.ended.Done() }

// Wait implements device.Event.
func (e *placeEvent) Wait(ctx context.Context) error {
	if err := await(ctx, e); err != nil {
		return err
	}
	if e.reached() {
		return nil
	}
	return e.r.ended.Wait(ctx)
}
