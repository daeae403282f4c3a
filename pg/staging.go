package pg

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"time"

	"tutti/device"
	"tutti/mem"
)

// defaultStagingLimit is Config.StagingLimit's default.
const defaultStagingLimit = 1 << 30

// stagingIdle is how long the memory of a staging buffer that no operation uses is kept, at least.
const stagingIdle = 10 * time.Second

// errStagingFull says that there is no room for another staging buffer.
var errStagingFull = errors.New("no room for a staging buffer")

// staging is the host memory that operations on the memory of devices go through, for all groups
// of a rank: staging buffers, which are used again. Its methods may be called by any goroutine.
type staging struct {
	limit   int // bytes of buffers at a device
	discard func(b *stagingBuffer)

	mu     sync.Mutex
	pools  map[Location]*stagingPool
	closed bool
}

type stagingPool struct {
	buffers []*stagingBuffer
	bytes   int
	sweeps  bool // a timer looks for those that nothing uses
}

// A stagingBuffer is host memory with three words, for one operation at a time.
type stagingBuffer struct {
	words []mem.Memory
	host  mem.Memory
	uses  uint64       // the value of all words after the latest use
	busy  atomic.Bool  // an operation uses the memory
	left  device.Event // if it is not nil, the stream has passed the latest operation when this is done
	seen  uint64       // uses at the latest look of the timer
	free  func() error
}

// Words of a staging buffer.
const (
	wordArrived = iota
	wordOver
	wordPassed
	bufferWords
)

// vacant reports whether the latest operation is over, and the stream has passed it.
func (b *stagingBuffer) vacant() bool {
	switch {
	case b.busy.Load():
		return false
	case b.left == nil:
		return b.words[wordPassed].Word(0).Load() >= b.uses
	}
	return b.left.Done() && b.left.Wait(context.Background()) == nil
}

// bufferUnit is the smallest size of a staging buffer's memory. Sizes are powers of two.
const bufferUnit = 64 << 10

// take returns a staging buffer at d with room for n bytes, which is busy. If the buffers would
// have more than the limit together, the error is errStagingFull, unless beyond says that the
// operation must not wait.
func (s *staging) take(d device.Device, n int, beyond bool) (*stagingBuffer, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return nil, ErrClosed
	}
	loc := d.Location()
	p := s.pools[loc]
	if p == nil {
		p = &stagingPool{}
		if s.pools == nil {
			s.pools = map[Location]*stagingPool{}
		}
		s.pools[loc] = p
	}
	for _, b := range p.buffers {
		if b.vacant() && b.host.Len() >= n && b.host.Len() <= max(4*n, bufferUnit) {
			b.busy.Store(true)
			b.left = nil
			return b, nil
		}
	}
	size := bufferUnit
	for size < n {
		size *= 2
	}
	if p.bytes+size > s.limit { // of another size than is needed now
		s.dropLocked(p, func(b *stagingBuffer) bool { return p.bytes+size > s.limit })
		if p.bytes+size > s.limit && !beyond {
			return nil, errStagingFull
		}
	}
	b, err := newStagingBuffer(d, size)
	if err != nil {
		return nil, err
	}
	b.busy.Store(true)
	p.buffers = append(p.buffers, b)
	p.bytes += size
	if !p.sweeps {
		p.sweeps = true
		time.AfterFunc(stagingIdle, func() { s.sweep(p) })
	}
	return b, nil
}

func newStagingBuffer(d device.Device, size int) (*stagingBuffer, error) {
	words, free, err := device.Words(d, bufferWords)
	if err != nil {
		return nil, err
	}
	b := &stagingBuffer{words: words, free: free}
	if a, ok := d.(device.HostAllocator); !ok {
		b.host = mem.Host(make([]byte, size), mem.Anywhere)
	} else if b.host, err = a.AllocHost(size); err != nil {
		return nil, errors.Join(err, free())
	} else {
		b.free = func() error { return errors.Join(free(), a.FreeHost(b.host)) }
	}
	return b, nil
}

// dropLocked frees the vacant buffers of which which is true.
func (s *staging) dropLocked(p *stagingPool, which func(b *stagingBuffer) bool) {
	kept := p.buffers[:0]
	for _, b := range p.buffers {
		if !b.vacant() || !which(b) {
			kept = append(kept, b)
			continue
		}
		p.bytes -= b.host.Len()
		s.discard(b)
	}
	clear(p.buffers[len(kept):])
	p.buffers = kept
}

// sweep frees the buffers that were not used since the latest sweep.
func (s *staging) sweep(p *stagingPool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return
	}
	s.dropLocked(p, func(b *stagingBuffer) bool {
		idle := b.seen == b.uses
		b.seen = b.uses
		return idle
	})
	if p.sweeps = len(p.buffers) > 0; p.sweeps {
		time.AfterFunc(stagingIdle, func() { s.sweep(p) })
	}
}

// close frees everything after the last operation. What a stream of the caller has not passed yet
// remains until the device is closed.
func (s *staging) close() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.closed = true
	for _, p := range s.pools {
		s.dropLocked(p, func(*stagingBuffer) bool { return true })
	}
}

// discard frees the memory of a staging buffer.
func (j *job) discard(b *stagingBuffer) {
	if err := b.free(); err != nil {
		j.log.Warn("host memory of a device is not freed", "err", err)
	}
}

// board begins the visit of a collective. A started one for which there is no room waits until
// earlier operations of the group are over, and their streams have passed them, at most until ctx
// ends and for limit, if that is not 0. The group's first operation does not wait: ranks may come
// to the operations of several groups in different orders, and the first of each has to go on. Nor
// does one that will fail in its turn because the group has ended.
func (g *Group) board(ctx context.Context, limit time.Duration, o *stay, waits bool) (v *visit, err error) {
	try := func() bool {
		p := g.job.proxy
		p.Lock()
		beyond := waits || g.line.works == 0 || g.halted() != nil
		p.Unlock()
		v, err = g.devices.visit(o, beyond)
		return !errors.Is(err, errStagingFull)
	}
	if try() {
		return v, err
	}
	ctx, cancel := limited(ctx, limit)
	defer cancel()
	began := time.Now()
	late := g.hold(ctx, nil, func() (bool, error) { return try(), nil })
	switch {
	case late == nil:
		return v, err
	case g.closed.Load():
		return nil, ErrClosed
	case late != ctx.Err():
		return nil, late
	}
	return nil, &TimeoutError{Call: o.call + ", for which there was no room in the host memory of operations on " +
		"devices (Config.StagingLimit),", After: time.Since(began), Reporter: g.rank, in: g.in, Err: late}
}
