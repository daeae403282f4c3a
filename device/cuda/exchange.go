//go:build cgo && linux

package cuda

import (
	"context"
	"errors"
	"fmt"
	"math"
	"sync"
	"time"

	"tutti/device"
	"tutti/kernels"
	gpukernels "tutti/kernels/cuda"
	"tutti/mem"
)

// exchange is a device.Exchange: one kernel a call.
type exchange struct {
	v       *Device
	inbox   mem.Memory
	words   mem.Memory // gpukernels.PacketWords, and one that counts the calls that have ended
	packets gpukernels.Packets

	mu     sync.Mutex
	calls  uint64        // that streams were given
	latest device.Stream // that was given one
}

// NewExchange implements device.Exchanger.
func (v *Device) NewExchange(rank, ranks int) (device.Exchange, error) {
	if rank < 0 || rank >= ranks || ranks < 2 || ranks > device.MaxExchangeRanks {
		return nil, fmt.Errorf("cuda: %s: rank %d of %d in an exchange, want one of 2 to %d ranks: %w", v.loc, rank,
			ranks, device.MaxExchangeRanks, errors.ErrUnsupported)
	}
	x := &exchange{v: v, packets: gpukernels.Packets{Rank: rank, Inboxes: make([]uint64, ranks)}}
	var err error
	if x.inbox, err = v.alloc(gpukernels.InboxBytes(ranks), true); err != nil {
		return nil, err
	}
	if err = x.prepare(); err != nil {
		return nil, errors.Join(err, v.Free(x.inbox))
	}
	x.packets.Inboxes[rank] = x.inbox.Address()
	return x, nil
}

// prepare clears the exchange's memory.
func (x *exchange) prepare() (err error) {
	v := x.v
	if x.words, err = v.AllocHost((gpukernels.PacketWords + 1) * mem.WordSize); err != nil {
		return err
	}
	clear(x.words.Bytes())
	if x.packets.Words, _, err = v.reach(x.words); err != nil {
		return err
	}
	zeros, err := v.AllocHost(min(x.inbox.Len(), largestBlock))
	if err != nil {
		return err
	}
	clear(zeros.Bytes())
	s, err := v.Stream()
	if err != nil {
		return errors.Join(err, v.FreeHost(zeros))
	}
	for at := 0; at < x.inbox.Len() && err == nil; at += zeros.Len() {
		n := min(zeros.Len(), x.inbox.Len()-at)
		err = s.Copy(x.inbox.Slice(at, n), zeros.Slice(0, n))
	}
	if err == nil {
		var e device.Event
		if e, err = s.Record(); err == nil {
			err = e.Wait(context.Background())
		}
	}
	return first([]error{err, s.Close(), v.FreeHost(zeros)})
}

// Inbox implements device.Exchange.
func (x *exchange) Inbox() (key []byte, offset uint64, err error) { return x.v.Share(x.inbox) }

// Free implements device.Exchange.
func (x *exchange) Free() error { return errors.Join(x.v.Free(x.inbox), x.v.FreeHost(x.words)) }

// Connect implements device.Exchange. Processes that share a GPU take turns on it, so that a kernel
// that waits for another process's would hold it up.
func (x *exchange) Connect(inboxes []device.Shared, offsets []uint64) error {
	for rank, s := range inboxes {
		if rank == x.packets.Rank {
			continue
		}
		if _, other := s.(*imported); other && s.Path() == sameGPU {
			return fmt.Errorf("cuda: rank %d is another process on %s, which runs the kernels of one process at a "+
				"time: %w", rank, x.v.loc, errors.ErrUnsupported)
		}
		m, err := s.Memory(offsets[rank], x.inbox.Len())
		if err != nil {
			return err
		}
		x.packets.Inboxes[rank] = m.Address()
	}
	return nil
}

// AllReduce implements device.Exchange. s is a stream of the device.
func (x *exchange) AllReduce(s device.Stream, op kernels.Op, dt kernels.DType, dst, src mem.Memory,
	limit time.Duration) error {
	if err := same(dst, src); err != nil {
		return err
	}
	for _, m := range []mem.Memory{dst, src} {
		if m.Loc() != x.v.loc {
			return fmt.Errorf("cuda: %s: combining memory at %q: %w", x.v.loc, m.Loc(), device.ErrMemory)
		}
	}
	p := x.packets
	p.Limit = limit
	l, err := p.AllReduce(op, dt, dst.Address(), src.Address(), uint64(dst.Len()))
	if err != nil {
		return fmt.Errorf("cuda: %s: %w", x.v.loc, err)
	}
	if l.Grid == 0 {
		return nil
	}
	x.mu.Lock()
	defer x.mu.Unlock()
	switch s := s.(type) {
	case borrowed:
		captured, err := s.Capturing()
		if err != nil {
			return err
		}
		if captured { // the order is that of the graph's launches
			return x.v.launch(s.queue, l)
		}
		return x.orderedLocked(s, func() error { return x.v.launch(s.queue, l) })
	case *stream:
		return x.orderedLocked(s, func() error { return s.enqueue(l) })
	}
	return fmt.Errorf("cuda: %s: combining on a stream of another package: %w", x.v.loc, device.ErrMemory)
}

// orderedLocked gives s the kernel of the next call, after that of the one before.
func (x *exchange) orderedLocked(s device.Stream, launch func() error) error {
	ended := x.words.Slice(gpukernels.PacketWords*mem.WordSize, mem.WordSize)
	if x.latest != nil && x.latest != s {
		if err := s.WaitValue(ended, x.calls); err != nil {
			return err
		}
	}
	if err := launch(); err != nil {
		return err
	}
	x.calls++
	x.latest = s
	if err := s.WriteValue(ended, x.calls); err != nil { // a stream that waits for it has to pass
		x.Stop()
		ended.Word(0).Store(math.MaxInt64)
		return err
	}
	return nil
}

// enqueue gives the stream a kernel.
func (s *stream) enqueue(l gpukernels.Launch) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := s.acceptLocked(); err != nil {
		return err
	}
	s.giveLocked(func() error { return s.v.launch(s.queue, l) })
	return s.refused
}

// Stop implements device.Exchange.
func (x *exchange) Stop() { x.words.Word(0).Store(1) }

// Failure implements device.Exchange.
func (x *exchange) Failure() (why *device.ExchangeError, again bool) {
	again = x.words.Word(2*mem.WordSize).Swap(0) != 0
	if word := x.words.Word(mem.WordSize).Load(); word != 0 {
		f := gpukernels.PacketFailureOf(word)
		why = &device.ExchangeError{Stopped: f.Reason == gpukernels.Stopped, Rank: f.Rank,
			Differs: f.Reason == gpukernels.Differs, Op: f.Op, DType: f.DType, Count: f.Count}
	}
	return why, again
}
