package rma

import (
	"errors"
	"fmt"
	"slices"

	"tutti/mem"
)

// Mover is a link that can move the data of puts and gets by itself, without frames and without the
// peer's processor. Frames asks it for every operation, and sends the signal of a put after its
// data has been moved. Its methods follow the rules of p2p.Link; Link.Arm returns true, or a wake
// follows, when Moved has something to return.
type Mover interface {
	// Move begins to move the data of m. False: frames have to carry it or, if m.Local is a
	// device's, the caller.
	Move(m *Move) bool
	// Moved makes progress, and returns a move that has ended, nil if there is none.
	Moved() *Move
	// Drop ends a move, also after the link has failed. When it returns, the local memory is not
	// used any more; a part of the data may have been moved. Moved does not return m. It may block
	// for the time that it takes to end a queue of a device. This is so unless the device does not
	// end it within a bound that the transport sets: then it may still use the memory, and the
	// transport logs that as an error.
	Drop(m *Move)
}

// Move is the data of a put or a get. A Mover uses it until Moved returns it.
type Move struct {
	Read       bool // from the peer's memory to Local; else from Local
	Local      mem.Memory
	Region     uint64 // of the peer
	Generation uint64
	Offset     uint64 // in the exposed range
	// OK is set when all data is in its place. Otherwise a part of it may be, nothing of the move
	// will change any memory any more, and the data is carried otherwise: see Mover.Move.
	OK bool
}

// offer offers an operation that has not begun to the mover, once. It reports whether the mover has
// it.
func (f *Frames) offer(o *frameOp) bool {
	if f.mover == nil || o.framed || o.begun || o.moved > 0 || o.local.Len() == 0 {
		return false
	}
	o.framed = true
	o.move = Move{Read: o.kind == opGet, Local: o.local, Region: o.to.ID, Generation: o.to.Generation, Offset: o.off}
	if o.moving = f.mover.Move(&o.move); o.moving {
		f.moving++
	}
	return o.moving
}

// stuck reports whether the data of an operation has to be in frames, which do not carry it: it is
// memory of a device.
func (o *frameOp) stuck() bool { return !o.local.Loc().Host() && o.moved < o.local.Len() }

// errStuck is the error of an operation that is stuck.
func (o *frameOp) errStuck() error {
	return fmt.Errorf("%s of %d bytes of memory at %s, which no RDMA device moves now: %w", o.kind, o.local.Len(),
		o.local.Loc(), errors.ErrUnsupported)
}

// land takes the moves that have ended. A put with a signal goes on with that, and one whose data
// was not moved with frames.
func (f *Frames) land() {
	for f.moving > 0 {
		m := f.mover.Moved()
		if m == nil {
			return
		}
		o := f.queue[slices.IndexFunc(f.queue, func(o *frameOp) bool { return &o.move == m })]
		o.moving = false
		f.moving--
		f.stalled = 0
		if !m.OK {
			continue
		}
		if o.moved = o.local.Len(); o.kind == opGet || o.word.ID == 0 {
			f.unqueue(o)
			f.complete(o, nil)
		}
	}
}

// drop ends the move of an operation, if there is one.
func (f *Frames) drop(o *frameOp) {
	if o.moving {
		f.mover.Drop(&o.move)
		o.moving = false
		f.moving--
	}
}
