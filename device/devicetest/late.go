// Package devicetest tests devices and code that runs on them. It has a device that exercises all
// freedom of the contract (delays, undefined memory), and a suite of tests for devices.
package devicetest

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"runtime"
	"slices"
	"sync"
	"time"
	"unsafe"

	"tutti/device"
	"tutti/internal/ident"
	"tutti/kernels"
	"tutti/mem"
)

// Late is a device whose memory is not host memory, and whose streams are goroutines that execute
// work with delays. Memory contains garbage until something was written to it, and while a stream
// writes it. Sources are read when a piece of work begins or when it ends.
type Late struct {
	loc   mem.Location
	pause time.Duration

	mu     sync.Mutex
	id     uint64 // in keys; 0: the memory is not lent
	rng    *rand.Rand
	noise  [8 << 10]byte // what spoil copies from: the race detector checks a copy as a whole
	next   uint64        // address
	blocks []block
	host   map[*byte]int // memory of AllocHost
}

type block struct {
	at  uint64
	mem []byte
}

// firstAddress begins the addresses of a device: neither Go's heap nor a program is there.
const firstAddress = 1 << 44

// NewLate makes a device at loc, "cuda:0" or the like. Its choices depend on seed and on how its
// goroutines run. Sometimes it pauses, for up to pause.
func NewLate(loc mem.Location, seed uint64, pause time.Duration) *Late {
	d := &Late{loc: loc, pause: pause, rng: rand.New(rand.NewPCG(seed, 0x1a7e)), next: firstAddress}
	rand.NewChaCha8([32]byte{byte(seed)}).Read(d.noise[:])
	return d
}

// Location implements device.Device.
func (d *Late) Location() mem.Location { return d.loc }

// Alloc implements device.Device. Allocations are not adjacent.
func (d *Late) Alloc(n int) (mem.Memory, error) {
	if n < 0 {
		return mem.Memory{}, fmt.Errorf("late: allocating %d bytes: %w", n, device.ErrMemory)
	}
	if err := mem.Fits(n); err != nil {
		return mem.Memory{}, fmt.Errorf("late: allocating %d bytes: %w", n, err)
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	b := block{d.next, make([]byte, n)}
	d.next += uint64(n+4095)&^4095 + 4096
	d.spoil(b.mem)
	d.blocks = append(d.blocks, b)
	return mem.Device(b.at, n, d.loc), nil
}

// Free implements device.Device.
func (d *Late) Free(m mem.Memory) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	for i, b := range d.blocks {
		if m.Loc() == d.loc && b.at == m.Address() && len(b.mem) == m.Len() {
			d.spoil(b.mem)
			d.blocks = append(d.blocks[:i], d.blocks[i+1:]...)
			return nil
		}
	}
	return fmt.Errorf("late: freeing %d bytes at %q that were not allocated so: %w", m.Len(), m.Loc(), device.ErrMemory)
}

// Lend has ranks of this process load from the memory of d in place, in operations on d: see
// device.Sharer. Loads of a failed operation may race with what the program does afterwards, which
// the race detector reports.
func (d *Late) Lend() {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.id = ident.New()
}

// Share implements device.Sharer.
func (d *Late) Share(m mem.Memory) (key []byte, offset uint64, err error) {
	if _, err := d.find(m); err != nil {
		return nil, 0, err
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, b := range d.blocks {
		if d.id != 0 && m.Address() >= b.at && m.Address() < b.at+uint64(len(b.mem)) {
			for _, n := range []uint64{d.id, b.at, uint64(len(b.mem))} {
				key = binary.LittleEndian.AppendUint64(key, n)
			}
			return key, m.Address() - b.at, nil
		}
	}
	return nil, 0, fmt.Errorf("late: %s does not lend its memory: %w", d.loc, errors.ErrUnsupported)
}

// Import implements device.Sharer, for memory of d alone.
func (d *Late) Import(_ uint64, key []byte) (device.Shared, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if len(key) != 24 || d.id == 0 || binary.LittleEndian.Uint64(key) != d.id {
		return nil, fmt.Errorf("late: memory of another device than %s: %w", d.loc, errors.ErrUnsupported)
	}
	return &lent{d, binary.LittleEndian.Uint64(key[8:]), binary.LittleEndian.Uint64(key[16:])}, nil
}

// Forget implements device.Sharer.
func (d *Late) Forget(uint64) {}

// Lasts implements device.Sharer.
func (d *Late) Lasts(key []byte) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	return len(key) == 24 && slices.ContainsFunc(d.blocks, func(b block) bool {
		return b.at == binary.LittleEndian.Uint64(key[8:])
	})
}

// lent is an allocation of d, for another rank.
type lent struct {
	d     *Late
	at, n uint64
}

func (l *lent) Memory(offset uint64, n int) (mem.Memory, error) {
	if n < 0 || offset > l.n || uint64(n) > l.n-offset {
		return mem.Memory{}, fmt.Errorf("late: %d bytes from %d on of %d: %w", n, offset, l.n, device.ErrMemory)
	}
	return mem.Device(l.at+offset, n, l.d.loc), nil
}

func (l *lent) Path() string       { return "same device" }
func (l *lent) Release(bool) error { return nil }

// AllocHost implements device.HostAllocator.
func (d *Late) AllocHost(n int) (mem.Memory, error) {
	if n < 1 {
		return mem.Memory{}, fmt.Errorf("late: allocating %d bytes of host memory: %w", n, device.ErrMemory)
	}
	b := make([]byte, n)
	d.mu.Lock()
	defer d.mu.Unlock()
	d.spoil(b)
	if d.host == nil {
		d.host = map[*byte]int{}
	}
	d.host[unsafe.SliceData(b)] = n
	return mem.Host(b, mem.Anywhere), nil
}

// FreeHost implements device.HostAllocator.
func (d *Late) FreeHost(m mem.Memory) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	at := unsafe.SliceData(m.Bytes())
	if n, ok := d.host[at]; !ok || n != m.Len() {
		return fmt.Errorf("late: freeing %d bytes of host memory that were not allocated so: %w", m.Len(),
			device.ErrMemory)
	}
	d.spoil(m.Bytes())
	delete(d.host, at)
	return nil
}

// Allocated returns how many allocations there are of device memory and of host memory.
func (d *Late) Allocated() (blocks, host int) {
	d.mu.Lock()
	defer d.mu.Unlock()
	return len(d.blocks), len(d.host)
}

// Bytes returns the contents of memory of d as a network adapter sees it: without synchronization
// with streams.
func (d *Late) Bytes(m mem.Memory) []byte {
	b, err := d.find(m)
	if err != nil {
		panic(err)
	}
	return b
}

func (d *Late) find(m mem.Memory) ([]byte, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if m.Loc() == d.loc {
		for _, b := range d.blocks {
			if off := m.Address() - b.at; m.Address() >= b.at && off <= uint64(len(b.mem)) &&
				uint64(m.Len()) <= uint64(len(b.mem))-off {
				return b.mem[off : off+uint64(m.Len()) : off+uint64(m.Len())], nil
			}
		}
	}
	return nil, fmt.Errorf("late: %d bytes at %q that are not allocated: %w", m.Len(), m.Loc(), device.ErrMemory)
}

// spoil fills b with garbage. With the lock.
func (d *Late) spoil(b []byte) {
	for len(b) > 0 {
		b = b[copy(b, d.noise[d.rng.IntN(len(d.noise)/2):]):]
	}
}

// choose returns a number below n.
func (d *Late) choose(n int) int {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.rng.IntN(n)
}

// tarry sometimes pauses.
func (d *Late) tarry() {
	for range d.choose(4) {
		runtime.Gosched()
	}
	if d.pause > 0 && d.choose(8) == 0 {
		time.Sleep(time.Duration(d.choose(int(d.pause))))
	}
}

// Stream implements device.Device.
func (d *Late) Stream() (device.Stream, error) {
	s := &stream{d: d, more: make(chan struct{}, 1), closing: make(chan struct{}), ended: make(chan struct{})}
	go s.run()
	return s, nil
}

type stream struct {
	d       *Late
	more    chan struct{} // signalled when queue may be non-empty
	closing chan struct{} // closed by Close
	ended   chan struct{} // closed when the goroutine has ended

	mu     sync.Mutex
	queue  []func()
	closed bool
}

func (s *stream) run() {
	defer close(s.ended)
	for {
		s.mu.Lock()
		var f func()
		if len(s.queue) > 0 && !s.closed {
			f = s.queue[0]
			s.queue = s.queue[1:]
		}
		closed := s.closed
		s.mu.Unlock()
		switch {
		case closed:
			return
		case f != nil:
			s.d.tarry()
			f()
			continue
		}
		select {
		case <-s.more:
		case <-s.closing:
		}
	}
}

func (s *stream) take(f func()) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return fmt.Errorf("late: %w", device.ErrClosed)
	}
	s.queue = append(s.queue, f)
	select {
	case s.more <- struct{}{}:
	default:
	}
	return nil
}

// reach is find for memory of a copy, which may be the host's.
func (d *Late) reach(m mem.Memory) ([]byte, error) {
	if m.Loc().Host() {
		return m.Bytes(), nil
	}
	return d.find(m)
}

// work returns what computes dst from srcs by f. find finds their bytes.
func (d *Late) work(find func(mem.Memory) ([]byte, error), dst mem.Memory, srcs []mem.Memory,
	f func(dst []byte, srcs [][]byte)) (func(), error) {
	to, err := find(dst)
	if err != nil {
		return nil, err
	}
	from := make([][]byte, len(srcs))
	early := false // f has to read the sources first, because it overwrites them
	for i, m := range srcs {
		if from[i], err = find(m); err != nil {
			return nil, err
		}
		if m.Len() != dst.Len() {
			return nil, fmt.Errorf("late: %d bytes where the destination has %d: %w", m.Len(), dst.Len(),
				device.ErrMemory)
		}
		early = early || unsafe.SliceData(from[i]) == unsafe.SliceData(to)
	}
	return func() {
		if early || d.choose(2) == 0 {
			for i, b := range from {
				from[i] = append([]byte(nil), b...)
			}
		}
		d.mu.Lock()
		d.spoil(to)
		d.mu.Unlock()
		d.tarry()
		f(to, from)
	}, nil
}

// copying returns what copies src to dst.
func (d *Late) copying(find func(mem.Memory) ([]byte, error), dst, src mem.Memory) (func(), error) {
	return d.work(find, dst, []mem.Memory{src}, func(dst []byte, srcs [][]byte) { copy(dst, srcs[0]) })
}

// reducing returns what reduces srcs to dst.
func (d *Late) reducing(op kernels.Op, dt kernels.DType, dst mem.Memory, srcs []mem.Memory,
	divisor int) (func(), error) {
	if err := device.Reducible(op, dt, dst, srcs, divisor); err != nil {
		return nil, err
	}
	return d.work(d.find, dst, srcs, func(dst []byte, srcs [][]byte) {
		if err := Fold(op, dt, dst, srcs, divisor); err != nil {
			panic(err) // the arguments were checked
		}
	})
}

func (s *stream) Copy(dst, src mem.Memory) error {
	f, err := s.d.copying(s.d.reach, dst, src)
	if err != nil {
		return err
	}
	return s.take(f)
}

func (s *stream) Reduce(op kernels.Op, dt kernels.DType, dst mem.Memory, srcs []mem.Memory, divisor int) error {
	f, err := s.d.reducing(op, dt, dst, srcs, divisor)
	if err != nil {
		return err
	}
	return s.take(f)
}

// checkWord checks that m is a word.
func checkWord(m mem.Memory) error {
	if !m.Loc().Host() || m.Len() != mem.WordSize {
		return fmt.Errorf("late: %d bytes at %q are no word: %w", m.Len(), m.Loc(), device.ErrMemory)
	}
	return nil
}

// until waits for done, or until the stream is closed.
func (s *stream) until(done func() bool) {
	for n := 0; !done(); n++ {
		select {
		case <-s.closing:
			return
		default:
		}
		if runtime.Gosched(); n > 100 {
			time.Sleep(20 * time.Microsecond)
		}
	}
}

func (s *stream) WaitValue(word mem.Memory, v uint64) error {
	if err := checkWord(word); err != nil {
		return err
	}
	return s.take(func() { s.until(func() bool { return word.Word(0).Load() >= v }) })
}

func (s *stream) WriteValue(word mem.Memory, v uint64) error {
	if err := checkWord(word); err != nil {
		return err
	}
	return s.take(func() { word.Word(0).Store(v) })
}

func (s *stream) Record() (device.Event, error) {
	e := &event{s: s, over: make(chan struct{})}
	if err := s.take(func() { close(e.over) }); err != nil {
		return nil, err
	}
	return e, nil
}

func (s *stream) Close() error {
	s.mu.Lock()
	if !s.closed {
		s.closed, s.queue = true, nil
		close(s.closing)
	}
	s.mu.Unlock()
	<-s.ended
	return nil
}

type event struct {
	s    *stream
	over chan struct{}
}

func (e *event) Done() bool {
	select {
	case <-e.over:
	case <-e.s.ended:
	default:
		return false
	}
	return true
}

func (e *event) Wait(ctx context.Context) error {
	select {
	case <-e.over:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	case <-e.s.ended:
	}
	select {
	case <-e.over:
		return nil
	default:
		return fmt.Errorf("late: %w", device.ErrClosed)
	}
}
