// Package verbs is the RDMA provider of the system's devices: InfiniBand and RoCE cards, and
// Soft-RoCE, by libibverbs.
//
// The library is opened at run time: a program that links this package also starts on a machine
// without it. Load says what is missing. Without cgo, on another system than Linux, or if the
// library's header was missing when the program was built, it is always an error.
//
// # Calls
//
// A chain of requests is written to memory of C that belongs to its queue pair, and posted with one
// call of cgo; completions come with one call for up to rdma.PollBatch of them. Posting and polling
// allocate nothing.
//
// # Events
//
// A goroutine of each device waits for its asynchronous events, and one for the completion events
// of all its completion queues, in the Go runtime's poller: they hold no threads, and a completion
// queue holds no descriptor. An event is acknowledged as soon as it was read, before anything that
// may wait, because the library destroys no object with events that are not acknowledged. The
// goroutines end in Close.
//
// # Quirks
//
// A table of vendors and of the kernel's drivers has the devices that deviate from the standard:
// those of Alibaba's eRDMA and Intel's irdma cannot reset queue pairs. Provider.WithQuirks has
// others treated so.
//
// # Fork
//
// A process that forks shares the pages of its registered memory with its child, and the first
// write of either gives the other a copy that the device does not know. Since Linux 5.12 the kernel
// copies pinned pages in fork, and there is nothing to do: no registration calls madvise. On older
// ones Load calls ibv_fork_init, which must precede every registration, and the first one of a
// range and the end of its last one cost a call of madvise each. ForkSupport says which.
package verbs

import "errors"

// ErrUnavailable says that there is no libibverbs, or that it cannot be used. It is wrapped.
var ErrUnavailable = errors.New("RDMA verbs cannot be used")

// ForkSupport is how registered memory survives a fork.
type ForkSupport string

// Ways.
const (
	ForkByKernel  ForkSupport = "the kernel copies pinned pages"
	ForkByLibrary ForkSupport = "the library excludes registered pages from children"
	ForkNone      ForkSupport = "a process must not fork while memory is registered"
)
