//go:build cgo && linux

package cuda

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math"
	"sync"
	"sync/atomic"
	"time"

	"tutti/device"
	"tutti/internal/backoff"
	gpukernels "tutti/kernels/cuda"
	"tutti/mem"
)

// exchange is a device.Exchange: one kernel a call.
type exchange struct {
	v         *Device
	inbox     *inbox
	others    []*inbox // that Connect has found in this process
	connected bool     // other ranks may store into the inbox
	apart     bool     // some of them are other processes
	packets   gpukernels.Packets

	mu       sync.Mutex
	calls    uint64        // that streams were given
	latest   device.Stream // that was given one
	freed    bool          // it takes no calls
	recorded bool          // a stream has recorded a call
	// It is not known when streams stop using the words: one was closed while it waited for the
	// number of calls that have ended, or has failed.
	unsure atomic.Bool

	words words
}

// The words of an exchange are host memory that its kernels use: see gpukernels.Packets. The lock
// is held for moments only. exchange.mu is held while a stream is given a call, which may wait
// until the exchange is stopped.
type words struct {
	mu    sync.Mutex
	m     mem.Memory // empty: it was freed, and what Failure returns is kept
	why   *device.ExchangeError
	again bool
}

// NewExchange implements device.Exchanger.
func (v *Device) NewExchange(ctx context.Context, rank, ranks int) (device.Exchange, error) {
	if rank < 0 || rank >= ranks || ranks < 2 || ranks > device.MaxExchangeRanks {
		return nil, fmt.Errorf("cuda: %s: rank %d of %d in an exchange, want one of 2 to %d ranks: %w", v.loc, rank,
			ranks, device.MaxExchangeRanks, errors.ErrUnsupported)
	}
	if v.blocking {
		return nil, fmt.Errorf("cuda: %s: CUDA_LAUNCH_BLOCKING is set, so no kernel can wait for one of another "+
			"rank: %w", v.loc, errors.ErrUnsupported)
	}
	x := &exchange{v: v, packets: gpukernels.Packets{Rank: rank, Inboxes: make([]uint64, ranks)}}
	m, err := v.alloc(gpukernels.InboxBytes(ranks), true)
	if err != nil {
		return nil, err
	}
	end := func() error { return nil }
	words, err := v.AllocHost(gpukernels.PacketWords * mem.WordSize)
	if err == nil {
		clear(words.Bytes())
		x.packets.Words, _, err = v.reach(words)
	}
	if err == nil {
		end, err = v.zero(ctx, m)
	}
	if err != nil {
		v.behind(func() error {
			if err := end(); err != nil { // Close frees it
				return err
			}
			return v.freeUnused(m)
		})
		if words.Len() > 0 {
			err = errors.Join(err, v.FreeHost(words))
		}
		return nil, err
	}
	x.words.m = words
	v.mu.Lock()
	v.exchanges[x] = struct{}{}
	v.mu.Unlock()
	x.inbox = inboxes.add(v, m)
	x.packets.Inboxes[rank] = m.Address()
	return x, nil
}

// zero clears memory of the device. With an error, work on the memory may go on until end has
// returned nil.
func (v *Device) zero(ctx context.Context, m mem.Memory) (end func() error, err error) {
	end = func() error { return nil }
	zeros, err := v.AllocHost(min(m.Len(), largestBlock))
	if err != nil {
		return end, err
	}
	clear(zeros.Bytes())
	s, err := v.Stream()
	if err != nil {
		return end, errors.Join(err, v.FreeHost(zeros))
	}
	end = sync.OnceValue(func() error { return first([]error{s.Close(), v.FreeHost(zeros)}) })
	for at := 0; at < m.Len() && err == nil; at += zeros.Len() {
		n := min(zeros.Len(), m.Len()-at)
		err = s.Copy(m.Slice(at, n), zeros.Slice(0, n))
	}
	var e device.Event
	if err == nil {
		e, err = s.Record()
	}
	if err == nil {
		err = e.Wait(ctx)
	}
	if err == nil {
		err = end()
	}
	return end, err
}

// Inbox implements device.Exchange.
func (x *exchange) Inbox() (key []byte, offset uint64, err error) { return x.v.Share(x.inbox.m) }

// Connect implements device.Exchange. Processes that share a GPU take turns on it, so that a kernel
// that waits for another process's would hold it up.
func (x *exchange) Connect(others []device.Shared, offsets []uint64) error {
	for rank, s := range others {
		if rank == x.packets.Rank {
			continue
		}
		if other(s) && s.Path() == sameGPU {
			return fmt.Errorf("cuda: rank %d is another process on %s, which runs the kernels of one process at a "+
				"time: %w", rank, x.v.loc, errors.ErrUnsupported)
		}
		m, err := s.Memory(offsets[rank], x.inbox.m.Len())
		if err != nil {
			return err
		}
		x.packets.Inboxes[rank] = m.Address()
		if other(s) {
			x.apart = true
			continue
		}
		i := inboxes.take(m.Address())
		if i == nil {
			return fmt.Errorf("cuda: rank %d has freed its inbox: %w", rank, device.ErrMemory)
		}
		x.others = append(x.others, i)
	}
	x.connected = true
	return nil
}

// Do implements device.Exchange. s is a stream of the device.
func (x *exchange) Do(s device.Stream, c device.ExchangeCall, limit time.Duration) (number uint64, err error) {
	p := x.packets
	p.Limit = limit
	call := gpukernels.PacketCall{Kind: c.Kind, Op: c.Op, DType: c.DType, Root: c.Root, Count: c.Count, Parts: c.Parts}
	dst, src := c.Lengths(p.Rank)
	for _, b := range []struct {
		m    mem.Memory
		n    int
		into *uint64
	}{{c.Dst, dst, &call.Dst}, {c.Src, src, &call.Src}} {
		switch {
		case b.m.Len() < b.n:
			return 0, fmt.Errorf("cuda: %s: %v in packets with %d bytes of memory, want %d", x.v.loc, c.Kind,
				b.m.Len(), b.n)
		case b.n > 0 && b.m.Loc() != x.v.loc:
			return 0, fmt.Errorf("cuda: %s: %v in packets of memory at %q: %w", x.v.loc, c.Kind, b.m.Loc(),
				device.ErrMemory)
		case b.n > 0:
			*b.into = b.m.Address()
		}
	}
	x.mu.Lock()
	defer x.mu.Unlock()
	if x.freed {
		return 0, fmt.Errorf("cuda: %s: combining in an exchange that was freed: %w", x.v.loc, device.ErrClosed)
	}
	b, foreign := s.(borrowed)
	own, ours := s.(*stream)
	recorded := false
	switch {
	case foreign:
		if recorded, err = b.Capturing(); err != nil {
			return 0, err
		}
	case !ours:
		return 0, fmt.Errorf("cuda: %s: combining on a stream of another package: %w", x.v.loc, device.ErrMemory)
	}
	if !recorded {
		call.Number = x.calls + 1
	}
	l, err := p.Do(call)
	switch {
	case err != nil:
		return 0, fmt.Errorf("cuda: %s: %w", x.v.loc, err)
	case l.Grid == 0:
		return call.Number, nil
	case recorded: // the order is that of the graph's launches
		x.recorded = true
		return 0, x.v.launch(b.queue, l)
	case foreign:
		return call.Number, x.orderedLocked(s, func() error { return x.v.launch(b.queue, l) })
	}
	return call.Number, x.orderedLocked(s, func() error { return own.enqueue(l) })
}

// orderedLocked gives s the kernel of the next call, after that of the one before.
func (x *exchange) orderedLocked(s device.Stream, launch func() error) error {
	ended, follows := x.ended(), x.latest != nil && x.latest != s
	if follows {
		if err := x.follow(s, ended); err != nil {
			return err
		}
	}
	if err := launch(); err != nil {
		if follows { // s waits for the word, and no call says when it has
			x.unsure.Store(true)
		}
		return err
	}
	x.calls++
	x.latest = s
	if err := s.WriteValue(ended, x.calls); err != nil { // a stream that waits for it has to pass
		x.unsure.Store(true)
		x.Stop()
		ended.Word(0).Store(math.MaxInt64)
		return err
	}
	return nil
}

// follow has s wait for the latest call.
func (x *exchange) follow(s device.Stream, ended mem.Memory) error {
	if own, ok := s.(*stream); ok {
		return own.waitFor(ended, x.calls, func() { x.unsure.Store(true) })
	}
	return s.WaitValue(ended, x.calls)
}

// ended returns the word that counts the calls that have ended. With exchange.mu, before it is
// freed.
func (x *exchange) ended() mem.Memory {
	return x.words.m.Slice(gpukernels.PacketsEnded*mem.WordSize, mem.WordSize)
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
func (x *exchange) Stop() {
	w := &x.words
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.m.Len() > 0 {
		w.m.Word(0).Store(1)
	}
}

// Failure implements device.Exchange.
func (x *exchange) Failure() (why *device.ExchangeError, again bool) {
	w := &x.words
	w.mu.Lock()
	defer w.mu.Unlock()
	w.readLocked()
	again, w.again = w.again, false
	return w.why, again
}

// readLocked reads what kernels have written.
func (w *words) readLocked() {
	if w.m.Len() == 0 {
		return
	}
	if again := w.m.Word(2 * mem.WordSize); again.Load() != 0 && again.Swap(0) != 0 {
		w.again = true
	}
	if w.why != nil || w.m.Word(mem.WordSize).Load() == 0 {
		return
	}
	var all [gpukernels.PacketWords]uint64
	for i := range all {
		all[i] = w.m.Word(i * mem.WordSize).Load()
	}
	f := gpukernels.PacketFailureOf(all)
	w.why = &device.ExchangeError{Number: f.Number, Recorded: f.Recorded, Stopped: f.Reason == gpukernels.Stopped,
		Rank: f.Rank, Differs: f.Reason == gpukernels.Differs, Ours: callOf(&f.Ours), Theirs: callOf(&f.Theirs)}
}

// callOf returns what is known of a call.
func callOf(c *gpukernels.PacketCall) device.ExchangeCall {
	return device.ExchangeCall{Kind: c.Kind, Op: c.Op, DType: c.DType, Root: c.Root, Count: c.Count}
}

// Free implements device.Exchange.
func (x *exchange) Free(ctx context.Context) error {
	return x.v.during(func() error {
		x.Stop()
		pace := backoff.Backoff{Yields: yields, Nap: time.Millisecond}
		defer pace.Stop()
		for {
			switch done, err := x.over(); {
			case err != nil:
				return err
			case done:
				return x.release()
			case x.v.open() != nil: // which frees it
				return nil
			}
			if err := pace.Wait(ctx); err != nil {
				return fmt.Errorf("cuda: %s: streams have not done the work of an exchange: %w", x.v.loc, err)
			}
		}
	})
}

// over has later calls fail, and reports whether all others have ended. It does not wait for one
// that is being given to its stream.
func (x *exchange) over() (bool, error) {
	if !x.mu.TryLock() {
		return false, nil
	}
	defer x.mu.Unlock()
	x.freed = true
	switch {
	case x.words.m.Len() == 0: // it was freed before
		return true, nil
	case x.recorded:
		return false, fmt.Errorf("cuda: %s: a stream has recorded work of an exchange", x.v.loc)
	case x.ended().Word(0).Load() < x.calls:
		return false, nil
	case x.unsure.Load(): // it is set before the word is
		return false, fmt.Errorf("cuda: %s: a stream with work of an exchange was closed or has failed", x.v.loc)
	}
	return true, nil
}

// release frees the memory, which no stream of this rank uses. An inbox that other processes have
// mapped by an IPC handle stays until the device is closed: CUDA does not define what their work
// does when it is freed. One that has another handle lives until they have unmapped it.
func (x *exchange) release() error {
	m := x.takeWords()
	if m.Len() == 0 {
		return nil
	}
	x.v.mu.Lock()
	delete(x.v.exchanges, x)
	x.v.mu.Unlock()
	errs := []error{x.v.FreeHost(m)}
	for _, i := range x.others {
		errs = append(errs, inboxes.drop(i))
	}
	if !x.connected || !x.apart || offers.at(x.v.gpu, x.inbox.m.Address()) != nil {
		errs = append(errs, inboxes.drop(x.inbox))
	}
	return errors.Join(errs...)
}

// takeWords returns the words once, and an empty memory after that. The exchange takes no calls any
// more.
func (x *exchange) takeWords() (m mem.Memory) {
	x.mu.Lock()
	defer x.mu.Unlock()
	x.freed = true
	w := &x.words
	w.mu.Lock()
	defer w.mu.Unlock()
	w.readLocked()
	m, w.m = w.m, m
	return m
}

// An inbox is memory into which other ranks store. Those of this process do it at its address, so
// that it is freed when all exchanges with it are.
type inbox struct {
	v    *Device
	m    mem.Memory
	uses int // by exchanges
}

// A directory has the inboxes of this process, by address.
type directory struct {
	mu  sync.Mutex
	all map[uint64]*inbox
}

var inboxes = directory{all: map[uint64]*inbox{}}

// add adds the inbox of an exchange.
func (d *directory) add(v *Device, m mem.Memory) *inbox {
	d.mu.Lock()
	defer d.mu.Unlock()
	i := &inbox{v: v, m: m, uses: 1}
	d.all[m.Address()] = i
	return i
}

// take adds a use of the inbox at an address. nil: there is none, or not any more.
func (d *directory) take(address uint64) *inbox {
	d.mu.Lock()
	defer d.mu.Unlock()
	i := d.all[address]
	if i != nil {
		i.uses++
	}
	return i
}

// drop ends a use. The last one frees the memory, unless its device was closed.
func (d *directory) drop(i *inbox) error {
	d.mu.Lock()
	i.uses--
	last := i.uses == 0
	if last && d.all[i.m.Address()] == i {
		delete(d.all, i.m.Address())
	}
	d.mu.Unlock()
	if !last {
		return nil
	}
	return i.v.during(func() error { return i.v.freeUnused(i.m) })
}

// forget says that a device frees its inboxes.
func (d *directory) forget(v *Device) {
	d.mu.Lock()
	defer d.mu.Unlock()
	maps.DeleteFunc(d.all, func(_ uint64, i *inbox) bool { return i.v == v })
}
