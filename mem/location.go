// Package mem describes memory: where it is, how large it is, and what a peer may do with it.
//
// A [Memory] is a range at a [Location]. Host memory has bytes; device memory has an address that
// only its device can use. A [Region] is memory that is registered with the transports of this
// process. A [Remote] describes a region of another process in a small message; its [Rights] say
// what a peer may do.
//
// The package does no I/O, starts no goroutine and imports no other package of this module.
package mem

import (
	"fmt"
	"strconv"
	"strings"
)

// Location is where memory is: "*" (host memory without a preference), "cpu:N" (NUMA node N) or
// "cuda:N" (GPU N).
type Location string

// Anywhere is the wildcard location. Control, sync and warm-up memory always has it.
const Anywhere Location = "*"

// Host reports whether l is a location of host memory.
func (l Location) Host() bool { return l == Anywhere || strings.HasPrefix(string(l), "cpu:") }

// Validate returns an error that lists the valid forms if l has none of them.
func (l Location) Validate() error {
	if l == Anywhere {
		return nil
	}
	if kind, n, ok := strings.Cut(string(l), ":"); ok && (kind == "cpu" || kind == "cuda") {
		if i, err := strconv.Atoi(n); err == nil && i >= 0 && strconv.Itoa(i) == n {
			return nil
		}
	}
	return fmt.Errorf("location %q: want \"*\", \"cpu:N\" or \"cuda:N\"", string(l))
}
