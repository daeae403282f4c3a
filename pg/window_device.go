package pg

import (
	"context"
	"errors"
	"fmt"

	"tutti/device"
	"tutti/mem"
	"tutti/p2p"
)

const (
	// inFlight is the most pieces of a put or a get that are in host memory at once.
	inFlight = 4
	// leastDirect is the least bytes that a network card is to move from or to the memory of a
	// device. It has to be given that memory each time, which takes longer than to copy less. The
	// number is a guess.
	leastDirect = 256 << 10
)

// PutBuffer is Put for a Buffer, which may be in a device's memory; offset is in bytes. The
// device's memory is read in the order of the buffer's stream, and PutBuffer waits for that:
// afterwards, with any outcome, it may change. Flush reports whether it was placed.
//
// After a failure in the middle, a part of it may have been placed; signals and Flush return an
// error, too. A network card that can read the device's memory does (GPUDirect RDMA), and PutBuffer
// waits until the data is placed, as Flush does. Otherwise data goes through pieces of host memory,
// whose size does not grow with the buffer's.
func (w *Window) PutBuffer(ctx context.Context, rank, offset int, src Buffer) error {
	return w.move(ctx, "put", rank, offset, src, true)
}

// GetBuffer is Get for a Buffer, which may be in a device's memory; offset is in bytes. The
// device's memory is written in the order of the buffer's stream, and GetBuffer waits for that:
// nothing is written after it has returned nil. Data takes the ways of PutBuffer.
func (w *Window) GetBuffer(ctx context.Context, rank, offset int, dst Buffer) error {
	return w.move(ctx, "get", rank, offset, dst, false)
}

// A carriage is a put or a get of a device's memory, in pieces.
type carriage struct {
	w            *Window
	name         string
	rank, offset int
	x            span
	reads        bool // the memory of the device, for a put
	device       device.Device
	stream       device.Stream
	piece        int
	visits       []*visit // that have begun, by piece
	given        int      // pieces that a transfer has, which ends the visit
	begun        bool     // a transfer was: a part of the data may be placed
}

// move implements PutBuffer, which reads x, and GetBuffer.
func (w *Window) move(ctx context.Context, name string, rank, offset int, x Buffer, reads bool) error {
	host, pieces := w.Get, w.getPieces
	if reads {
		host, pieces = w.Put, w.putPieces
	}
	g := w.g
	if ctx == nil {
		return noContext(name)
	}
	if err := checkBuffer(name, &x); err != nil {
		return err
	}
	if !x.onDevice() {
		return host(ctx, rank, offset, x.bytes())
	}
	c := &carriage{w: w, name: name, rank: rank, offset: offset, x: span{uintptr(x.Ptr), x.size()},
		reads: reads, piece: g.devices.piece}
	p, err := w.reach(name, rank, offset, c.x.n)
	if err != nil {
		return err
	}
	of := p.holder()
	g.job.proxy.Unlock()
	if c.device, c.stream, err = g.site(name, x.place()); err != nil {
		return err
	}
	if c.piece == 0 {
		c.piece = leastPiece
	}
	ctx, cancel := limited(ctx, g.job.timeout)
	defer cancel()
	if done, err := c.direct(ctx); done || err != nil {
		return err
	}
	if err = pieces(ctx, c); err == nil {
		err = w.same(name, rank, of)
	}
	if err != nil && reads && c.begun {
		w.tear(rank, err)
	}
	for _, v := range c.visits[c.given:] {
		v.end()
		g.settle(v)
	}
	return err
}

// same returns an error if rank has another part now, which may have got, or given, some of the
// data.
func (w *Window) same(name string, rank int, of holder) error {
	w.g.job.proxy.Lock()
	defer w.g.job.proxy.Unlock()
	switch {
	case w.closed.Load():
		return w.open()
	case w.again(rank, of) == nil:
		return w.g.rankError(rank, w.g.rank, name, errors.New("it has a new part, as a new process or by "+
			"NewWindow, and not all of the call is about that: call again"))
	}
	return nil
}

// tear is called when a put to rank's part has failed with err after a transfer had some of its
// data, perhaps one to another part.
func (w *Window) tear(rank int, err error) {
	if errors.As(err, new(*TimeoutError)) { // else a signal or Flush would seem to be the one that was late
		err = p2p.ErrCancelled
	}
	w.g.job.proxy.Lock()
	defer w.g.job.proxy.Unlock()
	if !w.closed.Load() && rank < len(w.parts) && w.parts[rank].failure != nil {
		w.parts[rank].failure.add(err)
	}
}

// direct has a network card move the data from or to the memory of the device, when the stream has
// come to that. False: it has not moved all, and the data is to be copied.
func (c *carriage) direct(ctx context.Context) (done bool, err error) {
	w, g := c.w, c.w.g
	e, ok := c.device.(device.Exporter)
	if !ok || c.x.n < leastDirect || c.rank == g.rank || !c.reads && g.devices.blind.Load() {
		return false, nil
	}
	loc := c.device.Location()
	p, err := w.reach(c.name, c.rank, c.offset, c.x.n)
	if err != nil {
		return false, err
	}
	carries := g.msgs.Carries(c.rank, loc, &p.data, c.x.n)
	g.job.proxy.Unlock()
	if !carries {
		return false, nil
	}
	if c.stream != nil {
		event, err := c.stream.Record()
		if err != nil {
			return false, fmt.Errorf("%s: %w", c.name, err)
		}
		if err := c.wait(ctx, c.fails, func() (bool, error) { return reached(event) }); err != nil {
			return false, err
		}
	}
	k, p, err := w.enter(ctx, c.name, c.rank, c.offset, c.x.n)
	if err != nil {
		return false, err
	}
	t, remote, of := w.transfer(), p.data, p.holder() // p may be replaced meanwhile
	local := mem.Device(uint64(c.x.addr), c.x.n, loc)
	if c.reads {
		err = g.msgs.Put(k.wait, t, c.rank, local, &remote, uint64(c.offset), p2p.Signal{}, nil)
	} else {
		err = g.msgs.Get(k.wait, t, c.rank, local, &remote, uint64(c.offset))
	}
	if err == nil {
		c.begun = true
		err = g.msgs.WaitTransfer(k.wait, t)
		p, failed := w.again(c.rank, of), t.Err()
		if c.reads && p != nil && failed != nil && !errors.Is(failed, errors.ErrUnsupported) {
			p.failure.add(failed)
		}
	}
	w.spare = append(w.spare, t)
	if errors.Is(err, errors.ErrUnsupported) {
		return false, k.leave(c.rank, nil)
	}
	if err = k.leave(c.rank, err); err != nil || c.reads || e.Ordered() {
		return err == nil, err
	}
	if err := e.Flush(); err != nil {
		g.devices.blind.Store(true)
		g.job.log.Warn("a device does not see what network cards write: data is copied to its memory from now on",
			"location", loc, "err", err)
		return false, nil
	}
	return true, nil
}

// pieces returns the number of pieces.
func (c *carriage) pieces() int { return (c.x.n + c.piece - 1) / c.piece }

// at returns where piece i is.
func (c *carriage) at(i int) (offset, n int) { return i * c.piece, min(c.piece, c.x.n-i*c.piece) }

// begin begins the visit of the next piece, if there is one, and no more than inFlight others are
// not over.
func (c *carriage) begin(ctx context.Context) error {
	i := len(c.visits)
	if i == c.pieces() {
		return nil
	}
	if i >= inFlight {
		if err := c.free(ctx, c.visits[i-inFlight]); err != nil {
			return err
		}
	}
	at, n := c.at(i)
	o := stay{call: c.name, device: c.device, stream: c.stream, lazy: true, reads: c.reads, writes: !c.reads}
	if x := (span{c.x.addr + uintptr(at), n}); c.reads {
		o.src = x
	} else {
		o.dst = x
	}
	v, err := c.w.g.devices.visit(&o, true)
	if err == nil {
		c.visits = append(c.visits, v)
	}
	return err
}

// free waits until a visit uses its staging buffer no more.
func (c *carriage) free(ctx context.Context, v *visit) error {
	w := c.w
	p := w.g.job.proxy
	if len(v.out) > 0 {
		return c.wait(ctx, c.fails, v.had)
	}
	p.Lock()
	part, err := w.part(c.name, c.rank)
	if err != nil {
		p.Unlock()
		return err
	}
	k, of := w.begin(ctx, c.name), part.holder()
	for w.reap(part); err == nil && !v.over(); {
		if err = w.g.msgs.Err(); err == nil {
			err = p.Progress(k.wait)
		}
		if err == nil {
			if part = w.again(c.rank, of); part == nil {
				err = &p2p.PeerError{Rank: w.g.jobRank(c.rank), Err: p2p.ErrPeerGone}
				break
			}
			w.reap(part)
		}
	}
	return k.leave(c.rank, err)
}

// wait waits for something that the stream does, and returns the call's error: see Group.hold.
func (c *carriage) wait(ctx context.Context, fails func() error, done func() (bool, error)) error {
	err := c.w.g.hold(ctx, fails, func() (ok bool, err error) {
		if ok, err = done(); err != nil {
			err = fmt.Errorf("%s: %w", c.name, err)
		}
		return ok, err
	})
	if err == nil || err != ctx.Err() {
		return err
	}
	return &TimeoutError{Call: c.name + ", whose stream has not come to it", Reporter: c.w.g.rank, in: c.w.g.in,
		Err: expiry(err)}
}

// fails returns why the call would fail if the stream came now, or nil. With the proxy's lock.
func (c *carriage) fails() error {
	w := c.w
	if _, err := w.part(c.name, c.rank); err != nil || c.rank == w.g.rank {
		return err
	}
	if err := w.g.msgs.SendFails(c.rank); err != nil {
		k := call{w: w, name: c.name}
		return k.explain(c.rank, err)
	}
	return nil
}

// putPieces puts the pieces, each while the stream brings the next one.
func (w *Window) putPieces(ctx context.Context, c *carriage) error {
	if err := c.begin(ctx); err != nil {
		return err
	}
	for i := range c.pieces() {
		if err := c.begin(ctx); err != nil {
			return err
		}
		v := c.visits[i]
		if err := c.wait(ctx, c.fails, v.brought); err != nil {
			return err
		}
		at, _ := c.at(i)
		if err := w.put(ctx, c.name, c.rank, c.offset+at, v.from.Bytes(), v, -1, false); err != nil {
			return err
		}
		c.begun = true
		c.given++
	}
	return nil
}

// getPieces gets the pieces, each while the stream fetches the one before.
func (w *Window) getPieces(ctx context.Context, c *carriage) error {
	for i := range c.pieces() {
		if err := c.begin(ctx); err != nil {
			return err
		}
		v := c.visits[i]
		if err := c.wait(ctx, c.fails, v.brought); err != nil {
			return err
		}
		at, _ := c.at(i)
		if err := w.Get(ctx, c.rank, c.offset+at, v.to.Bytes()); err != nil {
			return err
		}
		v.release(v.to.Len())
		v.end()
	}
	for _, v := range c.visits { // all data is here, whatever becomes of the rank
		if err := c.wait(ctx, nil, v.had); err != nil {
			return err
		}
	}
	return nil
}
