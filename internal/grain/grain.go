// Package grain has the sizes in which package pg divides long operations. Tests make them small,
// so that operations of some kilobytes are divided.
package grain

import "sync/atomic"

// Sizes in bytes; 0 is the default.
type Sizes struct {
	// Block is how much of a vector, or of all parts together, one plan of a collective covers; of
	// each part, where plans cover a chunk of each. All ranks of a group must have the same.
	// Default 8 MiB.
	Block int
	// Piece is the least that is copied at once between a device and the host. Default 4 MiB.
	Piece int
}

var now atomic.Pointer[Sizes]

// Set sets the sizes of the groups that this process makes from now on.
func Set(s Sizes) { now.Store(&s) }

// Get returns the sizes for a new group, without defaults.
func Get() Sizes {
	if s := now.Load(); s != nil {
		return *s
	}
	return Sizes{}
}
