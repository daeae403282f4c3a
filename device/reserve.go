package device

import (
	"errors"

	"tutti/kernels"
)

// A Reserver is a Device whose streams hold places for work that is chosen later. So another
// goroutine gives a stream work in the middle of what its program has given it, and the program
// does not wait.
type Reserver interface {
	// Reserves reports whether streams of the device can have places at all.
	Reserves() bool
	// Reserve gives s, a stream of the device, places, and returns a stream whose work is done in
	// them, in the order of s. Until it is closed, s waits in each place for work.
	//
	// The stream takes Copy, Reduce, WriteValue and Record, with memory of the device and of
	// AllocHost only. A Reduce has a place. Copies that follow each other share one, up to
	// MaxPlaceCopies, unless one of them writes what another one reads or writes. A WriteValue has
	// the place of the work before it. Record, and work that needs the next place, give a place to
	// s, as WriteValue does. What was not given to s is never done. Where no place is left, and for
	// other work than the places are for, the error wraps ErrPlaces. Close may be called by any
	// goroutine, and does not wait: s passes the places that are left, and events remain valid. If
	// s is closed, the stream refuses work with ErrClosed. Record has an event also then: it is
	// done when s has done the places that it was given.
	//
	// Reserve waits while the driver of s takes no more work. Its error wraps
	// errors.ErrUnsupported if s cannot have places, because it records its work for example.
	Reserve(s Stream, p Places) (Stream, error)
}

// Places are what Reserve reserves.
type Places struct {
	N     int // places
	Bytes int // that the work of a place writes at most; more take longer
	// Op and DType are those of the reductions. Op 0: there are none. Avg and Sum are one for this.
	Op    kernels.Op
	DType kernels.DType
}

// The limits of a place.
const (
	MaxPlaceSources = 48 // of a reduction
	MaxPlaceCopies  = 16
)

// ErrPlaces says that a stream has no place for the work, wrapped.
var ErrPlaces = errors.New("no place is left for this work")
