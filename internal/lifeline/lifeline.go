// Package lifeline holds the reading end of a pipe that breaks when this process begins to end.
//
// When a process is killed, the kernel frees its memory before it closes its files. For a process
// with a large runtime (PyTorch) this takes some tens of milliseconds, for one with many GiB
// seconds, in which its peers wait for it. A thread with a table of descriptors of its own closes
// them at once: such a thread has the pipe's only writing end. It cannot be one of Go's, which need
// descriptors of the Go runtime; the C library starts it (shim/lifeline.c).
package lifeline

import (
	"os"
	"sync/atomic"
)

var end atomic.Pointer[os.File]

// Set sets the reading end. It is called once, before the first link is made.
func Set(f *os.File) { end.Store(f) }

// File returns the reading end, which does not block, to be passed to peers; nil if there is none.
func File() *os.File { return end.Load() }
