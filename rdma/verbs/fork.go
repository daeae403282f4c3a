package verbs

import (
	"strconv"
	"strings"
)

// What the library says of fork, as its numbers.
const (
	forkUnknown  = -1 // it is too old to say
	forkDisabled = 0
	forkEnabled  = 1
	forkUnneeded = 2
)

// forkCalls are the library's calls that decide how registered memory survives a fork.
type forkCalls struct {
	state func() int
	init  func() error
}

// prepareFork has registered memory survive forks. It changes nothing if the kernel of the release
// copies pinned pages, or if the program has called ibv_fork_init itself.
func prepareFork(lib forkCalls, release string) ForkSupport {
	switch lib.state() {
	case forkUnneeded:
		return ForkByKernel
	case forkEnabled:
		return ForkByLibrary
	case forkUnknown:
		if copiesPinnedPages(release) {
			return ForkByKernel
		}
	}
	if lib.init() != nil {
		return ForkNone
	}
	return ForkByLibrary
}

// copiesPinnedPages reports whether the kernel of a release copies pinned pages in fork.
func copiesPinnedPages(release string) bool {
	major, rest, _ := strings.Cut(release, ".")
	digits := 0
	for digits < len(rest) && rest[digits] >= '0' && rest[digits] <= '9' {
		digits++
	}
	a, err := strconv.Atoi(major)
	b, err2 := strconv.Atoi(rest[:digits])
	return err == nil && err2 == nil && (a > 5 || a == 5 && b >= 12)
}
