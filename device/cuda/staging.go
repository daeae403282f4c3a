//go:build cgo && linux

package cuda

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"

	"tutti/device"
	"tutti/internal/backoff"
	"tutti/mem"
)

// stagingSize is the size of a stream's pinned buffers, half of it each.
const stagingSize = 256 << 10

// staging copies between device memory and host memory that is not pinned, in the order of a
// stream.
//
// A copy is a number of steps, numbered over the life of the stream, of at most half of the pinned
// memory each; step t uses half t%2. The GPU moves data between the device and the pinned memory, a
// goroutine between that and the caller's memory. Each tells the other by a word which step it has
// done last:
//
//   - To the device: the first step is empty. When the GPU has done it, the stream has come to the
//     copy. The goroutine fills a half when the GPU has done the step two before, and the GPU
//     copies it when it is filled.
//   - From the device: the GPU fills a half when the goroutine has done the step two before, and
//     waits in the end until the goroutine has emptied the last.
//
// So the goroutine touches the caller's memory between two points of the stream's order, and a copy
// finds both halves free.
type staging struct {
	buffer    [2]mem.Memory
	at        [2]uint64  // of buffer, on the device
	gpu, host mem.Memory // words: the steps that the GPU and the goroutine have done
	gpuAt     uint64     // of the words, on the device
	hostAt    uint64
	freeWords func() error
	whole     mem.Memory // both halves
	steps     uint64     // that were enqueued; with the stream's lock

	ctx     context.Context // ends the goroutine
	stop    context.CancelFunc
	more    chan struct{} // signalled when moves may be non-empty
	started sync.Once
	running sync.WaitGroup

	mu    sync.Mutex
	moves []move
	moved atomic.Uint64 // the goroutine's last step, again
}

// A move is the goroutine's part of a copy.
type move struct {
	first    uint64 // step
	dst, src []byte // the caller's memory; nil: the buffers
}

func (g *staging) init(s *stream) (err error) {
	words, free, err := device.Words(s.v, 2)
	if err != nil {
		return err
	}
	g.gpu, g.host, g.freeWords = words[0], words[1], free
	if g.whole, err = s.v.AllocHost(stagingSize); err != nil {
		return errors.Join(err, g.freeWords())
	}
	for i := range g.buffer {
		g.buffer[i] = g.whole.Slice(i*stagingSize/2, stagingSize/2)
		g.at[i], _, _ = s.v.reach(g.buffer[i]) // it is pinned
	}
	g.gpuAt, _, _ = s.v.reach(g.gpu)
	g.hostAt, _, _ = s.v.reach(g.host)
	g.ctx, g.stop = context.WithCancel(context.Background())
	g.more = make(chan struct{}, 1)
	return nil
}

// end ends the goroutine, after what it moves at the moment.
func (g *staging) end() {
	g.stop()
	g.running.Wait()
}

// free frees what init has allocated.
func (g *staging) free(v *Device) error {
	g.stop()
	return errors.Join(g.freeWords(), v.FreeHost(g.whole))
}

// parts returns the number of steps that move n bytes.
func parts(n int) uint64 { return uint64((n + stagingSize/2 - 1) / (stagingSize / 2)) }

// part returns the offset and the length of step i of n bytes.
func part(i uint64, n int) (off, length int) {
	off = int(i) * (stagingSize / 2)
	return off, min(stagingSize/2, n-off)
}

// give hands a move to the goroutine.
func (g *staging) give(m move) {
	g.started.Do(func() { g.running.Go(g.run) })
	g.mu.Lock()
	g.moves = append(g.moves, m)
	g.mu.Unlock()
	select {
	case g.more <- struct{}{}:
	default:
	}
}

// fromHost enqueues a copy to the device. With the stream's lock.
func (g *staging) fromHost(s *stream, to uint64, src []byte) {
	start := g.steps + 1
	g.steps += 1 + parts(len(src))
	g.give(move{first: start, src: src})
	s.writeLocked(g.gpuAt, start)
	for t := start + 1; t <= g.steps; t++ {
		off, n := part(t-start-1, len(src))
		s.waitLocked(g.host.Word(0), g.hostAt, t, nil)
		s.copyLocked(to+uint64(off), g.at[t%2], n)
		s.writeLocked(g.gpuAt, t)
	}
}

// toHost enqueues a copy from the device. With the stream's lock.
func (g *staging) toHost(s *stream, dst []byte, from uint64) {
	first := g.steps + 1
	g.steps += parts(len(dst))
	g.give(move{first: first, dst: dst})
	for t := first; t <= g.steps; t++ {
		if t >= first+2 {
			s.waitLocked(g.host.Word(0), g.hostAt, t-2, nil)
		}
		off, n := part(t-first, len(dst))
		s.copyLocked(g.at[t%2], from+uint64(off), n)
		s.writeLocked(g.gpuAt, t)
	}
	s.waitLocked(g.host.Word(0), g.hostAt, g.steps, nil)
}

// onHost enqueues a copy that the goroutine does alone, in one step. With the stream's lock.
func (g *staging) onHost(s *stream, dst, src []byte) {
	g.steps++
	g.give(move{first: g.steps, dst: dst, src: src})
	s.writeLocked(g.gpuAt, g.steps)
	s.waitLocked(g.host.Word(0), g.hostAt, g.steps, nil)
}

// run moves data until the stream ends.
func (g *staging) run() {
	for {
		g.mu.Lock()
		var m move
		if len(g.moves) > 0 {
			m = g.moves[0]
			g.moves[0] = move{}
			g.moves = g.moves[1:]
		}
		g.mu.Unlock()
		if m.first != 0 {
			if !g.do(m) {
				return
			}
			continue
		}
		select {
		case <-g.more:
		case <-g.ctx.Done():
			return
		}
	}
}

// do does one move. It returns false if the stream ends.
func (g *staging) do(m move) bool {
	switch {
	case m.src == nil:
		for i := range parts(len(m.dst)) {
			t := m.first + i
			if !g.until(t) {
				return false
			}
			off, n := part(i, len(m.dst))
			copy(m.dst[off:off+n], g.buffer[t%2].Bytes())
			g.done(t)
		}
	case m.dst == nil:
		for i := range parts(len(m.src)) {
			t := m.first + 1 + i
			if !g.until(max(m.first, t-2)) {
				return false
			}
			off, n := part(i, len(m.src))
			copy(g.buffer[t%2].Bytes(), m.src[off:off+n])
			g.done(t)
		}
	default:
		if !g.until(m.first) {
			return false
		}
		copy(m.dst, m.src)
		g.done(m.first)
	}
	return true
}

// done says that the goroutine has done a step.
func (g *staging) done(step uint64) {
	g.moved.Store(step)
	g.host.Word(0).Store(step)
}

// seen synchronizes with the steps that are done. The GPU has passed this on already, but the race
// detector does not know.
func (g *staging) seen() { g.moved.Load() }

// until waits until the GPU has done a step. It returns false if the stream ends.
func (g *staging) until(step uint64) bool {
	pace := backoff.Backoff{Yields: yields, Nap: nap}
	defer pace.Stop()
	for g.gpu.Word(0).Load() < step {
		if pace.Wait(g.ctx) != nil {
			return false
		}
	}
	return g.ctx.Err() == nil
}
